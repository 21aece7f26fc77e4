"""Small made-up IDX files for the tests of the data sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from train.data.sources import fashion_mnist
from train.data.sources.idx import write_idx
from train.data.sources.mnist_family import Family

ROWS = {"train": 20, "t10k": 10}


def made_up(count: int, *, size: int = 6, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, size, size), generator=values, dtype=torch.uint8)
    return images, (torch.arange(count) % classes).to(torch.uint8)


def write_set(folder: Path, *, suffix: str = "", counts: tuple[int, int] = (20, 10), classes: int = 10) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in zip(("train", "t10k"), counts, strict=True):
        images, labels = made_up(count, classes=classes)
        write_idx(folder / f"{name}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte{suffix}", labels)
    return folder


def small(attributes: dict[str, Any] | None = None) -> Family:
    return replace(
        fashion_mnist.FAMILY,
        debian_dir=None,
        debian_package=None,
        counts={True: ROWS["train"], False: ROWS["t10k"]},
        attributes=attributes,
    )


def everything(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())
