"""The lesson on memory: its sum is the planner's for a dense model, and its rows break."""

import functools

import pytest

from course import plan
from course.lessons import ROOT
from course.planning import HEADROOM, room
from course.playing import load
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/16_planning_memory.py"

# torch's FSDP: weights in float32, which need no copy; SiLU and product, and the loss, not fused
FSDP = plan.Job(weight_bytes=4, grad_bytes=4, state_bytes=8, mlp_saved=8, logit_bytes=12)


@functools.cache
def lesson():
    return load(LESSON)


def dense(preset: str) -> tuple:
    """A preset of the planner's as the lesson's model, and as its own."""
    shape = plan.read_config(plan.known_models()[preset])
    kv = shape.kv_heads * shape.qk_dim
    return lesson().Model(shape.layers, shape.hidden, kv, shape.ff, shape.vocab), shape


@pytest.mark.parametrize(
    ("preset", "n", "sequences", "recompute"),
    [
        ("llama-7b", 8, 1, False),
        ("llama-8b", 8, 4, False),
        ("llama-8b", 16, 1, True),
        ("llama-70b", 64, 1, False),
        ("llama-70b", 64, 1, True),
        ("llama-405b", 512, 2, True),
    ],
)
def test_the_lesson_computes_what_course_plan_computes(
    preset: str, n: int, sequences: int, recompute: bool
) -> None:
    model, shape = dense(preset)
    tokens = 8192 * sequences
    ours = lesson().fsdp_memory(model, n, tokens, recompute)
    layout = plan.Layout(dp=n, zero=3, micro_batch=sequences, recompute=2 * recompute)
    job = FSDP._replace(sequence=8192, batch=n * sequences)
    theirs = {name: float(size) for name, size in plan.memory(shape, job, layout).items()}
    for part in ("weights", "gradients", "optimizer states"):
        assert ours[part] == pytest.approx(theirs[part], rel=1e-3), part
    if recompute:  # the planner counts the layer computed anew as activations
        ours["activations"] += tokens * lesson().saved_per_token(model)
    assert ours["activations"] == pytest.approx(theirs["activations"], rel=2e-3)
    head = 2 * model.vocab * model.hidden  # gathered in bfloat16; the planner leaves it
    assert ours["at work"] == pytest.approx(theirs["logits"] + head)


@pytest.mark.parametrize("preset", ["llama-7b", "llama-8b", "llama-70b", "llama-405b"])
def test_parameters_are_the_planner_s_to_the_last(preset: str) -> None:
    model, shape = dense(preset)
    assert lesson().parameters(model) == sum(plan.parameters(shape).values())


def test_the_room_on_an_h100_is_the_planner_s() -> None:
    assert HEADROOM * room(plan.known_gpus()["h100"]) == pytest.approx(lesson().ROOM, rel=1e-3)


def test_bytes_by_hand() -> None:
    """2 layers, h = 8, ff = 16, V = 32: attention 4 x 64, MLP 3 x 128, norms 16; two tables."""
    model = lesson().Model(layers=2, hidden=8, kv=8, ff=16, vocab=32)
    P = 2 * (256 + 384 + 16) + 2 * 256 + 8
    kept = 12 * 8 + 4 * 8 + 8 * 16
    assert lesson().fsdp_memory(model, 2, 20) == {
        "weights": 2 * P, "gradients": 2 * P, "optimizer states": 4 * P,
        "activations": 20 * 2 * kept, "at work": 20 * 12 * 32 + 2 * 256,
    }  # fmt: skip
    again = lesson().fsdp_memory(model, 2, 20, recompute=True)
    assert again["activations"] == 20 * 2 * 2 * 8
    assert again["at work"] == 20 * 12 * 32 + 2 * 256


def test_the_last_layer_needs_less_than_the_loss_for_70b_and_more_for_405b() -> None:
    """As section 4 says: 2 + 2 + 2 bytes per parameter of a layer, 4 per parameter of the head."""
    text = (ROOT / LESSON).read_text()
    needed = {}
    for preset in ("llama-70b", "llama-405b"):
        model, _ = dense(preset)
        last = 6 * lesson().layer_parameters(model) + 4 * model.vocab * model.hidden
        again = last + 8192 * lesson().saved_per_token(model)
        needed[preset] = (last, again, lesson().fsdp_memory(model, 64, 8192)["at work"])
    last, again, loss = needed["llama-70b"]
    assert f"{last / plan.GiB:.1f} GiB,\n# or {again / plan.GiB:.1f} with" in text
    assert last < again < loss
    last, again, loss = needed["llama-405b"]
    assert loss < last < again


def test_a_step_of_one_micro_batch_has_no_gradients_yet_at_its_loss() -> None:
    less = []
    for recompute in (False, True):
        sizes = lesson().fsdp_memory(lesson().LLAMA_70B, 64, 8192, recompute)
        less.append(f"{(sum(sizes.values()) - sizes['gradients']) / plan.GiB:.1f}")
    assert f"less, {less[0]} or {less[1]}: its gradients" in (ROOT / LESSON).read_text()


def test_n_divides_the_bytes_per_parameter_alone_and_tokens_the_others() -> None:
    module = lesson()
    one = module.fsdp_memory(module.LLAMA_70B, 64, 8192)
    wider = module.fsdp_memory(module.LLAMA_70B, 128, 8192)
    longer = module.fsdp_memory(module.LLAMA_70B, 64, 16384)
    for part in ("weights", "gradients", "optimizer states"):
        assert wider[part] == one[part] / 2
        assert longer[part] == one[part]
    for part in ("activations", "at work"):
        assert wider[part] == one[part]
    assert longer["activations"] == 2 * one["activations"]


def test_the_table_in_the_text_is_what_the_code_computes() -> None:
    text = (ROOT / LESSON).read_text()
    columns = []
    for recompute in (False, True):
        sizes = lesson().fsdp_memory(lesson().LLAMA_70B, 64, 8192, recompute)
        columns.append(sizes | {"sum": sum(sizes.values())})
    for part in columns[0]:
        (row,) = [line for line in text.splitlines() if line.startswith(f"#     {part}  ")]
        assert row.split()[-2:] == [f"{column[part] / plan.GiB:.1f}" for column in columns]


LAYER, KEPT_ROW = "70B: parameters of a layer", "a layer: bytes kept per token / h"
AGAIN = "recomputed"
WEIGHTS, GRADIENTS, STATES = (
    f"FSDP: {part}, bytes per parameter" for part in ("weights", "gradients", "optimizer states")
)
FIRST = "FSDP: gradients at a step's first loss, bytes"
UNDIVIDED = "FSDP: activations of a rank / undivided"
LOSS, AT_WORK = "the loss: bytes per token and entry", "FSDP: bytes at work, at the loss"
ALONE = "70B on 64 H100, too much: GiB per GPU"
RECOMPUTED = "all layers recomputed, it fits: GiB per GPU"
LINES = {
    # the sum
    "an MLP of two matrices": (
        "mlp = 3 * h",
        "mlp = 2 * h",
        {LAYER, WEIGHTS, GRADIENTS, STATES},
    ),
    "one table": (
        "tables = 2 * model.vocab",
        "tables = model.vocab",
        {WEIGHTS, GRADIENTS, STATES},
    ),
    "norms keep their input alone": (
        "return 12 * model.hidden",
        "return 8 * model.hidden",
        {KEPT_ROW, UNDIVIDED},
    ),
    "FSDP shards activations": (
        "tokens * model.layers * kept",
        "tokens * model.layers * kept / n",
        {UNDIVIDED, ALONE},
    ),
    "weights are never sharded": (
        '"weights": 4 * P / n',
        '"weights": 4 * P',
        {WEIGHTS, RECOMPUTED},
    ),
    "gradients in bfloat16": (
        '"gradients": 4 * P / n',
        '"gradients": 2 * P / n',
        {GRADIENTS},
    ),
    "states with a copy of the weights": (
        '"optimizer states": 8 * P / n',
        '"optimizer states": 12 * P / n',
        {STATES},
    ),
    "recomputation keeps all": (
        "kept = 2 * model.hidden if",
        "kept = saved_per_token(model) if",
        {RECOMPUTED},
    ),
    "two arrays of logits": ("(12 * tokens", "(8 * tokens", {AT_WORK}),
    # what is counted
    "keys as wide as queries": (
        "self.k = linear(h, model.kv)\n        self.v = linear(h, model.kv)",
        "self.k = linear(h, h)\n        self.v = linear(h, h)",
        {LAYER, KEPT_ROW, UNDIVIDED, WEIGHTS, GRADIENTS, STATES},
    ),
    "nothing is recomputed": (
        "forward_counted(again, x_TD)",
        "forward_counted(layer, x_TD)",
        {AGAIN},
    ),
    "no second moment": (
        'moments.keys() & {"exp_avg", "exp_avg_sq"}',
        'moments.keys() & {"exp_avg"}',
        {STATES},
    ),
    "the weights are gathered for good": (
        "weight.to_local().nbytes",
        "weight.full_tensor().nbytes",
        {WEIGHTS},
    ),
    "gradients are gathered": (
        "weight.grad.to_local().nbytes",
        "weight.grad.full_tensor().nbytes",
        {GRADIENTS},
    ),
    "gradients are zeroed, not dropped": (
        "optimizer.zero_grad()",
        "optimizer.zero_grad(set_to_none=False)",
        {FIRST},
    ),
    # the loss
    "logits in bfloat16": ("logits_TV.float()", "logits_TV", {LOSS, AT_WORK}),
    "the gradients of the logits are left out": (
        "kept + sum(gradients.values())",
        "kept",
        {LOSS, AT_WORK},
    ),
    "the head is freed": (
        "shard(model.head, reshard_after_forward=False)",
        "shard(model.head, reshard_after_forward=True)",
        {AT_WORK},
    ),
}
# With it 70B fits by whatever the others leave of its sum.
BREAKS = Breaks(LINES, alone=["FSDP shards activations"])
