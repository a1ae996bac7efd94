"""The communication matrix: who sends how many bytes to whom, and who should share a node
=======================================================================================

**Question.** In one training step, how many bytes does each rank send to each other rank? And which
ranks should therefore share a node, so that few of these bytes have to cross from node to node?

**Predict**, and write it down before you run:

1. Rank 0 sends rank 1 a tensor of 1,000 bytes by gloo. How many bytes do their sockets carry in
   this direction? And how many go back?
2. Four ranks can form 12 ordered pairs (i, j). Between how many of them does data flow if all
   all-reduce a gradient around a ring? In a pipeline of four stages? With expert parallelism?
3. Data parallelism all-reduces the parameters' gradients. FSDP gathers the parameters twice and
   reduce-scatters the gradients. How many times as many bytes is that? And how many times as many
   bytes do gloo's sockets carry?
4. Ranks 0 and 1 split each layer's tensors, and so do ranks 2 and 3; the two pairs are data
   parallel. Two nodes have room for two ranks each. There are three ways to divide the ranks: how
   many times as many bytes as the best one does the worst send from node to node? And if the pairs
   were ranks 0 and 2, and ranks 1 and 3: is torchrun's order still the best?
5. Section 6 shows what NCCL logged on two ranks that should have called the same. At which opCount
   do they differ first? How many differences are there?

**Run.**

    torchrun --standalone --nproc-per-node=4 08_communication_matrix.py  # NCCL on 4 GPUs, else gloo
    python 08_communication_matrix.py                                    # the same, started for you
    python 08_communication_matrix.py --figure matrices.png              # and draw the matrices
    python 08_communication_matrix.py --logs /tmp/nccl.*                 # your job, by its logs

Not run on several GPUs.

**Try.** In `messages_of` let an all-reduce's messages go to the next rank (`1` for `-1`): which
claims fail, and why do others hold? Make PARAMETERS 16 times as large: who should share a node now?

**Before.** communication/03_ring_and_tree.py: how a ring all-reduces. The parallelisms themselves:
parallelism/12_gpt_on_a_mesh.py.

**Next.** data-loading/01_ffcv_distributed_optimization.py: what it takes to feed all these ranks.
"""

import argparse
import ctypes
import itertools
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

ALL = tuple(range(WORLD_SIZE))
LAYERS = 2
MICRO_BATCHES = 4
TOKENS = 128  # of a rank's batch
WIDTH = 256  # of a layer: a token is so many numbers
PARAMETERS = LAYERS * WIDTH**2  # of the whole model
FLOAT = 4  # bytes of a number

# Shapes: M_RR has a row for each rank that sends and a column for each that receives, in bytes.

# %% [markdown]
# ## 1. Messages, and what gloo adds to them
#
# The **communication matrix** of a step has the bytes that rank i sends to rank j in row i and
# column j. It follows from the collectives that the step calls and from the algorithms behind them.
# So it can be predicted, and it should be: if you know the matrix, you know which ranks need the
# fast links.
#
# Everything begins with one **message** of b bytes. In gloo it is three pieces on a TCP connection,
# each with a header of 48 bytes (six numbers of eight bytes; gloo/transport/tcp/pair.h):
#
#     sender     "I have b bytes"              48 bytes   -->
#     receiver   "I am ready for b bytes"      48 bytes   <--
#     sender     the data                  48 + b bytes   -->
#
# The sender waits for the second piece before it sends the third, so that data never arrives where
# there is no room for it.

# %%
HEADER = 48  # bytes before each piece
THERE = 2 * HEADER  # what a message adds in its direction
BACK = HEADER  # and in the other


class Message(NamedTuple):
    """One message from rank to rank."""

    source: int
    target: int
    nbytes: int


def matrix(messages: list[Message], there: int = THERE, back: int = BACK) -> torch.Tensor:
    """Add up messages, with what each adds in its direction and back: bytes, (R, R)."""
    M_RR = torch.zeros(WORLD_SIZE, WORLD_SIZE, dtype=torch.int64)
    for message in messages:
        M_RR[message.source, message.target] += message.nbytes + there
        M_RR[message.target, message.source] += back
    return M_RR


# %% [markdown]
# ## 2. Collectives are messages
#
# A ring all-reduce cuts the tensor into n chunks. Each rank sends n-1 chunks until all are added
# up, and n-1 again until everybody has them all. gloo cuts each chunk in two, so that it can add
# one half while the other one travels, and sends to the rank *before* (gloo/allreduce.cc). Its
# all-gather sends halves, too, and to the rank *after*:
#
#     all-reduce of S bytes      rank i --> rank i-1       4(n-1) messages of S/2n
#     all-gather of shares s     rank i --> rank i+1       2(n-1) messages of s/2
#     all-to-all of chunks c     rank i --> all others      n-1   messages of c
#
# Reduce-scatter is the first half of a ring's all-reduce: n-1 chunks per rank. NCCL does that. gloo
# all-reduces the whole tensor, and throws most of it away.
#
# `nbytes` means what NCCL means with its `count`: of an all-reduce the tensor, of an all-gather or
# a reduce-scatter *one rank's share*, of an all-to-all what one rank sends to one other.


# %%
class Operation(NamedTuple):
    """A collective, or a send, as all its ranks call it.

    `ranks` are in the order of the ring. A send has two: from, to. A broadcast's begin with its
    root, a reduce's end with it.
    """

    name: str  # as NCCL calls it
    nbytes: int
    ranks: tuple[int, ...]


def ring(ranks: tuple[int, ...], step: int, count: int, nbytes: int) -> list[Message]:
    """Return `count` messages from each rank to the one that stands `step` places further."""
    n = len(ranks)
    messages = []
    for place, rank in enumerate(ranks):
        messages += count * [Message(rank, ranks[(place + step) % n], nbytes)]
    return messages


def messages_of(operation: Operation, gloo: bool = True) -> list[Message]:
    """What an operation sends: by gloo's algorithms, or by a ring of NCCL's."""
    name, nbytes, ranks = operation
    n = len(ranks)
    if name == "Send":
        return [Message(*ranks, nbytes)]
    if n == 1 or name == "Recv":
        return []  # who receives sends no data
    if name in ("Broadcast", "Reduce"):
        return [Message(i, j, nbytes) for i, j in itertools.pairwise(ranks)]
    if name == "AlltoAll":
        return [Message(i, j, nbytes) for i, j in itertools.permutations(ranks, 2)]
    if name == "AllGather":
        return ring(ranks, 1, 2 * (n - 1), nbytes // 2)
    if name == "ReduceScatter" and not gloo:
        return ring(ranks, 1, n - 1, nbytes)
    if name not in ("AllReduce", "ReduceScatter"):
        raise ValueError(f"{name} is none of the operations that are known here")
    whole = nbytes * n if name == "ReduceScatter" else nbytes
    return ring(ranks, -1 if gloo else 1, 4 * (n - 1), whole // (2 * n))


def predict(operations: list[Operation], gloo: bool = True) -> torch.Tensor:
    """The matrix of a step that consists of these operations: bytes, (R, R)."""
    messages = []
    for operation in operations:
        messages += messages_of(operation, gloo)
    return matrix(messages) if gloo else matrix(messages, there=0, back=0)


# %% [markdown]
# ## 3. Seven jobs, and what each of them calls
#
# Here are seven jobs, each with two things: a `step`, which really communicates, and the list of
# operations that it should consist of, on all ranks. The first is measured, the second predicted.
# For data parallelism and FSDP the step is PyTorch's own, forward and backward. For the others it
# is the communication alone, since the compute in between does not matter for the matrix.
#
#     data parallel      DistributedDataParallel: the gradients, all-reduced in one bucket
#     FSDP               fully_shard: each layer's parameters gathered forward, and again backward;
#                        its gradients reduce-scattered
#     pipeline           activations to the next stage, their gradients back, per micro-batch
#     expert parallel    per layer two all-to-alls forward (to the experts and home), two backward
#     tensor parallel    in pairs: per layer two all-reduces of activations forward, two backward
#
# All sizes are rounded up such that 2n divides them, so that all chunks and halves of chunks are
# equally large.


# %%
class Job(NamedTuple):
    """One step's communication: run by each rank; and what all ranks call in it."""

    step: Callable[[], None]
    operations: list[Operation]


def rounded_up(elements: int) -> int:
    """The next multiple of 2n."""
    return -(-elements // (2 * WORLD_SIZE)) * 2 * WORLD_SIZE


def build_model(device: torch.device) -> tuple[nn.Sequential, torch.Tensor]:
    """Some linear layers without bias, and a batch for them."""
    width = rounded_up(WIDTH)
    layers = [nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)]
    return nn.Sequential(*layers), torch.ones(TOKENS, width, device=device)


def data_parallel(device: torch.device) -> Job:
    model, x = build_model(device)
    ddp = DistributedDataParallel(model)

    def step() -> None:
        ddp(x).sum().backward()

    elements = sum(p.numel() for p in model.parameters())
    return Job(step, [Operation("AllReduce", FLOAT * elements, ALL)])


def fsdp(device: torch.device) -> Job:
    model, x = build_model(device)
    share = FLOAT * model[0].weight.numel() // WORLD_SIZE  # of a layer, in bytes
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)

    def step() -> None:
        model(x).sum().backward()

    names = ["AllGather", "AllGather", "ReduceScatter"]
    return Job(step, LAYERS * [Operation(name, share, ALL) for name in names])


# %% [markdown]
# A pipeline sends to neighbors only, in the order of GPipe: all micro-batches forward, then all
# backward. With expert parallelism (parallelism/11) each rank holds some experts, and any token may
# want any of them; here each rank's tokens want all ranks' experts alike.


# %%
def pipeline(device: torch.device) -> Job:
    x = torch.ones(rounded_up(TOKENS * WIDTH), device=device)

    def pass_on(stages: list[int]) -> None:
        """Receive from the stage before, if there is one, and send to the stage after."""
        place = stages.index(RANK)
        for _ in range(MICRO_BATCHES):
            if place > 0:
                dist.recv(x, stages[place - 1])
            if place < WORLD_SIZE - 1:
                dist.send(x, stages[place + 1])

    def step() -> None:
        pass_on([*ALL])  # forward
        pass_on([*reversed(ALL)])  # backward

    both_ways = [*itertools.pairwise(ALL), *itertools.pairwise(reversed(ALL))]
    sends = [Operation("Send", FLOAT * len(x), edge) for edge in both_ways]
    return Job(step, MICRO_BATCHES * sends)


def expert_parallel(device: torch.device) -> Job:
    tokens = torch.ones(rounded_up(TOKENS * WIDTH), device=device)
    arrived = torch.empty_like(tokens)

    def step() -> None:
        for _ in range(4 * LAYERS):
            dist.all_to_all_single(arrived, tokens)

    chunk = FLOAT * len(tokens) // WORLD_SIZE
    return Job(step, 4 * LAYERS * [Operation("AlltoAll", chunk, ALL)])


# %% [markdown]
# Tensor parallelism splits each layer over a pair of ranks. Large jobs combine several ways. The
# ranks form a grid: each *row* splits the tensors of all layers, each *column* is data parallel and
# all-reduces the gradient of its half of the model. A list of rows says everything, and decides
# which ranks talk much:
#
#     tensor inside, as usual      rows (0, 1), (2, 3)        columns (0, 2), (1, 3)
#     tensor outside               rows (0, 2), (1, 3)        columns (0, 1), (2, 3)


# %%
def tensor_and_data(device: torch.device, rows: list[tuple], data: bool = True) -> Job:
    """Each row of the grid splits the layers' tensors; with `data`, columns share gradients."""
    x = torch.ones(rounded_up(TOKENS * WIDTH), device=device)
    gradient = torch.ones(rounded_up(PARAMETERS // 2), device=device)
    columns = [*zip(*rows, strict=True)] if data else []
    own_row, _ = dist.new_subgroups_by_enumeration(rows)
    if columns:
        own_column, _ = dist.new_subgroups_by_enumeration(columns)

    def step() -> None:
        for _ in range(4 * LAYERS):
            dist.all_reduce(x, group=own_row)
        if columns:
            dist.all_reduce(gradient, group=own_column)

    operations = [Operation("AllReduce", FLOAT * len(x), row) for row in rows] * 4 * LAYERS
    operations += [Operation("AllReduce", FLOAT * len(gradient), column) for column in columns]
    return Job(step, operations)


def make_jobs(device: torch.device) -> dict[str, Job]:
    """All jobs that so many ranks can run, by name."""
    in_order = [ALL[first : first + 2] for first in range(0, WORLD_SIZE, 2)]
    jobs = {
        "data parallel": data_parallel(device),
        "FSDP": fsdp(device),
        "pipeline": pipeline(device),
        "expert parallel": expert_parallel(device),
        "tensor parallel": tensor_and_data(device, in_order, data=False),
    }
    if WORLD_SIZE >= 4 and WORLD_SIZE % 2 == 0:
        torn = [(rank, rank + WORLD_SIZE // 2) for rank in range(WORLD_SIZE // 2)]
        jobs["TP inside, DP outside"] = tensor_and_data(device, in_order)
        jobs["DP inside, TP outside"] = tensor_and_data(device, torn)
    return jobs


# %% [markdown]
# ## 4. Which ranks share a node?
#
# Let two nodes have room for half of the ranks each. A division says which ranks are on node 0.
# Whatever sits in the matrix between the two sets crosses the network; the rest stays inside. For
# four ranks there are three divisions, so all can be tried. (For many ranks this is the problem of
# minimum bisection, which is NP-hard; then one tries what the parallelism suggests.)


# %%
def divisions(n: int) -> list[tuple[int, ...]]:
    """The ranks of node 0, for each way to divide n ranks among two nodes; in order comes first.

    Which node is called 0 does not matter, so rank 0 is always on it if the halves are equal. Of
    more than 16 ranks there are too many: only in order, and in turn.
    """
    half = (n + 1) // 2
    if n > 16:
        return [tuple(range(half)), tuple(range(0, n, 2))]
    sets = itertools.combinations(range(n), half)
    return [node for node in sets if n % 2 == 1 or 0 in node]


def between_nodes(M_RR: torch.Tensor, node: tuple[int, ...]) -> int:
    """The bytes that ranks of this node send to others, and others to them."""
    here_R = torch.zeros(len(M_RR), dtype=torch.bool)
    here_R[list(node)] = True
    return M_RR[here_R[:, None] != here_R[None, :]].sum().item()


def best_division(M_RR: torch.Tensor) -> tuple[int, ...]:
    """The division with the fewest bytes between the nodes; the first of several."""
    return min(divisions(len(M_RR)), key=lambda node: between_nodes(M_RR, node))


# %% [markdown]
# ## 5. How it is measured: the kernel knows every connection
#
# gloo has one TCP connection per pair of ranks and group. For each of its sockets the kernel counts
# what it has sent and what has arrived, and tells it on demand (`TCP_INFO`, Linux 4.19). A process
# finds its own sockets in /proc/self/fd. A connection is known by its two addresses, so ranks that
# exchange these know who is at the other end.
#
# We count what *arrives*: there nothing is counted twice, even if TCP had to send it twice. When a
# rank's operation is done, all that its peers sent it by then has arrived, since it waited for it.
# Nobody may send anything between the readings of the first and of the last rank, though, and a
# barrier would be traffic of its own. So the ranks meet in the **store**, the server by which they
# found each other; its connections are left out, which its port tells.

# %%
Connection = tuple[tuple[str, int], tuple[str, int]]  # (our address, the peer's)
meetings = itertools.count()


def meet(word: str = "") -> list[str]:
    """Wait until all ranks are here, by way of the store; return what each of them said."""
    store = dist.distributed_c10d._get_default_store()
    meeting = next(meetings)
    store.set(f"meeting {meeting}, {RANK}", word)
    words = store.multi_get([f"meeting {meeting}, {rank}" for rank in range(WORLD_SIZE)])
    return [word.decode() for word in words]


def counters() -> dict[Connection, tuple[int, int]]:
    """Bytes that this process's TCP connections have received, and sent (repeats apart)."""
    found = {}
    for path in Path("/proc/self/fd").glob("*"):
        try:
            if not os.readlink(path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                ends = (copy.getsockname()[:2], copy.getpeername()[:2])
        except OSError:
            continue  # closed by now, not TCP, or it listens
        # tcpi_bytes_received, tcpi_bytes_sent and tcpi_bytes_retrans of linux/tcp.h
        received, sent, repeated = (
            int.from_bytes(info[at : at + 8], sys.byteorder) for at in (128, 200, 208)
        )
        found[ends] = (received, sent - repeated)
    return found


def can_count() -> bool:
    """Whether all ranks' kernels tell: each has talked with the store by now."""
    counted = any(received > 0 and sent > 0 for received, sent in counters().values())
    return set(meet(str(counted))) == {"True"}


def measure(step: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a step; return its matrix by what arrived, and by what was sent: bytes, (R, R)."""
    for _ in range(2):  # the first steps open connections, and DDP makes its buckets anew
        step()
    meet()
    before = counters()
    meet()
    step()
    meet()
    after = counters()
    meet()
    counted = []
    for ends, (arrived, sent) in after.items():
        arrived_before, sent_before = before.get(ends, (0, 0))
        counted.append([ends, arrived - arrived_before, sent - sent_before])
    return assemble([json.loads(word) for word in meet(json.dumps(counted))])


def assemble(told: list[list]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put together what each rank counted: [((our address, the peer's), arrived, sent), ...]."""
    owner = {}
    for rank, counted in enumerate(told):
        for (here, there), _, _ in counted:
            if int(os.environ["MASTER_PORT"]) not in (here[1], there[1]):  # not the store's
                owner[*here, *there] = rank
    arrived_RR, sent_RR = torch.zeros(2, WORLD_SIZE, WORLD_SIZE, dtype=torch.int64)
    for rank, counted in enumerate(told):
        for (here, there), arrived, sent in counted:
            peer = owner.get((*there, *here))
            if peer is not None:
                arrived_RR[peer, rank] += arrived
                sent_RR[rank, peer] += sent
    return arrived_RR, sent_RR


# %% [markdown]
# ## 6. The same for NCCL, from its own log
#
# NCCL's data goes over NVLink or InfiniBand, past the kernel, and no socket counts it. But NCCL
# tells what it is asked for. These variables have to be set before the job starts:
#
#     NCCL_DEBUG=INFO  NCCL_DEBUG_SUBSYS=INIT,COLL  NCCL_DEBUG_FILE=/tmp/nccl.%h.%p
#
# Then each rank's file has a line per call (NCCL's src/enqueue.cc). A line is written when the host
# asks, before anything is sent. So a rank's last line says what it asked for last; its GPU may hang
# in an earlier one.
#
#     AllReduce: opCount 1f ... count 262144 datatype 7 op 0 root 0 comm 0x55d0 [nranks=2] ...
#
# - `opCount` counts what this communicator was asked for before, in hexadecimal;
# - `count` is the number of elements: of the tensor, or of one rank's share, as in section 2;
# - `datatype` is an enum: 0 is int8, 7 float32, 9 bfloat16;
# - `root` is the root of a broadcast or reduce, and of a Send or Recv the *peer*;
# - `comm` is an address in this process's memory: another one on each rank. Which rank of which
#   communicator it is stands in the line that ends with "Init COMPLETE".

# %%
WIDTHS = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]  # bytes per element of ncclInt8, ..., ncclFloat8e5m2
CALLED = re.compile(
    r"NCCL INFO (\w+): opCount (\w+) .* count (\d+) datatype (\d+) op \d+ root (\d+) comm (0x\w+)"
)
BORN = re.compile(r"comm (0x\w+) rank (\d+) nranks (\d+) (.*) - Init COMPLETE")


class Logged(NamedTuple):
    """One call, as one rank's NCCL logged it."""

    name: str  # "AllReduce", "Send", ...
    op_count: int
    count: int  # elements
    datatype: int
    root: int
    communicator: str  # the same for all its ranks

    @property
    def same_on_all(self) -> tuple:
        """What all ranks of the communicator should have asked for."""
        return (self.name, self.count, self.datatype, self.root)


class Log(NamedTuple):
    """What one rank's NCCL logged: its calls in order, and its rank in each communicator."""

    calls: list[Logged]
    places: dict[str, int]
    sizes: dict[str, int]  # of the communicators, in ranks


def parse(text: str) -> Log:
    """Read a rank's log. Of a communicator that was split off, the name comes from its parent."""
    names = {}  # of communicators, by their addresses here
    log = Log([], {}, {})
    for line in text.splitlines():
        if born := BORN.search(line):
            address, place, size, about = born.groups()
            names[address] = name_of(about, names)
            log.places[names[address]] = int(place)
            log.sizes[names[address]] = int(size)
        elif called := CALLED.search(line):
            name, op_count, *numbers, address = called.groups()
            log.calls.append(
                Logged(name, int(op_count, 16), *map(int, numbers), names.get(address, address))
            )
    return log


def name_of(about: str, names: dict[str, str]) -> str:
    """A communicator's name on all its ranks: its commId; or its parent's name, and which child."""
    found = re.search(r"commId (0x\w+)", about)
    if found:
        return found[1]
    address, child = re.search(r"parent (0x\w+) (.*color \S+)", about).groups()
    return f"{names.get(address, address)} {child}"


# %% [markdown]
# The log tells what was *called*: name, count, type, group. That is compared with what the job
# should call, and it is all that is claimed on GPUs. The bytes are not in the log. A matrix follows
# from it only by assuming an algorithm, here a ring in the order of the ranks: that is theory, and
# is printed as such. NCCL orders its rings by the machine's topology, and may choose a tree, or, in
# one node with NVSwitch, let the switch add (NVLS), where no rank sends to another at all;
# `NCCL_DEBUG_SUBSYS=TUNING` tells. Only sends and all-to-alls go where they say.


# %%
def members_of(logs: list[Log]) -> dict[str, dict[int, int]]:
    """Who is in each communicator: {communicator: {rank in it: rank in the job}}."""
    members = {}
    for rank, log in enumerate(logs):
        for communicator, place in log.places.items():
            members.setdefault(communicator, {})[place] = rank
    return members


def asked(operations: list[Operation], rank: int) -> Counter:
    """What one rank asks for: {operation: how often}. Torch makes an all-to-all of sends."""
    found = Counter()
    for operation in operations:
        name, nbytes, ranks = operation
        if name == "AlltoAll" and rank in ranks:
            found.update(Operation("Send", nbytes, (rank, to)) for to in ranks if to != rank)
        elif name == "Send":
            found[operation] += ranks[0] == rank != ranks[1]  # what goes to oneself is a copy
        elif name not in ("AlltoAll", "Recv"):
            found[operation] += rank in ranks
    return +found


def logged_matrix(logs: list[Log]) -> torch.Tensor:
    """The matrix of the calls in all ranks' logs, by rings: bytes, (R, R). An assumption."""
    members = members_of(logs)
    M_RR = torch.zeros(len(logs), len(logs), dtype=torch.int64)
    for rank, log in enumerate(logs):
        operations = Counter(
            operation_of(call, rank, members[call.communicator]) for call in log.calls
        )
        for operation, times in operations.items():
            for message in messages_of(operation, gloo=False):
                if message.source == rank != message.target:
                    M_RR[rank, message.target] += times * message.nbytes
    return M_RR


def operation_of(call: Logged, rank: int, inside: dict[int, int]) -> Operation:
    """What a rank's call is part of, among the ranks of the job that are in the communicator."""
    ranks = [inside[place] for place in sorted(inside)]
    if call.name == "Send":
        ranks = [rank, inside[call.root]]
    elif call.name == "Broadcast":
        ranks = ranks[call.root :] + ranks[: call.root]
    elif call.name == "Reduce":
        ranks = ranks[call.root + 1 :] + ranks[: call.root + 1]
    return Operation(call.name, call.count * WIDTHS[call.datatype], tuple(ranks))


# %% [markdown]
# And the logs tell whether all ranks called the same. NCCL does not check that, unless asked to: it
# pairs the k-th call of one rank with the k-th of the other, and if sizes or types differ, the
# result is a hang or garbage. So go through both lists. Where they differ, either both ranks
# called, but not the same, or only one of them did. Take for true what lets the lists agree for
# longest afterwards.

# %%
SKIPS = [(1, 1), (1, 0), (0, 1)]  # calls that are left out of the two lists: both differ, or one


def differences(a: list[Logged], b: list[Logged]) -> list[tuple[list[Logged], list[Logged]]]:
    """Where two ranks' calls differ: [(the one's call, the other's call), ...]; [] for none."""
    found = []
    while a or b:
        same = agreeing(a, b)
        a = a[same:]
        b = b[same:]
        if a or b:
            then = {(one, other): agreeing(a[one:], b[other:]) for one, other in SKIPS}
            one, other = max(then, key=then.get)
            found.append((a[:one], b[:other]))
            a = a[one:]
            b = b[other:]
    return found


def agreeing(a: list[Logged], b: list[Logged]) -> int:
    """How many calls both lists begin with."""
    same = 0
    while same < min(len(a), len(b)) and a[same].same_on_all == b[same].same_on_all:
        same += 1
    return same


def collectives(log: Log, communicator: str) -> list[Logged]:
    """The calls that all ranks of a communicator make. Sends and receives belong to pairs."""
    own = [call for call in log.calls if call.communicator == communicator]
    return [call for call in own if call.name not in ("Send", "Recv")]


def in_words(calls: list[Logged]) -> str:
    return "".join(f"{call.name} of {call.count}, type {call.datatype}" for call in calls)


# %% [markdown]
# `--logs FILE ...` reads the logs of a job of yours, one per rank: it prints the matrix of all that
# they tell, the best places of its ranks, and in each communicator the first calls in which a rank
# differs from the communicator's first one. To know only who differs first, a file to copy alone is
# enough: `python launch/diagnose.py --nccl-logs /tmp/nccl.*`. Of the sample below it says "ranks 0,
# 1 wait for each other, and no majority says who is wrong", and names the lines; of three ranks or
# more, it names the one that differs.


# %%
def read_logs(files: list[str]) -> None:
    logs = [parse(Path(file).read_text(errors="replace")) for file in files]
    sizes = {}
    called = set()
    for log in logs:
        sizes |= log.sizes
        called |= {call.communicator for call in log.calls}
    if not sizes or not called <= set(sizes):
        refuse("calls, or their communicators' births, are missing: NCCL_DEBUG_SUBSYS=INIT,COLL")
    world = max(sizes, key=sizes.get)
    logs.sort(key=lambda log: log.places.get(world, len(logs)))
    for name, inside in members_of(logs).items():
        if len(inside) < sizes[name]:
            refuse(f"communicator {name} has {sizes[name]} ranks, got logs of {len(inside)}")
    M_RR = logged_matrix(logs)
    print("kB that the rank of the row sends to the rank of the column, by rings")
    for row in M_RR.tolist():
        print("".join(f"{nbytes / 1e3:10.0f}" for nbytes in row))
    best = best_division(M_RR)
    in_order = divisions(len(logs))[0]
    for places, node in {"ranks in order": in_order, "at best": best}.items():
        kB = between_nodes(M_RR, node) / 1e3
        ranks = ", ".join(map(str, node))
        print(f"{kB:.0f} kB between two nodes, {places}: {ranks} on one of them")
    for name, inside in members_of(logs).items():
        calls = [collectives(logs[inside[place]], name) for place in sorted(inside)]
        found = [differences(calls[0], others) for others in calls]
        print(f"communicator {name}: {sum(map(bool, found))} of {len(found)} ranks differ")
        for place, differs in enumerate(found):
            print_differences(differs[:3], inside[0], inside[place])


def print_differences(found: list[tuple], rank: int, other: int) -> None:
    for a, b in found:
        said = f"rank {rank} {in_words(a) or 'nothing'}; rank {other} {in_words(b) or 'nothing'}"
        print0(f"{'':13}opCount {[*a, *b][0].op_count:x}: {said}")


# %% [markdown]
# Here are two ranks' logs to practise on: a sample in NCCL's format, not of a real run. Both should
# broadcast the parameters and train two steps, each with two buckets of gradients and the loss.
# Addresses are shortened.

# %%
SAMPLE = [
    """
node0:4120:4177 [0] NCCL INFO ncclCommInitRankConfig comm 0x55d0c1a0 rank 0 \
nranks 2 cudaDev 0 nvmlDev 0 busId 1b000 commId 0x6e99db63b024eb76 - Init COMPLETE
node0:4120:4177 [0] NCCL INFO Broadcast: opCount 7 sendbuff 0x7f2a000000 recvbuff 0x7f2a000000 \
count 400000 datatype 7 op 0 root 0 comm 0x55d0c1a0 [nranks=2] stream 0x55d0
node0:4120:4177 [0] NCCL INFO AllReduce: opCount 8 sendbuff 0x7f2b000000 recvbuff 0x7f2b000000 \
count 262144 datatype 7 op 0 root 0 comm 0x55d0c1a0 [nranks=2] stream 0x55d0
node0:4120:4177 [0] NCCL INFO AllReduce: opCount 9 sendbuff 0x7f2c000000 recvbuff 0x7f2c000000 \
count 131072 datatype 7 op 0 root 0 comm 0x55d0c1a0 [nranks=2] stream 0x55d0
node0:4120:4177 [0] NCCL INFO AllReduce: opCount a sendbuff 0x7f2d000000 recvbuff 0x7f2d000000 \
count 1 datatype 7 op 0 root 0 comm 0x55d0c1a0 [nranks=2] stream 0x55d0
node0:4120:4177 [0] NCCL INFO AllReduce: opCount b sendbuff 0x7f2b000000 recvbuff 0x7f2b000000 \
count 262144 datatype 7 op 0 root 0 comm 0x55d0c1a0 [nranks=2] stream 0x55d0
node0:4120:4177 [0] NCCL INFO AllReduce: opCount c sendbuff 0x7f2c000000 recvbuff 0x7f2c000000 \
count 131072 datatype 7 op 0 root 0 comm 0x55d0c1a0 [nranks=2] stream 0x55d0
node0:4120:4177 [0] NCCL INFO AllReduce: opCount d sendbuff 0x7f2d000000 recvbuff 0x7f2d000000 \
count 1 datatype 7 op 0 root 0 comm 0x55d0c1a0 [nranks=2] stream 0x55d0
""",
    """
node0:4121:4179 [1] NCCL INFO ncclCommInitRankConfig comm 0x5608f3b0 rank 1 \
nranks 2 cudaDev 1 nvmlDev 1 busId 43000 commId 0x6e99db63b024eb76 - Init COMPLETE
node0:4121:4179 [1] NCCL INFO Broadcast: opCount 7 sendbuff 0x7f2a000000 recvbuff 0x7f2a000000 \
count 400000 datatype 7 op 0 root 0 comm 0x5608f3b0 [nranks=2] stream 0x55d0
node0:4121:4179 [1] NCCL INFO AllReduce: opCount 8 sendbuff 0x7f2b000000 recvbuff 0x7f2b000000 \
count 262144 datatype 7 op 0 root 0 comm 0x5608f3b0 [nranks=2] stream 0x55d0
node0:4121:4179 [1] NCCL INFO AllReduce: opCount 9 sendbuff 0x7f2c000000 recvbuff 0x7f2c000000 \
count 131072 datatype 7 op 0 root 0 comm 0x5608f3b0 [nranks=2] stream 0x55d0
node0:4121:4179 [1] NCCL INFO AllReduce: opCount a sendbuff 0x7f2b000000 recvbuff 0x7f2b000000 \
count 262144 datatype 7 op 0 root 0 comm 0x5608f3b0 [nranks=2] stream 0x55d0
node0:4121:4179 [1] NCCL INFO AllReduce: opCount b sendbuff 0x7f2c000000 recvbuff 0x7f2c000000 \
count 131072 datatype 9 op 0 root 0 comm 0x5608f3b0 [nranks=2] stream 0x55d0
node0:4121:4179 [1] NCCL INFO AllReduce: opCount c sendbuff 0x7f2d000000 recvbuff 0x7f2d000000 \
count 1 datatype 7 op 0 root 0 comm 0x5608f3b0 [nranks=2] stream 0x55d0
""",
]


# %% [markdown]
# ## 7. What is claimed
#
# The first rows are about one message, the others about whole matrices. A matrix is as predicted
# only if each of its entries is, to the byte.


# %%
def check_message() -> None:
    """Send 1,000 bytes from rank 0 to rank 1, and see what the kernel counts."""
    x = torch.ones(1000 // FLOAT)

    def step() -> None:
        if RANK == 0:
            dist.send(x, 1)
        elif RANK == 1:
            dist.recv(x, 0)

    M_RR, _ = measure(step)
    claim("1,000 bytes, rank 0 to 1: bytes there", 1000 + 2 * HEADER, M_RR[0, 1], question=1)
    claim("1,000 bytes, rank 0 to 1: bytes back", HEADER, M_RR[1, 0], question=1)


def check_by_sockets(jobs: dict[str, Job]) -> dict[str, torch.Tensor]:
    """Measure each job's matrix by the kernel's counters; check that both ends agree."""
    found = {}
    agree = 0
    for name, job in jobs.items():
        found[name], sent_RR = measure(job.step)
        agree += found[name].equal(sent_RR)
    claim("jobs of which all that was sent arrived, once", len(jobs), agree)
    return found


def check_by_log(jobs: dict[str, Job], file: Path) -> dict[str, torch.Tensor]:
    """Compare what NCCL logged during a step with what should be called; return ring matrices."""
    assumed = {}
    for name, job in jobs.items():
        for _ in range(2):
            job.step()
        torch.cuda.synchronize()
        before = len(parse(file.read_text()).calls)
        job.step()
        torch.cuda.synchronize()
        log = parse(file.read_text())
        logs = gather_objects(log._replace(calls=log.calls[before:]))
        members = members_of(logs)
        own = [operation_of(call, RANK, members[call.communicator]) for call in logs[RANK].calls]
        due = asked(job.operations, RANK)
        logged = asked(own, RANK)
        unlike = (due - logged).total() + (logged - due).total()
        print0(f"{'':13}{name}: rank 0 should make {due.total()} calls, made {logged.total()}")
        claim(f"{name}: calls unlike those predicted", 0, unlike)
        assumed[name] = logged_matrix(logs)
    return assumed


# %% [markdown]
# Next, the matrices are printed and compared with what was predicted; then, the divisions are.


# %%
def print_matrices(found: dict[str, torch.Tensor], device: torch.device) -> None:
    """Print the matrices side by side, in kB: a row sends to the columns."""
    width = max(28, 6 * WORLD_SIZE + 4)
    names = list(found)
    print0(f"\n{'':5}kB that the rank of the row sends to the rank of the column")
    if device.type == "cuda":
        print0(f"{'':5}by theory: NCCL's calls, if each were a ring in the order of the ranks")
    while names and width < 100:
        row = names[: 95 // width]
        names = names[len(row) :]
        print0(f"\n{'':5}" + "".join(f"{name:{width}}" for name in row))
        for rank in ALL:
            cells = []
            for name in row:
                kB = "".join(f"{nbytes / 1e3:6.0f}" for nbytes in found[name][rank])
                cells.append(f"{kB:{width}}")
            print0(f"{'':5}" + "".join(cells))
    print0()


def check_matrices(found: dict[str, torch.Tensor], jobs: dict[str, Job]) -> None:
    """Compare each entry; count the pairs between which data flows; weigh FSDP."""
    for name, M_RR in found.items():
        right = (predict(jobs[name].operations) == M_RR).sum()
        claim(f"{name}: entries as predicted", WORLD_SIZE**2, right)
    pairs = {
        "data parallel": WORLD_SIZE,
        "pipeline": 2 * (WORLD_SIZE - 1),
        "expert parallel": WORLD_SIZE * (WORLD_SIZE - 1),
    }
    for name, due in pairs.items():
        flows = (found[name] / found[name].max() > 0.1).sum()  # an answer of 48 bytes is no data
        claim(f"{name}: pairs between which data flows", due, flows, question=2)
    fsdp, plain = (found[name].sum() for name in ("FSDP", "data parallel"))
    text = "FSDP: bytes / those of data parallel"  # up to headers: FSDP has more messages
    claim(text, 2, fsdp / plain, atol=0.1, question=3)


# %% [markdown]
# For the divisions only matrices are needed. Placing the ranks "in turn" means 0, 2, 4 ... on one
# node, as some schedulers do.


# %%
def print_placements(found: dict[str, torch.Tensor]) -> None:
    """Print the bytes between two nodes, for ranks in order, in turn, and at best."""
    in_turn = tuple(range(0, WORLD_SIZE, 2))
    print0(f"\n{'':5}{'kB between two nodes':30}in order   in turn    fewest  on one node")
    for name, M_RR in found.items():
        best = best_division(M_RR)
        counts = [between_nodes(M_RR, node) for node in (divisions(WORLD_SIZE)[0], in_turn, best)]
        cells = "".join(f"{count / 1e3:10.0f}" for count in counts)
        print0(f"{'':5}{name:28}{cells}  {', '.join(map(str, best))}")
    print0()


def check_placements(found: dict[str, torch.Tensor]) -> None:
    """Compare the bytes between two nodes, for all ways to divide the ranks."""
    in_order = divisions(WORLD_SIZE)[0]
    due = len(found) - ("DP inside, TP outside" in found)  # each sends to its neighbors but this
    best = [best_division(M_RR) for M_RR in found.values()].count(in_order)
    claim("jobs for which no places are better than in order", due, best)
    if WORLD_SIZE in (4, 8, 12, 16):
        check_pairs(found)
    else:
        blocked("what it costs to tear pairs apart", needs="4 ranks")


def check_pairs(found: dict[str, torch.Tensor]) -> None:
    """Weigh good places against bad ones; m ranks share a gradient. Headers make 1%, at most.

    An all-reduce of x by two ranks sends 2x in both directions together, and each of the n/2 pairs
    does eight of them: 8n x. The gradient is twice as large as x, so in its ring each edge carries
    4(m-1)/m x, and two of m edges cross if the ring is divided once; in turn, all do.
    """
    m = WORLD_SIZE // 2
    pairs = 8 * WORLD_SIZE  # bytes that cross / bytes of x, if all pairs are torn apart
    rings = 2 * 2 * 4 * (m - 1) / m  # of both rings, each divided once
    shares = against_best(found["data parallel"])
    claim("data parallel, one ring: worst / best", WORLD_SIZE / 2, max(shares))
    due = (pairs + rings * m / 2) / rings
    shares = against_best(found["TP inside, DP outside"])
    slack = 0.01 * due
    claim("TP inside: worst / best", due, max(shares), atol=slack, question=4)
    due = pairs / rings
    shares = against_best(found["DP inside, TP outside"])
    slack = 0.01 * due
    claim("TP outside: in order / best", due, shares[0], atol=slack, question=4)


def against_best(M_RR: torch.Tensor) -> list[float]:
    """For each division its bytes between nodes / those of the best; NaN if nothing crosses."""
    counts = [between_nodes(M_RR, node) for node in divisions(WORLD_SIZE)]
    return [count / min(counts) if min(counts) > 0 else math.nan for count in counts]


# %% [markdown]
# The bytes of the sample can be added up by hand: a broadcast from rank 0, and some all-reduces, of
# which two ranks send each other S bytes each.


# %%
def check_sample() -> None:
    """Read the two logs of section 6."""
    logs = [parse(text) for text in SAMPLE]
    M_RR = logged_matrix(logs)
    step = 262_144 + 131_072 + 1  # numbers that are all-reduced
    due = FLOAT * (400_000 + 2 * step)
    claim("sample: bytes that rank 0 sends", due, M_RR[0, 1], kind="theory")
    due = FLOAT * (2 * step - 1 - 131_072 / 2)
    claim("sample: bytes that rank 1 sends", due, M_RR[1, 0], kind="theory")
    (communicator,) = logs[0].places
    found = differences(*(collectives(log, communicator) for log in logs))
    print_differences(found, 0, 1)
    at = [*found[0][0], *found[0][1]][0].op_count
    claim("sample: opCount of the first difference", 0xA, at, question=5, kind="theory")
    claim("sample: differences", 2, len(found), question=5, kind="theory")


# %% [markdown]
# `--figure` draws the matrices. With the ranks in order, the two frames are the two nodes, and what
# lies outside of them has to cross. The bars say how much that is, and what the best places cost.


# %%
def draw(found: dict[str, torch.Tensor], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure((15, 7.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[3, 1])
    cells = [*left.subplots(2, 4).flat]
    largest = max(M_RR.max().item() for M_RR in found.values())
    for axes, (name, M_RR) in zip(cells, found.items(), strict=False):
        axes.imshow(M_RR, cmap="GnBu", vmin=0, vmax=largest)
        write_cells(axes, M_RR, largest)
        frame_nodes(axes)
        axes.set_title(name, fontweight="bold")
    for axes in cells[len(found) :]:
        axes.set_axis_off()
    legend = "Read: the rank of the row\nsends so many kB to the\nrank of the column.\n\n"
    legend += "Red frames: two nodes,\nranks in order. What lies\noutside has to cross."
    cells[-1].text(0.05, 0.5, legend, va="center", fontsize=12)
    left.suptitle("kB that each rank sends to each other in one step")
    right.suptitle("kB between two nodes")
    draw_bars(right.subplots(), found)
    figure.savefig(path, dpi=110)


def write_cells(axes: object, M_RR: torch.Tensor, largest: float) -> None:
    """Write each entry into its cell, in kB."""
    axes.set(xticks=ALL, yticks=ALL, xlabel="to rank", ylabel="from rank")
    axes.tick_params(length=0)
    for i, j in itertools.product(ALL, ALL):
        nbytes = M_RR[i, j].item()
        if nbytes > 0 and WORLD_SIZE <= 8:
            color = "white" if nbytes > 0.6 * largest else "black"
            axes.text(j, i, f"{nbytes / 1e3:.0f}", ha="center", va="center", color=color)


def frame_nodes(axes: object) -> None:
    """Draw the two nodes, if ranks are placed in order."""
    from matplotlib.patches import Rectangle

    half = len(divisions(WORLD_SIZE)[0])
    for start, size in ((0, half), (half, WORLD_SIZE - half)):
        corner = (start - 0.47, start - 0.47)
        frame = Rectangle(corner, size - 0.06, size - 0.06, fill=False, edgecolor="tab:red", lw=2.5)
        axes.add_patch(frame)
        axes.text(start, start, f"node {start // half}", color="tab:red", ha="center", va="center")


def draw_bars(axes: object, found: dict[str, torch.Tensor]) -> None:
    """Draw what crosses between the nodes: in order, in turn, and at best."""
    in_turn = tuple(range(0, WORLD_SIZE, 2))
    for place, M_RR in enumerate(found.values()):
        kinds = {"in order": divisions(WORLD_SIZE)[0], "in turn": in_turn}
        kinds["best"] = best_division(M_RR)
        for offset, (kind, node) in enumerate(kinds.items()):
            kB = between_nodes(M_RR, node) / 1e3
            color = {"in order": "tab:red", "in turn": "silver", "best": "tab:green"}[kind]
            label = kind if place == 0 else None
            axes.barh(place + 0.27 * (offset - 1), kB, 0.25, color=color, label=label)
            axes.text(kB, place + 0.27 * (offset - 1), f" {kB:.0f}", fontsize=8, va="center")
    axes.set_yticks(range(len(found)), [name.replace(", ", ",\n") for name in found])
    axes.set_xticks([])
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(loc=(0.5, 0.43), title="ranks are placed")


# %% [markdown]
# On gloo the kernel counts bytes, and all that follows is claimed. On NCCL the log tells calls, and
# what follows is printed, for nothing here counts the bytes between two GPUs. (NVLink's counters,
# `nvidia-smi nvlink -gt d`, give each GPU's sum, but behind an NVSwitch not to whom.)


# %%
def check_all(device: torch.device, file: Path, figure: str | None) -> None:
    jobs = make_jobs(device)
    if device.type == "cuda":
        blocked("bytes between ranks and between nodes", needs="ranks on CPU, counted by sockets")
        found = check_by_log(jobs, file)
    else:
        blocked("what NCCL logs that it was asked for", needs="2 GPUs")
        if not can_count():
            blocked("what the kernel's sockets count", needs="Linux 4.19, with TCP_INFO")
            return
        check_message()
        found = check_by_sockets(jobs)
    print_matrices(found, device)
    print_placements(found)
    if device.type == "cpu":
        check_matrices(found, jobs)
        check_placements(found)
    if figure and RANK == 0:
        draw(found, figure)


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# ## What you should have seen
#
# 1. 1,096 bytes there, 48 back: a message costs 96 bytes more than its data, and an answer. For a
#    bucket of gradients that is nothing. For a loss of four bytes it is nearly all.
# 2. Between 4, 6 and 12 pairs. A ring of n ranks uses n of the n(n-1) pairs, and gloo's goes
#    backwards: row 1 sends to column 0. The 1 kB on the other side of the diagonal is the answers.
#    A pipeline uses both directions between neighbors, an all-to-all every pair. Where the matrix
#    has empty cells, places can be chosen; where it is full, they do not matter.
# 3. 1.5 times: two gatherings and a reduce-scatter send (n-1)/n each, and an all-reduce sends that
#    twice. But gloo moves 2 times as many, since for a reduce-scatter it all-reduces everything and
#    keeps a share. The matrix shows which is which: the gatherings go to the next rank, the
#    all-reduce to the one before. NCCL has a reduce-scatter of its own: there it is 1.5, by theory.
# 4. 5 times. With the pairs torn apart, 4 times as much crosses; {0, 3} tears the pairs and the
#    data-parallel groups. If ranks 0 and 2 are a pair, torchrun's order is only the second best of
#    the three, and 4 times as expensive as placing ranks in turn. torchrun numbers ranks node by
#    node, so the groups that talk most have to consist of neighbors. In `init_device_mesh("cuda",
#    (2, 2), mesh_dim_names=("dp", "tp"))` those are the groups of the last dimension.
# 5. At opCount a, which is 10, since NCCL writes hexadecimal. Rank 1 did not all-reduce its loss,
#    perhaps because its code says `if rank == 0`. NCCL pairs rank 0's single number with rank 1's
#    bucket of 262,144: the job hangs, or goes on with garbage. There are two differences. The other
#    is a bucket in bfloat16, opCount c on rank 0 and b on rank 1. What a log says after the first
#    difference may follow from it, so repair that one, and run again.
#
# Both ends agree: what a socket has sent, repeats apart, is what the other one has received.
#
# **Try.** With messages to the next rank the predicted rings turn the other way, and the entries of
# data parallelism and FSDP are wrong. Those of the pairs are right, since a ring of two is the same
# both ways. What crosses between the nodes is right, too: a ring crosses as often in either
# direction, so sums alone would not have shown the mistake. With 16 times the parameters the
# gradients outweigh the activations: then the data-parallel groups should share a node, and the row
# that says "in order / best" FAILs, for torchrun's order is the best one of the second grid.
#
# **On GPUs** the log gives the calls, and only these are claimed. The matrix that is printed
# assumes rings in the order of the ranks. NCCL makes its rings by topology, so a ring over two
# nodes enters each of them once, however ranks are numbered. That helps an all-reduce of all ranks.
# It cannot help small groups whose members lie on two nodes. Trees and NVLS send other amounts
# (communication/nccl_debugging.md). With COLL, INFO writes 200 bytes per call and rank: turn it on
# for a hundred steps, not for a week. `--logs` reads them.
#
# **On a real cluster** a node is an NVLink domain, and what leaves it has about a tenth of the
# bandwidth. Look which ranks really share a node (`hello` of fundamentals/05_several_nodes.py)
# before you believe the mesh: a scheduler may hand out nodes in any order. For more than two nodes
# the sum is the same, over all pairs of nodes, and programs that divide graphs, such as METIS and
# Scotch, find good places for thousands of ranks.


# %%
def main() -> None:
    figure = {"metavar": "PATH", "help": "save the matrices as a PNG"}
    logs = {"metavar": "FILE", "nargs": "+", "help": "read NCCL's logs of a job, one per rank"}
    options = command_line({"--figure": figure, "--logs": logs})
    if options.logs:
        read_logs(options.logs)
        return
    launch()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "nccl.log")
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL"}
        os.environ["NCCL_DEBUG_FILE"] = str(file)  # NCCL reads these when its first group starts
        device = setup()
        check_sample()
        if WORLD_SIZE > 1:
            check_all(device, file, options.figure)
        else:
            blocked("who sends how many bytes to whom", needs="2 ranks")
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
