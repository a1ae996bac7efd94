"""The loader by hand, the order of copies, shares of time, and the claims against broken lines."""

import multiprocessing
import os
from fractions import Fraction
from types import SimpleNamespace

import pytest

from course.playing import load
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "data-loading/10_dataloader_knobs.py"
REAL_WORK = ("    check_real_work()\n", "")
ON_GPUS = OnGpus(
    changes=[
        REAL_WORK,
        ('device.type == "cuda" and cores >= 4', 'device.type == "cuda"'),
        ('"num_workers": cores - 1, "pin_memory": True', '"num_workers": 2'),  # asks C++ for CUDA
        ("return 1024  # 32 batches", "return 64"),
        ("        coming.record_stream(steps)", "        #"),  # whose C++ knows no pretended stream
        ("torch.zeros(2**28", "torch.zeros(2**16"),
        ("max(1, round(wanted / seconds_of(lambda: torch.mm(weight_DD, weight_DD))))", "1"),
    ]
)
NO_DEVICE = {"seconds_of_an_epoch": "real work runs on the host"}

SHARE = "share of slots that waits"
NONE = f"{SHARE}, no workers"
ONE = f"{SHARE}, 1 worker"
TWO = f"{SHARE}, 2 workers"
THREE = f"{SHARE}, 3 workers"
LONGER = f"{SHARE}, 2 workers, factor 8"
UNLIKE = "by hand: steps in another slot than DataLoader's"
ASKED = "asked for before the first"
PLACE = "batches in their place"
BY_0 = "of them by worker 0"
SLOW = {f"slots waited for a slow batch, factor {factor}" for factor in (2, 3, 4)}
STARTED = "workers in two epochs"
WAITS = "slots waited as epoch 2 begins"
LINES = {
    "all lists go to worker 0, as in Try": (
        "pipe = next(self.turns)",
        "pipe = self.workers[0][1]",
        {UNLIKE, f"by hand: {BY_0}"},
    ),
    "each worker by hand is asked for one batch, as in Try": (
        "for _ in range(workers * factor):",
        "for _ in range(workers):",
        {f"by hand: {ASKED}"},
    ),
    "the last batch that was asked for comes first": (
        "self.pending.popleft()",
        "self.pending.pop()",
        {f"by hand: {PLACE}", f"by hand: {BY_0}"},
    ),
    "one worker at most": (
        "by_dataloader(trainer, workers, slots, prefetch",
        "by_dataloader(trainer, min(workers, 1), slots, prefetch",
        {TWO, THREE, LONGER, UNLIKE, *SLOW},
    ),
    "a worker too many": (
        "[trained(workers, {}) for",
        "[trained(workers + 1, {}) for",
        {NONE, ONE, TWO, UNLIKE},
    ),
    "a worker begins before it is asked": (
        "self.now = max(self.now, asked) + self",
        "self.now = self.now + self",
        {
            NONE,
            "slots waited for a slow batch, factor 2",
            "slots waited for a slow batch, factor 3",
            f"{WAITS}, persistent",
            f"{WAITS}, not persistent",
        },
    ),
    "the slow batch takes longer": ("{60: 30}", "{60: 36}", SLOW),
    "batches are asked for as if nothing were said": (
        "trainer, 2, {}, prefetch_factor=3))",
        "trainer, 2, {}))",
        {f"DataLoader: {ASKED}"},
    ),
    "the first two batches change places": (
        "for number in range(BATCHES):",
        "for number in [1, 0, *range(2, BATCHES)]:",
        {f"DataLoader: {PLACE}", f"by hand: {PLACE}"},
    ),
    "worker 0 loads all": (
        "iter(by_dataloader(trainer, 2, {}, prefetch_factor=3))",
        "iter(by_dataloader(trainer, 1, {}, prefetch_factor=6))",
        {f"DataLoader: {BY_0}"},
    ),
    "workers always persist": (
        "persistent_workers=persistent)",
        "persistent_workers=True)",
        {f"{STARTED}, not persistent"},
    ),
    "workers never persist": (
        "persistent_workers=persistent)",
        "persistent_workers=False)",
        {f"{STARTED}, persistent"},
    ),
}
REAL = {
    "a worker that is none": (
        "seconds_of_an_epoch(1) /",
        "seconds_of_an_epoch(0) /",
        {"time of real work, 1 worker / none"},
    ),
}
BREAKS = [Breaks(LINES, changes=[REAL_WORK]), Breaks(REAL, clock=True)]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_by_hand_all_batches_come_in_order_and_no_worker_stays(workers: int) -> None:
    lesson = load(LESSON)
    before = {process.pid for process in multiprocessing.active_children()}
    lists = [[1, 0], [4], [2, 3], [5]]
    came = list(lesson.EpochByHand(range(10, 20), lists, workers, 2))
    assert came == [[11, 10], [14], [12, 13], [15]]
    assert {process.pid for process in multiprocessing.active_children()} == before


def test_by_hand_batch_i_is_made_by_worker_i_mod_n() -> None:
    class Processes:
        def __getitem__(self, index: int) -> int:
            return os.getpid()

    pids = [made for (made,) in load(LESSON).EpochByHand(Processes(), [[0]] * 5, 2, 3)]
    assert pids[0::2] == [pids[0]] * 3
    assert pids[1::2] == [pids[1]] * 2
    assert len({*pids, os.getpid()}) == 3


def test_shares_by_the_formula() -> None:
    shares = [load(LESSON).share_by_formula(workers) for workers in range(5)]
    assert shares == [Fraction(3, 4), Fraction(2, 3), Fraction(1, 3), 0, 0]


def test_slots_of_an_epoch_by_hand() -> None:
    """Ready in slots 6, 6, 12, 20: steps begin in 6, 8, 12, 20; between, it waits 2 and 6."""
    lesson = load(LESSON)
    trainer = lesson.Trainer()
    trainer.train([[lesson.Loaded(i, ready, 0)] for i, ready in enumerate([6, 6, 12, 20])])
    assert trainer.starts == [6, 8, 12, 20]
    assert trainer.waited() == 8
    assert trainer.share() == Fraction(8, 14)
    assert trainer.now == 22


class Events:
    """CUDA events whose clock shows these times, one after the other."""

    def __init__(self, times: list[float]) -> None:
        self.times = iter(times)

    def __call__(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", next(self.times))
        event.elapsed_time = lambda end: end.at - event.at
        return event


def test_waiting_is_all_that_is_not_a_step() -> None:
    lesson = load(LESSON)
    cuda = SimpleNamespace(Event=Events([2.0, 3.0, 5.0, 6.0]), synchronize=lambda: None)
    lesson.torch = SimpleNamespace(cuda=cuda)
    steps = []
    assert lesson.share_that_waits("ab", lambda: steps.append(1)) == 0.5
    assert steps == [1, 1]


def test_the_next_copy_is_queued_before_a_step_which_waits_only_for_its_own() -> None:
    lesson = load(LESSON)
    log = []

    class Stream:
        def __enter__(self) -> None:
            log.append("on copies:")

        def __exit__(self, *error: object) -> None:
            pass

        def wait_stream(self, other: object) -> None:
            log.append("steps wait for copies")

    class Batch:
        def __init__(self, number: int) -> None:
            self.number = number

        def to(self, device: str, non_blocking: bool) -> "Batch":
            assert non_blocking
            log.append(f"copy {self.number}")
            return self

        def record_stream(self, stream: Stream) -> None:
            assert stream is steps
            log.append(f"keep {self.number}")

    steps = Stream()
    cuda = SimpleNamespace(current_stream=lambda: steps, Stream=Stream, stream=lambda one: one)
    lesson.torch = SimpleNamespace(cuda=cuda)
    for batch in lesson.copied_ahead(map(Batch, range(2)), "cuda"):
        log.append(f"step {batch.number}")
    assert log == [
        *("on copies:", "copy 0", "steps wait for copies", "keep 0"),
        *("on copies:", "copy 1", "step 0", "steps wait for copies", "keep 1", "step 1"),
    ]
    assert list(lesson.copied_ahead([], "cuda")) == []
