"""Memory is foretold to the byte: each claim FAILs when its line, or its formula, is broken.

Breaks that do not touch each other's claims are planted together, since a play trains 14 times.
"""

import pytest

from course.playing import Lazily
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "profiling/05_memory.py"
lesson = Lazily(LESSON)

# Its snapshot, its segments and a limit of memory are CUDA's allocator's; autocast to CUDA does
# nothing with tensors that C++ sees on the CPU, and hooks for saved ones see them there, too.
ON_GPUS = OnGpus(
    changes=[
        ("checkpoint_wrapper(block)\n", 'checkpoint_wrapper(block, determinism_check="none")\n'),
        ('        "offload": Plan(offload=True),\n', ""),
        ('        "autocast": Plan(autocast=True),\n', ""),
        ("        check_fragmentation_on_gpu()\n", "        pass\n"),
        ("        check_out_of_memory_on_gpu(device, path)\n", "        pass\n"),
        ("    compare_on_gpus(device)\n", ""),
    ],
    hardware={
        f"{job}{claim}": "DDP's first buckets live on there"
        for job in ("many tokens", "few tokens")
        for claim in (
            ": bytes per parameter, end",
            ": buckets at the peak, in kB",
            ": share of the largest category",
            ", shard: saves, per P",
        )
    },
    ranks=(1, 2),
)

RECORDED = [  # sections 4, 5 and 7 need no training
    ("    check_fragmentation(device)\n", ""),
    ("    check_out_of_memory(device, options.snapshot)\n", ""),
    ("    check_against_the_allocator(device)\n", ""),
]
NOT_RECORDED = [
    (
        "    for name, job in JOBS.items():\n        settled",
        "    for name, job in ():\n        settled",
    ),
    ("    check_the_plain_step(lines)\n    check_cures(lines)\n    check_order(lines)\n", ""),
]
ONE_UNIT = "    for unit in (model,):\n        fully"
PIECES = " or plan.pieces > 1 else 0"

LINES = {  # name: (changes, what FAILs)
    "wrong theories": (
        [
            ("moments=8 * job.P / ranks", "moments=4 * job.P / ranks"),  # Adam has one moment
            ("return 36 * job.D +", "return 32 * job.D +"),  # autocast halves everything
            (PIECES, " else 0"),  # accumulation saves gradients
            ("flops += products + attention - 8 * job.L * D**2", "flops += products + attention"),
            ("4 * (job.P + job.P - job.P_root) + 4 * job.P", "4 * job.P + 4 * job.P"),
            ("(68 * D + 4 * job.heads + 16)", "(64 * D + 4 * job.heads + 16)"),  # none goes twice
        ],
        {
            "many tokens: moments at the peak, in kB",
            "many tokens: share of the largest category",
            "few tokens: moments at the peak, in kB",
            "few tokens: share of the largest category",
            "many tokens, 4 micro-batches: saves, per P",
            "few tokens, 4 micro-batches: saves, per P",
            "many tokens, autocast: saves, per P",
            "recompute: FLOPs / the plain step's",
            "many tokens, shard: saves, per P",
            "few tokens, shard: saves, per P",
            "shard: bytes sent / the plain step's",
            "offload: MB moved",
            "many tokens: places in the order, wrong",
            "few tokens: places in the order, wrong",
        },
    ),
    "other steps": (
        [
            ("            model.blocks[i] = checkpoint_wrapper(block)\n", "            pass\n"),
            ("                stack.enter_context(model.no_sync())\n", "                pass\n"),
            ("set_to_none=not plan.zeros", "set_to_none=True"),
            ("gradient_as_bucket_view=plan.views", "gradient_as_bucket_view=False"),
            ("(device.type, torch.bfloat16)", "(device.type, enabled=False)"),
            ("    for unit in (*model.blocks, model):\n        fully", ONE_UNIT),
            ("not x.is_floating_point()", "x.ndim > 2 or not x.is_floating_point()"),
        ],
        {
            "many tokens, recompute: saves, per P",
            "recompute: FLOPs / the plain step's",
            "4 micro-batches: bytes sent / the plain step's",
            "many tokens, set_to_none=False: saves, per P",
            "few tokens, set_to_none=False: saves, per P",
            "few tokens, bucket views: saves, per P",
            "many tokens, autocast: saves, per P",
            "many tokens, shard: saves, per P",
            "few tokens, shard: saves, per P",
            "shard: bytes sent / the plain step's",
            "many tokens, offload: saves, per P",
            "offload: MB moved",
            "many tokens: places in the order, wrong",
            "few tokens: places in the order, wrong",
        },
    ),
    "an optimizer with arrays of its own (Try)": (
        [
            ("fused=True)\n        if plan.shard", "foreach=True)\n        if plan.shard"),
            ("    check_cures(lines)\n    check_order(lines)\n", ""),
            ("plan in CURES[name].items():\n            lines[", "plan in ():\n            lines["),
        ],
        {
            "few tokens: activations at the peak, in kB",
            "few tokens: work at the peak, in kB",
            "few tokens: gradients at the peak, in kB",
            "few tokens: share of the largest category",
        },
    ),
}  # fmt: skip
OF_THE_RECORDER = {
    "a recorder that misses, an allocator without pages, another line that asks": (
        [
            ("                    block[0] %= PAGE\n", "                    pass\n"),
            ("if storage._cdata not in known:", "if storage.nbytes() < 500_000:"),
            ('    "": (4 * OOM_JOB.D,),', '    "": (8 * OOM_JOB.D,),'),
            ('    "self.up(": (16', '    "self.up(": (8'),
            ('    "F.gelu(": (16', '    "F.gelu(": (8'),
            ('    "self.qkv(": (12', '    "self.qkv(": (8'),
            ('    "F.scaled": (4 * OOM_JOB.D, 4', '    "F.scaled": (8 * OOM_JOB.D, 8'),
            ('    "self.norm": (4 * OOM_JOB.D, 4)', '    "self.norm": (8 * OOM_JOB.D, 8)'),
        ],
        {
            "expandable: 24 MiB, answered",
            "asked for by this expression: bytes",
            "peak above the start, in MB: allocator's",
        },
    ),
}  # fmt: skip


BREAKS = [
    Breaks(
        LINES,
        changes=RECORDED,
        alone=["an optimizer with arrays of its own (Try)"],  # it leaves out the cures
        deadline=250,
    ),
    Breaks(OF_THE_RECORDER, ranks=1, changes=NOT_RECORDED, deadline=250),
]


def test_segments_are_cut_best_fit_and_merged() -> None:
    allocator = lesson.CachingAllocator(100 * lesson.MIB)
    MIB = lesson.MIB
    assert allocator.malloc("small", MIB)
    assert allocator.reserved == 2 * MIB
    assert allocator.malloc("a", 8 * MIB)
    assert allocator.malloc("b", 8 * MIB)  # of the same segment
    assert allocator.reserved == 22 * MIB
    assert allocator.malloc("own", 11 * MIB)
    assert allocator.reserved == 34 * MIB  # a segment of its own, of whole pages
    allocator.free("a")
    allocator.free("b")
    assert allocator.malloc("c", 17 * MIB)  # neighbors that are free are one block
    assert allocator.reserved == 34 * MIB
    allocator.free("c")
    assert allocator.malloc("large", 80 * MIB)  # the free segment goes back first
    assert allocator.reserved == 94 * MIB
    assert not allocator.malloc("more", 20 * MIB)


@pytest.mark.parametrize("n", [1, 4, 64])
def test_a_foretold_peak_shrinks_with_what_it_is_cured_of(n: int) -> None:
    job = lesson.Job(L=32, D=4096, B=8, T=2048, V=50_304, heads=32, context=2048)
    plain = lesson.foretell(job, lesson.Plan(), n)[1].total()
    for plan in (lesson.Plan(recompute=True), lesson.Plan(offload=True), lesson.Plan(pieces=8)):
        assert lesson.foretell(job, plan, n)[1].total() < plain
    kept = [
        lesson.kept_by_block(job, lesson.Plan(**{cure: True})) for cure in ("zeros", "autocast")
    ]
    assert kept == [64 * 4096 + 4 * 32 + 16, 36 * 4096 + 4 * 32 + 16]


def test_what_saves_nothing_comes_last_and_what_is_free_first() -> None:
    rows = {"useless": (0, 0.0), "dear": (10, 1.0), "free": (1, 0.0), "freer": (2, 0.0)}
    assert lesson.order(rows) == ["freer", "free", "dear", "useless"]
