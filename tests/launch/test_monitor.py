"""launch/monitor.py: what it writes is what was done, and exercise 25's detector reads it."""

import errno
import json
import re
import runpy
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course.lessons import ROOT
from course.ranks import run

SCRIPT = ROOT / "launch/monitor.py"
DETECTOR = ROOT / "exercises/25_straggler_detector/solution.py"
STEPS = 20


def loaded() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT), run_name="monitor"))


class MadeUpClock:
    """Reads what it is told; a rank's clock began at `now`."""

    def __init__(self, now: float) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def reached(self, stamp: float) -> bool:
        return True

    def seconds(self, stamp: float) -> float:
        return stamp


def record(monitor: object, own: list[float], longest: float = 1.0) -> None:
    """Steps with these own times, each over when the slowest rank is ready."""
    for seconds in own:
        monitor.begin()
        monitor.clock.time += seconds
        monitor.ready()
        monitor.clock.time += longest - seconds
        monitor.end(samples=8)


def metrics_of(text: str) -> dict[tuple[str, str], float]:
    """Value by name and labels, having checked the text line by line, each metric in one piece."""
    found, current, seen = {}, None, set()
    for line in text.splitlines():
        if said := re.fullmatch(r"# (HELP|TYPE) ([a-z_]+) (.+)", line):
            if said[1] == "HELP":
                assert said[2] not in seen, "a metric's samples stand together"
                current = said[2]
                seen.add(current)
            else:
                assert said[3] == ("counter" if current.endswith("_total") else "gauge")
            continue
        name, labels, value = re.fullmatch(
            r'([a-z_]+)\{((?:[a-z]+="[^"]*",?)+)\} (\S+)', line
        ).groups()
        assert name == current
        assert (name, labels) not in found
        found[name, labels] = float(value)
    return found


# What a rank writes


def test_lines_and_sums_are_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monitor = loaded().Monitor(tmp_path / "new" / "folder")
    monitor.clock = MadeUpClock(1000.0)
    record(monitor, [0.25, 0.5])
    monitor.close()
    written = (tmp_path / "new/folder/rank-00003.jsonl").read_text().splitlines()
    first, *steps, look = map(json.loads, written)
    assert (first["rank"], first["host"]) == ("3", socket.gethostname())
    assert [step["step"] for step in steps] == [0, 1]
    assert [step["samples"] for step in steps] == [8, 8]
    stamps = [[step[key] for key in ("begun", "ready", "over")] for step in steps]
    assert stamps == [[1000.0, 1000.25, 1001.0], [1001.0, 1001.5, 1002.0]]
    assert look["training_resident_memory_bytes"] > 10_000_000
    values = metrics_of((tmp_path / "new/folder/rank-00003.prom").read_text())
    mine = f'rank="3",host="{socket.gethostname()}"'
    assert values["training_steps_total", mine] == 2
    assert values["training_samples_total", mine] == 16
    assert values["training_step_seconds_total", mine] == 2.0
    assert values["training_own_seconds_total", mine] == 0.75
    assert not list((tmp_path / "new/folder").glob("*.part"))


def test_a_step_needs_its_three_calls(tmp_path: Path) -> None:
    with loaded().Monitor(tmp_path) as monitor:
        monitor.begin()
        with pytest.raises(RuntimeError, match="call begin"):
            monitor.end(samples=1)
        monitor.ready()
        monitor.end(samples=1)
        with pytest.raises(RuntimeError, match="call begin"):
            monitor.end(samples=1)


def test_after_a_restart_the_last_start_counts(tmp_path: Path) -> None:
    code = loaded()
    for own in ([0.5] * 3, [0.25] * 2):
        with code.Monitor(tmp_path) as monitor:
            monitor.clock = MadeUpClock(0.0)
            record(monitor, own)
    path = tmp_path / "rank-00000.jsonl"
    assert code.stamps(path) == [(0.0, 0.25, 1.0), (1.0, 1.25, 2.0)]
    with path.open("a") as file:
        file.write('{"step": 2, "begun": 2.0, "re')  # killed while it wrote
    assert code.stamps(path) == [(0.0, 0.25, 1.0), (1.0, 1.25, 2.0)]


def test_what_cannot_be_written_ends_no_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = loaded()
    (tmp_path / "file").touch()
    with code.Monitor(tmp_path / "file") as monitor:  # no folder can be made there
        monitor.clock = MadeUpClock(0.0)
        record(monitor, [0.5] * 3)
    assert capfd.readouterr().err.count("records no more") == 1

    class FullDisk:
        def write(self, text: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with code.Monitor(tmp_path / "folder") as monitor:
        monitor.clock = MadeUpClock(0.0)
        monitor.lines.close()
        monitor.lines = FullDisk()
        record(monitor, [0.5] * 3)
    said = capfd.readouterr().err
    assert said.count("records no more") == 1
    assert "No space left on device" in said


# The machine


def test_bytes_of_the_network_are_counted(tmp_path: Path) -> None:
    code = loaded()
    before = code.network()["lo"]
    sent = 10_000_000
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            thread = threading.Thread(target=sender.sendall, args=(bytes(sent),))
            thread.start()
            left = sent
            while left:
                left -= len(receiver.recv(1 << 20))
            thread.join()
    after = code.network()["lo"]
    assert after[0] - before[0] >= sent
    assert after[1] - before[1] >= sent
    text = code.prometheus(code.machine(with_network=True), {"rank": "0", "host": "h"})
    values = metrics_of(text)
    lo = 'rank="0",host="h",interface="lo"'
    assert values["training_network_sent_bytes_total", lo] >= after[0]
    assert "network" not in code.machine(with_network=False), "once per node"


def test_infiniband_counts_words_of_four_bytes(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "port_xmit_data").write_text("250\n")
    (port / "port_rcv_data").write_text("1000\n")
    code = loaded()
    code.network.__globals__["INFINIBAND"] = tmp_path
    assert code.network()["mlx5_0/1"] == (1000, 4000)


def test_nvml_s_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for NVML, which counts percent and megahertz."""
    code = loaded()
    asked = []
    code.nvml.__globals__["pynvml"] = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid),
        nvmlDeviceGetClockInfo=lambda gpu, clock: 1980,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=97),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=70_000_000_000),
        nvmlDeviceGetTemperature=lambda gpu, sensor: 61,
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    told = SimpleNamespace(uuid="5a3c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: told)
    found = code.nvml()
    assert asked == ["GPU-5a3c"]
    assert found["training_gpu_utilization_ratio"] == 0.97
    assert found["training_gpu_clock_hertz"] == 1.98e9
    assert found["training_gpu_memory_used_bytes"] == 7e10
    assert found["training_gpu_temperature_celsius"] == 61
    metrics_of(code.prometheus(found, {"rank": "0", "host": "h"}))


def test_a_gpu_s_stamps_add_up_events() -> None:
    """Each event is asked only for its distance from the one before, in milliseconds."""

    class Event:
        def __init__(self, milliseconds: float) -> None:
            self.at = milliseconds

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: "Event") -> float:
            assert 0 <= other.at - self.at < 1000
            return other.at - self.at

    clock = loaded().GPUClock()
    assert [clock.seconds(Event(at)) for at in (7.0, 257.0, 1007.0)] == [0.0, 0.25, 1.0]


# Who is slow


def own_times(rank: int) -> list[float]:
    """Of rank 2, late in 15 of 20 steps, and ranks 0, 1 and 3."""
    late = [0.75 if turn % 4 else 0.5 for turn in range(STEPS)]
    return late if rank == 2 else [0.5] * STEPS


def told_by_the_detector(folder: Path) -> list[int]:
    """On a rank: record, read it again, and ask exercise 25's solution."""
    code = loaded()
    rank = dist.get_rank()
    with code.Monitor(folder) as monitor:
        monitor.rank = rank
        monitor.clock = MadeUpClock(3600.0 * rank)
        record(monitor, own_times(rank))
    read = code.stamps(folder / f"rank-{rank:05}.jsonl")
    stragglers = runpy.run_path(str(DETECTOR))["stragglers"]
    return stragglers(read, window=STEPS, margin=0.1, false_alarm=0.1)


def test_exercise_25_s_detector_reads_it(tmp_path: Path) -> None:
    assert run(told_by_the_detector, 4, tmp_path) == [[2]] * 4
    shown = subprocess.run(
        [sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=True
    ).stdout
    _, *lines = shown.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3"]
    assert [line.split()[5] for line in lines] == ["0/20", "0/20", "15/20", "0/20"]
    assert [float(line.split()[2]) for line in lines] == [8.0] * 4, "samples/s"
    assert [float(line.split()[4]) for line in lines] == [500.0, 500.0, 750.0, 500.0], "own, ms"


def test_nothing_recorded_is_one_line(tmp_path: Path) -> None:
    told = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert told.returncode == 1
    assert told.stderr == f"monitor.py: no rank-N.jsonl in {tmp_path}\n"


def train(folder: Path) -> int:
    """The docstring's loop, with a DataLoader whose workers are forked while the monitor runs."""
    code = loaded()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(torch.utils.data.DataLoader(torch.randn(40, 4), 8, num_workers=1))
    with code.Monitor(folder, seconds=0.05) as monitor:
        for _ in range(5):
            monitor.begin()
            x = next(batches)
            loss = model(x).square().mean()
            monitor.ready()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.end(samples=len(x))
    return threading.active_count()


def test_a_training_with_workers_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(train, 1, tmp_path)
    code = loaded()
    recorded = code.stamps(tmp_path / "rank-00000.jsonl")
    assert len(recorded) == 5
    assert all(begun < ready < over for begun, ready, over in recorded)
    values = metrics_of((tmp_path / "rank-00000.prom").read_text())
    assert sum(value for (name, _), value in values.items() if "samples" in name) == 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
def test_on_a_gpu_own_time_is_the_gpu_s(tmp_path: Path) -> None:
    """Ten products, queued in a moment, are own time for as long as the GPU computes them."""
    code = loaded()
    x = torch.randn(8192, 8192, device="cuda")
    x @ x
    with code.Monitor(tmp_path) as monitor:
        for _ in range(3):
            monitor.begin()
            for _ in range(10):
                x @ x
            monitor.ready()
            monitor.end(samples=1)
    torch.cuda.synchronize()
    recorded = code.stamps(tmp_path / "rank-00000.jsonl")
    assert len(recorded) == 3
    assert all(ready - begun > 10 * (over - ready) for begun, ready, over in recorded)
