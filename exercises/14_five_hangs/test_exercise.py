"""Grader of 14: each job ends, is right, makes the calls it is meant to, and is still itself."""

import ast
import difflib
import itertools
import runpy
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from course.grading import Reduced, Wrong, expect, grade, same
from course.wire import NotedWait

JOBS = Path(__file__).with_name("jobs.py")
NOT_WAITED = "isend and irecv return at once; wait for what they return"
LINES = {1: 3, 2: 9, 3: 5, 4: 3, 5: 4}  # that may be changed; ours changes 2, 4, 3, 1, 2


class Name(str):
    """A name with a hash of its own on every rank, as in the processes that torchrun starts."""

    place = 0

    def __hash__(self) -> int:
        return self.place


def hashed_anew(state: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The same names in the same order; in a set they have another order on the next rank."""
    found = {}
    for key, tensor in state.items():
        name = Name(key)
        name.place = (sorted(state).index(key) + rank) % len(state)
        found[name] = tensor
    return found


def call(answer, wire, job: int, given: list[tuple]) -> tuple:
    """What this rank's job returned or left in its argument, and its calls."""
    rank = dist.get_rank()
    mine = (hashed_anew(given[rank][0], rank),) if job == 4 else given[rank]
    work = getattr(answer, f"job_{job}")
    tensors = dict(mine[0]) if job == 4 else {}
    waited = []
    with patch.object(dist.Work, "wait", NotedWait(waited.append)), Reduced() as reduced:
        returned = work(*mine)
    if job == 1 and set(reduced.dtypes) - {"torch.int64"}:
        raise Wrong(f"what is all-reduced is of {reduced.dtypes[0]}; two int64 are asked for")
    started = len(wire.calls("send", "recv"))
    if (done := len({id(one) for one in waited})) < started:
        raise Wrong(f"{NOT_WAITED}: of {started} messages it has waited for {done}")
    for name, tensor in tensors.items():
        if mine[0][name] is not tensor:
            raise Wrong(f"{name} is another tensor now: write into the one that was given")
    if isinstance(returned, Tensor):
        returned = returned.detach()
    if job == 4:
        returned = {str(name): tensor for name, tensor in mine[0].items()}
    return returned, wire.calls()


on_ranks = pytest.mark.parametrize("n", [2, 3, 4])


@on_ranks
def test_job_1(answer: Path, seed: int, n: int) -> None:
    """Job 1 ends, is right and does its work, on {n} ranks"""
    check_job(answer, seed, 1, n)


@on_ranks
def test_job_2(answer: Path, seed: int, n: int) -> None:
    """Job 2 ends, is right and does its work, on {n} ranks"""
    check_job(answer, seed, 2, n)


@on_ranks
def test_job_3(answer: Path, seed: int, n: int) -> None:
    """Job 3 ends, is right and does its work, on {n} ranks"""
    check_job(answer, seed, 3, n)


@on_ranks
def test_job_4(answer: Path, seed: int, n: int) -> None:
    """Job 4 ends, is right and does its work, on {n} ranks"""
    check_job(answer, seed, 4, n)


@on_ranks
def test_job_5(answer: Path, seed: int, n: int) -> None:
    """Job 5 ends, is right and does its work, on {n} ranks"""
    check_job(answer, seed, 5, n)


def test_other_dtypes(answer: Path, seed: int) -> None:
    """Job 4 does the same for float32 and for int32, on 2 ranks"""
    given = []
    for (state,) in runpy.run_path(str(JOBS))["given"](4, 2, seed):
        changed = {}
        for name, tensor in state.items():  # no integer's mean is rank 0's, however it is rounded
            changed[name] = (3 * tensor).to(torch.float32 if tensor.dim() else torch.int32)
        given.append((changed,))
    right_4([value for value, _ in grade(answer, call, 2, 4, given)], given)


def check_job(answer: Path, seed: int, job: int, n: int) -> None:
    used = names_in(answer, job)
    if job == 3 and "wait" not in used and used & {"isend", "irecv"}:
        raise Wrong(NOT_WAITED)
    if job == 4 and "set" in used and "sorted" not in used:  # ranks here hash alike, elsewhere not
        raise Wrong("a set of names has another order in each process that torchrun starts")
    given = runpy.run_path(str(JOBS))["given"](job, n, seed)
    got = grade(answer, call, n, job, given)
    values, calls = [value for value, _ in got], [calls for _, calls in got]
    (right_1, right_2, right_3, right_4, right_5)[job - 1](values, given)
    for rank in range(n):
        check_calls(job, n, given, rank, calls[rank])


def right_1(values: list, given: list) -> None:
    right = [int(((x @ w).argmax(1) == y).sum()) for x, y, w in given]
    alone = f"{right[0]} of {len(given[0][1])} right"
    if values[0] == alone:
        raise Wrong(f'rank 0: "{alone}" counts rank 0\'s own samples alone')
    due = f"{sum(right)} of {sum(len(y) for _, y, _ in given)} right"
    for rank, value in enumerate(values):
        expect(value, None if rank else due, f"rank {rank}: what job_1 returns")


def sgd(given: list, steps: int, bad: str = "") -> Tensor:
    """w after `steps`; what to do with a gradient that is not finite: skip the step, or drop it."""
    w = given[0][1]
    for step in range(steps):
        batches = [batches[step] for batches, _ in given if step < len(batches)]
        grads = [x.T @ (x @ w - y) for x, y in batches]
        finite = [grad for grad in grads if grad.isfinite().all()]
        if bad == "drop" or len(finite) == len(grads):
            w = w - sum(finite) / 64  # exact: whole numbers over powers of two
    return w


def right_2(values: list, given: list) -> None:
    counts = [len(batches) for batches, _ in given]
    stopped = sgd(given, min(counts))
    for rank, w in enumerate(values):
        if isinstance(w, Tensor) and torch.equal(w, stopped):
            told = f"w after {min(counts)} of {max(counts)} steps: batches were left out"
            raise Wrong(f"rank {rank}: {told}, for all stopped when the first rank had no more")
        same(w, sgd(given, max(counts)), f"rank {rank}: w after {max(counts)} steps")


def right_3(values: list, given: list) -> None:
    due = [w for (w,) in given]
    for first in 0, 1:
        for r in range(first, len(due) - 1, 2):
            due[r] = due[r + 1] = (due[r] + due[r + 1]) / 2
    for rank, w in enumerate(values):
        same(w, due[rank], f"rank {rank}: w")


def right_4(values: list, given: list) -> None:
    n = len(given)
    states = [state for (state,) in given]
    floats = [name for name in states[0] if states[0][name].is_floating_point()]
    for rank, state in enumerate(values):
        for name in set(states[0]) - set(floats):
            same(state[name], states[0][name], f"rank {rank}: {name}")
        for name in floats:
            due = sum(state[name] for state in states) / n
            for mixed in itertools.product(floats, repeat=n):
                mean = sum(states[r][mixed[r]] for r in range(n)) / n
                if torch.equal(state[name], mean) and not torch.equal(mean, due):
                    met = ", ".join(f"rank {r}'s {other}" for r, other in enumerate(mixed))
                    raise Wrong(f"rank {rank}: {name} became the mean of {met}")
            same(state[name], due, f"rank {rank}: {name}")


def right_5(values: list, given: list) -> None:
    steps = len(given[0][0])
    for rank, w in enumerate(values):
        if isinstance(w, Tensor) and not w.isfinite().all():
            raise Wrong(f"rank {rank}: w is not finite; a bad step was taken")
        if isinstance(w, Tensor) and torch.equal(w, sgd(given, steps, "drop")):
            raise Wrong(f"rank {rank}: bad gradients were left out, the others' of that step taken")
        if isinstance(w, Tensor) and torch.equal(w, sgd(given, steps - 1)):
            told = "the last step was left out, though each element of its gradient is finite"
            raise Wrong(f"rank {rank}: {told} (their sum and their squares are not)")
        same(w, sgd(given, steps), f"rank {rank}: w after {steps} steps, the bad ones left out")


def check_calls(job: int, n: int, given: list, rank: int, calls: list) -> None:
    """The calls that the job is meant to make; in job 2, one more to agree on the steps."""
    agree = next((e for e in calls if job == 2 and e.nbytes <= 8 * n), None)
    partners = [p for p in (rank - 1, rank + 1) if 0 <= p < n]
    due = {
        1: {"all_reduce of 16 B": 1},
        2: {"all_reduce of 48 B": max(len(batches) for batches, *_ in given)},
        3: {f"send of 40 B, rank {p}": 1 for p in partners}
        | {f"recv of 40 B, rank {p}": 1 for p in partners},
        4: {"all_reduce of 40 B": 2, "broadcast of 8 B": 1},
        5: {"all_reduce of 48 B": len(given[0][0])},
    }[job]
    made = Counter(
        f"{e.op} of {e.nbytes} B" + (f", rank {e.peer}" if e.op in ("send", "recv") else "")
        for e in calls
        if e is not agree
    )
    expect(dict(sorted(made.items())), dict(sorted(due.items())), f"rank {rank}: its calls")


# The change is a small one


def body_of(path: Path, job: int) -> ast.Module:
    """The statements of a job, its docstring left out."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == f"job_{job}":
            return ast.Module(node.body[1:] if ast.get_docstring(node) else node.body, [])
    raise Wrong(f"job_{job} is not there")


def names_in(path: Path, job: int) -> set[str]:
    nodes = list(ast.walk(body_of(path, job)))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in nodes if isinstance(node, ast.Name)}


@pytest.mark.parametrize("job", [1, 2, 3, 4, 5])
def test_the_change_is_small(answer: Path, job: int) -> None:
    """Job {job} is fixed, not written anew"""
    before = [line.strip() for line in ast.unparse(body_of(JOBS, job)).split("\n")]
    after = [line.strip() for line in ast.unparse(body_of(answer, job)).split("\n")]
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = sum(max(a1 - a0, b1 - b0) for op, a0, a1, b0, b1 in changes if op != "equal")
    if changed > LINES[job]:
        raise Wrong(f"{changed} lines differ from the job in jobs.py; {LINES[job]} are enough")
