"""Any folder of class folders with images: listed here, decoded one at a time by FileSet.load."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from train.data.sources.sets import FileSet
from train.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")
LAYOUT = "Images lie in <data_dir>/train/<class>/ and <data_dir>/val/<class>/, or all in <data_dir>/<class>/."
# Of ImageNet, as is the custom for photographs
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load_folder(data_dir: str | None, *, train: bool, image_size: int) -> FileSet:
    """The images of data_dir/train, or of data_dir/val (else test); without those folders, nine in ten of each
    class of data_dir to train on and the others to test on, chosen by a digest of their names, always the same.

    Files are listed in the order of their names, hidden ones left out; none is opened. Raises DataError, naming the
    path, for no images, an empty class, a file with another extension, or classes that differ between the halves.
    """
    assert data_dir is not None, "Config refuses imagefolder without data_dir"
    root = Path(data_dir).expanduser()
    _folders(root)
    halves = {
        True: root / "train",
        False: next((root / n for n in ("val", "test") if (root / n).is_dir()), root / "val"),
    }
    split = [half for half in halves.values() if half.is_dir()]
    if len(split) == 1:
        missing = halves[split[0] != halves[True]]
        raise DataError(f"{missing}: is missing beside {split[0].name}/. {LAYOUT}")
    if split:
        other = [folder.name for folder in _folders(halves[not train])]
        files = _list_classes(halves[train])
        for name in sorted(set(files) ^ set(other)):
            here = halves[train] if name in files else halves[not train]
            there = halves[not train] if name in files else halves[train]
            raise DataError(f"{here / name}: is a class that {there} lacks. Both need the same class folders.")
    else:
        files = {name: _share(root / name, paths, train=train) for name, paths in _list_classes(root).items()}
    classes = tuple(sorted(files))
    return FileSet(
        paths=tuple(path for name in classes for path in files[name]),
        labels=torch.tensor([label for label, name in enumerate(classes) for _ in files[name]], dtype=torch.int64),
        classes=classes,
        mean=MEAN,
        std=STD,
        name="imagefolder",
        origin=f"images in {halves[train] if split else root}",
        image_size=image_size,
    )


def _list_classes(root: Path) -> dict[str, list[str]]:
    folders = _folders(root)
    if not folders:
        raise DataError(f"{root}: holds no class folders, so there is no image to learn from. {LAYOUT}")
    return {folder.name: _list_images(folder) for folder in folders}


def _folders(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            found = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{root}: cannot be read ({error.strerror}). {LAYOUT}") from error
    return [root / name for name in sorted(found)]


def _list_images(folder: Path) -> list[str]:
    """All images below one class folder, in the order of their names: the same on every node and file system."""
    images = []

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}).") from error

    for where, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            path = os.path.join(where, name)
            if not name.lower().endswith(EXTENSIONS):
                raise DataError(f"{path}: is no image (known are {' '.join(EXTENSIONS)}). Remove it or mend its name.")
            images.append(path)
    if not images:
        raise DataError(f"{folder}: holds no images. Remove the empty class folder or fill it.")
    return sorted(images)


def _share(folder: Path, paths: list[str], *, train: bool) -> list[str]:
    if len(paths) < 2:
        raise DataError(f"{folder}: holds one image, and a class needs two: one to train on, one to test on.")
    # By digest, not by order: pictures of one series have neighbouring names
    by_digest = sorted(paths, key=lambda p: hashlib.sha256(os.fsencode(os.path.relpath(p, folder))).digest())
    tested = set(by_digest[: max(1, len(paths) // 10)])
    return [path for path in paths if (path in tested) != train]
