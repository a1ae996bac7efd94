"""Ring shift without deadlock. Task: exercises/03_ring_shift/README.md."""

import torch
import torch.distributed as dist


def ring_shift(x: torch.Tensor, shift: int = 1) -> torch.Tensor:
    """Send `x` to the rank `shift` places further round the ring; return what comes from behind.

    x: a tensor of any shape, dtype and memory layout; shape and dtype are the same on all ranks.
    shift: any integer, also 0, negative, or more than there are ranks.
    Returns a contiguous tensor of its own, whatever becomes of x; x stays as it is.

    On 3 ranks that hold [1], [2] and [3]: shift 1 gives them [3], [1] and [2]; shift -1 gives
    [2], [3] and [1]; shift 3 is once round and gives each its own again.

    One message out and one in for each rank, straight to where it belongs; none if that is the
    rank itself. A rank has started both before it waits for either, so all travel at once.
    Only point-to-point: dist.send, recv, isend, irecv, batch_isend_irecv.
    """
    # --- yours
    rank = dist.get_rank()
    n = dist.get_world_size()
    if shift % n == 0:
        return x.clone(memory_format=torch.contiguous_format)
    came = torch.empty_like(x, memory_format=torch.contiguous_format)
    out = dist.P2POp(dist.isend, x.contiguous(), (rank + shift) % n)
    into = dist.P2POp(dist.irecv, came, (rank - shift) % n)
    for work in dist.batch_isend_irecv([out, into]):
        work.wait()
    return came
    # --- end


# Live: torchrun --standalone --nproc-per-node=2 answers/03_ring_shift.py


def main() -> None:
    """Shift a large tensor by one; print its time, and how much came wrong on the worst rank."""
    from course.live import joined, largest, milliseconds, say

    with joined() as device:
        n = dist.get_world_size()
        size = 64_000_000 if device.type == "cuda" else 1_000_000
        ramp = (torch.arange(size, device=device) % 1000).float()
        x = ramp + 1000 * dist.get_rank()
        due = ramp + 1000 * ((dist.get_rank() - 1) % n)
        wrong = largest((ring_shift(x) != due).sum(), device)
        ms = milliseconds(lambda: ring_shift(x), device)
        say(f"{n} ranks on {device.type}: {x.nbytes / 1e6:.0f} MB in {ms:.2f} ms, that is")
        say(f"{x.nbytes / ms / 1e6:.2f} GB/s out and as much in; {wrong:.0f} elements are wrong")


if __name__ == "__main__":
    main()
