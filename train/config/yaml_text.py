"""Settings as YAML text, by PyYAML with the scalars of YAML 1.2.

PyYAML follows YAML 1.1, where `3e-4` is a text, `no` is false, `010` is eight and the last of two equal keys wins
silently. Each of these changes a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from rankup import UserError

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
    # Tables of its own, not the inherited ones: yes/no, octal 010, 1:30, dates, sets and << are gone
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own declaration)
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (f"{_CORE}str", f"{_CORE}seq", None)
    }


class _Dumper(yaml.SafeDumper):
    # The loader's table: the dumper quotes exactly the texts that the loader would take for something else ("1e5")
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _mapping(loader: _Loader, node: yaml.Node) -> Any:
    if not isinstance(node, yaml.MappingNode):
        raise yaml.MarkedYAMLError(problem="expected a mapping", problem_mark=node.start_mark)
    names: set[str] = set()
    for key, _ in node.value:
        if key.tag != f"{_CORE}str":
            raise yaml.MarkedYAMLError(problem="the name of a setting must be a word", problem_mark=key.start_mark)
        if key.value in names:
            raise yaml.MarkedYAMLError(problem=f"duplicate {describe(key.value)}", problem_mark=key.start_mark)
        names.add(key.value)
    return loader.construct_mapping(node, deep=True)


_add: Any = _Loader.add_constructor  # its types are narrower than what it takes
for _name, (_pattern, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(_CORE + _name, re.compile(_pattern), None)  # None: whatever it begins with
    _add(_CORE + _name, lambda loader, node: scalar(loader.construct_scalar(node)))
_add(f"{_CORE}map", _mapping)
# Line breaks (U+0085 is one too) survive only in double quotes, and would leave the one line of `dump_value`
_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
    f"{_CORE}str", text, style=None if text.isprintable() else '"'))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Settings from YAML text; `where`, a file's name, opens each message. An empty document holds no settings.

    Raises UserError, one line with the number of the line in the file.
    """
    try:
        found = yaml.load(text, Loader=_Loader)  # a SafeLoader: it builds plain values alone
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context or "syntax").split())[:200]
        raise UserError(f"{where}:{mark.line + 1 if mark else 1}: not valid YAML: {problem}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}.") from error
    except RecursionError as error:
        raise UserError(f"{where}: not valid YAML: nested too deeply.") from error
    if found is not None and not isinstance(found, dict):
        raise UserError(f"{where}: settings must be lines of `name: value`, got {describe(found)}.")
    return found or {}


def read_yaml(file: str) -> dict[str, Any]:
    """Settings from a YAML file (UTF-8). Raises UserError, one line, when it cannot be read or parsed."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not a text file in UTF-8 (byte {error.start}).") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise UserError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
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
