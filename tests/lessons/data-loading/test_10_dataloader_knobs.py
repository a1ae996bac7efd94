"""The loader by hand, shares of time, and the claims against broken lines."""

import multiprocessing
import os
from types import SimpleNamespace

import pytest

from course.playing import load
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "data-loading/10_dataloader_knobs.py"
ON_GPUS = OnGpus(
    changes=[
        ("cores < 4:", "cores < 0:"),
        ('"num_workers": cores - 1', '"num_workers": WORKERS'),
        ('"pin_memory": True', '"pin_memory": False'),  # its thread asks C++ for CUDA
        ("return 1024  # 32 batches", "return 64"),
        ("max(1, min(1000, round(loading / 2 / computing)))", "2"),
    ]
)
NO_DEVICE = {"share_that_waits": "steps sleep"}

FORKED = "different draws, generator made before the fork"
ALIKE = "different draws of torch, ranks seeded alike"
CURED = {
    f"different draws of {kind}, cured"
    for kind in ("its own generator", "torch", "random", "numpy")
}
BY_HAND = "by hand: different draws of"
STARTED = "workers of a rank in two epochs"
LINES = {
    "workers keep the generator of before the fork": (
        "    dataset.generator = np.random.default_rng(torch.initial_seed())\n",
        "",
        {"different draws of its own generator, cured"},
    ),
    "all workers have the same generator, as in Try": (
        "default_rng(torch.initial_seed())",
        "default_rng(SEED)",
        {"different draws of its own generator, cured"},
    ),
    "all ranks draw alike, as in Try": (
        "batch_size=BATCH, generator=seeds, **knobs)",
        "batch_size=BATCH, **knobs)",
        CURED,
    ),
    "ranks are seeded apart": (
        "    torch.manual_seed(SEED)  # alike",
        "    torch.manual_seed(SEED + RANK)  # alike",
        {ALIKE, f"{BY_HAND} torch"},
    ),
    "ranks are seeded apart for NumPy": (
        "    np.random.seed(SEED)\n",
        "    np.random.seed(SEED + RANK)\n",
        {f"{BY_HAND} numpy"},
    ),
    "each draw is seeded by the clock": (
        "int(self.generator.integers(2**62))",
        "int(np.random.default_rng().integers(2**62))",
        {FORKED, f"{BY_HAND} its own generator"},
    ),
    "global states are seeded by none": (
        '            "random": random.getrandbits(62),\n'
        '            "numpy": int(np.random.randint(2**62)),\n',
        '            "random": random.Random(index).getrandbits(62),\n'
        '            "numpy": int(np.random.RandomState(index).randint(2**62)),\n',
        {"different draws of random, cured", "different draws of numpy, cured", f"{BY_HAND} numpy"},
    ),
    "workers persist from the beginning": (
        "naive_loader = loader_of(Draws(), batch_size=BATCH)",
        "naive_loader = loader_of(Draws(), batch_size=BATCH, persistent_workers=True)",
        {FORKED, STARTED},
    ),
    "workers are started for each epoch": (
        '"persistent_workers": True}\n    cured',
        '"persistent_workers": False}\n    cured',
        {f"{STARTED}, persistent"},
    ),
    "batches are asked for as if nothing were said": (
        "batch_sampler=lists, prefetch_factor=FACTOR",
        "batch_sampler=lists",
        {"batches asked for before the first, factor 3"},
    ),
    "each worker by hand is asked for one batch": (
        "for _ in range(workers * factor):",
        "for _ in range(workers):",
        {"by hand: asked for before the first, factor 3"},
    ),
    "batches come as they are ready": (
        "prefetch_factor=FACTOR))",
        "prefetch_factor=FACTOR, in_order=False))",
        {"DataLoader: samples in their place"},
    ),
    "the last batch that was asked for comes first": (
        "self.pending.popleft()",
        "self.pending.pop()",
        {"by hand: samples in their place"},
    ),
}
WAITS = "share of time that waits, num_workers="
SLOW = {
    "loading takes no time": (
        "        time.sleep(LOAD)\n",
        "",
        {f"{WAITS}0", f"{WAITS}1"},
    ),
    "one worker at most": (
        "loader_of(Slow(), workers)",
        "loader_of(Slow(), min(workers, 1))",
        {f"{WAITS}2"},
    ),
}
SLEEPS = ("    check_waiting()\n", "")
BREAKS = [
    Breaks(LINES, changes=[SLEEPS], alone=["each draw is seeded by the clock"]),
    Breaks(SLOW, alone=[*SLOW], clock=True),
]


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


def test_waiting_is_all_that_is_not_a_step() -> None:
    lesson = load(LESSON)
    readings = iter([2.0, 3.0, 5.0, 6.0])  # a step from 2 to 3, and one from 5 to 6
    lesson.time = SimpleNamespace(perf_counter=lambda: next(readings))
    seen = []
    assert lesson.share_that_waits("ab", seen.append) == 0.5
    assert seen == ["a", "b"]
