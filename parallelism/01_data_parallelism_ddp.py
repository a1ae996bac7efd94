"""Data parallelism: average the gradients by hand, then with DistributedDataParallel
==================================================================================

**Question.** Several ranks hold the same model and see different samples. What must they tell each
other, so that training goes as if one process had seen all the samples?

**Predict**, and write it down before you run:

1. The ranks start from the same weights and train for 150 steps. They exchange nothing but
   gradients. How far apart are their weights in the end: nothing, rounding errors, or more?
2. How far are they then from the weights of one process that saw all the samples: nothing, rounding
   errors, or more?
3. The model has 8 gradient tensors, 341 kB together. To average them one by one takes 8 all-reduces
   per step. PyTorch's DistributedDataParallel (DDP) puts gradients together before it sends them,
   up to 25 MiB at a time. How many all-reduces does it make per step?

**Run.** Type one of these lines in this file's folder, or `course run parallelism/01` in any. The
ranks use NCCL on 4 GPUs, else gloo.

    torchrun --standalone --nproc-per-node=4 01_data_parallelism_ddp.py
    python 01_data_parallelism_ddp.py

Not run on several GPUs.

**Try.** Delete the line `parameter.grad /= WORLD_SIZE`: do the ranks' weights drift apart now? Put
it back, and delete the line `sampler.set_epoch(epoch)`: what fails?

**Before.** communication/01_nccl_collectives.py: what an all-reduce and a broadcast do.

**Next.** exercises/06_gradient_accumulation and exercises/07_distributed_sampler; then
parallelism/02_fsdp_zero.py: what every rank holds, and how ranks can share it. How DDP hides its
all-reduces: parallelism/04_buckets_and_overlap.py.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

GLOBAL_BATCH = 96  # samples per step, all ranks together (95 on 5 ranks: 19 each)
EPOCHS = 10  # passes over the data
LEARNING_RATE = 0.1
MOMENTUM = 0.9
Batch = tuple[torch.Tensor, torch.Tensor]  # image_BD, label_B: B samples of D = 64 pixels

# %% [markdown]
# ## 1. Data parallelism by hand: broadcast the weights, average the gradients
#
# In **data parallelism** every rank holds the whole model and sees its own share of each batch. Two
# rules make n ranks train as one process would. They start from the same weights, so rank 0
# broadcasts its own. And in every step each optimizer gets the same gradient: the mean over ranks.
# Equal weights and equal gradients make equal weights, so the weights never travel again:
#
#                    rank 0                       rank 1                       rank 2
#     start          weights ----broadcast------> weights ----broadcast------> weights
#
#     every step     samples 0, 3, 6, ...         samples 1, 4, 7, ...         samples 2, 5, 8, ...
#                    forward, backward            forward, backward            forward, backward
#                    gradient g_0                 gradient g_1                 gradient g_2
#                        |                            |                            |
#                        +-------------- all-reduce: (g_0 + g_1 + g_2) / 3 --------+
#                        |                            |                            |
#                    optimizer.step()             optimizer.step()             optimizer.step()
#
# Why the mean? A loss is usually a mean over samples. If all ranks hold equally many samples, the
# mean of their gradients is the gradient of the whole batch's mean loss. With 3 samples here and 1
# there it is not: the single sample would weigh three times as much as the others. Then a rank's
# gradient must be weighted by its share of the samples (or, for padded text, of the valid tokens).


# %%
def broadcast_weights(model: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def average_gradients(model: nn.Module) -> None:
    """After backward: replace each gradient by its mean over ranks."""
    for parameter in model.parameters():
        parameter.grad /= WORLD_SIZE  # before the sum, which might overflow in float16
        dist.all_reduce(parameter.grad)


def train_by_hand(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Train by SGD on this rank's samples, as one process would on those of all ranks."""
    broadcast_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    for image_BD, label_B in batches:
        optimizer.zero_grad()
        cross_entropy(model(image_BD), label_B).backward()
        average_gradients(model)  # the one line that training on a single rank does without
        optimizer.step()


# %% [markdown]
# That is all of data parallelism: *the same weights once, the same mean gradient in every step.*
# The rest of this lesson is what PyTorch has for it: a sampler that deals out the samples, and a
# wrapper that averages the gradients.

# %% [markdown]
# ## 2. DistributedSampler: every rank draws its own samples
#
# `DistributedSampler` shuffles all indices with the seed `seed + epoch`, which the ranks share, and
# gives rank r every n-th of them, from the r-th on. The mean asks for equally many samples on each
# rank, so where n does not divide their number, it repeats a few. The sampler cannot know the
# epoch. Without `set_epoch` each epoch comes in the order of the first, and nothing complains.


# %%
def share_of(rank: int, data: TensorDataset) -> Iterator[Batch]:
    """Yield the batches of one rank, epoch after epoch."""
    sampler = DistributedSampler(data, WORLD_SIZE, rank)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // WORLD_SIZE, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


# %% [markdown]
# ## 3. DistributedDataParallel: the same, while backward still runs
#
# Averaging by hand is right, but each tensor pays the latency of an all-reduce, and none starts
# before backward has ended. `DistributedDataParallel` (DDP) does both rules for you. It broadcasts
# rank 0's weights when it wraps a module (and buffers, such as the statistics of batch norm, before
# every forward pass). Then it listens for gradients. Backward makes those of the last layer first,
# so they can travel while it computes the others:
#
#     by hand    | forward | backward: layer 4, 3, 2, 1 | all-reduce 4, 3, 2, 1 | step |
#
#     DDP        | forward | backward: layer 4, 3, 2, 1 |      | step |
#                                 | all-reduce {4, 3} | {2} | {1} |
#
# Those in { } share an all-reduce: they are copied into a **bucket**, which is sent when it has
# some 25 MiB (the first one 1 MiB), or when no gradient is left. (In the very first step all
# gradients share one bucket: DDP learns there in which order they come.) When `backward()` returns,
# the gradients are averaged, so the training loop is that of one process.
# parallelism/04_buckets_and_overlap.py builds such a wrapper.


# %%
def wrap(model: nn.Module) -> DistributedDataParallel:
    """Make a module data-parallel: after each backward, all ranks hold the mean gradients."""
    device = next(model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, ids)


def train(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Train by SGD. Nothing here knows of ranks; a model that `wrap` has made does."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    for image_BD, label_B in batches:
        optimizer.zero_grad()
        cross_entropy(model(image_BD), label_B).backward()
        optimizer.step()


# %% [markdown]
# ## 4. How it is measured
#
# The data are scikit-learn's 1,797 handwritten digits. Every fifth is kept for the test. Every rank
# seeds its weights differently, so that only a broadcast can make them agree. The **oracle** is one
# process: it starts from rank 0's weights, and its batch of a step is what all ranks draw. All
# weights are float64, so rounding errors are some 1e-15 and a mistake is not.


# %%
def digits(device: torch.device) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set of (image, label), in float64."""
    read = [None, None]
    if RANK == 0:
        from sklearn.datasets import load_digits  # takes a second, which one rank has to spend

        read = list(load_digits(return_X_y=True))
    dist.broadcast_object_list(read)
    image_ND = torch.tensor(read[0] / 8 - 0.6, device=device)
    label_N = torch.tensor(read[1], device=device)
    is_test_N = torch.arange(len(label_N), device=device) % 5 == 0
    train_set = TensorDataset(image_ND[~is_test_N], label_N[~is_test_N])
    return train_set, TensorDataset(image_ND[is_test_N], label_N[is_test_N])


def net(device: torch.device, seed: int) -> nn.Sequential:
    """Four linear layers, 8 parameter tensors, 341 kB."""
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise([64, 128, 128, 128, 10]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(device, torch.float64)


def largest_difference(ours: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    pairs = zip(ours, expected, strict=True)
    return torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()  # NaN if one is


# %% [markdown]
# What the samplers draw is read off a data set whose samples are their own numbers. Then the model
# is trained three times: by hand, with DDP, and in one process.


# %%
def check_sampler(samples: int, device: torch.device) -> None:
    """Claim how many samples the ranks draw, and that each epoch has an order of its own."""
    numbers = TensorDataset(torch.arange(samples, device=device))
    mine = torch.cat([number_B for (number_B,) in share_of(RANK, numbers)])
    everyone = [torch.empty_like(mine) for _ in range(WORLD_SIZE)]
    dist.all_gather(everyone, mine)
    epochs = torch.stack(everyone, dim=1).view(EPOCHS, -1)  # a row per epoch
    divisible = math.ceil(samples / WORLD_SIZE) * WORLD_SIZE
    claim("samples drawn in one epoch, by all ranks", divisible, len(epochs[0]))
    claim("different samples among them", samples, len(epochs[0].unique()))
    claim("different orders in all epochs", EPOCHS, len(epochs.unique(dim=0)))


def batches_of_all(data: TensorDataset) -> Iterator[Batch]:
    """Yield what all ranks together draw for each step."""
    for shares in zip(*[share_of(rank, data) for rank in range(WORLD_SIZE)], strict=True):
        yield torch.cat([image_BD for image_BD, _ in shares]), torch.cat([y_B for _, y_B in shares])


def check_training(train_set: TensorDataset, test_set: TensorDataset, device: torch.device) -> None:
    """Train by hand, with DDP and in one process; claim that all agree."""
    by_hand = net(device, seed=RANK)
    train_by_hand(by_hand, share_of(RANK, train_set))
    ddp = net(device, seed=RANK)
    train(wrap(ddp), share_of(RANK, train_set))
    alone = net(device, seed=0)
    batches = list(batches_of_all(train_set))
    train(alone, batches)
    # A generous estimate: a step's gradient sums GLOBAL_BATCH terms below 1 in another order,
    # off by that many eps at most. SGD adds it to the weights times lr / (1 - momentum), or 1.
    atol = len(batches) * GLOBAL_BATCH * torch.finfo(torch.float64).eps
    for name, model in (("by hand", by_hand), ("DDP", ddp)):
        check_weights(name, model, alone, atol)
        accuracy = accuracy_on(test_set, model)
        claim(f"{name}: accuracy on new digits", 0.95, accuracy, ">=", varies=True)


def check_weights(name: str, model: nn.Module, alone: nn.Module, atol: float) -> None:
    if WORLD_SIZE == 1:
        blocked(f"{name}: weights, difference between ranks", needs="2 ranks")
    else:
        of_rank_0 = [parameter.detach().clone() for parameter in model.parameters()]
        for tensor in of_rank_0:
            dist.broadcast(tensor, src=0)
        between_ranks = largest_difference(model.parameters(), of_rank_0)
        claim(f"{name}: weights, difference between ranks", 0, between_ranks, question=1)
    error = largest_difference(model.parameters(), alone.parameters())
    claim(f"{name}: weights, error against one process", 0, error, atol=atol, question=2)


def accuracy_on(test_set: TensorDataset, model: nn.Module) -> float:
    image_ND, label_N = test_set.tensors
    return (model(image_ND).argmax(1) == label_N).double().mean().item()


# %% [markdown]
# All-reduces are counted beneath torch's dispatcher, where those that DDP makes from C++ pass, too.
# What is counted is what a rank hands over. What a backend then sends is up to it: a ring sends
# 2(n-1)/n times as much (communication/03_ring_and_tree.py).


# %%
class AllReduces(TorchDispatchMode):
    """Notes the bytes of each all-reduce of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.allreduce_.default:
            self.nbytes.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def check_communication(train_set: TensorDataset, device: torch.device) -> None:
    """Claim what a step hands to all-reduces: by hand, and with DDP."""
    mine = train_set[8 * RANK : 8 * RANK + 8]
    with AllReduces() as seen:
        train_by_hand(net(device, seed=0), [mine])
    claim("by hand: all-reduces per step", 8, len(seen.nbytes))

    ddp = wrap(net(device, seed=0))
    train(ddp, [mine, mine])  # past the first step, which has one bucket of any size
    with AllReduces() as seen:
        train(ddp, [mine])
    gradient_bytes = sum(parameter.nbytes for parameter in ddp.parameters())
    claim("DDP: all-reduces per step", 1, len(seen.nbytes), question=3)
    claim("DDP: bytes per step", gradient_bytes, sum(seen.nbytes))


# %% [markdown]
# ## 5. On GPUs: what overlap saves
#
# No question is about this section, and it needs two GPUs. Eight layers 8,192 wide have 0.5 billion
# parameters. In bfloat16 their gradients are 1.1 GB per step. Three steps take turns: one without
# communication (`no_sync` tells DDP to leave it out), one that averages by hand, and DDP's. What a
# step takes longer than the first is **exposed**. Each layer is a bucket, so DDP exposes at least
# the last bucket's all-reduce, an eighth of them, and copies into buckets and back. Over PCIe 4.0
# it also exposes what takes longer than backward. So the row allows much: four fifths of what is
# exposed by hand. CUDA events are the clock.


# %%
def median_ms_in_turn(ways: dict[str, Callable], repeats: int = 20) -> dict[str, float]:
    """Return the median milliseconds of each way on this rank's GPU; three rounds warm up."""
    times = {name: [] for name in ways}
    for _ in range(repeats + 3):
        for name, way in ways.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            dist.barrier()
            start.record()
            way()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(of_way[3:]) for name, of_way in times.items()}


def measure_on_gpus(device: torch.device) -> None:
    """Claim that DDP exposes less than averaging by hand."""
    what = "exposed ms per step, DDP / by hand"
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked(what, needs="2 GPUs with bfloat16")
        return
    layers = [nn.Linear(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(8)]
    ddp = wrap(nn.Sequential(*layers))
    x_BD = torch.randn(16_384, 8192, device=device, dtype=torch.bfloat16)

    def step() -> None:
        ddp.zero_grad()
        ddp(x_BD).square().mean().backward()

    def step_alone() -> None:
        with ddp.no_sync():
            step()

    def step_by_hand() -> None:
        step_alone()
        average_gradients(ddp)

    ms = median_ms_in_turn({"alone": step_alone, "by hand": step_by_hand, "DDP": step})
    for name, of_way in ms.items():
        efficiency = ms["alone"] / of_way
        print0(f"{'':13}{name}: {of_way:.1f} ms per step, scaling efficiency {efficiency:.2f}")
    exposed = (ms["DDP"] - ms["alone"]) / (ms["by hand"] - ms["alone"])
    claim(what, 0.8, exposed, "<=", timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. Nothing, not even the last bit. An all-reduce adds up each element once, in one order, and
#    gives all ranks that sum. So every rank adds the same numbers to the same weights.
# 2. Rounding errors, some 1e-15 here: one process adds up the same terms in another order than n
#    ranks. So data parallelism *is* training with the larger batch: no better, no worse. It is the
#    larger batch that may want a larger learning rate: for SGD in proportion, after a warm-up
#    (Goyal et al., 2017).
# 3. One: all 341,072 bytes share a bucket. A model of billions has many, and only the last one's
#    all-reduce must come after backward.
#
# The 4 ranks draw 1,440 samples in an epoch, of which 1,437 are different. In training that does no
# harm. When you *evaluate*, drop the repeated ones, or three samples count twice.
#
# **Try.** Without the division the ranks still agree with each other, on a step n times too large.
# The comparison with one process fails (and perhaps the accuracy), and no row between ranks does:
# ranks that agree with each other prove little. Without `set_epoch` only the number of different
# orders tells, for the one process follows the same order.
#
# **When to use it.** If the model, its gradients, its optimizer and its activations fit on one GPU,
# data parallelism is the first thing to try. (With Adam in mixed precision that is 16 bytes per
# parameter, and more while it steps, as parallelism/02_fsdp_zero.py counts, and activations.) It
# shards nothing, so more GPUs do not help a model that does not fit. And every rank needs samples
# enough to keep its GPU busy: at a thousand ranks a batch of 32 per rank is 32,000 samples, which
# many models no longer learn well from.
#
# **On GPUs.** Next to some 0.1 s of computation on 8 H100, the 1.1 GB of section 5 travel for 6 ms
# over NVLink (2 x 7/8 x 1.1 GB, if an all-reduce gets 330 of the 450 GB/s that NVLink 4 has one
# way). Over PCIe 4.0 they travel as long as a step computes (0.1 s at 20 GB/s). A model with batch
# norm needs `SyncBatchNorm` where a rank's share is small, since each rank normalizes with the
# statistics of its own samples.


# %%
def main() -> None:
    command_line()
    launch(range(1, GLOBAL_BATCH + 1))
    if WORLD_SIZE > GLOBAL_BATCH:
        refuse(f"a rank needs a sample per step: at most {GLOBAL_BATCH} ranks, not {WORLD_SIZE}")
    device = setup()
    train_set, test_set = digits(device)
    check_sampler(len(train_set), device)
    check_training(train_set, test_set, device)
    check_communication(train_set, device)
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
