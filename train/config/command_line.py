"""The command line, `COMMAND --SETTING VALUE ...`: python-fire takes it apart, and every mistake in it is collected.

Values stay texts here: pydantic reads them by the types of their settings. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from .load import fields_of, flag, is_switch, unknown, validate
from .options import OPTIONS, Options
from .settings import Config
from .yaml_text import describe

# Fire takes a lone "-" for the end of a call. No argument of a process can be a zero byte: now "-" means nothing to it
NOT_FIRES = ("--", "--separator=\0")


@dataclass(frozen=True)
class Request:
    """A command line, understood. `mistakes` belong before those of `load_config`, in one report.

    `settings`: name -> text, as given; `options.key` sets one key. `options`: those of the command, all of them.
    """

    command: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    config_file: str | None = None
    options: Options = field(default_factory=Options)
    help: bool = False
    mistakes: list[str] = field(default_factory=list)


def parse_args(argv: Sequence[str]) -> Request:
    """Understand a command line; runs and raises nothing.

    The command is the first word, `train` where a line begins with a setting. --local-rank, which
    torch.distributed.launch puts in front, is passed over: LOCAL_RANK says the same.
    """
    words = [word for word in argv if word != "--"]  # behind it Fire would obey flags of its own
    if words and (found := re.fullmatch(r"--local[-_]rank(=.*)?", words[0])):
        words = words[1 if found[1] else 2 :]
    if {"-h", "--help"} & set(words):
        return Request(next((word for word in words if word in OPTIONS), None), help=True)
    if not words:
        return Request()
    command = "train" if re.match(r"--|-[a-zA-Z]", words[0]) else words.pop(0)
    if command not in OPTIONS:
        near = get_close_matches(command, OPTIONS, n=1)
        hint = f"; did you mean {describe(near[0])}?" if near else "."
        return Request(command, mistakes=[f"unknown command {describe(command)}{hint}"])
    import fire  # here, since it costs 50 ms, which a module that only needs Request shall not pay
    from fire.decorators import SetParseFn

    def understand(*more: str, **flags: str) -> Request:
        return _understand(command, more, flags)

    table = {command: SetParseFn(str)(understand)}
    request: Request = fire.Fire(table, command=[command, *words, *NOT_FIRES], serialize=lambda _: None)
    return request


def _understand(command: str, more: Sequence[str], flags: dict[str, str]) -> Request:
    """`more`: words that are neither flags nor values."""
    own = fields_of(OPTIONS[command])
    fields = {**Config.model_fields, **own}
    settings: dict[str, str] = {}
    given: dict[str, str] = {}
    mistakes = [f"unexpected argument {describe(word)}." for word in more]
    file = flags.pop("config", None)
    for name, text in flags.items():
        if name.startswith("_") and text == "False":
            name = name[1:]  # --no-NAME, of which Fire has taken "no" away
        if name in fields and text == "True" and not is_switch(fields[name]):  # Fire's value of a flag that has none
            mistakes.append(f"{flag(name)} must be followed by a value.")
        elif name in own:
            given[name] = text
        elif name in fields or name.startswith("options."):
            settings[name] = text
        else:
            mistakes.append(unknown(name, [*fields, "config", "help"], lambda name: describe(flag(name))))
    options, wrong = validate(OPTIONS[command], given, flag)
    return Request(command, settings, file, options, mistakes=[*mistakes, *wrong.values()])
