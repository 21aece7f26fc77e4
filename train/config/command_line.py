"""The command line, `COMMAND --SETTING VALUE ...`: python-fire takes it apart, and every mistake in it is collected.

Values stay texts here: `load_config` reads them by the types of their settings. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

from .options import OPTIONS, Options
from .schema import fields_of, flag, from_text, kind, nearest, unknown, validate
from .settings import TOPICS, Settings
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
    topic: str = ""  # of the help: a data set, workload or method that has settings of its own
    mistakes: list[str] = field(default_factory=list)


def parse_args(argv: Sequence[str]) -> Request:
    """Understand a command line; runs and raises nothing.

    The command is the first word, `train` where a line begins with a setting. --local-rank, which
    torch.distributed.launch puts in front, is passed over: LOCAL_RANK says the same.
    """
    words = list(argv)
    if words and (found := re.fullmatch(r"--local[-_]rank(=.*)?", words[0])):
        words = words[1 if found[1] else 2 :]
    if {"-h", "--help"} & set(words):
        topic = next((word for word in words if word in TOPICS), "")
        return Request(next((word for word in words if word in OPTIONS), None), help=True, topic=topic)
    name = "train" if words and _is_flag(words[0]) else words.pop(0) if words else None
    if name is None:
        return Request()
    if name not in OPTIONS:
        near = nearest(name, OPTIONS)
        return Request(name, mistakes=[
            f"unknown command {describe(name)}{f'; did you mean {describe(near)}?' if near else _as_flag(name)}"
        ])
    if "--" in words:  # behind it Fire would obey flags of its own
        return Request(name, mistakes=[unknown("", (), lambda _: '"--"')])
    import fire  # here, since it costs 50 ms, which a module that only needs Request shall not pay
    from fire.decorators import SetParseFn

    def command(name: str) -> Callable[..., Request]:
        def understand(*more: str, **flags: str) -> Request:
            return _understand(name, more, flags, list(_without_value(words)))

        return cast(Callable[..., Request], SetParseFn(str)(understand))

    table = {each: command(each) for each in OPTIONS}
    request: Request = fire.Fire(table, command=[name, *words, *NOT_FIRES], serialize=lambda _: None)
    return request


def _understand(command: str, more: Sequence[str], flags: Mapping[str, str], empty: Sequence[str]) -> Request:
    """`more`: words that are neither flags nor values. `empty`: names of flags that must have a value and have none."""
    own = fields_of(OPTIONS[command])
    owners = {name: [title for title in OPTIONS if name in fields_of(OPTIONS[title])]
              for model in OPTIONS.values() for name in fields_of(model)}
    settings: dict[str, str] = {}
    given: dict[str, str] = {}
    mistakes = [f"unexpected argument {describe(word)}{_as_flag(word)}" for word in more]
    mistakes += [f"{flag(name)} must be followed by a value. (One that begins with a dash: {flag(name)}=-x)"
                 for name in empty]
    for name, text in flags.items():
        if name.startswith("_") and text == "False" and _is_switch(name[1:]):
            name = name[1:]  # --no-NAME, of which Fire has taken "no" away
        if name in empty:
            continue
        if name == "options":
            mistakes.append("--options must be --options.NAME VALUE, such as --options.width 64.")
        elif name == "config" and not text:
            mistakes.append("--config must be a file's name, got nothing.")
        elif name in Settings.model_fields or name.startswith("options."):
            settings[name] = text
        elif name in own or name == "config":
            given[name] = text
        elif name in owners:
            mistakes.append(f"{flag(name)} must be used with {' or '.join(owners[name])}, not with {command}.")
        else:
            shown = f"no{name}" if name.startswith("_") else name
            known = [*Settings.model_fields, *owners, "config", "help"]
            mistakes.append(unknown(shown, known, lambda n: describe(flag(n))))
    file = given.pop("config", None)
    values = {name: from_text(own[name], text) for name, text in given.items()}
    options, wrong = validate(OPTIONS[command], values, label=flag, shown=given)
    return Request(command, settings, file, options, mistakes=[*mistakes, *wrong.values()])


def _without_value(words: Sequence[str]) -> Iterator[str]:
    """The names of flags that are followed by another flag, or by nothing, and are no switches. Fire reads True."""
    for word, following in pairwise([*words, "--"]):
        name = word.removeprefix("--").replace("-", "_")
        known = name in Settings.model_fields or any(name in fields_of(model) for model in OPTIONS.values())
        needs_one = (known or name == "config" or name.startswith("options.")) and not _is_switch(name)
        if needs_one and _is_flag(word) and "=" not in word and _is_flag(following):
            yield name


def _is_flag(word: str) -> bool:
    """By Fire's rule: -0.1 and a lone - are values."""
    return re.match(r"--|-[a-zA-Z]", word) is not None


def _is_switch(name: str) -> bool:
    found = Settings.model_fields.get(name)
    fields = [found] if found else [of[name] for model in OPTIONS.values() if name in (of := fields_of(model))]
    return bool(fields) and kind(fields[0])[0] is bool


def _as_flag(word: str) -> str:
    # Other programs take name=value; say how it is written here.
    name, equals, _ = word.partition("=")
    return f"; did you mean --{word}?" if equals and name.replace("-", "_") in Settings.model_fields else "."
