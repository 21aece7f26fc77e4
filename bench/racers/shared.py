"""The model, images, order of images, clock and evaluation that all entrants of the race share.

An entrant is a user's script with its own loop. Of rankup it uses only `derive_seed`, the seed of an epoch's order.
`build` below gives the same model and data to rankup itself, as `--workload bench.racers.shared:build`.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

from rankup.seeds import derive_seed
from train.config import Config
from train.data.samples import TensorSamples
from train.workloads import Workload
from train.workloads.classification import Classification

SEED, LR, MOMENTUM = 0, 0.05, 0.9  # each entrant uses SGD at a constant rate and without weight decay
MEAN, STD = 0.286, 0.353  # of Fashion-MNIST's training images / 255


@dataclass(frozen=True)
class Task:
    """The training that an entrant runs. `batch_size` is global. `precision`: fp32 or bf16, by autocast.

    `data`: the folder that has torchvision's FashionMNIST. `result`: the JSON file that rank 0 writes. `variant`: a
    choice that the entrant's own script understands.
    """

    data: str
    batch_size: int
    warm_up: int
    steps: int
    precision: str
    result: str
    variant: str

    @property
    def share(self) -> int:
        """The number of samples of each batch for one process."""
        return self.batch_size // world_size()

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16")


def load_images(data: str, *, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images and labels in memory: uint8 [N, 1, 28, 28] and int64 [N]."""
    found = torchvision_set(data, train=train, transform=None)
    return found.data[:, None], found.targets


def torchvision_set(data: str, *, train: bool, transform: Any) -> Any:
    """Return torchvision's own data set, which gives single samples and passes PIL images to `transform`."""
    from torchvision.datasets import FashionMNIST

    return FashionMNIST(data, train=train, transform=transform)


def build_model() -> nn.Module:
    """Return a CNN of 105,866 parameters, float [B, 1, 28, 28] -> logits [B, 10], with the same weights everywhere."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )


def read_task() -> Task:
    """Return the task that race.py passes as JSON in the first argument. Also set torch to one thread."""
    torch.set_num_threads(1)
    return Task(**json.loads(sys.argv[1]))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Convert uint8 to float32 with mean 0 and standard deviation 1."""
    return images.float().div_(255).sub_(MEAN).div_(STD)


class SameOrder(DistributedSampler[Any]):
    """torch's sampler with rankup's permutation of each epoch, so that all entrants see the same batches."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(derive_seed(SEED, epoch) - self.seed)


class InMemory(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images in memory that a DataLoader fetches a batch at a time, through torch's `__getitems__`.

    torch, Accelerate and Lightning have no faster way, so no entrant waits for its loader. Use `collate_fn=as_it_is`.
    """

    def __init__(self, task: Task) -> None:
        self.images, self.labels = load_images(task.data, train=True)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(indices)
        return self.images[chosen], self.labels[chosen]


def as_it_is(batch: Any) -> Any:
    """Collate nothing: the batch is already complete."""
    return batch


class Clock:
    """The seconds from the end of step `warm_up` to the end of the last step, on this process's clock."""

    def __init__(self, task: Task) -> None:
        self.task, self.done, self.began_s, self.seconds = task, 0, 0.0, 0.0

    def epochs(self, steps_per_epoch: int) -> int:
        """Return how many passes over the data give enough steps."""
        return -(-self.task.steps // steps_per_epoch)

    def step(self) -> bool:
        """Count a finished step. Return whether it was the last."""
        self.done += 1
        if self.done in (self.task.warm_up, self.task.steps):
            now_s = time.perf_counter()
            self.seconds, self.began_s = now_s - self.began_s, now_s
        return self.done == self.task.steps


def finish(task: Task, clock: Clock, model: nn.Module) -> None:
    """Let rank 0 evaluate the model on all test images and write the result. `model` must not be wrapped in DDP."""
    assert clock.done == task.steps, f"{clock.done} of {task.steps} steps"
    if rank() == 0:
        _evaluate(task, clock, model)
    if torch.distributed.is_initialized():
        # Without it, a process that ended first was aborted by its own C++ threads in 2 of 20 trainings
        torch.distributed.barrier()


def _evaluate(task: Task, clock: Clock, model: nn.Module) -> None:
    images, labels = load_images(task.data, train=False)
    model.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for part, answer in zip(images.split(512), labels.split(512), strict=True):
            logits = model(normalize(part))
            right += int((logits.argmax(1) == answer).sum())
            loss += float(nn.functional.cross_entropy(logits, answer, reduction="sum"))
    speed = (task.steps - task.warm_up) * task.batch_size / clock.seconds
    result = {"images_per_s": speed, "accuracy": right / len(labels), "loss": loss / len(labels)}
    Path(task.result).write_text(json.dumps(result))


def build(config: Config) -> Workload:
    """Give the same model and data to rankup, in the form in which users bring their own."""
    data, kind = config.options["data"], Classification(num_classes=10, label_smoothing=0.0, prepare=normalize)
    return Workload(
        model=build_model(), train=TensorSamples(*load_images(data, train=True)),
        evaluation=TensorSamples(*load_images(data, train=False)), loss=kind.loss, evaluate=kind.evaluate,
        data_name="Fashion-MNIST", unit="images",
    )
