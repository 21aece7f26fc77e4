"""IDX files: what was written is read; each way in which one can be damaged is named in one line."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from rankup.errors import USER_MISTAKE, UserError
from tests.rigs.idx_files import made_up, write_idx
from train.data.sources import mnist_family
from train.data.sources.mnist_family import read_idx


def refused(*words: str, path: Path, expect: str = "images") -> None:
    with pytest.raises(UserError) as caught:
        read_idx(path, expect)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{path}: "), message
    assert "\n" not in message
    assert caught.value.code == USER_MISTAKE
    for word in words:
        assert word in message


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_reads_what_it_wrote(tmp_path: Path, suffix: str) -> None:
    images, labels = made_up(7)
    write_idx(tmp_path / f"i{suffix}", images)
    write_idx(tmp_path / f"l{suffix}", labels)
    assert torch.equal(read_idx(tmp_path / f"i{suffix}", "images"), images)
    assert torch.equal(read_idx(tmp_path / f"l{suffix}", "labels"), labels)


def test_idx_tells_gzip_by_content_not_by_name(tmp_path: Path) -> None:
    images, _ = made_up(7)
    write_idx(tmp_path / "a.gz", images)
    (tmp_path / "a.gz").rename(tmp_path / "a")
    assert torch.equal(read_idx(tmp_path / "a", "images"), images)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is no IDX file"]),
        (struct.pack(">I", 0x803) + b"\0\0", ["holds 0 values"]),
        (struct.pack(">4I", 0x803, 2, 3, 3) + bytes(17), ["holds 17 values", "2x3x3"]),
        (struct.pack(">4I", 0x803, 2, 3, 3) + bytes(19), ["holds 19 values", "2x3x3"]),
        (struct.pack(">4I", 0x803, 0, 28, 28), ["holds 0 values", "0x28x28"]),
        (struct.pack(">4I", 0x803, *[2**32 - 1] * 3) + bytes(100), ["holds 100", "4294967295x4294967295x4294967295"]),
        (struct.pack(">2I", 0x801, 4) + bytes(4), ["holds labels where images are expected"]),
        (b"<!DOCTYPE html><html>Please log in", ["is no IDX file of images", "<!DO"]),
        (struct.pack(">4I", 0xD03, 1, 1, 1) + bytes(4), ["is no IDX file of images"]),
    ],
)
def test_idx_damaged_or_mislabelled_is_named(tmp_path: Path, content: bytes, words: list[str], packed: bool) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(gzip.compress(content) if packed else content)
    refused(*words, path=path)


def test_idx_images_in_place_of_labels_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path / "labels", made_up(3)[0])
    refused("holds images where labels are expected", path=tmp_path / "labels", expect="labels")


def test_idx_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    write_idx(path, made_up(50)[0])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused("corrupt gzip", path=path)
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(b ^ 255 for b in whole[middle : middle + 8]) + whole[middle + 8 :])
    refused("gzip", path=path)
    path.write_bytes(whole[:-8] + bytes(8))  # the checksum
    refused("corrupt gzip", path=path)


def test_idx_that_unpacks_to_more_than_a_set_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist_family, "MOST_BYTES", 1000)
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(struct.pack(">4I", 0x803, 1, 28, 100) + bytes(2800)))
    refused("holds more than 1,000 bytes", path=path)


def test_idx_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    refused("No such file", path=tmp_path / "absent")
    refused("directory", path=tmp_path)
