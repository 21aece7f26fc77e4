"""The learning rate follows its formulas, and weight decay spares norms and biases."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from train.config import Config
from train.parallel.model import build_optimizer, rate_at


def half_a_wave(steps: int) -> list[float]:
    return [0.2 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]


RISE = [0.4 * step / 8 for step in range(1, 9)]


@pytest.mark.parametrize(("settings", "expected"), [
    ({"schedule": "constant"}, [0.4] * 40),
    ({"schedule": "step", "step_epochs": 2, "step_gamma": 0.1}, [0.4] * 20 + [0.04] * 20),
    ({"schedule": "cosine"}, half_a_wave(40)),
    ({"schedule": "constant", "warmup_steps": 8}, RISE + [0.4] * 32),
    ({"schedule": "step", "step_epochs": 2, "step_gamma": 0.1, "warmup_steps": 8}, RISE + [0.4] * 12 + [0.04] * 20),
    ({"schedule": "cosine", "warmup_steps": 8}, RISE + half_a_wave(32)),  # over the steps after warm-up
])
def test_rate_follows_the_formula_of_its_schedule(settings: dict[str, Any], expected: list[float]) -> None:
    config = Config(lr=0.4, **settings)
    found = [rate_at(config, step, total_steps=40, steps_per_epoch=10) for step in range(40)]
    assert found == pytest.approx(expected, rel=1e-12)


class Net(nn.Module):
    """A model with each kind of parameter, and with a frozen layer."""

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


def test_optimizers_are_fused_and_follow_the_settings() -> None:
    sgd = build_optimizer(nn.Linear(2, 2), Config(momentum=0.8, lr=0.3), CPU)
    adamw = build_optimizer(nn.Linear(2, 2), Config(optimizer="adamw", lr=0.3), CPU)
    assert isinstance(sgd, torch.optim.SGD)
    assert isinstance(adamw, torch.optim.AdamW)
    assert (sgd.defaults["momentum"], sgd.defaults["lr"], adamw.defaults["lr"]) == (0.8, 0.3, 0.3)
    assert sgd.defaults["fused"] is adamw.defaults["fused"] is True
