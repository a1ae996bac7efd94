"""The wires: figures derived, copies timed, messages whole; and what a wrong line does to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lessons import load, play

WIRES, MESSAGES = "fundamentals/01_gpu_interconnects.py", "fundamentals/03_latency_and_bandwidth.py"

SMALL = (  # the same lesson on less, for breaks that do not depend on size
    ("range(3, 15)]", "(3, 8, 9, 14)]"),
    ("else (4096, 1024, None)", "else (2048, 1024, None)"),
)
PCIE, NVLINK = "PCIe: derived off published, at most, GB/s", "NVLink and InfiniBand: the same"
LIKE, SLIP = (
    "NVLink 4 / PCIe 5.0, like for like",
    "  NVLink both ways / PCIe one way, a common slip",
)
RACK, COPY = "NVL72: 72 GPUs, both ways summed, TB/s", "CPU copy: GB/s for 256 KiB / for 256 MiB"
ADD, MATMUL = "add: FLOP/byte, one for three numbers", "matmul: FLOP/byte, 2n³ for 3n² numbers"
LEFT, PEAK = (
    "left of the ridge: matrix x vector / its roof",
    "  and / peak FLOP/s: it waits for memory",
)
RIGHT = "right of it: matmul / memory bandwidth"
BREAKS = [
    pytest.param("32, 128 / 130", "32, 8 / 10", {PCIE, LIKE, SLIP}, id="coding of PCIe 2.0"),
    pytest.param("Link(1, 16, 64, 242", "Link(1, 16, 64, 256", {PCIE}, id="flit without overhead"),
    pytest.param("Link(12, 4, 50", "Link(12, 8, 50", {NVLINK}, id="lanes of NVLink 2"),
    pytest.param("Link(1, 4, 100, 1, 50", "Link(1, 4, 100, 1, 400", {NVLINK}, id="bits for bytes"),
    pytest.param('"NVLink 4"].one_way', '"NVLink 4"].one_way * 2', {LIKE, SLIP}, id="duplex twice"),
    pytest.param("72 * 2 *", "72 *", {RACK}, id="rack one way"),
    pytest.param("a.nbytes + b.nbytes + out.nbytes", "a.nbytes", {ADD, MATMUL}, id="bytes of one"),
    pytest.param("or out.numel()", "or 2 * out.numel()", {ADD}, id="two FLOPs a sum"),
    pytest.param("flops / took[k], size / took", "size / took[k], size / took", None, id="bytes/s"),
    pytest.param("copied[4**14] / copied[4**9]", "copied[4**9] / copied[4**14]", None, id="ratio"),
]


@pytest.mark.parametrize(("old", "new", "expected"), BREAKS)
def test_a_wrong_line_fails_its_claim(old: str, new: str, expected: set[str] | None) -> None:
    played = play(WIRES, 2, *SMALL, (old, new))
    assert played.code == 1, played.output
    if expected is None:
        expected = {"bytes/s": {LEFT, PEAK}, "ratio": {COPY}}[
            "ratio" if "copied" in old else "bytes/s"
        ]
    assert played.failed & {PCIE, NVLINK, LIKE, SLIP, RACK, ADD, MATMUL, COPY} <= expected
    assert played.failed & expected


messages = load(MESSAGES)
SIZES = [4**k for k in range(3, 12)]


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11))
def test_the_fit_finds_latency_and_bandwidth_of_an_exact_line(alpha: float, beta: float) -> None:
    found = messages.fit({n: alpha + n / beta for n in SIZES})
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.beta == pytest.approx(beta, rel=1e-6)
    assert found.off == pytest.approx(1, abs=1e-6)
    assert found.half == max(1, round(found.alpha * found.beta))


def test_half_of_the_best_bandwidth_is_where_the_line_says() -> None:
    alpha, beta = 1e-5, 1e9
    curve = {n: alpha + n / beta for n in [2**k for k in range(4, 31)]}
    assert messages.reaches_half(curve) == pytest.approx(alpha * beta, rel=0.1)


def test_bytes_lost_on_the_way_are_counted() -> None:
    lost = ("        into[:n] = shared[:n]", "        into[: n // 2] = shared[: n // 2]")
    assert "bytes that came back wrong, all paths" in play(MESSAGES, 2, lost).failed


def test_a_wrong_prediction_of_where_latency_ends_fails() -> None:
    wrong = ("round(self.alpha * self.beta))", "round(self.alpha * self.beta / 64))")
    failed = play(MESSAGES, 2, wrong).failed
    assert "TCP loopback: n_1/2 found - predicted, steps of 4x" in failed
