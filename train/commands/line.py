"""The command line, `COMMAND --SETTING VALUE ...`: what a line means, and --help. Values stay texts here: pydantic
reads them by the types of their settings. No torch here."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from pydantic.fields import FieldInfo

from ..config import Config, foreign
from ..config.load import PROGRAM, describe, dump_value, fields_of, flag, is_switch, literals, unknown, validate
from . import COMMANDS, Command

# Fire takes a lone "-" for the end of a call. No argument of a process can be a zero byte: now "-" means nothing to it
NOT_FIRES = ("--", "--separator=\0")


@dataclass(frozen=True)
class Request:
    """A command line, understood. `mistakes` belong before those of `load_config`, in one report."""

    command: str | None = None
    settings: dict[str, str] = field(default_factory=dict)  # name -> text, as given; `options.key` sets one key
    options: Command = field(default_factory=Command)  # the command itself, with its options
    help: bool = False
    mistakes: list[str] = field(default_factory=list)


def parse_args(argv: Sequence[str]) -> Request:
    """Understand a command line; runs and raises nothing. The command is the first word, `train` where a line begins
    with a setting."""
    words = [word for word in argv if word != "--"]  # behind it Fire would obey flags of its own
    # torch.distributed.launch puts it in front. LOCAL_RANK says the same
    if words and (found := re.fullmatch(r"--local[-_]rank(=.*)?", words[0])):
        words = words[1 if found[1] else 2 :]
    asks = bool({"-h", "--help"} & set(words))
    words = [word for word in words if word not in ("-h", "--help")]
    if not words:
        return Request(help=asks)
    command = "train" if re.match(r"--|-[a-zA-Z]", words[0]) else words.pop(0)
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {describe(near[0])}?" if near else "."
        return Request(command, mistakes=[f"unknown command {describe(command)}{hint}"], help=asks)
    import fire  # here, since it costs 50 ms, which a module that only needs Request shall not pay
    from fire.decorators import SetParseFn

    def understood(name: str) -> Any:
        return SetParseFn(str)(lambda *more, **flags: _understand(name, more, flags))

    table = {name: understood(name) for name in COMMANDS}
    request: Request = fire.Fire(table, command=[command, *words, *NOT_FIRES], serialize=lambda _: None)
    return replace(request, help=asks)


def _understand(command: str, more: Sequence[str], flags: dict[str, str]) -> Request:
    """`more`: words that are neither flags nor values."""
    own = fields_of(COMMANDS[command])
    fields = {**Config.model_fields, **own}
    settings: dict[str, str] = {}
    given: dict[str, str] = {}
    mistakes = [f"unexpected argument {describe(word)}." for word in more]
    for name, text in flags.items():
        negated = name.startswith("_") and text == "False"  # --no-NAME, of which Fire has taken "no" away
        name = name[1:] if negated else name
        is_key = re.match(r"options\..", name) is not None
        if name not in fields and not is_key:
            mistakes.append(unknown(name, [*fields, "help"], lambda name: describe(flag(name))))
        elif (text == "True" or negated) and (is_key or not is_switch(fields[name])):
            mistakes.append(f"{flag(name)} must be followed by a value{', such as true' * is_key}.")
        elif name in own:
            given[name] = text
        else:
            settings[name] = text
    options, wrong = validate(COMMANDS[command], given, flag)
    return Request(command, settings, options, mistakes=[*mistakes, *wrong.values()])


# --help --------------------------------------------------------------------------------------------------------------

# The settings that a first training meets
COMMON = ("workload", "dataset", "data_dir", "model", "epochs", "batch_size", "lr", "optimizer", "precision",
          "parallel", "seed", "name", "run_dir")
NOTE = (
    f"Every setting of a training is a flag: `{PROGRAM} show` lists them. It and --help have those of a data set, "
    "workload or method beside --dataset hf:NAME, --parallel fsdp and so on. A switch: --augment or --no-augment."
)


def help_text(request: Request) -> str:
    """The help of the command, or of all where none is named: 40 lines at 80 columns, and what was chosen adds its own
    settings."""
    command, width = request.command, min(shutil.get_terminal_size().columns, 120)
    if command not in COMMANDS:
        rows = [(name, str(model.__doc__)) for name, model in COMMANDS.items()]
        more = f"`{PROGRAM} COMMAND --help` explains one. `rankup` lists those that start, watch and explain runs."
        lines = [f"usage: {PROGRAM} COMMAND [--config FILE] [--SETTING VALUE ...]", "", "commands:"]
        return "\n".join([*lines, *_table(rows, width), "", *textwrap.wrap(f"{more} {NOTE}", width)]) + "\n"
    rows = [_row(name, field) for name, field in fields_of(COMMANDS[command]).items()]
    lines = [f"usage: {PROGRAM} {command} [OPTIONS]", "", *textwrap.wrap(str(COMMANDS[command].__doc__), width)]
    lines += ["", "options:", *_table(rows, width)]
    # As texts, right or wrong: only which of them go with the others is asked
    usual, others = foreign(Config()), foreign(Config().model_copy(update=request.settings))
    common = (*COMMON, *usual) if command in ("train", "show") else ("name", "run_dir")
    rows = [_row(name, field) for name, field in Config.model_fields.items() if name in common and name not in others]
    lines += ["", "settings, the most common ones:", *_table(rows, width)]
    lines += ["", "examples:", *(f"  {PROGRAM} {line}" for line in COMMANDS[command].examples)]
    lines += ["", *textwrap.wrap(NOTE, width)] if command in ("train", "show") else []
    return "\n".join(lines) + "\n"


def _row(name: str, field: FieldInfo) -> tuple[str, str]:
    default = "" if field.default in (None, False, "") else f"[{dump_value(field.default)}] "
    text = ", ".join(literals(field)) or str(field.description)
    return flag(name) + ("" if is_switch(field) else " VALUE"), default + text


def _table(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    left = max(len(name) for name, _ in rows) + 4
    return [line for name, text in rows for line in textwrap.wrap(
        text, width, initial_indent=f"  {name}".ljust(left), subsequent_indent=" " * left, break_on_hyphens=False)]
