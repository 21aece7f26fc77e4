"""The index of shards: made once, found again, and each shard that is missing, cut, damaged or changed is named."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankup.errors import DataError
from tests.rigs.shards import in_child, load_shards, png, write_members, write_shard
from train.data.sources import shards as shards_module

LABELS = {"a": (1, 0), "b": (2, 1), "c": (3, 2)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three shards to train on, one to test on."""
    for number in range(3):
        samples = {f"{number}{key}": (10 * number + shade, label) for key, (shade, label) in LABELS.items()}
        write_shard(tmp_path / "data" / f"train-{number:04}.tar", samples)
    write_shard(tmp_path / "data" / "val-0000.tar", LABELS)
    return tmp_path / "data"


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose headers were read."""
    names: list[str] = []
    usual = shards_module._scan

    def record(files: Any, shard: Any, **more: Any) -> object:
        names.append(shard.name)
        return usual(files, shard, **more)

    monkeypatch.setattr(shards_module, "_scan", record)
    return names


def refusal(place: Path, **settings: object) -> str:
    with pytest.raises(DataError) as caught:
        load_shards(place, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Made once ------------------------------------------------------------------------------------------------------


def test_index_is_made_once_beside_the_shards(place: Path, scanned: list[str]) -> None:
    train, _ = load_shards(place)
    assert sorted(scanned) == ["train-0000.tar", "train-0001.tar", "train-0002.tar", "val-0000.tar"]
    assert (train.labels.tolist(), train.classes) == ([0, 1, 2] * 3, ("0", "1", "2"))
    assert len(list(place.glob("shards-*.index"))) == 2
    again, _ = load_shards(place)
    assert len(scanned) == 4
    assert again.name == train.name
    assert [bytes(again.contents.read(n)) for n in range(9)] == [bytes(train.contents.read(n)) for n in range(9)]
    assert bytes(train.contents.read(4)) == png(12)


def test_index_is_kept_in_the_cache_where_the_folder_cannot_be_written(
    place: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, scanned: list[str]
) -> None:
    usual = shards_module.staged

    def refused(path: Path) -> object:
        if path.parent == place:
            raise PermissionError(13, "Permission denied")
        return usual(path)

    monkeypatch.setattr(shards_module, "staged", refused)
    for _ in range(2):
        load_shards(place)
    assert len(scanned) == 4
    assert not list(place.glob("*.index"))
    assert len(list(own_cache.glob("shards-*.index"))) == 2


# What may be in a file that should be an index: too little, another type of key, values that no row here has
CRAFTED: dict[str, Any] = {
    "key of objects": "|O",  # eight bytes, as the keys here have, would be read as an address
    "key of fields": [("a", "|O")],
    "samples beyond it": 1 << 40,
    "label": -1, "shard": 9, "offset": 1 << 40, "size": 1 << 40,
    "cut": -9,
}


@pytest.mark.parametrize("what", CRAFTED)
def test_damaged_or_crafted_index_is_made_anew(place: Path, what: str) -> None:
    """In a process of its own, which an object made of a file's bytes would crash."""
    for number in range(3):
        samples = {f"{number}-{key * 6}": (number, label) for key, (_, label) in LABELS.items()}
        write_shard(place / f"train-{number:04}.tar", samples)
    train, _ = load_shards(place)
    for path in place.glob("shards-*.index"):
        table = np.load(path)
        descr: list[Any] = list(table.dtype.descr)
        length = len(table)
        if what in table.dtype.names:
            table[what] = CRAFTED[what]
        elif what == "samples beyond it":
            length = CRAFTED[what]
        elif what != "cut":
            descr[-1] = ("key", CRAFTED[what])
        with path.open("wb") as file:
            head = {"descr": descr, "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, head)
            file.write(table.tobytes()[: CRAFTED[what] if what == "cut" else None])

    def use() -> None:
        again, _ = load_shards(place)
        assert (again.name, again.labels.tolist()) == (train.name, train.labels.tolist())
        assert [bytes(again.contents.read(n)) for n in range(9)] == [png(n // 3) for n in range(9)]
        assert str(list(again.paths))

    assert in_child(use) == 0


def test_copied_shards_are_looked_at_once_more_and_are_the_same_data(
    place: Path, tmp_path: Path, scanned: list[str]
) -> None:
    train, _ = load_shards(place)
    shutil.copytree(place, tmp_path / "copy", copy_function=shutil.copyfile)
    for _ in range(2):
        copied, _ = load_shards(tmp_path / "copy")
        assert copied.name == train.name
    assert len(scanned) == 8


def test_patterns_name_the_shards(place: Path) -> None:
    train, test = load_shards(place, train_shards="train-{0000..0001}.tar", eval_shards="train-0002.tar")
    assert (len(train), len(test)) == (6, 3)
    train, _ = load_shards(place, train_shards="train-*")
    assert len(train) == 9
    train, _ = load_shards(place, train_shards="train-{0002,0000}.tar train-0000.tar", eval_shards="val-*")
    assert len(train) == 6  # two shards, one of them named twice


def test_shards_in_folders_are_found(place: Path) -> None:
    for part in ("train", "test"):
        (place / part).mkdir()
    for path in place.glob("train-*.tar"):
        path.rename(place / "train" / path.name.removeprefix("train-"))
    (place / "val-0000.tar").rename(place / "test" / "some.tar")
    train, test = load_shards(place)
    assert (len(train), len(test)) == (9, 3)


# Named ----------------------------------------------------------------------------------------------------------


def test_shard_missing_between_others_is_named(place: Path) -> None:
    (place / "train-0001.tar").unlink()
    assert refusal(place).startswith(f"{place}/train-0001.tar: is missing")


def test_shard_missing_of_a_pattern_is_named(place: Path) -> None:
    message = refusal(place, train_shards="train-{0000..0003}.tar")
    assert message.startswith(f"{place}/train-0003.tar: is missing")


def test_shard_missing_of_a_number_that_the_names_tell_is_named(place: Path) -> None:
    for number in range(3):
        (place / f"train-{number:04}.tar").rename(place / f"train-{number:04}-of-0004.tar")
    assert refusal(place).startswith(f"{place}/train-0003-of-0004.tar: is missing")


def test_shard_gone_since_the_index_was_made_is_named(place: Path) -> None:
    settings = {"train_shards": "train-{0000..0002}.tar"}
    load_shards(place, **settings)
    (place / "train-0002.tar").unlink()
    assert refusal(place, **settings).startswith(f"{place}/train-0002.tar: is missing")


def test_changed_shard_is_read_anew_and_is_other_data(place: Path, scanned: list[str]) -> None:
    before, _ = load_shards(place)
    write_shard(place / "train-0001.tar", {"1a": (7, 2), "1b": (8, 0), "1c": (9, 1)})
    os.utime(place / "train-0001.tar", (1, 1))
    after, _ = load_shards(place)
    assert after.name != before.name  # so no run goes on with it
    assert after.labels.tolist() == [0, 1, 2, 2, 0, 1, 0, 1, 2]
    assert len(scanned) == 7


@pytest.mark.parametrize("left", [100, 512, 600, 1536, 2048, 2100, 3000])
def test_shard_that_is_cut_is_named_wherever_it_ends(place: Path, left: int) -> None:
    path = place / "train-0001.tar"
    path.write_bytes(path.read_bytes()[:left])
    assert re.match(rf"{path}: (is cut off|is damaged|is no tar file)", refusal(place))


def test_broken_header_in_the_middle_is_named(place: Path) -> None:
    path = place / "train-0001.tar"
    with tarfile.open(path) as archive:
        at = archive.getmembers()[2].offset
    data = bytearray(path.read_bytes())
    data[at + 100 : at + 160] = b"x" * 60
    path.write_bytes(data)
    assert refusal(place).startswith(f"{path}: is damaged at byte {at}, where a header should be")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", png(1))], "the sample a has no label"),
        ([("a.cls", b"1")], "holds no images"),
        ([("a.png", png(1)), ("a.jpg", png(1)), ("a.cls", b"1")], "the sample a has two images, a.png and a.jpg"),
        ([("a.png", png(1)), ("a.cls", b"cat")], "a.cls: must be the number of a class, 0 to 99999, got 'cat'"),
        ([("a.png", png(1)), ("a.cls", b"-1")], "a.cls: must be the number of a class, 0 to 99999, got '-1'"),
        ([("a.png", png(1)), ("a.json", b'{"label": 100000}')], "a.json: must be the number of a class"),
        ([("a.png", png(1)), ("a.json", b"{")], "a.json: is no JSON"),
        ([("a.png", png(1)), ("a.json", b'{"caption": "x"}')], "the sample a has no label"),
        ([("a.png", png(1)), ("a.cls", b"1")] * 2, "the sample a has two images"),
        ([("a.png", png(1)), ("a.cls", b"1"), ("b.png", png(2)), ("b.cls", b"0"), ("a.png", png(3)), ("a.cls", b"1")],
         "holds two samples a"),
    ],
)
def test_sample_that_cannot_be_used_is_named(place: Path, members: list[tuple[str, bytes]], message: str) -> None:
    write_members(place / "train-0001.tar", members)
    assert f"{place}/train-0001.tar: {message}" in refusal(place)


def test_members_that_are_no_samples_are_left_alone(place: Path) -> None:
    write_members(place / "train-0001.tar", [
        ("README", b"hm"), ("x/._1a.jpg", b"mac"), ("x/1a.seg.png", png(4)), ("x/1a.json", b'{"label": 2}'),
        ("x/1a.txt", b"a caption"),
    ])
    train, _ = load_shards(place)
    assert len(train) == 7
    assert bytes(train.contents.read(6)) == png(4)
    assert train.labels[6] == 2


def test_sample_in_two_shards_is_named(place: Path) -> None:
    shutil.copy(place / "train-0002.tar", place / "train-0003.tar")
    message = refusal(place)
    assert message.startswith(f"{place}/train-0003.tar: holds the sample 2a, which {place}/train-0002.tar holds too")


def test_label_that_training_does_not_know_is_named(place: Path) -> None:
    write_shard(place / "val-0000.tar", {"x": (1, 3)})
    message = refusal(place)
    assert message.startswith(f"{place}/val-0000.tar: the sample x has the label 3, and the training shards have")


@pytest.mark.parametrize("name", ["train-0001.tar", "train-0001.tar.gz"])
def test_compressed_shard_is_refused_by_name(place: Path, name: str) -> None:
    path = place / "train-0001.tar"
    content = gzip.compress(path.read_bytes())
    path.unlink()
    (place / name).write_bytes(content)
    assert refusal(place).startswith(f"{place}/{name}: is compressed")


def test_folder_without_shards_is_refused_and_a_missing_one(place: Path, tmp_path: Path) -> None:
    assert refusal(place, train_shards="none-*.tar").startswith(f"{place}: holds no shards of none-*.tar")
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty").startswith(f"{tmp_path}/empty: is not there, is empty")
    (tmp_path / "empty" / "README").touch()
    assert refusal(tmp_path / "empty").startswith(f"{tmp_path}/empty: holds no shards named train-000000.tar")
    assert refusal(tmp_path / "absent").startswith(f"{tmp_path}/absent: is not there")
    shutil.copy(place / "train-0000.tar", tmp_path / "empty" / "train-0000.parquet")
    assert refusal(tmp_path / "empty").endswith("Parquet files are read by --dataset hf:FOLDER.")


def test_shard_that_is_cut_while_it_is_used_is_named(place: Path) -> None:
    train, _ = load_shards(place)
    with (place / "train-0000.tar").open("ab") as file:
        file.truncate(520)
    with pytest.raises(DataError, match=rf"{place}/train-0000\.tar: ends at byte 520, .* Was it cut meanwhile"):
        train.contents.read(0)
    (place / "train-0001.tar").unlink()
    with pytest.raises(DataError, match=rf"{place}/train-0001\.tar: cannot be read .* Was it removed meanwhile"):
        train.contents.read(3)


def test_address_with_a_password_is_refused() -> None:
    with pytest.raises(DataError, match="data_dir must be an address without user, password") as caught:
        load_shards("https://me:geheim@host/data")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"train": 5}', b'{"val": [1]}'])
def test_list_of_shards_that_is_damaged_is_named(place: Path, content: bytes) -> None:
    (place / "shards.json").write_bytes(content)
    assert refusal(place).startswith(f"{place}/shards.json: is no list of shards (")


def test_shard_that_cannot_be_read_is_named(place: Path) -> None:
    (place / "train-0001.tar").unlink()
    (place / "train-0001.tar").mkdir()
    assert refusal(place, train_shards="train-{0000..0002}.tar").startswith(
        f"{place}/train-0001.tar: cannot be read (Is a directory)"
    )
