"""The 3D lesson: other meshes and sizes, formulas against published numbers, broken lines."""

import pytest
import torch
from torch import nn

from tests.lessons import load, play

LESSON = "parallelism/06_3d_parallelism.py"


@pytest.mark.parametrize("ranks", [3, 6, 8])
def test_the_lesson_holds_on_other_meshes(ranks: int) -> None:
    played = play(LESSON, ranks)
    assert (played.code, played.failed) == (0, set()), played.output


def test_two_parts_on_devices_equal_one_model() -> None:
    """Both devices are the CPU here; what is placed, moved and marked is the lesson's."""
    lesson = load(LESSON)
    torch.manual_seed(0)
    halves = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    x = torch.randn(3, 4, requires_grad=True)
    due = torch.autograd.grad(
        nn.Sequential(*halves)(x).sum(), [p for h in halves for p in h.parameters()]
    )
    model = lesson.OnDevices(*halves).place([torch.device("cpu")] * 2)
    ours = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(ours, due, strict=True))


def test_marks_surround_each_parts_work_both_ways() -> None:
    lesson, order = load(LESSON), []
    model = lesson.OnDevices(nn.Linear(4, 4), nn.Linear(4, 4))
    model.place([torch.device("cpu"), torch.device("cpu", 0)])
    model.mark = lambda device: order.append(str(device))
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert order == ["cpu", "cpu", "cpu:0", "cpu:0", "cpu:0", "cpu:0", "cpu", "cpu"]


def test_the_published_run_sends_what_the_formula_says() -> None:
    played = play(LESSON, 2)
    assert "8.7       9.7     338.2" in played.output
    assert "NVLink 4           computes  13.4% of the time" in played.output


GRAD, ALONG = "3D: gradients, from one process", "3D: bytes sent along "
BATCH = [f"batch {size}: " for size in (4, 16)]
BREAKS = {
    "f does not sum": (
        ("(summed(grad, ctx.group) if ctx.back else grad)", "grad"),
        {GRAD, ALONG + "tp"},
    ),
    "g does not sum": (
        ("x.view_as(x) if back else summed(x, group)", "x.view_as(x)"),
        {GRAD, ALONG + "tp"},
    ),
    "the gathered loss counts n times": (
        ("parts.square().sum() / WORLD_SIZE", "parts.square().sum()"),
        {b + "gradients, from one process" for b in BATCH},
    ),
    "the loss is not the mean": (("share=1 / x_BD.numel()", "share=1 / x_BD[:1].numel()"), {GRAD}),
    "gradients are sent twice": (
        (
            "dist.all_reduce(p.grad, group=dp)",
            "[dist.all_reduce(p.grad, group=mesh.get_group(a)) for a in ('dp', 'tp')]",
        ),
        {GRAD, ALONG + "tp"},
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_line_fails_the_claims_that_guard_it_and_no_others(what: str) -> None:
    change, claims = BREAKS[what]
    played = play(LESSON, 2, change)
    assert played.failed == claims, played.output
    assert played.code == 1


PIPES = {
    "activations are sent doubled": (
        ("dist.send(y.detach(), group=pp", "dist.send(2 * y.detach(), group=pp"),
        {GRAD},
    ),
    "gradients of data parallel ranks are not summed": (
        ("        dist.all_reduce(p.grad, group=dp)\n", "        pass\n"),
        {GRAD, ALONG + "dp"},
    ),
}


@pytest.mark.parametrize("what", PIPES)
def test_a_broken_line_fails_on_a_full_mesh(what: str) -> None:
    change, claims = PIPES[what]
    played = play(LESSON, 8, change)
    assert played.failed == claims, played.output
