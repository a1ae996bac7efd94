"""The test for stragglers keeps its promise, causes are told apart, and breaks are seen."""

import re
from itertools import chain
from math import comb
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course.playing import Lazily, Played, play
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "profiling/06_stragglers.py"
lesson = Lazily(LESSON)

ON_GPUS = OnGpus(
    changes=[
        ("    check_the_test()\n", ""),
        ("WIDTH = 8192", "WIDTH = 16"),
        ("[shares] * 200", "[shares] * 50"),
        ("as_drawn[:20] * 4", "as_drawn[:20]"),
        ("dealt[:20] * 4", "dealt[:20]"),
    ],
    ranks=(1, 2),
)
SIZES = {
    3: [("WORK_MS, PAUSE_MS = 7.0, 9.0", "WORK_MS, PAUSE_MS = 0.7, 0.9")]
}  # no clock is judged
NO_DEVICE = {"wait": "garbage collection, on the host"}

lengths = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@pytest.mark.parametrize(("ranks", "due"), [(2, 17), (4, 17), (8, 18), (1000, 20), (10**5, 21)])
def test_enough_is_the_least_number_that_keeps_the_promise(ranks: int, due: int) -> None:
    k = lesson.enough(20, ranks)
    assert k == due  # 21 of 20: nobody can be named, the window is too short
    exact = sum(comb(20, i) for i in range(k, 21)) / 2**20
    assert ranks * exact <= lesson.FALSE_ALARM < ranks * (exact + comb(20, k - 1) / 2**20)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_healthy_rank_is_late_in_at_most_half_of_the_orders(ranks: int) -> None:
    """Exactly half of the places in the order are late if their number is even."""
    own_SR = torch.stack([torch.arange(ranks).roll(shift) for shift in range(ranks)]) + 1.0
    late_R = lesson.late(own_SR, 0.0).double().mean(dim=0)
    assert (late_R == ranks // 2 / ranks).all()


def test_whole_windows_are_judged_and_stragglers_named() -> None:
    own_SR = torch.ones(59, 6)
    own_SR[:, 1] = own_SR[:, 4] = 1.2  # two slow ranks do not hide each other
    own_SR[:, 2] = 1.09
    own_SR[::4, 3] = 50.0  # rare pauses, though the mean is ten times as long
    assert lesson.named(own_SR).tolist() == [[False, True, False, False, True, False]] * 2


@given(lengths, st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=5))
def test_every_sequence_is_dealt_once_and_no_rank_gets_too_much(sizes: list, speeds: list) -> None:
    shares = lesson.deal(list(range(len(sizes))), sizes, speeds)
    assert sorted(chain.from_iterable(shares)) == list(range(len(sizes)))
    done = [sum(sizes[i] for i in mine) / v for mine, v in zip(shares, speeds, strict=True)]
    assert max(done) <= sum(sizes) / sum(speeds) + max(sizes) / min(speeds)
    if len(set(speeds)) == 1:  # Graham (1969): the mean, and at most a share of the longest
        assert max(done) <= (sum(sizes) / len(speeds) + max(sizes)) / speeds[0]


def test_a_slow_rank_is_dealt_less() -> None:
    """A rank that takes 1.5 times as long gets two thirds of what the others get."""
    shares = lesson.deal(list(range(44)), [256] * 44, [1.0, 1.0, 1.0, 1 / 1.5])
    assert [len(mine) for mine in shares] == [12, 12, 12, 8]


def test_the_longest_sequence_is_dealt_first() -> None:
    assert lesson.deal([0, 1, 2, 3, 4], [1, 1, 1, 1, 4], [1.0, 1.0]) == [[4], [0, 1, 2, 3]]


def test_ranks_in_spells_are_as_fast_as_each_other_and_the_promise_needs_independent_steps() -> (
    None
):
    own_SR = lesson.in_spells(5000, 8, seed=0)
    medians_R = own_SR.median(dim=0).values
    assert medians_R.max() / medians_R.min() < 1.2  # nobody is slow
    alone = own_SR.log().reshape(100, 50, 8).std(dim=1).median()
    assert alone < 0.05 < own_SR.log().std()  # nothing changes within a spell
    assert lesson.named(own_SR).any(dim=1).double().mean() > 0.5
    assert not lesson.named(own_SR[::50]).any()


def times(own_SR: torch.Tensor, tokens_SR: torch.Tensor | None = None, pause: float = 0):
    paused_SR = torch.zeros_like(own_SR)
    if pause:
        drawn = torch.Generator().manual_seed(1)
        paused_SR = pause * (torch.rand(own_SR.shape, generator=drawn) < 0.2)
    tokens_SR = torch.ones_like(own_SR) if tokens_SR is None else tokens_SR
    return lesson.Times(own_SR + paused_SR, own_SR, tokens_SR, paused_SR)


def test_causes_are_told_apart() -> None:
    noise_SR = 1 + 0.03 * torch.rand(80, 4, generator=torch.Generator().manual_seed(0))
    slow_SR = noise_SR * torch.tensor([1, 1, 1.3, 1])
    tokens_SR = 100 + 900 * torch.rand(80, 4, generator=torch.Generator().manual_seed(2))
    hiccups_SR = lesson.simulate(80, 4, seed=0) ** 2
    assert lesson.diagnose(times(noise_SR)) == "healthy"
    assert lesson.diagnose(times(slow_SR)) == "slow: rank 2"
    assert lesson.diagnose(times(noise_SR * tokens_SR, tokens_SR)) == "uneven lengths"
    assert lesson.diagnose(times(noise_SR, pause=1.3)) == "garbage collection"
    assert lesson.diagnose(times(hiccups_SR)) == "unknown"


def test_what_is_lost_is_the_waiting() -> None:
    assert lesson.lost(torch.tensor([[1.0, 1.0], [1.0, 3.0]])) == pytest.approx(1 - 3 / 4)


def test_the_largest_of_normal_numbers() -> None:
    """Published: 1 / sqrt(pi) of two, 1.0294 of four (Harter, 1961)."""
    assert lesson.expected_largest(2) == pytest.approx(torch.pi**-0.5, abs=1e-4)
    assert lesson.expected_largest(4) == pytest.approx(1.0294, abs=1e-4)


EVEN = "healthy, even: late in 15 of 20 steps, share"
HEAVY = "healthy, heavy tail: late in 15 of 20 steps, share"
ONE_STEP = "one late step: alarms in 200 healthy steps"
MEAN = "mean of 20 steps: alarms in 200 healthy steps"
SIGN, OURS = (f"3% slower: alarms in 200 steps, {which}" for which in ("no margin", "10% margin"))
SPELLS, APART = (
    f"healthy, in spells of 50 steps: {which}" for which in ("alarms in 200 steps", "each 50th")
)
FROZEN = "gc.freeze(): share of objects still looked at"
SIMULATED = {  # one rank does nothing else
    "one too few of the coin's tail": (
        "range(k, steps + 1)",
        "range(k + 1, steps + 1)",
        {EVEN, HEAVY},
    ),
    "a rank is compared with itself too": ("if other != rank]", "]", {EVEN, HEAVY}),
    "the mean of the others": (
        "median = in_order[:, len(others) // 2]",
        "median = in_order.mean(dim=1)",
        {HEAVY, SIGN},  # times with hiccups have a mean above their median
    ),
    "no margin": ("(1 + margin) * median", "median", {OURS}),
    "no spells": ("torch.exp(0.2 * torch.randn(steps", "torch.exp(0 * torch.randn(steps", {SPELLS}),
    "steps within one spell": ("named(spells_SR[::50])", "named(spells_SR[::2])", {APART}),
    "no hiccups": ("< 0.01, 5.0, 1.0)", "< 0.0, 5.0, 1.0)", {ONE_STEP, MEAN}),
    "nobody is slower": ("[1.0] * 7 + [1.03]", "[1.0] * 8", {SIGN}),
    "nothing is frozen": ("        gc.freeze()\n    gc.unfreeze()", "    gc.unfreeze()", {FROZEN}),
}  # fmt: skip


UNEVEN = "uneven lengths: most tokens / equal shares"
DEALT = "dealt by length: most tokens / equal shares"
EACH = "automatic: share of steps with one, per rank"
SOME = "automatic: steps in which some rank collects"
TOGETHER = "together: steps in which some rank collects"
WEIGHTS = "all jobs: error of the weights"
ALIKE = "healthy: error if means are averaged"
LESS = "less work: error if means are averaged"
SPARED = (("    check_the_test()\n    check_freeze()\n", ""),)
QUICK = (("WORK_MS, PAUSE_MS = 7.0, 9.0", "WORK_MS, PAUSE_MS = 0.7, 0.9"), *SPARED)
TRAINED = {
    "sequences dealt in turn; no garbage collected": (
        [
            ("rank = done.index(min(done))", "rank = sequence % len(done)"),
            ("another start\n            gc.enable()\n", "another start\n"),
        ],
        {DEALT, EACH, LESS},
    ),
    "sums vary as one length does; all collect alike; a mean of means": (
        [
            ("* c / math.sqrt(DRAWN)", "* c"),
            (".manual_seed(RANK)", ".manual_seed(0)"),
            (
                "feature_ND) / job.tokens_SR[step].sum()",
                "feature_ND) / job.tokens_SR[step, RANK] / WORLD_SIZE",
            ),
        ],
        {UNEVEN, SOME, WEIGHTS},
    ),
    "together, each in its own step; no sum over ranks; DDP taken for right": (
        [
            ("and step % 5 == 0", "and (step + RANK) % 5 == 0"),
            ("    dist.all_reduce(gradient_D)\n", ""),
            ("            if mean_of_means:\n", "            if False:\n"),
        ],
        {TOGETHER, WEIGHTS, LESS},
    ),
    "means that are not averaged": (
        [("job.tokens_SR[step, rank] * WORLD_SIZE", "job.tokens_SR[step, rank]")],
        {ALIKE},
    ),
}


BREAKS = [
    Breaks(SIMULATED, ranks=1, alone=["no hiccups", "nobody is slower"]),  # nobody is named, then
    # The first also decides what others' sums and means would come to.
    Breaks(TRAINED, changes=QUICK, alone=["sequences dealt in turn; no garbage collected"]),
]


OWN, STEP = (f"{what} of the slow rank / others'" for what in ("own time", "step"))
NAMED, BY_STEPS = "slow rank: its alarms in 3 windows", "slow rank: alarms by step times"
FALSE = "healthy: alarms in 200 real steps"


def cost(*jobs: str) -> set[str]:
    return {f"{job}: step / healthy" for job in jobs}


def diagnosed(*jobs: str) -> set[str]:
    return {f"{job}: the diagnosis is right" for job in jobs}


TIMED = {
    "own times with the wait in them, as in Try": (
        [
            ("    own = time.perf_counter() - start\n    dist.all_reduce(gradient_D)\n",
             "    dist.all_reduce(gradient_D)\n    own = time.perf_counter() - start\n"),
        ],
        {OWN, NAMED} | diagnosed("slow rank", "uneven lengths", "garbage collection"),
    ),
    "all ranks are slow in every job; no cure": (
        [
            ("(job.slow if RANK == WORLD_SIZE - 1 else 1)", "(1.5 if RANK == 1 else 1)"),
            ("shares = deal(list(range(len(alike))), alike, speeds)", "pass"),
            ("            time.sleep(PAUSE_MS / 1e3)  # launch time\n", ""),
        ],
        {FALSE} | cost("less work")
        | {"slow rank, less work: alarms in 3 windows"}
        | diagnosed("healthy", "garbage collection", "dealt by length"),
    ),
    "a model that does not mind the tokens; step times that are own times": (
        [
            ("WORK_MS / 1e3 * tokens / mean_tokens", "WORK_MS / 1e3"),
            ("return own, time.perf_counter() - start", "return own, own * (1 + RANK)"),
        ],
        {OWN, STEP, NAMED, BY_STEPS}
        | diagnosed("slow rank", "uneven lengths"),
    ),
    "pauses are short where all wait for them, and long where none does": (
        [
            ('        if self.kind == "together" and step % 5 == 0:\n',
             '        if self.kind == "together":\n            time.sleep(0.005)\n'
             '        if self.kind == "together" and step % 5 == 0:\n'),
            ("due = 1 + share * pause\n", "due = 1 + share * pause * (3 - 2 * (share < 0.21))\n"),
        ],
        cost("garbage collection", "collected together"),
    ),
}  # fmt: skip


# A clock that only sleeps and all-reduces move, and a look at it: no machine is too busy for that.
STANDING = [
    (
        "import time\n",
        """import time as real
class Standing:
    now = 0.0
    def perf_counter(self):
        self.now += 1e-9
        return self.now
    def sleep(self, seconds):
        self.now += seconds
    def __getattr__(self, name):
        return getattr(real, name)
time = Standing()
""",
    ),
    (
        "import torch.distributed as dist\n",
        """import torch.distributed as dist
def all_reduce(tensor, alone=dist.all_reduce):
    alone(tensor)
    alone(moment.fill_(time.now), dist.ReduceOp.MAX)
    time.now = moment.item() + 0.0001
moment = torch.zeros(1, dtype=torch.float64)
dist.all_reduce = all_reduce
""",
    ),
]


@pytest.mark.deep
@pytest.mark.parametrize("name", TIMED)
def test_a_break_is_seen_by_the_clock(name: str) -> None:
    changes, failed = TIMED[name]
    played = play(LESSON, 2, *SPARED, *STANDING, *changes)
    played.expect(set())
    assert failed <= played.failed_by_clock, played.output  # what builds on it may fail too


def PLAIN(played: Played) -> None:
    """The tables show every rule and every job."""
    rules = re.findall(r"^ {13}(\w.*?) {2,}(\d+\.\d\d) +(\d+\.\d\d)$", played.output, re.M)
    assert [rule for rule, _, _ in rules] == list(lesson.RULES)
    assert [float(healthy) for _, healthy, _ in rules][2:] == pytest.approx([0, 0], abs=0.1)
    row = r"^ {5}(\w.*?) +\d+\.\d\d +\d+\.\d\d +\d+% +\d+% +-?\d+%  \w"
    jobs = re.findall(row, played.output, re.M)
    assert jobs == [
        "healthy",
        "slow rank",
        "slow rank, less work",
        "uneven lengths",
        "dealt by length",
        "garbage collection",
        "collected together",
    ]


def test_every_rule_on_one_late_step_and_on_a_rank_that_is_slower_by_3_percent() -> None:
    own_SR = torch.ones(40, 4)
    own_SR[7, 0] = 50.0
    own_SR[:, 3] = 1.03
    hiccup, aging = [True, False, False, False], [False, False, False, True]
    nobody = [False] * 4
    due = {
        "one late step": [hiccup, nobody],
        "mean of 20 steps": [hiccup, nobody],
        "sign test, no margin": [aging, aging],
        "sign test, 10% margin": [nobody, nobody],
    }
    assert {rule: judge(own_SR).tolist() for rule, judge in lesson.RULES.items()} == due


def test_a_sequence_counts_for_each_of_its_tokens() -> None:
    job = SimpleNamespace(lengths=[3, 1, 2])
    feature_ND = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double()
    weight_D = torch.ones(5).double().requires_grad_()
    by_token = feature_ND[[0, 0, 0, 2, 2]]  # of the first and the last
    (0.5 * (by_token @ weight_D - 1).square().sum()).backward()
    found_D = lesson.loss_gradient(job, [0, 2], weight_D.detach(), feature_ND)
    assert torch.allclose(found_D, weight_D.grad)


def test_a_job_s_seconds_are_the_slowest_rank_s_at_their_best(
    capsys: pytest.CaptureFixture,
) -> None:
    """Of steps that are alike the quickest; a step in which somebody collects is another one."""
    results = lesson.Results(torch.device("cpu"))
    one, other = [[0], [1]], [[1], [0]]
    own_SR = torch.tensor([[5.0, 1.0], [2.0, 4.0], [1.0, 7.0], [9.0, 9.0]])
    paused_SR = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 5.0]])
    for name, factor in {"healthy": 1, "slow rank": 2}.items():
        results.jobs[name] = SimpleNamespace(shares=[one, one, other, one])
        results.times[name] = lesson.Times(factor * own_SR, own_SR, own_SR, paused_SR)
    assert results.seconds("healthy") == (4 + 4 + 7 + 9) / 4
    assert results.cost("slow rank") == 2
    results.diagnosis = {"healthy": "so", "slow rank": "so"}
    results.show()  # lost, in all and per token (none: the tokens are the times) and without pauses
    rows = [line.split()[-6:-1] for line in capsys.readouterr().out.splitlines()]
    assert ["6000.00", "1.00", "24%", "0%", "34%"] in rows
