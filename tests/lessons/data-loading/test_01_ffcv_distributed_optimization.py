"""Images of one's own, the claims of the loaders against broken lines."""

from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest

from course.playing import load, play
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/01_ffcv_distributed_optimization.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")

LOADERS = ("        core = check_loaders(place)\n", "        core = {}\n")
STATIONS = ("        stations = check_stations(place, device)\n", "        stations = {}\n")
UNTIMED = [STATIONS, LOADERS]
# What rank 0 alone does or starts is the same whatever the lesson's world size is.
SIZES = {
    ranks: [
        ("    if RANK != 0:\n        os.environ", "    if RANK >= 0:\n        os.environ"),
        *UNTIMED,
    ]
    for ranks in (1, 3)
}
IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
GONE = (IMPORT, IMPORT + "        raise ImportError\n")
WITHOUT = {
    "FFCV": Without(
        [GONE], {"where a DataLoader's time goes", "threads against processes"}, ranks=3
    )
}
ON_GPUS = OnGpus(
    changes=[  # FFCV copies on streams of CUDA's, in a thread of its own
        (IMPORT, "    with contextlib.suppress(ImportError):\n        raise ImportError\n"),
        (
            'all")\n        finish()',
            'all")\n        measure_copies(device)\n        finish()',
        ),
        ("torch.randn(256, 3,", "torch.randn(4, 3,"),
    ]
)
NO_DEVICE = {
    "station_seconds": "copy_to_device waits",
    "wrapped": "copy_to_device waits",
    "alternate": "loaders end on the host",
}


def test_training_crops_are_drawn_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_OPT", "0")  # which the lesson sets, and nobody else is to see
    monkeypatch.setenv("RANK", "1")  # a launcher does not import FFCV, rank 0 torchvision too
    crop = load(LESSON).crops_by_ffcv()[0]
    drawn = {crop.get_crop_generator(375, 500, crop.scale, crop.ratio) for _ in range(9)}
    assert len(drawn) > 1


LEFT = "samples that an epoch leaves out"
TWICE = "samples that come twice"
PLACE = "share of samples at their place in 2 epochs"
MEANS = {f"mean of normalised crops, {name} - DataLoader's" for name in ("jpg", "raw")}

LINES = {
    # Nothing is left out, and only the order says that nothing was shuffled.
    "epochs in file order, as in Try": (
        "    order = OrderOption.RANDOM\n",
        "    order = OrderOption.SEQUENTIAL\n",
        {PLACE},
    ),
    # The mean of what is delivered gives it away.
    "red and blue are exchanged": (
        "NormalizeImage(255 * MEAN, 255 * STD, np",
        "NormalizeImage(255 * MEAN[::-1].copy(), 255 * STD, np",
        MEANS,
    ),
    "pixels that are normalised as if they were floats, as in Try": (
        "NormalizeImage(255 * MEAN, 255 * STD, np",
        "NormalizeImage(MEAN, STD, np",
        MEANS,
    ),
    "DataLoader has no workers": (
        "num_workers=WORKERS, persistent_workers=True",
        "num_workers=0",
        {"processes that DataLoader started"},
    ),
    "what fills no batch is dropped": (
        '"drop_last": False',
        '"drop_last": True',
        {LEFT, TWICE},
    ),
    "raw.beton holds JPEGs, too": (
        'RGBImageField("raw")',
        'RGBImageField("jpg", jpeg_quality=97)',
        {"bytes per image in raw.beton"},
    ),
}
ONCE = ("alternate(loaders, 2)", "alternate(loaders, 1)")
SLOW = {
    # Its workers stay, as those of the first do, and are counted.
    "another DataLoader in FFCV's place": (
        'functools.partial(point_at, ffcv, place / f"{name}.beton")',
        'lambda another=torchvision_loader(place / "photos", rounds): another',
        {
            "core time, DataLoader's / FFCV's, jpg",
            "core time, DataLoader's / FFCV's, raw",
            "processes that FFCV started",
        },
    ),
    "augmenting is not timed": (
        'timed("augment", crops_by_torchvision())',
        "crops_by_torchvision()",
        {"all stations / the whole epoch"},
    ),
    "an image is opened and not decoded": (
        'folders.Image.open(file).convert("RGB")',
        "folders.Image.open(file)",
        {"time to read / time to decode"},
    ),
}
BREAKS = [
    Breaks(LINES, changes=[STATIONS, ONCE], deadline=150),
    Breaks(SLOW, deadline=150, clock=True),
]


@pytest.mark.deep
def test_images_of_ones_own_and_a_dropped_last_batch(tmp_path: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    for label, photograph in zip("ab", load_sample_images().images, strict=True):
        (tmp_path / label).mkdir()
        for name, box in ("tall.JPEG", (0, 0, 200, 427)), ("wide.png", (0, 0, 640, 100)):
            Image.fromarray(photograph).crop(box).save(tmp_path / label / name)
    broken, data = ('"drop_last": False', '"drop_last": True'), ("--data", str(tmp_path))
    played = play(LESSON, 2, *UNTIMED, broken, argv=data, deadline=120)
    assert played.failed in ({LEFT}, {LEFT, "samples that come twice"}), played.output


def test_each_round_of_the_dataloader_brings_every_photo_once() -> None:
    lesson = load(LESSON)
    lesson.Photos = lambda folder, transform: range(lesson.N)
    lesson.crops_by_torchvision = Mock()
    for rounds in (1, 2):
        drawn = lesson.torchvision_loader(Path(), rounds).sampler
        assert sorted(drawn) == sorted([*range(lesson.N)] * rounds)
