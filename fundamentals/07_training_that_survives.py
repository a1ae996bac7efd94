"""Training that survives: checkpoints, exact resume, torchrun's restarts, and SIGTERM
===================================================================================

**Question.** Machines fail, and spot instances are taken away. What must a training job write
down, how, and how often, so that after any death it ends with the same weights, bit for bit, as if
nothing had happened?

**Predict**, and write it down before you run. All ranks train for 12 steps with dropout, momentum,
a cosine schedule and float16; an epoch has 8 steps, and a rank takes 8 samples per step.

1. After step 5 the job goes on in new processes. How many of the 3,610 weights are other ones in
   the end if the checkpoint holds everything? And if one of these is left out: the optimizer, the
   scheduler, the loss scaler, the random numbers, the sampler's position? Is there one that does
   not matter?
2. 4 ranks go on after step 5 without the sampler's position, up to step 8. How many of the epoch's
   256 samples were seen twice, how many never? And how many images does an evaluation count that
   shares 997 among 4 ranks by `DistributedSampler`?
3. In float16, whose largest number is 65,504, one rank of several has a gradient with elements of
   100. The loss scale begins at 32,768. How many steps are skipped, on how many ranks, and which
   scale is left?
4. A gradient of norm 5 is to be clipped to norm 1, and the loss scale is 1,024. Which norm does the
   update have if the gradient is clipped before it is unscaled?
5. A process is killed while it replaces its only checkpoint. Is there a moment at which none is
   left? And if one bit of a checkpoint flips on the disk, what does `torch.load` say?
6. SIGTERM reaches rank r after step 6 + r. After which step does each rank leave, and how many
   steps are lost? A checkpoint is written every 4 steps, and SIGKILL hits a rank after step 7: how
   many steps are done twice?
7. Llama 3 was trained on 16,384 GPUs, which were interrupted 419 times in 54 days without being
   asked. If a checkpoint holds up training for 60 s, after how many minutes should the next one
   come? What share of the time is lost even so?

**Run.**

    torchrun --standalone --nproc-per-node=4 07_training_that_survives.py  # NCCL or gloo
    python 07_training_that_survives.py                                    # the same, for you

Not run on several GPUs.

**Try.** Leave out the line `self.warm_up()`, and start 3 ranks: which claims fail? And why none on
4? Put it back, and take the generator of its own from the DataLoader: what fails now?

**Before.** parallelism/01_data_parallelism_ddp.py: DistributedDataParallel and DistributedSampler.

**Next.** exercises/16_resume_exactly and exercises/17_durable_checkpoint; launch/ddp_surviving.py,
the complete file to copy; then communication/02_point_to_point.py
"""

import argparse
import ctypes
import hashlib
import io
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

BATCH = 8  # samples of one rank per step
EPOCH = 8  # steps
STEPS = 12  # of the whole training: one epoch and a half
STOP = 5  # the step after which it goes on elsewhere

# %% [markdown]
# ## 1. What changes in a step
#
# A training that was interrupted can be resumed *exactly* if the next step finds everything as the
# uninterrupted run would have found it. So the first thing is a list of all that a step reads and
# changes. In the class below each has a line:
#
#     a step reads            and what becomes of it             if a new process lacks it
#
#     the weights             the update                         training begins anew
#     momentum                the update                         it builds up again
#     learning rate           the scheduler's next one           the schedule begins anew
#     loss scale              halved after an overflow           steps are skipped again
#     the next samples        the position in the epoch          samples are seen twice, or never
#     dropout's numbers       the generator moves on             the same masks again
#     the number of the step  one more                           training ends too late
#
# `state` and `load` are that list twice. Each class of torch's that has a state has the pair
# `state_dict` and `load_state_dict`; the two that are forgotten most have none: the generators of
# random numbers, one per rank and device, and the sampler, which section 2 gives one.
#
# There is one thing that no checkpoint holds. DistributedDataParallel (DDP) arranges its buckets
# anew after its first backward pass, in the order in which the gradients came. From three ranks on,
# a gradient's place in its bucket decides in which order the ranks' shares are added, and so how
# the sum is rounded. `warm_up` lets that happen before the first step, in every process alike.


# %%
class Training:
    """A small network that all ranks train in float16, and all that its next step depends on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.manual_seed(0)
        layers = [nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10)]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers).to(device))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR
        self.scheduler = cosine(self.optimizer, STEPS)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**19)
        samples = all_samples()
        self.sampler = ResumingSampler(samples, WORLD_SIZE, RANK)
        # Without a generator of its own a loader draws from that of dropout, at each epoch's start.
        how = {"sampler": self.sampler, "generator": torch.Generator()}
        self.loader = DataLoader(samples, BATCH, **how)
        self.batches: Iterator | None = None  # of what is left of the epoch
        self.seen: list[int] = []  # the samples that this process has trained on
        self.step = 0
        self.warm_up()
        torch.manual_seed(1 + RANK)  # each rank drops out other units

    def state(self) -> dict:
        """Everything that the next step reads; tensors are not copied."""
        state = {"model": self.ddp.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict()}
        state |= {"sampler": self.sampler.state_dict(), "random": random_state(self.device)}
        return state | {"step": self.step}

    def load(self, state: dict) -> None:
        """Be where `state` was made."""
        self.ddp.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.sampler.load_state_dict(state["sampler"])
        set_random_state(state["random"], self.device)
        self.step = state["step"]

    def warm_up(self) -> None:
        """Let DDP arrange its buckets, by a backward pass that changes no weight."""
        self.loss(torch.zeros(2, 64), torch.zeros(2, dtype=torch.long)).backward()
        self.optimizer.zero_grad()

    def loss(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.float16):
            logits = self.ddp(image.to(self.device))
            return nn.functional.cross_entropy(logits, label.to(self.device))


# %% [markdown]
# The step itself, with a loss scale (section 3), and the loop. `GradScaler.step` does nothing when
# a gradient is infinite, and then the scheduler must not move on either.


# %%
def train_step(training: Training) -> None:
    """Take the next step, wherever in the epoch it is."""
    if training.batches is None:
        training.batches = iter(training.loader)  # begins where the sampler does
    image, label, index = next(training.batches)
    scaler = training.scaler
    scaler.scale(training.loss(image, label)).backward()
    scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_norm_(training.ddp.parameters(), 1.0)
    scale = scaler.get_scale()
    scaler.step(training.optimizer)
    scaler.update()
    training.optimizer.zero_grad()
    if scaler.get_scale() >= scale:  # else the step was skipped
        training.scheduler.step()
    training.seen += index.tolist()
    training.step += 1
    if training.sampler.advance(BATCH):
        training.batches = None


def train(training: Training, until: int) -> None:
    while training.step < until:
        train_step(training)


def random_state(device: torch.device) -> dict:
    """The state of the generators that dropout on this device draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict, device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


# %% [markdown]
# The claim on it: train to the end; train to step 5, write a checkpoint, and go on from it in a new
# `Training`, whose weights, momentum and generators are those of a new process. Then again, with
# one part of the checkpoint replaced by what a new process has. Section 6 does the same with
# processes that really die.


# %%
def check_resume(folder: Path, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Claim what goes on exactly, and what does not.

    Returns the weights of the uninterrupted run, and the samples that the other saw until it
    stopped.
    """
    whole = Training(device)
    train(whole, STEPS)
    expected = weights_of(whole)
    stopped = Training(device)
    for step in (STOP - 2, STOP - 1, STOP):
        train(stopped, step)
        save(stopped, folder)
    scale = math.log2(stopped.scaler.get_scale())
    print0(f"{'':13}after step {STOP} the loss scale is 2**{scale:g}; it began at 2**19")
    resumed = go_on(read(folder), device)
    claim("whole checkpoint: weights that differ", 0, differing(resumed, expected), question=1)
    for part in ("optimizer", "scheduler", "scaler", "random", "sampler"):
        resumed = go_on(without(part, read(folder), device), device)
        share = differing(resumed, expected) / expected.numel()
        claim(f"without {part}: share that differs", 0.5, share, ">=", question=1)
    return expected, stopped.seen


def go_on(checkpoint: dict, device: torch.device, until: int = STEPS) -> Training:
    """Train from a checkpoint on, as a new process would."""
    training = Training(device)
    training.load(checkpoint)
    train(training, until)
    return training


def without(part: str, checkpoint: dict, device: torch.device) -> dict:
    """The checkpoint with one part as a new process has it."""
    return checkpoint | {part: Training(device).state()[part]}


# %% [markdown]
# ## 2. The place in the data
#
# `DistributedSampler` shuffles the numbers of all samples by (seed, epoch), the same on all
# ranks, and rank r of n takes the places r, r + n, r + 2n of that order. So the order needs no
# memory: epoch and place in it are two numbers. What torch's sampler lacks is a way to begin
# anywhere but at the start. That is the class below.
#
#     epoch 0   | 1 | 2 | 3 | 4 | 5 |   |   |   |      5 steps are done, and the job dies
#     resumed                       | 6 | 7 | 8 |      from the place in the sampler's state
#     or else   | 1 | 2 | 3 |                          from the start: 1 to 3 again, 6 to 8 never
#
# Nothing tells you of the second way. The loss goes on falling, a little too fast.
#
# *Augmentation* and *worker processes* are the next places that draw random numbers. Let them draw
# from (seed, epoch, sample), and no state is to be saved: `Seeded` in launch/ddp_surviving.py.


# %%
class ResumingSampler(DistributedSampler):
    """Torch's sampler, which knows how many of its samples of this epoch are done."""

    done = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.done, None)

    def advance(self, samples: int) -> bool:
        """Count samples as done; return whether the epoch ended with them."""
        self.done += samples
        if self.done < self.num_samples:
            return False
        self.done = 0
        self.set_epoch(self.epoch + 1)
        return True

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict) -> None:
        self.epoch = state["epoch"]
        self.done = state["done"]


def all_samples() -> TensorDataset:
    """An epoch for all ranks: 64 numbers each, one of 10 labels, and their own number."""
    generator = torch.Generator().manual_seed(0)
    count = WORLD_SIZE * BATCH * EPOCH
    image_ND = torch.randn(count, 64, generator=generator)
    label_N = (image_ND @ torch.randn(64, 10, generator=generator)).argmax(1)
    return TensorDataset(image_ND, label_N, torch.arange(count))


# %% [markdown]
# **Evaluation** has the opposite problem. Training may drop the last samples of an epoch, but each
# test image counts exactly once, and n ranks rarely divide their number. `DistributedSampler` then
# *pads*: it hands out some samples twice, so that all ranks have equally many. The accuracy that
# results depends on the number of ranks. In evaluation ranks need no equal shares, since there is
# no collective per batch: take every n-th image, and add up counts in the end.


# %%
def check_samples(folder: Path, device: torch.device, seen_before: list[int]) -> None:
    """Count what an epoch sees if its place is forgotten, and what an evaluation counts."""
    forgetful = go_on(without("sampler", read(folder), device), device, until=EPOCH)
    times = Counter()
    for seen in gather_objects(seen_before + forgetful.seen):
        times.update(seen)
    again = EPOCH - STOP  # steps that are left, and are taken from the epoch's start
    samples = WORLD_SIZE * BATCH * again
    twice = sum(count == 2 for count in times.values())
    never = WORLD_SIZE * BATCH * EPOCH - len(times)
    claim("place forgotten: samples seen twice", samples, twice, question=2)
    claim("place forgotten: samples never seen", samples, never, question=2)

    images = range(997)
    own = images[RANK::WORLD_SIZE]
    claim("every n-th: images counted of 997", 997, sum(gather_objects(len(own))), question=2)
    text = "DistributedSampler: images counted of 997"
    if WORLD_SIZE == 1:
        blocked(text, needs="2 ranks")
        return
    padded = DistributedSampler(images, WORLD_SIZE, RANK, shuffle=False)
    counted = sum(gather_objects(len(list(padded))))
    claim(text, WORLD_SIZE * math.ceil(997 / WORLD_SIZE), counted, question=2)


# %% [markdown]
# ## 3. float16: the loss scale, skipped steps, and clipping
#
# float16 has numbers from 6e-8 to 65,504. Gradients are often smaller and would be 0, so the loss
# is multiplied by a **loss scale** before backward, and gradients are divided by it before the
# update. `GradScaler` finds the scale by trying: it begins high; when a gradient is infinite or NaN
# it *skips* the step and halves the scale; after 2,000 steps without that, it doubles it. The scale
# is therefore state, and a job that forgets it begins with skipped steps again.
#
# One rank may overflow alone. The all-reduce tells the others: infinity plus anything is infinite,
# so all ranks skip the same step. (With FSDP each rank sees its shard only, and torch's sharded
# scaler adds an all-reduce of this one flag.) bfloat16 has float32's range and needs none of this.


# %%
def step_in_float16(
    layer: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    gradient: float,
) -> None:
    """A step in which each element of the weight's gradient is `gradient` times the loss scale."""
    weight = next(layer.parameters())
    sample = torch.full((1, weight.shape[1]), gradient, device=weight.device)
    with torch.autocast(weight.device.type, torch.float16):
        loss = layer(sample).float().sum()
    scaler.scale(loss).backward()
    dist.all_reduce(weight.grad)
    scaler.step(optimizer)  # nothing, if a gradient is infinite
    scaler.update()  # to half of it, if one was
    optimizer.zero_grad()


def check_overflow(device: torch.device) -> None:
    """Let the last rank's gradient overflow until the loss scale fits."""
    largest = 100.0
    mine = largest if RANK == WORLD_SIZE - 1 else 1.0
    layer = nn.Linear(4, 1, bias=False, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**15)
    skipped = 0
    moved = {True: 0, False: 0}  # elements, in skipped steps and in others
    for _ in range(12):
        before = layer.weight.detach().clone()
        scale = scaler.get_scale()
        step_in_float16(layer, optimizer, scaler, mine)
        was_skipped = scaler.get_scale() < scale
        skipped += was_skipped
        moved[was_skipped] += int((layer.weight != before).sum())
    fits = math.floor(math.log2(torch.finfo(torch.float16).max / largest))
    claim("steps skipped from loss scale 2**15", 15 - fits, skipped, question=3)
    claim("loss scale that is left", 2**fits, scaler.get_scale(), question=3)
    claim("weights that moved in skipped steps", 0, moved[True])
    claim("weights that moved in the others of 12 steps", 4 * (12 - skipped), moved[False])


# %% [markdown]
# **Clipping** limits the norm of the gradients, those of the loss, not of the loss times 1,024.
# `scaler.unscale_(optimizer)` divides them before; `scaler.step` knows that and does not divide
# again. Without that line one clips what is a thousand times too large, and then divides.


# %%
def clipped_update(unscale_first: bool, device: torch.device) -> float:
    """Return the norm of an update with learning rate 1: a gradient of norm 5, clipped to 1."""
    layer = nn.Linear(4, 1, bias=False, device=device)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    sample = torch.full((1, 4), 2.5, device=device)
    with torch.autocast(device.type, torch.float16):
        loss = layer(sample).float().sum()
    scaler.scale(loss).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    scaler.step(optimizer)
    return layer.weight.norm().item()


def check_clipping(device: torch.device) -> None:
    right = clipped_update(True, device)
    wrong = clipped_update(False, device)
    claim("unscaled, then clipped: norm of the update", 1, right, atol=1e-5)
    claim("clipped, then unscaled: norm of the update", 1 / 1024, wrong, atol=1e-8, question=4)


# %% [markdown]
# ## 4. On the disk: all or nothing, with a checksum
#
# `torch.save(state, "checkpoint.pt")` opens the file, which empties it, and then writes. A process
# that dies in between leaves nothing to go on from: neither the old checkpoint nor the new one. The
# remedy is as old as databases. Write next to it under a name that nobody reads, wait until the
# disk has it (**fsync**), and rename. Within one file system a **rename** happens or does not;
# there is no half of it. The folder is synced too, since a name is part of the folder:
#
#     write step-000005.tmp      a kill here leaves a .tmp, which nobody reads
#     fsync the file             without it, after a power cut the name may be there, the bytes not
#     rename to step-000005.pt   from here on the checkpoint exists
#     fsync the folder           now the name survives a power cut, too
#     delete the oldest          two are kept: the newest may turn out to be damaged
#
# Disks, memory and cables flip bits. So the file begins with the SHA-256 of the rest, and the
# reader compares. Only rank 0 writes and reads: the others get what it read, so all go on from the
# same step, and need not see the folder. But it has to *outlive the machine of rank 0*, and to be
# visible to whichever machine is rank 0 next, for torchrun may number the nodes anew after a
# failure: a shared file system, object storage, or a copy on a second node. On node 0's own disk it
# dies with node 0, and a new rank 0 finds an empty folder and begins at step 0, without an error.


# %%
def save_durably(path: Path, data: bytes) -> None:
    """Write the file with its checksum: all of it, or nothing that is called `path`."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(hashlib.sha256(data).digest())
        file.write(data)
        file.flush()  # from Python to the kernel
        os.fsync(file.fileno())  # from the kernel to the disk
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def is_whole(path: Path) -> bool:
    content = path.read_bytes()
    return hashlib.sha256(content[32:]).digest() == content[:32]


def load_bytes(data: bytes) -> dict:
    """Undo `torch.save`, to the CPU; `load_state_dict` copies to the GPU."""
    how = {"map_location": "cpu", "weights_only": True}  # tensors and plain values: runs no code
    return torch.load(io.BytesIO(data), **how)


def newest_whole(folder: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint that has its checksum, and the names of newer ones that have not."""
    damaged = []
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        if is_whole(path):
            return path, damaged
        damaged.append(path.name)
    raise ValueError(f"no checkpoint in {folder} is whole: {damaged}")


def save(training: Training, folder: Path, keep: int = 2) -> None:
    """Write a checkpoint of all ranks from rank 0, and delete what is older than the last two."""
    randoms = gather_objects(random_state(training.device))
    if RANK > 0:
        return
    buffer = io.BytesIO()
    torch.save(training.state() | {"random": randoms}, buffer)
    save_durably(folder / f"step-{training.step:06}.pt", buffer.getvalue())
    for old in sorted(folder.glob("step-*.pt"))[:-keep]:
        old.unlink()


def read(folder: Path) -> dict:
    """On every rank, its state in the newest whole checkpoint, which rank 0 reads."""
    content = None
    if RANK == 0:
        content = newest_whole(folder)[0].read_bytes()
    content = from_rank_0(content)
    checkpoint = load_bytes(content[32:])
    return checkpoint | {"random": checkpoint["random"][RANK]}


# %% [markdown]
# The claims. A process is killed by SIGKILL before each line of `save_durably` in turn, and each
# time one of the two checkpoints has to be whole. The same is done to a function that overwrites.
# Then one bit of the newest checkpoint is flipped, in the exponent of a weight.


# %%
def overwrite(path: Path, data: bytes) -> None:
    """What `torch.save(state, path)` does, as far as a kill is concerned."""
    with open(path, "wb") as file:
        file.write(hashlib.sha256(data).digest())
        file.write(data)


def check_disk(folder: Path) -> None:
    """Kill those who write, and flip a bit; on rank 0."""
    kept = sorted(path.name for path in folder.glob("step-*"))
    kills = []
    if RANK == 0:
        kills = [*kill_at_each_line(save_durably), *kill_at_each_line(overwrite)]
    killed, survived, killed_over, survived_over = from_rank_0(kills)
    print0(f"{'':13}written next to it and renamed: {killed} kills, {survived} survived")
    print0(f"{'':13}overwritten: {killed_over} kills, {survived_over} survived")
    claim("next to it, renamed: share of kills survived", 1, survived / killed, question=5)
    most = 1 - 1 / killed_over
    claim("overwritten: share survived", most, survived_over / killed_over, "<=", question=5)
    claim("checkpoints kept of three", 2, from_rank_0(len(kept)))

    seen = (0, 0, 0)
    if RANK == 0:
        newest, _ = newest_whole(folder)
        before = weights_in(newest)
        flip_a_bit(newest)
        wrong = (weights_in(newest) != before).sum().item()
        newest, damaged = newest_whole(folder)
        seen = (wrong, len(damaged), int(newest.stem.removeprefix("step-")))
    wrong, damaged, step = from_rank_0(seen)
    claim("bit flipped: weights read wrong, with no error", 1, wrong, question=5)
    claim("bit flipped: files that the checksum names", 1, damaged)
    claim("bit flipped: step that is whole before it", STOP - 1, step)


# %% [markdown]
# ## 5. SIGTERM: leave together, after the same step
#
# Slurm's time limit and Kubernetes send **SIGTERM**, and SIGKILL 30 s later. AWS announces the end
# of a spot instance 120 s ahead, and an agent on it makes a SIGTERM of that. torchrun passes it on
# to its ranks, one by one and node by node, so it does not reach all of them in the same step. A
# rank that left at once would leave the others waiting for it in the next all-reduce.
#
# So a handler does nothing but remember. At the end of a step the ranks ask each other, by an
# all-reduce with MAX, whether anyone has been told, and all learn of it after the same step. Then
# they save, and leave, with a status that is not 0: the job is not done. Nothing is lost.
#
# In launch/ddp_surviving.py the question travels while the step computes, and is asked every ten
# steps.


# %%
class Stop:
    """Whether any rank was told to stop."""

    def __init__(self) -> None:
        self.told = 0
        self.before = signal.signal(signal.SIGTERM, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.told = number

    def agreed(self, device: torch.device) -> int:
        """The largest number of a signal that any rank was told, the same on all ranks."""
        number = torch.tensor(self.told, device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)


def train_until_told(training: Training, stop: Stop, folder: Path) -> None:
    """Train; once anyone is told to stop, save, and return."""
    while training.step < STEPS:
        train_step(training)
        if training.step == 6 + RANK:
            signal.raise_signal(signal.SIGTERM)  # in place of the launcher, who tells one by one
        if stop.agreed(training.device):
            save(training, folder)
            return


def check_sigterm(folder: Path, device: torch.device, expected: torch.Tensor) -> None:
    """Stop by SIGTERM, go on in a new `Training`, and compare."""
    folder.mkdir()
    training = Training(device)
    stop = Stop()
    train_until_told(training, stop, folder)
    signal.signal(signal.SIGTERM, stop.before)
    claim("SIGTERM: last step, on every rank", 6, training.step, question=6)
    resumed = go_on(read(folder), device)
    twice = (len(training.seen) + len(resumed.seen)) // BATCH - STEPS
    claim("SIGTERM: steps done twice", 0, twice, question=6)
    claim("SIGTERM: weights that differ", 0, differing(resumed, expected))


# %% [markdown]
# ## 6. A real death
#
# Everything above went on in the same processes, from a state that was read back. Here is a program
# that dies, as small as can be, and a torchrun that starts it again. It trains twice: once without
# a fault, and once so that rank 1 kills itself after step 7, when the last checkpoint is that of
# step 4. torchrun sees the death, ends rank 0, and starts both anew (`--max-restarts`); they find
# the checkpoint. The training asks nowhere whether this is a restart: **if a checkpoint exists,
# load it** is the whole rule. It also serves a job that Slurm starts again, which is no restart to
# torchrun.
#
# Two lines do ask, by TORCHELASTIC_RESTART_COUNT: the fault itself, and the one that puts this
# number before every key of the store. torchrun keeps one store through all restarts, and in it the
# addresses of the dead (a comment in torch's rendezvous.py says otherwise). A rank that comes back
# before its peer reads the peer's old address: `init_process_group("gloo")` alone then dies of
# "connectFullMesh failed ... Connection refused", which costs one more restart, or the job.
#
# The samples are drawn from the rank's generator, so its state is the place in the data, too. Rank
# 0 gathers all ranks' states and writes one file. If each wrote its own, a death between two of
# them would leave ranks at different steps. (To be short, it leaves out fsync and checksum.)

# %%
PROGRAM = """
import hashlib, json, os, pathlib, signal, sys
import torch
import torch.distributed as dist

def train(folder, dies_after=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    momentum = [torch.zeros_like(weight) for weight in model.parameters()]
    torch.manual_seed(1 + rank)
    step = 0
    folder.mkdir(exist_ok=True)
    path = folder / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        momentum = saved["momentum"]
        torch.set_rng_state(saved["random"][rank])
        step = saved["step"]
    while step < 12:
        if step == dies_after and first_start:
            os.kill(os.getpid(), signal.SIGKILL)
        step += 1
        with open(folder / f"steps of rank {rank}", "a") as file:
            file.write(f"{step} ")
        x = torch.randn(16, 8)
        (model(x) - x[:, :4]).square().mean().backward()
        for weight, velocity in zip(model.parameters(), momentum):
            dist.all_reduce(weight.grad)
            velocity.mul_(0.9).add_(weight.grad)
            weight.data.sub_(0.05 * velocity)
            weight.grad = None
        if step % 4 == 0:
            randoms = [None] * world_size
            dist.all_gather_object(randoms, torch.get_rng_state())
            state = {"model": model.state_dict(), "momentum": momentum}
            state |= {"random": randoms, "step": step}
            if rank == 0:
                torch.save(state, folder / "new.tmp")
                os.replace(folder / "new.tmp", path)
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    steps = (folder / f"steps of rank {rank}").read_text().split()
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest(), len(steps)

store, rank, world_size = next(dist.rendezvous("env://"))
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
store = dist.PrefixStore(restarts, store)  # torchrun's store remembers where the dead were
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
first_start = restarts == "0"
here = pathlib.Path(sys.argv[1])
report = {"whole": train(here / "whole")}
report["killed"] = train(here / "killed", dies_after=7 if rank == 1 else None)
report["restarts"] = int(restarts)
(here / f"report {rank}.json").write_text(json.dumps(report))
dist.barrier()
dist.destroy_process_group()
"""


def check_a_real_death(folder: Path) -> None:
    """Let torchrun run the program, from rank 0 of this lesson."""
    reports = []
    folder.mkdir()
    if RANK == 0:
        reports = reports_of_torchrun(folder, ["--nproc-per-node=2", "--max-restarts=1"])
    reports = from_rank_0(reports)
    claim("SIGKILL: times that torchrun started anew", 1, reports[1]["restarts"])
    steps = reports[1]["killed"][1]
    claim("SIGKILL: steps done twice", 7 % 4, steps - reports[1]["whole"][1], question=6)
    alike = sum(report["killed"][0] == report["whole"][0] for report in reports)
    for rank, report in enumerate(reports):
        whole, killed = (report[name][0][:12] for name in ("whole", "killed"))
        print0(
            f"{'':13}rank {rank}, sha256 of weights: {whole}... uninterrupted, {killed}... killed"
        )
    claim("SIGKILL: ranks that end with the same sha256", 2, alike)


# %% [markdown]
# ## 7. How often? Young's interval
#
# A death without a warning costs what was done since the last checkpoint: half an interval on
# average. A checkpoint costs time as well. With c seconds per checkpoint, an interval of t seconds
# between two, and M seconds between failures on average (**MTBF**, mean time between failures), the
# share of the time that is lost is about
#
#     c / t  +  t / (2 M)         least where both are equal:   t = sqrt(2 c M)
#
# which is Young's formula (1974); Daly (2006) added terms that matter where c is not small
# compared with M. At that interval the share lost is sqrt(2 c / M). It falls with the *square root*
# of c: a checkpoint that is four times as fast loses half as much. Asynchronous ones hold training
# up only while the state is copied off the GPU, and c falls from minutes to seconds.
#
# M shrinks as 1/n. Meta counted 419 unexpected interruptions in 54 days on 16,384 H100 (The Llama 3
# Herd of Models, 2024, section 3.3.4): one per 3.1 hours. For a GPU that is 5.8 years, and your
# eight fail about once in nine months.
#
# Below, failures come at random with that MTBF, and five intervals are compared. The formula is the
# prediction. It leaves out terms of the size of c / M, and that is its slack.


# %%
def share_lost(interval: float, cost: float, lifetimes: torch.Tensor) -> float:
    """Work up to each failure; what is behind a written checkpoint was not lost."""
    checkpoints = (lifetimes / (interval + cost)).floor()
    return 1 - (checkpoints * interval).sum().item() / lifetimes.sum().item()


def check_interval() -> None:
    mtbf = 54 * 86_400 / 419
    cost = 60.0
    young = math.sqrt(2 * cost * mtbf)
    generator = torch.Generator().manual_seed(0)
    failures = torch.empty(200_000, dtype=torch.float64)
    lifetimes = failures.exponential_(1 / mtbf, generator=generator)
    lost = {}
    for factor in (1 / 4, 1 / 2, 1, 2, 4):
        lost[factor] = share_lost(factor * young, cost, lifetimes)
        print0(f"{'':13}every {factor * young / 60:4.0f} minutes: {lost[factor]:6.1%} is lost")
    best = min(lost, key=lost.get)
    claim("interval that loses least / sqrt(2 c M)", 1, best, question=7, kind="simulated")
    predicted = math.sqrt(2 * cost / mtbf)
    text = "share lost there"
    claim(text, predicted, lost[best], atol=cost / mtbf, question=7, kind="simulated")


# %% [markdown]
# What c is on a machine with a GPU: a gigabyte is copied into pinned memory, and written durably.


# %%
def check_copy(folder: Path, device: torch.device, elements: int = 2**28) -> None:
    """Claim that a checkpoint is off the GPU long before it is on the disk."""
    text = "1 GB: to write it / to copy it off the GPU"
    if device.type == "cpu":
        blocked(text, needs="1 GPU")
        return
    seconds = [1.0, 0.0]
    if RANK == 0:
        state = torch.randn(elements, device=device)
        host = torch.empty(elements, pin_memory=True)
        host.copy_(state)
        torch.cuda.synchronize()
        start = time.perf_counter()
        host.copy_(state, non_blocking=True)
        torch.cuda.synchronize()
        copied = time.perf_counter()
        save_durably(folder / "large.pt", host.numpy().tobytes())
        torch.cuda.synchronize()
        seconds = [copied - start, time.perf_counter() - copied]
    copy, write = from_rank_0(seconds)
    rates = f"{4e-9 * elements / copy:.1f} GB/s off the GPU, {4e-9 * elements / write:.2f} GB/s"
    print0(f"{'':13}{rates} to the disk, with checksum and fsync")
    claim(text, 2, write / copy, ">=", timed=True)


# %% [markdown]
# ## 8. How it is measured
#
# Weights are compared element by element, without tolerance.


# %%
def weights_of(training: Training) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in training.ddp.parameters()])


def differing(training: Training, expected: torch.Tensor) -> int:
    """How many weights are not exactly the expected ones."""
    return int((weights_of(training) != expected).sum())


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


# %% [markdown]
# **Kills.** A forked child calls the function that writes, and Python tells it of every line of
# that function before it runs (`sys.settrace`). At the k-th it kills itself. Nothing is tidied up
# after SIGKILL: what Python still had in its buffer is gone, what the kernel had is not. k grows
# until the child comes to the end. (No power is cut here, so leaving out `fsync` would go
# unnoticed: exercise 17 watches the order instead.)


# %%
def kill_at_each_line(write: Callable[[Path, bytes], None]) -> tuple[int, int]:
    """Return how often a child was killed in `write`, and how often a whole file was left."""
    fork = multiprocessing.get_context("fork")
    killed = 0
    survived = 0
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "checkpoint.pt")
        while True:
            save_durably(path, b"old" * 10_000)
            arguments = (write, path, b"new" * 10_000, killed + 1)
            child = fork.Process(target=write_and_die, args=arguments)
            child.start()
            child.join()
            if child.exitcode != -signal.SIGKILL:
                return killed, survived
            killed += 1
            survived += is_whole(path)


def write_and_die(write: Callable[[Path, bytes], None], path: Path, data: bytes, line: int) -> None:
    """Call `write`, and die before so many of its lines have run."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable | None:
        nonlocal lines
        if frame.f_code is not write.__code__:
            return None
        lines += event == "line"
        if lines == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    write(path, data)


def weights_in(path: Path) -> torch.Tensor:
    """All weights of a checkpoint, read as who knows nothing of checksums would."""
    checkpoint = load_bytes(path.read_bytes()[32:])
    return torch.cat([weight.flatten() for weight in checkpoint["model"].values()])


def flip_a_bit(path: Path) -> None:
    """Flip the highest bit of the exponent of the checkpoint's first weight."""
    content = bytearray(path.read_bytes())
    weight = weights_in(path)[:4]  # as many as are surely unique
    first = content.index(weight.numpy().tobytes())
    content[first + 3] ^= 0b0100_0000
    path.write_bytes(content)


# %% [markdown]
# **The torchrun** that rank 0 starts is to end with it, and so are its ranks: each asks for SIGKILL
# when what started it ends (fundamentals/08_inside_a_launcher.py). It must not take itself for a
# rank of this lesson, so torchrun's variables are hidden from it.


# %%
def reports_of_torchrun(folder: Path, flags: list[str]) -> list[dict]:
    """Run PROGRAM; return what its ranks report."""
    tied = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n" if sys.platform == "linux" else ""
    run = "from torch.distributed.run import main; main()"  # what the command `torchrun` does
    options = ["--standalone", "--local-addr=localhost", f"--log-dir={folder}/logs", *flags]
    program = ["--no-python", sys.executable, "-c", tied + PROGRAM, str(folder)]
    environment = {"OMP_NUM_THREADS": "1"}
    for name, value in os.environ.items():
        if not re.search("RANK|WORLD_SIZE|MASTER_|TORCHELASTIC_", name):
            environment[name] = value
    command = [sys.executable, "-c", tied + run, *options, *program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    if ran.returncode != 0:
        sys.exit(ran.stderr)
    return [json.loads((folder / f"report {rank}.json").read_text()) for rank in range(2)]


# %% [markdown]
# ## What you should have seen
#
# 1. None, and after each of the five omissions practically all, since a difference in one step
#    reaches every weight by the next. So none of the five is dispensable, and most of them show in
#    no loss curve: the run with the same dropout masks again learns as well. That is why comparing
#    bits is the test. It finds what is missing from a checkpoint, and later any change to the code
#    that was not meant to change the result.
# 2. Steps 1 to 3 again in place of steps 6 to 8: 3 x 4 x 8 = 96 samples twice, and 96 never. The
#    evaluation by `DistributedSampler` counts 4 x 250 = 1,000 images, three of them twice. On 64
#    ranks it would be 27. Every n-th image per rank makes 997 on any number of ranks.
# 3. Six, on all ranks: 32,768 is 2**15, and 100 x 2**9 = 51,200 is the first product that fits. So
#    512 is left. In the skipped steps no weight moved, on no rank, though the gradients of all
#    ranks but one were finite: the all-reduce spread the infinity. (`GradScaler` itself begins at
#    2**16, where even a gradient of 1 overflows: 65,536 is more than 65,504.)
# 4. 1/1,024: the gradient times the scale has norm 5,120 and is clipped to 1, and then divided by
#    1,024. Training goes on a thousand times too slowly, and faster whenever the scale halves.
# 5. Yes, while it overwrites: between opening the file, which empties it, and closing it. Written
#    next to it and renamed, one checkpoint is whole after a kill at any line. And `torch.load`
#    says nothing about the bit: one weight of 0.1 has become 1e37 or so, and the first forward pass
#    is NaN. The checksum names the file, and the one before it, of step 4, is whole.
# 6. After step 6, all of them: rank 0 was told after it, and the others learned of it before their
#    own signal came. No step is lost, and the weights are the uninterrupted run's. After SIGKILL
#    steps 5, 6 and 7 were done twice, and the weights are the same here too. What a death without
#    a warning costs is time, and nothing else.
# 7. After 19 minutes: t = sqrt(2 x 60 x 11,135) = 1,156 s. A tenth of the time is lost, half of it
#    writing and half of it doing work again, and not much more at half or twice the interval: the
#    minimum is flat. Meta reports an effective training time above 90% for that run.
#
# **Try.** Without `warm_up` the first step after a restart adds up in another order than the
# uninterrupted run did there: on three ranks "whole checkpoint: weights that differ" and "SIGTERM:
# weights that differ" fail. On four nothing does, by luck: these gradients have the 11 bits of
# float16, a quarter of them has as many, and float32 adds them up without rounding. A third has
# not, and neither have gradients of float32. On two ranks a + b = b + a. Without a generator of its
# own the new loader draws a number from the generator that was just restored: the same two claims
# fail on any number of ranks, since the dropout masks are other ones.
#
# On GPUs the list has one more entry, the GPU's generator, and one more condition: kernels that add
# up in a fixed order (`torch.use_deterministic_algorithms`, CUBLAS_WORKSPACE_CONFIG). NCCL has to
# add in the same order too: the same version, layout of nodes, algorithm, protocol and number of
# channels (NVLink SHARP on or off counts). A thousand ranks do not send their state to rank 0: each
# writes its shard (torch.distributed.checkpoint), and the checkpoint exists once rank 0 has written
# the list of them. The same number of ranks is needed for the same bits; with another number,
# training goes on well, but rounds otherwise.
#
# launch/ddp_surviving.py is all of this in one file to copy, with what a lesson leaves out: workers
# and augmentation, accumulation, a full disk, orphans of a dead launcher, ranks that hang, settings
# that changed, `@record`, logs with the rank in front, TensorBoard. Its tests kill
# it before every line that writes, and at random anywhere else. launch/ddp_minimal.py is for trying
# something for an hour.


# %%
def main() -> None:
    command_line()
    launch()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    device = setup()
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    with tempfile.TemporaryDirectory() as scratch:  # rank 0's is the one that is used
        folder = Path(scratch)
        expected, seen = check_resume(folder, device)
        check_samples(folder, device, seen)
        check_overflow(device)
        check_clipping(device)
        check_disk(folder)
        check_sigterm(folder / "sigterm", device, expected)
        check_a_real_death(folder / "sigkill")
        check_interval()
        check_copy(folder, device)
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
