"""The lesson on inference: all ways to generate give one text, and each claim FAILs when broken."""

import copy
import math
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fsdp/09_inference.py"
NO_DEEPSPEED = ("    deepspeed = import_deepspeed(prompt_BT.device)\n", "    deepspeed = None\n")
NO_STEPS = [
    ("for B in (1, 4, 16):", "for B in (4,):"),
    ("ratio = times[4] / times[1]", "ratio = 0.0"),
]
CACHED = "KV cache: tokens that differ from those without"
LOGITS = "a decode step's logits, error"
CUT = "cut in 2: a decode step's logits, error"
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
        {CUT, LOGITS},
    ),
    "the step that is timed is at the position after": (
        [("cache.length = x_BT.shape[1] - 1", "cache.length = x_BT.shape[1]")],
        {CUT, LOGITS},
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
            "cut in 4: a decode step's logits, error",
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


def error_of_the_second_gradient() -> tuple[float, list[int]]:
    """Against that of all ranks' batches, at the weights of then; and where this rank's begin."""
    lesson = load(LESSON)
    torch.manual_seed(0)
    model = lesson.GPT(1, 8, lesson.CONTEXT, 256, heads=2)
    inputs, before, gradients = [], [], []
    model.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    model.register_forward_pre_hook(lambda *_: before.append(copy.deepcopy(model.state_dict())))
    register_optimizer_step_pre_hook(
        lambda *_: gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    )
    lesson.train(model, torch.arange(4000) % 256, 2, torch.device("cpu"))
    alone = lesson.GPT(1, 8, lesson.CONTEXT, 256, heads=2)
    alone.load_state_dict(before[1])
    y_BT = (inputs[1] + 1) % 256
    F.cross_entropy(alone(inputs[1]).transpose(1, 2), y_BT).backward()
    errors = []
    for parameter, gradient in zip(alone.parameters(), gradients[1], strict=True):
        dist.all_reduce(parameter.grad)
        errors.append((parameter.grad / 2 - gradient).abs().max().item())
    return max(errors), inputs[0][:, 0].tolist()


def test_gradients_are_averaged_over_the_ranks_and_begin_anew_at_each_step() -> None:
    (error, first), (same, second) = run(error_of_the_second_gradient, 2)
    assert max(error, same) < 1e-6
    assert first != second


def test_a_step_is_timed_for_as_many_requests_as_is_told() -> None:
    lesson = load(LESSON)
    lesson.decode_step = lambda model, x_BT: lambda: torch.zeros(len(x_BT), 256)
    lesson.median_of_steps = lambda step: 0.5 * len(step()) + 1.5  # 2, 3.5 and 9.5 ms
    said, claims = [], []
    lesson.print0 = lambda line: said.append(line.split())
    lesson.claim = lambda text, predicted, measured, *_, **__: claims.append(float(measured))
    lesson.check_batches(lambda x_BT: torch.zeros(*x_BT.shape, 256), torch.zeros(4, 8))
    assert said[1:] == [["1", "2.00", "500"], ["4", "3.50", "1,143"], ["16", "9.50", "1,684"]]
    assert claims == [0.0, 1.75]


def test_a_steps_time_is_the_median_after_three_steps_to_warm_up() -> None:
    lesson = load(LESSON)
    seconds = [0.0, 0.0, 0.0, *map(float, range(30))]
    ticks = iter([tick for length in seconds for tick in (0.0, length)])
    lesson.time = SimpleNamespace(perf_counter=lambda: next(ticks))
    with patch.object(lesson.dist, "broadcast_object_list"):
        assert lesson.median_of_steps(Mock()) == 15_000.0


def test_the_bound_for_the_loss_is_the_entropy_of_the_texts_bytes() -> None:
    lesson = load(LESSON)
    claims = []
    lesson.claim = lambda text, predicted, measured, *_, **__: claims.append((predicted, measured))
    lesson.check_learning(b"abab", [9.0, 1.0, 2.0, 3.0, 4.0, 5.0], own_data=True)
    assert claims == [(pytest.approx(math.log(2)), 3.0)]


def test_a_gpu_reads_all_weights_and_every_requests_cache() -> None:
    """On the meta device, which has all shapes of a GPU's tensors. A copy reads and writes."""
    lesson = load(LESSON)
    lesson.init_device_mesh = Mock()
    lesson.decode_step = Mock()
    lesson.median_ms = Mock(side_effect=[1.0, 4.0, 5.0])
    said, claims = [], []
    lesson.print0 = lambda line: said.append(line.split())
    lesson.claim = lambda text, predicted, measured, *_, **__: claims.append(measured)
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        lesson.check_on_gpus(torch.device("meta"))
    L, D, T, V = 16, 3072, 2048, 32_768
    weights = 2 * (L * (12 * D**2 + 13 * D) + (2 * V + T + 2) * D)
    bytes_per_ms = 2 * 2**30
    for B, row in ((1, said[2]), (32, said[3])):
        assert row[-1] == f"{(weights + B * T // 2 * 2 * L * D * 2) / bytes_per_ms:.2f}"
    assert [row[:3] for row in said[2:]] == [["1", "4.00", "250"], ["32", "5.00", "6,400"]]
    assert claims == [1.25]


def test_generating_and_decoding_keep_no_graph() -> None:
    lesson = load(LESSON)
    model = lesson.GPT(1, 8, lesson.CONTEXT, 256, heads=2)
    prompt_BT = torch.zeros(2, 4, dtype=torch.long)
    noise_GBV = lesson.gumbel((3, 2, 256), torch.device("cpu"))
    _, (cache,) = lesson.generate(model, prompt_BT, noise_GBV, cached=True)
    assert not cache.kv_2BHTK.requires_grad
    assert not lesson.decode_step(model, prompt_BT)().requires_grad
