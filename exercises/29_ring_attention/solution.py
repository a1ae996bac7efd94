"""Causal attention over a sequence that no rank holds, with the same work on every rank.

Task: exercises/29_ring_attention/README.md.
"""

import torch
import torch.distributed as dist
from torch import Tensor

# Shapes: B sequences, H heads, T tokens of the whole sequence, t = T / n of them on this rank, D
# numbers per head.


def places(T: int, n: int, rank: int) -> Tensor:
    """Return which t = T / n of the T places of a sequence rank `rank` of n holds, in order.

    The sequence is cut into 2 n equal pieces, and each rank gets two: the first and the last, the
    second and the one before the last, and so on (zig-zag). T = 8, n = 2: rank 0 has 0, 1, 6, 7 and
    rank 1 has 2, 3, 4, 5. 2 n divides T.
    """
    # --- yours
    pieces = torch.arange(T).chunk(2 * n)
    return torch.cat([pieces[rank], pieces[2 * n - 1 - rank]])
    # --- end


def attention(
    q_BHqD: Tensor, k_BHkD: Tensor, v_BHkD: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of some queries over some keys: o (B, H, q, D), and the log of the sum of its
    exponentials, lse (B, H, q). causal: query i sees keys 0 to i (there are as many of both)."""
    score_BHqk = q_BHqD @ k_BHkD.mT / q_BHqD.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(score_BHqk.shape[-2:], dtype=torch.bool).triu(1)
        score_BHqk = score_BHqk.masked_fill(hidden, -torch.inf)
    return score_BHqk.softmax(-1) @ v_BHkD, score_BHqk.logsumexp(-1)


def merge(
    o1_BHTD: Tensor, lse1_BHT: Tensor, o2_BHTD: Tensor, lse2_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Join the attention over some keys with that over others (exercise 27). Each has a key."""
    lse_BHT = torch.logaddexp(lse1_BHT, lse2_BHT)
    share1 = (lse1_BHT - lse_BHT).exp().unsqueeze(-1)
    share2 = (lse2_BHT - lse_BHT).exp().unsqueeze(-1)
    return share1 * o1_BHTD + share2 * o2_BHTD, lse_BHT


def ring_attention(q_BHtD: Tensor, k_BHtD: Tensor, v_BHtD: Tensor) -> Tensor:
    """Return this rank's rows of the causal attention over the whole sequence, (B, H, t, D).

    q, k, v: this rank's rows, those of `places(T, n, rank)`, of one dtype; they stay as they are.
    It is called without gradients. Build it of `attention` and `merge`: torch's own
    scaled_dot_product_attention, which does not tell lse, is not to be used.

    Keys and values travel round the ring, n - 1 times to the next rank, and are never gathered, on
    no rank: what is computed with and passed on is let go, and no copy is kept. In all, a rank
    sends 2 (n - 1) B H t D numbers. Only point-to-point.

    Of the scores between this rank's queries and another's keys exactly half are visible, and they
    form one block. With its own keys a rank may compute all t x t. So it computes at most
    t t + (n - 1) t t / 2 scores, and exactly as many as any other rank.
    """
    # --- yours
    rank = dist.get_rank()
    n = dist.get_world_size()
    half = q_BHtD.shape[2] // 2
    o_BHtD, lse_BHt = attention(q_BHtD, k_BHtD, v_BHtD, causal=True)
    here = torch.stack([k_BHtD, v_BHtD])
    for step in range(1, n):
        came = torch.empty_like(here)
        out = dist.P2POp(dist.isend, here, (rank + 1) % n)
        into = dist.P2POp(dist.irecv, came, (rank - 1) % n)
        for work in dist.batch_isend_irecv([out, into]):
            work.wait()
        here = came
        k, v = here
        if (rank - step) % n < rank:  # all my queries see the first half of its keys
            seen = attention(q_BHtD, k[:, :, :half], v[:, :, :half], causal=False)
            o_BHtD, lse_BHt = merge(o_BHtD, lse_BHt, *seen)
        else:  # the second half of my queries sees all its keys
            late = attention(q_BHtD[:, :, half:], k, v, causal=False)
            joined = merge(o_BHtD[:, :, half:], lse_BHt[:, :, half:], *late)
            o_BHtD = torch.cat([o_BHtD[:, :, :half], joined[0]], dim=2)
            lse_BHt = torch.cat([lse_BHt[:, :, :half], joined[1]], dim=2)
    return o_BHtD
    # --- end


# Live: torchrun --standalone --nproc-per-node=2 answers/29_ring_attention.py


def main() -> None:
    """Print the time of the ring, and how far its output is from one process's."""
    from course.live import joined, largest, milliseconds, say

    with joined() as device:
        n = dist.get_world_size()
        T = n * (2048 if device.type == "cuda" else 128)
        torch.set_default_device(device)
        torch.manual_seed(0)  # the same on all ranks
        q, k, v = torch.randn(3, 1, 8, T, 64)
        mine = places(T, n, dist.get_rank())
        rows = [x[:, :, mine] for x in (q, k, v)]
        due = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, mine]
        off = largest((ring_attention(*rows) - due).norm() / due.norm(), device)
        ms = milliseconds(lambda: ring_attention(*rows), device)
        say(f"{n} ranks on {device.type}, {T:,} tokens: {ms:.2f} ms;")
        say(f"outputs are {off:.1g} of their length from one process's")


if __name__ == "__main__":
    main()
