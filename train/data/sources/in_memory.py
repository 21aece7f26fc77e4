"""Data sets that fit into memory: MNIST, Fashion-MNIST, CIFAR-10 and digits, which torchvision reads, and fake images.
The small digits ship with the program."""

import warnings
from pathlib import Path

import torch

from rankup import UserError

from ...config import Config
from .. import one_line
from ..samples import TensorSamples
from .fetch import KNOWN, NotFetched, locate, say

SAMPLES = Path(__file__).parents[2] / "samples" / "digits"


def of_torchvision(config: Config) -> tuple[TensorSamples, TensorSamples]:
    """Return training and test samples, uint8 [N, C, H, W]. If Fashion-MNIST can't be downloaded, and the user named no
    data_dir, return the digits instead, so that a first try works without a network."""
    name, root = config.dataset, SAMPLES
    if name != "digits":
        try:
            root = locate(KNOWN[name], data_dir=config.data_dir, timeout_s=0.9 * config.setup_timeout_s)
        except NotFetched as error:
            if name != "fashion-mnist" or config.data_dir is not None:
                raise
            say(f"{error} Using digits instead.")
            name = "digits"
    return read(name, root)


def read(name: str, root: Path) -> tuple[TensorSamples, TensorSamples]:
    """Read training and test samples of a data set in `KNOWN` below torchvision's root. Raises UserError if files are
    missing or damaged."""
    from torchvision import datasets  # here because it takes 0.1 to 0.4 s, and fake images do not need it

    known = KNOWN[name]
    where = root / known.folder

    def half(*, train: bool) -> TensorSamples:
        # CIFAR-10's files are pickles, which can run code. torchvision compares all md5 sums before it opens one
        found = getattr(datasets, known.kind)(root, train=train)
        images, labels = torch.as_tensor(found.data), torch.as_tensor(found.targets)
        images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        classes = tuple(text.partition(" - ")[0] for text in found.classes)  # MNIST's are "0 - zero" and so on
        highest = int(labels.max())
        if len(images) != len(labels) or highest >= len(classes) or images.shape[2] != images.shape[3]:
            size = " x ".join(map(str, images.shape[2:]))
            raise ValueError(f"{len(images)} images, {len(labels)} labels of up to {highest}, {size} pixels")
        return TensorSamples(
            images, labels, classes, mean=known.mean, std=known.std, name=name, origin=f"files in {where}",
            mirror=known.mirror,
        )

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy >= 2.4 warns of how CIFAR-10's pickles write a dtype
            return half(train=True), half(train=False)
    except Exception as error:  # of many types
        rule = f"must hold the files of {known.kind}, whole and unpacked as torchvision leaves them"
        way_out = "Remove it and run again, or set another --data-dir."
        raise UserError(f"{where}: {rule}, got others ({one_line(error)}). {way_out}") from error


# Fake images that a model can learn, to try a launch without data -----------------------------------------------------

GRID = 4  # each class is a pattern of 4 x 4 squares per channel


def fake(config: Config) -> tuple[TensorSamples, TensorSamples]:
    """Make `fake_samples` training images, and a quarter as many test images: uint8 [N, 3, S, S], S = image_size or 32.
    A pixel is the pattern of the class (0 or 64) plus noise (0..191): integers, which all kinds of CPU draw alike."""
    num_classes, image_size = config.fake_classes, config.image_size or 32
    shared = torch.Generator().manual_seed(20)
    patterns = torch.randint(0, 2, (num_classes, 3, GRID, GRID), generator=shared, dtype=torch.uint8) * 64
    cell = torch.arange(image_size) * GRID // image_size

    def half(count: int, *, seed: int) -> TensorSamples:
        own = torch.Generator().manual_seed(seed)
        labels = (torch.arange(count) % num_classes)[torch.randperm(count, generator=own)]
        images = torch.randint(0, 192, (count, 3, image_size, image_size), generator=own, dtype=torch.uint8)
        images += patterns[labels][:, :, cell][:, :, :, cell]
        return TensorSamples(
            images, labels, tuple(f"class {number}" for number in range(num_classes)), mean=(0.5,) * 3,
            std=(0.25,) * 3, name="fake", origin="made up, no real images",
        )

    return half(config.fake_samples, seed=21), half(max(1, config.fake_samples // 4), seed=22)
