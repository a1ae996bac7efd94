"""Compressors against their algebra, training against one process, claims against broken lines."""

import io
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy

from course.lessons import ROOT
from course.playing import Played, load, play
from course.ranks import attempt, run
from tests.helpers.leftovers import MARKED, gone, machine
from tests.helpers.virtual_cluster import once_there, play_as_nobody
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "communication/08_gradient_compression.py"
SHAPES = [(12, 5), (7,), (6, 2, 3)]  # a matrix, a vector, a convolution
N = 12 * 5 + 7 + 6 * 2 * 3
CPU = torch.device("cpu")


def mine(size: int = N, seed: int = 0) -> torch.Tensor:
    """A gradient that differs from rank to rank."""
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))


def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x)
    return sum(everyone) / len(everyone)


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-5) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)


# PowerSGD


def low_rank(r: int) -> torch.Tensor:
    """The same on every rank: matrices of rank r, and a vector."""
    torch.manual_seed(3)
    parts = [torch.randn(12, r) @ torch.randn(r, 5), torch.randn(7)]
    parts.append(torch.randn(6, r) @ torch.randn(r, 6))
    return torch.cat([part.flatten() for part in parts])


def half_of_the_largest() -> list[float]:
    x = torch.full((2,), 40_000.0, dtype=torch.float16)  # two of them overflow
    return load(LESSON).mean([x])[0].tolist()


def test_the_mean_of_large_float16_is_finite() -> None:
    assert run(half_of_the_largest, 2) == [[40_000.0, 40_000.0]] * 2


def exact_on_low_rank(r: int) -> bool:
    noise = mine()
    x = low_rank(r) + noise - mean_over_ranks(noise)  # only the mean has rank r
    sent, arrived = load(LESSON).PowerSGD(r, SHAPES)(x)
    return torch.equal(sent, arrived) and close(arrived, low_rank(r), 1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_powersgd_is_exact_if_the_mean_has_its_rank(ranks: int) -> None:
    assert all(all(run(exact_on_low_rank, ranks, r)) for r in (1, 2))


def converges_to_svd() -> bool:
    x = mine()
    compress = load(LESSON).PowerSGD(2, SHAPES)
    for _ in range(300):
        _, arrived = compress(x)
    u, s, v = torch.linalg.svd(mean_over_ranks(x)[:60].view(12, 5), full_matrices=False)
    best = (u[:, :2] * s[:2]) @ v[:2]
    whole = close(arrived[60:67], mean_over_ranks(x)[60:67])
    return whole and close(arrived[:60].view(12, 5), best, 1e-2)


def test_powersgd_converges_to_the_best_matrix_of_its_rank_and_sends_vectors_whole() -> None:
    assert all(run(converges_to_svd, 2))


# Top-k, 8 bits, casts


def top_k_is_right() -> bool:
    lesson, x = load(LESSON, ("SHARE = 0.001", "SHARE = 0.1")), mine(1000)
    sent, arrived = lesson.top_k(x)
    chosen = sent != 0
    largest = x.abs()[chosen].min() >= x.abs()[~chosen].max()
    whole = torch.equal(sent[chosen], x[chosen])
    return bool(chosen.sum() == 100 and largest and whole and close(arrived, mean_over_ranks(sent)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_top_k_sends_the_largest_as_they_are_and_averages_over_all_ranks(ranks: int) -> None:
    assert all(run(top_k_is_right, ranks))


def eight_bits_are_right(way: str) -> list[bool]:
    """Either way: off by a step of each rounding at most, right on average, equal on all ranks."""
    lesson, x = load(LESSON), mine(1001)  # no multiple of 2 or 3
    compress = getattr(lesson, way)
    whole = mean_over_ranks(x)
    draws = [compress(x) for _ in range(200)]
    step = x.abs().max() / 127
    bounded = all(((sent - x).abs() <= step * 1.001).all() for sent, _ in draws)
    arrived = torch.stack([arrived for _, arrived in draws])
    largest = step.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    near = ((arrived - whole).abs() <= 2.01 * largest).all()
    bias = (arrived.mean(0) - whole).abs().max()  # each draw: at most 2 deviations of step / 2
    of_rank_0 = arrived.clone()
    dist.broadcast(of_rank_0, 0)
    equal = torch.equal(arrived, of_rank_0)
    silent = torch.equal(compress(torch.zeros(9))[1], torch.zeros(9))
    return [bool(bounded), bool(near), bool(bias < 5 * largest / 200**0.5), equal, silent]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", ["eight_bits", "eight_bits_by_all_gather"])
def test_eight_bits_are_a_step_off_at_most_and_right_on_average(way: str, ranks: int) -> None:
    assert run(eight_bits_are_right, ranks, way) == [[True] * 5] * ranks


def averages_what_was_sent() -> bool:
    lesson, x = load(LESSON), mine(1000)
    sent, arrived = lesson.eight_bits_by_all_gather(x)
    return close(arrived, mean_over_ranks(sent))


def test_what_is_gathered_is_averaged() -> None:
    assert all(run(averages_what_was_sent, 3))


def casts_like_torch() -> bool:
    lesson, x = load(LESSON), mine()
    _, ours = lesson.cast_to(torch.float16)(x.clone())
    bucket = SimpleNamespace(buffer=lambda: x)
    theirs = fp16_compress_hook(None, bucket).wait()
    _, whole = lesson.cast_to(torch.float32)(x0 := mine())
    return torch.equal(ours, theirs) and close(whole, mean_over_ranks(x0), 1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_float16_is_torchs_hook_to_the_bit(ranks: int) -> None:
    assert all(run(casts_like_torch, ranks))


# Training


def batches(steps: int, n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    return [(torch.randn(n, 8, 64), torch.randint(10, (n, 8))) for _ in range(steps)]


def float32_is_one_process() -> float:
    lesson, n, r = load(LESSON), dist.get_world_size(), dist.get_rank()
    ours, alone = lesson.Run(lesson.FULL, CPU), lesson.Run(lesson.FULL, CPU).model
    sgd = torch.optim.SGD(alone.parameters(), lesson.RATE)
    for x, y in batches(4, n):
        ours.step(x[r], y[r])
        sgd.zero_grad()
        cross_entropy(alone(x.flatten(0, 1)), y.flatten()).backward()
        sgd.step()
    theirs = nn.utils.parameters_to_vector(alone.parameters())
    return (ours.weights() - theirs).abs().max().item()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_our_hook_sending_all_trains_as_one_process_does(ranks: int) -> None:
    assert max(run(float32_is_one_process, ranks)) < 1e-6


def outer_step(name: str) -> float:
    """One step, then one outer step: how far the weights are from the formula."""
    lesson, n, r = load(LESSON, ("\nH = 10 ", "\nH = 1 ")), 3, dist.get_rank()
    ours = lesson.Run(f"{name}, H=1", CPU)
    start = ours.weights().clone()
    [(x, y)] = batches(1, n)
    ours.model.zero_grad()
    cross_entropy(ours.model(x[r]), y[r]).backward()
    moved = nn.utils.parameters_to_vector([p.grad for p in ours.model.parameters()]) * -lesson.RATE
    ours.step(x[r], y[r])
    rate = 1.0 if name == "local SGD" else 0.7 * (1 + 0.9)  # Nesterov's first step
    return (ours.weights() - start - rate * mean_over_ranks(moved)).abs().max().item()


@pytest.mark.parametrize("name", ["local SGD", "DiLoCo"])
def test_an_outer_step_is_the_formula(name: str) -> None:
    assert max(run(outer_step, 3, name)) < 1e-6


def two_outer_steps() -> float:
    """How far DiLoCo's weights are, after two rounds of a step each, from torch's SGD by hand."""
    lesson, n, r = load(LESSON, ("\nH = 10 ", "\nH = 1 ")), 2, dist.get_rank()
    ours, inner = lesson.Run("DiLoCo, H=1", CPU), lesson.Run(lesson.FULL, CPU).model
    common = ours.weights().clone()
    outer = torch.optim.SGD([common], 0.7, momentum=0.9, nesterov=True)
    for x, y in batches(2, n):
        ours.step(x[r], y[r])
        nn.utils.vector_to_parameters(common.clone(), inner.parameters())
        inner.zero_grad()
        cross_entropy(inner(x[r]), y[r]).backward()
        gradient = nn.utils.parameters_to_vector([p.grad for p in inner.parameters()])
        common.grad = lesson.RATE * mean_over_ranks(gradient)
        outer.step()
    return (ours.weights() - common).abs().max().item()


def test_two_outer_steps_are_nesterovs() -> None:
    assert max(run(two_outer_steps, 2)) < 1e-5


def test_resnet18_is_torchvisions_with_a_small_first_convolution() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, bias=False)
    theirs = sorted(tuple(p.shape) for p in model.parameters())
    assert sorted(load(LESSON).resnet18()) == theirs


def bytes_of_calls() -> list[tuple[float, float, float]]:
    lesson = load(LESSON)
    with lesson.CountedCommunication() as counted:
        dist.all_reduce(torch.zeros(6))
        dist.all_gather_into_tensor(torch.zeros(3 * 4), torch.zeros(4))
        dist.all_to_all_single(torch.zeros(6), torch.zeros(6))
    how = (lesson.handed_over, lesson.sent_by_a_rank, lesson.over_the_cable)
    return [tuple(one(call) for one in how) for call in counted.log]


def test_bytes_handed_in_sent_and_across() -> None:
    """Three ranks, two of them on one side: 4 pairs of 6 cross, 2 in each direction."""
    expected = [(24, 32, 32), (16, 32, 32), (24, 16, 16)]
    assert run(bytes_of_calls, 3) == [expected] * 3


# The claims

LOST, KEEP = ": share of gradients lost", ("top-k", "PowerSGD 1", "PowerSGD 2", "PowerSGD 4")
GAP = "largest difference of weights between ranks"
HANDED = ": bytes handed in per step"
NO_LINK = (  # what rank 0 alone starts
    ("    across = RANK == 0 and WORLD_SIZE > 1\n", "    across = False\n"),
    (
        "    slow = train_across(link, why_not, runs) if WORLD_SIZE > 1 else False\n",
        "    slow = False\n",
    ),
)
NOT_BLOCKED = (
    "    if slow:\n        check_slow_link(runs)\n    else:\n",
    "    if WORLD_SIZE == 1:\n",
)
SIZES = {ranks: [*NO_LINK, NOT_BLOCKED] for ranks in (1, 3)}  # the same whatever the world size
NOT_PUBLISHED = ("    check_published(device)\n", "")
FEWEST = ("\nSTEPS = 60\n", "\nSTEPS = 10\n")  # H steps: bytes and losses per step
GAINS = "    for name, off in ((TOP, TOP_OFF), (LOW, LOW_OFF)):\n"
SHORT = (FEWEST, *NO_LINK, NOT_PUBLISHED, (GAINS, "    return  # too few to learn\n" + GAINS))
ON_GPUS = OnGpus(
    changes=[("STEPS = 60", "STEPS = 10"), *NO_LINK, ("repeats: int = 20", "repeats: int = 1")],
    hardware=dict.fromkeys(
        ("all others: accuracy on new digits", "top-k: accuracy that feedback saves"),
        "10 steps of 60 are not enough",
    ),
    ranks=(1, 2),
)
FEEDBACK = "    x += run.residual  # error feedback\n"
NEAREST = ("torch.floor(x / step + torch.rand_like(x))", "torch.round(x / step)")
GATHERED = ("Method(lambda: eight_bits,", "Method(lambda: eight_bits_by_all_gather,")
TWICE = ("in gather(message)])", "in gather(message.repeat(2))[:, : len(message)]])")
SUMS_IN_FULL = (
    "torch.cat([dequantize(one) for one in gather(quantize(mine))])",
    "gather(mine).flatten()",
)
LINES = {  # in this order they make four plays, with the breaks of 8 bits apart
    "what is not sent is dropped": (
        [
            ("TOP: Method(lambda: top_k, few, feedback=True)", "TOP: Method(lambda: top_k, few)"),
            ("4 * low_rank_elements(r), feedback=True)", "4 * low_rank_elements(r))"),
        ],
        {name + LOST for name in KEEP},
    ),
    "rounding down": (
        [("torch.floor(x / step + torch.rand_like(x))", "torch.floor(x / step)")],
        {"8 bits: largest error of the mean, in steps"}
        | {name + LOST for name in ("8 bits", "8 bits, all-gather")},
    ),
    "those without feedback keep what is not sent": (
        [
            (
                "TOP_OFF: Method(lambda: top_k, few),",
                "TOP_OFF: Method(lambda: top_k, few, feedback=True),",
            ),
            ("4 * low_rank_elements(1))", "4 * low_rank_elements(1), feedback=True)"),
        ],
        {name + LOST for name in ("top-k, no feedback", "PowerSGD 1, no feedback")},
    ),
    "what is kept is not added": ([(FEEDBACK, "")], {name + LOST for name in KEEP}),
    "each rank keeps its own chunk": (
        [("dist.all_to_all_single(incoming, outgoing)", "incoming.copy_(outgoing)")],
        {"8 bits" + HANDED, "8 bits" + LOST},
    ),
    "kept is not what was not sent": (
        [("run.residual = x - sent", "run.residual = x - 0.9 * sent")],
        {name + LOST for name in KEEP},
    ),
    "a step eight times too long": (
        [(".clamp(min=1e-30) / 127", ".clamp(min=1e-30) / 15")],
        {"8 bits: largest error, in steps, below", "8 bits: largest error of the mean, in steps"}
        | {name + LOST for name in ("8 bits", "8 bits, all-gather")},
    ),
    "sums are not divided": (
        [
            (".div_(WORLD_SIZE)", ""),
            ("sent, total / WORLD_SIZE", "sent, total"),
            ("in incoming]).mean(0)", "in incoming]).sum(0)"),
            ("dequantize(message), everyone.mean(0)", "dequantize(message), everyone.sum(0)"),
        ],
        {name + LOST for name in ("float32", "8 bits", "8 bits, all-gather", "top-k")},
    ),
    "a higher rank is sent, ranks do not set out together": (
        [
            ("torch.randn(k, r, generator", "torch.randn(k, r + 1, generator"),
            ("vector_to_parameters(self.common.clone(), self.model.parameters())", "pass"),
        ],
        {n + HANDED for n in (*KEEP[1:], "PowerSGD 1, no feedback")} | {GAP},
    ),
    "each rank adds up in its own order": (
        [("sent, total / WORLD_SIZE", "sent, total * (1 + 1e-7 * RANK) / WORLD_SIZE")],
        {GAP},
    ),
    "rounding to the nearest": ([NEAREST], {"8 bits: largest error of the mean, in steps"}),
    "a sum that is sent in float32": (
        [SUMS_IN_FULL],
        {"8 bits" + HANDED},
    ),
    "a mean that is sent twice": (
        [
            (
                "    dist.all_reduce(flat)\n",
                "    dist.all_reduce(flat.clone())\n    dist.all_reduce(flat)\n",
            )
        ],
        {name + HANDED for name in (*KEEP[1:], "PowerSGD 1, no feedback")}
        | {name + HANDED for name in ("float32", "bfloat16", "local SGD, H=10", "DiLoCo, H=10")},
    ),
    "no hook for float16": (
        [("self.ddp.register_comm_hook(None, fp16_compress_hook)", "pass")],
        {"float16, torch's hook" + HANDED},
    ),
    "what is gathered goes twice": ([TWICE], {"8 bits, all-gather" + HANDED}),
    "twice as many of the largest": (
        [("x.abs().topk(k).indices", "x.abs().topk(2 * k).indices")],
        {"top-k" + HANDED, "top-k, no feedback" + HANDED},
    ),
}


ON_FOUR = {
    "8 bits that are gathered, dearer from four ranks on": (
        [GATHERED],
        {"8 bits" + HANDED},
    ),
}
AT_LENGTH = {
    "what is kept is not added, and so not learned": (
        [(FEEDBACK, "")],
        {name + LOST for name in KEEP}
        | {f"{name}: accuracy that feedback saves" for name in ("top-k", "PowerSGD 1")}
        | {"all others: accuracy on new digits"},
    ),
    "a convolution is no matrix of channels": (
        [
            ("k = math.prod(shape[1:])", "k = shape[-1] if shape[1:] else 1"),
            ("part.view(shape[0], -1)", "part.view(-1, shape[-1] if shape[1:] else 1)"),
        ],
        {f"ResNet-18, PowerSGD {r}: times fewer bytes" for r in (1, 2, 4)},
    ),
}


@pytest.mark.deep
def test_claims_on_bytes_and_gradients_hold_on_five_ranks() -> None:
    play(LESSON, 5, *SHORT).expect(set())


# Across the link

COUNTED = ("float32", "bfloat16", "8 bits", "8 bits, all-gather")
BYTES = {f"{name}: bytes on the cable / predicted" for name in COUNTED}
PREDICTED = {f"{name}: slow step / predicted" for name in ("float32", "bfloat16")}
HALF = "slow step: float32 / bfloat16"
BOTH = "int(row[1]) + int(row[9])"
QUICK = [
    FEWEST,
    ("\nMBIT = 20\n", "\nMBIT = 100\n"),
    ("\nSLOW_STEPS = 4\n", "\nSLOW_STEPS = 1\n"),
]  # bytes, not times
MISCOUNTED = {
    "a counter that misses one direction": (BOTH, "int(row[1])", BYTES),
    "a counter that misses the other": (BOTH, "int(row[9])", BYTES),
    "all at one end": ("nodes[2 * rank // len(pipes)]", "nodes[0]", BYTES),
}
SENT = ": bytes sent / float16's"
FEWER = {
    "what is gathered goes twice, across the link": ([TWICE], {"8 bits, all-gather" + SENT}),
    "a sum that is sent in float32, across the link": (
        [SUMS_IN_FULL],
        {"8 bits" + SENT},
    ),
}
GATHERED_ON_FOUR = {"8 bits that are gathered, across the link": ([GATHERED], {"8 bits" + SENT})}
OVER_THE_LINK = [("    check_runs(runs)\n", ""), NOT_PUBLISHED]
BREAKS = [
    Breaks(LINES, changes=SHORT, most=6),
    Breaks(ON_FOUR, ranks=4, changes=SHORT),
    Breaks(AT_LENGTH, changes=NO_LINK),
    Breaks(MISCOUNTED, changes=[*OVER_THE_LINK, *QUICK], deadline=200),
    Breaks(FEWER, changes=[*OVER_THE_LINK, *QUICK], deadline=200),
    Breaks(GATHERED_ON_FOUR, ranks=4, changes=[*OVER_THE_LINK, *QUICK], deadline=200),
]


def across(ranks: int, *changes: tuple[str, str]) -> Played:
    """Rank 0 waits for the ranks across the link, so it is not by its own time that it is late."""
    return play(LESSON, ranks, *OVER_THE_LINK, *changes, deadline=200)


NO_GAIN = {HALF, "slow step: float32 / PowerSGD 1, at least"}
NO_GAIN |= {f"{name}: accuracy ahead in equal time" for name in ("top-k", "PowerSGD 1")}


def verdicts_on(sends_all: Sequence[str] = (), rate: float = 1.0) -> tuple[set[str], set[str]]:
    """The claims on time that PASS and that FAIL, on made-up runs across a link.

    What takes a step next to its bytes is small; the methods of `sends_all` send as float32 does.
    """
    lesson = load(LESSON)
    runs = {}
    for name in (*COUNTED, lesson.HALF, "top-k", "PowerSGD 1", lesson.DILOCO):
        size = {"float32": 4, "bfloat16": 2}.get(name, 1 if "8 bits" in name else 0.4)
        crossing = (4 if name in sends_all else size) * lesson.P
        run = SimpleNamespace(crossing=crossing, crossed=1.07 * crossing, counted=crossing)
        run.expected = 1e-3 + crossing * lesson.BYTE
        run.slow = 1e-3 + crossing * lesson.BYTE / rate
        run.soon = 0.8 - 0.1 * crossing / lesson.P
        runs[name] = run
    lesson.check_slow_link(runs)
    rows = [row for row in lesson.ledger if row["timed"]]
    passed = {row["claim"] for row in rows if row["verdict"] == "PASS"}
    return passed, {row["claim"] for row in rows} - passed


def test_times_across_the_link_are_judged_by_its_rate_and_the_bytes() -> None:
    passed, failed = verdicts_on()
    assert passed >= PREDICTED | NO_GAIN
    assert failed == set()
    for rate in (2, 100):  # half as slow as is said, or not slow
        _, failed = verdicts_on(rate=rate)
        assert failed >= PREDICTED
    _, failed = verdicts_on(("bfloat16", "top-k", "PowerSGD 1"))
    assert failed == NO_GAIN


@pytest.mark.deep
def test_an_odd_number_of_ranks_has_two_ends_too() -> None:
    played = across(3, *QUICK)
    played.expect(set())
    assert {row["claim"] for row in played.ledger} >= BYTES, played.output


NO_RIGHT = [
    ("if libc.unshare(CLONE_NEWNET) != 0:", "if libc.unshare(-1) != 0:"),
    ("if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:", "if libc.unshare(-1) != 0:"),
]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([('command(f"tc ', 'command(f"no-such-tc ')], "no-such-tc"),
        ([("ip link set lo up", "ip link set no-such up")], 'Cannot find device "no-such"'),
        (NO_RIGHT, "unshare: "),
    ],
)
def test_without_a_link_it_is_blocked_and_says_why(changes: list, why: str) -> None:
    played = across(2, *QUICK, *changes)
    assert played.code == 0, played.output
    assert why in played.output
    needs = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert needs == ["root or user namespaces", "2 GPUs"]
    assert max(map(len, played.output.splitlines())) <= 100


@pytest.mark.deep
def test_a_user_who_is_not_root_has_a_link_too() -> None:
    outcomes = attempt(play_as_nobody, 2, LESSON, *QUICK, deadline=200, group=False)
    assert outcomes[0].kind == "returned", outcomes[0]
    _, ledger = outcomes[0].value
    assert {row["claim"] for row in ledger} >= BYTES, outcomes[0].output


# Nothing is left


SLOW = ("\nMBIT = 20\n", "\nMBIT = 4\n")


def start(folder: Path, *changes: tuple[str, str]) -> subprocess.Popen:
    """The lesson under torchrun on two ranks, changed."""
    source = (ROOT / LESSON).read_text()
    for old, new in (("\nSTEPS = 60\n", "\nSTEPS = 10\n"), *changes):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (path := folder / "lesson.py").write_text(source)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(path)]
    into = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=MARKED | {"OMP_NUM_THREADS": "1"}, process_group=0, **into)


RAISES = (
    "    dist.barrier()\n    so_far",
    "    RANK and (time.sleep(1), 1 / 0)\n    so_far",
)


@pytest.mark.deep
@pytest.mark.parametrize("end", ["SIGINT to torchrun", "SIGKILL to rank 0", "an exception"])
def test_nothing_is_left(end: str, tmp_path: Path) -> None:
    """Other ends: test_07_hierarchical_collectives.py; they share the passage that makes nodes."""
    was = machine()
    torchrun = start(tmp_path, SLOW, *([RAISES] if end == "an exception" else []))
    started = once_there(torchrun, 5)  # two ranks; a launcher with two ranks in two nodes
    if end == "SIGINT to torchrun":
        torchrun.send_signal(signal.SIGINT)
    elif end == "SIGKILL to rank 0":
        ranks = [p for p in started if p.ppid() == torchrun.pid]
        next(p for p in ranks if p.environ()["RANK"] == "0").kill()
    _, said = torchrun.communicate(timeout=150)
    assert torchrun.returncode != 0  # after so few steps accuracy is not what it should be
    assert ("ZeroDivisionError" in said) == (end == "an exception"), said
    assert gone()
    assert machine() == was


# Values that no row shows


def test_bytes_handed_in_are_those_of_the_text(monkeypatch) -> None:
    """85,002 parameters on four ranks; PowerSGD's P, Q and biases have 1,098 r + 522 elements."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    lesson = load(LESSON)
    handed = {name: method.handed for name, method in lesson.methods().items()}
    assert handed == {
        "float32": 340_008,
        "float16, torch's hook": 170_004,
        "bfloat16": 170_004,
        "8 bits": 5 * (4 + 21_251),  # four chunks of all gradients, and one of their sum
        "8 bits, all-gather": 4 + 85_002,
        "top-k": 680,
        "top-k, no feedback": 680,
        "PowerSGD 1, no feedback": 4 * (1_098 + 522),
        "local SGD, H=10": 34_000.8,
        "DiLoCo, H=10": 34_000.8,
        "PowerSGD 1": 4 * (1_098 + 522),
        "PowerSGD 2": 4 * (2 * 1_098 + 522),
        "PowerSGD 4": 4 * (4 * 1_098 + 522),
    }
    with_feedback = {name for name, method in lesson.methods().items() if method.feedback}
    assert with_feedback == {*KEEP}


def test_training_never_sees_the_digits_that_are_kept_back() -> None:
    """Digit i is drawn with ink i: rank 1 of two trains on four fifths, and looks at its share."""
    lesson = load(LESSON)
    lesson.RANK, lesson.WORLD_SIZE = 1, 2
    digits = torch.arange(100.0)[:, None].expand(100, 64).numpy()
    labels = torch.arange(100).numpy() % 10
    trained, looked = [], []

    def places(images: torch.Tensor) -> list[int]:
        return ((images[:, 0] + 0.6) * 8).round().int().tolist()

    def step(images: torch.Tensor, of_images: torch.Tensor) -> None:
        assert [place % 10 for place in places(images)] == of_images.tolist()
        trained.append(places(images))

    def model(images: torch.Tensor) -> torch.Tensor:
        """It takes every digit for a 5: half of those kept back are 0, half are 5."""
        looked.append(places(images))
        return nn.functional.one_hot(torch.full((len(images),), 5), 10)

    made = SimpleNamespace(step=step, model=model, method=lesson.Method(None, 0), curve=[])
    lesson.methods = lambda: {"one": None}
    lesson.Run = lambda name, device: made
    lesson.from_rank_0 = lambda value: (digits, labels)
    lesson.summarize = lambda run, device: None
    lesson.dist = SimpleNamespace(barrier=lambda: None)
    lesson.train(CPU, 60, 60)
    assert len(trained) == 60
    assert {len(of_step) for of_step in trained} == {48}  # of 96
    seen = {place for of_step in trained for place in of_step}
    assert seen == {place for place in range(100) if place % 5 > 0}
    assert trained[0] != trained[1]
    assert looked == [list(range(5, 100, 10))] * 12
    assert made.curve == [0.5] * 12  # of all 20, this rank has 10 of the fives


def test_a_run_is_summed_up_per_step_and_by_its_fastest_round() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4

    def all_reduce(x: torch.Tensor, op: object = None) -> None:
        if op is None:
            x.mul_(2)  # with the other ranks' shares
        else:
            x.add_(0.1)  # another rank is slower

    lesson.dist = SimpleNamespace(all_reduce=all_reduce, ReduceOp=SimpleNamespace(MAX="max"))
    calls = 10 * [lesson.Call("all_reduce", 10, 40, (0, 1, 2, 3), None)]
    calls.append(lesson.Call("all_to_all", 100, 400, (0, 1, 2, 3), None))
    seconds = [0.9] + 9 * [0.1] + 9 * [0.3] + [0.2]
    for outer, best in ((None, 0.2), ((0.7, 0.9), 0.28)):
        run = SimpleNamespace(curve=[0.1, 0.2], seconds=seconds, calls=calls)
        run.method = lesson.Method(None, 0, outer=outer)
        lesson.summarize(run, CPU)
        assert run.curve == pytest.approx([0.2, 0.4])
        assert run.best == pytest.approx(best)
        assert run.handed == (10 * 40 + 400) / 10
        assert run.sent == (10 * 60 + 300) / 10
        assert run.crossing == (10 * 60 + 400) / 10


def test_equal_time_is_that_of_float32_s_first_steps() -> None:
    """Across the cable: seconds, bytes that crossed, bytes that were counted, of each method."""
    lesson = load(LESSON)
    lesson.from_rank_0 = lambda value: value
    curve = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    runs = {}
    for name in (lesson.FULL, lesson.BFLOAT, lesson.TOP, lesson.DILOCO):
        runs[name] = SimpleNamespace(best=0.01, crossing=1e5, curve=list(curve))
    seen = [(0.2, 1, 5), (0.1, 2, 6), (0.05, 3, 7), (0.5, 4, 8)]
    asked = []
    pipes = [SimpleNamespace(send=asked.append, recv=lambda: seen)]
    assert lesson.train_across(pipes, "", runs)
    assert asked == ["go"]
    on_the_cable = 1e5 * 1514 / 1448 * 8 / 20e6  # 20 Mbit/s
    assert [(one.slow, one.crossed, one.counted) for one in runs.values()] == seen
    for one in runs.values():
        assert one.expected == pytest.approx(0.01 + on_the_cable)
    assert [one.soon for one in runs.values()] == [0.1, 0.2, 0.4, 0.1]


def test_bytes_across_are_told_per_step_one_way_and_per_rank() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 3  # two of them in the first node
    run = SimpleNamespace(seconds=4 * [0.1], best=0.1, carried=8000, left=24_000)
    lesson.train = lambda device, steps, few, on_cable: {"one": run}
    told = []
    lesson.train_when_told(SimpleNamespace(recv=lambda: "go", send=told.append))
    assert told == [[(0.1, 1000, 3000)]]


def test_a_node_s_counters_are_of_its_cable_and_of_what_its_ranks_sent() -> None:
    table = "Inter-| Receive | Transmit\n    lo: 9 9 0 0 0 0 0 0 300 9 0 0 0 0 0 0\n"
    table += "  slow: 1000 3 0 0 0 0 0 0 70 2 0 0 0 0 0 0\n"
    table += "  eth0: 5 3 0 0 0 0 0 0 5 2 0 0 0 0 0 0\n"
    lesson = load(LESSON)
    lesson.open = lambda path: io.StringIO(table)
    assert lesson.bytes_on_the_cable() == 1070
    assert lesson.bytes_sent_in_this_node() == 370


def lost() -> float:
    """Two ranks; of the mean [4, 0, 3] 1 arrived and 1 is kept, on average, of the first."""
    lesson = load(LESSON)
    rank = dist.get_rank()
    run = SimpleNamespace(arrived=torch.tensor([1.0, 0.0, 3.0]))
    run.computed = torch.tensor([8.0 * rank, 0.0, 3.0])
    run.residual = torch.tensor([2.0 * rank, 0.0, 0.0])
    return lesson.share_lost(run)


def test_what_is_lost_neither_arrived_nor_is_kept() -> None:
    assert run(lost, 2) == pytest.approx([2 / 5, 2 / 5])


def test_the_median_on_a_gpu_leaves_the_first_three_out(monkeypatch) -> None:
    took = iter([0.5, 0.5, 0.5, 5.0, 1.0, 2.0, 4.0, 3.0])
    event = Mock(elapsed_time=lambda end: next(took))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    work = Mock()
    assert load(LESSON).median_ms(work, repeats=5) == 3.0
    assert work.call_count == 8


def test_the_table_s_columns_are_what_their_heads_say(capsys) -> None:
    lesson = load(LESSON)
    told = {"handed": 1000.4, "sent": 2000, "best": 3e-3, "curve": [0.1, 0.4], "crossed": 5000}
    told |= {"expected": 6e-3, "slow": 7e-3, "soon": 0.8, "crossing": 9000}
    lesson.print_table({lesson.FULL: SimpleNamespace(**told)}, slow=True)
    heads, row = capsys.readouterr().out.splitlines()[3:5]
    assert heads.split()[:3] == ["handed", "sent", "ms"]
    assert heads.split()[-2:] == ["0.0", "s"]  # five steps of 7 ms
    after_all, across = ["1,000", "2,000", "3.0", "40.0%"], ["5,000", "6.0", "7.0", "80.0%"]
    assert row.split() == ["float32", *after_all, *across]


def mean_of_large_numbers() -> list[float]:
    lesson = load(LESSON)
    large = torch.tensor([40_960.0, 1.0 + dist.get_rank()], dtype=torch.float16)
    return lesson.mean([large])[0].tolist()


def test_float16_is_divided_before_it_is_added_up_or_it_would_overflow() -> None:
    """The largest number is 65,504."""
    assert run(mean_of_large_numbers, 2) == [[40_960.0, 1.5]] * 2
