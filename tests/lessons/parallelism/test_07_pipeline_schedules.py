"""Schedules against their definitions, stages against one process, claims against broken lines."""

import functools
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from course.playing import Played, load, play
from course.ranks import run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/07_pipeline_schedules.py"
SIMULATOR = "parallelism/09_pipeline_deadlocks.py"
sizes = st.integers(1, 8), st.integers(1, 24)


@functools.cache
def lesson():
    return load(LESSON)


@functools.cache
def simulator():
    return load(SIMULATOR)


def lists_of(name: str, p: int, m: int) -> list[list]:
    return [getattr(lesson(), name)(s, p, m) for s in range(p)]


def held(actions: list) -> int:
    count, most = 0, 0
    for direction, _ in actions:
        count += 1 if direction == "F" else -1
        most = max(most, count)
    return most


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
            assert sorted(actions) == sorted((d, k) for d in "FB" for k in range(m))


def shuffled(draw: st.DrawFn, p: int, m: int) -> list[list]:
    """Orders in which each micro-batch goes forward before it goes back, else at random."""
    schedule = []
    for _ in range(p):
        order = draw(st.permutations([k for k in range(m) for _ in "FB"]))
        seen: set = set()
        schedule.append([("B" if k in seen else "F", seen.add(k) or k) for k in order])
    return schedule


def apart(p_lists: list[list], layers: int) -> float:
    """How far this rank's gradients are from one process's, under any schedule."""
    changed = load(LESSON, ("LAYERS = 2 * WORLD_SIZE", f"LAYERS = {layers}"))
    m = len(p_lists[0]) // 2
    case = changed.Case(torch.device("cpu"))
    stage, inputs = case.stage(m), case.inputs(m)
    stage.step(p_lists[changed.RANK], inputs)
    assert stage.most_held == held(p_lists[changed.RANK])
    assert not stage.held
    return case.error(stage.layers, inputs)


@settings(max_examples=12, deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]))
def test_what_the_simulator_accepts_runs_and_equals_one_process(
    data: st.DataObject, p: int, m: int
) -> None:
    name = data.draw(st.sampled_from(["gpipe", "one_f_one_b", "any"]))
    schedule = lists_of(name, p, m) if name != "any" else shuffled(data.draw, p, 2)
    try:
        simulator().check_schedule(schedule)
    except ValueError:
        assert name == "any", "a schedule that everybody uses is refused"
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
    mine, expected = Twice(), stages[changed.RANK]
    order = changed.one_f_one_b(changed.RANK, changed.WORLD_SIZE, 4)
    changed.Stage(mine, lambda y, k: (y**2).mean(), 4).step(order, x.chunk(4))
    pairs = list(zip(mine.parameters(), expected.parameters(), strict=True))
    return all(
        (a.grad is None) == (b.grad is None) and (a.grad is None or torch.allclose(a.grad, b.grad))
        for a, b in pairs
    )


def test_any_module_may_be_a_stage() -> None:
    assert all(run(odd_stages, 3))


@pytest.mark.deep
def test_the_lesson_holds_where_layers_do_not_divide() -> None:
    play(LESSON, 5, ("LAYERS = 2 * WORLD_SIZE", "LAYERS = 2 * WORLD_SIZE + 1")).expect(set())


def PLAIN(played: Played) -> None:
    """The runs are drawn as grids, one row a stage."""
    assert "stage 0  F0F1F2F3 . . . . . .B0B0F4B1B1F5B2B2F6" in played.output  # 1F1B
    forward = "".join(f"F{k}" for k in range(8))
    assert f"stage 3   . . .{forward}B0B0B1B1" in played.output  # GPipe


def slots_of(schedule: list[list]) -> list[dict]:
    """The slot in which each action starts, by repeating until nothing changes."""
    slots = lesson().SLOTS
    found = [{} for _ in schedule]
    changed = True
    while changed:
        changed = False
        for s, actions in enumerate(schedule):
            free = 0
            for direction, k in actions:
                source = s - 1 if direction == "F" else s + 1
                if 0 <= source < len(schedule):
                    if (direction, k) not in found[source]:
                        break
                    free = max(free, found[source][direction, k] + slots[direction])
                changed |= found[s].get((direction, k)) != free
                found[s][direction, k] = free
                free += slots[direction]
    return found


@settings(deadline=None)
@given(*sizes)
def test_the_slots_idle_as_the_formula_says(p: int, m: int) -> None:
    for name in "gpipe", "one_f_one_b":
        idle = lesson().idle_share(slots_of(lists_of(name, p, m)))
        assert idle == Fraction(p - 1, m + p - 1)


N, G, O1 = "one batch: ", "GPipe: ", "1F1B: "
GRAD, IDLE = "error of the gradients", "share of slots idle"
HELD = "micro-batches held at most"
WARMUP = "num_warmup = min(p - 1 - stage, m)"
LINES = {
    "the loss is not divided by m": (
        ("self.loss_of(y, k) / self.micro_batches", "self.loss_of(y, k)"),
        {G + GRAD, O1 + GRAD},
    ),
    "activations are kept": (("self.held.pop(k)", "self.held[k]"), {O1 + HELD}),
    "GPipe is 1F1B in disguise": (
        (
            '    return [("F", k) for k in range(m)] + [("B", k) for k in range(m)]\n',
            "    return one_f_one_b(stage, p, m)\n",
        ),
        {G + HELD},
    ),
    "1F1B is GPipe in disguise": ((WARMUP, "num_warmup = m"), {O1 + HELD}),
    "1F1B does not run ahead": ((WARMUP, "num_warmup = 0"), {O1 + IDLE, O1 + HELD}),
    "the run follows another order": (
        ("[None, *order, None]", "[None, *sorted(order, key=lambda a: a[0] == 'B'), None]"),
        {O1 + HELD},
    ),
    "the gradient sent on is wrong": (
        ("return x.grad", "return 2 * x.grad"),
        {N + GRAD, G + GRAD, O1 + GRAD},
    ),
    "a message's clock is not read": (
        ("self.now = max(self.now, *(stamp.item() for stamp in stamps))", "pass"),
        {N + IDLE, G + IDLE, O1 + IDLE},
    ),
    "a backward pass costs no more than a forward pass": (
        ("self.now += SLOTS[action[0]]", "self.now += 1"),
        {N + IDLE, G + IDLE, O1 + IDLE},
    ),
}

ALONE = ["GPipe is 1F1B in disguise"]  # where activations are kept, it holds as many as GPipe
BREAKS = [Breaks(LINES, alone=ALONE)]


def test_every_run_gets_a_panel_and_every_pass_a_bar(tmp_path: Path) -> None:
    runs = {name: slots_of(lists_of(name, 3, 4)) for name in ("gpipe", "one_f_one_b")}
    with patch("matplotlib.axes.Axes.barh") as bars:
        lesson().draw(str(tmp_path / "grids.png"), runs)
    idle = [call for call in bars.call_args_list if "left" not in call.kwargs]
    passes = [call for call in bars.call_args_list if "left" in call.kwargs]
    assert [call.args[1] for call in idle] == [18, 18]
    assert len(passes) == 2 * 3 * 2 * 4
    assert {(call.args[1], call.kwargs["color"]) for call in passes} == {(1, "C0"), (2, "C2")}


def test_an_exchange_is_over_when_all_its_messages_are() -> None:
    works = [Mock(), Mock()]
    with patch.object(lesson().dist, "batch_isend_irecv", return_value=works) as start:
        lesson().Stage(None, None, 1).exchange(["send", "receive"])
    start.assert_called_once_with(["send", "receive"])  # both together
    assert [work.wait.call_count for work in works] == [1, 1]


def test_real_stages_are_judged_by_the_formula_and_by_what_a_stage_may_hold() -> None:
    """Stage 1 of 4 with 8 micro-batches: 3 held and one that arrives, of 8."""
    own, claims = load(LESSON), []
    own.WORLD_SIZE, own.RANK = 4, 1
    own.step_on_gpu = lambda order, *_: (0.3, 4.0) if order is own.gpipe else (0.2, 2.0)
    own.claim = lambda text, *numbers, **_: claims.append(numbers[:2])
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        own.measure_on_gpus(torch.device("meta"))
    assert claims == [(Fraction(3, 11), 0.3), (Fraction(3, 11), 0.2), (4 / 8, 0.5)]
