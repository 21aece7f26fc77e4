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
from train.data.samples import TensorSamples
from train.workloads import Workload

USUAL_S, SLOW_S = 0.005, 0.1


def short_windows() -> None:
    """Call it first in a process: windows of two steps of the slow rank, in place of seconds."""
    stragglers.WINDOW_S = 2 * SLOW_S


class Samples(TensorSamples):
    wait_s = 0.0

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        time.sleep(self.wait_s)
        return super().batch(indices, epoch)


def build(config: Config) -> Workload:
    slow = os.environ.get("RANK") == str(config.options["rank"])
    waits_s = {part: SLOW_S if slow and part == config.options["part"] else USUAL_S for part in ("data", "compute")}

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(waits_s["compute"])
        return functional.cross_entropy(model(batch[0]), batch[1])

    train, evaluation = (Samples(torch.ones(count, 8), torch.zeros(count, dtype=torch.int64)) for count in (600, 12))
    train.wait_s = waits_s["data"]
    return Workload(model=nn.Linear(8, 4), train=train, evaluation=evaluation, loss=loss, data_name="ones")
