"""Decoded images of a folder in a memory-mapped file, one for all processes of a node and for all later runs.

Whoever decodes an image first puts it there, during the first epoch: no rank waits for another, nothing is decoded that
nobody asked for, and a killed process leaves what it has finished. Each image has an entry of its own, with a checksum
and what its file was like: an image that is damaged, half written or out of date is decoded again.

The file: an entry for each image, and from the next page on the pixels, uint8 [3, S, S] each.
"""

import hashlib
import json
import os
import shutil
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import torch
import torchvision
from numpy.typing import NDArray

from rankup.errors import DataError
from rankup.places.files import staged

from .fetch import locked

FORMAT = 2  # to be raised when the same file gives other pixels than before
PAGE = 4096
ENTRY_BYTES = 16  # version of the image's file, and THERE | checksum: zero is an image that is not there yet
THERE = 1 << 32
WAY_OUT = "or leave --cache-images out"


@dataclass(frozen=True, slots=True)
class Plan:
    """The cache of these image files, all resized and cut to image_size x image_size."""

    paths: Sequence[str]
    image_size: int

    @property
    def pixels_at(self) -> int:
        """Where the pixels begin, in bytes."""
        return -(-len(self.paths) * ENTRY_BYTES // PAGE) * PAGE

    @property
    def num_bytes(self) -> int:
        return self.pixels_at + len(self.paths) * 3 * self.image_size**2

    def name(self) -> str:
        """Named by all that the pixels depend on."""
        key = hashlib.sha256("\0".join(self.paths).encode(errors="surrogateescape")).hexdigest()
        decoders = [torch.__version__, torchvision.__version__, PIL.__version__]
        cpu = torch.backends.cpu.get_cpu_capability()  # its instructions may round the resized pixels in another way
        facts = json.dumps([FORMAT, self.image_size, key, *decoders, cpu])
        return f"images-{hashlib.sha256(facts.encode()).hexdigest()[:24]}.cache"


class ImageCache:
    """The images of one Plan, in a file that `open_caches` has made."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan, count, size = path, plan, len(plan.paths), plan.image_size
        self.entries = np.memmap(path, "<u8", "r+", shape=(count, 2))
        self.pixels = np.memmap(path, np.uint8, "r+", plan.pixels_at, (count, 3, size, size))
        self._said: set[str] = set()

    def __reduce__(self) -> tuple[type["ImageCache"], tuple[Path, Plan]]:
        return ImageCache, (self.path, self.plan)  # workers that are not forked map the file themselves

    def count(self) -> int:
        """How many images are there."""
        return int(np.count_nonzero(self.entries[:, 1]))

    def read(self, index: int, path: str, version: int) -> torch.Tensor | None:
        """The image `index`, uint8 [3, S, S], or None if it must be decoded from `path`, which has that version now."""
        written, checksum = self.entries[index].tolist()
        if not checksum:
            return None
        if written != version:
            self._say_once("changed", f"{path}: has changed since it was cached, so it is decoded again")
            return None
        # Copied first: the checksum shall be that of the bytes that are used, whatever is written meanwhile
        pixels = np.array(self.pixels[index])
        if checksum != _checksum(index, version, pixels):
            self._say_once("damaged", f"{self.path}: the image of {path} is damaged, so it is decoded again")
            return None
        return torch.from_numpy(pixels)

    def write(self, index: int, version: int, image: torch.Tensor) -> None:
        """Put uint8 [3, S, S] there. Two processes may do it at the same time: they write the same bytes."""
        pixels = image.contiguous().numpy()
        # The pixels first: an entry without its pixels is found by the checksum, but said to be damage
        self.pixels[index] = pixels
        self.entries[index] = version, _checksum(index, version, pixels)

    def _say_once(self, what: str, text: str) -> None:
        """On standard error, since a worker process has no log; once for each kind, since more are likely to follow."""
        if what not in self._said:
            self._said.add(what)
            print(f"{text} (said once; others like it too).", file=sys.stderr, flush=True)


def _checksum(index: int, version: int, pixels: NDArray[np.uint8]) -> int:
    # CRC-32, 20 µs for 224 x 224; SHA-256 would take longer than everything else that is done with a cached image.
    return THERE | zlib.crc32(pixels.data, zlib.crc32(struct.pack("<QQ", index, version)))


def open_caches(plans: Sequence[Plan], root: Path, *, max_bytes: int) -> list[ImageCache]:
    """The caches of one run, in the folder `root`: those that are there, or new and empty ones.

    All cached images in `root` together take at most `max_bytes`: the files that were used longest ago are removed.
    A process that has one of them open keeps it until it ends. Raises DataError where there is not enough room.
    """
    paths = [root / plan.name() for plan in plans]
    needed = sum(plan.num_bytes for plan in plans)
    if needed > max_bytes:
        count = sum(len(plan.paths) for plan in plans)
        raise DataError(
            f"cache_max_gb must be at least {needed / 1e9:.3g} for {count} images of this size, got "
            f"{max_bytes / 1e9:g}. Raise it, lower --image-size, {WAY_OUT}."
        )
    try:
        with locked(root / ".images.lock"):
            others = sorted(set(root.glob("images-*.cache")) - set(paths), key=lambda path: path.stat().st_mtime)
            total = needed + sum(path.stat().st_size for path in others)
            for path in others:
                if total > max_bytes:
                    total -= path.stat().st_size
                    path.unlink()
            for path in root.glob(".images-*.cache.*"):
                path.unlink()  # of a process that was killed while it made one
            for path, plan in zip(paths, plans, strict=True):
                _make(path, plan)
                os.utime(path)  # used now
            return [ImageCache(path, plan) for path, plan in zip(paths, plans, strict=True)]
    except OSError as error:
        raise DataError(
            f"{error.filename or root}: decoded images can't be kept there ({error.strerror}). Set RANKUP_CACHE to a "
            f"folder with room, {WAY_OUT}."
        ) from error


def _make(path: Path, plan: Plan) -> None:
    """See to it that the file at `path` has the size of the plan; called under the lock. Raises DataError, OSError."""
    if path.exists():
        if path.stat().st_size == plan.num_bytes:
            return
        # Removed, not written over: whoever has it mapped would die if it became shorter.
        print(f"{path}: is damaged; it is made anew.", file=sys.stderr, flush=True)
        path.unlink()
    free = shutil.disk_usage(path.parent).free
    if free < plan.num_bytes:
        raise DataError(
            f"{path.parent}: must have {plan.num_bytes / 1e9:.3g} GB free for decoded images, has {free / 1e9:.3g}. "
            f"Set RANKUP_CACHE to a folder with room, {WAY_OUT}."
        )
    with staged(path) as staging, staging.open("xb") as file:
        # The room is ours from now on, all of it zeros: a write through the mapping of a full disk would kill
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, plan.num_bytes)
        else:
            os.ftruncate(file.fileno(), plan.num_bytes)
