"""A batch: a tensor, or a tuple, list or dict of batches. What `Samples.batch` returns and the model is given."""

from collections.abc import Iterable
from typing import Any

import torch


def num_bytes(batch: Any) -> int:
    """The size of all tensors in a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    return sum(num_bytes(part) for part in parts(batch))


def parts(batch: Any) -> Iterable[Any]:
    """The batches in a tuple, list or dict; nothing for anything else."""
    if isinstance(batch, dict):
        return batch.values()
    return batch if isinstance(batch, tuple | list) else ()


def repeated(batch: Any, count: int) -> Any:
    """A batch of `count` samples, the same ones again and again: tensors of [B, ...] become [count, ...]."""
    if isinstance(batch, torch.Tensor):
        return torch.cat([batch] * -(-count // len(batch)))[:count] if batch.ndim else batch
    if isinstance(batch, dict):
        return {name: repeated(value, count) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(repeated(value, count) for value in batch)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch; what is no tensor stays as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
