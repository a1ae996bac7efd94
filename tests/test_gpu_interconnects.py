"""The wires and what a message costs: figures, copies, fits; and what a wrong line does to them."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from exercises.ranks import RanksFailed, run
from tests.lessons import load, play

WIRES = "fundamentals/01_gpu_interconnects.py"
MESSAGES = "fundamentals/03_latency_and_bandwidth.py"
PCIE, LINK = "PCIe: derived off published, at most, GB/s", "NVLink and InfiniBand: the same"
LIKE, SLIP = (
    "NVLink 4 / PCIe 5.0, like for like",
    "  NVLink both ways / PCIe one way, a common slip",
)
RACK, CACHE = "NVL72: 72 GPUs, both ways summed, TB/s", "CPU copy: GB/s for 256 KiB / for 256 MiB"
ADD, PRODUCT = "add: FLOP/byte, one for three numbers", "matmul: FLOP/byte, 2n³ for 3n² numbers"
ROOF = "left of the ridge: matrix x vector / its roof"
PEAK = "  and / peak FLOP/s: it waits for memory"
MEMORY = "right of it: matmul / memory bandwidth"

QUICK = (  # fewer sizes and smaller tensors
    ("[4**k for k in range(3, 15)]", "[64, 4**9, 4**14]"),
    ("(4096, 1024, None)", "(2048, 1024, None)"),
)
FEW = (("itertools.product(range(10)", "itertools.product(range(3)"),)  # rounds
BREAKS = {  # what each wrong line must make FAIL, and nothing else
    "coding of PCIe 2.0": ("32, 128 / 130", "32, 8 / 10", {PCIE, LIKE, SLIP}),
    "flits without overhead": ("64, 242 / 256", "64, 256 / 256", {PCIE}),
    "lanes of NVLink 2": ("Link(12, 4, 50", "Link(12, 8, 50", {LINK}),
    "bits for bytes": ("100, 1, 50,", "100, 1, 400,", {LINK}),
    "duplex for one way": (
        'LINKS["NVLink 4"].one_way',
        '2 * LINKS["NVLink 4"].one_way',
        {LIKE, SLIP},
    ),
    "a rack one way": ("72 * 2 *", "72 *", {RACK}),
    "FLOPs of a sum": ("or out.numel()", "or 2 * out.numel()", {ADD}),
    "caches upside down": ("copied[4**14] / copied[4**9]", "copied[4**9] / copied[4**14]", {CACHE}),
    "vector as peak": (
        '["add"], ran["matmul"]',
        '["add"], ran["matrix x vector"]',
        {PRODUCT, PEAK},
    ),
    "roof without intensity": ("intensity * bandwidth)", "bandwidth / 20)", {ROOF}),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_wrong_line_fails_its_claims(name: str) -> None:
    old, new, expected = BREAKS[name]
    played = play(WIRES, 2, *QUICK, (old, new))
    assert played.code == 1, played.output
    disturbed = {PEAK, MEMORY}  # they are timed, and other jobs may run
    assert expected <= played.failed <= expected | disturbed


WHOLE = "bytes that came back wrong, all paths"
MESSAGE_BREAKS = {
    "shared memory not written": ("shared[:n] = out[:n]", "shared[:1] = out[:1]", {WHOLE}, set()),
    "socket sends zeros": ("wire.sendall(out[:n])", "wire.sendall(bytes(n))", {WHOLE}, set()),
    "alpha / beta": ("self.alpha * self.beta", "self.alpha * self.beta / 64", set(), {"n_1/2"}),
    "no latency in the fit": (
        "np.stack([1 / t[seen]",
        "np.stack([0 / t[seen]",
        set(),
        {"off", "n_1/2"},
    ),
}


@pytest.mark.parametrize("name", MESSAGE_BREAKS)
def test_a_wrong_message_fails_its_claims(name: str) -> None:
    old, new, exactly, about = MESSAGE_BREAKS[name]
    played = play(MESSAGES, 2, *FEW, (old, new))
    assert played.code == 1, played.output
    assert exactly <= played.failed
    for part in about:
        assert any(part in text for text in played.failed)
    if WHOLE not in exactly:
        assert WHOLE not in played.failed


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
def test_the_fit_finds_the_line_it_was_made_of(alpha: float, beta: float) -> None:
    lesson = load(MESSAGES)
    found = lesson.fit({n: alpha + n / beta for n in lesson.SIZES})
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.beta == pytest.approx(beta, rel=1e-6)
    assert found.off == pytest.approx(1)
    assert found.half == pytest.approx(alpha * beta, abs=1)


def test_half_is_found_between_sizes() -> None:
    lesson = load(MESSAGES)
    curve = {n: 10e-6 + n / 10e9 for n in lesson.SIZES}  # n_1/2 is 100 kB
    assert lesson.reaches_half(curve) == pytest.approx(100e3, rel=0.15)


def everyone_hears_rank_0() -> object:
    lesson = load(MESSAGES)
    return lesson.from_rank_0(f"rank {dist.get_rank()}", dist.group.WORLD)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_everyone_hears_rank_0(ranks: int) -> None:
    assert run(everyone_hears_rank_0, ranks) == ["rank 0"] * ranks


def leave_while_the_other_listens() -> None:
    lesson = load(MESSAGES)
    import socket

    wire = lesson.connect(socket.AF_INET, dist.group.WORLD)
    if dist.get_rank() == 0:
        _, receive = lesson.through_socket(wire, memoryview(b"x"), memoryview(bytearray(1)))
        receive(1)
    wire.close()


def test_a_rank_that_leaves_is_an_error_not_a_hang() -> None:
    with pytest.raises(RanksFailed, match="the other rank left"):
        run(leave_while_the_other_listens, 2)


# No GPU here: NVML is a stand-in, so that the predictions for known machines can be checked.


class Machine(SimpleNamespace):
    """NVML of a machine: links lead to a peer GPU or a switch; handles are GPU numbers."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_NVLINK_MAX_LINKS, NVMLError = 2, 18, RuntimeError

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

    def nvmlDeviceGetMaxPcieLinkGeneration(self, a: int) -> int:
        return self.generation

    def nvmlDeviceGetMaxPcieLinkWidth(self, a: int) -> int:
        return self.width


MACHINES = {
    "DGX A100": (Machine(links=["switch"] * 12, version=4), "NV12", 300),
    "HGX H100": (Machine(links=["switch"] * 18, version=6), "NV18", 450),
    "HGX B200": (Machine(links=["switch"] * 18, version=7), "NV18", 900),
    "DGX-1, V100": (Machine(links=["gpu 1"] * 2 + ["gpu 2"] * 2, version=2), "NV2", 50),
    "DGX-1, P100": (Machine(links=["gpu 1"] + ["gpu 2"] * 3, version=1), "NV1", 20),
    "workstation": (Machine(links=[], way=30, generation=4, width=8), "PHB", 15.75),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_pair_of_gpus_is_promised_what_joins_it(name: str) -> None:
    machine, label, rate = MACHINES[name]
    lesson = load(WIRES)
    lesson.pynvml, lesson.handle = machine, lambda gpu: gpu
    assert lesson.joined(0, 1) == (label, pytest.approx(rate, rel=1e-3))


def judged(got: float) -> list[str]:
    """Verdicts on a pair of GPUs that was promised 450 GB/s and gets `got`."""
    lesson = load(WIRES)
    curve = {n: n / got / 1e9 for n in lesson.SIZES}
    lesson.judge({"GPU 0 to 1, NV18": curve}, {"GPU 0 to 1, NV18": 450})
    return [row["verdict"] for row in lesson.ledger]


@pytest.mark.parametrize(("got", "verdict"), [(396, "PASS"), (900, "FAIL"), (55, "FAIL")])
def test_a_copy_is_judged_by_its_promise(got: float, verdict: str) -> None:
    assert run(judged, 2, got) == [[verdict]] * 2


def test_figures_are_drawn(tmp_path) -> None:
    for path, argument in ((WIRES, "GPU 0 to 1"), (MESSAGES, "TCP loopback")):
        lesson = load(path)
        curve = {n: 1e-5 + n / 1e10 for n in lesson.SIZES}
        lesson.draw({"memory": curve, argument: curve}, str(tmp_path / "figure.png"))
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
