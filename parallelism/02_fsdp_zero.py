"""ZeRO: why 7 billion parameters do not train on 80 GB, and stage 1 from scratch
==============================================================================

**Question.** The weights of a model of 7 billion parameters take 14 GB in bfloat16. Why does it not
train on a GPU of 80 GB, and what do n ranks gain if each keeps 1/n of the optimizer's state?

**Predict**, and write it down before you run. The model is bfloat16. Adam updates a float32 copy of
it. The gradients are cast to float32 only just before it steps.

1. How many bytes per parameter does a rank of data parallelism hold when backward has ended?
2. How many when its optimizer begins to step?
3. How many at that moment in ZeRO stage 1, on 4 ranks, each of which keeps 1/4 of all that the
   optimizer needs?
4. An all-reduce of the gradients counts as 2 elements per parameter, a reduce-scatter or an
   all-gather as 1. ZeRO-1 must also hand the updated weights to all ranks. How many elements per
   parameter does its step take?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_fsdp_zero.py   # NCCL on 4 GPUs, else gloo
    python 02_fsdp_zero.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `zero1_step` replace `weights_K.copy_(master_K)` by `pass`, so that the weights never
see an update: which claims notice? Put it back, and replace the reduce-scatter by
`dist.all_reduce(gradients_N)`: is the training still right?

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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: N elements laid end to end, K = N / n of them on one of n ranks; B samples of D features
# on a rank, R ranks. P counts the parameters of a model.

# %% [markdown]
# ## 1. Sixteen bytes per parameter, on every rank
#
# **Mixed precision** computes in bfloat16 and updates in float32. Forward and backward use a weight
# and a gradient of 2 bytes each. The optimizer adds a float32 copy of the weight, its **master** (4
# bytes), and Adam's two moments (4 + 4). That is 16 bytes per parameter, or 112 GB for 7 billion,
# before a single activation. When the optimizer begins to step, each master also needs its gradient
# in float32: 4 more.
#
# In data parallelism *every* rank holds all of this. The Zero Redundancy Optimizer, **ZeRO**
# (Rajbhandari et al., 2020), leaves each of n ranks 1/n of more and more of it: stage 1 of what the
# optimizer needs, stage 2 of the gradients too, and stage 3, **FSDP** in PyTorch, of the weights as
# well. This is what one of 4 ranks holds when backward has ended, to scale, and in the last column
# when its optimizer begins to step:
#
#            weights  gradients  masters and Adam           bytes per parameter    when its
#              2P        2P             12P                 after backward         step begins
#     none    [####]   [####]   [########################]  16                     20
#     ZeRO-1  [####]   [####]   [######                  ]   4 + 12/4 = 7           8
#     ZeRO-2  [####]   [#   ]   [######                  ]   2 + 14/4 = 5.5         6.5
#     ZeRO-3  [#   ]   [#   ]   [######                  ]       16/4 = 4           5
#
# While it steps, Adam makes more tensors. PyTorch's on GPUs makes one, the root of the second
# moment: 4 bytes more per element of the master, 24 bytes at the peak and 9 in ZeRO-1. It makes
# none if it is told `fused=True`.

# %% [markdown]
# ## 2. The idea: the optimizer steps between the two halves of an all-reduce
#
# In data parallelism all ranks add up their gradients, and then each computes the same update of
# all weights. It would be enough if one rank updated a weight and told the others. This costs no
# more communication, because an all-reduce has two halves. A **reduce-scatter** leaves each rank
# the sum of one n-th of the elements, its **shard**. An **all-gather** then gives all shards to all
# ranks. Below, rank r brings ar, br, cr and dr, and A is a0 + a1 + a2 + a3:
#
#                       rank 0         rank 1         rank 2         rank 3
#     before            a0 b0 c0 d0    a1 b1 c1 d1    a2 b2 c2 d2    a3 b3 c3 d3
#     reduce-scatter    A              B              C              D
#     all-gather        A  B  C  D     A  B  C  D     A  B  C  D     A  B  C  D
#
# After the first half a rank knows the gradient of its shard, and that is all it needs to update
# this shard. So ZeRO-1 lets the optimizer step between the halves, and the second half carries new
# weights, where in data parallelism it carries gradients:
#
#     DDP       gradients --reduce-scatter, all-gather--> all gradients, update of all weights
#     ZeRO-1    gradients --reduce-scatter--> own gradients, own update --all-gather--> all weights
#
# Here are both. All N weights lie in one flat tensor, and all gradients in another. The master is
# the float32 copy that the optimizer updates: of all weights in the first function, of this rank's
# shard in the second. Gradients are divided by n *before* they are added up: in float16 their sum
# may overflow where their mean does not.


# %%
def own_shard(x_N: torch.Tensor) -> torch.Tensor:
    """This rank's n-th of a flat tensor: a view, so what is written to it is written to x_N."""
    return x_N.tensor_split(WORLD_SIZE)[RANK]


def data_parallel_step(
    weights_N: torch.Tensor,
    gradients_N: torch.Tensor,
    master_N: nn.Parameter,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Each rank gets all gradients and updates all weights."""
    gradients_N /= WORLD_SIZE
    dist.all_reduce(gradients_N)
    master_N.grad = gradients_N.to(master_N.dtype)
    optimizer.step()
    weights_N.copy_(master_N)


def zero1_step(
    weights_N: torch.Tensor,
    gradients_N: torch.Tensor,
    master_K: nn.Parameter,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Each rank gets the gradients of its shard, updates it, and gathers the others' shards."""
    weights_K = own_shard(weights_N)
    gradients_K = own_shard(gradients_N)
    gradients_N /= WORLD_SIZE
    dist.reduce_scatter_tensor(gradients_K, gradients_N)  # in place: the sum takes my shard's place
    master_K.grad = gradients_K.to(master_K.dtype)
    optimizer.step()
    weights_K.copy_(master_K)
    dist.all_gather_into_tensor(weights_N, weights_K)  # in place: my shard lies there already


# %% [markdown]
# ## 3. From a module's parameters to flat tensors
#
# (You may skip this section: the two steps above are the idea.) Weights come in all shapes, and few
# can be divided by n. So lay them end to end and add a few zeros: N elements then make n shards of
# K = N / n. The parameters become views of the flat tensor, and the module notices nothing. Each
# `p.grad` is a view of the other one, and autograd adds to it in place:
#
#     weights_N    [         weight 1        |   bias 1  |    weight 2   | bias 2|0]
#     shards       [     rank 0    |     rank 1    |     rank 2    |     rank 3    ]
#
# A shard may begin and end in the middle of a parameter. SGD, Adam and AdamW do not care, for they
# treat every element by itself. (Muon and Adafactor look at whole matrices and need another
# division.) Clipping needs the norm of all gradients: one more all-reduce, of the shards' sums of
# squares.


# %%
class ZeRO1:
    """Trains parameters, which have values and one dtype, by the step above.

    All ranks start from rank 0's weights. `optimizer_class`, an elementwise one, is built with
    `options` on this rank's master, and stands in `optimizer`. A parameter that nothing used has a
    gradient of zero. `sharded=False` is data parallelism, to compare with.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer_class: type[torch.optim.Optimizer],
        sharded: bool = True,
        **options: object,
    ) -> None:
        self.trained = trained_of(parameters)
        values = torch.cat([p.detach().flatten() for p in self.trained])
        self.weights_N = F.pad(values, (0, -len(values) % WORLD_SIZE))
        self.gradients_N = torch.zeros_like(self.weights_N)
        dist.broadcast(self.weights_N, src=0)
        for p, weight in zip(self.trained, views_of(self.weights_N, self.trained), strict=True):
            p.data = weight
        self.gradients = views_of(self.gradients_N, self.trained)
        mine = own_shard(self.weights_N) if sharded else self.weights_N
        at_least_float32 = torch.promote_types(mine.dtype, torch.float32)
        self.master = nn.Parameter(mine.to(at_least_float32, copy=True))
        self.optimizer = optimizer_class([self.master], **options)
        self.one_step = zero1_step if sharded else data_parallel_step
        self.zero_grad()

    def zero_grad(self) -> None:
        self.gradients_N.zero_()
        for p, gradient in zip(self.trained, self.gradients, strict=True):
            p.grad = gradient
        self.optimizer.zero_grad()  # the master's gradient goes

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients, update the weights, set the gradients to zero."""
        if any(p.grad is not g for p, g in zip(self.trained, self.gradients, strict=True)):
            raise ValueError("gradients must stay in place, got others: use ZeRO1.zero_grad")
        self.one_step(self.weights_N, self.gradients_N, self.master, self.optimizer)
        self.zero_grad()


# %% [markdown]
# Two helpers: views into a flat tensor, and which parameters are trained. Frozen ones and buffers
# stay as they are. A model with two dtypes, or with groups that have a learning rate each, takes
# one ZeRO1 for each of them.


# %%
def views_of(flat_N: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Parts of a flat tensor, one after the other, in the shapes of the parameters."""
    sizes = [p.numel() for p in parameters]
    parts = flat_N[: sum(sizes)].split(sizes)
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def trained_of(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return those that are trained; ValueError if they do not fit into one flat tensor."""
    trained = [p for p in parameters if p.requires_grad]
    dtypes = {p.dtype for p in trained}
    if len(dtypes) != 1:
        got = f"got {len(dtypes)}: build a ZeRO1 for each"
        raise ValueError(f"trained parameters must have one dtype, {got}")
    if any(isinstance(p, nn.UninitializedParameter) or p.is_meta for p in trained):
        raise ValueError("parameters must have values, got none: load weights first")
    return trained


# %% [markdown]
# ## 4. How it is measured: bytes and elements
#
# A small model is trained in bfloat16, each step with two micro-batches.
#
# **Bytes** are those of all storages behind weights, gradients, masters and moments, at two
# moments: when backward has ended, and in a hook that PyTorch's optimizers call as they begin to
# step. What Adam then makes for itself is not counted, nor anything else that the list in
# `bytes_held` does not name. (Section 6 asks CUDA's allocator.)
#
# **Elements** are noted beneath torch's dispatcher: each collective's name, and the elements of its
# largest tensor. An all-reduce counts twice, as question 4 says, so for data parallelism the row
# only shows that there is one. What then travels is up to the backend. Over a ring each rank sends
# (n-1)/n of this count.


# %%
D, STEPS = 96, 3
HIDDEN = 24 * WORLD_SIZE
P = 2 * D * HIDDEN  # n divides it, so there is no padding to count
ADAM = {"lr": 0.01, "eps": 0.01}
SHARDED = {"data parallelism": False, "ZeRO-1": True}
COUNTED = {"c10d::allreduce_": 2, "c10d::_reduce_scatter_base_": 1, "c10d::_allgather_base_": 1}


def mlp(seed: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(seed)
    up = nn.Linear(D, HIDDEN, bias=False)
    down = nn.Linear(HIDDEN, D, bias=False)
    return nn.Sequential(up, nn.ReLU(), down).to(device)


def backward(model: nn.Module, x_BD: torch.Tensor, micro_batches: int = 2) -> None:
    """Add up gradients of the loss: how far the outputs are from the inputs in reverse order."""
    for part_BD in x_BD.chunk(micro_batches):
        loss = (model(part_BD) - part_BD.flip(-1)).square().mean()
        (loss / micro_batches).backward()


class Log(TorchDispatchMode):
    """Adds up the elements of this rank's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in COUNTED:
            sizes = [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.elements += COUNTED[func._schema.name] * max(sizes)
        return func(*args, **(kwargs or {}))


def bytes_held(model: nn.Module, zero: ZeRO1) -> float:
    """Return the bytes per parameter that this rank holds."""
    tensors = [*model.parameters(), zero.master, zero.weights_N, zero.gradients_N]
    tensors += [t.grad for t in tensors if t.grad is not None]
    for moments in zero.optimizer.state.values():
        tensors += [t for t in moments.values() if t.dim() > 0]  # without `step`, a number
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / P


# %% [markdown]
# Bytes and elements are those of the last step, when the moments exist.


# %%
def check_costs(name: str, x_BD: torch.Tensor) -> None:
    """Claim the bytes held and the elements counted, in bfloat16."""
    model = mlp(0, x_BD.device).bfloat16()
    zero = ZeRO1(model.parameters(), torch.optim.Adam, SHARDED[name], **ADAM)
    in_step = []
    zero.optimizer.register_step_pre_hook(lambda *_: in_step.append(bytes_held(model, zero)))
    for _ in range(STEPS):
        backward(model, x_BD)
        after_backward = bytes_held(model, zero)
        with Log() as log:
            zero.step()
    elements = log.elements / P
    if SHARDED[name]:
        after = (4 * WORLD_SIZE + 12) / WORLD_SIZE
        most = (4 * WORLD_SIZE + 16) / WORLD_SIZE
        claim(f"{name}: bytes held after backward", after, after_backward)
        claim(f"{name}: bytes held in optimizer.step", most, in_step[-1], question=3)
        claim(f"{name}: elements per parameter and step", 2, elements, question=4)
    else:
        claim(f"{name}: bytes held after backward", 16, after_backward, question=1)
        claim(f"{name}: bytes held in optimizer.step", 20, in_step[-1], question=2)
        claim(f"{name}: elements per parameter and step", 2, elements)


# %% [markdown]
# ## 5. How it is measured: the same weights as one process
#
# Three steps on ranks that are seeded differently, against the **oracle**, one process that sees
# all samples. PyTorch's DDP is the third way. All is float64 here, which rounds by 2**-53 = 1.1e-16
# of a number. Ranks add up in another order than one process, so each of some thousand additions
# may round otherwise: an error of 1e-12 is allowed. One update moves weights by some 5e-3.


# %%
SLACK = 1e-12


def train(
    model: nn.Module,
    optimizer: ZeRO1 | torch.optim.Optimizer,
    x_BD: torch.Tensor,
    micro_batches: int,
) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model, x_BD, micro_batches)
        optimizer.step()


def error_of(model: nn.Module, oracle: nn.Module) -> float:
    """Return the largest difference between the weights of two modules."""
    pairs = zip(model.parameters(), oracle.parameters(), strict=True)
    return torch.stack([(ours - due).abs().max() for ours, due in pairs]).max().item()


def check_weights(x_RBD: torch.Tensor) -> None:
    """Claim that DDP, data parallelism and ZeRO-1 train as one process does."""
    device = x_RBD.device
    oracle = mlp(0, device).double()
    train(oracle, torch.optim.Adam(oracle.parameters(), **ADAM), x_RBD.flatten(0, 1), 1)
    wrapped = nn.parallel.DistributedDataParallel(mlp(0, device).double())
    train(wrapped, torch.optim.Adam(wrapped.parameters(), **ADAM), x_RBD[RANK], 1)
    error = error_of(wrapped, oracle)
    claim("PyTorch's DDP: error against one process", 0, error, atol=SLACK)
    for name, sharded in SHARDED.items():
        model = mlp(RANK, device).double()
        zero = ZeRO1(model.parameters(), torch.optim.Adam, sharded, **ADAM)
        train(model, zero, x_RBD[RANK], 2)
        claim(f"{name}: error against one process", 0, error_of(model, oracle), atol=SLACK)


# %% [markdown]
# ## 6. On GPUs: what the allocator says
#
# The bytes again, by CUDA's allocator, for half a billion parameters, at the same two moments. It
# counts everything. The slack, 0.2 bytes or 107 MB, is for the workspaces of cuBLAS.


# %%
def allocated(sharded: bool, device: torch.device) -> tuple[float, float]:
    """Return the bytes per parameter after backward, and as the optimizer begins to step."""
    gc.collect()
    x_BD = torch.randn(64, 8192, device=device, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    layers = [nn.Linear(8192, 8192, False, device, torch.bfloat16) for _ in range(8)]
    model = nn.Sequential(*layers)
    zero = ZeRO1(model.parameters(), torch.optim.Adam, sharded)
    in_step = []
    zero.optimizer.register_step_pre_hook(lambda *_: in_step.append(torch.cuda.memory_allocated()))
    for _ in range(3):
        model(x_BD).square().mean().backward()
        after_backward = torch.cuda.memory_allocated()
        zero.step()
    parameters = sum(p.numel() for p in model.parameters())
    return (after_backward - before) / parameters, (in_step[-1] - before) / parameters


def measure_on_gpus(device: torch.device) -> None:
    """Claim the bytes that data parallelism and ZeRO-1 allocate."""
    for name, sharded in SHARDED.items():
        after = f"GPU, {name}: bytes after backward"
        most = f"GPU, {name}: bytes in optimizer.step"
        if device.type == "cpu" or not torch.cuda.is_bf16_supported(False):
            blocked(after, needs="1 GPU with bfloat16")
            blocked(most, needs="1 GPU with bfloat16")
            continue
        after_backward, in_step = allocated(sharded, device)
        shards = WORLD_SIZE if sharded else 1
        claim(after, 4 + 12 / shards, after_backward, atol=0.2)
        claim(most, 4 + 16 / shards, in_step, atol=0.2)


# %% [markdown]
# ## What you should have seen
#
# 1. Sixteen: 2 + 2 + 12. So 7 billion parameters need 112 GB on every rank, however many ranks
#    there are. Activations come on top. (DDP's buckets are a second copy of the gradients, 18 bytes
#    in all, unless it is told `gradient_as_bucket_view=True`.)
# 2. Twenty, or 140 GB: from then on each master has a gradient in float32. The root that Adam makes
#    then, on GPUs, comes on top: 24 at the peak, or 168 GB.
# 3. Eight, 4 + 16/n: 56 GB of the 80, and with that root 9, or 63 GB. When backward has ended it is
#    7, or 49 GB. At a thousand ranks little more than 4 bytes remain, those of weight and gradient.
#    The paper's "4x less memory" for stage 1, and "8x" for stage 2, are such limits for large n.
# 4. Two, just as many: the gathered weights take the place of gathered gradients.
#
# The weights follow one process to the last digits of float64, sharded or not, as with PyTorch's
# DDP. In bfloat16 training is coarser: gradients are made and added up with 8 significant bits.
# Megatron-LM therefore keeps float32 gradients, 18 bytes per parameter at any time.
#
# **Try.** Without the copy the master learns and the model does not: ZeRO-1's error against one
# process fails, while bytes and elements stay. With an all-reduce instead of the reduce-scatter the
# training stays right, since the shard is a view of the sum. Only the count of elements tells: 3
# instead of 2, 1.5 times as many.
#
# **On GPUs** both halves take time. 7 billion weights are 14 GB, of which each of 8 ranks receives
# 12.25. If all ranks are in one machine, over NVLink 4 (450 GB/s one way), an all-gather takes 0.03
# s, and the reduce-scatter as long. If each rank is in a machine of its own, with a network card of
# 400 Gb/s (50 GB/s), they take 0.25 s each. Backward can hide the reduce-scatters, as DDP hides its
# all-reduces (parallelism/04_buckets_and_overlap.py). The gathers carry new weights, so only the
# next forward pass can hide them, layer by layer: Megatron-LM's `--overlap-param-gather` does that.
# Sharding saves time, too: Adam reads 16 bytes per parameter and writes 12, 196 GB for all 7
# billion. That is 0.06 s at the 3.35 TB/s of an H100, and an eighth of it on each of 8 ranks.
#
# **When to use it.** With data parallelism and Adam, when the 16 to 24 bytes per parameter do not
# fit or leave too little for activations, and 4 + 20/n do fit. No more is sent than before. If 4
# bytes per parameter are already too many, take stage 2 or 3.
#
# **In other systems.** Megatron-LM's distributed optimizer and DeepSpeed's stage 1 are what you
# have built. PyTorch's `ZeroRedundancyOptimizer` shards the state too, but lets DDP all-reduce the
# gradients (2) and then broadcasts the weights (1): 3 elements, as in *Try*. Checkpoints of sharded
# state: fsdp/06_fsdp_checkpoint.py.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    generator = torch.Generator().manual_seed(2)
    x_RBD = torch.randn(WORLD_SIZE, 8, D, generator=generator, dtype=torch.float64).to(device)
    for name in SHARDED:
        check_costs(name, x_RBD[RANK].bfloat16())
    check_weights(x_RBD)
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
