"""The plumbing and the shared passages, in every lesson as here: `course write plumbing`."""

import ast

from course.lessons import LESSONS, ROOT

MARK = "# %% [markdown]\n# ## Plumbing"


def plumbing_of(path: str) -> str:
    """The part of a file from the plumbing's cell mark down, or '' if it has none."""
    source = (ROOT / path).read_text(encoding="utf-8")
    return source[source.index(MARK) :] if MARK in source else ""


def definitions(source: str) -> dict[str, str]:
    """The text of each class and function at the top of a file."""
    lines = source.split("\n")
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = lines[node.lineno - 1 : node.end_lineno]
            text[-1] = text[-1].encode()[: node.end_col_offset].decode()  # less a comment there
            found[node.name] = "\n".join(text)
    return found


def passages() -> dict[str, str]:
    """What a lesson that uses it holds to the letter, by name."""
    return definitions((ROOT / "course/passages.py").read_text(encoding="utf-8"))


def written(lesson: str) -> str:
    """The lesson with plumbing and passages as course/ has them."""
    source = (ROOT / lesson).read_text(encoding="utf-8").removesuffix(plumbing_of(lesson))
    shared = passages()
    for name, text in definitions(source).items():
        source = source.replace(text, shared.get(name, text))
    return source + plumbing_of("course/plumbing.py")


def write() -> list[str]:
    """Write them into every lesson anew; return the paths of the lessons that changed."""
    changed = []
    for lesson in LESSONS:
        if (ROOT / lesson).read_text(encoding="utf-8") != written(lesson):
            changed.append(lesson)
    for lesson in changed:
        (ROOT / lesson).write_text(written(lesson), encoding="utf-8")
    return changed
