"""What exercises show of this machine, not judged: links, times, 13's share of a step."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from course.lessons import ROOT
from course.ranks import attempt

CPU = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
LIVE = {  # ranks, and what an answer that is right shows
    "03_ring_shift": (2, r"; 0 elements are wrong"),
    "04_ring_all_reduce": (3, r"two rings .* GB/s\nlibrary .* GB/s\nlargest difference 0\n"),
    "05_data_parallel_hooks": (2, r"gradients are (0|\de-0[789]) of their length"),
    "08_zero1": (2, r"AdamW .* per step\nZeRO-1 .* per step\nlargest difference .* 0\n"),
    "09_hybrid_sharding": (
        4,
        r"(\d x \d ranks .*\n +gradients are (0|\de-0[678]) .*\n.* MB across\n){3}",
    ),
    "10_tensor_parallel_mlp": (3, r"outputs are (0|\de-0[789]) of their length"),
    "11_pipeline_micro_batches": (
        3,
        r"gradients are (0|\de-0[678]) [\s\S]*loss (\d\.\d{5})\d, of one process \2",
    ),
}


def shown(*command: str) -> list[str]:
    """The lines that a solution's own `main` prints."""
    ran = subprocess.run(
        [sys.executable, *command], env=CPU, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_02_shows_the_links_of_this_machine_and_leaves_nothing() -> None:
    solution = str(ROOT / "exercises/02_measure_a_link/solution.py")  # no other checkout's
    lines = shown(solution)
    for name, line in zip(("shared memory", "TCP loopback"), lines[1:3], strict=True):
        figures = re.fullmatch(rf"{name} +(\S+) us +(\S+) GB/s +(\S+) bytes", line)
        assert all(float(figure.replace(",", "")) > 0 for figure in figures.groups())
    assert [line.split("BLOCKED ")[1] for line in lines[3:5]] == ["needs 1 GPU", "needs 2 GPUs"]
    left = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if solution in line]


def live(solution: Path) -> None:
    """Do on a rank what torchrun does."""
    runpy.run_path(str(solution), run_name="__main__")


@pytest.mark.parametrize("exercise", LIVE)
def test_a_solution_runs_live_and_shows_that_it_is_right(exercise: str) -> None:
    ranks, words = LIVE[exercise]
    solution = ROOT / "exercises" / exercise / "solution.py"
    outcomes = attempt(live, ranks, solution, group=False, deadline=60)
    assert {o.kind for o in outcomes} == {"returned"}, outcomes
    assert re.search(words, "".join(o.output for o in outcomes)), outcomes


@pytest.mark.parametrize(
    ("after", "status"), [("", 0), pytest.param("1 / 0", 1, marks=pytest.mark.deep)]
)
def test_a_rank_leaves_before_the_threads_of_its_group_can_abort_it(
    after: str, status: int
) -> None:
    program = f"""
import atexit, torch, torch.distributed as dist
from course.live import joined
atexit.register(print, "the interpreter ends")
with joined():
    with torch.profiler.profile():
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    print("the last line")
{after}
"""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "KINETO_LOG_LEVEL": "99"}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=CPU | alone, cwd=ROOT, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("the last line\n", status), ran.stderr
    assert ("ZeroDivisionError" in ran.stderr) == bool(status)


def test_13_shows_each_ranks_share() -> None:
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    lines = shown(*torchrun, "exercises/13_profile_all_reduce/solution.py")
    for rank, line in enumerate(lines):
        form = rf"rank {rank}: 5 steps; all-reduce (\S+) ms, of it (\S+) ms not .*: (\d+)% of .*"
        communication, exposed, share = map(float, re.fullmatch(form, line).groups())
        assert 0 <= exposed <= communication
        assert 0 <= share <= 100
    assert len(lines) == 2
