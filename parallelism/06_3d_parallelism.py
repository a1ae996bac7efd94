"""3D parallelism: which cut belongs on which link
===============================================

**Question.** Data, pipeline and tensor parallelism each send something else. Joined in one mesh,
which of them may cross nodes, and which must stay on NVLink?

**Predict.** A layer 1024 wide runs on four H100s, 256 features each, and its output is gathered
after every layer. What share of the time do the GPUs compute if NVLink joins them, and would a
bigger batch help? Then: of the bytes that a GPU sends in a step of a 145.6B GPT on 8 x 8 x 24
GPUs, how many are tensor, how many pipeline, how many data parallelism's?

**Run.**

    torchrun --standalone --nproc-per-node=4 06_3d_parallelism.py   # NCCL, if there are 4 GPUs
    python 06_3d_parallelism.py                                     # the same; else gloo

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 7 s; not run on GPUs) that FLOPs per
gathered byte, 2W/((n-1)s), know no batch: at W = 1024 in bfloat16 four H100s compute 13% of the
time on NVLink, 0.1% on 25 Gb/s Ethernet. On a mesh of (dp, pp, tp), bytes counted per axis equal
their formulas, by which a 145.6B GPT's GPU sends 338 GB a step for tensor, 10 for pipeline, 9 for
data parallelism: tensor parallelism takes NVLink, the others fit the network.

**Next.** fsdp/01_fsdp_basics.py trains a GPT with the library's sharded data parallelism.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from statistics import median
from typing import NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

WORLD_SIZES = range(1, 65)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {}  # flag -> keyword arguments of argparse's add_argument
# Distances are largest difference / largest number, in float64. Up to 10 operations in a row add
# up at most 4096 terms in another order than one process does.
ROUNDING = 10 * 4096 * 2**-53


def main(options: argparse.Namespace) -> None:
    device = setup()
    one_process_two_gpus()
    gather_after_every_layer(device)
    three_axes(device)
    which_axis_on_which_link()
    finish()


def distance(ours: torch.Tensor, oracle: torch.Tensor) -> float:
    return ((ours - oracle).abs().max() / oracle.abs().max()).item()


# %% [markdown]
# ## 1. The least traffic: one process, two GPUs
#
# Half of the layers on each GPU: `x.to("cuda:1")` is the message, one activation a step, and
# autograd sends one gradient back. Any link carries that. But one GPU works at a time, although the
# CPU launches ahead: of p GPUs each idles (p-1)/p. (parallelism/05_pipeline_parallel.py counts that
# in slots, over ranks, and fills the gaps.)


# %%
class OnDevices(nn.Sequential):
    """Parts of a model, each on its own device; `marks`: events before and after a part's work."""

    def place(self, devices: list[torch.device]) -> "OnDevices":
        self.devices, self.marks = devices, []
        for part, device in zip(self, devices, strict=True):
            part.to(device)
            for side in "forward_pre", "forward", "full_backward_pre", "full_backward":
                getattr(part, f"register_{side}_hook")(lambda *_, on=device: self.mark(on))
        return self

    def mark(self, device: torch.device) -> None:
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            self.marks.append(torch.cuda.current_stream(device).record_event(event))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, device in zip(self, self.devices, strict=True):
            x = part(x.to(device))
        return x


def idle_on_two_gpus() -> float:
    """The mean share of its time that each of two GPUs idles."""
    gpus, idle = [torch.device("cuda", i) for i in range(2)], []
    halves = [nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))) for _ in gpus]
    model = OnDevices(*halves).place(gpus)
    x = torch.randn(4096, 4096, device=gpus[0], requires_grad=True)
    for _ in range(6):
        model.marks.clear()
        start = time.perf_counter()
        model(x).sum().backward()
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        both = 2 * (time.perf_counter() - start)
        pairs = zip(model.marks[::2], model.marks[1::2], strict=True)
        idle.append(1 - sum(a.elapsed_time(b) for a, b in pairs) / 1e3 / both)
    return median(idle[1:])  # the first step warms up


def one_process_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        return blocked("one process, two GPUs: share of time idle", needs="2 GPUs")
    store = dist.distributed_c10d._get_default_store()  # waiting here leaves the GPUs alone
    idle = idle_on_two_gpus() if RANK == 0 else 0.5
    store.set("two GPUs", "done") if RANK == 0 else store.wait(["two GPUs"])
    claim("one process, two GPUs: share of time idle", 0.5, idle, atol=0.1)


# %% [markdown]
# ## 2. The most traffic: an all-gather after every layer
#
# A layer is W wide over n ranks; each computes W/n features, then an all-gather gives the next one
# all of its input. Per example a rank computes 2 W W/n FLOPs and receives (n-1)/n W numbers of s
# bytes: 2W/((n-1)s) FLOPs a byte. A bigger batch needs more of both; only width helps.


# %%
class GatherFeatures(torch.autograd.Function):
    """(B, W/n) -> (B, W): all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: object, y_Bw: torch.Tensor) -> torch.Tensor:
        all_nBw = y_Bw.new_empty(WORLD_SIZE * y_Bw.shape[0], y_Bw.shape[1])
        dist.all_gather_into_tensor(all_nBw, y_Bw.contiguous())
        return all_nBw.unflatten(0, (WORLD_SIZE, -1)).movedim(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: object, grad_BW: torch.Tensor) -> torch.Tensor:
        grad_nBw = grad_BW.unflatten(1, (WORLD_SIZE, -1)).movedim(1, 0).contiguous()
        dist.reduce_scatter_tensor(grad_Bw := torch.empty_like(grad_nBw[0]), grad_nBw.flatten(0, 1))
        return grad_Bw


def gather_after_every_layer(device: torch.device, layers: int = 4) -> None:
    width, kind = 1024 // WORLD_SIZE * WORLD_SIZE, {"device": device, "dtype": torch.float64}
    if WORLD_SIZE == 1:
        return blocked("FLOPs per gathered byte", needs="2 ranks")
    torch.manual_seed(0)  # the same on every rank
    weights = [torch.randn(width, width, **kind) / width**0.5 for _ in range(layers)]
    mine = [w.chunk(WORLD_SIZE)[RANK].clone().requires_grad_() for w in weights]
    for batch in 4, 16:
        x_BW = torch.randn(batch, width, **kind)
        y_BW, parts = x_BW, x_BW
        for w in weights:
            y_BW = F.linear(y_BW, w.requires_grad_()).tanh()
        spy = mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor)
        with spy as gathers, FlopCounterMode(display=False) as flops:
            for w in mine:
                parts = GatherFeatures.apply(F.linear(parts, w).tanh())
        due = torch.autograd.grad(y_BW.square().sum(), weights)
        ours = torch.autograd.grad(parts.square().sum() / WORLD_SIZE, mine)  # n equal losses
        off = [distance(a, b.chunk(WORLD_SIZE)[RANK]) for a, b in zip(ours, due, strict=True)]
        received = sum(out.nbytes - own.nbytes for (out, own), _ in gathers.call_args_list)
        ratio = 2 * width / ((WORLD_SIZE - 1) * x_BW.element_size())
        claim(f"batch {batch}: gradients, from one process", 0, max(off), atol=ROUNDING)
        claim(f"batch {batch}: all-gathers in {layers} layers, forward", layers, gathers.call_count)
        claim(f"batch {batch}: FLOPs per gathered byte", ratio, flops.get_total_flops() / received)
    starving()


LINKS = {"NVLink 4": 450, "PCIe 5.0 x16": 63, "400 Gb/s network": 50, "25 Gb/s Ethernet": 3.125}


def starving(peak: float = 989e12, n: int = 4, width: int = 1024, size: int = 2) -> None:
    """Print how long GPUs of `peak` FLOP/s compute; LINKS are GB/s one way."""
    say(f"\n  {width} wide in bfloat16 over {n} H100, gathered after every layer")
    for link, rate in LINKS.items():
        have, need = 2 * width / ((n - 1) * size), peak / (rate * 1e9)  # FLOPs a byte
        half = f"half of it if {width * need / have:,.0f} wide"
        say(f"  {link:18} computes {have / (have + need):6.1%} of the time, {half}")


# %% [markdown]
# ## 3. Three axes at once
#
# A DeviceMesh (dp, pp, tp) numbers the ranks like an array: the last axis is innermost, so ranks
# that differ in tp alone are neighbours. Every rank belongs to one group per axis. On it, a stack
# of residual MLPs: tp splits each layer by columns and rows (f and g), pp splits the stack, dp the
# batch. What a rank sends is counted per axis, at the call, by the rank's part in a ring.


# %%
Group = dist.ProcessGroup | None  # None: the layer is not split


def mesh_of(device: torch.device) -> dist.DeviceMesh:
    tp = 2 if WORLD_SIZE % 2 == 0 else 1
    pp = 2 if WORLD_SIZE % 4 == 0 else 1
    shape, names = (WORLD_SIZE // (tp * pp), pp, tp), ("dp", "pp", "tp")
    return dist.init_device_mesh(device.type, shape, mesh_dim_names=names)


class Conjugate(torch.autograd.Function):
    """Megatron's f if `back`, g if not: an all-reduce on the way back, or forward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group, back: bool) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return x.view_as(x) if back else summed(x, group)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple:
        return (summed(grad, ctx.group) if ctx.back else grad), None, None


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    if group:
        dist.all_reduce(x := x.clone(), group=group)
    return x


class MLP(nn.Module):
    """x + down(gelu(up(x))), or the part of it that a rank of `group` holds."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, group: Group) -> None:
        super().__init__()
        self.group = group
        n, r = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
        self.up = nn.Parameter(up.chunk(n, 0)[r].clone())
        self.down = nn.Parameter(down.chunk(n, 1)[r].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(F.linear(Conjugate.apply(x, self.group, True), self.up))
        return x + Conjugate.apply(F.linear(h, self.down), self.group, False)


@contextlib.contextmanager
def sent_by_axis(mesh: dist.DeviceMesh) -> Iterator[Counter]:
    """Bytes this rank sends inside, by axis: 2(n-1)/n of what a ring all-reduces, all of a send."""
    axis = {mesh.get_group(name): name for name in mesh.mesh_dim_names}
    sent, all_reduce, send = Counter(), dist.all_reduce, dist.send

    def count_sum(x: torch.Tensor, group: dist.ProcessGroup) -> None:
        n = dist.get_world_size(group)
        sent[axis[group]] += 2 * (n - 1) / n * x.nbytes
        all_reduce(x, group=group)

    def count_send(x: torch.Tensor, group: dist.ProcessGroup, group_dst: int) -> None:
        sent[axis[group]] += x.nbytes
        send(x, group=group, group_dst=group_dst)

    with mock.patch.multiple(dist, all_reduce=count_sum, send=count_send):
        yield sent


def step(stage: nn.Module, micros: list[torch.Tensor], mesh: dist.DeviceMesh, share: float) -> None:
    """GPipe over pp, a sum over dp; the loss is `share` of the sum of squares of the outputs."""
    pp, dp = mesh.get_group("pp"), mesh.get_group("dp")
    s, last, held = dist.get_rank(pp), dist.get_world_size(pp) - 1, []
    for x in micros:
        if s > 0:
            dist.recv(x, group=pp, group_src=s - 1)
        y = stage(x.requires_grad_())
        if s < last:
            dist.send(y.detach(), group=pp, group_dst=s + 1)
        held.append((x, y))
    for x, y in held:
        grad = torch.empty_like(y)
        if s < last:
            dist.recv(grad, group=pp, group_src=s + 1)
        y.backward(grad) if s < last else (share * y.square().sum()).backward()
        if s > 0:
            dist.send(x.grad, group=pp, group_dst=s - 1)
    for p in stage.parameters():
        dist.all_reduce(p.grad, group=dp)


def traffic(dp: int, pp: int, tp: int, sums: int, passed: int, gradients: float) -> dict:
    """Bytes a rank sends in a step: `sums` bytes are all-reduced over tp, `passed` bytes go one way
    through the pipeline, `gradients` bytes are the rank's own."""
    along_tp, along_dp = 2 * (tp - 1) / tp * sums, 2 * (dp - 1) / dp * gradients
    return {"dp": along_dp, "pp": 2 * passed * (pp > 1), "tp": along_tp}


def three_axes(device: torch.device, layers: int = 4, width: int = 32, m: int = 4) -> None:
    mesh, kind = mesh_of(device), {"device": device, "dtype": torch.float64}
    (dp, pp, tp), (d, s, t) = mesh.shape, mesh.get_coordinate()
    torch.manual_seed(0)  # the same on every rank
    sizes = ((4 * width, width), (width, 4 * width))
    whole = [[torch.randn(size, **kind) / 8 for size in sizes] for _ in range(layers)]
    x_BD = torch.randn(dp * m * 2, width, **kind, requires_grad=True)
    oracle = nn.Sequential(*(MLP(*each, None) for each in whole))
    oracle(x_BD).square().mean().backward()
    mine = slice(s * layers // pp, (s + 1) * layers // pp)
    stage = nn.Sequential(*(MLP(*each, mesh.get_group("tp")) for each in whole[mine]))
    micros = [x.clone() for x in x_BD.detach().chunk(dp)[d].chunk(m)]
    with sent_by_axis(mesh) as sent:
        step(stage, micros, mesh, share=1 / x_BD.numel())
    off = []
    for ours, due in zip(stage, oracle[mine], strict=True):
        off.append(distance(ours.up.grad, due.up.grad.chunk(tp)[t]))
        off.append(distance(ours.down.grad, due.down.grad.chunk(tp, 1)[t]))
    if s == 0:
        off.append(distance(torch.cat([x.grad for x in micros]), x_BD.grad.chunk(dp)[d]))
    say(f"\n  mesh (dp, pp, tp) = {tuple(mesh.shape)}")
    claim("3D: gradients, from one process", 0, max(off), atol=ROUNDING)
    own, passed = sum(p.nbytes for p in stage.parameters()), sum(x.nbytes for x in micros)
    due = traffic(dp, pp, tp, 2 * layers // pp * passed, passed, own)
    due["pp"] *= ((s > 0) + (s < pp - 1)) / 2  # the ends have one neighbour
    for axis in mesh.mesh_dim_names:
        claim(f"3D: bytes sent along {axis}", due[axis], sent[axis], rtol=1e-12)


# %% [markdown]
# ## 4. Which axis on which link
#
# The same formulas for a published run: Megatron's 145.6B GPT on 1536 A100s (Narayanan et al.,
# 2021, table 1): 80 layers of two pairs each, so four all-reduces a layer. Eight GPUs share NVLink;
# what leaves the node has one 200 Gb/s port a GPU. The innermost axis gets NVLink if it fits into
# eight, the others the network. And tensor parallelism waits for its messages four times a layer,
# while a pipeline's, and gradients', can pass behind other work.

# %%
GPT = {"layers": 80, "width": 12288, "tokens": 2048, "batch": 2304, "params": 145.6e9}


def which_axis_on_which_link(nvlink: float = 300, network: float = 25) -> None:
    """Print GB and seconds per step; rates in GB/s one way, numbers of two bytes."""
    dp, pp, tp = 24, 8, 8
    passed = GPT["batch"] / dp * GPT["tokens"] * GPT["width"] * 2
    sums, gradients = 4 * GPT["layers"] / pp * passed, 2 * GPT["params"] / (pp * tp)
    sent = {axis: x / 1e9 for axis, x in traffic(dp, pp, tp, sums, passed, gradients).items()}
    names = "".join(f"{name:>10}" for name in (*sent, "together"))
    say(f"\n  {f'145.6B GPT, (dp, pp, tp) = {dp, pp, tp}':40}{names}")
    say(f"  {'GB a GPU sends in a step':40}" + "".join(f"{x:10.1f}" for x in sent.values()))
    for inner in "pp", "tp":
        rates = [nvlink if axis == inner else network for axis in sent]
        times = [x / rate for x, rate in zip(sent.values(), rates, strict=True)]
        row = "".join(f"{x:10.2f}" for x in (*times, sum(times)))
        say(f"  {'s with ' + inner + ' on NVLink':40}{row}")


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
