"""`course plan`: will it fit, how long does it take, which mesh, and why not the others."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

# NumPy comes with the functions below, not with `course --help`: the command answers at once.


def count(text: str) -> float:
    """A number, as 15e12 or 15T."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    last = text[-1:].upper()
    return float(text[:-1]) * units[last] if last in units else float(text)


def known(name: str, listed: list[str], what: str) -> str:
    if name not in listed:
        raise ValueError(f"unknown {what} {name}: one of {', '.join(listed)}")
    return name


def shape_of(name: str) -> dict:
    """A preset, or the config.json at a path."""
    from course.plan import known_models

    if Path(name).suffix == ".json":
        return json.loads(Path(name).read_text(encoding="utf-8"))
    return known_models()[known(name, [*known_models()], "model")]


def job_of(options: argparse.Namespace, gpu: SimpleNamespace) -> object:
    from course.plan import Job
    from course.planning import OPTIMIZERS

    sequence = options.sequence
    batch = options.batch or max(options.gpus, 4 * 2**20 // sequence)
    return Job(
        sequence=sequence,
        batch=batch,
        state_bytes=OPTIMIZERS[options.optimizer],
        compute=options.compute,
        offload=options.offload,
        lora=options.lora,
        reserve=gpu.reserve,
        hide=not options.no_hide,
        schedule=options.schedule,
    )


def cluster_of(options: argparse.Namespace) -> object:
    from course.plan import known_gpus
    from course.planning import Cluster

    if options.gpus < 1:
        raise ValueError(f"a cluster has at least 1 GPU, got {options.gpus}; give --gpus")
    gpu = known_gpus()[known(options.gpu, [*known_gpus()], "GPU")]
    if options.network:
        gpu = SimpleNamespace(**vars(gpu) | {"network": options.network * 1e9})
    if options.domain:
        gpu = SimpleNamespace(**vars(gpu) | {"domain": options.domain})
    return Cluster(options.gpus, gpu)


def words(layout: object, job: object) -> str:
    """A layout in one line."""
    from course.plan import hides

    said = [f"{axis}={getattr(layout, axis)}" for axis in ("dp", "tp", "pp", "cp", "ep")]
    said = [word for word in said if not word.endswith("=1")]
    said = said if len(said) > 0 else ["dp=1"]
    said.append(f"micro-batch={layout.micro_batch}")
    if layout.chunks > 1:
        said.append(f"interleaved v={layout.chunks}")
    elif layout.pp > 1:
        said.append({"1f1b": "1F1B", "gpipe": "GPipe", "zb-h1": "ZB-H1"}[job.schedule])
    said.append(("replicated", "ZeRO-1", "ZeRO-2", "ZeRO-3/FSDP")[layout.zero])
    said.append(("no recomputation", "selective", "full recomputation")[layout.recompute])
    if hides(job, layout):
        said.append("all-to-alls hidden")
    return ", ".join(said)


def show_parts(model: object, job: object, layout: object, cluster: object) -> None:
    """Memory and seconds by part, each with its formula."""
    from course.plan import GiB, memory, seconds
    from course.planning import FORMULAS, HEADROOM, room

    parts = memory(model, job, layout)
    total = sum(parts.values()) / GiB
    limit = room(cluster.gpu) / GiB
    fills = f"a plan may fill {HEADROOM * limit:.1f} ({HEADROOM:.0%} of {limit:.1f})"
    print(f"\nMemory per GPU, most loaded stage: {total:.1f} GiB; {fills}")
    for name, value in parts.items():
        if value > 0:
            print(f"  {value / GiB:8.2f} GiB  {name:22} {FORMULAS[name]}")
    if total > limit:
        print(f"  does not fit, by {total - limit:.1f} GiB")
    elif total > HEADROOM * limit:
        print("  fits without headroom: the allocator will free its cache and ask again")
    parts = seconds(model, job, layout, cluster.gpu)
    step = float(sum(parts.values()))
    print(f"\nSeconds per step: {step:.3f}")
    for name, value in parts.items():
        if value > 0:
            print(f"  {float(value):8.3f} s    {name:22} {FORMULAS[name]}")


def show_rates(model: object, job: object, cluster: object, step: float, options: object) -> None:
    """Tokens per second, MFU by convention, and what a time or a number of tokens comes to."""
    from course.planning import summary

    said = summary(model, job, cluster, step)
    print(f"\n{said['tokens/s']:,.0f} tokens/s, {said['tokens/s/GPU']:,.0f} per GPU")
    peak = f"dense {job.compute} peak"
    print(f"MFU {said['MFU, causal']:.1%} (half of the attention matrix, no input embedding), "
          f"{said['MFU, full']:.1%} (all of it), {said['MFU, 6N']:.1%} (6N); {peak}")  # fmt: skip
    if options.days:
        tokens = said["tokens/s"] * options.days * 86400
        print(f"{options.days:g} days: {tokens / 1e9:,.0f} billion tokens,"
              f" {tokens / said['parameters']:.1f} per parameter")  # fmt: skip
    if options.tokens:
        print(f"{options.tokens:.3g} tokens: {options.tokens / said['tokens/s'] / 86400:,.1f} days")
    days = options.days or (options.tokens or 0) / said["tokens/s"] / 86400
    if options.price and days:
        print(
            f"cost: {options.price * cluster.gpus * days * 24:,.0f} at {options.price} per GPU-hour"
        )


def show_end(cluster: object) -> None:
    from course.planning import NOT_MODELED

    gpu = cluster.gpu
    print(f"\nCalibrated: efficiency {gpu.efficiency}", end="")
    if gpu.grouped != gpu.efficiency:
        print(f", of experts {gpu.grouped}", end="")
    print(f" ({gpu.fitted})", end="")
    if gpu.reserve:
        print(f"; allocator's reserve {gpu.reserve} ({gpu.reserve_fitted})", end="")
    print("\nNot modeled: " + "\n  ".join(NOT_MODELED))


def plan_one(model: object, job: object, cluster: object, options: argparse.Namespace) -> int:
    """Judge the layout that the options name."""
    from course.plan import Layout, seconds
    from course.planning import check_layout

    axes = {axis: getattr(options, axis) or 1 for axis in ("tp", "pp", "cp", "ep", "chunks")}
    others = axes["tp"] * axes["pp"] * axes["cp"]
    if cluster.gpus % others:
        raise ValueError(f"tp x pp x cp must divide the {cluster.gpus} GPUs, got {others}")
    layout = Layout(
        dp=cluster.gpus // others, micro_batch=options.micro_batch or 1, zero=options.zero,
        recompute=options.recompute, **axes,
    )  # fmt: skip
    check_layout(model, job, layout, cluster)
    print(words(layout, job))
    show_parts(model, job, layout, cluster)
    step = float(sum(seconds(model, job, layout, cluster.gpu).values()))
    show_rates(model, job, cluster, step, options)
    show_end(cluster)
    return emit(options, model, layout, job)


def plan_best(model: object, job: object, cluster: object, options: argparse.Namespace) -> int:
    """Search, and say what is best and why not the others."""
    from course.plan import GiB
    from course.planning import all_layouts, best, cheapest_change, chosen, evaluate, why_not

    layouts = all_layouts(model, job, cluster)
    if not len(layouts.dp):
        raise ValueError(
            f"no layout divides {job.batch} sequences over {cluster.gpus} GPUs: take a batch that"
            f" is a multiple of {cluster.gpus}"
        )
    planned = evaluate(model, job, layouts, cluster)
    if not planned.fits.any() and planned.tight.any():
        print("Nothing fits with headroom; without it:")
        planned = planned._replace(fits=planned.tight)
    first, *others = best(planned) or [None]
    if first is None:
        change = cheapest_change(model, job, cluster)
        print(f"It does not fit on {cluster.gpus} {cluster.gpu.name}, with any of"
              f" {len(layouts.dp):,} layouts.\nThe cheapest change: {change}.")  # fmt: skip
        return 1
    print(f"Best of {len(layouts.dp):,} layouts: {words(chosen(layouts, first), job)}")
    show_parts(model, job, chosen(layouts, first), cluster)
    show_rates(model, job, cluster, float(planned.seconds[first]), options)
    print("\nThe next best meshes:")
    for at in others:
        slower = planned.seconds[at] / planned.seconds[first]
        print(f"  {slower:.2f} x as long, {planned.bytes[at] / GiB:.0f} GiB:"
              f" {words(chosen(layouts, at), job)}")  # fmt: skip
    print("\nWhy not")
    for line in why_not(model, job, planned, cluster, first):
        print(f"  {line}")
    show_end(cluster)
    return emit(options, model, chosen(layouts, first), job)


def plan_images(config: dict, cluster: object, options: argparse.Namespace) -> int:
    from course.plan import GiB
    from course.plan_scenarios import images
    from course.planning import room

    batch = options.batch or 256 * cluster.gpus
    size, step = images(config, cluster, batch)
    print(f"Data parallel (DDP), {batch} images per step\n\n{size / GiB:.1f} GiB per GPU of"
          f" {room(cluster.gpu) / GiB:.1f}: weights, gradients and momentum 12 bytes each,"
          f" activations {2 * config['activations'] / 1e6:.0f} MB per image\n{step:.3f} s per step,"
          f" {batch / step:,.0f} images/s\nWhy not shard: the states are"
          f" {12 * config['parameters'] / GiB:.1f} GiB")  # fmt: skip
    show_end(cluster)
    return 0


def emit(options: argparse.Namespace, model: object, layout: object, job: object) -> int:
    if options.emit:
        from course.plan_emit import settings

        print("\n" + settings(options.emit, model, layout, job))
    return 0


def plan(options: argparse.Namespace) -> int:
    """Be `course plan`."""
    if options.scenarios:
        from course.plan_scenarios import advice, scenarios

        print(f"{scenarios()}\n\n{advice()}")
        return 0
    if options.validate:
        from course.plan_validate import show

        return show()
    try:
        if options.rows:
            return plan_rows(options)
        if not options.model:
            raise ValueError("needs --model NAME or config.json, --gpus N, --gpu TYPE; or --rows")
        cluster = cluster_of(options)
        config = shape_of(options.model)
        if config.get("model_type") == "resnet":
            return plan_images(config, cluster, options)
        return plan_model(config, cluster, options)
    except (ValueError, KeyError) as error:
        missing = f"no {error} in {options.model}: not a transformer's config.json"
        print(f"course plan: {missing if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 2


def plan_model(config: dict, cluster: object, options: argparse.Namespace) -> int:
    from course.plan import read_config

    model = read_config(config)
    job = job_of(options, cluster.gpu)
    if options.figure:
        from course.plan_figure import draw

        draw(model, job, cluster, options.figure)
    if options.tp or options.pp or options.cp or options.ep:
        return plan_one(model, job, cluster, options)
    return plan_best(model, job, cluster, options)


def plan_rows(options: argparse.Namespace) -> int:
    from course.plan_rows import with_predictions, write_rows

    if not options.out:
        raise ValueError("--rows needs --out OUT.csv")
    models = Path(options.models) if options.models else None
    rows = with_predictions(Path(options.rows), models)
    write_rows(rows, Path(options.out))
    unread = [row for row in rows if row["not_read"] and not row["pred_s"]]
    print(f"{len(rows)} rows in {options.out}, {len(unread)} of them not read:")
    for reason in sorted({row["not_read"] for row in unread}):
        print(f"  {sum(row['not_read'] == reason for row in unread)} x {reason}")
    return 0


def add(subparsers: argparse._SubParsersAction) -> None:
    """Add `course plan`."""
    said = "will it fit, how long does it take, which mesh: plan a training run"
    parser = subparsers.add_parser("plan", help=said, description=said)
    for flag, kind, text in (
        ("--model", str, "a preset, or a Hugging Face config.json"),
        ("--gpu", str, "their type, such as h100"),
        ("--batch", int, "sequences per step (default: 4M tokens)"),
        ("--days", float, "how many tokens in so many days"),
        ("--tokens", count, "how many days for so many tokens, such as 15T"),
        ("--price", float, "of a GPU-hour"),
        ("--network", float, "GB/s one way per network card, if it is not the type's usual"),
        ("--domain", int, "GPUs per NVLink domain, if it is not the type's usual"),
        ("--rows", str, "a published table, as CSV"),
        ("--out", str, "where to write it, with predictions"),
        ("--models", str, "shapes of models that the table names, as JSON"),
        ("--figure", str, "draw time and memory of all layouts, and scaling"),
        ("--tp", int, "judge one layout: tensor parallel"),
        ("--pp", int, "pipeline stages"),
        ("--cp", int, "context parallel"),
        ("--ep", int, "expert parallel"),
        ("--micro-batch", int, "sequences"),
        ("--chunks", int, "of layers per stage: interleaving"),
    ):
        parser.add_argument(flag, type=kind, help=text)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=4096, help="tokens")
    parser.add_argument("--zero", type=int, choices=[0, 1, 2, 3], default=1)
    parser.add_argument("--recompute", type=int, choices=[0, 1, 2], default=0)
    parser.add_argument("--compute", choices=["bf16", "fp8"], default="bf16")
    optimizers = ["adam", "adam-bf16", "adam-8bit", "muon", "sgd"]
    parser.add_argument("--optimizer", choices=optimizers, default="adam")
    parser.add_argument("--offload", action="store_true", help="optimizer states on the host")
    said = "of a pipeline (default 1f1b, interleaved where that is faster)"
    schedules = ["1f1b", "gpipe", "zb-h1"]
    parser.add_argument("--schedule", choices=schedules, default="1f1b", help=said)
    said = "no all-to-all of experts hides behind products"
    parser.add_argument("--no-hide", action="store_true", help=said)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters alone")
    trainers = ["torchtitan", "megatron", "deepspeed", "accelerate"]
    parser.add_argument("--emit", choices=trainers, help="print its settings")
    parser.add_argument("--scenarios", action="store_true", help="the guide's, as a table")
    said = "hold it against the published rows in tests/data"
    parser.add_argument("--validate", action="store_true", help=said)
    parser.set_defaults(run=plan)
