"""The file that survives: resumed it ends with the same bits, whatever was done to it."""

import argparse
import contextlib
import errno
import functools
import hashlib
import io
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from course.lessons import ROOT
from course.ranks import Outcome, attempt, run
from tests.helpers import chaos
from tests.helpers.leftovers import MARKED, gone
from tests.helpers.namespaces import allowed, needs_namespaces

SCRIPT = ROOT / "launch/ddp_surviving.py"
EPOCHS, STEPS_PER_EPOCH = 3, 4
LAST = EPOCHS * STEPS_PER_EPOCH
SAVE_EVERY = 2
SOME_SLOW = [1, pytest.param(2, marks=pytest.mark.deep), 3]


def flags(ranks: int, **changes: object) -> list[str]:
    """Four steps per epoch, and samples left over, on however many ranks."""
    chosen = {"epochs": EPOCHS, "batch": 340, "micro-batch": math.ceil(170 / ranks)}
    chosen |= {"save-every": SAVE_EVERY, "keep": 99, "listen-every": 3, "warm-up": 3}
    chosen |= {name.replace("_", "-"): value for name, value in changes.items()}
    return [f"--{name}={value}" for name, value in chosen.items()]


def start(
    ranks: int, folder: Path, argv: list[str], fault: str = "", script: Path = SCRIPT
) -> list[Outcome]:
    folder.mkdir(exist_ok=True)
    argv = [f"--checkpoints={folder}/checkpoints", *argv]
    how = {"deadline": 90, "quiet": 90, "group": False}
    return attempt(chaos.run_with, ranks, fault, str(script), str(folder), argv, **how)


def finish(ranks: int, folder: Path, argv: list[str], script: Path = SCRIPT) -> str:
    """Run to the end; what rank 0 said."""
    outcomes = start(ranks, folder, argv, script=script)
    assert {outcome.kind for outcome in outcomes} == {"returned"}, f"{outcomes}"
    return outcomes[0].output


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:09}"


def state(folder: Path, step: int) -> dict[str, object]:
    files = sorted(checkpoint(folder, step).glob("*.pt"))
    return {file.name: torch.load(file, weights_only=True) for file in files}


def same(one: object, other: object) -> bool:
    """Whether two states hold the same bits, down to the last tensor."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def forget(folder: Path, but: int) -> None:
    """Leave one checkpoint."""
    for path in folder.glob("checkpoints/step-*"):
        if path != checkpoint(folder, but):
            shutil.rmtree(path)


@functools.cache
def whole_run(ranks: int, tmp: Path, **changes: object) -> tuple[Path, str]:
    """Folder and output of a run that nothing interrupts; made once."""
    folder = tmp / f"{ranks}-{abs(hash(tuple(changes.items())))}"
    return folder, finish(ranks, folder, flags(ranks, **changes))


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


# Exactly


@pytest.mark.parametrize("ranks", SOME_SLOW)
def test_resumed_in_the_middle_of_an_epoch_it_ends_with_the_same_bits(
    ranks: int, tmp: Path, tmp_path: Path
) -> None:
    whole, said = whole_run(ranks, tmp)
    assert "goes on" not in said
    folder = tmp_path / "resumed"
    shutil.copytree(whole, folder)
    forget(folder, but=6)  # the second step of the second epoch
    said = finish(ranks, folder, flags(ranks))
    assert "[rank 0] goes on after step 6 of 12" in said
    assert same(state(folder, LAST), state(whole, LAST))
    assert not same(state(folder, LAST), state(whole, LAST - SAVE_EVERY))  # `same` can say no


BREAKS = {
    "the epoch starts anew": (1, "first = epoch, done", "first = epoch, 0"),
    "the epoch's order is lost": (
        1, "first = epoch, done", "first = 0 if done else epoch, done"
    ),
    "dropout draws anew": (1, "seed_of(self.args.seed, self.step,", "seed_of(time.time_ns(),"),
    "dropout draws on": (1, "        torch.manual_seed(seed)\n", ""),
    "momentum is lost": (1, "self.optimizer.load_state_dict(optimizer)", "0"),
    "the learning rate starts anew": (
        1, 'self.scheduler.load_state_dict(progress["scheduler"])', "0"
    ),
    "buckets as before the first step": (3, "self.arrange_buckets([train[0], train[1]])", "0"),
}  # fmt: skip


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    source = SCRIPT.read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (path := folder / "changed.py").write_text(source)
    return path


@pytest.mark.deep
@pytest.mark.parametrize("what", BREAKS)
def test_what_a_resume_forgets_shows_in_the_weights(what: str, tmp_path: Path) -> None:
    ranks, old, new = BREAKS[what]
    script = changed(tmp_path, (old, new))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    finish(ranks, whole, flags(ranks), script)
    shutil.copytree(whole, resumed)
    forget(resumed, but=6)
    finish(ranks, resumed, flags(ranks), script)
    assert not same(state(resumed, LAST)["model.pt"], state(whole, LAST)["model.pt"])


# On another number of ranks. In float64, without dropout: what is left is the order of sums.
EXACT = [("nn.Dropout(0.2), ", ""), ("torch.float32)[:, None]", "torch.float64)[:, None]")]
EXACT += [("model = build_model(args, classes)", "model = build_model(args, classes).double()")]
SLOW = ("self.update()\n", "self.update(); time.sleep(0.1)\n")  # a node takes time to come back
OTHER_RANKS = {
    "": [],
    "a share's own mean": [
        ("next(self.batches)) * scale", "next(self.batches)) / (340 // dist.get_world_size())")
    ],
    "an order of its own": [
        ("seed_of(self.seed, self.epoch)", "seed_of(self.seed, self.epoch, self.ranks)")
    ],
    "the warm-up begins anew": [
        ('self.scheduler.load_state_dict(progress["scheduler"])', "0"),
    ],
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("what", OTHER_RANKS)
def test_on_2_then_3_then_4_ranks_it_ends_with_the_weights_of_2(what: str, tmp_path: Path) -> None:
    """After 12 steps of momentum 0.9 a difference in the last bit has grown some thousand times."""
    script = changed(tmp_path, *EXACT, *OTHER_RANKS[what])
    argv = flags(2, precision="float32")  # no autocast
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    finish(2, whole, argv, script)
    shutil.copytree(whole, resumed)
    for ranks, step in ((3, 2), (4, 8)):
        forget(resumed, but=step)
        said = finish(ranks, resumed, argv, script)
        assert f"goes on after step {step} of 12" in said
    one, other = (state(folder, LAST)["model.pt"] for folder in (resumed, whole))
    apart = max(float((one[name] - other[name]).abs().max()) for name in one)
    assert apart > 1e-6 if what else apart < 1e-11


class Noisy:
    """Images that are a number drawn for them."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(1))


def drawn(images: int, batch: int) -> list[list[list[tuple[int, float]]]]:
    """On a rank: what each step of two epochs takes, micro-batch by micro-batch."""
    script = runpy.run_path(str(SCRIPT), run_name="imported")
    sampler = script["MicroBatches"](images, batch, 4, seed=5)
    data = script["Seeded"](Noisy(), 5)
    steps = []
    for epoch in (0, 1):
        sampler.epoch = sampler.first = epoch  # the second epoch goes on after its first step
        micro_batches = list(sampler)
        for begin in range(0, len(micro_batches), sampler.per_step):
            some = micro_batches[begin : begin + sampler.per_step]
            steps.append([data.__getitems__(places) for places in some])
    return steps


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_number_of_ranks_takes_the_same_images_cropped_alike(ranks: int) -> None:
    ((*alone,),) = run(drawn, 1, 50, 16)
    together = run(drawn, ranks, 50, 16)
    assert len(alone) == 3 + 2
    seen = [set(), set()]
    for step, taken in enumerate(alone):
        expected = sorted(image for part in taken for image in part)
        assert len({index for index, _ in expected}) == 16
        parts = [part for rank in together for part in rank[step]]
        assert sorted(image for part in parts for image in part) == expected
        assert all(1 <= len(part) <= 4 for part in parts)
        assert not seen[step // 3] & set(expected), "none twice in an epoch"
        seen[step // 3] |= set(expected)
    assert not seen[0] & seen[1], "other draws in another epoch"


def test_the_learning_rate_rises_and_falls(script: dict) -> None:
    args = argparse.Namespace(warm_up=4)
    trainer = argparse.Namespace(args=args, total_steps=12)
    rates = [script["Trainer"].rate(trainer, step) for step in range(13)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert rates[8] == pytest.approx(0.5)
    assert rates[12] == pytest.approx(0)


def test_biases_do_not_decay(tmp: Path) -> None:
    folder, _ = whole_run(1, tmp)
    weights, others = state(folder, LAST)["optimizer.pt"]["param_groups"]
    assert (weights["weight_decay"], others["weight_decay"]) == (5e-5, 0)
    assert (len(weights["params"]), len(others["params"])) == (3, 3)


@pytest.mark.parametrize("ranks", SOME_SLOW)
def test_each_test_image_is_judged_once(ranks: int, tmp: Path) -> None:
    folder, said = whole_run(ranks, tmp)
    script = runpy.run_path(str(SCRIPT), run_name="imported")
    args = type("Flags", (), {"data": None})
    _, test, classes = script["load_data"](args)
    model = script["build_model"](args, classes).eval()
    images = torch.stack([x for x, _ in test])
    targets = torch.stack([y for _, y in test])
    for epoch in range(1, EPOCHS + 1):
        model.load_state_dict(state(folder, epoch * STEPS_PER_EPOCH)["model.pt"])
        scores = model(images)
        right = int((scores.argmax(1) == targets).sum())
        first, second = scores.topk(2).values.unbind(1)
        between = int((first - second < 1e-5).sum())  # in other batches they may round otherwise
        told = int(re.search(rf"epoch {epoch}: (\d+) of 357 right", said)[1])
        assert abs(told - right) <= between


def test_in_float16_an_overflow_is_skipped_and_the_scale_resumed(tmp: Path, tmp_path: Path) -> None:
    how = {"precision": "float16", "loss_scale": 2.0**22, "save_every": 1}
    whole, said = whole_run(2, tmp, **how)
    skipped = [int(step) for step in re.findall(r"step (\d+) overflowed in float16", said)]
    assert 1 in skipped
    assert LAST not in skipped
    for step in range(2, LAST + 1):
        before, after = state(whole, step - 1), state(whole, step)
        assert same(before["model.pt"], after["model.pt"]) == (step in skipped)
        lr = [part["optimizer.pt"]["param_groups"][0]["lr"] for part in (before, after)]
        assert (lr[0] == lr[1]) == (step in skipped)
        scale = [part["progress.pt"]["scaler"]["scale"] for part in (before, after)]
        assert scale[1] == scale[0] / (2 if step in skipped else 1)
    folder = tmp_path / "resumed"
    shutil.copytree(whole, folder)
    forget(folder, but=1)
    finish(2, folder, flags(2, **how))
    assert same(state(folder, LAST), state(whole, LAST))


def test_only_digits_name_a_checkpoint(script: dict, tmp_path: Path) -> None:
    for name in (
        "step-000000900",
        "step-000001000",
        "step-best",
        "step-000002000.tmp",
        "step-1.damaged",
    ):
        (tmp_path / name).mkdir()
    found = [path.name for path in script["checkpoints_in"](tmp_path)]
    assert found == ["step-000001000", "step-000000900"]


def test_the_last_checkpoints_are_kept(tmp: Path) -> None:
    folder, _ = whole_run(1, tmp, keep=2)
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["lock", f"step-{LAST - SAVE_EVERY:09}", f"step-{LAST:09}"]


def test_each_so_many_th_checkpoint_stays_for_ever(tmp: Path) -> None:
    folder, _ = whole_run(1, tmp, keep=2, keep_every=2)
    assert [step_of([path]) for path in saved_in(folder)] == [4, 8, 10, 12]


FAILED = {  # why steps cannot be saved; is it borne, and what is saved
    errno.EIO: ((4,), False, [2]),
    errno.ENOSPC: ((2, 4, 8, 10), True, [6, 12]),
    errno.EDQUOT: ((4, 6, 8), False, [2]),
}
MADE = "    temporary.mkdir()\n"


@pytest.mark.parametrize("number", FAILED)
def test_a_save_without_room_is_borne_twice_in_a_row_and_another_error_never(
    number: int, tmp_path: Path
) -> None:
    steps, borne, saved = FAILED[number]
    fails = f"    if step in {steps}:\n        raise OSError({number}, os.strerror({number}))\n"
    (outcome,) = start(1, tmp_path, flags(1), script=changed(tmp_path, (MADE, MADE + fails)))
    assert outcome.kind == ("returned" if borne else "exited"), outcome
    told = f"SAVE FAILED, 1 in a row, and 3 end the run: step {steps[0]} could not be saved: "
    assert f"{told}[Errno {number}] {os.strerror(number)}" in outcome.output
    assert ("SAVE FAILED, 3 in a row" in outcome.output) == (number == errno.EDQUOT)
    assert [step_of([path]) for path in saved_in(tmp_path)] == saved


STEP = "self.update()"
LOSS = 'return nn.functional.cross_entropy(self.ddp(x), y, reduction="sum")'
BAD = "(self.step == 6 and self.rank == 1)"  # the seventh step, and one rank's alone
NOT_FINITE = {
    "nan in a rank's data": ("float32", LOSS, f"{LOSS} * (float('nan') if {BAD} else 1)"),
    "a gradient is not a number": (
        "float32", STEP,
        f"next(self.ddp.parameters()).grad.mul_(float('nan') if self.step == 6 else 1); {STEP}",
    ),
    "in float16, unscaled": ("float16", LOSS, f"{LOSS} * (float('nan') if {BAD} else 1)"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_FINITE)
def test_what_is_not_finite_is_neither_stepped_nor_saved(
    what: str, tmp: Path, tmp_path: Path
) -> None:
    precision, old, new = NOT_FINITE[what]
    how = {"precision": precision, "keep": 2, "loss_scale": 1.0}
    script = changed(tmp_path, (old, new))
    for _ in range(2):  # as torchrun would: it ends at the same step, and so do the checkpoints
        outcomes = start(2, tmp_path, flags(2, **how), script=script)
        for outcome in outcomes:
            assert outcome.kind == "exited", f"{outcomes}"
            said = "FloatingPointError: step 7: the gradients' norm is nan"
            assert said in outcome.output, outcome.output
        assert [step_of([path]) for path in saved_in(tmp_path)] == [4, 6]
    whole, _ = whole_run(2, tmp, **how | {"keep": 99})
    assert same(state(tmp_path, 6), state(whole, 6))


def images(folder: Path) -> Path:
    """Two classes, as PNG and JPEG: one red, the other blue, and no two images are alike."""
    dice = random.Random(0)
    for part, count in (("train", 9), ("val", 3)):
        for label, color in (("blue", (20, 40, 220)), ("red", (220, 40, 20))):
            (place := folder / part / label).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (40, 32), color)
                spots = [(dice.randrange(40), dice.randrange(32)) for _ in range(200)]
                for spot in spots:
                    image.putpixel(spot, (dice.randrange(256),) * 3)
                image.save(place / f"{number}.{('png', 'jpg')[number % 2]}")
    return folder


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_a_folder_of_images_trains_resnet_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """Random crops and flips by workers, batch norm's statistics, and classes by their folders."""
    argv = [f"--data={images(tmp_path / 'data')}", "--epochs=2", "--batch=8", "--micro-batch=2"]
    argv += ["--precision=float32", "--learning-rate=0.01", "--workers=1", "--save-every=1"]
    argv += ["--keep=9", "--log-every=1"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    said = finish(2, whole, argv)
    assert "step 4 of 4, loss" in said  # 18 images: 2 steps of 2 ranks x 2 x 2
    assert re.search(r"epoch 2: \d of 6 right", said)
    model = state(whole, 4)["model.pt"]
    assert model["fc.weight"].shape == (2, 512)
    assert model["bn1.num_batches_tracked"] == 4 * 2  # not what warmed up DDP's buckets
    shutil.copytree(whole, resumed)
    forget(resumed, but=1)
    assert "goes on after step 1 of 4" in finish(2, resumed, argv)
    assert same(state(resumed, 4), state(whole, 4))
    assert not same(state(resumed, 4), state(whole, 3))


def test_restarts_on_several_nodes_want_a_store_per_round(
    script: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "rendezvous", lambda *url, **how: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *backend, **how: None)
    told = {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for shared, restarts in [("True", "3"), ("False", "3"), ("True", "0")]:
        told |= {"TORCHELASTIC_USE_AGENT_STORE": shared, "TORCHELASTIC_MAX_RESTARTS": restarts}
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        refused = contextlib.nullcontext()
        if (shared, restarts) == ("True", "3"):
            refused = pytest.raises(ValueError, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
        with refused:
            assert str(script["join"]("float32", dist.default_pg_timeout)) == "cpu"


@pytest.mark.parametrize(
    ("ranks", "changes", "told"),
    [
        (1, {"batch": 100}, "was written with batch 340, this run has 100: take the same, or"),
        (2, {"warm_up": 2}, "was written with warm_up 3, this run has 2: take the same, or"),
    ],
)
def test_what_changes_the_result_is_refused(
    ranks: int, changes: dict, told: str, tmp: Path
) -> None:
    folder, _ = whole_run(1, tmp)
    outcomes = start(ranks, folder, flags(1, **changes))
    assert {outcome.kind for outcome in outcomes} == {"exited"}
    assert told in outcomes[0].output


def lock_twice(folder: Path) -> str:
    script = runpy.run_path(str(SCRIPT), run_name="imported")
    lock = script["lock"]
    lock.__globals__["LOCK_SECONDS"] = 1
    said = ""
    for turn in range(2):
        if dist.get_rank() == turn:
            try:
                lock(folder)
            except ValueError as error:
                said = str(error)
        dist.barrier()
    return said


def test_two_runs_never_write_into_one_folder(tmp_path: Path) -> None:
    first, second = run(lock_twice, 2, tmp_path)
    assert first == ""
    assert "another run trains into" in second


# Checkpoints


@pytest.fixture
def script() -> dict:
    return runpy.run_path(str(SCRIPT), run_name="imported")


def write(script: dict, folder: Path, step: int, keep: int = 9) -> None:
    states = {name: {"step": step, "name": name} for name in script["PARTS"]}
    script["write_checkpoint"](folder, step, states, keep, 100)


class Died(BaseException):
    """As if the process had been killed: nobody catches it."""


def die_before(line: int) -> chaos.Lines:
    def die(fault: chaos.Fault) -> None:
        raise Died

    return chaos.Lines(str(SCRIPT), chaos.Fault("kill", line=line), die)


def test_killed_at_any_line_of_writing_it_leaves_whole_checkpoints(
    script: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)  # slow, and not what is tried here
    (before := tmp_path / "before").mkdir()
    for step in (1, 2):
        write(script, before, step)
    found = []
    done = False
    was = sys.gettrace()
    while not done:
        place = tmp_path / f"{len(found)}"
        shutil.copytree(before, place)
        try:
            sys.settrace(die_before(len(found) + 1).enter)
            write(script, place, 3, keep=2)
            done = True
        except Died:
            pass
        finally:
            sys.settrace(was)
        found.append(tuple(int(path.name[-1]) for path in script["checkpoints_in"](place)))
        newest = script["newest_whole"](place)
        assert torch.load(newest / "model.pt")["step"] == found[-1][0]
        left = {path.name for path in place.iterdir()}
        assert left == {f"step-00000000{step}" for step in found[-1]}, "leftovers, or damage"
    assert len(found) > 40
    assert found[-1] == (3, 2)
    assert {*found} == {(2, 1), (3, 2, 1), (3, 2)}


def test_all_is_on_the_disk_before_it_gets_its_name(
    script: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut cannot be tried here; the order that protects from it can be seen."""
    seen = []
    rename = Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda number: seen.append(os.readlink(f"/proc/self/fd/{number}"))
    )
    monkeypatch.setattr(Path, "rename", lambda *paths: seen.append(paths) or rename(*paths))
    write(script, tmp_path, 1)
    path = tmp_path / "step-000000001"
    *files, inside, renamed, outside = seen
    temporary = path.with_suffix(".tmp")
    assert files == [f"{temporary}/{file}" for file in (*script["PARTS"], "checksums.json")]
    assert (inside, outside) == (str(temporary), str(tmp_path))
    assert renamed == (temporary, path)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGES = {
    "a file is cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a file is empty": lambda path: os.truncate(path, 0),
    "a file is missing": Path.unlink,
    "a bit is flipped": lambda path: flip(path, 4 * path.stat().st_size),
}


@pytest.mark.parametrize("file", ["model.pt", "optimizer.pt", "progress.pt", "checksums.json"])
@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    what: str, file: str, script: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        write(script, tmp_path, step)
    DAMAGES[what](tmp_path / "step-000000002" / file)
    found = script["newest_whole"](tmp_path)
    assert torch.load(found / "model.pt")["step"] == 1
    assert f"{tmp_path}/step-000000002 is damaged: " in caplog.text
    if file != "checksums.json":
        assert file in caplog.text
    assert (tmp_path / "step-000000002.damaged").exists()  # for a search for the cause
    write(script, tmp_path, 2)  # its place is free again
    assert torch.load(script["newest_whole"](tmp_path) / "model.pt")["step"] == 2


def test_a_disk_that_fails_puts_no_checkpoint_aside(script: dict, tmp_path: Path) -> None:
    for step in (1, 2):
        write(script, tmp_path, step)

    def failing(path: Path, mode: str) -> io.BufferedReader:
        if "step-000000002" in str(path):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return open(path, mode)

    script["check"].__globals__["open"] = failing
    with pytest.raises(OSError, match="Input/output error"):
        script["newest_whole"](tmp_path)
    assert len(script["checkpoints_in"](tmp_path)) == 2


def test_what_one_rank_cannot_read_ends_all(tmp: Path, tmp_path: Path) -> None:
    whole, _ = whole_run(2, tmp)
    shutil.copytree(whole, tmp_path / "copy")
    old = "check(path)  # what this rank's machine reads"
    fails = f"check(path if dist.get_rank() == 0 else folder / 'step-9')  # {old}"
    script = changed(tmp_path, (old, fails))
    outcomes = start(2, tmp_path / "copy", flags(2), script=script)
    assert {outcome.kind for outcome in outcomes} == {"exited"}, f"{outcomes}"
    for outcome in outcomes:
        assert "ValueError: rank 1 on " in outcome.output
    assert not list(tmp_path.glob("copy/checkpoints/*.damaged"))


def test_any_flipped_bit_of_the_checksums_is_noticed(script: dict, tmp_path: Path) -> None:
    write(script, tmp_path, 1)
    path = tmp_path / "step-000000001" / "checksums.json"
    for bit in range(0, 8 * path.stat().st_size, 7):
        flip(path, bit)
        with pytest.raises(ValueError, match="step-000000001 is damaged: "):
            script["check"](path.parent)
        flip(path, bit)
    script["check"](path.parent)


def test_if_none_is_whole_nothing_starts_now_or_later(script: dict, tmp_path: Path) -> None:
    for step in (1, 2):
        write(script, tmp_path, step)
        (tmp_path / f"step-00000000{step}" / "model.pt").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"is whole\. Remove the folder to start anew"):
            script["newest_whole"](tmp_path)
    assert script["newest_whole"](tmp_path / "new") is None


def test_code_in_a_checkpoint_is_not_run(tmp: Path, tmp_path: Path) -> None:
    whole, _ = whole_run(1, tmp)
    folder = tmp_path / "poisoned"
    shutil.copytree(whole, folder)
    forget(folder, but=6)
    path = checkpoint(folder, 6)
    torch.save({"weight": Poison(tmp_path / "ran")}, path / "model.pt")
    sums = json.loads((path / "checksums.json").read_text())
    sums["model.pt"] = hashlib.sha256((path / "model.pt").read_bytes()).hexdigest()
    (path / "checksums.json").write_text(json.dumps(sums))
    (outcome,) = start(1, folder, flags(1))
    assert outcome.kind == "exited"
    assert "Weights only load failed" in outcome.output
    assert not (tmp_path / "ran").exists()


class Poison:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


# Chaos: faults at moments that a seed has drawn

SEED = int(os.environ.get("CHAOS_SEED", "7"))
TIMEOUT = 12  # seconds after which ranks give up one that does not answer: where one will not
STARTS = 5
DAMAGED = ("cut off", "bit flipped", "file missing", "newest missing")
KINDS = ("kill", "kill soon", "kill while writing", "term", "term all", "stop", "fill", *DAMAGED)


@dataclass
class Told:
    """What became of one run."""

    fault: str
    fired: bool = False
    starts: int = 0
    lost: int = 0  # steps that a whole checkpoint had, and that were done again all the same
    equal: bool = False

    def __str__(self) -> str:
        fired = "fired" if self.fired else "DID NOT FIRE"
        ended = "recovered" if self.equal else "NOT RECOVERED"
        return f"{self.fault}: {fired}, {ended} in {self.starts} starts, steps lost {self.lost}"


def draw(dice: random.Random, kind: str, lines: list[tuple[int, int]]) -> chaos.Fault:
    """A fault of this kind, at one of the lines that the ranks run."""
    rank = dice.randrange(len(lines))
    most = lines[rank][0] * 9 // 10  # at the end there is nothing left to lose
    if kind == "kill while writing":
        return chaos.Fault("kill", 0, dice.randint(1, lines[0][1]), writing=True)
    if kind == "kill soon":
        return chaos.Fault("kill", rank, dice.randint(1, most), seconds=dice.uniform(0, 0.03))
    if kind == "fill":
        return chaos.Fault("fill", 0, dice.randint(most // 3, most * 2 // 3))
    if kind in DAMAGED:  # two checkpoints at least are there
        return chaos.Fault("kill", rank, dice.randint(most * 2 // 3, most))
    return chaos.Fault(kind, rank, dice.randint(1, most))


def harm(dice: random.Random, kind: str, path: Path) -> None:
    """Damage a checkpoint."""
    file = dice.choice(sorted(path.iterdir()))
    size = file.stat().st_size
    if kind == "cut off":
        os.truncate(file, dice.randrange(size))
    elif kind == "bit flipped":
        flip(file, dice.randrange(8 * size))
    elif kind == "file missing":
        file.unlink()
    else:
        shutil.rmtree(path)


@contextlib.contextmanager
def small_disk(kilobytes: int) -> Iterator[Path]:
    """A folder with so much room: in a mount namespace, which goes with the one who holds it."""
    mount = f"mount -t tmpfs -o size={kilobytes}k none /mnt && echo done && exec cat"
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": MARKED}
    with subprocess.Popen(["unshare", "-Urm", "sh", "-c", mount], **how) as holder:
        assert holder.stdout.readline() == b"done\n"
        yield Path(f"/proc/{holder.pid}") / "root" / "mnt"
        holder.stdin.close()


@functools.cache
def reference(ranks: int, tmp: Path) -> tuple[Path, list[tuple[int, int]]]:
    """The uninterrupted run, and how many lines each of its ranks ran."""
    folder = tmp / f"reference-{ranks}"
    outcomes = start(ranks, folder, flags(ranks, keep=2))
    assert {outcome.kind for outcome in outcomes} == {"returned"}, f"{outcomes}"
    return folder, [outcome.value for outcome in outcomes]


def saved_in(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in folder.glob("checkpoints/step-*") if not path.suffix)


def step_of(paths: list[Path]) -> int:
    return int(paths[-1].name.removeprefix("step-")) if paths else 0


def went_on_after(output: str) -> int:
    found = re.search(r"goes on after step (\d+)", output)
    return int(found[1]) if found else 0


def survive(ranks: int, kind: str, dice: random.Random, tmp: Path, folder: Path) -> Told:
    """Start, harm, and start again until it ends, as torchrun and its user would."""
    whole, lines = reference(ranks, tmp)
    fault = draw(dice, kind, lines)
    told = Told(f"{ranks} ranks, {kind}: {fault}")
    due = 0  # the step after which the next start has to go on
    named = ""
    while told.starts < STARTS:
        stops = kind == "stop" and not (folder / "fired").exists()
        argv = flags(ranks, keep=2, timeout=TIMEOUT if stops else 600)
        outcomes = start(ranks, folder, argv, fault.written())
        kinds = {outcome.kind for outcome in outcomes}
        assert kinds == {"returned"} or kinds & {"killed", "exited", "raised"}, "nobody gave up"
        told.starts += 1
        output = outcomes[0].output
        assert named in output, output
        told.lost += due - went_on_after(output)
        if all(outcome.kind == "returned" for outcome in outcomes):
            break
        left = saved_in(folder)
        if told.starts == 1:
            ended_as_it_should(kind, folder, outcomes)
            if kind in DAMAGED:
                newest = left.pop()
                harm(dice, kind, newest)
                named = f"{newest} is damaged: " if newest.exists() else ""
        due = step_of(left)
    told.fired = (folder / "fired").exists()
    told.equal = saved_in(folder)[-1].name == f"step-{LAST:09}" and same(
        state(folder, LAST), state(whole, LAST)
    )
    return told


def ended_as_it_should(kind: str, folder: Path, outcomes: list[Outcome]) -> None:
    """What was there when the fault came is there still; each kind has left its traces."""
    fired = json.loads((folder / "fired").read_text())
    assert step_of(saved_in(folder)) >= step_of([Path(name) for name in fired["saved"]])
    output = outcomes[0].output
    if kind == "fill":
        assert "could not be saved: [Errno 28] No space left on device" in output
        assert "The last checkpoint" not in output
        (folder / "checkpoints/balloon").unlink()
    if "leaves after step" in output:  # else SIGTERM came before the first step
        assert kind.startswith("term")
        assert {outcome.text for outcome in outcomes} == {"called sys.exit(143)"}
        left = {re.search(r"leaves after step (\d+): SIGTERM", o.output)[1] for o in outcomes}
        assert left == {str(step_of(saved_in(folder)))}  # all after the same step, and it is saved


def run_chaos(kinds: list[str], seed: int, tmp: Path, tmp_path: Path) -> list[Told]:
    dice = random.Random(seed)
    every = []
    for number, kind in enumerate(kinds):
        ranks = dice.randint(2 if kind == "stop" else 1, 4)  # one alone: nobody would notice
        (folder := tmp_path / f"{number}").mkdir()
        with contextlib.ExitStack() as disks:
            if kind == "fill":
                (folder / "checkpoints").symlink_to(disks.enter_context(small_disk(800)))
            every.append(survive(ranks, kind, dice, tmp, folder))
        print(every[-1])
    print(f"seed {seed}: {summary(every)}")
    return every


def summary(every: list[Told]) -> str:
    fired = sum(told.fired for told in every)
    recovered = sum(told.equal for told in every)
    lost = sum(told.lost for told in every)
    return f"{len(every)} runs, {fired} faults fired, {recovered} recovered, {lost} steps lost"


@pytest.mark.timeout(900)
@pytest.mark.deep
@pytest.mark.parametrize("part", range(2))
def test_chaos(part: int, tmp: Path, tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if kind != "fill" or allowed()]
    every = run_chaos(kinds, SEED + part, tmp, tmp_path)
    count = len(kinds)
    expected = f"{count} runs, {count} faults fired, {count} recovered, 0 steps lost"
    assert summary(every) == expected, "\n".join(map(str, every))
    assert all(told.lost == 0 for told in every)


# The same under the real torchrun


def torchrun(ranks: int, folder: Path, fault: chaos.Fault, restarts: int) -> tuple[int, str]:
    """Exit status, and what all said; ranks that outlive torchrun do not hold us up."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    argv += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", chaos.__file__, str(SCRIPT)]
    argv += [f"--checkpoints={folder}/checkpoints", *flags(ranks, keep=2)]
    env = MARKED | {"FAULT": fault.written(), "NOTES": str(folder), "OMP_NUM_THREADS": "1"}
    with open(folder / f"output-{restarts}", "w+") as output:  # orphans write on into their own
        how = {"stdout": output, "stderr": subprocess.STDOUT, "env": env, "cwd": folder}
        ran = subprocess.run(argv, timeout=280, **how)
        output.seek(0)
        return ran.returncode, output.read()


@pytest.mark.timeout(900)
@pytest.mark.deep
@pytest.mark.parametrize("what", ["kill", "kill agent", "term agent", "hup agent"])
def test_under_torchrun(what: str, tmp: Path, tmp_path: Path) -> None:
    whole, lines = reference(2, tmp)
    fault = chaos.Fault(what, 1, lines[1][0] * 2 // 3)
    status, said = torchrun(2, tmp_path, fault, restarts=1)
    assert (tmp_path / "fired").exists(), said
    if what != "kill":  # torchrun has ended, and its user types the same line again
        assert status == (-signal.SIGKILL if what == "kill agent" else 1), said
        status, again = torchrun(2, tmp_path, fault, restarts=0)  # orphans may still be there
        said += again
    assert status == 0, said
    assert said.count("[rank 0] goes on after step ") == 1
    assert what != "hup agent" or re.search(r"leaves after step \d+: SIGHUP", said)
    assert same(state(tmp_path, LAST), state(whole, LAST))
    assert gone()


@needs_namespaces
@pytest.mark.timeout(600)
@pytest.mark.deep
def test_a_rank_that_dies_on_one_of_two_nodes_has_all_start_anew(tmp: Path, tmp_path: Path) -> None:
    whole, lines = reference(2, tmp)
    fault = chaos.Fault("kill", 1, lines[1][0] * 2 // 3)
    here = ROOT / "launch/two_nodes_here.sh"
    argv = ["bash", str(here), "--ranks", "1", "--max-restarts", "1", chaos.__file__, str(SCRIPT)]
    argv += [f"--checkpoints={tmp_path}/checkpoints", *flags(2, keep=2, timeout=60)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = MARKED | {"FAULT": fault.written(), "NOTES": str(tmp_path), "PATH": path}
    how = {"capture_output": True, "text": True, "timeout": 500, "cwd": tmp_path}
    ran = subprocess.run(argv, env=env, **how)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "fired").exists()
    assert ran.stdout.count("[rank 0] goes on after step ") == 1
    assert same(state(tmp_path, LAST), state(whole, LAST))
    assert gone()


@needs_namespaces
@pytest.mark.timeout(900)
@pytest.mark.clock
def test_a_node_that_dies_is_done_without_and_taken_in_again(tmp_path: Path) -> None:
    """Elastic, 1 to 2 nodes: its cable is cut and its processes are killed; then it comes back."""
    argv = flags(2, precision="float32", epochs=200, timeout=8, save_every=40)
    whole = tmp_path / "whole"
    finish(2, whole, argv, changed(tmp_path, *EXACT))
    script = changed(tmp_path, *EXACT, SLOW)
    here = ROOT / "launch/two_nodes_here.sh"
    how = ["bash", str(here), "--outage", "20:50", "--nodes", "1:2", "--ranks", "1"]
    argv = [f"--checkpoints={tmp_path}/checkpoints", *argv]
    argv = [*how, "--max-restarts", "9", str(script), *argv]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        argv, env=MARKED | {"PATH": path}, capture_output=True, text=True, timeout=800, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    worlds = re.findall(r"\[rank 0\] (\d) ranks on CPUs|(node1 \w+ \w+)", ran.stdout)
    said = ["".join(found) for found in worlds]
    assert said == ["2", "node1 is dead", "1", "node1 comes back", "2"]
    last = 200 * STEPS_PER_EPOCH
    one, other = (state(folder, last)["model.pt"] for folder in (tmp_path, whole))
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-9
    assert gone()
