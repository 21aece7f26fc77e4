"""The plain model, on its device and compiled; its optimizer and learning rate."""

import ctypes
import math
import shutil
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rankup import Group, UserError

from ..config import Config
from ..workloads.workload import Workload

FUSED = ("cpu", "cuda", "mps", "xpu")  # devices with a fused kernel for SGD and AdamW


def prepare(workload: Workload, config: Config, group: Group, *, split: bool = False) -> nn.Module:
    """The workload's model on its device, in its memory format, with SyncBatchNorm if asked for. Raises UserError.
    `split`: the method splits the model, and moves the parts to the device: whole it may not fit there."""
    model = workload.model
    if config.sync_bn:
        if group.device.type == "cpu":
            raise UserError("sync_bn must be false on a CPU, got true. torch's SyncBatchNorm needs an accelerator.")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if not split:
        model = model.to(group.device)
    # Kernels of 2-D convolutions read all channels of a pixel together. An own model may call view(); fsdp and horovod
    # take contiguous parameters only
    ours = config.workload == "images" and config.parallel not in ("fsdp", "horovod")
    if ours and any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return model.to(memory_format=torch.channels_last)
    return model


def autocast(config: Config, device: torch.device) -> AbstractContextManager[None]:
    """Around a forward pass: torch picks the type of each operation, and weights stay in fp32."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision])


def compile_model(model: nn.Module, device: torch.device) -> nn.Module:
    """The model through torch.compile, to be put into DDP: around it, dynamo leaves an nn.Sequential uncompiled."""
    if device.type in ("cpu", "cuda") and not (shutil.which("g++") or shutil.which("clang++")):  # torch: 200 lines
        raise UserError("compile needs a C++ compiler on this machine. Install it, or leave --compile out.")
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled


# The optimizer. Its rate is a pure function of the step, so that a resumed run needs no state to go on with it --------


def build_optimizer(model: nn.Module, config: Config, device: torch.device) -> torch.optim.Optimizer:
    """SGD or AdamW over two groups of parameters: matrices and kernels with weight decay, norms and biases without.
    Decay would pull a norm's scale to zero (Goyal et al. 2017, section 5.2)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = device.type in FUSED and all(p.is_floating_point() for p in trained)
    # torch has no fused SGD for parameters that are split over ranks
    fused_sgd = fused and not any(isinstance(p, DTensor) for p in trained)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, fused=fused)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused_sgd)


def rate_at(config: Config, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    """The learning rate of step `step`, from 0: a linear warm-up, then constant, in steps, or half a cosine to 0."""
    peak = config.lr
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "step":
        return float(peak * config.step_gamma ** (step // (config.step_epochs * steps_per_epoch)))
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return peak


def keep_freed_memory() -> None:
    """Set malloc up for a loop that takes and frees the same blocks again and again. ResNet-18 at batch 64 takes 6 %
    less time a step (one thread, AMD EPYC), and a fifth more memory at its peak."""
    mallopt = ctypes.CDLL(None).mallopt  # numbers from malloc.h
    mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
    mallopt(-1, 512 * 2**20)  # M_TRIM_THRESHOLD: so much may lie unused at the heap's end
    mallopt(-2, 64 * 2**20)  # M_TOP_PAD: asked of the kernel at a time; an untouched page costs nothing
