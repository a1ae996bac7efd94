"""Two nodes, one torchrun each: equal weights, bytes as predicted, mistakes named, nothing left."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from course.lessons import ROOT
from course.playing import Played, changed, load, play
from course.ranks import run
from tests.helpers.leftovers import MARKED, gone, machine, networks
from tests.helpers.pretended_gpus import play_on_gpus
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fundamentals/05_several_nodes.py"
CPU = torch.device("cpu")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # a group of one

NO_STATIC = [
    ('    static = Launch(nodes, static_form, "")\n', ""),
    ("    tell.send(static.seen())\n", ""),
    ('        check_hello(next_report(operator)["places"], 2, "static")\n', ""),
]
NO_NODES = [  # all that rank 0 starts
    ("    operator = start_operator() if RANK == 0 else None\n", ""),
    ('    check_virtual_nodes(operator, weights, device.type == "cpu")\n', ""),
]
SIZES = {
    1: NO_NODES,  # they are there on three
    3: [
        *NO_STATIC,
        ("    tell.send(make_mistakes(nodes, mistakes))\n", ""),
        ("        check_mistakes(next_report(operator))\n", ""),
    ],
}
ON_GPUS = OnGpus(changes=NO_NODES)  # nodes are started without pretended GPUs
NO_DEVICE = {
    "report_error": "how long until a launch failed",
    "make_mistakes": "a deadline for processes",
}


def run_alone(folder: Path, *changes: tuple[str, str]) -> Played:
    """Run a changed copy as one rank; the ranks in its nodes run the same copy."""
    script = folder / "lesson.py"
    script.write_text(changed(LESSON, *changes))
    ledger = folder / "ledger.json"
    how = {"cwd": folder, "capture_output": True, "text": True, "timeout": 280}
    was = machine()
    ran = subprocess.run(
        [sys.executable, script], env=MARKED | ALONE | {"LESSON_JSON": str(ledger)}, **how
    )
    assert gone()
    assert machine() == was
    rows = json.loads(ledger.read_text())["ledger"] if ledger.exists() else []
    return Played(ran.returncode, rows, ran.stdout + ran.stderr)


# Values


def off(batch: int) -> float:
    lesson = load(LESSON, ("BATCH = 96 ", f"BATCH = {batch} "))
    return lesson.train_on_all_ranks(CPU)[1]


@pytest.mark.parametrize(("ranks", "batch"), [(1, 96), (2, 96), (3, 97), (4, 3)])
def test_ranks_that_share_a_batch_unevenly_train_as_one_process(ranks: int, batch: int) -> None:
    assert max(run(off, ranks, batch)) < 1e-6


def halves(lengths: tuple[int, int, int]) -> list[float]:
    """Relative errors of the layer in parallel, against torch's own autograd on the whole."""
    lesson = load(LESSON)
    rows, width, hidden = lengths
    n = dist.get_world_size()
    random = torch.Generator().manual_seed(1)
    shapes = [(rows, width), (width, hidden), (hidden, width)]
    x, A, B = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    x.requires_grad_()
    y = torch.nn.functional.gelu(x @ A) @ B
    (dx,) = torch.autograd.grad(y.sum(), x)
    mine = A.chunk(n, 1)[dist.get_rank()], B.chunk(n, 0)[dist.get_rank()]
    ours = lesson.layer_and_gradient(x, *mine, dist.group.WORLD)
    return [lesson.relative_error(a, b) for a, b in zip(ours, (y.detach(), dx), strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_layer_in_columns_is_the_whole_layer(ranks: int) -> None:
    for errors in run(halves, ranks, (5, 8, 16)):
        assert max(errors) < 1e-12


def test_seconds_on_the_link_follow_from_bytes_and_bandwidth() -> None:
    lesson = load(LESSON)
    assert lesson.S == 153_640
    a_second = 1e6 / 8 * 1448 / 1514  # bytes of ours that 1 Mbit/s carries
    assert lesson.seconds_on_the_link(3 * a_second, 1) == pytest.approx(3)
    assert lesson.seconds_on_the_link(3 * a_second, 30) == pytest.approx(0.1)


@pytest.mark.parametrize(("times_S", "verdict"), [(1, "FAIL"), (1.5, "PASS"), (2, "FAIL")])
def test_the_slack_of_a_share_tells_theories_apart(times_S: float, verdict: str) -> None:
    lesson = load(LESSON)
    link = lesson.seconds_on_the_link(times_S * lesson.S, 20)
    lesson.check_share({"mbit": 20, "alone": 0.1, "whole": 0.1 + link})
    assert [row["verdict"] for row in lesson.ledger] == [verdict]


def test_two_ranks_that_take_one_gpu_bind_their_group_to_it(monkeypatch) -> None:
    """torch 2.15 would bind a group without device_id to LOCAL_RANK's GPU, or the rank's."""
    lesson = load(LESSON)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    bound = []
    monkeypatch.setattr(lesson.dist, "init_process_group", lambda *_, **how: bound.append(how))
    monkeypatch.setattr(lesson.dist, "all_reduce", lambda x: bound.append({"device_id": x.device}))
    monkeypatch.setattr(lesson.torch, "ones", lambda *_, device: torch.empty(0, device="meta"))
    monkeypatch.setattr(lesson.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(lesson.torch.cuda, "synchronize", lambda: None)
    for rank in (0, 1):
        lesson.take_the_first_gpu(rank)
    assert [how["device_id"] for how in bound[::2]] == [torch.device("cuda", 0)] * 2


def test_one_rank_of_each_node_changes_the_speed_of_the_cable(monkeypatch) -> None:
    """Each node has an end of it: by rank 0 alone, one direction would become slow."""
    lesson = load(LESSON)
    changes = []
    lesson.command = lambda line: changes.append((lesson.RANK, line.split()))
    monkeypatch.setattr(lesson.dist, "barrier", lambda: None)
    for rank, local_rank in enumerate("0101"):  # two nodes of two ranks
        lesson.RANK = rank
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        lesson.change_speed(20)
    assert [rank for rank, _ in changes] == [0, 2]
    assert all({"change", "20mbit"} <= {*words} for _, words in changes)


@pytest.mark.parametrize("ranks", [2, 16])
def test_busbw_of_real_nodes_follows_from_bytes_and_seconds(ranks: int) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = ranks
    link = 2 * (ranks - 1) / ranks * lesson.S / 50e9  # at 50 GB/s
    step = {"width": lesson.WIDTH, "alone": 0.1, "whole": 0.1 + link}
    assert lesson.rate_of(step) == pytest.approx(50)


# Claims, and what breaks them

# The ranks in the nodes are programs of their own: they run the lesson's code, as it is broken.
RUN_AS_BROKEN = [
    ("STEPS = 15\n", "STEPS = 15\nCODE = sys._getframe().f_code\n"),
    (
        "        torchrun([*flags, os.path.abspath(__file__)])\n",
        "        import importlib.util, marshal\n"
        "        file = os.memfd_create('lesson')\n"
        "        os.write(file, importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(CODE))\n"
        "        torchrun([*flags, f'/proc/{os.getpid()}/fd/{file}'])\n",
    ),
]
IN_TIME = ("PATIENCE = 4 ", "PATIENCE = 50 ")  # where nothing is wrong, however busy the machine is
NAMED = ": errors that name it"
LINES = {
    "a hello that adds nothing up": (
        "    dist.all_reduce(heard)",
        "    dist.barrier()",
        {
            "c10d: ranks that hear 1 + 2 + ... + n",
            "static: ranks that hear 1 + 2 + ... + n",
        },
    ),
    "each rank's address on the way to itself": (
        'place["address"] = address_towards(os.environ["MASTER_ADDR"])',
        'place["address"] = address_towards("127.0.0.1")',
        {
            "c10d: addresses at which the ranks live",
            "static: addresses at which the ranks live",
        },
    ),
    "the whole batch for every rank": (  # Try
        "    return batch[rank::n]\n",
        "    return batch\n",
        {
            "weights: one node's less those of one process",
            "weights: two nodes' less this node's",  # of four ranks and of two, as it is played
            "weights: two nodes' less those of one process",
        },
    ),
    "a step that leaves its all-reduce out": (
        '"whole": nullcontext}',
        '"whole": model.no_sync}',
        {"data parallel: S over the cable, both ways"},
    ),
    "a layer whose dx is not added up": (
        "        dist.all_reduce(x_TD.grad, group=group)\n",
        "",
        {"tensor parallel: relative error", "tensor parallel: bytes over the cable / payload"},
    ),
    # Seven launches without their mistakes:
    "a port that is free": (
        '    taken = socket.create_server(("10.0.0.1", 29502))\n',
        "    taken = socket.socket()\n",
        {"port taken" + NAMED},
    ),
    "both nodes there": (
        "by_flags(0, 29503), None)",
        "by_flags(0, 29503), by_flags(1, 29503))",
        {"node missing" + NAMED},
    ),
    "nobody who waits for a node": (
        '        f"--rdzv-conf=is_host=1,join_timeout={PATIENCE}",\n    ]\n',
        '        f"--rdzv-conf=is_host=1,join_timeout={PATIENCE}",\n    ]\n    return\n',
        {"node missing, c10d form" + NAMED},
    ),
    "two nodes with two numbers": (
        "by_flags(0, 29504), by_flags(0, 29504)",
        "by_flags(0, 29504), by_flags(1, 29504)",
        {"two nodes with one number" + NAMED},
    ),
    "equal WORLD_SIZE": (
        "partial(join_by_hand, 1, 3, 29505)",
        "partial(join_by_hand, 1, 2, 29505)",
        {"unequal WORLD_SIZE" + NAMED},
    ),
    "the interface between the nodes, whatever is asked": (
        '"GLOO_SOCKET_IFNAME": network,',
        '"GLOO_SOCKET_IFNAME": "slow",',
        {"wrong interface" + NAMED},
    ),
    "equal collectives": (
        "        dist.broadcast(x, src=0)\n",
        "        dist.all_reduce(x)\n",
        {"different collectives" + NAMED},
    ),
}
CLOCK_LINES = {
    "a cable without a limit": (
        [
            (
                '        command(f"tc qdisc add dev slow root tbf'
                ' rate {mbit}mbit burst 5kb latency 100ms")\n',
                "",
            ),
            (
                '        command(f"tc qdisc change dev slow root tbf'
                ' rate {mbit}mbit burst 5kb latency 100ms")\n',
                "        pass\n",
            ),
            ("H = 4 * D\n", "H = 64 * D\n"),  # so much to compute that two ranks gain by it
        ],
        {
            "40 Mbit/s: the link's share of a step",
            "20 Mbit/s: the link's share of a step",
            "5 Mbit/s: the link's share of a step",
            "across: seconds / (half of alone + the link's)",
            "across the link / one rank alone",
        },
    ),
    "different collectives after a while": (
        "    x = torch.ones(4)\n    if rank",
        "    x = torch.ones(4)\n    time.sleep(PATIENCE)\n    if rank",
        {"mistakes noticed before any timeout"},
    ),
}
BREAKS = [
    Breaks(LINES, changes=[*RUN_AS_BROKEN, IN_TIME], most=len(LINES), deadline=250),
    Breaks(CLOCK_LINES, ranks=1, changes=RUN_AS_BROKEN, deadline=250, clock=True),
]


# Who may make nodes, and real ones

NONE = [
    ("if libc.unshare(CLONE_NEWNET) != 0:", "if True:"),
    ("if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:", "if True:"),
]


def speeds_at_both_ends() -> list[str]:
    """What tc tells of both ends of the cable, after its speed was changed by the nodes' ranks."""
    lesson = load(LESSON)
    os.environ["LOCAL_RANK"] = "0"
    told = []
    for node, network in enumerate(lesson.two_nodes(400)):
        lesson.enter(network)
        lesson.RANK = 2 * node
        lesson.change_speed(20)
        show = ["tc", "qdisc", "show", "dev", "slow"]
        told.append(subprocess.run(show, capture_output=True, text=True, check=True).stdout)
    return told


@pytest.mark.deep
def test_both_ends_of_the_cable_become_slow() -> None:
    (told,) = run(speeds_at_both_ends, 1)
    assert ["rate 20Mbit" in line for line in told] == [True, True], told


@pytest.mark.deep
def test_without_nodes_it_is_blocked_and_says_why() -> None:
    played = play(LESSON, 2, *NONE)
    played.expect(set())
    assert "unshare: " in played.output
    needs = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert needs[0] == "root or user namespaces"


@pytest.mark.deep
def test_in_a_user_namespace_ranks_change_the_speed_of_the_cable_too(tmp_path: Path) -> None:
    """As for a user who is not root: only, who is root can read torch wherever it is installed."""
    outside = 'open("/proc/self/uid_map").read().split()[2] != "1"'
    change = (NONE[0][0], f"if {outside} or libc.unshare(CLONE_NEWNET) != 0:")
    played = run_alone(tmp_path, change)
    played.expect(set())
    assert len([row for row in played.ledger if row.get("timed") is False]) == 17


def on_two_nodes(script: Path) -> tuple[list[int], list[str], list[dict]]:
    """Run it as torchrun on two real nodes would, a rank in each."""
    lesson = load(LESSON)
    ledger = script.with_suffix(".json")
    ranks = []
    for rank, network in enumerate(lesson.two_nodes(400)):
        lesson.enter(network)
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        place |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 29500, "LESSON_JSON": ledger}
        env = os.environ | {name: str(value) for name, value in place.items()}
        for name in ("GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
            env.pop(name, "")
        ranks.append(subprocess.Popen([sys.executable, script], env=env, stderr=subprocess.PIPE))
    errors = [rank.communicate(timeout=150)[1].decode() for rank in ranks]
    rows = json.loads(ledger.read_text())["ledger"] if ledger.exists() else []
    return [rank.returncode for rank in ranks], errors, rows


@pytest.mark.deep
def test_on_real_nodes_the_same_file_trains_and_measures(tmp_path: Path) -> None:
    script = tmp_path / "lesson.py"
    script.write_text(changed(LESSON))
    ((codes, errors, rows),) = run(on_two_nodes, 1, script, deadline=170, group=False)
    assert codes == [0, 0], errors
    assert [(row["claim"], row["verdict"]) for row in rows] == [
        ("real nodes: ranks that hear 1 + 2 + ... + n", "PASS"),
        ("real nodes: addresses at which the ranks live", "PASS"),
        ("weights: all nodes' less those of one process", "PASS"),
        ("tensor parallel: relative error", "PASS"),
    ]


@pytest.mark.deep
def test_real_nodes_with_gpus_wait_for_them_and_pair_their_calls() -> None:
    """On pretended GPUs, two of which are called a node."""
    local = '    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE))\n'
    halved = '    os.environ["LOCAL_WORLD_SIZE"] = str(WORLD_SIZE // 2)\n' + local
    smaller = [(" 2**20 ", " WIDTH "), ("(16 * rows, 16 * columns)", "(rows, columns)")]
    played = play_on_gpus(LESSON, 4, (local, halved), *smaller)
    played.expect({"real nodes: addresses at which the ranks live"})  # it is one machine
    assert "4 ranks, NCCL" in played.output
    assert len(played.ledger) == 4


@pytest.mark.deep
def test_nodes_of_unequal_size_are_refused() -> None:
    env = os.environ | ALONE | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}
    ran = subprocess.run([sys.executable, ROOT / LESSON], env=env, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "needs as many ranks in every node, got 3 ranks, 2 of them here" in ran.stderr


# Nothing is left


def wait_for_ranks(lesson: subprocess.Popen, path: Path) -> None:
    """Return once four ranks in two other networks have joined their group, and so have threads."""
    stop = time.monotonic() + 200
    inside = []
    while len(inside) < 4:
        assert time.monotonic() < stop, inside
        time.sleep(0.1)
        inside = []
        for process in psutil.Process(lesson.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                ours = str(path) in process.cmdline() and process.num_threads() > 1
                if ours and networks([process.pid]):
                    inside.append(process.pid)


@pytest.mark.deep
@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL"])
def test_a_signal_to_the_launcher_leaves_nothing(end: str, tmp_path: Path) -> None:
    was = machine()
    path = tmp_path / "lesson.py"
    path.write_text(changed(LESSON, ("SPEEDS = [40.0,", "SPEEDS = [0.5,")))  # for half a minute
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"
    lesson = subprocess.Popen(
        [sys.executable, *torchrun, path], env=MARKED, stdout=subprocess.DEVNULL, process_group=0
    )
    wait_for_ranks(lesson, path)
    lesson.send_signal(getattr(signal, end))
    assert lesson.wait(150) != 0
    assert gone()
    assert machine() == was


# Values that no row shows


def test_a_training_is_plain_sgd_on_the_mean_over_each_batch() -> None:
    """By torch.func and arithmetic of our own, which keep no gradient from step to step."""
    lesson = load(LESSON)
    random = torch.Generator().manual_seed(1)
    images = torch.rand(15 * 96, 64, generator=random)
    labels = torch.randint(10, (15 * 96,), generator=random)
    model = lesson.build_model(CPU, width=8)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def loss(weights: dict, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, weights, image)
        return torch.nn.functional.cross_entropy(logits, label)

    for image, label in zip(images.split(96), labels.split(96), strict=True):
        gradients = torch.func.grad(loss)(weights, image, label)
        weights = {name: weights[name] - 0.1 * gradients[name] for name in weights}
    expected = torch.cat([weight.flatten() for weight in weights.values()])
    trained = lesson.train(model, [images, labels], 0, 1, CPU)
    assert (trained - expected).abs().max() < 1e-6


def test_digits_are_pixels_from_0_to_1_each_with_its_label() -> None:
    images, labels = load(LESSON).read_digits()
    assert (images.min(), images.max()) == (0, 1)
    assert (images.dtype, images.shape, labels.shape) == (torch.float32, (1797, 64), (1797,))
    assert labels[:12].tolist() == [*range(10), 0, 1]


@pytest.mark.parametrize(
    ("rank", "node", "local_rank"), [(0, 0, 0), (3, 0, 3), (4, 1, 0), (6, 1, 2), (11, 2, 3)]
)
def test_ranks_are_numbered_node_by_node(rank, node, local_rank, monkeypatch) -> None:
    lesson = load(LESSON)
    lesson.RANK = rank
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(lesson.dist, "all_reduce", lambda heard: heard.add_(66 - rank))
    lesson.gather_objects = lambda place: [place]
    place = {"rank": rank, "node": node, "local rank": local_rank, "address": "127.0.0.1"}
    assert lesson.hello(CPU) == [place | {"heard": 67}]


def test_the_error_of_a_tensor_is_its_largest_in_either_direction() -> None:
    lesson = load(LESSON)
    ours, expected = torch.tensor([1.0, -2.0]), torch.tensor([1.5, -8.0])
    assert lesson.largest_error(ours, expected) == lesson.largest_error(expected, ours) == 6
    assert lesson.relative_error(ours, expected) == 6 / 8


def test_weights_come_back_from_the_nodes_as_they_were() -> None:
    weights = torch.randn(5)
    seen = {"weights": weights.numpy().tobytes().hex()}
    assert torch.equal(load(LESSON).weights_of(seen), weights)


def test_a_cable_s_end_counts_what_came_in_and_what_went_out() -> None:
    table = "Inter-| Receive | Transmit\n    lo: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0\n"
    table += "  slow: 1000 3 0 0 0 0 0 0 70 2 0 0 0 0 0 0\n"
    lesson = load(LESSON)
    lesson.open = lambda path: io.StringIO(table)
    assert lesson.bytes_on_the_cable() == 1070
    lesson.open = lambda path: io.StringIO(table.replace("slow", "eth0"))
    assert lesson.bytes_on_the_cable() == 0


def test_the_fastest_of_three_runs_counts_on_the_slowest_rank_and_not_the_first(
    monkeypatch,
) -> None:
    """By a clock that only the work puts forward; the first run warms up, however short it is."""
    lesson = load(LESSON)
    now, cable = [0.0], [0]
    takes = iter([0.5, 4.0, 2.0, 3.0])
    carries = iter([10, 900, 800, 850])

    def work() -> None:
        now[0] += next(takes)
        cable[0] += next(carries)

    monkeypatch.setattr(lesson.dist, "barrier", lambda: None)
    lesson.time = SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda seconds: None)
    lesson.bytes_on_the_cable = lambda: cable[0]
    others = [1.5]
    lesson.gather_objects = lambda seconds: [seconds, *others]
    assert lesson.fastest(work, CPU) == (2.0, 800)
    others[0] = 7.0
    assert lesson.fastest(None, CPU) == (7.0, 0)


def test_a_step_computes_before_its_backward_pass_and_only_one_of_two_averages(
    monkeypatch,
) -> None:
    lesson = load(LESSON)
    done = []

    class Model(torch.nn.Linear):
        """Notes whether it would average its gradients."""

        averages = True

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            self.averages = False
            yield
            self.averages = True

    model = Model(64, 10)
    model.weight.register_hook(lambda _: done.append(model.averages))
    lesson.DistributedDataParallel = lambda built: model
    lesson.time = SimpleNamespace(sleep=done.append)

    def fastest(work, device: torch.device) -> tuple[int, int]:
        work()
        return len(done), 100 * len(done)

    lesson.fastest = fastest
    row = lesson.time_steps(CPU, 20.0, compute=0.1)
    assert done == [0.1, False, 0.1, True]
    assert row == {"mbit": 20.0, "width": 512, "alone": 2, "whole": 4, "bytes": 400}


@pytest.mark.parametrize(("local_ranks", "across"), [(1, [0, 1]), (2, [0, 2]), (8, [0, 8])])
def test_layers_are_split_within_a_node_and_across_two(local_ranks, across, monkeypatch) -> None:
    lesson = load(LESSON)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    lesson.time_layer = lambda device, ranks: ranks
    expected = {"one rank alone": [0], "two ranks across the link": across}
    if local_ranks > 1:
        expected["two ranks of one node"] = [0, 1]
    assert lesson.time_layers(CPU) == expected


@pytest.mark.parametrize(
    ("halved", "payload", "verdicts"),
    [
        (2, 524_288, ["PASS"] * 4),
        (2, 262_144, ["PASS", "FAIL", "FAIL", "PASS"]),  # only one of the two all-reduces
        (1, 524_288, ["PASS", "PASS", "FAIL", "PASS"]),  # each rank computes the whole layer
    ],
)
def test_across_the_link_a_layer_takes_half_its_compute_and_the_link(
    halved: int, payload: int, verdicts: list[str]
) -> None:
    """524,288 bytes: 256 rows of 256 numbers, forward and backward, in float32."""
    lesson = load(LESSON)
    packets = payload * 1514 / 1448
    alone = {"seconds": 0.2, "bytes": 0, "error": 0}
    across = {"seconds": 0.2 / halved + packets * 8 / 20e6, "bytes": 2.02 * packets, "error": 0}
    layer = {"one rank alone": alone, "two ranks across the link": across}
    lesson.check_tensor_parallel(layer, 20)
    assert [row["verdict"] for row in lesson.ledger] == verdicts


@pytest.mark.parametrize(("places", "verdict"), [(4, "FAIL"), (2, "PASS")])
def test_as_many_ranks_on_two_nodes_must_end_with_the_same_bits(places: int, verdict: str) -> None:
    """Another number of ranks adds up in another order, and may round otherwise."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    others = ("check_hello", "check_bytes", "check_share", "check_tensor_parallel", "print_places")
    for name in others:
        setattr(lesson, name, lambda *_, **__: None)
    weights = torch.ones(3)
    seen = {"places": [{}] * places, "weights": (weights + 1e-6).numpy().tobytes().hex()}
    seen |= {"off": 0.0, "steps": [{"bytes": 0}] * 3, "layer": {}}
    lesson.check_across(seen, weights, on_cpu=True)
    assert lesson.ledger[0]["verdict"] == verdict


def test_a_mistake_is_noticed_at_once_if_its_words_come_before_the_timeout() -> None:
    lesson = load(LESSON)
    words = {"port taken": "EADDRINUSE", "node missing": "1/2 clients joined"}
    words |= {"node missing, c10d form": "RendezvousTimeoutError: "}
    words |= {"two nodes with one number": "wait for role_info", "unequal WORLD_SIZE": "no error"}
    words |= {"wrong interface": "Connection refused, remote=[127.0.0.1]:4242"}
    words |= {"different collectives": "Detected mismatch between collectives on ranks"}
    caught = {name: (4.5, message) for name, message in words.items()}
    caught["port taken"] = (0.1, words["port taken"])
    caught["unequal WORLD_SIZE"] = (0.1, "no error at all")
    caught["wrong interface"] = (3.9, words["wrong interface"])
    lesson.check_mistakes(caught)
    named = {row["claim"]: row["measured"] for row in lesson.ledger}
    at_once = named.pop("mistakes noticed before any timeout")
    assert named == {f"{name}{NAMED}": int(name != "unequal WORLD_SIZE") for name in words}
    assert at_once == 2
