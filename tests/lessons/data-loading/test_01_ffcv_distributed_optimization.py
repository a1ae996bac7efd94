"""Images of one's own, the claims of the loaders against broken lines."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from course.playing import play

LESSON = "data-loading/01_ffcv_distributed_optimization.py"
NEEDED = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")

UNTIMED = (
    ("        stations = check_stations(place, device)\n", "        stations = {}\n"),
    ("        core = check_loaders(place)\n", "        core = {}\n"),
)
LEFT = "samples that an epoch leaves out"
PLACE = "share of samples at their place in 2 epochs"
MEANS = {f"mean of normalised crops, {name} - DataLoader's" for name in ("jpg", "raw")}


def test_without_ffcv_the_lesson_is_blocked() -> None:
    line = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
    gone = (line, line + "        raise ImportError\n")
    played = play(LESSON, 3, gone)
    played.expect(set())
    needs = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert len(needs) == 2
    assert all(need.startswith("FFCV") for need in needs)
    assert max(map(len, played.output.splitlines())) <= 100


@pytest.mark.deep
@NEEDED
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


@pytest.mark.deep
@NEEDED
def test_epochs_in_file_order_look_alike() -> None:
    """Try 2: nothing is left out, and only the order says that nothing was shuffled."""
    order = ("    order = OrderOption.RANDOM\n", "    order = OrderOption.SEQUENTIAL\n")
    played = play(LESSON, 2, *UNTIMED, order, deadline=120)
    played.expect({PLACE})


@pytest.mark.deep
@NEEDED
def test_pixels_that_are_normalised_as_if_they_were_floats(tmp_path: Path) -> None:
    """Try 1: the mean of what is delivered gives it away; and the figure is drawn."""
    change = ("NormalizeImage(255 * MEAN, 255 * STD, np", "NormalizeImage(MEAN, STD, np")
    path = tmp_path / "figure.png"
    once = ("alternate(loaders, 2)", "alternate(loaders, 1)")
    played = play(LESSON, 2, change, once, argv=("--figure", str(path)), deadline=150)
    played.expect(MEANS)
    assert path.read_bytes().startswith(b"\x89PNG")
