"""How fast are folders of JPEG files read here, beside torchvision's ImageFolder with a DataLoader?

    python tests/bench/jpeg.py --workers 0,2 --repeats 5

Both sides get the same files and workers, and end with normalised float32 batches in the training process. Files are
listed before the clock starts, workers are started after. The sides take turns, and each number is the median of the
repeats. The files are made here, 500 x 375 pixels. Nothing is asserted.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torchvision  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torchvision import transforms  # noqa: E402

from rankup.loop.workers import Workers  # noqa: E402
from tests.bench.machine import conditions, markdown_table  # noqa: E402
from tests.rigs.photographs import write_photographs  # noqa: E402
from train.config import Config  # noqa: E402
from train.data.file_samples import MEAN, STD  # noqa: E402
from train.data.samples import EpochSampler, load_batches  # noqa: E402
from train.parallel.model import keep_freed_memory  # noqa: E402
from train.workloads import images  # noqa: E402

IMAGES, BATCH = 1280, 64
SIZE, CPU = 224, torch.device("cpu")
Batches = Iterator[torch.Tensor]  # float32 [B, 3, 224, 224]
Side = Callable[[Path, str, int], Batches]

# Recipe -> the value of `augment`, and what torchvision does with PIL's picture for the same
RECIPES: dict[str, tuple[Any, list[Any]]] = {
    "resize, centre crop": (False, [transforms.Resize(SIZE), transforms.CenterCrop(SIZE)]),
    "ImageNet's recipe": ("imagenet", [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]),
}


def torchvisions(root: Path, recipe: str, workers: int) -> Batches:
    """One epoch, as torchvision's documentation loads ImageNet."""
    normalize = transforms.Normalize(MEAN, STD)
    transform = transforms.Compose([*RECIPES[recipe][1], transforms.ToTensor(), normalize])
    found = torchvision.datasets.ImageFolder(str(root / "train"), transform)
    loader = DataLoader(found, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers)

    def epoch() -> Batches:  # the first batch that is asked for starts the workers
        for batch, _ in loader:
            yield batch

    return epoch()


def ours(root: Path, recipe: str, workers: int) -> Batches:
    """One epoch, as training takes it."""
    augment = RECIPES[recipe][0]
    config = Config(dataset="imagefolder", data_dir=str(root), augment=augment, batch_size=BATCH, model="cnn")
    samples, normalize = images.build(config).train, images.normalizer(MEAN, STD)
    order = EpochSampler(len(samples), BATCH, seed=0)

    def epoch() -> Batches:
        for ((_, batch),) in Workers(load_batches(samples, order, accumulate=1, num_workers=workers, device=CPU)):
            yield normalize(batch[0])

    return epoch()


def images_per_s(batches: Batches) -> float:
    """Over an epoch, with the start of the workers."""
    began_s = time.perf_counter()
    count = sum(len(batch) for batch in islice(batches, IMAGES // BATCH))
    return count / (time.perf_counter() - began_s)


def measure(root: Path, repeats: int, workers: int) -> list[list[str]]:
    """By recipe: the medians of torchvision's and of our images/s."""
    sides = defaultdict[tuple[str, Side], list[float]](list)
    for repeat, recipe, side in product(range(repeats), RECIPES, (torchvisions, ours)):
        print(f"{workers} workers, {recipe}: {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        sides[recipe, side].append(images_per_s(side(root, recipe, workers)))
    found = {recipe: [statistics.median(sides[recipe, side]) for side in (torchvisions, ours)] for recipe in RECIPES}
    return [[name, f"{theirs:,.0f}", f"{own:,.0f}", f"{own / theirs:.2f}"] for name, (theirs, own) in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", default="0,2", help="numbers of workers, a table for each")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does; torchvision's side gains from it too
    about = conditions()
    with tempfile.TemporaryDirectory() as folder:
        for half, count in (("train", IMAGES), ("val", 10)):
            write_photographs(Path(folder, half), count, classes=10)
        tables = {number: measure(Path(folder), arguments.repeats, number)
                  for number in map(int, arguments.workers.split(","))}
    print(f"{about}, torchvision {torchvision.__version__}, one thread a process, batch {BATCH}, "
          f"{IMAGES} files of 500 x 375.")
    for number, rows in tables.items():
        print("", *markdown_table([f"images/s, {number} workers", "torchvision", "rankup", "ratio"], rows), sep="\n")


if __name__ == "__main__":
    main()
