"""NCCL as the pretended GPUs have it: gloo does the work, and what NCCL refuses is refused.

Each rank also notes what it asked of each communicator, in order; `what_would_hang` reads all
ranks' notes when they have ended, and lets each communicator do one thing after the other.
"""

import inspect
import threading
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils._pytree import tree_map_only

from tests.helpers import gpu_clock, gpu_kernels, gpu_nccl_log, gpu_places
from tests.helpers.gpu_places import CPU, is_tensor, place_of

GLOO = "cpu:gloo,cuda:gloo"
BITWISE = ("BAND", "BOR", "BXOR")
NO_DTYPE = (torch.int16, torch.uint16, torch.uint32)
NO_SUM = (torch.complex64, torch.complex128)
SOCKETS = ("send", "recv_", "recv_any_source_")  # what gloo does on the caller's own memory
ONE_SIZE = ("gather_", "scatter_")  # all tensors of a list have to be alike
ALIKE = {"gather_": "input_tensors", "scatter_": "output_tensors"}  # what all ranks hand over

notes: list[tuple] = []  # (communicator, ranks, batch, what, peer or None, of what), in order
state = {"device_id": None, "batch": 0, "in a batch": False, "default": ""}


class Refused(RuntimeError):
    """What NCCL, or torch above it, refuses."""


# Groups


def backend_of(group: dist.ProcessGroup) -> str:
    return c10d._world.pg_map.get(group, ("", None))[0]


def is_nccl(group: dist.ProcessGroup) -> bool:
    return backend_of(group) == "nccl"


def init_process_group(real: Callable) -> Callable:
    """Let NCCL be gloo; all ranks must have chosen the same."""

    def init(*args: object, **kwargs: object) -> None:
        bound = inspect.signature(real).bind(*args, **kwargs).arguments
        backend = str(bound.get("backend") or GLOO)
        state["default"] = backend
        state["device_id"] = bound.pop("device_id", None)
        real(**bound)
        store = c10d._get_default_store()
        store.set(f"backend of {dist.get_rank()}", backend)
        chosen = [store.get(f"backend of {r}").decode() for r in range(dist.get_world_size())]
        if len(set(chosen)) > 1:
            each = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(chosen))
            raise Refused(f"init_process_group: {each}: they would wait for one another for ever")

    return init


def new_process_group(real: Callable) -> Callable:
    """Make a gloo group, and call it NCCL's; refuse what hung before torch 2.15."""
    signature = inspect.signature(real)

    def helper(*args: object, **kwargs: object) -> tuple:
        asked = signature.bind(*args, **kwargs).arguments
        backend = str(asked["backend"])
        subset = 0 < len(asked["global_ranks_in_group"]) < (dist.get_world_size() if ready() else 0)
        if subset and state["device_id"] is not None and backend not in ("nccl", "undefined"):
            raise Refused(
                f"new_group: a {backend} group of some of the ranks, under NCCL with device_id: up "
                "to torch 2.14 the other ranks wait in ncclCommSplit for ever. Make it of all "
                "ranks, or leave its backend out."
            )
        if backend != "nccl":
            return real(*args, **kwargs)
        asked |= {"backend": GLOO, "device_id": None, "backend_options": None}
        made, store = real(**asked)
        if isinstance(made, dist.ProcessGroup):
            c10d._world.pg_map[made] = ("nccl", store)
        return made, store

    return helper


def ready() -> bool:
    return dist.is_initialized()


def object_device(real: Callable) -> Callable:
    """Object collectives on NCCL go through the current GPU."""

    def device(group: dist.ProcessGroup | None = None) -> str:
        return "cuda" if is_nccl(group or c10d._get_default_group()) else real(group)

    return device


def barrier(real: Callable) -> Callable:
    """NCCL's barrier stops the host until all ranks have come."""

    def meet(group: object = None, async_op: bool = False, **other: object) -> object:
        group = group or c10d._get_default_group()
        if not (isinstance(group, dist.ProcessGroup) and is_nccl(group)):
            return real(group, async_op, **other)
        unknown = state["device_id"] is None and not other.get("device_ids")
        if unknown and group.size() > 1 and not gpu_clock.current.chosen:
            raise Refused(
                "barrier before set_device: its tensor would lie on GPU 0 on every rank. Call "
                "torch.cuda.set_device first, or give init_process_group a device_id"
            )
        options = dist.BarrierOptions()
        options.device = CPU
        options.asyncOp = async_op
        work = group.barrier(opts=options)
        if not async_op:
            work.wait()
            gpu_clock.synchronize()  # all earlier work of this GPU, and of its communicator
        return work if async_op else None

    return meet


def batch(real: Callable) -> Callable:
    """Sends and receives of one batch start together, in any order."""

    def batch_isend_irecv(operations: list) -> list:
        state["batch"] += 1
        state["in a batch"] = True
        try:
            return real(operations)
        finally:
            state["in a batch"] = False

    return batch_isend_irecv


def monitored_barrier(real: Callable) -> Callable:
    def meet(group: object = None, *args: object, **kwargs: object) -> None:
        if is_nccl(group or c10d._get_default_group()):
            raise ValueError("monitored_barrier is only implemented for GLOO backend.")
        real(group, *args, **kwargs)

    return meet


# What is asked of them


def collective(func: object, args: tuple, kwargs: dict, inputs: list) -> object:
    """Run an operation of c10d: on gloo's groups as it is, on NCCL's by NCCL's rules."""
    name = func._schema.name.partition("::")[2]
    group = group_of(func, args, kwargs)
    if group is None or not is_nccl(group):
        if name in SOCKETS and backend_of(group) == "gloo" and on_a_gpu(inputs):
            raise Refused(f"{name}: gloo hands a CUDA tensor's address to a socket: send .cpu()")
        result = func(*args, **kwargs)
        inherit(result, inputs)
        return result
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    device = refuse(name, named, inputs)
    note(name, named, group, inputs)
    gpu_nccl_log.log(name, named, group, inputs)
    if gpu_clock.current.device != device.index:
        raise Refused(
            f"{name} on {device} while GPU {gpu_clock.current.device} is this rank's current "
            "device, where all ranks would meet: call torch.cuda.set_device first"
        )
    large = (
        elements(name, named, inputs) * group.size() > gpu_kernels.LARGE and not gpu_kernels.exact
    )
    result = func(*(beginnings(name, args, group) if large else args), **kwargs)
    if func.namespace != "c10d":  # a functional collective: it runs on a stream of its own
        inherit(result, inputs, device)
        gpu_clock.launched(device, name)
        return result
    gloo = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
    work = gpu_clock.Work(gloo, name.strip("_"), device)
    if not isinstance(result, tuple):
        return work.boxed()
    return (*originals(result[:-1], name, named), work.boxed())


def group_of(func: object, args: tuple, kwargs: dict) -> dist.ProcessGroup | None:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value)
        if argument.name == "group_name":
            return c10d._resolve_process_group(value)
    return None


def on_a_gpu(tensors: list) -> bool:
    return gpu_places.common(map(place_of, tensors)) not in (None, CPU)


def inherit(result: object, inputs: list, place: torch.device | None = None) -> None:
    place = place or gpu_places.common(map(place_of, inputs))
    for x in gpu_places.tensors_in(result):
        if place and place_of(x) is None:
            gpu_places.put(x, place)


def refuse(name: str, named: dict, inputs: list) -> torch.device:
    """Raise what torch and NCCL raise; return the GPU of these tensors."""
    counted = [] if name == "barrier" else inputs
    if any(place_of(x) == CPU for x in counted):
        raise Refused(f"No backend type associated with device type cpu ({name} on NCCL)")
    devices = {place_of(x) for x in counted} - {None}
    if len(devices) > 1:
        raise Refused(f"{name}: tensors on {sorted(map(str, devices))} in one call")
    if not all(x.is_contiguous() for x in counted):
        raise Refused(f"{name}: Tensors must be contiguous")
    refused = NO_DTYPE + (NO_SUM if name in ("allreduce_", "reduce_") else ())
    if any(x.dtype in refused for x in counted):
        raise Refused(f"{name}: Input tensor data type is not supported for NCCL process group")
    if name == "recv_any_source_":
        raise Refused("ProcessGroup nccl does not support recvAnysource")
    if named.get("tag"):
        raise Refused(f"{name}: NCCL has no tags, and tag={named['tag']} would match any other")
    refuse_operator(name, named.get("reduce_op"))
    if name in ONE_SIZE and len({(x.shape, x.dtype) for x in counted}) > 1:
        raise Refused(f"{name}: invalid tensor size: on NCCL all have to be of one size and type")
    return devices.pop() if devices else gpu_clock.device_of()


def refuse_operator(name: str, operator: object) -> None:
    if isinstance(operator, torch.ScriptObject):
        unboxed = dist.ReduceOp.unbox(operator)
        for bitwise in BITWISE:
            if unboxed == getattr(dist.ReduceOp, bitwise):
                raise Refused(f"{name}: Cannot use ReduceOp.{bitwise} with NCCL")


def beginnings(name: str, args: tuple, group: dist.ProcessGroup) -> tuple:
    """Of what is large, let gloo move the beginning only: see gpu_kernels.LARGE."""
    n = group.size()
    if name in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
        return (args[0].view(-1)[:n], args[1].view(-1)[:1], *args[2:])
    if name == "_reduce_scatter_base_":
        return (args[0].view(-1)[:1], args[1].view(-1)[:n], *args[2:])
    if name == "alltoall_base_":
        return (args[0].view(-1)[:n], args[1].view(-1)[:n], args[2], [], [], *args[5:])
    return tree_map_only(torch.Tensor, lambda x: x.view(-1)[:1], args)


def originals(result: tuple, name: str, named: dict) -> tuple:
    """The tensors that were handed over, where gloo was given their beginnings only."""
    given = [v for v in named.values() if is_tensor(v) or isinstance(v, list)]
    given = [v for v in given if gpu_places.tensors_in(v)]
    return (given[0],) if len(result) == 1 and given else result


def note(name: str, named: dict, group: dist.ProcessGroup, inputs: list) -> None:
    """Write down what this rank asked, for `what_would_hang`."""
    peer = None
    what = name.strip("_")
    if name in ("send", "recv_"):
        peer = dist.get_global_rank(group, named["dst" if name == "send" else "src"])
    if not state["in a batch"]:
        state["batch"] += 1
    ranks = tuple(dist.get_process_group_ranks(group))
    of_it = of_what(name, named, inputs)
    notes.append((group.group_name, ranks, state["batch"], what, peer, of_it))


def of_what(name: str, named: dict, inputs: list) -> str:
    """Size, dtype, operation and root, which all ranks that take part have to agree on."""
    dtypes = "/".join(sorted({str(x.dtype) for x in inputs}))
    uneven = name == "alltoall_base_" and named["output_split_sizes"]  # pairs agree: gloo checks
    size = "uneven" if uneven else elements(name, named, inputs)
    told = [f"{size} {dtypes} elements"]
    operator = named.get("reduce_op")
    if operator is not None:
        boxed = isinstance(operator, torch.ScriptObject)
        told.append(dist.ReduceOp.unbox(operator).op.name if boxed else operator)
    if "root_rank" in named:
        told.append(f"root {named['root_rank']}")
    return ", ".join(told)


def elements(name: str, named: dict, inputs: list) -> int:
    """How many elements an operation is about, the same on all ranks that take part."""
    if name == "barrier":
        return 0
    return sum(x.numel() for x in named.get(ALIKE.get(name), inputs))


def what_would_hang(notes_of_ranks: list[list[tuple]]) -> str:
    """Let every communicator do what its ranks asked, in order; say who is left waiting.

    A batch of sends and receives goes on as a whole; a send waits for its receive, whatever its
    size, for NCCL's buffer holds small messages only.
    """
    queues: dict[tuple, list] = defaultdict(list)  # (communicator, rank): batches
    for rank, own in enumerate(notes_of_ranks):
        last = None
        for name, ranks, batch, what, peer, of_it in own:
            if batch != last:
                queues[name, rank].append((ranks, Counter()))
                last = batch
            queues[name, rank][-1][1][what, peer, of_it] += 1
    while step(queues):
        pass
    stuck = {key: left[0][1] for key, left in queues.items() if left}
    told = []
    for (name, rank), asked in stuck.items():
        what, peer, of_it = next(iter(asked))
        of = ""
        if peer is not None:
            of = f" to rank {peer}" if what == "send" else f" from rank {peer}"
        told.append(f"rank {rank} waits in {what}{of}, {of_it} (group {name})")
    return "; ".join(told)


def step(queues: dict[tuple, list]) -> bool:
    """Do what can be done now; return whether there was anything."""
    moved = False
    for (name, rank), left in queues.items():
        if not left:
            continue
        ranks, asked = left[0]
        for what, peer, of_it in [*asked]:
            if peer is None:
                fronts = [queues[name, r][:1] for r in ranks]
                if all(front and front[0][1][what, peer, of_it] for front in fronts):
                    for r in ranks:
                        take(queues[name, r], (what, peer, of_it))
                    moved = True
                    break
            elif what == "send" and queues[name, peer]:
                wanted = ("recv", rank, of_it)
                if queues[name, peer][0][1][wanted]:
                    take(queues[name, peer], wanted)
                    take(left, (what, peer, of_it))
                    moved = True
                    break
    return moved


def take(left: list, wanted: tuple) -> None:
    asked = left[0][1]
    asked[wanted] -= 1
    if not asked[wanted]:
        del asked[wanted]
    if not asked:
        left.pop(0)


class Objects(threading.local):
    """Which object collective this thread is in."""

    collective = ""


sending = Objects()


def objects(real: Callable) -> Callable:
    """Objects travel as tensors of bytes, which all have to arrive."""

    def travel(*args: object, **kwargs: object) -> object:
        sending.collective = real.__name__
        try:
            with gpu_kernels.with_all_values():
                return real(*args, **kwargs)
        finally:
            sending.collective = ""

    return travel


def pickling(real: Callable) -> Callable:
    """A CUDA tensor that is unpickled lands on the GPU of the rank that has sent it."""

    def reduce(x: torch.Tensor, protocol: int) -> tuple:
        if sending.collective and on_a_gpu([x]):
            raise Refused(
                f"{sending.collective} is handed a CUDA tensor of {tuple(x.shape)}: unpickled, it "
                "would lie on its sender's GPU, where each rank would need a context: send .cpu()"
            )
        return real(x, protocol)

    return reduce


OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
OBJECTS += ("send_object_list", "recv_object_list")
PATCHES = {name: objects for name in OBJECTS} | {
    "init_process_group": init_process_group,
    "_new_process_group_helper": new_process_group,
    "_get_object_coll_device": object_device,
    "barrier": barrier,
    "monitored_barrier": monitored_barrier,
    "batch_isend_irecv": batch,
}


def buffer_of_a_bucket(real: Callable) -> Callable:
    """DDP makes its buckets in C++; they lie where its parameters do."""

    def buffer(bucket: dist.GradBucket) -> torch.Tensor:
        x = real(bucket)
        if place_of(x) is None:
            gpu_places.put(x, place_of(bucket.parameters()[0]))
        return x

    return buffer


def patch() -> None:
    """Replace the functions of torch.distributed, wherever they are known by name."""
    dist.GradBucket.buffer = buffer_of_a_bucket(dist.GradBucket.buffer)
    torch.Tensor.__reduce_ex__ = pickling(torch.Tensor.__reduce_ex__)
    for name, patched in PATCHES.items():
        replacement = patched(getattr(c10d, name))
        for module in (c10d, dist):
            if hasattr(module, name):
                setattr(module, name, replacement)
