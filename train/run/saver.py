"""Saves of a run. Plain ones go on beside the training: rank 0 copies its state, and a thread writes the copy.

So the ranks stand still for the copy alone, not for packing, digests and the disk (tests/bench/saves.py measures both).
To write beside the next steps is the idea of CheckFreq (Mohan et al., FAST '21). The thread calls no collective: gloo
pairs them by their order, and the loop calls its own meanwhile.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankup.agent.limits import memory_available
from rankup.errors import UserError
from rankup.state import copies
from rankup.state.copies import STATE, Content
from rankup.state.host_copies import HostCopies, beside_training
from rankup.state.shards import write_shards
from rankup.state.tree import encode, files_of
from train.config import Config
from train.group.group import Group, on_rank0
from train.run.copier import Copier, fingerprint_tensors
from train.run.training_state import TrainingState


class Saver:
    """Writes the checkpoints of a run into `directory`, at most one at a time.

    `check_owner`: see `rankup.state.copies.publish`. Rank 0 alone calls it. `copier`: the one rank's that keeps the
    newest checkpoint a second time.
    """

    def __init__(
        self, config: Config, group: Group, directory: Path, check_owner: Callable[[], None], copier: Copier | None, *,
        upload: Callable[..., None] | None = None,
    ) -> None:
        """`upload`: writes a published checkpoint to another place too, `upload(path, timeout_s=...)`. Rank 0's."""
        self.config, self.group, self.directory, self.check_owner = config, group, directory, check_owner
        self.copier, self.upload = copier, upload
        # Rank 0's; the others never have a thread
        self._copies = HostCopies(group.device)
        self._beside_training: bool | None = None  # decided at the first save, when the size of the state is known
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._began_s, self._step = 0.0, 0
        self._published = threading.Event()  # what the thread writes stands in `directory`
        self._tensors = ""  # the fingerprint of those in the checkpoint that was written last

    def save(
        self, state: TrainingState, tracked: dict[str, Any], *, may_go_on: bool, flush: Callable[[], None], wait: bool
    ) -> bool:
        """Write one checkpoint. All ranks call this, rank 0 publishes.

        Returns True where rank 0 goes on to write beside the training. Then all ranks call `ended` at each step until
        it returns True, and call this no more before that. `may_go_on`: False where the method of training in parallel
        does not allow that.

        `tracked`: whole on rank 0, or with checkpoint_format sharded each rank's part. `flush`: of the metrics. A
        resumed run does not repeat the saved steps, so their metrics must be on the disk first. `wait`: the training
        ends with this one.
        Raises, on all ranks, UserError where rank 0 can't write, and PeerLost where another attempt owns the run.
        """
        if self.config.checkpoint_format == "sharded":
            return self._save_shards(state, tracked, flush)

        def begin() -> tuple[bool, str]:
            flush()
            return self._begin(state, tracked, may_go_on), self._tensors

        if self.copier is not None and may_go_on:  # this rank has all that rank 0 has
            self.copier.begin(state, tracked, wait=wait)
        self._step = state.step
        under_way, written = on_rank0(self.group, begin)
        if not under_way:
            self._confirm(written)
        return bool(under_way)

    def ended(self, *, wait: bool) -> bool:
        """Whether rank 0 has written what `save` began; with `wait` it gets done first. All ranks call this.

        Raises as `save` does.
        """
        if not wait and not self.group.max(int(self.group.is_rank0 and self._due)):
            return False
        self._confirm(on_rank0(self.group, self._finish))
        return True

    @property
    def writing(self) -> bool:
        """Whether a thread of this process is writing at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Let the checkpoint get published within its deadline, because this process is about to end. Raises nothing.

        An upload is not waited for: the next attempt makes it.
        """
        if self._thread is not None:  # any thread may call this, and the main one be in `_finish`
            self._published.wait(max(0.0, self._left_s()))

    def _confirm(self, tensors: str) -> None:
        if self.copier is not None:
            self.copier.confirm(self._step, tensors)

    # Rank 0 ---------------------------------------------------------------------------------------------------

    def _begin(self, state: TrainingState, tracked: dict[str, Any], may_go_on: bool) -> bool:
        assert self._thread is None, "the save before has to be finished first"
        record, (nodes, tensors) = state.to_file(), encode(tracked)
        if self._beside_training is None:
            self._beside_training = may_go_on and beside_training(
                tensors, self.config.save, free_bytes=memory_available, say=self.group.log.info
            )
        if not self._beside_training:
            with self._while_ours():
                path = self._publish(state.step, {STATE: record, **files_of(nodes, tensors)})
                return self._upload_published(path, state.step)
        copied = self._copies.take(tensors)

        def publish_it() -> Path:
            self._copies.wait()
            return self._publish(state.step, {STATE: record, **files_of(nodes, copied)})

        self._start(publish_it, state.step)
        return True

    def publish_files(self, step: int, files: Mapping[str, Content]) -> None:
        """Write a checkpoint of these files, and upload it where that is wanted: this process ends. Raises as `save`
        does. Rank 0 calls it, from any thread, while nothing else is written."""
        with self._while_ours():
            path = self._publish(step, files)
            if self.upload is not None:
                self.upload(path, timeout_s=self.config.save_timeout_s)

    def upload_beside(self, path: Path, *, step: int) -> None:
        """Upload a checkpoint that is published already, beside the training; `ended` says when that is done."""
        self._start(lambda: path, step)

    def _upload_published(self, path: Path, step: int) -> bool:
        """Upload it, where that is wanted. Whether that goes on beside the training.

        It reads files, and needs no memory: the training goes on unless each save is to be waited for.
        """
        if self.upload is None:
            return False
        if self.config.save == "sync":
            self.upload(path, timeout_s=self.config.save_timeout_s)
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
        path = copies.save(self.directory, files, step=step, keep=self.config.keep, check_owner=self.check_owner)
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
        return self._began_s + self.config.save_timeout_s - time.monotonic()

    def _finish(self) -> str:
        """Wait for the thread, and raise what it raised. Returns the fingerprint of the tensors that it has written."""
        assert self._thread is not None
        if self.writing:
            # The deadline counts from the beginning: past it, on a disk that hangs, the watchdog ends this process
            self.group.watch.enter("save", self.config.save_timeout_s, step=self._step, since_s=self._began_s)
            self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure
        return self._tensors

    # All ranks ------------------------------------------------------------------------------------------------

    def _save_shards(self, state: TrainingState, tracked: dict[str, Any], flush: Callable[[], None]) -> bool:
        def begin() -> str:
            flush()
            self.check_owner()
            return copies.create_staging(self.directory, state.step).name

        staging = self.directory / on_rank0(self.group, begin)
        try:
            files, written = write_shards(staging, tracked, self.group)
        except UserError:
            # All ranks raise it together, so no rank still writes there
            if self.group.is_rank0:
                shutil.rmtree(staging, ignore_errors=True)
            on_rank0(self.group, self.check_owner)
            raise

        def publish_it() -> bool:
            with self._while_ours():
                path = copies.publish(
                    staging, {STATE: state.to_file(), **files}, written, step=state.step, keep=self.config.keep,
                    check_owner=self.check_owner,
                )
                return self._upload_published(path, state.step)

        return bool(on_rank0(self.group, publish_it))
