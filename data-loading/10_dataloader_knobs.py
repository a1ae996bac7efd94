"""DataLoader's knobs: a worker is a forked copy that works ahead
==============================================================

**Question.** `DataLoader(dataset, num_workers=2)` starts processes that load batches while the
model computes. What does each of its knobs change, and why may all workers of all ranks crop their
images alike?

**Predict**, and write it down before you run. Each of n ranks reads two epochs of 64 samples
through a DataLoader with two workers. All ranks were seeded alike, since they train one model.

1. The dataset makes a NumPy Generator in `__init__` and draws each sample's crop from it. How many
   different crops are among these 128 n?
2. The dataset draws each crop by `torch.randint` instead. How many different ones now?
3. How many processes does each rank start for its two epochs? And with `persistent_workers=True`?
4. `prefetch_factor=3`. How many batches have been asked for before the first one arrives?
5. A step computes half as long as one process needs to load its batch. What share of the time does
   the rank wait for batches without workers, with one, and with two?

**Run.**

    torchrun --standalone --nproc-per-node=4 10_dataloader_knobs.py   # NCCL on 4 GPUs, else gloo
    python 10_dataloader_knobs.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `own_generator` write `SEED` for `torch.initial_seed()`: which claim fails, and how
many different draws are left? In `check_draws` leave out `generator=seeds`: which ones now?

**Before.** data-loading/01_ffcv_distributed_optimization.py: which work is divided and hidden here.

**Next.** data-loading/02_beton_file.py: FFCV's file; without FFCV,
data-loading/09_one_file_two_nodes.py.
"""

import argparse
import ctypes
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

SAMPLES = 64
BATCH = 4
WORKERS = 2
FACTOR = 3  # batches that each worker is asked for in advance
SEED = 0
ALIKE = "different draws of torch, ranks seeded alike"

# %% [markdown]
# ## 1. A worker is a forked copy of its rank, and works ahead
#
# Without workers a rank loads a batch, computes a step, loads the next batch. With workers it forks
# processes and hands out lists of indices. Each worker loads the samples of its lists, while the
# rank computes:
#
#     rank        fork, ask for 0 to 5 | take 0, ask for 6, step | take 1, ask for 7, step | ...
#     worker 0        load 0           load 2           load 4           load 6 ...
#     worker 1        load 1           load 3           load 5           load 7 ...
#
# Batch i belongs to worker i mod 2, so the rank knows whom to ask and whom to wait for, and batches
# come in order even if one worker is slower. That is all of it. Here it is without DataLoader, for
# one epoch. A **pipe** joins the rank and each worker:


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
# Each knob of `DataLoader` is a word of that title. It **works**: `num_workers` says how many do,
# and a worker makes whole batches, so the first one is no earlier with more of them. It works
# **ahead**: `prefetch_factor` batches per worker are asked for before the first is used, and lie in
# memory if the rank is slow. It is **forked**: that happens anew in every epoch, and whatever the
# last worker had opened or cached is gone, unless `persistent_workers=True`. And it is a **copy**:
# that is the next section.

# %% [markdown]
# ## 2. The copy inherits the random numbers
#
# A forked worker has all that its rank had, at the moment of the fork: the dataset, and every
# random generator in the state it was in. So each worker draws what the other draws, and since
# nothing that a worker draws comes back to the rank, the workers of the next epoch draw it again.
# Below, a dataset says what each sample's crop could be drawn from:


# %%
class Draws(Dataset):
    """A number from each source of random numbers, and the process that drew it."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(SEED)  # made before the workers are

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {
            "index": index,
            "its own generator": int(self.generator.integers(2**62)),
            "torch": int(torch.randint(2**62, ())),
            "random": random.getrandbits(62),
            "numpy": int(np.random.randint(2**62)),
            "process": os.getpid(),
        }


# %% [markdown]
# `DataLoader` knows this. In each worker it seeds the **global** generators of `torch`, `random`
# and NumPy, by a base seed and the worker's number. The rank draws a new base seed for every epoch,
# from torch's global state. Two holes remain. A generator that the dataset has made for itself is
# not global, so it is copied as it was. And ranks that are seeded alike draw the same base seeds.
#
# The first hole is closed by `worker_init_fn`, which each worker calls when it starts; there
# `torch.initial_seed()` returns the worker's own seed. The second is closed by `generator`, from
# which the loader then draws its base seeds.


# %%
def own_generator(worker: int) -> None:
    """Give a worker's copy of the dataset a generator of its own: to be its worker_init_fn."""
    dataset = torch.utils.data.get_worker_info().dataset
    dataset.generator = np.random.default_rng(torch.initial_seed())


def loader_of(dataset: Dataset, workers: int = WORKERS, **knobs: object) -> DataLoader:
    """Return a loader with forked workers, whose batches are lists of samples."""
    knobs |= {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    return DataLoader(dataset, collate_fn=list, **knobs)


# %% [markdown]
# ## 3. What a worker does ahead is hidden behind the step
#
# If one core needs L seconds per batch, a batch comes every L / num_workers seconds. A step that
# takes no less than that finds its batch ready, and loading costs nothing but cores. If the step is
# shorter, no `prefetch_factor` helps: a queue that is emptied faster than it is filled is empty.
#
# On a GPU one thing is left to hide, the copy to its memory. A plain `.to(device)` first copies the
# batch to **pinned** memory, which the system never moves and the GPU can read by itself, and the
# host waits. With `pin_memory=True` a thread of the loader has done that first copy before, and
# `non_blocking=True` says not to wait for the second. So this is how a rank with a GPU loads:
#
#     loader = DataLoader(
#         photos, batch_size,
#         num_workers=cores // ranks,     # 0 is the default: the rank itself loads
#         prefetch_factor=2,              # the default
#         persistent_workers=True,
#         pin_memory=True,
#         worker_init_fn=own_generator,
#         generator=torch.Generator().manual_seed(seed + rank),
#     )
#     for image_BCHW, label_B in loader:
#         image_BCHW = image_BCHW.to(device, non_blocking=True)   # from pinned memory only
#
# One number says whether all that is enough, measured around the step:


# %%
def share_that_waits(batches: Iterable, step: Callable) -> float:
    """Return the share of the time, from the first step on, in which the rank waits for a batch."""
    computing = 0.0
    start = None
    for batch in batches:
        begin = time.perf_counter()
        step(batch)
        end = time.perf_counter()
        computing += end - begin
        start = start or begin  # nothing can hide the first batch
    return 1 - computing / (end - start)


# %% [markdown]
# ## 4. How it is measured
#
# Drawn numbers lie below 2^62, so they are not equal by chance. The different ones are counted over
# all ranks and both epochs. Workers are told apart by their process numbers.


# %%
def two_epochs(epoch: Callable[[], Iterable]) -> dict[str, int]:
    """Read two epochs on every rank; return how many different values of each kind came."""
    torch.manual_seed(SEED)  # alike on every rank, as for one model
    np.random.seed(SEED)
    drawn = defaultdict(set)
    for _ in range(2):
        for sample in itertools.chain.from_iterable(epoch()):
            for kind, value in sample.items():
                drawn[kind].add(value)
    everywhere = gather_objects(drawn)
    different = {}
    for kind in drawn:
        different[kind] = len(set.union(*[one[kind] for one in everywhere]))
    return different


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def check_draws() -> None:
    """Claim how many different numbers are drawn by hand, by DataLoader, and by a cured one."""
    alone = SAMPLES // WORKERS  # what one worker draws in an epoch
    by_hand = two_epochs(lambda: EpochByHand(Draws(), lists_of_indices(), WORKERS, FACTOR))
    for kind in ("its own generator", "torch", "numpy"):
        claim(f"by hand: different draws of {kind}", alone, by_hand[kind])
    naive_loader = loader_of(Draws(), batch_size=BATCH)
    naive = two_epochs(lambda: naive_loader)
    forked = naive["its own generator"]
    claim("different draws, generator made before the fork", alone, forked, question=1)
    if WORLD_SIZE > 1:
        claim(ALIKE, 2 * SAMPLES, naive["torch"], question=2)
    else:
        blocked(ALIKE, needs="2 ranks")
    seeds = torch.Generator().manual_seed(SEED + RANK)  # of which base seeds are drawn
    knobs = {"worker_init_fn": own_generator, "persistent_workers": True}
    cured_loader = loader_of(Draws(), batch_size=BATCH, generator=seeds, **knobs)
    cured = two_epochs(lambda: cured_loader)
    for kind in ("its own generator", "torch", "random", "numpy"):
        claim(f"different draws of {kind}, cured", 2 * SAMPLES * WORLD_SIZE, cured[kind])
    for text, counted, times in (("", naive, 2), (", persistent", cured, 1)):
        started = counted["process"] / WORLD_SIZE
        claim(f"workers of a rank in two epochs{text}", times * WORKERS, started, question=3)


def lists_of_indices() -> Iterator[list[int]]:
    """Yield the indices of each batch, in order."""
    for start in range(0, SAMPLES, BATCH):
        yield list(range(start, start + BATCH))


# %% [markdown]
# How far ahead a loader works is what it has taken from its lists of indices before anybody wanted
# the first batch. The samples then come in their order, though the first batch takes longest.


# %%
class SlowAtFirst(Dataset):
    """The index of each sample; the first batch takes longer than the second."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        if index < BATCH:
            time.sleep(0.02)
        return index


def check_working_ahead() -> None:
    """Claim how many batches are asked for before the first, and that they come in order."""
    taken = []

    def noted() -> Iterator[list[int]]:
        for indices in lists_of_indices():
            taken.append(indices)
            yield indices

    def by_dataloader(lists: Iterable) -> Iterator:
        return iter(loader_of(SlowAtFirst(), batch_sampler=lists, prefetch_factor=FACTOR))

    def by_hand(lists: Iterable) -> EpochByHand:
        return EpochByHand(SlowAtFirst(), lists, WORKERS, FACTOR)

    asked = {}
    for name, begin in {"DataLoader": by_dataloader, "by hand": by_hand}.items():
        taken.clear()
        epoch = begin(noted())
        asked[name] = len(taken)
        came = itertools.chain.from_iterable(epoch)
        in_place = sum(index == place for place, index in enumerate(came))
        claim(f"{name}: samples in their place", SAMPLES, in_place)
    due = FACTOR * WORKERS
    claim("batches asked for before the first, factor 3", due, asked["DataLoader"], question=4)
    claim("by hand: asked for before the first, factor 3", due, asked["by hand"], question=4)


# %% [markdown]
# **Waiting.** Two cores cannot compute and load for four ranks at once. So both sleep here, which
# needs no core: a batch takes LOAD seconds to load, and a step half as long. These rows are
# simulated.


# %%
LOAD = 0.04  # seconds per batch


class Slow(Dataset):
    """30 samples that take a while, as if they were read and decoded; each is a batch."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> int:
        time.sleep(LOAD)
        return index


def check_waiting() -> None:
    """Claim the share of the time in which a rank waits whose step and loading sleep."""

    def step(batch: list[int]) -> None:
        time.sleep(LOAD / 2)

    for workers, expected, slack in ((0, 2 / 3, 0.08), (1, 1 / 2, 0.08), (2, 0, 0.25)):
        share = share_that_waits(loader_of(Slow(), workers), step)
        text = f"share of time that waits, num_workers={workers}"
        claim(text, expected, share, atol=slack, question=5, kind="simulated", timed=True)


# %% [markdown]
# ## 5. On GPUs: the share of a step that waits
#
# On a GPU the step is real: matrix products. Two CUDA events around each say how long it computes,
# the host's clock how long the epoch takes; what is missing is waiting, for the loader and for the
# copy. Whatever your GPU, a step is made to compute half as long as one process loads its batch.
#
# One thing is different. A GPU works on its own, so even without workers the rank loads the next
# batch while the GPU computes, and the GPU waits half of the time. But a copy from memory that is
# not pinned may wait for the step before it; then loading and step take turns, and it waits two
# thirds. This section was never run on a GPU.


# %%
class Scenes(Dataset):
    """Random crops of one image, resized to 224 x 224 in float32."""

    def __len__(self) -> int:
        return 1024  # 32 batches

    def __getitem__(self, index: int) -> torch.Tensor:
        image_CHW = torch.arange(3 * 375 * 500).view(3, 375, 500) % 256 / 255
        side = int(torch.randint(100, 375, ()))
        crop_1CHW = image_CHW[None, :, :side, :side]
        return torch.nn.functional.interpolate(crop_1CHW, (224, 224), mode="bilinear")[0]


def time_an_epoch(device: torch.device, products: int, **knobs: object) -> tuple[float, float]:
    """Return the seconds of the second epoch, and those in which the GPU computed."""
    loader = DataLoader(Scenes(), 32, **knobs)
    weight_DD = torch.randn(4096, 4096, device=device)
    for _ in range(2):  # the first starts the workers
        events = []
        torch.cuda.synchronize()
        start = time.perf_counter()
        for image_BCHW in loader:
            image_BCHW.to(device, non_blocking=True)
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            events[-1][0].record()
            for _ in range(products):  # they stand for a model's step
                torch.mm(weight_DD, weight_DD)
            events[-1][1].record()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds, sum(begin.elapsed_time(end) for begin, end in events) / 1e3


def check_waiting_on_gpus(device: torch.device) -> None:
    """Claim the share of a step that waits, without workers and with all knobs turned."""
    cores = len(os.sched_getaffinity(0)) // WORLD_SIZE  # for this rank
    before = "share of a step that waits, no workers"
    after = "share of a step that waits, all knobs turned"
    if device.type == "cpu" or cores < 4:
        for text in (before, after):
            blocked(text, needs="1 GPU" if device.type == "cpu" else "4 cores per GPU")
        return
    loading, computing = time_an_epoch(device, 1)
    products = max(1, min(1000, round(loading / 2 / computing)))
    seconds, computing = time_an_epoch(device, products)
    claim(before, 0.4, 1 - computing / seconds, ">=", question=5, timed=True)
    knobs = {"num_workers": cores - 1, "pin_memory": True, "persistent_workers": True}
    knobs["multiprocessing_context"] = "fork"
    seconds, computing = time_an_epoch(device, products, **knobs)
    claim(after, 0.15, 1 - computing / seconds, "<=", question=5, timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. 32, whatever n is. Both workers draw the same 32 numbers, all ranks do, and the second epoch
#    repeats them. A model that is trained so sees few crops, and nothing fails.
# 2. 128: the workers of a rank differ, and so do its epochs, but all ranks draw alike. By hand,
#    where nobody seeds, it is 32 again, for torch and for NumPy. (Python itself seeds `random` anew
#    in a forked process.) With both holes closed all 128 n are different.
# 3. Four, and two. What a worker has opened and cached ends with it, so with few samples per epoch
#    most of the time can go into starting anew.
# 4. Six: 3 for each of two workers, by hand as by DataLoader. Batches of tensors lie in shared
#    memory: 32 crops of 224 x 224 floats have 19 MB, and in a container with the usual 64 MB of
#    /dev/shm six of them end in a bus error (`docker run --shm-size` or `--ipc=host`).
# 5. Two thirds, a half, and almost nothing. Without workers, loading and step take turns, two parts
#    to one. One worker hides the step behind the loading, and a batch takes two parts. Two workers
#    deliver a batch per part, as soon as the step wants it. Only the first must be waited for.
#
# **Try.** With `SEED` for `torch.initial_seed()` all workers of all ranks have the same generator
# again: 64 different draws of 128 n. It is not 32, because persistent workers go on drawing in
# their second epoch. Without `generator=seeds` all ranks draw alike: four claims fail, on one rank
# none.
#
# **Which knob when.** Measure first whether the step waits. Then turn up `num_workers`, to as many
# cores as each rank has; more workers help only if they wait for a disk or a network. Turn on
# `persistent_workers` if epochs are short or a dataset is slow to open, and `pin_memory` with
# `non_blocking` always: alone, neither hides the copy. A larger `prefetch_factor` helps only if
# batches take unequally long.
#
# **Where it bites.** A list of a million paths is shared between workers at the fork, and copied
# page by page as soon as they read it, since Python counts references in the objects themselves; a
# NumPy array stays shared. What has threads or a CUDA context at the fork may hang or fail in a
# worker: make it in the worker. Python 3.14 starts processes by `forkserver` unless told otherwise:
# the dataset is pickled then, and its generator is copied just the same.
#
# On a thousand ranks each rank needs a seed of its own, as here. But which crops are drawn depends
# on the numbers of ranks and workers, so a run that goes on with other numbers draws other crops.
# To draw each crop from (seed, epoch, index) makes it independent of both:
# data-loading/05_random_numbers.py.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_draws()
    check_working_ahead()
    check_waiting()
    check_waiting_on_gpus(device)
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
    how = f"gloo ({local_ranks} ranks and {gpus} GPUs here)"
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
        counted = f"{devices.count(b'cuda')} GPUs for {WORLD_SIZE} ranks"
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
