"""Write the tables of the READMEs from what was measured.

What stands between `<!-- NAME -->` and `<!-- /NAME -->` is made here from course/lessons.toml, the
lessons and results/ (`make results`, `course write tables`); nobody types a figure. A table's links
begin at the repository's root; `written` makes them relative to the README that holds the table.
"""

import json
import os.path
import re
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import median

from course import outline
from course.book import exercises as book
from course.lessons import ABOUT, FOLDERS, LESSONS, ROOT, world_sizes_of
from course.machines import (
    COUNTED,
    counted,
    ledger_of,
    machines,
    name_of,
    only_on_gpus,
    page,
    ran_on_several_gpus,
    speeds,
)
from course.outline import Lesson

READMES = [ROOT / name / "README.md" for name in ("", "results", "exercises", *FOLDERS)]

# README's ledger: the rows that its figure shows as areas, and what they need a GPU for.
SAMPLE = "profiling/05_memory.py"
ROWS = (
    "many tokens, 4 micro-batches: saves, per P",
    "few tokens, 4 micro-batches: saves, per P",
    "shard: bytes sent / the plain step's",
    "peak, ms and reserved bytes of each cure",
)
ABOUT_FOLDERS = {
    "fundamentals": "the machine, links, launching ranks, nodes, surviving failures",
    "communication": "collectives, what they cost, and how to pay less",
    "parallelism": "the five parallelisms by hand; which one you need",
    "fsdp": "FSDP2 and DeepSpeed: memory, checkpoints, LoRA, inference, offload",
    "profiling": "where the time and the memory go; hangs, stragglers",
    "data-loading": "what a DataLoader costs, and FFCV",
}


def exercise_links(lesson: Lesson) -> str:
    return ", ".join(f"[{name[:2]}](exercises/{name})" for name in lesson.exercises)


def sample() -> str:
    """Rows of a ledger, as the lesson printed them."""
    from course import plumbing  # loads torch

    found = {row["claim"]: row for row in ledger_of(SAMPLE)["ledger"]}
    with redirect_stdout(StringIO()) as out:
        print(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
        for claim in ROWS:
            if claim not in found:
                raise ValueError(f"README shows {claim!r}, and {SAMPLE} has no such row: see ROWS")
            row = found[claim]
            if row["verdict"] == "BLOCKED":
                plumbing.blocked(claim, needs=row["needs"])
            else:
                keys = [row[key] for key in ("claim", "predicted", "measured", "sign", "slack")]
                plumbing.claim(*keys, question=row["question"], kind=row["kind"])
    return f"```\n{out.getvalue()}```"


def spine() -> str:
    """The six lessons that all others build on, in a few words each."""
    rows = ["| Lesson | What it answers | Minutes | Exercises |", "|---|---|--:|---|"]
    for lesson in outline.lessons():
        if lesson.spine:
            link = f"[{ABOUT[lesson.path]['idea']}]({lesson.path})"
            numbers = ", ".join(name[:2] for name in lesson.exercises)
            rows.append(f"| {lesson.name} | {link} | {lesson.minutes} | {numbers} |")
    return "\n".join(rows)


def paths() -> str:
    """The paths by goal, the spine apart: how much each holds, and what prints it."""
    rows = ["| Your goal | Lessons | Hours | Exercises | Step by step |", "|---|--:|--:|--:|---|"]
    for path in outline.paths():
        if not all(lesson.spine for lesson in path.lessons):
            n = len(path.lessons)
            cells = [f"[{path.goal}]({path.page})", n, path.hours, len(path.steps) - n]
            rows.append(f"| {' | '.join(map(str, cells))} | `course path {path.name}` |")
    return "\n".join(rows)


def lessons_in(folder: str) -> str:
    """A folder's lessons: the question, the minutes, the figure and the exercises of each."""
    rows = ["| Lesson | The question it answers | Minutes | Exercises |", "|---|---|--:|---|"]
    for lesson in outline.lessons():
        if lesson.folder == folder:
            link = f"[{lesson.file.stem}]({lesson.path})" + (", spine" if lesson.spine else "")
            figure = f"results/lessons/{name_of(lesson.path)}.png"
            shown = f" ([figure]({figure}))" if (ROOT / figure).exists() else ""
            cells = [link, lesson.question + shown, str(lesson.minutes), exercise_links(lesson)]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def exercises() -> str:
    """Each exercise, the lines of its hole, and how many mistakes its grader is known to tell."""
    rows = ["| Exercise | Lines to write | Wrong answers told apart |", "|---|--:|--:|"]
    for one in book():
        link = f"[{one.number:02d}](exercises/{one.name}) {one.title}"
        rows.append(f"| {link} | {sum(one.holes)} | {len(one.mistakes())} |")
    return "\n".join(rows)


def held() -> str:
    """How many rows of all ledgers held, when they were measured."""
    found = Counter()
    for lesson in LESSONS:
        found.update(counted(ledger_of(lesson)["ledger"]))
    return (
        f"{found['PASS']} measured claims PASS and {found['FAIL']} FAIL; counted apart, "
        f"{found['simulated']} are simulated and {found['theory']} theory; "
        f"{found['BLOCKED']} are BLOCKED, most of them for lack of GPUs."
    )


def ran() -> str:
    """On which GPUs the course was run: the first thing that a reader with GPUs asks."""
    links = []
    for one in machines():
        if any(ran_on_several_gpus(lesson, [one]) for lesson in LESSONS):
            links.append(f"[{one.name}](results/{one.name}/README.md)")
    first = "[be the first](results/README.md#on-gpus)"
    where = f"**Run so far on CPUs, not yet on several GPUs: {first}.**"
    if links:
        where = f"Run on several GPUs so far: {', '.join(links)}."
    return (
        f"{where} On GPUs\n`make gpu` says how long it takes, then runs the lessons on 1, 2, "
        "4 and 8 GPUs; send the folder of results."
    )


def results() -> str:
    """One row per lesson: how many claims held, and in how many seconds."""
    rows = [f"| Lesson | Verdict | {' | '.join(COUNTED)} | Seconds | Ranks | torch | Date |"]
    rows += ["|---|---|--:|--:|--:|--:|--:|--:|--:|---|---|"]
    for lesson in LESSONS:
        told = ledger_of(lesson)
        found = counted(told["ledger"])
        counts = " | ".join(str(found[how]) for how in COUNTED)
        kept = "MISSED" if found["FAIL"] or not found["PASS"] else "KEPT"
        setting = " | ".join(
            str(told.get(key, "")) for key in ("seconds", "ranks", "torch", "date")
        )
        rows.append(f"| {lesson} | {kept} | {counts} | {setting} |")
    return "\n".join(rows)


def figures() -> str:
    """Every figure that a lesson saved."""
    rows = []
    for lesson in outline.lessons():
        name = f"{name_of(lesson.path)}.png"
        if (ROOT / "results/lessons" / name).exists():
            rows.append(f"- [{lesson.path}](results/lessons/{name}): {lesson.title}")
    return "\n".join(rows)


def speed() -> str:
    return speeds(ROOT / "results/bench/bench.json")


def folders() -> str:
    """What each folder holds, how much of it, and the hours of the lessons."""
    rows = ["| Folder | What it holds | Lessons | Hours |", "|---|---|--:|--:|"]
    for folder in FOLDERS:
        times = [lesson.minutes for lesson in outline.lessons() if lesson.folder == folder]
        link = f"[{folder}]({folder}/README.md)"
        hours = f"{sum(times) / 60:.1f}"
        rows.append(f"| {link} | {ABOUT_FOLDERS[folder]} | {len(times)} | {hours} |")
    every = book()
    known = sum(len(one.mistakes()) for one in every)
    tasks = f"{len(every)} tasks; graders recognize {known} different mistakes"
    rows.append(f"| [exercises](exercises/README.md) | {tasks} | | |")
    return "\n".join(rows)


def gpus() -> str:
    """What each lesson measures on 0, 1, 2 and 8 GPUs, and where it passed on how many."""
    every = machines()
    if not any(ran_on_several_gpus(lesson, every) for lesson in LESSONS):
        rows = ["No lesson has been run on several GPUs yet.", ""]
    else:
        links = [f"[{one.name}](results/{one.name}/README.md)" for one in every]
        rows = [f"Run so far on: {', '.join(links)}.", ""]
    rows += ["| Lesson | 0 GPUs | 1 GPU | 2 GPUs | 8 GPUs | Passed on GPUs |"]
    rows += ["|---|---|---|---|---|---|"]
    for lesson in outline.lessons():
        found = counted(ledger_of(lesson.path)["ledger"])
        cells = [f"[{lesson.name}]({lesson.path})", f"{found['PASS']} claims"]
        cells += on_gpus(lesson.path)
        passed = {one.name: ", ".join(map(str, one.passed_on(lesson.path))) for one in every}
        cells.append("; ".join(f"{name}: {sizes}" for name, sizes in passed.items() if sizes))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def on_gpus(lesson: str) -> list[str]:
    """What 1, 2 and 8 GPUs bring: the mark of the same claims, and what is measured only there."""
    sizes = world_sizes_of(lesson)
    mark = "●" if uses_device(lesson) and sizes != [1] else "○"
    claims = only_on_gpus(lesson)
    cells = []
    waiting = []  # for a number of ranks that the lesson takes
    for size in (1, 2, 8):
        waiting += dict.fromkeys(claims.get(size, []))
        if size in sizes or sizes == [1]:
            cells.append(" ".join([mark, "; ".join(waiting)]).strip())
            waiting = []
        else:
            cells.append("no")
    return cells


def uses_device(lesson: str) -> bool:
    """Whether a lesson takes from `setup()` the device, to put tensors there."""
    return bool(re.search(r"[=(] ?setup\(\)", (ROOT / lesson).read_text(encoding="utf-8")))


def planned() -> str:
    """The guide's scenarios, and what its advice costs."""
    from course.plan_scenarios import advice, scenarios

    return f"{scenarios()}\n\n{advice()}"


def loaders() -> str:
    """Every loader of images on 1, 2 and 4 ranks: benchmarks/loaders.py."""
    found = json.loads((ROOT / "results/bench/loaders.json").read_text())
    head = "Loader | Ranks | Images/s | ms of a core | Limit | Own MB | First batch, s"
    head += " | Twice | Again"
    rows = [f"| {head} |", "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for row in found["rows"]:
        speed = f"{1e3 / median(row['wall_ms']):,.0f} | {median(row['core_ms']):.2f}"
        speed += f" | {row['share']:.0%}"
        rest = f"{row['own_mb']:.0f} | {row['first_s']:.1f} | {row['twice']} | {row['again']}"
        rows.append(f"| {row['loader']} | {row['ranks']} | {speed} | {rest} |")
    rows += ["", "| Alone in one thread | ms of a core per image |", "|---|--:|"]
    rows += [f"| {name} | {ms:.2f} |" for name, ms in found["limits"].items()]
    return "\n".join(rows)


MADE = (ran, sample, spine, paths, folders, exercises, held, results, figures, gpus, speed)
MADE += (planned, loaders)
TABLES: dict[str, Callable[[], str]] = {table.__name__: table for table in MADE}
TABLES |= {folder: partial(lessons_in, folder) for folder in FOLDERS}


def written(readme: Path) -> str:
    """A README with every table made anew."""
    text = readme.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        if f"<!-- {name} -->" in text:
            before, rest = text.split(f"<!-- {name} -->\n")
            after = rest.split(f"<!-- /{name} -->")[1]
            made = seen_from(readme.parent, table())
            text = f"{before}<!-- {name} -->\n{made}\n<!-- /{name} -->{after}"
    return text


def seen_from(folder: Path, table: str) -> str:
    """A table whose links begin at the repository's root, with links that begin at `folder`."""

    def link(found: re.Match) -> str:
        path = os.path.relpath(ROOT / found[1], folder)
        return f"]({path}{found[2]})"

    return re.sub(r"\]\(([^)#:]+)(#[^)]*|)\)", link, table)


def told_of_gpus(lesson: str) -> str:
    """The lesson's source; its docstring says whether several GPUs have run it."""
    source = (ROOT / lesson).read_text(encoding="utf-8")
    run = "Run" if ran_on_several_gpus(lesson) else "Not run"
    return re.sub(r"(Not run|Run) on several(?=\sGPUs)", f"{run} on several", source, count=1)


def write() -> list[str]:
    """Write all tables anew; return the paths of the files that changed."""
    texts = {readme: written(readme) for readme in READMES}
    texts |= {ROOT / lesson: told_of_gpus(lesson) for lesson in LESSONS}
    every = machines()
    for machine in every:
        others = [other for other in every if other != machine]
        texts[machine.folder / "README.md"] = page(machine, others)
    changed = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    for path in changed:
        path.write_text(texts[path], encoding="utf-8")
    return [str(path.relative_to(ROOT)) for path in changed]
