"""`course doctor --log`: what killed a job, by the one table, launch/diagnose.py's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from course.lessons import ROOT

DOCTOR = [sys.executable, "-m", "course", "doctor", "--log"]
DIAGNOSE = [sys.executable, ROOT / "launch/diagnose.py", "--log"]
DIED = "step 1\n[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n"
HEALTHY = "step 1 loss 2.0\ntraining done\n"


@pytest.mark.parametrize(
    ("texts", "status"), [([DIED], 1), ([HEALTHY, DIED], 1), ([HEALTHY], 0), (["step 1\n"], 2)]
)
def test_of_a_log_the_doctor_says_what_diagnose_says(
    texts: list[str], status: int, tmp_path: Path
) -> None:
    logs = [f"{number}.log" for number in range(len(texts))]
    for log, text in zip(logs, texts, strict=True):
        (tmp_path / log).write_text(text)
    how = {"cwd": tmp_path, "capture_output": True, "text": True}
    how["env"] = os.environ | {"PYTHONPATH": str(ROOT)}
    doctor = subprocess.run([*DOCTOR, *logs], **how)
    alone = subprocess.run([*DIAGNOSE, *logs], **how)
    assert doctor.returncode == alone.returncode == status, doctor
    assert doctor.stdout == alone.stdout
    assert ("GPU MEMORY FULL: rank 1" in doctor.stdout) == (DIED in texts)


def test_a_pipe_is_read_too() -> None:
    ran = subprocess.run([*DOCTOR, "-"], cwd=ROOT, input=DIED, capture_output=True, text=True)
    assert ran.stdout.startswith("GPU MEMORY FULL: rank 1"), ran
