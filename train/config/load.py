"""The settings of a run: defaults < YAML file < flags -> Config, or one report of every mistake. No torch here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankup import UserError
from rankup.urls import is_url

from .schema import (
    NO_CHOICES,
    Choices,
    bounds,
    facts,
    flag,
    from_text,
    is_choice,
    kind,
    unknown,
    validate,
)
from .settings import GROUPS, Settings
from .yaml_text import describe, dump_value, read_yaml, scalar


class Config(Settings, frozen=True):
    """All settings of one run, each validated by itself, and immutable. `load_config` also refuses contradictions."""


def load_config(
    flags: Mapping[str, str], *, file: str | None = None, mistakes: Sequence[str] = (), choices: Choices = NO_CHOICES
) -> Config:
    """Defaults, then the YAML file, then flags (name -> text); a flag `options.key` sets one key of options.

    Raises UserError with every mistake, one per line: `mistakes` (those of `parse_args`) first, then unknown names,
    wrong types, values out of range, and settings that contradict each other.
    """
    found = list(mistakes)
    values: dict[str, Any] = {}
    file_failed = False
    try:
        values = read_yaml(file) if file is not None else {}
    except UserError as error:
        found.append(str(error))
        file_failed = True
    for name in [name for name in values if name not in Config.model_fields]:
        found.append(f"{file}: {unknown(name, Config.model_fields, describe)}")
        del values[name]
    shown: dict[str, str] = {}  # flags as they were written, for messages
    for name, text in flags.items():
        head, _, key = name.partition(".")
        if head not in Config.model_fields or (key and head != "options") or name == "options.":
            found.append(unknown(name, Config.model_fields, lambda n: describe(flag(n))))
        elif key:
            value = scalar(text)
            if isinstance(value, float) and not math.isfinite(value):
                found.append(f"--{name} must be finite, got {text}.")
                continue
            options = values.get("options", {})
            # A file whose options are no mapping keeps its mistake; it is reported below.
            if isinstance(options, dict):
                values["options"] = {**options, key: value}
        else:
            values[name] = from_text(Config.model_fields[name], text)
            shown[name] = text or describe(text)

    def label(name: str) -> str:
        return flag(name) if name in shown else f"{file}: {name}" if name in values and file else name

    config, wrong = validate(Config, values, label=label, shown=shown)
    for name, known in choices.items():
        if name in wrong or not any(is_choice(getattr(config, name), one) for one in known):
            wrong[name] = f"{label(name)} must be one of {', '.join(known)}, got {describe(values[name])}."
    found += wrong.values()
    # One with a setting that is wrong already, or may stand in a file that can't be read, would be a guess
    if not file_failed:
        found += [c.text(config, label) for c in contradictions(config) if not wrong.keys() & set(c.fields)]
    if found:
        raise UserError("\n".join(found))
    return config


def foreign(config: Config) -> list[str]:
    """The settings of other data sets, workloads and methods than this run's. An own workload may use any of them."""
    if ":" in config.workload:
        return []
    here = {"", config.workload, config.dataset.partition(":")[0], config.parallel}
    return [name for name, field in Config.model_fields.items() if facts(field)["of"] not in here]


def refuse_foreign(config: Config) -> None:
    """Raises UserError for a setting of something else, which would be ignored."""
    for name in foreign(config):
        if (value := getattr(config, name)) != Config.model_fields[name].default:
            of = facts(Config.model_fields[name])["of"]
            raise UserError(f"{name} must be left out here, got {describe(value)}. It is a setting of {of} alone.")


def changed_settings(old: Mapping[str, Any], new: Config) -> list[str]:
    """What differs and affects the result, as `lr: 0.1 -> 0.2`. A setting that `old` does not know had its default."""
    changes = []
    for name, field in Config.model_fields.items():
        before, after = old.get(name, field.default), getattr(new, name)
        if not facts(field)["affects_result"] or before == after:
            continue
        if name == "dataset" and str(before).startswith("hf:") and str(after).startswith("hf:"):
            continue  # a place, as data_dir is; whether its rows are others, the name of the data says
        if isinstance(before, dict):
            for key in sorted(before.keys() | after.keys()):
                if before.get(key, ...) != after.get(key, ...):
                    texts = [dump_value(side[key]) if key in side else "(not set)" for side in (before, after)]
                    changes.append(f"{name}.{key}: {' -> '.join(texts)}")
        else:
            changes.append(f"{name}: {dump_value(before)} -> {dump_value(after)}")
    return changes


def to_yaml(config: Config, *, choices: Choices = NO_CHOICES) -> str:
    """The settings in their groups, each with its line of help, range and unit; `--config` reads it back equal.

    Those of other data sets, workloads and methods are left out, unless they were set.
    """
    lines: list[str] = []
    others = {name for name in foreign(config) if getattr(config, name) == Config.model_fields[name].default}
    for name, field in Config.model_fields.items():
        if name in GROUPS:
            lines += ["", f"# {GROUPS[name]}"]
        if name in others:
            continue
        known = choices.get(name, kind(field)[2])
        of = f"{facts(field)['of']}: " if facts(field)["of"] else ""
        more = ", ".join(filter(None, [facts(field)["unit"], bounds(field), " | ".join(known)]))
        line = f"{f'{name}: {dump_value(getattr(config, name))}':<36}  # {of}{field.description}"
        lines.append(line + (f" [{more}]" if more else ""))
    return "\n".join(lines[1:]) + "\n"


# Settings that are each right and cannot go together, with one another or with the number of processes --------------


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
