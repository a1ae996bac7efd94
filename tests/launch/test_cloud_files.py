"""skypilot.yaml and trainjob.yaml: names that exist, and commands that start what they say."""

import os
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from course.lessons import ROOT

NEEDS = "needs kubeflow_trainer_api and PyYAML: make .venv/all"
yaml = pytest.importorskip("yaml", reason=NEEDS)
models = pytest.importorskip("kubeflow_trainer_api.models", reason=NEEDS)

TRAINJOB = (ROOT / "launch/trainjob.yaml").read_text()
SKYPILOT = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())

# SkyPilot's package brings fifty others, so these names were read, in skypilot 0.14.1:
# sky/utils/schemas.py, get_task_schema() and get_resources_schema(), which refuse all other names.
TASK = {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}
RESOURCES = {"accelerators", "use_spot", "autostop"}
AUTOSTOP = {"idle_minutes", "down"}


def accepted(text: str) -> bool:
    """Whether Kubeflow's own types know every name of the job: others they drop."""
    job = yaml.safe_load(text)
    return models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


def test_kubeflow_s_types_know_every_name_of_the_trainjob() -> None:
    assert accepted(TRAINJOB)


@pytest.mark.parametrize("name", ["numNodes", "volumeMounts", "runtimePatches", "limits", "medium"])
def test_a_misspelled_name_is_noticed(name: str) -> None:
    assert TRAINJOB.count(f"{name}:") == 1
    assert not accepted(TRAINJOB.replace(f"{name}:", f"{name}s:"))


def test_torchrun_reads_what_the_torch_runtime_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = yaml.safe_load(TRAINJOB)["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    program, *arguments = trainer["command"]
    assert program == "torchrun"
    said = {"NNODES": "2", "NPROC_PER_NODE": "1", "NODE_RANK": "1"}
    said |= {"MASTER_ADDR": "hello-node-0-0.hello", "MASTER_PORT": "29400"}
    for name, value in said.items():
        monkeypatch.setenv(f"PET_{name}", value)
    read = get_args_parser().parse_args(arguments)
    assert {name: str(getattr(read, name.lower())) for name in said} == said
    assert read.training_script == "/launch/distributed_hello.py"


def test_a_pod_has_shared_memory_for_a_loader_s_workers() -> None:
    (patch,) = yaml.safe_load(TRAINJOB)["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}


def test_skypilot_knows_every_name() -> None:
    assert set(SKYPILOT) == TASK
    assert set(SKYPILOT["resources"]) == RESOURCES
    assert set(SKYPILOT["resources"]["autostop"]) == AUTOSTOP


def test_skypilot_starts_launch_ddp_on_every_node(tmp_path: Path) -> None:
    (tmp_path / "training/bin").mkdir(parents=True)
    (tmp_path / "training/bin/activate").write_text(f"PATH={tmp_path}:$PATH\n")
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    env = os.environ | SKYPILOT["envs"] | {"HOME": str(tmp_path)}
    env |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    env |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    how = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 60}
    ran = subprocess.run(["bash", "-c", SKYPILOT["run"]], **how)
    assert ran.stdout == (
        "--nnodes=2 --nproc-per-node=1 --max-restarts=0 --local-addr=127.0.0.1 "
        "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29500 --rdzv-conf=is_host=1 "
        "launch/distributed_hello.py\n"
    ), ran.stderr
