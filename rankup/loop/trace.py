"""Digests of batches, by which a resume sees whether a loader gives the batches again that it gave before."""

import sys
import zlib
from collections import deque
from collections.abc import Mapping
from itertools import chain, islice
from typing import Any

import torch

EVERY = 16  # only the first batches and every 16th count: a digest takes 30 µs, as long as all the rest of a step
FIRST = 4
PIECES = 1000  # of a batch, at most
PER_DIMENSION = (64, 16, 8, 5)  # elements to read in each dimension of a tensor that has 1, 2, 3, or more dimensions


def last_traced(count: int) -> int:
    """Return the number of the last of `count` batches that counts."""
    return count - 1 if count <= FIRST else max(FIRST - 1, (count - 1) // EVERY * EVERY)


class Trace:
    """A digest of one rank's batches of a pass. `rolls`: of all batches so far that count, instead of the newest one.
    `value`: the digest, None if it is unknown."""

    def __init__(self, *, rolls: bool) -> None:
        self.rolls = rolls
        self.value: int | None = 0

    def add(self, number: int, batch: Any) -> int | None:
        """Add batch `number`, and return the value."""
        if (number < FIRST or not number % EVERY) and (self.value is not None or not self.rolls):
            self.value = digest_of(batch, self.value or 0 if self.rolls else 0)
        return self.value


def digests_of_data(dataset: Any) -> dict[str, int]:
    """Return digests of the lists, arrays and tensors that a data set and the data sets in it hold, by path."""
    found, path = dict[str, int](), "dataset"
    for _ in range(4):
        attributes = getattr(dataset, "__dict__", {})
        found |= {f"{path}.{name}": digest_of(value) for name, value in attributes.items()
                  if isinstance(value, list | tuple | torch.Tensor) or hasattr(value, "__array_interface__")}
        dataset, path = attributes.get("dataset"), f"{path}.dataset"
    return found


def digest_of(batch: Any, before: int = 0) -> int:
    """Return a digest of 32 bits of a batch of any structure, following the digest `before`.

    It reads some elements of each array and of each tensor in the host's memory. It knows only the type of what is on
    another device, because the host would wait for it, and of an object without attributes."""
    total, todo = before, deque([batch])
    for _ in range(PIECES):
        if not todo:
            break
        value = todo.pop()
        content = b""
        if value is None or isinstance(value, bool | int | float | complex):
            content = repr(value).encode()
        elif isinstance(value, str | bytes):
            content = repr((len(value), value[:256])).encode()
        elif isinstance(value, torch.Tensor):
            content = _of_tensor(value)
        elif hasattr(value, "__array_interface__") and "numpy" in sys.modules:  # numpy's arrays, images
            content = _of_array(sys.modules["numpy"].asarray(value))
        elif isinstance(value, Mapping):
            todo += chain.from_iterable(value.items())
        elif isinstance(value, list | tuple | deque):
            content = str(len(value)).encode()
            todo += islice(value, 0, None, -(-len(value) // PER_DIMENSION[0]) or 1)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            todo.append(vars(value))
        total = zlib.crc32(content, zlib.crc32(type(value).__name__.encode(), total))
    return total


def _of_tensor(tensor: torch.Tensor) -> bytes:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return b""
    some = tensor.detach()[_some(tensor.shape)].resolve_conj().resolve_neg().contiguous()
    return repr([*tensor.shape]).encode() + some.reshape(-1).view(torch.uint8).numpy().tobytes()


def _of_array(array: Any) -> bytes:
    some = array[_some(array.shape)]
    content: bytes = repr(some.tolist()).encode() if array.dtype.hasobject else some.tobytes()
    return repr(array.shape).encode() + content


def _some(shape: Any) -> tuple[slice, ...]:
    """Return an index of some elements in each dimension of an array."""
    most = PER_DIMENSION[min(len(shape), len(PER_DIMENSION)) - 1]
    return tuple(slice(None, None, -(-size // most) or 1) for size in shape)
