"""The commands' own parts that can be tried without installing anything."""

import os
import subprocess
from pathlib import Path

import pytest

from course.lessons import ROOT

PACKAGES = (ROOT / "packages.txt").read_text().split()


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def system_packages(folder: Path) -> subprocess.CompletedProcess:
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "course/system_packages.sh"],
        cwd=ROOT,
        env=os.environ | {"PATH": path, "LOG": str(folder / "log")},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Commands of a machine that has only g++, and whose apt-get notes what it is asked."""
    stub(tmp_path, "dpkg-query", 'case "$*" in *g++*) echo "install ok installed";; esac')
    stub(tmp_path, "apt-get", 'echo "$@" >> "$LOG"')
    stub(tmp_path, "id", "echo 0")
    return tmp_path


def test_root_gets_just_what_is_missing(machine: Path) -> None:
    assert system_packages(machine).returncode == 0
    update, install = (machine / "log").read_text().splitlines()
    assert update.startswith("update")
    assert [word for word in install.split() if word in PACKAGES] == PACKAGES[1:]


def test_without_rights_it_says_exactly_what_to_install_and_goes_on(machine: Path) -> None:
    stub(machine, "id", "echo 1000")
    stub(machine, "sudo", "exit 1")
    ran = system_packages(machine)
    assert ran.returncode == 0
    assert f"sudo apt install {' '.join(PACKAGES[1:])}" in ran.stdout
    assert not (machine / "log").exists()


def test_where_nothing_is_missing_nothing_is_asked(machine: Path) -> None:
    stub(machine, "dpkg-query", 'echo "install ok installed"')
    ran = system_packages(machine)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert not (machine / "log").exists()


def test_a_failed_download_is_told_and_not_fatal(machine: Path) -> None:
    stub(machine, "apt-get", "exit 100")
    ran = system_packages(machine)
    assert ran.returncode == 0
    assert "could not be installed" in ran.stdout
