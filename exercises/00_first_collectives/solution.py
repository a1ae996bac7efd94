"""Ten first calls of torch.distributed, one to three lines each.

Task: exercises/00_first_collectives/README.md.

In every example three ranks take part: rank 0 holds [1, 2, 3], rank 1 [10, 20, 30] and rank 2
[100, 200, 300].
"""

from collections.abc import Callable

import torch
import torch.distributed as dist


def sum_and_mean(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1. Return the sum of all ranks' `x`, and their mean, on every rank. `x` stays as it is.

    The sum is [111, 222, 333], the mean [37, 74, 111]. One dist.all_reduce, which works in place.
    """
    # --- yours
    total = x.clone()
    dist.all_reduce(total)
    return total, total / dist.get_world_size()
    # --- end


def agree(x: torch.Tensor, source: int) -> None:
    """2. Overwrite every rank's `x` by that of rank `source`.

    With source = 1, all hold [10, 20, 30] afterwards. One dist.broadcast. Every rank calls it: the
    one that sends and those that receive.
    """
    # --- yours
    dist.broadcast(x, src=source)
    # --- end


def stack_all(x: torch.Tensor) -> torch.Tensor:
    """3. Return all ranks' `x`, row r that of rank r, on every rank. `x` stays as it is.

    [[1, 2, 3], [10, 20, 30], [100, 200, 300]]. One dist.all_gather into a list of tensors.
    (Or dist.all_gather_into_tensor: it takes one tensor, as long as all ranks' together.)
    """
    # --- yours
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)
    return torch.stack(rows)
    # --- end


def my_part_of_the_sum(x: torch.Tensor) -> torch.Tensor:
    """4. Return this rank's 1/n of the sum of all ranks' `x`; n divides the length of `x`.

    Rank 0 returns [111], rank 1 [222] and rank 2 [333]: what an all-reduce would hold, cut into n
    shards. `x` is 1-D and stays as it is. One dist.reduce_scatter_tensor (or dist.reduce_scatter,
    which takes a list). ZeRO and FSDP reduce gradients this way.
    """
    # --- yours
    part = x.new_empty(len(x) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, x)
    return part
    # --- end


def exchange_rows(x: torch.Tensor) -> torch.Tensor:
    """5. Row i of rank j goes to rank i, and becomes its row j; `x` has n rows and stays as it is.

    With one number per row: rank 0 returns [1, 10, 100], rank 1 [2, 20, 200] and rank 2
    [3, 30, 300]. One dist.all_to_all_single, as expert parallelism sends tokens to their experts.
    """
    # --- yours
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x)
    return arrived
    # --- end


def hand_over(x: torch.Tensor, source: int, target: int) -> None:
    """6. Overwrite rank `target`'s `x` by that of rank `source`. All others do nothing.

    One dist.send and one dist.recv, each on the rank whose turn it is, and each names the other.
    """
    rank = dist.get_rank()
    if rank == source:
        # --- yours
        dist.send(x, dst=target)
        # --- end
    elif rank == target:
        # --- yours
        dist.recv(x, src=source)
        # --- end


def look_when_all_have_worked(work: Callable[[], None], look: Callable[[], int]) -> int:
    """7. Call `work()`; when *every* rank has come back from its own, return `look()`.

    `work` writes a checkpoint's shard, say, and `look` counts the files. Each is called once. One
    dist.barrier.
    """
    # --- yours
    work()
    dist.barrier()
    return look()
    # --- end


def sum_of_my_kind(x: torch.Tensor) -> None:
    """8. Ranks 0, 2, 4, ... sum their `x` in place among themselves; so do ranks 1, 3, 5, ...

    Ranks 0 and 2 hold [101, 202, 303], rank 1 still [10, 20, 30]; the grader has 3 ranks, and 4.
    Two calls of dist.new_group, both on every rank and in the same order, also where a rank is no
    member; then one dist.all_reduce.
    """
    # --- yours
    n = dist.get_world_size()
    groups = [dist.new_group(range(first, n, 2)) for first in (0, 1)]
    dist.all_reduce(x, group=groups[dist.get_rank() % 2])
    # --- end


def generators(seed: int) -> tuple[torch.Generator, torch.Generator]:
    """9. Return two new generators: one alike on all ranks, and one that differs on every rank.

    The first draws the initial weights, which must be the same everywhere; the second draws dropout
    and augmentation, which must not be, nor repeat the first. The first depends on `seed` alone,
    the second on `seed` and the rank, so that a run can be repeated. `seed` may be 0. Torch's
    global generator stays as it is.
    """
    # --- yours
    weights = torch.Generator().manual_seed(seed)
    dropout = torch.Generator().manual_seed(seed + 1 + dist.get_rank())
    return weights, dropout
    # --- end


def backend_and_device(
    rank: int, local_rank: int, local_world_size: int, gpus: int
) -> tuple[str, torch.device]:
    """10. Return the backend and the device of this rank, before the group exists.

    rank: its number among all ranks of all nodes. local_rank: its number on this node, which has
    `local_world_size` ranks and `gpus` GPUs. If each of these ranks can have a GPU of its own:
    "nccl", and the GPU numbered as the rank is on this node. Otherwise "gloo", and the CPU. (That
    is enough where all nodes are alike. Where one lacks a GPU its ranks would choose another
    backend, and all would wait: the lessons' `setup` asks every rank first.)
    """
    # --- yours
    if gpus >= local_world_size:
        return "nccl", torch.device("cuda", local_rank)
    return "gloo", torch.device("cpu")
    # --- end
