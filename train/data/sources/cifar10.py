"""CIFAR-10 in torchvision's layout. Its files are pickles, which can run code: none is opened unless its md5 fits."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from rankup import UserError

from ...config import Config
from ..samples import TensorSamples
from .fetch import Remote, Say, cached, fetch, visible, writable_cache

FOLDER = "cifar-10-batches-py"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def load(config: Config, say: Say) -> tuple[TensorSamples, TensorSamples]:
    """uint8 [50000, 3, 32, 32] to train on and [10000, 3, 32, 32] to test on; from data_dir, the cache, or downloaded.

    Raises UserError for data that are missing or whose md5 differs from torchvision's, NotFetched if they cannot be
    downloaded.
    """
    if config.data_dir is not None:
        root = Path(config.data_dir).expanduser()
        if root.name == FOLDER and root.is_dir():
            root = root.parent
        others = visible(root)
        if not (root / FOLDER).is_dir() and others:
            raise UserError(
                f"{root}: holds no folder {FOLDER}, but {others[0]}. "
                "Set data_dir to the folder that holds it, or to an empty one to download to."
            )
    else:
        root = cached(FOLDER) or writable_cache()
    # Nothing to check there: reading compares every md5
    remote = Remote("CIFAR-10", FOLDER, files=_archive, inside="", check=lambda _: None)
    fetch(remote, root, timeout_s=config.download_timeout_s, say=say)
    return _read(root, train=True), _read(root, train=False)


def _archive() -> Sequence[tuple[Sequence[str], str]]:
    from torchvision.datasets import CIFAR10

    return [([CIFAR10.url], CIFAR10.tgz_md5)]


def _read(root: Path, *, train: bool) -> TensorSamples:
    from torchvision.datasets import CIFAR10

    folder = root / FOLDER
    try:
        with warnings.catch_warnings():
            # numpy >= 2.4 warns because these old pickles spell a dtype in numbers.
            warnings.simplefilter("ignore")
            # torchvision compares every md5 before it opens the first pickle.
            found = CIFAR10(root=str(root), train=train)
    except RuntimeError as error:
        raise UserError(
            f"{folder}: must hold the published files, got others (their md5 differs) or none. Remove it and run again "
            "to download it."
        ) from error
    images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
    return TensorSamples(
        images, torch.tensor(found.targets, dtype=torch.int64), CLASSES, mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616), name="cifar10", origin=f"CIFAR-10 in {folder}",
    )
