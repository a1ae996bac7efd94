"""The lesson on inference: all ways to generate give one text, and each claim FAILs when broken."""

import pytest
import torch

from course.playing import load, play

LESSON = "fsdp/09_inference.py"
NO_DEEPSPEED = ("    deepspeed = import_deepspeed(prompt_BT.device)\n", "    deepspeed = None\n")
NO_STEPS = ("for B in (1, 4, 16):", "for B in (4,):")
CACHED = "KV cache: tokens that differ from those without"
CUT = "cut in 2: tokens that differ"
SUMS = "cut in 2: all-reduces per step, 2 L"
SIZE = "cut in 2: elements summed per token, 2 L D"
SHARE = "cut in 2: cache per token, 2 L D x 4 / n"
ENTROPY = "loss in nats per byte, below the bytes' entropy"

BREAKS = {
    "the newest token sees only the first (Try)": (
        [("device).tril(total - new)", "device).tril()")],
        {CACHED, CUT},
    ),
    "the bias is added by every rank (Try)": (
        [
            (
                "        y = F.linear(x, self.weight)\n",
                "        y = F.linear(x, self.weight, self.bias)\n",
            ),
            ("        return y + self.bias\n", "        return y\n"),
        ],
        {CUT},
    ),
    "partial results are not summed": (
        [("        dist.all_reduce(y, group=self.group)\n", "")],
        {CUT, SUMS, SIZE},
    ),
    "qkv is cut as if it were one layer": (
        [("view(3, n, D // n).transpose(0, 1).flatten(1)", "view(n, 3 * D // n)")],
        {CUT},
    ),
    "the prompt is read again at each step": (
        [("text_BT[:, caches[0].length :], caches", "text_BT, empty_caches(model, REQUESTS)")],
        {"KV cache: tokens through a block per request", SIZE},
    ),
    "positions start anew": (
        [("    start = caches[0].length\n", "    start = 0\n")],
        {CACHED, CUT},
    ),
    "a layer is computed twice": (
        [
            (
                "block.norm2(h_BTD))))\n    return",
                "block.norm2(h_BTD)) + 0 * block.up(h_BTD)))\n    return",
            )
        ],
        {"B = 4: FLOPs per byte of weights, B / 2", "KV cache: tokens through a block per request"},
    ),
    "the cache holds a rank's share, and the prediction the whole": (
        [("2 * L * D * 4 / n, held", "2 * L * D * 4, held")],
        {SHARE},
    ),
    "nothing is learned; the cache reserves twice the context": (
        [
            ("lr=3e-3", "lr=0.0"),
            ("B, model.position.num_embeddings)", "B, 2 * model.position.num_embeddings)"),
        ],
        {ENTROPY, "KV cache: bytes per token, 2 L D x 4", SHARE},
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_makes_its_claim_fail(name: str) -> None:
    changes, expected = BREAKS[name]
    steps = "30" if ENTROPY in expected else "5"
    played = play(LESSON, 2, NO_DEEPSPEED, NO_STEPS, *changes, argv=("--steps", steps))
    assert played.failed - {ENTROPY} == expected - {ENTROPY}, played.output
    if ENTROPY in expected:
        assert ENTROPY in played.failed


@pytest.mark.deep
def test_what_deepspeed_cuts_is_seen() -> None:
    """Were the fused rows in order, none would differ; an uncut model needs no all-reduces."""
    ordered = (
        "n, reorder=False)\n    ours_BG, _ = generate(whole",
        "n, reorder=True)\n    ours_BG, _ = generate(whole",
    )
    uncut = (
        "ordered = serve(deepspeed, copy.deepcopy(model), n, reorder=True)",
        "ordered = serve(deepspeed, copy.deepcopy(model), 1, reorder=True)",
    )
    played = play(LESSON, 2, NO_STEPS, ordered, uncut, argv=("--steps", "5"))
    assert played.failed - {ENTROPY} == {
        "DeepSpeed, qkv as it is: tokens that differ",
        "DeepSpeed: all-reduces per step, 2 L",
    }


@pytest.mark.deep
def test_deepspeed_on_one_rank_with_half_of_the_heads() -> None:
    change = ("block.heads //= n\n    return engine", "block.heads //= 2\n    return engine")
    played = play(LESSON, 1, NO_STEPS, change, argv=("--steps", "5"))
    assert played.failed - {ENTROPY} == {"DeepSpeed: tokens that differ"}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ranks_share_the_rows_of_each_third(n: int) -> None:
    lesson = load(LESSON)
    rows = lesson.fused_rows(24, n)
    assert sorted(rows.flatten().tolist()) == list(range(72))
    for rank in range(n):
        share = 24 // n
        expected = [third * 24 + rank * share + i for third in range(3) for i in range(share)]
        assert rows[rank].tolist() == expected


def test_noise_draws_from_the_softmax() -> None:
    """The Gumbel-max trick: shares of 20,000 draws within 5 standard deviations."""
    lesson = load(LESSON)
    logits = torch.tensor([0.0, 1.0, 2.0])
    drawn = (logits + lesson.gumbel((20_000, 3), torch.device("cpu"))).argmax(-1)
    shares = torch.bincount(drawn, minlength=3) / 20_000
    expected = logits.softmax(0)
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / 20_000).sqrt()).all()
