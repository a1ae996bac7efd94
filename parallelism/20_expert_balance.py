"""Expert balance: the fullest rank sets the pace
==============================================

**Question.** A router learns which experts a token visits, and nothing makes it spread the tokens
evenly. What does uneven routing cost, and what keeps it even?

**Predict**, and write it down before you run. Four ranks hold one expert each.

1. Half of all copies of tokens go to rank 0, a quarter to rank 1, a quarter to rank 2, and none to
   rank 3. How many times as long as with even routing does the layer take on rank 3?
2. The balancing loss is E x the sum, over all E experts, of an expert's share of the copies x the
   mean probability that the router gives it: 1 if routing is even. All tokens of rank r go to
   expert r, with probability 1, which is even over all ranks. What is the loss on a rank that
   counts its own tokens only?
3. A token's scores are 0.4 for expert 0 and 0.3 for expert 1, and it visits one expert. Expert 1
   has a bias of 0.2, for choosing only. By what is the chosen expert's output multiplied?
4. In a step an expert got three times the mean number of copies. By how many times its rate does
   the bias of this expert change?

**Run.**

    torchrun --standalone --nproc-per-node=4 20_expert_balance.py   # NCCL on 4 GPUs, else gloo
    python 20_expert_balance.py                                     # the same, started for you
    python 20_expert_balance.py --data FILE                         # train on a text of your own

Not run on several GPUs.

**Try.** In `adjust` write `-=` for `+=`: which claims fail? In `train` let the bias see the rank's
own counts, `adjust(model.bias_E, own_E, RATE)`: which one now?

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
from statistics import median
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

# Shapes: N tokens of a rank, D model width, E experts, each H wide, K experts per token, C = N K
# copies of tokens, R rows of one expert; M tokens of all ranks, V different bytes.

# %% [markdown]
# ## 1. The fullest rank sets the pace
#
# Under expert parallelism each copy of a token goes to the rank that has its expert, and comes
# back. The all-to-all that brings it back ends when the last rank has sent. So a layer takes as
# long as its fullest rank computes, and the others wait. Here are 24 copies on four ranks:
#
#                even          half of all to rank 0
#     rank 0     ######        ############
#     rank 1     ######        ######......        # computes
#     rank 2     ######        ######......        . waits
#     rank 3     ######        ............
#     it takes   6             12
#
# **Imbalance** is the copies on the fullest rank over the mean of all ranks, here 12 / 6 = 2. If a
# share s of the step is spent in experts and their all-to-alls with even routing, the step takes
# 1 + s (imbalance - 1) times as long: 1.5 times with s = 0.5 and the imbalance of the picture.
# Memory follows the fullest rank as well. It must hold all rows that arrive, so a router that goes
# astray ends a run with "out of memory".
#
# Nothing keeps a router even by itself. An expert that gets more tokens learns more, becomes the
# better choice, and gets more tokens still.


# %%
def counts(expert_NK: torch.Tensor, experts: int) -> torch.Tensor:
    """How many copies of this rank's tokens each expert gets: (E,)."""
    return torch.bincount(expert_NK.flatten(), minlength=experts)


def imbalance(count_E: torch.Tensor) -> float:
    """Copies of the fullest over the mean: of experts, or of ranks with one expert each."""
    return (count_E.max() / count_E.double().mean()).item()


# %% [markdown]
# ## 2. First cure: a loss makes the router pay
#
# The **balancing loss** (GShard, 2020; Switch, 2021) is added to the model's own, times a small
# coefficient. f_e is expert e's share of all copies, and P_e the mean over all tokens of the
# probability that the router gives it:
#
#     L  =  E x sum over all experts e of  f_e P_e            1 if all are equal, at most E / K
#
# f_e is a count and has no gradient. P_e has one: it pushes down the probability of each expert in
# proportion to how full that expert is. So f is what must be right. P is less delicate: a rank's
# own mean will do, since L is linear in P, and gradients are averaged over ranks anyway.


# %%
def balance_loss(score_NE: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
    """E x sum of share x mean probability, of this rank's probabilities and the given counts."""
    share_E = count_E.double() / count_E.sum()
    return len(count_E) * (share_E * score_NE.mean(dim=0)).sum()


# %% [markdown]
# ## 3. Second cure: a bias corrects the choice
#
# The gradient of L competes with that of the model's own loss: the router is pulled toward experts
# that are empty, not only toward those that predict well. DeepSeek-V3 adds a **bias** to each
# expert's score instead (Wang et al., 2024), *for choosing only*. The output is weighted by the
# score without it, so there is no gradient, and nothing is pulled. After each step the bias of an
# expert that got more copies than the mean goes down by a fixed amount, the *rate*, and that of one
# that got fewer goes up by as much.


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
# ## 4. Both need the counts of all ranks
#
# An expert is full if *all* ranks together send it too much. A rank that looks at its own tokens
# sees something else. Say that one rank has read tables and another one code, and that two experts
# have become good at either. A token visits both, with probability 1/2 each:
#
#     copies for expert       0   1   2   3
#     of rank 0, tables       6   6   0   0      by own counts L = 2: "push 0 and 1 down"
#     of rank 1, code         0   0   6   6      by own counts L = 2: "push 2 and 3 down"
#     of both                 6   6   6   6      L = 1: nothing to push
#
# No rank waits for another here. Still, own counts ask that the tokens of *each rank* be spread
# evenly, which keeps experts from specializing (Qiu et al., 2025). With own counts a bias fares
# worse. It is not a parameter, so no all-reduce of gradients keeps it equal: each rank moves its
# copy its own way, and the ranks no longer train one model.
#
# The remedy is one all-reduce of E numbers per layer and step:


# %%
def over_all_ranks(count_E: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' counts; the rank's own stay as they are."""
    total_E = count_E.clone()
    dist.all_reduce(total_E)
    return total_E


# %% [markdown]
# ## 5. Trained on text, four times
#
# A small model predicts the next byte of Python's own standard library from the 8 bytes before it:
# an embedding, one mixture of 8 experts of which a token visits 2, and a head. All experts are on
# every rank here, and tokens stay. That changes no number (lesson 11), only who computes it.

# %%
EXPERTS, K, CONTEXT, D, H = 8, 2, 8, 64, 64
BATCH = 1680  # tokens per step, of all ranks: 1 to 8 ranks divide it
STEPS = 150
COEFFICIENT = 1.0  # of the balancing loss; 0.01 is usual, where there are 100,000 steps to act
RATE = 0.002  # of the bias; DeepSeek-V3 has 0.001
WAYS = ("neither", "loss", "bias", "loss, own counts")


class Model(nn.Module):
    """Contexts of bytes (N, 8) -> logits (N, V), and the router's scores and choices."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, D // CONTEXT)
        self.router = nn.Linear(D, EXPERTS, bias=False)
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
# the positions of a step are sorted, and each rank takes the next 1/n of them. One process that
# takes all of them does the same step.


# %%
class Trained(NamedTuple):
    """Means over the last 30 steps, and the bias at the end."""

    uneven: float  # imbalance of all ranks' copies
    nats: float  # loss per byte, of all ranks
    share_E: torch.Tensor  # of this rank's copies
    bias_E: torch.Tensor


def train(how: str, text: torch.Tensor) -> Trained:
    torch.manual_seed(2)
    model = Model().to(text.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(1)  # the same on every rank
    history = []
    own = []
    for _ in range(STEPS):
        start_M = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator).sort().values
        start_N = start_M.chunk(WORLD_SIZE)[RANK].to(text.device)
        window_NT = text[start_N[:, None] + torch.arange(CONTEXT + 1, device=text.device)]
        logits_NV, score_NE, expert_NK = model(window_NT[:, :-1])
        own_E = counts(expert_NK, EXPERTS)
        count_E = over_all_ranks(own_E)
        nats = F.cross_entropy(logits_NV, window_NT[:, -1])
        loss = nats
        if how == "loss":
            loss = nats + COEFFICIENT * balance_loss(score_NE, count_E)
        if how == "loss, own counts":
            loss = nats + COEFFICIENT * balance_loss(score_NE, own_E)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        if how == "bias":
            adjust(model.bias_E, count_E, RATE)
        history.append((imbalance(count_E), nats.item()))
        own.append(own_E)
    uneven, nats = torch.tensor(history[-30:]).mean(dim=0).tolist()
    share_E = torch.stack(own[-30:]).double().mean(dim=0) / (K * len(start_N))
    return Trained(uneven, mean_of_ranks(nats, text.device), share_E, model.bias_E)


def average_gradients(model: nn.Module) -> None:
    """As DDP does: all gradients in one all-reduce."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / WORLD_SIZE, gradients)


# %% [markdown]
# ## 6. How it is measured
#
# **The pace.** All ranks route as in the picture: the last rank's copies go to rank 0. The last
# rank has nothing to compute then, and its time is what is claimed. An expert sleeps a millisecond
# per row, since on a CPU ranks that wait would lend their core to the fullest one. The sleep stands
# for a rank's own device, so this row is marked s; that the last rank waits is the real
# all-to-all's doing.


# %%
def skewed(copies: int, device: torch.device) -> torch.Tensor:
    """The expert of each copy of a rank, (C,), one expert per rank: rank 0 also has the last's."""
    expert_C = torch.arange(copies, device=device) % WORLD_SIZE
    return expert_C * (expert_C < WORLD_SIZE - 1)


def layer_seconds(x_CD: torch.Tensor, expert_C: torch.Tensor) -> float:
    """Seconds of dispatch, expert and combine on this rank, if all ranks route their copies so."""
    sent = counts(expert_C, WORLD_SIZE).tolist()
    received = [sent[RANK]] * WORLD_SIZE
    row_RD = x_CD.new_empty(sum(received), x_CD.shape[1])
    y_CD = torch.empty_like(x_CD)
    dist.barrier()
    begin = time.perf_counter()
    dist.all_to_all_single(row_RD, x_CD, received, sent)
    if x_CD.is_cuda:
        torch.cuda.synchronize()  # a sleep does not wait for the GPU
    time.sleep(0.001 * len(row_RD))  # the expert
    dist.all_to_all_single(y_CD, row_RD, sent, received)
    y_CD[0, 0].item()  # waits for the GPU
    return time.perf_counter() - begin


def slowdown(seconds: dict[str, list[float]]) -> float:
    """Skewed over even, by medians; the first try of each is a warm-up."""
    return median(seconds["skewed"][1:]) / median(seconds["even"][1:])


def check_pace(device: torch.device) -> None:
    text = "skewed: seconds of the last rank / even"
    if WORLD_SIZE == 1:
        blocked(text, needs="2 ranks")
        return
    copies = 20 * WORLD_SIZE
    x_CD = torch.ones(copies, 1, device=device)
    routes = {"even": torch.arange(copies, device=device) % WORLD_SIZE}
    routes["skewed"] = skewed(copies, device)
    seconds = {"even": [], "skewed": []}
    for _ in range(6):
        for route, expert_C in routes.items():
            seconds[route].append(layer_seconds(x_CD, expert_C))
    ratio = slowdown(seconds)
    last = WORLD_SIZE - 1
    claim(text, 2, ratio, atol=0.4, question=1, kind="simulated", timed=True, rank=last)


# %% [markdown]
# **Loss and bias** are held against the questions' numbers, and against one process that has the
# tokens of all ranks.


# %%
def check_questions(device: torch.device) -> None:
    n = WORLD_SIZE
    expert_N = torch.full((5,), RANK, device=device)
    certain_NE = F.one_hot(expert_N, n).double()
    own_E = counts(expert_N, n)
    loss = balance_loss(certain_NE, own_E)
    claim("own counts: the balancing loss", n, loss, question=2)
    loss = balance_loss(certain_NE, over_all_ranks(own_E))
    claim("counts of all ranks: the balancing loss", 1, loss, atol=1e-12)

    score_NE = torch.tensor([[0.4, 0.3, 0.2, 0.1]], device=device, dtype=torch.float64)
    bias_E = torch.tensor([0.0, 0.2, 0.0, 0.0], device=device, dtype=torch.float64)
    score_NK, _ = choose(score_NE, bias_E, 1)
    claim("chosen by bias: its output is multiplied by", 0.3, score_NK.item(), question=3)
    bias_E = torch.zeros_like(bias_E)
    adjust(bias_E, torch.tensor([6, 1, 1, 0], device=device), RATE)
    claim("3 x the mean: change of its bias / rate", -1, bias_E[0] / RATE, question=4)


def check_one_process(device: torch.device) -> None:
    torch.manual_seed(0)
    x_MD = torch.randn(21 * WORLD_SIZE, D, device=device, dtype=torch.float64)
    weight_ED = torch.randn_like(x_MD[:EXPERTS]).requires_grad_()
    score_NE = (x_MD.chunk(WORLD_SIZE)[RANK] @ weight_ED.T).softmax(dim=1)
    bias_E = torch.zeros_like(score_NE[0])
    _, expert_NK = choose(score_NE, bias_E, K)
    count_E = over_all_ranks(counts(expert_NK, EXPERTS))
    (ours_ED,) = torch.autograd.grad(balance_loss(score_NE, count_E) / WORLD_SIZE, weight_ED)
    dist.all_reduce(ours_ED)
    adjust(bias_E, count_E, RATE)

    score_ME = (x_MD @ weight_ED.T).softmax(dim=1)
    second_M1 = score_ME.detach().sort(dim=1).values[:, [-K]]
    share_E = (score_ME >= second_M1).double().mean(dim=0) / K
    expected = EXPERTS * (share_E * score_ME.mean(dim=0)).sum()
    (expected_ED,) = torch.autograd.grad(expected, weight_ED)
    error = (ours_ED - expected_ED).abs().max() / expected_ED.abs().max()
    claim("loss: error of the router's gradient", 0, error, atol=len(x_MD) * 2**-50)
    due_E = RATE * (1 / EXPERTS - share_E).sign()
    claim("bias: experts with another one than in one process", 0, (bias_E != due_E).sum())


# %% [markdown]
# **The four trainings.** What a model learns varies with seed and text, so these rows have room. Of
# the imbalance 1 is due; what is above it is **excess**, and each cure should leave less than half
# of what there is with neither. How far experts have specialized is told by the first rank, with
# tables, and the last one, with code: the share of copies that would have to go to other experts
# for both to send the same to each.


# %%
def mean_of_ranks(x: float, device: torch.device) -> float:
    total = torch.tensor(x, device=device)
    dist.all_reduce(total)
    return total.item() / WORLD_SIZE


def first_and_last_differ(share_E: torch.Tensor) -> float:
    shares_nE = [torch.empty_like(share_E) for _ in range(WORLD_SIZE)]
    dist.all_gather(shares_nE, share_E)
    return (shares_nE[0] - shares_nE[-1]).abs().sum().item() / 2


def check_training(text: torch.Tensor) -> None:
    runs = {}
    differ = {}
    for how in WAYS:
        runs[how] = train(how, text)
        differ[how] = first_and_last_differ(runs[how].share_E)
        said = f"imbalance {runs[how].uneven:.2f}, nats per byte {runs[how].nats:.3f}"
        print0(f"{'':13}{how:17} {said}, ranks differ by {differ[how]:.3f}")
    for how in ("loss", "bias"):
        left = (runs[how].uneven - 1) / (runs["neither"].uneven - 1)
        claim(f"{how}: excess / with neither, at most", 0.5, left, "<=", varies=True)
    single = torch.special.entr(torch.bincount(text) / len(text)).sum().item()
    worst = max(run.nats for run in runs.values())
    claim("each: nats per byte / without context", 0.8, worst / single, "<=", varies=True)
    if WORLD_SIZE == 1:
        blocked("whose counts: experts that specialize", needs="2 ranks")
        return
    largest_E = runs["bias"].bias_E.clone()
    dist.all_reduce(largest_E, op=dist.ReduceOp.MAX)
    apart = (largest_E != runs["bias"].bias_E).sum()
    claim("bias: experts whose bias differs between ranks", 0, apart)
    ratio = differ["loss, own counts"] / differ["loss"]
    claim("ranks differ: own counts / all counts, at most", 0.5, ratio, "<=", varies=True)


def tables_and_code(path: str | None) -> bytes:
    """Return up to 2 MB: of the file at `path`, or tables and then code of Python's library."""
    if path:
        return Path(path).read_bytes()[:2_000_000]
    library = Path(sysconfig.get_path("stdlib"))
    text = b""
    for kind in ("encodings/*.py", "[a-d]*.py"):
        text += b"".join(file.read_bytes() for file in sorted(library.glob(kind)))[:1_000_000]
    return text


# %% [markdown]
# ## What you should have seen
#
# 1. Twice as long. Rank 3 computes nothing, and its all-to-all still ends when rank 0's does.
# 2. 4, which is E / K: its own tokens look as uneven as can be. Counted over all ranks it is 1, for
#    nothing is uneven. Trained with own counts, each rank would pull its tokens away from the
#    expert that suits them.
# 3. 0.3. Its biased score, 0.5, wins against 0.4, and then it is forgotten. With 0.5 the bias would
#    change what the model computes, and no gradient knows of it.
# 4. -1: down by one rate, as if it had got 10% too much. So a small rate is what makes the bias
#    calm, and too small a one lets it lag behind the router.
#
# In the trainings the imbalance is that of *experts*: with several on a rank the ranks' is smaller.
# Trained with neither, the fullest expert had 1.3 to 2.8 times the mean in three runs with other
# seeds; four times, E / K, would be all tokens. With either cure it was about 1.1 in all of them,
# and the prediction within 0.02 nats of that with neither. With the counts of all ranks, tables and
# code go to different experts for a fifth to a third of their copies. With own counts most of that
# is lost.
#
# **Try.** With `-=` full experts are made fuller. Three claims fail: question 4's, *bias: experts
# with another one than in one process*, and *bias: excess*. With own counts only *bias: experts
# whose bias differs between ranks* fails. Nothing else tells, and every rank now routes by a bias
# of its own.
#
# **On GPUs**, where this has not been run, the imbalance of a single micro-batch counts, not the
# mean over many: each layer of each micro-batch waits for its own fullest rank. More experts per
# rank even it out, and so do larger micro-batches. A speed that was measured with routing forced to
# be even is not that of a real run.
#
# **When.** Wherever experts are on different ranks. If all are on every rank, imbalance costs
# little time, but experts that get no tokens still learn nothing. DeepSeek-V3 trained with the
# bias, on sigmoid scores, and a very small loss per sequence; Qwen3 uses the loss over all ranks. A
# third way is a **capacity**: an expert takes no more than so many copies, and the rest is dropped
# and skips the layer (GShard, Switch). It bounds memory and fixes all shapes; tokens pay for it.
#
# **In other systems.** Megatron-LM: `--moe-router-load-balancing-type` aux_loss, or global_aux_loss
# for counts of all ranks; `--moe-router-enable-expert-bias`; `--moe-expert-capacity-factor`.
# torchtitan: `load_balance_coeff`, the bias's rate, applied before the optimizer's step.


# %%
def main() -> None:
    data = {"metavar": "PATH", "help": "text to train on (Python's own sources)"}
    options = command_line({"--data": data})
    launch()
    device = setup()
    check_pace(device)
    check_questions(device)
    check_one_process(device)
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
