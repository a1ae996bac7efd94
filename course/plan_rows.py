"""Published tables in, the same tables with predictions out: `course plan --rows FILE.csv`.

Three forms are read: the Ultra-Scale Playbook's grid, Megatron-Bridge's performance pages, and
SimuMax's list of cases. A row that cannot be read says why in its last column.
"""

import csv
import json
import re
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
    layers_of_stages,
    memory,
    read_config,
    seconds,
    stage_bytes,
)
from course.planning import room

ADDED = ("pred_GiB", "pred_worst_GiB", "fits", "spare_GiB", "pred_s", "pred_tok_s")
ADDED += ("pred_flops_per_token", "pred_mfu_pct", "recompute", "not_read")

ALIASES = {
    "llama38b": "llama-8b",
    "llama3.18b": "llama-8b",
    "llama370b": "llama-70b",
    "llama3.170b": "llama-70b",
    "llama3.1405b": "llama-405b",
    "llama3405b": "llama-405b",
    "deepseekv3": "deepseek-v3",
    "deepseekv2": "deepseek-v2",
}

# As nanotron trains (optim/gradient_accumulator.py, models/llama.py): SiLU and product apart, a
# loss that is not fused, and what torch reserved as the figure of memory.
NANOTRON = Job(
    bucket_bytes=2, half_bytes=2, layer_bytes=0, mlp_saved=8, logit_bytes=12, by_cost=True
)

# As Megatron-Bridge's recipes for speed train: gradients are summed in bfloat16
# (perf_recipes/_common.py: grad_reduce_in_fp32 = False).
BRIDGE = Job(grad_bytes=2)


class Row(NamedTuple):
    """A row that was read."""

    model: Model
    job: Job
    layout: Layout
    gpu: str
    gpus: int
    refused: str = ""  # why the trainer does not start, whatever the memory
    recompute_unknown: bool = False  # the table does not say what is recomputed


def model_named(name: str, more: dict[str, dict]) -> Model:
    """The model of a table's name; ValueError if neither we nor `more` know it."""
    plain = re.sub(r"\(.*\)|[\s_-]", "", name.lower())
    known = known_models() | more
    for candidate in (name, ALIASES.get(plain, ""), f"playbook-{plain}"):
        if candidate in known and known[candidate].get("model_type") != "resnet":
            return read_config(known[candidate])
    for candidate in known:
        if re.sub(r"[\s_-]", "", candidate) == plain:
            return read_config(known[candidate])
    raise ValueError(f"unknown model {name}: give its shape by --models")


def number(row: dict[str, str], column: str, otherwise: int | None = None) -> int:
    """A whole number in a cell; ValueError with column and value if it is none."""
    value = (row.get(column) or "").strip()
    if value in ("", "n/a") and otherwise is not None:
        return otherwise
    if not re.fullmatch(r"\d+", value):
        raise ValueError(f"{column} is not one whole number: {value or 'empty'}")
    return int(value)


def playbook_row(row: dict[str, str], more: dict[str, dict]) -> Row:
    """A configuration of the Playbook: nanotron on nodes of 8 H100, 4,096 tokens."""
    model = model_named(row["model"], more)
    dp, tp, pp = (number(row, axis) for axis in ("dp", "tp", "pp"))
    micro_batch = number(row, "micro_batch")
    micro_batches = number(row, "grad_acc")
    layout = Layout(dp=dp, tp=tp, pp=pp, micro_batch=micro_batch, zero=number(row, "zero"))
    job = NANOTRON._replace(sequence=4096, batch=dp * micro_batch * micro_batches)
    # Rows without a pipeline were not run anew (scripts/scaling_benchmarks.py): older code.
    job = job._replace(keep_gathered=pp == 1, reserve=known_gpus()["h100"].reserve)
    _, last = layers_of_stages(model, np.array(pp), by_cost=True)
    refused = ""
    if micro_batches < pp - 1:
        refused = f"1F1B asks for pp - 1 micro-batches, has {micro_batches} (nanotron)"
    elif last < 0 and (dp > 1 or pp > model.layers + 5):
        refused = f"a stage gets no block: {model.layers} layers on {pp} stages (nanotron)"
    return Row(model, job, layout, "h100", dp * tp * pp, refused)


def bridge_row(row: dict[str, str], more: dict[str, dict]) -> Row:
    """A row of Megatron-Bridge's performance pages."""
    model = model_named(row["model"], more)
    if "w/o MTP" in row["model"]:
        model = model._replace(mtp=0)
    gpus = number(row, "gpus")
    tp, pp, cp = (number(row, axis, 1) for axis in ("tp", "pp", "cp"))
    gpu = row["system"].lower().removeprefix("dgx-")
    if gpu not in known_gpus():
        raise ValueError(f"unknown system {row['system']}")
    zero = 3 if number(row, "fsdp", 0) > 1 else 1
    layout = Layout(
        dp=gpus // (tp * pp * cp), tp=tp, pp=pp, cp=cp, ep=number(row, "ep", 1),
        micro_batch=number(row, "mbs"), chunks=number(row, "vp", 1), zero=zero,
    )  # fmt: skip
    compute = "bf16" if row["precision"] == "BF16" else "fp8"  # NVFP4 is planned as FP8
    job = BRIDGE._replace(sequence=number(row, "seq"), batch=number(row, "gbs"), compute=compute)
    if model.kv_rank:
        job = job._replace(state_bytes=8)  # moments in bfloat16: recipes/deepseek, DeepSeek alone
    return Row(model, job, layout, gpu, gpus, recompute_unknown=True)


def simumax_row(row: dict[str, str], more: dict[str, dict]) -> Row:
    """A case of SimuMax: Megatron on one node of 8 B200, a few layers of a model, fused loss."""
    case = row["case"]
    found = {
        key: int(value) for key, value in re.findall(r"_(tp|pp|dp|cp|ep|l|mbc|seq)(\d+)", case)
    }
    family = re.match(r"llama3_\d+b|deepseekv\d", case)
    if not family or not {"l", "mbc"} <= found.keys():
        raise ValueError(f"not a case of SimuMax: {case}")
    model = model_named(family[0], more)._replace(layers=found["l"], mtp=0)
    if family[0] == "llama3_405b":
        model = model._replace(kv_heads=16)  # so in its run_pretrain_llama3.sh
    if model.experts:
        model = model._replace(dense_layers=1)  # so in its run_pretrain_deepseekv2.sh
    axes = {axis: found.get(axis, 1) for axis in ("dp", "tp", "pp", "cp", "ep")}
    layout = Layout(**axes)
    job = Job(sequence=found.get("seq", 4096), batch=found["mbc"] * layout.dp, hide=False)
    return Row(model, job, layout, "b200", 8)


FORMS = {"grad_acc": playbook_row, "system": bridge_row, "case": simumax_row}


def predicted(row: Row) -> dict[str, str]:
    """The columns added to a row that was read."""
    gpu = known_gpus()[row.gpu]
    layout = Layout(*[np.array(axis) for axis in row.layout])
    if row.recompute_unknown:  # the least that fits
        while layout.recompute < 2 and sum(memory(row.model, row.job, layout).values()) > room(gpu):
            layout = layout._replace(recompute=layout.recompute + 1)
    at_worst = float(sum(memory(row.model, row.job._replace(keep_gathered=False), layout).values()))
    shown = float(sum(memory(row.model, row.job, layout).values()))
    if row.job.by_cost and row.layout.pp > 1:  # nanotron logs rank 0's, the first stage's
        first, _ = layers_of_stages(row.model, layout.pp, True)
        shown = float(sum(stage_bytes(row.model, row.job, layout, first, True, False).values()))
    step = float(sum(seconds(row.model, row.job, layout, gpu).values()))
    tokens = row.job.batch * row.job.sequence / step
    flops = flops_per_token(row.model, row.job.sequence)
    peak = gpu.fp8 if row.job.compute == "fp8" else gpu.bf16
    spare = room(gpu) - at_worst
    return {
        "pred_GiB": f"{shown / GiB:.2f}",
        "pred_worst_GiB": f"{at_worst / GiB:.2f}",
        "fits": "no" if spare < 0 or row.refused else "yes",
        "spare_GiB": f"{spare / GiB:.2f}",
        "pred_s": f"{step:.4f}",
        "pred_tok_s": f"{tokens:.0f}",
        "pred_flops_per_token": f"{flops:.5g}",
        "pred_mfu_pct": f"{100 * tokens / row.gpus * flops / peak:.1f}",
        "recompute": str(int(layout.recompute)),
        "not_read": f"refused: {row.refused}" if row.refused else "",
    }


def read(path: Path) -> tuple[list[dict[str, str]], str]:
    """The rows of a file, and the column that tells its form; ValueError if it has none of ours."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for column in FORMS:
        if rows and column in rows[0]:
            return rows, column
    raise ValueError(f"{path} is no table of a form that we know: needs a column of {[*FORMS]}")


def with_predictions(path: Path, models: Path | None = None) -> list[dict[str, str]]:
    """The rows of a table with the columns of ADDED; no row is left out."""
    more = json.loads(models.read_text(encoding="utf-8")) if models else {}
    rows, form = read(path)
    done = []
    for row in rows:
        added = dict.fromkeys(ADDED, "")
        try:
            added |= predicted(FORMS[form](row, more))
        except ValueError as error:
            added["not_read"] = str(error)
        done.append(row | added)
    return done


def write_rows(rows: list[dict[str, str]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
