"""Write the canonical plumbing (tests/plumbing.py) into every lesson: `make plumbing`."""

from tests.lessons import LESSONS, ROOT

MARK = "# %% [markdown]\n# ## The plumbing"


def plumbing_of(path: str) -> str:
    """The part of a file from the plumbing's cell mark down, or '' if it has none."""
    source = (ROOT / path).read_text()
    return source[source.index(MARK) :] if MARK in source else ""


if __name__ == "__main__":
    canonical = plumbing_of("tests/plumbing.py")
    for lesson in LESSONS:
        if (old := plumbing_of(lesson)) != canonical:
            path = ROOT / lesson
            path.write_text(path.read_text().removesuffix(old) + canonical)
            print("rewritten:", lesson)
