"""Attributes that torch keeps in modules are no state that a resume loses."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

from rankup.loop.unkept import Unkept


class Own(nn.Linear):  # a class of the script: torch puts `weight` into the attributes of those that it changes
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += isinstance(self, Counting)
        return super().forward(x)


class Counting(Own):
    pass


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def registered(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Double())
    return module


@pytest.mark.parametrize(("make", "shape", "named"), [
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)), (2, 3, 8, 8), []),
    (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1), (2, 5, 8), []),
    (lambda: nn.Sequential(prune.l1_unstructured(Own(4, 4), "weight", 0.3), spectral_norm(Own(4, 4))), (3, 4), []),
    (lambda: nn.Sequential(registered(Own(4, 4)), parametrizations.weight_norm(Own(4, 4))), (3, 4), []),
    (lambda: nn.DataParallel(Counting(4, 4)), (3, 4), ["model.module.calls"]),
    (lambda: torch.compile(nn.Sequential(Counting(4, 4)), backend="eager"), (3, 4), ["model._orig_mod.0.calls"]),
])
def test_attributes_of_torch_are_not_named(make: Callable[[], nn.Module], shape: tuple[int], named: list[str]) -> None:
    model, said = make(), list[str]()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    unkept = Unkept({"model": model, "sgd": sgd}, said.append, said.append)
    for _ in range(3):
        model.train()
        model(torch.randn(shape)).square().mean().backward()
        sgd.step()
        model.eval()
        with torch.no_grad():
            model(torch.randn(shape))
        unkept.look([], set(), outer=False, inner=False)
    assert [each.split(" changes ")[0] for each in said] == [f"track: the attribute {each}" for each in named]
