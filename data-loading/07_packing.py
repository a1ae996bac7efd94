"""Packing: documents that share a row, and attention that keeps them apart
========================================================================

**Question.** Most documents are shorter than a row of the batch, so several share one. How does the
model treat each as if it stood alone, and what becomes of a document that a row's end cuts?

**Predict**, and write it down before you run. Documents of 5, 3 and 9 tokens, each with the token
END as its last, fill rows of 12: four tokens of the third stand in the first row, five in the next.

1. In how many query-key pairs of the first row does causal attention look from one document into
   another?
2. How many of the first row's 12 tokens have a loss?
3. Each document shall get the logits that it gets alone. Attention is kept inside documents. Do the
   positions have to begin at 0 again in each? Suppose they do: could attention be left causal?
4. In how many query-key pairs would the third document look at itself if it stood alone in one row,
   and does not, since it is cut?

**Run.**

    torchrun --standalone --nproc-per-node=4 07_packing.py    # NCCL on 4 GPUs, else gloo
    python 07_packing.py                                      # the same, started for you

Not run on several GPUs.

**Try.** In `positions_of` count on with `torch.arange(start, end)`: which claims fail? In
`document_mask` leave out `.tril()`: which fail now?

**Before.** data-loading/06_tokens.py: windows, and ranks that cut one global order.

**Next.** data-loading/13_token_weights.py: how each token of a step gets the same weight.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B rows of T tokens, D model width, K head width, V different tokens.
T = 128
ROWS = 24  # B
VOCABULARY = 256
END = 0  # the token after each document
SEED = 0

# %% [markdown]
# ## 1. Where documents begin: the mask and the positions follow from it
#
# One document per row, filled up with padding, would waste much of the row: documents of 5, 3 and 4
# tokens in three rows of 12 leave 24 of 36 places empty. In **packed** rows documents stand one
# behind the other, and one that does not fit is cut and goes on in the next row. No place is
# wasted. But plain causal attention lets a token look at everything before it in its row, including
# documents that have nothing to do with its own. The **document mask** allows attention only inside
# a document, and with it the positions begin at 0 again in each:
#
#     tokens       a a a a 0 b b 0 c c c c          mask      1 . . . . . . . . . . .
#     position     0 1 2 3 4 0 1 2 0 1 2 3                    1 1 . . . . . . . . . .
#     bounds       0         5     8       12                 1 1 1 . . . . . . . . .
#                                                             1 1 1 1 . . . . . . . .
#     A row is one query, a column one key.                   1 1 1 1 1 . . . . . . .
#     Causal attention alone would fill the                   . . . . . 1 . . . . . .
#     whole lower triangle.                                   . . . . . 1 1 . . . . .
#                                                             . . . . . 1 1 1 . . . .
#     next row     c c c c 0 ...                              . . . . . . . . 1 . . .
#     position     0 1 2 3 4 ...                              . . . . . . . . 1 1 . .
#                                                             . . . . . . . . 1 1 1 .
#                                                             . . . . . . . . 1 1 1 1
#
# The bounds, where documents begin and where the row ends, say it all.


# %%
def document_bounds(x_T: torch.Tensor) -> list[int]:
    """Where the documents of a row begin, and at the end the row's length."""
    after_end = torch.nonzero(x_T == END).flatten() + 1
    return sorted({0, *after_end.tolist(), len(x_T)})


def document_mask(bounds: list[int]) -> torch.Tensor:
    """Return mask_TT: whether a query (row) may look at a key (column)."""
    mask_TT = torch.zeros(bounds[-1], bounds[-1], dtype=torch.bool)
    for start, end in pairwise(bounds):
        mask_TT[start:end, start:end] = True
    return mask_TT.tril()  # causal: a token never looks ahead


def positions_of(bounds: list[int]) -> torch.Tensor:
    """Return position_T, which begins at 0 in each document."""
    return torch.cat([torch.arange(end - start) for start, end in pairwise(bounds)])


# %% [markdown]
# ## 2. Without a mask: the bounds are enough
#
# A mask that is written out has T x T elements per row, and attention computes all of them, the
# forbidden ones too. The bounds alone are enough: attend to each document by itself, and the work
# falls from T squared to the sum of the squares of the documents' lengths. Variable-length kernels
# do this in one launch for all rows of a batch, laid end to end, and take the bounds as cumulative
# lengths (`cu_seqlens` in FlashAttention, `cu_seq_q` in PyTorch's `varlen_attn`) and the longest
# length. FlexAttention takes the rule of the mask as a function and skips the blocks in which it
# holds nowhere. This loop is what they compute:


# %%
def attention_by_bounds(
    q_TK: torch.Tensor, k_TK: torch.Tensor, v_TK: torch.Tensor, bounds: list[int]
) -> torch.Tensor:
    """Return causal attention inside each document, without a mask."""
    parts = []
    for start, end in pairwise(bounds):
        one = slice(start, end)
        y_1LK = F.scaled_dot_product_attention(
            q_TK[None, one], k_TK[None, one], v_TK[None, one], is_causal=True
        )
        parts.append(y_1LK[0])
    return torch.cat(parts)


# %% [markdown]
# ## 3. A model, and a mask over the losses
#
# The model is as small as it can be and still make the mistake: one layer of attention, with one
# head. A row needs one more mask, over its losses. The token after END is the first of another
# document, which nobody can guess, so at END there is no loss: `valid_BT` is False.


# %%
class TinyLM(nn.Module):
    """Embeddings, one layer of attention, a head: tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, D: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, D)
        self.position = nn.Embedding(T, D)
        self.qkv = nn.Linear(D, 3 * D)
        self.head = nn.Linear(D, VOCABULARY)

    def forward(
        self, x_BT: torch.Tensor, position_BT: torch.Tensor, mask_BTT: torch.Tensor
    ) -> torch.Tensor:
        h_BTD = self.token(x_BT) + self.position(position_BT)
        q_BTD, k_BTD, v_BTD = self.qkv(h_BTD).chunk(3, dim=-1)
        y_BTD = F.scaled_dot_product_attention(q_BTD, k_BTD, v_BTD, attn_mask=mask_BTT)
        return self.head(h_BTD + y_BTD)


class Batch(NamedTuple):
    """Rows of packed documents, as the model and the loss need them."""

    x_BT: torch.Tensor
    y_BT: torch.Tensor  # the target of each token: the next one
    position_BT: torch.Tensor
    mask_BTT: torch.Tensor
    valid_BT: torch.Tensor  # where there is a loss


def pack(tokens: torch.Tensor, device: torch.device) -> Batch:
    """Make a batch of rows (B, T + 1), whose last token is only a target."""
    x_BT = tokens[:, :-1]
    bounds = [document_bounds(x_T) for x_T in x_BT]
    position_BT = torch.stack([positions_of(one) for one in bounds])
    mask_BTT = torch.stack([document_mask(one) for one in bounds])
    parts = (x_BT, tokens[:, 1:], position_BT, mask_BTT, x_BT != END)
    return Batch(*(part.to(device) for part in parts))


# %% [markdown]
# **What a cut costs.** The rest of a cut document begins its row at position 0,
# without what came before. It is treated as a document of its own, which it is not: each of
# its tokens misses all keys of the part in the row before.
# If L1 tokens stand before the cut and L2 after it, L1 x L2 pairs are lost. A row's end cuts one
# document at most, so long rows cut few. Data loaders that avoid it choose documents that fit
# together (best fit) and pad what remains of a row.
#
# Rows are independent of each other, so ranks need nothing from one another: each makes the bounds
# of the rows that it reads. Only rows that are themselves cut over ranks (context parallelism,
# parallelism/10) have to tell each other their bounds.

# %% [markdown]
# ## 4. How it is measured
#
# The tokens are random, and so are the ends of documents, one in 32: what is claimed depends on
# where documents end, and not on what they say. Everything is in double precision, so a mistake
# cannot pass for rounding. Each rank checks a row of its own, and the worst rank is shown.


# %%
# Every sum has at most T terms, in another order; there are some ten, one after the other.
TOLERANCE = 10 * T * 2**-53


def draw_rows() -> torch.Tensor:
    """Return packed rows (B, T + 1), the same on every rank."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(1, VOCABULARY, [ROWS * T + 1], generator=generator)
    tokens[torch.rand(ROWS * T + 1, generator=generator) < 1 / 32] = END
    return tokens.unfold(0, T + 1, T)  # each takes along the first token of the next


def new_model(device: torch.device) -> TinyLM:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(SEED)
    return TinyLM().to(device, torch.float64)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


# %% [markdown]
# **The pairs.** With the identity as values, attention returns its own weights; those above zero
# are the pairs that it looks at. What a cut loses is counted as the difference between the pairs of
# the third document in one long row and those of its two parts.


# %%
def check_pairs() -> None:
    """Claim which pairs attention looks at, and which tokens have a loss, in the rows of 12."""
    lengths = [5, 3, 4]
    across = 12 * 13 // 2 - sum(length * (length + 1) // 2 for length in lengths)
    seen = pairs_across(torch.ones(12, 12, dtype=torch.bool).tril(), lengths)
    claim("causal mask: pairs across documents", across, seen, question=1)
    stream = torch.tensor([7, 7, 7, 7, END, 8, 8, END, *[9] * 8, END, *[6] * 8])
    batch = pack(stream[:25].unfold(0, 13, 12), torch.device("cpu"))
    seen = pairs_across(batch.mask_BTT[0], lengths)
    claim("document mask: pairs across documents", 0, seen)
    claim("tokens that have a loss", 12 - 2, batch.valid_BT[0].sum(), question=2)
    alone = pack(stream[None, 8:18], torch.device("cpu"))
    third = pairs_seen(alone.mask_BTT[0]).sum()
    parts = pairs_seen(batch.mask_BTT[0])[8:].sum() + pairs_seen(batch.mask_BTT[1])[:5].sum()
    claim("cut document: pairs lost", 4 * 5, third - parts, question=4)


def pairs_seen(mask_TT: torch.Tensor) -> torch.Tensor:
    """Return seen_TT: the query-key pairs to which attention gives a weight."""
    q_1TK, k_1TK = torch.randn(2, 1, len(mask_TT), 8)
    identity_1TT = torch.eye(len(mask_TT))[None]
    weight_1TT = F.scaled_dot_product_attention(q_1TK, k_1TK, identity_1TT, attn_mask=mask_TT)
    return weight_1TT[0] > 0


def pairs_across(mask_TT: torch.Tensor, lengths: list[int]) -> int:
    """Count the pairs of different documents among those that attention looks at."""
    document_T = torch.repeat_interleave(torch.tensor(lengths))  # 0 0 0 0 0 1 1 1 2 2 2 2
    across_TT = document_T[:, None] != document_T[None, :]
    return (pairs_seen(mask_TT) & across_TT).sum().item()


# %% [markdown]
# **The logits** of a document that is packed into a row must be those that the model gives for this
# document alone; for the rest of a cut document they cannot be, and for no other.


# %%
def check_logits(rows: torch.Tensor, device: torch.device) -> None:
    """Claim which packed documents get the logits that they get alone."""
    row = rows[RANK % ROWS : RANK % ROWS + 1]
    batch = pack(row, device)
    bounds = document_bounds(batch.x_BT[0])
    start, end = max(pairwise(bounds[1:]), key=lambda span: span[1] - span[0])  # not the first
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    run_on_T = torch.arange(T, device=device)
    model = new_model(device)
    expected = alone(model, batch.x_BT[0, start:end])

    def error_of(way: Batch) -> float:
        packed = model(way.x_BT, way.position_BT, way.mask_BTT)[0, start:end]
        return relative_error(packed, expected)

    claim("packed / alone: error of the logits", 0, error_of(batch), atol=TOLERANCE)
    error = error_of(batch._replace(position_BT=run_on_T))
    claim("positions that run on: error, at least", 0.01, error, ">=", question=3)
    error = error_of(batch._replace(mask_BTT=causal_TT))
    claim("without the mask: error, at least", 0.01, error, ">=", question=3)


def alone(model: TinyLM, document_L: torch.Tensor) -> torch.Tensor:
    """Return logits_LV of one document in a row of its own."""
    L = len(document_L)
    position_L = torch.arange(L, device=document_L.device)
    causal_LL = torch.ones(L, L, dtype=torch.bool, device=document_L.device).tril()
    return model(document_L[None], position_L, causal_LL)[0]


def check_cuts(rows: torch.Tensor, device: torch.device) -> None:
    """Claim how many documents of all rows get other logits than alone: those that a row cuts."""
    stream = rows[:, :-1].flatten().to(device)
    model = new_model(device)
    batch = pack(rows, device)
    logits_SV = model(batch.x_BT, batch.position_BT, batch.mask_BTT).flatten(0, 1)
    changed = 0
    cut = 0
    for start, end in pairwise(document_bounds(stream)):
        if end - start <= T:  # the others do not fit into any row
            error = relative_error(logits_SV[start:end], alone(model, stream[start:end]))
            changed += error > 0.01
            cut += start // T != (end - 1) // T  # it begins in one row and ends in another
    claim("documents that get other logits than alone", cut, changed)


# %% [markdown]
# **The work.** PyTorch's counter adds up the FLOPs of all products: with a mask those of T x T
# pairs, by the bounds those of each document's own square.


# %%
def check_bounds(rows: torch.Tensor, device: torch.device) -> None:
    """Claim that the bounds give the same attention as the mask, for how much of the work."""
    row = rows[RANK % ROWS : RANK % ROWS + 1]
    batch = pack(row, device)
    bounds = document_bounds(batch.x_BT[0])
    torch.manual_seed(SEED)
    q_TK, k_TK, v_TK = torch.randn(3, T, 8, dtype=torch.float64, device=device)
    with FlopCounterMode(display=False) as whole:
        by_mask = F.scaled_dot_product_attention(
            q_TK[None], k_TK[None], v_TK[None], attn_mask=batch.mask_BTT
        )
    with FlopCounterMode(display=False) as parts:
        by_bounds = attention_by_bounds(q_TK, k_TK, v_TK, bounds)
    error = relative_error(by_bounds, by_mask[0])
    claim("bounds / mask: error of the attention", 0, error, atol=TOLERANCE)
    squares = sum((end - start) ** 2 for start, end in pairwise(bounds))
    ratio = parts.get_total_flops() / whole.get_total_flops()
    claim("bounds / mask: FLOPs of the attention", squares / T**2, ratio, atol=1e-12)


# %% [markdown]
# ## What you should have seen
#
# 1. In 47 of 78: the triangle has 12 x 13 / 2 pairs, and 15 + 6 + 10 of them lie inside a document.
#    With the document mask in none.
# 2. Ten. The targets of the two END tokens are first tokens of other documents. The last token of
#    the row has a loss, since the document goes on and its next token is known.
# 3. They have to, with positions that are learned, as here: a token at place 7 of its document
#    otherwise gets the vector of another place. And attention cannot be left causal: then the
#    documents before it change the result. With both a packed document gets its own logits, to
#    rounding. Rotary embeddings see only differences of positions, so with them the mask is enough
#    (in bfloat16, large positions lose digits).
# 4. In 20: each of the five tokens in the next row misses the four before the cut. No mask can give
#    them back, and of all documents of the batch exactly those that a row cuts get other logits
#    than alone.
#
# **Try.** With positions that run on, a packed document no longer gets the logits that it gets
# alone, and of the documents of the batch nearly all are changed instead of the cut ones. Without
# `.tril()` tokens look ahead: the same two claims fail, the attention differs from the one by the
# bounds, and a cut seems to lose 40 pairs instead of 20.
#
# **On GPUs**, never write the mask out: with T = 8,192 it has 67 million elements per row. A
# variable-length kernel needs the bounds and the longest length, and its work grows with the
# squares of the documents' lengths instead of the square of the row's. Shapes that change with
# every batch make `torch.compile` compile again, unless the bounds are padded to a fixed number.
#
# **When.** Packing whenever documents are much shorter than a row. The mask matters most where rows
# are long and documents many; the authors of Llama 3 found little effect in standard pretraining
# and an important one in training on very long rows. Best fit instead of cuts where documents are
# about as long as a row, and where a cut hides what an answer rests on.
#
# **In other systems.** Section 1 is Megatron-LM's `--reset-attention-mask` and
# `--reset-position-ids`, the losses that END does not have `--eod-mask-loss`; all three are off
# unless you ask for them.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    rows = draw_rows()
    check_pairs()
    check_logits(rows, device)
    check_cuts(rows, device)
    check_bounds(rows, device)
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
