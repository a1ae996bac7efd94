"""Crops against crops cut out by hand, what numba freezes, claims against broken lines."""

from importlib.util import find_spec

import numpy as np
import pytest

from course.playing import Lazily, play
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


def test_the_loop_compiled_or_not_and_the_oracle_cut_out_what_one_cuts_out_by_hand() -> None:
    import numba

    images = np.stack([lesson.PICTURE] * 8)
    samples = np.arange(8, 16).astype(np.uint64)  # FFCV's type
    for cut_out in (lesson.cut_out, numba.njit(lesson.cut_out)):
        for epoch in (0, 2):
            crops = np.empty((8, 32, 32, 3), np.uint8)
            cut_out(images, crops, samples, epoch)
            for crop, sample in zip(crops, samples.tolist(), strict=True):
                assert crop.tobytes() == lesson.crop_by_numpy(epoch, sample)
                y, x = place_of(crop)
                by_hand = [
                    [lesson.PICTURE[y + row, x + column] for column in range(32)]
                    for row in range(32)
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
LARGE = "epoch seen in an array of 2 MiB"
ARGUMENT = "epoch seen in an argument"
FROZEN_1 = "FrozenCrop, set to 1: crops are of epoch"
FROZEN_2 = "FrozenCrop, set to 2: crops are of epoch"
ASKING_1 = "AskingCrop, set to 1: crops are of epoch"
ASKING_2 = "AskingCrop, set to 2: crops are of epoch"
SHARES = "AskingCrop: samples that the ranks' shares hold"

CALLED = "        seen = [by_global(), by_small_array(), by_large_array(), by_argument(EPOCH)]\n"
OF_NUMBA = {
    "it is called before the epoch is 1": (
        "    for epoch in (1, 2):\n        set_epoch(epoch)\n",
        "    for epoch in (0, 1, 2):\n        set_epoch(epoch)\n",
        {GLOBAL, SMALL},
    ),
    "the global is not compiled": (
        "numba.njit(read_global)",
        "read_global",
        {GLOBAL},
    ),
    "the small array has 2 MiB": (
        "SMALL = np.zeros(8, np.int64)",
        "SMALL = np.zeros(2**18, np.int64)",
        {SMALL},
    ),
    "the large array has 64 bytes": (
        "LARGE = np.zeros(2**18, np.int64)",
        "LARGE = np.zeros(8, np.int64)",
        {LARGE},
    ),
    "the argument is a constant": ("by_argument(EPOCH)]", "by_argument(1)]", {ARGUMENT}),
}

READ = "        compiled_cut_out = Compiler.compile(cut_out)\n\n        def ask_and_crop("
HANDED = "compiled_cut_out(images_BHWC, crops_BSSC, samples_B, self.epoch)"
LINES = {
    "AskingCrop reads the epoch too early, as in Try": (
        [
            (READ, "        epoch = self.epoch\n" + READ),
            (HANDED, HANDED.replace("self.epoch", "epoch")),
        ],
        {ASKING_1, ASKING_2},
    ),
    "the loader compiles for each epoch, as in Try": (
        '"drop_last": False}',
        '"drop_last": False, "recompile": True}',
        {FROZEN_1, FROZEN_2},
    ),
    "the trainer forgets the epoch": ("    operation.epoch = epoch\n", "", {ASKING_1, ASKING_2}),
    "the compiled operation is an epoch ahead": (
        "        epoch = self.epoch\n\n        def crop(",
        "        epoch = self.epoch + 1\n\n        def crop(",
        {FROZEN_1, FROZEN_2},
    ),
    "the loop takes the place in the batch for the sample": (
        "np.int64(samples_B[i])",
        "i",
        {FROZEN_1, FROZEN_2, ASKING_1, ASKING_2},
    ),
    "half of the samples are left out": (
        '"seed": SEED, "drop_last"',
        '"seed": SEED, "indices": np.arange(N // 2), "drop_last"',
        {SHARES},
    ),
}
ALONE = ["the loader compiles for each epoch, as in Try"]
BREAKS = [
    Breaks(LINES, changes=[NO_JIT, NO_NUMBA_ROWS], alone=ALONE, deadline=120),
    Breaks(OF_NUMBA, changes=[GONE]),
]
