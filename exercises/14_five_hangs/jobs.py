"""Five jobs that hang. Fix them in answers/14_five_hangs.py, not here; README.md says how.

    python exercises/14_five_hangs/jobs.py 1

runs job 1 on 3 ranks and, once all that have not come back are asleep, says who waits where.
"""

import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

Batches = list[tuple[Tensor, Tensor]]


def job_1(x: Tensor, y: Tensor, w: Tensor) -> str | None:
    """The accuracy over all ranks' validation samples, reported by rank 0."""
    hits = ((x @ w).argmax(1) == y).sum()
    counts = torch.stack([hits, torch.tensor(len(y))])
    if dist.get_rank() == 0:
        dist.all_reduce(counts)
        right, seen = counts.tolist()
        return f"{right} of {seen} right"
    return None


def job_2(batches: Batches, w: Tensor) -> Tensor:
    """Data-parallel SGD: a step takes one batch of each rank and sums their gradients."""
    for x, y in batches:
        error = x @ w - y
        grad = x.T @ error
        dist.all_reduce(grad)
        w = w - grad / 64
    return w


def job_3(w: Tensor) -> Tensor:
    """Gossip: average w with the one neighbor, then with the other."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    for round in range(2):
        partner = rank + 1 if (rank + round) % 2 == 0 else rank - 1
        if 0 <= partner < n:
            theirs = torch.empty_like(w)
            dist.send(w, partner)
            dist.recv(theirs, partner)
            w = (w + theirs) / 2
    return w


def job_4(state: dict[str, Tensor]) -> None:
    """Make replicas equal, in place: floats become the mean over ranks, integers rank 0's."""
    n = dist.get_world_size()
    for tensor in state.values():
        if tensor.is_floating_point():
            dist.all_reduce(tensor)
            tensor /= n
        else:
            dist.broadcast(tensor, 0)


def job_5(batches: Batches, w: Tensor) -> Tensor:
    """SGD as in job 2, as many batches on every rank. A step in which any rank's gradient is not
    finite is left out on all ranks."""
    for x, y in batches:
        error = x @ w - y
        grad = x.T @ error
        if not grad.isfinite().all():
            continue  # one bad sample must not spoil w
        dist.all_reduce(grad)
        w = w - grad / 64
    return w


# What they are called with, and how to watch them hang


def given(job: int, n: int, seed: int = 0) -> list[tuple]:
    """The arguments of each of n ranks: whole numbers, other ones on every rank."""
    random = torch.Generator().manual_seed(10 * seed + job)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=random).double()

    def some_batches(count: int) -> Batches:
        return [(numbers(2, 6), numbers(2)) for _ in range(count)]

    w = numbers(6)
    of_rank = []
    names = ["weight", "num_batches_tracked", "offset"]  # two are of one length
    for r in range(n):
        if job == 1:
            w = w.reshape(2, 3)
            y = torch.randint(0, 3, (3 + 2 * r,), generator=random)
            of_rank.append((numbers(3 + 2 * r, 2), y, w))
        elif job == 2:
            counts = {2: [2, 4], 3: [4, 2, 0], 4: [1, 0, 2, 4]}[n]
            of_rank.append((some_batches(counts[r]), w))
        elif job == 3:
            of_rank.append((numbers(5),))
        elif job == 4:
            state = {name: 12 * numbers(5) for name in names}
            state["num_batches_tracked"] = torch.tensor(10 + r)
            order = names[r % 3 :] + names[: r % 3]  # as a set of names may give them
            of_rank.append(({name: state[name] for name in order},))
        elif job == 5:
            batches = some_batches(6)
            bad = [{3: torch.inf}, {1: torch.inf, 3: torch.nan}, {}, {}][r]
            for step, value in bad.items():
                x, y = batches[step]
                x[1] = 1  # then each element of the gradient is infinite, or NaN
                y[1] = value
            if r == 1:
                x, y = batches[4]
                x[1, 2] = 1e200  # then one element of the gradient is infinite
                y[1] = 1e300
                x, y = batches[5]
                x[1] = 0
                x[1, 2:4] = 1  # and here two are finite, their sum and their squares are not
                y[1] = 2.0**1023
            of_rank.append((batches, w))
    return of_rank


def on_a_rank(function: Callable, arguments: list[tuple]) -> None:
    function(*arguments[dist.get_rank()])


def main() -> None:
    if sys.argv[1:] not in [[str(job)] for job in range(1, 6)]:
        sys.exit(__doc__)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from course.ranks import attempt

    job = int(sys.argv[1])
    broken = globals()[f"job_{job}"]
    print(f"job {job} on 3 ranks; 1.5 s after all that have not come back fell asleep:")
    for o in attempt(on_a_rank, 3, broken, given(job, 3)):
        print(f"  rank {o.rank} {o.text.replace(__file__, 'jobs.py') or 'came back'}")
        if line := re.search(r"jobs\.py:(\d+)", o.text):
            print(f"         {linecache.getline(__file__, int(line[1])).strip()}")


if __name__ == "__main__":
    main()
