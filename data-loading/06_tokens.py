"""One global order of tokens: restarts on any number of ranks
===========================================================

**Question.** n ranks train a language model on the windows of one long array of tokens. How does
each rank know which windows are its own, so that every step holds the same ones on any number of
ranks and after any restart?

**Predict**, and write it down before you run. An epoch has 499 windows of 128 tokens, and a step
takes 24 windows, all ranks together.

1. PyTorch's `DistributedSampler` deals the 499 windows of an epoch to 4 ranks. How many come twice?
2. Seven steps run on 4 ranks, 6 windows per rank and step. Each rank saves how many windows of its
   own share it has taken, and 2 ranks go on from there. How many windows come twice?
3. Now one number is saved for the whole run: the windows that all ranks together have taken. Two
   ranks go on, with 48 windows per step. How many windows come too often or too rarely?

**Run.**

    torchrun --standalone --nproc-per-node=4 06_tokens.py    # NCCL on 4 GPUs, else gloo
    python 06_tokens.py                                      # the same, started for you

Not run on several GPUs, where nothing differs: the order is arithmetic on the host.

**Try.** In `order` seed with `[SEED, epoch, RANK]`: which claims fail, and would a loss curve have
told you? In `Loader.step` count only the windows of this rank, `self.consumed += len(positions)`:
which claims fail now?

**Before.** parallelism/01_data_parallelism_ddp.py: how ranks share a batch.

**Next.** data-loading/18_token_shards.py: the files behind the windows, mapped into memory.
"""

import argparse
import ctypes
import functools
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

T = 128  # tokens in a window
WINDOWS = 499  # of an epoch; a prime, so that no number of ranks divides it
BATCH = 24  # windows per step, all ranks together
SEED = 0
TOKENS = np.arange(WINDOWS * T + 1)  # here a token says where it stands

# %% [markdown]
# ## 1. One global order, and ranks that cut it
#
# A language model trains on **windows**: rows of T tokens, cut from one long array of tokens, and
# numbered. A window takes along one token more, because the target of a token is the one after it.
# On disk the array is a file of 16- or 32-bit integers, mapped into memory:
# `np.memmap(path, np.uint16, "r")`. Here it is `TOKENS`, in which each token is its own place.
#
# Think of the whole run as one endless line of **positions**. Which window stands at a position
# depends on the seed and on the position, and on nothing else. Epoch 0 is one permutation of all
# windows, epoch 1 is another one, and they follow each other without a gap. Step b takes the
# positions from 24 b to 24 b + 23. Of these, rank r of n takes every n-th, from the r-th on:
#
#     position      0   1   2   3   4   5  ...  23 |  24  25  26  27  28  29  ...
#     window      221 434 109 334 375  71  ... 209 | 251 418 119 411  63 440  ...
#     on 2 ranks    0   1   0   1   0   1  ...   1 |   0   1   0   1   0   1  ...
#     on 3 ranks    0   1   2   0   1   2  ...   2 |   0   1   2   0   1   2  ...
#
# So the number of ranks decides who computes a row, and never which rows a step holds. A checkpoint
# needs one number: how many positions are **consumed**. From there any number of ranks can go on,
# even with another batch size. And nothing is repeated or left out where epochs meet: step 20 takes
# the last 19 windows of epoch 0 and the first 5 of epoch 1.


# %%
@functools.cache
def order(epoch: int) -> np.ndarray:
    """The windows in the order in which this epoch takes them, the same on every rank."""
    return np.random.default_rng([SEED, epoch]).permutation(WINDOWS)


def window_at(position: int) -> int:
    """Which window stands at this position of the run."""
    epoch, place = divmod(position, WINDOWS)
    return int(order(epoch)[place])


def rows_of(windows: list[int]) -> np.ndarray:
    """Return the tokens of these windows, (B, T + 1): inputs, and one place on, their targets."""
    return np.stack([TOKENS[window * T : (window + 1) * T + 1] for window in windows])


class Loader:
    """Delivers the rows of one rank, step after step; `consumed` is all there is to save."""

    def __init__(self, rank: int, ranks: int, consumed: int = 0, batch: int = BATCH) -> None:
        self.rank = rank
        self.ranks = ranks
        self.consumed = consumed  # windows that all ranks together have taken
        self.batch = batch

    def step(self) -> np.ndarray:
        """Return this rank's rows of the next step, (B, T + 1)."""
        positions = range(self.consumed + self.rank, self.consumed + self.batch, self.ranks)
        self.consumed += self.batch
        return rows_of([window_at(position) for position in positions])


# %% [markdown]
# ## 2. What goes wrong without it: shares, and counts per rank
#
# The usual loader deals the epoch out first: rank r's **share** is every n-th window of the order,
# and the rank counts how far it is in its share. While the number of ranks stays, this is the same
# run. But a count in a share of n means nothing in a share of another number of ranks:
#
#     order                  w0  w1  w2  w3  w4  w5  w6  w7  ...
#     4 ranks, one taken     ==  ==  ==  ==                          each saves "1"
#     2 ranks go on at 1             **  **  **  **  **  **  ...     w2 and w3 come twice


# %%
class OwnShare:
    """The mistake: a rank's share of the epoch, and a count of its own."""

    def __init__(self, rank: int, ranks: int, taken: int = 0) -> None:
        self.share = order(0)[rank::ranks].tolist()
        self.rows = BATCH // ranks
        self.taken = taken  # windows of its share that this rank has taken

    def step(self) -> np.ndarray:
        """Return this rank's rows of the next step, (B, T + 1)."""
        windows = self.share[self.taken : self.taken + self.rows]
        self.taken += len(windows)
        return rows_of(windows)


# %% [markdown]
# PyTorch's own `DistributedSampler` deals out shares too, epoch by epoch. Where n does not divide
# the windows, it **pads**: the last round is filled up with windows from the beginning of the
# order. With `drop_last=True` it leaves out the last round instead. Either way it knows nothing of
# steps. A `DataLoader` behind it makes the batches, and with its own `drop_last` it leaves out the
# last step of each epoch if that is not full.

# %% [markdown]
# ## 3. How it is measured
#
# A row's first token says which window it is, and the rest of it must follow: so rows are counted
# by windows, over all ranks. The oracle knows of no ranks: a run is one permutation, then the next.


# %%
def windows_of(rows: np.ndarray) -> list[int]:
    """Return which windows these rows are; -1 for a row that is none."""
    starts = rows[:, 0]
    whole = (rows == starts[:, None] + np.arange(T + 1)).all(1) & (starts % T == 0)
    return np.where(whole, starts // T, -1).tolist()


def times_taken(windows: list[int]) -> np.ndarray:
    """Return how often each window was taken, all ranks together; -1 is none."""
    own = np.array(windows, int)
    return sum(gather_objects(np.bincount(own[own >= 0], minlength=WINDOWS)))


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


# %% [markdown]
# **The global order** is compared over 25 steps; an epoch ends in the 21st.


# %%
def check_order() -> None:
    """Claim that n ranks together take what one process takes, in its order."""
    loader = Loader(RANK, WORLD_SIZE)
    mine = [windows_of(loader.step()) for _ in range(25)]
    taken = np.empty((25, BATCH), int)
    for rank, windows in enumerate(gather_objects(mine)):
        taken[:, rank::WORLD_SIZE] = windows
    epochs = [np.random.default_rng([SEED, epoch]).permutation(WINDOWS) for epoch in (0, 1)]
    expected = np.concatenate(epochs)[: 25 * BATCH].reshape(25, BATCH)
    claim("windows unlike those of one process, of 600", 0, (taken != expected).sum())
    same = (order(0) == order(1)).sum()
    claim("places with the same window next epoch, at most", 10, same, "<=")


# %% [markdown]
# **DistributedSampler** is asked on every rank what it deals. The ranks take one window each per
# round; a window that was taken before is a repetition.


# %%
def check_sampler() -> None:
    """Claim what DistributedSampler repeats or leaves out, and on which ranks."""
    if WORLD_SIZE == 1:
        blocked("what DistributedSampler repeats or leaves out", needs="2 ranks")
        return
    deal = functools.partial(DistributedSampler, range(WINDOWS), WORLD_SIZE, RANK, seed=SEED)
    repeating = []
    seen = set()
    for one_round in zip(*gather_objects(list(deal())), strict=True):
        for rank, window in enumerate(one_round):
            if window in seen:
                repeating.append(rank)
            seen.add(window)
    rest = WINDOWS % WORLD_SIZE
    claim("padding: windows that come twice", WORLD_SIZE - rest, len(repeating), question=1)
    claim("padding: the first rank that repeats one", rest, min(repeating, default=-1))

    sampler = deal(drop_last=True)
    dealt = set().union(*gather_objects(list(sampler)))
    claim("drop_last: windows left out", rest, WINDOWS - len(dealt))

    rows = BATCH // WORLD_SIZE
    loader = DataLoader(range(WINDOWS), rows, sampler=sampler, drop_last=True)
    delivered = sum(gather_objects(sum(map(len, loader))))
    left_out = WINDOWS % (WORLD_SIZE * rows)
    claim("drop_last, DataLoader too: left out", left_out, WINDOWS - delivered)


# %% [markdown]
# **The restart.** Both loaders stop after seven steps on n ranks, and half as many go on. The
# shares are then taken to the end of the epoch, and once more from half as many ranks to n.


# %%
def check_own_counts() -> None:
    """Stop on some ranks and go on with others; claim what comes twice or never, by own counts."""
    fewer = max(1, WORLD_SIZE // 2)
    again = times_taken(own_counts_saved(WORLD_SIZE, fewer)) - 1
    expected = 7 * (BATCH // WORLD_SIZE) * (WORLD_SIZE - fewer)
    claim("own counts saved: windows that come twice", expected, (again > 0).sum(), question=2)
    never = times_taken(own_counts_saved(fewer, WORLD_SIZE)) == 0
    each = 7 * (BATCH // fewer)
    expected = min(each * WORLD_SIZE, WINDOWS) - each * fewer
    claim("own counts, more ranks: windows that never come", expected, never.sum())


def own_counts_saved(before: int, after: int) -> list[int]:
    """Return this rank's windows of an epoch: seven steps on some ranks, then on others."""
    windows = []
    each = 0
    if RANK in range(before):
        loader = OwnShare(RANK, before)
        for _ in range(7):
            windows += windows_of(loader.step())
        each = loader.taken
    each = from_rank_0(each)  # every other rank has saved the same number
    if RANK in range(after):
        loader = OwnShare(RANK, after, each)
        while loader.taken < len(loader.share):
            windows += windows_of(loader.step())
    return windows


# %% [markdown]
# The global order goes on with fewer ranks and steps of 48, and then on n ranks again to the end of
# epoch 23, since 24 epochs are 499 whole steps of 24: each window should have come 24 times.


# %%
def check_restart() -> None:
    """Claim what comes too often or too rarely in 24 epochs with two restarts, by one number."""
    fewer = max(1, WORLD_SIZE // 2)
    windows = []
    consumed = 0
    for ranks, batch, steps in ((WORLD_SIZE, 24, 7), (fewer, 48, 100), (WORLD_SIZE, 24, 292)):
        loader = Loader(RANK, ranks, consumed, batch)
        if RANK in range(ranks):
            for _ in range(steps):
                windows += windows_of(loader.step())
        consumed = from_rank_0(loader.consumed)  # all that a checkpoint holds
    times = times_taken(windows)
    claim("one number saved: windows too often", 0, (times > 24).sum(), question=3)
    claim("one number saved: windows too rarely", 0, (times < 24).sum(), question=3)


# %% [markdown]
# ## What you should have seen
#
# With 4 ranks:
#
# 1. One, on rank 3, since 499 = 4 x 124 + 3: in the last round ranks 0 to 2 take the last three
#    windows, and rank 3 gets the first of the order once more. In general n - (N mod n) windows
#    come twice, on the ranks from N mod n on, unless n divides N. With `drop_last=True` the N mod n
#    = 3 are left out. If the `DataLoader` drops its last batch too, an epoch loses N mod 24 = 19.
# 2. 7 x 6 x (4 - 2) = 84. Four ranks have taken 168 windows, and the two go on at the 85th. The
#    other way round, from two ranks to four, 168 never come: each of two has taken 84, so the four
#    go on behind the 336th.
# 3. None, whatever the number of ranks and the size of a step: position 168 comes next, and which
#    window stands there was settled by the seed.
#
# **Try.** With RANK in the seed every rank has an order of its own. The rows of the order, of both
# own counts and of both too often and too rarely fail; those of the sampler, which has its own
# seed, do not. The loss still goes down, and its curve tells you nothing. If each rank counts only
# its own windows, then on 4 ranks a step begins 6 positions after the last one instead of 24, and
# positions are taken two or four times: the row of the order fails, and both of the restart, where
# the run ends before epoch 9 instead of after epoch 23. With one rank both changes do nothing, so a
# test on one rank finds neither.
#
# **On GPUs** a row of a mapped file is copied once, into pinned memory, and goes to the GPU with
# `non_blocking=True`. What a step *computes* may still differ between numbers of ranks: sums of
# gradients are added in another order, and dropout draws from another generator. Its rows do not.
#
# **When.** Always, if a run may be stopped: one integer costs nothing. Counts per rank suffice only
# if the number of ranks and the batch never change.
#
# **Where it bites.** The one number means something only with the same seed, T, files and shuffle.
# NumPy and PyTorch may change what a seed gives from one version to the next, so save a checksum of
# the order along with it. Save what was *trained* on, too: a loader with workers delivers some
# batches ahead, and a checkpoint that takes its own `consumed` loses these windows. Ranks that
# share a model by tensor or pipeline parallelism are one rank here: they take the same rows. And
# where the ranks do not divide a step, as 5 do not divide 24, ranks have unequal numbers of rows,
# so gradients must be weighed by tokens: data-loading/13.
#
# **At scale.** 15 trillion tokens in windows of 8,192 are 1.8 billion windows, and 15 GB of order
# on each rank. So one permutes the files and then the windows of a few open ones, as FFCV's
# quasi-random order does, or computes the window from the place by a cipher on 0 to N-1 (a Feistel
# network), which needs no table.
#
# **In other systems.** nanoGPT draws each window at a random offset of a memory map, each rank from
# a seed of its own. There is no epoch: after as many draws as there are windows, 1/e = 37% of the
# tokens have not been seen. Megatron-LM saves `consumed_samples` and deals out slices of one global
# order, which it keeps in arrays on disk. torchtitan's loader saves a state per data-parallel rank
# and refuses to go on with another number of ranks.


# %%
def main() -> None:
    command_line()
    launch(range(1, BATCH + 1))
    if WORLD_SIZE > BATCH:
        refuse(f"a step has {BATCH} rows, got {WORLD_SIZE} ranks; start at most {BATCH}")
    setup()
    check_order()
    check_sampler()
    check_own_counts()
    check_restart()
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
