"""Memory is predicted to the byte: each claim FAILs when its line is broken."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from course.playing import Lazily, load
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
        ("    check_fragmentation(device)\n", ""),
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
            ": places in the order, wrong",
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
    ("    check_the_plain_step(lines, device)\n    check_cures(lines, device)\n", ""),
    ("    check_order(lines)\n", ""),
]
ONE_LIMIT = [  # nor does the limit need any of these
    ("    check_fragmentation(device)\n", ""),
    ("    check_against_the_allocator(device)\n", ""),
]
ONE_UNIT = "    for unit in (model,):\n        fully"
NO_CURES = [
    ("    check_cures(lines, device)\n    check_order(lines)\n", ""),
    ("plan in CURES[name].items():\n            lines[", "plan in ():\n            lines["),
]

LINES = {  # name: (changes, what FAILs)
    "gradients are kept in every plan": (
        "set_to_none=not plan.zeros",
        "set_to_none=False",
        {
            "many tokens: share of the largest category",
            "many tokens, 4 micro-batches: saves, per P",
            "many tokens, recompute: saves, per P",
            "many tokens, set_to_none=False: saves, per P",
            "many tokens, bucket views: saves, per P",
            "many tokens, shard: saves, per P",
            "many tokens, offload: saves, per P",
            "many tokens: places in the order, wrong",
            "few tokens: activations at the peak, in kB",
            "few tokens: work at the peak, in kB",
            "few tokens: gradients at the peak, in kB",
            "few tokens: share of the largest category",
            "few tokens, 4 micro-batches: saves, per P",
            "few tokens, recompute: saves, per P",
            "few tokens, set_to_none=False: saves, per P",
            "few tokens, bucket views: saves, per P",
            "few tokens, shard: saves, per P",
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
}  # fmt: skip
OF_THE_PLAIN_STEP = {
    "a model in half precision": (
        "GPT(job.L, job.D, job.context, job.V, job.heads)\n    if plan.recompute",
        "GPT(job.L, job.D, job.context, job.V, job.heads).bfloat16()\n    if plan.recompute",
        {
            f"{job} tokens: {what}"
            for job in ("many", "few")
            for what in (
                "bytes per parameter, end",
                *(
                    f"{category} at the peak, in kB"
                    for category in ("parameters", "moments", "buckets", "activations", "work")
                ),
            )
        }
        | {"few tokens: gradients at the peak, in kB"},
    ),
    "an optimizer with arrays of its own (Try)": (
        "fused=True)\n        if plan.shard",
        "foreach=True)\n        if plan.shard",
        {
            "few tokens: activations at the peak, in kB",
            "few tokens: work at the peak, in kB",
            "few tokens: gradients at the peak, in kB",
            "few tokens: share of the largest category",
        },
    ),
}
OF_THE_RECORDER = {
    "pages of 2 MiB for all": (
        "return 2 * MIB if size <= MIB else 20 * MIB",
        "return 2 * MIB",
        {"expandable: holes of 15 MiB, 24 MiB answered"},
    ),
    "a recorder that misses": (
        "if storage._cdata not in known:",
        "if storage.nbytes() < 500_000:",
        {"peak above the start, in MB: allocator's"},
    ),
    "a larger limit than is said": (  # it is met at the head
        "str(ROOM)]",
        "str(3 * ROOM // 2)]",
        {"asked for by this expression: bytes", "share of the limit that is known, at most"},
    ),
}
OF_THE_LIMIT = {
    "a smaller limit than is said": (  # it is met in the first block
        "str(ROOM)]",
        "str(ROOM // 4)]",
        {"alive / asked for, at least", "share of the limit that is known, at least"},
    ),
}


BREAKS = [
    Breaks(LINES, changes=RECORDED, deadline=250),
    Breaks(OF_THE_PLAIN_STEP, changes=[*RECORDED, *NO_CURES], deadline=250),
    Breaks(OF_THE_RECORDER, ranks=1, changes=NOT_RECORDED, deadline=250),
    Breaks(OF_THE_LIMIT, ranks=1, changes=[*NOT_RECORDED, *ONE_LIMIT], deadline=250),
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
    assert allocator.reserved == 34 * MIB  # a segment of its own, of whole 2 MiB
    allocator.free("a")
    allocator.free("b")
    assert allocator.malloc("c", 17 * MIB)  # neighbors that are free are one block
    assert allocator.reserved == 34 * MIB
    allocator.free("c")
    assert allocator.malloc("large", 80 * MIB)  # the free segment goes back first
    assert allocator.reserved == 94 * MIB
    assert not allocator.malloc("more", 20 * MIB)


def test_a_segment_begins_at_ten_mib_and_pools_are_apart() -> None:
    MIB = lesson.MIB
    sizes = [MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 11 * MIB]
    assert [lesson.segment_for(size) // MIB for size in sizes] == [2, 20, 20, 10, 12]
    allocator = lesson.CachingAllocator(100 * MIB)
    assert allocator.malloc("large", 12 * MIB)
    allocator.free("large")
    assert allocator.malloc("small", MIB)  # never cut from a large request's segment
    assert allocator.reserved == 14 * MIB


def test_the_smallest_hole_is_taken() -> None:
    MIB = lesson.MIB
    allocator = lesson.CachingAllocator(32 * MIB)
    for name, size in {"a": 12, "b": 5, "c": 7, "d": 8}.items():
        assert allocator.malloc(name, size * MIB)
    allocator.free("a")  # holes of 12 and of 7
    allocator.free("c")
    assert allocator.malloc("into the hole of 7", 6 * MIB)
    assert allocator.malloc("into that of 12", 12 * MIB)


class TorchsRules:
    """One pool of c10/cuda/CUDACachingAllocator.cpp with expandable segments, MiB by MiB.

    `mib` holds a letter per MiB of the range of addresses: '-' unmapped, '.' free, or a name.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.mib = ["-"] * (2 * capacity)

    def runs(self, letters: str) -> list[tuple[int, int]]:
        """(length, start) of the runs of these letters, the shortest first."""
        found = []
        start = 0
        for same, group in groupby(self.mib, key=lambda letter: letter in letters):
            length = len(list(group))
            found += [(length, start)] if same else []
            start += length
        return sorted(found)

    def malloc(self, name: str, size: int) -> bool:
        for length, start in self.runs("."):
            if length >= size:
                self.mib[start : start + size] = name * size
                return True
        due = 20 if size < 10 else size + size % 2
        for _ in range(2):
            mapped = len(self.mib) - self.mib.count("-")
            if mapped + due <= self.capacity:
                (start,) = [start for length, start in self.runs(".-") if length >= size][:1]
                for page in range(start // 20, -(-(start + size) // 20)):
                    whole = slice(20 * page, 20 * page + 20)
                    self.mib[whole] = ["." if x == "-" else x for x in self.mib[whole]]
                self.mib[start : start + size] = name * size
                return True
            for page in range(0, len(self.mib), 20):
                if set(self.mib[page : page + 20]) == {"."}:
                    self.mib[page : page + 20] = "-" * 20
        return False

    def free(self, name: str) -> None:
        self.mib = ["." if letter == name else letter for letter in self.mib]


class Named:
    """The rules above for the lesson's names and bytes."""

    def __init__(self, capacity: int) -> None:
        self.rules = TorchsRules(capacity // lesson.MIB)
        self.letters: dict[str, str] = {}

    def malloc(self, name: str, size: int) -> bool:
        letter = self.letters.setdefault(name, chr(ord("A") + len(self.letters)))
        return self.rules.malloc(letter, size // lesson.MIB)

    def free(self, name: str) -> None:
        self.rules.free(self.letters[name])


@pytest.mark.parametrize("whole", [20, 80])
def test_expandable_segments_answer_by_torchs_own_rules(whole: int) -> None:
    capacity = 3 * whole * lesson.MIB
    told = lesson.answers(Named(capacity), whole)
    assert told is (whole == 80)
    assert lesson.answers(lesson.CachingAllocator(capacity, expandable=True), whole) is told
    assert not lesson.answers(lesson.CachingAllocator(capacity), whole)


def test_expandable_segments_map_pages_by_the_pool() -> None:
    MIB = lesson.MIB
    allocator = lesson.CachingAllocator(100 * MIB, expandable=True)
    assert allocator.malloc("small", MIB)
    assert allocator.malloc("large", 12 * MIB)
    assert allocator.reserved == 22 * MIB
    assert allocator.malloc("more", 12 * MIB)  # 8 are mapped already
    assert allocator.reserved == 42 * MIB
    allocator.free("more")
    allocator.release()
    assert allocator.reserved == 22 * MIB  # the second page goes, the first is in use


def test_the_limit_on_a_gpu_is_never_a_byte_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch truncates fraction * total; (a / b) * b is below a for some a."""
    limits = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    for total in (84_929_347_584, 150_754_820_096, 25_390_809_088, 15_828_320_256, 47_697_362_944):
        size = SimpleNamespace(total_memory=total)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, size=size: size)
        for whole in lesson.ASKED:
            capacity = 3 * whole * lesson.MIB
            lesson.CudaAllocator(capacity)
            allowed = int(limits.pop() * total)
            assert capacity <= allowed < capacity + 2 * lesson.MIB  # a segment more is refused


def test_two_fresh_processes_ask_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own allocator, whatever this process was started with."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    asked = []

    def answer(command: list[str], env: dict, **_: object) -> SimpleNamespace:
        assert command[-1] == "--fragments"
        assert "PYTORCH_CUDA_ALLOC_CONF" not in env
        asked.append(env["PYTORCH_ALLOC_CONF"].partition(":")[2])
        model = partial(lesson.CachingAllocator, expandable=asked[-1] == "True")
        found = {whole: lesson.answers(model(3 * whole * lesson.MIB), whole) for whole in (20, 80)}
        return SimpleNamespace(stdout=json.dumps(found))

    own = load(LESSON)
    monkeypatch.setattr(own.subprocess, "run", answer)
    monkeypatch.setattr(own, "from_rank_0", lambda found: found)
    own.check_fragmentation(torch.device("cuda"))
    assert asked == ["False", "True"]
    assert [row["measured"] for row in own.ledger] == [0, 0, 0, 1]
    assert {(row["verdict"], row["kind"]) for row in own.ledger} == {("PASS", "measured")}


@pytest.mark.parametrize("n", [1, 4, 64])
def test_a_predicted_peak_shrinks_with_what_it_is_cured_of(n: int) -> None:
    job = lesson.Job(L=32, D=4096, B=8, T=2048, V=50_304, heads=32, context=2048)
    plain = lesson.predict(job, lesson.Plan(), n)[1].total()
    for plan in (lesson.Plan(recompute=True), lesson.Plan(offload=True), lesson.Plan(pieces=8)):
        assert lesson.predict(job, plan, n)[1].total() < plain
    kept = [
        lesson.kept_by_block(job, lesson.Plan(**{cure: True})) for cure in ("zeros", "autocast")
    ]
    assert kept == [64 * 4096 + 4 * 32 + 16, 36 * 4096 + 4 * 32 + 16]


def test_what_saves_nothing_comes_last_and_what_is_free_first() -> None:
    rows = {"useless": (0, 0.0), "dear": (10, 1.0), "free": (1, 0.0), "freer": (2, 0.0)}
    assert lesson.order(rows) == ["freer", "free", "dear", "useless"]


def test_each_cure_is_what_its_name_says() -> None:
    Plan = lesson.Plan
    due = {
        "4 micro-batches": Plan(pieces=4),
        "recompute": Plan(recompute=True),
        "autocast": Plan(autocast=True),
        "set_to_none=False": Plan(zeros=True),
        "bucket views": Plan(views=True),
        "shard": Plan(shard=True),
        "offload": Plan(offload=True),
    }
    assert lesson.CURES["many tokens"] == due
    few = lesson.CURES["few tokens"]
    assert few == {name: due[name] for name in few}
    assert {name: job.B * job.T for name, job in lesson.JOBS.items()} == {
        "many tokens": 512,
        "few tokens": 64,
    }


def test_states_are_sharded_over_n_ranks_and_else_on_each() -> None:
    job = lesson.JOBS["few tokens"]
    for plan, n, parameters, moments in (
        (lesson.Plan(), 8, 4, 8),
        (lesson.Plan(shard=True), 4, 1, 2),
        (lesson.Plan(shard=True), 8, 0.5, 1),
    ):
        at_peak = lesson.predict(job, plan, n)[1]
        assert at_peak["parameters"] / job.P == pytest.approx(parameters)
        assert at_peak["moments"] / job.P == pytest.approx(moments)


def test_a_price_in_seconds_of_an_h100() -> None:
    """67 TFLOP/s in float32, 450 GB/s over NVLink, 63 GB/s over PCIe; less is no gain."""
    Price, plain = lesson.Price, lesson.Price(67e12, 450e9)
    assert lesson.seconds(plain, plain) == 0
    assert lesson.seconds(Price(2 * 67e12, 450e9), plain) == pytest.approx(1)
    assert lesson.seconds(Price(0, 3 * 450e9), plain) == pytest.approx(2)
    assert lesson.seconds(Price(67e12, 0, 63e9), plain) == pytest.approx(1)


def test_a_saving_below_two_percent_of_the_states_is_none() -> None:
    job = lesson.JOBS["few tokens"]
    states = 16 * job.P
    saved = [lesson.whole(share * states, job) / states for share in (-0.5, 0.019, 0.021)]
    assert saved == pytest.approx([0, 0, 0.021])


def gradients_of_a_step(**plan: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = lesson.GPT(L=1, D=8, T=6, V=16, heads=2)
    model.no_sync = nullcontext
    x_BT = torch.randint(16, (4, 7), generator=torch.Generator().manual_seed(1))
    lesson.step(model, Mock(state={}), x_BT, lesson.Plan(**plan), lesson.NoRecord())
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("plan", [{"pieces": 4}, {"offload": True}])
def test_a_cure_leaves_the_gradients_as_they_were(plan: dict) -> None:
    for ours, expected in zip(gradients_of_a_step(**plan), gradients_of_a_step(), strict=True):
        assert torch.allclose(ours, expected, rtol=0, atol=1e-6)


def test_the_loss_is_that_of_the_next_byte() -> None:
    def says_the_next(x_BT: torch.Tensor) -> torch.Tensor:
        return 100.0 * F.one_hot(x_BT + 1, 8)

    assert lesson.mean_loss(says_the_next, torch.tensor([[1, 2, 3, 4]])) < 1e-6


def test_what_a_block_asks_for_is_what_the_table_says() -> None:
    D, heads = lesson.OOM_JOB.D, lesson.OOM_JOB.heads
    block = lesson.Block(D, heads)
    x_BTD, wide_BTE = torch.zeros(2, 32, D), torch.zeros(2, 32, 4 * D, requires_grad=True)
    q_BHTK = torch.zeros(2, heads, 32, D // heads, requires_grad=True)
    calls = {
        "self.up(": lambda: block.up(x_BTD),
        "F.gelu(": lambda: F.gelu(wide_BTE),
        "self.qkv(": lambda: block.qkv(x_BTD),
        "F.scaled": lambda: F.scaled_dot_product_attention(*[q_BHTK] * 3, is_causal=True),
        "self.norm": lambda: block.norm1(x_BTD),
        "": lambda: block.out(x_BTD),
    }
    assert {start: bytes_per_token(call) for start, call in calls.items()} == {
        start: set(sizes) for start, sizes in lesson.ASKS.items()
    }


def bytes_per_token(call: Callable) -> set[float]:
    """What the storages take that it makes, of 64 tokens."""
    with lesson.Timeline() as line:
        call()
    return {more / 64 for _, _, more in line.events if more > 0}


def test_a_snapshot_s_living_blocks_are_added_up_by_line() -> None:
    file = Path(lesson.__file__)
    source = file.read_text().splitlines()
    number = next(i for i, line in enumerate(source, 1) if "F.gelu(self.up(" in line)
    here = [{"filename": "elsewhere.py", "line": 1}, {"filename": str(file), "line": number}]
    blocks = [
        {"state": "active_allocated", "size": 10, "frames": here},
        {"state": "inactive", "size": 99, "frames": here},
        {"state": "active_allocated", "size": 5},
        {"state": "active_allocated", "size": 7, "frames": here[1:]},
    ]
    found = lesson.bytes_by_line({"segments": [{"blocks": blocks[:2]}, {"blocks": blocks[2:]}]})
    assert found == {source[number - 1].strip(): 17, "(elsewhere)": 5}
