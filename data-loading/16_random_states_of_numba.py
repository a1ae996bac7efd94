"""Random numbers in compiled code: states that Python does not see
================================================================

**Question.** A loop that numba has compiled makes crops, and calls `np.random` as Python does.
Whose state does it draw from, who can seed it, and how does it draw without any state?

**Predict**, and write it down before you run. A sequence is 64 crops that one function draws.

1. Each of n ranks calls `np.random.seed(0)` in Python, then a compiled function that draws a
   sequence by `np.random`. How many different sequences do the n ranks draw?
2. How many, if compiled code itself calls `np.random.seed(0)` first, on every rank?
3. A thread calls the compiled seed, and then two other threads, which are new, draw a sequence
   each. How many different ones?
4. A function without a state computes a crop's numbers from seed, epoch and sample. Compiled, it is
   faster than a `np.random.Generator` made for the sample in Python: by 2, 10 or more than 50
   times?

**Run.**

    torchrun --standalone --nproc-per-node=4 16_random_states_of_numba.py  # a GPU per rank, or gloo
    python 16_random_states_of_numba.py                                    # the same, started here

Not run on several GPUs, where nothing differs: the numbers are drawn on CPUs. numba comes with
`pip install -e '.[data]'`; without it nearly all is BLOCKED.

**Try.** In `draw_mixed` write `i` for `samples_B[i]`: which claims fail, and which ones on one
rank?

**Before.** data-loading/05_random_numbers.py: a crop is a function of seed, epoch and sample.

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
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

try:
    import numba
except ImportError:  # it comes with the extra [data]
    numba = None

N = 64  # samples in an epoch
SEED = 0
HEIGHT = 160  # of a picture, in pixels
WIDTH = 240
S = 128  # height and width of a crop
CUT = 32  # height and width of a square in it that is blackened
# Letters at the end of a name are the axes of an array: N or B crops, six numbers for each.

# %% [markdown]
# ## 1. Compiled code has states of its own
#
# A crop's numbers are drawn from a **state**. Where it is is easy to see as long as it is an object
# in your hands. But `np.random.random()` takes its number from a state that is hidden in NumPy. And
# a function that numba has compiled calls the same names, but not NumPy's code: numba has written
# these functions anew, in machine code, with states that Python never sees.
#
#     set_seed(0) in Python   ──> NumPy's state ──>   draw_crops in Python     one per process
#     set_seed(0) compiled    ──> numba's state ──>   draw_crops compiled      one per thread
#
# numba fills its states with random bytes from the operating system. Only `np.random.seed` sets
# one, called in compiled code, on the same thread. From this follow three mistakes:
#
# - A script seeds in Python. Then no run can be repeated.
# - Compiled code seeds by the same number on all ranks. Then all ranks draw the same crops, of
#   different samples, and no error shows.
# - One thread seeds and another draws. Then it is as if nobody had seeded.
#
# A crop is six numbers: where it lies in the picture (y, x), whether it is mirrored, how bright it
# is in 64ths, and where a square of it is blackened. The two functions below run in Python as they
# stand, and are compiled by `numba.njit`.

# %%
# The smallest y, x, flip, light, cut_y and cut_x, and how many choices there are for each:
LEAST = (0, 0, 0, 32, 0, 0)
CHOICES = (HEIGHT - S + 1, WIDTH - S + 1, 2, 65, S - CUT + 1, S - CUT + 1)


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
# FFCV's own augmentations draw in this way: their compiled loops call `np.random` on the thread
# that they run on, which is one that FFCV starts anew for each epoch, and with several workers
# numba's threads as well. The loader's `seed` orders the samples and reaches no augmentation.

# %% [markdown]
# ## 2. Numbers without a state
#
# Code that draws nothing has no state to seed. Either Python draws, one `np.random.Generator` per
# sample (data-loading/05), and hands compiled code an array of numbers. That is Python's work for
# each sample, little next to decoding a JPEG, and much next to copying the pixels of a crop that
# was decoded beforehand.
#
# Or the compiled loop computes the numbers, as a function of four words: seed, epoch, sample, and
# the number's place k among the six. The function must **scramble**: a change of one word by 1 has
# to change about half of the bits. The one below adds word after word, and scrambles after each as
# the generator splitmix64 does (Steele, Lea and Flood, 2014): it multiplies modulo 2^64, and folds
# the upper bits onto the lower ones.

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
# A function like this is called a **counter-based** generator: any thread computes the numbers of
# any sample, in any order. `np.random.Philox` and PyTorch's generator on CUDA are stronger ones.
#
#     the numbers come from              the same on n ranks, on n threads, after a restart?
#     np.random, compiled                no
#     a Generator per sample, Python     yes: where decoding takes most of the time
#     a mix of the four words            yes: in the compiled loop of a loader that only copies

# %% [markdown]
# ## 3. How it is measured
#
# What a function draws is a sequence of 64 crops. The ranks send one another their sequences, as
# bytes, and count how many are different.


# %%
def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


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
    claim("sequences on n ranks, seeded in Python", WORLD_SIZE, different(tries[0]), question=1)
    compiled_seed(SEED)
    claim("sequences on n ranks, seeded in compiled code", 1, different(draw(N)), question=2)
    threads = []
    for _ in range(2):
        compiled_seed(SEED)  # on this thread
        with ThreadPoolExecutor(1) as another:
            threads.append(another.submit(draw, N).result().tobytes())
    claim("sequences of 2 threads, seeded in a third", 2, len({*threads}), question=3)


# %% [markdown]
# The mix must give each sample of each epoch its own crop. It must give the same one whichever rank
# or thread computes it, so its samples are dealt to ranks, and then halved between two threads.


# %%
def check_mixed() -> None:
    """Claim that mixed numbers are new in each epoch, and the same on ranks and threads."""
    mixed = numba.njit(draw_mixed)
    samples_N = np.arange(N)
    epochs = [as_set(mixed(SEED, epoch, samples_N)) for epoch in range(2)]
    claim("crops of epoch 1 drawn before, mixed", 0, len(epochs[0] & epochs[1]))
    own = mixed(SEED, 1, np.arange(RANK, N, WORLD_SIZE))
    all_crops = as_set(np.concatenate(gather_objects(own)))
    claim("n ranks' crops that one rank draws, mixed", N, len(all_crops & epochs[1]))
    with ThreadPoolExecutor(2) as threads:
        later = threads.submit(mixed, SEED, 1, samples_N[N // 2 :])
        earlier = threads.submit(mixed, SEED, 1, samples_N[: N // 2])
    both = np.concatenate([earlier.result(), later.result()])
    wrong = (both != mixed(SEED, 1, samples_N)).any(1).sum()
    claim("crops of 2 threads unlike one thread's, mixed", 0, wrong)


def as_set(draws_B6: np.ndarray) -> set[bytes]:
    return {draw_6.tobytes() for draw_6 in draws_B6}


# %% [markdown]
# What the numbers cost is timed on rank 0. The first round compiles and is left out.


# %%
def by_generators(epoch: int) -> None:
    """Draw the numbers of 64 samples in Python, each from a Generator of its own."""
    for sample in range(N):
        np.random.default_rng((SEED, epoch, sample)).random(6)


def measure_costs(rounds: int = 11) -> dict[str, float]:
    """On rank 0: the median time of a core that each way takes, in us per sample."""
    mixed = numba.njit(draw_mixed)
    samples_N = np.arange(N)
    ways = {"a Generator": by_generators, "the mix": lambda epoch: mixed(SEED, epoch, samples_N)}
    cost = {}
    for name, way in ways.items():
        seconds = []
        for epoch in range(rounds):
            start = time.process_time()  # other load on the machine hardly changes it
            way(epoch)
            seconds.append(time.process_time() - start)
        cost[name] = statistics.median(seconds[1:]) / N * 1e6
    return cost


def check_costs(cost: dict[str, float]) -> None:
    """Claim what a Generator per sample costs next to the mix."""
    print0(f"{'':13}us: " + ", ".join(f"{name} {us:,.4g}" for name, us in cost.items()))
    ratio = cost["a Generator"] / cost["the mix"]
    claim("time: a Generator / the mix", 50, ratio, ">=", question=4, timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. n. Seeded in Python, numba's state stays as the operating system has filled it. A second try on
#    the same rank draws anew as well, so no run can be repeated.
# 2. One. The i-th crop is the same on every rank, and no log shows it. The samples differ, so this
#    costs variety, not correctness.
# 3. Two: the seed has set a state that neither of them draws from.
# 4. More than 50 times. A Generator is some ten microseconds of Python and hashing. The mix is
#    eight multiplications for each of six numbers, compiled together with the loop.
#
# **Try.** With `i`, the place in the array, each rank draws the same crops for its samples, and the
# second thread draws those of the first: two claims fail. On one rank only the threads' does, since
# a sample's place in the array is its number there.
#
# **When to use which.** Never `np.random` in compiled code, if a run is to be repeated. numba also
# takes a Generator as an argument, but there is one per call then and not per sample, and two
# threads must not draw from one at once. Draw in Python and pass an array, until a profile shows
# that it counts; then mix.
#
# **Where it bites.** A colleague adds `@njit` to a slow augmentation, the run gets faster, and from
# then on its seed changes nothing. Count the different crops once, as here.
#
# **On GPUs** the numbers are drawn on the cores as before. A kernel of your own, in Triton for
# example, has the same choice: `tl.rand(seed, offset)` is counter-based for the same reason. A
# thousand ranks exchange nothing for all this.


# %%
def main() -> None:
    command_line()
    launch()
    setup()
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
