"""The GPU machines on which the course was run, results/MACHINE/, and the page made of each.

`make gpu` makes such a folder: machine.json, N-ranks/ (each lesson's ledger, and what it printed),
bench/, cluster.json, cluster.txt and cluster.png, topology.txt, doctor.txt, and README.md, which
this file writes from the others.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from course.lessons import LESSONS, ROOT

# How the rows of a ledger are counted: what is simulated, or theory, apart from what was measured.
COUNTED = ("PASS", "FAIL", "BLOCKED", "simulated", "theory")


def counted(ledger: list[dict]) -> Counter:
    """How many rows PASS, FAIL, and are BLOCKED; those that PASS without being measured apart."""
    counts = Counter()
    for row in ledger:
        kind = row.get("kind", "measured")
        apart = row["verdict"] == "PASS" and kind != "measured"
        counts[kind if apart else row["verdict"]] += 1
    return counts


def name_of(lesson: str) -> str:
    """What a lesson's files in results/ are called, less their endings."""
    return lesson.replace("/", "_").removesuffix(".py")


def ledger_of(lesson: str) -> dict:
    """What the lesson's last run on CPUs said: `make results`."""
    path = ROOT / f"results/lessons/{name_of(lesson)}.json"
    if not path.exists():
        return {"ledger": [], "seconds": None}
    return json.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Machine:
    """What one folder of results holds."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def about(self) -> dict:
        return json.loads((self.folder / "machine.json").read_text(encoding="utf-8"))

    @property
    def pretended(self) -> bool:
        return self.about["GPUs"].endswith("pretended")

    @cached_property
    def runs(self) -> dict[int, dict[str, dict]]:
        """Every run's ledger, by number of ranks, then by lesson."""
        found = {}
        for folder in self.folder.glob("*-ranks"):
            by_lesson = {}
            for path in folder.glob("*.json"):
                told = json.loads(path.read_text(encoding="utf-8"))
                by_lesson[told["lesson"]] = told
            found[int(folder.name.partition("-")[0])] = by_lesson
        return dict(sorted(found.items()))

    def passed_on(self, lesson: str) -> list[int]:
        """The numbers of GPUs on which this lesson passed."""
        runs = [by_lesson.get(lesson) for by_lesson in self.runs.values()]
        return sorted({told["gpus"] for told in runs if told and told["exit"] == 0})

    def largest(self, lesson: str) -> dict:
        """The lesson's run on most ranks, or an empty ledger."""
        runs = [by_lesson[lesson] for by_lesson in self.runs.values() if lesson in by_lesson]
        return runs[-1] if runs else {"ledger": []}


def machines() -> list[Machine]:
    return [Machine(path.parent) for path in sorted(ROOT.glob("results/*/machine.json"))]


# What the CPU's ledgers say of GPUs


def wanted(needs: str) -> int:
    """How many GPUs "2 GPUs", "1 GPU" and their kin ask for; 0 if it is something else."""
    number = re.match(r"(\d*)\+? ?GPUs?\b", needs)
    return int(number[1] or 1) if number else 0


def only_on_gpus(lesson: str) -> dict[int, list[str]]:
    """The claims that CPUs cannot answer, by the number of GPUs that they need."""
    found = {}
    for row in ledger_of(lesson)["ledger"]:
        if wanted(row.get("needs", "")):
            found.setdefault(wanted(row["needs"]), []).append(row["claim"])
    return found


def ran_on_several_gpus(lesson: str, found: list[Machine] | None = None) -> bool:
    every = machines() if found is None else found
    return any(max(machine.passed_on(lesson), default=0) > 1 for machine in every)


# A machine's page


def page(machine: Machine, others: list[Machine]) -> str:
    """README.md of a machine's folder, from what else is in it, and in the folders of others."""
    parts = [
        f"# {machine.name}",
        "Made by `make gpu` from the ledgers next to it: every lesson with one GPU per rank.",
        *(["**Pretended GPUs: nothing here was measured on one.**"] if machine.pretended else []),
        versions(machine),
        "## What passed",
        passed(machine),
        *failures(machine),
        "## What only GPUs, or only clocks, tell",
        compared(machine, others),
        *own_speeds(machine),
        "## Files",
        files(machine),
    ]
    return "\n\n".join(parts) + "\n"


def versions(machine: Machine) -> str:
    rows = ["| | |", "|---|---|"]
    return "\n".join(rows + [f"| {key} | {value} |" for key, value in machine.about.items()])


def passed(machine: Machine) -> str:
    """A row per lesson, a column per number of ranks."""
    sizes = list(machine.runs)
    heads = " | ".join(f"{size} ranks" if size > 1 else "1 rank" for size in sizes)
    rows = [f"| Lesson | {heads} |", "|---|" + "---|" * len(sizes)]
    for lesson in LESSONS:
        cells = [ended(machine.runs[size].get(lesson)) for size in sizes]
        if any(cells):
            rows.append(f"| {lesson} | {' | '.join(cells)} |")
    return "\n".join(rows)


def ended(told: dict | None) -> str:
    """How one run ended, in a word or two."""
    if told is None:
        return ""
    found = counted(told["ledger"])
    counts = ", ".join(f"{found[how]} {how}" for how in COUNTED if found[how])
    if told["exit"] == 0:
        return counts
    word = "**hung**" if told["exit"] == "hung" else "**failed**"
    return f"{word}: {counts}" if counts else word


def failures(machine: Machine) -> list[str]:
    """The claims that failed, and where the output of such a run is kept."""
    parts = []
    for size, by_lesson in machine.runs.items():
        for lesson in [one for one in LESSONS if by_lesson.get(one, {"exit": 0})["exit"]]:
            kept = f"{size}-ranks/{name_of(lesson)}.txt"
            told = by_lesson[lesson]
            parts.append(f"{lesson} on {size} ranks: {ended(told)}; [what it printed]({kept})")
            for row in told["ledger"]:
                if row["verdict"] == "FAIL":
                    predicted = f"{row['sign']} {shown(row['predicted'])}"
                    measured = shown(row["measured"])
                    parts[-1] += f"\n- {row['claim']}: predicted {predicted}, measured {measured}"
    return ["## What failed", *parts] if parts else []


def compared(machine: Machine, others: list[Machine]) -> str:
    """Claims that need GPUs or a clock, on most ranks; and what other machines measured."""
    names = "".join(f" {other.name} |" for other in others)
    rows = [f"| Lesson | Claim | Predicted | Measured |{names}"]
    rows.append("|---|---|--:|--:|" + "--:|" * len(others))
    for lesson in LESSONS:
        on_cpus = {row["claim"] for row in ledger_of(lesson)["ledger"] if "measured" in row}
        theirs = [measured_by(other, lesson) for other in others]
        for row in machine.largest(lesson)["ledger"]:
            if "measured" in row and (row["timed"] or row["claim"] not in on_cpus):
                cells = [lesson, row["claim"], f"{row['sign']} {shown(row['predicted'])}"]
                cells.append(shown(row["measured"]))
                cells += [shown(claims.get(row["claim"], "")) for claims in theirs]
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def measured_by(machine: Machine, lesson: str) -> dict[str, float]:
    rows = machine.largest(lesson)["ledger"]
    return {row["claim"]: row["measured"] for row in rows if "measured" in row}


def shown(number: float | str) -> str:
    return number if isinstance(number, str) else f"{number:,.4g}"


def speeds(path: Path) -> str:
    """The table of a bench.json: our time and the peer's."""
    bench = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    rows = ["| Verdict | Ours against | Setting | Ours, ms | Peer, ms | Ratio (quartiles) | Aim |"]
    rows += ["|---|---|---|--:|--:|--:|--:|"]
    for row in bench["rows"]:
        kept = "KEPT" if row["ratio"] <= row["aim"] else "MISSED"
        times = f"{1e3 * median(row['ours']):.1f} | {1e3 * median(row['peer']):.1f}"
        ratio = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        setting = f"{row['name']} | {row['setting']} | {times} | {ratio} | {row['aim']:.2f}"
        rows.append(f"| {kept} | {setting} |")
    return "\n".join(rows)


def own_speeds(machine: Machine) -> list[str]:
    """The benchmarks, if they were run: their ranks are CPU cores, as everywhere."""
    path = machine.folder / "bench/bench.json"
    words = "Ours and the library's on CPU cores, in turns: below 1, ours is quicker."
    return ["## Speeds", words, speeds(path)] if path.exists() else []


def files(machine: Machine) -> str:
    """Links to what else the folder holds: topology, doctor, figures."""
    paths = []
    for kind in ("*.txt", "*.png", "*/*.png"):
        paths += machine.folder.glob(kind)
    found = sorted(path.relative_to(machine.folder) for path in paths)
    return "\n".join(f"- [{path}]({path})" for path in found)
