"""FFCV's file, its orders and its memory; and training on it
=============================================================

**Question.** What lies in a .beton file, what does an order cost in pages and memory, and is DDP
trained on FFCV's batches the same model?

**Predict.** FFCV hands you batch after batch: in how many buffers? Four ranks read one file: how
many copies of it are in memory? And how many if each rank keeps its own pages?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_ffcv_file_order_memory.py   # GPUs, if 4
    python 02_ffcv_file_order_memory.py                    # the same; else gloo on the CPU

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 20 s) that NumPy alone reads the file;
that batches live in 5 buffers; that a random order opens all pages at once and a quasi-random one
few; that ranks share one page cache; and that DDP on FFCV's batches reaches the DataLoader's loss.

FFCV needs the Debian packages of packages.txt, then `pip install -e '.[ffcv]'`. One node. Not run
on several GPUs.

**Next.** exercises/12_beton; then README.md, for the papers and the systems to read from here.
"""

import argparse
import ctypes
import gc
import itertools
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

os.environ["NUMBA_OPT"] = "0"  # compile quickly: nothing here is timed
try:  # the extra [ffcv]
    int(os.environ["RANK"])  # KeyError: a launcher needs none of it
    from ffcv.fields import IntField, RGBImageField, decoders
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor
    from ffcv.traversal_order import QuasiRandom, Random, Sequential
    from ffcv.writer import DatasetWriter
except (ImportError, KeyError):
    Loader = None

WORLD_SIZES = range(1, 65)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {}
IMAGES, TEST, HEIGHT, WIDTH, PAGE = 128, 32, 160, 240, 2**21  # 18 raw images a page of 2 MiB
EPOCHS, BATCH, SEED = 10, 32, 0  # the batch is over all ranks


def main(options: argparse.Namespace) -> None:
    one_node = int(os.environ["LOCAL_WORLD_SIZE"]) == WORLD_SIZE
    require(one_node, f"needs one node, got {WORLD_SIZE} ranks on several; they share a file")
    device = setup()
    shards_cover_all()
    if Loader is None:
        for text in "the file", "buffers", "orders", "memory", "training":
            blocked(text, "a system library: see --help")
        finish()
    with tempfile.TemporaryDirectory() as folder:  # rank 0's counts
        path = Path(on_rank_0(lambda: write(Path(folder))))
        table = what_is_in_the_file(path)
        loader = open_beton(path, 8)
        batches_are_written_over(loader)
        orders(loader, table)
        one_page_cache(path, device)  # which `loader` has mapped
        quasi_random_on_ranks(path, table, device)
        the_same_training(path, device)
        dist.barrier()  # the folder goes when all have read it
    finish()


# %% [markdown]
# ## 1. The file
#
# A .beton file is a header of 24 bytes; 1,041 bytes for each field; a row of metadata for each
# sample, aligned as a C compiler would; from the next page on, pages of samples, none across two
# pages; at the end, which sample lies where. Little-endian throughout, so NumPy reads it. The
# pictures are crops of scikit-learn's two photographs, each upright or upside down.

# %%
HEADER = np.dtype("<u2, <u2, <u4, <u8, <u8")
HEADER.names = "version", "fields", "page", "samples", "end"
FIELD = [("type", "u1"), ("name", "S16"), ("arguments", "V1024")]
PICTURE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("start", "<u8")])
ROW = np.dtype([("picture", PICTURE), ("label", "<i8"), ("number", "<i8")], align=True)
ENTRY = [("sample", "<u8"), ("start", "<u8"), ("size", "<u8")]


class Pictures:
    """(pixels, label, number) of each sample; the same on every rank."""

    def __init__(self, count: int, seed: int) -> None:
        from sklearn.datasets import load_sample_images

        self.photographs, self.count, self.seed = load_sample_images().images, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[np.ndarray, int, int]:
        random, label = np.random.default_rng([self.seed, number]), int(number) % 4
        y, x = random.integers(427 - 2 * HEIGHT), random.integers(640 - 2 * WIDTH)
        crop = self.photographs[label % 2][y:, x:][: 2 * HEIGHT : 2, : 2 * WIDTH : 2]
        return np.ascontiguousarray(crop if label < 2 else crop[::-1]), label, int(number)


def on_rank_0(function: Callable) -> object:
    """Call it on rank 0 while the others wait; hand everybody what it returned."""
    box = [function() if RANK == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def write(folder: Path) -> str:
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit what they need
    fields = {"image": RGBImageField("raw"), "label": IntField(), "number": IntField()}
    path = str(folder / "raw.beton")
    writer = DatasetWriter(path, fields, page_size=PAGE, num_workers=1)
    writer.from_indexed_dataset(Pictures(IMAGES, SEED), chunksize=16)
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets
    return path


def parse(path: Path) -> tuple[np.void, np.ndarray, np.ndarray, np.ndarray]:
    """Header, fields, rows and allocation table of a .beton file of ROWs, without FFCV."""
    data = np.fromfile(path, np.uint8)
    header = data[:24].view(HEADER)[0]
    at = 24 + 1041 * int(header["fields"])
    rows = data[at : at + ROW.itemsize * int(header["samples"])].view(ROW)
    return header, data[24:at].view(FIELD), rows, data[int(header["end"]) :].view(ENTRY)


def what_is_in_the_file(path: Path) -> np.ndarray:
    """The page of each sample, read from the allocation table."""
    header, fields, rows, entries = parse(path)
    names = ", ".join(f"{f['name'].decode()} (type {f['type']})" for f in fields)
    say(f"  version {header['version']}; {names}; a row of {ROW.itemsize} bytes")
    each = HEIGHT * WIDTH * 3
    pages = -(-IMAGES // (PAGE // each))
    claim("samples, says the header", IMAGES, header["samples"])
    due = (1 + pages) * PAGE + 24 * IMAGES
    claim("bytes: a page of head, the pages, 24 a sample", due, path.stat().st_size)
    wrong, data, pictures = 0, np.memmap(path, np.uint8, "r"), Pictures(IMAGES, SEED)
    for row in rows:
        pixels, label, _ = pictures[row["number"]]
        start = int(row["picture"]["start"])
        wrong += (data[start : start + each] != pixels.ravel()).sum() + (label != row["label"])
    claim("pixels and labels that NumPy reads wrong", 0, wrong)
    page_of = np.zeros(IMAGES, int)
    page_of[entries["sample"]] = entries["start"] // PAGE
    return page_of


# %% [markdown]
# ## 2. Buffers
#
# A Loader turns its pipelines into Python source, one function a stage, which numba compiles when
# the first batch is made (the wait before epoch 1). Those functions write into buffers that were
# there before: `batches_ahead` (3) wait in a queue, one is made, one is yours. The sixth batch
# therefore overwrites the first: keep a batch and you keep its memory, not its values.
#
# A dropped loader is garbage in a cycle, so Python frees it whenever it collects. If that happens
# while numba compiles another, numba prints "Exception ignored in ... KeyError" from a finalizer.
# It harms nothing; `gc.collect()` before a new loader avoids it.


# %%
def open_beton(path: Path, batch: int, order: str = "RANDOM", **rest: object) -> "Loader":
    """Whole images, labels and numbers; one thread, for the ranks share the cores."""
    gc.collect()  # see above
    pipelines = {name: [decoders.IntDecoder(), ToTensor()] for name in ("label", "number")}
    pipelines["image"] = [decoders.SimpleRGBImageDecoder(), ToTensor()]
    rest = {"seed": SEED, "num_workers": 1, "drop_last": False} | rest
    return Loader(str(path), batch, order=OrderOption[order], pipelines=pipelines, **rest)


def batches_are_written_over(loader: "Loader") -> None:
    addresses, kept = zip(*((x.data_ptr(), number) for x, _, number in loader), strict=True)
    claim("buffers that an epoch's batches live in", loader.batches_ahead + 2, len(set(addresses)))
    seen = len(set(torch.cat(kept).flatten().tolist()))
    claim("samples left in batches kept, not cloned", 8 * len(set(addresses)), seen)


# %% [markdown]
# ## 3. Orders
#
# RANDOM shuffles samples, so soon every page is in use, which costs nothing while the file is in
# memory. QUASI_RANDOM shuffles pages and draws from twice the batch size of them (the paper says
# from as many as the batch size). A page is open from its first sample to its last.


# %%
def open_at_once(batches: Iterable, ahead: int = 0) -> int:
    """The most pages open, if batches come from these pages; each opens `ahead` batches early."""
    first, last = {}, {}
    for i, pages in enumerate(batches):
        for page in pages:
            first.setdefault(page, max(0, i - ahead))
            last[page] = i
    return max(sum(first[p] <= i <= last[p] for p in first) for i in range(i + 1))


def orders(loader: "Loader", page_of: np.ndarray) -> None:
    pages, batch = len(set(page_of)), loader.batch_size
    loader.batch_size = 1
    for order, sign, due in (Sequential, "=", 1), (QuasiRandom, "=", 2), (Random, ">=", pages - 1):
        found = open_at_once([[page] for page in page_of[order(loader).sample_order(0)]])
        claim(f"{order.__name__}, batch 1: pages open, of {pages}", due, found, sign)
    loader.batch_size = batch


# %% [markdown]
# ## 4. One page cache
#
# `os_cache=True`, the default, maps the file: the kernel holds it once, whoever reads it. RSS
# counts such memory in full for every process, PSS divides it by those who share it.


# %%
def one_page_cache(path: Path, device: torch.device) -> None:
    dist.barrier()  # all have read everything, and their maps stay
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    of_file = "\n".join(m for m in maps if str(path) in m.partition("\n")[0])
    for what, due in ("Rss", WORLD_SIZE), ("Pss", 1):
        kib = sum(map(int, re.findall(rf"^{what}: +(\d+)", of_file, re.M)))
        held = torch.tensor(1024.0 * kib, device=device)
        dist.all_reduce(held)
        copies = held / (path.stat().st_size - PAGE)  # the head is read otherwise
        claim(f"{what} of all ranks' maps / bytes of the pages", due, copies, rtol=0.1)


# %% [markdown]
# ## 5. QUASI_RANDOM on several ranks, and a cache of one's own
#
# FFCV has not implemented it there. What it needs is easily given: each rank opens the file as if
# alone, with a share of neighbouring samples as `indices`. -N mod n samples come twice, as before.
# The price: shares stay the same in every epoch, only the order within one changes.
#
# `os_cache=False` is for files larger than memory: a process reads pages into memory of its own,
# where each stays from three batches before its first sample to its last. Nothing is shared.


# %%
def shard(rank: int, ranks: int, samples: int) -> np.ndarray:
    """Equally many neighbouring samples for each rank; the last ones begin again at 0."""
    each = -(-samples // ranks)
    return np.arange(rank * each, (rank + 1) * each) % samples


def shards_cover_all() -> None:
    off = 0
    for samples, ranks in itertools.product(range(1, 40), range(1, 9)):
        count = np.bincount(np.concatenate([shard(r, ranks, samples) for r in range(ranks)]))
        off += len(count) != samples or min(count) == 0 or sum(count - 1) != -samples % ranks
    claim("shares of 1 to 39 samples that miss or add some", 0, off)


def quasi_random_on_ranks(path: Path, page_of: np.ndarray, device: torch.device) -> None:
    answer = "accepts it"
    try:
        open_beton(path, 4, "QUASI_RANDOM", distributed=True)
    except NotImplementedError as error:
        answer = str(error)
    say(f"  FFCV on QUASI_RANDOM with distributed=True: {answer}")
    claim("QUASI_RANDOM refused with distributed=True", 1, "Not implemented" in answer)
    mine = shard(RANK, WORLD_SIZE, IMAGES)
    epoch = iter(open_beton(path, 4, "QUASI_RANDOM", indices=mine, os_cache=False))
    held, order = epoch.memory_context.memory.nbytes, epoch.order
    batches = [page_of[order[i : i + 4]] for i in range(0, len(order), 4)]
    numbers = torch.cat([number.flatten().clone() for *_, number in epoch])
    count = torch.bincount(numbers.to(device), minlength=IMAGES)
    dist.all_reduce(count)
    claim("samples that an epoch of shares leaves out", 0, (count == 0).sum())
    claim("samples that come twice: -N mod n", -IMAGES % WORLD_SIZE, (count - 1).sum())
    claim("pages that a rank reads", len(set(page_of[mine])), len(set(page_of[numbers])))
    claim("bytes in a rank's own cache", PAGE * open_at_once(batches, ahead=3), held)


# %% [markdown]
# ## 6. The same training
#
# Raw pixels are the dataset's own and `distributed=True` is DistributedSampler's order. Without
# random augmentation FFCV's batches are therefore the DataLoader's to the bit, and so is all that
# DDP makes of them. (With FFCV's crops or JPEGs they are the same in distribution only.)


# %%
def train(epoch_of: Callable, test: list, device: torch.device) -> tuple[float, float]:
    """Test loss and accuracy after EPOCHS."""
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(450, 64), nn.ReLU())
    net = net.append(nn.Linear(64, 4)).to(device)
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        for x_BHWC, y_B, _ in epoch_of(epoch):
            optimizer.zero_grad()
            logits = ddp(to_floats(x_BHWC, device))
            nn.functional.cross_entropy(logits, y_B.flatten().to(device)).backward()
            optimizer.step()
    with torch.no_grad():
        logits, y_B = net(to_floats(test[0], device)), test[1].to(device)
    loss = nn.functional.cross_entropy(logits, y_B).item()
    return loss, (logits.argmax(1) == y_B).double().mean().item()


def to_floats(x_BHWC: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x_BHWC.to(device).permute(0, 3, 1, 2).contiguous().float() / 255


def the_same_training(path: Path, device: torch.device) -> None:
    batch = max(1, BATCH // WORLD_SIZE)
    loader = open_beton(path, batch, distributed=True)
    sampler = DistributedSampler(Pictures(IMAGES, SEED), seed=SEED)
    torchs = DataLoader(sampler.dataset, batch, sampler=sampler)
    test = next(iter(DataLoader(Pictures(TEST, SEED + 1), TEST)))

    def from_torch(epoch: int) -> Iterable:
        sampler.set_epoch(epoch)
        return torchs

    def from_ffcv(epoch: int) -> Iterable:
        loader.next_epoch = epoch  # which FFCV counts up by itself
        return loader

    pairs = zip(from_ffcv(1), from_torch(1), strict=True)
    claim("pixels that differ, epoch 1", 0, sum((a[0] != b[0]).sum() for a, b in pairs))
    ours, theirs = train(from_ffcv, test, device), train(from_torch, test, device)
    claim("test loss, FFCV's minus the DataLoader's", 0, ours[0] - theirs[0])
    claim("test accuracy, FFCV's minus the DataLoader's", 0, ours[1] - theirs[1])
    claim("test accuracy", 0.9, ours[1], ">=")


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
