"""The broken jobs of exercise 14 hang, each on the ranks and in the call that its cause names."""

import re
import subprocess
import sys

import pytest

from course.lessons import ROOT
from course.playing import load
from course.ranks import attempt

JOBS = "exercises/14_five_hangs/jobs.py"
WAITS = {  # on 3 ranks: the call each waits in; None: it has come back
    1: ["all_reduce", None, None],
    2: ["all_reduce", "all_reduce", None],
    3: ["send", "send", "send"],
    4: ["all_reduce", "broadcast", "all_reduce"],
    5: ["all_reduce", None, "all_reduce"],
}


@pytest.mark.parametrize("job", WAITS)
def test_a_broken_job_hangs_where_its_cause_says(job: int) -> None:
    jobs = load(JOBS)
    broken, given = getattr(jobs, f"job_{job}"), jobs.given(job, 3)
    outcomes = attempt(jobs.on_a_rank, 3, broken, given)
    assert {o.kind for o in outcomes} <= {"hung", "returned"}, outcomes
    told = [
        re.match(r"waits in (\w+), called from .*jobs\.py.*, in job_", o.text) for o in outcomes
    ]
    assert [match and match[1] for match in told] == WAITS[job]


@pytest.mark.deep
def test_the_learner_sees_the_hang() -> None:
    told = subprocess.run(
        [sys.executable, ROOT / JOBS, "4"], capture_output=True, text=True, check=True
    )
    lines = [line.strip() for line in told.stdout.splitlines()]
    assert lines[0] == "job 4 on 3 ranks; 1.5 s after all that have not come back fell asleep:"
    assert re.fullmatch(r"rank 1 waits in broadcast, called from jobs\.py:\d+, in job_4", lines[3])
    assert lines[4] == "dist.broadcast(tensor, 0)"
