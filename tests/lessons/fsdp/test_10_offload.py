"""The lesson on offload: real copies asked for, real files; each claim can FAIL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from course.lessons import ROOT
from course.playing import Played, load, play
from tests.helpers.deepspeed_built import built

LESSON = "fsdp/10_offload.py"
NO_DEEPSPEED = ("    deepspeed = import_deepspeed(device)\n", "    deepspeed = None\n")
NO_SLEEP = ("    check_when_it_pays(device)\n", "")

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
                "    return sharded(device, dtype, reshard, policy)\n",
                "    model = sharded(device, dtype, reshard, policy)\n"
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


@pytest.mark.deep
@pytest.mark.parametrize("what", BROKEN_FSDP2)
def test_a_wrong_offload_fails_its_claims(what: str) -> None:
    changes, expected = BROKEN_FSDP2[what]
    play(LESSON, 2, NO_DEEPSPEED, NO_SLEEP, *changes).expect(expected)


@pytest.mark.deep
def test_an_int_that_shards_over_all_ranks_goes_up_twice() -> None:
    wrong = ("[s for s in range(2, WORLD_SIZE)", "[s for s in range(4, WORLD_SIZE + 1)")
    played = play(LESSON, 4, NO_DEEPSPEED, NO_SLEEP, wrong)
    played.expect({"reshard_after_forward=s: bytes up"})


@pytest.mark.clock
@pytest.mark.deep
@pytest.mark.parametrize(
    ("line", "wrong", "claims"),
    [
        ("device, times * b)", "device, b)", {"9 b examples: the link's share"}),
        ("model = offloaded(device, torch.float32, True)\n    link_seconds",
         "model = offloaded(device, torch.float32, False)\n    link_seconds",
         {"b examples: the link's share"}),
    ],
)  # fmt: skip
def test_a_share_of_the_link_is_seen_by_the_clock(line: str, wrong: str, claims: set) -> None:
    played = play(LESSON, 2, NO_DEEPSPEED, (line, wrong))
    assert played.failed_by_clock == claims, played.output


def compiled() -> tuple[str, str]:
    """The change that lets a lesson find what was compiled for the tests."""
    folder = built()["TORCH_EXTENSIONS_DIR"]
    before = '    os.environ |= {"DS_ACCELERATOR"'
    return (before, f'    os.environ["TORCH_EXTENSIONS_DIR"] = "{folder}"\n{before}')


KERNEL = {
    "disk, as the kernel counts: read, at least",
    "disk, as the kernel counts: written, at least",
}
NO_FSDP2 = ("    check_fsdp2(expected, device)\n", "")
BROKEN_DEEPSPEED = {
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
                "    engine = start_engine(deepspeed, device, ALL_ON_HOST)\n",
                '    ADAM["lr"] = 1e-2\n'
                "    engine = start_engine(deepspeed, device, ALL_ON_HOST)\n",
            ),
        ],
        {
            "optimizer on the host: bytes down",
            "optimizer on the host: bytes up",
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
    "no oracle; another rate for the CPU's Adam; parameters kept; other counters of the kernel": (
        [
            ('int(rows["read_bytes"]), int(rows["write_bytes"])', 'int(rows["syscr"]), 0'),
            ("    works = False\n", "    return True\n"),
            (
                '"offload_optimizer": optimizer, "offload_param": place}',
                '"offload_optimizer": optimizer}',
            ),
            (
                "expected = from_rank_0(one_process(device) if RANK == 0 else None)",
                "expected = [0.0] * STEPS",
            ),
            (
                "    engine = start_engine(deepspeed, device, OPTIMIZER_ON_HOST, cpu_adam)\n",
                '    ADAM["lr"] = 1e-2\n'
                "    engine = start_engine(deepspeed, device, OPTIMIZER_ON_HOST, cpu_adam)\n"
                '    ADAM["lr"] = 1e-3\n',
            ),
        ],
        {
            "stage 3: losses, error against one process",
            "DeepSpeedCPUAdam: losses, error",
            "disk: bytes read",
            "disk: bytes written",
            "disk: bytes of the files",
            *KERNEL,
        },
    ),
}


def blocked_from(played: Played) -> list[str]:
    return [row["claim"] for row in played.ledger if row["verdict"] == "BLOCKED"]


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_deepspeed_on_the_host_and_on_a_disk() -> None:
    """Nothing is mocked: DeepSpeed's own Adam, its asynchronous reads and writes, real files."""
    pytest.importorskip("deepspeed")
    played = play(LESSON, 2, NO_FSDP2, NO_SLEEP, compiled())
    played.expect(set())
    assert blocked_from(played) == ["pinned copies / pageable ones, bytes per second"]


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", BROKEN_DEEPSPEED)
def test_a_wrong_offload_by_deepspeed_fails_its_claims(what: str) -> None:
    pytest.importorskip("deepspeed")
    changes, expected = BROKEN_DEEPSPEED[what]
    played = play(LESSON, 2, NO_FSDP2, NO_SLEEP, compiled(), *changes)
    if not expected >= KERNEL:  # it counts pages that are loaded meanwhile, too
        expected = expected | (played.failed & KERNEL)
    played.expect(expected)


def test_without_deepspeed_the_rest_is_blocked() -> None:
    played = play(LESSON, 2, NO_DEEPSPEED)
    played.expect(set())
    blocked = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert "pip install -e '.[deepspeed]'" in blocked


@pytest.mark.parametrize("n", [1, 3, 8])
def test_every_share_of_a_matrix_is_large_enough_for_a_file(n: int) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = n
    assert lesson.D() % n == lesson.H() % n == 0
    assert lesson.part() >= 2**19  # 1 MiB in bfloat16
    assert 2 * lesson.part() % 1024 == 0  # blocks of O_DIRECT


def test_compile_without_a_compiler_is_refused_once(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": str(tmp_path)}
    argv = [sys.executable, ROOT / LESSON, "--compile"]
    ran = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=150)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "--compile needs a C++ compiler; found no c++; install g++" in ran.stderr
