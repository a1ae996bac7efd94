"""Laws, fits and batches of the lesson on scaling; and what a wrong line does to its claims."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fundamentals/06_scaling_efficiency.py"
here = Lazily(LESSON)
ERROR = "24 x 1, 12 x 2, 6 x 4 samples: error of weights"
LOSS = "loss / the small batch's: "
STRONG, WEAK = "strong: speed-up of all ranks", "weak: speed-up of all ranks"
FITTED = "serial share, as fitted"
SHARE = "share of a step lost to the all-reduce"
FEW = ("ROUNDS = 5", "ROUNDS = 1")
NO_TRAINING = ("    check_learning_rates(digits)\n", "")
ON_GPUS = OnGpus(
    changes=[
        ("    check_utilization(work, device)\n", ""),  # NVML knows real GPUs only
        NO_TRAINING,  # which no device takes part in
        ("WIDTH = 4096", "WIDTH = 16"),
        ("batch = 64 * BATCH", "batch = BATCH"),
        ("ROUNDS = 5", "ROUNDS = 2"),
    ],
)


@given(st.integers(1, 1000), st.integers(1, 100), st.integers(1, 100))
def test_the_laws_are_ratios_of_times(n: int, serial: int, divided: int) -> None:
    share = Fraction(serial, serial + divided)
    one = serial + divided
    assert here.amdahl(n, share) == pytest.approx(one / (serial + divided / n))
    assert here.gustafson(n, share) == pytest.approx((serial + n * divided) / one)


@given(st.floats(1e-3, 1), st.floats(1e-3, 1), st.integers(3, 9))
def test_the_fit_finds_what_the_times_were_made_of(a: float, b: float, n: int) -> None:
    found = here.fit_amdahl({ranks: a + b / ranks for ranks in range(1, n)})
    assert found == pytest.approx((a, b), rel=1e-6)


def test_the_last_point_is_predicted_from_the_others_alone() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    strong = {n: 0.04 + 0.16 / n for n in (1, 2, 3)} | {4: 1.0}
    lesson.check_laws({"strong": strong, "weak": {4: 0.2}, "all on one": {1: 0.68}}, 0.2)
    rows = {row["claim"]: row for row in lesson.ledger}
    predicted = rows[STRONG + ", from fewer"]
    assert predicted["predicted"] == pytest.approx(2.5)
    assert (predicted["measured"], predicted["verdict"]) == (pytest.approx(0.2), "FAIL")
    assert rows[FITTED]["measured"] == pytest.approx(0.2)
    assert rows[WEAK]["measured"] == pytest.approx(rows[WEAK]["predicted"]) == pytest.approx(3.4)


def test_published_times_are_predicted_within_two_hundredths() -> None:
    """What the lesson prints of them: the sixteenth GPU, from 1 to 8."""
    for _, times in here.PUBLISHED.values():
        line = here.statistics.linear_regression([0, 1 / 2, 3 / 4, 7 / 8], times[:4])
        assert line.intercept + line.slope * 15 / 16 == pytest.approx(times[4], rel=0.02)


@pytest.mark.deep
def test_a_model_and_images_of_the_learner_are_measured(tmp_path: Path) -> None:
    from PIL import Image

    for kind, shade in (("dark", 20), ("light", 220)):
        (tmp_path / "images" / kind).mkdir(parents=True)
        for i in range(3):
            image = Image.new("RGB", (32, 48), (shade, shade, 10 * i))
            image.save(tmp_path / "images" / kind / f"{i}.png")
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(48, 2))\n"
    )
    model = f"{tmp_path}/mine.py:build"
    argv = ("--model", model, "--data", str(tmp_path / "images"))
    figure = tmp_path / "figure.png"
    played = play(LESSON, 3, FEW, NO_TRAINING, argv=(*argv, "--figure", str(figure)))
    played.expect(set())
    assert figure.read_bytes().startswith(b"\x89PNG")
    claims = [row["claim"] for row in played.ledger]
    assert STRONG + ", from fewer" in claims
    assert {STRONG, FITTED}.isdisjoint(claims), "nobody knows a real model's serial share"
    played = play(LESSON, 1, argv=argv[2:])
    assert "--data goes with --model" in played.code


LINES = {
    "accumulated, not averaged": ("label) / accumulation)", "label))", {ERROR}),
    "gradients summed over a batch": (  # in units of the small batch's mean
        "label_N[index_B]).backward()",
        'label_N[index_B], reduction="sum").div(20).backward()',
        {LOSS + "8x, as before", LOSS + "8x, scaled", LOSS + "8x, scaled, warm-up"},
    ),
    "small steps in place of a large one": (
        [
            ("chosen.split(batch)", "chosen.split(20)"),
            ("= learning_rate * min(1, done)", "= learning_rate * 20 / batch * min(1, done)"),
        ],
        {LOSS + "32x, scaled", LOSS + "32x, scaled, warm-up"},
    ),
    "no sum over ranks": ("            dist.all_reduce(parameter.grad)\n", "", {ERROR}),
}
SAMPLES = {
    "a rank's samples again": (
        ".view(steps, WORLD_SIZE, 24)[:, RANK]",
        "[: steps * 24]",
        {ERROR},
    ),
}
LEARNING = [  # left out where a clock decides
    ("    check_effective_batch(digits, device)\n", ""),
    NO_TRAINING,
]
NO_LAWS = [
    ("    times = measure_scaling(work, device)\n", ""),
    ("    check_laws(times, known_share=UPDATE / (UPDATE + COMPUTE) if stand_in else None)\n", ""),
]
TWO_CORES = (  # of as many as there are
    "        cores = len(os.sched_getaffinity(0))\n",
    "        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n"
    "        cores = len(os.sched_getaffinity(0))\n",
)
TIMED = {
    "a step that leaves its all-reduce out": (
        "        dist.all_reduce(work.gradient, group=group)\n",
        "        pass\n",
        {SHARE},
    ),
    "ranks that sleep in place of their arithmetic": (
        "        matrix @ matrix\n",
        "        time.sleep(0.005)\n",
        {"real arithmetic: speed-up, at most the cores"},
    ),
}
IN_TURNS = {
    "ranks that take turns at their arithmetic": (
        "    for _ in range(4):\n        matrix @ matrix\n",
        "    import fcntl\n"
        "    with open(__file__) as turn:\n"
        "        fcntl.flock(turn, fcntl.LOCK_EX)\n"
        "        for _ in range(4):\n"
        "            matrix @ matrix\n",
        {"real arithmetic: speed-up, at least"},
    ),
}
NO_SHARE = ("    check_communication(work, device)\n", "")
BREAKS = [
    # Small steps that are summed would be the small batch's: two in one play, and no more.
    Breaks(LINES, changes=[FEW], most=2),
    Breaks(SAMPLES, changes=[FEW, NO_TRAINING]),
    Breaks(TIMED, ranks=3, changes=[*LEARNING, *NO_LAWS, TWO_CORES], clock=True),
    Breaks(IN_TURNS, ranks=3, changes=[*LEARNING, *NO_LAWS, NO_SHARE, TWO_CORES], clock=True),
]


def test_the_work_of_all_on_one_gpu_is_the_same_gradient_in_pieces() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3, dtype=torch.float64)
    inputs, labels = torch.randn(25, 8, dtype=torch.float64), torch.arange(25) % 3
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    most = []
    model.register_forward_hook(lambda _, inputs, output: most.append(len(output)))
    work = here.RealModel(model, 10, inputs, labels)
    work.forward_backward(25)
    assert most == [10, 10, 5]
    assert work.gradient == pytest.approx(whole.numpy(), abs=1e-15)


@pytest.mark.parametrize(
    ("speed_up", "verdicts"),
    [(2.0, ["PASS", "PASS"]), (1.0, ["PASS", "FAIL"]), (4.0, ["FAIL", "PASS"])],
)
def test_two_cores_are_neither_one_nor_four(speed_up: float, verdicts: list[str]) -> None:
    lesson = load(LESSON)
    lesson.judge_cores(2, 4, speed_up)
    assert [row["verdict"] for row in lesson.ledger] == verdicts


def test_warm_up_begins_at_its_share_of_the_rate() -> None:
    """Eight steps per epoch, two epochs of warm-up: a sixteenth, two sixteenths, then all of it."""
    lesson = load(LESSON, ("EPOCHS, SAMPLES = 8, 1280", "EPOCHS, SAMPLES = 3, 1280"))
    rates = []
    step = torch.optim.SGD.step

    def noted(optimizer: torch.optim.SGD, *args: object) -> object:
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.optim.SGD, "step", noted)
        digits = [torch.randn(1280, 64, dtype=torch.float64), torch.arange(1280) % 10]
        lesson.train_on_digits(digits, 160, 0.08, 2, seed=0)
    expected = [0.08 * min(1, (k + 1) / 16) for k in range(24)]
    assert rates == pytest.approx(expected)


def _slowest() -> float:
    lesson = load(LESSON, FEW)
    now = [0.0]
    lesson.time = SimpleNamespace(perf_counter=lambda: now[0])

    def work() -> None:
        now[0] += 0.1 + 0.02 * dist.get_rank()  # rank 1 takes longer

    return lesson.seconds({"": {2: work}}, torch.device("cpu"))[""][2]


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    assert run(_slowest, 2) == pytest.approx([0.12, 0.12])


# What a clock decides, by a clock of our own: a sleep and an all-reduce put it forward, and nothing
# else takes any time.

GROWS = "        time.sleep(0.01 * dist.get_world_size(group))\n"
WRONG = {  # claims that must FAIL, on three ranks, and no other
    "a cost that grows": (
        (
            "        dist.all_reduce(work.gradient, group=group)\n",
            "        dist.all_reduce(work.gradient, group=group)\n" + GROWS,
        ),
        {STRONG, FITTED, WEAK, SHARE},
    ),
    "no serial part": (
        ("        time.sleep(UPDATE)\n", "        pass\n"),
        {STRONG, FITTED, WEAK},
    ),
    "work that is not divided": (("round(work.batch / n)", "work.batch"), {STRONG, FITTED}),
    "weak, with a share of the batch": (
        (
            "train_step(work, work.batch, group)\n    whole",
            "train_step(work, work.batch // 3, group)\n    whole",
        ),
        {WEAK},
    ),
    "a step that leaves the all-reduce out": (
        (
            '"a step with it": lambda: train_step(work, work.batch, group)',
            '"a step with it": lambda: train_step(work, work.batch, None)',
        ),
        {SHARE},
    ),
}


def failed_by_our_clock(*changes: tuple[str, str]) -> set[str]:
    """Measure and judge on this rank, one of three; an all-reduce carries 1 GB/s."""
    lesson = load(LESSON, FEW, *changes)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        dist.all_reduce(x, group=group)
        sleep(x.nbytes / 1e9)

    lesson.time = SimpleNamespace(sleep=sleep, perf_counter=lambda: now[0])
    lesson.dist = SimpleNamespace(**vars(dist) | {"all_reduce": all_reduce})
    device = torch.device("cpu")
    work = lesson.StandIn()
    times = lesson.measure_scaling(work, device)
    lesson.check_laws(times, lesson.UPDATE / (lesson.UPDATE + lesson.COMPUTE))
    lesson.check_communication(work, device)
    judged = {row["claim"] for row in lesson.ledger}
    assert judged == {STRONG, STRONG + ", from fewer", FITTED, WEAK, SHARE}
    return {row["claim"] for row in lesson.ledger if row["verdict"] == "FAIL"}


def failed_by_each() -> dict[str, set[str]]:
    unbroken = {"nothing": failed_by_our_clock()}
    return unbroken | {name: failed_by_our_clock(change) for name, (change, _) in WRONG.items()}


def test_a_wrong_line_fails_what_a_clock_decides() -> None:
    expected = {"nothing": set()} | {name: claims for name, (_, claims) in WRONG.items()}
    assert run(failed_by_each, 3) == [expected] * 3


def test_gradients_are_added_up_after_backward_and_before_the_update() -> None:
    lesson = load(LESSON)
    asked = Mock()
    with patch.object(lesson.dist, "all_reduce", asked.all_reduce):
        lesson.train_step(asked.work, 3, asked.group)
    order = [name for name, _, _ in asked.mock_calls]
    assert order == ["work.forward_backward", "all_reduce", "work.update"]


# Values that no row shows


def in_one_process(lesson) -> None:
    """Let the lesson's collectives have one rank, without a group."""

    def all_gather_object(found: list, value: object) -> None:
        found[:] = [value] * len(found)

    calls = {"barrier": lambda: None, "all_gather_object": all_gather_object}
    lesson.dist = SimpleNamespace(**vars(dist) | calls)


def test_a_training_is_plain_sgd_with_momentum_on_shuffled_samples() -> None:
    """By torch.func and arithmetic of our own, which keep no gradient from step to step."""
    lesson = load(LESSON, ("EPOCHS, SAMPLES = 8, 1280", "EPOCHS, SAMPLES = 2, 40"))
    random = torch.Generator().manual_seed(1)
    image = torch.randn(50, 64, generator=random, dtype=torch.float64)
    label = torch.randint(10, (50,), generator=random)
    model = lesson.net(3)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def loss(weights: dict, index: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, weights, image[index])
        return torch.nn.functional.cross_entropy(logits, label[index])

    order = torch.Generator().manual_seed(3)
    velocity = {name: 0 for name in weights}
    for _ in range(2):
        for index in torch.randperm(50, generator=order)[:40].split(20):
            gradients = torch.func.grad(loss)(weights, index)
            velocity = {name: 0.9 * velocity[name] + gradients[name] for name in weights}
            weights = {name: weights[name] - 0.05 * velocity[name] for name in weights}
    expected = loss(weights, torch.arange(50)).item()
    assert lesson.train_on_digits([image, label], 20, 0.05, 0, seed=3) == pytest.approx(expected)


def test_each_training_has_the_batch_rate_and_warm_up_of_its_name() -> None:
    lesson = load(LESSON)
    in_one_process(lesson)
    loss = {(20, 0.01, 0): 0.1, (160, 0.01, 0): 2.0, (160, 0.08, 0): 0.15, (160, 0.08, 2): 0.12}
    loss |= {(640, 0.32, 0): 0.9, (640, 0.32, 2): 0.6}
    trained = []

    def train_on_digits(digits: object, *how: float) -> float:
        *training, seed = how
        trained.append(how)
        low = 0.5 if training[0] == 20 else 0.9
        return loss[tuple(training)] * (1, low, 3)[seed]  # of three seeds the first is the median

    lesson.train_on_digits = train_on_digits
    lesson.check_learning_rates(None)
    assert sorted(trained) == sorted((*how, seed) for how in loss for seed in range(3))
    found = {row["claim"].removeprefix(LOSS): row["measured"] for row in lesson.ledger}
    assert found == pytest.approx(
        {
            "8x, as before": 20,
            "8x, scaled": 1.5,
            "8x, scaled, warm-up": 1.2,
            "32x, scaled": 9,
            "32x, scaled, warm-up": 6,
        }
    )
    assert {row["verdict"] for row in lesson.ledger} == {"PASS"}


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, [1]), (3, [1, 2, 3]), (6, [1, 2, 3, 4, 6]), (16, [1, 2, 3, 4, 8, 16])]
)
def test_groups_are_of_the_first_ranks_and_one_rank_talks_to_nobody(ranks, sizes) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = ranks
    lesson.dist = SimpleNamespace(new_group=lambda members: members)
    expected = {n: list(range(n)) for n in sizes} | {1: None}
    assert lesson.groups_of_ranks() == expected


def test_the_median_of_the_rounds_counts() -> None:
    lesson = load(LESSON, ("ROUNDS = 5", "ROUNDS = 3"))
    in_one_process(lesson)
    now = [0.0]
    takes = iter([4.0, 1.0, 2.0, 1.0, 9.0, 1.0])  # of two kinds, in turn

    def work() -> None:
        now[0] += next(takes)

    lesson.time = SimpleNamespace(perf_counter=lambda: now[0])
    times = lesson.seconds({"a": {1: work}, "b": {1: work}}, torch.device("cpu"))
    assert times == {"a": {1: 4.0}, "b": {1: 1.0}}


def test_what_ranks_deliver_is_told_by_samples_speed_up_and_efficiency(capsys) -> None:
    here.show(240, {1: 0.2, 4: 0.1}, {1: 0.2, 4: 0.25})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["1", "1,200", "1.00", "1.00", "1,200", "1.00"],
        ["4", "2,400", "2.00", "0.50", "3,840", "0.80"],
    ]


def test_the_speed_up_of_real_arithmetic_counts_the_work_of_all_ranks(monkeypatch) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    monkeypatch.setattr(lesson.os, "sched_getaffinity", lambda _: {0, 1})
    ran = []

    def seconds(runs: dict, device: torch.device) -> dict:
        ran.extend(runs[""])
        return {"": {1: 0.5, 4: 1.0}}

    lesson.seconds = seconds
    judged = []
    lesson.judge_cores = lambda *what: judged.append(what)
    lesson.check_cores()
    assert ran == [1, 4]
    assert judged == [(2, 4, 2.0)]


def test_the_gradients_of_the_third_question_are_40_mb(monkeypatch) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    reduced = []
    lesson.dist = SimpleNamespace(
        all_reduce=lambda x, group=None: reduced.append((x.nbytes, group)),
        group=SimpleNamespace(WORLD="all"),
        is_initialized=lambda: False,
    )
    lesson.time = SimpleNamespace(sleep=lambda seconds: None)

    def seconds(runs: dict, device: torch.device) -> dict:
        for on_ranks in runs.values():
            on_ranks[4]()
        return {"the all-reduce": {4: 0.1}, "a step without": {4: 0.2}, "a step with it": {4: 0.3}}

    lesson.seconds = seconds
    lesson.check_communication(lesson.StandIn(), torch.device("cpu"))
    assert reduced == [(40_000_000, None), (40_000_000, "all")]
    (row,) = lesson.ledger
    assert (row["predicted"], row["measured"]) == pytest.approx((1 / 3, 1 / 3))


def test_a_model_of_one_s_own_is_updated_by_the_gradient_that_was_summed() -> None:
    """Adam's first step is the learning rate, against the sign of the gradient."""
    model = torch.nn.Linear(2, 1, bias=False)
    work = here.RealModel(model, 1, torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
    before = model.weight.detach().clone()
    work.gradient.copy_(torch.tensor([3.0, -5.0]))
    work.update()
    moved = (model.weight.detach() - before).flatten().tolist()
    assert moved == pytest.approx([-1e-4, 1e-4], rel=0.01)


def test_samples_per_second_are_those_of_all_ranks(capsys, monkeypatch) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    now = [0.0]

    def train_step(work: object, samples: int, group: object) -> None:
        assert (samples, group) == (240, "all")
        now[0] += 0.1

    lesson.train_step = train_step
    lesson.dist = SimpleNamespace(barrier=lambda: None, group=SimpleNamespace(WORLD="all"))
    lesson.time = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(lesson.torch.cuda, "utilization", lambda device: 97)
    lesson.show_utilization(SimpleNamespace(batch=240), torch.device("cpu"))
    assert "97% utilization, 9,600 samples/s" in capsys.readouterr().out


PUBLISHED = {  # pytorch/benchmarks/distributed/ddp/README.md: no DDP; 1, 2, 4, 8 and 16 GPUs
    "ResNet-50": (0.097, [0.100, 0.103, 0.103, 0.104, 0.104]),
    "ResNet-101": (0.162, [0.171, 0.176, 0.176, 0.179, 0.179]),
    "ResNeXt-50": (0.145, [0.147, 0.153, 0.153, 0.157, 0.157]),
    "ResNeXt-101": (0.415, [0.425, 0.438, 0.439, 0.447, 0.450]),
}


def test_published_times_are_told_as_they_were_published(capsys) -> None:
    here.read_published()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    for (model, (alone, times)), row in zip(PUBLISHED.items(), rows, strict=True):
        ring = [0, 1 / 2, 3 / 4, 7 / 8]
        slope, intercept = torch.linalg.lstsq(
            torch.tensor([[share, 1.0] for share in ring]), torch.tensor(times[:4])[:, None]
        )[0].flatten()
        on_16 = float(intercept + slope * 15 / 16)
        told = [float(value) for value in row[1:]]
        assert row[0] == model
        assert told == pytest.approx([times[4], on_16, alone / times[4]], abs=0.006)
        assert told[1] == pytest.approx(on_16, abs=6e-4)


def test_the_figure_shows_speed_up_its_law_and_both_efficiencies(monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    strong = {n: 0.04 + 0.16 / n for n in (1, 2, 3)} | {4: 0.1}  # the last is off the law
    weak = {1: 0.2, 2: 0.21, 3: 0.22, 4: 0.25}
    here.draw({"strong": strong, "weak": weak}, "unused.png")
    left, right = drawn[0].axes
    speed_ups = [0.2 / strong[n] for n in strong]
    law = [1 / (0.2 + 0.8 / n) for n in (1, 2, 3, 4)]  # by 1, 2 and 3
    per_rank = [speed_up / n for n, speed_up in enumerate(speed_ups, start=1)]
    expected = {left: [speed_ups, law], right: [per_rank, [0.2 / weak[n] for n in weak]]}
    for axes, curves in expected.items():
        shown = [list(line.get_ydata()) for line in axes.lines]
        for curve in curves:
            assert any(heights == pytest.approx(curve) for heights in shown), curve


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_micro_batches_are_as_many_as_asked_for_and_reduced_once_per_step(accumulation) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    model = lesson.net(0)
    computed, reduced = [], []
    model.register_forward_hook(lambda _, inputs, output: computed.append(len(output)))

    def all_reduce(gradient: torch.Tensor) -> None:
        reduced.append(len(computed))
        gradient.mul_(2)  # another rank has the same

    lesson.dist = SimpleNamespace(all_reduce=all_reduce)
    random = torch.Generator().manual_seed(1)
    image = torch.randn(48, 64, generator=random, dtype=torch.float64)
    label = torch.randint(10, (48,), generator=random)
    lesson.train_in_pieces(model, image, label, accumulation)
    assert computed == 2 * accumulation * [24 // accumulation]
    assert reduced == 6 * [accumulation] + 6 * [2 * accumulation]  # of six parameters
    expected = lesson.net(0)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for images, labels in zip(image.split(24), label.split(24), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(expected(images), labels).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-14)


def test_a_rank_that_trains_alone_talks_to_nobody() -> None:
    lesson = load(LESSON)
    asked = Mock()
    with patch.object(lesson.dist, "all_reduce", asked.all_reduce):
        lesson.train_step(asked.work, 3, None)
    assert [name for name, _, _ in asked.mock_calls] == ["work.forward_backward", "work.update"]
