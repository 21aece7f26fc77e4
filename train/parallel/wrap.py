"""How a model is trained by several ranks: wraps it, and says how to step."""

import contextlib
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from train.config import Config
from train.errors import ConfigError
from train.group.group import Group

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ONE_BUCKET_MB = 100_000  # more than any model has


def way(config: Config, world_size: int) -> str:
    """The way to train in effect: "auto" is ddp for several ranks, else none."""
    return ("ddp" if world_size > 1 else "none") if config.parallel == "auto" else config.parallel


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


def wrap(model: nn.Module, config: Config, group: Group) -> nn.Module:
    """The model as the ranks train it together. DDP sends rank 0's weights to all while it is made."""
    if config.compile:
        _check_compiler(group.device)
        # Inside DDP: around it, dynamo breaks at DDP's own forward and leaves an nn.Sequential as it was, without a word
        model = torch.compile(model)  # type: ignore[assignment]
    if way(config, group.world_size) == "ddp":
        # A kernel of one input channel has two equal ways to be laid out, and backward picks the other one: harmless
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        model = DistributedDataParallel(
            model,
            # On the CPU device_ids must be absent; on a GPU they keep everything off cuda:0.
            device_ids=None if group.device.type == "cpu" else [group.device.index],
            gradient_as_bucket_view=True,
            static_graph=config.static_graph,
            find_unused_parameters=config.find_unused_parameters,
            # PowerSGD's later all-reduces begin as the earlier ones end: those of several buckets in another order on each rank,
            # which gloo takes for one another
            bucket_cap_mb=ONE_BUCKET_MB if config.compress == "powersgd" and group.device.type == "cpu" else None,
        )
    if config.parallel == "dp":
        return _spread(model, config, group)
    return model


def _spread(model: nn.Module, config: Config, group: Group) -> nn.Module:
    """DataParallel, or the model as it is where there is one device. Raises ConfigError for devices that are not there."""
    count = torch.cuda.device_count() if group.device.type == "cuda" else 1
    ids = [int(word) for word in config.device_ids.split(",")] if config.device_ids else list(range(count))
    wrong = [i for i in (*ids, config.output_device or 0) if i >= count] if group.device.type == "cuda" else []
    if wrong or len(set(ids)) != len(ids):
        raise ConfigError(
            f"device_ids and output_device must each name another one of the {count} visible GPUs, got "
            f"{','.join(map(str, ids))} and {config.output_device}. CUDA_VISIBLE_DEVICES numbers them anew, from 0."
        )
    if group.device.type == "cuda" and len(ids) > 1:
        output = ids[0] if config.output_device is None else config.output_device
        return DataParallel(model, device_ids=ids, output_device=output)
    group.log.info(f"dp     one device ({group.device}): trains as one process does without DataParallel")
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """The plain module inside DDP and torch.compile: for saving (no prefixes) and evaluation (no hidden collectives)."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def share_buffers(model: nn.Module, group: Group) -> None:
    """Give all ranks rank 0's buffers. Those of a batch norm differ after a step: each rank saw its own samples, and DDP
    passes rank 0's on only before the next forward pass; an evaluation between would be of several models."""
    buffers = dict(model.named_buffers())
    if not buffers or group.world_size == 1:
        return
    first = group.broadcast({name: buffer.cpu() for name, buffer in buffers.items()} if group.is_rank0 else None)
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(first[name])


def without_sync(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """For all micro-batches of a step but the last: gradients add up locally. Forward belongs inside as well."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if last or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


def autocast(config: Config, device: torch.device) -> AbstractContextManager[None]:
    if config.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=PRECISIONS[config.precision])


def build_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    """fp16 loses small gradients without a scaled loss; the scaler does nothing for the other precisions."""
    return torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")


def warm_up(model: nn.Module, run: Callable[[], torch.Tensor], *, find_unused: bool) -> None:
    """Two throwaway passes before the first step, on every start, with buffers and gradients put back.

    DDP rebuilds its buckets after the first backward pass, which changes the order of its sums: without this a resumed
    run of three or more ranks differs from an undisturbed one in the last bits. Memory and kernels are set up on the way.
    """
    plain = unwrap(model)
    buffers = {name: buffer.detach().clone() for name, buffer in plain.named_buffers()}
    for _ in range(2):
        loss = run()
        if not find_unused and not isinstance(plain, FSDPModule):
            _check_used(plain, loss)
        loss.backward()  # type: ignore[no-untyped-call]
        if isinstance(plain, FSDPModule):  # whose graph ends in gathered copies
            _refuse_unused([name for name, p in plain.named_parameters() if p.requires_grad and p.grad is None])
    with torch.no_grad():
        for name, buffer in plain.named_buffers():
            buffer.copy_(buffers[name])
    for parameter in plain.parameters():
        parameter.grad = None


def _check_used(model: nn.Module, loss: torch.Tensor) -> None:
    """Raises ConfigError naming parameters that the loss does not depend on: DDP waits for their gradients, and says so
    a step late, by number."""
    named = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # where a gradient ends: in a parameter
            named.pop(id(node.variable), None)
        stack.extend(follower for follower, _ in node.next_functions)
    _refuse_unused(list(named.values()))


def _refuse_unused(names: list[str]) -> None:
    if names:
        raise ConfigError(
            f"the loss must depend on every parameter, got none from {', '.join(names[:8])}. Freeze them "
            "(requires_grad=False), or set --find-unused-parameters, which is slower."
        )


def _check_compiler(device: torch.device) -> None:
    """torch.compile writes C++ for the CPU: say in one line what a missing compiler would say in two hundred."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [] if shutil.which("g++") or shutil.which("clang++") or shutil.which("cl") else ["a C++ compiler"]
    missing += [] if header.exists() else [f"Python's headers ({header})"]
    if device.type in ("cpu", "cuda") and missing:
        raise ConfigError(f"compile needs {' and '.join(missing)} on this machine. Install it, or leave --compile out.")
