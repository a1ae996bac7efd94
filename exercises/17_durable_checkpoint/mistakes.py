"""Known mistakes: name, passage of solution.py, what replaces it, check, what that check says."""

MISTAKES = [
    (
        "written under its own name",
        (
            'temporary = final.with_suffix(".tmp")\n',
            "        if final.exists():  # damaged: the job has come to this step again\n"
            '            final.rename(final.with_suffix(".damaged"))\n'
            "        temporary.rename(final)\n",
        ),
        ("temporary = final\n", ""),
        "test_killed",
        "half a checkpoint has the name of a whole one: ['step-000003']",
    ),
    (
        "the checksums last, under the final name",
        (
            "        write(temporary / CHECKSUMS, json.dumps(sums).encode())\n",
            "    flush(folder)\n    found = ",
        ),
        (
            "",
            "        write(final / CHECKSUMS, json.dumps(sums).encode())\n"
            "    flush(folder)\n    found = ",
        ),
        "test_killed",
        "half a checkpoint has the name of a whole one: ['step-000003']",
    ),
    (
        "old ones deleted before the new one is there",
        "        temporary.mkdir()\n",
        "        for old in newest_first(folder):\n"
        "            shutil.rmtree(old)\n"
        "        temporary.mkdir()\n",
        "test_save",
        "after steps 1, 2, 5, 12 with keep=2, left in the folder",
    ),
    (
        "what a kill left stands in the way",
        "    remove_leftovers(folder)\n    if read_whole(final) is None:\n",
        "    if read_whole(final) is None:\n",
        "test_killed",
        "FileExistsError",
    ),
    (
        "leftovers stay",
        (
            '            old.rename(old.with_suffix(".tmp"))\n    remove_leftovers(folder)\n',
            "    remove_leftovers(folder)\n    if read_whole(final)",
        ),
        (
            "            shutil.rmtree(old)\n",
            "    shutil.rmtree(final.with_suffix('.tmp'), ignore_errors=True)\n"
            "    if read_whole(final)",
        ),
        "test_killed",
        ", then saved up to step 4: in the folder",
    ),
    (
        "the oldest kept instead of the newest",
        "    kept = [path for path in found if read_whole(path) is not None][:keep]\n",
        "    kept = [path for path in found if read_whole(path) is not None][-keep:]\n",
        "test_save",
        "after steps 1, 2, 5, 12 with keep=1, left in the folder",
    ),
    (
        "an old one is deleted under its own name",
        '            old.rename(old.with_suffix(".tmp"))\n',
        "            shutil.rmtree(old)\n",
        "test_killed",
        "was deleted: half a checkpoint has the name of a whole one: ['step-000001']",
    ),
    (
        "two are kept where one is asked for",
        "is not None][:keep]",
        "is not None][: max(2, keep)]",
        "test_save",
        "after steps 1, 2, 5, 12 with keep=1, left in the folder",
    ),
    (
        "another checksum",
        ("sums = {name: hashlib.sha256(data)", "hashlib.sha256(parts[name])"),
        ("sums = {name: hashlib.md5(data)", "hashlib.md5(parts[name])"),
        "test_save",
        "checksums.json: expected",
    ),
    (
        "files not flushed",
        "write(temporary / name, data)\n",
        "(temporary / name).write_bytes(data)\n",
        "test_power_cut",
        "a power cut: step-000002 has its name, and model is not on the disk",
    ),
    (
        "the names of the files not flushed",
        "        flush(temporary)\n",
        "",
        "test_power_cut",
        "a power cut: step-000002 has its name, and its files' names are not on the disk",
    ),
    (
        "the new name not flushed",
        "        temporary.rename(final)\n    flush(folder)\n",
        "        temporary.rename(final)\n",
        "test_power_cut",
        "a power cut after save: the name step-000002 itself is not on the disk",
    ),
    (
        "checksums are written and not compared",
        "if all(hashlib.sha256(parts[name]).hexdigest() == sums[name] for name in sums):",
        "if parts:",
        "test_damaged",
        "model of step-000003: a bit is flipped: newest_whole, step: expected 2, got 3",
    ),
    (
        "no parts at all, for what is not whole",
        (
            "    return None\n",
            "    if read_whole(final) is None:\n",
            "if read_whole(path) is not None]",
            "        if parts is not None:\n",
        ),
        (
            "    return {}\n",
            "    if not read_whole(final):\n",
            "if read_whole(path)]",
            "        if parts:\n",
        ),
        "test_damaged",
        "read_whole of a checkpoint that does not exist: expected None, got dict {}",
    ),
    (
        "the newest or nothing",
        "    for path in newest_first(folder):\n",
        "    for path in newest_first(folder)[:1]:\n",
        "test_damaged",
        "ValueError: no checkpoint is whole",
    ),
    (
        "checksums that cannot be read are not expected",
        "except (OSError, ValueError, TypeError):",
        "except OSError:",
        "test_damaged",
        "Error:",
    ),
    (
        "checksums that are no text are not expected",
        "except (OSError, ValueError, TypeError):",
        "except (OSError, json.JSONDecodeError, TypeError):",
        "test_damaged",
        "UnicodeDecodeError",
    ),
    (
        "checksums that are no dictionary are not expected",
        "except (OSError, ValueError, TypeError):",
        "except (OSError, ValueError):",
        "test_damaged",
        "TypeError: 'int' object is not iterable",
    ),
    (
        "the damaged one is not named",
        "        damaged.append(path.name)\n",
        "",
        "test_damaged",
        "model of step-000003: missing: newest_whole, damaged: expected ['step-000003'], got []",
    ),
    (
        "the damaged one is deleted",
        "        damaged.append(path.name)\n",
        "        damaged.append(path.name)\n        shutil.rmtree(path)\n",
        "test_damaged",
        "newest_whole, damaged: expected ['step-000003', 'step-000002'], got ['step-000002']",
    ),
    (
        "the damaged one stands in the way of its own step",
        (
            "        if final.exists():  # damaged: the job has come to this step again\n"
            '            final.rename(final.with_suffix(".damaged"))\n'
        ),
        "",
        "test_saved_again",
        "Directory not empty",
    ),
    (
        "a name is taken for a checkpoint",
        "    if read_whole(final) is None:\n",
        "    if not final.exists():\n",
        "test_saved_again",
        "and step 3 saved once more: newest_whole, step: expected 3, got 2",
    ),
    (
        "a damaged one counts as kept",
        "    kept = [path for path in found if read_whole(path) is not None][:keep]\n",
        "    kept = found[:keep]\n",
        "test_saved_again",
        "and step 4 saved: left in the folder: expected ['step-000002', 'step-000004']",
    ),
    (
        "a whole one is written once more",
        "    if read_whole(final) is None:\n",
        "    if True:\n",
        "test_saved_again",
        "saved once more while it is whole",
    ),
    (
        "from nothing, by accident",
        '    if damaged:\n        raise ValueError(f"no checkpoint is whole: {damaged}")\n',
        "",
        "test_none",
        "no checkpoint is whole, and newest_whole starts anew",
    ),
    (
        "the newest alone is named",
        'raise ValueError(f"no checkpoint is whole: {damaged}")',
        'raise ValueError(f"no checkpoint is whole: {damaged[0]}")',
        "test_none",
        "no checkpoint is whole, and the error does not name step-000001",
    ),
    (
        "written, and thrown away where it is whole already",
        (
            "    if read_whole(final) is None:\n",
            "        if final.exists():  # damaged: the job has come to this step again\n",
        ),
        (
            "    if True:\n",
            "        if read_whole(final) is not None:\n"
            "            shutil.rmtree(temporary)\n"
            "            return\n"
            "        if final.exists():  # damaged: the job has come to this step again\n",
        ),
        "test_once",
        "save of a step that is there, whole: files opened to write: expected {'checksums.json': 0",
    ),
    (
        "each part written twice",
        "            write(temporary / name, data)\n",
        "            write(temporary / name, data)\n            write(temporary / name, data)\n",
        "test_once",
        "save: how often each file is opened to write: expected",
    ),
    (
        "each part read twice",
        "hashlib.sha256(parts[name])",
        "hashlib.sha256((path / name).read_bytes())",
        "test_once",
        "newest_whole: how often each file is opened: expected",
    ),
    (
        "all tell all what they found",
        "    dist.broadcast_object_list(word, src=0)\n",
        "    words = [None] * dist.get_world_size()\n"
        "    dist.all_gather_object(words, word[0])\n"
        "    word = words[:1]\n",
        "test_everywhere",
        "rank 0: its calls: expected ['broadcast', 'broadcast'], got ['all_gather', 'all_gather']",
    ),
    (
        "the error names no checkpoint",
        "        raise ValueError(word[0])\n",
        '        raise ValueError("no checkpoint is whole")\n',
        "test_everywhere",
        "none is whole, and load_everywhere says: no checkpoint is whole",
    ),
    (
        "every rank looks for itself",
        (
            "    if dist.get_rank() == 0:\n        try:\n"
            "            word = [newest_whole(folder)]\n"
            "        except ValueError as error:\n"
            "            word = [str(error)]\n"
            "    dist.broadcast_object_list(word, src=0)\n"
        ),
        (
            "    try:\n"
            "        word = [newest_whole(folder)]\n"
            "    except ValueError as error:\n"
            "        word = [str(error)]\n"
        ),
        "test_everywhere",
        "rank 1: load_everywhere",
    ),
    (
        "rank 0 raises, and the others wait",
        (
            "        try:\n"
            "            word = [newest_whole(folder)]\n"
            "        except ValueError as error:\n"
            "            word = [str(error)]\n"
        ),
        "        word = [newest_whole(folder)]\n",
        "test_everywhere",
        "rank 1 waits in broadcast",
    ),
    (
        "nothing is cleaned where the step is there, whole",
        "    remove_leftovers(folder)\n    if read_whole(final) is None:\n",
        "    if read_whole(final) is not None:\n"
        "        return\n"
        "    remove_leftovers(folder)\n"
        "    if True:\n",
        "test_tidied",
        "then step 3 saved: left in the folder: expected ['step-000002', 'step-000003'], got [",
    ),
    (
        "old ones stay where the step is there, whole",
        "    remove_leftovers(folder)\n    if read_whole(final) is None:\n",
        "    remove_leftovers(folder)\n"
        "    if read_whole(final) is not None:\n"
        "        return\n"
        "    if True:\n",
        "test_tidied",
        "then step 3 saved: left in the folder: expected ['step-000002', 'step-000003'], got "
        "['step-000001', 'step-000002', 'step-000003']",
    ),
    (
        "those are kept that were written last",
        "    found = newest_first(folder)\n",
        "    found = sorted(newest_first(folder), key=os.path.getmtime, reverse=True)\n",
        "test_tidied",
        "after steps 5, 1, 2: left in the folder: expected ['step-000002', 'step-000005'], got "
        "['step-000001', 'step-000002']",
    ),
    (
        "the new name flushed last of all",
        (
            "        temporary.rename(final)\n    flush(folder)\n",
            '            old.rename(old.with_suffix(".tmp"))\n    remove_leftovers(folder)\n',
        ),
        (
            "        temporary.rename(final)\n",
            '            old.rename(old.with_suffix(".tmp"))\n'
            "    remove_leftovers(folder)\n"
            "    flush(folder)\n",
        ),
        "test_power_cut",
        "a power cut: step-000001 is gone, and the name step-000002 not on the disk",
    ),
    (
        "the checksums put into the caller's parts",
        (
            "        for name, data in parts.items():\n",
            "        write(temporary / CHECKSUMS, json.dumps(sums).encode())\n",
        ),
        (
            "        parts[CHECKSUMS] = json.dumps(sums).encode()\n"
            "        for name, data in parts.items():\n",
            "",
        ),
        "test_save",
        "save has changed the parts; they are the caller's",
    ),
    (
        "an empty part taken for a damaged one",
        "        if all(hashlib.sha256(parts[name])",
        "        if all(parts.values()) and all(hashlib.sha256(parts[name])",
        "test_save",
        "left in the folder: expected ['step-000012'], got []",
    ),
    (
        "older ones that are damaged are named, too",
        "        if parts is not None:\n"
        '            return int(path.name.removeprefix("step-")), parts, damaged\n',
        "        if parts is not None:\n"
        "            whole = [read_whole(other) is not None for other in newest_first(folder)]\n"
        "            pairs = zip(newest_first(folder), whole, strict=True)\n"
        "            damaged = [other.name for other, is_whole in pairs if not is_whole]\n"
        '            return int(path.name.removeprefix("step-")), parts, damaged\n',
        "test_damaged",
        "an older one is damaged: newest_whole, damaged: expected [], got ['step-000002']",
    ),
    (
        "leftovers alone are taken for damaged checkpoints",
        "    if damaged:\n",
        "    if any(folder.iterdir()):\n",
        "test_none",
        "ValueError: no checkpoint is whole: []",
    ),
    (
        "nothing to load is an error",
        "    if isinstance(word[0], str):\n        raise ValueError(word[0])\n",
        "    if isinstance(word[0], str) or word[0][0] == 0:\n"
        "        raise ValueError(str(word[0]))\n",
        "test_everywhere",
        "rank 0: ValueError: (0, {}, [])",
    ),
    (
        "the folder flushed only where something was written",
        "    flush(folder)\n",
        "        flush(folder)\n",
        "test_power_cut",
        "step-000002 was there already, its name not on the disk, and step-000001 is gone",
    ),
]
