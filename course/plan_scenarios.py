"""`course plan --scenarios`: the guide's cases and its advice, on H100 next to GB300, as tables."""

from collections.abc import Callable

import numpy as np

from course.plan import LINK_SHARE, GiB, Job, Layout, Model, known_gpus, known_models, read_config
from course.plan_command import words
from course.planning import Cluster, Planned, all_layouts, best, chosen, evaluate, fastest

SCENARIOS = (  # the guide's, and one of experts: model, GPUs, sequence, sequences per step
    ("resnet-50", 8, 1, 2048),
    ("gpt2-1.5b", 4, 1024, 512),
    ("llama-7b", 8, 4096, 1024),
    ("llama-70b", 64, 4096, 1024),
    ("gpt3-175b", 1024, 2048, 1536),
    ("qwen3-30b-a3b", 8, 4096, 1024),
)
KINDS = ("h100", "gb300")

# What is often said, of which scenario, and which layouts obey it.
ADVICE: tuple[tuple[str, str, Callable[[Layout], np.ndarray]], ...] = (
    ("FSDP (ZeRO-3) alone", "llama-7b", lambda one: (one.zero == 3) & (one.tp == 1)),
    ("FSDP alone", "llama-70b", lambda one: (one.zero == 3) & (one.tp == 1)),
    ("TP 8 in the node, FSDP across", "llama-70b", lambda one: (one.zero == 3) & (one.tp == 8)),
    ("TP 8 in the node, a pipeline across", "llama-70b", lambda one: (one.tp == 8) & (one.pp > 1)),
    ("recompute every layer", "llama-70b", lambda one: one.recompute == 2),
    ("TP 8 in the node, a pipeline across", "gpt3-175b", lambda one: (one.tp == 8) & (one.pp > 1)),
    ("a pipeline without interleaving", "gpt3-175b", lambda one: (one.pp > 1) & (one.chunks == 1)),
    ("EP over all GPUs", "qwen3-30b-a3b", lambda one: one.ep == 8),
    ("every expert on every GPU (EP 1)", "qwen3-30b-a3b", lambda one: one.ep == 1),
)


def images(config: dict, cluster: Cluster, batch: int) -> tuple[float, float]:
    """Bytes per GPU and seconds per step of a network that sees images, data parallel; fp32 SGD.

    `moved` counts each time that an element of an activation is read or written, nothing fused: a
    convolution 2 times forward and 4 backward, batch norm 3 and 5, ReLU 2 and 3.
    """
    each = batch / cluster.gpus
    size = 12 * config["parameters"] + each * 2 * config["activations"]  # activations in bfloat16
    gpu = cluster.gpu
    compute = 3 * config["forward_flops"] * each / (gpu.efficiency * gpu.bf16)
    compute += each * 2 * config["moved"] / gpu.hbm
    inside = cluster.gpus <= gpu.domain
    link = LINK_SHARE * (gpu.nvlink if inside else gpu.network)
    sent = 2 * (cluster.gpus - 1) / cluster.gpus * 4 * config["parameters"] / link
    return size, compute + max(sent - 2 / 3 * compute, 0)


def searched(name: str, kind: str) -> tuple[Model, Job, Cluster, Planned]:
    """A scenario on GPUs of one kind: every layout."""
    gpus, sequence, batch = {one: rest for one, *rest in SCENARIOS}[name]
    cluster = Cluster(gpus, known_gpus()[kind])
    model = read_config(known_models()[name])
    job = Job(sequence=sequence, batch=batch, reserve=cluster.gpu.reserve)
    return model, job, cluster, evaluate(model, job, all_layouts(model, job, cluster), cluster)


def scenarios() -> str:
    """The best layout of each scenario."""
    rows = ["| Model, GPUs | H100 | GB300 |", "|---|---|---|"]
    for name, gpus, _, batch in SCENARIOS:
        cells = []
        for kind in KINDS:
            if name == "resnet-50":
                cluster = Cluster(gpus, known_gpus()[kind])
                size, step = images(known_models()[name], cluster, batch)
                cells.append(f"DDP; {size / GiB:.0f} GiB, {batch / step:,.0f} images/s")
                continue
            _, job, _, planned = searched(name, kind)
            at = best(planned, 1)[0]
            rate = job.batch * job.sequence / planned.seconds[at]
            said = words(chosen(planned.layout, at), job)
            cells.append(f"{said}; {planned.bytes[at] / GiB:.0f} GiB, {rate:,.0f} tokens/s")
        rows.append(f"| {name}, {gpus} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


def advice() -> str:
    """How many times as long a step takes if one follows what is often said."""
    plans = {}
    for name in {name for _, name, _ in ADVICE}:
        for kind in KINDS:
            plans[name, kind] = searched(name, kind)[3]
    rows = ["| Advice | for | H100: a step takes | GB300 |", "|---|---|--:|--:|"]
    for said, name, obey in ADVICE:
        cells = []
        for kind in KINDS:
            planned = plans[name, kind]
            at = fastest(planned, obey(planned.layout))
            first = planned.seconds[best(planned, 1)[0]]
            longer = "does not fit" if at is None else f"{planned.seconds[at] / first:.2f} x"
            cells.append(longer)
        rows.append(f"| {said} | {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)
