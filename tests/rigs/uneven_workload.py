"""A workload in which one rank is slower: `--options.part data`, `compute` or `none`, `--options.rank 1`.

Ranks sleep in place of working, so that they do not take the CPU from each other, and the slow one sleeps longest.
"""

import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rankup.observe import stragglers
from train.config import Config
from train.workloads import Workload

USUAL_S, SLOW_S = 0.005, 0.1
CLASSES = 4


def short_windows() -> None:
    """Call it first in a process: windows of two steps of the slow rank, in place of seconds."""
    stragglers.WINDOW_S = 2 * SLOW_S


class Samples:
    """Made-up points."""

    def __init__(self, count: int, wait_s: float) -> None:
        generator = torch.Generator().manual_seed(count)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        self.points = torch.randn(count, 8, generator=generator)
        self.wait_s = wait_s

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.wait_s)
        return self.points[indices], self.labels[indices]


def build(config: Config) -> Workload:
    slow = os.environ.get("RANK") == str(config.options["rank"])
    waits_s = {part: SLOW_S if slow and part == config.options["part"] else USUAL_S for part in ("data", "compute")}

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(waits_s["compute"])
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
        return {"count": torch.tensor(len(batch[1])), "loss": functional.cross_entropy(model(batch[0]), batch[1]) * 0}

    return Workload(
        model=nn.Linear(8, CLASSES), train=Samples(600, waits_s["data"]), evaluation=Samples(12, 0.0), loss=loss,
        evaluate=evaluate, data_name="made-up points",
    )
