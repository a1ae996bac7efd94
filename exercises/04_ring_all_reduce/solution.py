"""Ring all-reduce in both directions. Task: exercises/04_ring_all_reduce/README.md."""

import torch
import torch.distributed as dist


def ring_all_reduce(x: torch.Tensor) -> None:
    """Sum `x` over all ranks, in place, on every rank, by two rings that turn in opposite ways.

    x: a contiguous 1-D tensor of any length, also shorter than the number of ranks; the same
    length on all ranks. Only point-to-point: dist.send, recv, isend, irecv, batch_isend_irecv.

    On 2 ranks that hold [1, 2, 3] and [10, 20, 30], both hold [11, 22, 33] afterwards.

    The first of x.tensor_split(2) goes to the right (rank + 1), the second to the left (rank - 1).
    Each is cut into n chunks (tensor_split again). There are 2 (n - 1) steps; in each, a rank sends
    one chunk to each side and receives one from each side, and starts all four before it waits for
    any. When it returns, it has waited for all. Every rank ends with the same bits.
    """
    # --- yours
    rank = dist.get_rank()
    n = dist.get_world_size()
    for step in range(2 * (n - 1)):
        operations = []
        arriving = []
        for half, way in zip(x.tensor_split(2), (1, -1), strict=True):
            chunks = half.tensor_split(n)
            out = chunks[(way * rank - step) % n]
            into = chunks[(way * rank - step - 1) % n]
            came = torch.empty_like(into)
            operations.append(dist.P2POp(dist.isend, out, (rank + way) % n))
            operations.append(dist.P2POp(dist.irecv, came, (rank - way) % n))
            arriving.append((into, came))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for into, came in arriving:
            into.copy_(into + came if step < n - 1 else came)
    # --- end


# Live: torchrun --standalone --nproc-per-node=2 answers/04_ring_all_reduce.py


def main() -> None:
    """Print the time of this all-reduce and of the library's, and how far they are apart."""
    from course.live import joined, largest, milliseconds, say

    with joined() as device:
        ranks = dist.get_world_size()
        size = 64_000_000 if device.type == "cuda" else 500_000
        x = (torch.arange(size, device=device) % 1000 + dist.get_rank()).float()
        ours = x.clone()
        library = x.clone()
        ring_all_reduce(ours)
        dist.all_reduce(library)
        off = largest((ours - library).abs().max(), device)
        say(f"{ranks} ranks on {device.type}, {x.nbytes / 1e6:.0f} MB:")
        for name, reduce in (("two rings", ring_all_reduce), ("library", dist.all_reduce)):
            ms = milliseconds(lambda reduce=reduce: reduce(x), device)
            busbw = 2 * (ranks - 1) / ranks * x.nbytes / ms / 1e6
            say(f"{name:10} {ms:8.2f} ms, busbw {busbw:7.2f} GB/s")
        say(f"largest difference {off:g}")


if __name__ == "__main__":
    main()
