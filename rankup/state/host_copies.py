"""Copies of tensors in host memory, for a save that goes on while the tensors themselves change."""

from collections.abc import Callable

import torch

from rankup.state.tree import Tensors, is_dense

# A save needs its copy; and as much again stays free
ROOM = 2


def beside_training(tensors: Tensors, save: str, *, free_bytes: Callable[[], int], say: Callable[[str], None]) -> bool:
    """Whether to save `tensors` beside the training. `save`: sync, async, or auto, which asks how much memory is free.

    `say` gets a line where that is too little. Asked once in a run: the memory of a copy is kept from then on.
    """
    if save != "auto":
        return save == "async"
    needed, free = ROOM * sum(tensor.nbytes for tensor in tensors.values()), free_bytes()
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
        self._buffers: Tensors = {}

    def take(self, tensors: Tensors) -> Tensors:
        """The tensors as they are now, until the next call. On a GPU the copies are complete after `wait` only; the
        work that is queued from now on does not get into them."""
        buffers = {name: self._buffer_for(name, tensor) for name, tensor in tensors.items()}
        self._buffers = buffers
        # One call, in which other threads may run: the lease beats, the deadlines are watched
        if buffers:
            torch._foreach_copy_([*buffers.values()], [*tensors.values()], non_blocking=self._copied is not None)
        if self._copied is not None:
            self._copied.record()
        return dict(buffers)

    def wait(self) -> None:
        """Wait until the device has made the last copies."""
        if self._copied is not None:
            self._copied.synchronize()

    def _buffer_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """In the same memory format: else the copy would go element by element."""
        plain = torch.empty(tensor.shape, device="meta")
        stride = tensor.stride() if is_dense(tensor.shape, tensor.stride()) else plain.stride()
        had = self._buffers.get(name)
        if had is not None and (had.dtype, had.shape, had.stride()) == (tensor.dtype, tensor.shape, stride):
            return had
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, pin_memory=self._copied is not None)
