"""Tensor parallelism: one layer over several ranks
===============================================

**Question.** A layer is too big or too slow for one device. Along which cuts can several ranks
compute it together, and what must they tell each other?

**Predict.** Two linear layers with GELU between them run on four ranks, each holding a quarter of
both weights. How many all-reduces does that take forward, and backward? How many a transformer
block? How many more bytes are sent with a reduce-scatter and an all-gather for each all-reduce?

**Run.**

    torchrun --standalone --nproc-per-node=4 04_model_tensor_parallel.py   # NCCL with 4 GPUs
    python 04_model_tensor_parallel.py                                     # the same; else gloo

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 9 s; not run on GPUs) one sum forward
and one backward for a pair of layers cut by columns, then by rows: two of each for a block, where
DTensor puts them too. Cutting the tokens as well sends not one byte more and spares the norms
(n-1)/n of what they keep. All results equal one process's to 2e-15.

**Next.** exercises/10_tensor_parallel_mlp; then parallelism/05_pipeline_parallel.py
"""

import argparse
import contextlib
import copy
import ctypes
import functools
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.distributed.tensor.debug import CommDebugMode

WORLD_SIZES = range(1, 25)  # those that divide the heads
FLAGS: dict[str, dict] = {}  # flag -> keyword arguments of argparse's add_argument

# Shapes: T tokens, B batch, D width, H heads, K = D / H numbers a head; small letters t, h, f are
# one rank's share of tokens, heads, features. Tokens come first, so that a share is contiguous.
T, B, D, H = 24, 2, 96, 24
# Distances are largest difference / largest number, in float64. Each of about 20 operations in a
# row adds up to 4D terms in another order than one process does.
ROUNDING = 20 * 4 * D * 2**-53


def main(options: argparse.Namespace) -> None:
    rule = f"needs a number of ranks that divides {H} heads, got {WORLD_SIZE}"
    require(H % WORLD_SIZE == 0, f"{rule}; set --nproc-per-node to 1, 2, 3, 4, 6, 8, 12 or 24")
    device = setup()
    torch.manual_seed(0)  # the same block on every rank
    whole = Block(D, H, device=device, dtype=torch.float64)
    layers_cut(whole)
    tokens_cut_too(whole)
    the_same_by_dtensor(whole)
    finish()


# %% [markdown]
# ## 1. By columns, by rows, f and g
#
# y = x W' + b, where W' is W transposed, can be cut two ways (Shoeybi et al., 2019, section 3). *By
# columns* of W', each rank computes some features of y from all of x: nothing is summed forward,
# but each rank ends up with one summand of x's gradient. *By rows*, each rank takes some features
# of x and holds one summand of y; x's gradient needs nothing. Each cut costs one sum, which one of
# two conjugate functions takes: f backward, g forward.


# %%
class Conjugate(torch.autograd.Function):
    """One thing done to a tensor on its way forward, another to its gradient on the way back."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, there: Callable, back: Callable) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def f(x_TBD: torch.Tensor) -> torch.Tensor:
    """Shoeybi et al. (2019), section 3: identity forward, all-reduce backward."""
    return Conjugate.apply(x_TBD, untouched, summed)


def g(y_TBD: torch.Tensor) -> torch.Tensor:
    """Shoeybi et al. (2019), section 3: all-reduce forward, identity backward."""
    return Conjugate.apply(y_TBD, summed, untouched)


def untouched(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def summed(part: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(whole := part.clone(memory_format=torch.contiguous_format))
    return whole


class ColumnLinear(nn.Module):
    """This rank's output features of `whole`: x (T, B, D) -> y (T, B, f)."""

    def __init__(self, whole: nn.Linear, enter: Callable = f) -> None:
        super().__init__()
        self.weight, self.enter = nn.Parameter(cut(whole.weight, 0)), enter
        self.bias = None if whole.bias is None else nn.Parameter(cut(whole.bias, 0))

    def forward(self, x_TBD: torch.Tensor) -> torch.Tensor:
        return F.linear(self.enter(x_TBD), self.weight, self.bias)


class RowLinear(nn.Module):
    """This rank's input features of `whole`: x (T, B, f) -> y (T, B, D)."""

    def __init__(self, whole: nn.Linear, leave: Callable = g) -> None:
        super().__init__()
        self.weight, self.leave = nn.Parameter(cut(whole.weight, 1)), leave
        self.bias = copy.deepcopy(whole.bias)  # all of it, on every rank

    def forward(self, x_TBf: torch.Tensor) -> torch.Tensor:
        y_TBD = self.leave(F.linear(x_TBf, self.weight))
        return y_TBD if self.bias is None else y_TBD + self.bias  # added after the sum, once


def cut(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy of this rank's part along `dim`; the parts differ by one at most."""
    return whole.detach().tensor_split(WORLD_SIZE, dim)[RANK].clone()


# %% [markdown]
# ## 2. A transformer block: two sums forward, two backward
#
# Columns first, then rows, and what lies between needs no communication. In the MLP that is GELU,
# which works on each feature alone. In attention it is the softmax, which works on each head alone:
# qkv's features are ordered by head, so that a slice of them is whole heads. f opens a pair, g
# closes it: one all-reduce of T B D numbers forward and one backward for the MLP, the same for
# attention. Norms and residuals run whole on every rank.


# %%
class Block(nn.Module):
    """A transformer block: (T, B, D) -> (T, B, D)."""

    def __init__(self, width: int, heads: int, **kind: object) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width, **kind), nn.LayerNorm(width, **kind)
        self.qkv, self.out = nn.Linear(width, 3 * width, **kind), nn.Linear(width, width, **kind)
        self.up = nn.Linear(width, 4 * width, **kind)
        self.down = nn.Linear(4 * width, width, **kind)

    def attention(self, x_TBD: torch.Tensor) -> torch.Tensor:
        qkv_TBh3K = self.qkv(x_TBD).unflatten(-1, (-1, 3, self.head))  # -1: as many as are here
        qkv_3BhTK = qkv_TBh3K.permute(3, 1, 2, 0, 4)
        y_BhTK = F.scaled_dot_product_attention(*qkv_3BhTK, is_causal=True)
        return self.out(y_BhTK.permute(2, 0, 1, 3).flatten(2))

    def mlp(self, x_TBD: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_TBD)))

    def forward(self, x_TBD: torch.Tensor) -> torch.Tensor:
        x_TBD = x_TBD + self.attention(self.norm1(x_TBD))
        return x_TBD + self.mlp(self.norm2(x_TBD))


def split(block: Block, enter: Callable = f, leave: Callable = g) -> Block:
    """This rank's part of a block; ValueError if its heads cannot be shared evenly."""
    if (heads := block.out.in_features // block.head) % WORLD_SIZE:
        rule = f"ranks must share heads evenly, got {heads} heads for {WORLD_SIZE} ranks"
        raise ValueError(f"{rule}; use a number of ranks that divides {heads}")
    part = copy.deepcopy(block)
    part.qkv, part.up = ColumnLinear(block.qkv, enter), ColumnLinear(block.up, enter)
    part.out, part.down = RowLinear(block.out, leave), RowLinear(block.down, leave)
    return part


CUT = {"qkv.weight": 0, "qkv.bias": 0, "up.weight": 0, "up.bias": 0}  # parameter: cut along dim
CUT |= {"out.weight": 1, "down.weight": 1}
PASSES = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}  # of a ring


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Collectives called inside, by name; "bytes" they pass on; "kept": numbers autograd keeps."""
    calls, kept, real = Counter(), {}, {name: getattr(dist, name) for name in PASSES}

    def call(name: str, *buffers: torch.Tensor) -> None:
        calls.update({name: 1, "bytes": PASSES[name] * max(buffer.nbytes for buffer in buffers)})
        real[name](*buffers)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()  # alive, so no other has its address
        kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        calls["kept"] = sum(kept.values())
        return tensor

    wrapped = {name: functools.partial(call, name) for name in PASSES}
    with mock.patch.multiple(dist, **wrapped), saved_tensors_hooks(keep, untouched):
        yield calls


def run(layer: Callable, x: torch.Tensor, grad: torch.Tensor, watch: Callable) -> tuple:
    """One step: output, gradient of the input, what `watch` saw forward and backward."""
    x = x.detach().requires_grad_()
    with watch() as forward:
        y = layer(x)
    with watch() as backward:
        y.backward(grad)
    return y.detach(), x.grad, forward, backward


def compare(
    part: Block, whole: Block, layer: str, cuts: tuple = (None, None), watch: Callable = counted
) -> tuple[float, Counter, Counter]:
    """Step a layer, its input and output cut: distance of all results from one process, calls."""
    torch.manual_seed(1)  # the same batch on every rank
    x = torch.randn(T, B, D, device=whole.up.weight.device, dtype=whole.up.weight.dtype)
    grad = torch.randn_like(getattr(whole, layer)(x))
    into, out = (lambda t, d=dim: t if d is None else cut(t, d) for dim in cuts)
    whole.zero_grad(), part.zero_grad()
    y, gx, *_ = run(getattr(whole, layer), x, grad, counted)
    *ours, forward, backward = run(getattr(part, layer), into(x), out(grad), watch)
    if cuts == (0, 0) and watch is counted:
        sum_token_gradients(part)
    off = [*map(distance, ours, (out(y), into(gx)))]
    for (name, p), due in zip(part.named_parameters(), whole.parameters(), strict=True):
        if due.grad is not None:
            mine = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
            is_cut = name in CUT and not isinstance(p, DTensor)
            off.append(distance(mine, cut(due.grad, CUT[name]) if is_cut else due.grad))
    return max(off), forward, backward


def distance(ours: torch.Tensor, oracle: torch.Tensor) -> float:
    return ((ours - oracle).abs().max() / oracle.abs().max()).item()


def layers_cut(whole: Block) -> None:
    columns, rows = ("up", (None, 2), 0, 1), ("out", (2, None), 1, 0)
    pairs = [(name, (None, None), 1, 1) for name in ("mlp", "attention")]
    for name, cuts, *due in columns, rows, *pairs:
        off, forward, backward = compare(split(whole), whole, name, cuts)
        claim(f"{name}: results, from one process", 0, off, atol=ROUNDING)
        claim(f"{name}: all-reduces forward", due[0], forward["all_reduce"])
        claim(f"{name}: all-reduces backward", due[1], backward["all_reduce"])


# %% [markdown]
# ## 3. Sequence parallelism: the same bytes, less memory
#
# Norms and residuals work on each token alone, yet every rank keeps all of their inputs for the
# backward pass. An all-reduce is a reduce-scatter, then an all-gather; pull the two apart, and in
# between each rank holds T/n tokens (Korthikanti et al., 2022, section 4.2.2). A reduce-scatter
# stands where g stood, an all-gather where f stood; backward they change places. The price: norms
# and row biases see T/n tokens, so their gradients must be summed before the optimizer steps; and
# the gathered input is still kept whole (Megatron keeps T/n, and gathers once more backward).


# %%
def gather_tokens(x_tBD: torch.Tensor) -> torch.Tensor:
    """Korthikanti et al. (2022), their g: all-gather forward, reduce-scatter backward."""
    return Conjugate.apply(x_tBD, gathered, sum_scattered)


def scatter_tokens(y_TBD: torch.Tensor) -> torch.Tensor:
    """Korthikanti et al. (2022), g-bar: reduce-scatter forward, all-gather backward."""
    return Conjugate.apply(y_TBD, sum_scattered, gathered)


def gathered(x_tBD: torch.Tensor) -> torch.Tensor:
    x_TBD = x_tBD.new_empty(WORLD_SIZE * x_tBD.shape[0], *x_tBD.shape[1:])
    dist.all_gather_into_tensor(x_TBD, x_tBD.contiguous())
    return x_TBD


def sum_scattered(y_TBD: torch.Tensor) -> torch.Tensor:
    y_tBD = y_TBD.new_empty(y_TBD.shape[0] // WORLD_SIZE, *y_TBD.shape[1:])
    dist.reduce_scatter_tensor(y_tBD, y_TBD.contiguous())
    return y_tBD


def sum_token_gradients(part: Block) -> None:
    """After a backward over T/n tokens. (Megatron sends all of these in one message.)"""
    for name, p in part.named_parameters():
        if name not in CUT:
            dist.all_reduce(p.grad)


def tokens_cut_too(whole: Block) -> None:
    _, *without = compare(split(whole), whole, "forward")
    part = split(whole, gather_tokens, scatter_tokens)
    off, *calls = compare(part, whole, "forward", (0, 0))
    claim("tokens cut: results, from one process", 0, off, atol=ROUNDING)
    for way, seen in zip(("forward", "backward"), calls, strict=True):
        claim(f"tokens cut: all-gathers {way}", 2, seen["all_gather_into_tensor"])
        claim(f"tokens cut: reduce-scatters {way}", 2, seen["reduce_scatter_tensor"])
    ratio = sum(seen["bytes"] for seen in calls) / sum(seen["bytes"] for seen in without)
    claim("tokens cut: bytes sent / bytes sent without", 1, ratio)
    norms = 2 * T * B * (D + 2)  # each keeps its input and, per token, mean and 1 / deviation
    spared = without[0]["kept"] - calls[0]["kept"]
    claim("tokens cut: numbers spared, (1-1/n) of the norms'", norms - norms // WORLD_SIZE, spared)


# %% [markdown]
# ## 4. The same block by `parallelize_module`
#
# PyTorch makes parameters DTensors (a local tensor, a mesh, a placement) and derives collectives
# from placements that do not match. Column layers hand out local tensors: attention sees its heads.


# %%
def by_dtensor(block: Block, mesh: dist.DeviceMesh, cut_tokens: bool = False) -> Block:
    """A copy of `block` under PyTorch's plan."""
    at = Shard(0) if cut_tokens else Replicate()
    plan = {name: parallel.ColwiseParallel(input_layouts=at) for name in ("qkv", "up")}
    plan |= {name: parallel.RowwiseParallel(output_layouts=at) for name in ("out", "down")}
    if cut_tokens:
        plan |= {norm: parallel.SequenceParallel(sequence_dim=0) for norm in ("norm1", "norm2")}
    return parallel.parallelize_module(copy.deepcopy(block), mesh, plan)


def the_same_by_dtensor(whole: Block) -> None:
    mesh = dist.init_device_mesh(whole.up.weight.device.type, (WORLD_SIZE,))
    for tokens, dim, ways in ("whole", None, ()), ("cut", 0, (gather_tokens, scatter_tokens)):
        _, *ours = compare(split(whole, *ways), whole, "forward", (dim, dim))
        theirs = by_dtensor(whole, mesh, cut_tokens=dim == 0)
        off, *seen = compare(theirs, whole, "forward", (dim, dim), CommDebugMode)
        claim(f"DTensor, tokens {tokens}: results, from one process", 0, off, atol=ROUNDING)
        for side, mine, comm in zip(("forward", "backward"), ours, seen, strict=True):
            calls = {str(op).split(".")[-1]: n for op, n in comm.get_comm_counts().items()}
            mine = mine if WORLD_SIZE > 1 else Counter()  # alone, DTensor calls nothing
            unlike = sum(abs(mine[name] - calls.get(name, 0)) for name in PASSES)
            claim(f"DTensor, tokens {tokens}: calls unlike ours {side}", 0, unlike)


# %% [markdown]
# ## The plumbing, the same in every lesson; fundamentals/02_launching_processes.py explains it

# %%
ledger: list[dict] = []  # every claim made so far, the same on every rank
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def command_line() -> argparse.Namespace:
    """Read FLAGS; --help and mistakes end here, before any collective, and are said once."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for flag, about in FLAGS.items():
        parser.add_argument(flag, **about)
    parser.print_help = lambda: say(parser.format_help())
    parser.error = lambda text: require(False, f"{text}\n{parser.format_usage().rstrip()}")
    rule = f"needs a number of ranks in {WORLD_SIZES}, got {WORLD_SIZE}; set --nproc-per-node"
    require("RANK" not in os.environ or WORLD_SIZE in WORLD_SIZES, rule)
    return parser.parse_args()


def launch() -> None:
    """Plain `python`: be torchrun, one rank per GPU, else 4, without its wall of text."""
    from torch.distributed.elastic.multiprocessing import api, errors
    from torch.distributed.run import main as torchrun

    ranks = gpus if (gpus := torch.cuda.device_count()) > 1 else 4
    ranks = ranks if ranks in WORLD_SIZES else WORLD_SIZES[0]
    os.environ |= {"LAUNCHER": str(os.getpid()), "OMP_NUM_THREADS": "1"}  # ranks share the cores
    logging.disable()  # the rank that failed says why
    here = ["--standalone", "--local-addr=127.0.0.1"]  # the host's name need not resolve
    try:
        torchrun([*here, f"--nproc-per-node={ranks}", *sys.argv])
    except errors.ChildFailedError as error:
        rank, first = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {first.signal_name()}" if first.exitcode < 0 else 1)
    except api.SignalException as error:
        sys.exit(128 + error.sigval)


def setup() -> torch.device:
    """Join the group torchrun describes: NCCL if every rank here has its own GPU, else gloo."""
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: no rank outlives a killed launcher,
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.environ.pop("LAUNCHER", parent := str(os.getppid())) != parent:
        sys.exit(1)  # nor one killed before this line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend, wait = "nccl" if gpu else "gloo", timedelta(minutes=2)
    dist.init_process_group(backend, device_id=device if gpu else None, timeout=wait)
    sys.excepthook = crash
    say(f"{WORLD_SIZE} ranks, {backend}, torch {torch.__version__}\n")
    say(f"{'':10}{'claim':55} {'predicted':20} measured")
    return device


def crash(*error: object) -> NoReturn:
    """An exception nobody caught: the first rank prints it, all leave at once; peers may wait."""
    first = dist.distributed_c10d._get_default_store().add("crash", 1) == 1
    time.sleep(1)  # if a peer's death is the cause, the launcher ends us meanwhile and names it
    if first:
        print(f"rank {RANK}:", file=sys.stderr)
        sys.__excepthook__(*error)
    os._exit(1)


def say(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def require(holds: bool, rule: str) -> None:
    """End the run, before its first collective, with one message: rule, value, remedy."""
    if not holds:
        time.sleep(10 if RANK else 0)  # rank 0 speaks; the launcher ends the others as it leaves
        sys.exit(f"{sys.argv[0]}: {rule}")


def claim(text: str, predicted: float, measured: float, sign="=", atol=0.0, rtol=0.0) -> None:
    """Record the worst rank's `measured sign predicted` (= <= >=), give or take the slack."""
    mine = float(predicted), float(measured), atol + rtol * abs(predicted)
    ranks = [mine] * WORLD_SIZE
    if dist.is_initialized():
        dist.all_gather_object(ranks, mine)
    over = {"=": abs, "<=": float, ">=": float.__neg__}[sign]
    excess = [over(m - p) - slack for p, m, slack in ranks]
    worst = max(range(len(ranks)), key=lambda r: excess[r] if excess[r] == excess[r] else 1e999)
    (p, m, slack), verdict = ranks[worst], "PASS" if excess[worst] <= 0 else "FAIL"  # NaN: FAIL
    off = "" if verdict == "PASS" else f"\n{'':10}off by {m - p:.3g} on rank {worst}"
    told, seen = (f"{x:,.{12 if x.is_integer() else 6}g}" for x in (p, m))
    between = f"{sign:>2} {told}" + (f" ±{float(f'{slack:.1g}'):g}" if slack else "")
    say(f"  {verdict:7} {text:55} {between:20} {seen}{off}")
    row = {"claim": text, "verdict": verdict, "rank": worst, "sign": sign}
    finite = m - m == 0  # JSON knows no other numbers
    record(row | {"predicted": p, "measured": m if finite else str(m), "slack": slack})


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    say(f"  BLOCKED {text:55} needs {needs}")
    record({"claim": text, "verdict": "BLOCKED", "needs": needs})


def record(row: dict) -> None:
    """Add to the ledger; LESSON_JSON, if set, names a file that is whole after every claim."""
    ledger.append(row)
    if RANK == 0 and (path := os.environ.get("LESSON_JSON")):
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        about = {"ranks": WORLD_SIZE, "gpu": gpu, "cpus": os.cpu_count(), "python": sys.version}
        about |= {"torch": torch.__version__, "argv": sys.argv, "date": time.strftime("%F")}
        with open(path + ".part", "w") as file:
            json.dump(about | {"ledger": ledger}, file, indent=1)
        os.replace(path + ".part", path)


def finish() -> NoReturn:
    """Leave the group; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    count = [row["verdict"] for row in ledger].count
    say(f"\n  {count('PASS')} PASS, {count('FAIL')} FAIL, {count('BLOCKED')} BLOCKED")
    code = int(count("PASS") == 0 or count("FAIL") > 0)
    if __name__ == "__main__":  # threads of a group that something still holds can abort sys.exit
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    options = command_line()
    if "RANK" in os.environ or len(WORLD_SIZES) == 1:
        main(options)
    else:
        launch()
