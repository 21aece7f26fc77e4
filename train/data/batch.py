"""A batch: a tensor, or a tuple, list or dict of batches. What `Samples.batch` returns and the model is given."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def tensors(batch: Any) -> list[torch.Tensor]:
    """All tensors in a batch, in its order."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def num_bytes(batch: Any) -> int:
    """The size of all tensors in a batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(batch))


def repeated(batch: Any, count: int) -> Any:
    """A batch of `count` samples, the same ones again and again: tensors of [B, ...] become [count, ...]."""

    def repeat(leaf: Any) -> Any:
        several = isinstance(leaf, torch.Tensor) and leaf.ndim > 0
        return torch.cat([leaf] * -(-count // len(leaf)))[:count] if several else leaf

    return tree_map(repeat, batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch; what is no tensor stays as it is."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)
