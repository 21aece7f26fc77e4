"""What lets a rank write beside its training: a thread for one piece of work, and a copy of its state in memory."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from rankup.agent.limits import memory_available
from rankup.state.tree import Tensors, is_dense

T = TypeVar("T")
ROOM = 2  # a save needs its copy, and as much again stays free


class Writing:
    """One piece of work at a time, in a thread or at once, and what it failed with."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._thread: threading.Thread | None = None
        self.began_s = time.monotonic()
        self.failure: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """In a thread. The one before has to be finished."""
        self.join()
        self.began_s, self.failure = time.monotonic(), None
        self._thread = threading.Thread(target=self._work, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T]) -> T | None:
        """At once. Returns None where it fails."""
        self.began_s, self.failure = time.monotonic(), None
        return self._work(work)

    def _work(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except BaseException as error:  # a fault too: it is raised where the loop sees it
            self.failure = error
            return None

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def in_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def until_s(self) -> float:
        return self.began_s + self._timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.until_s - time.monotonic())


class HostCopies:
    """Copies of tensors in memory that is taken once and used by each save anew.

    Fresh memory would cost more than the copy: the kernel clears each page when it is touched first.
    """

    def __init__(self, device: torch.device, how: str = "async", *, say: Callable[[str], None] = print) -> None:
        """`how`: sync, async, or auto, which asks how much memory is free; `say` gets a line where that is too little.
        """
        self.how, self._say = how, say
        self._fit = {"sync": False, "async": True}.get(how)
        # A GPU copies into pinned memory by itself, in the order of its queue, and the host goes on
        self._copied = torch.Event(device) if device.type == "cuda" else None
        self._buffers: Tensors = {}

    def fit(self, tensors: Tensors) -> bool:
        """Whether `tensors` may be copied. Asked once: the memory of a copy is kept from then on."""
        if self._fit is None:
            needed, free = ROOM * sum(tensor.nbytes for tensor in tensors.values()), memory_available()
            self._fit = free >= needed
            if not self._fit:
                self._say(
                    f"save   the training waits for each save: to go on meanwhile takes {needed / 2**20:,.0f} MiB of "
                    f"memory, {free / 2**20:,.0f} are free"
                )
        return self._fit

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
