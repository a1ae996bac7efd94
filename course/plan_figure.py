"""`course plan --figure`: time and memory of every layout, and scaling from 8 to 16,384 GPUs."""

import numpy as np

from course.plan import GiB, Job, Model
from course.planning import Cluster, all_layouts, best, evaluate, room


def scaling(model: Model, job: Job, cluster: Cluster) -> tuple[list[int], list[float]]:
    """Tokens per second of the best layout, at numbers of GPUs where there is one; batch fixed."""
    sizes = []
    rates = []
    for power in range(3, 15):
        more = cluster._replace(gpus=2**power)
        layouts = all_layouts(model, job, more)
        if not len(layouts.dp):
            continue
        planned = evaluate(model, job, layouts, more)
        for at in best(planned, 1):
            sizes.append(more.gpus)
            rates.append(job.batch * job.sequence / float(planned.seconds[at]))
    return sizes, rates


def draw(model: Model, job: Job, cluster: Cluster, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    planned = evaluate(model, job, all_layouts(model, job, cluster), cluster)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.scatter(
        planned.bytes / GiB, planned.seconds, s=4, c=np.log2(planned.layout.tp), cmap="viridis"
    )
    left.axvline(room(cluster.gpu) / GiB, color="tab:red")
    left.set(xscale="log", yscale="log", xlabel="GiB per GPU", ylabel="seconds per step")
    left.set_title(f"{len(planned.seconds):,} layouts on {cluster.gpus} GPUs, by tp")
    sizes, rates = scaling(model, job, cluster)
    right.plot(sizes, rates, "o-", label="best layout")
    if sizes:
        right.plot(sizes, [rates[0] * n / sizes[0] for n in sizes], ":", label="linear")
    right.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens per second")
    right.set_title(f"{job.batch} sequences per step, whatever the GPUs")
    right.legend()
    figure.savefig(path, metadata={"Description": "time and memory of all layouts; scaling"}
                   if path.endswith("png") else None)  # fmt: skip
