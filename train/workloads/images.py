"""Classification of images: those of data/sources, in memory or in files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rankup import UserError

from ..config import Config
from ..config.settings import Augment
from ..data import Samples, TensorSamples
from ..data.sources import load
from . import Workload
from .classification import Classification, confusion_pictures
from .vision_models import build_model

if TYPE_CHECKING:
    from ..data.file_samples import FileSamples


class Normalize:
    """uint8 [B, C, H, W] -> float32 [B, C, H, W] of mean 0 and deviation 1, in the images' memory format.

    `mean` and `std`: one per channel, of images / 255.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean = torch.tensor(mean).view(1, -1, 1, 1)
        self.std = torch.tensor(std).view(1, -1, 1, 1)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if self.mean.device != images.device:
            self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        # In place: to take 38 MB for each intermediate result of 64 photographs costs three times as much as the sums
        return images.to(torch.float32, copy=True).div_(255).sub_(self.mean).div_(self.std)


def build(config: Config) -> Workload:
    """The workload of `config.dataset` and `config.model`. Raises UserError."""
    train, test = load(config)
    channels, size = _shape(train)
    num_classes = len(train.classes)
    samples = _samples(train, config, augment=config.augment)
    model = build_model(config.model, channels=channels, size=size, num_classes=num_classes, dropout=config.dropout)
    task = Classification(
        num_classes=num_classes, label_smoothing=config.label_smoothing, prepare=Normalize(train.mean, train.std),
        top5=True,
    )
    return Workload(
        model=model, train=samples, evaluation=_samples(test, config, augment=False),
        loss=task.loss, evaluate=task.evaluate, predict=task.predict,
        data_name=train.name, data_origin=train.origin, classes=train.classes, unit="images",
        input_name=lambda index: f"test/{index}" if isinstance(test, TensorSamples) else test.paths[index],
        open_input=lambda path: _open_input(path, train, channels=channels, size=size),
        pictures=lambda sums: confusion_pictures(sums["confusion"], train.classes),
    )


def _samples(found: "TensorSamples | FileSamples", config: Config, *, augment: Augment) -> Samples:
    """Raises UserError for random crops of images that memory holds, whose edges are gone."""
    if isinstance(augment, str) and (isinstance(found, TensorSamples) or config.in_memory == "always"):
        raise UserError(f"augment must be true or false for images in memory, got {augment}. It crops image files.")
    if isinstance(found, TensorSamples):
        return replace(found, augment=augment is True, seed=config.seed, in_memory=config.in_memory != "never")
    files = replace(found, augment=augment, seed=config.seed)
    if config.in_memory != "always":
        return files
    images, labels = files.batch(torch.arange(len(files)), None)
    return TensorSamples(images, labels, augment=augment is True, mirror=found.mirror, seed=config.seed)


def _shape(found: "TensorSamples | FileSamples") -> tuple[int, int]:
    """Channels and size (height = width) of the images. Raises UserError if they are not square."""
    if not isinstance(found, TensorSamples):
        return 3, found.image_size
    channels, height, width = found.images.shape[1:]
    if height != width:
        raise UserError(f"{found.origin}: images must be square, got {height} x {width}. Set --image-size.")
    return channels, height


def _open_input(
    path: str, train: "TensorSamples | FileSamples", *, channels: int, size: int
) -> tuple[Samples, Callable[[int], str]]:
    """Samples from an image file or a folder of them, and their names by number. Their labels are unknown: all 0.

    They are prepared as those that the model was evaluated with.
    """
    from ..data.file_samples import FileSamples  # here: torchvision, which images in memory do without
    from ..data.sources.imagefolder import EXTENSIONS, MEAN, STD

    root = Path(path)
    found = [p for p in root.rglob("*") if p.name.lower().endswith(EXTENSIONS)] if root.is_dir() else [root]
    files = sorted(map(str, found))
    if not files or not root.exists():
        raise UserError(f"--input must be an image or a folder of images, got {path}, where there is none.")
    unknown = torch.zeros(len(files), dtype=torch.int64)
    margin = isinstance(train, FileSamples) and train.margin
    samples = FileSamples(
        tuple(files), unknown, ("?",), MEAN, STD, "input", path, size, margin=margin, channels=channels
    )
    return samples, lambda index: files[index]
