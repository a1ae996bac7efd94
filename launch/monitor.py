"""What each rank of a job does, while it trains: JSON lines, and Prometheus's text. Copy it alone.

    from monitor import Monitor

    with Monitor("metrics") as monitor:      # metrics/rank-00003.jsonl and rank-00003.prom
        for step in range(steps):
            monitor.begin()
            x, y = next(batches)
            loss = loss_of(model(x), y)
            monitor.ready()                  # before the first call that waits for other ranks
            loss.backward()                  # in which DDP sends
            optimizer.step()
            monitor.end(samples=len(x))

    python monitor.py metrics                # a line per rank: samples/s, own time, memory, GPU

**A line per step**: its number since this start, when it ended, how many samples, and three stamps
(begun, ready, over) in seconds of the rank's own clock; `stamps` reads them again. Waiting for a
slow rank makes all steps equally long. From begun to ready nobody waits: that tells who is slow.
**A line every few seconds**: resident memory; of torch's allocator what is held, the peak, what is
reserved; NVML's utilization, memory, clock and temperature of the rank's GPU; and, of each node's
first rank, the bytes that its network interfaces and InfiniBand ports have sent and received.
**The .prom file** has the same as counters and gauges. It is replaced as a whole, so that
node_exporter's textfile collector (--collector.textfile.directory=metrics) may read it at any time.

On a GPU the stamps are CUDA events: nothing waits for the GPU, and `ready` is when it got there.

Limits. FSDP gathers in the forward: call `ready` before it, and own time is the loader's. A node's
network counts whatever else runs there. Utilization is the share of the time in which any kernel
ran, and a wait in NCCL is one. Files that cannot be written end the recording, and never the
training; that is said once. Needs torch and psutil; nvidia-ml-py for what NVML tells. It was run on
1 to 4 ranks on CPU cores, **never on a GPU**.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
import torch

try:
    import pynvml
except ImportError:
    pynvml = None

Stamp = tuple[float, float, float]  # a step was begun, was ready for the others, was over

INFINIBAND = Path("/sys/class/infiniband")
# Prometheus's names, with the unit, `_total` for what only grows; and what each means.
METRICS = {
    "training_steps_total": "steps ended since this process began",
    "training_samples_total": "samples of these steps, of this rank",
    "training_step_seconds_total": "seconds from begin to end of these steps",
    "training_own_seconds_total": "seconds from begin to ready of these steps",
    "training_resident_memory_bytes": "the process's resident memory",
    "training_cuda_allocated_bytes": "what tensors hold on the GPU",
    "training_cuda_peak_bytes": "the most that they held",
    "training_cuda_reserved_bytes": "what torch's allocator has taken from the driver",
    "training_gpu_utilization_ratio": "share of the time in which any kernel ran (NVML)",
    "training_gpu_memory_used_bytes": "memory in use on the GPU, by all processes (NVML)",
    "training_gpu_clock_hertz": "clock of the multiprocessors (NVML)",
    "training_gpu_temperature_celsius": "temperature of the GPU (NVML)",
    "training_network_sent_bytes_total": "bytes sent by a network interface of the node",
    "training_network_received_bytes_total": "bytes received by it",
}


class Monitor:
    """Records this rank's steps and what its machine does.

    folder: where the files go; made if it is missing. On several nodes one folder for all of them,
    or one each, to be gathered: names contain the rank of the job.
    seconds: between two looks at memory, GPU and network, and between two writes of the .prom file.
    """

    def __init__(self, folder: str | Path, seconds: float = 5.0) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
        self.labels = {"rank": str(self.rank), "host": socket.gethostname()}
        self.sums = dict.fromkeys(list(METRICS)[:4], 0.0)
        self.clock = GPUClock() if torch.cuda.is_available() else CPUClock()
        self.begun = self.was_ready = None
        self.pending = deque()  # steps whose events the GPU has not reached
        self.folder = Path(folder)
        self.lines = None
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        with self._or_give_up():
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"rank-{self.rank:05}.jsonl"
            self.lines = path.open("a", buffering=1)  # a line at a time
            self._write({"started": time.time(), **self.labels})
        self.thread = threading.Thread(target=self._look_again_and_again, args=(seconds,))
        self.thread.daemon = True  # a training that raises ends, with or without `close`
        self.thread.start()

    def begin(self) -> None:
        """A step begins: call it before the loader is asked."""
        self.begun, self.was_ready = self.clock.now(), None

    def ready(self) -> None:
        """This rank has done what it can do alone: what follows waits for other ranks."""
        self.was_ready = self.clock.now()

    def end(self, samples: int) -> None:
        """The step is over. Raises RuntimeError if `begin` and `ready` were not called before."""
        if self.begun is None or self.was_ready is None:
            raise RuntimeError("call begin(), then ready(), then end(): each once per step")
        step = (self.begun, self.was_ready, self.clock.now())
        self.pending.append((step, samples, time.time()))
        self.begun = self.was_ready = None
        self._settle()

    def close(self) -> None:
        """Write what is left. No later call records anything."""
        self.stopped.set()
        self.thread.join()
        self._settle(wait=True)
        self._look()
        with self.lock:
            if self.lines:
                self.lines.close()
                self.lines = None

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _settle(self, wait: bool = False) -> None:
        """Write the steps that the device has reached."""
        while self.pending and (wait or self.clock.reached(self.pending[0][0][2])):
            step, samples, ended = self.pending.popleft()
            begun, ready, over = map(self.clock.seconds, step)
            with self.lock:
                number = int(self.sums["training_steps_total"])
                done = (1, samples, over - begun, ready - begun)
                for name, more in zip(self.sums, done, strict=True):
                    self.sums[name] += more
            stamps = {"begun": begun, "ready": ready, "over": over}
            self._write({"step": number, "time": ended, "samples": samples, **stamps})

    def _look_again_and_again(self, seconds: float) -> None:
        while not self.stopped.wait(seconds):
            self._look()

    def _look(self) -> None:
        found = {"time": time.time(), **machine(self.first_of_node)}
        self._write(found)
        with self._or_give_up():
            if self.lines:
                path = self.folder / f"rank-{self.rank:05}.prom"
                part = path.with_suffix(".part")
                with self.lock:
                    text = prometheus({**self.sums, **found}, self.labels)
                part.write_text(text)
                os.replace(part, path)

    def _write(self, line: dict) -> None:
        with self._or_give_up(), self.lock:
            if self.lines:
                self.lines.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """A full disk costs the recording, never the training."""
        try:
            yield
        except OSError as error:
            print(f"rank {self.rank} records no more: {error}", file=sys.stderr, flush=True)
            self.lines = None


class CPUClock:
    """Seconds of the host's clock."""

    def now(self) -> float:
        return time.perf_counter()

    def reached(self, stamp: float) -> bool:
        return True

    def seconds(self, stamp: float) -> float:
        return stamp


class GPUClock:
    """Events in the current stream: seconds at which the GPU reached them, since the first."""

    def __init__(self) -> None:
        self.last = None
        self.elapsed = 0.0

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    def seconds(self, stamp: torch.cuda.Event) -> float:
        """Call it in the order of the events: a sum of short times keeps its digits for weeks."""
        stamp.synchronize()
        if self.last is not None:
            self.elapsed += self.last.elapsed_time(stamp) / 1000
        self.last = stamp
        return self.elapsed


# What the machine says. Each name is one of METRICS; "network" has its two for each interface.


def machine(with_network: bool) -> dict:
    found = {"training_resident_memory_bytes": psutil.Process().memory_info().rss}
    if torch.cuda.is_initialized():
        found["training_cuda_allocated_bytes"] = torch.cuda.memory_allocated()
        found["training_cuda_peak_bytes"] = torch.cuda.max_memory_allocated()
        found["training_cuda_reserved_bytes"] = torch.cuda.memory_reserved()
        if pynvml:
            with contextlib.suppress(pynvml.NVMLError):  # no driver, MIG, a virtual GPU
                found |= nvml()
    if with_network:
        found["network"] = network()
    return found


def nvml() -> dict:
    """Of this rank's GPU: NVML and CUDA number GPUs differently, so it is asked by its UUID."""
    pynvml.nvmlInit()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = str(properties.uuid).removeprefix("GPU-")
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    clock = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
    sensor = pynvml.NVML_TEMPERATURE_GPU
    return {
        "training_gpu_utilization_ratio": pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        "training_gpu_memory_used_bytes": pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "training_gpu_clock_hertz": clock * 1_000_000,
        "training_gpu_temperature_celsius": pynvml.nvmlDeviceGetTemperature(gpu, sensor),
    }


def network() -> dict[str, tuple[int, int]]:
    """Bytes that each interface has sent and received since the node started."""
    counters = psutil.net_io_counters(pernic=True).items()
    found = {name: (seen.bytes_sent, seen.bytes_recv) for name, seen in counters}
    for port in INFINIBAND.glob("*/ports/*/counters"):  # RDMA passes the kernel by
        with contextlib.suppress(OSError, ValueError):
            words = [int((port / f"port_{way}_data").read_text()) for way in ("xmit", "rcv")]
            # InfiniBand counts words of 4 bytes.
            found[f"{port.parts[-4]}/{port.parts[-2]}"] = (4 * words[0], 4 * words[1])
    return found


def prometheus(found: dict, labels: dict[str, str]) -> str:
    """Prometheus's text format, 0.0.4: of each metric its help, its type and its samples."""
    samples = {name: [({}, found[name])] for name in METRICS if name in found}
    for interface, both in found.get("network", {}).items():
        for way, value in zip(("sent", "received"), both, strict=True):
            name = f"training_network_{way}_bytes_total"
            samples.setdefault(name, []).append(({"interface": interface}, value))
    text = ""
    for name, values in samples.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        text += f"# HELP {name} {METRICS[name]}\n# TYPE {name} {kind}\n"
        for more, value in values:
            said = ",".join(f'{key}="{word}"' for key, word in {**labels, **more}.items())
            text += f"{name}{{{said}}} {value}\n"
    return text


# Reading it again


def lines_of(path: Path) -> list[dict]:
    """What a rank has written since its last start; a last line that is cut off is left out."""
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            read = json.loads(line)
            found = [read] if "started" in read else [*found, read]
    return found


def stamps(path: Path) -> list[Stamp]:
    """The three stamps of each step that a rank has recorded since its last start, in seconds."""
    steps = [line for line in lines_of(path) if "step" in line]
    return [(step["begun"], step["ready"], step["over"]) for step in steps]


def table(folder: Path, window: int) -> str:
    """A line per rank over its last `window` steps.

    late: in how many of them its own time was over 1.1 x the median of the other ranks'.
    """
    ranks = sorted(folder.glob("rank-*.jsonl"))
    if not ranks:
        raise ValueError(f"no rank-N.jsonl in {folder}")
    known = [lines_of(path) for path in ranks]
    recorded = [[line for line in lines if "step" in line] for lines in known]
    common = min(len(steps) for steps in recorded)  # a rank may be one step ahead
    recorded = [steps[:common][-window:] for steps in recorded]
    own = [[step["ready"] - step["begun"] for step in steps] for steps in recorded]
    text = f"{'rank':>5} {'host':16} {'samples/s':>10} {'step, ms':>9} {'own, ms':>8}"
    text += f" {'late':>7} {'memory, GB':>11} {'GPU':>5}\n"
    for rank, (lines, steps) in enumerate(zip(known, recorded, strict=True)):
        if not steps:
            text += f"{lines[0]['rank']:>5} {lines[0]['host']:16} no step yet\n"
            continue
        seconds = steps[-1]["over"] - steps[0]["begun"]
        speed = sum(step["samples"] for step in steps) / seconds
        late = 0
        for turn, mine in enumerate(own[rank]):
            others = [times[turn] for other, times in enumerate(own) if other != rank]
            late += bool(others) and mine > 1.1 * median(others)
        looks = [line for line in lines if "training_resident_memory_bytes" in line] or [{}]
        memory = looks[-1].get("training_resident_memory_bytes", 0)
        memory = looks[-1].get("training_gpu_memory_used_bytes", memory) / 1e9
        gpu = looks[-1].get("training_gpu_utilization_ratio")
        text += f"{lines[0]['rank']:>5} {lines[0]['host']:16} {speed:10.1f}"
        text += f" {1000 * seconds / len(steps):9.1f} {1000 * median(own[rank]):8.1f}"
        text += f" {f'{late}/{len(steps)}':>7} {memory:11.2f}"
        text += f" {'-' if gpu is None else f'{gpu:.0%}':>5}\n"
    return text


def main() -> None:
    flags = argparse.ArgumentParser(description="A line per rank of what Monitor has recorded.")
    flags.add_argument("folder", type=Path)
    flags.add_argument("--window", type=int, default=20, help="the last so many steps")
    args = flags.parse_args()
    if args.window < 1:
        flags.error("--window must be at least 1")
    try:
        print(table(args.folder, args.window), end="")
    except (ValueError, OSError) as error:
        sys.exit(f"monitor.py: {error}")


if __name__ == "__main__":
    main()
