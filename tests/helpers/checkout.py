"""A copy of this repository as git has it, in which a test may do what it likes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from course.lessons import ROOT


def checkout(folder: Path) -> Path:
    """Copy every file that git does not ignore to `folder`, and commit it there."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():  # and not one that was removed, but not yet from the index
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    who = ("-c", "user.name=A learner", "-c", "user.email=learner@example.org")
    git(folder, *who, "commit", "-q", "-m", "A clone")
    return folder


def git(folder: Path, *arguments: str) -> str:
    """What git says in that folder; raises if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def changed_files(folder: Path) -> set[str]:
    """What `git status` shows: changed, removed or new, and not ignored."""
    lines = git(folder, "status", "--porcelain", "-uall").splitlines()
    return {line[3:] for line in lines}


def python(folder: Path, *arguments: str, timeout: float = 600) -> str:
    """Run Python in that folder; return what it printed, and fail the test if it failed."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    return ran.stdout
