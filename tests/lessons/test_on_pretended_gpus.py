"""Every lesson's ranks on pretended GPUs: what a GPU would refuse, and no physics, fails here.

See tests/helpers/pretended_gpus.py for what is known there and what is not.
"""

import re

import pytest

from course.lessons import LESSONS, world_sizes_of
from tests.helpers.pretended_gpus import play_on_gpus
from tests.helpers.spared import NO_JIT, STARTS_PROCESSES, SURVIVING

# What a lesson is made smaller by, for this machine, or spared, since C++ asks for CUDA there: (the
# passage, what it becomes).
SMALLER = {
    **STARTS_PROCESSES,  # these are started without pretended GPUs
    "communication/04_alpha_beta.py": [
        ("[4**6, 4**10, 4**13, 4**15]", "[4**6, 4**10, 4**13]"),
        (
            "    for _ in range(3):\n        for size in sizes:",
            "    for size in sizes:\n        if size:",
        ),
    ],
    "fundamentals/03_measure_your_machine.py": [
        ("n, m = 16384, 8192", "n, m = 512, 512"),
        ("for k in range(3, 15)]", "for k in range(3, 11)]"),  # so small, no kernel is left out
        ("(4**14 / curve[4**14])", "(4**10 / curve[4**10])"),
        ("(4**5, 4**9, 4**14)", "(4**5, 4**9, 4**10)"),
        ("torch.zeros(2**26,", "torch.zeros(2**20,"),
        ("repeats: int = 10", "repeats: int = 1"),
    ],
    # DeepSpeed's layers are its own, and take seconds to load.
    "fsdp/09_inference.py": [
        ("max(1, 16 // WORLD_SIZE)", "max(1, 4 // WORLD_SIZE)"),
        ("    deepspeed = import_deepspeed(prompt_BT.device)\n", "    deepspeed = None\n"),
        ('BIG = {"L": 16,', 'BIG = {"L": 2,'),
        ("repeats: int = 20", "repeats: int = 1"),
        ("repeats: int = 30", "repeats: int = 1"),
    ],
    # NVML knows real GPUs only, and the last trainings none.
    "fundamentals/06_scaling_efficiency.py": [
        ("    check_utilization(device)\n", ""),
        ("    check_learning_rates(digits)\n", ""),
        ("WIDTH = 4096", "WIDTH = 16"),
        ("batch = 64 * BATCH", "batch = BATCH"),
        ("ROUNDS = 5", "ROUNDS = 2"),
    ],
    # Its ranks across a cable are forked, and on gloo. Kineto asks the driver for CUDA's events.
    "communication/06_overlap.py": [
        ("    check_across_the_cable(link, why_not, options.figure)\n", ""),
        ("        activities.append(ProfilerActivity.CUDA)\n", "        pass\n"),
        ("batch(RANK, 4096, 4096)", "batch(RANK, 16, D)"),
        ("min(max(times, 1), 16)", "2"),
        ("REPEATS = 3", "REPEATS = 1"),
        ("torch.randn(8192, 8192,", "torch.randn(64, 64,"),
        ("torch.empty(1 << 26,", "torch.empty(1 << 16,"),
    ],
    "communication/07_hierarchical_collectives.py": [
        (
            'local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))',
            "local_ranks = WORLD_SIZE // 2",
        ),
        ("64 * ELEMENTS if", "ELEMENTS if"),
    ],
    "communication/08_gradient_compression.py": [
        ("STEPS = 60", "STEPS = 10"),
        ("    across = RANK == 0 and WORLD_SIZE > 1\n", "    across = False\n"),
        (
            "    slow = train_across(link, why_not, runs) if WORLD_SIZE > 1 else False\n",
            "    slow = 0\n",
        ),
        ("repeats: int = 20", "repeats: int = 1"),
    ],
    SURVIVING: [*STARTS_PROCESSES[SURVIVING], ("elements: int = 2**28", "elements: int = 2**20")],
    "parallelism/01_data_parallelism_ddp.py": [
        ("EPOCHS = 10", "EPOCHS = 3"),
        ("repeats: int = 20", "repeats: int = 1"),
    ],
    "parallelism/03_model_tensor_pipeline_parallel.py": [
        ("EPOCHS = 6 * MLPS // 10", "EPOCHS = 2"),
        ("width: int = 8192", "width: int = 256"),
    ],
    "parallelism/04_buckets_and_overlap.py": [
        ("(1, 5, 25, 100, 1e6)", "(25, 1e6)"),
        ("for _ in range(16)]", "for _ in range(4)]"),
        ("repeats: int = 20", "repeats: int = 1"),
    ],
    "parallelism/05_zero2_and_zero3.py": [
        ("torch.randn(64, 8192,", "torch.randn(64, 2048,"),
        ("nn.Linear(8192, 8192, bias=False, device", "nn.Linear(2048, 2048, bias=False, device"),
    ],
    "parallelism/09_3d_parallelism.py": [
        ("STEPS = 15", "STEPS = 5"),
        ("for batch in (65_536, 262_144):", "for batch in (64, 256):"),
        ("repeats: int = 20", "repeats: int = 1"),
    ],
    "fsdp/01_fsdp_basics.py": [
        ("L: int = 16, T: int = 2048", "L: int = 2, T: int = 32"),
        ("torch.randint(32_768, (B", "torch.randint(1024, (B"),
        ("GPT(L, width, T, V=32_768, heads=width // 128)", "GPT(L, 256, T, V=1024, heads=2)"),
        ("repeats: int = 5", "repeats: int = 1"),
    ],
    # DeepSpeed asks the driver for its accelerator.
    "fsdp/02_deepspeed_config.py": [
        ("deepspeed = import_deepspeed(device, options.cpu_adam)", "deepspeed = None"),
    ],
    "fsdp/03_deepspeed_bytes.py": [
        ("deepspeed = import_deepspeed(device)", "deepspeed = None"),
    ],
    # What FSDP2 brings down in backward has no place in the pretence, so nothing is updated there.
    "fsdp/10_offload.py": [
        ("        optimizer.step()  # on the host: nothing crosses\n", ""),
        ("    deepspeed = import_deepspeed(device)\n", "    deepspeed = None\n"),
        ("math.ceil(1024 / WORLD_SIZE)", "math.ceil(64 / WORLD_SIZE)"),
        ("return 512 * WORLD_SIZE", "return 32 * WORLD_SIZE"),
        ("nbytes = 2**28", "nbytes = 2**16"),
        ("(64, 1024, 16_384)", "(4, 16)"),
        ("repeats: int = 20", "repeats: int = 1"),
    ],
    "fsdp/07_deepspeed_train.py": [
        ("deepspeed = import_deepspeed(device)", "deepspeed = None"),
        ("torch.randint(32_768, (2, 2049)", "torch.randint(1024, (2, 65)"),
        (
            "GPT(L=16, D=2048, T=2048, V=32_768, heads=16)",
            "GPT(L=2, D=256, T=64, V=1024, heads=2)",
        ),
    ],
    # DTensor asks it for the state of the GPU's random numbers.
    "fsdp/04_fsdp_refinements.py": [
        ("    check_meta_device(mesh)\n", ""),
        ("torch.randint(32_768, (2, 2049)", "torch.randint(1024, (2, 65)"),
        (
            "GPT(L=16, D=2048, T=2048, V=32_768, heads=16)",
            "GPT(L=2, D=256, T=64, V=1024, heads=2)",
        ),
        ("repeats: int = 20", "repeats: int = 1"),
    ],
    # There is no compiler for such GPUs. What C++ saves does not say that it lies on one, what is
    # recomputed does, and recomputation compares the two. Nor does the GradScaler's flag say it.
    "fsdp/05_fsdp_transformer.py": [
        ("    check_overflow(mesh)\n", ""),
        ("checkpoint_wrapper(block)", 'checkpoint_wrapper(block, determinism_check="none")'),
        (
            "context_fn=keep_results)",
            'context_fn=keep_results, determinism_check="none")',
        ),
        ('    settings["compiled"] = Recipe(None, "none", options.compile or "inductor")\n', ""),
        ("train(model, text_N, options, steps=8)", "train(model, text_N, options, steps=2)"),
    ],
    "fsdp/06_fsdp_checkpoint.py": [
        ("L=16, D=width, T=1024, V=32_768, heads=width // 64", "L=2"),
    ],
    "fsdp/08_lora.py": [
        ("L: int = 16, T: int = 2048", "L: int = 2, T: int = 32"),
        ("torch.randint(32_768, (B", "torch.randint(1024, (B"),
        ("GPT(L, width, T, V=32_768, heads=width // 128)", "GPT(L, 256, T, V=1024, heads=2)"),
        ("repeats: int = 5", "repeats: int = 1"),
    ],
    "profiling/01_distributed_profiling.py": [
        ("return 8_000_000 if", "return 80_000 if"),
        ("copy_ms * 28 / 8 * LAYERS", "copy_ms / 10"),
        ("perf_counter() - start) / 500 / 3", "perf_counter() - start) * 0 + 0.1"),
        (
            '        del jobs["tiny buckets"]\n',
            '        kept = ("healthy", "needless syncs", "straggler", "no overlap")\n'
            "        jobs = {name: jobs[name] for name in kept}\n",
        ),
    ],
    "profiling/03_nsight_and_nvtx.py": [
        ('return 180 if device.type == "cpu" else 8192', "return 180"),
        ('512 if device.type == "cpu" else 4096', "64"),
    ],
    "profiling/06_stragglers.py": [
        ("    check_the_test()\n", ""),
        ("WIDTH = 8192", "WIDTH = 16"),
        ("[shares] * 200", "[shares] * 50"),
        ("as_drawn[:20] * 4", "as_drawn[:20]"),
        ("dealt[:20] * 4", "dealt[:20]"),
    ],
    # bpftrace sees what is really called: gloo, which carries NCCL's messages.
    "profiling/07_tracing_with_ebpf.py": [
        ('nccl=device.type == "cuda"', "nccl=False"),
        ("WIDTH = 4096", "WIDTH = 512"),
    ],
    # Its snapshot, its segments and a limit of memory are CUDA's allocator's; autocast to CUDA does
    # nothing with tensors that C++ sees on the CPU, and hooks for saved ones see them there, too.
    "profiling/05_memory.py": [
        ("checkpoint_wrapper(block)\n", 'checkpoint_wrapper(block, determinism_check="none")\n'),
        ('        "offload": Plan(offload=True),\n', ""),
        ('        "autocast": Plan(autocast=True),\n', ""),
        ("        check_fragmentation_on_gpu()\n", "        pass\n"),
        ("        check_out_of_memory_on_gpu(device, path)\n", "        pass\n"),
        ("    compare_on_gpus(device)\n", ""),
    ],
    # FFCV copies on streams of CUDA's, in a thread of its own.
    "data-loading/01_ffcv_distributed_optimization.py": [
        (
            "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n",
            "    with contextlib.suppress(ImportError):\n        raise ImportError\n",
        ),
        (
            'all")\n        finish()',
            'all")\n        measure_copies(device)\n        finish()',
        ),
        ("torch.randn(256, 3,", "torch.randn(4, 3,"),
    ],
    # FFCV's own code is the same there: plain Python spares each rank seconds of compiling.
    "data-loading/02_beton_file.py": [NO_JIT],
    "data-loading/03_orders_pages_memory.py": [NO_JIT],
}
FLAGS = {
    # Above 4 million elements kernels are left out, and values are checked at each size.
    "communication/05_bandwidth_test.py": ("-e", "1M", "-f", "16", "-n", "2"),
    "fsdp/01_fsdp_basics.py": ("--steps", "5"),
    "fsdp/05_fsdp_transformer.py": ("--size", "tiny", "--steps", "2", "--batch", "2"),
    "fsdp/08_lora.py": ("--steps", "1"),
    "fsdp/09_inference.py": ("--steps", "5"),
}

# Claims that only hardware answers, or the full size, and why: (lesson, the claim, the reason).
HARDWARE = [
    *(
        (
            "communication/07_hierarchical_collectives.py",
            f"{way}: S sent by a node",
            "a network card counts its bytes",
        )
        for way in ("ring, to and fro", "ring, node by node", "hierarchy")
    ),
    *(
        ("communication/08_gradient_compression.py", claim, "10 steps of 60 are not enough")
        for claim in ("all others: accuracy on new digits", "top-k: accuracy that feedback saves")
    ),
    *(
        (
            "parallelism/01_data_parallelism_ddp.py",
            f"{way}: accuracy on new digits",
            "3 epochs of 10",
        )
        for way in ("by hand", "DDP")
    ),
    *(
        (
            "parallelism/03_model_tensor_pipeline_parallel.py",
            f"{way}: accuracy on new digits",
            "2 epochs of 6",
        )
        for way in ("pipeline", "tensor")
    ),
    (
        "fsdp/10_offload.py",
        "FSDP2: losses, error against one process",
        "Adam on the host is left out",
    ),
    *(
        ("fsdp/10_offload.py", claim, "the pretence does not see what comes down in backward")
        for claim in (
            "FSDP2: bytes down",
            "FSDP2, bfloat16: bytes up and down",
            "two micro-batches: bytes up and down",
        )
    ),
    (
        "fsdp/01_fsdp_basics.py",
        "mean of the last losses, and the bytes' entropy",
        "5 steps of 25",
    ),
    *(
        (
            SURVIVING,
            claim,
            "autocast to float16 on CUDA, which in C++ sees CPU tensors: nothing overflows",
        )
        for claim in (
            "without scaler: share that differs",
            "steps skipped from loss scale 2**16",
            "loss scale that is left",
        )
    ),
    (
        "fsdp/05_fsdp_transformer.py",
        "validation loss, at most",
        "2 steps of 20",
    ),
    *(
        (
            "fsdp/05_fsdp_transformer.py",
            f"{name}: peak memory / foretold",
            "of a tiny model, and gloo's threads let go of what they sent when they like",
        )
        for name in ("full", "selective", "none")
    ),
    *(
        ("fsdp/08_lora.py", claim, "1 step of 12")
        for claim in (
            "full fine-tuning's gain in nats, at least",
            "gain of the adapters, at least a third of it",
            "gain of the adapters, at most all of it",
        )
    ),
    (
        "fsdp/09_inference.py",
        "loss in nats per byte, below the bytes' entropy",
        "5 steps of 30",
    ),
    (
        "parallelism/09_3d_parallelism.py",
        "one process: loss of the last step, at most",
        "5 steps of 15",
    ),
    *(
        ("profiling/05_memory.py", f"{job}{claim}", "DDP's first buckets live on there")
        for job in ("many tokens", "few tokens")
        for claim in (
            ": bytes per parameter, end",
            ": buckets at the peak, in kB",
            ": share of the largest category",
            ", shard: saves, per P",
        )
    ),
    (
        "profiling/07_tracing_with_ebpf.py",
        "bytes copied to the GPU by cuMemcpy, at least",
        "the driver copies",
    ),
    (
        "communication/02_point_to_point.py",
        "NCCL: sends of 1 KiB back before the receive",
        "NCCL's buffer for small messages",
    ),
    (
        "communication/05_bandwidth_test.py",
        "400 MB all-reduce: wrong elements",
        "kernels on more than 4 million elements are left out",
    ),
]

# It is run as torchrun would run it on two real nodes; plain python starts ranks of its own.
HIERARCHY = "communication/07_hierarchical_collectives.py"
JOINS_NONE = {  # one process, which joins no group, and what it says instead
    "fundamentals/00_check_your_machine.py": "torch may use 1;",
    "profiling/04_debugging_hangs.py": "torch .*, gloo, 4 ranks per job",
}


# To a GPU four ranks are here what two are: no rings, no stages, no mesh of two dimensions. The
# longest of all; on four ranks and gloo each is played elsewhere.
TWO_ARE_ENOUGH = {
    SURVIVING,
    "communication/08_gradient_compression.py",
    "parallelism/01_data_parallelism_ddp.py",
    "parallelism/02_fsdp_zero.py",
    "parallelism/04_buckets_and_overlap.py",
    "parallelism/05_zero2_and_zero3.py",
    "fsdp/01_fsdp_basics.py",
    "fsdp/05_fsdp_transformer.py",
    "fsdp/06_fsdp_checkpoint.py",
    "fsdp/07_deepspeed_train.py",
    "fsdp/08_lora.py",
    "fsdp/09_inference.py",
    "profiling/01_distributed_profiling.py",
    "profiling/05_memory.py",
    "profiling/06_stragglers.py",
    "profiling/07_tracing_with_ebpf.py",
    "data-loading/02_beton_file.py",
}


def cases() -> list:
    """Every lesson on 1 GPU and on 4, or 2 where they are enough, as far as it takes so many."""
    found = []
    for lesson in LESSONS:
        taken = [2, 4] if lesson == HIERARCHY else world_sizes_of(lesson)
        for ranks in (1, 2 if lesson in TWO_ARE_ENOUGH or 4 not in taken else 4):
            if ranks in taken:
                found.append(pytest.param(lesson, ranks, id=f"{lesson}-{ranks}"))
    return found


@pytest.mark.deep
@pytest.mark.parametrize(("lesson", "ranks"), cases())
def test_lesson_passes_on_pretended_gpus(lesson: str, ranks: int) -> None:
    """Claims that a clock decides are not judged: there is no GPU whose speed they could tell."""
    changes = SMALLER.get(lesson, [])
    played = play_on_gpus(lesson, ranks, *changes, argv=FLAGS.get(lesson, ()), deadline=250)
    physics = {claim for path, claim, _ in HARDWARE if path == lesson}
    assert played.failed - physics == set(), played.output[-3000:]
    joined = JOINS_NONE.get(lesson, f"{ranks} ranks, NCCL")
    assert re.search(rf"^ *{joined}", played.output, re.M), "the lesson took gloo"
    assert any(row["verdict"] == "PASS" for row in played.ledger)


def test_every_exception_is_of_a_lesson_that_exists() -> None:
    known = {path for path, _, _ in HARDWARE} | {*SMALLER, *FLAGS, HIERARCHY, *JOINS_NONE}
    known |= TWO_ARE_ENOUGH
    assert known <= {*LESSONS}
