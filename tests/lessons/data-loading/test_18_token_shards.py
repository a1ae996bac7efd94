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

    learned = lesson.learn_bpe(["for i in range(10):\n    print(i)"] * 20)
    learned.decoder = decoders.ByteLevel()
    return learned


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_from_bpe(bpe: object, text: str) -> None:
    tokens = bpe.encode(text).ids
    assert all(lesson.END < token + 1 < lesson.VOCABULARY for token in tokens)
    assert bpe.decode(tokens) == text


def test_bpe_merges_what_is_frequent(bpe: object) -> None:
    """Each word and each sign of what it was trained on has become one token."""
    tokens = [[token] for token in bpe.encode("for i in range(10):\n    print(i)").ids]
    words = ["for", " i", " in", " range", "(", "10", "):", "\n   ", " print", "(", "i", ")"]
    assert [bpe.decode(token) for token in tokens] == words


def test_documents_end_with_0_and_bytes_are_shifted_by_1() -> None:
    assert load(LESSON, GONE).tokenize(["ab", "", "c"]) == [[98, 99, 0], [0], [100, 0]]


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
    with pytest.raises(IndexError):
        shards[180]


def test_a_window_is_a_view_that_cannot_be_written(tmp_path: Path) -> None:
    lesson.write_shards(tmp_path, np.zeros(NEEDED, int))
    shards = lesson.Shards(tmp_path)
    window = shards[101]
    assert np.shares_memory(window, shards.maps[1])
    with pytest.raises(ValueError, match="read-only"):
        window[0] = 1
    there = window.ctypes.data - shards.maps[1].ctypes.data
    assert (there, there + window.nbytes) == (83_968, 86_018)


def test_of_a_text_what_is_needed_is_kept(tmp_path: Path) -> None:
    """Documents of 512 tokens: every window begins with one; of 513, only window 0."""
    for length, inside in ((511, 0), (512, 149)):
        own = tmp_path / "own.txt"
        own.write_text("\n\n".join(["é" * (length // 2) + "x" * (length % 2)] * 400))
        tokens, ratio, begun = load(LESSON, GONE).prepare(str(own))
        assert (len(tokens), ratio, begun) == (NEEDED, 1, inside)
        assert tokens[length] == 0


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a word and another\n\n" * 40)
    with pytest.raises(SystemExit) as end:
        load(LESSON, GONE).prepare(str(short))
    assert "needs 153601 tokens, got 760; take a longer text" in str(end.value)


def test_no_file_is_refused_before_any_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("sys.argv", [LESSON, "--data", "/no/such"])
    changed = load(LESSON)
    changed.setup = None
    with pytest.raises(SystemExit) as end:
        changed.main()
    assert "--data takes a file of text, got /no/such; leave it out" in str(end.value)


@pytest.mark.deep
def test_text_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    words = np.random.default_rng(0).integers(0, 50_000, (4000, 30))
    own.write_text("\n\n".join(" ".join(f"w{word}é" for word in row) for row in words))
    played = play(LESSON, 2, argv=("--data", str(own)))
    played.expect(set())
    assert len(played.ledger) == 10


@pytest.mark.deep
def test_where_nothing_comes_from_a_disk_it_says_what_it_needs() -> None:
    played = play(LESSON, 2, ("os.POSIX_FADV_DONTNEED", "os.POSIX_FADV_NORMAL"))
    played.expect(set())
    needs = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert "a temporary folder on a disk: set TMPDIR" in needs


BPE = "BPE of 4,096: bytes of text per token"
STORED = "token 100,000, stored and read back"
ON_DISK = "bytes of all shards on disk"
SHARD = "window 101: its shard"
BYTE = "window 101: its first byte there"
DELIVERED = "window 101: bytes that the disk delivers"
ONCE = "windows not read exactly once, all ranks"
INPUTS = "inputs, joined, unlike the text's tokens"
TARGETS = "targets, joined, unlike those one token on"
INSIDE = "windows that begin inside a document"
COPIES = "copies in memory, all ranks"

MAPPED = "    return np.frombuffer(mapped, DTYPE)\n"
STORE = "        kept.astype(DTYPE).tofile("
LINES = {
    "each shard is read as a whole (Try)": (
        (MAPPED, "    return np.fromfile(path, DTYPE)\n"),
        {DELIVERED, COPIES},
    ),
    "the byte order of another machine (Try)": (
        (STORE, STORE.replace("DTYPE", '">u2"')),
        {INPUTS, TARGETS},
    ),
    "tokens of 4 bytes": (("DTYPE = np.uint16", "DTYPE = np.uint32"), {STORED, ON_DISK, BYTE}),
    "the kernel reads ahead": (
        ("    mapped.madvise(mmap.MADV_RANDOM)", "    mapped.madvise(mmap.MADV_NORMAL)"),
        {DELIVERED},
    ),
    "a shard ends with a token of its own": (
        (STORE, "        kept = np.append(kept[:-1], END + 1)\n" + STORE),
        {TARGETS},
    ),
    "windows are counted from the end of a shard": (
        ("start = place * T\n", "start = len(self.maps[shard]) - 1 - (place + 1) * T\n"),
        {BYTE, DELIVERED, INPUTS, TARGETS},
    ),
    "a shard has 50 windows": (("PER_SHARD = 60 ", "PER_SHARD = 50 "), {SHARD, BYTE}),
    "every rank reads all windows": (
        ("range(RANK, WINDOWS, WORLD_SIZE)", "range(WINDOWS)"),
        {ONCE},
    ),
    "a rank takes each second one of its own": (
        ("range(RANK, WINDOWS, WORLD_SIZE)", "range(RANK, WINDOWS, 2 * WORLD_SIZE)"),
        {ONCE, INPUTS, TARGETS, INSIDE},
    ),
    "every token ends a document": (
        ("[number + 1 for number in numbers]", "[0 * number for number in numbers]"),
        {INSIDE},
    ),
    "each rank writes to its map, and so has pages of its own": (
        [
            ("mmap.ACCESS_READ", "mmap.ACCESS_COPY"),
            (MAPPED, "    own = np.frombuffer(mapped, DTYPE)\n    own += 0\n    return own\n"),
        ],
        {DELIVERED, COPIES},
    ),
    "no merges are learned": (('"vocab_size": VOCABULARY - 1', '"vocab_size": 256'), {BPE}),
}
ALONE = ["tokens of 4 bytes", "every token ends a document"]  # others would do no harm then
BREAKS = Breaks(LINES, alone=ALONE)
