"""Settings that are each right and cannot go together, with one another or with the number of processes.

The rules on `parallel` are here and not beside the methods in train/parallel/: those files import torch, which `show`
and the launcher do without. What a method refuses by itself, it refuses once the ranks have met (`Method.refuse`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rankup import UserError
from rankup.urls import is_url

from .settings import Settings
from .yaml_text import describe

# Method -> the switches that it does not have, and why
_ONLY_DDP = {"compile": "The two together are not tried here. Use ddp.",
             "channels_last": "It takes contiguous parameters only. Use ddp."}  # so auto is false there
NOT_WITH = {
    "dp": {"compile": "DataParallel copies the module in each step. Use ddp.",
           "sync_bn": "Its threads are no ranks. Use ddp."},
    "fsdp": _ONLY_DDP | {"find_unused_parameters": "FSDP2 waits for every gradient. Freeze them, or use ddp."},
    "horovod": _ONLY_DDP | {"sync_bn": "Horovod's own needs GPUs, torch's needs a group of them. Use ddp.",
                            "find_unused_parameters": "Their weights would decay. Freeze them, or use ddp."},
}


@dataclass(frozen=True)
class Contradiction:
    """`fields`: the settings that it is about; the first is the one to change, and must be `rule`."""

    fields: tuple[str, ...]
    rule: str
    way_out: str

    def text(self, config: Settings, label: Callable[[str], str] = str) -> str:
        """The message in the house form; `label` turns a setting's name into what the user wrote."""
        got = describe(getattr(config, self.fields[0]))
        return f"{label(self.fields[0])} must be {self.rule}, got {got}. {self.way_out}"


def contradictions(c: Settings) -> Iterator[Contradiction]:
    """Those that these settings have, one for each rule that they break."""
    yield from _of_method(c)
    if c.device_ids and c.device not in ("auto", "cuda"):
        yield Contradiction(("device_ids", "device"), f"empty with device {c.device}", "They number CUDA's devices.")
    if c.sync_bn and c.device == "cpu":
        yield Contradiction(("sync_bn", "device"), "false with device cpu",
                            "torch's SyncBatchNorm needs an accelerator.")
    if c.backend == "nccl" and c.device == "cpu":
        yield Contradiction(("backend", "device"), "gloo or auto with device cpu", "nccl moves GPU memory only.")
    if c.batch_size < c.accumulate:
        yield Contradiction(("batch_size", "accumulate"), f">= accumulate={c.accumulate}",
                            "Each micro-batch needs a sample.")
    if 0 < c.max_steps <= c.warmup_steps:
        yield Contradiction(("warmup_steps", "max_steps"), f"< max_steps={c.max_steps}",
                            "The run would end before the warm-up does.")
    if c.mirror and _place(c.mirror) == _place(c.run_dir):
        yield Contradiction(("mirror", "run_dir"), "another place than run_dir", "A copy there would be lost with it.")
    if c.workload == "images" and c.dataset == "imagefolder" and c.data_dir is None:
        yield Contradiction(("data_dir", "dataset", "workload"), "a folder of class folders with dataset imagefolder",
                            "Set it with --data-dir.")
    if c.workload in ("images", "text") and c.dataset.startswith("hf:") and c.data_dir is not None:
        yield Contradiction(("data_dir", "dataset", "workload"), "null with dataset hf:PATH_OR_NAME",
                            "The folder stands behind hf:")
    yield from _of_image_files(c)


def _place(text: str) -> str:
    return text.rstrip("/") if is_url(text) else os.path.abspath(text)


def _of_image_files(c: Settings) -> Iterator[Contradiction]:
    """What needs image files as they are."""
    crops = isinstance(c.augment, str)
    if crops and c.workload == "images" and not c.dataset.startswith(("imagefolder", "hf:")):
        yield Contradiction(("augment", "dataset", "workload"), f"true or false with dataset {c.dataset}",
                            "Its images are small and whole already.")
    if crops and c.in_memory == "always":
        yield Contradiction(("in_memory", "augment"), f"auto or never with augment {c.augment}",
                            "Random crops need the whole images, memory would hold their middle.")


def _of_method(c: Settings) -> Iterator[Contradiction]:
    """What the method of training in parallel does not have."""

    def refuse(field: str, allowed: str, why: str) -> Contradiction:
        return Contradiction((field, "parallel"), f"{allowed} with parallel {c.parallel}", why)

    if c.parallel != "dp" and c.device_ids:
        yield Contradiction(("device_ids", "parallel"), "empty without parallel dp",
                            "Elsewhere each process has one device, see device.")
    for field, why in NOT_WITH.get(c.parallel, {}).items():
        if getattr(c, field) is True:
            yield refuse(field, "false", why)
    if c.parallel == "fsdp" and c.precision == "fp16":
        yield refuse("precision", "fp32 or bf16", "Each rank would scale by the overflows of its own part.")
    if c.parallel == "horovod" and c.compress == "bf16":
        yield refuse("compress", "none or fp16", "Horovod does not sum bf16. Use ddp.")
    if c.compress != "none" and c.parallel not in ("auto", "ddp", "horovod"):
        yield refuse("compress", "none", "Only ddp sends gradients through hooks.")
    if c.parallel == "fsdp" and c.save == "async" and c.checkpoint_format == "plain":
        yield refuse("save", "auto or sync", "No rank holds a whole state to copy: see --checkpoint-format sharded.")
    if c.checkpoint_format == "sharded" and c.parallel != "fsdp":
        yield refuse("checkpoint_format", "plain", "Only fsdp splits what is saved.")


def check_world_size(config: Settings, world_size: int) -> None:
    """Raise UserError unless so many processes can train together and each micro-batch of each gets a sample."""
    if config.parallel in ("none", "dp") and world_size > 1:
        raise UserError(
            f"parallel must be auto or ddp with {world_size} processes, got {config.parallel}. "
            "Each would train a model of its own; for one process start it without a launcher."
        )
    product = f"{world_size} processes" + (f" x accumulate={config.accumulate}" if config.accumulate > 1 else "")
    least = world_size * config.accumulate
    if config.batch_size < least:
        raise UserError(
            f"batch_size must be at least {least} ({product}), got {config.batch_size}. Start at most "
            f"{config.batch_size // config.accumulate}, or set --batch-size {least}."
        )
