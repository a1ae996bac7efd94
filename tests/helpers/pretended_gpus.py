"""Run a lesson's ranks as if each had an NVIDIA GPU, on CPUs: what no physics decides is decided.

`play_on_gpus(lesson, ranks)` is `course.playing.play` with as many pretended GPUs. Known are: on
which device every tensor lies and every generator draws (gpu_places.py, gpu_kernels.py); what the
GPUs still have to do when a clock is read, which device and stream are current in a thread, that
CUDA does not survive a fork (gpu_clock.py); what NCCL refuses and in which order it waits
(gpu_nccl.py), and what it logs (gpu_nccl_log.py). So a tensor left on the CPU, a forgotten
synchronize and sends that meet nobody fail here as they would on GPUs, or louder.

Not known is what nothing orders, for here everything is done in the order in which it is asked: a
side stream that does not wait for another, or that nobody waits for; memory that is freed or
written while a stream or a collective still uses it; a pinned buffer that is written while it is
copied; a copy to the CPU that does not block and is read at once; groups that the ranks use in
different orders. Nor is it known how often the host waits, or what threads other than the main one
do with tensors.

Not known are: bandwidth, overlap, and any claim a clock decides; the thread that CUDA's autograd
has per device; the allocator beyond the bytes of live storages; kernels in traces; the numerics of
cuBLAS and TF32; NCCL's algorithms and its buffer for small sends. What is done in C++ (DDP's
reducer, FSDP2's copies) sees CPU tensors. Kernels on tensors of more than `gpu_kernels.LARGE`
elements are left out: their results have shape, dtype and place, and no value; of such messages
gloo carries the beginning. So the sections that measure a GPU run at their real sizes, and what
they would print on one is not to be learned here.
"""

import contextlib
import linecache
import os
import sys
import types
from collections.abc import Iterator

import pynvml
import torch

from course.lessons import ROOT
from course.playing import Played, changed, how_it_ends, load
from course.ranks import attempt
from tests.helpers import gpu_clock, gpu_kernels, gpu_nccl, gpu_places

MEMORY = 80 * 2**30
ACCELERATOR = {"set_device_index": "set_device", "current_device_index": "current_device"}
ACCELERATOR |= {
    name: name for name in ("device_count", "is_available", "current_stream", "set_stream")
}
ACCELERATOR |= {name: name for name in ("synchronize", "empty_cache", "memory_allocated")}
ACCELERATOR |= {name: name for name in ("max_memory_allocated", "reset_peak_memory_stats")}


class PretendedProperties(types.SimpleNamespace):
    """What torch.cuda.get_device_properties tells."""


def patch_cuda(gpus: int) -> None:
    """Replace what lessons and libraries ask of torch.cuda."""
    clock = gpu_clock
    memory = gpu_places.memory

    def index(device: object = None) -> int:
        return clock.device_of(device).index

    def set_device(device: object) -> None:
        clock.current.device = index(device)
        clock.current.chosen = True

    def properties(device: object = None) -> PretendedProperties:
        uuid = f"GPU-{index(device):08d}-0000-0000-0000-000000000000"
        about = {"name": "a pretended GPU", "total_memory": MEMORY, "uuid": uuid}
        about |= {"multi_processor_count": 100, "major": 8, "minor": 0, "warp_size": 32}
        return PretendedProperties(**about, is_integrated=False, L2_cache_size=2**25)

    @contextlib.contextmanager
    def device(wanted: object) -> Iterator[None]:
        before = clock.current.device
        if wanted is not None and wanted != -1:
            set_device(wanted)
        try:
            yield
        finally:
            clock.current.device = before

    def sleep(cycles: int) -> None:
        clock.really["sleep"](cycles / 1e9)
        clock.launched(clock.device_of(), "_sleep")

    def reset_peak(device: object = None) -> None:
        memory.peak[index(device)] = memory.now.get(index(device), 0)

    def now(device: object = None) -> int:
        return memory.now.get(index(device), 0)

    def peak(device: object = None) -> int:
        return memory.peak.get(index(device), 0)

    def stats(device: object = None) -> dict:
        return {
            "allocated_bytes.all.current": now(device),
            "allocated_bytes.all.peak": peak(device),
        }

    def set_stream(stream: clock.Stream) -> None:
        clock.current.streams[stream.device.index] = stream

    answers = {
        "device_count": lambda: gpus,
        "is_available": lambda: gpus > 0,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: clock.forked,
        "set_device": set_device,
        "current_device": index,
        "device": device,
        "synchronize": clock.synchronize,
        "Stream": clock.Stream,
        "Event": clock.Event,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "current_stream": clock.stream_of,
        "default_stream": clock.default_stream,
        "set_stream": set_stream,
        "is_current_stream_capturing": lambda: False,
        "_sleep": sleep,
        "get_device_name": lambda device=None: "a pretended GPU",
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (8, 0),
        "is_bf16_supported": lambda *including: True,
        "can_device_access_peer": lambda one, other: one != other,
        "mem_get_info": lambda device=None: (MEMORY - now(device), MEMORY),
        "memory_allocated": now,
        "max_memory_allocated": peak,
        "memory_reserved": now,
        "max_memory_reserved": peak,
        "memory_stats": stats,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for theirs, ours in ACCELERATOR.items():
        if hasattr(torch.accelerator, theirs):
            setattr(torch.accelerator, theirs, getattr(torch.cuda, ours))
    torch._C._get_accelerator = lambda *check, **available: torch.device("cuda")
    torch.accelerator.current_accelerator = torch._C._get_accelerator
    torch.Generator = gpu_places.Generator
    patch_nvml()


def patch_nvml() -> None:
    """A driver that tells nothing, as a virtual GPU's: each question raises an NVMLError."""

    def answer(*args: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in dir(pynvml):
        if name.startswith("nvmlDevice"):
            setattr(pynvml, name, answer)
    pynvml.nvmlInit = lambda: None


@contextlib.contextmanager
def pretended_gpus(gpus: int, lesson: str = "") -> Iterator[None]:
    """Have so many GPUs in this process, for good; watch what clocks the file `lesson` reads."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(gpus)))
    patch_cuda(gpus)
    gpu_places.patch_storage()
    gpu_places.patch_backward()
    gpu_clock.patch_futures()
    gpu_nccl.patch()
    os.register_at_fork(after_in_child=gpu_clock.note_fork)
    if lesson:
        gpu_clock.watch_clocks(lesson)
    with gpu_places.Requests(), gpu_kernels.Kernels(gpu_nccl.collective):
        yield


def play_on_gpus(
    path: str,
    world_size: int,
    *changes: tuple[str, str],
    argv: tuple[str, ...] = (),
    deadline: float = 120,
) -> Played:
    """Run a lesson's `main` on so many ranks, each with a pretended GPU of its own."""
    changed(path, *changes)
    how = {"deadline": deadline, "quiet": deadline}  # lessons sleep on purpose
    how |= {"group": False, "own": [(ROOT / path).parent]}
    outcomes = attempt(_play, world_size, path, changes, argv, **how)
    first = outcomes[0]
    if any(o.kind != "returned" for o in outcomes):
        return Played("\n".join(map(str, outcomes)), [], first.output)
    code, ledger, _ = first.value
    if hangs := gpu_nccl.what_would_hang([outcome.value[2] for outcome in outcomes]):
        return Played(f"on NCCL this would hang or be wrong: {hangs}", ledger, first.output)
    return Played(code, ledger, first.output)


def _play(path: str, changes: tuple, argv: tuple[str, ...]) -> tuple[int | str, list, list]:
    from tests.helpers import gpu_nccl, pretended_gpus

    file = str(ROOT / path)
    sys.argv = [file, *argv]
    source = changed(path, *changes)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    with pretended_gpus.pretended_gpus(int(os.environ["WORLD_SIZE"]), file):
        lesson = load(path, *changes)
        return how_it_ends(lesson), lesson.ledger, gpu_nccl.notes
