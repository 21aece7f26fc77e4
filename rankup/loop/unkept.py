"""What changes while a job trains and is in no copy: a resume can't restore it, so one line says so."""

import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rankup.loop.generators import Generators, is_generator

LOOKS = 2  # after the first steps of an attempt
LARGE_BYTES = 64 * 2**20  # don't look at larger buffers
Flags = dict[str, list[list[int]]]


class Unkept:
    """Looks for generators of random numbers in the script's variables and in tracked modules, and for buffers with
    persistent=False, that change from one step to the next. `say` is called once for each."""

    def __init__(self, items: dict[str, Any], say: Callable[[str], None]) -> None:
        self._items, self._say, self._left = items, say, LOOKS
        self._seen: dict[str, tuple[Any, Any]] = {}  # by path: what it was after the step before

    def look(self, seeded: Iterable[Generators]) -> None:
        """Call this after each step. `seeded`: generators that rankup seeds."""
        if not self._left or not self._items:
            return
        self._left -= 1
        own = {id(each) for one in seeded for each in one.found.values()}
        modules = {name: item for name, item in self._items.items() if isinstance(item, nn.Module)}
        variables = {name: each for name, each in [*vars(sys.modules["__main__"]).items()] if is_generator(each)}
        found = Generators({**modules, **variables})
        digests = found.digests()
        for path, each in found.found.items():
            if id(each) not in own and self._changed(path, each, digests[path]):
                self._say(
                    f"track: the generator {_short(path)} changes in each step, and no checkpoint holds it: after a "
                    "resume it begins anew, and the weights differ, unless the code seeds it in each step. Draw from "
                    "torch, numpy.random or random"
                )
        for path, buffer in _unsaved(modules):
            # NaN is equal to itself in these
            bits = buffer.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).clone()
            shape, before = self._seen.get(path, (buffer.shape, bits))
            self._seen[path] = buffer.shape, bits
            if shape == buffer.shape and not torch.equal(before, bits):
                self._say(
                    f"track: the buffer {path} changes in each step, and no checkpoint holds it, because it has "
                    "persistent=False: after a resume it begins anew, and the weights may differ"
                )

    def _changed(self, path: str, each: Any, digest: int) -> bool:
        """Return whether the same object had another digest before."""
        one, before = self._seen.get(path, (None, digest))
        self._seen[path] = each, digest
        return one is each and before != digest


def _unsaved(modules: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Iterate over the plain buffers of modules that no state_dict holds, with their paths."""
    for name, module in modules.items():
        for path, each in module.named_modules():
            for key in each._non_persistent_buffers_set:
                buffer: Any = each._buffers.get(key)
                usual = type(buffer) is torch.Tensor and buffer.layout is torch.strided
                odd = usual and (buffer.is_quantized or buffer.is_nested or buffer.device.type == "meta")
                if usual and not odd and buffer.nbytes <= LARGE_BYTES:
                    yield ".".join(filter(None, (name, path, key))), buffer


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
