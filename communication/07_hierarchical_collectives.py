"""Hierarchical collectives: cross the slow link with as little as possible
========================================================================

**Question.** Inside a node, ranks talk over fast links; between nodes, over a slow one. How many
bytes of an all-reduce must cross it, and how much time does it save to send no more than those?

**Predict**, and write it down before you run. Two nodes of two ranks all-reduce S bytes; ranks 0
and 1 share a node, ranks 2 and 3 the other. How many times S crosses the link between the nodes, in
each direction,

1. on a ring that visits the ranks in the order 0, 2, 1, 3?
2. on the ring 0, 1, 2, 3?
3. if each node first adds up what its own ranks have?
4. If the link is slow and all else is fast: how many times as long as the third way does the second
   take, and the first?

**Run.** The lesson is one process, which starts its own ranks on two virtual nodes, on CPU cores,
also where there are GPUs. On two real nodes or more, torchrun starts the ranks, and GPUs are used.

    python 07_hierarchical_collectives.py
    python 07_hierarchical_collectives.py --ranks-per-node 4  # and raise --mbit until a claim fails
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \\
        --rdzv-endpoint=FIRST_NODE:29500 07_hierarchical_collectives.py

Not run on several machines. The virtual nodes need Linux, iproute2, and root or user namespaces.

**Try.** In `hierarchical` leave out the middle line, the ring across: which claims fail? In
`be_launcher` enter `nodes[rank % 2]`: all sums stay right, so what is wrong?

**Before.** communication/03_ring_and_tree.py: the ring.

**Next.** communication/08_gradient_compression.py.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process with threads should not fork
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning that 10.0.0.1 has no name
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# A *rank* is one of several processes that run this file together. `claim(text, predicted,
# measured)` prints one row of the ledger. It, `print0`, `blocked` and `finish` stand in the last
# cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

NODES = 2
L = 2  # ranks in each node: --ranks-per-node
ELEMENTS = 201_600  # float32; 1 to 8 ranks share them evenly
S = 4 * ELEMENTS  # bytes

# %% [markdown]
# ## 1. A flat ring: its order decides how often it crosses the link
#
# A ring all-reduce is a reduce-scatter, then an all-gather: 2(n-1) hops, and in each hop every rank
# sends a chunk of S/n bytes to the next one. So 2(n-1)/n S bytes travel over *each* edge of the
# ring. Which edges cross the slow link between the nodes depends only on the order of the ranks:
#
#      node by node: 0 -> 1 -> 2 -> 3 -> 0         to and fro: 0 -> 2 -> 1 -> 3 -> 0
#
#      node 0      slow      node 1                node 0      slow      node 1
#
#         0  <================  3                     0  ================>  2
#         |                     ^                     1  <================  2
#         v                     |                     1  ================>  3
#         1  ================>  2                     0  <================  3
#
#      one edge in each direction                  L edges in each direction
#
# So the good ring sends 2(n-1)/n S over the link in each direction, and the bad one L times that.


# %%
def pass_on(outgoing: torch.Tensor, like: torch.Tensor, ring: Sequence[int]) -> torch.Tensor:
    """One hop: send a chunk to the next rank of the ring, return what the one before has sent."""
    position = ring.index(RANK)
    received = torch.empty_like(like)
    receive = dist.P2POp(dist.irecv, received, ring[position - 1])
    send = dist.P2POp(dist.isend, outgoing, ring[(position + 1) % len(ring)])
    # The receive comes first: gloo's request for a chunk must not queue behind our own chunk.
    for work in dist.batch_isend_irecv([receive, send]):
        work.wait()
    return received


def reduce_scatter(chunks: Sequence[torch.Tensor], ring: Sequence[int]) -> None:
    """Complete one chunk per rank: chunk i + 1 at position i of the ring."""
    n = len(ring)
    position = ring.index(RANK)
    for hop in range(n - 1):
        own = chunks[(position - hop - 1) % n]
        own += pass_on(chunks[(position - hop) % n], own, ring)


def all_gather(chunks: Sequence[torch.Tensor], ring: Sequence[int]) -> None:
    """Copy every complete chunk to all ranks, where position i begins with chunk i + 1."""
    n = len(ring)
    position = ring.index(RANK)
    for hop in range(n - 1):
        own = chunks[(position - hop) % n]
        own.copy_(pass_on(chunks[(position - hop + 1) % n], own, ring))


def ring_all_reduce(x: torch.Tensor, ring: Sequence[int]) -> None:
    """Replace `x` by its sum over the ranks of the ring."""
    chunks = x.tensor_split(len(ring))
    reduce_scatter(chunks, ring)
    all_gather(chunks, ring)


# %% [markdown]
# ## 2. The hierarchy: reduce-scatter inside, all-reduce across, all-gather inside
#
# Any order of a flat ring treats the slow link like the fast ones. A **hierarchical** all-reduce
# over N nodes of L ranks does not:
#
#                      node 0                 node 1
#                 rank 0    rank 1       rank 2    rank 3
#     start       A0 B0     A1 B1        A2 B2     A3 B3       A and B: the halves of a tensor
#     inside      B01       A01          B23       A23         1. reduce-scatter: S/L per rank
#     across      B0123     A0123        B0123     A0123       2. all-reduce of equal halves
#     inside      A0123 B0123 on all four ranks                3. all-gather
#
# Only the second part crosses the link. It consists of L rings side by side, each of N ranks with
# S/L bytes, so together they send 2(N-1)/N S per node and direction: S for two nodes. Parts 1 and 3
# cost time on the fast links only.


# %%
def hierarchical(x: torch.Tensor) -> None:
    first = RANK // L * L
    inside = range(first, first + L)  # the ranks of my node
    across = range(RANK % L, NODES * L, L)  # the ranks that have my place in the other nodes
    chunks = x.tensor_split(L)
    reduce_scatter(chunks, inside)
    ring_all_reduce(chunks[(RANK + 1) % L], across)  # the chunk that I have completed
    all_gather(chunks, inside)


# %% [markdown]
# ## 3. The same with torch's collectives: a mesh of nodes
#
# A **device mesh** arranges the ranks in rows and columns, and makes a process group of each. With
# these the three parts are three calls. Written this way the hierarchy also runs on NCCL.


# %%
def mesh_of_nodes(device_type: str) -> DeviceMesh:
    """NODES rows, of L ranks each: a row is "inside" a node, a column goes "across" them."""
    return init_device_mesh(device_type, (NODES, L), mesh_dim_names=("across", "inside"))


def hierarchical_in_torch(x: torch.Tensor, mesh: DeviceMesh) -> None:
    own = x.new_empty(len(x) // L)
    dist.reduce_scatter_tensor(own, x, group=mesh.get_group("inside"))
    dist.all_reduce(own, group=mesh.get_group("across"))
    dist.all_gather_into_tensor(x, own, group=mesh.get_group("inside"))


# %% [markdown]
# The five ways to compare, each with its prediction: how many times S it sends over the link, in
# each direction.


# %%
class Way(NamedTuple):
    """One way to all-reduce a tensor in place."""

    run: Callable[[torch.Tensor], None]
    times_S: float  # over the link, in each direction


def ways(mesh: DeviceMesh | None = None) -> dict[str, Way]:
    """All ways by name; the last one needs the mesh to run."""
    n = NODES * L
    node_by_node = range(n)
    to_and_fro = []
    for place in range(L):
        to_and_fro += range(place, n, L)  # one rank of each node, then again one of each
    edge = 2 * (n - 1) / n
    return {
        "ring, to and fro": Way(lambda x: ring_all_reduce(x, to_and_fro), edge * L),
        "ring, node by node": Way(lambda x: ring_all_reduce(x, node_by_node), edge),
        "hierarchy": Way(hierarchical, 2 * (NODES - 1) / NODES),
        "torch's all_reduce": Way(dist.all_reduce, edge),
        "hierarchy in torch": Way(
            lambda x: hierarchical_in_torch(x, mesh), 2 * (NODES - 1) / NODES
        ),
    }


# %% [markdown]
# ## 4. How it is measured: two virtual nodes on one machine
#
# A **network namespace** is a network of its own: interfaces, addresses, ports. A **veth pair** is
# a cable: what goes into one end comes out of the other, here in another namespace. The queueing
# discipline **tbf** (token bucket filter) lets only so many bits per second into each end. To TCP
# this is a network like any other, and what the ranks of one node say to each other takes the
# loopback, not the cable:
#
#     +- node 0 ----------+                      +- node 1 ----------+
#     | rank 0 -- rank 1  | slow ========== slow | rank 2 -- rank 3  |
#     +-- lo -------------+ 10.0.0.1    10.0.0.2 +-- lo -------------+
#
# Making one takes root, or a **user namespace**, in which you are root over what you make there and
# over nothing else. Neither kind gets a name: the kernel removes a namespace, and the cable with
# it, when the last process in it ends.

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


# %% [markdown]
# **Ranks in their nodes.** This process forks a launcher. The launcher makes the nodes, steps into
# one after the other, and forks ranks there, as torchrun does on real nodes. Each process asks the
# kernel to be killed when its parent ends, so nothing is left behind, whichever is killed, by any
# signal. The ranks of a node share its address, that of the interface named by GLOO_SOCKET_IFNAME;
# the kernel knows that what goes to its own address need not leave. Orders and answers take pipes,
# so that nothing but the collective is on the cable while it is watched.


# %%
def die_with(parent: int) -> None:
    """Be killed when `parent` ends (PR_SET_PDEATHSIG), or now if it has ended."""
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def start_ranks(
    count: int, mbit: float, work: Callable[[Connection], None]
) -> tuple[list[Connection], str]:
    """Fork `count` ranks in two nodes, where each calls `work` with a pipe to this process.

    Returns the pipes and "", or no pipes and the reason why there can be no nodes. With `mbit` 0
    there is no cable: the ranks share the loopback of this machine.
    """
    pipes = [Pipe() for _ in range(count)]
    answer, tell = Pipe(duplex=False)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            be_launcher(parent, mbit, [theirs for _, theirs in pipes], tell, work)
        except BaseException:  # of the launcher or of a rank, which must not return into `main`
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    tell.close()
    for _, theirs in pipes:
        theirs.close()  # so that `recv` fails once those who hold the other copies have ended
    why_not = answer.recv()
    if why_not:
        os.wait()
        return [], why_not
    return [ours for ours, _ in pipes], ""


def be_launcher(
    parent: int,
    mbit: float,
    pipes: list[Connection],
    tell: Connection,
    work: Callable[[Connection], None],
) -> NoReturn:
    """Make the nodes and fork their ranks; stay until all have ended, or one of them badly."""
    os.setsid()  # Ctrl-C is for the lesson; when that ends, we do
    die_with(parent)
    try:
        nodes = two_nodes(mbit) if mbit > 0 else []
    except OSError as error:
        tell.send(str(error))
        os._exit(0)
    tell.send("")
    launcher = os.getpid()
    if nodes:
        enter(nodes[0])
    meeting = socket.create_server(("10.0.0.1" if nodes else "127.0.0.1", 0))
    for rank, pipe in enumerate(pipes):
        if nodes:
            enter(nodes[2 * rank // len(pipes)])
        if os.fork() == 0:
            die_with(launcher)
            os.environ["GLOO_SOCKET_IFNAME"] = "slow" if nodes else "lo"
            be_rank(rank, len(pipes), meeting)
            work(pipe)
            os._exit(0)
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        _, status = os.wait()
        if status != 0:
            os._exit(1)  # the ranks that are left are killed with us
    os._exit(0)


# %% [markdown]
# A rank joins the group, then does as it is told. Its tensor holds small integers, whose sums are
# exact in float32 in any order; so the **oracle**, the sum in one process, must be met exactly.


# %%
def be_rank(rank: int, world_size: int, meeting: socket.socket) -> None:
    """Join the group of the ranks in both nodes, by way of a socket that rank 0 serves."""
    global RANK, WORLD_SIZE
    RANK = rank
    WORLD_SIZE = world_size
    host, port = meeting.getsockname()
    server = {}
    if rank == 0:
        server = {"is_master": True, "master_listen_fd": os.dup(meeting.fileno())}
    store = dist.TCPStore(host, port, wait_for_workers=False, **server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def obey(pipe: Connection) -> None:
    """On a rank: all-reduce in the way that the pipe names, until it names none."""
    known = ways(mesh_of_nodes("cpu"))
    name = pipe.recv()
    while name:
        watched(known[name], pipe)
        name = pipe.recv()


def tensors_of_all_ranks(elements: int) -> list[torch.Tensor]:
    return [(torch.arange(elements) * (rank + 1) % 97).float() for rank in range(NODES * L)]


class Seen(NamedTuple):
    """What one all-reduce took."""

    seconds: float
    wrong: int  # elements that differ from the oracle's
    crossed: int  # bytes on this end of the cable, in both directions together


def watched(way: Way, pipe: Connection) -> None:
    """On a rank: one all-reduce, when told to; then say what was seen of it."""
    tensors = tensors_of_all_ranks(ELEMENTS)
    x = tensors[RANK].clone()
    before = bytes_on_the_cable()
    pipe.send("ready")
    pipe.recv()
    start = time.perf_counter()
    way.run(x)
    seconds = time.perf_counter() - start
    pipe.send("done")
    pipe.recv()  # all are done
    time.sleep(0.1)  # the last acknowledgement may be 40 ms late
    pipe.send(Seen(seconds, int((x != sum(tensors)).sum()), bytes_on_the_cable() - before))


# %% [markdown]
# **Bytes are counted where they cross**: the kernel counts for each interface what came in and what
# went out, headers included. A full packet of 1,514 bytes carries 1,448 (IP takes 20, TCP 32,
# Ethernet 14), and is acknowledged by a packet of 66, or by data that goes that way just then. So B
# bytes are seen as 1.0456 B to 1.0912 B, plus a few of gloo's own.


# %%
MSS = 1448
FRAME = 1514
ACK = FRAME - MSS  # a packet without data


def bytes_on_the_cable() -> int:
    """Bytes that have come into this node by the cable, and left: one end sees both ways."""
    with open("/proc/self/net/dev") as file:
        rows = [line.split() for line in file if "slow:" in line]
    # field 1 counts what was received, field 9 what was sent; without a cable there is no row
    return sum(int(row[1]) + int(row[9]) for row in rows)


def observe(ranks: list[Connection], name: str) -> Seen:
    """Have all ranks do it: the slowest rank's seconds, the worst's errors, node 0's bytes."""
    for word in (name, "go", "what have you seen?"):
        for pipe in ranks:
            pipe.send(word)
        answers = [pipe.recv() for pipe in ranks]
    slowest = max(answer.seconds for answer in answers)
    return Seen(slowest, max(answer.wrong for answer in answers), answers[0].crossed)


def check_bytes(name: str, rounds: list[dict[str, Seen]], question: int | None = None) -> None:
    both_ways = 2 * ways()[name].times_S
    least = both_ways * FRAME / MSS
    most = both_ways * (FRAME + ACK) / MSS
    resent = least / 20  # on busy cores TCP now and then believes that a packet was lost
    crossed = min(seen[name].crossed for seen in rounds) / S
    slack = (most - least) / 2 + resent
    text = f"{name}: S over the cable, both ways"
    claim(text, (least + most) / 2, crossed, atol=slack, question=question, varies=True)


# %% [markdown]
# **Time** is predicted from the bytes on the cable in one direction, and its rate. What happens
# inside the nodes is left out, so the hierarchy takes a little longer than predicted. Each way runs
# three times, in turn, and the fastest counts: other jobs can only delay one.


# %%
def predicted_seconds(name: str, mbit: float) -> float:
    return ways()[name].times_S * S * FRAME / MSS * 8 / mbit / 1e6


def check_times(rounds: list[dict[str, Seen]], mbit: float) -> None:
    print0(f"\n  all-reduce of {S / 1e6:g} MB, {mbit:g} Mbit/s between the nodes, in seconds:")
    seconds = {}
    for name in ways():
        seconds[name] = min(seen[name].seconds for seen in rounds)
        print0(f"{'':13}{name:50}    {predicted_seconds(name, mbit):<19.3f} {seconds[name]:>11.3f}")
    for name in ("ring, to and fro", "ring, node by node"):
        ratio = ways()[name].times_S / ways()["hierarchy"].times_S
        found = seconds[name] / seconds["hierarchy"]
        text = f"time: {name} / hierarchy"
        claim(text, ratio, found, atol=0.25 * ratio, question=4, kind="simulated", timed=True)


def check_virtual_nodes(mbit: float) -> None:
    ranks, why_not = start_ranks(NODES * L, mbit, obey)
    repeats = 3
    if why_not:
        ranks, _ = start_ranks(NODES * L, 0, obey)  # no cable: only the sums can be checked
        repeats = 1
    print0(f"2 virtual nodes of {L} ranks on this machine, gloo, torch {torch.__version__}\n")
    print0(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
    rounds = []
    for _ in range(repeats):
        rounds.append({name: observe(ranks, name) for name in ways()})
    for pipe in ranks:
        pipe.send("")
    os.wait()  # for the launcher, which waits for the ranks
    for name in ways():
        claim(f"{name}: elements that are wrong", 0, max(seen[name].wrong for seen in rounds))
    if why_not:
        print0(f"{'':13}{why_not:.80}")
        blocked("bytes over the slow cable, and times", needs="root or user namespaces")
        return
    check_bytes("ring, to and fro", rounds, question=1)
    check_bytes("ring, node by node", rounds, question=2)
    check_bytes("hierarchy", rounds, question=3)
    check_bytes("torch's all_reduce", rounds)
    check_bytes("hierarchy in torch", rounds)
    check_times(rounds, mbit)


# %% [markdown]
# ## 5. On real nodes
#
# Under torchrun on several nodes the same five ways run over the real network, with NCCL if each
# rank has a GPU. The bytes are those that this node's network cards have sent: for gloo, those of
# the interface that GLOO_SOCKET_IFNAME names; for NCCL, those of all InfiniBand ports, whose
# counter counts words of four bytes (AWS's EFA has one of its own, of bytes), or, where there are
# none, of all interfaces that are cards (a bridge or a bond would count its cards' bytes again).
# Where the nodes share an NVLink domain, as in an NVL72 rack, no card sends anything. A tree, or a
# switch that adds up (SHARP), changes what NCCL's own all_reduce sends, so only the hand-written
# ways are claimed. This section has been run over gloo, on two nodes that share a machine, and not
# yet over NCCL.


# %%
def bytes_sent_by_this_node(device: torch.device) -> int:
    """All that the network cards which these ranks use have sent so far."""
    ports = Path("/sys/class/infiniband")
    words = list(ports.glob("*/ports/*/counters/port_xmit_data"))
    efa = list(ports.glob("*/ports/*/hw_counters/tx_bytes"))
    if device.type == "cpu":
        cards = os.environ["GLOO_SOCKET_IFNAME"].split(",")
    elif words:
        return sum(4 * int(port.read_text()) for port in words)
    elif efa:
        return sum(int(port.read_text()) for port in efa)
    else:
        cards = [path.parent.name for path in Path("/sys/class/net").glob("*/device")]
    with open("/proc/self/net/dev") as file:
        rows = [line.replace(":", " ").split() for line in file]
    return sum(int(row[9]) for row in rows if row[0] in cards)


def check_real_nodes(device: torch.device) -> None:
    elements = 64 * ELEMENTS if device.type == "cuda" else ELEMENTS
    tensors = tensors_of_all_ranks(elements)
    expected = sum(tensors).to(device)
    size = 4 * elements
    known = ways(mesh_of_nodes(device.type))
    for name, way in known.items():
        way.run(tensors[RANK].to(device, copy=True))  # the first call makes connections
        x = tensors[RANK].to(device, copy=True)
        seconds, sent = timed_on_real_nodes(lambda way=way, x=x: way.run(x), device)
        claim(f"{name}: elements that are wrong", 0, int((x != expected).sum()))
        print0(f"{'':13}{name}: {seconds * 1e3:.2f} ms, {sent / size:.2f} S sent by a node")
        if "torch" not in name:
            judge_sent(name, way.times_S, sent / size)


def judge_sent(name: str, predicted: float, sent: float) -> None:
    """Claim what this node has sent, in S, unless no rank sees a card that sends."""
    of_all = [sent] * WORLD_SIZE
    dist.all_gather_object(of_all, sent)
    what = f"{name}: S sent by a node"
    if max(of_all) == 0:
        blocked(what, needs="network cards between the nodes, with counters of bytes")
    else:
        claim(what, predicted, sent, atol=0.15 * predicted, varies=True)


def timed_on_real_nodes(work: Callable[[], None], device: torch.device) -> tuple[float, int]:
    """Seconds of the work, and bytes that this node sends meanwhile."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    before = bytes_sent_by_this_node(device)
    dist.barrier()  # nobody sends before all have looked
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds, bytes_sent_by_this_node(device) - before


# %% [markdown]
# ## What you should have seen
#
# 1. 3 S in each direction: the ring sends 1.5 S over each edge, and two edges lead from node 0 to
#    node 1. Ranks are numbered node by node by torchrun and by srun's default. Any numbering that
#    deals them out in turn (srun's `--distribution=cyclic`) makes this ring of an innocent one.
#    (The ledger's figures are both directions together, headers included: 6.4 for 3.)
# 2. 1.5 S. torch's all_reduce on gloo is this ring, in the order of the ranks.
# 3. S. Less is impossible for two nodes: each needs the other's sum, and that has S bytes.
# 4. 1.5 and 3 times, just as the bytes. The time inside the nodes is small, compared with 20
#    Mbit/s. With `--mbit` raised it is not, and the claim fails: the hierarchy saves only what the
#    slow link costs.
#
# **When it pays.** With n = N L ranks, a good ring sends 2(n-1)/n S over each link, the hierarchy
# 2(N-1)/N S. For two nodes of 8 that is 1.88 S against 1 S, but for 64 nodes 2.00 against 1.97: the
# bytes are equal then. What remains is the number of steps, each of which costs a latency: 2(n-1) =
# 1,022 around the ring, and 2(N-1) + 2(L-1) = 140 in the hierarchy.
#
# **Try.** Without the ring across, the nodes never hear of each other: the sums are wrong, and
# nothing is on the cable. With `nodes[rank % 2]`, ranks 0 and 1 are in different nodes. Every sum
# is right, and only the bytes tell: what was inside is now across. On a real cluster, compare the
# counters of your network cards with the prediction before you trust the order of your ranks.
#
# On real systems: one link per node was assumed here. A node of 8 GPUs usually has a network card
# *per GPU*. The bytes per node are those above, and those per card are 1/L of them, if the work is
# spread over all cards. NCCL does that with several rings, each of which leaves the node through
# another card; its trees are chains inside the nodes and a tree across. "Inside" means inside an
# NVLink domain, which is 8 GPUs in most machines and 72 in an NVL72 rack. FSDP's hybrid sharding
# *is* the hierarchy, less its last part: shards inside the node, an all-reduce across.


# %%
def main() -> None:
    global NODES, L
    options = command_line(
        {
            "--ranks-per-node": {"type": int, "default": 2, "help": "1 to 8; default 2"},
            "--mbit": {"type": float, "default": 20.0, "help": "of the slow cable; default 20"},
        }
    )
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if WORLD_SIZE > 1:
        if local_ranks == WORLD_SIZE or WORLD_SIZE % local_ranks != 0:
            ranks = f"got {WORLD_SIZE} ranks, {local_ranks} of them here"
            refuse(f"needs several equal nodes, {ranks}; plain python starts virtual nodes")
        if torch.cuda.device_count() < local_ranks and "GLOO_SOCKET_IFNAME" not in os.environ:
            refuse("needs the network between the nodes, got no GLOO_SOCKET_IFNAME; set it on each")
        NODES = WORLD_SIZE // local_ranks
        L = local_ranks
        check_real_nodes(setup())
    else:
        L = options.ranks_per_node
        if not (1 <= L <= 8 and 1 <= options.mbit <= 1000):
            got = f"got {L} and {options.mbit:g}"
            refuse(f"--ranks-per-node must be 1 to 8, --mbit 1 to 1000, {got}; choose others")
        if "RANK" in os.environ:
            die_with(os.getppid())  # torchrun, if killed, takes us with it
        check_virtual_nodes(options.mbit)
        blocked("the same over real links, on NCCL", needs="2 nodes with GPUs")
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
