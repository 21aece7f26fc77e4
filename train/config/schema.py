"""What the declaration of a setting or option says: kind, range, default; and values checked against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from train.config.settings import GROUPS, INT32_MAX, Settings
from train.config.yaml_text import describe, scalar

SHOW_HINT = "(python -m train.main show lists all)"
KIND_WORDS: dict[type, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"
}
OUT_OF_RANGE = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}

# What people type who come from elsewhere, where no spelling distance leads to our word.
SYNONYMS = {"learning_rate": "lr", "wd": "weight_decay", "amp": "precision", "nproc_per_node": "nproc",
            "output_dir": "run_dir", "num_epochs": "epochs"}

Model = TypeVar("Model", bound=BaseModel)

# Setting -> its possible values, where a room above this one knows them.
Choices = Mapping[str, Sequence[str]]
NO_CHOICES: Choices = {}


def groups() -> dict[str, list[str]]:
    """Title -> names of its settings, in order."""
    titles = {first: title for title, first in GROUPS.items()}
    found: dict[str, list[str]] = {}
    for name in Settings.model_fields:
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


def kind(field: FieldInfo) -> tuple[type, bool, tuple[str, ...]]:
    """A field's scalar type, whether it may be null, and its choices (empty: any value)."""
    annotation: Any = field.annotation
    inner = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) is Literal:
        return str, False, tuple(inner)
    if type(None) in get_args(annotation):
        return inner[0], True, ()
    of: Any = get_origin(annotation) or annotation
    return of, False, ()


def bounds(field: FieldInfo) -> str:
    """A field's range, such as `>= 0 and < 1`; empty where it has none."""
    # An upper bound that is only the width of a counter is checked, but says nothing to a reader.
    return " and ".join(f"{sign} {limit}" for sign, limit in limits(field).items() if limit != INT32_MAX)


def limits(field: FieldInfo) -> dict[str, float]:
    """A field's bounds by their sign: {">=": 0, "<": 1}."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = ((sign, getattr(m, key, None)) for m in field.metadata for key, sign in signs.items())
    return {sign: limit for sign, limit in found if limit is not None}


def facts(field: FieldInfo) -> dict[str, Any]:
    """A field's unit, rule, metavar and affects_result."""
    found = field.json_schema_extra
    assert isinstance(found, dict)
    return dict(found)


def default(field: FieldInfo) -> Any:
    """A field's default; a new object each time."""
    return field.get_default(call_default_factory=True)


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """A model's fields by the names that the user writes (`json`, which pydantic does not allow as an attribute)."""
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
    wrong: dict[str, str] = {}
    try:
        return model(**values), {}
    except ValidationError as error:
        for detail in error.errors():
            # pydantic finds several errors in one value of `options`; a check of the whole model has no place at all
            if detail["loc"] and (name := str(detail["loc"][0])) not in wrong:
                got = values[name]
                text = shown[name] if name in shown and not isinstance(got, str) else describe(got)
                wrong[name] = f"{label(name)} must be {_rule(fields[name], detail['type'])}, got {text}."
    return model.model_construct(**{name: value for name, value in values.items() if name not in wrong}), wrong


def _rule(field: FieldInfo, error_type: str) -> str:
    """What the value must be, said from its declaration: pydantic's own text never reaches the user."""
    of, optional, choices = kind(field)
    if error_type == "finite_number":
        return "finite"
    if error_type in OUT_OF_RANGE:
        sign = OUT_OF_RANGE[error_type]
        return f"{sign} {limits(field)[sign]}"
    if choices:
        return f"one of {', '.join(choices)}"
    rule = facts(field)["rule"] or f"{KIND_WORDS[of]} {bounds(field)}".strip()
    return f"{rule} or null" if optional else rule


def unknown(name: str, names: Collection[str], show: Callable[[str], str]) -> str:
    """The message for a name that no setting has; `show` writes a name as the user would."""
    near = nearest(name, names)
    return f"unknown setting {show(name)}{f'; did you mean {show(near)}?' if near else '.'} {SHOW_HINT}"
