"""The plumbing's canonical copy: every lesson ends with what stands below the first cell mark.

`make plumbing` writes it into every lesson again; a test holds the copies identical.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import re
import signal
import sys
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1")))


def main() -> None:
    command_line()
    launch()
    setup()
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
    if "RANK" in os.environ or WORLD_SIZE > 1:
        return  # this is a rank already: torchrun or srun has started it
    import tempfile

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    gpus = torch.cuda.device_count()
    ranks = max(size for size in world_sizes if size <= gpus) if gpus > 1 else 4
    if ranks < gpus:
        print(f"{ranks} of {gpus} GPUs: the largest number that this lesson can use")
    os.environ["LAUNCHER"] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    logging.disable()  # the rank that fails says why
    arguments = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", *sys.argv]
    try:
        with tempfile.TemporaryDirectory() as logs:  # the one that torchrun makes would stay
            torchrun([f"--log-dir={logs}", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {failure.signal_name()}" if failure.exitcode < 0 else 1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit()


def setup() -> torch.device:
    """Join the process group: NCCL if every rank has a GPU of its own, else gloo on all ranks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the launcher
    parent = str(os.getppid())
    if os.environ.pop("LAUNCHER", parent) != parent:
        sys.exit(1)  # it was killed before that line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    if "RANK" not in os.environ:
        name_ranks_as_torchrun_does()
    torch.set_float32_matmul_precision("highest")  # some images make TF32 the default
    patience = timedelta(minutes=2)
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    device, backend = choose_device(store)
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if local_ranks < WORLD_SIZE:
        lead_gloo_to_other_nodes(store)
    group = {"rank": RANK, "world_size": WORLD_SIZE, "store": store, "timeout": patience}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **group)
    else:
        dist.init_process_group("gloo", **group)
    sys.excepthook = crash  # only now: init_process_group sets one of its own
    print0(f"{WORLD_SIZE} ranks, {backend}, torch {torch.__version__}\n")
    print0(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
    return device


def choose_device(store: dist.Store) -> tuple[torch.device, str]:
    """Agree on one backend before anybody joins; return this rank's device, and what to print."""
    visible = torch.cuda.device_count()
    mine = "none"
    if visible > 0:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % visible)
        gpu = torch.cuda.get_device_properties(device)
        mine = str(gpu.uuid)  # not the index: each rank may be shown another GPU as its only one
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            mine += f", shared by rank {RANK}"  # NCCL allows that from 2.30
    own = set(tell_all(store, "GPU", mine)) - {"none"}
    if len(own) < WORLD_SIZE:
        why = f"NCCL needs {WORLD_SIZE} GPUs, these ranks see {len(own)}"
        return torch.device("cpu"), f"gloo ({why})"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return device, f"NCCL {version} on {gpu.name}"


def lead_gloo_to_other_nodes(store: dist.Store) -> None:
    """Say on which network gloo listens: it would ask for the host's name, often 127.0.1.1."""
    import psutil

    here = address_towards(os.environ["MASTER_ADDR"])
    for address in tell_all(store, "address", here):
        if here.startswith("127.") and not address.startswith("127."):
            here = address_towards(address)  # on the first node, whose name means itself
    for network, addresses in psutil.net_if_addrs().items():
        if here in [one.address for one in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", network)


def address_towards(host: str) -> str:
    """Return this node's address on the way to the host."""
    import socket

    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(there)  # sends nothing: the kernel looks up the route
        return way.getsockname()[0]


def tell_all(store: dist.Store, what: str, value: str) -> list[str]:
    """Return every rank's `value`, in order, through the store: there is no group yet."""
    store.set(f"{what} of {RANK}", value)
    values = store.multi_get([f"{what} of {rank}" for rank in range(WORLD_SIZE)])
    return [value.decode() for value in values]


def name_ranks_as_torchrun_does() -> None:
    """Under `srun`, one task per rank: set the variables that torchrun would have set."""
    slurm = os.environ
    first_node = re.match(r"([^,[]+)(?:\[(\d+))?", slurm["SLURM_STEP_NODELIST"])  # of "gpu[03-07]"
    tasks_here = re.match(r"\d+", slurm["SLURM_STEP_TASKS_PER_NODE"])  # of "4(x2)"
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(WORLD_SIZE)}
    os.environ |= {"LOCAL_RANK": slurm["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": tasks_here[0]}
    os.environ["MASTER_ADDR"] = first_node[1] + (first_node[2] or "")
    os.environ["MASTER_PORT"] = str(20_000 + int(slurm["SLURM_JOB_ID"]) % 10_000)


def print0(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def refuse(rule: str) -> None:
    """End before the first collective with one message, from rank 0: rule, value, remedy."""
    if RANK != 0:
        time.sleep(30)  # the launcher ends us meanwhile
    sys.exit(f"{sys.argv[0]}: {rule}")


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
    pairs = [(float(predicted), float(measured), float(atol))]
    if dist.is_initialized():
        pairs = pairs * WORLD_SIZE
        dist.all_gather_object(pairs, pairs[0])
    errors = []
    for p, m, slack in pairs:
        error = {"=": abs(m - p), "<=": m - p, ">=": p - m}[sign] - slack
        errors.append(math.inf if math.isnan(error) else error)
    worst = errors.index(max(errors)) if rank is None else rank
    verdict = "PASS" if errors[worst] <= 0 else "FAIL"
    p, m, slack = pairs[worst]
    between = f"{sign:>2} {readable(p)}" + (f" ±{slack:.2g}" if slack else "")
    mark = f"{question}." if question else ""
    print0(f"  {verdict:7} {mark:2} {text:50} {between:22} {readable(m):>11}")
    if verdict == "FAIL":
        print0(f"{'':13}off by {m - p:.3g} on rank {worst}")
    row = {"claim": text, "verdict": verdict, "sign": sign, "rank": worst, "slack": slack}
    row |= {"predicted": p, "measured": m if math.isfinite(m) else str(m)}  # JSON knows no NaN
    ledger.append(row | {"question": question, "kind": kind, "timed": timed, "varies": varies})


def readable(x: float) -> str:
    """Whole numbers in full, others to six digits."""
    return f"{x:,.0f}" if x.is_integer() and abs(x) < 1e12 else f"{x:,.6g}"


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    print0(f"  BLOCKED    {text:50} needs {needs}")
    ledger.append({"claim": text, "verdict": "BLOCKED", "needs": needs})


def crash(*error: object) -> None:
    """Leave without ceremony, since peers may be stuck. The first rank that fails says why."""
    first = dist.distributed_c10d._get_default_store().add("crashes", 1) == 1
    time.sleep(1 if first else 30)  # the launcher ends us meanwhile, if a peer's death is the cause
    print(f"rank {RANK}:", file=sys.stderr)
    sys.__excepthook__(*error)
    os._exit(1)


def finish() -> None:
    """Write the ledger where LESSON_JSON says; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    verdicts = Counter(row["verdict"] for row in ledger)
    print0(f"\n  {verdicts['PASS']} PASS, {verdicts['FAIL']} FAIL, {verdicts['BLOCKED']} BLOCKED")
    if set(verdicts) == {"BLOCKED"}:
        print0("  Nothing could be checked: BLOCKED rows say what they need.")
    if RANK == 0 and "LESSON_JSON" in os.environ:
        about = {"ranks": WORLD_SIZE, "torch": torch.__version__, "python": sys.version}
        about["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        about |= {"cpus": os.cpu_count(), "date": time.strftime("%F"), "ledger": ledger}
        with open(os.environ["LESSON_JSON"], "w") as file:
            json.dump(about, file, indent=1)
    code = int(verdicts["FAIL"] > 0 or verdicts["PASS"] == 0)
    if __name__ == "__main__":
        os._exit(code)  # threads of a group that something still holds can abort a plain exit
    sys.exit(code)


if __name__ == "__main__":
    main()
