"""Hierarchical collectives: cross the slow link with as little as possible
========================================================================

**Question.** Inside a node, ranks talk over fast links; between nodes, over a slow one. How many
bytes of an all-reduce must cross it, and how much time does it save to send no more than those?

**Predict.** Two nodes of two ranks all-reduce S bytes. How many times S crosses the link between
them, each way, (1) on a ring that visits the ranks in the order 0, 2, 1, 3 (0 and 1 share a node),
(2) on the ring 0, 1, 2, 3, (3) if each node first sums up among its own? How do the times compare?

**Run.** One process, which starts two nodes of two ranks itself (`torchrun` may start it, as one
rank), on CPU cores, on a GPU box too. Linux, iproute2, and root or user namespaces; no trace stays.

    python 06_hierarchical_collectives.py
    python 06_hierarchical_collectives.py --ranks-per-node 4  # and raise --mbit until a claim fails

**You will have seen** (2 cores, gloo, torch 2.15, 12 s; not run on GPUs) that the two rings send 3
S and 1.5 S over the link and the hierarchy S, counted on the interface, that the times go with
them, and that torch's all_reduce on gloo is the ring 0, 1, 2, 3.

**Next.** communication/07_gradient_compression.py sends less.
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process with threads should not fork
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning that 10.0.0.1 has no name
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

WORLD_SIZES = range(1, 2)  # one process, which starts the ranks of both nodes
FLAGS: dict[str, dict] = {
    "--ranks-per-node": {"type": int, "default": 2, "help": "1 to 8; default 2"},
    "--mbit": {"type": float, "default": 20.0, "help": "Mbit/s of the slow link; default 20"},
}
NODES, L = 2, 2  # L ranks in each node
S = 4 * (COUNT := 201_600)  # bytes of float32 numbers to sum: 1 to 8 ranks share them evenly


def main(options: argparse.Namespace) -> None:
    """No `setup()`: this process joins no group. It asks the ranks and makes the claims."""
    global L
    L, mbit = options.ranks_per_node, options.mbit  # ranks are forks, and have them too
    rule = f"--ranks-per-node must be 1 to 8, --mbit 1 to 1000, got {L} and {mbit:g}"
    require(1 <= L <= 8 and 1 <= mbit <= 1000, rule)
    if "RANK" in os.environ:  # torchrun, if killed, takes us with it
        die_with(os.getppid())
    ranks, why_not = start_ranks(mbit)
    if why_not:
        ranks, _ = start_ranks(0)  # on the loopback: sums can be checked, nothing else
    say(f"2 nodes of {L} ranks on this machine, gloo, torch {torch.__version__}\n")
    say(f"{'':10}{'claim':55} {'predicted':20} measured")
    rounds = [{name: observe(ranks, name) for name in ways()} for _ in range(1 if why_not else 3)]
    for pipe in ranks:
        pipe.send("")
    os.wait()  # for the launcher, which waits for the ranks
    for way in ways():
        claim(f"{way}: numbers that are wrong", 0, max(seen[way][1] for seen in rounds))
    if why_not:
        say(f"{'':10}{why_not:.90}")
        blocked("bytes over the slow link, and times", needs="root or user namespaces")
    else:
        bytes_that_cross(rounds)
        times(rounds, mbit)
    blocked("the same between real nodes, NCCL and InfiniBand", needs="GPUs in two nodes")
    finish()


# %% [markdown]
# ## 1. Two nodes on one machine
#
# A *network namespace* is a network of its own: interfaces, addresses, ports. A *veth pair* is a
# cable: what goes into one end comes out of the other, here in another namespace. The queueing
# discipline *tbf* (token bucket filter) lets so many bytes a second into each end. As real to TCP
# as any network; and what ranks of one node say to each other takes the loopback, not the cable.
#
#     ┌─ node 0 ──────────┐                      ┌─ node 1 ──────────┐
#     │ rank 0 ── rank 1  │ slow ═════════ slow  │ rank 2 ── rank 3  │
#     └── lo ─────────────┘ 10.0.0.1  10.0.0.2   └── lo ─────────────┘
#
# To make one takes root, or a *user namespace*, in which you are root over what you make there and
# nothing else. Neither gets a name: the kernel removes a namespace, and the cable with it, when the
# last process in it ends, and each of ours has asked to be killed when its parent dies. So there is
# nothing to clean up, whoever kills whom with whatever signal.

# %%
libc = ctypes.CDLL(None, use_errno=True)
NET, USER = 0x40000000, 0x10000000  # CLONE_NEWNET, CLONE_NEWUSER
MSS, FRAME = 1448, 1514  # of 1500 bytes IP takes 20, TCP 32 (with timestamps); Ethernet adds 14
ACK = FRAME - MSS  # a packet without data


def die_with(parent: int) -> None:
    """Be killed when `parent` ends (PR_SET_PDEATHSIG), or now if it has."""
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def new_network() -> int:
    """Move this process into a new network namespace; return a descriptor of it."""
    me, us = os.geteuid(), os.getegid()  # who shall be root in there
    if libc.unshare(NET):
        if libc.unshare(USER | NET):
            raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")
        for name, row in ("setgroups", "deny"), ("uid_map", f"0 {me} 1"), ("gid_map", f"0 {us} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(row)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def command(line: str, keep: Sequence[int] = ()) -> None:
    done = subprocess.run(line.split(), pass_fds=keep, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{done.stderr.strip()} ({line})")


def two_nodes(mbit: float) -> list[int]:
    """Two network namespaces joined by a slow cable; a descriptor of each."""
    nodes = [new_network() for _ in range(NODES)]  # we are in the second now
    command(f"ip link add name slow type veth peer name slow netns /proc/self/fd/{nodes[0]}", nodes)
    for node, network in enumerate(nodes):
        libc.setns(network, NET)
        command("ip link set lo up")
        command(f"ip address add 10.0.0.{node + 1}/24 dev slow")
        command("ip link set slow addrgenmode none up")  # no IPv6, no chatter
        command("ip link set slow gso_max_segs 1")  # TCP cuts packets itself, as no card does here
        command(f"tc qdisc add dev slow root tbf rate {mbit}mbit burst 16kb latency 100ms")
    return nodes


# %% [markdown]
# ## 2. Ranks in their nodes
#
# This process forks a launcher, which makes the nodes, steps into one after the other and forks
# ranks there; torchrun on two real nodes does the same in seconds. Orders and answers take pipes:
# nothing but the collective is on the cable while it is watched. Both ranks of a node have its
# address, 10.0.0.1 or 10.0.0.2, of the interface that GLOO_SOCKET_IFNAME names; the kernel knows
# that what goes to its own address need not leave.


# %%
def start_ranks(mbit: float) -> tuple[list[Connection], str]:
    """Start the ranks; a pipe to each, or why there can be no nodes. mbit 0: on the loopback."""
    pipes, (said, tell), me = [Pipe() for _ in range(NODES * L)], Pipe(duplex=False), os.getpid()
    if os.fork() == 0:
        try:
            be_launcher(me, mbit, [far for _, far in pipes], tell)
        except BaseException:  # of the launcher or of a rank, which must not get into `main`
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    for far in [tell, *(far for _, far in pipes)]:
        far.close()  # so that `recv` fails when those who hold the other copies are gone
    if why_not := said.recv():
        os.wait()
    return [near for near, _ in pipes], why_not


def be_launcher(parent: int, mbit: float, pipes: list[Connection], tell: Connection) -> NoReturn:
    """Make the nodes and their ranks; stay until all have left, or one of them badly."""
    os.setsid()  # Ctrl-C shall end the first process only; that ends us
    die_with(parent)
    try:
        nodes = two_nodes(mbit) if mbit else [-1, -1]  # no namespace: stay where we are
    except (OSError, AttributeError) as error:  # AttributeError: not Linux
        tell.send(str(error))
        os._exit(1)
    tell.send("")
    libc.setns(nodes[0], NET)
    meeting, me = socket.create_server(("10.0.0.1" if mbit else "127.0.0.1", 0)), os.getpid()
    for rank, pipe in enumerate(pipes):
        libc.setns(nodes[rank // L], NET)
        if os.fork() == 0:
            die_with(me)
            os.environ["GLOO_SOCKET_IFNAME"] = "slow" if mbit else "lo"
            be_rank(rank, meeting, pipe)
    for pipe in pipes:
        pipe.close()
    while pipes and os.wait()[1] == 0:
        pipes.pop()
    os._exit(len(pipes))


def be_rank(rank: int, meeting: socket.socket, pipe: Connection) -> NoReturn:
    """Join the group, then do as I am told."""
    global RANK, mesh
    RANK, (host, port) = rank, meeting.getsockname()
    served = {"is_master": True, "master_listen_fd": os.dup(meeting.fileno())} if rank == 0 else {}
    store = dist.TCPStore(host, port, wait_for_workers=False, **served)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NODES * L)
    mesh = init_device_mesh("cpu", (NODES, L), mesh_dim_names=("across", "inside"))
    while name := pipe.recv():
        pipe.send(all_reduce(name, pipe))
    os._exit(0)


# %% [markdown]
# ## 3. Flat or hierarchical
#
# A ring all-reduce is a reduce-scatter, then an all-gather: 2(n-1) steps, in each of which every
# rank sends a chunk of S/n to the next. So 2(n-1)/n S go over *each* edge of the ring, and over the
# link as often as edges cross it: once each way if the ring goes node by node, L times if it goes
# to and fro. The hierarchy (N nodes of L ranks) has three parts; 2(N-1)/N S cross in the second:
#
# 1. reduce-scatter inside: each rank gets its node's sum of one chunk of S/L;
# 2. all-reduce across: ranks with the same chunk, L rings side by side;
# 3. all-gather inside.

# %%
Ring = Sequence[int]  # ranks; each sends to the next, the last to the first


def pass_on(chunks: Sequence[torch.Tensor], ring: Ring, first: int, steps: int, adds: int) -> None:
    """Send a chunk to the next rank, then `steps` times take one from the rank before and pass it
    on, in pieces. Position i begins with chunk i + first; the first `adds` are added."""
    n, i = len(ring), ring.index(RANK)
    after, before, sent = ring[(i + 1) % n], ring[i - 1], []
    for step in range(steps + 1):
        chunk = chunks[(i + first - step) % n]
        for piece in chunk.tensor_split(min(4, len(chunk) // 12_000) or 1):
            if step > 0:
                dist.recv(came := torch.empty_like(piece), before)
                piece.copy_(piece + came if step <= adds else came)
            if step < steps:
                sent.append(dist.isend(piece, after))  # the next piece may come meanwhile
    for work in sent:
        work.wait()


def ring_all_reduce(x: torch.Tensor, ring: Ring) -> None:
    pass_on(x.tensor_split(len(ring)), ring, first=0, steps=2 * len(ring) - 2, adds=len(ring) - 1)


def hierarchical(x: torch.Tensor) -> None:
    inside, across = range(NODES * L)[RANK // L * L :][:L], range(RANK % L, NODES * L, L)
    chunks = x.tensor_split(L)
    pass_on(chunks, inside, first=0, steps=L - 1, adds=L - 1)  # reduce-scatter: now I have
    ring_all_reduce(chunks[(RANK + 1) % L], across)  # the sum of this chunk over my node, then all
    pass_on(chunks, inside, first=1, steps=L - 1, adds=0)  # all-gather


def hierarchical_in_torch(x: torch.Tensor) -> None:
    mine = x.new_empty(len(x) // L)
    dist.reduce_scatter_tensor(mine, x, group=mesh.get_group("inside"))
    dist.all_reduce(mine, group=mesh.get_group("across"))
    dist.all_gather_into_tensor(x, mine, group=mesh.get_group("inside"))


def ways() -> dict[str, tuple[Callable, float]]:
    """How to all-reduce x, and what multiple of S each way then goes over the link."""
    n, small = NODES * L, 2 * (NODES - 1) / NODES
    edge, to_and_fro = 2 * (n - 1) / n, [rank for k in range(L) for rank in range(k, n, L)]
    return {
        "ring, to and fro": (lambda x: ring_all_reduce(x, to_and_fro), edge * L),
        "ring, node by node": (lambda x: ring_all_reduce(x, range(n)), edge),
        "hierarchy": (hierarchical, small),
        "torch's all_reduce": (dist.all_reduce, edge),
        "hierarchy in torch": (hierarchical_in_torch, small),
    }


# %% [markdown]
# ## 4. Bytes, counted where they cross
#
# The kernel counts for each interface (/proc/net/dev) the bytes that came in and that went out,
# headers included. A full packet of 1514 carries 1448; it is acknowledged by one of 66 or by data
# that is just going that way. So P bytes are seen as 1.0456 P to 1.0912 P, plus gloo's few.


# %%
def counted() -> int:
    """Bytes that have come into this node over the slow link, and left: one end sees both ways."""
    with open("/proc/self/net/dev") as file:
        rows = [line.split() for line in file if "slow:" in line]
    return sum(int(row[1]) + int(row[9]) for row in rows)  # received, sent; no such link: 0


def all_reduce(name: str, pipe: Connection) -> tuple[float, int, int]:
    """On a rank, once all are ready: seconds, numbers unlike one process's, bytes on the link."""
    numbers = [(torch.arange(COUNT) * (rank + 1) % 97).float() for rank in range(NODES * L)]
    due, x, was = sum(numbers), numbers[RANK], counted()  # small integers: their sums are exact
    pipe.send("ready")
    pipe.recv()
    start = time.perf_counter()
    ways()[name][0](x)
    seconds = time.perf_counter() - start
    time.sleep(0.1)  # the last acknowledgement may be 40 ms late
    return seconds, int((x != due).sum()), counted() - was


def observe(ranks: list[Connection], name: str) -> tuple[float, int, int]:
    """Have all ranks do it; seconds of the slowest, errors of the worst, bytes that node 0 saw."""
    for word in (name, "go"):
        for pipe in ranks:
            pipe.send(word)
        answers = [pipe.recv() for pipe in ranks]
    seconds, wrong, crossed = zip(*answers, strict=True)
    return max(seconds), max(wrong), crossed[0]


def bytes_that_cross(rounds: list[dict[str, tuple]]) -> None:
    for name, (_, share) in ways().items():
        least, slack = 2 * share * FRAME / MSS, 2 * share * ACK / MSS / 2
        crossed = min(seen[name][2] for seen in rounds) / S
        resent = least / 20  # on busy cores TCP now and then believes a packet lost
        claim(f"{name}: S over the link, both ways", least + slack, crossed, atol=slack + resent)


# %% [markdown]
# ## 5. Time, and when it pays
#
# Predicted: bytes on the link each way, headers included, / bytes per second. What happens inside
# the nodes is left out; so the hierarchy is a little late.
#
# With n = N L ranks a good ring sends 2(n-1)/n S over each link, the hierarchy 2(N-1)/N S: 1.88 and
# 1 for two nodes of 8, but 2.00 and 1.97 for 64. What remains then is the number of steps, hence of
# latencies: 2(n-1) around the ring, 2(N-1) + 2(L-1) in the hierarchy, here 1022 and 140. NCCL's
# rings go node by node, one for each network card; its trees are chains inside nodes, a tree
# across. FSDP's hybrid sharding *is* the hierarchy, less the last part.


# %%
def times(rounds: list[dict[str, tuple]], mbit: float) -> None:
    due, seconds = {}, {}
    say(f"\n  all_reduce of {S / 1e6:g} MB, {mbit:g} Mbit/s between the nodes: seconds")
    for name, (_, share) in ways().items():
        due[name] = share * S * FRAME / MSS * 8 / mbit / 1e6
        seconds[name] = min(seen[name][0] for seen in rounds)  # other jobs can only delay it
        say(f"{'':10}{name:55}   {due[name]:<18.3f} {seconds[name]:.3f}")
    for name in list(ways())[:2]:
        ratio, measured = (taken[name] / taken["hierarchy"] for taken in (due, seconds))
        claim(f"time, {name} / hierarchy", ratio, measured, rtol=0.25)


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
