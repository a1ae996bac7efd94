"""Random state in tensor parallelism: initial values and dropout
==============================================================

**Question.** Tensor parallelism gives each rank a part of some tensors and a copy of others. Their
initial values and their dropout masks are drawn at random. Which numbers must all ranks draw alike,
and which must each rank draw apart? No mistake raises an error.

**Predict**, and write it down before you run. Four ranks share an MLP of 384 hidden features.

1. Each rank draws the weights of its 96 features, and their dropout masks, from a generator. By
   mistake all ranks seed it alike. After ten steps of training, how many of the 384 features are
   distinct?
2. An **adapter**, a small layer in front of the MLP, is not split: each rank has a copy. By mistake
   each draws its copy from a seed of its own. After ten steps of plain SGD, how many times as far
   apart are two copies as they were at the start?
3. Each rank draws the dropout masks (p = 0.1) of its features from a seed of its own. In which
   share of places do the masks of two ranks agree?

**Run.**

    torchrun --standalone --nproc-per-node=4 22_tensor_parallel_random_state.py
    python 22_tensor_parallel_random_state.py     # the same, started for you

NCCL on 4 GPUs, else gloo. Not run on several GPUs.

**Try.** In `seed_generators` leave out `+ RANK`: what fails, and does the comparison with one
process notice? In `Part.forward` end with `dropout(y_TD, self.split)`: what fails now?

**Before.** parallelism/06_tensor_parallel.py: f and g, columns and rows.

**Next.** parallelism/25_grouped_query_heads.py: copies whose gradients must be added up.
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
import warnings
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor import empty as empty_dtensor

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# Shapes: T tokens, D model width, E hidden features of the whole MLP, e = E / n of one rank.
T, D, E = 256, 64, 384
DROPPED = 0.1  # the share that dropout drops
STD = 0.125  # of initial values: 1 / sqrt(D)

# %% [markdown]
# ## 1. Alike or apart: two generators
#
# Ask of every tensor whether it is **split** (each rank has a part of it) or **copied** (all ranks
# have the same). One rule follows for all that is drawn at random:
#
# - What is copied is drawn **alike** on all ranks, for it is one tensor.
# - What is split is drawn **apart** on each rank, for the parts are different pieces of one tensor.
#
# The MLP of this lesson, with its adapter in front, has both kinds:
#
#     x --> adapter --> f --> up --> GELU --> dropout --> down --> g --> dropout --> y
#     [     copied      ]     [             split            ]     [     copied      ]
#
#     drawn alike    adapter     the mask after g
#     drawn apart    up, down    the mask after GELU
#
# So a rank needs two generators of random numbers: torch's own, which all ranks seed alike, and one
# that each rank seeds with its number. The seeds are those of Megatron-LM, which has a third
# generator for experts (parallelism/11) besides, and gives each stage of a pipeline seeds of its
# own.
#
# f does nothing forward, and backward adds up the ranks' gradients. g adds up the ranks' outputs
# forward, and does nothing backward (06_tensor_parallel.py; their code stands at the end).


# %%
def seed_generators(seed: int, device: torch.device) -> torch.Generator:
    """Seed torch's own generator alike on all ranks; return one that is this rank's own."""
    torch.manual_seed(seed)  # draws what is copied
    return torch.Generator(device).manual_seed(seed + 2718 + RANK)  # draws what is split


def dropout(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Drop by the numbers of `generator`, or by those of torch's own."""
    kept = torch.empty_like(x).bernoulli_(1 - DROPPED, generator=generator)
    return x * kept / (1 - DROPPED)


class Part(nn.Module):
    """What one rank holds of adapter and MLP: (T, D) -> (T, D), the same on every rank."""

    def __init__(self, split: torch.Generator) -> None:
        super().__init__()
        factory = {"device": split.device, "dtype": torch.float64}
        self.split = split
        self.adapter = nn.Parameter(torch.empty(D, D, **factory))
        self.up = nn.Parameter(torch.empty(E // WORLD_SIZE, D, **factory))
        self.down = nn.Parameter(torch.empty(D, E // WORLD_SIZE, **factory))
        nn.init.normal_(self.adapter, std=STD)
        nn.init.normal_(self.up, std=STD, generator=split)
        nn.init.normal_(self.down, std=STD, generator=split)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = CopyToRanks.apply(F.linear(x_TD, self.adapter))  # f: backward a sum
        hidden_Te = dropout(F.gelu(F.linear(x_TD, self.up)), self.split)
        y_TD = ReduceFromRanks.apply(F.linear(hidden_Te, self.down))  # g: forward a sum
        return dropout(y_TD)


# %% [markdown]
# `F.dropout`, and the dropout inside a fused attention kernel, draw from torch's own generator and
# take no other. Megatron-LM therefore swaps *states*: inside `with get_cuda_rng_tracker().fork():`
# torch's own generator is in the state of the second one.

# %% [markdown]
# ## 2. How it is measured
#
# First the initial values. A part is drawn from three pairs of seeds and trained for ten steps:
#
#     torch's own    second generator
#     0              2718 + RANK          right
#     0              2718                 what is split is drawn alike   (question 1)
#     RANK           2718 + RANK          what is copied is drawn apart  (question 2)
#
# How many hidden features have weights of their own then, and are the copies of the adapter one?
# The seeds of the table hold while a part is drawn. For the steps after that, `trained` seeds
# torch's own generator alike in all three cases, so that masks after g are right in each.


# %%
def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `x`."""
    mine = x.detach().contiguous()
    everyone = [torch.empty_like(mine) for _ in range(WORLD_SIZE)]
    dist.all_gather(everyone, mine)
    return everyone


def alike_next_rank(x: torch.Tensor) -> float:
    """The share of places in which this rank has the same number as the next one."""
    return (gathered(x)[(RANK + 1) % WORLD_SIZE] == x).double().mean().item()


def distance_to_next(x: torch.Tensor) -> torch.Tensor:
    """How far `x` is from the next rank's."""
    return (gathered(x)[(RANK + 1) % WORLD_SIZE] - x.detach()).norm()


def batch(device: torch.device) -> torch.Tensor:
    """Inputs and targets, the same on every rank: (2, T, D)."""
    own = torch.Generator(device).manual_seed(1)  # torch's stays as the checks have seeded it
    return torch.randn(2, T, D, device=device, dtype=torch.float64, generator=own)


def trained(split: torch.Generator) -> tuple[Part, torch.Tensor]:
    """Draw a part and train it for ten steps; return it, and its adapter as it was drawn."""
    part = Part(split)
    start_DD = part.adapter.detach().clone()
    torch.manual_seed(1)  # masks after g are alike in all three cases
    x_TD, goal_TD = batch(split.device)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.005)
    for _ in range(10):
        optimizer.zero_grad()
        ((part(x_TD) - goal_TD).square().sum() / T).backward()
        optimizer.step()
    return part, start_DD


def distinct_features(part: Part) -> int:
    """How many of the E hidden features have weights of their own."""
    return len(torch.cat(gathered(part.up)).unique(dim=0))


def check_initial_values(device: torch.device) -> None:
    # The first row of the table:
    part, _ = trained(seed_generators(0, device))
    claim("two generators: distinct hidden features", E, distinct_features(part))
    claim("two generators: places alike in two adapters", 1, alike_next_rank(part.adapter))

    # The second row:
    torch.manual_seed(0)
    part, _ = trained(torch.Generator(device).manual_seed(2718))  # the mistake: no RANK
    distinct = distinct_features(part)
    claim("split drawn alike: distinct hidden features", E // WORLD_SIZE, distinct, question=1)

    # The third row: the second generator is as in the first, torch's own is seeded once more.
    split = seed_generators(0, device)
    torch.manual_seed(RANK)  # the mistake: a RANK
    part, start_DD = trained(split)
    before = distance_to_next(start_DD)
    moved = (part.adapter.detach() - start_DD).norm() / before
    print0(f"{'':13}ten steps move an adapter by {moved.item():.0%} of the distance between two")
    ratio = distance_to_next(part.adapter) / before
    claim("copied drawn apart: distance after / before", 1, ratio, atol=1e-12, question=2)


# %% [markdown]
# **Masks.** In a place two masks agree if both drop or both keep. Shares of N places may be five
# standard deviations off. Masks after g are compared by the outputs.


# %%
def masks(split: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """What `Part.forward` multiplies by: this rank's (T, e) after GELU, and (T, D) after g."""
    factory = {"device": split.device, "dtype": torch.float64}
    mask_Te = dropout(torch.ones(T, E // WORLD_SIZE, **factory), split)
    return mask_Te, dropout(torch.ones(T, D, **factory))


def check_masks(device: torch.device) -> None:
    split = seed_generators(0, device)
    part = Part(split)
    mask_Te, _ = masks(split)
    agree = DROPPED**2 + (1 - DROPPED) ** 2
    off = 5 * (agree * (1 - agree) / mask_Te.numel()) ** 0.5
    text = "split, drawn apart: places alike in two masks"
    claim(text, agree, alike_next_rank(mask_Te), atol=off, question=3)
    x_TD, _ = batch(device)
    claim("copied, drawn alike: places alike in outputs", 1, alike_next_rank(part(x_TD)))


# %% [markdown]
# **DTensor** knows what is split and what is copied. On GPUs one seed for all is right: for a split
# tensor each rank draws from an offset of its own. On a CPU mesh it only warns, and with one seed
# makes the mistake of question 1. There, draw the whole and hand it to `distribute_tensor`.


# %%
def check_dtensor(device: torch.device) -> None:
    """Claim that the parts of a split DTensor are drawn alike on CPUs, and not on GPUs."""
    mesh = dist.init_device_mesh(device.type, (WORLD_SIZE,))
    weight = empty_dtensor(E, D, device_mesh=mesh, placements=[Shard(0)])
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # that of CPUs
        nn.init.normal_(weight)
    expected = 1 if device.type == "cpu" else 0
    alike = alike_next_rank(weight.to_local())
    claim("DTensor, all seeded alike: places alike", expected, alike)


# %% [markdown]
# **One process.** Last the computation itself. The oracle takes the weights and the masks of all
# ranks, puts the parts together, and computes output and gradients alone, in float64. It cannot
# tell whether the numbers were *drawn* rightly. Errors are relative to the largest element; ten
# operations in a row each add up at most E terms, in another order.


# %%
TOLERANCE = 10 * E * 2**-53


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def check_one_process(device: torch.device) -> None:
    x_TD, grad_TD = batch(device)
    split = seed_generators(0, device)
    part = Part(split)
    state = split.get_state()
    torch.manual_seed(2)
    y_TD = part(x_TD)
    y_TD.backward(grad_TD)
    torch.manual_seed(2)
    mask_Te, mask_TD = masks(split.set_state(state))  # the masks of `forward` once more

    adapter_DD = part.adapter.detach().clone().requires_grad_()
    up_ED = torch.cat(gathered(part.up)).requires_grad_()
    down_DE = torch.cat(gathered(part.down), dim=1).requires_grad_()
    hidden_TE = F.gelu(F.linear(F.linear(x_TD, adapter_DD), up_ED))
    hidden_TE = hidden_TE * torch.cat(gathered(mask_Te), dim=1)
    due_TD = F.linear(hidden_TE, down_DE) * mask_TD
    due_TD.backward(grad_TD)
    error = relative_error(y_TD.detach(), due_TD.detach())
    claim("two generators: error of the output", 0, error, atol=TOLERANCE)
    errors = [
        relative_error(part.adapter.grad, adapter_DD.grad),
        relative_error(part.up.grad, up_ED.grad.chunk(WORLD_SIZE)[RANK]),
        relative_error(part.down.grad, down_DE.grad.chunk(WORLD_SIZE, dim=1)[RANK]),
    ]
    claim("two generators: error of the gradients", 0, max(errors), atol=TOLERANCE)


# %% [markdown]
# ## What you should have seen
#
# 1. 96. Every rank has the same weights, drops the same, computes the same features and gets the
#    same gradients: an MLP of 96 features, computed four times. (Other masks would have led to
#    other gradients, and to 384 features.) And its output is too large at the start: four equal
#    summands give four times one of them, four independent ones only about twice.
# 2. One. The sum in f makes the gradients equal, so all copies move by the same steps, and nothing
#    draws them together. Each rank's features learn behind an adapter of their own. That is no
#    longer a model with one adapter, and a checkpoint that keeps one copy loads another model.
# 3. 0.82: both drop in 0.1**2 of the places, and both keep in 0.9**2. Drawn alike, they would agree
#    everywhere: feature j of every rank dropped together, and 384 features with 96 masks.
#
# **Try.** Without `+ RANK` two rows fail: the distinct features of two generators, and the masks of
# split activations. The comparison with one process passes: the ranks compute rightly what they
# drew wrongly. With `dropout(y_TD, self.split)` three rows fail: output and gradients, for one
# process has one mask there; and the outputs of two ranks, which now agree in 0.82 of the places.
# From there on each rank computes with another x, and the next f and g add up what belongs to
# different inputs.
#
# **When to use it.** Two generators wherever something is drawn under tensor parallelism. Another
# number of ranks then draws other numbers. Where 2 and 8 ranks must start alike, let each rank draw
# the whole tensor and keep its part, layer by layer; Megatron-LM's `--use-cpu-initialization` does.
# A model without dropout, as most large ones today, draws nothing once it is loaded.
#
# **Where it bites.** Three places:
#
# - A rank that draws one number more than the others from torch's own generator, to print a sample
#   for example, has other copied masks from then on.
# - Initial values whose width depends on the layer's size see the size of the part. An
#   `nn.Linear(96, 64)` for a rank's part of `down` draws for 96 inputs, though the whole has 384:
#   sqrt(4) = 2 times too wide. Megatron Bridge drew LoRA's weights so (issue 5840, 2026).
# - Activation recomputation must draw the same masks again. `torch.utils.checkpoint` puts torch's
#   own generator back by itself, the second one only by a `context_fn` of yours.
#
# And sequence parallelism splits by tokens what is copied here: there the mask after g is drawn
# apart.
#
# **On GPUs** each GPU has a generator of torch's own, which `torch.manual_seed` seeds. A seed gives
# other numbers than on a CPU, and DTensor's row is 0. A CUDA graph must know the second generator
# (`register_generator_state`): otherwise the capture ends with an error.

# %% [markdown]
# f and g, as in 06_tensor_parallel.py, and what is run:


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


def main() -> None:
    command_line()
    sizes = [ranks for ranks in range(1, E + 1) if E % ranks == 0]
    launch(sizes)
    if WORLD_SIZE not in sizes:
        rule = f"ranks must share {E} hidden features evenly; got {WORLD_SIZE}"
        refuse(f"{rule}; set --nproc-per-node to 1, 2, 3, 4, 6, 8, 12, 16 or so")
    device = setup()
    if WORLD_SIZE == 1:
        blocked("what ranks draw alike, and what apart", needs="2 ranks")
    else:
        check_initial_values(device)
        check_masks(device)
        check_dtensor(device)
    check_one_process(device)
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
