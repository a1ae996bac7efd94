"""Your machine by the clock: copies, roofline, pairs of GPUs; what a wrong line does to them."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

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
    # The share of the peak is a quotient of two kernels: broken together, they may make up for it.
    Breaks(
        CLOCK_LINES, ranks=1, changes=QUICK, clock=True, alone=["a vector's product with one row"]
    ),
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


def test_a_machine_like_ours_keeps_what_is_predicted_of_caches_and_rooflines() -> None:
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


# Values that no row shows


@pytest.mark.parametrize(
    ("generation", "rate"), [(1, 4), (2, 8), (3, 15.75), (4, 31.5), (5, 63), (6, 121)]
)
def test_sixteen_lanes_of_each_generation_carry_what_is_published(generation, rate) -> None:
    assert 16 * load(LESSON).PCIE[generation] == pytest.approx(rate, rel=2e-3)


@pytest.mark.parametrize(
    ("version", "rate"), [(1, 20), (2, 25), (3, 25), (4, 25), (5, 25), (6, 25), (7, 50)]
)
def test_a_link_of_each_nvlink_carries_what_is_published(version: int, rate: int) -> None:
    assert load(LESSON).rate_of_nvlink(version) == rate


@pytest.mark.parametrize(
    ("way", "label"),
    [(0, "one board"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS")],
)
def test_the_way_between_two_gpus_has_its_name(way: int, label: str) -> None:
    assert on(Machine(links=[], way=way)).joined(0, 1) == (label, None)


def test_it_is_the_memory_s_clock_that_promises_its_bandwidth() -> None:
    class Clocks(Machine):
        def nvmlDeviceGetMaxClockInfo(self, a: int, clock: int) -> int:
            return {0: 1980, 2: 2619}[clock]  # of graphics and of memory, by nvml.h

    assert on(Clocks(wires=5120)).promised_by_hbm(0) == pytest.approx(1676, rel=1e-3)


@pytest.mark.parametrize("uuid", ["GPU-1f2e", "1f2e"])
def test_nvml_is_asked_about_the_card_that_cuda_means(uuid: str, monkeypatch) -> None:
    lesson = load(LESSON)
    told = {3: SimpleNamespace(uuid=uuid)}
    monkeypatch.setattr(lesson.torch.cuda, "get_device_properties", told.get)
    lesson.pynvml = SimpleNamespace(nvmlDeviceGetHandleByUUID={"GPU-1f2e": "the card"}.get)
    assert lesson.nvml_handle(3) == "the card"


def test_a_link_is_looked_at_while_copies_run() -> None:
    lesson = load(LESSON)
    done = []

    def answer(name: str, card: int) -> int:
        done.append(name)
        return told[name]

    gpu = SimpleNamespace(copy_=lambda source, non_blocking: done.append("copy"))
    cuda = SimpleNamespace(synchronize=lambda gpu: done.append("wait"))
    lesson.torch = SimpleNamespace(ones=lambda *_, **__: gpu, uint8=None, cuda=cuda)
    told = {"CurrPcieLinkWidth": 8, "MaxPcieLinkWidth": 16}
    told |= {"CurrPcieLinkGeneration": 4, "MaxPcieLinkGeneration": 5}
    asked = {f"nvmlDeviceGet{name}": partial(answer, name) for name in told}
    lesson.pynvml = SimpleNamespace(NVMLError=RuntimeError, **asked)
    lesson.nvml_handle = lambda gpu: gpu
    assert lesson.pcie_in_use(0) == (8, 16, 4, 5)
    assert set(done[-5:-1]) == set(told)
    assert done[-1] == "wait"
    assert done.count("copy") >= 50


def test_each_copy_between_host_and_gpu_goes_the_way_of_its_name() -> None:
    lesson = load(LESSON)

    def ones(n: int, dtype: object, device: str = "pageable", pin_memory: bool = False) -> str:
        assert n == lesson.SIZES[-1]
        return "pinned" if pin_memory else device

    cuda = SimpleNamespace(Stream=lambda: None)
    lesson.torch = SimpleNamespace(ones=ones, uint8=None, device=lambda *_: "GPU", cuda=cuda)
    lesson.copier = lambda to, source: f"{source} to {to}"
    lesson.at_once = lambda one, other, side: f"{one}, {other}"
    lesson.curve_of = lambda copy, gpu: copy
    lesson.promised_by_pcie = lambda gpu: 63
    lesson.promised_by_hbm = lambda gpu: 1676
    curves, promised = lesson.copies_on_gpu_0()
    assert curves == {
        "HBM copy": "GPU to GPU",
        "H2D pinned": "pinned to GPU",
        "D2H pinned": "GPU to pinned",
        "H2D pageable": "pageable to GPU",
        "D2H pageable": "GPU to pageable",
        "H2D and D2H at once, each": "pinned to GPU, GPU to pinned",
    }
    assert promised == dict.fromkeys(curves, 63) | {"HBM copy": 1676}


def test_a_kernel_does_the_flops_that_it_is_told_to_do() -> None:
    """Counted by PyTorch; of an addition, which that leaves out, one per element."""
    lesson = load(LESSON, ("n, m = 4096, 1024", "n, m = 48, 32"))
    counted = {}

    def count(operations: dict, device: torch.device) -> dict:
        for name, operation in operations.items():
            with FlopCounterMode(display=False) as counter:
                result = operation()
            counted[name] = counter.get_total_flops() or result.numel()
        return dict.fromkeys(operations, 1.0)

    lesson.alternate = count
    ran = lesson.run_kernels(torch.device("cpu"))
    assert counted == {name: one.flops for name, one in ran.items()}


def test_a_kernel_s_rates_are_what_it_did_over_its_seconds() -> None:
    ran = load(LESSON).Ran(flops=12.0, nbytes=6.0, seconds=0.5)
    assert (ran.flops_per_second, ran.bytes_per_second, ran.intensity) == (24, 12, 2)


def test_operations_take_turns_run_untimed_first_and_the_median_counts() -> None:
    lesson = load(LESSON)
    done = []
    took = {"a": iter([1.0, 9.0, 2.0]), "b": iter([7.0, 3.0, 5.0])}

    def seconds_of(operation, device: torch.device) -> float:
        operation()
        return next(took[done[-1]])

    lesson.seconds_of = seconds_of
    operations = {name: partial(done.append, name) for name in took}
    assert lesson.alternate(operations, torch.device("cpu"), rounds=3) == {"a": 2.0, "b": 5.0}
    assert "".join(done) == 3 * "aabb"


def test_on_a_gpu_events_are_the_clock_and_tell_milliseconds(monkeypatch) -> None:
    done = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            return 5.0

    lesson = load(LESSON)
    monkeypatch.setattr(lesson.torch.cuda, "Event", Event)
    seconds = lesson.seconds_of(lambda: done.append("work"), SimpleNamespace(type="cuda"))
    assert seconds == pytest.approx(0.005)
    assert done == ["record", "work", "record", "wait"]


def test_copies_at_once_are_all_started_before_any_is_waited_for(monkeypatch) -> None:
    """By a clock that waiting puts forward: 100 ms for ten copies, whichever GPU is waited for."""
    lesson = load(LESSON)
    now, started, waited = [0.0], [], []

    def synchronize(device: int) -> None:
        waited.append(device)
        if started:
            now[0] += 0.1
            assert sorted(started) == 10 * [0] + 10 * [1]
            started.clear()

    monkeypatch.setattr(lesson.torch.cuda, "synchronize", synchronize)
    lesson.time = SimpleNamespace(perf_counter=lambda: now[0])
    transfers = []
    for i in range(2):
        start = partial(started.append, i)
        transfers.append(SimpleNamespace(ends={2 * i, 2 * i + 1}, start=start))
    rate = lesson.rate_together(transfers)
    assert rate == pytest.approx(lesson.SIZES[-1] / 0.01 / 1e9)
    assert set(waited) == {0, 1, 2, 3}


def test_both_streams_wait_for_each_other_around_copies_at_once() -> None:
    """Else the events on the main stream do not see the other copy end: a rate too high."""
    lesson = load(LESSON)
    log = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            log.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def stream(one: Stream) -> Iterator[None]:
        log.append(f"on {one.name}:")
        yield
        log.append("on main:")

    def copy(name: str) -> Callable[[int], Callable[[], None]]:
        return lambda n: partial(log.append, f"{name} {n}")

    main = Stream("main")
    cuda = SimpleNamespace(current_stream=lambda: main, stream=stream)
    lesson.torch = SimpleNamespace(cuda=cuda)
    lesson.at_once(copy("up"), copy("down"), Stream("side"))(64)()
    assert log == [
        "side waits for main",
        "on side:",
        "down 64",
        "on main:",
        "up 64",
        "main waits for side",
    ]


def test_every_pair_is_tried_and_the_ring_leads_to_right_neighbors(monkeypatch) -> None:
    lesson = load(LESSON)

    def transfer(i: int, j: int) -> SimpleNamespace:
        return SimpleNamespace(way=(i, j), wrong_bytes=lambda: 10 * i + j)

    lesson.Transfer = transfer
    lesson.rate_together = lambda transfers: [one.way for one in transfers]
    lesson.joined = lambda i, j: ("NV18", 450)
    lesson.nvlinks_up = lambda gpu: 18 - gpu
    cuda = lesson.torch.cuda
    monkeypatch.setattr(cuda, "device_count", lambda: 3)
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda i, j: (i, j) != (2, 0))
    pairs = lesson.copies_between_gpus()
    ways = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert pairs.rates == {f"GPU {i} to {j}, NV18": [(i, j)] for i, j in ways}
    without_p2p = {"GPU 2 to 0, NV18": None}
    assert pairs.promised == dict.fromkeys(pairs.rates, 450) | without_p2p
    assert pairs.wrong_bytes == 1 + 2 + 10 + 12 + 20 + 21
    assert pairs.both_ways == [(0, 1), (1, 0)]
    assert pairs.ring == [(0, 1), (1, 2), (2, 0)]
    assert pairs.links_up == [18, 17, 16]


def test_the_rate_of_all_ranks_at_once_is_told_next_to_that_of_one_alone(
    capsys, monkeypatch
) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    took = {"alone": 2**26 / 8e9, "all": 2**26 / 5e9}
    lesson.alternate = lambda operations, device, rounds: {name: took[name] for name in operations}
    lesson.on_rank_0 = lambda measure, host: measure()
    lesson.gather_objects = lambda seconds: [seconds, 2 * seconds]
    monkeypatch.setattr(lesson.dist, "barrier", lambda group: None)
    lesson.all_ranks_copy(torch.device("cpu"), None)
    told = capsys.readouterr().out
    assert "64 MiB to cpu: 8.0 GB/s for rank 0 alone" in told
    assert "2 ranks at once, GB/s each: 5.0, 2.5" in told


def test_the_figure_shows_bytes_over_seconds(monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    load(LESSON).draw({"memory copy": {64: 64 / 2e9, 4096: 4096 / 9e9}}, "unused.png")
    (line,) = drawn[0].axes[0].lines
    assert list(line.get_xdata()) == [64, 4096]
    assert list(line.get_ydata()) == pytest.approx([2, 9])


def test_bytes_that_are_copied_are_random_and_looked_at_after_a_copy_of_their_own() -> None:
    lesson = load(LESSON)
    lesson.SIZES[:] = [64, 4096]
    first, second = lesson.random_bytes(4096), lesson.random_bytes(4096)
    assert (first != second).sum() > 4000
    assert len(first.unique()) == 256
    copies = []

    def copier(to: torch.Tensor, source: torch.Tensor):
        def copy(n: int) -> None:
            copies.append(n)
            if len(copies) == 1:  # and never again
                to[:n].copy_(source[:n])

        return lambda n: partial(copy, n)

    lesson.copier = copier
    lesson.curve_of = lambda copy, device: copy(4096)()
    _, wrong = lesson.memory_copy()
    assert copies == [4096, 4096]
    assert wrong > 4000


def test_every_card_is_measured_by_itself() -> None:
    lesson = load(LESSON)
    current, copied = [], []

    @contextlib.contextmanager
    def device(gpu: int) -> Iterator[None]:
        current.append(gpu)
        yield

    def ones(n: int, dtype: object, device: str = "", pin_memory: bool = False) -> SimpleNamespace:
        return SimpleNamespace(name="pinned" if pin_memory else device, device=current)

    def alternate(copies: dict, device: object, rounds: int) -> dict[str, float]:
        copied.append((current[-1], copies))
        seconds = lesson.SIZES[-1] / 1e9
        return {"H2D pinned": seconds / (50 + current[-1]), "HBM copy": seconds / 2000}

    cuda = SimpleNamespace(device_count=lambda: 2, device=device)
    lesson.torch = SimpleNamespace(ones=ones, uint8=None, cuda=cuda)
    lesson.copier = lambda to, source: lambda n: f"{source.name} to {to.name}"
    lesson.alternate = alternate
    lesson.pcie_in_use = lambda gpu: (16, 16, 5, 5 + gpu)
    rates, links = lesson.every_card()
    ways = {"H2D pinned": "pinned to cuda", "HBM copy": "cuda to cuda"}
    assert copied == [(0, ways), (1, ways)]
    assert rates == {
        "H2D pinned": pytest.approx([50, 51]),
        "HBM copy": pytest.approx([2000, 2000]),
    }
    assert links == [(16, 16, 5, 5), (16, 16, 5, 6)]


def test_on_a_cpu_the_clock_runs_while_the_operation_does() -> None:
    lesson = load(LESSON)
    now = [7.0]

    def operation() -> None:
        now[0] += 2.0

    lesson.time = SimpleNamespace(perf_counter=lambda: now[0])
    assert lesson.seconds_of(operation, torch.device("cpu")) == 2.0
