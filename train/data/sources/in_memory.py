"""Data sets that memory holds whole: MNIST and its relatives, CIFAR-10, and made-up images."""

import gzip
import hashlib
import math
import struct
import warnings
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from rankup import UserError

from ...config import Config
from ..samples import TensorSamples
from .fetch import NotFetched, Remote, file_in, locate, say

# MNIST and its relatives: four IDX files. An IDX file is a big-endian header (two zero bytes, a type byte, the number
# of dimensions, one 32-bit size per dimension) followed by the values, here unsigned bytes alone.
# http://yann.lecun.com/exdb/mnist describes it ----------------------------------------------------------------------

Kind = Literal["images", "labels"]
MAGIC: dict[Kind, bytes] = {"images": b"\0\0\x08\x03", "labels": b"\0\0\x08\x01"}
DAMAGED = "Remove it and run again, or put a good copy in its place."
MOST_BYTES = 1 << 30  # of a file, unpacked: the largest set in this format has half of it
COMPARED = 100  # images of a half whose bytes are part of the digest, beside all labels
FILES = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
NAMES = (*FILES[True], *FILES[False])


@dataclass(frozen=True, kw_only=True)
class Family(Remote):
    """One data set of four IDX files. mean and std are those of its training images / 255."""

    name: str
    files: tuple[str, ...] = NAMES
    classes: tuple[str, ...] = tuple("0123456789")
    mean: float
    std: float
    digest: str = ""  # of the published ones, see `read_halves`; those of a set without it are named by theirs
    mirror: bool = False  # whether a mirrored image still shows its class; a mirrored 2 does not

    def check(self, folder: Path) -> None:
        read_halves(folder / "raw", self)


FAMILIES = {
    # Pictures of clothes (Xiao et al. 2017), the default
    "fashion-mnist": Family(
        name="fashion-mnist", kind="FashionMNIST", folder="FashionMNIST/raw",
        classes=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
                 "Ankle boot"),
        mean=0.2860, std=0.3530, digest="ced07e3c", mirror=True,
        package="dataset-fashion-mnist", packed=Path("/usr/share/datasets/fashion-mnist"),
    ),
    # Handwritten digits (LeCun et al. 1998)
    "mnist": Family(name="mnist", kind="MNIST", folder="MNIST/raw", mean=0.1307, std=0.3081),
    # Handwritten digits that ship with the program, 8 x 8 pixels
    "digits": Family(
        name="digits", kind="digits", folder="digits/raw", mean=0.2873, std=0.3537, digest="27dce9ae",
        here=Path(__file__).parents[2] / "samples" / "digits",
    ),
}


def mnist(config: Config) -> tuple[TensorSamples, TensorSamples]:
    """The training half and the test half, uint8 [N, 1, H, W]. The digits take the place of Fashion-MNIST where it
    cannot be fetched and the user named no data_dir: a first try without a network shall train something."""
    family = FAMILIES[config.dataset]
    data_dir = None if config.dataset == "digits" else config.data_dir
    try:
        folder = locate(family, data_dir=data_dir, timeout_s=0.9 * config.setup_timeout_s)
    except NotFetched as error:
        if config.dataset != "fashion-mnist" or config.data_dir is not None:
            raise
        say(f"{error} Using digits instead.")
        return mnist(config.model_copy(update={"dataset": "digits"}))
    return read_halves(folder, family)


def read_halves(folder: Path, family: Family) -> tuple[TensorSamples, TensorSamples]:
    """The training half and the test half. Other images than the published ones get a name of their own: a run on the
    one does not go on with the other."""
    train, test = (read_half(folder, family, train=train) for train in (True, False))
    digest = hashlib.sha256()
    for half in (train, test):
        digest.update(f"{tuple(half.images.shape)}".encode() + half.labels.numpy().tobytes())
        digest.update(half.images[:COMPARED].numpy().tobytes())
    found = digest.hexdigest()[:8]
    name = family.name if found == family.digest else f"{family.name}-{found}"
    return replace(train, name=name), replace(test, name=name)


def read_half(folder: Path, family: Family, *, train: bool) -> TensorSamples:
    """One half of a set: images uint8 [N, 1, H, W], labels int64 [N]. Raises UserError, naming the file."""
    image_path, label_path = (file_in(folder, name) or folder / name for name in FILES[train])
    images, labels = read_idx(image_path, "images"), read_idx(label_path, "labels")
    if len(images) != len(labels):
        raise UserError(f"{label_path}: holds {len(labels)} labels for {len(images)} images in {image_path.name}.")
    if (highest := int(labels.max())) >= len(family.classes):
        raise UserError(f"{label_path}: label must be 0..{len(family.classes) - 1} for {family.kind}, got {highest}.")
    return TensorSamples(
        images.unsqueeze(1), labels.long(), family.classes, mean=(family.mean,), std=(family.std,), name=family.name,
        origin=f"{family.kind} in {folder}", mirror=family.mirror,
    )


def read_idx(path: Path, expect: Kind) -> torch.Tensor:
    """Read one IDX file, plain or gzip: uint8 [N, H, W] for images, uint8 [N] for labels. Raises UserError if it cannot
    be read, is not of that kind, is empty, truncated or too long."""
    try:
        with path.open("rb") as file:
            # One byte more than a whole file may have: the rest of a larger one stays packed
            packed = file.peek(2)[:2] == b"\x1f\x8b"  # told by the content, not by the name
            content = bytearray((gzip.GzipFile(fileobj=file) if packed else file).read(MOST_BYTES + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}). {DAMAGED}") from error
    num_sizes = 3 if expect == "images" else 1
    start = 4 + 4 * num_sizes
    shape = struct.unpack(f">{num_sizes}I", content[4:start].ljust(4 * num_sizes, b"\0"))
    if content[:4] != MAGIC[expect] or not 0 < math.prod(shape) == len(content) - start:
        raise UserError(f"{path}: is no whole IDX file of {expect}. {DAMAGED}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).reshape(shape)


# CIFAR-10 in torchvision's layout. Its files are pickles, which can run code: torchvision compares every md5 before it
# opens the first one --------------------------------------------------------------------------------------------------

FOLDER = "cifar-10-batches-py"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar10(config: Config) -> tuple[TensorSamples, TensorSamples]:
    """uint8 [50000, 3, 32, 32] to train on and [10000, 3, 32, 32] to test on. Raises UserError."""
    remote = Remote(kind="CIFAR10", folder=FOLDER, files=("batches.meta",))
    folder = locate(remote, data_dir=config.data_dir, timeout_s=0.9 * config.setup_timeout_s)
    return _read_cifar10(folder, train=True), _read_cifar10(folder, train=False)


def _read_cifar10(folder: Path, *, train: bool) -> TensorSamples:
    from torchvision.datasets import CIFAR10

    try:
        with warnings.catch_warnings():
            # numpy >= 2.4 warns because these old pickles spell a dtype in numbers.
            warnings.simplefilter("ignore")
            found = CIFAR10(root=str(folder.parent), train=train)
    except RuntimeError as error:
        got = f"got others (their md5 differs), or another name than {FOLDER}. Remove or rename it."
        raise UserError(f"{folder}: must hold the published files, {got}") from error
    return TensorSamples(
        torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(found.targets), CLASSES,
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), name="cifar10", origin=f"CIFAR-10 in {folder}",
    )


# Made-up images with something to learn, for trying a launch where no data is at hand --------------------------------

GRID = 4  # each class is a pattern of 4 x 4 squares per channel


def fake(config: Config) -> tuple[TensorSamples, TensorSamples]:
    """`fake_samples` images to train on, a quarter as many to test on: uint8 [N, 3, S, S], S = image_size or 32: the
    pattern of a class (0 or 64) plus noise (0..191), integers alone, which every kind of CPU draws alike."""
    count = config.fake_samples
    return _fake_half(config, count, seed=21), _fake_half(config, max(1, count // 4), seed=22)


def _fake_half(config: Config, count: int, *, seed: int) -> TensorSamples:
    num_classes, image_size = config.fake_classes, config.image_size or 32
    shared, own = torch.Generator().manual_seed(20), torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 2, (num_classes, 3, GRID, GRID), generator=shared, dtype=torch.uint8) * 64
    cell = torch.arange(image_size) * GRID // image_size
    labels = (torch.arange(count) % num_classes)[torch.randperm(count, generator=own)]
    images = torch.randint(0, 192, (count, 3, image_size, image_size), generator=own, dtype=torch.uint8)
    for start in range(0, count, 1024):
        piece = patterns[labels[start : start + 1024]]
        images[start : start + 1024] += piece[:, :, cell][:, :, :, cell]
    return TensorSamples(
        images, labels, tuple(f"class {number}" for number in range(num_classes)), mean=(0.5,) * 3, std=(0.25,) * 3,
        name="fake", origin="made up, no real images",
    )
