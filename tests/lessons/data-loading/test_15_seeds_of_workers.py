"""The numbers of different draws against broken lines."""

import pytest

from course.playing import load
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "data-loading/15_seeds_of_workers.py"

DRAWS = "different draws"
COPIED = f"{DRAWS}, Generator of __init__"
PERSISTENT = f"{DRAWS}, persistent workers"
GLOBAL = {f"{DRAWS}, {source}" for source in ("torch", "random", "numpy")}
INIT = f"{DRAWS}, worker_init_fn"
BOTH = f"{DRAWS}, and generator="
CURED = {f"{DRAWS}, {source}, generator=" for source in ("torch", "random", "numpy")}
AGAIN = "draws of a second run that the first had not"
LINES = {
    "workers keep the generator of before the fork": (
        "    get_worker_info().dataset.generator = np.random.default_rng(torch.initial_seed())\n",
        "    pass\n",
        {INIT, BOTH},
    ),
    "all workers have the same generator, as in Try": (
        "default_rng(torch.initial_seed())",
        "default_rng(SEED)",
        {INIT, BOTH},
    ),
    "all ranks draw alike, as in Try": (
        "manual_seed(SEED + RANK)",
        "manual_seed(SEED)",
        {BOTH, *CURED},
    ),
    "ranks are seeded apart": (
        "    torch.manual_seed(SEED)  # alike",
        "    torch.manual_seed(SEED + RANK)  # alike",
        {INIT, *GLOBAL},
    ),
    "each draw is seeded by the clock": (
        "int(self.generator.integers(2**62))",
        "int(np.random.default_rng().integers(2**62))",
        {COPIED, PERSISTENT, INIT, AGAIN},
    ),
    "global states are seeded by none": (
        '            "random": random.getrandbits(62),\n'
        '            "numpy": int(np.random.randint(2**62)),\n',
        '            "random": random.Random(index).getrandbits(62),\n'
        '            "numpy": int(np.random.RandomState(index).randint(2**62)),\n',
        {*GLOBAL, *CURED} - {f"{DRAWS}, torch", f"{DRAWS}, torch, generator="},
    ),
    "workers always persist": (
        'knobs |= {"num_workers": WORKERS,',
        'knobs |= {"persistent_workers": True, "num_workers": WORKERS,',
        {COPIED},
    ),
    "workers never persist": (
        "drawn_in_two_epochs(persistent_workers=True)",
        "drawn_in_two_epochs()",
        {PERSISTENT},
    ),
    "a second run has another seed": (
        "generator=seeded_by_rank())\n    new",
        "generator=torch.Generator())\n    new",
        {AGAIN},
    ),
}
BREAKS = Breaks(
    LINES,
    alone=[  # whatever else is broken no longer shows
        "workers keep the generator of before the fork",
        "all workers have the same generator, as in Try",
        "workers always persist",
    ],
)


def test_a_worker_s_generator_is_seeded_by_its_own_seed() -> None:
    lesson = load(LESSON)
    dataset = lesson.Draws()
    before = dataset.generator
    lesson.get_worker_info = lambda: type("Info", (), {"dataset": dataset})
    lesson.torch.manual_seed(5)
    lesson.own_generator(0)
    assert dataset.generator is not before
    assert dataset.generator.integers(2**62) == lesson.np.random.default_rng(5).integers(2**62)


def test_ranks_of_two_nodes_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 are the first on their nodes, ranks 1 and 3 the second."""
    drawn = set()
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        lesson = load(LESSON)
        generator = lesson.seeded_by_rank()
        drawn.add(lesson.torch.randint(2**62, (), generator=generator).item())
    assert len(drawn) == 4
