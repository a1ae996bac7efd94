"""Vocabulary parallelism: an embedding, a head and a loss that no rank holds whole
================================================================================

**Question.** A language model ends in logits, one per token and word of the vocabulary, and they
are its largest tensor. Tensor parallelism splits the head's matrix over ranks. How do the ranks
compute the loss without any of them ever holding the logits of all words?

**Predict**, and write it down before you run. N tokens, V words, n ranks, each of which holds V/n
rows of the embedding and of the head.

1. A rank that gathers the logits receives V numbers for each token. How many numbers for each token
   do the ranks have to add up, or compare, if they compute the loss together?
2. A rank that gathers keeps N V numbers until the backward pass, one per logit. How many does it
   keep if the ranks compute the loss together?
3. How many all-reduces does the embedding need, forward and backward together?
4. The vocabulary is padded with rows that stand for no word, so that n divides it. If all logits
   are 0, the loss over 97 words is log 97 = 4.575. What is it on four ranks, if the loss does not
   know which rows are padding?

**Run.**

    torchrun --standalone --nproc-per-node=4 18_vocabulary_parallel.py   # NCCL on 4 GPUs, else gloo
    python 18_vocabulary_parallel.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `VocabularyParallelLoss.forward` leave out the all-reduce with MAX, so that every rank
subtracts its own maximum: what fails, and is it the loss or the gradient? In
`VocabularyParallelEmbedding` leave out the product with `mine`: what fails now?

**Before.** parallelism/06_tensor_parallel.py: f and g, columns and rows.

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
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# Shapes: N tokens of all sequences, D model width, V words, v rows of this rank.
N, D = 48, 16
WORDS = 97  # n divides it for no number of ranks but 1 and 97
V = math.ceil(WORDS / WORLD_SIZE) * WORLD_SIZE  # with padding

# %% [markdown]
# ## 1. The largest tensor of a language model
#
# Llama 3 8B has V = 128,256 words. For 8,192 tokens the logits have a billion elements: 2.1 GB in
# bfloat16, and 4.2 GB once more in float32 for the softmax and its gradient. A layer of the same
# model keeps 1.1 GB for its backward pass. Under tensor parallelism the head is a
# **column-parallel** layer, so each rank computes the logits of its own V/n words. The obvious next
# step is the mistake: gather them, and call `F.cross_entropy`.
#
# The loss of one token needs little of its logits z: the one of the right word y, and the sum over
# all words of their exponentials, less a maximum so that none overflows:
#
#     loss  =  log( sum over all words w of exp(z_w - max) )  -  (z_y - max)
#
#     rank 0     z of words 0 to 24      its largest z    sum of exp(z - max)    0
#     rank 1     z of words 25 to 49     its largest z    sum of exp(z - max)    z_y - max, its word
#     rank 2     z of words 50 to 74     its largest z    sum of exp(z - max)    0
#     rank 3     z of words 75 to 99     its largest z    sum of exp(z - max)    0
#                                        max of all       add                    add
#
# So three numbers per token cross the wire, whatever V is. Backward the loss sends nothing: the
# gradient of z_w is exp(z_w - max) / sum, less 1 for w = y, times the gradient of the loss. Every
# rank has all it needs for its own words.


# %%
class VocabularyParallelLoss(torch.autograd.Function):
    """Cross-entropy of each token, (N,), from this rank's logits (N, v) and the words (N,)."""

    @staticmethod
    def forward(
        ctx: object, logits_Nv: torch.Tensor, word_N: torch.Tensor, first: int
    ) -> torch.Tensor:
        most_N = logits_Nv.max(dim=1).values
        dist.all_reduce(most_N, op=dist.ReduceOp.MAX)
        shifted_Nv = logits_Nv - most_N[:, None]
        local_N, mine_N = local_rows(word_N, first, logits_Nv.shape[1])
        right_N = shifted_Nv.gather(1, local_N[:, None])[:, 0].where(mine_N, 0)
        dist.all_reduce(right_N)
        probability_Nv = shifted_Nv.exp_()
        total_N = probability_Nv.sum(dim=1)
        dist.all_reduce(total_N)
        probability_Nv /= total_N[:, None]
        ctx.save_for_backward(probability_Nv, local_N, mine_N)
        return total_N.log() - right_N

    @staticmethod
    def backward(ctx: object, grad_N: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad_Nv, local_N, mine_N = ctx.saved_tensors
        token_N = torch.arange(len(local_N), device=local_N.device)
        grad_Nv[token_N, local_N] -= mine_N.to(grad_Nv.dtype)
        return grad_Nv.mul_(grad_N[:, None]), None, None


def local_rows(word_N: torch.Tensor, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each word's row on this rank, 0 for words of other ranks, and which words are ours."""
    local_N = word_N - first
    mine_N = (local_N >= 0) & (local_N < rows)
    return local_N * mine_N, mine_N


# %% [markdown]
# The loss keeps the probabilities, N V / n numbers, and two more for each token: its row, and
# whether it is ours. Backward the gradient takes the place of the probabilities, in the same
# memory.

# %% [markdown]
# ## 2. The embedding: rows of one rank, zeros of the others
#
# The embedding is a table of the same V rows, split in the same way. A rank looks up the words that
# it has, takes zeros for all others, and the sum over ranks is the whole look-up: g, an all-reduce
# of N D elements. Backward every rank has the gradient of the sum and keeps what belongs to its own
# rows. In front of the head stands f, as before any column-parallel layer: the head's input feeds
# all ranks, so its gradient is a sum over ranks. (f and g are those of the lesson before, to the
# letter. Skip them.)


# %%
class CopyToRanks(torch.autograd.Function):
    """f in Shoeybi et al. (2019), section 3: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None  # None: a group has no gradient


class ReduceFromRanks(torch.autograd.Function):
    """g in Shoeybi et al. (2019), section 3: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def all_reduce(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum over the group. `x` stays as it is: a gradient we are handed is not ours."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class VocabularyParallelEmbedding(nn.Module):
    """This rank's rows of an embedding: words (N,) -> (N, D), the same on every rank."""

    def __init__(self, weight_vD: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_vD)
        self.first = RANK * len(weight_vD)

    def forward(self, word_N: torch.Tensor) -> torch.Tensor:
        local_N, mine_N = local_rows(word_N, self.first, len(self.weight))
        x_ND = F.embedding(local_N, self.weight) * mine_N[:, None]
        return ReduceFromRanks.apply(x_ND)


# %% [markdown]
# ## 3. Padding
#
# n rarely divides the number of words, so tables are **padded** with rows that stand for no word
# (Megatron pads to a multiple of 128 n, for the sake of fast products as well). Nobody looks these
# rows up. But the head computes logits for them, and a softmax that counts them gives them
# probability. So the loss sets them to minus infinity: their exponential is 0, and so is their
# gradient.


# %%
class Model(nn.Module):
    """The ends of a language model with one layer between: words (N,) -> loss of each token (N,).

    `tied`: the head's matrix is the embedding's, so each rank's rows serve both.
    """

    def __init__(self, table_VD: torch.Tensor, middle: nn.Module, tied: bool) -> None:
        super().__init__()
        mine_vD = table_VD.chunk(WORLD_SIZE)[RANK]
        self.embedding = VocabularyParallelEmbedding(mine_vD.clone())
        self.middle = middle
        self.head = self.embedding.weight if tied else nn.Parameter(mine_vD.flip(1).clone())

    def logits(self, word_N: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits (N, v)."""
        x_ND = self.middle(self.embedding(word_N))
        logits_Nv = CopyToRanks.apply(x_ND) @ self.head.T
        word_v = torch.arange(len(self.head), device=x_ND.device) + self.embedding.first
        return logits_Nv.masked_fill(word_v >= WORDS, -math.inf)

    def forward(self, word_N: torch.Tensor, next_N: torch.Tensor) -> torch.Tensor:
        return VocabularyParallelLoss.apply(self.logits(word_N), next_N, self.embedding.first)


# %% [markdown]
# ## 4. How it is measured
#
# The oracle is the same model in one process, in float64: whole tables without padding,
# `F.embedding`, `F.cross_entropy`. All-reduces are noted beneath torch's dispatcher, by how many
# elements each has. What the loss keeps is seen by the hooks that autograd calls for each tensor
# that it saves.

# %%
TOLERANCE = 10 * V * 2**-53  # some ten sums of at most V terms, in another order


class Oracle(nn.Module):
    """The same in one process."""

    def __init__(self, table_VD: torch.Tensor, middle: nn.Module, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Parameter(table_VD[:WORDS].clone())
        self.middle = middle
        self.head = self.embedding if tied else nn.Parameter(table_VD[:WORDS].flip(1).clone())

    def forward(self, word_N: torch.Tensor, next_N: torch.Tensor) -> torch.Tensor:
        x_ND = self.middle(F.embedding(word_N, self.embedding))
        return F.cross_entropy(x_ND @ self.head.T, next_N, reduction="none")


class AllReduces(TorchDispatchMode):
    """Notes the elements of each all-reduce in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.allreduce_.default:
            self.elements.append(sum(tensor.numel() for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def draw(device: torch.device) -> tuple[torch.Tensor, nn.Module, torch.Tensor, torch.Tensor]:
    """Return a table, a layer, words, and the words after them; the same on every rank."""
    torch.manual_seed(0)
    factory = {"device": device, "dtype": torch.float64}
    table_VD = torch.randn(V, D, **factory)
    middle = nn.Linear(D, D, **factory)
    word_N = torch.randint(WORDS, [N + 1], device=device)
    word_N[:2] = torch.tensor([0, WORDS - 1])  # the first and the last word are among them
    return table_VD, middle, word_N[:-1], word_N[1:]


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def rows_of(whole_WD: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a table without padding, and zeros for its padding."""
    padded_VD = F.pad(whole_WD, (0, 0, 0, V - WORDS))
    return padded_VD.chunk(WORLD_SIZE)[RANK]


def check_model(device: torch.device, tied: bool) -> None:
    """Claim loss and gradients against one process."""
    table_VD, middle, word_N, next_N = draw(device)
    ours = Model(table_VD, middle, tied)
    loss_N = ours(word_N, next_N)
    weight_N = torch.linspace(0, 1, N, device=device, dtype=torch.float64)  # tokens count unequally
    (weight_N * loss_N).mean().backward()
    found = {"middle": middle.weight.grad.clone(), "embedding": ours.embedding.weight.grad}
    found["head"] = ours.head.grad
    middle.zero_grad()
    oracle = Oracle(table_VD, middle, tied)
    expected_N = oracle(word_N, next_N)
    (weight_N * expected_N).mean().backward()
    due = {"middle": middle.weight.grad, "embedding": rows_of(oracle.embedding.grad)}
    due["head"] = rows_of(oracle.head.grad)
    name = "tied" if tied else "untied"
    error = relative_error(loss_N.detach(), expected_N.detach())
    claim(f"{name}: error of the loss", 0, error, atol=TOLERANCE)
    error = max(relative_error(found[which], due[which]) for which in found)
    claim(f"{name}: error of the gradients", 0, error, atol=TOLERANCE)


# %% [markdown]
# What crosses the wire, and what is kept:


# %%
def check_costs(device: torch.device) -> None:
    table_VD, middle, word_N, next_N = draw(device)
    ours = Model(table_VD, middle, tied=False)
    with AllReduces() as seen:
        ours.embedding(word_N).sum().backward()
    claim("embedding: all-reduces, both ways", 1, len(seen.elements), question=3)
    claim("embedding: elements all-reduced / N D", 1, sum(seen.elements) / (N * D))

    kept = []
    logits_Nv = ours.logits(word_N).detach().requires_grad_()
    with AllReduces() as seen, saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss_N = VocabularyParallelLoss.apply(logits_Nv, next_N, ours.embedding.first)
    claim("loss: numbers compared or added, per token", 3, sum(seen.elements) / N, question=1)
    numbers = sum(x.numel() for x in kept)
    claim("loss: numbers kept, per token", V / WORLD_SIZE + 2, numbers / N, question=2)
    with AllReduces() as seen:
        loss_N.sum().backward()
    claim("loss: all-reduces backward", 0, len(seen.elements))


# %% [markdown]
# Logits of zero make all words equally likely, so the loss must be the logarithm of their number.
# And logits of a thousand overflow if nothing is subtracted.


# %%
def check_padding(device: torch.device) -> None:
    zeros_NV = torch.zeros(N, V, device=device, dtype=torch.float64)
    mine_Nv = zeros_NV.chunk(WORLD_SIZE, dim=1)[RANK]
    first = RANK * mine_Nv.shape[1]
    next_N = torch.arange(N, device=device) % WORDS
    loss_N = VocabularyParallelLoss.apply(mine_Nv.clone(), next_N, first)
    claim("padding counted: the loss of zeros", math.log(V), loss_N.mean(), atol=1e-12, question=4)
    word_v = torch.arange(first, first + mine_Nv.shape[1], device=device)
    masked_Nv = mine_Nv.masked_fill(word_v >= WORDS, -math.inf)
    loss_N = VocabularyParallelLoss.apply(masked_Nv, next_N, first)
    text = "padding masked: the loss of zeros"
    claim(text, math.log(WORDS), loss_N.mean(), atol=1e-12)
    loss_N = VocabularyParallelLoss.apply(masked_Nv + 1000 * (RANK == 0), next_N, first)
    claim("a thousand on rank 0: losses not finite", 0, (~loss_N.isfinite()).sum())


# %% [markdown]
# ## 5. The same in PyTorch: `loss_parallel`
#
# In its block `F.cross_entropy` takes logits that are a DTensor split along the last dimension and
# does the same. The backward pass must run inside the block as well.


# %%
def check_torch(device: torch.device) -> None:
    """Claim that PyTorch's gives the same loss and gradient, with as many all-reduces."""
    torch.manual_seed(1)
    whole_NV = torch.randn(N, V, device=device, dtype=torch.float64)
    next_N = torch.randint(V, [N], device=device)
    mine_Nv = whole_NV.chunk(WORLD_SIZE, dim=1)[RANK].clone().requires_grad_()
    ours = VocabularyParallelLoss.apply(mine_Nv, next_N, RANK * mine_Nv.shape[1]).mean()
    ours.backward()
    mesh = dist.init_device_mesh(device.type, (WORLD_SIZE,))
    theirs_Nv = mine_Nv.detach().clone().requires_grad_()
    with loss_parallel(), CommDebugMode() as counter:
        loss = F.cross_entropy(DTensor.from_local(theirs_Nv, mesh, [Shard(1)]), next_N)
        loss.backward()
    error = (ours.detach() - loss.detach().to_local()).abs().item()
    claim("loss_parallel: difference of the loss", 0, error, atol=TOLERANCE)
    error = relative_error(mine_Nv.grad, theirs_Nv.grad)
    claim("loss_parallel: difference of the gradient", 0, error, atol=TOLERANCE)
    calls = counter.get_total_counts()
    claim("loss_parallel: collectives", 3, calls)


# %% [markdown]
# ## 6. On GPUs: the memory of Llama 3 8B's loss
#
# As many logits as Llama 3 8B has for 8,192 tokens, in float32: what the allocator holds at its
# peak for the loss and its gradient, on top of a rank's own logits. Split it is as much again,
# since probabilities and gradient take turns in one tensor. Gathered it is several times the logits
# of all words, and only printed.


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
    words = 128_256 // WORLD_SIZE
    logits_Nv = torch.randn(8192, words, device=device)
    next_N = torch.randint(128_256 // WORLD_SIZE * WORLD_SIZE, [8192], device=device)

    def split(mine_Nv: torch.Tensor) -> torch.Tensor:
        return VocabularyParallelLoss.apply(mine_Nv, next_N, RANK * words).mean()

    def gathered(mine_Nv: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(mine_Nv) for _ in range(WORLD_SIZE)]
        dist.all_gather(parts, mine_Nv.detach())
        parts[RANK] = mine_Nv
        return F.cross_entropy(torch.cat(parts, dim=1), next_N)

    whole = peak_of(gathered, logits_Nv)
    peak = peak_of(split, logits_Nv)
    print0(f"{'':13}peak of the loss, GB: {peak / 1e9:.1f} split, {whole / 1e9:.1f} gathered")
    claim("peak of the loss / its logits, in bytes", 1, peak / logits_Nv.nbytes, atol=0.05)


# %% [markdown]
# ## What you should have seen
#
# 1. Three: a maximum, the sum of exponentials, and the logit of the right word. Gathered it would
#    be V of them, 100 here and 128,256 for Llama 3. (The two sums may share one message. Messages
#    so small cost latency, not bandwidth.)
# 2. N V / n, the probabilities of its own words, and two numbers per token. The gradient takes the
#    probabilities' place.
# 3. One, of N D elements, forward. With sequence parallelism it is a reduce-scatter, for the next
#    layer wants only a rank's share of the tokens. (At the other end the head's f adds up N D
#    numbers backward, as before any column-parallel layer.)
# 4. log 100 = 4.605. Three rows of padding take 3% of the probability. Training pushes their logits
#    down soon, so nobody notices; but the loss is not comparable to that of another number of
#    ranks, which pads another number of rows.
#
# **Try.** With a maximum of its own on every rank, the exponentials that are added up are relative
# to different numbers: loss and gradients are wrong, and only two numbers per token cross the wire.
# Nothing overflows, so the row of a thousand passes. Without `mine`, each rank adds its row 0 for
# every word that it does not have: all that follows is wrong, loss and gradients.
#
# **On GPUs.** With 8 ranks the logits of 8,192 tokens shrink from 4.2 GB to 0.5 GB in float32. The
# other way to the same end is to take a chunk of tokens at a time, and to compute its gradients at
# once (Liger) or its logits again backward (Cut Cross-Entropy, in blocks of words too). It needs no
# second GPU, and both ways can be combined.
#
# **When to use it.** Whenever the head is split: a ring's all-reduce sends two numbers for each one
# that an all-gather sends, so gathering costs V / 6 times the bytes. Without tensor parallelism the
# vocabulary can still be split, over pipeline stages (Yeung et al., 2024), where the head makes the
# last stage the slowest.
#
# **In other systems.** Megatron-LM has `VocabParallelEmbedding` and `vocab_parallel_cross_entropy`,
# whose three all-reduces are the ones here; torchtitan splits the head by `ColwiseParallel` and
# uses `loss_parallel`. The embedding tied to the head is then one shard per rank for both; in a
# pipeline the first and the last stage hold it and have to add up its gradients.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_model(device, tied=False)
    check_model(device, tied=True)
    check_costs(device)
    check_padding(device)
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
