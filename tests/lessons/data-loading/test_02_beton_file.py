"""FFCV's file against known bytes, its buffers, training: claims against broken lines."""

import functools
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest

from course.playing import load, play
from course.ranks import run
from tests.helpers.spared import NO_JIT

LESSON = "data-loading/02_beton_file.py"
NEEDED = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")


@functools.cache
def lesson():
    return load(LESSON)


@pytest.fixture(scope="module")
def beton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lesson's file, written by FFCV in a process of its own."""
    path = tmp_path_factory.mktemp("beton") / "raw.beton"
    run(lambda: load(LESSON).write_beton(path), 1)
    return path


@NEEDED
def test_the_header_holds_what_ffcv_documents(beton: Path) -> None:
    data = beton.read_bytes()
    version, fields, page, samples, end = struct.unpack_from("<HHIQQ", data)
    assert (version, fields, page, samples) == (2, 3, 2**21, 130)
    assert end == (1 + 8) * 2**21  # 18 images of 115,200 bytes per page
    assert len(data) == end + 24 * 130
    kinds = [data[24 + 1041 * i] for i in range(3)]
    names = [data[25 + 1041 * i :][:16].rstrip(b"\0") for i in range(3)]
    assert (kinds, names) == ([2, 1, 1], [b"image", b"label", b"index"])
    header, described, rows, entries = lesson().parse(beton)
    assert header.tolist() == (version, fields, page, samples, end)
    assert [f["name"] for f in described] == names
    assert lesson().ROW.itemsize == 32
    assert rows["index"].tolist() == sorted(entries["sample"]) == list(range(130))
    assert set(rows["image"]["width"]) == {240}
    assert set(rows["image"]["mode"]) == {1}  # raw
    assert rows["image"]["start"].tolist() == entries["start"].tolist()


@NEEDED
def test_numpy_and_ffcv_read_the_same(beton: Path) -> None:
    from ffcv.reader import Reader

    header, _, rows, entries = lesson().parse(beton)
    reader = Reader(str(beton))
    assert header.tobytes() == reader.header.tobytes()
    assert rows.tobytes() == reader.metadata.tobytes()
    assert entries.tobytes() == reader.alloc_table.tobytes()


def test_without_ffcv_the_lesson_is_blocked() -> None:
    line = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
    gone = (line, line + "        raise ImportError\n")
    played = play(LESSON, 2, gone)
    needs = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert len(needs) == 3, played.output
    assert all(need.startswith("FFCV") for need in needs)
    assert max(map(len, played.output.splitlines())) <= 100


LEFT = "different samples in the batches that were kept"
PIXELS = "pixels that differ in epoch 1"
LOSS = "test loss, FFCV's minus DataLoader's"
ACCURACY = "test accuracy, FFCV's minus DataLoader's"
BREAKS = {  # two changes each: a run takes seconds
    "what is kept is cloned (Try); other images are written": (
        (
            ("        kept.append(index)\n", "        kept.append(index.clone())\n"),
            ("dataset(Images(N, SEED)", "dataset(Images(N, SEED + 7)"),
        ),
        {LEFT, "pixels and labels that NumPy reads wrong", PIXELS, LOSS},
    ),
    "the DataLoader's epochs are all alike (Try); the file has larger pages": (
        (
            ("        sampler.set_epoch(epoch)\n", ""),
            ("page_size=PAGE, num", "page_size=2 * PAGE, num"),
        ),
        {PIXELS, LOSS, "pages of samples", "bytes of the file"},
    ),
}


@pytest.mark.deep
@NEEDED
@pytest.mark.parametrize("what", BREAKS)
def test_broken_lines_fail_the_claims_that_guard_them_and_no_others(what: str) -> None:
    changes, claims = BREAKS[what]
    played = play(LESSON, 2, NO_JIT, *changes, deadline=120)
    assert played.failed - {ACCURACY} == claims, played.output
