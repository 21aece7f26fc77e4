"""Parse the command line, `COMMAND --SETTING VALUE ...`, and write --help. Values stay texts here: pydantic converts
them to the types of their settings. No torch here."""

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

# To Fire a lone "-" ends a call. Make a zero byte the separator, which no argument can contain
NUL = "\0"
NOT_FIRES = ("--", f"--separator={NUL}")


@dataclass(frozen=True)
class Request:
    """A parsed command line. `load_config` reports `mistakes` together with its own."""

    command: str | None = None
    settings: dict[str, str] = field(default_factory=dict)  # name -> text as given; `options.key` sets one key
    options: Command = field(default_factory=Command)  # the command to run, with its options
    help: bool = False
    mistakes: list[str] = field(default_factory=list)


def parse_args(argv: Sequence[str]) -> Request:
    """Parse a command line. This runs no command and raises no error. The command is the first word. If the first word
    is a flag, the command is `train`."""
    words = [word for word in argv if word != "--"]  # after "--" Fire would read flags of its own
    # torch.distributed.launch inserts --local-rank. It is not needed, because LOCAL_RANK is set too
    if words and (found := re.fullmatch(r"--local[-_]rank(=.*)?", words[0])):
        words = words[1 if found[1] else 2 :]
    asks = bool({"-h", "--help"} & set(words))
    # To Fire a flag without a value is True, so a user's own True passes it with a mark
    words = [re.sub("^(--[^=]+=)?True$", rf"\g<1>{NUL}True", word) for word in words if word not in ("-h", "--help")]
    if not words:
        return Request(help=asks)
    command = "train" if re.match(r"--|-[a-zA-Z]", words[0]) else words.pop(0)
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {describe(near[0])}?" if near else "."
        return Request(command, mistakes=[f"unknown command {describe(command)}{hint}"], help=asks)
    import fire  # here because it takes 50 ms, and some modules import only Request from this file
    from fire.decorators import SetParseFn

    def understood(name: str) -> Any:
        return SetParseFn(str)(lambda *more, **flags: _understand(name, more, flags))

    table = {name: understood(name) for name in COMMANDS}
    request: Request = fire.Fire(table, command=[command, *words, *NOT_FIRES], serialize=lambda _: None)
    return replace(request, help=asks)


def _understand(command: str, more: Sequence[str], flags: dict[str, str]) -> Request:
    """Sort the flags into settings and options of the command. `more`: words that are neither flags nor values."""
    own = fields_of(COMMANDS[command])
    fields = {**Config.model_fields, **own}
    settings: dict[str, str] = {}
    given: dict[str, str] = {}
    mistakes = [f"unexpected argument {describe(word.removeprefix(NUL))}." for word in more]
    for name, text in flags.items():
        negated = name.startswith("_") and text == "False"  # what Fire makes of --no-NAME
        name = name[1:] if negated else name
        is_key = re.match(r"options\..", name) is not None
        if name not in fields and not is_key:
            mistakes.append(unknown(name, [*fields, "help"], lambda name: describe(flag(name))))
        elif (text == "True" or negated) and (is_key or not is_switch(fields[name])):
            mistakes.append(f"{flag(name)} must be followed by a value{', such as true' * is_key}.")
        else:
            (given if name in own else settings)[name] = text.removeprefix(NUL)
    options, wrong = validate(COMMANDS[command], given, flag)
    return Request(command, settings, options, mistakes=[*mistakes, *wrong.values()])


# --help --------------------------------------------------------------------------------------------------------------

# The settings that a new user needs first
COMMON = ("workload", "dataset", "data_dir", "model", "epochs", "batch_size", "lr", "optimizer", "precision",
          "parallel", "seed", "name", "run_dir")
NOTE = (
    f"Every setting is a flag, and `{PROGRAM} show` lists them. Add --dataset hf:NAME, --parallel fsdp and so on to "
    "`show` or --help to see the settings of that choice. A switch is --augment or --no-augment."
)


def help_text(request: Request) -> str:
    """Return the help of the command, or of all commands if the line names none. It has 40 lines at 80 columns, and
    more for the settings of what the line chooses, such as --parallel fsdp."""
    command, width = request.command, min(shutil.get_terminal_size().columns, 120)
    if command not in COMMANDS:
        rows = [(name, str(model.__doc__)) for name, model in COMMANDS.items()]
        more = f"`{PROGRAM} COMMAND --help` explains a command. `rankup` lists commands that start and watch runs."
        lines = [f"usage: {PROGRAM} COMMAND [--config FILE] [--SETTING VALUE ...]", "", "commands:"]
        return "\n".join([*lines, *_table(rows, width), "", *textwrap.wrap(f"{more} {NOTE}", width)]) + "\n"
    rows = [_row(name, field) for name, field in fields_of(COMMANDS[command]).items()]
    lines = [f"usage: {PROGRAM} {command} [OPTIONS]", "", *textwrap.wrap(str(COMMANDS[command].__doc__), width)]
    lines += ["", "options:", *_table(rows, width)]
    # The values stay texts, and may be wrong: `foreign` only compares them with names of choices
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
