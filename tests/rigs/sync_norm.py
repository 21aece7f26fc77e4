"""torch's own SyncBatchNorm on CPUs, for a rank of a test, with formulas instead of kernels that only GPUs have.

What it exchanges with the other ranks, and what it counts, is unchanged."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankup.group.group import Group
from train import loop
from train.config import Config
from train.parallel.model import prepare
from train.workloads import Workload

Tensor = torch.Tensor


def convert() -> None:
    """Convert the model as --sync-bn does, which rankup refuses on CPUs."""
    for kernel in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        setattr(torch, f"batch_norm_{kernel.__name__}", kernel)
    # Both check only the device type
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None  # type: ignore[method-assign]
    forward = nn.SyncBatchNorm.forward

    def on_cpu(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", return_value="cpu"):
            return forward(self, input)

    nn.SyncBatchNorm.forward = on_cpu  # type: ignore[method-assign]

    def prepare_converted(workload: Workload, config: Config, group: Group, *, split: bool) -> nn.Module:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(workload.model)  # type: ignore[no-untyped-call]
        assert any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        return prepare(replace(workload, model=model), config, group, split=split)

    loop.prepare = prepare_converted  # type: ignore[attr-defined]


# The kernels, for [B, C]; https://arxiv.org/abs/1502.03167 ----------------------------------------------------------


def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(input, 0, correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats_with_counts(
    input: Tensor, means: Tensor, invstds: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:
    count, parts = counts.sum(), (counts / counts.sum())[:, None]
    mean = (parts * means).sum(0)
    variance = (parts * (invstds**-2 - eps + (means - mean) ** 2)).sum(0)
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(variance * count / (count - 1), momentum)
    return mean, (variance + eps).rsqrt()


def elemt(input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    return (input - mean) * invstd * weight + bias


def backward_reduce(
    grad: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *wanted: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, product = grad.sum(0), (grad * (input - mean)).sum(0)
    return total, product, product * invstd, total


def backward_elemt(
    grad: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, total: Tensor, product: Tensor,
    counts: Tensor,
) -> Tensor:
    count = counts.sum()
    return (grad - total / count - (input - mean) * invstd**2 * product / count) * invstd * weight
