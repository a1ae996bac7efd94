"""The scaling curve: speed-up, efficiency, and the number of ranks beyond which a job gets slower.

Task: exercises/18_scaling_curve/README.md.
"""

import statistics
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:  # matplotlib takes a second to load, and only `draw` needs it
    from matplotlib.axes import Axes

WARM_UP = 3  # the first steps allocate, connect and compile: they do not count


def seconds_per_step(mine: list[float]) -> float:
    """How long a step takes on all ranks of the default group: the same number on each.

    mine: seconds of this rank's steps; all ranks took equally many, in step with each other

    A step is over when its slowest rank is. Leave the first WARM_UP steps out, and return the
    median of the others. One collective, of at most 8 bytes per step.
    """
    # --- yours
    slowest = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest[WARM_UP:].tolist())
    # --- end


def efficiency(times: dict[int, float], batch: dict[int, int]) -> dict[int, float]:
    """Samples per second of n ranks, over n times those of one rank, for every n of `times`.

    times: {number of ranks: seconds per step}, with 1 among them
    batch: {number of ranks: samples of a step, all ranks together}: it stays in strong scaling,
    grows with n in weak scaling, and may do neither
    """
    # --- yours
    speed = {n: batch[n] / times[n] for n in times}
    return {n: speed[n] / (n * speed[1]) for n in times}
    # --- end


def fit(times: dict[int, float]) -> tuple[float, float, float]:
    """Find a, b and c of T(n) = a + b/n + c (n - 1), in seconds, from three or more times.

    a is done by every rank in full, b is shared, and c is what each further rank adds to the
    all-reduce: one more hop around the ring. Least squares, in float64.
    """
    # --- yours
    lines = torch.tensor([[1, 1 / n, n - 1] for n in times], dtype=torch.float64)
    seconds = torch.tensor(list(times.values()), dtype=torch.float64)
    a, b, c = torch.linalg.lstsq(lines, seconds[:, None]).solution.flatten().tolist()
    return a, b, c
    # --- end


def fastest(a: float, b: float, c: float, most: int) -> int:
    """The number of ranks, 1 to `most`, with the shortest step; of equals the smallest."""
    # --- yours
    return min(range(1, most + 1), key=lambda n: a + b / n + c * (n - 1))
    # --- end


def draw(axes: "Axes", times: dict[int, float], most: int) -> None:
    """Draw three lines with labels, over the number of ranks.

    "ideal": speed-up n, for n = 1 to `most`
    "measured": the speed-up T(1) / T(n) at each n of `times`, in order, as points without a line
    "fitted": the speed-up that `fit` finds, at n = 1 to `most`, over the fitted T(1)

    Name both axes, and show the legend.
    """
    # --- yours
    ranks = range(1, most + 1)
    a, b, c = fit(times)
    axes.plot(ranks, ranks, ":", label="ideal")
    axes.plot(sorted(times), [times[1] / times[n] for n in sorted(times)], "o", label="measured")
    axes.plot(ranks, [(a + b) / (a + b / n + c * (n - 1)) for n in ranks], label="fitted")
    axes.set(xlabel="ranks", ylabel="speed-up")
    axes.legend()
    # --- end


def main() -> None:
    """A job of 10 ms + 400 ms / n + 1 ms (n - 1), measured on few ranks, drawn for many."""
    from matplotlib.figure import Figure

    times = {n: 0.010 + 0.400 / n + 0.001 * (n - 1) for n in (1, 2, 4, 8)}
    a, b, c = fit(times)
    print(f"T(n) = {a * 1e3:.1f} ms + {b * 1e3:.1f} ms / n + {c * 1e3:.2f} ms (n - 1)")
    print(f"fastest on {fastest(a, b, c, 64)} of 64 ranks")
    figure = Figure((6, 4), layout="constrained")
    draw(figure.subplots(), times, 64)
    figure.savefig("scaling_curve.png", dpi=120)
    print("scaling_curve.png")


if __name__ == "__main__":
    main()
