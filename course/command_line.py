"""The exercises, from the command line.

    course                what there is, how far you are, where to go on
    course next           the next one's task
    course check [N]      run the grader on exercise.py
    course watch [N]      the same, again whenever you save, until it passes
    course hint [N]       one hint more
    course solution N     ours, once yours has passed (or --anyway)
    course reset N        the empty exercise back; a copy of yours is kept

N is a number; without it, the first exercise not done is meant.
"""

import argparse
import json
import os
import signal
import sys
import textwrap
import time
from datetime import date

from course.book import ROOT, Exercise, exercises

PROGRESS = ROOT / ".progress.json"
COLOURS = {"green": 32, "red": 31, "yellow": 33, "bold": 1}


def paint(text: str, colour: str) -> str:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def progress() -> dict[str, dict]:
    """What has been done (exercise: date) and how many hints were shown (exercise: number)."""
    if PROGRESS.exists():
        return json.loads(PROGRESS.read_text())
    return {"done": {}, "hints": {}}


def remember(what: str, exercise: Exercise, value: object) -> None:
    known = progress()
    known[what][exercise.name] = value
    PROGRESS.write_text(json.dumps(known, indent=1))


def find(number: int | None) -> Exercise:
    """The exercise of this number, or the first not done."""
    every = exercises()
    for exercise in every:
        if exercise.number == number or (
            number is None and exercise.name not in progress()["done"]
        ):
            return exercise
    if number is None:
        sys.exit("All done. Pick one by its number.")
    sys.exit(f"There is no exercise {number}; they go from 1 to {every[-1].number}.")


def show_list() -> None:
    done = progress()["done"]
    every = exercises()
    print(paint("Exercises: predict, build, be measured.", "bold"))
    print(f"{len([e for e in every if e.name in done])} of {len(every)} done\n")
    for exercise in every:
        mark = paint("✓", "green") if exercise.name in done else "·"
        print(f"  {mark} {exercise.number:02d}  {exercise.title}")
    if len(done) < len(every):
        print(f"\n{where_to_go(find(None))}")
    else:
        print("\nAll done. exercises/interview_topics.md asks whether you can also say it.")


def where_to_go(exercise: Exercise) -> str:
    folder = exercise.folder.relative_to(ROOT.parent)
    return (
        f"Next: {exercise.number:02d}. Read {folder}/README.md, write {folder}/exercise.py, then\n"
        f"      course check {exercise.number}"
    )


def show_task(exercise: Exercise) -> None:
    print(exercise.readme.partition("<details>")[0].strip())
    print(f"\nWrite: {exercise.mine.relative_to(ROOT.parent)}")


def check(exercise: Exercise) -> bool:
    """Run the grader; say which checks passed, and of the first that failed, why."""
    print(paint(f"{exercise.number:02d} {exercise.title}", "bold"))
    report = exercise.check()
    for title in report.passed:
        print(f"  {paint('✓', 'green')} {title}")
    for title in report.blocked:
        print(f"  {paint('BLOCKED', 'yellow')} {title}")
    if report.accepted:
        remember("done", exercise, date.today().isoformat())
        print(paint(f"\nAccepted: {len(report.passed)} checks passed.", "green"))
        print(f"Compare: course solution {exercise.number}")
        if any(e.name not in progress()["done"] for e in exercises()):
            print(where_to_go(find(None)))
    elif not report.failed:
        print(paint("\nNothing could be checked on this machine.", "yellow"))
    else:
        print(f"  {paint('✗', 'red')} {report.failed}")
        for line in report.message.splitlines():
            room = " " * (4 + len(line) - len(line.lstrip()))
            print(textwrap.fill(line.strip(), 99, initial_indent=room, subsequent_indent=room))
        if len(exercise.hints) > progress()["hints"].get(exercise.name, 0):
            print(f"\nA hint: course hint {exercise.number}")
    return report.accepted


def watch(exercise: Exercise) -> None:
    """Check, and again whenever the file has changed, until it passes."""
    while True:
        saved = exercise.mine.stat().st_mtime_ns
        print()
        if check(exercise):
            return
        print(f"\nWaiting for you to save {exercise.mine.relative_to(ROOT.parent)}; Ctrl-C ends.")
        while not exercise.mine.exists() or exercise.mine.stat().st_mtime_ns == saved:
            time.sleep(0.2)


def hint(exercise: Exercise) -> None:
    """Show the hints seen so far, and one more."""
    shown = min(progress()["hints"].get(exercise.name, 0) + 1, len(exercise.hints))
    remember("hints", exercise, shown)
    for number, text in enumerate(exercise.hints[:shown], 1):
        print(f"{paint(f'Hint {number} of {len(exercise.hints)}.', 'bold')} {text}\n")


def solution(exercise: Exercise, anyway: bool) -> None:
    if not anyway and exercise.name not in progress()["done"]:
        sys.exit("Yours has not passed yet. Another hint? Or, if you mean it, add --anyway.")
    print(exercise.solution.read_text(), end="")


def reset(exercise: Exercise) -> None:
    """Put the stub back, having asked; keep what was there."""
    if exercise.mine.exists():
        mine = exercise.mine.relative_to(ROOT.parent)
        number = 1
        while (exercise.folder / f"exercise.kept-{number}.py").exists():
            number += 1
        kept = exercise.folder / f"exercise.kept-{number}.py"
        if input(f"Keep {mine} as {kept.name} and start afresh? [y/N] ").strip().lower() != "y":
            sys.exit("Nothing was changed.")
        exercise.mine.rename(kept)
    exercise.mine.write_text(exercise.stub())
    print(f"{exercise.mine.relative_to(ROOT.parent)} is empty again.")


def main() -> int:
    parser = argparse.ArgumentParser(
        "course", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = "list", "next", "check", "watch", "hint", "solution", "reset"
    parser.add_argument("command", nargs="?", default="list", choices=commands, metavar="command")
    parser.add_argument("number", nargs="?", type=int)
    parser.add_argument("--anyway", action="store_true", help="the solution, though not passed")
    asked = parser.parse_args()
    if asked.command in ("solution", "reset") and asked.number is None:
        parser.error(f"{asked.command} needs the number of an exercise")
    exercise = None if asked.command == "list" else find(asked.number)
    match asked.command:
        case "list":
            show_list()
        case "next":
            show_task(exercise)
        case "check":
            return 0 if check(exercise) else 1
        case "watch":
            watch(exercise)
        case "hint":
            hint(exercise)
        case "solution":
            solution(exercise, asked.anyway)
        case "reset":
            reset(exercise)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started us may ignore it
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
