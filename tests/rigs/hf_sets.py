"""Hugging Face data sets for tests, written by `datasets` itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def images_of(folder: Path) -> dict[str, list[Any]]:
    """The files of a folder of class folders as rows, in the order that imagefolder has."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    classes = sorted({path.parent.name for path in files})
    return {
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in files],
        "label": [classes.index(path.parent.name) for path in files],
    }


def image_set(splits: Mapping[str, Mapping[str, Sequence[Any]]], classes: Sequence[str]) -> Any:
    """A DatasetDict of columns image and label, of images and class labels."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

    features = Features({"image": Image(), "label": ClassLabel(names=list(classes))})
    return DatasetDict({name: Dataset.from_dict(dict(rows), features=features) for name, rows in splits.items()})


def save(splits: Any, folder: Path) -> Path:
    """As `save_to_disk` writes it."""
    splits.save_to_disk(folder)
    return folder


def save_parquet(splits: Any, folder: Path) -> Path:
    """As it lies at the hub: Parquet files named by their splits."""
    (folder / "data").mkdir(parents=True)
    for name, table in splits.items():
        table.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    return folder
