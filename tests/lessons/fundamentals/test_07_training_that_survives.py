"""Resuming, writing and leaving in the lesson on survival; and what a wrong line does to it."""

import hashlib
import io
import os
import pickle
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fundamentals/07_training_that_survives.py"
here = Lazily(LESSON)
CPU = torch.device("cpu")
NO_TORCHRUN = ('        check_a_real_death(folder / "sigkill")\n', "")
SIZES = {1: [NO_TORCHRUN], 3: [NO_TORCHRUN]}  # it is the same at every world size
SECTIONS = {
    "check_samples": "        check_samples(folder, device, seen)\n",
    "check_overflow": "        check_overflow(device)\n",
    "check_clipping": "        check_clipping(device)\n",
    "check_disk": "        check_disk(folder)\n",
    "check_sigterm": '        check_sigterm(folder / "sigterm", device, expected)\n',
    "check_interval": "        check_interval()\n",
}
NO_OMISSIONS = ('("optimizer", "scheduler", "scaler", "random", "sampler")', "()")
NO_RESUME = ("= check_resume(folder, device)\n", "= (None, None)\n")


def only(*sections: str) -> list[tuple[str, str]]:
    """Changes that leave these sections alone in `main`, and resuming."""
    return [(line, "") for section, line in SECTIONS.items() if section not in sections]


WHOLE, TERM = "whole checkpoint: weights that differ", "SIGTERM: weights that differ"
BESIDE, OVER = "next to it, renamed: share of kills survived", "overwritten: share survived"
NAMED, BEFORE = (
    "bit flipped: files that the checksum names",
    "bit flipped: step that is whole before it",
)
WRONG, KEPT = "bit flipped: weights read wrong, with no error", "checkpoints kept of three"
TWICE, NEVER = "place forgotten: samples seen twice", "place forgotten: samples never seen"
EVERY_NTH, PADDED = "every n-th: images counted of 997", "DistributedSampler: images counted of 997"
SKIPPED, SCALE = "steps skipped from loss scale 2**15", "loss scale that is left"
STILL, MOVED = "weights that moved in skipped steps", "weights that moved in the others of 12 steps"
RIGHT, LATE = (
    "unscaled, then clipped: norm of the update",
    "clipped, then unscaled: norm of the update",
)
LAST, AGAIN = "SIGTERM: last step, on every rank", "SIGTERM: steps done twice"
BEST, LOST = "interval that loses least / sqrt(2 c M)", "share lost there"


def without(part: str) -> str:
    return f"without {part}: share that differs"


OMITTED = {
    part: without(part) for part in ("optimizer", "scheduler", "scaler", "random", "sampler")
}
ON_GPUS = OnGpus(
    changes=[NO_TORCHRUN, ("elements: int = 2**28", "elements: int = 2**20")],
    ranks=(1, 2),  # to a GPU four ranks are here what two are
    hardware=dict.fromkeys(
        (without("scaler"), SKIPPED, SCALE),
        "autocast to float16 on CUDA, which in C++ sees CPU tensors: nothing overflows",
    ),
)


LEFT_OUT = Breaks(
    {
        "a checkpoint from which nothing is left out": (
            "checkpoint | {part: Training(device).state()[part]}",
            "checkpoint",
            {*OMITTED.values()},
        ),
        "nothing is drawn, and nothing overflows": (
            [("nn.Dropout(0.2)", "nn.Dropout(0.0)"), ("init_scale=2.0**19", "init_scale=2.0**10")],
            {OMITTED["random"], OMITTED["scaler"]},
        ),
        "no momentum, and a learning rate that stays": (
            [
                (", lr=0.1, momentum=0.9)", ", lr=0.1)"),
                ("lr_scheduler.CosineAnnealingLR", "lr_scheduler.ConstantLR"),
                ("cosine(self.optimizer, STEPS)", "cosine(self.optimizer, 1.0)"),
            ],
            {OMITTED["optimizer"], OMITTED["scheduler"]},
        ),
    },
    ranks=3,
    changes=[NO_TORCHRUN, *only()],
)
RESUMED = Breaks(
    {
        "no momentum": (
            '        self.optimizer.load_state_dict(state["optimizer"])\n',
            "",
            {WHOLE, TERM},
        ),
        "no schedule": (
            '        self.scheduler.load_state_dict(state["scheduler"])\n',
            "",
            {WHOLE, TERM},
        ),
        "no loss scale": (
            '        self.scaler.load_state_dict(state["scaler"])\n',
            "",
            {WHOLE, TERM},
        ),
        "no random numbers": (
            '        set_random_state(state["random"], self.device)\n',
            "",
            {WHOLE, TERM},
        ),
        "no place in the data": (
            '        self.sampler.load_state_dict(state["sampler"])\n',
            "",
            {WHOLE, TERM},
        ),
        "another rank's random numbers": (
            'checkpoint["random"][RANK]',
            'checkpoint["random"][0]',
            {WHOLE, TERM},
        ),
        "no bucket order": ("        self.warm_up()\n", "", {WHOLE, TERM}),  # Try
        "a loader that draws": (', "generator": torch.Generator()', "", {WHOLE, TERM}),  # Try
        "a place that is never forgotten": (
            'go_on(without("sampler", read(folder), device)',
            "go_on(read(folder)",
            {TWICE, NEVER},
        ),
        "evaluation: every rank all, and shares of the sampler's": (
            [
                ("own = images[RANK::WORLD_SIZE]", "own = images"),
                ("RANK, shuffle=False)", "RANK, shuffle=False, drop_last=True)"),
            ],
            {EVERY_NTH, PADDED},
        ),
        "told as the last one": (
            "dist.ReduceOp.MAX)\n        return int",
            "dist.ReduceOp.MIN)\n        return int",
            {LAST},
        ),
        "leaving without saving": (
            [
                ("            save(training, folder)\n            return", "            return"),
                ("    folder.mkdir()\n    training", "    folder = folder.parent\n    training"),
            ],
            {AGAIN},  # it goes on from step 5
        ),
    },
    ranks=3,
    changes=[NO_TORCHRUN, NO_OMISSIONS, *only("check_samples", "check_sigterm")],
)
ON_DISK = Breaks(
    {
        "written in place": (
            [
                ('    temporary = path.with_suffix(".tmp")\n', "    temporary = path\n"),
                ("    temporary.replace(path)\n", ""),
            ],
            {BESIDE},
        ),
        "overwritten next to it": (
            "*kill_at_each_line(overwrite)]",
            "*kill_at_each_line(save_durably)]",
            {OVER},
        ),
        "a checksum that nobody compares": (
            "        if is_whole(path):\n            return",
            "        if path:\n            return",
            {NAMED, BEFORE},
        ),
        "a bit that does not flip, and three kept": (
            [("0b0100_0000", "0"), ("keep: int = 2", "keep: int = 3")],
            {WRONG, NAMED, BEFORE, KEPT},
        ),
    },
    ranks=3,
    changes=[NO_TORCHRUN, NO_OMISSIONS, *only("check_disk")],
    alone=["written in place"],  # the other would write so, too
)
OF_THEMSELVES = Breaks(  # sections that need nothing of the first
    {
        "an update of infinite gradients": (
            "    scaler.step(optimizer)  # n",
            "    scaler.unscale_(optimizer)\n    optimizer.step()  # n",
            {STILL, MOVED},
        ),
        "a scale that falls to a sixteenth": (
            "init_scale=2.0**15)",
            "init_scale=2.0**15, backoff_factor=1 / 16)",
            {SKIPPED, SCALE},
        ),
        "an overflow that nobody is told of": (
            "    dist.all_reduce(weight.grad)\n    scaler",
            "    scaler",
            {SKIPPED, SCALE},
        ),
        "never unscaled first": (
            "    if unscale_first:\n",
            "    if False:\n",
            {RIGHT},
        ),
        "always unscaled first": ("    if unscale_first:\n", "    if True:\n", {LATE}),
        "intervals by another formula": (
            "math.sqrt(2 * cost * mtbf)",
            "math.sqrt(cost * mtbf / 2)",
            {BEST},
        ),
        "free checkpoints": (
            "share_lost(factor * young, cost,",
            "share_lost(factor * young, 0.0,",
            {BEST, LOST},
        ),
    },
    ranks=3,
    changes=[NO_TORCHRUN, NO_RESUME, *only("check_overflow", "check_clipping", "check_interval")],
)
ANEW, TWICE_DONE = "SIGKILL: times that torchrun started anew", "SIGKILL: steps done twice"
DEATH = Breaks(  # torchrun takes some seconds
    {
        "random numbers that are not restored, and checkpoints every three steps": (
            [
                ('        torch.set_rng_state(saved["random"][rank])\n', ""),
                ("if step % 4 == 0:", "if step % 3 == 0:"),
            ],
            {"SIGKILL: ranks that end with the same sha256", TWICE_DONE},
        ),
        "nobody dies": (
            "dies_after=7 if rank == 1 else None",
            "dies_after=None",
            {ANEW, TWICE_DONE},
        ),
    },
    ranks=1,
    changes=[NO_RESUME, *only()],
    deadline=200,
)
MEETS_AGAIN = """
import os, signal, sys, time, datetime, torch.distributed as dist
store, rank, n = next(dist.rendezvous("env://"))
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
store = dist.PrefixStore(life, store)
if life == "1" and rank == 0:
    time.sleep(4)  # rank 1 is there before
wait = datetime.timedelta(seconds=20)
dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=wait)
dist.barrier()
if life == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.deep
def test_ranks_that_start_again_meet_if_they_do_not_read_where_the_dead_were() -> None:
    """Without the prefix rank 1, if it is there before rank 0, dies of "connectFullMesh failed"."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    torchrun += ["--local-addr=127.0.0.1", "--nproc-per-node=2", "--no-python"]
    command = [*torchrun, sys.executable, "-c", MEETS_AGAIN]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stderr


BREAKS = [LEFT_OUT, RESUMED, ON_DISK, OF_THEMSELVES, DEATH]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 200))
def test_the_sampler_goes_on_anywhere(samples: int, ranks: int, done: int) -> None:
    """Wherever it stops, what it has handed out and what it hands out then are the epoch."""
    for rank in range(ranks):
        whole = here.ResumingSampler(range(samples), ranks, rank)
        epochs = []
        for epoch in range(3):
            whole.set_epoch(epoch)
            epochs += list(whole)
        first = here.ResumingSampler(range(samples), ranks, rank)
        for _ in range(done % len(epochs)):
            first.advance(1)
        other = here.ResumingSampler(range(samples), ranks, rank)
        other.load_state_dict(first.state_dict())
        place = done % len(epochs)
        rest_of_epoch = -place % whole.num_samples or whole.num_samples
        assert list(other) == epochs[place : place + rest_of_epoch]


def test_a_checkpoint_with_any_bit_flipped_or_cut_off_is_not_whole(tmp_path: Path) -> None:
    dice = random.Random(0)
    old, new = tmp_path / "step-000001.pt", tmp_path / "step-000002.pt"
    here.save_durably(old, b"old" * 100)
    for _ in range(50):
        here.save_durably(new, b"new" * 100)
        assert here.newest_whole(tmp_path) == (new, [])
        content = bytearray(new.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        new.write_bytes(content if dice.random() < 0.5 else content[: dice.randrange(len(content))])
        assert here.newest_whole(tmp_path) == (old, [new.name])
    old.write_bytes(b"")
    with pytest.raises(ValueError, match=re.escape("['step-000002.pt', 'step-000001.pt']")):
        here.newest_whole(tmp_path)


def _stopped_after(steps: list[int], folder: Path) -> list[int]:
    """Stop after each of these steps; how many weights differ in the end from those of one go?"""
    lesson = load(LESSON)
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


def _steps_taken() -> tuple[list[int], int, int, list[float]]:
    """Samples of 12 steps, steps skipped, the scheduler's steps, norms of updates over the rate."""
    lesson = load(
        LESSON,
        (", lr=0.1, momentum=0.9)", ", lr=0.1)"),
        (
            "training.ddp.parameters(), 1.0)",
            "training.ddp.parameters(), 0.1)",
        ),  # every gradient is longer
    )
    training = lesson.Training(torch.device("cpu"))
    skipped, norms = 0, []
    for _ in range(lesson.STEPS):
        before, scale = lesson.weights_of(training), training.scaler.get_scale()
        rate = training.optimizer.param_groups[0]["lr"]
        lesson.train_step(training)
        if training.scaler.get_scale() < scale:
            skipped += 1
        else:
            norms.append(float((lesson.weights_of(training) - before).norm()) / rate)
    return training.seen, skipped, training.scheduler.last_epoch, norms


def test_a_step_clips_what_is_unscaled_skips_the_scheduler_too_and_epochs_differ() -> None:
    for seen, skipped, scheduled, norms in run(_steps_taken, 2):
        assert skipped > 0
        assert scheduled == here.STEPS - skipped
        assert norms == pytest.approx([0.1] * (here.STEPS - skipped), rel=0.01)
        second = here.STEPS - here.EPOCH  # steps of the second epoch
        assert seen[: second * here.BATCH] != seen[here.EPOCH * here.BATCH :]


def test_wherever_it_stops_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """In skipped steps, at the end of an epoch, after the first of the next, when all is done."""
    steps = [1, 4, 8, 9, 12]
    assert run(_stopped_after, 3, steps, tmp_path) == [[0] * len(steps)] * 3


@given(st.floats(1, 1e3), st.floats(1e4, 1e6))
def test_the_share_lost_is_what_the_formula_says(cost: float, mtbf: float) -> None:
    """Failures one after the other, at a fixed distance: every interval is exact."""
    interval = 3 * cost
    lost = here.share_lost(interval, cost, torch.tensor([mtbf], dtype=torch.float64))
    assert lost == pytest.approx(1 - mtbf // (4 * cost) * interval / mtbf)


def test_file_then_name_then_folder_reach_the_disk(tmp_path: Path) -> None:
    lesson = load(LESSON)
    done = []
    replace = Path.replace

    def fsync(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(file.name)
        if file.is_file():
            done.append(f"{file.stat().st_size - 32} bytes")  # that Python has handed over

    def renamed(self: Path, target: Path) -> Path:
        done.append("renamed")
        return replace(self, target)

    with patch("os.fsync", fsync), patch.object(Path, "replace", renamed):
        lesson.save_durably(tmp_path / "a.pt", b"new")
    assert done == ["a.tmp", "3 bytes", "renamed", tmp_path.name]


# Values that no row shows


def test_the_interval_follows_from_the_published_number_of_failures(capsys) -> None:
    """419 interruptions in 54 days, 60 s per checkpoint: 1,156 s, and a tenth of the time."""
    lesson = load(LESSON)
    lesson.check_interval()
    minutes = [int(found) for found in re.findall(r"every +(\d+) minutes", capsys.readouterr().out)]
    assert minutes == [5, 10, 19, 39, 77]
    best, lost = lesson.ledger
    assert (best["measured"], best["verdict"]) == (1, "PASS")
    assert lost["predicted"] == pytest.approx(0.1038, abs=1e-4)
    assert lost["slack"] < 0.01


class Malicious:
    def __reduce__(self) -> tuple:
        return os.system, ("exit 3",)


def test_a_checkpoint_is_read_without_running_code_from_it() -> None:
    buffer = io.BytesIO()
    torch.save({"step": Malicious()}, buffer)
    with pytest.raises(pickle.UnpicklingError, match=r"(?i)weights.only"):
        here.load_bytes(buffer.getvalue())


def test_what_is_read_back_are_the_bytes_and_their_sha256(tmp_path: Path) -> None:
    path = tmp_path / "step-000003.pt"
    here.save_durably(path, b"weights")
    content = path.read_bytes()
    assert content == hashlib.sha256(b"weights").digest() + b"weights"
    assert here.is_whole(path)


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    lesson = load(LESSON)
    lesson.gather_objects = lambda value: [value]
    for step in (8, 9, 10, 100):
        random = {"cpu": torch.get_rng_state()}
        state = {"step": step, "random": random}
        training = SimpleNamespace(device=CPU, step=step, state=lambda state=state: state)
        lesson.save(training, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010.pt", "step-000100.pt"]
    newest, _ = lesson.newest_whole(tmp_path)
    assert lesson.load_bytes(newest.read_bytes()[32:])["step"] == 100


def test_a_program_that_starts_again_does_not_read_what_its_last_life_left(monkeypatch) -> None:
    """It puts the number of restarts before every key of torchrun's store."""
    asked = []

    def init(backend: str, **how: object) -> None:
        asked.append((backend, how))
        raise InterruptedError

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([("the store", 1, 2)]))
    monkeypatch.setattr(dist, "PrefixStore", lambda *what: what)
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(InterruptedError):
        exec(here.PROGRAM, {})
    assert asked == [("gloo", {"store": ("3", "the store"), "rank": 1, "world_size": 2})]


def test_a_signal_is_remembered_and_nothing_else_happens() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = here.Stop()
    try:
        assert stop.told == 0
        signal.raise_signal(signal.SIGTERM)
        assert stop.told == signal.SIGTERM
        assert stop.before is before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_bit_of_the_first_weight_s_exponent_is_flipped(tmp_path: Path) -> None:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    buffer = io.BytesIO()
    torch.save({"model": {"a": weights}}, buffer)
    path = tmp_path / "a.pt"
    here.save_durably(path, buffer.getvalue())
    whole = path.read_bytes()
    here.flip_a_bit(path)
    bits = [(a ^ b).bit_count() for a, b in zip(whole, path.read_bytes(), strict=True)]
    assert sum(bits) == 1
    found = here.weights_in(path)
    assert found[1:].tolist() == weights[1:].tolist()
    assert found[0] > 1e37


def _masks_and_orders() -> tuple[list, list[int]]:
    """What this rank's dropout draws first, and the samples of its first epoch."""
    lesson = load(LESSON)
    training = lesson.Training(CPU)
    return torch.rand(8).tolist(), list(training.sampler)


def test_ranks_drop_out_other_units_and_share_the_samples() -> None:
    (masks, samples), (others_masks, others_samples) = run(_masks_and_orders, 2)
    assert masks != others_masks
    assert sorted(samples + others_samples) == list(range(2 * here.BATCH * here.EPOCH))
    assert samples != sorted(samples)


def _overflows_on_the_last_rank() -> list[float]:
    """Weights after a step of float16, in which only the last rank's gradient is infinite."""
    lesson = load(LESSON)
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    moved = []
    for mine in (100.0 if dist.get_rank() == 1 else 1.0, 1.0):
        lesson.step_in_float16(layer, optimizer, scaler, mine)
        moved += [float(layer.weight[0, 0].detach()), scaler.get_scale()]
    return moved


def test_a_gradient_is_divided_by_the_loss_scale_and_summed_over_ranks() -> None:
    """Skipped on both ranks, at half the scale then: minus 1 + 1, the learning rate being 1."""
    assert run(_overflows_on_the_last_rank, 2) == [[0.0, 2.0**14, -2.0, 2.0**14]] * 2
