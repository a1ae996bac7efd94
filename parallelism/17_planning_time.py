"""Planning time: how long does a step take, and which layout is the fastest?
==========================================================================

**Question.** Of all ways to spread a model over a cluster that fit, which one is the fastest, and
what do the others pay for?

**Predict**, and write it down before you run. Questions 3 and 4 are about a step of Llama 3 70B (80
layers) on 64 GPUs of 80 GB.

1. A matrix costs a token two FLOPs per parameter in the forward pass. How many does it cost,
   forward and backward together?
2. A layer of four equal products keeps nothing but its input. Before its backward pass torch runs
   its forward pass again, until it has all that backward needs. How many FLOPs per parameter now?
3. PCIe joins the GPUs. FSDP alone must recompute 69 layers to fit, FSDP over groups of TP 4 only
   24. Products take 19.6 s with either, and 0.06 s more per recomputed layer. TP 4 waits for 5,696
   messages of 2.0 ms, and 1.3 s for FSDP. How many times as long as FSDP alone does TP 4 take?
4. NVLink joins the GPUs. A message takes 0.3 ms, and nothing waits for FSDP. How many times as long
   as TP 4 does FSDP alone take?

**Run.**

    torchrun --standalone --nproc-per-node=4 17_planning_time.py    # NCCL on 4 GPUs, else gloo
    python 17_planning_time.py                                      # the same, started for you

Not run on several GPUs. Rows marked t are the equation.

**Try.** Let all layers fit (`recomputed = 0`, below `dp, tp, recomputed = layout`): which claims
fail? Take it out, and let recomputation be free (`again = 0.0` in `step`): which ones now?

**Before.** parallelism/16_planning_memory.py: what fits. communication/04_alpha_beta.py: what a
collective costs.

**Next.** parallelism/26_dry_run_of_1024_ranks.py holds a plan against the program, and
14_which_mesh_is_fastest.py an equation against 20 meshes. For a model of your own, `course plan
--model llama-70b --gpus 64 --gpu h100`.
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
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. What a layout pays in order to fit
#
# 64 GPUs share a model by FSDP, and each works on sequences of its own. For 70B the activations of
# one sequence alone are more than an H100 holds. There are two ways out, and both cost time:
#
# - **recompute**: drop the activations of some layers, and run their forward pass **again**;
# - **split each layer** over tp GPUs, which then wait for **messages** of tensor parallelism.
#
# The products take the same time either way, as 64 GPUs compute the same sequences. So **the
# fastest layout is the one that pays the least for fitting**, and that depends on the link:
#
#     one micro-batch   [ forward: products, messages ] [ backward: again, products, messages ]
#     FSDP meanwhile    [ gather  ]                     [ gather, reduce-scatter    ]
#
#     seconds of a step = m x (products + again + messages + what nothing hides of FSDP)
#
#     products          = FLOPs / (share x peak)
#     a message         = alpha + bytes that a GPU sends / rate of its link
#
# m is the number of micro-batches that a GPU works on per step. One number is fitted: **share**,
# the part of the peak that real runs reach while they compute.

# %%
SHARE = 0.38  # fitted to three published runs on B200 with TP 2, and assumed of H100
LINK_SHARE = 0.8  # 370 of 450 GB/s by NCCL on 8 H100 (nccl-tests #212); assumed of other links
ALPHA = 20e-6  # seconds that a collective takes however small it is; assumed


class Gpu(NamedTuple):  # and its links, one way; from data sheets
    peak: float  # FLOP/s in bfloat16, without sparsity
    nvlink: float  # bytes per second to the GPUs of its domain
    domain: int  # GPUs that NVLink joins
    network: float  # bytes per second of a card; each GPU has one
    one_link: bool = False  # PCIe: what goes to the card passes it, too


H100 = Gpu(peak=989e12, nvlink=450e9, domain=8, network=50e9)
PCIE = H100._replace(nvlink=63e9, one_link=True)  # the same without NVLink: PCIe 5.0 x16

# %% [markdown]
# ## 2. How many layers must be recomputed
#
# A step has 128 sequences of 8,192 tokens, one per micro-batch, and each layout recomputes no more
# layers than it must. By the bytes of lesson 16, a GPU of 66.8 GiB holds
#
#     weights, gradients, Adam's moments    16.4 GiB
#     the loss, with the head gathered      13.7 GiB / tp
#     each layer that is kept                2.53 GiB, with TP 4 0.82 (two inputs stay whole)
#     each layer that is recomputed          0.125 GiB / tp
#
# Without tp that leaves room to keep 11 of 80 layers, and 69 are recomputed. With TP 2 it is 51,
# and with TP 4 24.


# %%
class Layout(NamedTuple):
    """Groups of tp neighbors share each layer; FSDP shards over the dp groups."""

    dp: int
    tp: int = 1  # with sequence parallelism
    recomputed: int = 0  # layers


LAYOUTS = {
    "FSDP alone": Layout(dp=64, recomputed=69),
    "FSDP x TP 2": Layout(dp=32, tp=2, recomputed=51),
    "FSDP x TP 4": Layout(dp=16, tp=4, recomputed=24),
}


# %% [markdown]
# ## 3. What it costs
#
# **Products.** A parameter of a matrix costs a token two FLOPs forward, a product and a sum. It
# costs four backward, two for the gradient of the input and two for its own: six. Layers and head
# count; the embedding is a look-up. In attention, queries times keys and scores times values are 12
# h FLOPs per layer and pair of tokens, both ways; causality spares half of the pairs.
#
# **Again.** A layer that is recomputed runs its forward pass once more, but not to its end. Nothing
# in its backward pass needs what its last product puts out, and torch stops before it. In 70B that
# product, `down`, is a quarter of the forward pass.
#
# **Messages.** Around a ring of n GPUs an all-gather or a reduce-scatter of S bytes makes each GPU
# send (n-1)/n x S. Here S is the activations of a micro-batch, 2 bytes x tokens x h. A layer has
# eight: attention and MLP each gather and reduce-scatter, forward and backward (lesson 06).
# Recomputation adds three: the sum after `down` is spared with it. Products wait for all of them.
#
# **FSDP** gathers the weights, 2 bytes per parameter, forward and again backward, where it also
# reduce-scatters gradients, 4 bytes. That is hidden as long as the GPU is busy with products, or
# with messages **over another link**: TP over NVLink, FSDP over the network cards. Where one link
# carries both, they take turns, and only products hide FSDP. Its ranks are tp apart. A ring over
# several nodes leaves each through the cards of all its members there: eight, or two with TP 4.


# %%
class Model(NamedTuple):  # a dense Llama
    layers: int
    hidden: int  # h
    kv: int  # width of the keys, and of the values: their heads x 128
    ff: int
    vocab: int


LLAMA_70B = Model(layers=80, hidden=8192, kv=1024, ff=28672, vocab=128256)


def layer_matrices(model: Model) -> int:
    """Parameters of a layer, the norms apart."""
    h = model.hidden
    return 2 * h * h + 2 * h * model.kv + 3 * h * model.ff


def rate(gpu: Gpu, ranks: int, stride: int) -> float:
    """Bytes per second that a GPU sends in a group whose ranks are `stride` apart."""
    if ranks * stride <= gpu.domain:
        return LINK_SHARE * gpu.nvlink
    cards = min(ranks, max(gpu.domain // stride, 1))  # of the group's GPUs in one node
    return LINK_SHARE * min(gpu.nvlink, cards * gpu.network)


def not_hidden(model: Model, layout: Layout, gpu: Gpu, forward: float, backward: float) -> float:
    """Seconds of FSDP that stick out, if these seconds of each pass can hide it."""
    parameters = model.layers * layer_matrices(model) + 2 * model.vocab * model.hidden
    sent = (layout.dp - 1) / layout.dp * parameters / layout.tp
    per_byte = sent / rate(gpu, layout.dp, stride=layout.tp)
    return max(2 * per_byte - forward, 0) + max((2 + 4) * per_byte - backward, 0)


def step(model: Model, layout: Layout, gpu: Gpu, tokens: int, batch: int) -> dict[str, float]:
    """Seconds of a step of `batch` sequences, by part."""
    dp, tp, recomputed = layout
    seconds_per_flop = tokens / tp / (SHARE * gpu.peak)
    layer = 6 * layer_matrices(model) + 12 * model.hidden * tokens / 2
    head = 6 * model.vocab * model.hidden
    last = 2 * model.hidden * model.ff  # `down`, which is not run again
    products = (model.layers * layer + head) * seconds_per_flop
    again = recomputed * (layer / 3 - last) * seconds_per_flop
    message = 0.0
    if tp > 1:
        sent = (tp - 1) / tp * 2 * tokens * model.hidden
        message = ALPHA + sent / rate(gpu, tp, stride=1)
    first = 4 * model.layers * message  # those of the forward pass
    messages = 2 * first + 3 * recomputed * message
    forward = products / 3
    backward = products - forward + again
    if not gpu.one_link and tp <= gpu.domain < dp * tp:  # FSDP has another link
        forward += first
        backward += messages - first
    exposed = not_hidden(model, layout, gpu, forward, backward)
    parts = {"products": products, "again": again, "messages": messages, "exposed": exposed}
    return {part: batch // dp * seconds for part, seconds in parts.items()}


# %% [markdown]
# ## 4. Three layouts, on two links
#
# By hand, for TP 4: a layer has 6 x 856 million and 12 x 8,192 x 8,192 / 2 FLOPs per token, 5.54
# billion, a third of them forward; `down` has 0.47. A message is 3/4 of 134 MB. Per layer and step:
#
#     products         8 x 8,192 x 5.54 billion / 4 / (0.38 x 989e12)            241 ms
#     again            8 x 8,192 x (1.85 - 0.47) billion / 4 / (0.38 x 989e12)    60 ms
#     eight messages   8 x 8 x (20 us + 101 MB / 50.4e9)                         129 ms over PCIe
#                      8 x 8 x (20 us + 101 MB / 360e9)                           19 ms over NVLink
#
# **That is the choice, in one layer.** Over PCIe the messages of a split cost twice what
# recomputation does; over NVLink, a third of it. The whole table, in seconds per step:
#
#     64 on PCIe     recomputed  products  again  messages  exposed    all
#     FSDP alone             69      19.6    4.1       0.0      0.0   23.7
#     FSDP x TP 2            51      19.6    3.1       4.3      0.2   27.1
#     FSDP x TP 4            24      19.6    1.4      11.5      1.3   33.8
#
#     64 H100        recomputed  products  again  messages  exposed    all
#     FSDP alone             69      19.6    4.1       0.0      0.0   23.7
#     FSDP x TP 2            51      19.6    3.1       0.7      0.0   23.3
#     FSDP x TP 4            24      19.6    1.4       1.7      0.0   22.7
#
# **On PCIe the answer is clear: no tensor parallelism.** On NVLink the three lie within 5%. The
# equation is wrong by up to 10% (see the end), so it calls this a tie.


# %%
def step_of(name: str, gpu: Gpu) -> dict[str, float]:
    return step(LLAMA_70B, LAYOUTS[name], gpu, tokens=8192, batch=128)


def row_of(name: str, gpu: Gpu) -> str:
    """A line of the table above."""
    line = f"{name:15}{LAYOUTS[name].recomputed:10}"
    for part, seconds in step_of(name, gpu).items():
        line += f"{seconds:{len(part) + 2}.1f}"
    return line + f"{sum(step_of(name, gpu).values()):7.1f}"


def check_layouts() -> None:
    all_of = {}
    for title, gpu in (("64 on PCIe", PCIE), ("64 H100", H100)):
        print0(f"\n  {title:15}recomputed  products  again  messages  exposed    all")
        for name in LAYOUTS:
            print0(f"  {row_of(name, gpu)}")
            all_of[name, gpu] = sum(step_of(name, gpu).values())
    print0()
    alone = 19.6 + 69 * 0.06  # by hand
    split = 19.6 + 24 * 0.06
    ratio = all_of["FSDP x TP 4", PCIE] / all_of["FSDP alone", PCIE]
    predicted = (split + 5696 * 2.0e-3 + 1.3) / alone
    claim("64 on PCIe: TP 4 / FSDP alone", predicted, ratio, atol=0.03, question=3, kind="theory")
    ratio = all_of["FSDP alone", H100] / all_of["FSDP x TP 4", H100]
    predicted = alone / (split + 5696 * 0.3e-3)
    claim("64 H100: FSDP alone / TP 4", predicted, ratio, atol=0.02, question=4, kind="theory")


# %% [markdown]
# ## 5. The same choice on your ranks
#
# Here is a stack small enough to pay both prices for real. A step has one sequence per rank. A
# layer has four products of one size, two in place of attention and two in place of the MLP.
#
#     recomputed   each rank runs the whole stack on its sequence, and keeps the layers' inputs
#     split        all n ranks run each of the n sequences together, with 1/n of each matrix
#
# The split is lesson 06's: columns of `up`, rows of `down`, and an all-reduce per pair, forward and
# backward. (It reduce-scatters and gathers, so these four stand for the eight messages above.)

# %%
LAYERS = 4
SIZES = {"cpu": (512, 128, 64), "cuda": (8192, 8192, 4096)}  # tokens, D, columns of a rank


def whole_stack(device: torch.device) -> tuple[torch.Tensor, list]:
    """A sequence, and each layer's up, down, up, down. All ranks draw the same."""
    torch.manual_seed(0)
    T, D, columns = SIZES[device.type]
    of = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
    x_TD = torch.randn(T, D, **of).requires_grad_()  # as if from the layers before
    shapes = 2 * [(D, WORLD_SIZE * columns), (WORLD_SIZE * columns, D)]
    stack = []
    for _ in range(LAYERS):
        drawn = [torch.randn(shape, **of) / math.sqrt(shape[0]) for shape in shapes]
        stack.append([weight.requires_grad_() for weight in drawn])
    return x_TD, stack


def share_of_rank(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's columns of each up, and rows of each down."""
    parts = []
    for weight, dim in zip(weights, (1, 0, 1, 0), strict=True):
        part = weight.detach().chunk(WORLD_SIZE, dim)[RANK]
        parts.append(part.clone().requires_grad_())
    return parts


def whole_layer(x_TD: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for up_DF, down_FD in (weights[:2], weights[2:]):
        x_TD = x_TD + F.gelu(x_TD @ up_DF) @ down_FD
    return x_TD


recomputed_layer = partial(checkpoint, whole_layer, use_reentrant=False)  # keeps x_TD alone


def sum_over_ranks(part_TD: torch.Tensor) -> torch.Tensor:
    total_TD = part_TD.clone()
    dist.all_reduce(total_TD.detach())  # autograd does not see it: the gradient passes as it is
    return total_TD


def split_layer(x_TD: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for up_Df, down_fD in (weights[:2], weights[2:]):
        copy_TD = x_TD.view_as(x_TD)
        copy_TD.register_hook(sum_over_ranks)  # each rank has a part of the gradient
        x_TD = x_TD + sum_over_ranks(F.gelu(copy_TD @ up_Df) @ down_fD)
    return x_TD


def predict_here(layer: float, message: float) -> dict[str, float]:
    """Seconds of a step, m x (products + again + messages), of those of a layer and a message."""
    products = LAYERS * layer  # of one sequence
    again = products / 4  # three of the four products, forward: 2 x 3/4 of 6 FLOPs
    messages = 4 * LAYERS * message
    split = WORLD_SIZE * (products / WORLD_SIZE + messages)
    return {"recomputed": products + again, "split": split}


# %% [markdown]
# ## 6. How it is measured
#
# torch's own counter adds up the FLOPs of the products that are really run, and the split must give
# the output and the gradient of the whole layers. Then one layer, one all-reduce and the steps are
# timed, in turns. **The first two predict the steps.** The last claim's slack is wide: the equation
# knows neither how fast smaller products are, nor how long ranks wait before a message begins.

# %%
ROUNDING = {"cpu": 1e-5, "cuda": 0.05}  # float32, bfloat16


def step_here(x_TD: torch.Tensor, stack: list, layer: Callable, m: int = 1) -> torch.Tensor:
    """Forward and backward of m micro-batches; returns the last output."""
    for _ in range(m):
        y_TD = x_TD
        for weights in stack:
            y_TD = layer(y_TD, weights)
        y_TD.sum().backward()
    return y_TD.detach()


def check_steps(x_TD: torch.Tensor, stack: list, parts: list) -> None:
    per = len(x_TD) * LAYERS * sum(weight.numel() for weight in stack[0])
    ran = []
    for layer, given in ((whole_layer, stack), (recomputed_layer, stack), (split_layer, parts)):
        x_TD.grad = None
        with FlopCounterMode(display=False) as counter:
            y_TD = step_here(x_TD, given, layer)
        ran.append((counter.get_total_flops() / per, torch.stack([y_TD, x_TD.grad])))
    (flops, whole), (flops_again, _), (flops_of_rank, split) = ran
    claim("a stack: FLOPs per parameter and token", 6, flops, question=1)
    claim("the same, recomputed by torch", 6 + 2 * 3 / 4, flops_again, question=2)
    claim("the same, split: all ranks together", 6, WORLD_SIZE * flops_of_rank)
    error = (split - whole).abs().max() / whole.abs().max()
    claim("split: error of output and gradient", 0, error, atol=ROUNDING[x_TD.device.type])


def medians(works: dict[str, Callable], device: torch.device) -> dict[str, float]:
    """Median seconds of each work, until the slowest rank is done; in turns, a first one apart."""
    taken = {name: [] for name in works}
    for _ in range(8):
        for name, work in works.items():
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = torch.tensor(time.perf_counter() - start, device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            taken[name].append(seconds.item())
    return {name: median(seconds[1:]) for name, seconds in taken.items()}


def time_steps(x_TD: torch.Tensor, stack: list, parts: list) -> dict[str, float]:
    works = {
        "layer": partial(step_here, x_TD, stack[:1], whole_layer),
        "message": partial(dist.all_reduce, torch.zeros_like(x_TD)),
        "plain": partial(step_here, x_TD, stack, whole_layer),
        "recomputed": partial(step_here, x_TD, stack, recomputed_layer),
        "split": partial(step_here, x_TD, parts, split_layer, m=WORLD_SIZE),
    }
    return medians(works, x_TD.device)


def check_seconds(seconds: dict[str, float]) -> None:
    ratio = seconds["recomputed"] / seconds["plain"]
    claim("recomputed / plain, seconds", 7.5 / 6, ratio, atol=0.15, timed=True)
    predicted = predict_here(seconds["layer"], seconds["message"])
    for way, took in seconds.items():
        expected = f", {1e3 * predicted[way]:.1f} predicted" if way in predicted else ""
        print0(f"{'':13}{way:12}{1e3 * took:8.1f} ms{expected}")
    ratio = seconds["split"] / seconds["recomputed"]
    by_equation = predicted["split"] / predicted["recomputed"]
    claim("split / recomputed, seconds", by_equation, ratio, atol=0.4 * by_equation, timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. 6: two forward, two for the gradient of the input, two for its own. A split has as many on all
#    ranks together: products cost the same, and only the messages are new.
# 2. 7.5: two more for three of the four products. torch stops before the last.
# 3. 1.42. TP 4 spares 2.7 s of recomputation, and pays 11.5 s for messages and 1.3 s for FSDP,
#    which shares their link. (With the 756 TFLOP/s of the H100 that is sold with PCIe: 1.26.)
# 4. 1.04. TP 4 spares the same 2.7 s, and pays 1.7 s: a tie, which only a run can break.
#
# **Try.** If all layers fit, *64 H100* fails: FSDP alone takes 19.6 s, and TP 4 21.1. *64 on PCIe*
# stays at 1.41 and passes: a shorter backward pass hides less, and FSDP alone waits 3.5 s for its
# messages instead of recomputing for 4.1 s. With free recomputation both rows fail, and on H100
# FSDP alone seems the fastest. No error tells of that mistake: such a plan runs, and takes longer.
#
# **How far to trust it.** On your ranks *split / recomputed* holds the equation against the clock.
# (Messages through gloo are slow; expect the split to lose, as over PCIe.) For TP 2 and TP 4 on
# B200 it is within 10% of published runs (parallelism/README.md, *The same, planned*; TP 8 is
# further off). No share from 0.25 to 0.6 changes which layout is the first on PCIe; on H100 the
# three stay within 8%. So **throw out what the equation puts far behind, and measure the rest.**
#
# **On your GPUs**, time one layer on one of them, forward and backward: its FLOPs over its seconds
# and the peak are the most that your share can be. benchmarks/nccl_sweep.py measures the links.
# **At a thousand GPUs** the same batch has less than one sequence for each. Then several GPUs must
# share a sequence: by tp, by context parallelism (lesson 10), or as stages of a pipeline.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    x_TD, stack = whole_stack(device)
    parts = [share_of_rank(weights) for weights in stack]
    check_steps(x_TD, stack, parts)
    check_seconds(time_steps(x_TD, stack, parts))
    check_layouts()
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
