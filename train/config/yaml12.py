"""Settings as YAML text: read by the rules of YAML 1.2 (core schema), written so that the same rules read it back.

PyYAML follows YAML 1.1, where `3e-4` is a string, `no` is false, `010` is eight and the last of two equal keys wins
without a word. Each of these changes a run silently, so the loader here knows the core schema alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from train.errors import ConfigError

_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)


def scalar(text: str) -> Any:
    """The value of a plain scalar in YAML 1.2: None, bool, int, float, or the text itself."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        try:
            return int(text[2:], base) if base != 10 else int(text)
        except ValueError:  # Python reads no number of more than 4300 digits; whoever wanted one is told the range
            return text
    if _FLOAT.match(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


_CORE = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    # An own table, not the inherited one: the 1.1 rules (yes/no, octal 010, 1:30, dates, <<) are gone.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own declaration)


class _Dumper(yaml.SafeDumper):
    # The loader's table: the dumper quotes exactly the strings that the loader would take for something else ("1e5").
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Line breaks (U+0085 is one too) survive only in double quotes, and would leave the one line of `dump_value`.
    return dumper.represent_scalar(_CORE + "str", text, style=None if text.isprintable() else '"')


def _construct(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    return scalar(str(loader.construct_scalar(node)))  # type: ignore[arg-type]


_Dumper.add_representer(str, _represent_text)
for _tag, _pattern, _first in (
    ("bool", _BOOL, list("tTfF")),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_CORE + _tag, _pattern, _first)
    _Loader.add_constructor(_CORE + _tag, _construct)


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Settings from YAML text; `where` (a file name) opens each message. An empty document holds no settings.

    Raises ConfigError with one line per mistake: syntax, a document that is no mapping, duplicate or non-text keys.
    """
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _CORE + "null"):
            return {}
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise ConfigError(f"{where}:{_line(root)}: settings must be lines of `name: value`, got {kind}.")
        if mistakes := _node_mistakes(root, where):
            raise ConfigError("\n".join(mistakes))
        values: dict[str, Any] = loader.construct_document(root)
        return values
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{where}:{line}: not valid YAML: character U+{int(error.character):04X}.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "syntax"
        if "'\\t'" in problem:
            problem = "a tab; indent with spaces"
        raise ConfigError(f"{where}:{mark.line + 1 if mark else 1}: not valid YAML: {problem}.") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: not valid YAML: nested too deeply.") from error
    finally:
        if loader is not None:
            loader.dispose()


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


def _node_mistakes(root: yaml.Node, where: str) -> list[str]:
    mistakes: list[str] = []
    seen: set[int] = set()  # an alias is walked once, so that aliases of aliases cost nothing

    def walk(node: yaml.Node, above: tuple[int, ...]) -> None:
        if node.tag.removeprefix(_CORE) not in ("bool", "null", "int", "float", "str", "seq", "map"):
            # Dates, sets, Python objects: no setting is one, and JSON, which the checkpoints hold, knows none.
            mistakes.append(f"{where}:{_line(node)}: not valid YAML here: the tag {node.tag.replace(_CORE, '!!')}.")
        if id(node) in above:
            mistakes.append(f"{where}:{_line(node)}: not valid YAML: an alias that contains itself.")
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            return
        seen.add(id(node))
        above = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                walk(item, above)
            return
        first: dict[str, int] = {}
        for key, value in node.value:
            if key.tag != _CORE + "str":
                mistakes.append(f"{where}:{_line(key)}: the name of a setting must be a word, got {_source(key)}.")
            elif key.value in first:
                again = describe(key.value)
                mistakes.append(f"{where}:{_line(key)}: duplicate {again}, first on line {first[key.value]}.")
            else:
                first[key.value] = _line(key)
            walk(value, above)

    walk(root, ())
    return mistakes


def _source(node: yaml.Node) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) and node.value else "no plain text"
