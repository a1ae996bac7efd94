"""What `make bench` says of tensor and pipeline parallelism: a step by hand next to torch's."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course.playing import load
from course.ranks import run

RANKS = 2
WIDTH, HEADS, TOKENS, BATCH = 512, 8, 128, 4  # a transformer block, 3.1 million parameters
LAYERS, MICROS, ROWS = 8, 8, 64  # a stack of linear layers 512 wide, in micro-batches


def race(ours: Callable, peer: Callable, repeats: int, steps: int) -> tuple[list, list]:
    """Seconds a step: the two take turns to go first; two repeats to warm up are not counted."""
    times: tuple[list, list] = [], []
    for repeat in range(-2, repeats):
        for which in (0, 1) if repeat % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                (ours, peer)[which]()
            dist.barrier()
            if repeat >= 0:
                times[which].append((time.perf_counter() - start) / steps)
    return times


def blocks(repeats: int, sequence_parallel: bool) -> tuple[list, list]:
    lesson = load("parallelism/06_tensor_parallel.py")
    torch.manual_seed(0)
    whole = lesson.TransformerBlock(WIDTH, HEADS)
    x_TBD = torch.randn(TOKENS, BATCH, WIDTH)
    x = lesson.share(x_TBD, 0 if sequence_parallel else None).requires_grad_()
    ways = (lesson.GatherTokens, lesson.ScatterTokens) if sequence_parallel else ()
    ours = lesson.tensor_parallel(whole, *ways)
    peer = lesson.by_dtensor(whole, sequence_parallel)

    def step(block: nn.Module) -> None:
        block.zero_grad()
        block(x).sum().backward()
        if sequence_parallel and block is ours:
            lesson.sum_token_gradients(block)

    return race(lambda: step(ours), lambda: step(peer), repeats, steps=5)


def pipelines(repeats: int) -> tuple[list, list]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    lesson = load("parallelism/07_pipeline_schedules.py")
    torch.manual_seed(0)
    x, due = torch.randn(2, MICROS * ROWS, WIDTH)
    stages = [
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // RANKS))) for _ in range(2)
    ]
    stages[1].load_state_dict(stages[0].state_dict())
    rank = dist.get_rank()
    order, targets = lesson.one_f_one_b(rank, RANKS, MICROS), due.chunk(MICROS)
    by_hand = lesson.Stage(stages[0], lambda y, k: F.mse_loss(y, targets[k]), MICROS)
    torchs = PipelineStage(stages[1], rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(torchs, MICROS, loss_fn=F.mse_loss)
    args = (x,) if rank == 0 else ()
    kwargs = {"target": due} if rank == RANKS - 1 else {}

    def ours() -> None:
        stages[0].zero_grad()
        by_hand.step(order, x.detach().chunk(MICROS))

    def peer() -> None:
        stages[1].zero_grad()
        schedule.step(*args, **kwargs)

    return race(ours, peer, repeats, steps=5)


def ratios(repeats: int) -> list[dict]:
    block = f"{RANKS} ranks, {TOKENS} x {BATCH} tokens, {WIDTH} wide, {HEADS} heads, float32"
    stack = (
        f"{RANKS} stages of {LAYERS // RANKS} layers {WIDTH} wide, {MICROS} x {ROWS} rows, float32"
    )
    cases = [
        ("tensor-parallel block / DTensor's", block, blocks, (repeats, False)),
        ("the same, tokens cut too / DTensor's", block, blocks, (repeats, True)),
        ("1F1B / torch's Schedule1F1B", stack, pipelines, (repeats,)),
    ]
    found = []
    for name, setting, race_of, args in cases:
        ours, peer = run(race_of, RANKS, *args, deadline=60 + 20 * repeats)[0]
        found.append({"name": name, "setting": setting, "ours": ours, "peer": peer, "aim": 1.05})
    return found
