"""Random numbers in compiled code: whose state is it?
===================================================

**Question.** A sample should get a new crop in every epoch, and the same crop again in a second
run, whichever rank or thread makes it. Compiled code draws from a random state of its own. Who sets
that state, and where should the numbers come from instead?

**Predict**, and write it down before you run:

1. Each of n ranks calls `np.random.seed(0)` in Python, then a function compiled by numba that draws
   64 crops by `np.random`. How many different sequences of crops do the n ranks draw?
2. How many if compiled code itself calls `np.random.seed(0)` first, on every rank?
3. Compiled code seeds by 0 on one thread; then a new thread lets compiled code draw 64 crops. This
   is done twice. How many different sequences come out?
4. Compiled code seeds anew before it draws the crop of each sample, by `seed + epoch + sample`. Of
   the 64 crops of epoch 1, how many has epoch 0 drawn already?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_random_numbers.py    # one rank per GPU, else gloo
    python 05_random_numbers.py                                      # the same, started for you

Not run on several GPUs. numba comes with `pip install -e '.[data]'`; without it all that concerns
compiled code is BLOCKED.

**Try.** In `draw_mixed` take `epoch` out of the four words: which claims fail, and which do not?
In `draw_by_generators` seed by the sum, `default_rng(seed + epoch + sample)`: is it enough that the
generator is a good one?

**Before.** data-loading/04_jit_augmentation.py: compiled loops that make crops.

**Next.** data-loading/12_own_ffcv_operation.py, if you use FFCV: there these numbers reach compiled
code that FFCV calls. Else data-loading/06_tokens.py.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

try:
    import numba
except ImportError:  # it comes with the extra [data]
    numba = None

N = 64  # samples in an epoch
SEED = 0
# Letters at the end of a name are the axes of an array: N or B crops, six numbers for each.

# %% [markdown]
# ## 1. Compiled code has its own random state, one per thread
#
# `np.random.random()` takes its number from a **state** and moves the state on. `np.random.seed`
# sets it. A function that numba has compiled calls the same names, but not NumPy's code: numba has
# written these functions anew, in machine code, with a state that Python never sees.
#
#     set_seed(0) in Python   ──> NumPy's state ──>   draw_crops in Python     one per process
#     set_seed(0) compiled    ──> numba's state ──>   draw_crops compiled      one per thread
#
# numba's state begins with random bytes from the operating system. Nothing sets it but
# `np.random.seed`, called in compiled code, on the same thread. **What is drawn depends on whose
# state that is**, and there are three ways to get it wrong:
#
# - The script seeds in Python, and nobody seeds compiled code: no run can be repeated.
# - Compiled code seeds by the same number on all ranks: all ranks draw the same crops. They make
#   them of different samples, so no error shows; but a batch of n ranks has an n-th of the variety
#   that it seems to have.
# - One thread seeds and another draws: as if nobody had seeded.
#
# FFCV's own augmentations draw in this way, on a thread that FFCV starts anew for each epoch. The
# loader's `seed` orders the samples and reaches no augmentation.
#
# Below, a crop of S x S pixels takes six whole numbers: where it lies in the picture, whether it is
# mirrored, how bright it is in 64ths, and where a square of it is blackened. Both functions run as
# they stand, and compiled: the text is the same, the state is not.

# %%
HEIGHT = 160  # of a picture, in pixels
WIDTH = 240
S = 128  # height and width of a crop
CUT = 32  # height and width of the blackened square

# The smallest y, x, flip, light, cut_y and cut_x, and how many choices there are for each:
LEAST = (0, 0, 0, 32, 0, 0)
CHOICES = (HEIGHT - S + 1, WIDTH - S + 1, 2, 65, S - CUT + 1, S - CUT + 1)


def set_seed(seed: int) -> None:
    np.random.seed(seed)


def draw_crops(count: int) -> np.ndarray:
    """Return six numbers per crop, drawn by `np.random`."""
    draws_N6 = np.empty((count, 6), np.int64)
    for i in range(count):
        for k in range(6):
            draws_N6[i, k] = LEAST[k] + int(np.random.random() * CHOICES[k])
    return draws_N6


# %% [markdown]
# The experiment: every rank seeds at one place and draws at another, and all ranks' sequences of 64
# crops are compared as bytes. `numba.njit` compiles.


# %%
def different(draws_N6: np.ndarray) -> int:
    """Return how many different sequences of crops the ranks have."""
    return len({*gather_objects(draws_N6.tobytes())})


def check_states() -> None:
    """Claim how many sequences compiled code draws by `np.random`, seeded here or there."""
    draw = numba.njit(draw_crops)
    compiled_seed = numba.njit(set_seed)
    tries = []
    for _ in range(2):
        set_seed(SEED)
        tries.append(draw(N))
    claim("sequences in 2 tries, seeded in Python", 2, len({each.tobytes() for each in tries}))
    claim("sequences on n ranks, seeded in Python", WORLD_SIZE, different(tries[0]), question=1)
    compiled_seed(SEED)
    claim("sequences on n ranks, seeded in compiled code", 1, different(draw(N)), question=2)
    compiled_seed(SEED + RANK)
    claim("sequences on n ranks, seeded there by rank", WORLD_SIZE, different(draw(N)))
    threads = []
    for _ in range(2):
        compiled_seed(SEED)  # on this thread
        with ThreadPoolExecutor(1) as another:
            threads.append(another.submit(draw, N).result().tobytes())
    claim("sequences of 2 threads, seeded in a third", 2, len({*threads}), question=3)


# %% [markdown]
# ## 2. What a crop should depend on
#
# Seeding by the rank gives every rank its own crops, and ties them to the number of ranks: a run
# that goes on with two ranks fewer draws others. A state that moves on from sample to sample ties a
# crop to all that was drawn before it on that thread. What one wants is a crop that depends on
# three numbers and on nothing else:
#
#     the run's seed, the epoch, the sample   ──>   six numbers   ──>   the crop
#
# Then it is the same crop on 4 ranks or 8, on any thread and after any restart, and you can make it
# again by itself, to look at it.
#
# The first attempt is to seed right before each sample's crop, in compiled code, on the thread that
# draws it. By what? `seed + sample` forgets the epoch: every sample keeps its crop forever, and
# augmentation is over after one epoch. The sum of all three looks right and is hardly better, since
# different triples have the same sum. With seed 0:
#
#     sample              0   1   2   3  ...
#     sum in epoch 0      0   1   2   3  ...
#     sum in epoch 1      1   2   3   4  ...
#
# The samples only pass the same crops on, each to the one before it.


# %%
def draw_seeded(seeds_B: np.ndarray) -> np.ndarray:
    """Return six numbers per crop, drawn by `np.random`, which is seeded for each crop."""
    draws_B6 = np.empty((len(seeds_B), 6), np.int64)
    for i in range(len(seeds_B)):
        np.random.seed(seeds_B[i])
        for k in range(6):
            draws_B6[i, k] = LEAST[k] + int(np.random.random() * CHOICES[k])
    return draws_B6


# %% [markdown]
# ## 3. Where the numbers can come from instead
#
# **Draw in Python, and hand over an array.** Compiled code that draws nothing has no state to set.
# A `np.random.Generator` is an object with its state inside. `default_rng` makes one from a tuple
# of numbers, which it hashes, so that neighboring tuples give unrelated numbers. One is made for
# each sample, which takes Python's time for each sample.
#
# **Hand over a Generator.** numba takes one as an argument. Then compiled code uses the very state
# that Python sees, and draws what Python would have drawn. So "a seed in Python does not reach
# compiled code" is true of `np.random.random()` and its kind, not of a Generator. But compiled code
# cannot make one: there is one per call and not per sample, so crops depend on the order in which
# they are drawn. And two threads must not draw from one Generator at once, whereas threads are what
# compiled loops are written for.


# %%
def draw_by_generators(seed: int, epoch: int, samples_B: Sequence[int]) -> np.ndarray:
    """Return six numbers per crop, drawn in Python, from a Generator for each sample."""
    floats = []
    for sample in samples_B:
        generator = np.random.default_rng((seed, epoch, sample))
        floats.append(generator.random(6))
    return LEAST + (np.reshape(floats, (-1, 6)) * CHOICES).astype(np.int64)


def draw_from(generator: np.random.Generator, count: int) -> np.ndarray:
    """Return six numbers per crop, drawn from this Generator: in Python, or compiled."""
    draws_N6 = np.empty((count, 6), np.int64)
    for i in range(count):
        for k in range(6):
            draws_N6[i, k] = LEAST[k] + int(generator.random() * CHOICES[k])
    return draws_N6


# %% [markdown]
# **Compute them.** If a number is to depend on (seed, epoch, sample) and on its place k among the
# six, let it be a function of these four words, with no state at all. The function must scramble: a
# change of one word by 1 has to change about half of the bits. `draw_mixed` adds one word after the
# other and scrambles after each, as the generator **splitmix64** does (Steele, Lea and Flood,
# 2014): it multiplies by a large odd number modulo 2^64, which carries low bits upward, and folds
# the upper bits onto the lower ones. The upper 53 bits of the result make a float64 from 0 up to 1,
# as `random()` makes its own.
#
# Such a generator is called **counter-based**: it turns a counter, or any number, into a random
# one. `np.random.Philox`, PyTorch's on CUDA and `jax.random.fold_in` are stronger ones. Nothing is
# seeded and nothing shared, so any thread computes the numbers of any sample, in any order.


# %%
STEP = np.uint64(0x9E3779B97F4A7C15)
FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
FACTOR_2 = np.uint64(0x94D049BB133111EB)


def draw_mixed(seed: int, epoch: int, samples_B: np.ndarray) -> np.ndarray:
    """Return six numbers per crop; to be compiled, since its sums have to wrap around at 2^64."""
    draws_B6 = np.empty((len(samples_B), 6), np.int64)
    for i in range(len(samples_B)):
        for k in range(6):
            z = np.uint64(0)
            for word in (seed, epoch, samples_B[i], k):
                z = z + np.uint64(word) + STEP
                z = (z ^ (z >> np.uint64(30))) * FACTOR_1
                z = (z ^ (z >> np.uint64(27))) * FACTOR_2
                z = z ^ (z >> np.uint64(31))
            draws_B6[i, k] = LEAST[k] + int((z >> np.uint64(11)) * 2.0**-53 * CHOICES[k])
    return draws_B6


# %% [markdown]
# **When to use which.** *Stable* means: the same crop on any number of ranks and threads, and
# again after a restart.
#
#     the numbers come from            stable?   use it
#     np.random, seeded in Python      no        never, if the code that draws is compiled
#     one Generator, handed over       no        on one thread, in a fixed order: a simulation
#     a Generator per sample           yes       first; simple, and slow only for a fast loader
#     np.random, seeded per sample     yes       never: a seed that is no sum has to be mixed
#                                                from the three: then use the mix itself
#     a mix of the four words          yes       in the compiled loop of a fast loader
#
# The table under the ledger says what the stable ones cost, next to the time that it takes to copy
# a crop's pixels. Seeding per sample is slow because numba's generator, a Mersenne twister, fills a
# state of 624 words at each seed, for six numbers.

# %% [markdown]
# ## 4. How the rest is measured
#
# Crops that come again are counted by sets. Without numba two rows remain, of what runs in Python.


# %%
def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def crops_in(draws_B6: np.ndarray) -> set[bytes]:
    return {draw.tobytes() for draw in draws_B6}


def repeated(draw: Callable) -> int:
    """Return how many of epoch 1's crops epoch 0 has, too; `draw(epoch)` draws those of one."""
    return len(crops_in(draw(0)) & crops_in(draw(1)))


def check_python() -> None:
    set_seed(SEED)
    claim("sequences on n ranks, not compiled", 1, different(draw_crops(N)))
    found = repeated(lambda epoch: draw_by_generators(SEED, epoch, range(N)))
    claim("crops of epoch 1 drawn before, Generators", 0, found)


# %% [markdown]
# Then crops per sample. A Generator's numbers are compared with those of `random(...)` in Python,
# mixed ones with Python's whole numbers. The ranks share out an epoch; so do two threads, which
# take the later half first. Of 4.6 billion possible crops two are the same here for about one seed
# in a million, and never with this seed.


# %%
def mixed_by_hand(epoch: int, sample: int) -> list[int]:
    """Return the six numbers of a sample, by whole numbers of any size."""
    numbers = []
    for k in range(6):
        z = 0
        for word in (SEED, epoch, sample, k):
            z = (z + word + int(STEP)) % 2**64
            z = (z ^ z >> 30) * int(FACTOR_1) % 2**64
            z = (z ^ z >> 27) * int(FACTOR_2) % 2**64
            z ^= z >> 31
        numbers.append(LEAST[k] + (z >> 11) * CHOICES[k] // 2**53)
    return numbers


def check_samples() -> None:
    """Claim which crops repeat, and that ranks and threads draw what one process draws."""
    samples_N = np.arange(N)
    seeded = numba.njit(draw_seeded)
    handed_over = numba.njit(draw_from)
    mixed = numba.njit(draw_mixed)
    found = repeated(lambda epoch: seeded(SEED + samples_N))
    claim("crops of epoch 1 drawn before, seed + sample", N, found)
    found = repeated(lambda epoch: seeded(SEED + epoch + samples_N))
    claim("crops of epoch 1 drawn before, + epoch", N - 1, found, question=4)
    found = repeated(lambda epoch: mixed(SEED, epoch, samples_N))
    claim("crops of epoch 1 drawn before, mixed", 0, found)

    floats = np.random.default_rng(SEED).random((2 * N, 6))
    expected = LEAST + np.floor(floats * CHOICES)
    generator = np.random.default_rng(SEED)
    both = np.concatenate([handed_over(generator, N), draw_from(generator, N)])
    claim("numbers unlike Python's, Generator handed over", 0, (both != expected).sum())

    expected = np.array([mixed_by_hand(1, sample) for sample in range(N)])
    own = mixed(SEED, 1, np.arange(RANK, N, WORLD_SIZE))
    all_crops = crops_in(np.concatenate(gather_objects(own)))
    claim("different crops of n ranks in an epoch, mixed", N, len(all_crops))
    wrong = (own != expected[RANK::WORLD_SIZE]).sum()
    claim("numbers of n ranks unlike one process's, mixed", 0, wrong)
    with ThreadPoolExecutor(2) as threads:
        later = threads.submit(mixed, SEED, 1, samples_N[N // 2 :])
        earlier = threads.submit(mixed, SEED, 1, samples_N[: N // 2])
    both = np.concatenate([earlier.result(), later.result()])
    claim("numbers of 2 threads unlike one process's, mixed", 0, (both != expected).sum())


# %% [markdown]
# What the ways cost is timed on N samples, all in turn; the first round compiles and is left out.
# The floors leave room for the machine: the ratio measured is the answer.


# %%
def measure_costs(rounds: int = 21) -> dict[str, float]:
    """Return the median time of each way, in ns per crop."""
    seeded = numba.njit(draw_seeded)
    mixed = numba.njit(draw_mixed)
    samples_N = np.arange(N)
    picture_HWC = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    crops_NSSC = np.empty((N, S, S, 3), np.uint8)
    ways = {
        "a Generator per sample": lambda: draw_by_generators(SEED, 0, range(N)),
        "np.random, seeded per sample": lambda: seeded(samples_N),
        "a mix of the four words": lambda: mixed(SEED, 0, samples_N),
        "copying the crop's pixels": lambda: np.copyto(crops_NSSC, picture_HWC[:S, :S]),
    }
    seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, draw in ways.items():
            start = time.perf_counter()
            draw()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) / N * 1e9 for name, times in seconds.items()}


def check_costs(cost: dict[str, float]) -> None:
    """Claim what the ways cost compared with the mix, and the mix compared with the pixels."""
    mix = cost["a mix of the four words"]
    by_generators = cost["a Generator per sample"] / mix
    by_seeds = cost["np.random, seeded per sample"] / mix
    share = mix / cost["copying the crop's pixels"]
    claim("time: a Generator per sample / the mix", 20, by_generators, ">=", timed=True)
    claim("time: seeded per sample / the mix", 5, by_seeds, ">=", timed=True)
    claim("time: the mix / copying the crop's pixels", 0.3, share, "<=", timed=True)
    print0(f"\n{'':13}{'six numbers for a crop, on rank 0':44}  ns")
    for way, found in cost.items():
        print0(f"{'':13}{way:40} {found:7,.0f}")


# %% [markdown]
# ## What you should have seen
#
# 1. n. Seeded in Python, numba's state stays as the operating system has filled it. No run can be
#    repeated: a second try on the same rank draws anew as well.
# 2. One. The i-th crop is the same on every rank, and no log shows it. The samples differ, so this
#    costs variety, not correctness.
# 3. Two. Each thread has a state of its own, which nobody has seeded. A seed in the main thread
#    reaches no thread of a pool.
# 4. 63. Sample k draws in epoch 1 what sample k + 1 drew in epoch 0. Over the epochs the same few
#    crops wander over the data, and a run with seed 1 shares nearly all of them with a run with
#    seed 0. From Generators and from the mix none comes again.
#
# With the mix, n ranks draw together what one process draws, and so do two threads, in any order.
# A Generator per sample does the same. Ranks exchange nothing for it, a thousand of them neither.
#
# **Try.** Without `epoch` in the words all 64 crops of epoch 1 have been drawn before, and the
# numbers are not those by hand any more, on n ranks and on two threads: three rows fail. Within an
# epoch the 64 crops still differ, so one epoch alone does not show it. With the sum, 63 crops come
# again: `default_rng` is better tested than the mix, but equal seeds give equal numbers.
#
# **Where it bites.** In a `DataLoader` each worker process has a NumPy state, which PyTorch seeds
# by the worker's number: that can be repeated, but it is tied to the number of workers. It does not
# seed numba's states, which fill themselves anew in a forked process. So draw in `__getitem__` from
# `default_rng((seed, epoch, index))`, and tell the dataset the epoch, as `set_epoch` tells a
# `DistributedSampler`. Workers with `persistent_workers=True` keep the copy of the dataset that
# they have; send them the epoch with the index. A trainer that resumes at epoch 7 passes 7, and
# gets the crops that it would have had.
#
# On GPUs nothing changes, since the numbers are drawn on the cores. What augments on the GPU draws
# from PyTorch's generator there, one state per device: the same question, and the same rule.


# %%
def main() -> None:
    command_line()
    launch()
    setup()
    check_python()
    if numba is None:
        blocked("random numbers in compiled code", needs="numba: pip install -e '.[data]'")
        finish()
    check_states()
    check_samples()
    check_costs(measure_costs())
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
