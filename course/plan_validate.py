"""`course plan --validate`: the planner against every published row in tests/data, misses first."""

import csv
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from course.plan import GiB, Layout, flops_per_token, known_gpus, memory
from course.plan_rows import FORMS, bridge_row, model_named, playbook_row, with_predictions
from course.planning import HEADROOM, Cluster, all_layouts, evaluate, rank_of, room

DATA = Path(__file__).resolve().parents[1] / "tests/data"
PLAYBOOK = DATA / "ultrascale_playbook_configs.csv"
BRIDGE = DATA / "megatron_bridge_perf.csv"
SIMUMAX = DATA / "simumax_b200_measured.csv"


class Figure(NamedTuple):
    """One figure: what was aimed at, and what was reached; both as shares if not said otherwise."""

    name: str
    target: float
    reached: float
    sign: str = "<="

    @property
    def met(self) -> bool:
        return self.reached <= self.target if self.sign == "<=" else self.reached >= self.target


def misses(rows: list[dict], found: str, real: str) -> np.ndarray:
    return np.array([float(row[found]) / float(row[real]) - 1 for row in rows])


def choices(grid: list[dict]) -> dict[tuple, float]:
    """Tokens/s of the first choice / the fastest that ran, for each model on 1 and 2 nodes."""
    cells = defaultdict(list)
    for row in grid:
        if int(row["nodes"]) <= 2:
            cells[row["model"], int(row["nodes"])].append(row)
    limit = HEADROOM * room(known_gpus()["h100"]) / GiB
    shares = {}
    for cell, rows in cells.items():
        fit = [row for row in rows if row["fits"] == "yes"]
        fit = [row for row in fit if float(row["pred_worst_GiB"]) <= limit]
        first = max(fit, key=lambda row: float(row["pred_tok_s"]))
        fastest = max(float(row["tok_s"] or 0) for row in rows)
        shares[cell] = float(first["tok_s"] or 0) / fastest
    return shares


def flops_ratios() -> tuple[dict[str, list[float]], Counter]:
    """Published / ours, for each model of Megatron-Bridge; and the models that are not known."""
    ratios = defaultdict(list)
    unread = Counter()
    for row in csv.DictReader(BRIDGE.open(encoding="utf-8")):
        try:
            model = model_named(row["model"], {})
        except ValueError:
            unread[row["model"]] += 1
            continue
        name = row["model"].replace(" (tokendrop)", "").replace(" (dropless)", "")
        if "w/o MTP" in name:
            model = model._replace(mtp=0)
        published = float(row["model_tflop_s_gpu"]) * 1e12 / float(row["tok_s_gpu"])
        ratio = published / flops_per_token(model, int(row["seq"]))
        ratios[name.replace(" (w/ MTP)", "")].append(ratio)
    return ratios, unread


def ranks_of_nvidias_choices() -> dict[tuple, float]:
    """Its mesh among ours, for each model, GPU and number of GPUs; the best if it has several."""
    ranks: dict[tuple, float] = {}
    for row in csv.DictReader(BRIDGE.open(encoding="utf-8")):
        try:
            read = bridge_row(row, {})
        except ValueError:
            continue
        cluster = Cluster(read.gpus, known_gpus()[read.gpu])
        planned = evaluate(
            read.model, read.job, all_layouts(read.model, read.job, cluster), cluster
        )
        found = rank_of(planned, (*read.layout[1:5], read.layout.zero == 3))
        cell = (row["model"].partition(" ")[0], read.gpu, read.gpus)
        ranks[cell] = min(ranks.get(cell, np.inf), found or np.inf)
    return ranks


def figures(grid: list[dict]) -> list[Figure]:
    """All figures that the issue names and that follow from the tables."""
    ran = [row for row in grid if row["mem_GB"]]
    failed = [row for row in grid if not row["mem_GB"]]
    wrong = abs(misses(ran, "pred_GiB", "mem_GB"))
    peaks = abs(misses(with_predictions(SIMUMAX), "pred_GiB", "real_alloc_GiB"))
    impossible = sum(row["fits"] == "no" for row in failed) / len(failed)
    found = [
        Figure("Playbook: ran, called impossible (rows)", 0, sum(r["fits"] == "no" for r in ran)),
        Figure("Playbook: failed, called impossible", 0.75, impossible, ">="),
        Figure("the same, the aim", 0.90, impossible, ">="),
        Figure("Playbook: memory, median miss", 0.08, float(np.median(wrong))),
        Figure("Playbook: memory, 90th percentile", 0.20, float(np.quantile(wrong, 0.9))),
        Figure("SimuMax: memory, median miss", 0.05, float(np.median(peaks))),
    ]
    for (model, nodes), share in choices(grid).items():
        found.append(Figure(f"{model}, {nodes} nodes: first choice loses", 0.15, 1 - share))
    for name, ratios in flops_ratios()[0].items():
        found.append(Figure(f"{name}: FLOPs per token", 0.005, abs(float(np.median(ratios)) - 1)))
    for (model, gpu, gpus), rank in ranks_of_nvidias_choices().items():
        found.append(Figure(f"{model}, {gpus} {gpu}: rank of NVIDIA's choice", 10, rank))
    return found


def classes(grid: list[dict]) -> Counter:
    """Why each row that failed is impossible, or that nothing says so."""
    found = Counter()
    for row in grid:
        if row["mem_GB"]:
            continue
        memory = float(row["spare_GiB"]) < 0
        rule = row["not_read"].removeprefix("refused: ").partition(",")[0].partition(":")[0]
        found[("memory" if memory else "") + (" and " if memory and rule else "") + rule] += 1
    return found


def without_a_constant() -> float:
    """Of the Playbook's rows that failed, the share that bytes alone call impossible."""
    failed = [row for row in csv.DictReader(PLAYBOOK.open(encoding="utf-8")) if not row["mem_GB"]]
    found = 0
    for row in failed:
        read = playbook_row(row, {})
        job = read.job._replace(reserve=0, keep_gathered=False)
        layout = Layout(*[np.array(axis) for axis in read.layout])
        found += float(sum(memory(read.model, job, layout).values())) > room(known_gpus()["h100"])
    return found / len(failed)


# Narayanan et al. (2021), Table 1: GPUs, TFLOP/s per GPU, percent of peak, PFLOP/s of all
TABLE_1 = """\
32,137,44,4.4 64,138,44,8.8 128,142,46,18.2 256,135,43,34.6 512,138,44,70.8 1024,140,45,143.8
1536,148,47,227.1 1920,155,50,297.4 2520,163,52,410.2 3072,163,52,502.0"""


def conversions() -> list[Figure]:
    """What follows from a table's own TFLOP/s: arithmetic, and no prediction."""
    rows = [tuple(map(float, row.split(","))) for row in TABLE_1.split()]
    total = max(abs(gpus * tflops / 1e3 / petaflops - 1) for gpus, tflops, _, petaflops in rows)
    percent = max(abs(100 * tflops / 312 - peak) for _, tflops, peak, _ in rows)
    days = []
    for tokens, size, gpus, tflops, said in (
        (300e9, 175e9, 1024, 140, 34),
        (450e9, 1008e9, 3072, 163, 84),
    ):
        days.append(abs(8 * tokens * size / (gpus * tflops * 1e12) / 86400 - said))
    return [
        Figure("Megatron's Table 1: PFLOP/s of all GPUs", 0.005, total),
        Figure("the same: percent of 312 TFLOP/s, points", 0.6, percent),
        Figure("days of 175B and 1T, 8 T P / (n X)", 1, max(days)),
    ]


def show() -> int:
    """Print all figures, what is not reached, and the ten worst rows of each table."""
    grid = with_predictions(PLAYBOOK)
    print("| Figure | target | reached | |\n|---|--:|--:|---|")
    for figure in figures(grid):
        verdict = "" if figure.met else "**not reached**"
        target = f"{figure.sign} {figure.target:g}"
        print(f"| {figure.name} | {target} | {figure.reached:.3g} | {verdict} |")
    print("\nConversions, which predict nothing:")
    for figure in conversions():
        print(f"  {figure.name}: {figure.reached:.3g}, at most {figure.target:g}")
    share = f"{without_a_constant():.0%}"
    print(f"\nBytes alone, without a constant or a rule, call {share} of what failed impossible.")
    print("\nRows of the Playbook that failed, by what says so:")
    for name, count in classes(grid).most_common():
        print(f"  {count:4} {name or 'nothing: not memory, or a fault of ours'}")
    for path, found, real in (
        (PLAYBOOK, "pred_GiB", "mem_GB"),
        (SIMUMAX, "pred_GiB", "real_alloc_GiB"),
    ):
        rows = [row for row in with_predictions(path) if row[real]]
        wrong = misses(rows, found, real)
        print(f"\nThe ten worst of {path.name}:")
        for at in np.argsort(-abs(wrong))[:10]:
            shown = {key: rows[at][key] for key in rows[at] if not key.startswith(("pred", "tok"))}
            cells = [*shown.values()]
            print(f"  {wrong[at]:+.0%} {' '.join(cells[:12])}")
    print(f"\nNot read: {dict(flops_ratios()[1])}; forms read: {len(FORMS)}")
    return 0
