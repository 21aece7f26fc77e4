"""Hugging Face data sets: which rows to train and to evaluate on, and their columns.

The package `datasets` maps the rows into memory (Arrow), so that each is found by its number without reading others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankup.errors import DataError
from train.config import Config
from train.config.schema import flag
from train.data.sources.fetch import Say, print_to_stderr
from train.data.sources.hf_open import one_line, open_splits

EVALUATED = {"dev": ("validation", "valid", "val", "dev"), "test": ("test",)}  # eval_split -> usual names of splits
LABELS = ("label", "labels")


@dataclass(frozen=True)
class Rows:
    """The rows start..stop of one split: `table` is the whole split, a `datasets.Dataset`."""

    table: Any
    split: str
    start: int
    stop: int
    where: str  # the data set and the split, for messages

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def features(self) -> Mapping[str, Any]:
        """Column -> what `datasets` calls its feature: Image, ClassLabel, Value, ..."""
        found: Mapping[str, Any] = self.table.features
        return found

    def column(self, name: str) -> Any:
        """The values of a column, a pyarrow.ChunkedArray. Raises DataError if they are damaged."""
        import pyarrow

        found = self.table.data.column(name).slice(self.start, len(self))
        try:
            found.validate(full=True)  # pyarrow would follow a damaged offset out of the file, and crash
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{self.where}: column {name} is damaged ({one_line(error)}).") from None
        return found

    def must_have(self, **columns: str) -> None:
        """Raise DataError unless these columns are there, each given by the setting that names it."""
        for setting, name in columns.items():
            if name not in self.features:
                names = ", ".join(self.features)
                raise DataError(f"{self.where}: {flag(setting)} must be one of its columns, {names}, got {name}.")


def open_rows(config: Config, *, say: Say = print_to_stderr) -> tuple[Rows, Rows]:
    """The rows to train and to evaluate on.

    Raises ConfigError without the package `datasets`, DataError for a data set, split or part that is not there.
    """
    splits = open_splits(config, say=say)
    evaluated = config.hf_eval_split
    if evaluated is None:
        wanted = [*EVALUATED[config.eval_split], *(name for names in EVALUATED.values() for name in names)]
        evaluated = next((name for name in wanted if name in splits), None)
    if evaluated is None:
        raise DataError(
            f"{config.dataset}: must have a split to evaluate on, got only {', '.join(splits)}. Name one by "
            "--hf-eval-split, or take parts of one: --hf-train-split train[:90%] --hf-eval-split train[90%:]"
        )
    return (
        _part(splits, config.hf_train_split, config.dataset, "hf_train_split"),
        _part(splits, evaluated, config.dataset, "hf_eval_split"),
    )


def _part(splits: Mapping[str, Any], wanted: str, name: str, setting: str) -> Rows:
    """The rows of a split, or of a part of one such as train[:90%]. Raises DataError."""
    from datasets import ReadInstruction

    sizes = {split: len(table) for split, table in splits.items()}
    split = wanted.partition("[")[0]
    if split not in splits:
        raise DataError(f"{name}: {flag(setting)} must be one of its splits, {', '.join(splits)}, got {wanted}.")
    try:
        found = ReadInstruction.from_spec(wanted).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"{name}: {flag(setting)} must be a split or a part of one, such as {split}[:90%], got {wanted} "
            f"({one_line(error)})."
        ) from None
    start, stop = found[0].from_ or 0, sizes[split] if found[0].to is None else found[0].to
    if len(found) > 1 or not start < stop:
        problem = "which is several" if len(found) > 1 else f"without rows ({split} has {sizes[split]})"
        raise DataError(f"{name}: {flag(setting)} must be one part with rows, got {wanted}, {problem}.")
    return Rows(splits[split], split, start, stop, f"{name}, split {split}")


def _column(rows: Rows, config: Config, setting: str, candidates: Sequence[str], *, what: str) -> str:
    """The column that the setting names, or the only one of `candidates`. Raises DataError, naming those there are."""
    wanted: str | None = getattr(config, setting)
    if wanted is not None:
        rows.must_have(**{setting: wanted})
        return wanted
    if len(candidates) != 1:
        several = f"several, {', '.join(candidates)}" if candidates else f"the columns {', '.join(rows.features)}"
        raise DataError(f"{rows.where}: must have one column of {what}, got {several}. Name it by {flag(setting)}.")
    return candidates[0]


def input_column(rows: Rows, config: Config, fitting: Sequence[str], *, what: str, usual: str = "") -> str:
    """The column of images or texts, one of `fitting`, those that hold `what`; `usual` if it is there and no other is
    named. Raises DataError, naming the columns there are."""
    found = _column(rows, config, "input_column", [usual] if usual in fitting else fitting, what=what)
    if found not in fitting:
        got = f"{found}, of {rows.features[found]}"
        raise DataError(f"{rows.where}: --input-column must be a column of {what}, got {got}.")
    return found


def label_column(rows: Rows, config: Config) -> str:
    """The column of labels. Raises DataError, naming the columns there are."""
    from datasets import ClassLabel

    candidates = [name for name, feature in rows.features.items() if isinstance(feature, ClassLabel)]
    if len(candidates) != 1:
        candidates = [name for name in rows.features if name in LABELS] or candidates
    return _column(rows, config, "label_column", candidates, what="labels")


def read_labels(rows: Rows, name: str) -> tuple[list[str | None], tuple[str, ...]]:
    """The label of each row as a text, None where there is none, and the classes: those that the column declares, else
    the values that occur, sorted. Raises DataError for a column of anything but texts, integers and class labels."""
    from datasets import ClassLabel, Value

    feature = rows.features[name]
    values = rows.column(name).to_pylist()
    if isinstance(feature, ClassLabel):
        names = tuple(feature.names)
        for row, value in enumerate(values, rows.start):
            if value is not None and not -1 <= value < len(names):
                raise DataError(f"{rows.where}: {name} must be 0..{len(names) - 1}, got {value} in row {row}.")
        # -1 stands for a label that was not published
        return [None if value in (None, -1) else names[value] for value in values], names
    if not isinstance(feature, Value) or feature.dtype.startswith(("float", "double", "binary", "date", "time")):
        raise DataError(f"{rows.where}: {name} must be a column of texts, integers or class labels, got {feature}.")
    found = sorted({value for value in values if value is not None})
    return [None if value is None else str(value) for value in values], tuple(map(str, found))


def refuse_single_class(classes: Sequence[str], where: str) -> None:
    """Raise DataError unless there are two or more."""
    if len(classes) < 2:
        raise DataError(f"{where}: must have at least two labels to tell apart, got only {(*classes, 'none')[0]}.")
