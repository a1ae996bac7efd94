"""A layout as the settings of a trainer, to paste; names as these versions' sources have them.

tests/engine/test_plan.py lists every name with the file in which it was found.
"""

import json

from course.plan import Job, Layout, Model, hides

VERSIONS = {
    "torchtitan": "torchtitan of 2026-08-21 (b5bcd76): torchtitan/config/configs.py",
    "megatron": "Megatron-LM of 2026-08-22 (d98e8a6), core 0.20: megatron/training/arguments.py",
    "deepspeed": "DeepSpeed 0.19.6 (edaa722): deepspeed/runtime/config.py",
    "accelerate": "accelerate 1.15.0.dev0 (16cb6eb): src/accelerate/commands/launch.py",
}


def pieces(model: Model, layout: Layout) -> list[int]:
    """Layers of each piece of a pipeline: as many as fit equally, and the last has the rest."""
    count = layout.pp * layout.chunks
    each = -(-model.layers // count)
    found = []
    for left in range(count, 0, -1):
        spare = model.layers - sum(found) - (left - 1)  # each further piece needs a layer
        found.append(min(each, spare))
    return found


def torchtitan(model: Model, layout: Layout, job: Job) -> str:
    schedules = {"1f1b": "Interleaved1F1B" if layout.chunks > 1 else "1F1B", "gpipe": "GPipe"}
    if job.schedule not in schedules:
        raise ValueError("--emit torchtitan knows 1F1B and GPipe; of zero bubble it has ZBV alone")
    if model.experts and layout.tp > 1 and layout.ep == 1:  # its models/common/moe_sharding.py
        raise ValueError("--emit torchtitan splits experts by tp where ep is 1; take ep above 1")
    sharded = layout.zero > 0  # it shards states alone (ZeRO-1) in no way: next is ZeRO-2
    flags = {
        "parallelism.data_parallel_replicate_degree": 1 if sharded else layout.dp,
        "parallelism.data_parallel_shard_degree": layout.dp if sharded else 1,
        "parallelism.fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.expert_parallel_degree": layout.ep,
        "training.num_tokens_per_microbatch_per_dp_rank": layout.micro_batch * job.sequence,
        "training.num_tokens_per_train_step": job.batch * job.sequence,
        "training.max_context_length": job.sequence,
    }
    if layout.pp > 1:
        flags["parallelism.pipeline_parallel_schedule"] = schedules[job.schedule]
        flags["parallelism.pipeline_parallel_layers_per_stage"] = max(pieces(model, layout))
        flags["parallelism.num_pp_microbatches"] = job.batch // (layout.dp * layout.micro_batch)
    if job.offload:
        flags["training.enable_cpu_offload"] = "True"
    return " \\\n".join(f"--{name}={value}" for name, value in flags.items())


def megatron_pipeline(model: Model, layout: Layout) -> str:
    """How Megatron cuts the layers: E embedding, t layers, m further predictions, L the loss."""
    if layout.pp == 1:
        return ""
    first, *middle, last = pieces(model, layout)
    if model.layers % (layout.pp * layout.chunks) == 0 and not model.mtp:
        return f"--num-virtual-stages-per-pipeline-rank {layout.chunks}"
    stages = [f"Et*{first}", *[f"t*{count}" for count in middle]]
    stages.append(f"t*{last}" + "m" * model.mtp + "L")
    return f"--pipeline-model-parallel-layout '{'|'.join(stages)}'"


def megatron(model: Model, layout: Layout, job: Job) -> str:
    if job.schedule != "1f1b":
        raise ValueError(f"--emit megatron knows 1F1B and its interleaving, got {job.schedule}")
    flags = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
        f"--expert-model-parallel-size {layout.ep}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {job.batch}",
        f"--seq-length {job.sequence}",
        "--bf16",
    ]
    modules = "layernorm"
    if model.kv_rank:
        modules += " mla_up_proj"
    if model.experts:
        modules += " moe_act"
    sharding = "--data-parallel-sharding-strategy optim_grads_params"
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    for needed, flag in (
        (layout.tp > 1, "--sequence-parallel"),
        (layout.pp > 1, megatron_pipeline(model, layout)),
        (model.experts and layout.tp * layout.ep > 1, "--expert-tensor-parallel-size 1"),
        (layout.ep > 1, "--moe-token-dispatcher-type flex"),  # a copy per GPU; needs DeepEP
        (hides(job, layout), "--overlap-moe-expert-parallel-comm"),
        (layout.zero in (1, 2), "--use-distributed-optimizer"),
        (layout.zero == 3, f"--use-megatron-fsdp {sharding}"),
        (layout.recompute == 1, f"--recompute-granularity selective --recompute-modules {modules}"),
        (layout.recompute == 2, full),
        (job.compute == "fp8", "--fp8-format hybrid"),
        (job.offload, "--optimizer-cpu-offload"),
    ):
        if needed:
            flags.append(flag)
    return " \\\n".join(flags)


def deepspeed(model: Model, layout: Layout, job: Job) -> str:
    if layout.pp > 1 or layout.ep > 1 or layout.cp > 1:
        raise ValueError("--emit deepspeed writes dp, tp and ZeRO: give --pp, --ep and --cp as 1")
    zero = {"stage": layout.zero}
    if job.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": job.batch // (layout.dp * layout.micro_batch),
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp}
    return json.dumps(config, indent=2)


def accelerate(model: Model, layout: Layout, job: Job) -> str:
    if layout.pp > 1 or layout.ep > 1:
        raise ValueError("--emit accelerate writes dp, tp, cp and FSDP: give --pp and --ep as 1")
    sharded = layout.zero > 0  # FSDP2 that does not reshard is ZeRO-2, the next to ZeRO-1
    flags = [
        "--use_fsdp --fsdp_version 2 --use_parallelism_config true",
        f"--fsdp_reshard_after_forward {str(layout.zero == 3).lower()}",
        f"--parallelism_config_dp_replicate_size {1 if sharded else layout.dp}",
        f"--parallelism_config_dp_shard_size {layout.dp if sharded else 1}",
        f"--parallelism_config_tp_size {layout.tp}",
        f"--parallelism_config_cp_size {layout.cp}",
        f"--fsdp_activation_checkpointing {str(layout.recompute == 2).lower()}",
        "--mixed_precision bf16",
        f"--gradient_accumulation_steps {job.batch // (layout.dp * layout.micro_batch)}",
    ]
    return "accelerate launch \\\n" + " \\\n".join(flags)


WRITERS = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
}


def settings(trainer: str, model: Model, layout: Layout, job: Job) -> str:
    """The settings, after a line that says of which version the names are."""
    return f"# {VERSIONS[trainer]}\n{WRITERS[trainer](model, layout, job)}"
