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


def test_the_last_point_is_foretold_from_the_others_alone() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    strong = {n: 0.04 + 0.16 / n for n in (1, 2, 3)} | {4: 1.0}
    lesson.check_laws({"strong": strong, "weak": {4: 0.2}, "all on one": {1: 0.68}}, 0.2)
    rows = {row["claim"]: row for row in lesson.ledger}
    foretold = rows[STRONG + ", from fewer"]
    assert foretold["predicted"] == pytest.approx(2.5)
    assert (foretold["measured"], foretold["verdict"]) == (pytest.approx(0.2), "FAIL")
    assert rows[FITTED]["measured"] == pytest.approx(0.2)
    assert rows[WEAK]["measured"] == pytest.approx(rows[WEAK]["predicted"]) == pytest.approx(3.4)


def test_published_times_are_foretold_within_two_hundredths() -> None:
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
