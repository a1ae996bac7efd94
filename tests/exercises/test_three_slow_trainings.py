"""The slow trainings of exercise 26 learn what the cured ones do, and pay for more."""

import re
import subprocess
import sys

import pytest
import torch

from course.lessons import ROOT
from course.playing import load
from course.ranks import run

FOLDER = "exercises/26_three_slow_trainings/"


def learns(training: int, file: str) -> tuple[list[torch.Tensor], object]:
    """The parameters after a training of this file, and what it returns."""
    model, *arguments = load(FOLDER + "trainings.py").work_for(training)
    told = getattr(load(FOLDER + file), f"training_{training}")(model, *arguments)
    return [parameter.detach() for parameter in model.parameters()], told


@pytest.mark.parametrize("training", [1, 2, 3])
def test_cured_it_learns_the_same(training: int) -> None:
    slow = run(learns, 3, training, "trainings.py")
    cured = run(learns, 3, training, "solution.py")
    for one, other in zip(slow, cured, strict=True):
        # float32 sums in another order; the losses, Python's floats, are of float32 too
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.deep
def test_the_learner_sees_what_is_wasted() -> None:
    command = [sys.executable, ROOT / FOLDER / "trainings.py", "2", ROOT / FOLDER / "solution.py"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"training 2 of (.+): ms per step", told) == ["trainings.py", "solution.py"]
    calls = re.findall(r"^rank \d .* (\d+)$", told, re.MULTILINE)
    assert calls == ["57"] * 3 + ["1"] * 3
