"""The GPT on a mesh: its parts against their formulas, meshes of every shape, broken lines."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course.playing import Played, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/12_gpt_on_a_mesh.py"
QUICK = (("STEPS = 10\n", "STEPS = 3\n"),)


def PLAIN(played: Played) -> None:
    """Without a GPU plain python starts eight ranks, and no axis of theirs is absent."""
    assert "8 ranks, gloo" in played.output
    assert "BLOCKED" not in [row["verdict"] for row in played.ledger]


def test_rope_s_products_depend_on_the_distance_alone() -> None:
    lesson = load(LESSON)
    torch.manual_seed(0)
    q_K, k_K = torch.randn(2, lesson.K, dtype=torch.float64)
    q_TK = lesson.rotate(q_K.expand(1, 1, 40, -1))[0, 0]
    k_TK = lesson.rotate(k_K.expand(1, 1, 40, -1))[0, 0]
    product_TT = q_TK @ k_TK.T
    for distance in (0, 1, 17):
        along = product_TT.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert product_TT[0].std() > 0.1


def test_rope_turns_pair_i_of_token_t_by_t_times_its_frequency() -> None:
    lesson = load(LESSON)
    x_TK = torch.randn(5, lesson.K, dtype=torch.float64)
    turned_TK = lesson.rotate(x_TK[None, None])[0, 0]
    half = lesson.K // 2
    for t in range(5):
        for i in range(half):
            turn = complex(math.cos(t * 10_000 ** (-i / half)), math.sin(t * 10_000 ** (-i / half)))
            due = complex(x_TK[t, i], x_TK[t, i + half]) * turn
            assert turned_TK[t, i].item() == pytest.approx(due.real)
            assert turned_TK[t, i + half].item() == pytest.approx(due.imag)


def block_of_one_rank() -> tuple[torch.Tensor, torch.Tensor]:
    """A block's output, and the same by formulas: each key-value head stands for two of queries."""
    lesson = load(LESSON)
    torch.manual_seed(0)
    block = lesson.LlamaBlock().double()
    x_bTD = torch.randn(2, 7, lesson.D, dtype=torch.float64)
    y_bTD = block.norm1(x_bTD)

    def heads(layer: nn.Linear) -> torch.Tensor:
        return layer(y_bTD).unflatten(-1, (-1, lesson.K)).transpose(1, 2)

    q, k = lesson.rotate(heads(block.q)), lesson.rotate(heads(block.k))
    each = lesson.H // lesson.G
    k, v = k.repeat_interleave(each, dim=1), heads(block.v).repeat_interleave(each, dim=1)
    score = q @ k.transpose(-1, -2) / lesson.K**0.5
    score = score.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
    due = x_bTD + block.out((score.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
    y_bTD = block.norm2(due)
    due = due + block.down(F.silu(block.gate(y_bTD)) * block.up(y_bTD))
    return block(x_bTD, dist.group.WORLD).detach(), due.detach()


def test_two_query_heads_share_a_key_value_head() -> None:
    ((found, due),) = run(block_of_one_rank, 1)
    torch.testing.assert_close(found, due)


def groups(shape: tuple[int, int, int]) -> dict[str, list[int]]:
    found = load(LESSON).make_groups(*shape)
    return {name: dist.get_process_group_ranks(g) if g else [] for name, g in found.items()}


def test_tp_is_innermost_and_pp_outermost() -> None:
    found = run(groups, 8, (2, 2, 2))
    assert found[0] == {"tp": [0, 1], "dp": [0, 2], "pp": [0, 4], "ends": [0, 4]}
    assert found[7] == {"tp": [6, 7], "dp": [5, 7], "pp": [3, 7], "ends": [3, 7]}


@pytest.mark.deep
def test_a_stage_between_the_ends_has_no_embedding_to_add_up() -> None:
    found = run(groups, 8, (1, 4, 2))
    assert [one["ends"] for one in found] == [[0, 6], [1, 7], [], [], [], [], [0, 6], [1, 7]]


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["1 4 2", "2 1 4", "4 2 1"])
def test_eight_ranks_may_be_another_mesh(mesh: str) -> None:
    played = play(LESSON, 8, *QUICK, argv=("--mesh", *mesh.split()), deadline=200)
    played.expect(set())
    absent = [axis for axis, n in zip(("dp", "pp", "tp"), mesh.split(), strict=True) if n == "1"]
    blocked = {row["claim"] for row in played.ledger if row["verdict"] == "BLOCKED"}
    assert blocked == {f"{axis}: bytes handed over" for axis in absent}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("2 2", "argument --mesh: expected 3 arguments"),
        ("2 x 1", "argument --mesh: invalid int value: 'x'"),
        ("2 2 2", "must be the number of ranks, .* got (2, 2, 2) for 2 ranks"),
        ("-1 -2 1", "got (-1, -2, 1) for 2 ranks; choose others by --mesh"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: str, words: str) -> None:
    change = ("time.sleep(30)", "time.sleep(0)")
    said = play(LESSON, 2, change, argv=("--mesh", *mesh.split())).code
    for part in words.split(".*"):
        assert part in said


def test_the_default_meshes_have_as_many_ranks_as_they_say() -> None:
    meshes = load(LESSON).MESHES
    assert {n: math.prod(shape) for n, shape in meshes.items()} == {n: n for n in meshes}


def test_the_published_run_sends_what_the_answers_say() -> None:
    """Narayanan et al. (2021), table 1: dp 24, pp 8, tp 8; batch 2304, 80 layers, 12,288 wide."""
    activation = 2304 / 24 * 2048 * 12_288 * 2 / 1e9
    assert round(activation, 1) == 4.8
    along_tp = 6 * 80 / 8 * activation * 2 * 7 / 8
    assert round(along_tp) == 507
    assert round(along_tp / 300, 1) == 1.7
    assert round(along_tp / 25) == 20
    assert round(2 * activation, 1) == 9.7
    assert round(145.6 / 64 * 4 * 2 * 23 / 24) == 17
    flop = 96 * 2304 * 2048 * 80 * 12_288**2  # equation 3, at 148 TFLOP/s of each of 1,536 GPUs
    flop *= 1 + 2048 / (6 * 12_288) + 51_200 / (16 * 80 * 12_288)
    assert round(flop / 148e12 / 1536) == 25


def strides(*axes: str) -> set[str]:
    return {f"{axis}: from a rank to the next in its group" for axis in axes}


KINDS = {f"{kind}: error of the gradients" for kind in ("matrix", "norm", "embedding")}
TIMES = {f"{kind}: times that it counts" for kind in ("matrix", "norm", "embedding")}
ALIKE = "norms summed along tp too: times too large"
RESULT = {f"{what} of all steps: largest difference" for what in ("losses", "norms")}
ALL = KINDS | TIMES | RESULT
ENDS = "ends: numbers added up, embedding"
MESH = ".view(pp, dp, tp)"
BUCKET = "            bucket = nn.utils.parameters_to_vector(gradients)\n"
TWICE = '            if axis == "ends":\n                add_up(bucket, group)\n'
PARTIAL = 'PARTIAL = {"matrix": ["dp"], "norm": ["dp"], "embedding": ["dp", "ends"]}'
WHOLE = 'if kind_of(name) != "matrix":\n        return whole'
LINES = {
    "the norm counts copies along tp (Try)": (
        ('"norm": ["dp", "tp"], "emb', '"norm": ["dp"], "emb'),
        RESULT,
    ),
    "the norm counts the embedding on both stages": (
        ('["dp", "tp", "ends"]', '["dp", "tp"]'),
        RESULT,
    ),
    "the norm counts the embedding along tp too": (
        ('["dp", "tp", "ends"]', '["dp", "ends"]'),
        RESULT,
    ),
    "the norm counts every copy": ((" / copies\n", "\n"), RESULT),
    "the norm is a rank's own": (("add_up(mine, dist.group.WORLD).sqrt()", "mine.sqrt()"), RESULT),
    "the tied embedding's gradient is not summed (Try)": (
        (PARTIAL, PARTIAL.replace(', "ends"', "")),
        {"embedding: error of the gradients", "embedding: times that it counts", ENDS} | RESULT,
    ),
    "the embedding's gradient is summed along tp too": (
        (PARTIAL, PARTIAL.replace('["dp", "ends"]', '["dp", "tp", "ends"]')),
        {"embedding: error of the gradients", "embedding: times that it counts"}
        | {"tp: bytes handed over"}
        | RESULT,
    ),
    "the norms' gradients are summed along tp too": (
        (PARTIAL, PARTIAL.replace('"norm": ["dp"]', '"norm": ["dp", "tp"]')),
        {"norm: error of the gradients", "norm: times that it counts", "tp: bytes handed over"}
        | {ALIKE}
        | RESULT,
    ),
    "the table of partial gradients is not asked": (
        ("if axis in partial[kind_of(n)]]", "if axis in PARTIAL[kind_of(n)]]"),
        {ALIKE},
    ),
    "the ends add up once more for nothing": (
        (BUCKET, BUCKET + TWICE),
        {ENDS},
    ),
    "micro-batches are averaged twice": (
        ("y = y / (B * T)", "y = y / (B * T) / MICRO_BATCHES"),
        ALL,
    ),
    "tp is outermost (Try)": (
        (MESH, ".view(tp, dp, pp).permute(2, 1, 0)"),
        strides("tp", "pp"),
    ),
    "f does not sum": (
        ("return add_up(grad, ctx.tp), None", "return grad, None"),
        ALL | {"tp: bytes handed over", ALIKE},
    ),
    "g does not sum": (
        ("        return add_up(x, tp)\n", "        return x.clone()\n"),
        ALL | {"tp: bytes handed over", ALIKE},
    ),
    "an MLP is not split": (
        (WHOLE, WHOLE.replace(":", ' or name[9:11] in ("ga", "up", "do"):')),
        ALL,
    ),
}  # fmt: skip
ALONG_DP = {
    "gradients are not summed along dp": (
        (PARTIAL, PARTIAL.replace('["dp"]', "[]").replace('"dp", ', "")),
        ALL | {"dp: bytes handed over", ALIKE},
    ),
    "all ranks along dp take the same examples": (("[dp.rank()]", "[0]"), ALL),
    "the gradient is the mean along dp": (
        ("(add_up(bucket, group), gradients)", "(add_up(bucket, group) / group.size(), gradients)"),
        ALL,
    ),
    "the norm counts matrices along dp too": (
        ('COPIED = {"matrix": ["dp"]', 'COPIED = {"matrix": []'),
        RESULT,
    ),
}  # fmt: skip
INSIDE_OUT = {
    "tp is outside of dp": (
        (MESH, ".view(pp, tp, dp).permute(0, 2, 1)"),
        strides("tp", "dp"),
    ),
}
ON_TWO_MACHINES = {
    "dp is outermost: HSDP's shards lie on two machines": (
        (MESH, ".view(dp, pp, tp).permute(1, 0, 2)"),
        strides("dp", "pp"),
    ),
    "each rank along dp takes all examples": (
        ("tokens_BT.chunk(dp.size())[dp.rank()]", "tokens_BT"),
        ALL | {"pp: bytes handed over"},
    ),
}
BREAKS = [
    Breaks(LINES, ranks=4, changes=QUICK),
    Breaks(ALONG_DP, changes=QUICK, argv=("--mesh", "2", "1", "1")),
    Breaks(INSIDE_OUT, ranks=4, changes=QUICK, argv=("--mesh", "2", "1", "2")),
    Breaks(ON_TWO_MACHINES, ranks=4, changes=QUICK, argv=("--mesh", "2", "2", "1")),
]
ON_GPUS = OnGpus(changes=QUICK)
SIZES = {1: QUICK, 3: QUICK}
