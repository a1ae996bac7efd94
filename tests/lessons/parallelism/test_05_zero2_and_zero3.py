"""ZeRO-2 and ZeRO-3: each claim fails when the line that it guards is broken."""

import pytest

from course.lessons import play

LESSON = "parallelism/05_zero2_and_zero3.py"

# One line of the lesson broken: exactly these claims must FAIL at two ranks

LOW = ("bfloat16", "float32")
ERROR = {stage: f"stage {stage}, float32: error against one process" for stage in (2, 3)}
BOTH = set(ERROR.values())
UNLIKE = {stage: f"stage {stage}, bfloat16: weights unlike their master" for stage in (2, 3)}


def of(stage: int, what: str) -> set[str]:
    return {f"stage {stage}, {low}: {what}" for low in LOW}


HELD = {stage: of(stage, "bytes held per parameter") for stage in (2, 3)}
PASS, UPDATE = of(3, "gathered per pass / P"), of(2, "gathered per update / P")
EARLY, WHOLE = of(3, "gathers beside a whole unit"), of(3, "units whole at once")
ORDER = of(3, "gathers in the order 0123 3210")

BREAKS = {
    "no broadcast": ("dist.broadcast(parameter.data, 0)", "pass", BOTH),
    "no average": ("alpha=1 / dist.get_world_size()", "alpha=1", BOTH),
    "a shard off by one": (
        "shard_K = self.full_N.view(n, -1)[dist.get_rank()]",
        "shard_K = self.full_N.view(n, -1)[dist.get_rank() - 1]",
        BOTH | {UNLIKE[2]},
    ),
    "each rank its own norm": ("            dist.all_reduce(square)\n", "", BOTH),
    "masters in low precision": (
        "if trained and compute != whole.dtype:",
        "if False:",
        {f"stage {s}, bfloat16: bytes held per parameter" for s in (2, 3)},
    ),
    "gradients stay whole": (
        "for flat, work, sum_K, _ in self.pending:",
        "for flat, work, sum_K, flat.kept in self.pending:",
        HELD[2] | HELD[3],
    ),
    "weights never see an update in bfloat16": (
        "            flat.shard_K.copy_(flat.master_K)\n",
        "",
        set(UNLIKE.values()),
    ),
    "each micro-batch overwrites the one before": (
        "flat.gradient_K.add_(sum_K, alpha=1 / dist.get_world_size())",
        "flat.gradient_K.copy_(sum_K / dist.get_world_size())",
        BOTH,
    ),
    "stage 2 gathers nothing": (
        "dist.all_gather_into_tensor(flat.full_N, flat.shard_K.data)",
        "pass",
        UPDATE | {ERROR[2]},
    ),
    "stage 3 keeps whole weights": (
        "self.full_N.untyped_storage().resize_(0)",
        "pass",
        HELD[3] | PASS | WHOLE | EARLY | ORDER | {ERROR[3]},
    ),
    "stage 3 frees after backward only": (
        "            for flat in self.flats[unit]:\n                flat.free()\n"
        "            outputs = [t for",
        "            outputs = [t for",
        PASS | WHOLE | EARLY | ORDER,
    ),
    "stage 3 frees after forward only": (
        "        if flat.users == 0:\n            flat.free()\n",
        "",
        WHOLE | EARLY,
    ),
    "stage 3 prefetches everything": (
        "            for flat in self.flats[following]:\n",
        "            for flat in chain(*self.flats.values()):\n",
        WHOLE | EARLY | PASS | ORDER,
    ),
    "stage 3 prefetches nothing in forward": ("self.next.get(unit))", "None)", EARLY),
    "stage 3 prefetches nothing in backward": (
        "self.use(unit, self.previous[unit])",
        "self.use(unit, None)",
        EARLY,
    ),
    "stage 3 prefetches the wrong neighbor": (
        "self.use(unit, self.previous[unit])",
        "self.use(unit, self.next.get(unit))",
        ORDER,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_line_fails_its_claims(name: str) -> None:
    old, new, claims = BREAKS[name]
    played = play(LESSON, 2, (old, new))
    assert played.failed == claims, played.output
