"""What all entrants of the race share: the model, the images, their order, the clock and the evaluation.

An entrant is a user's script: it has its own loop, and knows nothing of rankup but for `derive_seed`, the seed of an
epoch's order. `build` below hands the same things to rankup itself, as `--workload tests.bench.racers.shared:build`.
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

SEED, LR, MOMENTUM = 0, 0.05, 0.9  # SGD without weight decay at a constant rate: each entrant has it in a few words
MEAN, STD = 0.286, 0.353  # of Fashion-MNIST's training images / 255


@dataclass(frozen=True)
class Task:
    """What is trained, and how long. `batch_size` is global; `precision`: fp32 or bf16, by autocast.

    `data`: the folder that holds torchvision's FashionMNIST. `result`: the JSON file that rank 0 writes. `variant`: a
    word for the entrant's own script.
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
        """Samples of a batch for each process."""
        return self.batch_size // world_size()

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16")


def load_images(data: str, *, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [N, 1, 28, 28] and int64 [N], all in memory."""
    found = torchvision_set(data, train=train, transform=None)
    return found.data[:, None], found.targets


def torchvision_set(data: str, *, train: bool, transform: Any) -> Any:
    """The data set as torchvision's users have it: sample by sample, as PIL images before `transform`."""
    from torchvision.datasets import FashionMNIST

    return FashionMNIST(data, train=train, transform=transform)


def build_model() -> nn.Module:
    """Float [B, 1, 28, 28] -> logits [B, 10], 105,866 parameters. Equal weights in each process and each entrant."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )


def read_task() -> Task:
    """The task as race.py gives it to a script: JSON, the first argument. Sets one thread a process."""
    torch.set_num_threads(1)
    return Task(**json.loads(sys.argv[1]))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def normalize(images: torch.Tensor) -> torch.Tensor:
    """uint8 -> float32 of mean 0 and deviation 1."""
    return images.float().div_(255).sub_(MEAN).div_(STD)


class SameOrder(DistributedSampler[Any]):
    """torch's sampler, but the permutation of an epoch is rankup's, so that all entrants see the same batches."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(derive_seed(SEED, epoch) - self.seed)


class InMemory(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images in memory that a DataLoader fetches a batch at a time, through torch's `__getitems__`.

    Nothing in torch, Accelerate or Lightning is faster: no entrant waits for its loader. Use `collate_fn=as_it_is`.
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
    """A collate function for batches that are whole already."""
    return batch


class Clock:
    """The seconds from the end of step `warm_up` to the end of the last step, on this process's clock."""

    def __init__(self, task: Task) -> None:
        self.task, self.done, self.began_s, self.seconds = task, 0, 0.0, 0.0

    def epochs(self, steps_per_epoch: int) -> int:
        """Passes over the data that have enough steps."""
        return -(-self.task.steps // steps_per_epoch)

    def step(self) -> bool:
        """Count a finished step. Returns whether it was the last."""
        self.done += 1
        if self.done in (self.task.warm_up, self.task.steps):
            now_s = time.perf_counter()
            self.seconds, self.began_s = now_s - self.began_s, now_s
        return self.done == self.task.steps


def finish(task: Task, clock: Clock, model: nn.Module) -> None:
    """Rank 0 evaluates the model on all test images, and writes the result. `model`: without DDP around it."""
    assert clock.done == task.steps, f"{clock.done} of {task.steps} steps"
    if rank() == 0:
        _evaluate(task, clock, model)
    if torch.distributed.is_initialized():
        # Twice in twenty trainings a process that ended before the other did was aborted by its own C++ threads
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
    """The same for rankup: what a user writes to train a model and images of their own."""
    data, kind = config.options["data"], Classification(num_classes=10, label_smoothing=0.0, prepare=normalize)
    return Workload(
        model=build_model(), train=TensorSamples(*load_images(data, train=True)),
        evaluation=TensorSamples(*load_images(data, train=False)), loss=kind.loss, evaluate=kind.evaluate,
        data_name="Fashion-MNIST", unit="images",
    )
