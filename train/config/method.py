"""The methods by which several ranks train one model, by name, and their settings. No torch here."""

from __future__ import annotations

from typing import Literal

from .setting import Natural, Settings, free, setting

# Value of the setting `parallel` -> module in train/parallel and its class
METHODS = {
    "none": "methods:Method", "ddp": "methods:DDP", "dp": "methods:DataParallelMethod", "fsdp": "methods:FSDP",
    "horovod": "horovod:Horovod",
}
NAMES = ", ".join(["auto", *METHODS])
_SEVERAL = "--parallel ddp or fsdp or horovod"  # the methods that use several processes


class MethodSettings(Settings):
    """Which method to use, and its settings."""

    parallel: str = free(
        "auto", f"{NAMES}. auto: ddp for several processes; dp: one process, all its GPUs; fsdp: parameters split too.",
        pattern=f"^({NAMES.replace(', ', '|')})$", rule=f"one of {NAMES}")
    device_ids: str = setting("", "The GPUs, in this order; empty: all visible GPUs.",
                              pattern=r"^(\d+(,\d+)*)?$", rule="numbers of GPUs, such as 1,0", of="--parallel dp")
    compile: bool = setting(False, "torch.compile the model, in the first step.", of="--parallel auto or none or ddp")
    sync_bn: bool = setting(False, "Batch norm over all processes; needs an accelerator.",
                            of="--parallel none or ddp or fsdp")
    find_unused_parameters: bool = setting(
        False, "Some parameters may get no gradient.", of="--parallel none or ddp or dp")
    compress: Literal["none", "fp16", "bf16"] = setting(
        "none", "Type in which gradients are sent; horovod: none, fp16.", of="--parallel none or ddp or horovod")
    checkpoint_format: Literal["plain", "sharded"] = free(
        "plain", "plain: rank 0 writes all; sharded: each rank its part, on storage that all nodes share.",
        of="--parallel fsdp")
    memory_every_steps: int | None = free(
        None, "Every N steps each rank copies its part of the state to its node's memory; null: as often as half a "
        "percent of the time allows; 0: never.", ge=0, of="--parallel fsdp")
    compare_every_steps: int | None = free(
        None, "Compare the ranks' states every N steps; 0: never; null: in half a percent of the time.", ge=0,
        of=_SEVERAL)
    recompute_every_steps: Natural = free(
        0, "Every N steps let all ranks compute one batch and compare; costs about a step; 0: never.",
        of=_SEVERAL)
