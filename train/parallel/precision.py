"""Mixed precision: in which type forward computes, and the scaled loss that fp16 needs. Weights stay in fp32."""

from contextlib import AbstractContextManager, nullcontext

import torch

from train.config import Config

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(config: Config, device: torch.device) -> AbstractContextManager[None]:
    """Around a forward pass: torch picks the type of each operation. Does nothing with fp32."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=TYPES[config.precision])


def build_scaler(config: Config, device: torch.device) -> torch.amp.GradScaler:
    """fp16 loses small gradients unless the loss is scaled up; with other precisions the scaler does nothing."""
    return torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
