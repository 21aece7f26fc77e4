"""What may change when a run resumes: the settings that the user gave to `rankup.init`, and the options of optimizers
and schedulers. Each copy holds both, as they were when the run began."""

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rankup.errors import UserError
from rankup.urls import must_hold_no_secrets, secrets_in

# Names of credentials, also as hfToken or hub.token
SECRET = re.compile(
    "(password|passwd|passphrase|secret|token|credentials?|(api|access|secret|private)[_-]?key)$", re.IGNORECASE
)
# A token of texts, by the names that transformers gives to it, or by its brackets: <image>, [SEP], </s>
NAMED_IN_TEXT = re.compile("(bos|eos|unk|sep|pad|cls|mask)[_-]?token$", re.IGNORECASE)
IN_BRACKETS = re.compile(r"\s*(<.*>|\[.*\])?\s*")
ADDRESS = re.compile(r" at 0x[0-9a-f]+>")  # in the text of an object that has none of its own
NOTHING = "nothing"


def plain(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return `value` as JSON gives it back. Sets are sorted, functions and classes become their names, tensors
    and arrays lists, and nested settings dicts; of another object keep what `other` returns."""
    def known(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(value, key=str)
        if hasattr(value, "tolist"):
            return value.tolist()
        if isinstance(value, Mapping | argparse.Namespace) or dataclasses.is_dataclass(value):
            return _by_name(value)
        return getattr(value, "__qualname__", None) or other(value)

    return json.loads(json.dumps(value, default=known))


def _by_name(given: Any) -> dict[str, Any]:
    """Return the settings in a dict, an object or a class. Values of an object's class count too."""
    if isinstance(given, Mapping):
        return {str(name): value for name, value in given.items()}
    kind = given if isinstance(given, type) else type(given)
    members = [(name, value) for each in kind.__mro__ for name, value in vars(each).items()]
    names = [name for name, value in members if inspect.ismemberdescriptor(value) or not hasattr(value, "__get__")]
    names += [] if kind is given else getattr(given, "__dict__", {})
    return {name: getattr(given, name) for name in names if not name.startswith("_")}


def _without_secrets(name: str, value: Any) -> Any:
    """Return a JSON value with *** for passwords and keys, at any depth. Raises UserError for an address with one."""
    if isinstance(value, dict):
        return {key: _without_secrets(name if SECRET.search(name) else key, each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(name, each) for each in value]
    if _is_secret(name, value):
        return "***"
    if isinstance(value, str) and secrets_in(value):
        raise UserError(must_hold_no_secrets(f"settings: {name}"))
    return value


def _is_secret(name: str, value: Any) -> bool:
    """Return whether a number or text is a credential, by its name. A switch or a token of texts is none: what a run
    does not keep may change at a resume, and nothing refuses it."""
    if not SECRET.search(name) or isinstance(value, bool) or value in (None, ""):
        return False
    is_token = name.lower().endswith("token")
    return not (is_token and (
        not isinstance(value, str) or NAMED_IN_TEXT.search(name) or IN_BRACKETS.fullmatch(value)
    ))


def settings_of(given: Any) -> dict[str, Any]:
    """Return the settings that a run keeps. `given`: a dict, or an object with attributes, such as argparse's
    Namespace. A password or key is kept as ***. Raises UserError for a value that can't be compared, or that holds a
    secret."""
    found, named = {}, _by_name(given)
    if not named and not isinstance(given, Mapping):
        raise UserError(f"settings must be a dict, or an object with attributes, got {given!r:.80}. Give vars(args).")
    for name, value in sorted(named.items()):
        if name == "local_rank":  # torch.distributed.launch gives each rank another one
            continue
        try:
            kept = plain(value, str)
        except (TypeError, ValueError):
            kept = ADDRESS
        if kept is ADDRESS or ADDRESS.search(json.dumps(kept)):
            raise UserError(f"settings: {name} must be a number, text, list or dict, got {value!r:.200}. Leave it out.")
        found[name] = _without_secrets(name, kept)
    return found


def as_yaml(settings: Mapping[str, Any]) -> str:
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return by name what differs: "lr was 0.1, is 0.2"."""
    texts = [{name: json.dumps(value, sort_keys=True) for name, value in each.items()} for each in (before, now)]
    return {
        name: f"{name} was {old}, is {new}" for name in sorted({*before, *now})
        if (old := texts[0].get(name, NOTHING)) != (new := texts[1].get(name, NOTHING))
    }


# Options of optimizers and schedulers -------------------------------------------------------------------------------


def options_of(item: Any) -> Any:
    """Return the options of an optimizer, by group, or of a scheduler, as JSON holds them. None stands for others."""
    if isinstance(item, torch.optim.Optimizer):
        live: Any = [{key: each for key, each in group.items() if key != "params"} for group in item.param_groups]
    else:
        live = item.state_dict()
    return plain(live, lambda _: None)


class Options:
    """The options of one optimizer or scheduler when the run began (`first`) and as the program sets them now.

    Make it before the item is restored. If the program sets another value than when the run began, `apply` gives the
    restored item the new value, as if the script had assigned it at this step. If training has changed the value since
    then, as a schedule changes `lr`, it is multiplied by new / first.
    """

    def __init__(self, name: str, item: Any, first: Any) -> None:
        self.name, self.item, self.first, self.now = name, item, first, options_of(item)
        optimizer = isinstance(item, torch.optim.Optimizer)
        fresh = [{**group} for group in item.param_groups] if optimizer else [{**item.__dict__}]
        firsts, now = (each if optimizer else [each] for each in (first, self.now))
        self._parts = [*zip(firsts, now, fresh, strict=False)] if len(firsts) == len(now) else []
        self._inner = [
            Options(name, each, inner) for each, inner in zip(
                getattr(item, "_schedulers", ()), first.get("_schedulers", ()) if isinstance(first, dict) else (),
                strict=False,
            )
        ]

    @property
    def changes(self) -> dict[str, str]:
        """What the program sets otherwise now, by option: "lr: 0.1 -> 0.2"."""
        found = {
            key: f"{self.name}.{key}: {first[key]} -> {now[key]}" for first, now, _ in self._parts
            for key in now if key in first and first[key] != now[key] and key not in ("_last_lr", "_schedulers")
        }
        return found | {key: text for inner in self._inner for key, text in inner.changes.items()}

    def apply(self) -> None:
        """Set the changed options in the restored item. Raises UserError for a value that training has changed and
        that can't be multiplied."""
        groups = self.item.param_groups if isinstance(self.item, torch.optim.Optimizer) else [self.item.__dict__]
        for live, (first, now, fresh) in zip(groups, self._parts, strict=True):
            for key in now:
                if key in ("_last_lr", "_schedulers") or key not in first or first[key] == now[key]:
                    continue
                value, held = fresh[key], plain(live[key], lambda _: None)
                if held != first[key]:
                    if not (key == "lr" and first[key]):
                        raise UserError(
                            f"track: {self.name}.{key} must have its first value, {first[key]}, to change to {now[key]}"
                            f", got {held} by training. Set it back to {first[key]}, or start another run."
                        )
                    value = held * (now[key] / first[key])
                if isinstance(live[key], torch.Tensor):
                    live[key].fill_(value)
                else:
                    live[key] = value
        for inner in self._inner:
            inner.apply()
        if hasattr(self.item, "_last_lr"):
            self.item._last_lr = [group["lr"] for group in self.item.optimizer.param_groups]
