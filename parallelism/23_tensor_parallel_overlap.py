"""Tensor-parallel overlap: hiding the all-reduce of the backward pass
===================================================================

**Question.** Tensor parallelism adds up activations in every layer, and the next layer waits for
the sum. What can a GPU compute meanwhile, and how wide must a layer be for that to be enough?

**Predict**, and write it down before you run. A column-parallel linear layer, n ranks; its backward
pass has two matrix products, for the gradients of input and weight. The first is summed over ranks.

1. The layer is `F.linear` behind f (identity forward, all-reduce backward), as in
   06_tensor_parallel.py. How many of the two products are done before autograd starts the sum?
2. A backward pass of your own starts the sum as early as it can. How many of the two products can
   run while it travels?
3. The whole layer has 1,536 outputs, in float64 (8 bytes), on 4 ranks. How many FLOPs does a rank
   have to hide the sum behind, per byte that it sends? (A product of a x b by b x c has 2 a b c. A
   ring sends 2(n-1)/n of what it adds up.)
4. How many with four times the tokens?

**Run.**

    torchrun --standalone --nproc-per-node=4 23_tensor_parallel_overlap.py
    python 23_tensor_parallel_overlap.py     # the same, started for you

NCCL on 4 GPUs, else gloo. Not run on several GPUs.

**Try.** In `OverlappedColumns.backward` wait before the second product: what fails? Wait not at
all: what may fail, and why not always?

**Before.** parallelism/06_tensor_parallel.py: f, g, and why two sums per pass and block.

**Next.** parallelism/18_vocabulary_parallel.py: the two ends of a language model.
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
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# Shapes: N tokens of all sequences, D inputs, E outputs of the whole layer, e = E / n of this rank.
N, D, E = 96, 64, 1536

# %% [markdown]
# ## 1. Two products, one sum
#
# A column-parallel layer computes Y_i = X A_i on rank i (A_i is the rank's `weight`, transposed).
# Backward it gets dY_i, and owes two gradients:
#
#     dX    =  sum over ranks of  dY_i A_i'     the layer before waits for it
#     dA_i  =  X' dY_i                          nobody does, until the optimizer steps
#
# Only dX needs the other ranks. So dA_i can be computed while the sum travels, if the sum is
# started first. Time goes to the right:
#
#     as in 06     GPU     [ dY_i A_i' ][ X' dY_i ] . . . . . . . . . .  [ the layer before ...
#                  link                            [      sum of dX     ]
#
#     overlapped   GPU     [ dY_i A_i' ][ X' dY_i ] . . . . . [ the layer before ...
#                  link                 [      sum of dX     ]
#
# The dots are time lost. The change is the order of three lines. But autograd does not let you
# choose it: the backward pass of `F.linear` is one node that computes both products, and f's is the
# next one. The layer needs a backward pass of its own, which contains f:


# %%
class OverlappedColumns(torch.autograd.Function):
    """f and a column-parallel linear layer in one: X (N, D), weight (e, D) -> Y_i (N, e)."""

    @staticmethod
    def forward(ctx: object, x_ND: torch.Tensor, weight_eD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_ND, weight_eD)
        return x_ND @ weight_eD.T

    @staticmethod
    def backward(ctx: object, grad_Ne: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_ND, weight_eD = ctx.saved_tensors
        grad_ND = grad_Ne @ weight_eD  # this rank's summand of dX
        sum_of_dX = dist.all_reduce(grad_ND, async_op=True)
        grad_eD = grad_Ne.T @ x_ND  # meanwhile
        sum_of_dX.wait()
        return grad_ND, grad_eD


# %% [markdown]
# And for comparison the layer of 06_tensor_parallel.py, with its f in front. (PyTorch's
# `ColwiseParallel` puts f in front of `nn.Linear` in the same way.)


# %%
def plain_columns(x_ND: torch.Tensor, weight_eD: torch.Tensor) -> torch.Tensor:
    """A column-parallel linear layer behind f."""
    return F.linear(CopyToRanks.apply(x_ND), weight_eD)


class CopyToRanks(torch.autograd.Function):
    """f in Shoeybi et al. (2019), section 3: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None  # None: a group has no gradient


def all_reduce(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum over the group. `x` stays as it is: a gradient we are handed is not ours."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


# %% [markdown]
# ## 2. How wide is wide enough: FLOPs per byte
#
# The product X' dY_i has 2 N D E/n FLOPs. The sum adds up N D elements of s bytes, and over a ring
# each rank sends 2(n-1)/n times as many. N and D cancel:
#
#     FLOPs per byte sent        2 N D (E/n) / (2 (n-1)/n N D s)      =  E / ((n-1) s)
#
# A GPU of `peak` FLOP/s on a link of `rate` bytes/s hides the whole sum if these are at least
# peak / rate, so if
#
#     E  >=  (n-1) s peak / rate
#
# More tokens do not help, for they lengthen product and sum alike. More ranks hurt twice: each has
# less to compute, and a ring sends a little more. Width helps.


# %%
def outputs_that_hide_the_sum(n: int, peak: float, rate: float, element_bytes: int = 2) -> float:
    """Return from how many outputs on a layer's product takes as long as its sum over n ranks."""
    return (n - 1) * element_bytes * peak / rate


# %% [markdown]
# **Forward** there is nothing to hide behind: g's sum is the last step of attention and of the MLP,
# and what follows needs it at once. A block has two such sums and, attention itself left out, four
# products with weights, of 24 N D**2 FLOPs in all:
#
#     products    24 N D**2 / n                   FLOPs of a rank
#     sums        2 x 2 (n-1)/n N D s             bytes that it sends
#
# Both take as long, and a GPU waits half of the time, at D = (n-1) s peak / (6 rate). The table has
# both widths; that of backward is for an MLP whose first layer has E = 4 D outputs.


# %%
MACHINES = {
    "A100, NVLink 3": (312e12, 300e9),  # FLOP/s, dense bfloat16; bytes/s one way
    "H100, NVLink 4": (989e12, 450e9),
    "B200, NVLink 5": (2250e12, 900e9),
    "H100, 400 Gb/s": (989e12, 50e9),
}


def print_widths(n: int = 8) -> None:
    """Print for each machine how wide a model must be, in bfloat16 over n GPUs."""
    print0(f"\n  {n} GPUs, bfloat16{'':12}FLOPs per byte   backward hidden   forward waits > half")
    for machine, (peak, rate) in MACHINES.items():
        hidden = outputs_that_hide_the_sum(n, peak, rate) / 4
        half = outputs_that_hide_the_sum(n, peak, rate) / 6
        ratio = f"{peak / rate:10,.0f}"
        print0(f"  {machine:24}{ratio:>18}   from D = {hidden:6,.0f}   below D = {half:6,.0f}")
    print0()


# %% [markdown]
# ## 3. How it is measured
#
# No clock: on two cores, sums and products share the cores, and nothing could be hidden. What
# decides is the *order* in which a rank asks for things, and that can be logged: a product of two
# matrices with its FLOPs, the start of a sum with its bytes, and the wait for it. A sum that is not
# asynchronous is waited for at once.


# %%
Event = tuple[str, int]  # ("product", FLOPs), ("start", bytes), ("wait", 0)


class LoggedProducts(TorchDispatchMode):
    """Logs each matrix product: autograd's too, for it sits beneath torch's dispatcher."""

    def __init__(self, log: list[Event]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            columns = args[1].shape[1]
            self.log.append(("product", 2 * args[0].numel() * columns))
        return func(*args, **(kwargs or {}))


class LoggedSum:
    """A sum that has started; it logs when it is waited for."""

    def __init__(self, work: dist.Work, log: list[Event]) -> None:
        self.work = work
        self.log = log

    def wait(self) -> None:
        self.log.append(("wait", 0))
        self.work.wait()


def logged(backward: Callable) -> tuple[list[Event], tuple]:
    """Run a backward pass; return what it asked for, in order, and its two gradients."""
    log = []
    start_sum = dist.all_reduce

    def all_reduce_logged(x: torch.Tensor, async_op: bool = False, **options: object) -> LoggedSum:
        log.append(("start", x.nbytes))
        started = LoggedSum(start_sum(x, async_op=True, **options), log)
        if not async_op:
            started.wait()
        return started

    with LoggedProducts(log), patch.object(dist, "all_reduce", all_reduce_logged):
        gradients = backward()
    return log, gradients


def during_the_sum(log: list[Event]) -> list[int]:
    """The FLOPs of each product between the start of the sum and the wait for it."""
    names = [name for name, _ in log]
    if "wait" not in names:
        return []
    meanwhile = log[names.index("start") : names.index("wait")]
    return [flops for name, flops in meanwhile if name == "product"]


# %% [markdown]
# The gradients are compared with those of the whole layer in one process, in float64.


# %%
class Case:
    """A layer's whole weight, an input and a gradient of the output, the same on every rank."""

    def __init__(self, device: torch.device, tokens: int = N, outputs: int = E) -> None:
        torch.manual_seed(0)
        factory = {"device": device, "dtype": torch.float64}
        self.x_ND = torch.randn(tokens, D, **factory, requires_grad=True)
        self.weight_ED = torch.randn(outputs, D, **factory, requires_grad=True)
        self.grad_NE = torch.randn(tokens, outputs, **factory)

    def part(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's weight (e, D), and gradient of its output (N, e)."""
        weight_eD = self.weight_ED.detach().chunk(WORLD_SIZE)[RANK].clone()
        return weight_eD.requires_grad_(), self.grad_NE.chunk(WORLD_SIZE, dim=1)[RANK]

    def error(self, grad_ND: torch.Tensor, grad_eD: torch.Tensor) -> float:
        """How far a rank's two gradients are from one process's."""
        y_NE = self.x_ND @ self.weight_ED.T
        due_ND, due_ED = torch.autograd.grad(y_NE, (self.x_ND, self.weight_ED), self.grad_NE)
        due_eD = due_ED.chunk(WORLD_SIZE)[RANK]
        return max(relative_error(grad_ND, due_ND), relative_error(grad_eD, due_eD))


TOLERANCE = 2 * E * 2**-53  # one sum of E terms, in another order


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def backward_of(
    layer: Callable, x_ND: torch.Tensor, weight_eD: torch.Tensor, grad_Ne: torch.Tensor
) -> Callable:
    """Run the layer forward; return its backward pass, to be called as often as you like."""
    y_Ne = layer(x_ND, weight_eD)
    return lambda: torch.autograd.grad(y_Ne, (x_ND, weight_eD), grad_Ne, retain_graph=True)


# %% [markdown]
# First the order of both layers; then the FLOPs of the product that hides the sum, per byte that a
# ring sends for it, also with more tokens and with more outputs.


# %%
def check_order(device: torch.device) -> None:
    """Claim each layer's gradients, and how many products come before and during its sum."""
    case = Case(device)
    weight_eD, grad_Ne = case.part()
    for name, layer in (("plain", plain_columns), ("overlapped", OverlappedColumns.apply)):
        log, gradients = logged(backward_of(layer, case.x_ND, weight_eD, grad_Ne))
        names = [event for event, _ in log]
        print0(f"{'':13}{name}: {', '.join(names)}")
        claim(f"{name}: error of the gradients", 0, case.error(*gradients), atol=TOLERANCE)
        before = names[: names.index("start")].count("product")
        if name == "plain":
            claim("plain: products before the sum", 2, before, question=1)
        else:
            claim("overlapped: products before the sum", 1, before)
            during = len(during_the_sum(log))
            claim("overlapped: products during the sum", 1, during, question=2)


def check_flops_per_byte(device: torch.device) -> None:
    """Claim that width decides, and tokens do not."""
    if WORLD_SIZE == 1:
        blocked("FLOPs hidden behind, per byte sent", needs="2 ranks")
        return
    expected = E / ((WORLD_SIZE - 1) * 8)
    claim("FLOPs hidden behind, per byte sent", expected, flops_per_byte(Case(device)), question=3)
    measured = flops_per_byte(Case(device, tokens=4 * N))
    claim("four times the tokens: FLOPs per byte", expected, measured, question=4)
    measured = flops_per_byte(Case(device, outputs=2 * E))
    claim("twice the outputs: FLOPs per byte", 2 * expected, measured)


def flops_per_byte(case: Case) -> float:
    """FLOPs of the products during the sum, per byte that each rank of a ring sends."""
    weight_eD, grad_Ne = case.part()
    log, _ = logged(backward_of(OverlappedColumns.apply, case.x_ND, weight_eD, grad_Ne))
    added_up = sum(nbytes for name, nbytes in log if name == "start")
    sent = 2 * (WORLD_SIZE - 1) / WORLD_SIZE * added_up
    return sum(during_the_sum(log)) / sent


# %% [markdown]
# ## 4. On GPUs: how much of the sum is hidden
#
# Here the clock decides: CUDA events around the backward pass of a layer of 32,768 outputs for
# 8,192 tokens 8,192 wide, in bfloat16: the same three lines, in a row and overlapped. What can be
# saved at most is the shorter of product and sum, each measured alone. The claim asks for half of
# that. The rest may go: NCCL's kernel and the product share the GPU's multiprocessors and memory.


# %%
def measure_on_gpus(device: torch.device) -> None:
    """Claim that the overlapped layer saves half of what can be hidden, or more."""
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked("time saved / what can be hidden", needs="2 GPUs with bfloat16")
        return
    factory = {"device": device, "dtype": torch.bfloat16}
    e = 32768 // WORLD_SIZE
    x_ND = torch.randn(8192, 8192, **factory, requires_grad=True)
    weight_eD = torch.randn(e, 8192, **factory, requires_grad=True)
    grad_Ne = torch.randn(8192, e, **factory)

    def in_a_row() -> torch.Tensor:
        grad_ND = grad_Ne @ weight_eD
        dist.all_reduce(grad_ND)
        return grad_Ne.T @ x_ND

    plain = median_ms(in_a_row)
    overlapped = median_ms(backward_of(OverlappedColumns.apply, x_ND, weight_eD, grad_Ne))
    product = median_ms(lambda: grad_Ne.T @ x_ND)
    grad_like = torch.zeros_like(x_ND)
    summing = median_ms(lambda: dist.all_reduce(grad_like))
    print0(f"{'':13}backward: {plain:.2f} ms in a row, {overlapped:.2f} ms overlapped;")
    print0(f"{'':13}alone, the product takes {product:.2f} ms and the sum {summing:.2f} ms")
    saved = share_saved(plain, overlapped, product, summing)
    claim("time saved / what can be hidden", 0.5, saved, ">=", timed=True)


def share_saved(plain: float, overlapped: float, product: float, summing: float) -> float:
    """What overlapping saves, as a share of the shorter of the two things that overlap."""
    return (plain - overlapped) / min(product, summing)


def median_ms(work: Callable, repeats: int = 20) -> float:
    """Return the median time of `work()` on this rank's GPU, in milliseconds."""
    times = []
    with torch.no_grad():
        for _ in range(repeats + 3):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times[3:])[repeats // 2]


# %% [markdown]
# ## What you should have seen
#
# 1. Two. `F.linear` has one backward node for both products, and f's node comes after it. An
#    asynchronous sum in f would start too late for both. DTensor's layer does the same.
# 2. One, that of the weight. The other one computes what is summed. (The layer before could not
#    start either: it needs dX.)
# 3. 64 on 4 ranks: 1,536 / (3 x 8).
# 4. 64. Product and sum both grow with the tokens. A larger batch hides data parallelism's sums,
#    which do not grow with it, but not these.
#
# **How wide?** The table's widths on 8 H100 come from 7 x 2 x 989e12 / 450e9 = 30,769 outputs. In
# Llama 3 70B (D = 8,192) the MLP's first layer has 57,344 outputs, gate and up together, and hides
# its sum. Attention's has 10,240, with 8 key-value heads, and hides a third. With 8 ranks over 400
# Gb/s no model is wide enough. From A100 to B200 FLOPs grew faster than NVLink, and the width with
# them. Two things make it smaller. A GPU reaches perhaps two thirds of its peak. And from H100 on,
# NVLink SHARP adds up in the switch: 8 GPUs send 0.64 of what a ring does, many GPUs half.
#
# **Try.** With a wait before the second product the gradients stay right, and four rows fail: 0
# products during the sum, and three times 0 FLOPs per byte. Without any wait the same four fail,
# and the next layer reads dX while it may still be summed. A small sum has often ended by then, so
# the error of the gradients fails only now and then: a race that may never show in a test.
#
# **On GPUs** the order of launch is not yet overlap. NCCL's kernel and the product become ready at
# the same moment, when dY_i A_i' is done, and the product can take all multiprocessors before the
# sum gets any. On GPUs up to Hopper Megatron-LM therefore sets CUDA_DEVICE_MAX_CONNECTIONS=1, as
# this lesson does: with one hardware queue, kernels start in the order in which they were launched.
#
# **When to use it.** In backward, if you write the layer and it is wide: it gives the same
# gradients. Megatron-LM's ColumnParallelLinear and Transformer Engine's do it. With sequence
# parallelism the all-reduce becomes a reduce-scatter, which hides behind the same product, and the
# all-gather that repeats X hides behind dY_i A_i'. Forward, and on narrow models, a sum can only
# hide behind *another piece of the batch*: a product is cut by tokens, and the sum of one piece
# travels while the next is computed. That is what async tensor parallelism in torch.compile and
# userbuffers in Transformer Engine do.
#
# **When not.** Where a link is slow no order helps: forward sums remain exposed. Keep tensor
# parallelism inside an NVLink domain, and take fewer ranks rather than more: n-1 is in the width.


# %%
def main() -> None:
    command_line()
    sizes = [ranks for ranks in range(1, E + 1) if E % ranks == 0]
    launch(sizes)
    if WORLD_SIZE not in sizes:
        rule = f"ranks must share {E} outputs evenly; got {WORLD_SIZE}"
        refuse(f"{rule}; set --nproc-per-node to 1, 2, 3, 4, 6, 8, 12, 16 or so")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # kernels start as launched
    device = setup()
    check_order(device)
    check_flops_per_byte(device)
    print_widths()
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
