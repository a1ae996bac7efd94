"""The lesson on sharded checkpoints: files as others read them, and each broken line's claim."""

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fsdp/06_fsdp_checkpoint.py"


def saved_on_all(folder: Path) -> tuple[list[str], dict, list[str]]:
    """Save on all ranks over what another job left; what lies there, and what is found damaged."""
    lesson = load(LESSON)
    lesson.RANK = dist.get_rank()
    lesson.WORLD_SIZE = dist.get_world_size()
    mesh = init_device_mesh("cpu", (lesson.WORLD_SIZE,))
    if lesson.RANK == 0:
        left = folder / "step-000001.tmp"
        left.mkdir()
        (left / "__7_0.distcp").write_bytes(b"of a job with more ranks")
    dist.barrier()
    lesson.save_sharded(*lesson.new_training(mesh), folder / "step-000001")
    path = lesson.newest_whole(folder)
    names = sorted(file.name for file in path.iterdir())
    sums = json.loads((path / lesson.CHECKSUMS).read_text())
    return names, sums, lesson.find_damage(path)


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_published_is_whole_and_nothing_else(n: int, tmp_path: Path) -> None:
    ranks = run(saved_on_all, n, tmp_path)
    shards = [f"__{rank}_0.distcp" for rank in range(n)]
    for names, sums, damage in ranks:
        assert names == sorted([".metadata", "checksums.json", *shards])
        assert sorted(sums) == sorted([".metadata", *shards])
        assert damage == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def judged(path: Path, harm: str) -> list[str]:
    lesson = load(LESSON)
    lesson.RANK = dist.get_rank()
    lesson.WORLD_SIZE = dist.get_world_size()
    if lesson.RANK == 0:
        exec(harm, {"path": path})
    dist.barrier()
    return lesson.find_damage(path)


HARMS = {
    "a file is missing": ("(path / 'b').unlink()", "b: missing"),
    "a file is shorter": ("(path / 'b').write_bytes(b'')", "b: 0 bytes instead of 9"),
    "a file is longer": ("(path / 'b').write_bytes(bytes(11))", "b: 11 bytes instead of 9"),
    "a bit is flipped": ("(path / 'b').write_bytes(b'the same!'[:-1] + b' ')", "b: another"),
    "no list of checksums": ("(path / 'checksums.json').unlink()", "checksums.json: "),
    "the list is no JSON": ("(path / 'checksums.json').write_text('{')", "checksums.json: "),
    "the list is a number": ("(path / 'checksums.json').write_text('7')", "checksums.json: "),
    "a sum is missing": (
        "(path / 'checksums.json').write_text('{\"b\": {\"bytes\": 9}}')",
        "b: another",
    ),
    "a sum is empty": ("(path / 'checksums.json').write_text('{\"b\": {}}')", "checksums.json: "),
}


@pytest.mark.parametrize("what", HARMS)
def test_all_ranks_name_the_same_damage(what: str, tmp_path: Path) -> None:
    """Whichever rank reads the file, and each file is named once."""
    lesson = load(LESSON)
    sums = {}
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"the same!")
        sums[name] = lesson.fingerprint(tmp_path / name)
    lesson.write_durably(tmp_path / lesson.CHECKSUMS, sums)
    harm, told = HARMS[what]
    first, second = run(judged, 2, tmp_path, harm)
    assert first == second
    assert len(first) == 1
    assert first[0].startswith(told)


def refused_without_any(folder: Path) -> bool:
    with pytest.raises(ValueError, match="no whole checkpoint"):
        load(LESSON).newest_whole(folder)
    return True


def test_no_whole_checkpoint_is_no_reason_to_start_anew(tmp_path: Path) -> None:
    assert run(refused_without_any, 2, tmp_path) == [True, True]


def saved_over(folder: Path, damaged: bool) -> tuple[str, list[str], bool]:
    """Save one step again and again: what is found, all names, whether it is the first folder."""
    lesson = load(LESSON)
    lesson.RANK = dist.get_rank()
    lesson.WORLD_SIZE = dist.get_world_size()
    training = lesson.new_training(init_device_mesh("cpu", (lesson.WORLD_SIZE,)))
    path = folder / "step-000003"
    first = None
    for _ in range(3):
        lesson.save_sharded(*training, path)
        first = first or path.stat().st_ino
        dist.barrier()
        if damaged and lesson.RANK == 0:
            (path / "__0_0.distcp").write_bytes(b"")
        dist.barrier()
    lesson.save_sharded(*training, path)
    found = lesson.newest_whole(folder).name
    return found, sorted(file.name for file in folder.iterdir()), path.stat().st_ino == first


def test_a_step_whose_damaged_checkpoint_exists_is_saved_again(tmp_path: Path) -> None:
    """Every time, not only the first: what was put aside before may not stand in the way."""
    told = run(saved_over, 2, tmp_path, True)
    assert told == [("step-000003", ["step-000003", "step-000003.damaged"], False)] * 2


def test_a_whole_checkpoint_of_the_step_stays(tmp_path: Path) -> None:
    assert run(saved_over, 2, tmp_path, False) == [("step-000003", ["step-000003"], True)] * 2


def found_where_names_come_late(folder: Path) -> str:
    lesson = load(LESSON)
    lesson.RANK = dist.get_rank()
    lesson.WORLD_SIZE = dist.get_world_size()
    training = lesson.new_training(init_device_mesh("cpu", (lesson.WORLD_SIZE,)))
    for step in (1, 2):
        lesson.save_sharded(*training, folder / f"step-00000{step}")
    dist.barrier()
    if lesson.RANK == 1:  # the node of rank 1 does not yet see the newest name
        lesson.newest_first = lambda folder: [folder / "step-000001"]
    return lesson.newest_whole(folder).name


def test_rank_0_lists_the_checkpoints_for_all(tmp_path: Path) -> None:
    assert run(found_where_names_come_late, 2, tmp_path) == ["step-000002"] * 2


def tensors() -> dict[str, torch.Tensor]:
    return {
        "head.weight": torch.arange(15.0).view(3, 5),
        "norm": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
        "scale": torch.tensor(3.0),
        "turned": torch.arange(6.0).view(2, 3).T,
    }


def test_safetensors_come_back(tmp_path: Path) -> None:
    lesson = load(LESSON)
    file = tmp_path / "x.safetensors"
    lesson.write_safetensors(tensors(), file)
    back = lesson.read_safetensors(file)
    assert back.keys() == tensors().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors().items())
    assert all(back[name].dtype == tensor.dtype for name, tensor in tensors().items())
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert length % 8 == 0
    assert file.stat().st_size == 8 + length + sum(t.nbytes for t in tensors().values())


def test_safetensors_own_library_reads_and_writes_the_same(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="pip install safetensors")
    lesson = load(LESSON)
    lesson.write_safetensors(tensors(), tmp_path / "ours")
    theirs = library.load_file(tmp_path / "ours")
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors().items())
    library.save_file({k: t.contiguous() for k, t in tensors().items()}, tmp_path / "theirs")
    ours = lesson.read_safetensors(tmp_path / "theirs")
    assert all(torch.equal(ours[name], tensor) for name, tensor in tensors().items())


NO_TIMES = ("        check_times(mesh, folder, options.width, background)\n", "")
HOW = ("missing", "cut off", "a bit flipped")
STEP_LOADED = {f"{how}: the step that is loaded" for how in HOW}
UNNAMED = "files in the folder without a name"
NAMED = "checkpoints that have a name"
MADE = "bytes a rank makes for the state / P"
COPIED = "async_save: bytes copied per element of a shard"
BEFORE = "loaded: elements that differ from before them"
REFUSED = "n bits flipped: files that checksums refuse"
THE_ONE_BEFORE = "the checkpoint before it: elements loaded wrong"
AGAIN = "its step saved again: the step that is loaded"
SAFE = "safetensors: elements that differ"

SAVE_AT_ONCE = """\
def save_at_once(state, storage_writer, process_group, async_stager):
    future = Future()
    future.set_result(
        dcp.save(state, storage_writer=storage_writer, process_group=process_group)
    )
    return future


def check_asynchronous("""

LINES = {
    "files under the final name, and the writer stages (Try)": (
        [
            ('path.with_suffix(".tmp")', "path"),
            ("            async_stager=stager,\n", ""),
        ],
        {UNNAMED, NAMED, COPIED},
    ),
    "a name before the files, and no list is no damage; all ranks hold all; no steps are taken": (
        [
            (
                "        return super().prepare_global_plan(plans)\n",
                "        if not self.path.is_symlink():\n"
                "            shutil.rmtree(self.final, ignore_errors=True)\n"
                "            self.path.rename(self.final)\n"
                "            self.path.symlink_to(self.final)\n"
                "        return super().prepare_global_plan(plans)\n",
            ),
            ("        self.path.rename(self.final)  # at", "        self.path.unlink()  # at"),
            ('"full_state_dict": True, "cpu_offload": True', '"full_state_dict": True'),
            ('        found.append(f"{CHECKSUMS}: {error}")\n', "        found = []\n"),
            ("    if not there[0]:\n", "    if True:\n"),
            ("        train(*training, mesh, steps=1)\n", ""),
        ],
        {
            NAMED,
            "the step that is loaded",
            f"full: {MADE}",
            "elements of the state that these steps changed",
        },
    ),
    "two die; no checksum is compared; a copy of the shards; ranks draw other data": (
        [
            (
                "        if RANK == WORLD_SIZE - 1:\n            raise",
                "        if True:\n            raise",
            ),
            ("    if fingerprint(path) != expected:\n", "    if not expected:\n"),
            (
                "tree_leaves(state_of(model, optimizer, **options))",
                "tree_leaves(deepcopy(state_of(model, optimizer, **options)))",
            ),
            (
                "generator = torch.Generator().manual_seed(0)",
                "generator = torch.Generator().manual_seed(mesh.size() * 10 + RANK)",
            ),
        ],
        {
            "ranks that DCP names as failed",
            UNNAMED,
            "a bit flipped: files refused",
            "a bit flipped: of these the damaged one",
            "a bit flipped: the step that is loaded",
            REFUSED,
            THE_ONE_BEFORE,
            f"sharded: {MADE}",
            "gone on, 1 ranks: distance / way of the steps",
        },
    ),
    "ranks keep what they find to themselves; the save blocks; one place for all tensors": (
        [
            (
                "chain(*gather_objects(damage_in(path, RANK, WORLD_SIZE)))",
                "damage_in(path, RANK, 2)",
            ),
            ("        future = dcp.async_save(\n", "        future = save_at_once(\n"),
            ("def check_asynchronous(", SAVE_AT_ONCE),
            ("PATIENCE = 60.0", "PATIENCE = 0.5"),
            ("        end = place[1]\n", "        end = place[0]\n"),
        ],
        {
            *(f"{how}: files refused" for how in HOW),
            *(f"{how}: of these the damaged one" for how in HOW),
            *STEP_LOADED,
            REFUSED,
            COPIED,
            "async_save: bytes written after three steps",
            "async_save: steps before the first byte",
            SAFE,
        },
    ),
    "Adam's state is not loaded; nothing is staged; half the precision": (
        [
            (
                "    dcp.load(state, checkpoint",
                '    dcp.load({"model": state["model"]}, checkpoint',
            ),
            (
                "    stager = DefaultStager(AT_ONCE)\n",
                "    stager = DefaultStager(AT_ONCE)\n    stager.stage = lambda state: state\n",
            ),
            (
                'write_safetensors(whole["model"], file)',
                "write_safetensors({k: v.bfloat16() for k, v in whole['model'].items()}, file)",
            ),
        ],
        {
            "cut off: loads that DCP itself refuses",  # the half that is gone is Adam's
            "n bits flipped: elements loaded wrong",
            THE_ONE_BEFORE,
            "2 -> 1 ranks: elements that differ",
            "2 -> 1 -> 2 ranks: elements that differ",
            "gone on, n ranks: elements that differ",
            "gone on, n ranks: distance / way of the steps",
            "gone on, 1 ranks: distance / way of the steps",
            COPIED,
            BEFORE,
            "safetensors: bytes of the file / P",
            SAFE,
        },
    ),
    "SGD; the oldest first; an error of another kind; a bit of a header": (
        [
            (
                "torch.optim.Adam(model.parameters(), lr=1e-3)",
                "torch.optim.SGD(model.parameters(), lr=1e-3)",
            ),
            ("not path.suffix), reverse=True)", "not path.suffix))"),
            ("data[data.index(inside) + 3]", "data[3]"),  # of a header
            ("    if not damage_in(path):\n", "    if path.exists():\n"),
            (
                "        error = raised\n",
                "        error = RuntimeError()\n        error.failures = raised.failures\n",
            ),
        ],
        {
            f"full: {MADE}",
            "full: bytes of the one file / P",
            "sharded: bytes of shards in a rank's file",
            "errors that `except Exception` would catch",
            "saved once more: the step that is loaded",
            *STEP_LOADED,
            "a bit flipped: loads that DCP itself refuses",
            "n bits flipped: elements loaded wrong",
            "n bits flipped: loads that DCP refuses",
            THE_ONE_BEFORE,
            AGAIN,
            "Adam's state forgotten: distance / way, at least",
            COPIED,
            BEFORE,
        },
    ),
    "the file that should be missing is there": (
        "inside: bytes) -> None:\n    path.unlink()\n",
        "inside: bytes) -> None:\n    pass\n",
        {
            "missing: files refused",
            "missing: of these the damaged one",
            "missing: the step that is loaded",
            "missing: loads that DCP itself refuses",
        },
    ),
}
ON_FOUR = {  # where a job of 2 ranks, and then one of 3, takes over
    "fewer ranks load nothing": (
        "            load(model, optimizer, path, smaller.get_group())\n            save_sharded",
        "            save_sharded",
        {"4 -> 2 ranks: elements that differ", "4 -> 2 -> 3 ranks: elements that differ"},
    ),
    "fewer ranks take only their old share of the sequences": (
        "x_BT.chunk(mesh.size())[mesh.get_local_rank()]",
        "x_BT.chunk(WORLD_SIZE)[RANK]",
        {"gone on, 2 ranks: distance / way of the steps"},
    ),
}
NO_DAMAGE = [
    ("        check_damage(*another, folder)\n", ""),
    ("        check_flipped_bits(*another, folder, saved)\n", ""),
]
NO_ASYNCHRONOUS = ("        check_asynchronous(mesh, folder, training, background)\n", "")


BREAKS = [
    Breaks(LINES, changes=[NO_TIMES]),
    Breaks(ON_FOUR, ranks=4, changes=[NO_TIMES, *NO_DAMAGE, NO_ASYNCHRONOUS]),
]
ON_GPUS = OnGpus([("L=16, D=width, T=1024, V=32_768, heads=width // 64", "L=2")], ranks=(1, 2))


def test_the_folder_reaches_the_disk_before_it_is_renamed_and_its_parent_after(
    tmp_path: Path,
) -> None:
    lesson = load(LESSON)
    writer = lesson.PublishingWriter(tmp_path / "step-000001")
    writer.path.mkdir(parents=True, exist_ok=True)
    (writer.path / ".metadata").write_bytes(b"x")
    written = patch.object(lesson.dcp.FileSystemWriter, "finish")
    with written, patch.object(lesson, "sync_folder") as sync:
        writer.finish(SimpleNamespace(storage_data={}), [])
    assert sync.call_args_list == [call(tmp_path / "step-000001.tmp"), call(tmp_path)]


def test_a_file_is_whole_when_it_is_flushed_and_so_is_its_folder(tmp_path: Path) -> None:
    lesson = load(LESSON)
    flushed = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append((path, path.read_text() if path.is_file() else ""))

    with patch("os.fsync", fsync):
        lesson.write_durably(tmp_path / "a", {"b": 1})
        lesson.sync_folder(tmp_path)
    assert flushed == [(tmp_path / "a", '{"b": 1}'), (tmp_path, "")]
    assert lesson.PublishingWriter(tmp_path / "step-000001").sync_files  # DCP's own files, too


def test_a_distance_is_a_length() -> None:
    """Squared, a third of the way would be a ninth, which is above a tenth as well."""
    lesson = load(LESSON)
    lesson.from_rank_0 = lambda value: value
    here = {"model": {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[5.0]])}}
    there = {"model": {"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([[9.0]])}}
    assert lesson.distance(here, there) == 5.0


def test_what_writes_in_the_background_has_a_group_of_its_own(tmp_path: Path) -> None:
    """In the training's own group it may go well, until two collectives meet."""
    lesson = load(LESSON)
    for name in ("whole_state", "state_of", "save_full", "save_sharded", "blocked", "print0"):
        setattr(lesson, name, Mock())
    lesson.new_training = lambda mesh: ()
    for name in ("whole.pt", "step-000006/a.distcp", "step-000007/a.distcp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    def time_of(save: Mock, mesh: object) -> tuple[float, float]:
        save()
        return 1.0, 2.0

    lesson.time_of = time_of
    with patch.object(lesson.dcp, "async_save") as save:
        lesson.check_times(SimpleNamespace(device_type="cpu"), tmp_path, 64, "its own")
        save.side_effect = InterruptedError
        with pytest.raises(InterruptedError):
            lesson.check_asynchronous(None, tmp_path, (), "its own")
    assert [call.kwargs["process_group"] for call in save.call_args_list] == ["its own"] * 2


def test_training_stands_still_until_the_save_returns_and_all_is_written_at_the_end() -> None:
    lesson = load(LESSON)
    asked = Mock()
    asked.clock.side_effect = [1.0, 3.0, 8.0]
    lesson.settle = asked.settle
    lesson.time = SimpleNamespace(perf_counter=asked.clock)
    with patch.object(lesson.dist, "barrier", asked.barrier):
        assert lesson.time_of(asked.save, None) == (2000.0, 7000.0)
    order = [name for name, _, _ in asked.mock_calls]
    assert order[:6] == ["barrier", "settle", "clock", "save", "settle", "clock"]
    assert order[6:] == ["save().result", "barrier", "settle", "clock"]
