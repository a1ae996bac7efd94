"""The lesson on offload: real copies asked for, real files; each claim can FAIL."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from course.lessons import ROOT
from course.playing import load, play
from course.ranks import run
from tests.helpers.deepspeed_built import FOLDER, built
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "fsdp/10_offload.py"
NO_DEEPSPEED = ("    deepspeed = import_deepspeed(device)\n", "    deepspeed = None\n")
NO_ADAM = ("    check_adam_on_the_host()\n", "")

BROKEN_FSDP2 = {  # each a set of breaks that meet different claims
    "weights stay for backward; no offload in bfloat16; one micro-batch": (
        [
            (
                "model = offloaded(device, torch.float32, True)\n    losses, (up, down)",
                "model = offloaded(device, torch.float32, False)\n    losses, (up, down)",
            ),
            ("offloaded(device, torch.bfloat16, True), device, steps=1)", "kept, device)"),
            (
                "offloaded(device, torch.float32, False), device,",
                "offloaded(device, torch.float32, True), device,",
            ),
            ("for _ in range(micro_batches):", "for _ in range(1):"),
        ],
        {
            "FSDP2: bytes up",
            "FSDP2, bfloat16: bytes up and down",
            "reshard_after_forward=False: bytes up",
            "two micro-batches: bytes up and down",
        },
    ),
    "gradients stay on the GPU; other weights with offload": (
        [
            ("if places and crosses:", "if places and up:"),
            (
                "    return sharded(build(device), device, dtype, reshard, policy)\n",
                "    model = sharded(build(device), device, dtype, reshard, policy)\n"
                "    with torch.no_grad():\n"
                "        [parameter.mul_(1.1) for parameter in model.parameters()]\n"
                "    return model\n",
            ),
        ],
        {
            "FSDP2: bytes down",
            "FSDP2: losses, error against one process",
            "FSDP2: losses that offload changed",
            "FSDP2, bfloat16: bytes up and down",
            "two micro-batches: bytes up and down",
        },
    ),
}


OVER_ALL = {
    "an int that shards over all ranks: up twice": (
        "[s for s in range(2, WORLD_SIZE)",
        "[s for s in range(4, WORLD_SIZE + 1)",
        {"reshard_after_forward=s: bytes up"},
    ),
}


KERNEL = {
    "disk, as the kernel counts: read, at least",
    "disk, as the kernel counts: written, at least",
}
NO_FSDP2 = ("    check_fsdp2(expected, device)\n", "")
BROKEN_DEEPSPEED = {  # each a set of breaks that meet different claims
    "weights stay (Try); nothing offloaded; another learning rate": (
        [
            ('"stage3_max_live_parameters": 0,', '"stage3_max_live_parameters": 10**9,'),
            ('"stage3_max_reuse_distance": 0,', '"stage3_max_reuse_distance": 10**9,'),
            (
                '{"stage": 2, "offload_optimizer": {"device": "cpu"}}',
                '{"stage": 2}',
            ),
            ('cpu_adam = "cpu_adam" in found', "cpu_adam = False"),
            (
                "    engine = start_engine(deepspeed, device, OPTIMIZER_ON_HOST, cpu_adam)\n",
                '    ADAM["lr"] = 1e-2\n'
                "    engine = start_engine(deepspeed, device, OPTIMIZER_ON_HOST, cpu_adam)\n",
            ),
        ],
        {
            "optimizer on the host: bytes down",
            "optimizer on the host: bytes up",
            "torch's Adam on the host: losses, error",
            "parameters too: bytes up",
            "parameters too: losses that offload changed",
            "disk: bytes read",
            "disk: losses that offload changed",
        },
    ),
    "parameters on the host (Try); masters there, too": (
        [
            ('"pin_memory": False, "max_in_cpu": 0}', '"pin_memory": False, "max_in_cpu": 10**9}'),
            (
                '{"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}',
                '{"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}}',
            ),
        ],
        {
            "parameters too: bytes down",
            "parameters too: bytes up",
            "disk: bytes read",
            "disk: bytes written",
        },
    ),
}
BROKEN_COMPARISONS = {
    "another rate without offload; Adam without its W; parameters kept": (
        [
            (
                '"offload_optimizer": optimizer, "offload_param": place}',
                '"offload_optimizer": optimizer}',
            ),
            (
                "    engine = start_engine(deepspeed, device, KEPT)\n",
                '    ADAM["lr"] = 1e-2\n'
                "    engine = start_engine(deepspeed, device, KEPT)\n"
                '    ADAM["lr"] = 1e-3\n',
            ),
            (
                "DeepSpeedCPUAdam([theirs], **adam)",
                "DeepSpeedCPUAdam([theirs], **adam, adamw_mode=False)",
            ),
        ],
        {
            "stage 3: losses, error against one process",
            "DeepSpeedCPUAdam: losses, error",
            "DeepSpeedCPUAdam: weights of 10 steps, error",
            "parameters too: losses that offload changed",
            "disk: losses that offload changed",
            "disk: bytes read",
            "disk: bytes written",
            "disk: bytes of the files",
            *KERNEL,
        },
    ),
}


BOTH_FUSED = ("host_adam(fused=False)", "host_adam(fused=True)")
BROKEN_ADAM = {
    "a single pass, too": (BOTH_FUSED, {"plain AdamW: bytes read and written"}),
    "no weight decay": (
        ("AdamW([weight], **ADAM, fused=fused)", "AdamW([weight], weight_decay=0, fused=fused)"),
        {"plain AdamW: bytes read and written"},
    ),
}
SLOW_ADAM = {"both fused": ([BOTH_FUSED], {"plain AdamW's seconds / fused, at least"})}


BEFORE = '    os.environ |= {"DS_ACCELERATOR"'
BUILT = (BEFORE, f'    os.environ["TORCH_EXTENSIONS_DIR"] = "{FOLDER}"\n{BEFORE}')
ANY_COUNT = [  # the kernel counts pages that are loaded meanwhile, too
    ("claim(text, 20, read", "claim(text, 0, read"),
    ("claim(text, 18, written", "claim(text, 0, written"),
]
NO_FEW_BYTES = ("claim(text, 80, touched.nbytes / ELEMENTS", "claim(text, 0, 0")
BREAKS = [
    Breaks(BROKEN_ADAM, changes=[NO_DEEPSPEED, NO_FSDP2]),
    Breaks(SLOW_ADAM, changes=[NO_DEEPSPEED, NO_FSDP2, NO_FEW_BYTES], clock=True),
    Breaks(BROKEN_FSDP2, changes=[NO_DEEPSPEED, NO_ADAM]),
    Breaks(OVER_ALL, ranks=4, changes=[NO_DEEPSPEED, NO_ADAM]),
    Breaks(BROKEN_DEEPSPEED, changes=[NO_FSDP2, NO_ADAM, BUILT, *ANY_COUNT], most=1),
    Breaks(BROKEN_COMPARISONS, changes=[NO_FSDP2, NO_ADAM, BUILT], most=1),
]
SEEN_IN_BACKWARD = "the pretence does not see what comes down in backward"
ON_GPUS = OnGpus(  # there nothing is updated: what comes down in backward has no place
    [
        ("        optimizer.step()  # on the host: nothing crosses\n", ""),
        NO_DEEPSPEED,
        ("math.ceil(1024 / WORLD_SIZE)", "math.ceil(64 / WORLD_SIZE)"),
        ("return 512 * WORLD_SIZE", "return 32 * WORLD_SIZE"),
        ("nbytes = 2**28", "nbytes = 2**16"),
        ("features: int = 8192, pairs: int = 8", "features: int = 64, pairs: int = 2"),
        ("ELEMENTS = 2**22", "ELEMENTS = 2**12"),
        ("(64, 1024, 16_384)", "(4, 16)"),
        ("repeats: int = 20", "repeats: int = 1"),
    ],
    hardware={
        "FSDP2: losses, error against one process": "Adam on the host is left out",
        "FSDP2: bytes down": SEEN_IN_BACKWARD,
        "FSDP2, bfloat16: bytes up and down": SEEN_IN_BACKWARD,
        "two micro-batches: bytes up and down": SEEN_IN_BACKWARD,
    },
)
WITHOUT = {"deepspeed": Without([NO_DEEPSPEED], {"DeepSpeed on the host and on a disk"})}
NO_DEVICE = {"seconds_of": "Adam on the host"}

pytestmark = pytest.mark.timeout(1800)  # one waits while another compiles


@pytest.fixture(autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """DeepSpeed's C++, where a case wants it: before there are ranks that could wait for nobody."""
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    if str(case) in {*BROKEN_DEEPSPEED, *BROKEN_COMPARISONS}:
        if find_spec("deepspeed") is None:
            pytest.skip("wants DeepSpeed")
        built()


@pytest.mark.deep
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="wants DeepSpeed")
def test_deepspeed_on_the_host_and_on_a_disk() -> None:
    """Nothing is mocked: DeepSpeed's own Adam, its asynchronous reads and writes, real files."""
    built()
    played = play(LESSON, 2, NO_FSDP2, NO_ADAM, BUILT)
    played.expect(set())
    blocked = [row["claim"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert blocked == ["pinned copies / pageable ones, bytes per second"]


def decay_of_the_engine() -> float:
    lesson = load(LESSON)
    lesson.ADAM["weight_decay"] = 0.125  # torch's own default is the lesson's
    device = torch.device("cpu")
    engine = lesson.start_engine(lesson.import_deepspeed(device), device, lesson.KEPT)
    return engine.basic_optimizer.param_groups[0]["weight_decay"]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="wants DeepSpeed")
def test_the_weight_decay_reaches_deepspeeds_optimizer() -> None:
    """Three steps are too few to see it in a loss."""
    assert run(decay_of_the_engine, 1) == [0.125]


@pytest.mark.parametrize("n", [1, 3, 8])
def test_every_share_of_a_matrix_is_large_enough_for_a_file(n: int) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = n
    assert lesson.D() % n == lesson.H() % n == 0
    assert lesson.part() >= 2**19  # 1 MiB in bfloat16
    assert 2 * lesson.part() % 1024 == 0  # blocks of O_DIRECT


@pytest.mark.deep
def test_compile_without_a_compiler_is_refused_once(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": str(tmp_path)}
    argv = [sys.executable, ROOT / LESSON, "--compile"]
    ran = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=150)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "--compile needs a C++ compiler; found no c++; install g++" in ran.stderr


def test_ranks_have_different_examples() -> None:
    """With the same ones everywhere, a mean over the ranks could be left out."""
    lesson = load(LESSON)
    (x_BD, y_BD), (others_BD, _) = (lesson.examples(rank, torch.device("cpu")) for rank in (0, 1))
    assert not x_BD.equal(others_BD)
    assert not x_BD.equal(y_BD)


def test_each_run_that_is_compared_is_what_it_is_called() -> None:
    """Some have the same bytes and all the same losses, so these do not tell one from another."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    lesson.build = lesson.claim = lesson.same_or_close = lesson.check_device_bytes = Mock()
    lesson.sharded = lambda *given: given[2:]
    lesson.train_fsdp2 = Mock(return_value=([1.0], (4.0, 4.0)))
    lesson.check_fsdp2([1.0], torch.device("cpu"))
    trained = [(*call.args[0], call.kwargs) for call in lesson.train_fsdp2.call_args_list]
    assert {type(policy) for _, _, policy, _ in trained[1:]} == {CPUOffloadPolicy}
    assert type(trained[0][2]) is OffloadPolicy
    assert [(dtype, reshard) for dtype, reshard, _, _ in trained] == [
        (torch.float32, True),
        (torch.float32, True),
        (torch.bfloat16, True),
        (torch.float32, False),
        (torch.float32, True),
        (torch.float32, 2),
    ]
    assert trained[4][3] == {"steps": 1, "micro_batches": 2}


def steps_that_begin_anew() -> list[bool]:
    lesson = load(LESSON)
    lesson.D, lesson.H = lambda: 8, lambda: 4
    device = torch.device("cpu")
    model = lesson.sharded(lesson.build(device), device, torch.float32, True, OffloadPolicy())
    fresh = []
    model.register_forward_pre_hook(
        lambda *_: fresh.append(all(parameter.grad is None for parameter in model.parameters()))
    )
    lesson.train_fsdp2(model, device)
    return fresh


def test_gradients_begin_anew_at_each_step() -> None:
    assert run(steps_that_begin_anew, 1) == [[True] * 3]


def test_adam_on_the_host_is_fused_where_it_is_called_so() -> None:
    lesson = load(LESSON)
    lesson.ELEMENTS = 8
    fused = [bool(lesson.host_adam(fused).param_groups[0]["fused"]) for fused in (False, True)]
    assert fused == [False, True]


def test_adams_rate_is_of_80_bytes_and_of_28() -> None:
    lesson = load(LESSON)
    lesson.host_adam = lambda fused: SimpleNamespace(step=Mock(fused=fused))
    lesson.seconds_of = lambda step: 0.125 if step.fused else 0.5
    said = []
    lesson.print0, lesson.claim = lambda line: said.append(line.strip()), Mock()
    lesson.ELEMENTS = 10**9
    lesson.check_adam_on_the_host()
    assert said == ["plain: 500.0 ms, 160.0 GB/s", "fused: 125.0 ms, 224.0 GB/s"]


def test_the_link_alone_carries_12_bytes_of_each_parameter_of_a_share() -> None:
    """On the meta device, which has all shapes of a GPU's tensors."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    lesson.sharded = lambda model, *_: model
    lesson.median_ms = Mock(side_effect=[100.0, 200.0] * 3)
    said, claims = [], []
    lesson.print0 = lambda line: said.append(line.split())
    lesson.claim = lambda text, predicted, measured, *_, **__: claims.append(measured)
    lesson.measure_steps(55e9, torch.device("meta"))
    link_ms = 1e3 * 12 * 16 * 8192**2 / 2 / 55e9
    assert said[1] == ["64", "100.00", "200.00", f"{link_ms:.2f}"]
    assert claims == [pytest.approx(link_ms / 200)]
