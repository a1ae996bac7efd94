"""The lesson on DeepSpeed's keys: real values, real launcher; each claim FAILs when it should."""

import inspect
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from course.lessons import ROOT
from course.playing import load, play
from course.ranks import run
from tests.helpers.deepspeed_built import built
from tests.helpers.deepspeed_launcher import verdicts_under_deepspeed
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="wants DeepSpeed")
LESSON = "fsdp/02_deepspeed_config.py"
FOLDER = ROOT / "fsdp" / "deepspeed_configs"
ON_CPU = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_files_are_written_from_the_lesson(stage: int, tmp_path: Path) -> None:
    load(LESSON).write_configs(str(tmp_path))
    written = (tmp_path / f"zero{stage}.json").read_text()
    assert written == (FOLDER / f"zero{stage}.json").read_text()
    assert json.loads(written)["zero_optimization"]["stage"] == stage


def test_no_version_that_does_not_clip_by_default_is_allowed() -> None:
    """Lesson and tables say "since 0.19.3"; up to 0.19.2 a config without the key did not clip."""
    asked = re.search(r'"deepspeed>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert tuple(map(int, asked[1].split("."))) >= (0, 19, 3)


def test_the_file_that_is_tried_says_what_is_not(tmp_path: Path) -> None:
    """Any file: one in float16, with a schedule and a decay of its own, runs in float32."""
    lesson = load(LESSON)
    said = []
    lesson.print0 = lambda *words: said.append(" ".join(words))
    config = lesson.read_config(str(FOLDER / "fp16.json"))
    assert config["zero_optimization"] == {"stage": 2}
    assert "fp16" not in config
    assert "scheduler" not in config
    assert config["optimizer"] == lesson.COMMON["optimizer"]
    file = json.loads((FOLDER / "fp16.json").read_text())
    for key in set(file) - {"zero_optimization"}:
        assert key in " ".join(said), key


def dtype_of_the_engine() -> str:
    lesson = load(LESSON)
    device = torch.device("cpu")
    engine = lesson.start_engine(lesson.import_deepspeed(device), device, lesson.COMMON)
    return str(engine.module.head.weight.dtype)


def test_the_common_config_computes_in_bfloat16() -> None:
    assert run(dtype_of_the_engine, 1) == ["torch.bfloat16"]


def keys_of(config: dict) -> set[str]:
    return set(config) | {k for v in config.values() if isinstance(v, dict) for k in keys_of(v)}


def explained() -> dict[str, str]:
    """Key and default of each row of the table in fsdp/README.md."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / "fsdp/README.md").read_text(), re.M)
    return {key: default.strip() for key, default in rows}


def test_every_key_is_explained() -> None:
    lesson = load(LESSON)
    configs = [*lesson.ZERO, lesson.with_zero_options(2, offload_optimizer={"device": "cpu"})]
    configs.append({"data_types": {"grad_accum_dtype": "fp32"}, "adam_w_mode": False})
    assert set.union(*map(keys_of, configs)) <= set(explained())


def test_defaults_that_the_table_states_are_deepspeeds() -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.config import ADAM_W_MODE_DEFAULT, DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = {f.alias or name: f.default for name, f in DeepSpeedZeroConfig.model_fields.items()}
    adam = inspect.signature(DeepSpeedCPUAdam).parameters
    fields |= {key: adam[key].default for key in ("lr", "betas", "eps", "weight_decay")}
    least = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1})
    fields |= {k: getattr(least, k) for k in ("gradient_accumulation_steps", "gradient_clipping")}
    fields |= {"enabled": least.bfloat16_config.enabled, "adam_w_mode": ADAM_W_MODE_DEFAULT}
    stated = {k: v for k, v in explained().items() if k in fields and v not in ("none", "by stage")}
    assert len(stated) >= 17
    for key, default in stated.items():
        assert np.allclose(fields[key], json.loads(default), rtol=1e-12, atol=0), key


FSDP2 = {f"FSDP2: {what}" for what in ("losses, error", "gradient norms, error")}
STAGES = {
    claim.replace("FSDP2", name)
    for name in ("stage 0", "stage 1", "stage 2", "stage 3", "offload")
    for claim in FSDP2
}
BROKEN_LOSSES = {
    "one process sees rank 0's data only": (
        [
            (
                "random_ascii(device, rank) for rank in range(WORLD_SIZE)",
                "random_ascii(device, 0) for rank in range(WORLD_SIZE)",
            )
        ],
        FSDP2 | STAGES,
    ),
    "gradients go to no update": (
        [
            (
                "            engine.step()  # does nothing before the last micro-batch of a step\n",
                "",
            )
        ],
        STAGES,
    ),
    "DeepSpeed's ranks all train on rank 0's data": (
        [
            (
                "seen = train_engine(engine, x_BT, steps=3)",
                "seen = train_engine(engine, random_ascii(device, 0), steps=3)",
            )
        ],
        STAGES,
    ),
    "FSDP2's ranks all train on rank 0's data": (
        [
            (
                "train_torch(model, x_BT, steps=3)",
                "train_torch(model, random_ascii(device, 0), steps=3)",
            )
        ],
        FSDP2,
    ),
}
BROKEN_FILE = {
    "gradients are summed, not averaged": (  # which DeepSpeed refuses for stage 3
        [
            (
                '"gradient_accumulation_steps": 1}',
                '"gradient_accumulation_steps": 1, "gradient_allreduce_op": "sum"}',
            )
        ],
        {claim.replace("FSDP2", "zero2.json") for claim in FSDP2},  # the losses by 4e-5 only
    ),
}


NO_KEYS = [
    (
        "        check_batch_size(deepspeed, device)\n"
        "        check_adam_is_adamw(deepspeed, device)\n"
        "        check_clipping(deepspeed, device)\n",
        "        pass\n",
    ),
    ("        check_messages(deepspeed, device)\n", "        pass\n"),
]
NO_VALUES = ("    check_values(deepspeed, device, configs)\n", "")
MOVED = "with adam_w_mode false: they move by"
PREFETCHED = "stage 3, 100,000 live: all-gathers, at most"
BROKEN_KEYS = {  # each a set of breaks that meet different claims
    "Adam in AdamW's mode (Try); no clipping; other accumulation; buckets stay small": (
        [
            ("adam_w_mode=False", "adam_w_mode=True"),
            ('    del config["gradient_clipping"]\n', '    config["gradient_clipping"] = 0\n'),
            ('"gradient_accumulation_steps": 2,', '"gradient_accumulation_steps": 3,'),
            ("reduce_bucket_size=size,", "reduce_bucket_size=BUCKET,"),
            ('"stage3_max_live_parameters": 0,', '"stage3_max_live_parameters": 10**9,'),  # Try
        ],
        {
            MOVED,
            "no gradient_clipping: norm of a step",
            "sequences per update",
            "buckets of 1,000,000: all-reduces",
            "stage 3, none live: all-gathers",
            "the same without prefetch: all-gathers",  # three micro-batches
        },
    ),
    "no prefetch; L2 by name; torch that lacks all_gather_into_tensor; buckets are large": (
        [
            ('"stage3_prefetch_bucket_size": 10_000,', '"stage3_prefetch_bucket_size": 0,'),
            (
                '"torch_adam": True, **params}',
                '"torch_adam": True, "adam_w_mode": False, **params}',
            ),
            (
                "    P = sum(p.numel() for p in GPT().parameters())\n",
                "    P = sum(p.numel() for p in GPT().parameters())\n"
                "    import deepspeed.runtime.utils as utils\n"
                "    utils.dist.has_all_gather_into_tensor = lambda: False\n",
            ),
            ("reduce_bucket_size=size,", "reduce_bucket_size=10 * size,"),
        ],
        {
            PREFETCHED,
            "type Adam: unused weights shrink to",
            "allgather_bucket_size 2,000: all-gathers",
            "buckets of 100,000: all-reduces",
        },
    ),
    "it clips although told not to": (
        ('config | {"gradient_clipping": 0}', 'config | {"gradient_clipping": 1.0}'),
        {"gradient_clipping 0: norm of a step / gradient's"},
    ),
}


ZERO2 = ("--deepspeed_config", str(FOLDER / "zero2.json"))
BREAKS = [
    Breaks(BROKEN_KEYS, changes=[NO_VALUES]),
    Breaks(BROKEN_LOSSES, changes=NO_KEYS),
    Breaks(BROKEN_FILE, argv=ZERO2),
]
ON_GPUS = OnGpus(  # DeepSpeed asks the driver for its accelerator
    [("deepspeed = import_deepspeed(device, options.cpu_adam)", "deepspeed = None")]
)
NOT_THERE = ("        import deepspeed\n", "        raise ImportError\n")
WITHOUT = {"deepspeed": Without([NOT_THERE], {"what the keys change"})}


@pytest.mark.deep
def test_allgather_bucket_size_times_ten_changes_no_message() -> None:
    """The key is read and checked, but nothing is split by it: no claim could notice a change."""
    played = play(
        LESSON, 2, NO_VALUES, ("allgather_bucket_size=2_000", "allgather_bucket_size=20_000")
    )
    played.expect(set())


@pytest.mark.deep
def test_it_runs_under_deepspeeds_own_launcher(tmp_path: Path) -> None:
    """Nothing is compiled, though the machine has never seen DeepSpeed before."""
    verdicts = verdicts_under_deepspeed(LESSON, FOLDER / "zero3.json", tmp_path)
    assert verdicts == ["PASS"] * 4


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_cpu_offload_with_deepspeeds_own_adam() -> None:
    """Compiled once, before there are ranks that could wait for nothing."""
    compiled = built()
    find_it = ("    if cpu_adam:  #", f"    os.environ |= {compiled}\n    if cpu_adam:  #")
    only_offload = (
        '    configs = {f"stage {stage}": config for stage, config in enumerate(ZERO)}\n',
        "    configs = {}\n",
    )
    name = (
        "        seen = train_engine(engine, x_BT, steps=3)\n",
        "        seen = train_engine(engine, x_BT, steps=3)\n"
        "        print0(type(engine.basic_optimizer))\n",
    )
    without = ("        check_messages(deepspeed, device)\n", "        pass\n")
    played = play(LESSON, 2, find_it, only_offload, without, name, argv=("--cpu-adam",))
    assert played.code == 0, played.output
    assert "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam" in played.output


@pytest.mark.deep
def test_a_config_that_is_not_there_is_refused_once() -> None:
    argv = [sys.executable, ROOT / LESSON, "--deepspeed_config", "none.json"]
    alone = ON_CPU | {"RANK": "0", "WORLD_SIZE": "1"}
    ran = subprocess.run(argv, env=alone, capture_output=True, text=True, timeout=150)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "--deepspeed_config needs a JSON file; got none.json; see" in ran.stderr
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("cpu_adam", [False, True])
def test_each_run_that_is_compared_is_what_it_is_called(cpu_adam: bool) -> None:
    """All have the same values, so values do not tell one stage from another."""
    lesson = load(LESSON)
    options = SimpleNamespace(deepspeed_config=None, write_configs=None, cpu_adam=cpu_adam)
    lesson.command_line = lambda flags: options
    for name in ("launch", "setup", "import_deepspeed", "finish"):
        setattr(lesson, name, Mock())
    for name in ("batch_size", "adam_is_adamw", "clipping", "messages", "values"):
        setattr(lesson, f"check_{name}", Mock())
    lesson.main()
    configs = lesson.check_values.call_args.args[2]
    zero = {name: config["zero_optimization"] for name, config in configs.items()}
    stages = {"stage 0": 0, "stage 1": 1, "stage 2": 2, "stage 3": 3, "offload": 2}
    assert {name: keys["stage"] for name, keys in zero.items()} == stages
    offloads = {name: keys.get("offload_optimizer") for name, keys in zero.items()}
    assert offloads == dict.fromkeys(stages) | {"offload": {"device": "cpu"}}
    assert configs["offload"]["optimizer"]["params"]["torch_adam"] is not cpu_adam


def test_ranks_have_different_batches() -> None:
    """With the same one everywhere, nothing would tell a gradient that stays on its rank."""
    lesson = load(LESSON)
    device = torch.device("cpu")
    assert not lesson.random_ascii(device, 0).equal(lesson.random_ascii(device, 1))
