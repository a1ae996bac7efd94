"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "images compressed to JPEG",
        'write_mode="raw"',
        'write_mode="jpg"',
        "test_file",
        "sample 0, Zebra/10.png: stored as: expected raw, got jpg",
    ),
    (
        "large images left large",
        ", max_resolution=LONGEST",
        "",
        "test_file",
        "sample 2, Zebra/B.JPEG: width and height: expected (64, 40), got (128, 80)",
    ),
    (
        "labels counted from 1",
        "ImageFolder(str(folder))",
        "ImageFolder(str(folder), target_transform=lambda label: label + 1)",
        "test_file",
        "labels, in file order: expected [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3], got [1, 1, 1, 2",
    ),
    (
        "the label before the image",
        (
            '        "image": RGBImageField(write_mode="raw", max_resolution=LONGEST),\n'
            '        "label": IntField(),\n',
            "    DatasetWriter(str(path), fields, num_workers=1)"
            ".from_indexed_dataset(ImageFolder(str(folder)))\n",
        ),
        (
            '        "label": IntField(),\n'
            '        "image": RGBImageField(write_mode="raw", max_resolution=LONGEST),\n',
            "    samples = [(label, image) for image, label in ImageFolder(str(folder))]\n"
            "    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(samples)\n",
        ),
        "test_file",
        "expected [('image', 2), ('label', 1)], got [('label', 1), ('image', 2)]",
    ),
    (
        "gray images left gray",
        (
            "    from torchvision.datasets import ImageFolder",
            "ImageFolder(str(folder))",
        ),
        (
            "    from PIL import Image\n    from torchvision.datasets import ImageFolder",
            "ImageFolder(str(folder), loader=Image.open)",
        ),
        "test_file",
        "one of FFCV's writers died (below), and FFCV waits for ever",
    ),
    (
        "images read with OpenCV",
        (
            "    from torchvision.datasets import ImageFolder",
            "ImageFolder(str(folder))",
        ),
        (
            "    import cv2\n    from torchvision.datasets import ImageFolder",
            "ImageFolder(str(folder), loader=cv2.imread)",
        ),
        "test_file",
        "sample 0, Zebra/10.png: the pixels are wrong: its channels are blue, green, red",
    ),
    (
        "JPEG files alone taken",
        "ImageFolder(str(folder))",
        "ImageFolder(\n"
        "        str(folder),\n"
        '        is_valid_file=lambda name: name.lower().endswith((".jpeg", ".jpg")),\n'
        "        allow_empty=True,\n"
        "    )",
        "test_file",
        "samples: expected 11, got 6",
    ),
    (
        "classes sorted without regard to case",
        "    DatasetWriter(str(path), fields, num_workers=1)"
        ".from_indexed_dataset(ImageFolder(str(folder)))\n",
        "    dataset = ImageFolder(str(folder))\n"
        "    classes = sorted(dataset.classes, key=str.casefold)\n"
        "    samples = [(image, classes.index(dataset.classes[i])) for image, i in dataset]\n"
        "    samples.sort(key=lambda sample: sample[1])\n"
        "    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(samples)\n",
        "test_file",
        "labels, in file order: expected [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3], got [0, 0, 0, 0, 0, 1",
    ),
    (
        "files sorted by their numbers",
        "    DatasetWriter(str(path), fields, num_workers=1)"
        ".from_indexed_dataset(ImageFolder(str(folder)))\n",
        "    dataset = ImageFolder(str(folder))\n"
        "    dataset.samples.sort(key=lambda sample: (sample[1], len(sample[0]), sample[0]))\n"
        "    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(dataset)\n",
        "test_file",
        "sample 0: expected Zebra/10.png, got Zebra/9.png",
    ),
    (
        "images cropped as for validation",
        "ratio=1",
        "ratio=224 / 256",
        "test_loader",
        "in order, epoch 0, rank 0: an image is none of the folder's, cropped and scaled",
    ),
    (
        "the last batch dropped",
        "        drop_last=False,\n",
        "",
        "test_loader",
        "in order, epoch 0, rank 0: images in each batch: expected [5, 1], got [5]",
    ),
    (
        "everything given to every rank",
        "        distributed=True,\n",
        "",
        "test_loader",
        "in order, epoch 0, rank 0: every rank delivers all 11 samples",
    ),
    (
        "unequal shares",
        ("    image = [CenterCrop", "        distributed=True,\n"),
        (
            "    import torch.distributed as dist\n\n    image = [CenterCrop",
            "        indices=range(dist.get_rank(), 11, dist.get_world_size()),\n",
        ),
        "test_loader",
        "in order, epoch 0, rank 1: images in each batch: expected [5, 1], got [5]",
    ),
    (
        "a batch of one squeezed away",
        "Squeeze(1)",
        "Squeeze()",
        "test_loader",
        "shapes and dtypes of images and labels: expected ((1, 3, 32, 32), torch.uint8, (1,), "
        "torch.int64), got ((1, 3, 32, 32), torch.uint8, (), torch.int64)",
    ),
    (
        "the last batch dropped when shuffled",
        "drop_last=False",
        "drop_last=shuffle",
        "test_shuffled",
        "shuffled: batches on this rank: expected 2, got 1",
    ),
    (
        "never shuffled",
        "OrderOption.RANDOM if shuffle else OrderOption.SEQUENTIAL",
        "OrderOption.SEQUENTIAL",
        "test_shuffled",
        "both epochs have the same order",
    ),
    (
        "another seed on every rank",
        ("    image = [CenterCrop", "seed=seed,"),
        (
            "    import torch.distributed as dist\n\n    image = [CenterCrop",
            "seed=seed + dist.get_rank(),",
        ),
        "test_shuffled",
        "epoch 0: samples that no rank delivers: expected [], got [",
    ),
    (
        "the seed not used",
        "seed=seed,",
        "seed=0,",
        "test_shuffled",
        "shuffled: seeds 1 and 2 give the same orders: seed is not used",
    ),
    (
        "the seed of rank 0 sent to all",
        "    image = [CenterCrop",
        "    import torch\n"
        "    import torch.distributed as dist\n\n"
        "    told = torch.tensor(seed)\n"
        "    dist.broadcast(told, src=0)\n"
        "    seed = int(told)\n"
        "    image = [CenterCrop",
        "test_loader",
        "the answer calls broadcast; nothing is to be sent here",
    ),
    (
        "endings compared as they are written",
        "ImageFolder(str(folder))",
        "ImageFolder(\n"
        "        str(folder),\n"
        '        is_valid_file=lambda name: name.endswith((".JPEG", ".jpg", ".png")),\n'
        "    )",
        "test_file",
        "samples: expected 11, got 8",
    ),
    (
        "another order for each loader",
        ("def loader(", "seed=seed,"),
        ("opened = []\n\n\ndef loader(", "seed=opened.append(0) or seed + len(opened),"),
        "test_shuffled",
        "shuffled, seed 1: a second loader has other orders than the first",
    ),
    (
        "photographs turned as the camera notes",
        ("    from torchvision.datasets import ImageFolder", "ImageFolder(str(folder))"),
        (
            "    from PIL import Image, ImageOps\n\n"
            "    def upright(name):\n"
            "        return ImageOps.exif_transpose(Image.open(name)).convert('RGB')\n\n"
            "    from torchvision.datasets import ImageFolder",
            "ImageFolder(str(folder), loader=upright)",
        ),
        "test_file",
        "turned upright; asked for are pixels as PIL decodes them",
    ),
]
