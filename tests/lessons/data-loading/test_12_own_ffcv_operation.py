"""Crops against crops cut out by hand, what numba freezes, claims against broken lines."""

from importlib.util import find_spec

import numpy as np
import pytest

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

# FFCV's pipelines in plain Python: the same values, without seconds of compiling on every rank.
NO_JIT = ('os.environ["NUMBA_OPT"] = "0"', 'os.environ["NUMBA_DISABLE_JIT"] = "1"')
NO_NUMBA_ROWS = ("    check_numba()\n", "")  # they are about what is compiled
LESSON = "data-loading/12_own_ffcv_operation.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

SIZES = {1: [NO_JIT, NO_NUMBA_ROWS], 3: [NO_JIT, NO_NUMBA_ROWS]}  # the plain run compiles
ON_GPUS = OnGpus(changes=[NO_JIT, NO_NUMBA_ROWS])
IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
GONE = (IMPORT, IMPORT + "        raise ImportError\n")
NUMBA = "        import numba\n"
WITHOUT = {"FFCV": Without([GONE], {"what FFCV's operations see"})}


@pytest.mark.deep
def test_without_numba_all_is_blocked_and_that_is_no_success() -> None:
    played = play(LESSON, 2, (NUMBA, "        raise ImportError\n" + NUMBA), GONE)
    assert played.code == 1
    assert [row["verdict"] for row in played.ledger] == ["BLOCKED"] * 2, played.output


def loops(workers: int, changes: list) -> list[tuple[int, np.ndarray]]:
    """By the lesson's loop, as FFCV compiles it for so many workers: crops of samples 8 to 15."""
    own = load(LESSON, *changes)
    own.Compiler.set_num_threads(workers)
    cut_out = own.compiled_cut_out()
    found = []
    for epoch in (0, 2):
        images = np.stack([own.PICTURE] * 8)
        crops = np.empty((8, 32, 32, 3), np.uint8)
        cut_out(images, crops, np.arange(8, 16).astype(np.uint64), epoch)  # FFCV's type
        found.append((epoch, crops))
    return found


@pytest.mark.deep
@pytest.mark.parametrize(("workers", "changes"), [(1, []), (2, []), (1, [NO_JIT])])
def test_the_loop_and_the_oracle_cut_out_what_one_cuts_out_by_hand(
    workers: int, changes: list
) -> None:
    """Compiled for one thread and for two, and not compiled."""
    (found,) = run(loops, 1, workers, changes, deadline=120)
    for epoch, crops in found:
        for sample, crop in enumerate(crops, 8):
            assert crop.tobytes() == lesson.crop_by_numpy(epoch, sample)
            y, x = place_of(crop)
            by_hand = [
                [lesson.PICTURE[y + row, x + column] for column in range(32)] for row in range(32)
            ]
            assert (crop == by_hand).all()


def place_of(crop: np.ndarray) -> tuple[int, int]:
    """Where in the picture the crop's first pixels stand."""
    found = [
        (y, x)
        for y in range(129)
        for x in range(209)
        if (lesson.PICTURE[y, x : x + 4] == crop[0, :4]).all()
    ]
    assert len(found) == 1
    return found[0]


def test_crops_depend_on_epoch_and_sample() -> None:
    crops = {lesson.crop_by_numpy(epoch, sample) for epoch in range(3) for sample in range(64)}
    assert len(crops) > 185  # of 192


def test_the_epoch_is_that_of_all_crops() -> None:
    for epoch in range(3):
        crops = {sample: lesson.crop_by_numpy(epoch, sample) for sample in range(64)}
        assert lesson.epoch_of(crops) == epoch
    crops[63] = lesson.crop_by_numpy(1, 63)
    assert np.isnan(lesson.epoch_of(crops))


def test_numba_copies_an_array_of_a_million_bytes_and_no_larger_one() -> None:
    import numba

    seen = {}
    for size in (10**6 // 8, 10**6 // 8 + 1):
        array = np.zeros(size, np.int64)

        read = numba.njit(closure_of(array))
        assert read() == 0
        array[0] = 1
        seen[size] = read()
    assert seen == {125_000: 0, 125_001: 1}


def closure_of(array: np.ndarray):
    def read() -> int:
        return array[0]

    return read


GLOBAL = "epoch seen in a global"
SMALL = "epoch seen in an array of 64 bytes"
ARGUMENT = "epoch seen in an argument"
FROZEN_1 = "FrozenCrop, set to 1: crops are of epoch"
FROZEN_2 = "FrozenCrop, set to 2: crops are of epoch"
ASKING_1 = "AskingCrop, set to 1: crops are of epoch"
ASKING_2 = "AskingCrop, set to 2: crops are of epoch"
RECOMPILED = "recompiled, set to 2: crops are of epoch"

OF_NUMBA = {
    "it is called before the epoch is 1, as in Try": (
        "    for epoch in (1, 2):\n        set_epoch(epoch)\n",
        "    for epoch in (0, 1, 2):\n        set_epoch(epoch)\n",
        {GLOBAL, SMALL},
    ),
    "the global is not compiled": (
        "numba.njit(read_global)",
        "read_global",
        {GLOBAL},
    ),
    "the array has 2 MiB": (
        "ARRAY = np.zeros(8, np.int64)",
        "ARRAY = np.zeros(2**18, np.int64)",
        {SMALL},
    ),
    "the argument is a constant": ("by_argument(EPOCH)]", "by_argument(1)]", {ARGUMENT}),
}

READ = "        cut_out = compiled_cut_out()\n\n        def ask_and_crop("
HANDED = "cut_out(images_BHWC, crops_BSSC, samples_B, self.epoch)"
LINES = {
    "AskingCrop reads the epoch too early, as in Try": (
        [
            (READ, "        epoch = self.epoch\n" + READ),
            (HANDED, HANDED.replace("self.epoch", "epoch")),
        ],
        {ASKING_1, ASKING_2},
    ),
    "every loader compiles for each epoch": (
        "recompile: bool = False) -> list[float]",
        "recompile: bool = True) -> list[float]",
        {FROZEN_1, FROZEN_2},
    ),
    "no loader compiles for each epoch": ('"recompile": recompile}', "}", {RECOMPILED}),
    "the trainer forgets the epoch": (
        "    operation.epoch = epoch\n",
        "",
        {RECOMPILED, ASKING_1, ASKING_2},
    ),
    "the compiled operation is an epoch ahead": (
        "        epoch = self.epoch\n\n        def crop(",
        "        epoch = self.epoch + 1\n\n        def crop(",
        {FROZEN_1, FROZEN_2, RECOMPILED},
    ),
    "the loop takes the place in the batch for the sample": (
        "np.int64(samples_B[i])",
        "i",
        {FROZEN_1, FROZEN_2, RECOMPILED, ASKING_1, ASKING_2},
    ),
}
ALONE = ["every loader compiles for each epoch"]
BREAKS = [
    Breaks(LINES, changes=[NO_JIT, NO_NUMBA_ROWS], alone=ALONE, deadline=120),
    Breaks(OF_NUMBA, changes=[GONE]),
]


LATE = (255, 256, 300, 65_535, 65_536, 1_000_000)


def crops_of_late_samples() -> list[bytes]:
    """By the loop, not compiled: of a file with more samples than the lesson's 64."""
    own = load(LESSON, NO_JIT)
    own.Compiler.set_num_threads(1)
    images = np.stack([own.PICTURE] * len(LATE))
    crops = np.empty((len(LATE), 32, 32, 3), np.uint8)
    own.compiled_cut_out()(images, crops, np.array(LATE, np.uint64), 1)
    return [crop.tobytes() for crop in crops]


def test_a_sample_s_number_may_have_more_than_8_or_16_bits() -> None:
    (found,) = run(crops_of_late_samples, 1, deadline=120)
    assert found == [lesson.crop_by_numpy(1, sample) for sample in LATE]
    assert lesson.crop_by_numpy(1, 300) != lesson.crop_by_numpy(1, 300 % 256)
