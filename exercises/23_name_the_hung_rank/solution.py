"""Name the hung rank. Read exercises/23_name_the_hung_rank/README.md first."""

import ast

Dump = dict  # what a rank's flight recorder held, as torch pickles it


def guilty(dumps: list[Dump]) -> tuple[int, str, int, str] | None:
    """Return (rank, group, number, call): who did not make which call; None if nobody waits.

    dumps[r]: rank r's flight recorder, of which you need two parts.
      "pg_config"  {"0": {"ranks": "[0, 1, 2, 3]"}, ...}: a group's name, and its ranks, in a string
      "entries"    the collectives that the rank has called, a dict each, in their order. The oldest
                   may have fallen out of the ring buffer: a call that is not there, while a later
                   one of its group is, was made. A rank need not be in all groups.
        "process_group"      ("0", "default_pg"): the group's name, and any description
        "collective_seq_id"  1, 2, ...: the how-manieth call in this group it is
        "profiling_name"     "gloo:all_reduce", "nccl:broadcast"
        "input_sizes"        [[4, 3]]: the shape of each tensor
        "retired"            whether it is over; a rank waits in its first call that is not

    Two calls are the same if group, number, name and sizes are, whatever else stands in them. A
    rank waits for all members of the group that have not made the same call. The chains of waiting
    end in the guilty rank; in a circle it is the one of its ranks for which most others wait. There
    is one such rank, or nobody waits. The call to return is that in which the others wait for it:
    (2, "0", 7, "all_reduce") if that is all-reduce 7 of group "0", which rank 2 has not made.
    """
    # --- yours
    calls = []
    waits = []
    for rank, dump in enumerate(dumps):
        still_open = [entry for entry in dump["entries"] if not entry["retired"]]
        calls.append(still_open[0] if still_open else None)
        waits.append(set())
        if still_open:
            name = still_open[0]["process_group"][0]
            for other in ast.literal_eval(dump["pg_config"][name]["ranks"]):
                if other != rank and not made(dumps[other]["entries"], still_open[0]):
                    waits[rank].add(other)
    chains = [set(others) for others in waits]
    for _ in dumps:
        for others in chains:
            others.update(*[chains[other] for other in others])
    scores = []
    for rank in range(len(dumps)):
        eventually = sum(rank in chains[other] for other in range(len(dumps)) if other != rank)
        scores.append((eventually, sum(rank in others for others in waits)))
    if not any(waits):
        return None
    rank = scores.index(max(scores))
    call = next(calls[other] for other, others in enumerate(waits) if rank in others)
    number = call["collective_seq_id"]
    return rank, call["process_group"][0], number, call["profiling_name"].partition(":")[2]


def made(entries: list[dict], call: dict) -> bool:
    parts = ("collective_seq_id", "profiling_name", "input_sizes")
    in_group = [e for e in entries if e["process_group"][0] == call["process_group"][0]]
    fallen_out = bool(in_group) and in_group[0]["collective_seq_id"] > call["collective_seq_id"]
    return fallen_out or any(all(e[part] == call[part] for part in parts) for e in in_group)
    # --- end
