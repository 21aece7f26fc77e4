"""A workload of your own, which learns on which of two rings a point is: --workload my_job:build --data-dir /data"""

import csv
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from train.config import Config
from train.workloads import Sums, TensorSamples, Workload

HELD_BACK = 5  # every fifth row is used for evaluation


def build(config: Config) -> Workload:
    """Return the workload. Each process calls this once, after the seed has set the random state."""
    with (Path(config.data_dir or ".") / "points.csv").open() as lines:
        rows = [[float(row["x"]), float(row["y"]), float(row["ring"])] for row in csv.DictReader(lines)]
    points, rings = torch.tensor(rows)[:, :2], torch.tensor(rows)[:, 2].long()
    kept = torch.arange(len(rows)) % HELD_BACK != 0
    return Workload(
        model=nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)),
        train=TensorSamples(points[kept], rings[kept]),
        evaluation=TensorSamples(points[~kept], rings[~kept]),
        loss=loss,
        evaluate=evaluate,
        data_name="rings",
        classes=("inner", "outer"),
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss over this process's part of the global batch."""
    points, rings = batch
    return functional.cross_entropy(model(points), rings)


def evaluate(model: nn.Module, batch: Any) -> Sums:
    """Return sums. The program adds them over all batches and processes, and divides by the count."""
    points, rings = batch
    scores = model(points)
    return {
        "count": torch.tensor(len(rings)),
        "loss": functional.cross_entropy(scores, rings, reduction="sum"),
        "accuracy": (scores.argmax(1) == rings).sum(),
    }
