r"""Train a GPT with FSDP2, and survive: the complete file to copy. It was never run on GPUs.

    export PET_MAX_RESTARTS=3 PET_SHUTDOWN_TIMEOUT=600
    torchrun --standalone --nproc-per-node=2 fsdp_surviving.py
    torchrun --standalone --nproc-per-node=8 fsdp_surviving.py --size 1b --data tokens.npy \
      --steps 20000 --warmup 1000 --learning-rate 4e-4 --batch 256 --micro-batch 4 --compile
    torchrun --standalone --nproc-per-node=8 fsdp_surviving.py --weights Llama-3-8B --recompute \
      --data tokens.npy --export mine --steps 1000 --learning-rate 1e-5 --batch 64 --micro-batch 1

The model is a Llama. 125m takes the line of 1b, at 6e-4: usual rates, not tried here. --data is a
row of token numbers, as np.save writes it, mapped and shuffled anew in each epoch; else the bytes
of Python's sources. After any end, type the same line again, on as many ranks as there are now.
launch_ddp.sh, for several nodes, obeys both variables; slurm.sbatch takes RESTARTS, gives 120 s.

**The claim.** Killed at any point and started again, it takes the steps that are left, with the
samples that are left, each once. On as many ranks, by the same torch, it ends with the same
weights, bit for bit (on CPUs; GPUs add in any order). On more or fewer ranks only the order of
additions differs: --batch counts the samples of a step on all ranks together.

**It survives** what ddp_surviving.py does, in the same way: ranks that are killed, raise or hang;
SIGTERM, Ctrl-C and SIGHUP (status 143, 130, 129), if a step, the save that is under way and one
more fit into PET_SHUTDOWN_TIMEOUT (unset: 30 s); the death of torchrun; two saves in a row without
room (a third, or a save that fails otherwise, ends the run when the next one is due); death in any
phase of a save (shards, then all checksums go into a .tmp folder while training goes on; at last it
is renamed); a file that is cut off, missing, or has a bit flipped: its checkpoint is put aside as
step-N.damaged, and the one before it used. If none is whole, or a disk fails, nothing starts.

**It refuses** a missing GPU, bfloat16 that a GPU emulates, and input that does not fit: all ranks
say why, and leave. Without a GPU on any node, or with CUDA_VISIBLE_DEVICES=, it trains on CPUs.

**Its limits**
- A bad batch, whose gradients are not finite, ends the run before its step, at each restart again.
- A checkpoint of another batch, steps, rate, shape or data is refused. Of data, length and first
  million tokens are looked at: a bad one later ends the run. Load no stranger's: it has a pickle.
- All nodes share --checkpoints. A rank's host needs 8 bytes per sample, and for saving its share of
  12 bytes per weight. On NFS the lock of a dead node may be held for its lease, 90 s and more.
- A rank that hangs while others save or check holds them for up to 3600 s, whatever --timeout is.
- FSDP alone: no tensor, pipeline or context parallelism, float8, experts (torchtitan has them). By
  arithmetic 8b wants 8 GPUs of 80 GB: logits are whole, each micro-batch reduces its gradients.
- Embedding and lm_head are one unit, gathered till backward ends, overlapping nothing: 2 GB at 8b.
- Each start draws all weights on each rank, even to overwrite them, and scales none by depth.
- In a line of the log loss and norm are of its step alone, GB of a GPU since the line before.
- Plain RoPE, untied weights (Llama 3, not 3.1); no dropout, evaluation, tokenizer, document mask.
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
import zlib
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None

CHECKSUMS = "checksums.json"  # {file: its sha256}; a folder without it is no checkpoint
PROGRESS = "progress.json"  # the step, and what must not change
LOCK_SECONDS = 60  # that orphans of a run before may take to leave
SAVE_SECONDS = 3600  # that a rank waits for the others' shards to be written, or hashed
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}  # why a save may fail, and the run goes on
MOST_FAILED = 3  # such saves in a row, which end it
log = logging.getLogger("training")


def read_flags() -> Namespace:
    flags = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = flags.add_argument
    add("--size", choices=SIZES, default="tiny")
    add("--weights", type=Path, help="folder of a Llama from Hugging Face: its size and weights")
    add("--export", type=Path, help="folder to make of the last weights, for Hugging Face")
    add("--data", type=Path, help="file of tokens, else the bytes of Python's sources")
    add("--context", type=int, help="tokens of a sample, else as many as the model knows")
    add("--checkpoints", type=Path, default="checkpoints", help="folder for them")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--keep", type=int, default=3, help="how many checkpoints stay")
    add("--keep-every", type=int, default=100, help="and of all each so many-th")
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=24, help="samples of a step, on all ranks together")
    add("--micro-batch", type=int, default=2, help="samples that a rank takes at a time")
    add("--learning-rate", type=float, help="falls to a tenth by a cosine; 1e-3 without --weights")
    add("--warmup", type=int, default=20, help="steps in which it rises")
    add("--weight-decay", type=float, default=0.1, help="of matrices; of norms it is 0")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    add("--recompute", action="store_true", help="in backward what a block computed in forward")
    add("--compile", nargs="?", const="inductor", help="blocks, by a backend of torch.compile")
    add("--replicas", type=int, default=1, help="HSDP: groups of ranks that each hold all weights")
    add("--offload", action="store_true", help="weights and Adam's moments to the host")
    add("--peak", type=float, help="TFLOP/s of a GPU, for the MFU: 989 for an H100 in bfloat16")
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=10, help="steps between lines")
    add("--timeout", type=float, default=600, help="seconds to wait for a rank")
    args = flags.parse_args()
    least = {"keep": 2, "warmup": 0, "seed": 0}  # 2: the newest checkpoint may be the damaged one
    for name, value in vars(args).items():
        if type(value) is int and value < least.get(name, 1):
            flags.error(f"--{name.replace('_', '-')} must be at least {least.get(name, 1)}")
    if args.weights and args.learning_rate is None:
        flags.error("--weights needs a --learning-rate: 1e-5, say; a large one ruins them")
    args.learning_rate = 1e-3 if args.learning_rate is None else args.learning_rate
    return args


# The model. B sequences of T tokens, D wide, V different tokens; H heads of K features, in P pairs.
# Modules and sizes have the names of Hugging Face's Llama, so that its files need no translation.

NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
NAMES += "vocab_size max_position_embeddings rope_theta rms_norm_eps"
Shape = namedtuple("Shape", NAMES, defaults=(10_000.0, 1e-5))
SIZES = {
    "tiny": Shape(64, 176, 2, 4, 2, 256, 64),
    "125m": Shape(768, 2048, 12, 12, 4, 32_000, 2048),
    "1b": Shape(2048, 5632, 22, 32, 4, 32_000, 2048),  # TinyLlama
    "8b": Shape(4096, 14_336, 32, 32, 8, 128_256, 8192, 500_000.0),  # Llama 3
}


def linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


def rotate(x_BHTK: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor) -> torch.Tensor:
    """RoPE, in the precision of its tables: feature p turns with feature p + P."""
    a, b = x_BHTK.to(cos_TP.dtype).chunk(2, -1)
    return torch.cat([a * cos_TP - b * sin_TP, b * cos_TP + a * sin_TP], -1).to(x_BHTK.dtype)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        D, wide = shape.hidden_size, shape.intermediate_size
        self.K = D // shape.num_attention_heads
        few = self.K * shape.num_key_value_heads
        self.self_attn = linears(q_proj=(D, D), k_proj=(D, few), v_proj=(D, few), o_proj=(D, D))
        self.mlp = linears(gate_proj=(D, wide), up_proj=(D, wide), down_proj=(wide, D))
        self.input_layernorm = nn.RMSNorm(D, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(D, shape.rms_norm_eps)

    def forward(self, x_BTD: torch.Tensor, *tables_TP: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.input_layernorm(x_BTD), *tables_TP)
        y_BTD = self.post_attention_layernorm(x_BTD)
        gate = nn.functional.silu(self.mlp["gate_proj"](y_BTD))
        return x_BTD + self.mlp["down_proj"](gate * self.mlp["up_proj"](y_BTD))

    def attention(self, x_BTD: torch.Tensor, *tables_TP: torch.Tensor) -> torch.Tensor:
        three = [self.self_attn[name](x_BTD) for name in ("q_proj", "k_proj", "v_proj")]
        q_BHTK, k_BHTK, v_BHTK = [y.unflatten(-1, (-1, self.K)).transpose(1, 2) for y in three]
        q_BHTK, k_BHTK = rotate(q_BHTK, *tables_TP), rotate(k_BHTK, *tables_TP)
        how = {"is_causal": True, "enable_gqa": True}  # k and v have fewer heads than q
        y_BHTK = nn.functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, **how)
        return self.self_attn["o_proj"](y_BHTK.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        V, D = shape.vocab_size, shape.hidden_size
        self.shape = shape
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(V, D)})
        self.model["layers"] = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.model["norm"] = nn.RMSNorm(D, shape.rms_norm_eps)
        self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.model["embed_tokens"](tokens_BT)
        for block in self.model["layers"]:
            x_BTD = block(x_BTD, self.cos, self.sin)
        return self.lm_head(self.model["norm"](x_BTD))

    @torch.no_grad()
    def begin(self, T: int, seed: int, device: torch.device) -> None:
        """Draw all weights, which are garbage, alike on any number of ranks; make RoPE's tables."""
        K = self.shape.hidden_size // self.shape.num_attention_heads
        turns_P = self.shape.rope_theta ** -(torch.arange(0, K, 2, device=device) / K)
        angles_TP = torch.arange(T, device=device)[:, None] * turns_P
        self.cos, self.sin = angles_TP.cos(), angles_TP.sin()
        for name, weight in self.named_parameters():  # on CPUs DTensor's drawing repeats itself
            whole = torch.ones(weight.shape, device=device)
            if weight.ndim > 1:
                dice = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                whole.normal_(0, 0.02, generator=dice)
            where = (weight.device_mesh, weight.placements)
            shard = distribute_tensor(whole, *where, src_data_rank=None)  # nothing is sent
            weight.to_local().copy_(shard.to_local())


def build_model(args: Namespace, shape: Shape, device: torch.device) -> GPT:
    with torch.device("meta"):  # nothing is allocated before it is sharded
        model = GPT(shape)
    sizes = {"replicas": args.replicas} if args.replicas > 1 else {}
    sizes["shards"] = dist.get_world_size() // args.replicas
    how = {"mesh": dist.init_device_mesh(device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))}
    # What is gathered and computed, and what is added up; masters, gradients and moments stay
    # float32. Blocks' inputs are not cast: they are bfloat16, and RoPE's tables stay float32.
    dtypes = (torch.bfloat16, torch.float32) if args.precision == "bfloat16" else ()
    how["mp_policy"] = MixedPrecisionPolicy(*dtypes, cast_forward_inputs=False)
    if args.offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in model.model["layers"]:
        if args.compile:
            block.forward = torch.compile(block.forward, backend=args.compile)
        if args.recompute:
            again = {"use_reentrant": False, "preserve_rng_state": False}
            block.forward = partial(checkpoint, block.forward, **again)
        fully_shard(block, **how)  # its hooks are outside of what is compiled and recomputed
    fully_shard(model, **how)
    model.to_empty(device="cpu" if args.offload else device)
    model.begin(args.context, args.seed, device)
    return model


def shape_of(args: Namespace, world_size: int) -> Shape:
    """The model's. Raises ValueError if --weights has what it has not, or a flag does not fit."""
    shape = SIZES[args.size]
    if (args.weights or args.export) and not find_spec("safetensors"):
        raise ValueError("--weights and --export need safetensors: pip install safetensors")
    if args.weights:
        config = json.loads((args.weights / "config.json").read_text())
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        config = {"rope_theta": 10_000.0, "rope_type": rope.get("type"), **rope, **config}
        has = {"model_type": "llama", "hidden_act": "silu", "rope_type": "default"}
        has |= {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
        has["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        for name, value in has.items():
            if (asked := config.get(name) or value) != value:
                raise ValueError(f"{args.weights}: {name} is {asked}; here it is {value} alone")
        shape = Shape(**{name: config[name] for name in Shape._fields})
    args.context = args.context or shape.max_position_embeddings
    if args.context > shape.max_position_embeddings:
        raise ValueError(f"--context: the model knows {shape.max_position_embeddings} positions")
    last = args.checkpoints / f"step-{args.steps:09}"  # if it exists, export() says what is there
    if args.export and args.export.exists() and not last.exists():
        raise ValueError(f"--export {args.export} is there already")
    if world_size % args.replicas:
        raise ValueError(f"{world_size} ranks do not make --replicas {args.replicas}")
    return shape


def export(model: GPT, folder: Path, group: dist.ProcessGroup) -> None:
    """Write config.json and all weights in bfloat16, for Hugging Face. All ranks call it."""
    there = [folder.exists()]
    dist.broadcast_object_list(there, src=0, group=group)  # rank 0 decides for all
    if there[0]:
        return log.info("all steps are taken, and %s is there already: it stays", folder)
    how = {"save_distributed": True, "enable_consolidation": True}
    writer = dcp.HuggingFaceStorageWriter(f"{folder}.tmp", **how)
    state = {name: weight.detach().bfloat16() for name, weight in model.named_parameters()}
    dcp.save(state, storage_writer=writer, process_group=group)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}.tmp/sharded")
        config = model.shape._asdict() | {"model_type": "llama", "tie_word_embeddings": False}
        config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
        Path(f"{folder}.tmp/config.json").write_text(json.dumps(config))
        os.rename(f"{folder}.tmp", folder)
        log.info("the weights are in %s", folder)


class Tokens:
    """Samples of T + 1 tokens of a file, numbered over all epochs: a number is all they need."""

    def __init__(self, args: Namespace, shape: Shape) -> None:
        self.args, self.T, self.V = args, args.context, shape.vocab_size
        if args.data:
            self.all = np.load(args.data, mmap_mode="r")
        else:
            sources = sorted(Path(os.__file__).parent.glob("*.py"))
            self.all = np.frombuffer(b"".join(path.read_bytes() for path in sources), np.uint8)
        if self.all.ndim != 1 or self.all.dtype.kind not in "ui" or len(self.all) <= self.T:
            told = f"{args.data} has {self.all.dtype} of shape {self.all.shape}"
            raise ValueError(f"{told}: it must be one row of more than {self.T} integers")
        self.count = (len(self.all) - 1) // self.T
        self.mark = f"{len(self.all)} {hashlib.sha256(self.known(0, 10**6)).hexdigest()}"
        self.epoch = -1

    def known(self, start: int, stop: int) -> np.ndarray:
        found = np.ascontiguousarray(self.all[start:stop])
        if found.min() < 0 or found.max() >= self.V:
            told = f"{self.args.data} has tokens from {found.min()} to {found.max()}"
            raise ValueError(f"{told}, and the model knows 0 to {self.V - 1}")
        return found

    def sample(self, number: int) -> torch.Tensor:
        epoch, index = divmod(number, self.count)
        if epoch != self.epoch:
            dice = torch.Generator().manual_seed(zlib.crc32(f"{self.args.seed} {epoch}".encode()))
            self.order = torch.randperm(self.count, generator=dice)
            self.epoch = epoch
        start = self.T * int(self.order[index])
        return torch.from_numpy(self.known(start, start + self.T + 1).astype(np.int64))


def checkpoints_in(folder: Path) -> list[Path]:
    """Newest first. Neither step-N.RUN.tmp nor step-N.damaged is one, nor a user's step-best."""
    found = [path for path in folder.glob("step-*") if path.name[len("step-") :].isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob("step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def sync(path: Path, text: str | None = None) -> None:
    """Have this file, or the names in this folder, on the disk; write the text first, if any."""
    if text is not None:
        path.write_text(text)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Publisher(dcp.FileSystemWriter):
    """Writes step-N.RUN.tmp (an orphan may be writing its own), and names it step-N when whole."""

    def __init__(self, final: Path, run: str, progress: dict, args: Namespace) -> None:
        super().__init__(final.with_suffix(f".{run}.tmp"), per_thread_copy_ahead=0)  # uses no GPU
        self.final, self.progress, self.args = final, progress, args

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        """On every rank: its file, flushed, and the checksum next to it."""
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:  # torch.save's, which hides that of the disk
            raise (error.__context__ or error) from None
        for name in {result.storage_data.relative_path for result in written.value()}:
            sync(self.path / f"{name}.sum", checksum(self.path / name))
        return written

    def finish(self, metadata: dcp.Metadata, results: list) -> None:
        """On rank 0, when all ranks have written."""
        super().finish(metadata, results)
        sync(self.path / PROGRESS, json.dumps(self.progress))
        sums = {name: checksum(self.path / name) for name in (PROGRESS, ".metadata")}
        for name in {info.relative_path for info in metadata.storage_data.values()}:
            sums[name] = (self.path / f"{name}.sum").read_text()
        sync(self.path / CHECKSUMS, json.dumps(sums))
        sync(self.path)
        self.path.rename(self.final)  # at this moment it begins to exist
        sync(self.final.parent)
        log.info("step %d is saved", self.progress["step"])
        for old in checkpoints_in(self.final.parent)[self.args.keep :]:
            if int(old.name.removeprefix("step-")) % (self.args.save_every * self.args.keep_every):
                old.rename(old.with_suffix(".tmp"))  # half of one must not look like one
        remove_leftovers(self.final.parent)


def damage_in(path: Path) -> str | OSError:
    """What is wrong with this rank's share of its files: "" if nothing."""
    try:
        if not path.is_dir():
            raise OSError("it is not there: all nodes must share the folder")
        sums = json.loads((path / CHECKSUMS).read_bytes())
        names = sorted({PROGRESS, ".metadata", *sums})
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            if checksum(path / name) != sums.get(name):
                return f"{name} does not have the checksum it had"
    except (FileNotFoundError, ValueError, AttributeError, TypeError) as error:
        return str(error)
    except OSError as error:  # no damage: it may be whole
        return OSError(f"rank {dist.get_rank()} on {socket.gethostname()}: {error}")
    return ""


def newest_whole(folder: Path, group: dist.ProcessGroup | None = None) -> Path | None:
    """The newest checkpoint that is as it was written: rank 0 lists them, all ranks read."""
    told = [checkpoints_in(folder), [*folder.glob("step-*.damaged")]]
    dist.broadcast_object_list(told, src=0)  # rank 0 decides for all
    for path in told[0]:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, damage_in(path), group)
        if errors := [error for error in found if isinstance(error, OSError)]:
            raise ValueError(f"{path} cannot be read, and may be whole: {errors[0]}")
        if not any(found):
            return path
        if dist.get_rank() == 0:
            log.error("%s is damaged: %s. The one before is used.", path, max(found))
            again = f".{time.time_ns():x}" if path.with_suffix(".damaged").exists() else ""
            path.rename(path.with_suffix(f"{again}.damaged"))
    if any(told):
        raise ValueError(f"no checkpoint in {folder} is whole. Remove the folder to start anew.")
    return None


def lock(folder: Path) -> None:
    """Keep other runs out until this process ends, however it ends."""
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    for _ in range(10 * LOCK_SECONDS):
        try:
            return fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            time.sleep(0.1)
    raise ValueError(f"another run trains into {folder}. End it, or choose other --checkpoints.")


class Stop:
    """Whether any rank was told to stop. All ranks learn of it at the end of the same step."""

    def __init__(self) -> None:
        self.heard = [0]  # the numbers of the signals that came
        self.parent = os.getppid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self.heard.append(number))

    def ask(self) -> None:
        """At the start of a step: the answer travels while the step computes."""
        if os.getppid() != self.parent:  # torchrun has died
            self.heard.append(signal.SIGTERM)
        self.flag = torch.tensor(self.heard[-1])  # on the CPU, through gloo: no GPU waits for it
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True)

    def answer(self) -> int:
        """The largest number of a signal that came to any rank before it asked, or 0."""
        self.work.wait()
        return int(self.flag)


class Trainer:
    """All that a checkpoint holds, and the step that changes it."""

    def __init__(self, args: Namespace, device: torch.device, shape: Shape, tokens: Tokens):
        self.args, self.device, self.tokens = args, device, tokens
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        same = "steps batch context learning_rate warmup weight_decay clip precision seed"
        self.settings = {name: getattr(args, name) for name in same.split()}
        self.settings |= {"shape": shape._asdict(), "data": tokens.mark}
        self.run = [f"{time.time_ns():x}"]  # this run's name: rank 0's time
        dist.broadcast_object_list(self.run, src=0)
        self.model = build_model(args, shape, device)
        matrices = [weight for weight in self.model.parameters() if weight.ndim > 1]
        norms = [weight for weight in self.model.parameters() if weight.ndim == 1]
        groups = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
        how = {"betas": (0.9, 0.95), "weight_decay": args.weight_decay, "fused": True}
        self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, **how)
        # MFU: 6 per weight of a product, 12 L D T of attention over all keys, none recomputed.
        products = sum(weight.numel() for weight in matrices) - shape.vocab_size * shape.hidden_size
        attention = 12 * shape.num_hidden_layers * shape.hidden_size * args.context
        self.flops = (6 * products + attention) * args.context  # of a sample
        self.reader = ThreadPoolExecutor(1)
        self.step, self.ready = 0, None  # the next step, and its samples, as they are read
        # Saving has a group of its own, since it goes on while the training's is in use.
        self.background = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_SECONDS))
        how = {"use_shared_memory": False, "use_async_staging": False}
        how |= dict.fromkeys(["use_pinned_memory", "use_non_blocking_copy"], device.type == "cuda")
        self.stager = DefaultStager(StagingOptions(**how))
        self.saving, self.saved, self.failed = None, -1, 0  # the save, its step, failures in a row

    def read(self, step: int) -> tuple[torch.Tensor, ...]:
        """This rank's micro-batches of a step: -100, which cross_entropy ignores, fills them up."""
        batch = self.args.batch
        rows_NT = torch.full((math.ceil(batch / self.ranks), self.args.context + 1), -100)
        for row, place in enumerate(range(self.rank, batch, self.ranks)):  # dealt like cards
            rows_NT[row] = self.tokens.sample(step * batch + place)
        return rows_NT.split(self.args.micro_batch)

    def train_step(self) -> torch.Tensor:
        """Take the next step; return this rank's share of its loss."""
        now = self.ready or self.reader.submit(self.read, self.step)
        self.ready = self.reader.submit(self.read, self.step + 1)
        total = 0
        for rows_BT in now.result():
            rows_BT = rows_BT.to(self.device)
            logits_NV = self.model(rows_BT[:, :-1].clamp(min=0)).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits_NV, rows_BT[:, 1:].flatten(), reduction="sum")
            loss = loss / (self.args.batch * self.args.context)  # whatever the number of ranks
            (loss * self.ranks).backward()  # FSDP2 takes the mean over them
            total += loss.detach()
        self.update()
        self.step += 1
        return total

    def update(self) -> None:
        """Change the weights, unless the gradients' norm is not finite: then all ranks raise."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.norm = norm.full_tensor().item()  # over all ranks; the host waits for the GPU here
        if not math.isfinite(self.norm):
            self.finish_saving()
            told = f"step {self.step + 1}: the gradients' norm is {self.norm:g}. It was not taken"
            raise FloatingPointError(f"{told} or saved: look at its data and the learning rate")
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rate(self) -> float:
        args = self.args
        if self.step < args.warmup:
            return args.learning_rate * (self.step + 1) / args.warmup
        share = (self.step - args.warmup) / max(1, args.steps - args.warmup)
        return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * share))

    def state(self) -> dict[str, dict]:
        """This rank's shards, by names that do not depend on the number of ranks."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model_state_dict": weights, "optim_state_dict": moments}

    def save(self) -> None:
        """Copy the state and begin to write it, as soon as the one before is written."""
        self.finish_saving()
        if self.saved == self.step:  # SIGTERM came right after it
            return
        progress = {"step": self.step, "samples": self.step * self.args.batch, "ranks": self.ranks}
        progress["settings"] = self.settings
        path = self.args.checkpoints / f"step-{self.step:09}"
        how = {"process_group": self.background, "async_stager": self.stager}
        how["storage_writer"] = Publisher(path, self.run[0], progress, self.args)
        self.saving, self.saved = dcp.async_save(self.state(), **how), self.step

    def finish_saving(self, must: bool = False) -> None:
        """Where there was no room, go on without; raise at the third failure, or if `must`."""
        saving, self.saving = self.saving, None
        try:
            if saving:
                saving.result()
                self.failed = 0
        except dcp.CheckpointException as error:  # on all ranks, whichever failed
            self.failed += 1
            told = f"SAVE FAILED, {self.failed} in a row, and {MOST_FAILED} end the run"
            log.critical("%s: step %d could not be saved: %s", told, self.saved, error)
            self.saved = -1
            if self.rank == 0:
                remove_leftovers(self.args.checkpoints)  # the room is needed
            reasons = {getattr(reason, "errno", None) for reason, _ in error.failures.values()}
            if must or reasons - NO_ROOM or self.failed == MOST_FAILED:
                raise

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, whatever number of ranks wrote it."""
        folder = self.args.checkpoints
        if path := newest_whole(folder, self.background):
            progress = json.loads((path / PROGRESS).read_text())
            for name, was in progress["settings"].items():
                if (now := self.settings[name]) != was:
                    told = f"{folder} was written with {name} {was}, this run has {now}"
                    raise ValueError(f"{told}: take the same, or other --checkpoints")
            state = self.state()  # what is loaded goes into its tensors
            dcp.load(state, checkpoint_id=path, process_group=self.background)
            set_state_dict(self.model, self.optimizer, **state)
            self.step = self.saved = progress["step"]
            told = f"written by {progress['ranks']} ranks"
            log.info("goes on after step %d of %d, %s", self.step, self.args.steps, told)
        else:
            if self.args.weights:
                reader = dcp.HuggingFaceStorageReader(str(self.args.weights))
                how = {"storage_reader": reader, "process_group": self.background}
                dcp.load(self.model.state_dict(), **how)
            log.info("no checkpoint in %s: begins with step 1", folder)
        self.told = (time.perf_counter(), self.step)
        self.writer = None
        if SummaryWriter and self.rank == 0:  # what was written beyond this step is taken back
            self.writer = SummaryWriter(folder / "tensorboard", purge_step=self.step + 1)

    def report(self, loss: torch.Tensor) -> None:
        """A line of the log, and TensorBoard's scalars: loss and norm are this step's alone."""
        memory = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)  # Linux: kB
        if self.device.type == "cuda":
            memory = torch.tensor(torch.cuda.max_memory_reserved() / 1e9)
            torch.cuda.reset_peak_memory_stats()
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        dist.all_reduce(loss)
        since, step = self.told
        self.told = (time.perf_counter(), self.step)
        speed = (self.step - step) * self.args.batch / (self.told[0] - since)
        each = speed * self.flops / self.ranks / 1e12
        said = {"loss": loss.item(), "norm": self.norm, "tokens/s": speed * self.args.context}
        said |= {"TFLOP/s per rank": each, "GB": memory.item()}
        if self.args.peak:
            said["MFU"] = each / self.args.peak
        told = ", ".join(f"{name} {value:.4g}" for name, value in said.items())
        log.info("step %d of %d, %s", self.step, self.args.steps, told)
        if self.writer:
            for name, value in said.items():
                self.writer.add_scalar(name, value, self.step)
            self.writer.flush()  # os._exit would lose them


def own_device(precision: str) -> torch.device:
    """This rank's GPU, or the CPU. Raises ValueError if there are GPUs and it can have none."""
    gpus, ranks = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    no_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # it is the user who wants none
    if no_gpus or not (gpus or os.path.exists("/dev/nvidia0")):
        return torch.device("cpu")
    if gpus < ranks:
        told = f"{socket.gethostname()} has {ranks} ranks, and torch sees {gpus} GPUs"
        raise ValueError(f"{told}: as many ranks as GPUs, or CUDA_VISIBLE_DEVICES= for the CPU")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if precision == "bfloat16" and not torch.cuda.is_bf16_supported(False):
        told = f"{torch.cuda.get_device_name(device)} on {socket.gethostname()} emulates bfloat16"
        raise ValueError(f"{told}, slowly (GPUs have it from Ampere on): take --precision float32")
    return device


def join(args: Namespace) -> tuple[torch.device, Shape, Tokens]:
    """Do what init_process_group does, unless a rank has a reason against it: then all raise."""
    how = {"timeout": timedelta(seconds=args.timeout)}
    store, rank, world_size = next(dist.rendezvous("env://", **how))
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # forget dead ranks: see ddp_surviving.py
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    elif shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        raise ValueError(f"--max-restarts on several nodes: export {name}=1 on each")
    try:
        if torch.__version__ < "2.11.0a0":
            raise ValueError(f"Publisher needs torch 2.11 or newer, this is {torch.__version__}")
        device = own_device(args.precision)
        shape = shape_of(args, world_size)
        tokens = Tokens(args, shape)
        told = vars(args) | {"device": device.type, "shape": shape, "tokens": tokens.mark}
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        told = {"why not": f"rank {rank} on {socket.gethostname()}: {error}"}
    # Before any collective, which would wait for a rank that gave up.
    store.set(f"rank {rank}", json.dumps(told, default=str))
    every = store.multi_get([f"rank {other}" for other in range(world_size)])  # waits for all
    every = [json.loads(one) for one in every]
    if reasons := [one["why not"] for one in every if "why not" in one]:
        raise ValueError(reasons[0])
    gpus = [one["device"] for one in every].count("cuda")
    if gpus not in (0, world_size):
        few = f"{gpus} of {world_size} ranks have a GPU, the other nodes have none"
        raise ValueError(f"{few}: CUDA_VISIBLE_DEVICES= on every node if it is to be the CPU")
    if other := [name for name in told if len({str(one[name]) for one in every}) > 1]:
        raise ValueError(f"ranks were given different values of {', '.join(other)}")
    how |= {"rank": rank, "world_size": world_size, "device_id": device if gpus else None}
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", store=store, **how)
    return device, shape, tokens


def run(trainer: Trainer, stop: Stop) -> None:
    """Train to the end, or until a signal comes."""
    args = trainer.args
    while trainer.step < args.steps:
        stop.ask()
        loss = trainer.train_step()
        number = stop.answer()
        step = trainer.step
        last = step == args.steps
        if step % args.log_every == 0 or last:
            trainer.report(loss)
        if number or last or step % args.save_every == 0:
            trainer.save()
        if number or last:
            trainer.finish_saving(must=last)
        if number and not last:
            dist.barrier()  # torchrun ends all ranks when the first has left
            log.warning("leaves after step %d: %s", step, signal.Signals(number).name)
            dist.destroy_process_group()
            sys.exit(128 + number)  # not 0, which would mean that training is over


@record  # an exception reaches torchrun's report, with the rank that had it first
def main() -> None:
    args = read_flags()
    stop = Stop()
    device, *inputs = join(args)
    rank = dist.get_rank()
    told = f"%(asctime)s {socket.gethostname()} [rank {rank}] %(message)s"
    logging.basicConfig(format=told, level="WARNING" if rank else "INFO", stream=sys.stdout)
    if rank == 0:
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        lock(args.checkpoints)
        remove_leftovers(args.checkpoints)
        shutil.rmtree(f"{args.export}.tmp", ignore_errors=True)
    log.info("%d ranks on %s", dist.get_world_size(), "GPUs" if device.type == "cuda" else "CPUs")
    trainer = Trainer(args, device, *inputs)
    trainer.resume()
    run(trainer, stop)
    if args.export:
        export(trainer.model, args.export, trainer.background)
    trainer.stager.close()
    dist.barrier()  # gloo's threads are done with the last gradients: else an exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (Exception, dcp.CheckpointException):
        traceback.print_exc()
        os._exit(1)  # at once: a tidy end would wait for ranks that are gone
