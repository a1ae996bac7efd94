"""Where tensors lie on the pretended GPUs: in CPU memory all of them, with a place noted for each.

The place is kept by the storage: cuda with an index, cpu, or unknown, for what C++ made where no
mode looks. `Requests` hears what Python asks for: `device=`, `.to`, `.device`.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.overrides import TorchFunctionMode

from tests.helpers import gpu_clock

CPU = torch.device("cpu")
Place = torch.device | None
OWN = (torch.Tensor, torch.nn.Parameter)  # classes whose tensors hold no other
NAMES_OF_DEVICES = (int, str, torch.device)
SEQUENCES = (list, tuple)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor, or of what a subclass (DTensor) holds for this rank."""
    if type(tensor) not in OWN:
        for name in ("_local_tensor", "elem"):
            tensor = tensor.__dict__.get(name, tensor)
    try:
        return torch.Tensor.untyped_storage(tensor)
    except (RuntimeError, NotImplementedError):  # none: a meta or sparse tensor
        return None


def place_of(tensor: torch.Tensor) -> Place:
    """Where the tensor lies, or None for what was made where no mode looks."""
    return getattr(storage_of(tensor), "_place", None)


def put(tensor: torch.Tensor, place: Place) -> None:
    """Note where a tensor lies, and how much of the GPU's memory it takes."""
    storage = storage_of(tensor)
    if storage is None or storage.device.type != "cpu":
        return
    memory.forget(storage)
    storage._place = place
    if place and place.type == "cuda":
        memory.hold(storage, place.index)


class Memory:
    """Bytes allocated on each GPU, now and at most; in blocks of 512, as CUDA's allocator has."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.peak: dict[int, int] = {}
        self.held: dict[int, tuple] = {}  # by the storage's address: (weak reference, index, bytes)

    def hold(self, storage: torch.UntypedStorage, index: int) -> None:
        block = -(-storage.nbytes() // 512) * 512
        key = storage._cdata
        alive = weakref.ref(storage, partial(self.freed, key))
        self.held[key] = (alive, index, block)
        self.now[index] = self.now.get(index, 0) + block
        self.peak[index] = max(self.peak.get(index, 0), self.now[index])
        gpu_clock.used.add(index)

    def forget(self, storage: torch.UntypedStorage) -> None:
        self.freed(storage._cdata)

    def freed(self, key: int, gone: object = None) -> None:
        held = self.held.get(key)
        if held and gone in (None, held[0]):
            _, index, block = self.held.pop(key)
            self.now[index] -= block


memory = Memory()


def place_asked(device: object) -> Place:
    """The place that an argument names, or None if it names none."""
    if isinstance(device, bool) or not isinstance(device, NAMES_OF_DEVICES):
        return None
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type == "meta":
            return None
    return CPU if getattr(device, "type", "cuda") == "cpu" else gpu_clock.device_of(device)


class Move(torch.autograd.Function):
    """Copy a tensor to another place, and its gradient back."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, place: torch.device) -> torch.Tensor:
        ctx.place = place_of(x)
        y = x.clone()
        put(y, place)
        return y

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Move.apply(grad, ctx.place), None


def moved(x: torch.Tensor, place: torch.device, non_blocking: bool = False) -> torch.Tensor:
    """`x.to(place)`: itself if it lies there, else a copy, for which the host waits."""
    here = place_of(x)
    if here == place:
        return x
    y = Move.apply(x, place)
    gpus = [p for p in (here, place) if p and p.type == "cuda"]
    for gpu in gpus:
        if non_blocking or len(gpus) == 2:
            gpu_clock.launched(gpu, "a copy")
        else:
            gpu_clock.waited(gpu)
    return y


# What Python asks for


class AnyGenerator(type(torch._C.Generator)):
    """`torch.default_generator` was made before there was the class below, and is one, too."""

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=AnyGenerator):
    """A generator that was made for a device, and draws on the CPU."""

    def __new__(cls, device: object = "cpu") -> "Generator":
        made = super().__new__(cls)
        made.place = place_asked(device)
        return made

    @property
    def device(self) -> Place:
        return self.place


def refuse_generator(generator: torch._C.Generator, place: Place, inputs: list) -> None:
    """Raise as CUDA does if numbers for one kind of device are drawn by a generator of another."""
    place = place or (common(map(place_of, inputs)) if inputs else CPU)
    if place and place.type != generator.device.type:
        raise RuntimeError(
            f"Expected a '{place.type}' device type for generator but found "
            f"'{generator.device.type}'"
        )


def device_is(x: torch.Tensor) -> torch.device:
    return place_of(x) or torch.Tensor.device.__get__(x)


def to(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """`x.to(device, dtype, ...)`, `x.to(dtype, ...)` or `x.to(other, ...)`."""
    names = ["device", "dtype", "non_blocking", "copy"]
    if args and isinstance(args[0], torch.dtype):
        names.remove("device")
    if args and is_tensor(args[0]):
        names = ["other", "non_blocking", "copy"]
    kwargs |= dict(zip(names, args, strict=False))
    if (other := kwargs.pop("other", None)) is not None:
        kwargs |= {"device": place_of(other), "dtype": other.dtype}
    device = kwargs.pop("device", None)
    if str(device) == "meta":
        return torch.Tensor.to(x, device, **kwargs)
    place = place_asked(device)
    if place and place != place_of(x):
        kwargs.pop("copy", None)  # this is one
        x = moved(x, place, bool(kwargs.get("non_blocking")))
    return torch.Tensor.to(x, **kwargs) if kwargs.keys() - {"non_blocking"} else x


def cpu(x: torch.Tensor, **kwargs: object) -> torch.Tensor:
    return moved(x, CPU)


def cuda(x: torch.Tensor, device: object = None, non_blocking: bool = False) -> torch.Tensor:
    return moved(x, gpu_clock.device_of(device), non_blocking)


def pin_memory(x: torch.Tensor, *device: object) -> torch.Tensor:
    if is_cuda(x):
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )
    y = x.clone()
    storage_of(y)._pinned = True
    return y


def is_cuda(x: torch.Tensor) -> bool:
    return device_is(x).type == "cuda"


def numpy(x: torch.Tensor, *args: object, **kwargs: object) -> object:
    if is_cuda(x):
        raise TypeError(
            f"can't convert {place_of(x)} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )
    return torch.Tensor.numpy(x, *args, **kwargs)


def tolist(x: torch.Tensor) -> list:
    return torch.Tensor.tolist(moved(x, CPU))


def shown(x: torch.Tensor, **kwargs: object) -> str:
    return torch.Tensor.__repr__(moved(x, CPU), **kwargs)


ANSWERS: dict[object, Callable] = {
    torch.Tensor.__repr__: shown,
    torch.Tensor.device.__get__: device_is,
    torch.Tensor.is_cuda.__get__: is_cuda,
    torch.Tensor.is_cpu.__get__: lambda x: device_is(x).type == "cpu",
    torch.Tensor.get_device: lambda x: -1 if not is_cuda(x) else device_is(x).index,
    torch.Tensor.is_pinned: lambda x, *_: getattr(storage_of(x), "_pinned", False),
    torch.Tensor.to: to,
    torch.Tensor.cpu: cpu,
    torch.Tensor.cuda: cuda,
    torch.Tensor.pin_memory: pin_memory,
    torch.Tensor.numpy: numpy,
    torch.Tensor.tolist: tolist,
    torch.Tensor.record_stream: lambda x, stream: None,
}


requested: list[Place] = [None]  # for the factory that runs now


class Requests(TorchFunctionMode):
    """What Python asks for: devices in arguments, `.to`, `.cuda`, `.cpu`, `.device`, `.is_cuda`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if (answer := ANSWERS.get(func)) and plain(args[0]):
            return answer(*args, **kwargs)
        if getattr(func, "__name__", "") == "__array__" and is_cuda(args[0]):
            return numpy(args[0])
        place = place_asked(kwargs.get("device"))
        if isinstance(func, torch._ops.OpOverload) and place in (None, CPU):
            return func(*args, **kwargs)  # a lesson's own mode hands it on
        if (generator := kwargs.get("generator")) is not None:
            refuse_generator(generator, place, tensors_in(args, kwargs))
        if place:
            kwargs["device"] = CPU
        pinned = kwargs.pop("pin_memory", False)
        requested.append(place)
        try:
            result = func(*args, **kwargs)
        finally:
            requested.pop()
        if place and place.type == "cuda" and "empty" not in getattr(func, "__name__", ""):
            gpu_clock.launched(place, f"{func.__name__}")
        outputs = tensors_in(result)
        said = kwargs.get("device") == CPU
        if not said:
            outputs = [x for x in outputs if pinned or place_of(x) is None]
        if outputs and not place:  # seldom: below Python, places have been handed on
            inputs = tensors_in(args, kwargs)
            place = common(map(place_of, inputs)) if inputs else CPU
        for x in outputs:
            if place and (said or place_of(x) is None) and place_of(x) != place:
                put(x, place)
            if pinned:
                storage_of(x)._pinned = True
        return result


def tensors_in(*trees: object) -> list[torch.Tensor]:
    """The tensors among the arguments, and in their lists, tuples and dicts, in order."""
    found = []
    add_tensors(trees, found)
    return found


def add_tensors(trees: Iterable, found: list[torch.Tensor]) -> None:
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, SEQUENCES):
            add_tensors(tree, found)
        elif isinstance(tree, dict):
            add_tensors(tree.values(), found)


def is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def plain(x: object) -> bool:
    """Whether a place tells where the tensor is: not on meta, not a fake one."""
    storage = storage_of(x) if is_tensor(x) else None
    return storage is not None and storage.device.type == "cpu"


def common(places: Iterable[Place]) -> Place:
    """The GPU that is among the places, or else cpu if all of them are known."""
    found = set(places)
    for place in found:
        if place and place.type == "cuda":
            return place
    return CPU if found == {CPU} else None


def patch_backward() -> None:
    """Hear what Python asks for inside a backward pass, too: `Tensor.backward` leaves the mode."""
    run = torch.autograd._engine_run_backward

    def engine_run_backward(*args: object, **kwargs: object) -> object:
        with Requests():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = engine_run_backward


def patch_storage() -> None:
    """Storages that grow and shrink (as FSDP's do) take and give back the GPU's memory."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        place = getattr(storage, "_place", None)
        if place and place.type == "cuda":
            memory.forget(storage)
            memory.hold(storage, place.index)
        return storage

    torch.UntypedStorage.resize_ = resize_
    for name in ("from_numpy", "frombuffer"):
        setattr(torch, name, on_the_cpu(getattr(torch, name)))


def on_the_cpu(make: Callable) -> Callable:
    def made(*args: object, **kwargs: object) -> torch.Tensor:
        x = make(*args, **kwargs)
        put(x, CPU)
        return x

    return made
