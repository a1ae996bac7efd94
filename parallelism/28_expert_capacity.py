"""Expert capacity: tokens above it are dropped
============================================

**Question.** Uneven routing makes one expert the fullest, and all ranks wait for it. A capacity
bounds what an expert gets, and drops the tokens above it. Whose tokens share that bound, how many
are dropped, and how much time does it save?

**Predict**, and write it down before you run. Each of four ranks has one expert, and a token visits
one. In 1, 2 and 4 every rank sends half of its tokens to expert 0, a quarter to expert 1, a quarter
to expert 2, and none to expert 3.

1. Nothing is dropped. How many times as long as with even routing does the slowest rank compute?
2. An expert takes no more than its even share of all ranks' tokens: the **capacity factor** is 1.
   Which share of all tokens is dropped?
3. All tokens of rank r visit expert r. Each rank counts by itself: an expert takes no more than a
   quarter of the rank's own tokens. Which share of all tokens is dropped?
4. All ranks' tokens are counted together again, and the factor is 1.25. How many times as long as
   with even routing does the slowest rank compute?

**Run.**

    torchrun --standalone --nproc-per-node=4 28_expert_capacity.py   # NCCL on 4 GPUs, else gloo
    python 28_expert_capacity.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `within_capacity` let `before_E` be 0: which claims fail? In `expert_layer` return
`torch.zeros_like(x_ND).index_add(0, token_C, y_CD)`: which ones now?

**Before.** parallelism/11_expert_parallelism.py: how tokens reach their experts.
parallelism/20_expert_balance.py: how routing is kept even.

**Next.** parallelism/12_gpt_on_a_mesh.py: several ways to split a model at once.
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
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # ranks whose tokens share a capacity; None: all ranks

# Shapes: N tokens of a rank, M tokens of all ranks, D model width, E experts, each H wide and one
# per rank; g ranks of a group, n ranks in all; C served tokens of a rank, R rows of an expert.
N = 16 * WORLD_SIZE
D, H = 8, 16

# %% [markdown]
# ## 1. A bound for every expert
#
# A router that training keeps even (parallelism/20) may be uneven in a single micro-batch. Then all
# ranks wait for the fullest, which must also hold all rows that arrive. A **capacity** bounds both:
# of a group's tokens an expert takes at most
#
#     capacity  =  capacity factor x tokens / experts        rounded up
#
# They are served in order. One that comes too late is **dropped**: no expert computes it, and it
# goes on by the residual connection, as it was:
#
#     y  =  x + expert(x)    if x is served            y  =  x    if it is dropped
#
# So no rank gets more rows than the factor times the even share, however bad the router is.


# %%
def capacity_of(factor: float, tokens: int, experts: int) -> int:
    """How many of a group's tokens one expert takes."""
    return math.ceil(factor * tokens / experts)


# %% [markdown]
# ## 2. Whose tokens share a capacity
#
# The **group** is the ranks whose tokens are counted together. Here are two ranks with four tokens
# each, two experts, and a factor of 1. Each rank has more of one kind, and over both the routing is
# even:
#
#                                          rank 0         rank 1
#     tokens visit expert                  0  0  0  1     1  1  1  0
#     each rank a group, capacity 2        0  0  -  1     1  1  -  0      two are dropped
#     both ranks a group, capacity 4       0  0  0  1     1  1  1  0      none
#
# Both rules give an expert four rows at most. But a rank that counts by itself drops tokens while
# their expert has room: it cannot know that the other rank sends little there. Nor may it hold its
# own tokens alone against the group's capacity of 4: if both ranks sent all they have to expert 0,
# nothing would be dropped, and expert 0 would get eight rows.
#
# What counts is a token's place in the queue of its expert: after those of the group's ranks before
# its own, and after those of its own rank before it. So the group exchanges E counts per rank:


# %%
def within_capacity(
    expert_N: torch.Tensor, experts: int, capacity: int, group: Group
) -> torch.Tensor:
    """Which of this rank's tokens are served, (N,): in order of the group's ranks and tokens."""
    chosen_NE = F.one_hot(expert_N, experts)
    count_E = chosen_NE.sum(dim=0)
    counts_gE = [torch.empty_like(count_E) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts_gE, count_E, group=group)
    before_E = sum(counts_gE[: dist.get_rank(group)])  # of the group's ranks before this one
    place_NE = before_E + chosen_NE.cumsum(dim=0)  # of each token, in each expert's queue
    return place_NE.gather(1, expert_N[:, None])[:, 0] <= capacity


# %% [markdown]
# Which tokens are dropped is part of what the model computes, and the group decides it. **One
# process computes the same if it drops in the same groups**, and something else if it does not.
#
# The order decides, too. With question 2's routing ranks 0 and 1 fill expert 0 and lose nothing,
# and ranks 2 and 3 lose half of their tokens. If each rank is a group, each loses a quarter.

# %% [markdown]
# ## 3. The layer
#
# Tokens travel as in parallelism/11, here with one expert per rank and per token, and no scores. A
# dropped token is in no message, and the last line leaves it as it is.


# %%
def expert(x_RD: torch.Tensor, up_DH: torch.Tensor, down_HD: torch.Tensor) -> torch.Tensor:
    return F.relu(x_RD @ up_DH) @ down_HD


def expert_layer(
    x_ND: torch.Tensor, expert_N: torch.Tensor, served_N: torch.Tensor, weights: tuple
) -> torch.Tensor:
    """Served tokens travel to their experts and back; `weights` are of this rank's: (N, D)."""
    token_C = served_N.nonzero().flatten()
    token_C = token_C[expert_N[token_C].argsort(stable=True)]  # by expert, and so by rank
    sent_n = torch.bincount(expert_N[token_C], minlength=WORLD_SIZE)
    received_n = torch.empty_like(sent_n)
    dist.all_to_all_single(received_n, sent_n)
    sent, received = torch.stack([sent_n, received_n]).tolist()

    row_RD = x_ND.new_empty(sum(received), x_ND.shape[1])
    dist.all_to_all_single(row_RD, x_ND[token_C], received, sent)
    y_CD = x_ND.new_empty(len(token_C), x_ND.shape[1])
    dist.all_to_all_single(y_CD, expert(row_RD, *weights), sent, received)
    return x_ND.index_add(0, token_C, y_CD)


# %% [markdown]
# ## 4. How it is measured
#
# The oracle is one process with the tokens of all ranks. It serves one after the other, and begins
# to count anew where a group begins. On four ranks there are groups of 1, 2 and 4. Routing is that
# of the questions, in another order on each rank, with a factor of 1.25.

# %%
FACTOR = 1.25
TOLERANCE = 10 * (D + H) * 2**-53  # float64: a token's two sums, in another order


def skewed(tokens: int, rank: int) -> torch.Tensor:
    """The expert of each token of a rank, (N,): those for the last expert visit expert 0 too."""
    expert_N = torch.arange(tokens) % WORLD_SIZE
    expert_N[expert_N == WORLD_SIZE - 1] = 0
    return expert_N[torch.randperm(tokens, generator=torch.Generator().manual_seed(rank))]


def served_in_one_process(expert_M: list[int], tokens: int, capacity: int) -> list[bool]:
    """Which tokens are served, if so many in a row are a group."""
    served = []
    for first in range(0, len(expert_M), tokens):
        taken = Counter()
        for e in expert_M[first : first + tokens]:
            taken[e] += 1
            served.append(taken[e] <= capacity)
    return served


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def check_groups(device: torch.device, groups: dict[int, Group]) -> None:
    torch.manual_seed(0)  # the same tokens and weights on every rank
    factory = {"device": device, "dtype": torch.float64}
    x_MD = torch.randn(N * WORLD_SIZE, D, **factory)
    up_EDH = torch.randn(WORLD_SIZE, D, H, **factory)
    down_EHD = torch.randn(WORLD_SIZE, H, D, **factory)
    expert_M = torch.cat([skewed(N, rank) for rank in range(WORLD_SIZE)]).to(device)
    expert_N = expert_M.chunk(WORLD_SIZE)[RANK]
    for size, group in groups.items():
        capacity = capacity_of(FACTOR, size * N, WORLD_SIZE)
        served_N = within_capacity(expert_N, WORLD_SIZE, capacity, group)
        x_ND = x_MD.chunk(WORLD_SIZE)[RANK]
        y_ND = expert_layer(x_ND, expert_N, served_N, (up_EDH[RANK], down_EHD[RANK]))

        served_M = served_in_one_process(expert_M.tolist(), size * N, capacity)
        expected_MD = x_MD.clone()
        for token, e in enumerate(expert_M.tolist()):
            if served_M[token]:
                expected_MD[token] += expert(x_MD[token], up_EDH[e], down_EHD[e])
        error = relative_error(y_ND, expected_MD.chunk(WORLD_SIZE)[RANK])
        claim(f"groups of {size}: error against one process", 0, error, atol=TOLERANCE)


# %% [markdown]
# **What is dropped** is counted over all ranks, as are the rows that arrive at an expert. An even
# share is 1/n of all tokens. Expert 0 is sent two of them, and no other expert more than one. So
# with all ranks in a group a factor f from 1 to 2 drops (2 - f) / n.


# %%
def dropped(served_N: torch.Tensor) -> float:
    """The share of all ranks' tokens."""
    count = (~served_N).sum()
    dist.all_reduce(count)
    return count.item() / (len(served_N) * WORLD_SIZE)


def arrivals(expert_N: torch.Tensor, served_N: torch.Tensor) -> torch.Tensor:
    """The rows that each expert gets from all ranks: (E,)."""
    row_E = torch.bincount(expert_N[served_N], minlength=WORLD_SIZE)
    dist.all_reduce(row_E)
    return row_E


def check_dropped(device: torch.device, everyone: Group) -> None:
    expert_N = skewed(N, RANK).to(device)
    shares = {}
    fullest = {}
    print0(f"{'':13}{'capacity factor':17}{'dropped':>9}{'fullest rank / even share':>28}")
    for factor in (1.0, FACTOR, 1.5, 1.75, 2.0):
        capacity = capacity_of(factor, N * WORLD_SIZE, WORLD_SIZE)
        served_N = within_capacity(expert_N, WORLD_SIZE, capacity, everyone)
        shares[factor] = dropped(served_N)
        fullest[factor] = arrivals(expert_N, served_N).max().item() / N
        print0(f"{'':13}{factor:<17}{shares[factor]:>9.1%}{fullest[factor]:>28.2f}")
    skew = min(2, WORLD_SIZE)  # what expert 0 wants, over its even share
    row_E = arrivals(expert_N, torch.ones_like(served_N))
    text = "no capacity: rows of the fullest rank / even share"
    claim(text, skew, row_E.max().item() / N, question=1)
    due = (skew - 1) / WORLD_SIZE
    claim("factor 1: share of tokens dropped", due, shares[1.0], atol=1e-12, question=2)
    due = max(skew - FACTOR, 0) / WORLD_SIZE
    claim("factor 1.25: share of tokens dropped", due, shares[FACTOR], atol=1e-12)
    text = "factor 1.25: rows of the fullest rank / even share"
    claim(text, min(skew, FACTOR), fullest[FACTOR], question=4)


def check_own_kind(device: torch.device, groups: dict[int, Group]) -> None:
    expert_N = torch.full((N,), RANK, device=device)
    shares = {}
    for size in (1, WORLD_SIZE):
        capacity = capacity_of(1.0, N * size, WORLD_SIZE)
        shares[size] = dropped(within_capacity(expert_N, WORLD_SIZE, capacity, groups[size]))
    text = "own kind, each rank a group: share dropped"
    claim(text, 1 - 1 / WORLD_SIZE, shares[1], atol=1e-12, question=3)
    claim("own kind, all ranks a group: share dropped", 0, shares[WORLD_SIZE])


# %% [markdown]
# **The time.** Each rank computes as many rows as arrive at its expert, with no capacity and with a
# factor of 1.25. Ranks take turns, as if each had a device of its own. On CPUs the seconds are
# those that the rank's process was on a core. The best of some tries count. The mean of all ranks
# without a capacity is what even routing would take.

# %%
TRIES = 15


def seconds_of(x_RD: torch.Tensor, weights: tuple) -> float:
    """Of the expert's products: on a GPU by the clock, else those on a core."""
    clock = time.perf_counter if x_RD.is_cuda else time.process_time
    begin = clock()
    expert(x_RD, *weights).sum().item()  # waits for the device
    return clock() - begin


def measure(device: torch.device, everyone: Group) -> torch.Tensor:
    """Seconds of each rank's expert, (2, n): without a capacity, and with one."""
    width = 2048 if device.type == "cuda" else 256
    tokens = WORLD_SIZE * (512 if device.type == "cuda" else 64)  # of a rank
    expert_N = skewed(tokens, RANK).to(device)
    capacity = capacity_of(FACTOR, tokens * WORLD_SIZE, WORLD_SIZE)
    capped_N = within_capacity(expert_N, WORLD_SIZE, capacity, everyone)
    inputs = []
    for served_N in (torch.ones_like(capped_N), capped_N):
        rows = arrivals(expert_N, served_N)[RANK].item()
        inputs.append(torch.ones(rows, width, device=device))
    up_DH = torch.ones(width, 4 * width, device=device)
    tries = ([], [])
    for turn in range(TRIES * WORLD_SIZE):
        dist.barrier()
        if turn % WORLD_SIZE == RANK:
            for x_RD, seconds in zip(inputs, tries, strict=True):
                seconds.append(seconds_of(x_RD, (up_DH, up_DH.T)))
    best_2 = torch.tensor([min(seconds) for seconds in tries], device=device)
    best_n2 = [torch.empty_like(best_2) for _ in range(WORLD_SIZE)]
    dist.all_gather(best_n2, best_2)
    return torch.stack(best_n2, dim=1)


def check_seconds(seconds_2n: torch.Tensor) -> None:
    """The slowest rank, without and with a capacity, over the mean of all ranks without."""
    even = seconds_2n[0].mean()
    uncapped, capped = (seconds_2n.amax(dim=1) / even).tolist()
    skew = min(2, WORLD_SIZE)
    text = "no capacity: seconds of the slowest rank / mean"
    claim(text, skew, uncapped, atol=0.3, question=1, timed=True)
    text = "factor 1.25: seconds of the slowest / that mean"
    claim(text, min(skew, FACTOR), capped, atol=0.2, question=4, timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. Twice as long. Time follows rows: the imbalance is 2, and so is the slowest rank's time over
#    the mean. That rank 3 has nothing to do helps nobody.
# 2. A quarter: expert 0 is sent half of all tokens and takes a quarter. The experts take as long as
#    with even routing, and a quarter of the tokens pays for it.
# 3. Three quarters: a rank may send a quarter of its tokens to the one expert that they visit. With
#    all ranks in a group nothing is dropped, for each expert is sent just its even share.
# 4. 1.25 times as long, in place of 2: the factor caps the time, and 19% of the tokens are dropped.
#    Each 0.25 more saves 6% of the tokens, and costs a quarter of the time of an even layer.
#
# **Try.** With `before_E` 0 each rank holds its own tokens alone against the capacity of its group.
# The four rows of factors 1 and 1.25 fail, those of groups of 2 and of 4, and none of the others: a
# group of one rank has nobody before it, and in *own kind* no two ranks visit one expert. The
# second change loses the residual connection, so the three rows *groups of* fail; no count notices.
#
# **Where it bites.** A token's output depends on those before it in the queue, so one prompt can
# get different answers in different batches. And the group is part of the model: if each rank is
# one, a run that goes on with another number of ranks drops other tokens.
#
# **On GPUs**, where this has not been run, counting per rank has a merit: each rank can send each
# expert the same number of rows, padded with zeros. All shapes are fixed then, no counts are
# exchanged, and a CUDA graph can hold the layer. But padded experts compute zeros, too: with a
# factor of 1.25 an even layer takes 1.25 times as long.
#
# **When.** As a limit on memory and on the slowest micro-batch, above a router that training keeps
# even; it is no substitute for that. **Dropless** layers, such as parallelism/11's, MegaBlocks
# (2022) and DeepSeek-V3's, drop nothing, and wait.
#
# **In other systems.** Megatron-LM counts per rank: `--moe-expert-capacity-factor`, off by default;
# `--moe-pad-expert-input-to-capacity` pads; `--moe-token-drop-policy` drops the lowest scores
# (probs, the default), or the last tokens (position), as here. DeepSpeed's `MoE` has
# `capacity_factor` and `drop_tokens`.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    groups = {}
    for size in range(1, WORLD_SIZE + 1):
        if WORLD_SIZE % size == 0:
            groups[size], _ = dist.new_subgroups(size)
    check_dropped(device, groups[WORLD_SIZE])
    check_own_kind(device, groups)
    check_groups(device, groups)
    check_seconds(measure(device, groups[WORLD_SIZE]))
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
