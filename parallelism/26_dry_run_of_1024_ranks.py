"""A dry run of 1,024 ranks: count the collectives of one rank on a laptop
=======================================================================

**Question.** A training job is written for 1,024 GPUs. How do you find out on one machine, before
any GPU is rented, whether a rank makes the calls and holds the shards that the plan says?

**Predict**, and write it down before you run. The world has 1,024 ranks, in nodes of 8.

1. One process is told that it is rank 517, and that its process group moves nothing. It all-reduces
   a tensor that holds a one. What number does the tensor hold afterwards?
2. The mesh is fsdp 128 x tp 8. A step has 3 micro-batches. For each of them each of 2 layers is
   gathered along fsdp before its forward pass, and kept until its backward pass is over. How many
   all-gathers does rank 517 join in a step?
3. The argument that keeps a layer for the backward pass is forgotten. The gradients stay right, and
   no error shows. How many all-gathers does a dry run count now?
4. The axes of the mesh are named in the wrong order, tp outermost. On how many nodes do the 8 ranks
   of a tp group lie?
5. Rank 0 alone averages a loss over all ranks, to log it. No other rank makes that call, so a real
   run hangs. How many calls does a dry run of rank 517 count more than for the right program?

**Run.**

    torchrun --standalone --nproc-per-node=4 26_dry_run_of_1024_ranks.py  # NCCL on GPUs, or gloo
    python 26_dry_run_of_1024_ranks.py                                     # started for you

Not run on several GPUs. The dry runs need none: they are on the CPU everywhere.

**Try.** In `put_on_mesh` write `reshard_after_forward=True`: which rows fail? Name the axes of the
mesh in the wrong order, `MESH = {"tp": TP, "fsdp": FSDP}`: which rows fail now?

**Before.** parallelism/13_gpt_by_library.py: `parallelize_module`, then `fully_shard`.
parallelism/16_planning_memory.py and parallelism/17_planning_time.py: the plan.

**Next.** parallelism/27_dry_run_of_experts_and_context.py: the same for two axes that interact.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. A group that moves nothing
#
# A rank of a large job is an ordinary process. If no value decides what it calls, then all that it
# holds and sends follows from the program, its rank, and the number of ranks. It only has to wait
# for the other 1,023. PyTorch has a group that never waits, named "fake". With it one process is
# rank 517 of 1,024:
#
#     with pretended(517, 1024):
#         x = torch.ones(1)
#         dist.all_reduce(x)       # returns at once
#
# No byte leaves the process, and where other ranks' numbers are wanted there are none: this
# all-reduce leaves its tensor as it is. So the *values* are wrong. The calls are right: each
# collective that rank 517 would join, its group and its bytes. **Count them.**
#
# Memory is pretended, too. **Fake tensors** have shape and dtype and no bytes, so a model may have
# its real size; `pretended` gives a context in which tensors are made so. All this is private to
# PyTorch, and stands in one function.


# %%
@contextlib.contextmanager
def pretended(rank: int, world_size: int) -> Iterator[contextlib.AbstractContextManager]:
    """Be one rank of a world that does not exist. All that is private to torch stands here."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    yield FakeTensorMode()
    dist.destroy_process_group()
    _clear_sharding_prop_cache()  # DTensor remembers the groups of this world


# %% [markdown]
# ## 2. Count the calls
#
# FSDP and DTensor call collectives that one does not see in the program. All of them pass torch's
# dispatcher, as functions with names such as
#
#     c10d::_allgather_base_            FSDP's all-gather
#     _c10d_functional::all_reduce      DTensor's all-reduce
#
# There `Watch` notes three things: the operation, the bytes of the largest tensor that the function
# is handed, and the ranks of the group. (torch's own `CommDebugMode` counts operations; it does not
# tell the ranks.) FSDP hands over the output too, so of its all-gathers the whole is counted. A
# functional all-gather returns its output: if your program has one, as with sequence parallelism,
# `Watch` has to look at what `function` returns as well. `ranks_of` stands in section 6.


# %%
class Collective(NamedTuple):
    operation: str
    nbytes: int
    ranks: tuple[int, ...]


class Watch(TorchDispatchMode):
    """Notes each collective of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        name = function._schema.name.replace("_", "")  # c10d::allgatherbase, c10dfunctional::...
        for operation in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"):
            if "c10d" in name and operation.replace("_", "") in name:
                sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
                self.calls.append(Collective(operation, max(sizes), ranks_of(function, args)))
        return function(*args, **(kwargs or {}))


# %% [markdown]
# ## 3. The program
#
# It knows nothing of dry runs. A layer is an MLP of two matrices. Tensor parallelism cuts the first
# by columns and the second by rows (06_tensor_parallel.py). FSDP shards what a rank has of them.

# %%
MICRO_BATCHES = 3
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class DenseLayer(nn.Module):
    """T tokens, D wide: (T, D) -> (T, D), by two matrices of 4 D^2 parameters each."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.up = nn.Linear(D, 4 * D, bias=False)
        self.down = nn.Linear(4 * D, D, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        normed_TD = F.rms_norm(x_TD, x_TD.shape[-1:])
        return x_TD + self.down(F.gelu(self.up(normed_TD)))


def make_mesh(device_type: str, **sizes: int) -> DeviceMesh:
    """Return a mesh of these axes; ranks along the last one are neighbors."""
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def put_on_mesh(model: nn.Sequential, mesh: DeviceMesh, reshard: bool = False) -> None:
    """Split each layer along tp, then shard it along fsdp; free it after forward if `reshard`."""
    for layer in model:
        parallelize_module(layer, mesh["tp"], PLAN, src_data_rank=None)  # each rank cuts its own
        fully_shard(layer, mesh=mesh["fsdp"], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh["fsdp"])


def train_step(model: nn.Module, T: int, D: int, share: float = 1 / MICRO_BATCHES) -> None:
    """Leave the gradient of the mean loss. (The optimizer would send nothing.)"""
    device = next(model.parameters()).device
    for _ in range(MICRO_BATCHES):
        x_TD = torch.randn(T, D, device=device, requires_grad=True)  # as from an embedding
        (model(x_TD).square().mean() * share).backward()


# %% [markdown]
# ## 4. One dry run
#
# In a mesh of fsdp 128 x tp 8 the ranks along tp are neighbors, a node. Rank 517 is in two groups:
#
#     tp     512 513 514 515 516 517 518 519   other parts of each matrix
#     fsdp   5 13 21 29 ... 517 ... 1021       other shards of the same part
#
# **The plan.** A layer has 8 D^2 parameters, of which a rank of tp needs an eighth. For each layer
# and micro-batch it joins
#
#     along fsdp   an all-gather of these D^2 parameters, before the layer's forward pass
#                  a reduce-scatter of their gradients, after its backward pass
#     along tp     an all-reduce of (T, D), what `down` gives, and one backward, before `up`
#
# and it holds 1/1,024 of all parameters. All numbers take 4 bytes. (In bfloat16 all bytes below are
# half as many.)
#
# **The count.** This is a whole dry run:
#
#     with pretended(517, 1024) as weightless:
#         mesh = make_mesh("cpu", fsdp=128, tp=8)
#         with weightless:
#             model = nn.Sequential(DenseLayer(D), DenseLayer(D))
#         put_on_mesh(model, mesh)
#         with weightless, Watch() as watch:
#             train_step(model, T, D)
#
# Then `watch.calls` is the list. The code below does the same. `count` takes the mesh, the sizes,
# and what section 5 exchanges as arguments; `dry_run` gives it a world.

# %%
FSDP, TP = 128, 8
LAYERS, D, T = 2, 16384, 2048  # 4.3 billion parameters
AS_IT_IS = contextlib.nullcontext()  # tensors that have bytes


class Found(NamedTuple):
    calls: list[Collective]
    held: int  # bytes of parameters


def count(
    mesh: DeviceMesh,
    weightless: contextlib.AbstractContextManager = AS_IT_IS,
    sizes: tuple[int, int, int] = (LAYERS, D, T),
    put: Callable = put_on_mesh,
    step: Callable = train_step,
) -> Found:
    """Do a step in whatever world this is, and note its calls."""
    layers, D, T = sizes
    with weightless, torch.device(mesh.device_type):
        model = nn.Sequential(*[DenseLayer(D) for _ in range(layers)])
    put(model, mesh)  # reads the mesh's ranks, which are no fake tensor
    with weightless, Watch() as watch:
        step(model, T, D)
    return Found(watch.calls, sum(shard.to_local().nbytes for shard in model.parameters()))


MESH = {"fsdp": FSDP, "tp": TP}


def dry_run(rank: int, axes: dict[str, int] = MESH, **program: Callable) -> Found:
    """Be one rank of 1,024, and count."""
    with pretended(rank, 1024) as weightless:
        return count(make_mesh("cpu", **axes), weightless, **program)


# %% [markdown]
# What `dry_run(517)` finds is printed, one line per call. The first micro-batch has eight calls,
# and the two others make the same ones:
#
#     all_gather      1.074 GB   5 13 21 ... 1021     layer 0 forward: its parameters,
#     all_reduce      0.134 GB   512 513 514 ... 519      what `down` gives
#     all_gather      1.074 GB   5 13 21 ... 1021     layer 1 forward
#     all_reduce      0.134 GB   512 513 514 ... 519
#     all_reduce      0.134 GB   512 513 514 ... 519  layer 1 backward: the gradient before `up`,
#     reduce_scatter  1.074 GB   5 13 21 ... 1021         those of its parameters
#     all_reduce      0.134 GB   512 513 514 ... 519  layer 0 backward
#     reduce_scatter  1.074 GB   5 13 21 ... 1021
#
# That is the plan, line by line.


# %%
def show(found: Found) -> None:
    """Print the calls of the first micro-batch."""
    for call in found.calls[: len(found.calls) // MICRO_BATCHES]:
        first = " ".join(str(rank) for rank in call.ranks[:3])
        print0(f"    {call.operation:15} {call.nbytes / 1e9:.3f} GB   {first} ... {call.ranks[-1]}")


# %% [markdown]
# ## 5. Four mistakes
#
# Does a dry run find anything? We plant four mistakes, one at a time. None of them raises an error.
# Each program gets a dry run, whose calls are compared with those of the right program.
#
# - Layers are freed after the forward pass: `reshard_after_forward` is left as it is by default.
# - The mesh has tp outermost.
# - The losses of the micro-batches are added instead of averaged.
# - Rank 0 logs, and all-reduces over all ranks for it, while the others do not. It waits for a call
#   that never comes, and the others then wait for it. (If they did call all-reduce on that group
#   later, rank 0's call would pair with that one: no hang yet, but wrong values.)
#
# A process has one world at a time, so all dry runs come before our ranks meet. Each of our ranks
# plays another rank of the 1,024; rank 0 plays 517.

# %%
PLAYED = (517 + RANK * 1024 // WORLD_SIZE) % 1024
SMALL = (2, 64, 16)  # layers, D, T of the model that our ranks run for real
OURS = {"fsdp": WORLD_SIZE // 2, "tp": 2} if WORLD_SIZE % 4 == 0 else {"fsdp": WORLD_SIZE, "tp": 1}


def logged_step(model: nn.Module, T: int, D: int) -> None:
    train_step(model, T, D)
    if dist.get_rank() == 0:
        loss = torch.zeros(1, device=next(model.parameters()).device)
        dist.all_reduce(loss)  # the other ranks do not come


def dry_runs() -> tuple[dict[str, Found], float]:
    """Return what each program calls, and what becomes of a one that is all-reduced."""
    with pretended(PLAYED, 1024):
        one = torch.ones(1)
        dist.all_reduce(one)
    runs = {
        "right": dry_run(PLAYED),
        "freed": dry_run(PLAYED, put=partial(put_on_mesh, reshard=True)),
        "tp outermost": dry_run(PLAYED, {"tp": TP, "fsdp": FSDP}),
        "added": dry_run(PLAYED, step=partial(train_step, share=1.0)),
        "rank 0 logs": dry_run(PLAYED, step=logged_step),
        "as rank 0": dry_run(0, step=logged_step),
    }
    with pretended(RANK, WORLD_SIZE):
        runs["rehearsal"] = count(make_mesh("cpu", **OURS), sizes=SMALL)
    return runs, one.item()


# %% [markdown]
# ## 6. How it is measured
#
# Calls are told apart by the ranks of their group, not by the name of its axis: a mesh in the wrong
# order has the right names. Rows of the 1,024 ranks are marked simulated: the program is real, and
# its world is not.


# %%
def ranks_of(function: Callable, args: tuple) -> tuple[int, ...]:
    """Return the ranks of the group that a collective was handed."""
    given = {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)}
    if "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
    else:
        group = dist.distributed_c10d._resolve_process_group(given["group_name"])
    return tuple(dist.get_process_group_ranks(group))


DRY = {"kind": "simulated"}


def check_right(found: Found) -> None:
    gathers, gathered = along(found, "fsdp", "all_gather")
    scatters, scattered = along(found, "fsdp", "reduce_scatter")
    sums, summed = along(found, "tp", "all_reduce")
    times = MICRO_BATCHES * LAYERS
    claim("fsdp: all-gathers", times, gathers, question=2, **DRY)
    claim("fsdp: GB in all-gathers", times * 4 * D**2 / 1e9, gathered, **DRY)
    claim("fsdp: reduce-scatters", times, scatters, **DRY)
    claim("fsdp: GB in reduce-scatters", times * 4 * D**2 / 1e9, scattered, **DRY)
    claim("tp: all-reduces", 2 * times, sums, **DRY)
    claim("tp: GB in all-reduces", 2 * times * 4 * T * D / 1e9, summed, **DRY)
    claim("calls along any other group", 0, len(found.calls) - gathers - scatters - sums, **DRY)
    claim("MB of parameters held", 4 * LAYERS * 8 * D**2 / 1024 / 1e6, found.held / 1e6, **DRY)


def along(found: Found, axis: str, operation: str) -> tuple[int, float]:
    """Return the number of calls of one operation along an axis, and their GB."""
    first = PLAYED // TP * TP
    ranks = {"fsdp": range(PLAYED % TP, 1024, TP), "tp": range(first, first + TP)}
    wanted = (operation, tuple(ranks[axis]))
    sizes = [call.nbytes for call in found.calls if (call.operation, call.ranks) == wanted]
    return len(sizes), sum(sizes) / 1e9


def check_mistakes(runs: dict[str, Found]) -> None:
    """Claim in what each wrong program's calls differ from those of the right one."""
    gathers = sum(call.operation == "all_gather" for call in runs["freed"].calls)
    claim("freed: all-gathers", 2 * MICRO_BATCHES * LAYERS, gathers, question=3, **DRY)
    right = runs["right"]
    swapped = unlike(right, runs["tp outermost"])
    claim("tp outermost: calls that differ but for ranks", 0, swapped, **DRY)
    groups = [call.ranks for call in runs["tp outermost"].calls if len(call.ranks) == TP]
    nodes = {rank // 8 for rank in sum(groups, ())}  # all calls are along one group
    claim("tp outermost: nodes of a tp group", 8, len(nodes), question=4, **DRY)
    claim("added losses: calls that differ", 0, unlike(right, runs["added"]), **DRY)
    logs = unlike(right, runs["rank 0 logs"])
    claim("rank 0 logs: calls that differ, rank 517", 0, logs, question=5, **DRY)
    logs = unlike(right, runs["as rank 0"])
    claim("rank 0 logs: calls that differ, rank 0", 1, logs, **DRY)


def unlike(right: Found, found: Found) -> int:
    """How many calls one of them makes and the other does not, whatever the ranks."""
    ours = Counter((call.operation, call.nbytes) for call in found.calls)
    due = Counter((call.operation, call.nbytes) for call in right.calls)
    return ((ours - due) + (due - ours)).total()


# %% [markdown]
# Can a dry run be believed? Each rank rehearses its own part of a small mesh that our ranks fill,
# then does that step for real. The two lists of calls must be the same, call by call.


# %%
def check_real_ranks(runs: dict[str, Found], device: torch.device) -> None:
    if WORLD_SIZE == 1:
        blocked("real ranks: calls unlike the dry run's", needs="2 ranks")
        return
    found = count(make_mesh(device.type, **OURS), sizes=SMALL)
    gathers = sum(call.operation == "all_gather" for call in found.calls)
    claim("real ranks: all-gathers", MICRO_BATCHES * SMALL[0], gathers)
    if runs:
        pairs = zip_longest(runs["rehearsal"].calls, found.calls)  # in order, and as many
        unlike_calls = sum(rehearsed != real for rehearsed, real in pairs)
        claim("real ranks: calls unlike the dry run's", 0, unlike_calls)


# %% [markdown]
# ## What you should have seen
#
# 1. One. The group has 1,024 members, and adds nothing up. So nothing in a dry run may depend on a
#    value: no routing, no loss scale, no step that is skipped for a NaN.
# 2. Six, one per layer and micro-batch.
# 3. 12: each layer is gathered again for its backward pass. In a real run this costs time and saves
#    memory, and changes no number, so nobody looks for it.
# 4. Eight: each rank of the group is on another node, and every all-reduce of activations crosses
#    the network. Number and bytes of calls are right; only the ranks tell. On one node both orders
#    are equally fast, so a test there does not tell either.
# 5. None: rank 517 does what it should. Played as rank 0 the same program has one call more. So
#    play a rank of each kind (the first, the last, one per stage of a pipeline), and compare.
#
# **Try.** With `reshard_after_forward=True` three rows fail: the all-gathers, their GB, and the
# all-gathers of the real ranks. With tp outermost the calls are along groups that are not in the
# plan. Seven rows fail: six of the two axes, and *any other group*. The parameters held are as
# many.
#
# **What a dry run cannot tell.** Time; values, since added losses make the same calls; whether the
# ranks agree, unless you play those that differ. Nor is the peak of memory counted here. What it
# **costs** is in the line above the rows: seconds per run, and less than 1 GB of memory for 17 GB
# of parameters.
#
# **Your own program** must take its device from outside, as ours takes the mesh's, and not write
# `cuda`. A kernel of your own needs a version for fake tensors (`torch.library.register_fake`).
#
# **On GPUs** the dry runs stay on the CPU. The real ranks use NCCL, so the last row compares CUDA's
# calls with the CPU's, one by one. It was not run there: until you have seen it pass on two GPUs of
# yours, a dry run counts what FSDP and DTensor do on a CPU.
#
# **When.** Before a job is queued, and on every change of the program; torchtitan has a mode for it
# (`COMM_MODE=fake_backend`). Not to see that a program is right, which takes a few real ranks
# (15_is_it_right.py), and not to plan time.


# %%
def main() -> None:
    command_line()
    launch()
    runs = {}
    start = time.perf_counter()
    with contextlib.suppress(ImportError):  # what is private to torch may move
        runs, one = dry_runs()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    peak *= 1 if sys.platform == "darwin" else 1024
    device = setup()
    if runs:
        print0(f"  {len(runs)} dry runs: {seconds:.1f} s, a process of {peak / 1e9:.1f} GB at most")
        print0(f"  rank {PLAYED}, the first of {MICRO_BATCHES} micro-batches:")
        show(runs["right"])
        claim("a one, all-reduced by rank 517 of 1,024", 1, one, question=1, **DRY)
        check_right(runs["right"])
        check_mistakes(runs)
    else:
        blocked("what one rank of 1,024 holds and sends", needs="torch 2.11 to 2.15")
    check_real_ranks(runs, device)
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
