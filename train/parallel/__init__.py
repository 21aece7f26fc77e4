"""How several ranks train one model: the table of methods.

No torch here: the command line checks the setting `parallel` against this table before anything slow is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..config import Config

if TYPE_CHECKING:
    from rankup import Group

    from .methods import Method

# `parallel` -> module in this folder, and the subclass of Method in it. A new method is a new file here and a line in
# this table.
METHODS = {
    "none": "methods:OneProcess",
    "ddp": "methods:DDP",
    "dp": "methods:DataParallelMethod",
    "fsdp": "methods:FSDP",
    "horovod": "horovod:Horovod",
}


def method_name(config: Config, world_size: int) -> str:
    """The key of `METHODS` in effect: "auto" means ddp for several ranks and none for one."""
    if config.parallel == "auto":
        return "ddp" if world_size > 1 else "none"
    return config.parallel


def load_method(name: str) -> type[Method]:
    """The class of the method `name`, a key of `METHODS`."""
    module, _, method = METHODS[name].partition(":")
    found: type[Method] = getattr(importlib.import_module(f".{module}", __package__), method)
    return found


@contextmanager
def start_method(config: Config, group: Group) -> Iterator[Method]:
    """The method in effect, up for the length of the block. Raises UserError, see `Method.refuse`, and JoinError."""
    method = load_method(method_name(config, group.world_size))(config, group)
    method.refuse()
    with method.running():
        yield method
