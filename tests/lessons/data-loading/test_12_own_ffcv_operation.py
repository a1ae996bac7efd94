"""What numba freezes, a fused operation against its oracle, claims against broken lines."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

# FFCV's pipelines in plain Python: the same values, without seconds of compiling on every rank.
NO_JIT = ('os.environ["NUMBA_OPT"] = "0"', 'os.environ["NUMBA_DISABLE_JIT"] = "1"')
NO_NUMBA_ROWS = ("    check_numba()\n", "")  # they are about what is compiled
LESSON = "data-loading/12_own_ffcv_operation.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

SIZES = {1: [NO_JIT, NO_NUMBA_ROWS], 3: [NO_JIT, NO_NUMBA_ROWS]}  # the plain run compiles
ON_GPUS = OnGpus(changes=[NO_JIT, NO_NUMBA_ROWS])
IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
GONE = (IMPORT, IMPORT + "        raise ImportError\n")
NUMBA = "        import numba\n"
WITHOUT = {"FFCV": Without([GONE], {"what FFCV's operations see"})}


@pytest.mark.deep
def test_without_numba_all_is_blocked_and_that_is_no_success() -> None:
    played = play(LESSON, 2, (NUMBA, "        raise ImportError\n" + NUMBA), GONE)
    assert played.code == 1
    assert [row["verdict"] for row in played.ledger] == ["BLOCKED"] * 2, played.output


@pytest.mark.parametrize("compiled", [True, False])
def test_the_whole_batch_is_written(compiled: bool) -> None:
    import numba

    write = numba.njit(lesson.write_epoch) if compiled else lesson.write_epoch
    batch = np.arange(8).reshape(8, 1)
    for epoch in (0, 300, 2**40):
        assert write(batch, epoch) is batch or compiled
        assert (batch == epoch).all()


def test_the_epoch_is_that_of_all_batches() -> None:
    operation = SimpleNamespace(epoch=0)

    def seen_in(*batches: list[int]) -> float:
        loader = [(torch.tensor(batch).view(-1, 1),) for batch in batches]
        return lesson.run_epoch(loader, operation, 5)

    assert seen_in([2, 2], [2, 2]) == 2
    assert operation.epoch == 5
    assert np.isnan(seen_in([2, 2], [2, 1]))
    assert np.isnan(seen_in([2, 2], [1, 1]))
    assert np.isnan(seen_in())


def test_numba_copies_an_array_of_a_million_bytes_and_no_larger_one() -> None:
    import numba

    seen = {}
    for size in (10**6 // 8, 10**6 // 8 + 1):
        array = np.zeros(size, np.int64)

        read = numba.njit(closure_of(array))
        assert read() == 0
        array[0] = 1
        seen[size] = read()
    assert seen == {125_000: 0, 125_001: 1}


def closure_of(array: np.ndarray):
    def read() -> int:
        return array[0]

    return read


# A real operation on the pattern of AskingEpoch: it crops, mirrors and brightens in one loop.

IMAGES = [
    (
        "    from ffcv.fields import IntField\n",
        "    from ffcv.fields import IntField, RGBImageField\n",
    ),
    ('{"number": IntField()}', '{"image": RGBImageField("raw"), "number": IntField()}'),
    ("[(number,) for number in range(N)]", "[(picture_of(number), number) for number in range(N)]"),
]


def picture_of(sample: int) -> np.ndarray:
    return np.random.default_rng(sample).integers(0, 256, (40, 56, 3), np.uint8)


def crop_by_numpy(epoch: int, sample: int) -> bytes:
    """The oracle: one process, no FFCV, nothing compiled, a step of arithmetic after the other."""
    rest, y = divmod(950_706_376 * (64 * epoch + sample + 1) % (2**31 - 1), 17)
    rest, x = divmod(rest, 33)
    rest, mirrored = divmod(rest, 2)
    crop = picture_of(sample)[y : y + 24, x : x + 24]
    if mirrored:
        crop = crop[:, ::-1]
    return np.minimum(crop.astype(int) * (32 + rest % 65) // 64, 255).astype(np.uint8).tobytes()


def fused(
    images_BHWC: np.ndarray, crops_BSSC: np.ndarray, samples_B: np.ndarray, epoch: int
) -> None:
    for i in range(len(images_BHWC)):
        count = epoch * 64 + np.int64(samples_B[i]) + 1
        mixed = count * 950_706_376 % 2_147_483_647
        y = mixed % 17
        x = mixed // 17 % 33
        mirrored = mixed // 561 % 2
        light = 32 + mixed // 1122 % 65
        for row in range(24):
            for column in range(24):
                from_column = 23 - column if mirrored else column
                for color in range(3):
                    value = images_BHWC[i, y + row, x + from_column, color]
                    crops_BSSC[i, row, column, color] = min(value * light // 64, 255)


def crops_by_ffcv(path: Path) -> list[dict[int, bytes]]:
    """The crops of this rank's samples in epochs 1 and 2, by the lesson's writer and operation."""
    own = load(LESSON, *IMAGES)
    own.picture_of = picture_of
    from ffcv.fields.decoders import SimpleRGBImageDecoder
    from ffcv.pipeline.allocation_query import AllocationQuery

    class AskingCrop(own.AskingEpoch):
        def declare_state_and_memory(self, previous_state: object) -> tuple:
            state, _ = super().declare_state_and_memory(previous_state)
            return replace(state, shape=(24, 24, 3)), AllocationQuery((24, 24, 3), state.dtype)

        def generate_code(self) -> object:
            crop = own.Compiler.compile(fused)

            def operation(
                images_BHWC: np.ndarray, crops_BSSC: np.ndarray, samples_B: np.ndarray
            ) -> np.ndarray:
                crop(images_BHWC, crops_BSSC, samples_B, self.epoch)
                return crops_BSSC

            operation.with_indices = True
            return operation

    if dist.get_rank() == 0:
        own.write_numbers(path)
    dist.barrier()
    asking = AskingCrop()
    pipelines = {
        "image": [SimpleRGBImageDecoder(), asking, own.ToTensor()],
        "number": [own.IntDecoder(), own.ToTensor()],
    }
    options = {"order": own.OrderOption.RANDOM, "distributed": True, "seed": 0, "num_workers": 1}
    loader = own.Loader(str(path), 8, pipelines=pipelines, drop_last=False, **options)
    found = []
    for epoch in (1, 2):
        asking.epoch = epoch
        crops = {}
        for crops_BSSC, numbers_B1 in loader:
            for crop, number in zip(crops_BSSC, numbers_B1.flatten().tolist(), strict=True):
                crops[number] = crop.numpy().tobytes()  # a copy: FFCV writes over the batch
        found.append(crops)
    return found


@pytest.mark.deep
def test_a_fused_operation_makes_the_pixels_of_its_oracle(tmp_path: Path) -> None:
    """Each of 64 samples, once, on two ranks, in two epochs, to the bit."""
    found = run(crops_by_ffcv, 2, tmp_path / "pictures.beton", deadline=120)
    for epoch in (1, 2):
        shares = [rank[epoch - 1] for rank in found]
        assert [len(share) for share in shares] == [32, 32]
        expected = {sample: crop_by_numpy(epoch, sample) for sample in range(64)}
        assert shares[0] | shares[1] == expected
        assert len(set(expected.values())) == 64


GLOBAL = "epoch seen in a global"
SMALL = "epoch seen in an array of 64 bytes"
ARGUMENT = "epoch seen in an argument"
ENCLOSING = "epoch seen in an enclosing function"
ANEW = "epoch seen in a function that is made anew"
FROZEN_1 = "FrozenEpoch, set to 1: epoch in the batches"
FROZEN_2 = "FrozenEpoch, set to 2: epoch in the batches"
ASKING_1 = "AskingEpoch, set to 1: epoch in the batches"
ASKING_2 = "AskingEpoch, set to 2: epoch in the batches"
RECOMPILED = "recompiled, set to 2: epoch in the batches"

OF_NUMBA = {
    "it is called before the epoch is 1, as in Try": (
        "    for epoch in (1, 2):\n        set_epoch(epoch)\n",
        "    for epoch in (0, 1, 2):\n        set_epoch(epoch)\n",
        {GLOBAL, SMALL},
    ),
    "the global is not compiled": (
        "numba.njit(read_global)",
        "read_global",
        {GLOBAL},
    ),
    "the array has 2 MiB": (
        "ARRAY = np.zeros(8, np.int64)",
        "ARRAY = np.zeros(2**18, np.int64)",
        {SMALL},
    ),
    "the argument is a constant": ("by_argument(EPOCH)]", "by_argument(1)]", {ARGUMENT}),
    "the function is always made anew": ("by_enclosing(), made", "made_anew(), made", {ENCLOSING}),
    "the function is never made anew": ("made_anew(), by_", "by_enclosing(), by_", {ANEW}),
    "njit is told that there are no arguments, and compiles at once": (
        "numba.njit(read_global)",
        'numba.njit("int64()")(read_global)',
        {GLOBAL},
    ),
}

ASKED = "            return write(batch_B1, self.epoch)\n"
INNER = "        def operation(batch_B1: np.ndarray, _: None) -> np.ndarray:\n"
EARLY = "        epoch = self.epoch\n" + INNER
LINES = {
    "AskingEpoch reads the epoch too early, as in Try": (
        INNER + ASKED,
        EARLY + ASKED.replace("self.epoch", "epoch"),
        {ASKING_1, ASKING_2},
    ),
    "every loader compiles for each epoch": (
        "recompile: bool = False) -> list[float]",
        "recompile: bool = True) -> list[float]",
        {FROZEN_1, FROZEN_2},
    ),
    "no loader compiles for each epoch": ('"recompile": recompile}', "}", {RECOMPILED}),
    "the trainer forgets the epoch": (
        "    operation.epoch = epoch\n",
        "",
        {RECOMPILED, ASKING_1, ASKING_2},
    ),
    "the compiled operation is an epoch ahead": (
        "        epoch = self.epoch  # the function",
        "        epoch = self.epoch + 1  # the function",
        {FROZEN_1, FROZEN_2, RECOMPILED},
    ),
    "a batch's last sample is not written": (
        "    for i in range(len(batch_B1)):\n",
        "    for i in range(len(batch_B1) - 1):\n",
        {FROZEN_1, FROZEN_2, RECOMPILED, ASKING_1, ASKING_2},
    ),
}
ALONE = ["every loader compiles for each epoch"]
BREAKS = [
    Breaks(LINES, changes=[NO_JIT, NO_NUMBA_ROWS], alone=ALONE, deadline=120),
    Breaks(OF_NUMBA, changes=[GONE]),
]
