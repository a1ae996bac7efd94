"""ZeRO: why 7 billion parameters do not train on 80 GB, and stage 1 from scratch
==============================================================================

**Question.** The weights of a model of 7 billion parameters take 14 GB in bfloat16. Why does it not
train on a GPU of 80 GB, and what do n ranks gain if each keeps 1/n of the optimizer's state?

**Predict**, and write it down before you run. The model is bfloat16, and Adam updates a float32
copy of it.

1. How many bytes per parameter does a rank of data parallelism hold when backward has ended?
2. The same for ZeRO stage 1 on 4 ranks, where each rank keeps 1/4 of what the optimizer needs.
3. How many elements per parameter does a rank hand to collectives in one step, and to which ones:
   with data parallelism, and with ZeRO-1? Count the whole array: what goes into a reduce-scatter,
   what comes out of an all-gather.
4. ZeRO-1 ends a step with an all-gather of the new weights for each of four layers. How many of
   these four must be over before the first layer of the next forward pass may compute: if the step
   waits for what it has started, and if each layer waits for its own weights?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_fsdp_zero.py   # NCCL on 4 GPUs, else gloo
    python 02_fsdp_zero.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `zero1_step` replace `b.weights_K.copy_(b.master_K)` by `pass`, so that the weights
never see an update: which claims notice? Put it back, and replace the reduce-scatter by
`dist.all_reduce(b.gradients_N)`: is the training still right?

**Before.** parallelism/01_data_parallelism_ddp.py: what every rank holds, and why gradients are
averaged.

**Next.** exercises/08_zero1; then parallelism/03_model_tensor_pipeline_parallel.py divides the
computation itself, and parallelism/05_zero2_and_zero3.py shards gradients and weights.
"""

import argparse
import ctypes
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
from collections.abc import Iterable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: N elements laid end to end, K = N / n of them on one of n ranks; B samples of D features
# on a rank, R ranks. P counts the parameters of a model.

# %% [markdown]
# ## 1. The idea: the optimizer steps between the two halves of an all-reduce
#
# In data parallelism all ranks add up their gradients, and then each of them computes the same
# update of all weights. So each holds all that the optimizer needs, and that is three quarters of
# its memory. It would be enough if one rank updated a weight and told the others the result.
#
# This need not cost more communication than before, because an all-reduce has two halves. A
# **reduce-scatter** leaves each rank the sum of one n-th of the elements, its **shard**. An
# **all-gather** then gives all shards to all ranks. Below, rank r brings ar, br, cr and dr, and A
# is a0 + a1 + a2 + a3:
#
#                       rank 0         rank 1         rank 2         rank 3
#     before            a0 b0 c0 d0    a1 b1 c1 d1    a2 b2 c2 d2    a3 b3 c3 d3
#     reduce-scatter    A              B              C              D
#     all-gather        A  B  C  D     A  B  C  D     A  B  C  D     A  B  C  D
#
# After the first half a rank knows the gradient of its own shard, which is all that it needs to
# update this shard. So stage 1 of the Zero Redundancy Optimizer, **ZeRO-1** (Rajbhandari et al.,
# 2020), takes the two halves apart and lets the optimizer step between them. The second half then
# carries new weights, where in data parallelism it carries gradients:
#
#     DDP       gradients --reduce-scatter, all-gather--> all gradients, update of all weights
#     ZeRO-1    gradients --reduce-scatter--> own gradients, own update --all-gather--> all weights
#
# The two functions below do this. A bucket `b` has N weights and N gradients in flat tensors
# (section 3 makes it from a module). `master_K` is what the optimizer updates: all N elements in
# the first function, this rank's K = N / n in the second. Gradients are divided by n *before* they
# are added up, for in float16 their sum may overflow where their mean does not. `gathering` is a
# collective under way; section 5 is about who waits for it.


# %%
def data_parallel_step(buckets: list["Bucket"], optimizer: torch.optim.Optimizer) -> None:
    """Each rank gets all gradients and updates all weights."""
    for b in buckets:
        b.gradients_N.div_(WORLD_SIZE)
        dist.all_reduce(b.gradients_N)
        b.master_K.grad = b.gradients_N.to(b.master_K.dtype)
    optimizer.step()
    for b in buckets:
        b.weights_N.copy_(b.master_K)


def zero1_step(buckets: list["Bucket"], optimizer: torch.optim.Optimizer) -> None:
    """Each rank gets the gradients of its shard, updates it, and gathers the others' shards."""
    for b in buckets:
        b.gradients_N.div_(WORLD_SIZE)
        dist.reduce_scatter_tensor(b.gradients_K, b.gradients_N)
        b.master_K.grad = b.gradients_K.to(b.master_K.dtype)
    optimizer.step()
    for b in buckets:
        b.weights_K.copy_(b.master_K)
        b.gathering = dist.all_gather_into_tensor(b.weights_N, b.weights_K, async_op=True)


# %% [markdown]
# ## 2. Sixteen bytes per parameter, and what each stage shards
#
# **Mixed precision** computes in bfloat16 and updates in float32. Each parameter has a weight and a
# gradient in bfloat16, of 2 bytes each, which forward and backward use. The optimizer adds a
# float32 copy of the weight, its **master** (4 bytes), and Adam's momentum (4) and variance (4).
# That is 16 bytes, or 112 GB for 7 billion parameters, before a single activation. In plain float32
# the weight is its own master: 4 + 4 + 8, sixteen again.
#
# Stage 1 shards what the optimizer needs. Stage 2 shards the gradients too, and stage 3 the weights
# as well; **FSDP** is stage 3 in PyTorch (fsdp/01_fsdp_basics.py). This is what one of 4 ranks
# holds, to scale:
#
#              weights   gradients   masters and Adam
#                2P         2P             12P                  bytes per parameter
#     DDP      [####]     [####]   [########################]   16
#     ZeRO-1   [####]     [####]   [######                  ]    4 + 12/4 = 7
#     ZeRO-2   [####]     [#   ]   [######                  ]    2 + 14/4 = 5.5
#     ZeRO-3   [#   ]     [#   ]   [######                  ]        16/4 = 4

# %% [markdown]
# ## 3. A bucket: parameters of any shape, in n equal shards
#
# Weights come in all shapes, and few can be divided by n. So lay them end to end in one flat
# tensor, a **bucket**, and add a few zeros: N elements then make n shards of K = N / n. The
# parameters become views of the bucket, and the module notices nothing. A second flat tensor holds
# the gradients. Each `p.grad` is a view of that one, and autograd adds to it in place:
#
#     weights_N    [         weight 1        |   bias 1  |    weight 2   | bias 2|0]
#     shards       [     rank 0    |     rank 1    |     rank 2    |     rank 3    ]
#
# A shard may begin and end in the middle of a parameter. SGD, Adam and AdamW do not care, for they
# treat every element by itself. (Muon and Adafactor look at whole matrices; they need another
# division of labor.)


# %%
class Bucket:
    """Parameters of one dtype laid end to end, and this rank's shard of them.

    weights_N    the weights; each parameter is a view of it
    weights_K    this rank's shard of it, a view; if there is one shard only, all of it
    gradients_N  this rank's gradients; each p.grad is a view of it
    gradients_K  the same shard of it, a view
    master_K     what the optimizer updates: weights_K itself, or a copy in higher precision
    """

    def __init__(
        self, parameters: list[nn.Parameter], shards: int, master_dtype: torch.dtype
    ) -> None:
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self.weights_N = F.pad(flat, (0, -len(flat) % shards))
        self.gradients_N = torch.zeros_like(self.weights_N)
        mine = RANK if shards > 1 else 0
        self.weights_K = self.weights_N.tensor_split(shards)[mine]
        self.gradients_K = self.gradients_N.tensor_split(shards)[mine]
        self.master_K = nn.Parameter(self.weights_K.to(master_dtype))
        self.gathering: dist.Work | None = None
        self.gradient_of: dict[nn.Parameter, torch.Tensor] = {}
        start = 0
        for p in parameters:
            end = start + p.numel()
            p.data = self.weights_N[start:end].view(p.shape)
            self.gradient_of[p] = self.gradients_N[start:end].view(p.shape)
            start = end

    def collect(self) -> None:
        """Bring in gradients that lie elsewhere, as they do after the module's own zero_grad."""
        for p, view in self.gradient_of.items():
            if p.grad is None:  # nothing has used p
                view.zero_()
            elif p.grad is not view:
                view.copy_(p.grad)

    def wait(self) -> None:
        """Wait until the weights that are being gathered are there."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None


# %% [markdown]
# ## 4. ZeRO1: an optimizer for a module
#
# `ZeRO1` fills the buckets, in the order of the parameters, and its `step` is one of the two
# functions of section 1. It leaves out what other lessons tell. Clipping needs the norm of the
# whole gradient, so ranks add up the squares of their shards in one more all-reduce. A checkpoint
# is a file per rank, of its masters and its `optimizer.state_dict()`, and fits as many ranks as
# wrote it (fsdp/06_fsdp_checkpoint.py reads it on others).


# %%
class ZeRO1:
    """Shards an optimizer over all ranks and averages the gradients, which DDP does otherwise.

    `optimizer_class`, an elementwise one, is built with `defaults` on this rank's shards of
    `parameters`, and stands in `optimizer`, for a scheduler. With `master_dtype`, parameters of
    lower precision get masters of it. `numel` is about how many elements a bucket has;
    `sharded=False` is data parallelism; for `units` see section 5.

    Build it once, of the same parameters on every rank, when weights are loaded and what is to be
    frozen is frozen; for each group of parameters, one. All ranks then start from rank 0's weights.
    A parameter that is not used counts as one whose gradient is zero: momentum still moves it.
    Buffers are left to the module.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer_class: type[torch.optim.Optimizer],
        master_dtype: torch.dtype | None = None,
        numel: int = 1 << 22,
        sharded: bool = True,
        units: Iterable[nn.Module] = (),
        **defaults: object,
    ) -> None:
        members: dict[tuple, list[nn.Parameter]] = {}  # of each bucket
        seen = Counter()  # elements so far, by dtype
        for p in parameters:
            whole = p.detach().contiguous()  # p itself, unless it is transposed
            dist.broadcast(whole, src=0)
            p.data.copy_(whole)
            if p.requires_grad:
                members.setdefault((p.dtype, seen[p.dtype] // numel), []).append(p)
                seen[p.dtype] += p.numel()
        self.buckets: list[Bucket] = []
        for (dtype, _), of_bucket in members.items():
            precision = torch.promote_types(dtype, master_dtype or dtype)
            self.buckets.append(Bucket(of_bucket, WORLD_SIZE if sharded else 1, precision))
        self.optimizer = optimizer_class([b.master_K for b in self.buckets], **defaults)
        self.average_and_update = zero1_step if sharded else data_parallel_step
        self.units = list(units)
        wait_before_forward(self.units, self.buckets)
        self.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients, update the weights, drop the gradients."""
        self.wait()  # for weights that no unit has used
        for b in self.buckets:
            b.collect()
        self.average_and_update(self.buckets, self.optimizer)
        self.optimizer.zero_grad()  # those of the masters, in their precision
        if not self.units:
            self.wait()
        self.zero_grad()

    def wait(self) -> None:
        """Wait for all weights. With `units`, call it before you save or compare them."""
        for b in self.buckets:
            b.wait()

    def zero_grad(self) -> None:
        for b in self.buckets:
            b.gradients_N.zero_()
            for p, view in b.gradient_of.items():
                p.grad = view


# %% [markdown]
# ## 5. As many bytes, but when? Hidden and exposed communication
#
# Communication is **hidden** while the GPU computes something else, and **exposed** while the GPU
# waits for it. Below are the backward pass of a model of three layers, the step, and the next
# forward pass. Bk and Fk are layer k's backward (two slots) and forward (one), O is the optimizer,
# and a dot is a slot in which the GPU waits. An all-reduce (ak) takes two slots on the network, a
# reduce-scatter (rk) and an all-gather (gk) take one each:
#
#     DDP              computes   B2 B2 B1 B1 B0 B0  .  .  O F0 F1 F2
#                      sends            a2 a2 a1 a1 a0 a0
#
#     ZeRO-1,          computes   B2 B2 B1 B1 B0 B0  .  O  .  .  . F0 F1 F2
#     the step waits   sends            r2    r1    r0    g0 g1 g2
#
#     ZeRO-1,          computes   B2 B2 B1 B1 B0 B0  .  O  . F0 F1 F2
#     layers wait      sends            r2    r1    r0    g0 g1 g2
#
# The gradients of a layer are ready while backward goes on to the layer before it. So DDP hides all
# of its all-reduces but the last, and ZeRO-1's reduce-scatters can hide in the same way. Its
# all-gathers cannot: they start after the optimizer, when backward is over. If the step waits for
# them, *all* are exposed, one per layer. They hide behind the next forward pass if each layer waits
# for its own weights only: the others' travel while it computes, and one gather is exposed. In
# Megatron-LM this is `--overlap-param-gather`.
#
# `ZeRO1` needs one hook for it. If you name the modules that wait for themselves, its `units`, then
# `step` starts the gathers and waits for none. On GPUs `wait` holds back the stream that computes,
# not the host, and NCCL runs the gathers in the order in which they were started: so start with the
# first layer's. (The reduce-scatters start in `step`, so here they are exposed;
# parallelism/04_buckets_and_overlap.py starts such reductions during backward.)


# %%
def wait_before_forward(units: list[nn.Module], buckets: list[Bucket]) -> None:
    """Let each unit wait for its own weights before it computes; ValueError if some are in none."""
    in_units: set[nn.Parameter] = set()
    for unit in units:
        parameters = set(unit.parameters())
        in_units |= parameters
        needed = [b for b in buckets if not parameters.isdisjoint(b.gradient_of)]
        unit.register_forward_pre_hook(partial(wait_for, needed))
    if units and not all(in_units.issuperset(b.gradient_of) for b in buckets):
        raise ValueError("units must hold every trained parameter, got fewer: add their modules")


def wait_for(buckets: list[Bucket], unit: nn.Module, inputs: tuple) -> None:
    for b in buckets:
        b.wait()


# %% [markdown]
# ## 6. How it is measured
#
# **Weights.** Three steps of two micro-batches, on ranks that are seeded differently, against the
# **oracle**, one process that sees all samples, in float32. The additions come in another order
# than in one process, so they round otherwise: 100 roundings of 2**-24 are allowed per gradient,
# whose terms are below 1. Adam's first step is lr g / (|g| + eps), whose slope in g is at most
# lr / eps = 1, so three steps may move a weight by 3 x 100 x 2**-24 = 1.8e-5. An update that is
# left out would move some weight by more than 2e-3, a hundred times as far.


# %%
D, LAYERS, STEPS, LR, EPS = 420, 4, 3, 0.01, 0.01
HIDDEN = 24 * WORLD_SIZE
P = LAYERS * 2 * D * HIDDEN  # n divides each layer, so there is no padding to count
SLACK = STEPS * 100 * 2**-24


class Layer(nn.Sequential):
    """One layer of the model, a residual block; it gets a bucket of its own."""

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD + super().forward(x_BD)


def net(seed: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential()
    for _ in range(LAYERS):
        up = nn.Linear(D, HIDDEN, bias=False)
        down = nn.Linear(HIDDEN, D, bias=False)
        model.append(Layer(up, nn.ReLU(), down))
    return model.to(device)


def backward(model: nn.Module, x_BD: torch.Tensor, micro_batches: int = 2) -> None:
    """Add up gradients of the loss: how far the outputs are from the inputs in reverse order."""
    for part_BD in x_BD.chunk(micro_batches):
        loss = (model(part_BD) - part_BD.flip(-1)).square().mean()
        (loss / micro_batches).backward()


def zero_of(model: nn.Sequential, **options: object) -> ZeRO1:
    """ZeRO1 with Adam and float32 masters, a bucket for each layer."""
    sizes = {"master_dtype": torch.float32, "numel": P // LAYERS}
    return ZeRO1(model.parameters(), torch.optim.Adam, **sizes, **options, lr=LR, eps=EPS)


def train(model: nn.Module, optimizer: object, x_BD: torch.Tensor, micro_batches: int = 2) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model, x_BD, micro_batches)
        optimizer.step()


def largest_difference(model: nn.Module, oracle: nn.Module) -> float:
    pairs = zip(model.parameters(), oracle.parameters(), strict=True)
    return max((ours - expected).abs().max().item() for ours, expected in pairs)


# %% [markdown]
# **Elements** are counted beneath torch's dispatcher, as they are handed to a collective; a call
# counts with its input or its output, whichever is larger. What then travels is up to the backend:
# of N elements, a ring sends (n-1)/n N in a reduce-scatter, as many in an all-gather, and
# 2(n-1)/n N in an all-reduce. (Gloo's reduce-scatter is an all-reduce inside:
# communication/01_nccl_collectives.py.) **Bytes held** are those of every tensor that Python can
# reach between backward and step, less what was there before.


# %%
COLLECTIVES = {
    "all_reduce": "c10d::allreduce_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
    "all_gather": "c10d::_allgather_base_",
}


class CountedElements(TorchDispatchMode):
    """Adds up the elements that this rank hands to each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            sizes = [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.elements[func._schema.name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def storages_in_reach() -> dict[int, torch.UntypedStorage]:
    """The storages behind all tensors that Python can reach, by address; scalars are left out."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.dim() > 0]
    return {storage.data_ptr(): storage for storage in storages}


# %% [markdown]
# The weights are compared in float32. Bytes and elements are counted in bfloat16, in the last step.
# Afterwards each weight of a rank's shard should be its master, rounded.


# %%
def check_weights(x_RBD: torch.Tensor, oracle: nn.Module) -> None:
    """Claim that PyTorch's DDP, stage 0 and stage 1 train as one process does."""
    x_BD = x_RBD[RANK]
    wrapped = nn.parallel.DistributedDataParallel(net(0, x_BD.device))
    train(wrapped, torch.optim.Adam(wrapped.parameters(), lr=LR, eps=EPS), x_BD, 1)
    error = largest_difference(wrapped, oracle)
    claim("PyTorch's DDP: error against one process", 0, error, atol=SLACK)
    for stage in (0, 1):
        model = net(RANK, x_BD.device)
        train(model, zero_of(model, sharded=stage == 1), x_BD)
        error = largest_difference(model, oracle)
        claim(f"stage {stage}, float32: error against one process", 0, error, atol=SLACK)


def check_mixed_precision(stage: int, x_BD: torch.Tensor) -> None:
    """Claim the bytes held, the elements handed over, and that weights follow their masters."""
    name = f"stage {stage}, bfloat16"
    before = storages_in_reach()
    model = net(RANK, x_BD.device).bfloat16()
    zero = zero_of(model, sharded=stage == 1)
    for _ in range(STEPS):
        with CountedElements() as counted:
            backward(model, x_BD)
            after = storages_in_reach()
            zero.step()
    held = sum(storage.nbytes() for at, storage in after.items() if at not in before) / P
    if stage == 0:
        times = {"all_reduce": 1, "reduce_scatter": 0, "all_gather": 0}
        claim(f"{name}: bytes held per parameter", 16, held, question=1)
    else:
        times = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 1}
        claim(f"{name}: bytes held per parameter", 4 + 12 / WORLD_SIZE, held, question=2)
    for collective, expected in times.items():
        elements = counted.elements[COLLECTIVES[collective]] / P
        claim(f"{name}: {collective}, elements / P", expected, elements, question=3)
    unlike = sum((b.weights_K != b.master_K.bfloat16()).sum() for b in zero.buckets)
    claim(f"{name}: weights unlike their master", 0, unlike)


# %% [markdown]
# The order of events: when a layer of the next forward pass begins, a hook counts the gathers that
# have been waited for by then. It is called after the layer's own hook, which waits.


# %%
def check_order(x_BD: torch.Tensor, oracle: nn.Module) -> None:
    """Claim how many gathers are over before a layer computes, if the step and if layers wait."""
    over: dict[str, list[int]] = {}
    for who in ("step waits", "layers wait"):
        model = net(RANK, x_BD.device)
        zero = zero_of(model, units=model if who == "layers wait" else ())
        train(model, zero, x_BD)
        over[who] = []
        for layer in model:
            layer.register_forward_pre_hook(partial(count_gathers, zero.buckets, over[who]))
        model(x_BD)
        print0(f"{'':13}{who}: gathers over before layers 0 to 3: {over[who]}")
    claim("step waits: gathers over before layer 0", LAYERS, over["step waits"][0], question=4)
    claim("layers wait: gathers over before layer 0", 1, over["layers wait"][0], question=4)
    claim("layers wait: gathers over before layer 3", LAYERS, over["layers wait"][3])
    error = largest_difference(model, oracle)
    claim("layers wait: error against one process", 0, error, atol=SLACK)


def count_gathers(buckets: list[Bucket], over: list[int], layer: nn.Module, inputs: tuple) -> None:
    over.append(sum(b.gathering is None for b in buckets))


# %% [markdown]
# ## 7. On GPUs: what the allocator says
#
# The bytes again, by CUDA's allocator, for half a billion parameters: what is allocated when
# backward has ended. (The slack is for cuBLAS, which keeps a workspace of some 32 MB.)


# %%
def measure_on_gpus(device: torch.device) -> None:
    """Claim the bytes that stages 0 and 1 allocate."""
    for stage in (0, 1):
        text = f"GPU: bytes allocated per parameter, stage {stage}"
        if device.type == "cpu" or not torch.cuda.is_bf16_supported(False):
            blocked(text, needs="1 GPU with bfloat16")
            continue
        x_BD = torch.randn(64, 8192, device=device, dtype=torch.bfloat16)
        gc.collect()
        before = torch.cuda.memory_allocated()
        model = nn.Sequential()
        for _ in range(8):
            model.append(nn.Linear(8192, 8192, False, device, torch.bfloat16))
        adam = torch.optim.Adam
        zero = ZeRO1(model.parameters(), adam, torch.float32, sharded=stage == 1)
        for _ in range(3):
            model(x_BD).square().mean().backward()
            held = torch.cuda.memory_allocated() - before
            zero.step()
        expected = 16 if stage == 0 else 4 + 12 / WORLD_SIZE
        claim(text, expected, held / (8 * 8192**2), atol=0.2)
        del model, zero


# %% [markdown]
# ## What you should have seen
#
# 1. Sixteen: 2 + 2 + 12. So 7 billion parameters need 112 GB on every rank, however many ranks
#    there are. Activations come on top: about s b h (34 + 5 a s / h) bytes per layer of a
#    transformer, for b sequences of s tokens, width h and a heads (Korthikanti et al., 2022),
#    without the second term if attention does not store its s x s matrix.
# 2. Seven, 4 + 12/n: 49 GB of the 80; and while the optimizer steps, 4/n more, the masters' float32
#    gradients. At a thousand ranks little more than 4 bytes remain, those of
#    weight and gradient. The paper's "4x less memory" for stage 1, and "8x" for stage 2, are such
#    limits for large n.
# 3. With data parallelism, P elements go through all-reduces. With ZeRO-1, P go through
#    reduce-scatters and P through all-gathers, the two halves. Over a ring both send 2(n-1)/n P.
# 4. Four if the step waits, one if each layer waits for its own. So stage 1 is free in bytes, and
#    in time only if its gathers hide. 7 billion weights are 14 GB, of which each of 8 ranks
#    receives 12.25: at 50 GB/s, if nothing hides them, no GPU computes for 0.25 s of every step.
#
# The weights follow one process to some 1e-8, sharded or not, as with PyTorch's DDP. In bfloat16
# each weight is its master, rounded, so every update has arrived. That does not say that the
# masters are right: their gradients were made and added up with bfloat16's 8 significant bits.
# Megatron-LM therefore keeps float32 gradients, 18 bytes per parameter instead of 16.
#
# **Try.** Without the copy the float32 claims pass, for there the master *is* the weight. In
# bfloat16 no weight of stage 1 ever changes, and only the comparison with the masters notices. With
# an all-reduce instead of the reduce-scatter the training stays right, since the shard is a view of
# the sum; only the count of elements tells.
#
# **When to use it:** where data parallelism fits but is tight. If 4 bytes per parameter are already
# too many, take stage 2 or 3. On real systems this is Megatron-LM's distributed optimizer and
# DeepSpeed's stage 1. PyTorch's `ZeroRedundancyOptimizer` shards the state too, but lets DDP
# all-reduce the gradients and then broadcasts the weights: 1.5 times the elements. At a thousand
# ranks the shards of a bucket are small and a gather is all latency; take fewer, larger buckets
# then, or shard within a group of ranks only.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    generator = torch.Generator().manual_seed(2)
    x_RBD = torch.randn(WORLD_SIZE, 8, D, generator=generator).to(device)
    oracle = net(0, device)
    adam = torch.optim.Adam(oracle.parameters(), lr=LR, eps=EPS)
    train(oracle, adam, x_RBD.flatten(0, 1), 1)
    check_weights(x_RBD, oracle)
    gc.freeze()  # what there is already need not be searched for tensors
    for stage in (0, 1):
        check_mixed_precision(stage, x_RBD[RANK].bfloat16())
    check_order(x_RBD[RANK], oracle)
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
