"""How several ranks train one model: the table of methods, and their settings. No torch here."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Literal

from ..setting import Natural, Settings, free, setting

# The setting `parallel` -> module in here, and its class. A new method is a new file and a line in this table.
METHODS = {
    "none": "methods:Method", "ddp": "methods:DDP", "dp": "methods:DataParallelMethod", "fsdp": "methods:FSDP",
    "horovod": "horovod:Horovod",
}
NAMES = ", ".join(["auto", *METHODS])
_SEVERAL = "--parallel ddp or fsdp or horovod"  # the methods of several processes


class MethodSettings(Settings):
    """Which method, and what it has."""

    parallel: str = free(
        "auto", f"{NAMES}. auto: ddp for several processes; dp: one process, all its GPUs; fsdp: parameters split too.",
        pattern=f"^({NAMES.replace(', ', '|')})$", rule=f"one of {NAMES}")
    device_ids: str = setting("", "The GPUs, in this order; empty: all that are visible.",
                              pattern=r"^(\d+(,\d+)*)?$", rule="numbers of GPUs, such as 1,0", of="--parallel dp")
    compile: bool = setting(False, "torch.compile the model, in the first step.", of="--parallel auto or none or ddp")
    sync_bn: bool = setting(False, "Batch norm over all processes; needs an accelerator.",
                            of="--parallel none or ddp or fsdp")
    find_unused_parameters: bool = setting(
        False, "Some parameters may get no gradient.", of="--parallel none or ddp or dp")
    compress: Literal["none", "fp16", "bf16"] = setting(
        "none", "What the processes send of gradients; horovod: none, fp16.", of="--parallel none or ddp or horovod")
    checkpoint_format: Literal["plain", "sharded"] = free(
        "plain", "plain: rank 0 writes all; sharded: each rank its part, on storage that all nodes share.",
        of="--parallel fsdp")
    memory_every_steps: int | None = free(
        None, "Each rank keeps its part in its node's memory each so many steps; null: as often as it costs half a "
        "percent; 0: never.", ge=0, of="--parallel fsdp")
    compare_every_steps: int | None = free(
        None, "Compare the ranks' states each so many steps; 0: never; null: in half a percent of the time.", ge=0,
        of=_SEVERAL)
    recompute_every_steps: Natural = free(
        0, "Each so many steps let all ranks compute one batch, which costs about a step, and compare; 0: never.",
        of=_SEVERAL)


def method_name(config: MethodSettings, world_size: int) -> str:
    """The key of `METHODS` in effect: "auto" means ddp for several ranks and none for one."""
    if config.parallel == "auto":
        return "ddp" if world_size > 1 else "none"
    return config.parallel


def method_class(name: str) -> Any:
    """The class of a key of `METHODS`."""
    return resolve_name(f"{__name__}.{METHODS[name]}")
