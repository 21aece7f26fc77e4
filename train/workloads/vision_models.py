"""Models for images: a small CNN, an MLP, and any torchvision classifier by name, fitted to the data."""

from difflib import get_close_matches

import torch
from torch import nn
from torch.func import functional_call

from rankup import UserError


def build_model(name: str, *, channels: int, size: int, num_classes: int, dropout: float) -> nn.Module:
    """A classifier: float [B, channels, size, size] -> logits [B, num_classes], with random weights.

    `name`: cnn, mlp, or one of torchvision's classifiers. Raises UserError for an unknown name, for images of a size
    that the model cannot take, and for dropout where it has none.
    """
    if name == "cnn":
        return cnn(channels=channels, size=size, num_classes=num_classes, dropout=dropout)
    if name == "mlp":
        hidden = nn.Linear(channels * size * size, 256)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Dropout(dropout), nn.Linear(256, num_classes))
    return _torchvision(name, channels=channels, size=size, num_classes=num_classes, dropout=dropout)


def cnn(*, channels: int, size: int, num_classes: int, dropout: float) -> nn.Module:
    """Two convolutions and two linear layers, after LeNet-5 (LeCun et al. 1998) with today's parts.

    0.41 million parameters for 28 x 28 pixels. It has no batch norm, whose statistics are those of one rank's samples:
    N ranks would not train like one. Raises UserError for images smaller than 4 x 4.
    """
    side = size // 4
    if side == 0:
        raise UserError(f"model cnn needs images of at least 4 x 4, got {size} x {size}. Set --image-size.")
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(dropout),
        nn.Linear(32 * side * side, 256), nn.ReLU(),
        nn.Linear(256, num_classes),
    )


def _torchvision(name: str, *, channels: int, size: int, num_classes: int, dropout: float) -> nn.Module:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        close = get_close_matches(name, ["cnn", "mlp", *known], n=1)
        raise UserError(
            f'model must be cnn, mlp or a torchvision classifier, got "{name}".'
            + (f' Did you mean "{close[0]}"?' if close else "")
        )
    options: dict[str, object] = {"num_classes": num_classes}
    if name in ("googlenet", "inception_v3"):
        # No second output, which our loss does not take, and not the slow initialisation that torchvision warns about.
        options |= {"aux_logits": False, "init_weights": False}
    if name.startswith("vit_"):
        options["image_size"] = size
    if name.startswith("maxvit_"):
        options["input_size"] = (size, size)
    if dropout > 0:
        options["dropout"] = dropout
    try:
        model: nn.Module = models.get_model(name, weights=None, **options)
        if channels != 3:
            _first_convolution_for(model, channels)
        _dry_run(model, channels=channels, size=size)
    except TypeError:
        if "dropout" not in options:
            raise
        raise UserError(f"dropout can't be set for model {name}, got {dropout:g}. Leave --dropout out.") from None
    except (ValueError, AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".!")
        raise UserError(
            f"model {name} must get images of a size that it can take, got {size} x {size}: {reason}. "
            "Set --image-size (224 suits every model), or choose another --model."
        ) from None
    return model


def _dry_run(model: nn.Module, *, channels: int, size: int) -> None:
    """Pass shapes through the model, without data or arithmetic. Raises what the model raises.

    An image that is too small would otherwise fail in the first step, after the data were loaded.
    """
    shapes = {name: tensor.to("meta") for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    model.eval()
    with torch.no_grad():
        functional_call(model, shapes, (torch.empty(2, channels, size, size, device="meta"),))
    model.train()


def _first_convolution_for(model: nn.Module, channels: int) -> None:
    """Make the first convolution one of `channels` input channels, with torch's own initial weights."""
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    first.in_channels = channels
    first.weight = nn.Parameter(torch.empty(first.out_channels, channels, *first.kernel_size))
    first.reset_parameters()
