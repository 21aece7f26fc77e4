"""The workload images: classification of images in memory or in files, and the models for it."""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call

from rankup import UserError

from ..config import Config
from ..data.samples import Samples, TensorSamples
from ..data.sources import load
from .classification import Classification
from .workload import Workload

if TYPE_CHECKING:
    from ..data.file_samples import FileSamples


def normalizer(mean: tuple[float, ...], std: tuple[float, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function: uint8 [B, C, H, W] -> float32 [B, C, H, W], mean 0, deviation 1, in the same memory format."""
    moments = torch.tensor([mean, std]).view(2, 1, -1, 1, 1)

    def normalize(images: torch.Tensor) -> torch.Tensor:
        nonlocal moments
        moments = moments.to(images.device)
        # In place: allocating 38 MB for each intermediate result of 64 photographs takes three times the arithmetic
        return images.to(torch.float32, copy=True).div_(255).sub_(moments[0]).div_(moments[1])

    return normalize


def build(config: Config, *, pretrained: bool = True) -> Workload:
    """Build the workload of `config.dataset` and `config.model`, with random weights. Raises UserError."""
    train: TensorSamples | FileSamples
    train, test = load(config)
    if isinstance(train, TensorSamples):
        if isinstance(augment := config.augment, str):  # these recipes need whole photographs
            raise UserError(f"augment must be true or false for images in memory, got {augment}. It crops image files.")
        channels, size = train.images.shape[1:3]
    else:
        channels, size = 3, train.image_size
    num_classes = len(train.classes)
    model = build_model(config.model, channels=channels, size=size, num_classes=num_classes, dropout=config.dropout)
    task = Classification(
        num_classes=num_classes, label_smoothing=config.label_smoothing, prepare=normalizer(train.mean, train.std)
    )
    return Workload(
        model=model, evaluation=test,
        train=replace(train, augment=config.augment, seed=config.seed),  # type: ignore[arg-type]  # checked above
        loss=task.loss, evaluate=task.evaluate, predict=task.predict,
        data_name=train.name, data_origin=train.origin, classes=train.classes, unit="images",
        input_name=lambda index: f"test/{index}" if isinstance(test, TensorSamples) else test.paths[index],
        open_input=lambda path: _open_input(path, train, channels=channels, size=size),
    )


def _open_input(
    path: str, train: "TensorSamples | FileSamples", *, channels: int, size: int
) -> tuple[Samples, Callable[[int], str]]:
    """Return samples from an image file or a folder of images, and their names by number. They are prepared as in an
    evaluation of the model. Their labels are unknown, so all are 0."""
    from torchvision.datasets.folder import is_image_file  # here because some data sets do not need torchvision

    from ..data.file_samples import FileSamples

    root = Path(path)
    found = [p for p in root.rglob("*") if is_image_file(p.name)] if root.is_dir() else [root]
    files = sorted(map(str, found))
    if not files or not root.exists():
        raise UserError(f"--input must be an image or a folder of images, got {path}, where there is none.")
    unknown = torch.zeros(len(files), dtype=torch.int64)
    margin = isinstance(train, FileSamples) and train.margin
    samples = FileSamples(
        tuple(files), unknown, ("?",), "input", path, image_size=size, margin=margin, channels=channels
    )
    return samples, lambda index: files[index]


# Models: a small CNN, an MLP, and any torchvision classifier by name, adapted to the data ----------------------------


def build_model(name: str, *, channels: int, size: int, num_classes: int, dropout: float) -> nn.Module:
    """Build a classifier with random weights: float [B, channels, size, size] -> logits [B, num_classes]. Raises
    UserError if the name is unknown, if the model can't take images of this size, or if it has no dropout to set."""
    if name == "cnn":
        return cnn(channels=channels, size=size, num_classes=num_classes, dropout=dropout)
    if name == "mlp":
        hidden = nn.Linear(channels * size * size, 256)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Dropout(dropout), nn.Linear(256, num_classes))

    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        close = get_close_matches(name, ["cnn", "mlp", *known], n=1)
        hint = f' Did you mean "{close[0]}"?' if close else ""
        raise UserError(f'model must be cnn, mlp or a torchvision classifier, got "{name}".{hint}')
    options: dict[str, object] = {"num_classes": num_classes}
    if name in ("googlenet", "inception_v3"):
        # Our loss can't use the second output of these models. torchvision warns that their own initialisation is slow.
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
            first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
            first.in_channels = channels
            first.weight = nn.Parameter(torch.empty(first.out_channels, channels, *first.kernel_size))
            first.reset_parameters()
        # Run the model on shapes alone, without data or arithmetic. It raises an error if images are too small
        shapes = {name: tensor.to("meta") for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        with torch.no_grad():
            functional_call(model.eval(), shapes, (torch.empty(2, channels, size, size, device="meta"),))
    except TypeError:
        if "dropout" not in options:
            raise
        raise UserError(f"dropout can't be set for model {name}, got {dropout:g}. Leave --dropout out.") from None
    except (ValueError, AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".!")
        got = f"got {size} x {size}: {reason}. Set --image-size (224 suits every model), or another --model."
        raise UserError(f"model {name} must get images of a size that it can take, {got}") from None
    return model.train()


def cnn(*, channels: int, size: int, num_classes: int, dropout: float) -> nn.Module:
    """Build a CNN of two convolutions and two linear layers, as LeNet-5 (LeCun et al. 1998), with ReLU and max pooling.
    It has no batch norm, whose statistics come from one rank's samples: N ranks would not train like one rank."""
    side = size // 4
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(dropout),
        nn.Linear(32 * side * side, 256), nn.ReLU(),
        nn.Linear(256, num_classes),
    )
