"""However a lesson ends: the right exit status, one message, a whole ledger, no process left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch

from course import plumbing
from course.lessons import ROOT
from course.playing import load
from course.ranks import attempt
from tests.helpers.warm_launch import run_warm

LESSON = """
def main() -> None:
    ill = command_line({"--ill": {"default": "", "metavar": "HOW", "help": "how to fail"}}).ill
    launch()
    if WORLD_SIZE % 2 == 1 or ill == "refuses":
        refuse(f"needs an even number of ranks, got {WORLD_SIZE}; set --nproc-per-node")
    setup()
    claim("one that holds", 1, 1)
    last = RANK == WORLD_SIZE - 1
    if ill == "fails on the last rank":
        claim("wrong on the last rank", 10, 13 if last else 10)
    if ill == "no, but says more":
        claim("a question's answer", 1, 2, "<=", atol=1, question=3, timed=True)
        claim("wrong on the last rank, rank 0 asked", 10, 13 if last else 10, rank=0)
        claim("wrong on rank 0, the last rank asked", 10, 10 if last else 13, rank=WORLD_SIZE - 1)
    if ill == "fails in three ways":
        claim("not a number there", 0, float("nan") if last else 0, "<=", atol=1e9)
        claim("no end", 0, float("inf") * (1 if RANK else -1), ">=")
        claim("each rank its own", RANK, RANK)
        claim("each rank its own, and rank 0 wrong", RANK, max(RANK, 1))
    if ill == "raises on the last rank" and last:
        raise RuntimeError("boom")
    if ill == "raises everywhere":
        raise RuntimeError("boom")
    if ill == "segfaults" and last:
        os.kill(os.getpid(), signal.SIGSEGV)
    if ill == "hangs" and last:
        print("HANGING", flush=True)
        time.sleep(1000)
    if ill == "measures nothing":
        ledger.clear()
        claim("of a model", 1, 1, kind="simulated")
        claim("by a formula", 1, 2, kind="theory")
    if ill == "claims nothing":
        ledger.clear()
    if ill == "fails alone":
        ledger.clear()
        claim("wrong", 0, 1)
    blocked("what this machine cannot answer", needs="2 GPUs")
    dist.barrier()
    finish()
"""


@pytest.fixture
def lesson(tmp_path: Path) -> Path:
    """A lesson of the plumbing and a `main` that can fail in every way, alone in its folder."""
    source = (ROOT / "course/plumbing.py").read_text()
    old = source[source.index("def main(") : source.index("\n# %% [markdown]")]
    source = source.replace(old, LESSON + "\n")
    assert "> 1 else 4" in source
    source = source.replace("> 1 else 4", "> 1 else 2")  # quicker
    path = tmp_path / "lesson.py"
    path.write_text(source)
    return path


def commanded(lesson: Path, *argv: str, ranks: int = 0) -> list:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(torchrun if ranks else []), str(lesson), *argv]


def temporary(lesson: Path) -> Path:
    (folder := lesson.parent / "tmp").mkdir(exist_ok=True)
    return folder


def environment(lesson: Path) -> dict:
    kept = str(lesson.parent / "ledger.json")
    return os.environ | {"LESSON_JSON": kept, "TMPDIR": str(temporary(lesson))}


def end(
    lesson: Path, *argv: str, ranks: int = 0, warm: bool = True
) -> tuple[int, str, str, list[dict]]:
    """Run to the end; return exit status, stdout, stderr and ledger; no process may be left."""
    kept = lesson.parent / "ledger.json"
    kept.unlink(missing_ok=True)
    python, *command = commanded(lesson, *argv, ranks=ranks)
    if warm:
        ran = run_warm(command, lesson.parent, environment(lesson), timeout=250)
    else:
        ran = subprocess.run(
            [python, *command],
            capture_output=True,
            text=True,
            timeout=250,
            env=environment(lesson),
            cwd=lesson.parent,
        )
    assert left(lesson) == []
    if not ranks:  # who types torchrun gets torchrun's own folder
        assert os.listdir(temporary(lesson)) == []
    ledger = json.loads(kept.read_text(), parse_constant=pytest.fail) if kept.exists() else {}
    return ran.returncode, ran.stdout, ran.stderr, ledger.get("ledger", [])


def left(lesson: Path, within: float = 120) -> list[psutil.Process]:
    """Processes that run this lesson and do not end within so many seconds."""
    stop = time.monotonic() + within
    while True:
        mine = []
        for process in psutil.process_iter(["cmdline", "status"]):
            zombie = process.info["status"] == psutil.STATUS_ZOMBIE
            if str(lesson) in " ".join(process.info["cmdline"] or []) and not zombie:
                mine.append(process)
        if not mine or time.monotonic() > stop:
            return mine
        time.sleep(0.1)


def test_a_lesson_that_holds_and_what_its_rows_say(lesson: Path) -> None:
    code, out, err, ledger = end(lesson, "--ill", "no, but says more", warm=False)
    assert (code, err) == (0, "")
    assert [row["verdict"] for row in ledger] == ["PASS"] * 4 + ["BLOCKED"]
    assert "4 PASS, 0 FAIL, 1 BLOCKED" in out
    assert out.count("one that holds") == 1
    assert max(map(len, out.splitlines())) <= 100
    assert ledger[0] | {"question": None, "timed": False} == ledger[0]
    assert "PASS    3. a question's answer" in out
    assert "<= 1 ±1" in out
    said = {"question": 3, "timed": True, "slack": 1, "sign": "<="}
    assert ledger[1] | said == ledger[1]
    assert [row["rank"] for row in ledger[2:4]] == [0, 1], "one rank's figures may count alone"


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_claim_that_fails_on_one_rank_only(lesson: Path, ranks: int) -> None:
    code, out, err, ledger = end(lesson, "--ill", "fails on the last rank", ranks=ranks)
    assert code == 1
    assert err == "" or ranks
    assert "off by 3 on rank 1" in out
    assert ledger[1] | {"verdict": "FAIL", "rank": 1, "measured": 13.0} == ledger[1]


def test_each_rank_by_its_own_prediction_and_no_number_is_never_right(lesson: Path) -> None:
    code, _, _, ledger = end(lesson, "--ill", "fails in three ways")
    assert code == 1
    assert [row["verdict"] for row in ledger] == ["PASS", "FAIL", "FAIL", "PASS", "FAIL", "BLOCKED"]
    assert (ledger[1]["measured"], ledger[1]["rank"]) == ("nan", 1)
    assert (ledger[2]["measured"], ledger[2]["rank"]) == ("-inf", 0)
    assert (ledger[4]["rank"], ledger[4]["predicted"], ledger[4]["measured"]) == (0, 0, 1)


def test_what_was_not_measured_is_marked_and_counted_apart(lesson: Path) -> None:
    code, out, _, ledger = end(lesson, "--ill", "measures nothing")
    assert code == 1
    assert out.endswith(
        "0 PASS, 0 FAIL, 1 BLOCKED; simulated (s): 1 PASS, 0 FAIL; theory (t): 0 PASS, 1 FAIL\n"
    )
    assert "  PASS s     of a model" in out
    assert "  FAIL t     by a formula" in out
    lines = lesson.read_text().splitlines()
    for row in ledger:
        assert row["claim"] in lines[row["line"] - 1], "each row says where its claim stands"


def test_no_claim_is_no_success(lesson: Path) -> None:
    code, out, _, _ = end(lesson, "--ill", "claims nothing")
    assert code == 1
    assert "0 PASS, 0 FAIL, 1 BLOCKED\n  Nothing could be checked" in out
    code, out, _, _ = end(lesson, "--ill", "fails alone")
    assert code == 1
    assert out.endswith("0 PASS, 1 FAIL, 1 BLOCKED\n")


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("ill", ["raises on the last rank", "raises everywhere"])
def test_an_exception_is_told_once_and_nobody_waits(lesson: Path, ill: str, ranks: int) -> None:
    code, _, err, ledger = end(lesson, "--ill", ill, ranks=ranks)
    assert code == 1
    assert err.count("RuntimeError: boom") == 1
    assert ledger == []
    if not ranks:
        assert err.count("Traceback") == 1
        assert err.rstrip().endswith("RuntimeError: boom")


def give_the_launcher_time(lesson: Path) -> None:
    """A rank whose peer died gives the launcher a second to end it: here, as long as it takes."""
    source = lesson.read_text()
    assert source.count("time.sleep(1 if first else 30)") == 1
    lesson.write_text(source.replace("time.sleep(1 if first else 30)", "time.sleep(100)"))


def test_a_segfault_is_named(lesson: Path) -> None:
    give_the_launcher_time(lesson)
    code, _, err, _ = end(lesson, "--ill", "segfaults")
    assert (code, err) == (1, "rank 1 was ended by SIGSEGV\n")


@pytest.mark.parametrize("ranks", [0, 2])
def test_wrong_usage_is_one_message(lesson: Path, ranks: int) -> None:
    code, _, err, _ = end(lesson, "--wrong", ranks=ranks)
    assert code == 1
    assert err.count("unrecognized arguments: --wrong") == 1
    code, _, err, _ = end(lesson, "--ill", "refuses", ranks=ranks)
    assert code == 1
    assert err.count("needs an even number of ranks, got 2; set --nproc-per-node") == 1
    assert ranks or err.count("\n") == 1


def test_a_world_size_it_does_not_take(lesson: Path) -> None:
    code, _, err, ledger = end(lesson, ranks=3)
    rule = "lesson.py: needs an even number of ranks, got 3; set --nproc-per-node"
    assert code == 1
    assert err.count(rule) == 1
    assert ledger == []


@pytest.mark.parametrize("ranks", [0, 2])
def test_help_reads_well_and_starts_nothing(lesson: Path, ranks: int) -> None:
    code, out, err, ledger = end(lesson, "--help", ranks=ranks)
    assert (code, ledger) == (0, [])
    assert out.count("--ill HOW") == 2 * max(ranks, 1)  # in the usage line, and explained
    assert "2 ranks, gloo" not in out
    assert ranks or err == ""


def hanging(lesson: Path, ranks: int = 0) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """Start a lesson whose last rank hangs; return its launcher and its ranks."""
    launcher = subprocess.Popen(
        commanded(lesson, "--ill", "hangs", ranks=ranks),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(lesson),
    )
    for line in launcher.stdout:
        if "HANGING" in line:
            break
    return launcher, psutil.Process(launcher.pid).children()


@pytest.mark.deep
@pytest.mark.parametrize(("sent", "ranks"), [("SIGINT", 0), ("SIGTERM", 0), ("SIGTERM", 2)])
def test_ctrl_c_and_sigterm_of_the_launcher(lesson: Path, sent: str, ranks: int) -> None:
    launcher, _ = hanging(lesson, ranks)
    launcher.send_signal(signal.Signals[sent])
    _, err = launcher.communicate(timeout=250)
    assert left(lesson) == []
    if ranks:
        assert launcher.returncode != 0
    else:
        assert (launcher.returncode, err) == (128 + signal.Signals[sent], "")


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [0, 2])
def test_sigkill_of_the_launcher_takes_the_ranks_along(lesson: Path, ranks: int) -> None:
    launcher, children = hanging(lesson, ranks)
    assert len(children) == 2
    launcher.kill()
    launcher.wait()
    assert left(lesson) == []


@pytest.mark.deep
def test_sigkill_of_the_launcher_before_its_ranks_can_ask_to_die_with_it(lesson: Path) -> None:
    launcher = subprocess.Popen(commanded(lesson, "--ill", "hangs"), stdout=subprocess.DEVNULL)
    while len(psutil.Process(launcher.pid).children()) < 2:
        time.sleep(0.02)  # the ranks now import torch, which takes a second
    launcher.kill()
    launcher.wait()
    assert left(lesson) == []


@pytest.mark.deep
def test_sigkill_of_a_rank_ends_the_others(lesson: Path) -> None:
    give_the_launcher_time(lesson)
    launcher, children = hanging(lesson)
    victim = min(children, key=lambda p: p.pid)
    victim.kill()
    _, err = launcher.communicate(timeout=250)
    assert (launcher.returncode, err.count("\n")) == (1, 1)
    assert "was ended by SIGKILL" in err
    assert left(lesson) == []


def joined(gpus: list[int], nodes: int) -> tuple[str, str]:
    """On a rank whose node has `gpus[rank]` GPUs: set up; return backend and device."""
    rank = int(os.environ["RANK"])
    local_ranks = len(gpus) // nodes
    os.environ |= {"LOCAL_WORLD_SIZE": str(local_ranks), "LOCAL_RANK": str(rank % local_ranks)}
    plumbing = load("course/plumbing.py")
    plumbing.time.sleep = lambda seconds: None  # a rank that refuses waits for its launcher
    torch.set_float32_matmul_precision("high")
    asked = []

    def join(backend: str, **options: object) -> None:
        assert options["rank"] == rank
        assert options["world_size"] == len(gpus)
        asked.append((backend, str(options["device_id"] or "cpu")))

    with (
        patch("torch.cuda.device_count", lambda: gpus[rank]),
        patch("torch.cuda.get_device_name", lambda: "Pretended GPU"),
        patch("torch.cuda.set_device"),
        patch("torch.cuda.nccl.version", lambda: (2, 30, 7)),
        patch("torch.distributed.init_process_group", join),
    ):
        assert str(plumbing.setup()) == asked[0][1]
    assert torch.get_float32_matmul_precision() == "highest"
    return asked[0]


@pytest.mark.parametrize(
    ("gpus", "nodes", "devices"),
    [
        pytest.param([2, 2], 1, ["cuda:0", "cuda:1"], id="one node"),
        pytest.param([2, 2, 3, 3], 2, ["cuda:0", "cuda:1"] * 2, id="two nodes, one with more"),
    ],
)
def test_nccl_where_every_rank_has_a_gpu(gpus: list, nodes: int, devices: list) -> None:
    outcomes = attempt(joined, len(gpus), gpus, nodes, group=False)
    assert [outcome.value for outcome in outcomes] == [("nccl", device) for device in devices]
    assert f"{len(gpus)} ranks, NCCL 2.30.7 on Pretended GPU, torch" in outcomes[0].output


@pytest.mark.parametrize("gpus", [[0, 0], [1, 1]])
def test_gloo_where_none_has_one(gpus: list) -> None:
    outcomes = attempt(joined, 2, gpus, 1, group=False)
    assert [outcome.value for outcome in outcomes] == [("gloo", "cpu")] * 2
    counted = "1 GPU" if gpus[0] == 1 else "0 GPUs"
    said = f"2 ranks, gloo (2 ranks and {counted} here), torch"
    assert [outcome.output.count(said) for outcome in outcomes] == [1, 0]


@pytest.mark.parametrize("gpus", [[2, 2, 1, 1], [0, 0, 2, 2]])
def test_nodes_with_and_without_gpus_are_refused_by_all_ranks_alike(gpus: list) -> None:
    outcomes = attempt(joined, 4, gpus, 2, group=False)
    rule = "needs a GPU per rank, or none, got GPUs for 2 of 4 ranks"
    assert [outcome.text.count(rule) for outcome in outcomes] == [1] * 4, outcomes


@pytest.mark.parametrize(
    ("gpus", "world_sizes", "ranks"),
    [(0, [2, 3, 4, 8], 4), (1, [2, 3, 4, 8], 4), (3, [2, 4, 8], 2), (16, [2, 4, 8], 8)],
)
def test_plain_python_takes_as_many_gpus_as_the_lesson_can(
    gpus: int,
    world_sizes: list,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.run.main", asked.extend)
    monkeypatch.setattr("logging.disable", lambda: None)
    with pytest.raises(SystemExit):
        plumbing.launch(world_sizes)
    assert f"--nproc-per-node={ranks}" in asked
