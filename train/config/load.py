"""The settings of a run: defaults < YAML file < flags -> Config, or one report of every mistake. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from train.config.command_line import Extra, Parsed, help_text, parse_args
from train.config.schema import KIND_WORDS, SHOW_HINT, bounds, default, facts, flag, groups, kind, limits, nearest
from train.config.settings import Config, contradictions
from train.config.yaml12 import describe, dump_value, parse_yaml, read_yaml, scalar
from train.errors import ConfigError

__all__ = ["Config", "Extra", "Parsed", "changed_settings", "check_world_size", "help_text", "load_config", "nearest",
           "parse_args", "parse_yaml", "to_yaml"]

OUT_OF_RANGE = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}


def load_config(
    argv_settings: Mapping[str, str | bool], *, file: str | None = None, mistakes: Sequence[str] = ()
) -> Config:
    """Defaults, then the YAML file, then flags; a flag `options.key` sets one key of options.

    Raises ConfigError with every mistake, one per line: `mistakes` (those of `parse_args`) first, then unknown names,
    wrong types, values out of range, and settings that contradict each other.
    """
    found = list(mistakes)
    values: dict[str, Any] = {}
    file_failed = False
    if file is not None:
        try:
            values = read_yaml(file)
        except ConfigError as error:
            found.append(str(error))
            file_failed = True
    for name in [name for name in values if name not in Config.model_fields]:
        found.append(f"{file}: {_unknown(name, describe)}")
        del values[name]
    raw: dict[str, str] = {}  # flags as they were written, for messages
    for name, text in argv_settings.items():
        head, _, key = name.partition(".")
        if head not in Config.model_fields or (key and head != "options") or name == "options.":
            found.append(_unknown(name, lambda n: describe(flag(n))))
        elif key:
            value = scalar(text) if isinstance(text, str) else text
            if isinstance(value, float) and not math.isfinite(value):
                found.append(f"--{name} must be finite, got {text}.")
                continue
            options = values.get("options", {})
            # A file whose options are no mapping keeps its mistake; it is reported below.
            if isinstance(options, dict):
                values["options"] = {**options, key: value}
        else:
            values[name] = _from_flag(name, text)
            raw[name] = text if isinstance(text, str) and text else describe(text)

    def label(name: str) -> str:
        return flag(name) if name in raw else f"{file}: {name}" if name in values and file else name

    try:
        config = Config(**values)
    except ValidationError as error:
        wrong: dict[str, str] = {}
        for detail in error.errors():
            if detail["loc"]:
                wrong.setdefault(str(detail["loc"][0]), detail["type"])
        for name, type_ in wrong.items():
            got = values[name]
            text = raw[name] if name in raw and not isinstance(got, str) else describe(got)
            found.append(f"{label(name)} must be {_rule(name, type_)}, got {text}.")
        # pydantic skips the checks across fields when one field is wrong; ours run on those that are right.
        right = Config.model_construct(**{name: v for name, v in values.items() if name not in wrong})
        if not file_failed:
            found += [c.text(right, label) for c in contradictions(right, ignore=wrong)]
    if found:
        raise ConfigError("\n".join(found))
    return config


def _from_flag(name: str, text: str | bool) -> Any:
    of, optional, _ = kind(name)
    if not isinstance(text, str):
        return text
    if optional and text.lower() in ("null", "none"):
        return None
    # Not guessed from the text: --name 1e5 is the text 1e5, and --lr 1e5 is a number.
    return text if of is str else scalar(text)


def _unknown(name: str, show: Callable[[str], str]) -> str:
    near = nearest(name, Config.model_fields)
    return f"unknown setting {show(name)}{f'; did you mean {show(near)}?' if near else '.'} {SHOW_HINT}"


def _rule(name: str, error_type: str) -> str:
    """What the setting must be, said from its declaration: pydantic's own text never reaches the user."""
    of, optional, choices = kind(name)
    if error_type == "finite_number":
        return "finite"
    if error_type in OUT_OF_RANGE:
        sign = OUT_OF_RANGE[error_type]
        return f"{sign} {limits(name)[sign]}"
    if choices:
        return f"one of {', '.join(choices)}"
    rule = facts(name)["rule"] or f"{KIND_WORDS[of]} {bounds(name)}".strip()
    return f"{rule} or null" if optional else rule


def check_world_size(config: Config, world_size: int) -> None:
    """Raise ConfigError unless every process gets equal micro-batches; names what would fit nearby."""
    if config.parallel in ("none", "dp") and world_size > 1:
        raise ConfigError(
            f"parallel must be auto or ddp with {world_size} processes, got {config.parallel}. "
            "Each would train a model of its own; for one process start it without a launcher."
        )
    per_process = world_size * config.accumulate
    if config.batch_size % per_process == 0:
        return
    samples = config.batch_size // config.accumulate  # of one micro-batch, over all processes
    small = [w for w in range(1, math.isqrt(samples) + 1) if samples % w == 0]
    fitting = sorted({*small, *(samples // w for w in small)})
    worlds = [w for w in fitting if w < world_size][-1:] + [w for w in fitting if w > world_size][:1]
    below = config.batch_size // per_process * per_process
    batches = [b for b in (below, below + per_process) if b > 0]
    product = f"{world_size} processes" + (f" x accumulate={config.accumulate}" if config.accumulate > 1 else "")
    raise ConfigError(
        f"batch_size must be a multiple of {per_process} ({product}), got {config.batch_size}. "
        f"Start {_either(worlds)} process{'' if worlds == [1] else 'es'}, or set --batch-size {_either(batches)}."
    )


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def changed_settings(old: Mapping[str, Any], new: Config) -> list[str]:
    """What differs and affects the result, as `lr: 0.1 -> 0.2`. A setting that `old` does not know had its default."""
    changes = []
    for name in Config.model_fields:
        before, after = old.get(name, default(name)), getattr(new, name)
        if not facts(name)["affects_result"] or before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            for key in sorted(before.keys() | after.keys()):
                if before.get(key, ...) != after.get(key, ...):
                    changes.append(f"{name}.{key}: {_shown(before, key)} -> {_shown(after, key)}")
        else:
            changes.append(f"{name}: {dump_value(before)} -> {dump_value(after)}")
    return changes


def _shown(options: Mapping[str, Any], key: str) -> str:
    return dump_value(options[key]) if key in options else "(not set)"


def to_yaml(config: Config) -> str:
    """All settings in their groups, each with its line of help, range and unit; `--config` reads it back equal."""
    lines: list[str] = []
    for title, names in groups().items():
        lines += ["", f"# {title}"]
        for name in names:
            left = f"{name}: {dump_value(getattr(config, name))}"
            choices = kind(name)[2]
            more = ", ".join(filter(None, [facts(name)["unit"], bounds(name), " | ".join(choices)]))
            lines.append(f"{left:<36}  # {Config.model_fields[name].description}" + (f" [{more}]" if more else ""))
    return "\n".join(lines[1:]) + "\n"
