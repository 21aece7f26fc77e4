"""Hugging Face data sets give the same images and texts as files, and missing parts are named."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rankup.errors import UserError
from tests.rigs import hub
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from tests.rigs.photographs import write_photographs
from train.config import Config, changed_settings
from train.data.file_samples import FileSamples
from train.data.sources import huggingface, load
from train.data.sources.texts import SAMPLE, load_texts
from train.workloads.text import build

pytestmark = pytest.mark.usefixtures("cache")
CLASSES = ("class0", "class1")


def images_of(folder: Path) -> dict[str, list[Any]]:
    """Return the files of a folder of class folders as rows, in the order of imagefolder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    classes = sorted({path.parent.name for path in files})
    return {
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in files],
        "label": [classes.index(path.parent.name) for path in files],
    }


def image_set(splits: Mapping[str, Mapping[str, Sequence[Any]]], classes: Sequence[str]) -> Any:
    """Return a DatasetDict with a column of images and a column of class labels."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

    features = Features({"image": Image(), "label": ClassLabel(names=list(classes))})
    return DatasetDict({name: Dataset.from_dict(dict(rows), features=features) for name, rows in splits.items()})


def save(splits: Any, folder: Path) -> Path:
    """Write the data set with `save_to_disk`."""
    splits.save_to_disk(folder)
    return folder


def save_parquet(splits: Any, folder: Path) -> Path:
    """Write the data set as on the hub, as Parquet files named by their splits."""
    (folder / "data").mkdir(parents=True)
    for name, table in splits.items():
        table.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    splits = {"train": images_of(folder / "train"), "validation": images_of(folder / "val")}
    return save(image_set(splits, CLASSES), tmp_path_factory.mktemp("hf") / "saved")


def load_hf(folder: Path, **settings: Any) -> tuple[FileSamples, FileSamples]:
    train, test = load(Config(dataset=f"hf:{folder}", **{"image_size": 56, **settings}))
    assert isinstance(train, FileSamples)
    assert isinstance(test, FileSamples)
    return train, test


def pixels(found: FileSamples, **more: Any) -> torch.Tensor:
    return replace(found, **more).batch(torch.arange(len(found)), 1)[0]


def table(images: list[Any], labels: list[Any], **more: Any) -> Any:
    """Return a DatasetDict with the same rows in both splits."""
    return image_set({"train": {"image": images, "label": labels}, "test": {"image": images, "label": labels}},
                             more.get("classes", CLASSES))


def encoded(mode: str = "RGB", *, kind: str = "png", colour: int = 128) -> dict[str, Any]:
    data = io.BytesIO()
    Image.new("RGB", (40, 30), (colour, 90, 20)).convert(mode).save(data, kind)
    return {"bytes": data.getvalue(), "path": None}


# The same images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["saved", "parquet", "folder"])
def test_rows_have_the_images_of_a_folder(folder: Path, saved: Path, tmp_path: Path, form: str) -> None:
    from datasets import load_from_disk

    where = saved if form == "saved" else folder
    if form == "parquet":
        where = save_parquet(load_from_disk(saved), tmp_path / "parquet")
    for here, there in zip(
        load_hf(where, augment="trivial"),
        load(Config(dataset="imagefolder", data_dir=str(folder), image_size=56, augment="trivial")), strict=True,
    ):
        assert isinstance(there, FileSamples)
        assert (here.classes, here.labels.tolist()) == (there.classes, there.labels.tolist())
        assert torch.equal(pixels(here, augment="trivial"), pixels(there, augment="trivial"))


def test_training_on_rows_gives_the_weights_of_the_same_folder(
    forks: Forks, folder: Path, saved: Path, tmp_path: Path, cache: Path
) -> None:
    """Two ranks have workers, which are forked from processes that have already mapped the rows."""
    sources = {"files": ("imagefolder", "--data-dir", folder), "rows": (f"hf:{saved}", "--num-workers", "2")}
    for name, words in sources.items():
        forks.ends("train", "--image-size", "32", "--batch-size", "4", "--epochs", "2", "--augment", "imagenet",
                   "--run-dir", tmp_path, "--tensorboard=false", "--name", name, "--dataset", *words, world_size=2,
                   env={"HF_HOME": str(cache)})
    assert result(tmp_path / "rows")["digest"] == result(tmp_path / "files")["digest"]


def test_name_of_a_data_set_depends_only_on_its_rows(saved: Path, tmp_path: Path) -> None:
    from datasets import load_from_disk

    splits = load_from_disk(saved)
    name = load_hf(saved)[0].name
    assert name.startswith("saved-")
    assert load_hf(save_parquet(splits, tmp_path / "saved"))[0].name == name
    splits["train"] = splits["train"].select(range(11, -1, -1))
    assert load_hf(save(splits, tmp_path / "turned" / "saved"))[0].name != name


def test_tar_files_of_webdataset_are_rows(folder: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        with tarfile.open(tmp_path / f"{part}-000000.tar", "w") as archive:
            for number, path in enumerate(sorted((folder / part).rglob("*.jpg"))):
                (tmp_path / "cls").write_text(path.parent.name[-1])
                archive.add(path, f"{number:06}.jpg")
                archive.add(tmp_path / "cls", f"{number:06}.cls")
    (tmp_path / "cls").unlink()
    here, there = load_hf(tmp_path, input_column="jpg", label_column="cls")[0], load_hf(folder)[0]
    assert (here.classes, here.labels.tolist()) == (("0", "1"), there.labels.tolist())
    assert torch.equal(pixels(here), pixels(there))


# Splits, columns and mistakes ------------------------------------------------------------------------------


def test_settings_choose_parts_of_splits_and_columns(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, DatasetDict, Features
    from datasets import Image as ImageColumn

    rows = {
        "photo": [encoded(colour=20 * number) for number in range(10)],
        "thumb": [encoded(colour=20 * number, mode="L") for number in range(10)],
        "kind": [0, 1] * 5, "rating": [5, 1, 10, 5, 1, 5, 1, 10, 10, 5],
        "place": ["x", "y"] * 5,
    }
    features = Features({"photo": ImageColumn(), "thumb": ImageColumn(), "kind": ClassLabel(names=["b", "a"])})
    more = Dataset.from_dict({"rating": rows["rating"], "place": rows["place"]}).features
    one = Dataset.from_dict(rows, features=Features({**features, **more}))
    where = save(DatasetDict({"train": one}), tmp_path / "saved")
    parts = {"input_column": "photo", "label_column": "kind", "hf_train_split": "train[:80%]",
             "hf_eval_split": "train[80%:]"}
    train, test = load_hf(where, **parts)
    assert (train.classes, train.labels.tolist(), test.labels.tolist()) == (("b", "a"), [0, 1] * 4, [0, 1])
    assert test.paths == ("saved/train/8", "saved/train/9")
    assert test.contents is not None
    assert [bytes(test.contents(number)) for number in (0, 1)] == [photo["bytes"] for photo in rows["photo"][8:]]
    assert load_hf(where, **parts | {"hf_train_split": "train[8:]"})[0].name == test.name
    for column, classes in (("rating", ("1", "5", "10")), ("place", ("x", "y"))):  # sorted as numbers
        assert load_hf(where, **parts | {"label_column": column})[0].classes == classes
    one.save_to_disk(tmp_path / "single")
    assert load_hf(tmp_path / "single", **parts)[0].labels.tolist() == [0, 1] * 4


@pytest.mark.parametrize(("settings", "message"), [
    ({"label_column": "class"}, r"--label-column must name a column of labels among image, label, got class\."),
    ({"input_column": "label"}, r"--input-column must name a column of images among image, label, got label\."),
    ({"hf_train_split": "all"}, r"--hf-train-split must be one of its splits \(train, validation\) .*, got all\."),
    ({"hf_eval_split": "train[12:]"}, r"--hf-eval-split must .* such as train\[:90%\], got train\[12:\]"),
    ({"hf_train_split": "train[:2]+validation"}, r"--hf-train-split must be .*, got train\[:2\]\+validation"),
])
def test_wrong_settings_of_a_data_set_are_named(saved: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_hf(saved, **settings)


@pytest.mark.parametrize(("images", "labels", "message"), [
    ([encoded(), None], [0, 1], r"saved/train: 1 of 2 rows are bad \(row 1: no image\)"),
    ([encoded()] * 2, [0, None], r"saved/train: 1 of 2 rows are bad \(row 1: no label\)"),
    ([encoded()] * 2, [0, -1], r"saved/train: 1 of 2 rows are bad \(row 1: no label\)"),
    ([encoded(), {"bytes": b"no image", "path": None}], [0, 1], "saved/train/1: is no image that can be decoded"),
])
def test_rows_without_image_or_label_are_named(tmp_path: Path, images: Any, labels: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pixels(load_hf(save(table(images, labels), tmp_path / "saved"))[0])


def test_evaluation_label_that_the_training_lacks_is_named(tmp_path: Path) -> None:
    from datasets import DatasetDict, load_from_disk

    rows = table([encoded(), encoded()], [0, 1])
    names = save(table([encoded(), encoded()], [0, 1], classes=("class0", "other")), tmp_path / "names")
    mixed = DatasetDict({"train": rows["train"], "test": load_from_disk(names)["test"]})
    with pytest.raises(UserError, match=r"mixed/test: 1 of 2 rows are bad \(row 1: unknown label other\)"):
        load_hf(save(mixed, tmp_path / "mixed"))
    mixed["test"] = rows["test"].remove_columns("label")
    with pytest.raises(UserError, match="split test: --label-column must name a column of labels among image, got"):
        load_hf(save(mixed, tmp_path / "without"))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./rows", "someone/rows"])
def test_unknown_data_set_gives_one_line_with_the_way_out(name: str) -> None:
    message = rf"^{name} can't be read as a Hugging Face data set \(.*\)\. It is no folder .* download it, set --hf-do"
    with pytest.raises(UserError, match=message) as raised:
        load(Config(dataset=f"hf:{name}"))
    assert "\n" not in str(raised.value)


def test_missing_package_datasets_gives_one_line_with_the_way_out(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"the package datasets must be installed.*pip install 'rankup\[hf\]'"):
        load_hf(saved)


def test_moved_data_set_is_no_change_of_settings(saved: Path) -> None:
    here, there = (Config(dataset=f"hf:{place}/rows") for place in ("/here", "/there"))
    assert changed_settings(here.model_dump(), there) == []
    assert changed_settings(here.model_dump(), Config(dataset="digits")) == ["dataset: hf:/here/rows -> digits"]


def test_folder_without_data_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} can't be read as a Hugging Face data set"):
        load_hf(tmp_path)
    where = save(table([encoded()] * 2, [0, 1]), tmp_path / "saved")
    (file,) = where.glob("train/*.arrow")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(UserError, match="can't be read as a Hugging Face data set"):
        load_hf(where)


# The same texts -------------------------------------------------------------------------------------------------


def sample(part: str) -> dict[str, list[Any]]:
    """Return the shipped texts as columns."""
    lines = (SAMPLE / f"{part}.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition("\t") for line in lines if line.strip()]
    return {"text": [pair[2] for pair in pairs], "label": [pair[0] for pair in pairs]}


def save_texts(folder: Path, **splits: dict[str, list[Any]]) -> Path:
    from datasets import Dataset, DatasetDict

    DatasetDict({name: Dataset.from_dict(rows) for name, rows in splits.items()}).save_to_disk(folder)
    return folder


def texts_from(folder: Path, **settings: Any) -> Any:
    return huggingface.load_texts(Config(workload="text", dataset=f"hf:{folder}", **settings))


@pytest.mark.parametrize("eval_split", ["dev", "test"])
def test_rows_have_the_texts_of_files(tmp_path: Path, eval_split: str) -> None:
    where = save_texts(tmp_path / "texts", train=sample("train"), validation=sample("dev"), test=sample("test"))
    rows, files = texts_from(where, eval_split=eval_split), load_texts(Config(workload="text", eval_split=eval_split))
    for here, there in zip(rows[:2], files[:2], strict=True):
        assert (here.texts, here.labels) == (there.texts, there.labels)
    assert rows[2] == files[2]
    settings = {"workload": "text", "eval_split": eval_split}
    assert build(Config(dataset=f"hf:{where}", **settings)).data_name == build(Config(**settings)).data_name


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_folder_of_csv_or_json_files_is_read_by_column_names(tmp_path: Path, kind: str) -> None:
    for name in ("train", "test"):
        lines = [f'{{"id": "{n}", "body": "text {n} of it", "stars": {1 + n % 3}}}' for n in range(6)]
        if kind == "csv":
            lines = ["id,body,stars", *(f"x{n},text {n} of it,{1 + n % 3}" for n in range(6))]
        (tmp_path / f"{name}.{kind}").write_text("\n".join(lines) + "\n")
    train, _, classes = texts_from(tmp_path, input_column="body", label_column="stars")
    assert train.texts[0] == "text 0 of it"
    assert (classes, train.labels) == (("1", "2", "3"), ("1", "2", "3", "1", "2", "3"))
    for named, message in (("stars", "--input-column must name a column of texts among id, body, stars, got stars"),
                           ("body", "--label-column must name a column of labels among id, body, stars, got label")):
        with pytest.raises(UserError, match=message):
            texts_from(tmp_path, input_column=named)


def test_rows_without_text_or_label_are_counted_and_named(tmp_path: Path) -> None:
    rows = {"text": ["a b", None, "c", " ", "e", "f"], "label": ["x", "y", None, "x", "y", "x"]}
    where = save_texts(tmp_path / "texts", train=rows, test={"text": ["a", "b"], "label": ["x", "y"]})
    named = r"3 of 6 rows are bad \(row 1: no text; row 2: no label; row 3: no text\)"
    with pytest.raises(UserError, match=named):
        texts_from(where)
    several = {"text": ["a", "b"], "label": [["x"], ["x", "y"]]}
    with pytest.raises(UserError, match=r"--label-column must name a column of labels among text, label, got label\."):
        texts_from(save_texts(tmp_path / "several", train=several, test=several))


NAME = "someone/rows"
TOKEN = "hf_this_is_the_token"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[hub.Hub]:
    write_photographs(tmp_path / "photographs", 12, width=60, height=50)
    rows = images_of(tmp_path / "photographs")
    other = {name: values[4:8] for name, values in rows.items()}  # an equal file would be fetched only once
    splits = image_set({"train": rows, "validation": other}, ("class0", "class1"))
    with hub.serve(NAME, save_parquet(splits, tmp_path / "rows")) as found:
        yield found


def test_two_ranks_download_a_data_set_once_if_asked(forks: Forks, served: hub.Hub, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": served.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN,
           "RANKUP_CACHE": str(tmp_path / "cache")}
    words = ("train", "--image-size", "32", "--batch-size", "4", "--max-steps", "3", "--tensorboard=false",
             "--run-dir", str(tmp_path / "runs"))
    here = forks.run(*words, "--name", "here", "--dataset", f"hf:{served.folder}", world_size=2, env=env)
    assert here[0] == [0, 0], here[1]
    named = (*words, "--name", "named", "--dataset", f"hf:{NAME}")
    unasked = forks.run(*named, env=env)
    assert unasked[0] == [2], unasked[1]
    assert "To download it, set --hf-download" in unasked[1]
    assert served.requests == []
    asked = forks.run(*named, "--hf-download", world_size=2, env=env)
    assert asked[0] == [0, 0], asked[1]
    assert [served.count(f"data/{split}-00000-of-00001.parquet") for split in ("train", "validation")] == [1, 1]
    assert served.authorizations == {f"Bearer {TOKEN}"}
    assert result(tmp_path / "runs" / "named")["digest"] == result(tmp_path / "runs" / "here")["digest"]
    served.requests.clear()
    again = forks.run(*named, "--fresh", env=env)
    assert again[0] == [0], again[1]
    assert served.requests == []
    refused = forks.run(*words, "--dataset", "hf:someone/else", "--hf-download", env=env)
    assert refused[0] == [2], refused[1]
    assert "someone/else can't be read as a Hugging Face data set (" in refused[1]
    outputs = [here[1], unasked[1], asked[1], again[1], refused[1]]
    assert not any(TOKEN in output for output in outputs)
