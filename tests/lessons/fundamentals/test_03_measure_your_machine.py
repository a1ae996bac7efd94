"""Your machine by the clock: copies, roofline, pairs of GPUs; what a wrong line does to them."""

from types import SimpleNamespace

import pytest
import torch

from course.playing import Played, load
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fundamentals/03_measure_your_machine.py"
COPIED, CACHE = "memory copy: bytes that arrived wrong", "GB/s copying 256 KiB / 256 MiB"
ROOF, PEAK = "matrix x vector: factor off its roof", "matrix x vector: share of the peak FLOP/s"
NEEDS = "matmul: share of the bandwidth it needs"

QUICK = (  # fewer sizes and smaller tensors
    ("[4**k for k in range(3, 15)]", "[64, 4**5, 4**9, 4**14]"),
    ("rounds: int = 7", "rounds: int = 3"),
)
LINES = {
    "one byte over and over": (
        "copy = copier(to, source)\n    curve",
        "copy = copier(to, source[:1].expand(SIZES[-1]))\n    curve",
        {COPIED},
    ),
}
CLOCK_LINES = {
    "larger copies that end where the cache does": (
        "{n: copy(n) for n in SIZES}",
        "{n: copy(min(n, 4**9)) for n in SIZES}",
        {CACHE},
    ),
    "a vector's product with one row": (
        "partial(torch.mm, a, x, out=y)",
        "partial(torch.mm, a[:1], x, out=y[:1])",
        {ROOF, PEAK},
    ),
    "a product of matrices that sums nothing up": (
        "partial(torch.mm, p, q, out=product)",
        "partial(torch.mm, p[:, :1], q[:1], out=product)",
        {NEEDS},
    ),
}
BREAKS = [
    Breaks(LINES, ranks=1, changes=QUICK),
    Breaks(CLOCK_LINES, ranks=1, changes=QUICK, clock=True),
]
ON_GPUS = OnGpus(
    changes=[
        ("n, m = 16384, 8192", "n, m = 512, 512"),
        ("for k in range(3, 15)]", "for k in range(3, 11)]"),  # so small, no kernel is left out
        ("(4**14 / curve[4**14])", "(4**10 / curve[4**10])"),
        ("(4**5, 4**9, 4**14)", "(4**5, 4**9, 4**10)"),
        ("torch.zeros(2**26,", "torch.zeros(2**20,"),
        ("repeats: int = 10", "repeats: int = 1"),
    ],
)
NO_DEVICE = {"seconds_of": "on a GPU it has returned, with events"}


def PLAIN(played: Played) -> None:
    """Every rank copies, and one of them tells how fast."""
    assert played.output.count(" ranks at once, GB/s each") == 1, played.output


# What a clock decides, with seconds that are made up: 12.5 GB/s in a cache and 8 beyond, 60 GFLOP/s
# at most, and a product of matrix and vector at three quarters of its roof.

WRONG = {  # what each wrong line must make FAIL, and nothing else
    "caches upside down": (
        (
            "gain = (4**9 / curve[4**9]) / (4**14 / curve[4**14])",
            "gain = (4**14 / curve[4**14]) / (4**9 / curve[4**9])",
        ),
        {CACHE},
    ),
    "vector as peak": (
        (
            'peak = kernels["matmul"].flops_per_second',
            'peak = kernels["matrix x vector"].flops_per_second',
        ),
        {PEAK},
    ),
    "roof without intensity": (("vector.intensity * bandwidth)", "bandwidth * 6)"), {ROOF}),
    "peak for roof": (
        (
            "roof = min(peak, vector.intensity * bandwidth)",
            "roof = max(peak, vector.intensity * bandwidth)",
        ),
        {ROOF},
    ),
    "FLOPs for bytes": (
        (
            'needs = kernels["matmul"].bytes_per_second',
            'needs = kernels["matmul"].flops_per_second',
        ),
        {NEEDS},
    ),
}


def failed_by_made_up_seconds(*changes: tuple[str, str]) -> set[str]:
    lesson = load(LESSON, *changes)
    n, m = 4096, 1024
    rates = {n: 12.5e9 if n <= 4**9 else 8e9 for n in lesson.SIZES}
    lesson.check_memory_copy({n: n / rate for n, rate in rates.items()}, wrong=0)
    lesson.check_roofline(
        {
            "add": lesson.Ran(n**2, 12 * n**2, 12 * n**2 / 8e9),
            "matrix x vector": lesson.Ran(2 * n**2, 4 * n**2, 2 * n**2 / 3e9),
            "matmul": lesson.Ran(2 * m**3, 12 * m**2, 2 * m**3 / 60e9),
        }
    )
    assert {row["claim"] for row in lesson.ledger} == {COPIED, CACHE, ROOF, PEAK, NEEDS}
    return {row["claim"] for row in lesson.ledger if row["verdict"] == "FAIL"}


def test_a_machine_like_ours_keeps_what_is_foretold_of_caches_and_rooflines() -> None:
    assert failed_by_made_up_seconds() == set()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_fails_what_the_clock_decides(name: str) -> None:
    change, claims = WRONG[name]
    assert failed_by_made_up_seconds(change) == claims


def test_kernels_are_told_the_bytes_of_their_operands_and_result() -> None:
    lesson = load(LESSON, ("n, m = 4096, 1024", "n, m = 48, 32"))
    lesson.alternate = lambda operations, device: dict.fromkeys(operations, 1.0)
    ran = lesson.run_kernels(torch.device("cpu"))
    square, vector, small = (torch.empty(n, k).nbytes for n, k in ((48, 48), (48, 1), (32, 32)))
    expected = {"add": (48**2, 3 * square), "matmul": (2 * 32**3, 3 * small)}
    expected["matrix x vector"] = (2 * 48**2, square + 2 * vector)
    assert {name: (one.flops, one.nbytes) for name, one in ran.items()} == expected


# No GPU here: NVML is a stand-in, so that the predictions for known machines can be checked.


class Machine(SimpleNamespace):
    """NVML of a machine: links lead to a peer GPU or a switch; handles are GPU numbers."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_NVLINK_MAX_LINKS, NVMLError = 2, 18, RuntimeError
    NVML_CLOCK_MEM = 2

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:
        return 0 if self.links else 5

    def nvmlDeviceGetPciInfo(self, a: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"gpu {a}")

    def nvmlDeviceGetNvLinkState(self, a: int, link: int) -> bool:
        if link >= len(self.links):
            raise self.NVMLError
        return True

    def nvmlDeviceGetNvLinkVersion(self, a: int, link: int) -> int:
        return self.version

    def nvmlDeviceGetNvLinkRemotePciInfo(self, a: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.links[link])

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
        return self.way

    def nvmlDeviceGetC2cModeInfoV(self, a: int) -> SimpleNamespace:
        return SimpleNamespace(isC2cEnabled=self.c2c)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, a: int) -> int:
        return self.generation

    def nvmlDeviceGetMaxPcieLinkWidth(self, a: int) -> int:
        return self.width

    def nvmlDeviceGetMaxClockInfo(self, a: int, clock: int) -> int:
        return self.megahertz

    def nvmlDeviceGetMemoryBusWidth(self, a: int) -> int:
        return self.wires


MACHINES = {
    "DGX A100": (Machine(links=["switch"] * 12, version=4), "NV12", 300),
    "HGX H100": (Machine(links=["switch"] * 18, version=6), "NV18", 450),
    "HGX B200": (Machine(links=["switch"] * 18, version=7), "NV18", 900),
    "DGX-1, V100": (Machine(links=["gpu 1"] * 2 + ["gpu 2"] * 2, version=2), "NV2", 50),
    "DGX-1, P100": (Machine(links=["gpu 1"] + ["gpu 2"] * 3, version=1), "NV1", 20),
    "workstation": (Machine(links=[], way=30), "PHB", None),
    "two chips on a board": (Machine(links=[], way=0), "one board", None),
}


def on(machine: Machine):
    lesson = load(LESSON)
    lesson.pynvml = machine
    lesson.nvml_handle = lambda gpu: gpu
    return lesson


@pytest.mark.parametrize("name", MACHINES)
def test_a_pair_of_gpus_is_promised_what_joins_it(name: str) -> None:
    machine, label, rate = MACHINES[name]
    assert on(machine).joined(0, 1) == (label, rate)


@pytest.mark.parametrize(
    ("generation", "width", "c2c", "rate"),
    [(5, 16, 0, 63.015), (4, 8, 0, 15.75), (1, 16, 0, 4), (5, 16, 1, None), (9, 16, 0, None)],
)
def test_pcie_promises_by_generation_and_width(generation, width, c2c, rate) -> None:
    lesson = on(Machine(generation=generation, width=width, c2c=c2c))
    promised = lesson.promised_by_pcie(0)
    assert promised == (rate and pytest.approx(rate, rel=1e-3))


def test_a_driver_that_cannot_tell_promises_nothing() -> None:
    lesson = load(LESSON)

    def mute(*_: object) -> None:
        raise RuntimeError

    names = ["C2cModeInfoV", "MaxPcieLinkGeneration", "MaxClockInfo", "MemoryBusWidth"]
    asked = {f"nvmlDeviceGet{name}": mute for name in names}
    lesson.pynvml = SimpleNamespace(NVMLError=RuntimeError, NVML_CLOCK_MEM=2, **asked)
    lesson.nvml_handle = lambda gpu: gpu
    assert lesson.promised_by_pcie(0) is None
    assert lesson.promised_by_hbm(0) is None


def test_hbm_promises_half_of_the_datasheet_to_a_copy() -> None:
    lesson = on(Machine(megahertz=2619, wires=5120))  # H100 SXM: 3.35 TB/s
    assert lesson.promised_by_hbm(0) == pytest.approx(3350 / 2, rel=0.01)


def judged_copy(got: float, promised: float | None) -> list[str]:
    lesson = load(LESSON)
    curve = {n: n / got / 1e9 for n in lesson.SIZES}
    lesson.judge_copies({"H2D pinned": curve}, {"H2D pinned": promised})
    return [row["verdict"] for row in lesson.ledger]


@pytest.mark.parametrize(
    ("got", "promised", "verdict"),
    [
        (55, 63, "PASS"),
        (126, 63, "FAIL"),
        (27, 63, "FAIL"),  # x8 in place of x16, or one generation less
        (400, None, "BLOCKED"),
    ],
)
def test_a_copy_is_judged_by_its_promise(got, promised, verdict) -> None:
    assert judged_copy(got, promised) == [verdict]


def test_both_ways_at_once_is_more_than_one_way_after_the_other() -> None:
    lesson = load(LESSON)
    name = "H2D and D2H at once, each"
    for rate in (45, 27):  # GB/s each way: together, and in turns
        curve = {n: n / rate / 1e9 for n in lesson.SIZES}
        lesson.judge_copies({name: curve}, {name: 63})
    assert [row["verdict"] for row in lesson.ledger] == ["PASS", "FAIL"]


LANES = "PCIe lanes that all GPUs' links lack, under load"
GENERATIONS = "PCIe generations that they lack, under load"


@pytest.mark.parametrize(
    ("rates", "links", "fail"),
    [
        ([55] * 8, [(16, 16, 5, 5)] * 8, set()),
        ([55] * 8, [(16, 16, 5, 5)] * 7 + [(8, 16, 5, 5)], {LANES}),
        ([55] * 8, [(16, 16, 5, 5)] * 7 + [(16, 16, 4, 5)], {GENERATIONS}),
        ([55] * 7 + [27], [(16, 16, 5, 5)] * 8, {"H2D pinned: slowest GPU / median"}),
        ([55] * 4 + [45] * 4, [(16, 16, 5, 5)] * 8, set()),  # the others are a socket away
    ],
)
def test_a_card_below_its_link_or_its_neighbors_is_found(rates, links, fail) -> None:
    lesson = load(LESSON)
    lesson.judge_cards({"H2D pinned": rates, "HBM copy": [2000] * 8}, links)
    assert {row["claim"] for row in lesson.ledger if row["verdict"] == "FAIL"} == fail


def test_a_card_whose_memory_is_slow_is_found_and_a_mute_driver_judges_no_link() -> None:
    lesson = load(LESSON)
    lesson.judge_cards({"H2D pinned": [55] * 4, "HBM copy": [2000, 2000, 2000, 1000]}, [None] * 4)
    verdicts = [row["verdict"] for row in lesson.ledger]
    assert verdicts == ["BLOCKED", "PASS", "FAIL"]


@pytest.mark.parametrize(("way", "sharing"), [(10, 4), (20, 4), (30, 1), (50, 1)])
def test_gpus_below_one_switch_share_its_uplink(way: int, sharing: int) -> None:
    machine = Machine(links=[], way=way)
    machine.nvmlInit = lambda: None
    assert on(machine).below_one_switch(range(4)) == sharing


@pytest.mark.parametrize(
    ("together", "sharing", "verdict"),
    [(1, 1, "PASS"), (2, 1, "FAIL"), (2, 2, "PASS"), (4, 2, "FAIL"), (4, 4, "PASS")],
)
def test_what_each_keeps_of_a_shared_uplink_is_judged(
    together, sharing, verdict, monkeypatch
) -> None:
    """`together`: how many times as long a copy takes when all copy."""
    lesson = load(LESSON)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    lesson.below_one_switch = lambda gpus: sharing
    lesson.check_shared_uplinks(1.0, [1.0, together])
    assert [row["verdict"] for row in lesson.ledger] == [verdict]


@pytest.mark.parametrize(("links", "up"), [(["switch"] * 18, 18), (["switch"] * 9, 9), ([], None)])
def test_nvlinks_that_are_up_are_counted(links: list[str], up: int | None) -> None:
    assert on(Machine(links=links)).nvlinks_up(0) == up


def judged_pairs(
    rates: list[float], both: float, ring: float, wrong: int = 0, up: tuple = (18, 18)
) -> set[str]:
    lesson = load(LESSON)
    names = [f"pair {k}" for k in range(len(rates))]
    promised = dict.fromkeys(names, 450)
    pairs = lesson.Pairs(dict(zip(names, rates, strict=True)), promised, wrong, up, both, ring)
    lesson.judge_pairs(pairs)
    return {row["claim"] for row in lesson.ledger if row["verdict"] == "FAIL"}


def test_pairs_are_judged_by_their_links_and_by_what_a_crossbar_promises() -> None:
    assert judged_pairs([396, 394], 391, 390) == set()
    assert judged_pairs([396, 100], 391, 390) >= {"NVLink: slowest pair / promised"}
    assert judged_pairs([396, 220], 391, 390) >= {"NVLink: slowest pair / promised"}
    assert judged_pairs([396, 394], 391, 390, up=(18, 9)) == {
        "NVLinks up: most of any GPU - fewest"
    }
    assert judged_pairs([396, 900], 391, 391) >= {"NVLink: fastest pair / promised"}
    assert judged_pairs([396, 394], 200, 390) == {"NVLink: both ways at once / one alone"}
    assert judged_pairs([396, 394], 391, 60) == {"NVLink: all send right at once / one"}
    assert judged_pairs([396, 394], 391, 390, wrong=1) == {"GPU pairs: bytes that arrived wrong"}
