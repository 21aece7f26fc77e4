"""Hugging Face data sets: rows of images or of texts, as those of files are.

The package `datasets` maps the rows into memory (Arrow), so that each is found by its number without reading others.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rankup import UserError
from rankup.urls import is_url

from ...config import Config
from ...config.schema import flag
from ..file_samples import FileSamples
from .cache import writable_cache
from .fetch import NotFetched, Say, download_lock, print_to_stderr
from .imagefolder import MEAN, STD
from .texts import Texts, TextSet, keep_good, labelled_texts

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # organisation/name, or the first data sets' single word
SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves of several splits, and of one
EVALUATED = {"dev": ("validation", "valid", "val", "dev"), "test": ("test",)}  # eval_split -> usual names of splits
LABELS = ("label", "labels")
COMPARED = 100  # images whose bytes are part of the digest; of all others only the lengths are


def load(config: Config, say: Say) -> tuple[FileSamples, FileSamples]:
    """The images of the splits that the settings name, in the order of their rows.

    Raises UserError without `datasets`; naming split, column and row, for what is not there and for rows
    without a label.
    """
    halves = open_rows(config, _is_image, what="images", say=say)
    found = [_file_set(rows, halves[0].classes, config) for rows in halves]
    return found[0], found[1]


def load_texts(config: Config) -> Texts:
    """The texts of the splits that the settings name. The classes are those that the column of labels
    declares, else its values, sorted.

    Raises UserError without `datasets`; naming split and column, for what is not there, and for more rows
    without a text or a label than `max_bad_lines` allows.
    """
    halves = open_rows(config, _is_text, what="texts", usual="text", say=print_to_stderr)
    classes = halves[0].classes

    def read(rows: Rows) -> tuple[TextSet, list[str]]:
        pairs = zip(rows.column(rows.input).to_pylist(), rows.labels, strict=True)
        cells = (((text or "").strip(), (label or "").strip()) for text, label in pairs)
        found = ((number, label, text, "") for number, (text, label) in enumerate(cells, rows.start))
        return keep_good(found, Path(config.dataset) / rows.split, classes, config.max_bad_lines, unit="row")

    return labelled_texts(read(halves[0]), read(halves[1]), classes, _title(config), config)


def _title(config: Config) -> str:
    return Path(config.dataset.removeprefix("hf:")).name


def _line(error: BaseException) -> str:
    """What an exception says, on one line of at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")


# Where they are: a folder, the cache of `datasets`, or, if asked for, the hub --------------------------------------


def open_splits(config: Config, *, say: Say) -> Mapping[str, Any]:
    """Split -> `datasets.Dataset`, from the place that `config.dataset` names behind hf:.

    Nothing is downloaded unless hf_download is set, and then once per node. Raises UserError without the package
    `datasets`, UserError for what is neither a folder nor cached, or can't be read, NotFetched if the hub refuses.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            f"dataset must be another than {config.dataset} without the package datasets, which is not installed: "
            "pip install 'rankup[hf]', in a checkout pip install -e '.[hf]'"
        )
    import datasets
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    name = config.dataset.removeprefix("hf:")
    folder = Path(name).expanduser()
    if folder.is_dir():
        where = str(folder.absolute())
        try:
            with _offline():
                saved = any((folder / file).is_file() for file in SAVED)
                found = datasets.load_from_disk(where) if saved else datasets.load_dataset(where, config.hf_config)
        except Exception as error:  # of many types: no data files, damaged ones, no such configuration, no room
            raise UserError(f"{folder}: can't be read as a Hugging Face data set ({_line(error)}).") from error
        return found if isinstance(found, Mapping) else {"train": found}
    # "csv" and the like are no names to `datasets`: they mean all such files below the working directory
    if not HUB_NAME.fullmatch(name) or folder.exists() or name in _PACKAGED_DATASETS_MODULES:
        problem = "which is a file" if folder.exists() else "which is not there"
        got = "an address" if is_url(name) else f"{config.dataset}, {problem}"  # an address may have a password in it
        raise UserError(f"dataset must be hf: and a folder, or a data set's name, got {got}.")
    cached = _cached(name, config)
    if cached is None and config.hf_download:
        title, lock = f"{name} from the Hugging Face hub", writable_cache() / f"hf-{name.replace('/', '--')}"
        with download_lock(lock, title, timeout_s=config.download_timeout_s, say=say):
            if (cached := _cached(name, config)) is None:
                say(f"downloading {title} (once, at most {config.download_timeout_s:g} s)")
                _download(name, title, config)
                cached = _cached(name, config)
    if cached is None:
        asked = f" with configuration {config.hf_config}" if config.hf_config else ""
        raise UserError(
            f"dataset must be hf: and a folder, or a data set's name, got {config.dataset}, which is no folder and not "
            f"cached here{asked}. Nothing is downloaded unasked: to fetch it from the Hugging Face hub, once, set "
            "--hf-download."
        )
    return cached


def _cached(name: str, config: Config) -> Mapping[str, Any] | None:
    """What `load_dataset` has kept of a name, None if nothing. Raises UserError for several configurations, unnamed.

    Not the files that the hub's own cache may have: nothing says whether they are all, or those before a broken end.
    """
    import datasets

    try:
        with _offline():
            found: Mapping[str, Any] = datasets.load_dataset(name, config.hf_config)
        return found
    except ValueError as error:
        if config.hf_download:
            return None
        raise UserError(f"{config.dataset}: what is cached can't be used ({_line(error)}).") from error
    except Exception:  # of many types: to `datasets` it is the hub that can't be reached
        return None


def _download(name: str, title: str, config: Config) -> None:
    """Let `datasets` put a data set into its cache, in a process of its own, which can be ended. Raises NotFetched."""
    # It would report to the hub what is used here. Read when the packages are imported
    env = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    code = "import sys, datasets; datasets.load_dataset(sys.argv[1], sys.argv[2] or None)"
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", code, name, config.hf_config or ""], env=env, check=True, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=config.download_timeout_s,
        )
    except subprocess.SubprocessError as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise NotFetched(f"{title} cannot be downloaded ({lines[-1].strip()}).") from error


@contextmanager
def _offline() -> Iterator[None]:
    """Keep `datasets` from the network, as HF_HUB_OFFLINE=1 would; its bars and warnings stay off the terminal."""
    import datasets
    from huggingface_hub import constants

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


# Which rows, and their columns -------------------------------------------------------------------------------------


@dataclass
class Rows:
    """The rows start..stop of one split: `table` is the whole split, a `datasets.Dataset`.

    input, label: their columns; labels: the label of each row as a text, None where there is none; classes: those that
    the column declares, else the values that occur, sorted.
    """

    table: Any
    split: str
    start: int
    stop: int
    where: str  # the data set and the split, for messages
    input: str = ""
    label: str = ""
    labels: Sequence[str | None] = ()
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start

    def column(self, name: str) -> Any:
        """The values of a column, a pyarrow.ChunkedArray. Raises UserError if they are damaged."""
        import pyarrow

        found = self.table.data.column(name).slice(self.start, len(self))
        try:
            found.validate(full=True)  # pyarrow would follow a damaged offset out of the file, and crash
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{self.where}: column {name} is damaged ({_line(error)}).") from None
        return found

    def chosen(self, setting: str, wanted: str | None, candidates: Sequence[str], *, what: str) -> str:
        """The column that the setting names, or the only one of `candidates`. Raises UserError, naming those there
        are."""
        names = ", ".join(self.table.features)
        if wanted is None:
            if len(candidates) != 1:
                got = f"several, {', '.join(candidates)}" if candidates else f"the columns {names}"
                raise UserError(f"{self.where}: must have one column of {what}, got {got}. Name it by {flag(setting)}.")
            return candidates[0]
        if wanted not in self.table.features:
            raise UserError(f"{self.where}: {flag(setting)} must be one of its columns, {names}, got {wanted}.")
        return wanted


def open_rows(config: Config, fits: Any, *, what: str, usual: str = "", say: Say) -> tuple[Rows, Rows]:
    """The rows to train and to evaluate on, with their labels. `fits`: whether a column's feature holds `what`;
    `usual`: the column that is taken if no other is named.

    Raises UserError without the package `datasets`; naming the columns there are, for a data set, split,
    part or column that is not there, for labels that are none, and for fewer than two classes.
    """
    splits = open_splits(config, say=say)
    evaluated = config.hf_eval_split
    if evaluated is None:
        wanted = [*EVALUATED[config.eval_split], *(name for names in EVALUATED.values() for name in names)]
        evaluated = next((name for name in wanted if name in splits), None)
    if evaluated is None:
        raise UserError(
            f"{config.dataset}: must have a split to evaluate on, got only {', '.join(splits)}. Name one by "
            "--hf-eval-split, or take parts of one: --hf-train-split train[:90%] --hf-eval-split train[90%:]"
        )
    train = _part(splits, config.hf_train_split, config.dataset, "hf_train_split")
    test = _part(splits, evaluated, config.dataset, "hf_eval_split")
    features = train.table.features
    declared = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    usual_labels = [name for name in features if name in LABELS] or declared
    labels = declared if len(declared) == 1 else usual_labels
    train.label = train.chosen("label_column", config.label_column, labels, what="labels")
    fitting = [name for name, feature in features.items() if fits(feature)]
    others = [name for name in fitting if name != train.label] or fitting
    train.input = train.chosen("input_column", config.input_column, [usual] if usual in others else others, what=what)
    if train.input not in fitting:
        got = f"{train.input}, of {features[train.input]}"
        raise UserError(f"{train.where}: --input-column must be a column of {what}, got {got}.")
    test.input = test.chosen("input_column", train.input, (), what=what)
    test.label = test.chosen("label_column", train.label, (), what="labels")
    _read_labels(train)
    if len(train.classes) < 2:
        raise UserError(
            f"{train.where}: must have at least two labels to tell apart, got only {(*train.classes, 'none')[0]}."
        )
    _read_labels(test)
    return train, test


def _part(splits: Mapping[str, Any], wanted: str, name: str, setting: str) -> Rows:
    """The rows of a split, or of a part of one such as train[:90%]. Raises UserError."""
    from datasets import ReadInstruction

    sizes = {split: len(table) for split, table in splits.items()}
    split = wanted.partition("[")[0]
    if split not in splits:
        raise UserError(f"{name}: {flag(setting)} must be one of its splits, {', '.join(splits)}, got {wanted}.")
    try:
        found = ReadInstruction.from_spec(wanted).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"{name}: {flag(setting)} must be a split or a part of one, such as {split}[:90%], got {wanted} "
            f"({_line(error)})."
        ) from None
    start, stop = found[0].from_ or 0, sizes[split] if found[0].to is None else found[0].to
    if len(found) > 1 or not start < stop:
        problem = "which is several" if len(found) > 1 else f"without rows ({split} has {sizes[split]})"
        raise UserError(f"{name}: {flag(setting)} must be one part with rows, got {wanted}, {problem}.")
    return Rows(splits[split], split, start, stop, f"{name}, split {split}")


def _read_labels(rows: Rows) -> None:
    """Raises UserError for a column of anything but texts, integers and class labels."""
    from datasets import ClassLabel, Value

    name, feature = rows.label, rows.table.features[rows.label]
    values = rows.column(name).to_pylist()
    if isinstance(feature, ClassLabel):
        names = tuple(feature.names)
        for row, value in enumerate(values, rows.start):
            if value is not None and not -1 <= value < len(names):
                raise UserError(f"{rows.where}: {name} must be 0..{len(names) - 1}, got {value} in row {row}.")
        # -1 stands for a label that was not published
        rows.labels, rows.classes = [None if value in (None, -1) else names[value] for value in values], names
        return
    if not isinstance(feature, Value) or feature.dtype.startswith(("float", "double", "binary", "date", "time")):
        raise UserError(f"{rows.where}: {name} must be a column of texts, integers or class labels, got {feature}.")
    rows.labels = [None if value is None else str(value) for value in values]
    rows.classes = tuple(map(str, sorted({value for value in values if value is not None})))


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def _is_image(feature: Any) -> bool:
    # Parquet files that were not written by `datasets` have the bytes alone, or a struct of bytes and path
    inner = feature.get("bytes") if isinstance(feature, dict) else feature
    return type(inner).__name__ == "Image" or getattr(inner, "dtype", "") in ("binary", "large_binary")


# Images ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageColumn:
    """The encoded images of some rows. Picklable: workers that are not forked map the rows anew."""

    rows: Rows

    def read(self, number: int) -> bytearray:
        """The bytes of one. Raises UserError for an image that is a file of its own and can't be read."""
        cell = self.rows.table.data.column(self.rows.input)[self.rows.start + number].as_py()
        found = cell["bytes"] if isinstance(cell, dict) else cell
        if found is not None:
            return bytearray(found)
        try:
            return bytearray(Path(cell["path"]).read_bytes())
        except OSError as error:
            raise UserError(f"{cell['path']}: can't be read ({error.strerror}).") from error


def _file_set(rows: Rows, classes: tuple[str, ...], config: Config) -> FileSamples:
    """Raises UserError, naming the first row that has no image or no label."""
    import pyarrow
    import pyarrow.compute

    place = {name: number for number, name in enumerate(classes)}
    for row, label in enumerate(rows.labels, rows.start):
        if label not in place:
            got = "none" if label is None else f"{label}, which the training rows lack,"
            raise UserError(f"{rows.where}: {rows.label} must hold a label in each row, got {got} in row {row}.")
    labels = torch.tensor([place[label] for label in rows.labels if label is not None], dtype=torch.int64)
    encoded, images = rows.column(rows.input), ImageColumn(replace(rows, labels=()))
    files: list[str | None] = [None] * len(rows)
    if pyarrow.types.is_struct(encoded.type):
        files = pyarrow.compute.struct_field(encoded, "path").to_pylist()
        encoded = pyarrow.compute.struct_field(encoded, "bytes")
    title, paths = _title(config), []
    for row, (has_bytes, file) in enumerate(zip(encoded.is_valid().to_pylist(), files, strict=True), rows.start):
        if not has_bytes and not file:
            raise UserError(f"{rows.where}: {rows.input} must hold an image in each row, got none in row {row}.")
        paths.append(f"{title}/{rows.split}/{row}" if has_bytes or not file else file)
    lengths = pyarrow.compute.binary_length(encoded).to_pylist()  # from the offsets: no image is read
    # The same on every node, unlike the fingerprint of `datasets`, in which the folder's name and its files' times are
    digest = hashlib.sha256(repr((classes, [Path(path).name for path in paths], lengths)).encode())
    digest.update(labels.numpy().tobytes())
    for index in range(0, len(paths), -(-len(paths) // COMPARED)):
        digest.update(images.read(index))
    return FileSamples(
        tuple(paths), labels, classes, MEAN, STD, f"{title}-{digest.hexdigest()[:8]}",
        origin=f"column {rows.input} of {rows.where}", margin=config.augment in ("imagenet", "trivial"),
        contents=images,
    )
