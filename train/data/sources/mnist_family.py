"""MNIST and its relatives: where their four IDX files may be, and how these become TensorSamples.

An IDX file is a big-endian header (two zero bytes, a type byte, the number of dimensions, one 32-bit size per
dimension) followed by the values. http://yann.lecun.com/exdb/mnist describes it; only unsigned bytes are read here.
"""

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from rankup import UserError

from ...config import Config
from ..samples import TensorSamples
from .fetch import NotFetched, Remote, Say, cached, fetch, visible, writable_cache

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


@dataclass(frozen=True)
class Family:
    """One data set of four IDX files. mean and std are those of its training images / 255."""

    name: str
    title: str
    folder: str  # torchvision keeps the files in <root>/<folder>/raw, and names the class so that knows addresses
    classes: tuple[str, ...]
    mean: float
    std: float
    counts: tuple[int, int]  # images to train on and to test on, as published
    digest: str = ""  # of the published ones, see `read_halves`; those of a set without it are named by theirs
    mirror: bool = True  # whether a mirrored image still shows its class; a mirrored 2 does not
    here: Path | None = None  # where the files may lie on this machine
    debian_package: str | None = None
    files: Sequence[tuple[Sequence[str], str]] = ()  # addresses and md5 of each file, in place of torchvision's


FAMILIES = {
    # Pictures of clothes (Xiao et al. 2017), the default
    "fashion-mnist": Family(
        "fashion-mnist", "Fashion-MNIST", "FashionMNIST",
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        mean=0.2860, std=0.3530, counts=(60_000, 10_000), digest="ced07e3c",
        here=Path("/usr/share/datasets/fashion-mnist"), debian_package="dataset-fashion-mnist",
    ),
    # Handwritten digits (LeCun et al. 1998)
    "mnist": Family(
        "mnist", "MNIST", "MNIST", tuple("0123456789"), mean=0.1307, std=0.3081, counts=(60_000, 10_000), mirror=False
    ),
    # Handwritten digits that ship with the program, 8 x 8 pixels
    "digits": Family(
        "digits", "digits", "digits", tuple("0123456789"), mean=0.2873, std=0.3537, counts=(1_438, 359),
        digest="27dce9ae", mirror=False, here=Path(__file__).parents[2] / "samples" / "digits",
    ),
}


def load(config: Config, say: Say) -> tuple[TensorSamples, TensorSamples]:
    """The training half and the test half, uint8 [N, 1, H, W]: 28 x 28 pixels, the digits that ship 8 x 8.

    The digits take the place of Fashion-MNIST where it cannot be fetched and the user named no data_dir: a first try
    without a network shall train something. `say` gets a line then. Raises UserError, see `locate`.
    """
    family = FAMILIES[config.dataset]
    data_dir = None if config.dataset == "digits" else config.data_dir
    try:
        folder = locate(family, data_dir=data_dir, timeout_s=config.download_timeout_s, say=say)
    except NotFetched as error:
        if config.dataset != "fashion-mnist" or config.data_dir is not None:
            raise
        say(f"{error} Using digits instead.")
        return load(config.model_copy(update={"dataset": "digits"}), say)
    return read_halves(folder, family)


def locate(family: Family, *, data_dir: str | None, timeout_s: float, say: Say) -> Path:
    """The folder that holds the four files, fetched if need be.

    In data_dir if it is given: found there, or downloaded to it if it is empty or not there yet. Otherwise on this
    machine, where Debian's package has it, then in the cache, then downloaded to the cache.
    Raises NotFetched if no source gives the set, UserError for a folder that holds something else, or half of it.
    """

    def published() -> Sequence[tuple[Sequence[str], str]]:
        import torchvision

        kind = getattr(torchvision.datasets, family.folder)
        return [([f"{mirror}{name}" for mirror in kind.mirrors], md5) for name, md5 in kind.resources]

    def check(folder: Path) -> None:
        for train, count in zip((True, False), family.counts, strict=True):
            found = len(read_half(folder / "raw", family, train=train))
            if found != count:
                raise UserError(f"{folder / 'raw'}: {FILES[train][0]} holds {found} images, not {count}.")

    if data_dir is None:
        places = [there for there in (family.here, cached(family.folder)) if there is not None]
        folder = next((found for there in places if (found := find_files(there, family)) is not None), None)
    else:
        # Listed before the search: a set that another process renames into place in between is then found
        others = visible(Path(data_dir).expanduser())
        folder = find_files(Path(data_dir).expanduser(), family)
        if folder is None and others:
            raise UserError(
                f"{data_dir}: holds none of the files of {family.title} ({', '.join(NAMES)}; plain or .gz), but "
                f"{others[0]}. Set data_dir to the folder that holds them, or to an empty one to download to."
            )
    if folder is not None:
        return folder
    root = writable_cache() if data_dir is None else Path(data_dir).expanduser()
    remote = Remote(
        family.title, family.folder, (lambda: family.files) if family.files else published, f"{family.folder}/raw",
        check, package=family.debian_package, place=str(family.here or "").lstrip("/"),
    )
    return fetch(remote, root, timeout_s=timeout_s, say=say) / "raw"


def find_files(root: Path, family: Family) -> Path | None:
    """The folder below `root` that holds the four files, plain or .gz: root itself or torchvision's layout.

    None if neither holds any of them. Raises UserError if some are there and others are missing.
    """
    for folder in (root, root / family.folder / "raw"):
        missing = [name for name in NAMES if _file(folder, name) is None]
        if not missing:
            return folder
        if len(missing) < len(NAMES):
            raise UserError(f"{folder}: {missing[0]} (or .gz) is missing beside other files of {family.title}. Add it.")
    return None


def read_halves(folder: Path, family: Family) -> tuple[TensorSamples, TensorSamples]:
    """The training half and the test half from the folder that `locate` gave. Raises UserError, see `read_half`.

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


def read_half(folder: Path, family: Family, *, train: bool) -> TensorSamples:
    """Read one half of a set from a folder: images uint8 [N, 1, H, W], labels int64 [N].

    Raises UserError, naming the file, if one is missing or damaged, the counts differ or a label is out of range.
    """
    image_path, label_path = (_file(folder, name) or folder / name for name in FILES[train])
    images, labels = read_idx(image_path, "images"), read_idx(label_path, "labels")
    if len(images) != len(labels):
        raise UserError(
            f"{label_path}: holds {len(labels)} labels for {len(images)} images in {image_path.name}. "
            "The two files belong to different sets."
        )
    if (highest := int(labels.max())) >= len(family.classes):
        raise UserError(f"{label_path}: label must be 0..{len(family.classes) - 1} for {family.title}, got {highest}.")
    return TensorSamples(
        images.unsqueeze(1), labels.long(), family.classes, mean=(family.mean,), std=(family.std,), name=family.name,
        origin=f"{family.title} in {folder}", mirror=family.mirror,
    )


def _file(folder: Path, name: str) -> Path | None:
    # The plain file first: where both are there, it needs no unpacking.
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, expect: Kind) -> torch.Tensor:
    """Read one IDX file, plain or gzip: uint8 [N, H, W] for images, uint8 [N] for labels.

    Raises UserError, naming the file, if it cannot be read, is not of that kind, is empty, truncated or too long.
    """
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"  # told by the content, not by the name
            # One byte more than a whole file may have: the rest of a larger one stays packed
            content = (gzip.GzipFile(fileobj=file) if packed else file).read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}). {DAMAGED}") from error
    num_sizes = 3 if expect == "images" else 1
    start = 4 + 4 * num_sizes
    shape = struct.unpack(f">{num_sizes}I", content[4:start].ljust(4 * num_sizes, b"\0"))
    if content[:4] != MAGIC[expect] or not 0 < math.prod(shape) == len(content) - start:
        raise UserError(f"{path}: is no whole IDX file of {expect}. {DAMAGED}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape)
