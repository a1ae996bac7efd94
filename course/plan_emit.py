"""A layout as the settings of a trainer, to paste; names as these versions' sources have them."""

import json

from course.plan import Job, Layout

VERSIONS = {
    "torchtitan": "torchtitan of 2026-08-21 (b5bcd76): torchtitan/config/configs.py",
    "megatron": "Megatron-LM of 2026-08-22 (d98e8a6), core 0.20: megatron/training/arguments.py",
    "deepspeed": "DeepSpeed 0.19.6: deepspeed/runtime/zero/config.py",
    "accelerate": "accelerate 1.15.0.dev0 (16cb6eb): src/accelerate/commands/launch.py",
}


def torchtitan(layout: Layout, job: Job) -> str:
    sharded = layout.zero > 0  # it shards states alone (ZeRO-1) in no way: next is ZeRO-2
    flags = {
        "parallelism.data_parallel_replicate_degree": 1 if sharded else layout.dp,
        "parallelism.data_parallel_shard_degree": layout.dp if sharded else 1,
        "parallelism.fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"
        if layout.chunks > 1
        else "1F1B",
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.expert_parallel_degree": layout.ep,
        "training.local_batch_size": job.batch // layout.dp
        if layout.pp > 1
        else layout.micro_batch,
    }
    return " \\\n".join(f"--{name}={value}" for name, value in flags.items())


def megatron(layout: Layout, job: Job) -> str:
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
    if layout.ep > 1:
        flags.append("--expert-tensor-parallel-size 1")
    if layout.tp > 1:
        flags.append("--sequence-parallel")
    if layout.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {layout.chunks}")
    if layout.zero in (1, 2):
        flags.append("--use-distributed-optimizer")
    if layout.zero == 3:
        flags.append("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params")
    if layout.recompute == 2:
        flags.append("--recompute-granularity full --recompute-method uniform")
        flags.append("--recompute-num-layers 1")
    if job.compute == "fp8":
        flags.append("--fp8-format hybrid")
    if job.offload:
        flags.append("--optimizer-cpu-offload")
    return " \\\n".join(flags)


def deepspeed(layout: Layout, job: Job) -> str:
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


def accelerate(layout: Layout, job: Job) -> str:
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
    ]
    return "accelerate launch \\\n" + " \\\n".join(flags)


WRITERS = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
}


def settings(trainer: str, layout: Layout, job: Job) -> str:
    """The settings, after a line that says of which version the names are."""
    return f"# {VERSIONS[trainer]}\n{WRITERS[trainer](layout, job)}"
