"""`make test` and `make test-all`: run the suite's tiers, and say what came of it.

    python -m tests.run gate     what guards a change; what fails is confirmed before it is believed
    python -m tests.run night    everything, once; tests/passed.txt says what is green
    python -m tests.run stale    only say which groups the gate would play deep, and why

tests/README.md tells what runs when, and why.
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from course.lessons import ROOT
from tests import groups

FLAKY = ROOT / "tests/flaky.txt"
MOST = 3  # so many may flake in one run, and no more
FAILED = 1  # pytest's exit status where tests failed, and nothing worse happened
DEEP_MINUTES = 30.0  # after so many the gate begins no deep test (tests/deep_minutes.py)


def pytest(tier: str, *arguments: str, workers: str = "") -> tuple[int, list[str]]:
    """Run a tier, or the tests named; return pytest's exit status and the names of what failed."""
    command = [sys.executable, "-m", "pytest", f"--tier={tier}", "--durations=10", *arguments]
    command += ["-n", workers, "--dist", "worksteal"] if workers else ["-p", "no:xdist"]
    with tempfile.TemporaryDirectory() as folder:
        failed = Path(folder, "failed")
        env = os.environ | {"FAILED": str(failed)}
        status = subprocess.run(command, cwd=ROOT, env=env).returncode
        return status, failed.read_text().splitlines() if failed.exists() else []


def gate(workers: str) -> int:
    """Unmarked tests, and the deep ones of groups that have changed; confirm what fails."""
    stale = groups.stale()
    say_what_is_deep(stale)
    os.environ["STALE"] = json.dumps(sorted(stale))
    minutes = float(os.environ.get("DEEP_MINUTES", DEEP_MINUTES))
    os.environ["DEEP_UNTIL"] = str(time.time() + 60 * minutes)
    status, failed = pytest("gate", "-p", "tests.deep_minutes", workers=workers)
    if status != FAILED:
        return status
    if len(failed) > MOST:
        print(f"\n{len(failed)} tests failed, and more than {MOST} are never taken for chance.")
        return status
    print(f"\n=== Confirming, alone and twice: {', '.join(failed)}", flush=True)
    for _ in range(2):
        status, _ = pytest("all", *failed)
        if status:
            return status
    return flaked(failed)


def say_what_is_deep(stale: dict[str, list[str]]) -> None:
    """Print which groups of tests are played deep, and what of each has changed."""
    every = groups.every()
    if groups.read_passed() is None:
        print("All groups are played deep: tests/passed.txt is missing or damaged.", flush=True)
        return
    for changed in dict.fromkeys(map(tuple, stale.values())):
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        played = [group for group, what in stale.items() if tuple(what) == changed]
        print(f"Deep, since this has changed: {', '.join(changed[:4])}{more}:")
        print(textwrap.fill(", ".join(played), 100, initial_indent="  ", subsequent_indent="  "))
    unchanged = len(every) - len(stale)
    print(
        f"Not deep: {unchanged} of {len(every)} groups, as they were when all was green.",
        flush=True,
    )


def flaked(names: list[str]) -> int:
    """What failed once and passed twice: green, unless it has flaked before."""
    known = FLAKY.read_text().splitlines()
    again = [name for name in names if name in known]
    with FLAKY.open("a") as file:
        file.writelines(f"{name}\n" for name in names if name not in known)
    print()
    if again:
        print(f"In {FLAKY.relative_to(ROOT)} already, so it is fixed at its root now, or goes.")
    for name in names:
        print(f"FLAKY {name}", flush=True)
    return FAILED if again else 0


def night(workers: str) -> int:
    """Everything, and nothing twice: what no clock decides, then the rest, alone on the machine.

    If more than MOST tests fail, nothing is said of the others.
    """
    exact, failed = pytest("night", workers=workers)
    if exact > FAILED:
        return exact
    timed, too_slow = pytest("clock")
    failed += too_slow
    if timed <= FAILED and len(failed) <= MOST:
        groups.write_passed(failed)
        all_is = f"All but {', '.join(failed)} is" if failed else "All is"
        print(f"{all_is} green: {groups.PASSED.relative_to(ROOT)} says so.")
    return exact or timed


def main() -> int:
    workers = os.environ.get("WORKERS", "3")  # they keep two cores busy, since tests also wait
    if sys.argv[1:] == ["stale"]:
        say_what_is_deep(groups.stale())
        return 0
    return {"gate": gate, "night": night}[sys.argv[1]](workers)


if __name__ == "__main__":
    sys.exit(main())
