"""What a range says is heard as it was said; nsys is read right; each break is seen."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch

from course.playing import load, play
from tests.helpers.gpu_trace import gpu_trace
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

pytestmark = pytest.mark.skipif(find_spec("nvtx") is None, reason="needs the package nvtx")

LESSON = "profiling/03_nsight_and_nvtx.py"

ON_GPUS = OnGpus(
    changes=[
        ('return 180 if device.type == "cpu" else 8192', "return 180"),
        ('512 if device.type == "cpu" else 4096', "64"),
    ]
)

POPS = "pops, one for each push"
ROWS, NAMED = "rows of a table by name", "the same, were payloads in the names"
PLAN = "in the plan's order, depth, payload and color"
MARKS, RANGED = (
    "marks whose payload is the step's loss, to the bit",
    "collectives that torch dispatched, with a range",
)
BYTES, TORCH = "bytes per step, by payloads: 4 P", "ranges of torch.cuda.nvtx that are heard"
TOGETHER = "all-reduces in which all ranks are at one moment"
LAUNCHES, AFTER = (
    "launch ranges that end before the last joins",
    "waits and flights that end after it",
)


@pytest.mark.deep
def test_the_listener_hears_threads_domains_and_every_kind_of_call() -> None:
    """In a process of its own, where nothing has called NVTX yet."""
    code = f"""
import threading
from course.playing import load
lesson = load({LESSON!r})
import nvtx
listener, why_not = lesson.listen()
assert why_not == "", why_not
assert [r.name for r in lesson.ranges_of(lesson.heard(listener), "training")] == ["the first call"]
flight = nvtx.start_range("flight", domain="training")
with nvtx.annotate("outer", 0x123456, "training", payload=7):
    with nvtx.annotate("elsewhere", domain="another"):
        pass
    there = threading.Thread(target=lambda: nvtx.push_range("there", domain="training"))
    there.start()
    there.join()
    with nvtx.annotate("inner", 0, "training", payload=0.1):
        nvtx.mark("now", domain="training", payload=-3)
    nvtx.end_range(flight)
with nvtx.annotate("of no domain"):
    pass
events = lesson.heard(listener)
assert lesson.heard(listener) == []
ranges = lesson.ranges_of(events, "training")
told = [(r.name, r.depth, r.payload) for r in ranges]
assert told == [("flight", 0, None), ("outer", 0, 7), ("there", 0, None),
                ("inner", 1, 0.1), ("now", 2, -3)], told
flight, outer, there, inner, now = ranges
assert outer.color == 0x123456
assert there.end != there.end  # never popped
assert flight.start < outer.start < inner.start < now.start == now.end
assert now.end < inner.end < flight.end < outer.end
assert [r.name for r in lesson.ranges_of(events, None)] == ["of no domain"]
"""
    env = {name: value for name, value in os.environ.items() if name != "NVTX_INJECTION64_PATH"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


FAKE_NSYS = """#!/bin/sh
# Stands for nsys: runs what it is to profile, and tells sums as the real one does in CSV.
if [ "$1" = profile ]; then
    while [ "$1" != -o ]; do shift; done
    touch "$2"; shift 2; exec "$@"
fi
echo "Processing [report.sqlite] with [nvtx_pushpop_sum.py]..."
echo
echo "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Range"
echo "66.7,300000000,3,100000000.0,1.0,1,1,0.0,training:step"
echo "33.3,INSTEAD,3,50000000.0,1.0,1,1,0.0,training:all_reduce"
"""


QUICK = ("        time.sleep(0.05)\n        with", "        with")


def with_nsys(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    nsys = folder / "nsys"
    nsys.write_text(script)
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.deep
def test_what_nsys_prints_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_nsys(tmp_path, monkeypatch, FAKE_NSYS.replace("INSTEAD", "150000000"))
    lesson = load(LESSON, QUICK)
    assert lesson.by_nsys() == {"step": (3, 3e8), "all_reduce": (3, 1.5e8)}


@pytest.mark.deep
def test_the_claims_on_nsys_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ns, verdict in (("150000000", "PASS"), ("30000000", "FAIL")):
        with_nsys(tmp_path, monkeypatch, FAKE_NSYS.replace("INSTEAD", ns))
        lesson = load(LESSON, QUICK)
        lesson.gather_objects = lambda value: [value]
        lesson.check_nsight_systems()
        assert [row["verdict"] for row in lesson.ledger] == ["PASS", verdict]


def test_shares_are_those_of_the_steps() -> None:
    lesson = load(LESSON)

    def one(name: str, start: int, end: int) -> object:
        return lesson.Range(name, 0, None, 0, start, end)

    ranges = [one("step", 0, 100), one("all_reduce", 10, 30), one("forward", 30, 90)]
    assert lesson.share_of_nvtx([*ranges, one("step", 100, 200)]) == 0.1
    transfers = [event for event in gpu_trace(0)["traceEvents"] if "AllReduce" in event["name"]]
    assert len(transfers) == 4  # barriers are all-reduces, too
    assert lesson.share_of_torch(gpu_trace(0)["traceEvents"]) == pytest.approx(0.25)
    names = {"step": 100, "gloo:all_reduce": 30, "c10d::allreduce_": 1}
    span = {"ph": "X", "cat": "user_annotation"}  # on a CPU, where there are no kernels
    on_cpu = [span | {"name": name, "dur": dur} for name, dur in names.items()]
    assert lesson.share_of_torch(on_cpu) == pytest.approx(0.3)


def test_gradients_are_averaged_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that have the same batches take the steps of one process."""
    lesson = load(LESSON)
    lesson.nvtx = MagicMock()  # the first call of NVTX in a process decides who listens
    lesson.WORLD_SIZE, lesson.LATE = 2, 0
    monkeypatch.setattr(lesson.dist, "all_reduce", lambda bucket_N: bucket_N.mul_(2))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    alone = deepcopy(model)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.01)
    for number, x_BD in enumerate(torch.randn(2, 6, 5)):
        loss = alone(x_BD).square().mean()
        assert lesson.one_step(model, x_BD, number) == pytest.approx(loss.item(), abs=1e-6)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("rank", "late"), [(0, 0), (2, 0.04)])
def test_one_rank_s_loader_is_late(rank: int, late: float, monkeypatch: pytest.MonkeyPatch) -> None:
    lesson, slept = load(LESSON), []
    lesson.nvtx, lesson.time = MagicMock(), SimpleNamespace(sleep=slept.append)
    lesson.RANK, lesson.SLOW = rank, 2
    monkeypatch.setattr(lesson.dist, "all_reduce", lambda bucket_N: None)
    lesson.one_step(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.ones(1, 2), 0)
    assert slept == [late]


def test_a_range_ends_when_the_device_is_done() -> None:
    lesson, order = load(LESSON), []

    @contextmanager
    def annotate(*_: object, **__: object) -> Iterator[None]:
        order.append("begins")
        yield
        order.append("ends")

    lesson.nvtx = SimpleNamespace(annotate=annotate)
    with (
        patch.object(torch.cuda, "synchronize", lambda: order.append("done")),
        lesson.phase("forward", torch.device("cuda")),
    ):
        order.append("launched")
    assert order == ["begins", "launched", "done", "ends"]


def test_the_rank_that_waits_least_has_the_smallest_share() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE, lesson.SLOW = 3, 2
    lesson.share_of_nvtx, lesson.share_of_torch = len, len
    lesson.gather_objects = lambda mine: [mine, (0.5, 0.48), (0.1, 0.12)]
    lesson.check_shares(["123456"] * 3, "12345")
    share, least = lesson.ledger
    assert (share["predicted"], share["measured"]) == (5, 6)  # by torch, by NVTX
    assert (least["predicted"], least["measured"]) == (2, 2)


def test_the_cost_is_that_of_all_ranges_of_a_step() -> None:
    """2,000 unheard ranges in 2 ms, eight of them in a step of 10 ms."""
    lesson = load(LESSON)
    assert len(lesson.plan(0, 180)) == lesson.RANGES == 8
    lesson.heard = lambda listener: []
    steps = [lesson.Range("step", 0, None, 0, start, start + 10_000_000) for start in (0, 5)]
    alone = patch.object(lesson.subprocess, "run", return_value=SimpleNamespace(stdout=b"0.002"))
    with alone, patch.object(lesson.timeit, "repeat", return_value=[1.0]):
        lesson.check_cost(None, steps)
    assert lesson.ledger[0]["measured"] == pytest.approx(0.08)


SHARE, LEAST = (
    "all-reduce's share of the steps: by torch, by NVTX",
    "the rank whose all-reduces take least",
)
COST = "% of a step that its ranges take, unheard"
# Faults that are planted together, and the claims that have to FAIL, one or more for each fault.
OPEN = '    nvtx.mark("loss", COLORS["step"], DOMAIN, payload=loss.item())\n'
TOLD = '    store.set(f"launched by {RANK}", "")\n'
WAIT = '    with nvtx.annotate("wait", COLORS["all_reduce"], DOMAIN):\n'
LANDED = "    nvtx.end_range(flight)\n"
LINES = {
    "ranges left open, and short; a rounded loss; a collective that nobody named": (
        [
            (OPEN, OPEN.replace("loss.item()", "round(loss.item(), 3)")
             + '    nvtx.push_range("open", domain=DOMAIN)\n'),
            ("            vector_to_parameters(", "            dist.all_reduce(bucket_N)\n"
             "            vector_to_parameters("),
        ],
        {ROWS, NAMED, PLAN, MARKS, POPS, RANGED},
    ),
    "bytes left out, as in Try; the last joins first; no callbacks for torch": (
        [
            ('phase("all_reduce", device, payload=bucket_N.nbytes)', 'phase("all_reduce", device)'),
            ('phase("step", device, payload=number)', 'phase("step", device)'),
            (
                "    if RANK == WORLD_SIZE - 1:\n"
                '        store.wait([f"launched by {rank}" for rank in range(WORLD_SIZE - 1)])\n',
                "    if RANK < WORLD_SIZE - 1:\n"
                '        store.wait([f"launched by {WORLD_SIZE - 1}"])\n',
            ),
            ("*of[9] = torch_push; *of[11] = torch_pop;", ""),
        ],
        {PLAN, NAMED, BYTES, LAUNCHES} | ({TORCH} if torch.version.cuda else set()),
    ),
    "every range has one color; the wait is outside, as in Try, and nobody waits in flight": (
        [
            (f"{TOLD}{WAIT}        work.wait()\n", f"{WAIT}        pass\n"),
            (LANDED, LANDED + f"{TOLD}    work.wait()\n"),
            ("nvtx.annotate(name, COLORS[name]", 'nvtx.annotate(name, COLORS["step"]'),
            ("                dist.all_reduce(bucket_N)\n",
             "                work = dist.all_reduce(bucket_N, async_op=True)\n"
             "            work.wait()\n"),
        ],
        {PLAN, TOGETHER, AFTER},
    ),
}  # fmt: skip
OF_THE_CLOCK = {
    "torch is asked for the launch, not for the transfer": (
        'e["name"] == "gloo:all_reduce"',
        'e["name"] == "c10d::allreduce_"',
        {SHARE},
    ),
    "another rank's loader is late": ("LATE if RANK == SLOW", "LATE if RANK == SLOW - 1", {LEAST}),
    "2,000 ranges are taken for one": ("float(done.stdout) / TIMES", "float(done.stdout)", {COST}),
}


BREAKS = [
    Breaks(LINES),
    # of three ranks one is late, another waits least, and rank 0 waits
    Breaks(OF_THE_CLOCK, ranks=3, clock=True),
]


@pytest.mark.deep
def test_nsys_that_fails_is_told() -> None:
    there = ('shutil.which("nsys") is None or nvtx is None:', "False:")
    fails = ('profiled = ["nsys", "profile"', 'profiled = ["false", "profile"')
    played = play(LESSON, 2, there, fails)
    played.expect(set())
    assert "returned non-zero exit status 1" in played.output
    assert played.ledger[-1]["needs"] == "nsys that works here"


@pytest.mark.deep
def test_who_is_listened_to_already_leaves_it_so() -> None:
    start = ("listener, why_not = listen()", 'os.environ["NVTX_INJECTION64_PATH"] = "/nsys.so"\n'
             "    listener, why_not = listen()")  # fmt: skip
    played = play(LESSON, 1, start)
    assert played.ledger[0]["needs"] == "no other listener, such as nsys"
