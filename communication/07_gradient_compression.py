"""Gradient compression: send less, and what you did not send, later

**Question.** When the network is the limit, a step takes as long as its bytes. How few bytes can a
step of data-parallel training send and still learn, and what does that buy on which link?

**Predict.** 85,002 gradients, 4 ranks. Which sends fewer bytes, float16 by all-reduce or 8 bits by
all-gather? Every rank sends the largest 0.1% of its gradients and drops the rest: what becomes of
the accuracy? And if it adds the rest to its next gradients instead?

**Run.**

    torchrun --standalone --nproc-per-node=4 07_gradient_compression.py  # NCCL, given 4 GPUs
    python 07_gradient_compression.py                                    # the same; gloo if not

For the slow link that rank 0 makes: Linux, iproute2, and root or user namespaces.

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 23 s; never run on several GPUs) that
8 bits send what float16 sends; that top-k, with 680 bytes a step, not 340,008, comes to 90%
accuracy, but to 61% if it drops the rest: 93% of all gradients are lost; that across a cable of
20 Mbit/s a step of float32 takes 0.2 s, of bfloat16 half, of PowerSGD 1 10 to 21 ms, and when
float32 has made 5 steps and is at 56%, top-k is at 90%; and that on the fast link PowerSGD only
costs time.

**Next.** parallelism/01_data_parallelism_ddp.py builds what these hooks plug into.
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

WORLD_SIZES = range(1, 65)  # beyond, a rank would have less than one sample a step
FLAGS: dict[str, dict] = {}
GLOBAL_BATCH, STEPS, RATE = 96, 60, 0.3  # samples a step, all ranks together; learning rate
MBIT, SLOW_STEPS, EVERY = 20, 4, 5  # the slow link, steps on it; steps from a look to the next
SHARE, H = 0.001, 10  # of all gradients, what top-k sends; steps from one outer step to the next
SHAPES: list[tuple[int, ...]] = [(256, 64), (256,), (256, 256), (256,), (10, 256), (10,)]
P, ENDS, BIASES = sum(map(prod, SHAPES)), 256 + 64 + 256 + 256 + 10 + 256, 256 + 256 + 10
Sent = tuple[torch.Tensor, torch.Tensor]  # what this rank sent, and the mean over ranks of that
Compressor = Callable[[torch.Tensor], Sent]


def main(options: argparse.Namespace) -> None:
    link = start_link() if RANK == 0 and WORLD_SIZE > 1 else None  # it forks, so first of all
    runs = train(device := setup(), STEPS, STEPS)
    nothing_is_lost(runs)
    slow = across(link, runs)
    table(runs, slow)
    what_it_buys(runs, slow)
    published(device)
    finish()


# %% [markdown]
# ## 1. Fewer bits a number, fewer numbers
#
# A compressor takes x, all this rank's gradients; it returns what it sent of them and the mean over
# ranks of what all sent. *float16* is added up on the way, by all-reduce, as float32 is. *8 bits*
# are not: a sum of two needs nine, and each rank has a scale of its own. So every rank gathers what
# *all* sent and adds up itself. On a ring, all-reduce of B bytes sends 2(n-1)/n B, never 2 B;
# all-gather (n-1) B: with 4 ranks 8 bits cost what 16 do, with 8 ranks what 32 do. Rounding is up
# or down at random, more likely to the nearer, so right on average (Alistarh et al. 2017). *Top-k*
# sends the few largest, with their places. Ranks pick different ones: gathered, too.
#
# *PowerSGD* (Vogels et al. 2019, algorithm 1) takes a weight's gradient for the matrix M (m x k)
# that it is, and sends one of rank r: P Q', so r(m + k) numbers, not m k. One step of power
# iteration finds it, from the last step's Q on:
#
#     P = mean of M Q;   make P's columns orthonormal;   Q = mean of M' P;   mean of M ~ P Q'
#
# M Q and M' P are linear in M: all-reduce can add them up, and the price does not grow with n.
# Biases go whole, in P's message. torch's powerSGD_hook does the same, but deadlocks on gloo.


# %%
def mean(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Over ranks, all in one message. Divided first: a sum of float16 cannot overflow."""
    flat = torch.cat([t.flatten() for t in tensors]).div_(WORLD_SIZE)
    dist.all_reduce(flat)
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def gather(x: torch.Tensor) -> torch.Tensor:
    """Every rank's x, a row each."""
    everyone = x.new_empty(WORLD_SIZE * len(x))
    dist.all_gather_into_tensor(everyone, x)
    return everyone.view(WORLD_SIZE, len(x))


def cast(dtype: torch.dtype) -> Compressor:
    return lambda x: (x.to(dtype).float(), mean([x.to(dtype)])[0].float())


def eight_bits(x: torch.Tensor) -> Sent:
    """Every number is so many times max|x|/127; this step goes first, as four bytes."""
    step = x.abs().max().clamp(min=1e-30) / 127
    times = torch.floor(x / step + torch.rand_like(x)).clamp(-127, 127).to(torch.int8)
    everyone = gather(torch.cat([step[None].view(torch.int8), times]))
    step_N = everyone[:, :4].reshape(-1).view(torch.float32)
    return times * step, (everyone[:, 4:] * step_N[:, None]).mean(0)


def top_k(x: torch.Tensor) -> Sent:
    """8 bytes for each of the k numbers: its place, and itself."""
    place_K = x.abs().topk(max(1, round(SHARE * len(x)))).indices
    everyone = gather(torch.cat([place_K.int(), x[place_K].view(torch.int32)]))
    total = torch.zeros_like(x)
    for place, number in (row.chunk(2) for row in everyone):  # everywhere in the same order:
        total[place.long()] += number.view(torch.float32)  # sums are the same to the bit
    return torch.zeros_like(x).index_copy(0, place_K, x[place_K]), total / WORLD_SIZE


class PowerSGD:
    """Sends matrices (of more dimensions: flattened to two) at rank r, vectors whole."""

    def __init__(self, r: int, shapes: list[tuple[int, ...]]) -> None:
        self.shapes, seed = shapes, torch.Generator().manual_seed(0)  # the same on every rank
        ends = (prod(shape[1:]) for shape in shapes)
        self.q = [torch.randn(end, r, generator=seed) for end in ends if end > 1]

    def __call__(self, x: torch.Tensor) -> Sent:
        parts = (y := x.clone()).split([prod(shape) for shape in self.shapes])
        parts = [part.view(s[0], -1) for part, s in zip(parts, self.shapes, strict=True)]
        m, vectors = ([part for part in parts if (part.shape[1] > 1) == is_m] for is_m in (1, 0))
        came = mean([*(a @ q.to(a) for a, q in zip(m, self.q, strict=True)), *vectors])
        p = [torch.linalg.qr(a).Q for a in came[: len(m)]]
        self.q = mean([a.T @ b for a, b in zip(m, p, strict=True)])
        low = (a @ q.T for a, q in zip(p, self.q, strict=True))
        for part, arrived in zip([*m, *vectors], [*low, *came[len(m) :]], strict=True):
            part.copy_(arrived)  # a part of y
        return y, y


# %% [markdown]
# ## 2. Error feedback: what was not sent is sent later
#
# Top-k sends the same few places again and again; of what pushes the other 99.9% of the weights,
# nothing ever arrives. The cure is one line: keep what you did not send, and add it to the next
# gradients (Seide et al. 2014). What is small adds up until it is large, and goes. Nothing is lost,
# it is late: at any time, *all gradients = all that arrived + what is still kept*, over the ranks.
#
# DDP calls a hook with gradients as they come in backward, and takes their mean from it. Here all
# are in one bucket, which DDP sorts after the first step; the model's own order does not change.


# %%
def hook(run: "Run", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = dict(zip(bucket.parameters(), bucket.gradients(), strict=True))
    x = torch.cat([gradients[p].flatten() for p in run.model.parameters()])
    run.due += x
    x += run.kept  # error feedback
    sent, arrived = run.compress(x)
    run.kept = (x - sent) * run.feedback
    run.arrived += arrived
    for p, part in zip(run.model.parameters(), arrived.split(list(map(prod, SHAPES))), strict=True):
        gradients[p].copy_(part.view_as(p))  # a part of the bucket
    (future := torch.futures.Future(devices=[x.device] * x.is_cuda)).set_result(bucket.buffer())
    return future


# %% [markdown]
# ## 3. Fewer steps
#
# *Local SGD* talks every H steps only, and averages the weights. *DiLoCo* (Douillard et al. 2023)
# takes how far H steps have moved the mean weights for a gradient, for an outer optimizer: SGD with
# rate 0.7 and Nesterov momentum 0.9. With rate 1 and none it is local SGD. (Their inner optimizer
# is AdamW and H is 500; ours is the SGD of all others, and training is short.)

# %%
FULL, HALF, EIGHT = "float32", "float16, torch's hook", "8 bits"
TOP, TOP_OFF, LOW, LOW_OFF = "top-k", "top-k, no feedback", "PowerSGD 1", "PowerSGD 1, no feedback"
LOCAL, DILOCO = f"local SGD, H={H}", f"DiLoCo, H={H}"
METHODS: dict[str, tuple[Compressor, bool, float]] = {  # with feedback?; bytes to hand in a step
    FULL: (cast(torch.float32), False, 4 * P),
    HALF: (cast(torch.float16), False, 2 * P),
    "bfloat16": (cast(torch.bfloat16), False, 2 * P),
    EIGHT: (eight_bits, False, P + 4),
    TOP: (top_k, True, 8 * round(SHARE * P)),
    TOP_OFF: (top_k, False, 8 * round(SHARE * P)),
    **{f"PowerSGD {r}": (PowerSGD(r, SHAPES), True, 4 * (r * ENDS + BIASES)) for r in (1, 2, 4)},
    LOW_OFF: (PowerSGD(1, SHAPES), False, 4 * (ENDS + BIASES)),
    **dict.fromkeys((LOCAL, DILOCO), (lambda x: (x, x), False, 4 * P / H)),
}


@contextmanager
def counted() -> Iterator[list[tuple[int, float]]]:
    """Of each collective in here: bytes handed in, bytes that each rank of a ring then sends."""
    n, log, reduce, gather = WORLD_SIZE, [], dist.all_reduce, dist.all_gather_into_tensor

    def note(x: torch.Tensor, share: float) -> None:
        log.append((x.nbytes, share * x.nbytes))

    patches = {
        "all_reduce": lambda x, **how: note(x, 2 * (n - 1) / n) or reduce(x, **how),
        "all_gather_into_tensor": lambda out, x: note(x, n - 1) or gather(out, x),
    }
    with mock.patch.multiple(dist, **patches):
        yield log


class Run:
    """One method's training; `curve`: its accuracy on new digits, every EVERY steps."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.compress, self.feedback, self.handed = METHODS[name]
        torch.manual_seed(0)
        layers = [m for s in SHAPES[::2] for m in (nn.Linear(*reversed(s)), nn.ReLU())]
        self.model = nn.Sequential(*layers[:-1]).to(device)
        ids = [device] if device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.model, ids, bucket_cap_mb=1e3, init_sync=False)
        self.ddp.register_comm_hook(*((None, fp16_compress_hook) if name == HALF else (self, hook)))
        self.sgd = torch.optim.SGD(self.model.parameters(), RATE)
        rate, momentum = {LOCAL: (1.0, 0.0), DILOCO: (0.7, 0.9)}.get(name, (0.0, 0.0))
        self.at = self.weights()  # from which ranks set out together every H steps
        self.outer = torch.optim.SGD([self.at], rate, momentum, nesterov=momentum > 0)
        self.kept, self.due, self.arrived = torch.zeros(3, P, device=device)
        self.every, self.log, self.seconds, self.curve = rate > 0 and H, [], [], []
        self.carried = 0  # bytes on the link, if it is one that counts

    def weights(self) -> torch.Tensor:
        return parameters_to_vector(self.model.parameters()).detach()

    def step(self, image_BD: torch.Tensor, label_B: torch.Tensor) -> None:
        start = time.perf_counter()
        with counted() as log:
            self.sgd.zero_grad()
            cross_entropy(self.ddp(image_BD), label_B).backward()
            self.sgd.step()
            if self.every and len(self.seconds) % H == H - 1:
                self.at.grad = self.at - mean([self.weights()])[0]
                self.outer.step()
                vector_to_parameters(self.at.clone(), self.model.parameters())
        torch.cuda.synchronize() if image_BD.is_cuda else None
        self.seconds.append(time.perf_counter() - start)
        self.log += log


def train(device: torch.device, steps: int, few: int, wire: Callable = int) -> dict[str, Run]:
    """All methods in turn, step by step, or a `few`; `wire` says what a link has carried."""
    image_ND, label_N = (torch.tensor(a, device=device) for a in load_digits(return_X_y=True))
    image_ND, number = image_ND.float() / 8 - 0.6, torch.arange(len(label_N), device=device)
    old, share = number[number % 5 > 0], number[::5][RANK::WORLD_SIZE]  # of the new ones
    runs = {name: Run(name, device) for name in METHODS}
    for step in tqdm(range(steps), "steps", leave=False, disable=RANK > 0 or None):
        torch.manual_seed(step * WORLD_SIZE + RANK)
        mine = old[torch.randint(len(old), (GLOBAL_BATCH // WORLD_SIZE,)).to(device)]
        dist.barrier()  # else the first would wait for ranks that are late
        for run in runs.values():
            if step < few or run.every:  # what comes every H steps needs them all
                run.carried -= wire()
                run.step(image_ND[mine], label_N[mine])
                run.carried += wire()
        for run in runs.values() if step % EVERY == EVERY - 1 else ():
            right = run.model(image_ND[share]).argmax(1) == label_N[share]
            run.curve.append(right.sum().item() / 360)
    dist.all_reduce(curves := torch.tensor([run.curve for run in runs.values()], device=device))
    for run, curve in zip(runs.values(), curves.tolist(), strict=True):
        dist.all_reduce(seconds := torch.tensor(run.seconds, device=device), dist.ReduceOp.MAX)
        run.curve, run.best = curve, seconds.view(-1, run.every or 1).mean(1).min().item()
        run.counted, run.sent = (sum(b) / len(seconds) for b in zip(*run.log, strict=True))
    return runs


def nothing_is_lost(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        claim(f"{name}: bytes a step", run.handed, run.counted)
    gaps = [(rows := gather(run.weights())) - rows[0] for run in runs.values()]
    claim("all of them: weights, gap to rank 0's", 0, max(g.abs().max().item() for g in gaps))
    for name in (FULL, EIGHT, TOP, TOP_OFF, LOW, "PowerSGD 2", "PowerSGD 4", LOW_OFF):
        due, kept = (gather(x).mean(0) for x in (runs[name].due, runs[name].kept))
        lost = ((due - kept - runs[name].arrived).norm() / due.norm()).item()
        bound, sign = (0.5, ">=") if name in (TOP_OFF, LOW_OFF) else (1e-4, "<=")
        bound = 0.05 if name == EIGHT else bound  # rounding, right on average
        claim(f"{name}: share of gradients lost", bound, lost, sign)
    for name, off in ((TOP, TOP_OFF), (LOW, LOW_OFF)):
        gain = runs[name].curve[-1] - runs[off].curve[-1]
        claim(f"{name}: accuracy that feedback saves", 0.1, gain, ">=")
    worst = min(run.curve[-1] for name, run in runs.items() if name not in (TOP_OFF, LOW_OFF))
    claim("all others: accuracy on new digits", 0.85, worst, ">=")


# %% [markdown]
# ## 4. Two links
#
# The fast link is these ranks' own. The slow one is a cable that rank 0 makes: a veth pair between
# two network namespaces, throttled by tbf (communication/06 explains them, and why nothing stays).
# As many ranks again, half of them at each end, take a few steps across it, on gloo and the CPU.
# What a step costs there is measured; what it teaches is known: *accuracy after equal time* is that
# of the curve above, after as many steps as this time allows.
#
# One edge of the ring crosses the cable each way. So the kernel should count there what one rank
# sends, and 7% for headers (top-k's packets are little else). And a step should take as long as on
# the fast link, plus bytes / rate. (Shown is the best step: other jobs can only delay one.)

# %%
libc, NET, USER = ctypes.CDLL(None, use_errno=True), 0x40000000, 0x10000000  # CLONE_NEWNET, -USER
BYTE = 1514 / 1448 * 8 / MBIT / 1e6  # seconds on the cable; a packet of 1514 carries 1448


def slow_cable() -> list[int]:
    """Two networks, joined by a slow cable, which go with the last process in them."""
    me, us, nodes = os.geteuid(), os.getegid(), []  # who shall be root in there
    for _ in range(2):
        if libc.unshare(NET):
            if libc.unshare(USER | NET):
                raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")
            rows = {"setgroups": "deny", "uid_map": f"0 {me} 1", "gid_map": f"0 {us} 1"}
            for name, row in rows.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(row)
        nodes.append(os.open("/proc/self/ns/net", os.O_RDONLY))
    lines = f"ip link add slow type veth peer name slow netns /proc/$PPID/fd/{nodes[0]}"
    for node in (1, 0):  # we are in the second
        libc.setns(nodes[node], NET)
        lines += f"""\nip link set lo up; ip address add 10.0.0.{node + 1}/24 dev slow
            ip link set slow addrgenmode none up; ip link set slow gso_max_segs 1
            tc qdisc add dev slow root tbf rate {MBIT}mbit burst 5kb latency 100ms"""
        shell = subprocess.run(["sh", "-ec", lines], capture_output=True, text=True)
        if shell.returncode:
            raise OSError(shell.stderr.strip())
        lines = ""
    return nodes


def start_link() -> Connection:
    """Fork; asked through the pipe, the child tells what ranks see across the link, or why not."""
    torch.optim.SGD([torch.zeros(1)])  # loads for a second; all who are forked have it then
    near, far = Pipe()
    if os.fork() == 0:
        near.close()
        be_across(far)
    far.close()
    return near


def be_across(pipe: Connection) -> NoReturn:
    """Be rank 0 of those across the link, and fork the others."""
    global RANK
    os.setsid()  # Ctrl-C is for the lesson, whose end ends us
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: be killed when the parent ends
    pipe.recv()  # fails if it ended before that
    try:
        nodes, file = slow_cable(), os.memfd_create("store")
    except (OSError, AttributeError) as error:  # AttributeError: not Linux
        pipe.send(str(error))
        os._exit(0)
    RANK = next((rank for rank in range(1, WORLD_SIZE) if os.fork() == 0), 0)
    libc.prctl(1, signal.SIGKILL)  # a child has to ask for itself
    libc.setns(nodes[2 * RANK // WORLD_SIZE], NET)
    os.environ["GLOO_SOCKET_IFNAME"] = "slow"
    store = dist.FileStore(f"/proc/self/fd/{file}", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE)
    runs = train(torch.device("cpu"), H, SLOW_STEPS, carried).values()
    if RANK == 0:
        pipe.send([(run.best, run.carried / 2 / len(run.seconds)) for run in runs])
    os._exit(0)


def carried() -> int:
    """Bytes that have come into this node by the cable, and left, when all ranks are here."""
    dist.barrier()
    with open("/proc/self/net/dev") as file:
        rows = [line.split() for line in file if "slow:" in line]
    return sum(int(row[1]) + int(row[9]) for row in rows)


def across(link: Connection | None, runs: dict[str, Run]) -> bool:
    """Add to each run what was seen across the link; if there is none, say why."""
    dist.broadcast_object_list(told := [link.send("go") or link.recv() if link else ""])
    if isinstance(told[0], str):
        say(f"{'':10}{told[0]:.90}")
        return False
    for run, (run.slow, run.crossed) in zip(runs.values(), told[0], strict=True):
        run.expected = run.best + run.sent * BYTE
        run.soon = run.curve[: max(1, round(runs[FULL].slow / run.slow))][-1]
    return True


def table(runs: dict[str, Run], slow: bool) -> None:
    say("\n  A step's bytes: counted, sent on a ring, seen on the link; its ms; accuracy after")
    after = f"{EVERY * runs[FULL].slow:6.1f} s slow" if slow else ""
    names = f"{'':26}   bytes on a ring     ms{STEPS:4} steps"
    say(names + "  on link ms: due  slow" * slow + after)
    for name, run in runs.items():
        ms, then = run.best * 1e3, f"{run.curve[-1]:10.1%}"
        if slow:
            then += f"{run.crossed:9,.0f}{run.expected * 1e3:9.1f}"
            then += f"{run.slow * 1e3:6.1f}{run.soon:13.1%}"
        say(f"  {name:24}{run.counted:8,.0f}{run.sent:10,.0f}{ms:7.1f}{then}")
    say()


def what_it_buys(runs: dict[str, Run], slow: bool) -> None:
    full, half, eight, low = (runs[name] for name in (FULL, "bfloat16", EIGHT, LOW))
    if WORLD_SIZE == 1:
        return blocked("what it buys on a slow link", needs="2 ranks")
    ratio = eight.sent / half.sent
    claim("8 bits: bytes on a ring, of float16's", WORLD_SIZE / 4, ratio, rtol=1e-3)
    if not slow:
        return blocked("what it buys on a slow link", needs="root or user namespaces")
    for name, run in (FULL, full), ("bfloat16", half), (EIGHT, eight):
        claim(f"{name}: bytes on the link, of a ring's", 1.07, run.crossed / run.sent, atol=0.07)
    for name, run in (FULL, full), ("bfloat16", half):
        claim(f"{name}: ms on the slow link, of those due", 1, run.slow / run.expected, atol=0.3)
    claim("slow link: float32's step, of bfloat16's", 2, full.slow / half.slow, atol=0.5)
    claim("slow link: float32's step, of PowerSGD 1's", 3, full.slow / low.slow, ">=")
    for name in (TOP, LOW, DILOCO):
        claim(f"{name}: accuracy ahead in equal time", 0.1, runs[name].soon - full.soon, ">=")


# %% [markdown]
# ## 5. A larger model
#
# The larger a matrix, the more a low rank saves: mk / r(m + k). The paper's ResNet-18 for CIFAR-10,
# 11 million parameters, sends 243, 136 and 72 times fewer bytes at rank 1, 2 and 4. Here are its
# shapes, with random gradients: what is sent depends on nothing else.


# %%
def resnet18() -> list[tuple[int, ...]]:
    """Convolutions, each with a batch norm's weight and bias, and one last layer."""
    convolutions = [(64, 3, 3, 3)]
    for a, b in ((64, 64), (64, 128), (128, 256), (256, 512)):  # two blocks and a shortcut
        convolutions += [(b, a, 3, 3)] + [(b, b, 3, 3)] * 3 + [(b, a, 1, 1)] * (a != b)
    return [*convolutions, *[shape[:1] for shape in convolutions] * 2, (10, 512), (10,)]


def published(device: torch.device) -> None:
    x = torch.randn(sum(prod(shape) for shape in resnet18()), device=device)
    for rank, times in ((1, 243), (2, 136), (4, 72)):
        with counted() as log:
            PowerSGD(rank, resnet18())(x)
        fewer = x.nbytes / sum(size for size, _ in log)
        claim(f"ResNet-18, PowerSGD {rank}: times fewer bytes", times, fewer, atol=0.5)


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
