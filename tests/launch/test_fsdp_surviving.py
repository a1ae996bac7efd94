"""The file that shards and survives: it ends with the same bits, or on other ranks nearly so."""

import errno
import functools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from course.lessons import ROOT
from course.ranks import Outcome, attempt, run
from tests.helpers.leftovers import MARKED, gone
from tests.helpers.namespaces import needs_namespaces
from tests.helpers.warm_launch import run_warm
from tests.launch.test_surviving import DAMAGES, flip, same, small_disk
from tests.launch.test_training import MISSING, Node, pretend, start_on

SCRIPT = ROOT / "launch/fsdp_surviving.py"
STEPS, BATCH, T, COUNT = 8, 6, 16, 24  # of 48 samples: two epochs, and four ranks leave some idle
LR = 1e-3


def flags(data: Path, /, **changes: object) -> list[str]:
    chosen = {"data": data, "steps": STEPS, "batch": BATCH, "context": T, "micro_batch": 1}
    chosen |= {"save_every": 2, "keep": 99, "warmup": 2, "precision": "float32", "log_every": 1}
    chosen |= {"learning_rate": LR} | changes
    return [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def data(tmp: Path) -> Path:
    """Random tokens; the first of each sample is the number of its place in the file."""
    tokens = np.random.default_rng(0).integers(0, 256, COUNT * T + 1, dtype=np.uint16)
    tokens[:-1:T] = np.arange(COUNT)
    np.save(tmp / "tokens.npy", tokens)
    return tmp / "tokens.npy"


def play(script: str, folder: str, argv: list[str], env: dict[str, str]) -> None:
    """On each rank: run the file as `python SCRIPT` does."""
    os.chdir(folder)
    os.environ |= env
    sys.argv = [script, *(word.replace("{rank}", os.environ["RANK"]) for word in argv)]
    runpy.run_path(script, run_name="__main__")


def start(
    ranks: int, folder: Path, argv: list[str], script: Path = SCRIPT, **env: object
) -> list[Outcome]:
    folder.mkdir(exist_ok=True)
    env = {name: str(value) for name, value in env.items()}
    how = {"deadline": 120, "quiet": 90, "group": False}
    return attempt(play, ranks, str(script), str(folder), argv, env, **how)


def finish(ranks: int, folder: Path, argv: list[str], script: Path = SCRIPT) -> str:
    """Run to the end; what all ranks said."""
    outcomes = start(ranks, folder, argv, script)
    assert {outcome.kind for outcome in outcomes} == {"returned"}, f"{outcomes}"
    return "".join(outcome.output for outcome in outcomes)


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    source = SCRIPT.read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    folder.mkdir(exist_ok=True)
    (path := folder / "changed.py").write_text(source)
    return path


def checkpoint(folder: Path, step: int) -> Path:
    return folder / f"checkpoints/step-{step:09}"


def state(folder: Path, step: int) -> dict:
    """Weights, moments and groups as one process holds them."""
    whole = folder / "whole.pt"
    dcp_to_torch_save(checkpoint(folder, step), whole)
    return torch.load(whole, weights_only=True)


def saved_in(folder: Path) -> list[int]:
    paths = [path for path in folder.glob("checkpoints/step-*") if not path.suffix]
    return sorted(int(path.name.removeprefix("step-")) for path in paths)


def leave(whole: Path, folder: Path, *steps: int) -> Path:
    """A copy of a run that has only these checkpoints."""
    shutil.copytree(whole, folder)
    for step in {*saved_in(folder)} - {*steps}:
        shutil.rmtree(checkpoint(folder, step))
    return folder


@functools.cache
def whole_run(data: Path, ranks: int = 2) -> Path:
    """The folder of a run that nothing interrupts; made once."""
    folder = data.parent / f"whole-{ranks}"
    finish(ranks, folder, flags(data))
    return folder


# Exactly, on as many ranks

TERM = "        stop.ask()\n"
TERMINATED = (
    TERM,
    "        last_rank = trainer.rank + 1 == trainer.ranks\n"
    "        if last_rank and str(trainer.step) == os.environ.get('TERM_AT'):\n"
    f"            os.kill(os.getpid(), signal.SIGTERM)\n{TERM}",
)


def test_told_to_end_all_save_the_same_step_and_go_on_with_the_same_bits(
    data: Path, tmp_path: Path
) -> None:
    script = changed(tmp_path, TERMINATED)
    outcomes = start(2, tmp_path, flags(data), script, TERM_AT=4)  # no step that is saved anyhow
    assert {outcome.text for outcome in outcomes} == {"called sys.exit(143)"}, f"{outcomes}"
    for outcome in outcomes:
        assert "leaves after step 5: SIGTERM" in outcome.output
    assert saved_in(tmp_path) == [2, 4, 5]
    assert "goes on after step 5 of 8, written by 2 ranks" in finish(2, tmp_path, flags(data))
    assert same(state(tmp_path, STEPS), state(whole_run(data), STEPS))
    assert not same(state(tmp_path, STEPS), state(whole_run(data), STEPS - 2))  # it can say no


WRITE = "            written = super().write_data(plan, planner)\n"
SUM = '            sync(self.path / f"{name}.sum", checksum(self.path / name))\n'
FINISH = "        super().finish(metadata, results)\n"
SUMS = "        sync(self.path / CHECKSUMS, json.dumps(sums))\n"
RENAME = "        self.path.rename(self.final)  # at this moment it begins to exist\n"
NAMED = "        sync(self.final.parent)\n"
TIDY = "        remove_leftovers(self.final.parent)\n"
PHASES = {  # which rank dies before which line of the fourth step's save; what is there then
    "before one of the shards": (1, WRITE, [2]),
    "before a shard's checksum": (1, SUM, [2]),
    "before the metadata": (0, FINISH, [2]),
    "before the list of checksums": (0, SUMS, [2]),
    "before it has its name": (0, RENAME, [2]),
    "when it has its name": (0, NAMED, [2, 4]),
    "before it is tidied up": (0, TIDY, [2, 4]),
}


def killed_before(line: str, rank: int) -> tuple[str, str]:
    space = line[: len(line) - len(line.lstrip())]
    test = f"self.progress['step'] == 4 and dist.get_rank() == {rank}"
    once = f"{space}if {test} and not os.path.exists('fired'):\n"
    die = f"{space}    open('fired', 'x').close()\n{space}    os.kill(os.getpid(), 9)\n"
    return line, f"{once}{die}{line}"


def survive_a_kill(what: str, data: Path, folder: Path) -> None:
    rank, line, there = PHASES[what]
    script = changed(folder, killed_before(line, rank))
    outcomes = start(2, folder, flags(data), script)
    assert (folder / "fired").exists(), f"{outcomes}"
    assert outcomes[rank].text.startswith("by SIGKILL"), f"{outcomes}"
    assert saved_in(folder) == there
    said = finish(2, folder, flags(data), script)
    assert f"goes on after step {there[-1]} of 8" in said
    assert same(state(folder, STEPS), state(whole_run(data), STEPS))
    assert not [*folder.glob("checkpoints/*.tmp")]


def test_killed_in_a_save_it_goes_on_from_the_one_before(data: Path, tmp_path: Path) -> None:
    survive_a_kill("before it has its name", data, tmp_path)


@pytest.mark.night
@pytest.mark.parametrize("what", [what for what in PHASES if what != "before it has its name"])
def test_killed_in_any_phase_of_a_save(what: str, data: Path, tmp_path: Path) -> None:
    survive_a_kill(what, data, tmp_path)


def test_a_flipped_bit_is_named_and_the_checkpoint_before_used(data: Path, tmp_path: Path) -> None:
    folder = leave(whole_run(data), tmp_path / "run", 4, 6)
    shard = checkpoint(folder, 6) / "__1_0.distcp"
    flip(shard, 4 * shard.stat().st_size)
    said = finish(2, folder, flags(data))
    assert re.search(r"step-000000006 is damaged: __1_0.distcp does not have the checksum", said)
    assert "goes on after step 4 of 8" in said
    assert same(state(folder, STEPS), state(whole_run(data), STEPS))
    assert checkpoint(folder, 6).with_suffix(".damaged").exists()  # for a search for the cause
    assert saved_in(folder) == [4, 6, 8]  # its place was free again


def look_for_damage(folder: str) -> list[str]:
    """What is said of each way to harm each file of the newest of two checkpoints."""
    script = runpy.run_path(str(SCRIPT), run_name="imported")
    places = Path(folder)
    newest = sorted(places.glob("step-*"))[-1]
    copy = places.parent / "copy"
    said = []
    for name in sorted(path.name for path in newest.iterdir() if path.suffix != ".sum"):
        for what, harm in DAMAGES.items():
            if dist.get_rank() == 0:
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(places, copy)
                harm(copy / newest.name / name)
            dist.barrier()
            found = script["newest_whole"](copy)
            aside = copy / f"{newest.name}.damaged"
            said.append(f"{name}, {what}: {found.name}, {aside.exists()}")
            dist.barrier()
    return said


@pytest.mark.night
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_damage_to_each_file_is_noticed(ranks: int, data: Path, tmp_path: Path) -> None:
    folder = leave(whole_run(data), tmp_path / "run", 4, 6)
    files = ["__0_0.distcp", "__1_0.distcp", ".metadata", "checksums.json", "progress.json"]
    for said in run(look_for_damage, ranks, str(folder / "checkpoints"), deadline=90):
        assert {line.partition(",")[0] for line in said} == {*files}
        assert len(said) == len(files) * len(DAMAGES)
        assert {line.partition(": ")[2] for line in said} == {"step-000000004, True"}


def test_only_step_and_digits_is_a_checkpoint(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-best", "step-0-old", "step-8.damaged", "step-7.1.tmp"):
        (tmp_path / name).mkdir()
    found = runpy.run_path(str(SCRIPT), run_name="imported")["checkpoints_in"](tmp_path)
    assert [path.name for path in found] == ["step-10", "step-9"]


def look_in_vain(folder: Path) -> str:
    """What is said where rank 1 gets an error of its disk."""
    look = runpy.run_path(str(SCRIPT), run_name="imported")["newest_whole"]

    def broken(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    if dist.get_rank():
        look.__globals__["checksum"] = broken
    try:
        return str(look(folder))
    except ValueError as error:
        return str(error)


@pytest.mark.night
def test_an_error_of_the_disk_is_no_damage_and_an_earlier_damaged_one_stays(tmp_path: Path) -> None:
    (tmp_path / "step-1.damaged").mkdir()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/checksums.json").write_text("{}")
    names = {path.name for path in tmp_path.iterdir()}
    (tmp_path / "step-1/.metadata").touch()
    (tmp_path / "step-1/progress.json").touch()
    for said in run(look_in_vain, 2, tmp_path):
        assert re.search(r"cannot be read, and may be whole: rank 1 .*Input/output error", said)
    assert {path.name for path in tmp_path.iterdir()} == names
    for said in run(look_in_vain, 1, tmp_path):  # without the error: its checksums are wrong
        assert "is whole. Remove the folder" in said
    assert len([*tmp_path.glob("step-1.*damaged")]) == 2


@pytest.mark.night
def test_if_none_is_whole_nothing_starts_now_or_later(data: Path, tmp_path: Path) -> None:
    folder = leave(whole_run(data), tmp_path / "run", 6)
    (checkpoint(folder, 6) / "__0_0.distcp").unlink()
    for _ in range(2):
        for outcome in start(2, folder, flags(data)):
            assert outcome.kind == "exited"
            assert "is whole. Remove the folder to start anew" in outcome.output


UPDATE = "        self.optimizer.step()\n"
STOPPED = (
    UPDATE,
    "        if self.step == 4 and self.rank and not os.path.exists('fired'):\n"
    f"            open('fired', 'x').close()\n            os.kill(os.getpid(), 19)\n{UPDATE}",
)


@pytest.mark.night
def test_a_rank_that_hangs_is_given_up_and_all_goes_on(data: Path, tmp_path: Path) -> None:
    script = changed(tmp_path, STOPPED)
    outcomes = start(2, tmp_path, flags(data, timeout=12), script)
    assert outcomes[0].kind == "exited", f"{outcomes}"
    assert (tmp_path / "fired").exists()
    said = finish(2, tmp_path, flags(data, timeout=60), script)
    assert re.search(r"goes on after step [24] of 8", said)
    assert same(state(tmp_path, STEPS), state(whole_run(data), STEPS))


def lock_twice(folder: Path) -> str:
    lock = runpy.run_path(str(SCRIPT), run_name="imported")["lock"]
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


@pytest.mark.night
def test_two_runs_never_write_into_one_folder(tmp_path: Path) -> None:
    first, second = run(lock_twice, 2, tmp_path)
    assert first == ""
    assert "another run trains into" in second


BAD = "            loss = loss / (self.args.batch * self.args.context)"
WORSE = "            loss = loss * (float('nan') if self.step == 4 and self.rank else 1)\n"
NAN = (BAD, f"{WORSE}{BAD}")


def test_what_is_not_finite_on_one_rank_is_stepped_and_saved_by_none(
    data: Path, tmp_path: Path
) -> None:
    script = changed(tmp_path, NAN)
    for outcome in start(2, tmp_path, flags(data), script):
        assert outcome.kind == "exited", f"{outcome}"
        assert "FloatingPointError: step 5: the gradients' norm is nan" in outcome.output
    assert saved_in(tmp_path) == [2, 4]  # the latter was under way
    assert same(state(tmp_path, 4), state(whole_run(data), 4))


# On other numbers of ranks: in float64, so that what is not rounding shows

DOUBLE = (
    ("CHECKSUMS = ", "torch.set_default_dtype(torch.float64)\nCHECKSUMS = "),
    (".flatten(0, 1).float()", ".flatten(0, 1).double()"),
)
SHOWN = "            rows_BT = rows_BT.to(self.device)\n"
TOLD = (SHOWN, f'            print("took", *rows_BT[:, 0].tolist(), flush=True)\n{SHOWN}')
# A gradient adds up BATCH * T terms, in another order: so many roundings of 2^-53. Where the terms
# cancel to a millionth, that is 1e-8 of the gradient, and Adam moves a weight by LR times it.
ATOL = STEPS * LR * BATCH * T * 2**-53 * 1e6


def farthest(one: object, other: object) -> float:
    """The largest difference of two states' tensors."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((farthest(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, torch.Tensor):
        return (one - other).abs().max().item()
    return 0.0


def distance(one: Path, other: Path) -> float:
    """How far weights and moments are from each other after the last step."""
    states = [state(folder, STEPS) for folder in (one, other)]
    for part in states:
        part["optim_state_dict"] = part["optim_state_dict"]["state"]
    return farthest(*states)


def took(outputs: list[str]) -> list[int]:
    """The places of the samples that were trained on."""
    lines = chain.from_iterable(re.findall(r"^took (.*)$", output, re.M) for output in outputs)
    places = chain.from_iterable(line.split() for line in lines)
    return sorted(int(place) for place in places if int(place) >= 0)


def test_4_then_2_then_3_then_4_ranks_end_as_4_do_and_take_each_sample_once(
    data: Path, tmp_path: Path
) -> None:
    script = changed(tmp_path, TERMINATED, TOLD, *DOUBLE)
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    said = finish(4, whole, flags(data), script)
    assert took([said]) == sorted(2 * [*range(COUNT)])  # two epochs
    outputs = []
    for ranks, last in [(4, 2), (2, 4), (3, 6), (4, 8)]:
        outcomes = start(ranks, parts, flags(data), script, TERM_AT=last - 1)
        status = {outcome.text or outcome.kind for outcome in outcomes}
        assert status == {"returned" if last == STEPS else "called sys.exit(143)"}, f"{outcomes}"
        outputs.append([outcome.output for outcome in outcomes])
        assert len(took(outputs[-1])) == 2 * BATCH
    assert "goes on after step 6 of 8, written by 3 ranks" in outputs[-1][0]
    assert took([*chain.from_iterable(outputs[:2])]) == [*range(COUNT)]
    assert took([*chain.from_iterable(outputs[2:])]) == [*range(COUNT)]
    assert distance(whole, parts) <= ATOL


BREAKS = {
    "the samples begin anew": ("self.ready or self.reader.submit(self.read, self.step)",
                               "self.ready or self.reader.submit(self.read, 0)"),
    "the moments are lost": ("            self.step = self.saved = progress",
                             "            self.optimizer.state.clear()\n"
                             "            self.step = self.saved = progress"),
    "what fills up counts": ("self.args.context + 1), -100)", "self.args.context + 1), 0)"),
    "the loss is a rank's mean": ("(loss * self.ranks).backward()", "loss.backward()"),
    "the rate begins anew": ("        if self.step < args.warmup:", "        if self.step > 4:"),
    "each rank draws its own": ('f"{seed} {name}"', 'f"{seed} {name} {dist.get_world_size()}"'),
}  # fmt: skip


@pytest.mark.night
@pytest.mark.parametrize("what", BREAKS)
def test_what_depends_on_the_ranks_or_is_forgotten_shows(
    what: str, data: Path, tmp_path: Path
) -> None:
    right = changed(tmp_path / "right", *DOUBLE)
    finish(2, tmp_path / "whole", flags(data), right)
    if what in ("what fills up counts", "the loss is a rank's mean", "each rank draws its own"):
        folder = tmp_path / "four"  # from the beginning
    else:
        folder = leave(tmp_path / "whole", tmp_path / "resumed", 4)
    ranks = 4 if folder.name == "four" else 2
    broken = changed(tmp_path / "broken", BREAKS[what], *DOUBLE)
    finish(ranks, folder, flags(data), broken)
    assert distance(tmp_path / "whole", folder) > 1000 * ATOL


# What else the flags promise


@pytest.mark.night
@pytest.mark.parametrize("argv", [["--recompute"], ["--offload"], ["--recompute", "--offload"]])
def test_recomputing_and_offloading_change_no_bit(
    argv: list[str], data: Path, tmp_path: Path
) -> None:
    finish(2, tmp_path, [*flags(data), *argv])
    assert same(state(tmp_path, STEPS), state(whole_run(data), STEPS))


@pytest.mark.night
@pytest.mark.parametrize("argv", [["--replicas=2"], ["--replicas=4"], ["--micro-batch=3"]])
def test_hsdp_and_micro_batches_change_only_the_order_of_sums(
    argv: list[str], data: Path, tmp_path: Path
) -> None:
    script = changed(tmp_path, *DOUBLE)
    finish(4, tmp_path / "plain", flags(data), script)
    finish(4, tmp_path / "other", [*flags(data), *argv], script)
    assert distance(tmp_path / "plain", tmp_path / "other") <= ATOL


@pytest.mark.night
def test_compiled_blocks_compute_the_same(data: Path, tmp_path: Path) -> None:
    script = changed(tmp_path, *DOUBLE)
    finish(2, tmp_path / "plain", flags(data), script)
    argv = [*flags(data), "--compile=aot_eager", "--recompute"]
    finish(2, tmp_path / "compiled", argv, script)
    assert distance(tmp_path / "plain", tmp_path / "compiled") <= ATOL


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+ of \d+, loss ([\d.]+)", said)]


@pytest.mark.night
def test_bfloat16_learns_as_float32_does_with_masters_in_float32(
    data: Path, tmp_path: Path
) -> None:
    argv = flags(data, steps=40, learning_rate=3e-3, save_every=40)
    plain = losses(finish(2, tmp_path / "float32", argv))
    argv = [*argv, "--precision=bfloat16"]
    rounded = losses(finish(2, tmp_path / "bfloat16", argv))
    assert plain[-1] < plain[0] - 0.5  # it learns these samples by heart
    assert max(abs(one - other) for one, other in zip(plain, rounded, strict=True)) < 0.05
    assert plain != rounded
    found = json.loads((checkpoint(tmp_path / "bfloat16", 40) / "progress.json").read_text())
    assert (found["step"], found["samples"], found["ranks"]) == (40, 40 * BATCH, 2)
    weights = state(tmp_path / "bfloat16", 40)["model_state_dict"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.night
def test_a_line_says_speed_memory_and_mfu(data: Path, tmp_path: Path) -> None:
    said = finish(1, tmp_path, flags(data, peak=0.001))
    number = r"[\d.e+-]+"
    told = f"loss {number}, norm {number}, tokens/s ({number}), TFLOP/s per rank ({number})"
    found = re.search(rf"step 2 of 8, {told}, GB {number}, MFU ({number})", said)
    speed, tera, mfu = map(float, found.groups())
    D, wide, V, L = 64, 176, 256, 2
    weights = L * (2 * D * D + 2 * D * D // 2 + 3 * D * wide) + D * V
    assert tera == pytest.approx(speed * (6 * weights + 12 * L * D * T) / 1e12, rel=0.01)
    assert mfu == pytest.approx(tera / 0.001, rel=0.01)


@pytest.mark.night
def test_the_last_stay_and_each_so_many_th_for_ever(data: Path, tmp_path: Path) -> None:
    finish(2, tmp_path, flags(data, steps=10, keep=2, keep_every=2))
    assert saved_in(tmp_path) == [4, 8, 10]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names - {"tensorboard"} == {"lock", *(f"step-{step:09}" for step in (4, 8, 10))}


FULL = '        path = self.args.checkpoints / f"step-{self.step:09}"\n'
FILLED = f"""        balloon = self.args.checkpoints / "balloon"
        if self.rank == 0 and self.step == 4:
            from tests.helpers.chaos import fill
            fill(balloon)
        if self.rank == 0 and self.step == 6:
            balloon.unlink()
        dist.barrier()
{FULL}"""


@needs_namespaces
@pytest.mark.night
def test_a_full_disk_costs_a_checkpoint_and_no_more(data: Path, tmp_path: Path) -> None:
    script = changed(tmp_path, (FULL, FILLED))
    with small_disk(16_000) as disk:
        (tmp_path / "checkpoints").symlink_to(disk)
        said = finish(2, tmp_path, flags(data), script)
        assert "step 4 could not be saved" in said
        assert "No space left on device" in said
        assert saved_in(tmp_path) == [2, 6, 8]
        assert same(state(tmp_path, STEPS), state(whole_run(data), STEPS))


def failing(number: int, *steps: int) -> tuple[str, str]:
    """Rank 1 cannot save these steps, for this reason."""
    when = f"self.progress['step'] in {steps} and dist.get_rank()"
    told = f"OSError({number}, os.strerror({number}))"
    return SUM, f"            if {when}:\n                raise {told}\n{SUM}"


# The disk's error, as torch.save hides it: in a RuntimeError of its own.
STREAM = "class Publisher(dcp.FileSystemWriter):\n"
FULL_STREAM = f"""import contextlib, io


class Full(io.BytesIO):
    def write(self, data):
        if len(data) < 2000:  # not a tensor
            return super().write(data)
        raise OSError(errno.ENOSPC, "none left")


@contextlib.contextmanager
def full(path, mode):
    yield Full()


{STREAM}"""
OPENED = "        self.final, self.progress, self.args = final, progress, args\n"
FULL_OPENED = f"""{OPENED}        if progress["step"] == 4 and dist.get_rank():
            self.fs.create_stream = full
"""
FAILED = {  # what goes wrong, whether all ends well, what is saved, what is said
    "another error": ([failing(errno.EIO, 4)], False, [2], "Input/output error"),
    "twice no room": ([failing(errno.ENOSPC, 1, 2, 4, 5)], True, [3, 6, 7, 8], "2 in a row, and 3"),
    "thrice no room": ([failing(errno.EDQUOT, 4, 5, 6)], False, [1, 2, 3], "3 in a row, and 3"),
    "hidden": ([(STREAM, FULL_STREAM), (OPENED, FULL_OPENED)], True, [2, 6, 8], "none left"),
}  # fmt: skip


def fail_to_save(what: str, data: Path, folder: Path) -> None:
    changes, well, saved, told = FAILED[what]
    script = changed(folder, *changes)
    every = 2 if saved[0] == 2 else 1
    outcomes = start(2, folder, flags(data, save_every=every), script)
    for outcome in outcomes:
        assert outcome.kind == ("returned" if well else "exited"), f"{outcomes}"
        assert re.search(r"\[rank \d\] SAVE FAILED, .*: step \d could not be saved", outcome.output)
        assert told in outcome.output
    assert saved_in(folder) == saved


def test_an_error_of_the_disk_in_a_save_ends_the_run(data: Path, tmp_path: Path) -> None:
    fail_to_save("another error", data, tmp_path)


@pytest.mark.night
@pytest.mark.parametrize("what", [what for what in FAILED if what != "another error"])
def test_no_room_is_borne_twice_in_a_row(what: str, data: Path, tmp_path: Path) -> None:
    fail_to_save(what, data, tmp_path)


# What it refuses


def test_weights_of_others_want_a_rate_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    read_flags = runpy.run_path(str(SCRIPT), run_name="imported")["read_flags"]
    for argv, rate in ([], 1e-3), (["--learning-rate=0"], 0), (["--weights=x"], None):
        monkeypatch.setattr(sys, "argv", ["train", *argv])
        if rate is None:
            with pytest.raises(SystemExit):
                read_flags()
            assert "--weights needs a --learning-rate" in capsys.readouterr().err
        else:
            assert read_flags().learning_rate == rate


@pytest.mark.night
def test_a_torch_that_is_too_old_is_refused_by_all_ranks(data: Path, tmp_path: Path) -> None:
    script = changed(tmp_path, ('"2.11.0a0"', '"99"'))
    for outcome in start(2, tmp_path, flags(data), script):
        assert "ValueError: rank 0 on " in outcome.output
        assert "Publisher needs torch 2.11 or newer, this is" in outcome.output


@pytest.mark.night
@pytest.mark.parametrize("what", MISSING)
def test_a_missing_gpu_is_refused_by_all_ranks(what: str, tmp_path: Path) -> None:
    outcomes = attempt(start_on, 2, str(SCRIPT), *MISSING[what], str(tmp_path), group=False)
    for outcome in outcomes:
        assert outcome.kind in ("raised", "exited"), f"{outcomes}"
        said = outcome.text + outcome.output
        assert re.search(r"ValueError: .*(GPU|ranks).* CUDA_VISIBLE_DEVICES= ", said), said
    assert [*tmp_path.iterdir()] == [], "it has begun"


def device_of(node: Node) -> str:
    pretend(node, 1)
    return str(runpy.run_path(str(SCRIPT), run_name="imported")["own_device"]("bfloat16"))


@pytest.mark.night
def test_a_rank_with_a_gpu_takes_it_and_one_that_wants_none_the_cpu() -> None:
    cases = {Node(8): "cuda:0", Node(0, driver=False): "cpu", Node(8, visible="-1"): "cpu"}
    for node, device in cases.items():
        assert run(device_of, 1, node, group=False) == [device]


def config(folder: Path, **changes: object) -> Path:
    """A folder with the config.json of a Llama of this file's smallest size."""
    folder.mkdir()
    plain = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 256}
    plain |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    plain |= {"model_type": "llama", "rms_norm_eps": 1e-5} | changes
    (folder / "config.json").write_text(json.dumps(plain))
    return folder


REFUSED = {
    "no such file": ({"data": "{folder}/none.npy"}, "No such file or directory"),
    "on one rank": ({"data": "{folder}/{rank}.npy"}, "rank 1 on .*No such file"),
    "fractions": ({"data": "{folder}/real.npy"}, "float64 .* one row of more than 16 integers"),
    "too few": ({"data": "{folder}/few.npy"}, "it must be one row of more than 16 integers"),
    "too large": ({"data": "{folder}/large.npy"}, "from 0 to 256, and the model knows 0 to 255"),
    "no array": ({"data": "{folder}/text.npy"}, "rank . on "),
    "context": ({"context": 65}, "--context: the model knows 64 positions"),
    "replicas": ({"replicas": 3}, "2 ranks do not make --replicas 3"),
    "scaled": ({"weights": "{folder}/scaled"}, "rope_type is llama3; here it is default alone"),
    "tied": ({"weights": "{folder}/tied"}, "tie_word_embeddings is True; here it is False alone"),
}  # fmt: skip


@pytest.mark.night
def test_input_that_does_not_fit_is_told_by_all_ranks_before_any_waits(
    data: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "0.npy", np.arange(100, dtype=np.uint8))
    np.save(tmp_path / "real.npy", np.zeros(100))
    np.save(tmp_path / "few.npy", np.arange(T))
    np.save(tmp_path / "large.npy", np.arange(257))
    (tmp_path / "text.npy").write_text("Once upon a time")
    config(tmp_path / "scaled", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    config(tmp_path / "tied", tie_word_embeddings=True)
    for what, (change, told) in REFUSED.items():
        argv = [word.replace("{folder}", str(tmp_path)) for word in flags(data, **change)]
        for outcome in start(2, tmp_path / "run", argv):
            assert outcome.kind == "exited", what
            assert re.search(rf"Error: .*{told}", outcome.output), (what, outcome.output)
    assert [*(tmp_path / "run").iterdir()] == [], "it has begun"


@pytest.mark.night
@pytest.mark.parametrize("name", ["steps", "batch", "learning_rate", "seed", "context"])
def test_what_changes_the_result_is_refused(name: str, data: Path, tmp_path: Path) -> None:
    folder = leave(whole_run(data), tmp_path / "run", 4)
    for outcome in start(2, folder, flags(data, **{name: 3})):
        assert outcome.kind == "exited"
        told = rf"was written with {name} \S+, this run has 3(\.0)?: take the same, or other"
        assert re.search(told, outcome.output), outcome.output


@pytest.mark.night
def test_ranks_with_different_flags_do_not_start(data: Path, tmp_path: Path) -> None:
    for outcome in start(2, tmp_path, flags(data, micro_batch="1{rank}")):
        assert outcome.kind == "exited", outcome
        assert "ranks were given different values of micro_batch" in outcome.output


@pytest.mark.night
def test_with_its_export_made_a_complete_run_ends_well_and_another_is_refused(
    data: Path, tmp_path: Path
) -> None:
    folder = leave(whole_run(data), tmp_path / "run", STEPS)
    argv = flags(data, export="mine")
    assert "the weights are in mine" in finish(2, folder, argv)
    assert "all steps are taken, and mine is there already" in finish(2, folder, argv)
    shutil.rmtree(checkpoint(folder, STEPS))
    for outcome in start(2, folder, argv):
        assert "--export mine is there already" in outcome.output, outcome


POINT = "        self.writer = None\n"
WATCHED = "        global SummaryWriter\n"
WATCHED += "        SummaryWriter = lambda folder, purge_step: print(purge_step)\n"


@pytest.mark.night
def test_tensorboard_keeps_the_point_of_the_step_that_was_saved(data: Path, tmp_path: Path) -> None:
    folder = leave(whole_run(data), tmp_path / "run", STEPS)
    said = finish(1, folder, flags(data), changed(folder, (POINT, f"{WATCHED}{POINT}")))
    assert f"\n{STEPS + 1}\n" in said  # from this one on, points are hidden


# Against others: one process, and Hugging Face's Llama


def one_step(data: Path, before: dict, step: int) -> dict[str, torch.Tensor]:
    """The weights after the step that follows `before`, by one process, written out."""
    script = runpy.run_path(str(SCRIPT), run_name="imported")
    sys.argv = ["train", *flags(data)]
    args = script["read_flags"]()
    shape = script["shape_of"](args, 1)
    tokens = script["Tokens"](args, shape)
    model = script["GPT"](shape).double()
    angle = torch.arange(T)[:, None] / 10_000 ** (torch.arange(0, 16, 2, dtype=torch.double) / 16)
    model.cos = angle.cos()
    model.sin = angle.sin()
    model.load_state_dict(before["model_state_dict"])
    moments = before["optim_state_dict"]["state"]
    rows = torch.stack([tokens.sample(step * BATCH + place) for place in range(BATCH)])
    logits = model(rows[:, :-1]).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).backward()
    norm = sum(weight.grad.square().sum() for weight in model.parameters()).sqrt()
    rate = LR * (0.1 + 0.9 * (1 + np.cos(np.pi * (step - 2) / (STEPS - 2))) / 2)
    after = {}
    for name, weight in model.named_parameters():
        grad = weight.grad * min(1.0, 1 / (norm + 1e-6))
        first = 0.9 * moments[name]["exp_avg"] + 0.1 * grad
        second = 0.95 * moments[name]["exp_avg_sq"] + 0.05 * grad**2
        count = step + 1
        change = first / (1 - 0.9**count) / ((second / (1 - 0.95**count)).sqrt() + 1e-8)
        decay = 0.1 if weight.ndim > 1 else 0.0
        after[name] = weight.detach() * (1 - rate * decay) - rate * change
    return after


@pytest.mark.night
def test_a_step_is_that_of_one_process_by_the_formulas(data: Path, tmp_path: Path) -> None:
    finish(3, tmp_path, flags(data), changed(tmp_path, *DOUBLE))
    expected = one_step(data, state(tmp_path, 4), 4)
    # The run saves after each second step: let it take one more from there.
    folder = leave(tmp_path, tmp_path.parent / f"{tmp_path.name}-one", 4)
    script = changed(folder, TERMINATED, *DOUBLE)
    start(3, folder, flags(data), script, TERM_AT=4)
    assert farthest(expected, state(folder, 5)["model_state_dict"]) <= ATOL / STEPS


def logits_of(argv: list[str], exported: str) -> torch.Tensor:
    """Of the model with weights from Hugging Face; it is exported, too."""
    script = runpy.run_path(str(SCRIPT), run_name="imported")
    sys.argv = ["train", *argv]
    args = script["read_flags"]()
    shape = script["shape_of"](args, dist.get_world_size())
    tokens = script["Tokens"](args, shape)
    trainer = script["Trainer"](args, torch.device("cpu"), shape, tokens)
    trainer.resume()
    script["export"](trainer.model, Path(exported), trainer.background)
    with torch.no_grad():
        return trainer.model(torch.arange(2 * T).reshape(2, T) % 256)


@pytest.mark.night
@pytest.mark.timeout(600)
def test_hugging_face_s_llama_comes_in_and_goes_out(data: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = json.loads((config(tmp_path / "plain") / "config.json").read_text())
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.arange(2 * T).reshape(2, T) % 256
    with torch.no_grad():
        expected = theirs(tokens).logits
    argv = [*flags(data), f"--weights={tmp_path}/theirs", f"--checkpoints={tmp_path}/checkpoints"]
    (tmp_path / "checkpoints").mkdir()
    for logits in run(logits_of, 2, argv, f"{tmp_path}/ours", deadline=90):
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    ours = LlamaForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    for (name, got), (_, sent) in pairs:
        assert torch.equal(got, sent.bfloat16()), name
    with torch.no_grad():
        again = ours.float()(tokens).logits
    assert (again - expected).abs().max() <= 0.1 * expected.abs().max()


# The same under the real torchrun


@pytest.mark.night
@pytest.mark.timeout(600)
def test_torchrun_starts_all_ranks_anew(data: Path, tmp_path: Path) -> None:
    script = changed(tmp_path, killed_before(RENAME, 0))
    argv = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv += ["--max-restarts=1", str(script), *flags(data)]
    ran = run_warm(argv, tmp_path, MARKED, 300)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "fired").exists()
    assert ran.stdout.count("goes on after step 2 of 8") == 1, ran.stdout
    assert same(state(tmp_path, STEPS), state(whole_run(data), STEPS))
    assert gone()


ORPHANED = (
    TERM,
    "        if trainer.step == 4 and trainer.rank and not os.path.exists('fired'):\n"
    f"            open('fired', 'x').close()\n            os.kill(os.getppid(), 9)\n{TERM}",
)


@pytest.mark.night
@pytest.mark.timeout(600)
def test_when_torchrun_dies_its_ranks_save_and_the_next_run_goes_on(
    data: Path, tmp_path: Path
) -> None:
    script = changed(tmp_path, ORPHANED)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv += [str(script), *flags(data)]
    said = []
    for number in range(2):
        with open(tmp_path / f"output-{number}", "w+") as output:  # orphans write on into their own
            how = {"stdout": output, "stderr": subprocess.STDOUT, "env": MARKED, "cwd": tmp_path}
            ran = subprocess.run(argv, timeout=250, **how)
            output.seek(0)
            said.append(output.read())
        assert ran.returncode == (0 if number else -9), said
    assert re.search(r"goes on after step [56] of 8", said[1]), said
    assert same(state(tmp_path, STEPS), state(whole_run(data), STEPS))
    assert gone()


# What it costs

RACE = ["--steps=100000", "--batch=8", "--micro-batch=2", "--precision=float32", "--warmup=1"]
TURN, TURNS = 5, 10  # steps of a turn, and turns of each


def race(folder: str) -> dict[str, float]:
    """Median seconds of a bare step, of one that can be resumed, and of a whole save."""
    os.chdir(folder)
    script = runpy.run_path(str(SCRIPT), run_name="imported")
    sys.argv = ["train", *RACE]
    args = script["read_flags"]()
    args.checkpoints.mkdir(exist_ok=True)
    shape = script["shape_of"](args, dist.get_world_size())
    tokens = script["Tokens"](args, shape)
    trainer = script["Trainer"](args, torch.device("cpu"), shape, tokens)
    trainer.resume()
    stop = script["Stop"]()
    rows = trainer.read(0)

    def bare() -> None:
        for _ in range(TURN):
            for row in rows:
                logits = trainer.model(row[:, :-1]).flatten(0, 1)
                torch.nn.functional.cross_entropy(logits, row[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), args.clip)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

    def surviving() -> None:
        for _ in range(TURN):
            stop.ask()
            trainer.train_step()
            stop.answer()

    def save() -> None:
        trainer.save()
        trainer.finish_saving(must=True)

    seconds = {act: [] for act in (bare, surviving, save)}
    for _ in range(TURNS):
        for act, found in seconds.items():
            dist.barrier()
            begun = time.perf_counter()
            act()
            dist.barrier()
            found.append(time.perf_counter() - begun)
    trainer.stager.close()
    return {act.__name__: median(found) for act, found in seconds.items()}


@pytest.mark.deep
@pytest.mark.clock
def test_surviving_costs_at_most_a_twentieth_of_a_step(tmp_path: Path) -> None:
    """Saving counts as if nothing went on meanwhile, and once in 100 steps."""
    costs = []
    for number in range(3):
        (folder := tmp_path / str(number)).mkdir()
        found = run(race, 2, str(folder), deadline=240)[0]
        bare = found["bare"] / TURN
        surviving = found["surviving"] / TURN
        costs.append((surviving + found["save"] / 100) / bare - 1)
        told = f"bare {1000 * bare:.1f} ms per step, surviving {1000 * surviving:.1f}"
        print(f"{told}, a save {1000 * found['save']:.0f}: {costs[-1]:+.1%}")
    assert median(costs) <= 0.05
