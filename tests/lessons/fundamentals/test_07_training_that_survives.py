"""Resuming, writing and leaving in the lesson on survival; and what a wrong line does to it."""

import functools
import random
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from course.playing import load, play
from course.ranks import run
from tests.helpers.spared import STARTS_PROCESSES, SURVIVING

LESSON = SURVIVING
(NO_TORCHRUN,) = STARTS_PROCESSES[LESSON]
SECTIONS = {
    "check_samples": "        check_samples(folder, device, seen)\n",
    "check_overflow": "        check_overflow(device)\n",
    "check_clipping": "        check_clipping(device)\n",
    "check_disk": "        check_disk(folder)\n",
    "check_sigterm": '        check_sigterm(folder / "sigterm", device, expected)\n',
    "check_interval": "        check_interval()\n",
}
WHOLE, TERM = "whole checkpoint: weights that differ", "SIGTERM: weights that differ"
BESIDE, OVER = "beside, renamed: share of kills survived", "overwritten: share survived"
NAMED, BEFORE = (
    "bit flipped: files that the checksum names",
    "bit flipped: step that is whole before it",
)
WRONG, KEPT = "bit flipped: weights read wrong, with no error", "checkpoints kept of three"
TWICE, NEVER = "place forgotten: samples seen twice", "place forgotten: samples never seen"
EVERY_NTH, PADDED = "every n-th: images counted of 997", "DistributedSampler: images counted of 997"
SKIPPED, SCALE = "steps skipped from loss scale 2**16", "loss scale that is left"
STILL, MOVED = "weights that moved in skipped steps", "weights that moved in the others of 12 steps"
RIGHT, LATE = (
    "unscaled, then clipped: norm of the update",
    "clipped, then unscaled: norm of the update",
)
LAST, AGAIN = "SIGTERM: last step, on every rank", "SIGTERM: steps done twice"
BEST, LOST = "interval that loses least / sqrt(2 c M)", "share lost there"


def without(part: str) -> str:
    return f"without {part}: share that differs"


BREAKS = {  # the sections it takes, what is changed, claims that must FAIL; on three ranks
    "a checkpoint from which nothing is left out": (
        (),
        [("checkpoint | {part: Training(device).state()[part]}", "checkpoint")],
        {without(part) for part in ("optimizer", "scheduler", "scaler", "random", "sampler")},
    ),
    "nothing is drawn, and nothing overflows": (
        (),
        [("nn.Dropout(0.2)", "nn.Dropout(0.0)"), ("init_scale=2.0**19", "init_scale=2.0**10")],
        {without("random"), without("scaler")},
    ),
    "no momentum, and a learning rate that stays": (
        (),
        [
            (", lr=0.1, momentum=0.9)", ", lr=0.1)"),
            ("lr_scheduler.CosineAnnealingLR", "lr_scheduler.ConstantLR"),
            ("cosine(self.optimizer, STEPS)", "cosine(self.optimizer, 1.0)"),
        ],
        {without("optimizer"), without("scheduler")},
    ),
    "no momentum": (
        (),
        [('        self.optimizer.load_state_dict(state["optimizer"])\n', "")],
        {WHOLE, TERM},
    ),
    "no schedule": (
        (),
        [('        self.scheduler.load_state_dict(state["scheduler"])\n', "")],
        {WHOLE, TERM},
    ),
    "no loss scale": (
        (),
        [('        self.scaler.load_state_dict(state["scaler"])\n', "")],
        {WHOLE, TERM},
    ),
    "no random numbers": (
        (),
        [('        set_random_state(state["random"], self.device)\n', "")],
        {WHOLE, TERM},
    ),
    "no place in the data": (
        (),
        [('        self.sampler.load_state_dict(state["sampler"])\n', "")],
        {WHOLE, TERM},
    ),
    "another rank's random numbers": (
        (),
        [('checkpoint["random"][RANK]', 'checkpoint["random"][0]')],
        {WHOLE, TERM},
    ),
    "no bucket order": ((), [("        self.warm_up()\n", "")], {WHOLE, TERM}),  # Try
    "a loader that draws": ((), [(', "generator": torch.Generator()', "")], {WHOLE, TERM}),  # Try
    "a place that is never forgotten": (
        ("check_samples",),
        [('go_on(without("sampler", read(folder), device)', "go_on(read(folder)")],
        {TWICE, NEVER},
    ),
    "evaluation: every rank all, and shares of the sampler's": (
        ("check_samples",),
        [
            ("own = images[RANK::WORLD_SIZE]", "own = images"),
            ("RANK, shuffle=False)", "RANK, shuffle=False, drop_last=True)"),
        ],
        {EVERY_NTH, PADDED},
    ),
    "an update of infinite gradients": (
        ("check_overflow",),
        [
            (
                "    scaler.step(optimizer)  # n",
                "    scaler.unscale_(optimizer)\n    optimizer.step()  # n",
            )
        ],
        {STILL, MOVED},
    ),
    "a scale that falls to a quarter": (
        ("check_overflow",),
        [("init_scale=2.0**16)", "init_scale=2.0**16, backoff_factor=0.25)")],
        {SKIPPED, SCALE},
    ),
    "an overflow that nobody is told of": (
        ("check_overflow",),
        [("    dist.all_reduce(weight.grad)\n    scaler", "    scaler")],
        {SKIPPED, SCALE},
    ),
    "never unscaled first": (
        ("check_clipping",),
        [("    if unscale_first:\n", "    if False:\n")],
        {RIGHT},
    ),
    "always unscaled first": (
        ("check_clipping",),
        [("    if unscale_first:\n", "    if True:\n")],
        {LATE},
    ),
    "written in place": (
        ("check_disk",),
        [
            ('    temporary = path.with_suffix(".tmp")\n', "    temporary = path\n"),
            ("    temporary.replace(path)\n", ""),
        ],
        {BESIDE},
    ),
    "overwritten beside": (
        ("check_disk",),
        [("*kill_at_each_line(overwrite)]", "*kill_at_each_line(save_durably)]")],
        {OVER},
    ),
    "a checksum that nobody compares": (
        ("check_disk",),
        [
            (
                "        if is_whole(path):\n            return",
                "        if path:\n            return",
            )
        ],
        {NAMED, BEFORE},
    ),
    "a bit that does not flip, and three kept": (
        ("check_disk",),
        [("0b0100_0000", "0"), ("keep: int = 2", "keep: int = 3")],
        {WRONG, NAMED, BEFORE, KEPT},
    ),
    "told as the last one": (
        ("check_sigterm",),
        [("dist.ReduceOp.MAX)\n        return int", "dist.ReduceOp.MIN)\n        return int")],
        {LAST},
    ),
    "leaving without saving": (
        ("check_sigterm",),
        [
            ("            save(training, folder)\n            return", "            return"),
            ("    folder.mkdir()\n    training", "    folder = folder.parent\n    training"),
        ],
        {AGAIN},  # it goes on from step 5
    ),
    "intervals by another formula": (
        ("check_interval",),
        [("math.sqrt(2 * cost * mtbf)", "math.sqrt(cost * mtbf / 2)")],
        {BEST},
    ),
    "free checkpoints": (
        ("check_interval",),
        [("share_lost(factor * young, cost,", "share_lost(factor * young, 0.0,")],
        {BEST, LOST},
    ),
}


NO_OMISSIONS = ('("optimizer", "scheduler", "scaler", "random", "sampler")', "()")
NO_RESUME = ("= check_resume(folder, device)\n", "= (None, None)\n")
ALONE = {"check_overflow", "check_clipping", "check_interval"}  # they need nothing of section 1


@pytest.mark.deep
@pytest.mark.parametrize("name", BREAKS)
def test_a_wrong_line_fails_its_claims(name: str) -> None:
    sections, changes, failed = BREAKS[name]
    if TERM in failed:
        sections = ("check_sigterm",)
    spared = [(line, "") for section, line in SECTIONS.items() if section not in sections]
    if ALONE.issuperset(sections) and sections:
        spared.append(NO_RESUME)
    elif not any(claim.startswith("without") for claim in failed):
        spared.append(NO_OMISSIONS)
    play(LESSON, 3, NO_TORCHRUN, *spared, *changes).expect(failed)


ANEW, TWICE_DONE = "SIGKILL: times that torchrun started anew", "SIGKILL: steps done twice"
DEATH = {  # torchrun takes some seconds
    "random numbers that are not restored, and checkpoints every three steps": (
        [
            ('        torch.set_rng_state(saved["random"][rank])\n', ""),
            ("if step % 4 == 0:", "if step % 3 == 0:"),
        ],
        {"SIGKILL: ranks that end with the same sha256", TWICE_DONE},
    ),
    "nobody dies": (
        [("dies_after=7 if rank == 1 else None", "dies_after=None")],
        {ANEW, TWICE_DONE},
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", DEATH)
def test_what_goes_wrong_at_a_real_death(name: str) -> None:
    changes, failed = DEATH[name]
    spared = [NO_RESUME, *((line, "") for line in SECTIONS.values())]
    play(LESSON, 1, *spared, *changes, deadline=200).expect(failed)


@functools.cache
def here():
    return load(LESSON)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 200))
def test_the_sampler_goes_on_anywhere(samples: int, ranks: int, done: int) -> None:
    """Wherever it stops, what it has handed out and what it hands out then are the epoch."""
    lesson = here()
    for rank in range(ranks):
        whole = lesson.ResumingSampler(range(samples), ranks, rank)
        epochs = []
        for epoch in range(3):
            whole.set_epoch(epoch)
            epochs += list(whole)
        first = lesson.ResumingSampler(range(samples), ranks, rank)
        for _ in range(done % len(epochs)):
            first.advance(1)
        other = lesson.ResumingSampler(range(samples), ranks, rank)
        other.load_state_dict(first.state_dict())
        place = done % len(epochs)
        rest_of_epoch = -place % whole.num_samples or whole.num_samples
        assert list(other) == epochs[place : place + rest_of_epoch]


def test_a_checkpoint_with_any_bit_flipped_or_cut_off_is_not_whole(tmp_path: Path) -> None:
    lesson = here()
    dice = random.Random(0)
    old, new = tmp_path / "step-000001.pt", tmp_path / "step-000002.pt"
    lesson.save_durably(old, b"old" * 100)
    for _ in range(50):
        lesson.save_durably(new, b"new" * 100)
        assert lesson.newest_whole(tmp_path) == (new, [])
        content = bytearray(new.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        new.write_bytes(content if dice.random() < 0.5 else content[: dice.randrange(len(content))])
        assert lesson.newest_whole(tmp_path) == (old, [new.name])
    old.write_bytes(b"")
    with pytest.raises(ValueError, match=re.escape("['step-000002.pt', 'step-000001.pt']")):
        lesson.newest_whole(tmp_path)


def _stopped_after(steps: list[int], folder: Path) -> list[int]:
    """Stop after each of these steps; how many weights differ in the end from those of one go?"""
    lesson = here()
    device = torch.device("cpu")
    whole = lesson.Training(device)
    lesson.train(whole, lesson.STEPS)
    differ = []
    for step in steps:
        training = lesson.Training(device)
        lesson.train(training, step)
        lesson.save(training, folder)
        resumed = lesson.go_on(lesson.read(folder), device)
        differ.append(lesson.differing(resumed, lesson.weights_of(whole)))
        dist.barrier()
    return differ


def test_wherever_it_stops_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """In skipped steps, at the end of an epoch, after the first of the next, when all is done."""
    steps = [1, 4, 8, 9, 12]
    assert run(_stopped_after, 3, steps, tmp_path) == [[0] * len(steps)] * 3


@given(st.floats(1, 1e3), st.floats(1e4, 1e6))
def test_the_share_lost_is_what_the_formula_says(cost: float, mtbf: float) -> None:
    """Failures one after the other, at a fixed distance: every interval is exact."""
    lesson = here()
    interval = 3 * cost
    lost = lesson.share_lost(interval, cost, torch.tensor([mtbf], dtype=torch.float64))
    assert lost == pytest.approx(1 - mtbf // (4 * cost) * interval / mtbf)
