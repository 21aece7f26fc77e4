"""Texts of Hugging Face data sets are those of the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankup.errors import UserError
from train.config import Config
from train.data.sources import huggingface
from train.data.sources.texts import SAMPLE, load_texts

pytestmark = pytest.mark.usefixtures("cache")


def sample(part: str) -> dict[str, list[Any]]:
    """The texts that ship, as columns."""
    lines = (SAMPLE / f"{part}.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition("\t") for line in lines if line.strip()]
    return {"text": [pair[2] for pair in pairs], "label": [pair[0] for pair in pairs]}


def save(folder: Path, **splits: dict[str, list[Any]]) -> Path:
    from datasets import Dataset, DatasetDict

    DatasetDict({name: Dataset.from_dict(rows) for name, rows in splits.items()}).save_to_disk(folder)
    return folder


def load_hf(folder: Path, **settings: Any) -> Any:
    return huggingface.load_texts(Config(workload="text", dataset=f"hf:{folder}", **settings))


@pytest.mark.parametrize("eval_split", ["dev", "test"])
def test_rows_are_the_texts_of_files(tmp_path: Path, eval_split: str) -> None:
    where = save(tmp_path / "texts", train=sample("train"), validation=sample("dev"), test=sample("test"))
    rows, files = load_hf(where, eval_split=eval_split), load_texts(Config(workload="text", eval_split=eval_split))
    for here, there in ((rows.train, files.train), (rows.evaluation, files.evaluation)):
        assert (here.texts, here.labels) == (there.texts, there.labels)
    assert (rows.classes, rows.digest, rows.characters) == (files.classes, files.digest, files.characters)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_folder_of_files_and_columns_by_name(tmp_path: Path, kind: str) -> None:
    for name in ("train", "test"):
        lines = [f'{{"id": "{n}", "body": "text {n} of it", "stars": {1 + n % 3}}}' for n in range(6)]
        if kind == "csv":
            lines = ["id,body,stars", *(f"x{n},text {n} of it,{1 + n % 3}" for n in range(6))]
        (tmp_path / f"{name}.{kind}").write_text("\n".join(lines) + "\n")
    found = load_hf(tmp_path, input_column="body", label_column="stars")
    assert found.train.texts[0] == "text 0 of it"
    assert (found.classes, found.train.labels) == (("1", "2", "3"), ("1", "2", "3", "1", "2", "3"))
    with pytest.raises(UserError, match=r"--label-column must name a column of labels among .*, got none\."):
        load_hf(tmp_path)
    with pytest.raises(UserError, match=r"must name a column of texts among .*, got id, body\."):
        load_hf(tmp_path, label_column="stars")


def test_rows_without_text_or_label_are_counted_and_named(tmp_path: Path) -> None:
    rows = {"text": ["a b", None, "c", " ", "e", "f"], "label": ["x", "y", None, "x", "y", "x"]}
    where = save(tmp_path / "texts", train=rows, test={"text": ["a", "b"], "label": ["x", "y"]})
    named = r"3 of 6 rows are bad \(row 1: no text; row 2: no label; row 3: no text\)"
    with pytest.raises(UserError, match=named):
        load_hf(where)
