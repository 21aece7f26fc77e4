"""Images of a Hugging Face data set: rows of a column, decoded one at a time, as files of an image folder are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rankup.errors import DataError
from train.config import Config
from train.data.sources.fetch import Say
from train.data.sources.hf_rows import Rows, input_column, label_column, open_rows, read_labels, refuse_single_class
from train.data.sources.image_cache import version_of, version_of_facts
from train.data.sources.imagefolder import MEAN, STD
from train.data.sources.sets import FileSet

COMPARED = 100  # images whose bytes are part of the digest; of all others only the lengths are


@dataclass(frozen=True)
class ImageColumn:
    """The encoded images of some rows. Picklable: workers that are not forked map the rows anew."""

    rows: Rows
    name: str

    @property
    def storage(self) -> torch.Tensor:
        """int64 [N]: as they are numbered."""
        return torch.arange(len(self.rows))

    def read(self, number: int) -> bytearray:
        """The bytes of one. Raises DataError for an image that is a file of its own and can't be read."""
        cell = self._cell(number)
        found = cell["bytes"] if isinstance(cell, dict) else cell
        if found is not None:
            return bytearray(found)
        try:
            return bytearray(Path(cell["path"]).read_bytes())
        except OSError as error:
            raise DataError(f"{cell['path']}: can't be read ({error.strerror}).") from error

    def version(self, number: int) -> int:
        """That of its own file, or of the column in those that hold the rows."""
        cell = self._cell(number)
        if isinstance(cell, dict) and cell["bytes"] is None:
            return version_of(cell["path"])
        return self._version

    @cached_property
    def _version(self) -> int:
        return version_of_facts(self.name, *(version_of(file["filename"]) for file in self.rows.table.cache_files))

    def _cell(self, number: int) -> Any:
        return self.rows.table.data.column(self.name)[self.rows.start + number].as_py()


def load(config: Config, say: Say) -> tuple[FileSet, FileSet]:
    """The images of the splits that the settings name, in the order of their rows.

    Raises ConfigError without `datasets`; DataError, naming split, column and row, for what is not there and for rows
    without a label.
    """
    train_rows, test_rows = open_rows(config, say=say)
    images = [name for name, feature in train_rows.features.items() if _is_image(feature)]
    image = input_column(train_rows, config, images, what="images")
    label = label_column(train_rows, config)
    test_rows.must_have(input_column=image, label_column=label)
    train_labels, classes = read_labels(train_rows, label)
    refuse_single_class(classes, train_rows.where)
    test_labels, _ = read_labels(test_rows, label)
    train, test = _numbers(train_rows, label, train_labels, classes), _numbers(test_rows, label, test_labels, classes)
    return _file_set(train_rows, image, train, classes, config), _file_set(test_rows, image, test, classes, config)


def _is_image(feature: Any) -> bool:
    from datasets import Image, Value

    # Parquet files that were not written by `datasets` have the bytes alone, or a struct of bytes and path
    inner = feature.get("bytes") if isinstance(feature, dict) else feature
    return isinstance(inner, Image) or (isinstance(inner, Value) and inner.dtype in ("binary", "large_binary"))


def _numbers(rows: Rows, name: str, labels: list[str | None], classes: tuple[str, ...]) -> torch.Tensor:
    """The place of each label among the classes, int64 [N]. Raises DataError, naming the first row that has none."""
    place = {name: number for number, name in enumerate(classes)}
    for row, label in enumerate(labels, rows.start):
        if label not in place:
            got = "none" if label is None else f"{label}, which the training rows lack,"
            raise DataError(f"{rows.where}: {name} must hold a label in each row, got {got} in row {row}.")
    return torch.tensor([place[label] for label in labels if label is not None], dtype=torch.int64)


def _file_set(rows: Rows, image: str, labels: torch.Tensor, classes: tuple[str, ...], config: Config) -> FileSet:
    import pyarrow
    import pyarrow.compute

    encoded, images = rows.column(image), ImageColumn(rows, image)
    files: list[str | None] = [None] * len(rows)
    if pyarrow.types.is_struct(encoded.type):
        files = pyarrow.compute.struct_field(encoded, "path").to_pylist()
        encoded = pyarrow.compute.struct_field(encoded, "bytes")
    title, paths = Path(config.dataset.removeprefix("hf:")).name, []
    for row, (has_bytes, file) in enumerate(zip(encoded.is_valid().to_pylist(), files, strict=True), rows.start):
        if not has_bytes and not file:
            raise DataError(f"{rows.where}: {image} must hold an image in each row, got none in row {row}.")
        paths.append(f"{title}/{rows.split}/{row}" if has_bytes or not file else file)
    lengths = pyarrow.compute.binary_length(encoded).to_pylist()  # from the offsets: no image is read
    # The same on every node, unlike the fingerprint of `datasets`, in which the folder's name and its files' times are
    digest = hashlib.sha256(repr((classes, [Path(path).name for path in paths], lengths)).encode())
    digest.update(labels.numpy().tobytes())
    for index in range(0, len(paths), -(-len(paths) // COMPARED)):
        digest.update(images.read(index))
    name = f"{title}-{digest.hexdigest()[:8]}"
    return FileSet(
        tuple(paths), labels, classes, MEAN, STD, name, origin=f"column {image} of {rows.where}",
        margin=config.augment in ("imagenet", "trivial"), contents=images,
    )
