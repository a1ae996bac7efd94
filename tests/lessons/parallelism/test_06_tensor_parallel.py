"""The tensor-parallel lesson's layers on sizes of every kind, every claim against a broken line."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/06_tensor_parallel.py"
CLOSE = 1e-12  # relative, float64, sums of some hundred terms


def linear_error(inner: int, outer: int, bias: bool, seed: int) -> float:
    """How far column and row layers are from one process: outputs, and all gradients."""
    lesson = load(LESSON)
    torch.manual_seed(seed)
    whole = nn.Linear(inner, outer, bias=bias, dtype=torch.float64)
    x, grad = torch.randn(3, 2, inner).double(), torch.randn(3, 2, outer).double()
    x.requires_grad_()
    y = whole(x)
    y.backward(grad)
    pairs = []
    column = lesson.ColumnParallelLinear, lesson.CopyToRanks, None, 2, 0
    row = lesson.RowParallelLinear, lesson.ReduceFromRanks, 2, None, 1
    for layer, way, dim_in, dim_out, dim_weight in column, row:
        part = layer(whole, way)
        mine = lesson.share(x, dim_in).requires_grad_()
        ours = part(mine)
        ours.backward(lesson.share(grad, dim_out))
        pairs.append((ours, lesson.share(y, dim_out)))
        pairs.append((mine.grad, lesson.share(x.grad, dim_in)))
        pairs.append((part.weight.grad, lesson.share(whole.weight.grad, dim_weight)))
        if bias:
            dim = None if dim_out is None else 0
            pairs.append((part.bias.grad, lesson.share(whole.bias.grad, dim)))
        else:
            assert part.bias is None
    return max((a - b).abs().max().item() for a, b in pairs if a.numel())


def largest(error: Callable, cases: list[tuple]) -> float:
    """The largest error of these cases, one after another on the same ranks."""
    return max(error(*case) for case in cases)


layers = st.tuples(st.integers(4, 13), st.integers(4, 13), st.booleans(), st.integers(0, 99))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@settings(max_examples=2, deadline=None)
@given(st.lists(layers, min_size=4, max_size=9))
def test_linear_layers_equal_one_process_features_uneven_too(n: int, cases: list) -> None:
    assert max(run(largest, n, linear_error, cases)) < CLOSE


def block_error(tokens: int, batch: int, heads: int, head: int, sequence: bool) -> float:
    lesson = load(LESSON, ("T, B, D, H = 48, 2, 96, 48", f"T, B, D, H = {tokens}, {batch}, 96, 24"))
    lesson.D = heads * head
    torch.manual_seed(0)
    whole = lesson.TransformerBlock(heads * head, heads, dtype=torch.float64)
    ways = (lesson.GatherTokens, lesson.ScatterTokens) if sequence else ()
    errors = []
    lesson.claim = lambda text, predicted, measured, **_: errors.append(measured)
    lesson.compare("", lesson.tensor_parallel(whole, *ways), whole, 0 if sequence else None)
    assert len(errors) == 2
    return max(errors)


few = st.integers(1, 3)
wide = st.integers(2, 5)  # the norm of a model one wide is 0, and its error relative to it 0/0
blocks = st.tuples(few, few, st.integers(1, 2), wide, st.booleans())


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@settings(max_examples=2, deadline=None)
@given(st.lists(blocks, min_size=4, max_size=9))
def test_a_block_equals_one_process(n: int, drawn: list) -> None:
    cases = []
    for times, batch, heads_per_rank, head, sequence in drawn:
        tokens = n * times if sequence else 1 + times
        cases.append((tokens, batch, n * heads_per_rank, head, sequence))
    assert max(run(largest, n, block_error, cases)) < CLOSE


def test_the_whole_block_is_torchs_own() -> None:
    """Whole and split blocks share `attention`: this one does not."""
    torch.manual_seed(0)
    ours = load(LESSON).TransformerBlock(12, 3, dtype=torch.float64)
    theirs = nn.TransformerEncoderLayer(12, 3, 48, 0.0, "gelu", norm_first=True).double()
    parts = {"self_attn.out_proj": ours.out, "linear1": ours.up, "linear2": ours.down}
    parts |= {"norm1": ours.norm1, "norm2": ours.norm2}
    state = {f"{name}.{key}": t for name, p in parts.items() for key, t in p.state_dict().items()}
    for key, tensor in ours.qkv.state_dict().items():  # by head, then q, k, v: torch turns it round
        by_kind = tensor.unflatten(0, (3, 3, 4)).transpose(0, 1).flatten(0, 2)
        state[f"self_attn.in_proj_{key}"] = by_kind
    theirs.load_state_dict(state)
    x_TBD = torch.randn(5, 2, 12).double()
    mask_TT = torch.full((5, 5), -torch.inf).double().triu(1)
    assert (ours(x_TBD) - theirs(x_TBD, mask_TT)).abs().max() < CLOSE


def test_what_is_saved_twice_counts_once() -> None:
    """The product keeps both factors: two tensors, views of one storage."""
    assert load(LESSON).saved_elements(lambda x: x.view(1, 5) * x.view(5, 1), torch.randn(5)) == 5


def refusal(heads: int) -> str:
    lesson = load(LESSON)
    with pytest.raises(ValueError, match="heads") as error:
        lesson.tensor_parallel(lesson.TransformerBlock(heads * 4, heads))
    return str(error.value)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    text = "ranks must share heads evenly; got 4 heads for 3 ranks; use a number of ranks that"
    assert all(answer.startswith(text) for answer in run(refusal, 3, 4))


def end_of_main() -> tuple[str, bool]:
    lesson = load(LESSON)
    lesson.sys.argv = [LESSON]
    lesson.time.sleep = lambda seconds: None
    with pytest.raises(SystemExit) as end:
        lesson.main()
    return str(end.value), dist.is_initialized()


def test_the_lesson_refuses_five_ranks_before_any_collective() -> None:
    for text, initialized in run(end_of_main, 5, group=False):
        assert "share 48 heads evenly, and be 2 or more; got 5; set --nproc-per-node to 2" in text
        assert not initialized


def ranks_agree() -> list[bool]:
    """Which gradients are the same on all ranks: those of what is not split must be."""
    lesson = load(LESSON)
    lesson.claim = lambda *_, **__: None
    torch.manual_seed(0)
    whole = lesson.TransformerBlock(lesson.D, lesson.H, dtype=torch.float64)
    same = []
    for ways, dim in ((), None), ((lesson.GatherTokens, lesson.ScatterTokens), 0):
        part = lesson.tensor_parallel(whole, *ways)
        lesson.compare("", part, whole, dim)
        for name, p in part.named_parameters():
            if name not in lesson.SPLIT_ALONG:
                everyone = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
                dist.all_gather(everyone, p.grad)
                same += [torch.equal(p.grad, other) for other in everyone]
    return same


def test_what_is_not_split_keeps_the_same_gradients_on_all_ranks() -> None:
    assert all(map(all, run(ranks_agree, 3)))


def handed_over() -> bool:
    """Whether f's backward and g's forward leave what they are handed as it was."""
    lesson = load(LESSON)
    x, grad = torch.ones(3, requires_grad=True), torch.ones(3)
    lesson.CopyToRanks.apply(x).backward(grad)
    lesson.ReduceFromRanks.apply(x)
    both_sums = torch.equal(x.grad, torch.full((3,), 2.0))
    return both_sums and torch.equal(grad, torch.ones(3)) and torch.equal(x, torch.ones(3))


def test_f_and_g_leave_what_they_are_handed_as_it_was() -> None:
    assert all(run(handed_over, 2))


OUTPUT, GRADIENTS = "error of the output", "error of the gradients"
COLUMN, ROW = "column-parallel alone: all-reduces ", "row-parallel alone: all-reduces "
MLP, BLOCK, TP, SP = "MLP: ", "block: ", "tensor parallel: ", "sequence parallel: "
FORWARD, BACKWARD = "all-reduces forward", "all-reduces backward"
SCATTER_GATHER = ("reduce-scatters", "all-gathers")
DTENSOR, DTENSOR_SP = "DTensor: ", "DTensor, tokens split: "

HELD, SPARED = "elements held of the split weights", "saved elements spared"
SP_COUNTS = {f"{BLOCK}{call} {way}" for call in SCATTER_GATHER for way in ("forward", "backward")}

LINES = {
    "g does not sum": (
        ("        return all_reduce(x, group)\n", "        return x.view_as(x)\n"),
        {ROW + "forward", MLP + FORWARD, BLOCK + FORWARD, TP + OUTPUT, TP + GRADIENTS},
    ),
    "f does not sum (Try)": (
        ("return all_reduce(grad, ctx.group), None", "return grad, None"),
        {COLUMN + "backward", MLP + BACKWARD, BLOCK + BACKWARD, TP + GRADIENTS},
    ),
    "f sums forward too": (
        (
            "        ctx.group = group\n        return x.view_as(x)\n",
            "        ctx.group = group\n        return all_reduce(x, group)\n",
        ),
        {COLUMN + "forward", MLP + FORWARD, BLOCK + FORWARD, TP + OUTPUT, TP + GRADIENTS},
    ),
    "every rank holds the whole MLP": (  # the block stays right
        [
            (
                "    part.up = ColumnParallelLinear(block.up, enter)\n"
                "    part.down = RowParallelLinear(block.down, leave)\n",
                "",
            ),
            (  # whole weights have whole gradients
                "dim = SPLIT_ALONG.get(parameter_name)",
                "dim = SPLIT_ALONG[parameter_name]"
                " if parameter.shape != expected_grad.shape else None",
            ),
        ],
        {HELD, MLP + FORWARD, MLP + BACKWARD, BLOCK + FORWARD, BLOCK + BACKWARD}
        | {SP + GRADIENTS, SPARED}
        | SP_COUNTS,
    ),
    "g sums backward too": (
        ("        return grad, None\n", "        return all_reduce(grad), None\n"),
        {ROW + "backward", MLP + BACKWARD, BLOCK + BACKWARD, TP + GRADIENTS},
    ),
    "the bias is added n times (Try)": (
        (
            "self.leave.apply(F.linear(x_TBe, self.weight))\n        if self.bias is not None:",
            "self.leave.apply(F.linear(x_TBe, self.weight, self.bias))\n        if False:",
        ),
        {TP + OUTPUT, TP + GRADIENTS, SP + OUTPUT, SP + GRADIENTS},
    ),
    "heads are torn apart": (
        (
            "self.qkv(x_TBD).unflatten(-1, (-1, 3, self.head_width))",
            "self.qkv(x_TBD).unflatten(-1, (3, -1, self.head_width)).transpose(2, 3)",
        ),
        {way + what for way in (TP, SP, DTENSOR, DTENSOR_SP) for what in (OUTPUT, GRADIENTS)},
    ),
    "norms' gradients are not summed": (
        ("        sum_token_gradients(part)\n", "        pass\n"),
        {SP + GRADIENTS},
    ),
    "row biases' gradients are not summed": (
        ("    dist.all_reduce(part.out.bias.grad)\n", ""),
        {SP + GRADIENTS},
    ),
    "tokens' gradients are not summed": (
        ("return reduce_scatter_tokens(grad_TBD)", "return share(grad_TBD, 0)"),
        {SP + GRADIENTS, BLOCK + "reduce-scatters backward"},
    ),
    "an all-reduce where a reduce-scatter would do": (
        ("return reduce_scatter_tokens(x_TBD)", "return share(all_reduce(x_TBD), 0)"),
        {BLOCK + "reduce-scatters forward"},
    ),
    "tokens are not gathered": (
        (
            "    part = tensor_parallel(whole, GatherTokens, ScatterTokens)\n",
            "    part = tensor_parallel(whole)\n",
        ),
        {SP + OUTPUT, SP + GRADIENTS, SPARED} | SP_COUNTS,
    ),
    "the plan gathers features between columns and rows": (
        (
            '"up": ColwiseParallel(input_layouts=tokens),\n'
            '        "down": RowwiseParallel(output_layouts=tokens),\n',
            '"up": ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),\n'
            '        "down": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),\n',
        ),
        {
            f"{way}collectives {to}"
            for way in (DTENSOR, DTENSOR_SP)
            for to in ("forward", "backward")
        },
    ),
    "the plan forgets the norms": (
        ("    if sequence_parallel:\n", "    if False:\n"),
        {DTENSOR_SP + GRADIENTS},
    ),
}


BREAKS = Breaks(LINES)


def test_a_split_block_should_take_a_share_the_rest_and_two_sums() -> None:
    """On 4 ranks (10 - 2 x 0.5) / 4 + 2 x 0.5 + 2 x 0.75 ms."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    ms = iter([10.0, 4.0, 0.5, 0.75])  # whole, split; a norm and a residual; an all-reduce
    lesson.median_ms = lambda work: next(ms)
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        lesson.measure_on_gpus(torch.device("meta"))
    (row,) = lesson.ledger
    assert row["measured"] == pytest.approx(4 / 4.75)
    assert row["slack"] == pytest.approx(1.5 / 4.75 / 2)


def what_parts_hold() -> tuple[list[int], bool]:
    """Bytes behind weight and bias of both layers; whether a change of them leaves the whole."""
    lesson = load(LESSON)
    whole = nn.Linear(6, 8)
    before = [p.detach().clone() for p in whole.parameters()]
    column = lesson.ColumnParallelLinear(whole, lesson.CopyToRanks)
    row = lesson.RowParallelLinear(whole, lesson.ReduceFromRanks)
    held = [*column.parameters(), *row.parameters()]
    with torch.no_grad():
        for parameter in held:
            parameter.fill_(7)
    storages = [parameter.untyped_storage().nbytes() for parameter in held]
    return storages, all(map(torch.equal, whole.parameters(), before))


def test_a_part_is_a_copy_of_its_share_and_no_view_of_the_whole() -> None:
    """A view would keep all of the whole weight in memory, and train it too."""
    half_of_48, half_of_8, all_of_8 = 4 * 24, 4 * 4, 4 * 8
    assert run(what_parts_hold, 2) == [([half_of_48, half_of_8, half_of_48, all_of_8], True)] * 2
