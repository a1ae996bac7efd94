"""Vocabulary parallelism: the loss over logits that no rank holds whole
=====================================================================

**Question.** A language model ends in logits, one per token and word of the vocabulary, and they
are its largest tensor. Tensor parallelism splits the head's matrix over ranks. How do the ranks
compute the loss without any of them ever holding the logits of all words?

**Predict**, and write it down before you run. There are N tokens, and n ranks. The vocabulary has V
entries, here called words. Each rank computes the logits of its own V/n words.

1. A rank that gathers the logits receives V numbers for each token. Say that the ranks compute the
   loss together instead, by all-reduces of sums and maxima. How many numbers for each token go into
   these?
2. A rank that gathers keeps V numbers for each token until the backward pass, one per logit. How
   many does it keep if 4 ranks compute the loss of 100 words together? (Two of them are about the
   right word: where its logit is, and whether this rank has it.)
3. How many all-reduces does this loss need in its backward pass?
4. The vocabulary is padded with rows that stand for no word, so that n divides it. If all logits
   are 0, the loss over 97 words is log 97 = 4.575. What is it on four ranks, if the loss does not
   know which rows are padding?

**Run.**

    torchrun --standalone --nproc-per-node=4 18_vocabulary_parallel.py   # NCCL on 4 GPUs, else gloo
    python 18_vocabulary_parallel.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `VocabularyParallelLoss.forward` leave out the all-reduce with MAX, so that every rank
subtracts its own maximum: what fails, the loss, the gradients or both? Put it back, and leave out
`.where(mine_N, 0)`: what fails now?

**Before.** parallelism/06_tensor_parallel.py: column-parallel layers, and why the gradient of their
input is a sum over ranks.

**Next.** parallelism/07_pipeline_schedules.py: cut the stack of layers instead.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: N tokens of all sequences, D model width, V words with padding, v = V / n of this rank.
N, D = 48, 16
WORDS = 97  # n divides it for no number of ranks but 1 and 97
V = math.ceil(WORDS / WORLD_SIZE) * WORLD_SIZE  # with padding

# %% [markdown]
# ## 1. The idea: three numbers per token
#
# Llama 3 8B has V = 128,256 words. For 8,192 tokens its logits have a billion elements: 2.1 GB in
# bfloat16. A loss is computed in float32, and `F.cross_entropy` then holds that copy of the logits,
# their log-softmax and their gradient: 4.2 GB each. Under tensor parallelism the head is a
# **column-parallel** layer, so each rank computes the logits of its own V/n words. The obvious next
# step is the mistake: gather them, and call `F.cross_entropy`.
#
# The loss of one token needs little of its logits z: the one of the right word y, and the sum over
# all words of their exponentials. The largest z is subtracted first, so that none overflows:
#
#     loss  =  - log softmax(z)_y  =  log( sum over all words w of exp(z_w - max) )  -  (z_y - max)
#
# Each of four ranks has 25 words. Here the right word is one of rank 1's:
#
#                            1. max             2. right           3. sum
#     rank 0, words 0-24     its largest z      0                  its sum of exp(z - max)
#     rank 1, words 25-49    its largest z      z_y - max          its sum of exp(z - max)
#     rank 2, words 50-74    its largest z      0                  its sum of exp(z - max)
#     rank 3, words 75-99    its largest z      0                  its sum of exp(z - max)
#                            -------------      -------------      -----------------------
#     all-reduce             the largest        added up           added up
#
# Each rank hands over three numbers per token, whatever V is.
#
# **Backward** nothing is sent. The gradient of the loss in z_w is the word's probability, less 1
# for the right word:
#
#     d loss / d z_w  =  exp(z_w - max) / sum  -  (1 if w = y else 0)
#
# The sum has come forward, so every rank has all it needs for its own words. It keeps their
# probabilities, V / n numbers for each token, and two more: the row of the right word, and whether
# that row is its own.
#
# One thing in the code is there to save memory: z, its exponential, the probability and the
# gradient are one tensor, which is overwritten step by step. Its name says what it holds. The price
# is that backward can run only once.


# %%
class VocabularyParallelLoss(torch.autograd.Function):
    """Cross-entropy of each token, (N,), from this rank's logits (N, v) and the right words (N,).

    `words` is how many there are; logits from there on are padding.
    """

    @staticmethod
    def forward(
        ctx: object, logits_Nv: torch.Tensor, word_N: torch.Tensor, words: int
    ) -> torch.Tensor:
        v = logits_Nv.shape[1]
        z_Nv = at_least_float32(logits_Nv)  # a copy, since it is overwritten below
        z_Nv[:, max(words - RANK * v, 0) :] = -math.inf  # padding: section 2

        # 1. max: the largest z of each token
        max_N = z_Nv.max(dim=1).values
        dist.all_reduce(max_N, op=dist.ReduceOp.MAX)
        z_Nv -= max_N[:, None]

        # 2. right: z_y - max on the rank that has word y, 0 on all others
        row_N, mine_N = local_rows(word_N, v)
        right_N = z_Nv.gather(1, row_N[:, None])[:, 0].where(mine_N, 0)
        dist.all_reduce(right_N)

        # 3. sum: of the exponentials, which take the place of z
        exp_Nv = z_Nv.exp_()
        sum_N = exp_Nv.sum(dim=1)
        dist.all_reduce(sum_N)

        probability_Nv = exp_Nv.div_(sum_N[:, None])
        ctx.save_for_backward(probability_Nv, row_N, mine_N)
        return sum_N.log() - right_N

    @staticmethod
    def backward(ctx: object, grad_N: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad_Nv, row_N, mine_N = ctx.saved_tensors  # grad_Nv: still the probabilities
        token_N = torch.arange(len(row_N), device=row_N.device)
        grad_Nv[token_N, row_N] -= mine_N.to(grad_Nv.dtype)  # 1 for the right word, if it is here
        grad_Nv *= grad_N[:, None]  # what follows the loss: a mean, weights of tokens
        return grad_Nv, None, None


def local_rows(word_N: torch.Tensor, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each word's row on this rank, and which words are ours; the others' row is 0."""
    row_N = word_N - RANK * v
    mine_N = (row_N >= 0) & (row_N < v)
    return row_N.where(mine_N, 0), mine_N


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Return a copy: bfloat16, with 8 significant bits, is too coarse for sums over V words."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


# %% [markdown]
# ## 2. Padding
#
# n rarely divides the number of words, so the head's matrix is **padded** with rows that stand for
# no word. (Megatron pads to a multiple of 128 n, for the sake of fast products as well.) The head
# computes logits for them, and a softmax that counts them gives them probability. So the loss sets
# them to minus infinity: their exponential is 0, and so is their gradient.

# %% [markdown]
# ## 3. The other end: the embedding
#
# No question is about this section. The embedding is a table of the same V rows, split in the same
# way. A rank looks up the words that it has and takes zeros for all others, and the sum over ranks
# is the whole look-up. Backward each rank keeps what belongs to its own rows. So one all-reduce
# does for both passes.


# %%
def embedding(word_N: torch.Tensor, table_vD: torch.Tensor) -> torch.Tensor:
    """Look up words (N,) in a table of which this rank has v rows: (N, D), the same on all."""
    row_N, mine_N = local_rows(word_N, len(table_vD))
    x_ND = F.embedding(row_N, table_vD) * mine_N[:, None]
    dist.all_reduce(x_ND.detach())  # in place, unseen by autograd: backward is the identity
    return x_ND


# %% [markdown]
# ## 4. How it is measured
#
# The oracle is one process in float64: whole tables without padding, `F.cross_entropy`,
# `F.embedding`. All-reduces are noted beneath torch's dispatcher, by how many elements each has.
# What the loss keeps is seen by the hooks that autograd calls for each tensor that it saves.
# Elements are counted, of whatever dtype.

# %%
TOLERANCE = 10 * V * 2**-53  # some ten sums of at most V terms, in another order


class AllReduces(TorchDispatchMode):
    """Notes the elements of each all-reduce in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.allreduce_.default:
            self.elements.append(sum(tensor.numel() for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def drawn(*shape: int, device: torch.device) -> torch.Tensor:
    """Random numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def drawn_words(device: torch.device) -> torch.Tensor:
    """N words, the same on every rank; the first and the last word are among them."""
    words = torch.randint(WORDS, [N - 2], generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([0, WORDS - 1, *words], device=device)


def my_rows(whole: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's rows of a table, which autograd follows."""
    return whole.chunk(WORLD_SIZE)[RANK].clone().requires_grad_()


def all_rows(mine_vD: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks without padding."""
    parts = [torch.empty_like(mine_vD) for _ in range(WORLD_SIZE)]
    dist.all_gather(parts, mine_vD)
    return torch.cat(parts)[:WORDS]


# %% [markdown]
# A head and its loss, whose tokens count unequally, and then the embedding:


# %%
def check_loss(device: torch.device) -> None:
    """Claim loss and gradients against one process."""
    table_VD = drawn(V, D, device=device)
    word_N = drawn_words(device)
    weight_N = torch.linspace(0, 1, N, device=device, dtype=torch.float64)

    x_ND = drawn(N, D, device=device).requires_grad_()
    head_vD = my_rows(table_VD)
    loss_N = VocabularyParallelLoss.apply(x_ND @ head_vD.T, word_N, WORDS)
    (weight_N * loss_N).sum().backward()
    dist.all_reduce(x_ND.grad)  # as before any column-parallel layer

    whole_x_ND = x_ND.detach().clone().requires_grad_()
    whole_head = table_VD[:WORDS].clone().requires_grad_()
    due_N = F.cross_entropy(whole_x_ND @ whole_head.T, word_N, reduction="none")
    (weight_N * due_N).sum().backward()

    claim("error of the loss", 0, relative_error(loss_N.detach(), due_N.detach()), atol=TOLERANCE)
    error = relative_error(all_rows(head_vD.grad), whole_head.grad)
    claim("error of the head's gradient", 0, error, atol=TOLERANCE)
    error = relative_error(x_ND.grad, whole_x_ND.grad)
    claim("error of its input's gradient", 0, error, atol=TOLERANCE)


def check_embedding(device: torch.device) -> None:
    """Claim the look-up and its gradient against one process, and one all-reduce for both."""
    table_VD = drawn(V, D, device=device)
    word_N = drawn_words(device)
    grad_ND = drawn(N, D, device=device)
    mine_vD = my_rows(table_VD)
    with AllReduces() as seen:
        x_ND = embedding(word_N, mine_vD)
        x_ND.backward(grad_ND)
    whole = table_VD[:WORDS].clone().requires_grad_()
    due_ND = F.embedding(word_N, whole)
    due_ND.backward(grad_ND)
    claim("embedding: error", 0, relative_error(x_ND.detach(), due_ND.detach()))
    error = relative_error(all_rows(mine_vD.grad), whole.grad)
    claim("embedding: error of the gradient", 0, error, atol=TOLERANCE)
    claim("embedding: all-reduces, both ways", 1, len(seen.elements))


# %% [markdown]
# What the loss sends and keeps:


# %%
def check_costs(device: torch.device) -> None:
    logits_Nv = drawn(N, V, device=device).chunk(WORLD_SIZE, dim=1)[RANK].clone().requires_grad_()
    kept = []
    with AllReduces() as seen, saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss_N = VocabularyParallelLoss.apply(logits_Nv, drawn_words(device), WORDS)
    claim("loss: numbers compared or added, per token", 3, sum(seen.elements) / N, question=1)
    numbers = sum(x.numel() for x in kept)
    claim("loss: numbers kept, per token", V / WORLD_SIZE + 2, numbers / N, question=2)
    with AllReduces() as seen:
        loss_N.sum().backward()
    claim("loss: all-reduces backward", 0, len(seen.elements), question=3)


# %% [markdown]
# Logits of zero make all words equally likely, so the loss must be the logarithm of their number.
# And logits of a thousand overflow if nothing is subtracted.


# %%
def check_padding(device: torch.device) -> None:
    zeros_Nv = torch.zeros(N, V // WORLD_SIZE, device=device, dtype=torch.float64)
    word_N = drawn_words(device)
    loss_N = VocabularyParallelLoss.apply(zeros_Nv, word_N, V)
    claim("padding counted: the loss of zeros", math.log(V), loss_N.mean(), atol=1e-12, question=4)
    loss_N = VocabularyParallelLoss.apply(zeros_Nv, word_N, WORDS)
    claim("padding masked: the loss of zeros", math.log(WORDS), loss_N.mean(), atol=1e-12)
    loss_N = VocabularyParallelLoss.apply(zeros_Nv + 1000 * (RANK == 0), word_N, WORDS)
    claim("a thousand on rank 0: losses not finite", 0, (~loss_N.isfinite()).sum())


# %% [markdown]
# ## 5. The same in PyTorch: `loss_parallel`
#
# In its block `F.cross_entropy` takes logits that are a DTensor split along the last dimension and
# does the same. The backward pass must run inside the block as well.


# %%
def check_torch(device: torch.device) -> None:
    """Claim that PyTorch's gives the same loss and gradient, with as many all-reduces."""
    word_N = drawn_words(device)
    mine_Nv = drawn(N, V, device=device).chunk(WORLD_SIZE, dim=1)[RANK].clone().requires_grad_()
    ours = VocabularyParallelLoss.apply(mine_Nv, word_N, V).mean()
    ours.backward()
    mesh = dist.init_device_mesh(device.type, (WORLD_SIZE,))
    theirs_Nv = mine_Nv.detach().clone().requires_grad_()
    with loss_parallel(), CommDebugMode() as counter:
        loss = F.cross_entropy(DTensor.from_local(theirs_Nv, mesh, [Shard(1)]), word_N)
        loss.backward()
    error = relative_error(ours.detach(), loss.detach().to_local())
    claim("loss_parallel: difference of the loss", 0, error, atol=TOLERANCE)
    error = relative_error(mine_Nv.grad, theirs_Nv.grad)
    claim("loss_parallel: difference of the gradient", 0, error, atol=TOLERANCE)
    calls = counter.get_total_counts()
    claim("loss_parallel: collectives", 3, calls)


# %% [markdown]
# ## 6. On GPUs: the memory of Llama 3 8B's loss
#
# As many logits as Llama 3 8B has for 8,192 tokens, in float32: what the allocator holds at its
# peak for the loss and its gradient, on top of a rank's own logits. Split, it is as much again,
# since exponentials, probabilities and gradient take turns in one tensor. Gathered, it is several
# times the logits of all words, and only printed.


# %%
def peak_of(loss_of: Callable, logits_Nv: torch.Tensor) -> float:
    """Bytes that a forward and a backward pass of the loss allocate at their peak."""
    logits_Nv = logits_Nv.detach().requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss_of(logits_Nv).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_on_gpus(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked("peak of the loss / its logits, in bytes", needs="2 GPUs")
        return
    v = 128_256 // WORLD_SIZE
    logits_Nv = torch.randn(8192, v, device=device)
    word_N = torch.randint(v * WORLD_SIZE, [8192], device=device)

    def split(mine_Nv: torch.Tensor) -> torch.Tensor:
        return VocabularyParallelLoss.apply(mine_Nv, word_N, v * WORLD_SIZE).mean()

    def gathered(mine_Nv: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(mine_Nv) for _ in range(WORLD_SIZE)]
        dist.all_gather(parts, mine_Nv.detach())
        parts[RANK] = mine_Nv
        return F.cross_entropy(torch.cat(parts, dim=1), word_N)

    whole = peak_of(gathered, logits_Nv)
    peak = peak_of(split, logits_Nv)
    print0(f"{'':13}peak of the loss, GB: {peak / 1e9:.1f} split, {whole / 1e9:.1f} gathered")
    claim("peak of the loss / its logits, in bytes", 1, peak / logits_Nv.nbytes, atol=0.05)


# %% [markdown]
# ## What you should have seen
#
# 1. Three: a maximum, the logit of the right word, and the sum of exponentials. Gathered it would
#    be V of them, 100 here and 128,256 for Llama 3. (The two sums may share one message.)
# 2. V / n + 2, here 27: the probabilities of its own 25 words, the row of the right word, and
#    whether it is ours. The gradient takes the probabilities' place.
# 3. None: the sum that its probabilities need has come forward. The layers around it do need one
#    each: the head's input feeds all ranks, so its gradient is added up backward, and the look-up
#    of the embedding is added up forward. Both have N D elements.
# 4. log 100 = 4.605. Three rows of padding take 3% of the probability. Training pushes their logits
#    down soon, so nobody notices. But the loss is not comparable to that of another number of
#    ranks, which pads another number of rows.
#
# **Try.** With a maximum of its own on every rank, the exponentials that are added up are relative
# to different numbers. Loss and gradients are wrong, and a rank hands over only two numbers per
# token. On four ranks nothing overflows, so the row of a thousand passes. Without
# `.where(mine_N, 0)` each rank adds its row 0 for every word that it does not have. The loss is
# wrong and its gradient is right, since the right logit serves the loss alone: training would go
# well, and report nonsense.
#
# **On GPUs.** With 8 ranks the logits of 8,192 tokens shrink from 4.2 GB to 0.5 GB in float32. The
# three all-reduces have 33 kB each, so they cost latency, not bandwidth. The head's product takes
# about 3 ms on each of 8 ranks (1.1 TFLOP at 400 TFLOP/s). The other way to less memory is to take
# a chunk of tokens at a time, and to compute its gradients at once (Liger) or its logits again
# backward (Cut Cross-Entropy, in blocks of words too). It needs no second GPU, and both ways can be
# combined.
#
# **When to use it.** Whenever the head is split. By rings a rank sends (n-1)/n V numbers per token
# to gather, and 2 (n-1)/n x 3 for the three all-reduces. So gathering costs V / 6 times the bytes,
# or V / 12 if the logits are bfloat16 and the sums float32. Without tensor parallelism the
# vocabulary can still be split, over pipeline stages (Yeung et al., 2024), where the head makes the
# last stage the slowest.
#
# **In other systems.** Megatron-LM has `VocabParallelEmbedding` and `vocab_parallel_cross_entropy`,
# whose three all-reduces are the ones here. torchtitan splits the head by `ColwiseParallel` and
# uses `loss_parallel`. If head and embedding are one matrix (**tied**), each rank's rows serve
# both. In a pipeline the first and the last stage hold them and have to add up their gradients.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_costs(device)
    check_loss(device)
    check_padding(device)
    check_embedding(device)
    if WORLD_SIZE == 1:
        blocked("loss_parallel", needs="2 ranks")
    else:
        check_torch(device)
    measure_on_gpus(device)
    finish()


# %% [markdown]
# ## Plumbing, the same in every lesson: join the group, print, check a claim, leave

# %%
ledger: list[dict] = []  # one row per claim, the same on every rank


def command_line(flags: dict[str, dict] | None = None) -> argparse.Namespace:
    """Read the flags, given as {name: arguments of add_argument}; --help and mistakes end here."""
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    for name, arguments in (flags or {}).items():
        parser.add_argument(name, **arguments)
    parser.error = refuse
    return parser.parse_args()


def launch(world_sizes: range | list[int] = range(1, 1025)) -> None:
    """Plain `python lesson.py`: be torchrun, one rank per GPU if there are several, else 4.

    `world_sizes` are the numbers of ranks that the lesson takes: it gets the largest that fits.
    """
    if "RANK" in os.environ:
        return  # torchrun has started this rank
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    gpus = torch.cuda.device_count()
    ranks = max(size for size in world_sizes if size <= gpus) if gpus > 1 else 4
    os.environ |= {"LAUNCHER": str(os.getpid()), "OMP_NUM_THREADS": "1"}  # ranks share the cores
    logging.disable()  # the rank that fails says why
    here = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    try:
        with tempfile.TemporaryDirectory() as logs:  # the one that torchrun makes would stay
            torchrun([*here, f"--log-dir={logs}", *sys.argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {failure.signal_name()}" if failure.exitcode < 0 else 1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit()


def setup() -> torch.device:
    """Join the process group: NCCL if every rank has a GPU of its own, gloo if none has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the launcher
    if os.environ.pop("LAUNCHER", str(os.getppid())) != str(os.getppid()):
        sys.exit(1)  # it was killed before that line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    torch.set_float32_matmul_precision("highest")  # some images make TF32 the default
    gpus = torch.cuda.device_count()
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    some = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    how = f"gloo ({local_ranks} ranks and {some} here)"
    if gpus >= local_ranks:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        version = ".".join(map(str, torch.cuda.nccl.version()))
        how = f"NCCL {version} on {torch.cuda.get_device_name()}"
    patience = timedelta(minutes=2)
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    store.set(f"device of {RANK}", device.type)
    devices = store.multi_get([f"device of {rank}" for rank in range(WORLD_SIZE)])
    if len(set(devices)) > 1:
        counted = f"GPUs for {devices.count(b'cuda')} of {WORLD_SIZE} ranks"
        refuse(f"needs a GPU per rank, or none, got {counted}; hide all by CUDA_VISIBLE_DEVICES=")
    group = {"rank": RANK, "world_size": WORLD_SIZE, "store": store, "timeout": patience}
    own_gpu = device if device.type == "cuda" else None
    dist.init_process_group("nccl" if own_gpu else "gloo", device_id=own_gpu, **group)
    sys.excepthook = crash  # only now: init_process_group sets one of its own
    print0(f"{WORLD_SIZE} ranks, {how}, torch {torch.__version__}\n")
    print0(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
    return device


def print0(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def refuse(rule: str) -> None:
    """End before the first collective with one message, from rank 0: rule, value, remedy."""
    if RANK != 0:
        time.sleep(30)  # the launcher ends us meanwhile
    sys.exit(f"{sys.argv[0]}: {rule}")


def crash(*error: object) -> None:
    """Leave without ceremony, since peers may be stuck. The first rank that fails says why."""
    first = dist.distributed_c10d._get_default_store().add("crashes", 1) == 1
    time.sleep(1 if first else 30)  # the launcher ends us meanwhile, if a peer's death is the cause
    print(f"rank {RANK}:", file=sys.stderr)
    sys.__excepthook__(*error)
    os._exit(1)


def claim(
    text: str,
    predicted: float,
    measured: float,
    sign: str = "=",
    atol: float = 0.0,
    question: int | None = None,
    kind: str = "measured",
    timed: bool = False,
    varies: bool = False,
    rank: int | None = None,
) -> None:
    """Check `measured sign predicted` (=, <=, >=), give or take `atol`, on all ranks; all call.

    The worst rank is shown, or `rank`. `question` is the number in *Predict* that this answers.
    `kind` says what was measured: the real thing, or what is "simulated", or "theory". `timed` says
    that a clock decides; `varies`, that the kernel's own traffic does, or how well a model learns.
    """
    p = float(predicted)
    m = float(measured)
    error = {"=": abs(m - p), "<=": m - p, ">=": p - m}[sign] - atol
    found = [(math.inf if math.isnan(error) else error, RANK, p, m, float(atol))]
    if dist.is_initialized():
        found *= WORLD_SIZE
        dist.all_gather_object(found, found[0])
    worst = max(found, key=lambda one: one[0]) if rank is None else found[rank]
    error, rank, p, m, slack = worst
    verdict = "PASS" if error <= 0 else "FAIL"
    mark = {"measured": " ", "simulated": "s", "theory": "t"}[kind]
    answers = f"{question}." if question else ""
    between = f"{sign:>2} {readable(p)}" + (f" ±{slack:.2g}" if slack else "")
    print0(f"  {verdict} {mark}  {answers:2} {text:50} {between:22} {readable(m):>11}")
    if verdict == "FAIL":
        print0(f"{'':13}off by {m - p:.3g} on rank {rank}")
    row = {"claim": text, "verdict": verdict, "sign": sign, "rank": rank, "slack": slack}
    row |= {"predicted": p, "measured": m if math.isfinite(m) else str(m)}  # JSON knows no NaN
    row |= {"question": question, "kind": kind, "timed": timed, "varies": varies}
    ledger.append(row | {"line": sys._getframe(1).f_lineno})


def readable(x: float) -> str:
    """Whole numbers in full, others to six digits."""
    return f"{x:,.0f}" if x.is_integer() and abs(x) < 1e12 else f"{x:,.6g}"


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    print0(f"  BLOCKED    {text:50} needs {needs}")
    row = {"claim": text, "verdict": "BLOCKED", "needs": needs}
    ledger.append(row | {"line": sys._getframe(1).f_lineno})


def finish() -> None:
    """Write the ledger where LESSON_JSON says; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    counts = Counter((row.get("kind"), row["verdict"]) for row in ledger)
    said = f"{counts['measured', 'PASS']} PASS, {counts['measured', 'FAIL']} FAIL"
    said += f", {counts[None, 'BLOCKED']} BLOCKED"
    for kind in ("simulated", "theory"):  # apart from what was measured
        passed = counts[kind, "PASS"]
        failed = counts[kind, "FAIL"]
        said += f"; {kind} ({kind[0]}): {passed} PASS, {failed} FAIL" if passed + failed else ""
    print0(f"\n  {said}")
    verdicts = {row["verdict"] for row in ledger}
    if verdicts == {"BLOCKED"}:
        print0("  Nothing could be checked: BLOCKED rows say what they need.")
    if RANK == 0 and "LESSON_JSON" in os.environ:
        with open(os.environ["LESSON_JSON"], "w") as file:
            json.dump({"ranks": WORLD_SIZE, "ledger": ledger}, file, indent=1)
    code = int("FAIL" in verdicts or "PASS" not in verdicts)
    if __name__ == "__main__":
        os._exit(code)  # threads of a group that something still holds can abort a plain exit
    sys.exit(code)


if __name__ == "__main__":
    main()
