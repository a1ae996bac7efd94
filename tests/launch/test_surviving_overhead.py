"""What surviving costs: the complete file against a bare DDP loop on the same work, in one run."""

import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from course.lessons import ROOT
from course.ranks import run

SCRIPT = ROOT / "launch/ddp_surviving.py"
STEPS = 10  # of a turn: short ones, so that a disturbance meets both; the script listens in each
TURNS = 20
RUNS = 3
SAVE_EVERY = 100  # steps, the script's own default
WIDTH = 64  # the digits' own model is so small that a step would be Python's alone


def wide_model(args: object, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * WIDTH * 2 * 2, classes),
    )  # fmt: skip


def bare_loop(args: object, trainer: object) -> Callable[[], None]:
    """The same step, without what a restart needs: no seeds, no flag, no checkpoint.

    Of the same model: where tensors lie in memory makes a step some percent faster or slower.
    """
    model, optimizer, scheduler = trainer.ddp, trainer.optimizer, trainer.scheduler
    train = trainer.loader.dataset.data
    sampler = DistributedSampler(train, drop_last=True)
    share = args.batch // dist.get_world_size()
    loader = DataLoader(train, share, sampler=sampler, drop_last=True)

    def batches() -> Iterator:
        while True:
            yield from loader

    endless = batches()

    def steps() -> None:
        for _ in range(STEPS):
            x, y = next(endless)
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    return steps


def race(folder: Path) -> dict[str, float]:
    """Median seconds per step of both, taking turns; and of one saving."""
    script = runpy.run_path(str(SCRIPT), run_name="imported")
    sys.argv = ["train", f"--checkpoints={folder}", "--epochs=1000"]
    args = script["read_flags"]()
    assert (args.listen_every, args.save_every) == (STEPS, SAVE_EVERY)
    assert args.batch // dist.get_world_size() <= args.micro_batch, "one backward per step, as bare"
    script["Trainer"].__init__.__globals__["build_model"] = wide_model
    trainer = script["Trainer"](args, torch.device("cpu"))
    stop = script["Stop"]()

    def surviving() -> None:
        for step in range(STEPS):
            listens = step % args.listen_every == 0
            if listens:
                stop.ask()
            trainer.train_step()
            if listens:
                stop.answer()

    does = {
        "bare": bare_loop(args, trainer),
        "surviving": surviving,
        "save": lambda: trainer.save(must=True),
    }
    seconds = {name: [] for name in does}
    turns = TURNS
    while len(seconds["bare"]) < turns:
        for name, act in does.items():
            dist.barrier()
            begun = time.perf_counter()
            act()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun)
        slowest = torch.tensor(seconds["bare"][-1] / STEPS)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if slowest > 0.05:  # no AVX512: bfloat16 takes ten times as long, and noise is less of it
            turns = TURNS // 4
    return {name: median(each) for name, each in seconds.items()}


@pytest.mark.deep
@pytest.mark.clock
def test_surviving_costs_at_most_a_twentieth_of_a_step(tmp_path: Path) -> None:
    costs = []
    for number in range(RUNS):
        folder = tmp_path / str(number)
        folder.mkdir()
        seconds = run(race, 2, folder, deadline=240)[0]
        bare, surviving = seconds["bare"] / STEPS, seconds["surviving"] / STEPS
        with_saving = surviving + seconds["save"] / SAVE_EVERY
        costs.append(with_saving / bare - 1)
        said = f"bare {1000 * bare:.2f} ms per step, surviving {1000 * surviving:.2f}"
        print(f"{said}, with saving {1000 * with_saving:.2f}: {costs[-1]:+.1%}")
    assert median(costs) <= 0.05
