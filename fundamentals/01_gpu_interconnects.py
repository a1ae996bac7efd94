"""GPU interconnects: NVLink, NVSwitch, PCIe, InfiniBand, GPUDirect, and the roofline
==================================================================================

**Question.** Over which links can data reach a GPU, who else uses them at the same moment, and when
do links and memory limit training more than arithmetic does?

**Predict**, and write it down before you run:

1. Four GPUs hang below one PCIe 5.0 switch, which has one x16 uplink (63 GB/s one way) to the host.
   All four read a batch from host memory at once. How many GB/s does each get? And how many if
   instead each sends to its neighbor below the same switch?
2. Eight H100s are joined by NVSwitch, each with 18 links (450 GB/s one way). All send to their
   right neighbors at once: how many GB/s per GPU? And if seven send to the eighth?
3. NVLink 4 is sold as 900 GB/s per GPU, PCIe 5.0 x16 as 63 GB/s. One GPU copies a tensor to
   another. How many times faster is NVLink?
4. Below the switch of question 1, each GPU has a NIC of 400 Gb/s next to it. All send to another
   node at once, first by way of host memory, then straight to the NIC. How many GB/s each?
5. An H100 does 989 TFLOP/s in bf16 and reads 3.35 TB/s. From which n on does the product of two
   n x n matrices keep its arithmetic busy? How many FLOPs per byte does adding two tensors do?

**Run.**

    torchrun --standalone --nproc-per-node=8 01_gpu_interconnects.py    # a rank for each GPU
    python 01_gpu_interconnects.py --figure interconnects.png           # the same, started for you

Not run on several GPUs. No clock decides anything here: packets, FLOPs and bytes are counted.

**Try.** Give the H100 1,979 TFLOP/s in `GPUS`, as its datasheet does in large print: which claims
fail? In `fair_shares`, write `free[link] -= 0` for `free[link] -= share`: which ones now?

**Before.** Nothing but one GPU's worth of PyTorch. fundamentals/00_check_your_machine.py shows
which of these links your machine has.

**Next.** fundamentals/03_measure_your_machine.py puts a clock on your own links. Read both before
you rent a machine, and run benchmarks/cluster.py once you have it.
"""

import argparse
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
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import pynvml
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. The links of a machine, and their rates
#
# A **node** is one computer. This one has two CPUs, each with its own memory (two **NUMA nodes**),
# four GPUs and two network cards (**NICs**):
#
#      memory === CPU 0 ------- socket link (UPI, xGMI) ------- CPU 1 === memory
#                   |                                             |
#                   | PCIe uplink                                 | PCIe uplink
#             +-----------+                                 +-----------+
#             |PCIe switch|                                 |PCIe switch|
#             +-----------+                                 +-----------+
#              |   |   |  \                                  |   |   |  \
#           GPU 0  |  NIC  SSD                            GPU 2  |  NIC  SSD
#             :  GPU 1 |                                    :  GPU 3 |
#             :    :   |                                    :    :   |
#             :....:...|......... NVLink to NVSwitch .......:....:   |
#                      |                                             |
#                      +---- InfiniBand or Ethernet switches --------+----> other nodes
#
# **PCIe** joins a GPU to its host, its NIC and its disk. **NVLink** joins GPUs to each other. On
# Grace machines (GH200, GB200) **NVLink-C2C** takes PCIe's place between a GPU and its CPU.
# InfiniBand or Ethernet joins nodes.
#
# Each link is a number of **lanes**. A lane carries so many bits per second in each direction, and
# a code that keeps the two ends in step takes some of them: 2 of 130 in PCIe 3.0 to 5.0, 14 of 256
# in 6.0. NVLink and networks are quoted after coding. Everything below is **one way**. Beware that
# NVLink is sold by *both* ways added up, PCIe and networks by one.


# %%
class Link(NamedTuple):
    """One GPU's, or one port's, links of a kind."""

    links: int
    lanes: int  # per link
    gigabits: float  # per second and lane, one way
    coding: float  # the share of them that is data
    published: float  # GB/s one way
    seen_in: str

    @property
    def one_way(self) -> float:
        """GB/s in one direction; the other direction has wires of its own."""
        return self.links * self.lanes * self.gigabits * self.coding / 8


LINKS = {
    "PCIe 3.0 x16": Link(1, 16, 8, 128 / 130, 15.75, "V100"),
    "PCIe 4.0 x16": Link(1, 16, 16, 128 / 130, 31, "A100"),
    "PCIe 5.0 x16": Link(1, 16, 32, 128 / 130, 63, "H100, H200, B200"),
    "PCIe 6.0 x16": Link(1, 16, 64, 242 / 256, 121, "some Blackwell boards"),
    "NVLink 1": Link(4, 8, 20, 1, 80, "P100"),
    "NVLink 2": Link(6, 8, 25, 1, 150, "V100"),
    "NVLink 3": Link(12, 4, 50, 1, 300, "A100"),
    "NVLink 4": Link(18, 2, 100, 1, 450, "H100, H200"),
    "NVLink 5": Link(18, 2, 200, 1, 900, "B200"),
    "NVLink-C2C": Link(10, 1, 360, 1, 450, "GH200: to its CPU; 10 links of 45"),
    "InfiniBand HDR": Link(1, 4, 50, 1, 25, "200 Gb/s, as 200 GbE"),
    "InfiniBand NDR": Link(1, 4, 100, 1, 50, "400 Gb/s, as 400 GbE"),
    "InfiniBand XDR": Link(1, 4, 200, 1, 100, "800 Gb/s, as 800 GbE"),
    "10 GbE": Link(1, 1, 10, 1, 1.25, "office networks, cheap clouds"),
    "25 GbE": Link(1, 1, 25, 1, 3.125, "clouds"),
    "100 GbE": Link(1, 4, 25, 1, 12.5, "clouds"),
}


def show_links() -> None:
    """Print the rates that lanes, bits and coding give, next to those that are published."""
    print0(f"\n  {'GB/s':16}{'one way':>9}{'both ways':>11}{'published':>11}  seen in")
    for name, link in LINKS.items():
        rates = f"{link.one_way:9.2f}{2 * link.one_way:11.2f}{link.published:11g}"
        whole = link.published >= 20 and name.startswith("PCIe")  # published in whole GB/s
        differs = abs(link.one_way - link.published) >= (1 if whole else 0.01)
        print0(f"  {name:16}{rates}  {link.seen_in}{'  DIFFERS' if differs else ''}")
    print0()


# %% [markdown]
# The table that the cell above prints spans a factor of 700: from 1.25 GB/s of a 10 GbE port to
# 900 GB/s of a B200's NVLink. A gradient of 14 GB (7B parameters in bf16) crosses the second in 16
# ms and the first in 11 s. That one sentence decides most of this course's questions.

# %% [markdown]
# ## 2. Who else is on the link? Max-min fair sharing
#
# A link's rate says what you get *alone*. The picture has two places where several flows meet.
# All devices below a **PCIe switch** share its **uplink** to the CPU, but two of them can talk
# through the switch without touching it. Every byte between CPU 0's side and CPU 1's crosses the
# socket link, with what the CPUs themselves send there.
#
# How do flows share? Links take turns among the flows that wait (for packets or credits), so no
# flow gets less than another unless it cannot use more. That is **max-min fairness**: raise all
# rates together; when a link is full, its flows keep what they have; go on with the rest
# (Bertsekas and Gallager, 1992, section 6.5.2). A route is a list of the places it passes.

# %%
Wire = tuple[str, str]  # from, to: each direction has its own capacity


def links_of(route: list[str]) -> list[Wire]:
    return list(itertools.pairwise(route))


def both_ways(a: str, b: str, rate: float) -> dict[Wire, float]:
    return {(a, b): rate, (b, a): rate}


def fair_shares(routes: list[list[str]], capacity: dict[Wire, float]) -> list[float]:
    """Return the GB/s that each flow gets when all run at once."""
    free = dict(capacity)  # what nobody has been given yet
    rates: dict[int, float] = {}
    while len(rates) < len(routes):
        growing = [flow for flow in range(len(routes)) if flow not in rates]
        load = Counter()
        for flow in growing:
            load.update(links_of(routes[flow]))
        bottleneck = min(load, key=lambda link: free[link] / load[link])  # it is full first
        share = free[bottleneck] / load[bottleneck]
        for flow in growing:
            if bottleneck in links_of(routes[flow]):
                rates[flow] = share
                for link in links_of(routes[flow]):
                    free[link] -= share
    return [rates[flow] for flow in range(len(routes))]


# %% [markdown]
# Question 1's machine: four GPUs and four NICs below one switch, with one uplink.


# %%
def pcie_box(gpus: int = 4) -> dict[Wire, float]:
    """GPUs and their NICs below one PCIe switch: the capacity of each wire."""
    pcie = LINKS["PCIe 5.0 x16"].one_way
    capacity = both_ways("switch", "host memory", pcie)
    for gpu in range(gpus):
        capacity |= both_ways(f"GPU {gpu}", "switch", pcie)
        capacity |= both_ways(f"NIC {gpu}", "switch", pcie)
        capacity |= both_ways(f"NIC {gpu}", "network", LINKS["InfiniBand NDR"].one_way)
    return capacity


def check_pcie_switch() -> None:
    box = pcie_box()
    readers = [["host memory", "switch", f"GPU {gpu}"] for gpu in range(4)]
    neighbors = [[f"GPU {gpu}", "switch", f"GPU {(gpu + 1) % 4}"] for gpu in range(4)]
    rates = packets_delivered(readers, box)
    text = "4 GPUs read host memory at once: GB/s each"
    claim(text, 63 / 4, min(rates), atol=0.3, question=1, kind="simulated")
    rates = packets_delivered(neighbors, box)
    text = "4 GPUs send to neighbors: GB/s each"
    claim(text, 63, min(rates), atol=1, question=1, kind="simulated")

    together = [*readers, neighbors[3]]  # GPU 3 sends to GPU 0 while all four read
    shares = fair_shares(together, box)
    rates = packets_delivered(together, box)
    text = "next to 4 readers, a neighbor's copy: GB/s"
    claim(text, shares[4], rates[4], atol=1, kind="simulated")
    text = "  by hand, what a reader leaves of 63"
    claim(text, 63 - 63 / 4, shares[4], atol=0.1, kind="theory")


# %% [markdown]
# ## 3. NVSwitch: a crossbar
#
# With four GPUs and 12 links each, one can wire every pair directly: each pair gets 4 links, and
# two GPUs that talk while the others are silent leave 8 of 12 idle. A **crossbar** ends that. Every
# GPU takes all its links to switch chips, and a chip can connect every input with every output at
# once, so a pair has *all* links of both. No wire is shared unless two flows begin or end at the
# same GPU:
#
#         direct, 4 GPUs x 12 links             NVSwitch, any number of GPUs
#           GPU 0 ==4== GPU 1                  out 0 --o---o---o---o
#             |  \4  4/  |                     out 1 --o---o---o---o     o: any input may be joined
#             4    \/    4                     out 2 --o---o---o---o        to any output; only two
#             |   /  \   |                     out 3 --o---o---o---o        inputs that want the
#           GPU 2 ==4== GPU 3                        in 0  1   2   3        same output must share
#
# A DGX A100 has six such chips for 8 GPUs, an HGX H100 four, an NVL72 rack 18 for 72 GPUs: 72 x 2 x
# 900 GB/s = 130 TB/s, as its makers sum up. All GPUs behind one crossbar are an **NVLink domain**.
# Since NVLink 4's generation the chips also add: with NVLink SHARP a GPU sends its tensor *once*,
# and the switch returns the sum (NCCL calls this NVLS).


# %%
def crossbar(gpus: int, rate: float) -> dict[Wire, float]:
    """GPUs around a switch that never limits: only each GPU's own links do."""
    capacity = {}
    for gpu in range(gpus):
        capacity |= both_ways(f"GPU {gpu}", "NVSwitch", rate)
    return capacity


def direct_mesh(gpus: int, rate: float) -> dict[Wire, float]:
    """GPUs whose links are dealt out evenly to all others."""
    capacity = {}
    for a, b in itertools.combinations(range(gpus), 2):
        capacity |= both_ways(f"GPU {a}", f"GPU {b}", rate / (gpus - 1))
    return capacity


def check_crossbar() -> None:
    h100 = crossbar(8, LINKS["NVLink 4"].one_way)
    ring = [[f"GPU {gpu}", "NVSwitch", f"GPU {(gpu + 1) % 8}"] for gpu in range(8)]
    incast = [[f"GPU {gpu}", "NVSwitch", "GPU 7"] for gpu in range(7)]
    rates = packets_delivered(ring, h100)
    text = "crossbar, 8 send right at once: GB/s each"
    claim(text, 450, min(rates), atol=5, question=2, kind="simulated")
    rates = packets_delivered(incast, h100)
    text = "crossbar, 7 send to one: GB/s each"
    claim(text, 450 / 7, min(rates), atol=1, question=2, kind="simulated")
    a100 = direct_mesh(4, LINKS["NVLink 3"].one_way)
    alone = packets_delivered([["GPU 0", "GPU 1"]], a100)
    text = "A100s wired directly, one pair: GB/s"
    claim(text, 12 / 3 * 25, alone[0], atol=2, kind="simulated")

    over_nvlink = packets_delivered([ring[0]], h100)
    over_pcie = packets_delivered([["GPU 0", "switch", "GPU 1"]], pcie_box())
    faster = over_nvlink[0] / over_pcie[0]
    text = "one copy: NVLink 4 / PCIe 5.0"
    claim(text, 450 / 63, faster, atol=0.2, question=3, kind="simulated")


# %% [markdown]
# ## 4. InfiniBand and Ethernet, side by side
#
# Both carry 100 to 800 Gb/s per port today, so bandwidth does not separate them. What does is who
# moves the bytes. With **TCP** the kernel does: a message is copied into its buffers, cut into
# packets by a CPU core, and copied out at the other end. With **RDMA** (remote direct memory
# access) a program tells the NIC "send this memory there", and the NICs do the rest; no kernel call
# and no copy lies on the way. InfiniBand was built for RDMA; **RoCE** (say "rocky") carries
# InfiniBand's messages in UDP packets over Ethernet.
#
# The latencies are rules of thumb for small messages between two hosts below one switch; measure
# yours (fundamentals/04_latency_and_bandwidth.py does it within a machine):
#
#                        InfiniBand          Ethernet, RoCE v2          Ethernet, TCP
#     GB/s per port      25, 50, 100         12.5, 25, 50, 100          the same on the wire
#     RDMA               always              yes                        no
#     latency one way    1 to 2 us           2 to 5 us                  10 to 50 us
#     a core is busy     no                  no                         yes, per 3 to 5 GB/s
#     nothing lost by    credits per link    pause frames (PFC), ECN,   resending
#                                            set up by hand
#     many paths         adaptive routing    classically hashing per    hashing per flow
#                                            flow (ECMP); today often
#                                            packets sprayed over all
#     adds up in switch  SHARP               classically no             no
#     NCCL calls it      NET/IB              NET/IB                     NET/Socket
#     run by             a subnet manager    the network team           the network team
#
# So "400 Gb/s Ethernet" may be as good as InfiniBand, or (through TCP) a fifth of it. AWS's EFA is
# a third kind: RDMA-like over Ethernet, through a plugin of NCCL. Good nodes have a NIC per GPU,
# below the same PCIe switch: eight NDR ports are 400 GB/s per node, still 9 times less than the
# NVLinks of its GPUs.

# %% [markdown]
# ## 5. GPUDirect: leave the host out
#
# A byte on its way from GPU memory to another node used to cross the uplink twice:
#
#     through host memory    GPU -> switch -> [host memory] -> switch -> NIC -> network
#     GPUDirect RDMA         GPU -> switch ----------------------------> NIC -> network
#
# Four names, one idea:
#
# - **P2P**: a GPU reads and writes a peer's memory, over NVLink or PCIe. It skips the copy into
#   host memory and the one out. *On?* `torch.cuda.can_device_access_peer(0, 1)`; `nvidia-smi topo
#   -p2p r`; NCCL_DEBUG=INFO says `via P2P`, and `via SHM` where it had to go through the host.
# - **RDMA**: the NIC reads and writes GPU memory. It skips the same copies on each side of the
#   network. *On?* Kernel module `nvidia_peermem`, or DMA-BUF (open kernel modules, Linux 5.12);
#   NCCL says `via NET/IB/0/GDRDMA`. Without that suffix it is off.
# - **Storage** (GDS): the NVMe drive, or the NIC of a file server, reads and writes GPU memory.
#   *On?* Module `nvidia_fs`; `gdscheck -p`. cuFile falls back to copies without a word
#   ("compatibility mode"), so watch `/proc/driver/nvidia-fs/stats` count.
# - **Async**: it skips no copy but the CPU's *order*: a kernel on the GPU itself rings the NIC's
#   bell (IBGDA in NVSHMEM). *On?* `EnableStreamMemOPs: 1` in `/proc/driver/nvidia/params`.


# %%
def check_gpudirect_rdma() -> None:
    """Four GPUs send to other nodes: by way of host memory, and straight to the NIC."""
    box = pcie_box()
    by_host = []
    direct = []
    for gpu in range(4):
        to_network = ["switch", f"NIC {gpu}", "network"]
        by_host.append([f"GPU {gpu}", "switch", "host memory", *to_network])
        direct.append([f"GPU {gpu}", *to_network])
    rates = packets_delivered(by_host, box)
    text = "4 GPUs send through host memory: GB/s each"
    claim(text, 63 / 4, min(rates), atol=0.3, question=4, kind="simulated")
    rates = packets_delivered(direct, box)
    text = "  with GPUDirect RDMA: GB/s each"
    claim(text, 50, min(rates), atol=1, question=4, kind="simulated")


def gpudirect_signs(root: Path) -> dict[str, bool]:
    """What a Linux machine, its files below `root`, shows of each GPUDirect."""
    modules = root / "proc/modules"
    loaded = modules.read_text() if modules.is_file() else ""
    driver = root / "proc/driver/nvidia/version"
    parameters = root / "proc/driver/nvidia/params"
    ports = root / "sys/class/infiniband"
    signs = {"RDMA-capable NICs": ports.is_dir() and any(ports.iterdir())}
    signs["RDMA: nvidia_peermem"] = "nvidia_peermem" in loaded
    signs["RDMA: open driver (DMA-BUF)"] = driver.is_file() and "Open" in driver.read_text()
    signs["Storage: nvidia_fs"] = "nvidia_fs" in loaded
    on = "EnableStreamMemOPs: 1"
    signs["Async: stream memory operations"] = parameters.is_file() and on in parameters.read_text()
    return signs


# %% [markdown]
# ## 6. The roofline: memory is a link too
#
# The fastest link of a GPU is the one to its own memory (HBM), and most kernels wait for it. A
# kernel's **arithmetic intensity** is its FLOPs per byte moved. It attains at most
#
#     min(peak FLOP/s, intensity x memory bandwidth)
#
# which is the **roofline** (Williams et al., 2009). The two limits meet at the **ridge**, peak over
# bandwidth. Left of the ridge a kernel is **memory-bound**, and extra FLOPs are free; right of it,
# **compute-bound**, and extra bytes are free:
#
#     FLOP/s
#       |             ______________________  peak        matrix products, convolutions, prefill
#       |            /
#       |          /                                      additions, norms, activations, optimizer
#       |        /  slope: bandwidth                      steps, one token of generation
#       +-------+-------------------------> FLOPs per byte
#             ridge
#
# The dense bf16 peak counts. H100's datasheet prints 1,979 TFLOP/s in bold, with sparsity that
# training does not have; 989 is dense. Adding two tensors does 1 FLOP for 3 elements of 2 bytes. A
# product of two n x n matrices does 2 n^3 FLOPs for 3 n^2 elements: 2 n^3 / (6 n^2) = n / 3.

# %%
GPUS = {  # HBM in TB/s, dense bf16 in TFLOP/s, of SXM boards
    "A100": (2.0, 312),
    "H100": (3.35, 989),
    "H200": (4.8, 989),
    "B200": (8.0, 2250),
}


def ridge(gpu: str) -> float:
    """FLOPs per byte from which on arithmetic, not memory, limits this GPU."""
    bandwidth, peak = GPUS[gpu]
    return peak / bandwidth


def attainable(intensity: float, gpu: str) -> float:
    """TFLOP/s below the roofline."""
    bandwidth, peak = GPUS[gpu]
    return min(peak, intensity * bandwidth)


def counted_intensity(operation: Callable, *shapes: tuple[int, int]) -> float:
    """FLOPs per byte of an operation on bf16 operands: both are counted, neither is computed."""
    operands = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        result = operation(*operands)
    flops = counter.get_total_flops() or result.numel()  # it leaves sums out: 1 FLOP per element
    return flops / sum(tensor.nbytes for tensor in (*operands, result))


def square(n: int) -> float:
    """Intensity of a product of two n x n matrices."""
    return counted_intensity(torch.mm, (n, n), (n, n))


def layer(tokens: int) -> float:
    """Intensity of a linear layer, 8192 to 8192, on so many tokens."""
    return counted_intensity(torch.mm, (tokens, 8192), (8192, 8192))


# %% [markdown]
# Generating text multiplies the weights by one token's vector at a time: one FLOP per byte, so an
# H100 attains 3.35 of its 989 TFLOP/s. The cure is to batch: how many tokens must meet a weight
# while it is there? For B tokens and D x D weights the intensity is 2 B D^2 / (2 (D^2 + 2 B D)) =
# B / (1 + 2 B / D). Set that equal to the ridge r and solve: B = r / (1 - 2 r / D).


# %%
def check_roofline() -> None:
    print0(f"  {'FLOPs per byte':22}{'A100':>9}{'H100':>9}{'H200':>9}{'B200':>9}")
    print0(f"  {'ridge':22}" + "".join(f"{ridge(gpu):9.0f}" for gpu in GPUS))
    print0("  attainable TFLOP/s of")
    add = counted_intensity(torch.add, (8192, 8192), (8192, 8192))
    for name, intensity in {
        "adding": add,
        "1 token": layer(1),
        "8192 x 8192": square(8192),
    }.items():
        rates = "".join(f"{attainable(intensity, gpu):9.2f}" for gpu in GPUS)
        print0(f"    {name + f' ({intensity:.3g})':20}{rates}")
    print0()
    claim("adding: FLOPs per byte in bf16", 1 / 6, add, atol=1e-9, question=5, kind="theory")
    text = "8192 x 8192 product: FLOPs per byte"
    claim(text, 8192 / 3, square(8192), atol=1e-6, kind="theory")
    sizes = range(1, 8193)
    first = sizes[bisect_left(sizes, ridge("H100"), key=square)]
    text = "H100: smallest compute-bound n x n product"
    claim(text, math.ceil(3 * 295.22), first, question=5, kind="theory")
    r = 989 / 3.35
    first = sizes[bisect_left(sizes, ridge("H100"), key=layer)]
    text = "H100: tokens that fill an 8192-wide layer"
    claim(text, math.ceil(r / (1 - 2 * r / 8192)), first, kind="theory")


# %% [markdown]
# ## 7. How it is measured
#
# Rows marked `s` say what a *simulated* machine does, the one in the text, also where yours has
# GPUs; that its switches themselves never limit is assumed. fundamentals/03_measure_your_machine.py
# asks your own links.
#
# The **oracle** of fair sharing is a simulation that knows nothing of rates: packets of 4 MB queue
# at each link, which serves the flows that wait in turns. Each flow may have WINDOW packets under
# way; when one arrives, the next may leave, as PCIe's and InfiniBand's credits have it. Turns plus
# windows lead to max-min fairness (Hahne, 1991). We count what arrives in the second half of a
# tenth of a second: at least 190 packets per flow, so a count of one more or less is 0.5%. FLOPs
# are counted by PyTorch's own `FlopCounterMode`, bytes by adding up the tensors. These bytes are
# the least that an operation must move; a real kernel may move more.

# %%
PACKET = 0.004  # GB
WINDOW = 8  # packets of a flow under way


class Packets:
    """Packets on their routes, event by event."""

    def __init__(self, routes: list[list[str]], capacity: dict[Wire, float]) -> None:
        self.paths = [links_of(route) for route in routes]
        self.seconds = {link: PACKET / rate for link, rate in capacity.items()}
        self.turns = {link: deque() for link in capacity}  # flows that wait, in order
        self.waiting = Counter()  # (link, flow): packets
        self.busy: set[Wire] = set()
        self.crossings: list[tuple[float, int, int]] = []  # heap of (end, flow, hop)

    def arrive(self, flow: int, hop: int, now: float) -> None:
        """A packet of `flow` comes to the link number `hop` of its path."""
        link = self.paths[flow][hop]
        if self.waiting[link, flow] == 0:
            self.turns[link].append(flow)
        self.waiting[link, flow] += 1
        self.serve(link, now)

    def serve(self, link: Wire, now: float) -> None:
        """If the link is free, let the next flow in turn send one packet."""
        if link in self.busy or not self.turns[link]:
            return
        flow = self.turns[link].popleft()
        self.waiting[link, flow] -= 1
        if self.waiting[link, flow] > 0:
            self.turns[link].append(flow)
        self.busy.add(link)
        hop = self.paths[flow].index(link)
        heappush(self.crossings, (now + self.seconds[link], flow, hop))


def packets_delivered(
    routes: list[list[str]], capacity: dict[Wire, float], seconds: float = 0.1
) -> list[float]:
    """Return each flow's GB/s, counted at its end in the second half of the time."""
    packets = Packets(routes, capacity)
    delivered = [0] * len(routes)
    for flow in range(len(routes)):
        for _ in range(WINDOW):
            packets.arrive(flow, 0, now=0.0)
    while packets.crossings[0][0] <= seconds:
        now, flow, hop = heappop(packets.crossings)
        link = packets.paths[flow][hop]
        packets.busy.remove(link)
        if hop + 1 < len(packets.paths[flow]):
            packets.arrive(flow, hop + 1, now)
        else:
            if now > seconds / 2:
                delivered[flow] += 1
            packets.arrive(flow, 0, now)  # its credit is back: the next packet may leave
        packets.serve(link, now)
    return [PACKET * count / (seconds / 2) for count in delivered]


# %% [markdown]
# ## 8. On GPUs: is P2P on?
#
# CUDA says which GPUs it can reach; the driver's management library, NVML, says which it should.
# If they differ, a setting stands in the way: a container that hides devices, an IOMMU, a virtual
# machine. The signs of the other three GPUDirects are printed for your machine.


# %%
def check_p2p() -> None:
    signs = gpudirect_signs(Path("/"))
    for sign, there in signs.items():
        print0(f"  {sign:34} {'yes' if there else 'no'}")
    gpus = torch.cuda.device_count()
    text = "pairs of GPUs with P2P, by CUDA and by NVML"
    if gpus < 2:
        blocked(text, needs="2 GPUs, seen by one rank")
        return
    try:
        pynvml.nvmlInit()
        expected = 0
        for a, b in itertools.permutations(range(gpus), 2):
            ask = partial(pynvml.nvmlDeviceGetP2PStatus, nvml_handle(a), nvml_handle(b))
            expected += ask(pynvml.NVML_P2P_CAPS_INDEX_READ) == 0
    except pynvml.NVMLError:
        blocked(text, needs="GPUs of which NVML tells P2P (not MIG)")
        return
    pairs = itertools.permutations(range(gpus), 2)
    reached = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    claim(text, expected, reached)


def nvml_handle(gpu: int) -> object:
    """NVML's name for CUDA's GPU: CUDA_VISIBLE_DEVICES renumbers only the latter."""
    uuid = str(torch.cuda.get_device_properties(gpu).uuid).removeprefix("GPU-")
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


# %% [markdown]
# ## What you should have seen
#
# 1. 15.75 GB/s each through the uplink, and 63 each between neighbors, who do not touch it. A
#    loader that feeds four GPUs is four times slower than a benchmark of one GPU says. And a flow
#    next to the readers gets what they leave: 63 - 15.75 = 47.25 GB/s into GPU 0.
# 2. 450 GB/s for all eight at once, since no wire is shared: that is what a crossbar is. But a
#    crossbar cannot help an output: seven senders to one GPU get 64.3 GB/s each. This **incast** is
#    why a sum is not gathered on one rank but goes around a ring, where each receives from one.
# 3. 7.1 times. 900 / 63 = 14 divides both ways by one way, a common slip.
# 4. 15.75 GB/s through host memory, for the uplink is shared again (in both directions at once); 50
#    with GPUDirect RDMA, all that the NIC can. This is the difference that a missing kernel module
#    makes, and nothing reports an error.
# 5. From n = 886 on: the ridge is 989 / 3.35 = 295 FLOPs per byte, and n / 3 reaches it there.
#    Adding does 1/6 of a FLOP per byte, 1,771 times too few, so it runs at 0.06% of the peak. A
#    layer 8192 wide is compute-bound from 319 tokens on: a long prompt is, a single reply is not.
#    `--figure` draws both: the ladder of links, and the rooflines with these operations on them.
#
# **Try.** With 1,979 TFLOP/s the ridge doubles, and n = 886 turns into 1,773; every MFU computed
# with it is half the truth. Without the subtraction, `fair_shares` gives the neighbor's copy 63
# GB/s, as if the readers were not there; the packets, and a pencil, say 47.
#
# On real machines: expect 80 to 90% of these rates (8 H200, published: 396 of 450 GB/s between two
# GPUs, 784 of 900 both ways, 55 of 63 from pinned host memory). `nvidia-smi nvlink -s` shows 26.6
# GB/s per link of NVLink 4, of which 25 are data. A PCIe device below its full width is as often
# wiring, bifurcation or a riser as a badly seated card. At a thousand GPUs the same question
# returns one level up: leaf switches have uplinks too, and if they are fewer than the ports below
# (oversubscription), placing a job decides its speed.


# %%
def draw(path: str) -> None:
    """Left: each link's rate, a ladder. Right: rooflines, with what stands on H100's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    ladder, roof = figure.subplots(1, 2)
    names = sorted(LINKS, key=lambda name: LINKS[name].one_way)
    kinds = {"NVLink": ("#74c476", "per GPU"), "PCIe": ("#9ecae1", "per slot")}
    kinds |= {"InfiniBand": ("#fdae6b", "per port"), "NVLink-C2C": ("0.75", "from GPU to CPU")}
    for y, name in enumerate(names):
        link = LINKS[name]
        color, per = kinds.get(name.split()[0], ("#fdd0a2", "per port"))  # Ethernet
        ladder.barh(name, link.one_way, color=color)
        links = f", {link.links} links" if link.links > 1 else ""
        ladder.text(1.05 * link.one_way, y, f"{link.published:g} {per}{links}", va="center")
    ladder.set(xscale="log", xlabel="GB/s, one way", xlim=(1, 50_000))
    factor = LINKS[names[-1]].one_way / LINKS[names[0]].one_way
    ladder.set_title(f"From {names[0]} to {names[-1]}: a factor of {factor:.0f}")
    intensities = [2 ** (k / 8) / 16 for k in range(136)]
    for gpu in GPUS:
        heights = [attainable(intensity, gpu) for intensity in intensities]
        roof.loglog(intensities, heights, label=f"{gpu}, ridge {ridge(gpu):.0f}")
    add = counted_intensity(torch.add, (8192, 8192), (8192, 8192))
    marks = {"adding": add, "layer, 1 token": layer(1), "layer, 319 tokens": layer(319)}
    for name, intensity in marks.items():
        height = attainable(intensity, "H100")
        roof.plot(intensity, height, "ko", markersize=5)
        roof.annotate(name, (intensity, height), (22, -14), textcoords="offset points")
    roof.set(xlabel="FLOPs per byte; dots: on an H100", ylabel="TFLOP/s attainable, dense bf16")
    roof.set_title("Left of the ridge memory limits, right of it arithmetic")
    for axis in (ladder.xaxis, roof.xaxis, roof.yaxis):
        axis.set_major_formatter("{x:g}")
    roof.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    options = command_line({"--figure": {"metavar": "PATH", "help": "draw links and rooflines"}})
    launch()
    setup()
    show_links()
    check_pcie_switch()
    check_crossbar()
    check_gpudirect_rdma()
    print0()
    check_roofline()
    print0()
    check_p2p()
    if options.figure and RANK == 0:
        draw(options.figure)
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
