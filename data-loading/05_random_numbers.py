"""Random crops that can be repeated: a function of seed, epoch and sample
=======================================================================

**Question.** A sample should get a new crop in every epoch, and the same crop again in a second
run, on any number of ranks and after any restart. Where must its random numbers come from?

**Predict**, and write it down before you run. An epoch has 64 samples; rank r of n has samples r,
r + n, r + 2n and so on.

1. Each rank draws its samples' crops from one Generator, which is seeded by its rank. The same
   epoch is run on n ranks and on n + 1. How many of the 64 samples get the same crop in both?
2. Each crop is drawn from a Generator of its own instead, seeded by `seed + epoch + sample`. Of the
   64 crops of epoch 1, how many has epoch 0 drawn already?
3. Now the seed is the tuple of the three numbers. A `Dataset` has the epoch as an attribute, and
   the trainer sets `dataset.epoch = 1` before the second epoch. Its DataLoader has
   `persistent_workers=True`. Of the 64 crops of epoch 1, how many has epoch 0 drawn already?
4. To make a Generator for each sample takes time. What percentage is it of the time that it takes
   to decode the sample, a JPEG of 100 kB?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_random_numbers.py    # one rank per GPU, else gloo
    python 05_random_numbers.py                                      # the same, started for you

Not run on several GPUs, where nothing differs: the numbers are drawn on CPUs. Question 4 needs
Pillow, from `pip install -e '.[data]'`.

**Try.** In `draw_crop` take `epoch` out of the tuple: which claims fail?

**Before.** data-loading/15_seeds_of_workers.py: a worker has a copy of every random state.

**Next.** data-loading/16_random_states_of_numba.py: compiled code has random states of its own.
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
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

try:
    from PIL import Image
except ImportError:  # it comes with the extra [data]
    Image = None

N = 64  # samples in an epoch
SEED = 0
HEIGHT = 160  # of a picture, in pixels
WIDTH = 240
S = 128  # height and width of a crop
CUT = 32  # height and width of a square in it that is blackened

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
# ## 3. How the epoch reaches a worker
#
# The trainer knows the epoch; a worker of a DataLoader makes the crops. The worker was forked with
# a copy of the dataset. What the trainer writes into its own dataset later, the copy does not see:
#
#     trainer:  dataset.epoch = 1                 worker: its copy has epoch 0, and draws from it
#     trainer:  sends (epoch 1, sample 5)   ──>   worker: draws from (seed, 1, 5)
#
# Without `persistent_workers=True` it happens to work, since each epoch forks new workers. A way
# that always works is to send the epoch with the sample's number. The sampler lives in the trainer,
# so it can: whatever it yields is what `__getitem__` gets.


# %%
class EpochInTheDataset(Dataset):
    """What many loaders do: `dataset.epoch = 1` before the next epoch."""

    epoch = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, sample: int) -> bytes:
        return draw_crop(SEED, self.epoch, sample).tobytes()  # stands for the crop itself


class EpochWithTheSample(Dataset):
    """The cure, first half: the epoch comes with each index."""

    def __getitem__(self, index: tuple[int, int]) -> bytes:
        epoch, sample = index
        return draw_crop(SEED, epoch, sample).tobytes()


class PairsSampler(Sampler):
    """The cure, second half: yield (epoch, sample) for each of another sampler's samples."""

    epoch = 0

    def __init__(self, samples: Iterable[int]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for sample in self.samples:
            yield self.epoch, sample


# %% [markdown]
# In a training script `samples` is a `DistributedSampler`, whose `set_epoch` is called next to it.
#
# **When to use which.**
#
#     the numbers come from            use it
#     one Generator per rank           if neither ranks nor order ever change: a simulation
#     a global state of each worker    if you never need a crop again (data-loading/15)
#     a Generator per sample           always, unless a loader only copies pixels
#     a mix of the four words          in the compiled loop of a loader that does (data-loading/16)

# %% [markdown]
# ## 4. How it is measured
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
# For question 3 each rank reads two epochs through two workers. `told` is what the trainer tells
# the epoch: the dataset, or the sampler.


# %%
def read_two_epochs(
    dataset: Dataset, sampler: Iterable, told: Dataset | Sampler, persistent: bool
) -> list[set[bytes]]:
    """Return the crops of two epochs that a DataLoader with two workers delivers."""
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(
        dataset, 8, sampler=sampler, collate_fn=list, persistent_workers=persistent, **workers
    )
    crops = [set(), set()]
    for epoch in range(2):
        told.epoch = epoch
        for batch in loader:
            crops[epoch].update(batch)
    return crops


def check_workers() -> None:
    """Claim how many crops come again, by where the epoch is told."""
    text = "crops drawn before"
    dataset = EpochInTheDataset()
    first, second = read_two_epochs(dataset, range(N), dataset, persistent=True)
    claim(f"{text}, epoch in the dataset", N, len(first & second), question=3)
    dataset = EpochInTheDataset()
    first, second = read_two_epochs(dataset, range(N), dataset, persistent=False)
    claim(f"{text}, the same, workers forked anew", 0, len(first & second))
    sampler = PairsSampler(range(N))
    first, second = read_two_epochs(EpochWithTheSample(), sampler, sampler, persistent=True)
    claim(f"{text}, epoch with the sample", 0, len(first & second))


# %% [markdown]
# What a Generator costs is timed on rank 0, next to decoding. The first round is left out.


# %%
def measure_costs(rounds: int = 11) -> dict[str, float]:
    """On rank 0: the median time of a core that each thing takes, in us per sample."""
    from sklearn.datasets import load_sample_image

    photograph_HWC = np.ascontiguousarray(load_sample_image("china.jpg")[:375, :500])
    jpeg = io.BytesIO()
    Image.fromarray(photograph_HWC).save(jpeg, "JPEG", quality=97)
    things = {
        "decoding a JPEG": lambda sample: Image.open(jpeg).convert("RGB"),
        "a Generator": lambda sample: draw_crop(SEED, 0, sample),
    }
    cost = {}
    for name, thing in things.items():
        seconds = []
        for _ in range(rounds):
            start = time.process_time()  # other load on the machine hardly changes it
            for sample in range(N):
                thing(sample)
            seconds.append(time.process_time() - start)
        cost[name] = statistics.median(seconds[1:]) / N * 1e6
    return cost


def check_costs(cost: dict[str, float]) -> None:
    """Claim what a Generator costs next to decoding a JPEG."""
    print0(f"{'':13}us: " + ", ".join(f"{name} {us:,.4g}" for name, us in cost.items()))
    percent = 100 * cost["a Generator"] / cost["decoding a JPEG"]
    text = "percent: a Generator / decoding a JPEG"
    claim(text, 1, percent, atol=0.6, question=4, timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. n: only the first sample of each rank is drawn by the same rank in the same turn. Of three
#    numbers, all 64 stay.
# 2. 63. Sample k draws in epoch 1 what sample k + 1 drew in epoch 0. Over the epochs the same few
#    crops wander over the data, and a run with seed 1 shares nearly all of them with a run with
#    seed 0. From the tuple none comes again.
# 3. All 64: the workers that persist have epoch 0 for ever. No error shows, and every epoch trains
#    on the crops of the first. Forked anew or told with each sample, none comes again.
# 4. About one percent. So for a loader that decodes, a Generator per sample is the whole answer.
#
# **Try.** Without `epoch` in the tuple all 64 crops of epoch 1 have been drawn before, wherever the
# epoch is told. Three claims fail: "three numbers" of question 2, and the two of question 3 that
# expect 0. Crops still differ within an epoch, and stay with another number of ranks.
#
# **Where it bites.** A trainer that resumes at epoch 7 passes 7, and gets the crops that it would
# have had. A trainer that counts epochs from 0 again after a restart draws epoch 0's once more,
# whatever the function: the epoch belongs into the checkpoint.
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
    check_workers()
    if Image is None:
        blocked("percent: a Generator / decoding a JPEG", needs="Pillow: pip install -e '.[data]'")
        finish()
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
