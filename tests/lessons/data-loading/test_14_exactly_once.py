"""The loader by hand on several ranks, counts that samplers keep, and what Ctrl-C leaves."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from course.lessons import ROOT
from course.playing import Lazily, load
from tests.helpers.leftovers import MARK, MARKED, gone
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/14_exactly_once.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
NO_FFCV = (IMPORT, f"{IMPORT}        raise ImportError\n")
WITHOUT = {"FFCV": Without([NO_FFCV], {"FFCV: samples of an epoch, and after a stop"})}
ON_GPUS = OnGpus(changes=[NO_FFCV])  # FFCV copies on streams of CUDA's, in its thread


# The loader by hand: there is no group here, so a step takes 8 positions of all ranks


def line_of(own: object, ranks: int, consumed: int, steps: int) -> tuple:
    """What all ranks are given, step by step, in the order of the line: samples, draws."""
    samples = np.zeros((steps, own.STEP), int)
    draws = np.zeros((steps, own.STEP))
    for rank in range(ranks):
        loader = own.OneLine(rank, ranks, consumed)
        for step, (some, theirs) in enumerate(itertools.islice(loader, steps)):
            samples[step, rank::ranks] = some
            draws[step, rank::ranks] = theirs
        assert loader.consumed == consumed + steps * own.STEP
    return samples.flatten().tolist(), draws.flatten().tolist()


FEW = ("\nN = 250 * WORLD_SIZE - 3 ", "\nN = 11 ")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_epoch_has_every_sample_once(ranks: int) -> None:
    own = load(LESSON, FEW)
    line, draws = line_of(own, ranks, 0, 5)
    epochs = [line[first : first + 11] for first in (0, 11, 22)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(11)]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each epoch has an order of its own"
    assert len({*draws}) == 40, "and each sample a draw of its own in each epoch"


def test_another_number_of_ranks_goes_on_with_the_same_samples_and_draws() -> None:
    own = load(LESSON, FEW)
    samples, draws = line_of(own, 1, 0, 6)
    before = line_of(own, 2, 0, 2)
    after = line_of(own, 4, 16, 4)
    assert before[0] + after[0] == samples
    assert before[1] + after[1] == draws


def test_consumed_is_what_was_given_and_not_what_was_asked_for() -> None:
    loader = lesson.OneLine(0, 1)
    asked = []
    loader.load = asked.append
    batches = iter(loader)
    for steps in (1, 2, 3):
        next(batches)
        assert loader.consumed == steps * 8
    batches.close()
    assert asked == [0, 8, 16, 24, 32], "two steps more"


def test_threads_of_a_loader_that_is_dropped_end() -> None:
    before = psutil.Process().num_threads()
    loader = iter(lesson.OneLine(0, 1))
    next(loader)
    assert psutil.Process().num_threads() > before
    loader.close()
    stop = time.monotonic() + 30
    while time.monotonic() < stop and psutil.Process().num_threads() > before:
        time.sleep(0.05)
    assert psutil.Process().num_threads() == before


def test_an_error_in_the_thread_reaches_the_trainer() -> None:
    own = load(LESSON)
    own.order = Mock(side_effect=MemoryError)
    with pytest.raises(MemoryError):
        next(iter(own.OneLine(0, 1)))


# How it is measured


def test_what_was_delivered_is_kept_although_a_loader_fills_its_batch_again() -> None:
    batch = torch.zeros(2, 1, dtype=torch.int64)
    closed = []

    class Again:
        """As FFCV does it: a tuple of fields, in the same memory."""

        def __init__(self) -> None:
            self.numbers = iter(range(5))

        def __iter__(self) -> object:
            return self

        def __next__(self) -> tuple:
            batch[:] = next(self.numbers)
            return (batch,)

        def close(self) -> None:
            closed.append(True)

    assert lesson.delivered(Again(), 2).tolist() == [0, 0, 1, 1]
    assert closed == [True], "its thread ends"
    assert lesson.delivered([np.array([3, 1]), np.array([2])]).tolist() == [3, 1, 2]


def test_a_list_that_ends_early_is_unlike() -> None:
    assert lesson.places_unlike(np.array([1, 2, 3]), np.array([1, 2, 3])) == 0
    assert lesson.places_unlike(np.array([1, 2]), np.array([1, 3, 3, 4])) == 3


# Nothing is left


def started_by_us() -> dict[int, str]:
    """The names of all processes that bear our mark, by their number."""
    found = {}
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended
            if MARK in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
    return found


TENSORS = ["01_ffcv_distributed_optimization", "04_jit_augmentation"]  # what workers send
NUMBERS = ["10_dataloader_knobs", "14_exactly_once", "15_seeds_of_workers"]


@pytest.mark.deep
@pytest.mark.parametrize("name", TENSORS + NUMBERS)
def test_ctrl_c_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Of each lesson whose DataLoader has workers, and that no test of its own stops."""
    was = set(os.listdir("/dev/shm"))
    started = subprocess.Popen(
        [sys.executable, ROOT / f"data-loading/{name}.py"],
        env=MARKED | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        process_group=0,
    )
    ours = started_by_us()
    while "pt_data_worker" not in ours.values():
        assert started.poll() is None, "it ended before"
        time.sleep(0.05)
        ours = started_by_us()
    started.send_signal(signal.SIGINT)
    assert started.wait(150) != 0
    assert gone()
    kept = [path.name for path in tmp_path.iterdir()]
    kept = [folder for folder in kept if not folder.startswith("torchinductor_")]  # a cache
    if name in TENSORS:  # a worker that is killed leaves the folder of its socket, an empty file
        kept = [folder for folder in kept if not folder.startswith("pymp-")]
    assert kept == []
    for segment in set(os.listdir("/dev/shm")) - was:
        assert not {int(part) for part in re.findall(r"\d+", segment)} & ours.keys(), segment


# Broken lines

NEVER = "DataLoader: samples that never come"
TWICE = "DataLoader: samples that come twice"
LAST = "DataLoader: how often a rank's last one comes"
AGAIN = "DataLoader, nothing saved: come again"
SAMPLERS = "DataLoader, sampler's count: never come"
TRAINERS = "DataLoader, trainer's count: places unlike"
FFCV_EACH = "FFCV: samples that a rank is given"
FFCV_NEVER = "FFCV: samples that never come"
FFCV_ALL = "FFCV, drop_last=False: never come"
FFCV_TWICE = "FFCV, drop_last=False: come twice"
FFCV_LAST = "FFCV, drop_last=False: a rank's last one comes"
FFCV_AGAIN = "FFCV, nothing saved: come again"
FFCV_TRAINERS = "FFCV, trainer's count: places unlike"
ONCE = "by hand: samples that do not come once"
SAMPLES = "by hand, half the ranks go on: samples unlike"
DRAWS = "by hand, half the ranks go on: draws unlike"

BEGUN = "    begun_again = delivered(data_loader(Share()), STOP)\n"
FFCV_BEGUN = "    begun_again = delivered(ffcv_loader(path), STOP)\n"
LINES = {
    "asked for is taken as given, as in Try": (
        "                    self.consumed += STEP\n",
        "                    self.consumed = asked\n",
        {SAMPLES, DRAWS},
    ),
    "DataLoader drops what fills no batch, as in Try": (
        "DataLoader(range(N), BATCH, sampler",
        "DataLoader(range(N), BATCH, drop_last=True, sampler",
        {NEVER, TWICE, LAST, SAMPLERS},
    ),
    "padding on the first ranks": (
        "2 if WORLD_SIZE - padded <= RANK else 1",
        "2 if padded > RANK else 1",
        {LAST, FFCV_LAST},
    ),
    "a worker is asked for one batch": (
        '"prefetch_factor": PREFETCH',
        '"prefetch_factor": 1',
        {SAMPLERS},
    ),
    "a DataLoader goes on where it stopped": (
        BEGUN,
        BEGUN.replace("Share()", "Share(len(before))"),
        {AGAIN},
    ),
    "the trainer counts what the sampler counts": (
        "Share(len(before))",
        "Share(sampler.handed_out)",
        {TRAINERS},
    ),
    "FFCV drops nothing": (
        '"distributed": True, "seed"',
        '"distributed": True, "drop_last": False, "seed"',
        {FFCV_EACH, FFCV_NEVER},
    ),
    "FFCV drops whatever it is told": (
        "ffcv_loader(path, drop_last=False)",
        "ffcv_loader(path)",
        {FFCV_ALL, FFCV_TWICE, FFCV_LAST},
    ),
    "FFCV's padding is looked for at the beginning": (
        "times[whole[-1]]",
        "times[whole[0]]",
        {FFCV_LAST},
    ),
    "padding that is dropped is counted as lost": (
        "WORLD_SIZE * dropped - padded if dropped else 0",
        "WORLD_SIZE * dropped",
        {FFCV_NEVER},
    ),
    "FFCV goes on where it stopped": (
        FFCV_BEGUN,
        FFCV_BEGUN.replace("ffcv_loader(path)", "rest_by_ffcv(path, len(before))"),
        {FFCV_AGAIN},
    ),
    "FFCV's rest begins at the beginning": ("share[trained:]", "share", {FFCV_TRAINERS}),
    "the last sample of each epoch is left out": (
        "order(epoch)[place]",
        "order(epoch)[place % (N - 1)]",
        {ONCE},
    ),
    "every rank takes the first rank's share": (
        "range(first + self.rank, first",
        "range(first, first",
        {ONCE, SAMPLES, DRAWS},
    ),
    "numbers are drawn anew after a stop": (
        "np.random.default_rng([SEED, position])",
        "np.random.default_rng()",
        {DRAWS},
    ),
}
ALONE = (
    "the trainer counts what the sampler counts",
    "FFCV drops nothing",
    "FFCV's rest begins at the beginning",
)
BREAKS = Breaks(LINES, alone=ALONE, deadline=120)
