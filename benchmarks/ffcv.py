"""What `make bench` says of FFCV: an epoch by its loader next to one by the DataLoader."""

import contextlib
import io
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from course.playing import load
from course.ranks import run

LESSON, ROUNDS = "data-loading/01_ffcv_distributed_optimization.py", 4
AIMS = {"jpg90": 1 / 4, "raw": 1 / 7, "jpg": 1 / 2}
NAMES = {"jpg90": "JPEG of quality 90", "raw": "raw pixels", "jpg": "JPEG of quality 97, as theirs"}


def epochs(repeats: int) -> dict[str, list[float]]:
    """Seconds of each loader's epochs, which take turns."""
    lesson = load(LESSON)
    smaller = lesson.RGBImageField("jpg", jpeg_quality=90)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        place = Path(folder)
        lesson.prepare(place, None)
        lesson.write_photos(place / "photos", place / "jpg90.beton", smaller)
        loaders = lesson.all_loaders(place, ROUNDS, tuple(AIMS))
        lesson.alternate(loaders, 1)  # warm-up: FFCV compiles
        seconds = lesson.alternate(loaders, repeats)
    images = ROUNDS * lesson.N
    return {name: [images * wall for wall, _ in times] for name, times in seconds.items()}


def ratios(repeats: int) -> list[dict]:
    if find_spec("ffcv") is None:
        print("FFCV is not installed: no row", file=sys.stderr)
        return []
    seconds = run(epochs, 1, repeats, deadline=60 + 10 * repeats)[0]
    setting = "968 JPEGs of 500 x 375, crops of 224, float32, two workers each, a whole epoch"
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
