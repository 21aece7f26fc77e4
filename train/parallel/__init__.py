"""How several ranks train one model: the table of methods.

A new method is one new file with a subclass of `Method`, and one line in `METHODS`. Its name is one more choice of the
setting `parallel` too: `--help` prints the choices without importing torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from train.config import Config
from train.group.group import Group
from train.parallel.data_parallel import DataParallelMethod
from train.parallel.ddp import DDP
from train.parallel.fsdp import FSDP
from train.parallel.horovod import Horovod
from train.parallel.method import Method
from train.parallel.none import OneProcess

__all__ = ["METHODS", "Method", "method_name", "start_method"]

METHODS: dict[str, type[Method]] = {
    "none": OneProcess,
    "ddp": DDP,
    "dp": DataParallelMethod,
    "fsdp": FSDP,
    "horovod": Horovod,
}


def method_name(config: Config, world_size: int) -> str:
    """The key of `METHODS` in effect: "auto" means ddp for several ranks and none for one."""
    if config.parallel == "auto":
        return "ddp" if world_size > 1 else "none"
    return config.parallel


@contextmanager
def start_method(config: Config, group: Group) -> Iterator[Method]:
    """The method in effect, up for the length of the block. Raises ConfigError, see `Method.refuse`, and JoinError."""
    method = METHODS[method_name(config, group.world_size)](config, group)
    method.refuse()
    with method.running():
        yield method
