"""The methods by which several ranks train one model. No torch here."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from ..config.method import METHODS, MethodSettings


def method_name(config: MethodSettings, world_size: int) -> str:
    """Return the key of `METHODS` that is in effect. "auto" means ddp for several ranks, and none for one rank."""
    if config.parallel == "auto":
        return "ddp" if world_size > 1 else "none"
    return config.parallel


def method_class(name: str) -> Any:
    """Return the class for a key of `METHODS`."""
    return resolve_name(f"{__name__}.{METHODS[name]}")
