"""A custom FFCV operation: what compiled code cannot see
======================================================

**Question.** A loop that was compiled needs something that changes between epochs, such as the
epoch itself for a random crop. How does the new value get there, by numba alone and inside FFCV?

This lesson is optional. Its idea needs numba alone; half of its rows need FFCV.

**Predict**, and write it down before you run. The epoch is set three times:

    code is made   epoch = 0   `numba.njit` is applied to a function, or FFCV's loader is made
    first run      epoch = 1
    second run     epoch = 2   which epoch does it see: 0, 1 or 2?

1. A compiled function reads the epoch from a global variable. What does its second run see?
2. It reads it from a global NumPy array of 64 bytes, which is changed in place. What does it see?
3. A method copies the epoch into a local variable, and returns an inner function that uses this
   variable. The method runs once, when the code is made; the inner function is compiled. (So it is
   with an operation of FFCV.) What does the inner function see in its second run?
4. The method runs anew before each run, and what it returns is compiled anew. (FFCV's
   `recompile=True`) What does the second run see?

**Run.**

    torchrun --standalone --nproc-per-node=4 12_own_ffcv_operation.py    # a rank per GPU, else gloo
    python 12_own_ffcv_operation.py                                      # the same, started for you

One node; one rank is enough, and several read a share each. Not run on several GPUs. numba comes
with `pip install -e '.[data]'`. FFCV needs the Debian packages of packages.txt, then
`pip install -e '.[ffcv]'`; without it 1 to 4 are answered by numba alone.

**Try.** In `AskingEpoch.generate_code` write `epoch = self.epoch` above the inner function, and use
`epoch` in it: which claims fail? In `check_numba` let the loop run over `(0, 1, 2)`: which claims
fail now?

**Before.** data-loading/02_beton_file.py: the file, and a loader's buffers.
data-loading/16_random_states_of_numba.py: random numbers as a function of seed, epoch and sample.

**Next.** data-loading/06_tokens.py: no pictures, but text.
"""

import argparse
import contextlib
import ctypes
import gc
import io
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

numba = None
Loader = None
Operation = object  # what the classes below derive from where there is no FFCV
if "RANK" in os.environ or WORLD_SIZE > 1:  # a launcher needs none of it
    os.environ["NUMBA_OPT"] = "0"  # compile quickly: nothing here is timed
    with contextlib.suppress(ImportError):  # the extra [data]
        import numba
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv import writer as ffcv_writer
        from ffcv.fields import IntField
        from ffcv.fields.decoders import IntDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.pipeline.compiler import Compiler
        from ffcv.pipeline.operation import Operation
        from ffcv.transforms import ToTensor
        from ffcv.writer import DatasetWriter

N = 64  # samples
BATCH = 8  # samples in a batch: B of them, with one number each, are an array batch_B1

# %% [markdown]
# ## 1. Compiled code keeps what it saw
#
# Say you write an augmentation that crops pictures at places that depend on the epoch. If its
# compiled code does not see the epoch change, every epoch has the same crops. No error tells; only
# the test accuracy is worse than it should be.
#
# numba compiles a function when it is **called for the first time** (or when `njit` is applied, if
# that is given the types of the arguments). What the function uses from outside, a global variable
# or one of an enclosing function, is a **constant** of the machine code from then on. So are the
# contents of an array of at most a million bytes. (Of a larger one, or one with gaps, the code
# keeps the address. Do not rely on it.) What comes in as an argument is read in each call. This is
# the idea of the lesson: **what changes must be an argument.**
#
# (A later call with arguments of other types compiles the function once more, for these, and keeps
# what it sees then.)
#
# Here are four ways to tell a function the epoch:

# %%
EPOCH = 0
ARRAY = np.zeros(8, np.int64)  # 64 bytes


def read_global() -> int:
    return EPOCH


def read_array() -> int:
    return ARRAY[0]


def read_argument(epoch: int) -> int:
    return epoch


def make_reader() -> Callable:
    """Return a function that has the epoch of now as a variable of an enclosing function."""
    epoch = EPOCH

    def read_enclosing() -> int:
        return epoch

    return read_enclosing


def set_epoch(epoch: int) -> None:
    global EPOCH
    EPOCH = epoch
    ARRAY[0] = epoch


# %% [markdown]
# ## 2. Inside FFCV
#
# A **pipeline** of FFCV is a list of **operations** that a batch goes through:
#
#     pages ──decoder──> numbers ──our operation──> numbers ──ToTensor──> the batch that you get
#
# An operation has two methods. FFCV calls both when the loader is made.
#
# - `declare_state_and_memory` says what comes out, whether FFCV is to compile the function
#   (`jit_mode`), and which memory it needs to write to (here None: it writes over the batch).
# - `generate_code` returns the function that FFCV calls for each batch. It is our `make_reader`.
#
# A real operation would crop pictures at places that it mixes from epoch and sample
# (data-loading/16). Ours writes the epoch itself into the batch, so one sees what it saw.


# %%
def write_epoch(batch_B1: np.ndarray, epoch: int) -> np.ndarray:
    """The loop that is worth compiling. It gets the epoch as an argument."""
    for i in range(len(batch_B1)):
        batch_B1[i] = epoch
    return batch_B1


class FrozenEpoch(Operation):
    """The mistake: all compiled, for the epoch that `self.epoch` was when the loader was made."""

    epoch = 0

    def declare_state_and_memory(self, previous_state: object) -> tuple:
        return replace(previous_state, jit_mode=True), None

    def generate_code(self) -> Callable:
        write = Compiler.compile(write_epoch)
        epoch = self.epoch  # the function is compiled, and gets no `self`

        def operation(batch_B1: np.ndarray, _: None) -> np.ndarray:
            return write(batch_B1, epoch)

        return operation


# %% [markdown]
# With `jit_mode=False` FFCV calls the function as it stands, in Python, once per batch. It may read
# `self`, and hand what it finds to the loop, which stays machine code. This adds one call in Python
# per batch. Nothing else is lost: FFCV 1.0.2 compiles each operation by itself and calls one after
# the other from Python, whatever their mode (`codegen_stage` in ffcv/pipeline/graph.py).


# %%
class AskingEpoch(Operation):
    """Python reads `self.epoch` for each batch, and the compiled loop gets it as an argument."""

    epoch = 0

    def declare_state_and_memory(self, previous_state: object) -> tuple:
        return replace(previous_state, jit_mode=False), None

    def generate_code(self) -> Callable:
        write = Compiler.compile(write_epoch)

        def operation(batch_B1: np.ndarray, _: None) -> np.ndarray:
            return write(batch_B1, self.epoch)

        return operation


# %% [markdown]
# The trainer sets the epoch before each one, as it does for a `DistributedSampler`.


# %%
def open_loader(path: Path, operation: "Operation", recompile: bool = False) -> "Loader":
    """Return FFCV's loader of this rank's share of the samples."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    pipelines = {"number": [IntDecoder(), operation, ToTensor()]}
    options = {"order": OrderOption.RANDOM, "distributed": True, "seed": 0, "drop_last": False}
    options |= {"num_workers": 1, "recompile": recompile}
    return Loader(str(path), BATCH, pipelines=pipelines, **options)


def run_epoch(loader: "Loader", operation: "Operation", epoch: int) -> float:
    """Return the epoch that stands in all batches of this rank; nan if there is not one."""
    operation.epoch = epoch
    seen = set()
    for (batch_B1,) in loader:
        seen.update(batch_B1.flatten().tolist())
    return seen.pop() if len(seen) == 1 else math.nan


# %% [markdown]
# ## 3. How it is measured
#
# A sample of the file is its own number, 0 to 63, which the operation must have replaced. One node
# is asked for, since all ranks read one file.


# %%
def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


# %% [markdown]
# First numba alone. Four readers are made in epoch 0, and called in epochs 1 and 2: of the global,
# of the array, of an enclosing function, and of an argument. A fifth, `made_anew`, is made in each
# epoch before it is called. What counts is what they see in epoch 2. Then the operations, each
# through epochs 1 and 2.


# %%
def check_numba() -> None:
    """Claim which epoch compiled functions see in their second call."""
    if numba is None:
        blocked("what compiled functions see", needs="numba: pip install -e '.[data]'")
        return
    by_global = numba.njit(read_global)
    by_array = numba.njit(read_array)
    by_enclosing = numba.njit(make_reader())
    by_argument = numba.njit(read_argument)
    for epoch in (1, 2):
        set_epoch(epoch)
        made_anew = numba.njit(make_reader())
        seen = [by_global(), by_array(), by_enclosing(), made_anew(), by_argument(EPOCH)]
    claim("epoch seen in a global", 1, seen[0], question=1)
    claim("epoch seen in an array of 64 bytes", 1, seen[1], question=2)
    claim("epoch seen in an enclosing function", 0, seen[2], question=3)
    claim("epoch seen in a function that is made anew", 2, seen[3], question=4)
    claim("epoch seen in an argument", 2, seen[4])


def epochs_seen(path: Path, operation: "Operation", recompile: bool = False) -> list[float]:
    """Run an epoch set to 1 and one set to 2; return which epoch stands in the batches of each."""
    loader = open_loader(path, operation, recompile)
    return [run_epoch(loader, operation, epoch) for epoch in (1, 2)]


def check_operations(path: Path) -> None:
    """Claim which epoch the operations write, in a first and a second epoch."""
    first, second = epochs_seen(path, FrozenEpoch())
    claim("FrozenEpoch, set to 1: epoch in the batches", 0, first)
    claim("FrozenEpoch, set to 2: epoch in the batches", 0, second, question=3)
    seen = epochs_seen(path, FrozenEpoch(), recompile=True) if RANK == 0 else None
    first, second = from_rank_0(seen)  # one rank is enough: to compile takes long
    claim("recompiled, set to 2: epoch in the batches", 2, second, question=4)
    first, second = epochs_seen(path, AskingEpoch())
    claim("AskingEpoch, set to 1: epoch in the batches", 1, first)
    claim("AskingEpoch, set to 2: epoch in the batches", 2, second)


# %% [markdown]
# ## What you should have seen
#
# 1. Epoch 1. Not 0: `njit` alone compiles nothing. Not 2: the first call made a constant of it.
# 2. Epoch 1: the array's contents were copied into the code by the first call.
# 3. Epoch 0. The local variable was set when the method ran, long before numba compiled: in FFCV,
#    when the loader was made. Setting the attribute changes nothing, and nothing says so.
# 4. Epoch 2: the method is called anew, and what it returns is compiled anew. It is a remedy, at
#    the price of compiling before every epoch. (We time neither remedy.)
#
# **The better remedy** is `AskingEpoch`. It sees epoch 2 as well, and compiles once: Python reads
# the attribute after the trainer has set it, and passes a number.
#
# **Try.** With the local variable both rows of AskingEpoch show 0 and fail, though its function is
# Python: what counts is when the value is *read*. With epoch 0 first, the rows of questions 1 and 2
# show 0 and fail. One call to warm up, before the epoch is set, is enough to freeze it.
#
# **When.** Write an operation of your own if a second run must make the same crops: FFCV's own
# augmentations do not (data-loading/16). If nothing changes between epochs, `jit_mode=True` is
# enough. What works on whole batches on the GPU (`ToDevice`, then a module of PyTorch's) needs none
# of it. Hand over one number per batch, as here, and draw the numbers of single samples from it in
# compiled code. If it needs to know which samples it has, give the function an attribute
# `with_indices`, and it gets their numbers; with `is_parallel` threads share the loop.
#
# **Where it bites.** A trainer that forgets to set the epoch gets a frozen one from `AskingEpoch`
# as well. With `njit(cache=True)` the code goes to disk with a global's value in it, and keeps that
# over *runs*. An exception in an operation ends FFCV's thread, and your loop waits for its next
# batch forever: try the function on arrays of your own first.
#
# **In other compilers.** `jax.jit` keeps what it saw in a global. A CUDA graph replays kernels with
# the numbers they were captured with. `torch.compile` guards what it saw, and compiles again when
# that has changed.
#
# **On GPUs** the batch is made on the cores all the same; where there is a GPU, FFCV pins the
# memory that an operation asks for, so that `ToDevice` copies from it without waiting. Every rank
# compiles for itself, at the same time, however many there are.

# %% [markdown]
# You need not read how the file is written: by FFCV's own writer, and so that a writer that is
# killed leaves nothing in /dev/shm.


# %%
class Nameless(shared_memory.SharedMemory):
    """Shared memory that forked processes inherit, and that no kill leaves behind by its name."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)
        super().unlink()

    def unlink(self) -> None:
        """Nothing: its name went when it came."""


def write_numbers(path: Path) -> None:
    """Write N samples into a file: each is its own number."""
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writer inherits the samples
    ffcv_writer.shared_memory = SimpleNamespace(SharedMemory=Nameless)
    writer = DatasetWriter(str(path), {"number": IntField()}, page_size=2**21, num_workers=1)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        writer.from_indexed_dataset([(number,) for number in range(N)])
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a folder, got {WORLD_SIZE} ranks on several")
    setup()
    check_numba()
    if Loader is None:
        blocked("what FFCV's operations see", needs="FFCV: pip install -e '.[ffcv]'")
        finish()
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    here = Path(errors).parent if errors else None
    with tempfile.TemporaryDirectory(prefix="numbers-", dir=here) as folder:
        path = Path(from_rank_0(folder)) / "numbers.beton"
        if RANK == 0:
            write_numbers(path)
        dist.barrier()
        check_operations(path)
        dist.barrier()  # the folder goes when all have read it
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
