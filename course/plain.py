"""Values as plain data: what may leave a rank on which someone else's code has run.

    flat = flatten({"loss": torch.ones(3)}, ["grader"])  # on the rank: built-in types alone
    value = rebuild(flat, ["grader"])                    # in the grader: an equal value

A pickle may name any function of any module, and loading it calls them. So a rank's word is
pickled from None, numbers, strings, bytes, lists and dicts, which need no name at all, and
`read` refuses every name. Tensors travel as their bytes; all else is turned away by its type.
"""

import io
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

ATOMS = (type(None), bool, int, float, str, bytes)
DICTS = (dict, OrderedDict, Counter, defaultdict)
SERIES = {kind.__name__: kind for kind in (tuple, set, frozenset, torch.Size)}


class NotPlain(ValueError):
    """A value of a type that cannot leave the rank; says which."""


def flatten(value: object, modules: Collection[str] = ()) -> object:
    """Return `value` in ATOMS, lists and dicts of them, the rest as {"is": kind, ...}.

    Views of a tensor become tensors of their own, a Parameter a tensor, every dict a plain one.
    A SimpleNamespace passes, and a dataclass that one of `modules` defines. Raises NotPlain for
    any other type, and for what holds itself.
    """
    try:
        return _flat(value, modules)
    except RecursionError:
        raise NotPlain("returned a value that holds itself, or is nested too deeply") from None


def _flat(value: object, modules: Collection[str]) -> object:
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is list:
        return [_flat(item, modules) for item in value]
    if kind in SERIES.values():
        return {"is": kind.__name__, "of": [_flat(item, modules) for item in value]}
    if kind in DICTS:
        pairs = [[_flat(k, modules), _flat(v, modules)] for k, v in value.items()]
        return {"is": "dict", "of": pairs}
    if kind is SimpleNamespace:
        return {"is": "namespace", "of": _flat(vars(value), modules)}
    if is_dataclass(kind) and kind.__module__ in modules:
        found = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        flat = {"is": "object", "module": kind.__module__, "class": kind.__name__}
        return flat | {"of": _flat(found, modules)}
    return _flat_leaf(value)


def _flat_leaf(value: object) -> dict:
    """What holds no other values."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter, AsyncCollectiveTensor):
        return _flat_tensor(value)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        described = np.lib.format.dtype_to_descr(value.dtype)
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        flat = {"is": "array", "dtype": _flat(described, ()), "shape": shape}
        return flat | {"of": value.tobytes()}
    if kind is complex:
        return {"is": "complex", "of": [value.real, value.imag]}
    if kind in (torch.dtype, torch.device):
        return {"is": kind.__name__, "of": str(value).removeprefix("torch.")}
    raise NotPlain(
        f"returned a value of type {kind.__name__}, which cannot leave the rank; "
        "return tensors, numbers, strings, or lists, tuples, dicts and sets of these"
    )


def _flat_tensor(tensor: torch.Tensor) -> dict:
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        told = f"{tensor.layout} on {tensor.device}".removeprefix("torch.")
        raise NotPlain(f"returned a tensor ({told}) that cannot leave the rank; return a dense one")
    with torch.no_grad():
        one = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = one.view(torch.uint8).numpy().tobytes()
    return {
        "is": "tensor",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "requires_grad": tensor.requires_grad,
        "of": data,
    }


def rebuild(flat: object, modules: Collection[str] = ()) -> object:
    """The value that `flatten` was given. What it never makes raises some error or other."""
    if type(flat) in ATOMS:
        return flat
    if type(flat) is list:
        return [rebuild(item, modules) for item in flat]
    if flat["is"] in SERIES:
        return SERIES[flat["is"]]([rebuild(item, modules) for item in flat["of"]])
    if flat["is"] == "dict":
        return {rebuild(k, modules): rebuild(v, modules) for k, v in flat["of"]}
    if flat["is"] in ("namespace", "object"):
        kind = SimpleNamespace if flat["is"] == "namespace" else _class(flat, modules)
        return kind(**rebuild(flat["of"], modules))
    return LEAVES[flat["is"]](flat)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(name)
    return found


def _tensor(flat: dict) -> torch.Tensor:
    dtype = _dtype(flat["dtype"])
    if flat["of"]:
        tensor = torch.frombuffer(bytearray(flat["of"]), dtype=dtype).reshape(flat["shape"])
    else:  # frombuffer refuses no bytes
        tensor = torch.empty(flat["shape"], dtype=dtype)
    return tensor.requires_grad_(flat["requires_grad"])


def _array(flat: dict) -> np.ndarray | np.generic:
    dtype = np.lib.format.descr_to_dtype(rebuild(flat["dtype"]))
    array = np.frombuffer(bytearray(flat["of"]), dtype)
    return array[0] if flat["shape"] is None else array.reshape(flat["shape"])


LEAVES = {
    "tensor": _tensor,
    "array": _array,
    "complex": lambda flat: complex(*flat["of"]),
    "dtype": lambda flat: _dtype(flat["of"]),
    "device": lambda flat: torch.device(flat["of"]),
}


def _class(flat: dict, modules: Collection[str]) -> type:
    """One of the grader's own dataclasses; no other class can be named."""
    if flat["module"] not in modules:
        raise TypeError(flat["module"])
    kind = vars(sys.modules[flat["module"]])[flat["class"]]
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(flat["class"])
    return kind


class _Nameless(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> None:
        raise pickle.UnpicklingError(f"names {module}.{name}")


def read(word: bytes) -> object:
    """Unpickle what holds built-in types alone. Raises an error if it names anything."""
    return _Nameless(io.BytesIO(word)).load()
