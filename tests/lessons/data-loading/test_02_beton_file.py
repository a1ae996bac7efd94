"""FFCV's file against known bytes, its buffers and batches: claims against broken lines."""

import os
import struct
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from course.playing import Lazily, load, play
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

# FFCV's pipelines in plain Python: the same values, without seconds of compiling on every rank.
NO_JIT = ('os.environ["NUMBA_OPT"] = "0"', 'os.environ["NUMBA_DISABLE_JIT"] = "1"')
LESSON = "data-loading/02_beton_file.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

SIZES = {1: [NO_JIT], 3: [NO_JIT]}  # the plain run, on four ranks, compiles
ON_GPUS = OnGpus(changes=[NO_JIT], ranks=(1, 2))


def test_the_header_holds_what_ffcv_documents(beton: Path) -> None:
    data = beton.read_bytes()
    version, fields, page, samples, end = struct.unpack_from("<HHIQQ", data)
    assert (version, fields, page, samples) == (2, 3, 2**21, 130)
    assert end == (1 + 8) * 2**21  # 18 images of 115,200 bytes per page
    assert len(data) == end + 24 * 130
    kinds = [data[24 + 1041 * i] for i in range(3)]
    names = [data[25 + 1041 * i :][:16].rstrip(b"\0") for i in range(3)]
    assert (kinds, names) == ([2, 1, 1], [b"image", b"label", b"index"])
    header, described, rows, entries = lesson.parse(beton)
    assert header.tolist() == (version, fields, page, samples, end)
    assert [f["name"] for f in described] == names
    assert lesson.ROW.itemsize == 32
    assert rows["index"].tolist() == sorted(entries["sample"]) == list(range(130))
    assert set(rows["image"]["width"]) == {240}
    assert set(rows["image"]["mode"]) == {1}  # raw
    assert rows["image"]["start"].tolist() == entries["start"].tolist()


def test_numpy_and_ffcv_read_the_same(beton: Path) -> None:
    from ffcv.reader import Reader

    header, _, rows, entries = lesson.parse(beton)
    reader = Reader(str(beton))
    assert header.tobytes() == reader.header.tobytes()
    assert rows.tobytes() == reader.metadata.tobytes()
    assert entries.tobytes() == reader.alloc_table.tobytes()


FOLDER = "data-loading"
WRITERS = {
    f"{FOLDER}/01_ffcv_distributed_optimization.py": lambda own: own.write_photos(FILE, FILE, None),
    LESSON: lambda own: own.write_beton(FILE),
    f"{FOLDER}/12_own_ffcv_operation.py": lambda own: own.write_numbers(FILE),
}
FILE = Path("a.beton")


@pytest.mark.parametrize("path", WRITERS)
def test_ffcv_s_writer_shares_memory_without_a_name(path: str) -> None:
    """Ctrl-C while a file is written would leave it in /dev/shm."""
    own = load(path)
    own.ffcv_writer = SimpleNamespace(shared_memory=None)
    for name in ("RGBImageField", "IntField", "Images", "Photos", "multiprocessing"):
        setattr(own, name, MagicMock())
    made = []

    def write(*_: object, **__: object) -> None:
        made.append(own.ffcv_writer.shared_memory.SharedMemory(create=True, size=8))

    own.DatasetWriter = lambda *_, **__: SimpleNamespace(from_indexed_dataset=write)
    WRITERS[path](own)
    (memory,) = made
    assert not (Path("/dev/shm") / memory.name).exists()
    if os.fork() == 0:
        memory.buf[0] = 7  # a writer inherits it
        os._exit(0)
    os.wait()
    assert memory.buf[0] == 7
    memory.close()
    memory.unlink()  # as FFCV does at the end


IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
GONE = (IMPORT, IMPORT + "        raise ImportError\n")


@pytest.mark.deep
def test_without_ffcv_all_is_blocked_and_that_is_no_success() -> None:
    played = play(LESSON, 2, GONE)
    assert played.code == 1
    assert [row["verdict"] for row in played.ledger] == ["BLOCKED"] * 3, played.output
    assert all(row["needs"].startswith("FFCV") for row in played.ledger)


LEFT = "different samples in the batches that were kept"
PIXELS = "bytes of images that differ in epoch 1"
OTHERS = "labels and indices that differ in epoch 1"
LINES = {
    "what is kept is cloned, as in Try": (
        "        kept.append(index)\n",
        "        kept.append(index.clone())\n",
        {LEFT},
    ),
    "the last image is left out, and all labels are 0": (
        "dataset(Images(N, SEED)",
        "dataset([(Images(N, SEED)[i][0], 0, i) for i in range(N - 1)]",
        {
            "samples, as the header says",
            "bytes of the file",
            "bytes and labels that NumPy reads wrong",
            PIXELS,
            OTHERS,
        },
    ),
    "batches are cloned as they come": (
        "_, index in loader:",
        "_, index in [[part.clone() for part in batch] for batch in loader]:",
        {"buffers of an epoch's batches", LEFT},
    ),
    "the DataLoader's epochs are all alike, as in Try": (
        "    sampler.set_epoch(epoch)\n",
        "",
        {PIXELS, OTHERS},
    ),
    "FFCV shuffles with another seed": (
        "batch_size=8, distributed=True)",
        "batch_size=8, distributed=True, seed=SEED + 1)",
        {PIXELS, OTHERS},
    ),
    "the file has larger pages": (
        "page_size=PAGE, num",
        "page_size=2 * PAGE, num",
        {"pages of samples", "bytes of the file"},
    ),
}
BREAKS = Breaks(LINES, changes=[NO_JIT], deadline=120)
