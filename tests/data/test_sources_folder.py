"""Folders of images are listed equally everywhere and named by their content. Unusable files and folders are named."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rankup.errors import UserError
from tests.rigs.fork_server import Forks
from train.config import Config
from train.data.file_samples import FileSamples
from train.data.sources import load


def write_images(folder: Path, count: int, *, size: tuple[int, int] = (40, 30), suffix: str = "png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", size, (10 * number % 256, 128, 0)).save(folder / f"{number:03}.{suffix}")


def halves(root: Path) -> tuple[FileSamples, FileSamples]:
    train, test = load(Config(dataset="imagefolder", data_dir=str(root), image_size=16))
    assert isinstance(train, FileSamples)
    assert isinstance(test, FileSamples)
    return train, test


@pytest.mark.parametrize("other", ["val", "test"])
def test_imagefolder_of_two_halves_has_classes_and_labels(tmp_path: Path, other: str) -> None:
    for half, count in (("train", 4), (other, 2)):
        for name in ("zebra", "ape"):
            write_images(tmp_path / half / name, count)
    write_images(tmp_path / "train" / "ape" / "deeper", 1)
    write_images(tmp_path / "train" / ".ipynb_checkpoints", 1)
    write_images(tmp_path / "train" / "ape" / ".thumbnails", 1)
    for name in (".DS_Store", "ape/Thumbs.db", "ape/._000.png"):  # no images
        (tmp_path / "train" / name).write_text("")
    train, test = halves(tmp_path)
    assert train.classes == ("ape", "zebra")
    assert train.labels.tolist() == [0] * 5 + [1] * 4
    assert test.labels.tolist() == [0, 0, 1, 1]
    assert list(train.paths) == sorted(train.paths)


def test_imagefolder_without_halves_has_a_fixed_split(tmp_path: Path) -> None:
    write_images(tmp_path / "a", 30)
    write_images(tmp_path / "b", 3)
    train, test = halves(tmp_path)
    assert (train.labels.tolist().count(0), test.labels.tolist().count(0)) == (27, 3)
    assert (train.labels.tolist().count(1), test.labels.tolist().count(1)) == (2, 1)
    assert not set(train.paths) & set(test.paths)
    assert halves(tmp_path)[0].paths == train.paths


# Changes to a folder of cats and dogs that make it another data set
CHANGES: dict[str, Callable[[Path], object]] = {
    "class": lambda root: [(root / half / "cat").rename(root / half / "bat") for half in ("train", "val")],
    "file": lambda root: (root / "train" / "cat" / "000.png").rename(root / "train" / "cat" / "0.png"),
    "size": lambda root: write_images(root / "train" / "cat", 1, size=(99, 99)),
    "label": lambda root: (root / "train" / "cat" / "002.png").rename(root / "train" / "dog" / "002.png"),
    "test half": lambda root: (root / "val" / "cat" / "000.png").rename(root / "val" / "cat" / "0.png"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_imagefolder_is_named_by_its_content(tmp_path: Path, change: str) -> None:
    for half in ("train", "val"):
        write_images(tmp_path / "here" / half / "cat", 3)
        write_images(tmp_path / "here" / half / "dog", 2)
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copyfile)
    here = halves(tmp_path / "here")[0].name
    assert halves(tmp_path / "there")[0].name == here
    CHANGES[change](tmp_path / "there")
    assert halves(tmp_path / "there")[0].name != here


def test_ranks_and_resumes_with_other_images_are_refused(forks: Forks, tmp_path: Path) -> None:
    for node, names in enumerate((("cat", "dog"), ("left", "right"))):
        for half in ("train", "val"):
            for name in names:
                write_images(tmp_path / f"node{node}" / "data" / half / name, 4)
    line = ("train", "--dataset", "imagefolder", "--data-dir", "data", "--image-size", "16", "--batch-size", "2",
            "--model", "mlp", "--max-steps", "2", "--tensorboard=false", "--run-dir", tmp_path, "--name", "run")
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    output = forks.ends(*line, world_size=2, cwds=nodes, code=2)
    assert "the data" in output
    forks.ends(*line, cwds=nodes[:1])
    output = forks.ends(*line, "--max-steps", "4", cwds=nodes[1:], code=2)
    assert "was trained on imagefolder-" in output


@pytest.mark.parametrize(("images", "message"), [
    ({"a": 2, "b": 0}, r": cannot be used as .*no image in b\)"),
    ({"train/a": 2, "val/a": 0}, r"/val: cannot be used as .*no image in a\)"),
    ({"train/a": 1, "val/a": 1, "train/b": 1}, "/train/b: is a class that .*/val lacks"),
    ({"train/a": 1, "val/a": 1, "val/b": 1}, "/val/b: is a class that .*/train lacks"),
    ({"train/a": 1}, "/val: cannot be used as .*No such file"),
    ({".": 3}, ": cannot be used as .*Couldn't find any class folder"),
    ({".cache/a": 3}, r": cannot be used as .*no class folder in it\)"),
    ({"a": 1}, "/a: holds one image"),
    ({}, ": cannot be used as .*No such file"),
])
def test_image_folder_that_cannot_be_used_is_named(tmp_path: Path, images: dict[str, int], message: str) -> None:
    for below, count in images.items():
        write_images(tmp_path / "data" / below, count)
    with pytest.raises(UserError, match=f"^{tmp_path}/data{message}") as caught:
        halves(tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_unreadable_folder_below_a_class_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "a" / "closed", 2)
    write_images(tmp_path / "a", 2)
    usual = os.scandir

    def closed(folder: str) -> Any:  # root could read it with any mode
        if str(folder).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        return usual(folder)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(UserError, match=rf"^{tmp_path}: cannot be .*Permission denied: '{tmp_path}/a/closed'"):
        halves(tmp_path)


def test_broken_link_to_an_image_is_named(tmp_path: Path) -> None:
    write_images(tmp_path / "a", 2)
    (tmp_path / "a" / "link.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(UserError, match=rf"^{tmp_path}/a/link\.png: cannot be read \(No such file or directory\)\. "):
        halves(tmp_path)


@pytest.mark.parametrize("kind", ["text", "truncated.jpg", "truncated.png", "bomb", "gone"])
def test_file_that_is_no_image_is_named_when_loaded(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "train" / "a", 1, size=(300, 300), suffix="jpg" if kind.endswith("jpg") else "png")
    write_images(tmp_path / "val" / "a", 1)
    path = next((tmp_path / "train" / "a").iterdir())
    found = halves(tmp_path)[0]
    if kind == "bomb":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    elif kind == "gone":
        path.unlink()
    else:
        path.write_bytes(b"hello" if kind == "text" else path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError) as caught:
        found.batch(torch.tensor([0]), None)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert {"bomb": "too many pixels", "gone": "cannot be read"}.get(kind, "is no image") in message
