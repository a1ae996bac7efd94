"""Expert balance: count the tokens of all ranks
=============================================

**Question.** Training keeps the experts of a mixture even: it counts how many tokens each expert
gets, and corrects the router. A rank knows its own tokens only. What goes wrong if each rank
corrects by its own counts?

**Predict**, and write it down before you run. Two ranks send their tokens to four experts; a token
visits one:

    expert          0   1   2   3
    from rank 0     6   6   0   0
    from rank 1     3   0   5   4
    from both       9   6   5   4       mean 6

The **imbalance** is the fullest expert over the mean of all: 9 / 6 = 1.5. Its **excess** is what is
above 1: 0.5. And **ranks differ** is the share of rank 0's tokens that would have to visit other
experts to be spread as rank 1's are: 9 of 12, or 75%. Now there are four ranks.

1. There are four experts, a token visits one, and all tokens of rank r visit expert r. Over all
   ranks the imbalance is 1. Which imbalance does a rank find in its own tokens?
2. Each expert has a bias, which is 0 at first. A step lowers it by 0.001 if the expert got more
   tokens than the mean, and raises it by 0.001 if it got fewer. Each rank goes by its own counts,
   as in 1. How far apart are the biases of expert 0 on rank 0 and on rank 1 after 10 steps?
3. Eight experts are trained on text; rank 0 reads tables, the last rank code. One training corrects
   by the counts of all ranks, in another each rank goes by its own. Do the first and the last rank
   differ more, as much, or less by own counts?
4. Then all ranks load rank 0's checkpoint, and read other places of the text. Is the excess larger,
   as large, or smaller by own counts?

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
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: N tokens of a rank, M tokens of all ranks, D model width, E experts, each H wide, K
# experts per token, V different bytes, R rows of one expert, n ranks.

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
# An expert is full if *all ranks together* send it too much. (With several copies of each expert,
# the wait is set by the ranks that share a copy; the bias is one for all, and so are its counts.) A
# rank's own tokens tell something else. Here two experts have become good at tables, two at code,
# and a token visits two:
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
# an embedding, a mixture of 8 experts of which a token visits 2, and a head. All experts are on
# every rank here, so no token travels.
#
# Its router begins uneven: expert 0 scores about 0.28 and each other 0.10, and most tokens visit
# it. If its bias falls by 0.004 per step and the others' rise by as much, they are level after
# (0.28 - 0.10) / 0.008, or some 22 steps.

# %%
EXPERTS, K, CONTEXT, D, H = 8, 2, 8, 64, 64
BATCH = 840  # tokens per step, of all ranks: 1 to 8 divide it, others get parts 1 token apart
STEPS = 120
RATE = 0.004  # of the bias; DeepSeek-V3 has 0.001


class Model(nn.Module):
    """Contexts of bytes (N, 8) -> logits (N, V), and the experts chosen (N, K)."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, D // CONTEXT)
        self.router = nn.Linear(D, EXPERTS)
        # What makes it uneven is a parameter, and gets gradients; `bias_E` below is none.
        self.router.bias.data = F.one_hot(torch.tensor(0), EXPERTS).float()
        self.up_EDH = nn.Parameter(torch.randn(EXPERTS, D, H) / D**0.5)
        self.down_EHD = nn.Parameter(torch.randn(EXPERTS, H, D) / H**0.5)
        self.head = nn.Linear(D, 256)
        self.register_buffer("bias_E", torch.zeros(EXPERTS))

    def forward(self, byte_NT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_ND = self.byte(byte_NT).flatten(1)
        score_NE = self.router(x_ND).softmax(dim=1)
        score_NK, expert_NK = choose(score_NE, self.bias_E, K)
        y_ND = x_ND
        for e in range(EXPERTS):
            token_R, place_R = (expert_NK == e).nonzero(as_tuple=True)  # who has chosen it
            row_RD = F.relu(x_ND[token_R] @ self.up_EDH[e]) @ self.down_EHD[e]
            y_ND = y_ND.index_add(0, token_R, score_NK[token_R, place_R, None] * row_RD)
        return self.head(y_ND), expert_NK


# %% [markdown]
# Each rank reads a part of its own: the text begins with tables of characters and ends with code,
# the positions of a step are sorted, and each rank takes the next 1/n of them. The line that
# matters is `count_E = ...`: whose counts the correction sees.


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


def train(text: torch.Tensor, whose: str) -> tuple[Model, list[tuple]]:
    """The model, and of each step the rank's own counts and those of all ranks."""
    torch.manual_seed(2)
    model = Model().to(text.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(1)  # the same on every rank
    steps = []
    for _ in range(STEPS):
        window_NT = windows(text, generator)
        logits_NV, expert_NK = model(window_NT[:, :-1])
        own_E = counts(expert_NK, EXPERTS)
        total_E = over_all_ranks(own_E)
        count_E = total_E if whose == "all" else own_E
        loss = F.cross_entropy(logits_NV, window_NT[:, -1])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD_SIZE
        optimizer.step()
        adjust(model.bias_E, count_E, RATE)
        steps.append((own_E, total_E))
    return model, steps


# %% [markdown]
# Each harm shows in one of the measures of *Predict*:
#
# - If specialization is undone, *ranks differ* is small between the first rank, which has tables,
#   and the last, which has code. It is half the sum of all differences between their shares, since
#   a copy that has to move is too many at one expert and too few at another.
# - If the ranks route by different rules, the *excess* is large after all of them have loaded
#   rank 0's checkpoint, here at 4,200 other places of the text.


# %%
def ranks_differ(own_E: torch.Tensor) -> torch.Tensor:
    """The share of the first rank's copies that would have to move to be spread as the last's."""
    share_E = own_E.double() / own_E.sum()
    share_nE = [torch.empty_like(share_E) for _ in range(WORLD_SIZE)]
    dist.all_gather(share_nE, share_E)
    return (share_nE[0] - share_nE[-1]).abs().sum() / 2


def excess_after_loading(model: Model, text: torch.Tensor) -> float:
    """Of all ranks' choices, by rank 0's bias; the parameters are equal anyway."""
    dist.broadcast(model.bias_E, src=0)
    generator = torch.Generator().manual_seed(2)
    window_NT = torch.cat([windows(text, generator) for _ in range(5)])
    with torch.no_grad():
        _, expert_NK = model(window_NT[:, :-1])
    return imbalance(over_all_ranks(counts(expert_NK, EXPERTS))) - 1


# %% [markdown]
# ## 4. How it is measured
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
# **The two trainings** start from the same weights and read the same text. The last steps are the
# last 30. What a model learns varies with seed and text, so these rows have room.


# %%
class Trained(NamedTuple):
    first: float  # excess in the first step
    last: float  # excess in the last steps, mean
    loaded: float  # excess after all ranks have loaded the checkpoint
    differ: torch.Tensor  # the last rank's choices from the first one's, in the last steps
    apart: float  # the bias of one rank from that of another


def trained(text: torch.Tensor, whose: str) -> Trained:
    """Train by the counts `whose`, and print a row of the table."""
    model, steps = train(text, whose)
    own, total = zip(*steps, strict=True)
    excess = [imbalance(total_E) - 1 for total_E in total]
    differ = ranks_differ(sum(own[-30:]))
    apart = biases_apart(model.bias_E)  # before loading makes them equal
    run = Trained(excess[0], mean(excess[-30:]), excess_after_loading(model, text), differ, apart)
    print0(f"{'':13}{whose:11}{run.first:14.2f}{run.last:13.2f}{run.loaded:9.2f}{differ:15.3f}")
    return run


def check_training(text: torch.Tensor) -> None:
    print0(f"{'':13}counts  excess: first step   last steps   loaded   ranks differ")
    by_own = trained(text, "own")
    by_all = trained(text, "all")
    ratio = by_all.last / by_all.first
    claim("bias: excess of the last steps / first", 0.3, ratio, "<=", varies=True)
    if WORLD_SIZE == 1:
        blocked("trained with own counts", needs="2 ranks")
        return
    ratio = by_own.last / by_all.last
    claim("last steps: excess, own counts / all counts", 1.5, ratio, "<=", varies=True)
    claim("counts of all ranks, trained: biases apart", 0, by_all.apart)
    ratio = by_own.differ / by_all.differ
    claim("ranks differ: own counts / all counts", 0.25, ratio, "<=", question=3, varies=True)
    ratio = by_own.loaded / by_all.loaded
    claim("loaded: excess, own counts / all counts", 1.5, ratio, ">=", question=4, varies=True)


# %% [markdown]
# ## What you should have seen
#
# 1. 4: all of its tokens visit one expert of four.
# 2. 0.02: in each step rank 0 finds the expert too full, and rank 1 too empty.
# 3. Less: 0.018, and 0.182 by the counts of all ranks. Experts for tables and experts for code are
#    gone; chance alone makes 0.012.
# 4. Larger: 0.35, and 0.09. Rank 0's bias makes only rank 0's tokens even.
#
# The numbers are those of a run on four ranks, which printed
#
#     counts  excess: first step   last steps   loaded   ranks differ
#     own                   2.29         0.11     0.35          0.018
#     all                   2.29         0.14     0.09          0.182
#
# **The bias works**: 2.29 becomes 0.14, and 840 tokens that choose at random have 0.09. And **in
# training nothing shows the harm**: by own counts the last steps are as even, since each rank is
# even by a bias of its own. So compare the biases of two ranks right after the step, where they
# must be equal to the bit, and look at the imbalance after loading.
#
# Qiu et al. (2025) trained models of billions of parameters, balanced by a loss (below): with own
# counts experts specialized less, and predictions were worse.
#
# **Try.** With own counts always, the last three claims fail, and no excess grows in training. With
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
# **When.** Wherever each rank has data of its own. If a share s of an even step is spent in
# experts and their all-to-alls, and each expert has a GPU, the step takes 1 + s (imbalance - 1)
# times as long: with s = 0.5, 2.1 times in our first step, and 1.07 in the last ones by the counts
# of all ranks. If all experts are on every rank, imbalance costs little time, but experts without
# tokens learn nothing. Begin with the bias: it adds no gradient, and models with it predicted
# slightly better than with a loss in its paper (1 and 3 billion parameters). DeepSeek-V3 used it
# with a very small loss per sequence, Qwen3 a loss over all ranks. A **capacity** (parallelism/28)
# drops what an expert gets too much of: it bounds memory; tokens pay.
#
# **A loss** is the older correction (GShard, 2020; Switch, 2021). f_e is expert e's share of all
# copies, P_e the mean probability that the router gives it, and this is added to the training loss,
# usually times 0.01:
#
#     L  =  E x sum over all experts e of  f_e P_e            1 if all f are equal
#
# f_e is a count and has no gradient. P_e has one, in proportion to f_e, so the fuller experts lose
# probability to the emptier ones. f must be that of all ranks here, too. P need not be, since
# gradients are averaged over ranks anyway. Of the two harms own counts do only the first here: a
# router's parameters stay equal on all ranks.
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
