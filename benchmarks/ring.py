"""What `make bench` says of all-reduce on send and receive, next to the library's own."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from course.playing import load
from course.ranks import run

CASES = (  # bytes, algorithm, calls a measurement, aim
    (4_000, "tree", 50, 0.7),
    (16_000_000, "ring", 4, 1.1),
    (64_000_000, "ring", 2, 1.1),
)


def race(size: int, name: str, calls: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds a call: the two take turns to go first; one repeat to warm up is not counted."""
    lesson = load("communication/03_ring_and_tree.py")
    ways: list[Callable] = [partial(lesson.run, lesson.ALL_REDUCE[name]), dist.all_reduce]
    times, x = ([], []), torch.zeros(size // 4)
    for repeat in range(-1, repeats):
        for which in (0, 1) if repeat % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                ways[which](x)
            dist.barrier()
            if repeat >= 0:
                times[which].append((time.perf_counter() - start) / calls)
    return times


def ratios(repeats: int) -> list[dict]:
    rows = []
    for ranks in 2, 4:
        for size, name, calls, aim in CASES:
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(-(-repeats // 2)):  # new ranks lie elsewhere in memory: it shows
                ours, peer = run(race, ranks, size, name, calls, 2)[0]
                times[0].extend(ours)
                times[1].extend(peer)
            unit = f"{size // 1000} kB" if size < 1e6 else f"{size // 10**6} MB"
            row = {"name": f"all-reduce by {name}, {unit}, {ranks} ranks: dist.all_reduce"}
            row |= {"setting": f"float32 sum, {ranks} ranks, gloo", "aim": aim}
            rows.append(row | {"ours": times[0], "peer": times[1]})
    return rows
