"""Settings as YAML text, by PyYAML with the scalars of YAML 1.2.

PyYAML follows YAML 1.1, where `3e-4` is a text, `no` is false, `010` is eight and the last of two equal keys wins
silently. Each of these changes a run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from rankup import UserError

_CORE = "tag:yaml.org,2002:"
_SCALARS = {
    "null": r"(?:null|Null|NULL|~|)\Z",
    "bool": r"(?:true|True|TRUE|false|False|FALSE)\Z",
    "int": r"[-+]?(?:0|[1-9][0-9]*)\Z",
    "float": r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?i:inf|nan))\Z",
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own declaration): not the inherited ones

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found, names = super().construct_mapping(node, deep=True), set[Any]()
        for key, _ in node.value:
            if key.value in names:
                raise yaml.MarkedYAMLError(problem=f'duplicate "{key.value}"', problem_mark=key.start_mark)
            names.add(key.value)
        return found


class _Dumper(yaml.SafeDumper):
    # The loader's table: the dumper quotes exactly the texts that the loader would take for something else ("1e5")
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(_CORE + _name, re.compile(_pattern), None)  # None: whatever it begins with
# Line breaks (U+0085 is one too) survive only in double quotes, and would leave the one line of `dump_value`
_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
    f"{_CORE}str", text, style=None if text.isprintable() else '"'))


def scalar(text: str) -> Any:
    """The value of a text without quotes: None, bool, int, float, or the text itself."""
    if any(re.match(pattern, text) for pattern in _SCALARS.values()):
        return yaml.load(text, Loader=_Loader)
    return text


def read_yaml(file: str) -> dict[str, Any]:
    """Settings from a YAML file (UTF-8); an empty one holds none.

    Raises UserError, one line with the number of the line in the file, when it cannot be read or parsed.
    """
    try:
        found = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=_Loader)  # it builds plain values alone
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context or "syntax").split())[:200]
        raise UserError(f"{file}:{mark.line + 1 if mark else 1}: not valid YAML: {problem}.") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}.") from error
    except Exception as error:  # many types: bytes that are no UTF-8, or a tag such as !!bool at another value
        raise UserError(f"{file}: not valid YAML: {' '.join(str(error).split())}.") from error
    if found is not None and not isinstance(found, dict):
        raise UserError(f"{file}: settings must be lines of `name: value`, got a {type(found).__name__}.")
    return found or {}


def dump_value(value: Any) -> str:
    """One value as YAML on one line, read back equal by `read_yaml`."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def describe(value: Any) -> str:
    """A value as messages show it: texts in quotes, the rest as YAML, cut at 80 characters."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else dump_value(value)
    text = text.encode(errors="backslashreplace").decode()  # bytes of argv that are no UTF-8 must not break print
    return text if len(text) <= 80 else text[:77] + "..."
