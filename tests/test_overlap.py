"""Overlap: spans against counting, order and values at any world size, breaks, nothing left."""

import functools
import signal
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lessons import ROOT, Played, load, play
from tests.test_hierarchical import MARKED, gone, machine, networks

LESSON = "communication/05_overlap.py"
NO_LINK = [("    across_the_link(link, options.figure)\n", "")]
NO_LINK += [("link = start_pair() if RANK == 0 else None", "link = None")]
NO_HERE = [("    on_this_machine(device)\n", "")]
ONE_STEP = [('for step in ("backward", "forward")})', 'for step in ("backward",)})')]
ONE_STEP += [('    for step in ("backward", "forward"):\n', '    for step in ("backward",):\n')]


@functools.cache
def lesson():
    return load(LESSON)


spans = st.lists(
    st.tuples(st.sampled_from(["compute", "comm"]), st.integers(0, 30), st.integers(0, 9))
)


@given(spans)
def test_exposed_is_what_counting_moments_says(drawn: list[tuple[str, int, int]]) -> None:
    placed = [(kind, 7, start, start + long) for kind, start, long in drawn]
    moments = {"compute": set(), "comm": set()}
    for kind, _, start, end in placed:
        moments[kind] |= set(range(start, end))
    assert lesson().exposed(placed) == len(moments["comm"] - moments["compute"])


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_order_and_values_hold_for_any_number_of_ranks(ranks: int) -> None:
    played = play(LESSON, ranks, *NO_LINK, *NO_HERE)
    assert (played.code, played.failed) == (0, set()), played.output
    assert [row["verdict"] for row in played.ledger] == ["PASS"] * 8 + ["BLOCKED"]  # GPU streams


SENT, GRADIENTS = "buckets sent before the last gradient", "gradients, from one process"
AHEAD, ACTIVATIONS = "layers asked for a layer ahead", "activations, from one process"
BREAKS = {
    "a bucket leaves before it is full": (
        "i % PER_BUCKET == 0:",
        "i % PER_BUCKET == 1:",
        {"overlap: " + SENT},
    ),
    "all buckets wait for the last gradient": (
        "and i % PER_BUCKET == 0:  # layers come last first\n            self",
        "and i == 0:\n            for i in range(0, LAYERS, PER_BUCKET): self",
        {"overlap: " + SENT},
    ),
    "a gradient is no view of its bucket": (
        "weight.grad = self.buckets[i // PER_BUCKET, i % PER_BUCKET]",
        "weight.grad = self.buckets[i // PER_BUCKET, i % PER_BUCKET].clone()",
        {how + GRADIENTS for how in ("after: ", "overlap: ")},
    ),
    "no prefetch": (
        "ahead = [0, 1] if i == 0 else range(LAYERS)[i + 1 : i + 2]",
        "ahead = [i]",
        {"overlap: " + AHEAD},
    ),
    "everybody holds the first shard": (
        "full.chunk(n)[RANK].clone()",
        "full.chunk(n)[0].clone()",
        {how + ACTIVATIONS for how in ("after: ", "overlap: ")},
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_line_fails_the_claims_that_guard_it(what: str) -> None:
    old, new, claims = BREAKS[what]
    played = play(LESSON, 2, *NO_LINK, *NO_HERE, (old, new))
    assert claims <= played.failed <= claims | {"overlap: " + GRADIENTS}, played.output
    assert played.code == 1


CLOCK, TRACE, LOG = (
    "backward: share hidden, by the clock",
    "backward: by the trace, as by the clock",
    "backward: by the log, as by the clock",
)
ON_THE_LINK = {
    "nothing": ("", "", set()),
    "whoever issues waits at once": (
        "        self.works.append(work)\n",
        "        self.works.append(work)\n        work.wait()\n",
        {CLOCK, TRACE},
    ),
    "the trace lacks a collective": ('"gloo:all_reduce", ', "", {TRACE}),
    "the trace lacks the compute": ('kinds = {"compute", ', "kinds = {", {TRACE}),
    "the log lacks the communication": (
        "exposed(run[1])",
        'exposed([span for span in run[1] if span[0] == "compute"])',
        {LOG},
    ),
}


def across(*changes: tuple[str, str]) -> Played:
    return play(LESSON, 2, *NO_HERE, *ONE_STEP, ("HOWS * 3", "HOWS"), *changes)


@pytest.mark.parametrize("what", ON_THE_LINK)
def test_across_the_link(what: str) -> None:
    old, new, claims = ON_THE_LINK[what]
    played = across(*[(old, new)] * bool(old))
    assert {row["claim"] for row in played.ledger} >= {CLOCK, TRACE, LOG}, played.output
    assert played.failed == claims, played.output


def test_the_figure_is_drawn(tmp_path) -> None:
    log = [("compute", 1, 0.0, 0.2), ("comm", 1, 0.2, 0.3)]
    both = [{"backward": {"log": log}, "forward": {"log": log}}] * 2
    lesson().draw(str(tmp_path / "figure.png"), both)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_timeline_shows_who_does_what_when() -> None:
    log = [("compute", 0, 0.0, 0.5), ("comm", 0, 0.5, 1.0)]
    rows = lesson().timeline(1, {"log": log, "overlap": 1.0}, width=8).splitlines()
    assert rows == ["  rank 1 compute aaaa....", "  rank 1 comm    ....aaaa"]


def test_without_a_slow_network_it_is_blocked_and_says_why() -> None:
    played = across(("tc qdisc add dev lo", "no-such-tc qdisc add dev lo"))
    assert played.code == 0, played.output
    assert "no-such-tc" in played.output
    needs = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert needs == ["root or user namespaces", "1 GPU"]


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_leaves_nothing(end: str) -> None:
    was = machine()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(ROOT / LESSON)]
    torchrun = subprocess.Popen(command, env=MARKED, stdout=subprocess.DEVNULL, process_group=0)
    for _ in range(600):
        time.sleep(0.05)
        started = psutil.Process(torchrun.pid).children(recursive=True)
        nets = networks([process.pid for process in started])
        if (len(started), len(nets)) == (4, 1):  # two ranks, and the two across the slow link
            break
    assert (len(started), len(nets)) == (4, 1)
    torchrun.send_signal(getattr(signal, end))
    assert torchrun.wait(40) != 0
    assert gone()
    assert machine() == was
