"""The learning rate against its formulas, and which parameters decay."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from train.config import Config
from train.parallel.optimizer import build_optimizer, peak_rate, rate_at


def rates(total_steps: int, steps_per_epoch: int = 10, **settings: Any) -> list[float]:
    config = Config(**{"lr": 0.4, **settings})
    counts = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    return [rate_at(config, step, **counts) for step in range(total_steps)]


# Schedules ------------------------------------------------------------------------------------------------------


def test_constant_rate_stays() -> None:
    assert rates(25, schedule="constant") == [0.4] * 25


def test_step_rate_falls_by_gamma_each_so_many_epochs() -> None:
    found = rates(60, schedule="step", step_epochs=2, step_gamma=0.1)
    assert found == pytest.approx([0.4] * 20 + [0.04] * 20 + [0.004] * 20, rel=1e-12)


def test_cosine_rate_is_half_a_wave_from_the_peak_to_zero() -> None:
    found = rates(100, schedule="cosine")
    assert found == pytest.approx([0.2 * (1 + math.cos(math.pi * step / 100)) for step in range(100)], rel=1e-12)
    assert found[0] == 0.4
    assert found[50] == pytest.approx(0.2)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "step", "cosine"])
def test_warm_up_rises_to_the_peak_in_equal_steps(schedule: str) -> None:
    found = rates(40, schedule=schedule, warmup_steps=8, step_epochs=100)
    assert found[:8] == pytest.approx([0.4 * step / 8 for step in range(1, 9)], rel=1e-12)
    assert found[8] == pytest.approx(0.4)


def test_cosine_after_a_warm_up_spans_the_steps_that_are_left() -> None:
    found = rates(40, schedule="cosine", warmup_steps=8)
    assert found[8:] == pytest.approx([0.2 * (1 + math.cos(math.pi * step / 32)) for step in range(32)], rel=1e-12)


# Scaling with the global batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "batch_size", "expected"),
    [("none", 512, 0.1), ("linear", 512, 0.4), ("sqrt", 512, 0.2), ("linear", 64, 0.05), ("linear", 128, 0.1),
     ("sqrt", 128, 0.1)],
)
def test_peak_scales_with_the_global_batch(scaling: Any, batch_size: int, expected: float) -> None:
    config = Config(lr=0.1, lr_base_batch=128, lr_scaling=scaling, batch_size=batch_size)
    assert peak_rate(config) == pytest.approx(expected, rel=1e-12)
    # the warm-up leads to the scaled peak: that is what it is for
    warm = config.model_copy(update={"warmup_steps": 10, "schedule": "constant"})
    assert rate_at(warm, 9, total_steps=100, steps_per_epoch=10) == pytest.approx(expected, rel=1e-12)


# Optimizers -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """One of each kind of parameter, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.layer_norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


CPU = torch.device("cpu")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weight_decay_spares_norms_and_biases(optimizer: Any) -> None:
    model = Net()
    built = build_optimizer(model, Config(optimizer=optimizer, weight_decay=0.01), CPU)
    decay = {id(p): group["weight_decay"] for group in built.param_groups for p in group["params"]}
    found = {name: decay.get(id(p)) for name, p in model.named_parameters()}
    assert found == {
        "conv.weight": 0.01, "conv.bias": 0.0, "norm.weight": 0.0, "norm.bias": 0.0, "layer_norm.weight": 0.0,
        "layer_norm.bias": 0.0, "linear.weight": 0.01, "linear.bias": 0.0, "frozen.weight": None, "frozen.bias": None,
    }


def test_optimizers_are_fused_and_of_the_settings() -> None:
    sgd = build_optimizer(nn.Linear(2, 2), Config(momentum=0.8, lr=0.3), CPU)
    adamw = build_optimizer(nn.Linear(2, 2), Config(optimizer="adamw", lr=0.3), CPU)
    assert isinstance(sgd, torch.optim.SGD)
    assert isinstance(adamw, torch.optim.AdamW)
    assert (sgd.defaults["momentum"], sgd.defaults["lr"], adamw.defaults["lr"]) == (0.8, 0.3, 0.3)
    assert sgd.defaults["fused"] is adamw.defaults["fused"] is True


