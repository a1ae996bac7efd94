"""ZeRO-2 and ZeRO-3: each claim fails when the line that it guards is broken."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course.playing import load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/05_zero2_and_zero3.py"

# One line of the lesson broken: exactly these claims must FAIL at two ranks

LOW = ("bfloat16", "float32")
ERROR = {stage: f"stage {stage}, float32: error against one process" for stage in (2, 3)}
RESUMED = "saved by all, resumed by one rank: error"
BOTH = {*ERROR.values(), RESUMED}
UNLIKE = {stage: f"stage {stage}, bfloat16: weights unlike their master" for stage in (2, 3)}


def of(stage: int, what: str) -> set[str]:
    return {f"stage {stage}, {low}: {what}" for low in LOW}


HELD = {stage: of(stage, "bytes held per parameter") for stage in (2, 3)}
FIRST = {stage: of(stage, "gathered in the 1st pass / P") for stage in (2, 3)}
SECOND = {stage: of(stage, "gathered in the 2nd pass / P") for stage in (2, 3)}
EARLY = of(3, "gathers next to a whole unit")
WHOLE = of(3, "units whole at once")
ORDER = of(3, "gathers in the order 0123 3210")
REDUCED = set().union(
    *(of(s, f"reduced in the {n} pass / P") for s in (2, 3) for n in ("1st", "2nd"))
)
PYTORCH = "PyTorch: "

LINES = {
    "no broadcast": ("dist.broadcast(dense, group=group, group_src=0)", "pass", BOTH),
    "no average": ("self.table_nK.div_(dist.get_world_size(shards.group))", "pass", BOTH),
    "a shard off by one": (
        "whole[self.mine * rows : (self.mine + 1) * rows]",
        "whole[(1 - self.mine) * rows : (2 - self.mine) * rows]",
        BOTH,
    ),
    "gathered rows in the order of ranks, the last first": (
        "whole.view(column.shape).copy_(column)",
        "whole.view(column.shape).copy_(column.flip(0))",
        BOTH | {*UNLIKE.values()},
    ),
    "an all-reduce where a reduce-scatter would do": (
        "            self.work = dist.reduce_scatter_tensor(\n"
        "                self.mean_1K, self.table_nK, group=shards.group, async_op=True\n"
        "            )\n",
        "            self.mean_1K = self.table_nK[dist.get_rank(shards.group)][None]\n"
        "            self.work = dist.all_reduce(\n"
        "                self.table_nK, group=shards.group, async_op=True\n"
        "            )\n",
        REDUCED,
    ),
    "gradients travel in float64": (
        "column = rows.padded(gradient, shards.parts)",
        "column = rows.padded(gradient, shards.parts).double()",
        of(2, "bytes per element") | of(3, "bytes per element"),
    ),
    "each rank its own norm": (
        "    dist.all_reduce(square, group=fsdp.group)\n",
        "",
        set(ERROR.values()),
    ),
    "masters in low precision": (
        "            parameter.grad = None\n",
        "            parameter.data = parameter.data.to(dtype)\n",
        {f"stage {s}, bfloat16: bytes held per parameter" for s in (2, 3)},
    ),
    "gradients stay whole": (
        "        self.work.wait()\n        columns = self.mean_1K",
        "        next(iter(self.rows)).kept = self.table_nK\n"
        "        self.work.wait()\n        columns = self.mean_1K",
        HELD[2] | HELD[3],
    ),
    "each micro-batch overwrites the one before": (
        "parameter.grad += mean",
        "parameter.grad = mean",
        set(ERROR.values()),
    ),
    "stage 2 gathers once and for all": (
        "if self.gathered_nK is not None or self.versions == self.versions_now():",
        "if self.gathered_nK is not None or self.versions:",
        FIRST[2] | {ERROR[2], UNLIKE[2]},
    ),
    "stage 2 gathers in each pass": (
        "        self.versions = self.versions_now()\n",
        "        self.versions = [1]\n",
        FIRST[2] | SECOND[2],
    ),
    "stage 3 keeps whole weights": (
        "        if self.stage == 3:\n            self.versions = []\n",
        "        if False:\n            self.versions = []\n",
        HELD[3] | FIRST[3] | SECOND[3] | WHOLE | EARLY | ORDER,
    ),
    "stage 3 frees after the root's forward only": (
        "        self.units.free(self.units.shards[unit])\n",
        "",
        WHOLE | EARLY,
    ),
    "stage 3 frees after backward's end only": (
        "        if shards.users <= 0:\n            self.units.free([shards])\n",
        "",
        WHOLE | EARLY,
    ),
    "stage 3 prefetches everything": (
        "            for shards in self.shards[following]:\n",
        "            for shards in chain(*self.shards.values()):\n",
        WHOLE | EARLY | FIRST[3] | SECOND[3] | ORDER,
    ),
    "stage 3 prefetches nothing in forward": (
        "following = self.units.next.get(unit)",
        "following = None",
        EARLY,
    ),
    "stage 3 prefetches nothing in backward": (
        "self.units.use(unit, self.units.previous.get(unit))",
        "self.units.use(unit, None)",
        EARLY,
    ),
    "stage 3 prefetches the wrong neighbor": (
        "self.units.use(unit, self.units.previous.get(unit))",
        "self.units.use(unit, self.units.next.get(unit))",
        ORDER,
    ),
    "PyTorch's units stay whole after forward": (
        "fully_shard(unit, mesh=mesh)",
        "fully_shard(unit, mesh=mesh, reshard_after_forward=False)",
        {PYTORCH + "gathered per pass / P"},
    ),
    "PyTorch's keeps gradients on their rank": (
        "    fully_shard(model, mesh=mesh)\n",
        "    fully_shard(model, mesh=mesh).set_requires_gradient_sync(False)\n",
        {PYTORCH + "error against one process", PYTORCH + "reduced per pass / P"},
    ),
    "moments are left behind": (
        "            if torch.is_tensor(value) and value.shape == shape:\n"
        "                mine[index][key] = rows_of(fsdp, parameter, value).clone()\n",
        "            if torch.is_tensor(value) and value.shape == shape:\n"
        "                mine[index][key] = rows_of(fsdp, parameter, value) * 0\n",
        {RESUMED},
    ),
}

BREAKS = Breaks(LINES)

ON_GPUS = OnGpus(
    changes=[
        ("torch.randn(64, 8192,", "torch.randn(64, 2048,"),
        ("nn.Linear(8192, 8192, bias=False, device", "nn.Linear(2048, 2048, bias=False, device"),
    ],
    ranks=(1, 2),  # four ranks are there what two are: no rings, no stages, no mesh
)


@pytest.mark.deep
def test_it_holds_on_8_ranks_whose_shares_are_padded() -> None:
    play(LESSON, 8, deadline=200).expect(set())


def reductions_under_way() -> tuple[int, int]:
    """Of a pass through four units: the most at a time, and those left at the end."""
    lesson = load(LESSON)
    under_way = [0]

    class Counted(lesson.Reduction):
        def __init__(self, *given: object) -> None:
            under_way.append(under_way[-1] + 1)
            super().__init__(*given)

        def land(self) -> None:
            under_way.append(under_way[-1] - 1)
            super().land()

    lesson.Reduction = Counted
    model = lesson.network(0, torch.device("cpu"))
    lesson.MiniFSDP(model, units=model)
    lesson.loss_of(model, torch.randn(2, lesson.D)).backward()
    return max(under_way), under_way[-1]


def test_at_most_one_reduce_scatter_is_under_way() -> None:
    assert run(reductions_under_way, 2) == [(1, 0)] * 2


def kept_whole() -> list[list[bool]]:
    """Which of 12, 3 and 12 elements, and of a scalar, stay whole on every rank."""
    lesson, found = load(LESSON), []
    for replicate_below in (1, 12, 13):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4, bias=False))
        model.scale = nn.Parameter(torch.tensor(1.0))
        fsdp = lesson.MiniFSDP(model, replicate_below=replicate_below)
        small = {p: shards.small for p, shards in fsdp.shards_of.items()}
        found.append([small[p] for p in (*model[0].parameters(), model[1].weight, model.scale)])
    return found


def test_parameters_of_fewer_elements_and_scalars_stay_whole() -> None:
    due = [[False, False, False, True], [False, True, False, True], [True] * 4]
    assert run(kept_whole, 2) == [due] * 2


def clipped() -> list[tuple[float, float]]:
    """The norm of a gradient whose rows, 3 and 4, lie on two ranks, and what is left of mine."""
    lesson, found = load(LESSON), []
    for max_norm in (2.5, 100.0):
        model = nn.Linear(1, 2, bias=False)
        fsdp = lesson.MiniFSDP(model)
        model.weight.grad = torch.tensor([[3.0 + dist.get_rank()]])
        norm = lesson.clip_grad_norm_(fsdp, max_norm)
        found.append((norm.item(), model.weight.grad.item()))
    return found


def test_clipping_shortens_a_long_gradient_and_leaves_a_short_one() -> None:
    shortened, as_it_was = zip(*run(clipped, 2), strict=True)
    assert [norm for norm, _ in shortened + as_it_was] == pytest.approx([5] * 4)
    assert [mine for _, mine in shortened] == pytest.approx([1.5, 2])
    assert [mine for _, mine in as_it_was] == [3, 4]
