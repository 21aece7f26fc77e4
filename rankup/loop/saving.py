"""The tracked state as copies: restores one at the start, saves others beside the training, and writes the last one
when the process has to end."""

import contextlib
import threading
import time
from collections.abc import Iterator
from copy import copy
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from rankup.errors import UserError, reason
from rankup.group.group import Group
from rankup.loop.agreement import Agreement
from rankup.loop.record import FORMAT, VERSIONS, Figures, Settings
from rankup.loop.tracked import Tracked, gathered
from rankup.observe.metrics import Position
from rankup.state import copies, memory, tree
from rankup.state.choice import PARTS
from rankup.state.copies import STATE, Content, list_copies, step_of, to_json
from rankup.state.reading import Copy, CopyFiles
from rankup.state.run import Run
from rankup.timing import DECIDE_S

# An optimizer's step takes this long at most, on a busy machine and with a large model on a CPU.
CHANGE_S = 10.0


class CommitLock:
    """`with commit_lock:` around everything that makes a finished step out of the one before, `progress` included.

    A block that fails never ends the change: what it leaves is the state of no step. `alone`: there is no other rank.
    """

    def __init__(self, progress: Position, device: torch.device, *, alone: bool = False) -> None:
        self.progress, self.device, self._alone = progress, device, alone
        self._lock = threading.Lock()
        self.busy = False
        self._failed = False  # in the middle of a change, which so never ends
        self._stream: Any = None  # of a GPU, for `beside`
        if device.type == "cuda":
            # Made now: CUDA makes a process's first stream once the queue is empty, and behind a dead rank it never is.
            # Of another priority than NCCL's: torch has 32 streams of each, and gives them out in turn
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._changed = torch.Event(device)  # the GPU is done with the newest change

    def __enter__(self) -> None:
        if self._stream is not None and not self._alone:
            # For the gradients, which the GPU never has behind a dead rank. Else what is on the host, such as an
            # optimizer's count, would be a step ahead of the weights
            torch.cuda.current_stream(self.device).synchronize()
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._failed = True
            return
        if self._stream is not None:
            self._changed.record()
        self._lock.release()

    def stop(self) -> Position | None:
        """Allow no further change, and say where the run stands; None where that can't be known, as where a change is
        under way that may end well (`busy`). From any thread."""
        until_s = time.monotonic() + CHANGE_S
        while not (held := self._lock.acquire(timeout=0.05)) and not self._failed and time.monotonic() < until_s:
            pass
        self.busy = not held and not self._failed
        while not (done := self._stream is None or self._changed.query()) and time.monotonic() < until_s:
            time.sleep(0.01)
        return self.progress if held and done else None

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """In the block a GPU copies what is done, and waits for nothing that is queued."""
        if self._stream is None:
            yield
            return
        # A thread begins with GPU 0. To go back to its stream would take memory there, which may be full
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream):
            yield


WAY_OUT = "Begin anew (fresh), or give the run another name."
LOADERS = "rankup_loaders"  # the states of loaders that can be asked for them, beside the tracked items


class Saving:
    """Saves and restores `tracked`, as of the last commit, at which `position` stands.

    At the end of a process the watchdog calls it, see `Watchdog.protect`. `about`: what the program says of itself in
    each copy. `loader_states`: as of the last commit.
    """

    def __init__(
        self, group: Group, run: Run, tracked: Tracked, figures: Figures, agreement: Agreement, settings: Settings,
        position: Position,
    ) -> None:
        self.group, self.run, self.tracked, self.position = group, run, tracked, position
        self.figures, self.agreement, self.settings = figures, agreement, settings
        self.commit_lock = CommitLock(position, group.device, alone=group.world_size == 1)
        self.about: dict[str, Any] = {}
        self.loader_states: list[Any] = []
        self._place = f"{group.rank} of {group.world_size}"
        # What lies in rank 0's folder: a rescue, from which the run may go on, is in memory alone
        self._saved = Position.of(run.saved).key
        # [step, ranks] for each change of their number, in a job whose nodes may come and go: for a replay
        self.ranks: list[list[int]] = []
        if run.newest is not None:
            self.ranks, items = run.newest.record.get("world_sizes", []), run.newest.tracked
            if run.newest.sharded:
                items = CopyFiles(run.newest.path).read_all(LOADERS)
            self.loader_states = items.get(LOADERS, {}).get(self._place, [])

    # Restoring ------------------------------------------------------------------------------------------------

    def restore(self, newest: Copy, names: list[str]) -> None:
        """Put back the tracked items of these names. All ranks call this. Raises UserError where one does not fit."""
        if newest.sharded and self.run.kind != PARTS and not (self.tracked.split and self.run.saver.sharded):
            newest = newest.as_plain()
        state = self._read_shards(newest) if newest.sharded else newest.tracked
        if missing := sorted({*names} - state.keys()):
            raise UserError(
                f"track: {', '.join(missing)} must be in {newest.path}, got {', '.join(sorted(state))} there. "
                + WAY_OUT
            )
        for name in names:
            try:
                self.tracked.load({name: state[name]})
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                why = f"{name}: {' '.join(str(error).split())[:300]}"
                raise UserError(f"{newest.path} does not fit this {why}. {WAY_OUT}") from None

    def begin(self) -> None:
        """The run goes on: say from where. Raises UserError where the copy has items that nobody tracks."""
        newest = self.run.newest
        if newest is None:
            return
        if (left := {*newest.tracked} - {*self.tracked.items, LOADERS}) and self.tracked.items:
            raise UserError(
                f"track: all items of {newest.path} must be tracked, got none for {', '.join(sorted(left))}. {WAY_OUT}"
            )
        self.group.log.info(f"resumed from {self.run.words}")
        self.say_changed("world size", newest.record["world_size"], self.group.world_size)
        self.say_changed("torch", newest.record["versions"]["torch"], VERSIONS["torch"])

    def say_changed(self, what: str, before: Any, now: Any) -> None:
        """Say of something that differs from the attempt before what that means."""
        if before != now:
            self.group.log.info(f"  {what} was {before}, is {now}: the run goes on, but its last bits will differ")

    def note_ranks(self) -> bool:
        """From this step on as many ranks train as there are now. Returns whether that is a change."""
        step, ranks = self.position.step, self.group.world_size
        self.ranks = [each for each in self.ranks if each[0] < step]
        if changed := not self.ranks or self.ranks[-1][1] != ranks:
            self.ranks.append([step, ranks])
        return changed

    def _read_shards(self, newest: Copy) -> dict[str, Any]:
        """This rank's part of a sharded copy. Raises UserError on all ranks where it does not fit one."""
        state, problem = dict[str, Any](), ""
        try:
            self.tracked.make_room()
            state = CopyFiles(newest.path).read_into(self.tracked.state())
        except Exception as error:  # the others read their part meanwhile, and wait then
            problem = " ".join(str(error).split())[:300] or type(error).__name__
        for rank, text in enumerate(self.group.gather(problem)):
            if text:
                raise UserError(f"{newest.path} does not fit this model: rank {rank}: {text}. {WAY_OUT}")
        return state

    # Saving ---------------------------------------------------------------------------------------------------

    def save(self, *, wait: bool = False) -> bool:
        """See `Job.save`. Returns whether it began a copy."""
        position, run = self.position, self.run
        wanted = bool(self.tracked.items) and position.key != self._saved
        if wanted:
            self.agreement.compare(position.step)
            run.wait()  # before the state is put together
            state = self.tracked.state()
            if self.tracked.split and not run.saver.sharded:
                state = self.group.collective(lambda: gathered(state))
            if self.loader_states:
                size = self.group.world_size
                every = [self.group.broadcast_tensors(self.loader_states, source=rank) for rank in range(size)]
                state[LOADERS] = {f"{rank} of {size}": states for rank, states in enumerate(every)}
            # Gathered state is written at once: a copy of it would need the memory twice
            may_go_on = not self.tracked.split or (run.saver.sharded and run.second_rank is None)
            self.group.on_rank0(self.figures.metrics.flush)  # a resumed run does not repeat the saved steps
            run.saver.save(position.step, lambda: self._record(position), state, may_go_on=may_go_on, wait=wait)
            self._saved = position.key
        if wait:
            run.settle()
        return wanted

    def keep_part(self) -> None:
        """Keep this rank's part of the last commit in memory. All ranks call this."""
        self.run.parts.take(self.position.step, lambda: (self._record(self.position), self._own()))

    def _own(self) -> dict[str, Any]:
        """What this rank holds of the last commit. Other ranks skip by count where its loader's state is not theirs."""
        state = self.tracked.state()
        if self.loader_states:
            state[LOADERS] = {self._place: self.loader_states}
        return state

    def _record(self, position: Position) -> bytes:
        """The contents of `state.json`."""
        group, run = self.group, self.run
        return to_json({
            "format": FORMAT, **asdict(position), "seed": self.settings.seed, "world_size": group.world_size,
            "versions": VERSIONS, "run": run.lineage.run, "attempt": run.mark, "lineage": run.lineage.values(),
            "written_by": f"rank {group.rank} on {group.hosts[group.rank]}", **self.about,
            **({"world_sizes": self.ranks} if self.ranks else {}),
        })

    def stopped(self) -> str:
        """What to say of a run that was stopped at its last commit."""
        why, step, total = self.group.stop.signal_name or "asked to stop", self.position.step, self.figures.course.total
        if not self.tracked.items:
            return f"{why}: stopped at step {step}, nothing is tracked, so nothing was saved."
        where = f"saved at step {step}" if step else "at step 0, nothing to save,"
        again = f"The same command{' without fresh' if self.settings.fresh else ''} goes on from it."
        return f"{why}: {where}{'' if total is None else f' of {total}'}. {again}"

    # The end of a process: any thread ---------------------------------------------------------------------------

    def keep(self) -> None:
        """Write the last commit to this node's memory. The loop never goes on afterwards.

        Where that can't be, the copy that rank 0 may be writing is all that will be left: it gets done first.
        """
        if self.agreement.deciding.acquire(timeout=DECIDE_S):  # another rank may know already that they are not
            self.agreement.deciding.release()
        group, hangs = self.group, self.run.saver.writing.under_way  # maybe for a disk
        settled = group.stop.requested and self.position.step == group.record.confirmed
        if settled and group.is_rank0 and not hangs and self.keep_for_stop():
            return  # another rank has left before it came to the step at which all stop
        position, holds_all = None, bool(self.tracked.items) and not self.tracked.split
        if holds_all and not self.agreement.wrong and self.position.step > max(0, self.run.saved_step):
            position = self.commit_lock.stop()
            if position is None:
                self.group.log.warning(
                    "no rescue by this rank: it was changing the weights. Another's counts, or the newest checkpoint"
                )
        try:
            if position is not None and position.step > max(0, self.run.saved_step):
                make = partial(self._files, copy(position))
                memory.write_rescue(self.run.lineage.run, position.step, self.run.mark, make)
                return
        except Exception as error:
            why = f"no rescue, so the next attempt goes on from the newest checkpoint: {reason(error)}"
            self.group.log.warning(why)
        self.run.parts.wait()
        self.run.saver.wait()

    def keep_for_stop(self) -> str:
        """Write it, on rank 0 as a copy in its place: the job may go on on other machines. Returns what to say of it;
        "" where this process alone can't keep the state."""
        signal = self.group.stop.signal_name
        if not self.tracked.items:
            return self.stopped()
        if self.tracked.split:
            return ""
        if self.agreement.wrong:
            return f"{signal}: this rank's state may be wrong, so it was not saved"
        if not self.group.is_rank0:
            self.keep()
            return self.stopped()
        saver = self.run.saver
        saver.wait()
        position = self.commit_lock.stop()
        if position is None and self.commit_lock.busy and self.group.world_size == 1:
            return ""  # a long step: it stops once that is done
        if position is None:
            return f"{signal}: in the middle of changing the weights, so nothing newer was saved"
        position = copy(position)
        newest = list_copies(saver.folder)  # the loop may not have noticed yet that a save has ended
        if position.step > (step_of(newest[-1]) if newest else 0):
            self.figures.metrics.flush()
            files, check = self._files(position), saver.check_owner
            copies.save(saver.folder, files, step=position.step, keep=saver.keep, check_owner=check)
        for place in self.run.places.values():
            place.finish(stopped=True)
        return self.stopped()

    def _files(self, position: Position) -> dict[str, Content]:
        """The files of a copy of the last commit, at which `position` stands."""
        with self.commit_lock.beside():
            nodes, tensors = tree.encode(self._own())
            if self.group.device.type == "cuda":  # else they are written as they lie: the training has stopped
                tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        return {STATE: self._record(position), **tree.files_of(nodes, tensors)}
