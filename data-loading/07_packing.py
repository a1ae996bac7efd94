"""Packing: which pairs of tokens look at each other, and which tokens count
=========================================================================

**Question.** Most documents are shorter than a row of the batch, so several share one. How does the
model treat each as if it stood alone, and how do n ranks give each token of a step the same weight?

**Predict**, and write it down before you run. Documents of 5, 3 and 4 tokens fill a row of 12. The
first two end in the row, each with the token END; the third goes on in the next row.

1. In how many query-key pairs does causal attention look from one document into another?
2. How many of the 12 tokens have a loss?
3. Each document shall get the logits that it gets alone. Attention is kept inside documents. Do the
   positions have to begin at 0 again in each? Suppose they do: could attention be left causal?
4. On rank 0, 20 tokens per row have a loss; on each other rank 60 have one. Each rank takes the
   mean over its own tokens, and DDP averages the gradients. All have equally many rows. How many
   times as much as a token on another rank does a token on rank 0 count?

**Run.**

    torchrun --standalone --nproc-per-node=4 07_packing.py    # NCCL on 4 GPUs, else gloo
    python 07_packing.py                                      # the same, started for you

Not run on several GPUs.

**Try.** In `global_mean` leave out the all-reduce: which claims fail, and would a loss curve have
told you? In `positions_of` count on with `torch.arange(start, end)`: which claim fails now?

**Before.** parallelism/01_data_parallelism_ddp.py: why DDP averages gradients.
data-loading/06_tokens.py: windows, and ranks that cut one global order.

**Next.** data-loading/08_loaders_compared.py: which loader to take.
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
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B rows of T tokens, D model width, V different tokens.
T = 128
BATCH = 24  # rows per step, all ranks together
STEPS = 6
VOCABULARY = 256
END = 0  # the token after each document
SEED = 0
LEARNING_RATE = 0.5

# %% [markdown]
# ## 1. Packed documents: the mask and the positions
#
# One document per row, filled up with padding, would waste much of the row: documents of 5, 3 and 4
# tokens in three rows of 12 leave 24 of 36 places empty. In **packed** rows documents stand one
# behind the other, and one that does not fit is cut and goes on in the next row. No place is
# wasted. But plain causal attention lets a token look at everything before it in its row, including
# documents that have nothing to do with its own. Two things keep documents apart. The **document
# mask** allows attention only inside a document, and the positions begin at 0 again in each:
#
#     tokens       a a a a 0 b b 0 c c c c          mask      1 . . . . . . . . . . .
#     position     0 1 2 3 4 0 1 2 0 1 2 3                    1 1 . . . . . . . . . .
#     bounds       0         5     8       12                 1 1 1 . . . . . . . . .
#                                                             1 1 1 1 . . . . . . . .
#     A row is one query, a column one key.                   1 1 1 1 1 . . . . . . .
#     Causal attention alone would fill the                   . . . . . 1 . . . . . .
#     whole lower triangle.                                   . . . . . 1 1 . . . . .
#                                                             . . . . . 1 1 1 . . . .
#                                                             . . . . . . . . 1 . . .
#                                                             . . . . . . . . 1 1 . .
#                                                             . . . . . . . . 1 1 1 .
#                                                             . . . . . . . . 1 1 1 1
#
# The bounds say it all, and the mask and the positions follow from them.


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
# A mask that is written out has T x T elements per row, and attention computes all of them. The
# bounds alone are enough: attend to each document by itself. FlashAttention's variable-length
# kernels do this in one launch and take the bounds as `cu_seqlens` (PyTorch's `varlen_attn` as
# `cu_seq_q`). This loop is what they compute:


# %%
def attention_by_bounds(
    q_TK: torch.Tensor, k_TK: torch.Tensor, v_TK: torch.Tensor, bounds: list[int]
) -> torch.Tensor:
    """Return causal attention inside each document, without a mask."""
    parts = []
    for start, end in pairwise(bounds):
        one = (x_TK[None, start:end] for x_TK in (q_TK, k_TK, v_TK))
        parts.append(F.scaled_dot_product_attention(*one, is_causal=True)[0])
    return torch.cat(parts)


# %% [markdown]
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
# ## 2. The loss on masked positions: divide by the tokens of all ranks
#
# The loss of a step is the mean over all tokens of the batch that have one. Let rank r hold c_r of
# them. If each rank takes the mean over its own, and DDP averages the gradients, the step follows
# another loss, the **mean of means**:
#
#     wanted             each token counts  1 / (c_1 + ... + c_n)     the same on every rank
#     mean of means      each token counts  1 / (n c_r)               more, the fewer its rank has
#
# The two agree only if all c_r are equal. Ends of documents make them a little unequal; padding,
# and prompts that are masked in fine-tuning, make them very unequal. The remedy costs an all-reduce
# of one integer: divide the *sum* of a rank's losses by the tokens of *all* ranks. DDP divides by n
# afterwards, so multiply by n before.


# %%
def mean_of_means(losses: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The mistake: this rank's mean, for DDP to average."""
    return losses[valid].mean()


def global_mean(losses: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """This rank's part of the mean over all valid tokens of all ranks, times n for DDP."""
    count = valid.sum()
    dist.all_reduce(count)
    return WORLD_SIZE * losses[valid].sum() / count


def token_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return losses_BT, the loss on each token, valid or not."""
    logits_BTV = model(batch.x_BT, batch.position_BT, batch.mask_BTT)
    return F.cross_entropy(logits_BTV.mT, batch.y_BT, reduction="none")


def train(model: TinyLM, tokens: torch.Tensor) -> None:
    """Take SGD steps on all ranks; `tokens` are the rows of all steps, (STEPS, BATCH, T + 1)."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for step in tokens:
        batch = pack(step[RANK::WORLD_SIZE], model.head.weight.device)
        optimizer.zero_grad()
        losses_BT = token_losses(ddp, batch)
        global_mean(losses_BT, batch.valid_BT).backward()
        optimizer.step()


# %% [markdown]
# ## 3. How it is measured
#
# The tokens are random, and so are the ends of documents, one in 32: what is claimed depends on
# where documents end, and not on what they say. All ranks draw the same rows. Everything is in
# double precision, so a mistake cannot pass for rounding.


# %%
# Every sum has at most BATCH T terms, in another order; there are some ten, one after the other.
TOLERANCE = 10 * BATCH * T * 2**-53


def draw_rows() -> torch.Tensor:
    """Return the packed rows of all steps, (STEPS, BATCH, T + 1), the same on every rank."""
    generator = torch.Generator().manual_seed(SEED)
    length = STEPS * BATCH * T + 1
    tokens = torch.randint(1, VOCABULARY, [length], generator=generator)
    tokens[torch.rand(length, generator=generator) < 1 / 32] = END
    rows = tokens.unfold(0, T + 1, T)  # each takes along the first token of the next
    return rows.reshape(STEPS, BATCH, T + 1)


def new_model(device: torch.device) -> TinyLM:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(SEED)
    return TinyLM().to(device, torch.float64)


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def flat(model: TinyLM, what: str) -> torch.Tensor:
    """All of a model's weights ("data") or gradients ("grad") as one vector."""
    return torch.cat([getattr(parameter, what).flatten() for parameter in model.parameters()])


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors, relative to the largest element."""
    return ((ours - expected).abs().max() / expected.abs().max()).item()


# %% [markdown]
# **The pairs.** With the identity as values, attention returns its own weights; those above zero
# are the pairs that it looks at. **The logits** of a document that is packed into a row must be
# those that the model gives for this document alone.


# %%
def check_pairs() -> None:
    """Claim which pairs attention looks at, and which tokens have a loss, in the row of 12."""
    lengths = [5, 3, 4]
    across = 12 * 13 // 2 - sum(length * (length + 1) // 2 for length in lengths)
    seen = pairs_across(torch.ones(12, 12, dtype=torch.bool).tril(), lengths)
    claim("causal mask: pairs across documents", across, seen, question=1)
    row = torch.tensor([[7, 7, 7, 7, END, 8, 8, END, 9, 9, 9, 9, 9]])
    batch = pack(row, torch.device("cpu"))
    seen = pairs_across(batch.mask_BTT[0], lengths)
    claim("document mask: pairs across documents", 0, seen)
    claim("tokens that have a loss", 12 - 2, batch.valid_BT.sum(), question=2)


def pairs_across(mask_TT: torch.Tensor, lengths: list[int]) -> int:
    """Count the query-key pairs of different documents to which attention gives a weight."""
    q_1TK, k_1TK = torch.randn(2, 1, len(mask_TT), 8)
    identity_1TT = torch.eye(len(mask_TT))[None]
    weight_1TT = F.scaled_dot_product_attention(q_1TK, k_1TK, identity_1TT, attn_mask=mask_TT)
    document_T = torch.repeat_interleave(torch.tensor(lengths))  # 0 0 0 0 0 1 1 1 2 2 2 2
    across_TT = document_T[:, None] != document_T[None, :]
    return ((weight_1TT[0] > 0) & across_TT).sum().item()


def check_logits(tokens: torch.Tensor, device: torch.device) -> None:
    """Claim when a packed document gets the logits that it gets alone."""
    batch = pack(tokens[:1], device)
    bounds = document_bounds(batch.x_BT[0])
    start, end = max(pairwise(bounds[1:]), key=lambda span: span[1] - span[0])  # not the first
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    run_on_T = torch.arange(T, device=device)
    length = end - start
    model = new_model(device)
    expected = model(batch.x_BT[:, start:end], run_on_T[:length], causal_TT[:length, :length])

    def error_of(way: Batch) -> float:
        packed = model(way.x_BT, way.position_BT, way.mask_BTT)[:, start:end]
        return relative_error(packed, expected)

    claim("packed / alone: error of the logits", 0, error_of(batch), atol=TOLERANCE)
    error = error_of(batch._replace(position_BT=run_on_T))
    claim("positions that run on: error, at least", 0.01, error, ">=", question=3)
    error = error_of(batch._replace(mask_BTT=causal_TT))
    claim("without the mask: error, at least", 0.01, error, ">=", question=3)

    torch.manual_seed(SEED)
    q_TK, k_TK, v_TK = torch.randn(3, T, 8, dtype=torch.float64, device=device)
    by_mask_TK = F.scaled_dot_product_attention(q_TK, k_TK, v_TK, attn_mask=batch.mask_BTT[0])
    error = relative_error(attention_by_bounds(q_TK, k_TK, v_TK, bounds), by_mask_TK)
    claim("bounds / mask: error of the attention", 0, error, atol=TOLERANCE)


# %% [markdown]
# **The loss.** A loss is the sum of the tokens' losses, each times its weight; so its gradient with
# respect to these losses *is* the weights. The gradient of the model is compared with that of one
# process, which adds up the rows of all ranks one by one.


# %%
def check_loss(tokens: torch.Tensor, device: torch.device) -> None:
    """Claim by either loss how much a token on rank 0 counts, and the gradient of the model."""
    oracle = new_model(device)
    whole = pack(tokens, device)
    add_gradients(oracle, whole._replace(valid_BT=answers_only(range(BATCH), device)))
    batch = pack(tokens[RANK::WORLD_SIZE], device)
    valid_BT = answers_only(range(RANK, BATCH, WORLD_SIZE), device)
    ratios = []
    errors = []
    for loss_of in (mean_of_means, global_mean):
        model = new_model(device)
        ddp = DistributedDataParallel(model)
        losses_BT = token_losses(ddp, batch)
        losses_BT.retain_grad()
        loss_of(losses_BT, valid_BT).backward()
        weights = gather_objects(losses_BT.grad[0, -1].item())
        ratios.append(weights[0] / weights[-1])
        errors.append(relative_error(flat(model, "grad"), flat(oracle, "grad")))
    if WORLD_SIZE == 1:
        blocked("mean of means: weight and gradient", needs="2 ranks")
    else:
        rows = [len(range(rank, BATCH, WORLD_SIZE)) for rank in range(WORLD_SIZE)]
        predicted = 60 * rows[-1] / (20 * rows[0])
        text = "mean of means: weight on rank 0 / on the last"
        claim(text, predicted, ratios[0], atol=1e-12, question=4)
        claim("mean of means: error of the gradient, at least", 0.05, errors[0], ">=")
        claim("global mean: weight on rank 0 / on the last", 1, ratios[1], atol=1e-12)
    claim("global mean: error of the gradient", 0, errors[1], atol=TOLERANCE)
    mean_of_none = mean_of_means(losses_BT, torch.zeros_like(valid_BT))
    claim("no token on a rank: its mean is nan", 1, mean_of_none.isnan())


def answers_only(places: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return valid_BT: the last 20 tokens of the rows that rank 0 takes, the last 60 of others."""
    counts = [20 if place % WORLD_SIZE == 0 else 60 for place in places]
    valid_BT = torch.arange(T) >= T - torch.tensor(counts)[:, None]
    return valid_BT.to(device)


def add_gradients(model: TinyLM, batch: Batch) -> None:
    """In one process: the gradient of the mean over all valid tokens, row by row."""
    count = batch.valid_BT.sum()
    for row in range(len(batch.x_BT)):
        one = Batch(*(part[row : row + 1] for part in batch))
        (token_losses(model, one)[one.valid_BT].sum() / count).backward()


# %% [markdown]
# **The run** as a whole: six steps of SGD on n ranks must give the weights of one process.


# %%
def check_run(tokens: torch.Tensor, device: torch.device) -> None:
    """Train on n ranks; claim the weights against one process's."""
    model = new_model(device)
    train(model, tokens)
    oracle = new_model(device)
    optimizer = torch.optim.SGD(oracle.parameters(), LEARNING_RATE)
    for rows in tokens:
        optimizer.zero_grad()
        add_gradients(oracle, pack(rows, device))
        optimizer.step()
    error = relative_error(flat(model, "data"), flat(oracle, "data"))
    claim("after six steps: error of the weights", 0, error, atol=TOLERANCE)


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
#    rounding. Rotary embeddings see only differences of positions, so with them the mask is enough.
# 4. Three times, 60 / 20. The gradient is wrong and no error is raised; a rank without any valid
#    token would even make it nan. With the count of all ranks every token counts the same, and the
#    gradient is that of one process. If the ranks have unequally many rows, c_r is rows times
#    tokens per row: on 5 ranks the first has five rows, the last four, and 240 / 100 = 2.4.
#
# **Try.** Without the all-reduce the loss is still multiplied by n, so DDP's average is n times the
# mean of means: the weights of the tokens are wrong, and the learning rate is n times as large
# besides. The row of the weights, the gradient and the run fail, on one rank none of them. The loss
# goes down all the same, and its curve tells you nothing. With positions that run on, a packed
# document no longer gets the logits that it gets alone; the loss and the run still agree with one
# process, which makes the same mistake.
#
# **On GPUs**, never write the mask out: with T = 8,192 it has 67 million elements per row.
# `varlen_attn` needs the bounds alone, and its work grows with the squares of the documents'
# lengths instead of the square of the row's. The all-reduce of the count is one integer; issue it
# before the forward pass, from the batch, and its latency is hidden.
#
# **When.** The global mean always: it costs nothing. Packing whenever documents are much shorter
# than a row. The mask matters most where rows are long and documents many; the authors of Llama 3
# found little effect in standard pretraining and an important one in training on very long rows.
#
# **Where it bites.** With gradient accumulation, count the valid tokens of all micro-batches before
# the first backward pass. In fine-tuning only answers have a loss, so the counts of ranks differ
# much more than here.
#
# **In other systems.** Section 1 is Megatron-LM's `--reset-attention-mask`, `--reset-position-ids`
# and `--eod-mask-loss`, section 2 its `--calculate-per-token-loss`, and all four are off unless you
# ask for them. torchtitan's loss is what `global_mean` computes.


# %%
def main() -> None:
    command_line()
    launch(range(1, BATCH + 1))
    if WORLD_SIZE > BATCH:
        refuse(f"a step has {BATCH} rows, got {WORLD_SIZE} ranks; start at most {BATCH}")
    device = setup()
    tokens = draw_rows()
    check_pairs()
    check_logits(tokens[0], device)
    check_loss(tokens[0], device)
    check_run(tokens, device)
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
    how = f"gloo ({local_ranks} ranks and {gpus} GPUs here)"
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
        counted = f"{devices.count(b'cuda')} GPUs for {WORLD_SIZE} ranks"
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
