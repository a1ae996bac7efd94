"""bpftrace counts what was called, on gloo and by NCCL's names; it goes when its rank goes."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

from course.playing import Lazily, load
from course.ranks import attempt, lives
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "profiling/07_tracing_with_ebpf.py"
tracing = Lazily(LESSON)

# bpftrace sees what is really called: gloo, which carries NCCL's messages.
ON_GPUS = OnGpus(
    changes=[('nccl=device.type == "cuda"', "nccl=False"), ("WIDTH = 4096", "WIDTH = 512")],
    hardware={"bytes copied to the GPU by cuMemcpy, at least": "the driver copies"},
    ranks=(1, 2),
)
WITHOUT = {
    "root": Without(
        [("os.geteuid() != 0", "os.geteuid() == 0 or True")], {"all that bpftrace counts"}
    )
}

# Some containers forbid bpf(2) even to root.
FORBIDDEN = os.system("bpftrace -e 'BEGIN { exit(); }' >/dev/null 2>&1") != 0
needs_bpf = pytest.mark.skipif(FORBIDDEN, reason="needs root with bpf(2), and bpftrace")


def test_what_is_printed_becomes_counts_sizes_and_lateness() -> None:
    maps = {
        "@sizes": {
            ("7", "all_reduce", "100", "7"): 2,  # ncclFloat32
            ("7", "all_reduce", "200", "6"): 3,  # ncclFloat16: the same bytes
            ("7", "broadcast", "1", "0"): 5,
            ("8", "all_reduce", "1", "0"): 1,
        },
        "@at": {
            ("7", "all_reduce", "0"): 1_000_000,
            ("8", "all_reduce", "0"): 4_000_000,
            ("7", "all_reduce", "1"): 8_000_000,
            ("8", "all_reduce", "1"): 13_000_000,
            ("7", "broadcast", "0"): 99_000_000,
            ("9", "all_reduce", "0"): 0,  # nobody's
        },
    }
    assert tracing.sizes_seen(maps, 7, "all_reduce") == {400: 5}
    assert tracing.sizes_seen(maps, 8, "broadcast") == {}
    assert tracing.lateness(maps, [7, 8]) == [0, 3]  # the median of 0 (always there), 3 and 5
    assert tracing.seen(maps, "@sizes", 7, "broadcast", 1, 0) == 5
    assert tracing.seen(maps, "@tcp", 7) == 0


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in tracing.why_not()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(tracing.shutil, "which", lambda name: None if name == "bpftrace" else name)
    assert "no command bpftrace" in tracing.why_not()
    monkeypatch.setattr(tracing.shutil, "which", lambda name: name)
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[4026532201]")
    assert "container" in tracing.why_not()
    with pytest.raises(OSError, match=r"uses no libcuda\.so"):
        tracing.mapped(os.getpid(), "libcuda.so")


@needs_bpf
@pytest.mark.deep
def test_a_program_that_is_wrong_is_refused_with_its_reason() -> None:
    with pytest.raises(OSError, match="bpftrace: tracepoint not found: sock:nothing"):
        tracing.attach('BEGIN { printf("attached"); } tracepoint:sock:nothing { @ = 1; }')
    with pytest.raises(OSError, match=r"exports no ncclAllReduce"):
        tracing.address_of("ncclAllReduce", tracing.mapped(os.getpid(), "libc.so"))


# A job on GPUs, as bpftrace sees one: files with these names, and functions with these in them.
STAND_INS = {
    "libnccl.so.2": "ncclAllReduce ncclBroadcast ncclAllGather ncclReduceScatter ncclReduce "
    "ncclAlltoAll ncclSend ncclRecv",
    "libcuda.so.1": "cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync cuMemcpyAsync "
    "cuMemcpyPeerAsync cuMemcpy3DPeerAsync cuMemcpyPeer",
}
JOB = """
import ctypes, sys
nccl, cuda = map(ctypes.CDLL, sys.argv[1:])
size = ctypes.c_size_t
print("ready", flush=True)
sys.stdin.readline()
for count in (1000, 1000, 24):
    nccl.ncclAllReduce(size(1), size(2), size(count), 7, 0, None, None)  # ncclFloat32
nccl.ncclAllGather(size(1), size(2), size(5), 9, None, None)  # ncclBfloat16
for _ in range(2):
    nccl.ncclSend(size(1), size(300), 7, 3, None, None)
nccl.ncclRecv(size(1), size(400), 6, 3, None, None)  # ncclFloat16
nccl.ncclReduce(size(1), size(2), size(50), 8, 0, 1, None, None)  # ncclFloat64
nccl.ncclAlltoAll(size(1), size(2), size(60), 7, None, None)
cuda.cuMemcpyHtoDAsync_v2(size(1), size(2), size(2**33), None)
cuda.cuMemcpyHtoDAsync_v2(size(1), size(2), size(1), None)
cuda.cuMemcpyDtoHAsync_v2(size(1), size(2), size(4), None)
cuda.cuMemcpyHtoDAsync(size(1), size(2), size(99), None)
cuda.cuMemcpyPeerAsync(size(1), size(2), size(3), size(4), size(2**34), None)
cuda.cuMemcpyPeer(size(1), size(2), size(3), size(4), size(7), None)
block = (size * 25)(*[9] * 22, 100, 20, 3)  # CUDA_MEMCPY3D_PEER ends with width, height and depth
cuda.cuMemcpy3DPeerAsync(block, None)
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def gpu_job(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process that calls the stand-ins when told so."""
    for name, functions in STAND_INS.items():
        source = tmp_path / "source.cc"
        lines = [f'extern "C" int {function}() {{ return 0; }}' for function in functions.split()]
        source.write_text("\n".join(lines))
        subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / name, source], check=True)
    libraries = [tmp_path / name for name in STAND_INS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", JOB, *libraries], **pipes) as job:
        assert job.stdout.readline() == "ready\n"
        yield job
        job.kill()


# The counts' registers, by the declarations in nccl.h and cuda.h; no kernel is asked.
REGISTERS = {
    "ncclAllReduce": "arg2, arg3",
    "ncclBroadcast": "arg2, arg3",
    "ncclAllGather": "arg2, arg3",
    "ncclReduceScatter": "arg2, arg3",
    "ncclReduce": "arg2, arg3",
    "ncclAlltoAll": "arg2, arg3",
    "ncclSend": "arg1, arg2",
    "ncclRecv": "arg1, arg2",
    "cuMemcpyHtoDAsync_v2": "sum(arg2)",
    "cuMemcpyDtoHAsync_v2": "sum(arg2)",
    "cuMemcpyAsync": "sum(arg2)",
    "cuMemcpyPeerAsync": "sum(arg4)",
    "cuMemcpy3DPeerAsync": "sum(*(uint64 *)(arg0 + 176) * ",
    "cuMemcpyHtoDAsync": "",  # sizes of 32 bits: not hooked
    "cuMemcpyPeer": "",  # the host waits for it
}


@pytest.mark.parametrize("missing", ["", "ncclAlltoAll"])
def test_every_call_that_moves_data_is_hooked(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {name: f"0x{i:x}" for i, name in enumerate(REGISTERS) if name != missing}
    monkeypatch.setitem(tracing.nccl_probes.__globals__, "symbols", lambda library: names)
    lines = tracing.nccl_probes("lib") + tracing.copy_probes("lib")
    for name, registers in REGISTERS.items():
        entry = [line for line in lines if line.startswith(f"uprobe:lib:{names.get(name)} ")]
        assert len(entry) == (registers != "" and name != missing), name
        assert all(registers in line for line in entry)


@pytest.mark.skipif(shutil.which("bpftrace") is None, reason="needs bpftrace")
@pytest.mark.deep
def test_bpftrace_understands_the_program(gpu_job: subprocess.Popen) -> None:
    """It compiles it; loading it is what needs root with bpf(2)."""
    program = tracing.program([gpu_job.pid], nccl=True)
    program = "\n".join(line for line in program.splitlines() if not line.startswith("tracepoint"))
    said = subprocess.run(["bpftrace", "-d", "-e", program], capture_output=True, text=True)
    assert "probe_read_user" in said.stdout + said.stderr  # the struct of a peer copy
    assert "ERROR" not in said.stderr.replace("ERROR: Unknown error -1: couldn't set RLIMIT", "")


@needs_bpf
@pytest.mark.deep
def test_on_gpus_the_calls_of_nccl_and_of_the_driver_are_counted(gpu_job: subprocess.Popen) -> None:
    pid = gpu_job.pid
    tracer = tracing.attach(tracing.program([pid], nccl=True))
    gpu_job.stdin.write("\n")
    gpu_job.stdin.flush()
    assert gpu_job.stdout.readline() == "done\n"
    maps = tracing.detach(tracer)
    calls = {name: tracing.seen(maps, "@calls", pid, name) for name in tracing.NCCL}
    assert calls == {"all_reduce": 3, "all_gather": 1, "broadcast": 0, "reduce_scatter": 0,
                     "reduce": 1, "all_to_all": 1, "send": 2, "recv": 1}  # fmt: skip
    assert tracing.sizes_seen(maps, pid, "send") == {1200: 2}
    assert tracing.sizes_seen(maps, pid, "recv") == {800: 1}
    assert tracing.sizes_seen(maps, pid, "reduce") == {400: 1}
    assert tracing.sizes_seen(maps, pid, "all_to_all") == {240: 1}
    assert tracing.sizes_seen(maps, pid, "all_reduce") == {4000: 2, 96: 1}
    assert tracing.sizes_seen(maps, pid, "all_gather") == {10: 1}
    assert sum(bar["count"] for bar in maps["@us"][str(pid), "all_reduce"]) == 3
    moments = [maps["@at"][str(pid), "all_reduce", str(nth)] for nth in range(3)]
    assert moments == sorted(moments)
    assert maps["@copied"] == {
        (str(pid), "HtoD"): 2**33 + 1,
        (str(pid), "DtoH"): 4,
        (str(pid), "Peer"): 2**34,
        (str(pid), "3DPeer"): 6000,
    }
    assert tracing.seen(maps, "@copies", pid, "HtoD") == 2  # one that takes 32 bits is another's


@needs_bpf
@pytest.mark.deep
def test_another_job_is_watched_by_its_pid(
    gpu_job: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def train(seconds: float) -> None:
        gpu_job.stdin.write("\n")
        gpu_job.stdin.flush()
        assert gpu_job.stdout.readline() == "done\n"

    monkeypatch.setitem(tracing.watch.__globals__, "time", SimpleNamespace(sleep=train))
    tracing.watch([gpu_job.pid], 10)
    said = capsys.readouterr().out
    assert f"pid {gpu_job.pid}: 0 bytes by TCP" in said
    assert "all_reduce            3 calls" in said
    assert "{4000: 2, 96: 1}" in said


def attach_and_wait(tell: Connection) -> None:
    tracer = tracing.attach('BEGIN { printf("attached"); } interval:s:9 { @ = 1; }')
    tell.send(tracer.pid)
    time.sleep(600)


@needs_bpf
@pytest.mark.deep
def test_bpftrace_goes_when_its_rank_is_killed() -> None:
    ours, theirs = multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(target=attach_and_wait, args=[theirs])
    rank.start()
    theirs.close()  # should the rank fail, we are told
    tracer = psutil.Process(ours.recv())
    assert tracer.name() == "bpftrace"
    rank.kill()
    rank.join()
    stop = time.monotonic() + 100
    while lives(tracer):  # what inherits it may leave a zombie
        assert time.monotonic() < stop
        time.sleep(0.02)


CALLS, BYTES = "{}: calls that bpftrace counts", "{}: bytes in them"
OF_SIZE, TIMES = "{}: calls of another size", "{}: calls in the histogram of times"
OTHERS, EVERYBODY = (
    "all-reduces of another job that were counted",
    "all-reduces of all processes, at least",
)
TCP = "bytes sent by TCP / bytes of all-reduces"
AGAIN = "times that a dropped SYN was sent again"
NOTHING = "calls of a function that does nothing, counted"


def both(*texts: str) -> set[str]:
    return {text.format(name) for text in texts for name in ("all_reduce", "broadcast")}


# Without a filter, all that runs next to this test would fill the maps.
CHILD = "*[child.pid for child in __import__('psutil').Process().children()]"
LINES = {  # several lines at once, and the claims that must FAIL
    "what is not counted": (
        [
            ('@calls[pid, "{name}"] = count(); ', ""),
            ("if (@began[tid])", "if (@began[tid] == 1)"),
            ("@tcp[pid] = sum({amount});", "@tcp[pid] = count();"),
            ("@again[args->dport]", "@again[args->sport]"),
            ("for _ in range(HITS):", "for _ in range(HITS - 1):"),
        ],
        both(CALLS, TIMES) | {TCP, AGAIN, NOTHING},
    ),
    "whose, and how large": (
        [
            ('1;" for pid in pids)', f'1;" for pid in [*pids, {CHILD}])'),
            ("@buffer[tid] = arg3;", "@buffer[tid] = arg2;"),
            ("library)} {{ {everybody} }}", "library)} /@traced[pid]/ {{ {everybody} }}"),
        ],
        both(BYTES, OF_SIZE) | {OTHERS, EVERYBODY},
    ),
    "fewer buckets": (
        ("bucket_cap_mb=bucket)", "bucket_cap_mb=8 * bucket)"),
        {"all-reduces per step: buckets and the loss"},
    ),
}


SLOW = {
    "rank that spends the least time in all-reduces",
    "rank that begins them last",
    "ms by which it is late, at least",
}
CHEAPER = "a tracepoint's price / a uprobe's, at most"
SHARE = "% of a step that tracing takes, at most"
PRICES = {"us per hit of a uprobe, at most", CHEAPER, SHARE}
OF_THE_CLOCK = {
    "another rank sleeps, and shorter": (
        [
            ("if RANK == SLOW:", "if RANK == 0:"),
            ("time.sleep(pause)", "time.sleep(pause / 4)"),
        ],
        SLOW,
    ),
    "the price of 500 hits, and of the other sort of probe": (
        [
            ("(time.thread_time() - start) / HITS", "(time.thread_time() - start)"),
            (
                "zip(seconds_per_call(), without,",
                "zip(reversed(seconds_per_call()), reversed(without),",
            ),
        ],
        PRICES,
    ),
}


QUICK = [("PAUSE = 0.1", "PAUSE = 0.01")]
# Where calls are not counted, another job's are not, either.
ALONE = ["whose, and how large"]
BREAKS = [
    Breaks(LINES, changes=QUICK, alone=ALONE, deadline=250),
    Breaks(OF_THE_CLOCK, deadline=250, clock=True),
]
if FORBIDDEN:
    BREAKS = []


def judged(late_ms: tuple[float, float], step: float, prices: tuple[float, float]) -> set[str]:
    """What FAILs if rank 1 comes late by so much, to all-reduces that rank 0 waits in."""
    own = load(LESSON)
    own.WORLD_SIZE = 2
    pids = [os.getpid(), 8]
    me = (str(os.getpid()),)
    maps = {"@at": {}, "@spent": {}, "@hits": {me: 22 * own.STEPS}, "@sends": {me: 20 * own.HITS}}
    for pid, ms in zip(pids, late_ms, strict=True):
        maps["@at"][str(pid), "all_reduce", "0"] = 1e6 * ms
        maps["@spent"][str(pid), "all_reduce"] = 1e6 * (200 - ms)
    found = own.Evidence(pids, [], step, maps, own.Prices(*prices), 0, 0, 0)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2", LOCAL_RANK="0"):
        own.check_who_is_slow(found, torch.device("cpu"))
        own.check_overhead(found)
    return {row["claim"] for row in own.ledger if row["verdict"] == "FAIL"} - {NOTHING}


def test_what_the_clock_decides_is_judged_rightly() -> None:
    assert judged((0, 100), 0.05, (2e-6, 5e-7)) == set()
    assert judged((100, 0), 0.05, (2e-6, 5e-7)) == SLOW - {"ms by which it is late, at least"}
    assert judged((0, 40), 0.05, (2e-6, 5e-7)) == {"ms by which it is late, at least"}
    assert judged((0, 100), 0.05, (4e-5, 1e-6)) == PRICES - {CHEAPER, SHARE}
    assert judged((0, 100), 0.05, (2e-6, 2e-6)) == {CHEAPER}
    assert judged((0, 100), 0.002, (2e-6, 5e-7)) == {SHARE}


def a_peer_leaves(*changes: tuple[str, str]) -> str:
    """What rank 0, traced, hears when rank 1 closes its connections."""
    lesson = load(LESSON, *changes)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        dist.barrier()
        dist.destroy_process_group()  # closes its connections
        return "left"
    tracer = lesson.attach(lesson.program(pids, nccl=False))
    dist.barrier()
    try:
        for _ in range(100):
            dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        lesson.detach(tracer)
        return str(error)


@needs_bpf
@pytest.mark.deep
def test_what_gloo_throws_passes_the_probes() -> None:
    """With a uretprobe on gloo::allreduce, any process that has one would be aborted there.

    That was tried by hand: next to other tests it would end them, too.
    """
    traced, _ = attempt(a_peer_leaves, 2, deadline=250)
    assert "onnection" in traced.value, traced


def test_a_type_of_nccl_is_as_wide_as_torchs() -> None:
    names = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16"
    names += " float8_e4m3fn float8_e5m2"  # in the order of ncclDataType_t
    assert [getattr(torch, name).itemsize for name in names.split()] == tracing.WIDTHS


@pytest.mark.parametrize(
    ("release", "probe", "amount"),
    [
        ("5.15.0-91-generic", "kretprobe:tcp_sendmsg", "sum(retval)"),
        ("6.2.0", "kretprobe:tcp_sendmsg", "sum(retval)"),
        ("6.3.1", "tracepoint:sock:sock_send_length", "sum(args->ret)"),
    ],
)
def test_older_kernels_are_asked_elsewhere(
    release: str, probe: str, amount: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    sent, again = tracing.kernel_probes()
    assert sent.startswith(f"{probe} /@traced[pid] && ")
    assert f"@tcp[pid] = {amount}; @sends[pid] = count();" in sent
    assert again.startswith("tracepoint:tcp:tcp_retransmit_skb {")


def test_a_call_s_price_is_that_of_one_call() -> None:
    own, calls = load(LESSON), []
    own.time = SimpleNamespace(thread_time=lambda: 3e-6 * len(calls))
    assert own.median_seconds(lambda: calls.append(1)) == pytest.approx(3e-6)
    assert len(calls) == 20 * own.HITS


@pytest.mark.parametrize("rank", [0, 1])
def test_the_job_trains_and_one_rank_of_it_is_slow(rank: int) -> None:
    own, slept = load(LESSON), []
    own.RANK, own.time = rank, SimpleNamespace(sleep=slept.append)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    alone = torch.nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    batch_BD = torch.randn(5, 3)
    with patch.object(dist, "all_reduce") as reduced, patch.object(dist, "broadcast") as told:
        own.train(model, batch_BD, torch.device("cpu"), steps=3, pause=0.25)
    sgd = torch.optim.SGD(alone.parameters(), lr=1e-3)
    for _ in range(3):
        sgd.zero_grad()
        alone(batch_BD).square().mean().backward()
        sgd.step()
    assert torch.allclose(model.weight, alone.weight, rtol=0, atol=1e-7)
    assert slept == [0.25] * 3 * (rank == 1)
    assert (reduced.call_count, told.call_count) == (3, 3)


def counted(name: str = "", change: int = 0) -> set[str]:
    """What FAILs of what bpftrace counts of a right job on 4 ranks, one map of it changed."""
    own = load(LESSON)
    own.WORLD_SIZE = 4
    me, stranger = str(os.getpid()), "77"
    call = own.Call("all_reduce", 1000, 4000, (0, 1, 2, 3), None)
    log = [call] * 3 + [call._replace(operation="broadcast", nbytes=4)] * 2
    reduced, told = [{"count": 1}, {"count": 2}], [{"count": 2}]  # bars of histograms
    maps = {
        "@calls": {(me, "all_reduce"): 3, (me, "broadcast"): 2, ("8", "all_reduce"): 3},
        "@sizes": {(me, "all_reduce", "1000", "7"): 3, (me, "broadcast", "4", "0"): 2},
        "@us": {(me, "all_reduce"): reduced, (me, "broadcast"): told},
        "@machine": {("all_reduce",): 3 + 3 + own.OTHERS},
        "@tcp": {(me,): 3 * 4000 * 3 // 2},  # 2 (n - 1) / n
        "@again": {("4000",): 1, ("22",): 5},
    }
    if name == "@us":
        reduced[0]["count"] += change
    elif name == "stranger":
        maps["@calls"][stranger, "all_reduce"] = change
    elif name:
        key = next(iter(maps[name]))
        maps[name][key] += change
    found = own.Evidence([int(me), 8], log, 1.0, maps, own.Prices(0, 0), 4000, 1, int(stranger))
    own.check_collectives(found)
    own.check_another_job(found, torch.device("cpu"))
    own.check_the_kernel(found, torch.device("cpu"))
    return {row["claim"] for row in own.ledger if row["verdict"] == "FAIL"}


def test_what_is_counted_is_judged_rightly() -> None:
    reduced = "all_reduce"
    assert counted() == set()
    assert counted("@calls", -1) == {CALLS.format(reduced)}
    assert counted("@sizes", 1) == {BYTES.format(reduced), OF_SIZE.format(reduced)}
    assert counted("@us", 1) == {TIMES.format(reduced)}
    assert counted("@machine", -1) == {EVERYBODY}
    assert counted("stranger", 7) == {OTHERS, EVERYBODY}
    assert counted("@tcp", 400) == {TCP}
    assert counted("@again", 1) == {AGAIN}
