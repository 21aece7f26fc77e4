"""The ranks of one membership, connected: how a rank meets the others, and learns that one is lost."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankup.group.group import Group as Group
    from rankup.group.joining import join as join

__all__ = ["Group", "join"]


def __getattr__(name: str) -> Any:
    """`Group` and `join` import torch, which `stop`, `line` and `stacks` beside them must not."""
    if name not in __all__:
        raise AttributeError(name)
    from rankup.group import group, joining

    return group.Group if name == "Group" else joining.join
