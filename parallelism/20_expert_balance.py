"""Expert balance: count the tokens of all ranks
=============================================

**Question.** Training keeps the experts of a mixture even: it counts how many tokens each expert
gets, and corrects the router. A rank knows its own tokens only. What goes wrong if each rank
corrects by its own counts?

**Predict**, and write it down before you run. There are four ranks. In 1 and 2 there are four
experts, a token visits one of them, and all tokens of rank r visit expert r.

1. **Imbalance** is the tokens of the fullest expert, over the mean of all experts. Over all ranks
   it is 1. Which imbalance does a rank find in its own tokens?
2. Each expert has a bias, which is 0 at first. A step lowers it by 0.001 if the expert got more
   tokens than the mean, and raises it by 0.001 if it got fewer. Each rank goes by its own counts.
   How far apart are the biases of expert 0 on rank 0 and on rank 1 after 10 steps?
3. Eight experts are trained; rank 0 reads tables, the last rank code. By the counts of all ranks,
   18% of the copies of the one would have to go to other experts to be spread as the other's are.
   Which share would have to, by each rank's own counts: about 36%, 18%, or less than 5%?
4. Then all load rank 0's checkpoint and read new text. The *excess* is what of an imbalance is
   above 1. By own counts it is how many times that by the counts of all ranks: 1, or at least 1.5?

**Run.**

    torchrun --standalone --nproc-per-node=4 20_expert_balance.py   # NCCL on 4 GPUs, else gloo
    python 20_expert_balance.py                                     # the same, started for you
    python 20_expert_balance.py --data FILE                         # train on a text of your own

Not run on several GPUs.

**Try.** In `train` let each rank correct by its own counts always, `count_E = own_E`: which claims
fail? In `adjust` write `-=` for `+=`: which now?

**Before.** parallelism/11_expert_parallelism.py: how tokens reach their experts.

**Next.** parallelism/24_expert_accounting.py: how many parameters a token uses.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: N tokens of a rank, M tokens of all ranks, D model width, E experts, each H wide, K
# experts per token, V different bytes, R rows of one expert.

# %% [markdown]
# ## 1. What has to be even, and on which ranks
#
# A token visits K experts, and a copy of it travels to each. If each expert has a GPU of its own,
# the layer takes as long as its fullest expert, and the other GPUs wait:
#
#                  even          half of all to expert 0
#     expert 0     ######        ############
#     expert 1     ######        ######......        # computes
#     expert 2     ######        ######......        . waits
#     expert 3     ######        ............
#     it takes     6             12                  imbalance 12 / 6 = 2
#
# The fullest GPU also holds the most rows, so a router that goes astray ends a run with "out of
# memory". So training **counts** the copies that each expert gets, and corrects the router.
#
# An expert is full if *all ranks together* send it too much. A rank's own tokens tell something
# else. Here two experts have become good at tables, two at code, and a token visits two:
#
#     copies for expert       0   1   2   3      correction
#     of rank 0, tables       6   6   0   0      by own counts: away from 0 and 1
#     of rank 1, code         0   0   6   6      by own counts: away from 2 and 3
#     of both                 6   6   6   6      none: no GPU waits for another
#
# The remedy is one all-reduce of E numbers per layer and step:


# %%
def counts(expert_NK: torch.Tensor, experts: int) -> torch.Tensor:
    """How many copies of this rank's tokens each expert gets: (E,)."""
    return torch.bincount(expert_NK.flatten(), minlength=experts)


def over_all_ranks(own_E: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' counts; the rank's own stay as they are."""
    total_E = own_E.clone()
    dist.all_reduce(total_E)
    return total_E


def imbalance(count_E: torch.Tensor) -> float:
    """Copies of the fullest expert over the mean of all experts."""
    return (count_E.max() / count_E.double().mean()).item()


# %% [markdown]
# ## 2. The correction: a bias for choosing
#
# DeepSeek-V3 adds a **bias** to each expert's score (Wang et al., 2024), *for choosing only*: the
# expert's output is weighted by the score without it. After each step the bias of an expert that
# got more copies than the mean goes down by a fixed amount, the **rate**, and that of one that got
# fewer goes up by as much. (DeepSeek-V3's scores are sigmoids, and it scales the chosen ones so
# that they add up to the same for all tokens. Here they are a softmax's, and stay as they are.)


# %%
def choose(
    score_NE: torch.Tensor, bias_E: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts with the highest score + bias: their scores without it, and which they are."""
    expert_NK = (score_NE + bias_E).topk(k, dim=1).indices
    return score_NE.gather(1, expert_NK), expert_NK


def adjust(bias_E: torch.Tensor, count_E: torch.Tensor, rate: float) -> None:
    """After a step: up where there were too few copies, down where there were too many."""
    too_few_E = count_E.double().mean() - count_E
    bias_E += rate * too_few_E.sign()


# %% [markdown]
# `count_E` must be that of all ranks. A rank's own counts do two harms:
#
# - **Specialization is undone.** They ask each rank to spread *its* tokens over all experts. In the
#   table above that sends tables to the experts for code, and makes no layer faster.
# - **The ranks route by different rules.** The bias is no parameter: no gradient moves it, so no
#   all-reduce of gradients keeps it equal. Each rank moves its copy its own way, and a checkpoint
#   keeps one of them.

# %% [markdown]
# ## 3. Trained on text
#
# A small model predicts the next byte of Python's own standard library from the 8 bytes before it:
# an embedding, a mixture of 8 experts of which a token visits 2, and a head. Its router begins
# uneven, in favor of expert 0. All experts are on every rank here, so no token travels.

# %%
EXPERTS, K, CONTEXT, D, H = 8, 2, 8, 64, 64
BATCH = 840  # tokens per step, of all ranks: 1 to 8 divide it, others get parts 1 token apart
STEPS = 120
RATE = 0.004  # of the bias; DeepSeek-V3 has 0.001


class Model(nn.Module):
    """Contexts of bytes (N, 8) -> logits (N, V), and the router's scores and choices."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, D // CONTEXT)
        self.router = nn.Linear(D, EXPERTS)
        self.router.bias.data = F.one_hot(torch.tensor(0), EXPERTS).float()  # uneven
        self.up_EDH = nn.Parameter(torch.randn(EXPERTS, D, H) / D**0.5)
        self.down_EHD = nn.Parameter(torch.randn(EXPERTS, H, D) / H**0.5)
        self.head = nn.Linear(D, 256)
        self.register_buffer("bias_E", torch.zeros(EXPERTS))

    def forward(self, byte_NT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x_ND = self.byte(byte_NT).flatten(1)
        score_NE = self.router(x_ND).softmax(dim=1)
        score_NK, expert_NK = choose(score_NE, self.bias_E, K)
        y_ND = x_ND
        for e in range(EXPERTS):
            token_R, place_R = (expert_NK == e).nonzero(as_tuple=True)  # who has chosen it
            row_RD = F.relu(x_ND[token_R] @ self.up_EDH[e]) @ self.down_EHD[e]
            y_ND = y_ND.index_add(0, token_R, score_NK[token_R, place_R, None] * row_RD)
        return self.head(y_ND), score_NE, expert_NK


# %% [markdown]
# Each rank reads a part of its own: the text begins with tables of characters and ends with code,
# the positions of a step are sorted, and each rank takes the next 1/n of them. The line that
# matters is `count_E = ...`: whose counts the correction sees. `extra_loss` is for section 4.


# %%
def tables_and_code(path: str | None) -> bytes:
    """Return up to 2 MB: of the file at `path`, or tables and then code of Python's library."""
    if path:
        return Path(path).read_bytes()[:2_000_000]
    library = Path(sysconfig.get_path("stdlib"))
    text = b""
    for kind in ("encodings/*.py", "[a-d]*.py"):
        text += b"".join(file.read_bytes() for file in sorted(library.glob(kind)))[:1_000_000]
    return text


def windows(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """This rank's part of a batch: (N, 9) bytes, 8 and the one to predict."""
    start_M = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator).sort().values
    start_N = start_M.tensor_split(WORLD_SIZE)[RANK].to(text.device)
    return text[start_N[:, None] + torch.arange(CONTEXT + 1, device=text.device)]


def train(
    text: torch.Tensor, whose: str, extra_loss: Callable | None = None, rate: float = RATE
) -> tuple[Model, list[tuple]]:
    """The model, and of each step the rank's counts, those of all ranks, and its loss per byte."""
    torch.manual_seed(2)
    model = Model().to(text.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(1)  # the same on every rank
    steps = []
    for _ in range(STEPS):
        window_NT = windows(text, generator)
        logits_NV, score_NE, expert_NK = model(window_NT[:, :-1])
        own_E = counts(expert_NK, EXPERTS)
        total_E = over_all_ranks(own_E)
        count_E = total_E if whose == "all" else own_E
        nats = F.cross_entropy(logits_NV, window_NT[:, -1])
        loss = nats + extra_loss(score_NE, count_E) if extra_loss else nats
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD_SIZE
        optimizer.step()
        adjust(model.bias_E, count_E, rate)
        steps.append((own_E, total_E, nats.detach()))
    return model, steps


# %% [markdown]
# A run on four ranks printed
#
#     imbalance in step    1   11   21   41   81  120  ranks differ  saved   nats
#     bias, own counts  3.29 2.17 1.21 1.31 1.16 1.13         0.018   1.35  2.135
#     bias, all counts  3.29 2.13 1.18 1.29 1.11 1.21         0.182   1.09  2.131
#
# **The bias works.** Expert 0 scores 0.28 in the mean and each other 0.10; most tokens visit it. It
# loses 0.004 per step and the others gain as much: after 0.177 / 0.008 = 22 steps they are level.
# What is left then is partly chance: 840 tokens that choose at random leave an excess of 0.09, and
# the later ups and downs are of that size.
#
# **Own counts do both harms**, and neither imbalance nor loss shows it while the model trains: each
# rank is even by a bias of its own, here even more so. Two columns do:
#
# - *Ranks differ* tells of specialization: the share of copies that would have to go to other
#   experts for the first rank, with tables, and the last, with code, to send the same to each.
#   0.182 becomes 0.018, and chance alone makes 0.012.
# - *Saved* is the imbalance at 4,200 more places of the text after all ranks have loaded rank 0's
#   checkpoint. Its bias makes only rank 0's tokens even: the excess is 0.35 in place of 0.09.

# %% [markdown]
# ## 4. In comparison: a loss
#
# The older correction is a term of the loss (GShard, 2020; Switch, 2021). f_e is expert e's share
# of all copies, and P_e the mean probability that the router gives it:
#
#     L  =  E x sum over all experts e of  f_e P_e            1 if all f are equal
#
# f_e is a count and has no gradient. P_e has one, in proportion to f_e, so the fuller experts lose
# probability to the emptier ones. f must be that of all ranks here, too. P need not be, since
# gradients are averaged over ranks anyway.


# %%
def balance_loss(score_NE: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
    """E x sum of share x mean probability, of this rank's probabilities and the given counts."""
    share_E = count_E.double() / count_E.sum()
    return len(count_E) * (share_E * score_NE.mean(dim=0)).sum()


# %% [markdown]
# `train(text, "all", balance_loss, rate=0.0)` is the same loop with this term and without a bias:
#
#     loss, all counts  3.29 1.52 1.86 1.33 1.10 1.13         0.141   1.23  2.148
#
# In training it ends about as even; on new text its excess is 0.23, the bias's 0.09. (L is usually
# multiplied by 0.01 and has 100,000 steps to act.) With own counts it would do the first harm
# alone: routers are parameters, and stay equal.

# %% [markdown]
# ## 5. How it is measured
#
# **Questions 1 and 2** are put to the functions above, on all ranks. That ranks train as one
# process does is left to the tests.


# %%
def check_questions(device: torch.device) -> None:
    n = WORLD_SIZE
    expert_N1 = torch.full((5, 1), RANK, device=device)
    own_E = counts(expert_N1, n)
    claim("own counts: imbalance", n, imbalance(own_E), question=1)
    claim("counts of all ranks: imbalance", 1, imbalance(over_all_ranks(own_E)))
    bias_E = torch.zeros(n, device=device, dtype=torch.float64)
    for _ in range(10):
        adjust(bias_E, own_E, 0.001)
    due = 2 * 10 * 0.001 if n > 1 else 0
    apart = biases_apart(bias_E)
    claim("own counts, 10 steps: biases apart", due, apart, atol=1e-12, question=2)


def biases_apart(bias_E: torch.Tensor) -> float:
    """Of the expert, and between the ranks, where they differ most."""
    largest_E = bias_E.clone()
    smallest_E = bias_E.clone()
    dist.all_reduce(largest_E, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest_E, op=dist.ReduceOp.MIN)
    return (largest_E - smallest_E).max().item()


# %% [markdown]
# **The trainings.** The last steps are the last 30. What a model learns varies with seed and text,
# so these rows have room.


# %%
SHOWN = [step for step in (0, 10, 20, 40, 80) if step < STEPS - 1] + [STEPS - 1]


class Measured(NamedTuple):
    uneven: list[float]  # imbalance of each step, over all ranks
    end: float  # excess of the last steps, mean
    differ: float  # the first rank's choices from the last one's
    apart: float  # the bias of one rank from that of another
    saved: float  # imbalance after all ranks have loaded the checkpoint
    nats: float  # loss per byte, mean of the last steps and all ranks


def measure(name: str, text: torch.Tensor, model: Model, steps: list[tuple]) -> Measured:
    """Of one training; prints its row of the table."""
    own, total, nats = zip(*steps, strict=True)
    uneven = [imbalance(total_E) for total_E in total]
    mean_nats = torch.stack(nats[-30:]).mean()
    dist.all_reduce(mean_nats)
    run = Measured(
        uneven=uneven,
        end=mean(uneven[-30:]) - 1,
        differ=first_and_last_differ(sum(own[-30:])),
        apart=biases_apart(model.bias_E),  # before `saved` makes them equal
        saved=saved(model, text),
        nats=mean_nats.item() / WORLD_SIZE,
    )
    curve = "".join(f"{uneven[step]:5.2f}" for step in SHOWN)
    print0(f"{'':13}{name:17}{curve}{run.differ:14.3f}{run.saved:7.2f}{run.nats:7.3f}")
    return run


def first_and_last_differ(own_E: torch.Tensor) -> float:
    share_E = own_E.double() / own_E.sum()
    shares_nE = [torch.empty_like(share_E) for _ in range(WORLD_SIZE)]
    dist.all_gather(shares_nE, share_E)
    return (shares_nE[0] - shares_nE[-1]).abs().sum().item() / 2


def saved(model: Model, text: torch.Tensor) -> float:
    dist.broadcast(model.bias_E, src=0)  # the parameters are equal anyway
    generator = torch.Generator().manual_seed(2)
    window_NT = torch.cat([windows(text, generator) for _ in range(5)])
    with torch.no_grad():
        _, _, expert_NK = model(window_NT[:, :-1])
    return imbalance(over_all_ranks(counts(expert_NK, EXPERTS)))


def check_training(text: torch.Tensor) -> None:
    steps = "".join(f"{step + 1:5}" for step in SHOWN)
    print0(f"{'':13}imbalance in step{steps}  ranks differ  saved   nats")
    by_own = measure("bias, own counts", text, *train(text, "own"))
    by_all = measure("bias, all counts", text, *train(text, "all"))
    by_loss = measure("loss, all counts", text, *train(text, "all", balance_loss, rate=0.0))

    first = by_all.uneven[0] - 1  # in each training
    claim("bias: excess of the last steps / first", 0.3, by_all.end / first, "<=", varies=True)
    claim("loss: excess of the last steps / first", 0.3, by_loss.end / first, "<=", varies=True)
    single = torch.special.entr(torch.bincount(text) / len(text)).sum().item()
    worst = torch.tensor([run.nats for run in (by_own, by_all, by_loss)]).max()
    claim("each: nats per byte / without context", 0.8, worst / single, "<=", varies=True)
    if WORLD_SIZE == 1:
        blocked("trained with own counts", needs="2 ranks")
        return
    ratio = by_own.end / by_all.end
    claim("last steps: excess, own counts / all counts", 1.5, ratio, "<=", varies=True)
    claim("counts of all ranks, trained: biases apart", 0, by_all.apart)
    ratio = by_own.differ / by_all.differ
    claim("ranks differ: own counts / all counts", 0.25, ratio, "<=", question=3, varies=True)
    ratio = (by_own.saved - 1) / (by_all.saved - 1)
    claim("saved: excess, own counts / all counts", 1.5, ratio, ">=", question=4, varies=True)


# %% [markdown]
# ## What you should have seen
#
# 1. 4: all of its tokens visit one expert of four.
# 2. 0.02: in each step rank 0 finds the expert too full, and rank 1 too empty.
# 3. Less than 5%: 0.018 in section 3's run, and 0.182 by the counts of all ranks. Experts for
#    tables and experts for code are gone.
# 4. At least 1.5: in that run 3.9. In training nothing showed it. So compare the biases of two
#    ranks right after the step, and the imbalance after loading: the biases must be equal to the
#    bit.
#
# Qiu et al. (2025) trained models of billions of parameters by the loss: with own counts experts
# specialized less, and predictions were worse. At our size predictions are equally good.
#
# **Try.** With own counts always, the last three claims fail; each curve is as good as before. With
# `-=` full experts are made fuller: *bias: excess* fails, and the last two. Question 2's
# does not: both biases go the wrong way, and are as far apart.
#
# **Where it bites.** DDP copies rank 0's buffers to all ranks before each forward
# (`broadcast_buffers`). A bias of own counts is then equal on all ranks, and follows rank 0's
# tokens alone. With gradient accumulation the counts of all micro-batches belong together, too.
#
# **On GPUs**, where this has not been run, a layer waits for the imbalance of its own micro-batch,
# and some of that is chance. If Qwen3's 128 experts, 8 per token, were drawn at random, a sequence
# of 4,096 tokens would leave an imbalance of 1.16, and 1.04 if each of 16 GPUs has 8 experts. So
# several experts per GPU and large micro-batches help where no correction can. The all-reduce costs
# little: 58 layers of 256 experts, as in DeepSeek-V3, are 119 kB per step, in 8 bytes each.
#
# **When.** Wherever experts are on different ranks. If a share s of an even step is spent in
# experts and their all-to-alls, and each expert has a GPU, the step takes 1 + s (imbalance - 1)
# times as long: with s = 0.5, 2.1 times in our first step, and 1.07 in the last ones. If all
# experts are on every rank, imbalance costs little time, but experts without tokens learn nothing.
# Begin with the bias: it adds no gradient, and predicted slightly better in its paper (1 and 3
# billion parameters). DeepSeek-V3 used it with a very small loss per sequence, Qwen3 the loss over
# all ranks. A **capacity** (parallelism/28) drops what an expert gets too much of: it bounds
# memory; tokens pay.
#
# **In other systems.** Megatron-LM: `--moe-router-enable-expert-bias`, or the loss,
# `--moe-router-load-balancing-type` global_aux_loss, with the counts of all ranks; aux_loss has
# those of a micro-batch. torchtitan: `load_balance_coeff` is the bias's rate.


# %%
def main() -> None:
    data = {"metavar": "PATH", "help": "text to train on (Python's own sources)"}
    options = command_line({"--data": data})
    launch()
    device = setup()
    check_questions(device)
    text = bytearray(tables_and_code(options.data))
    check_training(torch.frombuffer(text, dtype=torch.uint8).long().to(device))
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
