"""Real Slurm on this machine: two slurmd, and jobs that are the repository's own files."""

import contextlib
import os
import random
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from course.lessons import ROOT
from tests.helpers.leftovers import MARKED, gone
from tests.launch import test_fsdp_surviving, test_surviving

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
SBIN = f"{os.environ['PATH']}:/usr/sbin"
pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(
        not all(shutil.which(program, path=SBIN) for program in PROGRAMS),
        reason="needs Slurm: sudo apt install slurm-wlm munge",
    ),
]
HELLO = ROOT / "launch/distributed_hello.py"
BATCH = ROOT / "launch/slurm.sbatch"

# Two nodes on one host, told apart by their ports. Their names are addresses, so that they mean
# something to the ranks without a line in /etc/hosts. A job that is requeued waits until its
# credential has expired: 30 s here, not 120.
CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=30
SchedulerParameters=sched_interval=5
StateSaveLocation={folder}/state
FirstJobId={first_job}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
NodeName=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=2
NodeName=127.0.0.2 NodeHostname={host} Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    """Below those that the kernel gives away: nobody else takes one before Slurm does."""
    ports = []
    for port in random.SystemRandom().sample(range(10_000, 20_000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def first_job() -> int:
    """A job's number such that the port at which its ranks meet is free, and those of nine more."""
    while True:
        job = random.SystemRandom().randrange(1, 9_990)
        with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
            for port in range(20_000 + job, 20_010 + job):  # as in launch/slurm.sbatch
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return job


@dataclass
class Cluster:
    """A running Slurm. Each method is a command of it."""

    folder: Path
    env: dict[str, str]

    def call(self, *argv: str) -> str:
        how = {"cwd": self.folder, "env": self.env, "capture_output": True, "text": True}
        ran = subprocess.run(argv, **how, timeout=120)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def submit(
        self, script: Path, *flags: str, ranks: int = 1, argv: tuple = (), **variables: str
    ) -> str:
        """Submit the script through slurm.sbatch, a rank per node; return the job's number."""
        given = ",".join(f"{name}={value}" for name, value in variables.items())
        export = f"--export=ALL,RANKS={ranks},{given}".rstrip(",")
        line = ["sbatch", "--parsable", export, *flags, str(BATCH), str(script), *argv]
        return self.call(*line).strip()

    def output(self, job: str) -> str:
        path = self.folder / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def facts(self, job: str) -> str:
        return self.call("scontrol", "show", "job", job)

    def limit(self, job: str, minutes: int) -> None:
        self.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def hears(self, job: str, word: str) -> None:
        """Wait until Slurm or the job itself says this."""
        for _ in patience(300):
            said = self.facts(job) + self.output(job)
            if word in said:
                return
        raise AssertionError(f"no {word}: {said}")

    def end_of(self, job: str, seconds: float = 120) -> tuple[str, str]:
        """The job's state and its exit code, "code:signal", once it has ended."""
        for _ in patience(seconds):
            said = self.facts(job)
            state = re.search(r"JobState=(\w+)", said)[1]
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
                return state, re.search(r"ExitCode=(\S+)", said)[1]
        raise AssertionError(f"{said}\n{self.output(job)}")


def patience(seconds: float = 120) -> Iterator[None]:
    """Go round until the time is up."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        yield
        time.sleep(0.3)


def await_socket(path: Path, munged: subprocess.Popen) -> None:
    for _ in patience():
        assert munged.poll() is None, "munged has ended"
        if path.exists():
            return
    raise AssertionError(f"no {path}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o711)  # munged wants its socket in everybody's reach
        bin_folder = Path(sys.executable).parent
        env = MARKED | {"PATH": f"{bin_folder}:{SBIN}", "OMP_NUM_THREADS": "1"}
        env |= {"SLURM_CONF": f"{folder}/slurm.conf"}
        yield from running(Cluster(folder, env))
        assert gone()


def running(cluster: Cluster) -> Iterator[Cluster]:
    """Start the daemons as the user we are, and end them; all their files lie in the folder."""
    folder = cluster.folder
    (folder / "state").mkdir()
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    user = psutil.Process().username()
    host = socket.gethostname().partition(".")[0]
    facts = {"folder": folder, "user": user, "host": host, "ports": free_ports(3)}
    facts["first_job"] = first_job()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**facts))
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid"}
    files |= {"log-file": "log", "seed-file": "seed"}
    munge = [f"--{flag}={folder}/munge.{suffix}" for flag, suffix in files.items()]
    daemons = []
    try:
        with open(folder / "log", "w") as log:
            for argv in (
                ["munged", "--foreground", *munge],
                ["slurmctld", "-D"],
                ["slurmd", "-D", "-N", "127.0.0.1"],
                ["slurmd", "-D", "-N", "127.0.0.2"],
            ):
                how = {"env": cluster.env, "cwd": folder, "stdout": log, "stderr": log}
                daemons.append(subprocess.Popen(argv, **how))
                if argv[0] == "munged":  # the others need it
                    await_socket(folder / "munge.socket", daemons[0])
        for _ in patience():
            ready = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
            ran = subprocess.run(ready, env=cluster.env, capture_output=True, text=True)
            if ran.stdout.strip() == "2":
                break
        else:
            raise AssertionError((folder / "log").read_text())
        yield cluster
        cluster.call("scancel", f"--user={user}")  # what a test that failed has left
        for _ in patience(60):
            if not cluster.call("squeue", "--noheader"):
                break
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(120)


def test_every_node_of_a_job_has_its_ranks(cluster: Cluster) -> None:
    job = cluster.submit(HELLO)
    assert cluster.end_of(job) == ("COMPLETED", "0:0"), cluster.output(job)
    # Nodes of one host: torchrun, which orders nodes by their hosts' names, may take either first.
    said = "rank (0|1) of 2 on (127.0.0.1|127.0.0.2), cpu, gloo: the ranks add up to 3"
    found = re.findall(said, cluster.output(job))
    assert [sorted(column) for column in zip(*found, strict=True)] == [
        ["0", "1"],
        ["127.0.0.1", "127.0.0.2"],
    ]


def test_srun_alone_starts_ranks_too(cluster: Cluster) -> None:
    line = ["srun", "--nodes=2", "--ntasks-per-node=1", "python", str(HELLO)]
    assert sorted(cluster.call(*line).splitlines()) == [
        f"rank {rank} of 2 on 127.0.0.{rank + 1}, cpu, gloo: the ranks add up to 3"
        for rank in range(2)
    ]


def test_srun_alone_trains_too(cluster: Cluster) -> None:
    line = [
        "srun",
        "--nodes=2",
        "--ntasks-per-node=1",
        "python",
        str(ROOT / "launch/ddp_minimal.py"),
    ]
    said = cluster.call(*line).splitlines()  # of rank 0 alone, so this is one world
    assert [words.partition(":")[0] for words in said] == [f"epoch {epoch}" for epoch in range(6)]


def test_the_ranks_of_a_node_share_all_its_cpus(cluster: Cluster) -> None:
    (script := cluster.folder / "cpus.py").write_text(
        "import os\nprint(os.environ['SLURM_CPUS_PER_TASK'], 'CPUs', flush=True)\n"
    )
    for flags, cpus in [((), 2), (("--cpus-per-task=1",), 1)]:
        job = cluster.submit(script, *flags)
        assert cluster.end_of(job) == ("COMPLETED", "0:0"), cluster.output(job)
        assert cluster.output(job).count(f"{cpus} CPUs\n") == 2


def test_more_ranks_than_cpus_are_refused(cluster: Cluster) -> None:
    job = cluster.submit(HELLO, "--cpus-per-task=1", ranks=2)
    assert cluster.end_of(job) == ("FAILED", "2:0")
    assert "2 ranks per node on 1 CPUs: sbatch --cpus-per-task=N" in cluster.output(job)
    assert "rank 0" not in cluster.output(job)


NAMES = ["gpu[03-07]", "rack[1-2]-gpu[1-4]", "n[01,03-04],m[1-2]", "login,gpu[1-2]", "node7"]


@pytest.mark.parametrize("names", NAMES)
def test_the_first_node_is_slurm_s_own_first(cluster: Cluster, names: str) -> None:
    minimal = runpy.run_path(str(ROOT / "launch/ddp_minimal.py"), run_name="imported")
    told = {"TASKS_PER_NODE": "2(x4)", "NODELIST": names, "NUM_TASKS": "8"}
    os.environ |= {f"SLURM_STEP_{name}": value for name, value in told.items()}
    os.environ |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "70001"}
    minimal["name_ranks_as_torchrun_does"]()
    first = cluster.call("scontrol", "show", "hostnames", names).split()[0]
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (first, "20001")
    named = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert named == ["3", "8", "1", "2"]


# These scripts need no torch: it is torchrun and Slurm that are tested. What fails is on the second
# node; the first node's torchrun, which serves the meeting, would not notice by itself.
FAILS = """
import os, sys, time
if os.environ["SLURM_NODEID"] == "0":
    open("first is there", "w").close()
    time.sleep(1000)
while not os.path.exists("first is there"):
    time.sleep(0.1)
sys.exit(5)
"""
STAYS = """
import os, time
print("rank", os.environ["RANK"], "is there", flush=True)
time.sleep(1000)
"""


# It takes longer to save than Slurm gives after the time limit (KillWait, 30 s), and than torchrun
# would by itself: 40 s.
SAVES = """
import os, signal, sys, time
rank = os.environ["RANK"]
def save(number, frame):
    signal.signal(number, signal.SIG_IGN)  # Slurm tells the ranks too, not torchrun alone
    print("rank", rank, "saves", flush=True)
    time.sleep(40)
    print("rank", rank, "has saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("rank", rank, "is there", flush=True)
time.sleep(1000)
"""
RESTARTS = """
import os, sys
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("start", count, "shares", os.environ["TORCHELASTIC_USE_AGENT_STORE"], flush=True)
sys.exit(0 if count == "1" else 5)
"""


def running_ranks(script: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(script) in (process.info["cmdline"] or []):
            found.append(process)
    return found


def soon_gone(script: Path) -> bool:
    return any(not running_ranks(script) for _ in patience())


def test_a_rank_that_fails_ends_the_job_with_torchrun_s_exit_code(cluster: Cluster) -> None:
    (script := cluster.folder / "fails.py").write_text(FAILS)
    job = cluster.submit(script)
    assert cluster.end_of(job) == ("FAILED", "1:0")
    assert re.search(r"rank +: \d \(local_rank: 0\)\n +exitcode +: 5 ", cluster.output(job))
    assert soon_gone(script)


@pytest.mark.timeout(600)
def test_before_the_time_limit_ranks_are_told_and_have_time_to_save(cluster: Cluster) -> None:
    """A limit of 5 minutes, and SIGTERM 5 minutes before it: as soon as Slurm looks."""
    (script := cluster.folder / "saves.py").write_text(SAVES)
    job = cluster.submit(script, "--time=5")
    for _ in patience(240):
        if cluster.output(job).count("has saved") == 2:
            break
    else:
        raise AssertionError(cluster.output(job))
    state, _ = cluster.end_of(job)
    assert state == "FAILED"  # by torchrun, which was told to end: not TIMEOUT
    assert "Requeue=1 " in cluster.facts(job)
    assert soon_gone(script)


# 120 steps each, and each takes a second until there is a checkpoint, which only a signal causes:
# Slurm looks for time limits twice a minute. The last line of a step is the same in both files.
TRAIN = {
    test_surviving: ("--epochs=30", "--batch=340", "--micro-batch=170"),
    test_fsdp_surviving: ("--steps=120", "--batch=6", "--context=16", "--precision=float32"),
}
STEPS = 120
STEP = "        self.step += 1\n"
SLOW = "        time.sleep(0 if [*self.args.checkpoints.glob('step-*')] else 1)\n"


@pytest.mark.night
@pytest.mark.timeout(1500)
def test_a_job_near_its_time_limit_saves_is_requeued_and_ends_with_the_same_weights(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Once it trains, its limit is set to 5 to 6 minutes from now, however long its start took."""
    jobs = {}
    for file, flags in TRAIN.items():
        source = file.SCRIPT.read_text()
        assert source.count(STEP) == 1
        (folder := tmp_path / file.SCRIPT.stem).mkdir()
        (script := folder / "slow.py").write_text(source.replace(STEP, f"{SLOW}{STEP}"))
        argv = (*flags, "--save-every=1000", "--log-every=1", f"--checkpoints={folder}/checkpoints")
        job = jobs[file] = cluster.submit(script, "--time=60", argv=argv, REQUEUES="1")
        cluster.hears(job, f"step 1 of {STEPS}")
        hours, minutes = re.search(r"RunTime=(\d+):(\d+)", cluster.facts(job)).groups()
        cluster.limit(job, 60 * int(hours) + int(minutes) + 6)
        cluster.hears(job, "Restarts=1 ")
        cluster.limit(job, 60)
    for file, job in jobs.items():
        whole = tmp_path / f"{file.SCRIPT.stem}-whole"
        file.finish(2, whole, [*TRAIN[file], "--save-every=1000"])  # meanwhile, of the file itself
        assert cluster.end_of(job, 300) == ("COMPLETED", "0:0"), cluster.output(job)
        said = cluster.output(job)
        (left,) = {int(step) for step in re.findall(r"leaves after step (\d+): SIGTERM", said)}
        assert 0 < left < STEPS
        assert said.count(f"goes on after step {left} of {STEPS}") == 1
        assert said.count("begins with step 1") == 1
        assert "Restarts=1 " in cluster.facts(job)
        resumed = tmp_path / file.SCRIPT.stem
        assert file.same(file.state(resumed, STEPS), file.state(whole, STEPS))


def test_ranks_that_fail_start_anew_as_often_as_the_job_says(cluster: Cluster) -> None:
    (script := cluster.folder / "restarts.py").write_text(RESTARTS)
    job = cluster.submit(script, RESTARTS="1")
    assert cluster.end_of(job) == ("COMPLETED", "0:0"), cluster.output(job)
    said = re.findall(r"start (\d) shares (\w+)", cluster.output(job))
    assert sorted(said) == [("0", "False")] * 2 + [("1", "False")] * 2


def test_scancel_leaves_no_rank(cluster: Cluster) -> None:
    (script := cluster.folder / "stays.py").write_text(STAYS)
    job = cluster.submit(script)
    for _ in patience():
        if cluster.output(job).count("is there") == 2:
            break
    else:
        raise AssertionError(cluster.output(job))
    assert len(running_ranks(script)) >= 6  # two ranks, their torchruns, srun and the batch script
    cluster.call("scancel", job)
    assert cluster.end_of(job)[0] == "CANCELLED"
    assert soon_gone(script)
