"""What a data source gives: images held in memory, or files that are decoded one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from train.errors import DataError

# A file as it was when it was read: name, inode, size, and the times of the last change of its contents and its entry
Stamp = tuple[str, int, int, int, int]


def stamp(path: Path) -> Stamp:
    """What differs once the file at `path` has been written again or replaced; zeros if it can't be looked at."""
    try:
        found = path.stat()
    except OSError:
        return str(path), 0, 0, 0, 0
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(frozen=True)
class ImageSet:
    """A set held in memory.

    images: uint8 [N, C, H, W]; labels: int64 [N], each below len(classes); mean, std: one per channel, of
    images / 255; origin: where the images came from, one line; mirror: whether augmentation may mirror them; files:
    those that were read, as they were before.
    """

    images: torch.Tensor
    labels: torch.Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    origin: str
    mirror: bool = True
    files: tuple[Stamp, ...] = ()

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


@dataclass(frozen=True)
class FileSet:
    """A set of image files. labels: int64 [N]; mean, std: one per channel; `load` decodes one of them."""

    paths: tuple[str, ...]
    labels: torch.Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    origin: str
    image_size: int = 224
    mirror: bool = True

    def __len__(self) -> int:
        return len(self.paths)

    def first(self, count: int) -> FileSet:
        """The first `count` samples, all of them with 0."""
        if not 0 < count < len(self):
            return self
        return replace(self, paths=self.paths[:count], labels=self.labels[:count].clone())

    def scaled(self, size: int | None) -> FileSet:
        """The same files, decoded to `size` x `size` pixels; None: to 224 x 224."""
        return self if size is None else replace(self, image_size=size)

    def load(self, index: int) -> torch.Tensor:
        """Decode one file: uint8 [3, S, S], RGB, shorter side resized to S = image_size, the middle cut out.

        Raises DataError, naming the file, if it is missing, truncated, no image, or too large to be decoded.
        """
        import numpy as np
        from PIL import Image

        path = self.paths[index]
        size = self.image_size
        try:
            with Image.open(path) as file:
                # Only JPEG can be decoded at 1/2, 1/4 or 1/8; never below the size asked for.
                file.draft("RGB", (size, size))
                # PIL warns when it drops the transparency of a palette, unless the image passes through RGBA.
                image = file.convert("RGBA").convert("RGB") if "transparency" in file.info else file.convert("RGB")
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(f"{path}: has too many pixels to be decoded safely. Make it smaller.") from error
        except FileNotFoundError as error:
            raise DataError(f"{path}: is gone since the folder was listed.") from error
        # Every exception: for damaged files PIL's decoders also raise SyntaxError, struct.error and IndexError.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{path}: is no image that can be decoded ({reason}). Remove or repair it.") from error
        width, height = image.size
        scale = size / min(width, height)
        width, height = max(size, round(width * scale)), max(size, round(height * scale))
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
