"""`course plan --validate`: the planner against every published row in tests/data, misses first."""

import csv
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from course.plan import (
    GiB,
    Job,
    Layout,
    Model,
    flops_per_token,
    known_gpus,
    known_models,
    memory,
    read_config,
    seconds,
)
from course.plan_rows import FORMS, bridge_row, model_named, playbook_row, with_predictions
from course.planning import (
    HEADROOM,
    Cluster,
    Planned,
    all_layouts,
    at_one,
    chosen,
    evaluate,
    fastest,
    rank_of,
    room,
)

DATA = Path(__file__).resolve().parents[1] / "tests/data"
PLAYBOOK = DATA / "ultrascale_playbook_configs.csv"
BRIDGE = DATA / "megatron_bridge_perf.csv"
SIMUMAX = DATA / "simumax_b200_measured.csv"


AIM = "the same, the aim"
WHY_AIM = """What fills a GPU is counted; these have room.
A row says only that it crashed. Without sharding and with several stages most rows of the 1.34B
model did (its embedding is also its head, on two stages); others hit time limits or machines."""
WHY_RANK = """Meshes lie close together: ten
within a few percent. Where DeepSeek-V3 ran on B200 it had 16 stages without interleaving, or
experts over four nodes; ours has 8 stages and experts inside a node, as NVIDIA's has on B300, and
on B200 since (Megatron-Bridge @13438ed). Where Qwen3-235B ran on H100 its experts lay over four
nodes; ours lie over two, so that a token crosses to 1 other node in the mean instead of 2.7."""


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


class Choice(NamedTuple):
    """NVIDIA's mesh among ours."""

    rank: float
    mesh: tuple[int, int, int, int]  # tp, pp, cp, ep
    model: Model
    job: Job
    planned: Planned
    cluster: Cluster


@cache
def nvidias_choices(hide: bool = True) -> dict[tuple, Choice]:
    """For each model, GPU and number of GPUs; the best if it has published several.

    `hide` says whether experts' all-to-alls hide behind products where they can.
    """
    searched: dict[tuple, Planned] = {}
    found: dict[tuple, Choice] = {}
    for row in csv.DictReader(BRIDGE.open(encoding="utf-8")):
        try:
            read = bridge_row(row, {})
        except ValueError:
            continue
        cluster = Cluster(read.gpus, known_gpus()[read.gpu])
        job = read.job._replace(hide=hide)
        key = (read.model, job, read.gpu, read.gpus)
        if key not in searched:
            layouts = all_layouts(read.model, job, cluster)
            searched[key] = evaluate(read.model, job, layouts, cluster)
        mesh = read.layout[1:5]
        rank = rank_of(searched[key], (*mesh, read.layout.zero == 3)) or np.inf
        cell = (row["model"].partition(" ")[0], read.gpu, read.gpus)
        if cell not in found or rank < found[cell].rank:
            found[cell] = Choice(rank, mesh, read.model, job, searched[key], cluster)
    return found


def ranks_of_nvidias_choices(hide: bool = True) -> dict[tuple, float]:
    return {cell: choice.rank for cell, choice in nvidias_choices(hide).items()}


def against_ours(choice: Choice) -> str:
    """One line: how much longer NVIDIA's mesh takes than our first, and in which part."""
    layout = choice.planned.layout
    sharded = layout.zero == 3
    axes = np.array(layout[1:5]).T
    theirs = np.all(axes == np.array(choice.mesh), axis=1) & ~sharded
    ours = fastest(choice.planned, ~sharded)
    place = fastest(choice.planned, theirs)
    first = chosen(layout, ours)
    said = "NVIDIA tp {} pp {} cp {} ep {}".format(*choice.mesh)
    said += f" (rank {choice.rank:g}); ours tp {first.tp} pp {first.pp} cp {first.cp} ep {first.ep}"
    if place is None:
        return f"{said}: NVIDIA's does not fit here"
    both = seconds(choice.model, choice.job, layout, choice.cluster.gpu)
    more = {part: at_one(both, place)[part] - at_one(both, ours)[part] for part in both}
    most = max(more, key=more.get)
    longer = choice.planned.seconds[place] / choice.planned.seconds[ours]
    return f"{said}: {longer:.2f} x as long, {most} + {more[most]:.2f} s"


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
        Figure(AIM, 0.90, impossible, ">="),
        Figure("Playbook: memory, median miss", 0.08, float(np.median(wrong))),
        Figure("Playbook: memory, 90th percentile", 0.20, float(np.quantile(wrong, 0.9))),
        Figure("SimuMax: memory, median miss", 0.05, float(np.median(peaks))),
    ]
    for (model, nodes), share in choices(grid).items():
        found.append(Figure(f"{model}, {nodes} nodes: first choice loses", 0.15, 1 - share))
    for name, ratio in hidden_exchange().items():
        found.append(Figure(f"Qwen3-30B, 16 H100, {name}: step", 0.1, abs(ratio - 1)))
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


def hidden_exchange() -> dict[str, float]:
    """Seconds of a step, ours / published, with all-to-alls exposed and hidden; nothing is fitted.

    NVIDIA's A/B of Qwen3-30B in bfloat16 on 16 H100 (Megatron-Bridge @067f987,
    skills/nemo-mbridge-perf-moe-comm-overlap/SKILL.md): EP 16, sequences of 4,096, 1,024 per step.
    """
    model = read_config(known_models()["qwen3-30b-a3b"])
    layout = Layout(dp=16, ep=16)
    found = {}
    for name, hide, published in (("exposed", False, 24.71), ("hidden", True, 20.99)):
        job = Job(sequence=4096, batch=1024, grad_bytes=2, hide=hide)
        ours = sum(seconds(model, job, layout, known_gpus()["h100"]).values())
        found[name] = float(ours) / published
    return found


# The same paper's runs: heads, hidden, layers, tp, pp, GPUs, sequences per step, per micro-batch,
# chunks of a stage, TFLOP/s per GPU; all layers are recomputed, and what that costs is counted.
MEGATRON = """\
24,2304,24,1,1,32,512,16,1,137 32,3072,30,2,1,64,512,16,1,138 32,4096,36,4,1,128,512,16,1,142
48,6144,40,8,1,256,1024,8,1,135 64,8192,48,8,2,512,1536,4,1,138 80,10240,60,8,4,1024,1792,2,3,140
96,12288,80,8,8,1536,2304,2,2,148 128,16384,96,8,16,1920,2160,1,2,155
128,20480,105,8,35,2520,2520,1,3,163 160,25600,128,8,64,3072,3072,1,1,163"""


def megatron_misses() -> np.ndarray:
    """Ours / published - 1, of Megatron-LM's runs on A100."""
    misses = []
    for row in MEGATRON.split():
        heads, h, layers, tp, pp, gpus, batch, sequences, chunks, tflops = map(int, row.split(","))
        d = h // heads
        model = Model(layers, h, heads, heads, d, d, 4 * h, 51200, True, False, positions=2048)
        layout = Layout(gpus // (tp * pp), tp, pp, 1, 1, sequences, chunks, 0, 2)
        step = sum(seconds(model, Job(2048, batch), layout, known_gpus()["a100"]).values())
        counted = 96 * batch * 2048 * layers * h**2
        counted *= 1 + 2048 / (6 * h) + 51200 / (16 * layers * h)
        misses.append(counted / gpus / float(step) / 1e12 / tflops - 1)
    return np.array(misses)


def fits(grid: list[dict]) -> dict[str, np.ndarray]:
    """Of each GPU that is fitted: tokens/s, ours / published - 1, of the rows it is fitted to."""
    short = [row for row in grid if int(row["nodes"]) <= 2 and row["tok_s"]]
    found = {"a100": megatron_misses(), "h100": misses(short, "pred_tok_s", "tok_s")}
    times = with_predictions(SIMUMAX)
    found["b200"] = np.array([float(r["real_ms"]) / float(r["pred_s"]) / 1e3 - 1 for r in times])
    rows = [row for row in with_predictions(BRIDGE) if row["pred_s"]]
    for kind in ("b300", "gb200", "gb300"):
        speed = []
        for row in rows:
            if row["system"] == f"DGX-{kind.upper()}" and row["precision"] != "NVFP4":
                ours = float(row["pred_tok_s"]) / int(row["gpus"])
                speed.append(ours / float(row["tok_s_gpu"]))
        found[kind] = np.array(speed) - 1
    return found


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


def not_reached(grid: list[dict]) -> str:
    """Every figure that is not reached, its ten worst rows, and why."""
    said = []
    missed = [figure for figure in figures(grid) if not figure.met]
    if any(figure.name == AIM for figure in missed):
        called = [row for row in grid if not row["mem_GB"] and row["fits"] == "yes"]
        called.sort(key=lambda row: -float(row["spare_GiB"]))
        said.append(f"\nNot reached: {AIM}. {WHY_AIM}\nThe ten with the most room left:")
        for row in called[:10]:
            axes = " ".join(f"{axis} {row[axis]}" for axis in ("dp", "tp", "pp", "zero"))
            sequences = f"{row['micro_batch']} x {row['grad_acc']} sequences"
            said.append(f"  {row['model']:6} {row['nodes']:>2} nodes, {axes}, {sequences}:"
                        f" {row['spare_GiB']} GiB spare")  # fmt: skip
    far = {cell: one for cell, one in nvidias_choices().items() if one.rank > 10}
    if far:
        said.append(f"\nNot reached: NVIDIA's mesh among the first ten. {WHY_RANK}")
        for (model, gpu, gpus), choice in far.items():
            said.append(f"  {model}, {gpus} {gpu}: {against_ours(choice)}")
    return "\n".join(said)


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
    print("\nTokens/s of the rows that a GPU's constants are fitted to:")
    for kind, wrong in fits(grid).items():
        print(f"  {kind:6}{len(wrong):4} rows, median miss {np.median(abs(wrong)):.0%}, 90th"
              f" percentile {np.quantile(abs(wrong), 0.9):.0%}")  # fmt: skip
    both = [ranks_of_nvidias_choices(hide).values() for hide in (True, False)]
    hidden, exposed = (sum(rank <= 10 for rank in ranks) for ranks in both)
    print(f"\nNVIDIA's mesh is among our first ten {hidden} times of {len(both[0])}; {exposed}"
          " times if no all-to-all hid.")  # fmt: skip
    print(not_reached(grid))
    return 0
