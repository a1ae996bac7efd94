"""DataLoader's knobs: workers that load ahead of the step
=======================================================

**Question.** `DataLoader(dataset, num_workers=2)` starts processes that load batches while the
model computes. When does the model still wait for a batch, and which knob helps then?

**Predict**, and write it down before you run. A process takes 6 slots of time to load a batch, and
a training step takes 2.

1. There are no workers: the rank loads a batch, computes a step, and loads the next one. What share
   of the time does it wait for batches?
2. How many workers are just enough for it to wait no longer?
3. There are two workers, and `prefetch_factor=3`. How many batches have been asked for before the
   first one arrives?
4. There are four workers, and one batch takes 30 slots instead of 6. What is the smallest
   `prefetch_factor` with which the rank does not wait for it?
5. `persistent_workers=True` keeps the workers from one epoch to the next. How many slots does the
   rank wait for the first batch of the second epoch?

**Run.**

    torchrun --standalone --nproc-per-node=4 10_dataloader_knobs.py   # NCCL on 4 GPUs, else gloo
    python 10_dataloader_knobs.py                                     # the same, started for you

Not run on several GPUs, and section 6 not on one.

**Try.** In `EpochByHand.ask` write `pipe = self.workers[0][1]`: which claims fail? In
`EpochByHand.__init__` leave out `* factor`: which claim fails now, and why not the others?

**Before.** data-loading/01_ffcv_distributed_optimization.py: which work is divided and hidden here.

**Next.** data-loading/15_seeds_of_workers.py: the random numbers of workers.
"""

import argparse
import ctypes
import hashlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from fractions import Fraction
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

BATCHES = 81  # in an epoch
LOAD = 6  # slots that it takes a process to load one
STEP = 2  # slots of a training step

# %% [markdown]
# ## 1. Workers load ahead
#
# Without workers a rank loads a batch, computes a step, and loads the next batch. With workers it
# starts processes and hands out lists of indices, and each worker loads the samples of its lists
# while the rank computes. Below, a column is one slot of time. Loading takes 4 slots here, a step
# takes 1, and a dot is a slot in which the rank waits:
#
#     no workers   rank        .  .  .  .  0  .  .  .  .  1  .  .  .  .  2  .  .  .  .  3
#
#     two workers  worker 0    0  0  0  0  2  2  2  2  4  4  4  4  6  6  6  6  8  8  8  8
#                  worker 1    1  1  1  1  3  3  3  3  5  5  5  5  7  7  7  7  9  9  9  9
#                  rank        .  .  .  .  0  1  .  .  2  3  .  .  4  5  .  .  6  7  .  .
#
# Two workers deliver two batches in 4 slots, and the rank could use four. In general k workers
# deliver a batch every L / k slots, if a process loads one in L slots and each worker has a core.
# The rank cannot take one more often than every S slots, its step. So
#
#     a step comes every  max(S, L / k)  slots,    and without workers every  L + S.
#
# That is what workers do: **as long as L / k is at most S, loading costs cores and no time**.
#
# Batch i belongs to worker i mod k. So the rank knows whom to ask and whom to wait for, and batches
# come in order even if one worker is slower. Here is one epoch, without DataLoader; a **pipe**
# joins the rank and each worker:


# %%
def work(dataset: Dataset, pipe: Connection) -> None:
    """Be a worker: answer each list of indices with its samples, until None comes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the rank
    indices = pipe.recv()
    while indices is not None:
        pipe.send([dataset[index] for index in indices])
        indices = pipe.recv()


class EpochByHand:
    """The batches of one epoch, in order, loaded by workers."""

    def __init__(self, dataset: Dataset, batches: Iterable, workers: int, factor: int) -> None:
        fork = multiprocessing.get_context("fork")
        self.batches = iter(batches)
        self.workers = []
        for _ in range(workers):
            pipe, other_end = fork.Pipe()
            worker = fork.Process(target=work, args=(dataset, other_end), daemon=True)
            worker.start()
            self.workers.append((worker, pipe))
        self.turns = itertools.cycle(pipe for _, pipe in self.workers)
        self.pending = deque()  # the pipes from which a batch will come, in order
        for _ in range(workers * factor):
            self.ask()

    def ask(self) -> None:
        """Hand the next list of indices, if there is one, to the worker whose turn it is."""
        indices = next(self.batches, None)
        if indices is not None:
            pipe = next(self.turns)
            pipe.send(indices)
            self.pending.append(pipe)

    def __iter__(self) -> Iterator[list]:
        while self.pending:
            samples = self.pending.popleft().recv()
            self.ask()  # each batch that comes makes room for another
            yield samples
        for worker, pipe in self.workers:
            pipe.send(None)
            worker.join()


# %% [markdown]
# ## 2. How far ahead: a queue of d batches hides a stall of d steps
#
# `prefetch_factor` is the `factor` above: so many batches are asked for from each worker before the
# first one is used, and k times as many in all. Those that are ready lie in memory. This queue of
# d = k x prefetch_factor batches does one thing. If a single batch takes long, because its file is
# far away or its images are large, then the rank goes on with the d batches before it, for d S
# slots. It waits only for what the slow batch takes beyond that.
#
# No queue makes a loader faster, and it fills only if L / k is smaller than S. If they are equal,
# each batch is ready just when it is wanted, and the rank feels a slow one in full. If L / k is
# larger, the queue is emptied faster than it is filled, however long it could be.

# %% [markdown]
# ## 3. Where the queue ends: an epoch is not loaded ahead
#
# A worker is **forked**: it begins as a copy of the rank, with the dataset as it was at that
# moment. By default all workers end with the epoch and are forked anew for the next one, and what
# they had opened or cached is gone. `persistent_workers=True` keeps them. But nothing of the next
# epoch is asked for before the rank begins it, by `for batch in loader`. So the queue runs empty
# once per epoch, with persistent workers too. If epochs are short, let a sampler yield the indices
# of many.

# %% [markdown]
# ## 4. On a GPU: the copy is one more thing to hide
#
# A batch that has arrived must still be copied to the GPU, and there are three ways to do that:
#
#     .to(device)
#         host                    queues step 1 | waits . . . . . . . . . . . | queues step 2 | ...
#         GPU                     step 1 -------- copy 2 -------------------- step 2 -------- ...
#
#     pinned memory, .to(device, non_blocking=True)
#         host                    queues step 1, copy 2, step 2, copy 3, ...
#         GPU                     step 1 -------- copy 2 ------ step 2 -------- copy 3 ------ ...
#
#     the same, on a stream of its own
#         GPU, stream of steps    step 1 -------- step 2 -------- step 3 -------- ...
#         GPU, stream of copies   copy 2 ------   copy 3 ------   copy 4 ------
#
# A plain `.to(device)` keeps the **host** waiting until the copy is over. A GPU can read by itself
# only **pinned** memory, which the system never moves; what lies elsewhere goes through a small
# pinned buffer, piece by piece. With `pin_memory=True` a thread of the loader copies each batch to
# pinned memory, and `.to(device, non_blocking=True)` then only queues a copy. The host is free. But
# the copy does **not** run next to the step: a stream does what is queued on it in order, so the
# copy still stands between two steps. It is hidden only on a second stream:


# %%
def copied_ahead(batches: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield each batch on the GPU, while the next one, in pinned memory, is copied there."""
    steps = torch.cuda.current_stream()
    copies = torch.cuda.Stream()
    ready = None
    for batch in batches:
        with torch.cuda.stream(copies):
            coming = batch.to(device, non_blocking=True)
        if ready is not None:
            yield ready  # the step on it runs next to that copy
        steps.wait_stream(copies)  # the step after it begins when its batch is there
        coming.record_stream(steps)  # its memory is not used again before that step is over
        ready = coming
    if ready is not None:
        yield ready


# %% [markdown]
# All knobs together, on a rank with a GPU:
#
#     loader = DataLoader(
#         photos, batch_size, sampler=sampler,
#         num_workers=cores // ranks - 1,     # 0 is the default: the rank itself loads
#         prefetch_factor=2,                  # the default
#         persistent_workers=True,
#         pin_memory=True,
#     )
#     for image_BCHW in copied_ahead(loader, device):
#         ...

# %% [markdown]
# ## 5. How it is measured: slots
#
# Two cores cannot load and compute for four ranks at once, and no clock is needed. Each process has
# a *logical clock* (Lamport, 1978), the number of slots gone by. The rank writes the slot in which
# it asks for a batch next to the batch's number. The worker begins in that slot, or when it has
# done what it was asked before, and moves its clock on by the slots that loading takes. The batch
# brings back the slot in which it was ready. So the real DataLoader decides who loads what and when
# it is asked for, while it is assumed how long things take. These rows are simulated.


# %%
class Loaded(NamedTuple):
    """A batch: its number, the slot in which it was ready, and the process that loaded it."""

    number: int
    ready: int
    process: int


class Slow(Dataset):
    """Batches that take slots to load; each worker has a copy of this, and so a clock."""

    def __init__(self, slots: dict[int, int]) -> None:
        self.slots = slots  # of the batches that do not take LOAD
        self.now = 0

    def __getitem__(self, request: tuple[int, int]) -> Loaded:
        number, asked = request
        self.now = max(self.now, asked) + self.slots.get(number, LOAD)
        return Loaded(number, self.now, os.getpid())


class Trainer:
    """A rank: its clock, and when its steps began. Iterated, it asks for an epoch's batches."""

    def __init__(self) -> None:
        self.now = 0
        self.asked = 0
        self.starts: list[int] = []
        self.came: list[Loaded] = []

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for number in range(BATCHES):
            self.asked += 1
            yield [(number, self.now)]

    def train(self, batches: Iterable[list[Loaded]]) -> None:
        for (batch,) in batches:
            self.now = max(self.now, batch.ready)  # it waits
            self.starts.append(self.now)
            self.came.append(batch)
            self.now += STEP

    def waited(self) -> int:
        """The slots from the first step to the last in which it waits."""
        return self.starts[-1] - self.starts[0] - STEP * (len(self.starts) - 1)

    def share(self) -> Fraction:
        return Fraction(self.waited(), self.starts[-1] - self.starts[0])


# %% [markdown]
# The trainer is the loader's `batch_sampler`: the loader iterates it, and takes a list whenever it
# has room for one more.


# %%
def by_dataloader(trainer: Trainer, workers: int, slots: dict, **knobs: object) -> DataLoader:
    """Return a DataLoader of what the trainer asks for, with forked workers."""
    context = "fork" if workers else None
    knobs |= {"num_workers": workers, "multiprocessing_context": context, "collate_fn": list}
    return DataLoader(Slow(slots), batch_sampler=trainer, **knobs)


def trained(workers: int, slots: dict, factor: int | None = None) -> Trainer:
    """Train for an epoch with a DataLoader."""
    trainer = Trainer()
    trainer.train(by_dataloader(trainer, workers, slots, prefetch_factor=factor))
    return trainer


def share_by_formula(workers: int) -> Fraction:
    """The share of the time that a rank waits, as in section 1."""
    every = max(Fraction(STEP), Fraction(LOAD, workers)) if workers else Fraction(LOAD + STEP)
    return 1 - STEP / every


def check_workers() -> None:
    """Claim the share of the slots that a rank waits, by its number of workers."""
    runs = [trained(workers, {}) for workers in range(4)]
    none, one, two, three = [run.share() for run in runs]
    share = "share of slots that waits"
    simulated = {"kind": "simulated"}
    claim(f"{share}, no workers", share_by_formula(0), none, question=1, **simulated)
    claim(f"{share}, 1 worker", share_by_formula(1), one, **simulated)
    claim(f"{share}, 2 workers", share_by_formula(2), two, question=2, **simulated)
    claim(f"{share}, 3 workers", share_by_formula(3), three, question=2, **simulated)
    longer = trained(2, {}, factor=8).share()
    claim(f"{share}, 2 workers, factor 8", share_by_formula(2), longer, **simulated)
    unlike = 0
    for workers in (1, 2, 3):
        trainer = Trainer()
        trainer.train(EpochByHand(Slow({}), trainer, workers, 2))
        theirs = runs[workers].starts
        unlike += sum(a != b for a, b in zip(trainer.starts, theirs, strict=True))
    claim("by hand: steps in another slot than DataLoader's", 0, unlike, **simulated)


# %% [markdown]
# How far a loader is ahead is what it has asked for before anybody wants the first batch. That, the
# order, and which process has loaded which batch are measured, not simulated.


# %%
def check_queue() -> None:
    """Claim what is asked for in advance, in which order it comes, and what the queue hides."""
    for name in ("DataLoader", "by hand"):
        trainer = Trainer()
        if name == "DataLoader":
            epoch = iter(by_dataloader(trainer, 2, {}, prefetch_factor=3))
        else:
            epoch = EpochByHand(Slow({}), trainer, 2, 3)
        claim(f"{name}: asked for before the first", 2 * 3, trainer.asked, question=3)
        trainer.train(epoch)
        came = trainer.came
        in_place = sum(batch.number == place for place, batch in enumerate(came))
        claim(f"{name}: batches in their place", BATCHES, in_place)
        by_0 = [batch.number for batch in came if batch.process == came[0].process]
        claim(f"{name}: of them by worker 0", len(range(0, BATCHES, 2)), len(by_0))
    slow = "slots waited for a slow batch, factor"
    waited = {factor: trained(4, {60: 30}, factor).waited() for factor in (2, 3, 4)}
    claim(f"{slow} 2", 30 - 4 * 2 * STEP, waited[2], kind="simulated")
    claim(f"{slow} 3", 30 - 4 * 3 * STEP, waited[3], question=4, kind="simulated")
    claim(f"{slow} 4", 0, waited[4], question=4, kind="simulated")


def check_epochs() -> None:
    """Claim who loads in two epochs, and how long the rank waits for the second one to begin."""
    first = {}
    for persistent in (False, True):
        trainer = Trainer()
        loader = by_dataloader(trainer, 2, {}, persistent_workers=persistent)
        trainer.train(loader)
        ended = trainer.now
        trainer.train(loader)
        first[persistent] = trainer.starts[BATCHES] - ended
        processes = len({batch.process for batch in trainer.came})
        name = "persistent" if persistent else "not persistent"
        claim(f"workers in two epochs, {name}", 2 if persistent else 4, processes)
    wait = "slots waited as epoch 2 begins"
    claim(f"{wait}, not persistent", LOAD, first[False], kind="simulated")
    claim(f"{wait}, persistent", LOAD, first[True], question=5, kind="simulated")


# %% [markdown]
# One row is by the clock, on rank 0 while the others wait. Loading a batch and a step are the same
# real work there, so with one worker and two cores an epoch takes half as long.


# %%
class Hashed(Dataset):
    """20 batches, each of which takes real work."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> bytes:
        return real_work()


def real_work() -> bytes:
    return hashlib.sha256(bytes(2**23)).digest()


def seconds_of_an_epoch(workers: int) -> float:
    """Return the time from the first step to the end of the last."""
    context = "fork" if workers else None
    knobs = {"num_workers": workers, "multiprocessing_context": context, "collate_fn": list}
    start = None
    for _ in DataLoader(Hashed(), **knobs):
        start = start or time.perf_counter()
        real_work()
        end = time.perf_counter()
    return end - start


def check_real_work() -> None:
    """Claim, of rank 0, that a worker halves an epoch of equally long loading and steps."""
    ratio = 0.0
    if RANK == 0:
        ratio = statistics.median(seconds_of_an_epoch(1) / seconds_of_an_epoch(0) for _ in range(3))
    claim("time of real work, 1 worker / none", 0.5, ratio, atol=0.25, timed=True, rank=0)


# %% [markdown]
# ## 6. On GPUs: the share that waits
#
# On a GPU a step is real: matrix products. Two CUDA events around each say how long it computes,
# and what is missing between the first event and the last is waiting.
#
# First the loader. A step is made to compute half as long as one process loads its batch. One thing
# is different from section 1: a GPU works on its own, so even without workers the rank loads while
# the GPU computes. A step comes every max(S, L) then, and the GPU waits half of the time. With
# workers and `copied_ahead` it should not wait.
#
# Then the copy alone, of a batch that lies in pinned memory. A step is made to take twice as long
# as the copy. On one stream a third of the time is waiting, on a second stream nothing.


# %%
class Crops(Dataset):
    """Random crops of one image, resized to 224 x 224 in float32."""

    def __init__(self) -> None:
        self.image_1CHW = torch.rand(1, 3, 375, 500)

    def __len__(self) -> int:
        return 1024  # 32 batches

    def __getitem__(self, index: int) -> torch.Tensor:
        side = int(torch.randint(100, 375, ()))
        crop_1CHW = self.image_1CHW[:, :, :side, :side]
        return torch.nn.functional.interpolate(crop_1CHW, (224, 224), mode="bilinear")[0]


def share_that_waits(batches: Iterable[torch.Tensor], step: Callable) -> float:
    """Return the share of the time, from the first step on, in which the GPU computes no step."""
    events = []
    for _ in batches:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    computing = sum(begin.elapsed_time(end) for begin, end in events)
    return 1 - computing / events[0][0].elapsed_time(events[-1][1])


def seconds_of(work: Callable) -> float:
    """Return how long this takes, the GPU's part too; the second time counts."""
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
    return taken


# %% [markdown]
# A step is as many products as take the time that is wanted.

# %%
WAITS = "share that waits on a GPU"


def step_of(wanted: float, device: torch.device) -> Callable:
    """Return matrix products that take this rank's GPU so many seconds."""
    weight_DD = torch.randn(4096, 4096, device=device)
    products = max(1, round(wanted / seconds_of(lambda: torch.mm(weight_DD, weight_DD))))

    def step() -> None:
        for _ in range(products):
            torch.mm(weight_DD, weight_DD)

    return step


def check_loading_on_gpus(device: torch.device, cores: int) -> None:
    """Claim the share of the time in which this rank's GPU waits, before and after."""
    plain = DataLoader(Crops(), 32)
    step = step_of(seconds_of(lambda: next(iter(plain))) / 2, device)
    share = share_that_waits((images_BCHW.to(device) for images_BCHW in plain), step)
    claim(f"{WAITS}, no workers", 1 / 2, share, atol=0.1, timed=True)
    knobs = {"num_workers": cores - 1, "pin_memory": True, "multiprocessing_context": "fork"}
    share = share_that_waits(copied_ahead(DataLoader(Crops(), 32, **knobs), device), step)
    claim(f"{WAITS}, all knobs turned", 0, share, atol=0.1, timed=True)


def check_copies_on_gpus(device: torch.device) -> None:
    """Claim the share of the time in which this rank's GPU waits for copies."""
    batch = torch.zeros(2**28, dtype=torch.uint8, pin_memory=True)
    step = step_of(2 * seconds_of(lambda: batch.to(device, non_blocking=True)), device)
    queued = (batch.to(device, non_blocking=True) for _ in range(20))
    share = share_that_waits(queued, step)
    claim(f"{WAITS}, copies on one stream", 1 / 3, share, atol=0.1, timed=True)
    share = share_that_waits(copied_ahead(itertools.repeat(batch, 20), device), step)
    claim(f"{WAITS}, copies on their own", 0, share, atol=0.1, timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. Three quarters: a step comes every 6 + 2 slots, and 6 of these are loading.
# 2. Three: 6 / 3 is 2, the step. With one worker the rank waits two thirds of the time, with two a
#    third. A fourth worker would change nothing.
# 3. Six, 3 for each of two workers. Batches of tensors lie in shared memory: 32 crops of 224 x 224
#    floats have 19 MB, and in a container with the usual 64 MB of /dev/shm six of them end in a bus
#    error (`docker run --shm-size` or `--ipc=host`).
# 4. Four: 16 batches ahead are 32 slots of steps, and the slow batch takes 30. With 3 the rank
#    waits 6 slots, and with 2, the default, 14. Two workers are too slow for all batches, so for
#    them even a factor of 8 changes nothing: they leave the rank a third of the time to wait.
# 5. All six, as without. What persistent workers save is the fork, and opening files and filling
#    caches anew. Two processes load both epochs, and without it four do.
#
# The loader by hand starts each step in the same slot as DataLoader. With real work one worker
# about halves the time, if it has a core of its own: max(L, L) in place of L + L.
#
# **Try.** If all lists go to worker 0, two and three workers are no better than one: the steps of
# the loader by hand come in other slots, and worker 0 has loaded all 81 batches, so two claims
# fail. Without `* factor` only two batches are asked for before the first, and that claim fails. No
# step comes later, for as long as all batches take equally long a queue has nothing to hide.
#
# **Which knob when.** Measure first whether the step waits. Then turn up `num_workers` until L / k
# is below the step, or until one core per rank is left, which the rank itself needs. More workers
# than cores help only if they wait for a disk or a network. Raise `prefetch_factor` if batches take
# unequally long and there is memory for it. Turn on `persistent_workers` if epochs are short or a
# dataset is slow to open, and `pin_memory` with `non_blocking` on any GPU; add a stream if the copy
# is long next to the step. If all cores are busy and the step still waits, no knob helps: the work
# per image must become less (data-loading/01).
#
# **Where it bites.** A list of a million paths is shared between workers at the fork, and copied
# page by page as soon as they read it, since Python counts references in the objects themselves; a
# NumPy array stays shared. What has threads or a CUDA context at the fork may hang or fail in a
# worker: make it in the worker. Python 3.14 starts processes by `forkserver` unless told otherwise,
# and pickles the dataset. And a copy that is queued reads the batch later: do not write to pinned
# memory before the copy is over.
#
# On a thousand ranks every step waits for the slowest loader, since gradients are reduced over all
# of them. One slow file anywhere then holds up everybody, unless the queue hides it.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    check_workers()
    check_queue()
    check_epochs()
    check_real_work()
    cores = len(os.sched_getaffinity(0)) // WORLD_SIZE  # for this rank
    if device.type == "cuda" and cores >= 4:
        check_loading_on_gpus(device, cores)
        check_copies_on_gpus(device)
    else:
        ways = ("no workers", "all knobs turned", "copies on one stream", "copies on their own")
        for way in ways:
            text = f"{WAITS}, {way}"
            blocked(text, needs="1 GPU" if device.type == "cpu" else "4 cores per GPU")
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
