"""The command `pack`: the same bytes of the same folder, each shard whole or not at all, going on after a kill."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.photographs import write_photographs
from tests.rigs.shards import load_shards, pack_folder
from train.commands import pack as pack_module
from train.config.command_line import parse_args
from train.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_photographs(tmp_path / "folder" / "train", 20, width=60, height=40)
    write_photographs(tmp_path / "folder" / "val", 4, width=60, height=40, first=50)
    return tmp_path / "folder"


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.tar"))}


def test_same_folder_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    first = contents(pack_folder(folder, tmp_path / "a", max_bytes=20_000))
    for path in folder.rglob("*.jpg"):
        os.utime(path, (1e9, 1e9))
    assert contents(pack_folder(folder, tmp_path / "b", max_bytes=20_000)) == first
    assert len(first) > 5
    assert max(map(len, first.values())) <= 20_480  # tar writes records of 10 KiB


def test_shards_are_as_webdataset_has_them_and_mix_the_classes(folder: Path, tmp_path: Path) -> None:
    out = pack_folder(folder, tmp_path / "out")
    with tarfile.open(out / "train-000000.tar") as archive:
        names = archive.getnames()
        labels = [int(archive.extractfile(name).read()) for name in names if name.endswith(".cls")]
    assert [Path(name).suffix for name in names] == [".jpg", ".cls"] * 20
    assert [Path(name).stem for name in names[::2]] == [Path(name).stem for name in names[1::2]]
    assert sorted(labels) == [0] * 10 + [1] * 10
    assert labels not in (sorted(labels), sorted(labels, reverse=True))
    train, test = load_shards(out)
    assert (train.classes, len(train), len(test)) == (("class0", "class1"), 20, 4)


def test_folder_without_halves_is_split_as_the_data_set_splits_it(tmp_path: Path) -> None:
    write_photographs(tmp_path / "folder", 30, width=60, height=40)
    train, test = load_shards(pack_folder(tmp_path / "folder", tmp_path / "out"))
    assert (len(train), len(test)) == (28, 2)


def test_start_that_failed_in_the_middle_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(pack_folder(folder, tmp_path / "whole", max_bytes=20_000))
    usual, written = pack_module._write, []

    def fails(path: Path, images: object) -> None:
        usual(path, images)
        written.append(path)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(pack_module, "_write", fails)
    with pytest.raises(KeyboardInterrupt):
        pack_folder(folder, tmp_path / "out", max_bytes=20_000)
    there = contents(tmp_path / "out")
    assert len(there) == 2  # the third was not published
    (tmp_path / "out" / ".train-000002.tar.0a1b2c3d").write_bytes(b"left by a kill")
    assert contents(pack_folder(folder, tmp_path / "out", max_bytes=20_000)) == whole
    assert len(written) == 3 + len(whole) - 2
    assert not list((tmp_path / "out").glob(".train*"))


def test_killed_command_goes_on_to_the_same_bytes(forks: Forks, tmp_path: Path) -> None:
    write_photographs(tmp_path / "folder" / "train", 60, width=500, height=375)
    write_photographs(tmp_path / "folder" / "val", 4, width=60, height=40)
    whole = contents(pack_folder(tmp_path / "folder", tmp_path / "whole"))
    assert len(whole) > 3
    line = ("pack", tmp_path / "folder", tmp_path / "out", "--shard-mb", "1")
    with forks.running(*line) as job:
        job.wait_until(lambda: list((tmp_path / "out").glob("*.tar")), "shard")
        job.kill()
    assert all(whole[name] == data for name, data in contents(tmp_path / "out").items())
    codes, output = forks.run(*line)
    assert codes == [0], output
    assert f"{tmp_path / 'out'}: 64 images in {len(whole)} shards" in output
    assert contents(tmp_path / "out") == whole


def test_changed_image_is_packed_again(folder: Path, tmp_path: Path) -> None:
    out = pack_folder(folder, tmp_path / "out", max_bytes=20_000)
    before = contents(out)
    path = folder / "train/class0/00000.jpg"
    path.write_bytes(path.read_bytes()[::-1])
    after = contents(pack_folder(folder, out, max_bytes=20_000))
    assert sum(before[name] != after[name] for name in before) == 1


def test_folder_with_other_things_is_refused(folder: Path, tmp_path: Path) -> None:
    out = pack_folder(folder, tmp_path / "out")
    with pytest.raises(UserError, match=rf"{out}: must be empty, or hold the beginning of the same shards"):
        pack_folder(folder, out, max_bytes=20_000)
    with pytest.raises(UserError, match=rf"{folder}: must be empty"):
        pack_folder(folder, folder)
    assert len(contents(out)) == 2


def test_two_at_the_same_time_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, usual = tmp_path / "out", pack_module._write_all

    def another_comes(*arguments: Any, **named: Any) -> None:
        with pytest.raises(UserError, match=rf"{out}: another process packs there now"):
            pack_folder(folder, out)
        usual(*arguments, **named)

    monkeypatch.setattr(pack_module, "_write_all", another_comes)
    assert len(contents(pack_folder(folder, out))) == 2


@pytest.mark.parametrize("words", [[], ["folder"], ["folder", "out", "more"]])
def test_two_folders_are_needed(words: list[str]) -> None:
    (mistake,) = parse_args(["pack", *words]).mistakes
    assert mistake == f"pack must be followed by two folders, FOLDER OUT, got {len(words) or 'nothing'}."
