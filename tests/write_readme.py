"""Write README's tables, and each lesson's seconds, from what was measured: `make results`.

What stands between `<!-- NAME -->` and `<!-- /NAME -->` in README.md is made here from the lessons
and from results/; nobody types a figure.
"""

import ast
import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median

from exercises.book import exercises as book
from tests import plumbing
from tests.lessons import LESSONS, ROOT

README = ROOT / "README.md"


def ledger_of(lesson: str) -> dict:
    path = ROOT / "results/lessons" / (lesson.replace("/", "_").removesuffix(".py") + ".json")
    return json.loads(path.read_text()) if path.exists() else {"ledger": [], "seconds": "?"}


def section(lesson: str, name: str) -> str:
    """The paragraph of a lesson's docstring that opens with **name.**, on one line."""
    doc = ast.get_docstring(ast.parse((ROOT / lesson).read_text()))
    match = re.search(rf"\*\*{name}\.?\*\*(.+?)(?:\n\n|\Z)", doc, re.DOTALL)
    return " ".join(match[1].split()) if match else ""


def needs(lesson: str) -> str:
    rows = [row for row in ledger_of(lesson)["ledger"] if row["verdict"] == "BLOCKED"]
    gpu = sum("GPU" in row["needs"] for row in rows)
    return f"no; {gpu} more claim{'s' * (gpu > 1)} with GPUs" if gpu else "no"


def exercises_after(lesson: str) -> list[str]:
    return re.findall(r"exercises/\w+", section(lesson, "Next"))


def exercise(lesson: str) -> str:
    return ", ".join(f"[{path[10:12]}]({path})" for path in exercises_after(lesson))


def sample(lesson: str = "parallelism/01_data_parallelism_ddp.py", most: int = 8) -> str:
    """The first rows of a ledger, as the lesson printed them."""
    rows = [row for row in ledger_of(lesson)["ledger"] if row["verdict"] == "PASS"][:most]
    with redirect_stdout(StringIO()) as out:
        print(f"{'':10}{'claim':55} {'predicted':20} measured")
        for row in rows:
            keys = row["claim"], row["predicted"], row["measured"], row["sign"], row["slack"]
            plumbing.claim(*keys)
    return f"```\n{out.getvalue()}```"


def lessons() -> str:
    rows = ["| Lesson | The question it answers | Seconds | Needs a GPU? | Exercise |"]
    rows += ["|---|---|---:|---|---|"]
    for lesson in LESSONS:
        seconds = ledger_of(lesson)["seconds"]
        question = section(lesson, "Question")
        link = f"[{lesson}]({lesson})"
        rows.append(f"| {link} | {question} | {seconds} | {needs(lesson)} | {exercise(lesson)} |")
    return "\n".join(rows)


def exercises() -> str:
    """Each exercise, the lines of its hole, and how many mistakes its grader is known to tell."""
    rows = ["| Exercise | Lines to write | Wrong answers told apart |", "|---|--:|--:|"]
    for one in book():
        wrong = len([*(ROOT / "tests/wrong_answers" / one.name).glob("*.py")])
        link = f"[{one.number:02d}]({one.name}) {one.title}"
        rows.append(f"| {link} | {sum(one.holes)} | {wrong} |")
    return "\n".join(rows)


def results() -> str:
    """One row a lesson: how many claims held, and one of them as the lesson's headline."""
    rows = [
        "| Lesson | PASS | FAIL | BLOCKED | Ranks | torch | Date |",
        "|---|--:|--:|--:|--:|---|---|",
    ]
    for lesson in LESSONS:
        told = ledger_of(lesson)
        verdicts = [row["verdict"] for row in told["ledger"]]
        counts = " | ".join(str(verdicts.count(v)) for v in ("PASS", "FAIL", "BLOCKED"))
        setting = " | ".join(str(told.get(key, "")) for key in ("ranks", "torch", "date"))
        rows.append(f"| {lesson} | {counts} | {setting} |")
    return "\n".join(rows)


def speed() -> str:
    path = ROOT / "results/bench/bench.json"
    bench = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = ["| Ours against | Setting | Ours, ms | Peer, ms | Ratio (quartiles) | Aim |"]
    rows += ["|---|---|--:|--:|--:|--:|"]
    for row in bench["rows"]:
        times = f"{1e3 * median(row['ours']):.1f} | {1e3 * median(row['peer']):.1f}"
        ratio = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        rows.append(f"| {row['name']} | {row['setting']} | {times} | {ratio} | {row['aim']:.2f} |")
    return "\n".join(rows)


def written(readme: Path = README) -> str:
    """A README with every table made anew."""
    text = readme.read_text()
    for table in (sample, lessons, exercises, results, speed):
        name = table.__name__
        between = f"<!-- {name} -->\n{table()}\n<!-- /{name} -->"
        text = re.sub(
            rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, new=between: new, text, flags=re.S
        )
    return text


def timed(lesson: str) -> str:
    """The lesson's source; where its docstring says what it took, the seconds measured."""
    seconds, source = ledger_of(lesson)["seconds"], (ROOT / lesson).read_text()
    said = r"(\*\*You will have seen\*\* \([^)]*torch[^)]*?,\s)\d+ s"
    return source if seconds == "?" else re.sub(said, rf"\g<1>{seconds:.0f} s", source, count=1)


if __name__ == "__main__":
    for readme in (README, ROOT / "exercises/README.md"):
        readme.write_text(written(readme))
    for lesson in LESSONS:
        (ROOT / lesson).write_text(timed(lesson))
