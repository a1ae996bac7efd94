"""Expert accounting: how many parameters a token uses
===================================================

**Question.** A mixture of experts is named by two numbers, such as 30B-A3B: what it stores, and
what a token uses. Which number sets its FLOPs, its memory on a GPU, and its MFU?

**Predict**, and write it down before you run. Qwen3-30B has 48 layers, 2,048 wide. In a layer,
attention has 18.9 million parameters, the router 0.26 million, and each of 128 experts 4.72
million. A token visits 8 experts per layer. Embedding and head have 0.311 billion each.

1. With how many billions of parameters is a token multiplied? (The embedding is a look-up.)
2. Each of these costs a token six FLOPs, forward and backward; attention's scores cost it another
   4.83 billion, with sequences of 4,096 tokens. What share of its FLOPs is spent in experts?
3. Four GPUs deal out the experts of each layer, and each GPU has all of the rest. How many
   billions of parameters does a GPU hold?
4. MFU divides the FLOPs that a model needs by those that the GPU could do. If experts counted that
   a token does not visit, how many times as large would it be?

**Run.**

    torchrun --standalone --nproc-per-node=4 24_expert_accounting.py   # NCCL on 4 GPUs, else gloo
    python 24_expert_accounting.py                                     # the same, started for you

Not run on several GPUs. Rows marked t hold the sum against what others have published.

**Try.** In `used` leave out the subtraction: which of the questions' claims fail? In `flops` let
every expert compute all tokens, `SEQUENCE` for `rows_E[e]`: which now?

**Before.** parallelism/11_expert_parallelism.py: how tokens reach their experts.
parallelism/20_expert_balance.py: what uneven routing costs.

**Next.** parallelism/28_expert_capacity.py (optional): a bound on what an expert gets. Or go on to
parallelism/12_gpt_on_a_mesh.py: several ways to split a model at once.
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
from datetime import timedelta
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: D model width, W width of an expert, E experts of a layer, K experts per token. Section 5
# has T tokens, R rows of one expert, H heads of queries, G of keys and values, C numbers of a head.

# %% [markdown]
# ## 1. One sum, three numbers of experts
#
# A matrix of a dense model is stored once and multiplied with every token. In a mixture of experts
# the two come apart: E experts are stored, and a token is multiplied with K of them. On one of n
# GPUs that deal out the experts (**expert parallelism**, EP) there are E / n. All three counts are
# one sum, with another number of experts in it. A is what attention has, V the vocabulary, and an
# expert is three matrices of D x W, as in a Llama's MLP:
#
#                                 stored      used by a token     on a GPU, EP n
#     per layer   attention       A           A                   A
#                 router          D E         D E                 D E
#                 experts         E 3 D W     K 3 D W             E / n 3 D W
#     once        embedding       V D         looked up: none     V D
#                 head            V D         V D                 V D
#
# Vectors, such as those of norms, are left out: some millionths of all. (The last three numbers of
# `Shape` are for DeepSeek-V3, in sections 3 and 6. Each of its mixtures has a **shared** expert,
# which every token visits besides its K, and three layers are **dense**, with one MLP.)


# %%
class Shape(NamedTuple):
    """What config.json says of a mixture of experts, in few numbers."""

    layers: int
    hidden: int  # D
    attention: int  # A: parameters of one layer's attention
    attended: int  # products per pair of tokens, see section 2: heads x (width of key + of value)
    expert: int  # W: how wide one is
    experts: int  # E: how many a layer has
    k: int  # K: how many a token visits
    vocab: int  # V
    shared: int = 0  # experts of a layer that every token visits besides
    dense: int = 0  # layers with one MLP for all tokens
    mlp: int = 0  # its width


def parameters(m: Shape, experts: float) -> float:
    """Those in matrices, with so many experts per layer: all, those used, those held."""
    router = m.hidden * m.experts
    mixture = router + (experts + m.shared) * 3 * m.hidden * m.expert
    mlps = m.dense * 3 * m.hidden * m.mlp + (m.layers - m.dense) * mixture
    return m.layers * m.attention + mlps + 2 * m.vocab * m.hidden


def used(m: Shape) -> float:
    """Parameters that one token is multiplied with."""
    return parameters(m, m.k) - m.vocab * m.hidden  # the embedding is a look-up


# %% [markdown]
# Qwen3's attention has four matrices: queries, keys, values and output. Keys and values have fewer
# heads than queries, so their matrices are narrow.

# %%
SEQUENCE = 4096
HEADS, KV_HEADS, WIDTH = 32, 4, 128  # of Qwen3-30B's attention: H, G, and the width of a head, C
QWEN3_30B = Shape(
    layers=48,
    hidden=2048,
    attention=2048 * (HEADS + KV_HEADS + KV_HEADS + HEADS) * WIDTH,
    attended=HEADS * (WIDTH + WIDTH),
    expert=768,
    experts=128,
    k=8,
    vocab=151_936,
)

# %% [markdown]
# ## 2. FLOPs follow what is used
#
# A parameter of a matrix costs a token two FLOPs forward, a product and a sum, and four backward:
#
#     by weights     6 x the parameters that a token uses
#     by scores      6 x layers x attended x the tokens that it sees, half a sequence on average
#
# The experts that a token does not visit cost it nothing. *Attended* is what one pair of tokens
# costs in a layer: each head of queries multiplies a query with a key, and a score with a value.


# %%
def flops_per_token(m: Shape, sequence: int) -> float:
    """Forward and backward."""
    return 6 * used(m) + 6 * m.layers * m.attended * sequence / 2


# %% [markdown]
# ## 3. Memory follows what is held
#
# A GPU holds its E / n experts whether a token comes or not, and all that is not an expert. EP
# divides the first and leaves the second:
#
#     billions        stored   in experts   the rest   on a GPU, EP 8   EP 64
#     Qwen3-30B         30.5         29.0        1.5              5.2     2.0
#     Qwen3-235B       235.1        227.1        8.0             36.4    11.5
#     DeepSeek-V3      671.0        653.9       17.1             98.9    27.3
#
# With EP 64 most of what a GPU holds is the rest, which no EP divides. In training each parameter
# takes 16 bytes, so DeepSeek-V3's 27.3 billion are 437 GB. That is why EP comes with pipeline
# stages, which divide both, and with ZeRO over the copies of the rest.

# %% [markdown]
# ## 4. MFU counts what is used
#
# **MFU**, the model FLOPs utilization, is tokens per second times FLOPs per token, over the GPU's
# peak. It asks which part of the machine did work that the model needs. An expert that a token does
# not visit is no such work. If it counted, MFU would rise with every expert that one adds and
# nobody visits.

# %% [markdown]
# ## 5. How it is measured
#
# What is held against the sum of section 1 is one layer of Qwen3-30B in full size, as PyTorch
# modules, with its experts dealt out over the ranks. PyTorch's counter of FLOPs adds up all
# products of matrices in it, forward and backward, and `numel` counts what a rank holds. A router
# of the real width routes 4,096 random tokens first, so each expert computes as many rows as have
# chosen it. That is uneven, but the sum is fixed: each token chooses 8.
#
# From there on tensors are on PyTorch's *meta* device: they have shapes, and neither values nor
# memory. That is all the counter looks at, and a model of 30 billion parameters costs nothing. So
# these rows say that the sum is the model's. They measure neither bytes on a GPU nor its time. What
# makes no product of matrices (norms, mask, rotation by position) is left out.


# %%
def matrix(inner: int, outer: int) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False, device="meta")


class Expert(nn.Module):
    """(R, D) -> (R, D)."""

    def __init__(self, D: int, W: int) -> None:
        super().__init__()
        self.gate = matrix(D, W)
        self.up = matrix(D, W)
        self.down = matrix(W, D)

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_RD)) * self.up(x_RD))


class QwenAttention(nn.Module):
    """Qwen3's: H / G heads of queries share a head of keys and values. (T, D) -> (T, D)."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.q = matrix(D, HEADS * WIDTH)
        self.k = matrix(D, KV_HEADS * WIDTH)
        self.v = matrix(D, KV_HEADS * WIDTH)
        self.out = matrix(HEADS * WIDTH, D)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        q_HTC = self.q(x_TD).unflatten(1, (HEADS, WIDTH)).transpose(0, 1)
        k_GTC = self.k(x_TD).unflatten(1, (KV_HEADS, WIDTH)).transpose(0, 1)
        v_GTC = self.v(x_TD).unflatten(1, (KV_HEADS, WIDTH)).transpose(0, 1)
        k_HTC = k_GTC.repeat_interleave(HEADS // KV_HEADS, dim=0)
        v_HTC = v_GTC.repeat_interleave(HEADS // KV_HEADS, dim=0)
        score_HTT = q_HTC @ k_HTC.transpose(1, 2) / WIDTH**0.5
        y_HTC = score_HTT.softmax(dim=2) @ v_HTC
        return self.out(y_HTC.transpose(0, 1).flatten(1))


class Layer:
    """One layer's parts, with this rank's share of the experts, and the model's head."""

    def __init__(self, m: Shape) -> None:
        self.attention = QwenAttention(m.hidden)
        self.router = matrix(m.hidden, m.experts)
        mine = torch.arange(m.experts).tensor_split(WORLD_SIZE)[RANK].tolist()
        self.experts = {e: Expert(m.hidden, m.expert) for e in mine}
        self.head = matrix(m.hidden, m.vocab)


def route(m: Shape) -> list[int]:
    """How many of a sequence's tokens choose each expert, by a real router on random tokens."""
    torch.manual_seed(0)
    x_TD = torch.randn(SEQUENCE, m.hidden)
    score_TE = x_TD @ torch.randn(m.hidden, m.experts)
    expert_TK = score_TE.topk(m.k, dim=1).indices
    return torch.bincount(expert_TK.flatten(), minlength=m.experts).tolist()


# %% [markdown]
# The counter knows two kinds of products: with weights (`mm`), and those of attention's scores, one
# matrix per head (`bmm`). Of the scores it counts the whole matrix, of which the model needs half.


# %%
class Flops(NamedTuple):
    """Of a token, in the whole model, forward and backward."""

    weights: float  # in products with weights, those in experts too
    scores: float  # in attention's, the half that is needed
    experts: float

    def total(self) -> float:
        return self.weights + self.scores


def count(part: nn.Module, D: int, rows: int) -> tuple[int, int]:
    """FLOPs with weights and of scores, of one part and so many rows."""
    x_RD = torch.empty(rows, D, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        part(x_RD).sum().backward()
    found = counter.get_flop_counts().get("Global", {})
    return found.get(torch.ops.aten.mm, 0), found.get(torch.ops.aten.bmm, 0)


def flops(m: Shape, layer: Layer, rows_E: list[int], device: torch.device) -> Flops:
    """All ranks call: each counts its own experts, and the sum over ranks is the layer's."""
    attention, scores = count(layer.attention, m.hidden, SEQUENCE)
    router, _ = count(layer.router, m.hidden, SEQUENCE)
    head, _ = count(layer.head, m.hidden, SEQUENCE)
    mine = sum(count(expert, m.hidden, rows_E[e])[0] for e, expert in layer.experts.items())
    total = torch.tensor(mine, device=device)
    dist.all_reduce(total)
    experts = m.layers * total.item() / SEQUENCE
    weights = experts + (m.layers * (attention + router) + head) / SEQUENCE
    return Flops(weights, m.layers * scores / 2 / SEQUENCE, experts)


def elements(*parts: nn.Module) -> int:
    return sum(sum(parameter.numel() for parameter in part.parameters()) for part in parts)


def check_layer(m: Shape, device: torch.device) -> None:
    layer = Layer(m)
    found = flops(m, layer, route(m), device)
    text = "Qwen3-30B: billions of parameters used"
    claim(text, used(m) / 1e9, found.weights / 6 / 1e9, question=1)
    due = flops_per_token(m, SEQUENCE)
    share = 6 * (parameters(m, m.k) - parameters(m, 0)) / due
    text = "Qwen3-30B: share of a token's FLOPs in experts"
    claim(text, share, found.experts / found.total(), atol=1e-12, question=2)

    all_visited = flops(m, layer, [SEQUENCE] * m.experts, device)
    unused = parameters(m, m.experts) - parameters(m, m.k)
    text = "Qwen3-30B: MFU with all experts / MFU"
    ratio = all_visited.total() / found.total()
    claim(text, 1 + 6 * unused / due, ratio, atol=1e-12, question=4)

    held = m.experts // WORLD_SIZE + (m.experts % WORLD_SIZE > RANK)  # 4 ranks: 32 of 128
    here = elements(layer.attention, layer.router, *layer.experts.values())
    billions = (m.layers * here + 2 * elements(layer.head)) / 1e9
    claim("Qwen3-30B: billions on a rank", parameters(m, held) / 1e9, billions, question=3)


# %% [markdown]
# ## 6. Three models against what is published
#
# No question needs this section: it holds the sum against the figures of others. *Stored* is held
# against the checkpoints. NVIDIA reports tokens per second and TFLOP/s, so their quotient is FLOPs
# per token (Megatron-Bridge's performance pages, sequences of 4,096 tokens): here the median of
# some rows, since they are rounded. NVIDIA leaves the router out, about 0.3% of a token's work, and
# so do these rows. *Used* says the same once more: that figure without the scores, divided by 6.
#
# DeepSeek-V3's attention makes queries, and keys and values, out of narrow **latents**, 1,536 and
# 512 wide. A key has 128 numbers from the latent and 64 for its position, which all heads share.

# %%
A_V3 = 7168 * 1536 + 1536 * 128 * (128 + 64)  # queries: down to the latent, up to 128 heads
A_V3 += 7168 * (512 + 64) + 512 * 128 * (128 + 128)  # keys and values
A_V3 += 128 * 128 * 7168  # output
SHAPES = {
    "Qwen3-30B": QWEN3_30B,
    "Qwen3-235B": QWEN3_30B._replace(
        layers=94,
        hidden=4096,
        attention=4096 * (64 + 4 + 4 + 64) * 128,
        attended=64 * (128 + 128),
        expert=1536,
    ),
    "DeepSeek-V3": Shape(
        layers=61,
        hidden=7168,
        attention=A_V3,
        attended=128 * (192 + 128),
        expert=2048,
        experts=256,
        k=8,
        vocab=129_280,
        shared=1,
        dense=3,
        mlp=18_432,
    ),
}
CHECKPOINT = {  # parameters; DeepSeek-V3's without the module that predicts a second token
    "Qwen3-30B": 30_532_122_624,
    "Qwen3-235B": 235_093_634_560,
    "DeepSeek-V3": 671_026_419_200,
}
SPEEDS = {  # tokens/s and TFLOP/s of a GPU
    "Qwen3-30B": [(45275, 1041), (40706, 936), (40769, 938), (8826, 203)],
    "Qwen3-235B": [(4452, 659), (4104, 607), (1204, 178)],
    "DeepSeek-V3": [(3848, 961), (4357, 1088), (3139, 782), (4018, 1003)],
}


def check_published() -> None:
    for name, m in SHAPES.items():
        stored = parameters(m, m.experts) / 1e9
        text = f"{name}: billions stored, as in its checkpoint"
        claim(text, stored, CHECKPOINT[name] / 1e9, atol=1e-5 * stored, kind="theory")
        published = median(tflops * 1e12 / tokens for tokens, tflops in SPEEDS[name])
        routers = (m.layers - m.dense) * m.hidden * m.experts
        due = flops_per_token(m, SEQUENCE)
        ours = (due - 6 * routers) / 1e9
        text = f"{name}: GFLOPs per token"
        claim(text, ours, published / 1e9, atol=0.001 * ours, kind="theory")
        scores = due - 6 * used(m)
        ours = (used(m) - routers) / 1e9
        text = f"{name}: billions used, by GFLOPs per token"
        claim(text, ours, (published - scores) / 6 / 1e9, atol=0.005 * ours, kind="theory")


# %% [markdown]
# ## What you should have seen
#
# 1. 3.04 billion, the "A3B" of its name: 56.9 million in each of 48 layers, and the head. Its card
#    says 3.3, and with the embedding's 0.31 it would be 3.35.
# 2. 47%: 10.9 of 23.1 GFLOPs. So experts are 95% of what is stored, and less than half of the work.
#    For Qwen3-235B the share is 57%, for DeepSeek-V3 49%, or 55% with its shared expert.
# 3. 8.79 billion: a quarter of the 28.99 in experts, and all of the other 1.54. With 16 bytes each
#    in training, that is 141 GB. An H100 has 80 GiB, or 86 GB. With EP 8 it would be 83 GB, which
#    leaves next to nothing for activations, and with EP 16 54 GB.
# 4. 8.07 times: 186 instead of 23.1 GFLOPs per token. NVIDIA reports 45,275 tokens per second on a
#    GB300, in 8 bits, where the peak is about 5,000 TFLOP/s. That is an MFU of 21%. With
#    all experts it would be 169%.
#
# **Try.** With the embedding counted as used, questions 1, 2 and 4 fail, and 3 does not, since
# memory holds the embedding anyway. If every expert computes all tokens, the same three fail, and
# memory again does not notice: it holds an expert whether it is visited or not.
#
# **On GPUs** the counts are the same, and time is not. Of 4,096 tokens an expert gets 256 rows on
# average, 4,096 x 8 / 128. Products of so few rows reach a smaller part of the peak than one large
# product, and the all-to-alls are no FLOPs at all. In one release of NVIDIA's tables, on the same
# eight GB300 in 8 bits, a dense Llama 3 8B has an MFU of 39%, and Qwen3-30B one of 13%; in a later
# release it was 21%. So compare mixtures with dense models by quality per GPU-hour, not by MFU.
#
# **When which number.** FLOPs, speed and MFU: used. Memory and checkpoints: stored, or held. What
# inference reads per step lies between: one token reads 8 of a layer's 128 experts, and a hundred
# tokens read nearly all of them.
#
# **Conventions.** "6N" with N the parameters used leaves out the scores, 21% of Qwen3-30B's FLOPs
# at 4,096 tokens. The whole matrix of scores instead of its half would make 27.9 GFLOPs of 23.1.
# Recomputation is not in MFU either (it is in HFU).


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_layer(QWEN3_30B, device)
    check_published()
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
