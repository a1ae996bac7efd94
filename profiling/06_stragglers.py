"""Stragglers: one slow rank, uneven lengths, and garbage collection
=================================================================

**Question.** All ranks wait for the slowest one in every step. How do you find out who that is
without crying wolf over every hiccup, what does it cost, and what does each cure give back?

**Predict**, and write it down before you run:

1. The last of n ranks takes 1.5 times as long to compute as the others. How many times as long as
   the others' is its *step*, from one all-reduce to the next? And its time until the all-reduce?
2. All ranks are alike, and their times vary from step to step. Somebody raises an alarm when a rank
   takes longer than the others' median in at least 15 of 20 steps. In what share of all windows of
   20 steps does a healthy rank raise it? Does it matter whether the times have a heavy tail?
3. One rank is 3% slower in every step, as some GPUs are. Does that test name it? How many of 200
   healthy steps give a false alarm if "longer" means "more than 10% longer"?
4. Each rank gets 8 sequences, drawn at random. The lengths' standard deviation is about their mean.
   How much longer than with equal shares is the step? And if the sequences are dealt by length?
5. Python's garbage collector runs in every fifth step of each rank, in each when it likes. In what
   share of the steps does somebody wait for it? And if all ranks collect in the same step?
6. The slow rank of question 1 gets fewer sequences. How long does a step take now, compared with a
   healthy one? Ranks with fewer sequences average their gradients as DDP does: what goes wrong?

**Run.**

    torchrun --standalone --nproc-per-node=4 06_stragglers.py    # NCCL on 4 GPUs, else gloo
    python 06_stragglers.py                                      # the same, started for you
    python 06_stragglers.py --figure own_times.png               # and draw all ranks' times

Not run on several GPUs.

**Try.** In `one_step` read the clock for `own` after the all-reduce instead of before: whom does
the test name now? Set `MARGIN = 0.0`: which rows cry wolf?

**Before.** profiling/01_distributed_profiling.py: a straggler in the traces of all ranks.

**Next.** exercises/25_straggler_detector; then profiling/07_tracing_with_ebpf.py.
"""

import argparse
import ctypes
import gc
import json
import logging
import math
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

MARGIN = 0.10  # a rank is late in a step if it takes so much longer than the others' median
FALSE_ALARM = 0.01  # how probable an alarm may be in a window of healthy steps, over all ranks
WINDOW = 20  # steps that are judged together
SLOW = 1.5  # the last rank takes so many times as long, in the job that has a slow rank
SEQUENCES, DRAWN = 16, 8  # of a rank in a step: equally long ones, and such of uneven lengths
WORK_MS, PAUSE_MS = 7.0, 9.0  # what a sleep stands for: a healthy rank's compute, a collection

FEATURES = 8  # of a sequence, as the small model sees it
WIDTH = 8192  # of the large model's layers, on GPUs

# Shapes: S steps, R ranks, N sequences, D features, T tokens, H hidden.

# %% [markdown]
# ## 1. A rank's own time, and the step's
#
# A synchronous step ends for all ranks when the slowest arrives at the all-reduce:
#
#     rank 0    [own time][waits       ][all-reduce]
#     rank 1    [own time][waits       ][all-reduce]
#     rank 2    [own time              ][all-reduce]      waits for nobody
#     rank 3    [own time][waits       ][all-reduce]
#               '-- the step's time, on all ranks --'
#
# So the time of a step, which every training loop prints, cannot tell who was slow. A rank's **own
# time** can: from the end of the last all-reduce until the rank is ready for the next. It needs
# one more reading of the clock and nobody else's clock, for it is a difference. If every rank had
# the mean of all own times, the step would end then. What is **lost** is the rest: the share of
# all ranks' time that is spent waiting.


# %%
@dataclass
class Times:
    """What all ranks measured: seconds in every step; and what explains them. All are (S, R)."""

    own_SR: torch.Tensor  # until the rank is ready for the all-reduce
    step_SR: torch.Tensor  # until it is over
    tokens_SR: torch.Tensor  # that the rank computed
    paused_SR: torch.Tensor  # seconds that garbage collection took of its own time


def lost(own_SR: torch.Tensor) -> float:
    """The share of all ranks' time that is spent waiting for the slowest of each step."""
    return 1 - (own_SR.mean(dim=1).sum() / own_SR.amax(dim=1).sum()).item()


# %% [markdown]
# ## 2. A test that does not cry wolf
#
# Times on real machines have hiccups: one step in a hundred takes five times as long, for no
# reason that comes back. A threshold on single steps, or on means, alarms at each of them. So
# count instead. Call a rank **late** in a step if it takes longer than the median of the others. A
# healthy rank is late in half of the steps, as a coin falls, whatever the distribution of the
# times is: of n equal ranks each place in the order is equally probable. This is the *sign test*:
#
#     P(late in at least k of m steps) = sum of C(m, i) / 2^m  for i = k to m
#
# Choose k such that this, times the number of ranks that could alarm (Bonferroni), is at most the
# probability of a false alarm that you accept. Twenty steps suffice for ten thousand ranks.
#
# One thing the coin does need: steps that are **independent**. A GPU that runs hot for a minute,
# another job on the node or a busy switch makes a rank late in many steps in a row. Twenty
# neighboring steps are then one toss, not twenty, and the promise is void. So judge steps that are
# further apart than such a spell lasts, say each fiftieth; or call only a rank that is named in two
# windows that far apart.
#
# That is half of the answer. No two GPUs are alike, and a rank that is always 1% slower is late in
# all steps: significant, and not worth a call. So a rank is late only if it takes more than 10%
# longer. A rank that is slower by less is then late in at most half of the steps, and the same k
# holds for it: the test needs no threshold that would have to be tuned to a machine.


# %%
def late(own_SR: torch.Tensor, margin: float) -> torch.Tensor:
    """Whether a rank took more than 1 + margin times the median of the others: bool, (S, R)."""
    ranks = own_SR.shape[1]
    columns = []
    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        in_order = own_SR[:, others].sort(dim=1).values
        median = in_order[:, len(others) // 2]  # the upper one of two
        columns.append(own_SR[:, rank] > (1 + margin) * median)
    return torch.stack(columns, dim=1)


def tail(k: int, steps: int) -> float:
    """The probability that a coin falls heads in at least k of so many steps."""
    return sum(math.comb(steps, i) for i in range(k, steps + 1)) / 2**steps


def enough(steps: int, ranks: int) -> int:
    """In how many steps a rank must be late to be named; steps + 1 if no number would do."""
    k = steps + 1
    while ranks * tail(k - 1, steps) <= FALSE_ALARM:
        k -= 1
    return k


def named(own_SR: torch.Tensor, margin: float = MARGIN) -> torch.Tensor:
    """Which ranks are stragglers in each whole window of steps: bool, (windows, R)."""
    windows = late(own_SR, margin).long().unfold(0, WINDOW, WINDOW).sum(dim=2)
    return windows >= enough(WINDOW, own_SR.shape[1])


# %% [markdown]
# What would other rules say of healthy ranks? Each gets the times of 8 simulated ranks, log-normal
# with a spread of 1%, of which one step in a hundred takes five times as long. In 200 steps there
# are ten windows, and 80 chances for a false alarm.


# %%
def simulate(steps: int, ranks: int, seed: int) -> torch.Tensor:
    """Seconds of healthy ranks, with hiccups: (S, R)."""
    drawn = torch.Generator().manual_seed(seed)
    own_SR = torch.exp(0.01 * torch.randn(steps, ranks, generator=drawn))
    return own_SR * torch.where(torch.rand(steps, ranks, generator=drawn) < 0.01, 5.0, 1.0)


def in_spells(steps: int, ranks: int, seed: int) -> torch.Tensor:
    """Seconds of healthy ranks each of which runs at another speed every 50 steps: (S, R)."""
    drawn = torch.Generator().manual_seed(seed)
    spells_SR = torch.exp(0.2 * torch.randn(steps // 50, ranks, generator=drawn))
    return spells_SR.repeat_interleave(50, dim=0) * simulate(steps, ranks, seed + 1)


def by_one_step(own_SR: torch.Tensor) -> torch.Tensor:
    return late(own_SR, MARGIN).unfold(0, WINDOW, WINDOW).any(dim=2)


def by_mean(own_SR: torch.Tensor) -> torch.Tensor:
    return late(own_SR.unfold(0, WINDOW, WINDOW).mean(dim=2), MARGIN)


def by_sign_alone(own_SR: torch.Tensor) -> torch.Tensor:
    return named(own_SR, margin=0.0)


RULES = {
    "one late step": by_one_step,
    "mean of 20 steps": by_mean,
    "sign test, no margin": by_sign_alone,
    "sign test, 10% margin": named,
}


def check_the_test() -> None:
    """Count alarms where the truth is known."""
    times = {
        "even": torch.rand(20_000, 8, generator=torch.Generator().manual_seed(1)),
        "heavy tail": 1 / torch.rand(20_000, 8, generator=torch.Generator().manual_seed(2)),
    }
    slack = 4 * math.sqrt(tail(15, WINDOW) / (20_000 / WINDOW * 8))  # four standard deviations
    for kind, own_SR in times.items():
        late_often = late(own_SR, 0.0).long().unfold(0, WINDOW, WINDOW).sum(dim=2) >= 15
        text = f"healthy, {kind}: late in 15 of 20 steps, share"
        share = late_often.double().mean()
        claim(text, tail(15, WINDOW), share, atol=slack, question=2, kind="simulated")
    healthy_SR = simulate(10_000, 8, seed=3)
    aging_SR = healthy_SR * torch.tensor([1.0] * 7 + [1.03])
    title = "false alarms per 200 steps, 8 ranks"
    print0(f"\n{'':13}{title:36}{'healthy':>9}{'one 3% slower':>15}")
    alarms = {}
    for rule, judge in RULES.items():
        alarms[rule] = [judge(own_SR).sum().item() / 50 for own_SR in (healthy_SR, aging_SR)]
        print0(f"{'':13}{rule:36}{alarms[rule][0]:9.2f}{alarms[rule][1]:15.2f}")
    print0()
    for rule in ("one late step", "mean of 20 steps"):
        claim(f"{rule}: alarms in 200 healthy steps", 1, alarms[rule][0], ">=", kind="simulated")
    text = "3% slower: alarms in 200 steps, "
    theirs = alarms["sign test, no margin"][1]
    claim(text + "no margin", 9, theirs, ">=", question=3, kind="simulated")
    ours = alarms["sign test, 10% margin"][1]
    claim(text + "10% margin", 0, ours, question=3, kind="simulated")
    spells_SR = in_spells(50_000, 8, seed=4)
    text = "healthy, in spells of 50 steps: "
    often = named(spells_SR).sum().item() / 250
    claim(text + "alarms in 200 steps", 5, often, ">=", kind="simulated")
    apart = named(spells_SR[::50]).sum().item() / 5
    claim(text + "each 50th", FALSE_ALARM * 10, apart, "<=", kind="simulated")


# %% [markdown]
# ## 3. Uneven lengths: nobody is slow, and all wait
#
# Sequences differ in length, a rank's work grows with its tokens, and in each step somebody has
# drawn the longest. The sum of b lengths whose standard deviation is c times their mean varies by
# c / sqrt(b), and the largest of n such sums lies e(n) standard deviations above their mean, if
# the sums are roughly normal:
#
#     step / step with equal shares = 1 + e(n) c / sqrt(b),   e(2) = 0.56, e(4) = 1.03, e(8) = 1.42
#
# The cure is to look at the lengths before they are dealt: the longest sequence first, each to the
# rank that would be done with it first. The same few lines cure a slow rank: they only need to
# know how fast each rank is. (They balance tokens. With long contexts attention grows with the
# square of the length, and it is that cost which must be balanced.)


# %%
def expected_largest(n: int) -> float:
    """The mean of the largest of n standard normal numbers."""
    x = torch.linspace(-8, 8, 10_001, dtype=torch.float64)
    below = torch.special.ndtr(x) ** n  # the probability that all n lie below x
    return ((x[1:] + x[:-1]) / 2 * below.diff()).sum().item()


def deal(sequences: list[int], lengths: list[int], speeds: list[float]) -> list[list[int]]:
    """Share out sequences: the longest first, each to the rank that would be done with it first."""
    shares = [[] for _ in speeds]
    tokens = [0] * len(speeds)
    for sequence in sorted(sequences, key=lambda sequence: -lengths[sequence]):
        done = [(t + lengths[sequence]) / v for t, v in zip(tokens, speeds, strict=True)]
        rank = done.index(min(done))
        shares[rank].append(sequence)
        tokens[rank] += lengths[sequence]
    return shares


# %% [markdown]
# ## 4. Garbage collection: rare on each rank, frequent on all
#
# Python's collector runs when enough objects were made since it last ran. Mostly it looks at the
# young ones only, which is quick. Now and then it looks at *all*, and a trainer with millions of
# objects then stands still for tenths of a second (Python 3.14 spreads that over several runs).
# Which step that hits depends on what each rank's data loader made. If a rank is hit in a share p
# of its steps, some rank is hit in
#
#     1 - (1 - p)^n
#
# of all steps, and all wait: with p = 0.2 on 8 ranks, in 83%. The cure costs two lines: turn the
# automatic collector off, and collect by hand in every k-th step, on all ranks in the *same* one.
# Before the first step `gc.freeze()` tells the collector to leave alone what lives until the end.


# %%
OBJECTS = 2000  # the collector runs when so many were made


class Collector:
    """Garbage of which each rank makes another amount; who collects it, when, and for how long."""

    def __init__(self, kind: str) -> None:
        self.kind = kind  # "off", "automatic", or "together"
        self.drawn = torch.Generator().manual_seed(RANK)
        self.begun = 0.0
        self.paused = 0.0  # seconds, all collections together

    def __enter__(self) -> "Collector":
        gc.collect()
        gc.freeze()
        gc.disable()
        gc.callbacks.append(self.wait)
        gc.set_threshold(OBJECTS)
        if self.kind == "automatic":
            self.make_garbage(OBJECTS)  # each rank has another start
            gc.enable()
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self.wait)
        gc.enable()

    def make_garbage(self, at_most: int) -> None:
        """Make some objects that only the collector can free, for each refers to itself."""
        for _ in range(int(torch.randint(at_most, (1,), generator=self.drawn))):
            cycle = []
            cycle.append(cycle)

    def wait(self, phase: str, about: dict) -> None:
        """Stand for the collection of a large trainer's objects: Python calls this at each one."""
        if phase == "start":
            self.begun = time.perf_counter()  # launch time, on a GPU: only the host pauses
        else:
            time.sleep(PAUSE_MS / 1e3)  # launch time
            self.paused += time.perf_counter() - self.begun  # launch time

    def one_step(self, step: int) -> None:
        if self.kind != "off":
            self.make_garbage(2 * OBJECTS // 5)  # OBJECTS in five steps, in the mean
        if self.kind == "together" and step % 5 == 0:
            gc.collect()


# %% [markdown]
# ## 5. The training job
#
# A linear model learns from sequences that are shared out among the ranks; its gradient is real,
# and so is the all-reduce. For the compute of a large model stands, on the CPU, a sleep in
# proportion to the rank's tokens: a rank that sleeps needs no core, so it is not disturbed by
# others on this machine. On GPUs that compute is real, and the clock waits for it.
#
# Ranks with unequal shares must not average their means, as DDP does: a token of a rank that has
# few would count more. So each rank divides the sum over its tokens by the tokens of *all* ranks,
# and the all-reduce adds.


# %%
class Job:
    """What each rank computes in each step, and what disturbs it."""

    def __init__(
        self,
        lengths: list[int],  # tokens of each sequence
        shares: list[list[list[int]]],  # the sequences of each step and rank
        slow: float = 1.0,  # the last rank takes so many times as long
        collector: str = "off",
    ) -> None:
        self.lengths = lengths
        self.shares = shares
        self.slow = slow
        self.collector = collector
        self.tokens_SR = tokens_of(lengths, shares)
        self.mean_tokens = self.tokens_SR.mean().item()


def tokens_of(lengths: list[int], shares: list[list[list[int]]]) -> torch.Tensor:
    """Tokens of each step and rank: (S, R)."""
    rows = []
    for step in shares:
        rows.append([float(sum(lengths[i] for i in mine)) for mine in step])
    return torch.tensor(rows, dtype=torch.float64)


def one_step(
    job: Job, step: int, weight_D: torch.Tensor, feature_ND: torch.Tensor, collector: Collector
) -> tuple[float, float]:
    """Train on this rank's share; return the seconds until it was done, and until all were."""
    start = time.perf_counter()
    collector.one_step(step)
    mine = job.shares[step][RANK]
    tokens = job.tokens_SR[step, RANK].item() * (job.slow if RANK == WORLD_SIZE - 1 else 1)
    large_model(tokens, job.mean_tokens, weight_D.device)
    gradient_D = loss_gradient(job, mine, weight_D, feature_ND) / job.tokens_SR[step].sum()
    wait_for(weight_D.device)
    own = time.perf_counter() - start
    dist.all_reduce(gradient_D)
    weight_D -= 0.1 * gradient_D
    wait_for(weight_D.device)
    return own, time.perf_counter() - start


def loss_gradient(
    job: Job, sequences: list[int], weight_D: torch.Tensor, feature_ND: torch.Tensor
) -> torch.Tensor:
    """The gradient of half the squared error, summed over all tokens of these sequences."""
    length_N = torch.tensor([job.lengths[i] for i in sequences], device=weight_D.device)
    error_N = feature_ND[sequences] @ weight_D - 1
    return (length_N * error_N) @ feature_ND[sequences]


def large_model(tokens: float, mean_tokens: float, device: torch.device) -> None:
    """Stand for a model that takes WORK_MS for the mean share of tokens; on a GPU, multiply."""
    if device.type == "cpu":
        time.sleep(WORK_MS / 1e3 * tokens / mean_tokens)
        return
    rows = round(SEQUENCES * 256 * tokens / mean_tokens)
    native = torch.cuda.is_bf16_supported(False)  # GPUs before Ampere only emulate it
    dtype = torch.bfloat16 if native else torch.float16
    hidden_TH = torch.zeros(rows, WIDTH, device=device, dtype=dtype)
    matrix_HH = torch.zeros(WIDTH, WIDTH, device=device, dtype=dtype)
    for _ in range(16):
        hidden_TH = hidden_TH @ matrix_HH


# %% [markdown]
# ## 6. Naming the cause
#
# A slow rank is named by the test. The other two causes name nobody: today's slowest rank is
# another one than yesterday's. For them ask **what if**: take the suspect's part out of the times.
# If most of the loss is gone, it was the cause.


# %%
def diagnose(times: Times) -> str:
    """What the own times of all ranks, and nothing else, tell."""
    per_token_SR = times.own_SR / times.tokens_SR
    in_windows_R = named(times.own_SR).double().mean(dim=0)
    loss = lost(times.own_SR)
    if in_windows_R.max() > 0.5:
        return f"slow: rank {in_windows_R.argmax()}"
    if loss < 0.10:  # not worth a search
        return "healthy"
    if lost(per_token_SR) < loss / 2:
        return "uneven lengths"
    if lost(times.own_SR - times.paused_SR) < loss / 2:
        return "garbage collection"
    return "unknown"


# %% [markdown]
# ## 7. How it is measured
#
# All jobs run one after the other. Each rank writes down its own times; they are gathered when a
# job is over (a detector that runs along gathers 8 bytes per step and rank, once per window). The
# oracle is one process that trains on all ranks' sequences.


# %%
def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def features_of(job: Job, device: torch.device) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    shape = (len(job.lengths), FEATURES)
    return torch.randn(shape, generator=drawn, dtype=torch.float64).to(device)


def run(job: Job, device: torch.device) -> tuple[Times, torch.Tensor]:
    """Train on all ranks; return what they measured, and the weights."""
    feature_ND = features_of(job, device)
    weight_D = torch.zeros(FEATURES, device=device, dtype=torch.float64)
    rows = []
    with Collector(job.collector) as collector:
        for _ in range(3):
            dist.all_reduce(torch.zeros(FEATURES, device=device))
        wait_for(device)
        for step in range(len(job.shares)):
            before = collector.paused
            own, whole = one_step(job, step, weight_D, feature_ND, collector)
            rows.append((own, whole, collector.paused - before))
    everyone_RSX = torch.tensor(gather_objects(rows), dtype=torch.float64)
    own_SR, step_SR, paused_SR = everyone_RSX.permute(2, 1, 0)
    return Times(own_SR, step_SR, job.tokens_SR, paused_SR), weight_D


def train_alone(job: Job, mean_of_means: bool, device: torch.device) -> torch.Tensor:
    """The weights if one process computes what all ranks do; or what DDP would make of it."""
    feature_ND = features_of(job, device)
    weight_D = torch.zeros(FEATURES, device=device, dtype=torch.float64)
    for step, shares in enumerate(job.shares):
        gradient_D = torch.zeros_like(weight_D)
        for rank, mine in enumerate(shares):
            tokens = job.tokens_SR[step].sum()
            if mean_of_means:
                tokens = job.tokens_SR[step, rank] * WORLD_SIZE
            gradient_D += loss_gradient(job, mine, weight_D, feature_ND) / tokens
        weight_D -= 0.1 * gradient_D
    return weight_D


def read_lengths() -> list[int]:
    """The lengths of paragraphs of Python's own library, in bytes, cut off at 1024."""
    lengths = []
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")):
        paragraphs = source.read_text(encoding="utf-8").split("\n\n")
        lengths += [min(len(text.encode()), 1024) for text in paragraphs if text.strip()]
    return lengths


def equal_shares(sequences: list[int]) -> list[list[int]]:
    """The first rank takes the first of them, and so on."""
    each = len(sequences) // WORLD_SIZE
    return [sequences[rank * each :][:each] for rank in range(WORLD_SIZE)]


# %% [markdown]
# The jobs, and three of them cured. A job's cost is its step over the healthy one: the mean over
# its steps of the largest own time. What a sleep adds to what was asked for, the healthy step has
# too.


# %%
class Results:
    """All jobs so far: what was measured, and whether it trained as one process would."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        kind = "simulated" if device.type == "cpu" else "measured"  # a sleep stands for compute
        self.clocked = {"kind": kind, "timed": True}
        self.jobs: dict[str, Job] = {}
        self.times: dict[str, Times] = {}
        self.diagnosis: dict[str, str] = {}
        self.error = 0.0

    def run(self, name: str, job: Job) -> None:
        self.jobs[name] = job
        self.times[name], weight_D = run(job, self.device)
        self.diagnosis[name] = diagnose(self.times[name])
        expected_D = train_alone(job, False, self.device)
        self.error = max(self.error, relative_error(weight_D, expected_D))

    def seconds(self, name: str) -> float:
        """A step's seconds: the largest own time, the least of steps alike, the mean over steps."""
        shares = self.jobs[name].shares
        alike: dict[tuple, list[float]] = {}
        for step, own_R in enumerate(self.times[name].own_SR):
            pauses = self.times[name].paused_SR[step].any().item()
            alike.setdefault((str(shares[step]), pauses), []).append(own_R.max().item())
        return sum(len(steps) * min(steps) for steps in alike.values()) / len(shares)

    def cost(self, name: str) -> float:
        """The step, over the healthy job's."""
        return self.seconds(name) / self.seconds("healthy")

    def claim_cost(self, name: str, due: float, atol: float) -> None:
        """Claim the cost, where compute is real: a sleep is as long as it was told to be."""
        text = f"{name}: step / healthy"
        if self.device.type == "cpu":
            blocked(text, needs="2 GPUs: here compute is sleep")
            return
        claim(text, due, self.cost(name), atol=atol, timed=True)

    def show(self) -> None:
        columns = f"{'ms a step':>10}{'/ healthy':>11}{'lost':>6}{'per token':>10}{'no gc':>6}"
        print0(f"\n{'':5}{'job':30}{columns}  diagnosis")
        for name, times in self.times.items():
            ms = 1e3 * self.seconds(name)
            what_if = [lost(times.own_SR / times.tokens_SR), lost(times.own_SR - times.paused_SR)]
            shares = f"{lost(times.own_SR):6.0%}{what_if[0]:10.0%}{what_if[1]:6.0%}"
            line = f"{ms:10.2f}{self.cost(name):11.2f}{shares}  {self.diagnosis[name]}"
            print0(f"{'':5}{name:30}{line}")
        print0()


# %% [markdown]
# One slow rank: the share that it gets in the cured job follows the speeds that were measured.


# %%
def check_slow_rank(results: Results) -> None:
    """Whom the clock shows, what a slow rank costs, and what less work for it gives back."""
    alike = [256] * (SEQUENCES * WORLD_SIZE)
    shares = equal_shares(list(range(len(alike))))
    results.run("healthy", Job(alike, [shares] * 200))
    results.run("slow rank", Job(alike, [shares] * 60, slow=SLOW))
    times = results.times["slow rank"]
    speeds = (times.tokens_SR / times.own_SR).median(dim=0).values.tolist()
    shares = deal(list(range(len(alike))), alike, speeds)
    results.run("slow rank, less work", Job(alike, [shares] * 60, slow=SLOW))

    for what, measured_SR, due in (("step", times.step_SR, 1), ("own time", times.own_SR, SLOW)):
        median_R = measured_SR.median(dim=0).values
        ratio = median_R[-1] / median_R[:-1].median()
        text = f"{what} of the slow rank / others'"
        claim(text, due, ratio, atol=0.2, question=1, **results.clocked)
    by_step_time = named(times.step_SR).sum()
    claim("slow rank: alarms by step times", 0, by_step_time, question=1, **results.clocked)
    text = "slow rank: its alarms in 3 windows"
    claim(text, 2, named(times.own_SR)[:, -1].sum(), ">=", question=1, **results.clocked)
    own_SR = results.times["healthy"].own_SR
    counts = ", ".join(f"{rule(own_SR).sum()}" for rule in RULES.values())
    print0(f"{'':13}false alarms of the four rules in 200 real healthy steps: {counts}")
    alarms = named(own_SR).sum()
    claim("healthy: alarms in 200 real steps", 0, alarms, question=3, **results.clocked)
    results.claim_cost("slow rank", SLOW, atol=0.2)
    shared = WORLD_SIZE / (WORLD_SIZE - 1 + 1 / SLOW)
    slack = 1 / SEQUENCES + 0.05  # a whole sequence more than the ideal share, and the clock
    cost = results.cost("slow rank, less work")
    claim("less work: step / healthy", shared, cost, atol=slack, question=6, **results.clocked)


# %% [markdown]
# Uneven lengths: their cost is counted in tokens over a thousand steps, which takes no clock, and
# measured over twenty of them, each four times.


# %%
def check_lengths(results: Results) -> None:
    """What uneven lengths cost, in tokens and on the clock."""
    lengths = read_lengths()
    drawn = torch.Generator().manual_seed(0)
    steps = []
    for _ in range(1000):
        steps.append(torch.randint(len(lengths), (DRAWN * WORLD_SIZE,), generator=drawn).tolist())
    as_drawn = [equal_shares(sequences) for sequences in steps]
    dealt = [deal(sequences, lengths, [1.0] * WORLD_SIZE) for sequences in steps]
    counted = {}
    for name, shares in {"as drawn": as_drawn, "dealt": dealt}.items():
        tokens_SR = tokens_of(lengths, shares)
        counted[name] = (tokens_SR.amax(dim=1).sum() / tokens_SR.mean(dim=1).sum()).item()
    all_lengths = torch.tensor(lengths, dtype=torch.float64)
    c = (all_lengths.std() / all_lengths.mean()).item()
    more = expected_largest(WORLD_SIZE) * c / math.sqrt(DRAWN)
    text = "uneven lengths: most tokens / equal shares"
    claim(text, 1 + more, counted["as drawn"], atol=more / 4, question=4, kind="simulated")
    text = "dealt by length: most tokens / equal shares"
    claim(text, 1, counted["dealt"], atol=more / 4, question=4, kind="simulated")
    results.run("uneven lengths", Job(lengths, as_drawn[:20] * 4))
    results.run("dealt by length", Job(lengths, dealt[:20] * 4))
    for name in ("uneven lengths", "dealt by length"):
        tokens_SR = results.jobs[name].tokens_SR
        due = tokens_SR.amax(dim=1).mean() / results.jobs[name].mean_tokens
        results.claim_cost(name, due.item(), atol=more / 3)


# %% [markdown]
# Garbage collection: how often somebody is hit is counted; one pause's length predicts the cost.


# %%
def check_collections(results: Results) -> None:
    """In how many steps some rank collects, and what that costs."""
    jobs = {}
    for name in ("healthy", "automatic", "together"):
        healthy = results.jobs["healthy"]
        jobs[name] = Job(healthy.lengths, healthy.shares[:150], collector=name)
    results.run("garbage collection", jobs["automatic"])
    results.run("collected together", jobs["together"])
    hit_SR = results.times["garbage collection"].paused_SR > 0
    nobody = 1 - hit_SR.double().mean(dim=0)
    claim("automatic: share of steps with one, per rank", 0.2, 1 - nobody[RANK], atol=0.1)
    due = 1 - nobody.prod()
    some = hit_SR.any(dim=1).double().mean()
    slack = 3 * math.sqrt(due * (1 - due) / len(hit_SR))
    claim("automatic: steps in which some rank collects", due, some, atol=slack, question=5)
    hit_SR = results.times["collected together"].paused_SR > 0
    together = hit_SR.any(dim=1).double().mean()
    claim("together: steps in which some rank collects", 0.2, together, question=5)
    pause_SR = results.times["garbage collection"].paused_SR
    pause = pause_SR[pause_SR > 0].median() / results.seconds("healthy")
    slack = (some - together) * pause / 3  # a third of what the cure gives back
    for name, share in {"garbage collection": some, "collected together": together}.items():
        due = 1 + share * pause
        text = f"{name}: step / healthy"  # a pause is a sleep, on GPUs too
        claim(text, due, results.cost(name), atol=slack, kind="simulated", timed=True)


# %% [markdown]
# What the cures leave of the gradients, whether the causes are told apart, and what a collection
# costs on this machine's real heap.


# %%
def check_gradients(results: Results) -> None:
    """All jobs train as one process would; with DDP's mean of means, unequal shares do not."""
    claim("all jobs: error of the weights", 0, results.error, atol=1e-12, question=6)
    healthy = results.jobs["healthy"]
    speeds = [1.0] * (WORLD_SIZE - 1) + [1 / SLOW]
    shares = deal(list(range(len(healthy.lengths))), healthy.lengths, speeds)
    cured = Job(healthy.lengths, [shares] * 60)
    for name, job, sign, due in (
        ("healthy", healthy, "<=", 1e-12),
        ("less work", cured, ">=", 1e-2),
    ):
        expected_D = train_alone(job, False, results.device)
        error = relative_error(train_alone(job, True, results.device), expected_D)
        text = f"{name}: error if means are averaged"
        claim(text, due, error, sign, question=6, kind="simulated")


def check_diagnoses(results: Results) -> None:
    due = {
        "slow rank": f"slow: rank {WORLD_SIZE - 1}",
        "uneven lengths": "uneven lengths",
        "garbage collection": "garbage collection",
    }
    cured = "slow rank, less work"  # what whole sequences leave uneven may be a tenth
    alarms = named(results.times[cured].own_SR).sum()
    claim(f"{cured}: alarms in 3 windows", 0, alarms, **results.clocked)
    for name, said in results.diagnosis.items():
        if name == cured:
            continue
        right = said == due.get(name, "healthy")
        claim(f"{name}: the diagnosis is right", 1, right, **results.clocked)


def check_freeze() -> None:
    """What `gc.freeze()` takes out of the collector's sight, and what that saves."""
    heap = [[] for _ in range(200_000)]  # what a trainer keeps: modules, data sets, caches
    seconds = []
    objects = []
    for _ in range(2):
        start = time.thread_time()
        gc.collect()
        seconds.append(time.thread_time() - start)
        objects.append(len(gc.get_objects()))
        gc.freeze()
    gc.unfreeze()
    ms = [f"{1e3 * each:.2f}" for each in seconds]
    print0(f"{'':13}a collection with {len(heap):,} objects: {ms[0]} ms; frozen: {ms[1]} ms")
    claim("gc.freeze(): share of objects still looked at", 0.01, objects[1] / objects[0], "<=")


# %% [markdown]
# `--figure` draws each rank's own times in four jobs: a row per rank, a column per step, the darker
# the later.


# %%
def draw(results: Results, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure((10, 3 + WORLD_SIZE), layout="constrained")
    names = ("healthy", "slow rank", "uneven lengths", "garbage collection")
    panels = figure.subplots(len(names), 1, sharex=True)
    for axes, name in zip(panels, names, strict=True):
        own_SR = results.times[name].own_SR[:60]
        ratio_SR = own_SR / own_SR.median(dim=1, keepdim=True).values
        image = axes.imshow(ratio_SR.T.numpy(), cmap="Reds", vmin=1, vmax=2, aspect="auto")
        said = f"{name}: {lost(own_SR):.0%} of the time lost; diagnosis: {results.diagnosis[name]}"
        axes.set_title(said, loc="left", fontsize=10)
        axes.set(ylabel="rank", yticks=range(0, WORLD_SIZE, -(-WORLD_SIZE // 8)))
    panels[-1].set_xlabel("step")
    figure.colorbar(image, ax=panels, label="own time / the step's median", extend="max")
    figure.suptitle("A slow rank is a line; other causes strike another rank in each step")
    figure.savefig(path, dpi=150)


# %% [markdown]
# ## What you should have seen
#
# 1. The step takes equally long on all ranks, for all end it together; its alarms are none. The
#    own time is 1.5 times the others', and names the rank in every window, however busy the
#    machine is.
# 2. In 21,700 of 2^20 windows, 2%: the numbers of a coin. A heavy tail changes nothing, since only
#    the order of the ranks counts. A rule on single steps or on means follows the tail instead:
#    with 8 healthy ranks it alarms in most windows, and soon nobody listens. And a coin that falls
#    the same way for 50 steps is no coin: healthy ranks whose speed changes every 50 steps are
#    named again and again, and hardly ever if the steps judged are that far apart.
# 3. Without a margin the test is right, and useless: 3% in every step is significant, and named in
#    every window. With a margin of 10% there are no false alarms in 200 healthy steps, neither in
#    the simulated nor in the real ones.
# 4. By a fifth on 2 ranks, a third on 4, half on 8: the largest of n sums. Nobody is named, since
#    it is somebody else each time; only the loss shows it, and that it is gone per token. Dealt by
#    length, the fullest rank has less than 1% more than its share.
# 5. In 36% on 2 ranks, 59% on 4, 83% on 8, and on a hundred ranks in all. Collected together, in
#    the fifth of the steps that cannot be avoided; that is where the other ranks' time goes too.
# 6. With n - 1 healthy ranks and one of speed 1/1.5, a step takes n / (n - 1 + 1/1.5) of a healthy
#    one: 1.09 on 4 ranks instead of 1.5. No share of the work makes the slow rank fast; on a
#    thousand ranks it is cheaper to replace it. And if each rank's *mean* is averaged, as DDP
#    does, the tokens on the rank that has few count more: the weights come out different, and
#    nothing says so.
#
# A healthy job that loses a tenth for no reason in the table is "unknown": so is this one on a
# machine where others work. That diagnosis is right, too.
#
# **Try.** With `own` read after the all-reduce no rank is ever named, and nothing seems lost. With
# a margin of 0 the rank that is 3% slower is named by both sign tests, and real ranks may be.
#
# **On GPUs** the clock waits for the device twice per step, which costs some overlap. A detector
# that runs all day records CUDA events around compute instead, and reads them a step later.
# torchtitan collects garbage on all ranks in the same step: 1.5% per step on 512 GPUs (its pull
# request 148). Megatron-LM has `--manual-gc`. Asking *what if* of recorded times is how Lin et al.
# (2025) found the causes in ByteDance's jobs.
#
# **Your own job.** Let each rank write its own seconds, a number per step, into steps.RANK.csv.
# launch/diagnose.py, a file to copy alone, is the test of section 2. Of question 1's job it says:
#
#     python launch/diagnose.py --steps steps.*.csv
#     STRAGGLER: rank 3 took 1.1 times the others' median or more, not by chance.


# %%
def main() -> None:
    figure = {"metavar": "PATH", "help": "save all ranks' own times as a PNG"}
    options = command_line({"--figure": figure})
    launch()
    device = setup()
    check_the_test()
    check_freeze()
    if WORLD_SIZE == 1:
        blocked("slow ranks, uneven lengths, garbage collection", needs="2 ranks")
        finish()
    results = Results(device)
    check_slow_rank(results)
    check_lengths(results)
    check_collections(results)
    check_gradients(results)
    results.show()
    check_diagnoses(results)
    if options.figure and RANK == 0:
        draw(results, options.figure)
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
