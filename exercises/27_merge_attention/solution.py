"""Attention over keys that several ranks hold: merge what each of them found.

Task: exercises/27_merge_attention/README.md.
"""

import torch
import torch.distributed as dist
from torch import Tensor

# Shapes: B sequences, H heads, T queries, D numbers per head.


def merge(
    o1_BHTD: Tensor, lse1_BHT: Tensor, o2_BHTD: Tensor, lse2_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Join the attention over some keys with that over others: as if one softmax had seen both.

    o: the outputs, each divided by its own sum of exponentials. lse: the logarithm of that sum, one
    number per query. Where a part has no key that the query may see, its lse is -inf, and its o is
    whatever happens to lie there, even nan: it must not count.
    Returns o and lse over all keys; where neither part has a key, o is 0 and lse is -inf.

    Scores log 1 and log 3 for the values 10 and 20: merge([10], log 1, [20], log 3) is 17.5 and
    log 4. Scores may be large, also 1,000, -1,000 or -1e9, whose exponentials are inf and 0.
    All tensors are of one dtype, also what is returned. What is given stays as it is.
    """
    # --- yours
    lse_BHT = torch.logaddexp(lse1_BHT, lse2_BHT)
    o_BHTD = torch.zeros_like(o1_BHTD)
    for part_BHTD, part_BHT in ((o1_BHTD, lse1_BHT), (o2_BHTD, lse2_BHT)):
        seen_BHT1 = (part_BHT > -torch.inf).unsqueeze(-1)
        share_BHT1 = (part_BHT - lse_BHT).exp().unsqueeze(-1)
        o_BHTD = o_BHTD + torch.where(seen_BHT1, share_BHT1 * part_BHTD, 0)
    return o_BHTD, lse_BHT
    # --- end


def over_all_ranks(o_BHTD: Tensor, lse_BHT: Tensor) -> Tensor:
    """Return, on every rank, the attention of the same queries over the keys of all ranks.

    Every rank has the same queries, and other keys: o and lse are what it found over its own. All
    ranks return the same, to the bit. For scores, dtype and what is given, see `merge`. Without
    gradients.

    One all-gather, of B H T (D + 1) numbers from each rank.
    """
    # --- yours
    mine = torch.cat([o_BHTD, lse_BHT.unsqueeze(-1)], dim=-1)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    o_BHTD = torch.zeros_like(o_BHTD)
    lse_BHT = torch.full_like(lse_BHT, -torch.inf)
    for part in parts:
        o_BHTD, lse_BHT = merge(o_BHTD, lse_BHT, part[..., :-1], part[..., -1])
    return o_BHTD
    # --- end


# Live: torchrun --standalone --nproc-per-node=2 answers/27_merge_attention.py


def main() -> None:
    """Print how far the merged attention is from that of one process, and its time."""
    from course.live import joined, largest, milliseconds, say

    with joined() as device:
        n = dist.get_world_size()
        keys = 4096 if device.type == "cuda" else 256  # on each rank
        torch.manual_seed(0)  # the same queries, keys and values on all ranks
        q = torch.randn(1, 8, 16, 64, device=device)
        k, v = torch.randn(2, 1, 8, n * keys, 64, device=device)

        def attention(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            scores = q @ k.mT / 8
            return scores.softmax(-1) @ v, scores.logsumexp(-1)

        mine = slice(dist.get_rank() * keys, (dist.get_rank() + 1) * keys)
        found = attention(k[:, :, mine], v[:, :, mine])
        due = attention(k, v)[0]
        off = largest((over_all_ranks(*found) - due).norm() / due.norm(), device)
        ms = milliseconds(lambda: over_all_ranks(*found), device)
        say(f"{n} ranks on {device.type}, {n * keys:,} keys: merged in {ms:.2f} ms;")
        say(f"the outputs are {off:.1g} of their length from one process's")


if __name__ == "__main__":
    main()
