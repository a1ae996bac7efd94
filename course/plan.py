"""Will it fit, how long does it take: memory and time of a training step, from first principles.

NumPy alone. Every number of a `Layout` may be an array, and then so is every result: one call
plans fifty thousand layouts. The lessons parallelism/16 and 17 explain what it rests on.
"""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

DATA = Path(__file__).parent / "plan_data"
GiB = 2**30


class Model(NamedTuple):
    """The shape of a transformer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    qk_dim: int  # of one head
    v_dim: int
    ff: int  # width of a dense MLP
    vocab: int
    tied: bool  # one matrix is embedding and head
    gated: bool  # three matrices in the MLP (SwiGLU), no biases; else two, with biases
    positions: int = 0  # learned ones
    experts: int = 0  # in each MoE layer
    top_k: int = 0  # of them see a token
    expert_ff: int = 0
    shared_ff: int = 0  # of experts that see every token
    dense_layers: int = 0  # that come before the first MoE layer
    q_rank: int = 0  # of multi-head latent attention (MLA)
    kv_rank: int = 0
    rope_dim: int = 0
    mtp: int = 0  # layers that predict further tokens
    top_groups: int = 0  # of experts, in which all of a token's lie: DeepSeek's; 0: no limit


class Layout(NamedTuple):
    """How a job is spread over GPUs: each a number, or an array of as many as there are layouts."""

    dp: int = 1
    tp: int = 1  # with sequence parallelism
    pp: int = 1
    cp: int = 1
    ep: int = 1  # taken from dp x cp x tp
    micro_batch: int = 1  # sequences
    chunks: int = 1  # of layers per stage: interleaving, v
    zero: int = 1  # what is sharded over dp x cp: 1 states, 2 gradients too, 3 weights too
    recompute: int = 0  # 0 nothing, 1 norms, SwiGLU's product and MLA's keys, 2 whole layers


class Job(NamedTuple):
    """What is computed, and in which bytes."""

    sequence: int = 4096
    batch: int = 256  # sequences per step, all GPUs together
    weight_bytes: float = 2
    grad_bytes: float = 4  # Megatron's are float32
    state_bytes: float = 12  # Adam: a float32 copy of the weights, and two moments
    bucket_bytes: float = 0  # DDP's buckets, if dp > 1 and nothing is sharded
    half_bytes: float = 0  # gradients in bfloat16, before they are added to the float32 ones
    layer_bytes: float = 2  # those of one layer, where they are added at once
    keep_gathered: bool = False  # what tensor parallelism gathers is kept for the backward pass
    mlp_saved: int = 6  # bytes per column of a gated MLP; 8 where SiLU and product are not fused
    logit_bytes: float = 6  # fused loss: logits in bfloat16, softmax in float32; not fused: 12
    reserve: float = 0  # what the allocator holds beyond the activations if tp > 1, as a share
    by_cost: bool = False  # the head counts as layers when stages are cut; else it does not
    compute: str = "bf16"  # or "fp8": matrix products alone
    offload: bool = False  # states in the host's memory
    lora: int = 0  # rank of the adapters; 0: all is trained
    hide: bool = True  # experts' all-to-alls run behind products, where the schedule allows
    schedule: str = "1f1b"  # of a pipeline; interleaved if there are chunks; or "gpipe", "zb-h1"


# Parameters and FLOPs


def layer_parameters(model: Model) -> SimpleNamespace:
    """Parameters of one layer: attention, norms, MLP; of MoE shared experts, router, one expert."""
    h = model.hidden
    q_out = model.heads * model.qk_dim
    attention = h * q_out + 2 * h * model.kv_heads * model.qk_dim + model.heads * model.v_dim * h
    up = 0
    if model.kv_rank:  # MLA: down to a small rank, up again
        up = (model.q_rank or h) * q_out
        up += model.kv_rank * model.heads * (model.qk_dim - model.rope_dim + model.v_dim)
        attention = h * (model.q_rank + model.kv_rank + model.rope_dim) + up
        attention += model.heads * model.v_dim * h
    matrices = 3 if model.gated else 2
    mlp = matrices * h * model.ff
    norms = 2 * h + model.q_rank + model.kv_rank
    if not model.gated:  # biases, as GPT has them
        attention += q_out + 2 * model.kv_heads * model.qk_dim + h
        mlp += model.ff + h
        norms += 2 * h
    return SimpleNamespace(
        attention=attention,
        up=up,
        norms=norms,
        mlp=mlp,
        shared=matrices * h * model.shared_ff,
        router=h * model.experts,
        expert=matrices * h * model.expert_ff,
    )


def parameters(model: Model) -> dict[str, int]:
    """Parameters of the model by part, without layers that predict further tokens."""
    one = layer_parameters(model)
    moe_layers = model.layers - model.dense_layers if model.experts else 0
    return {
        "embedding": (model.vocab + model.positions) * model.hidden,
        "attention": model.layers * one.attention,
        "dense MLPs": (model.layers - moe_layers) * one.mlp,
        "experts": moe_layers * model.experts * one.expert,
        "shared experts": moe_layers * one.shared,
        "routers": moe_layers * one.router,
        "norms": model.layers * one.norms + model.hidden * (1 if model.gated else 2),
        "head": 0 if model.tied else model.vocab * model.hidden,
    }


def flops_per_token(model: Model, sequence: int, convention: str = "causal") -> float:
    """FLOPs of forward and backward pass per token: 6 per parameter that a token meets.

    `convention`: "causal" counts half of the attention matrix, as it is computed; "full" all of it;
    "6N" none, but the input embedding instead.
    """
    one = layer_parameters(model)
    moe_layers = model.layers - model.dense_layers if model.experts else 0
    met = model.layers * (one.attention + one.norms) + (model.layers - moe_layers) * one.mlp
    of_moe = one.shared + one.router + model.top_k * one.expert
    met += moe_layers * of_moe
    head = model.vocab * model.hidden
    scores = model.layers * model.heads * (model.qk_dim + model.v_dim) * sequence
    if model.mtp:
        met += model.mtp * (one.attention + of_moe)
        met += model.mtp * (head + 2 * model.hidden**2)
        scores *= 1 + model.mtp / model.layers
    if convention == "6N":
        return 6 * (met + head + (0 if model.tied else head))
    return 6 * (met + head) + (3 if convention == "causal" else 6) * scores


def mfu(model: Model, sequence: int, tokens_per_second: float, peak: float, how: str) -> float:
    """Model FLOPs per second of one GPU / its peak, by one of the three conventions."""
    return tokens_per_second * flops_per_token(model, sequence, how) / peak


# Memory

WORKSPACE = GiB / 4  # of cuBLAS, and the ends of the allocator's segments; an order of magnitude


def saved_bytes(model: Model, job: Job, recompute: int = 0) -> SimpleNamespace:
    """Bytes that one token leaves for the backward pass: of attention, MLP, MoE, a layer's input.

    With FlashAttention, which keeps no matrix of scores; two bytes each. tp divides all of them.
    """
    h = model.hidden
    q_out = model.heads * model.qk_dim
    kv_out = model.kv_heads * (model.qk_dim + model.v_dim)
    norms = 4 * h  # the input of a norm, and its output
    lora = 4 * (model.q_rank + model.kv_rank)  # MLA's small ranks, before and after their norms
    if model.kv_rank:  # the keys are assembled anew out of what the up-projection leaves
        kv_out = model.heads * (2 * model.qk_dim - model.rope_dim + model.v_dim)
    attention = norms + lora + 2 * q_out + 2 * kv_out + 2 * model.heads * model.v_dim
    latent = 2 * (q_out + kv_out) if model.kv_rank else 0  # made again out of the small ranks
    attention += 4 * model.heads  # FlashAttention's log of sums, in float32
    width = job.mlp_saved if model.gated else 4
    mlp = norms + width * model.ff
    if not model.gated:
        mlp += 2 * h  # dropout's masks, a byte each, twice
    routed = model.top_k * (2 * h + job.mlp_saved * model.expert_ff)  # its output is not kept
    moe = norms + routed + job.mlp_saved * model.shared_ff
    less = np.where(recompute == 1, 1, 0)
    attention = attention - less * (2 * h + latent)
    mlp = mlp - less * (2 * h + 2 * model.ff)
    moe = moe - less * (2 * h + 2 * (model.top_k * model.expert_ff + model.shared_ff))
    return SimpleNamespace(attention=attention, mlp=mlp, moe=moe, input=2 * h)


def stages_by_cost(model: Model, pp: int) -> tuple[int, int]:
    """Layers of the first and last stage, if a stage ends with the block that exceeds its share.

    So nanotron cuts (src/nanotron/models/base.py): embedding, layers, norm, head, cast and loss are
    blocks, and the head costs what its products cost. -1 says that the last stage gets no block.
    """
    layer = layer_parameters(model).attention + layer_parameters(model).mlp
    costs = [0, *[layer] * model.layers, 0, model.vocab * model.hidden, 0, 0]
    total = sum(costs)
    stages = [[] for _ in range(pp)]
    stage = 0
    so_far = 0
    for block, cost in enumerate(costs):
        stages[stage].append(block)
        so_far += cost
        if so_far > total * ((stage + 1) / pp):
            stage += 1
    first = [block for block in stages[0] if 1 <= block <= model.layers]
    last = [block for block in stages[-1] if 1 <= block <= model.layers]
    return len(first), len(last) if stages[-1] else -1


def layers_of_stages(model: Model, pp: int, by_cost: bool = False) -> tuple:
    """Layers of the first and last stage; equal shares, the first stages one more, if not by cost.

    A stage without layers is -1: such a layout does not run.
    """
    sizes, places = np.unique(pp, return_inverse=True)
    ends = []
    for size in sizes.tolist():
        if by_cost:
            ends.append(stages_by_cost(model, size))
        else:
            ends.append((-(-model.layers // size), model.layers // size or -1))
    first, last = np.array(ends).T
    return first[places].reshape(np.shape(pp)), last[places].reshape(np.shape(pp))


def stage_bytes(
    model: Model, job: Job, layout: Layout, layers: int, first: bool, last: bool
) -> dict[str, np.ndarray]:
    """Bytes on each GPU of a stage with so many layers, by part, at the worst moment of a step."""
    one = layer_parameters(model)
    dp, tp, pp, cp, ep = layout[:5]
    moe = 0
    if model.experts:  # the dense layers lie in the first stage
        dense = np.minimum(model.dense_layers, layers) * (first | (pp == 1))
        moe = layers - dense + (model.mtp if last else 0)
    mlps = layers - moe + (model.mtp if last and model.experts else 0)
    table = (model.vocab + model.positions * first) * model.hidden
    tables = (first + last - (model.tied if first and last else 0)) * table
    plain = (layers * one.attention + mlps * one.mlp + moe * one.shared + tables) / tp
    plain = plain + layers * one.norms + moe * one.router  # these are whole on every rank of tp
    routed = moe * model.experts * one.expert / ep
    replicas = dp * cp
    routed_replicas = np.maximum(replicas * tp / ep, 1)

    def sharded(bytes_each: float, from_stage: int) -> np.ndarray:
        cut = layout.zero >= from_stage
        over = np.where(cut, replicas, 1)
        return bytes_each * (plain / over + routed / np.where(cut, routed_replicas, 1))

    widest = (one.attention + one.mlp) / tp
    if model.experts and not model.dense_layers:
        widest = (one.attention + one.shared) / tp + one.router + one.expert
    trained = 1.0
    if job.lora:  # an adapter adds rank x (in + out) to a matrix of in x out
        trained = 2 * job.lora / model.hidden
    tokens = layout.micro_batch * job.sequence / cp / tp
    saved = saved_bytes(model, job, layout.recompute)
    of_layer = layers * saved.attention + mlps * saved.mlp + moe * saved.moe
    kept_whole = layers * job.keep_gathered * 4 * model.hidden * (tp - 1)
    whole = np.where(layout.recompute == 2, layers * saved.input, of_layer)
    micro_batches = job.batch / (dp * layout.micro_batch)
    in_flight = 1
    if first:
        more = np.where(layout.chunks > 1, 1 + (pp - 1) / (pp * layout.chunks), 1)
        in_flight = np.minimum(pp * more, micro_batches)
        if job.schedule == "gpipe":
            in_flight = np.where(pp > 1, micro_batches, 1)
    again = np.where(layout.recompute == 2, of_layer / np.maximum(layers, 1), 0)  # one layer's
    logits = tokens * model.vocab * job.logit_bytes * last
    activations = tokens * (whole * in_flight + again)
    gathered = np.where(layout.zero == 3, 2 * 2 * (plain + routed) / np.maximum(layers, 1), 0)
    return {
        "weights": sharded(job.weight_bytes, 3),
        "gradients": sharded(job.grad_bytes, 2) * trained,
        "bfloat16 gradients": job.half_bytes * (plain + routed) * trained,
        "one layer's gradients": job.layer_bytes * trained * widest,
        "optimizer states": sharded(job.state_bytes, 1) * trained * (not job.offload),
        "buckets": job.bucket_bytes * (plain + routed) * trained * (dp > 1) * (layout.zero == 0),
        "layers gathered": gathered,  # this one and the next
        "activations": activations + tokens * kept_whole * in_flight,
        "allocator's reserve": job.reserve * activations * (tp > 1),
        "logits": logits,
        "workspaces": WORKSPACE + 0 * activations,
    }


def memory(model: Model, job: Job, layout: Layout) -> dict[str, np.ndarray]:
    """Bytes on the most loaded GPU, by part: the worse of the first and the last stage."""
    most, least = layers_of_stages(model, layout.pp, job.by_cost)
    front = stage_bytes(model, job, layout, most, True, False)
    back = stage_bytes(model, job, layout, least, False, True)
    alone = stage_bytes(model, job, layout, model.layers, True, True)
    worse = sum(back.values()) > sum(front.values())
    parts = {}
    for part in front:
        parts[part] = np.where(worse, back[part], front[part])
        parts[part] = np.where(layout.pp == 1, alone[part], parts[part])
    return parts


# Time

LINK_SHARE = 0.8  # of a link's rate that NCCL reaches: 370 of 450 GB/s on 8 H100 (nccl-tests #212)
LATENCY = 20e-6  # seconds that a collective takes even if it is empty
EXCHANGE = 0.2  # of the multiprocessors run an all-to-all: DeepEP's 20 of 132, HybridEP's 32 of 148


def group_rate(gpu: SimpleNamespace, ranks: int, stride: int) -> np.ndarray:
    """Bytes per second and GPU in a group of ranks that are `stride` apart.

    Inside an NVLink domain: the GPU's links. Across: a ring leaves the domain through the network
    cards of all members that it has there, one each.
    """
    inside = np.maximum(gpu.domain // stride, 1)  # members per domain
    across = np.minimum(gpu.nvlink, gpu.network * np.minimum(inside, ranks))
    return LINK_SHARE * np.where(ranks * stride <= gpu.domain, gpu.nvlink, across)


def slowest_stage(layers: int, head: float, pp: int, chunks: int) -> np.ndarray:
    """The work of the slowest stage, in layers; the head counts as so many of them.

    All pieces but the last have equally many layers, the last one the rest and the head.
    """
    pieces = pp * chunks
    slowest = np.inf
    for each in (-(-layers // pieces), -(-layers // pieces) + 1):
        rest = np.maximum(layers - (pieces - 1) * each, 0)
        last = (chunks - 1) * each + rest + head
        slowest = np.minimum(slowest, np.maximum(np.where(pp > 1, chunks * each, 0), last))
    return slowest


def groups_met(model: Model, groups: int) -> np.ndarray:
    """In how many of so many groups of experts a token's choices lie, if routing is even."""
    missed = 1.0
    for taken in range(model.top_k):
        others = np.maximum(model.experts - model.experts / groups - taken, 0)
        missed = missed * others / (model.experts - taken)
    return groups * (1 - missed)


def dispatch_seconds(model: Model, gpu: SimpleNamespace, ep: int, sent: float) -> np.ndarray:
    """Seconds of one all-to-all of tokens among experts, `sent` bytes per GPU and copy.

    One copy crosses to each NVLink domain that a token needs, through the GPU's own card, and
    NVLink hands it to each GPU there that has one of its experts (DeepEP, HybridEP).
    """
    domains = -(-ep // gpu.domain)
    near = groups_met(model, ep) * (1 - 1 / np.minimum(ep, gpu.domain)) / gpu.nvlink
    met = np.minimum(groups_met(model, domains), model.top_groups or np.inf)
    far = met * (1 - 1 / domains) / gpu.network
    return sent * np.maximum(near, far) / LINK_SHARE + LATENCY


def hides(job: Job, layout: Layout) -> np.ndarray:
    """Whether experts' all-to-alls run behind the products of another micro-batch.

    The forward pass of one runs next to the backward pass of another, so there must be two, stages
    must be interleaved, and layers not recomputed whole (Megatron's transformer_config.py).
    """
    two = job.batch >= 2 * layout.dp * layout.micro_batch
    schedule = (layout.pp == 1) | (layout.chunks > 1)
    return job.hide & (layout.ep > 1) & two & schedule & (layout.recompute < 2)


def exchange_seconds(
    model: Model, job: Job, layout: Layout, gpu: SimpleNamespace, layers: float, products: float
) -> np.ndarray:
    """Seconds of a micro-batch's all-to-alls in so many MoE layers, less what products hide."""
    _, tp, _, cp, ep = layout[:5]
    sent = 2 * layout.micro_batch * job.sequence * model.hidden / (cp * tp)
    calls = np.where(layout.recompute == 2, 6, 4) * layers * (ep > 1)  # there, back, both ways
    whole = calls * dispatch_seconds(model, gpu, ep, sent)
    least = np.maximum(EXCHANGE * whole, whole - products)
    return np.where(hides(job, layout), least, whole)


def micro_batch_seconds(
    model: Model, job: Job, layout: Layout, gpu: SimpleNamespace
) -> dict[str, np.ndarray]:
    """Seconds that one stage works on one micro-batch, forward and backward, by part."""
    _, tp, pp, cp, ep = layout[:5]
    h = model.hidden
    tokens = layout.micro_batch * job.sequence / cp  # of all ranks of a tensor-parallel group
    layers = model.layers / pp  # of the largest stage
    if not job.by_cost:
        layers = layout.chunks * -(-model.layers // (pp * layout.chunks))
    passes = np.where(layout.recompute == 2, 4 / 3, 1)  # a forward more
    both_ways = np.where(layout.recompute == 2, 3, 2)  # forward, backward, and forward again
    if job.lora:
        passes = passes - 1 / 3  # no gradients of weights
    of_scores = 3 * model.layers * model.heads * (model.qk_dim + model.v_dim) * job.sequence
    of_head = 6 * model.vocab * model.hidden * (1 + model.mtp)
    of_layers = flops_per_token(model, job.sequence) - of_scores - of_head
    slowest = model.layers / pp * (1 + of_head / of_layers)
    if not job.by_cost:
        head = of_head / of_layers * model.layers
        slowest = slowest_stage(model.layers, head, pp, layout.chunks)
    one = layer_parameters(model)
    flops = of_layers / model.layers * slowest + 2 * layers * one.up * (layout.recompute == 1)
    rate = gpu.efficiency * (gpu.fp8 if job.compute == "fp8" else gpu.bf16)
    share = tokens * passes / tp
    saved = saved_bytes(model, job)
    moe_layers = layers * (1 - model.dense_layers / model.layers) if model.experts else 0
    touched = layers * saved.attention + (layers - moe_layers) * saved.mlp
    touched += moe_layers * (saved.moe + 2 * model.top_k * h)  # experts' outputs are moved, too
    hidden_bytes = 2 * tokens * h
    ring = (tp - 1) / tp * hidden_bytes  # an all-gather or reduce-scatter of the activations
    split = layers if model.shared_ff else layers - moe_layers  # tp splits no routed expert
    calls = 2 * (layers + split) * both_ways * (tp > 1)  # of attention, and of MLPs
    tensor = calls * (ring / group_rate(gpu, tp, 1) + LATENCY)
    kv = 2 * 2 * tokens / tp * model.kv_heads * model.qk_dim  # keys and values of a rank
    context = (both_ways + 1) * layers * (cp - 1) * (kv / group_rate(gpu, cp, tp) + LATENCY)
    routed = 6 * moe_layers * model.top_k * one.expert
    products = share * (flops + (gpu.efficiency / gpu.grouped - 1) * routed) / rate
    weights = moe_layers * one.expert
    read = 3 * job.weight_bytes + 2 * job.grad_bytes  # forward, twice backward; gradients in, out
    read = read * weights * model.experts / ep / gpu.hbm
    unfed = read - share * routed / rate * gpu.efficiency / gpu.grouped  # by few tokens per expert
    return {
        "matrix products": products,
        "attention scores": share * of_scores / pp / (gpu.efficiency * gpu.bf16),
        "experts' weights, by HBM": np.maximum(unfed, 0),
        "elementwise, by HBM": 3 * tokens * passes * touched / tp / gpu.hbm,
        "tensor parallel": tensor,
        "context parallel": context,
        "expert parallel": exchange_seconds(model, job, layout, gpu, moe_layers, products),
    }


def data_parallel_seconds(
    model: Model, job: Job, layout: Layout, gpu: SimpleNamespace, one: np.ndarray
) -> dict[str, np.ndarray]:
    """Seconds of a step that data parallelism adds, and the optimizer.

    `one` is a micro-batch's time: a third of it forward, the rest backward, and they hide what runs
    meanwhile. Without sharding gradients are summed once; ZeRO-1 sums, and gathers the new weights;
    ZeRO-2 sums after each micro-batch; ZeRO-3 gathers weights for each, forward and backward.
    """
    dp, tp, pp, cp, ep = layout[:5]
    count = parameters(model)
    experts = count["experts"] / (pp * ep)
    copied = count["norms"] + count["routers"]  # whole on every rank of tp
    plain = (sum(count.values()) - count["experts"] - copied) / (pp * tp) + copied / pp
    replicas = dp * cp
    of_experts = np.maximum(replicas * tp / ep, 1)
    ring = (replicas - 1) / replicas * plain / group_rate(gpu, replicas, tp)
    ring = ring + (of_experts - 1) / of_experts * experts / group_rate(gpu, of_experts, ep)
    trained = 2 * job.lora / model.hidden if job.lora else 1
    zero = layout.zero
    times = job.batch / (dp * layout.micro_batch)
    gather = job.weight_bytes * ring
    reduce = job.grad_bytes * ring * trained
    forward = np.where(zero == 3, times, zero >= 1) * gather
    backward = np.where(zero >= 2, times, np.where(zero == 1, 1, 2)) * reduce
    backward = backward + np.where(zero == 3, times, 0) * gather
    exposed = np.maximum(forward - np.where(zero == 3, times, 1) * one / 3, 0)
    exposed = exposed + np.maximum(backward - np.where(zero >= 2, times, 1) * one * 2 / 3, 0)
    owned = plain / np.where(zero >= 1, replicas, 1)
    owned = owned + experts / np.where(zero >= 1, of_experts, 1)
    moved = (job.weight_bytes + job.grad_bytes + 2 * job.state_bytes) * owned * trained
    optimizer = moved / (gpu.pcie if job.offload else gpu.hbm)
    return {"data parallel, exposed": exposed, "optimizer": optimizer}


def seconds(model: Model, job: Job, layout: Layout, gpu: SimpleNamespace) -> dict[str, np.ndarray]:
    """Seconds of one step by part; all of it exposed, the parts that hide are taken off already."""
    dp, tp, pp, cp, _ = layout[:5]
    micro_batches = job.batch / (dp * layout.micro_batch)
    parts = micro_batch_seconds(model, job, layout, gpu)
    one = sum(parts.values())
    step = {name: micro_batches * value for name, value in parts.items()}
    idle = (pp - 1) / layout.chunks * one
    if job.schedule == "zb-h1" and not job.lora:  # gradients of weights, one of three or four
        idle = idle * np.where(layout.recompute == 2, 1 / 2, 1 / 3)  # passes, fill the bubble
    step["bubble"] = idle
    sent = 2 * layout.micro_batch * job.sequence * model.hidden / (tp * cp)
    hop = sent / group_rate(gpu, pp, dp * cp * tp) + LATENCY
    hops = 2 * (micro_batches * layout.chunks + pp - 1) * (pp > 1)
    step["pipeline sends"] = hops * hop * np.where(layout.chunks > 1, 0.5, 1)
    return step | data_parallel_seconds(model, job, layout, gpu, one)


# What it is called


def read_config(config: dict) -> Model:
    """The shape in a Hugging Face config.json."""
    if "n_embd" in config:  # GPT-2's words
        h = config["n_embd"]
        heads = config["n_head"]
        return Model(
            layers=config["n_layer"], hidden=h, heads=heads, kv_heads=heads, qk_dim=h // heads,
            v_dim=h // heads, ff=config.get("n_inner") or 4 * h, vocab=config["vocab_size"],
            tied=True, gated=False, positions=config["n_positions"],
        )  # fmt: skip
    h = config["hidden_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or h // heads
    rope = config.get("qk_rope_head_dim", 0)
    expert_ff = config.get("moe_intermediate_size", config["intermediate_size"])
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = max(config.get(name) or 0 for name in names)
    shared_ff = config.get("shared_expert_intermediate_size") or 0
    shared_ff += (config.get("n_shared_experts") or 0) * expert_ff
    return Model(
        layers=config["num_hidden_layers"],
        hidden=h,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        qk_dim=config.get("qk_nope_head_dim", head_dim) + rope,
        v_dim=config.get("v_head_dim", head_dim),
        ff=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        gated=True,
        experts=experts,
        top_k=config.get("num_experts_per_tok", 0) if experts else 0,
        expert_ff=expert_ff if experts else 0,
        shared_ff=shared_ff if experts else 0,
        dense_layers=config.get("first_k_dense_replace", 0),
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=config.get("kv_lora_rank") or 0,
        rope_dim=rope if config.get("kv_lora_rank") else 0,
        mtp=config.get("num_nextn_predict_layers", 0),
        top_groups=config.get("topk_group") or 0,
    )


@cache
def known_models() -> dict[str, dict]:
    return json.loads((DATA / "models.json").read_text(encoding="utf-8"))


@cache
def known_gpus() -> dict[str, SimpleNamespace]:
    listed = json.loads((DATA / "gpus.json").read_text(encoding="utf-8"))
    return {name: SimpleNamespace(name=name, **row) for name, row in listed.items()}
