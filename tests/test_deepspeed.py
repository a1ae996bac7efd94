"""DeepSpeed's lesson: real layouts, real launcher, and each claim FAILs when its line breaks."""

import gc
import inspect
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from exercises.ranks import run
from tests.lessons import ROOT, load, play

pytest.importorskip("deepspeed")
LESSON = "fsdp/02_deepspeed_zero.py"
FOLDER = ROOT / "fsdp" / "deepspeed_configs"
PLAIN = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
STRATEGIES = (ROOT / "fsdp/sharding_strategies.md").read_text()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_files_are_written_from_the_lesson(stage: int) -> None:
    assert json.loads((FOLDER / f"zero{stage}.json").read_text()) == load(LESSON).ZERO[stage]


def keys_of(config: dict) -> set[str]:
    return set(config) | {k for v in config.values() if isinstance(v, dict) for k in keys_of(v)}


def explained() -> dict[str, str]:
    """Key and default of each row of the table in fsdp/README.md."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / "fsdp/README.md").read_text(), re.M)
    return {key: default.strip() for key, default in rows}


def test_every_key_is_explained() -> None:
    lesson = load(LESSON)
    configs = [*lesson.ZERO, lesson.changed(2, offload_optimizer={"device": "cpu"})]
    assert set.union(*map(keys_of, configs)) <= set(explained())


def test_defaults_that_the_table_states_are_deepspeeds() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = {f.alias or name: f.default for name, f in DeepSpeedZeroConfig.model_fields.items()}
    adam = inspect.signature(DeepSpeedCPUAdam).parameters
    fields |= {key: adam[key].default for key in ("lr", "betas", "eps", "weight_decay")}
    least = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1})
    fields |= {k: getattr(least, k) for k in ("gradient_accumulation_steps", "gradient_clipping")}
    fields |= {"enabled": least.bfloat16_config.enabled}
    stated = {k: v for k, v in explained().items() if k in fields and v not in ("none", "by stage")}
    assert len(stated) >= 16
    for key, default in stated.items():
        assert np.allclose(fields[key], json.loads(default), rtol=1e-12, atol=0), key


def claimed_in(number: str, claim: str) -> bool:
    """Does this lesson of the folder claim so? What precedes a colon may be formatted in."""
    source = next((ROOT / "fsdp").glob(f"{number}_*.py")).read_text()
    before, colon, after = claim.partition(": ")
    return f'{colon or before}{after}"' in source


def claims_of(cell: str) -> list[tuple[str, str]]:
    """02 "a", "b"; 03 "c" -> (02, a), (02, b), (03, c)."""
    parts = [part.strip() for part in cell.split(";")]
    return [(p[:2], claim) for p in parts for claim in re.findall(r'"([^"]+)"', p)]


def rows() -> list[list[str]]:
    """The cells of every row of sharding_strategies.md, less the heads of its tables."""
    lines = [line for line in STRATEGIES.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[-1] not in ("backed by", "---")]


def test_every_row_of_strategies_is_backed_by_a_run_or_a_source() -> None:
    claims = [claim for row in rows() for claim in claims_of(row[-1])]
    assert len(claims) >= 40
    assert [claim for claim in claims if not claimed_in(*claim)] == []
    assert not claimed_in("02", "stage 3: bytes in float16")
    tests = {name for row in rows() for name in re.findall(r"`(test_\w+)`", row[-1])}
    assert tests
    assert tests <= set(globals())
    listed = set(re.findall(r"^- (\[\d\])", STRATEGIES, re.M))
    for row in rows():
        sources = set(re.findall(r"\[\d\]", row[-1]))
        assert sources <= listed, row
        assert sources or '"' in row[-1] or "`test_" in row[-1], row


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_shares_cover_everything_once(n: int) -> None:
    """Over all ranks, stages 1 to 3 hold 12 bytes of float32 a parameter and little padding."""
    P = sum(p.numel() for p in load(LESSON).GPT().parameters())
    for stage, padding in (1, 2 * n), (2, 2 * n), (3, 52 * n):
        dues = due_on(n, stage)
        assert 12 * P <= sum(f32 for f32, _, _ in dues) < 12 * (P + padding)


def due_on(n: int, stage: int) -> list[tuple]:
    lesson, dues = load(LESSON), []
    for rank in range(n):
        lesson.RANK, lesson.WORLD_SIZE = rank, n
        dues.append(lesson.due(stage, 2))
    return dues


def held_by_fsdp2() -> tuple[int, int]:
    """Bytes of float32 and of all that FSDP2 holds between backward and step, in bfloat16."""
    lesson = load(LESSON)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    gc.collect()
    gc.freeze()
    model = lesson.gpt(mesh)
    for module in *model.blocks, model:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(lesson.batch(mesh, dist.get_rank())).backward()
    held = min((lesson.census() for _ in range(3)), key=lambda held: held.total())
    return held["cpu", torch.float32], held.total()


@pytest.mark.parametrize("n", [2, 4])  # rows divide by n: no padding
def test_fsdp2_holds_16_bytes_a_parameter_over_n_all_in_float32(n: int) -> None:
    P = sum(p.numel() for p in load(LESSON).GPT().parameters())
    assert run(held_by_fsdp2, n) == [(16 * P // n, 16 * P // n)] * n


def counts() -> dict[str, int]:
    lesson, n = load(LESSON), dist.get_world_size()
    x = torch.ones(4 * n)
    with lesson.Wire() as wire:
        wire.sent = lesson.Counter()
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(1))
        dist.reduce(x, 0)
        dist.all_gather_into_tensor(torch.empty(len(x) * n), x)
        dist.reduce_scatter_tensor(torch.empty(4), x)
    return dict(wire.sent)


def test_wire_counts_whole_tensors_and_leaves_scalars_out() -> None:
    due = {"allreduce_": 16, "reduce_": 8, "_allgather_base_": 16, "_reduce_scatter_base_": 8}
    assert run(counts, 2) == [due] * 2


DIFFERS = {
    f"zero2.json: {what}" for what in ("losses, distance from FSDP2", "gradient norms, from FSDP2")
}
ALONE = {claim.replace("zero2.json", "one process") for claim in DIFFERS}
BROKEN_LOSSES = {  # each a set of breaks that meet different claims
    "one process sees rank 0's data only; gradients go to no update": (
        (
            ("for rank in range(WORLD_SIZE)])", "for rank in [0] * WORLD_SIZE])"),
            ("        engine.step()  # stage 0", "        # stage 0"),
        ),
        ALONE | DIFFERS,
    ),
    "DeepSpeed's ranks all train on rank 0's data": (
        (("by_deepspeed(engine, x_BT)", "by_deepspeed(engine, batch(mesh, 0))"),),
        DIFFERS,
    ),
    "gradients are summed, not averaged": (
        (
            (
                '"gradient_accumulation_steps": 1}',
                '"gradient_accumulation_steps": 1, "gradient_allreduce_op": "sum"}',
            ),
        ),
        DIFFERS,  # the losses by 4e-5 only
    ),
}


@pytest.mark.parametrize("what", BROKEN_LOSSES)
def test_a_wrong_loss_or_gradient_fails_its_claim(what: str) -> None:
    changes, due = BROKEN_LOSSES[what]
    config = ("--deepspeed_config", str(FOLDER / "zero2.json"))
    played = play(LESSON, 2, *changes, argv=config)
    assert played.failed == due, played.output + str(played.code)
    assert len(played.ledger) == 4
    assert played.code == 1


ONLY_LAYOUT = ("    the_same_losses(deepspeed, mesh, configs)\n", "")
BROKEN_LAYOUTS = {  # each a set of breaks that meet different claims
    "stage 1 shards nothing; small tensors stay whole; not to owners; no offload": (
        (
            ("for stage, part in PARTS]", "for stage, part in PARTS]\nZERO[1] = ZERO[0]"),
            (
                '"stage3_param_persistence_threshold": 0,',
                '"stage3_param_persistence_threshold": 10**5,',
            ),
            ("use_multi_rank_bucket_allreduce=False", "use_multi_rank_bucket_allreduce=True"),
            ('changed(2, offload_optimizer={"device": "cpu"})', "changed(2)"),
        ),
        {
            "stage 1: bytes in float32",
            "stage 1: numbers sent",
            "stage 3: bytes in bfloat16",
            "stage 3: numbers sent",
            "stage 2, to owners only: numbers reduced",
            "stage 3, kept for backward: numbers gathered",
            "offload: bytes in float32, host",
        },
    ),
    "stage 2 keeps whole gradients; stage 3 keeps parameters; frees them when told to keep": (
        (
            (
                "PARTS = enumerate([{}, FLAT, FLAT, LAYERS])",
                "PARTS = zip((0, 1, 1, 3), [{}, FLAT, FLAT, LAYERS])",
            ),
            ('"stage3_max_live_parameters": 0,', '"stage3_max_live_parameters": 10**9,'),
            ('"stage3_max_reuse_distance": 0,', '"stage3_max_reuse_distance": 10**9,'),
            ("changed(3, **keep)", "changed(3, **dict.fromkeys(keep, 0))"),
        ),
        {
            "stage 2: bytes in bfloat16",
            "stage 2: numbers sent",
            "stage 3: numbers sent",
            "stage 2, to owners only: numbers reduced",
            "stage 3, kept for backward: numbers gathered",
        },
    ),
}


@pytest.mark.parametrize("what", BROKEN_LAYOUTS)
def test_a_wrong_layout_fails_its_claims(what: str) -> None:
    changes, due = BROKEN_LAYOUTS[what]
    played = play(LESSON, 2, ONLY_LAYOUT, *changes)
    assert played.failed == due, played.output + str(played.code)


def test_it_runs_under_deepspeeds_own_launcher(tmp_path: Path) -> None:
    """Nothing is compiled, though the machine has never seen DeepSpeed before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shutil.copy(ROOT / LESSON, tmp_path)
    paths = {
        "LESSON_JSON": str(tmp_path / "ledger.json"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "c"),
    }
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]
    config = ["--deepspeed_config", str(FOLDER / "zero3.json")]
    ran = subprocess.run(
        [sys.executable, *launcher, Path(LESSON).name, *config],
        cwd=tmp_path,
        env=PLAIN | paths,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    told = json.loads((tmp_path / "ledger.json").read_text())
    assert told["ranks"] == 2
    assert [row["verdict"] for row in told["ledger"]] == ["PASS"] * 4
    assert any("--local_rank=0" in argument for argument in told["argv"])
    assert not (tmp_path / "c").exists(), "it compiled something"


def test_cpu_offload_with_deepspeeds_own_adam() -> None:
    """Compiled on first use (a minute), before there are ranks that could wait in vain."""
    build = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    ninja = {"PATH": f"{os.environ['PATH']}:{Path(sys.executable).parent}"}  # may lie there only
    subprocess.run([sys.executable, "-c", build], env=PLAIN | ninja, check=True, timeout=600)
    only_offload = (
        'configs = {f"stage {s}": config for s, config in enumerate(ZERO)} | {"offload": offloaded}'
    )
    name = (
        "        engine.destroy()\n    averages",
        "        say(type(engine.basic_optimizer))\n        engine.destroy()\n    averages",
    )
    without = ("    elif not path:\n", "    elif False:\n")
    short = (only_offload, 'configs = {"offload": offloaded}')
    played = play(LESSON, 2, short, without, name, argv=("--cpu-adam",))
    assert played.code == 0, played.output
    assert "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam" in played.output


def test_a_config_that_is_not_there_is_refused_once() -> None:
    argv = [sys.executable, ROOT / LESSON, "--deepspeed_config", "none.json"]
    alone = PLAIN | {"RANK": "0", "WORLD_SIZE": "1"}
    ran = subprocess.run(argv, env=alone, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.endswith("--deepspeed_config needs a JSON file, got none.json\n")
    assert ran.stderr.count("\n") == 1


def test_without_deepspeed_the_rest_runs_and_says_what_is_blocked() -> None:
    played = play(LESSON, 2, ("        import deepspeed\n", "        raise ImportError\n"))
    verdicts = [row["verdict"] for row in played.ledger]
    assert (played.code, verdicts) == (0, ["PASS", "PASS", "BLOCKED"])
    assert played.ledger[-1]["needs"].startswith("a system library: pip install")
