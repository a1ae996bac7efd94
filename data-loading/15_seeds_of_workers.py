"""Seeds of DataLoader's workers: copies that draw the same numbers
================================================================

**Question.** A dataset draws a random crop of each sample. Why may all workers of all ranks draw
the same crops, in every epoch, and what makes them differ?

**Predict**, and write it down before you run. Each of n ranks reads two epochs of 64 samples
through a DataLoader with two workers, 128 n crops in all. All ranks were seeded alike, since they
train one model.

1. The dataset makes a NumPy Generator in `__init__` and draws each sample's crop from it. How many
   different crops are among the 128 n?
2. How many, if the same dataset is read with `persistent_workers=True`?
3. The dataset draws each crop by `torch.randint` instead. How many different ones now?
4. The dataset has its Generator again, but each worker replaces it when it starts, by one that is
   seeded by `torch.initial_seed()`. How many?
5. In addition, the loader is given `generator=`, a torch Generator seeded by the rank. How many?

**Run.**

    torchrun --standalone --nproc-per-node=4 15_seeds_of_workers.py   # NCCL on 4 GPUs, else gloo
    python 15_seeds_of_workers.py                                     # the same, started for you

Not run on several GPUs, where nothing differs: the numbers are drawn on CPUs.

**Try.** In `own_generator` write `SEED` for `torch.initial_seed()`: which claims fail? In
`seeded_by_rank` write `SEED` for `SEED + RANK`: which ones now, and which on one rank?

**Before.** data-loading/10_dataloader_knobs.py: what a worker is, and when it starts.

**Next.** data-loading/02_beton_file.py: FFCV's file; without FFCV,
data-loading/17_page_cache.py.
"""

import argparse
import ctypes
import itertools
import json
import logging
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

SAMPLES = 64
BATCH = 4
WORKERS = 2
SEED = 0

# %% [markdown]
# ## 1. A forked worker has a copy of every random state
#
# A random generator is a **state**. Each number that is drawn moves the state on, and the same
# state gives the same numbers. A worker of a DataLoader is forked: it begins with a copy of all
# that its rank has at that moment, and so with every generator in the state that it was in.
# Whatever the worker draws moves on its own copy only, and the copy ends with the worker:
#
#     epoch 0    rank: state 0 ──fork──┬──> worker 0 draws  a b c d ...   and ends
#                                      └──> worker 1 draws  a b c d ...   and ends
#     epoch 1    rank: state 0 ──fork──┬──> worker 0 draws  a b c d ...   and ends
#                                      └──> worker 1 draws  a b c d ...   and ends
#
# All other ranks, seeded alike, do the same. No error shows, and samples differ, so a model trains.
# It only sees fewer crops than it seems to. The dataset below draws one number per sample from each
# generator that a dataset may use; it stands for the crop.


# %%
class Draws(Dataset):
    """A number from each source of random numbers, for each sample."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(SEED)  # made before the workers are

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {
            "its own Generator": int(self.generator.integers(2**62)),
            "torch": int(torch.randint(2**62, ())),
            "random": random.getrandbits(62),
            "numpy": int(np.random.randint(2**62)),
        }


# %% [markdown]
# ## 2. Two seeds that differ: the worker's and the rank's
#
# DataLoader knows what a fork does. When a worker starts, it seeds the three **global** states
# there, those of `torch`, `random` and NumPy, by a *base seed* and the worker's number. The rank
# draws a new base seed whenever workers start, from torch's global state. Two holes are left:
#
# - A generator that the dataset has made for itself is not global, so it stays the copy that it is.
#   `worker_init_fn` closes this hole: each worker calls it when it starts, and
#   `torch.initial_seed()` is then the worker's own seed.
# - Ranks that are seeded alike draw the same base seeds. `generator=` closes this one: the loader
#   draws its base seeds from it.
#
# So there are three cases:
#
#     crops are drawn from                            workers   epochs   ranks
#     a Generator made in __init__                    alike     alike    alike
#     a global state, or with worker_init_fn          differ    differ   alike
#     the same, and generator= seeded by the rank     differ    differ   differ


# %%
def own_generator(worker: int) -> None:
    """Give a worker's copy of the dataset a generator of its own: to be its worker_init_fn."""
    get_worker_info().dataset.generator = np.random.default_rng(torch.initial_seed())


def seeded_by_rank() -> torch.Generator:
    """Return a generator for a loader's base seeds."""
    return torch.Generator().manual_seed(SEED + RANK)


# %% [markdown]
# A training script says
#
#     loader = DataLoader(
#         photos, batch_size, num_workers=8,
#         worker_init_fn=own_generator,
#         generator=seeded_by_rank(),
#     )
#
# and leaves the order of the samples to a `DistributedSampler`, which has to be seeded alike on all
# ranks. `shuffle=True` would draw the order, too, from this generator: on each rank another.

# %% [markdown]
# ## 3. How it is measured
#
# Drawn numbers lie below 2^62, so two are not equal by chance. The different ones are counted over
# all ranks and both epochs.


# %%
def drawn_in_two_epochs(**knobs: object) -> dict[str, set[int]]:
    """Read two epochs on every rank; return all that was drawn on all of them, by source."""
    torch.manual_seed(SEED)  # alike on every rank, as for one model
    knobs |= {"num_workers": WORKERS, "multiprocessing_context": "fork", "collate_fn": list}
    loader = DataLoader(Draws(), BATCH, **knobs)
    own = defaultdict(set)
    for batch in itertools.chain(loader, loader):
        for sample in batch:
            for source, number in sample.items():
                own[source].add(number)
    together = defaultdict(set)
    for numbers in gather_objects(own):
        for source in numbers:
            together[source] |= numbers[source]
    return together


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def check_copies() -> None:
    """Claim how many different numbers come if the workers are what DataLoader makes of them."""
    drawn = drawn_in_two_epochs()
    one_worker = SAMPLES // WORKERS  # what a worker draws in an epoch
    own = len(drawn["its own Generator"])
    claim("different draws, Generator of __init__", one_worker, own, question=1)
    claim("different draws, torch", 2 * SAMPLES, len(drawn["torch"]), question=3)
    claim("different draws, random", 2 * SAMPLES, len(drawn["random"]))
    claim("different draws, numpy", 2 * SAMPLES, len(drawn["numpy"]))
    own = len(drawn_in_two_epochs(persistent_workers=True)["its own Generator"])
    claim("different draws, persistent workers", 2 * one_worker, own, question=2)


def check_cures() -> None:
    """Claim how many there are with a generator per worker, and with base seeds per rank."""
    own = len(drawn_in_two_epochs(worker_init_fn=own_generator)["its own Generator"])
    claim("different draws, worker_init_fn", 2 * SAMPLES, own, question=4)
    knobs = {"worker_init_fn": own_generator, "generator": seeded_by_rank()}
    drawn = drawn_in_two_epochs(**knobs)
    everything = 2 * SAMPLES * WORLD_SIZE
    own = len(drawn["its own Generator"])
    claim("different draws, and generator=", everything, own, question=5)
    for source in ("torch", "random", "numpy"):
        claim(f"different draws, {source}, generator=", everything, len(drawn[source]))
    again = drawn_in_two_epochs(worker_init_fn=own_generator, generator=seeded_by_rank())
    new = again["its own Generator"] - drawn["its own Generator"]
    claim("draws of a second run that the first had not", 0, len(new))


# %% [markdown]
# ## What you should have seen
#
# 1. 32, whatever n is. A worker draws for 32 samples; the other one draws the same 32 numbers, so
#    do all ranks, and so does the second epoch.
# 2. 64. Persistent workers go on with their copies in the second epoch, but both still draw alike,
#    on all ranks.
# 3. 128. DataLoader has seeded the workers of a rank apart, and anew for each epoch. But all ranks
#    drew the same base seeds. It is the same with `random` and with NumPy's global state.
# 4. 128: the worker's own seed is made of the same base seed.
# 5. 128 n. All differ now, and a second run draws the same numbers again.
#
# **Try.** With `SEED` for `torch.initial_seed()` all workers make the same Generator: 32 different
# numbers, so the claims of questions 4 and 5 fail. With `SEED` for `SEED + RANK` all ranks draw
# alike: the four claims with `generator=` fail, and on one rank none, which is where such a loader
# is usually tried.
#
# **Which when.** Draw from the global states if you can: then only `generator=` is needed. Give the
# dataset a Generator of its own only together with `worker_init_fn`. A script that seeds torch by
# `seed + rank` has closed the second hole already; DDP broadcasts rank 0's weights, so the model is
# the same all the same.
#
# **Where it bites.** A library that keeps a generator in a transform, as some packages of
# augmentations do, is the first case: count different crops once, as here. Python 3.14 starts
# workers by `forkserver`: the dataset is pickled then, and its Generator with it, in the same state
# for every worker. Code that numba has compiled has states of its own (data-loading/16).
#
# Which crops are drawn still depends on the numbers of workers and of ranks, so a run that goes on
# with other numbers draws other crops, on a thousand ranks after every node that fails. To draw
# each crop from (seed, epoch, sample) depends on neither: data-loading/05_random_numbers.py.


# %%
def main() -> None:
    command_line()
    launch()
    setup()
    check_copies()
    check_cures()
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
