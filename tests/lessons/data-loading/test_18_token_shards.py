"""Shards, windows and the tokenizer against their definitions; claims against broken lines."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily, load, play
from tests.lessons.every import Breaks, Without, test_lesson  # noqa: F401

LESSON = "data-loading/18_token_shards.py"
pytestmark = pytest.mark.skipif(find_spec("tokenizers") is None, reason="wants tokenizers")
lesson = Lazily(LESSON)

IMPORT = "with contextlib.suppress(ImportError):  # the extra [data]\n"
GONE = (IMPORT, IMPORT + "    raise ImportError\n")
WITHOUT = {"tokenizers": Without([GONE], {"BPE of 4,096: bytes of text per token"})}
NEEDED = 150 * 1024 + 1


@pytest.fixture(scope="module")
def bpe() -> object:
    from tokenizers import decoders

    learned = lesson.learn_bpe("\n\n".join(["for i in range(10):\n    print(i)"] * 20))
    learned.decoder = decoders.ByteLevel()
    return learned


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_from_bpe(bpe: object, text: str) -> None:
    tokens = bpe.encode(text).ids
    assert all(0 <= token < 4096 for token in tokens)
    assert bpe.decode(tokens) == text


def test_bpe_merges_what_is_frequent(bpe: object) -> None:
    """Each word and each sign of what it was trained on has become one token."""
    tokens = [[token] for token in bpe.encode("for i in range(10):\n    print(i)").ids]
    words = ["for", " i", " in", " range", "(", "10", "):", "\n   ", " print", "(", "i", ")"]
    assert [bpe.decode(token) for token in tokens] == words


def test_the_text_of_the_standard_library_is_long_enough() -> None:
    text = lesson.standard_library()
    assert len(text.encode()) >= 700_000
    assert load(LESSON, GONE).tokenize(text).tolist() == list(text.encode())
    assert NEEDED < len(lesson.tokenize(text)) < 700_000 / 3.5


def test_shards_hold_each_window_once_and_the_targets_between(tmp_path: Path) -> None:
    tokens = np.arange(NEEDED) % 65_521  # so that no two windows are alike
    lesson.write_shards(tmp_path, tokens)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"tokens_{number:05}.bin" for number in range(3)]
    assert [file.stat().st_size for file in files] == [122_882, 122_882, 61_442]
    raw = [np.fromfile(file, np.uint16) for file in files]
    assert (np.concatenate([one[:-1] for one in raw]) == tokens[:-1]).all()
    assert [int(one[-1]) for one in raw] == tokens[[60 * 1024, 120 * 1024, 150 * 1024]].tolist()
    shards = lesson.Shards(tmp_path)
    for window in range(150):
        assert (shards[window] == tokens[window * 1024 : window * 1024 + 1025]).all()
    assert len(shards) == 150
    for window in (150, 180, -1):
        with pytest.raises(IndexError, match=f"from 0 to 149, got {window}"):
            shards[window]


def test_more_than_ten_shards_keep_their_order(tmp_path: Path) -> None:
    smaller = load(LESSON, ("PER_SHARD = 60 ", "PER_SHARD = 10 "))
    tokens = np.arange(NEEDED) % 65_521
    smaller.write_shards(tmp_path, tokens)
    shards = smaller.Shards(tmp_path)
    assert len(shards.maps) == 15
    for window in range(150):
        expected = tokens[window * 1024 : window * 1024 + 1025]
        assert (shards[window] == expected).all()


def test_a_token_that_is_too_large_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tokens = np.zeros(NEEDED, int)
    tokens[-1] = 65_536
    with pytest.raises(ValueError, match=r"up to 65,535, got 65,536; use np\.uint32"):
        lesson.write_shards(tmp_path, tokens)
    assert list(tmp_path.iterdir()) == []


def test_a_window_is_a_view_that_cannot_be_written(tmp_path: Path) -> None:
    lesson.write_shards(tmp_path, np.zeros(NEEDED, int))
    shards = lesson.Shards(tmp_path)
    window = shards[91]
    assert np.shares_memory(window, shards.maps[1])
    with pytest.raises(ValueError, match="read-only"):
        window[0] = 1
    there = window.ctypes.data - shards.maps[1].ctypes.data
    assert (there, there + window.nbytes) == (63_488, 65_538)


@pytest.mark.deep
def test_where_nothing_comes_from_a_disk_it_says_what_it_needs() -> None:
    played = play(LESSON, 2, ("os.POSIX_FADV_DONTNEED", "os.POSIX_FADV_NORMAL"))
    played.expect(set())
    needs = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert needs == ["a temporary folder on a disk: set TMPDIR"]


def test_how_much_is_read_around_is_said_by_the_kernel(tmp_path: Path) -> None:
    own = load(LESSON)
    assert own.read_around(tmp_path) % 4096 == 0
    own.Path = lambda name: tmp_path / "no such file"
    assert own.read_around(tmp_path) == 131_072


IN_FILE = "tokens in the file of shard 0"
LARGEST = "of tokens 65,535 and 65,536, the largest taken"
SHARD = "window 91: its shard"
BYTE = "window 91: its first byte there"
DELIVERED = "window 91: bytes from the disk"
AROUND = "window 91, no advice: pages from the disk"
ONCE = "windows not read exactly once, all ranks"
INPUTS = "inputs, joined, unlike the text's tokens"
TARGETS = "targets, joined, unlike those one token on"
BPE = "BPE of 4,096: bytes of text per token"
BYTES = "bytes as tokens: bytes unlike the text's"

MAPPED = "    return np.frombuffer(mapped, DTYPE)\n"
STORE = "        kept.astype(DTYPE).tofile("
LINES = {
    "each shard is read as a whole (Try)": (
        (MAPPED, "    return np.fromfile(path, DTYPE)\n"),
        {DELIVERED, AROUND},
    ),
    "the byte order of another machine (Try)": (
        (STORE, STORE.replace("DTYPE", '">u2"')),
        {INPUTS, TARGETS, BYTES},
    ),
    "tokens of 4 bytes": (
        ("DTYPE = np.uint16", "DTYPE = np.uint32"),
        {IN_FILE, LARGEST, BYTE, AROUND},
    ),
    "the kernel always reads around": (("    mapped.madvise(advice)\n", ""), {DELIVERED}),
    "the kernel never reads around": (
        ("mapped.madvise(advice)", "mapped.madvise(mmap.MADV_RANDOM)"),
        {AROUND},
    ),
    "no token is too large": (("    if tokens.max() > largest:", "    if False:"), {LARGEST}),
    "a shard ends with two tokens more": (
        ("stop * T + 1]", "stop * T + 2]"),
        {IN_FILE},
    ),
    "a shard ends with a token of its own": (
        (STORE, "        kept = np.append(kept[:-1], 65_000)\n" + STORE),
        {TARGETS},
    ),
    "windows are counted from the end of a shard": (
        ("start = place * T\n", "start = len(self.maps[shard]) - 1 - (place + 1) * T\n"),
        {BYTE, DELIVERED, INPUTS, TARGETS, BYTES},
    ),
    "a shard has 40 windows": (
        ("PER_SHARD = 60 ", "PER_SHARD = 40 "),
        {IN_FILE, SHARD, BYTE, AROUND},
    ),
    "no merges are learned": (('"vocab_size": 4096', '"vocab_size": 256'), {BPE}),
    "the shards begin with the text's second byte": (
        ("data[: WINDOWS * T + 1])", "data[1 : WINDOWS * T + 2])"),
        {BYTES},
    ),
    "every rank reads all windows": (
        ("range(RANK, WINDOWS, WORLD_SIZE)", "range(WINDOWS)"),
        {ONCE},
    ),
    "a rank takes each second one of its own": (
        ("range(RANK, WINDOWS, WORLD_SIZE)", "range(RANK, WINDOWS, 2 * WORLD_SIZE)"),
        {ONCE, INPUTS, TARGETS},
    ),
}
ALONE = [  # others would do no harm then
    "tokens of 4 bytes",
    "a shard has 40 windows",
    "the kernel never reads around",
]
BREAKS = Breaks(LINES, alone=ALONE)
