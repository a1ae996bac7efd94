"""The loss and the embedding against torch's, in one process and on several ranks; broken lines."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/18_vocabulary_parallel.py"
lesson = Lazily(LESSON)


@given(st.lists(st.integers(0, 11), min_size=1), st.integers(0, 3))
def test_local_rows_are_those_of_this_rank(words: list[int], rank: int) -> None:
    local, mine = lesson.local_rows(torch.tensor(words), first=3 * rank, rows=3)
    for word, row, ours in zip(words, local.tolist(), mine.tolist(), strict=True):
        assert ours == (word // 3 == rank)
        assert row == (word % 3 if ours else 0)


def losses(logits: torch.Tensor, words: torch.Tensor, dtype: torch.dtype) -> tuple:
    """This rank's losses and gradient of its logits, each token weighted by its number + 1."""
    changed = load(LESSON)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = logits.chunk(ranks, dim=1)[rank].to(dtype).requires_grad_()
    found = changed.VocabularyParallelLoss.apply(mine, words, rank * mine.shape[1])
    (found * torch.arange(1, len(words) + 1)).sum().backward()
    return found.detach(), mine.grad


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([0.1, 3.0, 300.0]))
def test_loss_and_gradient_are_cross_entropy_s(seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    logits = scale * torch.randn(7, 12, dtype=torch.float64)
    logits[:, 10:] = -torch.inf  # padding: all that rank 3 of 4 has, but for one column
    words = torch.randint(10, [7])
    whole = logits.clone().requires_grad_()
    due = F.cross_entropy(whole, words, reduction="none")
    (due * torch.arange(1, 8)).sum().backward()
    for ranks in (2, 4):
        found = run(losses, ranks, logits, words, torch.float64)
        torch.testing.assert_close(found[-1][0], due.detach(), rtol=1e-12, atol=1e-12)
        gradient = torch.cat([mine for _, mine in found], dim=1)
        torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-12)


def test_a_rank_may_have_padding_alone() -> None:
    logits = torch.zeros(2, 6, dtype=torch.float64)
    logits[:, 4:] = -torch.inf
    for found, _ in run(losses, 3, logits, torch.tensor([0, 3]), torch.float64):
        torch.testing.assert_close(found, torch.full([2], 4.0, dtype=torch.float64).log())


def test_logits_may_be_large_on_every_rank() -> None:
    """By far less than their sum every exponential is 0, and without a maximum infinite."""
    torch.manual_seed(0)
    logits = 300 + torch.randn(5, 12)
    words = torch.tensor([0, 3, 6, 9, 11])
    due = F.cross_entropy(logits, words, reduction="none")
    for found, _ in run(losses, 4, logits, words, torch.float32):
        torch.testing.assert_close(found, due)


NAMES = ("untied", "tied")
LOSSES = {f"{name}: error of the loss" for name in NAMES}
GRADIENTS = {f"{name}: error of the gradients" for name in NAMES}
LOOKED_UP = {"embedding: all-reduces, both ways", "embedding: elements all-reduced / N D"}
NUMBERS = "loss: numbers compared or added, per token"
COUNTED, MASKED = (f"padding {how}: the loss of zeros" for how in ("counted", "masked"))
THOUSAND = "a thousand on rank 0: losses not finite"
SAME, SAME_GRADIENT = (f"loss_parallel: difference of the {what}" for what in ("loss", "gradient"))
MAX = "        dist.all_reduce(most_N, op=dist.ReduceOp.MAX)\n"

TAKEN = "        grad_Nv, local_N, mine_N = ctx.saved_tensors\n"
BACKWARD = "        loss.backward()\n    error"
GATHERED = "DTensor.from_local(theirs_Nv.detach(), mesh, [Shard(1)]).full_tensor()"
LINES = {
    "each rank subtracts its own maximum (Try)": (
        (MAX, ""),
        LOSSES | GRADIENTS | {NUMBERS, SAME, SAME_GRADIENT},
    ),
    "words of other ranks are looked up in row 0 (Try)": (
        (
            "F.embedding(local_N, self.weight) * mine_N[:, None]",
            "F.embedding(local_N, self.weight)",
        ),
        LOSSES | GRADIENTS,
    ),
    "the right logit is not added up": (
        ("        dist.all_reduce(right_N)\n", ""),
        LOSSES | {NUMBERS, SAME},
    ),
    "the sum of exponentials is a rank's own": (
        ("        dist.all_reduce(total_N)\n", ""),
        LOSSES | GRADIENTS | {NUMBERS, COUNTED, MASKED, THOUSAND, SAME, SAME_GRADIENT},
    ),
    "no word is the right one backward": (
        ("-= mine_N.to(grad_Nv.dtype)", "-= 0 * mine_N.to(grad_Nv.dtype)"),
        GRADIENTS | {SAME_GRADIENT},
    ),
    "every rank subtracts 1 in its row 0": (
        ("-= mine_N.to(grad_Nv.dtype)", "-= 1"),
        GRADIENTS | {SAME_GRADIENT},
    ),
    "every token counts the same backward": (
        ("grad_Nv.mul_(grad_N[:, None])", "grad_Nv.mul_(grad_N.mean())"),
        GRADIENTS,
    ),
    "no f before the head": (
        ("CopyToRanks.apply(x_ND) @ self.head.T", "x_ND @ self.head.T"),
        GRADIENTS,
    ),
    "g sums backward too": (
        ("        return grad, None\n", "        return all_reduce(grad) / WORLD_SIZE, None\n"),
        LOOKED_UP,
    ),
    "the look-up is not added up": (
        ("        return ReduceFromRanks.apply(x_ND)", "        return x_ND"),
        LOSSES | GRADIENTS | LOOKED_UP,
    ),
    "the loss communicates backward": (
        (TAKEN, f"        dist.all_reduce(grad_N.clone())\n{TAKEN}"),
        {"loss: all-reduces backward"},
    ),
    "the loss keeps the logits too": (
        [
            (
                "save_for_backward(probability_Nv, local_N, mine_N)",
                "save_for_backward(probability_Nv, local_N, mine_N, logits_Nv)",
            ),
            (TAKEN, "        grad_Nv, local_N, mine_N, _ = ctx.saved_tensors\n"),
        ],
        {"loss: numbers kept, per token"},
    ),
    "PyTorch gathers the logits besides": (
        (BACKWARD, f"        {GATHERED}\n{BACKWARD}"),
        {"loss_parallel: collectives"},
    ),
    "padding is counted in the model": (
        ("logits_Nv.masked_fill(word_v >= WORDS, -math.inf)", "logits_Nv"),
        LOSSES | GRADIENTS,
    ),
}
BREAKS = [Breaks(LINES, ranks=3)]
