"""The halves against autograd, lists against the papers' formulas, claims against broken lines."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import pipelining
from torch.utils.flop_counter import FlopCounterMode

from course.lessons import ROOT
from course.playing import Lazily, load
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/19_zero_bubble.py"
PLAIN_1F1B = Lazily("parallelism/07_pipeline_schedules.py")
lesson = Lazily(LESSON)
ranks = st.integers(1, 8)
costs = st.integers(1, 4)
EQUAL = {"F": 1, "I": 1, "W": 1, "B": 2}


# The simulator: an oracle for slots, which knows nothing of sends and receives


def simulate(orders: list[list[tuple]], slots: dict[str, int], message: int = 0) -> list[dict]:
    """The slot in which each rank starts each of its actions (kind, stage, micro-batch).

    An action starts when its rank is free and its causes are done, and have come as a message of so
    many slots if another rank has done them.
    """
    rank_of = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    last = max(rank_of)
    starts = [{} for _ in orders]
    clock = [0] * len(orders)
    done = {}  # the slot in which an action has ended
    todo = [list(order) for order in orders]
    while any(todo):
        before = len(done)
        for rank, actions in enumerate(todo):
            while actions and all(cause in done for cause in causes(actions[0], last)):
                action = actions.pop(0)
                kind, stage, k = action
                ready = clock[rank]
                for cause in causes(action, last):
                    away = rank_of[cause[1]] != rank
                    ready = max(ready, done[cause] + (message if away else 0))
                starts[rank][action] = ready
                clock[rank] = ready + slots[kind]
                done["I" if kind == "B" else kind, stage, k] = clock[rank]
        if len(done) == before:
            raise ValueError(f"these lists wait for each other for ever: {todo}")
    return starts


def causes(action: tuple, last: int) -> list[tuple]:
    """What must be done before; the I of a whole backward pass is done with it."""
    kind, stage, k = action
    if kind == "F":
        return [("F", stage - 1, k)] if stage > 0 else []
    if kind == "W":
        return [("I", stage, k)]
    return [("F", stage, k)] + ([("I", stage + 1, k)] if stage < last else [])


def held_at_most(order: list[tuple]) -> int:
    """Micro-batches between their F and their W or B, an activation of each stage counting one."""
    alive = most = 0
    for kind, _, _ in order:
        alive += {"F": 1, "I": 0, "B": -1, "W": -1}[kind]
        most = max(most, alive)
    return most


def complete(orders: list[list], stages: int, m: int, backward: str) -> None:
    """Each stage has every pass of every micro-batch once."""
    everything = Counter(action for order in orders for action in order)
    due = {(kind, s, k) for kind in f"F{backward}" for s in range(stages) for k in range(m)}
    assert everything == Counter(due)


def waits(starts: list[dict], slots: dict[str, int]) -> list[int]:
    """What each rank idles between its own first action and its own last."""
    found = []
    for actions, end in zip(starts, ends_of(starts, slots), strict=True):
        found.append(end - min(actions.values()) - sum(slots[kind] for kind, _, _ in actions))
    return found


def ends_of(starts: list[dict], slots: dict[str, int]) -> list[int]:
    """The slot in which each rank has done its last action."""
    return [max(slot + slots[kind] for (kind, _, _), slot in one.items()) for one in starts]


def test_slots_by_hand_and_lists_that_never_end() -> None:
    """p = 2, m = 1: F, F, then I on rank 1; its W runs while rank 0 does its I."""
    orders = lists_of("zb_h1", 2, 1)
    first, second = simulate(orders, EQUAL)
    assert first == {("F", 0, 0): 0, ("I", 0, 0): 3, ("W", 0, 0): 4}
    assert second == {("F", 1, 0): 1, ("I", 1, 0): 2, ("W", 1, 0): 3}
    assert waits([first, second], EQUAL) == [2, 0]
    assert ends_of([first, second], EQUAL) == [5, 4]
    assert [one["I", rank, 0] for rank, one in enumerate(simulate(orders, EQUAL, 1))] == [5, 3]
    with pytest.raises(ValueError, match="wait for each other for ever"):
        simulate([orders[0], orders[1][::-1]], EQUAL)


# The halves


def forward(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A stage's layers, under autograd."""
    for w in weights:
        x = torch.tanh(x @ w.T)
    return x


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_i_and_later_w_are_one_backward_pass(layers: int, m: int, seed: int) -> None:
    """In whatever order W is done."""
    torch.manual_seed(seed)
    weights = torch.randn(layers, 5, 5, dtype=torch.float64, requires_grad=True)
    stage = lesson.Stage(weights.detach().unbind())
    for k in range(m):
        x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        grad = torch.randn(3, 5, dtype=torch.float64)
        y = forward(weights, x)
        torch.testing.assert_close(stage.forward(k, x.detach()), y)
        y.backward(grad)
        torch.testing.assert_close(stage.backward_input(k, grad), x.grad)
    for k in reversed(range(m)):
        stage.backward_weights(k)
    torch.testing.assert_close(torch.stack(stage.grads), weights.grad)
    assert not stage.kept
    assert stage.most_held == m


def products(work: Callable, *given: object) -> float:
    """How many products of a 5 x 5 weight with a micro-batch of 3 rows `work` computes."""
    with FlopCounterMode(display=False) as counter:
        work(*given)
    return counter.get_total_flops() / (2 * 3 * 5 * 5)


@pytest.mark.parametrize("layers", [1, 4])
def test_each_half_is_one_product_per_layer_and_autograd_s_second_call_is_not(layers: int) -> None:
    """From I to W a stage keeps x and g of each layer, and not the output."""
    weights = torch.ones(layers, 5, 5)
    stage = lesson.Stage(weights.unbind())
    y = stage.forward(0, torch.ones(3, 5))
    assert products(stage.backward_input, 0, y) == layers
    assert len(stage.kept[0]) == 2 * layers
    assert products(stage.backward_weights, 0) == layers
    leaves = [w.requires_grad_() for w in weights.clone().unbind()]
    y = forward(leaves, torch.ones(3, 5))
    assert products(torch.autograd.grad, y, leaves, torch.ones_like(y)) == 2 * layers - 1


# Lists


def lists_of(name: str, p: int, m: int) -> list[list[tuple]]:
    """One of the lesson's, or ZB-H2: twice as far ahead, and twice the delay."""
    found = []
    for rank in range(p):
        if name == "zb_h2":
            order = lesson.split_1f1b(m, num_warmup=2 * (p - 1 - rank), delay=2 * rank)
        else:
            order = getattr(lesson, name)(rank, p, m)
        found.append([(kind, rank, k) for kind, k in order])
    return found


@given(ranks, st.integers(1, 24))
def test_1f1b_is_that_of_the_lesson_on_it(p: int, m: int) -> None:
    for rank in range(p):
        assert lesson.unsplit_1f1b(rank, p, m) == PLAIN_1F1B.one_f_one_b(rank, p, m)


@settings(deadline=None)
@given(ranks, st.integers(0, 12), costs, costs, costs)
def test_zb_h1_and_zb_h2_idle_as_the_paper_says_for_its_range(
    p: int, more: int, f: int, i: int, w: int
) -> None:
    """(p-1) (F + I - W) for m >= 2p-1 and W <= I, W <= F; and they hold p, and 2p-1, everywhere."""
    m = 2 * p - 1 + more
    slots = {"F": f, "I": i, "W": min(w, f, i)}
    for name, times, held in (("zb_h1", 1, p), ("zb_h2", 2, 2 * p - 1)):
        orders = lists_of(name, p, m)
        complete(orders, p, m, "IW")
        assert {held_at_most(order) for order in orders} == {held}
        bubble = (p - 1) * (f + i - times * slots["W"])
        starts = simulate(orders, slots)
        assert waits(starts, slots)[0] == bubble
        if name == "zb_h1":
            assert max(ends_of(starts, slots)) == m * sum(slots.values()) + bubble


@settings(deadline=None)
@given(ranks, st.integers(0, 12), costs, costs, costs)
def test_the_table_of_what_each_schedule_idles(p: int, more: int, f: int, i: int, w: int) -> None:
    """Whatever the passes cost: a W longer than F or I saves no more than the shorter of them."""
    m = 2 * p - 1 + more
    slots = {"F": f, "I": i, "W": w, "B": i + w}
    for name, hop in (("unsplit_1f1b", f + i + w), ("w_at_once", f + i)):
        ends = ends_of(simulate(lists_of(name, p, m), slots), slots)
        assert max(ends) == m * (f + i + w) + (p - 1) * hop
    ends = ends_of(simulate(lists_of("zb_h1", p, m), slots), slots)
    assert max(ends) == m * (f + i + w) + (p - 1) * (f + i - min(f, i, w))


@settings(deadline=None)
@given(ranks, st.integers(0, 12))
def test_within_one_step_zb_h2_ends_when_zb_h1_does(p: int, more: int) -> None:
    m = 2 * p - 1 + more
    ends = []
    for name in "zb_h1", "zb_h2":
        starts = simulate(lists_of(name, p, m), EQUAL)
        ends.append(max(ends_of(starts, EQUAL)))
        first = next(slot for action, slot in starts[0].items() if action[0] == "I")
        assert first == 2 * p - 1
    assert ends == [3 * m + p - 1] * 2


@pytest.mark.parametrize("p", range(1, 9))
def test_few_micro_batches_have_all_their_passes(p: int) -> None:
    """Even fewer than a rank's delay."""
    for m in range(1, p + 1):
        complete(lists_of("zb_h1", p, m), p, m, "IW")


def test_the_grids_of_the_text() -> None:
    """p = 3, m = 4, and what each rank holds; then rank 2's list with and without delay."""
    text = (ROOT / LESSON).read_text(encoding="utf-8")
    grids = {}
    for name, length in (("unsplit_1f1b", 18), ("w_at_once", 16), ("zb_h1", 14)):
        orders = lists_of(name, 3, 4)
        for rank, actions in enumerate(simulate(orders, EQUAL)):
            cells = [" ."] * length
            for (kind, _, k), slot in actions.items():
                cells[slot : slot + EQUAL[kind]] = EQUAL[kind] * [f"{kind}{k}"]
            row = f"rank {rank}          {' '.join(cells)}      {held_at_most(orders[rank])}\n"
            assert row in text
            grids[name] = cells
    for title, name, end in (("W at once", "w_at_once", 12), ("two later", "zb_h1", 10)):
        assert f"{title}       {' '.join(grids[name][2:14])}    I3 in slot {end}\n" in text
        assert grids[name][end] == "I3"


def torchs_lists(name: str, p: int, m: int, v: int) -> list[list[tuple]]:
    """The lists of one of PyTorch's schedules, made without ranks."""
    made = SimpleNamespace(pp_group_size=p, num_stages=v * p, n_local_stages=v, _n_microbatches=m)
    made.microbatches_per_round = p
    found = []
    for rank in range(p):
        kind = getattr(pipelining, f"Schedule{name}")
        order = []
        for action in kind._calculate_single_rank_operations(made, rank):
            for one in (action.sub_actions or [action]) if action else []:
                order.append((one.computation_type.value, one.stage_index, one.microbatch_index))
        found.append(order)
    return found


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 8), st.integers(2, 4))
def test_pytorch_s_lists_idle_what_the_lesson_says(p: int, rounds: int) -> None:
    """ZB-V never waits, and holds what 1F1B's rank 0 does: 2p stages half as large."""
    m = rounds * p
    assert torchs_lists("InterleavedZeroBubble", p, m, 1) == lists_of("zb_h1", p, m)
    orders = torchs_lists("ZBVZeroBubble", p, m, 2)
    assert max(waits(simulate(orders, EQUAL), EQUAL)) == 0
    assert max(map(held_at_most, orders)) == 2 * p


# What is measured


@settings(deadline=None, max_examples=30)
@given(ranks, st.integers(1, 20), st.sampled_from(["zb_h1", "w_at_once", "unsplit_1f1b"]))
def test_lists_are_played_as_the_simulator_does(p: int, m: int, name: str) -> None:
    orders = lists_of(name, p, m)
    expected = simulate(orders, EQUAL)
    found = lesson.play([[(kind, k) for kind, _, k in order] for order in orders])
    for ours, actions in zip(found, expected, strict=True):
        assert ours == {(kind, k): slot for (kind, _, k), slot in actions.items()}
    assert lesson.idle(found) == max(ends_of(expected, EQUAL)) - 3 * m


def test_lists_that_wait_for_each_other_end() -> None:
    assert lesson.play([[("I", 0), ("F", 0)], [("F", 0), ("I", 0)]]) == [{}, {}]


def test_the_answers_numbers() -> None:
    """Four ranks, eight micro-batches: every rank delayed by p-1, and F of two slots."""

    def idle(orders: list[list], slots: dict[str, int]) -> int:
        work = sum(slots[kind] for kind, _, _ in orders[0])
        return max(ends_of(simulate(orders, slots), slots)) - work

    late = [lesson.split_1f1b(8, num_warmup=3 - rank, delay=3) for rank in range(4)]
    late = [[(kind, rank, k) for kind, k in order] for rank, order in enumerate(late)]
    assert idle(late, EQUAL) == 6
    assert held_at_most(late[0]) == 7
    assert [kind for kind, _, _ in late[0]][-5:] == list("IWWWW")
    names = ("unsplit_1f1b", "w_at_once", "zb_h1")
    assert [idle(lists_of(name, 4, 8), EQUAL) for name in names] == [9, 6, 3]
    slow = EQUAL | {"F": 2}
    assert [idle(lists_of(name, 4, 8), slow) for name in names] == [12, 9, 6]


def test_real_stages_are_judged_by_the_formulas() -> None:
    """Four ranks, eight micro-batches whose F, I and W take 8, 16 and 12 ms in all."""
    own, claims = load(LESSON), []
    times = iter(
        [8.0, 24.0, 36.0, 36.0, 48.0, 36.0, 99.0, 36.0, 48.0, 36.0, 40.0, *[36.0] * 3, 40.0]
    )
    own.WORLD_SIZE = 4
    own.median_ms = lambda work, repeats: next(times)
    own.claim = lambda text, *numbers, **_: claims.append(numbers)
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        own.check_gpus(torch.device("meta"), None, None)
    assert claims == [
        (pytest.approx(3 / 11), pytest.approx(12 / 48)),
        (pytest.approx(3 * 2 / (36 + 3 * 2)), pytest.approx(4 / 40)),
    ]


# Broken lines

ERRORS = {f"{name}: error of the gradients" for name in ("1F1B", "ZB-H1")}
IDLE = {f"{name}: slots idle" for name in ("1F1B", "W at once", "ZB-H1")}
HELD = "ZB-H1: micro-batches held, every rank"
UNLIKE = "torch's ZB, v = 1: actions unlike ZB-H1's"
ZB_H1, AT_ONCE = (
    f"def {name}(rank: int, p: int, m: int) -> list[Action]:\n"
    "    return split_1f1b(m, num_warmup=p - 1 - rank, "
    for name in ("zb_h1", "w_at_once")
)
LINES = {
    "no W is delayed": (
        (f"{ZB_H1}delay=rank)", f"{ZB_H1}delay=0)"),
        {"ZB-H1: slots idle", HELD, UNLIKE},
    ),
    "every W is delayed as the last rank's (Try)": (
        (f"{ZB_H1}delay=rank)", f"{ZB_H1}delay=p - 1)"),
        {"ZB-H1: slots idle", HELD, UNLIKE},
    ),
    "W at once is delayed": (
        (f"{AT_ONCE}delay=0)", f"{AT_ONCE}delay=rank)"),
        {"W at once: slots idle"},
    ),
    "the derivative of tanh is left out": (("grad * (1 - y * y)", "grad * 1"), ERRORS),
    "activations are kept": (
        ("self.kept.pop(k)", "self.kept[k]"),
        {"1F1B: micro-batches held, last rank", HELD},
    ),
    "what another rank does is not waited for": (
        ("max(now[rank], ends.get(needed, 0))", "now[rank]"),
        IDLE,
    ),
    "a forward pass takes two slots (Try)": (('"F": 1, "I": 1', '"F": 2, "I": 1'), IDLE),
}
BREAKS = [Breaks(LINES)]
