"""Sharded checkpoints: saved by all ranks, loaded on another number of them, never half
=====================================================================================

**Question.** A sharded model can be saved whole by one rank, in parts by all of them, or in the
background. What does each way cost, on how many ranks can the result be loaded, and what is left
if a rank dies in the middle or the disk loses a bit?

**Predict**, and write it down before you run. A GPT of P parameters in float32 is trained with Adam
by FSDP2 on n ranks, and saved with `torch.distributed.checkpoint` (DCP).

1. How many bytes per parameter hold weights and Adam's state in one full file, and how many of them
   lie in the file of one rank if each writes its shards?
2. How many bytes per parameter does rank 0 need on top of its own shards, for a full state dict and
   for a sharded one?
3. Saved on 4 ranks, loaded on 2, saved there, loaded on 3: how many elements of weights and Adam's
   state differ from the first? And after three more steps on 4 ranks, from a training that never
   stopped?
4. One bit is flipped in the file of each of the n ranks. How many of them does DCP's `load` notice,
   and how many do checksums?
5. A rank dies after the others have written their files, before it has written its own. How many
   new checkpoints have got their name?
6. `async_save` returns while the writing goes on. How many bytes per element of its shards has a
   rank copied by then, and how many has it written?

**Run.**

    torchrun --standalone --nproc-per-node=4 06_fsdp_checkpoint.py   # NCCL on 4 GPUs, else gloo
    python 06_fsdp_checkpoint.py                                     # the same, started for you

Not run on several GPUs. Checkpoints go to a temporary folder; on several nodes `--folder` names one
that all see.

**Try.** In `PublishingWriter` leave out `.with_suffix(".tmp")`, so that files are written under the
final name: what fails, and what does not? In `check_asynchronous` leave out `async_stager=stager`,
as most examples do: what fails?

**Before.** fsdp/01_fsdp_basics.py: units and shards; exercises/17_durable_checkpoint: one file.

**Next.** exercises/19_load_on_another_world; then fsdp/07_deepspeed_train.py, or fsdp/08_lora.py
"""

import argparse
import ctypes
import hashlib
import json
import logging
import math
import os
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences, T tokens in each, D model width, V different tokens, L blocks, H heads of K
# features. P is the number of parameters, n the number of ranks.

AT_ONCE = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)  # copy before async_save returns, on any machine
WHOLE = {"full_state_dict": True, "cpu_offload": True}  # everything, in rank 0's memory
CHECKSUMS = "checksums.json"  # {name of a file: its bytes and its sha256}
MORE_STEPS = 3  # that are trained after loading, and while a checkpoint is being written
PATIENCE = 60.0  # seconds until a writer that waits for them gives up
ROUNDING = 0.01  # float32, over a few steps, relative to how far they went

# %% [markdown]
# ## 1. Full and sharded: one file through one rank, or a file per rank
#
# A checkpoint of a training holds the weights and the optimizer's state; for Adam these are two
# moments per parameter. `get_state_dict` returns both under the parameters' full names, so that
# they fit any model of the same architecture, however it is sharded. It has two forms:
#
#     full       every tensor is gathered, and copied to rank 0's memory; rank 0 writes all
#     sharded    every tensor stays the DTensor it is; each rank writes its own shards
#
#     full                                       sharded
#     rank 0  [#   ] --+                         rank 0  [#   ] --> __0_0.distcp
#     rank 1  [ #  ] --+--> rank 0 [####]        rank 1  [ #  ] --> __1_0.distcp
#     rank 2  [  # ] --+      |                  rank 2  [  # ] --> __2_0.distcp
#     rank 3  [   #] --+      +--> whole.pt      rank 3  [   #] --> __3_0.distcp
#                                                rank 0          --> .metadata
#
# `.metadata` says for each tensor which rows lie in which file, and where in it. `dcp.save` is a
# collective: the ranks agree on who writes what (a tensor that all hold, such as Adam's count of
# steps, is written once), then all write at the same time, and rank 0 writes `.metadata` last.


# %%
def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: bool) -> dict:
    """Return weights and Adam's state by name; without options, this rank's own shards."""
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": weights, "optimizer": moments}


def save_full(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Gather everything on rank 0, which writes one file. All ranks must call it."""
    state = state_of(model, optimizer, **WHOLE)  # empty on all ranks but 0
    if RANK == 0:
        torch.save(state, path)


def save_sharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: Path,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Let each rank of the group write its own shards. All of its ranks must call it."""
    there = [is_there(path)]
    dist.broadcast_object_list(there, group=group)  # rank 0 decides for all
    if not there[0]:
        state = state_of(model, optimizer)
        dcp.save(state, storage_writer=PublishingWriter(path), process_group=group)


def check_sizes(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    P = elements_of(model)
    state_of(model, optimizer)  # makes Adam's state, which before the first step does not exist
    own = bytes_by_address([*model.parameters(), *tree_leaves([*optimizer.state.values()])])
    for name, options, expected in [("full", WHOLE, 12 if RANK == 0 else 0), ("sharded", {}, 0)]:
        if WORLD_SIZE == 1:
            blocked(f"{name}: bytes a rank makes for the state / P", needs="2 ranks")
            continue
        state = bytes_by_address(tree_leaves(state_of(model, optimizer, **options)))
        made = sum(size for address, size in state.items() if address not in own)
        claim(f"{name}: bytes a rank makes for the state / P", expected, made / P, question=2)

    whole = folder / "whole.pt"
    save_full(model, optimizer, whole)
    dist.barrier()
    size = whole.stat().st_size
    claim("full: bytes of the one file / P", 12, size / P, atol=1.5, question=1)

    path = folder / "step-000000"
    save_sharded(model, optimizer, path)
    count, payload = shards_in_file(path, f"__{RANK}_0.distcp")
    claim("sharded: bytes of shards in a rank's file", 12 * own_elements(), payload, question=1)
    size = (path / f"__{RANK}_0.distcp").stat().st_size
    beside = f"{(size - payload) / count:,.0f} bytes next to each of {count} shards"
    print0(f"{'':13}rank 0's file has {size:,} bytes: {beside}")


# %% [markdown]
# ## 2. A checkpoint begins to exist by a rename
#
# DCP writes straight into the folder that you name. A job that is killed meanwhile leaves a folder
# with some files in it, under the name of a checkpoint. The remedy is the same as for a single file
# (launch/ddp_surviving.py), only that now many ranks write:
#
#     1. Every rank writes its file into step-000002.tmp, and flushes it to the disk.
#     2. Every rank writes a checksum of its file next to it.
#     3. Rank 0 waits until it has heard from all ranks that they are done: this is the barrier.
#     4. Rank 0 writes .metadata, and the checksums of all files in one list; it flushes them.
#     5. Rank 0 renames step-000002.tmp to step-000002, and flushes the folder around it.
#
# A rename within one file system happens or does not. The order is all that matters. If rank 0
# renames before step 3, it publishes files that other ranks have yet to write. If it renames before
# step 4 is flushed, a power cut can leave the name and lose what it names.
#
# DCP's writers are classes made to be derived from. `write_data` runs on every rank. `finish` runs
# on rank 0 alone, and only when all ranks' results have been gathered there: DCP's own barrier is
# in the right place. Before that, `prepare_global_plan` runs on rank 0 while nobody writes, and can
# remove what a killed job has left.
#
# A folder of that name may be there already. A job that refused a damaged step 3 goes on from step
# 2, and comes to step 3 again; a rename onto a folder that holds files fails, and would fail again
# after every restart. So `save_sharded` asks `is_there` first: a damaged one is put aside, and a
# whole one stays as it is, since SIGTERM may come right after a regular save.


# %%
class PublishingWriter(dcp.FileSystemWriter):
    """Writes `path`.tmp with a checksum for each file, and names it `path` when it is whole."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.with_suffix(".tmp"))
        self.final = path

    def prepare_global_plan(self, plans: list) -> list:
        """On rank 0, before anybody writes: remove what a killed job has left."""
        for leftover in self.path.iterdir():
            leftover.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        """On every rank: write this rank's file, and a checksum next to it."""
        written = super().write_data(plan, planner)  # flushed, too: sync_files=True is the default
        for name in {result.storage_data.relative_path for result in written.value()}:
            write_durably(self.path / f"{name}.sum", fingerprint(self.path / name))
        return written

    def finish(self, metadata: dcp.Metadata, results: list) -> None:
        """On rank 0, when all ranks have written: make the list of checksums, then publish."""
        super().finish(metadata, results)
        sums = {".metadata": fingerprint(self.path / ".metadata")}
        for name in {info.relative_path for info in metadata.storage_data.values()}:
            told = self.path / f"{name}.sum"
            sums[name] = json.loads(told.read_bytes())
            told.unlink()
        write_durably(self.path / CHECKSUMS, sums)
        sync_folder(self.path)
        self.path.rename(self.final)  # at this moment it begins to exist
        sync_folder(self.final.parent)


def is_there(path: Path) -> bool:
    """Whether that checkpoint is there and whole, as rank 0 sees it; a damaged one is put aside."""
    if RANK != 0 or not path.exists():
        return False
    if not damage_in(path):
        return True
    aside = path.with_suffix(".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return False


def fingerprint(path: Path) -> dict:
    """Return what tells this file from any other: its bytes and its sha256."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_durably(path: Path, content: dict) -> None:
    with open(path, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())  # else the name may outlive a power cut, and the bytes not


def sync_folder(folder: Path) -> None:
    """Return when the names in this folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# %% [markdown]
# What does a death in the middle leave? Here the last rank stops at the worst moment, before its
# own file, and rank 0 hears of it. (If it were killed, rank 0 would wait until its timeout; on the
# disk there would be the same.)
#
# DCP collects what went wrong on which rank, and raises a `CheckpointException` on *all* ranks. It
# is derived from `BaseException`: an `except Exception` around a save or a load does not catch it.


# %%
class DyingWriter(PublishingWriter):
    """As if the last rank were killed before it writes."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        if RANK == WORLD_SIZE - 1:
            raise InterruptedError("killed before it wrote its file")
        return super().write_data(plan, planner)


def check_death(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    path = folder / "step-000002"
    error = None
    try:
        dcp.save(state_of(model, optimizer), storage_writer=DyingWriter(path))
    except CheckpointException as raised:
        error = raised
    dist.barrier()
    files = [*folder.glob("step-000002.tmp/*.distcp")]
    claim("ranks that DCP names as failed", 1, len(error.failures) if error else 0)
    claim("errors that `except Exception` would catch", 0, isinstance(error, Exception))
    claim("files in the folder without a name", WORLD_SIZE - 1, len(files))
    names = [path.name for path in newest_first(folder)]
    claim("checkpoints that have a name", 1, len(names), question=5)
    claim("the step that is loaded", 0, step_of(newest_whole(folder)))
    dist.barrier()  # all have looked
    save_sharded(model, optimizer, path)
    claim("saved once more: the step that is loaded", 2, step_of(newest_whole(folder)))


# %% [markdown]
# ## 3. A damaged checkpoint is refused by name, and the one before it is loaded
#
# A disk that returns a wrong bit is rare, and a cluster has many disks. DCP's `load` reads the
# bytes of a weight as they are. `torch.save` has even put a CRC-32 of every tensor into the file,
# since the file is a zip archive; `torch.load` does not look at it. Only what moves a length or a
# name is noticed, and a missing or shortened file.
#
# So the checksums are compared before anything is loaded. Rank 0 lists the folder and tells the
# others, since a network's file system may show a new name to one node seconds before another. The
# ranks share the reading: each takes every n-th file, and all tell all what they found. So all
# decide alike; a rank that decided alone would load another step than its peers.


# %%
def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a folder; step-000002.tmp and step-000002.damaged are none."""
    return sorted((path for path in folder.glob("step-*") if not path.suffix), reverse=True)


def newest_whole(folder: Path) -> Path:
    """Return the newest checkpoint without damage, the same on all ranks, and name the others.

    Raises ValueError if there is none: to start anew must not happen by accident.
    """
    for path in from_rank_0(newest_first(folder)):
        damage = find_damage(path)
        if not damage:
            return path
        for told in damage:
            print0(f"{'':13}refused: {path.name}/{told}")
    raise ValueError(f"{folder} has no whole checkpoint; remove the folder to start anew")


def find_damage(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint's files, each by its name. All ranks must call it."""
    return sorted(set(chain(*gather_objects(damage_in(path, RANK, WORLD_SIZE)))))


def damage_in(path: Path, first: int = 0, step: int = 1) -> list[str]:
    """The same, of every step-th file: the ranks share the reading."""
    found = []
    try:
        sums = json.loads((path / CHECKSUMS).read_bytes())
        for name in sorted(sums)[first::step]:
            found += [f"{name}: {why}" for why in compare(path / name, sums[name])]
    except (OSError, ValueError, TypeError, LookupError) as error:
        found.append(f"{CHECKSUMS}: {error}")
    return found


def compare(path: Path, expected: dict) -> list[str]:
    """Return why the file is not the one that was written; empty if it is."""
    if not path.exists():
        return ["missing"]
    size = path.stat().st_size
    if size != expected["bytes"]:
        return [f"{size:,} bytes instead of {expected['bytes']:,}"]
    if fingerprint(path) != expected:
        return ["another checksum than it had"]
    return []


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: Path,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill this rank's shards from a checkpoint, whatever number of ranks has written it."""
    state = state_of(model, optimizer)  # these tensors are overwritten in place
    dcp.load(state, checkpoint_id=path, process_group=group)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


# %% [markdown]
# Each kind of damage is done to a copy of the newest checkpoint, always to the last rank's file.
# Then *every* rank flips one bit of one weight in its own file: the highest bit of the exponent, so
# that a small number becomes a huge one. DCP alone loads that, too. At last the damaged step is
# saved again, as by a job that went on from the step before.


# %%
def check_damage(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    path = folder / "step-000003"
    victim = f"__{WORLD_SIZE - 1}_0.distcp"
    harms = {"missing": remove, "cut off": cut_off, "a bit flipped": flip_a_bit}
    for how, harm in harms.items():
        load(model, optimizer, folder / "step-000002")
        copy_checkpoint(folder / "step-000002", path)
        if RANK == WORLD_SIZE - 1:
            harm(path / victim, bytes_of(model.head.weight))
        dist.barrier()
        damage = find_damage(path)
        named = [told for told in damage if told.startswith(victim)]
        claim(f"{how}: files refused", 1, len(damage))
        claim(f"{how}: of these the damaged one", 1, len(named))
        claim(f"{how}: the step that is loaded", 2, step_of(newest_whole(folder)))
        expected = 0 if how == "a bit flipped" else 1
        refused = refused_by_dcp(model, optimizer, path)
        claim(f"{how}: loads that DCP itself refuses", expected, refused)


def check_flipped_bits(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, saved: dict
) -> None:
    path = folder / "step-000003"
    load(model, optimizer, folder / "step-000002")
    copy_checkpoint(folder / "step-000002", path)
    flip_a_bit(path / f"__{RANK}_0.distcp", bytes_of(model.head.weight))
    dist.barrier()
    refused = refused_by_dcp(model, optimizer, path)
    wrong = elements_that_differ(whole_state(model, optimizer), saved)
    claim("n bits flipped: elements loaded wrong", WORLD_SIZE, from_rank_0(wrong))
    claim("n bits flipped: loads that DCP refuses", 0, refused, question=4)
    named = len(find_damage(path))
    claim("n bits flipped: files that checksums refuse", WORLD_SIZE, named, question=4)
    load(model, optimizer, newest_whole(folder))
    wrong = elements_that_differ(whole_state(model, optimizer), saved)
    claim("the checkpoint before it: elements loaded wrong", 0, from_rank_0(wrong))
    save_sharded(model, optimizer, path)
    text = "its step saved again: the step that is loaded"
    claim(text, 3, step_of(newest_whole(folder)))


def refused_by_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    try:
        load(model, optimizer, path)
    except CheckpointException:
        return 1
    return 0


# %% [markdown]
# ## 4. Another number of ranks: the checkpoint is cut again
#
# After a failure a job may get fewer GPUs, and evaluation wants one. The rows of a tensor are then
# cut at other places. Each rank compares where its new shard begins and ends with what `.metadata`
# says of the old ones, and reads the files that overlap. 10 rows, written by 4 ranks, read by 3:
#
#     written by    | 0  0  0 | 1  1  1 | 2  2  2 | 3 |
#     rows            0  1  2   3  4  5   6  7  8   9
#     read by       | 0  0  0  0 | 1  1  1  1 | 2  2 |
#
# Rank 1 of 3 needs rows 4 to 7: two of file 1 and two of file 2. No rank holds a whole tensor, and
# no shard crosses the network. The model asks for what it needs, since `load` above starts from the
# *new* model's own state dict. (exercises/19_load_on_another_world writes this by hand.)
#
# Here all happens within one run: the first ranks form a smaller mesh, and the others wait.


# %%
def check_other_worlds(mesh: DeviceMesh, folder: Path, saved: dict) -> None:
    if WORLD_SIZE == 1:
        blocked("loaded on another number of ranks", needs="2 ranks")
        return
    path = folder / "step-000002"
    came_by = f"{WORLD_SIZE}"
    for m in (2, 3) if WORLD_SIZE > 2 else (1, 2):
        came_by += f" -> {m}"
        smaller = first_ranks(m, mesh)
        target = folder / f"from-{m}" / path.name
        differ = 0
        if mesh.get_local_rank() < m:
            model, optimizer = new_training(smaller)
            load(model, optimizer, path, smaller.get_group())
            save_sharded(model, optimizer, target, smaller.get_group())
            differ = elements_that_differ(whole_state(model, optimizer), saved)
        claim(f"{came_by} ranks: elements that differ", 0, differ, question=3)
        path = target


def first_ranks(m: int, mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the first m ranks. All ranks must call it, since it makes a group."""
    return DeviceMesh(mesh.device_type, list(range(m)))


# %% [markdown]
# Loading is exact. Is *training on* from there exact, too? On the same number of ranks all sums are
# made in the same order, and nothing may differ at all. On another number the same sequences are
# divided otherwise, and float32 rounds otherwise. To tell rounding from a mistake, the distance
# between the two ends is divided by how far the steps have gone. For comparison, the last training
# loads the weights and forgets Adam's state.


# %%
def check_going_on(mesh: DeviceMesh, folder: Path, training: tuple, saved: dict) -> None:
    """`training`, a model and its optimizer, never stops; its state was `saved`."""
    path = folder / "step-000002"
    train(*training, mesh)
    never_stopped = whole_state(*training)
    length = distance(never_stopped, saved)  # of these steps

    model, optimizer = new_training(mesh)
    load(model, optimizer, path)
    train(model, optimizer, mesh)
    reached = whole_state(model, optimizer)
    differ = from_rank_0(elements_that_differ(reached, never_stopped))
    if mesh.device_type == "cpu":
        claim("gone on, n ranks: elements that differ", 0, differ, question=3)
    error = distance(reached, never_stopped) / length  # a GPU's kernels may add in any order
    claim("gone on, n ranks: distance / way of the steps", 0, error, atol=ROUNDING)

    load(model, optimizer, path)
    train(model, adam(model), mesh)
    error = distance(whole_state(model, optimizer), never_stopped) / length
    claim("Adam's state forgotten: distance / way, at least", 0.1, error, ">=")

    if WORLD_SIZE == 1:
        blocked("gone on with fewer ranks: distance / way", needs="2 ranks")
        return
    m = 2 if WORLD_SIZE > 2 else 1
    smaller = first_ranks(m, mesh)
    reached = {"model": {}}
    if mesh.get_local_rank() < m:
        model, optimizer = new_training(smaller)
        load(model, optimizer, path, smaller.get_group())
        train(model, optimizer, smaller)
        reached = whole_state(model, optimizer)
    error = distance(reached, never_stopped) / length
    claim(f"gone on, {m} ranks: distance / way of the steps", 0, error, atol=ROUNDING)


# %% [markdown]
# ## 5. Asynchronous: training goes on while the disk writes
#
# A save takes as long as the disk does. But the disk needs the values as they *were*, not the
# tensors. So `async_save` **stages**: it copies this rank's shards into the CPU's memory, returns,
# and a thread writes the copy. Training stands still for the copy only:
#
#     save          step 2 | write write write write | step 3 | step 4 | step 5
#     async_save    step 2 | copy | step 3 | step 4 | step 5 | step 6
#                                 | write write write write |
#
# Three things are to be kept in mind. The thread runs collectives of its own, which must not meet
# those of the training: give it a **group of its own**, made of gloo, since the copy lies on the
# CPU. The memory for the copy is 12 P/n bytes per rank, on the host. And the returned future must
# be waited for before the next save, or before the job ends: an error is raised there, and nowhere
# else. (`async_checkpointer_type=AsyncCheckpointerType.PROCESS` writes in a process of its own,
# which Python's lock cannot hold up. It imports your script anew: without the line `if __name__ ==
# "__main__":` that starts the job again, and hangs.)
#
# The writer here waits until three steps have been taken. It stands for a slow disk, without a
# clock: if the save blocked, there would never be three.


# %%
class WaitingWriter(PublishingWriter):
    """As if the disk were so slow that training takes steps before the first byte lies there."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.steps = 0  # that the training has taken
        self.go = threading.Event()

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        self.go.wait(PATIENCE)
        self.steps_before = self.steps
        return super().write_data(plan, planner)


def check_asynchronous(
    mesh: DeviceMesh, folder: Path, training: tuple, background: dist.ProcessGroup
) -> None:
    saved = whole_state(*training)
    path = folder / "step-000004"
    writer = WaitingWriter(path)
    stager = DefaultStager(AT_ONCE)
    with CopiedBytes() as copied:
        future = dcp.async_save(
            state_of(*training),
            storage_writer=writer,
            process_group=background,
            async_stager=stager,
        )
    for _ in range(MORE_STEPS):
        train(*training, mesh, steps=1)
        writer.steps += 1
    written = sum(file.stat().st_size for file in folder.glob(f"step-000004*/__{RANK}_*"))
    writer.go.set()
    future.result()
    stager.close()

    own = own_elements()
    per_element = copied.nbytes / own
    beside = 12 * (chunk_elements() - own) + 1000  # padding of uneven shards, counts of steps
    text = "async_save: bytes copied per element of a shard"
    claim(text, 12, per_element, atol=beside / own, question=6)
    text = "async_save: bytes written after three steps"
    claim(text, 0, written, question=6, kind="simulated")
    text = "async_save: steps before the first byte"
    claim(text, MORE_STEPS, writer.steps_before, kind="simulated")
    moved = from_rank_0(elements_that_differ(whole_state(*training), saved))
    claim("elements of the state that these steps changed", 1000, moved, ">=")
    load(*training, newest_whole(folder))
    differ = from_rank_0(elements_that_differ(whole_state(*training), saved))
    claim("loaded: elements that differ from before them", 0, differ)


# %% [markdown]
# ## 6. One file for inference: safetensors
#
# Who serves the model needs no Adam, no DCP and no ranks. `safetensors` is the format that most
# programs read, since it is simple: 8 bytes with the length of the header, the header in JSON, then
# the tensors' bytes one after another. It holds no code that could run, as a pickle does, and a
# reader can map the file and look at one tensor alone.
#
#     2640    {"head.weight": {"dtype": "F32", "shape": [256, 64], "data_offsets": [0, 65536]}, ...
#     8 bytes  2640 bytes                                                       4P bytes of tensors
#
# One process makes the file from the checkpoint, without the ranks that wrote it: it asks DCP for
# whole tensors, and for those of the model only. (`python -m
# torch.distributed.checkpoint.format_utils dcp_to_torch step-000002 whole.pt` turns *all* of a
# checkpoint into one file for `torch.load`, and `torch_to_dcp` turns it back. The model and its
# optimizer have to fit into the memory of that process.)


# %%
SAFE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        place = [end, end + tensor.nbytes]
        about = {"dtype": SAFE_NAMES[tensor.dtype], "shape": [*tensor.shape]}
        header[name] = about | {"data_offsets": place}
        end = place[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor begins at a multiple of 8
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(bytes_of(tensor))


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    dtypes = {name: dtype for dtype, name in SAFE_NAMES.items()}
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__":
            start, stop = (8 + length + offset for offset in about["data_offsets"])
            flat = torch.frombuffer(bytearray(data[start:stop]), dtype=dtypes[about["dtype"]])
            tensors[name] = flat.view(about["shape"])
    return tensors


def check_one_file(folder: Path, saved: dict) -> None:
    file = folder / "model.safetensors"
    differ = 0
    if RANK == 0:
        whole = {"model": new_gpt().state_dict()}
        with warnings.catch_warnings(action="ignore"):  # of the one process that it takes us for
            dcp.load(whole, checkpoint_id=folder / "step-000002", no_dist=True)
        write_safetensors(whole["model"], file)
        model = new_gpt()
        model.load_state_dict(read_safetensors(file))
        differ = elements_that_differ(model.state_dict(), saved["model"])
    dist.barrier()
    size = file.stat().st_size
    claim("safetensors: bytes of the file / P", 4, size / elements_of(new_gpt()), atol=0.1)
    claim("safetensors: elements that differ", 0, differ)


# %% [markdown]
# ## 7. How it is measured
#
# The **oracle** is the training itself: rank 0 keeps the full state as it was when it was saved,
# and every state that was loaded is compared with it element by element. `CopiedBytes` sees the
# copies that the main thread makes, and none of the writing thread's. Harm is done to files as
# bytes. The model is the GPT of fsdp/01_fsdp_basics.py with two blocks, trained on random bytes:
# what it learns plays no part here.


# %%
def new_gpt() -> "GPT":
    torch.manual_seed(0)  # the same weights on every rank
    return GPT(L=2)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def new_training(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model that has learned nothing, and its optimizer."""
    model = new_gpt().to(mesh.device_type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adam(model)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: int = MORE_STEPS
) -> None:
    """Take some steps on 2n sequences each, which are divided among the mesh's ranks.

    They are the same in every call, and on any number of ranks.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x_BT = torch.randint(256, (2 * WORLD_SIZE, 65), generator=generator)
        x_BT = x_BT.chunk(mesh.size())[mesh.get_local_rank()].to(mesh.device_type)
        logits_BTV = model(x_BT[:, :-1])
        F.cross_entropy(logits_BTV.transpose(1, 2), x_BT[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


# %% [markdown]
# The model:


# %%
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


# %% [markdown]
# What is counted, and what is compared:


# %%
class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that this thread copies into tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        if func is torch.ops.aten.copy_.default:
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


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


def elements_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def bytes_by_address(values: list) -> dict[int, int]:
    """Return the bytes of those of the values that are tensors, by where they lie; no scalars."""
    found = {}
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            local = value.to_local() if isinstance(value, DTensor) else value
            found[local.data_ptr()] = local.nbytes
    return found


def own_elements() -> int:
    """Return how many elements this rank holds: of each tensor, chunk r of ceil(rows / n) rows."""
    total = 0
    for parameter in new_gpt().parameters():
        rows = len(parameter)
        chunk = math.ceil(rows / WORLD_SIZE)
        total += max(0, min(chunk, rows - RANK * chunk)) * parameter[0].numel()
    return total


def chunk_elements() -> int:
    """Return how many elements it would hold if all chunks had ceil(rows / n) rows."""
    return sum(math.ceil(len(p) / WORLD_SIZE) * p[0].numel() for p in new_gpt().parameters())


def shards_in_file(path: Path, name: str) -> tuple[int, int]:
    """Return how many shards lie in this file, and their bytes, by what .metadata says."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    sizes = []
    for index, place in metadata.storage_data.items():
        about = metadata.state_dict_metadata[index.fqn]
        if place.relative_path == name and index.offset:  # of a scalar it is empty
            for chunk in about.chunks:
                if chunk.offsets == index.offset:
                    sizes.append(chunk.sizes.numel() * about.properties.dtype.itemsize)
    return len(sizes), sum(sizes)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return the full state, to keep: a copy even of what training will overwrite in place."""
    return deepcopy(state_of(model, optimizer, **WHOLE))


def elements_that_differ(state: dict, expected: dict) -> int:
    """Return how many elements of two full states differ; 0 on ranks that hold none of them."""
    differ = 0
    for ours, theirs in zip(tree_leaves(state), tree_leaves(expected), strict=True):
        if isinstance(ours, torch.Tensor):
            differ += (ours != theirs).sum().item()
    return differ


def distance(state: dict, other: dict) -> float:
    """Return the length of the difference between the weights of two full states on rank 0."""
    squares = []
    for name, weight in state["model"].items():
        squares.append((weight - other["model"][name]).square().sum().item())
    return from_rank_0(math.sqrt(sum(squares)))


# %% [markdown]
# What is done to files:


# %%
def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, or of this rank's shard of it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()


def remove(path: Path, inside: bytes) -> None:
    path.unlink()


def cut_off(path: Path, inside: bytes) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path, inside: bytes) -> None:
    """Flip the highest bit of the exponent of the first of these float32, wherever they lie."""
    data = bytearray(path.read_bytes())
    data[data.index(inside) + 3] ^= 0b0100_0000
    path.write_bytes(data)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Let rank 0 copy a folder; whatever was under the new name is gone."""
    dist.barrier()  # nobody reads it any more
    if RANK == 0:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
    dist.barrier()


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# %% [markdown]
# ## 8. The time of each way, and how long the training stands still
#
# The clock starts when all ranks are ready and no GPU computes. It stops when `save` returns, until
# when the training stands still, and again when the checkpoint has its name. On two cores and one
# disk the times of this small model are those of planning and of flushing files, so nothing is
# claimed of them. On GPUs the model has 0.27 billion parameters, 3.2 GB with Adam's state, and the
# share of the time in which the training stands still is claimed.


# %%
def check_times(mesh: DeviceMesh, folder: Path, width: int, background: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    if mesh.device_type == "cuda":
        with torch.device("cuda"):
            model = GPT(L=16, D=width, T=1024, V=32_768, heads=width // 64)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        training = (model, adam(model))
    else:
        training = new_training(mesh)
    state_of(*training)  # Adam's state is made now

    def save_in_background() -> Future:
        writer = PublishingWriter(folder / "step-000007")
        state = state_of(*training)
        options = {"process_group": background, "async_stager": DefaultStager(AT_ONCE)}
        return dcp.async_save(state, storage_writer=writer, **options)

    ways = {  # name: (how, the files that it leaves)
        "full": (lambda: save_full(*training, folder / "whole.pt"), "whole.pt"),
        "sharded": (
            lambda: save_sharded(*training, folder / "step-000006"),
            "step-000006/*.distcp",
        ),
        "asynchronous": (save_in_background, "step-000007/*.distcp"),
    }
    print0(f"{'':13}{'way':13} {'files':>5} {'MB each':>8} {'ms standing':>12} {'ms in all':>10}")
    still = {}
    for way, (save, pattern) in ways.items():
        still[way], written = time_of(save, mesh)
        sizes = [file.stat().st_size for file in folder.glob(pattern)]
        row = f"{way:13} {len(sizes):5} {max(sizes) / 1e6:8.2f} {still[way]:12.0f} {written:10.0f}"
        print0(f"{'':13}{row}")
    if mesh.device_type == "cpu":
        blocked("time standing still, asynchronous / sharded", needs="1 GPU")
        return
    share = still["asynchronous"] / still["sharded"]
    claim("time standing still, asynchronous / sharded", 0.7, share, "<=", timed=True)


def time_of(save: Callable, mesh: DeviceMesh) -> tuple[float, float]:
    """Return the milliseconds until `save()` returned, and until all was written."""
    dist.barrier()
    settle(mesh)
    start = time.perf_counter()
    future = save()
    settle(mesh)
    returned = time.perf_counter() - start
    if future:
        future.result()
    dist.barrier()
    settle(mesh)
    return 1e3 * returned, 1e3 * (time.perf_counter() - start)


def settle(mesh: DeviceMesh) -> None:
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()


# %% [markdown]
# ## What you should have seen
#
# 1. 12 bytes per parameter: 4 of the weight and 8 of Adam's two moments. Sharded, a rank's file
#    holds 12 for each element of its shards, which is 12 P/n. DCP writes every shard as a small zip
#    archive of its own, some 1.5 kB more than its elements: nothing for a real layer, of
#    megabytes, and a third of this toy's file.
# 2. 12 P on rank 0 and nothing on the others, against nothing at all. While the full state is
#    gathered, each tensor is whole on every rank for a moment. For 7 billion parameters rank 0's
#    node needs 84 GB of free memory, and the others wait until one process has written 84 GB; on 64
#    ranks each would have written 1.3 GB. On one rank nothing is gathered, and the "full" state is
#    the model itself: copy it before you train on.
# 3. None, and none. Loading copies bits, whatever the number of ranks; and the same number of ranks
#    makes the same sums in the same order. With fewer ranks the sums round otherwise, and the ends
#    lie some 0.00003 of the way apart. Forget Adam's state and it is a third of the way, in three
#    steps: the loss would show a bump and recover, and nobody would know why.
# 4. None of n, and all n. The huge weights were loaded and no error was raised. A missing or
#    shortened file DCP does refuse, by a `CheckpointException` on all ranks.
# 5. None. The folder without a name holds the other ranks' files, nobody takes it for a checkpoint,
#    and the next save removes what lies in it.
# 6. 12, and none. Three steps were taken while the writer waited, and what was loaded afterwards is
#    the state from before them. Twelve bytes per element through PCIe at some 20 GB/s take a
#    second for 20 GB per GPU; the file system may take minutes over them.
#
# **Try.** Without `.tmp` the dead rank leaves a folder that has the name of a checkpoint, and the
# two claims about names and files fail. The step that is loaded is still the right one, since the
# list of checksums is missing there: two nets are better than one. Without `async_stager` the
# writer itself stages, by older code, and it copies every shard twice: 24 bytes per element.
#
# **On GPUs** the table of section 8 is about 3.2 GB. `StagingOptions` has what makes the copy
# faster: pinned memory, copies that the GPU makes by itself, and staging in the background, which
# then has to be over before the next `optimizer.step()`.
#
# **Where it bites.** An `except Exception` around `dcp.load`, meant to fall back to the checkpoint
# before, catches nothing. `.metadata` is a pickle, so the author of a checkpoint can run code in
# your job. All ranks must see one folder: rank 0 collects the others' checksums from it. The ranks
# that wait while rank 0 writes 84 GB need a longer `timeout` of the process group than these
# lessons' two minutes. A checkpoint holds what you put into it: the order of the data, the random
# generators and the learning rate's schedule belong to it (exercises/16_resume_exactly).


# %%
def main() -> None:
    options = command_line(
        {
            "--folder": {"metavar": "PATH", "help": "for checkpoints; all nodes must see it"},
            "--width": {"type": int, "default": 1024, "help": "model width on GPUs (1024)"},
        }
    )
    launch()
    device = setup()
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    background = dist.new_group(backend="gloo")
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.folder) as temporary:
        folder = Path(from_rank_0(temporary))
        training = new_training(mesh)
        check_sizes(*training, folder)
        train(*training, mesh, steps=2)
        check_death(*training, folder)
        saved = whole_state(*training)
        another = new_training(mesh)
        check_damage(*another, folder)
        check_flipped_bits(*another, folder, saved)
        check_other_worlds(mesh, folder, saved)
        check_one_file(folder, saved)
        check_going_on(mesh, folder, training, saved)
        check_asynchronous(mesh, folder, training, background)
        check_times(mesh, folder, options.width, background)
        dist.barrier()  # the folder goes when all have read it
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
