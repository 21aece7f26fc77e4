"""Generators of random numbers that belong to a user's loader: to its data set, transforms, sampler, collate function.

Such a generator lives on across batches and epochs, and no copy holds its state. rankup finds and seeds it, as it seeds
the global ones. It can't find all: what a generator function has in its local variables stays hidden.
"""

import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from rankup.seeds import host_state, host_state_kept, seed_host, set_host_state

AHEAD = 32  # batches to draw from a sampler at a time, because each change of the random state costs 0.1 ms
MOST = 2000  # objects to look into
ELEMENTS = 100  # of a list or dict to look into
PLAIN = (
    str, bytes, bytearray, int, float, complex, range, set, frozenset, type(None), type, ModuleType, torch.Tensor,
    torch.dtype, torch.device,
)
LIBRARIES = {"builtins", "torch", "typing", "abc", "collections", "functools"}  # no method draws from their variables
CONTENT = ("dataset", "collate_fn")  # these parts of a DataLoader make samples, and all others their order
# rankup has always seeded these. They keep their numbers
KNOWN = {"generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator",
         "dataset.generator"}


def parts_of(loader: Any) -> dict[str, Any]:
    """Return the attributes of a DataLoader by name, or any other loader as "loader"."""
    if not isinstance(loader, DataLoader):
        return {"loader": loader}
    return {name: part for name, part in vars(loader).items() if name != "_iterator"}


class Generators:
    """The generators that `parts` own, by path, such as "dataset.transform.rng". The seed of each depends on its path.

    `apart`: paths of those that have a seed of their own on each rank, here on `rank`.
    """

    def __init__(self, parts: Mapping[str, Any], *, apart: Iterable[str] = (), rank: int = 0) -> None:
        self.found = _find(parts)
        self._seeded = [
            (0 if path in KNOWN and isinstance(each, torch.Generator)
             else zlib.crc32((f"{path} {rank}" if path in apart else path).encode()), each)
            for path, each in self.found.items()
        ]

    def seed(self, seed: int) -> None:
        """Seed all. This runs for each sample."""
        for key, each in self._seeded:
            _seed(each, seed + key)

    def digests(self) -> dict[str, int]:
        """Return a digest of each one's state, by path."""
        states = {path: _state(each) for path, each in self.found.items()}
        return {path: zlib.crc32(repr(state.tolist() if isinstance(state, torch.Tensor) else state).encode())
                for path, state in states.items()}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore their states, and the host's random state, after the block."""
        states = [_state(each) for each in self.found.values()]
        try:
            with host_state_kept():
                yield
        finally:
            self._restore(states)

    def drawn_apart(self, make: Iterable[Any], seed: int) -> Iterator[list[Any]]:
        """Iterate over the sampler `make`, to which they belong, with a random state of its own, seeded with `seed`,
        and yield its batches in lists of AHEAD. Other code that draws random numbers neither changes these batches nor
        is changed by them."""
        with self.kept():
            seed_host(seed)
            self.seed(seed)
            iterator = iter(make)
            state, states = host_state(), [_state(each) for each in self.found.values()]
        while True:
            with self.kept():
                set_host_state(state)
                self._restore(states)
                chunk = [*islice(iterator, AHEAD)]
                state, states = host_state(), [_state(each) for each in self.found.values()]
            yield chunk
            if not chunk:
                return

    def _restore(self, states: list[Any]) -> None:
        for each, state in zip(self.found.values(), states, strict=True):
            if isinstance(each, random.Random):
                each.setstate(state)
            elif hasattr(each, "bit_generator"):
                each.bit_generator.state = state
            else:
                each.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def is_generator(value: Any) -> bool:
    """Return whether `value` is a generator that can be seeded, and not one of the global ones."""
    if isinstance(value, random.Random):
        return value is not random._inst and not isinstance(value, random.SystemRandom)
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if (numpy := sys.modules.get("numpy.random")) is None:
        return False
    if isinstance(value, numpy.RandomState):  # it can be seeded only with numpy's usual bits
        return value is not numpy.mtrand._rand and isinstance(value._bit_generator, numpy.MT19937)
    return isinstance(value, numpy.Generator)


def _find(parts: Mapping[str, Any]) -> dict[str, Any]:
    found, seen, todo = dict[str, Any](), set[int](), deque(parts.items())
    while todo and len(seen) < MOST:  # breadth first: what lies deep in large structures is found last
        path, value = todo.popleft()
        if isinstance(value, PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if is_generator(value):
            while path in found:  # two modules with a generator of this name
                path += "'"
            found[path] = value
        elif type(value).__module__.partition(".")[0] != "rankup":  # such as a job: its loaders are not this one's
            todo.extend(_inside(path, value))
    return found


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over what `value` refers to, with its path. No property and no method of the user runs."""
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", each) for key, each in islice(dict.items(value), ELEMENTS)
                    if isinstance(key, str | int))
    elif isinstance(value, list | tuple | deque):
        kind: Any = next(each for each in (list, tuple, deque) if isinstance(value, each))  # the user's may do more
        yield from ((f"{path}[{number}]", each) for number, each in enumerate(islice(kind.__iter__(value), ELEMENTS)))
    elif isinstance(value, partial):
        yield path, value.func
        yield from ((f"{path}({number})", each) for number, each in enumerate(value.args))
        yield from ((f"{path}({name})", each) for name, each in value.keywords.items())
    elif isinstance(value, MethodType | BuiltinFunctionType):  # such as `rng.random`
        yield path, value.__self__
        yield path, getattr(value, "__func__", None)
    elif isinstance(value, FunctionType):
        yield from _of_function(path, value)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f"{path}.{name}", each) for name, each in [*attributes.items()] if name != "_iterator")
    slots, known = _of_class(type(value))  # type: ignore[arg-type]
    for name, member in slots:
        try:
            yield f"{path}.{name}", member.__get__(value)
        except AttributeError:  # it has no value yet
            continue
    for name, names in known:
        yield from _of_variable(name, names.get(name))


@cache
def _of_class(kind: type) -> tuple[list[tuple[str, Any]], list[tuple[str, Mapping[str, Any]]]]:
    """Return the slots of a class, and the variables of classes and modules from which its methods may draw."""
    slots, known = list[tuple[str, Any]](), dict[tuple[int, str], tuple[str, Mapping[str, Any]]]()
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] in LIBRARIES:
            continue
        for name, member in vars(each).items():
            if isinstance(member, MemberDescriptorType):
                slots.append((name, member))
            elif isinstance(member, FunctionType):
                names = member.__globals__
                known |= {(id(names), word): (word, names) for word in member.__code__.co_names
                          if not isinstance(names.get(word, each), type | ModuleType | FunctionType)}
            elif is_generator(member):
                known[id(each), name] = (name, vars(each))
    return slots, [*known.values()]


def _of_function(path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"{path}({name})", cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    yield from ((f"{path}({number})", each) for number, each in enumerate(function.__defaults__ or ()))
    yield from ((f"{path}({name})", each) for name, each in (function.__kwdefaults__ or {}).items())
    for name in function.__code__.co_names:  # variables of its module
        yield from _of_variable(name, function.__globals__.get(name))


def _of_variable(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the generators in a variable of a module, which may be a dict or list of them."""
    if is_generator(value):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        yield from (each for each in _inside(name, value) if is_generator(each[1]))
