"""Exactly once: which samples a loader delivers, and where it goes on after a stop
================================================================================

**Question.** An epoch should train on every sample exactly once, on any number of ranks, and also
if the run stops in the middle and goes on later. Where do loaders repeat samples or leave some out,
and how many?

**Predict**, and write it down before you run. There are 997 samples and 4 ranks, and every rank's
loader makes batches of 8.

1. A DataLoader with a `DistributedSampler` runs through an epoch. How many samples come twice?
2. FFCV's `Loader` has `drop_last=True` unless told otherwise. How many samples never come?
3. The run stops when each rank has trained on three batches. It goes on with new loaders, which
   begin the same epoch again. How many samples come a second time?
4. In another run the sampler counts the samples that it has handed to its DataLoader, which has two
   workers and `prefetch_factor=2`. After three batches per rank the count is saved, and a new
   sampler goes on from there. How many samples never come?

**Run.**

    torchrun --standalone --nproc-per-node=4 14_exactly_once.py    # NCCL on 4 GPUs, else gloo
    python 14_exactly_once.py                                      # the same, started for you

Not run on several GPUs. One node. FFCV needs the Debian packages of packages.txt, then `pip install
-e '.[ffcv]'`; without it its rows are BLOCKED.

**Try.** In `OneLine.__iter__` write `self.consumed = asked`: which claims fail, and why? In
`data_loader` add `drop_last=True` to what `DataLoader` is given: which claims fail now?

**Before.** data-loading/06_tokens.py: one global order, and ranks that cut it.
data-loading/10_dataloader_knobs.py: workers that work ahead.

**Next.** benchmarks/loaders.py: eight loaders on 1, 2 and 4 ranks, and what comes twice or again
from each. Its table is in data-loading/README.md.
"""

import argparse
import contextlib
import ctypes
import functools
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

Loader = None
if "RANK" in os.environ:  # a launcher needs none of it
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from numba import config

        config.DISABLE_JIT = True  # FFCV in plain Python: slow, the same values, and there at once
        from ffcv import writer as ffcv_writer
        from ffcv.fields import IntField
        from ffcv.loader import Loader, OrderOption
        from ffcv.writer import DatasetWriter

N = 250 * WORLD_SIZE - 3  # samples in an epoch: 997 on 4 ranks
BATCH = 8  # samples per step on each rank
STEP = BATCH * WORLD_SIZE  # samples per step on all ranks
WORKERS = 2  # of a DataLoader
PREFETCH = 2  # batches that each worker is asked for in advance
AHEAD = 3  # batches that the thread of our own loader is asked for
STOP = 3  # batches that each rank trains on before a stop
SEED = 0

# %% [markdown]
# ## 1. An epoch is dealt out, then cut into batches
#
# A sample that comes twice in an epoch weighs double, and one that never comes is never learned. No
# error says so, and a loss curve hardly shows it. So a loader is judged by a list: the samples that
# it delivered. In an epoch each should come **exactly once**.
#
# Most loaders make their batches by two cuts. The order of the epoch, shuffled alike on all ranks,
# is dealt out like cards: that is a rank's **share**. Then each rank cuts its share into batches.
# Here is the end of an epoch with 997 samples, o0 to o996, on 4 ranks with batches of 8:
#
#     place of the share     ...   246   247  |   248   249
#     rank 0                 ...  o984  o988  |  o992  o996
#     rank 1                 ...  o985  o989  |  o993  o0
#     rank 2                 ...  o986  o990  |  o994  o1
#     rank 3                 ...  o987  o991  |  o995  o2
#                   31 batches of 8 on a rank |  2 places are left
#
# Neither cut comes out even. Ranks must take equally many steps, or one of them would wait in an
# all-reduce for the others forever. So `DistributedSampler` **pads**: the first samples of the
# order come once more, in the last places. Then two places are left, which make a short batch. A
# DataLoader delivers it. With `drop_last=True` a loader **drops** it, on every rank, since compiled
# code and CUDA graphs like all batches to have one size. FFCV's `Loader` drops it unless told.
#
# The dataset of this lesson is `range(N)`, so sample i is the number i, and a batch says itself
# what it holds. FFCV reads the same numbers from a file, in an order that a `DistributedSampler` of
# its own deals out.


# %%
def data_loader(sampler: DistributedSampler) -> DataLoader:
    """Return a DataLoader of this rank's share."""
    options = {"num_workers": WORKERS, "prefetch_factor": PREFETCH}
    options |= {"multiprocessing_context": "fork", "worker_init_fn": end_with_the_rank}
    return DataLoader(range(N), BATCH, sampler=sampler, collate_fn=np.array, **options)


def end_with_the_rank(worker: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def ffcv_loader(path: Path, **options: object) -> "Loader":
    """Return FFCV's loader of this rank's share."""
    options = {"order": OrderOption.RANDOM, "distributed": True, "seed": SEED} | options
    return Loader(str(path), BATCH, num_workers=1, **options)


# %% [markdown]
# ## 2. A stop in mid-epoch: whose count is saved?
#
# A run stops when each rank has trained on three batches, b0 to b2, and later goes on with new
# loaders. Seed and epoch give them the same order again. What has to be saved is the place in it.
# But loaders work ahead. A DataLoader asks its workers for 2 x 2 batches before it delivers the
# first, and for one more with each that it delivers. So when b2 is delivered, its sampler has
# already handed out b3 to b6:
#
#     a rank's share             b0  b1  b2  |  b3  b4  b5  b6  |  b7  b8  ...
#                                trained on  |  prefetched      |  not asked for yet
#
#     nothing is saved           ^ the new loader begins here: b0 to b2 come again
#     the sampler's count                                          ^ here: b3 to b6 never come
#     the trainer's count                       ^ here: nothing comes again, nothing is lost
#
# This is the idea of the lesson: **the place of a run is what its trainer was given**, not what
# some part of the loader has reached. Nothing else knows what was trained on. `Share` is a
# `DistributedSampler` that can begin at any place of a share, and that counts what it hands out, so
# that both counts can be tried:


# %%
class Share(DistributedSampler):
    """This rank's share of the epoch, from place `first` on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__(range(N), seed=SEED)
        self.first = first  # 0 again before the next epoch
        self.handed_out = first

    def __iter__(self) -> Iterator[int]:
        for sample in itertools.islice(super().__iter__(), self.first, None):
            self.handed_out += 1
            yield sample


# %% [markdown]
# FFCV's loader has no sampler to replace. But it tells the order, and it can read a list of samples
# as it stands:


# %%
def rest_by_ffcv(path: Path, trained: int) -> "Loader":
    """Return FFCV's loader of the places of this rank's share from `trained` on."""
    share = ffcv_loader(path).next_traversal_order()
    as_it_stands = {"order": OrderOption.SEQUENTIAL, "distributed": False}
    return ffcv_loader(path, indices=share[trained:], **as_it_stands)


# %% [markdown]
# ## 3. By hand: one line for all ranks, and one integer
#
# Two troubles remain, and both come from shares: these are padded to equal lengths, and a count in
# a share of four ranks has to be translated for two, by someone who knows how the library deals
# them. A loader without shares has neither. It numbers
# the **positions** of the whole run in one line, epoch after epoch (data-loading/06). A step takes
# the next 32 positions, wherever an epoch ends, and rank r of n takes every n-th of these:
#
#     position    0   1   2   3  ...  31 | 32  33  ...   | ... 991 | 992 ... 996  997 ... 1023 | ...
#     step             step 0            |    step 1     | ...     |  step 31                  |
#     epoch       0   0   0   0  ...   0 |  0   0  ...   | ...   0 |   0 ...   0    1 ...    1 | ...
#
# So nothing is repeated or left out where an epoch ends, and the place of the run is one integer,
# `consumed`: the positions that the trainers of all ranks were given. This loader works ahead as
# well, by a thread. It counts a step when it hands the step to the trainer, and not when it asks
# the thread for it. The random numbers of a crop are part of a sample, too. Here one **draw**
# stands for them, seeded by the position, so that it is the same after a stop.


# %%
@functools.lru_cache(maxsize=2)
def order(epoch: int) -> np.ndarray:
    return np.random.default_rng([SEED, epoch]).permutation(N)


class OneLine:
    """This rank's samples and draws, step after step, without end."""

    def __init__(self, rank: int, ranks: int, consumed: int = 0) -> None:
        self.rank = rank
        self.ranks = ranks
        self.consumed = consumed  # positions that all trainers were given: the whole state

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        asked = self.consumed
        pending = deque()
        with ThreadPoolExecutor(1) as thread:
            while True:
                pending.append(thread.submit(self.load, asked))
                asked += STEP
                if len(pending) == AHEAD:
                    batch = pending.popleft().result()
                    self.consumed += STEP
                    yield batch

    def load(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Load this rank's samples of the step that begins at position `first`."""
        samples = []
        draws = []
        for position in range(first + self.rank, first + STEP, self.ranks):
            epoch, place = divmod(position, N)
            samples.append(order(epoch)[place])
            draws.append(np.random.default_rng([SEED, position]).random())
        return np.array(samples), np.array(draws)


# %% [markdown]
# ## 4. How it is measured: count what was delivered
#
# Every rank iterates over its loader and keeps what comes. Then all ranks put their lists together
# and count how often each sample came.


# %%
def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def delivered(loader: Iterable, steps: int | None = None) -> np.ndarray:
    """Return the samples of this rank's first batches, or of all."""
    batches = iter(loader)
    samples = []
    for batch in itertools.islice(batches, steps):
        first = batch[0] if isinstance(batch, tuple) else batch  # of FFCV's fields
        samples.append(np.asarray(first).flatten())  # a copy: FFCV fills its batches again
    if hasattr(batches, "close"):
        batches.close()  # else FFCV's thread goes on
    return np.concatenate(samples)


def counts(samples: np.ndarray) -> np.ndarray:
    """Return how often each of the N samples came, over all ranks."""
    return np.bincount(np.concatenate(gather_objects(samples)), minlength=N)


def places_unlike(some: np.ndarray, others: np.ndarray) -> int:
    """Return in how many places two lists of samples differ, if one of them ends or not."""
    both = min(len(some), len(others))
    return (some[:both] != others[:both]).sum() + abs(len(some) - len(others))


# %% [markdown]
# **DataLoader.** An epoch without a stop comes first, and then three runs that stop. Padding stands
# at the end of a share, so a rank's last sample tells whether its share was padded.


# %%
def due_of_last(padded: int) -> int:
    """Return how often this rank's last sample is due: the last ranks' shares are padded."""
    return 2 if WORLD_SIZE - padded <= RANK else 1


def check_data_loader() -> None:
    """Claim which samples a DataLoader delivers, without and with a stop."""
    padded = -N % WORLD_SIZE
    epoch = delivered(data_loader(Share()))
    times = counts(epoch)
    claim("DataLoader: samples that never come", 0, (times == 0).sum())
    claim("DataLoader: samples that come twice", padded, (times == 2).sum(), question=1)
    last = times[epoch[-1]]
    claim("DataLoader: how often a rank's last one comes", due_of_last(padded), last)

    sampler = Share()
    before = delivered(data_loader(sampler), STOP)
    begun_again = delivered(data_loader(Share()), STOP)
    again = (counts(before) > 0) & (counts(begun_again) > 0)
    claim("DataLoader, nothing saved: come again", STOP * STEP, again.sum(), question=3)
    after = delivered(data_loader(Share(sampler.handed_out)))
    never = counts(np.concatenate([before, after])) == 0
    lost = WORKERS * PREFETCH * STEP
    claim("DataLoader, sampler's count: never come", lost, never.sum(), question=4)
    after = delivered(data_loader(Share(len(before))))
    wrong = places_unlike(np.concatenate([before, after]), epoch)
    claim("DataLoader, trainer's count: places unlike", 0, wrong)


# %% [markdown]
# **FFCV.** Rank 0 writes the file. It lies in a temporary folder, inside the launcher's own if
# there is one, which is removed even after Ctrl-C. Of what a rank drops, padding is no loss.


# %%
class Nameless(shared_memory.SharedMemory):
    """Shared memory that forked processes inherit, and that no kill leaves behind by its name."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)
        super().unlink()

    def unlink(self) -> None:
        """Nothing: its name went when it came."""


def write_numbers(path: Path) -> None:
    """Write an FFCV file whose sample i is the number i."""
    multiprocessing.set_start_method("fork", force=True)  # its writer inherits the shared memory
    ffcv_writer.shared_memory = SimpleNamespace(SharedMemory=Nameless)
    writer = DatasetWriter(str(path), {"number": IntField()}, num_workers=1)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        writer.from_indexed_dataset([(number,) for number in range(N)])
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


def check_ffcv(path: Path) -> None:
    """Claim which samples FFCV delivers, without and with a stop."""
    places = math.ceil(N / WORLD_SIZE)  # of each share
    padded = -N % WORLD_SIZE
    dropped = places % BATCH
    lost = WORLD_SIZE * dropped - padded if dropped else 0
    epoch = delivered(ffcv_loader(path))
    claim("FFCV: samples that a rank is given", places - dropped, len(epoch))
    claim("FFCV: samples that never come", lost, (counts(epoch) == 0).sum(), question=2)
    whole = delivered(ffcv_loader(path, drop_last=False))
    times = counts(whole)
    claim("FFCV, drop_last=False: never come", 0, (times == 0).sum())
    claim("FFCV, drop_last=False: come twice", padded, (times == 2).sum())
    last = times[whole[-1]]
    claim("FFCV, drop_last=False: a rank's last one comes", due_of_last(padded), last)

    before = delivered(ffcv_loader(path), STOP)
    begun_again = delivered(ffcv_loader(path), STOP)
    again = (counts(before) > 0) & (counts(begun_again) > 0)
    claim("FFCV, nothing saved: come again", STOP * STEP, again.sum(), question=3)
    after = delivered(rest_by_ffcv(path, len(before)))
    wrong = places_unlike(np.concatenate([before, after]), epoch)
    claim("FFCV, trainer's count: places unlike", 0, wrong)


# %% [markdown]
# **By hand.** All ranks run the line to the end of the epoch. Then they stop after three steps, and
# half of them go on from `consumed`. What came is put back into the line's order, so that the two
# runs can be compared position by position.


# %%
def run_line(ranks: int, consumed: int, steps: int) -> tuple[np.ndarray, int]:
    """Let so many ranks take steps; return the line's samples and draws, (2, K), and `consumed`."""
    loader = OneLine(RANK, ranks, consumed)
    mine = []
    if RANK in range(ranks):
        mine = [np.stack(batch) for batch in itertools.islice(loader, steps)]
    line = np.empty((steps, 2, STEP))
    for rank, taken in enumerate(gather_objects(mine)[:ranks]):
        line[:, :, rank::ranks] = taken
    return np.hstack(line), gather_objects(loader.consumed)[0]


def check_one_line() -> None:
    """Claim which samples the loader by hand delivers, without and with a stop."""
    steps = math.ceil(N / STEP)
    samples, draws = run_line(WORLD_SIZE, 0, steps)[0]
    times = np.bincount(samples[:N].astype(int), minlength=N)
    claim("by hand: samples that do not come once", 0, (times != 1).sum())
    before, consumed = run_line(WORLD_SIZE, 0, STOP)
    after, _ = run_line(max(1, WORLD_SIZE // 2), consumed, steps - STOP)
    with_stop = np.hstack([before, after])
    claim("by hand, half the ranks go on: samples unlike", 0, (with_stop[0] != samples).sum())
    claim("by hand, half the ranks go on: draws unlike", 0, (with_stop[1] != draws).sum())


# %% [markdown]
# ## What you should have seen
#
# With 4 ranks:
#
# 1. Three, since -997 mod 4 = 3: o0, o1 and o2, as the last ones of ranks 1, 2 and 3. All others
#    come once.
# 2. Five. Each rank drops two places, which makes eight, and three of the eight are padding. With
#    `drop_last=False` FFCV delivers what a DataLoader does.
# 3. 96 = 3 x 8 x 4, all that was trained on. FFCV does the same. A run that often stops trains more
#    on the beginnings of its epochs than on their ends.
# 4. 128 = 4 x 8 x 4: on each rank the four batches that lay prefetched when the run stopped. It
#    looks like a clean restart, and with more workers it loses more.
#
# With the trainer's count both libraries deliver, batch by batch, what a run without a stop does.
# The loader by hand does so when half as many ranks go on, too, with nothing to translate.
#
# **Try.** `asked` is two steps ahead of what the trainer has, so two steps never come. After the
# stop every position is another one than it should be: both claims about half the ranks fail. With
# `drop_last=True` four claims about DataLoader fail: 5 samples never come, none comes twice, the
# last one of every rank comes once, and question 4 has 128 + 5 lost. The trainer's count still
# passes: it is compared with an epoch that drops the same places.
#
# **Which to take when.**
#
#     training, set_epoch called            padding or drop_last: it hits others in each epoch
#     evaluation                            neither: unequal shares, and sums and counts all-reduced
#     an epoch takes minutes                after a stop begin it again
#     an epoch takes hours or days          the trainer's count; StatefulDataLoader of torchdata
#                                           saves it, and the random states of its workers
#     another number of ranks may go on     one line and one integer, as language models do
#
# **On GPUs** the lists are made on the host, so nothing changes. If batches are copied to the GPU
# one step ahead, the loader has delivered a batch that was not trained on: count after
# `optimizer.step()`. **On a thousand ranks** with batches of 8, padding repeats up to 999 samples
# and `drop_last` leaves out up to 7,000, which matters if N is small. A wrong count loses 32,000 at
# each restart.


# %%
def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a file, got {WORLD_SIZE} ranks on several")
    setup()
    check_data_loader()
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    if Loader is None:
        blocked(
            "FFCV: samples of an epoch, and after a stop", needs="FFCV: pip install -e '.[ffcv]'"
        )
    else:
        with tempfile.TemporaryDirectory(dir=Path(errors).parent if errors else None) as own:
            path = Path(gather_objects(own)[0]) / "numbers.beton"
            if RANK == 0:
                write_numbers(path)
            dist.barrier()
            check_ffcv(path)
            dist.barrier()  # the folder goes when all have read it
    check_one_line()
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
