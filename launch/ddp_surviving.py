"""Train on images with DistributedDataParallel, and survive: the complete file to copy.

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 ddp_surviving.py
    torchrun ... ddp_surviving.py --data FOLDER --epochs 90 --batch 256 --warm-up 1000 --workers 8

FOLDER has train/ and val/ in it, and there a folder of images per class: ResNet-18 learns them.
Without it a small CNN learns scikit-learn's digits. Put your own in `build_model` and `load_data`.
After whatever end, type the same line again: it goes on where the last checkpoint was written.

**The claim.** Killed at any point and started again with as many ranks, it ends with the same
weights, bit for bit, on the same kind of machine and the same torch. On **another number of
ranks**, or --micro-batch, a step takes the same images, cropped alike, and their mean: --batch
counts those of all ranks. Only sums round otherwise; dropout and batch norm, a rank's own, differ.

**It survives**
- a rank that is killed or raises: torchrun starts all ranks anew, from the last checkpoint;
- a rank that hangs: the others give up after --timeout seconds, and torchrun starts all anew;
- SIGTERM, as Slurm sends it before the time limit and launch/aws before a spot node is taken,
  Ctrl-C, and SIGHUP, when a terminal closes: all ranks end the same step, save, and leave (status
  143, 130, 129), if --listen-every steps and the save fit into torchrun's --shutdown-timeout, 30 s;
- the death of torchrun itself: its ranks see that they are orphans, save, and leave. A new run
  waits until they have left: two never write into one folder;
- death while a checkpoint is written, and no room for two in a row: the one before is whole;
- a checkpoint that is cut off, incomplete, or has a bit flipped: it is named, put aside as
  step-N.damaged, and the one before it is used. If none is whole, nothing starts;
- gradients that are not finite: all ranks stop before that step, and it is not saved.

**It refuses** a missing GPU, bfloat16 that a GPU emulates, another batch or rate than before. It
trains on the CPU where no node has a GPU, or where CUDA_VISIBLE_DEVICES is empty on all nodes.

**It does not survive**
- a disk that fails, or has no room for three saves in a row: it ends, and puts none aside;
- the loss of the disk. On several nodes all have to share the folder of --checkpoints;
- wrong arithmetic: a GPU that computes nonsense has it saved with a correct checksum;
- transforms that draw from numpy or from Python's `random`: an image's seed is torch's alone.
"""

import errno
import fcntl
import hashlib
import io
import json
import logging
import math
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import time
import traceback
import zlib
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None

PARTS = ("model.pt", "optimizer.pt", "progress.pt")  # the files of a checkpoint
CHECKSUMS = "checksums.json"  # and the one that vouches for them
DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOCK_SECONDS = 60  # that orphans of a run before may take to leave
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}  # why a save may fail, and the run goes on
MOST_FAILED = 3  # such saves in a row, which end it
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of red, green, blue
log = logging.getLogger("training")


def read_flags() -> Namespace:
    flags = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = flags.add_argument
    add("--data", type=Path, help="folder with train/ and val/, else the digits")
    add("--checkpoints", type=Path, default="checkpoints", help="folder for them")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--keep", type=int, default=3, help="how many checkpoints stay")
    add("--keep-every", type=int, default=100, help="and of all each so many-th")
    add("--epochs", type=int, default=6)
    add("--batch", type=int, default=96, help="images of a step, on all ranks")
    add("--micro-batch", type=int, default=64, help="at most so many at a time")
    add("--learning-rate", type=float, default=0.1, help="falls to 0 by a cosine")
    add("--warm-up", type=int, default=0, help="first steps, in which it rises")
    add("--weight-decay", type=float, default=5e-5, help="of weights, not of biases")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--precision", choices=DTYPES, default="bfloat16")
    add("--loss-scale", type=float, default=2.0**16, help="first one, for float16")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="loader processes of one rank")
    add("--log-every", type=int, default=10, help="steps between lines")
    add("--listen-every", type=int, default=10, help="steps until SIGTERM is heard")
    add("--timeout", type=float, default=600, help="seconds to wait for a rank")
    args = flags.parse_args()
    least = {"keep": 2, "warm_up": 0, "workers": 0, "seed": 0}  # 2: the newest may be damaged
    for name, value in vars(args).items():
        if type(value) is int and value < least.get(name, 1):
            flags.error(f"--{name.replace('_', '-')} must be at least {least.get(name, 1)}")
    return args


# What is yours: the model and the data


def build_model(args: Namespace, classes: int) -> nn.Module:
    if args.data:
        from torchvision.models import resnet18

        return resnet18(num_classes=classes)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # 8 x 8 pixels to 4 x 4
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # to 2 x 2
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 2 * 2, classes),
    )  # fmt: skip


def load_data(args: Namespace) -> tuple[Dataset, Dataset, int]:
    """Images to learn from, images to be judged by, number of classes."""
    if args.data:
        from torchvision import transforms
        from torchvision.datasets import ImageFolder

        crop = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
        middle = [transforms.Resize(256), transforms.CenterCrop(224)]
        scale = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        train = ImageFolder(args.data / "train", transforms.Compose(crop + scale))
        test = ImageFolder(args.data / "val", transforms.Compose(middle + scale))
        return train, test, len(train.classes)
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(data, order[:1440]), Subset(data, order[1440:]), 10


class MicroBatches(Sampler):
    """This rank's share of each step, in micro-batches of (epoch, index), from any step on.

    A step's images are the same on any number of ranks, dealt out like cards. What an epoch leaves
    over waits for another epoch's order.
    """

    def __init__(self, images: int, batch: int, most: int, seed: int) -> None:
        self.images, self.batch, self.seed = images, batch, seed
        self.epoch, self.first = 0, 0  # which epoch, and how many of its steps are done
        self.steps = images // batch
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.per_step = math.ceil(len(range(self.rank, batch, self.ranks)) / most)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        dice = torch.Generator().manual_seed(seed_of(self.seed, self.epoch))
        order = torch.randperm(self.images, generator=dice).tolist()
        for step in range(self.first, self.steps):
            mine = order[step * self.batch : (step + 1) * self.batch][self.rank :: self.ranks]
            for part in range(self.per_step):  # of equal size, or one more
                yield [(self.epoch, index) for index in mine[part :: self.per_step]]


class Seeded(Dataset):
    """Draws an image's augmentation from (seed, epoch, index), whatever rank or worker makes it."""

    def __init__(self, data: Dataset, seed: int) -> None:
        self.data, self.seed = data, seed

    def __getitems__(self, places: list[tuple[int, int]]) -> list:
        found = []
        with torch.random.fork_rng(devices=[]):  # the model's own dropout must not notice
            for place in places:
                torch.default_generator.manual_seed(seed_of(self.seed, *place))
                found.append(self.data[place[1]])
        return found


def seed_of(*numbers: int) -> int:
    """A seed for these: 32 bits are all that torch's generator takes, so sums would collide."""
    return zlib.crc32(" ".join(map(str, numbers)).encode())


# Checkpoints: rank 0 writes and chooses, then every rank reads. So nodes must share the folder.


def checkpoints_in(folder: Path) -> list[Path]:
    """Newest first. Only step-DIGITS is one: no step-N.tmp or step-N.damaged, no copy step-best."""
    found = [path for path in folder.glob("step-*") if path.name[len("step-") :].isdecimal()]
    return sorted(found, reverse=True)


def sync(path: Path) -> None:
    """Have this file, or the names in this folder, on the disk: for the case of a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_checkpoint(folder: Path, step: int, states: dict, keep: int, stays: int) -> None:
    """Write all or nothing; then delete all but the last `keep`, and steps that `stays` divides."""
    final = folder / f"step-{step:09}"
    if final.exists():  # it was loaded from there, or saved before SIGTERM came
        return
    temporary = final.with_suffix(".tmp")
    temporary.mkdir()
    sums = {}
    for name, state in states.items():
        file = io.BytesIO()  # into memory: on a full disk torch.save raises no OSError
        torch.save(state, file)
        sums[name] = hashlib.sha256(file.getbuffer()).hexdigest()
        (temporary / name).write_bytes(file.getbuffer())
        sync(temporary / name)
    (temporary / CHECKSUMS).write_text(json.dumps(sums))
    sync(temporary / CHECKSUMS)
    sync(temporary)
    temporary.rename(final)  # at this moment it begins to exist
    sync(folder)
    for old in checkpoints_in(folder)[keep:]:
        if int(old.name.removeprefix("step-")) % stays:
            old.rename(old.with_suffix(".tmp"))  # half of one must not look like one
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob("step-*.tmp"):
        shutil.rmtree(leftover)


def check(path: Path) -> None:
    """Raises ValueError if a file is not as it was written, OSError if the disk fails to read."""
    try:
        sums = json.loads((path / CHECKSUMS).read_bytes())
        for name in PARTS:
            with open(path / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if not isinstance(sums, dict) or sums.get(name) != found:
                raise ValueError(f"{name} does not have the checksum it had")
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def newest_whole(folder: Path) -> Path | None:
    """On rank 0: the newest whole checkpoint; None if there never was one."""
    remove_leftovers(folder)
    found = checkpoints_in(folder)
    for path in found:
        try:
            check(path)
            return path
        except ValueError as error:
            log.error("%s. It is put aside; the one before it is used.", error)
            aside = path.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    if found or [*folder.glob("step-*.damaged")]:
        raise ValueError(f"no checkpoint in {folder} is whole. Remove the folder to start anew.")
    return None


def load_checkpoint(folder: Path, device: torch.device) -> dict[str, dict]:
    """What `states` made, the same on every rank; empty if there is none."""
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, [path.name for path in checkpoints_in(folder)[:1]])
    if max(seen) > seen[0]:
        raise ValueError(f"a rank sees {max(seen)[0]} in {folder}, and rank 0 does not: share it")
    word = [None, ""]
    if dist.get_rank() == 0:
        try:
            word[0] = newest_whole(folder)
        except (ValueError, OSError) as error:
            word[1] = str(error)
    dist.broadcast_object_list(word, src=0)  # rank 0 decides for all
    path, why_not = word
    states = {}
    if path:
        how = {"map_location": device, "weights_only": True}  # plain values: no code is run
        try:
            check(path)  # what this rank's machine reads
            states = {name: torch.load(path / name, **how) for name in PARTS}
        except (ValueError, OSError, pickle.UnpicklingError) as error:
            why_not = f"rank {dist.get_rank()} on {socket.gethostname()}: {error}"
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why_not)
    if any(reasons):
        raise ValueError(max(reasons))
    return states


def lock(folder: Path) -> None:
    """Keep other runs out until this process ends, however it ends."""
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    for _ in range(10 * LOCK_SECONDS):
        try:
            return fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            time.sleep(0.1)
    raise ValueError(f"another run trains into {folder}. End it, or choose other --checkpoints.")


class Stop:
    """Whether any rank was told to stop. All ranks learn of it at the end of the same step."""

    def __init__(self) -> None:
        self.heard = [0]  # the numbers of the signals that came
        self.parent = os.getppid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self.heard.append(number))

    def ask(self) -> None:
        """At the start of a step: the answer travels while the step computes."""
        if os.getppid() != self.parent:  # torchrun has died
            self.heard.append(signal.SIGTERM)
        self.flag = torch.tensor(self.heard[-1])  # on the CPU, through gloo: no GPU waits for it
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True)

    def answer(self) -> int:
        """The largest number of a signal that came to any rank before it asked, or 0."""
        self.work.wait()
        return int(self.flag)


class Trainer:
    """All that a checkpoint holds, and the step that changes it."""

    def __init__(self, args: Namespace, device: torch.device) -> None:
        self.args, self.device, self.rank = args, device, dist.get_rank()
        train, self.test, classes = load_data(args)
        if not dist.get_world_size() <= args.batch <= len(train):
            told = f"--batch {args.batch}: at least one image for each of {dist.get_world_size()}"
            raise ValueError(f"{told} ranks, and at most the {len(train)} there are")
        self.sampler = MicroBatches(len(train), args.batch, args.micro_batch, args.seed)
        how = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
        how["pin_memory"] = device.type == "cuda"
        self.loader = DataLoader(Seeded(train, args.seed), batch_sampler=self.sampler, **how)
        self.total_steps = args.epochs * self.sampler.steps
        torch.manual_seed(args.seed)
        model = build_model(args, classes).to(device)
        self.ddp = nn.parallel.DistributedDataParallel(model)
        weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        groups = [{"params": weights, "weight_decay": args.weight_decay}, {"params": others}]
        how = {"lr": args.learning_rate, "momentum": 0.9, "nesterov": True}
        self.optimizer = torch.optim.SGD(groups, **how)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        scales = args.precision == "float16"  # whose small gradients would else be 0
        self.scaler = torch.amp.GradScaler(device.type, args.loss_scale, enabled=scales)
        self.step, self.batches = 0, None  # the next step, and what is left of its epoch
        self.failed = 0  # saves in a row
        self.arrange_buckets([train[0], train[1]])
        same = "epochs batch learning_rate warm_up weight_decay clip precision seed"
        self.settings = {name: getattr(args, name) for name in same.split()}
        self.settings["images"] = len(train)

    def rate(self, step: int) -> float:
        """By what the learning rate is multiplied in a step, from 0: up a line, down a cosine."""
        if step < self.args.warm_up:
            return (step + 1) / (self.args.warm_up + 1)
        left = max(1, self.total_steps - self.args.warm_up)
        return (1 + math.cos(math.pi * (step - self.args.warm_up) / left)) / 2

    def arrange_buckets(self, samples: list) -> None:
        """Let DDP do now what it does after its first backward: arrange its buckets anew.

        From three ranks on, a gradient's place in its bucket decides in which order the ranks'
        shares are added. Without this, the first step after a restart would round otherwise.
        """
        before = deepcopy(self.ddp.module.state_dict())
        self.loss(*next(iter(DataLoader(samples, 2)))).backward()
        self.optimizer.zero_grad()
        self.ddp.module.load_state_dict(before)  # batch norm has counted along

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The sum over a micro-batch."""
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        dtype = DTYPES[self.args.precision]
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return nn.functional.cross_entropy(self.ddp(x), y, reduction="sum")

    def train_step(self) -> torch.Tensor:
        """Take the next step; return this rank's loss of it. The mean over ranks is the batch's."""
        epoch, done = divmod(self.step, self.sampler.steps)
        if self.batches is None or done == 0:
            self.sampler.epoch, self.sampler.first = epoch, done
            self.batches = iter(self.loader)
        # Dropout draws by the step, on each rank others: no state of a generator is to be saved.
        seed = seed_of(self.args.seed, self.step, dist.get_world_size(), self.rank)
        torch.manual_seed(seed)
        random.seed(seed)
        # DDP divides by the ranks. Their shares differ by an image if they do not divide a batch.
        scale = dist.get_world_size() / self.args.batch
        total = 0
        for left in reversed(range(self.sampler.per_step)):
            with self.ddp.no_sync() if left else nullcontext():  # one all-reduce per step
                loss = self.loss(*next(self.batches)) * scale
                self.scaler.scale(loss).backward()
            total += loss.detach()
        self.update()
        self.step += 1
        return total

    def update(self) -> None:
        """Change the weights, unless the gradients' norm is not finite: then all ranks raise."""
        self.scaler.unscale_(self.optimizer)  # clip the gradients, not what the scale makes of them
        norm = nn.utils.clip_grad_norm_(self.ddp.parameters(), self.args.clip)
        scale = self.scaler.get_scale()
        # An overflow by float16's scale is no divergence: such a step is skipped, the scale halved.
        if scale <= 1 and not norm.isfinite():
            told = f"step {self.step + 1}: the gradients' norm is {norm:g}. It was not taken"
            raise FloatingPointError(f"{told} or saved: look at its data and the learning rate")
        self.scaler.step(self.optimizer)  # does nothing if a gradient is infinite
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scaler.get_scale() < scale:
            log.warning("step %d overflowed in float16 and is skipped", self.step + 1)
        else:
            self.scheduler.step()

    @torch.no_grad()
    def evaluate(self) -> tuple[int, int]:
        """How many test images are recognized, and of how many: each counts once."""
        for buffer in self.ddp.module.buffers():
            dist.broadcast(buffer, 0)  # batch norm's statistics: all ranks judge by rank 0's
        own = Subset(self.test, range(self.rank, len(self.test), dist.get_world_size()))
        counts = torch.zeros(2, dtype=torch.long, device=self.device)
        self.ddp.eval()
        for x, y in DataLoader(own, 100, num_workers=self.args.workers):
            right = self.ddp.module(x.to(self.device)).argmax(1) == y.to(self.device)
            counts += torch.tensor([right.sum(), len(y)], device=self.device)
        self.ddp.train()
        dist.all_reduce(counts)  # whatever the sizes of the last batches were
        return tuple(counts.tolist())

    def save(self, must: bool) -> None:
        """Write a checkpoint. Where there is no room, go on; raise at the third, or if `must`."""
        if self.rank > 0:
            return
        progress = {"step": self.step, "settings": self.settings}
        progress |= {"scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict()}
        model = self.ddp.module.state_dict()
        parts = dict(zip(PARTS, (model, self.optimizer.state_dict(), progress), strict=True))
        try:
            stays = self.args.save_every * self.args.keep_every
            write_checkpoint(self.args.checkpoints, self.step, parts, self.args.keep, stays)
            log.info("step %d is saved", self.step)
            self.failed = 0
        except OSError as error:
            self.failed += 1
            told = f"SAVE FAILED, {self.failed} in a row, and {MOST_FAILED} end the run"
            log.critical("%s: step %d could not be saved: %s", told, self.step, error)
            remove_leftovers(self.args.checkpoints)  # the room is needed
            if must or error.errno not in NO_ROOM or self.failed == MOST_FAILED:
                raise

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        parts = load_checkpoint(self.args.checkpoints, self.device)
        if not parts:
            log.info("no checkpoint in %s: begins with step 1", self.args.checkpoints)
            return
        model, optimizer, progress = (parts[name] for name in PARTS)
        for name, was in progress["settings"].items():
            if (now := self.settings.get(name)) != was:
                told = f"{self.args.checkpoints} was written with {name} {was}, this run has {now}"
                raise ValueError(f"{told}: take the same, or other --checkpoints")
        self.ddp.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(progress["scheduler"])
        self.scaler.load_state_dict(progress["scaler"])
        self.step = progress["step"]
        log.info("goes on after step %d of %d", self.step, self.total_steps)


def own_device(precision: str) -> torch.device:
    """This rank's GPU, or the CPU. Raises ValueError if there are GPUs and it can have none."""
    gpus, ranks = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    no_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # it is the user who wants none
    if no_gpus or not (gpus or os.path.exists("/dev/nvidia0")):
        return torch.device("cpu")
    if gpus < ranks:
        told = f"{socket.gethostname()} has {ranks} ranks, and torch sees {gpus} GPUs"
        raise ValueError(f"{told}: as many ranks as GPUs, or CUDA_VISIBLE_DEVICES= for the CPU")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if precision == "bfloat16" and not torch.cuda.is_bf16_supported(False):
        told = f"{torch.cuda.get_device_name(device)} on {socket.gethostname()} emulates bfloat16"
        raise ValueError(f"{told}, slowly (GPUs have it from Ampere on): take --precision float16")
    return device


def join(precision: str, timeout: timedelta) -> torch.device:
    """Do what init_process_group does; return this rank's device. Raises on all ranks, or on none.

    It forgets the addresses of ranks that have died, which torchrun's store has kept: torch 2.15
    makes one TCPStore for all restarts (dynamic_rendezvous.py), unless it is told not to. On one
    node a prefix per restart does. Several do not count restarts alike: the variable has to.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    elif shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        raise ValueError(f"--max-restarts on several nodes: export {name}=1 on each")
    try:
        device = own_device(precision)
        told = device.type
    except (ValueError, RuntimeError) as error:  # RuntimeError: CUDA cannot reach the GPU
        told = str(error)
    # Before any collective, which would wait for a rank that has given up.
    store.set(f"rank {rank}", told)
    every = store.multi_get([f"rank {other}" for other in range(world_size)])  # waits for all
    for told in every:
        if told not in (b"cuda", b"cpu"):
            raise ValueError(told.decode())
    gpus = every.count(b"cuda")
    if gpus not in (0, world_size):
        told = f"{gpus} of {world_size} ranks have a GPU, the other nodes have none"
        raise ValueError(f"{told}: CUDA_VISIBLE_DEVICES= on every node if it is to be the CPU")
    how = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
    gpu = device if gpus else None
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", device_id=gpu, **how)
    return device


def meet() -> None:
    """Wait for all ranks, by gloo: dist.barrier takes NCCL if it is there, so zeros are summed."""
    if dist.get_backend() == "gloo":
        dist.barrier()  # has no tensor: an exit while a thread of gloo's lets go of one may abort
    else:
        dist.all_reduce(torch.zeros(1))


def run(trainer: Trainer, stop: Stop) -> None:
    """Train to the end, or until a signal comes."""
    args = trainer.args
    writer = None
    if SummaryWriter and trainer.rank == 0:  # what was written beyond this step is taken back
        writer = SummaryWriter(args.checkpoints / "tensorboard", purge_step=trainer.step + 1)
    while trainer.step < trainer.total_steps:
        listens = trainer.step % args.listen_every == 0  # the same steps on all ranks
        if listens:
            stop.ask()
        loss = trainer.train_step()
        number = stop.answer() if listens else 0
        step = trainer.step
        last = step == trainer.total_steps
        if step % args.log_every == 0 or last:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
            log.info("step %d of %d, loss %.4f", step, trainer.total_steps, loss)
            if writer:
                writer.add_scalar("loss", loss, step)
                writer.flush()  # os._exit would lose it
        if step % trainer.sampler.steps == 0:  # before saving: who dies here does it again
            right, seen = trainer.evaluate()
            log.info("epoch %d: %d of %d right", step // trainer.sampler.steps, right, seen)
            if writer:
                writer.add_scalar("accuracy", right / seen, step)
                writer.flush()
        if number or last or step % args.save_every == 0:
            trainer.save(must=last)
        if number and not last:
            meet()  # torchrun ends all ranks when the first has left: rank 0 is to be done
            log.warning("leaves after step %d: %s", step, signal.Signals(number).name)
            dist.destroy_process_group()
            sys.exit(128 + number)  # not 0, which would mean that training is over


@record  # an exception reaches torchrun's report, with the rank that had it first
def main() -> None:
    args = read_flags()
    stop = Stop()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is asked anything
    device = join(args.precision, timedelta(seconds=args.timeout))
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    rank = dist.get_rank()
    told = f"%(asctime)s {socket.gethostname()} [rank {rank}] %(message)s"
    logging.basicConfig(format=told, level="WARNING" if rank else "INFO", stream=sys.stdout)
    if rank == 0:
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        lock(args.checkpoints)
    log.info("%d ranks on %s", dist.get_world_size(), "GPUs" if device.type == "cuda" else "CPUs")
    trainer = Trainer(args, device)
    trainer.resume()
    run(trainer, stop)
    meet()  # gloo's threads are done with the last gradients: else an exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        os._exit(1)  # at once: a tidy end would wait for ranks that are gone
