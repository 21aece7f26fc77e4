"""Data sources: each named data set becomes an ImageSet held in memory or a FileSet of images decoded one at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from train.data.sources import mnist
from train.data.sources.cifar import load_cifar10
from train.data.sources.fake import load_fake
from train.data.sources.fetch import NotFetched
from train.data.sources.folder import load_folder
from train.data.sources.sets import FileSet, ImageSet
from train.errors import DataError

if TYPE_CHECKING:
    from train.config.load import Config

__all__ = ["FileSet", "ImageSet", "load"]

# What this process has found to be out of reach: the second half of a set must get the answer that the first got
_out_of_reach: dict[tuple[str, str | None], NotFetched] = {}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load(config: Config, *, train: bool, say: Callable[[str], None] = _say) -> ImageSet | FileSet:
    """The training (train=True) or test half of `config.dataset`, cut to its first limit_train or limit_eval samples.

    Looks where the set may lie and downloads it where it does not, one process per node; `say` gets a line when
    that takes time. Fashion-MNIST, the default, gives way to the digits that ship if it is neither found nor
    fetched and no data_dir is given: `.name` says which set it is, and all ranks of a job must compare it.
    With image_size, images in memory are scaled to that height and width.
    Raises DataError, one line with the file's path, for data that are missing, damaged or not what they claim to be.
    """
    found = _load(config, train=train, say=say)
    limit = config.limit_train if train else config.limit_eval
    if 0 < limit < len(found):
        found = found.first(limit)
    if isinstance(found, ImageSet) and config.image_size is not None:
        return replace(found, images=_resized(found.images, config.image_size))
    return found


def _load(config: Config, *, train: bool, say: Callable[[str], None]) -> ImageSet | FileSet:
    key = (config.dataset, config.data_dir)
    try:
        if key in _out_of_reach:
            raise _out_of_reach[key]
        if config.dataset == "fake":
            return load_fake(
                config.fake_samples, num_classes=config.fake_classes, image_size=config.image_size or 32, train=train
            )
        if config.dataset == "digits":
            return mnist.load_family(mnist.DIGITS_DIR, mnist.DIGITS, train=train)
        if config.dataset == "imagefolder":
            return load_folder(config.data_dir, train=train, image_size=config.image_size or 224)
        if config.dataset == "cifar10":
            return load_cifar10(train=train, data_dir=config.data_dir, timeout_s=config.download_timeout_s, say=say)
        family = {"fashion-mnist": mnist.FASHION, "mnist": mnist.MNIST}[config.dataset]
        folder = mnist.locate(family, data_dir=config.data_dir, timeout_s=config.download_timeout_s, say=say)
        return mnist.load_family(folder, family, train=train)
    except NotFetched as error:
        if config.dataset != "fashion-mnist" or config.data_dir is not None:
            raise NotFetched(
                f"{error} Bring the files from a machine that can, and set data_dir to their folder; "
                "dataset digits needs no download."
            ) from error
        if key not in _out_of_reach:
            _out_of_reach[key] = error
            say(f"{error} Using the small dataset digits instead; to use your own copy, set data_dir.")
        return mnist.load_family(mnist.DIGITS_DIR, mnist.DIGITS, train=train)


def _resized(images: torch.Tensor, size: int) -> torch.Tensor:
    """uint8 [N, C, H, W] -> uint8 [N, C, size, size], bilinear, without aliasing."""
    if images.shape[2:] == (size, size):
        return images
    try:
        scaled = torch.empty((*images.shape[:2], size, size), dtype=torch.uint8)
    except RuntimeError as error:
        needed = images.shape[0] * images.shape[1] * size * size / 1e9
        raise DataError(
            f"image_size must let {len(images)} images fit in memory, got {size} ({needed:.1f} GB). "
            "Choose a smaller one, or set limit_train and limit_eval."
        ) from error
    # In pieces: the step between is in float32, four times as large
    for start in range(0, len(images), 1024):
        piece = images[start : start + 1024].float()
        floats = torch.nn.functional.interpolate(piece, size=(size, size), mode="bilinear", antialias=True)
        scaled[start : start + 1024] = floats.round_().clamp_(0, 255).to(torch.uint8)
    return scaled
