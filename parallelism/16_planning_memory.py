"""Planning memory: will a training run fit on its GPUs?
=====================================================

**Question.** A model, a number of GPUs and a way to split one over the other: how many bytes does
the most loaded GPU hold, and of what?

**Predict**, and write it down before you run:

1. A layer of a Llama trains in bfloat16, two bytes per element. Keys and values are h/8 wide each,
   the inside of the MLP 3.5 h, all else h. Its operations are: norm; q, k and v; attention, as one
   kernel; output matrix; norm; gate and up; SiLU of gate; its product with up; down. Each keeps the
   arrays that its backward pass needs, and an array that two need is kept once. How many bytes per
   token is that, in units of h?
2. Four ranks train by FSDP, each on a sequence of its own. A rank then holds a quarter of the
   weights that it would hold alone. Which part of the activations that it would hold alone?
3. Llama 3 70B (80 layers, 8,192 wide) trains on 64 H100 of 80 GB, by FSDP over all of them. In a
   step each GPU takes two micro-batches, one sequence of 8,192 tokens each. Does that fit without
   recomputation?
4. The loss is softmax and cross-entropy on float32 logits, an array of tokens x vocabulary. How
   many bytes per token and entry of the vocabulary are held in its backward pass: 4, 8 or 12?

**Run.**

    torchrun --standalone --nproc-per-node=4 16_planning_memory.py    # NCCL on 4 GPUs, else gloo
    python 16_planning_memory.py                                      # the same, started for you

Not run on several GPUs. Rows marked t are arithmetic.

**Try.** In `fsdp_memory` divide the activations by `n`, as if FSDP sharded them too: which claims
fail? Put it back, and leave out `.float()` in `log_softmax_float32`: which fail now, and at what?

**Before.** parallelism/05_zero2_and_zero3.py: what ZeRO shards.

**Next.** parallelism/17_planning_time.py: how long a step takes. For a model of your own, `course
plan --model llama-70b --gpus 64 --gpu h100`.
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
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. What a rank of FSDP holds
#
# A GPU that trains holds two kinds of bytes. **FSDP divides those per parameter by the number n of
# its ranks. It leaves those per token as they are, for each rank has tokens of its own.** What
# lowers these is recomputation, fewer tokens per GPU, or ranks that share a sequence. That is the
# idea; what is left is to count both.
#
# Here is the whole sum, for torch's FSDP as it is mostly used: it keeps the weights in float32,
# computes in bfloat16, and reduces the gradients in float32. h is the width of the model, V the
# size of its vocabulary. The columns on the right are GiB per GPU for Llama 3 70B on 64 GPUs, with
# micro-batches of 8,192 tokens: first as it is, then with all layers recomputed.
#
#     part              bytes                        divided by       70B  recomputed
#     weights            4 per parameter             n                4.1         4.1
#     gradients          4 per parameter             n                4.1         4.1
#     optimizer states   8 per parameter             n                8.2         8.2
#     activations       40.5 h per token and layer   nothing        202.5        10.0
#     at work           (12 tokens + 2 h) V          nothing         13.7        13.7
#     sum                                                           232.6        40.1
#
# The optimizer's states are Adam's two moments. The sum is that of the moment when a backward pass
# begins. **Gradients** are there only from the second micro-batch of a step on: the first one's
# backward pass makes them, and `zero_grad` drops them. A step of one micro-batch needs 4.1 GiB
# less, 228.5 or 36.0: its gradients grow while its activations go. Sections 2 to 4 count the rows.

# %% [markdown]
# ## 2. Bytes per parameter
#
# A Llama's layer has four matrices in its attention and three in its MLP. The queries and the
# output are h x h. Keys and values have fewer heads, so their matrices are h x kv. The MLP (SwiGLU)
# computes `down(silu(gate(x)) * up(x))`, with three matrices of h x ff. Outside of the layers there
# are two tables of V x h: the embedding and the head. All this stands in a model's config.json.
#
# 70B has 855.7 million parameters per layer and 70.55 billion in all. Each takes 4 + 4 + 8 = 16
# bytes, 1,051 GiB in all, and a 64th of that is 16.4.


# %%
class Model(NamedTuple):
    """The shape of a dense Llama."""

    layers: int
    hidden: int  # h
    kv: int  # width of the keys, and of the values: their heads x the width of a head
    ff: int
    vocab: int  # V


LLAMA_70B = Model(layers=80, hidden=8192, kv=1024, ff=28672, vocab=128256)


def layer_parameters(model: Model) -> int:
    h = model.hidden
    attention = 2 * h * h + 2 * h * model.kv
    mlp = 3 * h * model.ff
    norms = 2 * h
    return attention + mlp + norms


def parameters(model: Model) -> int:
    tables = 2 * model.vocab * model.hidden
    return model.layers * layer_parameters(model) + tables + model.hidden  # and a last norm


# %% [markdown]
# ## 3. Bytes per token
#
# The backward pass of a matrix product needs the product's input again. So do a norm, SiLU and an
# elementwise product; attention needs its queries, keys, values and output. In bfloat16 that is two
# bytes per element. Go through a layer from top to bottom, and count per token:
#
#     operation                what it keeps                      bytes
#     norm                     its input                          2 h
#     queries, keys, values    the norm's output, once for all    2 h
#     attention                q, k, v                            2 h + 4 kv
#     output matrix            attention's output                 2 h
#     norm                     its input                          2 h
#     gate and up              the norm's output, once for both   2 h
#     SiLU                     its input                          2 ff
#     product                  its two inputs                     4 ff
#     down                     its input                          2 ff
#                                                                12 h + 4 kv + 8 ff
#
# Llama 3 70B has kv = h/8 and ff = 3.5 h: 40.5 h. FlashAttention is taken for granted: it stores no
# matrix of scores, which would be heads x tokens more elements per token. (If one kernel computes
# SwiGLU, what SiLU puts out is not kept, and 33.5 h are left.)
#
# **Recomputation** of whole layers keeps a layer's input alone, 2 h, and runs its forward pass once
# more when its backward pass comes. Then all 40.5 h exist, but of one layer at a time.


# %%
def saved_per_token(model: Model) -> int:
    """Bytes that one token leaves in one layer for the backward pass."""
    return 12 * model.hidden + 4 * model.kv + 8 * model.ff


# %% [markdown]
# ## 4. At work: the loss
#
# All activations are there when the backward pass begins, and it begins with the loss. Then
# log-softmax and cross-entropy hold three float32 arrays of tokens x V: the logarithms of the
# probabilities, kept by the forward pass, their gradient, and the gradient of the logits. That is
# 12 bytes per token and entry. FSDP gathers by **units**: each layer is one, and so is each of the
# two tables. The head is needed again at once, so its weights stay gathered in bfloat16
# (`reshard_after_forward=False`): 2 bytes each. For 70B these are 11.7 and 2.0 GiB. A loop whose
# variable `logits` lives on holds their bfloat16 too, 2 bytes more. A loss that takes a part of the
# tokens at a time holds fewer. (The moment of the last layer, soon after, is smaller here: 8.7 GiB,
# or 11.2 with its activations recomputed; with few tokens, or layers as wide as those of 405B, it
# is the larger one.)
#
# `fsdp_memory` is the table of section 1, line by line. It leaves out what is small: a few arrays
# of h per token outside of the layers, and what libraries need for themselves.


# %%
def fsdp_memory(model: Model, n: int, tokens: int, recompute: bool = False) -> dict[str, float]:
    """Bytes on each of n ranks at the loss of a micro-batch of so many tokens, by part."""
    P = parameters(model)
    kept = 2 * model.hidden if recompute else saved_per_token(model)
    return {
        "weights": 4 * P / n,
        "gradients": 4 * P / n,  # from the second micro-batch on
        "optimizer states": 8 * P / n,
        "activations": tokens * model.layers * kept,
        "at work": (12 * tokens + 2 * model.hidden) * model.vocab,
    }


# %% [markdown]
# ## 5. Does it fit?
#
# How much room is there? CUDA and NCCL need about a GiB of an H100's 79.6. And the allocator
# *reserves* more than the tensors take, as freed pieces do not always fit what comes next. So plan
# to 85% of the rest: **66.8 GiB**. 70B needs 232.6, and 40.1 with all layers recomputed.
#
# **When a plan does not fit, find the largest part, and turn a knob that divides that part:**
#
#     knob, on N GPUs in all            per parameter      per token           lesson
#     more GPUs                         16/N               as before           05
#     fewer sequences per GPU           as before          fewer tokens
#     recomputation                     as before          40.5 h becomes 2 h
#     tp ranks share each layer         as before          40.5 h: 8.6 at tp 8 06
#     cp ranks share each sequence      as before          1/cp                10
#     pp stages hold 1/pp of the layers as before          as before           07
#
# tp and pp divide bytes per parameter too, but take their ranks from FSDP: 16/N stays. (pp is for
# links too slow for FSDP.) tp 8, with sequence parallelism, would divide the rest by 8, but torch's
# keeps 4 h whole on each rank, what it gathers: 36.5/8 + 4 = 8.6. Under pp the first stage has 1/pp
# of the layers and, under 1F1B, pp micro-batches in flight.
#
# What each knob costs in time is the next lesson.

# %%
GiB = 2**30
ROOM = 66.8 * GiB  # to plan for on an H100


def check_70b() -> None:
    """Print the table of section 1; claim what fits."""
    alone = fsdp_memory(LLAMA_70B, n=64, tokens=8192)
    again = fsdp_memory(LLAMA_70B, n=64, tokens=8192, recompute=True)
    print0(f"\n  {'GiB per GPU':18}     70B  recomputed")
    for part in alone:
        print0(f"  {part:18}{alone[part] / GiB:8.1f}{again[part] / GiB:12.1f}")
    room = ROOM / GiB
    total = sum(alone.values()) / GiB
    claim("70B on 64 H100, too much: GiB per GPU", room, total, ">=", question=3, kind="theory")
    total = sum(again.values()) / GiB
    claim("all layers recomputed, it fits: GiB per GPU", room, total, "<=", kind="theory")


# %% [markdown]
# ## 6. How it is measured
#
# A Llama in torch, small and in the proportions of 70B. The parameters of a layer are counted in
# 70B's size, on the meta device, where a tensor has a shape and takes no memory. One part is not
# Llama's: LayerNorm stands for RMSNorm, whose CPU version keeps copies in float32 that its GPU
# kernel does not keep. Rotary positions are left out; they keep nothing more.

# %%
SMALL = Model(layers=2, hidden=512, kv=64, ff=1792, vocab=2048)
HEAD = 64  # width of a head: 8 heads of queries share one of keys and values
TOKENS = 96  # no side of a weight is that long


class CountedLayer(nn.Module):
    """A layer of a Llama on one sequence: (T, h) -> (T, h)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        h = model.hidden
        linear = partial(nn.Linear, bias=False)
        self.norm1 = nn.LayerNorm(h, bias=False)
        self.q = linear(h, h)
        self.k = linear(h, model.kv)
        self.v = linear(h, model.kv)
        self.out = linear(h, h)
        self.norm2 = nn.LayerNorm(h, bias=False)
        self.gate = linear(h, model.ff)
        self.up = linear(h, model.ff)
        self.down = linear(model.ff, h)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        y_TD = self.norm1(x_TD)
        heads = []
        for matrix in (self.q, self.k, self.v):
            heads.append(matrix(y_TD).view(1, TOKENS, -1, HEAD).transpose(1, 2))
        z_BHTK = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x_TD = x_TD + self.out(z_BHTK.transpose(1, 2).reshape(TOKENS, -1))
        y_TD = self.norm2(x_TD)
        return x_TD + self.down(F.silu(self.gate(y_TD)) * self.up(y_TD))


# %% [markdown]
# **Activations** are counted by the hook that autograd calls for each tensor that it saves. A
# storage counts once, however many operations keep it. Besides the table's entries only a few
# numbers per token are kept, for each norm a mean and a deviation and for each head a sum. They set
# the slack.

# %%
SLACK = (4 * 8 + 4 * 4) / SMALL.hidden  # of eight heads a sum; of two norms two numbers each


def forward_counted(run: Callable, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return run(x), and the bytes of activations that autograd keeps for the backward pass."""
    kept = {}  # by address

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if TOKENS in tensor.shape:  # weights are not activations
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y = run(x)
    return y, sum(kept.values())


def check_layer(device: torch.device) -> None:
    """Claim the parameters of a layer, and what it keeps per token, in units of h."""
    with torch.device("meta"):
        counted = sum(weight.numel() for weight in CountedLayer(LLAMA_70B).parameters())
    claim("70B: parameters of a layer", layer_parameters(LLAMA_70B), counted)
    layer = CountedLayer(SMALL).to(device, torch.bfloat16)
    x_TD = torch.randn(TOKENS, SMALL.hidden, device=device).to(torch.bfloat16)
    unit = TOKENS * SMALL.hidden
    expected = saved_per_token(SMALL) / SMALL.hidden
    _, kept = forward_counted(layer, x_TD)
    claim("a layer: bytes kept per token / h", expected, kept / unit, atol=SLACK, question=1)
    again = partial(checkpoint, layer, use_reentrant=False)
    _, kept = forward_counted(again, x_TD)
    claim("recomputed", 2, kept / unit)
    if device.type == "cpu":
        blocked("a layer, by the GPU's allocator", needs="1 GPU")
        return
    before = torch.cuda.memory_allocated()
    output = forward_counted(layer, x_TD)  # it is new and not kept; x_TD is kept and not new
    grown = torch.cuda.memory_allocated() - before  # so this is what is kept, as both are 2 h
    del output
    claim("a layer, by the GPU's allocator", expected, grown / unit, atol=1.5)


# %% [markdown]
# **FSDP** on all ranks, each with a sequence of its own: the whole model, each layer and each table
# a unit.


# %%
class CountedModel(nn.Module):
    """A Llama on one sequence: tokens (T,) -> logits (T, V)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.Sequential(*[CountedLayer(model) for _ in range(model.layers)])
        self.norm = nn.LayerNorm(model.hidden, bias=False)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        self.kept = 0  # bytes of activations in the layers

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        x_TD, self.kept = forward_counted(self.layers, self.embedding(tokens_T))
        return self.head(self.norm(x_TD))


def sharded_model(device: torch.device) -> CountedModel:
    model = CountedModel(SMALL).to(device)  # in float32
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    for unit in (model.embedding, *model.layers):
        shard(unit)
    shard(model.head, reshard_after_forward=False)
    return shard(model)


# %% [markdown]
# A step has two micro-batches, and what is held at the loss of the second is compared with
# `fsdp_memory`, part by part. What is kept per parameter is read off the tensors. Of the three
# arrays of logits, the hook above counts the one that the forward pass keeps. A second hook runs as
# log-softmax ends its backward pass: it counts the gradient that came in, the one that goes out,
# and the head's weights.
#
# No moment after the loss is measured. Before you fill a GPU, measure the peak of your own step, by
# `torch.cuda.max_memory_allocated`.


# %%
def log_softmax_float32(logits_TV: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(logits_TV.float(), dim=-1)


def held_at_loss(
    model: CountedModel, optimizer: torch.optim.Optimizer, tokens_T: torch.Tensor
) -> Counter:
    """Run a micro-batch forward and backward; return the bytes held in the loss's backward."""
    log_p_TV, kept = forward_counted(log_softmax_float32, model(tokens_T))  # frees the logits
    held = Counter({"activations": model.kept})
    for weight in optimizer.param_groups[0]["params"]:  # the shards
        held["weights"] += weight.to_local().nbytes
        if weight.grad is not None:
            held["gradients"] += weight.grad.to_local().nbytes
        moments = optimizer.state[weight]  # empty before the first step
        for name in moments.keys() & {"exp_avg", "exp_avg_sq"}:
            held["optimizer states"] += moments[name].to_local().nbytes

    def note(grad_inputs: tuple, grad_outputs: tuple) -> None:
        gradients = {grad.data_ptr(): grad.nbytes for grad in (*grad_inputs, *grad_outputs)}
        held["logits"] = kept + sum(gradients.values())
        held["head"] = model.head.weight.nbytes

    log_p_TV.grad_fn.register_hook(note)
    F.nll_loss(log_p_TV, tokens_T).backward()  # any targets will do
    return held


def check_fsdp(device: torch.device) -> None:
    """Claim what a rank holds, part by part."""
    model = sharded_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(RANK)
    tokens_T = torch.randint(SMALL.vocab, (TOKENS,), device=device)
    for _ in range(2):  # the first step makes Adam's moments
        optimizer.zero_grad()
        first = held_at_loss(model, optimizer, tokens_T)
        second = held_at_loss(model, optimizer, tokens_T)
        optimizer.step()
    sums = fsdp_memory(SMALL, WORLD_SIZE, TOKENS)
    P = parameters(SMALL)
    for part in ("weights", "gradients", "optimizer states"):
        share = sums[part] / P
        slack = 0.01 * share  # shards differ by a row, if ranks do not divide the rows
        claim(f"FSDP: {part}, bytes per parameter", share, second[part] / P, atol=slack)
    claim("FSDP: gradients at a step's first loss, bytes", 0, first["gradients"])
    found = second["activations"] / sums["activations"]
    slack = SLACK * SMALL.hidden / saved_per_token(SMALL)
    claim("FSDP: activations of a rank / undivided", 1, found, atol=slack, question=2)
    found = second["logits"] / (TOKENS * SMALL.vocab)
    claim("the loss: bytes per token and entry", 12, found, question=4)
    found = second["logits"] + second["head"]
    claim("FSDP: bytes at work, at the loss", sums["at work"], found)


# %% [markdown]
# ## What you should have seen
#
# 1. 40.5: 12 h + 4 x h/8 + 8 x 3.5 h. A token of 70B, 8,192 wide, leaves 324 KiB in each layer; if
#    the layer is recomputed, 2 h or 16 KiB.
# 2. All. On four ranks each has 16/4 = 4 bytes per parameter, and all 40.5 h of each of its own
#    tokens.
# 3. No. It needs 233 GiB, of which 202.5 are activations, and FSDP divides none of them. With all
#    layers recomputed it needs 40 GiB. More GPUs would not help: each has sequences of its own.
# 4. 12: three arrays in float32. For a sequence of 70B they are 11.7 GiB, more than a fourth of
#    what the recomputed step holds.
#
# **Try.** With activations divided by n two rows fail: that of question 2, and question 3's. 70B
# then seems to fit without recomputation, and a job planned so ends in its first forward pass:
# "CUDA out of memory". Without `.float()` the logits stay in bfloat16. Two rows fail: question 4's,
# at 6 bytes, and the bytes at work. That saves memory and costs precision: near 12, the loss of
# 70B's vocabulary at chance, bfloat16 has steps of 1/16.
#
# **Where it goes wrong in practice.** The first forward pass fails if activations were forgotten.
# If the states were, it is the second step: Adam makes its moments in the first `optimizer.step()`,
# when activations and logits have gone, and the next loss needs the room of both. What grows later
# is something else, such as longer sequences (profiling/05_memory.py).
#
# **On GPUs** leave the room that section 5 leaves. A GPU that is nearly full gets slow before it
# fails: the allocator has to empty its cache and ask the driver again. And if tp exceeds the heads
# of keys and values (8 here), those are copied.
#
# **At a thousand GPUs** bytes per parameter are nearly free under FSDP, 1.0 GiB of 70B's 1,051, and
# what decides is bytes per token. For long sequences context parallelism (parallelism/10) divides
# them. Experts (parallelism/11) and adapters follow the same two questions: per parameter or per
# token, and which axis divides it. `course plan` has the general sum, for all axes together, and
# `course plan --validate` holds it against published runs.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_layer(device)
    check_fsdp(device)
    check_70b()
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
