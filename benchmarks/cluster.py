"""Before you trust a new cluster: what each rank delivers, next to the datasheet and its peers.

    torchrun --standalone --nproc-per-node=8 benchmarks/cluster.py --json monday.json
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
        benchmarks/cluster.py --folder /shared/tmp --json monday.json --figure monday.png
    python benchmarks/cluster.py --compare monday.json friday.json

It measures arithmetic, memory, the link to the host, the link to the next rank, on several nodes
each rank's link to the next node, collectives, a step of DDP and of FSDP2, a checkpoint and a
loader, and prints a page with a verdict for each:
`pass`, or `warn` and where to look first. A rank is warned of when even its best round is slower
than its peers' by more than the tolerance; all are, when they attain too little of the GPU's
datasheet. Without GPUs the ranks are CPU cores, which measure in turns, and there is no datasheet.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from course.passages import GPT

ROUNDS = 7
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE))


# What is measured


@dataclass
class Measurement:
    """One call to be timed. `amount` is what it does, in units of `unit` times seconds.

    Without an amount, the time itself is the result, in microseconds. Ranks make an "own"
    measurement each by themselves, and a "link" one with another rank; all make a "joint" one
    together.
    """

    name: str
    unit: str
    amount: float | None
    call: Callable[[], object]
    kind: str = "own"  # or "link" or "joint"
    expected: float | None = None  # what the datasheet lets one expect, in `unit`
    look: str = ""  # where to look first when it is slow


@dataclass
class Sheet:
    """A GPU's datasheet: dense 16-bit TFLOP/s, and GB/s of memory, NVLink and PCIe, one way."""

    tflops: float  # bfloat16, or float16 where the GPU has no bfloat16
    memory: float
    nvlink: float | None
    pcie: float


SHEETS = {  # by words of the GPU's name; the first that fits
    "B300": Sheet(2250, 8000, 900, 63),  # its PCIe 6.0 meets hosts with 5.0
    "B200": Sheet(2250, 8000, 900, 63),
    "H200 NVL": Sheet(835, 4800, 450, 63),
    "H200": Sheet(989, 4800, 450, 63),
    "H100 80GB HBM3": Sheet(989, 3350, 450, 63),
    "A100-SXM4-80GB": Sheet(312, 2039, 300, 31.5),
    "A100-SXM4-40GB": Sheet(312, 1555, 300, 31.5),
    "L40S": Sheet(362, 864, None, 31.5),
    "L4": Sheet(121, 300, None, 31.5),
    "T4": Sheet(65, 300, None, 15.75),
    "V100-SXM2": Sheet(125, 900, 150, 15.75),
    "V100-PCIE": Sheet(112, 900, None, 15.75),
}
# Published for healthy machines: 794 of an H100's 989 TFLOP/s and 271 of an A100's 312 in a product
# of matrices, 55 of 63 GB/s over PCIe, 370 of 450 and 235 of 300 as an all-reduce's bus bandwidth.
# These shares stay below; this file itself has not run on GPUs yet.
SHARES = {"tflops": 0.7, "memory": 0.75, "nvlink": 0.7, "pcie": 0.8}


def expected(device: torch.device, what: str) -> float | None:
    """The share of the datasheet's figure below which all ranks are warned of."""
    if device.type == "cuda":
        for name, sheet in SHEETS.items():
            if re.search(rf"\b{name}\b", torch.cuda.get_device_name(device)):
                figure = getattr(sheet, what)
                return None if figure is None else SHARES[what] * figure
    return None


def half_precision() -> torch.dtype:
    """The GPU's own 16-bit type: those before Ampere (T4, V100) only emulate bfloat16."""
    native = torch.cuda.is_bf16_supported(False)  # without emulation
    return torch.bfloat16 if native else torch.float16


def own_measurements(device: torch.device, folder: Path) -> list[Measurement]:
    """What a rank does by itself: arithmetic, memory, the link to the host, disk, loader."""
    cuda = device.type == "cuda"
    n, dtype = (8192, half_precision()) if cuda else (1024, torch.float32)
    a, b, product = (torch.rand(n, n, device=device, dtype=dtype) for _ in range(3))
    nbytes = 2**30 if cuda else 2**25
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    found = [
        Measurement(
            f"product of {n} x {n}, {str(dtype).removeprefix('torch.')}",
            "TFLOP/s",
            2 * n**3 / 1e12,
            partial(torch.mm, a, b, out=product),
            expected=expected(device, "tflops"),
            look="clocks and heat: nvidia-smi -q -d PERFORMANCE,CLOCK; who else computes there",
        ),
        Measurement(
            "memory, read and written",
            "GB/s",
            2 * nbytes / 1e9,
            partial(to.copy_, source),
            expected=expected(device, "memory"),
            look="memory clock and ECC errors: nvidia-smi -q -d ECC,CLOCK",
        ),
    ]
    if cuda:
        host = torch.zeros(2**28, dtype=torch.uint8, pin_memory=True)
        there = source[: 2**28]
        for name, call in (
            ("host to GPU, pinned", partial(there.copy_, host, non_blocking=True)),
            ("GPU to host, pinned", partial(host.copy_, there, non_blocking=True)),
        ):
            found.append(
                Measurement(
                    name,
                    "GB/s",
                    2**28 / 1e9,
                    call,
                    expected=expected(device, "pcie"),
                    look="the slot: nvidia-smi -q -d PCIE; its NUMA node: nvidia-smi topo -m",
                )
            )
    shard = torch.zeros((2**28 if cuda else 2**22) // 4)
    file = folder / f"shard-{RANK}.pt"
    found.append(
        Measurement(
            "checkpoint, a shard to the disk",
            "GB/s",
            shard.nbytes / 1e9,
            partial(save, shard, file),
            look=f"the disk below {folder}, and how many nodes share it",
        )
    )
    found.append(
        Measurement(
            "loader, images of 64 x 64 x 3 decompressed",
            "samples/s",
            Images.COUNT,
            partial(read_all, Images()),
            look="free cores per rank (lscpu, cpuset); OMP_NUM_THREADS",
        )
    )
    return found


def save(shard: torch.Tensor, file: Path) -> None:
    """Write it where a crash of the machine would leave it."""
    with file.open("wb") as opened:
        torch.save(shard, opened)
        opened.flush()
        os.fsync(opened.fileno())


class Images(torch.utils.data.Dataset):
    """Compressed images in memory, so that the cores are measured, and no disk."""

    COUNT = 64

    def __init__(self) -> None:
        pixels = torch.arange(64 * 64 * 3).remainder(251).to(torch.uint8)
        self.packed = zlib.compress(pixels.numpy().tobytes(), 6)

    def __len__(self) -> int:
        return self.COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        pixels = torch.frombuffer(bytearray(zlib.decompress(self.packed)), dtype=torch.uint8)
        return pixels.view(3, 64, 64).float().div(255)


def read_all(images: Images) -> None:
    for _ in torch.utils.data.DataLoader(images, batch_size=16):
        pass


def joint_measurements(device: torch.device) -> list[Measurement]:
    """What ranks do together: links to other ranks, collectives, steps of DDP and FSDP2."""
    cuda = device.type == "cuda"
    n = WORLD_SIZE
    large = 2**28 if cuda else 2**22  # bytes, give or take what n ranks cannot share
    cable = "the link: nvidia-smi nvlink -s, ibstat, ethtool; NCCL_DEBUG=INFO says what is used"
    found = []
    if n > 1:
        x = torch.zeros(large // 4, device=device)
        links = {"link to the next rank": Link(x)}
        if n > LOCAL_WORLD_SIZE:  # most links to the next rank stay in their node
            links["rails to the next node, all at once"] = Link(x, LOCAL_WORLD_SIZE)
            links["rails to the next node, one by one"] = Link(x, LOCAL_WORLD_SIZE, alone=True)
        for name, link in links.items():
            found.append(Measurement(name, "GB/s", large / 1e9, link, "link", look=cable))
    one_node = n == LOCAL_WORLD_SIZE
    for name, (share, prepare) in COLLECTIVES.items():
        small = prepare(2**20, device)
        found.append(Measurement(f"{name}, 1 MiB", "us", None, small, "joint", look=cable))
        least = expected(device, "nvlink") if name == "all_reduce" and one_node and n > 1 else None
        found.append(
            Measurement(
                f"{name}, {large / 2**20:.0f} MiB, bus bandwidth",
                "GB/s",
                share(n) * large / 1e9,
                prepare(large, device),
                "joint",
                least,
                cable,
            )
        )
    slow = "the rows above: a step is made of them; then profiling/README.md"
    for name, wrap in (("DDP", wrap_in_ddp), ("FSDP2", wrap_in_fsdp)):
        step = Step(wrap, device)
        tokens = n * step.tokens_BT[:, 1:].numel()
        found.append(Measurement(f"{name} step", "tokens/s", tokens, step, "joint", look=slow))
    return found


class Link:
    """Send to the rank that is `step` further, and wait for its word that all has come.

    With as many ranks as a node has, that is the same local rank of the next node: a *rail*. What
    is sent goes through this rank's network card and the other's. `alone` leaves the other rails
    idle meanwhile.
    """

    def __init__(self, x: torch.Tensor, step: int = 1, alone: bool = False) -> None:
        self.x = x
        self.step = step
        self.alone = alone
        self.word = torch.zeros(1, device=x.device)

    def __call__(self) -> None:
        there = (RANK + self.step) % WORLD_SIZE
        dist.send(self.x, there)
        dist.recv(self.word, there)

    def answer(self) -> None:
        """The other end of another rank's call."""
        there = (RANK - self.step) % WORLD_SIZE
        dist.recv(self.x, there)
        dist.send(self.word, there)

    def turns(self) -> list[list[int]]:
        """Who sends at once, turn by turn: every other block of `step` ranks, then the others.

        With an odd number of blocks the last one comes alone, so that nobody sends and receives.
        """
        blocks = WORLD_SIZE // self.step
        even, odd = range(0, blocks - 1, 2), range(1, blocks, 2)
        last = range(blocks - blocks % 2, blocks)
        rails = [[rail] for rail in range(self.step)] if self.alone else [range(self.step)]
        found = []
        for rail in rails:
            for turn in (even, odd, last):
                found.append([block * self.step + local for block in turn for local in rail])
        return [senders for senders in found if senders]


def zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    """So many bytes, or a few less, that the ranks can share evenly."""
    return torch.zeros(nbytes // 4 // WORLD_SIZE * WORLD_SIZE, device=device)


def all_reduce(nbytes: int, device: torch.device) -> Callable:
    return partial(dist.all_reduce, zeros(nbytes, device))


def all_gather(nbytes: int, device: torch.device) -> Callable:
    whole = zeros(nbytes, device)
    return partial(dist.all_gather_into_tensor, whole, whole.chunk(WORLD_SIZE)[RANK].clone())


def reduce_scatter(nbytes: int, device: torch.device) -> Callable:
    whole = zeros(nbytes, device)
    return partial(dist.reduce_scatter_tensor, whole.chunk(WORLD_SIZE)[RANK].clone(), whole)


def all_to_all(nbytes: int, device: torch.device) -> Callable:
    whole = zeros(nbytes, device)
    return partial(dist.all_to_all_single, torch.empty_like(whole), whole)


def broadcast(nbytes: int, device: torch.device) -> Callable:
    return partial(dist.broadcast, zeros(nbytes, device), 0)


# How many times the busiest link carries the array, on n ranks: communication/05 explains it.
COLLECTIVES = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, all_reduce),
    "all_gather": (lambda n: (n - 1) / n, all_gather),
    "reduce_scatter": (lambda n: (n - 1) / n, reduce_scatter),
    "all_to_all": (lambda n: (n - 1) / n, all_to_all),
    "broadcast": (lambda n: 1, broadcast),
}


def wrap_in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def wrap_in_fsdp(model: GPT) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device.type  # not the machine's: ranks may outnumber its GPUs
    mesh = init_device_mesh(device, (WORLD_SIZE,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Step:
    """A training step of a small GPT."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], device: torch.device) -> None:
        torch.manual_seed(0)
        if device.type == "cuda":
            model = GPT(L=12, D=1024, T=1024, V=8192, heads=16).to(device, half_precision())
            self.tokens_BT = torch.randint(8192, (8, 1025), device=device)
        else:
            model = GPT(L=2, D=64, T=32)
            self.tokens_BT = torch.randint(256, (4, 33))
        self.model = wrap(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def __call__(self) -> None:
        logits_BTV = self.model(self.tokens_BT[:, :-1])
        cross_entropy(logits_BTV.flatten(0, 1), self.tokens_BT[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


# How it is measured


def seconds_of(measurement: Measurement, device: torch.device) -> list[float]:
    """The seconds of each round on this rank; a first round is not counted."""
    took = []
    for _ in range(ROUNDS + 1):
        if measurement.kind == "link":
            took.append(over_the_link(measurement.call, device))
            continue
        turns = [range(WORLD_SIZE)]
        if measurement.kind == "own" and device.type == "cpu":
            turns = [[rank] for rank in range(WORLD_SIZE)]  # the cores may be fewer than the ranks
        for ranks in turns:
            dist.barrier()
            if RANK in ranks:
                took.append(timed(measurement.call, device))
    return took[1:]


def timed(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def over_the_link(link: Link, device: torch.device) -> float:
    """Let every rank send in its turn; return this rank's seconds."""
    took = 0.0
    for senders in link.turns():
        dist.barrier()
        if RANK in senders:
            took = timed(link, device)
        elif (RANK - link.step) % WORLD_SIZE in senders:
            link.answer()
    return took


@dataclass
class Row:
    """What was measured, and the verdict. `medians` and `bests` are one per rank."""

    name: str
    unit: str
    kind: str
    medians: list[float]
    bests: list[float]
    expected: float | None
    look: str
    warnings: list[str] = field(default_factory=list)

    @property
    def value(self) -> float:
        """What the cluster delivers: the median rank's, or where all must meet, the slowest's."""
        if self.kind == "joint":
            return max(self.medians) if self.unit == "us" else min(self.medians)
        return median(self.medians)


def row_of(measurement: Measurement, seconds: list[list[float]], tolerance: float) -> Row:
    """Turn every rank's seconds into a row, and judge it."""
    medians = [in_units(measurement, median(took)) for took in seconds]
    bests = [in_units(measurement, min(took)) for took in seconds]
    row = Row(
        measurement.name,
        measurement.unit,
        measurement.kind,
        medians,
        bests,
        measurement.expected,
        measurement.look,
    )
    row.warnings = warnings_of(row, tolerance)
    return row


def in_units(measurement: Measurement, seconds: float) -> float:
    if measurement.amount is None:
        return 1e6 * seconds
    return measurement.amount / seconds


def warnings_of(row: Row, tolerance: float) -> list[str]:
    """Ranks that are slower than their peers, and a row in which all are below the datasheet."""
    found = []
    if row.kind != "joint":  # there, all are as slow as the slowest
        usual = median(row.bests)
        for rank, best in enumerate(row.bests):
            if best < (1 - tolerance) * usual:
                found.append(f"rank {rank}: {best:,.3g} at best, its peers {usual:,.3g}")
    if row.expected is not None and row.value < row.expected:
        found.append(f"all: {row.value:,.3g}, expected {row.expected:,.3g} by the datasheet")
    return found


def measure_all(device: torch.device, folder: Path, tolerance: float) -> list[Row]:
    """Measure and print, row by row."""
    rows = []
    for prepare in (partial(own_measurements, device, folder), partial(joint_measurements, device)):
        for measurement in prepare():
            seconds = [None] * WORLD_SIZE
            dist.all_gather_object(seconds, seconds_of(measurement, device))
            rows.append(row_of(measurement, seconds, tolerance))
            if RANK == 0:
                print(shown(rows[-1]), flush=True)
    return rows


def sums_are_right(device: torch.device) -> bool:
    """Whether an all-reduce gives every rank what it must: the first thing to know of a network."""
    x = torch.arange(100_003, device=device) % 1000 + RANK
    dist.all_reduce(x)
    expected = torch.arange(100_003, device=device) % 1000 * WORLD_SIZE
    right = torch.equal(x, expected + WORLD_SIZE * (WORLD_SIZE - 1) // 2)
    told = [None] * WORLD_SIZE
    dist.all_gather_object(told, right)
    return all(told)


# What is told


def shown(row: Row) -> str:
    ranks = sorted(range(len(row.medians)), key=row.medians.__getitem__)
    slowest = ranks[-1] if row.unit == "us" else ranks[0]
    least = f"{row.expected:,.4g}" if row.expected is not None else "-"
    verdict = "warn" if row.warnings else "pass"
    line = f"{row.name:44}{row.value:>10,.4g} {row.unit:10}{least:>9}"
    line += f"   {verdict}    rank {slowest}: {row.medians[slowest]:,.4g}"
    for warning in row.warnings:
        line += f"\n    {warning}\n        look at {row.look}"
    return line


def about(device: torch.device) -> dict:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    nodes = max(1, WORLD_SIZE // LOCAL_WORLD_SIZE)
    told = {"ranks": WORLD_SIZE, "nodes": nodes, "device": gpu or "CPU cores"}
    return told | {"torch": torch.__version__, "date": time.strftime("%F"), "rounds": ROUNDS}


def draw(rows: list[Row], path: str) -> None:
    """Each rank's best as a dot, next to the median of all ranks; red where it was warned of."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.kind != "joint"]
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.5 * len(rows)), layout="constrained")
    for y, row in enumerate(reversed(rows)):
        usual = median(row.bests)
        for rank, best in enumerate(row.bests):
            warned = any(warning.startswith(f"rank {rank}:") for warning in row.warnings)
            axes.plot(best / usual, y, "o", color="C3" if warned else "C0", alpha=0.7)
            if warned:
                axes.annotate(f"rank {rank}", (best / usual, y), (0, 7), textcoords="offset points")
    axes.axvline(1, color="0.7", linewidth=1, zorder=0)
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
    axes.set_xlabel("each rank's best, the median of all ranks being 1; red: warned of")
    figure.savefig(path, dpi=150)


def compare(old: Path, new: Path, tolerance: float) -> int:
    """Print how each row has changed; return 1 if one is slower by more than the tolerance."""
    was, now = (json.loads(path.read_text()) for path in (old, new))
    for key in ("ranks", "nodes", "device", "torch"):
        if was["about"][key] != now["about"][key]:
            print(f"{key} differ: {was['about'][key]} and {now['about'][key]}")
    before = {row["name"]: row for row in was["rows"]}
    slower = 0
    print(f"{'':44}{was['about']['date']:>12}{now['about']['date']:>12}   speed")
    for row in now["rows"]:
        if row["name"] not in before:
            print(f"{row['name']:44}{'':12}{row['value']:>12,.4g}   new")
            continue
        speed = row["value"] / before[row["name"]]["value"]
        if row["unit"] == "us":
            speed = 1 / speed
        word = "SLOWER" if speed < 1 - tolerance else ""
        slower += bool(word)
        print(
            f"{row['name']:44}{before[row['name']]['value']:>12,.4g}{row['value']:>12,.4g}"
            f"{speed:>8.2f} {word}"
        )
    for name in before.keys() - {row["name"] for row in now["rows"]}:
        print(f"{name:44} not measured any more")
    return int(slower > 0)


# The command


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--figure", metavar="FILE", help="draw every rank next to its peers")
    parser.add_argument("--folder", type=Path, help="where checkpoints will lie")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="two such files"
    )
    parser.add_argument("--tolerance", type=float, help="share that counts as slower")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> list[Row]:
    """Measure, as one rank of a group that is there; rank 0 prints and writes."""
    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    tolerance = options.tolerance or (0.1 if cuda else 0.3)
    told = about(device)
    if RANK == 0:
        print("  ".join(f"{key} {value}" for key, value in told.items()), end="\n\n")
        print(f"{'':44}{'delivers':>10} {'':10}{'at least':>9}   verdict  slowest")
    if not sums_are_right(device):
        sys.exit("An all-reduce gave wrong sums: trust nothing that this machine computes.")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure_all(device, Path(folder), tolerance)
        dist.barrier()
    warned = [row for row in rows if row.warnings]
    if RANK == 0:
        print(f"\n{len(rows) - len(warned)} pass, {len(warned)} warn, tolerance {tolerance:g}")
        if options.json:
            written = [asdict(row) | {"value": row.value} for row in rows]
            options.json.write_text(json.dumps({"about": told, "rows": written}, indent=1) + "\n")
        if options.figure:
            draw(rows, options.figure)
    return rows


def main() -> int:
    options = options_of()
    if options.compare:
        return compare(*options.compare, options.tolerance or 0.1)
    if "RANK" not in os.environ:
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        ranks = torch.cuda.device_count() or 4
        torchrun(["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", *sys.argv])
        return 0
    if torch.cuda.device_count() >= LOCAL_WORLD_SIZE:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")
    run(options)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
