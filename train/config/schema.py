"""What a declaration says of its setting: kind, range, default, flag; and the name nearest to a mistyped one."""

from __future__ import annotations

from collections.abc import Collection
from difflib import SequenceMatcher
from typing import Any, Literal, get_args, get_origin

from train.config.settings import GROUPS, INT32_MAX, Config

SHOW_HINT = "(python -m train.main show lists all)"
KIND_WORDS: dict[type, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"
}

# What people type who come from elsewhere, where no spelling distance leads to our word.
SYNONYMS = {"learning_rate": "lr", "wd": "weight_decay", "amp": "precision", "nproc_per_node": "nproc",
            "output_dir": "run_dir", "num_epochs": "epochs"}


def groups() -> dict[str, list[str]]:
    """Title -> names of its settings, in order."""
    titles = {first: title for title, first in GROUPS.items()}
    found: dict[str, list[str]] = {}
    for name in Config.model_fields:
        if name in titles:
            current = found.setdefault(titles[name], [])
        current.append(name)
    return found


def nearest(name: str, names: Collection[str]) -> str | None:
    """The name most like `name`, or None. A word of a longer name counts too: stpes -> max_steps."""
    wanted = name.replace("-", "_").lower()
    if SYNONYMS.get(wanted) in names:
        return SYNONYMS[wanted]

    def alike(a: str) -> float:
        return SequenceMatcher(None, wanted, a).ratio()

    def score(candidate: str) -> tuple[float, float]:
        plain = candidate.replace("-", "_")
        whole = alike(plain)
        return max(whole, *(0.9 * alike(word) for word in plain.split("_"))), whole

    best = max(names, key=score, default=None)
    return best if best is not None and score(best)[0] >= 0.6 else None


def flag(name: str) -> str:
    """The flag of a setting, as help and messages write it: batch_size -> --batch-size."""
    head, dot, key = name.partition(".")
    return "--" + head.replace("_", "-") + dot + key


def kind(name: str) -> tuple[type, bool, tuple[str, ...]]:
    """A setting's scalar type, whether it may be null, and its choices (empty: none)."""
    annotation: Any = Config.model_fields[name].annotation
    inner = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) is Literal:
        return str, False, tuple(inner)
    if type(None) in get_args(annotation):
        return inner[0], True, ()
    of: Any = get_origin(annotation) or annotation
    return of, False, ()


def bounds(name: str) -> str:
    """A setting's range, such as `>= 0 and < 1`; empty where it has none."""
    # An upper bound that is only the width of a counter is checked, but says nothing to a reader.
    return " and ".join(f"{sign} {limit}" for sign, limit in limits(name).items() if limit != INT32_MAX)


def limits(name: str) -> dict[str, float]:
    """A setting's bounds by their sign: {">=": 0, "<": 1}."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = ((sign, getattr(m, key, None)) for m in Config.model_fields[name].metadata for key, sign in signs.items())
    return {sign: limit for sign, limit in found if limit is not None}


def facts(name: str) -> dict[str, Any]:
    """A setting's unit, rule and affects_result."""
    found = Config.model_fields[name].json_schema_extra
    assert isinstance(found, dict)
    return dict(found)


def default(name: str) -> Any:
    """A setting's default."""
    return Config.model_fields[name].get_default(call_default_factory=True)
