"""The optimizer, and its learning rate: scaled with the global batch, and a pure function of the step, so that a
resumed run needs no state to go on with it."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..config import Config

FUSED = ("cpu", "cuda", "mps", "xpu")  # devices with a fused kernel for SGD and AdamW


def build_optimizer(model: nn.Module, config: Config, device: torch.device) -> torch.optim.Optimizer:
    """SGD or AdamW over two groups of parameters: matrices and kernels with weight decay, norms and biases without.

    Decay would pull a norm's scale to zero (Goyal et al. 2017, section 5.2). Build it once the parameters are where
    they stay: on their device, and split if the method splits them.
    """
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
        return torch.optim.AdamW(groups, lr=peak_rate(config), fused=fused)
    return torch.optim.SGD(groups, lr=peak_rate(config), momentum=config.momentum, fused=fused_sgd)


def build_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    """fp16 loses small gradients unless the loss is scaled up; with other precisions the scaler does nothing."""
    return torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")


def peak_rate(config: Config) -> float:
    """`lr`, multiplied by how many times the global batch is `lr_base_batch`, by the square root of that, or by 1.

    Linear: Goyal et al. 2017. Square root: Krizhevsky 2014.
    """
    ratio = config.batch_size / config.lr_base_batch
    return config.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]


def rate_at(config: Config, step: int, *, total_steps: int, steps_per_epoch: int) -> float:
    """The learning rate of step `step`, from 0: a linear warm-up to the peak, then constant, in steps, or half a cosine
    to 0."""
    peak = peak_rate(config)
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "step":
        return float(peak * config.step_gamma ** (step // (config.step_epochs * steps_per_epoch)))
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return peak


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Have the next step of `optimizer` use `rate`, in all groups of parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
