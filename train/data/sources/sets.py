"""What a data source gives: images held in memory, or names of files that are decoded one at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from rankup.errors import DataError

if TYPE_CHECKING:
    from .image_cache import ImageCache  # which imports torchvision

def version_of(path: str) -> int:
    """A number that differs once the file has been replaced or written again; 0 if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0
    return version_of_facts(found.st_ino, found.st_size, found.st_mtime_ns)


def version_of_facts(*facts: int | str) -> int:
    """A number of 64 bits for what tells one version of a file from another."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class ImageSet:
    """A set held in memory.

    images: uint8 [N, C, H, W]; labels: int64 [N], each below len(classes); mean, std: one per channel, of
    images / 255; origin: where the images came from, one line; mirror: whether augmentation may mirror them.
    """

    images: torch.Tensor
    labels: torch.Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    origin: str
    mirror: bool = True

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> ImageSet:
        """The first `count` samples, all of them with 0; copied, so that the rest can be freed."""
        if not 0 < count < len(self):
            return self
        return replace(self, images=self.images[:count].clone(), labels=self.labels[:count].clone())

    def scaled(self, size: int | None) -> ImageSet:
        """Images uint8 [N, C, size, size], bilinear with antialiasing; None: as they are.

        Raises DataError if they do not fit in memory.
        """
        if size is None or self.images.shape[2:] == (size, size):
            return self
        try:
            scaled = torch.empty((*self.images.shape[:2], size, size), dtype=torch.uint8)
        except RuntimeError as error:
            needed = self.images.shape[0] * self.images.shape[1] * size * size / 1e9
            raise DataError(
                f"image_size must let {len(self)} images fit in memory, got {size} ({needed:.1f} GB). "
                "Choose a smaller one, or set limit_train and limit_eval."
            ) from error
        # In pieces: float32, which interpolation needs, takes four times the memory of uint8.
        for start in range(0, len(self), 1024):
            piece = self.images[start : start + 1024].float()
            floats = torch.nn.functional.interpolate(piece, size=(size, size), mode="bilinear", antialias=True)
            scaled[start : start + 1024] = floats.round_().clamp_(0, 255).to(torch.uint8)
        return replace(self, images=scaled)


class Contents(Protocol):
    """Image files that lie in something else, such as shards, by the numbers of their samples."""

    @property
    def storage(self) -> torch.Tensor:
        """The numbers of the samples as they lie one after the other, int64 [N]."""

    def read(self, number: int) -> bytearray:
        """The bytes of a file. Raises DataError."""

    def version(self, number: int) -> int:
        """A number that differs once the file has been replaced."""


@dataclass(frozen=True)
class FileSet:
    """A set of image files. labels: int64 [N]; mean, std: one per channel, of images / 255.

    image_size: height and width that they get; margin: whether, where nothing is random, the shorter side is resized to
    8/7 of it first, as ImageNet's recipe does (256 for 224); cache: where the decoded ones are kept; contents: what
    reads them where they lie in something else; `paths` are then names for messages alone.
    """

    paths: Sequence[str]
    labels: torch.Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    origin: str
    image_size: int = 224
    mirror: bool = True
    margin: bool = False
    cache: ImageCache | None = None
    contents: Contents | None = None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def storage(self) -> torch.Tensor | None:
        """The numbers of the samples as they lie one after the other, int64 [N]; None: in order."""
        if self.contents is None:
            return None
        stored = self.contents.storage
        return stored[stored < len(self)]  # after `first`

    @property
    def shorter_side(self) -> int:
        """What the shorter side of an image is resized to before the middle is cut out."""
        return round(self.image_size * 256 / 224) if self.margin else self.image_size

    def first(self, count: int) -> FileSet:
        """The first `count` samples, all of them with 0."""
        if not 0 < count < len(self):
            return self
        return replace(self, paths=self.paths[:count], labels=self.labels[:count].clone())

    def scaled(self, size: int | None) -> FileSet:
        """The same files, decoded to `size` x `size` pixels; None: to 224 x 224."""
        return self if size is None else replace(self, image_size=size)
