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


def simulate(orders: list[list[tuple]], slots: dict[str, int]) -> list[dict]:
    """The slot in which each rank starts each of its actions (kind, stage, micro-batch).

    An action starts when its rank is free and its causes are done.
    """
    last = max(max(stage for _, stage, _ in order) for order in orders)
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
                ready = max([clock[rank], *(done[cause] for cause in causes(action, last))])
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
    for actions in starts:
        end = max(slot + slots[kind] for (kind, _, _), slot in actions.items())
        found.append(end - min(actions.values()) - sum(slots[kind] for kind, _, _ in actions))
    return found


def test_slots_by_hand_and_lists_that_never_end() -> None:
    """p = 2, m = 1: F, F, then I on rank 1; its W runs while rank 0 does its I."""
    orders = lists_of("zb_h1", 2, 1)
    first, second = simulate(orders, EQUAL)
    assert first == {("F", 0, 0): 0, ("I", 0, 0): 3, ("W", 0, 0): 4}
    assert second == {("F", 1, 0): 1, ("I", 1, 0): 2, ("W", 1, 0): 3}
    assert waits([first, second], EQUAL) == [2, 0]
    assert [lesson.waits(first), lesson.waits(second)] == [2, 0]
    assert [lesson.end_of(first), lesson.end_of(second)] == [5, 4]
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
    assert stage.most_held == m


# Lists


def lists_of(name: str, p: int, m: int) -> list[list[tuple]]:
    found = []
    for rank in range(p):
        found.append([(kind, rank, k) for kind, k in getattr(lesson, name)(rank, p, m)])
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
        assert waits(simulate(orders, slots), slots)[0] == bubble


@settings(deadline=None)
@given(ranks, st.integers(0, 12))
def test_within_one_step_zb_h2_ends_when_zb_h1_does(p: int, more: int) -> None:
    m = 2 * p - 1 + more
    ends = []
    for name in "zb_h1", "zb_h2":
        starts = simulate(lists_of(name, p, m), EQUAL)
        ends.append(max(map(lesson.end_of, starts)))
        first = next(slot for action, slot in starts[0].items() if action[0] == "I")
        assert first == 2 * p - 1
    assert ends == [3 * m + p - 1] * 2


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
    m = rounds * p
    known = (("InterleavedZeroBubble", 1, p - 1), ("InterleavedZeroBubble", 2, p - 1))
    for name, v, idle in (*known, ("ZBVZeroBubble", 2, 0), ("DualPipeV", 2, p - 1)):
        orders = torchs_lists(name, p, m, v)
        assert max(waits(simulate(orders, EQUAL), EQUAL)) == idle, name
        if v == 1:
            assert orders == lists_of("zb_h1", p, m)
        if name == "ZBVZeroBubble":
            assert max(map(held_at_most, orders)) == 2 * p  # of stages half as large


# The run


def followed(orders: list[list[tuple]], rank_of: list[int], m: int) -> dict:
    changed = load(LESSON)
    changed.groups["clocks"] = None
    changed.MICRO_BATCHES = m
    return changed.slots_of(orders[changed.RANK], rank_of)


@settings(deadline=None, max_examples=6)
@given(st.integers(1, 4), st.integers(2, 3), st.sampled_from(["zb_h1", "zb_h2", "unsplit_1f1b"]))
def test_slots_that_ranks_find_are_the_simulator_s(p: int, rounds: int, name: str) -> None:
    m = rounds * p
    orders = lists_of(name, p, m)
    assert run(followed, p, orders, list(range(p)), m) == simulate(orders, EQUAL)
    if p > 1:
        orders = torchs_lists("ZBVZeroBubble", p, m, 2)
        v_shape = [*range(p), *reversed(range(p))]
        assert run(followed, p, orders, v_shape, m) == simulate(orders, EQUAL)


def test_real_stages_are_judged_by_the_formulas() -> None:
    """Four ranks, eight micro-batches: 8 of 11 and of 9 are a rank's own work."""
    own, claims, times = load(LESSON), [], iter([8.0, 11.0, 9.0])
    own.WORLD_SIZE = 4
    own.median_ms = lambda work: next(times)
    own.claim = lambda text, *numbers, **_: claims.append(numbers)
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        own.check_gpus(torch.device("meta"))
    assert claims == [
        (Fraction(3, 11), pytest.approx(3 / 11)),
        (Fraction(3, 27), pytest.approx(1 / 9)),
    ]


# Broken lines

INPUT, WEIGHTS, KEPT = "I: products", "W: products", "tensors kept per layer from I to W"
AUTOGRAD = "autograd.grad(y, weights): products"
ERROR = "error of the gradients, any schedule"
IDLE = {f"{name}: slots idle, rank 0" for name in ("1F1B", "ZB-H1", "ZB-H2")}
LAST = {f"{name}: micro-batches held, last rank" for name in ("1F1B", "ZB-H1")}
HELD = LAST | {"ZB-H2: micro-batches held, rank 0"}
BACK, AS_IN_07 = "ZB-H2: slot of rank 0's I0", "ZB-H2: slots idle, counted as in 07"
UNLIKE = "torch's ZB, v = 1: actions unlike ZB-H1's"
TORCHS = {f"torch's {name}: half slots idle" for name in ("ZB, v = 2", "ZBV", "DualPipeV")}
POP = "        xs, gs = self.kept.pop(k)\n"
LINES = {
    "W walks I's products once more": (
        (POP, f"{POP}        [g @ w for g, w in zip(gs, self.weights, strict=True)]\n"),
        {WEIGHTS},
    ),
    "I does W's products, too": (
        (
            "            grad = gs[-1] @ w\n",
            "            gs[-1].T @ y\n            grad = gs[-1] @ w\n",
        ),
        {INPUT},
    ),
    "more is kept from I to W": (
        [
            ("(xs[:-1], gs[::-1])", "(xs[:-1], gs[::-1], gs)"),
            (POP, "        xs, gs, _ = self.kept.pop(k)\n"),
        ],
        {KEPT},
    ),
    "autograd is asked for one layer's weights": (
        ("list(layers.weights), torch", "list(layers.weights)[:1], torch"),
        {AUTOGRAD},
    ),
    "no W is delayed (Try)": (
        ("num_warmup=p - 1 - rank, delay=rank)", "num_warmup=p - 1 - rank, delay=0)"),
        {"ZB-H1: slots idle, rank 0", "ZB-H1: micro-batches held, last rank", UNLIKE},
    ),
    "ZB-H2 is ZB-H1": (
        ("num_warmup=2 * (p - 1 - rank), delay=2 * rank)", "num_warmup=p - 1 - rank, delay=rank)"),
        {"ZB-H2: slots idle, rank 0", "ZB-H2: micro-batches held, rank 0"},
    ),
    "the derivative of tanh is left out": (("grad * (1 - y * y)", "grad * 1"), {ERROR}),
    "activations are kept": (("self.kept.pop(k)", "self.kept[k]"), HELD),
    "a clock is not read": (
        ("            now = max(now, clock.item())\n", ""),
        (IDLE | TORCHS | {AS_IN_07})
        - {"ZB-H2: slots idle, rank 0", "torch's ZBV: half slots idle"},
    ),
    "a forward pass takes two slots (Try)": (
        ('"F": 1, "I": 1', '"F": 2, "I": 1'),
        IDLE | TORCHS | {BACK, AS_IN_07},
    ),
    "PyTorch minimizes another loss": (
        ("loss_fn=F.mse_loss", "loss_fn=F.l1_loss"),
        {"torch's four: error of the gradients"},
    ),
}
BREAKS = [Breaks(LINES, alone=["a clock is not read"])]
