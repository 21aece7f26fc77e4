"""Data sets in memory: found where they lie, whole and in range, or refused with the file's name."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rankup.errors import USER_MISTAKE, UserError
from tests.rigs.idx_files import made_up, write_idx, write_set
from train.config import Config
from train.data import TensorSamples
from train.data.file_samples import FileSamples
from train.data.sources import SOURCES, load
from train.data.sources.cifar10 import FOLDER
from train.data.sources.mnist_family import FAMILIES, locate
from train.main import main


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
def test_fashion_mnist_is_found_in_data_dir(tmp_path: Path, suffix: str, below: str) -> None:
    write_set(tmp_path / below, suffix=suffix)
    config = Config(data_dir=str(tmp_path))
    train, test = load(config)
    assert isinstance(train, TensorSamples)
    assert isinstance(test, TensorSamples)
    assert (train.images.shape, train.images.dtype) == ((20, 1, 6, 6), torch.uint8)
    assert (test.labels.shape, test.labels.dtype) == ((10,), torch.int64)
    assert torch.equal(train.images[:, 0], made_up(20)[0])
    assert (train.name[:14], len(train.classes)) == ("fashion-mnist-", 10)
    assert str(tmp_path) in train.origin


def test_fashion_mnist_in_debians_place_comes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    write_set(tmp_path / "cache" / "FashionMNIST" / "raw")
    debian = replace(FAMILIES["fashion-mnist"], here=write_set(tmp_path / "debian", suffix=".gz"))
    assert locate(debian, data_dir=None, timeout_s=1.0, say=print) == tmp_path / "debian"
    without = replace(FAMILIES["fashion-mnist"], here=tmp_path / "nothing")
    there = tmp_path / "cache" / "FashionMNIST" / "raw"
    assert locate(without, data_dir=None, timeout_s=1.0, say=print) == there


def test_mnist_is_found_in_torchvisions_layout(tmp_path: Path) -> None:
    write_set(tmp_path / "MNIST" / "raw")
    assert load(Config(dataset="mnist", data_dir=str(tmp_path)))[0].name.startswith("mnist-")


def test_data_dir_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.txt").write_text("no data")
    with pytest.raises(UserError, match=r"holds none of the files of Fashion-MNIST.*holiday\.txt"):
        load(Config(data_dir=str(tmp_path)))


def test_data_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="must be a folder"):
        load(Config(data_dir=str(tmp_path / "file")))


def test_data_dir_with_some_of_the_files_names_the_missing(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte \(or \.gz\) missing"):
        load(Config(data_dir=str(tmp_path)))


def test_label_out_of_range_names_file_and_item(tmp_path: Path) -> None:
    write_set(tmp_path)
    labels = made_up(20)[1]
    labels[7] = 10
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels)
    with pytest.raises(UserError, match=r"train-labels-idx1-ubyte: label must be 0\.\.9.*got 10 at item 7"):
        load(Config(data_dir=str(tmp_path)))


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "idx": ("data/t10k-*", {"dataset": "mnist"}), "gz": ("data/t10k-*.gz", {"dataset": "mnist"}),
    **{kind: (f"data/train/a/*.{kind}", {"dataset": "imagefolder"}) for kind in ("png", "jpg", "webp", "tif", "bmp")},
}


@pytest.mark.parametrize("kind", FORMATS)
def test_mutated_file_is_read_or_refused_by_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A hundred of each format. In a process of its own, since a decoder may crash it."""
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    pattern, settings = FORMATS[kind]
    root = tmp_path / "data"
    if settings["dataset"] == "mnist":
        write_set(root, suffix=".gz" if kind == "gz" else "")
    else:
        for number, folder in enumerate(("train/a", "train/b", "val/a", "val/b")):
            (root / folder).mkdir(parents=True)
            for name in "xyz":
                path = root / folder / f"{name}.{kind}"
                Image.effect_noise((20, 20), 50 * number).convert("RGB").save(path)
    config = Config(data_dir=str(root), image_size=16, **settings)

    def read() -> None:
        for half in load(config):
            if isinstance(half, FileSamples):
                half.batch(torch.arange(len(half)), None)

    def mutate() -> None:
        draw = random.Random(0)
        for number in range(100):
            path = draw.choice(sorted(tmp_path.glob(pattern)))
            whole = path.read_bytes()
            data = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(min(len(data), 600) if number % 2 else len(data))
                data[at : at + draw.choice((0, 1, 1, 8))] = draw.randbytes(draw.choice((0, 1, 1, 8)))
            path.write_bytes(data)
            print(number, flush=True)
            with contextlib.suppress(UserError):
                read()
            path.write_bytes(whole)

    read()
    child = multiprocessing.get_context("fork").Process(target=mutate)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_digits_that_ship_are_whole_and_stratified() -> None:
    halves = load(Config(dataset="digits"))
    assert [len(half) for half in halves] == [1438, 359]
    for half, least in zip(halves, (139, 35), strict=True):
        assert isinstance(half, TensorSamples)
        assert half.images.shape[1:] == (1, 8, 8)
        assert int(half.images.max()) == 240
        assert int(half.labels.bincount(minlength=10).min()) >= least
    values = halves[0].images.double() / 255  # type: ignore[union-attr]
    assert values.mean().item() == pytest.approx(halves[0].mean[0], abs=5e-4)
    assert values.std().item() == pytest.approx(halves[0].std[0], abs=5e-4)


def test_fake_is_the_same_each_time_and_can_be_learnt() -> None:
    config = Config(dataset="fake", fake_samples=400, fake_classes=4)
    (train, test), (again, _) = load(config), load(config)
    assert isinstance(train, TensorSamples)
    assert isinstance(again, TensorSamples)
    assert isinstance(test, TensorSamples)
    assert torch.equal(train.images, again.images)
    assert train.images.shape == (400, 3, 32, 32)
    assert len(test) == 100
    assert not torch.equal(train.images[:100], test.images)
    centres = torch.stack([train.images[train.labels == label].float().mean(0) for label in range(4)])
    guess = torch.cdist(test.images.float().flatten(1), centres.flatten(1)).argmin(1)
    assert torch.equal(guess, test.labels)


def test_limits_take_the_first_samples() -> None:
    config = Config(dataset="digits", limit_train=100, limit_eval=30)
    whole, _ = load(Config(dataset="digits"))
    cut, test = load(config)
    assert (len(cut), len(test)) == (100, 30)
    assert torch.equal(cut.labels, whole.labels[:100])
    assert len(load(Config(dataset="digits", limit_train=10**6))[0]) == len(whole)


def test_image_size_scales_images_in_memory() -> None:
    small, _ = load(Config(dataset="digits", limit_train=5))
    large, _ = load(Config(dataset="digits", limit_train=5, image_size=16))
    assert isinstance(small, TensorSamples)
    assert isinstance(large, TensorSamples)
    assert (large.images.shape, large.images.dtype) == ((5, 1, 16, 16), torch.uint8)
    assert large.images.float().mean().item() == pytest.approx(small.images.float().mean().item(), abs=3)


ONE_OF = f"must be one of {', '.join(SOURCES)}, got"


@pytest.mark.parametrize(
    ("value", "got"), [("fashion", '"fashion"'), ("3", "3"), ("", "null"), ("[digits]", "[digits]")]
)
def test_data_set_that_is_not_in_the_table_is_refused_with_all_other_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], value: str, got: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it.yaml").write_text(f"dataset: {value}\nlr: -1\n")
    for command in ("show", "train"):
        assert main([command, "--config", "it.yaml"]) == USER_MISTAKE
        said = capfd.readouterr().err
        assert f"it.yaml: dataset {ONE_OF} {got}" in said
        assert "it.yaml: lr must be > 0, got -1." in said
        assert main([command, f"--dataset={value}"]) == USER_MISTAKE
        assert f"--dataset {ONE_OF} " in capfd.readouterr().err


def test_help_and_show_list_the_data_sets(capfd: pytest.CaptureFixture[str]) -> None:
    for words, listed in ((["train", "--help"], ", ".join(SOURCES)), (["show"], " | ".join(SOURCES))):
        assert main(words) == 0
        assert listed in " ".join(capfd.readouterr().out.split())


def test_only_sets_that_bear_it_are_mirrored() -> None:
    """A mirrored 2 shows no digit; a mirrored shirt is a shirt."""
    mirrored = {name: load(Config(dataset=name))[0].mirror for name in ("digits", "fake")}
    assert mirrored == {"digits": False, "fake": True}
    assert (FAMILIES["mnist"].mirror, FAMILIES["fashion-mnist"].mirror) == (False, True)


# CIFAR-10


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from torchvision.datasets import CIFAR10

    folder = root / FOLDER
    folder.mkdir(parents=True)

    def write(name: str, entry: object) -> list[str]:
        # As in the published files: the dtype spelt with numbers, of which numpy >= 2.4 warns
        content = pickle.dumps(entry, protocol=2).replace(b"\x89\x88\x87", b"K\x00K\x01\x87")
        (folder / name).write_bytes(content)
        return [name, hashlib.md5(content, usedforsecurity=False).hexdigest()]

    def batch(name: str, count: int) -> list[str]:
        data = np.random.default_rng(count).integers(0, 256, (count, 3072), dtype=np.uint8)
        return write(name, {"data": data, "labels": [number % 10 for number in range(count)]})

    meta = write("batches.meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(CIFAR10, "train_list", [batch("data_batch_1", 12), batch("data_batch_2", 13)])
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch", 11)])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]})
    return folder


@pytest.mark.parametrize("named", ["parent", "itself"])
def test_cifar10_is_read_from_torchvisions_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    folder = write_cifar(tmp_path, monkeypatch)
    config = Config(dataset="cifar10", data_dir=str(tmp_path if named == "parent" else folder))
    train, test = load(config)
    assert isinstance(train, TensorSamples)
    assert (train.images.shape, len(test)) == ((25, 3, 32, 32), 11)
    first = np.random.default_rng(12).integers(0, 256, (12, 3072), dtype=np.uint8)[0].reshape(3, 32, 32)
    assert np.array_equal(train.images[0].numpy(), first)


def test_cifar10_with_another_md5_is_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_cifar(tmp_path, monkeypatch)
    trap = tmp_path / "opened"

    class Trap:
        def __reduce__(self) -> object:
            return os.mkdir, (str(trap),)

    (folder / "data_batch_2").write_bytes(pickle.dumps(Trap()))
    config = Config(dataset="cifar10", data_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"data_batch_2: is damaged.*md5"):
        load(config)
    assert not trap.exists()
    (folder / "data_batch_2").unlink()
    with pytest.raises(UserError, match="data_batch_2: is missing"):
        load(config)
