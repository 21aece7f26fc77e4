"""Labelled texts of a Hugging Face data set: two of its columns, read whole, as those of files are."""

from collections.abc import Iterator
from pathlib import Path

from train.config import Config
from train.data.sources.hf_rows import Rows, input_column, label_column, open_rows, read_labels, refuse_single_class
from train.data.sources.texts import Row, Texts, TextSet, keep_good, labelled_texts, listed_classes, missing


def load(config: Config) -> Texts:
    """The texts of the splits that the settings name. The classes are those of `labels_file`, else those that the
    column of labels declares, else its values, sorted.

    Raises ConfigError without `datasets`; DataError, naming split and column, for what is not there, and for more rows
    without a text or a label than `max_bad_lines` allows.
    """
    train_rows, test_rows = open_rows(config)
    label = label_column(train_rows, config)
    text = _text_column(train_rows, config, label)
    test_rows.must_have(input_column=text, label_column=label)
    train_labels, found = read_labels(train_rows, label)
    classes = listed_classes(config) or found
    refuse_single_class(classes, train_rows.where)
    test_labels, _ = read_labels(test_rows, label)

    def read(rows: Rows, labels: list[str | None]) -> tuple[TextSet, list[str]]:
        return keep_good(
            _texts(rows, text, labels), Path(config.dataset) / rows.split, classes, config.max_bad_lines, unit="row"
        )

    train, test = read(train_rows, train_labels), read(test_rows, test_labels)
    return labelled_texts(train, test, classes, Path(config.dataset.removeprefix("hf:")).name, config)


def _text_column(rows: Rows, config: Config, label: str) -> str:
    from datasets import Value

    texts = [
        name for name, feature in rows.features.items()
        if isinstance(feature, Value) and feature.dtype in ("string", "large_string") and name != label
    ]
    return input_column(rows, config, texts, what="texts", usual="text")


def _texts(rows: Rows, name: str, labels: list[str | None]) -> Iterator[Row]:
    for index, (text, label) in enumerate(zip(rows.column(name).to_pylist(), labels, strict=True)):
        text, label = (text or "").strip(), (label or "").strip()
        yield rows.start + index, label, text, missing(label, text)
