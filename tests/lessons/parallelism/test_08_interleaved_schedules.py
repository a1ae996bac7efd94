"""Lists against formulas for any p, m and v, and for real; claims against broken lines."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from course.lessons import ROOT
from course.playing import Lazily, Played, load
from course.ranks import run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401
from tests.lessons.parallelism.test_19_zero_bubble import (
    complete,
    held_at_most,
    simulate,
    torchs_lists,
)

LESSON = "parallelism/08_interleaved_schedules.py"
PLAIN_1F1B = Lazily("parallelism/07_pipeline_schedules.py")
lesson = Lazily(LESSON)
ranks = st.integers(1, 8)
costs = st.integers(1, 4)


def slots_of(orders: list[list], slots: dict[str, int], message: int = 0) -> list[dict]:
    """The slots of each action, as the lesson counts them."""
    found = []
    for actions in simulate(orders, slots, message):
        found.append({one: range(slot, slot + slots[one[0]]) for one, slot in actions.items()})
    return found


def lists_of(p: int, m: int, v: int, per_hop: int = 1) -> list[list]:
    return [lesson.interleaved(rank, p, m, v, per_hop) for rank in range(p)]


@given(ranks, st.integers(1, 5))
def test_with_one_stage_it_is_1f1b(p: int, groups: int) -> None:
    for rank in range(p):
        found = lesson.interleaved(rank, p, groups * p, 1)
        expected = PLAIN_1F1B.one_f_one_b(rank, p, groups * p)
        assert found == [(kind, rank, k) for kind, k in expected]


@settings(deadline=None)
@given(ranks, st.integers(1, 5), st.integers(2, 4), costs, costs)
def test_it_idles_as_the_formula_whatever_the_passes_cost(
    p: int, groups: int, v: int, f: int, b: int
) -> None:
    """(p-1) / (v m + p-1) for every m that p divides, and p micro-batches held on rank 0."""
    m = p * groups
    orders = lists_of(p, m, v)
    complete(orders, v * p, m, "B")
    assert held_at_most(orders[0]) == v * p
    idle = lesson.idle_share(slots_of(orders, {"F": f, "B": b}))
    assert idle == Fraction(p - 1, v * m + p - 1)


@settings(deadline=None)
@given(ranks, st.integers(1, 4), st.sampled_from([1, 2]), st.integers(0, 3), st.integers(1, 2))
def test_lists_are_played_as_the_simulator_does(
    p: int, groups: int, v: int, message: int, per_hop: int
) -> None:
    orders = lists_of(p, groups * p, v, per_hop)
    message = message if p > 1 else 0  # a rank sends itself none
    slots = {"F": 2 // v, "B": 4 // v}
    assert lesson.play(orders, v, message) == slots_of(orders, slots, message)


def torchs(p: int, m: int, v: int) -> list[list]:
    return torchs_lists("Interleaved1F1B", p, m, v)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 8), st.integers(2, 5), st.integers(2, 4))
def test_pytorch_s_list_runs_ahead_by_two_per_hop_and_is_else_the_lesson_s(
    p: int, groups: int, v: int
) -> None:
    """It holds p + (p-1)/v micro-batches, and its bubble is as long if messages are free."""
    m = p * groups
    assert torchs(p, m, v) == lists_of(p, m, v, per_hop=2)
    for rank, order in enumerate(torchs(p, m, v)):
        ahead = [kind for kind, _, _ in order].index("B") - 1
        assert ahead == (v - 1) * p + 2 * (p - 1 - rank)
    assert held_at_most(torchs(p, m, v)[0]) == v * p + p - 1
    idle = lesson.idle_share(slots_of(torchs(p, m, v), {"F": 1, "B": 2}))
    assert idle == Fraction(p - 1, v * m + p - 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 8), st.integers(2, 5), st.integers(1, 4), st.integers(0, 4))
def test_with_two_per_hop_a_step_waits_for_the_first_messages_and_the_last(
    p: int, groups: int, v: int, quarters: int
) -> None:
    """v p - 1 each way. A message is as long as a stage's F at most; all is in quarters of one."""
    m = p * groups
    slots = slots_of(lists_of(p, m, v, per_hop=2), {"F": 4, "B": 8}, quarters)
    assert lesson.length(slots) == 12 * (v * m + p - 1) + 2 * (v * p - 1) * quarters
    if quarters:  # by one per hop it waits for more
        slots = slots_of(lists_of(p, m, v), {"F": 4, "B": 8}, quarters)
        assert lesson.length(slots) > 12 * (v * m + p - 1) + 2 * (v * p - 1) * quarters


def drawn(starts: list[dict], slots: dict[str, int], length: int) -> list[str]:
    """The rows of a grid, as the lesson's text has them, and before them its ruler."""
    rows = [" ".join(f"{slot:2}" for slot in range(length))]
    for rank, actions in enumerate(starts):
        cells = [" ."] * length
        for action, slot in actions.items():
            kind = action[0]
            cells[slot : slot + slots[kind]] = slots[kind] * [named(action, rank)]
        rows.append(" ".join(cells))
    return rows


def named(action: tuple, rank: int) -> str:
    """The letter is small for a rank's second stage."""
    kind, stage, k = action
    return f"{kind if stage == rank else kind.lower()}{k}"


def test_the_grids_of_the_text() -> None:
    """p = m = 2: six slots of 18 are idle, three of 15, and nine of 21 if a message takes one."""
    text = (ROOT / LESSON).read_text(encoding="utf-8")
    one = {"F": 2, "B": 4}
    two = {"F": 1, "B": 2}
    for v, slots, message, length, names in (
        (1, one, 0, 18, ("1F1B", "layers 0, 1", "layers 2, 3")),
        (2, two, 0, 15, ("v = 2", "layers 0, 2", "layers 1, 3")),
        (2, two, 1, 21, ("v = 2", "layers 0, 2", "layers 1, 3")),
    ):
        found = slots_of(lists_of(2, 2, v), slots, message)
        assert lesson.length(found) == length
        rows = drawn(simulate(lists_of(2, 2, v), slots, message), slots, length)
        grid = "".join(
            rf"#     {name} .*{re.escape(row)}\n" for name, row in zip(names, rows, strict=True)
        )
        assert re.search(grid, text), names
    assert lesson.length(slots_of(lists_of(2, 2, 1), one, message=1)) == 20


def test_the_lists_of_the_text() -> None:
    """p = 2, v = 2, m = 2: warm-up, steady state and cooldown."""
    text = (ROOT / LESSON).read_text(encoding="utf-8")
    for rank, order in enumerate(lists_of(2, 2, 2)):
        (row,) = re.findall(rf"#     rank {rank} +(F0 F1 .*)\n", text)
        assert row.split() == [named(action, rank) for action in order], rank
        num_warmup = [kind for kind, _, _ in order].index("B") - 1
        assert len(re.split(r" {2,}", row)[0].split()) == num_warmup
        assert set(re.split(r" {2,}", row)[2]) & {"F", "f"} == set()


def test_the_answers_numbers() -> None:
    """Four ranks, slots of half a rank's layers: with 8 and 64 micro-batches."""

    def length(orders: list[list], v: int, message: int = 0) -> int:
        return lesson.length(slots_of(orders, {"F": 2 // v, "B": 4 // v}, message))

    assert [length(lists_of(4, 8, v), v) for v in (1, 2)] == [66, 57]
    assert [length(lists_of(4, 8, v, per_hop=2), v) for v in (1, 2)] == [66, 57]
    assert [length(lists_of(4, 64, v), v) for v in (1, 2)] == [402, 393]
    assert [length(lists_of(4, 8, v), v, 1) for v in (1, 2)] == [82, 87]
    assert [length(lists_of(4, 8, v, per_hop=2), v, 1) for v in (1, 2)] == [72, 71]
    assert [held_at_most(lists_of(4, 8, v)[0]) / v for v in (1, 2)] == [4, 4]
    assert [held_at_most(lists_of(4, 8, v, per_hop=2)[0]) / v for v in (1, 2)] == [7, 5.5]
    assert [length(lists_of(4, 8, v, per_hop=0), v) for v in (1, 2)] == [192, 156]  # Try
    assert [round(100 * 15 / (32 * v + 15)) for v in (1, 2, 5)] == [32, 19, 9]  # p = 16, m = 32


def test_what_is_held_is_counted_as_in_lesson_19() -> None:
    for p, m, v, per_hop in ((4, 8, 1, 1), (4, 8, 2, 1), (4, 8, 2, 2), (3, 9, 3, 1)):
        for order in lists_of(p, m, v, per_hop):
            assert lesson.most_held(order) == held_at_most(order)


def test_lists_that_wait_for_each_other_end() -> None:
    """Two ranks, one micro-batch; then a rank 0 that wants its backward pass first."""
    orders = [[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]]
    assert lesson.play(orders, 1) == [
        {("F", 0, 0): range(2), ("B", 0, 0): range(8, 12)},
        {("F", 1, 0): range(2, 4), ("B", 1, 0): range(4, 8)},
    ]
    assert lesson.play([orders[0][::-1], orders[1]], 1) == [{}, {}]


# The lists for real: layers, sends and receives

TAGS = {"F": 1, "B": 2}  # on two ranks a neighbor sends both: each is received in its own order


class Follower:
    """A rank that follows its list; each message carries its sender's logical clock, in slots."""

    def __init__(self, stages: dict[int, nn.Module], message: int) -> None:
        self.stages = stages  # {number: layers}
        self.last = len(stages) * dist.get_world_size() - 1  # the number of the model's last stage
        self.cost = {"F": 2 // len(stages), "B": 4 // len(stages)}  # slots of two layers, or one
        self.message = message  # how many slots one takes
        self.now = 0
        self.slots = {}  # of each action
        self.held = {}  # (stage, k): input and output
        self.most_held = 0
        self.sends = {"F": [], "B": []}

    def follow(self, order: list[tuple], inputs: Sequence, loss_of: Callable) -> None:
        """Run a step; loss_of(y, k): what the output of micro-batch k adds to the loss."""
        for kind, stage, k in order:
            if kind == "F":
                given_x = inputs[k] if stage == 0 else self.receive("F", inputs[k], stage - 1)
                x = given_x.detach().requires_grad_()
                y = self.stages[stage](x)
                self.held[stage, k] = (x, loss_of(y, k) if stage == self.last else y)
                self.most_held = max(self.most_held, len(self.held))
                result = y.detach()
                to = stage + 1
            else:
                x, y = self.held.pop((stage, k))
                y.backward(None if stage == self.last else self.receive("B", y, stage + 1))
                result = x.grad
                to = stage - 1
            start = self.now
            self.now += self.cost[kind]
            self.slots[kind, stage, k] = range(start, self.now)
            if 0 <= to <= self.last:
                self.send(kind, result, to)
        for work in self.sends["F"] + self.sends["B"]:
            work.wait()

    def send(self, kind: str, result: torch.Tensor, stage: int) -> None:
        """Start to send a result and, behind it, the slot in which it arrives."""
        stamped = torch.cat([result.flatten(), result.new_tensor([self.now + self.message])])
        self.sends[kind].append(dist.isend(stamped, stage % dist.get_world_size(), tag=TAGS[kind]))

    def receive(self, kind: str, like: torch.Tensor, stage: int) -> torch.Tensor:
        """Return what another stage sends; the clock is then no earlier than its stamp."""
        stamped = like.new_empty(like.numel() + 1)
        dist.recv(stamped, stage % dist.get_world_size(), tag=TAGS[kind])
        self.now = max(self.now, int(stamped[-1]))
        return stamped[:-1].view_as(like)


def followed(v: int, per_hop: int, message: int) -> dict:
    """What came of this rank's list, and the messages that the lesson counts in PyTorch's step."""
    own = load(LESSON)
    model, x, target, oracle = own.model_and_batch()
    m = own.MICRO_BATCHES
    targets = target.chunk(m)
    model.zero_grad()
    rank = Follower(own.my_stages(model, v), message)
    order = own.lists(v, per_hop)[own.RANK]
    rank.follow(order, x.chunk(m), lambda y, k: F.mse_loss(y, targets[k]) / m)
    found = {
        "equal": own.gradient_error(rank.stages, oracle) <= own.TOLERANCE,
        "sent": {kind: len(sends) for kind, sends in rank.sends.items()},
        "held": (rank.most_held, len(rank.held)),
        "slots": rank.slots,
    }
    model.zero_grad()
    schedule, stages = own.pytorchs(own.my_stages(model, v), m, x.device)
    own.step(schedule, x, target)
    return found | {"counted": sum(stage.sent for stage in stages)}


@pytest.mark.deep
@pytest.mark.parametrize(("per_hop", "message"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("v", [1, 2])
@pytest.mark.parametrize("p", [2, 4])
def test_on_send_and_receive_the_lists_cost_what_is_counted_on_them(
    p: int, v: int, per_hop: int, message: int
) -> None:
    """One process's gradients; messages, micro-batches held and idle slots as the lesson counts."""
    m = 8
    orders = lists_of(p, m, v, per_hop)
    found = run(followed, p, v, per_hop, message)
    slots = [one["slots"] for one in found]
    assert slots == lesson.play(orders, v, message)
    idle = 6 // v * (p - 1) + 2 * (v * p - 1) * message
    for rank, (order, one) in enumerate(zip(orders, found, strict=True)):
        stages = set(range(rank, v * p, p))
        assert one["equal"], rank
        assert one["sent"] == {"F": m * len(stages - {v * p - 1}), "B": m * len(stages - {0})}
        assert one["sent"]["F"] == one["counted"]
        assert one["held"] == (lesson.most_held(order), 0)
        assert lesson.length(slots) - sum(map(len, one["slots"].values())) == idle


def test_a_share_is_of_the_medians() -> None:
    assert lesson.share_idle([11.0, 10.0, 99.0], [8.0, 1.0, 9.0]) == pytest.approx(3 / 11)


def PLAIN(played: Played) -> None:
    """The lists are drawn as grids, two rows a rank."""
    assert "1F1B: 66 slots\n" in played.output
    assert "v = 2: 57 slots\n" in played.output
    assert "1F1B, 2 per hop, a message takes a slot: 72 slots\n" in played.output
    assert "v = 2, 2 per hop, a message takes a slot: 71 slots\n" in played.output
    forward = f"  rank 3  ......{8 * 'FFBBBB'}............\n"
    numbers = f"{'':16}" + "".join(f"{k} {k}   " for k in range(8)).rstrip()
    assert f"{forward}{numbers}\n" in played.output
    assert "rank 0  FFFFffff......bbFbbFbbFbbFBBfBBfBBfBBfbb.bb.bb.bbBBBBBBBB\n" in played.output
    assert f"\n{'':10}01230123      0 41 52 63 70 41 52 63 74  5  6  7 4 5 6 7\n" in played.output


IDLE = "v = 2: share of slots idle"
SENT = "v = 2: messages / 1F1B's"
HELD = {f"{name}: micro-batches held" for name in ("1F1B", "v = 2")}
SAVED = "v = 2: slots saved if a message takes one"
TORCHS_ERROR = "torch's Interleaved1F1B: error of the gradients"
TORCHS_LIST = "torch's list: actions unlike ours, 2 per hop"
TORCHS_HELD = "torch's list: micro-batches held"
LINES = {
    "no rank runs ahead for its hops (Try)": (
        ("min((v - 1) * p + per_hop * (p - 1 - rank), v * m)", "(v - 1) * p"),
        {IDLE, SAVED, TORCHS_LIST} | HELD,
    ),
    "two forwards per hop in every list": (
        ("+ per_hop * (p - 1 - rank)", "+ 2 * (p - 1 - rank)"),
        HELD,
    ),
    "PyTorch's list is ours": (
        ("most_held(theirs)", "most_held(lists(2)[RANK])"),
        {TORCHS_HELD},
    ),
    "one forward per hop is PyTorch's": (
        ("ours = lists(2, per_hop=2)", "ours = lists(2)"),
        {TORCHS_LIST},
    ),
    "one forward per hop where a message takes a slot": (
        ("lists(v, per_hop=2), v, message=1", "lists(v), v, message=1"),
        {SAVED},
    ),
    "a neighbor is not waited for": (
        ("max(now[rank], arrivals.get((kind, neighbor, k), 0))", "now[rank]"),
        {IDLE, SAVED},
    ),
    "messages take no time": (("now[rank] + message", "now[rank]"), {SAVED}),
    "activations are kept": (
        ('held += 1 if kind == "F" else -1', "held += 1"),
        HELD | {TORCHS_HELD},
    ),
    "only a rank's first stage is counted": (
        ("stage.sent for stage in stages)", "stage.sent for stage in stages[:1])"),
        {SENT},
    ),
    "PyTorch minimizes another loss": (
        (
            "ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=F.mse_loss)",
            "ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=F.l1_loss)",
        ),
        {TORCHS_ERROR},
    ),
}
ALONE = ["two forwards per hop in every list"]  # "PyTorch's list is ours" would do no harm then
BREAKS = [Breaks(LINES, alone=ALONE)]
