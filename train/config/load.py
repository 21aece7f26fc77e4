"""The settings of a run: defaults < YAML file < flags -> Config, or one report of every mistake. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import model_validator

from rankup import UserError

from .contradictions import contradictions
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
    """All settings of one run, validated and immutable. Build it with `load_config`, or directly in tests."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if found := list(contradictions(self)):
            raise ValueError("; ".join(c.text(self) for c in found))
        return self


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
    # pydantic looks for contradictions only where each field is right. These are all of them, and name what the user
    # wrote; one with a setting that is wrong already, or may stand in a file that can't be read, would be a guess.
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
