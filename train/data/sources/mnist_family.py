"""MNIST and its relatives, four IDX files each: where the files may be, and how they become an ImageSet."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankup.errors import DataError
from train.data.sources.cache import cached, visible, writable_cache
from train.data.sources.fetch import Remote, Say, fetch
from train.data.sources.idx import read_idx
from train.data.sources.sets import ImageSet, stamp

COMPARED = 100  # images of a half whose bytes are part of the digest, beside all labels
FILES = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class Family:
    """One data set of four IDX files. mean and std are those of its training images / 255."""

    name: str
    title: str
    folder: str  # torchvision keeps the files in <root>/<folder>/raw
    classes: tuple[str, ...]
    mean: float
    std: float
    counts: Mapping[bool, int]  # images to train on (True) and to test on (False), as published
    digest: str = ""  # of the published ones, see `read_halves`; those of a set without it are named by theirs
    mirror: bool = True  # whether a mirrored image still shows its class; a mirrored 2 does not
    debian_dir: Path | None = None
    debian_package: str | None = None
    attributes: Mapping[str, Any] | None = None  # set on torchvision's class before it downloads: mirrors, resources


def locate(family: Family, *, data_dir: str | None, timeout_s: float, say: Say) -> Path:
    """The folder that holds the four files, fetched if need be.

    In data_dir if it is given: found there, or downloaded to it if it is empty or not there yet. Otherwise in
    Debian's place, then in the cache, then downloaded to the cache.
    Raises NotFetched if no source gives the set, DataError for a folder that holds something else, or half of it.
    """

    def check(folder: Path) -> None:
        for train, count in family.counts.items():
            found = len(read_half(folder / "raw", family, train=train))
            if found != count:
                raise DataError(f"{folder / 'raw'}: {FILES[train][0]} holds {found} images, not {count}.")

    remote = Remote(
        family.title, family.folder, family.folder, check, package=family.debian_package,
        place=str(family.debian_dir or "").lstrip("/"), package_folder="raw", attributes=family.attributes or {},
    )
    if data_dir is not None:
        root = Path(data_dir).expanduser()
        others = visible(root)
        # Listed before the search: a set that another process renames into place in between is then found. In the
        # other order its folder would be taken for something else.
        folder = find_files(root, family)
        if folder is None and others:
            names = ", ".join(name for pair in FILES.values() for name in pair)
            raise DataError(
                f"{root}: holds none of the files of {family.title} ({names}; plain or .gz), but {others[0]}. "
                "Set data_dir to the folder that holds them, or to an empty one to download to."
            )
        return folder or fetch(remote, root, timeout_s=timeout_s, say=say) / "raw"
    for there in (family.debian_dir, cached(family.folder)):
        if there is not None and (folder := find_files(there, family)) is not None:
            return folder
    return fetch(remote, writable_cache(), timeout_s=timeout_s, say=say) / "raw"


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


def read_halves(folder: Path, family: Family) -> tuple[ImageSet, ImageSet]:
    """The training half and the test half from the folder that `locate` gave. Raises DataError, see `read_half`.

    Other images than the published ones get a name of their own: a run on the one does not go on with the other.
    """
    halves = [read_half(folder, family, train=train) for train in (True, False)]
    digest = hashlib.sha256()
    for half in halves:
        digest.update(f"{tuple(half.images.shape)}".encode() + half.labels.numpy().tobytes())
        digest.update(half.images[:COMPARED].numpy().tobytes())
    found = digest.hexdigest()[:8]
    name = family.name if found == family.digest else f"{family.name}-{found}"
    train, test = (replace(half, name=name) for half in halves)
    return train, test


def read_half(folder: Path, family: Family, *, train: bool) -> ImageSet:
    """Read one half of a set from a folder: images uint8 [N, 1, H, W], labels int64 [N].

    Raises DataError, naming the file, if one is damaged, the counts differ or a label is out of range.
    """
    image_name, label_name = FILES[train]
    image_path, label_path = _file(folder, image_name), _file(folder, label_name)
    if image_path is None or label_path is None:
        raise DataError(f"{folder}: {image_name if image_path is None else label_name} (or .gz) is missing.")
    files = (stamp(image_path), stamp(label_path))  # first: a change while they are read is then noticed too
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
        images.unsqueeze(1), labels.long(), family.classes, mean=(family.mean,), std=(family.std,), name=family.name,
        origin=f"{family.title} in {folder}", mirror=family.mirror, files=files,
    )


def _file(folder: Path, name: str) -> Path | None:
    # The plain file first: where both are there, it needs no unpacking.
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
