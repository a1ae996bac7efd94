"""ZeRO by hand, stages 2 and 3: shard the gradients, then the weights, which is FSDP
===================================================================================

**Question.** How can n ranks train a model that none of them could hold, and what does it cost?

**Predict.** Four equal units, P parameters in all, four ranks, bfloat16 with Adam. In stage 2 and
in stage 3: how many bytes a parameter does a rank hold when backward has ended, and how many
numbers a parameter must it send in a step? In stage 3, how many units' weights are whole at once?

**Run.** `torchrun --standalone --nproc-per-node=4 03_fsdp_zero3.py`, or `python 03_fsdp_zero3.py`.

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 7 s) 5.5 bytes in stage 2, that is 2
+ 14/n, and 4, or 16/n, in stage 3; 1.5 and 2.25 numbers, 2(n-1)/n and 3(n-1)/n; two units whole at
once; weights as on one process. tests/test_fsdp_zero.py trains odder modules: tied, frozen, unused
parameters, mixed dtypes, nested units. Not run on several GPUs.

**Next.** parallelism/04_model_tensor_parallel.py splits the multiplications themselves.
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
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, product
from typing import NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

WORLD_SIZES = range(1, 65)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {}


def main(options: argparse.Namespace) -> None:
    device = setup()
    x_RBD = torch.randn(WORLD_SIZE, 8, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)
    alone = on_one_process(x_RBD)
    gc.freeze()  # what there is already need not be searched for tensors
    for stage, layout in product((2, 3), LAYOUT):
        one_run(stage, layout, x_RBD, alone)
    gc.unfreeze()
    finish()


# %% [markdown]
# ## 1. The gradient of an all-gather is a reduce-scatter
#
# Weights and gradients are needed in passing only. So cut the model into *units* whose parameters
# come and go together: a transformer's blocks. Those of one dtype lie end to end, padded to a
# multiple of n, and a rank keeps a shard. For autograd the shard *is* the parameter: through an
# all-gather every rank's loss depends on it, so its gradient is a sum over ranks.


# %%
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard_K: torch.Tensor, flat: "Flat", reduce: Callable) -> torch.Tensor:
        ctx.flat, ctx.reduce = flat, reduce
        return flat.full_N.data  # .data: refilling it in backward is no modification to autograd

    @staticmethod
    def backward(ctx, gradient_N: torch.Tensor) -> tuple[None, None, None]:
        ctx.reduce(ctx.flat, gradient_N)  # zero where a parameter went unused, and in the padding
        return None, None, None  # the gradient will arrive in flat.gradient_K


class Flat:
    """Parameters of one unit and dtype: N numbers with the padding, of which a rank owns K = N/n.

    full_N      whole weights in the dtype that computes; an empty storage while they are freed
    shard_K     this rank's shard of them, and gradient_K of the gradient, averaged over ranks
    master_K    the shard the optimizer updates: shard_K, or if that is of lower precision a copy
    """

    def __init__(self, sites: dict[nn.Parameter, list], stage: int, compute: torch.dtype) -> None:
        self.sites, self.shapes = list(sites.values()), [p.shape for p in sites]
        trained, n = next(iter(sites)).requires_grad, dist.get_world_size()
        whole = torch.cat([p.detach().flatten() for p in sites])
        whole_N = F.pad(whole, (0, -len(whole) % n))
        self.full_N = whole_N.to(compute)
        mine, master_K = (t.view(n, -1)[dist.get_rank()] for t in (self.full_N, whole_N))
        self.shard_K = nn.Parameter(mine.clone() if stage == 3 else mine, trained)
        low = compute != whole.dtype and trained
        self.master_K = nn.Parameter(master_K.clone()) if low else self.shard_K
        self.gradient_K = torch.zeros_like(mine) if trained else None
        self.stage, self.works, self.users = stage, [], 0

    def views(self, flat_N: torch.Tensor) -> Iterator[tuple[list, torch.Tensor]]:
        """Each parameter's sites, and its part of `flat_N`."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = flat_N.split([*sizes, len(flat_N) - sum(sizes)])
        return zip(self.sites, map(torch.Tensor.view, parts, self.shapes), strict=True)

    def fetch(self) -> None:
        """Start to gather the weights, unless they are there or on their way."""
        if (storage := self.full_N.untyped_storage()).size() == 0:
            storage.resize_(self.full_N.nbytes)
            gather = partial(dist.all_gather_into_tensor, async_op=True)
            self.works.append(gather(self.full_N, self.shard_K.data))

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()

    def free(self) -> None:
        self.wait()
        if self.stage == 3:
            self.full_N.untyped_storage().resize_(0)


def sites_of(module: nn.Module, unit: nn.Module, units: Sequence, prefix: str = "") -> Iterator:
    """Every use of a parameter: itself, innermost unit; its site: module, name, full name."""
    unit = module if module in units else unit
    for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
        yield p, unit, module, name, prefix + name
    for name, child in module.named_children():
        yield from sites_of(child, unit, units, f"{prefix}{name}.")


# %% [markdown]
# ## 2. Stage 2 keeps the weights, stage 3 lets them come and go
#
# Hooks gather a unit's weights before its forward and empty their storage after; once backward has
# reached its output they are gathered again, into the storage to which autograd's saved views
# point, and freed when the gradient leaves. The order of units is learned as they run: while one
# computes, the next one's weights travel. Every backward sends; stage 1 adds up micro-batches.


# %%
class FSDP:
    """Call the module, `backward` once or more, then `step`. All ranks run units in one order.

    `optimizer` builds any elementwise torch optimizer; with `compute` the module and its inputs are
    of that dtype, masters are not. Tied parameters belong to the root; frozen ones stay to the end.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        units: Sequence[nn.Module],
        stage: int = 3,
        compute: torch.dtype | None = None,
        clip: float | None = None,
    ) -> None:
        self.module, self.stage, self.clip, self.n = module, stage, clip, dist.get_world_size()
        uses, groups = {}, {}
        for p, *use in sites_of(module, module, units):
            uses.setdefault(p, []).append(use)
        for p, sites in uses.items():
            dist.broadcast(p.data, 0)  # ranks may have been seeded differently
            home = sites[0][0] if len({unit for unit, *_ in sites}) == 1 else module
            groups.setdefault((home, p.dtype, p.requires_grad), {})[p] = [s for _, *s in sites]
            for _, owner, name, _ in sites:
                owner._parameters.pop(name, None)
        for buffer in module.to(compute).buffers():
            dist.broadcast(buffer, 0)  # made equal now; later each rank has its own
        self.flats = {unit: [] for unit in (module, *units)}
        for (home, dtype, _), sites in groups.items():
            low = compute if compute and dtype.is_floating_point else dtype
            self.flats[home].append(f := Flat(sites, stage, low))
            home.register_parameter(f"flat_shard_{len(self.flats[home])}", f.shard_K)
        self.trained = [f for f in chain(*self.flats.values()) if f.shard_K.requires_grad]
        self.optimizer = optimizer([f.master_K for f in self.trained])
        self.next, self.previous, self.last, self.entered, self.flying = {}, {}, None, set(), []
        for unit in self.flats:
            unit.register_forward_pre_hook(self.before_forward)
            unit.register_forward_hook(self.after_forward)
        self.after_backward()

    def use(self, unit: nn.Module, following: nn.Module | None) -> None:
        for f in self.flats[unit]:
            f.fetch()  # unless it was prefetched
            f.wait()
        for f in self.flats.get(following, ()) if following not in self.entered else ():
            f.fetch()

    def before_forward(self, unit: nn.Module, _: object) -> None:
        if unit not in self.entered:  # else activation checkpointing computes it once more
            self.last = None if unit is self.module else self.last
            self.next[self.last], self.previous[unit], self.last = unit, self.last, unit
            self.use(unit, self.next.get(unit))
        for f in self.flats[unit]:
            for sites, view in f.views(Gather.apply(f.shard_K, f, self.reduce)):
                for owner, name, _ in sites:
                    setattr(owner, name, view)

    def after_forward(self, unit: nn.Module, _: object, output: object) -> None:
        for owner, name, _ in chain(*(sites for f in self.flats[unit] for sites in f.sites)):
            setattr(owner, name, None)  # not a view of memory that is gone
        if unit not in self.entered:
            for f in self.flats[unit]:
                f.free()
            if tensors := [t for t in tree_leaves(output) if getattr(t, "requires_grad", False)]:
                register_multi_grad_hook(tensors, partial(self.before_backward, unit), mode="any")

    def before_backward(self, unit: nn.Module, _: torch.Tensor) -> None:
        """Backward has reached the unit's output."""
        if not self.entered:
            torch.autograd.Variable._execution_engine.queue_callback(self.after_backward)
        self.entered.add(unit)
        self.use(unit, self.previous[unit])
        for f in self.flats[unit]:
            f.users += 1  # a unit may have been called twice

    def reduce(self, f: Flat, gradient_N: torch.Tensor) -> None:
        self.land()  # at most one travels
        f.users -= 1
        if f.users == 0:
            f.free()
        sum_K = torch.empty_like(f.gradient_K)
        work = dist.reduce_scatter_tensor(sum_K, gradient_N, async_op=True)
        self.flying = [(f, work, sum_K, gradient_N)]

    def land(self) -> None:
        for f, work, sum_K, _ in self.flying:
            work.wait()
            f.gradient_K.add_(sum_K, alpha=1 / self.n)
        self.flying = []

    def after_backward(self) -> None:
        self.land()
        for f in chain(*self.flats.values()):
            f.free()  # what is frozen, or went unused
            f.users = 0
        self.entered = set()

    @torch.no_grad()
    def step(self) -> torch.Tensor | None:
        """Clip, update this rank's shards, in stage 2 gather; return the norm if clipping."""
        norm = None
        if self.clip is not None:  # a number is counted by its owner, padding is zero
            square = sum(f.gradient_K.to(f.master_K.dtype).square().sum() for f in self.trained)
            dist.all_reduce(square)
            norm = square.sqrt()
        for f in self.trained:
            f.master_K.grad = f.gradient_K.to(f.master_K.dtype)
            if norm is not None:
                f.master_K.grad.mul_((self.clip / (norm + 1e-6)).clamp(max=1))
            self.optimizer.step()  # passes over masters without a gradient: all but this one
            f.master_K.grad = None
            f.shard_K.copy_(f.master_K)
            if self.stage == 2:
                dist.all_gather_into_tensor(f.full_N, f.shard_K.data)
            f.gradient_K.zero_()
        return norm

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The bare module's, in the masters' precision, on every rank."""
        state = {k: t for k, t in self.module.state_dict().items() if "flat_shard_" not in k}
        for f in chain(*self.flats.values()):
            whole_N = f.master_K.data.new_empty(f.full_N.shape)
            dist.all_gather_into_tensor(whole_N, f.master_K.data)
            state |= {name: view for sites, view in f.views(whole_N) for *_, name in sites}
        return state


# %% [markdown]
# ## 3. One run: weights, bytes, numbers, order
#
# Three steps on ranks seeded differently, against one process: the order of some 100 additions in a
# gradient differs, and Adam's slope lr / eps is 1. Bytes: every tensor that Python can reach is
# asked for its storage, between backward and step. Numbers: counted at the collectives, from the
# tensors handed to them; of N a rank must send (n-1)/n N in either.

# %%
LAYOUT = {torch.bfloat16: (2, 2, 12), torch.float32: (4, 4, 8)}  # weight, gradient, optimizer
UNITS, WIDTH, STEPS, LR, EPS, CLIP = 4, 420, 3, 0.01, 0.01, 0.1
ADAM = partial(torch.optim.Adam, lr=LR, eps=EPS)


def network(seed: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(seed)
    wide = partial(nn.Linear, bias=False)  # 420 * 240 numbers in a unit: 8 ranks, no padding
    units = [nn.Sequential(wide(WIDTH, 120), nn.ReLU(), wide(120, WIDTH)) for _ in range(UNITS)]
    return nn.Sequential(*units).to(device)


def on_one_process(x_RBD: torch.Tensor) -> dict[str, torch.Tensor]:
    model = network(0, x_RBD.device)
    optimizer = ADAM(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x_RBD) - x_RBD).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model.state_dict() | {"norm": norm}


def live_storages() -> dict[int, torch.UntypedStorage]:
    """By address. Adam's counters of steps, scalars, are left out."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors if t.dim()) if s.size()}


def one_run(stage: int, layout: torch.dtype, x_RBD: torch.Tensor, alone: dict) -> None:
    x_BD, before, moved, whole = x_RBD[RANK].to(layout), live_storages(), Counter(), []
    model = network(RANK, x_BD.device)
    P, n = sum(p.numel() for p in model.parameters()), WORLD_SIZE
    zero = FSDP(model, ADAM, [*model], stage, layout, CLIP)

    def watched(call: Callable, *tensors: torch.Tensor, **options: object) -> dist.Work:
        big = max(tensors, key=torch.Tensor.numel)
        moved.update(numbers=big.numel() * (n - 1) / n, bytes=big.nbytes * (n - 1) / n)
        whole.append(sum(f.full_N.untyped_storage().size() for f in zero.trained))
        return call(*tensors, **options)

    calls = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    spies = {call.__name__: partial(watched, call) for call in calls}
    for _ in range(STEPS):
        moved.clear(), whole.clear()
        with mock.patch.multiple(dist, **spies):
            (model(x_BD) - x_BD).square().mean().backward()
            held = sum(s.size() for at, s in live_storages().items() if at not in before)
            norm = zero.step()
    what = f"stage {stage}, {str(layout).removeprefix('torch.')}: "
    weight, gradient, optimizer = LAYOUT[layout]
    due = P * weight / (n if stage == 3 else 1) + P * (gradient + optimizer) / n
    pad = 0 if 840 % n == 0 else UNITS * n  # numbers
    claim(f"{what}bytes held", due, held, atol=16 * pad)
    due = stage * P * (n - 1) / n
    claim(f"{what}numbers sent", due, moved["numbers"], atol=3 * pad)
    claim(f"{what}bytes sent", due * layout.itemsize, moved["bytes"], atol=12 * pad)
    if stage == 3:
        unit = max(f.full_N.nbytes for f in zero.trained)
        claim(f"{what}units whole at once", 2, max(whole) / unit, "<=")
        begun = whole.count(2 * unit)  # in forward and in backward, all but the first
        claim(f"{what}gathers begun while another computes", 2 * (UNITS - 1), begun)
    if layout == torch.float32:
        state = zero.full_state_dict() | {"norm": norm}
        far = max((state[name] - alone[name]).abs().max().item() for name in alone)
        claim(f"{what}distance from one process", 0, far, atol=STEPS * 100 * 2**-24)


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
