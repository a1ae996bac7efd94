"""Loss and bias against one process, the ranks' training too; broken lines."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/20_expert_balance.py"
lesson = Lazily(LESSON)


@given(st.lists(st.integers(1, 99), min_size=2, max_size=9), st.integers(1, 9))
def test_the_loss_is_1_if_either_factor_is_even(counts: list[int], tokens: int) -> None:
    experts = len(counts)
    scores = torch.rand(tokens, experts).double().softmax(dim=1)
    even = torch.full_like(scores, 1 / experts)
    assert lesson.balance_loss(even, torch.tensor(counts)).item() == pytest.approx(1)
    assert lesson.balance_loss(scores, torch.full((experts,), 7)).item() == pytest.approx(1)


def test_the_loss_pushes_down_the_fullest_expert_most() -> None:
    scores = torch.full((3, 4), 0.25, dtype=torch.float64, requires_grad=True)
    lesson.balance_loss(scores, torch.tensor([6, 3, 2, 1])).backward()
    assert scores.grad[0].tolist() == pytest.approx([4 * count / 12 / 3 for count in (6, 3, 2, 1)])


def test_the_example_of_tables_and_code() -> None:
    """Of section 4: 2 by a rank's own counts, which is E / K, and 1 by those of both."""
    own = torch.tensor([6, 6, 0, 0])
    scores = torch.tensor([[0.5, 0.5, 0, 0]]).double().expand(6, 4)
    assert lesson.balance_loss(scores, own).item() == 2
    assert lesson.balance_loss(scores, own + own.flip(0)).item() == 1


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


@pytest.mark.parametrize(("n", "shares"), [(2, [2, 0]), (3, [2, 1, 0]), (4, [2, 1, 1, 0])])
def test_skewed_gives_rank_0_what_the_last_one_has(n: int, shares: list[int]) -> None:
    changed = load(LESSON)
    changed.WORLD_SIZE = n
    found = changed.counts(changed.skewed(5 * n, torch.device("cpu")), n)
    assert found.tolist() == [5 * share for share in shares]
    assert changed.imbalance(found) == 2


def test_the_first_try_is_not_judged() -> None:
    seconds = {"even": [9.0, 1.0, 1.5, 1.0], "skewed": [9.0, 2.0, 1.9, 2.1]}
    assert lesson.slowdown(seconds) == 2


def test_the_model_is_what_all_experts_return_weighted_by_the_chosen_scores() -> None:
    torch.manual_seed(0)
    model = lesson.Model()
    model.bias_E.normal_()
    byte_NT = torch.randint(256, (7, lesson.CONTEXT))
    logits_NV, score_NE, expert_NK = model(byte_NT)
    x_ND = model.byte(byte_NT).flatten(1)
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


def trained(how: str) -> tuple[float, float, list[float]]:
    changed = load(LESSON, ("STEPS = 150", "STEPS = 6"))
    found = changed.train(how, torch.arange(5000) ** 2 % 251)
    return found.uneven, found.nats, found.bias_E.tolist()


@pytest.mark.parametrize("how", ["neither", "loss", "bias"])
def test_ranks_train_as_one_process_does(how: str) -> None:
    alone = run(trained, 1, how)[0]
    ranks = run(trained, 3, how)
    for uneven, nats, bias in ranks:
        assert uneven == pytest.approx(alone[0], rel=0.02)  # a close choice may fall otherwise
        assert nats == pytest.approx(alone[1], rel=1e-3)
        assert bias == ranks[0][2]


SECONDS = "skewed: seconds of the last rank / even"
OWN, WORLD = (f"{whose}: the balancing loss" for whose in ("own counts", "counts of all ranks"))
WEIGHT = "chosen by bias: its output is multiplied by"
MOVE = "3 x the mean: change of its bias / rate"
GRADIENT = "loss: error of the router's gradient"
BIAS = "bias: experts with another one than in one process"
BY_LOSS, BY_BIAS = (f"{how}: excess / with neither, at most" for how in ("loss", "bias"))
LEARNED = "each: nats per byte / without context"
APART = "bias: experts whose bias differs between ranks"
SPECIAL = "ranks differ: own counts / all counts, at most"

LINES = {
    "each rank counts its own tokens": (
        ("    dist.all_reduce(total_E)\n", ""),
        {WORLD, GRADIENT, BIAS},
    ),
    "the loss is not scaled by E": (
        ("return len(count_E) * (share_E", "return (share_E"),
        {OWN, WORLD, GRADIENT},
    ),
    "counts in place of shares": (
        ("count_E.double() / count_E.sum()", "count_E.double()"),
        {OWN, WORLD, GRADIENT},
    ),
    "probabilities are added up": (
        ("(share_E * score_NE.mean(dim=0))", "(share_E * score_NE.sum(dim=0))"),
        {OWN, WORLD, GRADIENT},
    ),
    "the output is weighted with the bias": (
        ("return score_NE.gather(1, expert_NK)", "return (score_NE + bias_E).gather(1, expert_NK)"),
        {WEIGHT},
    ),
    "the bias chooses nothing": (
        ("(score_NE + bias_E).topk", "score_NE.topk"),
        {WEIGHT},
    ),
    "the bias moves by the difference": (
        ("rate * too_few_E.sign()", "rate * too_few_E"),
        {MOVE, BIAS},
    ),
}
UNTRAINED = [
    ("    check_training(torch.frombuffer(text, dtype=torch.uint8).long().to(device))\n", "")
]
TRAINED = {
    "the bias goes the wrong way (Try)": (
        ("bias_E += rate * too_few_E.sign()", "bias_E -= rate * too_few_E.sign()"),
        {MOVE, BIAS, BY_BIAS},
    ),
    "the bias does not move": (
        ("            adjust(model.bias_E, count_E, RATE)\n", "            pass\n"),
        {BY_BIAS},
    ),
    "the bias has the rank's own counts (Try)": (
        ("adjust(model.bias_E, count_E, RATE)", "adjust(model.bias_E, own_E, RATE)"),
        {APART},
    ),
    "the loss weighs nothing": (
        ("COEFFICIENT = 1.0", "COEFFICIENT = 0.0"),
        {BY_LOSS, SPECIAL},
    ),
    "the loss has the rank's own counts": (
        ("* balance_loss(score_NE, count_E)", "* balance_loss(score_NE, own_E)"),
        {SPECIAL},
    ),
    "another byte is to be predicted": (
        ("(logits_NV, window_NT[:, -1])", "(logits_NV, window_NT[:, -1].roll(1))"),
        {LEARNED},
    ),
}
CLOCK = {
    "routing that is not skewed": (
        ("    return expert_C * (expert_C < WORLD_SIZE - 1)\n", "    return expert_C\n"),
        {SECONDS},
    ),
    "the even routing is timed twice": (
        ("layer_seconds(x_CD, expert_C))", 'layer_seconds(x_CD, routes["even"]))'),
        {SECONDS},
    ),
    "nothing waits for the fullest rank": (
        ("    dist.all_to_all_single(y_CD, row_RD, sent, received)\n", "    y_CD.zero_()\n"),
        {SECONDS},
    ),
}
BREAKS = [
    Breaks(CLOCK, ranks=4, changes=UNTRAINED, clock=True),
    Breaks(LINES, ranks=4, changes=UNTRAINED),
    Breaks(TRAINED, alone=["the bias goes the wrong way (Try)"]),
]

ON_GPUS = OnGpus(
    changes=[
        ("STEPS = 150", "STEPS = 4"),
        ("for _ in range(6):", "for _ in range(2):"),
    ]
)


@pytest.mark.deep
def test_it_holds_on_8_ranks() -> None:
    play(LESSON, 8, *UNTRAINED, deadline=200).expect(set())
