"""`course doctor`: is everything here that the course needs, and what is to be done if not?

It looks at what a lesson cannot look at: Python, the environment, the disk, the clone, packages.
If torch is there it goes on with fundamentals/00_check_your_machine.py, which tries GPUs, network
and shared memory. Nothing is imported before it was found, so this file starts on sick machines.
`course doctor --log FILE ...` names what killed the job that wrote these; launch/diagnose.py does.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from course.terminal import command

ROOT = Path(__file__).resolve().parents[1]
LESSON = "fundamentals/00_check_your_machine.py"
DIAGNOSE = "launch/diagnose.py"
OLDEST = (3, 11)  # of Python
NEWEST = (3, 14)
OLDEST_TORCH = (2, 11)
SPARE = 8e9  # bytes that `make test` may still need: compilers, DeepSpeed, FFCV
LEAST = 1e9  # bytes without which lessons cannot write their files


@dataclass
class Finding:
    """One row: what was looked at, how it is (ok, warn or bad), and what to do about it."""

    label: str
    state: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = {"ok": "✓", "warn": "!", "bad": "✗"}[self.state]
        text = f"  {mark} {self.label:12} {self.found}"
        return f"{text}\n{'':17}-> {self.remedy}" if self.remedy else text


def python() -> Finding:
    """The version of Python that runs this."""
    version = sys.version_info[:2]
    found = f"{platform.python_version()}, {sys.executable}"
    if OLDEST <= version <= NEWEST:
        return Finding("Python", "ok", found)
    return Finding("Python", "bad", found, "3.11 to 3.14: make start PYTHON=python3.12")


def environment() -> Finding:
    """Whether what is installed here stays apart from the system's Python."""
    if sys.prefix != sys.base_prefix:
        return Finding("environment", "ok", f"virtual, {sys.prefix}")
    if "CONDA_PREFIX" in os.environ:
        return Finding("environment", "ok", f"conda, {os.environ['CONDA_PREFIX']}")
    remedy = "make start makes one; an image of your own or Colab needs none"
    return Finding("environment", "warn", "none: this is the system's Python", remedy)


def system(root: Path = ROOT, kernel: str = platform.release()) -> Finding:
    """The operating system; on WSL2 also whether the clone lies on a slow Windows drive."""
    name = f"{platform.system()} {platform.machine()}"
    if "microsoft" not in kernel.lower():
        return Finding("system", "ok", name)
    if re.match(r"/mnt/[a-z]/", f"{root}/"):
        found = f"WSL2, and the clone lies on a Windows drive, {root}"
        return Finding("system", "warn", found, "slow, and links fail there: git clone into ~")
    return Finding("system", "ok", "WSL2")


def disk(root: Path = ROOT) -> Finding:
    free = shutil.disk_usage(root).free
    found = f"{free / 1e9:.1f} GB free"
    if free < LEAST:
        return Finding("disk", "bad", found, "lessons write files: free 1 GB at least")
    if free < SPARE:
        return Finding("disk", "warn", found, "enough for lessons; `make test` takes 8 GB")
    return Finding("disk", "ok", found)


def clone(root: Path = ROOT) -> Finding:
    """Whether every file that git knows is still there."""
    command = ["git", "-C", str(root), "ls-files", "--deleted"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return Finding("clone", "warn", "git is not installed", "sudo apt install git")
    if asked.returncode != 0:
        remedy = "works, but `git pull` cannot bring it up to date: git clone it"
        return Finding("clone", "warn", "not a git clone", remedy)
    gone = asked.stdout.split()
    if gone:
        found = f"{len(gone)} files are missing, {gone[0]} for one"
        return Finding("clone", "bad", found, f"git checkout -- {gone[0]}    (or: .)")
    return Finding("clone", "ok", str(root))


def answers(root: Path = ROOT) -> Finding:
    """Whether `course start` may write the learner's files."""
    folder = root / "answers"
    if folder.exists() and not folder.is_dir():
        return Finding("answers/", "bad", "a file, where a folder should be", "move it away")
    if not os.access(folder if folder.exists() else root, os.W_OK):
        remedy = f"chmod u+w {root}, or clone where you may write"
        return Finding("answers/", "bad", f"{folder} cannot be written", remedy)
    written = len(list(folder.glob("*.py")))
    return Finding("answers/", "ok", f"{written} begun" if written else "none begun")


def version_of(package: str) -> str:
    """The version that is installed, or ''."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def project(root: Path = ROOT) -> dict:
    """What pyproject.toml says of dependencies."""
    import tomllib  # Python 3.11 brought it

    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> list[str]:
    """The packages that these requirements name, without versions."""
    return [re.split(r"[^\w-]", requirement)[0] for requirement in requirements]


def core(root: Path = ROOT) -> Finding:
    """Every package that lessons and graders import."""
    needed = names(project(root)["dependencies"])
    missing = [name for name in needed if not version_of(name)]
    if missing:
        remedy = f"make start, or {sys.executable} -m pip install -e ."
        return Finding("packages", "bad", f"missing: {', '.join(missing)}", remedy)
    return Finding("packages", "ok", f"all {len(needed)} of the core, pytest among them")


def torch() -> Finding:
    """Whether torch can be imported, in a process of its own, and is new enough."""
    code = "import torch, torch.distributed as d; print(torch.__version__, d.is_gloo_available())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode != 0:
        last = asked.stderr.strip().splitlines()[-1]
        return Finding("torch", "bad", last, "make start installs it")
    version, gloo = asked.stdout.split()
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        return Finding("torch", "bad", version, "2.11 or later: rm -r .venv; make start")
    if gloo != "True":
        return Finding("torch", "bad", f"{version}, without gloo", "torch's own wheels have it")
    return Finding("torch", "ok", version)


def extras(root: Path = ROOT) -> list[Finding]:
    """The packages beyond the core: which lessons say BLOCKED without them."""
    sources = {}
    for path in sorted(root.glob("*/[0-9][0-9]_*.py")):
        sources[str(path.relative_to(root).with_suffix(""))] = path.read_text(encoding="utf-8")
    rows = []
    for extra, needs in project(root)["optional-dependencies"].items():
        package = names(needs)[0]
        version = version_of(package)
        used = re.compile(rf"^ *(import|from) {package}\b", re.MULTILINE)
        using = [lesson for lesson, source in sources.items() if used.search(source)]
        if using and version:
            rows.append(Finding(package, "ok", version))
        elif using:
            found = f"not installed: BLOCKED in {', '.join(using)}"
            remedy = f"{sys.executable} -m pip install -e '.[{extra}]'"
            if extra == "ffcv":
                remedy = "make .venv/all, which asks apt-get for compilers"
            rows.append(Finding(package, "warn", found, remedy))
    return rows


def findings() -> list[Finding]:
    """Everything but the lesson, in the order in which it is shown."""
    first = [python(), environment(), system(), disk(), clone(), answers()]
    if first[0].state == "bad":
        return first
    return [*first, core(), torch(), *extras()]


def run(options: argparse.Namespace) -> int:
    """Show all findings, then run the lesson if torch is there. 1 if something must be repaired."""
    print("Is everything here?\n")
    rows = findings()
    for row in rows:
        print(row, flush=True)
    bad = [row.label for row in rows if row.state == "bad"]
    if {"Python", "torch"} & set(bad):
        print(f"\nTo be repaired first: {', '.join(bad)}")
        return 1
    print(f"\nWhat can it do? {LESSON}\n", flush=True)
    lesson = subprocess.run([sys.executable, ROOT / LESSON])
    if bad:
        print(f"\nTo be repaired: {', '.join(bad)}")
    elif lesson.returncode == 0:
        print(f"\nNothing to repair. What is marked ! or BLOCKED can wait. Next: {command()}")
    return 1 if bad else lesson.returncode


def run_or_read(options: argparse.Namespace) -> int:
    """Read the logs of a job that died, if there are any; else look at this machine."""
    if options.log:
        return subprocess.run([sys.executable, ROOT / DIAGNOSE, "--log", *options.log]).returncode
    return run(options)


def add(subparsers: argparse._SubParsersAction) -> None:
    """Add `course doctor`."""
    parser = subparsers.add_parser("doctor", help="look whether everything is here, and works")
    about = "name what killed the job that printed this; - reads a pipe"
    parser.add_argument("--log", metavar="FILE", nargs="+", help=about)
    parser.set_defaults(run=run_or_read)


if __name__ == "__main__":
    sys.exit(run(argparse.Namespace()))
