"""Everything, on a machine with GPUs: `make gpu`.

The doctor, each GPU next to the others, every lesson on 1, 2, 4 and 8 GPUs as far as there are so
many, the benchmarks, and a page of what passed: into results/MACHINE/. A lesson that fails or hangs
is named, what it printed is kept, and the others run. What has passed is not run again: an
interrupted run goes on.
"""

import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pynvml
import torch

from course import doctor
from course.lessons import LESSONS, ROOT, world_sizes_of
from course.machines import Machine, ledger_of, machines, name_of, page
from course.run_lessons import DEADLINE, discreet, run_many, run_one, watch

SIZES = (1, 2, 4, 8)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
PRETENDED = ("-m", "tests.helpers.pretended_torchrun")
NO_GPU = "torch finds no GPU here: `make lessons` runs all lessons on CPU cores."


# What there is


def gpus_here() -> list[str]:
    """The names of the GPUs that torch may use."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def machine_name(gpus: list[str]) -> str:
    """8xH100-SXM of eight "NVIDIA H100 80GB HBM3", 1xRTX-4090, 2xA100-SXM4+1xT4."""
    return "+".join(f"{count}x{short(name)}" for name, count in Counter(gpus).items())


def short(gpu: str) -> str:
    """A GPU's name without maker and memory."""
    words = re.split(r"[\s/-]+", gpu)
    kept = [w for w in words if not re.fullmatch(r"NVIDIA|Tesla|GeForce|\d+[GT]i?B|HBM\d\w*", w)]
    if "HBM3" in words and kept == ["H100"]:
        kept.append("SXM")  # NVIDIA's names say so of all other boards
    return "-".join(kept)


def about(gpus: list[str]) -> dict[str, str]:
    """What a reader of the figures has to know of this machine."""
    told = {"GPUs": ", ".join(f"{count} x {name}" for name, count in Counter(gpus).items())}
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    told |= {"driver": driver(), "CUDA": torch.version.cuda, "NCCL": ".".join(map(str, nccl))}
    told |= {"torch": torch.__version__, "Python": platform.python_version()}
    told |= {name: doctor.version_of(name) or "none" for name in ("deepspeed", "ffcv", "nvtx")}
    told |= {"CPU cores": os.cpu_count(), "kernel": platform.release()}
    return told | {"course": commit(), "date": time.strftime("%F")}


def driver() -> str:
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return str(error)


def commit() -> str:
    """The commit of this clone, and whether something was changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    if not shutil.which("git"):
        return "unknown, for git is not installed"
    asked = subprocess.run(command, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown, for this is not a git clone"


def topology() -> str:
    """How the GPUs are joined: from nvidia-smi, or what NVML says of each pair."""
    if shutil.which("nvidia-smi"):
        asked = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
        if asked.returncode == 0:
            return re.sub(r"\x1b\[[\d;]*m", "", asked.stdout)
    try:
        pynvml.nvmlInit()
        cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        pairs = itertools.combinations(range(len(cards)), 2)
        return "".join(f"GPU {a} - GPU {b}: {joined(cards[a], cards[b])}\n" for a, b in pairs)
    except pynvml.NVMLError as error:
        return f"NVML does not tell: {error}\n"


def joined(one: object, other: object) -> str:
    """Over what two GPUs reach each other, in the words of nvidia-smi."""
    nvlink = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if nvlink == pynvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    levels = {
        pynvml.NVML_TOPOLOGY_INTERNAL: "one board",
        pynvml.NVML_TOPOLOGY_SINGLE: "PIX, one PCIe switch",
        pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB, several PCIe switches",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB, a PCIe host bridge",
        pynvml.NVML_TOPOLOGY_NODE: "NODE, host bridges of one NUMA node",
        pynvml.NVML_TOPOLOGY_SYSTEM: "SYS, between NUMA nodes",
    }
    level = pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    return levels.get(level, f"NVML's level {level}")


# What is to be done


class Box:
    """The runs that this machine is to make, and the folder that keeps them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.pretended = options.pretend > 0
        self.gpus = ["pretended"] * options.pretend or gpus_here()
        if not self.gpus:
            sys.exit(NO_GPU)
        name = options.machine or machine_name(self.gpus)
        self.folder = ROOT / ("build/gpu" if self.pretended else "results") / name
        self.sizes = options.ranks or [n for n in SIZES if n <= len(self.gpus)]
        self.deadline = options.deadline
        self.runs = {}
        for size in self.sizes:
            for lesson in LESSONS:
                if options.only in lesson and takes(lesson, size):
                    self.runs[f"{lesson}, {size}"] = (lesson, size)

    def kept(self, lesson: str, size: int) -> dict:
        """What an earlier call measured, if it passed and is of this lesson and this torch."""
        path = self.folder / f"{size}-ranks/{name_of(lesson)}.json"
        told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        same = (0, digest(lesson), torch.__version__)
        return told if (told.get("exit"), told.get("source"), told.get("torch")) == same else {}

    def run(self, lesson: str, size: int) -> dict:
        """Run one lesson on so many ranks; keep its ledger, and what it printed."""
        folder = self.folder / f"{size}-ranks"
        folder.mkdir(parents=True, exist_ok=True)
        gpus = min(size, len(self.gpus))
        environment = {} if self.pretended else {"CUDA_VISIBLE_DEVICES": first(gpus)}
        told = run_one(lesson, folder, self.launcher(lesson, size), environment, self.deadline)
        said = told.pop("output")
        told |= {"gpus": gpus, "source": digest(lesson)}
        path = folder / f"{name_of(lesson)}.json"
        path.write_text(json.dumps(told, indent=1) + "\n")
        return told | {"output": said}

    def launcher(self, lesson: str, size: int) -> tuple[str, ...]:
        """What starts the ranks; a lesson that starts its own needs nothing."""
        if self.pretended:
            return (*PRETENDED, str(size))
        return () if starts_its_own(lesson) else (*TORCHRUN, f"--nproc-per-node={size}")

    def plan(self) -> str:
        """What will be done, where it will be written, how long it may take."""
        done = [run for run in self.runs.values() if self.kept(*run)]
        ahead = [run for run in self.runs.values() if run not in done]
        minutes = sum(ledger_of(lesson)["seconds"] or 0 for lesson, _ in ahead) / 60
        sizes = ", ".join(map(str, self.sizes))
        before = f", {len(done)} of which passed before" if done else ""
        lines = [
            f"{machine_name(self.gpus)}: the doctor, then {len(self.runs)} runs{before}:",
            f"every lesson on {sizes} ranks, as far as it takes so many. Before them, each GPU is",
            "compared with the others; after them come the benchmarks.",
            f"On four ranks and two CPU cores these lessons took {minutes:.0f} minutes. A run is",
            f"ended after {self.deadline:.0f} s, named, and the others go on.",
            f"All is written to {self.folder.relative_to(ROOT)}/, less than 20 MB. What has passed",
            "is not run again: if this is interrupted, the same command goes on.",
        ]
        return "\n".join(lines)


def takes(lesson: str, size: int) -> bool:
    return starts_its_own(lesson) or size in world_sizes_of(lesson) or size not in (1, 2, 3, 4, 8)


def starts_its_own(lesson: str) -> bool:
    """Whether the lesson is one process, which starts its own ranks on all GPUs that it sees."""
    return world_sizes_of(lesson) == [1]


def digest(lesson: str) -> str:
    return hashlib.sha256((ROOT / lesson).read_bytes()).hexdigest()[:12]


def first(gpus: int) -> str:
    """CUDA_VISIBLE_DEVICES for so many of the GPUs that we may use."""
    may = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join((may.split(",") if may else list(map(str, range(gpus))))[:gpus])


# Do it


def ask_doctor(folder: Path, deadline: float) -> list[str]:
    """Show and keep what the doctor finds; whatever it is, go on. Return what failed."""
    status, said = watch(["-m", "course.doctor"], {}, deadline)
    print(said, flush=True)
    (folder / "doctor.txt").write_text(discreet(said), encoding="utf-8")
    return ["the doctor"] if status else []


def compare_gpus(folder: Path, deadline: float) -> list[str]:
    """Show and keep what each GPU delivers next to the others; return what failed."""
    kept = folder / "cluster.json"
    told = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
    if told and told["about"]["torch"] == torch.__version__:
        return []
    flags = (f"--json={kept}", f"--figure={kept.with_suffix('.png')}")
    status, said = watch(["-m", "benchmarks.cluster", *flags], {}, deadline)
    print(said, flush=True)
    kept.with_suffix(".txt").write_text(discreet(said), encoding="utf-8")
    return ["the suite for a new cluster"] if status else []


def measure(box: Box) -> list[str]:
    """Make all runs; return the labels of those that failed."""

    def make(lesson: str, size: int) -> dict:
        return box.kept(lesson, size) or box.run(lesson, size)

    return run_many({label: lambda run=run: make(*run) for label, run in box.runs.items()})


def bench(folder: Path) -> int:
    """Run the benchmarks, unless they were with this torch; return their exit status."""
    kept = folder / "bench/bench.json"
    if kept.exists() and json.loads(kept.read_text(encoding="utf-8"))["torch"] == torch.__version__:
        return 0
    return subprocess.run([sys.executable, "-m", "benchmarks", f"--into={kept.parent}"]).returncode


def numbers(text: str) -> list[int]:
    return sorted(int(number) for number in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", action="store_true", help="say what will be done, and end")
    parser.add_argument("--machine", help="the folder's name; made of the GPUs' names if left out")
    parser.add_argument("--ranks", type=numbers, help="1,8 for some numbers of ranks only")
    parser.add_argument("--only", default="", metavar="TEXT", help="lessons whose path holds it")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds for one run")
    parser.add_argument("--pretend", type=int, default=0, help="so many GPUs, into build/gpu")
    options = parser.parse_args()
    box = Box(options)
    if options.plan:
        sys.exit(print(box.plan()))
    box.folder.mkdir(parents=True, exist_ok=True)
    (box.folder / "machine.json").write_text(json.dumps(about(box.gpus), indent=1) + "\n")
    (box.folder / "topology.txt").write_text(discreet(topology()), encoding="utf-8")
    try:
        whole = not (box.pretended or options.only)
        failed = ask_doctor(box.folder, box.deadline)
        if whole:
            failed += compare_gpus(box.folder, box.deadline)
        failed += measure(box)
        if whole and bench(box.folder):
            failed.append("the benchmarks")
    except KeyboardInterrupt:
        failed = ["interrupted; the same command goes on"]
    finally:
        write_page(box)
    print(f"All that was measured: {box.folder.relative_to(ROOT)}/README.md")
    if failed:
        print(f"Failed: {'; '.join(failed)}")
    sys.exit(bool(failed))


def write_page(box: Box) -> None:
    """The folder's README.md, next to every other machine; then the tables that name machines."""
    others = [machine for machine in machines() if machine.folder != box.folder]
    (box.folder / "README.md").write_text(page(Machine(box.folder), others), encoding="utf-8")
    if not box.pretended:
        from course.tables import write

        write()


if __name__ == "__main__":
    main()
