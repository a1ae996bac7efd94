"""fsdp/sharding_strategies.md: each row is backed by a claim, a test or a source that exists."""

import re

from course.lessons import ROOT

STRATEGIES = (ROOT / "fsdp/sharding_strategies.md").read_text()
TESTS = "".join(path.read_text() for path in (ROOT / "tests/lessons/fsdp").glob("test_*.py"))


def claimed_in(number: str, claim: str) -> bool:
    """Does this lesson of the folder claim so? What precedes a colon may be formatted in."""
    source = next((ROOT / "fsdp").glob(f"{number}_*.py")).read_text()
    after = claim.partition(": ")[2]
    return f'"{claim}"' in source or (after != "" and f'}}: {after}"' in source)


def claims_of(cell: str) -> list[tuple[str, str]]:
    """02 "a", "b"; 03 "c" -> (02, a), (02, b), (03, c)."""
    parts = [part.strip() for part in cell.split(";")]
    return [(p[:2], claim) for p in parts for claim in re.findall(r'"([^"]+)"', p)]


def rows() -> list[list[str]]:
    """The cells of every row of sharding_strategies.md, less the heads of its tables."""
    lines = [line for line in STRATEGIES.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[-1] not in ("backed by", "---")]


def test_every_row_of_strategies_is_backed_by_a_run_or_a_source() -> None:
    claims = [claim for row in rows() for claim in claims_of(row[-1])]
    assert claims
    assert [claim for claim in claims if not claimed_in(*claim)] == []
    assert not claimed_in("03", "stage 3: bytes in float16")
    assert not claimed_in("02", "type Adam: nothing of the kind")
    tests = {name for row in rows() for name in re.findall(r"`(test_\w+)`", row[-1])}
    assert tests
    assert all(f"def {name}(" in TESTS for name in tests)
    listed = set(re.findall(r"^- (\[\d\])", STRATEGIES, re.M))
    for row in rows():
        sources = set(re.findall(r"\[\d\]", row[-1]))
        assert sources <= listed, row
        assert sources or '"' in row[-1] or "`test_" in row[-1], row
