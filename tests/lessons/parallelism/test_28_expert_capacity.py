"""Capacity against one process in any groups; the layer; made-up seconds; broken lines."""

from collections import defaultdict
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/28_expert_capacity.py"
lesson = Lazily(LESSON)


def served(cases: list[tuple], size: int) -> list[list[bool]]:
    """Which of this rank's tokens are served, in groups of so many ranks."""
    here = load(LESSON)
    group, _ = dist.new_subgroups(size)
    found = []
    for tokens, experts, capacity in cases:
        mine = torch.tensor(tokens[dist.get_rank()], dtype=torch.long)
        found.append(here.within_capacity(mine, experts, capacity, group).tolist())
    return found


def first_come(tokens: list[list[int]], capacity: int, size: int) -> list[list[bool]]:
    """The same by one process, of each rank in turn."""
    found = []
    for first in range(0, len(tokens), size):
        waiting = defaultdict(int)
        for rank in tokens[first : first + size]:
            found.append([])
            for expert in rank:
                waiting[expert] += 1
                found[-1].append(waiting[expert] <= capacity)
    return found


def cases_of(ranks: int, size: int) -> st.SearchStrategy:
    """Tokens of each rank, uneven in number, some ranks with none; experts; a capacity.

    The capacity comes of a factor and the tokens that a group has on average.
    """

    def skewed(experts: int) -> st.SearchStrategy:
        expert = st.one_of(st.just(0), st.integers(0, experts - 1))  # half of all to one
        of_ranks = st.lists(st.lists(expert, max_size=9), min_size=ranks, max_size=ranks)
        return st.tuples(of_ranks, st.just(experts), st.sampled_from([0.0, 0.5, 1, 1.25, 2, 9]))

    def with_capacity(case: tuple) -> tuple:
        tokens, experts, factor = case
        of_a_group = sum(map(len, tokens)) * size // ranks
        return tokens, experts, lesson.capacity_of(factor, of_a_group, experts)

    return st.integers(1, 5).flatmap(skewed).map(with_capacity)


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (4, 1)])
@settings(max_examples=2, deadline=None)
@given(st.data())
def test_groups_serve_as_one_process_does(ranks: int, size: int, data: st.DataObject) -> None:
    cases = data.draw(st.lists(cases_of(ranks, size), min_size=5, max_size=9))
    found = run(served, ranks, cases, size)
    for number, (tokens, _, capacity) in enumerate(cases):
        assert [of_rank[number] for of_rank in found] == first_come(tokens, capacity, size)


@given(st.data())
def test_the_lesson_s_own_oracle_is_first_come_first_served(data: st.DataObject) -> None:
    ranks, tokens = data.draw(st.sampled_from([(1, 1), (2, 3), (4, 5), (4, 8)]))
    size = data.draw(st.sampled_from([s for s in (1, 2, 4) if ranks % s == 0]))
    capacity = data.draw(st.integers(0, 9))
    of_rank = st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens)
    of_ranks = data.draw(st.lists(of_rank, min_size=ranks, max_size=ranks))
    in_a_row = list(chain.from_iterable(of_ranks))
    found = lesson.served_in_one_process(in_a_row, size * tokens, capacity)
    assert found == list(chain.from_iterable(first_come(of_ranks, capacity, size)))


def test_the_picture_of_two_ranks() -> None:
    """Of section 2."""
    tokens = [0, 0, 0, 1, 1, 1, 1, 0]
    by_rank = [True, True, False, True]
    assert lesson.capacity_of(1, 4, 2) == 2
    assert lesson.served_in_one_process(tokens, 4, 2) == by_rank * 2
    assert lesson.capacity_of(1, 8, 2) == 4
    assert lesson.served_in_one_process(tokens, 8, 4) == [True] * 8


def test_a_capacity_is_rounded_up() -> None:
    assert [lesson.capacity_of(factor, 10, 4) for factor in (0.4, 1, 1.25, 2)] == [1, 3, 4, 5]


def lost_by_rank(size: int) -> float:
    """The share of its own tokens that this rank loses by question 2's routing."""
    here = load(LESSON)
    group, _ = dist.new_subgroups(size)
    expert_N = here.skewed(here.N, here.RANK)
    capacity = here.capacity_of(1.0, size * here.N, here.WORLD_SIZE)
    served_N = here.within_capacity(expert_N, here.WORLD_SIZE, capacity, group)
    return 1 - served_N.double().mean().item()


def test_the_last_ranks_lose_what_the_first_do_not() -> None:
    """Of section 2: in one group, and with a group per rank."""
    assert run(lost_by_rank, 4, 4) == [0, 0, 0.5, 0.5]
    assert run(lost_by_rank, 4, 1) == [0.25] * 4


@pytest.mark.parametrize(("n", "shares"), [(1, [1]), (2, [2, 0]), (4, [2, 1, 1, 0])])
def test_skewed_gives_expert_0_what_the_last_one_had(n: int, shares: list[int]) -> None:
    here = load(LESSON)
    here.WORLD_SIZE = n
    for rank in range(n):
        found = torch.bincount(here.skewed(5 * n, rank), minlength=n)
        assert found.tolist() == [5 * share for share in shares]
    if n == 4:
        assert here.skewed(20, 0).tolist() != here.skewed(20, 1).tolist()


def layer(which: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer makes of this rank's tokens, and what it should."""
    here = load(LESSON)
    torch.manual_seed(0)
    n, rank = here.WORLD_SIZE, here.RANK
    x_nND = torch.randn(n, 7, 5).double()
    expert_nN = torch.randint(n, (n, 7))
    served_nN = {
        "none": torch.zeros(n, 7, dtype=torch.bool),
        "some": torch.rand(n, 7) < 0.5,
        "all": torch.ones(n, 7, dtype=torch.bool),
    }[which]
    up_EDH, down_EHD = torch.randn(n, 5, 6).double(), torch.randn(n, 6, 5).double()
    weights = (up_EDH[rank], down_EHD[rank])
    y_ND = here.expert_layer(x_nND[rank], expert_nN[rank], served_nN[rank], weights)
    computed_NED = torch.einsum(
        "neh,ehd->ned", torch.einsum("nd,edh->neh", x_nND[rank], up_EDH).relu(), down_EHD
    )
    mine_ND = computed_NED[torch.arange(7), expert_nN[rank]]
    return y_ND, x_nND[rank] + served_nN[rank][:, None] * mine_ND


@pytest.mark.parametrize("which", ["none", "some", "all"])
def test_the_layer_adds_an_expert_s_result_to_served_tokens_and_to_no_other(which: str) -> None:
    for found_ND, due_ND in run(layer, 3, which):
        assert (found_ND - due_ND).abs().max() < 1e-12
        if which == "none":
            assert torch.equal(found_ND, due_ND)


@pytest.mark.parametrize(
    ("seconds", "measured", "failed"),
    [
        ([[2, 1, 1, 0], [1.25, 1, 1, 0]], [2, 1.25], []),
        ([[4e-3, 2e-3, 2e-3, 0], [2.6e-3, 2e-3, 2e-3, 0]], [2, 1.3], []),  # noise
        ([[1, 2, 0, 1], [1, 1.25, 0, 1]], [2, 1.25], []),  # whichever rank is the slowest
        ([[1, 1, 1, 1], [1, 1, 1, 1]], [1, 1], [1, 4]),  # seconds that do not follow rows
        ([[2, 1, 1, 0], [2, 1, 1, 0]], [2, 2], [4]),  # nothing is capped
        ([[2, 1, 1, 0], [1, 1, 1, 0]], [2, 1], [4]),  # capped at a factor of 1
        ([[1.25, 1, 1, 0.75], [1.25, 1, 1, 0]], [1.25, 1.25], [1]),
    ],
)
def test_seconds_are_judged_over_the_mean_without_a_capacity(
    seconds: list, measured: list[float], failed: list[int]
) -> None:
    here = load(LESSON)
    here.WORLD_SIZE = 4
    here.check_seconds(torch.tensor(seconds, dtype=torch.float64))
    assert [row["measured"] for row in here.ledger] == pytest.approx(measured)
    assert [row["predicted"] for row in here.ledger] == [2, 1.25]
    assert [row["question"] for row in here.ledger if row["verdict"] == "FAIL"] == failed
    assert all(row["timed"] for row in here.ledger)


def test_a_second_that_is_no_number_fails() -> None:
    here = load(LESSON)
    here.WORLD_SIZE = 4
    here.check_seconds(torch.tensor([[2, 1, 1, 0], [1.25, torch.nan, 1, 0]]))
    assert [row["verdict"] for row in here.ledger] == ["PASS", "FAIL"]


def test_the_answers_numbers() -> None:
    """Question 4's: what a factor from 1 to 2 drops on four ranks, and what 0.25 more saves."""
    assert round(100 * (2 - 1.25) / 4) == 19
    assert round(100 * 0.25 / 4) == 6


UNEVEN = "no capacity: rows of the fullest rank / even share"
DROPPED = {factor: f"factor {factor}: share of tokens dropped" for factor in (1, 1.25)}
FULLEST = "factor 1.25: rows of the fullest rank / even share"
EACH, ALL = (f"own kind, {who} a group: share dropped" for who in ("each rank", "all ranks"))
ONE, TWO, FOUR = (f"groups of {size}: error against one process" for size in (1, 2, 4))
SLOWEST = "no capacity: seconds of the slowest rank / mean"
CAPPED = "factor 1.25: seconds of the slowest / that mean"
COUNTED = {DROPPED[1], DROPPED[1.25], FULLEST}

BEFORE = "    before_E = sum(counts_gE[: dist.get_rank(group)])"
LAST = "return x_ND.index_add(0, token_C, y_CD)"
LINES = {
    "capacity is counted per rank (Try)": (
        (BEFORE, "    before_E = 0"),
        {*COUNTED, TWO, FOUR},
    ),
    "the last ranks are served first": (
        (BEFORE, "    before_E = sum(counts_gE[dist.get_rank(group) + 1 :])"),
        {TWO, FOUR},
    ),
    "nothing is dropped": (
        ("[:, 0] <= capacity", "[:, 0] <= 9 * capacity"),
        {*COUNTED, EACH, ONE, TWO, FOUR},
    ),
    "one token too few is served": (
        ("[:, 0] <= capacity", "[:, 0] < capacity"),
        {*COUNTED, EACH, ALL, ONE, TWO, FOUR},
    ),
    "every group is all ranks": (
        ("groups[size], _ = dist.new_subgroups(size)", "groups[size] = None"),
        {ONE, TWO},
    ),
    "an expert takes the share of all experts": (
        ("return math.ceil(factor * tokens / experts)", "return math.ceil(factor * tokens)"),
        {*COUNTED, EACH},
    ),
    "all ranks have the capacity of one": (
        ("capacity_of(1.0, N * size, WORLD_SIZE)", "capacity_of(1.0, N, WORLD_SIZE)"),
        {ALL},
    ),
    "routing that is even": (
        ("    expert_N[expert_N == WORLD_SIZE - 1] = 0\n", ""),
        {UNEVEN, *COUNTED},
    ),
    "the residual connection is forgotten (Try)": (
        (LAST, "return torch.zeros_like(x_ND).index_add(0, token_C, y_CD)"),
        {ONE, TWO, FOUR},
    ),
    "tokens are not sorted by expert": (
        ("    token_C = token_C[expert_N[token_C].argsort(stable=True)]", "    pass"),
        {ONE, TWO, FOUR},
    ),
    "the oracle has one group": (
        ("(expert_M.tolist(), size * N, capacity)", "(expert_M.tolist(), len(expert_M), capacity)"),
        {ONE, TWO},
    ),
    "served tokens are counted as dropped": (
        ("count = (~served_N).sum()", "count = served_N.sum()"),
        {DROPPED[1], DROPPED[1.25], EACH, ALL},
    ),
}
CLOCK = {
    "rows that are not capped": (
        ("(torch.ones_like(capped_N), capped_N)", "(torch.ones_like(capped_N),) * 2"),
        {CAPPED},
    ),
    "all ranks compute as many rows": (
        ("[RANK].item()\n        inputs", ".sum().item() // WORLD_SIZE\n        inputs"),
        {SLOWEST, CAPPED},
    ),
}
UNTIMED = [("TRIES = 15", "TRIES = 1")]
BREAKS = [
    Breaks(CLOCK, ranks=4, clock=True),
    Breaks(
        LINES,
        ranks=4,
        changes=UNTIMED,
        # Where nothing is dropped, no order and no group is wrong.
        alone=[
            "nothing is dropped",
            "an expert takes the share of all experts",
            "routing that is even",
        ],
    ),
]

ON_GPUS = OnGpus(changes=[*UNTIMED, ("width = 2048 if", "width = 64 if")])


@pytest.mark.deep
def test_it_holds_on_8_ranks() -> None:
    play(LESSON, 8, *UNTIMED, deadline=200).expect(set())
