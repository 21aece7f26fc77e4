"""What the loop over the steps works with."""

from dataclasses import dataclass, field

import torch
from torch import nn

from rankup import Group, Job

from ..config import Config
from ..data.loader import Loader
from ..parallel.method import Method
from ..workloads import Workload


@dataclass(slots=True, kw_only=True)
class Training:
    """Everything that the loop over the steps works with, on this rank."""

    config: Config
    job: Job
    method: Method
    workload: Workload
    plain: nn.Module  # the user's module, without wrappers: what is evaluated and saved
    model: nn.Module  # the same, wrapped for training with the other ranks
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loader: Loader
    divisors: list[float]  # of the losses of a step's micro-batches, see `Order`
    steps_per_epoch: int
    total_steps: int
    tables: dict[str, torch.Tensor] = field(default_factory=dict)  # of the last evaluation, for pictures

    @property
    def group(self) -> Group:
        return self.job.group
