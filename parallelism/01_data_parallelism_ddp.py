"""Data parallelism three times: by hand, in your own buckets, by DistributedDataParallel

**Question.** n ranks hold the same model and see different samples. What must they tell each other,
when, and at what cost, so that training goes as if one process saw all the samples?

**Predict.** Four layers, 8 tensors, 341 kB. Write down, for one step: the bytes a rank hands to
all-reduce; how many all-reduces, if each tensor goes alone and if buckets close at 100 kB; how many
of the 8 gradients are missing when the first one starts. And: memory for 7 billion parameters.

**Run.**

    torchrun --standalone --nproc-per-node=4 01_data_parallelism_ddp.py  # NCCL, given 4 GPUs
    python 01_data_parallelism_ddp.py                                    # the same; gloo if not

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 25 s; not run on several GPUs) that
after 150 steps all three ways are within 5e-15 of one process, at 97% on new digits. Each hands
341,072 bytes a step to all-reduce: by hand in 8 calls once backward is over, in buckets in 3, the
first with 4 gradients still to come (DDP's first step: 1 call, none to come). Mixed precision takes
16 bytes a parameter, 18 in DDP as it comes: 7 billion parameters, 112 GB on every rank.

**Next.** exercises/05_data_parallel_hooks, exercises/06_gradient_accumulation and
exercises/07_distributed_sampler; then parallelism/02_fsdp_zero.py: why should every rank hold all
of that?
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import chain, pairwise, zip_longest
from typing import NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

WORLD_SIZES = range(1, 65)  # beyond, a rank would have less than one sample a step
FLAGS: dict[str, dict] = {"--figure": {"metavar": "PATH", "help": "save losses and events as PNG"}}
GLOBAL_BATCH, EPOCHS = 96, 10  # samples a step, all ranks together; passes over the data
CAPACITY = 100_000  # bytes: a bucket is closed as soon as it holds this much
EPS = torch.finfo(torch.float64).eps
A, B, C = "(a) by hand", "(b) own DDP", "(c) torch's"
Batch = list[torch.Tensor]  # image_BD, label_B: B samples of D = 64 pixels
Events = list[tuple[str, torch.Tensor]]  # ("gradient", its parameter) or ("all-reduce", its bucket)
Group = dist.ProcessGroup | None

# %% [markdown]
# ## 1. Every rank draws its own samples
#
# `DistributedSampler` shuffles with a seed that ranks share, repeats a few indices so that they
# divide evenly, and gives rank r every n-th from the r-th on. The seed is `seed + epoch`: forget
# `set_epoch` and every epoch repeats the first one's order, and nothing complains. The mean of the
# ranks' mean losses is the mean over all samples *only if all ranks hold equally many*: with 3 here
# and 1 there, that one weighs thrice. Repeating sees to that, even in an epoch's short last batch.


# %%
def digits(device: torch.device) -> list[TensorDataset]:
    """Training and test set of (index, image, label): 1,797 handwritten digits, in float64."""
    image_ND, label_N = (torch.tensor(a, device=device) for a in load_digits(return_X_y=True))
    test = torch.arange(len(label_N), device=device) % 5 == 0
    halves = [(image_ND[half] / 8 - 0.6, label_N[half]) for half in (~test, test)]
    return [TensorDataset(torch.arange(len(y)), x, y) for x, y in halves]


def my_share(train_set: TensorDataset, drawn: list[list[int]]) -> Iterator[Batch]:
    """Yield this rank's batches, epoch after epoch; add the indices of each to `drawn`."""
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=GLOBAL_BATCH // WORLD_SIZE, sampler=sampler)
    for epoch in tqdm(range(EPOCHS), "epochs", leave=False, disable=RANK > 0 or None):
        sampler.set_epoch(epoch)
        for index_B, image_BD, label_B in loader:
            drawn.append(index_B.tolist())
            yield [image_BD, label_B]


def gather(mine: object, group: Group = None) -> list:
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    return everyone


# %% [markdown]
# ## 2. (a) By hand: all-reduce after backward
#
# Start from the same weights and give every optimizer the mean gradient: equal weights and equal
# gradients make equal weights, so weights never travel again. That is all of data parallelism. It
# is slow: every tensor pays an all-reduce's latency, and none starts before backward has ended.


# %%
def broadcast(tensors: Iterable[torch.Tensor], group: Group = None) -> None:
    """Copy the tensors of the group's first rank to all."""
    for tensor in tensors:
        dense = tensor.detach().contiguous()  # the tensor itself, unless it is transposed
        dist.broadcast(dense, group_src=0, group=group)
        tensor.detach().copy_(dense)


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD_SIZE


# %% [markdown]
# ## 3. (b) Your own DDP: buckets that leave while backward goes on
#
# Backward makes the last layer's gradients first. So fill buckets in *reverse* order, let a hook
# tick off each gradient, and once a bucket is complete launch one all-reduce for all of it and go
# on (Li et al., 2020, section 3.2). Three rules make this right on any module. All ranks launch in
# the buckets' order, for collectives are matched by order alone. What is missing at the end of
# backward, a layer this rank did not use, is sent as zeros. And the division comes *before* the
# sum, which then cannot overflow in float16. A gradient *is* its part of the bucket: `zero_grad`
# sets it to None, backward makes a new one, and the hook moves that in, dividing as it copies.
#
# Beware: `register_post_accumulate_grad_hook` hands its hook the *parameter*. Average that, and you
# have averaged weights and left the gradients alone: no error, and the ranks drift apart.


# %%
class Bucket:
    """One flat buffer; `views` maps each parameter to its gradient, a part with its strides."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.flat = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        parts = self.flat.split([p.numel() for p in parameters])
        strides = [torch.empty_like(p, device="meta").stride() for p in parameters]
        triples = zip(parameters, parts, strides, strict=True)
        self.views = {p: part.as_strided(p.shape, stride) for p, part, stride in triples}


def in_buckets(parameters: list[nn.Parameter], capacity: float) -> list[Bucket]:
    """Last parameter first, one dtype and device each, closed once it holds `capacity` bytes."""
    closed, filling = [], {}
    for p in reversed(parameters):
        filling.setdefault(kind := (p.dtype, p.device), []).append(p)
        if sum(q.nbytes for q in filling[kind]) >= capacity:
            closed.append(filling.pop(kind))
    return [Bucket(ps) for ps in [*closed, *filling.values()]]


class BucketedDDP(nn.Module):
    """Data parallelism for any module: after backward every rank has the mean gradient.

    `bucket_mb` is in 1e6 bytes. Gradients are views of the buckets (sparse ones become dense). What
    no rank used gets zeros; with `find_unused` it keeps None, as in one process, for one small
    all-reduce more. Buffers follow the group's first rank, before each forward that trains. Raises
    ValueError on every rank if the modules differ.
    """

    def __init__(self, module: nn.Module, bucket_mb=25.0, group: Group = None, find_unused=False):
        super().__init__()
        self.module, self.group, self.find_unused = module, group, find_unused
        self.n, self.sync, self.reducing = dist.get_world_size(group), True, False
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        mine = [(s, tuple(t.shape), t.dtype, t.requires_grad) for s, t in tensors.items()]
        rows = zip_longest(*gather([("bucket_mb", bucket_mb), *mine], group))
        if unequal := [row for row in rows if len(set(row)) > 1]:  # in broadcast, gloo would abort
            rule = "every rank must wrap the same module; build it from one configuration"
            raise ValueError(f"{rule}: the first difference, by rank: {unequal[0]}")
        broadcast(tensors.values(), group)
        trained = [p for p in module.parameters() if p.requires_grad]  # a tied weight counts once
        self.buckets = in_buckets(trained, bucket_mb * 1e6)
        self.home = {p: bucket for bucket in self.buckets for p in bucket.views}
        for p in trained:
            p.register_post_accumulate_grad_hook(self._ready)

    def forward(self, *args: object, **kwargs: object) -> object:
        self.reducing = False  # start afresh even if the last backward died half-way
        if self.sync and self.training and torch.is_grad_enabled():
            broadcast(self.module.buffers(), self.group)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here adds up local gradients; the next one outside sends the sum."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def _ready(self, parameter: nn.Parameter) -> None:
        """Hook: this parameter's gradient is complete. Launch the buckets whose turn it is."""
        if not self.sync:
            return
        if not self.reducing:  # the first gradient of this backward
            self.reducing, self.works = True, []
            for bucket in self.buckets:
                bucket.missing = set(bucket.views)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._take_in(parameter)
        if not self.home[parameter].missing:
            self._launch()

    def _take_in(self, parameter: nn.Parameter) -> None:
        """Move the gradient, divided by n, into its bucket; none counts as zero."""
        bucket, grad = self.home[parameter], parameter.grad
        parameter.grad = bucket.views[parameter]
        bucket.missing.remove(parameter)  # KeyError: a second gradient in one backward
        if grad is None:
            parameter.grad.zero_()
        else:
            dense = grad.detach().to_dense() if grad.is_sparse else grad.detach()
            torch.div(dense, self.n, out=parameter.grad)

    def _launch(self, incomplete: bool = False) -> None:
        """Start the all-reduce of the next buckets in line; stop at one that is not complete."""
        for bucket in self.buckets[len(self.works) :]:
            if bucket.missing and not incomplete:
                break
            for parameter in list(bucket.missing):
                self._take_in(parameter)
            self.works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))

    @torch.no_grad()
    def _finish(self) -> None:
        """End of backward: send what never filled, then wait, so that the optimizer may step."""
        used = [parameter.grad is not None for parameter in self.home]
        self._launch(incomplete=True)
        if self.find_unused:
            used_N = torch.tensor(used, dtype=torch.int32, device=self.buckets[0].flat.device)
            dist.all_reduce(used_N, dist.ReduceOp.MAX, group=self.group)
            for parameter, by_anyone in zip(self.home, used_N.tolist(), strict=True):
                parameter.grad = parameter.grad if by_anyone else None
        for work in self.works:
            work.wait()  # on NCCL the current stream waits, not the CPU
        self.reducing = False


# %% [markdown]
# ## 4. (c) `DistributedDataParallel`, and all three beside one process
#
# The same in C++, and one thing more: after the first step it *rebuilds* its buckets in the order
# in which gradients came. Until then all share one bucket, and nothing overlaps. `device_ids` names
# this process's GPU. `gradient_as_bucket_view=True` makes gradients views, as ours are. A parameter
# without a gradient makes it refuse the next step, unless `find_unused_parameters=True` looks for
# such in every step, or `static_graph=True` promises that all steps use the same.
#
# Every rank seeds its weights differently, so only a broadcast makes them agree. The one process
# gets rank 0's weights and, step by step, the samples that all ranks drew. *Tolerance:* adding up B
# gradients in another order moves the sum by up to B eps of the terms' size. Learning rate 0.1 and
# momentum 0.9 hand 0.1/(1 - 0.9) = 1 of that on to the weights. S steps: S B eps, to first order.


# %%
def wrap(name: str, model: nn.Module, **options: bool) -> nn.Module:
    if name == A:
        broadcast(model.state_dict().values())
    if name == B:
        return BucketedDDP(model, CAPACITY / 1e6)
    if name == C:
        ids = [torch.cuda.current_device()] if next(model.parameters()).is_cuda else None
        model = DistributedDataParallel(model, ids, bucket_cap_mb=CAPACITY / 2**20, **options)
        model.register_comm_hook(None, allreduce_hook)  # its own reduction, where we can count it
    return model


def net(device: torch.device, seed: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    widths = pairwise([64, 128, 128, 128, 10])
    layers = [layer for ends in widths for layer in (nn.Linear(*ends), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).to(device, dtype)


def train(
    name: str, model: nn.Module, batches: Iterable[Batch], micro: int = 1, **options: bool
) -> tuple[list[float], list[Events]]:
    """SGD, each batch in `micro` micro-batches; return this rank's losses and events by step."""
    losses, steps, real = [], [], dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: object, **kwargs: object) -> dist.Work | None:
        steps[-1].append(("all-reduce", tensor))
        return real(tensor, *args, **kwargs)

    for parameter in model.parameters():  # before wrapping: hooks run in order of registration
        parameter.register_post_accumulate_grad_hook(lambda p: steps[-1].append(("gradient", p)))
    with mock.patch.object(dist, "all_reduce", all_reduce):
        wrapped = wrap(name, model, **options)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in batches:
            steps.append([])
            sgd.zero_grad()
            pieces = zip(*(t.chunk(micro) for t in batch), strict=True)
            for i, (image_BD, label_B) in enumerate(pieces, 1):
                with wrapped.no_sync() if i < micro else nullcontext():
                    loss = cross_entropy(wrapped(image_BD), label_B)
                    (loss / micro).backward()
            if name == A:
                average_gradients(model)
            sgd.step()
            losses.append(loss.item())
    return losses, steps


def gap(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> float:
    """The largest distance, to three digits."""
    off = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    return float(f"{off:.2e}")


def three_ways_and_one(device: torch.device) -> tuple[dict, dict]:
    """Train four times; claim that all go the same way; return losses and events, by name."""
    train_set, test_set = digits(device)
    curves, events, trained = {}, {}, {name: net(device, seed=RANK) for name in (A, B, C)}
    for name, model in trained.items():
        losses, events[name] = train(name, model, my_share(train_set, drawn := []))
        curves[name] = [sum(step) / WORLD_SIZE for step in zip(*gather(losses), strict=True)]
    steps = [list(chain(*shares)) for shares in zip(*gather(drawn), strict=True)]
    batches = (train_set[step][1:] for step in steps)
    curves["one process"], _ = train("one process", alone := net(device, seed=0), batches)
    starts = range(0, len(steps), len(steps) // EPOCHS)
    first, *others = (list(chain(*steps[i : i + starts.step])) for i in starts)
    even = -(-len(train_set) // WORLD_SIZE) * WORLD_SIZE
    claim("samples drawn in one epoch", even, len(first))
    claim("different samples among them", len(train_set), len(set(first)))
    claim("different orders in all epochs", EPOCHS, len({tuple(e) for e in (first, *others)}))
    for name, model in trained.items():
        ours, (_, image_ND, label_N) = list(model.parameters()), test_set.tensors
        broadcast(rank_0s := [p.detach().clone() for p in ours])
        off, accuracy = gap(ours, alone.parameters()), model(image_ND).argmax(1) == label_N
        claim(f"{name}: weights, gap to rank 0's", 0, gap(ours, rank_0s))
        claim(f"{name}: gap to one process", 0, off, atol=len(steps) * GLOBAL_BATCH * EPS)
        claim(f"{name}: accuracy on new digits", 0.95, accuracy.double().mean(), ">=")
    return curves, events


# %% [markdown]
# ## 5. What is sent, and when
#
# A clock cannot show overlap where ranks share cores; the order of events can. Each rank hands its
# P bytes of gradients to all-reduce once, however they are cut (a ring then sends 2(n-1)/n P).
# Layers 4 and 3 make 142 kB, over the 100 kB that close a bucket; layer 2 fills one; layer 1 is
# what is left: 3 buckets. When the first leaves, layers 2 and 1 lack their 4 gradients.
#
# Four micro-batches make the big batch if each loss is divided by 4, and only the last backward
# communicates. And an all-reduce may finish as late as in its `wait()`: `late` is a network that
# moves nothing before. If you forget the wait, a network that happens to be quick hides it.


# %%
def count(step: Events, kind: str = "all-reduce") -> int:
    return [which for which, _ in step].count(kind)


def what_is_sent(events: dict[str, list[Events]]) -> None:
    for name, calls, missing in ((A, 8, 0), (B, 3, 4), (C, 3, 4)):
        last = events[name][-1]
        sent = [tensor.nbytes for kind, tensor in last if kind == "all-reduce"]
        first = [kind for kind, _ in last].index("all-reduce")
        claim(f"{name}: all-reduces a step", calls, len(sent))
        claim(f"{name}: bytes a step", 8 * 42_634, sum(sent))
        claim(f"{name}: gradients missing at the first", missing, count(last[first:], "gradient"))
    claim(f"{C}: all-reduces in its very first step", 1, count(events[C][0]))


def accumulation_and_waiting(device: torch.device, mine: Batch, everyone: Batch) -> None:
    alone, real = net(device, seed=0), dist.all_reduce
    train("one process", alone, [everyone] * 3)

    def late(x: torch.Tensor, group: Group = None, async_op: bool = True) -> mock.Mock:
        return mock.Mock(wait=lambda: real(x, group=group))

    def follows(what: str, name: str, **how: int) -> Events:
        _, steps = train(name, model := net(device, seed=RANK), [mine] * 3, **how)
        off = gap(model.parameters(), alone.parameters())
        claim(f"{name}: {what}, gap", 0, off, atol=3 * len(everyone[1]) * EPS)
        return steps[-1]

    for name in (B, C):
        last = follows("4 micro-batches", name, micro=4)
        claim(f"{name}: 4 micro-batches, all-reduces", 3, count(last))
    with mock.patch.object(dist, "all_reduce", late):
        follows("latest network", B)
    follows("static_graph", C, static_graph=True)


# %% [markdown]
# ## 6. What it costs
#
# Every rank holds everything. In mixed precision a parameter takes 2 bytes, its gradient 2, and
# Adam 12 in float32: a copy and two moments (Rajbhandari et al., 2020, section 3.1). 7 billion
# parameters: 112 GB on *each* GPU, before any activation. And 2 bytes more where buckets are a
# second copy of the gradients, as in DDP unless you ask for views.


# %%
def bytes_per_parameter(name: str, device: torch.device, mine: Batch, **options: bool) -> float:
    """Count the storages alive between two steps: weights, gradients, buckets, Adam's state."""
    model = net(device, RANK, torch.bfloat16)
    _, steps = train(name, model, [(mine[0].bfloat16(), mine[1])] * 3, **options)
    copies = [p.detach().float() for p in model.parameters()]
    for copy, p in zip(copies, model.parameters(), strict=True):
        copy.grad = p.grad.float()
    (adam := torch.optim.Adam(copies)).step()
    held = [tensor for _, tensor in steps[-1]] + [p.grad for p in model.parameters()] + copies
    held += [moment for state in adam.state.values() for moment in state.values()]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held)}
    return sum(storages.values()) / sum(p.numel() for p in model.parameters())


def what_it_costs(device: torch.device, mine: Batch) -> None:
    slack = 0.001  # Adam counts its steps, 4 bytes a tensor: 32 bytes over 42,634 parameters
    ours = bytes_per_parameter(B, device, mine)
    claim(f"{B}: bytes per parameter", 16, ours, atol=slack)
    claim(f"{B}: 7 billion parameters, GB on each rank", 112, 7 * ours, atol=7 * slack)
    for views, predicted in ((False, 18), (True, 16)):
        theirs = bytes_per_parameter(C, device, mine, gradient_as_bucket_view=views)
        claim(f"{C}: bytes per parameter, views={views}", predicted, theirs, atol=slack)


def draw(path: str, curves: dict[str, list[float]], rows: dict[str, Events]) -> None:
    from matplotlib.figure import Figure

    left, right = (figure := Figure((13, 4.5), layout="constrained")).subplots(1, 2)
    for width, name in zip((9, 6, 3, 1), curves, strict=True):
        left.semilogy(curves[name], lw=width, label=name, color="k" if width == 1 else None)
    left.set(title="Four trainings, one curve", xlabel="step", ylabel="loss, mean over ranks")
    left.legend()
    for y, events in enumerate(rows.values()):
        for x, (kind, tensor) in enumerate(events):
            right.plot(x, -y, "C0o" if kind == "gradient" else "C3>", ms=9)
            right.annotate(f"{tensor.nbytes / 1e3:.0f}", (x, -y - 0.3), ha="center", size=8)
    right.set(title="One step: gradients (o) and all-reduces (>), kB", xticks=[], ylim=(-3.6, 0.4))
    right.set_yticks([0, -1, -2, -3], rows)
    figure.savefig(path, dpi=120)


def main(options: argparse.Namespace) -> None:
    device = setup()
    curves, events = three_ways_and_one(device)
    everyone = [t[: 16 * WORLD_SIZE] for t in digits(device)[0].tensors[1:]]
    mine = [t.chunk(WORLD_SIZE)[RANK] for t in everyone]
    what_is_sent(events)
    accumulation_and_waiting(device, mine, everyone)
    what_it_costs(device, mine)
    if options.figure and RANK == 0:
        rows = {name: steps[-1] for name, steps in events.items()}
        draw(options.figure, curves, rows | {"(c), first step": events[C][0]})
    finish()


# %% [markdown]
# ## The plumbing, the same in every lesson; fundamentals/02_launching_processes.py explains it

# %%
ledger: list[dict] = []  # every claim made so far, the same on every rank
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def command_line() -> argparse.Namespace:
    """Read FLAGS; --help and mistakes end here, before any collective, and are said once."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for flag, about in FLAGS.items():
        parser.add_argument(flag, **about)
    parser.print_help = lambda: say(parser.format_help())
    parser.error = lambda text: require(False, f"{text}\n{parser.format_usage().rstrip()}")
    rule = f"needs a number of ranks in {WORLD_SIZES}, got {WORLD_SIZE}; set --nproc-per-node"
    require("RANK" not in os.environ or WORLD_SIZE in WORLD_SIZES, rule)
    return parser.parse_args()


def launch() -> None:
    """Plain `python`: be torchrun, one rank per GPU, else 4, without its wall of text."""
    from torch.distributed.elastic.multiprocessing import api, errors
    from torch.distributed.run import main as torchrun

    ranks = gpus if (gpus := torch.cuda.device_count()) > 1 else 4
    ranks = ranks if ranks in WORLD_SIZES else WORLD_SIZES[0]
    os.environ |= {"LAUNCHER": str(os.getpid()), "OMP_NUM_THREADS": "1"}  # ranks share the cores
    logging.disable()  # the rank that failed says why
    here = ["--standalone", "--local-addr=127.0.0.1"]  # the host's name need not resolve
    try:
        torchrun([*here, f"--nproc-per-node={ranks}", *sys.argv])
    except errors.ChildFailedError as error:
        rank, first = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {first.signal_name()}" if first.exitcode < 0 else 1)
    except api.SignalException as error:
        sys.exit(128 + error.sigval)


def setup() -> torch.device:
    """Join the group torchrun describes: NCCL if every rank here has its own GPU, else gloo."""
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: no rank outlives a killed launcher,
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.environ.pop("LAUNCHER", parent := str(os.getppid())) != parent:
        sys.exit(1)  # nor one killed before this line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend, wait = "nccl" if gpu else "gloo", timedelta(minutes=2)
    dist.init_process_group(backend, device_id=device if gpu else None, timeout=wait)
    sys.excepthook = crash
    say(f"{WORLD_SIZE} ranks, {backend}, torch {torch.__version__}\n")
    say(f"{'':10}{'claim':55} {'predicted':20} measured")
    return device


def crash(*error: object) -> NoReturn:
    """An exception nobody caught: the first rank prints it, all leave at once; peers may wait."""
    first = dist.distributed_c10d._get_default_store().add("crash", 1) == 1
    time.sleep(1)  # if a peer's death is the cause, the launcher ends us meanwhile and names it
    if first:
        print(f"rank {RANK}:", file=sys.stderr)
        sys.__excepthook__(*error)
    os._exit(1)


def say(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def require(holds: bool, rule: str) -> None:
    """End the run, before its first collective, with one message: rule, value, remedy."""
    if not holds:
        time.sleep(10 if RANK else 0)  # rank 0 speaks; the launcher ends the others as it leaves
        sys.exit(f"{sys.argv[0]}: {rule}")


def claim(text: str, predicted: float, measured: float, sign="=", atol=0.0, rtol=0.0) -> None:
    """Record the worst rank's `measured sign predicted` (= <= >=), give or take the slack."""
    mine = float(predicted), float(measured), atol + rtol * abs(predicted)
    ranks = [mine] * WORLD_SIZE
    if dist.is_initialized():
        dist.all_gather_object(ranks, mine)
    over = {"=": abs, "<=": float, ">=": float.__neg__}[sign]
    excess = [over(m - p) - slack for p, m, slack in ranks]
    worst = max(range(len(ranks)), key=lambda r: excess[r] if excess[r] == excess[r] else 1e999)
    (p, m, slack), verdict = ranks[worst], "PASS" if excess[worst] <= 0 else "FAIL"  # NaN: FAIL
    off = "" if verdict == "PASS" else f"\n{'':10}off by {m - p:.3g} on rank {worst}"
    told, seen = (f"{x:,.{12 if x.is_integer() else 6}g}" for x in (p, m))
    between = f"{sign:>2} {told}" + (f" ±{float(f'{slack:.1g}'):g}" if slack else "")
    say(f"  {verdict:7} {text:55} {between:20} {seen}{off}")
    row = {"claim": text, "verdict": verdict, "rank": worst, "sign": sign}
    finite = m - m == 0  # JSON knows no other numbers
    record(row | {"predicted": p, "measured": m if finite else str(m), "slack": slack})


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    say(f"  BLOCKED {text:55} needs {needs}")
    record({"claim": text, "verdict": "BLOCKED", "needs": needs})


def record(row: dict) -> None:
    """Add to the ledger; LESSON_JSON, if set, names a file that is whole after every claim."""
    ledger.append(row)
    if RANK == 0 and (path := os.environ.get("LESSON_JSON")):
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        about = {"ranks": WORLD_SIZE, "gpu": gpu, "cpus": os.cpu_count(), "python": sys.version}
        about |= {"torch": torch.__version__, "argv": sys.argv, "date": time.strftime("%F")}
        with open(path + ".part", "w") as file:
            json.dump(about | {"ledger": ledger}, file, indent=1)
        os.replace(path + ".part", path)


def finish() -> NoReturn:
    """Leave the group; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    count = [row["verdict"] for row in ledger].count
    say(f"\n  {count('PASS')} PASS, {count('FAIL')} FAIL, {count('BLOCKED')} BLOCKED")
    code = int(count("PASS") == 0 or count("FAIL") > 0)
    if __name__ == "__main__":  # threads of a group that something still holds can abort sys.exit
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    options = command_line()
    if "RANK" in os.environ or len(WORLD_SIZES) == 1:
        main(options)
    else:
        launch()
