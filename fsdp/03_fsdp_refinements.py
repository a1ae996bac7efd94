"""FSDP2 refined: prefetch, dtypes, accumulation, meta device, hybrid sharding
===========================================================================

**Question.** Which settings of FSDP2 change what is sent, which change when, and which change only
what is kept, and do the gradients stay those of one process?

**Predict.** Before you run this, write down: with `param_dtype=bfloat16`, how many bytes travel for
one parameter in a step? With three micro-batches and gradients synchronised once, how many
all-gathers remain? With 2 groups of 2 ranks, how many numbers cross between the groups?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_fsdp_refinements.py   # NCCL, if there are 4 GPUs
    python 03_fsdp_refinements.py                                     # the same; else gloo

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 10 s) that prefetch changes only the
order of messages; that bfloat16 halves what is gathered and leaves masters and sums in float32;
that 3 micro-batches cost 27 all-gathers but only 5 reduce-scatters; that a weight drawn under one
seed after `to_empty` is one shard four times over; and that over 2 x 2 ranks only P/2 numbers cross
between the groups. Every gradient is one process's, to 1e-16. Not run on several GPUs.

**Next.** exercises/09_hybrid_sharding; then profiling/01_distributed_profiling.py
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from typing import ClassVar, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

WORLD_SIZES = range(2, 65)  # over one rank there is nothing to shard
FLAGS: dict[str, dict] = {}

# Shapes: B sequences, T tokens each, D model width, V byte values; n ranks, rank r.


def main(options: argparse.Namespace) -> None:
    device = setup()
    mesh = init_device_mesh(device.type, (WORLD_SIZE,), mesh_dim_names=("shard",))
    what_is_fetched_ahead(mesh)
    which_dtype(mesh)
    accumulate_and_clip(mesh)
    born_on_meta(mesh)
    two_axes(device)
    finish()


# %% [markdown]
# ## 1. The model of fsdp/01_fsdp_basics.py, and a tap on the wire
#
# A small GPT, one unit for each block and one for the rest. `Wire` sees each collective as torch
# hands it to the backend, whatever the backend then does: for N numbers an all-gather or a
# reduce-scatter makes each of n ranks send (n-1)/n of N, an all-reduce twice that.


# %%
class Block(nn.Module):
    def __init__(self, D: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, D / heads)
        y_BTD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(y_BTD)
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class GPT(nn.Module):
    def __init__(self, L: int = 4, D: int = 64, T: int = 64, V: int = 256) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block(D, heads=4) for _ in range(L))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Mean loss of predicting each byte from those before it; `x_BT` holds T + 1 of them."""
        h_BTD = self.token(x_BT[:, :-1]) + self.position.weight
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return F.cross_entropy(self.head(self.norm(h_BTD)).flatten(0, 1), x_BT[:, 1:].flatten())


def gpt(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)  # the same on every rank
    return GPT().to(mesh.device_type, dtype)


def sharded(model: GPT, mesh: DeviceMesh, **how: object) -> GPT:
    """Make each block a unit, then one of all that is left."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def batch(mesh: DeviceMesh, rank: int, B: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (B, 65), generator=generator).to(mesh.device_type)


def gathered(rows: int, n: int) -> int:
    """Rows that travel when n ranks gather so many: all ranks send as much as the fullest."""
    return -(-rows // n) * n


def numbers(model: nn.Module, n: int = 1) -> int:
    """Numbers that travel when n ranks gather every parameter once (n = 1: how many there are)."""
    return sum(gathered(p.shape[0], n) * p[0].numel() for p in model.parameters())


def gap_to(one: GPT, model: GPT) -> float:
    """Largest distance between any parameter of a whole and of a sharded model."""
    pairs = zip(one.parameters(), model.parameters(), strict=True)
    return max((p - q.full_tensor()).abs().max().item() for p, q in pairs)


class Wire(TorchDispatchMode):
    """Records each collective as (kind, numbers sent, bytes sent, group)."""

    WHOLE: ClassVar = {
        "_allgather_base_": (0, 1),
        "_reduce_scatter_base_": (1, 1),
        "allreduce_": (0, 2),
    }

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int, int, str]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> object:
        kind = function._schema.name.removeprefix("c10d::")
        if kind in self.WHOLE:
            where, times = self.WHOLE[kind]
            x = args[where][0] if kind == "allreduce_" else args[where]
            group = dist.ProcessGroup.unbox(
                next(a for a in args if isinstance(a, torch.ScriptObject))
            )
            sent = times * x.numel() * (group.size() - 1) // group.size()
            self.log.append((kind, sent, sent * x.itemsize, group.group_name))
        return function(*args, **(kwargs or {}))

    def total(self, kind: str = "", group: str = "") -> tuple[int, int, int]:
        """(messages, numbers sent, bytes sent) of one kind, over one group; '' is any."""
        rows = [r for r in self.log if kind in ("", r[0]) and group in ("", r[3])]
        return len(rows), sum(r[1] for r in rows), sum(r[2] for r in rows)


# %% [markdown]
# ## 2. What is fetched ahead
#
# Communication hides behind compute only if it is under way before its result is needed. In
# backward FSDP2 asks for the next unit before the present one reduces its gradients. In forward the
# CPU runs ahead of a GPU anyway; `set_modules_to_forward_prefetch` moves a gather ahead of the
# *launch* of the block before. Order of events, not time: on gloo every gather is waited for on the
# spot.


# %%
def what_is_fetched_ahead(mesh: DeviceMesh) -> None:
    for ahead in False, True:
        model, started = sharded(gpt(mesh), mesh), []
        for block, following in zip(model.blocks, model.blocks[1:], strict=False):
            if ahead:
                block.set_modules_to_forward_prefetch([following])
        with Wire() as wire:
            for block in model.blocks:
                block.register_forward_pre_hook(lambda *_, s=started: s.append(len(wire.log)))
            loss = model(batch(mesh, RANK))
            forward = len(wire.log)
            loss.backward()
        named = "with" if ahead else "without"
        claim(f"{named} prefetch: blocks asked for as block 0 starts", 1 + ahead, started[0] - 1)
        backward = [kind for kind, *_ in wire.log[forward:]]
        first = backward.index("_reduce_scatter_base_")
        claim(f"{named} prefetch: asked for before a gradient leaves", 2, first)


# %% [markdown]
# ## 3. Which dtype
#
# `MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)` gathers in 2 bytes, computes in
# bfloat16, sums gradients in 4 bytes, and keeps the shard that the optimizer updates in float32.
# The masters exist as shards only: that is why FSDP's mixed precision costs less than DDP's.


# %%
def which_dtype(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, seen = sharded(gpt(mesh), mesh, mp_policy=policy), []
    model.head.register_forward_pre_hook(lambda _, x: seen.append(x[0].itemsize))
    with Wire() as wire:
        model(batch(mesh, RANK)).backward()
    if WORLD_SIZE > 1:
        for kind, size in ("_allgather_base_", 2), ("_reduce_scatter_base_", 4):
            _, count, size_sent = wire.total(kind)
            claim(f"{kind.strip('_')}: bytes a number", size, size_sent / count)
    claim("bytes of an activation", 2, seen[0])
    claim("bytes of a master weight", 4, max(p.to_local().itemsize for p in model.parameters()))


# %% [markdown]
# ## 4. Accumulating and clipping
#
# `set_requires_gradient_sync(False)` keeps whole, unreduced gradients on every rank (memory!) and
# saves their reduce-scatters; parameters are still gathered for every micro-batch.
# `clip_grad_norm_` returns a DTensor; its `.full_tensor()` is the norm over all ranks. A norm of
# one rank's own shards is not, and clipping by it would scale every shard by another factor.


# %%
def accumulate_and_clip(mesh: DeviceMesh, micro: int = 3) -> None:
    one, model = gpt(mesh, torch.float64), sharded(gpt(mesh, torch.float64), mesh)
    everyone = [batch(mesh, rank, 2 * micro) for rank in range(WORLD_SIZE)]
    one(torch.cat(everyone)).backward()
    with Wire() as wire:
        for i, x_BT in enumerate(everyone[RANK].chunk(micro)):
            model.set_requires_gradient_sync(i == micro - 1)
            (model(x_BT) / micro).backward()
    U = len(model.blocks)
    scatters, gathers = (wire.total(k)[0] for k in ("_reduce_scatter_base_", "_allgather_base_"))
    claim(f"{micro} micro-batches: reduce-scatters", U + 1, scatters)
    claim(f"{micro} micro-batches: all-gathers", micro * (2 * U + 1), gathers)
    whole, parts = (nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (one, model))
    claim("norm before clipping, of one process's", 1, parts.full_tensor() / whole, rtol=1e-12)
    pairs = zip(one.parameters(), model.parameters(), strict=True)
    far = max((p.grad - q.grad.full_tensor()).abs().max().item() for p, q in pairs)
    claim("clipped gradients, distance from one process", 0, far, atol=1e-14)


# %% [markdown]
# ## 5. Born on the meta device
#
# A model too large for one rank cannot be built and then cut. Built on `meta` it has shapes and no
# memory; `fully_shard` cuts the shapes, `to_empty` allocates the shards, and then something must
# fill them. The trap: on CPU, `reset_parameters()` under one seed draws the same numbers on every
# rank, so the "whole" weight is one shard n times over, with only a warning. A full state dict,
# read by rank 0 alone and sent piece by piece, has no such problem.


# %%
def born_on_meta(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = sharded(GPT(), mesh)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(0)
    up = model.blocks[0].up
    with warnings.catch_warnings(action="ignore"):  # torch warns of just this
        nn.init.normal_(up.weight)
    shards = up.weight.full_tensor().chunk(WORLD_SIZE)  # the last may be shorter
    alike = sum(shard.equal(shards[0][: len(shard)]) for shard in shards)
    if mesh.device_type == "cpu":
        claim("the trap: shards that equal rank 0's", WORLD_SIZE, alike)
    full = gpt(mesh).state_dict() if RANK == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    claim("the cure: distance from rank 0's weights", 0, gap_to(gpt(mesh), model))


# %% [markdown]
# ## 6. Two axes: hybrid sharding
#
# On several nodes, gathers over the slow network hurt most. HSDP shards inside a group of s ranks
# (a node) and replicates over r groups: gathers and reduce-scatters stay inside, and over the
# network goes one all-reduce of a gradient *shard*: 2(r-1)/r of P/s numbers, s times fewer than
# DDP.


# %%
def two_axes(device: torch.device) -> None:
    r = 2 if WORLD_SIZE % 2 == 0 else 1
    s = WORLD_SIZE // r
    mesh = init_device_mesh(device.type, (r, s), mesh_dim_names=("replicate", "shard"))
    one, model = gpt(mesh, torch.float64), sharded(gpt(mesh, torch.float64), mesh)
    with Wire() as wire:
        model(batch(mesh, RANK)).backward()
    P, P_blocks = numbers(one, s), numbers(one.blocks, s)
    inside, across = (mesh.get_group(axis).group_name for axis in ("shard", "replicate"))
    due = (2 * P + P_blocks) * (s - 1) // s
    claim(f"inside {s} ranks: numbers sent", due, wire.total(group=inside)[1] if s > 1 else 0)
    if r > 1:
        claim(
            f"across {r} groups: numbers sent",
            2 * (P // s) * (r - 1) // r,
            wire.total(group=across)[1],
        )
    one(torch.cat([batch(mesh, rank) for rank in range(WORLD_SIZE)])).backward()
    pairs = zip(one.parameters(), model.parameters(), strict=True)
    far = max((p.grad - q.grad.full_tensor()).abs().max().item() for p, q in pairs)
    claim("gradients, distance from one process", 0, far, atol=1e-14)


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
