"""Saves in the background: a rank copies its state in memory, and a thread writes the copy (CheckFreq, FAST '21).

The thread calls no collective, because gloo matches collectives by their order, and the loop calls its own at the same
time. Rank 0 writes plain copies. Of a sharded copy each rank writes its part, and rank 0 publishes the copy when the
ranks know that all have written theirs. Until then a lost rank would cost the copy, so they ask each other for that.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from rankup.agent.processes import memory_available
from rankup.errors import PeerLost, UserError, disk_errors, reason
from rankup.group.group import Group
from rankup.places.files import discard, remove_unfinished
from rankup.state import copies
from rankup.state.copies import STATE, Check, Fingerprint, no_check
from rankup.state.place import Folder
from rankup.state.tree import TREE, TensorFile, Tensors, encode, file_of, files_of, local_parts, own_parts, to_file

T = TypeVar("T")
ROOM = 2  # free memory that a background save needs, in multiples of the state: its copy, and as much left free


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to save and resume a run.

    `store`: an address below which the run must be kept too. `mirror`: a folder or an address that gets copies and may
    fail. `fresh`: put the earlier run aside, unless this launch began it. `save`: sync, or auto, which saves in the
    background if enough memory is free. `sharded`: each rank writes its part of split state; otherwise rank 0 gathers
    it. `keep`: how many copies to keep. `memory_every_steps`: see `rankup.state.parts`; with 0 existing parts in memory
    are not used either. `compare_every_steps`: 0 says that ranks hold different states on purpose.

    `check`: raises UserError for a copy from which this attempt may not resume, ValueError for a damaged copy.
    `finished`: called on rank 0 with a copy and the content of `result.json`; returns whether nothing is left to do.
    """

    store: str = ""
    mirror: str = ""
    fresh: bool = False
    save: str = "auto"
    sharded: bool = True
    keep: int = 2
    memory_every_steps: int | None = None
    compare_every_steps: int | None = None
    setup_timeout_s: float = 1800.0
    save_timeout_s: float = 600.0
    check: Check = no_check
    finished: Callable[[Any, dict[str, Any]], bool] = lambda copy, result: False


class BackgroundTask:
    """Runs one piece of work at a time, in a thread or at once. `failure`: what the last piece raised, or None."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._thread = threading.Thread()
        self.began_s = time.monotonic()
        self.failure: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Run `work` in a thread, after the work that is under way has ended."""
        before, self.began_s, self.failure = self._thread, time.monotonic(), None

        def follow() -> None:
            if before.is_alive():
                before.join()
            self.run(work)

        self._thread = threading.Thread(target=follow, name=self._name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T]) -> T | None:
        """Run `work` at once and return its result, or None if it fails."""
        self.began_s, self.failure = time.monotonic(), None
        try:
            return work()
        except BaseException as error:  # also a fault of the program: the loop raises it later
            self.failure = error
            return None

    def join(self, timeout_s: float | None = None) -> None:
        if (thread := self._thread).is_alive():
            thread.join(timeout_s)

    @property
    def under_way(self) -> bool:
        return self._thread.is_alive()

    @property
    def left_s(self) -> float:
        return max(0.0, self.began_s + self._timeout_s - time.monotonic())


class Saver:
    """Writes the copies of a run into `folder`, at most one at a time. All ranks have one. `step`: the step of the save
    that is under way, or None."""

    def __init__(
        self, group: Group, folder: Folder, options: Options, *, token: str, saved: Callable[[int], None],
        second: Folder | None,
    ) -> None:
        """`token`: the token of this attempt, equal on all ranks. `saved`: called on all ranks with the step of each
        published copy. `second`: where this rank keeps second copies. Nothing is sent for them, because this rank has
        the same state as rank 0, see `rankup.loop.agreement`."""
        self.group, self.folder, self.timeout_s = group, folder, options.save_timeout_s
        self.sharded, self.token = options.sharded, token
        self.saved, self.second = saved, second
        self.step: int | None = None
        self._copies = HostCopies(group.device)
        self._beside = False if options.save == "sync" else None  # save in the background? None: not decided yet
        self.writing, self._count = BackgroundTask("save", options.save_timeout_s), 0
        self.writing_second, self._failing = BackgroundTask("copy", options.save_timeout_s), ""
        self._agreed = False  # whether all ranks know that the save has ended
        self._steps = self._ask_at = 0  # since a sharded save began; at which of them the ranks ask each other
        self._said = 0  # the number of the newest save of which `saved` knows
        # For a sharded copy: what this rank has written, and the function that publishes the files of all ranks
        self._staging: Path | None = None  # on rank 0
        self._part: dict[str, Fingerprint] = {}
        self._join_parts: Callable[[dict[str, Fingerprint]], None] | None = None

    def save(
        self, step: int, record: Callable[[], bytes], tracked: dict[str, Any], *, may_continue: bool = True,
        wait: bool = False,
    ) -> None:
        """Write a copy, if possible in the background, after the save before has ended. All ranks call this at the same
        step, then `look` at each step, and `agree` at a step in which they exchange values anyway.

        `record`: returns the content of `state.json`; called on the ranks that write it. `tracked`: the whole state on
        rank 0, or each rank's part if copies are sharded. `may_continue`: whether the training may continue during the
        save, which then copies the state in memory first. `wait`: the training ends with this save.
        Raises on all ranks: UserError if a rank can't write, and PeerLost if another attempt owns the run.
        """
        self.look(wait=True)
        self.group.watch.enter("save", self.timeout_s, step=step)
        if self.second is not None and may_continue:
            self._write_second(self.second, step, record(), tracked, wait=wait)
        self.step, self._count, self._part, self._join_parts = step, self._count + 1, {}, None
        self._steps, self._ask_at = 0, 1
        if self.group.is_rank0 or self.sharded:
            prepared = self.writing.run(lambda: self._prepare(step, record(), tracked, may_continue))
            # No rank may wait for the part of a rank that failed before it wrote any
            failed = self.group.max(int(prepared is None)) if self.sharded else 0
            if prepared and not failed:
                work, beside = prepared
                (self.writing.start if beside else self.writing.run)(work)
        if not self.group.max(int(self.writing.under_way)):
            self._conclude()

    def look(self, *, wait: bool = False) -> None:
        """Conclude the background save if the ranks know that it has ended; with `wait`, wait for it. All ranks call
        this at the same step. Rank 0 knows by itself when a plain copy is whole, and needs not wait for the others.

        Raises as `save` does.
        """
        if self.step is None:
            return
        if wait:
            self.group.watch.enter("save", self.timeout_s, step=self.step)
        elif self.sharded and not self._agreed:
            self._ask()
        if wait or self._agreed or (self.group.world_size == 1 and self.left() <= 0):
            self._conclude()
        elif self.group.is_rank0 and not self.sharded and self.left() == 0:
            self._say_saved(self.step)

    def _ask(self) -> None:
        """Find out whether all ranks have written their parts: in each of the first steps, then ever more rarely, so
        that a long save costs few exchanges and is published at most a quarter later than it is written."""
        self._steps += 1
        if self._steps == self._ask_at:
            self._ask_at += max(1, self._steps // 4)
            self.agree(self.group.sum(torch.tensor(self.left())).item())

    def left(self) -> float:
        """Return this rank's part of a sum over all ranks, by which they know whether to conclude a save: above 0 while
        a rank writes. For a plain copy a step has no exchange of its own."""
        if self.writing.failure is not None:
            return -1e9  # a failure ends the save on all ranks, although others still write
        return float(self.writing.under_way and self.writing.left_s > 0)

    def agree(self, left: float) -> None:
        """Take the sum, or the mean, of all ranks' `left` at this step."""
        self._agreed = self.step is not None and left <= 0

    def wait(self) -> None:
        """Wait until the copy is published or its deadline has passed, because this process is about to end. Any thread
        may call this. Raises nothing. Does not wait for a sharded copy, which needs the other ranks too."""
        if self._join_parts is None:
            self.writing.join(self.writing.left_s)

    # Each rank that writes ------------------------------------------------------------------------------------

    def _prepare(
        self, step: int, record: bytes, tracked: dict[str, Any], may_continue: bool
    ) -> tuple[Callable[[], None], bool]:
        """Return the work of this rank for the save, and whether to do it in the background."""
        # Never use a staging name twice: NFS may still have cached that the name is now the published copy's folder
        folder, staging = self.folder, copies.staging_of(self.folder.path, step, f"{self.token}-{self._count}")
        if self.group.is_rank0 and self.sharded:
            folder.check_owner()
            self._staging = folder.stage(staging)
        nodes, tensors = encode(tracked)
        places = None
        if self.sharded:
            tensors, places = local_parts(own_parts(tensors, self.group.rank))
        if beside := may_continue and self._fit(tensors):
            tensors = self._copies.take(tensors)

        def write() -> None:
            self._copies.wait()
            if not self.sharded:
                folder.write(step, {STATE: record, **files_of(nodes, tensors)})
                return
            name = file_of(self.group.rank)
            with disk_errors("checkpoint", folder.path, folder.check_owner):
                self._part = {name: copies.write_durably(staging / name, TensorFile(tensors, places))}

        def join_parts(written: dict[str, Fingerprint]) -> None:
            folder.publish(staging, step, {STATE: record, TREE: to_file(nodes)}, written)

        self._join_parts = join_parts if self.sharded else None
        return write, beside

    def _write_second(
        self, folder: Folder, step: int, record: bytes, tracked: dict[str, Any], *, wait: bool
    ) -> None:
        """Begin to write a second copy, unless one is being written: no step and no save waits for it. `wait`: wait for
        that one first. A failure is only logged, in one line."""
        if wait:
            self.wait_for_second()
        if self.writing_second.under_way:
            return
        nodes, tensors = encode(tracked)
        files = {STATE: record, **files_of(nodes, self._copies.take(tensors))}

        def write() -> None:
            try:
                self._copies.wait()
                remove_unfinished(folder.path)
                folder.write(step, files)
                self._failing = ""
            except Exception as error:  # a second copy that fails must not end the training
                if (text := f"no second copy: {reason(error)}") != self._failing:  # do not repeat the same warning
                    self.group.log.warning(text)
                self._failing = text

        self.writing_second.start(write)

    def wait_for_second(self) -> None:
        self.writing_second.join(self.writing_second.left_s)

    def _fit(self, tensors: Tensors) -> bool:
        """Return whether there is memory for copies of `tensors`. Decided once, because the buffers are then kept."""
        if self._beside is None:
            # Of a sharded copy all ranks of the node copy their parts at the same time, and all look before
            ranks = (self.group.rank_env.local_world_size or 1) if self.sharded else 1
            needed, free = ROOM * ranks * sum(tensor.nbytes for tensor in tensors.values()), memory_available()
            self._beside = free >= needed
            if not self._beside:
                self.group.log.info(
                    f"save   the training waits for each save: a background save needs {needed / 2**20:,.0f} MiB of "
                    f"memory, {free / 2**20:,.0f} MiB are free"
                )
        return self._beside

    def _conclude(self) -> None:
        """Wait for the save, and publish a sharded copy. Raises on all ranks what the save raised on a rank."""
        assert self.step is not None
        if self.writing.under_way:
            # The deadline counts from the start of the save. If the disk hangs, the watchdog then ends this process
            self.group.watch.enter("save", self.timeout_s, step=self.step, since_s=self.writing.began_s)
            self.writing.join()
        own = self.writing.failure
        if own is not None and not isinstance(own, UserError | PeerLost):
            raise own  # a fault of the program: the other ranks lose this rank
        found = self.group.gather([type(own).__name__ if own else "", str(own) if own else "", self._part])
        # PeerLost first: if another attempt has removed our files, ranks must not blame their disks
        failed = [(kind, text) for kind, text, _ in found if kind]
        for kind, text in sorted(failed, key=lambda failure: failure[0] != "PeerLost"):
            if self._staging is not None:
                discard(self._staging)
            raise (PeerLost if kind == "PeerLost" else UserError)(text, printed_elsewhere=not self.group.is_rank0)
        join_parts, self._join_parts = self._join_parts, None
        if join_parts is not None:
            written = {name: entry for *_, part in found for name, entry in part.items()}
            self.group.on_rank0(lambda: join_parts(written))
        step, self.step, self._agreed = self.step, None, False
        self._say_saved(step)

    def _say_saved(self, step: int) -> None:
        """Call `saved`, once for each copy."""
        if self._said != self._count:
            self._said = self._count
            self.saved(step)


class HostCopies:
    """Copies of tensors in host memory that is allocated once and reused by each save. Fresh memory would cost more
    than the copy itself, because the kernel clears each page at the first touch."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._events = [torch.Event(device, enable_timing=True) for _ in range(2)] if self._on_gpu else []
        self._buffers: Tensors = {}
        self._held: list[torch.Tensor] = []  # what the GPU copies now

    def take(self, tensors: Tensors) -> Tensors:
        """Return copies of the tensors as they are now, valid until the next call.

        On a GPU the copies are complete only after `wait`. They are made on `copy_stream`, into pinned memory, beside
        the work that is queued from now on. That work may read the tensors, but must change none before the computing
        stream has waited for `copy_stream`, as `rankup.loop.saving.CommitLock` lets it do before each change."""
        check_devices(tensors, self._device)  # again: the state may have grown since `job.track`
        self._buffers = {name: self._buffer_for(name, tensor) for name, tensor in tensors.items()}
        to, live = [self._buffers[name] for name in tensors], [*tensors.values()]
        if self._on_gpu:
            # An object may make tensors for its state_dict. If they were freed now, the computing stream could use
            # their memory again before they are copied
            self._held = live
            stream, (began, ended) = copy_stream(self._device), self._events
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                began.record()
                if live:
                    torch._foreach_copy_(to, live, non_blocking=True)
                ended.record()
        elif live:  # one call, during which other threads can run, such as those for the lease and the deadlines
            torch._foreach_copy_(to, live)
        return self._buffers

    def wait(self) -> float:
        """Wait until the device has made the last copies. Return how many seconds the copies took, without the work
        that was queued before them."""
        if not (self._on_gpu and self._buffers):
            return 0.0
        began, ended = self._events
        ended.synchronize()
        self._held = []
        return float(began.elapsed_time(ended)) / 1000

    def _buffer_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a buffer in the memory format of `tensor`. A copy to another format would go element by element."""
        had, like = self._buffers.get(name), torch.empty_like(tensor, device="meta")
        if had is not None and (had.dtype, had.shape, had.stride()) == (like.dtype, like.shape, like.stride()):
            return had
        return torch.empty_like(tensor, device="cpu", pin_memory=self._on_gpu, requires_grad=False)


@cache
def copy_stream(device: torch.device) -> Any:
    """Return the GPU's stream on which all copies of the state to the host are made. Its priority is not that of NCCL's
    streams, because torch reuses the 32 streams of each priority."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def check_devices(tensors: Tensors, own: torch.device) -> None:
    """Raise UserError if a tracked tensor is neither on the CPU nor on `own`, this rank's device: only there rankup
    knows when a step's work is done. A copy could hold parts of two steps."""
    for path, tensor in tensors.items():
        device = tensor.device
        if device.type != "cpu" and (device.type, device.index or 0) != (own.type, own.index or 0):
            raise UserError(
                f"track: {path} must be on this rank's device, {own}, or on the CPU, got {device}. Put it on "
                "job.device: rankup keeps no state that a rank spreads over several devices."
            )
