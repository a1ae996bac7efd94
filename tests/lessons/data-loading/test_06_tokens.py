"""The order and restarts against their definitions; claims against broken lines."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from course.playing import Lazily, load, play
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "data-loading/06_tokens.py"
lesson = Lazily(LESSON)


def taken(rank: int, ranks: int, consumed: int, steps: int) -> list[list[int]]:
    loader = lesson.Loader(rank, ranks, consumed)
    return [lesson.windows_of(loader.step()) for _ in range(steps)]


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


def test_every_epoch_has_an_order_of_its_own() -> None:
    """Two orders have one window in the same place, on average."""
    orders = [lesson.order(epoch) for epoch in range(6)]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 10


def test_another_batch_size_goes_on_at_the_same_window() -> None:
    first = np.concatenate(taken(0, 1, 0, 5)).tolist()
    then = lesson.windows_of(lesson.Loader(0, 1, 5 * 24, 40).step())
    assert first + then == [lesson.window_at(position) for position in range(160)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_shares_hold_the_same_steps_while_the_number_of_ranks_stays(ranks: int) -> None:
    loaders = [lesson.OwnShare(rank, ranks) for rank in range(ranks)]
    for step in range(3):
        each = 24 // ranks
        due = lesson.order(0)[step * each * ranks : (step + 1) * each * ranks]
        for rank, loader in enumerate(loaders):
            assert lesson.windows_of(loader.step()) == due[rank::ranks].tolist()
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


def test_a_row_is_a_window_with_the_target_of_its_last_token() -> None:
    rows = lesson.rows_of([0, 498, 3])
    assert rows.tolist() == [[*range(128 * window, 128 * window + 129)] for window in (0, 498, 3)]
    assert lesson.windows_of(rows) == [0, 498, 3]
    rows[1, 7] += 1
    assert lesson.windows_of(rows) == [0, -1, 3]
    assert lesson.windows_of(rows - 1) == [-1, -1, -1]


def test_more_ranks_than_rows_are_refused_before_any_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "25")
    monkeypatch.setattr("sys.argv", [LESSON])
    changed = load(LESSON)
    changed.setup = None
    with pytest.raises(SystemExit) as end:
        changed.main()
    assert "a step has 24 rows, got 25 ranks; start at most 24" in str(end.value)


@pytest.mark.deep
def test_a_number_of_ranks_that_does_not_divide_the_batch() -> None:
    play(LESSON, 5).expect(set())


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
RESUMED = "Loader(RANK, ranks, consumed, batch)"
ROW = "TOKENS[window * T : (window + 1) * T + 1] for"
LINES = {
    "each rank has an order of its own (Try)": (
        (SEEDED, SEEDED.replace("epoch", "epoch, RANK")),
        {UNLIKE, OWN, NEVER, OFTEN, RARELY},
    ),
    "each rank counts its own windows (Try)": (
        ("self.consumed += self.batch", "self.consumed += len(positions)"),
        {UNLIKE, OFTEN, RARELY},
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
    "nothing was saved": ((RESUMED, "Loader(RANK, ranks, 0, batch)"), {OFTEN, RARELY}),
    "a step is lost at each restart": (
        (RESUMED, "Loader(RANK, ranks, consumed + BATCH, batch)"),
        {OFTEN, RARELY},
    ),
    "own counts: one window further": (
        ("OwnShare(RANK, after, each)", "OwnShare(RANK, after, each + 1)"),
        {OWN, NEVER},
    ),
    "rows begin a token late": (
        (ROW, ROW.replace(" for", " + 1 for")),
        {UNLIKE, OWN, NEVER, RARELY},
    ),
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
BREAKS = Breaks(LINES)
