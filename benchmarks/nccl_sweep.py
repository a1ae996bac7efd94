"""NCCL's variables, one at a time: what each is worth here, and which its cost model would take.

    python benchmarks/nccl_sweep.py
    python benchmarks/nccl_sweep.py --sizes 1K 1M 1G --json sweep.json

NCCL reads its variables once, so each setting runs in fresh processes, one per GPU of this machine.
They all-reduce float32 buffers of a few sizes, check the sums, and time them from Python. That puts
a floor of some 20 to 40 us under small sizes; for NCCL's own latency take nccl-tests. The tables
show microseconds, and busbw in GB/s. Below stands, for each size, the fastest of rings and trees
with each protocol as measured, next to the one that the model of communication/04_alpha_beta.py
predicts: it has NCCL's constants for 8 H100. Needs 2 GPUs. It has not been run on GPUs yet.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from course.playing import load

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Only all-reduces are called: there is no tree for other collectives, and NCCL would refuse them.
SETTINGS: dict[str, dict[str, str]] = {"NCCL's own choice": {}}
for algorithm in ("Ring", "Tree"):
    for protocol in ("LL", "LL128", "Simple"):
        name = f"{algorithm.lower()} {protocol}"
        SETTINGS[name] = {"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol}
WAYS = list(SETTINGS)[1:]  # those that the model prices
SETTINGS["NVLS"] = {"NCCL_ALGO": "NVLS"}
SETTINGS["without NVLS"] = {"NCCL_NVLS_ENABLE": "0"}
for blocks in ("1", "4", "16"):
    SETTINGS[f"at most {blocks} CTAs"] = {"NCCL_MAX_CTAS": blocks}

Times = dict[int, float | None]  # by bytes: seconds per all-reduce, or None if the sum was wrong


def size(text: str) -> int:
    """Return the bytes meant by 8, 4K, 32M or 1G; K is 1024."""
    unit = "KMG".find(text[-1:].upper()) + 1
    return int(text[:-1] if unit else text) * 1024**unit


# In the ranks


def measure(sizes: list[int], device: torch.device) -> Times:
    """Time all-reduces of each size on the slowest rank, the median of five rounds."""
    times: Times = {}
    for nbytes in sizes:
        x = torch.ones(max(1, nbytes // 4), device=device)
        dist.all_reduce(x)
        wrong = (x != WORLD_SIZE).sum().float()
        dist.all_reduce(wrong)
        x.zero_()
        calls = 20 if nbytes < 2**26 else 5
        seconds = torch.tensor(median(round_of(calls, x) for _ in range(5)), device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times[nbytes] = None if wrong.item() else seconds.item()
    return times


def round_of(calls: int, x: torch.Tensor) -> float:
    """Return seconds per all-reduce of x, by CUDA's events."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    dist.all_reduce(torch.zeros(1, device=x.device))  # begin together
    begin.record()
    for _ in range(calls):
        dist.all_reduce(x)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def be_rank(sizes: list[int], into: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with torchrun
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=2))
    times = measure(sizes, device)
    if RANK == 0:
        Path(into).write_text(json.dumps(times))
    dist.destroy_process_group()


# In the process that starts them


def run_setting(variables: dict[str, str], sizes: list[int], gpus: int) -> Times | str:
    """Start ranks with these variables, and none that another setting has; say why if they fail."""
    varied = {name for setting in SETTINGS.values() for name in setting}
    env = {name: value for name, value in os.environ.items() if name not in varied}
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={gpus}", __file__, "--into", str(into), "--sizes"]
        captured = {"capture_output": True, "text": True, "timeout": 600}
        try:
            ran = subprocess.run([*command, *map(str, sizes)], env=env | variables, **captured)
        except subprocess.TimeoutExpired:
            return "not done in 10 minutes"
        if ran.returncode == 0:
            return {int(nbytes): t for nbytes, t in json.loads(into.read_text()).items()}
    said = [line for line in ran.stderr.splitlines() if "Error" in line]
    return (said or ["it failed"])[0].strip()[-60:]


def busbw(nbytes: int, seconds: float, n: int) -> float:
    """Return GB/s of an all-reduce over n ranks."""
    return 2 * (n - 1) / n * nbytes / seconds / 1e9


def predict(nbytes: int) -> str:
    """Return the way that NCCL's constants for 8 H100 price lowest."""
    _, way = load("communication/04_alpha_beta.py").cheapest(1, nbytes)
    return f"{way.algorithm} {way.protocol}"


def fastest(results: dict[str, Times | str], nbytes: int) -> str:
    """Return which of WAYS took least; none that failed or summed wrongly."""
    found = {}
    for name in WAYS:
        times = results.get(name, "")
        if not isinstance(times, str) and times[nbytes] is not None:
            found[name] = times[nbytes]
    return min(found, key=found.get) if found else "none"


def tables(
    results: dict[str, Times | str], sizes: list[int], n: int, predict: Callable[[int], str]
) -> list[str]:
    """Return the lines to print."""
    lines = []
    for title in ("us", "busbw, GB/s"):
        lines += ["", f"{title:20}" + "".join(f"{nbytes:>15,}" for nbytes in sizes)]
        for name, times in results.items():
            if isinstance(times, str):
                lines.append(f"{name:20}  {times}")
                continue
            cells = ""
            for nbytes in sizes:
                cell = "WRONG SUMS"
                if times[nbytes] is not None:
                    us = f"{1e6 * times[nbytes]:,.1f}"
                    cell = us if title == "us" else f"{busbw(nbytes, times[nbytes], n):.1f}"
                cells += f"{cell:>15}"
            lines.append(f"{name:20}{cells}")
    lines += ["", f"{'fastest of ring, tree':20}"]
    for what, winner in (("predicted, 8 H100", predict), ("measured", partial(fastest, results))):
        lines.append(f"{what:20}" + "".join(f"{winner(nbytes):>15}" for nbytes in sizes))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    some = ["1K", "32K", "1M", "32M", "1G"]
    parser.add_argument("--sizes", nargs="+", type=size, default=[size(s) for s in some])
    parser.add_argument("--json", metavar="PATH", help="save all times")
    parser.add_argument("--into", help=argparse.SUPPRESS)  # for the ranks
    options = parser.parse_args()
    if options.into:
        be_rank(options.sizes, options.into)
        return
    gpus = torch.cuda.device_count()
    if gpus < 2:
        sys.exit(f"nccl_sweep needs 2 GPUs or more on this machine, and found {gpus}")
    results = {}
    for name, variables in SETTINGS.items():
        print(f"{name} ...", file=sys.stderr)
        results[name] = run_setting(variables, options.sizes, gpus)
    print(f"{gpus} x {torch.cuda.get_device_name()}, NCCL {torch.cuda.nccl.version()}")
    print("\n".join(tables(results, options.sizes, gpus, predict)))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
