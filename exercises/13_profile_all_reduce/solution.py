"""Profile an all-reduce; report its share of the step.

Task: exercises/13_profile_all_reduce/README.md.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile, record_function, schedule

with contextlib.suppress(ImportError):  # pip install -e '.[profiling]'
    import nvtx

Spans = list[tuple[float, float]]  # (start, end), in whatever order


class Share(NamedTuple):
    """What communication costs, over all steps of a trace."""

    communication: float  # microseconds in which some communication goes on
    exposed: float  # those of them in which no compute does
    of_step: float  # exposed / the steps' microseconds


def covered(spans: Spans, start: float, end: float) -> float:
    """How much of start..end the spans cover. They may overlap, nest, and reach beyond it.

    covered([(0, 3), (2, 5), (4, 4.5), (9, 20)], 1, 10) == 5: from 1 to 5 and from 9 to 10.
    """
    # --- yours
    length, reached = 0.0, start
    for first, last in sorted(spans):
        first, last = max(first, reached), min(last, end)
        if last > first:
            length, reached = length + last - first, last
    return length
    # --- end


def share(events: list[dict], rank: int) -> Share:
    """What communication costs `rank`, from a trace of all ranks.

    events: all ranks' "traceEvents" in one list, with `pid` the rank, also for what ran on its
    GPU. (profiling/02_one_trace_for_all_ranks.py merges files so, but for the GPUs, to which it
    gives a `pid` of their own.) Those with `ph` "X", and no others, have `ts` and `dur`, in
    microseconds.

    A step: `name` "step", `cat` "user_annotation" (a GPU's trace has a twin of another `cat`).
    If the rank has events of `cat` "kernel", a GPU did the work: communication is the kernels whose
    names begin with "nccl", compute all others. If not: communication is what is named "gloo:...",
    compute the events of `cat` "cpu_op" that are named "aten::...".

    What lies outside the steps does not count. A moment counts once, however many events share it;
    a rank's steps do not overlap.

    One step from 0 to 100; an all-reduce from 20 to 60; compute from 0 to 30 and from 50 to 70:
    Share(communication=40, exposed=20, of_step=0.2).
    """

    def spans(chosen: list[dict]) -> Spans:
        return [(e["ts"], e["ts"] + e["dur"]) for e in chosen]

    # --- yours
    mine = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
    steps = [e for e in mine if (e["name"], e["cat"]) == ("step", "user_annotation")]
    kernels = [e for e in mine if e["cat"] == "kernel"]
    if kernels:
        wire = [e for e in kernels if e["name"].startswith("nccl")]
        busy = [e for e in kernels if not e["name"].startswith("nccl")]
    else:
        wire = [e for e in mine if e["name"].startswith("gloo:")]
        busy = [e for e in mine if e["cat"] == "cpu_op" and e["name"].startswith("aten::")]
    total = communication = exposed = 0.0
    for start, end in spans(steps):
        total += end - start
        communication += covered(spans(wire), start, end)
        exposed += covered(spans(wire + busy), start, end) - covered(spans(busy), start, end)
    return Share(communication, exposed, exposed / total)
    # --- end


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """A range in torch's trace, and in Nsight Systems' where the nvtx package is installed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(record_function(name))
        if "nvtx" in globals():
            stack.enter_context(nvtx.annotate(name))
        yield


def record(step: Callable[[Tensor], None], batches: list[Tensor], path: str, warmup: int) -> None:
    """Train, and write a Chrome trace of all steps but the first ones to `path`.

    step: one training step, which returns when its communication is over. It is called once for
    each batch, in order, on every rank; every rank has a `path` of its own. The first `warmup`
    steps (1 or more, fewer than there are batches) leave nothing in the trace; each of the others
    lies in a `span` named "step". Nothing is communicated besides.
    """
    # --- yours
    plan = schedule(wait=0, warmup=warmup, active=len(batches) - warmup, repeat=1)
    save = partial(profile.export_chrome_trace, path=path)
    with profile(schedule=plan, on_trace_ready=save) as profiler:
        for batch in batches:
            with span("step"):
                step(batch)
            profiler.step()
    # --- end


# Live: torchrun --standalone --nproc-per-node=2 answers/13_profile_all_reduce.py


def main() -> None:
    """Record steps of four layers that compute while they all-reduce; print each rank's share."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler tells when it starts and stops
    from course.live import joined, say

    with joined() as device:
        grads = [torch.ones(500_000, device=device) for _ in range(4)]

        def step(x_BB: Tensor) -> None:
            works = []
            for grad in grads:
                x_BB @ x_BB
                works.append(dist.all_reduce(grad, async_op=True))
            for work in works:
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize()

        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            record(step, [torch.ones(512, 512, device=device)] * 8, file.name, warmup=3)
            text = Path(file.name).read_text()
        events = [e | {"pid": dist.get_rank()} for e in json.loads(text)["traceEvents"]]
        shares: list = [None] * dist.get_world_size()
        dist.all_gather_object(shares, share(events, dist.get_rank()))
        for r, (communication, exposed, of_step) in enumerate(shares):
            say(
                f"rank {r}: 5 steps; all-reduce {communication / 1e3:.1f} ms, of it "
                f"{exposed / 1e3:.1f} ms not hidden by compute: {of_step:.0%} of the step"
            )


if __name__ == "__main__":
    main()
