"""Where does a ball land? A workload of one's own, complete: python -m train.main train --workload throws:build"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from train.config import Config
from train.workloads import Sums, Workload

CLASSES = ("short", "hit", "far")


class Throws(Dataset[tuple[torch.Tensor, int]]):
    """Any map-style Dataset will do. This one computes; yours may read a file or a row of a table in __getitem__."""

    def __init__(self, first: int, count: int, *, noise: float) -> None:
        self.first, self.count, self.noise = first, count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        own = torch.Generator().manual_seed(self.first + index)
        speed, angle = 5 + 20 * torch.rand((), generator=own), math.pi / 2 * torch.rand((), generator=own)
        distance = float(speed**2 * torch.sin(2 * angle) / 9.81)
        features = torch.stack([speed / 25, angle]) + self.noise * torch.randn(2)  # noise: other numbers each epoch
        return features, 0 if distance < 10 else 1 if distance < 25 else 2


def build(config: Config) -> Workload:
    """Called once in each process, with the random state that the seed gives: all ranks begin with the same weights."""
    width = int(config.options.get("width", 64))  # --options.width 128
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(config.dropout), nn.Linear(width, len(CLASSES)))
    return Workload(
        model=model,
        train=Throws(0, 2000, noise=0.01),
        evaluation=Throws(2000, 501, noise=0.0),
        loss=loss,
        evaluate=evaluate,
        predict=predict,
        data_name="throws",
        classes=CLASSES,
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over this process's part of the global batch: DDP averages the gradients over all."""
    features, labels = batch
    return functional.cross_entropy(model(features), labels)


def evaluate(model: nn.Module, batch: Any) -> Sums:
    """Sums, not means: added over all batches and ranks, then divided by the count. Any other name is welcome.

    Leave it out where the mean of the loss is all that you want to know.
    """
    features, labels = batch
    logits = model(features)
    return {
        "count": torch.tensor(len(labels)),
        "loss": functional.cross_entropy(logits, labels, reduction="sum"),
        "accuracy": (logits.argmax(1) == labels).sum(),
    }


def predict(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A label and its probability for each sample. Leave it out where there is nothing to predict."""
    probabilities, labels = model(batch[0]).softmax(1).max(1)
    return labels, probabilities
