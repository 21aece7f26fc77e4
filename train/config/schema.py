"""What the declaration of a setting or option says: kind, range, default; and values checked against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rankup.urls import must_hold_no_secrets, secrets_in

from .settings import INT32_MAX
from .yaml_text import describe, scalar

# How this program is called: an installed rankup has it inside
PROGRAM = "rankup" if __name__.startswith("rankup.") else "python -m train.main"
SHOW_HINT = f"({PROGRAM} show lists all)"
KIND_WORDS: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}  # pydantic's names of bounds, in declarations and in errors

# What people type who come from elsewhere, where no spelling distance leads to our word.
SYNONYMS = {"learning_rate": "lr", "wd": "weight_decay", "amp": "precision", "output_dir": "run_dir",
            "num_epochs": "epochs"}

Model = TypeVar("Model", bound=BaseModel)

# Setting -> its possible values, where a room above this one knows them. One with a colon, such as hf:NAME, stands for
# all that begin like it.
Choices = Mapping[str, Sequence[str]]
NO_CHOICES: Choices = {}


def is_choice(value: str, known: str) -> bool:
    """Whether `value` is the choice `known`, or one of those that it stands for."""
    start, colon, _ = known.partition(":")
    if not colon:
        return value == known
    return value.startswith(f"{start}:") and value != f"{start}:"


def nearest(name: str, names: Collection[str]) -> str | None:
    """The name most like `name`, or None. A word of a longer name counts too: stpes -> max_steps."""
    known = {candidate.replace("-", "_"): candidate for candidate in names}
    for candidate in names:
        for word in candidate.replace("-", "_").split("_"):
            known.setdefault(word, candidate)
    known |= {foreign: ours for foreign, ours in SYNONYMS.items() if ours in names}
    found = get_close_matches(name.replace("-", "_").lower(), known, n=1)
    return known[found[0]] if found else None


def flag(name: str) -> str:
    """The flag of a setting, as help and messages write it: batch_size -> --batch-size."""
    head, dot, key = name.partition(".")
    return "--" + head.replace("_", "-") + dot + key


def kind(field: FieldInfo) -> tuple[type, bool, tuple[str, ...]]:
    """A field's scalar type, whether it may be null, and its choices (empty: any value).

    `bool | Literal["auto"]` is a switch too, of three values.
    """
    annotation: Any = field.annotation
    if get_origin(annotation) is Literal:
        return str, False, get_args(annotation)
    if bool in get_args(annotation) and NoneType not in get_args(annotation):
        words = [word for part in get_args(annotation) for word in get_args(part)]
        return bool, False, (*words, "true", "false")
    if NoneType in get_args(annotation):  # X | None, in this order
        return get_args(annotation)[0], True, ()
    return get_origin(annotation) or annotation, False, ()


def bounds(field: FieldInfo) -> str:
    """A field's range, such as `>= 0 and < 1`; empty where it has none."""
    # An upper bound that is only the width of a counter is checked, but says nothing to a reader.
    return " and ".join(f"{SIGNS[key]} {limit}" for key, limit in _limits(field).items() if limit != INT32_MAX)


def _limits(field: FieldInfo) -> dict[str, float]:
    # Not from pydantic's error, which has 0.0 where the declaration has 0
    return {key: getattr(limit, key) for limit in field.metadata for key in SIGNS if hasattr(limit, key)}


def facts(field: FieldInfo) -> dict[str, Any]:
    """A field's unit, rule, metavar and affects_result."""
    return cast(dict[str, Any], field.json_schema_extra)


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """A model's fields by the names of their flags (`json`, which pydantic does not allow as an attribute)."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def from_text(field: FieldInfo, text: str) -> Any:
    """What the text of a flag means for this field; a text that cannot be meant stays one, and is refused later."""
    of, optional, _ = kind(field)
    if optional and text.lower() in ("null", "none"):
        return None
    # By the field's type, never guessed from the text: --name 1e5 is the text 1e5, and --lr 1e5 is a number.
    return text if of is str else scalar(text)


def validate(
    model: type[Model], values: Mapping[str, Any], *, label: Callable[[str], str], shown: Mapping[str, str]
) -> tuple[Model, dict[str, str]]:
    """The model of these values, and a message for each wrong one, by name.

    Names outside the model must be gone already. A wrong value is left out of the model, so that it has all that is
    right. `label`: a name as the user wrote it. `shown`: the texts of values that came from flags.
    """
    fields = fields_of(model)
    # First, and not by a rule of each field: no message may repeat such a value
    wrong = {name: must_hold_no_secrets(label(name)) for name, value in values.items()
             if isinstance(value, str) and secrets_in(value)}
    values = {name: value for name, value in values.items() if name not in wrong}
    try:
        return model(**values), wrong
    except ValidationError as error:
        for detail in error.errors():
            # pydantic finds several errors in one value of `options`
            if (name := str(detail["loc"][0])) not in wrong:
                got = values[name]
                text = shown[name] if name in shown and not isinstance(got, str) else describe(got)
                wrong[name] = f"{label(name)} must be {_rule(fields[name], detail)}, got {text}."
    return model.model_construct(**{name: value for name, value in values.items() if name not in wrong}), wrong


def _rule(field: FieldInfo, detail: ErrorDetails) -> str:
    """What the value must be, said from its declaration: pydantic's own text never reaches the user."""
    of, optional, choices = kind(field)
    if detail["type"] == "finite_number":
        return "finite"
    for key in SIGNS.keys() & detail.get("ctx", {}).keys():
        return f"{SIGNS[key]} {_limits(field)[key]}"
    if choices:
        return f"one of {', '.join(choices)}"
    rule = facts(field)["rule"] or f"{KIND_WORDS[of]} {bounds(field)}".strip()
    return f"{rule} or null" if optional else rule


def unknown(name: str, names: Collection[str], show: Callable[[str], str]) -> str:
    """The message for a name that no setting has; `show` writes a name as the user would."""
    near = nearest(name, names)
    return f"unknown setting {show(name)}{f'; did you mean {show(near)}?' if near else '.'} {SHOW_HINT}"
