"""Shards for tests: of a folder, or member by member."""

import hashlib
import io
import json
import os
import tarfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from train.config import Config
from train.config.settings import Augment
from train.data.file_samples import FileSamples
from train.data.sources import load


def pack_folder(folder: Path, out: Path, *, max_bytes: int = 1_000_000) -> Path:
    """Shards of a folder of images, of about so many bytes each, with their list and index. The classes are mixed."""
    halves = load(Config(dataset="imagefolder", data_dir=str(folder)))
    listed: dict[str, Any] = {"classes": halves[0].classes}
    for half, found in zip(("train", "val"), halves, strict=True):
        assert isinstance(found, FileSamples)
        shards: list[list[tuple[str, bytes]]] = [[]]
        images = list(enumerate(zip(found.paths, found.labels.tolist(), strict=True)))
        for number, (path, label) in sorted(images, key=lambda image: hashlib.sha256(b"%d" % image[0]).digest()):
            data, key = Path(path).read_bytes(), f"{number:06}"
            if shards[-1] and sum(len(content) for _, content in shards[-1]) + len(data) > max_bytes:
                shards.append([])
            shards[-1] += [(f"{key}{Path(path).suffix.lower()}", data), (f"{key}.cls", b"%d" % label)]
        listed[half] = [f"{half}-{number:06}.tar" for number in range(len(shards))]
        for name, members in zip(listed[half], shards, strict=True):
            write_members(out / name, members)
    (out / "shards.json").write_text(json.dumps(listed))
    load_shards(out)
    return out


def load_shards(place: Path | str, **settings: Any) -> tuple[FileSamples, FileSamples]:
    """Both parts of `dataset: shards`."""
    train, test = load(Config(dataset="shards", data_dir=str(place), **settings))
    assert isinstance(train, FileSamples)
    assert isinstance(test, FileSamples)
    return train, test


def samples_of(place: Path | str, *, dataset: str = "shards", augment: Augment = False, **settings: Any) -> FileSamples:
    """The training samples at `place`, 32 x 32."""
    found, _ = load(Config(dataset=dataset, data_dir=str(place), augment=augment, image_size=32, **settings))
    assert isinstance(found, FileSamples)
    return replace(found, augment=augment)


def png(shade: int) -> bytes:
    """A small picture, another for each shade."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 100, 0)).save(buffer, "png")
    return buffer.getvalue()


def in_child(work: Callable[[], object]) -> int:
    """Call `work` in a forked process. Returns its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write_shard(path: Path, samples: Mapping[str, tuple[int, int]]) -> None:
    """A tar file of `samples`: key -> shade of its picture, and label."""
    members = {}
    for key, (shade, label) in samples.items():
        members |= {f"{key}.png": png(shade), f"{key}.cls": str(label).encode()}
    write_members(path, members.items())


def write_members(path: Path, members: Any) -> None:
    """A tar file of (name, content) pairs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
