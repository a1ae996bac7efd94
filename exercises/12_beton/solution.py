"""An ImageNet-style folder as one .beton file, and its loader.

Task: exercises/12_beton/README.md.
"""

import multiprocessing
import os
from pathlib import Path

multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit what they need
os.environ["NUMBA_DISABLE_JIT"] = "1"  # plain Python does for eleven small images

from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import Squeeze, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter

LONGEST, SIDE = 64, 32  # pixels: no stored side is longer; what the loader delivers


def write(folder: Path, path: Path) -> None:
    """Write all images below `folder` to `path`, a .beton file. Called on one rank alone.

    folder: a folder for each class, in it the class's images: .JPEG, .jpg, .png, in capitals or
    not; gray, RGBA and CMYK ones, too. There are no other images; what is there besides, such as
    text, is no sample. A class's label is its place among the sorted names.
    Samples are in order: by class, then by file name, both as Python sorts strings.

    Two fields, in this order: "image", RGB, raw pixels as PIL decodes and converts them, scaled by
    FFCV so that no side is longer than LONGEST (smaller ones stay as they are); and "label".

    cat/2.png, cat/10.png, Dog/a.JPEG: Dog/a (label 0), cat/10 (1), cat/2 (1).
    """
    from torchvision.datasets import ImageFolder  # here, for only the writer needs it

    # --- yours
    fields = {
        "image": RGBImageField(write_mode="raw", max_resolution=LONGEST),
        "label": IntField(),
    }
    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(ImageFolder(str(folder)))
    # --- end
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


def loader(path: Path, batch_size: int, shuffle: bool, seed: int) -> Loader:
    """This rank's share of the file, batch by batch. Called on every rank of the default group.

    A batch: images, uint8, (B, 3, SIDE, SIDE): the largest square in an image's middle, scaled; and
    labels, int64, (B,). The last batch may be smaller, down to B = 1; no sample is lost. All ranks
    deliver equally many: where n does not divide N, -N mod n samples come twice. With `shuffle`,
    `seed` gives the order, another one in each epoch; without, file order, dealt in turn.

    11 samples on 2 ranks, batch_size 4: 6 on each, in batches of 4 and 2; one comes twice.
    """
    # --- yours
    image = [CenterCropRGBImageDecoder((SIDE, SIDE), ratio=1), ToTensor(), ToTorchImage()]
    return Loader(
        str(path),
        batch_size,
        num_workers=1,
        order=OrderOption.RANDOM if shuffle else OrderOption.SEQUENTIAL,
        distributed=True,
        seed=seed,
        drop_last=False,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor(), Squeeze(1)]},
    )
    # --- end
