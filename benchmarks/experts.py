"""A layer of experts: its all-to-alls next to the links, its products in a loop and grouped.

    torchrun --standalone --nproc-per-node=8 benchmarks/experts.py --json experts.json
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
        benchmarks/experts.py

The layer is that of parallelism/11_expert_parallelism.py, forward, at the size of Qwen3-30B-A3B:
128 experts, hidden size 2,048, width 768. Each rank has 4,096 tokens in bfloat16, and the router
spreads them evenly, 8 experts per token. Without GPUs the ranks are CPU cores, and all sizes are
small. It has not been run on GPUs yet.

An all-to-all is held against the *link*: what a rank gets if each sends as many bytes to one other
rank. Inside a node that is the next rank. Across nodes it is the one in the same place on the next
node. There the all-to-all is that of all ranks, and only the bytes that leave the node count. Rates
are one way and per rank, and so per card, if each GPU has a network card of its own.

The experts are computed in a loop, as in the lesson, and by PyTorch's *grouped product*: one kernel
for all experts, which is told where the rows of each end. PyTorch has it for compute capability 9
and 10 (H100, B200) at least; on an A100 it loops as well. First each GPU has all 128 experts, with
256 rows each. The loop launches 640 kernels then, and each is over in a few microseconds.

Then the experts are dealt out, and the whole layer is timed. What is neither all-to-all nor experts
sorts, waits for the counts, and reads or writes the 134 MB of rows about eight times, which takes
0.3 ms at an H100's 3.35 TB/s. The two all-to-alls and the experts should be 0.3 of the layer's time
at least. The aims were set before anything was measured, and are those of GPUs.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from course.playing import load

LESSON = load("parallelism/11_expert_parallelism.py")
ROUNDS = 20


class Size(NamedTuple):
    tokens: int  # of a rank
    D: int  # hidden size
    H: int  # an expert's width
    E: int  # experts
    K: int  # of them per token
    dtype: torch.dtype


QWEN3_30B = Size(4096, 2048, 768, 128, 8, torch.bfloat16)
SMALL = Size(256, 128, 64, 16, 2, torch.float32)  # for CPU cores


@dataclass
class Row:
    """What was measured on the slowest rank, or what this row needs."""

    name: str
    ms: float | None = None
    rate: float | None = None  # in `unit`
    unit: str = ""
    against: str = ""  # what `ratio` is of, as "/ in a loop"
    ratio: float | None = None
    aim: str = ""  # on GPUs, as "<= 0.5"
    needs: str = ""


# What is measured


def pass_on(x: torch.Tensor, ranks: list[int]) -> torch.Tensor:
    """Send x to the next of these ranks; return what the one before has sent."""
    i = ranks.index(dist.get_rank())
    from_before = torch.empty_like(x)
    to = dist.P2POp(dist.isend, x, ranks[(i + 1) % len(ranks)])
    back = dist.P2POp(dist.irecv, from_before, ranks[i - 1])
    for work in dist.batch_isend_irecv([to, back]):
        work.wait()
    return from_before


class GroupedExperts(LESSON.Experts):
    """The same in three grouped products: rows (R, D) by expert, their numbers (e,) -> (R, D)."""

    def forward(self, row_RD: torch.Tensor, rows_e: torch.Tensor) -> torch.Tensor:
        end_e = rows_e.cumsum(dim=0, dtype=torch.int32)
        gate_RH = F.grouped_mm(row_RD, self.gate_eDH, offs=end_e)
        up_RH = F.grouped_mm(row_RD, self.up_eDH, offs=end_e)
        return F.grouped_mm(F.silu(gate_RH) * up_RH, self.down_eHD, offs=end_e)


def link_row(name: str, row_CD: torch.Tensor, group: object, ranks: list[int]) -> Row:
    """The group's all-to-all of these rows; the link: each of `ranks` sends them to the next.

    Of what a rank hands to the all-to-all, 1 / len(ranks) stays: on the rank, or on its node.
    """
    n = dist.get_world_size(group)
    rows = len(row_CD) // n
    row_CD = row_CD[: rows * n]
    ms = median_ms(lambda: LESSON.exchange(row_CD, [rows] * n, [rows] * n, group))
    passing = median_ms(lambda: pass_on(row_CD, ranks))
    rate = row_CD.nbytes * (1 - 1 / len(ranks)) / ms / 1e6
    link = row_CD.nbytes / passing / 1e6
    return Row(name, ms, rate, "GB/s", f"/ link, {readable(link)} GB/s", rate / link, ">= 0.5")


def measure_links(size: Size, device: torch.device, local: int) -> list[Row]:
    """The all-to-all inside each node of `local` ranks, all nodes at once; that of all ranks."""
    n = dist.get_world_size()
    shape = (n // local, local)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("node", "gpu"))
    row_CD = torch.randn(size.tokens * size.K, size.D, device=device, dtype=size.dtype)
    inside, across = "all-to-all inside a node", "all-to-all across nodes"
    rows = [Row(inside, needs="2 ranks on one node"), Row(across, needs="2 nodes")]
    if local > 1:
        group = mesh.get_group("gpu")
        rows[0] = link_row(inside, row_CD, group, dist.get_process_group_ranks(group))
    if local < n:
        ranks = dist.get_process_group_ranks(mesh.get_group("node"))
        rows[1] = link_row(across, row_CD, None, ranks)
    return rows


def measure_experts(size: Size, device: torch.device) -> list[Row]:
    """All experts on each rank, in a loop and grouped; the experts dealt out; the whole layer."""
    n = dist.get_world_size()
    tokens, D, H, E, K, dtype = size
    rows = tokens * K // E  # for an expert from a rank
    E = max(E, n)  # each rank has one at least
    names = [f"{E} experts, in a loop", f"{E} experts, grouped"]
    names += [f"{E // n} experts of a rank, grouped", "layer"]
    if device.type != "cpu" and not torch.cuda.is_bf16_supported(False):  # none that is emulated
        return [Row(name, needs="GPUs with bfloat16") for name in names]
    factory = {"device": device, "dtype": dtype}
    into_EDH = torch.randn(E, D, H, **factory) / D**0.5  # as gate and as up: values do not matter
    weights = (into_EDH, into_EDH, torch.randn(E, H, D, **factory) / H**0.5)
    row_RD = torch.randn(rows * E, D, **factory)
    rows_E = torch.full((E,), rows, device=device)

    def row(name: str, ms: float, against: str = "", ratio: float | None = None, aim: str = ""):
        unit, scale = ("GFLOP/s", 1e6) if device.type == "cpu" else ("TFLOP/s", 1e9)
        return Row(name, ms, 6 * D * H * len(row_RD) / ms / scale, unit, against, ratio, aim)

    looping = median_ms(partial(LESSON.Experts(*weights), row_RD, rows_E))
    grouping = median_ms(partial(GroupedExperts(*weights), row_RD, rows_E))
    aim = "<= 0.5" if has_grouped_kernel(device) else ""
    found = [row(names[0], looping)]
    found += [row(names[1], grouping, "/ in a loop", grouping / looping, aim)]

    e = E // n
    sizes = [rows * e] * n
    row_RD = row_RD[: sum(sizes)]
    rows_e = torch.full((e,), rows * n, device=device)
    experts = GroupedExperts(*[weight[:e] for weight in weights])
    even = partial(LESSON.in_turn, experts=e * n, k=K)
    exchanging = median_ms(lambda: LESSON.exchange(row_RD, sizes, sizes, None))
    computing = median_ms(lambda: experts(row_RD, rows_e))
    whole = median_ms(lambda: LESSON.expert_parallel(row_RD[::K], even, experts, None))
    parts = 2 * exchanging + computing
    text = f"(2 x {readable(exchanging)} + {readable(computing)}) / layer"
    found += [row(names[2], computing), row(names[3], whole, text, parts / whole, ">= 0.3")]
    return found


def has_grouped_kernel(device: torch.device) -> bool:
    return device.type != "cpu" and torch.cuda.get_device_capability()[0] in (9, 10)


# How it is measured


def median_ms(work: Callable[[], object]) -> float:
    """Return the slowest rank's milliseconds of `work()`, the median; three more warm up."""
    nccl = dist.get_backend() == "nccl"
    took = []
    with torch.no_grad():
        for _ in range(3 + ROUNDS):
            dist.barrier()
            took.append(on_gpu_ms(work) if nccl else on_cpu_ms(work))
    slowest = torch.tensor(median(took[3:]), device="cuda" if nccl else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def on_gpu_ms(work: Callable[[], object]) -> float:
    """By CUDA's events."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def on_cpu_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


# What is told


def readable(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def shown(row: Row, on_gpus: bool) -> str:
    if row.needs:
        return f"{row.name:30} needs {row.needs}"
    line = f"{row.name:30}{readable(row.ms):>8}{readable(row.rate):>7} {row.unit:8}"
    if row.ratio is not None:
        line += f"{row.against:27}{row.ratio:>5.2f}"
    if row.aim and on_gpus:
        sign, bound = row.aim.split()
        kept = row.ratio <= float(bound) if sign == "<=" else row.ratio >= float(bound)
        line += f" {row.aim} {'kept' if kept else 'MISSED'}"
    return line.rstrip()


def measure(size: Size, device: torch.device, local: int, into: Path | None) -> list[Row]:
    """Measure, as one rank of a group that is there; rank 0 prints and writes."""
    n = dist.get_world_size()
    on_gpus = device.type == "cuda"
    who = torch.cuda.get_device_name(device) if on_gpus else "CPU cores"
    about = {"ranks": n, "nodes": n // local, "device": who, "torch": torch.__version__}
    sizes = {name: str(value) for name, value in size._asdict().items()}
    rows = measure_links(size, device, local) + measure_experts(size, device)
    if dist.get_rank() == 0:
        for told in (about, sizes):
            print("  ".join(f"{key} {value}" for key, value in told.items()))
        print(f"\n{'forward, the slowest rank':30}{'ms':>8}{'rate':>7} {'':8}ratio")
        for row in rows:
            print(shown(row, on_gpus))
    if into and dist.get_rank() == 0:
        told = {"about": about | sizes, "rows": [asdict(row) for row in rows]}
        into.write_text(json.dumps(told, indent=1) + "\n")
    return rows


def main() -> int:
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        ranks = torch.cuda.device_count() or 4
        torchrun(["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", *sys.argv])
        return 0
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    device, size = torch.device("cpu"), SMALL
    if torch.cuda.device_count() >= local:
        device, size = torch.device("cuda", int(os.environ["LOCAL_RANK"])), QWEN3_30B
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    measure(size, device, local, options.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
