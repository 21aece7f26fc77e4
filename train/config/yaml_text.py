"""Settings as YAML text: read by the rules of YAML 1.2 (core schema), written so that the same rules read it back.

PyYAML follows YAML 1.1, where `3e-4` is a text, `no` is false, `010` is eight and the last of two equal keys wins
silently. Each of these changes a run, so the loader and the dumper here get the core schema's table instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import yaml

from rankup.errors import ConfigError

_CORE = "tag:yaml.org,2002:"
_NUMBER = r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
# Type -> what its text looks like, and how to read it
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"(?:null|Null|NULL|~|)\Z", lambda text: None),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)\Z", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+\Z", int),
    "float": (_NUMBER, lambda text: float(text.lower().replace(".i", "i").replace(".n", "n"))),
}


def scalar(text: str) -> Any:
    """The value of a text without quotes: None, bool, int, float, or the text itself."""
    for pattern, read in _SCALARS.values():
        if re.match(pattern, text):
            try:
                return read(text)
            except ValueError:  # Python reads no integer of more than 4300 digits; the message then names the range
                return text
    return text


class _Loader(yaml.SafeLoader):
    # Own tables, not the inherited ones: the rules of 1.1 (yes/no, octal 010, 1:30, dates, <<) are gone.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own declaration)
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.mistakes: list[tuple[int, str]] = []  # line and text of what is no reason to stop reading


class _Dumper(yaml.SafeDumper):
    # The loader's table: the dumper quotes exactly the texts that the loader would take for something else ("1e5").
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Line breaks (U+0085 is one too) survive only in double quotes, and would leave the one line of `dump_value`.
    return dumper.represent_scalar(_CORE + "str", text, style=None if text.isprintable() else '"')


def _mapping(loader: _Loader, node: yaml.Node) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise yaml.constructor.ConstructorError(None, None, "expected a mapping", node.start_mark)
    lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    for key, value in node.value:
        if key.tag != _CORE + "str":
            source = key.value if isinstance(key, yaml.ScalarNode) and key.value else "no plain text"
            loader.mistakes.append((_line(key), f"the name of a setting must be a word, got {source}."))
        elif key.value in lines:
            again = describe(key.value)
            loader.mistakes.append((_line(key), f"duplicate {again}, first on line {lines[key.value]}."))
        else:
            lines[key.value] = _line(key)
            values[key.value] = loader.construct_object(value, deep=True)
    return values


def _unknown_tag(loader: _Loader, node: yaml.Node) -> None:
    # Dates, sets, Python objects: no setting is one, and JSON, which the checkpoints hold, knows none.
    tag = node.tag.replace(_CORE, "!!")
    raise yaml.constructor.ConstructorError(None, None, f"the tag {tag}", node.start_mark)


_add: Any = _Loader.add_constructor  # its types are narrower than what it takes
_Dumper.add_representer(str, _represent_text)
for _name, (_pattern, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(_CORE + _name, re.compile(_pattern), None)  # None: whatever it begins with
    _add(_CORE + _name, lambda loader, node: scalar(loader.construct_scalar(node)))
_add(_CORE + "str", _Loader.construct_scalar)
# Deep and in one go: PyYAML then refuses an alias that contains itself, and reads each other alias once
_add(_CORE + "seq", partial(_Loader.construct_sequence, deep=True))
_add(_CORE + "map", _mapping)
_add(None, _unknown_tag)


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Settings from YAML text; `where` (a file name) opens each message. An empty document holds no settings.

    Raises ConfigError with one line per mistake: syntax, a document that is no mapping, duplicate or non-text keys.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None or root.tag == _CORE + "null":
            return {}
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise ConfigError(f"{where}:{_line(root)}: settings must be lines of `name: value`, got {kind}.")
        values: dict[str, Any] = loader.construct_document(root)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{where}:{line}: not valid YAML: character U+{int(error.character):04X}.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "syntax"
        if "'\\t'" in problem:
            problem = "a tab; indent with spaces"
        if "recursive" in problem:
            problem = "an alias that contains itself"
        raise ConfigError(f"{where}:{mark.line + 1 if mark else 1}: not valid YAML: {problem}.") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: not valid YAML: nested too deeply.") from error
    if loader.mistakes:
        raise ConfigError("\n".join(f"{where}:{line}: {mistake}" for line, mistake in sorted(loader.mistakes)))
    return values


def read_yaml(file: str) -> dict[str, Any]:
    """Settings from a YAML file (UTF-8). Raises ConfigError, one line per mistake, when it cannot be read or parsed."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not a text file in UTF-8 (byte {error.start}).") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    return parse_yaml(text, file)


def dump_value(value: Any) -> str:
    """One value as YAML on one line, read back equal by `parse_yaml`."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def describe(value: Any) -> str:
    """A value as messages show it: texts in quotes, the rest as YAML, cut at 80 characters."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else dump_value(value)
    text = text.encode(errors="backslashreplace").decode()  # bytes of argv that are no UTF-8 must not break print
    return text if len(text) <= 80 else text[:77] + "..."


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
