"""The lesson on a whole run with DeepSpeed: real files and launchers; each claim can FAIL."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from course.lessons import ROOT
from course.playing import load, play
from course.ranks import run
from tests.helpers.deepspeed_launcher import verdicts_under_deepspeed
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="wants DeepSpeed")
LESSON = "fsdp/07_deepspeed_train.py"
FOLDER = ROOT / "fsdp" / "deepspeed_configs"


def test_the_files_are_written_from_the_lesson(tmp_path: Path) -> None:
    lesson = load(LESSON)
    lesson.write_configs(str(tmp_path))
    assert {"offload_cpu.json", "offload_nvme.json", "fp16.json"} <= set(lesson.CONFIGS)
    for name in lesson.CONFIGS:
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text()
    of_lesson_02 = {"zero1.json", "zero2.json", "zero3.json"}
    assert {path.name for path in FOLDER.iterdir()} == set(lesson.CONFIGS) | of_lesson_02


def keys_of(config: dict) -> set[str]:
    return set(config) | {k for v in config.values() if isinstance(v, dict) for k in keys_of(v)}


def explained() -> dict[str, str]:
    """Key and default of each row of the tables in fsdp/README.md."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / "fsdp/README.md").read_text(), re.M)
    return {key: default.strip() for key, default in rows}


def test_every_key_of_every_file_is_explained() -> None:
    for path in FOLDER.glob("*.json"):
        assert keys_of(json.loads(path.read_text())) <= set(explained()), path.name


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_deepspeed_reads_every_file(path: Path) -> None:
    """Its sections for precision and for ZeRO refuse a key that they do not know."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = json.loads(path.read_text())
    read = DeepSpeedConfig(config)
    assert read.zero_optimization_stage == config["zero_optimization"]["stage"]
    misspelt = {"zero_optimization": config["zero_optimization"] | {"stages": 1}}
    with pytest.raises(ValueError, match="stages"):
        DeepSpeedConfig(config | misspelt)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_the_files_are_for_large_models(path: Path) -> None:
    """The sizes of buckets are DeepSpeed's, and the host's Adam is not torch's slow one."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = json.loads(path.read_text())
    fields = {f.alias or name: f.default for name, f in DeepSpeedZeroConfig.model_fields.items()}
    for key, value in config["zero_optimization"].items():
        if key.endswith(("_size", "_threshold", "_parameters", "_distance")) and "hpz" not in key:
            assert value == fields[key], key
    assert "torch_adam" not in config["optimizer"]["params"]
    if "scheduler" in config:
        assert config["scheduler"]["params"]["warmup_num_steps"] >= 1000


def test_defaults_of_these_sections_are_deepspeeds() -> None:
    from deepspeed.runtime.lr_schedules import WarmupLR
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    fields = dict(AIO_DEFAULT_DICT)
    for section in (
        DeepSpeedBF16Config,
        DeepSpeedFP16Config,
        DeepSpeedZeroConfig,
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    ):
        fields |= {name: field.default for name, field in section.model_fields.items()}
    del fields["buffer_count"]  # two sections have it, with two defaults
    names = WarmupLR.__init__.__code__.co_varnames[2:6]
    fields |= dict(zip(names, WarmupLR.__init__.__defaults__, strict=False))
    assert fields["warmup_type"] == explained()["warmup_type"] == "log"
    stated = {k: v for k, v in explained().items() if k in fields}
    unsaid = ("none", "by stage", "log", "the optimizer's")
    compared = {k: v for k, v in stated.items() if v not in unsaid}
    assert len(compared) >= 29
    for key, default in compared.items():
        assert np.allclose(fields[key], json.loads(default), rtol=1e-12, atol=0), key


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_ranks_together_save_everything_once(n: int) -> None:
    """Stages 1 and 2 pad the moments at the end; stage 3 rounds each tensor's share up."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = n
    sizes = [p.numel() for p in lesson.small_gpt().parameters()]
    for stage, padding in (1, 8 * 2 * n), (3, 12 * n * len(sizes)):
        total = 0
        for rank in range(n):
            lesson.RANK = rank
            total += lesson.expected_states(stage)
        assert 12 * sum(sizes) <= total <= 12 * sum(sizes) + padding


def test_two_epochs_differ_in_order_and_each_holds_every_sequence_once() -> None:
    lesson = load(LESSON)
    x_ST = torch.arange(lesson.EPOCH * 8).view(-1, 1)
    updates = [lesson.sequences_of(update, x_ST) for update in range(2 * lesson.EPOCH)]
    first, second = torch.cat(updates[: lesson.EPOCH]), torch.cat(updates[lesson.EPOCH :])
    assert first.sort(0).values.equal(x_ST)
    assert second.sort(0).values.equal(x_ST)
    assert not first.equal(second)


ALL = "    engine = start_engine(deepspeed, device, config_of(2))\n    losses = check_counting"
NO_BF16 = ("    check_bf16(deepspeed, x_ST, folder, expected, device)\n", "")
NO_FSDP2 = ("    check_fsdp2(x_ST, x_ET, expected, device)\n", "")
LOSSES = {f"stage {stage}: losses, error" for stage in (1, 2, 3)}
HELD_OUT = {f"stage {stage}: held-out loss, error" for stage in (1, 2, 3)}
FEWER = {"fewer ranks, stage 1 to 2: losses, error", "fewer ranks, stage 3: losses, error"}

LINES = {  # each a set of breaks that meet different claims
    "a warmup from 1e-4 (Try); no states (Try); masters given up; FSDP2 on other data": (
        [
            ('"warmup_min_lr": 0,', '"warmup_min_lr": 1e-4,'),
            (
                "resumed.load_checkpoint(folder)",
                "resumed.load_checkpoint(folder, load_optimizer_states=False)",
            ),
            ('config_of(2, "bf16"))', "config_of(2, bf16=ALL_BF16))"),
            (
                "train_torch(model, lambda u: micro_batches(u, x_ST), device)",
                "train_torch(model, lambda u: micro_batches(u, 0 * x_ST), device)",
            ),
        ],
        {
            "updates that changed no weight",
            *LOSSES,
            *HELD_OUT,
            *FEWER,
            "resumed in stage 1: losses that differ",
            "resumed in stage 3: losses that differ",
            "bf16 with masters: LayerNorm masters moved",
            "stage 2, bf16: masters and moments",
            "stage 2, bf16: bytes on the disk / P",
            "bf16: losses, error against float32's",
            "FSDP2: losses, error",
            "FSDP2: held-out loss, error",
        },
    ),
    "smaller micro-batches; masters where none should be; a mean of means; moments left behind": (
        [
            ('MICRO_BATCH,\n    "gradient', 'MICRO_BATCH // 2,\n    "gradient'),
            ('steps": ACCUMULATION,', 'steps": 2 * ACCUMULATION,'),
            ("config_of(2, bf16=ALL_BF16))", 'config_of(2, "bf16"))'),
            ("[loss.item() * len(mine), len(mine)]", "[loss.item(), 1]"),
            (
                "engine.load_checkpoint(folder)\n    losses",
                "engine.load_checkpoint(folder, load_optimizer_states=False)\n    losses",
            ),
            ("on_fewer_ranks(deepspeed, 2, x_ST,", "on_fewer_ranks(deepspeed, 2, x_ST.flip(0),"),
            (
                "        engine.load_checkpoint(folder)\n    except",
                "        engine.load_checkpoint(folder, load_optimizer_states=False)\n    except",
            ),
            (
                'client_state={"losses": losses}',
                'client_state={"losses": losses, "x": torch.ones(1000)}',
            ),
        ],
        {
            "calls of engine.step()",
            "bf16 without masters: LayerNorm weights moved",
            *HELD_OUT,
            "FSDP2: held-out loss, error",
            *FEWER,
            "fewer ranks: plain checkpoint refused",
            "stage 1: bytes of weights in a model file",
            "stage 3: bytes of weights in a model file",
        },
    ),
}
SHARED = {
    "two blocks share a layer": (
        "    return small_gpt().to(device)\n",
        "    model = small_gpt().to(device)\n"
        "    model.blocks[1].up = model.blocks[0].up\n"
        "    return model\n",
        {
            "stage 1: masters and moments",
            "stage 2, bf16: masters and moments",
            "stage 3: masters and moments",
            "stage 1: bytes of weights in a model file",
            "stage 2, bf16: bytes of weights in a model file",
            "stage 1: bytes on the disk / P",
            "stage 2, bf16: bytes on the disk / P",
            "stage 3: bytes on the disk / P",
            "stage 1, universal: bytes of tensors",
            "stage 3, universal: bytes of tensors",
        },
    ),
}


ONLY_COUNTED = [  # what ends after half of the updates has half as many losses
    NO_FSDP2,
    (
        '    compare("stage 2", losses, evaluate(engine, x_ET, device), expected)\n',
        "    return\n",
    ),
]
COUNTED = {
    "the loop counts calls, not updates": (
        "    while engine.global_steps < stop:\n",
        "    while engine.micro_steps < stop:\n",
        {
            "calls of engine.step()",
            "updates that the engine counts",
            "steps of the scheduler",
            "updates that changed no weight",
        },
    ),
    "nothing is learned": (
        '"lr": 1e-3,',
        '"lr": 1e-6,',
        {"one process: held-out loss falls by"},
    ),
}


# It computes in float16 all the same, which DeepSpeed does not expect of this CPU.
ONLY_FP16 = [
    (ALL, "    check_fp16(deepspeed, x_ST, device)\n    return\n" + ALL),
    NO_FSDP2,
    (
        "    deepspeed = import_deepspeed(device)\n",
        "    deepspeed = import_deepspeed(device)\n"
        "    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True\n",
    ),
]
FP16 = {
    "the scale is never too high": (
        [('"initial_scale_power": 24', '"initial_scale_power": 10')],
        {"fp16: updates left out, 24 - log2(scale)", "fp16: updates left out, at least"},
    ),
    "the first overflow does not halve it; the loop steps the scheduler, too": (
        [
            ('"hysteresis": 1', '"hysteresis": 2'),
            (
                "            engine.step()\n            of_update",
                "            engine.step()\n"
                "            engine.lr_scheduler.step()\n"
                "            of_update",
            ),
        ],
        {"fp16: updates left out, 24 - log2(scale)", "fp16: steps of the scheduler"},
    ),
}


BREAKS = [
    Breaks(LINES),
    Breaks(SHARED, changes=[NO_FSDP2]),
    Breaks(COUNTED, changes=ONLY_COUNTED),
    Breaks(FP16, changes=ONLY_FP16),
]
ON_GPUS = OnGpus(
    [
        ("deepspeed = import_deepspeed(device)", "deepspeed = None"),  # it asks the driver
        ("torch.randint(32_768, (2, 2049)", "torch.randint(1024, (2, 65)"),
        (
            "GPT(L=16, D=2048, T=2048, V=32_768, heads=16)",
            "GPT(L=2, D=256, T=64, V=1024, heads=2)",
        ),
    ],
    ranks=(1, 2),
)
NOT_THERE = ("        import deepspeed\n", "        raise ImportError\n")
WITHOUT = {"deepspeed": Without([NOT_THERE], {"what DeepSpeed does"})}


@pytest.mark.deep
def test_fp16_where_deepspeed_allows_it() -> None:
    played = play(LESSON, 2, *ONLY_FP16)
    played.expect(set())
    assert [row["claim"].partition(":")[0] for row in played.ledger[2:]] == ["fp16"] * 3


@pytest.mark.deep
def test_stage_3_and_the_others_do_not_load_each_other() -> None:
    """Not even universal checkpoints: the files of stage 3 bear other names."""
    other = ("on_fewer_ranks(deepspeed, 2, x_ST,", "on_fewer_ranks(deepspeed, 3, x_ST,")
    played = play(LESSON, 2, NO_BF16, NO_FSDP2, other)
    assert "check_ckpt_list" in str(played.code)


def ranks_of_gathers(hpz: int) -> dict[int, int]:
    """How many gathers of an update of two micro-batches are among how many ranks."""
    counter = load("fsdp/02_deepspeed_config.py")
    lesson = load(LESSON)
    device = lesson.torch.device("cpu")
    zero = counter.ZERO[3]["zero_optimization"] | {"zero_hpz_partition_size": hpz}
    config = lesson.config_of(3, "bf16", zero_optimization=zero)
    engine = lesson.start_engine(lesson.import_deepspeed(device), device, config)
    x_ST, _ = lesson.read_sequences(None)
    lesson.train(engine, x_ST, 1)
    with counter.CountedCommunication() as counted:
        lesson.train(engine, x_ST, 2)
    return dict(Counter(len(c.ranks) for c in counted.calls("all_gather") if c.elements > 1))


@pytest.mark.deep
def test_hpz_gathers_among_all_ranks_once_per_update() -> None:
    """Every module that holds parameters: forward and backward, two micro-batches."""
    lesson = load(LESSON)
    holders = [m for m in lesson.small_gpt().modules() if list(m.parameters(recurse=False))]
    once = len(holders)
    assert run(ranks_of_gathers, 4, 1)[0] == {4: 4 * once}
    assert run(ranks_of_gathers, 4, 2)[0] == {4: once, 2: 3 * once}


@pytest.mark.deep
def test_a_config_file_trains() -> None:
    """Of lesson 02's files DeepSpeed's own launcher takes one, below."""
    name = "offload_cpu.json"
    played = play(LESSON, 2, argv=("--deepspeed_config", str(FOLDER / name)))
    played.expect(set())
    assert [row["claim"] for row in played.ledger] == [f"{name}: losses, error"]


@pytest.mark.deep
def test_a_config_file_says_what_is_replaced(tmp_path: Path) -> None:
    """Batch, rates and Adam are the lesson's, whatever the file says; its stage is not."""
    path = tmp_path / "large.json"
    zero = {"stage": 1}
    more = {"train_batch_size": 4096, "gradient_accumulation_steps": 5, "gradient_clipping": 7}
    path.write_text(json.dumps({"zero_optimization": zero} | more))
    played = play(LESSON, 2, argv=("--deepspeed_config", str(path)))
    played.expect(set())
    assert [row["claim"] for row in played.ledger] == ["large.json: losses, error"]
    assert "gradient_accumulation_steps, gradient_clipping" in played.output


@pytest.mark.deep
def test_it_runs_under_deepspeeds_own_launcher(tmp_path: Path) -> None:
    verdicts = verdicts_under_deepspeed(LESSON, FOLDER / "zero1.json", tmp_path)
    assert verdicts == ["PASS"]


@pytest.mark.deep
def test_text_that_is_too_short_is_refused_once(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("once upon a time")
    argv = [sys.executable, ROOT / LESSON, "--data", str(tmp_path / "short")]
    alone = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}
    ran = subprocess.run(argv, env=alone, capture_output=True, text=True, timeout=150)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "--data needs 1,755 bytes of text; got 16; take a longer one" in ran.stderr


def test_what_is_held_out_follows_what_is_trained_on(tmp_path: Path) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    text = bytes(i % 251 for i in range(65 * 60))
    (tmp_path / "text").write_bytes(text)
    x_ST, x_ET = lesson.read_sequences(str(tmp_path / "text"))
    assert (x_ST.shape, x_ET.shape) == ((6 * 2 * 2 * 2, 65), (2 * 2 + 1, 65))
    assert bytes(torch.cat([x_ST, x_ET]).flatten().tolist()) == text[: 65 * 53]


def test_the_loss_is_on_the_byte_that_follows() -> None:
    lesson = load(LESSON)
    x_BT = torch.arange(12).view(2, 6)
    assert lesson.mean_loss(lambda x_BT: 100.0 * F.one_hot(x_BT + 1, 256), x_BT) < 1e-6


def test_each_run_is_of_the_stage_that_it_is_called() -> None:
    """All have the same losses, so losses do not tell one stage from another."""
    lesson = load(LESSON)
    for name in ("evaluate", "check_bf16", "check_fp16", "check_other_world"):
        setattr(lesson, name, Mock())
    lesson.start_engine = lambda deepspeed, device, config: Mock(config=config)
    lesson.check_counting = lambda engine, x_ST: [engine.config["zero_optimization"]["stage"]]
    lesson.check_resume = lambda deepspeed, stage, x_ST, place, device: (Mock(), [stage, place])
    lesson.compare = Mock()
    lesson.run_deepspeed(None, None, None, Path("all"), {}, None)
    compared = [call.args[:2] for call in lesson.compare.call_args_list]
    assert compared == [
        ("stage 2", [2]),
        ("stage 1", [1, Path("all/stage1")]),
        ("stage 3", [3, Path("all/stage3")]),
    ]
    saved = lesson.check_other_world.call_args.args[1]
    assert saved == {1: Path("all/stage1"), 3: Path("all/stage3")}


def test_fewer_ranks_go_on_in_stage_2_from_stage_1_and_in_stage_3_from_3() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    for name in ("make_universal", "is_refused", "claim"):
        setattr(lesson, name, Mock())
    lesson.groups_of_fewer = lambda *_: nullcontext()
    lesson.on_fewer_ranks = Mock(return_value=[1.0])
    saved = {1: Path("of 1"), 3: Path("of 3")}
    with patch.object(lesson.dist, "barrier"):
        lesson.check_other_world(None, saved, None, {"losses": [1.0]}, None)
    went_on = [(call.args[1], call.args[3]) for call in lesson.on_fewer_ranks.call_args_list]
    assert went_on == [(2, Path("of 1")), (3, Path("of 3"))]
    assert lesson.is_refused.call_args.args[1] == Path("of 1")


@pytest.mark.parametrize(
    ("n", "rank", "group", "rank_in_it", "m"),
    [(4, 3, 1, 1, 2), (6, 4, 1, 1, 3), (9, 8, 2, 2, 3), (5, 2, 2, 0, 1)],
)
def test_groups_of_fewer_are_of_the_largest_proper_divisor(
    n: int, rank: int, group: int, rank_in_it: int, m: int
) -> None:
    lesson = load(LESSON)
    lesson.RANK, lesson.WORLD_SIZE = rank, n
    lesson.regroup = Mock()
    with (
        patch.object(lesson.dist.distributed_c10d, "_get_default_store"),
        patch.object(lesson.dist, "PrefixStore", lambda name, store: name),
        lesson.groups_of_fewer(None, None),
    ):
        assert lesson.regroup.call_args.args[2:] == (f"group {group}", rank_in_it, m)
    assert lesson.regroup.call_args.args[2:] == ("all again", rank, n)


def test_evaluating_keeps_no_graph_and_training_goes_on_after_it() -> None:
    lesson = load(LESSON)
    model = torch.nn.Dropout()
    seen = []

    def mean_loss(model: torch.nn.Module, x_ET: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), model.training, len(x_ET)))
        return torch.tensor(2.0)

    lesson.mean_loss = mean_loss
    one = {"get_rank": lambda: 1, "get_world_size": lambda: 2, "all_reduce": Mock()}
    with patch.multiple(lesson.dist, **one):
        loss = lesson.evaluate(model, torch.zeros(5, 65), torch.device("cpu"))
    assert (loss, seen, model.training) == (2.0, [(False, False, 2)], True)


def test_tokens_per_second_are_those_of_all_ranks() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    said = []
    lesson.print0 = said.append
    update = Mock()
    event = SimpleNamespace(record=Mock(), synchronize=Mock(), elapsed_time=lambda end: 2000.0)
    gpu = {"Event": lambda enable_timing: event, "max_memory_allocated": lambda: 3e9}
    with patch.multiple(torch.cuda, reset_peak_memory_stats=Mock(), **gpu):
        lesson.report("FSDP2", update)
    assert update.call_count == 2 + 5
    assert said[0].strip() == "FSDP2: 40,960 tokens/s, 3.0 GB at most"  # 5 x 2 x 2048 x 4 in 2 s
