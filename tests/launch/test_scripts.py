"""The shell scripts: well-formed, nodes and flags as said, signals passed on, nothing left."""

import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from course.lessons import ROOT
from tests.helpers.leftovers import MARKED, gone, machine
from tests.helpers.namespaces import AS_NOBODY, needs_namespaces

SCRIPTS = [*sorted((ROOT / "launch").rglob("*.sh")), ROOT / "launch/slurm.sbatch"]

# Stands in for torchrun: says on which host, at which address and how it was started; then leaves,
# or with STAY starts a rank in a session of its own, as torchrun does, and stays with it. One that
# is to fail waits until the other stays.
TORCHRUN = """#!/usr/bin/env bash
echo "$(hostname) $(ip -o -4 address show dev cable | grep -o '10[0-9.]*/24'): $*"
if [ "$FAIL" = "$(hostname)" ]; then
  until [ -s there ]; do sleep 0.1; done
  exit 7
fi
[ -n "$STAY" ] || exit 0
setsid sleep 1000 &
trap 'kill $!; echo "$(hostname) heard SIGTERM"; exit 143' TERM
echo "$(hostname) stays" | tee there
wait
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A copy of launch/ that every user can read, where torchrun is pretended."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(ROOT / "launch", folder / "launch")
        stub(folder, "torchrun", TORCHRUN)
        (folder / "there").touch()
        (folder / "there").chmod(0o666)
        yield folder


def stub(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def command(folder: Path, script: str, *arguments: str, **variables: str) -> dict:
    env = MARKED | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    argv = ["bash", str(folder / "launch" / script), *arguments]
    return {"args": [*AS_NOBODY, *argv], "env": env, "cwd": folder, "text": True}


def lines(folder: Path, script: str, *arguments: str, **variables: str) -> list[str]:
    how = command(folder, script, *arguments, **variables)
    ran = subprocess.run(**how, capture_output=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return sorted(ran.stdout.splitlines())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_well_formed(script: Path) -> None:
    if script.suffix == ".sh" and script.parent.name != "nccl":  # those are sourced
        assert script.stat().st_mode & stat.S_IXUSR, "git add --chmod=+x"
    checks = [["bash", "-n"]]
    if shutil.which("shellcheck"):
        checks.append(["shellcheck", "--severity=warning", "--shell=bash"])
    for check in checks:
        ran = subprocess.run([*check, str(script)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_one_node_gets_a_rank_per_gpu_and_the_script_its_own_flags(folder: Path) -> None:
    stub(folder, "nvidia-smi", "#!/bin/sh\nprintf 'GPU 0\nGPU 1\nGPU 2\n'\n")
    (line,) = lines(folder, "launch_ddp.sh", "train.py", "--ranks", "9")
    assert line.endswith(": --standalone --nproc-per-node=3 train.py --ranks 9")
    stub(folder, "nvidia-smi", "#!/bin/sh\necho No devices were found; exit 6\n")
    (line,) = lines(folder, "launch_ddp.sh", "train.py")
    assert line.endswith(": --standalone --nproc-per-node=2 train.py")
    (line,) = lines(folder, "launch_ddp.sh", "--ranks", "4", "train.py")
    assert line.endswith(": --standalone --nproc-per-node=4 train.py")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "2", "train.py"], "2 nodes need --head ADDRESS"),
        (["--rank", "2", "train.py"], "unknown flag --rank"),
        (["--ranks", "2"], "launch_ddp.sh --nodes 2 --head 10.0.0.1 train.py"),
    ],
)
def test_a_wrong_line_is_refused_and_told_why(folder: Path, arguments: list, said: str) -> None:
    how = command(folder, "launch_ddp.sh", *arguments)
    ran = subprocess.run(**how, capture_output=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr


@needs_namespaces
def test_two_nodes_have_names_addresses_and_one_head_and_need_no_root(folder: Path) -> None:
    flags = "--rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500 --rdzv-conf=is_host"
    was = machine()
    assert lines(folder, "two_nodes_here.sh", "--ranks", "3", "train.py", "--lr", "1") == [
        f"node{number} {address}/24: --nnodes=2 --nproc-per-node=3 --local-addr={address} "
        f"{flags}={is_head} train.py --lr 1"
        for number, address, is_head in [(0, "10.0.0.1", 1), (1, "10.0.0.2", 0)]
    ]
    assert gone()
    assert machine() == was


def hear_ctrl_c() -> None:
    """A shell that has put us into the background has us, and what we start, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@needs_namespaces
@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_reaches_both_torchruns_and_leaves_nothing(folder: Path, end: str) -> None:
    was = machine()
    how = command(folder, "two_nodes_here.sh", "train.py", STAY="yes")
    nodes = subprocess.Popen(**how, stdout=subprocess.PIPE, process_group=0, preexec_fn=hear_ctrl_c)
    started = []
    while sum("stays" in line for line in started) < 2:
        started.append(nodes.stdout.readline())
    number = getattr(signal, end)
    if end == "SIGINT":
        os.killpg(nodes.pid, number)  # as Ctrl-C does
    else:
        nodes.send_signal(number)
    output, _ = nodes.communicate(timeout=200)
    assert nodes.returncode == (-number if end == "SIGKILL" else 128 + number)
    heard = [line for line in sorted(output.splitlines()) if "heard" in line]
    assert heard == ([] if end == "SIGKILL" else ["node0 heard SIGTERM", "node1 heard SIGTERM"])
    assert gone()
    assert machine() == was


@needs_namespaces
@pytest.mark.deep
def test_a_node_that_fails_ends_the_other(folder: Path) -> None:
    how = command(folder, "two_nodes_here.sh", "train.py", STAY="yes", FAIL="node1")
    nodes = subprocess.run(**how, capture_output=True, timeout=200)
    assert nodes.returncode == 7
    assert "node0 heard SIGTERM" in nodes.stdout
    assert gone()
