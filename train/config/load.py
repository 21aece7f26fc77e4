"""Build a `Config` from defaults, a YAML file and flags, or report every mistake at once. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rankup import UserError
from rankup.urls import must_hold_no_secrets, secrets_in

from .settings import GROUPS, Config

# The command that starts this program, for messages. An installed rankup contains it as `rankup.program`
PROGRAM = "rankup" if __name__.startswith("rankup.") else "python -m train.main"

# What other programs call our settings
SYNONYMS = {"learning_rate": "lr", "wd": "weight_decay", "amp": "precision", "output_dir": "run_dir",
            "num_epochs": "epochs", "steps": "max_steps"}

Model = TypeVar("Model", bound=BaseModel)


def load_config(flags: Mapping[str, str], *, file: str | None = None, mistakes: Sequence[str] = ()) -> Config:
    """Build the settings: `file` overrides defaults, and `flags` (name -> text; `options.key`: one key) override both.

    Raises UserError with every mistake, one per line: the `mistakes` of `parse_args`, unknown names, wrong types and
    values out of range. It reports settings that contradict each other only if it finds no other mistake.
    """
    found = list(mistakes)
    values: dict[str, Any] = {}
    try:
        values = read_yaml(file) if file is not None else {}
    except UserError as error:
        found.append(str(error))
    for name in [name for name in values if name not in Config.model_fields]:
        found.append(f"{file}: {unknown(str(name), Config.model_fields, describe)}")
        del values[name]
    for name, text in flags.items():
        _, dot, key = name.partition(".")
        if dot:
            options = values.get("options", {})
            if isinstance(options, dict):  # if not, `validate` reports the file's mistake
                values["options"] = {**options, key: scalar(text)}
        else:
            null = Config.model_fields[name].default is None and text.lower() in ("null", "none")
            values[name] = None if null else text

    def label(name: str) -> str:
        return flag(name) if name in flags else f"{file}: {name}" if name in values and file else name

    config, wrong = validate(Config, values, label)
    found += wrong.values()
    if not found:
        found = [f"{label(name)} must be {rule}, got {describe(getattr(config, name))}. {why}"
                 for name, rule, why in contradictions(config)]
    if found:
        raise UserError("\n".join(found))
    return config


def validate(
    model: type[Model], values: Mapping[str, Any], label: Callable[[str], str]
) -> tuple[Model, dict[str, str]]:
    """Return the model with these values, and a message for each wrong value by name. If a value is wrong, the model
    has its defaults. `label` turns a name into what the user wrote."""
    # Find secrets first. A message of pydantic would repeat the value
    wrong = {name: must_hold_no_secrets(label(name)) for name, value in values.items()
             if isinstance(value, str) and secrets_in(value.removeprefix("hf:"))}
    fields = fields_of(model)
    try:
        found = model(**{name: value for name, value in values.items() if name not in wrong})
    except ValidationError as error:
        for detail in error.errors():
            name = str(detail["loc"][0])
            rule = facts(fields[name])["rule"] or detail["msg"].removeprefix("Input should be ")
            rule += " or null" if fields[name].default is None else ""
            # Keep the first message: pydantic may find several errors in one value
            wrong.setdefault(name, f"{label(name)} must be {rule}, got {describe(values[name])}.")
    return (model() if wrong else found), wrong


def unknown(name: str, names: Collection[str], show: Callable[[str], str]) -> str:
    """Return the message for an unknown setting. `show` writes a name as the user would."""
    known = {candidate: candidate for candidate in names}
    known |= {foreign: ours for foreign, ours in SYNONYMS.items() if ours in names}
    near = get_close_matches(name.replace("-", "_").lower(), known, n=1)
    hint = f"; did you mean {show(known[near[0]])}?" if near else "."
    return f"unknown setting {show(name)}{hint} ({PROGRAM} show lists all)"


# What a setting or an option declares --------------------------------------------------------------------------------


def flag(name: str) -> str:
    """Return the flag of a setting, as help and messages write it: batch_size -> --batch-size."""
    head, dot, key = name.partition(".")
    return "--" + head.replace("_", "-") + dot + key


def literals(field: FieldInfo) -> tuple[str, ...]:
    """Return the choices of a field; empty if it is not limited to a few words."""
    return tuple(word for word in get_args(field.annotation) if isinstance(word, str))


def is_switch(field: FieldInfo) -> bool:
    """Return whether the flag may be given without a value."""
    return bool in (field.annotation, *get_args(field.annotation))


def bounds(field: FieldInfo) -> str:
    """Return a field's range, such as `>= 0 and < 1`; empty if it has none."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return " and ".join(f"{sign} {getattr(limit, key)}" for limit in field.metadata for key, sign in signs.items()
                        if hasattr(limit, key))


def facts(field: FieldInfo) -> dict[str, Any]:
    """Return `free`, `rule` and `of` of a field, see `setting`."""
    return cast(dict[str, Any], field.json_schema_extra)


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return a model's fields by the names of their flags: `as_json` is --json (pydantic forbids a field `json`)."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


# Which settings belong to a run, and how two runs differ --------------------------------------------------------------


def foreign(config: Config, *, auto: str = "auto") -> list[str]:
    """Return the names of settings that this run does not use, because they belong to other choices (`of`). A user's
    own workload may use any setting of workloads and data sets. `auto`: the method that `parallel: auto` means."""
    method = auto if config.parallel == "auto" else config.parallel
    here = {config.workload, config.dataset.partition(":")[0], method, config.optimizer, config.schedule}
    own = ("--workload", "--dataset") if ":" in config.workload else ()
    owners = {name: facts(field)["of"] for name, field in Config.model_fields.items()}
    return [name for name, of in owners.items() if of and not of.startswith(own) and not here & {*of.split()}]


def check_run(config: Config, world_size: int) -> None:
    """Raises UserError if a setting has no effect in this run, if the method can't use `world_size` processes, or if
    the batch has too few samples to give each micro-batch of each process one."""
    fields = Config.model_fields
    wrong = [f"{name} must be left out here, got {describe(value)}. It belongs to {facts(fields[name])['of']}."
             for name in foreign(config, auto="ddp") if (value := getattr(config, name)) != fields[name].default]
    if config.parallel in ("none", "dp") and world_size > 1:
        got = f"got {config.parallel}. Each would train a model of its own."
        wrong.append(f"parallel must be auto or ddp with {world_size} processes, {got}")
    product = f"{world_size} process{'' if world_size == 1 else 'es'}"
    product += f" x accumulate={config.accumulate}" if config.accumulate > 1 else ""
    least = world_size * config.accumulate
    if config.batch_size < least:
        way_out = f"Set --batch-size {least}, or start fewer."
        wrong.append(f"batch_size must be at least {least} ({product}), got {config.batch_size}. {way_out}")
    if wrong:
        raise UserError("\n".join(wrong))


def changed_settings(old: Mapping[str, Any], new: Config) -> list[str]:
    """Return each difference that affects the result: `lr: 0.1 -> 0.2`. A setting missing in `old` had its default."""
    changes = []
    for name, field in Config.model_fields.items():
        before, after = old.get(name, field.default), getattr(new, name)
        if facts(field)["free"] or before == after:
            continue
        if name == "dataset" and str(before).startswith("hf:") and str(after).startswith("hf:"):
            continue  # hf: names a place, like data_dir. `check_data` finds out whether the data changed
        changes.append(f"{name}: {dump_value(before)} -> {dump_value(after)}")
    return changes


def to_yaml(config: Config) -> str:
    """Return the settings as YAML, in groups, each with its help and its range. `--config` reads the same settings
    back. Settings that this run does not use are left out, unless they were set."""
    lines: list[str] = []
    others = {name for name in foreign(config) if getattr(config, name) == Config.model_fields[name].default}
    for name, field in Config.model_fields.items():
        if name in GROUPS:
            lines += ["", f"# {GROUPS[name]}"]
        if name in others:
            continue
        more = bounds(field) or " | ".join(literals(field))
        line = f"{f'{name}: {dump_value(getattr(config, name))}':<36}  # {field.description}"
        lines.append(line + (f" [{more}]" if more else ""))
    return "\n".join(lines[1:]) + "\n"


# Settings that are valid one by one, but not together -----------------------------------------------------------------

def contradictions(c: Config) -> Iterator[tuple[str, str, str]]:
    """Yield for each contradiction the setting to change, what it must be, and why."""
    if c.parallel == "fsdp" and c.precision == "fp16":
        yield "precision", "fp32 or bf16 with parallel fsdp", "Each rank would scale by the overflows of its own part."
    if c.parallel == "horovod" and c.compress == "bf16":
        yield "compress", "none or fp16 with parallel horovod", "Horovod does not sum bf16. Use ddp."
    if c.device_ids and c.device not in ("auto", "cuda"):
        yield "device_ids", f"empty with device {c.device}", "They number CUDA's devices."
    if c.mirror and c.mirror.rstrip("/") == c.run_dir.rstrip("/"):
        yield "mirror", "another place than run_dir", "A copy there would be lost with it."
    if c.workload == "images" and c.dataset == "imagefolder" and c.data_dir is None:
        yield "data_dir", "a folder of class folders with dataset imagefolder", "Set it with --data-dir."
    if c.workload in ("images", "text") and c.dataset.startswith("hf:") and c.data_dir is not None:
        yield "data_dir", "null with dataset hf:PATH_OR_NAME", "The folder stands behind hf:"


# YAML: PyYAML with the scalars of YAML 1.2. By default PyYAML follows YAML 1.1. There `3e-4` is a text, `no` is false,
# `010` is eight, and the last of two equal keys wins silently. Each of these would change a run ----------------------

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
    # With the loader's table the dumper quotes a text exactly if the loader would read it as another type ("1e5")
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


for _name, _pattern in _SCALARS.items():
    _Loader.add_implicit_resolver(_CORE + _name, re.compile(_pattern), None)  # None: for any first character
# Double quotes keep line breaks (U+0085 is one too), and keep the text on the one line of `dump_value`
_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
    f"{_CORE}str", text, style=None if text.isprintable() else '"'))


def scalar(text: str) -> Any:
    """Return what YAML reads from a text without quotes: None, a bool, int or float, or the text itself."""
    if any(re.match(pattern, text) for pattern in _SCALARS.values()):
        return yaml.load(text, Loader=_Loader)
    return text


def read_yaml(file: str) -> dict[str, Any]:
    """Read settings from a YAML file. Raises UserError, which names the line in the file."""
    try:
        found = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=_Loader)  # a SafeLoader: plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context or "syntax").split())[:200]
        raise UserError(f"{file}:{mark.line + 1 if mark else 1}: not valid YAML: {problem}.") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}.") from error
    except Exception as error:  # of several types: bytes that are not UTF-8, or a tag such as !!bool on another value
        raise UserError(f"{file}: not valid YAML: {' '.join(str(error).split())}.") from error
    if found is not None and not isinstance(found, dict):
        raise UserError(f"{file}: settings must be lines of `name: value`, got a {type(found).__name__}.")
    return found or {}


def dump_value(value: Any) -> str:
    """Return a value as one line of YAML. `read_yaml` reads the same value back."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def describe(value: Any) -> str:
    """Return a value as messages show it: texts in quotes, other values as YAML, at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else dump_value(value)
    text = text.encode(errors="backslashreplace").decode()  # print fails for bytes of argv that are not UTF-8
    return text if len(text) <= 80 else text[:77] + "..."
