"""Images in Parquet files: each row by its number, groups of rows unpacked once, what can't be used is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rankup.errors import DataError
from tests.rigs.shards import load_shards, png, samples_of, write_parquet, write_table
from train.data.sources.shards import parquet, pieces, reader


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """5 images in two files to train on, as Hugging Face names them, 1 to test on."""
    rows = [({"bytes": png(number), "path": None}, number % 2) for number in range(5)]
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", rows[:3])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", rows[3:])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", rows[:1])
    return tmp_path / "data"


@pytest.mark.parametrize("address", ["{}", "local://{}"])
def test_rows_are_samples_in_their_order(place: Path, address: str) -> None:
    train, test = load_shards(address.format(place))
    assert train.labels.tolist() == [0, 1, 0, 1, 0]
    for _ in range(2):
        assert [bytes(train.contents.read(number)) for number in (4, 0, 2, 1, 3)] == [
            png(shade) for shade in (4, 0, 2, 1, 3)
        ]
    assert bytes(test.contents.read(0)) == png(0)
    assert train.paths[3].endswith("train-00001-of-00002.parquet:train-00001-of-00002-00000000")
    images, labels = samples_of(address.format(place)).batch(torch.arange(5), 0)
    assert (images[:, 0, 0, 0].tolist(), labels.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 0, 1, 0])


def test_group_of_rows_is_unpacked_once_by_all_processes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = []
    usual = parquet.unpack

    def record(file: object, name: str, *, group: int, image_column: str) -> bytes:
        groups.append((name[-21:], group))
        return usual(file, name, group=group, image_column=image_column)

    monkeypatch.setattr(reader.parquet, "unpack", record)
    for _ in range(2):
        train, _ = load_shards(place)
        for number in (4, 0, 2, 1, 3):
            train.contents.read(number)
    assert sorted(groups) == [("00000-of-00002.parquet"[-21:], 0), ("00000-of-00002.parquet"[-21:], 1),
                              ("00001-of-00002.parquet"[-21:], 0)]


def test_group_that_another_process_has_unpacked_meanwhile_is_taken(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, waited = pieces.locked, []

    @contextmanager
    def late(path: Path) -> Iterator[None]:
        if not waited:
            waited.append(path)
            load_shards(place)[0].contents.read(1)
            monkeypatch.setattr(reader.parquet, "unpack", None)
        with usual(path):
            yield

    train, _ = load_shards(place)
    monkeypatch.setattr(pieces, "locked", late)
    assert bytes(train.contents.read(0)) == png(0)
    assert waited


@pytest.mark.parametrize("left", [0, 7, 20, 40, -1])
def test_rows_of_which_half_is_kept_are_unpacked_again(place: Path, own_cache: Path, left: int) -> None:
    """As after a power cut: what is kept is not synced."""
    train, _ = load_shards(place)
    train.contents.read(0)
    (path,) = (own_cache / "shards").glob("*.piece")
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    assert [bytes(train.contents.read(number)) for number in (1, 0)] == [png(1), png(0)]
    assert path.read_bytes() == whole


def test_rows_are_there_where_the_cache_has_no_room(place: Path) -> None:
    train, _ = load_shards(place, cache_max_gb=1e-9)
    assert [bytes(train.contents.read(number)) for number in range(5)] == [png(shade) for shade in range(5)]


def test_columns_have_the_names_of_the_settings(place: Path) -> None:
    for name in ("train", "test"):
        write_parquet(place / "own" / f"{name}.parquet", [(png(7), 0), (png(8), 1)], image="img", label="fine_label")
    train, _ = load_shards(place / "own", input_column="img", label_column="fine_label")
    assert bytes(train.contents.read(1)) == png(8)
    with pytest.raises(DataError, match=r"train\.parquet: must have a column image, has img, fine_label\. Set --input"):
        load_shards(place / "own")


@pytest.mark.parametrize("more", [{}, {"cache_images": True}])
def test_what_is_kept_of_one_column_is_not_taken_for_another(tmp_path: Path, more: dict[str, bool]) -> None:
    for part in ("train", "test"):
        rows = {"photo": [png(1), png(2)], "thumb": [png(101), png(102)], "label": [0, 1]}
        write_table(tmp_path / "data" / f"{part}.parquet", rows)
    for column, shades in (("photo", [1, 2]), ("thumb", [101, 102])):
        images, _ = samples_of(tmp_path / "data", input_column=column, **more).batch(torch.arange(2), None)
        assert images[:, 0, 0, 0].tolist() == shades


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(png(1), None)], "the label of row 0: must be the number of a class, 0 to 99999, got None"),
        ([(png(1), "cat")], "the label of row 0: must be the number of a class, 0 to 99999, got 'cat'"),
        ([(png(1), 0), (png(1), -1)], "the label of row 1: must be the number of a class"),
        ([], "holds no rows"),
    ],
)
def test_label_that_cannot_be_used_is_named(place: Path, rows: list[tuple[object, object]], message: str) -> None:
    path = place / "train-00001-of-00002.parquet"
    write_parquet(path, rows)
    with pytest.raises(DataError) as caught:
        load_shards(place)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_row_without_an_image_is_named(place: Path) -> None:
    path = place / "train-00001-of-00002.parquet"
    write_parquet(path, [({"bytes": png(1), "path": "a.png"}, 0), ({"bytes": None, "path": "b.png"}, 0)])
    train, _ = load_shards(place)
    with pytest.raises(DataError, match=f"{path}: group 0, row 1: must hold the bytes of an image, got NoneType"):
        train.contents.read(4)


def test_file_that_is_cut_is_named(place: Path) -> None:
    path = place / "train-00001-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=f"{path}: is no whole Parquet file"):
        load_shards(place)
