"""How several ranks train one model: the table of methods."""

from ..config import Config
from .horovod import Horovod
from .methods import DDP, FSDP, DataParallelMethod, Method

# The setting `parallel` -> its class. A new method is a new file here, a line in this table, and a word in the setting.
METHODS: dict[str, type[Method]] = {
    "none": Method, "ddp": DDP, "dp": DataParallelMethod, "fsdp": FSDP, "horovod": Horovod,
}


def method_name(config: Config, world_size: int) -> str:
    """The key of `METHODS` in effect: "auto" means ddp for several ranks and none for one."""
    if config.parallel == "auto":
        return "ddp" if world_size > 1 else "none"
    return config.parallel
