"""channels_last: which models get it, on every start alike; what a run saved in one format goes on in the other."""

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
    """Whether the kernels of the prepared model lie in NHWC."""
    group: Any = SimpleNamespace(device=CPU)
    workload: Any = SimpleNamespace(model=model)
    kernels = [p for p in prepare(workload, Config(**settings), group).parameters() if p.ndim == 4]
    return bool(kernels) and all(k.is_contiguous(memory_format=torch.channels_last) for k in kernels)


def small(name: str) -> nn.Module:
    return build_model(name, channels=3, size=32, num_classes=10, dropout=0.0)


@pytest.mark.parametrize(("name", "settings", "expected"), [
    ("cnn", {}, True), ("resnet18", {}, True), ("mlp", {}, False),
    ("cnn", {"workload": "own:build"}, False),  # most models of tutorials call view()
    ("cnn", {"parallel": "fsdp"}, False), ("cnn", {"parallel": "horovod"}, False),  # contiguous parameters only
])
def test_models_for_images_are_in_channels_last_where_the_method_can(
    name: str, settings: dict[str, Any], expected: bool
) -> None:
    assert prepared(small(name), **settings) == expected


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("saved_as", [torch.channels_last, torch.contiguous_format])
def test_optimizer_goes_on_with_what_was_saved_in_the_other_format(name: Any, saved_as: torch.memory_format) -> None:
    """The fused kernels would pair wrong elements of a parameter and its momentum, without a word."""
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
