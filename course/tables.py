"""Write the tables of the READMEs, and each lesson's seconds, from what was measured.

What stands between `<!-- NAME -->` and `<!-- /NAME -->` is made here from course/lessons.toml, the
lessons and results/ (`make results`, `course write tables`); nobody types a figure.
"""

import json
import re
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median

from course import outline, plumbing
from course.book import exercises as book
from course.lessons import FOLDERS, LESSONS, ROOT
from course.outline import Lesson

READMES = [ROOT / name for name in ("README.md", "results/README.md", "exercises/README.md")]
SAMPLE = "parallelism/01_data_parallelism_ddp.py"


def ledger_of(lesson: str) -> dict:
    path = ROOT / "results/lessons" / (lesson.replace("/", "_").removesuffix(".py") + ".json")
    return json.loads(path.read_text()) if path.exists() else {"ledger": [], "seconds": None}


def exercise_links(lesson: Lesson) -> str:
    return ", ".join(f"[{name[:2]}](exercises/{name})" for name in lesson.exercises)


def sample(most: int = 8) -> str:
    """The first rows of a ledger, as the lesson printed them."""
    rows = [row for row in ledger_of(SAMPLE)["ledger"] if row["verdict"] == "PASS"][:most]
    with redirect_stdout(StringIO()) as out:
        print(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
        for row in rows:
            keys = [row[key] for key in ("claim", "predicted", "measured", "sign", "slack")]
            plumbing.claim(*keys, question=row.get("question"))
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
    verdicts = Counter()
    for lesson in LESSONS:
        verdicts.update(row["verdict"] for row in ledger_of(lesson)["ledger"])
    every = book()
    known = sum(len(one.mistakes()) for one in every)
    claims = f"{verdicts['PASS']} claims PASS, {verdicts['FAIL']} FAIL"
    waiting = f"{verdicts['BLOCKED']} are BLOCKED, for want of GPUs mostly"
    asked = re.findall(r"^\*\*\d+\. ", (ROOT / "exercises/interview_topics.md").read_text(), re.M)
    return (
        f"{len(LESSONS)} lessons, in which {claims} and {waiting} ([results](results/README.md)) · "
        f"{len(every)} exercises, whose graders tell {known} known mistakes apart · "
        f"{len(asked)} interview questions."
    )


def results() -> str:
    """One row per lesson: how many claims held, and in how many seconds."""
    rows = ["| Lesson | Verdict | PASS | FAIL | BLOCKED | Seconds | Ranks | torch | Date |"]
    rows += ["|---|---|--:|--:|--:|--:|--:|---|---|"]
    for lesson in LESSONS:
        told = ledger_of(lesson)
        verdicts = [row["verdict"] for row in told["ledger"]]
        counts = " | ".join(str(verdicts.count(v)) for v in ("PASS", "FAIL", "BLOCKED"))
        kept = "MISSED" if "FAIL" in verdicts or "PASS" not in verdicts else "KEPT"
        setting = " | ".join(
            str(told.get(key, "")) for key in ("seconds", "ranks", "torch", "date")
        )
        rows.append(f"| {lesson} | {kept} | {counts} | {setting} |")
    return "\n".join(rows)


def figures() -> str:
    """Every figure that a lesson saved."""
    rows = []
    for lesson in outline.lessons():
        name = lesson.path.replace("/", "_").removesuffix(".py") + ".png"
        if (ROOT / "results/lessons" / name).exists():
            rows.append(f"- [{lesson.path}](lessons/{name}): {lesson.title}")
    return "\n".join(rows)


def speed() -> str:
    path = ROOT / "results/bench/bench.json"
    bench = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = ["| Verdict | Ours against | Setting | Ours, ms | Peer, ms | Ratio (quartiles) | Aim |"]
    rows += ["|---|---|---|--:|--:|--:|--:|"]
    for row in bench["rows"]:
        kept = "KEPT" if row["ratio"] <= row["aim"] else "MISSED"
        times = f"{1e3 * median(row['ours']):.1f} | {1e3 * median(row['peer']):.1f}"
        ratio = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        setting = f"{row['name']} | {row['setting']} | {times} | {ratio} | {row['aim']:.2f}"
        rows.append(f"| {kept} | {setting} |")
    return "\n".join(rows)


def minutes() -> str:
    """What each folder takes, spine and deeper."""
    rows = ["| Folder | Lessons | Hours |", "|---|--:|--:|"]
    for folder in FOLDERS:
        times = [lesson.minutes for lesson in outline.lessons() if lesson.folder == folder]
        rows.append(f"| [{folder}]({folder}/README.md) | {len(times)} | {sum(times) / 60:.1f} |")
    return "\n".join(rows)


TABLES = (sample, counts, spine, deeper, minutes, exercises, results, figures, speed)


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


def timed(lesson: str) -> str:
    """The lesson's source; where its docstring says how long it takes, the seconds measured."""
    source = (ROOT / lesson).read_text()
    seconds = ledger_of(lesson)["seconds"]
    if seconds is None:
        return source
    return re.sub(r"Takes \d+ s", f"Takes {seconds:.0f} s", source, count=1)


def write() -> list[str]:
    """Write all tables and seconds anew; return the paths of the files that changed."""
    texts = {readme: written(readme) for readme in READMES}
    texts |= {ROOT / lesson: timed(lesson) for lesson in LESSONS}
    changed = [path for path, text in texts.items() if path.read_text() != text]
    for path in changed:
        path.write_text(texts[path])
    return [str(path.relative_to(ROOT)) for path in changed]
