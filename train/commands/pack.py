"""The command `pack`: shards, tar files as the package webdataset reads them, of a folder of images."""

import fcntl
import hashlib
import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from train.config import Config
from train.config.options import PackOptions
from train.data.sources.imagefolder import load
from train.data.sources.sets import FileSet
from train.data.sources.shards.index import Columns, open_index
from train.data.sources.shards.place import LIST, Place
from train.errors import DataError, UserError, disk_error
from train.process.atomic_file import staged, write_atomically
from train.process.context import Context
from train.process.log import Log

BLOCK, RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE


@dataclass(frozen=True)
class Image:
    """One image file of the folder; `size` in bytes, `changed` as its file system has the time, in ns."""

    path: str
    key: str
    label: int
    size: int
    changed: int

    @property
    def packed_bytes(self) -> int:
        """What it takes in a shard: two headers, and the contents in whole blocks."""
        return 2 * BLOCK + _blocks(self.size) + _blocks(len(str(self.label)))


def pack(context: Context, options: PackOptions) -> None:
    """Make the shards of both halves, their list and their index, see `pack_folder`."""
    folder, out = options.folders
    count, text = pack_folder(
        folder, Path(out).expanduser().absolute(), max_bytes=options.shard_mb * 1_000_000, config=context.config,
        log=context.log,
    )
    context.log.info(f"{out}: {count} images in {text}. Train on them with --dataset shards --data-dir {out}")


def pack_folder(folder: str, out: Path, *, max_bytes: int, config: Config, log: Log) -> tuple[int, str]:
    """Make the shards, of at most about `max_bytes` each; returns the number of images, and a text on the shards.

    The same folder gives the same bytes. Those of an earlier, unfinished start are kept. Raises UserError for a folder
    that dataset imagefolder refuses, for images that change meanwhile, and where `out` holds other things.
    """
    halves = load(config.model_copy(update={"dataset": "imagefolder", "data_dir": folder}), log.info)
    shards: dict[str, list[Image]] = {}
    listed: dict[str, list[str]] = {}
    for half, found in zip(("train", "val"), halves, strict=True):
        parts = list(_parts(_images(found), max_bytes=max_bytes))
        listed[half] = [f"{half}-{number:06}.tar" for number in range(len(parts))]
        shards |= zip(listed[half], parts, strict=True)
    facts = [(name, [(image.key, image.label, image.size) for image in images]) for name, images in shards.items()]
    plan = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    try:
        with _claim(out, json.dumps({"classes": halves[0].classes, **listed, "plan": plan}, indent=1) + "\n"):
            _write_all(out, shards, report_every_s=config.report_every_s, log=log)
    except OSError as error:
        raise disk_error("pack", out, error) from error
    total = sum((out / name).stat().st_size for name in shards)
    place, columns = Place(str(out)), Columns.of(config)
    samples = 0
    for names in listed.values():
        samples += len(open_index(place, names, columns=columns, say=log.info).table)
    return samples, f"{len(shards)} shards, {total / 1e6:.1f} MB"


def _images(files: FileSet) -> list[Image]:
    """The files of one half, in the order in which they are packed: mixed, so that each shard holds all classes."""
    images = []
    width = max(6, len(str(len(files))))
    for number, (path, label) in enumerate(zip(files.paths, files.labels.tolist(), strict=True)):
        # The number first: samples are numbered in the order of their keys, as the folder numbers its files
        stem = re.sub(r"[^A-Za-z0-9_-]", "_", Path(path).stem)[:60]
        try:
            facts = os.stat(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
        images.append(Image(path, f"{number:0{width}}-{stem}", label, facts.st_size, facts.st_mtime_ns))
    return sorted(images, key=lambda image: hashlib.sha256(image.key.encode()).digest())


def _parts(images: Sequence[Image], *, max_bytes: int) -> Iterator[list[Image]]:
    """The images of each shard: as many as fit, at least one."""
    part: list[Image] = []
    total = 2 * BLOCK
    for image in images:
        if part and total + image.packed_bytes > max_bytes:
            yield part
            part, total = [], 2 * BLOCK
        part.append(image)
        total += image.packed_bytes
    yield part


@contextmanager
def _claim(out: Path, listed: str) -> Iterator[None]:
    """Write what is going to be there into `out`, or find that an earlier start has; nobody else packs there meanwhile.

    Raises UserError, OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    there = [name for name in os.listdir(out) if not name.startswith(".")]
    if there and not (LIST in there and (out / LIST).read_text() == listed):
        raise UserError(
            f"{out}: must be empty, or hold the beginning of the same shards, got {min(there)} and "
            f"{len(there) - 1} more of other images or another --shard-mb. Remove them, or name another folder."
        )
    if not there:
        write_atomically(out / LIST, listed)
    with (out / LIST).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out}: another process packs there now. Wait for it, or stop it.") from None
        for name in os.listdir(out):
            if re.match(r"\.(train|val)-\d+\.tar\.", name):  # what a killed start was writing
                (out / name).unlink()
        yield


def _write_all(out: Path, shards: dict[str, list[Image]], *, report_every_s: float, log: Log) -> None:
    began_s = reported_s = time.monotonic()
    for number, (name, images) in enumerate(shards.items()):
        if not _is_there(out / name, images):
            with staged(out / name) as staging:
                _write(staging, images)
        now = time.monotonic()
        if now - reported_s > report_every_s:
            reported_s = now
            log.info(f"packed {number + 1} of {len(shards)} shards after {now - began_s:.0f} s")


def _is_there(path: Path, images: Sequence[Image]) -> bool:
    """Whether an earlier start has written this shard, and no image has changed since."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    used = 2 * BLOCK + sum(image.packed_bytes for image in images)
    newest = max(image.changed for image in images)
    return found.st_size == -(-used // RECORD) * RECORD and found.st_mtime_ns > newest


def _write(path: Path, images: Sequence[Image]) -> None:
    """One shard. Nothing in it tells when, where or by whom it was made."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for image in images:
            try:
                data = Path(image.path).read_bytes()
            except OSError as error:
                raise DataError(f"{image.path}: cannot be read ({error.strerror}).") from error
            if len(data) != image.size:
                raise DataError(f"{image.path}: has changed while it was packed. Run the same command again.")
            ending = Path(image.path).suffix.lower().removeprefix(".")
            for name, content in ((f"{image.key}.{ending}", data), (f"{image.key}.cls", str(image.label).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    # No fsync: a shard that a power cut has harmed is found by its size, or by its index


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
