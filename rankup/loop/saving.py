"""Tracked state and copies: restore a copy at the start, save copies while training continues, and write the last
commit when the process has to end."""

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
from rankup.loop.agreement import Agreement, digests_by_place
from rankup.loop.changes import Options, differing
from rankup.loop.filling import KINDS, Filling, cloned, gathered
from rankup.loop.reporting import Reporting
from rankup.loop.settings import FORMAT, VERSIONS, Settings
from rankup.loop.tracked import Tracked
from rankup.loop.unkept import Flags, differing_flags
from rankup.observe.metrics import Position
from rankup.state import copies, memory, tree
from rankup.state.copies import STATE, Content, list_copies, step_of, to_json
from rankup.state.place import PARTS
from rankup.state.reading import Copy
from rankup.state.run import Run
from rankup.state.saver import copy_stream
from rankup.timing import DECIDE_S

# The longest time that an optimizer's step takes, with a large model on a busy machine's CPU
CHANGE_S = 10.0


class CommitLock:
    """A lock that the loop holds while it changes the state, `position` included, from that of one step to the next.

    A block that raises never releases the lock, because the state that it leaves belongs to no step. `alone`: there is
    only one rank."""

    def __init__(self, position: Position, device: torch.device, *, alone: bool = False) -> None:
        self.position, self.device, self._alone = position, device, alone
        self._lock = threading.Lock()
        self.busy = False
        self._failed = False  # a block raised, and its change never ends
        self._stream: Any = None  # the GPU's stream for `own_stream`
        if device.type == "cuda":
            # Create the stream now: to create a process's first stream, CUDA waits for an empty queue, and the queue
            # never empties if a rank died. It must not be one of NCCL's: torch reuses its 32 streams of each priority
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._copies = copy_stream(device)
            self._changed = torch.Event(device)  # recorded after each change: the GPU is done with the newest one

    def __enter__(self) -> None:
        if self._stream is not None:
            computing = torch.cuda.current_stream(self.device)
            if not self._alone:
                # Wait for the gradients, which never arrive if a rank died. Otherwise the host's state, such as an
                # optimizer's step count, would be one step ahead of the weights
                computing.synchronize()
            # The GPU, not the host, waits until the last save has its copy of what the block changes
            computing.wait_stream(self._copies)
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._failed = True
            return
        if self._stream is not None:
            self._changed.record()
        self._lock.release()

    def stop(self) -> Position | None:
        """Allow no further change, and return the position of the run. Returns None if the state belongs to no known
        step; `busy` then says whether a change is under way that may still end well. Call this from any thread."""
        until_s = time.monotonic() + CHANGE_S
        while not (held := self._lock.acquire(timeout=0.05)) and not self._failed and time.monotonic() < until_s:
            pass
        self.busy = not held and not self._failed
        while not (done := self._stream is None or self._changed.query()) and time.monotonic() < until_s:
            time.sleep(0.01)
        return self.position if held and done else None

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """Let the block copy finished data from the GPU without waiting for the work that is queued there."""
        if self._stream is None:
            yield
            return
        # A new thread starts on GPU 0. Stay on this device afterwards: a return to GPU 0 would need memory there
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream):
            yield


WAY_OUT = "Start from the beginning (fresh), or give the run another name."
LOADERS = "rankup_loaders"  # the item of a copy that holds the loaders' own states
FROZEN = "rankup_frozen"  # the item of a copy that holds the digest of parameters that are not in the copy


class Saving:
    """Saves and restores `tracked`. A save holds the state of the last commit, at `position`.

    When the process has to end, the watchdog calls this object, see `Watchdog.protect`. `about`: fields that the
    program adds to each copy. `loader_states`: the loaders' states as of the last commit.
    """

    def __init__(
        self, group: Group, run: Run, tracked: Tracked, reporting: Reporting, agreement: Agreement, settings: Settings,
        position: Position,
    ) -> None:
        self.group, self.run, self.tracked, self.position = group, run, tracked, position
        self.reporting, self.agreement, self.settings = reporting, agreement, settings
        self.commit_lock = CommitLock(position, group.device, alone=group.world_size == 1)
        copies.on_write[:] = [group.record.note_written]
        self.about: dict[str, Any] = {}
        self._flags: Flags = {}  # of the newest step that looked at them, which was in this epoch
        self.flags_epoch = -1
        self._flags_before: Flags | None = None  # in the copy from which this attempt resumed, until it has compared
        self.loader_states: list[Any] = []
        self._frozen = 0  # what `frozen` returned before the first step
        self._filling = Filling()  # of the items that were restored so far
        self._place = f"{group.rank} of {group.world_size}"
        # Of the newest copy in rank 0's folder. The run may have resumed from a newer rescue, which is only in memory
        self._saved = Position.of(run.saved).key
        # [step, ranks] for each change of the number of ranks, if nodes may come and go. A replay of the run needs it
        self.ranks: list[list[int]] = []
        if run.newest is not None:
            self.ranks = run.newest.record.get("world_sizes", [])
            states = run.newest.files.read_all(LOADERS).get(LOADERS, {})
            self.loader_states = cloned(states.get(self._place, []))  # they outlive the memory of the copy

    # Restoring ------------------------------------------------------------------------------------------------

    def restore(self, newest: Copy, names: list[str], *, may_miss: bool = False) -> None:
        """Restore the tracked items called `names`. All ranks call this. Raises UserError if an item does not fit, or
        is not in the copy, unless it `may_miss`."""
        for name, (now, *_) in self.tracked.built().items():
            before = newest.record.get("built", {}).get(name, [now])[:1]
            if name in names and before != [now]:
                had = "".join(before)
                raise UserError(f"track: {name} must be of class {had} as in {newest.path}, got {now}. {WAY_OUT}")
        firsts = newest.record.get("options", {})
        found = [Options(each, self.tracked.items[each], firsts[each]) for each in names if each in firsts]
        if newest.files.sharded and (self.run.kind == PARTS or (self.tracked.split and self.run.saver.sharded)):
            state = self._read_shards(newest)
        else:
            state = newest.files.read_all(*names, KINDS, FROZEN)
        missing = sorted({*names} - state.keys())
        if missing and not may_miss:
            raise UserError(
                f"track: {', '.join(missing)} must be in {newest.path}, got {', '.join(sorted(newest.files.items))} "
                f'there. If it is new, give track missing="keep". {WAY_OUT}'
            )
        if missing:
            names = [name for name in names if name in state]
            self.group.log.info(f"track  not in {newest.path.name}, so it begins anew: {', '.join(missing)}")
            self.must_match(missing)
        if FROZEN in state and self.tracked.left_out():
            self.group.on_all_ranks(lambda: self._check_frozen(state[FROZEN], (
                f"{newest.path} does not fit this model: the parameters that are not trained were others. Load the "
                f"weights with which the run began. {WAY_OUT}"
            )))
        try:
            self.tracked.load({name: state[name] for name in (*names, KINDS) if name in state}, self._filling)
        except ValueError as error:
            raise UserError(f"{newest.path} does not fit this {error}. {WAY_OUT}") from None
        newest.check_unchanged()
        self._change(newest, [each for each in found if each.changes])

    def _change(self, newest: Copy, found: list[Options]) -> None:
        """Give restored optimizers and schedulers the options that the script sets otherwise than when the run began,
        if they may change, and say what changes or stays."""
        settings, may_change = self.about.get("settings", {}), self.settings.may_change
        by_settings = bool(differing(newest.record.get("settings", settings), settings))
        for each in found:
            if by_settings or {*each.changes} & {*may_change}:
                each.apply()
                self.group.log.info(f"track  {', '.join(each.changes.values())}, from step {self.position.step} on")
            else:
                self.tracked.options[each.name] = each.first
                names = ", ".join(map(repr, each.changes))
                if self.group.is_rank0:
                    self.group.log.warning(
                        f"track: {', '.join(each.changes.values())}: the script sets it so, but the run goes on as in "
                        f"its checkpoint. To apply it give rankup.init(may_change={{{names}}})"
                    )
        self.tracked.commit()

    def must_match(self, names: list[str]) -> None:
        """Raise UserError on all ranks if the states of these items differ between ranks. All ranks call this."""
        if self.group.world_size > 1 and not self.tracked.split:  # of split items no rank has the whole
            for name, digest in self.tracked.fingerprint().items():
                if name in names:
                    remedy = "Build it equally on all ranks, or leave it out."
                    self.group.must_match(f"track: {name}", digest, remedy=remedy)

    def frozen(self) -> int:
        """Return a digest of the parameters that no copy holds. Waits for the device."""
        return digests_by_place(self.tracked.left_out()).get("[]", 0)

    def _check_frozen(self, before: int, message: str) -> None:
        if self.frozen() != before:
            raise UserError(message)

    def begin(self) -> None:
        """Log from which copy the run resumes. Raises UserError if the copy has items that are not tracked."""
        newest, self._filling = self.run.newest, Filling()  # frees the restored tensors
        self._frozen = self.frozen()
        if newest is None:
            return
        if (left := {*newest.files.items} - {*self.tracked.items, LOADERS, KINDS, FROZEN}) and self.tracked.items:
            raise UserError(
                f"track: all items of {newest.path} must be tracked, got none for {', '.join(sorted(left))}. {WAY_OUT}"
            )
        for name, now in self.tracked.built().items():
            if newest.record.get("built", {}).get(name, now) != now:
                raise UserError(
                    f"track: {name} must get the parameters in the same order as in {newest.path}, got another order "
                    f"or others: a parameter would continue with the state of another one. {WAY_OUT}"
                )
        self._flags_before = newest.record.get("flags")
        self.group.log.info(f"resumed from {self.run.words}")
        self.say_changed("world size", newest.record["world_size"], self.group.world_size)
        self.say_changed("torch", newest.record["versions"].get("torch"), VERSIONS["torch"])

    def note_flags(self, epoch: int) -> None:
        """Note which parameters and modules train, and say if this is not as in the copy from which the run resumed."""
        self._flags, self.flags_epoch = self.tracked.flags(), epoch
        before, self._flags_before = self._flags_before, None
        if before is not None and self.group.is_rank0 and (changed := differing_flags(before, self._flags)):
            self.group.log.warning(
                f"track: {changed}. A resume does not run the code of earlier epochs and steps again: let the script "
                "freeze or unfreeze by `if epoch >= 3`, not by `if epoch == 3`. If this step changes it, all is well"
            )

    def say_changed(self, what: str, before: Any, now: Any) -> None:
        """If `what` is not as in the previous attempt, log it, and that the last bits of the weights will differ."""
        if before != now:
            self.group.log.info(f"  {what} was {before}, is {now}: the run goes on, but its last bits will differ")

    def note_ranks(self) -> bool:
        """Note how many ranks train from this step on. Returns whether their number has changed."""
        step, ranks = self.position.step, self.group.world_size
        self.ranks = [each for each in self.ranks if each[0] < step]
        if changed := not self.ranks or self.ranks[-1][1] != ranks:
            self.ranks.append([step, ranks])
        return changed

    def _read_shards(self, newest: Copy) -> dict[str, Any]:
        """Read this rank's part of a sharded copy. Raises UserError on all ranks if it does not fit any of them."""
        state, problem = dict[str, Any](), ""
        try:
            self.tracked.make_room()
            own = {name: each for name, each in self.tracked.state().items() if name in newest.files.items}
            state = newest.files.read_into(own) | newest.files.read_all(KINDS, FROZEN)
        except Exception as error:  # raise later: the other ranks still read their parts, and then wait for this rank
            problem = " ".join(str(error).split())[:300] or type(error).__name__
        for rank, text in enumerate(self.group.gather(problem)):
            if text:
                raise UserError(f"{newest.path} does not fit this model: rank {rank}: {text}. {WAY_OUT}")
        return state

    # Saving ---------------------------------------------------------------------------------------------------

    def save(self, *, wait: bool = False) -> bool:
        """Save a copy, see `Job.save`. Returns whether a copy was begun."""
        position, run = self.position, self.run
        wanted = bool(self.tracked.items) and position.key != self._saved
        if wanted:
            self.agreement.compare(position.step)
            if self.tracked.left_out():
                self.group.on_all_ranks(lambda: self._check_frozen(self._frozen, (
                    'track: parameters that are not trained must stay as they are with only="trained", because no '
                    "checkpoint holds them, got a change. Track the whole module, or call job.track after freezing."
                )))
            run.wait()  # until the previous save has ended: two states may not fit into memory
            state = self.tracked.state()
            if self.tracked.split and not run.saver.sharded:
                state = self.group.collective(lambda: gathered(state))
            state |= self._beside()
            if self.loader_states:
                state[LOADERS] = self._all_loader_states()
            # Write gathered state at once: another copy in memory would double its size. It has no second copy
            may_continue = run.saver.sharded or not self.tracked.split
            self.group.on_rank0(self.reporting.metrics.flush)  # a resumed run does not repeat the saved steps
            run.saver.save(position.step, lambda: self._record(position), state, may_continue=may_continue, wait=wait)
            self._saved = position.key
        if wait:
            run.settle()
        return wanted

    def _all_loader_states(self) -> dict[str, Any]:
        """Return the loaders' states of all ranks. They travel as a copy holds them, which is decoded in a tenth of the
        time that torch.load takes."""
        nodes, tensors = tree.encode({LOADERS: {self._place: self.loader_states}})
        found, tensors_of = self.group.gather([nodes, bool(tensors)]), [tensors] * self.group.world_size
        if any(some for _, some in found):
            tensors_of = self.group.gather_tensors(tensors)
        states = dict[str, Any]()
        for (nodes, _), held in zip(found, tensors_of, strict=True):
            states |= tree.decode(nodes, held.__getitem__)[LOADERS]
        return states

    def _beside(self) -> dict[str, Any]:
        """Return the items that a copy holds beside the state, except those of loaders."""
        return self.tracked.kinds() | ({FROZEN: self._frozen} if self.tracked.left_out() else {})

    def save_part(self) -> None:
        """Copy this rank's part of the last commit to memory. All ranks call this."""
        self.run.parts.take(self.position.step, lambda: (self._record(self.position), self._own()))

    def _own(self) -> dict[str, Any]:
        """Return what this rank holds of the last commit. Other ranks that resume from it count their own batches."""
        state = self.tracked.state() | self._beside()
        if self.loader_states:
            state[LOADERS] = {self._place: self.loader_states}
        return state

    def _record(self, position: Position) -> bytes:
        """Return the contents of `state.json`."""
        group, run = self.group, self.run
        return to_json({
            "format": FORMAT, **asdict(position), "seed": self.settings.seed, "world_size": group.world_size,
            "versions": VERSIONS, "run": run.lineage.run, "attempt": run.mark, "lineage": run.lineage.values(),
            "written_by": f"rank {group.rank} on {group.hosts[group.rank]}", **self.about,
            "options": self.tracked.options, "built": self.tracked.built(),
            **({"world_sizes": self.ranks} if self.ranks else {}), "flags": self._flags,
        })

    def stopped(self) -> str:
        """Return the message for a run that was stopped at its last commit."""
        why, step = self.group.stop.signal_name or "asked to stop", self.position.step
        total = self.reporting.progress.total
        if not self.tracked.items:
            return f"{why}: stopped at step {step}, nothing is tracked, so nothing was saved."
        where = f"saved at step {step}" if step else "nothing to save at step 0"
        again = f"The same command{' without fresh' if self.settings.fresh else ''} goes on from it."
        return f"{why}: {where}{'' if total is None else f' of {total}'}. {again}"

    # The end of a process: any thread ---------------------------------------------------------------------------

    def rescue(self) -> None:
        """Write the last commit to this node's memory. The loop never continues afterwards.

        If that is impossible, only the copy that rank 0 may be writing will remain, and this waits until it is written.
        """
        if self.agreement.deciding.acquire(timeout=DECIDE_S):  # a comparison may be about to find this state wrong
            self.agreement.deciding.release()
        group, hangs = self.group, self.run.saver.writing.under_way  # the save may wait for a disk
        settled = group.stop.requested and self.position.step == group.record.confirmed
        if settled and group.is_rank0 and not hangs and self.save_for_stop():
            return  # another rank left before it reached the step at which all ranks stop
        position, holds_all = None, bool(self.tracked.items) and not self.tracked.split
        if holds_all and not self.agreement.wrong and self.position.step > max(0, self.run.saved_step):
            position = self.commit_lock.stop()
            if position is None:
                self.group.log.warning(
                    "no rescue by this rank: it was changing the weights. The run resumes from another copy"
                )
        try:
            if position is not None and position.step > max(0, self.run.saved_step):
                self._write_rescue(copy(position))
                return
        except Exception as error:
            # Saves wait for each other, so a save that is under way is the newest
            saved = max(self.run.saved_step, self.run.saver.step or 0)
            rescued = memory.newest_step(self.run.lineage.run)
            kept = f"the {'rescue' if rescued > saved else 'checkpoint'} of step {max(saved, rescued)}"
            others = " or from the rescue of another node" if len({*group.hosts}) > 1 else ""
            group.log.warning(
                f"no rescue of step {self.position.step}, so the run goes on from "
                f"{kept if max(saved, rescued) > 0 else 'its beginning'}{others}: {reason(error)}"
            )
        self.run.parts.wait()
        self.run.saver.wait()

    def save_for_stop(self) -> str:
        """Write the last commit; on rank 0 as a copy on disk, because the job may resume on other machines, or to this
        node's memory if the disk is full. Returns the message for the user, or "" if this process alone can't keep the
        state."""
        signal = self.group.stop.signal_name
        if not self.tracked.items:
            return self.stopped()
        if self.tracked.split:
            return ""
        if self.agreement.wrong:
            return f"{signal}: this rank's state may be wrong, so it was not saved"
        if not self.group.is_rank0:
            self.rescue()
            return self.stopped()
        saver = self.run.saver
        saver.wait()
        position = self.commit_lock.stop()
        if position is None and self.commit_lock.busy and self.group.world_size == 1:
            return ""  # a long step: the loop stops after it
        if position is None:
            return f"{signal}: in the middle of changing the weights, so nothing newer was saved"
        position = copy(position)
        newest = list_copies(saver.folder.path)  # look again: the loop may not have noticed the end of a save yet
        if position.step > (step_of(newest[-1]) if newest else 0):
            try:
                self.reporting.metrics.flush()
                with self.commit_lock.own_stream():
                    saver.folder.write(position.step, self._files(position))
            except UserError as error:
                self.group.log.warning(
                    f"no checkpoint of step {position.step}, trying this node's memory: {reason(error)}"
                )
                self._write_rescue(position)
        for place in self.run.places.values():
            place.finish(stopped=True)
        return self.stopped()

    def _write_rescue(self, position: Position) -> None:
        with self.commit_lock.own_stream():
            make = partial(self._files, position)
            memory.write_rescue(self.run.lineage.run, position.step, self.run.mark, make)

    def _files(self, position: Position) -> dict[str, Content]:
        """Return the files of a copy of the last commit, at `position`. To read them from a GPU takes `own_stream`."""
        return {STATE: self._record(position), **tree.files_of(*tree.encode(self._own()))}
