"""FFCV's file against known bytes, its buffers, training: claims against broken lines."""

import struct
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

# FFCV's pipelines in plain Python: the same values, without seconds of compiling on every rank.
NO_JIT = ('os.environ["NUMBA_OPT"] = "0"', 'os.environ["NUMBA_DISABLE_JIT"] = "1"')
LESSON = "data-loading/02_beton_file.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

SIZES = {1: [NO_JIT], 3: [NO_JIT]}  # the plain run, on four ranks, compiles
ON_GPUS = OnGpus(changes=[NO_JIT], ranks=(1, 2))


def test_the_header_holds_what_ffcv_documents(beton: Path) -> None:
    data = beton.read_bytes()
    version, fields, page, samples, end = struct.unpack_from("<HHIQQ", data)
    assert (version, fields, page, samples) == (2, 3, 2**21, 130)
    assert end == (1 + 8) * 2**21  # 18 images of 115,200 bytes per page
    assert len(data) == end + 24 * 130
    kinds = [data[24 + 1041 * i] for i in range(3)]
    names = [data[25 + 1041 * i :][:16].rstrip(b"\0") for i in range(3)]
    assert (kinds, names) == ([2, 1, 1], [b"image", b"label", b"index"])
    header, described, rows, entries = lesson.parse(beton)
    assert header.tolist() == (version, fields, page, samples, end)
    assert [f["name"] for f in described] == names
    assert lesson.ROW.itemsize == 32
    assert rows["index"].tolist() == sorted(entries["sample"]) == list(range(130))
    assert set(rows["image"]["width"]) == {240}
    assert set(rows["image"]["mode"]) == {1}  # raw
    assert rows["image"]["start"].tolist() == entries["start"].tolist()


def test_numpy_and_ffcv_read_the_same(beton: Path) -> None:
    from ffcv.reader import Reader

    header, _, rows, entries = lesson.parse(beton)
    reader = Reader(str(beton))
    assert header.tobytes() == reader.header.tobytes()
    assert rows.tobytes() == reader.metadata.tobytes()
    assert entries.tobytes() == reader.alloc_table.tobytes()


def test_channels_come_first_and_rows_stay_rows() -> None:
    image_BHWC = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).view(2, 4, 5, 3)
    image_BCHW = lesson.as_floats(image_BHWC, torch.device("cpu"))
    assert torch.equal((image_BCHW * 255).round().movedim(1, 3), image_BHWC.float())


IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
GONE = (IMPORT, IMPORT + "        raise ImportError\n")


def gradients_of_two_steps() -> list[float]:
    """The norm of what the optimizer is given, twice for one batch of this rank's own."""
    lesson = load(LESSON, GONE, ("lr=0.05", "lr=0.0"))
    lesson.EPOCHS = 2
    generator = torch.Generator().manual_seed(dist.get_rank())
    image_BHWC = torch.randint(256, (2, 160, 240, 3), generator=generator, dtype=torch.uint8)
    batch = (image_BHWC, torch.tensor([[0], [1]]), None)
    norms = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    register_optimizer_step_pre_hook(note)
    lesson.train(lambda epoch: [batch], (image_BHWC, torch.tensor([0, 1])), torch.device("cpu"))
    return norms


def test_gradients_are_averaged_over_the_ranks_and_begin_anew_at_each_step() -> None:
    """Both runs of the lesson share the loop, so they agree whatever it does."""
    first, second = run(gradients_of_two_steps, 2)
    assert first == second
    assert first == pytest.approx([first[0]] * 2, rel=1e-6)


def test_a_step_takes_32_images_over_all_ranks() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    lesson.open_beton = Mock(side_effect=InterruptedError)
    with pytest.raises(InterruptedError):
        lesson.check_training(Path("raw.beton"), torch.device("cpu"))
    assert lesson.open_beton.call_args.args[1] == 8


@pytest.mark.deep
def test_without_ffcv_all_is_blocked_and_that_is_no_success() -> None:
    played = play(LESSON, 2, GONE)
    assert played.code == 1
    assert [row["verdict"] for row in played.ledger] == ["BLOCKED"] * 3, played.output
    assert all(row["needs"].startswith("FFCV") for row in played.ledger)


LEFT = "different samples in the batches that were kept"
PIXELS = "pixels that differ in epoch 1"
SEEN = "test images that training has seen"
LOSS = "test loss, FFCV's minus DataLoader's"
WRITTEN = {
    "what is kept is cloned, as in Try": (
        "        kept.append(index)\n",
        "        kept.append(index.clone())\n",
        {LEFT},
    ),
    "the last image is left out, and all labels are 0": (
        "dataset(Images(N, SEED)",
        "dataset([(Images(N, SEED)[i][0], 0, i) for i in range(N - 1)]",
        {
            "samples, as the header says",
            "bytes of the file",
            "pixels and labels that NumPy reads wrong",
            PIXELS,
            LOSS,
            "test accuracy, FFCV's minus DataLoader's",
            "test accuracy",
        },
    ),
}
READ = {
    "batches are cloned as they come": (
        "_, index in loader:",
        "_, index in [[part.clone() for part in batch] for batch in loader]:",
        {"buffers that an epoch's batches lie in", LEFT},
    ),
    "the DataLoader's epochs are all alike, as in Try": (
        "        sampler.set_epoch(epoch)\n",
        "",
        {PIXELS, LOSS},
    ),
    "the test images are the first of training's": (
        "Images(32, SEED + 1)",
        "Images(32, SEED)",
        {SEEN},
    ),
    "the file has larger pages": (
        "page_size=PAGE, num",
        "page_size=2 * PAGE, num",
        {"pages of samples", "bytes of the file"},
    ),
}
# Trained on other pixels, the same few images may be told apart, or not.
SAME_ACCURACY = ("0, ffcv_accuracy - accuracy, atol=slack", "0, 0")
BREAKS = [
    Breaks(WRITTEN, changes=[NO_JIT], deadline=120),
    Breaks(READ, changes=[NO_JIT, SAME_ACCURACY], deadline=120),
]
