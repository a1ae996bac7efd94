#!/bin/sh
# Make the virtual environment .venv, or install into it; called by make, in the repository's root:
#
#     sh course/install.sh venv | core | EXTRA of pyproject.toml
#
# Three variables steer it, all optional:
#
#     PYTHON       the interpreter to begin with (python3)
#     TORCH_INDEX  the address of an index to take torch from: one of wheels for CPUs, say
#     TORCH        another torch than the one in constraints.txt, as '==2.11.*'
#
# Where PYTHON brings a torch of 2.11 or later, as the images of clusters do, .venv sees that torch
# and nothing else is pinned: what an image holds was built to fit together.
set -eu
PYTHON=${PYTHON:-python3}
HAS_TORCH='import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)'

fail() {
  echo "*** $1" >&2
  exit 1
}

# What of "python3.13" and its kin this machine has, for who must choose another Python.
fitting_pythons() {
  for version in 3.13 3.12 3.11 3.14; do
    if "python$version" -c '' 2>/dev/null; then
      echo "python$version"
    fi
  done
}

check_python() {
  case $(uname -s) in
    MINGW* | MSYS* | CYGWIN*) fail "Windows: do this inside WSL2, where the course runs as on Linux." ;;
  esac
  "$PYTHON" -c '' 2>/dev/null || fail "$PYTHON does not start. Name a Python of 3.11 to 3.14: make start PYTHON=..."
  version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  case $version in
    3.11 | 3.12 | 3.13 | 3.14) ;;
    *)
      other=$(fitting_pythons | head -n 1)
      fail "$PYTHON is Python $version; this course takes 3.11 to 3.14: make start PYTHON=${other:-python3.12, once it is installed}"
      ;;
  esac
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$PYTHON cannot make virtual environments: sudo apt install python3-venv (or, in an image of your own: $PYTHON -m pip install -e .)"
}

make_venv() {
  check_python
  if "$PYTHON" -c "$HAS_TORCH" 2>/dev/null; then
    "$PYTHON" -m venv --clear --system-site-packages .venv
    if .venv/bin/python -c "$HAS_TORCH" 2>/dev/null; then
      .venv/bin/python -c 'import torch; print(f"torch=={torch.__version__}")' >.venv/kept_torch
      echo "=== A virtual environment in .venv, which keeps the torch of $PYTHON: $(cat .venv/kept_torch)"
      return
    fi
  fi
  echo "=== A virtual environment in .venv"
  "$PYTHON" -m venv --clear .venv
}

# Write .venv/constraints.txt, which fits the torch that is kept or asked for.
constrain() {
  if [ -s .venv/kept_torch ]; then
    cat .venv/kept_torch
  elif [ -n "${TORCH:-}" ]; then
    grep -vE '^(torch|torchvision|triton|nvidia-.*|cuda-.*)==' constraints.txt
    echo "torch$TORCH"
  else
    cat constraints.txt
  fi >.venv/constraints.txt
}

# In a terminal pip shows how far it is; in a log it is quiet.
pip_install() {
  quiet=-q
  if [ -t 1 ]; then
    quiet=""
  fi
  # shellcheck disable=SC2086
  .venv/bin/python -m pip install $quiet --disable-pip-version-check -c .venv/constraints.txt "$@"
}

# What comes from TORCH_INDEX comes alone; what it needs besides follows with the rest. The address
# is kept, for torchvision must come from there too.
from_torch_index() {
  if [ -n "${TORCH_INDEX:-}" ]; then
    echo "$TORCH_INDEX" >.venv/torch_index
  fi
  if [ -s .venv/torch_index ] && [ ! -s .venv/kept_torch ]; then
    pip_install --no-deps --index-url "$(cat .venv/torch_index)" "$1"
  fi
}

case $1 in
  venv)
    make_venv
    ;;
  core)
    echo "=== The core: torch and what every lesson imports (gigabytes, minutes the first time)"
    constrain
    from_torch_index torch
    pip_install -e .
    ;;
  *)
    constrain
    if [ "$1" = ffcv ]; then
      from_torch_index torchvision
    fi
    pip_install -e ".[$1]"
    ;;
esac
