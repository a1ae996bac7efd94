"""Find the lessons, and what is said of them, without loading torch."""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fundamentals", "communication", "parallelism", "fsdp", "profiling", "data-loading")
LESSONS = []  # by folder and number
for folder in FOLDERS:
    found = sorted((ROOT / folder).glob("[0-9][0-9]_*.py"))
    LESSONS += [str(path.relative_to(ROOT)) for path in found]
LISTED = tomllib.loads((ROOT / "course/lessons.toml").read_text(encoding="utf-8"))
READING_ORDER = LISTED["lesson"]
PATHS = LISTED.get("path", [])  # by goal
ABOUT = {row["path"]: row for row in READING_ORDER}


def world_sizes_of(path: str) -> list[int]:
    """The world sizes that the lesson takes on one machine, of 1, 2, 3, 4 and 8."""
    return ABOUT[path]["ranks"]


def file_of_tests(path: str) -> Path:
    """Where all that belongs to the lesson's tests stands."""
    folder, name = path.split("/")
    return ROOT / "tests/lessons" / folder / f"test_{name}"


def flags_of(path: str) -> list[str]:
    """The names of the lesson's own flags, read without running it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command_line":
            return [key.value for key in node.args[0].keys] if node.args else []
    raise AssertionError(f"{path} never calls command_line()")
