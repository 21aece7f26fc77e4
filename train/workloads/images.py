"""Classification of images: Fashion-MNIST, MNIST, CIFAR-10, digits, folders of files, made-up ones."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from train.config import Config
from train.data import Samples, TensorSamples
from train.data.random_numbers import random_numbers
from train.data.samples import shift_and_flip
from train.data.sources import load
from train.data.sources.sets import FileSet, ImageSet
from train.errors import DataError
from train.workloads.pictures import confusion_picture, grid_picture
from train.workloads.vision_models import build_model
from train.workloads.workload import Sums, Workload


class FileSamples:
    """Image files, decoded when a batch asks for them: by DataLoader workers, as many as `num_workers` says."""

    def __init__(self, files: FileSet, *, augment: bool = False, seed: int = 0, channels: int = 3) -> None:
        self.files, self.augment, self.seed, self.channels = files, augment, seed, channels

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.stack([self.files.load(index) for index in indices.tolist()])
        if self.channels == 1:
            images = images.float().mean(1, keepdim=True).round().to(torch.uint8)
        if self.augment and epoch is not None:
            images = shift_and_flip(images, random_numbers(self.seed, epoch, indices, 3), mirror=self.files.mirror)
        return images, self.files.labels[indices]


def build(config: Config) -> Workload:
    """The workload of `config.dataset` and `config.model`. Raises DataError, ConfigError."""
    train, evaluation = load(config)
    if config.workload == "images" and len(train.classes) != len(evaluation.classes):
        raise DataError(f"{train.origin}: train and test must have the same classes, got {train.classes} and others.")
    samples = _samples(train, config, augment=config.augment)
    channels, size = _shape(train)
    num_classes = len(train.classes)
    model = build_model(
        config.model, channels=channels, size=size, num_classes=num_classes, dropout=config.dropout
    )
    task = Classification(train.mean, train.std, num_classes=num_classes, label_smoothing=config.label_smoothing)
    held_back = _samples(evaluation, config, augment=False)
    return Workload(
        model=model,
        train=samples,
        evaluation=held_back,
        loss=task.loss,
        evaluate=task.evaluate,
        predict=task.predict,
        data_name=train.name,
        data_origin=train.origin,
        classes=train.classes,
        unit="images",
        input_name=lambda index: evaluation.paths[index] if isinstance(evaluation, FileSet) else f"test/{index}",
        open_input=lambda path: _open_input(path, channels=channels, size=size),
        pictures=lambda model, sums, device: _pictures(task, model, held_back, sums, device, train.classes),
    )


class Classification:
    """What a batch of uint8 images [B, C, H, W] and labels [B] means to a classifier."""

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], *, num_classes: int, label_smoothing: float
    ) -> None:
        self.mean = torch.tensor(mean).view(1, -1, 1, 1)
        self.std = torch.tensor(std).view(1, -1, 1, 1)
        self.num_classes, self.label_smoothing = num_classes, label_smoothing

    def normalised(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 [B, C, H, W] -> float [B, C, H, W] of mean 0 and deviation 1, in the images' memory format."""
        if self.mean.device != images.device:
            self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        return (images.float() / 255 - self.mean) / self.std

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        logits = model(self.normalised(images))
        labels = labels.to(logits.device)  # DataParallel gathers the outputs where it was told to
        return functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def evaluate(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Sums:
        images, labels = batch
        logits = model(self.normalised(images)).float()
        guess = logits.argmax(1)
        sums = {
            "count": torch.tensor(len(labels)),
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": (guess == labels).sum(),
            "confusion": torch.bincount(
                labels * self.num_classes + guess, minlength=self.num_classes**2
            ).view(self.num_classes, self.num_classes),
        }
        if self.num_classes > 5:
            sums["accuracy_top5"] = (logits.topk(5, 1).indices == labels[:, None]).sum()
        return sums

    def predict(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels, int64 [B], and their probabilities, float [B]."""
        probabilities, labels = model(self.normalised(batch[0])).float().softmax(1).max(1)
        return labels, probabilities


def _samples(found: ImageSet | FileSet, config: Config, *, augment: bool) -> Samples:
    if isinstance(found, ImageSet):
        return TensorSamples(
            found.images, found.labels, augment=augment, mirror=found.mirror, seed=config.seed,
            in_memory=config.in_memory != "never",
        )
    files = FileSamples(found, augment=augment, seed=config.seed)
    if config.in_memory == "always":
        images, labels = files.batch(torch.arange(len(found)), None)
        return TensorSamples(images, labels, augment=augment, seed=config.seed)
    return files


def _shape(found: ImageSet | FileSet) -> tuple[int, int]:
    if isinstance(found, FileSet):
        return 3, found.image_size
    channels, height, width = found.images.shape[1:]
    if height != width:
        raise DataError(f"{found.origin}: images must be square, got {height} x {width}. Set --image-size.")
    return channels, height


def _open_input(path: str, *, channels: int, size: int) -> tuple[Samples, Callable[[int], str]]:
    """Samples from an image file or a folder of them, to be predicted; their labels are unknown, 0."""
    from train.data.sources.imagefolder import EXTENSIONS, MEAN, STD

    root = Path(path)
    found = [p for p in root.rglob("*") if p.name.lower().endswith(EXTENSIONS)] if root.is_dir() else [root]
    files = sorted(map(str, found))
    if not files or not root.exists():
        raise DataError(f"--input must be an image or a folder of images, got {path}, where there is none.")
    unknown = torch.zeros(len(files), dtype=torch.int64)
    listed = FileSet(tuple(files), unknown, ("?",), MEAN, STD, "input", path, size)
    return FileSamples(listed, channels=channels), lambda index: files[index]


def _pictures(
    task: Classification, model: nn.Module, samples: Samples, sums: Sums, device: torch.device, classes: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """The confusion matrix, and the first misclassified images of the first 2,000."""
    pictures = {"eval/confusion": confusion_picture(sums["confusion"], classes)}
    images, labels = samples.batch(torch.arange(min(2000, len(samples))), None)
    with torch.no_grad():
        guesses = [task.predict(model, (part.to(device),))[0].cpu() for part in images.split(250)]  # type: ignore[arg-type]
    guess = torch.cat(guesses)
    wrong = (guess != labels).nonzero().flatten()[:25].tolist()
    if wrong:
        captions = [f"{classes[int(labels[i])]:.9} / {classes[int(guess[i])]:.9}" for i in wrong]
        pictures["eval/misclassified"] = grid_picture(images[wrong], captions)
    return pictures


