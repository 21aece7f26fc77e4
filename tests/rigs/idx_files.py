"""Small random IDX files for the tests of the data sources."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import torch

from train.data.sources.fetch import KNOWN, Remote

ROWS = {"train": 20, "t10k": 10}
MAGIC = {"images": b"\0\0\x08\x03", "labels": b"\0\0\x08\x01"}


def write_idx(path: str | Path, values: torch.Tensor) -> None:
    """Write uint8 [N, H, W] as images or uint8 [N] as labels; with gzip if the name ends in .gz.

    The same values give the same bytes: the gzip header has neither name nor time."""
    magic = MAGIC["images" if values.dim() == 3 else "labels"]
    content = magic + struct.pack(f">{values.dim()}I", *values.shape) + values.contiguous().numpy().tobytes()
    path = Path(path)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def made_up(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 6, 6), generator=values, dtype=torch.uint8)
    return images, (torch.arange(count) % 10).to(torch.uint8)


def write_set(folder: Path, *, suffix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 20), ("t10k", 10)):
        images, labels = made_up(count)
        write_idx(folder / f"{name}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte{suffix}", labels)
    return folder


def small() -> Remote:
    """Return a description of Fashion-MNIST as `write_set` makes it. No file of it is on this machine."""
    return replace(KNOWN["fashion-mnist"], packed=None, package="")


def everything(root: Path) -> list[str]:
    """Return the names of all files in `root`, except locks and recorded failures."""
    return sorted(path.name for path in root.iterdir() if path.suffix not in (".lock", ".failed"))
