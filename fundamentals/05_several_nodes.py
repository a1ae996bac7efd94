"""Several nodes: one torchrun per node, a slow link between them, and classic launch mistakes
===========================================================================================

**Question.** What changes when the ranks of a job live on two machines: in the commands, in the
result, and in the time of a step? And what do you see when a launch goes wrong?

**Predict**, and write it down before you run. Two nodes have two ranks each; ranks 0 and 1 share a
node, ranks 2 and 3 the other.

1. The four train a small network on the same batches as four ranks on one node. By how much do the
   final weights differ?
2. Each step computes for 100 ms and then all-reduces S = 153,640 bytes of gradients around the ring
   0, 1, 2, 3. The link between the nodes carries 20 Mbit/s. Which share of the step does it take?
3. And a link of 5 Mbit/s?
4. One layer is split over two ranks by tensor parallelism, but one of them is in the other node,
   across the link of 20 Mbit/s. Is the layer faster or slower than one rank alone computes it?
5. Section 6 makes seven mistakes on purpose: the port is taken, one node is missing (in two forms
   of launch), two nodes have the same number, two ranks believe in different world sizes, gloo
   takes the wrong interface, two ranks call different collectives. How many of the seven are
   noticed before any timeout?

**Run.** Rank 0 makes two virtual nodes on this machine and starts a torchrun in each. On real nodes
the same file measures the network that is there.

    torchrun --standalone --nproc-per-node=4 05_several_nodes.py    # NCCL on 4 GPUs, else gloo
    python 05_several_nodes.py                                      # the same, started for you
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \\
        --rdzv-endpoint=FIRST_NODE:29500 05_several_nodes.py        # on two real nodes

Not run on several GPUs. The virtual nodes need Linux, iproute2, and root or user namespaces.

**Try.** In `my_share` give every rank the whole batch: which claims fail? In `MISTAKES` give the
second node the number 1: what is seen now, and which claims fail?

**Before.** fundamentals/02_launching_processes.py: torchrun, rank and world size.

**Next.** exercises/15_hello_on_two_nodes; launch/README.md, which has scripts to copy; then
08_inside_a_launcher.py, which can wait. How to cross the slow link with fewer bytes:
communication/07.
"""

import argparse
import ctypes
import importlib
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process with threads should not fork
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning that 10.0.0.1 has no name
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

STEPS = 15
BATCH = 96  # images per step, of all ranks together
LEARNING_RATE = 0.1
WIDTH = 512  # of the hidden layer
PARAMETERS = (64 + 1) * WIDTH + (WIDTH + 1) * 10
S = 4 * PARAMETERS  # bytes of gradients, in float32
COMPUTE = 0.1  # seconds of each timed step: a sleep that stands for the compute of a large model
SPEEDS = [40.0, 20.0, 5.0]  # Mbit/s of the link between the virtual nodes

# %% [markdown]
# ## 1. Two nodes, four ranks, and what travels
#
# A **node** is one machine. Each node runs one launcher, which starts the ranks of that node and no
# others; the launchers meet first, agree on the numbers of all ranks, and then stay out of the way.
# Data-parallel training does the following in every step:
#
#     node 0, 10.0.0.1                                        node 1, 10.0.0.2
#     +-- torchrun -----------+                               +-- torchrun -----------+
#     |  rank 0      rank 1   |                               |  rank 2      rank 3   |
#     |  images      images   |                               |  images      images   |
#     |  0, 4, 8     1, 5, 9  |                               |  2, 6, 10    3, 7, 11 |
#     |    |           |      |                               |    |           |      |
#     |  gradient   gradient  |        the slow link          |  gradient   gradient  |
#     |    +---- all-reduce ==================================== all-reduce ----+     |
#     |    |           |      |                               |    |           |      |
#     |  update      update   |                               |  update      update   |
#     +-----------------------+                               +-----------------------+
#
# Only the all-reduce crosses the link. Every rank ends a step with the same average gradient and
# makes the same update, so all ranks keep the same weights without ever sending a weight.
#
# The first thing to run on new nodes is a hello: who is there, at which address, and does everybody
# hear everybody? `launch/distributed_hello.py` does this in 30 lines, and here it is a function.


# %%
def address_towards(host: str) -> str:
    """Return this node's address on the way to the host."""
    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(there)  # sends nothing: the kernel looks up the route
        return way.getsockname()[0]


def hello(device: torch.device) -> list[dict]:
    """Return for every rank its node, its number there, its address, and what it hears."""
    heard = torch.tensor(RANK + 1, device=device)
    dist.all_reduce(heard)  # 1 + 2 + ... + n
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    place = {"rank": RANK, "node": RANK // local_ranks, "local rank": RANK % local_ranks}
    place["address"] = address_towards(os.environ["MASTER_ADDR"])
    return gather_objects(place | {"heard": heard.item()})


def print_places(places: list[dict]) -> None:
    for place in places:
        where = f"node {place['node']}, local rank {place['local rank']}, {place['address']}"
        print0(f"{'':13}rank {place['rank']}: {where}, hears {place['heard']}")


def check_hello(places: list[dict], nodes: int, how: str) -> None:
    n = len(places)
    heard = [place["heard"] for place in places]
    claim(f"{how}: ranks that hear 1 + 2 + ... + n", n, heard.count(n * (n + 1) // 2))
    addresses = {place["address"] for place in places}
    claim(f"{how}: addresses at which the ranks live", nodes, len(addresses))


# %% [markdown]
# ## 2. Training across nodes is training
#
# Here is a whole data-parallel training of the digits that ship with scikit-learn. Nothing in it
# knows of nodes: DistributedDataParallel (DDP) averages the gradients over the ranks of the default
# group, wherever these are. DDP divides the sum of the ranks' gradients by their number n. So each
# rank takes the sum over its own images, times n / BATCH: then the average over ranks is the mean
# over the batch, even if n does not divide the batch.
#
# With the same number of ranks, gloo adds up in the same order on one node and on two. A different
# number of ranks adds up in a different order: that changes the last bits of float32, 6e-8 of a
# weight, and each of the 15 steps may make them a few times larger.


# %%
def build_model(device: torch.device, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)).to(device)


def read_digits() -> list[torch.Tensor]:
    from sklearn.datasets import load_digits  # takes a second, which one rank has to spend

    images, labels = load_digits(return_X_y=True)
    return [torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)]


def my_share(batch: torch.Tensor, rank: int, n: int) -> torch.Tensor:
    return batch[rank::n]


def train(
    model: nn.Module, digits: list[torch.Tensor], rank: int, n: int, device: torch.device
) -> torch.Tensor:
    """Train on the share of one rank of n; return all weights, laid end to end, on the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        image, label = (my_share(part[batch], rank, n).to(device) for part in digits)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(image), label, reduction="sum") * n / BATCH
        loss.backward()  # under DDP: averages the gradients over all ranks
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


def train_on_all_ranks(device: torch.device) -> tuple[torch.Tensor, float]:
    """Train with DDP; return the weights, and how far off one process's the worst rank's are."""
    digits = from_rank_0(read_digits() if RANK == 0 else None)
    weights = train(DistributedDataParallel(build_model(device)), digits, RANK, WORLD_SIZE, device)
    alone = train(build_model(device), digits, 0, 1, device)  # the oracle: one process, all images
    return weights, max(gather_objects(largest_error(weights, alone)))


ROUNDING = 1e-5  # of weights below 1; an update that misses a rank's images is off by 1e-3 and more


# %% [markdown]
# ## 3. The link's share of a step
#
# gloo's all-reduce is a ring in the order of the ranks (communication/03_ring_and_tree.py builds
# one). Over *each* edge of a ring of n ranks travel 2(n-1)/n S bytes, and one edge leads from node
# 0 to node 1, another one back. So for four ranks the link carries 1.5 S in each direction:
#
#     rank 0 --> rank 1 ==slow==> rank 2 --> rank 3 ==slow==> rank 0
#
# Everything travels in packets of 1,514 bytes, of which 1,448 are ours. If nothing overlaps, then
#
#     seconds on the link  =  1.5 S x 1514 / 1448 x 8 / (bits per second)
#     share of the step    =  seconds on the link / (seconds on the link + seconds of compute)
#
# To see it on the clock, a step sleeps for 100 ms before its backward pass; that stands for the
# compute of a large model, since ranks that share two cores cannot compute at full speed side by
# side. DDP's `no_sync()` leaves out the all-reduce: the same step without the link.


# %%
def one_step(model: nn.Module, image: torch.Tensor, label: torch.Tensor, compute: float) -> None:
    loss = F.cross_entropy(model(image), label)
    time.sleep(compute)
    loss.backward()


def time_steps(device: torch.device, mbit: float, compute: float) -> dict:
    """Seconds of a step with the all-reduce and without; bytes over the cable in one step."""
    width = WIDTH if device.type == "cpu" else 2**20  # on GPUs 315 MB of gradients
    model = DistributedDataParallel(build_model(device, width))
    image = torch.zeros(BATCH, 64, device=device)
    label = torch.zeros(BATCH, dtype=torch.long, device=device)
    row = {"mbit": mbit, "width": width}
    for name, context in {"alone": model.no_sync, "whole": nullcontext}.items():
        with context():
            work = partial(one_step, model, image, label, compute)
            row[name], row["bytes"] = fastest(work, device)
    return row


def seconds_on_the_link(payload: float, mbit: float) -> float:
    return payload * FRAME / MSS * 8 / (mbit * 1e6)


def check_share(row: dict, question: int | None = None) -> None:
    link = seconds_on_the_link(1.5 * S, row["mbit"])
    predicted = link / (link + COMPUTE)
    measured = 1 - row["alone"] / row["whole"]
    times = f"{row['alone'] * 1e3:.0f} ms without the all-reduce, {row['whole'] * 1e3:.0f} ms with"
    print0(f"{'':13}{row['mbit']:g} Mbit/s: {times}")
    text = f"{row['mbit']:g} Mbit/s: the link's share of a step"
    how = {"kind": "simulated", "timed": True}  # a sleep for the compute, a throttled link
    claim(text, predicted, measured, atol=0.05, question=question, **how)


# %% [markdown]
# ## 4. Tensor parallelism across the slow link, on purpose
#
# Data parallelism sends each gradient once per step, whatever the batch. Tensor parallelism splits
# a *layer*: each rank computes with half of its columns, and the partial results are added up, once
# in the forward pass and once in the backward pass:
#
#     forward     y  = all-reduce of gelu(x A_half) B_half        T x D numbers
#     backward    dx = all-reduce of each half's part of dx       T x D numbers
#
# So activations travel, in every layer, and no rank can go on before they have arrived. Inside a
# node that is a good trade. Across the link it is the classic mistake of layout, and here it is
# made: ranks 0 and 1 share a node, ranks 0 and 2 (the first of the other node) do not.

# %%
# T: rows of x; D: width of the layer; H: its hidden width; h: one rank's share of that
T = 256
D = 256
H = 4 * D


def layer_and_gradient(
    x_TD: torch.Tensor, A_DH: torch.Tensor, B_HD: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and dx of a layer of which this rank has some columns, the group all of them."""
    x_TD.grad = None
    y_TD = F.gelu(x_TD @ A_DH) @ B_HD
    y_TD.backward(torch.ones_like(y_TD))
    if group is not None:
        dist.all_reduce(y_TD.detach(), group=group)
        dist.all_reduce(x_TD.grad, group=group)
    return y_TD.detach(), x_TD.grad


def time_layer(device: torch.device, ranks: list[int]) -> dict:
    """Seconds and bytes of the layer on these ranks; how far off the whole layer it is."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, D), (D, H), (H, D)]
    if device.type == "cuda":
        shapes = [(16 * rows, 16 * columns) for rows, columns in shapes]
    x_TD, A_DH, B_HD = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    x_TD.requires_grad_()
    expected = [part.clone() for part in layer_and_gradient(x_TD, A_DH, B_HD, None)]
    group = dist.new_group(ranks)  # every rank has to call it
    error = 0.0
    work = None
    if RANK in ranks:
        A_Dh = A_DH.chunk(len(ranks), dim=1)[ranks.index(RANK)].contiguous()
        B_hD = B_HD.chunk(len(ranks), dim=0)[ranks.index(RANK)].contiguous()
        work = partial(layer_and_gradient, x_TD, A_Dh, B_hD, group if len(ranks) > 1 else None)
        error = max(map(relative_error, work(), expected))
    seconds, crossed = fastest(work, device)
    return {"seconds": seconds, "bytes": crossed, "error": max(gather_objects(error))}


# %% [markdown]
# What follows from the bytes: two ranks exchange 2(n-1)/n = 1 times T x D x 4 bytes in each
# direction, two times per layer. In exchange each of them computes half the layer.


# %%
def check_tensor_parallel(layer: dict[str, dict], mbit: float) -> None:
    for name, row in layer.items():
        print0(f"{'':13}the layer, {name}: {row['seconds'] * 1e3:.1f} ms")
    alone = layer["one rank alone"]
    across = layer["two ranks across the link"]
    errors = [row["error"] for row in layer.values()]
    claim("tensor parallel: relative error", 0, max(errors), atol=1e-5)
    payload = 2 * T * D * 4
    check_bytes("tensor parallel: bytes over the cable / payload", across["bytes"], 2, payload)
    predicted = alone["seconds"] / 2 + seconds_on_the_link(payload, mbit)
    ratio = across["seconds"] / predicted
    how = {"kind": "simulated", "timed": True}  # the link is throttled
    claim("across: seconds / (half of alone + the link's)", 1, ratio, atol=0.25, **how)
    slower = across["seconds"] / alone["seconds"]
    claim("across the link / one rank alone", 1, slower, ">=", question=4, **how)


# %% [markdown]
# ## 5. One torchrun per node, in two forms
#
# The launchers can find each other in two ways. **c10d** is the form to prefer: the line is the
# same on every node, the nodes come in any order, and their numbers are dealt out. In the
# **static** form you number the nodes yourself, as job scripts and older manuals do.
#
# Two more flags make a launch independent of the machines' names. In clouds and containers these
# often mean nothing, or 127.0.0.1: `--local-addr` is this node's own address, and `is_host` says
# who serves the store at the endpoint. `launch/launch_ddp.sh` finds out both for you.
#
# Process groups and their store listen without authentication: anyone who reaches their ports can
# join, read and write, and some of what ranks send is unpickled. On a shared network, launch behind
# a firewall only.


# %%
def c10d_form(node: int) -> list[str]:
    return f"""
        --nnodes=2 --nproc-per-node=2 --local-addr=10.0.0.{node + 1}
        --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500
        --rdzv-conf=is_host={1 - node},join_timeout=60
    """.split()


def static_form(node: int, port: int = 29501, patience: float = 60) -> list[str]:
    return f"""
        --nnodes=2 --nproc-per-node=1 --node-rank={node}
        --master-addr=10.0.0.1 --master-port={port} --rdzv-conf=timeout={patience}
    """.split()


# %% [markdown]
# ## 6. Launch mistakes
#
# Every mistake is made by two processes, one in each node, and is caught by the first that ends
# with an error; its message is printed and its words are checked. A launcher would end the other
# process then, and the lesson does.
#
# - **The port is taken.** *Seen:* EADDRINUSE, at once. *Why:* another job listens there, or one
#   that was left. *Do:* take another `--master-port`, and derive it from the job's number.
# - **A node is missing.** *Seen:* after the timeout "1/2 clients joined" in the static form, and
#   `RendezvousTimeoutError`, without another word, in the c10d form. *Why:* its launcher
#   never started, or cannot reach the first node. *Do:* from there, try `nc -zv FIRST_NODE 29500`.
# - **Two nodes have one number.** *Seen:* a timeout that waits for a `role_info`. *Why:* somebody
#   typed `--node-rank=0` on both. *Do:* use c10d, which needs no numbers.
# - **WORLD_SIZE differs.** *Seen:* a timeout that waits for the key of a rank that nobody is
#   (".../0/2" is rank 2's). *Why:* a launcher by hand, or an old number in a script. *Do:* let
#   torchrun or srun count.
# - **The wrong interface.** *Seen:* "Connection refused" at 127.0.0.1, or a wait. *Why:* gloo
#   offers the others the address of a network that ends on this node. *Do:* set
#   `GLOO_SOCKET_IFNAME`, and for NCCL `NCCL_SOCKET_IFNAME`, to the network between the nodes.
# - **Different collectives.** *Seen:* with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, "Detected mismatch
#   between collectives", at once. *Why:* a branch on the rank around a collective. *Do:* run once
#   with DETAIL, which compares all calls before they run.
# - **Two ranks on one GPU.** *Seen:* "same GPU" or "Duplicate GPU". *Why:* LOCAL_RANK was not used.
#   *Do:* call `torch.cuda.set_device(LOCAL_RANK)` before all else. torch 2.15 binds each NCCL group
#   to a GPU: `device_id`, else LOCAL_RANK's, else the rank modulo the GPUs. Tensors on another one
#   are refused there: "ProcessGroupNCCL is bound to device cuda:1".
#
# torchrun itself prevents some of them: it computes RANK and WORLD_SIZE, so no two ranks of its own
# have one number, or different world sizes. Anyone who writes a launcher by hand (`srun`, `mpirun`,
# a loop with ssh) can have both. Without DETAIL a mismatch is worse than an error: mostly a wait
# for the timeout, which is 30 minutes on gloo and 10 on NCCL; and if shapes agree, wrong numbers.

# %%
PATIENCE = 4  # seconds, in place of minutes: every wait below ends after about that


def launch_nothing(flags: list[str]) -> None:
    """Be the launcher of a node whose ranks have nothing to do; raise what torchrun raises."""
    from torch.distributed.run import main as torchrun

    torchrun([*flags, "--no-python", "true"])


def take_the_port_and_launch(flags: list[str]) -> None:
    taken = socket.create_server(("10.0.0.1", 29502))
    launch_nothing(flags)
    taken.close()


def join_by_hand(
    rank: int, world_size: int, port: int, network: str = "slow", detail: str = "OFF"
) -> None:
    """Be a rank whose environment somebody has written; make one collective call."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": network, "TORCH_DISTRIBUTED_DEBUG": detail}
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    x = torch.ones(4)
    if rank == 0 and detail == "DETAIL":
        dist.broadcast(x, src=0)
    else:
        dist.all_reduce(x)


def take_the_first_gpu(rank: int) -> None:
    """Join through NCCL as one of two ranks that both take GPU 0."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "NCCL_SOCKET_IFNAME": "slow"}
    os.environ |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29509"}
    first = torch.device("cuda", 0)  # not said, torch 2.15 would take LOCAL_RANK or the rank itself
    torch.cuda.set_device(first)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=first)
    dist.all_reduce(torch.ones(4, device=first))
    torch.cuda.synchronize()


# %% [markdown]
# Each mistake: the words by which one knows it, and what the process in each node does.


# %%
class Mistake(NamedTuple):
    words: str  # of the first error, as a regular expression
    on_node_0: Callable[[], None]
    on_node_1: Callable[[], None] | None  # None: nobody starts anything there


def wait_for_a_node() -> None:
    flags = c10d_form(0)
    at = flags.index("--rdzv-endpoint=10.0.0.1:29500")
    flags[at:] = [
        "--rdzv-endpoint=10.0.0.1:29508",
        f"--rdzv-conf=is_host=1,join_timeout={PATIENCE}",
    ]
    launch_nothing(flags)


def by_flags(node: int, port: int) -> Callable[[], None]:
    return partial(launch_nothing, static_form(node, port, PATIENCE))


MISTAKES = {
    "port taken": Mistake(
        "EADDRINUSE",
        partial(take_the_port_and_launch, static_form(0, 29502, PATIENCE)),
        by_flags(1, 29502),
    ),
    "node missing": Mistake("1/2 clients joined", by_flags(0, 29503), None),
    "node missing, c10d form": Mistake("RendezvousTimeoutError", wait_for_a_node, None),
    "two nodes with one number": Mistake("role_info", by_flags(0, 29504), by_flags(0, 29504)),
    "unequal WORLD_SIZE": Mistake(
        "wait timeout",
        partial(join_by_hand, 0, 2, 29505),
        partial(join_by_hand, 1, 3, 29505),
    ),
    "wrong interface": Mistake(
        r"refused.*127\.0\.0\.1",
        partial(join_by_hand, 0, 2, 29506, network="lo"),
        partial(join_by_hand, 1, 2, 29506, network="lo"),
    ),
    "different collectives": Mistake(
        "Detected mismatch between collectives",
        partial(join_by_hand, 0, 2, 29507, detail="DETAIL"),
        partial(join_by_hand, 1, 2, 29507, detail="DETAIL"),
    ),
}
SAME_GPU = Mistake(
    "same GPU|Duplicate GPU", partial(take_the_first_gpu, 0), partial(take_the_first_gpu, 1)
)


def check_mistakes(caught: dict[str, list]) -> None:
    at_once = 0
    for name, (seconds, message) in caught.items():
        found = re.search(MISTAKES.get(name, SAME_GPU).words, message)
        begin = max(0, found.end() - 87) if found else 0
        print0(f"\n{'':13}{name}, after {seconds:.1f} s:")
        print0(f"{'':13}{message[begin : begin + 87]}")
        claim(f"{name}: errors that name it", 1, found is not None)
        if name in MISTAKES and found and seconds < PATIENCE:
            at_once += 1
    claim("mistakes noticed before any timeout", 3, at_once, question=5, timed=True)


# %% [markdown]
# ## 7. How it is measured: nodes, a cable, a clock
#
# A **network namespace** is a network of its own: interfaces, addresses, ports. A **veth pair** is
# a cable between two of them, and the queueing discipline **tbf** lets only so many bits per second
# into each end. communication/07_hierarchical_collectives.py explains these lines. The kernel
# removes a namespace, and the cable with it, when the last process in it ends.

# %%
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000  # for unshare and setns: a network namespace
CLONE_NEWUSER = 0x10000000  # for unshare: a user namespace


def new_network() -> int:
    """Move this process into a new network namespace; return a descriptor of it."""
    if sys.platform != "linux":
        raise OSError("network namespaces exist on Linux only")
    user = os.geteuid()
    group = os.getegid()
    if libc.unshare(CLONE_NEWNET) != 0:  # not root: become root of a user namespace first
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")
        for name, line in {
            "setgroups": "deny",
            "uid_map": f"0 {user} 1",
            "gid_map": f"0 {group} 1",
        }.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(network: int) -> None:
    """Move this process into a network namespace."""
    if libc.setns(network, CLONE_NEWNET) != 0:
        raise OSError(f"setns: {os.strerror(ctypes.get_errno())}")


def command(line: str, keep: tuple[int, ...] = ()) -> None:
    """Run a command, with these descriptors open; raise OSError with what it complained of."""
    done = subprocess.run(line.split(), pass_fds=keep, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{done.stderr.strip()} ({line})")


def two_nodes(mbit: float) -> list[int]:
    """Make two networks joined by a cable that carries `mbit` Mbit/s each way; return both."""
    nodes = [new_network(), new_network()]  # we are in the second now
    far_end = f"peer name slow netns /proc/self/fd/{nodes[0]}"
    command(f"ip link add name slow type veth {far_end}", keep=(nodes[0],))
    for number, network in enumerate(nodes, start=1):
        enter(network)
        command("ip link set lo up")
        command(f"ip address add 10.0.0.{number}/24 dev slow")
        command("ip link set slow addrgenmode none up")  # no IPv6, so no chatter
        command("ip link set slow gso_max_segs 1")  # TCP cuts packets itself: no card does it here
        command(f"tc qdisc add dev slow root tbf rate {mbit}mbit burst 5kb latency 100ms")
    return nodes


def change_speed(mbit: float) -> None:
    """Let the cable carry `mbit` Mbit/s each way from now on; all ranks call it."""
    dist.barrier()
    if int(os.environ["LOCAL_RANK"]) == 0:  # each node has an end
        command(f"tc qdisc change dev slow root tbf rate {mbit}mbit burst 5kb latency 100ms")
    dist.barrier()


# %% [markdown]
# **Bytes and seconds.** The kernel counts what passes a cable's end, headers included. A full
# packet of 1,514 bytes carries 1,448 and is acknowledged by one of 66, or by data that goes that
# way just then. Work is done once to warm up and then three times; the fastest counts, since other
# jobs on the machine can only delay it.

# %%
MSS = 1448
FRAME = 1514
ACK = FRAME - MSS  # a packet without data
REPEATS = 3


def bytes_on_the_cable() -> int:
    """Bytes that have come into this node by the cable, and left: one end sees both ways."""
    with open("/proc/self/net/dev") as file:
        rows = [line.split() for line in file if "slow:" in line]
    # field 1 counts what was received, field 9 what was sent; without a cable there is no row
    return sum(int(row[1]) + int(row[9]) for row in rows)


def fastest(work: Callable[[], object] | None, device: torch.device) -> tuple[float, float]:
    """Seconds of the fastest of three runs on the slowest rank; bytes per run over the cable."""
    seconds = []
    crossed = []
    for _ in range(1 + REPEATS):
        dist.barrier()
        before = bytes_on_the_cable()
        dist.barrier()  # nobody sends before all have looked
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        if work is not None:
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        dist.barrier()  # all have received what was sent to them
        time.sleep(0.05)  # the last acknowledgement may be 40 ms late
        crossed.append(bytes_on_the_cable() - before)
    return max(gather_objects(min(seconds[1:]))), min(crossed[1:])


def check_bytes(text: str, crossed: float, directions: float, payload: float) -> None:
    """Claim the bytes that a cable's end has seen, over the payload of one direction."""
    least = directions * FRAME / MSS
    most = directions * (FRAME + ACK) / MSS
    slack = (most - least) / 2 + least / 20  # TCP now and then sends a packet again
    claim(text, (least + most) / 2, crossed / payload, atol=slack, varies=True)


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


# %% [markdown]
# **On several nodes** every rank runs this function: those in the virtual nodes as well as those
# that a torchrun of yours has started on real ones, where the cable is what it is, and no sleep
# stands for compute.


# %%
def on_several_nodes(device: torch.device, speeds: list[float]) -> dict:
    """Say hello, train, then time a step and a layer at each speed (0: as the link is)."""
    seen = {"places": hello(device)}
    weights, seen["off"] = train_on_all_ranks(device)
    seen["weights"] = weights.numpy().tobytes().hex()
    seen["steps"] = []
    seen["layer"] = {}
    for mbit in speeds:
        if mbit > 0:
            change_speed(mbit)
        seen["steps"].append(time_steps(device, mbit, COMPUTE if mbit > 0 else 0.0))
        if mbit == speeds[len(speeds) // 2]:
            seen["layer"] = time_layers(device)
    return seen


def time_layers(device: torch.device) -> dict[str, dict]:
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    layouts = {"one rank alone": [0], "two ranks of one node": [0, 1]}
    if local_ranks == 1:
        del layouts["two ranks of one node"]
    layouts["two ranks across the link"] = [0, local_ranks]
    return {name: time_layer(device, ranks) for name, ranks in layouts.items()}


def report_to_the_lesson(device: torch.device) -> None:
    """Be a rank in a virtual node; rank 0 prints what was seen."""
    speeds = [float(mbit) for mbit in os.environ["VIRTUAL_CABLE"].split()]
    seen = on_several_nodes(device, speeds) if speeds else {"places": hello(device)}
    print0(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def listen_towards_the_others() -> None:
    """Say on which network gloo listens: it would ask for the host's name, often 127.0.1.1."""
    if torch.cuda.device_count() > 0:
        return  # NCCL finds its networks itself
    here = address_towards(os.environ["MASTER_ADDR"])
    for network, addresses in psutil.net_if_addrs().items():
        if here in [one.address for one in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", network)
    if os.environ["GLOO_SOCKET_IFNAME"].startswith("lo"):
        refuse(f"needs MASTER_ADDR as others know it, got {here} for it here; set an address")


def rate_of(step: dict) -> float:
    """busbw in GB/s, at most: what DDP hides behind the backward pass is not in the difference."""
    nbytes = 4 * ((64 + 1) * step["width"] + (step["width"] + 1) * 10)  # as PARAMETERS, this width
    seconds = max(step["whole"] - step["alone"], 1e-9)
    return 2 * (WORLD_SIZE - 1) / WORLD_SIZE * nbytes / seconds / 1e9


def check_real_nodes(device: torch.device) -> None:
    seen = on_several_nodes(device, [0])
    print_places(seen["places"])
    check_hello(seen["places"], WORLD_SIZE // int(os.environ["LOCAL_WORLD_SIZE"]), "real nodes")
    claim("weights: all nodes' less those of one process", 0, seen["off"], atol=ROUNDING)
    errors = [row["error"] for row in seen["layer"].values()]
    claim("tensor parallel: relative error", 0, max(errors), atol=1e-5)
    (step,) = seen["steps"]
    share = 1 - step["alone"] / step["whole"]
    print0(f"{'':13}a step, almost without compute: {step['whole'] * 1e3:.2f} ms")
    print0(f"{'':13}the all-reduce adds {share:.0%} of it: {rate_of(step):.2f} GB/s (busbw)")
    for name, row in seen["layer"].items():
        print0(f"{'':13}the layer, {name}: {row['seconds'] * 1e3:.2f} ms")
    print0(f"{'':13}Plain python makes virtual nodes, a link that shrinks, and the mistakes.")
    finish()


# %% [markdown]
# **The operator of the virtual cluster** is a process that rank 0 forks before it has threads. It
# makes the nodes, steps into one after the other, and forks there what a person would type: the two
# torchruns, and then the mistakes, all at the same time, since most of them only wait. All that it
# starts is killed when it ends, and it is killed when rank 0 ends.


# %%
def die_with(parent: int) -> None:
    """Be killed when `parent` ends (PR_SET_PDEATHSIG), or now if it has ended."""
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def fork_in(network: int, work: Callable[[], None]) -> int:
    """Fork a process in this node that does the work; return its number."""
    enter(network)
    operator = os.getpid()
    child = os.fork()
    if child > 0:
        return child
    die_with(operator)
    try:
        work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


class Launch:
    """One torchrun in each node, whose ranks run this file; they write to files without a name."""

    def __init__(self, nodes: list[int], form: Callable[[int], list[str]], speeds: str) -> None:
        self.output = os.memfd_create("output")
        self.errors = os.memfd_create("errors")
        self.torchruns = []
        for node, network in enumerate(nodes):
            work = partial(self.be_torchrun, form(node), speeds)
            self.torchruns.append(fork_in(network, work))

    def be_torchrun(self, flags: list[str], speeds: str) -> None:
        from torch.distributed.run import main as torchrun

        os.dup2(self.output, 1)
        os.dup2(self.errors, 2)
        os.environ |= {"VIRTUAL_CABLE": speeds, "LAUNCHER": str(os.getpid())}
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both nodes would take the same GPUs
        torchrun([*flags, os.path.abspath(__file__)])

    def seen(self) -> dict:
        """Wait for both; return what rank 0 reports."""
        statuses = [os.waitpid(torchrun, 0)[1] for torchrun in self.torchruns]
        reports = [line for line in lines_of(self.output) if line.startswith("{")]
        if any(statuses) or not reports:
            raise RuntimeError("".join(lines_of(self.errors)[-40:]))
        return json.loads(reports[0])


def lines_of(descriptor: int) -> list[str]:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor) as file:
        return file.readlines()


# %% [markdown]
# A mistake's processes are silent; the first error of theirs is what counts. All begin together:
# one that comes late is missing, too, and would be named for that.


# %%
def report_error(work: Callable[[], None], line: tuple[int, int], pipe: Connection) -> None:
    """Do the work, once all are there; send when what error came, and how long it took."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    begin, hold = line
    os.close(hold)
    os.read(begin, 1)  # returns once nobody holds the other end any more
    start = time.monotonic()
    message = "no error at all"
    try:
        work()
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".replace("\n", " ")
    pipe.send((time.monotonic(), time.monotonic() - start, message))


def make_mistakes(nodes: list[int], mistakes: dict[str, Mistake]) -> dict[str, tuple]:
    """Make all mistakes at the same time; return each one's first error, and when it came."""
    importlib.import_module("torch.distributed.run")  # once, and not in each launcher
    children: list[int] = []
    names: dict[Connection, str] = {}
    begin, hold = os.pipe()  # a starting line
    for name, mistake in mistakes.items():
        for network, work in zip(nodes, mistake[1:], strict=True):
            if work is not None:
                ours, theirs = Pipe(duplex=False)
                names[ours] = name
                make = partial(report_error, work, (begin, hold), theirs)
                children.append(fork_in(network, make))
                theirs.close()
    os.close(hold)
    caught = {name: (math.inf, math.inf, "still waiting") for name in mistakes}
    deadline = time.monotonic() + 60
    while math.inf in [when for when, _, _ in caught.values()] and time.monotonic() < deadline:
        for pipe in wait(list(names), timeout=1):
            name = names.pop(pipe)
            caught[name] = min(caught[name], pipe.recv())  # the other may be its consequence
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {name: (seconds, message) for name, (_, seconds, message) in caught.items()}


# %% [markdown]
# The operator forgets first who it was forked from, a rank, since what it starts must not take
# itself for that rank.


# %%
def start_operator() -> Connection:
    """Fork the operator; return the pipe by which it reports to this rank."""
    ours, theirs = Pipe(duplex=False)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            operate(parent, theirs)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    theirs.close()
    return ours


def operate(parent: int, tell: Connection) -> None:
    """Make the nodes; report what was seen in them, or why there are none."""
    os.setsid()  # Ctrl-C is for the lesson; when that ends, we do
    die_with(parent)
    of_a_rank = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "LAUNCHER"]
    for name in list(os.environ):
        if name in of_a_rank or name.startswith(("MASTER_", "TORCHELASTIC_", "LESSON_", "GLOO_")):
            del os.environ[name]
    try:
        nodes = two_nodes(SPEEDS[0])
    except OSError as error:
        tell.send(str(error))
        return
    tell.send("")
    mistakes = MISTAKES | ({"two ranks on one GPU": SAME_GPU} if torch.cuda.device_count() else {})
    speeds = " ".join(map(str, SPEEDS))
    tell.send(Launch(nodes, c10d_form, speeds).seen())  # alone: it is timed
    static = Launch(nodes, static_form, "")
    tell.send(make_mistakes(nodes, mistakes))
    tell.send(static.seen())


# %% [markdown]
# **What all ranks claim** of the virtual cluster. The ranks of the lesson itself are on one node:
# they are the other side of the comparison.


# %%
def next_report(operator: Connection | None) -> object:
    """What the operator reports next; only rank 0 has one."""
    return from_rank_0(operator.recv() if operator else None)


def check_virtual_nodes(operator: Connection | None, here: torch.Tensor, on_cpu: bool) -> None:
    """Claim all that was seen in the nodes; `here` are the weights of this lesson's own ranks."""
    why_not = next_report(operator)
    if why_not:
        print0(f"{'':13}{why_not:.80}")
        blocked("two nodes on this machine", needs="root or user namespaces")
    else:
        check_across(next_report(operator), here, on_cpu)
        check_mistakes(next_report(operator))
        print0()
        check_hello(next_report(operator)["places"], 2, "static")
    if operator:
        os.wait()  # it has ended


def check_across(seen: dict, here: torch.Tensor, on_cpu: bool) -> None:
    print_places(seen["places"])
    check_hello(seen["places"], 2, "c10d")
    same_order = len(seen["places"]) == WORLD_SIZE and on_cpu
    slack = 0 if same_order else ROUNDING
    text = "weights: two nodes' less this node's"
    claim(text, 0, largest_error(weights_of(seen), here), atol=slack, question=1)
    claim("weights: two nodes' less those of one process", 0, seen["off"], atol=ROUNDING)
    print0()
    crossed = seen["steps"][0]["bytes"]
    check_bytes("data parallel: S over the cable, both ways", crossed, 2 * 1.5, S)
    check_share(seen["steps"][0])
    check_share(seen["steps"][1], question=2)
    check_share(seen["steps"][2], question=3)
    print0()
    check_tensor_parallel(seen["layer"], SPEEDS[1])


def weights_of(seen: dict) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(seen["weights"]), dtype=torch.float32)


# %% [markdown]
# ## What you should have seen
#
# 1. By nothing: 0, not even in the last bit. Four ranks are four ranks: the same images, and the
#    same order of the sum around the ring. With another number of ranks in this run (try
#    `--nproc-per-node=3`) the sum has another order, and the last bits differ. Where the ranks are
#    changes the time, never the result.
# 2. Half of it, 0.49: 1.5 S are 241 kB in packets, which take 96 ms at 20 Mbit/s, as long as the
#    compute. What is counted on the cable is 3.2 S: two directions of 1.5 S, with headers and
#    acknowledgements.
# 3. 0.79. Compute stays, the link takes four times as long. At 40 Mbit/s the share is 0.32, and a
#    little more on the clock, since each step also pays for the latency of six hops. Read it the
#    other way round, too: faster GPUs shorten only what is left besides the link's share.
# 4. Slower, and by far: 220 ms for its 0.5 MB in each direction, where one rank alone takes 10 to
#    40 ms for everything. Inside the node the same split gains. So tensor parallelism stays inside
#    a node, and data parallelism goes across: its bytes do not grow with the batch, they are sent
#    once per step, and DDP hides them behind the backward pass (communication/06_overlap.py).
# 5. Three at once: a taken port, an interface on which nobody else is, and different collectives
#    under DETAIL. The other four are only seen as somebody's absence, so they take a timeout, here
#    4 s. torchrun waits 15 minutes for a node in the static form, and 10 in c10d. A launch that
#    hangs for minutes is most often one of those four.
#
# **Try.** If every rank takes the whole batch, the gradient is n times too large: only the claims
# that compare with one process see it, for four ranks here and four in two nodes are wrong alike.
# An oracle must be another way to compute, not another place. With numbers 0 and 1 the launch is
# right, "no error at all" is seen, and that is what the claim refuses.
#
# On real systems: a link of 400 Gbit/s is 20,000 times as fast, and so are the gradients larger: 7
# billion parameters in bfloat16 are 14 GB, and 1.9 times that over a link per node takes half a
# second. The arithmetic of section 3 is the same: bytes over bandwidth, next to the compute.
# communication/07_hierarchical_collectives.py sends fewer of them across.


# %%
def main() -> None:
    command_line()
    launch()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE))
    if WORLD_SIZE % local_ranks != 0:
        ranks = f"got {WORLD_SIZE} ranks, {local_ranks} of them here"
        refuse(f"needs as many ranks in every node, {ranks}; start as many in each")
    if "VIRTUAL_CABLE" in os.environ:
        listen_towards_the_others()
        report_to_the_lesson(setup())
        return
    if local_ranks < WORLD_SIZE:
        listen_towards_the_others()
        check_real_nodes(setup())
    operator = start_operator() if RANK == 0 else None
    device = setup()  # after the fork: it starts threads
    weights, off = train_on_all_ranks(device)
    claim("weights: one node's less those of one process", 0, off, atol=ROUNDING)
    check_virtual_nodes(operator, weights, device.type == "cpu")
    if torch.cuda.device_count() == 0:
        blocked("two ranks on one GPU", needs="1 GPU")
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
