"""What an answer needs to run live, by torchrun, on this machine's own links or GPUs.

torchrun --standalone --nproc-per-node=2 answers/03_ring_shift.py
"""

import atexit
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def joined() -> Iterator[torch.device]:
    """Within, the process group is up. Yields this rank's device: a GPU of its own, with NCCL, if
    every rank has one; else the CPU, with gloo. Not yet run on GPUs.
    """
    if "LOCAL_WORLD_SIZE" not in os.environ:
        sys.exit(f"Ranks are missing: torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield device
    dist.destroy_process_group()
    atexit.register(_leave)


def _leave() -> None:
    """Leave at once: a profiled collective keeps its group, whose threads may abort an exit."""
    sys.stdout.flush()
    os._exit(int(hasattr(sys, "last_value")))  # set if an exception ended the program


def milliseconds(call: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """The median time of `call` on this rank, of so many, after one that does not count."""
    call()
    taken = []
    for _ in range(times):
        dist.barrier()
        taken.append(_time(call, device))
    return statistics.median(taken)


def _time(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended)
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def largest(wrong: float, device: torch.device) -> float:
    """The largest of what the ranks hand in, on every rank; not a number counts as infinite."""
    every = torch.tensor(float(wrong), dtype=torch.float64, device=device).nan_to_num(torch.inf)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return every.item()


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)
