"""Write the tables of the READMEs from what was measured.

What stands between `<!-- NAME -->` and `<!-- /NAME -->` is made here from course/lessons.toml, the
lessons and results/ (`make results`, `course write tables`); nobody types a figure.
"""

import re
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from course import outline
from course.book import exercises as book
from course.lessons import FOLDERS, LESSONS, ROOT, world_sizes_of
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

READMES = [ROOT / name for name in ("README.md", "results/README.md", "exercises/README.md")]
SAMPLE = "parallelism/01_data_parallelism_ddp.py"


def exercise_links(lesson: Lesson) -> str:
    return ", ".join(f"[{name[:2]}](exercises/{name})" for name in lesson.exercises)


def sample(most: int = 8) -> str:
    """The first rows of a ledger, as the lesson printed them."""
    from course import plumbing  # loads torch

    rows = [row for row in ledger_of(SAMPLE)["ledger"] if row["verdict"] == "PASS"][:most]
    with redirect_stdout(StringIO()) as out:
        print(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
        for row in rows:
            keys = [row[key] for key in ("claim", "predicted", "measured", "sign", "slack")]
            kind = row.get("kind", "measured")
            plumbing.claim(*keys, question=row.get("question"), kind=kind)
    return f"```\n{out.getvalue()}```"


def lessons_where(spine: bool) -> str:
    rows = ["| Lesson | The question it answers | Minutes | Exercise |", "|---|---|--:|---|"]
    for lesson in outline.lessons():
        if lesson.spine == spine:
            link = f"[{lesson.path.removesuffix('.py')}]({lesson.path})"
            links = exercise_links(lesson)
            rows.append(f"| {link} | {lesson.question} | {lesson.minutes} | {links} |")
    return "\n".join(rows)


def spine() -> str:
    """The six lessons that all others build on."""
    return lessons_where(spine=True)


def deeper() -> str:
    """All other lessons."""
    return lessons_where(spine=False)


def exercises() -> str:
    """Each exercise, the lines of its hole, and how many mistakes its grader is known to tell."""
    rows = ["| Exercise | Lines to write | Wrong answers told apart |", "|---|--:|--:|"]
    for one in book():
        link = f"[{one.number:02d}]({one.name}) {one.title}"
        rows.append(f"| {link} | {sum(one.holes)} | {len(one.mistakes())} |")
    return "\n".join(rows)


def counts() -> str:
    """One sentence of figures: what there is, and how much of it held when it was measured."""
    found = Counter()
    for lesson in LESSONS:
        found.update(counted(ledger_of(lesson)["ledger"]))
    every = book()
    known = sum(len(one.mistakes()) for one in every)
    claims = f"{found['PASS']} measured claims PASS, {found['FAIL']} FAIL"
    if apart := [f"{found[kind]} {kind}" for kind in ("simulated", "theory") if found[kind]]:
        claims += f", {' and '.join(apart)} apart,"
    waiting = f"{found['BLOCKED']} are BLOCKED, for want of GPUs mostly"
    asked = re.findall(r"^\*\*\d+\. ", (ROOT / "exercises/interview_topics.md").read_text(), re.M)
    return (
        f"{len(LESSONS)} lessons, in which {claims} and {waiting} ([results](results/README.md)) · "
        f"{len(every)} exercises, whose graders tell {known} known mistakes apart · "
        f"{len(asked)} interview questions."
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
            rows.append(f"- [{lesson.path}](lessons/{name}): {lesson.title}")
    return "\n".join(rows)


def speed() -> str:
    return speeds(ROOT / "results/bench/bench.json")


def minutes() -> str:
    """What each folder takes, spine and deeper."""
    rows = ["| Folder | Lessons | Hours |", "|---|--:|--:|"]
    for folder in FOLDERS:
        times = [lesson.minutes for lesson in outline.lessons() if lesson.folder == folder]
        rows.append(f"| [{folder}]({folder}/README.md) | {len(times)} | {sum(times) / 60:.1f} |")
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
    return bool(re.search(r"[=(] ?setup\(\)", (ROOT / lesson).read_text()))


TABLES = (sample, counts, spine, deeper, minutes, exercises, results, figures, speed, gpus)


def written(readme: Path) -> str:
    """A README with every table made anew."""
    text = readme.read_text()
    for table in TABLES:
        name = table.__name__
        if f"<!-- {name} -->" in text:
            before, rest = text.split(f"<!-- {name} -->\n")
            after = rest.split(f"<!-- /{name} -->")[1]
            text = f"{before}<!-- {name} -->\n{table()}\n<!-- /{name} -->{after}"
    return text


def told_of_gpus(lesson: str) -> str:
    """The lesson's source; its docstring says whether several GPUs have run it."""
    source = (ROOT / lesson).read_text()
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
    changed = [path for path, text in texts.items() if path.read_text() != text]
    for path in changed:
        path.write_text(texts[path])
    return [str(path.relative_to(ROOT)) for path in changed]
