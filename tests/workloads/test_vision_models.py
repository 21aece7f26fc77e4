"""The small models, torchvision's classifiers for any number of channels and classes, and models that are refused."""

import warnings
from typing import Any

import pytest
import torch

from rankup.errors import UserError
from train.workloads.images import build_model

# Models that need special treatment, and some common ones, with the smallest round image size that they accept
FAMILIES = {
    "densenet121": 32, "efficientnet_b0": 28, "googlenet": 28, "inception_v3": 96, "mobilenet_v3_small": 28,
    "resnet18": 28, "squeezenet1_1": 28, "swin_t": 28, "vit_b_16": 32,
}


def build(
    name: str, *, channels: int = 1, size: int = 28, num_classes: int = 10, dropout: float = 0.0
) -> torch.nn.Module:
    return build_model(name, channels=channels, size=size, num_classes=num_classes, dropout=dropout)


@pytest.mark.parametrize("name", FAMILIES)
def test_classifiers_accept_grey_images_and_ten_classes(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build(name, size=FAMILIES[name])
    assert model.training
    model.eval()
    with torch.no_grad():
        out = model(torch.randn(2, 1, FAMILIES[name], FAMILIES[name]))
    assert out.shape == (2, 10)
    assert out.isfinite().all()


@pytest.mark.parametrize(("name", "channels", "size", "num_classes"),
                         [("cnn", 3, 33, 2), ("mlp", 3, 32, 100), ("resnet18", 3, 33, 2)])
def test_model_fits_channels_size_and_classes(name: str, channels: int, size: int, num_classes: int) -> None:
    model = build(name, channels=channels, size=size, num_classes=num_classes)
    assert model(torch.randn(2, channels, size, size)).shape == (2, num_classes)


@pytest.mark.parametrize("name", ["cnn", "googlenet"])
def test_initial_weights_come_from_the_seed(name: str) -> None:
    digests = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        digests.append(torch.cat([p.detach().flatten() for p in build(name).parameters()]))
    assert torch.equal(digests[0], digests[1])
    assert not torch.equal(digests[0], digests[2])


@pytest.mark.parametrize("name", ["cnn", "mlp", "vit_b_16", "mobilenet_v3_small"])
def test_dropout_is_passed_to_the_model(name: str) -> None:
    model = build(name, size=32, dropout=0.25)
    assert 0.25 in {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}


@pytest.mark.parametrize(("name", "more", "message"), [
    *((name, {"size": size}, f"^model {name} must get images of a size that it can take, got {size} x {size}: .*"
       r"Set --image-size \(224 suits every model\), or another --model\.$")
      for name, size in (("alexnet", 32), ("inception_v3", 64), ("vit_b_16", 28), ("maxvit_t", 32))),
    ("resnet-18", {}, 'got "resnet-18". Did you mean "resnet18'),
    ("cnnn", {}, 'got "cnnn". Did you mean "cnn'),
    ("quantized_resnet18", {}, 'or a torchvision classifier, got "quantized_resnet18"'),
    ("resnet18", {"dropout": 0.3}, r"dropout can't be set for model resnet18, got 0.3. Leave --dropout out."),
])
def test_impossible_model_is_refused_in_one_line(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(name, **more)
    assert "\n" not in str(caught.value)
