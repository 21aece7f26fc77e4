"""The parser of a command of `rankup`, and the types of its options. A mistake is a UserError of one line."""

import argparse
import contextlib
import math
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from rankup import files
from rankup.errors import UserError

Option = tuple[list[str], dict[str, Any]]
QUOTES = "'\""  # argparse shows a value as Python writes it
ARGPARSE_SAYS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^argument (\S+?)(/\S+)?: ", r"\1 "),
    (r"expected one argument$", "must be followed by a value"),
    (r"ignored explicit argument '(.*)'$", r"must have no value, got \1"),
    (r"invalid choice: (.*) \(choose from (.*)\)$",
     lambda found: f"must be one of {found[2]}, got {found[1].strip(QUOTES)}".replace("'", "")),
    (r"^the following arguments are required: (.*)$", r"\1 must be given"),
)


class Parser(argparse.ArgumentParser):
    """The parser of one command. It reports a mistake as a UserError of one line."""

    @property
    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command's words, and keep them as `line`. Raises UserError for a mistake, and SystemExit after it has
        printed help."""
        takes_rest = any(action.nargs == argparse.PARSER for action in self._actions)
        given, unknown = self.parse_known_args(words) if takes_rest else self.parse_known_intermixed_args(words)
        if unknown:
            self.error(unknown_word("argument", unknown[0].partition("=")[0], self.flags))
        given.line = [*words]
        return given

    def without(self, words: Sequence[str], dropped: Collection[str]) -> list[str]:
        """Return these options without some of them. `dropped`: the names of their values."""
        kept, rest = list[str](), iter(words)
        for word in rest:
            flag, equals, _ = word.partition("=")
            action = self._option_string_actions.get(flag)
            both = [word] if equals or action is None or action.nargs == 0 else [word, next(rest)]
            kept += [] if action is not None and action.dest in dropped else both
        return kept

    def error(self, message: str) -> NoReturn:
        """Report a mistake that argparse found, in the words of our own rules."""
        for pattern, ours in ARGPARSE_SAYS:
            message = re.sub(pattern, ours, message)
        raise UserError(f"{message}{'' if message[-1] in '.?' else '.'} See {self.prog} --help.")


class AddParser(Parser):
    """The parser of `rankup add`: kinds of launch files and options, in any order, then a script and its words."""

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse as `Parser.parse` does. `script` of the result: the script and its words. `line`: the command."""
        at = 0
        takes_value = {flag for action in self._actions if action.nargs != 0 for flag in action.option_strings}
        while at < len(words) and words[at] not in ("-m", "--") and (words[at] in files.KINDS or words[at][:1] == "-"):
            at += 2 if words[at] in takes_value else 1
        given, script = super().parse(words[:at]), list(words[at:])
        if script[:1] != ["--"]:
            for word in script[1:]:
                if (flag := word.partition("=")[0]) in self.flags and not self._has(script[0], flag):
                    raise UserError(
                        f"add: {flag} must stand before {script[0]}, because the script gets all words after its name. "
                        f"If the script has this option: rankup add {shlex.join([*words[:at], '--', *script])}"
                    )
        given.script = script[script[:1] == ["--"]:]
        kept = [word for word in words[:at] if word not in ("--diff", "--stdout")]
        given.line = shlex.join(["rankup", "add", *kept, *script])
        return given

    @staticmethod
    def _has(script: str, flag: str) -> bool:
        """Return whether the script seems to have an option of this name."""
        name = flag.lstrip("-").replace("-", "[-_]")
        with contextlib.suppress(OSError):
            return bool(re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", Path(script).read_text(errors="replace")))
        return False


def unknown_word(what: str, word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word, known, n=1)
    return f'unknown {what} "{word}"{f"; did you mean {near[0]}?" if near else "."}'


def unknown_command(word: str, rest: Sequence[str], known: Sequence[str]) -> str:
    """Return what a user is told who typed `rankup WORD REST`: perhaps a script, or the command of another launcher."""
    if word.startswith("-"):
        return f'unknown option "{word}". Options follow a command: rankup COMMAND [OPTIONS]. See rankup --help.'
    if Path(word).suffix in (".py", ".sh"):
        return f"{word} is no command. This starts a script: {shlex.join(['rankup', 'launch', word, *rest])}"
    if rest and word in ("run", "start", "exec", "torchrun", "python"):
        return f"{word} is no command. This starts a script: {shlex.join(['rankup', 'launch', *rest])}"
    return f"{unknown_word('command', word, known)} `rankup` lists all."


# Values of options ----------------------------------------------------------------------------------------------------


def must_be(rule: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Decorate a parser of an option's value. If the parser raises ValueError, the user reads the rule."""

    def decorate(parse: Callable[[str], Any]) -> Callable[[str], Any]:
        def checked(text: str) -> Any:
            try:
                return parse(text)
            except ValueError:
                raise argparse.ArgumentTypeError(f"must be {rule}, got {text}") from None

        return checked

    return decorate


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`."""

    @must_be("a whole number " + (f"from {least} to {most}" if most < math.inf else f">= {least}"))
    def parse(text: str) -> int:
        if not least <= (found := int(text)) <= most:
            raise ValueError(text)
        return found

    return parse


@must_be("a number of seconds >= 0")
def seconds(text: str) -> float:
    if not (found := float(text)) >= 0:  # refuses nan too
        raise ValueError(text)
    return found


def ranks(text: str) -> int | str:
    """Parse the value of --nproc. torchrun also takes cpu and auto."""
    if text in ("cpu", "auto"):
        way_out = "Give gpu for one rank for each visible GPU, or $(nproc) for one for each CPU"
        raise argparse.ArgumentTypeError(f"must be a number or gpu, got {text}. {way_out}")
    return text if text == "gpu" else whole(1)(text)


def codes(text: str) -> frozenset[int]:
    """Parse the value of --restart-on."""
    return frozenset(whole(1, 127)(code) for code in text.split(","))


@must_be("a port, or HOST:PORT")
def address(text: str) -> tuple[str, int]:
    """Parse the value of --serve. A port alone is one of this machine, which no other machine reaches."""
    host, _, port = text.rpartition(":")
    if not 0 < int(port) < 65536:
        raise ValueError(text)
    return host or "127.0.0.1", int(port)


shell_words = must_be("words as in a shell, with closed quotes")(shlex.split)


@must_be("a number of nodes, or 2:4 for two to four")
def nodes(text: str) -> tuple[int, int]:
    """Parse the value of --nnodes: the fewest and the most nodes."""
    least, colon, most = text.partition(":")
    found = int(least), int(most if colon else least)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(text)
    return found


def option(names: str, kind: Any, text: str, **details: Any) -> Option:
    """Describe an option. `kind`: int, float for seconds, bool for a flag, or a placeholder for texts. `text`: help."""
    common: dict[Any, dict[str, Any]] = {
        int: {"type": whole(0), "metavar": "N"}, float: {"type": seconds, "metavar": "S"},
        bool: {"action": "store_true"},
    }
    return names.split(), {**common.get(kind, {"metavar": kind, "default": ""}), "help": text, **details}
