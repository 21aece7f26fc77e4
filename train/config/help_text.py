"""What --help prints: the commands, or one of them with its options. `show` explains the settings. No torch here."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence

from pydantic.fields import FieldInfo

from .options import OPTIONS, Options
from .schema import NO_CHOICES, PROGRAM, Choices, facts, fields_of, flag, kind
from .settings import TOPICS, Settings
from .yaml_text import dump_value

# The settings that a first training meets
COMMON = ("workload", "dataset", "data_dir", "model", "epochs", "batch_size", "lr", "optimizer", "precision",
          "parallel", "seed", "name", "run_dir", "fresh")
NOTE = (
    f"Every setting of a training is a flag too, such as --batch-size 128: `{PROGRAM} show` lists them. `train --help "
    f"TOPIC` lists those of one data set, workload or method alone: {', '.join(TOPICS)}. Flags outrank "
    "--config FILE, the file outranks the defaults. A switch: --augment, --no-augment or --augment=false."
)
EXAMPLES = {
    "train": ("train --model resnet18 --epochs 5", "train --config train/configs/tiny.yaml --name mine"),
    "evaluate": ("evaluate --name mine", "evaluate --checkpoint runs/mine/checkpoints/step-00000110"),
    "predict": ("predict --name mine --output predictions.csv", "predict --name mine --input photos/"),
    "show": ("show", "show --config mine.yaml --lr 0.1 > full.yaml", "show --json"),
    "doctor": ("doctor", "doctor --alone --json"),
}


def help_text(command: str = "", *, topic: str = "", choices: Choices = NO_CHOICES) -> str:
    """The help of `command`, of all, or of the settings of one of TOPICS: at most 40 lines at 80 columns."""
    width = min(shutil.get_terminal_size().columns, 120)
    if topic:
        own = {name: field for name, field in Settings.model_fields.items() if facts(field)["of"] == topic}
        rows = [(_setting(name, field, choices)[0], f"[{dump_value(field.default)}] {field.description}")
                for name, field in own.items()]
        return "\n".join([f"settings of {topic} alone:", *_table(rows, width)]) + "\n"
    if command not in OPTIONS:
        rows = [(name, _first_sentence(model)) for name, model in OPTIONS.items()]
        lines = [f"usage: {PROGRAM} COMMAND [--config FILE] [--SETTING VALUE ...]", "", "commands:"]
        lines += _table(rows, width)
        more = f"`{PROGRAM} COMMAND --help` explains one. `rankup` lists those that start, watch and explain runs."
        return "\n".join([*lines, "", *textwrap.wrap(f"{more} {NOTE}", width)]) + "\n"
    model = OPTIONS[command]
    rows = [_option(name, field) for name, field in fields_of(model).items()]
    lines = [f"usage: {PROGRAM} {command} [OPTIONS]", "", *textwrap.wrap(_text(model), width)]
    lines += ["", "options:", *_table(rows, width)] if rows else []
    if command == "train":
        common = [_setting(name, Settings.model_fields[name], choices) for name in COMMON]
        lines += ["", "settings, the most common ones:", *_table(common, width)]
    lines += ["", "examples:", *(f"  {PROGRAM} {line}" for line in EXAMPLES.get(command, ()))]
    if command in ("train", "show"):
        lines += ["", *textwrap.wrap(NOTE, width)]
    return "\n".join(lines) + "\n"


def _text(model: type[Options]) -> str:
    return " ".join((model.__doc__ or "").split())


def _first_sentence(model: type[Options]) -> str:
    return re.split(r"(?<=[.?]) ", _text(model))[0]


def _table(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Two columns."""
    left = min(28, max(len(name) for name, _ in rows) + 4)
    lines = []
    for name, text in rows:
        start = f"  {name}".ljust(left)
        if len(name) > left - 4:  # a long left side gets a line of its own
            lines.append(start)
            start = " " * left
        lines += textwrap.wrap(text, width, initial_indent=start, subsequent_indent=" " * left, break_on_hyphens=False)
    return lines


def _option(name: str, field: FieldInfo) -> tuple[str, str]:
    of, _, choices = kind(field)
    shown = "" if of is bool else f" {facts(field)['metavar'] or _metavar(of, choices)}"
    rest = "" if field.default in (None, False, "") else f" (default: {field.default})"
    return flag(name) + shown, f"{field.description}{rest}"


def _setting(name: str, field: FieldInfo, choices: Choices) -> tuple[str, str]:
    of, _, declared = kind(field)
    known = choices.get(name, declared)
    left = flag(name) if of is bool else f"{flag(name)} {_metavar(of, ())}"
    text = ", ".join(known) if known else textwrap.shorten(str(field.description), 50, placeholder=" ...")
    return left, f"[{dump_value(field.default)}] {text}"


def _metavar(of: type, choices: Sequence[str]) -> str:
    return "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X", str: "TEXT"}.get(of, "VALUE")
