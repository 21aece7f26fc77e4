"""What --help prints: commands, their options, and all settings in groups. No torch here."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping

from pydantic.fields import FieldInfo

from train.config.options import OPTIONS, Options
from train.config.schema import NO_CHOICES, Choices, bounds, default, facts, fields_of, flag, groups, kind
from train.config.settings import Settings
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
        "options": [
            ("--config FILE", "Settings from a YAML file; flags outrank it."), ("--help", "This, and all settings."),
        ],
    }
    owners: dict[tuple[str, str], list[str]] = {}
    for command, model in commands.items():
        for name, field in fields_of(model).items():
            owners.setdefault(_option(name, field), []).append(command)
    rows["options"] += [(left, f"{', '.join(who)}: {right}") for (left, right), who in owners.items()]
    for title, names in groups().items() if settings else ():
        rows[title] = [_setting(name, choices) for name in names]
    lines = [*textwrap.wrap(USAGE, width), *textwrap.wrap(NOTE, width)]
    for title, entries in rows.items():
        lines += ["", f"{title}:"]
        for left, right in entries:
            # One space at least between the columns; a long left side gets a line of its own
            fits = len(left) < 26
            start = f"  {left}".ljust(29) if fits else " " * 29
            lines += [] if fits else [f"  {left}"]
            lines += textwrap.wrap(
                right, max(width, 60), initial_indent=start, subsequent_indent=" " * 29, break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"


def _option(name: str, field: FieldInfo) -> tuple[str, str]:
    of, _, choices = kind(field)
    shown = "" if of is bool else f" {facts(field)['metavar'] or _metavar(of, choices)}"
    rest = "" if default(field) in (None, False, "") else f" [default {default(field)}]"
    return flag(name) + shown, f"{field.description}{rest}"


def _setting(name: str, choices: Choices) -> tuple[str, str]:
    field = Settings.model_fields[name]
    of, _, declared = kind(field)
    known = tuple(choices.get(name, declared))
    if of is bool:
        left = f"{flag(name)}, --no-{name.replace('_', '-')}" if default(field) else flag(name)
    elif of is dict:
        left = f"{flag(name)}.NAME VALUE"
    else:
        left = f"{flag(name)} {_metavar(of, () if len(known) > 4 else known)}"
    parts = [", ".join(known) if len(known) > 4 else "", facts(field)["unit"], bounds(field)]
    parts = [*filter(None, parts), f"default {dump_value(default(field))}"]
    return left, f"{field.description} [{', '.join(parts)}]"


def _metavar(of: type, choices: tuple[str, ...]) -> str:
    return "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X", str: "TEXT"}.get(of, "VALUE")
