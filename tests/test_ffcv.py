"""FFCV's file against known bytes, shares against sets, claims against broken lines."""

import functools
import struct
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exercises.ranks import run
from tests.lessons import load, play

FIRST = "data-loading/01_ffcv_distributed_optimization.py"
SECOND = "data-loading/02_ffcv_file_order_memory.py"
NEEDED = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")


@functools.cache
def lesson():
    return load(SECOND)


@pytest.fixture(scope="module")
def beton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lesson's file, written by FFCV in a process of its own."""
    folder = tmp_path_factory.mktemp("beton")
    return Path(run(lambda: load(SECOND).write(folder), 1)[0])


@NEEDED
def test_the_header_holds_what_ffcv_documents(beton: Path) -> None:
    data = beton.read_bytes()
    version, fields, page, samples, end = struct.unpack_from("<HHIQQ", data)
    assert (version, fields, page, samples) == (2, 3, 2**21, 128)
    assert end == (1 + 8) * 2**21  # 18 images of 115,200 bytes a page
    assert len(data) == end + 24 * 128
    kinds = [data[24 + 1041 * i] for i in range(3)]
    names = [data[25 + 1041 * i :][:16].rstrip(b"\0") for i in range(3)]
    assert (kinds, names) == ([2, 1, 1], [b"image", b"label", b"number"])
    header, described, rows, entries = lesson().parse(beton)
    assert header.tolist() == (version, fields, page, samples, end)
    assert [f["name"] for f in described] == names
    assert lesson().ROW.itemsize == 32
    assert rows["number"].tolist() == sorted(entries["sample"]) == list(range(128))
    assert set(rows["picture"]["width"]) == {240}
    assert set(rows["picture"]["mode"]) == {1}  # raw
    assert rows["picture"]["start"].tolist() == entries["start"].tolist()


@NEEDED
def test_numpy_and_ffcv_read_the_same(beton: Path) -> None:
    from ffcv.reader import Reader

    header, _, rows, entries = lesson().parse(beton)
    reader = Reader(str(beton))
    assert header.tobytes() == reader.header.tobytes()
    assert rows.tobytes() == reader.metadata.tobytes()
    assert entries.tobytes() == reader.alloc_table.tobytes()


def orders_of(path: Path) -> tuple[list, str]:
    opened = load(SECOND)
    loader = opened.open_beton(path, 8, distributed=True)
    epochs = [loader.traversal_order.sample_order(epoch).tolist() for epoch in range(3)]
    with pytest.raises(NotImplementedError, match="Not implemented") as refusal:
        opened.open_beton(path, 8, "QUASI_RANDOM", distributed=True)
    return epochs, str(refusal.value)


@NEEDED
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_an_epoch_and_quasi_random_is_refused(ranks: int, beton: Path) -> None:
    outcomes = run(orders_of, ranks, beton, deadline=60)
    for epoch in range(3):
        numbers = [n for epochs, _ in outcomes for n in epochs[epoch]]
        assert set(numbers) == set(range(128))
        assert len(numbers) == 128 + -128 % ranks
    assert len({tuple(epoch) for epoch in outcomes[0][0]}) == 3  # each epoch in another order


@given(st.integers(1, 200), st.integers(1, 16))
def test_shares_are_equal_and_miss_nothing(samples: int, ranks: int) -> None:
    shares = [lesson().shard(rank, ranks, samples) for rank in range(ranks)]
    assert {len(share) for share in shares} == {-(-samples // ranks)}
    assert set(np.concatenate(shares)) == set(range(samples))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1), min_size=1), st.integers(0, 4))
def test_pages_open_equal_a_count_batch_by_batch(batches: list, ahead: int) -> None:
    def is_open(page: int, now: int) -> bool:
        uses = [i for i, pages in enumerate(batches) if page in pages]
        return bool(uses) and uses[0] - ahead <= now <= uses[-1]

    due = max(sum(is_open(p, now) for p in range(6)) for now in range(len(batches)))
    assert lesson().open_at_once(batches, ahead) == due


def test_without_ffcv_the_lessons_are_blocked() -> None:
    gone = ("try:  # the extra [ffcv]\n", "try:\n    raise ImportError\n")
    for path in FIRST, SECOND:
        played = play(path, 2, gone)
        assert (played.code, played.failed) == (0, set()), played.output
        needs = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
        assert needs
        assert all(need.startswith("a system library") for need in needs)
        assert max(map(len, played.output.splitlines())) <= 100


LEFT, TWICE = "samples that an epoch of shares leaves out", "samples that come twice: -N mod n"
PIXELS, LOSS = "pixels that differ, epoch 1", "test loss, FFCV's minus the DataLoader's"
ACCURACY = "test accuracy, FFCV's minus the DataLoader's"
BREAKS = {  # two changes each: a run takes seconds
    "batches are cloned; only rank 0 reads through its map": (
        (
            ("((x.data_ptr(), number) for", "((x.data_ptr(), number.clone()) for"),
            (
                "        orders(loader, table)\n",
                "        if RANK: loader.memory_manager.context.mmap = None; gc.collect()\n",
            ),
        ),
        {
            "samples left in batches kept, not cloned",
            "Rss of all ranks' maps / bytes of the pages",
        },
    ),
    "other pictures are written; a share begins one late": (
        (
            ("dataset(Pictures(IMAGES, SEED)", "dataset(Pictures(IMAGES, SEED + 7)"),
            ("np.arange(rank * each, (rank", "np.arange(rank * each + 1, (rank"),
        ),
        {
            "pixels and labels that NumPy reads wrong",
            "shares of 1 to 39 samples that miss or add some",
            *(PIXELS, LOSS, LEFT, TWICE),
        },
    ),
    "every rank takes all; the DataLoader's epochs are all alike": (
        (
            ('"QUASI_RANDOM", indices=mine, os', '"QUASI_RANDOM", os'),
            ("        sampler.set_epoch(epoch)\n", ""),
        ),
        {"pages that a rank reads", TWICE, PIXELS, LOSS},
    ),
}


@NEEDED
@pytest.mark.parametrize("what", BREAKS)
def test_broken_lines_fail_the_claims_that_guard_them_and_no_others(what: str) -> None:
    changes, claims = BREAKS[what]
    played = play(SECOND, 2, *changes, deadline=120)
    assert played.failed - {ACCURACY} == claims, played.output
    assert played.code == 1


UNTIMED = (
    ("        parts = where_the_time_goes(place, device)\n", ""),
    ("        seconds = threads_against_processes(place)\n", ""),
)


@NEEDED
def test_images_of_ones_own_and_a_dropped_last_batch(tmp_path: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    for label, photograph in zip("ab", load_sample_images().images, strict=True):
        (tmp_path / label).mkdir()
        for name, box in ("tall.JPEG", (0, 0, 200, 427)), ("wide.png", (0, 0, 640, 100)):
            Image.fromarray(photograph).crop(box).save(tmp_path / label / name)
    broken, data = ('"drop_last": False', '"drop_last": True'), ("--data", str(tmp_path))
    played = play(FIRST, 2, *UNTIMED, broken, argv=data, deadline=120)
    assert played.failed == {"samples that an epoch leaves out"}, played.output
