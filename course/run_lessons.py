"""Run every lesson in reading order, a line each: `make lessons`.

Ledgers, figures and what each lesson printed go to build/lessons, or with --keep to results/, from
where README's tables are made. Exits 1 if a lesson failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

from course.lessons import LESSONS, ROOT, flags_of


def run_one(lesson: str, folder: Path) -> dict:
    """Run one lesson as a learner does; return its ledger, with its seconds and exit status."""
    name = lesson.replace("/", "_").removesuffix(".py")
    kept = folder / f"{name}.json"
    figure = folder / f"{name}.png"
    kept.unlink(missing_ok=True)
    argv = ["--figure", str(figure)] if "--figure" in flags_of(lesson) else []
    started = time.monotonic()
    ran = subprocess.run(
        [sys.executable, ROOT / lesson, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"LESSON_JSON": str(kept)},
    )
    seconds = time.monotonic() - started
    told = json.loads(kept.read_text()) if kept.exists() else {"ledger": []}
    told["argv"] = [lesson]  # the same on every machine
    told |= {"lesson": lesson, "exit": ran.returncode, "seconds": round(seconds, 1)}
    kept.write_text(json.dumps(told, indent=1) + "\n")
    return told | {"output": ran.stdout}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="into results/, for README")
    parser.add_argument("--only", default="", metavar="TEXT", help="lessons whose path holds it")
    options = parser.parse_args()
    folder = ROOT / ("results/lessons" if options.keep else "build/lessons")
    folder.mkdir(parents=True, exist_ok=True)
    lessons = [lesson for lesson in LESSONS if options.only in lesson]
    started = time.monotonic()
    failed = []
    total = dict.fromkeys(("PASS", "FAIL", "BLOCKED"), 0)
    bar = tqdm(lessons, bar_format="{n}/{total} {bar} {desc}", leave=False, file=sys.stderr)
    print(f"{'lesson':52} {'PASS':>5} {'FAIL':>5} {'BLOCKED':>8} {'seconds':>8}")
    for lesson in bar:
        bar.set_description_str(lesson)
        told = run_one(lesson, folder)
        verdicts = [row["verdict"] for row in told["ledger"]]
        counts = {v: verdicts.count(v) for v in total}
        total = {v: total[v] + counts[v] for v in total}
        row = f"{counts['PASS']:5} {counts['FAIL']:5} {counts['BLOCKED']:8} {told['seconds']:8.1f}"
        bar.write(f"{lesson:52} {row}", file=sys.stdout)
        if told["exit"]:
            failed.append(lesson)
            bar.write(f"  exit status {told['exit']}:\n{told['output'][-3000:]}", file=sys.stdout)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in total.items())
    print(f"\n{len(lessons) - len(failed)} of {len(lessons)} lessons passed ({counted})", end=" ")
    print(f"in {time.monotonic() - started:.0f} s; ledgers and figures: {folder.relative_to(ROOT)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
