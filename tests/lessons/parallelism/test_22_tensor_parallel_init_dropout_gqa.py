"""Parts and copies against one process, on heads and ranks of many numbers; broken lines."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/22_tensor_parallel_init_dropout_gqa.py"
lesson = Lazily(LESSON)
CLOSE = 1e-12  # relative, float64, sums of some hundred terms


@given(st.integers(1, 12), st.integers(1, 8))
def test_each_query_head_has_its_key_value_head(key_value_heads: int, group: int) -> None:
    query_heads = key_value_heads * group
    for n in lesson.sizes_for(query_heads, key_value_heads):
        for rank in range(n):
            mine = range(rank * query_heads // n, (rank + 1) * query_heads // n)
            needed = {head // group for head in mine}
            assert {*lesson.key_value_heads(rank, n, key_value_heads)} == needed


def test_sizes_of_published_models() -> None:
    assert lesson.sizes_for(32, 8) == [1, 2, 4, 8, 16, 32]  # Llama 3 8B
    assert lesson.sizes_for(28, 4) == [1, 2, 4, 28]  # Qwen2 7B
    assert lesson.sizes_for(6, 4) == [1, 2]


def test_the_attention_of_grouped_heads_is_softmax_s() -> None:
    torch.manual_seed(0)
    q_TBd, kv_TBc = torch.randn(5, 2, 6 * 2).double(), torch.randn(5, 2, 3 * 4).double()
    found = lesson.attention(q_TBd, kv_TBc).unflatten(-1, (6, 2))
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for head in range(6):
        q = q_TBd[:, 0].unflatten(-1, (6, 2))[:, head]
        k, v = kv_TBc[:, 0].unflatten(-1, (3, 2, 2))[:, head // 2].unbind(1)
        weights = (q @ k.T / 2**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(found[:, 0, head], weights @ v, rtol=CLOSE, atol=CLOSE)


def measured_of_a_block(key_value_heads: int) -> dict[str, float]:
    """What `check_block` measures with so many key-value heads."""
    changed = load(LESSON, ("G = max(1, WORLD_SIZE // 2)", f"G = {key_value_heads}"))
    n = dist.get_world_size()
    found = {}
    changed.claim = lambda text, predicted, measured, **_: found.update({text: measured})
    shape = min(n, key_value_heads), max(1, n // key_value_heads)
    copies = dist.init_device_mesh("cpu", shape).get_group(1)
    torch.manual_seed(key_value_heads)
    changed.check_block(changed.WholeBlock(dtype=torch.float64), copies, torch.device("cpu"))
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_block_equals_one_process_shared_or_copied_heads(n: int) -> None:
    for heads in lesson.sizes_for(12, n):  # fewer than ranks, as many, and more
        for found in run(measured_of_a_block, n, heads):
            assert found.pop(OUTPUT) < CLOSE
            assert found.pop(GRADIENTS) < CLOSE
            assert found == {NORMS: 0, COPIES: 0}


def masks_put_together(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The masks of all ranks along `dim`, and the mask of one process."""
    changed = load(LESSON)
    torch.manual_seed(5)
    mine = changed.dropout_of_whole(torch.ones(4, 3, 2), dim)
    shape = [4, 3, 2]
    shape[dim] *= dist.get_world_size()
    torch.manual_seed(5)
    return torch.cat(changed.gathered(mine), dim), F.dropout(torch.ones(shape), changed.P)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_masks_are_those_of_one_process(dim: int) -> None:
    for found, due in run(masks_put_together, 3, dim):
        assert torch.equal(found, due)


def end_of_main() -> tuple[str, bool]:
    changed = load(LESSON)
    changed.sys.argv = [LESSON]
    changed.time.sleep = lambda seconds: None
    with pytest.raises(SystemExit) as end:
        changed.main()
    return str(end.value), dist.is_initialized()


def test_five_ranks_are_refused_before_any_collective() -> None:
    for text, initialized in run(end_of_main, 5, group=False):
        assert "share 48 heads evenly; got 5; set --nproc-per-node to 1, 2" in text
        assert not initialized


OUTPUT, GRADIENTS = "error of the output, with dropout", "error of the gradients"
NORMS = "norms: gradients that differ between ranks"
COPIES = "key-value copies: gradients that differ"
WHOLE, ALONE = (f"drawn {how}: different hidden features" for how in ("whole", "alone"))
COLUMNS, ROWS = (f"drawn alone: std of {which} / whole's" for which in ("columns", "rows"))
OWN, SAME = (f"split, {how}: places alike" for how in ("own generator", "all seeded alike"))
TWO, MINE = "two generators: outputs alike", "copied, own generator: outputs alike"
FITTING = "sizes for 28 query and 4 key-value heads"
HELD = "key-value weights held / (whole / n)"
LEFT = "copies left alone: gradients that differ"
MEAN = "copies averaged: gradient / whole's"
DTENSOR = "DTensor, all seeded alike: places alike"
ONE_PROCESS = {OUTPUT, GRADIENTS, MEAN}

SUMMED = "    dist.all_reduce(gradient, group=copies)\n"
STEPPED = '    step(part, device)\n    claim("copies left'
RETURNED = "    return up_eD.detach(), down_De.detach()"
LINES = {
    "copies are left alone (Try)": ((SUMMED, "    pass\n"), {GRADIENTS, COPIES}),
    "copies are averaged": (
        (SUMMED, f"{SUMMED}    gradient /= dist.get_world_size(copies)\n"),
        {GRADIENTS},
    ),
    "one mask for the features of all ranks (Try)": (
        ("F.linear(h_TBD, self.up)), 2)", "F.linear(h_TBD, self.up)), None)"),
        ONE_PROCESS,
    ),
    "each rank draws another whole": (
        ("torch.manual_seed(0)  # the same weights on every rank", "torch.manual_seed(RANK)"),
        ONE_PROCESS,
    ),
    "all ranks keep the first part": (
        ("tensor_split(WORLD_SIZE, dim)[RANK].clone()", "tensor_split(WORLD_SIZE, dim)[0].clone()"),
        ONE_PROCESS | {WHOLE, LEFT},
    ),
    "f does not sum": (
        ("return all_reduce(grad, ctx.group), None", "return grad, None"),
        {GRADIENTS, NORMS, MEAN},
    ),
    "a rank has the wrong key-value head": (
        ("    first = rank * heads // ranks\n", "    first = rank % heads\n"),
        ONE_PROCESS,
    ),
    "a rank keeps all key-value heads": (
        ("by_head[heads.start : heads.stop].flatten(0, 1)", "by_head.flatten(0, 1)"),
        ONE_PROCESS | {HELD, LEFT},
    ),
    "ranks that draw alone have seeds of their own": (
        ("    torch.manual_seed(0)\n    e = E", "    torch.manual_seed(RANK)\n    e = E"),
        {ALONE},
    ),
    "rows know the fan_in of the whole": (
        (RETURNED, f"{RETURNED} / WORLD_SIZE**0.5"),
        {ROWS},
    ),
    "columns are drawn twice as wide": (
        (RETURNED, RETURNED.replace("return ", "return 2 * ")),
        {COLUMNS},
    ),
    "the generators change places": (
        (
            "self.copied if dim is None else self.split",
            "self.split if dim is None else self.copied",
        ),
        {OWN, TWO},
    ),
    "generators of split masks are seeded alike": (
        (
            "right = TwoGenerators(device, copied=3, split=2718 + RANK)",
            "right = TwoGenerators(device, copied=3, split=2718)",
        ),
        {OWN},
    ),
    "and are not where they should be": (
        (
            "same = TwoGenerators(device, copied=3, split=2718)",
            "same = TwoGenerators(device, copied=3, split=2718 + RANK)",
        ),
        {SAME},
    ),
    "copied masks are drawn alike where they should not be": (
        ("TwoGenerators(device, copied=3 + RANK,", "TwoGenerators(device, copied=3,"),
        {MINE},
    ),
    "no copies": (
        ("key_value_heads % n == 0 or n % key_value_heads == 0", "key_value_heads % n == 0"),
        {FITTING},
    ),
    "copies are summed where they should be left alone": (
        (STEPPED, STEPPED.replace("    claim", "    sum_copies(part.kv.grad, copies)\n    claim")),
        {LEFT, MEAN},
    ),
    "the mean is a sum": ((" / dist.get_world_size(copies)\n", "\n"), {MEAN}),
    "DTensor's ranks have seeds of their own": (
        ("    torch.manual_seed(0)\n    with", "    torch.manual_seed(RANK)\n    with"),
        {DTENSOR},
    ),
}
BREAKS = Breaks(LINES, ranks=4)
ON_GPUS = OnGpus(changes=[("    check_dtensor(device)\n    finish()", "    finish()")])  # Philox
