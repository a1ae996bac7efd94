"""Is my parallel run right? One step against one process, and one axis at a time
==============================================================================

**Question.** A model trains on many ranks, its loss falls, and no error shows. How do you know that
it computes what one process would, and if it does not, where is the mistake?

**Predict**, and write it down before you run. A small language model runs on dp x tp ranks.

1. Nothing is wrong: the ranks only add up in another order. By how much does a gradient differ from
   one process's in float32, relative to its largest element: about 1e-10, 1e-6 or 1e-2?
2. Ranks of a tp group are neighbors: with tp = 2, ranks 0 and 1, and 2 and 3. By mistake the loss
   is averaged over as many consecutive ranks as dp has, not over a dp group: with dp = 2, over
   ranks 0 and 1, and 2 and 3. Run 1 has dp = 4 alone, run 2 has tp = 4 alone, run 3 has dp = 2 and
   tp = 2. Which run is the first that differs from one process?
3. Each rank of tp has its own features of an MLP. From these alone it computes its gradient of the
   norm before the MLP, and by mistake the ranks' gradients are not added up. The model has 14
   parameters: an embedding, a head, and in each of 4 blocks a norm and two matrices. How many of
   their gradients, and of the loss, are wrong?
4. From float32 to float64 rounding shrinks by some 5e8. By which factor does the error of that
   mistake shrink?
5. By a mistake all gradients are twice as large, and nothing is clipped. Is the loss, in any of 8
   steps of AdamW, more than 1e-4 away from that of the right run: yes or no?

**Run.**

    torchrun --standalone --nproc-per-node=4 15_is_it_right.py   # NCCL on 4 GPUs, else gloo
    python 15_is_it_right.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `step_on` replace `CopyToRanks.apply(x_bTD, tp)` by `x_bTD`. Which run finds a mistake
now, though none is planted, and how many gradients are wrong? Then put it back, and let the wrong
group have `tp.size()` ranks in place of `dp.size()`: which run finds that mistake?

**Before.** parallelism/13_gpt_by_library.py: such a model on a mesh.

**Next.** parallelism/16_planning_memory.py: which mesh a model needs.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import AdamW

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = torch.device("cpu")  # or a GPU: `main` says

# Shapes: B sequences per step, T tokens each, V different tokens (bytes), D model width, E hidden
# features; b and e are a rank's share.
B, T, V, D, E = 16, 16, 256, 64, 256
LAYERS = 4
Mesh = dist.DeviceMesh
Group = dist.ProcessGroup | None  # None: all ranks
Tensors = dict[str, torch.Tensor]  # by name: a model's weights, or what a step computes

# %% [markdown]
# ## 1. Same weights, same batch, one step: loss, then gradients
#
# A loss that falls proves little. Models learn with wrong gradients, only worse, and nobody has
# seen the curve that would have been right. So do not begin with curves. Compare *one step* with
# one process, which starts from the same weights and sees the same batch:
#
#     compare           finds
#     the loss          a wrong forward pass: layers, masks, data, weights of another seed
#     every gradient    a wrong backward pass: sums left out, done twice, or over other ranks
#
# In this order, for a wrong forward pass makes most gradients wrong as well. The weights must come
# from one place, a **seed checkpoint**: one process draws them whole, and all meshes begin with
# these. (Here rank 0 sends them to all; in torchtitan it is a checkpoint of step 0, which each mesh
# loads.) To draw by the same seed is not enough: a rank that holds a part of a matrix draws other
# numbers for it.
#
# What may differ is the order of sums. It changes last digits, so the bound follows from the dtype.
# The relative error per operation is up to 4e-3 in bfloat16, 6e-8 in float32 and 1e-16 in float64.
# (PyTorch's `eps` is twice that.) If you cannot tell rounding from a mistake, go to a finer dtype:
# **rounding shrinks, a mistake stays**.


# %%
def wrong_in(ours: Tensors, right: Tensors) -> list[str]:
    """Return what differs by more than rounding, on any rank: "loss", or a parameter's name."""
    mine = []
    for name in right:
        if relative_error(ours[name], right[name]) > bound(name, right[name].dtype):
            mine.append(name)
    on_ranks = [None] * WORLD_SIZE
    dist.all_gather_object(on_ranks, mine)
    return [name for name in right if any(name in wrong for wrong in on_ranks)]


def bound(name: str, dtype: torch.dtype) -> float:
    """Return the largest relative error that rounding may cause; section 4 says why."""
    roundings = 10 if name == "loss" else 1_000
    return roundings * torch.finfo(dtype).eps


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


# %% [markdown]
# ## 2. One axis at a time, then two
#
# If the run on dp x tp is wrong, run each axis alone, from the same seed checkpoint, and then two
# together. Four ranks show most mistakes. In these pictures a row is a tp group, whose ranks have
# the same sequences. A column is a dp group, whose ranks have the same part of the weights:
#
#                  run 1: dp        run 2: tp        run 3: dp x tp
#
#                  0                0  1  2  3       0  1
#                  1                                 2  3
#                  2
#                  3
#
#     dp groups    0 1 2 3          0 | 1 | 2 | 3    0 2 | 1 3
#     tp groups    0 | 1 | 2 | 3    0 1 2 3          0 1 | 2 3
#
# The first run that is wrong names the axis, and what is wrong in it says the rest:
#
#     loss and gradients       the forward pass: find the first layer whose output differs
#     gradients of one kind    a sum that only they need
#     all gradients            a factor, or a sum that all of them need
#     the loss alone           how it is reported: forward and backward pass are right
#
# **If each axis is right alone**, the mistake is in how two of them meet: which ranks form a group,
# and who reads which samples.


# %%
def find_mistake(
    step_on_mesh: Callable[[Mesh], Tensors], meshes: dict[str, Mesh], right: Tensors
) -> tuple[str, list[str]]:
    """Do the same step on one mesh after the other; return the first that is wrong, and what is.

    step_on_mesh: does the step, from the seed checkpoint; returns whole tensors
    right: what the step computes in one process
    """
    for run, mesh in meshes.items():
        wrong = wrong_in(step_on_mesh(mesh), right)
        if wrong:
            return run, wrong
    return "no run", []


# %% [markdown]
# That is the method. It knows nothing of the model, and a run for pp, cp or FSDP is added in the
# same way. If 13_gpt_by_library.py forgets a norm in its plan, for example, the run of tp is the
# first that is wrong, by the names of these norms.
#
# Users of torchtitan ask in issues #1750 and #1720 why losses differ, and whether they may. In its
# #3280 TP = 4 and CP = 4 agree, and TP = 2 with CP = 2 shows half of their loss.

# %% [markdown]
# ## 3. A small program, and three mistakes that raise no error
#
# A rank has b of the sequences, and e of each MLP's E features. In front of a block stands **f**:
# it hands x on, and in the backward pass adds up the gradients of the tp ranks. Behind the block
# **g** adds up what the ranks have computed, and in the backward pass hands the gradient on
# (06_tensor_parallel.py). Between f and g a rank works for its own features alone. The norm is
# there too. Its weight is whole on every rank, but a rank's gradient of it is only a summand.
#
# What is called here and is no part of PyTorch stands further down. Three mistakes are planted, an
# `if` each:
#
#     dropout   each rank of dp draws its masks from the same seeds
#     norm      a replicated gradient is not reduced over tp
#     group     the loss is averaged over dp consecutive ranks, not over a dp group


# %%
def step_on(mesh: Mesh, weights: Tensors, number: int, mistake: str = "none") -> Tensors:
    """Do step `number` on dp x tp ranks; return its loss, and the whole gradients by name."""
    dp = mesh.get_group("dp")
    tp = mesh.get_group("tp")
    own = parts_of(weights, tp)
    x_bT, next_bT = [share(x_BT, dp) for x_BT in batch_of(number)]
    first = 0 if mistake == "dropout" else dp.rank() * len(x_bT)
    x_bTD = dropout(F.embedding(x_bT, own["embedding"]), number * B + first)
    for i in range(LAYERS):
        h_bTD = F.rms_norm(CopyToRanks.apply(x_bTD, tp), (D,), own[f"{i}.norm"], eps=1e-5)
        part_bTD = F.silu(h_bTD @ own[f"{i}.up"].T) @ own[f"{i}.down"]
        x_bTD = x_bTD + ReduceFromRanks.apply(part_bTD, tp)
    loss = F.cross_entropy((x_bTD @ own["head"].T).flatten(0, 1), next_bT.flatten())
    loss.backward()

    group = neighbors(dp.size()) if mistake == "group" else dp
    step = {"loss": mean_over(group, loss.detach())}
    for name, w in own.items():
        gradient = mean_over(dp, w.grad)
        if name.endswith("norm") and mistake != "norm":
            gradient = all_reduce(gradient, tp)
        step[name] = gather_over(tp, gradient) if is_split(name) else gradient
    return step


# %% [markdown]
# And the step in one process, which is right by definition. That is: it is what the ranks have to
# compute. A mistake that both share, such as a target that is off by a token, is not found.


# %%
def one_process(weights: Tensors, number: int) -> Tensors:
    """Do step `number` in one process; return its loss, and the gradients by name."""
    own = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    x_BT, next_BT = batch_of(number)
    x_BTD = dropout(F.embedding(x_BT, own["embedding"]), number * B)
    for i in range(LAYERS):
        h_BTD = F.rms_norm(x_BTD, (D,), own[f"{i}.norm"], eps=1e-5)
        x_BTD = x_BTD + F.silu(h_BTD @ own[f"{i}.up"].T) @ own[f"{i}.down"]
    loss = F.cross_entropy((x_BTD @ own["head"].T).flatten(0, 1), next_BT.flatten())
    loss.backward()
    return {"loss": loss.detach()} | {name: w.grad for name, w in own.items()}


# %% [markdown]
# ## 4. How it is measured
#
# The **oracle** is one process, in the same dtype. A gradient passes some 10 operations per block,
# each a sum of up to E terms: 10 x 4 x 256 roundings of 6e-8. They point both ways, so what remains
# is about their number's square root, 101, times one: 6e-6. That is an estimate, so a gradient is
# called wrong only above 1,000 eps, 20 times as much: 1.2e-4 in float32. A right loss is closer,
# since its roundings cancel in the mean over all tokens. It is held to 10 eps.
#
# Errors are relative to a gradient's largest element. So a mistake in small elements alone can stay
# below the bound.
#
# The batches are bytes of argparse's source. Dropout follows from a sequence's number, so that a
# mask belongs to the sequence and not to a rank.

# %%
KEEP = 0.9  # dropout keeps so many elements
STEPS = 8
TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens (B, T), and the token after each: the same on every rank."""
    generator = torch.Generator().manual_seed(number)
    starts_B = torch.randint(len(TEXT) - T, (B,), generator=generator)
    tokens_BT = TEXT[starts_B[:, None] + torch.arange(T + 1)].to(DEVICE)  # T + 1 of them
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def dropout(x_bTD: torch.Tensor, first: int) -> torch.Tensor:
    """Drop elements of sequences that are numbered from `first` on."""
    kept = []
    for number in range(first, first + len(x_bTD)):
        generator = torch.Generator().manual_seed(number)
        kept.append(torch.rand(T, D, generator=generator) < KEEP)
    return x_bTD * torch.stack(kept).to(DEVICE) / KEEP


def seed_checkpoint() -> Tensors:
    """Return the weights that rank 0 draws and sends to all."""
    torch.manual_seed(RANK)  # left to themselves, ranks draw different weights
    weights = {"embedding": torch.randn(V, D)}
    for i in range(LAYERS):
        weights[f"{i}.norm"] = torch.ones(D)
        weights[f"{i}.up"] = 0.05 * torch.randn(E, D)
        weights[f"{i}.down"] = 0.05 * torch.randn(E, D)
    weights["head"] = 0.05 * torch.randn(V, D)
    for name, w in weights.items():
        weights[name] = w.to(DEVICE)
        dist.broadcast(weights[name], src=0)
    return weights


# %% [markdown]
# Rounding first: the right program in three dtypes, and a mistake in two. Then the search, for no
# mistake and for each of three.


# %%
def errors_in(dtype: torch.dtype, weights: Tensors, mistake: str = "none") -> dict[str, float]:
    """Return the largest error, over all meshes, of the loss and of each gradient."""
    cast = {name: w.to(dtype) for name, w in weights.items()}
    right = one_process(cast, 0)
    errors = dict.fromkeys(right, 0.0)
    for mesh in make_meshes().values():
        ours = step_on(mesh, cast, 0, mistake)
        for name in right:
            errors[name] = max(errors[name], relative_error(ours[name], right[name]))
    return errors


def largest_of_gradients(errors: dict[str, float]) -> float:
    return max(error for name, error in errors.items() if name != "loss")


def check_rounding(weights: Tensors) -> None:
    """Claim how far a right step is off in each dtype, and that a mistake does not shrink."""
    errors = errors_in(torch.float32, weights)
    single = largest_of_gradients(errors)
    estimate = (10 * LAYERS * E) ** 0.5 * 2**-24
    claim("error of a gradient, float32", estimate, single, "<=", question=1)
    claim("error of the loss, float32", 0, errors["loss"], atol=bound("loss", torch.float32))
    if WORLD_SIZE == 1:
        return
    half = largest_of_gradients(errors_in(torch.bfloat16, weights))
    double = largest_of_gradients(errors_in(torch.float64, weights))
    claim("error of a gradient, bfloat16", 1e-3, half, ">=")
    claim("error of a gradient, float32 / float64", 1e7, single / double, ">=")
    coarse = errors_in(torch.float32, weights, "norm")["0.norm"]
    fine = errors_in(torch.float64, weights, "norm")["0.norm"]
    claim("norm's mistake: float32 / float64", 1, coarse / fine, atol=0.01, question=4)


def check_search(weights: Tensors) -> None:
    """Claim in which of three runs each mistake is found, and what is wrong there."""
    right = one_process(weights, 0)
    meshes = make_meshes()
    runs = ["no run", *meshes]
    found = {}
    wrong = {}
    for mistake in ("none", "dropout", "norm", "group"):
        step = partial(step_on, weights=weights, number=0, mistake=mistake)
        run, names = find_mistake(step, meshes, right)
        first = ", ".join(names[:4])
        print0(f"{'':13}planted: {mistake:8} wrong first: {run:8} {len(names):2} names: {first}")
        found[mistake] = runs.index(run)
        wrong[mistake] = len(names)
    claim("no mistake: found in run", 0, found["none"])
    claim("dropout with equal seeds: found in run", 1, found["dropout"])
    claim("dropout: wrong, of loss and 14 gradients", 15, wrong["dropout"])
    claim("norm's gradient not reduced: found in run", 2, found["norm"])
    claim("norm: wrong, of loss and 14 gradients", 4, wrong["norm"], question=3)
    if WORLD_SIZE < 4:
        blocked("loss over the wrong group: found in run", needs="4 ranks")
        blocked("group: wrong, of loss and 14 gradients", needs="4 ranks")
        return
    claim("loss over the wrong group: found in run", 3, found["group"], question=2)
    claim("group: wrong, of loss and 14 gradients", 1, wrong["group"])


# %% [markdown]
# Last, why curves do not come first: a mistake in all gradients, and what the losses of AdamW tell
# of it. One process is enough for that.


# %%
def losses_with(factor: int, weights: Tensors) -> torch.Tensor:
    """Train from the seed checkpoint, gradients times `factor`; return the loss of each step."""
    trained = {name: w.clone().requires_grad_() for name, w in weights.items()}
    optimizer = AdamW(trained.values(), lr=3e-3)
    losses = []
    for number in range(STEPS):
        step = one_process(trained, number)
        losses.append(step["loss"])
        for name, w in trained.items():
            w.grad = factor * step[name]
        optimizer.step()
    return torch.stack(losses)


def check_curve(weights: Tensors) -> None:
    """Claim that the losses of AdamW do not tell of a factor in all gradients."""
    right = losses_with(1, weights)
    doubled = losses_with(2, weights)
    print0(f"{'':13}loss of {STEPS} steps: {right[0]:.2f} to {right[-1]:.2f}")
    apart = (doubled - right).abs().max()
    claim("gradients doubled: difference of losses", 0, apart, atol=1e-4, question=5)


# %% [markdown]
# ## What you should have seen
#
# 1. About 1e-6: at most the 6e-6 of section 4. In bfloat16 the right program is off by more than
#    1e-3, and 1,000 eps are 8 there: no mistake could be told. So look for one in float32, or in
#    float64, where rounding is less than a ten-millionth of that.
# 2. In run 3. With dp = 4 all ranks are the dp group, and with dp = 1 a group is one rank, so each
#    axis alone is right. With both, dp consecutive ranks are a tp group, which has only half of the
#    batch. The loss alone is wrong: the model trains well, and its curve is that of half the data.
# 3. Four, the norms of the blocks. f adds up the gradient that a norm hands on, so all the others
#    are right. Their names are the finding. The loss is right: so is the forward pass.
# 4. By 1: it does not shrink. The other ranks' summands are missing in any dtype.
# 5. No. AdamW divides each gradient by its own size, and a factor cancels, but for the 1e-8 in
#    the denominator. With SGD it is a learning rate twice as large. If gradients are clipped now
#    and then, the runs part there, perhaps weeks later. One step's gradients show it at once.
#
# So three mistakes are found in three runs, and look different there: dropout in dp, where
# everything is wrong; the norms in tp, by name; the group in dp x tp, the loss alone.
#
# **Try.** Without f run 2, tp alone, finds 10 wrong gradients. Going back from the loss, those of
# the head and of the last block are still right: the last block hands on too little, and the three
# blocks before it and the embedding get that. Six claims fail: the gradient's error in float32 and
# its ratio to float64, "no mistake", the run of the wrong group (now 2), and what is wrong for
# norm and group. With `tp.size()` ranks run 1 finds the group: tp is 1 there, so that each rank
# reports its own loss.
#
# **Where such weights are.** Megatron puts f behind a norm that sees all tokens; then every rank
# has its whole gradient. With sequence parallelism a norm sees a rank's own tokens, and a norm of
# queries or keys its own heads. Their gradients must be added up over tp.
#
# **What is not compared here.** A usual dropout: one process draws other masks than four ranks do.
# Compare with dropout 0, and count masks apart (22_tensor_parallel_random_state.py). Padding: ranks
# then have unequally many tokens, and a mean of means is wrong (data-loading/13_token_weights.py).
# A loader: both sides are given the same batch. That each sample is read once is seen by a count
# (data-loading/14_exactly_once.py). The optimizer: compare the weights after its step likewise.
#
# **On GPUs** the same should hold over NCCL; that was not run. TF32 and fused kernels are more ways
# to round: switch them off, or compare in float64. Some kernels add in an order that changes from
# run to run. Run the right program twice, and ask for nothing closer than its own difference. If
# the model fits into no single process, or has a thousand ranks, compare fewer layers of less
# width, with all the axes of the large one.
#
# **When.** Before the first long run, and after each change of the mesh or of a library's version.
# Curves come after that, for what one step cannot show: torchtitan's docs/converging.md compares
# them, over 3,000 steps, with those of plain FSDP.

# %% [markdown]
# The meshes, who holds which part of a weight, and what `step_on` asks of its groups. For the sake
# of a short comparison each rank has the whole weights and cuts out its part; a real program holds
# the part alone.


# %%
@cache
def make_meshes() -> dict[str, Mesh]:
    """Return the meshes to try, in their order. Ranks beyond four do the same as the first four."""
    n = min(WORLD_SIZE, 4)
    sizes = {"dp": (n, 1), "tp": (1, n)}
    if n == 4:
        sizes["dp x tp"] = (2, 2)
    names = ("copies", "dp", "tp")  # tp is innermost: consecutive ranks
    meshes = {}
    for run, shape in sizes.items():
        whole = (WORLD_SIZE // n, *shape)
        meshes[run] = dist.init_device_mesh(DEVICE.type, whole, mesh_dim_names=names)
    return meshes


def share(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.chunk(group.size())[group.rank()]


def is_split(name: str) -> bool:
    """Return whether tp splits this weight: up (E, D) and down (E, D), along E."""
    return name.endswith(("up", "down"))


def parts_of(weights: Tensors, tp: Group) -> Tensors:
    """Return this rank's part of each weight, as a leaf of autograd."""
    own = {}
    for name, w in weights.items():
        part = share(w, tp) if is_split(name) else w
        own[name] = part.detach().clone().requires_grad_()
    return own


def mean_over(group: Group, x: torch.Tensor) -> torch.Tensor:
    return all_reduce(x, group) / group.size()


def gather_over(group: Group, part: torch.Tensor) -> torch.Tensor:
    whole = part.new_empty(group.size() * len(part), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole


def neighbors(size: int) -> Group:
    """Return the group of `size` consecutive ranks to which this one belongs."""
    group, _ = dist.new_subgroups(size)
    return group


# %% [markdown]
# f and g, as in 06_tensor_parallel.py, and the order of the whole.


# %%
class CopyToRanks(torch.autograd.Function):
    """f in Shoeybi et al. (2019), section 3: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None  # None: a group has no gradient


class ReduceFromRanks(torch.autograd.Function):
    """g in Shoeybi et al. (2019), section 3: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def all_reduce(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum over the group. `x` stays as it is: a gradient we are handed is not ours."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def main() -> None:
    global DEVICE
    command_line()
    launch([1, 2, 4, 8, 16])
    if WORLD_SIZE not in (1, 2, 4, 8, 16):
        refuse(f"needs 1, 2, 4, 8 or 16 ranks, got {WORLD_SIZE}: all is split into halves")
    DEVICE = setup()
    weights = seed_checkpoint()
    check_rounding(weights)
    if WORLD_SIZE > 1:
        check_search(weights)
    else:
        blocked("mistakes that are found", needs="2 ranks")
    check_curve(weights)
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
    some = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    how = f"gloo ({local_ranks} ranks and {some} here)"
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
        counted = f"GPUs for {devices.count(b'cuda')} of {WORLD_SIZE} ranks"
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
