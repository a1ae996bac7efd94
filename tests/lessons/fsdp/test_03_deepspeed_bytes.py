"""The lesson on DeepSpeed's bytes: real layouts, and each claim FAILs when its line breaks."""

import gc
import re
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="wants DeepSpeed")
LESSON = "fsdp/03_deepspeed_bytes.py"


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_shares_cover_everything_once(n: int) -> None:
    """Over all ranks, stages 1 to 3 hold 12 bytes of float32 a parameter and little padding."""
    lesson = load(LESSON)
    sizes = [p.numel() for p in lesson.GPT().parameters()]
    P = sum(sizes)
    for stage, padding in (1, 2 * n), (2, 2 * n), (3, 52 * n):
        total = 0
        for rank in range(n):
            lesson.RANK, lesson.WORLD_SIZE = rank, n
            total += lesson.expected_bytes(stage, sizes)[0]
        assert 12 * P <= total < 12 * (P + padding)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_every_tensor_lies_in_some_share(n: int) -> None:
    lesson = load(LESSON)
    sizes = [5, 1, 40, 2, 7]
    kept = 0
    for rank in range(n):
        lesson.RANK, lesson.WORLD_SIZE = rank, n
        kept += lesson.elements_on_my_share(sizes)
    assert kept >= sum(sizes)
    if n == 1:
        assert kept == sum(sizes)


def held_by_fsdp2() -> tuple[int, int]:
    """Bytes of float32 and of all that FSDP2 holds between backward and step, in bfloat16."""
    lesson = load(LESSON)
    lesson.RANK, lesson.WORLD_SIZE = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (lesson.WORLD_SIZE,))
    gc.collect()
    gc.freeze()
    model = lesson.GPT()
    for module in *model.blocks, model:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        lesson.mean_loss(model, lesson.random_bytes(torch.device("cpu"))).backward()
    held = lesson.smallest_census()
    return held["cpu", torch.float32], held.total()


@pytest.mark.parametrize("n", [2, 4])  # rows divide by n: no padding
def test_fsdp2_holds_16_bytes_a_parameter_over_n_all_in_float32(n: int) -> None:
    P = sum(p.numel() for p in load(LESSON).GPT().parameters())
    assert run(held_by_fsdp2, n) == [(16 * P // n, 16 * P // n)] * n


def counts() -> dict[str, int]:
    lesson, n = load(LESSON), dist.get_world_size()
    x = torch.ones(4 * n)
    with lesson.CountedCommunication() as counted:
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(1))
        dist.reduce(x, 0)
        dist.all_gather_into_tensor(torch.empty(len(x) * n), x)
        dist.reduce_scatter_tensor(torch.empty(4), x)
    operations = ("all_reduce", "reduce", "all_gather", "reduce_scatter")
    return {name: lesson.large_elements(counted, name) for name in operations}


def test_whole_tensors_are_counted_and_scalars_are_not() -> None:
    expected = {"all_reduce": 8, "reduce": 8, "all_gather": 16, "reduce_scatter": 8}
    assert run(counts, 2) == [expected] * 2


def test_in_a_ring_an_all_reduce_counts_twice_and_a_reduce_scatter_once() -> None:
    """The third column of section 2's table, for two micro-batches; it is printed, not claimed."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    P = sum(p.numel() for p in lesson.GPT().parameters())
    said = []
    lesson.print0, lesson.claim = said.append, lambda *_, **__: None
    counted = {0: (P, 0), 1: (P, P), 2: (2 * P, P), 3: (2 * P, 4 * P)}  # reduced, gathered
    steps = {stage: SimpleNamespace(reduced=r, gathered=g) for stage, (r, g) in counted.items()}
    lesson.check_elements(steps)
    assert [re.search(r"in a ring (.+) P", line)[1] for line in said] == [
        "2.00",
        "3.00",
        "5.00",
        "6.00",
    ]


DTYPES = ("float32", "bfloat16")
STEPS = "zero_config(stage)) for stage"
BROKEN_LAYOUTS = {  # each a set of breaks that meet different claims
    "stage 1 shards nothing; small tensors stay whole (Try); not to owners (Try); no offload": (
        [
            (STEPS, "zero_config(stage * (stage != 1))) for stage"),
            (
                '"stage3_param_persistence_threshold": 0,',
                '"stage3_param_persistence_threshold": 10**5,',
            ),
            (
                "(2, use_multi_rank_bucket_allreduce=False)",
                "(2, use_multi_rank_bucket_allreduce=True)",
            ),
            (', offload_optimizer={"device": "cpu"}', ""),
        ],
        {
            "stage 1: bytes in float32",
            "stage 1: elements gathered",
            "stage 3: bytes in bfloat16",
            "stage 3: elements gathered",
            "stage 2, to owners only: reduced, ring",
            "stage 3, kept for backward: elements gathered",
            "stage 3, gradients in float32: bytes",
            "offload: bytes in float32, host",
        },
    ),
    "stages 0 and 1 run as 2, and 2 as 0; stage 3 keeps parameters; frees what it should keep": (
        [
            (STEPS, "zero_config((2, 2, 0, 3)[stage])) for stage"),
            ('"stage3_max_live_parameters": 0,', '"stage3_max_live_parameters": 10**9,'),
            ('"stage3_max_reuse_distance": 0,', '"stage3_max_reuse_distance": 10**9,'),
            ("zero_config(3, **keep)", "zero_config(3, **dict.fromkeys(keep, 0))"),
            ('"grad_accum_dtype": "fp32"', '"grad_accum_dtype": "bf16"'),
        ],
        {
            "stage 0: bytes in float32",
            "stage 0: bytes in bfloat16",
            "stage 0: elements reduced",
            "stage 1: bytes in bfloat16",
            "stage 1: elements reduced",
            "stage 2: bytes in float32",
            "stage 2: bytes in bfloat16",
            "stage 2: elements reduced",
            "stage 2: elements gathered",
            "stage 3: elements gathered",
            "stage 3, kept for backward: elements gathered",
            "stage 3, gradients in float32: bytes",
        },
    ),
    "FSDP2 shards bfloat16 weights; stage 3's small tensors are sharded though told not to": (
        [
            ("    model = GPT().to(device)\n", "    model = GPT().to(device, torch.bfloat16)\n"),
            (
                '{"stage3_param_persistence_threshold": 10**5, "reduce',
                '{"stage3_param_persistence_threshold": 0, "reduce',
            ),
        ],
        {
            "FSDP2: bytes in float32",
            "FSDP2: bytes in bfloat16",
            "stage 3, small tensors whole: bytes in bfloat16",
        },
    ),
    "nothing is computed in bfloat16": (
        ('"bf16": {"enabled": True}', '"bf16": {"enabled": False}'),
        {f"stage {stage}: bytes in {dtype}" for stage in range(4) for dtype in DTYPES}
        | {
            "stage 3, small tensors whole: bytes in bfloat16",
            "stage 3, gradients in float32: bytes",
            "offload: bytes in float32, host",
        },
    ),
    "a step has a third micro-batch": (
        ('"gradient_accumulation_steps": 2', '"gradient_accumulation_steps": 3'),
        {
            "stage 2: elements reduced",
            "stage 3: elements reduced",
            "stage 3: elements gathered",
            "stage 2, to owners only: reduced, ring",
            "stage 3, kept for backward: elements gathered",
        },
    ),
}


BREAKS = Breaks(BROKEN_LAYOUTS)
ON_GPUS = OnGpus(  # DeepSpeed asks the driver for its accelerator
    [("deepspeed = import_deepspeed(device)", "deepspeed = None")]
)
NOT_THERE = ("        import deepspeed\n", "        raise ImportError\n")
WITHOUT = {"deepspeed": Without([NOT_THERE], {"stages 0 to 3"})}


@pytest.mark.parametrize(
    ("sizes", "share", "kept"),
    [
        ([5, 1, 40, 2, 7], 28, [46, 49]),  # the third lies on both
        ([4, 4, 4, 4], 8, [8, 8]),  # the edge of a share is one between tensors
        ([3, 3, 4], 6, [6, 4]),  # shares are even, so the last one is shorter
        ([16, 2], 10, [16, 18]),
    ],
)
def test_two_ranks_keep_the_tensors_that_reach_into_their_shares(
    sizes: list[int], share: int, kept: list[int]
) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    assert lesson.flat_share(sum(sizes)) == share
    for lesson.RANK in (0, 1):
        assert lesson.elements_on_my_share(sizes) == kept[lesson.RANK]


def test_bytes_per_parameter_are_told_of_all_that_is_held() -> None:
    lesson = load(LESSON)
    said = []
    lesson.print0, lesson.claim = said.append, Mock()
    P = sum(p.numel() for p in lesson.GPT().parameters())
    held = Counter({("cpu", torch.float32): 12 * P, ("cpu", torch.bfloat16): 4 * P})
    lesson.check_bytes({0: SimpleNamespace(held=held)}, torch.device("cpu"))
    assert said[0].split() == ["#" * 32, "16.00", "bytes", "per", "parameter"]
