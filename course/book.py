"""The exercises as they lie in their folders: task, hints, stub, known mistakes, verdict."""

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOLE = r"( *)# --- yours\n(.*?) *# --- end\n"


@dataclass
class Report:
    """What a grader said of an answer: titles of the checks passed and blocked; of the first that
    failed, title and message; and the seed of the random inputs.
    """

    passed: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    failed: str = ""
    message: str = ""
    seed: int = 0

    @property
    def accepted(self) -> bool:
        return bool(self.passed) and not self.failed


@dataclass
class Mistake:
    """A known wrong answer, the check that must refuse it, and a part of what that check says."""

    name: str
    source: str
    check: str  # the name of a test function of the grader
    says: str


class Exercise:
    """One folder of exercises/: README.md, hints.md, solution.py, test_exercise.py, mistakes.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.number = int(folder.name[:2])
        self.grader = folder / "test_exercise.py"
        self.solution = folder / "solution.py"
        self.answer = folder.parents[1] / "answers" / f"{folder.name}.py"

    @cached_property
    def readme(self) -> str:
        return (self.folder / "README.md").read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        return re.match(r"# \d\d (.*)\n", self.readme)[1]

    @property
    def hints(self) -> list[str]:
        """The hints, the gentlest first: a file of their own, so that nobody reads all at once."""
        text = (self.folder / "hints.md").read_text(encoding="utf-8")
        _, *found = re.split(r"^## Hint \d+$", text, flags=re.M)
        return [hint.strip() for hint in found]

    @property
    def holes(self) -> list[int]:
        """Lines of the solution in each hole."""
        solved = self.solution.read_text(encoding="utf-8")
        return [len(body.splitlines()) for _, body in re.findall(HOLE, solved, re.S)]

    def stub(self) -> str:
        """The solution with holes: where a learner begins."""

        def hole(found: re.Match) -> str:
            lines = len(found[2].splitlines())
            noun = "line" if lines == 1 else "lines"
            return f"{found[1]}raise NotImplementedError  # {lines} {noun} in the solution\n"

        return re.sub(HOLE, hole, self.solution.read_text(encoding="utf-8"), flags=re.S)

    def mistakes(self) -> list[Mistake]:
        """The known wrong answers, made from the solution as mistakes.py says.

        Raises ValueError if a passage to replace does not occur exactly once in the solution.
        """
        found = []
        for name, old, new, check, says in listed(self.folder / "mistakes.py"):
            if old is None:  # another approach: a whole file next to mistakes.py
                source = (self.folder / new).read_text(encoding="utf-8")
            else:
                source = self.solution.read_text(encoding="utf-8")
                pairs = [(old, new)] if isinstance(old, str) else list(zip(old, new, strict=True))
                for before, after in pairs:
                    if source.count(before) != 1:
                        times = source.count(before)
                        raise ValueError(
                            f"{self.name}, {name}: solution.py holds {times} times: {before}"
                        )
                    source = source.replace(before, after)
            found.append(Mistake(name, source, check, says))
        return found


def listed(path: Path) -> list[tuple]:
    """The value of MISTAKES in a file of literals, which is read and not run."""
    if not path.exists():
        return []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "MISTAKES":
            return ast.literal_eval(node.value)
    raise ValueError(f"{path}: no MISTAKES")


def exercises(root: Path = ROOT) -> list[Exercise]:
    """All of them, in order."""
    folders = sorted(path.parent for path in root.glob("exercises/[0-9][0-9]_*/README.md"))
    return [Exercise(folder) for folder in folders]
