"""Hugging Face data sets: rows of images or of texts, as those of files are. The package `datasets` maps the rows into
memory (Arrow), so that each is found by its number without reading others."""

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
from ..file_samples import FileSamples, read_file
from .imagefolder import MEAN, STD
from .texts import Texts, TextSet, checked, texts_of

SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves of several splits, and of one
EVALUATED = {"dev": ("validation", "valid", "val", "dev"), "test": ("test",)}  # eval_split -> usual names of splits
COMPARED = 100  # images whose bytes are part of the digest; of all others only the lengths are


def load(config: Config) -> tuple[FileSamples, FileSamples]:
    """The images of the splits that the settings name, in the order of their rows. Raises UserError."""
    train, test = open_rows(config, _is_image, what="images")
    return _file_set(train, train.classes, config), _file_set(test, train.classes, config)


def load_texts(config: Config) -> Texts:
    """The texts of the splits that the settings name. Raises UserError."""
    train, test = open_rows(config, _is_text, what="texts", usual="text")

    def read(rows: Rows) -> TextSet:
        pairs = zip(rows.labels, rows.cells().to_pylist(), strict=True)
        numbered = ((row, label or "", text or "") for row, (label, text) in enumerate(pairs, rows.start))
        return checked(numbered, Path(config.dataset) / rows.split, train.classes, unit="row")

    return texts_of(read(train), read(test), train.classes, _title(config), config)


def _title(config: Config) -> str:
    return Path(config.dataset.removeprefix("hf:")).name


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")


def open_splits(config: Config) -> Mapping[str, Any]:
    """Split -> `datasets.Dataset`, from a folder, the cache of `datasets`, or, with hf_download, the hub."""
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            f"dataset must be another than {config.dataset} without the package datasets, which is not installed: "
            "pip install 'rankup[hf]', in a checkout pip install -e '.[hf]'"
        )
    # It would report to the hub what is used here. Read when the packages are imported
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    import datasets
    from huggingface_hub import constants

    name = config.dataset.removeprefix("hf:")
    folder = Path(name).expanduser()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    try:  # of several processes one downloads: `datasets` locks its cache
        if folder.is_dir() or not config.hf_download:  # as HF_HUB_OFFLINE=1 would have it
            datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        if any((folder / file).is_file() for file in SAVED):
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(str(folder.absolute()) if folder.is_dir() else name, config.hf_config)
    except Exception as error:  # of many types: no data files, damaged ones, no such configuration, no room, no network
        if folder.is_dir():
            raise UserError(f"{folder}: can't be read as a Hugging Face data set ({one_line(error)}).") from error
        if config.hf_download:
            raise UserError(f"{name} cannot be downloaded from the Hugging Face hub ({one_line(error)}).") from error
        raise UserError(
            f"dataset must be hf: and a folder, or a data set's name, got {config.dataset}, which is no folder and "
            f"can't be read from the cache ({one_line(error)}). Nothing is downloaded unasked: to fetch it from the "
            "Hugging Face hub, once, set --hf-download."
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
    return found if isinstance(found, Mapping) else {"train": found}


# Which rows, and their columns -------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Rows of one split, from number `start` on."""

    table: Any  # a `datasets.Dataset`
    split: str
    start: int
    where: str  # the data set and the split, for messages
    input: str = ""  # input, label: their columns
    label: str = ""
    labels: Sequence[str | None] = ()  # of each row as a text, None where there is none
    classes: tuple[str, ...] = ()  # those that the column declares, else the values that occur, sorted

    def cells(self) -> Any:
        """The values of the column `input`, a pyarrow.ChunkedArray."""
        return self.table.data.column(self.input)

    def use(self, column: str, label: str) -> None:
        """Read the labels."""
        self.input, self.label = column, label
        values = self.table.data.column(label).to_pylist()
        if names := getattr(self.table.features[label], "names", None):  # -1 stands for a label that was not published
            known = range(len(names))
            self.labels = [names[value] if value in known else None for value in values]
            self.classes = tuple(names)
        else:
            self.labels = [None if value is None else str(value) for value in values]
            self.classes = tuple(map(str, sorted({value for value in values if value is not None})))


def open_rows(config: Config, fits: Callable[[Any], bool], *, what: str, usual: str = "") -> tuple[Rows, Rows]:
    """The rows to train and to evaluate on, with their labels. `fits`: whether a column's feature holds `what`;
    `usual`: the column that is taken if no other is named. Raises UserError."""
    splits = open_splits(config)
    usual_splits = [*EVALUATED[config.eval_split], *(name for names in EVALUATED.values() for name in names)]
    evaluated = config.hf_eval_split or next((name for name in usual_splits if name in splits), None)
    if evaluated is None:
        raise UserError(
            f"{config.dataset}: must have a split to evaluate on, got only {', '.join(splits)}. Name one by "
            "--hf-eval-split, or take parts of one: --hf-train-split train[:90%] --hf-eval-split train[90%:]"
        )
    train = _part(splits, config.hf_train_split, config.dataset, "hf_train_split")
    test = _part(splits, evaluated, config.dataset, "hf_eval_split")
    features = train.table.features

    def column(setting: str, wanted: str | None, fitting: list[str], usual: list[str], what: str) -> str:
        if wanted is None and len(usual) == 1:
            return usual[0]
        if wanted in fitting:
            return str(wanted)
        raise UserError(
            f"{train.where}: {flag(setting)} must name a column of {what} among {', '.join(features)}, got "
            f"{wanted or ', '.join(usual) or 'none'}."
        )

    declared = [name for name in features if type(features[name]).__name__ == "ClassLabel"]
    single = [name for name in features if type(features[name]).__name__ in ("ClassLabel", "Value")]  # and no list
    labels = declared if len(declared) == 1 else [name for name in single if name in ("label", "labels")]
    label = column("label_column", config.label_column, single, labels, "labels")
    fitting = [name for name in features if fits(features[name]) and name != label]
    given = column("input_column", config.input_column, fitting, [usual] if usual in fitting else fitting, what)
    for rows in (train, test):
        if missing := {given, label} - {*rows.table.features}:
            raise UserError(f"{rows.where}: must have the columns of the training rows, got no {missing.pop()}.")
        rows.use(given, label)
    if len(train.classes) < 2:
        raise UserError(f"{train.where}: must have at least two labels to tell apart, got {len(train.classes)}.")
    return train, test


def _part(splits: Mapping[str, Any], wanted: str, name: str, setting: str) -> Rows:
    """The rows of a split, or of a part of one such as train[:90%]."""
    from datasets import ReadInstruction

    split, rows = wanted.partition("[")[0], range(0)
    with suppress(ValueError, AssertionError, LookupError):
        (part,) = ReadInstruction.from_spec(wanted).to_absolute({split: len(splits[split])})
        rows = range(len(splits[split]))[part.from_ : part.to]
    if not rows:
        raise UserError(
            f"{name}: {flag(setting)} must be one of its splits ({', '.join(splits)}) or a part of one with rows, such "
            f"as {next(iter(splits))}[:90%], got {wanted}."
        )
    return Rows(splits[split].select(rows), split, rows.start, f"{name}, split {split}")


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def _is_image(feature: Any) -> bool:
    # Parquet files that were not written by `datasets` have the bytes alone, or a struct of bytes and path
    inner = feature.get("bytes") if isinstance(feature, dict) else feature
    return type(inner).__name__ == "Image" or getattr(inner, "dtype", "") in ("binary", "large_binary")


# Images ------------------------------------------------------------------------------------------------------------


def _file_set(rows: Rows, classes: tuple[str, ...], config: Config) -> FileSamples:
    """Raises UserError, naming the first row that has no image or no label."""
    place = {name: number for number, name in enumerate(classes)}
    for row, label in enumerate(rows.labels, rows.start):
        if label not in place:
            got = "none" if label is None else f"{label}, which the training rows lack,"
            raise UserError(f"{rows.where}: {rows.label} must hold a label in each row, got {got} in row {row}.")
    labels = torch.tensor([place[str(label)] for label in rows.labels], dtype=torch.int64)
    title = _title(config)
    paths, lengths = _listed(rows, title)
    cells = rows.cells()

    def read(number: int) -> bytearray:
        cell = cells[number].as_py()
        content = cell["bytes"] if isinstance(cell, dict) else cell
        return read_file(cell["path"]) if content is None else bytearray(content)

    # The same on every node, unlike the fingerprint of `datasets`, in which the folder's name and its files' times are
    digest = hashlib.sha256(repr((classes, [Path(path).name for path in paths], lengths)).encode())
    digest.update(labels.numpy().tobytes())
    for index in range(0, len(paths), -(-len(paths) // COMPARED)):
        digest.update(read(index))
    return FileSamples(
        tuple(paths), labels, classes, MEAN, STD, f"{title}-{digest.hexdigest()[:8]}",
        origin=f"column {rows.input} of {rows.where}", margin=isinstance(config.augment, str), contents=read,
    )


def _listed(rows: Rows, title: str) -> tuple[list[str], list[int | None]]:
    """The path of each image, or a name for one whose bytes are in its row; and their lengths, without reading any."""
    import pyarrow
    import pyarrow.compute

    encoded = rows.cells()
    files: list[str | None] = [None] * len(encoded)
    if pyarrow.types.is_struct(encoded.type):
        files = pyarrow.compute.struct_field(encoded, "path").to_pylist()
        encoded = pyarrow.compute.struct_field(encoded, "bytes")
    lengths = pyarrow.compute.binary_length(encoded).to_pylist()
    paths = []
    for row, (length, file) in enumerate(zip(lengths, files, strict=True), rows.start):
        if length is None and not file:
            raise UserError(f"{rows.where}: {rows.input} must hold an image in each row, got none in row {row}.")
        paths.append(file if length is None and file else f"{title}/{rows.split}/{row}")
    return paths, lengths
