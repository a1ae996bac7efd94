"""The planner: units by hand, algebra, bad input, and every published row that lies in tests/data.

Sources of the rows: tests/data/README.md. No constant belongs to a row; the two that are fitted,
an efficiency per type of GPU and the allocator's reserve on H100, stand in course/plan_data.
"""

import csv
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from course.plan import (
    GiB,
    Job,
    Layout,
    Model,
    flops_per_token,
    group_rate,
    known_gpus,
    known_models,
    layers_of_stages,
    memory,
    parameters,
    read_config,
    seconds,
)
from course.plan_emit import WRITERS, settings
from course.plan_rows import model_named, predicted, simumax_row, with_predictions
from course.plan_validate import classes, conversions, figures, ranks_of_nvidias_choices
from course.planning import (
    HEADROOM,
    Cluster,
    all_layouts,
    best,
    check_layout,
    chosen,
    evaluate,
    mesh,
    room,
    why_not,
)

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data"
H100 = known_gpus()["h100"]
# 2 layers, h = 8, 2 heads of 4, ff = 16, V = 32
TINY = Model(2, 8, 2, 2, 4, 4, 16, 32, tied=False, gated=True)


def preset(name: str) -> Model:
    return read_config(known_models()[name])


def course(*argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "course", "plan", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


# Units, by hand


def test_parameters_by_hand() -> None:
    # attention 4 x 8 x 8, MLP 3 x 8 x 16, norms 2 x 8 per layer; a last norm; two tables
    assert sum(parameters(TINY).values()) == 2 * (256 + 384 + 16) + 8 + 2 * 256


def test_flops_by_hand() -> None:
    met = 2 * (256 + 384 + 16) + 256  # with the head, without the embedding
    assert flops_per_token(TINY, 10) == 6 * met + 3 * 2 * 2 * 8 * 10  # L a (d + d) s, half of 6
    assert flops_per_token(TINY, 10, "full") == 6 * met + 6 * 2 * 2 * 8 * 10
    assert flops_per_token(TINY, 10, "6N") == 6 * (met + 256)


def test_bytes_by_hand() -> None:
    parts = memory(TINY, Job(sequence=10, batch=4), Layout(dp=2, micro_batch=2))
    count = sum(parameters(TINY).values()) - 8  # the last norm is left out
    assert parts["weights"] == 2 * count
    assert parts["gradients"] == 4 * count
    assert parts["optimizer states"] == 12 * count / 2
    of_layer = (4 * 8 + 2 * 8 + 2 * 16 + 2 * 8 + 4 * 2) + (4 * 8 + 6 * 16)
    assert parts["activations"] == 20 * 2 * of_layer
    assert parts["logits"] == 20 * 32 * 6


def test_seconds_by_hand() -> None:
    layout = Layout(dp=2, micro_batch=2)
    parts = seconds(TINY, Job(sequence=10, batch=8), layout, H100)
    scores = 3 * 2 * 2 * 8 * 10
    products = (flops_per_token(TINY, 10) - scores) * 40 / (H100.efficiency * 989e12)
    assert parts["matrix products"] == pytest.approx(products)
    assert parts["bubble"] == 0


def test_rates_by_hand() -> None:
    """NVLink inside 8; a ring of 4 over nodes, with 2 members per node, leaves by 2 cards."""
    assert group_rate(H100, 8, 1) == 0.8 * 450e9
    assert group_rate(H100, 4, 4) == 0.8 * 100e9
    assert group_rate(H100, 2, 8) == 0.8 * 50e9
    assert group_rate(known_gpus()["gb300"], 64, 1) == 0.8 * 900e9


def test_presets_have_the_sizes_they_are_named_for() -> None:
    for name, billions in {
        "gpt2-1.5b": 1.558, "gpt3-175b": 174.6, "llama-7b": 6.738, "llama-8b": 8.030,
        "llama-70b": 70.55, "llama-405b": 405.9, "qwen3-30b-a3b": 30.53,
        "qwen3-235b-a22b": 235.1, "deepseek-v3": 671.0,
    }.items():  # fmt: skip
        found = sum(parameters(preset(name)).values()) / 1e9
        assert found == pytest.approx(billions, rel=1e-3), name


# Algebra


def test_doubling_moves_what_algebra_says() -> None:
    model = preset("llama-7b")
    job = Job(sequence=4096, batch=256)
    layout = Layout(dp=8, tp=2, micro_batch=1)
    wide = model._replace(hidden=2 * model.hidden, ff=2 * model.ff, qk_dim=256, v_dim=256)
    assert parameters(wide)["attention"] == 4 * parameters(model)["attention"]
    assert parameters(wide)["dense MLPs"] == 4 * parameters(model)["dense MLPs"]
    more = model._replace(vocab=2 * model.vocab)
    gained = flops_per_token(more, 4096) - flops_per_token(model, 4096)
    assert gained == 6 * model.vocab * model.hidden
    assert memory(more, job, layout)["logits"] == 2 * memory(model, job, layout)["logits"]
    gpu = known_gpus()["h100"]
    fast = type(gpu)(**vars(gpu) | {"nvlink": 2 * gpu.nvlink})
    calls = 8 * 32 * 32 * 20e-6  # of latency: per layer, micro-batches, layers
    slow = seconds(model, job, layout, gpu)["tensor parallel"] - calls
    twice = seconds(model, job, layout, fast)["tensor parallel"] - calls
    assert twice == pytest.approx(slow / 2)
    long = job._replace(batch=512)
    both = [seconds(model, one, layout, gpu)["matrix products"] for one in (job, long)]
    assert both[1] == pytest.approx(2 * both[0])


def test_sharding_divides_exactly_what_it_says() -> None:
    job = Job(sequence=4096, batch=1024)
    whole = memory(preset("llama-8b"), job, Layout(dp=16, zero=0))
    for stage, parts in enumerate(("optimizer states", "gradients", "weights"), start=1):
        cut = memory(preset("llama-8b"), job, Layout(dp=16, zero=stage))
        assert cut[parts] == whole[parts] / 16
    adapters = memory(preset("llama-8b"), job._replace(lora=16), Layout())
    assert adapters["gradients"] < 0.01 * whole["gradients"]
    assert memory(preset("llama-8b"), job._replace(offload=True), Layout())["optimizer states"] == 0


def test_an_array_of_layouts_is_each_of_them() -> None:
    cluster = Cluster(64, H100)
    model, job = preset("qwen3-30b-a3b"), Job(sequence=4096, batch=512)
    layouts = all_layouts(model, job, cluster)
    planned = evaluate(model, job, layouts, cluster)
    for at in range(0, len(layouts.dp), len(layouts.dp) // 20):
        one = chosen(layouts, at)
        assert sum(memory(model, job, one).values()) == pytest.approx(planned.bytes[at])
        assert sum(seconds(model, job, one, H100).values()) == pytest.approx(planned.seconds[at])


# Tables of papers (theory/data of PUBLISHED.md)

MEGATRON = """\
1.7,24,2304,24 3.6,32,3072,30 7.5,32,4096,36 18.4,48,6144,40 39.1,64,8192,48 76.1,80,10240,60
145.6,96,12288,80 310.1,128,16384,96 529.6,128,20480,105 1008.0,160,25600,128"""


def gpt(heads: int, hidden: int, layers: int) -> Model:
    d = hidden // heads
    return Model(layers, hidden, heads, heads, d, d, 4 * hidden, 51200, True, False, positions=2048)


def test_megatron_table_1_to_the_digit() -> None:
    for row in MEGATRON.split():
        printed, heads, hidden, layers = row.split(",")
        found = sum(parameters(gpt(int(heads), int(hidden), int(layers))).values()) / 1e9
        assert f"{found:.1f}" == printed


ZERO = """\
1,120,120,120,2048,2048,2048,16000,16000,16000
4,52.5,41.3,30,896,704,512,7000,5500,4000
16,35.6,21.6,7.5,608,368,128,4750,2875,1000
64,31.4,16.6,1.88,536,284,32,4187,2218,250
256,30.4,15.4,0.47,518,263,8,4046,2054,62.5
1024,30.1,15.1,0.12,513,257,2,4011,2013,15.6"""


def test_zero_table_1_all_54_cells() -> None:
    """Within one unit as printed: the paper rounds some cells and cuts others off."""
    cells = 0
    job = Job(grad_bytes=2, batch=2048)
    model = preset("llama-7b")
    for line in ZERO.splitlines():
        dp, *printed = line.split(",")
        for at, cell in enumerate(printed):
            size = (7.5e9, 128e9, 1e12)[at // 3]
            parts = memory(model, job, Layout(dp=int(dp), zero=at % 3 + 1))
            states = sum(parts[name] for name in ("weights", "gradients", "optimizer states"))
            per_parameter = states / (sum(parameters(model).values()) - model.hidden)
            unit = 10.0 ** -len(cell.partition(".")[2])
            assert abs(per_parameter * size / 1e9 - float(cell)) < unit, (dp, cell)
            cells += 1
    assert cells == 54


# Rows of others, all that lie in tests/data


@pytest.fixture(scope="module")
def grid() -> list[dict]:
    return with_predictions(DATA / "ultrascale_playbook_configs.csv")


def errors(rows: list[dict], found: str, real: str, scale: float = 1) -> np.ndarray:
    return np.array([scale * float(row[found]) / float(row[real]) - 1 for row in rows])


def worst_ten(rows: list[dict], wrong: np.ndarray) -> str:
    order = np.argsort(-abs(wrong))[:10]
    return "\n".join(f"{wrong[at]:+.0%} {[*rows[at].values()][:13]}" for at in order)


def test_memory_of_the_playbook_grid(grid: list[dict]) -> None:
    ran = [row for row in grid if row["mem_GB"]]
    wrong = errors(ran, "pred_GiB", "mem_GB")
    said = f"median {np.median(abs(wrong)):.3f}, 90% {np.quantile(abs(wrong), 0.9):.3f}\n"
    said += worst_ten(ran, wrong)
    assert np.median(abs(wrong)) <= 0.08, said
    assert np.quantile(abs(wrong), 0.9) <= 0.20, said


def test_what_ran_is_possible_and_most_of_what_failed_is_not(grid: list[dict]) -> None:
    ran = [row for row in grid if row["mem_GB"]]
    failed = [row for row in grid if not row["mem_GB"]]
    assert [row for row in ran if row["fits"] == "no"] == []
    refused = sum(row["fits"] == "no" for row in failed) / len(failed)
    assert refused >= 0.75, refused  # 0.61 by a formula without a constant; 0.90 is not reached


def test_the_first_choice_on_two_nodes_at_most(grid: list[dict]) -> None:
    """Among the rows of a model on 1 or 2 nodes: it ran, and loses 15% at most."""
    cells = defaultdict(list)
    for row in grid:
        if int(row["nodes"]) <= 2:
            cells[row["model"], row["nodes"]].append(row)
    for cell, rows in cells.items():
        limit = HEADROOM * room(H100) / GiB
        fit = [row for row in rows if row["fits"] == "yes" and float(row["pred_GiB"]) <= limit
               and float(row["pred_worst_GiB"]) <= limit]  # fmt: skip
        first = max(fit, key=lambda row: float(row["pred_tok_s"]))
        fastest = max(float(row["tok_s"]) for row in rows if row["tok_s"])
        assert first["tok_s"], (cell, first)
        assert float(first["tok_s"]) >= 0.85 * fastest, (cell, first)


def test_memory_of_simumax() -> None:
    rows = with_predictions(DATA / "simumax_b200_measured.csv")
    wrong = errors(rows, "pred_GiB", "real_alloc_GiB")
    assert np.median(abs(wrong)) <= 0.05, worst_ten(rows, wrong)
    assert max(abs(wrong)) <= 0.05, worst_ten(rows, wrong)


def bridge() -> list[dict]:
    return with_predictions(DATA / "megatron_bridge_perf.csv")


def test_flops_per_token_of_megatron_bridge() -> None:
    ratios = defaultdict(list)
    unread = set()
    for row in bridge():
        try:
            model = model_named(row["model"], {})
        except ValueError:
            unread.add(row["model"])
            continue
        if "w/o MTP" in row["model"]:
            model = model._replace(mtp=0)
        published = float(row["model_tflop_s_gpu"]) * 1e12 / float(row["tok_s_gpu"])
        name = row["model"].replace(" (tokendrop)", "").replace(" (dropless)", "")
        ratio = published / flops_per_token(model, int(row["seq"]))
        ratios[name.replace(" (w/ MTP)", "")].append(ratio)
    for name, found in ratios.items():
        assert statistics.median(found) == pytest.approx(1, abs=0.005), name
    assert len(ratios) >= 6
    assert {name.split("_")[0].split()[0] for name in unread} == {"DeepSeekV4", "Nemotron"}


# The figure that is not reached. The experts' all-to-alls count whole here, and a trainer may hide
# some behind products: so we spread experts over fewer GPUs, and layers over more.
NOT_AMONG_TEN = {("DeepSeekV3", gpu, 256) for gpu in ("gb300", "gb200", "b300")}
NOT_AMONG_TEN |= {("DeepSeekV3", "h100", 1024), ("Qwen3_30B_a3B", "gb300", 8)}
NOT_AMONG_TEN |= {("Qwen3_235B_a22B", "b200", 64)}


def test_nvidias_choice_is_among_the_first_ten_but_for_experts() -> None:
    ranks = ranks_of_nvidias_choices()
    missed = {cell for cell, rank in ranks.items() if rank > 10}
    assert missed == NOT_AMONG_TEN, ranks
    assert len(ranks) >= 18


def test_conversions_of_a_table_s_own_figures() -> None:
    assert all(figure.met for figure in conversions()), conversions()


def test_what_is_not_reached_is_said(grid: list[dict]) -> None:
    """`course plan --validate` shows every figure; these are all that are not met."""
    missed = {figure.name for figure in figures(grid) if not figure.met}
    ranks = {name for name in missed if "NVIDIA's choice" in name}
    assert missed - ranks == {"the same, the aim"}
    assert len(ranks) == len(NOT_AMONG_TEN)
    assert sum(classes(grid).values()) == sum(not row["mem_GB"] for row in grid)


# What a reader types


def test_fifty_thousand_layouts_take_less_than_two_seconds() -> None:
    model, job = preset("llama-70b"), Job(batch=4096)
    axes = [np.random.default_rng(0).choice([1, 2, 4, 8], 50_000) for _ in range(4)]
    layout = Layout(*axes, ep=1, micro_batch=1, zero=np.ones(50_000, int))
    start = time.process_time()
    evaluate(model, job, layout, Cluster(64, H100))
    assert time.process_time() - start < 2


def test_course_plan_imports_no_torch_and_says_what_it_does_not_model() -> None:
    said = course("--model", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h100", "--days", "21")
    assert said.returncode == 0, said.stderr
    for part in ("optimizer states", "Why not", "21 days:", "Not modeled", "MFU", "x as long"):
        assert part in said.stdout
    script = "import sys; from course.command_line import run\n"
    script += "run(['plan', '--model', 'llama-8b', '--gpu', 'h100'])\n"
    script += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--model llama-70b --gpu h100 --gpus 24 --tp 3", "tp must divide the 64 attention heads"),
        ("--model llama-8b --gpu h100 --gpus 64 --pp 64", "there are 32"),
        ("--model qwen3-30b-a3b --gpu h100 --gpus 24 --ep 3", "ep must divide the 128 experts"),
        ("--model llama-8b --gpu h1000", "unknown GPU h1000"),
        ("--model llama-9b --gpu h100", "unknown model llama-9b"),
        ("--model llama-8b --gpu h100 --gpus 0", "at least 1 GPU, got 0"),
        ("--model llama-8b --gpu h100 --gpus 67 --batch 32", "a multiple of 67"),
        ("--rows nowhere.csv", "--rows needs --out"),
    ],
)
def test_bad_input_is_one_line(argv: str, said: str) -> None:
    ran = course(*argv.split())
    assert ran.returncode == 2
    assert said in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_model_that_fits_nowhere_names_the_cheapest_change() -> None:
    ran = course("--model", "llama-70b", "--gpus", "8", "--gpu", "a100")
    assert "does not fit on 8 a100" in ran.stdout
    assert "cheapest change" in ran.stdout


def test_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    head = "release,kind,model,system,gpus,precision,gbs,mbs,seq,fsdp,tp,pp,cp,vp,ep\n"
    table.write_text(
        head + "1,P,LLAMA3_8B,DGX-H100,8,FP8,128,1,8192,8,1,1,1,n/a,1\n"
        "1,P,LLAMA3_8B,DGX-H100,8,FP8,128,1,8192,8,2 (4),1,1,n/a,1\n"
        "1,P,Mine,DGX-H100,8,FP8,128,1,8192,8,1,1,1,n/a,1\n"
        "1,P,Unknown,DGX-H100,8,FP8,128,1,8192,8,1,1,1,n/a,1\n"
    )
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"Mine": known_models()["llama-8b"]}))
    out = tmp_path / "out.csv"
    ran = course("--rows", str(table), "--out", str(out), "--models", str(shapes))
    assert ran.returncode == 0, ran.stderr
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 4
    assert rows[0]["pred_tok_s"] == rows[2]["pred_tok_s"] != ""
    assert "tp is not one whole number: 2 (4)" in rows[1]["not_read"]
    assert "unknown model Unknown" in rows[3]["not_read"]
    assert "2 of them not read" in ran.stdout


def test_a_config_of_hugging_face_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(known_models()["deepseek-v3"]))
    ran = course("--model", str(path), "--gpus", "256", "--gpu", "gb300")
    assert "Best of" in ran.stdout


@pytest.mark.parametrize("trainer", WRITERS)
def test_settings_name_every_axis(trainer: str) -> None:
    said = settings(trainer, Layout(dp=4, tp=2, zero=3), Job(batch=64))
    assert any(version in said.splitlines()[0] for version in ("2026-08", "0.19", "1.15"))
    assert "2" in said.partition("\n")[2]
    if trainer in ("deepspeed", "accelerate"):
        with pytest.raises(ValueError, match="--emit"):
            settings(trainer, Layout(dp=4, pp=2), Job(batch=64))


def test_why_not_tells_the_parts() -> None:
    cluster = Cluster(16, H100)
    model, job = preset("llama-8b"), Job(sequence=4096, batch=256)
    planned = evaluate(model, job, all_layouts(model, job, cluster), cluster)
    first = best(planned, 1)[0]
    lines = why_not(model, job, planned, cluster, first)
    assert any("TP across NVLink domains" in line and "GB/s per card" in line for line in lines)
    assert any("replicas alone" in line and "does not fit" in line for line in lines)
    meshes = [mesh(planned.layout, at) for at in best(planned)]
    assert len(set(meshes)) == 5


def test_a_layout_is_checked() -> None:
    with pytest.raises(ValueError, match="must be the 8 GPUs, got 4"):
        check_layout(TINY, Job(), Layout(dp=4), Cluster(8, H100))


def test_stages_by_cost_are_nanotrons() -> None:
    """By hand for the 1.34B model: the head costs four layers; 2 of 16 stages get no block."""
    model = preset("playbook-1.34b")
    first, last = layers_of_stages(model, np.array([1, 2, 4, 16]), by_cost=True)
    assert first.tolist() == [16, 11, 6, 2]
    assert last.tolist() == [16, 5, 0, -1]


def test_a_case_of_simumax_says_what_it_is() -> None:
    row = simumax_row({"case": "llama3_70b_l12_tp2_cp4_pp1_dp1_seq32768_mbc4_cef"}, {})
    assert row.layout[:5] == (1, 2, 1, 4, 1)
    assert (row.model.layers, row.job.sequence, row.job.batch) == (12, 32768, 4)
    assert float(predicted(row)["pred_GiB"]) == pytest.approx(68.43, rel=0.05)
