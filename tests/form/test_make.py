"""The commands' own parts that can be tried without installing anything."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from course import doctor
from course.command_line import parser
from course.lessons import ROOT

LISTED = (ROOT / "packages.txt").read_text().splitlines()
PACKAGES = [line for line in LISTED if not line.startswith("#")]
MISSING = [package for package in PACKAGES if package != "g++"]


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def system_packages(folder: Path, **more: str) -> subprocess.CompletedProcess:
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "course/system_packages.sh"],
        cwd=ROOT,
        env=os.environ | {"PATH": path, "LOG": str(folder / "log")} | more,
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


def test_root_gets_just_what_is_missing_and_is_told_before(machine: Path) -> None:
    ran = system_packages(machine)
    assert ran.returncode == 0
    assert f"Now apt-get installs system packages: {' '.join(MISSING)}" in ran.stdout
    assert "SYSTEM_PACKAGES=no" in ran.stdout
    update, install = (machine / "log").read_text().splitlines()
    assert update.startswith("update")
    assert [word for word in install.split() if word in PACKAGES] == MISSING


def test_without_rights_it_says_exactly_what_to_install_and_goes_on(machine: Path) -> None:
    stub(machine, "id", "echo 1000")
    stub(machine, "sudo", "exit 1")
    ran = system_packages(machine)
    assert ran.returncode == 0
    assert f"sudo apt install {' '.join(MISSING)}" in ran.stdout
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


# A Python that is a shell script: it tells the version in $VERSION, has the torch in $TORCH_HERE,
# and notes what pip is asked. Its virtual environments hold such a Python too, which sees that
# torch only if they were made with --system-site-packages.
PYTHON = """
case "$1 $2" in
  "-c import sys"*) echo "$VERSION" ;;
  "-c import venv"*) [ -z "$NO_VENV" ] ;;
  "-c import torch; print"*) [ -e .venv/sees ] && echo "torch==$TORCH_HERE" ;;
  "-c import torch"*)
    case "$0" in .venv/*) [ -e .venv/sees ] || exit 1 ;; esac
    case "$TORCH_HERE" in 2.1[1-9]*) ;; *) exit 1 ;; esac ;;
  "-m venv")
    mkdir -p .venv/bin && cp "$0" .venv/bin/python && rm -f .venv/sees
    case "$*" in *--system-site-packages*) touch .venv/sees ;; esac ;;
  "-m pip") echo "$@" >> "$LOG" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `make .venv/core` reads of this repository, and a Python to begin with."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "packages.txt", "course"):
        (tmp_path / name).symlink_to(ROOT / name)
    stub(tmp_path, "python3", PYTHON)
    return tmp_path


def make(checkout: Path, *arguments: str, **machine: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    env |= {"LOG": str(checkout / "log"), "VERSION": "3.13", "TORCH_HERE": "none"} | machine
    command = ["make", "PYTHON=./python3", *arguments]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)


def asked_of_pip(checkout: Path) -> list[str]:
    log = checkout / "log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.15"])
def test_a_python_that_does_not_fit_is_named_before_pip_starts(
    checkout: Path, version: str
) -> None:
    ran = make(checkout, ".venv/core", VERSION=version)
    assert ran.returncode != 0
    assert f"is Python {version}; this course takes 3.11 to 3.14: make start" in ran.stderr
    assert asked_of_pip(checkout) == []


def test_a_missing_venv_module_is_named_before_pip_starts(checkout: Path) -> None:
    ran = make(checkout, ".venv/core", NO_VENV="1")
    assert ran.returncode != 0
    assert "sudo apt install python3-venv" in ran.stderr
    assert asked_of_pip(checkout) == []


def test_the_core_is_installed_once_and_pinned(checkout: Path) -> None:
    for _ in range(2):
        ran = make(checkout, ".venv/core")
        assert ran.returncode == 0, ran.stderr
    (asked,) = asked_of_pip(checkout)
    assert asked.endswith("-c .venv/constraints.txt -e .")
    pins = (checkout / ".venv/constraints.txt").read_text()
    assert pins == (ROOT / "constraints.txt").read_text()


def test_torch_comes_from_the_index_that_is_named(checkout: Path) -> None:
    make(checkout, ".venv/core", "TORCH_INDEX=https://wheels.example/cpu")
    torch, core = asked_of_pip(checkout)
    assert torch.endswith("--no-deps --index-url https://wheels.example/cpu torch")
    assert "--index-url" not in core
    assert make(checkout, ".venv/all", "SYSTEM_PACKAGES=no").returncode == 0
    vision = [line for line in asked_of_pip(checkout) if line.endswith(" torchvision")]
    assert "--index-url https://wheels.example/cpu" in vision[0], "the address is remembered"


@pytest.mark.parametrize("torch", ["2.11.0a0+34c6371d24.nv26.2", "2.15.0"])
def test_the_torch_of_an_image_is_kept(checkout: Path, torch: str) -> None:
    assert make(checkout, ".venv/core", TORCH_HERE=torch).returncode == 0
    assert (checkout / ".venv/sees").exists()
    assert (checkout / ".venv/constraints.txt").read_text() == f"torch=={torch}\n"


def test_a_torch_that_is_too_old_is_not_kept(checkout: Path) -> None:
    assert make(checkout, ".venv/core", TORCH_HERE="2.9.1").returncode == 0
    assert not (checkout / ".venv/sees").exists()
    assert "torch==2.15" in (checkout / ".venv/constraints.txt").read_text()


def test_another_torch_takes_its_own_pins_away(checkout: Path) -> None:
    make(checkout, ".venv/core", "TORCH===2.11.*")
    pins = (checkout / ".venv/constraints.txt").read_text().splitlines()
    assert pins[-1] == "torch==2.11.*"
    assert not [pin for pin in pins[:-1] if pin.startswith(("torch", "nvidia-", "triton", "cuda"))]
    assert "numpy" in {pin.partition("==")[0] for pin in pins}


def test_system_packages_can_be_declined(machine: Path) -> None:
    ran = system_packages(machine, SYSTEM_PACKAGES="no")
    assert ran.returncode == 0
    assert f"sudo apt install {' '.join(MISSING)}" in ran.stdout
    assert not (machine / "log").exists()


def test_lint_asks_for_ruff_alone(checkout: Path) -> None:
    """In a clone without .venv, and without what a full environment takes minutes to fetch."""
    planned = make(checkout, "--dry-run", "lint").stdout
    assert "install" in planned
    assert planned.rstrip().endswith("ruff format --check .")
    for word in ("install.sh", "apt", "-e ."):
        assert word not in planned


# A Python that also answers `make gpu`: it notes how, and has so many GPUs as $GPUS says.
GPU_BOX = """
case "$*" in "-m course.gpu_box"*) echo "$@" >> "$LOG"; [ "$GPUS" != 0 ]; exit ;; esac
"""


@pytest.fixture
def gpu_box(checkout: Path) -> Path:
    stub(checkout, "python3", GPU_BOX + PYTHON)
    return checkout


def test_make_gpu_plans_installs_and_measures(gpu_box: Path) -> None:
    ran = make(gpu_box, "gpu", "RANKS=1,8", "SYSTEM_PACKAGES=no", GPUS="8", TORCH_HERE="2.15.0")
    assert ran.returncode == 0, ran.stderr
    asked = asked_of_pip(gpu_box)
    plans = [line for line in asked if "--plan" in line]
    extras = [line for line in asked if "deepspeed" in line]
    assert asked.index(plans[0]) < asked.index(extras[0]) < len(asked) - 1
    assert asked[-1] == "-m course.gpu_box --only= --ranks=1,8"
    assert (gpu_box / ".venv/constraints.txt").read_text() == "torch==2.15.0\n", "the image's torch"


def test_make_gpu_installs_no_more_where_there_is_none_or_they_are_pretended(
    gpu_box: Path,
) -> None:
    assert make(gpu_box, "gpu", GPUS="0").returncode != 0
    assert make(gpu_box, "gpu", "PRETEND=4", GPUS="4").returncode == 0
    asked = asked_of_pip(gpu_box)
    assert asked[-1] == "-m course.gpu_box --only= --pretend=4"
    assert not [line for line in asked if "deepspeed" in line]


# What documents tell people to type


DOCUMENTS = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", ".ci/run")
DOCUMENTS += (
    ".github/workflows/test.yml",
    ".github/workflows/site.yml",
    "results/README.md",
    "fundamentals/README.md",
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_to_be_made_can_be_made(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = re.findall(r"^([\w./ -]+):(?!=)", makefile, re.M)
    targets = {target for line in lines for target in line.split()}
    text = (ROOT / document).read_text()
    named = re.findall(r"(?:`|run: |^ +|&& |phase \S+ )make ([a-z.][\w./-]*)", text, re.M)
    assert set(named) <= targets
    variables = set(re.findall(r"make [^`\n#]*?\b([A-Z_]+)=", text))
    assert variables <= set(re.findall(r"\b([A-Z_]+)=\S", makefile.partition("\n\n")[0]))


COMMANDED = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "exercises/README.md")


@pytest.mark.parametrize("document", COMMANDED)
def test_every_command_that_is_shown_is_one(document: str) -> None:
    """`course ...`, in a line of its own or between backticks."""
    text = (ROOT / document).read_text()
    shown = re.findall(r"^    !?(course\b[^#\n]*)|`(course\b[^`]*)`", text, re.M)
    lines = {(line or quoted).partition("&&")[0].split(";")[0].strip() for line, quoted in shown}
    assert lines
    for line in lines - {"course", "course/", "course --help"}:
        words = line.replace("tables|plumbing", "tables").split()[1:]
        if not line.startswith("course/") and "..." not in words:
            words = ["1" if word in ("S", "NN", "N") else word for word in words]
            assert callable(parser().parse_args(words).run), line


def test_the_workflow_tries_every_python_that_is_taken() -> None:
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    tried = re.search(r"python: (\[.+\])", workflow)[1]
    minor = range(doctor.OLDEST[1], doctor.NEWEST[1] + 1)
    assert json.loads(tried) == [f"3.{number}" for number in minor]
    install = (ROOT / "course/install.sh").read_text()
    assert " | ".join(json.loads(tried)) + ")" in install
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">=3.{minor[0]},<3.{minor[-1] + 1}"
