"""The command line: python-fire takes it apart, and nothing runs before every mistake in it has been found.

Fire would guess types and call a function on the first word that fits. Here it only records words and flags as texts;
what they mean is decided from the declarations of settings and options, for the whole line at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pydantic.fields import FieldInfo

from train.config.options import OPTIONS, Options
from train.config.schema import fields_of, flag, from_text, kind, nearest, unknown, validate
from train.config.settings import Settings
from train.config.yaml_text import describe

# No argument of a process can hold a zero byte, so it cannot be what a user wrote. As a value it stands for a missing
# one, in a flag's name for a dash, which Fire would turn into an underscore.
MISSING = DASH = "\0"

Fields = Mapping[str, FieldInfo]


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

    def words(self, *, options: Collection[str] = ()) -> list[str]:
        """The settings as words of another command line, and those of `options` that are not the default."""
        file = ["--config", self.config_file] if self.config_file else []
        own = self.options.model_dump(by_alias=True, exclude_defaults=True)
        texts = {name: "true" if value is True else value for name, value in own.items() if name in options}
        return file + [f"--{name}={text}" for name, text in (self.settings | texts).items()]


def parse_args(argv: Sequence[str], *, commands: Mapping[str, type[Options]] = OPTIONS) -> Request:
    """Understand a command line; runs and raises nothing.

    The command is the first word that is no flag and no flag's value. --local-rank, which torch.distributed.launch puts
    in front, is passed over: LOCAL_RANK says the same.
    """
    fields = Settings.model_fields | {name: of for model in commands.values() for name, of in fields_of(model).items()}
    if {"-h", "--help"} & set(argv):
        return Request(next((word for word in argv if word in commands), None), help=True)
    words, flags = _record(argv, fields, commands)
    flags.pop("local_rank", None)
    mistakes: list[str] = []
    settings: dict[str, str] = {}
    given: dict[str, str] = {}
    file: str | None = None
    for name, text in flags.items():
        if name == "options":
            mistakes.append("--options must be --options.NAME VALUE, such as --options.width 64.")
        elif _is_negation(name, fields):
            mistakes.append(f"{flag(name)} must be given without a value, got {describe(text)}.")
        elif name not in fields and name != "config" and not re.match(r"options\..", name):
            names = [*fields, "config", "help"]
            mistakes.append(unknown(name, names, lambda n: describe(n if n.startswith("-") else flag(n))))
        elif text == MISSING and not _is_switch(name, fields):
            mistakes.append(f"{flag(name)} must be followed by a value. (One that begins with a dash: {flag(name)}=-x)")
        elif name == "config":
            file = text
            if not text:
                mistakes.append("--config must be a file's name, got nothing.")
        else:
            known = settings if name.partition(".")[0] in Settings.model_fields else given
            known[name] = "true" if text == MISSING else text
    command = words[0] if words else "train" if flags else None
    if command is not None and command not in commands:
        near = nearest(command, commands)
        ending = f"; did you mean {describe(near)}?" if near else _as_flag(command)
        mistakes.append(f"unknown command {describe(command)}{ending}")
    of = commands.get(command or "", Options)
    mistakes += [f"unexpected argument {describe(word)}{_as_flag(word)}" for word in words[1:]]
    if command is None or command not in commands:
        return Request(command, settings, file, mistakes=mistakes)
    own = fields_of(of)
    for name in given.keys() - own.keys():
        owners = " or ".join(title for title, model in commands.items() if name in fields_of(model))
        mistakes.append(f"{flag(name)} must be used with {owners}, not with {command}.")
    values = {name: from_text(own[name], text) for name, text in given.items() if name in own}
    options, wrong = validate(of, values, label=flag, shown=given)
    mistakes += wrong.values() or options.mistakes()
    return Request(command, settings, file, options, mistakes=mistakes)


def _record(argv: Sequence[str], fields: Fields, commands: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """The words of a line, and its flags: name -> text, MISSING where none follows."""
    import fire  # here, since it costs 50 ms, which a module that only needs Request shall not pay
    from fire.decorators import SetParseFn

    @SetParseFn(str)  # type: ignore[untyped-decorator]
    def record(*words: str, **flags: str) -> tuple[list[str], dict[str, str]]:
        return list(words), {name.replace(DASH, "-"): text for name, text in flags.items()}

    # Fire obeys flags of its own behind the last "--", and takes a lone "-" for the end of a call: with these two words
    # at the end a user's "-- --interactive" and "--input -" mean nothing special.
    line = [*_exact(argv, fields, commands), "--", f"--separator={MISSING}"]
    recorded: tuple[list[str], dict[str, str]] = fire.Fire(record, command=line, serialize=lambda _: None)
    return recorded


def _exact(argv: Sequence[str], fields: Fields, commands: Collection[str]) -> Iterator[str]:
    """The line with each flag in the form that leaves Fire nothing to guess.

    Fire takes the word behind a flag for its value, even a switch's; a missing value for True; and a leading "no" for
    False with the rest of the name (`--node-rank` for `de_rank`).
    """
    for word, following in pairwise([*argv, "--"]):
        if not _is_flag(word):
            yield word
            continue
        head, equals, text = word.partition("=")
        name = head
        if head.startswith("--options."):
            name = head[2:]
        elif head.startswith("--"):
            name = head[2:].replace("-", "_") or head
        if not equals and _is_negation(name, fields):
            name, equals, text = name[3:], "=", "false"
        elif not equals:
            equals, text = ("=", MISSING) if _stands_alone(name, following, fields, commands) else ("", "")
        yield f"--{name.replace('-', DASH)}{equals}{text}"


def _stands_alone(name: str, following: str, fields: Fields, commands: Collection[str]) -> bool:
    """Whether the word behind the flag `name` is not its value.

    No command is called true or false, so such a word behind a switch can only be its value. A command behind a name
    that nobody knows is the command, so that one mistake does not cause another.
    """
    if _is_switch(name, fields):
        return following not in ("true", "false", *kind(fields[name])[2])
    if _is_negation(name, fields):
        return True
    takes_value = name in (*fields, "config", "local_rank")
    return _is_flag(following) or (following in commands and not takes_value)


def _is_flag(word: str) -> bool:
    """By Fire's rule: -0.1 and a lone - are values."""
    return re.match(r"--|-[a-zA-Z]", word) is not None


def _is_switch(name: str, fields: Fields) -> bool:
    return name in fields and kind(fields[name])[0] is bool


def _is_negation(name: str, fields: Fields) -> bool:
    """Whether it switches a switch off, and so takes no value."""
    return name.startswith("no_") and _is_switch(name[3:], fields)


def _as_flag(word: str) -> str:
    # Other programs take name=value; say how it is written here.
    name, equals, _ = word.partition("=")
    return f"; did you mean --{word}?" if equals and name.replace("-", "_") in Settings.model_fields else "."
