"""FSDP2 in practice: what fully_shard does to memory, messages and values
======================================================================

**Question.** Which modules to shard, when to free them, in which dtype, over which mesh: what does
each choice of `fully_shard` cost in memory and messages, and does training stay the same?

**Predict.** A GPT of P parameters in L blocks on n ranks; one `fully_shard` for each block, one for
the rest. Write down for one step: how many all-gathers, how many reduce-scatters, how many numbers
each rank must send, and how many blocks are ever whole at once.

**Run.**

    torchrun --standalone --nproc-per-node=4 01_fsdp_basics.py   # NCCL, if there are 4 GPUs
    python 01_fsdp_basics.py                                     # the same; gloo if there are not

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 17 s) that with one unit for all the
model everything is whole at once after 1 all-gather; with a unit for each block, 37% after 9; with
one for each linear layer, 16% after 35; that every choice ends at the weights of one process, to
3e-14; that keeping what forward gathered saves 4 of 9 gathers for P numbers of memory; and a loss
that falls from 5.8 to 2.7 nats, below the entropy of single bytes, 3.1. Not run on several GPUs.

**Next.** fsdp/02_deepspeed_zero.py
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

WORLD_SIZES = range(2, 65)  # over one rank there is nothing to shard
FLAGS: dict[str, dict] = {
    "--data": {"metavar": "PATH", "help": "text to train on (default: Python's own sources)"},
    "--steps": {"metavar": "N", "type": int, "default": 40, "help": "training steps (40)"},
    "--figure": {"metavar": "PATH", "help": "save memory during a step, and the loss, as PNG"},
}

# Shapes: B sequences, T tokens each, D model width, V byte values; n ranks, rank r.


def main(options: argparse.Namespace) -> None:
    device = setup()
    mesh = init_device_mesh(device.type, (WORLD_SIZE,), mesh_dim_names=("shard",))
    parameters_become_shards(mesh)
    the_same_as_one_process(mesh)
    timelines = which_modules(mesh)
    when_to_free(mesh)
    losses = train(mesh, options)
    if options.figure and RANK == 0:
        draw(timelines, losses, options.figure)
    finish()


# %% [markdown]
# ## 1. A GPT, and what becomes of its parameters
#
# `fully_shard(module)` changes the module in place. Each parameter becomes a DTensor of which rank
# r holds the r-th of n chunks of rows; where rows do not divide by n, the last ranks hold fewer, or
# none. Call it on the parts, then on the whole. Every call makes a *unit*: the parameters that no
# inner call has taken. One message gathers a unit just before its `forward`, and again before its
# backward.


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


UNITS = {"model": (), "blocks": Block, "linears": nn.Linear}  # which modules are inner units


def gpt(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)  # the same on every rank
    return GPT().to(mesh.device_type, dtype)


def sharded(model: GPT, mesh: DeviceMesh, units: str = "blocks", **how: object) -> GPT:
    """Make each of the inner modules named by UNITS a unit, then one of all that is left."""
    for module in model.modules():
        if isinstance(module, UNITS[units]):
            fully_shard(module, mesh=mesh, **how)
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


def parameters_become_shards(mesh: DeviceMesh) -> None:
    whole, model = gpt(mesh), sharded(gpt(mesh), mesh)
    name, p = next(iter(model.named_parameters()))
    say(f"  {name}: {type(p).__name__} {tuple(p.shape)}, {p.placements}")
    due = sum(
        len(c[RANK]) * p[0].numel()
        for p in whole.parameters()
        if len(c := p.chunk(WORLD_SIZE)) > RANK
    )
    held = sum(p.to_local().numel() for p in model.parameters())
    everywhere = torch.tensor(held, device=mesh.device_type)
    dist.all_reduce(everywhere)
    claim("numbers this rank holds: chunk r of each tensor", due, held)
    claim("numbers all ranks hold together: P", numbers(whole), everywhere)


# %% [markdown]
# ## 2. The same as one process
#
# FSDP is data parallelism: each rank has its own part of the batch, gradients are averaged. So
# three AdamW steps must end at the weights that one process reaches on the whole batch. In float64
# the two differ only in the order of additions, about 1e-16 of each sum; Adam's division by sqrt(v)
# lets a small gradient keep that *relative* error, so 1e-11 of slack is generous, and any wrong
# average, lost row or stale gather is larger by many orders.


# %%
def gap_to(one: GPT, model: GPT) -> float:
    """Largest distance between any parameter of a whole and of a sharded model."""
    pairs = zip(one.parameters(), model.parameters(), strict=True)
    return max((p - q.full_tensor()).abs().max().item() for p, q in pairs)


def the_same_as_one_process(mesh: DeviceMesh, steps: int = 3) -> None:
    one, model = gpt(mesh, torch.float64), sharded(gpt(mesh, torch.float64), mesh)
    parts = torch.cat([batch(mesh, rank) for rank in range(WORLD_SIZE)])
    for model_, x_BT in (one, parts), (model, batch(mesh, RANK)):
        optimizer = torch.optim.AdamW(model_.parameters(), lr=1e-3)
        for _ in range(steps):
            model_(x_BT).backward()
            optimizer.step()
            optimizer.zero_grad()
    claim("weights after 3 steps, distance from one process", 0, gap_to(one, model), atol=1e-11)


# %% [markdown]
# ## 3. Which modules: memory against messages
#
# Small units keep little whole at a time and send many small messages; one unit for everything
# sends one large message and keeps all of it. A block a unit is the usual bargain. With U inner
# units: 2U + 1 all-gathers (the outermost unit is not freed after forward: it would be fetched
# again at once), U + 1 reduce-scatters. A gather or a reduce-scatter of N numbers makes each rank
# send (n-1)/n of N. `Wire` sees each collective as torch hands it to the backend, and looks, at
# every single operation, at how many numbers the model holds whole (what arrives but is not yet
# used apart).


# %%
class Wire(TorchDispatchMode):
    """Records collectives as (kind, numbers sent, bytes sent, group) and what is whole when."""

    WHOLE: ClassVar = {
        "_allgather_base_": (0, 1),
        "_reduce_scatter_base_": (1, 1),
        "allreduce_": (0, 2),
    }

    def __init__(self, model: GPT | None = None) -> None:
        super().__init__()
        self.model, self.log, self.whole = model, [], []

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
        if self.model is not None:
            self.whole.append(
                sum(p.numel() for p in self.model.parameters() if type(p) is not DTensor)
            )
        return function(*args, **(kwargs or {}))

    def total(self, kind: str = "", group: str = "") -> tuple[int, int, int]:
        """(messages, numbers sent, bytes sent) of one kind, over one group; '' is any."""
        rows = [r for r in self.log if kind in ("", r[0]) and group in ("", r[3])]
        return len(rows), sum(r[1] for r in rows), sum(r[2] for r in rows)


def which_modules(mesh: DeviceMesh) -> dict[str, list[int]]:
    """Return, for each choice of units, the numbers held whole at every operation of a step."""
    timelines, n = {}, WORLD_SIZE
    for units in UNITS:
        whole = gpt(mesh)
        inner = [m for m in whole.modules() if isinstance(m, UNITS[units])]
        model = sharded(gpt(mesh), mesh, units)
        with Wire(model) as wire:
            model(batch(mesh, RANK)).backward()
        U, P, P_inner = len(inner), numbers(whole, n), sum(numbers(m, n) for m in inner)
        due = (2 * P_inner + (P - P_inner) + P) * (n - 1) // n
        claim(f"{units}: all-gathers, 2U + 1", 2 * U + 1, wire.total("_allgather_base_")[0])
        claim(f"{units}: reduce-scatters, U + 1", U + 1, wire.total("_reduce_scatter_base_")[0])
        claim(f"{units}: numbers sent", due, wire.total()[1])
        largest = max(map(numbers, inner), default=0)
        rest = numbers(whole) - sum(map(numbers, inner))
        claim(f"{units}: most ever whole, the rest + one unit", rest + largest, max(wire.whole))
        timelines[units] = wire.whole
    return timelines


# %% [markdown]
# ## 4. When to free, and FSDP1's words for it
#
# `reshard_after_forward=False` keeps what forward gathered until backward has used it: U fewer
# gathers for P numbers of memory. In FSDP1 and in older papers these were *strategies*:
#
# | FSDP1 | FSDP2 | ZeRO |
# |---|---|---|
# | FULL_SHARD | the default | stage 3 |
# | SHARD_GRAD_OP | `reshard_after_forward=False` | stage 2, with sharded parameters |
# | HYBRID_SHARD | a 2D mesh (fsdp/03_fsdp_refinements.py) | stage 3 in each group |
# | NO_SHARD | DDP | stage 0 |
# | `transformer_auto_wrap_policy` | `fully_shard` on each block, in a loop you write | |
# | `size_based_auto_wrap_policy` | the same loop, asking for the number of parameters | |


# %%
def when_to_free(mesh: DeviceMesh) -> None:
    U = len(gpt(mesh).blocks)
    for free in True, False:
        model = sharded(gpt(mesh), mesh, reshard_after_forward=free)
        with Wire(model) as wire:
            loss = model(batch(mesh, RANK))
            left = wire.whole[-1]
            loss.backward()
        gathers = wire.total("_allgather_base_")[0]
        # Said to the outermost unit too, True frees it after forward: one gather more than 2U + 1.
        claim(f"reshard_after_forward={free}: all-gathers", (U + 1) * (1 + free), gathers)
        due = 0 if free else numbers(gpt(mesh))
        claim(f"reshard_after_forward={free}: whole after forward", due, left)


# %% [markdown]
# ## 5. It learns
#
# Bytes of real text, by default Python's own sources. A model that knows nothing pays ln 256 = 5.55
# nats a byte; one that knows only how often each byte occurs, the entropy of the text, computed
# here. Below that it must have learned from context.


# %%
def text(path: str | None) -> Tensor:
    """Bytes (N,) of the file at `path`, or of about a million bytes of the standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    raw = b"".join(Path(p).read_bytes() for p in ([path] if path else sources))
    return torch.frombuffer(bytearray(raw[:2_000_000]), dtype=torch.uint8).long()


def train(mesh: DeviceMesh, options: argparse.Namespace, B: int = 8) -> list[float]:
    """Return the loss of each step, averaged over the ranks."""
    corpus, model = text(options.data), sharded(gpt(mesh), mesh)
    share = corpus.bincount(minlength=256) / len(corpus)
    entropy = -(share * share.clamp(min=1e-9).log()).sum().item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(RANK), []
    for _ in tqdm(
        range(options.steps), "training", leave=False, disable=None if RANK == 0 else True
    ):
        starts = torch.randint(len(corpus) - 65, (B,), generator=generator)
        x_BT = torch.stack([corpus[i : i + 65] for i in starts]).to(mesh.device_type)
        loss = model(x_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / WORLD_SIZE
        dist.all_reduce(mean)
        losses.append(mean.item())
    say(f"  bytes {len(corpus):,}; loss {losses[0]:.2f} to {losses[-1]:.2f} nats")
    claim("mean of the last 10 losses, against the entropy", entropy, sum(losses[-10:]) / 10, "<=")
    return losses


def draw(timelines: dict[str, list[int]], losses: list[float], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for units, whole in timelines.items():
        share = [100 * w / max(timelines["model"]) for w in whole]
        progress = [i / len(whole) for i in range(len(whole))]
        left.step(progress, share, label=f"a unit: {units.removesuffix('s')}")
    left.set(xlabel="operations of one step, from first to last", ylabel="% of P held whole")
    left.set_title("What is whole when (forward, then backward)")
    right.plot(losses)
    right.set(xlabel="step", ylabel="loss, nats a byte", title=f"Training on {WORLD_SIZE} ranks")
    left.legend()
    figure.savefig(path, dpi=150)


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
