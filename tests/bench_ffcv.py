"""What `make bench` says of FFCV: an epoch through its loader beside one through the DataLoader."""

import contextlib
import io
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from exercises.ranks import run
from tests.lessons import load

LESSON, ROUNDS = "data-loading/01_ffcv_distributed_optimization.py", 4
AIMS = {"jpg": 1 / 4, "raw": 1 / 7, "jpg97": 1 / 2}
NAMES = {"jpg": "JPEG of quality 90", "raw": "raw pixels", "jpg97": "JPEG of quality 97, as theirs"}


def epochs(repeats: int) -> dict[str, list[float]]:
    """Seconds of each loader's epochs, which take turns."""
    lesson = load(LESSON)
    quality = lesson.RGBImageField("jpg", jpeg_quality=97)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        place = Path(folder)
        lesson.prepare(place, None)
        lesson.write(place, "jpg97", quality)
        seconds, _ = lesson.race(lesson.loaders_of(place, [*AIMS], ROUNDS), repeats)
    images = ROUNDS * lesson.IMAGES
    return {name: [images * wall for wall, _ in times] for name, times in seconds.items()}


def ratios(repeats: int) -> list[dict]:
    if find_spec("ffcv") is None:
        print("FFCV is not installed: no row", file=sys.stderr)
        return []
    seconds = run(epochs, 1, repeats, deadline=60 + 10 * repeats)[0]
    setting = "960 JPEGs of 500 x 375, crops of 224, float32, two workers each, a whole epoch"
    return [
        {
            "name": f"FFCV, {NAMES[file]}: DataLoader",
            "setting": setting,
            "ours": seconds[file],
            "peer": seconds["DataLoader"],
            "aim": aim,
        }
        for file, aim in AIMS.items()
    ]
