"""MNIST and its relatives, four IDX files each: where they may lie, and how they become an ImageSet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from train.errors import DataError
from train.sources.idx import read_idx
from train.sources.sets import ImageSet

FILES = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
DIGIT_NAMES = tuple("0123456789")


@dataclass(frozen=True)
class Family:
    """One data set of four IDX files. mean and std are those of its training images / 255."""

    name: str
    title: str
    folder: str  # torchvision keeps the files in <root>/<folder>/raw
    classes: tuple[str, ...]
    mean: float
    std: float


FASHION = Family(
    name="fashion-mnist",
    title="Fashion-MNIST",
    folder="FashionMNIST",
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    mean=0.2860,
    std=0.3530,
)
MNIST = Family(name="mnist", title="MNIST", folder="MNIST", classes=DIGIT_NAMES, mean=0.1307, std=0.3081)
DIGITS = Family(name="digits", title="digits", folder="digits", classes=DIGIT_NAMES, mean=0.2873, std=0.3537)

DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
DIGITS_DIR = Path(__file__).parents[1] / "samples" / "digits"


def find_files(root: Path, family: Family) -> Path | None:
    """The folder below `root` that holds the four files, plain or .gz: root itself or torchvision's layout.

    None if neither holds any of them. Raises DataError if some are there and others are missing.
    """
    for folder in (root, root / family.folder / "raw"):
        found = {name: _file(folder, name) for pair in FILES.values() for name in pair}
        if all(found.values()):
            return folder
        if any(found.values()):
            missing = ", ".join(name for name, path in found.items() if path is None)
            raise DataError(f"{folder}: {missing} (or .gz) missing beside the other files of {family.title}. Add it.")
    return None


def load_family(folder: Path, family: Family, *, train: bool) -> ImageSet:
    """Read one half of a set from the folder that `find_files` gave: images uint8 [N, 1, H, W], labels int64 [N].

    Raises DataError, naming the file, if one is damaged, the counts differ or a label is out of range.
    """
    image_name, label_name = FILES[train]
    image_path, label_path = _file(folder, image_name), _file(folder, label_name)
    if image_path is None or label_path is None:
        raise DataError(f"{folder}: {image_name if image_path is None else label_name} (or .gz) is missing.")
    images, labels = read_idx(image_path, "images"), read_idx(label_path, "labels")
    if len(images) != len(labels):
        raise DataError(
            f"{label_path}: holds {len(labels)} labels for {len(images)} images in {image_path.name}. "
            "The two files belong to different sets."
        )
    highest = int(labels.max())
    if highest >= len(family.classes):
        where = int((labels >= len(family.classes)).nonzero()[0])
        raise DataError(
            f"{label_path}: label must be 0..{len(family.classes) - 1} for {family.title}, got {int(labels[where])} "
            f"at item {where}. Is it another set's file?"
        )
    return ImageSet(
        images=images.unsqueeze(1),
        labels=labels.long(),
        classes=family.classes,
        mean=(family.mean,),
        std=(family.std,),
        name=family.name,
        origin=f"{family.title} in {folder}",
    )


def _file(folder: Path, name: str) -> Path | None:
    # The plain file first: where both lie side by side it needs no unpacking
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None
