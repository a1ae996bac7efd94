"""Schedules against their formulas, pipelines against one process, claims against broken lines."""

import functools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exercises.ranks import run
from tests.lessons import load, play

LESSON = "parallelism/05_pipeline_parallel.py"
QUICK = ("    on_the_clock(schedules, case, options.figure)\n", "")  # sleeps take seconds
sizes = st.integers(1, 8), st.integers(1, 24)


@functools.cache
def lesson():
    return load(LESSON)


def lists_of(name: str, p: int, m: int) -> list[list]:
    return [getattr(lesson(), name)(s, p, m) for s in range(p)]


def held(actions: list) -> int:
    count, most = 0, 0
    for kind, _ in actions:
        count += 1 if kind == "F" else -1
        most = max(most, count)
    return most


@settings(deadline=None)
@given(*sizes, st.integers(1, 5), st.integers(1, 5))
def test_bubbles_equal_the_formula_whatever_the_passes_cost(p: int, m: int, f: int, b: int) -> None:
    changed = load(LESSON, ('COST = {"F": 1, "B": 2}', f'COST = {{"F": {f}, "B": {b}}}'))
    for name in "gpipe", "one_f_one_b":
        starts = changed.simulate(lists_of(name, p, m))
        assert changed.idle_share(starts) == Fraction(p - 1, m + p - 1)


@settings(deadline=None)
@given(*sizes)
def test_activations_held_equal_m_and_the_stages_left(p: int, m: int) -> None:
    assert [held(actions) for actions in lists_of("gpipe", p, m)] == [m] * p
    assert [held(a) for a in lists_of("one_f_one_b", p, m)] == [min(m, p - s) for s in range(p)]


@settings(deadline=None)
@given(*sizes)
def test_every_micro_batch_passes_every_stage_once_each_way(p: int, m: int) -> None:
    for name in "gpipe", "one_f_one_b":
        for actions in lists_of(name, p, m):
            assert sorted(actions) == sorted((kind, k) for kind in "FB" for k in range(m))


def earliest(schedule: list[list]) -> list[dict] | None:
    """The slots by another road: repeat until nothing changes. None: some never start."""
    p, cost, found = len(schedule), lesson().COST, [{} for _ in schedule]
    changed = True
    while changed:
        changed = False
        for s, actions in enumerate(schedule):
            free = 0
            for kind, k in actions:
                source = s - 1 if kind == "F" else s + 1
                if 0 <= source < p and (kind, k) not in found[source]:
                    break
                came = found[source][kind, k] + cost[kind] if 0 <= source < p else 0
                start = max(free, came)
                changed |= found[s].get((kind, k)) != start
                found[s][kind, k] = start
                free = start + cost[kind]
    return found if all(len(f) == len(a) for f, a in zip(found, schedule, strict=True)) else None


def shuffled(draw: st.DrawFn, p: int, m: int) -> list[list]:
    """Orders in which each micro-batch goes forward before it goes back, else at random."""
    schedule = []
    for _ in range(p):
        order = draw(st.permutations([k for k in range(m) for _ in "FB"]))
        seen: set = set()
        schedule.append([("B" if k in seen else "F", seen.add(k) or k) for k in order])
    return schedule


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_any_order_is_timed_right_or_refused(data: st.DataObject, p: int, m: int) -> None:
    schedule, answer = shuffled(data.draw, p, m), ""
    due = earliest(schedule)
    try:
        starts = lesson().simulate(schedule)
    except ValueError as error:
        answer = str(error)
    if due is None:  # a cycle: nobody could run it
        assert "wait for ever" in answer
        assert "reorder" in answer
    elif not answer:  # what is refused may also be a knot of sends that wait for their receivers
        assert starts == due


def test_what_cannot_finish_is_refused_with_rule_value_remedy() -> None:
    simulate = lesson().simulate
    backwards_first = [[("B", 0), ("F", 0)]] * 2
    swapped = [[("F", 0), ("F", 1), ("B", 0), ("B", 1)], [("F", 1), ("F", 0), ("B", 0), ("B", 1)]]
    missing = [[("F", 0), ("B", 0)], [("F", 0)]]
    for schedule in backwards_first, swapped, missing:
        with pytest.raises(ValueError, match=r"every stage must .* stage 0 before .*; reorder"):
            simulate(schedule)


def apart(p_lists: list[list], layers: int) -> float:
    """How far this rank's gradients are from one process's, under any schedule."""
    changed = load(LESSON, ("LAYERS, D, M, ROWS = 8,", f"LAYERS, D, M, ROWS = {layers},"))
    case = changed.Case(torch.device("cpu"))
    stage, m = case.stage(), len(p_lists[0]) // 2
    inputs, loss_of = case.batch(m)
    assert changed.pipeline(stage, p_lists)(inputs, loss_of) == held(p_lists[changed.RANK])
    return case.distance(stage, inputs)


@settings(max_examples=12, deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]))
def test_what_is_accepted_runs_and_equals_one_process(data: st.DataObject, p: int, m: int) -> None:
    name = data.draw(st.sampled_from(["gpipe", "one_f_one_b", "any"]))
    schedule = lists_of(name, p, m) if name != "any" else shuffled(data.draw, p, 2)
    try:
        lesson().simulate(schedule)
    except ValueError:
        return
    assert max(run(apart, p, schedule, p + 1)) < 1e-13


class Twice(nn.Module):
    """A stage with a frozen weight, a tied one, a buffer, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.frozen = nn.Linear(32, 32).double(), nn.Linear(32, 32).double()
        self.b, self.unused = nn.Linear(32, 32).double(), nn.Parameter(torch.zeros(3))
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.ones(32).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.frozen(self.a(x)) + self.shift))


def odd_stages() -> bool:
    changed = load(LESSON)
    stages = nn.Sequential(*(Twice() for _ in range(changed.WORLD_SIZE)))
    x = torch.randn(8, 32, dtype=torch.float64)
    (stages(x) ** 2).mean().backward()
    mine, due = Twice(), stages[changed.RANK]
    schedule = [changed.one_f_one_b(s, changed.WORLD_SIZE, 4) for s in range(changed.WORLD_SIZE)]
    step = changed.pipeline(mine, schedule)
    step(x.chunk(4), lambda y, k: (y**2).mean())
    pairs = list(zip(mine.parameters(), due.parameters(), strict=True))
    return all(
        (a.grad is None) == (b.grad is None) and (a.grad is None or torch.allclose(a.grad, b.grad))
        for a, b in pairs
    )


def test_any_module_may_be_a_stage() -> None:
    assert all(run(odd_stages, 3))


@pytest.mark.parametrize("ranks", [3, 5])
def test_the_lesson_holds_where_layers_do_not_divide(ranks: int) -> None:
    played = play(LESSON, ranks, QUICK)
    assert (played.code, played.failed) == (0, set()), played.output


def test_the_figure_is_drawn(tmp_path) -> None:
    path = tmp_path / "gantt.png"
    played = play(LESSON, 2, ("SLOT = 0.015", "SLOT = 0.001"), argv=("--figure", str(path)))
    assert path.read_bytes().startswith(b"\x89PNG"), played.output


N, G, O1 = "no micro-batches: ", "GPipe: ", "1F1B: "
GRAD, IDLE, SLOTS = (
    "gradients, from one process",
    "share of slots idle in the run",
    "actions not in the slot simulated",
)
HELD, DEADLOCK = "micro-batches held at most", "a schedule that would deadlock: messages posted"
BUBBLES = "bubbles unlike (p-1)/(m+p-1), of 128 simulated"
BREAKS = {
    "the loss is not divided by m": (
        ("loss_of(stage(x), k) / len(inputs)", "loss_of(stage(x), k)"),
        {G + GRAD, O1 + GRAD},
    ),
    "activations are kept": (("held.pop(k)", "held[k]"), {O1 + HELD}),
    "1F1B is GPipe in disguise": (
        ("ahead = min(p - 1 - stage, m)", "ahead = m"),
        {O1 + HELD, DEADLOCK},
    ),
    "1F1B does not run ahead": (
        ("ahead = min(p - 1 - stage, m)", "ahead = 0"),
        {BUBBLES, O1 + IDLE, O1 + HELD},
    ),
    "the run goes back in another order": (
        (
            "*schedule[RANK], None]",
            "*gpipe(0, 1, len(schedule[0]) // 2)[: len(schedule[0]) // 2],"
            " *[('B', k) for k in reversed(range(len(schedule[0]) // 2))], None]",
        ),
        {G + SLOTS, O1 + SLOTS, O1 + HELD},
    ),
    "the gradient sent on is wrong": (
        ("leaving = x.grad", "leaving = 2 * x.grad"),
        {N + GRAD, G + GRAD, O1 + GRAD},
    ),
    "a message's clock is not read": (
        ("now[0] = max(now[0], *map(int, stamps))", "pass"),
        {name + what for name in (N, G, O1) for what in (IDLE, SLOTS)},
    ),
    "torch minimises another loss": (
        ("loss_fn=F.mse_loss", "loss_fn=F.l1_loss"),
        {"torch's GPipe: " + GRAD, "torch's 1F1B: " + GRAD},
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_line_fails_the_claims_that_guard_it_and_no_others(what: str) -> None:
    change, claims = BREAKS[what]
    played = play(LESSON, 2, QUICK, change)
    assert played.failed == claims, played.output
    assert played.code == 1


def test_work_that_takes_no_time_fails_on_the_clock() -> None:
    played = play(LESSON, 2, ("        time.sleep(seconds)  # stands for the stage's work\n", ""))
    assert played.failed == {f"{n}share of time idle on the clock" for n in (N, G, O1)}


def test_without_the_simulation_the_deadlock_is_real() -> None:
    unchecked = (
        "    simulate(schedule)  # a schedule that would deadlock ends here, on every rank alike\n"
    )
    played = play(LESSON, 2, QUICK, (unchecked, ""), deadline=10)
    assert played.code.count("hung: ") == 2, played.code
    assert played.code.count(", in step") == 2, played.code
