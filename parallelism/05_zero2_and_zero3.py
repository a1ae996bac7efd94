"""ZeRO stages 2 and 3 from scratch: sharded gradients, then sharded weights (FSDP)
================================================================================

**Question.** How can n ranks train a model that none of them could hold, and what does it cost?

**Predict**, and write it down before you run. A model of four equal units has P parameters. Four
ranks train it in bfloat16 with Adam, in steps of two micro-batches.

1. How many bytes per parameter does a rank hold when backward has ended: in stage 2 (optimizer and
   gradients sharded) and in stage 3 (weights, too)? Gradients rest in float32 here.
2. How many elements per parameter go through reduce-scatters and through all-gathers on a rank: in
   the first micro-batch of a step, and in the second? Count the whole array, not the shard: what
   goes into a reduce-scatter, what comes out of an all-gather.
3. In stage 3, the weights of how many units are whole at once?
4. In which order does stage 3 gather the units 0, 1, 2, 3 in a micro-batch's forward and backward,
   and how many of these gathers can travel while another unit computes?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_zero2_and_zero3.py  # NCCL on 4 GPUs, else gloo
    python 05_zero2_and_zero3.py                                    # the same, started for you

Not run on several GPUs.

**Try.** In `before_backward` prefetch `self.units.next.get(unit)` instead of
`self.units.previous.get(unit)`: is the training still right? In `land` replace `+=` by `=`: what
fails, and what would not?

**Before.** parallelism/02_fsdp_zero.py: sixteen bytes per parameter, buckets, stage 1.

**Next.** exercises/21_gather_and_free. fsdp/01_fsdp_basics.py uses PyTorch's `fully_shard`;
parallelism/06_tensor_parallel.py splits the multiplications themselves.
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from itertools import chain, compress, zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: n ranks; K elements of a rank's rows of all parameters of a unit, with their padding; B
# samples of D features on a rank, R ranks. P counts the parameters of a model.
Group = dist.ProcessGroup | None  # the ranks that share a model; None: all of them

# %% [markdown]
# ## 1. The gradient of an all-gather is a reduce-scatter
#
# Stage 1 sharded what the optimizer needs. Weights and gradients remain, and both are needed only
# in passing. So divide the model into **units** whose weights come and go together; a transformer's
# blocks are the usual choice. A rank keeps its shard of each unit. Before a unit computes, its
# weights are gathered; afterwards they are freed:
#
#     slot     wait F0   F1   F2   F3  wait B3   B2   B1   B0    F forward, B backward
#     unit 0    <#  ##   .    .    .    .   .    .    <#   ##    ## its weights are whole
#     unit 1    .   <#   ##   .    .    .   .    <#   ##   .     <# they are being gathered
#     unit 2    .   .    <#   ##   .    .   <#   ##   .    .     .  only this rank's shard is there
#     unit 3    .   .    .    <#   ##   <#  ##   .    .    .
#
# While one unit computes, the next one's weights travel (section 5). Only the first gather of each
# direction has nothing to hide behind.
#
# What does autograd see? The shards *are* the parameters, and the all-gather is a function of them.
# Through that function the losses of *all* ranks depend on my shard, so its gradient is a sum over
# ranks: the backward of an all-gather is a reduce-scatter.


# %%
class Gather(torch.autograd.Function):
    """Whole weights out of shards. Backward hands the whole gradients to `reduce`."""

    @staticmethod
    def forward(ctx, shards: "Shards", reduce: Callable, *parameters: torch.Tensor) -> tuple:
        ctx.shards = shards
        ctx.reduce = reduce
        ctx.trained = [parameter.requires_grad for parameter in parameters]
        ctx.set_materialize_grads(False)  # None for a parameter that went unused
        wholes = shards.whole_parameters()
        ctx.mark_non_differentiable(*compress(wholes, [not trained for trained in ctx.trained]))
        return wholes

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None) -> tuple:
        pairs = zip(ctx.shards.rows, gradients, strict=True)
        ctx.reduce(ctx.shards, dict(compress(pairs, ctx.trained)))
        return None, None, *[None] * len(gradients)  # the sums will arrive in parameter.grad


# %% [markdown]
# ## 2. Each rank keeps some rows of every parameter
#
# As in FSDP2, rank r keeps the r-th of n chunks of each parameter's rows. The parameter itself
# *becomes* that chunk: only `parameter.data` is replaced, so its name, its place in the module and
# its `grad` are what they were, and any optimizer can hold it. Where the rows do not divide by n,
# the last ranks have fewer rows or none, and pad them when they send.


# %%
class Rows(NamedTuple):
    """How the rows of one parameter are dealt out: `parts` chunks, `mine` of this rank."""

    shape: torch.Size  # of the whole parameter
    parts: int
    mine: int

    def per_part(self) -> int:
        """Return the elements of a chunk, with its padding."""
        if self.parts == 1:
            return self.shape.numel()
        return math.ceil(self.shape[0] / self.parts) * self.shape[1:].numel()

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a whole tensor."""
        if self.parts == 1:
            return whole
        rows = math.ceil(self.shape[0] / self.parts)
        return whole[self.mine * rows : (self.mine + 1) * rows]

    def padded(self, rows: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """Return one chunk, or with `parts` all of them, flat and padded: (parts, per_part())."""
        flat = rows.to_dense().flatten()
        return F.pad(flat, (0, parts * self.per_part() - len(flat))).view(parts, -1)

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """Return all chunks in the parameter's shape, without the padding."""
        return flat[: self.shape.numel()].view(self.shape)


# %% [markdown]
# ## 3. Whole tensors that can lose their storage
#
# The rows of all parameters of a unit travel in one all-gather; its result has a line per rank and
# some columns per parameter:
#
#                 weight               bias
#     rank 0    [ rows 0 and 1       | element 0 ]
#     rank 1    [ rows 2 and 3       | element 1 ]          5 rows and 2 elements on 3 ranks
#     rank 2    [ row 4 and padding  | padding   ]
#
# Each column is copied into a whole tensor, which can be emptied again: `resize_(0)` gives the
# memory of its storage back, while the tensor, and all views of it that autograd has saved, live
# on. Gathering into the same storage before backward makes those views right again.
#
# With `compute`, say bfloat16, rows are rounded as they are gathered. What the optimizer updates
# stays float32: the shard is its own *master*.
#
# In stage 2 the whole weights stay, and are gathered anew only when a shard has changed. PyTorch
# counts the changes of each tensor in `_version`. (Some optimizers write to `parameter.data`, which
# is not counted; so a hook on all optimizers counts each of their steps as a change.)


# %%
class Shards:
    """Those parameters of a unit that are whole in one dtype; small ones stay whole everywhere."""

    def __init__(
        self, places: dict[nn.Parameter, list], dtype: torch.dtype, small: bool, fsdp: "MiniFSDP"
    ) -> None:
        self.places = list(places.values())  # of each parameter: where modules look for it
        self.dtype = dtype
        self.small = small
        self.stage = fsdp.stage
        self.group = fsdp.group
        self.parts = 1 if small else dist.get_world_size(fsdp.group)
        self.rows: dict[nn.Parameter, Rows] = {}
        self.wholes: list[torch.Tensor] = []
        for parameter in places:
            mine = 0 if small else dist.get_rank(fsdp.group)
            rows = Rows(parameter.shape, self.parts, mine)
            self.rows[parameter] = rows
            self.wholes.append(parameter.data.new_empty(self.parts * rows.per_part(), dtype=dtype))
            self.wholes[-1].untyped_storage().resize_(0)
            parameter.data = rows.take(parameter.data).clone(memory_format=torch.contiguous_format)
            parameter.grad = None
        self.versions: list[int] = []  # of the shards, when they were gathered
        self.gathered_nK: torch.Tensor | None = None
        self.work: dist.Work | None = None  # the all-gather under way
        self.shown: tuple[torch.Tensor, ...] = ()  # what modules find instead of the shards
        self.users = 0  # backwards of the unit that still need the weights

    def fetch(self) -> None:
        """Start to gather the weights, unless they are here or on their way."""
        if self.gathered_nK is not None or self.versions == self.versions_now():
            return
        pieces = [rows.padded(p.detach()).to(self.dtype) for p, rows in self.rows.items()]
        shard_1K = torch.cat(pieces, dim=1)
        self.gathered_nK = shard_1K
        if not self.small:
            self.gathered_nK = shard_1K.new_empty(self.parts, shard_1K.shape[1])
            into = self.gathered_nK
            self.work = dist.all_gather_into_tensor(into, shard_1K, self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the gather, if one is under way, and make each parameter whole."""
        if self.gathered_nK is None:
            return
        if self.work is not None:
            self.work.wait()
        columns = self.gathered_nK.split([rows.per_part() for rows in self.rows.values()], dim=1)
        for whole, column in zip(self.wholes, columns, strict=True):
            whole.untyped_storage().resize_(whole.nbytes)
            whole.view(column.shape).copy_(column)
        self.versions = self.versions_now()
        self.gathered_nK = None
        self.work = None

    def versions_now(self) -> list[int]:
        return [parameter._version for parameter in self.rows]

    def free(self) -> None:
        """In stage 3 give the memory of the whole weights back."""
        self.wait()
        if self.stage == 3:
            self.versions = []
            for whole in self.wholes:
                whole.untyped_storage().resize_(0)

    def whole_parameters(self) -> tuple[torch.Tensor, ...]:
        """Return each parameter in its whole shape: views of what `wait` fills."""
        wholes = []
        for rows, whole in zip(self.rows.values(), self.wholes, strict=True):
            wholes.append(rows.whole(whole).data)  # .data: autograd sees no change in a refill
        return tuple(wholes)


def count_as_change(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Tell autograd that an optimizer's step has changed our shards."""
    for group in optimizer.param_groups:
        shards = [parameter for parameter in group["params"] if hasattr(parameter, "is_shard")]
        torch.autograd.graph.increment_version(shards)


register_optimizer_step_post_hook(count_as_change)


# %% [markdown]
# ## 4. The reduce-scatter: to whom each row of a gradient goes
#
# The other way round, line r of such a table is sent to rank r, and added up there with line r of
# all others. Three rules make that right on any model:
#
# - **Divide first, then add.** In float16 a sum of n gradients may overflow where their mean does
#   not.
# - **Add the result to the shard's `grad`.** So several micro-batches accumulate, in the shard's
#   own precision. Unlike stage 1, each of them communicates, since no rank has the memory to add up
#   a whole gradient.
# - **A parameter that no rank has used keeps its `grad`**, which may be None: then AdamW does not
#   shrink it. One more column per parameter tells every rank whether anyone has used it.
#
# Small parameters, such as those of a norm, may stay whole on every rank; DeepSpeed calls that a
# persistence threshold. They are a table with one line, and the all-reduce adds it up.


# %%
class Reduction:
    """The gradients of a unit on their way to the ranks that own their rows."""

    @torch.no_grad()
    def __init__(self, shards: Shards, gradients: dict[nn.Parameter, torch.Tensor | None]) -> None:
        self.made_here = [gradient is not None for gradient in gradients.values()]
        self.rows = {parameter: shards.rows[parameter] for parameter in gradients}
        columns = []
        for (parameter, gradient), made in zip(gradients.items(), self.made_here, strict=True):
            rows = shards.rows[parameter]
            if not made:
                gradient = parameter.new_zeros(rows.shape, dtype=shards.dtype)
            column = rows.padded(gradient, shards.parts)
            columns.append(F.pad(column, (0, 1), value=float(made)))
        self.table_nK = torch.cat(columns, dim=1)
        self.table_nK.div_(dist.get_world_size(shards.group))
        self.mean_1K = self.table_nK
        if shards.small:
            self.work = dist.all_reduce(self.table_nK, group=shards.group, async_op=True)
        else:
            self.mean_1K = self.table_nK.new_empty(1, self.table_nK.shape[1])
            self.work = dist.reduce_scatter_tensor(
                self.mean_1K, self.table_nK, group=shards.group, async_op=True
            )

    @torch.no_grad()
    def land(self) -> None:
        """Wait, and add the means to the gradients of this rank's rows."""
        self.work.wait()
        columns = self.mean_1K[0].split([rows.per_part() + 1 for rows in self.rows.values()])
        for parameter, column, made in zip(self.rows, columns, self.made_here, strict=True):
            mean = column[: parameter.numel()].view_as(parameter).to(parameter.dtype, copy=True)
            if parameter.grad is not None:
                parameter.grad += mean
            elif made or column[-1] > 0:  # only what is unused here makes the host wait for a GPU
                parameter.grad = mean


# %% [markdown]
# ## 5. Hooks around each unit: gather, compute, free, prefetch
#
# Four moments matter, and each has a hook:
#
#     before forward      gather the unit; start to gather the next one
#     after forward       free it
#     before backward     gather it again; start to gather the previous one
#     gradient is there   free it; start the reduce-scatter of its gradient
#
# Modules look their weights up by name. So while a unit computes, these names must lead to the
# whole tensors, and afterwards to the shards again.


# %%
def show(shards: Shards, tensors: Iterable[torch.Tensor]) -> None:
    """Let the modules find these tensors under the parameters' names."""
    for places, tensor in zip(shards.places, tensors, strict=True):
        for place in places:
            place.owner._parameters[place.attribute] = tensor


def cast(inputs: object, dtype: torch.dtype | None) -> object:
    """Give floating tensors the dtype in which the weights compute."""

    def cast_one(leaf: object) -> object:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return tree_map(cast_one, inputs) if dtype else inputs


def inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # private; checkpointing asks it as well


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output: in tuples, lists, dictionaries and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, list | tuple | set):
        for part in output:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(output):
        yield from tensors_in(list(vars(output).values()))


# %% [markdown]
# To **prefetch**, one must know which unit comes next. So in forward it is noted which unit came
# after which; backward visits them the other way round.


# %%
class WholeUnits:
    """Makes units whole and frees them; learns in which order they are needed."""

    def __init__(self, root: nn.Module, shards: dict[nn.Module, list[Shards]]) -> None:
        self.root = root
        self.shards = shards
        self.next: dict = {}  # which unit follows each unit in forward
        self.previous: dict = {}
        self.last: nn.Module | None = None
        self.in_backward: set[nn.Module] = set()

    def note_forward(self, unit: nn.Module) -> None:
        if unit is self.root:
            self.last = None
        self.next[self.last] = unit
        self.previous[unit] = self.last
        self.last = unit

    def use(self, unit: nn.Module, following: nn.Module | None) -> None:
        """Make a unit's weights whole, and start to gather those of the following one."""
        for shards in self.shards[unit]:
            shards.fetch()  # unless it was prefetched
            shards.wait()
        if following in self.shards and following not in self.in_backward:
            for shards in self.shards[following]:
                shards.fetch()

    def free(self, several: Iterable[Shards]) -> None:
        for shards in several:
            shards.free()
            shards.users = 0
            shards.shown = ()
            show(shards, shards.rows)

    def free_all(self) -> None:
        self.free(chain(*self.shards.values()))


# %% [markdown]
# Now the hooks. At most one reduce-scatter is under way, since its input is a whole unit's gradient
# that must stay in memory until it has been sent.
#
# Two cases are less plain. A forward *within* a backward is activation checkpointing, which
# computes a unit once more. A forward *after* a backward that never ended means that an error ended
# it: forget what it began.


# %%
class UnitHooks:
    """Four hooks around each unit."""

    def __init__(self, units: WholeUnits, compute: torch.dtype | None) -> None:
        self.units = units
        self.compute = compute
        self.backward_runs = False
        self.pending: list[Reduction] = []  # the reduce-scatter under way
        for unit in units.shards:
            # before a hook that the unit has already: it, too, must see whole weights
            unit.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            unit.register_forward_hook(self.after_forward, always_call=True)  # after errors, too

    def before_forward(self, unit: nn.Module, args: tuple, kwargs: dict) -> tuple:
        following = None
        if not inside_backward():
            if self.backward_runs:  # an error ended it: what it began is forgotten
                self.pending = []
                self.after_backward()
            self.units.note_forward(unit)
            following = self.units.next.get(unit)
        self.units.use(unit, following)
        for shards in self.units.shards[unit]:
            shards.shown = Gather.apply(shards, self.reduce, *shards.rows)
            show(shards, shards.shown)
        return cast((args, kwargs), self.compute)

    def after_forward(self, unit: nn.Module, args: tuple, output: object) -> None:
        if unit in self.units.in_backward:
            return
        shown = [shards.shown for shards in self.units.shards[unit]]
        self.units.free(self.units.shards[unit])
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if outputs:
            hook = partial(self.before_backward, unit, shown)
            register_multi_grad_hook(outputs, hook, mode="any")
        if unit is self.units.root:
            self.units.free_all()  # what was prefetched, and then was not needed

    def before_backward(self, unit: nn.Module, shown: list, gradient: torch.Tensor) -> None:
        """Backward has reached the unit's output."""
        self.begin_backward()
        self.units.in_backward.add(unit)
        self.units.use(unit, self.units.previous.get(unit))
        for shards, tensors in zip(self.units.shards[unit], shown, strict=True):
            shards.users += 1  # a unit may have been called twice
            show(shards, tensors)  # to checkpointed parts, which compute once more

    def reduce(self, shards: Shards, gradients: dict[nn.Parameter, torch.Tensor | None]) -> None:
        """The unit's gradient is there: send it to the ranks that own its rows."""
        self.begin_backward()
        self.wait_pending()
        shards.users -= 1
        if shards.users <= 0:
            self.units.free([shards])
        self.pending = [Reduction(shards, gradients)]

    def wait_pending(self) -> None:
        for reduction in self.pending:
            reduction.land()
        self.pending = []

    def begin_backward(self) -> None:
        if not self.backward_runs:  # private to PyTorch: the engine calls it when backward is over
            torch.autograd.Variable._execution_engine.queue_callback(self.after_backward)
        self.backward_runs = True

    def after_backward(self) -> None:
        self.wait_pending()
        self.units.free_all()  # what is frozen, or went unused
        self.units.in_backward = set()
        self.backward_runs = False


# %% [markdown]
# ## 6. MiniFSDP: shard a module in place, then train it as ever
#
# What remains is to find out which parameter belongs to which unit: to the innermost unit around
# it. A tied parameter may be used in several units; then it belongs to the **root**, the outermost
# module, which is gathered all the while. Every use is a `Place`.
#
# Then the ranks compare their models. If one rank's layer is wider than another's, the first
# collective would abort or hang, and say nothing useful.


# %%
class Place(NamedTuple):
    """One place where a parameter is used."""

    unit: nn.Module  # the innermost unit around it
    owner: nn.Module  # the module whose attribute it is
    attribute: str


def places_in(
    module: nn.Module, unit: nn.Module, units: list[nn.Module]
) -> Iterator[tuple[nn.Parameter, Place]]:
    """Yield every parameter of a module with every place where it is used."""
    if module in units:
        unit = module
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield parameter, Place(unit, module, name)
    for child in module.children():
        yield from places_in(child, unit, units)


def checked_units(module: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the root and the inner units; raise ValueError for what cannot be one."""
    units = list(dict.fromkeys([module, *units]))
    names = {part: name for name, part in module.named_modules()}
    for unit in units:
        kind = type(unit).__name__
        if unit not in names:
            raise ValueError(f"a unit must be a part of the module: this {kind} is not")
        if type(unit).forward is nn.Module.forward:
            rule = "a unit is gathered when its forward is called"
            raise ValueError(f"{rule}: {names[unit]!r}, a {kind}, has none; name its members")
    if any(hasattr(parameter, "is_shard") for parameter in module.parameters()):
        raise ValueError("the module is sharded already: shard it once, with `units` for its parts")
    return units


def make_equal(tensors: Iterable[torch.Tensor], group: Group) -> None:
    """Copy the tensors of the group's first rank to all: they may have been seeded differently."""
    for tensor in tensors:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, group=group, group_src=0)
        tensor.data.copy_(dense)


def require_one_model(module: nn.Module, units: list[nn.Module], fsdp: "MiniFSDP") -> None:
    """Raise the same ValueError on every rank if one of them has another model or other options."""
    mine: list[tuple] = [(fsdp.stage, fsdp.compute, fsdp.replicate_below)]
    mine += [("unit", name) for name, part in module.named_modules() if part in units]
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    mine += [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in named]
    everyone = [None] * dist.get_world_size(fsdp.group)
    dist.all_gather_object(everyone, mine, fsdp.group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip_longest(everyone[0], theirs)
            first, here = next((a, b) for a, b in pairs if a != b)
            rule = "every rank must shard the same module in the same way"
            raise ValueError(f"{rule}: rank 0 of the group has {first}, rank {rank} {here}")


# %% [markdown]
# The class itself has little to do. Weights and buffers become those of the group's first rank;
# then the parameters of each unit are divided by the dtype in which they compute. Batch norms
# compute in the precision of their running statistics.


# %%
class MiniFSDP:
    """Shards a module in place, in stage 2 or 3. Make the optimizer afterwards, as with FSDP2.

    Each parameter becomes this rank's rows, under its old name; `backward` puts the mean gradient
    of these rows into `grad`. `units` are modules inside, gathered and freed one by one; all ranks
    must call them in one order. With `compute`, weights and floating inputs of units are of that
    dtype while units compute; buffers, frozen weights and what the optimizer sees are not rounded.
    Parameters of fewer elements than `replicate_below`, and scalars, stay whole on every rank. What
    no rank uses keeps the gradient None. `requires_grad_` may be called later, alike on all ranks.

    Raises ValueError, before anything is sharded, for a unit that is no part of the module or has
    no forward, and, the same on every rank of `group`, if models or options differ.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module] = (),
        stage: int = 3,
        compute: torch.dtype | None = None,
        replicate_below: int = 1,
        group: Group = None,
    ) -> None:
        if stage not in (2, 3):
            raise ValueError(f"stage must be 2 or 3, not {stage}")
        self.module = module
        self.stage = stage
        self.compute = compute
        self.replicate_below = replicate_below
        self.group = group
        units = checked_units(module, units)
        require_one_model(module, units, self)
        make_equal(chain(module.parameters(), module.buffers()), group)
        places: dict[nn.Parameter, list[Place]] = {}
        for parameter, place in places_in(module, module, units):
            places.setdefault(parameter, []).append(place)
        shared: dict[tuple, dict] = {}  # what will travel together
        for parameter, used in places.items():
            one_unit = len({place.unit for place in used}) == 1
            unit = used[0].unit if one_unit else module
            small = parameter.dim() == 0 or parameter.numel() < replicate_below
            shared.setdefault((unit, self.dtype_of(parameter, used), small), {})[parameter] = used
        self.shards: dict[nn.Module, list[Shards]] = {unit: [] for unit in units}
        self.shards_of: dict[nn.Parameter, Shards] = {}
        for (unit, dtype, small), members in shared.items():
            self.shards[unit].append(Shards(members, dtype, small, self))
            self.shards_of |= dict.fromkeys(members, self.shards[unit][-1])
        for parameter in self.shards_of:
            parameter.is_shard = True
        UnitHooks(WholeUnits(module, self.shards), compute)

    def dtype_of(self, parameter: nn.Parameter, places: list[Place]) -> torch.dtype:
        """Return the dtype of the whole weight."""
        in_batch_norm = any(isinstance(place.owner, _NormBase) for place in places)
        if self.compute is None or in_batch_norm or not parameter.is_floating_point():
            return parameter.dtype
        return self.compute


# %% [markdown]
# The norm of a gradient is that of all ranks' rows together. (`nn.utils.clip_grad_norm_` would see
# this rank's rows alone, and scale every rank's gradient by another factor.)


# %%
@torch.no_grad()
def clip_grad_norm_(fsdp: MiniFSDP, max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their norm over all ranks is at most this; return the norm."""
    here: list[torch.Tensor] = []  # rows of this rank alone
    everywhere: list[torch.Tensor] = []  # what is the same on every rank
    for parameter, shards in fsdp.shards_of.items():
        if parameter.grad is not None:
            owned = everywhere if shards.small else here
            owned.append(parameter.grad)
    device = next(fsdp.module.parameters()).device
    square = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in here:
        square += torch.linalg.vector_norm(gradient) ** 2
    dist.all_reduce(square, group=fsdp.group)
    for gradient in everywhere:
        square += torch.linalg.vector_norm(gradient) ** 2
    norm = square.sqrt()
    for gradient in here + everywhere:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


# %% [markdown]
# ## 7. Saved whole, loaded by any number of ranks
#
# `module.state_dict()` has this rank's rows. A checkpoint that another number of ranks can load
# needs whole tensors, and the optimizer's state as well: what an elementwise optimizer keeps for a
# parameter has the parameter's shape, so it is sharded just as the parameter is. At thousands of
# ranks nobody can hold all of it; then each writes its own rows (`torch.distributed.checkpoint`).


# %%
@torch.no_grad()
def whole_of(fsdp: MiniFSDP, parameter: nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that is sharded as `parameter` is, onto the CPU of every rank."""
    shards = fsdp.shards_of[parameter]
    if shards.small:
        return rows.detach().cpu().clone()
    layout = shards.rows[parameter]
    rows_1K = layout.padded(rows.detach())
    whole_nK = rows_1K.new_empty(layout.parts, rows_1K.shape[1])
    dist.all_gather_into_tensor(whole_nK, rows_1K, fsdp.group)
    return layout.whole(whole_nK.flatten()).cpu()


def rows_of(fsdp: MiniFSDP, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a whole tensor; raise ValueError if its shape is another."""
    layout = fsdp.shards_of[parameter].rows[parameter]
    if whole.shape != layout.shape:
        raise ValueError(
            f"a parameter is {tuple(layout.shape)}, what is loaded {tuple(whole.shape)}"
        )
    return layout.take(whole)


def full_state_dict(fsdp: MiniFSDP) -> dict[str, torch.Tensor]:
    """Return the bare module's state dict, in the shards' precision, on every rank."""
    parameters = dict(fsdp.module.named_parameters(remove_duplicate=False))
    state = fsdp.module.state_dict()
    for name in state:
        if name in parameters:
            state[name] = whole_of(fsdp, parameters[name], parameters[name])
    return state


def load_full_state_dict(fsdp: MiniFSDP, state: dict[str, torch.Tensor]) -> None:
    """Load a bare module's state dict, from any number of ranks; all ranks give the same."""
    parameters = dict(fsdp.module.named_parameters(remove_duplicate=False))
    mine = dict(state)
    for name in state:
        if name in parameters:
            mine[name] = rows_of(fsdp, parameters[name], state[name])
    fsdp.module.load_state_dict(mine)


# %% [markdown]
# The optimizer's state dict numbers the parameters in the order in which it was given them, which
# is the same on any number of ranks.


# %%
def full_optimizer_state_dict(fsdp: MiniFSDP, optimizer: torch.optim.Optimizer) -> dict:
    """Return the state dict of an elementwise optimizer as if it had had the bare module."""
    parameters = list(chain(*[group["params"] for group in optimizer.param_groups]))
    state = optimizer.state_dict()
    whole = {}
    for index, entries in state["state"].items():
        parameter = parameters[index]
        whole[index] = dict(entries)
        for key, value in entries.items():
            if torch.is_tensor(value) and value.shape == parameter.shape:  # not a count of steps
                whole[index][key] = whole_of(fsdp, parameter, value)
    return state | {"state": whole}


def load_full_optimizer_state_dict(
    fsdp: MiniFSDP, optimizer: torch.optim.Optimizer, state: dict
) -> None:
    """Load what `full_optimizer_state_dict` returned, on this or any other number of ranks."""
    parameters = list(chain(*[group["params"] for group in optimizer.param_groups]))
    mine = {}
    for index, entries in state["state"].items():
        parameter = parameters[index]
        shape = fsdp.shards_of[parameter].rows[parameter].shape
        mine[index] = dict(entries)
        for key, value in entries.items():
            if torch.is_tensor(value) and value.shape == shape:
                mine[index][key] = rows_of(fsdp, parameter, value).clone()
    optimizer.load_state_dict(state | {"state": mine})


# %% [markdown]
# ## 8. How it is measured
#
# Three steps of two micro-batches on ranks that are seeded differently, against the **oracle**, one
# process that sees all samples. Some 100 additions in each gradient come in another order, which
# moves it by up to 100 x 2**-24 of its terms' size, and the slope of Adam's update is at most
# lr / eps = 1. So three steps may move a weight by 3 x 100 x 2**-24 = 1.8e-5; expect much less.
# In bfloat16 it is claimed that every weight that computes is its float32 shard, rounded.


# %%
UNITS, D, HIDDEN, STEPS, PIECES, LR, EPS, CLIP = 4, 420, 120, 3, 2, 0.01, 0.01, 0.1
SLACK = STEPS * 100 * 2**-24
ADAM = partial(torch.optim.Adam, lr=LR, eps=EPS)
SHARDED = 4 + 4 + 8  # bytes per parameter: float32 weight and gradient, two moments of Adam


def network(seed: int, device: torch.device) -> nn.Sequential:
    """Four equal units; their rows, 120 and 420, need no padding on 1 to 6 ranks."""
    torch.manual_seed(seed)
    units = []
    for _ in range(UNITS):
        up = nn.Linear(D, HIDDEN, bias=False)
        down = nn.Linear(HIDDEN, D, bias=False)
        units.append(nn.Sequential(up, nn.ReLU(), down))
    return nn.Sequential(*units).to(device)


def loss_of(model: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
    return (model(x_BD) - x_BD).square().mean()


def on_one_process(x_BD: torch.Tensor) -> dict[str, torch.Tensor]:
    """The oracle's weights, and its last gradient norm."""
    model = network(0, x_BD.device)
    optimizer = ADAM(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, x_BD).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    state = model.state_dict() | {"norm": norm}
    return {name: tensor.cpu() for name, tensor in state.items()}


def error_of(state: dict[str, torch.Tensor], alone: dict[str, torch.Tensor]) -> float:
    return max((tensor - alone[name]).abs().max().item() for name, tensor in state.items())


# %% [markdown]
# **Bytes held**: between backward and step, every tensor that Python can reach is asked for its
# storage. **Elements** are counted as they are handed to a collective, beneath torch's dispatcher.
# A ring then sends (n-1)/n of them; gloo sends twice that in a reduce-scatter, which is an
# all-reduce inside.


# %%
def live_storages() -> dict[int, torch.UntypedStorage]:
    """Return every storage that a tensor within Python's reach holds, by address.

    Scalars are left out, such as Adam's counters of steps. Who keeps the storages keeps their
    addresses from being used again.
    """
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.dim() > 0]
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes() > 0}


def bytes_added(before: dict[int, torch.UntypedStorage]) -> int:
    """Return the bytes of all live storages but those of `before`.

    Gloo's threads hold what they have sent for a moment longer: the smallest of three looks counts.
    """
    looks = []
    for _ in range(3):
        time.sleep(0.05)  # launch time or not: bytes are counted here
        added = [storage for at, storage in live_storages().items() if at not in before]
        looks.append(sum(storage.nbytes() for storage in added))
    return min(looks)


class Call(NamedTuple):
    """One collective, send or receive of this rank, as it was handed to the process group."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "send", ...
    elements: int  # of its input or its output, whichever is larger
    nbytes: int  # of the same
    ranks: tuple[int, ...]  # of the group
    peer: int | None


class CountedCommunication(TorchDispatchMode):
    """Records this rank's communication in `log`, beneath torch's dispatcher: DDP's and FSDP's too.

    It sees what is handed to a backend, not what the backend then sends.
    """

    NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
    NAMES += ("send", "recv", "reduce", "gather", "scatter")  # "_allgather_base_" is an all_gather

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        if func.namespace.lstrip("_").startswith("c10d"):
            self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def record(self, func, args: tuple, kwargs: dict) -> None:
        spelled = func._schema.name.replace("_", "")
        names = [name for name in self.NAMES if name.replace("_", "") in spelled]
        if not names:
            return  # it waits for a result or wraps one
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        if "process_group" in given:
            group = dist.ProcessGroup.unbox(given["process_group"])
        else:
            group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        ranks = tuple(dist.get_process_group_ranks(group))
        sizes = [(0, 0)]
        for argument in args:
            tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
            sizes.append((sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)))
        peer = given.get("dst", given.get("src")) if names[0] in ("send", "recv") else None
        peer = None if peer is None or peer < 0 else ranks[peer]
        self.log.append(Call(names[0], *max(sizes), ranks, peer))

    def calls(self, operation: str = "") -> list[Call]:
        """The calls of one operation, in order; of all without a name."""
        return [call for call in self.log if operation in ("", call.operation)]

    def elements(self, operation: str = "") -> int:
        """Elements handed over in all calls of one operation."""
        return sum(call.elements for call in self.calls(operation))


# %% [markdown]
# For the order of gathers, the counter also notes which unit is gathered and how many are whole at
# that moment. On gloo nothing shows that the unit before *computes* meanwhile; what is counted are
# the gathers that were launched while it still had its weights.


# %%
class WatchedUnits(CountedCommunication):
    """Notes at each all-gather which unit it fills, and how many of them are whole."""

    def __init__(self, units: list[Shards]) -> None:
        super().__init__()
        self.units = units
        self.gathered: list[int] = []
        self.whole: list[int] = []

    def record(self, func, args: tuple, kwargs: dict) -> None:
        known = len(self.calls("all_gather"))
        super().record(func, args, kwargs)
        if len(self.calls("all_gather")) > known:
            addresses = {leaf.data_ptr() for leaf in tree_leaves(args) if torch.is_tensor(leaf)}
            whole = 0
            for i, unit in enumerate(self.units):
                on_its_way = unit.gathered_nK is not None
                if on_its_way and unit.gathered_nK.data_ptr() in addresses:
                    self.gathered.append(i)
                whole += on_its_way or unit.wholes[0].untyped_storage().size() > 0
            self.whole.append(whole)


# %% [markdown]
# One run trains three steps and looks at the last one.


# %%
def check_stage(
    stage: int, dtype: torch.dtype, x_RBD: torch.Tensor, alone: dict[str, torch.Tensor]
) -> None:
    """Train in stage 2 or 3; claim bytes, elements, order and weights of the last step."""
    name = f"stage {stage}, {str(dtype).removeprefix('torch.')}"
    x_BD = x_RBD[RANK]
    before = live_storages()
    model = network(RANK, x_BD.device)
    P = sum(parameter.numel() for parameter in model.parameters())
    fsdp = MiniFSDP(model, units=model, stage=stage, compute=dtype)
    optimizer = ADAM(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        passes = []  # one for each micro-batch
        for piece_BD in x_BD.chunk(PIECES):
            with WatchedUnits([fsdp.shards[unit][0] for unit in model]) as counted:
                (loss_of(model, piece_BD) / PIECES).backward()
            passes.append(counted)
        dist.barrier()
        held = bytes_added(before)
        norm = clip_grad_norm_(fsdp, CLIP)
        optimizer.step()
    padding = -P
    for shards in chain(*fsdp.shards.values()):
        padding += sum(shards.parts * rows.per_part() for rows in shards.rows.values())
    expected = SHARDED / WORLD_SIZE + (dtype.itemsize if stage == 2 else 0)
    slack = (20 * padding + 1) / P
    claim(f"{name}: bytes held per parameter", expected, held / P, atol=slack, question=1)
    check_elements(name, stage, passes, padding / P, dtype)
    if stage == 3:
        check_order(name, passes)
    if dtype == torch.float32:
        error = error_of(full_state_dict(fsdp) | {"norm": norm.cpu()}, alone)
        claim(f"{name}: error against one process", 0, error, atol=SLACK)
    else:
        claim(f"{name}: weights unlike their master", 0, unlike_master(fsdp, model, x_BD))


# %% [markdown]
# What the passes handed over, and in which order the units were gathered.


# %%
def check_elements(
    name: str, stage: int, passes: list[CountedCommunication], padding: float, dtype: torch.dtype
) -> None:
    P = 2 * UNITS * D * HIDDEN
    used = (2 * UNITS * WORLD_SIZE + 1) / P  # the columns that say which parameters were used
    gathers = (1, 0) if stage == 2 else (2, 2)
    for number, counted, gather in zip(("1st", "2nd"), passes, gathers, strict=True):
        reduced = counted.elements("reduce_scatter") / P
        gathered = counted.elements("all_gather") / P
        atol = padding + used
        claim(f"{name}: reduced in the {number} pass / P", 1, reduced, atol=atol, question=2)
        atol = max(1, gather) * padding + used
        claim(f"{name}: gathered in the {number} pass / P", gather, gathered, atol=atol, question=2)
    calls = list(chain(*[counted.log for counted in passes]))
    per_element = sum(call.nbytes for call in calls) / sum(call.elements for call in calls)
    claim(f"{name}: bytes per element", dtype.itemsize, per_element)


def check_order(name: str, passes: list[WatchedUnits]) -> None:
    whole = list(chain(*[counted.whole for counted in passes]))
    gathered = list(chain(*[counted.gathered for counted in passes]))
    claim(f"{name}: units whole at once", 2, max(whole, default=0), question=3)
    forward = list(range(UNITS))
    expected = (forward + forward[::-1]) * PIECES
    in_order = sum(i == j for i, j in zip(expected, gathered, strict=False))
    claim(f"{name}: gathers in the order 0123 3210", len(expected), in_order, question=4)
    early = whole.count(2) / PIECES  # in forward and in backward, all but the first
    claim(f"{name}: gathers next to a whole unit", 2 * (UNITS - 1), early, question=4)


def unlike_master(fsdp: MiniFSDP, model: nn.Module, x_BD: torch.Tensor) -> int:
    """Count the weights that a forward uses and that are not the optimizer's, rounded."""
    used = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def look(module: nn.Module, inputs: tuple, key: str = f"{name}.weight") -> None:
                used[key] = module.weight.detach().cpu().clone()

            module.register_forward_pre_hook(look)
    with torch.no_grad():
        model(x_BD)
    masters = full_state_dict(fsdp)
    return sum((used[key] != masters[key].to(fsdp.compute)).sum().item() for key in masters)


# %% [markdown]
# A checkpoint must not depend on the number of ranks. So n ranks take two steps in stage 3 and save
# everything; then each rank goes on *alone*, in a group of its own, with all samples.


# %%
def check_checkpoint(x_RBD: torch.Tensor, alone: dict[str, torch.Tensor]) -> None:
    model = network(RANK, x_RBD.device)
    fsdp = MiniFSDP(model, units=model)
    optimizer = ADAM(model.parameters())
    for _ in range(STEPS - 1):
        optimizer.zero_grad()
        loss_of(model, x_RBD[RANK]).backward()
        clip_grad_norm_(fsdp, CLIP)
        optimizer.step()
    saved = full_state_dict(fsdp)
    saved_optimizer = full_optimizer_state_dict(fsdp, optimizer)

    myself, _ = dist.new_subgroups(1)
    model = network(7, x_RBD.device)
    fsdp = MiniFSDP(model, units=model, group=myself)
    optimizer = ADAM(model.parameters())
    load_full_state_dict(fsdp, saved)
    load_full_optimizer_state_dict(fsdp, optimizer, saved_optimizer)
    loss_of(model, x_RBD.flatten(0, 1)).backward()
    norm = clip_grad_norm_(fsdp, CLIP)
    optimizer.step()
    error = error_of(full_state_dict(fsdp) | {"norm": norm.cpu()}, alone)
    claim("saved by all, resumed by one rank: error", 0, error, atol=SLACK)


# %% [markdown]
# PyTorch's own `fully_shard` (FSDP2) trains the same model next to ours. Its shards are DTensors,
# which know of the whole; ours are plain tensors.


# %%
def check_pytorch(x_RBD: torch.Tensor, alone: dict[str, torch.Tensor]) -> None:
    model = network(0, x_RBD.device)
    P = sum(parameter.numel() for parameter in model.parameters())
    mesh = dist.init_device_mesh(x_RBD.device.type, (WORLD_SIZE,))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = ADAM(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        with CountedCommunication() as passes:
            loss_of(model, x_RBD[RANK]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    errors = []
    for name, parameter in model.named_parameters():
        errors.append((parameter.full_tensor().cpu() - alone[name]).abs().max().item())
    claim("PyTorch: error against one process", 0, max(errors), atol=SLACK)
    if WORLD_SIZE == 1:
        blocked("PyTorch: reduced and gathered per pass / P", needs="2 ranks")
        return
    gathered = passes.elements("all_gather") / P
    reduced = passes.elements("reduce_scatter") / P
    claim("PyTorch: reduced per pass / P", 1, reduced, atol=0.1)
    claim("PyTorch: gathered per pass / P", 2, gathered, atol=0.1)


# %% [markdown]
# ## 9. On GPUs: what the allocator says, and what a step takes
#
# The same count by CUDA's allocator, for a billion parameters in sixteen units: what is allocated
# when backward has ended, the peak within a step, and its time. To the shards, the peak of stage 3
# adds two whole units, the gather of one of them until it is copied into its place, and two whole
# gradients. (cuBLAS keeps some 32 MB. The slack allows for it, and still tells our 2 + 16/n in
# stage 2 from the paper's 2 + 14/n up to 16 GPUs.)


# %%
def measure_on_gpus(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked("GPU: bytes allocated per parameter, stage 2", needs="2 GPUs with bfloat16")
        blocked("GPU: bytes allocated per parameter, stage 3", needs="2 GPUs with bfloat16")
        return
    x_BD = torch.randn(64, 8192, device=device, dtype=torch.bfloat16)
    for stage in (2, 3):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = nn.Sequential()
        for _ in range(16):
            model.append(nn.Linear(8192, 8192, bias=False, device=device))
        P = sum(parameter.numel() for parameter in model.parameters())
        MiniFSDP(model, units=model, stage=stage, compute=torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters())
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            start.record()
            optimizer.zero_grad()
            loss_of(model, x_BD).backward()
            held = (torch.cuda.memory_allocated() - before) / P
            optimizer.step()
            end.record()
        end.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / P
        expected = SHARDED / WORLD_SIZE + (2 if stage == 2 else 0)
        claim(f"GPU: bytes allocated per parameter, stage {stage}", expected, held, atol=0.1)
        ms = start.elapsed_time(end)
        print0(f"{'':13}peak of a step: {peak:.1f} bytes per parameter, {ms:.0f} ms")
        del model, optimizer


# %% [markdown]
# ## What you should have seen
#
# 1. Stage 2 holds 6 bytes per parameter, 2 + 16/n; stage 3 holds 4, or 16/n. Only stage 3 has no
#    part that stays: 7 billion parameters are 42 GB per rank in stage 2 and 28 GB in stage 3, and
#    on 64 ranks 15.8 GB and 1.75 GB. (The ZeRO paper counts 2 + 14/n in stage 2: its gradients rest
#    in bfloat16. Ours, like FSDP2's, have the dtype of the parameter, and no second copy of the
#    shard rests in bfloat16; so stage 3 is 16/n by either count.)
# 2. P elements go through reduce-scatters in each micro-batch. Stage 3 gathers 2P in each, once
#    forward and once backward; stage 2 gathers P in the first micro-batch after an update. With one
#    micro-batch per step that is 2P and 3P: the "1.5 times the communication" of stage 3.
#    With k of them it is (k + 1) P and 3k P, where data parallelism under `no_sync` has 2P, the two
#    halves of one all-reduce: accumulate as little as you can. (gloo moves more, since its
#    reduce-scatter is an all-reduce inside. The 1.00008 are the columns that say what was used.)
# 3. Two: the one that computes and the one that is on its way. Whole weights and gradients of two
#    units come on top of 16P/n; large units hide their communication better and cost more memory.
# 4. 0 1 2 3 forward and 3 2 1 0 backward. All gathers but the first of each pass, six of eight, are
#    launched while another unit still computes. Unit 3 is gathered twice in a row: it was freed
#    after forward, just before backward needs it. FSDP2 lets you keep it
#    (`reshard_after_forward=False` for the last block).
#
# PyTorch's `fully_shard` hands over the same and ends at the same weights. What n ranks saved, one
# rank resumes: nothing in the checkpoint knows how many there were.
#
# **Try.** With the wrong neighbor the weights stay right, since a unit that was not prefetched is
# gathered when it is needed. But backward begins by gathering unit 0, which it needs last, and
# waits for each of the others; only the claim on their order sees it. With `=`, each micro-batch
# overwrites the one before; with one micro-batch per step nothing would fail.
#
# On real systems: FSDP1 flattened a unit's parameters into one tensor; FSDP2 shards each one, so
# that frozen weights fit in, and weight decay can still be chosen by a parameter's dimensions.
# Gradients travel in bfloat16 here, as the weights do, and are added up in float32; a large job
# sends them in float32, too (`MixedPrecisionPolicy(reduce_dtype=torch.float32)` in FSDP2). At a
# thousand ranks, gathering each unit over the whole cluster takes too long; **hybrid sharding**
# shards within a node and replicates over nodes (exercises/09_hybrid_sharding).
#
# Seven limits, of which `fully_shard` shares the first three. The hooks run on `module(x)`: in
# `module.forward(x)` or another method, and outside of its unit, a parameter is this rank's rows
# (of a DTensor, there). A gradient penalty (`create_graph=True`, then backward through the
# gradient) fails in stage 3: the second backward finds weights that are freed. A unit that returns
# its own weight, or a view of it, crashes in stage 3. A unit without any trained weight stays whole
# until backward has ended. The reentrant kind of activation checkpointing may wrap whole units
# only; the other kind (`use_reentrant=False`) any part. A hook on a *parameter* sees no gradient,
# since `Gather.backward` gives autograd none: an optimizer that steps in
# `register_post_accumulate_grad_hook` trains nothing. Last, the model is built whole on every rank
# before it is cut; one that no rank holds is built on the meta device (fsdp/04).


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    generator = torch.Generator().manual_seed(2)
    x_RBD = torch.randn(WORLD_SIZE, 8, D, generator=generator).to(device)
    alone = on_one_process(x_RBD.flatten(0, 1))
    gc.freeze()  # what there is already need not be searched for tensors
    for stage in (2, 3):
        for dtype in (torch.bfloat16, torch.float32):
            check_stage(stage, dtype, x_RBD, alone)
    gc.unfreeze()
    check_checkpoint(x_RBD, alone)
    check_pytorch(x_RBD, alone)
    measure_on_gpus(device)
    finish()


# %% [markdown]
# ## Plumbing, the same in every lesson: join the group, print, check a claim, leave

# %%
ledger: list[dict] = []  # one row per claim, the same on every rank


def command_line(flags: dict[str, dict] | None = None) -> argparse.Namespace:
    """Read the flags, given as {name: arguments of add_argument}; --help and mistakes end here."""
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    for name, arguments in (flags or {}).items():
        parser.add_argument(name, **arguments)
    parser.error = refuse
    return parser.parse_args()


def launch(world_sizes: range | list[int] = range(1, 1025)) -> None:
    """Plain `python lesson.py`: be torchrun, one rank per GPU if there are several, else 4.

    `world_sizes` are the numbers of ranks that the lesson takes: it gets the largest that fits.
    """
    if "RANK" in os.environ:
        return  # torchrun has started this rank
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    gpus = torch.cuda.device_count()
    ranks = max(size for size in world_sizes if size <= gpus) if gpus > 1 else 4
    os.environ |= {"LAUNCHER": str(os.getpid()), "OMP_NUM_THREADS": "1"}  # ranks share the cores
    logging.disable()  # the rank that fails says why
    here = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    try:
        with tempfile.TemporaryDirectory() as logs:  # the one that torchrun makes would stay
            torchrun([*here, f"--log-dir={logs}", *sys.argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {failure.signal_name()}" if failure.exitcode < 0 else 1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit()


def setup() -> torch.device:
    """Join the process group: NCCL if every rank has a GPU of its own, gloo if none has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the launcher
    if os.environ.pop("LAUNCHER", str(os.getppid())) != str(os.getppid()):
        sys.exit(1)  # it was killed before that line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    torch.set_float32_matmul_precision("highest")  # some images make TF32 the default
    gpus = torch.cuda.device_count()
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    how = f"gloo ({local_ranks} ranks and {gpus} GPUs here)"
    if gpus >= local_ranks:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        version = ".".join(map(str, torch.cuda.nccl.version()))
        how = f"NCCL {version} on {torch.cuda.get_device_name()}"
    patience = timedelta(minutes=2)
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    store.set(f"device of {RANK}", device.type)
    devices = store.multi_get([f"device of {rank}" for rank in range(WORLD_SIZE)])
    if len(set(devices)) > 1:
        counted = f"{devices.count(b'cuda')} GPUs for {WORLD_SIZE} ranks"
        refuse(f"needs a GPU per rank, or none, got {counted}; hide all by CUDA_VISIBLE_DEVICES=")
    group = {"rank": RANK, "world_size": WORLD_SIZE, "store": store, "timeout": patience}
    own_gpu = device if device.type == "cuda" else None
    dist.init_process_group("nccl" if own_gpu else "gloo", device_id=own_gpu, **group)
    sys.excepthook = crash  # only now: init_process_group sets one of its own
    print0(f"{WORLD_SIZE} ranks, {how}, torch {torch.__version__}\n")
    print0(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
    return device


def print0(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def refuse(rule: str) -> None:
    """End before the first collective with one message, from rank 0: rule, value, remedy."""
    if RANK != 0:
        time.sleep(30)  # the launcher ends us meanwhile
    sys.exit(f"{sys.argv[0]}: {rule}")


def crash(*error: object) -> None:
    """Leave without ceremony, since peers may be stuck. The first rank that fails says why."""
    first = dist.distributed_c10d._get_default_store().add("crashes", 1) == 1
    time.sleep(1 if first else 30)  # the launcher ends us meanwhile, if a peer's death is the cause
    print(f"rank {RANK}:", file=sys.stderr)
    sys.__excepthook__(*error)
    os._exit(1)


def claim(
    text: str,
    predicted: float,
    measured: float,
    sign: str = "=",
    atol: float = 0.0,
    question: int | None = None,
    kind: str = "measured",
    timed: bool = False,
    varies: bool = False,
    rank: int | None = None,
) -> None:
    """Check `measured sign predicted` (=, <=, >=), give or take `atol`, on all ranks; all call.

    The worst rank is shown, or `rank`. `question` is the number in *Predict* that this answers.
    `kind` says what was measured: the real thing, or what is "simulated", or "theory". `timed` says
    that a clock decides; `varies`, that the kernel's own traffic does, or how well a model learns.
    """
    p = float(predicted)
    m = float(measured)
    error = {"=": abs(m - p), "<=": m - p, ">=": p - m}[sign] - atol
    found = [(math.inf if math.isnan(error) else error, RANK, p, m, float(atol))]
    if dist.is_initialized():
        found *= WORLD_SIZE
        dist.all_gather_object(found, found[0])
    worst = max(found, key=lambda one: one[0]) if rank is None else found[rank]
    error, rank, p, m, slack = worst
    verdict = "PASS" if error <= 0 else "FAIL"
    mark = {"measured": " ", "simulated": "s", "theory": "t"}[kind]
    answers = f"{question}." if question else ""
    between = f"{sign:>2} {readable(p)}" + (f" ±{slack:.2g}" if slack else "")
    print0(f"  {verdict} {mark}  {answers:2} {text:50} {between:22} {readable(m):>11}")
    if verdict == "FAIL":
        print0(f"{'':13}off by {m - p:.3g} on rank {rank}")
    row = {"claim": text, "verdict": verdict, "sign": sign, "rank": rank, "slack": slack}
    row |= {"predicted": p, "measured": m if math.isfinite(m) else str(m)}  # JSON knows no NaN
    row |= {"question": question, "kind": kind, "timed": timed, "varies": varies}
    ledger.append(row | {"line": sys._getframe(1).f_lineno})


def readable(x: float) -> str:
    """Whole numbers in full, others to six digits."""
    return f"{x:,.0f}" if x.is_integer() and abs(x) < 1e12 else f"{x:,.6g}"


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    print0(f"  BLOCKED    {text:50} needs {needs}")
    row = {"claim": text, "verdict": "BLOCKED", "needs": needs}
    ledger.append(row | {"line": sys._getframe(1).f_lineno})


def finish() -> None:
    """Write the ledger where LESSON_JSON says; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    counts = Counter((row.get("kind"), row["verdict"]) for row in ledger)
    said = f"{counts['measured', 'PASS']} PASS, {counts['measured', 'FAIL']} FAIL"
    said += f", {counts[None, 'BLOCKED']} BLOCKED"
    for kind in ("simulated", "theory"):  # apart from what was measured
        passed = counts[kind, "PASS"]
        failed = counts[kind, "FAIL"]
        said += f"; {kind} ({kind[0]}): {passed} PASS, {failed} FAIL" if passed + failed else ""
    print0(f"\n  {said}")
    verdicts = {row["verdict"] for row in ledger}
    if verdicts == {"BLOCKED"}:
        print0("  Nothing could be checked: BLOCKED rows say what they need.")
    if RANK == 0 and "LESSON_JSON" in os.environ:
        with open(os.environ["LESSON_JSON"], "w") as file:
            json.dump({"ranks": WORLD_SIZE, "ledger": ledger}, file, indent=1)
    code = int("FAIL" in verdicts or "PASS" not in verdicts)
    if __name__ == "__main__":
        os._exit(code)  # threads of a group that something still holds can abort a plain exit
    sys.exit(code)


if __name__ == "__main__":
    main()
