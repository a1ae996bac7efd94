"""The lesson on inference: all ways to generate give one text, and each claim FAILs when broken."""

import pytest
import torch

from course.playing import load
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fsdp/09_inference.py"
NO_DEEPSPEED = ("    deepspeed = import_deepspeed(prompt_BT.device)\n", "    deepspeed = None\n")
NO_STEPS = [
    ("for B in (1, 4, 16):", "for B in (4,):"),
    ("ratio = times[4] / times[1]", "ratio = 0.0"),
]
CACHED = "KV cache: tokens that differ from those without"
LOGITS = "a decode step's logits, error"
CUT = "cut in 2: tokens that differ"
SIZE = "cut in 2: elements summed per token, 2 L D"
SHARE = "cut in 2: cache per token, 2 L D x 4 / n"
TEXT_ANEW = "no cache: tokens through a block per request"
HELD = "KV cache: bytes per token, 2 L D x 4"
ENTROPY = "loss in nats per byte, below the bytes' entropy"
BIT = "loss in nats per byte, above one bit"

LINES = {
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
    "without a cache the text is padded": (
        [
            (
                "logits_BV = model(text_BT)[:, -1]",
                "logits_BV = model(F.pad(text_BT, (0, 1)))[:, -2]",
            )
        ],
        {TEXT_ANEW},
    ),
    "qkv is cut as if it were one layer": (
        [("view(3, n, D // n).transpose(0, 1).flatten(1)", "view(n, 3 * D // n)")],
        {CUT},
    ),
    "the prompt is read again at each step": (
        [("text_BT[:, caches[0].length :], caches", "text_BT, empty_caches(model, REQUESTS)")],
        {"KV cache: tokens through a block per request", SIZE},
    ),
    "the newest token sees only the first (Try)": (
        [("device).tril(total - new)", "device).tril()")],
        {CACHED, CUT, LOGITS},
    ),
    "the prompt sees one token ahead": (
        [("device).tril(total - new)", "device).tril(total - new + 1)")],
        {LOGITS},
    ),
    "the step that is timed is at the position after": (
        [("cache.length = x_BT.shape[1] - 1", "cache.length = x_BT.shape[1]")],
        {LOGITS},
    ),
    "positions start anew": (
        [("    start = caches[0].length\n", "    start = 0\n")],
        {CACHED, CUT, LOGITS},
    ),
    "a layer is computed twice": (
        [
            (
                "block.norm2(h_BTD))))\n    return",
                "block.norm2(h_BTD)) + 0 * block.up(h_BTD)))\n    return",
            )
        ],
        {"KV cache: tokens through a block per request"},
    ),
}
ON_FOUR = {
    "partial results are not summed": (
        "        dist.all_reduce(y, group=self.group)\n",
        "",
        {
            "cut in 4: tokens that differ",
            "cut in 4: all-reduces per step, 2 L",
            "cut in 4: elements summed per token, 2 L D",
        },
    ),
    "every rank reserves room for all heads": (
        "new_zeros(2, B, block.heads, T, K)",
        "new_zeros(2, B, H, T, K)[:, :, : block.heads]",
        {"cut in 4: cache per token, 2 L D x 4 / n"},
    ),
    "it is told the token that it has to predict": (
        "F.cross_entropy(logits_BTV.transpose(1, 2), x_BT[:, 1:])",
        "F.cross_entropy(logits_BTV.transpose(1, 2), x_BT[:, :-1])",
        {BIT},
    ),
}
UNLEARNED = {
    "nothing is learned; the cache reserves twice the context": (
        [
            ("lr=3e-3", "lr=0.0"),
            ("B, model.position.num_embeddings)", "B, 2 * model.position.num_embeddings)"),
        ],
        {ENTROPY, HELD, SHARE},
    ),
}
OF_DEEPSPEED = {
    "fused rows that are in order": (
        "n, reorder=False)\n    ours_BG, _ = generate(whole",
        "n, reorder=True)\n    ours_BG, _ = generate(whole",
        {"DeepSpeed, qkv as it is: tokens that differ"},
    ),
    "DeepSpeed's layers do not sum": (
        "n, reorder=True)\n    with",
        "n, reorder=True)\n"
        "    for layer in ordered.modules():\n"
        "        layer.mp_group = None\n"
        "    with",
        {
            "DeepSpeed, rows reordered: tokens that differ",
            "DeepSpeed: all-reduces per step, 2 L",
        },
    ),
}
ON_ONE_RANK = {
    "DeepSpeed with half of the heads": (
        "block.heads //= n\n    return engine",
        "block.heads //= 2\n    return engine",
        {"DeepSpeed: tokens that differ"},
    ),
}


ONE_BY_ONE = {
    "one request after another": (
        [
            (
                "        step = decode_step(model, x_BT)\n        milliseconds",
                "        one = decode_step(model, x_BT[:1])\n"
                "        step = lambda: [one() for _ in range(B)]\n"
                "        milliseconds",
            )
        ],
        {"a step's time, B = 4 / B = 1, at most"},
    )
}


ANY_LOSS = ("bytes' entropy\", entropy, final", "bytes' entropy\", 9.0, final")  # for five steps
FIVE = ("--steps", "5")
BREAKS = [
    Breaks(LINES, changes=[NO_DEEPSPEED, *NO_STEPS, ANY_LOSS], argv=FIVE),
    Breaks(ONE_BY_ONE, changes=[NO_DEEPSPEED, ANY_LOSS], argv=FIVE, clock=True),
    Breaks(ON_FOUR, ranks=4, changes=[NO_DEEPSPEED, *NO_STEPS]),
    Breaks(UNLEARNED, changes=[NO_DEEPSPEED, *NO_STEPS]),
    Breaks(OF_DEEPSPEED, changes=[*NO_STEPS, ANY_LOSS], argv=FIVE),
    Breaks(ON_ONE_RANK, ranks=1, changes=[*NO_STEPS, ANY_LOSS], argv=FIVE),
]
ON_GPUS = OnGpus(
    [
        ("max(1, 16 // WORLD_SIZE)", "max(1, 4 // WORLD_SIZE)"),
        NO_DEEPSPEED,  # its layers are its own, and take seconds to load
        ('BIG = {"L": 16,', 'BIG = {"L": 2,'),
        ("repeats: int = 20", "repeats: int = 1"),
        ("repeats: int = 30", "repeats: int = 1"),
    ],
    argv=FIVE,
    ranks=(1, 2),
)


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
