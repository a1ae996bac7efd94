"""The sweep of NCCL's variables: its arithmetic with made-up seconds, and its ranks on no GPU."""

import importlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from benchmarks import nccl_sweep
from benchmarks.nccl_sweep import SETTINGS, WAYS, busbw, fastest, predict, tables
from course.lessons import ROOT
from course.ranks import run

SIZES = [2**10, 2**30]


def results(**slower: float) -> dict:
    """Rings are quick with large buffers, LL with small ones; some take so many times as long."""
    found = {}
    for name in SETTINGS:
        small = 15e-6 if name.endswith("LL") else 40e-6
        large = 5e-3 if name.startswith("ring") else 6e-3
        found[name] = {2**10: small, 2**30: large * slower.get(name.replace(" ", "_"), 1)}
    return found


def test_busbw_is_that_of_the_lectures_400_mb_on_four_gpus() -> None:
    assert busbw(400_000_000, 2.166e-3, 4) == pytest.approx(277, abs=0.1)


def test_the_fastest_is_found_among_rings_and_trees_that_summed_right() -> None:
    made_up = results(ring_LL=0.5)
    assert fastest(made_up, 2**30) == "ring LL"
    made_up["ring LL"][2**30] = None  # wrong sums
    assert fastest(made_up, 2**30) in ("ring LL128", "ring Simple")
    made_up["NVLS"][2**30] = 1e-3  # is no ring and no tree
    for name in WAYS:
        made_up[name] = "it failed"
    assert fastest(made_up, 2**30) == "none"


def test_the_tables_show_times_bandwidths_and_both_winners() -> None:
    made_up = results(tree_Simple=0.1) | {"NVLS": "NCCL: no NVLS here"}
    made_up["tree LL128"] = {2**10: None, 2**30: 6e-3}
    lines = tables(made_up, SIZES, 4, lambda nbytes: "ring LL" if nbytes < 2**20 else "ring Simple")
    of = {}
    for line in lines:
        of.setdefault(line[:20].strip(), []).append(line[20:].split())
    assert of["ring LL"] == [["15.0", "5,000.0"], ["0.1", f"{1.5 * 2**30 / 5e-3 / 1e9:.1f}"]]
    assert of["tree LL128"][0] == ["WRONG", "SUMS", "6,000.0"]
    assert " ".join(of["NVLS"][0]) == "NCCL: no NVLS here"
    assert of["predicted, 8 H100"] == [["ring", "LL", "ring", "Simple"]]
    (measured,) = of["measured"]
    assert measured[1] == "LL"
    assert measured[2:] == ["tree", "Simple"]
    assert max(map(len, lines)) <= 100


def test_each_setting_names_variables_of_nccl_that_differ() -> None:
    assert len({tuple(sorted(setting.items())) for setting in SETTINGS.values()}) == len(SETTINGS)
    varied = {name for setting in SETTINGS.values() for name in setting}
    assert varied == {"NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_MAX_CTAS"}


def test_the_prediction_is_the_lessons() -> None:
    assert predict(2**10) == "ring LL"
    assert predict(2**30) == "ring Simple"
    assert {predict(2**e) for e in range(6, 34)} <= {*WAYS}


def on_pretended_gpus(fault: bool) -> tuple[dict, list]:
    from tests.helpers import gpu_nccl, pretended_gpus

    n = int(nccl_sweep.os.environ["WORLD_SIZE"])
    with pretended_gpus.pretended_gpus(n, str(ROOT / "benchmarks/nccl_sweep.py")):
        sweep = importlib.reload(nccl_sweep)
        device = torch.device("cuda", sweep.RANK)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        if fault:
            sweep.WORLD_SIZE += 1
        times = sweep.measure([8, 4096], device)
        dist.destroy_process_group()
    return times, gpu_nccl.notes


@pytest.mark.deep
def test_ranks_measure_and_check_sums_on_pretended_gpus() -> None:
    for times, _ in run(on_pretended_gpus, 2, False, group=False):
        assert set(times) == {8, 4096}
        assert all(seconds is not None for seconds in times.values())
    for times, _ in run(on_pretended_gpus, 2, True, group=False):
        assert set(times.values()) == {None}


def test_without_gpus_it_says_in_one_line_what_it_needs() -> None:
    command = [sys.executable, "benchmarks/nccl_sweep.py"]
    env = nccl_sweep.os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert ran.returncode == 1
    assert ran.stderr == "nccl_sweep needs 2 GPUs or more on this machine, and found 0\n"
