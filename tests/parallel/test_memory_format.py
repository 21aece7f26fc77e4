"""Which models get channels_last, and that a run saved in one memory format resumes in the other."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rankup.loop.tracked import Tracked
from train.config import Config
from train.parallel.model import build_optimizer, prepare
from train.workloads.images import build_model

CPU = torch.device("cpu")


def prepared(model: nn.Module, **settings: Any) -> bool:
    """Return whether the convolution kernels of the prepared model are in NHWC."""
    group: Any = SimpleNamespace(device=CPU)
    workload: Any = SimpleNamespace(model=model)
    kernels = [p for p in prepare(workload, Config(**settings), group).parameters() if p.ndim == 4]
    return bool(kernels) and all(k.is_contiguous(memory_format=torch.channels_last) for k in kernels)


def small(name: str) -> nn.Module:
    return build_model(name, channels=3, size=32, num_classes=10, dropout=0.0)


@pytest.mark.parametrize(("name", "settings", "expected"), [
    ("cnn", {}, True), ("resnet18", {}, True), ("mlp", {}, False),
    ("cnn", {"workload": "own:build"}, False),  # models of tutorials often call view()
    ("cnn", {"parallel": "fsdp"}, False), ("cnn", {"parallel": "horovod"}, False),  # need contiguous parameters
])
def test_image_models_are_in_channels_last_if_the_method_can(
    name: str, settings: dict[str, Any], expected: bool
) -> None:
    assert prepared(small(name), **settings) == expected


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("saved_as", [torch.channels_last, torch.contiguous_format])
def test_optimizer_resumes_with_a_state_of_the_other_memory_format(name: Any, saved_as: torch.memory_format) -> None:
    """Otherwise the fused kernels would silently pair wrong elements of a parameter and its momentum."""
    config = Config(optimizer=name)

    def gradients(model: nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))

    model = small("cnn").to(memory_format=saved_as)
    optimizer = build_optimizer(model, config, CPU)
    gradients(model, 1)
    optimizer.step()
    other = torch.contiguous_format if saved_as == torch.channels_last else torch.channels_last
    resumed = small("cnn").to(memory_format=other)
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer = build_optimizer(resumed, config, CPU)
    tracked = Tracked()
    tracked.add({"optimizer": resumed_optimizer})
    tracked.load({"optimizer": deepcopy(optimizer.state_dict())})
    for each, own in ((model, optimizer), (resumed, resumed_optimizer)):
        gradients(each, 2)
        own.step()
    for one, two in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)
