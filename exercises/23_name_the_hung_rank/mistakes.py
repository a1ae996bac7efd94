"""Known mistakes: name, passage of solution.py, what replaces it, check, what that check says."""

MISTAKES = [
    (
        "takes the last rank",
        "    rank = scores.index(max(scores))\n",
        "    rank = len(dumps) - 1\n    waits = [others and {rank} for others in waits]\n",
        "test_made_dumps",
        "has not made the call that the others wait in. rank: expected",
    ),
    (
        "takes who has the highest number",
        "    rank = scores.index(max(scores))\n",
        '    ids = [max(e["collective_seq_id"] for e in dump["entries"]) for dump in dumps]\n'
        "    rank = ids.index(max(ids))\n"
        "    waits = [{rank}] * len(dumps)\n"
        "    calls = [call for call in calls if call]\n",
        "test_made_dumps",
        "has not made the call that the others wait in. rank: expected",
    ),
    (
        "ignores whether a call is over",
        'if not entry["retired"]]',
        "]",
        "test_made_dumps",
        "expected",
    ),
    (
        "ignores the group of a call",
        '[e for e in entries if e["process_group"][0] == call["process_group"][0]]',
        "entries",
        "test_made_dumps",
        "in another group of the same ranks.",
    ),
    (
        "all ranks are members of all groups",
        'in ast.literal_eval(dump["pg_config"][name]["ranks"]):',
        "in range(len(dumps)):",
        "test_made_dumps",
        "Only the members of a group are waited for",
    ),
    (
        "takes the last open call",
        "        calls.append(still_open[0] if still_open else None)\n",
        "        still_open = still_open[-1:]\n"
        "        calls.append(still_open[0] if still_open else None)\n",
        "test_made_dumps",
        "the first one counts. number: expected",
    ),
    (
        "compares no names",
        '"collective_seq_id", "profiling_name", "input_sizes")',
        '"collective_seq_id", "input_sizes")',
        "test_made_dumps",
        "has made another call instead: a circle.: expected",
    ),
    (
        "compares no numbers",
        'parts = ("collective_seq_id", "profiling_name"',
        'parts = ("profiling_name"',
        "test_made_dumps",
        "has not made the call that the others wait in.: expected",
    ),
    (
        "compares no sizes",
        '"profiling_name", "input_sizes")',
        '"profiling_name")',
        "test_made_dumps",
        "One rank's tensor is larger than the others'.: expected",
    ),
    (
        "stops at the first rank of a chain",
        "        scores.append((eventually, sum(rank in others for others in waits)))\n",
        "        scores.append((0, sum(rank in others for others in waits)))\n",
        "test_made_dumps",
        "which waits in another group for the guilty one. rank: expected 1, got 3",
    ),
    (
        "follows a chain for two ranks",
        "    for _ in dumps:\n",
        "    for _ in dumps[:1]:\n",
        "test_made_dumps",
        "and so on to the seventh: that is guilty. rank: expected",
    ),
    (
        "takes no vote in a circle",
        "        scores.append((eventually, sum(rank in others for others in waits)))\n",
        "        scores.append((eventually, 0))\n",
        "test_made_dumps",
        "has made another call instead: a circle. rank: expected",
    ),
    (
        "what has fallen out was not made",
        "return fallen_out or any(",
        "return any(",
        "test_made_dumps",
        "has fallen out of their buffers. rank: expected",
    ),
    (
        "every rank has called something in every group",
        "fallen_out = bool(in_group) and ",
        "fallen_out = ",
        "test_made_dumps",
        "IndexError: list index out of range",
    ),
    (
        "descriptions of groups compared",
        'if e["process_group"][0] == call["process_group"][0]]',
        'if e["process_group"] == call["process_group"]]',
        "test_made_dumps",
        "expected",
    ),
    (
        "dtypes compared",
        '"profiling_name", "input_sizes")',
        '"profiling_name", "input_sizes", "input_dtypes")',
        "test_made_dumps",
        "expected",
    ),
    (
        "in a circle, the rank that most wait for, also outside of it",
        "scores.append((eventually, ",
        "scores.append((0 if waits[rank] else eventually, ",
        "test_made_dumps",
        "outside the circle, and waits for one in it. rank: expected",
    ),
    (
        "a chain ends in a rank that is in no call, or in a circle",
        "    rank = scores.index(max(scores))\n",
        "    ends = [r for r in range(len(dumps)) if not calls[r] or r in chains[r]]\n"
        "    rank = max(ends, key=lambda r: scores[r])\n",
        "test_made_dumps",
        "ValueError: max()",
    ),
]
