"""FFCV's .beton file and its buffers: where an image's bytes lie
==============================================================

**Question.** Where do the bytes of an image lie: in the .beton file, and in memory once FFCV has
made a batch of it?

**Predict**, and write it down before you run.

1. 130 images of 160 x 240 pixels are stored raw, three bytes per pixel, in pages of 2 MiB, none
   across two pages. How many pages do they need?
2. FFCV writes its batches into five buffers, in turn. You keep all 17 batches of an epoch, 8
   samples each, in a list. How many different samples are in it when the epoch has ended?
3. FFCV reads an epoch of this rank's images, and so does a DataLoader with the same seed. In how
   many bytes do their batches differ?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_beton_file.py   # one rank per GPU, else gloo
    python 02_beton_file.py                                     # the same, started for you

Not run on several GPUs. One node. FFCV needs the Debian packages of packages.txt, then `pip install
-e '.[ffcv]'`.

**Try.** In `keep_an_epoch` clone what is kept (`index.clone()`): which claim fails? Leave out
`sampler.set_epoch(epoch)`: which claim fails now, and would the loss curve of a training tell you?

**Before.** data-loading/01_ffcv_distributed_optimization.py: what FFCV is for.

**Next.** exercises/12_beton; then data-loading/03_orders_pages_memory.py
"""

import argparse
import contextlib
import ctypes
import gc
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
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

Loader = None
if "RANK" in os.environ or WORLD_SIZE > 1:  # a launcher needs none of it
    os.environ["NUMBA_OPT"] = "0"  # compile quickly: nothing here is timed
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv import writer as ffcv_writer
        from ffcv.fields import IntField, RGBImageField, decoders
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import ToTensor
        from ffcv.writer import DatasetWriter

N = 130  # images, HEIGHT x WIDTH pixels of three bytes
HEIGHT = 160
WIDTH = 240
PAGE = 2**21  # bytes: 2 MiB
SEED = 0

# %% [markdown]
# ## 1. In the file: pages
#
# A folder of a million JPEGs means a million files to open, in an order that changes each epoch.
# FFCV writes them into one file instead, in **pages** of a fixed size, so that a sample is found by
# arithmetic and a page is read as a whole (Leclerc et al., 2023):
#
#     0        24              24 + 1041 f          PAGE                             end
#     ┌────────┬───────────────┬──────────────────┬─┬────────┬────────┬───┬────────┬────────────┐
#     │ header │ f descriptions│ N rows: width,   │ │ page 1 │ page 2 │...│ page k │ allocation │
#     │        │ of the fields │ height, start ...│ │ sample after sample│        │ table      │
#     └────────┴───────────────┴──────────────────┴─┴────────┴────────┴───┴────────┴────────────┘
#                                                    no sample lies in two pages    24 bytes each
#
# The **header** counts fields and samples and says where the allocation table begins. A **row**
# holds what is small (a label, an image's size) itself, and for what is large the position in the
# pages. The four numbers of an image are packed without gaps, 13 bytes in all; the columns of a row
# begin at multiples of 8, so a row has 32 bytes here. The **allocation table** repeats, for each
# sample, where it starts and how many bytes it has. All numbers are little-endian, so NumPy reads
# the whole file with five dtypes and no code of FFCV's.

# %%
HEADER = np.dtype(
    [("version", "<u2"), ("fields", "<u2"), ("page", "<u4"), ("samples", "<u8"), ("table", "<u8")]
)
FIELD = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("start", "<u8")])
ROW = np.dtype([("image", IMAGE), ("label", "<i8"), ("index", "<i8")], align=True)
ENTRY = np.dtype([("sample", "<u8"), ("start", "<u8"), ("size", "<u8")])


def parse(path: Path) -> tuple[np.void, np.ndarray, np.ndarray, np.ndarray]:
    """Return header, fields, rows and allocation table of a .beton file of ROWs, without FFCV."""
    data = np.fromfile(path, np.uint8)
    header = data[: HEADER.itemsize].view(HEADER)[0]
    end_of_fields = HEADER.itemsize + FIELD.itemsize * int(header["fields"])
    end_of_rows = end_of_fields + ROW.itemsize * int(header["samples"])
    fields = data[HEADER.itemsize : end_of_fields].view(FIELD)
    rows = data[end_of_fields:end_of_rows].view(ROW)
    return header, fields, rows, data[int(header["table"]) :].view(ENTRY)


def pixels_of(data: np.ndarray, row: np.void) -> np.ndarray:
    """Return the pixels (H, W, 3) of one raw image in the bytes of a .beton file."""
    start = int(row["image"]["start"])
    height = int(row["image"]["height"])
    width = int(row["image"]["width"])
    return data[start : start + height * width * 3].reshape(height, width, 3)


# %% [markdown]
# ## 2. In memory: buffers that are used again
#
# To read the file, each field gets a **pipeline**: a decoder, then operations. The first batch is
# slow, since numba compiles a function for each operation then. All of them write into memory that
# was allocated before: `batches_ahead` batches (3 by default) wait in a queue, one is being made,
# and one is yours. So batches lie in five buffers:
#
#     batch       0   1   2   3   4   5   6   7  ...
#     buffer      0   1   2   3   4   0   1   2  ...      batch 5 overwrites batch 0
#
# That saves an allocation per batch, and it is a trap: keep a batch and you keep its memory, not
# its values. If you need it later, clone it. A copy to a GPU is a clone as well, but one with
# `non_blocking=True` only when it is done: until then FFCV may write over what is being copied.


# %%
def open_beton(path: Path, batch_size: int, order: str = "RANDOM", **options: object) -> "Loader":
    """Return FFCV's loader of whole images, labels and indices, with one thread per rank."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    pipelines = {
        "image": [decoders.SimpleRGBImageDecoder(), ToTensor()],
        "label": [decoders.IntDecoder(), ToTensor()],
        "index": [decoders.IntDecoder(), ToTensor()],
    }
    options = {"seed": SEED, "num_workers": 1, "drop_last": False} | options
    return Loader(str(path), batch_size, order=OrderOption[order], pipelines=pipelines, **options)


def keep_an_epoch(loader: "Loader") -> tuple[set[int], list[torch.Tensor]]:
    """Return the addresses of an epoch's batches, and the indices as they were handed out."""
    addresses = set()
    kept = []
    for image_BHWC, _, index in loader:
        addresses.add(image_BHWC.data_ptr())
        kept.append(index)
    return addresses, kept


# %% [markdown]
# ## 3. The same bytes as a DataLoader's
#
# Are the right bytes in these buffers, in the right order? `distributed=True` lets torch's
# `DistributedSampler` choose each rank's samples, shuffled anew for each epoch; FFCV counts the
# epochs by itself. Raw pixels are the dataset's own, and nothing here is augmented at random. So
# FFCV's batches should be those of a `DataLoader` with the same sampler, to the bit. With JPEGs,
# which FFCV may encode again, or with random crops, they would agree in distribution only.


# %%
def batches_of_both(path: Path, epoch: int) -> Iterator[tuple]:
    """Yield FFCV's batch and the DataLoader's of this rank's share of an epoch, in pairs."""
    loader = open_beton(path, batch_size=8, distributed=True)
    loader.next_epoch = epoch  # which FFCV counts up by itself
    sampler = DistributedSampler(Images(N, SEED), seed=SEED)
    sampler.set_epoch(epoch)
    yield from zip(loader, DataLoader(sampler.dataset, 8, sampler=sampler), strict=True)


# %% [markdown]
# ## 4. How it is measured
#
# Rank 0 writes the file into a temporary folder, and all ranks read it. The images are crops of two
# photographs. FFCV writes anything that has a length and items, one field per member of an item. It
# does so by processes that exchange memory under a name in /dev/shm, where a kill would leave it;
# `Nameless` takes its place, which they inherit by a fork.


# %%
class Images:
    """(pixels, label, index) of each image, the same on every rank.

    The images are crops of the two photographs that scikit-learn ships, half of them upside down;
    the label says which photograph it is, and which way up.
    """

    def __init__(self, count: int, seed: int) -> None:
        from sklearn.datasets import load_sample_images

        self.photographs = load_sample_images().images  # two of 427 x 640 pixels
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        random = np.random.default_rng([self.seed, index])
        label = int(index) % 4
        y = random.integers(427 - 2 * HEIGHT)
        x = random.integers(640 - 2 * WIDTH)
        crop_HWC = self.photographs[label % 2][y:, x:][: 2 * HEIGHT : 2, : 2 * WIDTH : 2]
        if label >= 2:
            crop_HWC = crop_HWC[::-1]
        return np.ascontiguousarray(crop_HWC), label, int(index)


class Nameless(shared_memory.SharedMemory):
    """Shared memory that forked processes inherit, and that no kill leaves behind by its name."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)
        super().unlink()

    def unlink(self) -> None:
        """Nothing: its name went when it came."""


def write_beton(path: Path) -> None:
    """Write N images as raw pixels, with label and index, by FFCV's own writer."""
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit what they need
    ffcv_writer.shared_memory = SimpleNamespace(SharedMemory=Nameless)
    fields = {"image": RGBImageField("raw"), "label": IntField(), "index": IntField()}
    writer = DatasetWriter(str(path), fields, page_size=PAGE, num_workers=1)
    writer.from_indexed_dataset(Images(N, SEED), chunksize=16)
    for process in multiprocessing.active_children():
        process.join()


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


# %% [markdown]
# The length of the file is predicted from the layout, and every byte of a pixel that NumPy finds is
# compared with the image that was handed to the writer. Buffers are told apart by their address in
# memory. Batches of both loaders are compared in epoch 1: epoch 0 would not tell whether the orders
# of later epochs agree.


# %%
def check_file(path: Path) -> None:
    """Claim the file's length, and that NumPy reads every pixel and label out of it."""
    header, fields, rows, _ = parse(path)
    named = [f"{field['name'].decode()} (type {field['type']})" for field in fields]
    print0(f"{'':13}version {header['version']}; {', '.join(named)}; {ROW.itemsize} bytes per row")
    claim("samples, as the header says", N, header["samples"])
    images_per_page = PAGE // (HEIGHT * WIDTH * 3)
    pages = math.ceil(N / images_per_page)
    claim("pages of samples", pages, header["table"] / PAGE - 1, question=1)
    length = PAGE + pages * PAGE + N * ENTRY.itemsize  # header, fields and rows fit one page
    claim("bytes of the file", length, path.stat().st_size)

    data = np.memmap(path, np.uint8, "r")
    images = Images(N, SEED)
    wrong = 0
    for row in rows:
        pixels, label, _ = images[row["index"]]
        wrong += int((pixels_of(data, row) != pixels).sum()) + int(label != row["label"])
    claim("bytes and labels that NumPy reads wrong", 0, wrong)


def check_buffers(path: Path) -> None:
    """Claim in how many buffers an epoch's batches lie, and what is left of them at its end."""
    loader = open_beton(path, batch_size=8)
    addresses, kept = keep_an_epoch(loader)
    claim("buffers of an epoch's batches", 5, len(addresses))
    left = len(set(torch.cat(kept).flatten().tolist()))
    claim("different samples in the batches that were kept", 5 * 8, left, question=2)


def check_batches(path: Path) -> None:
    """Claim that the batches of both loaders are the same."""
    pixels = 0
    others = 0
    for ours, theirs in batches_of_both(path, epoch=1):
        pixels += int((ours[0] != theirs[0]).sum())
        for our_numbers, their_numbers in zip(ours[1:], theirs[1:], strict=True):
            others += int((our_numbers.flatten() != their_numbers).sum())
    claim("bytes of images that differ in epoch 1", 0, pixels, question=3)
    claim("labels and indices that differ in epoch 1", 0, others)


# %% [markdown]
# ## What you should have seen
#
# 1. Eight. An image has 115,200 bytes, so 18 fit a page, and 130 images need 8 pages; the last one
#    holds 4. With the page before them (header, fields, rows) and 24 bytes per sample in the
#    allocation table, the file has 18,877,488 bytes. A full page wastes 1%; with an image slightly
#    larger than half a page it would waste almost half, so pages are chosen many times larger than
#    samples (FFCV's default is 8 MiB). Of this short file a fifth is not images, mostly the first
#    page and the last. NumPy reads every byte: the format needs no library.
# 2. 40 of 130: what five buffers of 8 hold when the epoch ends. The list has 17 tensors, but each
#    shares its memory with two or three others, and shows what was written there last.
# 3. In none: same samples, same order, same bits, labels and indices too. A loader changes when a
#    batch comes, and must not change what is in it.
#
# **Try.** Cloned indices are all 130 different ones, so the claim of question 2 fails: the trap is
# gone. Without `set_epoch` the DataLoader repeats its first order in every epoch, so both rows of
# epoch 1 fail, bytes and labels or indices. A model would learn all the same, and its loss curve
# would tell you nothing.
#
# **When.** Raw pixels, if the file fits the memory of a node: reading is then a copy. JPEGs in the
# .beton, if it does not: they are several times smaller, and each costs a decoding per epoch. A
# plain DataLoader, if decoding in worker processes keeps up with the GPUs, or if the set changes
# often: a .beton is written as a whole (data-loading/08 compares them).
#
# **On GPUs** FFCV pins the buffers, and its `ToDevice` copies a batch on a stream of its own while
# the one before is used. At a thousand ranks the file lies on a network file system, and what
# counts is how many pages are open at once: data-loading/03_orders_pages_memory.py.


# %%
def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a folder, got {WORLD_SIZE} ranks on several")
    setup()
    if Loader is None:
        for text in ("the file", "buffers", "the DataLoader's batches"):
            blocked(text, needs="FFCV: make .venv/all")
        finish()
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    here = Path(errors).parent if errors else None
    with tempfile.TemporaryDirectory(prefix="beton-", dir=here) as folder:
        path = Path(from_rank_0(folder)) / "raw.beton"
        if RANK == 0:
            write_beton(path)
        dist.barrier()
        check_file(path)
        check_buffers(path)
        check_batches(path)
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
