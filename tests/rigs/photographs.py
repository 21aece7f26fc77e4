"""Random photographs: smooth colours, edges and noise. Their JPEG files are about as large as real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def photograph(number: int, *, width: int = 500, height: int = 375) -> Image.Image:
    """Return an RGB image. The same number gives the same image."""
    random = np.random.default_rng(number)
    picture = np.full((height, width, 3), 128.0)
    for columns, contrast in ((8, 60), (32, 40), (125, 30)):
        rows = columns * height // width + 1
        grid = random.integers(0, 256, (rows, columns, 3), dtype=np.uint8)
        layer = Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)
        picture += (np.asarray(layer) - 128.0) * contrast / 64
    picture += random.normal(0, 5, picture.shape)
    return Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))


def write_photographs(root: Path, count: int, *, width: int, height: int, first: int = 0) -> None:
    """Write `count` JPEG files to the two class folders of `root`. In each class every other one is upright."""
    for number in range(count):
        folder = root / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        size = (width, height) if number // 2 % 2 == 0 else (height, width)
        picture = photograph(first + number, width=size[0], height=size[1])
        picture.save(folder / f"{number:05}.jpg", quality=90)
