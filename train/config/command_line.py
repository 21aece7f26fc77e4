"""The command line: every setting is a flag, and the whole line is understood before anything runs.

argparse stops at its first mistake, guesses abbreviations and names no nearest option; this reader finds every mistake.
"""

from __future__ import annotations

import shutil
import textwrap
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from train.config.schema import KIND_WORDS, SHOW_HINT, bounds, default, facts, flag, groups, kind, nearest
from train.config.settings import Config
from train.config.yaml12 import describe, dump_value, scalar


@dataclass(frozen=True)
class Extra:
    """An option of some commands that is no setting. A bool is a switch; `commands` empty means all of them."""

    type: type[str] | type[int] | type[float] | type[bool]
    default: Any
    help: str
    commands: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    metavar: str = ""


@dataclass(frozen=True)
class Parsed:
    """A command line, understood. `mistakes` belong before those of `load_config`, in one report."""

    command: str | None = None
    settings: dict[str, str | bool] = field(default_factory=dict)
    config_file: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    help: bool = False
    mistakes: list[str] = field(default_factory=list)


def parse_args(argv: Sequence[str], *, extra: Mapping[str, Extra] = {}, commands: Collection[str] = ()) -> Parsed:
    """Understand a command line; runs and raises nothing. Settings stay text, `extra` is complete with its defaults.

    The command is the one positional argument, anywhere on the line. With `commands`, another word is a mistake.
    --local-rank, which torch.distributed.launch puts in front, is passed over: LOCAL_RANK says the same.
    """
    reader = _Reader(deque(argv), extra, commands)
    while reader.queue:
        reader.take()
    return reader.result()


@dataclass
class _Reader:
    queue: deque[str]
    known: Mapping[str, Extra]
    commands: Collection[str]
    positionals: list[str] = field(default_factory=list)
    settings: dict[str, str | bool] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    config_file: str | None = None
    help: bool = False
    mistakes: list[str] = field(default_factory=list)

    def take(self) -> None:
        """Understand the next option or word."""
        token = self.queue.popleft()
        if not _is_option(token):
            self.positionals.append(token)
            return
        if token in ("-h", "--help"):
            self.help = True
            return
        head, equals, attached = token.partition("=")
        value = attached if equals else None
        name = head.removeprefix("--") if head.startswith("--options.") else head.removeprefix("--").replace("-", "_")
        if name == "local_rank":
            self.value(head, value)
        elif name == "config":
            self.config_file = self.value(head, value)
            if self.config_file == "":
                self.mistakes.append("--config must be a file's name, got nothing.")
        elif name in self.known:
            self.take_extra(name, head, value)
        elif name.startswith("options.") and name != "options.":
            self.set(name, self.value(head, value))
        elif name == "options":
            self.mistakes.append("--options must be --options.NAME VALUE, such as --options.width 64.")
            self.skip_value(value)
        elif name in Config.model_fields:
            self.set(name, self.switch(value) if kind(name)[0] is bool else self.value(head, value))
        elif name.startswith("no_") and name[3:] in Config.model_fields and kind(name[3:])[0] is bool:
            self.set(name[3:], False)
            if value is not None:
                self.mistakes.append(f"{head} must be given without a value, got {describe(value)}.")
        else:
            self.unknown(head, value)

    def set(self, name: str, value: str | bool | None) -> None:
        if value is not None:
            self.settings[name] = value

    def value(self, head: str, attached: str | None) -> str | None:
        """The value of an option that needs one; a missing one is a mistake."""
        if attached is not None:
            return attached
        if self.queue and not _is_option(self.queue[0]):
            return self.queue.popleft()
        self.mistakes.append(f"{head} must be followed by a value. (One that begins with a dash: {head}=-x)")
        return None

    def switch(self, attached: str | None) -> str | bool:
        if attached is not None:
            return attached
        # No command is called true or false, so the word after a switch can only be meant as its value.
        if self.queue and self.queue[0] in ("true", "false"):
            return self.queue.popleft()
        return True

    def skip_value(self, attached: str | None) -> None:
        """Pass over what seems to be the value of an unknown option, so that one mistake is reported once."""
        if attached is None and self.queue and not _is_option(self.queue[0]) and self.queue[0] not in self.commands:
            self.queue.popleft()

    def unknown(self, head: str, attached: str | None) -> None:
        near = nearest(head.lstrip("-"), [*Config.model_fields, *self.known, "config", "help"])
        ending = f"; did you mean {describe(flag(near))}?" if near else "."
        self.mistakes.append(f"unknown setting {describe(head)}{ending} {SHOW_HINT}")
        self.skip_value(attached)

    def take_extra(self, name: str, head: str, attached: str | None) -> None:
        option = self.known[name]
        text = self.switch(attached) if option.type is bool else self.value(head, attached)
        if text is None:
            return
        value = text if option.type is str or text is True else scalar(str(text))
        if option.type is float and type(value) is int:
            value = float(value)
        if type(value) is not option.type or (option.choices and value not in option.choices):
            wanted = f"one of {', '.join(option.choices)}" if option.choices else KIND_WORDS[option.type]
            self.mistakes.append(f"{head} must be {wanted}, got {describe(value)}.")
        self.given[name] = value

    def result(self) -> Parsed:
        command = self.positionals[0] if self.positionals else None
        if command is not None and self.commands and command not in self.commands:
            near = nearest(command, self.commands)
            ending = f"; did you mean {describe(near)}?" if near else _as_flag(command)
            self.mistakes.append(f"unknown command {describe(command)}{ending}")
        for word in self.positionals[1:]:
            self.mistakes.append(f"unexpected argument {describe(word)}{_as_flag(word)}")
        for name in self.given:
            belongs = self.known[name].commands
            if belongs and command in self.commands and command not in belongs:
                self.mistakes.append(f"{flag(name)} must be used with {' or '.join(belongs)}, not with {command}.")
        extra = {name: option.default for name, option in self.known.items()} | self.given
        return Parsed(command, self.settings, self.config_file, extra, self.help, self.mistakes)


def _is_option(token: str) -> bool:
    return len(token) > 1 and token.startswith("-") and isinstance(scalar(token), str)  # -0.1 is a value


def _as_flag(word: str) -> str:
    # Other programs take name=value; say how it is written here.
    name, equals, _ = word.partition("=")
    return f"; did you mean --{word}?" if equals and name.replace("-", "_") in Config.model_fields else "."


def help_text(
    commands: Mapping[str, str], *, extra: Mapping[str, Extra] = {}, usage: str = "", width: int = 0, settings: bool = True
) -> str:
    """What --help prints: commands, their options, and all settings in groups with unit, range and default."""
    width = min(width or shutil.get_terminal_size().columns, 120)
    lines = textwrap.wrap(usage or "usage: python -m train.main COMMAND [--config FILE] [--SETTING VALUE ...]", width)
    note = "Flags outrank the file, the file outranks the defaults. A switch: --augment, --no-augment or --augment=false."
    lines += textwrap.wrap(note, width)
    rows: dict[str, list[tuple[str, str]]] = {"commands": list(commands.items())}
    rows["options"] = [("--config FILE", "Settings from a YAML file; flags outrank it."), ("--help", "This, and all settings.")]
    for name, option in extra.items():
        where = f"{', '.join(option.commands)}: " if option.commands else ""
        shown = "" if option.type is bool else f" {option.metavar or _metavar(option.type, option.choices)}"
        rest = "" if option.default in (None, False, "") else f" [default {option.default}]"
        rows["options"].append((flag(name) + shown, where + option.help + rest))
    for title, names in groups().items() if settings else ():
        rows[title] = [(_usage(name), _help(name)) for name in names]
    for title, entries in rows.items():
        lines += ["", f"{title}:"]
        for left, right in entries:
            head = f"  {left}".ljust(28) + (" " if len(left) < 26 else "")
            start = head if len(left) < 26 else " " * 29
            lines += [] if len(left) < 26 else [f"  {left}"]
            lines += textwrap.wrap(
                right, max(width, 60), initial_indent=start, subsequent_indent=" " * 29, break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"


def _metavar(of: type, choices: tuple[str, ...]) -> str:
    return "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X", bool: "", str: "TEXT"}.get(of, "VALUE")


def _usage(name: str) -> str:
    of, _, choices = kind(name)
    if of is bool:
        return f"{flag(name)}, --no-{name.replace('_', '-')}" if default(name) else flag(name)
    if of is dict:
        return f"{flag(name)}.NAME VALUE"
    return f"{flag(name)} {_metavar(of, () if len(choices) > 4 else choices)}"


def _help(name: str) -> str:
    _, _, choices = kind(name)
    parts = [", ".join(choices) if len(choices) > 4 else "", facts(name)["unit"], bounds(name)]
    parts = [*filter(None, parts), f"default {dump_value(default(name))}"]
    return f"{Config.model_fields[name].description} [{', '.join(parts)}]"
