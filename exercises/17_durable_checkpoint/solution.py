"""Checkpoints that a kill while writing, a power cut and a flipped bit leave whole, or named.

Task: exercises/17_durable_checkpoint/README.md.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch.distributed as dist

CHECKSUMS = "checksums.json"  # {name of a part: its sha256 in hexadecimal}


def write(path: Path, data: bytes) -> None:
    """Write a file, and return when it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush(folder: Path) -> None:
    """Return when the names in this folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints: folders named step-000012, and so on; not step-000012.tmp."""
    return sorted((path for path in folder.glob("step-*") if not path.suffix), reverse=True)


def remove_leftovers(folder: Path) -> None:
    """Delete step-000012.tmp, step-000012.damaged and the like: no process is writing them."""
    for leftover in folder.glob("step-*.*"):
        shutil.rmtree(leftover)


def read_whole(path: Path) -> dict[str, bytes] | None:
    """The parts of the checkpoint at `path`, all with their checksums; None if it is not whole.

    It is not if it does not exist, a file is missing or cut off, a bit is flipped, or CHECKSUMS is
    unreadable.
    """
    # --- yours
    try:
        sums = json.loads((path / CHECKSUMS).read_bytes())
        parts = {name: (path / name).read_bytes() for name in sums}
        if all(hashlib.sha256(parts[name]).hexdigest() == sums[name] for name in sums):
            return parts
    except (OSError, ValueError, TypeError):
        pass
    return None
    # --- end


def save(folder: Path, step: int, parts: dict[str, bytes], keep: int = 2) -> None:
    """Write the checkpoint folder/step-000012: a file per part, and CHECKSUMS.

    parts: the bytes of each part by its name, one part or more; a part may be empty

    Wherever the process is killed, this checkpoint is there whole or not at all, and the ones
    before it are whole. When it has its name, files and names are on the disk, and only then are
    old ones deleted: a power cut loses nothing. At the end the last `keep` whole checkpoints are
    left, those of the highest steps, and nothing else that `save` ever made here: not even what a
    process left that was killed.

    If a whole checkpoint of this step is there, nothing is written, and the rest is done as ever.
    A damaged one gives way.
    """
    # --- yours
    final = folder / f"step-{step:06}"
    remove_leftovers(folder)
    if read_whole(final) is None:
        temporary = final.with_suffix(".tmp")
        temporary.mkdir()
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}
        for name, data in parts.items():
            write(temporary / name, data)
        write(temporary / CHECKSUMS, json.dumps(sums).encode())
        flush(temporary)
        if final.exists():  # damaged: the job has come to this step again
            final.rename(final.with_suffix(".damaged"))
        temporary.rename(final)
    flush(folder)
    found = newest_first(folder)
    kept = [path for path in found if read_whole(path) is not None][:keep]
    for old in found:
        if old not in kept:
            old.rename(old.with_suffix(".tmp"))
    remove_leftovers(folder)
    # --- end


def newest_whole(folder: Path) -> tuple[int, dict[str, bytes], list[str]]:
    """The newest checkpoint whose files all have their checksums: (step, parts, damaged).

    damaged: names of newer ones, newest first, that are not whole. They are left as they are.

    (0, {}, []) if there is no checkpoint at all. Raises ValueError that names all of them if there
    are some and none is whole: to start from nothing must not happen by accident.
    """
    # --- yours
    damaged = []
    for path in newest_first(folder):
        parts = read_whole(path)
        if parts is not None:
            return int(path.name.removeprefix("step-")), parts, damaged
        damaged.append(path.name)
    if damaged:
        raise ValueError(f"no checkpoint is whole: {damaged}")
    return 0, {}, []
    # --- end


def load_everywhere(folder: Path) -> tuple[int, dict[str, bytes], list[str]]:
    """On every rank what `newest_whole` returns on rank 0; only rank 0 sees the folder.

    If it raises ValueError there, all ranks raise ValueError with the same words.
    """
    # --- yours
    word = [None]
    if dist.get_rank() == 0:
        try:
            word = [newest_whole(folder)]
        except ValueError as error:
            word = [str(error)]
    dist.broadcast_object_list(word, src=0)
    if isinstance(word[0], str):
        raise ValueError(word[0])
    return word[0]
    # --- end
