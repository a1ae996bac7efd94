"""The bias, and a loss in its place, against one process, the ranks' training too; broken lines."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/20_expert_balance.py"
lesson = Lazily(LESSON)


def balance_loss(score_NE: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
    """The lesson's L: E x sum of share x mean probability, of these scores and the given counts."""
    share_E = count_E.double() / count_E.sum()
    return len(count_E) * (share_E * score_NE.mean(dim=0)).sum()


def of_the_router(model: torch.nn.Module, byte_NT: torch.Tensor) -> torch.Tensor:
    return model.router(model.byte(byte_NT).flatten(1)).softmax(dim=1)


NO_BIAS = ("        adjust(model.bias_E, count_E, RATE)\n", "")
WITH_LOSS = (
    "loss = F.cross_entropy(logits_NV, window_NT[:, -1])",
    "loss = F.cross_entropy(logits_NV, window_NT[:, -1])"
    " + balance_loss(of_the_router(model, window_NT[:, :-1]), count_E)",
)
BALANCED = {"bias": [], "loss": [WITH_LOSS, NO_BIAS], "nothing": [NO_BIAS]}


def balanced(by: str, *changes: tuple[str, str]) -> ModuleType:
    """The lesson, whose training is kept even by its bias, by the loss instead, or by nothing."""
    changed = load(LESSON, *BALANCED[by], *changes)
    changed.balance_loss = balance_loss
    changed.of_the_router = of_the_router
    return changed


@given(st.lists(st.integers(1, 99), min_size=2, max_size=9), st.integers(1, 9))
def test_the_loss_is_1_if_either_factor_is_even(counts: list[int], tokens: int) -> None:
    experts = len(counts)
    scores = torch.rand(tokens, experts).double().softmax(dim=1)
    even = torch.full_like(scores, 1 / experts)
    assert balance_loss(even, torch.tensor(counts)).item() == pytest.approx(1)
    assert balance_loss(scores, torch.full((experts,), 7)).item() == pytest.approx(1)


def test_the_loss_pushes_down_the_fullest_expert_most() -> None:
    scores = torch.full((3, 4), 0.25, dtype=torch.float64, requires_grad=True)
    balance_loss(scores, torch.tensor([6, 3, 2, 1])).backward()
    assert scores.grad[0].tolist() == pytest.approx([4 * count / 12 / 3 for count in (6, 3, 2, 1)])


def test_the_example_of_tables_and_code() -> None:
    """Of section 1: 2 by a rank's own counts, which is E / K, and 1 by those of both."""
    own = torch.tensor([6, 6, 0, 0])
    scores = torch.tensor([[0.5, 0.5, 0, 0]]).double().expand(6, 4)
    assert balance_loss(scores, own).item() == 2
    assert balance_loss(scores, own + own.flip(0)).item() == 1


@given(st.integers(0, 2**20), st.integers(1, 4))
def test_bias_chooses_and_does_not_weigh(seed: int, k: int) -> None:
    torch.manual_seed(seed)
    scores, bias = torch.rand(6, 5).double(), torch.rand(5).double()
    weights, chosen = lesson.choose(scores, bias, k)
    for token in range(6):
        best = sorted(range(5), key=lambda e: -(scores[token, e] + bias[e]).item())[:k]
        assert chosen[token].tolist() == best
        assert weights[token].tolist() == [scores[token, e].item() for e in best]


def test_bias_moves_by_its_rate_or_not_at_all() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0, 0.25])
    lesson.adjust(bias, torch.tensor([9, 5, 5, 1]), 0.125)
    assert bias.tolist() == [0.375, 0.0, 0.0, 0.375]


def test_imbalance_is_that_of_the_picture() -> None:
    assert lesson.imbalance(torch.tensor([12, 6, 6, 0])) == 2
    assert lesson.imbalance(torch.tensor([6, 6, 6, 6])) == 1


def ranks_differ() -> float:
    """Of two ranks and four experts, those of *Predict*."""
    here = load(LESSON)
    own_E = torch.tensor([[6, 6, 0, 0], [3, 0, 5, 4]])[here.RANK]
    assert here.imbalance(here.over_all_ranks(own_E)) == 1.5
    return here.ranks_differ(own_E).item()


def test_the_measures_are_those_of_the_example() -> None:
    assert run(ranks_differ, 2) == [0.75, 0.75]


def test_the_model_is_what_all_experts_return_weighted_by_the_chosen_scores() -> None:
    torch.manual_seed(0)
    model = lesson.Model()
    model.bias_E.normal_()
    byte_NT = torch.randint(256, (7, lesson.CONTEXT))
    logits_NV, expert_NK = model(byte_NT)
    x_ND = model.byte(byte_NT).flatten(1)
    score_NE = of_the_router(model, byte_NT)
    assert torch.equal(expert_NK, (score_NE + model.bias_E).topk(lesson.K).indices)
    kept_NE = torch.zeros_like(score_NE).scatter(1, expert_NK, score_NE.gather(1, expert_NK))
    all_END = (x_ND @ model.up_EDH).relu() @ model.down_EHD
    expected = model.head(x_ND + torch.einsum("ne,end->nd", kept_NE, all_END))
    assert (logits_NV - expected).abs().max() < 1e-5


def test_a_model_that_is_loaded_chooses_as_the_saved_one_did() -> None:
    torch.manual_seed(0)
    saved, loaded = (lesson.Model() for _ in range(2))
    saved.bias_E.normal_()
    loaded.load_state_dict(saved.state_dict())
    byte_NT = torch.randint(256, (7, lesson.CONTEXT))
    assert torch.equal(loaded.bias_E, saved.bias_E)
    for found, due in zip(loaded(byte_NT), saved(byte_NT), strict=True):
        assert torch.equal(found, due)


def test_the_router_begins_in_favor_of_expert_0() -> None:
    assert lesson.Model().router.bias.tolist() == [1] + [0] * 7


def moved() -> tuple[list[float], list[list[float]]]:
    """The biases after a step, and all ranks' scores."""
    here = load(LESSON)
    torch.manual_seed(0)
    score_ME = torch.rand(21 * here.WORLD_SIZE, 5).double()
    bias_E = torch.zeros(5).double()
    _, expert_NK = here.choose(score_ME.chunk(here.WORLD_SIZE)[here.RANK], bias_E, 2)
    here.adjust(bias_E, here.over_all_ranks(here.counts(expert_NK, 5)), 0.25)
    return bias_E.tolist(), score_ME.tolist()


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_bias_moves_as_in_one_process(ranks: int) -> None:
    for biases, scores in run(moved, ranks):
        visited = []
        for row in scores:
            visited += sorted(range(5), key=row.__getitem__)[-2:]
        even = len(visited) / 5  # 8.4 or 25.2, so no expert gets as many
        due = [0.25 if visited.count(expert) < even else -0.25 for expert in range(5)]
        assert biases == due


def loss_per_byte(changed: ModuleType, model: torch.nn.Module, text: torch.Tensor) -> float:
    """Of all ranks' text, by what the model has learned."""
    window_NT = changed.windows(text, torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits_NV, _ = model(window_NT[:, :-1])
    total = F.cross_entropy(logits_NV, window_NT[:, -1], reduction="sum")
    torch.distributed.all_reduce(total)
    return total.item() / changed.BATCH


def trained(by: str, whose: str) -> tuple[list[float], float, float, float, torch.Tensor]:
    changed = balanced(by, ("STEPS = 120", "STEPS = 6"))
    text = torch.arange(5000) ** 2 % 251
    model, steps = changed.train(text, whose)
    uneven = [changed.imbalance(total_E) for _, total_E in steps]
    nats = loss_per_byte(changed, model, text)
    apart = changed.biases_apart(model.bias_E)
    loaded = 1 + changed.excess_after_loading(model, text)
    return uneven, nats, loaded, apart, model.router.weight.detach()


@pytest.mark.parametrize("by", ["bias", "loss"])
def test_ranks_train_as_one_process_does(by: str) -> None:
    alone = run(trained, 1, by, "all")[0]
    ranks = run(trained, 3, by, "all")
    for uneven, nats, loaded, apart, weight_ED in ranks:
        assert uneven == pytest.approx(alone[0], rel=0.02)  # a close choice may fall otherwise
        assert nats == pytest.approx(alone[1], rel=1e-3)
        assert loaded == pytest.approx(alone[2], rel=0.02)
        assert apart == 0
        assert (weight_ED - alone[4]).abs().mean() < 3e-4


@pytest.mark.parametrize("by", ["bias", "loss"])
def test_by_own_counts_they_do_not(by: str) -> None:
    alone = run(trained, 1, by, "all")[0]
    for _, _, _, apart, weight_ED in run(trained, 3, by, "own"):
        if by == "bias":
            assert apart > 0
        else:
            assert (weight_ED - alone[4]).abs().mean() > 1e-4


def first_router(whose: str) -> torch.Tensor:
    """After a step of plain SGD by the loss, on text whose parts are of different kinds."""
    adam = "torch.optim.Adam(model.parameters(), lr=0.003)"
    sgd = "torch.optim.SGD(model.parameters(), lr=1.0)"
    changed = balanced("loss", ("STEPS = 120", "STEPS = 1"), (adam, sgd))
    text = torch.cat([torch.arange(2500) % 7, torch.arange(2500) ** 2 % 251])
    model, _ = changed.train(text, whose)
    return model.router.weight.detach()


def test_the_gradient_of_the_loss_is_that_of_one_process_if_all_count() -> None:
    alone = run(first_router, 1, "all")[0]
    for weight_ED in run(first_router, 3, "all"):
        assert (weight_ED - alone).abs().max() < 1e-5
    for weight_ED in run(first_router, 3, "own"):
        assert (weight_ED - alone).abs().max() > 1e-4


def on_real_text(by: str, *changes: tuple[str, str]) -> tuple[float, float]:
    """The last steps' excess over the first one's; loss per byte over that without context."""
    changed = balanced(by, *changes)
    text = torch.frombuffer(bytearray(changed.tables_and_code(None)), dtype=torch.uint8).long()
    model, steps = changed.train(text, "all")
    excess = [changed.imbalance(total_E) - 1 for _, total_E in steps]
    single = torch.special.entr(torch.bincount(text) / len(text)).sum().item()
    left = sum(excess[-30:]) / 30 / excess[0]
    return left, loss_per_byte(changed, model, text) / single


ANOTHER_BYTE = ("(logits_NV, window_NT[:, -1])", "(logits_NV, window_NT[:, -1].roll(1))")


@pytest.mark.deep
@pytest.mark.parametrize("by", ["bias", "loss", "nothing"])
def test_the_loss_makes_real_text_as_even_as_the_bias_does(by: str) -> None:
    left, nats = run(on_real_text, 4, by, deadline=200)[0]
    assert (left <= 0.3) == (by != "nothing")
    assert nats <= 0.8


@pytest.mark.deep
def test_trained_for_another_byte_the_loss_stays_high() -> None:
    _, nats = run(on_real_text, 4, "bias", ANOTHER_BYTE, deadline=200)[0]
    assert nats > 0.8


OWN = "own counts: imbalance"
WORLD = "counts of all ranks: imbalance"
MOVE = "own counts, 10 steps: biases apart"
BY_BIAS = "bias: excess of the last steps / first"
LAST = "last steps: excess, own counts / all counts"
APART = "counts of all ranks, trained: biases apart"
SPECIAL = "ranks differ: own counts / all counts"
LOADED = "loaded: excess, own counts / all counts"

LINES = {
    "each rank counts its own tokens": (
        ("    dist.all_reduce(total_E)\n", ""),
        {WORLD},
    ),
    "the mean is that of the fullest expert": (
        ("(count_E.max() / count_E.double().mean())", "(count_E.max() / count_E.double().max())"),
        {OWN},
    ),
    "the bias moves by the difference": (
        ("rate * too_few_E.sign()", "rate * too_few_E"),
        {MOVE},
    ),
    "no rank is further than another": (
        ("(largest_E - smallest_E).max()", "(largest_E - largest_E).max()"),
        {MOVE},
    ),
}
UNTRAINED = [
    ("    check_training(torch.frombuffer(text, dtype=torch.uint8).long().to(device))\n", "")
]
TRAINED = {
    "the bias goes the wrong way (Try)": (
        ("bias_E += rate * too_few_E.sign()", "bias_E -= rate * too_few_E.sign()"),
        {BY_BIAS, SPECIAL, LOADED},
    ),
    "the bias does not move": (
        NO_BIAS,
        {BY_BIAS, SPECIAL, LOADED},
    ),
    "each rank corrects by its own counts (Try)": (
        ('count_E = total_E if whose == "all" else own_E', "count_E = own_E"),
        {APART, SPECIAL, LOADED},
    ),
    "by own counts nothing is corrected": (
        ('if whose == "all" else own_E', 'if whose == "all" else torch.ones_like(own_E)'),
        {LAST, SPECIAL},
    ),
}
BREAKS = [
    Breaks(LINES, ranks=4, changes=UNTRAINED, alone=["each rank counts its own tokens"]),
    Breaks(TRAINED, ranks=4, alone=list(TRAINED)),
]

ON_GPUS = OnGpus(changes=[("STEPS = 120", "STEPS = 6")])


@pytest.mark.deep
def test_it_holds_on_8_ranks() -> None:
    play(LESSON, 8, *UNTRAINED, deadline=200).expect(set())
