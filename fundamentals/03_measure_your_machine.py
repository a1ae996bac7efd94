"""Measure your machine: memory, caches, PCIe, NVLink and the roofline, by the clock
=================================================================================

**Question.** What do the links of *this* machine deliver, and does the roofline predict how fast
a kernel runs on it?

**Predict**, and write it down before you run:

1. One core copies 256 KiB, and 256 MiB. By what factor do the two differ in GB/s?
2. A product of matrix and vector reads every element of the matrix once. What share of the FLOP/s
   of a product of two matrices does it attain: nine tenths, a half, less than a third?
3. The product of two matrices moves few bytes for its FLOPs. What share of the memory bandwidth
   does it need: nine tenths, a half, less?
4. (With a GPU.) What share of the PCIe link's rate does a copy from pinned host memory reach: a
   third, a half, more? And if all GPUs copy at once, how much of that does each keep?

**Run.**

    torchrun --standalone --nproc-per-node=8 03_measure_your_machine.py     # a rank for each GPU
    python 03_measure_your_machine.py --figure machine.png                  # the same, for you

Not run on several GPUs. Rank 0 measures, the others wait, except where all copy at once.

**Try.** In `memory_copy`, copy from `source[:1].expand(SIZES[-1])`, one byte over and over, to be
faster: which claim fails? In `check_roofline`, take the matrix-vector product's FLOP/s as the peak:
which one now?

**Before.** fundamentals/01_gpu_interconnects.py: links, their rates, and the roofline.
fundamentals/02_launching_processes.py: what the ranks are.

**Next.** fundamentals/04_latency_and_bandwidth.py: what a message between two ranks costs, small
ones included.
"""

import argparse
import contextlib
import ctypes
import itertools
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

import pynvml
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

SIZES = [4**k for k in range(3, 15)]  # bytes: 64 B to 256 MiB, beyond every cache
Curve = dict[int, float]  # bytes -> median seconds
Copy = Callable[[int], Callable[[], object]]  # prepares a copy of so many bytes

# %% [markdown]
# ## 1. Copy and look at the clock: caches and memory
#
# The simplest benchmark is a copy of n bytes, timed, for n from very small to very large. Its curve
# has three parts on every link, a core's path to memory as well as a cable:
#
#     GB/s
#      |                ________              3. beyond the caches: what the memory delivers
#      |              /         \
#      |            /    2.       \________
#      |   1.     /      the data
#      |        /        fit into a cache
#      |  _ _ /
#      +------------------------------------> bytes
#        1. every copy pays the same start-up time: GB/s grow with n
#
# A CPU's hierarchy is L1 and L2 in each core, L3 for several, then DRAM for all. A GPU has L1 and
# shared memory in each **SM** (streaming multiprocessor, its core), one L2, and HBM.


# %%
def copier(to: torch.Tensor, source: torch.Tensor) -> Copy:
    """Return a function that prepares the copy of n bytes."""
    return lambda n: partial(to[:n].copy_, source[:n], non_blocking=True)


def random_bytes(n: int) -> torch.Tensor:
    return torch.empty(n // 8, dtype=torch.int64).random_().view(torch.uint8)


def memory_copy() -> tuple[Curve, int]:
    """Copy within the host's memory: the curve, and how many bytes arrived wrong."""
    source = random_bytes(SIZES[-1])
    to = torch.zeros_like(source)
    copy = copier(to, source)
    curve = curve_of(copy, source.device)
    to.zero_()
    copy(SIZES[-1])()
    return curve, int((to != source).sum())


def curve_of(copy: Copy, device: torch.device) -> Curve:
    return alternate({n: copy(n) for n in SIZES}, device)


# %% [markdown]
# ## 2. All at once: memory is a shared uplink
#
# The cores of a socket share its memory controllers, as GPUs below one PCIe switch share its
# uplink. So "what one rank gets alone" is not what n ranks get together. Each rank copies 64 MiB:
# within the host's memory on CPU, from pinned host memory to its own GPU on GPUs.


# %%
def all_ranks_copy(device: torch.device, host: dist.ProcessGroup) -> None:
    """Print one rank's GB/s alone, and every rank's with all copying at once."""
    source = torch.zeros(2**26, dtype=torch.uint8, pin_memory=device.type == "cuda")
    to = torch.empty_like(source, device=device)
    copy = copier(to, source)(len(source))
    alone = on_rank_0(lambda: alternate({"alone": copy}, device, rounds=3)["alone"], host)
    dist.barrier(group=host)
    together = gather_objects(alternate({"all": copy}, device, rounds=5)["all"])
    rates = ", ".join(f"{len(source) / seconds / 1e9:.1f}" for seconds in together)
    print0(f"\n  64 MiB to {device.type}: {len(source) / alone / 1e9:.1f} GB/s for rank 0 alone")
    print0(f"  {WORLD_SIZE} ranks at once, GB/s each: {rates}\n")
    if device.type == "cuda" and WORLD_SIZE > 1:
        check_shared_uplinks(alone, together)


def check_shared_uplinks(alone: float, together: list[float]) -> None:
    """Seconds of a copy alone and of all at once: only GPUs below one PCIe switch may share."""
    try:
        sharing = below_one_switch(range(int(os.environ["LOCAL_WORLD_SIZE"])))
    except (pynvml.NVMLError, RuntimeError):  # the latter: a rank that does not see all GPUs
        blocked("all GPUs copy at once: what each keeps", needs="GPUs whose driver tells topology")
        return
    text = f"all copy, {sharing} below a switch: what each keeps"
    claim(text, 0.7 / sharing, alone / max(together), ">=", question=4, timed=True)


def below_one_switch(gpus: range) -> int:
    """How many of these GPUs, at most, are joined by PCIe switches alone, and share an uplink."""
    pynvml.nvmlInit()
    sharing = dict.fromkeys(gpus, 1)
    for i, j in itertools.permutations(gpus, 2):
        way = pynvml.nvmlDeviceGetTopologyCommonAncestor(nvml_handle(i), nvml_handle(j))
        sharing[i] += way in (10, 20)  # PIX, PXB; all others lead through a CPU
    return max(sharing.values())


# %% [markdown]
# ## 3. The roofline of this machine
#
# fundamentals/01 counted FLOPs and bytes. Here the clock decides. Three kernels, in float32 on a
# CPU core and bf16 on a GPU (float16 before Ampere); the operands of the first two are larger than
# the cache that one core can fill, 96 MB on the largest EPYCs:
#
#     kernel               FLOPs        bytes of operands and result     FLOPs per byte, float32
#     A + B                n^2          3 n^2 elements                   1/12
#     A x  (vector)        2 n^2        n^2 + 2 n elements               1/2
#     A B  (product)       2 n^3        3 n^2 elements                   n/6
#
# The addition is a stopwatch for the memory bandwidth, the product for the peak FLOP/s. From these
# two the roofline predicts the third: min(peak, 1/2 x bandwidth).


# %%
class Ran(NamedTuple):
    """What a kernel did, and how fast."""

    flops: float
    nbytes: float
    seconds: float

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds

    @property
    def intensity(self) -> float:
        return self.flops / self.nbytes


def run_kernels(device: torch.device) -> dict[str, Ran]:
    """Time the three kernels on one core, or one GPU."""
    if device.type == "cuda":
        n, m = 16384, 8192
        fast = torch.cuda.is_bf16_supported(False)  # V100 and T4 have it by emulation only
        dtype = torch.bfloat16 if fast else torch.float16
    else:
        n, m = 4096, 1024
        dtype = torch.float32
    a, b, total = (torch.rand(n, n, device=device, dtype=dtype) for _ in range(3))
    x, y = (torch.rand(n, 1, device=device, dtype=dtype) for _ in range(2))
    p, q, product = (torch.rand(m, m, device=device, dtype=dtype) for _ in range(3))
    width = a.element_size()
    operations = {
        "add": partial(torch.add, a, b, out=total),
        "matrix x vector": partial(torch.mm, a, x, out=y),
        "matmul": partial(torch.mm, p, q, out=product),
    }
    took = alternate(operations, device)
    work = {
        "add": (n**2, 3 * n**2 * width),
        "matrix x vector": (2 * n**2, (n**2 + 2 * n) * width),
        "matmul": (2 * m**3, 3 * m**2 * width),
    }
    return {name: Ran(*work[name], took[name]) for name in operations}


# %% [markdown]
# The prediction for the matrix-vector product counts as right within a factor of 3: reading one
# stream and adding up is not quite what an addition does, and neither reaches what the memory can.
# The wrong theory, that peak FLOP/s count, is off by more than 3: that is question 2's claim.


# %%
def check_roofline(kernels: dict[str, Ran]) -> None:
    for name, ran in kernels.items():
        rates = f"{ran.flops_per_second / 1e9:12,.1f} GFLOP/s"
        rates += f"{ran.bytes_per_second / 1e9:11,.1f} GB/s"
        print0(f"  {name:16}{ran.intensity:9.3f} FLOPs per byte{rates}")
    bandwidth = kernels["add"].bytes_per_second
    peak = kernels["matmul"].flops_per_second
    vector = kernels["matrix x vector"]
    print0(f"  ridge of this machine: {peak / bandwidth:.1f} FLOPs per byte\n")
    roof = min(peak, vector.intensity * bandwidth)
    factor = max(roof / vector.flops_per_second, vector.flops_per_second / roof)
    claim("matrix x vector: factor off its roof", 3, factor, "<=", timed=True)
    share = vector.flops_per_second / peak
    claim("matrix x vector: share of the peak FLOP/s", 1 / 3, share, "<=", question=2, timed=True)
    needs = kernels["matmul"].bytes_per_second / bandwidth
    claim("matmul: share of the bandwidth it needs", 0.5, needs, "<=", question=3, timed=True)


# %% [markdown]
# ## 4. On GPUs: HBM and the way to the host
#
# Each copy is predicted first, from what the driver says of this card: HBM from its clock and bus
# width (two bits per clock and wire; a copy reads and writes, so half of it), PCIe from generation
# and width. Expect 80 to 90% of the promise; below 60% something is wrong. What the link could do
# and what it has been trained to are two things: both are asked *while a copy runs*, for an idle
# link saves power in a lower generation. And each card is compared with the median of its
# neighbors, which needs no promise. **Pinned** host memory never moves, so the GPU's copy
# engine can fetch it; **pageable** memory is first copied into a pinned buffer by a core, and hops
# one after another add their seconds. Where NVLink-C2C joins GPU and CPU, PCIe promises nothing,
# and where the driver cannot tell (virtual GPUs, MIG), nothing is judged.

# %%
PCIE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # GB/s per lane, one way


def nvml_handle(gpu: int) -> object:
    """NVML's name for CUDA's GPU: CUDA_VISIBLE_DEVICES renumbers only the latter."""
    uuid = str(torch.cuda.get_device_properties(gpu).uuid).removeprefix("GPU-")
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def promised_by_pcie(gpu: int) -> float | None:
    """GB/s one way between a GPU and its host at the best both can do; None if none can tell."""
    with contextlib.suppress(pynvml.NVMLError, AttributeError):
        if pynvml.nvmlDeviceGetC2cModeInfoV(nvml_handle(gpu)).isC2cEnabled:
            return None
    with contextlib.suppress(pynvml.NVMLError, KeyError):
        lane = PCIE[pynvml.nvmlDeviceGetMaxPcieLinkGeneration(nvml_handle(gpu))]
        return lane * pynvml.nvmlDeviceGetMaxPcieLinkWidth(nvml_handle(gpu))
    return None


def pcie_in_use(gpu: int) -> tuple[int, int, int, int] | None:
    """Lanes and generation of a GPU's link under load, each with its maximum; None if untold."""
    near = torch.ones(SIZES[-1], dtype=torch.uint8, device=f"cuda:{gpu}")
    pinned = torch.ones(SIZES[-1], dtype=torch.uint8, pin_memory=True)
    for _ in range(50):  # a quarter of a second or more: the link has left its idle state
        near.copy_(pinned, non_blocking=True)
    found = None
    with contextlib.suppress(pynvml.NVMLError):
        card = nvml_handle(gpu)
        time.sleep(0.05)
        lanes = pynvml.nvmlDeviceGetCurrPcieLinkWidth(card)
        generation = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(card)
        most_lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(card)
        newest = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(card)
        found = lanes, most_lanes, generation, newest
    torch.cuda.synchronize(gpu)
    return found


def promised_by_hbm(gpu: int) -> float | None:
    """GB/s of a copy within the GPU's memory."""
    with contextlib.suppress(pynvml.NVMLError):
        megahertz = pynvml.nvmlDeviceGetMaxClockInfo(nvml_handle(gpu), pynvml.NVML_CLOCK_MEM)
        wires = pynvml.nvmlDeviceGetMemoryBusWidth(nvml_handle(gpu))
        return 2 * megahertz * wires / 8e3 / 2
    return None


# %% [markdown]
# The copies: within the GPU, up from the host and down to it, from pinned and from pageable memory,
# and up and down at once, for each direction has wires of its own.


# %%
def copies_on_gpu_0() -> tuple[dict[str, Curve], dict[str, float | None]]:
    """Curves of the copies within GPU 0 and to and from its host; GB/s promised, one way."""
    new = partial(torch.ones, SIZES[-1], dtype=torch.uint8)
    gpu = torch.device("cuda", 0)
    near, far = (new(device=gpu) for _ in range(2))
    pinned, back = (new(pin_memory=True) for _ in range(2))
    pageable = new()
    up = copier(near, pinned)
    down = copier(back, far)
    copies = {"HBM copy": copier(far, near), "H2D pinned": up, "D2H pinned": down}
    copies |= {"H2D pageable": copier(near, pageable), "D2H pageable": copier(pageable, near)}
    copies["H2D and D2H at once, each"] = at_once(up, down, torch.cuda.Stream())
    promised = dict.fromkeys(copies, promised_by_pcie(0))
    promised["HBM copy"] = promised_by_hbm(0)
    return {name: curve_of(copy, gpu) for name, copy in copies.items()}, promised


def every_card() -> tuple[dict[str, list[float]], list[tuple | None]]:
    """GB/s of every GPU's copies, one GPU after the other; and its PCIe link under load."""
    rates: dict[str, list[float]] = {"H2D pinned": [], "HBM copy": []}
    pinned = torch.ones(SIZES[-1], dtype=torch.uint8, pin_memory=True)
    links = []
    for gpu in range(torch.cuda.device_count()):
        with torch.cuda.device(gpu):
            near, far = (torch.ones(SIZES[-1], dtype=torch.uint8, device="cuda") for _ in range(2))
            copies = {"H2D pinned": copier(near, pinned)(SIZES[-1])}
            copies["HBM copy"] = copier(near, far)(SIZES[-1])
            for name, seconds in alternate(copies, near.device, rounds=5).items():
                rates[name].append(SIZES[-1] / seconds / 1e9)
        links.append(pcie_in_use(gpu))
    return rates, links


def judge_cards(rates: dict[str, list[float]], links: list[tuple | None]) -> None:
    """Links at their maximum, and no card far behind the median of all."""
    told = [link for link in links if link is not None]
    if told:
        lacking = sum(most - lanes for lanes, most, _, _ in told)
        claim("PCIe lanes that all GPUs' links lack, under load", 0, lacking)
        lacking = sum(most - generation for _, _, generation, most in told)
        claim("PCIe generations that they lack, under load", 0, lacking)
    else:
        blocked("PCIe lanes and generation under load", needs="GPUs whose driver tells PCIe")
    if len(links) > 2:
        for name, of_cards in rates.items():
            least = 0.7 if name == "H2D pinned" else 0.9  # half of the cards may be a socket away
            slowest = min(of_cards) / median(of_cards)
            claim(f"{name}: slowest GPU / median", least, slowest, ">=", timed=True)


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


def judge_copies(curves: dict[str, Curve], promised: dict[str, float | None]) -> None:
    """Half the lanes, or one direction at a time, is 0.43; above 1.05 the clock did not wait."""
    for name, curve in curves.items():
        rate = SIZES[-1] / curve[SIZES[-1]] / 1e9
        print0(f"  {name}: {rate:,.1f} GB/s one way; {4**8 / curve[4**8] / 1e9:,.1f} for 64 KiB")
        if "pageable" in name:
            pinned = curves[name.replace("pageable", "pinned")][SIZES[-1]]
            claim(f"{name}, seconds / pinned", 0.95, curve[SIZES[-1]] / pinned, ">=", timed=True)
        elif promised[name] is None:
            blocked(f"{name} / what is promised", needs="GPUs whose driver tells PCIe and clocks")
        else:
            text = f"{name} / {promised[name]:,.0f} GB/s promised"
            least = 0.5 if "at once" in name else 0.6  # both directions share the host's memory
            middle = (least + 1.05) / 2
            share = rate / promised[name]
            claim(text, middle, share, atol=1.05 - middle, question=4, timed=True)


# %% [markdown]
# ## 5. On GPUs: every pair, both ways, and all at once
#
# A pair is promised what joins it: the NVLinks that lead from one to the other, or to a switch. If
# there is none, the copy takes PCIe; NVML then names the highest thing on the way (PIX: one PCIe
# switch, PXB: several, PHB: the CPU, NODE: two bridges of one CPU, SYS: the link from CPU to CPU).
# A crossbar makes two more promises: both ways at once are each as fast as one way, and all GPUs
# may send to their right neighbors at once. Bytes are compared, too: with a wrongly configured
# IOMMU, PCIe P2P returns garbage at full speed.


# %%
def joined(i: int, j: int) -> tuple[str, float | None]:
    """What joins two GPUs, in the words of `nvidia-smi topo -m`, and GB/s one way if NVLink."""
    a = nvml_handle(i)
    b = nvml_handle(j)
    if pynvml.nvmlDeviceGetP2PStatus(a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0:
        there = pynvml.nvmlDeviceGetPciInfo(b).busId
        ends = []
        version = 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            with contextlib.suppress(pynvml.NVMLError):  # no such link
                if pynvml.nvmlDeviceGetNvLinkState(a, link):
                    version = pynvml.nvmlDeviceGetNvLinkVersion(a, link)
                    ends.append(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(a, link).busId)
        links = ends.count(there) or len(ends)  # none leads straight there: all do, by a switch
        return f"NV{links}", links * rate_of_nvlink(version)
    ways = {0: "one board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
    return ways[pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b)], None


def nvlinks_up(gpu: int) -> int | None:
    """How many of a GPU's NVLinks are up; None if it has none or NVML does not tell."""
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(pynvml.NVMLError):  # no such link
            states.append(pynvml.nvmlDeviceGetNvLinkState(nvml_handle(gpu), link))
    return sum(states) if states else None


def rate_of_nvlink(version: int) -> float:
    """GB/s one way per link; NVML counts 1 for NVLink 1, 6 for NVLink 4, 7 for NVLink 5."""
    if version == 1:
        return 20
    return 25 if version < 7 else 50


# %% [markdown]
# A copy between GPUs runs on the current streams of *both*: the sender's carries it, the receiver's
# waits for it. So copies that are to run side by side each need two streams of their own; on the
# default streams a ring of copies would run one after another.


# %%
class Transfer:
    """One copy of 256 MiB from GPU to GPU, on streams of its own: several can run at once."""

    def __init__(self, i: int, j: int) -> None:
        self.ends = {i, j}
        self.source = random_bytes(SIZES[-1]).to(f"cuda:{i}")
        self.to = torch.zeros_like(self.source, device=f"cuda:{j}")
        self.streams = torch.cuda.Stream(i), torch.cuda.Stream(j)

    def start(self) -> None:
        sending, receiving = self.streams
        with torch.cuda.stream(sending), torch.cuda.stream(receiving):
            self.to.copy_(self.source, non_blocking=True)

    def wrong_bytes(self) -> int:
        return int((self.to.cpu() != self.source.cpu()).sum())


def rate_together(transfers: list[Transfer], repeats: int = 10) -> float:
    """Return the GB/s of each when all of them run at once."""
    devices = set()  # not every GPU of the machine: each wait costs microseconds
    for transfer in transfers:
        devices |= transfer.ends
    seconds = []
    for _ in range(4):
        for device in devices:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            for transfer in transfers:
                transfer.start()
        for device in devices:
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - started) / repeats)
    return SIZES[-1] / median(seconds[1:]) / 1e9


# %% [markdown]
# What is found, and how it is judged. Pairs without NVLink are told, not judged: between sockets
# PCIe may give a third of its rate.


# %%
class Pairs(NamedTuple):
    """What was found between GPUs: GB/s and promises by name of the pair, and wrong bytes."""

    rates: dict[str, float]
    promised: dict[str, float | None]
    wrong_bytes: int
    links_up: list[int | None]  # NVLinks of each GPU
    both_ways: float  # of GPUs 0 and 1, at once: GB/s each way
    ring: float  # each GPU to its right neighbor, all at once: GB/s each


def copies_between_gpus() -> Pairs:
    rates = {}
    promised = {}
    wrong = 0
    gpus = torch.cuda.device_count()
    for i, j in itertools.permutations(range(gpus), 2):
        transfer = Transfer(i, j)
        name = f"GPU {i} to {j}"
        rate = None
        with contextlib.suppress(pynvml.NVMLError, KeyError):
            label, rate = joined(i, j)
            name += f", {label}"
        rates[name] = rate_together([transfer])
        promised[name] = rate if torch.cuda.can_device_access_peer(i, j) else None
        wrong += transfer.wrong_bytes()
    both = rate_together([Transfer(0, 1), Transfer(1, 0)])
    ring = rate_together([Transfer(gpu, (gpu + 1) % gpus) for gpu in range(gpus)])
    up = [None] * gpus
    with contextlib.suppress(pynvml.NVMLError):
        up = [nvlinks_up(gpu) for gpu in range(gpus)]
    return Pairs(rates, promised, wrong, up, both, ring)


def judge_pairs(pairs: Pairs) -> None:
    for name, rate in pairs.rates.items():
        print0(f"  {name}: {rate:,.1f} GB/s one way")
    print0(f"  GPUs 0 and 1 both ways at once: {pairs.both_ways:,.1f} GB/s each way")
    print0(f"  all GPUs to their right neighbors at once: {pairs.ring:,.1f} GB/s each")
    claim("GPU pairs: bytes that arrived wrong", 0, pairs.wrong_bytes)
    shares = [pairs.rates[name] / rate for name, rate in pairs.promised.items() if rate]
    if not shares:
        blocked("NVLink: each pair / the links that join it", needs="2 GPUs joined by NVLink")
        return
    up = [links for links in pairs.links_up if links is not None]
    claim("NVLinks up: most of any GPU - fewest", 0, max(up, default=0) - min(up, default=0))
    claim("NVLink: slowest pair / promised", 0.6, min(shares), ">=", timed=True)
    claim("NVLink: fastest pair / promised", 1.05, max(shares), "<=", timed=True)
    if len(shares) == len(pairs.rates) and len(set(pairs.promised.values())) == 1:
        alone = median(pairs.rates.values())
        claim(
            "NVLink: both ways at once / one alone",
            1,
            pairs.both_ways / alone,
            atol=0.2,
            timed=True,
        )
        claim("NVLink: all send right at once / one", 1, pairs.ring / alone, atol=0.2, timed=True)


# %% [markdown]
# ## 6. How it is measured
#
# Each operation runs once untimed, then timed, in turns with all others, seven rounds; the median
# counts. On GPUs CUDA events are the clock, since a copy returns to the host before it is done, and
# where several GPUs work, the host's clock stops after those are synchronized. Rank 0
# measures alone: the others wait in a gloo group, which burns neither a core nor a GPU.


# %%
def alternate(operations: dict, device: torch.device, rounds: int = 7) -> dict:
    """Return the median seconds of each operation, in turns, after an untimed run of each."""
    seconds = {key: [] for key in operations}
    for _ in range(rounds):
        for key, operation in operations.items():
            operation()
            seconds[key].append(seconds_of(operation, device))
    return {key: median(times) for key, times in seconds.items()}


def seconds_of(operation: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        operation()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def on_rank_0(measure: Callable[[], object], host: dist.ProcessGroup) -> object:
    """Return on every rank what rank 0 measures, while nobody else does anything."""
    value = measure() if RANK == 0 else None
    dist.barrier(group=host)
    return from_rank_0(value)


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def check_memory_copy(curve: Curve, wrong: int) -> None:
    claim("memory copy: bytes that arrived wrong", 0, wrong)
    gain = (4**9 / curve[4**9]) / (4**14 / curve[4**14])
    claim("GB/s copying 256 KiB / 256 MiB", 1.2, gain, ">=", question=1, timed=True)
    rates = {n: n / curve[n] / 1e9 for n in (4**5, 4**9, 4**14)}
    told = ", ".join(f"{rate:.1f} for {n:,} bytes" for n, rate in rates.items())
    print0(f"{'':13}GB/s: {told}")


# %% [markdown]
# ## What you should have seen
#
# 1. About twice, on the machine that this was written on (22 against 11 GB/s, say): 256 KiB stay in
#    the core's L2 cache, 256 MiB come from DRAM. At 1 kB it is slower again: the call takes longer
#    than the copy. So a benchmark of a size that fits a cache tells nothing about the memory.
# 2. Less than a third; a tenth is common. A core does 2 FLOPs for every 4 bytes here, and waits for
#    those bytes. Within a factor of two it runs as fast as the addition's bandwidth lets it: that
#    is what the roofline predicted, without having run it.
# 3. Far less than half: a product of 1024 x 1024 needs 2% of the bandwidth, if every element is
#    fetched once. (A real kernel fetches some elements more often; these are the bytes it cannot
#    do without.) So away from the ridge one of the two is idle, the arithmetic or the memory.
# 4. 55 of 63 GB/s, 0.87, is published for H200s; 0.6 is asked for here. With x8 lanes, or one
#    generation less, it would be 0.43. With all GPUs at once each keeps nearly all if its uplink is
#    its own, and a half or a quarter below a shared switch.
#
# When all ranks copy at once, 4 ranks on 2 cores each get about half, for they take turns; with a
# core each, they share the memory controllers instead. On a node with 8 GPUs the line printed there
# is the one to look at: if 8 at once get less than one alone, they share an uplink or a CPU, and a
# loader must count with the smaller figure. Pin each rank to the cores next to its GPU (`torchrun
# --numa-binding=node`), or half of them copy across the socket link.
#
# Published, to compare with: 8 H200s, 396 GB/s of 450 between two GPUs, 784 of 900 both ways added
# up, 55 of 63 from pinned memory. `--figure` draws every curve, where there is a GPU.
#
# **Try.** The copy of one byte leaves 255 of 256 bytes wrong: the claim about bytes fails, whatever
# the clock says. A benchmark that does not look at its result measures anything. With the vector
# product's FLOP/s as peak its share is 1, and the second question's claim fails.
#
# On a thousand GPUs this is a health check: run on every node before a job, it finds the card that
# has trained its PCIe link down to x8, the NVLink that is down, and the one card that is slower
# than its neighbors. Compare the nodes' figures as well: one slow node slows all others. (NVML's
# maximum is that of card and slot together: a x16 card in a x8 slot lacks nothing, and is slow.)


# %%
def draw(curves: dict[str, Curve], path: str) -> None:
    """Bandwidth against size, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        rates = [n / seconds / 1e9 for n, seconds in curve.items()]
        axes.loglog(list(curve), rates, "o-", markersize=4, label=name)
    axes.set_title("A small copy costs the call, a large one what its link carries")
    axes.set(xlabel="bytes copied", ylabel="GB/s, one way")
    axes.set_xticks(SIZES[::2], ["64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB"])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    about = {"metavar": "PATH", "help": "draw bandwidth against size"}
    options = command_line({"--figure": about})
    launch()
    device = setup()
    host = dist.new_group(backend="gloo")
    torch.set_num_threads(1)  # one core, also where nobody set OMP_NUM_THREADS
    copied, wrong = on_rank_0(memory_copy, host)
    check_memory_copy(copied, wrong)
    all_ranks_copy(device, host)
    gpus = torch.cuda.device_count()
    where = torch.device("cuda", 0) if gpus else device  # one GPU may be there for several ranks
    check_roofline(on_rank_0(partial(run_kernels, where), host))
    curves = {"memory copy, one core": copied}
    if gpus == 0:
        blocked("HBM and PCIe / what they promise", needs="1 GPU")
    else:
        with contextlib.suppress(pynvml.NVMLError):  # without it nothing is promised
            pynvml.nvmlInit()
        measured, promised = on_rank_0(copies_on_gpu_0, host)
        judge_copies(measured, promised)
        curves |= measured
        judge_cards(*on_rank_0(every_card, host))
    if gpus < 2:
        blocked("NVLink: each pair / the links that join it", needs="2 GPUs, seen by one rank")
    else:
        judge_pairs(on_rank_0(copies_between_gpus, host))
    if options.figure and gpus == 0:
        print0(f"{'':13}no figure: without a GPU there is one curve only")
    elif options.figure and RANK == 0:
        draw(curves, options.figure)
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
