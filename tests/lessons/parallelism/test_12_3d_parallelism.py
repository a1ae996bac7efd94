"""The 3D lesson: meshes of every shape, formulas against published numbers, broken lines."""

import math
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from course.playing import Played, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/12_3d_parallelism.py"
QUICK = (("STEPS = 15\n", "STEPS = 3\n"), ('at most", 4.2,', 'at most", 9.9,'))


@pytest.mark.deep
def test_the_lesson_holds_on_six_ranks() -> None:
    play(LESSON, 6, *QUICK).expect(set())


@pytest.mark.deep
def test_on_eight_ranks_no_axis_is_absent() -> None:
    played = play(LESSON, 8, *QUICK, argv=("--mesh", "2,2,2"), deadline=200)
    played.expect(set())
    rows = {row["claim"]: row["verdict"] for row in played.ledger}
    assert [rows[f"mesh 2,2,2: bytes along {axis}"] for axis in ("dp", "pp", "tp")] == ["PASS"] * 3
    assert list(rows.values()).count("BLOCKED") == 1  # what needs GPUs


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["4,1,1", "1,4,1", "1,1,4"])
def test_a_mesh_can_be_chosen_and_absent_axes_are_blocked(mesh: str) -> None:
    played = play(LESSON, 4, *QUICK, argv=("--mesh", mesh))
    played.expect(set())
    meshes = {row["claim"].partition(":")[0] for row in played.ledger if "mesh" in row["claim"]}
    assert meshes == {f"mesh {mesh}"}
    needs = {row["needs"] for row in played.ledger if "needs" in row}
    absent = [axis for axis, n in zip(("dp", "pp", "tp"), mesh.split(","), strict=True) if n == "1"]
    assert needs >= {f"8 ranks, or --mesh with {axis} > 1" for axis in absent}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("2,2", "--mesh takes three sizes, dp,pp,tp; got 2,2; write --mesh 2,1,2"),
        ("2,2,2", "must be the number of ranks; got 8 for 2 ranks"),
        ("2,1,0", "--mesh takes three sizes"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: str, words: str) -> None:
    change = ("time.sleep(30)", "time.sleep(0)")
    assert words in play(LESSON, 2, change, argv=("--mesh", mesh)).code


@pytest.mark.deep
def test_heads_that_cannot_be_shared_are_refused() -> None:
    changes = ("time.sleep(30)", "time.sleep(0)"), ("B, T, D, H, V = 18,", "B, T, D, H, V = 3,")
    words = play(LESSON, 3, *changes, argv=("--mesh", "1,1,3")).code
    assert "tp must divide 4 heads, pp be at most 5, dp at most 1; got 1,1,3" in words


def test_meshes_use_as_many_axes_as_they_can() -> None:
    lesson = load(LESSON)
    assert lesson.meshes_of(1) == [(1, 1, 1)]
    assert lesson.meshes_of(4) == [(2, 1, 2), (2, 2, 1), (1, 2, 2)]
    assert lesson.meshes_of(8) == [(2, 2, 2)]
    assert lesson.meshes_of(7) == []
    for ranks in range(1, 65):
        assert all(math.prod(shape) == ranks for shape in lesson.meshes_of(ranks))


def groups() -> dict[str, list[int]]:
    lesson = load(LESSON)
    mesh = lesson.device_mesh(lesson.torch.device("cpu"), (2, 2, 2))
    return {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("dp", "pp", "tp")}


def test_tp_is_innermost_and_pp_outermost() -> None:
    assert run(groups, 8)[0] == {"tp": [0, 1], "dp": [0, 2], "pp": [0, 4]}


def test_the_published_run_sends_what_the_formula_says() -> None:
    lesson = load(LESSON)
    sent = {axis: round(gigabytes, 1) for axis, gigabytes in lesson.published_run().items()}
    assert sent == {"dp": 8.7, "pp": 9.7, "tp": 338.2}


def test_the_tables_say_what_the_formulas_say() -> None:
    lesson = load(LESSON)
    assert lesson.busy_share(1024, 4, 989e12, 450e9) == pytest.approx(0.134, abs=5e-4)
    assert lesson.busy_share(6593.33, 4, 989e12, 450e9) == pytest.approx(0.5, abs=1e-4)


def PLAIN(played: Played) -> None:
    """The tables that it prints say so, too."""
    assert "8.7       9.7     338.2" in played.output
    busy = "NVLink 4             computes  13.4% of the time; half of it if 6,593 wide"
    assert busy in played.output


def on(meshes: tuple[str, ...], *claims: str) -> set[str]:
    return {f"mesh {mesh}: {claim}" for mesh in meshes for claim in claims}


RESULT = "loss of the last step", "error of the trained weights"
SUMS = "bytes along tp", "all-reduces per block"
TP, DP, PP = ("2,1,2", "1,2,2"), ("2,1,2", "2,2,1"), ("2,2,1", "1,2,2")
BATCHES = "batch 4: ", "batch 16: "
LINES = {
    "f does not sum": (
        ("return all_reduce(grad, ctx.group), None", "return grad, None"),
        on(TP, *RESULT, *SUMS),
    ),
    "g does not sum": (
        ("        return all_reduce(x, group)\n", "        return x.view_as(x)\n"),
        on(TP, *RESULT, *SUMS),
    ),
    "a block is counted as one MLP (Try)": (
        ('"tp": 4 * blocks', '"tp": 2 * blocks'),
        on(TP, "bytes along tp"),
    ),
    "features are gathered twice": (
        (
            "        dist.all_gather_into_tensor(y_nBw, y_Bw.contiguous())\n",
            "        for _ in range(2):\n"
            "            dist.all_gather_into_tensor(y_nBw, y_Bw.contiguous())\n",
        ),
        {batch + "FLOPs per gathered byte" for batch in BATCHES},
    ),
    "the gathered loss counts n times": (
        ("y_BW.square().sum() / WORLD_SIZE", "y_BW.square().sum()"),
        {batch + "error of the gradients" for batch in BATCHES},
    ),
    "the loss is not the mean": (
        ('reduction="sum") / (B * T)', 'reduction="sum") / T'),
        on(("2,1,2", "2,2,1", "1,2,2"), *RESULT),
    ),
    "gradients are summed along tp too": (
        (
            'dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))',
            '[dist.all_reduce(parameter.grad, group=mesh.get_group(a)) for a in ("dp", "tp")]',
        ),
        on(("2,1,2",), *RESULT, *SUMS),
    ),
    "gradients are not summed along dp (Try)": (
        (
            '            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))\n',
            "            pass\n",
        ),
        on(DP, *RESULT, "bytes along dp"),
    ),
    "activations are sent doubled": (
        ("send(y.detach(), pipe, 1)", "send(2 * y.detach(), pipe, 1)"),
        on(PP, *RESULT),
    ),
    "each message is sent twice": (
        [
            (
                f"{operation}, group=pipe, group_peer=peer)\n"
                "    dist.batch_isend_irecv([operation])[0].wait()\n",
                f"{operation}, group=pipe, group_peer=peer)\n"
                "    for work in dist.batch_isend_irecv([operation, operation]):\n"
                "        work.wait()\n",
            )
            for operation in ("(dist.isend, x.contiguous()", "(dist.irecv, received")
        ],
        on(PP, "bytes along pp"),
    ),
    "all ranks take the same examples": (
        (
            '.tensor_split(mesh["dp"].size())[mesh.get_local_rank("dp")]\n    pipe',
            '.tensor_split(mesh["dp"].size())[0]\n    pipe',
        ),
        on(DP, *RESULT),
    ),
}

TOO_SHORT = {
    "a model that learns too little": (
        ("STEPS = 15\n", "STEPS = 3\n"),
        {"one process: loss of the last step, at most"},
    ),
}
BREAKS = [Breaks(LINES, ranks=4, changes=QUICK), Breaks(TOO_SHORT)]

ON_GPUS = OnGpus(
    changes=[
        ("STEPS = 15", "STEPS = 5"),
        ("for batch in (65_536, 262_144):", "for batch in (64, 256):"),
        ("repeats: int = 20", "repeats: int = 1"),
    ]
)


def test_links_turn_gigabytes_into_seconds(capsys: pytest.CaptureFixture) -> None:
    """8.72, 9.66 and 338.2 GB over 25 GB/s, or over 300 GB/s for the axis that has NVLink."""
    lesson = load(LESSON)
    lesson.print_published_run()
    rows = [line.split()[-4:] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert rows == [["0.35", "0.03", "13.53", "13.91"], ["0.35", "0.39", "1.13", "1.86"]]


def test_slower_links_leave_a_gpu_idle(capsys: pytest.CaptureFixture) -> None:
    """341 FLOPs per byte, of which an H100 wants 989e12 / rate to be busy half of the time."""
    load(LESSON).print_busy_shares()
    said = " ".join(capsys.readouterr().out.split())
    for row in (
        "PCIe 5.0 x16 computes 2.1% of the time; half of it if 47,095 wide",
        "400 Gb/s network computes 1.7% of the time; half of it if 59,340 wide",
        "25 Gb/s Ethernet computes 0.1% of the time; half of it if 949,440 wide",
    ):
        assert row in said


def test_each_step_has_text_of_its_own() -> None:
    lesson, cpu = load(LESSON), torch.device("cpu")
    batches = [lesson.batch_of(step, cpu) for step in (0, 1, 0)]
    assert [tokens_BT.shape for tokens_BT in batches] == [(18, 33)] * 3
    assert torch.equal(batches[0], batches[2])
    assert not torch.equal(batches[0], batches[1])


def messages_of_a_step() -> list[str]:
    lesson, cpu = load(LESSON), torch.device("cpu")
    mesh = lesson.device_mesh(cpu, (1, 2, 1))
    stage = lesson.Stage(lesson.GPT(lesson.LAYERS, lesson.D, lesson.T, lesson.V).double(), mesh)
    with lesson.CountedCommunication() as counted:
        lesson.train_step(stage, mesh, lesson.batch_of(0, cpu))
    return [call.operation for call in counted.log if call.operation in ("send", "recv")]


def test_all_micro_batches_go_forward_before_any_goes_back() -> None:
    there, back = ["send"] * 3, ["recv"] * 3
    assert run(messages_of_a_step, 2) == [there + back, back + there]


@pytest.mark.parametrize(("way", "given"), [("send", (1,)), ("receive_like", (-1,))])
def test_a_message_is_waited_for(way: str, given: tuple) -> None:
    work = Mock()
    started = patch.object(dist, "batch_isend_irecv", return_value=[work])
    with patch.object(dist, "P2POp"), patch.object(dist, "get_rank", return_value=1), started:
        getattr(load(LESSON), way)(torch.ones(2), None, *given)
    work.wait.assert_called_once()


def test_the_busy_share_is_that_of_computing_and_the_larger_batch_is_over_the_smaller() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    ms = iter([2.0, 3.0, 8.0, 8.0])  # computing and gathering, with one batch and with four
    lesson.median_ms = lambda work: next(ms)
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        lesson.check_busy_share_on_gpus(torch.device("meta"))
    assert lesson.ledger[0]["measured"] == pytest.approx(0.5 / 0.4)
