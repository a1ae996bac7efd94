"""Grader of 00: ten calls, one check each."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.grading import Event, Wrong, expect, grade, same
from course.wire import NotedWait

N = 3  # as in the examples; what depends on it is asked on two ranks, too


def held(seed: int, rank: int, *shape: int) -> torch.Tensor:
    """A rank's numbers: small integers, so that sums are exact in any order; in float64, or where
    there are rows in float32.
    """
    own = torch.Generator().manual_seed(1000 * seed + rank)
    dtype = torch.float64 if len(shape) == 1 else torch.float32
    return torch.randint(-99, 100, shape, generator=own).to(dtype)


def calls_of(wire) -> list[Event]:
    """The calls of this rank, and one for each process group that was made, by whatever call."""
    return wire.calls() + [Event("new_group")] * len(wire.groups)


def in_its_place(x: torch.Tensor, lies: int) -> None:
    """Refuse an x that was pointed at other memory than where it lies."""
    if x.data_ptr() != lies:
        raise Wrong("x was given other memory; to overwrite x, write into its own")


CALLED = {  # by each function, on every rank
    "sum_and_mean": "dist.all_reduce",
    "agree": "dist.broadcast",
    "stack_all": "dist.all_gather",
    "my_part_of_the_sum": "dist.reduce_scatter_tensor",
    "exchange_rows": "dist.all_to_all_single",
    "sum_of_my_kind": "dist.all_reduce",
}


class OneDtype(TorchDispatchMode):
    """Refuses a call whose tensors are of two dtypes, of which gloo speaks in C++ alone."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.lstrip("_").startswith("c10d"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            dtypes = sorted({str(tensor.dtype)[6:] for tensor in tensors})
            if len(dtypes) > 1:
                told = f"the call is given tensors of {' and '.join(dtypes)}"
                raise Wrong(f"{told}: what is received has the dtype of what is sent")
        return func(*args, **(kwargs or {}))


def no_rank_alone(name: str, wire) -> None:
    """Refuse a rank that made no call where another rank made one, which waits for this one.

    If none makes any, what they hold says what is wrong.
    """
    if wire.calls():
        return
    store = _get_default_store()
    n = dist.get_world_size()
    store.add("made no call", 1)
    until = time.monotonic() + 4
    while time.monotonic() < until and store.add("made no call", 0) < n:
        if any(store.check([f"rank {other} goes on"]) for other in range(n)):
            told = f"came back from {name} without {CALLED[name]}, which another rank calls"
            raise Wrong(f"{told}: every rank must, or those that do wait forever")
        time.sleep(0.01)


def call(answer, wire, name: str, seed: int, shape: tuple[int, ...], *args: int) -> tuple:
    """Call one function of the answer; return what it returned, x afterwards, and its calls."""
    wire.events = Told(wire.events)
    x = held(seed, dist.get_rank(), *shape)
    lies = x.data_ptr()
    function = getattr(answer, name)
    with OneDtype():
        returned = function(x, *args)
    no_rank_alone(name, wire)
    in_its_place(x, lies)
    return returned, x, calls_of(wire)


def asked(answer: Path, name: str, seed: int, *shape: int, n: int = N, args: tuple = ()) -> list:
    return grade(answer, call, n, name, seed, shape, *args)


def who(rank: int, n: int) -> str:
    return f"rank {rank}" if n == N else f"on {n} ranks, rank {rank}"


def one_call(calls: list, op: str, rank: int, n: int = N) -> None:
    """Refuse anything but one call of `op`."""
    made = [event.op for event in calls]
    if made != [op]:
        raise Wrong(f"{who(rank, n)}: expected one call, {op}; got {', '.join(made) or 'none'}")


def unchanged(x: torch.Tensor, seed: int, rank: int) -> None:
    if not torch.equal(x, held(seed, rank, *x.shape)):
        raise Wrong(f"rank {rank}: x was changed; it is the caller's")


def test_sum_and_mean(answer: Path, seed: int) -> None:
    """1. sum_and_mean"""
    for n, shape in ((N, (6,)), (2, (2, 3))):
        total = sum(held(seed, r, *shape) for r in range(n))
        for rank, (got, x, calls) in enumerate(asked(answer, "sum_and_mean", seed, *shape, n=n)):
            if not (isinstance(got, tuple) and len(got) == 2):
                raise Wrong(f"{who(rank, n)}: expected a sum and a mean, got {got!r}"[:200])
            unchanged(x, seed, rank)
            if isinstance(got[0], torch.Tensor) and torch.equal(got[0], x):
                raise Wrong(f"{who(rank, n)}: the first is its own x: nothing was summed")
            same(got[0], total, f"{who(rank, n)}: the sum")
            same(got[1], total / n, f"{who(rank, n)}: the mean")
            one_call(calls, "all_reduce", rank, n)


def test_agree(answer: Path, seed: int) -> None:
    """2. agree"""
    for source in (1, 2, 0):
        for rank, (_, x, calls) in enumerate(asked(answer, "agree", seed, 6, args=(source,))):
            if rank != source > 0 and torch.equal(x, held(seed, 0, 6)):
                raise Wrong(f"rank {rank}: holds rank 0's x; the source is rank {source}")
            same(x, held(seed, source, 6), f"rank {rank}: x, from source {source}")
            one_call(calls, "broadcast", rank)


def test_stack_all(answer: Path, seed: int) -> None:
    """3. stack_all"""
    for n, shape in ((N, (2, 3)), (2, (4,))):
        due = torch.stack([held(seed, r, *shape) for r in range(n)])
        told = "all rows are rank {}'s: is the list one tensor, n times?"
        alike = {told.format(r): due[r].expand_as(due) for r in range(n)}
        for rank, (got, x, calls) in enumerate(asked(answer, "stack_all", seed, *shape, n=n)):
            if not torch.equal(x, held(seed, rank, *x.shape)) and torch.equal(x, due[-1]):
                raise Wrong(f"rank {rank}: x was received into: is the list x itself, n times?")
            unchanged(x, seed, rank)
            same(got, due, f"{who(rank, n)}: all ranks' x, stacked", instead=alike)
            one_call(calls, "all_gather", rank, n)


def test_my_part_of_the_sum(answer: Path, seed: int) -> None:
    """4. my_part_of_the_sum"""
    name = "my_part_of_the_sum"
    for n, length in ((N, 12), (2, 10)):
        parts = sum(held(seed, r, length) for r in range(n)).chunk(n)
        for rank, (got, x, calls) in enumerate(asked(answer, name, seed, length, n=n)):
            unchanged(x, seed, rank)
            same(got, parts[rank], f"{who(rank, n)}: its part of the sum")
            one_call(calls, "reduce_scatter", rank, n)


def test_exchange_rows(answer: Path, seed: int) -> None:
    """5. exchange_rows"""
    for n in (N, 2):
        rows = [held(seed, r, n, 2) for r in range(n)]
        for rank, (got, x, calls) in enumerate(asked(answer, "exchange_rows", seed, n, 2, n=n)):
            unchanged(x, seed, rank)
            due = torch.stack([row[rank] for row in rows])
            same(got, due, f"{who(rank, n)}: the rows that came")
            one_call(calls, "all_to_all", rank, n)


class Told(list):
    """Events, of which the others hear: this rank goes on."""

    def append(self, event: Event) -> None:
        super().append(event)
        _get_default_store().add(f"rank {dist.get_rank()} goes on", 1)


def wait_until_there(keys: list[str], seconds: float) -> None:
    """Wait for these in the store, but no longer than so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not _get_default_store().check(keys):
        time.sleep(0.01)


@contextlib.contextmanager
def receives_noted() -> Iterator[dict[int, dist.Work]]:
    """Within, the receives that were started and that nobody has waited for yet."""
    pending = {}
    recv = dist.ProcessGroup.recv

    def noted(*args: object, **kwargs: object) -> dist.Work:
        work = recv(*args, **kwargs)
        pending[id(work)] = work
        return work

    wait = NotedWait(lambda work: pending.pop(id(work), None))
    with patch.object(dist.ProcessGroup, "recv", noted), patch.object(dist.Work, "wait", wait):
        yield pending


def handed(answer, wire, seed: int, source: int, target: int) -> tuple:
    """Call hand_over where the target comes late: a source that waits for nothing is back then."""
    store = _get_default_store()
    rank = dist.get_rank()
    wire.events = Told(wire.events)
    x = held(seed, rank, 4)
    lies = x.data_ptr()
    if rank == target:
        wait_until_there([f"rank {source} goes on"], 4)
        wait_until_there(["the source is back"], 0.5)
        if store.check(["the source is back"]):
            early = f"rank {source} came back before rank {rank} had received"
            raise Wrong(f"{early}: what isend returns is to be waited for")
    with receives_noted() as pending:
        answer.hand_over(x, source, target)
    if pending:
        early = f"rank {rank} came back and has not waited until its message was there"
        raise Wrong(f"{early}: what irecv returns is to be waited for")
    if rank == source:
        store.add("the source is back", 1)
    in_its_place(x, lies)
    return x, calls_of(wire)


def test_hand_over(answer: Path, seed: int) -> None:
    """6. hand_over"""
    for source, target in ((2, 0), (0, 1)):
        due_calls = {source: [("send", target)], target: [("recv", source)]}
        for rank, (x, calls) in enumerate(grade(answer, handed, N, seed, source, target)):
            due = held(seed, source if rank == target else rank, 4)
            same(x, due, f"rank {rank}: x, after rank {source} handed over to rank {target}")
            made = [(event.op, event.peer) for event in calls]
            if ("recv", None) in made:
                raise Wrong(f"rank {rank}: receives from anyone, which NCCL cannot do: name src")
            expect(made, due_calls.get(rank, []), f"rank {rank}: calls, and with which rank")


def late(answer, wire) -> tuple:
    """Call the answer where rank 0 works slowly: others that do not wait look before it is done."""
    store = _get_default_store()
    rank = dist.get_rank()
    others = range(1, dist.get_world_size())
    looked = []

    def work() -> None:
        if rank == 0:
            wait_until_there([f"rank {r} goes on" for r in others], 4)
            wait_until_there([f"rank {r} has looked" for r in others], 0.5)
        wire.events = Told(wire.events)
        store.add("worked", 1)

    def look() -> int:
        worked = store.add("worked", 0)
        looked.append(worked)
        store.add(f"rank {rank} goes on", 1)
        store.add(f"rank {rank} has looked", 1)
        return worked

    returned = answer.look_when_all_have_worked(work, look)
    looks = len(looked)
    store.add(f"rank {rank} has returned", 1)
    store.wait([f"rank {other} has returned" for other in range(N)])
    return returned, look(), looks, calls_of(wire)


def test_look_when_all_have_worked(answer: Path) -> None:
    """7. look_when_all_have_worked"""
    told = grade(answer, late, N, forbid=("torch.distributed.monitored_barrier",))
    for rank, (got, *_) in enumerate(told):
        if isinstance(got, int) and got < N:
            raise Wrong(f"rank {rank}: looked when {got} of {N} ranks had worked")
    for rank, (got, worked, looks, calls) in enumerate(told):
        expect(worked, N, f"rank {rank}: calls of work, by all ranks")
        expect(got, N, f"rank {rank}: what look returned")
        expect(looks, 1, f"rank {rank}: calls of look")
        one_call(calls, "barrier", rank)


def kinds(answer, wire, seed: int) -> tuple:
    """What `call` returns, where each group is compared with the other ranks' as it is made."""
    given = dist.new_group

    def new_group(ranks: Iterable[int], *args: object, **kwargs: object) -> dist.ProcessGroup:
        ranks = list(ranks)
        number = len(wire.groups) + 1
        first = _get_default_store().compare_set(f"group {number}", "", str(ranks)).decode()
        if first != str(ranks):
            told = f"its group {number} is of ranks {ranks}, another rank's of {first}"
            raise Wrong(f"{told}: every rank makes both groups, in the same order")
        return given(ranks, *args, **kwargs)

    with patch("torch.distributed.new_group", new_group):
        return call(answer, wire, "sum_of_my_kind", seed, (5,))


def test_sum_of_my_kind(answer: Path, seed: int) -> None:
    """8. sum_of_my_kind"""
    for n in (4, N):
        for rank, (_, x, calls) in enumerate(grade(answer, kinds, n, seed)):
            kind = range(rank % 2, n, 2)
            whose = f"{who(rank, n)}: "
            if torch.equal(x, sum(held(seed, r, 5) for r in range(n))):
                raise Wrong(f"{whose}holds the sum of all ranks; its kind is {list(kind)}")
            same(x, sum(held(seed, r, 5) for r in kind), f"{whose}the sum of {list(kind)}")
            reduced = [event for event in calls if event.op != "new_group"]
            one_call(reduced, "all_reduce", rank, n)
            expect(reduced[0].ranks, tuple(kind), f"{whose}ranks in that group")
            expect(len(calls) - len(reduced), 2, f"{whose}groups made")


DRAWS = 200


def runs(drawn: list[float]) -> set[tuple[float, ...]]:
    """All that are drawn one after another, in threes: of no two streams will any be alike."""
    return {*zip(drawn, drawn[1:], drawn[2:], strict=False)}


def draws(answer, wire, seed: int) -> list[list[float]]:
    """What the two generators draw, made twice."""
    drawn = []
    before = []
    for _ in range(2):
        state = torch.get_rng_state()
        made = answer.generators(seed)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise Wrong(f"expected two generators, got {made!r}"[:200])
        if made[0] is made[1]:
            raise Wrong("both are the same generator: what one draws, the other will not")
        if any(generator is torch.default_generator for generator in made):
            raise Wrong("that is torch's global generator, which all the program draws from")
        if not torch.equal(state, torch.get_rng_state()):
            raise Wrong("torch's global generator was seeded or drawn from: that is the program's")
        if {id(generator) for generator in made} & {id(earlier) for earlier in before}:
            raise Wrong("called twice, it returned one generator twice: each time two new ones")
        before += made
        for generator in made:
            drawn.append(torch.rand(DRAWS, generator=generator).tolist())
        torch.rand(3)
    wire.only()
    return drawn


def test_generators(answer: Path, seed: int) -> None:
    """9. generators"""
    drawn = {number: grade(answer, draws, N, number) for number in (0, 1 + seed)}
    for number, told in drawn.items():
        for rank, (weights, own, again, own_again) in enumerate(told):
            where = f"with seed {number}, rank {rank}"
            if (weights, own) != (again, own_again):
                raise Wrong(f"{where}: called twice with one seed, it draws other numbers")
            if weights != told[0][0]:
                raise Wrong(f"{where}: the generator for the weights is not like rank 0's")
            if runs(own) & runs(weights):
                raise Wrong(f"{where}: its own generator repeats the one for the weights")
            for other in range(rank):
                if own == told[other][1]:
                    raise Wrong(f"{where}: its own generator is like rank {other}'s")
    for rank, (zeros, ones) in enumerate(zip(*drawn.values(), strict=True)):
        for what, zero, one in zip(("weights", "dropout"), zeros[:2], ones[:2], strict=True):
            if zero == one:
                raise Wrong(f"rank {rank}: another seed gives the same {what}")
    for rank, of_two in enumerate(grade(answer, draws, 2, 1 + seed)):
        if of_two != drawn[1 + seed][rank]:
            told = f"rank {rank}: on 2 ranks it draws other numbers than on {N}"
            raise Wrong(f"{told}; only seed and rank are to count")


NODES = [  # rank, local rank, ranks on this node, GPUs there
    (0, 0, 8, 8),
    (13, 5, 8, 8),
    (3, 3, 4, 8),
    (1, 1, 2, 1),
    (6, 2, 4, 3),
    (2, 2, 4, 0),
    (0, 0, 1, 1),
    (8, 0, 4, 3),
    (5, 0, 2, 2),  # the first node has five ranks
]


def chosen(answer, wire) -> list:
    found = []
    for node in NODES:
        got = answer.backend_and_device(*node)
        if isinstance(got, tuple) and len(got) == 2 and not isinstance(got[1], torch.device):
            raise Wrong(f"expected a torch.device, got {got[1]!r}"[:200])
        found.append(got)
    return found


def test_backend_and_device(answer: Path) -> None:
    """10. backend_and_device"""
    (told,) = grade(answer, chosen, 1, group=False)
    for (rank, local_rank, ranks, gpus), got in zip(NODES, told, strict=True):
        where = f"rank {rank}, local rank {local_rank} of {ranks}, {gpus} GPUs"
        due = ("nccl", f"cuda:{local_rank}") if gpus >= ranks else ("gloo", "cpu")
        if not (isinstance(got, tuple) and len(got) == 2):
            raise Wrong(f"{where}: expected a backend and a device, got {got!r}"[:200])
        expect(got[0], due[0], f"{where}: backend")
        expect(str(got[1]), due[1], f"{where}: device")
