"""`course run` and `course predict`: run a lesson; ask its questions first, and compare."""

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from course import progress
from course.outline import Lesson, find_lesson
from course.overview import only_here, where_to_go
from course.terminal import end, paint, say, shown, tick

NAME = {"metavar": "NAME", "help": "parallelism/01, or any part of its name"}
FLAGS = {"metavar": "...", "nargs": argparse.REMAINDER, "help": "flags of the lesson's own"}


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "predict",
        help="answer a lesson's questions, run it, compare",
        description="Ask the lesson's questions one by one, run it, and show your answers next to "
        "what was predicted and measured. Answers are kept, and can be changed the next time.",
    )
    parser.add_argument("lesson", **NAME)
    parser.add_argument("flags", **FLAGS)
    parser.set_defaults(run=predict)
    parser = commands.add_parser(
        "run",
        help="run a lesson",
        description="Run a lesson with this Python; tick it if all its claims hold.",
    )
    parser.add_argument("lesson", **NAME)
    parser.add_argument("flags", **FLAGS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    lesson = find_lesson(options.lesson)
    status, ledger = play(lesson, options.flags)
    if ledger and status == 0:
        print()
        say_done(lesson, ledger)
        print(where_to_go(progress.read()))
    return status


def say_done(lesson: Lesson, ledger: list[dict]) -> None:
    needs = blocked_in(ledger)
    say(f"{tick(True, not only_here(needs))} {lesson.name} is done{in_part(needs)}.")


def in_part(needs: list[str]) -> str:
    """What was BLOCKED, if anything, to be said of a lesson that is done."""
    if not needs:
        return ""
    claims = "1 claim is" if len(needs) == 1 else f"{len(needs)} claims are"
    how = "as far as this machine can" if only_here(needs) else "in part"
    return f" {how}: {claims} BLOCKED for want of {', '.join(dict.fromkeys(needs))}"


def blocked_in(ledger: list[dict]) -> list[str]:
    return [row["needs"] for row in ledger if row["verdict"] == "BLOCKED"]


def play(lesson: Lesson, flags: list[str]) -> tuple[int, list[dict]]:
    """Run a lesson as one would by hand; tick it if all its claims hold. Returns its exit status,
    and its ledger, which is empty if it was ended early or asked for --help.
    """
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no torch; in the course's folder: pip install -e .")
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        kept = Path(os.environ.get("LESSON_JSON", f"{folder}/ledger.json"))
        kept.unlink(missing_ok=True)
        environment = os.environ | {"LESSON_JSON": str(kept)}
        argv = [sys.executable, shown(lesson.file), *flags]
        ours, theirs = channel()
        process = subprocess.Popen(argv, env=environment, stderr=theirs)
        os.close(theirs)
        interrupted = threading.Event()
        passing = threading.Thread(target=pass_on, args=(ours, interrupted), daemon=True)
        passing.start()
        try:
            status = process.wait()
        except KeyboardInterrupt:
            interrupted.set()
            end(process, patience=2)  # Ctrl-C has reached it, too
            print(f"\nEnded by Ctrl-C: {lesson.name} gets no tick.", file=sys.stderr)
            sys.exit(130)
        finally:
            end(process, patience=2)
        passing.join(2)  # no longer, should something that outlives the lesson hold its end open
        ledger = json.loads(kept.read_text(encoding="utf-8"))["ledger"] if kept.exists() else []
    if ledger and status == 0:
        progress.settle("lessons", lesson.path, blocked_in(ledger))
    return (128 - status if status < 0 else status), ledger


def channel() -> tuple[int, int]:
    """Our end and the lesson's of what carries its errors: a terminal if ours go to one, for then
    lessons show their progress.
    """
    if not os.isatty(2):
        return os.pipe()
    import termios  # Windows, where the course says WSL2, has neither
    import tty

    ours, theirs = os.openpty()
    tty.setraw(theirs)
    termios.tcsetwinsize(theirs, termios.tcgetwinsize(2))
    return ours, theirs


def pass_on(errors: int, interrupted: threading.Event) -> None:
    """Print what the lesson prints as errors, at once; nothing more after Ctrl-C, at which every
    process that loads torch just then says where it was.
    """
    while said := read_from(errors):
        if b"Traceback" in said or b"Fatal Python error" in said:
            interrupted.wait(2)  # perhaps we have not heard of Ctrl-C yet
        if not interrupted.is_set():
            os.write(2, said)


def read_from(descriptor: int) -> bytes:
    """What came there; nothing when the other end is closed, which a terminal calls an error."""
    with contextlib.suppress(OSError):
        return os.read(descriptor, 65_536)
    return b""


def predict(options: argparse.Namespace) -> int:
    lesson = find_lesson(options.lesson)
    print(f"{paint(lesson.title, 'bold')}\n")
    answers = ask(lesson)
    print(paint(f"{shown(lesson.file)} runs now (a minute or less).", "bold"), flush=True)
    print(flush=True)
    status, ledger = play(lesson, options.flags)
    if not ledger:
        print(f"\nThe lesson ended with status {status} and no ledger: nothing to compare.")
        return status
    compare(lesson, answers, ledger)
    if status == 0:
        say_done(lesson, ledger)
    print(where_to_go(progress.read()))
    return status


def ask(lesson: Lesson) -> dict[str, str]:
    """Ask every question; return what was answered, now or earlier, by the question's number.

    Each answer is kept as it is given; "b" asks the question before again. At the end of input,
    what is left is skipped.
    """
    first, questions = lesson.predict
    answers = progress.read()["predictions"].get(lesson.path, {})
    if first:
        say(" ".join(first.split()))
        print()
    say("Guess: you need not have read the lesson.")
    say(
        "Enter skips a question, or keeps your earlier answer. b goes back to the question before. "
        "Ctrl-D skips the rest."
    )
    print()
    numbers = list(questions)
    at = 0
    while at < len(numbers):
        number = numbers[at]
        print(numbered(number, questions[number]))
        earlier = answers.get(str(number), "")
        try:
            answer = input(f"   [{earlier}] > " if earlier else "   > ").strip()
        except EOFError:
            print("\n\nThe input has ended: the other questions are skipped.\n")
            break
        print()
        if answer.lower() == "b":
            at = max(at - 1, 0)
            continue
        at += 1
        if answer:
            answers = answers | {str(number): answer}
            progress.remember("predictions", lesson.path, answers)
    return answers


def numbered(number: int, question: str) -> str:
    return f"{number}. " + question.replace("\n", "\n   ")


def compare(lesson: Lesson, answers: dict[str, str], ledger: list[dict]) -> None:
    """Each question, your answer, and beneath it the claims that answer it; you say who was right.

    A row says FAIL if the lesson's own prediction failed, and nothing if it held: PASS under a
    wrong guess would read as praise.
    """
    judged = []
    seen = lesson.seen
    print("\n" + paint("Yours next to what was predicted and measured", "bold"))
    for number, question in lesson.predict[1].items():
        print(f"\n{numbered(number, question)}\n")
        yours = answers.get(str(number), "no answer")
        say(f"you      {paint(yours, 'bold')}", 3)
        rows = [row for row in ledger if row.get("question") == number]
        if rows:
            print(f"{'':62}{'predicted':22}{'measured':>14}")
        else:
            print("   No claim of this run answers it.")
        for row in rows:
            show(row)
        if rows and str(number) in answers:
            judged.append(was_right())
        if number in seen:
            print(f"\n   {paint('Why', 'bold')}")
            say(seen[number], 3)
    judged = [said for said in judged if said]
    if judged:
        partly = f", partly in {judged.count('p')}" if "p" in judged else ""
        right = judged.count("y")
        print(f"\nBy your own judgment you were right in {right} of {len(judged)}{partly}.")
    blocked = [row for row in ledger if row["verdict"] == "BLOCKED"]
    if blocked:
        print("\nThis machine cannot say:")
    for row in blocked:
        say(f"BLOCKED  {row['claim']} (needs {row['needs']})", 3)
    print(f"\nNow read {shown(lesson.file)}, then break what its **Try** names.\n")


def what_was_seen(lesson: Lesson) -> str:
    """File and line where a lesson says what one should have seen."""
    before = lesson.file.read_text(encoding="utf-8").partition("What you should have seen")[0]
    return f"{shown(lesson.file)}:{before.count(chr(10)) + 1}"


def was_right() -> str:
    """What the learner says of the guess: y, n, p for partly, or nothing. Keys typed earlier do not
    count.
    """
    try:
        while True:
            forget_what_was_typed()
            said = input("   Were you right: y, n or p (partly)? > ").strip().lower()
            if said in ("", "y", "yes", "n", "no", "p", "partly"):
                return said[:1]
    except EOFError:
        print()
        return ""


def forget_what_was_typed() -> None:
    """Drop what was typed while the lesson ran, if this is a terminal."""
    if sys.stdin.isatty():
        import termios

        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def show(row: dict) -> None:
    """A claim as the lesson's ledger has it."""
    verdict = paint("FAIL   ", "red") if row["verdict"] == "FAIL" else "       "
    between = f"{row['sign']:>2} {readable(row['predicted'])}"
    if row["slack"]:
        between += f" ±{row['slack']:.2g}"
    measured = readable(row["measured"])
    print(f"   {verdict}  {row['claim']:50}{between:22}{measured:>14}")


def readable(x: float | str) -> str:
    """Whole numbers in full, others to six digits; what JSON cannot hold is text already."""
    x = float(x)
    return f"{x:,.0f}" if x.is_integer() and abs(x) < 1e12 else f"{x:,.6g}"
