"""What exercises show of this machine, not judged: 02's links, 13's share of a step."""

import os
import re
import subprocess
import sys

import psutil

from course.lessons import ROOT

CPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


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


def test_13_shows_each_ranks_share() -> None:
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    lines = shown(*torchrun, "exercises/13_profile_all_reduce/solution.py")
    for rank, line in enumerate(lines):
        form = rf"rank {rank}: 5 steps; all-reduce (\S+) ms, of it (\S+) ms not .*: (\d+)% of .*"
        communication, exposed, share = map(float, re.fullmatch(form, line).groups())
        assert 0 <= exposed <= communication
        assert 0 <= share <= 100
    assert len(lines) == 2
