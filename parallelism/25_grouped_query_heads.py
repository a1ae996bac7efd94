"""Grouped-query attention over more ranks than key-value heads
============================================================

**Question.** In grouped-query attention several query heads share one key-value head. Tensor
parallelism splits attention by query heads. What does a rank hold if there are fewer key-value
heads than ranks, and which gradients must the ranks then add up?

**Predict**, and write it down before you run. 48 query heads share 2 key-value heads, 24 each.
There are four ranks.

1. Which share of all keys and values (of a cache in inference, say) does each rank hold?
2. Over how many ranks must the gradient of a key-value head's weight be added up?
3. Ranks 0 and 1 compute the same keys from the same input x. In the backward pass f adds up the
   four gradients that the ranks have for x. By which number must this sum be divided?
4. The norm before f is copied too, and nothing adds up the gradients of its weight. In how many of
   its 64 numbers do those of two ranks differ?

**Run.**

    torchrun --standalone --nproc-per-node=4 25_grouped_query_heads.py   # NCCL on 4 GPUs, else gloo
    python 25_grouped_query_heads.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `sum_copies` leave out the all-reduce: the output stays right, so what fails? In
`Part.forward` compute the keys and values from `h_TBD`, which has not passed f: what fails now?

**Before.** parallelism/06_tensor_parallel.py: f and g; what is split and what is copied, in
parallelism/22_tensor_parallel_random_state.py.

**Next.** parallelism/23_tensor_parallel_overlap.py: for which of the sums a GPU need not wait.
"""

import argparse
import copy
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
from torch import nn

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# Shapes: T tokens, B sequences, D model width, H query heads, G key-value heads, K features per
# head. A small letter is one rank's share: h = H / n, d = h K; g is how many of the G it holds.
T, B, D, H, G, K = 32, 2, 64, 48, 2, 8
SHARING = H // G  # query heads share one key-value head

# %% [markdown]
# ## 1. Who holds which head
#
# Attention treats each query head alone, so a rank takes H/n of them, and whatever keys and values
# these need. If two ranks need the same key-value head, each computes it, from a **copy** of its
# weights. On four ranks:
#
#     rank                         0           1           2           3
#     query heads, split           0 to 11     12 to 23    24 to 35    36 to 47
#     key-value head, copied       0           0           1           1
#     its gradient comes from      0 to 11     12 to 23    24 to 35    36 to 47
#                                  '--- add up ---'        '---- add up ----'
#
# Both copies of a head start equal, and must stay equal. But its gradient is a sum over the 24
# query heads that share it, and each rank has seen 12. So before the optimizer steps, the gradients
# of copies are added up over **the ranks that hold the same head, and no others**:


# %%
def key_value_heads(rank: int, n: int) -> range:
    """The key-value heads that a rank's query heads use, if there are n ranks."""
    first = rank * H // n
    last = (rank + 1) * H // n - 1
    return range(first // SHARING, last // SHARING + 1)


def holders(head: int, n: int) -> list[int]:
    """The ranks that hold a key-value head, if there are n."""
    return [rank for rank in range(n) if head in key_value_heads(rank, n)]


def sum_copies(grad_gCD: torch.Tensor, groups: list[Group]) -> None:
    """Add up this rank's gradients of key-value heads, each over the ranks that hold the head."""
    for grad_CD, head in zip(grad_gCD, key_value_heads(RANK, WORLD_SIZE), strict=True):
        if len(holders(head, WORLD_SIZE)) > 1:
            dist.all_reduce(grad_CD, group=groups[head])


class Part(nn.Module):
    """What one rank holds of grouped-query attention: (T, B, D) -> (T, B, D), alike on all."""

    def __init__(self, whole: "Attention") -> None:
        super().__init__()
        mine = key_value_heads(RANK, WORLD_SIZE)
        kv_GCD = whole.kv.weight.detach().unflatten(0, (G, 2 * K))  # C: a head's keys and values
        self.norm = copy.deepcopy(whole.norm)  # copied
        self.q = nn.Parameter(share(whole.q.weight, 0))  # split
        self.kv = nn.Parameter(kv_GCD[mine.start : mine.stop].clone())  # copied, if n > G
        self.out = nn.Parameter(share(whole.out.weight, 1))  # split

    def forward(self, x_TBD: torch.Tensor) -> torch.Tensor:
        h_TBD = self.norm(x_TBD)
        f_TBD = CopyToRanks.apply(h_TBD)  # f
        q_TBd = F.linear(f_TBD, self.q)
        kv_TBc = F.linear(f_TBD, self.kv.flatten(0, 1))
        return ReduceFromRanks.apply(F.linear(attend(q_TBd, kv_TBc), self.out))  # g


def share(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy of this rank's 1/n of `x` along `dim`."""
    return x.detach().chunk(WORLD_SIZE, dim)[RANK].clone()


# %% [markdown]
# Nothing else needs such a sum. The norm is copied as well, but it stands before f, and f has
# already added up the gradients of all ranks for h. Those that reach h through the keys are parts
# too, for each comes from a rank's own query heads. So each counts once, although ranks 0 and 1
# compute the same keys. (Under sequence parallelism a rank's norm sees its own tokens alone. Then
# its gradient is a part as well, and 06_tensor_parallel.py adds it up.)
#
# In one process it is plain PyTorch. `enable_gqa` lets consecutive query heads share a key-value
# head, in one process 24, on a rank as many as it has for each:


# %%
class Attention(nn.Module):
    """Grouped-query attention behind a norm, in one process: (T, B, D) -> (T, B, D)."""

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, **factory)
        self.q = nn.Linear(D, H * K, bias=False, **factory)
        self.kv = nn.Linear(D, G * 2 * K, bias=False, **factory)
        self.out = nn.Linear(H * K, D, bias=False, **factory)

    def forward(self, x_TBD: torch.Tensor) -> torch.Tensor:
        h_TBD = self.norm(x_TBD)
        return self.out(attend(self.q(h_TBD), self.kv(h_TBD)))


def attend(q_TBd: torch.Tensor, kv_TBc: torch.Tensor) -> torch.Tensor:
    """Causal attention of as many heads as there are: (T, B, h K), (T, B, g 2 K) -> (T, B, h K)."""
    q_BhTK = q_TBd.unflatten(-1, (-1, K)).permute(1, 2, 0, 3)
    k_BgTK, v_BgTK = kv_TBc.unflatten(-1, (-1, 2, K)).permute(3, 1, 2, 0, 4)
    options = {"is_causal": True, "enable_gqa": True}
    y_BhTK = F.scaled_dot_product_attention(q_BhTK, k_BgTK, v_BgTK, **options)
    return y_BhTK.permute(2, 0, 1, 3).flatten(2)


# %% [markdown]
# f and g, from 06_tensor_parallel.py:


# %%
class CopyToRanks(torch.autograd.Function):
    """f in Shoeybi et al. (2019), section 3: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None  # None: a group has no gradient


class ReduceFromRanks(torch.autograd.Function):
    """g in Shoeybi et al. (2019), section 3: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def all_reduce(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum over the group. `x` stays as it is: a gradient we are handed is not ours."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


# %% [markdown]
# ## 2. How it is measured
#
# The oracle is `Attention` in one process, in float64. Errors are relative to the largest element;
# some ten operations in a row each add up at most H K terms, in another order. Copies must be equal
# to the bit, so they are gathered and compared.


# %%
TOLERANCE = 10 * H * K * 2**-53


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def gathered(x: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """The `x` of every rank of the group."""
    mine = x.detach().contiguous()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return everyone


def differing(x: torch.Tensor, group: Group = None) -> int:
    """In how many places not all ranks of the group have the same number."""
    together = torch.stack(gathered(x, group))
    return (together != together[0]).any(dim=0).sum().item()


def differing_copies(grad_gCD: torch.Tensor, groups: list[Group]) -> int:
    """In how many places the gradients of this rank's copies are not those of the other copies."""
    mine = key_value_heads(RANK, WORLD_SIZE)
    return sum(differing(grad, groups[head]) for grad, head in zip(grad_gCD, mine, strict=True))


# %% [markdown]
# What a rank holds of all keys and values, as they come out of the product. With three ranks the
# middle one has query heads of both groups, and both key-value heads; the row is rank 0's.


# %%
def check_held(whole: Attention, part: Part, device: torch.device) -> None:
    """Claim how much of a cache of keys and values a rank has."""
    h_TBD = torch.zeros(T, B, D, device=device, dtype=torch.float64)
    held = F.linear(h_TBD, part.kv.flatten(0, 1)).nbytes / whole.kv(h_TBD).nbytes
    claim("keys and values held / all", 1 / min(WORLD_SIZE, G), held, question=1, rank=0)


# %% [markdown]
# One step forward and backward in one process, and one on the ranks. The gradients of copies are
# looked at before they are added up and after. `ranks_needed` adds up the gradients of head 0 from
# rank 0 on, until they are the one process's.


# %%
def ranks_needed(grad_gCD: torch.Tensor, due_CD: torch.Tensor) -> int:
    """Over how many ranks the gradients of head 0 add up to `due_CD`; 0 if they never do."""
    mine = key_value_heads(RANK, WORLD_SIZE)
    grad_GCD = grad_gCD.new_zeros(G, 2 * K, D)
    grad_GCD[mine.start : mine.stop] = grad_gCD
    total_CD = torch.zeros_like(due_CD)
    for ranks, theirs_GCD in enumerate(gathered(grad_GCD), start=1):
        total_CD += theirs_GCD[0]
        if relative_error(total_CD, due_CD) < TOLERANCE:
            return ranks
    return 0


def step(block: nn.Module, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Run both passes; return the output and the gradient of x."""
    torch.manual_seed(1)
    x_TBD = torch.randn(T, B, D, device=device, dtype=torch.float64, requires_grad=True)
    y_TBD = block(x_TBD)
    y_TBD.backward(y_TBD.detach().sin())
    return y_TBD.detach(), x_TBD.grad


def check_step(whole: Attention, part: Part, groups: list[Group], device: torch.device) -> None:
    """Claim that the ranks compute what one process does, and what they add up for it."""
    due_TBD, due_x_TBD = step(whole, device)
    due_GCD = whole.kv.weight.grad.unflatten(0, (G, 2 * K))
    y_TBD, x_grad_TBD = step(part, device)
    claim("error of the output", 0, relative_error(y_TBD, due_TBD), atol=TOLERANCE)
    needed = ranks_needed(part.kv.grad, due_GCD[0])
    claim("ranks that a head's gradient comes from", math.ceil(WORLD_SIZE / G), needed, question=2)
    ratio = (x_grad_TBD * due_x_TBD).sum() / due_x_TBD.square().sum()
    claim("f's sum for x / gradient in one process", 1, ratio, atol=TOLERANCE, question=3)
    copied = part.kv.numel() if G % WORLD_SIZE else 0  # of this rank's weights
    before = differing_copies(part.kv.grad, groups)
    claim("copies before the sum: gradients that differ", copied, before)
    sum_copies(part.kv.grad, groups)
    after = differing_copies(part.kv.grad, groups)
    claim("copies after the sum: gradients that differ", 0, after)
    norm = differing(part.norm.weight.grad)
    claim("norm, without a sum: gradients that differ", 0, norm, question=4)

    mine = key_value_heads(RANK, WORLD_SIZE)
    errors = [
        relative_error(part.kv.grad, due_GCD[mine.start : mine.stop]),
        relative_error(part.norm.weight.grad, whole.norm.weight.grad),
        relative_error(part.q.grad, share(whole.q.weight.grad, 0)),
        relative_error(part.out.grad, share(whole.out.weight.grad, 1)),
    ]
    error = torch.tensor(errors, dtype=torch.float64).max()  # NaN if one is
    claim("error of the weights' gradients", 0, error, atol=TOLERANCE)


# %% [markdown]
# ## What you should have seen
#
# 1. A half: one of two key-value heads. Query heads go down to a quarter, keys and values do not:
#    from G ranks on more ranks do not make a cache smaller.
# 2. Two, those that hold the head. Left alone, the copies get different gradients in all 1,024
#    places, and drift apart in the first step. No error is raised, and the output before it is
#    right. A mean over the copies would be half of the gradient; a sum over all four ranks would
#    mix the gradients of two heads.
# 3. One. The keys are the same, but each rank's part of the gradient comes from its own query
#    heads, so nothing is counted twice.
# 4. In none. The norm's gradient follows from the one for h, and that one f has added up over all
#    ranks. Copied is not enough to need a sum: what counts is whether a rank has seen a part.
#
# A head's sum has 2 K D elements, here 1,024. It does not grow with the tokens, as what f and g add
# up does, and is needed once per step, not once per micro-batch.
#
# **Try.** Without the all-reduce in `sum_copies` two rows fail: the copies after the sum, and the
# weights' gradients. With keys and values from `h_TBD` three rows fail: f's sum for x, the norm,
# and the weights' gradients, by the norm's. The gradients of the keys' weights are right and equal;
# what is wrong goes to the layers *before* this one.
#
# **It has happened.** The second mistake was in BigCode's fork of Megatron-LM, with one key-value
# head for all. The copies stayed equal, and yet the validation loss after 5,000 steps was 3.74; it
# is 2.64 without the mistake, as on one rank (pull requests 36 and 37, 2023).
#
# **When to use it.** In training take no more ranks than key-value heads, a number that divides
# them: then there are no copies, and a rank's heads are a piece of the weight. Copies are for the
# rest. In inference more ranks than heads make products faster, and not the cache smaller.
# Qwen3-235B-A22B has 64 query heads, and 4 key-value heads of 128 in 94 layers: in bfloat16 192,512
# bytes per token. A quarter of it, 48 GB per million tokens, is on each GPU, on 4 of them and on 8.
# Past that, use the GPUs for other sequences (data-parallel attention) or for parts of one (context
# parallelism).
#
# **Which sizes.** n must divide the query heads. If it also divides the key-value heads, or is a
# multiple of them, all ranks hold equally many, and most systems ask for that. Llama 3 8B (32 and
# 8) takes 1, 2, 4, 8, 16 and 32. Qwen2 7B (28 and 4) takes 1, 2, 4 and 28, not 7 and not 8. Here
# three ranks work too: the middle one has 8 query heads of each group, and both key-value heads.
#
# **In other systems.** vLLM's `QKVParallelLinear` copies heads, as here; it does not train. With
# fewer key-value heads than ranks, Megatron-LM copies no weights. It cuts the fused weight of q, k
# and v evenly, even through a head, gathers the *activations*, and lets each rank take its heads.
# The gradient of that gather adds up what several ranks have for one head. Nothing is left to add
# up after the backward pass, but activations are sent once more in each layer.
#
# **Where else it bites.** A norm of all gradients, for clipping, counts each copy once. A training
# checkpoint holds each head once, so that it loads on another number of ranks.
#
# **On GPUs** a head's weight is small: 2 K D = 1.05 million elements in Qwen3-235B-A22B, where the
# four sums of a layer add up 67 million for 4,096 tokens. What costs is many small messages: put
# the copies' gradients of all layers into one.


# %%
def main() -> None:
    command_line()
    sizes = [ranks for ranks in range(1, H + 1) if H % ranks == 0]
    launch(sizes)
    if WORLD_SIZE not in sizes:
        rule = f"ranks must share {H} query heads evenly; got {WORLD_SIZE}"
        refuse(f"{rule}; set --nproc-per-node to 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48")
    device = setup()
    groups = [dist.new_group(holders(head, WORLD_SIZE)) for head in range(G)]  # on all ranks
    torch.manual_seed(0)  # the same weights on every rank
    whole = Attention(device=device, dtype=torch.float64)
    part = Part(whole)
    check_held(whole, part, device)
    check_step(whole, part, groups, device)
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
