"""The files to copy: hello on all ranks; DDP against one process, with its lines broken too."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from course.lessons import ROOT
from course.ranks import attempt, run
from tests.helpers.leftovers import MARKED, gone, machine
from tests.helpers.namespaces import needs_namespaces
from tests.helpers.warm_launch import run_warm

HELLO = ROOT / "launch/distributed_hello.py"
MINIMAL = ROOT / "launch/ddp_minimal.py"
SURVIVING = ROOT / "launch/ddp_surviving.py"
SOME_SLOW = [pytest.param(1, marks=pytest.mark.deep), 2, pytest.param(3, marks=pytest.mark.deep)]


def torchrun(path: Path, ranks: int, folder: Path) -> list[str]:
    argv = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(path)]
    ran = run_warm(argv, folder, MARKED, 200)
    assert ran.returncode == 0, ran.stderr
    return sorted(ran.stdout.splitlines())


@pytest.mark.parametrize("ranks", SOME_SLOW)
def test_every_rank_says_hello_and_hears_all(ranks: int, tmp_path: Path) -> None:
    said = torchrun(HELLO, ranks, tmp_path)
    total = sum(range(ranks + 1))
    for rank, line in enumerate(said):
        assert re.fullmatch(
            rf"rank {rank} of {ranks} on \S+, cpu, gloo: the ranks add up to {total}", line
        )
    assert len(said) == ranks


# A missing GPU: each rank is on a node of its own, unless `ranks_here` says otherwise


class Node(NamedTuple):
    """What a rank finds: GPUs that torch sees, whether the driver has any, the variable."""

    gpus: int
    driver: bool = True
    visible: str | None = None
    bfloat16: bool = True


def pretend(node: Node, ranks_here: int) -> None:
    """Have this process find it so, for good."""
    exists = os.path.exists
    os.path.exists = lambda path: node.driver if path == "/dev/nvidia0" else exists(path)
    torch.cuda.device_count = lambda: node.gpus
    torch.cuda.set_device = lambda device: None
    torch.cuda.is_bf16_supported = lambda emulated: node.bfloat16
    torch.cuda.get_device_name = lambda device: "Tesla T4"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if node.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = node.visible
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks_here), "LOCAL_RANK": "0"}


def start_on(script: str, nodes: list[Node], ranks_here: int, folder: str) -> None:
    os.chdir(folder)
    pretend(nodes[int(os.environ["RANK"])], ranks_here)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


HERE = socket.gethostname()
MISSING = {
    "one node has lost its GPU": ([Node(1), Node(0)], 1),
    "a node has no driver": ([Node(1), Node(0, driver=False)], 1),
    "two ranks per GPU": ([Node(1), Node(1)], 2),
    "torch cannot use the driver's GPUs": ([Node(0), Node(0)], 1),
    "one node is told to use the CPU": ([Node(1), Node(1, visible="")], 1),
}


@pytest.mark.parametrize("script", [HELLO, MINIMAL, SURVIVING], ids=lambda path: path.stem)
@pytest.mark.parametrize("what", MISSING)
def test_a_missing_gpu_is_refused_by_all_ranks_before_any_of_them_waits(
    what: str, script: Path, tmp_path: Path
) -> None:
    outcomes = attempt(start_on, 2, str(script), *MISSING[what], str(tmp_path), group=False)
    for outcome in outcomes:
        assert outcome.kind in ("raised", "exited"), f"{outcomes}"
        said = outcome.text + outcome.output
        assert re.search(r"ValueError: .*(GPU|ranks).* CUDA_VISIBLE_DEVICES= ", said), said
    assert [*tmp_path.iterdir()] == [], "it has begun"


def joined(script: str, node: Node) -> tuple:
    """What a file's `join` asks of torch where a rank has what it wants."""
    pretend(node, 1)
    asked = []
    dist.init_process_group = lambda backend, **how: asked.append((backend, how.get("device_id")))
    join = runpy.run_path(script, run_name="imported")["join"]
    flags = (["float32", dist.default_pg_timeout], [])["minimal" in script]
    return str(join(*flags)), *[str(one) for one in asked[0]]


@pytest.mark.parametrize(
    ("node", "device"),
    [
        (Node(8), "cuda:0"),
        (Node(0, driver=False), "cpu"),
        (Node(8, visible="-1"), "cpu"),
        (Node(0, visible=""), "cpu"),
    ],
)
def test_a_rank_with_a_gpu_takes_it_and_one_that_wants_none_the_cpu(
    node: Node, device: str
) -> None:
    bound = "None" if device == "cpu" else device
    both = ("nccl", "cpu:gloo,cuda:nccl") if device != "cpu" else ("gloo", "gloo")
    for script, backend in zip([MINIMAL, SURVIVING], both, strict=True):
        assert run(joined, 1, str(script), node, group=False) == [(device, backend, bound)]


def test_bfloat16_that_a_gpu_emulates_is_refused_by_all_ranks(tmp_path: Path) -> None:
    nodes = [Node(1), Node(1, bfloat16=False)]
    for outcome in attempt(start_on, 2, str(SURVIVING), nodes, 1, str(tmp_path), group=False):
        assert outcome.kind == "exited"
        assert f"ValueError: Tesla T4 on {HERE} emulates bfloat16" in outcome.output
        assert "--precision float16" in outcome.output


def test_hello_and_minimal_join_alike() -> None:
    """They are two files to copy: what they have in common stands in both."""
    hello, minimal = HELLO.read_text(), MINIMAL.read_text()
    assert hello.count(minimal[minimal.index("def join(") : minimal.index("def main(")]) == 1
    start = minimal.index("    tasks_here = re.match(")
    assert hello.count(minimal[start : minimal.index("def join(")].rstrip()) == 1


class Trained(NamedTuple):
    """What one run has left."""

    counts: list[tuple[int, int]]  # test images right and seen, for each epoch
    weights: list[torch.Tensor]  # for each rank, all in one


def train(ranks: int, folder: Path, *changes: tuple[str, str]) -> Trained:
    """Run the file, changed so that every rank saves its weights, not rank 0 only."""
    source = MINIMAL.read_text()
    save = "    if rank == 0:\n        torch.save(model.module.state_dict(), "
    for old, new in [(f'{save}"ddp_minimal.pt")', f'{save[17:]}f"{{rank}}.pt")'), *changes]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (path := folder / "changed.py").write_text(source)
    counts = []
    for epoch, line in enumerate(torchrun(path, ranks, folder)):
        found = re.fullmatch(rf"epoch {epoch}: (\d+) of (\d+) test images right", line)
        counts.append((int(found[1]), int(found[2])))
    weights = []
    for rank in range(ranks):
        state = torch.load(folder / f"{rank}.pt")
        weights.append(torch.cat([weight.flatten() for weight in state.values()]))
    return Trained(counts, weights)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(1, tmp_path_factory.mktemp("alone"))


EPOCHS = 6
STEPS = EPOCHS * 1440 // 96
# Ranks add the same terms in another order: a rounding per step, for weights of size 1.
ATOL = STEPS * torch.finfo(torch.float32).eps


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_as_one_process_does(ranks: int, alone: Trained, tmp_path: Path) -> None:
    trained = train(ranks, tmp_path)
    for weights in trained.weights:
        assert torch.equal(weights, trained.weights[0])
    assert (trained.weights[0] - alone.weights[0]).abs().max() <= ATOL
    # 357 is odd: two ranks count 179 and 178. An image may change sides only if it lies between.
    assert [seen for _, seen in trained.counts] == [1797 - 1440] * EPOCHS
    for (right, _), (right_alone, _) in zip(trained.counts, alone.counts, strict=True):
        assert abs(right - right_alone) <= 1
    assert trained.counts[-1][0] >= 0.95 * 357


BREAKS = {
    "every epoch has the same order": ("        sampler.set_epoch(epoch)", "        #"),
    "no gradient is averaged": (
        "loss = nn.functional.cross_entropy(model(",
        "loss = nn.functional.cross_entropy(model.module(",
    ),
    "every rank takes a whole batch": ("BATCH // world_size", "BATCH"),
    "the learning rate is scaled": ("lr=LEARNING_RATE", "lr=world_size * LEARNING_RATE"),
}


@pytest.mark.deep
@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_line_shows_in_the_weights(what: str, alone: Trained, tmp_path: Path) -> None:
    first, second = train(2, tmp_path, BREAKS[what]).weights
    assert (first - alone.weights[0]).abs().max() > 1000 * ATOL
    assert torch.equal(first, second) == (what != "no gradient is averaged")


@pytest.mark.deep
def test_a_sampler_that_pads_would_count_a_test_image_twice(tmp_path: Path) -> None:
    old = "Subset(test, range(rank, len(test), world_size))"
    new = "Subset(test, list(DistributedSampler(test, shuffle=False)))"
    assert {seen for _, seen in train(2, tmp_path, (old, new)).counts} == {358}


def two_nodes(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    bin_folder = Path(sys.executable).parent
    env = MARKED | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    argv = ["bash", str(ROOT / "launch/two_nodes_here.sh"), *arguments]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def across_two_nodes(folder: Path, *arguments: str) -> list[str]:
    was = machine()
    ran = two_nodes(folder, *arguments)
    assert ran.returncode == 0, ran.stderr
    assert gone()
    assert machine() == was
    return sorted(ran.stdout.splitlines())


@needs_namespaces
@pytest.mark.deep
def test_one_command_says_hello_on_two_nodes(tmp_path: Path) -> None:
    said = across_two_nodes(tmp_path)
    hosts = [re.fullmatch(r"rank (\d) of 4 on (\w+), cpu, gloo: .* 10", line) for line in said]
    assert [found.groups() for found in hosts] == [
        *(("0", "node0"), ("1", "node0")),
        *(("2", "node1"), ("3", "node1")),
    ]


ABORTS = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()  # who is not met yet would be told of a closed connection instead
dist.destroy_process_group()
if rank == 1:
    os.abort()
"""


@needs_namespaces
@pytest.mark.deep
def test_a_node_that_waits_for_one_that_failed_is_ended(tmp_path: Path) -> None:
    """torchrun would wait for it for 300 s, deaf to SIGTERM."""
    (tmp_path / "aborts.py").write_text(ABORTS)
    ran = two_nodes(tmp_path, "--ranks", "1", "aborts.py")
    assert ran.returncode != 0
    assert "SIGABRT" in ran.stderr
    assert gone()


@needs_namespaces
@pytest.mark.deep
def test_two_nodes_train_as_one_process_does(alone: Trained, tmp_path: Path) -> None:
    said = across_two_nodes(tmp_path, "--ranks", "1", str(MINIMAL))
    last = alone.counts[-1][0]
    found = re.fullmatch(rf"epoch {EPOCHS - 1}: (\d+) of 357 test images right", said[-1])
    assert abs(int(found[1]) - last) <= 1
    state = torch.load(tmp_path / "ddp_minimal.pt")
    weights = torch.cat([weight.flatten() for weight in state.values()])
    assert (weights - alone.weights[0]).abs().max() <= ATOL
