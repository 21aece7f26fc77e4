"""The digest of a model's weights."""

import hashlib

import torch


def digest(state: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256, in hex, over names, dtypes, shapes and bytes of a model's state dict."""
    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            # Hash a view. `tobytes` would copy all weights at every start of every rank
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
