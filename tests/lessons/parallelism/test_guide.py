"""parallelism/README.md: the figures of its guide follow from the formulas that it names."""

import re

import pytest

from course.lessons import ROOT

GUIDE = (ROOT / "parallelism/README.md").read_text()
NVLINK_3, NVLINK_4, PCIE_4, CARD = 300e9, 450e9, 31e9, 50e9  # bytes per second, one way
H100, A100 = 0.4 * 989e12, 0.4 * 312e12  # FLOP/s reached
RESNET, GPT2, LLAMA, LARGE = 25.6e6, 1.558e9, 7e9, 70e9  # parameters
UNITS = {"GB": 1e9, "MB": 1e6, "million": 1e6, "ms": 1e-3, "%": 0.01, "e9": 1e9}


def ring(n: int) -> float:
    """Share of an array that each of n ranks sends to gather or to reduce-scatter it."""
    return (n - 1) / n


def activations(tokens: int, width: int, layers: int) -> float:
    """Bytes of a sequence, nothing recomputed."""
    return 34 * tokens * width * layers


def logits(tokens: int, vocabulary: int) -> float:
    """Bytes of them and their gradient, in float32."""
    return 8 * tokens * vocabulary


of_gpt2 = activations(1024, 1600, 48)
of_llama = activations(2048, 4096, 32)
of_large = activations(4096, 8192, 80)
gpt2_sent = 2 * ring(4) * 2 * GPT2
llama_sent = 3 * ring(8) * 2 * LLAMA
by_rings = 3 * ring(64) * 2 * LARGE  # over the border of a machine, which has eight cards
by_hierarchy = 3 * ring(8) * 2 * LARGE
sums = 4 * 80 * 4096 * 8192 * 2
lora = 32 * 4 * 16 * 8192

FIGURES = {  # what the guide says: what it follows from
    "P is the number": {"0.41 GB": logits(1024, 50_257)},
    "**How large must": {
        "879 tokens": H100 / NVLINK_4,
        "4,026 tokens": A100 / PCIE_4,
    },
    "**Bytes per GPU": {"400 GB": 8 * CARD, "989 tokens": H100 / (8 * CARD)},
    "**ResNet-50": {
        "0.31 GB": 12 * RESNET,
        "102 MB": 4 * RESNET,
        "179 MB": 2 * ring(8) * 4 * RESNET,
        "0.6 ms": 2 * ring(8) * 4 * RESNET / NVLINK_3,
        "6 ms": 2 * ring(8) * 4 * RESNET / PCIE_4,
    },
    "**GPT-2": {
        "1.56e9": GPT2,
        "24.9 GB": 16 * GPT2,
        "10.9 GB": (4 + 12 / 4) * GPT2,
        "8.6 GB": (2 + 14 / 4) * GPT2,
        "6.2 GB": 16 / 4 * GPT2,
        "2.7 GB": of_gpt2,
        "0.16 GB": of_gpt2 * 2 / 34,
        "0.41 GB": logits(1024, 50_257),
        "4.7 GB": gpt2_sent,
        "0.15 s": gpt2_sent / PCIE_4,
    },
    "**LLaMA 7B": {
        "112 GB": 16 * LLAMA,
        "14 GB": 16 / 8 * LLAMA,
        "9.1 GB": of_llama,
        "0.5 GB": of_llama * 2 / 34,
        "37 GB": llama_sent,
        "0.08 s": llama_sent / NVLINK_4,
        "0.9 s": 6 * LLAMA * 8192 / H100,
        "26 GB": (2 + 14 / 8) * LLAMA,
    },
    "**70B": {
        "17.5 GB": 16 / 64 * LARGE,
    },
    "- *FSDP over 64": {
        "91 GB": of_large,
        "5.4 GB": of_large * 2 / 34,
        "413 GB": by_rings,
        "368 GB": by_hierarchy,
        "52 GB": by_rings / 8,
        "1.0 s": by_rings / (8 * CARD),
        "2.1 s": by_rings / 200e9,
        "5.8 s": 8 * LARGE * 4096 / H100,
    },
    "- *Tensor 8 x FSDP": {
        "11.4 GB": of_large / 8,
        "368 GB": by_hierarchy,
        "46 GB": 3 * ring(8) * 2 * LARGE / 8,
        "0.9 s": by_hierarchy / (8 * CARD),
        "0.54 s": 6 * LARGE * 4096 / 8 / H100,
        "67 MB": 4096 * 8192 * 2,
        "21 GB": sums,
        "38 GB": 2 * ring(8) * sums,
        "0.08 s": 2 * ring(8) * sums / NVLINK_4,
        "17.5 GB": 2 * LARGE / 8,
        "0.3 s": ring(8) * 2 * LARGE / (8 * CARD),
    },
    "- *Tensor 8 x pipeline": {"18%": 7 / 39},
    "**Fine-tuning": {
        "14 GB": 2 * LLAMA,
        "16.8 million": lora,
        "0.27 GB": 16 * lora,
        "3.6 GB": (2 * LLAMA + 16 * lora) / 4,
        "140 GB": 2 * LARGE,
        "17.5 GB": 2 * LARGE / 8,
        "140 GB on each": 16 / 8 * LARGE,
    },
}


def passage(begins: str) -> str:
    """The paragraph or item of the guide that begins so, on one line."""
    found = re.search(rf"^{re.escape(begins)}.*?(?=\n\n|\n- |\Z)", GUIDE, re.S | re.M)
    assert found, f"nothing in the guide begins with {begins!r}"
    return " ".join(found[0].split())


@pytest.mark.parametrize("begins", FIGURES)
def test_figures_of_the_guide(begins: str) -> None:
    text = passage(begins)
    for told, value in FIGURES[begins].items():
        assert re.search(rf"(?<![\d.,]){re.escape(told)}", text), (begins, told)
        number, unit = re.match(r"([\d.,]*\d) ?(%|\w*)", told).groups()
        digits = len(number.partition(".")[2])
        in_units = value / UNITS.get(unit, 1)
        exactly = pytest.approx(in_units, abs=0.5001 / 10**digits)
        assert float(number.replace(",", "")) == exactly, (begins, told)
