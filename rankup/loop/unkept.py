"""What changes while a job trains and is in no copy: a resume can't restore it, so one line says so."""

import re
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from rankup.loop.generators import Generators, is_generator
from rankup.loop.script import Scope, attributes, handed_on, intercepts, of_library, overwritten, scopes

LOOKS = 2  # after the first steps of an attempt; one more follows the first step of its next epoch
LARGE_BYTES = 64 * 2**20  # don't look at more of an object
MOST = 5000  # objects to look into
ELEMENTS = 1000  # of a list or dict to look into
NUMBERS = (bool, int, float, complex)
PLAIN = (*NUMBERS, str, bytes, type(None))
CODE = (ModuleType, FunctionType, type)
OF_MODULES = vars(nn.Module()).keys()
SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state")  # methods by which a module may save more
WATCHED = (Optimizer, torch.amp.GradScaler, DataLoader)  # other lines name these
Flags = dict[str, list[list[int]]]


class Unkept:
    """Looks for what changes from one step to the next and is in no copy: non-persistent buffers, attributes and
    generators of random numbers in tracked modules; generators and objects with a state in the script's variables; in
    a resumed attempt also variables that the script's loops hand from one pass to the next."""

    def __init__(self, items: dict[str, Any], warn: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._items, self._warn, self._say, self._left = items, warn, say, LOOKS + 1
        # By path and id: what it was after the step before. The references are weak, because the script may drop it
        self._seen: dict[tuple[str, int], tuple[Callable[[], Any], int]] = {}
        self._said = set[str]()

    def look(self, sources: list[Any], trained: set[int], *, outer: bool, inner: bool) -> None:
        """Call this after each of the first steps, and after the first step of the next epoch. `sources`: what reads
        the script's loaders. `trained`: ids of what another line names. `outer`, `inner`: see `handed_on`."""
        if not self._left or not self._items:
            return
        self._left -= 1
        with suppress(Exception):  # no object of the script, however odd, may end its training
            self._look(sources, trained, scopes(), outer=outer, inner=inner)
        if not self._left:
            self._seen.clear()

    def _look(self, sources: list[Any], known: set[int], found: list[Scope], *, outer: bool, inner: bool) -> None:
        modules = {name: item for name, item in self._items.items() if isinstance(item, nn.Module)}
        known = known | _known(self._items, [each.loader for each in sources])
        selves = [each.variables["self"] for each in found if "self" in each.variables]
        scope = [vars(sys.modules["__main__"]), *(each.variables for each in found)]
        scope += [{f"self.{name}": value for name, value in attributes(each).items()} for each in selves]
        variables = [(name, value) for each in scope for name, value in [*each.items()]
                     if not (issubclass(type(value), (*PLAIN, *CODE)) or id(value) in known or intercepts(type(value)))]

        own = {id(each) for source in sources for one in (source.orders, source.content) for each in one.found.values()}
        generators = Generators({**modules, **{name: each for name, each in variables if is_generator(each)}})
        digests = generators.digests()
        for path, each in generators.found.items():
            if id(each) not in own and self._changed(path, each, digests[path]):
                self._name(f"the generator {_short(path)}", "differ, unless the code seeds it in each step. Draw from "
                           "torch, numpy.random or random")
        for path, key, module, value in _unsaved(modules):
            buffer = key in module._buffers
            shape = f"{path} {getattr(value, 'shape', '')}"  # a cache that grows with its input is no state
            if self._changed(shape, module, _digest([value])) and (buffer or not overwritten(type(module), key, found)):
                why = ", because it has persistent=False" if buffer else ""
                self._name(f"the {'buffer' if buffer else 'attribute'} {path}", "may differ", why)

        shapes = {each.shape for item in modules.values() for each in item.parameters() if each.numel() > 1}
        for path, each in {id(each): (path, each) for path, each in variables}.values():
            with suppress(Exception):
                digest = None if id(each) in map(id, selves) else _state_of(each, known, shapes)
                if digest is not None and self._changed(path, each, digest):
                    self._name(path, "may differ. Give it, or the tensors that it holds, to job.track")
        if self._left == LOOKS and (outer or inner) and (
            names := handed_on(found, lambda value: _is_kept(value, known), outer=outer, inner=inner)
        ):
            self._say(_beginning_anew(names))

    def _changed(self, path: str, owner: Any, digest: int) -> bool:
        """Return whether the same object had another digest before."""
        try:
            reference: Callable[[], Any] = weakref.ref(owner)
        except TypeError:  # such as numpy's generators
            reference = lambda: owner  # noqa: E731
        before, earlier = self._seen.get((path, id(owner)), (reference, digest))
        self._seen[path, id(owner)] = reference, digest
        return before() is owner and earlier != digest

    def _name(self, what: str, weights: str, why: str = "") -> None:
        """Warn once of something."""
        if what not in self._said:
            self._said.add(what)
            self._warn(
                f"track: {what} changes in each {'step' if self._left else 'epoch'}, and no checkpoint holds it{why}: "
                f"after a resume it begins anew, and the weights {weights}"
            )


def _beginning_anew(names: list[str]) -> str:
    """Say that these variables begin anew in this attempt, and what to write instead."""
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    begins, them = ("begins", "it") if len(names) == 1 else ("begin", "them")
    key = names[0].rpartition(".")[2]
    return (
        f"track  {listed} {begins} anew in this resume, because no checkpoint holds {them}. If training depends on "
        f"{them}, use a dict instead, change it in the block of job.step, and track it: "
        f'state = {{"{key}": 0.0}}; job.track(state=state, missing="keep")'
    )


def _known(items: dict[str, Any], loaders: list[Any]) -> set[int]:
    """Return the ids of what a copy holds, or what belongs to loaders."""
    modules = [each for item in items.values() if isinstance(item, nn.Module) for each in item.modules()]
    held = [each for module in modules for each in (module, *module._parameters.values(), *module._buffers.values())]
    others = [item for item in items.values() if not isinstance(item, nn.Module)]
    found = _reached([*others, *loaders, *(part for each in loaders for part in attributes(each).values())])
    return {id(each) for each in (*held, *found) if not isinstance(each, PLAIN)}


def _is_kept(value: Any, known: set[int]) -> bool:
    """Return whether a variable holds what a copy holds or rankup owns, or code."""
    return (id(value) in known and not isinstance(value, PLAIN)) or f"{type(value).__module__}".startswith("rankup.")


def _reached(roots: Iterable[Any], without: Iterable[int] = ()) -> list[Any]:
    """Return what these objects consist of: they themselves, what is in lists and dicts, and in objects with a state.
    No property and no method of the user runs."""
    found, seen, todo = list[Any](), {*without}, deque(roots)
    while todo and len(found) < MOST:
        each = todo.popleft()
        if isinstance(each, PLAIN) or not (id(each) in seen or intercepts(type(each))):
            seen.add(id(each))
            found.append(each)
            if isinstance(each, dict):
                todo.extend(islice(dict.values(each), ELEMENTS))
            elif kind := next((kind for kind in (list, tuple, deque) if isinstance(each, kind)), None):
                todo.extend(islice(kind.__iter__(each), ELEMENTS))  # the user's own may do more
            elif isinstance(each, nn.Module):
                todo.extend((*each._parameters.values(), *each._buffers.values(), *each._modules.values()))
                if not type(each).__module__.startswith("torch."):
                    todo.extend(value for name, value in attributes(each).items() if name not in OF_MODULES)
            elif _has_state(each) and not isinstance(each, WATCHED):
                todo.extend(attributes(each).values())
    return found


def _has_state(value: Any) -> bool:
    return hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict")


def _state_of(value: Any, known: set[int], shapes: set[torch.Size]) -> int | None:
    """Return a digest of what a variable of the script holds and no copy does. None for what has no state: neither a
    state_dict nor, if it is of the script's own class, tensors that are shaped as weights."""
    kind = type(value)
    if isinstance(value, WATCHED) or f"{kind.__module__}".startswith("rankup."):
        return None
    if _has_state(value):
        return _digest(_reached([value], known))
    if of_library(kind):
        return None
    parts = _reached(attributes(value).values(), known)
    return _digest(each for each in parts if isinstance(each, torch.Tensor) and each.shape in shapes)


def _digest(values: Iterable[Any]) -> int:
    """Return a digest of numbers and plain tensors, of LARGE_BYTES at most."""
    found, left = 0, LARGE_BYTES
    for each in values:
        if isinstance(each, NUMBERS):
            found = zlib.crc32(repr(each).encode(), found)
        elif isinstance(each, torch.Tensor) and _is_plain(each) and each.nbytes <= left:
            left -= each.nbytes
            flat = each.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
            found = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), found)
    return found


def _is_plain(value: torch.Tensor) -> bool:
    usual = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    return usual and not (value.is_quantized or value.is_nested or value.device.type == "meta")


def _unsaved(modules: dict[str, nn.Module]) -> Iterator[tuple[str, str, nn.Module, Any]]:
    """Iterate over the buffers and the plain attributes of modules that no state_dict holds, with their paths."""
    for name, module in modules.items():
        for path, each in module.named_modules():
            found = {key: each._buffers.get(key) for key in each._non_persistent_buffers_set}
            own = [kind for kind in type(each).__mro__ if not of_library(kind)]
            if own and all(getattr(type(each), word) is getattr(nn.Module, word) for word in SAVING):
                # What has a gradient is no state: the next backward pass could not use it. torch computes `weight` from
                # weight_orig or weight_g
                found |= {key: value for key, value in attributes(each).items()
                          if (type(value) in NUMBERS or (type(value) is torch.Tensor and not value.requires_grad))
                          and key not in OF_MODULES and not any(one.startswith(f"{key}_") for one in each._parameters)}
            yield from ((".".join(filter(None, (name, path, key))), key, each, value) for key, value in found.items())


def _short(path: str) -> str:
    return re.sub(r"\._modules\['(\w+)'\]", r".\1", path)


def flags_of(modules: dict[str, nn.Module], bare: dict[str, dict[str, str]]) -> Flags:
    """Return for each module how many parameters are trained and how many modules are in training mode, and a digest of
    which these are. A script changes both, and no state_dict holds them. `bare`: names without those of wrappers."""
    return {
        name: [
            _counted(bare[name].get(path, path) for path, each in item.named_parameters() if each.requires_grad),
            _counted(bare[name].get(path, path) for path, each in item.named_modules() if each.training),
        ]
        for name, item in modules.items()
    }


def differing_flags(before: Flags, now: Flags) -> str:
    """Return what differs in words, or ""."""
    found = []
    for name, kinds in now.items():
        for (count, digest), (old, other), what in zip(
            kinds, before.get(name, kinds), ("parameters with requires_grad", "modules in training mode"), strict=True
        ):
            if digest != other:
                had = f"had {old}" if old != count else "had others"
                found.append(f"{name} has {count} {what} and {had} in the checkpoint")
    return ", ".join(found)


def _counted(paths: Iterable[str]) -> list[int]:
    known = sorted({*paths})
    return [len(known), zlib.crc32("\n".join(known).encode())]
