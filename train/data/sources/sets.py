"""What a data source gives: images held in memory, or files that are decoded one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from train.errors import DataError


@dataclass(frozen=True)
class ImageSet:
    """A set held in memory.

    images: uint8 [N, C, H, W]; labels: int64 [N], each below len(classes); mean, std: one per channel, of
    images / 255; origin: where the images came from, one line.
    """

    images: torch.Tensor
    labels: torch.Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    origin: str

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> ImageSet:
        """The first `count` samples; copied, so that the rest can be freed."""
        return replace(self, images=self.images[:count].clone(), labels=self.labels[:count].clone())


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

    def __len__(self) -> int:
        return len(self.paths)

    def first(self, count: int) -> FileSet:
        """The first `count` samples."""
        return replace(self, paths=self.paths[:count], labels=self.labels[:count].clone())

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
                # JPEG alone can decode at 1/2, 1/4, 1/8; never below the size asked for
                file.draft("RGB", (size, size))
                # PIL warns when it drops the transparency of a palette, unless it passes through RGBA
                image = file.convert("RGBA").convert("RGB") if "transparency" in file.info else file.convert("RGB")
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(f"{path}: has too many pixels to be decoded safely. Make it smaller.") from error
        except FileNotFoundError as error:
            raise DataError(f"{path}: is gone since the folder was listed.") from error
        # Everything: PIL's decoders also let SyntaxError, struct.error and IndexError out for damaged files
        except Exception as error:
            raise DataError(
                f"{path}: is no image that can be decoded ({_one_line(error)}). Remove it or mend it."
            ) from error
        width, height = image.size
        scale = size / min(width, height)
        width, height = max(size, round(width * scale)), max(size, round(height * scale))
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
