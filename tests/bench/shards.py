"""How fast are images read from shards here, beside the folder they were made of and beside the package webdataset?

    pip install webdataset      # for this alone: nothing of ours needs it
    python tests/bench/shards.py --workers 2 --repeats 5

All sides get the same JPEG files, 500 x 375 pixels, made here, and take turns; each number is the median of the
repeats. "cold": the files were dropped from the page cache before. Decoding, crop and batches are ours on all sides, so
what differs is how the bytes are found. webdataset reads each shard from its beginning to its end and shuffles in a
buffer of 1,000 samples; our orders are exact. Nothing is asserted.
"""

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import webdataset  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from rankup.group.stop import StopRequest  # noqa: E402
from tests.bench.jpeg import make_files  # noqa: E402
from tests.bench.machine import cpu_model  # noqa: E402
from tests.rigs.shards import pack_folder  # noqa: E402
from train.config import Config  # noqa: E402
from train.data.file_samples import FileSamples, random_crop  # noqa: E402
from train.data.loader import Loader  # noqa: E402
from train.data.order import Order  # noqa: E402
from train.data.sources import load  # noqa: E402
from train.data.sources.decode import decode_bytes  # noqa: E402

SIZE = 224
FOLDER, SHARDS, WINDOW, THEIRS = "folder", "shards", "shards, --shuffle-window", "webdataset"
Epoch = Iterator[Any]  # of batches, or of the numbers of bytes read


def ours(samples: FileSamples, *, window: int, batch_size: int, workers: int) -> Epoch:
    """One epoch of batches, as training takes them."""
    order = Order(len(samples), batch_size, seed=0, window=window, storage=samples.storage)
    loader = Loader(
        samples, order.batches(0, order.steps_per_epoch), device=torch.device("cpu"), stop=StopRequest(),
        num_workers=workers,
    )
    try:
        for _ in range(order.steps_per_epoch):
            yield loader.next()
    finally:
        loader.close()


def our_bytes(samples: FileSamples, *, window: int) -> Epoch:
    """One epoch of samples that are read alone, in this process."""
    files = samples
    for number in Order(len(samples), 1, seed=0, window=window, storage=samples.storage).epoch(0).tolist():
        yield len(files.contents.read(number) if files.contents else Path(files.paths[number]).read_bytes())


def _samples(root: Path, side: str) -> FileSamples:
    dataset, place = ("imagefolder", "files") if side == FOLDER else ("shards", "shards")
    files, _ = load(Config(dataset=dataset, data_dir=str(root / place), augment="imagenet"))
    return replace(files, augment="imagenet")


def their_bytes(root: Path) -> Epoch:
    """The same by webdataset."""
    return (len(sample["jpg"]) for sample in _pipeline(root))


def theirs(root: Path, *, batch_size: int, workers: int) -> Epoch:
    """One epoch of batches, as webdataset's documentation loads ImageNet, with our decoder and crop."""

    def prepare(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
        image = decode_bytes(bytearray(sample["jpg"]), sample["__key__"])
        return random_crop(image, size=SIZE), int(sample["cls"])

    batches = _pipeline(root).map(prepare).batched(batch_size, partial=False)
    return iter(DataLoader(batches, batch_size=None, num_workers=workers, prefetch_factor=2))


def _pipeline(root: Path) -> Any:
    paths = sorted(map(str, (root / "shards").glob("train-*.tar")))
    return webdataset.WebDataset(paths, shardshuffle=len(paths), seed=0).shuffle(1000)


def forget(root: Path) -> None:
    """Drop the files from the page cache. What was just written has to reach the disk first."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def images_per_s(epoch: Epoch, count: int, *, each: int) -> float:
    """Over the first `count` items of `each` images, with the start of the workers."""
    began_s = time.perf_counter()
    found = sum(1 for _ in islice(epoch, count))
    return found * each / (time.perf_counter() - began_s)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--shard-mb", type=int, default=16)
    parser.add_argument("--shuffle-window", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    steps = given.images // given.batch_size // 2
    options = {"batch_size": given.batch_size, "workers": given.workers}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["RANKUP_CACHE"] = str(root / "cache")
        make_files(root / "files", given.images)
        (root / "files" / "pictures").rename(root / "pictures")
        pack_folder(root / "files", root / "shards", max_bytes=given.shard_mb * 1_000_000)
        read: dict[str, Callable[[], Epoch]] = {THEIRS: lambda: their_bytes(root)}
        whole: dict[str, Callable[[], Epoch]] = {THEIRS: lambda: theirs(root, **options)}
        for side in (FOLDER, SHARDS, WINDOW):
            samples, window = _samples(root, side), given.shuffle_window if side == WINDOW else 0
            read[side] = partial(our_bytes, samples, window=window)
            whole[side] = partial(ours, samples, window=window, **options)
        found: dict[tuple[str, str], list[float]] = {}
        for repeat in range(given.repeats):
            print(f"{repeat + 1} of {given.repeats}", file=sys.stderr, flush=True)
            for side in read:
                forget(root)
                for kind in ("read, cold", "read, warm"):
                    speed = images_per_s(read[side](), given.images, each=1)
                    found.setdefault((side, kind), []).append(speed)
                speed = images_per_s(whole[side](), steps, each=given.batch_size)
                found.setdefault((side, "decoded batches"), []).append(speed)
    kinds = list(dict.fromkeys(kind for _, kind in found))
    load_now = os.getloadavg()[0]
    print(f"\nimages/s, medians of {given.repeats}; {cpu_model()}, {os.cpu_count()} CPUs, load {load_now:.1f} "
          f"at the end, {given.workers} workers, {datetime.date.today()}, webdataset {webdataset.__version__}")
    print(f"| | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for side in (FOLDER, SHARDS, WINDOW, THEIRS):
        print(f"| {side} | {' | '.join(f'{statistics.median(found[side, kind]):,.0f}' for kind in kinds)} |")


if __name__ == "__main__":
    main()
