"""Copies of a training's tensors in host memory, for a save that goes on while the tensors themselves change."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from rankup.agent.limits import memory_available

# The copy and the files made of it at the same time; and as much again stays free
ROOM = 4
Nested = TypeVar("Nested")


def beside_training(value: object, save: str, *, say: Callable[[str], None]) -> bool:
    """Whether to save `value` beside the training. `save`: the setting, of which auto asks how much memory is free.

    `say` gets a line where that is too little. Asked once in a run: the memory of a copy is kept from then on.
    """
    if save != "auto":
        return save == "async"
    needed, free = ROOM * sum(storage.nbytes() for storage in _storages_of(value).values()), memory_available()
    if free < needed:
        say(
            f"save   the training waits for each save: to go on meanwhile takes {needed / 2**20:,.0f} MiB of memory, "
            f"{free / 2**20:,.0f} are free"
        )
    return free >= needed


class HostCopies:
    """Copies of tensors in memory that is taken once and used by each save anew.

    Fresh memory would cost more than the copy: the kernel clears each page when it is touched first.
    """

    def __init__(self, device: torch.device) -> None:
        # A GPU copies into pinned memory by itself, in the order of its queue, and the host goes on
        self._copied = torch.Event(device) if device.type == "cuda" else None
        self._buffers: list[torch.Tensor] = []  # uint8, one for each storage of the last copy

    def take(self, value: Nested) -> Nested:
        """`value` as it is now, tensors and plain values in dicts, lists, tuples and dataclasses, until the next call.

        Tensors that share a storage share one in the copy too, so that a file of the copy has the same bytes. On a GPU
        the copy is complete after `wait` only; the work that is queued from now on does not get into it.
        """
        pinned = self._copied is not None
        free: dict[int, list[torch.Tensor]] = {}
        for buffer in self._buffers:
            free.setdefault(len(buffer), []).append(buffer)
        storages, targets = _storages_of(value), {}
        for place, storage in storages.items():
            size = storage.nbytes()
            fitting = free.get(size)
            targets[place] = fitting.pop() if fitting else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._buffers = list(targets.values())
        sources = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages.values()]
        # One call, in which other threads may run: the lease beats, the deadlines are watched
        if sources:
            torch._foreach_copy_(self._buffers, sources, non_blocking=pinned)
        if self._copied is not None:
            self._copied.record()
        known: dict[int, object] = {}
        for tensor in _tensors(value):
            memory = targets[tensor.untyped_storage()._cdata].untyped_storage()
            same = torch.empty(0, dtype=tensor.dtype)
            known[id(tensor)] = same.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
        # It takes these for the tensors that it comes to, and keeps a state dict's class and its `_metadata`
        return copy.deepcopy(value, known)

    def wait(self) -> None:
        """Wait until the device has made the last copy."""
        if self._copied is not None:
            self._copied.synchronize()


def _storages_of(value: object) -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors in `value`, each once, by what torch.save tells storages apart by."""
    storages = (tensor.untyped_storage() for tensor in _tensors(value))
    return {storage._cdata: storage for storage in storages}


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Those that are a view of one storage and nothing else. `deepcopy` knows what to do with other kinds."""
    if isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        assert isinstance(value, torch.Tensor)
        if value.layout == torch.strided and not (value.is_quantized or value.is_conj() or value.is_neg()):
            yield value
