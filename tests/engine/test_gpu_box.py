"""`make gpu`, tried on tiny lessons and invented GPUs; what READMEs then say of such machines."""

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks import cluster
from course import gpu_box, lessons, machines, run_lessons, tables

LAUNCHER = gpu_box.Box.launcher
H100 = "NVIDIA H100 80GB HBM3"

LESSON = f"""\
import json, os, subprocess, sys

def command_line(): ...

def end(claim, verdict, measured):
    row = {{"claim": claim, "verdict": verdict, "sign": ">=", "predicted": 2.5}}
    row |= {{"measured": measured, "timed": True}}
    told = {{"torch": "{torch.__version__}", "ledger": [row]}}
    told["saw"] = os.environ["CUDA_VISIBLE_DEVICES"]
    with open(os.environ["LESSON_JSON"], "w") as file:
        json.dump(told, file)
    print("measured", measured, "in", os.path.abspath(__file__))
    sys.exit(verdict == "FAIL")

command_line()
"""
GOOD = LESSON + 'end("GB/s", "PASS", 3.5)\n'
BAD = LESSON + 'end("busbw", "FAIL", 1.5)\n'
LOOP = "while True: import time; time.sleep(9)"
HALF = 'open(os.environ["LESSON_JSON"], "w").write("half a ledger")\n'
HUNG = LESSON + HALF + f'while True: subprocess.run([sys.executable, "-c", "{LOOP}", __file__])\n'


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A course of three lessons on a machine of two GPUs, each lesson one process."""
    sources = {"fsdp/01_good.py": GOOD, "fsdp/02_bad.py": BAD, "fsdp/03_hung.py": HUNG}
    (tmp_path / "fsdp").mkdir()
    for path, source in sources.items():
        (tmp_path / path).write_text(source)
    for module in (gpu_box, lessons, machines, run_lessons):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_box, "LESSONS", list(sources))
    monkeypatch.setattr(machines, "LESSONS", list(sources))
    for path in sources:
        monkeypatch.setitem(lessons.ABOUT, path, {"ranks": [1, 2, 3, 4, 8]})
    lessons.ABOUT["fsdp/02_bad.py"]["ranks"] = [2, 3, 4, 8]
    lessons.ABOUT["fsdp/03_hung.py"]["ranks"] = [2]
    monkeypatch.setattr(gpu_box, "gpus_here", lambda: [H100] * 2)
    monkeypatch.setattr(gpu_box.Box, "launcher", lambda *run: ())
    monkeypatch.setattr(gpu_box, "ask_doctor", lambda folder, deadline: [])
    monkeypatch.setattr(gpu_box, "bench", lambda folder: 0)
    monkeypatch.setattr(gpu_box, "compare_gpus", lambda folder, deadline: [])
    monkeypatch.setattr(tables, "write", lambda: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def make(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Call the command; return what it ends with."""
    monkeypatch.setattr(sys, "argv", ["gpu_box", *arguments])
    with pytest.raises(SystemExit) as end:
        gpu_box.main()
    return end.value.code


def running(box: Path) -> list[list[str]]:
    """The processes that the hanging lesson started, itself among them."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(box / "fsdp/03_hung.py") in line]


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_box, "gpus_here", lambda: [])
    for arguments in ([], ["--plan"]):
        said = make(monkeypatch, *arguments)
        assert said.startswith("torch finds no GPU here")
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        ([H100] * 8, "8xH100-SXM"),
        (["NVIDIA H100 PCIe"], "1xH100-PCIe"),
        (["NVIDIA A100-SXM4-80GB"] * 4, "4xA100-SXM4"),
        (["NVIDIA GeForce RTX 4090", "Tesla T4"], "1xRTX-4090+1xT4"),
    ],
)
def test_a_machine_is_called_by_its_gpus(gpus: list[str], name: str) -> None:
    assert gpu_box.machine_name(gpus) == name


def test_it_says_first_what_it_will_do(
    box: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert make(monkeypatch, "--plan", "--deadline=77") is None
    said = capsys.readouterr().out
    for words in (
        "2xH100-SXM: the doctor, then 4 runs",
        "1, 2 ranks",
        "results/2xH100-SXM/",
        "77 s",
    ):
        assert words in said
    assert not (box / "results").exists()


def test_what_fails_or_hangs_is_named_and_the_rest_runs(
    box: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert make(monkeypatch, "--deadline=5") == 1
    said = capsys.readouterr().out
    assert said.endswith("Failed: fsdp/02_bad.py, 2; fsdp/03_hung.py, 2\n")
    folder = box / "results/2xH100-SXM"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "machine.json",
        "topology.txt",
        "README.md",
        "1-ranks/fsdp_01_good.json",
        "1-ranks/fsdp_01_good.txt",
        "2-ranks/fsdp_01_good.json",
        "2-ranks/fsdp_01_good.txt",
        "2-ranks/fsdp_02_bad.json",
        "2-ranks/fsdp_02_bad.txt",
        "2-ranks/fsdp_03_hung.json",
        "2-ranks/fsdp_03_hung.txt",
    }
    assert (folder / "2-ranks/fsdp_02_bad.txt").read_text() == "measured 1.5 in ./fsdp/02_bad.py\n"
    stack = (folder / "2-ranks/fsdp_03_hung.txt").read_text()
    assert 'File "<string>", line 1 in <module>' in stack, "where its child hangs"
    assert not running(box)
    told = json.loads((folder / "2-ranks/fsdp_01_good.json").read_text())
    assert (told["saw"], told["gpus"], told["exit"]) == ("0,1", 2, 0)
    page = (folder / "README.md").read_text()
    assert "| fsdp/01_good.py | 1 PASS | 1 PASS |" in page
    assert "| fsdp/02_bad.py |  | **failed**: 1 FAIL |" in page
    assert "| fsdp/03_hung.py |  | **hung** |" in page
    assert "- busbw: predicted >= 2.5, measured 1.5" in page
    assert "[what it printed](2-ranks/fsdp_03_hung.txt)" in page


def test_it_goes_on_with_what_has_not_passed(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    really = gpu_box.run_one

    def noted(lesson: str, folder: Path, *more: object) -> dict:
        ran.append(f"{lesson}, {folder.name[0]}")
        return really(lesson, folder, *more)

    monkeypatch.setattr(gpu_box, "run_one", noted)
    options = ("--only=fsdp/0", "--deadline=60")
    (box / "fsdp/03_hung.py").write_text(GOOD)
    assert make(monkeypatch, *options) == 1
    assert len(ran) == 4
    ran.clear()
    assert make(monkeypatch, *options) == 1
    assert ran == ["fsdp/02_bad.py, 2"], "what failed is run again"
    ran.clear()
    (box / "fsdp/02_bad.py").write_text(GOOD)  # repaired
    (box / "fsdp/03_hung.py").write_text(f"{GOOD}# changed\n")
    assert make(monkeypatch, *options) == 0
    assert ran == ["fsdp/02_bad.py, 2", "fsdp/03_hung.py, 2"]
    ran.clear()
    assert make(monkeypatch, *options) == 0
    assert ran == []


@pytest.mark.deep
def test_ranks_of_torchrun_that_hang_say_where_and_are_ended(
    box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = box / "fsdp/03_hung.py"
    hung.write_text(f'open(__file__ + "." + __import__("os").environ["RANK"], "w")\n{HUNG}')

    class Patient(subprocess.Popen):
        """Its deadline is over once both ranks hang: torchrun may take long to start them."""

        def wait(self, timeout: float | None = None) -> int:
            while timeout == 3.25 and len([*hung.parent.glob("03_hung.py.?")]) < 2:
                assert self.poll() is None
                time.sleep(0.05)
            return super().wait(timeout)

    monkeypatch.setattr(gpu_box.Box, "launcher", LAUNCHER)
    monkeypatch.setattr(subprocess, "Popen", Patient)
    assert make(monkeypatch, "--only=hung", "--deadline=3.25") == 1
    said = (box / "results/2xH100-SXM/2-ranks/fsdp_03_hung.txt").read_text()
    assert len(re.findall(r'fsdp/03_hung.py", line \d+ in <module>', said)) == 2, said
    assert not running(box)


def test_a_page_compares_with_every_other_machine(
    box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(monkeypatch, "--only=good", "--machine=one")
    (box / "fsdp/01_good.py").write_text(GOOD.replace("3.5", "7.25"))
    make(monkeypatch, "--only=good", "--machine=other")
    text = (box / "results/other/README.md").read_text()
    assert "| Lesson | Claim | Predicted | Measured | one |" in text
    assert "| fsdp/01_good.py | GB/s | >= 2.5 | 7.25 | 3.5 |" in text


def test_each_gpu_is_compared_with_the_others_once_for_each_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def watched(arguments: list[str], environment: dict, deadline: float) -> tuple[int, str]:
        called.append(arguments[:2])
        options = cluster.options_of(arguments[2:])
        options.json.write_text(json.dumps({"about": {"torch": torch.__version__}}))
        return 0, f"17 pass, {socket.gethostname()}"

    monkeypatch.setattr(gpu_box, "watch", watched)
    for _ in range(2):
        assert gpu_box.compare_gpus(tmp_path, 60) == []
    assert called == [["-m", "benchmarks.cluster"]]
    assert (tmp_path / "cluster.txt").read_text() == "17 pass, host"
    monkeypatch.setattr(gpu_box, "watch", lambda *arguments: ("hung", "an all-reduce"))
    (tmp_path / "cluster.json").unlink()
    assert gpu_box.compare_gpus(tmp_path, 60) == ["the suite for a new cluster"]


@pytest.mark.timeout(600)
@pytest.mark.deep
def test_on_pretended_gpus_it_plays_a_whole_lesson(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fundamentals").symlink_to(gpu_box.ROOT / "fundamentals")
    monkeypatch.setattr(gpu_box, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_box, "ask_doctor", lambda folder, deadline: [])
    make(monkeypatch, "--pretend=2", "--ranks=2", "--only=fundamentals/04")
    (ledger,) = tmp_path.glob("build/gpu/2xpretended/2-ranks/*.json")
    told = json.loads(ledger.read_text())
    assert [row for row in told["ledger"] if "needs" in row] == [], "no GPU is wanting"
    assert told["ranks"] == 2
    page = (tmp_path / "build/gpu/2xpretended/README.md").read_text()
    assert "nothing here was measured on one" in page
    assert not (tmp_path / "results").exists()


def test_so_many_of_the_gpus_that_we_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_box.first(4) == "0,1,2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8a,2")
    assert gpu_box.first(2) == "5,GPU-8a"


def test_torchrun_starts_the_ranks_of_lessons_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_box, "gpus_here", lambda: [H100] * 8)
    options = {"machine": "", "ranks": [], "only": "", "deadline": 9, "pretend": 0}
    box = gpu_box.Box(SimpleNamespace(**options))
    assert box.sizes == [1, 2, 4, 8]
    assert box.launcher("communication/05_bandwidth_test.py", 4)[-1] == "--nproc-per-node=4"
    assert "communication/05_bandwidth_test.py, 1" not in box.runs
    assert "communication/05_bandwidth_test.py, 8" in box.runs
    assert box.launcher("fundamentals/00_check_your_machine.py", 8) == ()
    assert "fundamentals/00_check_your_machine.py, 8" in box.runs


def test_what_is_kept_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(address="fe80::fc:ff%eth0")
    cards = {"eth0": [SimpleNamespace(address="10.0.0.12"), card]}
    monkeypatch.setattr(run_lessons.psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(run_lessons, "ROOT", Path("/home/ada/course"))
    monkeypatch.setattr(run_lessons.Path, "home", lambda: Path("/home/ada"))
    monkeypatch.setattr(run_lessons.socket, "gethostname", lambda: "node7")
    said = "/home/ada/course/fsdp/x.py, /home/ada/.venv, node7, node70, /home/adam"
    assert run_lessons.discreet(said) == "./fsdp/x.py, ~/.venv, host, node70, /home/adam"
    said = "eth0 10.0.0.12, fe80::fc:ff; 110.0.0.12, 10.0.0.123, 127.0.0.1"
    assert run_lessons.discreet(said) == "eth0 ADDRESS, ADDRESS; 110.0.0.12, 10.0.0.123, 127.0.0.1"


def test_ctrl_c_keeps_what_was_measured(
    box: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    really = gpu_box.run_one

    def until_ctrl_c(lesson: str, *more: object) -> dict:
        if "bad" in lesson:
            raise KeyboardInterrupt
        return really(lesson, *more)

    monkeypatch.setattr(gpu_box, "run_one", until_ctrl_c)
    assert make(monkeypatch) == 1
    assert capsys.readouterr().out.endswith("Failed: interrupted; the same command goes on\n")
    page = (box / "results/2xH100-SXM/README.md").read_text()
    assert "| fsdp/01_good.py | 1 PASS | 1 PASS |" in page


def test_topology_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = gpu_box.pynvml
    fakes = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetP2PStatus": lambda a, b, kind: int({a, b} != {0, 1}),
        "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: nvml.NVML_TOPOLOGY_SYSTEM,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(nvml, name, fake)
    monkeypatch.setattr(gpu_box.shutil, "which", lambda name: None)
    assert gpu_box.topology().splitlines() == [
        "GPU 0 - GPU 1: NVLink",
        "GPU 0 - GPU 2: SYS, between NUMA nodes",
        "GPU 1 - GPU 2: SYS, between NUMA nodes",
    ]


# What READMEs and lessons say of such machines


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which one lesson passed on 2 GPUs, and another on 1 and failed on 2."""
    for gpus, lesson, status in (
        (2, "parallelism/01_data_parallelism_ddp.py", 0),
        (1, "parallelism/02_fsdp_zero.py", 0),
        (2, "parallelism/02_fsdp_zero.py", 1),
    ):
        folder = tmp_path / f"results/2xT4/{gpus}-ranks"
        folder.mkdir(parents=True, exist_ok=True)
        told = {"lesson": lesson, "exit": status, "gpus": gpus, "ledger": []}
        (folder / f"{machines.name_of(lesson)}.json").write_text(json.dumps(told))
    (tmp_path / "results/2xT4/machine.json").write_text("{}")
    found = [machines.Machine(tmp_path / "results/2xT4")]
    monkeypatch.setattr(machines, "machines", lambda: found)
    monkeypatch.setattr(tables, "machines", lambda: found)
    return tmp_path


def test_a_lesson_says_that_gpus_ran_it_once_it_passed_on_several(measured: Path) -> None:
    passed = tables.told_of_gpus("parallelism/01_data_parallelism_ddp.py")
    assert "\nRun on several GPUs" in passed
    assert "Not run on several GPUs" in tables.told_of_gpus("parallelism/02_fsdp_zero.py")


def test_the_table_says_on_which_machines(measured: Path) -> None:
    table = tables.gpus()
    assert table.startswith("Run so far on: [2xT4](results/2xT4/README.md).")
    rows = {line.split("]")[0][3:]: line for line in table.splitlines() if line.startswith("| [")}
    assert rows["parallelism/01"].endswith("| 2xT4: 2 |")
    assert rows["parallelism/02"].endswith("| 2xT4: 1 |")
    assert rows["parallelism/03"].endswith("|  |")
