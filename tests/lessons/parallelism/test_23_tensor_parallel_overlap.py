"""The overlapped layer against one process, the record of its order, the widths; broken lines."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/23_tensor_parallel_overlap.py"
lesson = Lazily(LESSON)


def errors(cases: list[tuple[int, int]]) -> list[float]:
    """How far both layers are from one process, with so many tokens and outputs per rank."""
    changed = load(LESSON)
    found = []
    for tokens, outputs in cases:
        case = changed.Case(torch.device("cpu"), tokens, outputs * dist.get_world_size())
        for layer in (changed.plain_columns, changed.OverlappedColumns.apply):
            weight_eD, grad_Ne = case.part()
            gradients = changed.backward_of(layer, case.x_ND, weight_eD, grad_Ne)()
            found.append(case.error(*gradients))
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_both_layers_equal_one_process(n: int) -> None:
    cases = [(1, 1), (2, 5), (7, 3), (33, 8)]
    assert max(max(found) for found in run(errors, n, cases)) < 1e-13


def passes_twice() -> bool:
    """Whether a second backward pass of the same graph gives the same: a sum is not added to."""
    changed = load(LESSON)
    case = changed.Case(torch.device("cpu"))
    backward = changed.backward_of(changed.OverlappedColumns.apply, case.x_ND, *case.part())
    return all(map(torch.equal, backward(), backward()))


def test_a_backward_pass_can_be_repeated() -> None:
    assert all(run(passes_twice, 2))


def added_up_by_f() -> float:
    """What becomes of a gradient of 2**rank where ranks 0, 1 are a group, and ranks 2, 3."""
    changed = load(LESSON)
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.zeros(1, requires_grad=True)
    changed.CopyToRanks.apply(x, groups[rank // 2]).backward(torch.tensor([2.0**rank]))
    return x.grad.item()


def test_f_adds_up_over_its_group_alone() -> None:
    assert run(added_up_by_f, 4) == [3, 3, 12, 12]


def test_what_comes_during_a_sum() -> None:
    log = [("product", 1), ("start", 9), ("product", 2), ("product", 3), ("wait", 0)]
    log.append(("product", 4))
    assert lesson.during_the_sum(log) == [2, 3]
    assert lesson.during_the_sum(log[:4]) == []  # nobody waits for it


def log_of_two_products() -> list[tuple[str, int]]:
    """Of one before and one after a sum that is not asynchronous."""
    changed = load(LESSON)
    a, b = torch.ones(2, 3), torch.ones(3, 5)

    def backward() -> tuple:
        total = a @ b
        dist.all_reduce(total)
        return total, total.T @ a

    log, (total, _) = changed.logged(backward)
    assert torch.equal(total, torch.full([2, 5], 3.0 * dist.get_world_size()))
    return log


def test_a_log_has_flops_and_bytes() -> None:
    log = [("product", 2 * 2 * 3 * 5), ("start", 4 * 2 * 5), ("wait", 0), ("product", 60)]
    assert run(log_of_two_products, 2) == [log] * 2


@given(st.integers(2, 64), st.floats(1e13, 1e16), st.floats(1e10, 2e12))
def test_the_width_is_where_product_and_ring_take_as_long(n: int, peak: float, rate: float) -> None:
    outputs = lesson.outputs_that_hide_the_sum(n, peak, rate)
    product = 2 * 100 * 50 * outputs / n / peak
    ring = 2 * (n - 1) / n * 100 * 50 * 2 / rate
    assert product == pytest.approx(ring)


def test_widths_in_the_text(capsys: pytest.CaptureFixture) -> None:
    lesson.print_widths()
    said = capsys.readouterr().out
    for number in ("1,040", "2,198", "2,500", "19,780", "7,692", "5,128", "69,230", "8,750"):
        assert number in said
    assert max(map(len, said.splitlines())) <= 100
    assert lesson.outputs_that_hide_the_sum(8, 989e12, 450e9) == pytest.approx(30_769, abs=1)


def test_what_is_saved_is_a_share_of_what_could_be() -> None:
    """Plain 10 ms, overlapped 8; the product takes 4 and the sum 5."""
    changed = load(LESSON)
    changed.WORLD_SIZE = 4
    ms = iter([10.0, 8.0, 4.0, 5.0])
    changed.median_ms = lambda work: next(ms)
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        changed.measure_on_gpus(torch.device("meta"))
    (row,) = changed.ledger
    assert row["measured"] == 0.5
    assert row["verdict"] == "PASS"
    assert changed.share_saved(10, 10, 4, 5) == 0


def end_of_main() -> tuple[str, bool]:
    changed = load(LESSON)
    changed.sys.argv = [LESSON]
    changed.time.sleep = lambda seconds: None
    with pytest.raises(SystemExit) as end:
        changed.main()
    return str(end.value), dist.is_initialized()


def test_five_ranks_are_refused_before_any_collective() -> None:
    for text, initialized in run(end_of_main, 5, group=False):
        assert "share 1536 outputs evenly; got 5; set --nproc-per-node to 1, 2" in text
        assert not initialized


NAMES = ("plain", "overlapped")
PLAIN_ERROR, ERROR = (f"{name}: error of the gradients" for name in NAMES)
PLAIN_BEFORE, BEFORE = (f"{name}: products before the sum" for name in NAMES)
DURING = "overlapped: products during the sum"
PER_BYTE = "FLOPs hidden behind, per byte sent"
TOKENS, OUTPUTS = "four times the tokens: FLOPs per byte", "twice the outputs: FLOPs per byte"
NOTHING_HIDDEN = {DURING, PER_BYTE, TOKENS, OUTPUTS}

STARTED = "        sum_of_dX = dist.all_reduce(grad_ND, async_op=True)\n"
MEANWHILE = "        grad_eD = grad_Ne.T @ x_ND  # meanwhile\n"
WAITED = "        sum_of_dX.wait()\n"
LINES = {
    "the sum is waited for at once (Try)": (
        [(MEANWHILE + WAITED, WAITED + MEANWHILE)],
        NOTHING_HIDDEN,
    ),
    "the sum starts last": (
        [(STARTED + MEANWHILE, MEANWHILE + STARTED)],
        NOTHING_HIDDEN | {BEFORE},
    ),
    "a copy is summed": (
        ("dist.all_reduce(grad_ND, async_op=True)", "dist.all_reduce(grad_ND + 0, async_op=True)"),
        {ERROR},
    ),
    "f averages": (
        ("return all_reduce(grad, ctx.group), None", "return all_reduce(grad) / WORLD_SIZE, None"),
        {PLAIN_ERROR},
    ),
    "something else is summed as well": (
        (STARTED, f"{STARTED}        other = dist.all_reduce(grad_ND + 0, async_op=True)\n"),
        {PER_BYTE, TOKENS, OUTPUTS},
    ),
    "the plain layer overlaps": (
        (
            "    return F.linear(CopyToRanks.apply(x_ND), weight_eD)",
            "    return OverlappedColumns.apply(x_ND, weight_eD)",
        ),
        {PLAIN_BEFORE},
    ),
    "the product grows with the tokens alone": (
        ("Case(device, tokens=4 * N)", "Case(device, outputs=4 * E)"),
        {TOKENS},
    ),
    "the product does not grow with the outputs": (
        ("Case(device, outputs=2 * E)", "Case(device, tokens=2 * N)"),
        {OUTPUTS},
    ),
}
BREAKS = Breaks(LINES, alone=("the plain layer overlaps",))


@pytest.mark.parametrize(("element_bytes", "outputs"), [(1, 1_400), (2, 2_800), (4, 5_600)])
def test_the_width_grows_with_the_bytes_of_an_element(element_bytes: int, outputs: int) -> None:
    """Eight ranks; 200 FLOPs in the time of a byte."""
    assert lesson.outputs_that_hide_the_sum(8, 600.0, 3.0, element_bytes) == outputs
