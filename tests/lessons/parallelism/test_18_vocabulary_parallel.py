"""The loss and the embedding against torch's, in one process and on several ranks; broken lines."""

from unittest.mock import patch

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
    with patch.object(lesson._lesson, "RANK", rank):
        local, mine = lesson.local_rows(torch.tensor(words), 3)
    for word, row, ours in zip(words, local.tolist(), mine.tolist(), strict=True):
        assert ours == (word // 3 == rank)
        assert row == (word % 3 if ours else 0)


def losses(logits: torch.Tensor, right: torch.Tensor, words: int) -> tuple:
    """This rank's losses and gradient of its logits, each token weighted by its number + 1."""
    changed = load(LESSON)
    mine = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()
    found = changed.VocabularyParallelLoss.apply(mine, right, words)
    (found * torch.arange(1, len(right) + 1)).sum().backward()
    return found.detach(), mine.grad


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([0.1, 3.0, 300.0]))
def test_loss_and_gradient_are_cross_entropy_s(seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    logits = scale * torch.randn(7, 12, dtype=torch.float64)
    right = torch.randint(10, [7])
    whole = logits.clone().requires_grad_()
    due = F.cross_entropy(whole[:, :10], right, reduction="none")  # two more are padding
    (due * torch.arange(1, 8)).sum().backward()
    for ranks in (2, 4):
        found = run(losses, ranks, logits, right, 10)
        torch.testing.assert_close(found[-1][0], due.detach(), rtol=1e-12, atol=1e-12)
        gradient = torch.cat([mine for _, mine in found], dim=1)
        torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-12)


def test_a_rank_may_have_padding_alone() -> None:
    logits = torch.zeros(2, 6, dtype=torch.float64)
    for found, mine in run(losses, 3, logits, torch.tensor([0, 2]), 3):
        torch.testing.assert_close(found, torch.full([2], 3.0, dtype=torch.float64).log())
        assert mine.isfinite().all()


def test_logits_may_be_large_on_every_rank() -> None:
    """By far less than their sum every exponential is 0, and without a maximum infinite."""
    torch.manual_seed(0)
    logits = 300 + torch.randn(5, 12)
    right = torch.tensor([0, 3, 6, 9, 11])
    due = F.cross_entropy(logits, right, reduction="none")
    for found, _ in run(losses, 4, logits, right, 12):
        torch.testing.assert_close(found, due)


def test_bfloat16_is_added_up_in_float32() -> None:
    """4,096 equal words: in bfloat16 a sum of ones stops at 256. The gradient is bfloat16 again."""
    logits = torch.zeros(2, 4096, dtype=torch.bfloat16)
    for found, mine in run(losses, 2, logits, torch.tensor([0, 4095]), 4096):
        torch.testing.assert_close(found, torch.full([2], 4096.0).log())
        assert mine.dtype == torch.bfloat16


LOSS = "error of the loss"
GRADIENTS = {"error of the head's gradient", "error of its input's gradient"}
LOOKED_UP = "embedding: error"
LOOKED_UP_GRADIENT = "embedding: error of the gradient"
LOOK_UP_CALLS = "embedding: all-reduces, both ways"
NUMBERS = "loss: numbers compared or added, per token"
COUNTED, MASKED = (f"padding {how}: the loss of zeros" for how in ("counted", "masked"))
THOUSAND = "a thousand on rank 0: losses not finite"
SAME, SAME_GRADIENT = (f"loss_parallel: difference of the {what}" for what in ("loss", "gradient"))
MAX = "        dist.all_reduce(max_N, op=dist.ReduceOp.MAX)\n"

TAKEN = "        grad_Nv, row_N, mine_N = ctx.saved_tensors"
BACKWARD = "        loss.backward()\n    error"
GATHERED = "DTensor.from_local(theirs_Nv.detach(), mesh, [Shard(1)]).full_tensor()"
LINES = {
    "each rank subtracts its own maximum (Try)": (
        (MAX, ""),
        GRADIENTS | {LOSS, NUMBERS, SAME, SAME_GRADIENT},
    ),
    "each rank adds its row 0 for words of other ranks (Try)": (
        ("[:, 0].where(mine_N, 0)", "[:, 0]"),
        {LOSS, SAME},
    ),
    "nothing is subtracted": (("        z_Nv -= max_N[:, None]\n", ""), {THOUSAND}),
    "the right logit is not added up": (
        ("        dist.all_reduce(right_N)\n", ""),
        {LOSS, NUMBERS, SAME},
    ),
    "the sum of exponentials is a rank's own": (
        ("        dist.all_reduce(sum_N)\n", ""),
        GRADIENTS | {LOSS, NUMBERS, COUNTED, MASKED, THOUSAND, SAME, SAME_GRADIENT},
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
        ("grad_Nv *= grad_N[:, None]", "grad_Nv *= grad_N.mean()"),
        GRADIENTS,
    ),
    "the gradient of the head's input is not added up": (
        ("    dist.all_reduce(x_ND.grad)", "    pass"),
        {"error of its input's gradient"},
    ),
    "padding is counted": (
        ("        z_Nv[:, max(words - RANK * v, 0) :] = -math.inf", "        pass"),
        GRADIENTS | {LOSS, MASKED},
    ),
    "the loss communicates backward": (
        (TAKEN, f"        dist.all_reduce(grad_N.clone())\n{TAKEN}"),
        {"loss: all-reduces backward"},
    ),
    "the loss keeps the logits too": (
        [
            (
                "save_for_backward(probability_Nv, row_N, mine_N)",
                "save_for_backward(probability_Nv, row_N, mine_N, logits_Nv)",
            ),
            (TAKEN, "        grad_Nv, row_N, mine_N, _ = ctx.saved_tensors"),
        ],
        {"loss: numbers kept, per token"},
    ),
    "PyTorch gathers the logits besides": (
        (BACKWARD, f"        {GATHERED}\n{BACKWARD}"),
        {"loss_parallel: collectives"},
    ),
    "the embedding looks up words of other ranks in row 0": (
        ("F.embedding(row_N, table_vD) * mine_N[:, None]", "F.embedding(row_N, table_vD)"),
        {LOOKED_UP, LOOKED_UP_GRADIENT},
    ),
    "the look-up is not added up": (
        ("    dist.all_reduce(x_ND.detach())", "    pass"),
        {LOOKED_UP, LOOK_UP_CALLS},
    ),
    "the look-up is added up backward too": (
        (
            "    return x_ND\n",
            "    x_ND.register_hook(lambda grad: dist.all_reduce(grad.clone()))\n    return x_ND\n",
        ),
        {LOOK_UP_CALLS},
    ),
}
BREAKS = [Breaks(LINES, ranks=3)]
