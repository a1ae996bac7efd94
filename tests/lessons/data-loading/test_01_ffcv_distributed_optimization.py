"""Images of one's own, the claims of the loaders against broken lines."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call, patch

import pytest
import torch

from course.playing import load, play
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/01_ffcv_distributed_optimization.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")

STATIONS = (
    "        stations, without_workers = check_stations(place, device)\n",
    "        stations, without_workers = {'decode': 1.0, 'augment': 1.0}, 1.0\n",
)
LOADERS = (
    "        core = check_loaders(place, without_workers)\n",
    "        core = {'DataLoader': 1.0, 'jpg': 1.0, 'raw': 0.2}\n",
)
SIZES = {ranks: [STATIONS, LOADERS] for ranks in (1, 3)}  # what rank 0 measures is the same there
IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
GONE = (IMPORT, IMPORT + "        raise ImportError\n")
WITHOUT = {"FFCV": Without([GONE], {"what FFCV takes away"}, ranks=3)}
ON_GPUS = OnGpus(changes=[GONE])  # FFCV copies on streams of CUDA's, in a thread of its own
NO_DEVICE = {
    "station": "copy waits inside",
    "alternate": "loaders end on the host",
    "cores_busy": "loaders end on the host",
}

MEANS = {f"mean of normalized crops, {name} - DataLoader's" for name in ("jpg", "raw")}
BYTES = "bytes, file of raw pixels / JPEGs"
STARTED = {name: f"processes that {name} started" for name in ("DataLoader", "FFCV")}
ONCE = [
    ("alternate(loaders, 2)", "alternate(loaders, 1)"),
    ('cores_busy(loaders["DataLoader"], found["rate"])', "0.0"),
]
LINES = {
    # The mean of what is delivered gives it away.
    "red and blue are exchanged": (
        "NormalizeImage(255 * MEAN, 255 * STD, np",
        "NormalizeImage(255 * MEAN[::-1].copy(), 255 * STD, np",
        MEANS,
    ),
    "pixels that are normalized as if they were floats, as in Try": (
        "NormalizeImage(255 * MEAN, 255 * STD, np",
        "NormalizeImage(MEAN, STD, np",
        MEANS,
    ),
    "DataLoader has no workers": (
        "rounds: int, workers: int = WORKERS) -> DataLoader:",
        "rounds: int, workers: int = 0) -> DataLoader:",
        {STARTED["DataLoader"]},
    ),
    "raw pixels are written as JPEGs": (
        'place / "raw.beton", RGBImageField("raw"))',
        'place / "raw.beton", RGBImageField("jpg", jpeg_quality=97))',
        {BYTES},
    ),
}
DECODE = "time to decode, FFCV's / DataLoader's"
AUGMENT = "time to augment, FFCV's / DataLoader's"
READ = "time to decode / time to read"
WHOLE = "all stations / the whole epoch"
WORKERS = "core time, 2 workers / none"
BUSY = "cores busy / (rate x core time)"
SAVED = {f"core time, DataLoader's / FFCV's, {name}" for name in ("JPEG", "raw")}
SLOW = {
    # Its workers stay, as those of the first do, and are counted.
    "another DataLoader in FFCV's place": (
        'ffcv_loader(place / f"{name}.beton", rounds)',
        'torchvision_loader(place / "photos", rounds)',
        {*SAVED, STARTED["FFCV"], DECODE, AUGMENT},
    ),
    "the stopwatches run at half speed": (
        "spent[name] += time.perf_counter() - start",
        "spent[name] += (time.perf_counter() - start) / 2",
        {WHOLE},
    ),
    "an image is opened and not decoded, as in Try": (
        'Image.open(io.BytesIO(jpeg)).convert("RGB")',
        "Image.open(io.BytesIO(jpeg))",
        {READ, DECODE, AUGMENT},
    ),
    "what workers spend is counted twice": (
        "for process in [me, *me.children()]]",
        "for process in [me, *me.children(), *me.children()]]",
        {WORKERS},
    ),
    "images are taken as fast as they come": (
        "        time.sleep(max(0.0, start + taken / rate - time.perf_counter()))\n",
        "",
        {BUSY},
    ),
}
BREAKS = [
    Breaks(LINES, changes=[STATIONS, *ONCE], deadline=150),
    Breaks(SLOW, alone=["images are taken as fast as they come"], deadline=150, clock=True),
]


@pytest.mark.deep
def test_images_of_ones_own_of_any_size(tmp_path: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    for label, photograph in zip("ab", load_sample_images().images, strict=True):
        (tmp_path / label).mkdir()
        for name, box in ("tall.JPEG", (0, 0, 200, 427)), ("wide.png", (0, 0, 640, 100)):
            Image.fromarray(photograph).crop(box).save(tmp_path / label / name)
    played = play(LESSON, 2, GONE, argv=("--data", str(tmp_path)), deadline=120)
    played.expect(set())


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--data needs .*, got {tmp_path}"):
        next(load(LESSON).images_of(str(tmp_path)))


def test_training_crops_are_drawn_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_OPT", "0")
    monkeypatch.setenv("RANK", "0")  # without which nothing of FFCV's is imported
    crop = load(LESSON).crops_by_ffcv()[0]
    drawn = {crop.get_crop_generator(375, 500, crop.scale, crop.ratio) for _ in range(9)}
    assert len(drawn) > 1


def test_each_round_of_the_dataloader_brings_every_photo_once() -> None:
    lesson = load(LESSON)
    lesson.Photos = lambda folder, augment: range(lesson.N)
    lesson.crops_by_torchvision = Mock()
    for rounds in (1, 2):
        drawn = lesson.torchvision_loader(Path(), rounds).sampler
        assert sorted(drawn) == sorted([*range(lesson.N)] * rounds)


def test_both_loaders_draw_the_same_crops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller ones would have the same mean, and take less time."""
    monkeypatch.setenv("NUMBA_OPT", "0")
    monkeypatch.setenv("RANK", "0")
    lesson = load(LESSON)
    theirs = lesson.crops_by_torchvision().transforms[0]
    ours = lesson.crops_by_ffcv()[0]
    assert tuple(theirs.size) == tuple(ours.output_size) == (224, 224)
    assert tuple(theirs.scale) == pytest.approx(tuple(ours.scale))
    assert tuple(theirs.ratio) == pytest.approx(tuple(ours.ratio))


def test_both_loaders_decode_jpegs_of_quality_97(tmp_path: Path) -> None:
    lesson = load(LESSON)
    lesson.Loader = True
    lesson.RGBImageField = lambda mode, **options: (mode, options)
    lesson.write_photos = Mock()
    image = Mock()
    lesson.images_of = lambda data: [image]
    lesson.prepare(tmp_path, None)
    image.save.assert_called_once_with(tmp_path / "photos/0000.jpg", quality=97)
    written = {given.args[1].name: given.args[2] for given in lesson.write_photos.call_args_list}
    assert written == {"jpg.beton": ("jpg", {"jpeg_quality": 97}), "raw.beton": ("raw", {})}


def test_loaders_take_turns_and_their_seconds_are_per_image() -> None:
    lesson = load(LESSON)
    order = []
    wall, core = iter([0.0, 2.0] * 4), iter([10.0, 14.0] * 4)
    lesson.time = SimpleNamespace(perf_counter=lambda: next(wall))
    lesson.core_seconds = lambda: next(core)

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def __iter__(self) -> object:
            order.append(self.name)
            return iter([(torch.zeros(5, 3), None), (torch.zeros(3, 3), None)])

    loaders = {"a": Fake("a"), "b": Fake("b")}
    assert lesson.alternate(loaders, 2) == {"a": [(0.25, 0.5)] * 2, "b": [(0.25, 0.5)] * 2}
    assert order == ["a", "b", "a", "b"]


def test_the_time_of_a_core_is_that_of_all_processes_in_both_modes() -> None:
    lesson = load(LESSON)
    worker = Mock(cpu_times=lambda: SimpleNamespace(user=10.0, system=20.0, iowait=400.0))
    trainer = Mock(cpu_times=lambda: SimpleNamespace(user=1.0, system=2.0, children_user=800.0))
    trainer.children.return_value = [worker, worker]
    with patch.object(lesson.psutil, "Process", return_value=trainer):
        assert lesson.core_seconds() == 63


def test_images_are_taken_at_the_rate_that_is_asked_for() -> None:
    """Two batches of 10 at 5 per second, which are there at once: due after 2 and 4 seconds."""
    lesson = load(LESSON)
    now = [100.0]
    cores = iter([7.0, 9.0])
    lesson.core_seconds = lambda: next(cores)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    lesson.time = SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    batches = [(torch.zeros(10, 3), None), (torch.zeros(10, 3), None)]
    assert lesson.cores_busy(batches, 5.0) == 0.5
    assert now[0] == 104.0


def test_each_loader_reads_its_own_file_as_often_as_it_is_told() -> None:
    lesson = load(LESSON)
    lesson.torchvision_loader = lambda folder, rounds: (folder.name, rounds)
    lesson.ffcv_loader = lambda path, rounds: (path.name, rounds)
    loaders = lesson.all_loaders(Path("place"), 2, ("jpg", "raw"))
    read = {"DataLoader": ("photos", 2), "jpg": ("jpg.beton", 2), "raw": ("raw.beton", 2)}
    assert loaders == read


def test_ffcv_brings_each_image_as_often_as_it_is_told() -> None:
    lesson = load(LESSON)
    lesson.crops_by_ffcv = Mock()
    lesson.decoders = lesson.ToTensor = lesson.OrderOption = Mock()
    lesson.Loader = Mock()
    lesson.ffcv_loader(Path("a.beton"), 2)
    options = lesson.Loader.call_args.kwargs
    assert sorted(options["indices"]) == sorted([*range(lesson.N)] * 2)
    assert options["num_workers"] == lesson.WORKERS
    assert options["drop_last"] is False


def claims_of(lesson: object) -> dict[str, float]:
    """What the lesson claims to have measured, as it comes to claim it."""
    claims = {}
    lesson.claim = lambda text, predicted, measured, *_, **__: claims.update({text: measured})
    return claims


@pytest.mark.parametrize("files", [("jpg", "raw"), ()])
def test_core_times_are_the_best_and_per_loader(files: tuple) -> None:
    lesson = load(LESSON)
    seconds = {"DataLoader": [(0.5, 6.0), (0.25, 8.0)]}
    seconds |= {name: [(0.2, 3.0)] for name in files}
    processes = {"DataLoader": 2} | dict.fromkeys(files, 0)
    means = {name: torch.zeros(3) for name in processes}
    found = {"seconds": seconds, "processes": processes, "means": means, "rate": 2.0, "busy": 9.0}
    lesson.from_rank_0 = lambda value: found
    lesson.RANK = 1
    said = []
    lesson.print0 = said.append
    claims = claims_of(lesson)
    core = lesson.check_loaders(Path(), 4.0)
    assert core == {"DataLoader": 6.0} | dict.fromkeys(files, 3.0)
    assert claims[WORKERS] == 1.5
    assert claims[BUSY] == 0.75
    assert (STARTED["FFCV"] in claims) == bool(files)
    assert said[0].split()[:2] == ["DataLoader", "4"]
    assert "6000.00 ms of a core per image" in said[0]


def test_what_is_saved_is_told_by_station(tmp_path: Path) -> None:
    """Decoding is what JPEGs take beyond raw pixels."""
    lesson = load(LESSON)
    (tmp_path / "photos").mkdir()
    for name, size in ("photos/0.jpg", 10), ("photos/1.jpg", 20), ("raw.beton", 150):
        (tmp_path / name).write_bytes(bytes(size))
    core = {"DataLoader": 8.0, "jpg": 5.0, "raw": 2.0}
    stations = {"read": 1.0, "decode": 2.0, "augment": 1.0, "copy": 9.0}
    rows = lesson.by_station(stations, core)
    assert rows["DataLoader"] == {"read": 1.0, "decode": 2.0, "augment": 1.0, "hand over": 4.0}
    lesson.from_rank_0 = lambda value: value
    claims = claims_of(lesson)
    lesson.check_ffcv(rows, tmp_path)
    jpg, raw = sorted(SAVED)
    assert claims == {jpg: 1.6, raw: 4.0, DECODE: 1.5, AUGMENT: 2.0, BYTES: 5.0}


def test_bars_are_as_long_as_the_times_of_a_core() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    lesson = load(LESSON)
    rows = {
        "DataLoader": {"read": 0.001, "decode": 0.004, "augment": 0.004},
        "FFCV, JPEG": {"decode": 0.003, "augment": 0.002},
        "FFCV, raw": {"augment": 0.002},
    }
    with patch.object(figure, "savefig", autospec=True) as saved:
        lesson.draw("figure.svg", rows)
    (axes,) = saved.call_args.args[0].axes
    ends = {}
    for bar in axes.patches:
        assert bar.get_x() == pytest.approx(ends.get(bar.get_y(), 0.0))  # where the last one ends
        ends[bar.get_y()] = bar.get_x() + bar.get_width()
    assert sorted(ends.values()) == pytest.approx([2.0, 5.0, 9.0])  # raw, JPEG, DataLoader


def test_each_station_is_timed_by_itself_and_all_are_the_whole(tmp_path: Path) -> None:
    lesson = load(LESSON)
    lesson.N = 2
    now = [0.0]
    lesson.time = SimpleNamespace(perf_counter=lambda: now[0])
    lesson.core_seconds = lambda: 3 * now[0]

    def takes(seconds: float, result: object = None) -> Callable:
        def work(*_: object, **__: object) -> object:
            now[0] += seconds
            return result

        return work

    for index in range(2):
        (tmp_path / f"{index}.jpg").touch()
    opened = SimpleNamespace(convert=takes(10.0))
    lesson.Image = SimpleNamespace(open=lambda file: opened)
    lesson.crops_by_torchvision = lambda: takes(100.0)
    batch = Mock()
    batch.to.side_effect = takes(4000.0)
    lesson.default_collate = takes(200.0, (batch, None))
    with patch.object(Path, "read_bytes", takes(1.0, b"")):
        seconds, whole, core = lesson.station_seconds(tmp_path, torch.device("cpu"))
    stations = {"read": 1.0, "decode": 10.0, "augment": 100.0, "collate": 100.0, "copy": 2000.0}
    assert seconds == stations
    assert whole == sum(stations.values())
    assert core == 3 * whole
    assert batch.to.call_args == call(torch.device("cpu"), copy=True)
