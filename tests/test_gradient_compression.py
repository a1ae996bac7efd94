"""Compressors against their algebra, training against one process, claims against broken lines."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
import torchvision
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy

from exercises.ranks import attempt, run
from tests import lessons
from tests.lessons import ROOT, Played, load, play
from tests.test_hierarchical import MARKED, gone, machine, networks

LESSON = "communication/07_gradient_compression.py"
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
    lesson, x = load(LESSON, ("SHARE, H = 0.001", "SHARE, H = 0.1")), mine(1000)
    sent, arrived = lesson.top_k(x)
    chosen = sent != 0
    largest = x.abs()[chosen].min() >= x.abs()[~chosen].max()
    whole = torch.equal(sent[chosen], x[chosen])
    return bool(chosen.sum() == 100 and largest and whole and close(arrived, mean_over_ranks(sent)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_top_k_sends_the_largest_as_they_are_and_averages_over_all_ranks(ranks: int) -> None:
    assert all(run(top_k_is_right, ranks))


def eight_bits_are_right() -> list[bool]:
    lesson, x = load(LESSON), mine(1000)
    step, draws = x.abs().max() / 127, [lesson.eight_bits(x) for _ in range(400)]
    bounded = all(((sent - x).abs() <= step * 1.001).all() for sent, _ in draws)
    bias = (sum(sent for sent, _ in draws) / 400 - x).abs().max()  # 5 sigma of a step / 2 each
    averaged = all(close(arrived, mean_over_ranks(sent)) for sent, arrived in draws[:3])
    silent = torch.equal(lesson.eight_bits(torch.zeros(9))[1], torch.zeros(9))
    return [bool(bounded), bool(bias < 5 * step / 2 / 20), averaged, silent]


@pytest.mark.parametrize("ranks", [1, 3])
def test_eight_bits_are_a_step_off_at_most_and_right_on_average(ranks: int) -> None:
    assert run(eight_bits_are_right, ranks) == [[True] * 4] * ranks


def casts_like_torch() -> bool:
    lesson, x = load(LESSON), mine()
    _, ours = lesson.cast(torch.float16)(x.clone())
    bucket = SimpleNamespace(buffer=lambda: x)
    theirs = fp16_compress_hook(None, bucket).wait()
    _, whole = lesson.cast(torch.float32)(x0 := mine())
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
    lesson, n, r = load(LESSON, ("SHARE, H = 0.001, 10", "SHARE, H = 0.001, 1")), 3, dist.get_rank()
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


def test_resnet18_is_torchvisions_with_a_small_first_convolution() -> None:
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, bias=False)
    theirs = sorted(tuple(p.shape) for p in model.parameters())
    assert sorted(load(LESSON).resnet18()) == theirs


def ring_shares() -> list[tuple[int, float]]:
    with load(LESSON).counted() as log:
        dist.all_reduce(torch.zeros(6))
        dist.all_gather_into_tensor(torch.zeros(3 * 4), torch.zeros(4))
    return log


def test_a_ring_sends_more_in_an_all_gather() -> None:
    assert run(ring_shares, 3) == [[(24, 24 * 4 / 3), (16, 16 * 2)]] * 3


# The claims

LOST, KEEP = ": share of gradients lost", ("top-k", "PowerSGD 1", "PowerSGD 2", "PowerSGD 4")
GAP = "all of them: weights, gap to rank 0's"
FEW = ("96, 60, 0.3", "96, 20, 0.3")  # too few steps to learn: accuracy is not looked at
NO_LINK = (
    ("link = start_link() if RANK == 0 and WORLD_SIZE > 1 else None", "link = None"),
    ("    what_it_buys(runs, slow)\n    published(device)\n", ""),
)
SHORT = (FEW, *NO_LINK)
FEEDBACK = "    x += run.kept  # error feedback\n"
BREAKS = {
    "nothing": ([], set()),
    "what is not sent is dropped": (
        [
            ("TOP: (top_k, True,", "TOP: (top_k, False,"),
            ("PowerSGD(r, SHAPES), True", "PowerSGD(r, SHAPES), False"),
        ],
        {name + LOST for name in KEEP},
    ),
    "what is kept is not added": ([(FEEDBACK, "")], {name + LOST for name in KEEP}),
    "kept is not what was not sent": (
        [("(x - sent) *", "(x - 0.9 * sent) *")],
        {name + LOST for name in KEEP},
    ),
    "sums are not divided": (
        [
            (".div_(WORLD_SIZE)", ""),
            ("total / WORLD_SIZE", "total"),
            (").mean(0)\n\n\ndef top_k", ").sum(0)\n\n\ndef top_k"),
        ],
        {name + LOST for name in ("float32", "8 bits", "top-k")},
    ),
    "a higher rank is sent, ranks do not set out together": (
        [
            ("torch.randn(end, r,", "torch.randn(end, r + 1,"),
            ("vector_to_parameters(self.at.clone(), self.model.parameters())", "pass"),
        ],
        {f"{n}: bytes a step" for n in (*KEEP[1:], "PowerSGD 1, no feedback")} | {GAP},
    ),
    "each rank adds up in its own order": (
        [("total / WORLD_SIZE", "total * (1 + 1e-7 * RANK) / WORLD_SIZE")],
        {GAP},
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_line_fails_the_claims_that_guard_it_and_no_others(what: str) -> None:
    changes, claims = BREAKS[what]
    played = play(LESSON, 2, *SHORT, *changes)
    failed = {claim for claim in played.failed if "accuracy" not in claim}
    assert played.ledger, played.code
    assert failed == claims, played.output


def test_without_feedback_accuracy_does_not_come() -> None:
    played = play(LESSON, 2, *NO_LINK, (FEEDBACK, ""))
    saves = {f"{name}: accuracy that feedback saves" for name in ("top-k", "PowerSGD 1")}
    assert saves <= played.failed, played.output


@pytest.mark.parametrize("ranks", [3, 5])
def test_claims_on_bytes_and_gradients_hold_on_any_number_of_ranks(ranks: int) -> None:
    played = play(LESSON, ranks, *SHORT)
    assert played.ledger, played.code
    assert {claim for claim in played.failed if "accuracy" not in claim} == set(), played.output


# Across the link

BYTES = {f"{name}: bytes on the link, of a ring's" for name in ("float32", "bfloat16", "8 bits")}
DUE = {f"{name}: ms on the slow link, of those due" for name in ("float32", "bfloat16")}
HALF = "slow link: float32's step, of bfloat16's"
BOTH = "int(row[1]) + int(row[9])"
TC = "            tc qdisc add dev slow root tbf rate {MBIT}mbit burst 5kb latency 100ms"
QUICK = ("SLOW_STEPS, EVERY = 20, 4, 5", "SLOW_STEPS, EVERY = 100, 1, 5")  # bytes, not times
SENDS_ALL = [
    ("(cast(torch.bfloat16), False, 2 * P)", "(cast(torch.float32), False, 4 * P)"),
    ("(PowerSGD(r, SHAPES), True,", "(cast(torch.float32), True,"),
    ("TOP: (top_k, True,", "TOP: (cast(torch.float32), True,"),
]
NO_GAIN = {HALF, "slow link: float32's step, of PowerSGD 1's"}
NO_GAIN |= {f"{name}: accuracy ahead in equal time" for name in ("top-k", "PowerSGD 1")}
ON_THE_LINK = {  # what must fail; only bytes can be said not to, for other jobs take no bytes
    "nothing": ([QUICK], set()),
    "a counter that misses one direction": ([QUICK, (BOTH, "int(row[1])")], BYTES),
    "a counter that misses the other": ([QUICK, (BOTH, "int(row[9])")], BYTES),
    "all at one end": ([QUICK, ("nodes[2 * RANK // WORLD_SIZE]", "nodes[0]")], BYTES),
    "a cable that is not slow": ([(TC, "")], DUE),
    "a cable half as slow": ([("rate {MBIT}mbit", "rate {2 * MBIT}mbit")], DUE),
    "methods that send all": (SENDS_ALL, NO_GAIN),
}


def across(ranks: int, *changes: tuple[str, str]) -> Played:
    left_out = ("    nothing_is_lost(runs)\n", ""), ("    published(device)\n", "")
    return play(LESSON, ranks, FEW, *left_out, *changes)


@pytest.mark.parametrize("what", ON_THE_LINK)
def test_a_broken_line_fails_the_claims_that_guard_the_link(what: str) -> None:
    changes, claims = ON_THE_LINK[what]
    played = across(2, *changes)
    assert {row["claim"] for row in played.ledger} >= BYTES | DUE | {HALF}, played.output
    assert claims <= played.failed, played.output
    assert played.failed & BYTES == claims & BYTES, played.output


def test_an_odd_number_of_ranks_has_two_ends_too() -> None:
    played = across(3, QUICK)
    assert {row["claim"] for row in played.ledger} >= BYTES, played.output
    assert not played.failed & BYTES, played.output


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("tc qdisc add", "no-such-tc qdisc add"), "no-such-tc"),
        (("ip link set lo up", "ip link set no-such-link up"), 'Cannot find device "no-such-link"'),
        (("        if libc.unshare(NET):\n", "        if libc.unshare(-1):\n"), "unshare: "),
    ],
)
def test_without_a_link_it_is_blocked_and_says_why(change: tuple[str, str], why: str) -> None:
    more = [("if libc.unshare(USER | NET)", "if libc.unshare(-1)")] * (why == "unshare: ")
    played = across(2, QUICK, change, *more)
    assert played.code == 0, played.output
    assert why in played.output
    needs = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert needs == ["root or user namespaces"]
    assert max(map(len, played.output.splitlines())) <= 100


def unprivileged(*changes: tuple[str, str]) -> tuple[int, list[dict]]:
    """Play the lesson as nobody, who can make a network only inside a user namespace."""
    load_digits()  # what it imports, nobody may not be able to read
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: or /proc/self stays root's
    return lessons._play(LESSON, changes, ())


def test_whoever_is_not_root_has_a_link_too() -> None:
    outcomes = attempt(unprivileged, 2, FEW, QUICK, deadline=60, group=False)
    _, ledger = outcomes[0].value
    assert {row["claim"] for row in ledger} >= BYTES, outcomes[0].output


# Nothing is left


SLOW = ("SLOW_STEPS, EVERY = 20, 4, 5", "SLOW_STEPS, EVERY = 4, 4, 5")


def start(folder: Path, *changes: tuple[str, str]) -> subprocess.Popen:
    """The lesson under torchrun on two ranks, changed."""
    source = (ROOT / LESSON).read_text()
    for old, new in (("96, 60, 0.3", "96, 10, 0.3"), *changes):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (path := folder / "lesson.py").write_text(source)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(path)]
    into = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=MARKED | {"OMP_NUM_THREADS": "1"}, process_group=0, **into)


def on_the_link(torchrun: subprocess.Popen) -> list[psutil.Process]:
    """All that it has started, once two ranks are across the link."""
    for _ in range(600):
        time.sleep(0.05)
        started = psutil.Process(torchrun.pid).children(recursive=True)
        nets = networks([process.pid for process in started])
        if (len(started), len(nets)) == (4, 2):
            return started
    raise AssertionError(f"no 4 processes in 2 networks: {started}")


COUNTS = "    dist.barrier()\n    with open"
RAISES = COUNTS, f"    RANK and (time.sleep(1), 1 / 0)\n{COUNTS}"


@pytest.mark.parametrize(
    "end", ["SIGINT", "SIGTERM", "SIGKILL", "SIGKILL to rank 0", "an exception", "the end"]
)
def test_nothing_is_left(end: str, tmp_path: Path) -> None:
    was = machine()
    changes = {"an exception": [SLOW, RAISES], "the end": []}.get(end, [SLOW])
    torchrun = start(tmp_path, *changes)
    started = on_the_link(torchrun)
    if end.startswith("SIG"):
        name, _, rank_0 = end.partition(" to ")
        ranks = [p for p in started if p.ppid() == torchrun.pid]
        first = next(p for p in ranks if p.environ()["RANK"] == "0")
        (first if rank_0 else torchrun).send_signal(getattr(signal, name))
    _, said = torchrun.communicate(timeout=60)
    assert torchrun.returncode != 0  # after so few steps accuracy is not what it should be
    assert ("ZeroDivisionError" in said) == (end == "an exception"), said
    assert gone()
    assert machine() == was
