"""DeepSpeed's C++ for the CPU and the disk, compiled once per machine in some minutes."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from course.lessons import ROOT

FOLDER = ROOT / "build/extensions_offload"
# Nearly all of the time goes into reading torch's headers, so only those are read that the files
# use, and nothing is optimized. The sources and the builders are DeepSpeed's own.
HEADERS = """#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#ifdef WITH_PYTHON
#include <torch/csrc/utils/pybind.h>
#endif
namespace torch { using namespace at; using namespace c10; constexpr auto kFloat32 = at::kFloat; }
"""
COMPILER = """#!/bin/sh
case " $* " in
*/cpu_adam.cpp\\ *|*/py_ds_*|*/deepspeed_py_io_handle.cpp\\ *|*_op_desc.cpp\\ *)
    exec c++ -I"${0%/*}" "$@" -O0 -g0 -w -DWITH_PYTHON ;;
*.cpp\\ *) exec c++ -I"${0%/*}" "$@" -O0 -g0 -w ;;
*) exec c++ "$@" ;;
esac
"""
BUILD = """
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
AsyncIOBuilder().load()
CPUAdamBuilder().load()
"""


def built() -> dict[str, str]:
    """Return the variables with which DeepSpeed finds them; compile them if they are missing.

    Only tests marked `deep` call this: when something that they test has changed, or at night.
    """
    (FOLDER / "torch").mkdir(parents=True, exist_ok=True)
    ninja = f"{os.environ['PATH']}:{Path(sys.executable).parent}"  # it may lie there only
    variables = {"TORCH_EXTENSIONS_DIR": str(FOLDER), "CXX": str(FOLDER / "c++"), "PATH": ninja}
    done = FOLDER / "done"
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of pytest, one compilation
        if not done.exists():
            (FOLDER / "torch/extension.h").write_text(HEADERS)
            (FOLDER / "c++").write_text(COMPILER)
            (FOLDER / "c++").chmod(0o755)
            for left in FOLDER.glob("*/lock"):
                left.unlink()  # of a compilation that was killed; torch would wait for it
            environment = os.environ | variables | {"DS_ACCELERATOR": "cpu"}
            command = [sys.executable, "-c", BUILD]
            subprocess.run(command, env=environment, check=True, timeout=1500)
            done.touch()
    return variables
