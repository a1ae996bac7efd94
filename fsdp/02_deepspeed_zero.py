"""DeepSpeed's ZeRO, stages 0 to 3, on the same GPT as FSDP2
========================================================

**Question.** What does each key of a DeepSpeed config change, and where does it leave the paper?

**Predict.** bfloat16, Adam, P parameters, n ranks, two micro-batches a step. For stages 0 to 3: the
bytes a rank holds after the first micro-batch, and the numbers it sends in a step. Stage 2 needs
each gradient on one rank only: does it send less than DDP?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_deepspeed_zero.py   # NCCL, if there are 4 GPUs
    python 02_deepspeed_zero.py                                     # the same; else gloo
    deepspeed --num_gpus 4 02_deepspeed_zero.py     # its own launcher; no GPU: DS_ACCELERATOR=cpu

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, DeepSpeed 0.19.8, 19 s; not run on
GPUs) that all losses are FSDP2's; that after a micro-batch a rank holds 16, 7, 5.6, 4 bytes a
parameter; and that stage 2 sends *more* than DDP, 5P against 2P, until one key is changed: then 3P.

**Next.** fsdp/03_fsdp_refinements.py; which strategy when: fsdp/sharding_strategies.md
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
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import ClassVar, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

WORLD_SIZES = range(1, 65)
FLAGS: dict[str, dict] = {
    "--deepspeed_config": {"type": Path, "metavar": "PATH", "help": "losses of this config only"},
    "--write-configs": {"metavar": "DIR", "help": "first write zero1.json, zero2.json, zero3.json"},
    "--cpu-adam": {"action": "store_true", "help": "compile (a minute), use its CPU Adam"},
    "--local_rank": {"type": int, "help": "appended by the deepspeed launcher; LOCAL_RANK has it"},
}

# Shapes: B sequences, T tokens each, D model width, V byte values; n ranks, rank r.


def main(options: argparse.Namespace) -> None:
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))  # DeepSpeed's
    adam = {"type": "AdamW", "params": {**ADAMW, "torch_adam": not options.cpu_adam}}
    offloaded = changed(2, offload_optimizer={"device": "cpu"}) | {"optimizer": adam}
    configs = {f"stage {s}": config for s, config in enumerate(ZERO)} | {"offload": offloaded}
    for stage in (1, 2, 3) if options.write_configs and RANK == 0 else ():
        text = json.dumps(ZERO[stage], indent=2) + "\n"
        Path(options.write_configs, f"zero{stage}.json").write_text(text)
    path = options.deepspeed_config
    require(not path or path.is_file(), f"--deepspeed_config needs a JSON file, got {path}")
    device = setup()
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    deepspeed = library(device, options.cpu_adam)
    if path:  # what it lacks is the lesson's
        configs = {path.name: COMMON | json.loads(path.read_text())}
    the_same_losses(deepspeed, mesh, configs)
    if deepspeed is None:
        blocked("DeepSpeed", needs="a system library: pip install -e '.[deepspeed]'")
    elif not path:
        bytes_and_messages(deepspeed, mesh)
        what_a_key_changes(deepspeed, mesh, offloaded)
    finish()


# %% [markdown]
# ## 1. The configs, and every key in them
#
# Sizes are *numbers*, not bytes. The defaults (fsdp/README.md lists them) suit billions of
# parameters. On 0.2 million they undo stage 3: every tensor is small enough to stay whole.

# %%
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}  # as in torch
COMMON: dict = {
    "train_micro_batch_size_per_gpu": 2,  # sequences in one forward; the loader is yours
    "gradient_accumulation_steps": 2,  # backwards to one update; gradients are averaged
    "gradient_clipping": 1.0,  # largest norm of the whole gradient
    "bf16": {"enabled": True},  # compute in bfloat16, keep float32 masters
    "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},  # not a compiled one
}
BUCKET = 100_000
FLAT = {
    "reduce_bucket_size": BUCKET,  # gradients reduced together; so large a buffer is allocated
    "allgather_bucket_size": BUCKET,  # updated parameters gathered together
    "use_multi_rank_bucket_allreduce": True,  # a bucket with several owners: all-reduce it whole
}
LAYERS = {
    "reduce_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": 10_000,  # fetched ahead of use
    "stage3_param_persistence_threshold": 0,  # smaller tensors stay whole
    "stage3_max_live_parameters": 0,  # free what is beyond so many whole numbers,
    "stage3_max_reuse_distance": 0,  # unless it is used again within so many
}
PARTS = enumerate([{}, FLAT, FLAT, LAYERS])
ZERO = [COMMON | {"zero_optimization": {"stage": stage, **part}} for stage, part in PARTS]


def changed(stage: int, **keys: object) -> dict:
    return ZERO[stage] | {"zero_optimization": ZERO[stage]["zero_optimization"] | keys}


def library(device: torch.device, cpu_adam: bool) -> ModuleType | None:
    """DeepSpeed, quiet, on this device, with nothing left to compile; None if not installed."""
    os.environ |= {"DS_ACCELERATOR": device.type, "TORCHDYNAMO_DISABLE": "1"}  # load no compiler
    try:
        import deepspeed
    except ImportError:
        return None
    deepspeed.utils.logger.setLevel(logging.ERROR)
    if device.type == "cpu":  # or it compiles, for minutes, an all-reduce for inference only
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    if cpu_adam:  # the first rank compiles; the others wait at its lock file, in no collective
        os.environ["PATH"] += f":{Path(sys.executable).parent}"  # ninja may lie there only
        deepspeed.ops.op_builder.CPUAdamBuilder().load()
    return deepspeed


# %% [markdown]
# ## 2. The same losses
#
# The GPT of fsdp/01_fsdp_basics.py in float32, by FSDP2, one process and each stage: the same sums
# in different orders, so a loss of 5.5 is off by some roundings of 5.5 x 2**-24, say 1e-6; 1e-5 is
# allowed. A gradient n times too large hardly changes Adam's step, so its norm is compared too.


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


def gpt(mesh: DeviceMesh) -> GPT:
    torch.manual_seed(0)  # the same on every rank
    return GPT().to(mesh.device_type)


def batch(mesh: DeviceMesh, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (2, 65), generator=generator).to(mesh.device_type)


def by_torch(model: GPT, x_BT: Tensor, config: dict, steps: int = 3) -> Tensor:
    """(steps, 2): each step's loss on `x_BT` and norm of the whole gradient before clipping."""
    adamw = {k: v for k, v in config["optimizer"]["params"].items() if k in ADAMW}
    optimizer, seen = torch.optim.AdamW(model.parameters(), **adamw), []
    for _ in range(steps):
        loss = model(x_BT)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), getattr(norm, "full_tensor", norm.clone)().item()))
    return torch.tensor(seen)


def by_deepspeed(engine: nn.Module, x_BT: Tensor, steps: int = 3) -> Tensor:
    """The same of an engine, which averages, clips, updates and clears by itself."""
    seen = []
    for _ in range(steps):
        loss = engine(x_BT)
        engine.backward(loss)
        whole = nn.utils.get_total_norm([p.grad for p in engine.parameters() if p.grad is not None])
        engine.step()  # stage 0 still had all gradients, but in float32 it tells no norm
        norm = engine.get_global_grad_norm()
        seen.append((loss.item(), float(whole if norm is None else norm)))
    return torch.tensor(seen)


def the_same_losses(deepspeed: ModuleType | None, mesh: DeviceMesh, configs: dict) -> None:
    model, x_BT, how = gpt(mesh), batch(mesh, RANK), next(iter(configs.values()))
    for module in *model.blocks, model:  # each block a unit, then all that is left
        fully_shard(module, mesh=mesh)
    all_BT = torch.cat([batch(mesh, rank) for rank in range(WORLD_SIZE)])
    runs = {"FSDP2": by_torch(model, x_BT, how), "one process": by_torch(gpt(mesh), all_BT, how)}
    for name, config in configs.items() if deepspeed else ():
        plain = config | {"bf16": {"enabled": False}, "gradient_accumulation_steps": 1}
        engine, *_ = deepspeed.initialize(model=gpt(mesh), config=plain)
        runs[name] = by_deepspeed(engine, x_BT)
        engine.destroy()
    averages = torch.stack(list(runs.values())).to(mesh.device_type) / WORLD_SIZE
    dist.all_reduce(averages)
    for name, run in list(zip(runs, averages, strict=True))[1:]:
        loss, norm = (run - averages[0]).abs().max(0).values.tolist()
        claim(f"{name}: losses, distance from FSDP2", 0, loss, atol=1e-5)
        claim(f"{name}: gradient norms, from FSDP2", 0, norm, atol=1e-5)


# %% [markdown]
# ## 3. Bytes held and numbers sent
#
# After the *first* of two micro-batches (stage 1 still has whole gradients, stage 2 has not)
# `census` counts the storages of all tensors made since `gc.freeze`, scalars and the reduce bucket
# apart. float32, masters and moments: 12P, from stage 1 on 12P/n. bfloat16, parameters and
# gradients: 4P, 4P, 2P + 2P/n, 4P/n. Together 16P, 4P + 12P/n, 2P + 14P/n, 16P/n (Rajbhandari et
# al. 2020) but for padding and for gradients on a partition's edge, which stage 2 keeps whole.
#
# A step of `a` micro-batches sends, times (n-1)/n: 2P; 2P + P; 2Pa + P; 3Pa. The paper has 2P, 2P,
# 2P, 3P for a = 1; DeepSpeed sends more, for it all-reduces a bucket that has several owners.


# %%
class Wire(TorchDispatchMode):
    """Counts numbers by kind of collective, times how often a textbook algorithm sends each."""

    SENT: ClassVar = {"_allgather_base_": (0, 1), "_reduce_scatter_base_": (1, 1)}
    SENT |= {"allreduce_": (0, 2), "reduce_": (0, 1)}  # (argument with all numbers, times sent)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> object:
        kind = function._schema.name.removeprefix("c10d::")
        if kind in self.SENT:
            where, times = self.SENT[kind]
            x = args[where][0] if isinstance(args[where], list) else args[where]
            self.sent[kind] += times * x.numel() * (x.numel() > 1)  # norm and overflow flag apart
        return function(*args, **(kwargs or {}))


def census() -> Counter[tuple[str, torch.dtype]]:
    """Bytes by device and dtype of what was made since `gc.freeze()` and is still there."""
    time.sleep(0.05)  # gloo's threads let go of a buffer a moment after its collective
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    tensors += [t.grad for t in tensors if t.is_leaf and type(t.grad) is Tensor]
    held, seen = Counter(), {0}  # 0: on the meta device
    for t in tensors:
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen and 8 < storage.nbytes() != 2 * BUCKET:
            held[t.device.type, t.dtype] += storage.nbytes()
        seen.add(storage.data_ptr())
    return held


def step_of(deepspeed: ModuleType, mesh: DeviceMesh, config: dict) -> tuple[Counter, Counter]:
    """What is held after the first micro-batch of the third step, and what that step sends."""
    x_BT, a, held = batch(mesh, RANK), config["gradient_accumulation_steps"], Counter()
    gc.freeze()  # forget what there is
    engine, *_ = deepspeed.initialize(model=gpt(mesh), config=config)
    for _ in range(2 * a):  # Adam's moments come with the first step; stage 3 learns the order
        engine.backward(engine(x_BT))
        engine.step()  # does nothing before the last micro-batch of a step
    with Wire() as wire:
        wire.sent = Counter()
        for _ in range(a):
            engine.backward(engine(x_BT))
            held = held or min((census() for _ in range(3)), key=Counter.total)
            engine.step()
    engine.destroy()
    return held, wire.sent


def due(stage: int, a: int) -> tuple[float, float, float]:
    """Bytes in float32, bytes in bfloat16, numbers to send over (n-1)/n, as listed above."""
    n, P = WORLD_SIZE, sum(sizes := [p.numel() for p in GPT().parameters()])
    if stage == 0:
        return 12 * P, 4 * P, 2 * P
    if stage == 3:
        S = sum(-(-size // n) for size in sizes)  # a share of each tensor
        return 12 * S, 4 * S, a * 3 * n * S
    S, end, touched = 2 * -(-P // (2 * n)), 0, 0  # a share of all tensors laid end to end
    for size in sizes:
        start, end = end, end + size
        touched += size * (start < (RANK + 1) * S and end > RANK * S)
    gradients, times = (P, 1) if stage == 1 else (touched, a)
    return 12 * S, 2 * n * S + 2 * gradients, times * 2 * P + n * S


def bytes_and_messages(deepspeed: ModuleType, mesh: DeviceMesh) -> None:
    over, P = (WORLD_SIZE - 1) / WORLD_SIZE, sum(p.numel() for p in GPT().parameters())
    for stage, config in enumerate(ZERO):
        held, sent = step_of(deepspeed, mesh, config)
        f32, bf16, numbers = due(stage, config["gradient_accumulation_steps"])
        claim(f"stage {stage}: bytes in float32", f32, held[mesh.device_type, torch.float32])
        claim(f"stage {stage}: bytes in bfloat16", bf16, held[mesh.device_type, torch.bfloat16])
        claim(f"stage {stage}: numbers sent", numbers * over, sent.total() * over)
        bar = " " * 10 + "#" * round(2 * (each := held.total() / P))
        say(f"{bar:43}{each:5.1f} bytes a parameter; sent {sent.total() / P:.1f} P (n-1)/n\n")


# %% [markdown]
# ## 4. What single keys change
#
# `use_multi_rank_bucket_allreduce: false` reduces each part of a bucket to its owner, as in the
# paper: half the numbers, more messages. `stage3_max_live_parameters` and `_reuse_distance` by
# default keep parameters from forward to backward, like `reshard_after_forward=False` of FSDP2.
# `stage3_param_persistence_threshold` by default keeps all of this model whole, 2P bytes more.
# Stage 3 allocates its reduce bucket, filled or not: 1 GB by default. `offload_optimizer` keeps
# masters, moments, a float32 gradient shard on the host: 16P/n there, none of 12P/n on the GPU
# (Ren et al. 2021). The CPU updates, here by torch's AdamW; with `--cpu-adam` by DeepSpeed's own.


# %%
def what_a_key_changes(deepspeed: ModuleType, mesh: DeviceMesh, offloaded: dict) -> None:
    n, a, P = WORLD_SIZE, 2, sum(p.numel() for p in GPT().parameters())
    _, shards, numbers = due(3, a)
    sent = step_of(deepspeed, mesh, changed(2, use_multi_rank_bucket_allreduce=False))[1]
    claim("stage 2, to owners only: numbers reduced", a * P, sent["reduce_"] + sent["allreduce_"])
    keep = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
    sent = step_of(deepspeed, mesh, changed(3, **keep))[1]
    P = numbers / 3 / a * (n > 1)  # padded; one rank gathers nothing
    claim("stage 3, kept for backward: numbers gathered", a * P, sent["_allgather_base_"])
    more = {"stage3_param_persistence_threshold": 10**5, "reduce_bucket_size": 10 * BUCKET}
    held = step_of(deepspeed, mesh, changed(3, **more))[0][mesh.device_type, torch.bfloat16]
    claim("stage 3, small tensors whole: bytes in bfloat16", shards + 2 * P + 20 * BUCKET, held)
    held = step_of(deepspeed, mesh, offloaded)[0]
    claim("offload: bytes in float32, host", due(2, 1)[0] / 12 * 16, held["cpu", torch.float32])
    if mesh.device_type == "cpu":
        return blocked("offload: bytes in float32, GPU", needs="1 GPU")
    claim("offload: bytes in float32, GPU", 0, held["cuda", torch.float32])


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
