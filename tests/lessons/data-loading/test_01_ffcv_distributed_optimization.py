"""Images of one's own, the claims of the loaders against broken lines."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from course.playing import play
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

LEFT = "samples that an epoch leaves out"
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
}
ONCE = ("alternate(loaders, 2)", "alternate(loaders, 1)")
BREAKS = Breaks(LINES, changes=[STATIONS, ONCE], deadline=150)


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
