"""Any folder of class folders with images: listed by torchvision, decoded one at a time by FileSamples."""

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
    """The images of data_dir/train and of data_dir/val (else test). Without these folders, nine in ten images of each
    class are to train on and the others to test on, always the same. No file is opened. Raises UserError."""
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
    # Named by the content, not by the place: the names and sizes of all files
    digest = hashlib.sha256()
    for files, folder in ((train_files, train), (test_files, test)):
        start = len(os.path.join(folder, ""))
        try:
            lines = [f"{path[start:]}\0{os.stat(path).st_size}\0" for paths in files.values() for path in paths]
        except OSError as error:  # a link to nothing
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
    """All images below each class folder, in the order of their names: the same on every node and file system. Nothing
    hidden: neither .ipynb_checkpoints, nor what macOS puts beside a file as ._NAME."""

    def refuse(error: OSError) -> None:
        raise error  # a folder that can't be read: os.walk, and with it torchvision's make_dataset, would leave it out

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
        raise UserError(f"{root}: cannot be taken for a folder of images ({one_line(error)}). {LAYOUT}") from error
    return listed


def _split(folder: Path, paths: list[str]) -> tuple[list[str], list[str]]:
    """The images of one class to train on, and to test on: one in ten, at least one."""
    if len(paths) < 2:
        raise UserError(f"{folder}: holds one image, and a class needs two: one to train on, one to test on.")
    # By digest, not by order: pictures of one series have neighbouring names.
    by_digest = sorted(paths, key=lambda p: hashlib.sha256(os.fsencode(os.path.relpath(p, folder))).digest())
    tested = set(by_digest[: max(1, len(paths) // 10)])
    return [path for path in paths if path not in tested], [path for path in paths if path in tested]
