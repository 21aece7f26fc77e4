"""Saves beside the training: a rank copies its state in memory, and a thread writes the copy (CheckFreq, FAST '21).

The thread calls no collective: gloo pairs them by their order, and the loop calls its own meanwhile. Rank 0 writes
plain copies. Of sharded ones each rank writes its part, and rank 0 gives the copy its name at the first step after all
have done so.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from rankup.agent.processes import memory_available
from rankup.errors import PeerLost, UserError, disk_errors, reason
from rankup.group.group import Group
from rankup.places.files import discard, remove_unfinished
from rankup.state import copies
from rankup.state.copies import STATE, Check, Content, Fingerprint, no_check
from rankup.state.tree import TREE, TensorFile, Tensors, encode, file_of, files_of, local_parts, own_parts, to_file

T = TypeVar("T")
ROOM = 2  # a save needs its copy in memory, and as much again stays free


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a run is kept.

    `store`: an address below which the run must lie too. `mirror`: a folder or an address that gets copies and may
    fail. `fresh`: put aside what is there, unless this launch began it. `save`: sync, or auto, which looks how much
    memory is free. `sharded`: ranks write their parts of split state, else rank 0 gathers it. `keep`: how many copies
    stay. `memory_every_steps`: see `rankup.state.memory`; 0 takes none that are there either.
    `compare_every_steps`: 0 says that ranks hold different states on purpose.

    `check`: raises UserError for a copy from which this attempt may not go on, ValueError for a damaged one.
    `finished`: whether nothing is left to do after a copy, given what `result.json` says; asked on rank 0.
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


class Writing:
    """Work beside the training: one piece at a time, in a thread or at once, and what the last one failed with."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._thread = threading.Thread()
        self.began_s = time.monotonic()
        self.failure: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """In a thread, once what is under way has ended."""
        before, self.began_s, self.failure = self._thread, time.monotonic(), None

        def follow() -> None:
            if before.is_alive():
                before.join()
            self.run(work)

        self._thread = threading.Thread(target=follow, name=self._name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], T]) -> T | None:
        """At once. Returns None where it fails."""
        self.began_s, self.failure = time.monotonic(), None
        try:
            return work()
        except BaseException as error:  # a fault too: it is raised where the loop sees it
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
    """Writes the copies of a run into `folder`, at most one at a time. All ranks have one. `step`: of the save that is
    under way, None where there is none."""

    def __init__(
        self, group: Group, folder: Path, options: Options, *, token: str, check_owner: Callable[[], None],
        saved: Callable[[int], None], second: "SecondCopies | None",
    ) -> None:
        """`token`: of this attempt, equal on all ranks. `check_owner`: see `copies.publish`. `saved`: called on all
        ranks with the step of each copy that stands."""
        self.group, self.folder, self.keep, self.timeout_s = group, folder, options.keep, options.save_timeout_s
        self.check_owner = check_owner if group.is_rank0 else lambda: None
        self.sharded, self.token = options.sharded, token
        self.saved, self.second = saved, second
        self.step: int | None = None
        self._copies = HostCopies(group.device)
        self._beside = False if options.save == "sync" else None  # whether it is written beside the training
        self.writing, self._count = Writing("save", options.save_timeout_s), 0
        # Of a sharded copy: what this rank has written, and what makes a copy of all ranks' files
        self._staging: Path | None = None  # rank 0's
        self._part: dict[str, Fingerprint] = {}
        self._join_parts: Callable[[dict[str, Fingerprint]], None] | None = None

    def save(
        self, step: int, record: Callable[[], bytes], tracked: dict[str, Any], *, may_go_on: bool = True,
        wait: bool = False,
    ) -> None:
        """Write one copy, beside the training where that may be; the save before ends first. All ranks call this at the
        same step, and then `look` at each one.

        `record`: makes the contents of `state.json`, where they are written. `tracked`: whole on rank 0, or each rank's
        part where copies are sharded. `may_go_on`: False where it is not to be kept in memory. `wait`: the training
        ends with this one.
        Raises, on all ranks, UserError where one can't write, and PeerLost where another attempt owns the run.
        """
        self.look(wait=True)
        self.group.watch.enter("save", self.timeout_s, step=step)
        if self.second is not None and may_go_on:  # this rank has all that rank 0 has
            self.second.save(step, record(), tracked, wait=wait)
        self.step, self._count, self._part, self._join_parts = step, self._count + 1, {}, None
        if self.group.is_rank0 or self.sharded:
            prepared = self.writing.run(lambda: self._prepare(step, record(), tracked, may_go_on))
            # No rank may wait for the part of one that writes none
            failed = self.group.max(int(prepared is None)) if self.sharded else 0
            if prepared and not failed:
                work, beside = prepared
                (self.writing.start if beside else self.writing.run)(work)
        if not self.group.max(int(self.writing.under_way)):
            self._conclude()

    def look(self, *, wait: bool = False) -> None:
        """Notice whether the save beside the training has ended; with `wait`, wait for it. All ranks, at the same step.

        Raises as `save` does.
        """
        if self.step is None:
            return
        if wait:
            self.group.watch.enter("save", self.timeout_s, step=self.step)
        in_time = self.writing.under_way and self.writing.left_s > 0
        if wait or self.group.max(2 if self.writing.failure is not None else int(in_time)) != 1:
            self._conclude()

    def wait(self) -> None:
        """Let the copy get published within its deadline, because this process is about to end. Any thread calls this.
        Raises nothing. Shards are not waited for, which other ranks have to write too."""
        if self._join_parts is None:
            self.writing.join(self.writing.left_s)

    # Each rank that writes ------------------------------------------------------------------------------------

    def _prepare(
        self, step: int, record: bytes, tracked: dict[str, Any], may_go_on: bool
    ) -> tuple[Callable[[], None], bool]:
        """What is to be done of the save, and whether that may be done beside the training."""
        # Never the same name twice: NFS caches that it is the folder of a copy of this step by now
        staging = copies.staging_of(self.folder, step, f"{self.token}-{self._count}")
        how: dict[str, Any] = {"step": step, "keep": self.keep, "check_owner": self.check_owner}
        if self.group.is_rank0 and self.sharded:
            self.check_owner()
            self._staging = copies.create_staging(staging)
        nodes, tensors = encode(tracked)
        places = None
        if self.sharded:
            tensors, places = local_parts(own_parts(tensors, self.group.rank))
        if beside := may_go_on and self._fit(tensors):
            tensors = self._copies.take(tensors)

        def write() -> None:
            self._copies.wait()
            if not self.sharded:
                copies.save(self.folder, {STATE: record, **files_of(nodes, tensors)}, **how)
                return
            name = file_of(self.group.rank)
            with disk_errors("checkpoint", self.folder, self.check_owner):
                self._part = {name: copies.write_durably(staging / name, TensorFile(tensors, places))}

        def join_parts(written: dict[str, Fingerprint]) -> None:
            copies.publish(staging, {STATE: record, TREE: to_file(nodes)}, written, **how)

        self._join_parts = join_parts if self.sharded else None
        return write, beside

    def _fit(self, tensors: Tensors) -> bool:
        """Whether there is memory for copies of `tensors`. Asked once: it is kept from then on."""
        if self._beside is None:
            needed, free = ROOM * sum(tensor.nbytes for tensor in tensors.values()), memory_available()
            self._beside = free >= needed
            if not self._beside:
                self.group.log.info(
                    f"save   the training waits for each save: to go on meanwhile takes {needed / 2**20:,.0f} MiB of "
                    f"memory, {free / 2**20:,.0f} are free"
                )
        return self._beside

    def _conclude(self) -> None:
        """What became of the save, on all ranks: raises what a rank met."""
        assert self.step is not None
        if self.writing.under_way:
            # The deadline counts from the beginning: past it, on a disk that hangs, the watchdog ends this process
            self.group.watch.enter("save", self.timeout_s, step=self.step, since_s=self.writing.began_s)
            self.writing.join()
        own = self.writing.failure
        if own is not None and not isinstance(own, UserError | PeerLost):
            raise own  # a fault: the others lose this rank
        found = self.group.gather([type(own).__name__ if own else "", str(own) if own else "", self._part])
        # No rank may blame its disk for what another attempt has removed
        failed = [(kind, text) for kind, text, _ in found if kind]
        for kind, text in sorted(failed, key=lambda failure: failure[0] != "PeerLost"):
            if self._staging is not None:
                discard(self._staging)
            raise (PeerLost if kind == "PeerLost" else UserError)(text, printed_elsewhere=not self.group.is_rank0)
        join_parts, self._join_parts = self._join_parts, None
        if join_parts is not None:
            written = {name: entry for *_, part in found for name, entry in part.items()}
            self.group.on_rank0(lambda: join_parts(written))
        step, self.step = self.step, None
        self.saved(step)


class SecondCopies(Writing):
    """Where the nodes share no disk, one rank of another node than rank 0's keeps the newest copy too, in a thread.
    Nothing is sent, because it has the state that rank 0 saves, see `rankup.loop.agreement`. No step and no save waits
    for it, and whatever fails is one line."""

    def __init__(self, group: Group, folder: Path, options: Options) -> None:
        super().__init__("copy", options.save_timeout_s)
        self.group, self.folder, self._copies, self._said = group, folder, HostCopies(group.device), ""

    def save(self, step: int, record: bytes, tracked: dict[str, Any], *, wait: bool) -> None:
        """Begin to write the state of this step, unless the copy before is still written; `wait`: after that one."""
        if wait:
            self.join(self.left_s)
        if self.under_way:
            return
        nodes, tensors = encode(tracked)
        files = {STATE: record, **files_of(nodes, self._copies.take(tensors))}
        self.start(lambda: self._write(step, files))

    def _write(self, step: int, files: Mapping[str, Content]) -> None:
        try:
            self._copies.wait()
            remove_unfinished(self.folder)
            # No other one stays: one of a later step is of a line of attempts that the run has left
            copies.save(self.folder, files, step=step, keep=0)
            self._said = ""
        except Exception as error:  # a copy that fails must not end the training
            if (text := f"no second copy: {reason(error)}") != self._said:  # a full disk stays full
                self.group.log.warning(text)
            self._said = text


class HostCopies:
    """Copies of tensors in memory that is taken once and used by each save anew. Fresh memory would cost more than the
    copy: the kernel clears each page when it is touched first."""

    def __init__(self, device: torch.device) -> None:
        # A GPU copies into pinned memory by itself, in the order of its queue, and the host goes on
        self._events = [torch.Event(device, enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._buffers: Tensors = {}

    def take(self, tensors: Tensors) -> Tensors:
        """The tensors as they are now, until the next call. On a GPU the copies are complete after `wait` only; the
        work that is queued from now on does not get into them."""
        self._buffers = {name: self._buffer_for(name, tensor) for name, tensor in tensors.items()}
        for event in self._events[:1]:
            event.record()
        # One call, in which other threads may run: the lease beats, the deadlines are watched
        if tensors:
            to = [self._buffers[name] for name in tensors]
            torch._foreach_copy_(to, [*tensors.values()], non_blocking=bool(self._events))
        for event in self._events[1:]:
            event.record()
        return self._buffers

    def wait(self) -> float:
        """Wait until the device has made the last copies. Returns how long they took it, in seconds: not the steps that
        were in its queue before them."""
        if not (self._events and self._buffers):
            return 0.0
        began, ended = self._events
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    def _buffer_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """In the same memory format: else the copy would go element by element."""
        had, like = self._buffers.get(name), torch.empty_like(tensor, device="meta")
        if had is not None and (had.dtype, had.shape, had.stride()) == (like.dtype, like.shape, like.stride()):
            return had
        return torch.empty_like(tensor, device="cpu", pin_memory=bool(self._events), requires_grad=False)
