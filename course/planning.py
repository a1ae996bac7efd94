"""Choosing a layout: all that a cluster allows, which of them run, the best, why not the others."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from course.plan import (
    GiB,
    Job,
    Layout,
    Model,
    layers_of_stages,
    memory,
    mfu,
    parameters,
    seconds,
)

CONTEXT = 1  # GiB that CUDA and NCCL take beyond what the allocator sees
# Share of the room that may be full: rows of the Playbook that filled more ran three times slower,
# as the allocator freed its cache and asked again.
HEADROOM = 0.85

# What an optimizer keeps per parameter, in bytes: a float32 copy of the weight, and its moments.
OPTIMIZERS = {"adam": 12, "adam-bf16": 8, "adam-8bit": 6, "muon": 8, "sgd": 4}

FORMULAS = {
    "weights": "2 bytes each; / (dp cp) if ZeRO-3",
    "gradients": "4 bytes each, float32; / (dp cp) from ZeRO-2 on",
    "bfloat16 gradients": "2 bytes each, before they are added to the float32 ones",
    "one layer's gradients": "2 bytes each, while they are made",
    "optimizer states": "12 bytes each (Adam); / (dp cp) from ZeRO-1 on; experts / (dp cp tp / ep)",
    "buckets": "2 bytes each, of DDP",
    "layers gathered": "2 layers of 2-byte weights, if ZeRO-3",
    "activations": "tokens / (tp cp) x bytes per layer x layers x micro-batches in flight (pp; "
    "GPipe: all)",
    "allocator's reserve": "share of the activations, if tp > 1",
    "logits": "tokens / (tp cp) x vocabulary x 6 bytes, last stage",
    "workspaces": "0.25 GiB, an order of magnitude",
    "matrix products": "6 FLOPs per parameter met and token / (peak x efficiency)",
    "attention scores": "3 L a (d_qk + d_v) s FLOPs per token, causal half, in bfloat16",
    "experts' weights, by HBM": "weights three times, gradients twice / HBM, beyond the products",
    "elementwise, by HBM": "3 x the bytes of the activations / HBM bandwidth",
    "tensor parallel": "8 per layer and micro-batch, 4 if all of its experts are routed ones: "
    "(tp-1)/tp x 2 s b h bytes / link; exposed; half as many more if all is recomputed",
    "context parallel": "3 (cp-1) keys and values per layer / link; exposed",
    "expert parallel": "4 all-to-alls per layer, 2 h bytes per token and GPU met / link; a fifth "
    "is left where they hide behind products",
    "bubble": "(pp-1) / v micro-batches' time; a third of it in ZB-H1",
    "pipeline sends": "2 (m v + pp-1) x 2 s b h / (tp cp) bytes / link; half if interleaved",
    "data parallel, exposed": "weights less what forward hides, gradients less what backward does",
    "optimizer": "states read and written once / HBM bandwidth (PCIe if offloaded)",
}

NOT_MODELED = (
    "energy, stragglers and failures, checkpoints, data loading, uneven routing of experts,",
    "async tensor parallelism, activations kept in 8 bits, the optimizer step of Muon",
)


class Cluster(NamedTuple):
    """So many GPUs of one type."""

    gpus: int
    gpu: SimpleNamespace  # a row of plan_data/gpus.json


class Planned(NamedTuple):
    """What became of many layouts; all arrays have one entry per layout."""

    layout: Layout
    bytes: np.ndarray
    seconds: np.ndarray
    fits: np.ndarray  # with headroom
    tight: np.ndarray  # without


def room(gpu: SimpleNamespace) -> float:
    """Bytes that a training may allocate on a GPU."""
    return (gpu.memory - CONTEXT) * GiB


def broken_rules(model: Model, job: Job, layout: Layout) -> dict[str, np.ndarray]:
    """Which layouts break which rule: what divides what, and what is at least as large."""
    dp, tp, pp, cp, ep = layout[:5]
    per_step = dp * layout.micro_batch
    micro_batches = job.batch // np.maximum(per_step, 1)
    interleaved = layout.chunks > 1
    pieces = pp * layout.chunks
    _, least = layers_of_stages(model, pieces)
    return {
        "tp must divide the {model.heads} attention heads, and got {layout.tp}; take one "
        "of its divisors": model.heads % tp > 0,
        "a stage needs a layer, and there are {model.layers}; got pp={layout.pp} x "
        "chunks={layout.chunks}; take fewer stages": least < 1,
        "ep must divide the {model.experts} experts, and got {layout.ep}; take a divisor": (ep > 1)
        & (max(model.experts, 1) % ep > 0),
        "ep must divide dp x cp x tp, and got {layout.ep}; take a divisor": dp * cp * tp % ep > 0,
        "dp x micro-batch must divide the batch of {job.batch} sequences; got "
        "dp={layout.dp}, micro-batch={layout.micro_batch}; change the batch": job.batch % per_step
        > 0,
        "cp x tp must divide the sequence of {job.sequence} tokens; got cp={layout.cp}, "
        "tp={layout.tp}": job.sequence % (cp * tp) > 0,
        "interleaving needs pp > 1 and micro-batches in multiples of pp; got pp={layout.pp}, "
        "chunks={layout.chunks}": interleaved & ((pp == 1) | (micro_batches % pp > 0)),
        "interleaving goes with 1F1B; got {job.schedule} and chunks={layout.chunks}": interleaved
        & (job.schedule != "1f1b"),
    }


def check_layout(model: Model, job: Job, layout: Layout, cluster: Cluster) -> None:
    """ValueError with rule and value of the first rule that this one layout breaks."""
    used = layout.dp * layout.tp * layout.pp * layout.cp
    if used != cluster.gpus:
        raise ValueError(f"dp x tp x pp x cp must be the {cluster.gpus} GPUs, got {used}")
    for rule, broken in broken_rules(model, job, layout).items():
        if np.any(broken):
            raise ValueError(rule.format(model=model, job=job, layout=layout))


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**k for k in range(int(most).bit_length())]


def all_layouts(model: Model, job: Job, cluster: Cluster) -> Layout:
    """Every layout of these GPUs that breaks no rule; arrays."""
    n = cluster.gpus
    pps = [pp for pp in range(1, min(model.layers, n) + 1) if n % pp == 0]
    axes = {
        "tp": [tp for tp in powers(min(2 * cluster.gpu.domain, 16, n)) if model.heads % tp == 0],
        "pp": [pp for pp in pps if pp <= 64],
        "cp": powers(min(8, max(job.sequence // 4096, 1))),
        "ep": [ep for ep in powers(min(64, n)) if max(model.experts, 1) % ep == 0],
        "micro_batch": powers(8),
        "chunks": [1, 2, 4, 8],
        "zero": [0, 1, 3],
        "recompute": [0, 1, 2],
    }
    grid = np.meshgrid(*axes.values(), indexing="ij")
    flat = {name: values.ravel() for name, values in zip(axes, grid, strict=True)}
    others = flat["tp"] * flat["pp"] * flat["cp"]
    whole = (n % others == 0) & ~((flat["zero"] == 3) & (flat["pp"] > 1))
    flat = {name: values[whole] for name, values in flat.items()}
    layout = Layout(dp=n // others[whole], **flat)
    broken = np.any(list(broken_rules(model, job, layout).values()), axis=0)
    return Layout(*[axis[~broken] for axis in layout])


def evaluate(model: Model, job: Job, layout: Layout, cluster: Cluster) -> Planned:
    """Memory and time of every layout."""
    total = sum(memory(model, job, layout).values())
    time = sum(seconds(model, job, layout, cluster.gpu).values())
    limit = room(cluster.gpu)
    return Planned(layout, total, time, total <= HEADROOM * limit, total <= limit)


def chosen(layout: Layout, at: int) -> Layout:
    """One layout of many."""
    return Layout(*[int(axis[at]) for axis in layout])


def fastest(planned: Planned, among: np.ndarray) -> int | None:
    """Where the fastest layout that fits stands, among some; None if there is none."""
    places = np.flatnonzero(among & planned.fits)
    return int(places[np.argmin(planned.seconds[places])]) if len(places) else None


def best(planned: Planned, count: int = 5) -> list[int]:
    """The fastest layouts that fit, of each mesh (tp, pp, cp, ep, sharded weights or not) one."""
    order = np.argsort(np.where(planned.fits, planned.seconds, np.inf), kind="stable")
    found = {}
    for at in order[: np.count_nonzero(planned.fits)].tolist():
        found.setdefault(mesh(planned.layout, at), at)
        if len(found) == count:
            break
    return list(found.values())


def mesh(layout: Layout, at: int) -> tuple[int, ...]:
    """What tells two meshes apart."""
    axes = (layout.tp, layout.pp, layout.cp, layout.ep, layout.zero == 3)
    return tuple(int(axis[at]) for axis in axes)


def rank_of(planned: Planned, wanted: tuple) -> int | None:
    """The place of a mesh (tp, pp, cp, ep, whether weights are sharded) among those that fit.

    Among those that shard weights, or those that do not; None if it does not fit.
    """
    seen = []
    for at in best(planned, len(planned.seconds)):
        one = mesh(planned.layout, at)
        if one[4] == wanted[4]:
            seen.append(one)
    return seen.index(wanted) + 1 if wanted in seen else None


def alternatives(layout: Layout, cluster: Cluster) -> dict[str, np.ndarray]:
    """What a reader would ask about: a name, and which layouts are meant."""
    one = (layout.tp == 1) & (layout.pp == 1) & (layout.cp == 1)
    domain = cluster.gpu.domain
    return {
        "replicas alone (DDP)": one & (layout.zero == 0),
        "replicas, states sharded (ZeRO-1)": one & (layout.zero == 1),
        "FSDP alone (ZeRO-3)": one & (layout.zero == 3),
        "TP inside the NVLink domain, DP else": (layout.pp == 1)
        & (layout.tp == min(8, domain, cluster.gpus)),
        "TP across NVLink domains": layout.tp > domain,
        "pipeline alone, TP 1": (layout.tp == 1) & (layout.pp > 1),
        "experts not spread (EP 1)": layout.ep == 1,
        "no recomputation": layout.recompute == 0,
        "full recomputation": layout.recompute == 2,
    }


def at_one(parts: dict[str, np.ndarray], at: int) -> dict[str, float]:
    """The parts of one of many layouts."""
    found = {}
    for name, value in parts.items():
        found[name] = float(value[at] if np.ndim(value) else value)
    return found


def why_not(model: Model, job: Job, planned: Planned, cluster: Cluster, first: int) -> list[str]:
    """One line for each alternative that is not the choice: does not fit, or how much slower."""
    lines = []
    bytes_of = memory(model, job, planned.layout)
    seconds_of = seconds(model, job, planned.layout, cluster.gpu)
    for name, among in alternatives(planned.layout, cluster).items():
        if not np.any(among) or among[first]:
            continue
        at = fastest(planned, among)
        if at is None:
            at = int(np.argmin(np.where(among, planned.bytes, np.inf)))
            parts = at_one(bytes_of, at)
            most = max(parts, key=parts.get)
            limit = HEADROOM * room(cluster.gpu) / GiB
            needs = f"needs {planned.bytes[at] / GiB:,.1f} GiB of {limit:.1f}"
            most = f"{parts[most] / GiB:,.0f} of {most}"
            lines.append(f"{name}: does not fit, {needs} ({most})")
            continue
        slower = planned.seconds[at] / planned.seconds[first]
        here = at_one(seconds_of, at)
        there = at_one(seconds_of, first)
        more = {part: here[part] - there[part] for part in here}
        most = max(more, key=more.get)
        over = link(most, chosen(planned.layout, at), cluster)
        lines.append(f"{name}: {slower:.2f} x as long, {most} + {more[most]:.2f} s{over}")
    return lines


def link(part: str, layout: Layout, cluster: Cluster) -> str:
    """Over which link a part goes, in words."""
    spans = {"tensor parallel": layout.tp, "expert parallel": layout.ep}
    spans |= {"pipeline sends": cluster.gpus, "data parallel, exposed": cluster.gpus}
    if part not in spans:
        return ""
    inside = spans[part] <= cluster.gpu.domain
    rate = cluster.gpu.nvlink if inside else cluster.gpu.network
    return f" (over {rate / 1e9:.0f} GB/s per {'GPU' if inside else 'card'})"


def cheapest_change(model: Model, job: Job, cluster: Cluster) -> str:
    """What would make a model fit that fits nowhere: the first change that suffices."""
    changes = {
        "an 8-bit Adam (--optimizer adam-8bit)": (job._replace(state_bytes=6), cluster),
        "states in the host's memory (--offload)": (job._replace(offload=True), cluster),
        "adapters alone (--lora 16)": (job._replace(lora=16), cluster),
    }
    for factor in (2, 4, 8, 16, 32, 64, 128, 256):
        more = cluster._replace(gpus=cluster.gpus * factor)
        changes[f"{more.gpus} GPUs"] = (job._replace(batch=max(job.batch, more.gpus)), more)
    for name, (changed, on) in changes.items():
        layout = all_layouts(model, changed, on)
        if len(layout.dp) and np.any(evaluate(model, changed, layout, on).fits):
            return name
    return "more than 256 times as many GPUs"


def summary(model: Model, job: Job, cluster: Cluster, step: float) -> dict[str, float]:
    """Tokens per second and GPU, and MFU by three conventions, against the peak of `compute`."""
    per_gpu = job.batch * job.sequence / step / cluster.gpus
    peak = cluster.gpu.fp8 if job.compute == "fp8" else cluster.gpu.bf16
    said = {"tokens/s": per_gpu * cluster.gpus, "tokens/s/GPU": per_gpu}
    for convention in ("causal", "full", "6N"):
        said[f"MFU, {convention}"] = mfu(model, job.sequence, per_gpu, peak, convention)
    said["parameters"] = sum(parameters(model).values())
    return said
