"""`course new lesson FOLDER/NN_name`, `course new exercise NN_name`: begin with what works.

Both copy a small, complete example from course/templates/, which passes the tests of form as it
is; the author replaces it part by part. CONTRIBUTING.md says what comes after.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "course/templates"
ORDER = ROOT / "course/lessons.toml"
ROW = """\
[[lesson]]
path = "{path}"
minutes = 30
ranks = [1, 2, 3, 4, 8]
"""


def paths() -> list[str]:
    """The lessons that lessons.toml lists, in reading order, less ".py"."""
    return re.findall(r'^path = "(.+)\.py"$', ORDER.read_text(encoding="utf-8"), re.MULTILINE)


def title_of(name: str) -> str:
    """'20_all_to_all' becomes 'All to all'."""
    words = name[3:].replace("_", " ")
    return words[0].upper() + words[1:]


def filled(template: str, **words: str) -> str:
    """A template's text, with each @WORD@ replaced."""
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text


def check_name(name: str, what: str, taken: list[str]) -> None:
    """End with what to do if `name` is no NN_name, or its number is given to another."""
    if not re.fullmatch(r"\d\d_[a-z][a-z0-9_]*", name):
        sys.exit(f"{what} is called NN_name, as in 20_all_to_all, and not {name}.")
    for other in taken:
        if other[:2] == name[:2]:
            sys.exit(f"Number {name[:2]} is taken: {other}. The next one free: {free(taken)}.")


def free(taken: list[str]) -> str:
    """The next number after all that are taken, of two digits."""
    return f"{max(int(name[:2]) for name in taken) + 1:02d}"


# A lesson


def lesson(options: argparse.Namespace) -> int:
    """Write the lesson, and its row in lessons.toml."""
    from course.shared_code import plumbing_of  # imports torch, as `course --help` need not

    folder, _, name = options.path.removesuffix(".py").rpartition("/")
    folders = sorted({path.partition("/")[0] for path in paths()})
    if folder not in folders:
        sys.exit(f"A lesson lies in one of {', '.join(folders)}: FOLDER/NN_name.")
    inside = [path.partition("/")[2] for path in paths() if path.startswith(f"{folder}/")]
    check_name(name, "A lesson", inside)
    path = ROOT / folder / f"{name}.py"
    if path.exists():
        sys.exit(f"{path.relative_to(ROOT)} is there already.")
    title = title_of(name)
    text = filled("lesson.py.in", TITLE=title, RULE="=" * len(title), FILE=f"{name}.py")
    path.write_text(text + plumbing_of("course/plumbing.py"), encoding="utf-8")
    order = with_row(ORDER.read_text(encoding="utf-8"), f"{folder}/{name}")
    ORDER.write_text(order, encoding="utf-8")
    here = path.relative_to(ROOT)
    tests = ROOT / f"tests/lessons/{folder}/test_{name}.py"
    tests.write_text(filled("test_lesson.py.in", LESSON=str(here)), encoding="utf-8")
    print(f"Written: {here}, its row in course/lessons.toml, {tests.relative_to(ROOT)}.")
    print(f"It runs: python {here}")
    print("Make it yours, and name it under Next of the lesson before it. Then:")
    print(f"make results ONLY={here}; make check. More in CONTRIBUTING.md.")
    return 0


def with_row(order: str, path: str) -> str:
    """lessons.toml with a row for `path`, before the first lesson of its folder that follows it,
    or after the last of its folder.
    """
    head, *rows = re.split(r"(?=^\[\[lesson\]\]$)", order.rstrip("\n") + "\n\n", flags=re.MULTILINE)
    place = 0
    for at, row in enumerate(rows):
        listed = re.search(r'^path = "(.+)\.py"$', row, re.MULTILINE)[1]
        if listed.partition("/")[0] == path.partition("/")[0]:
            if listed > path:
                place = at
                break
            place = at + 1
    rows.insert(place, ROW.format(path=f"{path}.py") + "\n")
    return head + "".join(rows).rstrip("\n") + "\n"


# An exercise


def exercise(options: argparse.Namespace) -> int:
    """Write the exercise's folder, and name it in the lesson that it follows."""
    name = options.name
    inside = [path.name for path in (ROOT / "exercises").glob("[0-9][0-9]_*")]
    check_name(name, "An exercise", sorted(inside))
    after = options.after.removesuffix(".py")
    if after not in paths():
        fitting = [path for path in paths() if path.startswith(after)]
        if len(fitting) != 1:
            sys.exit(f"--after names a lesson, as parallelism/06, and not {options.after}.")
        after = fitting[0]
    words = {"NAME": name, "NUMBER": name[:2], "CHECK": str(int(name[:2]))}
    words |= {"TITLE": title_of(name), "LESSON": after}
    folder = ROOT / "exercises" / name
    folder.mkdir()
    for template in sorted((TEMPLATES / "exercise").iterdir()):
        text = filled(f"exercise/{template.name}", **words)
        (folder / template.name.removesuffix(".in")).write_text(text, encoding="utf-8")
    before = ROOT / f"{after}.py"
    text = before.read_text(encoding="utf-8")
    text = text.replace("**Next.** ", f"**Next.** exercises/{name}; then\n", 1)
    before.write_text(text, encoding="utf-8")
    files = ", ".join(sorted(path.name for path in folder.iterdir()))
    print(f"Written: exercises/{name}: {files}.")
    print(f"{after}.py names it under **Next**. Now: course write tables; then make check.")
    return 0


def add(subparsers: argparse._SubParsersAction) -> None:
    """Add `course new`."""
    parser = subparsers.add_parser("new", help="for authors: begin a lesson or an exercise")
    kinds = parser.add_subparsers(metavar="lesson|exercise", required=True)
    kind = kinds.add_parser("lesson", help="a lesson that runs and passes; make it yours")
    kind.add_argument("path", metavar="FOLDER/NN_name")
    kind.set_defaults(run=lesson)
    kind = kinds.add_parser("exercise", help="an exercise with a grader; make it yours")
    kind.add_argument("name", metavar="NN_name")
    kind.add_argument("--after", required=True, metavar="LESSON", help="the lesson it follows")
    kind.set_defaults(run=exercise)


def main() -> int:
    """`python -m course.new lesson FOLDER/NN_name` does the same."""
    parser = argparse.ArgumentParser("course")
    add(parser.add_subparsers(required=True))
    options = parser.parse_args(["new", *sys.argv[1:]])
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
