"""Samples, their order, and batches of them; `sources/` says where data sets come from."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .samples import MapSamples, Samples, TensorSamples

__all__ = ["MapSamples", "Samples", "TensorSamples"]


def __getattr__(name: str) -> Any:
    # Imported when first used: what downloads needs this package but not torch
    if name in __all__:
        return getattr(importlib.import_module(".samples", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
