"""How fast are folders of JPEG files read here, beside torchvision's ImageFolder with a DataLoader?

    python tests/bench/jpeg.py --workers 0,2 --repeats 5

Both sides get the same files and workers, and end with normalised float32 batches in the training process. Files are
listed before the clock starts, workers are started after. The sides take turns, and each number is the median of the
repeats. The files are made here, 500 x 375 pixels. Nothing is asserted.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from itertools import islice
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
from tests.rigs.photographs import photograph  # noqa: E402
from train.config import Config  # noqa: E402
from train.data import Samples  # noqa: E402
from train.data.samples import Order, load_batches  # noqa: E402
from train.data.sources.imagefolder import MEAN, STD  # noqa: E402
from train.parallel.model import keep_freed_memory  # noqa: E402
from train.workloads import images  # noqa: E402

PICTURES = 64  # different ones; the files are copies of them, each read and decoded by itself
SIZE, CPU = 224, torch.device("cpu")
Batches = Generator[torch.Tensor, None, None]  # float32 [B, 3, 224, 224]

# Recipe -> the value of `augment`, and what torchvision does with PIL's picture for the same
MIDDLE = [transforms.Resize(SIZE), transforms.CenterCrop(SIZE)]
FLIP = transforms.RandomHorizontalFlip()
SHIFTED = "the same, shift, flip"
RECIPES: dict[str, tuple[Any, list[Any]]] = {
    "resize, centre crop": (False, MIDDLE),
    SHIFTED: (True, [*MIDDLE, transforms.RandomCrop(SIZE, padding=SIZE // 8), FLIP]),
    "ImageNet's recipe": ("imagenet", [transforms.RandomResizedCrop(SIZE), FLIP]),
}


def make_files(root: Path, count: int) -> None:
    """`count` JPEG files to train on, in ten class folders, and ten to test on."""
    folder = root / "pictures"
    folder.mkdir(parents=True)
    for number in range(PICTURES):
        size = {"width": 500, "height": 375} if number % 2 == 0 else {"width": 375, "height": 500}
        photograph(number, **size).save(folder / f"{number}.jpg", quality=90)
    for half, images_of_half in (("train", count), ("val", 10)):
        for number in range(images_of_half):
            target = root / half / f"class{number % 10}" / f"{number:06}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / f"{number % PICTURES}.jpg", target)


def torchvisions(root: Path, recipe: str, *, batch_size: int, workers: int) -> Batches:
    """One epoch, as torchvision's documentation loads ImageNet."""
    normalize = transforms.Normalize(MEAN, STD)
    transform = transforms.Compose([*RECIPES[recipe][1], transforms.ToTensor(), normalize])
    found = torchvision.datasets.ImageFolder(str(root / "train"), transform)
    loader = DataLoader(found, batch_size=batch_size, shuffle=True, drop_last=True, num_workers=workers)
    return _inputs(loader)


def _inputs(loader: DataLoader[Any]) -> Batches:
    for batch, _ in loader:  # a function of its own: the first batch that is asked for starts the workers
        yield batch


def ours(root: Path, recipe: str, *, batch_size: int, workers: int) -> Batches:
    """One epoch, as training takes it."""
    augment = RECIPES[recipe][0]
    config = Config(dataset="imagefolder", data_dir=str(root), augment=augment, batch_size=batch_size, model="cnn")
    samples = images.build(config).train
    return _normalized(samples, Order(len(samples), batch_size, seed=0), workers=workers)


def _normalized(samples: Samples, order: Order, *, workers: int) -> Batches:
    normalize = images.normalizer(MEAN, STD)
    for ((_, batch),) in Workers(load_batches(samples, order, accumulate=1, num_workers=workers, device=CPU)):
        yield normalize(batch[0])


def images_per_s(batches: Batches, steps: int) -> float:
    """Over the next `steps` batches; for the first, with the start of the workers."""
    began_s = time.perf_counter()
    count = sum(len(batch) for batch in islice(batches, steps))
    return count / (time.perf_counter() - began_s)


def measure_loading(root: Path, *, repeats: int, steps: int, **options: Any) -> dict[str, tuple[float, float]]:
    """By recipe: the medians of torchvision's and of our images/s in an epoch of so many steps."""
    sides: dict[str, list[list[float]]] = {}
    for repeat in range(repeats):
        print(f"loading: {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        for recipe in RECIPES:
            row = sides.setdefault(recipe, [[], []])
            row[0].append(images_per_s(torchvisions(root, recipe, **options), steps))
            row[1].append(images_per_s(ours(root, recipe, **options), steps))
    return {name: (statistics.median(theirs), statistics.median(own)) for name, (theirs, own) in sides.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", default="0,2", help="numbers of workers, a table for each")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does; torchvision's side gains from it too
    about = conditions()
    numbers = [int(number) for number in arguments.workers.split(",")]
    options = {"batch_size": arguments.batch_size, "repeats": arguments.repeats}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_files(root, arguments.images)
        epoch = arguments.images // arguments.batch_size
        loading = {number: measure_loading(root, steps=epoch, workers=number, **options) for number in numbers}
    print(f"{about}, torchvision {torchvision.__version__}, one thread a process, batch {arguments.batch_size}, "
          f"{arguments.images} files of 500 x 375.")
    for number, table in loading.items():
        rows = [[name, f"{theirs:,.0f}", f"{own:,.0f}", f"{own / theirs:.2f}"] for name, (theirs, own) in table.items()]
        print("", *markdown_table([f"images/s, {number} workers", "torchvision", "rankup", "ratio"], rows), sep="\n")


if __name__ == "__main__":
    main()
