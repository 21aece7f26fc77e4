"""Saves of a run. Plain ones go on beside the training: rank 0 copies its state, and a thread writes the copy.

So the ranks stand still for the copy alone, not for digests and the disk (tests/bench/saves.py measures both). To write
beside the next steps is the idea of CheckFreq (Mohan et al., FAST '21). The thread calls no collective: gloo pairs them
by their order, and the loop calls its own meanwhile.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rankup.agent.limits import memory_available
from rankup.errors import UserError
from rankup.state import copies
from rankup.state.copies import STATE, Content, fingerprint_tensors
from rankup.state.shards import write_shards
from rankup.state.tree import Tensors, encode, files_of, is_dense

# A save needs its copy; and as much again stays free
ROOM = 2


class Saver:
    """Writes the copies of a run into `directory`, at most one at a time."""

    def __init__(
        self, group: Any, directory: Path, *, on_rank0: Callable[[Callable[[], Any]], Any], how: str, sharded: bool,
        keep: int, timeout_s: float, check_owner: Callable[[], None],
        copier: Any = None, upload: Callable[..., None] | None = None,
    ) -> None:
        """`on_rank0`: calls a function on rank 0 and returns its result on all ranks, or raises there what it raised.

        `how`: sync, async, or auto, which is async where memory allows it. `sharded`: each rank writes its
        part. `keep`: how many copies stay. `timeout_s`: of one save. `check_owner`: see `rankup.state.copies.publish`;
        rank 0 alone calls it. `copier`: the one rank's that keeps the newest copy a second time. `upload`: writes a
        published copy to another place too, `upload(path, timeout_s=...)`; rank 0's.
        """
        self.group, self.directory, self.on_rank0, self.how, self.sharded = group, directory, on_rank0, how, sharded
        self.keep, self.timeout_s,  self.check_owner = keep, timeout_s,  check_owner
        self.copier, self.upload = copier, upload
        # Rank 0's; the others never have a thread
        self._copies = HostCopies(group.device)
        self._beside_training: bool | None = None  # decided at the first save, when the size of the state is known
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._began_s, self._step = 0.0, 0
        self._published = threading.Event()  # what the thread writes stands in `directory`
        self._tensors = ""  # the fingerprint of those in the copy that was written last

    def save(
        self, step: int, record: bytes, tracked: dict[str, Any], *, may_go_on: bool, flush: Callable[[], None],
        wait: bool,
    ) -> bool:
        """Write one copy. All ranks call this, rank 0 publishes.

        Returns True where rank 0 goes on to write beside the training. Then all ranks call `ended` at each step until
        it returns True, and call this no more before that. `may_go_on`: False where the method of training in parallel
        does not allow that.

        `record`: the contents of `state.json`. `tracked`: whole on rank 0, or each rank's part where copies are
        sharded. `flush`: of the metrics. A resumed run does not repeat the saved steps, so their metrics must be on the
        disk first. `wait`: the training ends with this one.
        Raises, on all ranks, UserError where rank 0 can't write, and PeerLost where another attempt owns the run.
        """
        if self.sharded:
            return self._save_shards(step, record, tracked, flush)

        def begin() -> tuple[bool, str]:
            flush()
            return self._begin(step, record, tracked, may_go_on), self._tensors

        if self.copier is not None and may_go_on:  # this rank has all that rank 0 has
            self.copier.begin(step, record, tracked, wait=wait)
        self._step = step
        under_way, written = self.on_rank0(begin)
        if not under_way:
            self._confirm(written)
        return bool(under_way)

    def ended(self, *, wait: bool) -> bool:
        """Whether rank 0 has written what `save` began; with `wait` it gets done first. All ranks call this.

        Raises as `save` does.
        """
        if not wait and not self.group.max(int(self.group.is_rank0 and self._due)):
            return False
        self._confirm(self.on_rank0(self._finish))
        return True

    @property
    def writing(self) -> bool:
        """Whether a thread of this process is writing at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Let the copy get published within its deadline, because this process is about to end. Raises nothing.

        An upload is not waited for: the next attempt makes it.
        """
        if self._thread is not None:  # any thread may call this, and the main one be in `_finish`
            self._published.wait(max(0.0, self._left_s()))

    def _confirm(self, tensors: str) -> None:
        if self.copier is not None:
            self.copier.confirm(self._step, tensors)

    # Rank 0 ---------------------------------------------------------------------------------------------------

    def _begin(self, step: int, record: bytes, tracked: dict[str, Any], may_go_on: bool) -> bool:
        assert self._thread is None, "the save before has to be finished first"
        nodes, tensors = encode(tracked)
        if self._beside_training is None:
            self._beside_training = may_go_on and beside_training(tensors, self.how, say=self.group.log.info)
        if not self._beside_training:
            with self._while_ours():
                path = self._publish(step, {STATE: record, **files_of(nodes, tensors)})
                return self._upload_published(path, step)
        copied = self._copies.take(tensors)

        def publish_it() -> Path:
            self._copies.wait()
            return self._publish(step, {STATE: record, **files_of(nodes, copied)})

        self._start(publish_it, step)
        return True

    def publish_files(self, step: int, files: Mapping[str, Content]) -> None:
        """Write a copy of these files, and upload it where that is wanted: this process ends. Raises as `save` does.

        Rank 0 calls it, from any thread, while nothing else is written."""
        with self._while_ours():
            path = self._publish(step, files)
            if self.upload is not None:
                self.upload(path, timeout_s=self.timeout_s)

    def upload_beside(self, path: Path, *, step: int) -> None:
        """Upload a copy that is published already, beside the training; `ended` says when that is done."""
        self._start(lambda: path, step)

    def _upload_published(self, path: Path, step: int) -> bool:
        """Upload it, where that is wanted. Whether that goes on beside the training.

        It reads files, and needs no memory: the training goes on unless each save is to be waited for.
        """
        if self.upload is None:
            return False
        if self.how == "sync":
            self.upload(path, timeout_s=self.timeout_s)
            return False
        self.upload_beside(path, step=step)
        return True

    def _start(self, publish_it: Callable[[], Path], step: int) -> None:
        self._failure, self._began_s, self._step = None, time.monotonic(), step
        self._published.clear()
        self._thread = threading.Thread(target=self._write, args=(publish_it,), name="save", daemon=True)
        self._thread.start()

    def _write(self, publish_it: Callable[[], Path]) -> None:
        try:
            with self._while_ours():
                path = publish_it()
                self._published.set()
                if self.upload is not None:
                    self.upload(path, timeout_s=self._left_s())
        except BaseException as error:  # a fault too: `_finish` raises it where the loop sees it
            self._failure = error
        finally:
            self._published.set()

    def _publish(self, step: int, files: Mapping[str, Content]) -> Path:
        path = copies.save(self.directory, files, step=step, keep=self.keep, check_owner=self.check_owner)
        self._tensors = fingerprint_tensors(path)
        return path

    @contextlib.contextmanager
    def _while_ours(self) -> Iterator[None]:
        """Raises PeerLost in place of an error where another attempt owns the run by now: it removes our files."""
        try:
            yield
        except (OSError, UserError):
            self.check_owner()
            raise

    @property
    def _due(self) -> bool:
        """Whether it is time to finish: the thread is done, or has taken longer than it may."""
        return not self.writing or self._left_s() <= 0

    def _left_s(self) -> float:
        return self._began_s + self.timeout_s - time.monotonic()

    def _finish(self) -> str:
        """Wait for the thread, and raise what it raised. Returns the fingerprint of the tensors that it has written."""
        assert self._thread is not None
        if self.writing:
            # The deadline counts from the beginning: past it, on a disk that hangs, the watchdog ends this process
            self.group.watch.enter("save", self.timeout_s, step=self._step, since_s=self._began_s)
            self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure
        return self._tensors

    # All ranks ------------------------------------------------------------------------------------------------

    def _save_shards(self, step: int, record: bytes, tracked: dict[str, Any], flush: Callable[[], None]) -> bool:
        def begin() -> str:
            flush()
            self.check_owner()
            return copies.create_staging(self.directory, step).name

        staging = self.directory / self.on_rank0(begin)
        try:
            files, written = write_shards(staging, tracked, self.group)
        except UserError:
            # All ranks raise it together, so no rank still writes there
            if self.group.is_rank0:
                shutil.rmtree(staging, ignore_errors=True)
            self.on_rank0(self.check_owner)
            raise

        def publish_it() -> bool:
            with self._while_ours():
                path = copies.publish(
                    staging, {STATE: record, **files}, written, step=step, keep=self.keep, check_owner=self.check_owner
                )
                return self._upload_published(path, step)

        return bool(self.on_rank0(publish_it))


# Copies in memory --------------------------------------------------------------------------------------------------


def beside_training(tensors: Tensors, how: str, *, say: Callable[[str], None]) -> bool:
    """Whether to save `tensors` beside the training. `how`: sync, async, or auto, which asks how much memory is free.

    `say` gets a line where that is too little. Asked once in a run: the memory of a copy is kept from then on.
    """
    if how != "auto":
        return how == "async"
    needed, free = ROOM * sum(tensor.nbytes for tensor in tensors.values()), memory_available()
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
