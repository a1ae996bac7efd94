"""Grader of 17: killed before every line, power cuts by the order of writes, bits flipped.

What was damaged is saved once more.
"""

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from course.grading import Wrong, expect, grade

FILES = ["checksums.json", "model", "optimizer", "scaler"]


class Killed(BaseException):
    """As if the process had been killed: no answer catches it."""


def parts_of(step: int, seed: int) -> dict[str, bytes]:
    dice = random.Random(f"{seed} {step}")
    return {"model": dice.randbytes(300), "optimizer": dice.randbytes(500), "scaler": b""}


def folder_with(answer, seed: int, *steps: int, keep: int = 2) -> Path:
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp")))
    for step in steps:
        parts = parts_of(step, seed)
        answer.save(folder, step, parts, keep)
        if parts != parts_of(step, seed):
            raise Wrong("save has changed the parts; they are the caller's")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def expect_found(answer, folder: Path, step: int, damaged: list[str], where: str, seed: int):
    found, parts, named = answer.newest_whole(folder)
    expect(found, step, f"{where}: newest_whole, step")
    expect(named, damaged, f"{where}: newest_whole, damaged")
    if parts != (parts_of(step, seed) if step else {}):
        raise Wrong(f"{where}: newest_whole, parts: they are not what was saved at step {step}")


def saved(answer, wire, seed: int) -> None:
    for keep in (1, 2, 3):
        folder = folder_with(answer, seed, 1, 2, 5, 12, keep=keep)
        kept = (1, 2, 5, 12)[-keep:]
        due = [f"step-{step:06}" for step in kept]
        expect(names(folder), due, f"after steps 1, 2, 5, 12 with keep={keep}, left in the folder")
        for step in kept:
            path = folder / f"step-{step:06}"
            expect(names(path), FILES, f"files in step-{step:06}")
            for name, data in parts_of(step, seed).items():
                if (path / name).read_bytes() != data:
                    raise Wrong(f"step-{step:06}/{name} does not hold what was to be saved")
            parts = parts_of(step, seed).items()
            sums = {name: hashlib.sha256(data).hexdigest() for name, data in parts}
            expect(json.loads((path / "checksums.json").read_bytes()), sums, "checksums.json")
        expect_found(answer, folder, 12, [], "nothing is damaged", seed)
        shutil.rmtree(folder)


def test_save(answer: Path, seed: int) -> None:
    """The last ones are kept, as they were given"""
    grade(answer, saved, 1, seed)


def killed(answer, wire, seed: int, over_damage: bool) -> int:
    """How many lines of the answer were tried, and files that it deletes."""
    file = answer.__file__
    os.fsync = lambda descriptor: None  # it is slow, and a kill loses nothing that was written
    unlink = os.unlink
    steps = (1, 2, 3) if over_damage else (1, 2)
    line = 0
    done = False
    while not done:
        line += 1
        folder = folder_with(answer, seed, *steps)
        if over_damage:
            damage(folder / "step-000003" / "model", "cut off", random.Random(seed))
        left = [line]

        def come_to(where, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise Killed(f"killed before {where}")

        def count(frame, event, argument, come_to=come_to):
            if frame.f_code.co_filename != file:
                return None
            if event == "line":
                come_to(f"line {frame.f_lineno} of the answer")
            return count

        def delete(path, come_to=come_to, **how):
            come_to(f"{Path(path).name} was deleted")
            unlink(path, **how)

        where = ""
        os.unlink = delete
        sys.settrace(count)
        try:
            answer.save(folder, 3, parts_of(3, seed))
            done = True
        except Killed as last:
            where = str(last)
        finally:
            sys.settrace(None)
            os.unlink = unlink
        check_after(answer, folder, where, seed, ["step-000003"] if over_damage else [])
        shutil.rmtree(folder)
    return line - 1


def check_after(answer, folder: Path, where: str, seed: int, was_damaged: list[str]) -> None:
    for path in folder.glob("step-??????"):
        if names(path) != FILES and path.name not in was_damaged:
            raise Wrong(f"{where}: half a checkpoint has the name of a whole one: ['{path.name}']")
    try:
        step, parts, damaged = answer.newest_whole(folder)
    except ValueError as error:
        raise Wrong(f"{where}: newest_whole finds none: {error}") from None
    if damaged and damaged != was_damaged:
        raise Wrong(f"{where}: half a checkpoint has the name of a whole one: {damaged}")
    if step not in (2, 3) or parts != parts_of(step, seed):
        raise Wrong(f"{where}: the newest whole checkpoint is that of step {step}")
    for first in (step + 1, 4)[step - 2 :]:  # that step once more, or the next one right away
        copy = folder.with_suffix(f".{first}")
        shutil.copytree(folder, copy)
        for again in range(first, 5):
            answer.save(copy, again, parts_of(again, seed))
        due = ["step-000003" if first == 3 else f"step-{step:06}", "step-000004"]
        expect(names(copy), due, f"{where}, then saved up to step 4: in the folder")
        shutil.rmtree(copy)


def test_killed(answer: Path, seed: int) -> None:
    """Killed before any line of save, it leaves whole checkpoints"""
    (lines,) = grade(answer, killed, 1, seed, False, deadline=60)
    if lines < 10:
        raise Wrong(f"only {lines} lines of the answer ran: is all of it in the file?")


def test_killed_again(answer: Path, seed: int) -> None:
    """The same while it saves a step whose damaged checkpoint exists"""
    grade(answer, killed, 1, seed, True, deadline=60)


def ordered(answer, wire, seed: int) -> None:
    """What is on the disk when the checkpoint gets its name, when the old one goes, and when save
    returns."""
    folder = folder_with(answer, seed, 1)
    on_disk = []
    renamed = []
    gone = []
    fsync = os.fsync

    def see_fsync(descriptor):
        on_disk.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def see(event, args):
        if event == "os.rename" and Path(os.fsdecode(args[1])).name == "step-000002":
            renamed.append((Path(os.fsdecode(args[0])), len(on_disk)))
        if event in ("os.rename", "os.remove", "shutil.rmtree") and "step-000001" in str(args[0]):
            gone.append(len(on_disk))

    os.fsync = see_fsync
    sys.addaudithook(see)
    answer.save(folder, 2, parts_of(2, seed), keep=1)
    if not renamed:
        raise Wrong("step-000002 never got its name by a rename: write elsewhere, then rename")
    source, when = renamed[0]
    for name in (*parts_of(2, seed), "checksums.json"):
        if str(source / name) not in on_disk[:when]:
            raise Wrong(f"a power cut: step-000002 has its name, and {name} is not on the disk")
    if str(source) not in on_disk[:when]:
        raise Wrong(
            "a power cut: step-000002 has its name, and its files' names are not on the disk"
        )
    if str(folder) not in on_disk[when:]:
        raise Wrong("a power cut after save: the name step-000002 itself is not on the disk")
    if gone and str(folder) not in on_disk[when : gone[0]]:
        raise Wrong("a power cut: step-000001 is gone, and the name step-000002 not on the disk")
    shutil.rmtree(folder)
    folder = folder_with(answer, seed, 1, 2, keep=2)
    on_disk.clear()
    gone.clear()
    answer.save(folder, 2, parts_of(2, seed), keep=1)  # who saved it was killed before its flush
    if gone and str(folder) not in on_disk[: gone[0]]:
        there = "step-000002 was there already, its name not on the disk, and step-000001 is gone"
        raise Wrong(f"a kill, save once more, a power cut: {there}")
    shutil.rmtree(folder)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_power_cut(answer: Path, seed: int) -> None:
    """All is on the disk before it gets its name, and then the name"""
    grade(answer, ordered, 1, seed)


DAMAGE = ["missing", "a bit is flipped", "its first bit is flipped", "cut off"]
DAMAGE += ["a 7, and nothing else", "longer than it was"]


def damage(path: Path, how: str, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "a bit is flipped":
        bit = dice.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    elif how == "its first bit is flipped":
        data[0] ^= 128  # no text any more
    elif how == "a 7, and nothing else":
        data[:] = b"7"  # JSON, and no dictionary
    elif how == "longer than it was":
        data += b"7"
    elif how == "cut off":
        del data[dice.randrange(len(data)) :]
    path.write_bytes(data)


def read(answer, wire, seed: int) -> None:
    dice = random.Random(seed)
    folder = folder_with(answer, seed, 1)
    for step, due in ((1, parts_of(1, seed)), (2, None)):
        what = f"read_whole of a checkpoint that {'is whole' if due else 'does not exist'}"
        expect(answer.read_whole(folder / f"step-{step:06}"), due, what)
    shutil.rmtree(folder)
    for how in DAMAGE:
        for file in ("model", "optimizer", "checksums.json"):
            folder = folder_with(answer, seed, 1, 2, 3, keep=3)
            damage(folder / "step-000003" / file, how, dice)
            there = names(folder)
            where = f"{file} of step-000003: {how}"
            expect_found(answer, folder, 2, ["step-000003"], where, seed)
            expect(answer.read_whole(folder / "step-000003"), None, f"{where}: read_whole of it")
            damage(folder / "step-000002" / file, how, dice)
            both = ["step-000003", "step-000002"]
            expect_found(answer, folder, 1, both, f"{where}, and of step-000002", seed)
            expect(names(folder), there, f"{where}: the folder afterwards")
            shutil.rmtree(folder)
    folder = folder_with(answer, seed, 1, 2, 3, keep=3)
    damage(folder / "step-000002" / "model", "cut off", dice)
    expect_found(answer, folder, 3, [], "an older one is damaged", seed)
    damage(folder / "step-000003" / "scaler", "missing", dice)
    both = ["step-000003", "step-000002"]
    expect_found(answer, folder, 1, both, "an empty file is missing", seed)
    shutil.rmtree(folder)


def test_damaged(answer: Path, seed: int) -> None:
    """A damaged one is named, and the one before it used"""
    grade(answer, read, 1, seed, deadline=30)


def again(answer, wire, seed: int) -> None:
    """A job goes on from the checkpoint before a damaged one, and comes to its step again."""
    dice = random.Random(seed)
    for how in ("missing", "a bit is flipped", "cut off"):
        for file in ("model", "checksums.json"):
            folder = folder_with(answer, seed, 1, 2, 3)
            damage(folder / "step-000003" / file, how, dice)
            where = f"{file} of step-000003: {how}"
            expect_found(answer, folder, 2, ["step-000003"], where, seed)
            copy = folder.with_suffix(".4")
            shutil.copytree(folder, copy)
            answer.save(copy, 4, parts_of(4, seed))
            due = ["step-000002", "step-000004"]
            expect(names(copy), due, f"{where}, and step 4 saved: left in the folder")
            answer.save(folder, 3, parts_of(3, seed))
            where += ", and step 3 saved once more"
            expect_found(answer, folder, 3, [], where, seed)
            expect(names(folder), ["step-000002", "step-000003"], f"{where}: left in the folder")
            before = (folder / "step-000003").stat().st_ino
            answer.save(folder, 3, parts_of(3, seed))
            if (folder / "step-000003").stat().st_ino != before:
                raise Wrong(f"{where}: saved once more while it is whole: it is another folder")
            expect_found(answer, folder, 3, [], f"{where}, twice", seed)
            shutil.rmtree(copy)
            shutil.rmtree(folder)


def test_saved_again(answer: Path, seed: int) -> None:
    """A step whose damaged checkpoint exists can be saved, and a damaged one is not kept"""
    grade(answer, again, 1, seed, deadline=30)


def tidied(answer, wire, seed: int) -> None:
    """What is left in folders in which leftovers lie, and more checkpoints than are kept."""
    for step, due in ((3, ["step-000002", "step-000003"]), (4, ["step-000003", "step-000004"])):
        folder = folder_with(answer, seed, 1, 2, 3, keep=3)
        shutil.copytree(folder / "step-000003", folder / "step-000005.tmp")
        (folder / "step-000002.damaged").mkdir()
        before = (folder / "step-000003").stat().st_ino
        answer.save(folder, step, parts_of(step, seed))
        where = f"steps 1 to 3, step-000005.tmp and step-000002.damaged, then step {step} saved"
        expect(names(folder), due, f"{where}: left in the folder")
        if (folder / "step-000003").stat().st_ino != before:
            raise Wrong(f"{where}: step-000003 was whole, and is another folder now")
        shutil.rmtree(folder)
    folder = folder_with(answer, seed, 1, 2, 3, keep=3)
    damage(folder / "step-000002" / "model", "missing", random.Random(seed))
    answer.save(folder, 3, parts_of(3, seed))
    where = "step 3 is there, whole, step 2 damaged, and step 3 saved once more"
    expect(names(folder), ["step-000001", "step-000003"], f"{where}: left in the folder")
    shutil.rmtree(folder)
    folder = folder_with(answer, seed, 5, 1, 2)
    expect(names(folder), ["step-000002", "step-000005"], "after steps 5, 1, 2: left in the folder")
    shutil.rmtree(folder)


def test_tidied(answer: Path, seed: int) -> None:
    """Leftovers and old ones go, also where the step is there already"""
    grade(answer, tidied, 1, seed)


def nothing(answer, wire, seed: int) -> None:
    folder = folder_with(answer, seed)
    expect_found(answer, folder, 0, [], "an empty folder", seed)
    (folder / "step-000001.tmp").mkdir()
    expect_found(answer, folder, 0, [], "a folder with nothing but step-000001.tmp", seed)
    for step in (1, 2):
        answer.save(folder, step, parts_of(step, seed))
    for step in (1, 2):
        (folder / f"step-{step:06}" / "model").unlink()
    try:
        got = answer.newest_whole(folder)
    except ValueError as error:
        for name in ("step-000001", "step-000002"):
            if name not in str(error):
                raise Wrong(f"no checkpoint is whole, and the error does not name {name}") from None
    else:
        raise Wrong(f"no checkpoint is whole, and newest_whole starts anew: {got}")
    shutil.rmtree(folder)


def test_none(answer: Path, seed: int) -> None:
    """Without any it starts from nothing; without a whole one it refuses"""
    grade(answer, nothing, 1, seed)


def opened(answer, wire, seed: int) -> list[dict]:
    """How often each file is opened: when a checkpoint is saved, to write; when it is saved once
    more, to write; when it is loaded."""
    folder = folder_with(answer, seed)
    seen = []
    sys.addaudithook(lambda event, args: event == "open" and seen.append(args))
    found = []
    for call in ("save", "save", "newest_whole"):
        seen.clear()
        if call == "save":
            answer.save(folder, 1, parts_of(1, seed))
            counted = [path for path, _, flags in seen if flags & (os.O_WRONLY | os.O_RDWR)]
        else:
            answer.newest_whole(folder)
            counted = [path for path, _, _ in seen]
        count = Counter(Path(str(path)).name for path in counted)
        found.append({name: count[name] for name in FILES})
    shutil.rmtree(folder)
    return found


def test_once(answer: Path, seed: int) -> None:
    """Each file is written once, and read once"""
    ((written, again, read_back),) = grade(answer, opened, 1, seed)
    once = dict.fromkeys(FILES, 1)
    never = dict.fromkeys(FILES, 0)
    expect(written, once, "save: how often each file is opened to write")
    expect(again, never, "save of a step that is there, whole: files opened to write")
    expect(read_back, once, "newest_whole: how often each file is opened")


def everywhere(answer, wire, seed: int) -> tuple:
    """What is loaded of no checkpoint and of two, what is said of damaged ones; calls of each."""
    folder = Path("/nowhere/at/all")
    if dist.get_rank() == 0:
        folder = folder_with(answer, seed)
    nothing = answer.load_everywhere(folder)
    calls = [[event.op for event in wire.calls()]]
    if dist.get_rank() == 0:
        for step in (1, 2):
            answer.save(folder, step, parts_of(step, seed))
        damage(folder / "step-000002" / "model", "missing", random.Random(seed))
    wire.events.clear()
    found = answer.load_everywhere(folder)
    calls.append([event.op for event in wire.calls()])
    if dist.get_rank() == 0:
        damage(folder / "step-000001" / "model", "missing", random.Random(seed))
    said = "nothing was raised"
    wire.events.clear()
    try:
        answer.load_everywhere(folder)
    except ValueError as error:
        said = str(error)
    calls.append([event.op for event in wire.calls()])
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return nothing, found, said, calls


@pytest.mark.parametrize("n", [1, 3])
def test_everywhere(answer: Path, seed: int, n: int) -> None:
    """Rank 0 decides for all, what to load and what to raise, on {n} ranks"""
    told = grade(answer, everywhere, n, seed)
    for rank, (nothing, found, said, _) in enumerate(told):
        expect(tuple(nothing), (0, {}, []), f"rank {rank}: load_everywhere of an empty folder")
        due = (1, parts_of(1, seed), ["step-000002"])
        expect(tuple(found), due, f"rank {rank}: load_everywhere")
        if "step-000002" not in said or "step-000001" not in said or said != told[0][2]:
            raise Wrong(f"rank {rank}: none is whole, and load_everywhere says: {said}")
    for rank, (_, _, _, calls) in enumerate(told):
        for one in calls if n > 1 else []:  # one rank alone has nobody to tell
            expect(one, ["broadcast", "broadcast"], f"rank {rank}: its calls")
