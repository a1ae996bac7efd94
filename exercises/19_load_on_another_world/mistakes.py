"""Known mistakes: name, passage of solution.py, what replaces it, check, what that check says."""

MISTAKES = [
    (
        "rows rounded down",
        "chunk = math.ceil(rows / world_size)",
        "chunk = rows // world_size",
        "test_rows",
        "own_rows(1, 2, 0): expected (0, 1), got (0, 0)",
    ),
    (
        "rows spread evenly",
        "    chunk = math.ceil(rows / world_size)\n"
        "    start = min(rows, rank * chunk)\n"
        "    return start, min(rows, start + chunk)\n",
        "    return rows * rank // world_size, rows * (rank + 1) // world_size\n",
        "test_rows",
        "own_rows(1, 2, 0): expected (0, 1), got (0, 0)",
    ),
    (
        "the last chunk is not cut short",
        "return start, min(rows, start + chunk)",
        "return start, start + chunk",
        "test_rows",
        "own_rows(1, 2, 1): expected (1, 1), got (1, 2)",
    ),
    (
        "ranks without rows begin beyond the end",
        "start = min(rows, rank * chunk)",
        "start = rank * chunk",
        "test_rows",
        "own_rows(1, 3, 2): expected (1, 1), got (2, 1)",
    ),
    (
        "every rank loads what rank 0 needs",
        "dist.get_world_size(), dist.get_rank())",
        "dist.get_world_size(), 0)",
        "test_values",
        "rows of token.weight [10, 6] on rank 1",
    ),
    (
        "the file of its own rank",
        'folder / shard["file"]',
        'folder / f"rank-{dist.get_rank()}.bin"',
        "test_values",
        "saved by 2, loaded on 1: rows of token.weight [10, 6] on rank 0",
    ),
    (
        "from where the shard begins in its file, whichever rows are wanted",
        'shard["offset"] + (first - shard["start"]) * row',
        'shard["offset"]',
        "test_values",
        "saved by 1, loaded on 2: rows of token.weight [10, 6] on rank 1",
    ),
    (
        "from where the row would lie in the whole tensor",
        'shard["offset"] + (first - shard["start"]) * row',
        'shard["offset"] + first * row',
        "test_values",
        "saved by 2, loaded on 1: rows of token.weight [10, 6] on rank 0",
    ),
    (
        "the files begin with their first tensor",
        'offset = shard["offset"] + (first - shard["start"]) * row',
        'offset = (first - shard["start"]) * row',
        "test_values",
        "saved by 1, loaded on 1: rows of token.weight",
    ),
    (
        "float32 is taken for granted",
        "dtype.itemsize",
        "4",
        "test_values",
        "is invalid for input of size",
    ),
    (
        "two dimensions are taken for granted",
        'math.prod(about["shape"][1:])',
        '(about["shape"] + [1, 1])[1]',
        "test_values",
        "shape '[12, 3, 2]' is invalid for input of size",
    ),
    (
        "one after another, in the order of the list",
        (
            "        missing = stop - start\n",
            "data[(first - start) * row : (last - start) * row] = piece",
        ),
        (
            "        missing = stop - start\n        end = 0\n",
            "data[end : end + len(piece)] = piece\n                end += len(piece)",
        ),
        "test_cut_anywhere",
        "cut anywhere into",
    ),
    (
        "the old cuts are computed, not looked up",
        (
            '        for shard in about["shards"]:\n',
            'first = max(start, shard["start"])',
            'last = min(stop, shard["stop"])',
            '(first - shard["start"]) * row',
        ),
        (
            '        old = 1 + max(int(shard["file"][5:-4]) for shard in about["shards"])\n'
            '        for shard in about["shards"]:\n'
            '            rows = about["shape"][0] if about["shape"] else 1\n'
            '            low, high = own_rows(rows, old, int(shard["file"][5:-4]))\n',
            "first = max(start, low)",
            "last = min(stop, high)",
            "(first - low) * row",
        ),
        "test_cut_anywhere",
        "lie in no shard",
    ),
    (
        "all is read, and then cut",
        (
            'offset = shard["offset"] + (first - shard["start"]) * row\n',
            'piece = read_at(folder / shard["file"], offset, (last - first) * row)\n',
        ),
        (
            'nbytes = (shard["stop"] - shard["start"]) * row\n',
            'piece = read_at(folder / shard["file"], shard["offset"], nbytes)\n'
            '                piece = piece[(first - shard["start"]) * row :]\n'
            "                piece = piece[: (last - first) * row]\n",
        ),
        "test_cost",
        "saved by 1, loaded on 3, rank 0: bytes that read_at has read",
    ),
    (
        "files are read whole, past read_at",
        'piece = read_at(folder / shard["file"], offset, (last - first) * row)',
        'piece = (folder / shard["file"]).read_bytes()[offset : offset + (last - first) * row]',
        "test_cost",
        "bytes that read_at has read",
    ),
    (
        "row by row",
        'piece = read_at(folder / shard["file"], offset, (last - first) * row)\n',
        "at = range(offset, offset + (last - first) * row, row)\n"
        '                piece = b"".join(read_at(folder / shard["file"], i, row) for i in at)\n',
        "test_cost",
        "calls of read_at, where",
    ),
    (
        "no bytes are read where its rows end and a shard begins",
        "            if first < last:\n",
        "            if first <= last:\n",
        "test_cost",
        "calls of read_at, where",
    ),
    (
        "rank 0 reads the metadata for all",
        (
            "def load(folder",
            "read_metadata(folder).items()",
        ),
        (
            "def told(folder: Path) -> dict:\n"
            "    words = [read_metadata(folder)]\n"
            "    dist.broadcast_object_list(words)\n"
            "    return words[0]\n\n\n"
            "def load(folder",
            "told(folder).items()",
        ),
        "test_cost",
        "it calls broadcast",
    ),
    (
        "a buffer for the whole tensor",
        (
            "data = bytearray((stop - start) * row)\n",
            "data[(first - start) * row : (last - start) * row] = piece",
            "        shape = [stop",
        ),
        (
            'data = bytearray((about["shape"] or [1])[0] * row)\n',
            "data[first * row : last * row] = piece",
            "        data = data[start * row : stop * row]\n        shape = [stop",
        ),
        "test_memory",
        "the whole tensor has 2,097,152",
    ),
    (
        "a view of the whole tensor",
        "        loaded[name] = to_tensor(data, dtype, shape)\n",
        "        loaded[name] = to_tensor(data, dtype, shape)\n"
        '        if about["shape"]:\n'
        '            whole = torch.empty(about["shape"], dtype=dtype)\n'
        "            whole[start:stop] = loaded[name]\n"
        "            loaded[name] = whole[start:stop]\n",
        "test_memory",
        "rank 0: holds 2,097,152 bytes at a time to return 524,288",
    ),
    (
        "a whole tensor, of which its part is copied out",
        "        loaded[name] = to_tensor(data, dtype, shape)\n",
        "        loaded[name] = to_tensor(data, dtype, shape)\n"
        '        if about["shape"]:\n'
        '            whole = torch.empty(about["shape"], dtype=dtype)\n'
        "            whole[start:stop] = loaded[name]\n"
        "            loaded[name] = whole[start:stop].clone()\n",
        "test_memory",
        "rank 0: holds 2,097,152 bytes at a time to return 524,288",
    ),
    (
        "empty tensors of float32",
        "        loaded[name] = to_tensor(data, dtype, shape)\n",
        "        loaded[name] = to_tensor(data, dtype, shape) if data else torch.empty(shape)\n",
        "test_values",
        "got (0, ",
    ),
    (
        "only the last row is looked for",
        (
            "        missing = stop - start\n",
            "                missing -= last - first\n",
        ),
        (
            "        missing = start < stop\n",
            "                missing = missing and last < stop\n",
        ),
        "test_gap",
        "rows of token.weight lie in no shard, and load says nothing",
    ),
    (
        "a scalar is taken to be there",
        "        if missing:\n",
        '        if missing and about["shape"]:\n',
        "test_gap",
        "rows of step lie in no shard, and load says nothing",
    ),
    (
        "a row that is missing is zero",
        "        if missing:\n",
        "        if missing < 0:\n",
        "test_gap",
        "rows of token.weight lie in no shard, and load says nothing",
    ),
    (
        "the tensor with the gap is not named",
        "{name}: {missing} of rows {start} to {stop} lie in no shard",
        "{missing} rows lie in no shard",
        "test_gap",
        "the error does not name it",
    ),
    (
        "every gap is an error, no matter which rank needs the rows",
        "        if missing:\n",
        '        held = sum(shard["stop"] - shard["start"] for shard in about["shards"])\n'
        '        if missing or held < (about["shape"] or [1])[0]:\n',
        "test_gap",
        "all of this rank's rows are there, and load raises",
    ),
    (
        "scalars come back as vectors",
        'if about["shape"] else []\n',
        'if about["shape"] else [1]\n',
        "test_values",
        "rows of step [] on rank 0",
    ),
    (
        "it raises only if none of its rows are there",
        "        if missing:\n",
        "        if 0 < missing == stop - start:\n",
        "test_gap",
        "rows of token.weight lie in no shard, and load says nothing",
    ),
    (
        "the dtypes that one has met",
        'dtype = getattr(torch, about["dtype"])',
        'dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[about["dtype"]]',
        "test_values",
        "KeyError: '",
    ),
    (
        "a tensor has a shard",
        "        missing = stop - start\n",
        '        missing = stop - start\n        about["shards"][0]\n',
        "test_values",
        "IndexError: list index out of range",
    ),
    (
        "one shard of a tensor per file",
        "        missing = stop - start\n",
        "        missing = stop - start\n"
        '        of_file = {shard["file"]: shard for shard in about["shards"]}\n'
        '        about["shards"] = list(of_file.values())\n',
        "test_cut_anywhere",
        "lie in no shard",
    ),
    (
        "only the first and the last row are looked for",
        "        if missing:\n",
        '        held = about["shards"]\n'
        '        first = min((shard["start"] for shard in held), default=stop)\n'
        '        last = max((shard["stop"] for shard in held), default=0)\n'
        "        if start < stop and (start < first or last < stop):\n",
        "test_gap",
        "rows of token.weight lie in no shard, and load says nothing",
    ),
    (
        "the one shard of a scalar unpacked, whose error names no tensor",
        "        missing = stop - start\n",
        "        missing = stop - start\n"
        '        if about["shape"] == []:\n            [_] = about["shards"]\n',
        "test_gap",
        "rows of step lie in no shard, and the error does not name it",
    ),
]
