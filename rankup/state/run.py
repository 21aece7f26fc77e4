"""A run: its folder, the attempt that owns it, and its copies, wherever they are.

`open_run` finds the newest whole copy on the run's line of attempts, which is where the run stands. It fetches and
verifies the newest copy, or the next one if that copy is damaged. The caller decides what a copy holds, and whether an
attempt may resume from it.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rankup.errors import Stopped, UserError, disk_errors
from rankup.group.group import Group, broke_collective
from rankup.places.files import read_json, remove_unfinished, write_json
from rankup.places.lease import FILE, KEPT, RESULT, Lease, Lineage, put_aside
from rankup.state import choice, memory
from rankup.state.choice import NodeMemory, SecondCopies
from rankup.state.copies import STATE, list_whole
from rankup.state.parts import Parts
from rankup.state.place import CHECKPOINT, MIRROR, PEER, RESCUE, STORE, Candidate, Folder
from rankup.state.reading import Copy, load, newest_whole
from rankup.state.saver import Options, Saver
from rankup.state.second_place import SecondPlace
from rankup.timing import VISIBLE_S


class Run:
    """The run, as one attempt continues it. All ranks have one. Only rank 0 has `places`, by kind, and `owner`, the
    lease that says whether the run still belongs to this attempt.

    `newest`: the copy to resume from, on all ranks; None at the beginning of a run, and after the loop has taken the
    copy. `kind`: the kind of that copy. `words`: its description for the user. `finished`: nothing is left to do.
    `second_rank`: the rank that keeps second copies, or None. `saved`: the record of the newest good copy in rank 0's
    folder at the beginning. `saved_step`: the step of the newest copy there now, or -1.
    """

    def __init__(self, group: Group, options: Options) -> None:
        self.group, self.options, self.folder = group, options, group.run_dir
        self.owner: Lease
        check_owner: Callable[[], None] = (lambda: self.owner.check()) if group.is_rank0 else lambda: None
        self.checkpoints = Folder(self.folder / "checkpoints", keep=options.keep, check_owner=check_owner)
        self.second = SecondCopies(group)
        self.places: dict[int, SecondPlace] = {}
        self.second_rank: int | None = None
        self.newest: Copy | None = None
        self.kind, self.words = CHECKPOINT, ""
        self._found = list[Candidate]()  # copies that only rank 0 reaches
        self._newest_here: Path | None = None  # on rank 0, the copy whose record is `saved`
        self._rescued = False  # whether this node may have rescues of the run

    # Opening --------------------------------------------------------------------------------------------------

    def find(self, stack: contextlib.ExitStack) -> None:
        """Take ownership of the run, and find where it stands. All ranks call this once, see `open_run`."""
        group, options = self.group, self.options
        values, self.token = group.on_rank0(lambda: self._take(stack))
        self.mark = f"{group.attempt}-{self.token[:8]}"  # unique, although a launcher may give an attempt's id twice
        self.lineage = Lineage(**values)
        self._choose()
        self.saved_step = self.saved["step"] if self.saved else -1
        self.finished = self.newest is not None and self.kind < PEER and group.on_rank0(
            lambda: options.finished(self.newest, read_json(self.folder / RESULT))
        )
        if self.finished:
            memory.remove(self.lineage.run)
        self.parts = Parts(group, self.lineage.run, options.memory_every_steps)
        for place in self.places.values():
            place.run = self.lineage.run
        second = self.second.of(self.lineage.run) if self.second_rank == group.rank else None
        self.saver = Saver(
            group, self.checkpoints, options, token=self.token, saved=self._note_saved, second=second
        )

    def _take(self, stack: contextlib.ExitStack) -> tuple[dict[str, Any], str]:
        """Take ownership of the folder and the other places, on rank 0. Return the lineage of the run there or of a new
        run, and the token of the lease. Raises UserError and PeerLost."""
        group, options = self.group, self.options
        agreed = "basis" in group.record.commit
        self.owner = lease = Lease(self.folder, group.attempt, agreed=agreed)
        with disk_errors("run_dir", self.folder):
            stack.enter_context(lease)  # on the caller's stack, and in this call, so that a refusal reaches all ranks
            group.status.claim(lease)
            remove_unfinished(self.checkpoints.path)
            begun = Lineage.read(self.folder)
            # --fresh loses nothing: it moves the earlier run aside, unless this launch itself began that run
            anew = options.fresh and not (begun and self._may_take(begun))
            if anew and (aside := put_aside(self.folder, check=lease.check)):
                group.log.info(f"--fresh: the earlier run was moved to {aside}")
            for kind, url in {STORE: options.store, MIRROR: options.mirror}.items():
                if url:
                    place = SecondPlace(url, self.checkpoints, lease, group.log, options, required=kind == STORE)
                    self.places[kind] = place
                    place.adopt(stack, wanted=self._may_take)
                    if place.required:
                        self.owner = place.lease
            line = Lineage.read(self.folder) or Lineage.new(group.attempt, group.rank_env.start)
            self._found = [one for place in (*self.places.values(), self.checkpoints) for one in place.list()]
        return line.values(), lease.token

    def _may_take(self, other: Lineage) -> bool:
        """Return whether this attempt may resume `other`. With --fresh, only if this launch began that run itself."""
        return not self.options.fresh or choice.of_this_job(other, self.group)

    def _choose(self) -> None:
        """Find the newest state that any rank can reach. All ranks call this.

        Raises on all ranks: UserError if all copies of the run are damaged or this attempt can't resume the run, and
        PeerLost if a place that may hold the newest copy does not answer.
        """
        group, folder, options = self.group, self.folder, self.options
        known = self.lineage if self.lineage.number else None  # the run that rank 0's folder holds
        # `_sees` does not wait: if a network file system shows the file late, the node only keeps a needless copy
        held = NodeMemory(group, options)
        own = (*self._found, *self.second.list(), *held.list())
        listed = [asdict(replace(one, rank=group.rank, node=memory.node_id())) for one in own]
        seen, found, skipped = zip(*group.gather([self._sees(), listed, held.skipped]), strict=True)
        candidates = [Candidate(**values) for each in found for values in each]
        if options.compare_every_steps != 0:
            self.second_rank = next((rank for rank, sees in enumerate(seen) if rank and not sees), None)
        passed = set[str]()

        def copies_in_order() -> Iterator[tuple[str, Callable[[], Copy]]]:
            for line, one in choice.in_order(candidates, known, self._may_take, group):
                passed.add(one.where)
                others = [
                    Path(other.where) for other in candidates
                    if other.rank == group.rank and other.kind in (CHECKPOINT, PEER, RESCUE)
                    and (other.step, other.attempt, other.run) == (one.step, one.attempt, one.run)
                ]
                yield one.words, partial(self._resume_from, one, line, others)

        self.newest = newest_whole(folder, copies_in_order(), group.log.warning if group.is_rank0 else None)
        if group.is_rank0:
            self._say_left([one for one in candidates if one.where not in passed], known)
            step = self.newest.step if self.newest is not None else 0
            for line in sorted({text for each in skipped for run, at, text in each
                                if run == self.lineage.run and at > step}):
                group.log.warning(line)
        self.saved = group.on_rank0(lambda: self._find_here(passed))
        self.second.put_aside_others(self.lineage.run)
        # Memory of rank 0's own machine may hold a lost step of any script with the same settings
        others = [one for one in candidates if one.kind == PEER or (
            one.kind > PEER and group.hosts[one.rank] != group.hosts[0]
        )]
        if self.newest is None and others:  # --fresh, or node 0 has lost its disk, and all agents are new
            words = max(others, key=lambda one: one.step).words
            group.log.info(f"begins anew: {words}, is of another run and not used")

    def _say_left(self, others: list[Candidate], known: Lineage | None) -> None:
        """Log which later checkpoints in rank 0's folder this attempt does not use, or that the `known` run has none:
        the user may have put them back, or lost the disk that had them."""
        if self.newest is None and known is not None:
            self.group.log.warning("the run has no checkpoint yet, or lost all: it begins again at step 0")
        for one in others:
            if self.newest is not None and one.kind == CHECKPOINT and one.step > self.newest.step:
                why = "this run does not continue from the attempt that wrote it"
                self.group.log.warning(f"{one.words} was skipped: {why}")

    def _resume_from(self, one: Candidate, line: Lineage | None, others: list[Path]) -> Copy:
        """Read copy `one` on all ranks, and adopt its `line`. `others`: where this rank may have the same files. Raises
        on all ranks: Damaged, UserError and PeerLost."""
        group, options = self.group, self.options
        folder = self.checkpoints.path  # another node may have mounted it elsewhere
        fetched, name = one.kind in (STORE, MIRROR), f"step-{one.step:08d}"
        with contextlib.ExitStack() as stack:
            def opened(one: Candidate) -> Path:
                place = self.places[one.kind] if fetched else self.checkpoints  # only rank 0 has the places
                return stack.enter_context(place.open(one))

            def in_place(path: Path) -> Path:
                return folder / path.relative_to(path.parents[fetched])

            def check(path: Path, record: dict[str, Any]) -> None:
                # What was fetched is removed if it is refused. Only rank 0, which has the places, checks it
                options.check(Path(self.places[one.kind].place.url, one.where) if fetched else path, record)

            copy = load(
                group, one, opened, check=check, others=[] if one.parts else [*others, folder / name],
                in_place=in_place if options.sharded and one.kind < PEER else None, on_disk=True,
            )
            if fetched:
                group.on_rank0(lambda: self._keep(copy.path, self.places[one.kind]))
                copy = replace(copy, path=folder / name)
        self.kind = one.kind
        self.words = copy.path.name if one.kind < PEER else one.words
        if one.kind == RESCUE:
            self.words += "; no finished step was lost"
        if line is not None and line.number > self.lineage.number:  # rank 0's disk knows less
            self.lineage = line
        elif not self.lineage.number and one.kind == CHECKPOINT:
            self.lineage.run = copy.record["run"]  # run.json was lost; keep the id, because trackers know the run by it
        return copy

    def _keep(self, fetched: Path, place: SecondPlace) -> None:
        """Move a verified copy that was fetched from `place` to the run's own copies."""
        kept = self.checkpoints.put(fetched)
        self.group.log.info(f"fetched {kept.name} from {place.called}")

    def _find_here(self, passed: set[str]) -> dict[str, Any] | None:
        """Find the newest copy in rank 0's folder that was not tried before (`passed`). Return its record."""
        if self.newest is not None and self.kind < PEER:
            self._newest_here = self.newest.path
            return self.newest.record
        for path in reversed(list_whole(self.checkpoints.path)):
            if str(path) not in passed:
                with contextlib.suppress(TypeError, LookupError, ValueError):
                    self.options.check(path, record := read_json(path / STATE))
                    self._newest_here = path
                    return record
        return None

    def _sees(self) -> bool:
        """Return whether this rank sees in the folder the lease that rank 0 has just written there."""
        return bool(read_json(self.folder / "lease.json").get("token") == self.token)

    def check_shared(self) -> None:
        """Raise UserError on all ranks if a rank does not see the folder of rank 0. Otherwise the first save of a
        sharded copy would fail, hours later. From then on no rank keeps second copies. All ranks call this."""
        until_s = time.monotonic() + VISIBLE_S
        while not (seen := self._sees()) and time.monotonic() < until_s:
            time.sleep(0.1)
        seen_by = zip(self.group.hosts, self.group.gather(seen), strict=True)
        if unseen := [f"rank {rank} on {host}" for rank, (host, seen) in enumerate(seen_by) if not seen]:
            raise UserError(
                f"A sharded checkpoint needs a run directory that all nodes share, got {self.folder}, in which "
                f"{', '.join(unseen[:4])} can't see what others write. Set it to shared storage, or in the program in "
                "train/ --checkpoint-format plain.", printed_elsewhere=not self.group.is_rank0,
            )
        self.second_rank = self.saver.second = None  # `_choose` may have found that a rank saw the folder late

    def begin(self, step: int, open_files: Callable[[], None] = lambda: None) -> None:
        """Record that this attempt continues the run from `step`, and remove rescues that it can't use. All ranks call
        this. `open_files`: rank 0 calls it to open the caller's files. Raises UserError and PeerLost on all ranks."""
        writer = self.newest.record["attempt"] if self.newest is not None else None
        self.lineage.add_attempt(self.mark, step=step, writer=writer)

        def write() -> None:
            with disk_errors(FILE, self.folder, self.owner.check):
                self.lineage.write(self.folder, check=self.owner.check)
            open_files()
            for place in self.places.values():
                if place.required:  # otherwise the next machine would not know of a run that was begun anew
                    place.upload(None)
                place.upload_later(self._newest_here)  # an earlier attempt may have had no time to upload it

        self.group.on_rank0(write)
        if self.second_rank is not None and not self.parts.wanted:  # that rank would have only a part of split state
            who = f"rank {self.second_rank} on {self.group.hosts[self.second_rank]}"
            self.group.log.info(f"copies {who} also keeps the newest checkpoint, because the nodes share no disk")
        # A rescue of a later step is damaged, or its attempt is not on the run's line
        memory.remove(self.lineage.run, range(self.saved_step + 1, step + 1))
        self._rescued = step > max(0, self.saved_step) and not self.parts.wanted

    # Saves ----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the last save is complete, in a store too, before another save or the end. All ranks call this.
        Raises UserError and PeerLost on all ranks."""
        self.saver.look(wait=True)
        if self.options.store:
            self.group.watch.enter("save", self.options.save_timeout_s)
            self.group.on_rank0(lambda: self.places[STORE].settle())

    def keep(self, name: str, step: int) -> None:
        """Keep the copy of `step`, which is on disk, under `name`. Rank 0 only. Raises UserError and PeerLost."""
        with disk_errors(KEPT, self.folder, self.owner.check):
            write_json(self.folder / KEPT, read_json(self.folder / KEPT) | {name: step}, check=self.owner.check)
        for place in self.places.values():
            place.upload_later(None)

    def settle(self) -> None:
        """Wait for the last save and the second copy, and free the parts in memory, because the training ends."""
        self.wait()
        self.parts.close()
        self.saver.wait_for_second()

    def _note_saved(self, step: int) -> None:
        """Note that the copy of `step` is on disk, which all ranks know, and remove the rescues that it replaces."""
        self.saved_step = step
        if self._rescued:  # they are of an earlier attempt, because no rescue is written while this one trains
            memory.remove(self.lineage.run, range(step + 1, sys.maxsize))
            self._rescued = False
        for place in self.places.values():
            place.upload_later(self.checkpoints.path / f"step-{step:08d}")
        if self.options.save == "sync":
            self.wait()


@contextlib.contextmanager
def open_run(group: Group, options: Options) -> Iterator[Run]:
    """Own the run in the group's folder for the length of the block, and find its newest copy. All ranks call this.

    Raises UserError on all ranks if another attempt is alive, or this attempt can't resume from the newest copy.
    """
    run = Run(group, options)
    group.watch.enter("setup", options.setup_timeout_s)  # a copy may have to be fetched
    with contextlib.ExitStack() as stack:
        run.find(stack)
        try:
            yield run
        except BaseException as error:
            if run.saver.writing.under_way and broke_collective(error):
                # The rescue that follows must not wait for the disk, and the thread may publish until this process
                # ends. Until then no other attempt may own the folder: the kernel frees the lease, as after a kill
                stack.pop_all()
            elif run.saver.writing.under_way:
                group.watch.enter("save", options.save_timeout_s)
                run.saver.wait()
            if MIRROR in run.places and isinstance(error, Stopped):
                run.places[MIRROR].finish(stopped=True)
            raise
        for place in run.places.values():
            if place.required or not run.finished:
                place.finish(stopped=False)
