"""The tensor-parallel lesson's layers on sizes of every kind, every claim against a broken line."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exercises.ranks import run
from tests.lessons import load, play

LESSON = "parallelism/04_model_tensor_parallel.py"
CLOSE = 1e-12  # relative, float64, sums of some hundred terms


def linear_apart(inner: int, outer: int, bias: bool, seed: int) -> float:
    """How far column and row layers are from one process: outputs, and all gradients."""
    lesson = load(LESSON)
    torch.manual_seed(seed)
    whole = nn.Linear(inner, outer, bias=bias, dtype=torch.float64)
    x, grad = torch.randn(3, 2, inner).double(), torch.randn(3, 2, outer).double()
    x.requires_grad_()
    y = whole(x)
    y.backward(grad)
    off = []
    for style, cut_in, cut_out in (lesson.ColumnLinear, None, 2), (lesson.RowLinear, 2, None):
        into, out = (
            (lambda t: t.detach()) if dim is None else (lambda t, d=dim: lesson.cut(t, d))
            for dim in (cut_in, cut_out)
        )
        part, mine = style(whole), into(x).requires_grad_()
        ours = part(mine)
        ours.backward(out(grad))
        off += [(ours, out(y)), (mine.grad, into(x.grad))]
        off += [(part.weight.grad, lesson.cut(whole.weight.grad, 0 if cut_out else 1))]
        if bias:
            due = whole.bias.grad
            off += [(part.bias.grad, lesson.cut(due, 0) if cut_out else due)]
        else:
            assert part.bias is None
    return max((a - b).abs().max().item() for a, b in off if a.numel())


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(4, 13), st.integers(4, 13), st.booleans(), st.integers(0, 99))
def test_linear_layers_equal_one_process_features_uneven_too(
    n: int, inner: int, outer: int, bias: bool, seed: int
) -> None:
    assert max(run(linear_apart, n, inner, outer, bias, seed)) < CLOSE


def block_apart(tokens: int, batch: int, heads: int, head: int, sequence: bool) -> float:
    lesson = load(LESSON, ("T, B, D, H = 24, 2, 96, 24", f"T, B, D, H = {tokens}, {batch}, 96, 24"))
    torch.manual_seed(0)
    whole = lesson.Block(heads * head, heads, dtype=torch.float64)
    lesson.D = heads * head
    ways = (lesson.gather_tokens, lesson.scatter_tokens) if sequence else ()
    dims = (0, 0) if sequence else (None, None)
    return lesson.compare(lesson.split(whole, *ways), whole, "forward", dims)[0]


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.data())
def test_a_block_equals_one_process(
    n: int, times: int, batch: int, per_rank: int, data: st.DataObject
) -> None:
    sequence, head = data.draw(st.booleans()), data.draw(st.integers(1, 5))
    tokens = n * times if sequence else 1 + times
    assert max(run(block_apart, n, tokens, batch, n * per_rank, head, sequence)) < CLOSE


def refusal(heads: int) -> str:
    lesson = load(LESSON)
    with pytest.raises(ValueError, match="heads") as error:
        lesson.split(lesson.Block(heads * 4, heads))
    return str(error.value)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    text = "ranks must share heads evenly, got 4 heads for 3 ranks; use a number of ranks that"
    assert all(answer.startswith(text) for answer in run(refusal, 3, 4))


def end_of_main() -> tuple[str, bool]:
    lesson = load(LESSON)
    lesson.time.sleep = lambda seconds: None
    with pytest.raises(SystemExit) as end:
        lesson.main(None)
    return str(end.value), dist.is_initialized()


def test_the_lesson_refuses_five_ranks_before_any_collective() -> None:
    for text, initialised in run(end_of_main, 5, group=False):
        assert "divides 24 heads, got 5; set --nproc-per-node to 1, 2, 3, 4, 6, 8" in text
        assert not initialised


def ranks_agree() -> list[bool]:
    """Which gradients are the same on all ranks: those of what is not cut must be."""
    lesson = load(LESSON)
    torch.manual_seed(0)
    whole = lesson.Block(lesson.D, lesson.H, dtype=torch.float64)
    same = []
    for ways, dims in ((), (None, None)), ((lesson.gather_tokens, lesson.scatter_tokens), (0, 0)):
        part = lesson.split(whole, *ways)
        lesson.compare(part, whole, "forward", dims)
        for name, p in part.named_parameters():
            if name not in lesson.CUT:
                everyone = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
                dist.all_gather(everyone, p.grad)
                same += [torch.equal(p.grad, other) for other in everyone]
    return same


def test_what_is_not_cut_keeps_the_same_gradients_on_all_ranks() -> None:
    assert all(map(all, run(ranks_agree, 3)))


R, T, D = "results, from one process", "tokens cut: ", "DTensor, tokens "
BYTES = T + "bytes sent / bytes sent without"


def claims(layers: tuple[str, ...], *kinds: str) -> set[str]:
    return {f"{layer}: {kind}" for layer in layers for kind in kinds}


BREAKS = {
    "g does not sum": (
        ("(y_TBD, summed, untouched)", "(y_TBD, untouched, untouched)"),
        claims(("out", "mlp", "attention"), R, "all-reduces forward")
        | {BYTES, D + "whole: calls unlike ours forward"},
    ),
    "f does not sum": (
        ("(x_TBD, untouched, summed)", "(x_TBD, untouched, untouched)"),
        claims(("up", "mlp", "attention"), R, "all-reduces backward")
        | {BYTES, D + "whole: calls unlike ours backward"},
    ),
    "g sums backward too": (
        ("(y_TBD, summed, untouched)", "(y_TBD, summed, summed)"),
        claims(("out", "mlp", "attention"), R, "all-reduces backward")
        | {BYTES, D + "whole: calls unlike ours backward"},
    ),
    "the bias is added n times": (
        (
            "self.leave(F.linear(x_TBf, self.weight))\n"
            "        return y_TBD if self.bias is None else y_TBD + self.bias",
            "self.leave(F.linear(x_TBf, self.weight, self.bias))\n        return y_TBD",
        ),
        {f"out: {R}", f"mlp: {R}", f"attention: {R}", T + R},
    ),
    "heads are torn apart": (
        ("(-1, (-1, 3, self.head))", "(-1, (3, -1, self.head)).transpose(2, 3)"),
        {f"attention: {R}", T + R, D + f"whole: {R}", D + f"cut: {R}"},
    ),
    "norms' gradients are not summed": (
        ("        sum_token_gradients(part)\n", "        pass\n"),
        {T + R},
    ),
    "tokens' gradients are not summed": (
        ("(x_tBD, gathered, sum_scattered)", "(x_tBD, gathered, lambda grad: cut(grad, 0))"),
        {T + R, T + "reduce-scatters backward", BYTES, D + "cut: calls unlike ours backward"},
    ),
    "an all-reduce where half would do": (
        ("(y_TBD, sum_scattered, gathered)", "(y_TBD, lambda y: cut(summed(y), 0), gathered)"),
        {T + "reduce-scatters forward", BYTES, D + "cut: calls unlike ours forward"},
    ),
    "tokens are not gathered": (
        ("    part = split(whole, gather_tokens, scatter_tokens)\n", "    part = split(whole)\n"),
        {T + R, BYTES, T + "numbers spared, (1-1/n) of the norms'"}
        | {T + f"all-gathers {way}" for way in ("forward", "backward")}
        | {T + f"reduce-scatters {way}" for way in ("forward", "backward")},
    ),
    "the plan forgets the norms": (("    if cut_tokens:\n", "    if False:\n"), {D + f"cut: {R}"}),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_line_fails_the_claims_that_guard_it_and_no_others(what: str) -> None:
    change, guards = BREAKS[what]
    played = play(LESSON, 2, change)
    assert played.failed == guards, played.output
    assert played.code == 1
