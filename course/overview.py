"""`course`, `course next` and `course tick`: the path, how far one is, and where it goes on."""

import argparse
import re
import sys
import textwrap
from pathlib import Path

from course import progress
from course.book import ROOT, Exercise
from course.outline import (
    Lesson,
    book,
    exercises_after,
    exercises_of_no_lesson,
    find_lesson,
    lessons,
    paths,
    steps,
)
from course.terminal import WIDTH, command, paint, say, shown, tick


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "next",
        help="the next lesson's questions, or exercise's task",
        description="Print what comes next on the path: a lesson's questions, an exercise's task.",
    )
    parser.set_defaults(run=show_next)
    parser = commands.add_parser(
        "path",
        help="the lessons and exercises for one goal",
        description="Print the steps to one goal, with ticks; without a name, the goals.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of the goals' names")
    parser.set_defaults(run=show_path)
    parser = commands.add_parser(
        "tick",
        help="tick a lesson that you ran by torchrun or srun",
        description="Tick a lesson that you ran by hand; `run` and `predict` do it by themselves.",
    )
    parser.add_argument("lesson", metavar="NAME", help="parallelism/01, or any part of its name")
    parser.add_argument("--off", action="store_true", help="take the tick away again")
    parser.set_defaults(run=tick_lesson)


def show(options: argparse.Namespace) -> int:
    """Print the whole path, spine first, with ticks and minutes; then what comes next."""
    done = progress.read()
    marks = marks_of(done)
    ticks = len([lesson for lesson in lessons() if is_done(lesson, done)])
    counted = f"{ticks} of {len(lessons())} lessons"
    ticks = len([exercise for exercise in book() if is_done(exercise, done)])
    counted += f", {ticks} of {len(book())} exercises done"
    print(f"{paint('Distributed deep learning, by measurement', 'bold')}{counted:>57}")
    for heading, spine in (("The spine: all else builds on it", True), ("Deeper", False)):
        print(f"\n{paint(f'{heading:62}', 'bold')} minutes  exercises")
        folder = ""
        for lesson in lessons():
            if lesson.spine == spine:
                first = lesson.folder != folder
                show_lesson(lesson, first, marks, done_here(lesson, done))
                folder = lesson.folder
    for exercise in exercises_of_no_lesson():
        print(f"{'':73}{of_exercise(exercise, marks)}")
    explain_marks(done)
    print()
    print(where_to_go(done))
    print()
    for words, what in (
        (("run", "FOLDER/NN"), "runs any lesson"),
        (("start", "NN"), "begins any exercise"),
        (("path",), "lists goals, and a path to each"),
        (("--help",), "lists all commands"),
    ):
        print(f"{command(*words):{len(command('run', 'FOLDER/NN'))}}   {what}")
    return 0


def explain_marks(done: dict) -> None:
    """Say what the marks of steps mean of which something was BLOCKED, if there are any."""
    partly = [step for step in steps() if in_part(step, done)]
    here = [step for step in partly if done_here(step, done)]
    if partly:
        print()
    if here:
        print(f"{tick(True)} here  done as far as this machine can: the rest needs GPUs")
    if len(here) < len(partly):
        print(f"{tick(True, True)}       done in part: the rest was BLOCKED")


def marks_of(done: dict) -> dict[str, str]:
    """Before each step, by its name: a tick, an arrow if it comes next, or a dot."""
    marks = {step.name: "·" for step in steps()}
    for step in steps():
        if is_done(step, done):
            marks[step.name] = tick(True, in_part(step, done) and not done_here(step, done))
    coming = next_step(done)
    if coming:
        marks[coming.name] = paint("→", "bold")
    return marks


def show_lesson(lesson: Lesson, first: bool, marks: dict[str, str], here: bool) -> None:
    """One row, and another for each further exercise; `first` of its folder, it names that.

    Of a lesson that is done as far as this machine can, it says "here" and no minutes.
    """
    folder = lesson.folder if first else ""
    subject = textwrap.shorten(lesson.subject, 43, placeholder=" ...")
    minutes = "here" if here else lesson.minutes
    row = f"  {folder:15}{marks[lesson.name]} {lesson.number}  {subject:44}{minutes:>4}"
    after = exercises_after(lesson)
    if not after:
        print(row)
    for exercise in after:
        print(f"{row}  {of_exercise(exercise, marks)}")
        row = " " * 71


def of_exercise(exercise: Exercise, marks: dict[str, str]) -> str:
    words = exercise.name[3:].replace("_", " ")
    return f"{marks[exercise.name]} {exercise.number:02d} {words}"


def is_done(step: Lesson | Exercise, done: dict) -> bool:
    if isinstance(step, Lesson):
        return step.path in done["lessons"]
    return step.name in done["exercises"]


def in_part(step: Lesson | Exercise, done: dict) -> bool:
    """Whether it is done, apart from what was BLOCKED."""
    key = step.path if isinstance(step, Lesson) else step.name
    return is_done(step, done) and key in done["blocked"]


def done_here(step: Lesson | Exercise, done: dict) -> bool:
    """Whether all that was BLOCKED of it needs more GPUs than this machine has."""
    key = step.path if isinstance(step, Lesson) else step.name
    return in_part(step, done) and only_here(done["blocked"][key])


def only_here(needs: list[str]) -> bool:
    """Whether all that is needed ("2 GPUs", "nsys") is more GPUs, or nodes, than are here."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    wanted = [re.match(r"(\d+) (GPU|node)", need) for need in needs]
    return all(want and (want[2] == "node" or int(want[1]) > gpus) for want in wanted)


def next_step(done: dict) -> Lesson | Exercise | None:
    """The first step of the path that has no tick."""
    return next((step for step in steps() if not is_done(step, done)), None)


def where_to_go(done: dict) -> str:
    """What comes next, and the command to type."""
    step = next_step(done)
    if step is None:
        return f"{the_end(done)}exercises/interview_topics.md asks whether you can also say it."
    name = step.name if isinstance(step, Lesson) else f"exercise {step.number:02d}"
    what = textwrap.fill(f"Next: {name}. {step.title}", WIDTH, subsequent_indent=" " * 6)
    return f"{what}\n\n    {how_to_begin(step)}"


def how_to_begin(step: Lesson | Exercise) -> str:
    """The command to type for a step."""
    if isinstance(step, Lesson):
        return command("predict", step.name)
    return command("check" if step.answer.exists() else "start", step.number)


def the_end(done: dict) -> str:
    """What is left, if anything, when the path has been walked."""
    partly = [step.name for step in steps() if in_part(step, done)]
    if not partly:
        return "All done. "
    what = f"Done, but for what was BLOCKED in {len(partly)} of {len(steps())} steps."
    text = f"{what} On a machine that has what they need, run these again: {', '.join(partly)}."
    return f"{textwrap.fill(text, WIDTH)}\n\n"


def show_next(options: argparse.Namespace) -> int:
    step = next_step(progress.read())
    if step is None:
        print(where_to_go(progress.read()))
    elif isinstance(step, Lesson):
        print(step.task)
        print(f"\nThe lesson: {shown(step.file)}")
        print(f"{command('predict', step.name)} asks these questions, then runs it.")
    else:
        show_task(step)
    return 0


def show_task(exercise: Exercise) -> None:
    """Print an exercise's README, and the command to type."""
    print(exercise.readme.strip())
    verb = "check" if exercise.answer.exists() else "start"
    print(f"\nYour file: {shown(exercise.answer)}\n\n    {command(verb, exercise.number)}")


def show_path(options: argparse.Namespace) -> int:
    """Print the steps to one goal, how far they are done, and which is next; or all goals."""
    if options.name is None:
        print(f"{'name':12}{'goal':48}{'lessons':>8}{'hours':>7}{'exercises':>11}")
        for path in paths():
            n = len(path.lessons)
            row = f"{path.name:12}{path.goal:48}{n:8}{path.hours:>7}{len(path.steps) - n:11}"
            print(row)
        print(f"\n{command('path', 'NAME')}   shows the steps")
        return 0
    named = {path.name: path for path in paths()}
    if options.name not in named:
        sys.exit(f"There is no path {options.name!r}; they are {', '.join(named)}.")
    path = named[options.name]
    done = progress.read()
    marks = {step.name: tick(is_done(step, done), in_part(step, done)) for step in path.steps}
    left = [step for step in path.steps if not is_done(step, done)]
    print(paint(f"{path.goal[0].upper()}{path.goal[1:]}", "bold") + f": {path.hours} hours\n")
    for step in path.steps:
        if isinstance(step, Lesson):
            subject = textwrap.shorten(step.subject, 55, placeholder=" ...")
            print(f"  {marks[step.name]} {step.name:18}{subject:56}{step.minutes:>4} minutes")
        else:
            print(
                f"  {marks[step.name]} {'exercise ' + step.name[:2]:18}{step.title.split(':')[0]}"
            )
    print(f"\nRead along: {shown(ROOT / path.page.partition('#')[0])}")
    if left:
        print(f"\nNext: {how_to_begin(left[0])}")
    return 0


def tick_lesson(options: argparse.Namespace) -> int:
    lesson = find_lesson(options.lesson)
    if options.off:
        progress.forget("lessons", lesson.path)
        progress.forget("blocked", lesson.path)
        print(f"No tick at {lesson.name} any more.")
    else:
        progress.settle("lessons", lesson.path, [])
        say(f"{tick(True)} {lesson.name}. {lesson.title}")
    return 0
