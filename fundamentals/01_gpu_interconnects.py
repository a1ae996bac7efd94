"""The wires between GPUs: what a datasheet promises, what a copy gets
===================================================================

**Question.** How fast can data reach a GPU from its own memory, its host, another GPU; and when
does that matter more than how fast it computes?

**Predict.** Write down before you run this:

1. NVLink 4 is sold as 900 GB/s per GPU, PCIe 5.0 x16 as 63 GB/s. How many times faster is it?
2. An H100 does 989 TFLOP/s and reads 3.35 TB/s. How many FLOPs per byte keep it from waiting for
   memory, and how many does adding two tensors do?
3. Your CPU copies 256 KiB and 256 MiB. By what factor do the two differ in GB/s?

**Run.**

    torchrun --standalone --nproc-per-node=8 01_gpu_interconnects.py   # a rank for each GPU
    python 01_gpu_interconnects.py --figure interconnects.png          # CPU

**You will have seen** (rank 0 of 4 on 2 cores, gloo, torch 2.15, 7 s; not yet run on GPUs) that
NVLink 4 is 7.1 times PCIe 5.0, not 14; that with the ridge near 3 FLOP/byte a matrix-vector product
leaves most FLOPs unused and a matrix product 98% of the memory bandwidth; and that a copy in cache
is about twice as fast as one in DRAM, or more.

**Next.** `fundamentals/02_launching_processes.py`: how the ranks that waited here came to life;
then what a message between two of them costs: `fundamentals/03_latency_and_bandwidth.py`.
"""

import argparse
import ctypes
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from statistics import median
from typing import NamedTuple, NoReturn

import pynvml
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

WORLD_SIZES = range(1, 65)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {"--figure": {"metavar": "PNG", "help": "draw bandwidth against size"}}
SIZES = [4**k for k in range(3, 15)]  # bytes: 64 B to 256 MiB, beyond every cache
Curve = dict[int, float]  # bytes -> median seconds
Copy = Callable[[int], Callable[[], object]]  # prepares a copy of so many bytes

# %% [markdown]
# ## 1. The datasheet, derived
#
# A link is lanes; each carries so many bits a second, of which coding leaves a share: 128 of 130 in
# PCIe 3.0 to 5.0, 242 of 256 in 6.0, while NVLink is quoted after coding (`nvidia-smi nvlink -s`
# shows 26.6 GB/s a link where 25 arrive). The published figures follow (Bekman, Machine Learning
# Engineering, commit 744d01e). **NVLink is quoted both ways summed, PCIe and networks one way.**
#
# *PCIe* joins a GPU to its host, NIC and NVMe. *NVLink* joins GPU to GPU; through *NVSwitch* any
# pair in a node (six chips in a DGX A100, four in an HGX H100) or a rack (NVL72) has all links.
# *InfiniBand* and *Ethernet* (with RoCE) join nodes, in a good one with a NIC for each GPU.


# %%
class Link(NamedTuple):
    """A GPU's links of one kind: how many, lanes in each, Gb/s a lane one way, share left."""

    count: int
    lanes: int
    rate: float
    coding: float
    published: float  # GB/s one way
    found: str

    @property
    def one_way(self) -> float:
        """GB/s; both ways is twice that, for each way has wires of its own."""
        return self.count * self.lanes * self.rate * self.coding / 8


LINKS = {
    "PCIe 3.0 x16": Link(1, 16, 8, 128 / 130, 15.75, "V100"),
    "PCIe 4.0 x16": Link(1, 16, 16, 128 / 130, 31, "A100"),
    "PCIe 5.0 x16": Link(1, 16, 32, 128 / 130, 63, "H100, H200, B200"),
    "PCIe 6.0 x16": Link(1, 16, 64, 242 / 256, 121, "Blackwell, some boards"),
    "NVLink 1": Link(4, 8, 20, 1, 80, "P100"),
    "NVLink 2": Link(6, 8, 25, 1, 150, "V100"),
    "NVLink 3": Link(12, 4, 50, 1, 300, "A100"),
    "NVLink 4": Link(18, 2, 100, 1, 450, "H100, H200"),
    "NVLink 5": Link(18, 2, 200, 1, 900, "B200"),
    "InfiniBand HDR": Link(1, 4, 50, 1, 25, "200 Gb/s; as 200G Ethernet"),
    "InfiniBand NDR": Link(1, 4, 100, 1, 50, "400 Gb/s; as 400G Ethernet"),
    "InfiniBand XDR": Link(1, 4, 200, 1, 100, "800 Gb/s; as 800G Ethernet"),
}
# HBM TB/s, dense BF16 TFLOP/s of SXM boards; H100's 1,979 is with sparsity
GPUS = {"A100": (2.0, 312), "H100": (3.35, 989), "H200": (4.8, 989), "B200": (8.0, 2250)}


def the_datasheet_derived() -> None:
    say(f"  {'GB/s per GPU or port':22}{'one way':>9}{'both ways':>11}{'published':>11}  seen in")
    for name, link in LINKS.items():
        rates = f"{link.one_way:9.2f}{2 * link.one_way:11.2f}{link.published:11g}"
        say(f"  {name:22}{rates}  {link.found}")
    off = [abs(link.one_way - link.published) for link in LINKS.values()]
    say("\n  PCIe is published in whole GB/s, cut or rounded, so less than 1 off:")
    claim("PCIe: derived off published, at most, GB/s", 0, max(off[:4]), atol=0.99)
    claim("NVLink and InfiniBand: the same", 0, max(off[4:]))
    pcie, nvlink = LINKS["PCIe 5.0 x16"].one_way, LINKS["NVLink 4"].one_way
    claim("NVLink 4 / PCIe 5.0, like for like", 7, nvlink / pcie, atol=0.5)
    claim("  NVLink both ways / PCIe one way, a common slip", 14, 2 * nvlink / pcie, atol=0.5)
    rack = 72 * 2 * LINKS["NVLink 5"].one_way / 1e3
    claim("NVL72: 72 GPUs, both ways summed, TB/s", 130, rack, atol=0.5)


# %% [markdown]
# ## 2. Below the wires: caches, memory, the roofline
#
# Memory is a path too, and a hierarchy: on a CPU L1, L2, L3, DRAM; on a GPU shared memory and L1 in
# each SM, one L2, HBM. *Arithmetic intensity* is FLOPs per byte moved, and a kernel attains at most
# min(peak FLOP/s, intensity × bandwidth): the roofline (Williams et al., 2009). The two meet at the
# *ridge*. Left of it FLOPs cost nothing extra, right of it bytes do not. Adding tensors, a norm, an
# optimizer step, a token decoded lie left; a product of two n × n matrices has 2n³ FLOPs for 3n²
# numbers, and moves to the right as n grows.


# %%
def from_rank_0(measure: Callable[[], object], host: dist.ProcessGroup) -> object:
    """What rank 0 measured, for everybody; on gloo, waiting burns neither core nor GPU."""
    box = [measure() if RANK == 0 else None]
    dist.broadcast_object_list(box, src=0, group=host)
    return box[0]


def alternate(operations: dict, device: torch.device, rounds: int = 7) -> dict:
    """Median seconds of each operation, in turns, each right after an untimed run of itself."""
    seconds = {key: [] for key in operations}
    for _, (key, operation) in itertools.product(range(rounds), operations.items()):
        operation()
        if device.type == "cuda":  # the host's clock would see the launch, not the copy
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            operation()
            end.record()
            end.synchronize()
            seconds[key].append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            operation()
            seconds[key].append(time.perf_counter() - started)
    return {key: median(times) for key, times in seconds.items()}


def copier(to: torch.Tensor, source: torch.Tensor) -> Copy:
    return lambda n: partial(to[:n].copy_, source[:n], non_blocking=True)


def curve_of(copy: Copy, device: torch.device) -> Curve:
    return alternate({n: copy(n) for n in SIZES}, device)


def memory_copy() -> Curve:
    source, to = (torch.ones(SIZES[-1], dtype=torch.uint8) for _ in range(2))
    return curve_of(copier(to, source), source.device)


def kernels(device: torch.device) -> dict[str, tuple[float, float, float]]:
    """Intensity (counted: FLOP/byte), FLOP/s and bytes/s (measured) of a sum and two products."""
    n, m, dtype = (16384, 8192, torch.bfloat16) if device.type == "cuda" else (4096, 1024, None)
    rand, work, runs = partial(torch.rand, device=device, dtype=dtype), {}, {}
    shapes = {"add": (n, n), "matrix x vector": (n, 1), "matmul": (m, m)}
    for name, (rows, columns) in shapes.items():
        operation = torch.add if name == "add" else torch.mm
        a, b = rand(rows, rows), rand(rows, columns)
        with FlopCounterMode(display=False) as counter:
            out = operation(a, b)
        flops = counter.get_total_flops() or out.numel()  # it leaves sums out: one FLOP a number
        work[name] = flops, a.nbytes + b.nbytes + out.nbytes
        runs[name] = partial(operation, a, b, out=out)
    took = alternate(runs, device)
    return {k: (flops / size, flops / took[k], size / took[k]) for k, (flops, size) in work.items()}


def the_roofline(ran: dict[str, tuple[float, float, float]], copied: Curve, on_gpu: bool) -> None:
    for name, (intensity, flops, size) in ran.items():
        rates = f"{flops / 1e9:12,.1f} GFLOP/s{size / 1e9:11,.1f} GB/s"
        say(f"  {name:16}{intensity:9.3f} FLOP/byte{rates}")
    (sum_intensity, _, bandwidth), (product_intensity, peak, moved) = ran["add"], ran["matmul"]
    ridges = ", ".join(f"{name} {flops / hbm:.0f}" for name, (hbm, flops) in GPUS.items())
    say(f"  ridge, FLOP/byte: {peak / bandwidth:.1f} measured here; by datasheet {ridges}\n")
    n, width = (8192, 2) if on_gpu else (1024, 4)  # of the matmul; bytes a number
    claim("add: FLOP/byte, one for three numbers", 1 / (3 * width), sum_intensity)
    claim("matmul: FLOP/byte, 2n³ for 3n² numbers", 2 * n / (3 * width), product_intensity)
    intensity, flops, _ = ran["matrix x vector"]
    roof = min(peak, intensity * bandwidth)
    claim("left of the ridge: matrix x vector / its roof", 1, flops / roof, atol=0.8)
    claim("  and / peak FLOP/s: it waits for memory", 0.5, flops / peak, "<=")
    claim("right of it: matmul / memory bandwidth", 0.5, moved / bandwidth, "<=")
    gain = copied[4**14] / copied[4**9] / 4**5
    claim("CPU copy: GB/s for 256 KiB / for 256 MiB", 1, gain, ">=")


# %% [markdown]
# ## 3. Copies on and between GPUs
#
# Each is predicted first: HBM from its clock and width, PCIe from generation and width, a pair of
# GPUs from the NVLinks that join it. Expect 80 to 90% (8 H200, published: 396 of 450 GB/s one way
# between GPUs, 783.7 of 900 both ways, 55 of 63 from pinned host memory). *Pageable* memory is
# first copied into a pinned buffer, and **hops one after another add their seconds**. *GPUDirect*
# leaves hops out: **P2P** copies GPU to GPU, not through host memory; **RDMA** lets the NIC and
# **Storage** the NVMe drive reach GPU memory; **Async** lets a GPU ring the NIC without the host.


# %%
def handle(gpu: int) -> object:
    """NVML's GPU for CUDA's: CUDA_VISIBLE_DEVICES renumbers only the latter."""
    uuid = str(torch.cuda.get_device_properties(gpu).uuid).removeprefix("GPU-")
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def pcie(gpu: int) -> float:
    """GB/s one way between a GPU and its host, at the best that both can do."""
    link = LINKS[f"PCIe {pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle(gpu))}.0 x16"]
    return link.one_way * pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle(gpu)) / 16


def joined(i: int, j: int) -> tuple[str, float]:
    """What joins two GPUs, in the words of `nvidia-smi topo -m`, and its GB/s one way."""
    a, b = handle(i), handle(j)
    if pynvml.nvmlDeviceGetP2PStatus(a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0:
        there, ends, version = pynvml.nvmlDeviceGetPciInfo(b).busId, [], 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            with suppress(pynvml.NVMLError):  # no such link
                if pynvml.nvmlDeviceGetNvLinkState(a, link):
                    version = pynvml.nvmlDeviceGetNvLinkVersion(a, link)
                    ends.append(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(a, link).busId)
        links = ends.count(there) or len(ends)  # none leads straight there: all do, by a switch
        rate = 20 if version == 1 else 25 if version < 7 else 50  # 1: NVLink 1, 6: 4, 7: 5
        return f"NV{links}", links * rate
    ways = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
    return ways[pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b)], min(pcie(i), pcie(j))


def at_once(one: Copy, other: Copy, side: torch.cuda.Stream) -> Copy:
    """Both copies together, the other on a stream of its own."""

    def together(n: int) -> None:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            other(n)()
        one(n)()
        here.wait_stream(side)

    return lambda n: partial(together, n)


def copies_on_gpu_0() -> tuple[dict[str, Curve], dict[str, float]]:
    """Curves of the copies within GPU 0 and to and from its host; GB/s promised, one way."""
    pynvml.nvmlInit()
    new, gpu = partial(torch.ones, SIZES[-1], dtype=torch.uint8), torch.device("cuda", 0)
    near, far, pageable = new(device=gpu), new(device=gpu), new()
    pinned, back = new(pin_memory=True), new(pin_memory=True)
    up, down = copier(near, pinned), copier(back, far)
    copies = {"HBM copy": copier(far, near), "H2D pinned": up, "D2H pinned": down}
    copies |= {"H2D pageable": copier(near, pageable), "D2H pageable": copier(pageable, near)}
    copies["H2D and D2H at once, each"] = at_once(up, down, torch.cuda.Stream())
    clock = pynvml.nvmlDeviceGetMaxClockInfo(handle(0), pynvml.NVML_CLOCK_MEM)  # MHz
    memory = 2 * clock * pynvml.nvmlDeviceGetMemoryBusWidth(handle(0)) / 8e3  # two bits a clock
    promised = dict.fromkeys(copies, pcie(0)) | {"HBM copy": memory / 2}  # read and written
    return {name: curve_of(copy, gpu) for name, copy in copies.items()}, promised


def copies_between_gpus() -> tuple[dict[str, Curve], dict[str, float]]:
    """Curves of the copies from each GPU to each other; GB/s promised to pairs with P2P."""
    curves, promised = {}, {}
    for i, j in itertools.permutations(range(torch.cuda.device_count()), 2):
        kind, rate = joined(i, j)
        name = f"GPU {i} to {j}, {kind}"
        source, to = (torch.ones(SIZES[-1], dtype=torch.uint8, device=f"cuda:{k}") for k in (i, j))
        with torch.cuda.device(i):
            curves[name] = curve_of(copier(to, source), source.device)
        if rate and torch.cuda.can_device_access_peer(i, j):  # else it goes through the host
            promised[name] = rate
    return curves, promised


def judge(curves: dict[str, Curve], promised: dict[str, float]) -> None:
    """Margins are wide, for hosts differ; above 1.05 the clock did not wait for the copy."""
    for name, curve in curves.items():
        got, small = (n / curve[n] / 1e9 for n in (SIZES[-1], 4**8))
        say(f"  {name}: {got:,.1f} GB/s one way; {small:,.1f} for 64 KiB")
        if name in promised and "pageable" not in name:
            share = got / promised[name]
            claim(f"{name} / {promised[name]:,.0f} GB/s promised", 0.7, share, atol=0.35)
        elif name in promised:
            slower = curve[SIZES[-1]] / curves[name.replace("pageable", "pinned")][SIZES[-1]]
            claim(f"{name}, seconds / pinned", 0.95, slower, ">=")


def draw(curves: dict[str, Curve], path: str) -> None:
    """Bandwidth against size, both logarithmic; dashed, what the datasheets promise one way."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(9, 6), layout="constrained")).subplots()
    ceilings = {"H100 HBM, copied": GPUS["H100"][0] * 1e3 / 2}  # each byte is read and written
    ceilings |= {k: v.one_way for k, v in LINKS.items() if k[-1] not in "12" and "3.0" not in k}
    for name, rate in ceilings.items():
        color, x = ("C0", 0.22) if "Infini" in name else ("0.4", 0.01)
        axes.axhline(rate, color=color, linewidth=0.8, linestyle="--")
        style = {"transform": axes.get_yaxis_transform(), "fontsize": 8.5, "va": "center"}
        style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.text(x, rate, f"{name}: {rate:,.0f}", color=color, **style)
    for k, (name, curve) in enumerate(list(curves.items())[:8], start=1):  # one pair is enough
        speed = [n / t / 1e9 for n, t in curve.items()]
        axes.loglog(list(curve), speed, "o-", markersize=4, color=f"C{k}", label=name)
    axes.set(xlabel="bytes copied", ylabel="GB/s, one way")
    axes.set_xticks(SIZES[::2], ["64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB"])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


def main(options: argparse.Namespace) -> None:
    setup()
    host = dist.new_group(backend="gloo", timeout=timedelta(minutes=2))
    torch.set_num_threads(1)  # one core's copies and FLOPs, also where nobody set OMP_NUM_THREADS
    the_datasheet_derived()
    gpus = from_rank_0(torch.cuda.device_count, host)
    copied = from_rank_0(memory_copy, host)
    ran = from_rank_0(partial(kernels, torch.device("cuda" if gpus else "cpu")), host)
    the_roofline(ran, copied, bool(gpus))
    curves = {"CPU memory copy": copied}
    first = "HBM, host to device and back / the datasheet", copies_on_gpu_0
    second = "each pair of GPUs / the links that join it", copies_between_gpus
    for needs, (text, measure) in {"1 GPU": first, "2 GPUs": second}.items():
        if gpus < int(needs[0]):
            blocked(text, needs)
        else:
            found, promised = from_rank_0(measure, host)
            judge(found, promised)
            curves |= found
    if options.figure and RANK == 0:
        draw(curves, options.figure)
    finish()


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
