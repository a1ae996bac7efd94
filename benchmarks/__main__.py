"""Every speed ratio this course states, ours next to the library's, measured now: `make bench`.

A file benchmarks/NAME.py brings `ratios(repeats)`, a list of dicts: name, setting, ours and peer
(seconds, one per repeat, measured alternately), and aim, what ours / peer should be at most.
Nothing is judged: a shared machine is no referee. Writes bench.json and bench.png to build/bench,
or with --keep to results/bench, or with --into to any folder.
"""

import argparse
import importlib
import json
import os
import platform
import time
from pathlib import Path
from statistics import median, quantiles

import torch

from course.lessons import ROOT

NAMES = ("ddp", "ffcv", "model_parallel", "ring", "zero")


def row_of(result: dict) -> dict:
    """Add what the table shows: medians, and the ratio's median and quartiles over the repeats."""
    ratios = [ours / peer for ours, peer in zip(result["ours"], result["peer"], strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return result | {"ratio": median(ratios), "low": low, "high": high}


def show(row: dict) -> str:
    ours, peer = 1e3 * median(row["ours"]), 1e3 * median(row["peer"])
    spread = f"{row['low']:.2f} to {row['high']:.2f}"
    kept = "kept" if row["ratio"] <= row["aim"] else "MISSED"
    ratio = f"{row['ratio']:6.2f}  {spread:>13}  <= {row['aim']:<5.2f}{kept}"
    return f"{row['name']:56} {ours:8.1f} {peer:8.1f} {ratio}"


def draw(rows: list[dict], path: str) -> None:
    """Each ratio as a dot with its quartiles, the aim as a bar; below the bar is good."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.4 * len(rows)), layout="constrained")
    for y, row in enumerate(reversed(rows)):
        below, above = row["ratio"] - row["low"], row["high"] - row["ratio"]
        axes.errorbar(row["ratio"], y, xerr=[[below], [above]], fmt="o", color="C0", capsize=3)
        axes.plot([row["aim"]] * 2, [y - 0.35, y + 0.35], color="C3", linewidth=2)
    axes.axvline(1, color="0.7", linewidth=1, zorder=0)
    axes.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)])
    axes.set_xlabel("our time / the peer's (median, quartiles); red: the aim")
    figure.savefig(path, dpi=150)


def merged(new: list[dict], kept: Path) -> list[dict]:
    """The rows kept from before, with the new ones in their places, or behind them."""
    old = json.loads(kept.read_text())["rows"] if kept.exists() else []
    rows = {row["name"]: row for row in old}
    rows |= {row["name"]: row for row in new}
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="write to results/bench")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="write there")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each (10)")
    parser.add_argument("--only", choices=NAMES, help="this one alone; keep the others' results")
    options = parser.parse_args()
    folder = options.into or ROOT / ("results/bench" if options.keep else "build/bench")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"date": time.strftime("%F"), "torch": torch.__version__, "cpus": os.cpu_count()}
    about |= {"python": platform.python_version(), "repeats": options.repeats}
    print("  ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    head = f"{'ratio':>6}  {'quartiles':>13}  aim"
    print(f"{'ours against':56} {'ours ms':>8} {'peer ms':>8} {head}", flush=True)
    rows = []
    for name in [options.only] if options.only else NAMES:
        bench = importlib.import_module(f"benchmarks.{name}")
        for result in bench.ratios(options.repeats):
            rows.append(row_of(result))
            print(show(rows[-1]), flush=True)
    if options.only:
        rows = merged(rows, folder / "bench.json")
    (folder / "bench.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    draw(rows, str(folder / "bench.png"))
    print(f"\nbench.json and bench.png: {folder}")


if __name__ == "__main__":
    main()
