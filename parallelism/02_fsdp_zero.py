"""ZeRO by hand, stage 1: sixteen bytes a parameter, and an optimizer that holds 1/n of its state
==============================================================================================

**Question.** Why does a model of 7B parameters, 14 GB of bfloat16, not train on a GPU of 80 GB, and
what do n ranks save when each keeps only the n-th part of the optimizer?

**Predict.** Mixed precision, Adam, four ranks. With data parallelism, and with ZeRO-1: how many
bytes a parameter does a rank hold when backward has ended, and how many numbers a parameter must
it send in a step?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_fsdp_zero.py   # NCCL, if there are 4 GPUs
    python 02_fsdp_zero.py                                     # the same; else gloo

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 7 s) that data parallelism holds 16
bytes a parameter, so 7B need 112 GB on every rank, in bfloat16 as in float32. ZeRO-1 holds 7 and
10: 4 + 12/n and 8 + 8/n. Both send 1.5 numbers a parameter, 2(n-1)/n, for an all-reduce is a
reduce-scatter and an all-gather. Weights and the gradient's norm follow one process to 1e-8, as
torch's DDP does. The paper's Table 1 comes out in all 54 cells. tests/test_fsdp_zero.py trains
odder modules: tied, frozen, unused parameters, mixed dtypes. Not run on several GPUs.

**Next.** exercises/08_zero1; then parallelism/03_fsdp_zero3.py cuts up gradients, then
parameters: stages 2 and 3, FSDP.
"""

import argparse
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORLD_SIZES = range(1, 65)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {"--figure": {"metavar": "PATH", "help": "draw memory against n here"}}


def main(options: argparse.Namespace) -> None:
    device = setup()
    the_papers_table()
    x_RBD = torch.randn(WORLD_SIZE, 8, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)
    alone, ddp = plainly(x_RBD), plainly(x_RBD[RANK], nn.parallel.DistributedDataParallel)
    gc.freeze()  # what there is already need not be searched for tensors
    claim("torch's DDP: distance from one process", 0, gap(ddp, alone), atol=SLACK)
    held = {(s, low): by_hand(s, low, x_RBD, alone) for s in (0, 1) for low in LAYOUT}
    claim("GB on each rank for 7B parameters", 112, 7 * held[0, torch.bfloat16], rtol=1e-3)
    if options.figure and RANK == 0:
        draw(held, options.figure)
    gc.unfreeze()
    finish()


# %% [markdown]
# ## 1. Sixteen bytes a parameter
#
# Mixed precision computes in bfloat16 and accumulates in float32. A parameter is a weight (2 bytes)
# and a gradient (2) to compute with and, for Adam, a float32 master of the weight (4), a momentum
# (4) and a variance (4): 16, and under data parallelism n ranks hold all of it n times. ZeRO
# (Rajbhandari et al., 2019) cuts into n shards: in stage 1 the optimizer's 12 bytes, in stage 2 the
# gradient too, in stage 3 the weight as well. In plain float32 the master *is* the weight: 4 + 4 +
# 8, sixteen again, differently cut.

# %%
LAYOUT = {torch.bfloat16: (2, 2, 12), torch.float32: (4, 4, 8)}  # weight, gradient, optimizer
TABLE_1 = """\
1    120  120  120  2048 2048 2048 16000 16000 16000
4    52.5 41.3 30   896  704  512  7000  5500  4000
16   35.6 21.6 7.5  608  368  128  4750  2875  1000
64   31.4 16.6 1.88 536  284  32   4187  2218  250
256  30.4 15.4 0.47 518  263  8    4046  2054  62.5
1024 30.1 15.1 0.12 513  257  2    4011  2013  15.6"""  # n; GB in stages 1 2 3 of 7.5B, 128B, 1T


def parts(stage: int, n: int, P: float, layout: torch.dtype = torch.bfloat16) -> list[float]:
    """Bytes a rank holds for P parameters: of weights, of gradients, of the optimizer."""
    cut = stage >= 3, stage >= 2, stage >= 1
    return [P * size / n if c else P * size for size, c in zip(LAYOUT[layout], cut, strict=True)]


def the_papers_table() -> None:
    right = 0
    for n, *cells in map(str.split, TABLE_1.splitlines()):
        for i, printed in enumerate(cells):
            gigabytes = sum(parts(i % 3 + 1, int(n), P=(7.5, 128, 1000)[i // 3]))
            unit = 10.0 ** -len(printed.partition(".")[2])  # some are rounded, some truncated
            right += abs(gigabytes - float(printed)) < unit
    claim("cells of the ZeRO paper's Table 1 within one unit", 54, right)


# %% [markdown]
# ## 2. Stages 0 and 1: shard the optimizer
#
# Parameters of any shape are cut evenly once they lie end to end in a flat bucket with some zeros
# for padding. The module's parameters become views of it. The optimizer gets one flat tensor a
# bucket and never knows: SGD, Adam, AdamW treat every number by itself. (Muon and Adafactor look at
# whole matrices: `ZeroRedundancyOptimizer` deals out whole parameters.)
#
# An all-reduce is a reduce-scatter, then an all-gather. Stage 1 puts the optimizer between the two
# halves: a rank receives the gradient of its own shard only and updates that, and what is gathered
# is new weights. Both halves work in place, a shard being a view of its bucket.


# %%
class Bucket:
    """Parameters of one dtype laid end to end: N numbers with the padding, in shards of K.

    full_N      weights in the dtype that computes; the module's parameters are views of it
    shard_K     this rank's shard, a view of full_N
    master_K    the shard the optimizer updates: shard_K, or if that is of lower precision a copy
    buffer_N    this rank's gradients / n       gradient_K  its shard of their sum over ranks
    missing     parameters that have no gradient in the buffer
    """

    def __init__(self, ps: list[nn.Parameter], shards: int, mine: int, compute: torch.dtype):
        ends = accumulate(p.numel() for p in ps)
        self.place = {p: slice(end - p.numel(), end) for p, end in zip(ps, ends, strict=True)}
        whole = torch.cat([p.detach().flatten() for p in ps])
        whole_N = F.pad(whole, (0, -len(whole) % shards))
        self.full_N = whole_N.to(compute)
        for p in ps:
            p.data = self.view(p, self.full_N)
        self.shard_K = self.full_N.view(shards, -1)[mine]
        low = compute != whole.dtype
        master_K = whole_N.view(shards, -1)[mine].clone() if low else self.shard_K
        self.master_K = nn.Parameter(master_K)
        self.buffer_N, self.missing = torch.zeros_like(self.full_N), set(ps)
        self.gradient_K = self.buffer_N.view(shards, -1)[mine]

    def view(self, p: nn.Parameter, flat_N: torch.Tensor) -> torch.Tensor:
        return flat_N[self.place[p]].view(p.shape)


class ZeRO1:
    """A sharded optimizer. Call the module, `backward` once or more, then `step`.

    `optimizer` builds any elementwise torch optimizer. With `compute` the module is of that dtype
    and wants inputs of it; masters keep their precision. The gradient is clipped to norm `clip`;
    an unused parameter's is zero. `sharded=False` is stage 0: one shard, which every rank owns.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        compute: torch.dtype | None = None,
        clip: float | None = None,
        numel: int = 1 << 22,  # numbers in a bucket, about
        sharded: bool = True,
    ) -> None:
        self.module, self.clip, self.n = module, clip, dist.get_world_size()
        self.group = None if sharded else dist.new_subgroups(1)[0]  # those who share out a bucket
        shards, mine = dist.get_world_size(self.group), dist.get_rank(self.group)
        groups, seen = {}, Counter()
        for t in (*module.parameters(), *module.buffers()):
            dist.broadcast(t.data, 0)  # at the start; later each rank has its own buffers
            if t.requires_grad:
                groups.setdefault((t.dtype, seen[t.dtype] // numel), []).append(t)
                seen[t.dtype] += t.numel()
        self.buckets = []
        for (dtype, _), ps in groups.items():
            self.buckets.append(b := Bucket(ps, shards, mine, compute or dtype))
            for p in ps:
                p.register_post_accumulate_grad_hook(partial(self.arrived, b))
        module.to(compute)  # frozen parameters and buffers too
        self.optimizer = optimizer([b.master_K for b in self.buckets])

    def arrived(self, b: Bucket, p: nn.Parameter) -> None:
        """p.grad is complete. (A hook of this kind is handed p, not its gradient.)"""
        if p in b.missing:
            torch.mul(p.grad, 1 / self.n, out=b.view(p, b.buffer_N))
        else:
            b.view(p, b.buffer_N).add_(p.grad, alpha=1 / self.n)
        b.missing.discard(p)
        p.grad = None

    def reduce(self, b: Bucket) -> dist.Work:
        for p in b.missing:
            b.view(p, b.buffer_N).zero_()
        b.missing = set(b.place)
        if len(b.shard_K) == len(b.full_N):
            return dist.all_reduce(b.buffer_N, async_op=True)
        return dist.reduce_scatter_tensor(b.gradient_K, b.buffer_N, async_op=True)

    def gather(self, full_N: torch.Tensor, shard_K: torch.Tensor) -> dist.Work:
        return dist.all_gather_into_tensor(full_N, shard_K, group=self.group, async_op=True)

    @torch.no_grad()
    def step(self) -> torch.Tensor | None:
        """Reduce, average, clip, update this rank's shards, gather; return the norm if clipping."""
        reducing, gathering, norm = {b: self.reduce(b) for b in self.buckets}, [], None
        if self.clip is not None:  # a number is counted by its owner, padding is zero
            for work in reducing.values():
                work.wait()
            squares = [b.gradient_K.to(b.master_K.dtype).square().sum() for b in self.buckets]
            dist.all_reduce(square := torch.stack(squares).sum(), group=self.group)
            norm = square.sqrt()
        for b, work in reducing.items():
            work.wait()
            b.master_K.grad = b.gradient_K.to(b.master_K.dtype)
            if norm is not None:
                b.master_K.grad.mul_((self.clip / (norm + 1e-6)).clamp(max=1))
            self.optimizer.step()  # passes over masters without a gradient: all but this one
            b.master_K.grad = None
            if b.master_K.dtype != b.shard_K.dtype:
                b.shard_K.copy_(b.master_K)
            gathering.append(self.gather(b.full_N, b.shard_K))  # while the next one is updated
        for work in gathering:
            work.wait()
        return norm

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The bare module's, in the masters' precision, on every rank."""
        whole = {}
        for b in self.buckets:
            full_N = torch.empty_like(b.full_N, dtype=b.master_K.dtype)
            self.gather(full_N, b.master_K.detach()).wait()
            whole |= {p: b.view(p, full_N) for p in b.place}
        state = self.module.state_dict(keep_vars=True)
        return {name: whole.get(t, t).detach() for name, t in state.items()}


# %% [markdown]
# ## 3. One run: weights, bytes, numbers
#
# Three steps of two micro-batches on ranks seeded differently, against one process: the order of
# some 100 additions in a gradient differs, and Adam's slope lr / eps is 1. Bytes: every tensor that
# Python can reach is asked for its storage, between backward and step. Numbers: counted at the
# collectives, from the tensors handed to them; of N a rank must send (n-1)/n N in a reduce-scatter,
# as many in an all-gather, twice that in an all-reduce.

# %%
WIDTH, STEPS, LR, EPS, CLIP = 420, 3, 0.01, 0.01, 0.1
SLACK = STEPS * 100 * 2**-24
ADAM = partial(torch.optim.Adam, lr=LR, eps=EPS)
PASSES = {"reduce_scatter_tensor": 1, "all_gather_into_tensor": 1, "all_reduce": 2}


def network(seed: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(seed)
    wide = partial(nn.Linear, bias=False)  # 840 divides the 420 * 240 numbers: 8 ranks, no padding
    blocks = [nn.Sequential(wide(WIDTH, 120), nn.ReLU(), wide(120, WIDTH)) for _ in range(4)]
    return nn.Sequential(*blocks).to(device)


def plainly(x_BD: torch.Tensor, wrap: Callable = nn.Sequential) -> dict[str, torch.Tensor]:
    model = network(0, x_BD.device)
    optimizer, wrapped = ADAM(model.parameters()), wrap(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (wrapped(x_BD) - x_BD).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model.state_dict() | {"norm": norm}


def gap(state: dict[str, torch.Tensor], due: dict[str, torch.Tensor]) -> float:
    return max((state[name] - due[name]).abs().max().item() for name in due)


def live_storages() -> dict[int, torch.UntypedStorage]:
    """By address. Adam's counters of steps, scalars, are left out."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors if t.dim()) if s.size()}


def by_hand(stage: int, layout: torch.dtype, x_RBD: torch.Tensor, alone: dict) -> float:
    """Bytes held for each parameter."""
    x_BD, before, moved = x_RBD[RANK].to(layout), live_storages(), Counter()
    model, n = network(RANK, x_BD.device), WORLD_SIZE
    P = sum(p.numel() for p in model.parameters())
    zero = ZeRO1(model, ADAM, layout, CLIP, numel=P // 4, sharded=stage == 1)

    def watched(name: str, call: Callable, *tensors: torch.Tensor, **options) -> dist.Work:
        n, big = dist.get_world_size(options.get("group")), max(tensors, key=torch.Tensor.numel)
        if big.dim():  # not for the norm
            times = PASSES[name] * (n - 1)
            moved.update(numbers=times * big.numel() / n, bytes=times * big.nbytes / n)
        return call(*tensors, **options)

    spies = {name: partial(watched, name, getattr(dist, name)) for name in PASSES}
    for _ in range(STEPS):
        moved.clear()
        with mock.patch.multiple(dist, **spies):
            for half_BD in x_BD.chunk(2):
                ((model(half_BD) - half_BD).square().mean() / 2).backward()
            held = sum(s.size() for at, s in live_storages().items() if at not in before)
            norm = zero.step()
    what = f"stage {stage}, {str(layout).removeprefix('torch.')}: "
    due, pad = 2 * P * (n - 1) / n, 0 if 840 % n == 0 else 4 * n  # numbers in 4 buckets
    claim(f"{what}bytes held", sum(parts(stage, n, P, layout)), held, atol=16 * pad)
    claim(f"{what}numbers sent", due, moved["numbers"], atol=2 * pad)
    claim(f"{what}bytes sent", due * layout.itemsize, moved["bytes"], atol=8 * pad)
    if layout == torch.float32:
        far = gap(zero.full_state_dict() | {"norm": norm}, alone)
        claim(f"{what}distance from one process", 0, far, atol=SLACK)
    return held / P


# %%
def draw(held: dict[tuple[int, torch.dtype], float], path: str) -> None:
    """GB for 7B parameters against the number of ranks, a panel a stage."""
    from matplotlib import pyplot

    ns = [1, 2, 4, 8, 16, 32, 64]
    figure, panels = pyplot.subplots(1, 4, figsize=(12, 3.5), sharey=True, layout="constrained")
    for stage, axes in enumerate(panels):
        heights = torch.tensor([parts(stage, n, P=7) for n in ns]).T
        axes.stackplot(range(len(ns)), heights, labels=["weights", "gradients", "optimizer"])
        if stage < 2 and WORLD_SIZE in ns:
            measured = 7 * held[stage, torch.bfloat16]
            axes.plot(ns.index(WORLD_SIZE), measured, "ko", label="measured, scaled to 7B")
        axes.axhline(80, color="k", linestyle=":")
        axes.set(title=f"stage {stage}", xlabel="ranks", xticks=range(len(ns)), xticklabels=ns)
    panels[0].set(ylabel="GB a rank: bfloat16, Adam, 7B")
    panels[1].legend()
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
