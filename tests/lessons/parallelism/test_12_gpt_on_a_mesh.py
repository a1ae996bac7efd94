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
QUICK = (("STEPS = 40\n", "STEPS = 3\n"), ('at most", entropy,', 'at most", 9.9,'))


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


def test_two_query_heads_share_a_key_value_head() -> None:
    lesson = load(LESSON)
    torch.manual_seed(0)
    block = lesson.LlamaBlock().double()
    x_bTD = torch.randn(2, 7, lesson.D, dtype=torch.float64)

    def heads(layer: nn.Linear) -> torch.Tensor:
        return layer(x_bTD).unflatten(-1, (-1, lesson.K)).transpose(1, 2)

    q, k = lesson.rotate(heads(block.q)), lesson.rotate(heads(block.k))
    each = lesson.H // lesson.G
    k, v = k.repeat_interleave(each, dim=1), heads(block.v).repeat_interleave(each, dim=1)
    score = q @ k.transpose(-1, -2) / lesson.K**0.5
    score = score.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
    due = block.out((score.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(block.attention(x_bTD), due)


def losses(logits: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's losses and gradient of its logits, each token weighted by its number + 1."""
    lesson, group = load(LESSON), dist.group.WORLD
    mine = logits.chunk(group.size(), dim=-1)[group.rank()].clone().requires_grad_()
    found = lesson.loss_of(mine, words, group)
    (found * torch.arange(1, words.numel() + 1).view_as(words)).sum().backward()
    return found.detach(), mine.grad


@pytest.mark.parametrize("scale", [1, 1000])
def test_loss_and_gradient_are_cross_entropy_s(scale: float) -> None:
    torch.manual_seed(0)
    logits = scale * torch.randn(2, 3, 12, dtype=torch.float64)
    words = torch.randint(12, [2, 3])
    whole = logits.clone().requires_grad_()
    due = F.cross_entropy(whole.flatten(0, 1), words.flatten(), reduction="none").view_as(words)
    (due * torch.arange(1, 7).view_as(words)).sum().backward()
    found = run(losses, 4, logits, words)
    torch.testing.assert_close(found[-1][0], due.detach(), rtol=1e-12, atol=1e-12)
    gradient = torch.cat([mine for _, mine in found], dim=-1)
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-12)


def groups(shape: tuple[int, int, int]) -> dict[str, list[int]]:
    lesson = load(LESSON)
    mesh = lesson.device_mesh(torch.device("cpu"), shape)
    stage = lesson.Stage(lesson.Llama(), mesh)
    names = ("tp", "dp", "pp", "ends")
    found = {name: getattr(stage, name) for name in names}
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
@pytest.mark.parametrize("mesh", ["1,4,2", "2,1,4", "4,2,1"])
def test_eight_ranks_may_be_another_mesh(mesh: str) -> None:
    played = play(LESSON, 8, *QUICK, argv=("--mesh", mesh), deadline=200)
    played.expect(set())
    absent = [axis for axis, n in zip(("dp", "pp", "tp"), mesh.split(","), strict=True) if n == "1"]
    blocked = {row["claim"] for row in played.ledger if row["verdict"] == "BLOCKED"}
    assert blocked == {f"{axis}: bytes handed over" for axis in absent}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("2,2", "argument --mesh: invalid mesh_of value: '2,2'"),
        ("2,x,1", "argument --mesh: invalid mesh_of value: '2,x,1'"),
        ("2,2,2", "must be the number of ranks, .* got (2, 2, 2) for 2 ranks"),
        ("-1,-2,1", "got (-1, -2, 1) for 2 ranks; choose others by --mesh"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: str, words: str) -> None:
    change = ("time.sleep(30)", "time.sleep(0)")
    said = play(LESSON, 2, change, argv=(f"--mesh={mesh}",)).code
    for part in words.split(".*"):
        assert part in said


def test_the_default_meshes_have_as_many_ranks_as_they_say() -> None:
    meshes = load(LESSON).MESHES
    assert {n: math.prod(shape) for n, shape in meshes.items()} == {n: n for n in meshes}


def test_the_published_run_sends_what_the_answers_say() -> None:
    """Narayanan et al. (2021), table 1: dp 24, pp 8, tp 8; batch 2304, 80 layers, 12,288 wide."""
    activation = 2304 / 24 * 2048 * 12_288 * 2 / 1e9
    assert round(activation, 1) == 4.8
    assert round(4 * 80 / 8 * activation * 2 * 7 / 8) == 338
    assert round(2 * activation, 1) == 9.7
    assert math.isclose(145.6 / 64 * 2, 4.55)
    assert round(145.6 / 64 * 2 * 2 * 23 / 24, 1) == 8.7


def axis_rows(axis: str) -> set[str]:
    return {f"{axis}: bytes {which}" for which in ("handed over", "that need the cable")}


GRADIENT, ENDS = "error of every gradient", "ends: numbers added up, embedding"
TIMES = {f"times that {what} counts" for what in ("a weight of an MLP", "a norm", "the embedding")}
RESULT = {f"{what} of all steps: largest difference" for what in ("losses", "norms")}
ALL = {GRADIENT} | TIMES | RESULT
STRIDE = "from a rank to the next in its group"
CABLE = "bytes that need the cable"
COPY = "            continue  # a copy: the "
SEND = "append(dist.P2POp(dist.isend, result, group=pipe, group_peer=receiver))\n"
RECEIVE = "append(dist.P2POp(dist.irecv, arrived, group=pipe, group_peer=sender))\n"
AGAIN = "            messages."
ADD_ENDS = "        dist.all_reduce(stage.embedding.weight.grad, group=stage.ends)\n"
SQRT = "    return total.sqrt()\n"
LINES = {
    "the norm counts copies along tp (Try)": (
        (
            "        if split_along(name) is None and stage.tp.rank() > 0:\n"
            f"{COPY}first rank along tp counts it\n",
            "",
        ),
        RESULT,
    ),
    "the norm counts the embedding on both stages": (
        (
            '        if name == "embedding.weight" and not stage.first:\n'
            f"{COPY}first stage counts it\n",
            "",
        ),
        RESULT,
    ),
    "the norm is a stage's own": (("    dist.all_reduce(total, group=stage.pp)", ""), RESULT),
    "the tied embedding's gradient is not summed": (
        (ADD_ENDS, "        pass\n"),
        {GRADIENT, ENDS, "times that the embedding counts"} | RESULT,
    ),
    "the ends add up once more for nothing": (
        (ADD_ENDS, ADD_ENDS + ADD_ENDS.replace(".grad,", ".grad.clone(),")),
        {ENDS},
    ),
    "micro-batches are averaged twice": (
        (".sum() / (B * T)", ".sum() / (B * T) / MICRO_BATCHES"),
        ALL,
    ),
    "tp is outermost (Try)": (
        (
            '(pp, dp, tp), mesh_dim_names=("pp", "dp", "tp")',
            '(tp, dp, pp), mesh_dim_names=("tp", "dp", "pp")',
        ),
        {f"{axis}: {what}" for axis in ("tp", "pp") for what in (STRIDE, CABLE)},
    ),
    "f does not sum": (
        ("return all_reduce(grad, ctx.group), None", "return grad, None"),
        ALL | {"tp: bytes handed over"},
    ),
    "g does not sum": (
        ("        return all_reduce(x, group)\n", "        return x.view_as(x)\n"),
        ALL | {"tp: bytes handed over"},
    ),
    "an MLP is not split": (('"gate": 0, "up": 0, "down": 1, ', ""), ALL),
    "each message is sent twice": (
        [(SEND, SEND + AGAIN + SEND), (RECEIVE, RECEIVE + AGAIN + RECEIVE)],
        axis_rows("pp"),
    ),
}  # fmt: skip
ALONG_DP = {
    "gradients are not summed along dp": (
        ("    dist.all_reduce(bucket, group=stage.dp)\n", ""),
        ALL | axis_rows("dp"),
    ),
    "all ranks along dp take the same examples": (("[stage.dp.rank()]", "[0]"), ALL),
    "the gradient is the mean along dp": (
        ("    nn.utils.vector_to", "    bucket /= stage.dp.size()\n    nn.utils.vector_to"),
        ALL,
    ),
    "the norm is summed along dp too": (
        (SQRT, "    dist.all_reduce(total, group=stage.dp)\n" + SQRT),
        RESULT,
    ),
}  # fmt: skip
ON_TWO_AXES = {
    "tp is outside of dp": (
        (
            '(pp, dp, tp), mesh_dim_names=("pp", "dp", "tp")',
            '(pp, tp, dp), mesh_dim_names=("pp", "tp", "dp")',
        ),
        {f"{axis}: {what}" for axis in ("tp", "dp") for what in (STRIDE, CABLE)},
    ),
}
TOO_SHORT = {
    "a model that learns too little": (
        ("STEPS = 40\n", "STEPS = 3\n"),
        {"one process: the last loss, at most"},
    ),
}
BREAKS = [
    Breaks(LINES, ranks=4, changes=QUICK),
    Breaks(ALONG_DP, changes=QUICK, argv=("--mesh", "2,1,1")),
    Breaks(ON_TWO_AXES, ranks=4, changes=QUICK, argv=("--mesh", "2,1,2")),
    Breaks(TOO_SHORT, ranks=1),
]
ON_GPUS = OnGpus(changes=QUICK)
SIZES = {1: QUICK, 3: QUICK}
