"""`course start`, `hint`, `solution` and `reset`: the learner's own file, answers/NN_name.py."""

import argparse
import re
import sys
from pathlib import Path

from course import progress
from course.book import Exercise
from course.outline import Lesson, book, find_exercise, steps
from course.overview import next_step
from course.terminal import command, paint, say, shown

N = {"metavar": "N", "help": "3, 03_ring_shift, or any part of its name"}
N_OR_CURRENT = {
    "metavar": "N",
    "nargs": "?",
    "help": "3, 03_ring_shift, or any part of its name; without it, the answer that you saved "
    "last, of those not accepted, or the next exercise",
}


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "start",
        help="begin an exercise: its stub goes to answers/",
        description="Write an exercise's stub to answers/, never over a file that is there.",
    )
    parser.add_argument("exercise", **N_OR_CURRENT)
    parser.set_defaults(run=start)
    parser = commands.add_parser(
        "hint", help="one hint more", description="Show the hints seen so far, and one more."
    )
    parser.add_argument("exercise", **N_OR_CURRENT)
    parser.add_argument("only", metavar="K", type=int, nargs="?", help="hint K alone")
    parser.set_defaults(run=hint)
    parser = commands.add_parser(
        "solution",
        help="our solution, once yours is accepted",
        description="Print our solution, once yours has been accepted.",
    )
    parser.add_argument("exercise", **N)
    parser.add_argument("--anyway", action="store_true", help="show it, though yours is not")
    parser.set_defaults(run=solution)
    parser = commands.add_parser(
        "reset",
        help="the empty stub again; a copy of yours is kept",
        description="Put the stub in place of your answer, which is kept next to it. Asks first.",
    )
    parser.add_argument("exercise", nargs="?", **N)
    parser.add_argument("--all", action="store_true", help="of every answer that you have begun")
    parser.set_defaults(run=reset)


def chosen(name: str | None) -> Exercise:
    """The exercise of that name; without one, the answer saved last of those that have no tick, or
    else the first exercise of the path that has none.
    """
    if name is not None:
        return find_exercise(name)
    done = progress.read()["exercises"]
    begun = [one for one in book() if one.answer.exists() and one.name not in done]
    if begun:
        return max(begun, key=lambda one: one.answer.stat().st_mtime_ns)
    for step in steps():
        if isinstance(step, Exercise) and step.name not in done:
            return step
    sys.exit("All exercises are done. Name one by its number.")


def start(options: argparse.Namespace) -> int:
    exercise = chosen(options.exercise)
    answer = shown(exercise.answer)
    try:
        write_stub(exercise)
    except FileExistsError:
        sys.exit(
            f"{answer} is there already, and stays as it is. To grade it: "
            f"{command('check', exercise.number)}. To begin anew: "
            f"{command('reset', exercise.number)}."
        )
    print(f"{paint(f'{exercise.number:02d} {exercise.title}', 'bold')}\n")
    if options.exercise is None:
        say_what_comes_before(exercise)
    print(f"The task:   {shown(exercise.folder / 'README.md')}")
    print(f"Your file:  {answer}")
    print(f"Then:       {command('check', exercise.number)}")
    print(f"or:         {command('watch', exercise.number)}, which checks whenever you save")
    return 0


def say_what_comes_before(exercise: Exercise) -> None:
    """Name the first lesson before this exercise that has no tick, if there is one."""
    done = progress.read()
    before = next_step(done)
    if isinstance(before, Lesson) and steps().index(before) < steps().index(exercise):
        print(f"On the path the lesson {before.name} comes first; you may begin all the same.\n")


def write_stub(exercise: Exercise) -> None:
    """Begin the answer. Raises FileExistsError if there is one."""
    exercise.answer.parent.mkdir(exist_ok=True)
    with exercise.answer.open("x", encoding="utf-8") as file:
        file.write(exercise.stub())


def hint(options: argparse.Namespace) -> int:
    """Show the hints seen so far, and one more; or hint K alone."""
    exercise = chosen(options.exercise)
    hints = exercise.hints
    if options.only is not None and not 1 <= options.only <= len(hints):
        sys.exit(f"Exercise {exercise.number} has hints 1 to {len(hints)}, no {options.only}.")
    print(paint(f"{exercise.number:02d} {exercise.title}", "bold"))
    if options.only is not None:
        show_hint(options.only, hints)
        return 0
    seen = progress.read()["hints"].get(exercise.name, 0)
    for number in range(1, min(seen + 1, len(hints)) + 1):
        show_hint(number, hints)
    if seen < len(hints):
        progress.remember("hints", exercise.name, seen + 1)
    for number, text in enumerate(hints[seen + 1 :], seen + 2):
        about = re.match(r"Functions? [^.]*(?=\.)", text)
        if about:
            print(f"\n{about[0]}: {command('hint', exercise.number, number)}", end="")
    if seen + 1 < len(hints):
        print()
    elif seen == len(hints):
        print(f"\nNo more hints. Ours: {command('solution', exercise.number, '--anyway')}")
    return 0


def show_hint(number: int, hints: list[str]) -> None:
    print(f"\n{paint(f'Hint {number} of {len(hints)}', 'bold')}\n{hints[number - 1]}")


def solution(options: argparse.Namespace) -> int:
    exercise = find_exercise(options.exercise)
    if not options.anyway and exercise.name not in progress.read()["exercises"]:
        sys.exit(
            f"Yours has not been accepted yet. Another hint: {command('hint', exercise.number)}. "
            f"To see ours now: {command('solution', exercise.number, '--anyway')}."
        )
    print(exercise.solution.read_text(encoding="utf-8"), end="")
    return 0


def reset(options: argparse.Namespace) -> int:
    """Put stubs back, having asked; keep what was there."""
    for exercise, kept in to_reset(options):
        exercise.answer.rename(kept)
        write_stub(exercise)
        say(f"{shown(exercise.answer)} is the empty stub again; yours is {kept.name}.")
    return 0


def to_reset(options: argparse.Namespace) -> list[tuple[Exercise, Path]]:
    """The exercises to begin anew, and where each answer is kept. Asks; ends the program if none
    is meant.
    """
    if options.all == bool(options.exercise):
        sys.exit(f"Name one, or all: {command('reset', 'N')} or {command('reset', '--all')}.")
    if options.all:
        some = [one for one in book() if one.answer.exists()]
        some = [one for one in some if one.answer.read_bytes() != one.stub().encode()]
        if not some:
            sys.exit("No answer has more than its stub, so nothing to reset.")
        what = f"{len(some)} answers (NN_name.py as NN_name.kept-1.py, or the next free number)"
    else:
        exercise = find_exercise(options.exercise)
        some = [exercise]
        if not exercise.answer.exists():
            begin = command("start", exercise.number)
            answer = shown(exercise.answer)
            sys.exit(f"There is no {answer}, so nothing to reset. To begin it: {begin}.")
        what = f"{shown(exercise.answer)} as {free_name(exercise.answer).name}"
    if ask(f"Keep {what} and begin anew? [y/N] ").strip().lower() not in ("y", "yes"):
        sys.exit("Nothing was changed.")
    return [(one, free_name(one.answer)) for one in some]


def free_name(answer: Path) -> Path:
    """The next name under which a copy of this answer can be kept."""
    number = 1
    while answer.with_suffix(f".kept-{number}.py").exists():
        number += 1
    return answer.with_suffix(f".kept-{number}.py")


def ask(question: str) -> str:
    """What is typed in reply; nothing at the end of input."""
    try:
        return input(question)
    except EOFError:
        print()
        return ""
