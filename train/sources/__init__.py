"""Data sources: each named data set becomes an ImageSet held in memory or a FileSet of images decoded one at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from train.errors import DataError
from train.sources.fake import load_fake
from train.sources.mnist import DEBIAN_DIR, DIGITS, DIGITS_DIR, FASHION, MNIST, Family, find_files, load_family
from train.sources.sets import FileSet, ImageSet

if TYPE_CHECKING:
    from train.config import Config

__all__ = ["FileSet", "ImageSet", "load"]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load(config: Config, *, train: bool, say: Callable[[str], None] = _say) -> ImageSet | FileSet:
    """The training (train=True) or test half of `config.dataset`, cut to its first limit_train or limit_eval samples.

    Looks where the set may lie and downloads it where it does not, one process per node; `say` gets a line when
    that takes time. Fashion-MNIST, the default, gives way to the digits that ship when it can neither be found nor
    fetched: `.name` of the result says which set it is, and all ranks of a job must compare it.
    Raises DataError, one line with the file's path, for data that is missing, damaged or not what it claims to be.
    """
    found = _load(config, train=train, say=say)
    limit = config.limit_train if train else config.limit_eval
    return found.first(limit) if 0 < limit < len(found) else found


def _load(config: Config, *, train: bool, say: Callable[[str], None]) -> ImageSet | FileSet:
    if config.dataset == "fake":
        return load_fake(
            config.fake_samples, num_classes=config.fake_classes, image_size=config.image_size or 32, train=train
        )
    if config.dataset == "digits":
        return load_family(DIGITS_DIR, DIGITS, train=train)
    family: Family = {"fashion-mnist": FASHION, "mnist": MNIST}[config.dataset]
    folder = find_files(Path(config.data_dir), family) if config.data_dir else find_files(DEBIAN_DIR, family)
    if folder is None:
        raise DataError(f"{family.title} is not there.")
    return load_family(folder, family, train=train)
