"""Straggler detector: who is slow, told from own times, without crying wolf.

Task: exercises/25_straggler_detector/README.md.
"""

from math import comb

import torch
import torch.distributed as dist

Stamp = tuple[float, float, float]  # a step was begun, was ready for its all-reduce, was over


def stragglers(stamps: list[Stamp], window: int, margin: float, false_alarm: float) -> list[int]:
    """The ranks that are slow in the last `window` steps, in order: the same list on every rank.

    stamps: of each step so far, on this rank: three readings of its own clock, in seconds. The
    clocks of two ranks are hours apart. All ranks took equally many steps, `window` or more.

    A rank's own time is that until it is ready for the all-reduce. A rank is late in a step if its
    own time is more than 1 + margin times the median of the *other* ranks' own times; of an even
    number of others, take the larger of the two in the middle. A rank is a straggler if it is late
    in at least k of the steps. k is the smallest number for which the probability that a coin falls
    heads in at least k of `window` throws, times the number of ranks, is at most `false_alarm`. If
    no k up to `window` is large enough, nobody is a straggler; nor is a rank that is alone.

    One all-gather, to which each rank hands 8 bytes per step of the window.
    """
    # --- yours
    ranks = dist.get_world_size()
    if ranks == 1:
        return []
    mine = [arrived - begun for begun, arrived, _ in stamps[-window:]]
    own = torch.tensor(mine, dtype=torch.float64)
    gathered = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(gathered, own)
    k = window + 1
    tail = 0.0
    while k > 0 and ranks * (tail + comb(window, k - 1) / 2**window) <= false_alarm:
        k -= 1
        tail += comb(window, k) / 2**window
    found = []
    for rank in range(ranks):
        others = torch.stack(gathered[:rank] + gathered[rank + 1 :])
        median = others.sort(dim=0).values[len(others) // 2]
        if (gathered[rank] > (1 + margin) * median).sum() >= k:
            found.append(rank)
    return found
    # --- end
