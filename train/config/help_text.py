"""What --help prints: commands, their options, and all settings in groups. No torch here."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from pydantic.fields import FieldInfo

from train.config.options import OPTIONS, Options
from train.config.schema import NO_CHOICES, Choices, bounds, facts, fields_of, flag, kind
from train.config.settings import GROUPS, Settings
from train.config.yaml_text import dump_value

USAGE = "usage: python -m train.main COMMAND [--config FILE] [--SETTING VALUE ...]"
NOTE = "Flags outrank the file, the file outranks the defaults. A switch: --augment, --no-augment or --augment=false."


def help_text(
    *, settings: bool = True, commands: Mapping[str, type[Options]] = OPTIONS, choices: Choices = NO_CHOICES,
    width: int = 0,
) -> str:
    """The help; `settings`: with all of them, each with unit, range and default. `width`: 0 takes the terminal's."""
    width = min(width or shutil.get_terminal_size().columns, 120)
    rows: dict[str, list[tuple[str, str]]] = {
        "commands": [(name, " ".join((model.__doc__ or "").split())) for name, model in commands.items()],
        "options": [("--config FILE", "Settings from a YAML file; flags outrank it."),
                    ("--help", "This, and all settings.")],
    }
    title = ""
    owners: dict[tuple[str, str], list[str]] = {}
    for command, model in commands.items():
        for name, field in fields_of(model).items():
            owners.setdefault(_option(name, field), []).append(command)
        if model.positional:
            field = model.model_fields[model.positional]
            owners.setdefault((facts(field)["metavar"], str(field.description)), []).append(command)
    rows["options"] += [(left, f"{', '.join(who)}: {right}") for (left, right), who in owners.items()]
    for name, field in Settings.model_fields.items() if settings else ():
        title = GROUPS.get(name, title)
        rows.setdefault(title, []).append(_setting(name, field, choices))
    indent = " " * 29
    lines = [*textwrap.wrap(USAGE, width), *textwrap.wrap(NOTE, width)]
    for title, entries in rows.items():
        lines += ["", f"{title}:"]
        for left, right in entries:
            start = f"  {left}".ljust(29)
            if len(left) >= 26:  # a long left side gets a line of its own
                lines.append(f"  {left}")
                start = indent
            lines += textwrap.wrap(right, max(width, 60), initial_indent=start, subsequent_indent=indent,
                                   break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _option(name: str, field: FieldInfo) -> tuple[str, str]:
    of, _, choices = kind(field)
    shown = "" if of is bool else f" {facts(field)['metavar'] or _metavar(of, choices)}"
    rest = "" if field.default in (None, False, "") else f" [default {field.default}]"
    return flag(name) + shown, f"{field.description}{rest}"


def _setting(name: str, field: FieldInfo, choices: Choices) -> tuple[str, str]:
    of, _, declared = kind(field)
    known = choices.get(name, declared)
    if of is bool and not known:
        left = f"{flag(name)}, --no-{name.replace('_', '-')}" if field.default else flag(name)
    elif of is dict:
        left = f"{flag(name)}.NAME VALUE"
    else:
        left = f"{flag(name)} {_metavar(of, () if len(known) > 4 else known)}"
    parts = [", ".join(known) if len(known) > 4 else "", facts(field)["unit"], bounds(field)]
    parts = [*filter(None, parts), f"default {dump_value(field.default)}"]
    return left, f"{field.description} [{', '.join(parts)}]"


def _metavar(of: type, choices: Sequence[str]) -> str:
    return "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X", str: "TEXT"}.get(of, "VALUE")
