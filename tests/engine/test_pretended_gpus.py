"""The pretended GPUs themselves: each refusal, each cleaning, devices, events, memory."""

import linecache
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from course.gpu_box import TORCHRUN
from course.playing import NotAsExpected
from course.ranks import RanksFailed, run
from tests.helpers.gpu_nccl import what_would_hang
from tests.helpers.pretended_gpus import play_on_gpus

START = """
import os
import time
import torch
import torch.distributed as dist
RANK = int(os.environ["RANK"])
DEVICE = torch.device("cuda", RANK)

def join():
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)

def peers(x):
    join()
    return x.to(DEVICE), 1 - RANK
"""


def program(text: str, gpus: list[int]) -> object:
    """Run `text` as if it were a lesson's; return its `told`, and what was noted for NCCL."""
    import torch.distributed as dist

    from tests.helpers import gpu_nccl, pretended_gpus

    rank = int(pretended_gpus.os.environ["RANK"])
    source = START + text
    linecache.cache["planted.py"] = (len(source), None, source.splitlines(True), "planted.py")
    names = {}
    with pretended_gpus.pretended_gpus(gpus[rank], "planted.py"):
        exec(compile(source, "planted.py", "exec"), names)
        if dist.is_initialized():
            dist.barrier()
    return names.get("told"), gpu_nccl.notes


def told(text: str, ranks: int = 1, gpus: list[int] | None = None) -> list:
    return [told for told, _ in run(program, ranks, text, gpus or [ranks] * ranks, group=False)]


def refused(text: str, why: str, ranks: int = 1, gpus: list[int] | None = None) -> None:
    with pytest.raises(RanksFailed, match=why):
        told(text, ranks, gpus)


# Each refusal: the program, and what is said. `test_a_real_gpu_refuses_it` runs the same programs.
MIXED = r"Expected all tensors to be on the same device, but "
MIXED += r"(found at least two devices, cuda:0 and cpu!|got \w+ is on)"
DRAWN = "Expected a 'cuda' device type for generator but found 'cpu'"
FORKED = """
x = torch.ones(2, device=DEVICE)
reads, writes = os.pipe()
if os.fork() == 0:
    try:
        {}
    except RuntimeError as error:
        os.write(writes, str(error).encode())
    os._exit(0)
os.close(writes)
raise RuntimeError(os.read(reads, 1000).decode())
"""
MIXTURES = {
    "add": ("torch.ones(2, device=DEVICE) + torch.ones(2)", MIXED),
    "matrix product": ("torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2)", MIXED),
    "a layer left behind": ("torch.nn.Linear(2, 2)(torch.ones(2, device=DEVICE))", MIXED),
    "cat": ("torch.cat([torch.ones(2, device=DEVICE), torch.ones(2)])", MIXED),
    "embedding": ("torch.nn.Embedding(2, 2).cuda()(torch.zeros(1, dtype=torch.long))", MIXED),
    "scalar on the GPU": ("torch.ones(2) + torch.ones((), device=DEVICE)", MIXED),
    "index": ("torch.ones(2)[torch.zeros(1, dtype=torch.long, device=DEVICE)]", "indices should"),
    "arange": ("torch.ones(2, device=DEVICE) + torch.arange(2)", MIXED),
    "numpy": ("torch.ones(2, device=DEVICE).numpy()", "can't convert cuda:0 device type tensor"),
    "two GPUs": ("torch.ones(2).cuda(0) + torch.ones(2).cuda(1)", "cuda:[01] and cuda:[01]"),
    "no such GPU": ("torch.ones(2).cuda(99)", "invalid device ordinal"),
    "a generator": ("torch.randn(2, generator=torch.Generator(), device=DEVICE)", DRAWN),
    "a generator, in place": (
        "torch.empty(2, device=DEVICE).normal_(generator=torch.Generator())",
        DRAWN,
    ),
    "a generator, for weights": (
        "torch.nn.init.normal_(torch.empty(2, device=DEVICE), generator=torch.Generator())",
        DRAWN,
    ),
    "a generator of a GPU": (
        "torch.randn(2, generator=torch.Generator(DEVICE))",
        "Expected a 'cpu' device type for generator but found 'cuda'",
    ),
    "a fork": (
        FORKED.format("torch.ones(2, device=DEVICE)"),
        "Cannot re-initialize CUDA in forked subprocess",
    ),
    "a fork that computes": (
        FORKED.format("x * 2"),
        "Cannot re-initialize CUDA in forked subprocess|initialization error",
    ),
    "a fork that copies": (
        FORKED.format("x.cpu()"),
        "Cannot re-initialize CUDA in forked subprocess|initialization error",
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_what_a_gpu_refuses(name: str) -> None:
    text, why = MIXTURES[name]
    refused(text, why, gpus=[2])


def test_what_a_gpu_allows() -> None:
    text = """
x = torch.ones(4, device=DEVICE)
x[torch.tensor([0, 1])] = 2.0      # indices may lie on the CPU
x += torch.tensor(1.0)             # and so may scalars
x.copy_(torch.ones(4))
y = torch.from_numpy(__import__("numpy").ones(4)).to(DEVICE)
z = torch.nn.Linear(4, 4).to(DEVICE)(x.requires_grad_()).sum()
z.backward()
g = torch.Generator(DEVICE).manual_seed(1)
torch.randn(2, generator=g, device=DEVICE)
torch.randn(2, generator=torch.Generator()).to(DEVICE)
assert isinstance(torch.default_generator, torch.Generator) and g.device == DEVICE
child = os.fork()                  # a child may compute on the CPU
if child == 0:
    os._exit(int((torch.ones(2) * 2).sum().item()))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
places = [x.device, x.is_cuda, x.cpu().is_cuda, x.grad.device, (x * 2).view(2, 2).device]
told = [str(place) for place in places] + [str(y.device), str(torch.empty_like(x).device)]
"""
    (places,) = told(text)
    assert places == ["cuda:0", "True", "False", "cuda:0", "cuda:0", "cuda:0", "cuda:0"]


def test_a_gradient_goes_back_to_where_its_parameter_lies() -> None:
    text = """
w = torch.ones(3, requires_grad=True)
(w.to(DEVICE) * torch.ones(3, device=DEVICE)).sum().backward()
told = str(w.grad.device)
"""
    assert told(text) == ["cpu"]


WAIT = "torch.cuda.synchronize()"
CLEANINGS = {
    "synchronize": WAIT,
    "item": "x.sum().item()",
    "tolist": "x.tolist()",
    "cpu": "x.cpu()",
    "bool": "bool(x.sum() > 0)",
    "float": "float(x.sum())",
    "nonzero": "x.nonzero()",
    "print": "print(x)",
    "an event": "e = torch.cuda.Event(); e.record(); e.synchronize()",
    "the stream": "torch.cuda.current_stream().synchronize()",
    "barrier": "dist.barrier()",
}


@pytest.mark.parametrize("name", CLEANINGS)
def test_after_this_the_clock_may_be_read(name: str) -> None:
    text = f"join()\nx = torch.ones(4, device=DEVICE) * 2\n{CLEANINGS[name]}\ntime.perf_counter()"
    told(text)


BUSY = {
    "kernel": "x = torch.ones(4, device=DEVICE) * 2",
    "factory": "x = torch.zeros(4, device=DEVICE)",
    "copy that does not block": "x = torch.ones(4).to(DEVICE, non_blocking=True)",
    "collective": f"{WAIT}\ndist.all_reduce(x)",
    "collective waited for": f"{WAIT}\ndist.all_reduce(x, async_op=True).wait()",
    "collective not waited for": f"{WAIT}\nw = dist.all_reduce(x, async_op=True)\nx.sum().item()",
    "another stream": f"s = torch.cuda.Stream()\n{WAIT}\nwith torch.cuda.stream(s):\n    y = x + 1",
    "sleep of the GPU": f"{WAIT}\ntorch.cuda._sleep(1000)",
}


@pytest.mark.parametrize("clock", ["perf_counter()", "sleep(0.001)"])
@pytest.mark.parametrize("name", BUSY)
def test_no_clock_while_the_gpu_is_busy(name: str, clock: str) -> None:
    text = f"join()\nx = torch.ones(4, device=DEVICE)\n{BUSY[name]}\ntime.{clock}"
    refused(text, rf"planted.py:\d+, in <module>: time.{clock[:5]}\w* while the GPU has not")
    told(text + "  # launch time is what this reads")


def test_device_and_stream_are_current_in_one_thread() -> None:
    text = """
from threading import Thread
join()
side = torch.cuda.Stream()
told = []

def other():
    told.append(torch.cuda.current_device())
    torch.cuda.set_device(0)
    torch.cuda.set_stream(side)

thread = Thread(target=other)
thread.start()
thread.join()
told += [torch.cuda.current_device(), torch.cuda.current_stream() == side]
"""
    assert told(text, 2) == [[0, 0, False], [0, 1, False]]


def test_events_tell_time_once_somebody_waited() -> None:
    text = """
a = torch.cuda.Event(enable_timing=True)
b = torch.cuda.Event(enable_timing=True)
a.record()
torch.cuda._sleep(20_000_000)
b.record()
"""
    refused(text + "a.elapsed_time(b)", "Both events must be completed")
    (ms,) = told(text + "b.synchronize()\ntold = a.elapsed_time(b)")
    assert ms >= 20


def test_memory_is_what_lives_and_what_lived_at_most() -> None:
    text = """
x = torch.ones(1024, device=DEVICE)
y = x.view(32, 32)                     # the same storage
z = torch.empty(2048, dtype=torch.uint8, device=DEVICE)
w = torch.ones(1024)                   # on the CPU
told = [torch.cuda.memory_allocated()]
z.untyped_storage().resize_(0)
del x
told += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
"""
    assert told(text) == [[4096 + 2048, 4096, 4096 + 2048]]


def test_large_kernels_keep_shape_and_place_and_take_no_time() -> None:
    text = """
a = torch.empty(65536, 65536, dtype=torch.bfloat16, device=DEVICE)
b = a @ a
b += 1
told = [tuple(b.shape), str(b.dtype), str(b.device), torch.cuda.memory_allocated()]
"""
    assert told(text) == [[(65536, 65536), "torch.bfloat16", "cuda:0", 2 * 2**33]]


NCCL = {
    "a CPU tensor": ("dist.all_reduce(torch.ones(2))", "device type cpu"),
    "a list on the CPU": (
        "dist.all_gather([torch.ones(2)] * 2, x)",
        "device type cpu|Tensors must be CUDA",
    ),
    "a tag": ("dist.send(x, peer, tag=1)", "NCCL has no tags"),
    "any source": ("dist.recv(x)", "recvAnysource"),
    "bits": ("dist.all_reduce(x, op=dist.ReduceOp.BXOR)", "Cannot use ReduceOp.BXOR with"),
    "stripes": ("dist.all_reduce(x[::2])", "must be contiguous"),
    "unequal sizes": ("dist.gather(x, [x, x[:1]] if RANK == 0 else None)", "invalid tensor size"),
    "the wrong GPU": (
        "torch.cuda.set_device(0)\ndist.all_reduce(x)",
        "torch.cuda.set_device first",
    ),
    "monitored barrier": ("dist.monitored_barrier()", "only implemented for GLOO"),
    "a gloo group of some": ("dist.new_group([0], backend='gloo')", "ncclCommSplit for ever"),
    "int16": ("dist.broadcast(x.to(torch.int16), 0)", "data type is not supported for NCCL"),
    "uint16": (
        "y = x.to(torch.uint16)\ndist.all_gather([y, y.clone()], y)",
        "data type is not supported for NCCL",
    ),
    "uint32": ("dist.send(x.to(torch.uint32), peer)", "data type is not supported for NCCL"),
    "objects on a GPU": (
        "dist.all_gather_object([None, None], {'x': [x]})",
        r"all_gather_object is handed a CUDA tensor of \(4,\)",
    ),
    "a parameter as an object": (
        "dist.broadcast_object_list([torch.nn.Parameter(x)])",
        "broadcast_object_list is handed a CUDA tensor",
    ),
    "sent through gloo": (
        "dist.send(x, peer, group=dist.new_group(backend='gloo'))",
        "send: gloo hands a CUDA tensor's address to a socket",
    ),
    "received through gloo": (
        "host = dist.new_group(backend='gloo')\n"
        "dist.recv(x, peer, group=host) if RANK else dist.send(x.cpu(), peer, group=host)",
        "recv_: gloo hands a CUDA tensor's address to a socket",
    ),
}
# What real ones do not refuse: there it hangs, goes wrong, or takes memory on another GPU.
OURS = {"a tag", "the wrong GPU", "a gloo group of some", "objects on a GPU"}
OURS |= {"a parameter as an object", "sent through gloo", "received through gloo"}


@pytest.mark.parametrize("name", NCCL)
def test_what_nccl_refuses(name: str) -> None:
    text, why = NCCL[name]
    refused(f"x, peer = peers(torch.ones(4))\n{text}", why, ranks=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
@pytest.mark.parametrize("name", [name for name in MIXTURES | NCCL if name not in OURS])
def test_a_real_gpu_refuses_it(name: str, tmp_path: Path) -> None:
    """Nothing is pretended here. It has not yet been run where there are GPUs."""
    text, why = (MIXTURES | NCCL)[name]
    ranks = 1
    if name in NCCL:
        ranks = 2
        text = f"x, peer = peers(torch.ones(4))\n{text}"
    if torch.cuda.device_count() < 2 and (ranks == 2 or name == "two GPUs"):
        pytest.skip("wants 2 GPUs")
    program = tmp_path / "planted.py"
    program.write_text(START + text)
    argv = [sys.executable, *TORCHRUN, f"--nproc-per-node={ranks}", program]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert ran.returncode != 0
    assert re.search(why, ran.stderr), ran.stderr[-3000:]


def test_what_nccl_allows() -> None:
    text = """
x, peer = peers(torch.ones(4) + RANK)
dist.all_reduce(x, op=dist.ReduceOp.AVG)
host = dist.new_group(backend="gloo")
y = torch.ones(1)
dist.all_reduce(y, group=host)             # a gloo group of all ranks takes CPU tensors
pair = dist.new_group([0, 1])              # and an NCCL group may be of some
z = torch.empty(8, device=DEVICE)
dist.all_gather_single(z, x, group=pair) if hasattr(dist, "all_gather_single") else (
    dist.all_gather_into_tensor(z, x, group=pair))
objects = [None, None]
dist.all_gather_object(objects, RANK)
told = [x.tolist(), y.item(), z.sum().item(), objects, dist.get_backend(), dist.get_backend(host)]
"""
    assert told(text, 2) == [[[1.5] * 4, 2.0, 12.0, [0, 1], "nccl", "gloo"]] * 2


def test_a_future_is_complete_at_launch_and_the_work_is_not() -> None:
    text = """
join()
x = torch.ones(4, device=DEVICE)
work = dist.all_reduce(x, async_op=True)
told = [work.get_future().done(), work.is_completed()]
torch.cuda.synchronize()
told += [work.is_completed(), x.tolist()]
"""
    assert told(text, 2) == [[True, False, True, [2.0] * 4]] * 2


def hangs(text: str, ranks: int = 2) -> str:
    both = run(program, ranks, f"x, peer = peers(torch.ones(4))\n{text}", [2, 2], group=False)
    return what_would_hang([notes for _, notes in both])


ORDERS = {
    "both send first": (
        "w = dist.isend(x, peer)\ndist.recv(x.clone(), peer)\nw.wait()",
        "rank 0 waits in send to rank 1, 4 torch.float32 elements",
    ),
    "one sends, one receives": (
        "(dist.send if RANK else dist.recv)(x, peer)\n(dist.recv if RANK else dist.send)(x, peer)",
        "",
    ),
    "a batch": (
        "ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, x.clone(), peer)]\n"
        "[w.wait() for w in dist.batch_isend_irecv(ops)]",
        "",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_sends_and_receives(name: str) -> None:
    text, why = ORDERS[name]
    found = hangs(text)
    assert why in found if why else found == ""


UNLIKE = {
    "dtypes": (
        "dist.all_reduce(x if RANK else x.int())",
        "rank 0 waits in allreduce, 4 torch.int32 elements, SUM",
    ),
    "operations": (
        "dist.all_reduce(x, op=dist.ReduceOp.MAX if RANK else dist.ReduceOp.SUM)",
        "rank 1 waits in allreduce, 4 torch.float32 elements, MAX",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_ask_for_unlike_collectives(name: str) -> None:
    text, why = UNLIKE[name]
    assert why in hangs(text)


def test_ranks_that_name_unlike_roots() -> None:
    """Gloo itself hangs then: what each rank notes is taken from a run in which both agree."""
    text = "x, peer = peers(torch.ones(4))\ndist.broadcast(x, {})"
    runs = [run(program, 2, text.format(root), [2, 2], group=False) for root in (0, 1)]
    (_, notes_of_0), (_, notes_of_1) = runs[0][0], runs[1][1]
    found = what_would_hang([notes_of_0, notes_of_1])
    assert "rank 1 waits in broadcast, 4 torch.float32 elements, root 1" in found


def both(*asked: tuple) -> list[tuple]:
    return [("world", (0, 1), i, what, peer, of_it) for i, (what, peer, of_it) in enumerate(asked)]


def test_collectives_meet_in_one_order_and_one_size() -> None:
    sum_, copy = ("allreduce", None, "4 elements"), ("broadcast", None, "4 elements")
    assert what_would_hang([both(sum_, copy), both(sum_, copy)]) == ""
    assert "rank 0 waits in allreduce" in what_would_hang([both(sum_, copy), both(copy, sum_)])
    unlike = what_would_hang([both(sum_), both(("allreduce", None, "8 elements"))])
    assert "rank 1 waits in allreduce, 8" in unlike


def test_ranks_that_see_unlike_numbers_of_gpus() -> None:
    """B2: one rank takes NCCL, and the other falls back to gloo."""
    text = """
if torch.cuda.device_count() >= 2:
    join()
else:
    dist.init_process_group("gloo")
"""
    told(text, 2, [2, 2])
    told(text, 2, [1, 1])
    refused(text, "nccl on rank 0, gloo on rank 1: they would wait", 2, [2, 1])


def test_a_synchronize_that_visits_every_gpu() -> None:
    """C3: a context on each GPU of the machine, inside the clock."""
    text = """
join()
x = torch.ones(4, device=DEVICE)
for gpu in range(torch.cuda.device_count()):
    torch.cuda.synchronize(gpu)
"""
    refused(text, r"synchronize\(0\) makes a context on GPU 0", 2)


def test_ranks_without_set_device() -> None:
    """D3: every rank's current device is GPU 0."""
    text = "dist.init_process_group('nccl', device_id=DEVICE)\nx = torch.ones(4, device=DEVICE)\n"
    refused(text + "dist.all_reduce(x)", "current device, where all ranks would meet", 2)


def test_a_barrier_before_set_device() -> None:
    """The current device is the thread's: one that has chosen none is on GPU 0."""
    told("torch.cuda.set_device(DEVICE)\ndist.init_process_group('nccl')\ndist.barrier()", 2)
    text = "dist.init_process_group('nccl')\ndist.barrier()"
    refused(text, "barrier before set_device: its tensor would lie on GPU 0", 2)
    text = """
from concurrent.futures import ThreadPoolExecutor
torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl")
ThreadPoolExecutor().submit(dist.barrier).result()
"""
    refused(text, "barrier before set_device: its tensor would lie on GPU 0", 2)


LONELY = """
import os
import torch
import torch.distributed as dist
ledger = []

def main():
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    if rank == 0:
        dist.recv(torch.ones(4, device="cuda"), 1)
    raise SystemExit
"""


def test_a_hang_is_named_at_the_lessons_line(tmp_path: Path) -> None:
    lesson = tmp_path / "lonely.py"
    lesson.write_text(LONELY)
    played = play_on_gpus(str(lesson), 2, deadline=5)
    assert re.search(r"rank 0 hung: waits .*called from \S*lonely\.py:12, in main", played.code)


def test_it_is_the_fault_that_is_refused() -> None:
    text = "x, peer = peers(torch.ones(4))\ndist.all_reduce(x)\nlist_ = [x, x.clone()]\n"
    told(text + "dist.gather(x, list_ if RANK == 0 else None)", 2)


# Known faults of lessons, planted again: (lesson, ranks, what is changed, how it has to end).
PLANTED = {
    "a clock of the host after Work.wait()": (
        "parallelism/07_pipeline_schedules.py",
        2,
        [("        torch.cuda.synchronize()\n        seconds", "        seconds")],
        r"Unsettled: 07_pipeline_schedules\.py:\d+, in \w+: time\.\w+ while the GPU has not",
    ),
    "a gloo group of two ranks of three": (
        "fundamentals/04_latency_and_bandwidth.py",
        3,
        [
            (
                'host = dist.new_group(backend="gloo")',
                'host = dist.new_group([0, 1], backend="gloo")',
            )
        ],
        "Refused: new_group: a gloo group of some of the ranks, under NCCL with device_id",
    ),
    "no set_device": (
        "communication/01_nccl_collectives.py",
        2,
        [("        torch.cuda.set_device(device)\n", "")],
        "is this rank's current device, where all ranks would meet: call torch.cuda.set_device",
    ),
    "a clock that does not wait for the GPU": (
        "communication/01_nccl_collectives.py",
        2,
        [("  # not settled after: launch time", "")],
        r"Unsettled: 01_nccl_collectives\.py:\d+, in seconds_by_the_clock: time\.perf_counter",
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_fails_by_its_name(fault: str) -> None:
    lesson, ranks, changes, why = PLANTED[fault]
    played = play_on_gpus(lesson, ranks, *changes)
    with pytest.raises(NotAsExpected):
        played.expect(set())
    assert re.search(why, str(played.code)), played.code
