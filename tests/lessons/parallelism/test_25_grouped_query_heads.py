"""Heads and their copies against one process, on heads and ranks of many numbers; broken lines."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/25_grouped_query_heads.py"
lesson = Lazily(LESSON)
CPU = torch.device("cpu")
CLOSE = 1e-12  # relative, float64, sums of some hundred terms
SHAPES = "T, B, D, H, G, K = 32, 2, 64, 48, 2, 8"


def with_heads(query_heads: int, key_value_heads: int) -> object:
    sizes = f"T, B, D, H, G, K = 7, 2, 12, {query_heads}, {key_value_heads}, 2"
    return load(LESSON, (SHAPES, sizes))


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 48))
def test_each_query_head_has_its_key_value_head(groups: int, sharing: int, n: int) -> None:
    heads = groups * sharing
    if heads % n != 0:
        return
    changed = with_heads(heads, groups)
    for rank in range(n):
        mine = range(rank * heads // n, (rank + 1) * heads // n)
        needed = {head // sharing for head in mine}
        assert {*changed.key_value_heads(rank, n)} == needed
        for head in range(groups):
            assert (rank in changed.holders(head, n)) == (head in needed)


def test_the_attention_of_grouped_heads_is_softmax_s() -> None:
    torch.manual_seed(0)
    changed = with_heads(6, 3)
    q_TBd, kv_TBc = torch.randn(5, 2, 6 * 2).double(), torch.randn(5, 2, 3 * 4).double()
    found = changed.attend(q_TBd, kv_TBc).unflatten(-1, (6, 2))
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for head in range(6):
        q = q_TBd[:, 0].unflatten(-1, (6, 2))[:, head]
        k, v = kv_TBc[:, 0].unflatten(-1, (3, 2, 2))[:, head // 2].unbind(1)
        weights = (q @ k.T / 2**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(found[:, 0, head], weights @ v, rtol=CLOSE, atol=CLOSE)


def test_a_token_sees_none_after_it() -> None:
    torch.manual_seed(0)
    changed = with_heads(6, 3)
    q_TBd, kv_TBc = torch.randn(2, 7, 2, 12).double()
    before = changed.attend(q_TBd, kv_TBc)
    q_TBd[5:] += 1
    kv_TBc[5:] += 1
    far = (changed.attend(q_TBd, kv_TBc) - before).abs()
    assert far[:5].max() < CLOSE
    assert far[5:].min() > 1e-3


def measured_of_heads(cases: list[tuple[int, int]]) -> list[dict[str, float]]:
    """What `check_step` measures with so many query and key-value heads."""
    found = []
    for heads, key_value_heads in cases:
        changed = with_heads(heads, key_value_heads)
        rows = {}
        changed.claim = lambda text, _, measured, rows=rows, **__: rows.update({text: measured})
        n = dist.get_world_size()
        holders = [changed.holders(head, n) for head in range(key_value_heads)]
        groups = [dist.new_group(ranks) for ranks in holders]
        torch.manual_seed(heads)
        whole = changed.Attention(dtype=torch.float64)
        changed.check_step(whole, changed.Part(whole), groups, CPU)
        found.append(rows)
    return found


CASES = {1: [(4, 2)], 2: [(2, 1), (4, 2), (8, 4)], 3: [(3, 1), (6, 3), (12, 6), (12, 2)]}
CASES[4] = [(4, 1), (8, 2), (8, 4), (8, 8)]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_attention_equals_one_process_shared_or_copied_heads(n: int) -> None:
    for found in run(measured_of_heads, n, CASES[n]):
        for rows in found:
            assert rows[OUTPUT] < CLOSE
            assert rows[GRADIENTS] < CLOSE
            assert float(rows[X]) == pytest.approx(1, abs=CLOSE)
            assert rows[AFTER] == rows[NORM] == 0


@pytest.mark.deep
def test_eight_ranks_share_two_heads() -> None:
    for found in run(measured_of_heads, 8, [(8, 2), (24, 2), (16, 8)]):
        assert max(rows[GRADIENTS] for rows in found) < CLOSE
        assert [rows[NEEDED] for rows in found] == [4, 4, 1]


def end_of_main() -> tuple[str, bool]:
    changed = load(LESSON)
    changed.sys.argv = [LESSON]
    changed.time.sleep = lambda seconds: None
    with pytest.raises(SystemExit) as end:
        changed.main()
    return str(end.value), dist.is_initialized()


def test_five_ranks_are_refused_before_any_collective() -> None:
    for text, initialized in run(end_of_main, 5, group=False):
        assert "share 48 query heads evenly; got 5; set --nproc-per-node to 1, 2" in text
        assert not initialized


HELD = "keys and values held / all"
OUTPUT, GRADIENTS = "error of the output", "error of the weights' gradients"
NEEDED = "ranks that a head's gradient comes from"
X = "f's sum for x / gradient in one process"
BEFORE, AFTER = (f"copies {when} the sum: gradients that differ" for when in ("before", "after"))
NORM = "norm, without a sum: gradients that differ"

SUMMED = "            dist.all_reduce(grad_CD, group=groups[head])\n"
LINES = {
    "copies are left alone (Try)": ((SUMMED, "            pass\n"), {AFTER, GRADIENTS}),
    "keys and values have not passed f (Try)": (
        ("F.linear(f_TBD, self.kv.flatten(0, 1))", "F.linear(h_TBD, self.kv.flatten(0, 1))"),
        {X, NORM, GRADIENTS},
    ),
    "copies are averaged": (
        (SUMMED, f"{SUMMED}            grad_CD /= dist.get_world_size(groups[head])\n"),
        {GRADIENTS},
    ),
    "copies are added up over all ranks": (
        (SUMMED, SUMMED.replace("group=groups[head]", "group=None")),
        {GRADIENTS},
    ),
    "copies are added up twice": ((SUMMED, 2 * SUMMED), {GRADIENTS}),
    "copies are added up too early": (
        (
            "    y_TBD, x_grad_TBD = step(part, device)\n",
            "    y_TBD, x_grad_TBD = step(part, device)\n    sum_copies(part.kv.grad, groups)\n",
        ),
        {BEFORE, NEEDED, GRADIENTS},
    ),
    "a rank has the wrong key-value head": (
        (
            "    return range(first // SHARING, last // SHARING + 1)\n",
            "    return range(rank % G, rank % G + 1)\n",
        ),
        {OUTPUT, X, GRADIENTS, NEEDED},
    ),
    "a rank has all key-value heads": (
        (
            "    return range(first // SHARING, last // SHARING + 1)\n",
            "    return range(G)\n",
        ),
        {HELD, OUTPUT, X, GRADIENTS, NEEDED},
    ),
    "all ranks have the first query heads": (
        ("chunk(WORLD_SIZE, dim)[RANK]", "chunk(WORLD_SIZE, dim)[0]"),
        {OUTPUT, X, GRADIENTS, NEEDED, BEFORE},
    ),
    "f does not sum": (
        ("return all_reduce(grad, ctx.group), None", "return grad, None"),
        {X, NORM, GRADIENTS},
    ),
}
BREAKS = Breaks(LINES, ranks=4)
