"""Crops against crops cut out by hand, claims against broken lines."""

from importlib.util import find_spec

import numpy as np
import pytest

from course.playing import Lazily, play
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

# FFCV's pipelines in plain Python: the same values, without seconds of compiling on every rank.
NO_JIT = ('os.environ["NUMBA_OPT"] = "0"', 'os.environ["NUMBA_DISABLE_JIT"] = "1"')
LESSON = "data-loading/12_own_ffcv_operation.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

SIZES = {1: [NO_JIT], 3: [NO_JIT]}  # the plain run, on four ranks, compiles
ON_GPUS = OnGpus(changes=[NO_JIT])
IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
GONE = (IMPORT, IMPORT + "        raise ImportError\n")


@pytest.mark.deep
def test_without_ffcv_all_is_blocked_and_that_is_no_success() -> None:
    played = play(LESSON, 2, GONE)
    assert played.code == 1
    assert [row["verdict"] for row in played.ledger] == ["BLOCKED"], played.output


def test_the_loop_compiled_or_not_and_the_oracle_cut_out_what_one_cuts_out_by_hand() -> None:
    import numba

    image = lesson.picture()
    images = np.stack([image] * 8)
    corners = lesson.draw_corners(1, np.arange(8))
    for cut_out in (lesson.cut_out, numba.njit(lesson.cut_out)):
        crops = np.empty((8, 32, 32, 3), np.uint8)
        cut_out(images, corners, crops)
        for sample, (y, x) in enumerate(corners.tolist()):
            by_hand = [[image[y + row, x + column] for column in range(32)] for row in range(32)]
            assert (crops[sample] == by_hand).all()
            assert (lesson.crop_by_numpy(1, sample) == by_hand).all()


def test_corners_lie_within_the_picture_and_depend_on_epoch_and_sample() -> None:
    samples = np.arange(1000)
    corners = lesson.draw_corners(0, samples)
    assert (corners >= 0).all()
    assert (corners.max(0) <= (160 - 32, 240 - 32)).all()
    assert (corners.max(0) > (120, 200)).all()
    assert (corners == lesson.draw_corners(1, samples)).all(1).sum() < 5
    assert len({*map(tuple, corners.tolist())}) > 950


FROZEN_BYTES = "frozen: bytes unlike NumPy's, epoch 0"
FROZEN = "frozen: samples that keep their crop"
ASKING = "asking: samples that keep their crop"
DIFFERENT = "asking: different crops in epoch 1"
BYTES = "asking: bytes unlike NumPy's, both epochs"
AGAIN = "asking: samples with the same crop, epoch 0 again"

DRAWN = "draw_corners(self.epoch, indices_B)"
ALL = "draw_corners(self.epoch, np.arange(N))"
LINES = {
    "drawn by the place in the batch, as in Try": (
        DRAWN,
        DRAWN.replace("indices_B", "np.arange(len(indices_B))"),
        {DIFFERENT, BYTES},
    ),
    "the loader compiles for each epoch, as in Try": (
        '"drop_last": False}',
        '"drop_last": False, "recompile": True}',
        {FROZEN},
    ),
    "the trainer forgets the epoch": (
        "    operation.epoch = epoch\n",
        "",
        {ASKING, BYTES},
    ),
    "the compiled operation is a sample off": (
        ALL,
        ALL.replace("np.arange(N)", "np.arange(N) + 1"),
        {FROZEN_BYTES},
    ),
    "each epoch draws anew": (
        DRAWN,
        "draw_corners(self.epoch + id(indices_B), indices_B)",
        {BYTES, AGAIN},
    ),
}
ALONE = ["the loader compiles for each epoch, as in Try"]
BREAKS = Breaks(LINES, changes=[NO_JIT], alone=ALONE, deadline=120)
