"""The order, the shards and restarts against their definitions; claims against broken lines."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from course.playing import Lazily, load, play
from tests.lessons.every import Breaks, Without, test_lesson  # noqa: F401

LESSON = "data-loading/06_tokens.py"
pytestmark = pytest.mark.skipif(find_spec("tokenizers") is None, reason="wants tokenizers")
lesson = Lazily(LESSON)

IMPORT = "with contextlib.suppress(ImportError):  # the extra [data]\n"
GONE = (IMPORT, IMPORT + "    raise ImportError\n")
WITHOUT = {"tokenizers": Without([GONE], {"BPE: bytes of text per token, at least"})}


class Numbers:
    """Stands for the shards: a window is its own number."""

    def __getitem__(self, window: int) -> np.ndarray:
        return np.array([window])


def taken(rank: int, ranks: int, consumed: int, steps: int) -> list[list[int]]:
    loader = lesson.Loader(Numbers(), rank, ranks, consumed)
    return [loader.step()[:, 0].tolist() for _ in range(steps)]


@settings(deadline=None)
@given(st.integers(1, 24), st.integers(0, 5000))
def test_ranks_cut_one_sequence(ranks: int, consumed: int) -> None:
    """Whatever their number, and wherever they begin: the windows of one process, in its order."""
    orders = [np.random.default_rng([0, epoch]).permutation(499) for epoch in range(12)]
    due = np.concatenate(orders)[consumed : consumed + 3 * 24].reshape(3, 24)
    shares = [taken(rank, ranks, consumed, 3) for rank in range(ranks)]
    for step in range(3):
        for rank in range(ranks):
            assert shares[rank][step] == due[step, rank::ranks].tolist()


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_an_epoch_is_a_permutation(epoch: int) -> None:
    assert sorted(lesson.window_at(499 * epoch + place) for place in range(499)) == [*range(499)]


def test_another_batch_size_goes_on_at_the_same_window() -> None:
    larger = load(LESSON, ("BATCH = 24 ", "BATCH = 40 "))
    first = np.concatenate(taken(0, 1, 0, 5)).tolist()
    then = larger.Loader(Numbers(), 0, 1, 5 * 24).step()[:, 0].tolist()
    assert first + then == [lesson.window_at(position) for position in range(160)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_shares_hold_the_same_steps_while_the_number_of_ranks_stays(ranks: int) -> None:
    loaders = [lesson.OwnShare(Numbers(), rank, ranks) for rank in range(ranks)]
    for step in range(3):
        each = 24 // ranks
        due = lesson.order(0)[step * each * ranks : (step + 1) * each * ranks]
        for rank, loader in enumerate(loaders):
            assert loader.step()[:, 0].tolist() == due[rank::ranks].tolist()
            assert loader.taken == (step + 1) * each


@pytest.mark.parametrize("ranks", range(2, 25))
def test_what_the_sampler_repeats_and_leaves_out_and_on_which_ranks(ranks: int) -> None:
    """The lesson's numbers, for each rank: one on each from N mod n on, and on none below."""
    padded = [list(DistributedSampler(range(499), ranks, rank)) for rank in range(ranks)]
    dropped = [
        list(DistributedSampler(range(499), ranks, rank, drop_last=True)) for rank in range(ranks)
    ]
    rest = 499 % ranks
    order = [window for one_round in zip(*dropped, strict=True) for window in one_round]
    full = [window for one_round in zip(*padded, strict=True) for window in one_round]
    assert full[: len(order)] == order
    assert len({*full}) == 499
    again = [place % ranks for place, window in enumerate(full) if window in full[:place]]
    assert again == [*range(rest, ranks)]
    assert len({*order}) == len(order) == 499 - rest
    assert {*full} - {*order} == {*full[len(order) :][:rest]}  # those of ranks 0 to rest - 1


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


def test_shards_hold_each_window_once_and_the_targets_between(tmp_path: Path) -> None:
    tokens = np.arange(499 * 128 + 1, dtype=np.uint16)
    lesson.write_shards(tmp_path, tokens)
    files = sorted(tmp_path.iterdir())
    assert [len(np.load(file)) for file in files] == [167 * 128 + 1] + 2 * [166 * 128 + 1]
    shards = lesson.Shards(tmp_path)
    assert all(isinstance(one, np.memmap) for one in shards.maps)
    for window in range(499):
        assert (shards[window] == tokens[window * 128 : window * 128 + 129]).all()
    assert (lesson.read_windows(tmp_path)[:, :-1].flatten() == tokens[:-1]).all()


def test_documents_end_with_0_and_bytes_are_shifted_by_1() -> None:
    tokens = load(LESSON, GONE).as_one_array(["ab", "", "c"])
    assert tokens.tolist() == [98, 99, 0, 0, 100, 0]
    assert tokens.dtype == np.uint16


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    changed = load(LESSON)
    short = tmp_path / "short.txt"
    short.write_text("a word and another\n\n" * 40)
    with pytest.raises(SystemExit) as end:
        changed.prepare(str(short))
    assert "needs 63,873 tokens, got " in str(end.value)
    assert "in 40 paragraphs; take a longer text, or leave out --data" in str(end.value)


@pytest.mark.parametrize(
    ("ranks", "argv", "message"),
    [
        (25, [], "a step has 24 rows, got 25 ranks; start at most 24"),
        (2, ["--data", "/no/such"], "--data takes a file of text, got /no/such; leave it out"),
    ],
)
def test_what_cannot_work_is_refused_before_any_collective(
    ranks: int, argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("sys.argv", [LESSON, *argv])
    changed = load(LESSON)
    changed.setup = None
    with pytest.raises(SystemExit) as end:
        changed.main()
    assert message in str(end.value)


@pytest.mark.deep
def test_a_number_of_ranks_that_does_not_divide_the_batch() -> None:
    play(LESSON, 5).expect(set())


@pytest.mark.deep
def test_text_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    words = np.random.default_rng(0).integers(0, 5000, (2000, 30))
    own.write_text("\n\n".join(" ".join(f"w{word}é" for word in row) for row in words))
    play(LESSON, 2, argv=("--data", str(own))).expect(set())


BPE_BYTES = "BPE: bytes of text per token, at least"
ON_DISK = "bytes of the shards on disk"
TWICE = "padding: windows that come twice"
FIRST = "padding: the first rank that repeats one"
LEFT = "drop_last: windows left out"
LOADER = "drop_last, DataLoader too: left out"
UNLIKE = "windows unlike those of one process, of 600"
NEXT = "places with the same window next epoch, at most"
OWN = "own counts saved: windows that come twice"
NEVER = "own counts, more ranks: windows that never come"
OFTEN, RARELY = "one number saved: windows too often", "one number saved: windows too rarely"

SEEDED = "    return np.random.default_rng([SEED, epoch]).permutation(WINDOWS)"
POSITIONS = "range(self.consumed + self.rank, self.consumed + self.batch, self.ranks)"
RESUMED = "Loader(shards, RANK, ranks, consumed, batch)"
LINES = {
    "each rank has an order of its own (Try)": (
        (SEEDED, SEEDED.replace("epoch", "epoch, RANK")),
        {UNLIKE, OWN, NEVER, OFTEN, RARELY},
    ),
    "each rank counts its own windows (Try)": (
        ("self.consumed += self.batch", "self.consumed += len(positions)"),
        {UNLIKE, OFTEN},
    ),
    "all epochs have one order": (
        (SEEDED, SEEDED.replace(", epoch", "")),
        {UNLIKE, NEXT},
    ),
    "ranks take neighbors": (
        (
            POSITIONS,
            "range(self.consumed + self.rank * self.batch // self.ranks, "
            "self.consumed + (self.rank + 1) * self.batch // self.ranks)",
        ),
        {UNLIKE},
    ),
    "every rank takes the whole batch": (
        (POSITIONS, "range(self.consumed, self.consumed + self.batch, self.ranks)"),
        {UNLIKE, OFTEN, RARELY},
    ),
    "an epoch's last, incomplete step is left out": (
        (
            "divmod(position, WINDOWS)",
            "divmod(position, WINDOWS - WINDOWS % BATCH)",
        ),
        {UNLIKE, OFTEN, RARELY},
    ),
    "nothing was saved": ((RESUMED, "Loader(shards, RANK, ranks, 0, batch)"), {OFTEN}),
    "a step is lost at each restart": (
        (RESUMED, "Loader(shards, RANK, ranks, consumed + BATCH, batch)"),
        {RARELY},
    ),
    "own counts: one window further": (
        ("OwnShare(shards, RANK, after, each)", "OwnShare(shards, RANK, after, each + 1)"),
        {OWN, NEVER},
    ),
    "the third shard is never read": (
        ("np.array(self.maps[shard]", "np.array(self.maps[min(shard, 1)]"),
        {UNLIKE, OWN, NEVER, OFTEN, RARELY},
    ),
    "tokens of 32 bits": (
        ("return np.array(tokens, np.uint16)", "return np.array(tokens, np.uint32)"),
        {ON_DISK},
    ),
    "no merges are learned": (('"vocab_size": VOCABULARY - 1', '"vocab_size": 256'), {BPE_BYTES}),
    "every sampler is rank 0's": (
        ("range(WINDOWS), WORLD_SIZE, RANK, seed", "range(WINDOWS), WORLD_SIZE, 0, seed"),
        {TWICE, LEFT},
    ),
    "ranks are counted from 1": (("enumerate(one_round)", "enumerate(one_round, 1)"), {FIRST}),
    "the sampler drops nothing": (("sampler = deal(drop_last=True)", "sampler = deal()"), {LEFT}),
    "the DataLoader drops nothing": (
        ("rows, sampler=sampler, drop_last=True)", "rows, sampler=sampler)"),
        {LOADER},
    ),
}
ALONE = ["each rank counts its own windows (Try)"]  # and leaves nothing for others to lose
BREAKS = Breaks(LINES, alone=ALONE)
