"""What runs on the pretended GPUs: `Kernels` sees every operation below Python.

It refuses what a GPU would refuse, hands places on to results, and notes what there is to wait for.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.helpers import gpu_clock
from tests.helpers.gpu_places import (
    CPU,
    Place,
    common,
    is_tensor,
    place_of,
    plain,
    put,
    requested,
    tensors_in,
)

LARGE = 2**22  # elements of all operands; or, of a matrix product, 64 times as many FLOPs
exact = 0  # how many want all values just now

MAY_MIX = {"copy_", "_to_copy", "record_stream", "_foreach_copy_", "_foreach_norm", "set_"}
MAY_MIX |= {"index_fill_"}  # what x[i] = 1.0 becomes on CPUs
INDEX = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}
HOST_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}
HOST_WAITS |= {"unique_dim", "unique_consecutive"}
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
NO_KERNEL |= {"set_", "detach", "detach_", "alias", "lift_fresh", "is_same_size", "record_stream"}
NO_KERNEL |= {"_reshape_alias", "_unsafe_view", "squeeze_", "unsqueeze_", "t_", "transpose_"}


class Kernels(TorchDispatchMode):
    """What runs: hand places on to new storages, refuse what a GPU would refuse."""

    def __init__(self, collective: Callable) -> None:
        super().__init__()
        self.collective = collective

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here: no wrapper around what runs at every operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(handles_itself(kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunction():
            inputs = tensors_in(args, kwargs)
            if inputs and not any(map(plain, inputs)):
                return func(*args, **kwargs)
            if func.namespace in ("c10d", "_c10d_functional"):
                return self.collective(func, args, kwargs, inputs)
            name = name_of(func)
            device = kwargs.get("device")
            if device is not None and device.type == "cuda":
                return self.sent_to(gpu_clock.device_of(device), func, args, kwargs)
            places = refuse_mixtures(func, name, args, inputs)
        place = common(places)
        if not inputs and requested[-1] not in (None, CPU):
            with torch._C.DisableTorchFunction():
                return made(func, name, args, kwargs)
        on_gpu = place is not None and place.type == "cuda"
        large = on_gpu and name not in NO_KERNEL and not func.is_view and is_large(name, inputs)
        result = without_a_kernel(func, args, kwargs) if large else func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if place and name not in MAY_MIX:
                for x in tensors_in(result):
                    if place_of(x) is None:
                        put(x, place)
            if name == "_to_copy" and place:
                put(result, place)
            if on_gpu:
                self.on_the_gpu(func, name, args, kwargs, place, inputs)
        return result

    def sent_to(self, place: torch.device, func: object, args: tuple, kwargs: dict) -> object:
        """Libraries' Python, below what `Requests` hears, asks for a GPU."""
        result = func(*args, **kwargs | {"device": CPU})
        if is_tensor(result):
            gpu_clock.launched(place, func._schema.name)
            put(result, place)
        return result

    def on_the_gpu(
        self, func: object, name: str, args: tuple, kwargs: dict, place: torch.device, inputs: list
    ) -> None:
        """Note what this leaves to do, or that the host has waited for all of it."""
        masks = name in INDEX and any(x.dtype is torch.bool for x in inputs[1:])
        if name in HOST_WAITS or masks:
            gpu_clock.waited(place)
        elif name == "copy_" and len({place_of(x) for x in inputs} - {None}) == 2:
            both = [place_of(x) for x in inputs]
            blocking = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            (gpu_clock.waited if blocking and CPU in both else busy)(place)
        elif not (name in NO_KERNEL or func.is_view):
            gpu_clock.launched(place, name)


@functools.cache
def name_of(func: object) -> str:
    return func._schema.name.partition("::")[2]


def busy(place: torch.device) -> None:
    gpu_clock.launched(place, "a copy")


def handles_itself(kind: type) -> bool:
    """Whether a tensor's class is made of tensors that come by themselves (DTensor)."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and kind is not FakeTensor


def refuse_mixtures(func: object, name: str, args: tuple, inputs: list) -> list[Place]:
    """Return the places of the inputs; raise as CUDA does if they cannot meet in one kernel."""
    places = [place_of(x) for x in inputs]
    known = {p for p in places if p}
    if len(known) < 2 or name in MAY_MIX:
        return places
    if name in INDEX:
        refuse_index(args, inputs, places)
    elif name.startswith("_foreach_"):
        lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and is_tensor(arg[0])]
        for together in zip(*lists, strict=False):
            refuse(func, list(together))
    else:
        refuse(func, inputs)
    return places


def refuse(func: object, tensors: list[torch.Tensor]) -> None:
    """CPU scalars may take part; all other tensors must be on one device."""
    counted = {place_of(x) for x in tensors if x.dim() > 0 or place_of(x) != CPU} - {None}
    if len(counted) > 1:
        a, b = sorted(map(str, counted), reverse=True)[:2]
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{a} and {b}! (when running {func})"
        )


def refuse_index(args: tuple, inputs: list, places: list[Place]) -> None:
    """Indices may lie on the CPU, or where the indexed tensor does; values must lie with it."""
    here = places[0]
    for index in args[1]:
        if is_tensor(index) and place_of(index) not in (here, CPU, None):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({here})"
            )
    if len(args) > 2 and is_tensor(args[2]):
        refuse("index_put", [args[0], args[2]])


def is_large(name: str, inputs: list[torch.Tensor]) -> bool:
    """Whether a kernel would take this machine long."""
    if exact:
        return False
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        a, b = inputs[-2:]
        return a.numel() * b.shape[-1] > 32 * LARGE
    return sum(x.numel() for x in inputs) > LARGE


def without_a_kernel(func: object, args: tuple, kwargs: dict) -> object:
    """What the operation returns, of the right shape and dtype, but with no value computed."""
    returns = func._schema.returns
    written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    if written:
        by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        results = tuple(by_name.get(a.name) for a in written)[: len(returns)]
        return results[0] if len(results) == 1 else (results or None)
    with torch._C.DisableTorchFunction():
        meta = tree_map_only(torch.Tensor, lambda x: shaped(x, "meta"), (args, kwargs))
        if "device" in kwargs:
            meta[1]["device"] = "meta"
        results = func(*meta[0], **meta[1])
        return tree_map_only(torch.Tensor, lambda x: shaped(x, "cpu"), results)


def made(func: object, name: str, args: tuple, kwargs: dict) -> object:
    """What a factory on a GPU makes: with values, unless there are too many."""
    if name not in NO_KERNEL and name != "scalar_tensor":
        others = {"device": "meta", "pin_memory": None, "generator": None}
        known = {k: others.get(k, v) for k, v in kwargs.items()}
        x = func(*args, **known)
        if is_tensor(x) and x.numel() > LARGE:
            return shaped(x, "cpu")
    return func(*args, **kwargs)


def shaped(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


@contextlib.contextmanager
def with_all_values() -> Iterator[None]:
    """Leave no kernel out meanwhile, however large: objects travel as tensors."""
    global exact
    exact += 1
    try:
        yield
    finally:
        exact -= 1
