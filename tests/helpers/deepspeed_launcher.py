"""A lesson under DeepSpeed's own launcher, on two CPU ranks, as on a machine new to DeepSpeed."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from course.lessons import ROOT


def verdicts_under_deepspeed(lesson: str, config: Path, folder: Path) -> list[str]:
    """Run a copy of the lesson in `folder` with the config; return its claims' verdicts.

    Checks that it ends well, on two ranks, and that nothing is compiled.
    """
    reserved = socket.socket()  # until the end: to bind it again, one has to ask for this number
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    shutil.copy(ROOT / lesson, folder)
    report = folder / "ledger.json"
    compiled = folder / "c"
    environment = {"LESSON_JSON": str(report), "TORCH_EXTENSIONS_DIR": str(compiled)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]
    ran = subprocess.run(
        [sys.executable, *launcher, Path(lesson).name, "--deepspeed_config", str(config)],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    reserved.close()
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert not compiled.exists(), "it compiled something"
    reported = json.loads(report.read_text())
    assert reported["ranks"] == 2
    return [row["verdict"] for row in reported["ledger"]]
