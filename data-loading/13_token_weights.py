"""Token weights: one count for all ranks and micro-batches
========================================================

**Question.** Ranks and micro-batches hold unequally many tokens that have a loss. How does each
token of a step get the same weight, and what does a model learn that was trained otherwise?

**Predict**, and write it down before you run. On rank 0 each row has a loss on its last 20 tokens,
on every other rank on its last 60. All ranks have equally many rows.

1. Each rank takes the mean over its own tokens, and DDP averages the gradients. How many times as
   much as a token on the last rank does a token on rank 0 count?
2. A rank accumulates gradients over two micro-batches: one has a loss on 10 tokens per row, the
   other on 50. Each takes its own mean, halved. How many times as much as a token of the second
   does a token of the first count?
3. In one step no token on rank 0 has a loss, and each rank takes its own mean, written as
   `(losses * mask).sum() / mask.sum()`. Which share of the last rank's weights is still a number
   after the step?
4. On rank 0 the right answer is always A, on all other ranks always B. The mean of means is trained
   to the end. Which probability does the model give to A?

**Run.**

    torchrun --standalone --nproc-per-node=4 13_token_weights.py    # NCCL on 4 GPUs, else gloo
    python 13_token_weights.py                                      # the same, started for you

Not run on several GPUs.

**Try.** In `count_tokens` leave out the all-reduce: which claims fail, and would a loss curve have
told you? In `by_count` divide by `count_tokens([valid_BT])`: which fail now?

**Before.** parallelism/01_data_parallelism_ddp.py: why DDP averages gradients, and `no_sync`.
data-loading/07_packing.py: which tokens of a row have a loss.

**Next.** data-loading/08_loaders_compared.py: which loader to take.
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
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B rows of T tokens, V different tokens.
T = 128
ROWS = 3  # B, the rows of a micro-batch
VOCABULARY = 64
STEPS = 6
SEED = 0
LEARNING_RATE = 0.5

# %% [markdown]
# ## 1. One number decides: by what is the sum of losses divided?
#
# The loss of a step is meant to be the mean over all of its tokens that have one. But no process
# sees them all. They lie on n ranks, and on each rank in k micro-batches, whose gradients are added
# up. What `F.cross_entropy` returns is the mean over one micro-batch. Divide it by k, let DDP
# average over ranks, and the step follows another loss, the **mean of means**. Let c_rj be the
# tokens with a loss in micro-batch j of rank r, and C the sum of all of them:
#
#     wanted             each token counts  1 / C              the same everywhere
#     mean of means      each token counts  1 / (n k c_rj)     more, the fewer stand next to it
#
# The two agree only if all c_rj are equal. They never are where documents are padded, where prompts
# have no loss, or where long samples are dealt to one rank and short ones to another:
#
#                    micro-batch 0     micro-batch 1                  a token of it counts
#     rank 0         . . x x x x x     . . . . . . x               1 / (4 x 5)      1 / (4 x 1)
#     rank 1         . x x x x x x     x x x x x x x               1 / (4 x 6)      1 / (4 x 7)
#     n = 2, k = 2, C = 19: every x should count 1/19, and the lone one counts 1/4
#
# Here is the mistake. It is one line, the obvious one:


# %%
def mean_of_means(losses_BT: torch.Tensor, valid_BT: torch.Tensor, k: int) -> torch.Tensor:
    """The mistake: the mean over one micro-batch, divided by the number k of micro-batches."""
    return (losses_BT * valid_BT).sum() / valid_BT.sum() / k


# %% [markdown]
# The remedy is a count. Before the first backward pass of a step, add up the tokens of all
# micro-batches and all ranks: one integer, one all-reduce. Then each micro-batch divides its *sum*
# by that count. DDP will divide by n once more, so multiply by n. (Both take a product with the
# mask instead of indexing by it, which would make the host wait for the GPU to learn a shape.)


# %%
def count_tokens(valid_kBT: list[torch.Tensor]) -> torch.Tensor:
    """Return C, the tokens with a loss in all micro-batches of all ranks; a collective."""
    count = torch.stack([valid_BT.sum() for valid_BT in valid_kBT]).sum()
    dist.all_reduce(count)
    return count


def part_of_mean(
    losses_BT: torch.Tensor, valid_BT: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """What a micro-batch adds to the mean over `count` tokens, times n since DDP divides by n."""
    return WORLD_SIZE * (losses_BT * valid_BT).sum() / count


# %% [markdown]
# A step by either of them: `no_sync` keeps DDP from reducing before the last micro-batch, and each
# call of `backward` adds to the same gradients.

# %%
MicroBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x_BT, y_BT, valid_BT


def by_means(ddp: DistributedDataParallel, micro_batches: list[MicroBatch]) -> None:
    """The mistake: add up the gradients of the means."""
    k = len(micro_batches)
    accumulate(ddp, micro_batches, lambda losses, valid_BT: mean_of_means(losses, valid_BT, k))


def by_count(ddp: DistributedDataParallel, micro_batches: list[MicroBatch]) -> None:
    """Add up the gradient of the mean over all tokens of the step."""
    count = count_tokens([valid_BT for _, _, valid_BT in micro_batches])
    accumulate(ddp, micro_batches, lambda losses, valid_BT: part_of_mean(losses, valid_BT, count))


def accumulate(
    ddp: DistributedDataParallel, micro_batches: list[MicroBatch], loss_of: Callable
) -> None:
    """Add up the gradients of all micro-batches; `loss_of` (losses_BT, valid_BT) is a number."""
    for j, (x_BT, y_BT, valid_BT) in enumerate(micro_batches):
        last = j == len(micro_batches) - 1
        with nullcontext() if last else ddp.no_sync():
            loss_of(token_losses(ddp, x_BT, y_BT), valid_BT).backward()


def token_losses(model: nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    """Return losses_BT, the loss on each token, whether it counts or not."""
    return F.cross_entropy(model(x_BT).mT, y_BT, reduction="none")


# %% [markdown]
# ## 2. What a wrong weight does to a model
#
# The mean of means raises no error, and its loss falls. What it learns is another mixture. Take the
# smallest model there is, two logits and no input, and say that rank 0 holds short answers, all of
# them A, the other ranks long ones, all of them B. The best that a model can do is to give A the
# probability that A has. Trained by the mean of means, it believes each *rank* as much as any
# other. Any model does that where it sees the same context on all ranks.


# %%
class TwoAnswers(nn.Module):
    """Two logits, whatever the input: tokens (B, T) -> logits (B, T, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2))

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*x_BT.shape, 2)


# %% [markdown]
# ## 3. How it is measured
#
# **A token's weight** is read from the gradient that DDP leaves. Each micro-batch of each rank gets
# a word of its own, and each word has two logits, both 0. A token of it whose answer is the first
# adds weight x (1/2 - 1) to the gradient of that word's first logit.
#
# The gradient of a model is compared with that of one process, which takes the micro-batches of all
# ranks one by one. The tokens are random and everything is in double precision, so that a mistake
# cannot pass for rounding.


# %%
# Every sum has at most n k B T terms, in another order; there are some ten, one after the other.
TOLERANCE = 10 * WORLD_SIZE * 2 * ROWS * T * 2**-53


def last_tokens(count: int, device: torch.device) -> torch.Tensor:
    """Return valid_BT: in each row the last `count` tokens have a loss."""
    return (torch.arange(T, device=device) >= T - count).repeat(ROWS, 1)


def draw_step(
    step: int, counts: list[tuple[int, int]], device: torch.device
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank, drawn alike on every rank.

    A row of micro-batch j has a loss on `counts[j][0]` tokens on rank 0, `counts[j][1]` elsewhere.
    """
    generator = torch.Generator().manual_seed(SEED + step)
    drawn = []
    for rank in range(WORLD_SIZE):
        own = []
        for on_rank_0, elsewhere in counts:
            x_BT = torch.randint(VOCABULARY, [ROWS, T + 1], generator=generator).to(device)
            valid_BT = last_tokens(elsewhere if rank else on_rank_0, device)
            own.append((x_BT[:, :-1], x_BT[:, 1:], valid_BT))
        drawn.append(own)
    return drawn


def new_model(device: torch.device) -> nn.Module:
    """Return a bigram model with the same weights on every rank: tokens (B, T) -> (B, T, V)."""
    torch.manual_seed(SEED)
    layers = [nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)]
    return nn.Sequential(*layers).to(device, torch.float64)


def add_weighted(model: nn.Module, drawn: list[list[MicroBatch]], weight: Callable) -> None:
    """In one process: the gradient of all losses, each times `weight` (of its micro-batch)."""
    for own in drawn:
        for x_BT, y_BT, valid_BT in own:
            losses_BT = token_losses(model, x_BT, y_BT)
            (losses_BT[valid_BT].sum() * weight(valid_BT)).backward()


def weight_of_mean(drawn: list[list[MicroBatch]]) -> Callable:
    """Return the weight 1 / C, whatever the micro-batch."""
    count = 0
    for own in drawn:
        count += sum(int(valid_BT.sum()) for _, _, valid_BT in own)
    return lambda valid_BT: 1 / count


def flat(model: nn.Module, what: str) -> torch.Tensor:
    """All of a model's weights ("data") or gradients ("grad") as one vector."""
    return torch.cat([getattr(parameter, what).flatten() for parameter in model.parameters()])


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def from_ranks(value: float) -> list[float]:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, float(value))
    return values


# %% [markdown]
# Weights between ranks, with one micro-batch, and between micro-batches, on each rank alike.


# %%
def token_weights(
    step: Callable, counts: list[tuple[int, int]], device: torch.device
) -> torch.Tensor:
    """Return the weight that one token has by this step, for each rank and micro-batch, (n, k)."""
    drawn = draw_step(0, counts, device)
    k = len(counts)
    model = nn.Embedding(WORLD_SIZE * k, 2).to(device, torch.float64)  # word -> two logits
    nn.init.zeros_(model.weight)
    micro_batches = []
    for j, (x_BT, y_BT, valid_BT) in enumerate(drawn[RANK]):
        word = RANK * k + j
        micro_batches.append((torch.full_like(x_BT, word), torch.zeros_like(y_BT), valid_BT))
    step(DistributedDataParallel(model), micro_batches)
    tokens = []
    for own in drawn:
        tokens += [int(valid_BT.sum()) for _, _, valid_BT in own]
    weights = -2 * model.weight.grad[:, 0] / torch.tensor(tokens, device=device)
    return weights.view(WORLD_SIZE, k)


def check_weights(device: torch.device) -> None:
    """Claim how much a token counts, by the mistake and by the count."""
    if WORLD_SIZE == 1:
        blocked("weights between ranks", needs="2 ranks")
    else:
        weights = token_weights(by_means, [(20, 60)], device)
        ratio = weights[0, 0] / weights[-1, 0]
        claim("mean of means: weight on rank 0 / the last", 3, ratio, atol=1e-12, question=1)
        weights = token_weights(by_count, [(20, 60)], device)
        ratio = weights[0, 0] / weights[-1, 0]
        claim("one count: weight on rank 0 / the last", 1, ratio, atol=1e-12)
    weights = token_weights(by_means, [(10, 10), (50, 50)], device)
    ratio = weights[0, 0] / weights[0, 1]
    claim("mean of means: weight, micro-batch 0 / 1", 5, ratio, atol=1e-12, question=2)
    weights = token_weights(by_count, [(10, 10), (50, 50)], device)
    claim("one count: weight, micro-batch 0 / 1", 1, weights[0, 0] / weights[0, 1], atol=1e-12)
    all_tokens = ROWS * WORLD_SIZE * (10 + 50)
    claim("one count: weight x all tokens", 1, weights[0, 0] * all_tokens, atol=1e-12)


# %% [markdown]
# **A rank without any**: the mean of nothing is 0 / 0, and DDP hands it to everybody. The count of
# all ranks is not zero, and the sum of nothing is 0. The library's own mean is tried as well.


# %%
def by_library_means(ddp: DistributedDataParallel, micro_batches: list[MicroBatch]) -> None:
    """The same mistake by PyTorch: a mean over one micro-batch, without the targets of -100."""
    ((x_BT, y_BT, valid_BT),) = micro_batches
    F.cross_entropy(ddp(x_BT).mT, y_BT.masked_fill(~valid_BT, -100)).backward()


def share_of_numbers(step: Callable, micro_batches: list[MicroBatch]) -> float:
    """Return the share of the last rank's weights that are numbers after one step of SGD."""
    model = new_model(micro_batches[0][0].device)
    step(DistributedDataParallel(model), micro_batches)
    torch.optim.SGD(model.parameters(), LEARNING_RATE).step()
    return from_ranks(flat(model, "data").isfinite().double().mean())[-1]


def check_none(device: torch.device) -> None:
    """Claim what a step does to the weights if no token on rank 0 has a loss."""
    if WORLD_SIZE == 1:
        blocked("a rank without any token that has a loss", needs="2 ranks")
        return
    own = draw_step(0, [(0, 60)], device)[RANK]
    share = share_of_numbers(by_means, own)
    claim("none on rank 0, mean of means: share of numbers", 0, share, question=3)
    share = share_of_numbers(by_library_means, own)
    claim("none on rank 0, F.cross_entropy: share of numbers", 1, share)
    share = share_of_numbers(by_count, own)
    claim("none on rank 0, one count: share of numbers", 1, share)


# %% [markdown]
# **What is learned.** The loss of two logits is convex, so enough steps reach its end, and the end
# can be said before: the probability of A is the weight that all A have together. The fewer A there
# are, the slower the last steps, so their number grows with n.


# %%
def check_answers(device: torch.device) -> None:
    """Train two logits by either loss; claim the probability of A, and the loss in the end."""
    if WORLD_SIZE == 1:
        blocked("what the mean of means learns", needs="2 ranks")
        return
    x_BT, _, valid_BT = draw_step(0, [(20, 60)], device)[RANK][0]
    y_BT = torch.full_like(x_BT, 0 if RANK == 0 else 1)  # A or B
    share = 20 / (20 + 60 * (WORLD_SIZE - 1))  # of A, among all tokens with a loss
    tokens = sum(from_ranks(valid_BT.sum()))
    learned = {}
    for name, step, p in (
        ("mean of means", by_means, 1 / WORLD_SIZE),
        ("one count", by_count, share),
    ):
        model = TwoAnswers().to(device, torch.float64)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(50 * WORLD_SIZE):
            optimizer.zero_grad()
            step(ddp, [(x_BT, y_BT, valid_BT)])
            optimizer.step()
        learned[name] = model.logits.detach().softmax(0)[0]
        total = sum(from_ranks((token_losses(model, x_BT, y_BT) * valid_BT).sum().detach()))
        least = -share * math.log(p) - (1 - share) * math.log(1 - p)
        claim(f"{name}: loss in the end, nats per token", least, total / tokens, atol=1e-6)
    text = "mean of means: learned probability of A"
    claim(text, 1 / WORLD_SIZE, learned["mean of means"], atol=1e-6, question=4)
    claim("one count: learned probability of A", share, learned["one count"], atol=1e-6)


# %% [markdown]
# **The run** as a whole: a gradient by the mistake is exactly that of the loss with the wrong
# weights; and some steps of SGD with two micro-batches on n ranks must give the weights of one
# process.


# %%
def check_run(device: torch.device) -> None:
    """Claim the gradient by the mistake, and the weights of a run by the count."""
    drawn = draw_step(0, [(10, 50), (30, 70)], device)
    model = new_model(device)
    by_means(DistributedDataParallel(model), drawn[RANK])
    expected = new_model(device)
    add_weighted(expected, drawn, lambda valid_BT: 1 / (WORLD_SIZE * 2 * int(valid_BT.sum())))
    error = relative_error(flat(model, "grad"), flat(expected, "grad"))
    claim("mean of means: gradient, as with those weights", 0, error, atol=TOLERANCE)

    model = new_model(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    oracle = new_model(device)
    one_process = torch.optim.SGD(oracle.parameters(), LEARNING_RATE)
    for step in range(STEPS):
        drawn = draw_step(step, [(10, 50), (30, 70)], device)
        optimizer.zero_grad()
        by_count(ddp, drawn[RANK])
        optimizer.step()
        one_process.zero_grad()
        add_weighted(oracle, drawn, weight_of_mean(drawn))
        one_process.step()
    error = relative_error(flat(model, "data"), flat(oracle, "data"))
    claim(f"one count: error of the weights after {STEPS} steps", 0, error, atol=TOLERANCE)


# %% [markdown]
# ## What you should have seen
#
# 1. Three times, 60 / 20. The gradient is exactly that of the loss with those weights: a gradient
#    of something, and so nothing looks wrong.
# 2. Five times, 50 / 10. Gradient accumulation has the same mistake on one GPU; and the results
#    change with the size of a micro-batch, which should only decide how much memory a step takes.
# 3. None. Rank 0 divides by 0, its gradients are nan, DDP adds them to all others, and after the
#    step every weight of every rank is nan (all words occur in this batch). `F.cross_entropy` with
#    all targets ignored is milder: it returns nan as the loss, but gradients of 0, so all weights
#    stay numbers. It is still the mistake: DDP divides by n, so the tokens of the other ranks count
#    (n - 1) / n of what they should. With one count they lose nothing.
# 4. 1 / n, a quarter on four ranks. A is right for 20 of 200 tokens there, a tenth, and that is
#    what one count learns. The loss falls all the same, from 0.69 to 0.40 nats, where 0.33 is the
#    best; on a curve nobody sees which of the two it is.
#
# **Try.** Without the all-reduce in `count_tokens` each rank divides by its own tokens, times n. On
# rank 0 a token then counts three times as much again, the learning rate is n times as large, and a
# rank without tokens divides by 0. Of the rows of *one count* all fail but the ratio of
# micro-batches, which lie on one rank. The loss still falls to 0.40. With a count for each
# micro-batch, tokens of the smaller one count more: the ratio of micro-batches is five, and the
# weight and the run are wrong too.
#
# **On GPUs.** The mask comes from the batch, so the count can be all-reduced before the forward
# pass and its latency hidden behind it. FSDP2 divides by n as DDP does; torchtitan turns that off
# (`set_gradient_divide_factor(1.0)`) and divides by the global count alone. With pipeline or tensor
# parallelism the count goes over the ranks that hold other data, not over all.
#
# **Where it bites.** The masks of all k micro-batches must be there before the first backward pass.
# If no token of the whole step has a loss, C is 0 and all is nan again: skip the step, or divide by
# at least 1. And the loss to log is the sum of all parts, divided by n: one part alone is no mean.
#
# **When.** Always: it is one integer per step. Where every token has a loss and no row is padded,
# all c_rj are equal and nothing changes. In pretraining on packed rows they differ by a few ends of
# documents. In fine-tuning, where prompts have no loss, by factors as here.
#
# **In other systems.** The same is `--calculate-per-token-loss` in Megatron-LM (off unless you ask
# for it), `average_tokens_across_devices` in Hugging Face's Trainer (off in older versions), and
# what torchtitan always does. A loss of your own that returns a mean brings the mistake back.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_weights(device)
    check_none(device)
    check_answers(device)
    check_run(device)
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
