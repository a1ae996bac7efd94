"""The halves against autograd, lists against the papers' formulas, claims against broken lines."""

from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import pipelining

from course.lessons import ROOT
from course.playing import Lazily, load
from course.ranks import run
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


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_i_and_later_w_are_one_backward_pass(layers: int, m: int, seed: int) -> None:
    """In whatever order W is done."""
    torch.manual_seed(seed)
    weights = torch.randn(layers, 5, 5, dtype=torch.float64)
    stage = lesson.Stage(weights.unbind())
    module = lesson.Layers(weights)
    for k in range(m):
        x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        grad = torch.randn(3, 5, dtype=torch.float64)
        y = module(x)
        torch.testing.assert_close(stage.forward(k, x.detach()), y)
        y.backward(grad)
        torch.testing.assert_close(stage.backward_input(k, grad), x.grad)
    for k in reversed(range(m)):
        stage.backward_weights(k)
    for ours, w in zip(stage.grads, module.weights, strict=True):
        torch.testing.assert_close(ours, w.grad)
    assert not stage.kept


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
    """p = 3, m = 4, and what each rank holds."""
    text = (ROOT / LESSON).read_text(encoding="utf-8")
    for name, length in (("unsplit_1f1b", 18), ("zb_h1", 14)):
        orders = lists_of(name, 3, 4)
        for rank, actions in enumerate(simulate(orders, EQUAL)):
            cells = [" ."] * length
            for (kind, _, k), slot in actions.items():
                cells[slot : slot + EQUAL[kind]] = EQUAL[kind] * [f"{kind}{k}"]
            row = f"rank {rank}      {' '.join(cells)}      {held_at_most(orders[rank])}\n"
            assert row in text


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


# The run


def followed(name: str, m: int) -> tuple[dict, int]:
    """What a rank finds: the slots of its actions, and how many it idles."""
    changed = load(LESSON)
    changed.groups["clocks"] = None
    starts = changed.slots_of(getattr(changed, name)(changed.RANK, changed.WORLD_SIZE, m))
    return starts, changed.idle(changed.gather_objects(starts))


@settings(deadline=None, max_examples=6)
@given(st.integers(1, 4), st.integers(2, 4), st.sampled_from(["zb_h1", "unsplit_1f1b"]))
def test_slots_that_ranks_find_are_the_simulator_s(p: int, rounds: int, name: str) -> None:
    m = rounds * p
    expected = simulate(lists_of(name, p, m), EQUAL)
    idle = max(ends_of(expected, EQUAL)) - 3 * m
    for (found, idles), actions in zip(run(followed, p, name, m), expected, strict=True):
        assert found == {(kind, k): slot for (kind, _, k), slot in actions.items()}
        assert idles == idle


def kept(name: str, m: int) -> list[tuple[int, int]]:
    """The most that each of four ranks keeps, in micro-batches and in tensors; four layers."""
    found = []
    for rank in range(4):
        stage = lesson.NotedStage(torch.ones(4, 2, 2).unbind())
        for kind, k in getattr(lesson, name)(rank, 4, m):
            if kind == "F":
                stage.forward(k, torch.ones(1, 2))
            if kind in ("I", "B"):
                stage.backward_input(k, torch.ones(1, 2))
            if kind in ("W", "B"):
                stage.backward_weights(k)
        found.append((stage.most_held, stage.most_tensors))
    return found


def test_what_each_rank_keeps() -> None:
    """As the answers say: under 1F1B 23 tensors at the most, on rank 0; under ZB-H1 32."""
    assert kept("unsplit_1f1b", 8) == [(4, 23), (3, 18), (2, 13), (1, 8)]
    assert kept("zb_h1", 8) == [(4, 23), (4, 26), (4, 29), (4, 32)]


def test_real_stages_are_judged_by_the_formulas() -> None:
    """Four ranks, eight micro-batches: 8 of 11 and of 9 are a rank's own work."""
    own, claims = load(LESSON), []
    times = iter([8.0, 11.0, 8.0, 99.0, 8.0, 11.0, 8.0, 9.0, 8.0, 8.0, 8.0, 9.0])
    own.WORLD_SIZE = 4
    own.median_ms = lambda work, repeats: next(times)
    own.claim = lambda text, *numbers, **_: claims.append(numbers)
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        own.check_gpus(torch.device("meta"))
    assert claims == [
        (Fraction(3, 11), pytest.approx(3 / 11)),
        (Fraction(3, 27), pytest.approx(1 / 9)),
    ]


# Broken lines

INPUT, WEIGHTS = "I: products", "W: products"
AUTOGRAD = "autograd.grad(y, weights): products"
ERRORS, IDLE, HELD = (
    {f"{name}: {what}" for name in ("1F1B", "ZB-H1")}
    for what in ("error of the gradients", "slots idle", "micro-batches held, last rank")
)
BACK = "ZB-H1: slot of rank 0's first I"
LATE = "ZB-H1: tensors kept, last rank"
KEPT = {"1F1B: tensors kept, rank 0", LATE}
UNLIKE = "torch's ZB, v = 1: actions unlike ZB-H1's"
POP = "        kept = self.kept.pop(k)\n"
WALK = "        [g @ w for g, w in zip(kept[-len(self.weights) :], self.weights, strict=True)]\n"
LINES = {
    "W walks I's products once more": ((POP, POP + WALK), {WEIGHTS}),
    "I does W's products, too": (
        (
            "            grad = gs[-1] @ w\n",
            "            gs[-1].T @ y\n            grad = gs[-1] @ w\n",
        ),
        {INPUT},
    ),
    "the output is kept from I to W": (
        [("= xs[:-1] + gs[::-1]", "= xs + gs[::-1]"), ("kept[layers:]", "kept[layers + 1 :]")],
        KEPT,
    ),
    "autograd is asked for one layer's weights": (
        ("list(layers.weights), torch", "list(layers.weights)[:1], torch"),
        {AUTOGRAD},
    ),
    "no W is delayed (Try)": (
        ("num_warmup=p - 1 - rank, delay=rank)", "num_warmup=p - 1 - rank, delay=0)"),
        {"ZB-H1: slots idle", "ZB-H1: micro-batches held, last rank", LATE, UNLIKE},
    ),
    "the derivative of tanh is left out": (("grad * (1 - y * y)", "grad * 1"), ERRORS),
    "activations are kept": (("self.kept.pop(k)", "self.kept[k]"), HELD | KEPT),
    "a clock is not read": (
        ("            now = max(now, clock.item())\n", ""),
        IDLE | {BACK},
    ),
    "a forward pass takes two slots (Try)": (('"F": 1, "I": 1', '"F": 2, "I": 1'), IDLE | {BACK}),
}
BREAKS = [Breaks(LINES)]
