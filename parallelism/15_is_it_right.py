"""Is my parallel run right? One step against one process, and one axis at a time
==============================================================================

**Question.** A model trains on many ranks, its loss falls, and no error shows. How do you know that
it computes what one process would, and if it does not, where is the mistake?

**Predict**, and write it down before you run. A small language model trains with AdamW, in float32.

1. Nothing is wrong: the ranks only add up in another order. By how much does the loss of the first
   step differ from one process's: about 1e-7, 1e-5 or 1e-3 of it?
2. By a mistake all gradients are twice as large, and nothing is clipped. In 8 steps, by how much
   does the loss differ at most: less than 1e-4, up to 1e-2, or more?
3. Four other programs have a mistake each. Pipeline: every stage draws its blocks from one seed, so
   the first blocks of all stages are alike. Data: a rank averages the loss over its own tokens,
   though ranks have unequally many. Tensor: with sequence parallelism each rank of tp has a summand
   of the norms' gradients, and they are not added up. Sampler: rank r of all reads share r modulo
   the number of shares, though the ranks of a tp group must read the same. Each program runs along
   one axis at a time, with all four ranks. In how many of the four do these runs find the mistake?
4. Take the one with the norms. The model has 14 parameters: an embedding, a head, and in each of 4
   blocks a norm and two matrices. How many of them have a wrong gradient?
5. By how much does that mistake change the loss in the first step?

**Run.**

    torchrun --standalone --nproc-per-node=4 15_is_it_right.py   # NCCL on 4 GPUs, else gloo
    python 15_is_it_right.py                                     # the same, started for you

Not run on several GPUs.

**Try.** Make a mistake of your own: in `put_on_mesh` let `mine` be `range((s + 1) * LAYERS // p)`.
Then a later stage repeats the layers of the earlier ones. Along which axes is the program without a
planted mistake wrong now, and which claims fail? In `train_step` let the sampler's mistake be
`share = 0`: which axis finds it now?

**Before.** parallelism/13_gpt_by_library.py: such a model on a mesh.

**Next.** parallelism/16_planning_memory.py: which mesh a model needs.
"""

import argparse
import copy
import ctypes
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import AdamW

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences per step, T tokens each, V different tokens (bytes), D model width, E hidden
# features; b is a rank's share of B.
B, T, V, D, E = 16, 16, 256, 64, 256
LAYERS = 4
AXES = ("pp", "dp", "tp")  # of a mesh, outermost first
Mesh = dist.DeviceMesh

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
# In this order, for a wrong forward pass makes most gradients wrong as well. (If both are right,
# the optimizer is left: compare the weights after its step.) The weights must come from one place,
# a **seed checkpoint**: one process draws them whole, and all meshes begin with these. (Here rank 0
# sends them to all; in torchtitan it is a checkpoint of step 0, which each mesh loads.) To draw by
# the same seed is not enough: a rank that holds half of the layers draws other numbers for them.
#
# What may differ is the order of sums. It changes last digits, so the bound follows from the dtype:
# a float32 has a relative error of 6e-8 per operation, a bfloat16 of 4e-3. What is larger by
# orders is a mistake. If you cannot tell, compare in float64, where rounding is 1e-16. (Here
# float32 is enough, and no row is in float64.)


# %%
class Step(NamedTuple):
    """What one step computes, on whole tensors."""

    loss: float  # of the whole batch
    gradients: dict[str, torch.Tensor]  # of this rank's parameters


def compare(ours: Step, right: Step) -> tuple[float, dict[str, float]]:
    """Return the relative error of the loss, and of each gradient of this rank, by name."""
    loss_error = abs(ours.loss / right.loss - 1)
    errors = {}
    for name, gradient in ours.gradients.items():
        expected = right.gradients[name]
        errors[name] = ((gradient - expected).abs().max() / expected.abs().max()).item()
    return loss_error, errors


# %% [markdown]
# ## 2. One axis at a time, then two
#
# If the run with dp x pp x tp is wrong, run each axis alone, from the same seed checkpoint. A few
# ranks show most mistakes; some show only where groups cross nodes or outnumber heads.
#
#     right = the step in one process
#     for each axis:        is_wrong(step_on(that axis alone, 4 ranks), right)?
#         if one is:        the mistake is there. Which gradients are wrong, by name?
#         if none is:       is_wrong(step_on(two axes, 2 x 2 ranks), right)?
#
# If the loss is wrong, look forward: print what each layer puts out, on the ranks and in one
# process, and find the first that differs. If the loss is right, the *names* of the wrong gradients
# say the rest. Those of one kind, such as norms: a sum that only they need. All of them, on every
# axis: a factor.
#
# **If each axis is right alone, run two together.** Then the mistake is in how they meet: which
# ranks form a group, and who reads which samples.


# %%
def step_on(mesh: Mesh, whole: "SmallModel", batch: "Batch", mistake: str) -> Step:
    """Do one step on a mesh, from the weights of the whole model, with a mistake or with "none"."""
    stage = put_on_mesh(whole, mesh, mistake)
    loss = train_step(stage, mesh, batch, mistake)
    gradients = {name: x.grad.full_tensor() for name, x in stage.named_parameters()}
    return Step(loss, gradients)


def is_wrong(ours: Step, right: Step) -> bool:
    """Return whether a step differs from the right one by more than rounding."""
    loss_error, errors = compare(ours, right)
    return any_is_wrong(loss_error, *errors.values())


def any_is_wrong(*errors: float) -> bool:
    """Return whether an error, on any rank, is larger than rounding, or not a number."""
    wrong = [None] * WORLD_SIZE
    # `not <=` and not `>`: a NaN is neither larger nor smaller than anything.
    dist.all_gather_object(wrong, any(not error <= ROUNDING for error in errors))
    return any(wrong)


def make_mesh(**sizes: int) -> Mesh:
    """Return a mesh of so many ranks along the axes that are named, and 1 along the others.

    If there are more ranks, they make copies of it, which all do the same.
    """
    shape = [sizes.get(axis, 1) for axis in AXES]
    shape.insert(0, WORLD_SIZE // math.prod(shape))
    return dist.init_device_mesh(DEVICE.type, shape, mesh_dim_names=("copies", *AXES))


# %% [markdown]
# ## 3. A small program, and five mistakes that raise no error
#
# The model is the smallest that can have them: blocks of a norm and an MLP. It is cut along pp,
# split along tp and sharded along dp by the calls of 13_gpt_by_library.py. With sequence
# parallelism a rank has T / tp of the tokens where the norms are.
#
# You need not read all of this program. What it does right is lesson 13; what it does wrong is told
# before `put_on_mesh`.


# %%
class MlpBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.up = nn.Linear(D, E, bias=False)
        self.down = nn.Linear(E, D, bias=False)

    def forward(self, x_bTD: torch.Tensor) -> torch.Tensor:
        return x_bTD + self.down(F.silu(self.up(self.norm(x_bTD))))


class SmallModel(nn.Module):
    """Tokens (b, T) -> logits (b, T, V); a stage without one of its ends takes or gives (b, T, D).

    Blocks have names, not places: a stage's are called as they are in the whole model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleDict({str(i): MlpBlock() for i in range(LAYERS)})
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


BLOCK_PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
ENDS_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}

# %% [markdown]
# Each mistake is an `if` in this program:
#
#     seed      each stage draws its own blocks, all with the same seed. So the first block of every
#               stage has the same weights.
#     norms     the plan lacks the line of the norm. Its weight is copied along tp, and its gradient
#               has to be added up there. Without the line each rank keeps that of its own tokens.
#     sampler   a rank's share of the batch follows from its number, as if tp were outermost.
#     tokens    the mean over a rank's own tokens. Ranks have unequally many (padding has no loss),
#               so the mean of the means is another one (data-loading/13_token_weights.py).
#     factor    the pipeline adds up the micro-batches' gradients in place of averaging them.


# %%
def put_on_mesh(whole: SmallModel, mesh: Mesh, mistake: str) -> SmallModel:
    """Return this rank's stage of the model, split along tp and sharded along dp."""
    s = mesh["pp"].get_local_rank()
    p = mesh["pp"].size()
    mine = range(s * LAYERS // p, (s + 1) * LAYERS // p)
    stage = copy.deepcopy(whole)
    for i in set(range(LAYERS)) - set(mine):
        del stage.blocks[str(i)]
    if s > 0:
        stage.embedding = None
    if s < p - 1:
        stage.head = None
    if mistake == "seed":
        for place, block in enumerate(stage.blocks.values()):
            block.load_state_dict(whole.blocks[str(place)].state_dict())

    plan = dict(BLOCK_PLAN)
    if mistake == "norms":
        del plan["norm"]
    for block in stage.blocks.values():
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    ends = {name: style for name, style in ENDS_PLAN.items() if getattr(stage, name) is not None}
    parallelize_module(stage, mesh["tp"], ends)
    fully_shard(stage, mesh=mesh["dp"])
    return stage


# %% [markdown]
# The loss that is due is a sum over all tokens of the batch, divided by their number. A micro-batch
# has the sum over its own tokens. The schedule divides by the m micro-batches, and FSDP by the dp
# ranks, so `loss_of` multiplies by both beforehand.


# %%
def train_step(stage: SmallModel, mesh: Mesh, batch: "Batch", mistake: str) -> float:
    """Leave the gradient of the batch's mean loss; return that loss."""
    s = mesh["pp"].get_local_rank()
    p = mesh["pp"].size()
    dp = mesh["dp"].size()
    share = mesh["dp"].get_local_rank()  # ranks of a tp group read the same sequences
    if mistake == "sampler":
        share = RANK % dp
    x_bT = batch.x_BT.chunk(dp)[share]
    next_bT = batch.next_BT.chunk(dp)[share]
    tokens = (batch.next_BT != NONE).sum()
    if mistake == "tokens":
        tokens = (next_bT != NONE).sum() * dp
    m = max(2, p)  # micro-batches

    def loss_of(logits_bTV: torch.Tensor, next_bT: torch.Tensor) -> torch.Tensor:
        how = {"ignore_index": NONE, "reduction": "sum"}
        return F.cross_entropy(logits_bTV.flatten(0, 1), next_bT.flatten(), **how) * m * dp / tokens

    # Built anew in each step, to have all of it in one place; a training builds both once.
    pipeline_stage = PipelineStage(stage, s, p, x_bT.device, group=mesh["pp"].get_group())
    average = mistake != "factor"
    schedule = Schedule1F1B(pipeline_stage, m, loss_fn=loss_of, scale_grads=average)
    losses = []  # of the micro-batches; the last stage alone has them
    at_the_start = [x_bT] if s == 0 else []
    at_the_end = {"target": next_bT, "losses": losses} if s == p - 1 else {}
    schedule.step(*at_the_start, **at_the_end)
    mine = sum(loss.item() for loss in losses) / m
    total = torch.tensor(mine, dtype=torch.float64, device=x_bT.device)
    for axis in ("pp", "dp"):
        dist.all_reduce(total, group=mesh[axis].get_group())
    return total.item() / dp


# %% [markdown]
# ## 4. How it is measured
#
# The batches are bytes of argparse's source. Each sequence has a loss on its first 2 to T tokens
# only, as if the rest were padding. The **oracle** is the model in one process, in the same dtype.
# A gradient passes some 10 operations per block, each a sum of up to E terms: 10 x 4 x 256
# roundings of 6e-8. They point both ways, so what remains is about their number's square root, 101,
# times one: 6e-6. That is an estimate, so a step is called wrong only above 1e-4. A right loss is
# closer, since its roundings cancel in the mean over all tokens. Its rows are held to 1e-6.

# %%
NONE = -100  # the target of a token without a loss
ROUNDING = 1e-4
STEPS = 8
TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))


class Batch(NamedTuple):
    """Tokens (B, T), and the token after each, or NONE."""

    x_BT: torch.Tensor
    next_BT: torch.Tensor


def batch_of(number: int) -> Batch:
    """Return a batch of the text, the same on every rank."""
    generator = torch.Generator().manual_seed(number)
    starts_B = torch.randint(len(TEXT) - T, (B,), generator=generator)
    tokens_BT = TEXT[starts_B[:, None] + torch.arange(T + 1)]
    lengths_B = torch.randint(2, T + 1, (B,), generator=generator)
    padding_BT = torch.arange(T) >= lengths_B[:, None]
    next_BT = tokens_BT[:, 1:].masked_fill(padding_BT, NONE)
    return Batch(tokens_BT[:, :-1].contiguous().to(DEVICE), next_BT.to(DEVICE))


def right_step(whole: SmallModel, batch: Batch) -> Step:
    """Do the step in one process."""
    whole.zero_grad()
    logits = whole(batch.x_BT).flatten(0, 1)
    loss = F.cross_entropy(logits, batch.next_BT.flatten(), ignore_index=NONE)
    loss.backward()
    gradients = {name: x.grad.clone() for name, x in whole.named_parameters()}
    return Step(loss.item(), gradients)


@cache
def alone(axis: str) -> Mesh:
    return make_mesh(**{axis: min(WORLD_SIZE, LAYERS)})


def check_axes(whole: SmallModel) -> None:
    """Claim which runs find which mistake."""
    batch = batch_of(0)
    right = right_step(whole, batch)
    found = {}
    for mistake in ("none", "seed", "tokens", "norms", "sampler", "factor"):
        found[mistake] = []
        for axis in AXES:
            if is_wrong(step_on(alone(axis), whole, batch, mistake), right):
                found[mistake].append(axis)
        where = ", ".join(found[mistake]) or "no axis"
        print0(f"{'':13}mistake: {mistake:10} found along: {where}")
    claim("axes found wrong, no mistake", 0, len(found["none"]))
    expected = {"seed": ["pp"], "tokens": ["dp"], "norms": ["tp"]}
    named = [found[mistake] == axes for mistake, axes in expected.items()]
    claim("mistakes found in their axis alone", 3, sum(named), question=3)
    claim("sampler's mistake: axes found wrong", 0, len(found["sampler"]), question=3)
    claim("factor: axes found wrong", 3, len(found["factor"]))
    if WORLD_SIZE < 4:
        blocked("dp x tp found wrong, sampler's mistake", needs="4 ranks")
        return
    two = make_mesh(dp=2, tp=2)
    right_too = is_wrong(step_on(two, whole, batch, "none"), right)
    wrong = is_wrong(step_on(two, whole, batch, "sampler"), right)
    claim("dp x tp found wrong, no mistake", False, right_too)
    claim("dp x tp found wrong, sampler's mistake", True, wrong)


def check_names(whole: SmallModel) -> None:
    """Claim which gradients are wrong if the norms' are not added up along tp."""
    batch = batch_of(0)
    ours = step_on(alone("tp"), whole, batch, "norms")
    loss_error, errors = compare(ours, right_step(whole, batch))
    wrong = [name for name, error in errors.items() if any_is_wrong(error)]
    print0(f"{'':13}wrong: {', '.join(name.removesuffix('.weight') for name in wrong)}")
    claim("wrong gradients, of the model's 14", 4, len(wrong), question=4)
    claim("error of the loss then", 0, loss_error, atol=1e-6, question=5)


# %% [markdown]
# Then both dtypes, without a mistake, and curves. What a curve must be compared with is noise: how
# far it is from the curve of other batches.


# %%
def check_dtypes(whole: SmallModel) -> None:
    """Claim how far the loss of a right step is off; in bfloat16 it looks like a mistake."""
    claim("error of the loss, float32", 0, error_in(whole), atol=1e-6, question=1)
    coarse = error_in(copy.deepcopy(whole).bfloat16())
    claim("error of the loss, bfloat16", ROUNDING, coarse, ">=")


def error_in(model: SmallModel) -> float:
    """Return the largest error of the loss over the axes, in the model's dtype."""
    batch = batch_of(0)
    right = right_step(model, batch)
    errors = [compare(step_on(alone(axis), model, batch, "none"), right)[0] for axis in AXES]
    return torch.tensor(errors).max().item()  # which a NaN passes, as it does not pass `max`


def curve_on(mesh: Mesh, whole: SmallModel, mistake: str) -> torch.Tensor:
    """Train on a mesh; return the loss of each step."""
    stage = put_on_mesh(whole, mesh, mistake)
    optimizer = AdamW(stage.parameters(), lr=3e-3)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses.append(train_step(stage, mesh, batch_of(number), mistake))
        optimizer.step()
    return torch.tensor(losses)


def curve_in_one_process(whole: SmallModel, first: int) -> torch.Tensor:
    model = copy.deepcopy(whole)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(first, first + STEPS):
        losses.append(right_step(model, batch_of(number)).loss)
        optimizer.step()
    return torch.tensor(losses)


def check_curves(whole: SmallModel) -> None:
    """Claim what loss curves tell of two mistakes."""
    right = curve_in_one_process(whole, 0)
    noise = (curve_in_one_process(whole, STEPS) - right).abs().mean()
    doubled = (curve_on(alone("dp"), whole, "factor") - right).abs().max()
    partial_sums = (curve_on(alone("tp"), whole, "norms") - right).abs().mean()
    print0(f"{'':13}loss {right[0]:.2f} to {right[-1]:.2f}; other batches {noise:.2f} apart,")
    print0(f"{'':13}with the norms' mistake {partial_sums:.4f}")
    claim("gradients doubled: difference of losses", 0, doubled, atol=1e-4, question=2)
    share = partial_sums / noise
    claim("norms' mistake / other batches, losses", 0.1, share, "<=", varies=True)


# %% [markdown]
# ## What you should have seen
#
# 1. About 1e-7 or less, the last digit of a float32. In bfloat16 the right program is off by more
#    than 1e-4, here by 0.2%. There a mistake of that size cannot be told from rounding. So compare
#    in float32 or float64 as long as you look for one.
# 2. Less than 1e-4: AdamW divides each gradient by its own size, and a factor cancels. With SGD it
#    is a learning rate twice as large. A clip that is reached now and then brings it to light,
#    perhaps weeks later. The gradients of one step show it at once, on every axis.
# 3. In three, and the axis is the right one. The sampler's is right on each axis alone: along dp a
#    rank's number is its share, and elsewhere there is one share. With dp x tp the ranks of a tp
#    group read different sequences, and that run finds it.
# 4. Four, the norms of the blocks. The gradient that a norm hands on is right, so all others are.
#    Their names are the finding.
# 5. Not at all, beyond rounding: the forward pass is right. In eight steps of training the losses
#    differ from the right ones by less than a tenth of what other batches change, so no curve shows
#    it. (In longer runs the copies of a norm drift further apart. That is not measured here.)
#
# **Try.** Without a planted mistake the program is wrong along pp. The loss in float32 fails, and
# so does every claim that counts single axes, except the factor's: its three include pp anyway.
# With `share = 0` all ranks read the first share, so dp finds the sampler's mistake, and the claim
# that no axis does fails.
#
# **What no oracle sees.** Random numbers: one process draws other dropout masks than four ranks do.
# Compare with dropout 0, and count masks apart (22_tensor_parallel_random_state.py). And data: that
# all ranks read different samples is seen by a count (data-loading/14_exactly_once.py).
#
# **On GPUs** the same should hold over NCCL; that was not run. TF32 and fused kernels are more ways
# to round: switch them off, or compare in float64. Some kernels add in an order that changes from
# run to run. Run the right program twice, and ask for nothing closer than its own difference. For a
# thousand ranks take a small model with all the axes of the large one.
#
# **When.** Before the first long run, and after each change of the mesh or of a library's version.
# Curves come after that, for what one step cannot show: torchtitan's docs/converging.md compares
# them, over 3,000 steps, with those of plain FSDP.

# %%
DEVICE = torch.device("cpu")  # or a GPU; `main` says


def main() -> None:
    global DEVICE
    command_line()
    launch([1, 2, 4, 8, 16])
    if WORLD_SIZE not in (1, 2, 4, 8, 16):
        refuse(f"needs 1, 2, 4, 8 or 16 ranks, got {WORLD_SIZE}: all is split into halves")
    DEVICE = setup()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # no in-place operation here
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    torch.manual_seed(RANK)  # left to themselves, ranks draw different weights
    whole = SmallModel().to(DEVICE)
    for parameter in whole.parameters():
        dist.broadcast(parameter.data, src=0)  # the seed checkpoint
    check_dtypes(whole)
    if WORLD_SIZE > 1:
        check_axes(whole)
        check_names(whole)
        check_curves(whole)
    else:
        blocked("mistakes that are found", needs="2 ranks")
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
