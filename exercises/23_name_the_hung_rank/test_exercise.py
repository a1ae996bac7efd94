"""Grader of 23: dumps made from a seed, one sort of trouble each; then dumps of real ranks."""

import pickle
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course.grading import Wrong, expect, grade

NAMES = ["all_reduce", "broadcast", "all_gather", "reduce_scatter"]
Due = tuple[int, str, int, str] | None


class Recorders:
    """What the recorders of some ranks hold, call by call."""

    def __init__(self, rng: random.Random, groups: dict[str, list[int]], ranks: int) -> None:
        self.rng = rng
        self.groups = groups
        self.backend = rng.choice(["gloo", "nccl"])
        self.dumps = []
        for rank in range(ranks):
            own = {
                name: {"name": name, "desc": "", "ranks": str(members)}
                for name, members in groups.items()
                if rank in members
            }
            self.dumps.append({"version": "2.10", "pg_config": own, "entries": []})
        self.numbers = [dict.fromkeys(groups, 0) for _ in range(ranks)]

    def call(self, rank: int, group: str, name: str, sizes: list, retired: bool = True) -> int:
        """Record a call on one rank; return its number in the group."""
        self.numbers[rank][group] += 1
        number = self.numbers[rank][group]
        entries = self.dumps[rank]["entries"]
        about = self.rng.choice(["", "default_pg"])
        entry = {"record_id": len(entries), "process_group": (group, about), "retired": retired}
        entry |= {"collective_seq_id": number, "profiling_name": f"{self.backend}:{name}"}
        entry |= {"input_sizes": sizes, "input_dtypes": [self.rng.choice(["Float", "Double"])]}
        entries.append(entry | {"state": "scheduled", "is_p2p": False, "p2p_seq_id": 0})
        return number

    def together(self, group: str) -> None:
        """A call that all members make, and that is over."""
        name = self.rng.choice(NAMES)
        sizes = [[self.rng.randint(1, 99)]]
        for rank in self.groups[group]:
            self.call(rank, group, name, sizes)

    def shared_past(self) -> None:
        for _ in range(self.rng.randint(3, 9)):
            self.together(self.rng.choice(list(self.groups)))


def behind(rng: random.Random, started_since: int = 0) -> tuple[list[dict], Due]:
    """One rank has not made the call that the others wait in."""
    ranks = 5
    made = Recorders(rng, {"0": list(range(ranks))}, ranks)
    made.shared_past()
    for rank in range(ranks):  # the same call in the step before
        made.call(rank, "0", "all_reduce", [[8]])
    late = rng.randrange(ranks - 1)
    for rank in range(ranks):
        if rank != late:
            number = made.call(rank, "0", "all_reduce", [[8]], retired=False)
            for _ in range(started_since):
                made.call(rank, "0", "all_gather", [[2]], retired=False)
    return made.dumps, (late, "0", number, "all_reduce")


def several_open(rng: random.Random) -> tuple[list[dict], Due]:
    """Calls that were started since wait, too; the first one counts."""
    return behind(rng, 2)


def another_call(rng: random.Random) -> tuple[list[dict], Due]:
    """One rank has made another call instead: a circle."""
    ranks = 4
    made = Recorders(rng, {"0": list(range(ranks))}, ranks)
    made.shared_past()
    odd = rng.randrange(ranks - 1)
    for rank in range(ranks):
        name = "all_reduce" if rank == odd else "broadcast"
        number = made.call(rank, "0", name, [[8]], retired=False)
    return made.dumps, (odd, "0", number, "broadcast")


def another_size(rng: random.Random) -> tuple[list[dict], Due]:
    """One rank's tensor is larger than the others'."""
    ranks = 4
    made = Recorders(rng, {"0": list(range(ranks))}, ranks)
    made.shared_past()
    odd = rng.randrange(ranks - 1)
    for rank in range(ranks):
        sizes = [[5]] if rank == odd else [[4]]
        number = made.call(rank, "0", "all_reduce", sizes, retired=False)
    return made.dumps, (odd, "0", number, "all_reduce")


def two_groups(rng: random.Random) -> tuple[list[dict], Due]:
    """Only the members of a group are waited for; the others have their own calls and numbers."""
    made = Recorders(rng, {"0": [0, 1, 2, 3, 4, 5], "1": [0, 2, 4], "2": [1, 3, 5]}, 6)
    made.shared_past()
    for _ in range(rng.randint(2, 5)):
        made.together("2")
    late = rng.choice([0, 2])
    for rank in (0, 2, 4):
        if rank != late:
            number = made.call(rank, "1", "all_reduce", [[8]], retired=False)
    return made.dumps, (late, "1", number, "all_reduce")


def chain(rng: random.Random) -> tuple[list[dict], Due]:
    """All wait for one, which waits in another group for the guilty one."""
    made = Recorders(rng, {"0": [0, 2, 3], "1": [1, 3]}, 4)
    made.shared_past()
    number = made.call(3, "1", "broadcast", [[8]], retired=False)
    for rank in (0, 2):
        made.call(rank, "0", "all_reduce", [[8]], retired=False)
    return made.dumps, (1, "1", number, "broadcast")


def long_chain(rng: random.Random) -> tuple[list[dict], Due]:
    """Two wait for a third, which waits for a fourth, and so on to the seventh: that is guilty."""
    order = rng.sample(range(7), 7)
    groups = {"0": sorted(order[:3])}
    for at in range(1, 5):
        groups[str(at)] = sorted(order[at + 1 : at + 3])
    made = Recorders(rng, groups, 7)
    made.shared_past()
    for rank in order[:2]:
        made.call(rank, "0", "all_reduce", [[8]], retired=False)
    for at in range(1, 5):
        number = made.call(order[at + 1], str(at), "broadcast", [[8]], retired=False)
    return made.dumps, (order[6], "4", number, "broadcast")


def outside_the_circle(rng: random.Random) -> tuple[list[dict], Due]:
    """Most wait for a rank that is outside the circle, and waits for one in it."""
    order = rng.sample(range(9), 9)  # five outside, the last of which waits; four in the circle
    groups = {"0": order[:5], "1": order[4:6], "2": order[5:]}
    made = Recorders(rng, {name: sorted(ranks) for name, ranks in groups.items()}, 9)
    made.shared_past()
    for rank in order[:4]:
        made.call(rank, "0", "all_reduce", [[8]], retired=False)
    made.call(order[4], "1", "all_reduce", [[8]], retired=False)
    for rank in order[5:]:
        name = "all_gather" if rank == order[6] else "broadcast"
        number = made.call(rank, "2", name, [[8]], retired=False)
    return made.dumps, (order[6], "2", number, "broadcast")


def wrong_group(rng: random.Random) -> tuple[list[dict], Due]:
    """One rank has made the same call in another group of the same ranks."""
    made = Recorders(rng, {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}, 4)
    for group in ("0", "1"):
        for _ in range(3):
            made.together(group)
    odd = rng.randrange(3)
    for rank in range(4):
        made.call(rank, "1" if rank == odd else "0", "all_reduce", [[8]], retired=False)
    return made.dumps, (odd, "0", 4, "all_reduce")


def healthy(rng: random.Random) -> tuple[list[dict], Due]:
    """All have made the call that all are in: nobody is guilty."""
    made = Recorders(rng, {"0": [0, 1, 2, 3], "1": [1, 3]}, 4)
    made.shared_past()
    for rank in range(4):
        made.call(rank, "0", "all_reduce", [[8]], retired=rank == 2)
    made.together("1")
    return made.dumps, None


def buffer_full(rng: random.Random) -> tuple[list[dict], Due]:
    """The oldest calls have fallen out, on each rank so many others."""
    dumps, due = behind(rng)
    for dump in dumps:
        dump["entries"] = dump["entries"][rng.randint(0, 2) :]
    return dumps, due


def far_ahead(rng: random.Random) -> tuple[list[dict], Due]:
    """Two ranks are ahead, and the call that the others wait in has fallen out of their buffers."""
    ranks = 5
    made = Recorders(rng, {"0": list(range(ranks))}, ranks)
    made.shared_past()
    late = rng.randrange(1, ranks - 1)
    ahead = (late - 1, late + 1)
    for rank in range(ranks):
        if rank != late:
            number = made.call(rank, "0", "broadcast", [[8]], retired=rank in ahead)
    for rank in ahead:
        made.call(rank, "0", "broadcast", [[8]])
        del made.dumps[rank]["entries"][:-1]
    return made.dumps, (late, "0", number, "broadcast")


def never_out_again(rng: random.Random) -> tuple[list[dict], Due]:
    """One rank is still in a call that all have made, and has not made the next."""
    ranks = 5
    made = Recorders(rng, {"0": list(range(ranks))}, ranks)
    made.shared_past()
    late = rng.randrange(ranks - 1)
    for rank in range(ranks):
        made.call(rank, "0", "all_reduce", [[8]], retired=rank != late)
    for rank in range(ranks):
        if rank != late:
            number = made.call(rank, "0", "broadcast", [[8]], retired=False)
    return made.dumps, (late, "0", number, "broadcast")


def nothing_called(rng: random.Random) -> tuple[list[dict], Due]:
    """One rank has called nothing at all."""
    made = Recorders(rng, {"0": [0, 1, 2, 3]}, 4)
    late = rng.randrange(4)
    for rank in range(4):
        if rank != late:
            made.call(rank, "0", "all_reduce", [[8]], retired=False)
    return made.dumps, (late, "0", 1, "all_reduce")


CASES = {
    "one rank is behind": behind,
    "several calls are open": several_open,
    "one rank makes another call": another_call,
    "one rank's tensor is larger": another_size,
    "several groups": two_groups,
    "one rank is in the wrong group": wrong_group,
    "a chain through two groups": chain,
    "a chain through five groups": long_chain,
    "most wait for one outside the circle": outside_the_circle,
    "nobody hangs": healthy,
    "the oldest calls are lost": buffer_full,
    "the call itself is lost": far_ahead,
    "one rank has called nothing": nothing_called,
    "one rank is still in a call that all have made": never_out_again,
}


def call(answer, wire, many: list) -> list:
    """What the answer says of each."""
    said = [answer.guilty(dumps) for dumps in many]
    wire.only()
    return said


@pytest.mark.parametrize("case", CASES)
def test_made_dumps(answer: Path, seed: int, case: str) -> None:
    """Made dumps: {case}"""
    make = CASES[case]
    made = [make(random.Random(seed + at)) for at in range(12)]
    (told,) = grade(answer, call, 1, [dumps for dumps, _ in made])
    for said, (_, due) in zip(told, made, strict=True):
        check(said, due, make.__doc__)


def check(said: object, due: Due, what: str) -> None:
    if due is not None and isinstance(said, list | tuple) and len(said) == 4:
        for part, got, right in zip(("rank", "group", "number", "call"), said, due, strict=True):
            expect(got, right, f"{what} {part}")
    expect(tuple(said) if isinstance(said, list) else said, due, what)


def real(answer, wire, late: int) -> tuple:
    """Hang for a moment: all but one start an all-reduce, and dump; then that one comes, too."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(3)
    dist.all_reduce(x)
    if rank != late:
        work = dist.all_reduce(x, async_op=True)
    stop = time.monotonic() + 5
    retired = False  # gloo's thread writes that down a moment after the call returns
    while not retired and time.monotonic() < stop:
        recorded = torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False)
        dump = pickle.loads(recorded)
        retired = dump["entries"][0]["retired"]
    dump["pg_config"] = {"0": {"ranks": str(list(range(dist.get_world_size())))}}
    store.set(f"dumped {rank}", "")
    store.wait([f"dumped {other}" for other in range(dist.get_world_size())], timedelta(seconds=8))
    if rank == late:
        dist.all_reduce(x)
    else:
        work.wait()
    dumps = [None] * dist.get_world_size()
    dist.all_gather_object(dumps, dump)
    return answer.guilty(dumps)


def test_real_dumps(answer: Path, seed: int) -> None:
    """Dumps of real ranks, one of which is late"""
    late = seed % 3
    for rank, said in enumerate(grade(answer, real, 3, late)):
        if said is None:
            raise Wrong(f"rank {rank}: nobody was named; rank {late} was late")
        expect(said[0], late, f"rank {rank}: the guilty rank")
        expect(said[3], "all_reduce", f"rank {rank}: the call it did not make")
