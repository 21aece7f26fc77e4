"""Any folder of class folders with images: listed here, decoded one at a time by FileSamples."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from rankup import UserError

from ...config import Config
from ..file_samples import FileSamples
from .fetch import Say

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")
LAYOUT = "Images lie in <data_dir>/train/<class>/ and <data_dir>/val/<class>/, or all in <data_dir>/<class>/."
# Those of ImageNet, as is usual for photographs.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load(config: Config, say: Say) -> tuple[FileSamples, FileSamples]:
    """The images of data_dir/train and of data_dir/val (else test). Without these folders, nine in ten images of each
    class are to train on and the others to test on, chosen by a digest of their names: always the same.

    Files are listed in the order of their names, hidden ones left out; none is opened. Raises UserError, naming the
    path, for no images, an empty class, a file with another extension, or classes that differ between the halves.
    """
    assert config.data_dir is not None, "Config refuses imagefolder without data_dir"
    root = Path(config.data_dir).expanduser()
    _folders(root)
    train = root / "train"
    test = next((root / name for name in ("val", "test") if (root / name).is_dir()), root / "val")
    if not train.is_dir() and not test.is_dir():
        parts = {name: _split(root / name, paths) for name, paths in _list_classes(root).items()}
        trained, tested = ({name: part[half] for name, part in parts.items()} for half in (0, 1))
        return _file_sets((trained, root), (tested, root), config=config)
    for half, other in ((train, test), (test, train)):
        if not half.is_dir():
            raise UserError(f"{half}: is missing beside {other.name}/. {LAYOUT}")
    train_files, test_files = _list_classes(train), _list_classes(test)
    for name in sorted(set(train_files) ^ set(test_files)):
        here, there = (train, test) if name in train_files else (test, train)
        raise UserError(f"{here / name}: is a class that {there} lacks. Both need the same class folders.")
    return _file_sets((train_files, train), (test_files, test), config=config)


def _file_sets(*halves: tuple[Mapping[str, list[str]], Path], config: Config) -> tuple[FileSamples, FileSamples]:
    """The files of each class of both halves; a class's number is its place among the sorted names.

    They are named by their content, not by their place: the names and sizes of all files.
    """
    digest = hashlib.sha256()
    found = []
    for files, folder in halves:
        classes = tuple(sorted(files))
        labels = torch.tensor([label for label, name in enumerate(classes) for _ in files[name]], dtype=torch.int64)
        paths = tuple(path for name in classes for path in files[name])
        start = len(os.path.join(folder, ""))
        facts = [f"{path[start:]}\0{_size(path)}\0" for path in paths]
        digest.update("".join([*facts, "\0"]).encode(errors="surrogateescape"))
        found.append((paths, labels, classes, f"images in {folder}"))
    name, margin = f"imagefolder-{digest.hexdigest()[:8]}", config.augment in ("imagenet", "trivial")
    train, test = (FileSamples(*parts[:3], MEAN, STD, name, origin=parts[3], margin=margin) for parts in found)
    return train, test


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


def _list_classes(root: Path) -> dict[str, list[str]]:
    folders = _folders(root)
    if not folders:
        raise UserError(f"{root}: holds no class folders, so there is no image to learn from. {LAYOUT}")
    return {folder.name: _list_images(folder) for folder in folders}


def _folders(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            found = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{root}: cannot be read ({error.strerror}). {LAYOUT}") from error
    return [root / name for name in sorted(found)]


def _list_images(folder: Path) -> list[str]:
    """All images below one class folder, in the order of their names: the same on every node and file system."""
    images = []

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}).") from error

    for where, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            path = os.path.join(where, name)
            if not name.lower().endswith(EXTENSIONS):
                raise UserError(f"{path}: is no image (known are {' '.join(EXTENSIONS)}). Remove or rename it.")
            images.append(path)
    if not images:
        raise UserError(f"{folder}: holds no images. Remove the empty class folder or fill it.")
    return sorted(images)


def _split(folder: Path, paths: list[str]) -> tuple[list[str], list[str]]:
    """The images of one class to train on, and to test on: one in ten, at least one."""
    if len(paths) < 2:
        raise UserError(f"{folder}: holds one image, and a class needs two: one to train on, one to test on.")
    # By digest, not by order: pictures of one series have neighbouring names.
    by_digest = sorted(paths, key=lambda p: hashlib.sha256(os.fsencode(os.path.relpath(p, folder))).digest())
    tested = set(by_digest[: max(1, len(paths) // 10)])
    return [path for path in paths if path not in tested], [path for path in paths if path in tested]
