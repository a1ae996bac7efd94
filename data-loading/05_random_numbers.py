"""Random crops that can be repeated: a function of seed, epoch and sample
=======================================================================

**Question.** A sample should get a new crop in every epoch, and the same crop again in a second
run, on any number of ranks and after any restart. Where must its random numbers come from?

**Predict**, and write it down before you run. An epoch has 64 samples; rank r of n has samples r,
r + n, r + 2n and so on.

1. Each rank draws its samples' crops from one Generator, which is seeded by its rank. The run goes
   on with one rank more. How many of the 64 samples get the crop that they would have had?
2. Each crop is drawn from a Generator of its own instead, seeded by `seed + epoch + sample`. Of the
   64 crops of epoch 1, how many has epoch 0 drawn already?
3. To make a Generator for each sample takes time. What percentage is it of the time that it takes
   to decode the sample, a JPEG of 100 kB?
4. Each of n ranks calls `np.random.seed(0)` in Python, then a function compiled by numba that draws
   64 crops by `np.random`. How many different sequences of crops do the n ranks draw?
5. How many if compiled code itself calls `np.random.seed(0)` first, on every rank?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_random_numbers.py    # one rank per GPU, else gloo
    python 05_random_numbers.py                                      # the same, started for you

Not run on several GPUs. numba and Pillow come with `pip install -e '.[data]'`; without them all
that concerns compiled code and JPEGs is BLOCKED.

**Try.** In `draw_crop` take `epoch` out of the tuple: which claim fails? In `draw_mixed` write `i`
for `samples_B[i]`: which claims fail, and which does not?

**Before.** data-loading/04_jit_augmentation.py: compiled loops that make crops.

**Next.** data-loading/12_own_ffcv_operation.py, if you use FFCV: there these numbers reach compiled
code that FFCV calls. Else data-loading/06_tokens.py.
"""

import argparse
import ctypes
import io
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
from collections.abc import Callable
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
    from PIL import Image
except ImportError:  # they come with the extra [data]
    numba = None

N = 64  # samples in an epoch
SEED = 0
HEIGHT = 160  # of a picture, in pixels
WIDTH = 240
S = 128  # height and width of a crop
CUT = 32  # height and width of a square in it that is blackened
# Letters at the end of a name are the axes of an array: N or B crops, six numbers for each.

# %% [markdown]
# ## 1. A crop is a function of three numbers
#
# To make a crop of S x S pixels takes six whole numbers: where it lies in the picture (y, x),
# whether it is mirrored, how bright it is in 64ths, and where a square of it is blackened. They are
# random, and still they should depend on something: on three numbers, and on nothing else.
#
#     the run's seed, the epoch, the sample   ──>   six numbers   ──>   the crop
#
# The sample is in it, so crops differ within an epoch. The epoch is in it, so a sample gets a new
# crop next time. The seed is in it, so another run draws others. And what is *not* in it is as
# important: the rank, the number of ranks, the worker or thread, and what was drawn before. Then a
# run that goes on with 8 ranks instead of 4 goes on with the same crops, and you can make any crop
# again by itself, to look at it.
#
# In NumPy this function is one line. `default_rng` takes a tuple, and hashes it into the state of a
# new Generator, so that neighboring tuples give unrelated numbers:

# %%
# The smallest y, x, flip, light, cut_y and cut_x, and how many choices there are for each:
LEAST = (0, 0, 0, 32, 0, 0)
CHOICES = (HEIGHT - S + 1, WIDTH - S + 1, 2, 65, S - CUT + 1, S - CUT + 1)


def draw_crop(seed: int, epoch: int, sample: int) -> np.ndarray:
    """Return the six numbers of a sample's crop."""
    return next_crop(np.random.default_rng((seed, epoch, sample)))


def next_crop(generator: np.random.Generator) -> np.ndarray:
    """Return the six numbers that a Generator draws next."""
    return LEAST + (generator.random(6) * CHOICES).astype(np.int64)


# %% [markdown]
# ## 2. Two ways to miss it
#
# **One state that moves on.** Usually a rank has one Generator and draws crop after crop from it.
# Then a crop depends on the rank, and on how many crops that rank has drawn before. With the same
# samples on another number of ranks, both change. Below is who draws each sample's crop, as rank
# and turn:
#
#     sample        0    1    2    3    4    5    6    7    8    9   ...
#     on 3 ranks   0,0  1,0  2,0  0,1  1,1  2,1  0,2  1,2  2,2  0,3
#     on 4 ranks   0,0  1,0  2,0  3,0  0,1  1,1  2,1  3,1  0,2  1,2
#
# **A sum.** A Generator per sample needs one seed, and `seed + epoch + sample` looks right. But
# different triples have the same sum:
#
#     sample              0   1   2   3  ...
#     sum in epoch 0      0   1   2   3  ...
#     sum in epoch 1      1   2   3   4  ...
#
# The samples only pass the same crops on, each to the one before it.


# %%
def crops_in_turn(rank: int, ranks: int) -> dict[int, bytes]:
    """Return the crop of each of a rank's samples, all drawn from one Generator."""
    generator = np.random.default_rng((SEED, rank))
    return {sample: next_crop(generator).tobytes() for sample in range(rank, N, ranks)}


def crops_by_sum(epoch: int) -> set[bytes]:
    """Return an epoch's crops, each drawn from a Generator that the sum seeds."""
    generators = [np.random.default_rng(SEED + epoch + sample) for sample in range(N)]
    return {next_crop(generator).tobytes() for generator in generators}


# %% [markdown]
# ## 3. A warning: the state that you do not see
#
# Where numbers come from is easy to see as long as the state is an object in your hands. But
# `np.random.random()` takes its number from a state that is hidden in NumPy. And a function that
# numba has compiled calls the same names, but not NumPy's code: numba has written these functions
# anew, in machine code, with states that Python never sees.
#
#     set_seed(0) in Python   ──> NumPy's state ──>   draw_crops in Python     one per process
#     set_seed(0) compiled    ──> numba's state ──>   draw_crops compiled      one per thread
#
# numba fills its states with random bytes from the operating system. Only `np.random.seed` sets
# one, called in compiled code, on the same thread. So if the script seeds in Python, no run can be
# repeated. If compiled code seeds by the same number on all ranks, all ranks draw the same crops,
# of different samples, and no error shows. If one thread seeds and another draws, it is as if
# nobody had seeded.
#
# FFCV's own augmentations draw in this way: their compiled loops call `np.random` on the thread
# that they run on, which is one that FFCV starts anew for each epoch, and with several workers
# numba's threads as well. The loader's `seed` orders the samples and reaches no augmentation.


# %%
def set_seed(seed: int) -> None:
    np.random.seed(seed)


def draw_crops(count: int) -> np.ndarray:
    """Return six numbers per crop, drawn by `np.random`: in Python or compiled, as it stands."""
    draws_N6 = np.empty((count, 6), np.int64)
    for i in range(count):
        for k in range(6):
            draws_N6[i, k] = LEAST[k] + int(np.random.random() * CHOICES[k])
    return draws_N6


# %% [markdown]
# The remedy is section 1: draw in Python, and hand compiled code an array of numbers. Code that
# draws nothing has no state to set.

# %% [markdown]
# ## 4. An aside: the same function without a Generator
#
# To make a Generator is Python's work, for each sample. That is little next to decoding a JPEG, and
# much next to copying the pixels of a crop that was decoded beforehand. A loader that does only the
# latter computes the numbers in its compiled loop, as a function of four words: seed, epoch,
# sample, and the number's place k among the six. The function must **scramble**: a change of one
# word by 1 has to change about half of the bits. This one adds word after word, and scrambles after
# each as the generator splitmix64 does (Steele, Lea and Flood, 2014), by multiplying modulo 2^64
# and folding the upper bits onto the lower ones.

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
# Such a function is called a **counter-based** generator: it has no state, so any thread computes
# the numbers of any sample, in any order. `np.random.Philox`, PyTorch's generator on CUDA and
# `jax.random.fold_in` are stronger ones.
#
# **When to use which.** *Stable* means: the same crop on any number of ranks and threads, and again
# after a restart.
#
#     the numbers come from            stable?   use it
#     np.random, compiled              no        never
#     one Generator per rank           no        if the order never changes: a simulation
#     a Generator per sample           yes       always, unless the loader only copies pixels
#     a mix of the four words          yes       in the compiled loop of a loader that does

# %% [markdown]
# ## 5. How it is measured
#
# Ranks draw the crops of their own samples, and what they have drawn is compared. Of 4.6 billion
# possible crops two are the same here for about one seed in a million, and never with this seed.


# %%
def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def crops_of(epoch: int, rank: int, ranks: int) -> dict[int, bytes]:
    """Return the crop of each of a rank's samples, by the function of three numbers."""
    return {s: draw_crop(SEED, epoch, s).tobytes() for s in range(rank, N, ranks)}


def that_stay(crops: Callable[[int, int], dict]) -> int:
    """Return how many samples have the same crop on these n ranks and on n + 1."""
    now = {}
    for theirs in gather_objects(crops(RANK, WORLD_SIZE)):
        now |= theirs
    later = {}
    for rank in range(WORLD_SIZE + 1):
        later |= crops(rank, WORLD_SIZE + 1)
    return sum(now[sample] == later[sample] for sample in range(N))


def drawn_before(crops: Callable[[int], set]) -> int:
    """Return how many of epoch 1's crops epoch 0 has, too; `crops(epoch)` are those of one."""
    return len(crops(0) & crops(1))


def check_functions() -> None:
    """Claim which crops stay with another number of ranks, and which come again."""
    text = "crops kept on n + 1 ranks"
    claim(f"{text}, a Generator per rank", WORLD_SIZE, that_stay(crops_in_turn), question=1)
    by_three = that_stay(lambda rank, ranks: crops_of(1, rank, ranks))
    claim(f"{text}, three numbers", N, by_three)
    text = "crops of epoch 1 drawn before"
    claim(f"{text}, by the sum", N - 1, drawn_before(crops_by_sum), question=2)
    by_three = drawn_before(lambda epoch: {*crops_of(epoch, 0, 1).values()})
    claim(f"{text}, three numbers", 0, by_three)


# %% [markdown]
# What compiled code draws is a sequence of 64 crops, compared as bytes. `numba.njit` compiles.


# %%
def different(draws_N6: np.ndarray) -> int:
    """Return how many different sequences of crops the ranks have."""
    return len({*gather_objects(draws_N6.tobytes())})


def check_states() -> None:
    """Claim how many sequences are drawn by `np.random`, seeded here or there."""
    set_seed(SEED)
    claim("sequences on n ranks, not compiled", 1, different(draw_crops(N)))
    if numba is None:
        blocked("sequences drawn by compiled code", needs="numba: pip install -e '.[data]'")
        return
    draw = numba.njit(draw_crops)
    compiled_seed = numba.njit(set_seed)
    tries = []
    for _ in range(2):
        set_seed(SEED)
        tries.append(draw(N))
    claim("sequences in 2 tries, seeded in Python", 2, len({each.tobytes() for each in tries}))
    claim("sequences on n ranks, seeded in Python", WORLD_SIZE, different(tries[0]), question=4)
    compiled_seed(SEED)
    claim("sequences on n ranks, seeded in compiled code", 1, different(draw(N)), question=5)
    threads = []
    for _ in range(2):
        compiled_seed(SEED)  # on this thread
        with ThreadPoolExecutor(1) as another:
            threads.append(another.submit(draw, N).result().tobytes())
    claim("sequences of 2 threads, seeded in a third", 2, len({*threads}))


def check_mixed() -> None:
    """Claim that mixed numbers are new in each epoch, and the same on ranks and threads."""
    mixed = numba.njit(draw_mixed)
    samples_N = np.arange(N)
    found = drawn_before(lambda epoch: as_set(mixed(SEED, epoch, samples_N)))
    claim("crops of epoch 1 drawn before, mixed", 0, found)
    own = mixed(SEED, 1, np.arange(RANK, N, WORLD_SIZE))
    all_crops = as_set(np.concatenate(gather_objects(own)))
    claim("different crops of n ranks in an epoch, mixed", N, len(all_crops))
    with ThreadPoolExecutor(2) as threads:
        later = threads.submit(mixed, SEED, 1, samples_N[N // 2 :])
        earlier = threads.submit(mixed, SEED, 1, samples_N[: N // 2])
    both = np.concatenate([earlier.result(), later.result()])
    wrong = (both != mixed(SEED, 1, samples_N)).any(1).sum()
    claim("crops of 2 threads unlike one thread's, mixed", 0, wrong)


def as_set(draws_B6: np.ndarray) -> set[bytes]:
    return {draw_6.tobytes() for draw_6 in draws_B6}


# %% [markdown]
# What the numbers cost is timed on rank 0, next to what else a loader does to a sample. The first
# round compiles and is left out.


# %%
def measure_costs(rounds: int = 11) -> dict[str, float]:
    """On rank 0: the median time of a core that each thing takes, in us per sample."""
    from sklearn.datasets import load_sample_image

    photograph_HWC = load_sample_image("china.jpg")[:375, :500]
    jpeg = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(photograph_HWC)).save(jpeg, "JPEG", quality=97)
    mixed = numba.njit(draw_mixed)
    samples_N = np.arange(N)
    crops_NSSC = np.empty((N, S, S, 3), np.uint8)
    things = {
        "decoding a JPEG": lambda: [Image.open(jpeg).convert("RGB") for _ in range(N)],
        "copying a crop": lambda: np.copyto(crops_NSSC, photograph_HWC[:S, :S]),
        "a Generator": lambda: [draw_crop(SEED, 0, sample) for sample in range(N)],
        "the mix": lambda: mixed(SEED, 0, samples_N),
    }
    cost = {}
    for name, thing in things.items():
        seconds = []
        for _ in range(rounds):
            start = time.process_time()  # other load on the machine hardly changes it
            thing()
            seconds.append(time.process_time() - start)
        cost[name] = statistics.median(seconds[1:]) / N * 1e6
    return cost


def check_costs(cost: dict[str, float]) -> None:
    """Claim what a Generator costs next to a JPEG and to a crop, and the mix next to it."""
    print0(f"{'':13}us: " + ", ".join(f"{name} {us:,.4g}" for name, us in cost.items()))
    generator = cost["a Generator"]
    percent = 100 * generator / cost["decoding a JPEG"]
    claim("percent: a Generator / decoding a JPEG", 2, percent, "<=", question=3, timed=True)
    ratio = generator / cost["copying a crop"]
    claim("time: a Generator / copying a crop", 2, ratio, ">=", timed=True)
    ratio = generator / cost["the mix"]
    claim("time: a Generator / the mix", 50, ratio, ">=", timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. n: only the first sample of each rank is drawn by the same rank in the same turn. Of three
#    numbers, all 64 stay.
# 2. 63. Sample k draws in epoch 1 what sample k + 1 drew in epoch 0. Over the epochs the same few
#    crops wander over the data, and a run with seed 1 shares nearly all of them with a run with
#    seed 0. From the tuple none comes again.
# 3. About one percent. So for a loader that decodes, a Generator per sample is the whole answer. It
#    takes several times as long as to copy a crop of 49,152 bytes, though, and more than a hundred
#    times as long as the mix. That matters to a loader of raw pixels, and to no other.
# 4. n. Seeded in Python, numba's state stays as the operating system has filled it. A second try on
#    the same rank draws anew as well.
# 5. One. The i-th crop is the same on every rank, and no log shows it. The samples differ, so this
#    costs variety, not correctness.
#
# **Try.** Without `epoch` in the tuple all 64 crops of epoch 1 have been drawn before. Within an
# epoch the crops still differ, and they stay with another number of ranks, so one claim fails. With
# `i`, the place in the array, each rank draws the same crops for its samples, and the second thread
# draws those of the first: on several ranks two claims fail, on one rank one. Between epochs the
# crops still change.
#
# **Where it bites.** The dataset must learn the epoch: tell it, as `set_epoch` tells a
# `DistributedSampler`. Workers with `persistent_workers=True` keep the copy of the dataset that
# they have, so send them the epoch with the index. A trainer that resumes at epoch 7 passes 7, and
# gets the crops that it would have had. numba also takes a Generator as an argument, but there is
# then one per call and not per sample, and two threads must not draw from one at once.
#
# **On GPUs** the numbers are drawn on the cores as before. What augments on the GPU usually draws
# from PyTorch's generator there, one state per device that moves on: the first way to miss it. Draw
# the six numbers on the CPU instead, and send them with the batch, 48 bytes per sample. A thousand
# ranks exchange nothing for all this.


# %%
def main() -> None:
    command_line()
    launch()
    setup()
    check_functions()
    check_states()
    if numba is None:
        blocked("mixed numbers, and what they cost", needs="numba: pip install -e '.[data]'")
        finish()
    check_mixed()
    check_costs(gather_objects(measure_costs() if RANK == 0 else None)[0])
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
