"""Data sets in memory are found, complete and in range, or they are refused with the file's name."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rankup.errors import USER_MISTAKE, UserError
from tests.rigs.idx_files import made_up, write_idx, write_set
from train.config import Config
from train.data.samples import TensorSamples
from train.data.sources import load
from train.data.sources.fetch import KNOWN

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
CIFAR10 = KNOWN["cifar10"].folder


def load_in_memory(config: Config) -> tuple[TensorSamples, TensorSamples]:
    train, test = load(config)
    assert isinstance(train, TensorSamples)
    assert isinstance(test, TensorSamples)
    return train, test


def test_fashion_mnist_is_found_in_data_dir(tmp_path: Path) -> None:
    write_set(tmp_path / "FashionMNIST" / "raw")
    train, test = load_in_memory(Config(data_dir=str(tmp_path)))
    assert (train.images.shape, train.images.dtype) == ((20, 1, 6, 6), torch.uint8)
    assert (test.labels.shape, test.labels.dtype) == ((10,), torch.int64)
    assert torch.equal(train.images[:, 0], made_up(20)[0])
    assert (train.name, len(train.classes)) == ("fashion-mnist", 10)
    assert str(tmp_path) in train.origin


# Faulty folders and files ---------------------------------------------------------------------------------------------


def label_10(folder: Path) -> None:
    write_idx(folder / LABELS, torch.cat([made_up(20)[1][:7], torch.full((13,), 10, dtype=torch.uint8)]))


def holds(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / IMAGES).write_bytes(content)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "one is missing": (lambda f: (f / "t10k-labels-idx1-ubyte").unlink(), "Dataset not found"),
    "label": (label_10, "20 images, 20 labels of up to 10"),
    "counts": (lambda f: write_idx(f / LABELS, made_up(9)[1]), "20 images, 9 labels"),
    "oblong": (lambda f: write_idx(f / IMAGES, made_up(20)[0][:, :, :5]), "of up to 9, 6 x 5 pixels"),
    "swapped": (lambda f: write_idx(f / IMAGES, made_up(20)[1]), "3 dimension"),
    "packed": (lambda f: holds(gzip.compress((f / IMAGES).read_bytes()))(f), ""),
    "empty": (holds(b""), ""),
    "no sizes": (holds(struct.pack(">I", 0x803) + b"\0\0"), ""),
    "truncated": (holds(struct.pack(">4I", 0x803, 2, 3, 3) + bytes(17)), ""),
    "too long": (holds(struct.pack(">4I", 0x803, 2, 3, 3) + bytes(19)), ""),
    "no images": (holds(struct.pack(">4I", 0x803, 0, 28, 28)), ""),
    "huge sizes": (holds(struct.pack(">4I", 0x803, *[2**32 - 1] * 3) + bytes(100)), ""),
    "a page": (holds(b"<!DOCTYPE html><html>Please log in"), ""),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_folder_without_a_valid_data_set_is_named_with_the_reason(tmp_path: Path, wrong: str) -> None:
    spoil, message = WRONG[wrong]
    spoil(write_set(tmp_path / "MNIST" / "raw"))
    with pytest.raises(UserError, match=rf"^{tmp_path}/MNIST: must hold the files of MNIST.*{message}") as caught:
        load(Config(dataset="mnist", data_dir=str(tmp_path)))
    assert caught.value.code == USER_MISTAKE
    assert "\n" not in str(caught.value)


def test_data_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file: FashionMNIST cannot be stored there \(File exists"):
        load(Config(data_dir=str(tmp_path / "file")))


# Sets that need no file -----------------------------------------------------------------------------------------------


def test_shipped_digits_are_complete_and_stratified() -> None:
    halves = load_in_memory(Config(dataset="digits"))
    assert [len(half) for half in halves] == [1438, 359]
    for half, least in zip(halves, (139, 35), strict=True):
        assert half.images.shape[1:] == (1, 8, 8)
        assert int(half.images.max()) == 240
        assert int(half.labels.bincount(minlength=10).min()) >= least
    values = halves[0].images.double() / 255
    assert values.mean().item() == pytest.approx(halves[0].mean[0], abs=5e-4)
    assert values.std().item() == pytest.approx(halves[0].std[0], abs=5e-4)


def test_fake_data_are_always_equal_and_can_be_learned() -> None:
    config = Config(dataset="fake", fake_samples=400, fake_classes=4)
    (train, test), (again, _) = load_in_memory(config), load_in_memory(config)
    assert torch.equal(train.images, again.images)
    assert (train.images.shape, len(test)) == ((400, 3, 32, 32), 100)
    assert not torch.equal(train.images[:100], test.images)
    centres = torch.stack([train.images[train.labels == label].float().mean(0) for label in range(4)])
    guess = torch.cdist(test.images.float().flatten(1), centres.flatten(1)).argmin(1)
    assert torch.equal(guess, test.labels)


def test_limits_take_the_first_samples_and_image_size_scales_them() -> None:
    whole, _ = load_in_memory(Config(dataset="digits", limit_train=10**6))
    cut, test = load_in_memory(Config(dataset="digits", limit_train=5, limit_eval=30, image_size=16))
    assert (len(whole), len(cut), len(test)) == (1438, 5, 30)
    assert torch.equal(cut.labels, whole.labels[:5])
    assert (cut.images.shape, cut.images.dtype) == ((5, 1, 16, 16), torch.uint8)
    assert cut.images.float().mean().item() == pytest.approx(whole.images[:5].float().mean().item(), abs=3)


def test_digits_are_not_mirrored() -> None:
    """A mirrored 2 is no digit, but a mirrored shirt is a shirt."""
    assert [load_in_memory(Config(dataset=name))[0].mirror for name in ("digits", "fake")] == [False, True]
    assert (KNOWN["mnist"].mirror, KNOWN["fashion-mnist"].mirror) == (False, True)


# CIFAR-10 -------------------------------------------------------------------------------------------------------------


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from torchvision import datasets

    folder = root / CIFAR10
    folder.mkdir(parents=True)

    def write(name: str, entry: object) -> list[str]:
        # As in the published files, the dtype is written with ints, of which numpy >= 2.4 warns
        content = pickle.dumps(entry, protocol=2).replace(b"\x89\x88\x87", b"K\x00K\x01\x87")
        (folder / name).write_bytes(content)
        return [name, hashlib.md5(content, usedforsecurity=False).hexdigest()]

    def batch(name: str, count: int) -> list[str]:
        data = np.random.default_rng(count).integers(0, 256, (count, 3072), dtype=np.uint8)
        return write(name, {"data": data, "labels": [number % 10 for number in range(count)]})

    meta = write("batches.meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [batch("data_batch_1", 12), batch("data_batch_2", 13)])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [batch("test_batch", 11)])
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]})
    return folder


def test_cifar10_is_read_from_torchvisions_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, monkeypatch)
    train, test = load_in_memory(Config(dataset="cifar10", data_dir=str(tmp_path)))
    assert (train.images.shape, train.images.is_contiguous(), len(test)) == ((25, 3, 32, 32), True, 11)
    assert (train.name, train.classes) == ("cifar10", tuple("abcdefghij"))
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
    with pytest.raises(UserError, match=f"{CIFAR10}: must hold the files of CIFAR10"):
        load(config)
    assert not trap.exists()
    (folder / "data_batch_2").unlink()
    with pytest.raises(UserError, match=f"{CIFAR10}: must hold the files of CIFAR10"):
        load(config)
