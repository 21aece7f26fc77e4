"""Hugging Face data sets with rows of images or texts. The package `datasets` maps the rows into memory (Arrow): it
finds a row by its number without reading other rows."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rankup import UserError

from ...config import Config
from ...config.load import flag
from .. import one_line
from ..file_samples import FileSamples, read_file
from .texts import NAMES, Part, checked

SAVED = ("dataset_dict.json", "state.json")  # written by `save_to_disk` for several splits, and for one split
COMPARED = 100  # the digest covers the bytes of about this many images, and only the lengths of the others


def load(config: Config) -> tuple[FileSamples, FileSamples]:
    """Return the images of the splits that the settings name, in the order of their rows. Raises UserError."""
    train, test = open_rows(config, "image", _is_image)
    return _file_set(train, train.classes, config), _file_set(test, train.classes, config)


def load_texts(config: Config) -> tuple[Part, Part, tuple[str, ...]]:
    """Return the texts of the splits that the settings name, and the classes. Raises UserError."""
    train, test = open_rows(config, "text", _is_text)

    def read(rows: Rows) -> Part:
        texts = rows.table.data.column(rows.input).to_pylist()
        return _checked(rows, [(text or "").strip() for text in texts], train.classes, config, of="text")

    return read(train), read(test), train.classes


def _checked(rows: Rows, inputs: Sequence[str], classes: Sequence[str], config: Config, *, of: str) -> Part:
    """Return the rows as a Part. Raises UserError, naming rows without an input, or with a label not in `classes`."""
    pairs = enumerate(zip(rows.labels, inputs, strict=True), rows.start)
    numbered = ((row, label or "", value) for row, (label, value) in pairs)
    return checked(numbered, Path(config.dataset) / rows.split, classes, unit="row", of=of)


def open_splits(config: Config) -> Mapping[str, Any]:
    """Open each split as a `datasets.Dataset`, from a folder, the cache of `datasets`, or, if hf_download, the hub."""
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            f"dataset {config.dataset}: the package datasets must be installed. pip install 'rankup[hf]', or "
            "-e '.[hf]' in a checkout."
        )
    # Do not report usage to the hub. The packages read these variables when they are imported
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    import datasets
    from huggingface_hub import constants

    name = config.dataset.removeprefix("hf:")
    folder = Path(name).expanduser()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    if folder.is_dir() or not config.hf_download:  # the effect of HF_HUB_OFFLINE=1
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:  # only one of several processes downloads, because `datasets` locks its cache
        if any((folder / file).is_file() for file in SAVED):
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(str(folder.absolute()) if folder.is_dir() else name, config.hf_config)
    except Exception as error:  # of many types: no data files, damaged ones, no such configuration, no room, no network
        way_out = "" if folder.is_dir() or config.hf_download else (
            " It is no folder here and can't be read from the cache. To download it, set --hf-download."
        )
        raise UserError(f"{name} can't be read as a Hugging Face data set ({one_line(error)}).{way_out}") from error
    return found if isinstance(found, Mapping) else {"train": found}


# Rows and their columns --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of one split, beginning with row `start`."""

    where: str  # the data set and the split, for messages
    split: str
    start: int
    table: Any  # a `datasets.Dataset`
    input: str  # the column of the images or texts
    labels: Sequence[str | None]  # the label of each row as a text, None if it has none
    classes: tuple[str, ...]  # the classes that the column declares, else the values that occur, sorted


def open_rows(config: Config, usual: str, fits: Callable[[Any], bool]) -> tuple[Rows, Rows]:
    """Return the rows to train on and the rows to evaluate on. `usual`: the column of the inputs if the settings name
    none. `fits`: returns whether a column's feature can hold inputs. Raises UserError."""
    splits = open_splits(config)
    usual_splits = [*NAMES[config.eval_split], *NAMES["dev"], *NAMES["test"]]
    evaluated = config.hf_eval_split or next((name for name in usual_splits if name in splits), None)
    if evaluated is None:
        raise UserError(
            f"{config.dataset}: must have a split to evaluate on, got only {', '.join(splits)}. Name one with "
            "--hf-eval-split, or use parts of one: --hf-train-split train[:90%] --hf-eval-split train[90%:]"
        )
    inputs, label = config.input_column or usual, config.label_column

    def part(setting: str, wanted: str) -> Rows:
        """Return the rows of a split, or of a part of a split such as train[:90%]."""
        from datasets import ReadInstruction

        split, numbers = wanted.partition("[")[0], range(0)
        with suppress(ValueError, AssertionError, LookupError):
            (named,) = ReadInstruction.from_spec(wanted).to_absolute({split: len(splits[split])})
            numbers = range(len(splits[split]))[named.from_ : named.to]
        if not numbers:
            raise UserError(
                f"{config.dataset}: {flag(setting)} must be one of its splits ({', '.join(splits)}) or a part of one "
                f"with rows, such as {next(iter(splits))}[:90%], got {wanted}."
            )
        table, where = splits[split].select(numbers), f"{config.dataset}, split {split}"
        for column, what, fit in ((inputs, "input", fits), (label, "label", _is_label)):
            if column not in table.features or not fit(table.features[column]):
                kind, names = usual if what == "input" else what, ", ".join(table.features)
                raise UserError(f"{where}: --{what}-column must name a column of {kind}s among {names}, got {column}.")
        return Rows(where, split, numbers.start, table, inputs, *_read_labels(table, label))

    train, test = part("hf_train_split", config.hf_train_split), part("hf_eval_split", evaluated)
    if len(train.classes) < 2:
        raise UserError(f"{train.where}: must have at least two labels to tell apart, got {len(train.classes)}.")
    return train, test


def _read_labels(table: Any, column: str) -> tuple[list[str | None], tuple[str, ...]]:
    """Return the label of each row, and the classes."""
    values = table.data.column(column).to_pylist()
    if names := getattr(table.features[column], "names", None):  # a label that was not published is -1
        return [names[value] if value in range(len(names)) else None for value in values], tuple(names)
    found = sorted({value for value in values if value is not None})
    return [None if value is None else str(value) for value in values], tuple(map(str, found))


def _is_label(feature: Any) -> bool:
    return type(feature).__name__ in ("ClassLabel", "Value")  # not a list


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def _is_image(feature: Any) -> bool:
    # Parquet files that `datasets` did not write have only bytes, or a struct of bytes and path
    inner = feature.get("bytes") if isinstance(feature, dict) else feature
    return type(inner).__name__ == "Image" or getattr(inner, "dtype", "") in ("binary", "large_binary")


# Images ------------------------------------------------------------------------------------------------------------


def _file_set(rows: Rows, classes: tuple[str, ...], config: Config) -> FileSamples:
    """Return the images as samples. Raises UserError as `_checked` does."""
    import pyarrow.compute
    from datasets import Image

    # With decode=False each row has the bytes or the path of a file, for every format of the data set
    cells = rows.table.cast_column(rows.input, Image(decode=False)).data.column(rows.input)
    lengths = pyarrow.compute.binary_length(pyarrow.compute.struct_field(cells, "bytes")).to_pylist()
    files = pyarrow.compute.struct_field(cells, "path").to_pylist()
    title = Path(config.dataset.removeprefix("hf:")).name
    numbered = enumerate(zip(lengths, files, strict=True), rows.start)
    paths = [file or "" if length is None else f"{title}/{rows.split}/{row}" for row, (length, file) in numbered]
    number_of = {name: number for number, name in enumerate(classes)}
    found = _checked(rows, paths, classes, config, of="image")
    labels = torch.tensor([number_of[label] for label in found.labels], dtype=torch.int64)

    def read(number: int) -> bytearray:
        cell = cells[number].as_py()
        return read_file(cell["path"]) if cell["bytes"] is None else bytearray(cell["bytes"])

    # This digest is equal on all nodes. The fingerprint of `datasets` depends on the folder's name and on file times
    digest = hashlib.sha256(repr((classes, [Path(path).name for path in paths], lengths)).encode())
    digest.update(labels.numpy().tobytes())
    for index in range(0, len(paths), -(-len(paths) // COMPARED)):
        digest.update(read(index))
    return FileSamples(
        found.texts, labels, classes, f"{title}-{digest.hexdigest()[:8]}", f"column {rows.input} of {rows.where}",
        margin=isinstance(config.augment, str), contents=read,
    )
