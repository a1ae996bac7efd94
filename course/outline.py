"""The course as a learner walks it: lessons and exercises in order, and found by their names.

Everything is read as text: nothing here imports torch, and `course` answers at once.
"""

import re
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path

from course.book import ROOT, Exercise, exercises
from course.lessons import PATHS, READING_ORDER
from course.terminal import command


@dataclass(frozen=True)
class Lesson:
    """A row of course/lessons.toml, and what the lesson's docstring says."""

    path: str  # from the repository's root
    minutes: int
    spine: bool

    @property
    def file(self) -> Path:
        return ROOT / self.path

    @property
    def folder(self) -> str:
        return self.path.partition("/")[0]

    @property
    def number(self) -> str:
        return self.file.name[:2]

    @property
    def name(self) -> str:
        """As short as it can be typed: parallelism/01."""
        return f"{self.folder}/{self.number}"

    @cached_property
    def docstring(self) -> str:
        return self.file.read_text(encoding="utf-8").split('"""')[1]

    @property
    def title(self) -> str:
        return self.docstring.partition("\n")[0]

    @property
    def question(self) -> str:
        """What the lesson answers, on one line."""
        return " ".join(self.docstring.partition("**Question.**")[2].partition("\n\n")[0].split())

    @property
    def subject(self) -> str:
        """The title up to its colon, or with its question mark."""
        return re.split(r":|(?<=\?) ", self.title)[0]

    @property
    def task(self) -> str:
        """The docstring up to where it says how the lesson is run."""
        return self.docstring.partition("**Run.**")[0].strip()

    @property
    def exercises(self) -> list[str]:
        """The names of the exercises that **Next.** leads to."""
        return re.findall(r"exercises/(\w+)", self.docstring.partition("**Next.**")[2])

    @property
    def predict(self) -> tuple[str, dict[int, str]]:
        """What *Predict* says first, and its questions by their numbers, lines as they stand."""
        text = self.docstring.partition("**Predict**")[2]
        text = re.split(r"\n\n(?=\*\*)", text)[0].strip()
        first, *rest = re.split(r"(?:^|\n)(?=\d+\. )", text)
        first = re.sub(r"^, and write it down before you run[.:]\s*", "", first).strip()
        questions = {}
        for question in rest:
            number, _, words = question.partition(". ")
            questions[int(number)] = re.sub(r"\n\s*", "\n", words).strip()
        return first, questions

    @property
    def seen(self) -> dict[int, str]:
        """What one should have seen, by the number of the question; lines as they stand."""
        text = self.file.read_text(encoding="utf-8").partition("# ## What you should have seen")[2]
        found = {}
        number = 0
        for line in text.splitlines()[1:]:
            begun = re.match(r"# (\d+)\. (.*)", line)
            if begun:
                number = int(begun[1])
                found[number] = begun[2]
            elif number and line.startswith("#    "):
                found[number] += f"\n{line.removeprefix('#    ')}"
            elif line != "#" or number == len(self.predict[1]):
                number = 0  # prose that answers no question, or the cell has ended
            if not line.startswith("#") or line.startswith("# %%"):
                break
        return found


@dataclass(frozen=True)
class GoalPath:
    """What a reader with one goal does, in order."""

    name: str
    goal: str
    page: str  # from the repository's root, to read along
    steps: list[Lesson | Exercise]

    @property
    def lessons(self) -> list[Lesson]:
        return [step for step in self.steps if isinstance(step, Lesson)]

    @property
    def hours(self) -> str:
        """What its lessons take; exercises take as long as they take."""
        return f"{sum(lesson.minutes for lesson in self.lessons) / 60:.1f}"


@cache
def paths() -> list[GoalPath]:
    """The paths by goal, as course/lessons.toml lists them."""
    steps = {lesson.name: lesson for lesson in lessons()}
    steps |= {f"{exercise.number:02d}": exercise for exercise in book()}
    found = []
    for row in PATHS:
        found.append(GoalPath(**row | {"steps": [steps[name] for name in row["steps"]]}))
    return found


@cache
def lessons() -> list[Lesson]:
    """All lessons, in reading order."""
    rows = READING_ORDER
    return [Lesson(row["path"], row["minutes"], row.get("spine", False)) for row in rows]


@cache
def book() -> list[Exercise]:
    """All exercises, by number."""
    return exercises()


def exercises_after(lesson: Lesson) -> list[Exercise]:
    """The exercises that a lesson leads to."""
    return [exercise for exercise in book() if exercise.name in lesson.exercises]


def exercises_of_no_lesson() -> list[Exercise]:
    named = set(chain.from_iterable(lesson.exercises for lesson in lessons()))
    return [exercise for exercise in book() if exercise.name not in named]


def steps() -> list[Lesson | Exercise]:
    """The path: the spine's lessons, each with its exercises, then the others in the same way."""
    ordered = [lesson for lesson in lessons() if lesson.spine]
    ordered += [lesson for lesson in lessons() if not lesson.spine]
    path = []
    for lesson in ordered:
        path += [lesson, *exercises_after(lesson)]
    return path + exercises_of_no_lesson()


def find_lesson(name: str) -> Lesson:
    """The lesson meant by parallelism/01, 01_data_parallelism_ddp, its path or a part of these.

    Ends the program with one line if there is none, or more than one.
    """
    wanted = str(Path(name)).removesuffix(".py")
    path = Path(name).resolve()
    if path.exists() and path.is_relative_to(ROOT):  # typed in a lesson's own folder, perhaps
        wanted = str(path.relative_to(ROOT)).removesuffix(".py")
    wanted = re.sub(r"/(\d)$", r"/0\1", wanted)
    stems = [lesson.path.removesuffix(".py") for lesson in lessons()]
    for fits in (
        [stem for stem in stems if wanted in (stem, stem.partition("/")[2])],
        [stem for stem in stems if stem.startswith(f"{wanted}_")],
        [stem for stem in stems if wanted in stem],
    ):
        if len(fits) == 1:
            return lessons()[stems.index(fits[0])]
        if fits:
            sys.exit(f"{name!r} may be any of: {', '.join(fits)}.")
    sys.exit(f"There is no lesson {name!r}; {command()} lists them.")


def find_exercise(name: str) -> Exercise:
    """The exercise meant by 1, 01, 01_hello_ranks, its folder, its answer or a part of its name.

    Ends the program with one line if there is none, or more than one.
    """
    wanted = Path(name).name.removesuffix(".py")
    if wanted.isdecimal():
        fits = [exercise for exercise in book() if exercise.number == int(wanted)]
    else:
        fits = [exercise for exercise in book() if wanted == exercise.name]
        fits = fits or [exercise for exercise in book() if wanted in exercise.name]
    if len(fits) == 1:
        return fits[0]
    if fits:
        sys.exit(f"{name!r} may be any of: {', '.join(exercise.name for exercise in fits)}.")
    numbers = f"{book()[0].number} to {book()[-1].number}"
    sys.exit(f"There is no exercise {name!r}; they are {numbers}, and {command()} lists them.")
