"""What tests of lessons rest on: an expectation that does not come true is an error."""

import pytest

from course.playing import NotAsExpected, Played, play


def ended(code: int | str, **verdicts: str) -> Played:
    """A lesson that made the claims named; those that end in _s are decided by a clock."""
    rows = []
    for claim, verdict in verdicts.items():
        row = {"claim": claim, "verdict": verdict, "predicted": 1, "measured": 2}
        rows.append(row | {"timed": claim.endswith("_s")})
    return Played(code, rows, "")


def test_what_a_clock_decides_stands_apart() -> None:
    played = ended(1, bytes="FAIL", sums="PASS", step_s="FAIL")
    assert played.failed == {"bytes"}
    assert played.failed_by_clock == {"step_s"}
    played.expect({"bytes"})
    ended(0, bytes="PASS").expect(set())
    ended(1, bytes="PASS", step_s="FAIL").expect(set())


def test_the_numbers_of_a_claim_that_failed_stand_in_the_first_line() -> None:
    with pytest.raises(NotAsExpected, match=r"^not as expected: FAIL a: 2, not 1; no FAIL b\n"):
        ended(1, a="FAIL").expect({"b"})


@pytest.mark.parametrize(
    ("played", "expected"),
    [
        (ended(1, bytes="FAIL"), set()),
        (ended(0, bytes="PASS"), {"bytes"}),
        (ended(1, bytes="FAIL", sums="FAIL"), {"bytes"}),
        (ended(0, bytes="FAIL"), {"bytes"}),  # the exit status hides it
        (ended(1, bytes="PASS"), set()),
        (ended(1), set()),  # no claim was made
        (ended("rank 0 raised: KeyError"), set()),
        (ended("rank 0 hung", bytes="PASS"), set()),
    ],
)
def test_another_end_than_expected_is_an_error(played: Played, expected: set) -> None:
    with pytest.raises(NotAsExpected):
        played.expect(expected)


def test_a_change_that_no_longer_applies_fails_before_any_rank_starts() -> None:
    with pytest.raises(AssertionError, match="holds 0 times: no such line"):
        play("communication/03_ring_and_tree.py", 2, ("no such line", ""))
