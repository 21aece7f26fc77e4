"""The data set imagefolder: any folder with one folder of images for each class. FileSamples decodes the images."""

import hashlib
import os
from pathlib import Path

import torch
from torchvision.datasets.folder import find_classes, is_image_file

from rankup import UserError

from ...config import Config
from .. import one_line
from ..file_samples import FileSamples

LAYOUT = "Images lie in <data_dir>/train/<class>/ and <data_dir>/val/<class>/, or all in <data_dir>/<class>/."
Listed = dict[str, list[str]]  # class -> the paths of its images


def load(config: Config) -> tuple[FileSamples, FileSamples]:
    """Return the images of data_dir/train and of data_dir/val (else test). Without these folders, one in ten images of
    each class, always the same, is for tests and the others for training. Opens no file. Raises UserError."""
    assert config.data_dir is not None, "load_config refuses imagefolder without data_dir"
    root = Path(config.data_dir).expanduser()
    train, test = root / "train", root / "val"
    if not test.is_dir() and (root / "test").is_dir():
        test = root / "test"
    if train.is_dir() or test.is_dir():
        train_files, test_files = _list(train), _list(test)
        for name in sorted(train_files.keys() ^ test_files.keys()):
            has, lacks = (train, test) if name in train_files else (test, train)
            raise UserError(f"{has / name}: is a class that {lacks} lacks. Both need the same class folders.")
    else:
        train = test = root
        parts = {name: _split(root / name, paths) for name, paths in _list(root).items()}
        train_files, test_files = ({name: part[half] for name, part in parts.items()} for half in (0, 1))
    # The name depends on the names and sizes of all files, not on where the folder is
    digest = hashlib.sha256()
    for files, folder in ((train_files, train), (test_files, test)):
        start = len(os.path.join(folder, ""))
        try:
            lines = [f"{path[start:]}\0{os.stat(path).st_size}\0" for paths in files.values() for path in paths]
        except OSError as error:  # a broken link
            raise UserError(f"{error.filename}: cannot be read ({error.strerror}). Restore or remove it.") from error
        digest.update("".join([*lines, "\0"]).encode(errors="surrogateescape"))
    name = f"imagefolder-{digest.hexdigest()[:8]}"
    return _samples(train_files, train, name, config), _samples(test_files, test, name, config)


def _samples(files: Listed, folder: Path, name: str, config: Config) -> FileSamples:
    labels = [label for label, paths in enumerate(files.values()) for _ in paths]
    return FileSamples(
        tuple(path for paths in files.values() for path in paths), torch.tensor(labels, dtype=torch.int64),
        tuple(files), name, f"images in {folder}", margin=isinstance(config.augment, str),
    )


def _list(root: Path) -> Listed:
    """List all images below each class folder, sorted by name, so that all nodes and file systems give the same order.
    Skip hidden files and folders, such as .ipynb_checkpoints, and the ._NAME that macOS adds to each file."""

    def refuse(error: OSError) -> None:
        raise error  # by default os.walk, and so torchvision's make_dataset, skips a folder that can't be read

    listed: Listed = {}
    try:
        classes = [name for name in find_classes(root)[0] if name[0] != "."]
        if not classes:
            raise FileNotFoundError("no class folder in it")
        for name in classes:
            paths: list[str] = []
            for folder, below, files in os.walk(root / name, onerror=refuse, followlinks=True):
                below[:] = [each for each in below if each[0] != "."]
                paths += [os.path.join(folder, each) for each in files if each[0] != "." and is_image_file(each)]
            if not paths:
                raise FileNotFoundError(f"no image in {name}")
            listed[name] = sorted(paths)
    except OSError as error:
        raise UserError(f"{root}: cannot be used as a folder of images ({one_line(error)}). {LAYOUT}") from error
    return listed


def _split(folder: Path, paths: list[str]) -> tuple[list[str], list[str]]:
    """Split the images of one class into training and test images. One in ten, and at least one, is a test image."""
    if len(paths) < 2:
        raise UserError(f"{folder}: holds one image, and a class needs two: one to train on, one to test on.")
    # Choose by digest, not by name: pictures of one series have neighbouring names.
    by_digest = sorted(paths, key=lambda p: hashlib.sha256(os.fsencode(os.path.relpath(p, folder))).digest())
    tested = set(by_digest[: max(1, len(paths) // 10)])
    return [path for path in paths if path not in tested], [path for path in paths if path in tested]
