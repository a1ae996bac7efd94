"""Passages that several lessons need whole, since a lesson imports no other file of this course.

A function or class of a lesson that bears a name defined here must be identical to what stands
here; a test compares them. Anything else that two lessons share to the letter is a defect.
"""

import contextlib
import copy
import ctypes
import gc
import logging
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from multiprocessing import Pipe, shared_memory
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:  # the lessons import it; that compiles for seconds, and GPT needs none of it
    from ffcv import writer as ffcv_writer
    from ffcv.fields import IntField, RGBImageField, decoders
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor
    from ffcv.writer import DatasetWriter

N = 130
HEIGHT = 160
WIDTH = 240
PAGE = 2**21
SEED = 0
V, D, H, G, K, E, LAYERS = 256, 64, 16, 8, 4, 168, 8
RANK = 0
WORLD_SIZE = 1
# f and g
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks
# The link of a virtual cluster: two nodes on this machine, and ranks in them. A lesson that copies
# it defines these three constants as well.
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000  # for unshare and setns: a network namespace
CLONE_NEWUSER = 0x10000000  # for unshare: a user namespace
# 1F1B
Action = tuple[str, int]  # ("F" or "B", number of the micro-batch)


# The counter: for lessons that need elements, bytes, groups or peers. Where it is enough to count
# collectives, use torch.distributed.tensor.debug.CommDebugMode.
class Call(NamedTuple):
    """One collective, send or receive of this rank, as it was handed to the process group."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "send", ...
    elements: int  # of its input or its output, whichever is larger
    nbytes: int  # of the same
    ranks: tuple[int, ...]  # of the group
    peer: int | None  # of a send or receive: the other rank; None: any


class CountedCommunication(TorchDispatchMode):
    """Records this rank's communication in `log`, beneath torch's dispatcher: DDP's and FSDP's too.

    It sees what is handed to a backend, not what the backend then sends.
    """

    NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
    NAMES += ("send", "recv", "reduce", "gather", "scatter")  # "_allgather_base_" is an all_gather

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        if func.namespace.lstrip("_").startswith("c10d"):
            self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def record(self, func, args: tuple, kwargs: dict) -> None:
        spelled = func._schema.name.replace("_", "")
        names = [name for name in self.NAMES if name.replace("_", "") in spelled]
        if not names:
            return  # it waits for a result or wraps one
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        if "process_group" in given:
            group = dist.ProcessGroup.unbox(given["process_group"])
        else:
            group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        ranks = tuple(dist.get_process_group_ranks(group))
        sizes = [(0, 0)]
        for argument in args:
            tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
            sizes.append((sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)))
        peer = given.get("dst", given.get("src")) if names[0] in ("send", "recv") else None
        peer = None if peer is None or peer < 0 else ranks[peer]
        self.log.append(Call(names[0], *max(sizes), ranks, peer))

    def calls(self, operation: str = "") -> list[Call]:
        """The calls of one operation, in order; of all without a name."""
        return [call for call in self.log if operation in ("", call.operation)]

    def elements(self, operation: str = "") -> int:
        """Elements handed over in all calls of one operation."""
        return sum(call.elements for call in self.calls(operation))


# The GPT
class Block(nn.Module):
    """A pre-norm transformer block: (B, T, D) -> (B, T, D)."""

    def __init__(self, D: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.norm2 = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))

    def attention(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """H heads of K features each; a token sees itself and those before it."""
        qkv_BT3HK = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q_BHTK, k_BHTK, v_BHTK = qkv_BT3HK.permute(2, 0, 3, 1, 4)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A GPT: L blocks, D wide, at most T tokens of context, V different tokens; here bytes."""

    def __init__(self, L: int = 4, D: int = 64, T: int = 64, V: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.position = nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block(D, heads) for _ in range(L))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V) of the token after each of `x_BT`."""
        h_BTD = self.token(x_BT) + self.position.weight[: x_BT.shape[1]]
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return self.head(self.norm(h_BTD))


class CopyToRanks(torch.autograd.Function):
    """f in Shoeybi et al. (2019), section 3: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None  # None: a group has no gradient


class ReduceFromRanks(torch.autograd.Function):
    """g in Shoeybi et al. (2019), section 3: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def all_reduce(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum over the group. `x` stays as it is: a gradient we are handed is not ours."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


# Small helpers
def read_text(path: str | None) -> bytes:
    """Return up to 2 MB of the file at `path`, or of the standard library's sources."""
    if path:
        return Path(path).read_bytes()[:2_000_000]
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    return b"".join(source.read_bytes() for source in sources)[:2_000_000]


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


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


# A .beton file that ranks share
class Images:
    """(pixels, label, index) of each image, the same on every rank.

    The images are crops of the two photographs that scikit-learn ships, half of them upside down;
    the label says which photograph it is, and which way up.
    """

    def __init__(self, count: int, seed: int) -> None:
        from sklearn.datasets import load_sample_images

        self.photographs = load_sample_images().images  # two of 427 x 640 pixels
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        random = np.random.default_rng([self.seed, index])
        label = int(index) % 4
        y = random.integers(427 - 2 * HEIGHT)
        x = random.integers(640 - 2 * WIDTH)
        crop_HWC = self.photographs[label % 2][y:, x:][: 2 * HEIGHT : 2, : 2 * WIDTH : 2]
        if label >= 2:
            crop_HWC = crop_HWC[::-1]
        return np.ascontiguousarray(crop_HWC), label, int(index)


class Nameless(shared_memory.SharedMemory):
    """Shared memory that forked processes inherit, and that no kill leaves behind by its name."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)
        super().unlink()

    def unlink(self) -> None:
        """Nothing: its name went when it came."""


def write_beton(path: Path) -> None:
    """Write N images as raw pixels, with label and index, by FFCV's own writer."""
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit what they need
    ffcv_writer.shared_memory = SimpleNamespace(SharedMemory=Nameless)
    fields = {"image": RGBImageField("raw"), "label": IntField(), "index": IntField()}
    writer = DatasetWriter(str(path), fields, page_size=PAGE, num_workers=1)
    writer.from_indexed_dataset(Images(N, SEED), chunksize=16)
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


def open_beton(path: Path, batch_size: int, order: str = "RANDOM", **options: object) -> "Loader":
    """Return FFCV's loader of whole images, labels and indices, with one thread per rank."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    pipelines = {
        "image": [decoders.SimpleRGBImageDecoder(), ToTensor()],
        "label": [decoders.IntDecoder(), ToTensor()],
        "index": [decoders.IntDecoder(), ToTensor()],
    }
    options = {"seed": SEED, "num_workers": 1, "drop_last": False} | options
    return Loader(str(path), batch_size, order=OrderOption[order], pipelines=pipelines, **options)


# All-reduce algorithms as schedules, and one step of them
class Move(NamedTuple):
    """One message: `source` sends elements [start, stop) of its buffer to `target`."""

    source: int
    target: int
    start: int
    stop: int
    add: bool  # the target adds them to its own elements; if not, it overwrites its own


Schedule = list[list[Move]]  # step by step, the messages of all ranks


def split_span(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into spans whose lengths differ by at most one."""
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


def star_schedule(n: int, N: int, piece: int) -> Schedule:
    """Gather everything at rank 0, then broadcast the sum from there."""
    everyone_sends = [Move(rank, 0, 0, N, add=True) for rank in range(1, n)]
    rank_0_sends = [Move(0, rank, 0, N, add=False) for rank in range(1, n)]
    return [everyone_sends, rank_0_sends]


def around_the_ring(n: int, N: int, offset: int, add: bool) -> Schedule:
    """Each step, send a chunk to the right neighbor: first chunk rank + offset, then those before.

    After n - 1 steps, rank r has received chunk r + offset + 1 last.
    """
    chunks = split_span(0, N, n)
    schedule = []
    for step in range(n - 1):
        moves = []
        for rank in range(n):
            start, stop = chunks[(rank + offset - step) % n]
            moves.append(Move(rank, (rank + 1) % n, start, stop, add))
        schedule.append(moves)
    return schedule


def reduce_scatter_schedule(n: int, N: int, piece: int) -> Schedule:
    """Leave the finished sum of chunk r on rank r."""
    return around_the_ring(n, N, offset=-1, add=True)  # chunk r ends on rank r


def all_gather_schedule(n: int, N: int, piece: int) -> Schedule:
    """Copy chunk r of rank r to all ranks."""
    return around_the_ring(n, N, offset=0, add=False)  # it begins with its own chunk


def ring_schedule(n: int, N: int, piece: int) -> Schedule:
    return reduce_scatter_schedule(n, N, piece) + all_gather_schedule(n, N, piece)


def count_pieces(length: int, piece: int) -> int:
    """Return how many messages of at most `piece` elements it takes to send `length`."""
    return max(1, math.ceil(length / piece))


def up_and_down(parents: list[int], spans: list[tuple[int, int]]) -> Schedule:
    """Sum up the tree to rank 0, then copy down, piece after piece. Needs parents[rank] < rank."""
    depth = [0]
    for rank in range(1, len(parents)):
        depth.append(depth[parents[rank]] + 1)
    deepest = max(depth)
    schedule = [[] for _ in range(2 * deepest + len(spans) - 1)]
    for rank in range(1, len(parents)):
        parent = parents[rank]
        for i, (start, stop) in enumerate(spans):
            step_up = deepest - depth[rank] + i
            step_down = deepest + depth[rank] - 1 + i
            schedule[step_up].append(Move(rank, parent, start, stop, add=True))
            schedule[step_down].append(Move(parent, rank, start, stop, add=False))
    return schedule


def tree_schedule(n: int, N: int, piece: int) -> Schedule:
    """A binary tree: the parent of rank r is (r - 1) // 2."""
    parents = [(rank - 1) // 2 for rank in range(n)]
    return up_and_down(parents, split_span(0, N, count_pieces(N, piece)))


def double_tree_schedule(n: int, N: int, piece: int) -> Schedule:
    """Two binary trees, one with the ranks in reverse order, for half of the elements each."""
    parents = [(rank - 1) // 2 for rank in range(n)]
    first_half, second_half = split_span(0, N, 2)
    count = count_pieces(N - N // 2, piece)
    first_tree = up_and_down(parents, split_span(*first_half, count))
    second_tree = up_and_down(parents, split_span(*second_half, count))
    schedule = []
    for moves, others in zip(first_tree, second_tree, strict=True):
        mirrored = [m._replace(source=n - 1 - m.source, target=n - 1 - m.target) for m in others]
        schedule.append(moves + mirrored)
    return schedule


def reversed_schedule(schedule: Schedule) -> Schedule:
    """The same messages in reverse order and direction; what arrives is copied."""
    back = []
    for moves in reversed(schedule):
        back.append([Move(m.target, m.source, m.start, m.stop, add=False) for m in moves])
    return back


def fold_schedule(n: int, power: int, N: int) -> Schedule:
    """The ranks from `power` on add their elements to those of a partner."""
    moves = [Move(rank, rank - power, 0, N, add=True) for rank in range(power, n)]
    return [moves] if moves else []


def largest_power_of_two(n: int) -> int:
    """Return the largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def recursive_doubling_schedule(n: int, N: int, piece: int) -> Schedule:
    """Exchange everything with the rank at distance 1, 2, 4, ..."""
    power = largest_power_of_two(n)
    folded = fold_schedule(n, power, N)
    schedule = list(folded)
    distance = 1
    while distance < power:
        schedule.append([Move(rank, rank ^ distance, 0, N, add=True) for rank in range(power)])
        distance *= 2
    return schedule + reversed_schedule(folded)


def recursive_halving_doubling_schedule(n: int, N: int, piece: int) -> Schedule:
    """Exchange halves at distance n/2, quarters at n/4, ...; then the same backwards."""
    power = largest_power_of_two(n)
    schedule = fold_schedule(n, power, N)
    spans = [(0, N)] * power  # what each rank still has to finish
    distance = power // 2
    while distance >= 1:
        moves = []
        for rank in range(power):
            peer = rank ^ distance
            lower, upper = split_span(*spans[rank], 2)
            keep, give = (lower, upper) if rank < peer else (upper, lower)
            moves.append(Move(rank, peer, *give, add=True))
            spans[rank] = keep
        schedule.append(moves)
        distance //= 2
    return schedule + reversed_schedule(schedule)


@cache  # training reduces buffers of the same lengths in each iteration
def steps_of_this_rank(algorithm: Callable, N: int, piece: int) -> list[tuple]:
    """Return what this rank receives and what it sends, for each step in which it takes part."""
    steps = []
    for everything in algorithm(WORLD_SIZE, N, piece):
        moves = [move for move in everything if move.start < move.stop]  # not empty
        receives = [move for move in moves if move.target == RANK]
        sends = [move for move in moves if move.source == RANK]
        if receives or sends:
            steps.append((receives, sends))
    return steps


# Kept from call to call, since touching new memory costs page faults: without this, a ring of two
# ranks took 1.2 to 1.5 times as long for 64 MB.
@cache
def kept_memory(number: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory in which the step's message `number` arrives, until it is added."""
    return torch.empty(length, dtype=dtype, device=device)


def exchange_step(
    x_N: torch.Tensor, receives: list[Move], sends: list[Move], combine: Callable = torch.add
) -> None:
    """Send and receive this rank's messages of one step; combine what arrives with its own."""
    places = []
    operations = []
    for number, move in enumerate(receives):
        place = x_N[move.start : move.stop]
        if move.add:
            place = kept_memory(number, len(place), x_N.dtype, x_N.device)
        places.append(place)
        operations.append(dist.P2POp(dist.irecv, place, move.source))
    for move in sends:
        operations.append(dist.P2POp(dist.isend, x_N[move.start : move.stop], move.target))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for move, place in zip(receives, places, strict=True):
        if move.add:
            own = x_N[move.start : move.stop]
            combine(own, place, out=own)


def nvlinks_one_way(device: torch.device) -> float:
    """GB/s that the NVLinks of this rank's GPU, as far as they are up, carry in one direction.

    0 if the driver does not tell, or if a GPU of this node is joined to this one by another way.
    """
    import pynvml

    rate = 0.0
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handles = []
        for gpu in range(torch.cuda.device_count()):
            uuid = str(torch.cuda.get_device_properties(gpu).uuid).removeprefix("GPU-")
            handles.append(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        own = handles.pop(device.index)
        for other in handles:
            if pynvml.nvmlDeviceGetP2PStatus(own, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) != 0:
                return 0.0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):  # ends at the first that it has not
            if pynvml.nvmlDeviceGetNvLinkState(own, link):
                version = pynvml.nvmlDeviceGetNvLinkVersion(own, link)  # 6 is NVLink 4, 7 NVLink 5
                if version == 1:
                    rate += 20
                else:
                    rate += 25 if version < 7 else 50
    return rate


# DeepSpeed
def import_deepspeed(device: torch.device, cpu_adam: bool = False) -> ModuleType | None:
    """Return DeepSpeed, quiet and with nothing left to compile; None if it is not installed."""
    os.environ |= {"DS_ACCELERATOR": device.type, "TORCHDYNAMO_DISABLE": "1"}  # load no compiler
    try:
        import deepspeed
    except ImportError:
        return None
    deepspeed.utils.logger.setLevel(logging.ERROR)
    if device.type == "cpu":  # else it compiles, for minutes, an all-reduce for inference only
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    if cpu_adam:  # the first rank compiles; the others wait at its lock file, in no collective
        os.environ["PATH"] += f":{Path(sys.executable).parent}"  # ninja may lie there only
        deepspeed.ops.op_builder.CPUAdamBuilder().load()
    return deepspeed


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


def bytes_on_the_cable() -> int:
    """Bytes that have come into this node by the cable, and left: one end sees both ways."""
    with open("/proc/self/net/dev") as file:
        rows = [line.split() for line in file if "slow:" in line]
    # field 1 counts what was received, field 9 what was sent; without a cable there is no row
    return sum(int(row[1]) + int(row[9]) for row in rows)


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


def one_f_one_b(stage: int, p: int, m: int) -> list[Action]:
    """1F1B with a flush: the order in which a stage of p works on m micro-batches."""
    num_warmup = min(p - 1 - stage, m)
    order = [("F", k) for k in range(num_warmup)]  # fill the pipeline
    for k in range(m - num_warmup):  # steady state: one forward, one backward
        order.append(("F", num_warmup + k))
        order.append(("B", k))
    for k in range(m - num_warmup, m):  # drain it
        order.append(("B", k))
    return order


def rotate(x_bhTK: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al., 2021): turn the features (i, i + K/2) of token t by t / 10000^(2i / K)."""
    t_T = torch.arange(x_bhTK.shape[-2], dtype=torch.float64)
    i_k = torch.arange(K // 2, dtype=torch.float64)
    angle_Tk = torch.outer(t_T, 10_000 ** (-2 * i_k / K))
    cos_Tk = angle_Tk.cos().to(x_bhTK)
    sin_Tk = angle_Tk.sin().to(x_bhTK)
    a_bhTk, b_bhTk = x_bhTK.chunk(2, dim=-1)
    return torch.cat([a_bhTk * cos_Tk - b_bhTk * sin_Tk, a_bhTk * sin_Tk + b_bhTk * cos_Tk], -1)


class GroupedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, H * K, bias=False)
        self.k = nn.Linear(D, G * K, bias=False)
        self.v = nn.Linear(D, G * K, bias=False)
        self.out = nn.Linear(H * K, D, bias=False)

    def forward(self, x_bTD: torch.Tensor) -> torch.Tensor:
        q_bhTK = rotate(self.q(x_bTD).unflatten(-1, (-1, K)).transpose(1, 2))  # -1: my heads
        k_bgTK = rotate(self.k(x_bTD).unflatten(-1, (-1, K)).transpose(1, 2))
        v_bgTK = self.v(x_bTD).unflatten(-1, (-1, K)).transpose(1, 2)
        how = {"is_causal": True, "enable_gqa": True}
        y_bhTK = F.scaled_dot_product_attention(q_bhTK, k_bgTK, v_bgTK, **how)
        return self.out(y_bhTK.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up = nn.Linear(D, E, bias=False)
        self.down = nn.Linear(E, D, bias=False)

    def forward(self, x_bTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_bTD)) * self.up(x_bTD))


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(D, eps=1e-5)
        self.attention = GroupedAttention()
        self.norm2 = nn.RMSNorm(D, eps=1e-5)
        self.mlp = SwiGLU()

    def forward(self, x_bTD: torch.Tensor) -> torch.Tensor:
        x_bTD = x_bTD + self.attention(self.norm1(x_bTD))
        return x_bTD + self.mlp(self.norm2(x_bTD))


class LlamaModel(nn.Module):
    """Tokens (b, T) -> logits (b, T, V); a stage without one of its ends takes or gives (b, T, D).

    The blocks have names, not places: a stage's are called as they are in the whole model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleDict({str(i): LlamaLayer() for i in range(LAYERS)})
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def stage_of(model: "LlamaModel", s: int, p: int) -> "LlamaModel":
    """Return a copy with the layers of stage s of p, and None in place of ends it has not."""
    stage = copy.deepcopy(model)
    for i in range(LAYERS):
        if i not in range(s * LAYERS // p, (s + 1) * LAYERS // p):
            del stage.blocks[str(i)]
    if s > 0:
        stage.embedding = None
    if s < p - 1:
        stage.norm = stage.head = None
    return stage
