"""The doctor: looks without harm, predicts truly, and shows failures to the table of last words."""

import io
import os
import shutil
import socket
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from course.lessons import LESSONS, ROOT
from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fundamentals/00_check_your_machine.py"
ALONE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
NAMESPACES = (
    shutil.which("unshare") is not None
    and subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0
)
doctor = load(LESSON)


def visit(folder: Path, *argv: str, before: tuple = (), **env: str) -> subprocess.CompletedProcess:
    """Run a copy of the doctor in `folder`, away from the course."""
    shutil.copy(ROOT / LESSON, folder)
    command = [*before, sys.executable, Path(LESSON).name, *argv]
    return subprocess.run(
        command, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=250
    )


# Looking


def test_a_probe_that_fails_or_hangs_ends_nothing() -> None:
    assert doctor.look(lambda: 42)() == 42
    assert isinstance(doctor.look(lambda: 1 / 0)(), ZeroDivisionError)
    pipe, end = os.pipe()
    assert isinstance(doctor.look(os.read, pipe, 1)(0.1), TimeoutError)
    os.close(end)  # ends the probe's thread
    assert doctor.look(lambda: None)() is None


@pytest.mark.deep
def test_a_machine_without_psutil_or_nvml_is_looked_at_all_the_same(tmp_path: Path) -> None:
    for name in ("psutil", "pynvml"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module {name}')")
    ran = visit(tmp_path, PYTHONPATH=str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("No module psutil") == 2  # computer and network, and no more
    assert "none: No module pynvml" in ran.stdout
    assert "1 + ... + 2, summed through gloo" in ran.stdout
    assert "gloo listens on" not in ran.stdout
    assert "copied out of the course" in ran.stdout


class Refused(Exception):
    """What NVML raises where a card cannot answer."""


def fake_nvml(**answers: object) -> types.ModuleType:
    """NVML with two H100: NVLink joins them, and neither tells its utilization."""

    def refuse(*_: object) -> None:
        raise Refused

    module = types.ModuleType("pynvml")
    module.NVMLError, module.NVML_NVLINK_MAX_LINKS, module.NVML_P2P_CAPS_INDEX_NVLINK = (
        Refused,
        4,
        2,
    )
    module.nvmlInit = lambda: None
    module.nvmlSystemGetDriverVersion = lambda: "570.1"
    told = {"Count": 2, "HandleByIndex": "card", "Name": "H100", "UtilizationRates": refuse}
    told |= {"MemoryInfo": types.SimpleNamespace(total=85e9), "P2PStatus": 0}
    told |= {"NvLinkState": lambda card, link: int(link < 3), "TopologyCommonAncestor": 20}
    told |= {"CurrPcieLinkGeneration": 1, "MaxPcieLinkGeneration": 5}
    told |= {"CurrPcieLinkWidth": 8, "MaxPcieLinkWidth": 16} | answers
    for name, answer in told.items():
        give = answer if callable(answer) else lambda *_, answer=answer: answer
        setattr(module, "nvmlDeviceGet" + name, give)
    return module


@pytest.mark.parametrize(("p2p", "way"), [(0, "NVLink"), (5, "PXB")])
def test_gpus_and_the_paths_between_them(p2p: int, way: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(P2PStatus=p2p))
    lines = doctor.gpus().splitlines()
    assert lines[0] == "2, driver 570.1"
    assert lines[1] == "0: H100, 85 GB, ?% busy, 3 NVLinks up, PCIe gen 1 of 5, x8 of x16"
    assert lines[3] == f"0-1 {way}"
    assert lines[4].startswith(f"torch may use {torch.cuda.device_count()}")


def test_nvidia_smi_speaks_where_nvml_cannot(tmp_path: Path, monkeypatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho smi says $1\n")
    smi.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "smi says --query-gpu=name," in doctor.gpus()
    assert "smi says topo" in doctor.gpus()


def test_what_keeps_a_gpu_from_working_fast_is_told(monkeypatch) -> None:
    ill = {"ComputeRunningProcesses": [1, 2], "ComputeMode": 3, "TotalEccErrors": 7}
    ill["CurrentClocksThrottleReasons"] = 0x4 | 0x80 | 0x1
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**ill))
    line = doctor.gpus().splitlines()[1]
    assert "2 programs on it" in line
    assert "one process at a time" in line
    assert "SLOWED by power cap, SLOWED by power brake, UNCORRECTABLE" in line


def test_rdma_ports_are_listed_with_state_and_rate(tmp_path: Path) -> None:
    assert "TCP" in doctor.rdma_ports(tmp_path)
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert doctor.rdma_ports(tmp_path) == "RDMA: mlx5_0 ACTIVE 400 Gb/sec (4X NDR)"


# Networks


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["lo", "eth0", "ib0", "ib1"], ["ib0", "ib1"]),
        (["lo", "docker0", "eth0", "virbr0", "wlan0"], ["eth0", "wlan0"]),
        (["lo", "docker0", "virbr0"], ["docker0"]),
        (["lo", "virbr0"], ["lo"]),
        (["virbr0"], ["virbr0"]),
        ([], []),
    ],
)
def test_nccl_prefers_as_its_source_says(names: list[str], taken: list[str]) -> None:
    assert doctor.nccl_interfaces(names) == taken


def test_only_addresses_of_this_machine_count() -> None:
    assert "127.0.0.1" in doctor.own_addresses("localhost")
    assert doctor.own_addresses("203.0.113.7") == []  # RFC 5737: nobody's
    with pytest.raises((OSError, UnicodeError)):
        doctor.own_addresses("nowhere-" * 9)


def test_of_a_name_with_two_addresses_only_this_machine_s_counts(monkeypatch) -> None:
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    places = [(*kind, ("203.0.113.7", 0)), (*kind, ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    assert doctor.own_addresses("planted") == ["127.0.0.1"]


def predicted_and_found(interface: str) -> tuple[set[str], set[str]]:
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    predicted = set(load(LESSON).gloo_addresses())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sockets = psutil.Process().net_connections("tcp")
    return predicted, {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("interface", ["", *doctor.interfaces()])
def test_gloo_listens_where_it_is_predicted(interface: str) -> None:
    predicted, found = run_alone(predicted_and_found, interface)
    assert predicted == found != set()


def run_alone(function, *args: object) -> object:
    return run(function, 1, *args, quiet=60, group=False)[0]


@pytest.mark.skipif(doctor.nccl_library() is None, reason="needs NCCL")
def test_nccl_meets_where_it_is_predicted() -> None:
    predicted = doctor.nccl_interfaces(list(doctor.interfaces()))
    assert doctor.interface_nccl_takes(doctor.nccl_library()) == predicted[0]


def test_where_the_choice_is_made_nothing_is_predicted(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    lesson = load(LESSON)
    lesson.nccl_takes_what_is_predicted()
    assert [row["verdict"] for row in lesson.ledger] == ["BLOCKED"]


# Words


NOWHERE = (
    "The client socket has timed out after 4000ms while trying to connect to (nowhere.invalid, 1)."
)


def test_a_host_that_words_name_leads_somewhere_or_nowhere(monkeypatch) -> None:
    known = NOWHERE.replace("nowhere.invalid", "127.0.0.1")
    asked = []

    def look_up(name: str, port: object) -> list:
        asked.append(name)
        if name != "127.0.0.1":
            raise socket.gaierror(-2, "Name or service not known")
        return [name]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert doctor.leads_nowhere(NOWHERE)
    assert not doctor.leads_nowhere(known)
    assert not doctor.leads_nowhere("Connection closed by peer")
    assert asked == ["nowhere.invalid", "127.0.0.1"]


def test_words_are_shown_to_the_table_of_last_words(capsys) -> None:
    doctor.prescribe("RuntimeError: EADDRINUSE: port 29500")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith(
        "diagnosis          PORT TAKEN: some rank: another job has MASTER_PORT"
    )
    assert "ss -ltnp | grep :29500" in " ".join(lines)


def test_where_the_table_is_not_the_first_error_is_shown(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(doctor, "DIAGNOSE", tmp_path / "diagnose.py")
    doctor.prescribe(
        "[rank0]: Traceback (most recent call last):\n"
        "[rank0]:     raise RuntimeError(words)\n"
        "[rank0]: torch.distributed.DistNetworkError: no way\n"
        "ChildFailedError: train.py\n"
    )
    told = capsys.readouterr().out
    assert told == f"  {'it said':18} [rank0]: torch.distributed.DistNetworkError: no way\n"
    doctor.prescribe(500 * "x")
    assert capsys.readouterr().out.count("x") == 300


# The doctor on machines that are ill


@pytest.mark.deep
@pytest.mark.skipif(not NAMESPACES, reason="needs root or user namespaces")
def test_on_an_ill_machine_it_fails_says_why_and_goes_on(tmp_path: Path) -> None:
    tiny = 'mount -t tmpfs -o size=3m none /dev/shm && exec "$@"'
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch/diagnose.py", tmp_path / "launch")
    (tmp_path / "fundamentals").mkdir()
    before = (*ALONE, "sh", "-c", tiny, "sh")
    ran = visit(tmp_path / "fundamentals", before=before, GLOO_SOCKET_IFNAME="nowhere0")
    assert ran.returncode == 1
    assert ran.stderr == ""
    gloo = " ".join(ran.stdout.partition("summed through gloo")[2].split())
    assert "Unable to find address for: nowhere0" in gloo
    assert "WRONG INTERFACE" in gloo.partition("BLOCKED")[0]
    assert "3,145,728" in gloo  # what is there is there, and it is too little
    assert "TOO LITTLE SHARED MEMORY" in gloo
    assert "Fix the first FAIL" in ran.stdout
    assert "1 FAIL" in ran.stdout


def test_every_lesson_of_the_course_is_listed(capsys) -> None:
    doctor.what_runs_here()
    told = capsys.readouterr().out
    lines = [line.split() for line in told.splitlines()]
    assert [words[0] for words in lines if words and words[0] in LESSONS] == LESSONS
    assert lines[-1][0] == LESSONS[-1], "the ledger comes after it, and then what is next"


def test_a_lesson_lacks_what_its_source_names() -> None:
    source = 'import deepspeed\nblocked("a", needs="2 GPUs")\nblocked("b", needs="nsys")\n'
    source += 'blocked("c", needs="2 ranks")\n'
    gpus = ["2 GPUs"] * (torch.cuda.device_count() < 2)
    missing = {"DeepSpeed": "deepspeed", "nsys": "nsys --version", "FFCV": "ffcv"}
    assert doctor.lacking(source, missing) == ", ".join([*gpus, "DeepSpeed", "nsys"])
    assert doctor.lacking(source, {}) == ", ".join(gpus)
    assert doctor.lacking('import deepspeed_tools\nx = "ffcv"\n', missing) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    ("call", "lacks"),
    [
        ('blocked("pairs", "2 GPUs")', "2 GPUs"),
        ('blocked("copies", needs="GPUs whose driver tells clocks")', "1 GPU"),
        ('blocked("ways", needs="1 GPU" if x else "2 ranks")', "1 GPU"),
        ('blocked("2 GPUs", needs="2 ranks")', ""),
        ('print0("needs 2 GPUs")', ""),
    ],
)
def test_needs_are_found_however_they_are_handed_on(call: str, lacks: str) -> None:
    assert doctor.lacking(call, {}) == lacks


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_lesson_that_is_blocked_without_a_gpu_is_not_said_to_run_in_full() -> None:
    for path in LESSONS[1:2]:
        assert "GPU" in doctor.lacking((ROOT / path).read_text(), {})


# Break the line that a claim guards, and it FAILS

SUM, ADDRESS = "1 + ... + 2, summed through gloo", "addresses gloo listens on, wrongly predicted"
NAME = "addresses of the host name that are this machine's"
MEETS = "interfaces NCCL meets on, wrongly predicted"
SHARED = "bytes that /dev/shm gives back"
ALIKE = "failures that say: client socket has timed out"
APART = "of these, told apart by looking up the host name"
LINES = {
    "nothing is summed": ("dist.all_reduce(x)", "pass", {SUM}),
    "nobody's address": ("s.bind(place)", "s.bind(('203.0.113.7', 0))", {NAME}),
    "another sum, at another address": (
        [
            ("[rank + 1.0]", "[rank + 2.0]"),
            ("found.append(place[0]", "found.append('10.9.8.7' or place[0]"),
            (
                '    gloo = look(torchrun, "gloo", 2)',  # its ranks are told one
                '    os.environ.pop("GLOO_SOCKET_IFNAME")\n    gloo = look(torchrun, "gloo", 2)',
            ),
        ],
        {SUM, ADDRESS},
    ),
    "loopback before all others": (
        '"(?!docker|lo|virbr)", "docker"',
        '"lo", "docker"',
        {MEETS},
    ),
    "shared memory read elsewhere": ("file.seek(0)", "file.seek(2**20)", {SHARED}),
    "more shared memory than there is": ("fileno(), 0, size)", "fileno(), 0, 2**62)", {SHARED}),
    "a port that is taken": (
        "1, False, timedelta",
        "1, True, timedelta",
        {ALIKE},
    ),
    "a name that leads somewhere": ('"nowhere-" * 9', '"127.0.0.1"', {APART}),
    "errors that are no errors": ("isinstance(found, OSError | UnicodeError)", "False", {APART}),
}
BREAKS = Breaks(LINES, ranks=1, most=5, alone=["a port that is taken"])

STARTS_PROCESSES = [
    ("    every_gpu_joins()\n", ""),
    ("    two_failures_say_the_same()\n", ""),
]
SIZES = {1: STARTS_PROCESSES}  # the plain run is one rank, too, and starts them
ON_GPUS = OnGpus(changes=STARTS_PROCESSES, ranks=(1,), says="torch may use 1;")


# Values that no row shows


WAYS = {0: "one board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvml.h


@pytest.mark.parametrize("common", WAYS)
def test_the_way_between_two_cards_has_its_name(common: int, monkeypatch) -> None:
    told = fake_nvml(P2PStatus=5, TopologyCommonAncestor=common)
    monkeypatch.setitem(sys.modules, "pynvml", told)
    assert doctor.nvml().splitlines()[-1] == f"0-1 {WAYS[common]}"


def test_nvml_is_asked_about_nvlink_and_about_errors_that_nothing_corrected(monkeypatch) -> None:
    asked = []
    names = ("P2PStatus", "TotalEccErrors")
    answers = {name: partial(lambda *about: asked.append(about), name) for name in names}
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**answers))
    doctor.nvml()
    uncorrected, since_the_driver_was_loaded = 1, 0
    errors = ("TotalEccErrors", "card", uncorrected, since_the_driver_was_loaded)
    assert set(asked) == {("P2PStatus", "card", "card", 2), errors}


THROTTLED = {0x1: "", 0x2: "", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: ""}  # nvml.h
THROTTLED |= {0x20: "heat", 0x40: "heat, by hardware", 0x80: "power brake", 0x100: ""}


@pytest.mark.parametrize("bit", THROTTLED)
def test_what_holds_a_clock_down_is_told_and_nothing_else(bit: int) -> None:
    told = {"CurrentClocksThrottleReasons": bit}
    found = doctor.ailing(lambda question, *_: told.get(question), "card")
    assert found == (f", SLOWED by {THROTTLED[bit]}" if THROTTLED[bit] else "")


@pytest.mark.parametrize(
    ("mode", "told"), [(0, ""), (1, "one process"), (2, "PROHIBITED"), (3, "one process")]
)
def test_a_compute_mode_is_told_if_it_stands_in_the_way(mode: int, told: str) -> None:
    answers = {"ComputeMode": mode}
    found = doctor.ailing(lambda question, *_: answers.get(question), "card")
    assert told in found
    assert bool(found) == bool(told)


def test_cores_and_memory_are_those_that_this_process_may_use(monkeypatch) -> None:
    ram = types.SimpleNamespace(available=3e9, total=8e9)
    shm = {"/dev/shm": types.SimpleNamespace(total=5e9, used=1e9, free=4e9)}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: ram)
    monkeypatch.setattr(shutil, "disk_usage", shm.get)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 2.0, 3.0))
    told = doctor.computer().splitlines()[0]
    assert told == "3 of 64 cores, load 1.5; 3.0 of 8.0 GB free, 4 in /dev/shm"


def test_an_interface_counts_if_it_is_up_and_has_an_ip_address(monkeypatch) -> None:
    def net(family: int, address: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(family=family, address=address)

    card = net(psutil.AF_LINK, "aa:bb:cc:dd:ee:ff")
    nets = {"eth0": [net(socket.AF_INET, "10.0.0.7"), card], "bare0": [card]}
    nets |= {"down0": [net(socket.AF_INET, "10.1.0.7")]}
    nets |= {"ib0": [net(socket.AF_INET6, "fe80::1%ib0")]}
    up = {name: types.SimpleNamespace(isup=name != "down0") for name in nets}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: nets)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    assert doctor.interfaces() == {"eth0": ["10.0.0.7"], "ib0": ["fe80::1"]}


def test_gloo_takes_the_interfaces_it_is_told_else_one_address_of_the_host_name(
    monkeypatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for found, taken in ((["10.0.0.7", "10.0.0.8"], ["10.0.0.7"]), ([], ["127.0.0.1"])):
        monkeypatch.setattr(doctor, "own_addresses", {socket.gethostname(): found}.get)
        assert doctor.gloo_addresses() == taken
    nets = {"eth0": ["10.0.0.7", "fe80::1"], "ib0": ["10.1.0.7"]}
    monkeypatch.setattr(doctor, "interfaces", lambda: nets)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,eth0,nowhere")
    assert doctor.gloo_addresses() == ["10.1.0.7", "10.0.0.7", "no nowhere"]


@pytest.mark.parametrize(("answer", "told"), [(0, "TAKEN"), (111, "free")])
def test_torchrun_s_port_is_taken_if_somebody_answers_there(
    answer: int, told: str, monkeypatch
) -> None:
    class Socket:
        def __enter__(self) -> "Socket":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect_ex(self, place: tuple[str, int]) -> int:
            assert place == ("127.0.0.1", 29500)
            return answer

    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(doctor, "interfaces", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"]})
    monkeypatch.setattr(doctor, "gloo_addresses", lambda: ["127.0.1.1"])
    monkeypatch.setattr(doctor, "socket", types.SimpleNamespace(socket=Socket))
    lines = doctor.network().splitlines()
    assert lines[-1] == f"port 29500, torchrun's default, is {told}"
    assert lines[1:3] == [
        "eth0 10.0.0.7",
        "gloo will listen on 127.0.1.1; NCCL's sockets, on eth0",
    ]
    assert "GLOO_SOCKET_IFNAME" in lines[3]  # 127.0.1.1 is of no use to another machine


def test_shared_memory_is_asked_for_and_compared_byte_for_byte(monkeypatch) -> None:
    class Damaged(io.BytesIO):
        """A file of which one byte changes before it is read."""

        def fileno(self) -> int:
            return 7

        def seek(self, *place: int) -> int:
            self.getbuffer()[2**20] ^= 1  # in the second of three blocks
            return super().seek(*place)

    asked = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *what: asked.append(what))
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", lambda dir: Damaged())
    assert doctor.fill_shared_memory(3 * 2**20) == 2 * 2**20
    assert asked == [(7, 0, 3 * 2**20)]  # before the write, which would kill


@pytest.mark.parametrize(("free", "size"), [(10**12, 2**27), (3 * 2**20 + 5, 3 * 2**20)])
def test_128_mib_of_shared_memory_are_tried_if_so_many_are_free(
    free: int, size: int, monkeypatch
) -> None:
    lesson = load(LESSON)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))
    lesson.fill_shared_memory = lambda size: size
    lesson.shared_memory_is_there()
    (row,) = lesson.ledger
    assert row["predicted"] == row["measured"] == size


def test_the_name_that_torchrun_gives_its_ranks_is_looked_up(monkeypatch) -> None:
    lesson = load(LESSON)
    monkeypatch.setattr(socket, "getfqdn", lambda: "node7.cluster")
    lesson.own_addresses = {"node7.cluster": ["10.0.0.7"]}.get
    lesson.the_host_name_is_ours()
    assert [row["verdict"] for row in lesson.ledger] == ["PASS"]


@pytest.mark.parametrize(
    ("totals", "verdict"), [([3.0, 3.0], "PASS"), ([3.0, 5.0], "FAIL"), ([3.0], "FAIL")]
)
def test_ranks_have_met_if_each_of_them_has_the_sum(totals: list[float], verdict: str) -> None:
    lesson = load(LESSON)
    lesson.ranks_meet("gloo", 2, "\n".join(f"MET [{total}, []]" for total in totals))
    assert [row["verdict"] for row in lesson.ledger] == [verdict]


def test_every_gpu_takes_part_in_nccl_s_trial(monkeypatch) -> None:
    lesson = load(LESSON)
    monkeypatch.setattr(lesson.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(lesson.dist, "is_nccl_available", lambda: True)
    lesson.torchrun = lambda *how: how
    tried = []
    lesson.ranks_meet = lambda *what: tried.append(what)
    lesson.every_gpu_joins()
    assert tried == [("nccl", 8, ("nccl", 8))]
    assert lesson.ledger == []


def test_nccl_s_own_word_on_its_interface_is_read(monkeypatch) -> None:
    asked = []

    def run(command: list[str], env: dict[str, str], **_: object) -> types.SimpleNamespace:
        asked.append((command[-1], env))
        words = "NCCL INFO Bootstrap: Using eth7:10.0.0.7<0>\nNCCL INFO NET/Socket : Using eth8:1"
        return types.SimpleNamespace(stdout=words)

    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/dev/null")
    monkeypatch.setattr(subprocess, "run", run)
    assert doctor.interface_nccl_takes("libnccl.so.2") == "eth7"
    ((library, env),) = asked
    assert library == "libnccl.so.2"
    assert {k: v for k, v in env.items() if k.startswith("NCCL_DEBUG")} == {"NCCL_DEBUG": "INFO"}
