"""`course check` and `course watch`: grade answers, and print each check as it ends."""

import argparse
import json
import re
import sys
import time
from functools import partial
from pathlib import Path

from course import progress
from course.answers import N_OR_CURRENT, chosen
from course.book import Exercise
from course.outline import book, lessons
from course.overview import where_to_go
from course.predict import what_was_seen
from course.terminal import command, paint, pending, say, shown, tick
from course.verdict import Verdict, grade


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check",
        help="grade an answer",
        description="Grade an answer. The exit status is 0 if it, or with --all each, is accepted.",
    )
    parser.add_argument("exercise", **N_OR_CURRENT)
    parser.add_argument("--all", action="store_true", help="every exercise, a line each")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--seed", type=int, metavar="S", help="of the random inputs")
    parser.add_argument(
        "--answers", type=Path, metavar="FOLDER", help="somebody's answers; nothing is ticked"
    )
    parser.set_defaults(run=check)
    parser = commands.add_parser(
        "watch",
        help="grade it again whenever you save, until it passes",
        description="Grade an answer, and again whenever it is saved, until it is accepted.",
    )
    parser.add_argument("exercise", **N_OR_CURRENT)
    parser.set_defaults(run=watch)


# What is printed


def show_check(check: dict) -> None:
    """One check, as it ends."""
    pending()
    if check["verdict"] == "passed":
        say(f"{paint('✓', 'green')} {check['check']}", 2)
    elif check["verdict"] == "blocked":
        say(f"{paint('BLOCKED', 'yellow')} {check['check']}: {check['message']}", 2)
    else:
        say(f"{paint('✗', 'red')} {check['check']}", 2)
        say(check["message"], 4)


def show_running(title: str, seconds: float) -> None:
    """On a terminal, the check that runs, until it ends."""
    pending(f"{int(seconds):4} s  {title or 'checking'} ...")


def show_proof(exercise: Exercise) -> None:
    """What an accepted answer has shown, its lesson, and where to read on."""
    shows = sentence_after("**Cost target.**", exercise)
    print()
    say(f"{paint('Solved:', 'bold')} {exercise.title}")
    if shows != "None.":
        say(f"At this cost: {shows}")
    say(f"Lesson: {sentence_after('Lesson', exercise)}")
    done = progress.read()["lessons"]
    for leads_here in lessons():
        if exercise.name in leads_here.exercises and leads_here.path not in done:
            say(f"Read on: {what_was_seen(leads_here)}, What you should have seen")


def sentence_after(words: str, exercise: Exercise) -> str:
    """The sentence that follows these words in the README; empty if they are not there."""
    found = re.search(rf"{re.escape(words)}s?:?\s+(.+?\.)\s", exercise.readme, re.DOTALL)
    return " ".join(found[1].replace("`", "").split()) if found else ""


def show_end(exercise: Exercise, verdict: Verdict) -> None:
    """What follows from the checks, and what to type next."""
    print()
    if verdict.status == "accepted":
        checks = "1 check" if len(verdict.passed) == 1 else f"{len(verdict.passed)} checks"
        rest = f"; {len(verdict.blocked)} BLOCKED" if verdict.blocked else ""
        print(paint(f"Accepted: {checks} passed in {verdict.seconds} s{rest}.", "green"))
        show_proof(exercise)
        print(f"\nOurs, to compare: {command('solution', exercise.number)}\n")
        print(where_to_go(progress.read()))
    elif verdict.status == "blocked":
        print(paint("Nothing could be checked on this machine.", "yellow"))
    elif verdict.status == "error":
        print(paint(f"The grader itself failed: {verdict.error.rstrip()}", "red"))
    else:
        readable = not re.search(r"(Syntax|Indentation|Tab)Error: ", verdict.message)
        if readable and progress.read()["hints"].get(exercise.name, 0) < len(exercise.hints):
            print(f"A hint: {command('hint', exercise.number)}")
        seed = re.search(r"inputs drawn from seed (\d+)", verdict.message)
        if seed:
            again = command("check", exercise.number, "--seed", seed[1])
            print(f"With the same inputs again: {again}")


def settle(exercise: Exercise, verdict: Verdict) -> None:
    """Tick an exercise that was accepted."""
    if verdict.status == "accepted":
        progress.settle("exercises", exercise.name, verdict.blocked)


# The commands


def check(options: argparse.Namespace) -> int:
    if options.all and options.exercise:
        sys.exit(f"Either one or all: {command('check', options.exercise)} or --all, not both.")
    if options.answers and not options.answers.is_dir():
        sys.exit(f"There is no folder {options.answers}.")
    if options.all:
        return check_many(book(), options)
    exercise = chosen(options.exercise)
    if options.json:
        return check_many([exercise], options)
    answer = answer_of(exercise, options)
    if options.answers and not answer.is_file():
        sys.exit(f"There is no {shown(answer)}.")
    require(answer, exercise)
    print(paint(f"{exercise.number:02d} {exercise.title}", "bold"), flush=True)
    verdict = grade(exercise, answer, options.seed, show_check, meanwhile=show_running)
    pending()
    if options.answers is None:
        settle(exercise, verdict)
    show_end(exercise, verdict)
    return 0 if verdict.status == "accepted" else 1


def answer_of(exercise: Exercise, options: argparse.Namespace) -> Path:
    if options.answers is None:
        return exercise.answer
    return options.answers.resolve() / exercise.answer.name


def require(answer: Path, exercise: Exercise) -> None:
    if not answer.is_file():
        sys.exit(
            f"There is no {shown(answer)} yet. To begin it: {command('start', exercise.number)}."
        )


def check_many(some: list[Exercise], options: argparse.Namespace) -> int:
    """Grade these, a line each or as one JSON document."""
    told = []
    for exercise in some:
        answer = answer_of(exercise, options)
        verdict = Verdict(absent=True)
        if answer.is_file():
            if options.json and sys.stderr.isatty():
                print(f"checking {exercise.name}", file=sys.stderr)
            elif not options.json:
                pending(f"  {exercise.name} ...")
            verdict = grade(exercise, answer, options.seed)
        if options.answers is None:
            settle(exercise, verdict)
        told.append(
            {
                "exercise": exercise.name,
                "status": verdict.status,
                "passed": verdict.passed,
                "blocked": verdict.blocked,
                "failed": verdict.failed,
                "message": verdict.error or verdict.message,
                "seconds": verdict.seconds,
            }
        )
        if not options.json:
            show_line(told[-1])
    accepted = len([one for one in told if one["status"] == "accepted"])
    if options.json:
        print(json.dumps({"accepted": accepted, "of": len(told), "exercises": told}, indent=1))
    else:
        print(f"\n{accepted} of {len(told)} accepted")
    return 0 if accepted == len(told) else 1


def show_line(told: dict) -> None:
    """An exercise in one line, and in a second why it was not accepted."""
    pending()
    colors = {"accepted": "green", "failed": "red", "error": "red", "blocked": "yellow"}
    status = paint(f"{told['status']:8}", colors.get(told["status"], "dim"))
    print(f"{tick(told['status'] == 'accepted')} {told['exercise']:26}{status}", end="")
    print("" if told["status"] == "absent" else f"{told['seconds']:7.1f} s", flush=True)
    why = told["failed"] or told["status"] == "error"
    if why:
        first = told["message"].partition("\n")[0]
        say(f"{told['failed'] or 'the grader itself failed'}: {first}", 4)


def watch(options: argparse.Namespace) -> int:
    """Check, and again whenever the answer is saved, also in the middle, until it passes."""
    exercise = chosen(options.exercise)
    answer = exercise.answer
    require(answer, exercise)
    while True:
        saved = state_of(answer)
        clock = time.strftime("%H:%M:%S")
        print(f"\n{paint(f'{clock}  {exercise.number:02d} {exercise.title}', 'bold')}", flush=True)
        stale = partial(saved_since, answer, saved)
        verdict = grade(exercise, answer, None, show_check, stale, show_running)
        pending()
        if verdict is None:
            print("Saved meanwhile: from the start.")
            continue
        settle(exercise, verdict)
        show_end(exercise, verdict)
        if verdict.status == "accepted":
            return 0
        print(f"\nWaiting for you to save {shown(answer)}; Ctrl-C ends.", flush=True)
        while not saved_since(answer, saved):
            time.sleep(0.2)


def state_of(answer: Path) -> tuple[int, int, int] | None:
    """What differs after every save; None while there is no file, as some editors have it."""
    try:
        stat = answer.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def saved_since(answer: Path, saved: tuple | None) -> bool:
    return state_of(answer) not in (None, saved)
