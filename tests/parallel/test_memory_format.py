"""channels_last: which models get it, on every start alike; what a run saved in one format goes on in the other."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankup.loop.tracked import Tracked
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from train.config import Config
from train.data import TensorSamples
from train.parallel.model import prepare
from train.parallel.optimizer import build_optimizer
from train.workloads import Workload
from train.workloads.vision_models import build_model

CPU = torch.device("cpu")


class OnePixelLess(nn.Module):
    """A model as tutorials write it. `flat`: how it flattens what the convolution returned."""

    def __init__(self, flat: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 2)
        self.norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8 * 7 * 7, 10)
        self.flat = flat

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(self.flat(self.norm(self.convolution(images))))
        return logits


def workload(model: nn.Module, *, channels: int = 3) -> Workload:
    images = torch.randint(256, (4, channels, 8, 8), dtype=torch.uint8)
    return Workload(
        model=model, train=TensorSamples(images, torch.arange(4)), evaluation=TensorSamples(images, torch.arange(4)),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0].float()), batch[1]),
        evaluate=lambda model, batch: {},
    )


def prepared(model: nn.Module, **settings: Any) -> tuple[bool, list[str]]:
    """Whether the kernels of the prepared model lie in NHWC, and what was said."""
    said: list[str] = []
    group: Any = SimpleNamespace(device=CPU, log=SimpleNamespace(info=said.append))
    model = prepare(workload(model), Config(**settings), group)
    kernels = [p for p in model.parameters() if p.ndim == 4]
    return bool(kernels) and all(k.is_contiguous(memory_format=torch.channels_last) for k in kernels), said


def small(name: str) -> nn.Module:
    return build_model(name, channels=3, size=32, num_classes=10, dropout=0.0)


def test_models_with_convolutions_are_in_channels_last_and_others_are_not() -> None:
    assert prepared(small("cnn")) == (True, [])
    assert prepared(small("resnet18")) == (True, [])
    assert prepared(small("mlp")) == (False, [])
    assert prepared(nn.Sequential(nn.Conv1d(3, 4, 3)), workload="own:build") == (False, [])


def test_memory_format_that_was_asked_for_is_taken() -> None:
    assert prepared(small("cnn"), channels_last=False) == (False, [])
    assert prepared(small("cnn"), channels_last=True) == (True, [])
    assert prepared(OnePixelLess(lambda x: x.view(len(x), -1)), workload="own:build", channels_last=True)[0]


@pytest.mark.parametrize("method", ["fsdp", "horovod"])
def test_methods_that_take_contiguous_parameters_only_get_those(method: str) -> None:
    assert prepared(small("cnn"), parallel=method) == (False, [])


def test_own_model_that_calls_view_stays_contiguous_and_is_told_why() -> None:
    """Most models of tutorials do, and have to run without a setting. The pass that finds it out leaves no trace."""
    torch.manual_seed(0)
    model = OnePixelLess(lambda x: x.view(x.size(0), -1))
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    channels_last, (said,) = prepared(model, workload="own:build")
    assert not channels_last
    assert said.startswith("channels_last is off: the model calls view()")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in (model, model.convolution, model.norm)] == [True, True, False]
    assert prepared(OnePixelLess(lambda x: x.reshape(len(x), -1)), workload="own:build") == (True, [])


def test_other_failures_of_an_own_model_are_left_to_the_training() -> None:
    def fail(features: torch.Tensor) -> torch.Tensor:
        raise ValueError("a mistake of the user")

    assert prepared(OnePixelLess(fail), workload="own:build") == (True, [])


# What was saved in the other format ---------------------------------------------------------------------------------


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


DIGITS = ("train", "--dataset", "digits", "--model", "cnn", "--tensorboard=false", "--limit-train", "704", "--lr",
          "0.02", "--schedule", "constant", "--log-every-steps", "1")


def train(forks: Forks, run: Path, *arguments: str) -> tuple[list[int], str]:
    return forks.run(*DIGITS, *arguments, "--name", run.name, "--run-dir", run.parent, world_size=2)


def test_auto_is_the_format_that_the_model_gets_and_may_not_change_in_a_run(forks: Forks, tmp_path: Path) -> None:
    for name, more in (("auto", ()), ("true", ("--channels-last",)), ("false", ("--no-channels-last",))):
        codes, output = train(forks, tmp_path / name, *more, "--max-steps", "4")
        assert codes == [0, 0], output
    digests = [result(tmp_path / name)["digest"] for name in ("auto", "true", "false")]
    assert digests[0] == digests[1] != digests[2]
    codes, output = train(forks, tmp_path / "auto", "--no-channels-last", "--max-steps", "6")
    assert codes == [2, 2]
    assert "channels_last: auto -> false" in output
