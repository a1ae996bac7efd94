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


def command(folder: Path, script: str, *arguments: str, **variables: str | None) -> dict:
    """How to start the script; a variable that is None is not set."""
    env = MARKED | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    env = {name: value for name, value in env.items() if value is not None}
    argv = ["bash", str(folder / "launch" / script), *arguments]
    return {"args": [*AS_NOBODY, *argv], "env": env, "cwd": folder, "text": True}


def lines(folder: Path, script: str, *arguments: str, **variables: str | None) -> list[str]:
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


GPUS = "#!/bin/sh\nprintf 'GPU 0\\nGPU 1\\nGPU 2\\n'\n"
NO_GPUS = "#!/bin/sh\necho No devices were found; exit 6\n"


@pytest.mark.parametrize(
    ("nvidia_smi", "visible", "ranks"),
    [
        (GPUS, None, "gpu"),  # torchrun asks torch, which knows the variable
        (GPUS, "0,1", "gpu"),
        (GPUS, "", "2"),  # it is the CPU that is wanted
        (GPUS, "-1", "2"),
        (NO_GPUS, None, "2"),
        (NO_GPUS, "0", "2"),
        (None, None, "2"),
    ],
)
def test_one_node_gets_a_rank_per_gpu_that_torch_sees(
    nvidia_smi: str | None, visible: str | None, ranks: str, folder: Path
) -> None:
    if nvidia_smi:
        stub(folder, "nvidia-smi", nvidia_smi)
    (line,) = lines(folder, "launch_ddp.sh", "train.py", CUDA_VISIBLE_DEVICES=visible)
    assert line.endswith(f": --standalone --nproc-per-node={ranks} --max-restarts=0 train.py")


def test_the_script_gets_its_own_flags_and_torchrun_the_others(folder: Path) -> None:
    (line,) = lines(folder, "launch_ddp.sh", "--ranks", "4", "train.py", "--ranks", "9")
    assert line.endswith(": --standalone --nproc-per-node=4 --max-restarts=0 train.py --ranks 9")
    (line,) = lines(folder, "launch_ddp.sh", "--max-restarts", "3", "train.py")
    assert line.endswith(": --standalone --nproc-per-node=2 --max-restarts=3 train.py")


@pytest.mark.parametrize(
    ("flags", "said"), [([], "0, own store "), (["--max-restarts", "3"], "3, own store 1")]
)
def test_where_several_nodes_restart_each_round_has_a_store_of_its_own(
    flags: list[str], said: str, folder: Path
) -> None:
    variable = "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    stub(folder, "torchrun", f'#!/bin/sh\necho "$3, own store {variable}"\n')
    nodes = ["--nodes", "2", "--head", "127.0.0.1"]
    assert lines(folder, "launch_ddp.sh", *nodes, *flags, "train.py") == [f"--max-restarts={said}"]


@pytest.mark.parametrize("name", ["ethernet", "infiniband"])
def test_nccl_is_told_of_a_network_that_is_there_or_of_none(name: str) -> None:
    source = f". {ROOT}/launch/nccl/{name}.sh; echo $?,$NCCL_SOCKET_IFNAME,$GLOO_SOCKET_IFNAME"
    for network, told in [("", "1,,"), ("eth99", "1,,"), ("lo", "0,=lo,lo")]:
        how = {"env": os.environ | {"NODES_NETWORK": network}, "capture_output": True}
        ran = subprocess.run(["bash", "-c", source], **how, text=True)
        assert ran.stdout == f"{told}\n"
        assert ("is none of" in ran.stderr) == (network != "lo")


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
    restarts = "--max-restarts=0"
    was = machine()
    assert lines(folder, "two_nodes_here.sh", "--ranks", "3", "train.py", "--lr", "1") == [
        f"node{number} {address}/24: --nnodes=2 --nproc-per-node=3 {restarts} "
        f"--local-addr={address} {flags}={is_head} train.py --lr 1"
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
