"""Links, crossbar, shared uplinks, roofline; and what a wrong line does to their claims."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from course.playing import load
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "fundamentals/01_gpu_interconnects.py"
READ, NEIGHBORS = (
    "4 GPUs read host memory at once: GB/s each",
    "4 GPUs send to neighbors: GB/s each",
)
BESIDE, LEFT = (
    "next to 4 readers, a neighbor's copy: GB/s",
    "  by hand, what a reader leaves of 63",
)
RING, INCAST = "crossbar, 8 send right at once: GB/s each", "crossbar, 7 send to one: GB/s each"
WIRED, RATIO = "A100s wired directly, one pair: GB/s", "one copy: NVLink 4 / PCIe 5.0"
BY_HOST, DIRECT = (
    "4 GPUs send through host memory: GB/s each",
    "  with GPUDirect RDMA: GB/s each",
)
ADD, PRODUCT = "adding: FLOPs per byte in bf16", "8192 x 8192 product: FLOPs per byte"
N, TOKENS = (
    "H100: smallest compute-bound n x n product",
    "H100: tokens that fill an 8192-wide layer",
)

LINES = {  # what each wrong line must make FAIL, and nothing else
    "coding of PCIe 2.0": ("32, 128 / 130", "32, 8 / 10", {READ, NEIGHBORS, LEFT, RATIO, BY_HOST}),
    "lanes of NVLink 3": ("Link(12, 4, 50", "Link(12, 8, 50", {WIRED}),
    "duplex for one way": ("Link(18, 2, 100", "Link(18, 4, 100", {RING, INCAST, RATIO}),
    "bits for bytes": ("Link(1, 4, 100, 1", "Link(1, 4, 800, 1", {DIRECT}),
    "an uplink per GPU": (
        'both_ways("switch", "host memory", pcie)',
        'both_ways("switch", "host memory", gpus * pcie)',
        {READ, BY_HOST, LEFT},
    ),
    "a switch that limits": (
        'capacity |= both_ways(f"GPU {gpu}", "NVSwitch", rate)',
        'capacity |= both_ways(f"GPU {gpu}", "NVSwitch", rate / (gpus - 1))',
        {RING, INCAST, RATIO},
    ),
    "GPUDirect that goes through the host": (
        'direct.append([f"GPU {gpu}", *to_network])',
        'direct.append([f"GPU {gpu}", "switch", "host memory", *to_network])',
        {DIRECT},
    ),
    "shares without the others": (" free[link] -= share\n", " free[link] -= 0\n", {BESIDE, LEFT}),
    "H100 with sparsity": ('"H100": (3.35, 989)', '"H100": (3.35, 1979)', {N, TOKENS}),
    "FLOPs of a sum": ("or result.numel()", "or 2 * result.numel()", {ADD}),
    "bytes without the result": ("(*operands, result)", "operands", {ADD, PRODUCT, N, TOKENS}),
}
BREAKS = Breaks(
    LINES,
    ranks=1,
    alone=["GPUDirect that goes through the host"],  # where the uplink is wide, that costs nothing
)


WRONG_RATES = {
    "PCIe 6.0 x16": ("64, 242 / 256", "64, 256 / 256"),
    "NVLink 2": ("Link(6, 8, 25", "Link(6, 8, 20"),
    "InfiniBand XDR": ("Link(1, 4, 200, 1, 100", "Link(1, 4, 200, 1, 800"),
    "10 GbE": ("Link(1, 1, 10,", "Link(1, 1, 40,"),
    "NVLink-C2C": ("Link(10, 1, 360", "Link(18, 1, 360"),
}


def test_every_published_rate_follows_from_lanes_and_bits(capsys) -> None:
    load(LESSON).show_links()
    assert "DIFFERS" not in capsys.readouterr().out


@pytest.mark.parametrize("name", WRONG_RATES)
def test_a_wrong_rate_is_marked_in_the_table(name: str, capsys) -> None:
    load(LESSON, WRONG_RATES[name]).show_links()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line]
    assert name in line


def test_the_roofline_is_the_lower_of_its_two_limits() -> None:
    lesson = load(LESSON)
    assert lesson.attainable(1 / 6, "H100") == pytest.approx(3.35 / 6)  # TFLOP/s: memory-bound
    assert lesson.attainable(8192 / 3, "H100") == 989
    assert lesson.attainable(lesson.ridge("A100"), "A100") == pytest.approx(312)


STAR = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6)
RATES = st.lists(st.sampled_from([10.0, 25.0, 40.0, 100.0]), min_size=5, max_size=5)


def star(pairs: list, rates: list) -> tuple[list, dict]:
    """Routes through one switch, and its wires."""
    capacity = {}
    for i, rate in enumerate(rates):
        capacity |= {(f"{i}", "switch"): rate, ("switch", f"{i}"): rate}
    return [[f"{a}", "switch", f"{b}"] for a, b in pairs if a != b], capacity


@settings(deadline=None, max_examples=25)
@given(STAR, RATES)
def test_fair_shares_fill_a_link_of_each_flow_and_overfill_none(pairs: list, rates: list) -> None:
    lesson = load(LESSON)
    routes, capacity = star(pairs, rates)
    shares = lesson.fair_shares(routes, capacity)
    used = dict.fromkeys(capacity, 0.0)
    for route, share in zip(routes, shares, strict=True):
        for link in pairwise(route):
            used[link] += share
    assert all(used[link] <= capacity[link] * (1 + 1e-9) for link in capacity)
    for route, share in zip(routes, shares, strict=True):
        full = [link for link in pairwise(route) if used[link] >= capacity[link] * (1 - 1e-9)]
        biggest = []  # max-min: on some full link of its, no flow has more
        for link in full:
            there = [s for r, s in zip(routes, shares, strict=True) if link in set(pairwise(r))]
            biggest.append(share >= max(there) - 1e-9)
        assert any(biggest)


@settings(deadline=None, max_examples=25)
@given(STAR, RATES)
def test_packets_in_turns_get_fair_shares(pairs: list, rates: list) -> None:
    lesson = load(LESSON)
    routes, capacity = star(pairs, rates)
    if not routes:
        return
    expected = lesson.fair_shares(routes, capacity)
    got = lesson.packets_delivered(routes, capacity, seconds=0.4)
    assert got == pytest.approx(expected, rel=0.05)


def test_gpudirect_is_read_off_the_machine(tmp_path: Path) -> None:
    lesson = load(LESSON)
    assert set(lesson.gpudirect_signs(tmp_path).values()) == {False}
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/modules").write_text("nvidia_peermem 16384 0\nnvidia_fs 1 0\n")
    (tmp_path / "proc/driver/nvidia/version").write_text("NVIDIA UNIX Open Kernel Module 570")
    (tmp_path / "proc/driver/nvidia/params").write_text("EnableStreamMemOPs: 1\n")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert set(lesson.gpudirect_signs(tmp_path).values()) == {True}


@pytest.mark.parametrize(("reached", "verdict"), [(True, "PASS"), (False, "FAIL")])
def test_p2p_by_cuda_is_compared_with_nvml(reached: bool, verdict: str, monkeypatch) -> None:
    lesson = load(LESSON)
    cuda = lesson.torch.cuda
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda a, b: reached)
    nvml = {"nvmlInit": lambda: None, "NVMLError": RuntimeError, "NVML_P2P_CAPS_INDEX_READ": 0}
    lesson.pynvml = SimpleNamespace(**nvml, nvmlDeviceGetP2PStatus=lambda a, b, index: 0)
    lesson.nvml_handle = lambda gpu: gpu
    lesson.check_p2p()
    assert [row["verdict"] for row in lesson.ledger] == [verdict]


def test_p2p_is_blocked_where_nvml_is_mute(monkeypatch) -> None:
    lesson = load(LESSON)
    monkeypatch.setattr(lesson.torch.cuda, "device_count", lambda: 2)

    def mute(*_: object) -> None:
        raise RuntimeError

    nvml = {"nvmlInit": lambda: None, "NVMLError": RuntimeError, "NVML_P2P_CAPS_INDEX_READ": 0}
    lesson.pynvml = SimpleNamespace(**nvml, nvmlDeviceGetP2PStatus=mute)
    lesson.nvml_handle = lambda gpu: gpu
    lesson.check_p2p()
    assert [row["verdict"] for row in lesson.ledger] == ["BLOCKED"]


def test_nvlink_5_carries_twice_what_nvlink_4_does() -> None:
    links = load(LESSON).LINKS
    assert links["NVLink 5"].one_way == 900
    assert links["NVLink 4"].one_way == 450


# Values that no row shows


ONE_WAY = {  # GB/s, as published by PCI-SIG, NVIDIA, IBTA and IEEE
    "PCIe 3.0 x16": 15.75,
    "PCIe 4.0 x16": 31.5,
    "PCIe 5.0 x16": 63.0,
    "PCIe 6.0 x16": 121.0,
    "NVLink 1": 80,
    "NVLink 2": 150,
    "NVLink 3": 300,
    "NVLink 4": 450,
    "NVLink 5": 900,
    "NVLink-C2C": 450,
    "InfiniBand HDR": 25,
    "InfiniBand NDR": 50,
    "InfiniBand XDR": 100,
    "10 GbE": 1.25,
    "25 GbE": 3.125,
    "100 GbE": 12.5,
}


def test_every_link_has_the_rate_that_its_makers_publish() -> None:
    rates = {name: link.one_way for name, link in load(LESSON).LINKS.items()}
    assert rates == {name: pytest.approx(rate, rel=1e-3) for name, rate in ONE_WAY.items()}


NVLINKS = {"P100": 4, "V100": 6, "A100": 12, "H100, H200": 18, "B200": 18}  # links per GPU


def test_every_gpu_has_the_nvlinks_of_its_datasheet() -> None:
    links = [link for name, link in load(LESSON).LINKS.items() if name.startswith("NVLink ")]
    assert {link.seen_in: link.links for link in links} == NVLINKS


@pytest.mark.parametrize(
    ("gpu", "terabytes", "teraflops"),
    [("A100", 2.0, 312), ("H100", 3.35, 989), ("H200", 4.8, 989), ("B200", 8.0, 2250)],
)
def test_memory_and_peak_are_those_of_the_datasheet(gpu, terabytes, teraflops) -> None:
    lesson = load(LESSON)
    assert lesson.GPUS[gpu] == (terabytes, teraflops)
    assert lesson.ridge(gpu) == pytest.approx(teraflops / terabytes)
    assert lesson.attainable(1, gpu) == pytest.approx(terabytes)
    assert lesson.attainable(1e4, gpu) == teraflops


@pytest.mark.parametrize("tokens", [1, 319, 8192])
def test_a_layer_s_intensity_counts_weights_tokens_and_result(tokens: int) -> None:
    moved = 2 * (8192 * 8192 + 2 * tokens * 8192)
    assert load(LESSON).layer(tokens) == pytest.approx(2 * tokens * 8192 * 8192 / moved)


def test_below_the_switch_every_device_has_lanes_of_its_own() -> None:
    box = load(LESSON).pcie_box()
    assert len(box) == 2 * (1 + 3 * 4)  # one uplink; of four GPUs and four NICs, both ways
    for wire, rate in box.items():
        expected = 50 if "network" in wire else 63
        assert rate == pytest.approx(expected, rel=1e-3), wire


SIGNS = {
    "RDMA-capable NICs": ("sys/class/infiniband/mlx5_0", ""),
    "RDMA: nvidia_peermem": ("proc/modules", "nvidia_peermem 16384 0\n"),
    "RDMA: open driver (DMA-BUF)": ("proc/driver/nvidia/version", "UNIX Open Kernel Module 570"),
    "Storage: nvidia_fs": ("proc/modules", "nvidia_fs 1 0\n"),
    "Async: stream memory operations": ("proc/driver/nvidia/params", "EnableStreamMemOPs: 1\n"),
    "closed driver": ("proc/driver/nvidia/version", "NVIDIA UNIX x86_64 Kernel Module 570"),
    "no stream operations": ("proc/driver/nvidia/params", "EnableStreamMemOPs: 0\n"),
}


@pytest.mark.parametrize("sign", SIGNS)
def test_each_sign_of_gpudirect_is_read_where_it_stands(sign: str, tmp_path: Path) -> None:
    name, text = SIGNS[sign]
    place = tmp_path / name
    place.parent.mkdir(parents=True)
    if text:
        place.write_text(text)
    else:
        place.mkdir()
    found = load(LESSON).gpudirect_signs(tmp_path)
    assert {name for name, there in found.items() if there} == {sign} & set(found)


@pytest.mark.parametrize("uuid", ["GPU-1f2e", "1f2e"])
def test_nvml_is_asked_about_the_card_that_cuda_means(uuid: str, monkeypatch) -> None:
    lesson = load(LESSON)
    told = {3: SimpleNamespace(uuid=uuid)}
    monkeypatch.setattr(lesson.torch.cuda, "get_device_properties", told.get)
    lesson.pynvml = SimpleNamespace(nvmlDeviceGetHandleByUUID={"GPU-1f2e": "the card"}.get)
    assert lesson.nvml_handle(3) == "the card"


def test_the_figure_shows_one_way_rates_and_each_gpu_s_own_roof(monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    load(LESSON).draw("unused.png")
    ladder, roof = drawn[0].axes
    names = [label.get_text() for label in ladder.get_yticklabels()]
    rates = [bar.get_width() for bar in ladder.patches]
    assert rates == sorted(rates)
    assert dict(zip(names, rates, strict=True)) == pytest.approx(ONE_WAY, rel=1e-3)
    roofs = {"A100": (2.0, 312), "H100": (3.35, 989), "H200": (4.8, 989), "B200": (8.0, 2250)}
    for line, (gpu, (slope, peak)) in zip(roof.lines, roofs.items(), strict=False):
        assert line.get_label().startswith(f"{gpu}, ridge {peak / slope:.0f}")
        assert dict(zip(*line.get_data(), strict=True))[1.0] == pytest.approx(slope)
        assert max(line.get_ydata()) == peak
    marks = [tuple(float(x[0]) for x in line.get_data()) for line in roof.lines[4:]]
    expected = [(1 / 6, 3.35 / 6), (1, 3.35), (989 / 3.35, 989)]
    assert marks == [pytest.approx(mark, rel=5e-3) for mark in expected]
