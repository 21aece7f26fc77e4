"""The plain model: on its device, in its precision, compiled, and the same on all ranks."""

import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from train.config import Config
from train.errors import ConfigError, UserError
from train.group.group import Group


def prepare(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Move a model to its device, in its memory format, with SyncBatchNorm if asked for. Raises ConfigError."""
    if config.sync_bn:
        if device.type == "cpu":
            raise ConfigError("sync_bn needs GPUs (torch has no CPU version), got device cpu. Leave --sync-bn out.")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model


def autocast(config: Config, device: torch.device) -> AbstractContextManager[None]:
    """Around a forward pass: torch picks the type of each operation, and weights stay in fp32. Nothing with fp32."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision])


def compile_model(model: nn.Module, device: torch.device) -> nn.Module:
    """The model through torch.compile. Raises ConfigError where the machine lacks what it needs.

    It has to happen inside DDP: around it, dynamo breaks the graph at DDP's own forward and leaves an nn.Sequential
    uncompiled without a word.
    """
    _check_compiler(device)
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled


def _check_compiler(device: torch.device) -> None:
    """torch.compile writes C++ for the CPU: say in one line what a missing compiler would say in two hundred."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [] if shutil.which("g++") or shutil.which("clang++") or shutil.which("cl") else ["a C++ compiler"]
    missing += [] if header.exists() else [f"Python's headers ({header})"]
    if device.type in ("cpu", "cuda") and missing:
        raise ConfigError(f"compile needs {' and '.join(missing)} on this machine. Install it, or leave --compile out.")


def check_same_shapes(group: Group, model: nn.Module) -> None:
    """Raises UserError where ranks built different models, as with other code on one node. Before anything is
    exchanged: DDP would compare sizes only, and name a parameter by its number."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for rank, other in enumerate(group.gather(shapes)):
        if other != shapes:
            name = next(n for n in [*shapes, *other] if shapes.get(n) != other.get(n))
            raise UserError(
                f"the model must be the same on all ranks, got {name} {shapes.get(name)} on rank {group.rank} and "
                f"{other.get(name)} on rank {rank} ({group.hosts[rank]}). Put the same code on all nodes."
            )
