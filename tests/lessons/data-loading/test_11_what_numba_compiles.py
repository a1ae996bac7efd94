"""What is compiled against what NumPy computes, the cache's folder, claims against broken lines."""

from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from course.playing import Lazily, load, play
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "data-loading/11_what_numba_compiles.py"
pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
lesson = Lazily(LESSON)

NO_DEVICE = {"seconds_of": "what it times runs on the host"}


def test_it_brightens() -> None:
    images = np.array([0, 1, 2, 3, 169, 170, 171, 255], np.uint8).reshape(1, 2, 4, 1)
    found = lesson.brightened(lesson.declared(), images)
    assert found.ravel().tolist() == [0, 1, 3, 4, 253, 255, 255, 255]


def test_a_named_signature_takes_all_kinds_and_no_others() -> None:
    function = lesson.declared_once()
    images = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    for kind in lesson.four_kinds(images):
        expected = np.minimum(kind.astype(int) * 96 // 64, 255)
        assert (lesson.brightened(function, kind) == expected).all()
    assert len(function.signatures) == 1
    with pytest.raises(TypeError, match="No matching definition"):
        lesson.brightened(function, images.astype(np.float32))


def test_the_four_kinds_differ_as_is_said() -> None:
    images = np.zeros((64, 160, 240, 3), np.uint8)
    same, larger, mirrored, read_only = lesson.four_kinds(images)
    assert same is images
    assert larger.shape == (2, 200, 300, 3)
    assert larger.flags.c_contiguous
    assert larger.flags.writeable
    assert mirrored.base is images
    assert not mirrored.flags.c_contiguous
    assert mirrored.flags.writeable
    assert read_only.flags.c_contiguous
    assert not read_only.flags.writeable


def test_compilations_and_loads_are_summed_over_signatures() -> None:
    function = Mock()
    function.stats.cache_misses = {"one": 1, "other": 2}
    function.stats.cache_hits = {"one": 5}
    assert lesson.compilations(function) == 3
    assert lesson.loads(function) == 5


@pytest.mark.parametrize("launched", [True, False])
def test_the_folder_lies_in_the_launchers_and_goes(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "0").mkdir()
    monkeypatch.setenv(
        "TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json") if launched else ""
    )
    lesson = load(LESSON)
    lesson.from_rank_0 = lambda value: value
    lesson.dist = Mock()
    with lesson.shared_folder() as folder:
        assert folder.is_dir()
        assert folder.parent == tmp_path / ("0" if launched else "other")
    assert not folder.exists()


@pytest.mark.deep
def test_without_numba_it_says_what_it_needs() -> None:
    played = play(LESSON, 2, ("    import numba\nexcept", "    raise ImportError\nexcept"))
    assert [row["needs"] for row in played.ledger] == ["numba: pip install -e '.[data]'"]
    assert played.code == 1


@pytest.mark.deep
def test_it_refuses_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", [LESSON])
    with pytest.raises(SystemExit, match=r"one node, .* got 4 ranks on several"):
        load(LESSON).main()


ONE = "compilations in 4 calls with one kind of images"
BYTES = "bytes that differ from NumPy's"
KINDS = "compilations for 4 kinds of images"
NAMED = "compilations for 4 kinds, signature named"
NO_CACHE = "compilations on all ranks, no cache"
STORED = "compilations on all ranks, cache, rank 0 first"
LOADED = "ranks that loaded it from the cache"
TWO = "printed with a gain of 2"
STALE = "printed with a gain of 3, in the other file"
FRESH = "printed with a gain of 3, own file changed too"

COMPILING = {
    "the mirrored view is a copy, as in Try": (
        "mirrored = images_NHWC[:, :, ::-1]\n",
        "mirrored = images_NHWC[:, :, ::-1].copy()\n",
        {KINDS},
    ),
    "no signature is named": (
        "    return numba.njit(signature)(brighten)\n",
        "    return declared()\n",
        {NAMED},
    ),
    "the function forgets the minimum": (
        "= min(value, 255)",
        "= value",
        {BYTES},
    ),
    "nothing is cached": (
        "    function = declared(cache=True)\n",
        "    function = declared()\n",
        {STORED, LOADED},
    ),
    "the other function is not cached": (
        "@numba.njit(cache=True)\ndef brighten(x)",
        "@numba.njit\ndef brighten(x)",
        {STALE},
    ),
    "no rank goes first, as in Try": (
        "    dist.barrier()\n    if RANK != 0:\n",
        "    if RANK != 0:\n",
        {STORED, LOADED},
    ),
    "its own file stays as it is": (
        'OWN + "# a comment\\n"',
        "OWN",
        {FRESH},
    ),
    "all ranks compile for a second kind of images": (
        "min(seconds_of(function, images_NHWC) for",
        "min(seconds_of(function, images_NHWC[:, ::-1]) for",
        {ONE, NO_CACHE},
    ),
    "the gain is 5 at first": (
        "OTHER.format(gain=2)",
        "OTHER.format(gain=5)",
        {TWO, STALE},
    ),
}
CLOCK = {
    "the first call is the second": (
        "    first = seconds_of(",
        "    brightened(function, images_NHWC)\n    first = seconds_of(",
        {"share of the first call that is compiling"},
    ),
    "what is loaded is compiled": (
        "seconds_of(declared(cache=True), images_NHWC[:1])",
        "seconds_of(declared(), images_NHWC[:1])",
        {"seconds of the first call, loaded / compiled"},
    ),
}
BREAKS = [
    Breaks(COMPILING, alone=["its own file stays as it is"], deadline=120),
    Breaks(CLOCK, deadline=120, clock=True),
]
