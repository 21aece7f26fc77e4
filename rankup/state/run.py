"""A run: its folder, the attempt that owns it, and its copies, wherever they lie.

`open_run` finds where the run stands: at the newest whole copy on its line of attempts. It fetches and verifies the
newest copy, or the next one if that is damaged. The caller says what a copy holds, and whether an attempt may resume
from it.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rankup.errors import Stopped, UserError, disk_errors
from rankup.group.group import Group, broke_collective
from rankup.places.files import read_json, remove_unfinished
from rankup.places.lease import FILE, RESULT, Lease, Lineage, put_aside
from rankup.state import choice, copies, memory
from rankup.state.choice import CHECKPOINT, MIRROR, PEER, RESCUE, SECOND, STORE, Candidate
from rankup.state.copies import STATE
from rankup.state.parts import Parts, load
from rankup.state.reading import Copy, newest_whole, read, share
from rankup.state.saver import Options, Saver, SecondCopies
from rankup.state.second_place import SecondPlace
from rankup.timing import VISIBLE_S


class Run:
    """A run for the length of an attempt. All ranks have one; `places` by kind, and `owner`, whose lease says where the
    run is and whether it is still this attempt's, are rank 0's.

    `newest`: the copy to go on from, on all ranks, None at the beginning of a run, and once the loop has it. `kind`: of
    the place where it was. `words`: what it is, for the user. `finished`: nothing is left to do. `second_rank`: who
    keeps second copies, None where none is needed. `saved`: the record of the newest good copy in rank 0's folder at
    the beginning. `saved_step`: of the newest copy there now, -1 for none.
    """

    def __init__(self, group: Group, options: Options) -> None:
        self.group, self.options, self.folder = group, options, group.run_dir
        self.owner: Lease
        self.places: dict[int, SecondPlace] = {}
        self.second_rank: int | None = None
        self.newest: Copy | None = None
        self.kind, self.words = CHECKPOINT, ""
        self._found = list[list[Any]]()  # copies that rank 0 alone reaches: fields of a Candidate from `kind` on
        self._newest_here: Path | None = None  # rank 0's: the copy of which `saved` is the record
        self._rescued = False  # this node may have rescues of the run

    # Opening --------------------------------------------------------------------------------------------------

    def find(self, stack: contextlib.ExitStack) -> None:
        """Own the run, and find where it stands. All ranks call this once, see `open_run`."""
        group, options = self.group, self.options
        values, self.token = group.on_rank0(lambda: self._take(stack))
        self.mark = f"{group.attempt}-{self.token[:8]}"  # a launcher may give the id of an attempt twice
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
        second = self.folder / SECOND / self.lineage.run
        self.saver = Saver(
            group, self.folder / "checkpoints", options, token=self.token, check_owner=lambda: self.owner.check(),
            second=SecondCopies(group, second, options) if self.second_rank == group.rank else None,
            saved=self._note_saved,
        )

    def _take(self, stack: contextlib.ExitStack) -> tuple[dict[str, Any], str]:
        """Own the folder and the other places, on rank 0. Returns the run there, or one that begins, and the token of
        the lease. Raises UserError and PeerLost."""
        group, options, folder = self.group, self.options, self.folder / "checkpoints"
        agreed = bool((group.launch.agent or {}).get("commit", {}).get("basis"))
        self.owner = lease = Lease(self.folder, group.attempt, agreed=agreed)
        with disk_errors("run_dir", self.folder):
            stack.enter_context(lease)  # here, not around the block: a refusal has to reach all ranks
            group.status.claim(lease)
            remove_unfinished(folder)
            begun = Lineage.read(self.folder)
            # To start anew must not lose anything
            anew = options.fresh and not (begun and self._may_take(begun))
            if anew and (aside := put_aside(self.folder, check=lease.check)):
                group.log.info(f"--fresh: the earlier run was moved to {aside}")
            for kind, url in {STORE: options.store, MIRROR: options.mirror}.items():
                if url:
                    place = SecondPlace(url, self.folder, lease, group.log, options, required=kind == STORE)
                    self.places[kind] = place
                    self._found += [[kind, *one] for one in place.adopt(stack, wanted=self._may_take)]
                    if place.required:
                        self.owner = place.lease
            line = Lineage.read(self.folder) or Lineage.new(group.attempt, group.launch.start)
            self._found += choice.found_in(folder)
        return line.values(), lease.token

    def _may_take(self, other: Lineage) -> bool:
        """Whether to go on with that run: who begins anew does so only with what its own launch began anew before."""
        return not self.options.fresh or choice.of_this_job(other, self.group)

    def _choose(self) -> None:
        """Find the newest state that any rank can reach. All ranks call this.

        Raises, on all ranks, UserError where nothing whole is left of a run that has copies, or the run can't be gone
        on with, and PeerLost where a place does not answer that may hold the newest.
        """
        group, folder, options = self.group, self.folder, self.options
        known = self.lineage if self.lineage.number else None  # the run that rank 0's folder holds
        # Not waited for: where a network file system shows it later, the node keeps a copy that nobody needs
        own = [*self._found, *choice.held_by(group, folder, options)]
        seen, nodes, found = zip(*group.gather([self._sees(), memory.node_id(), own]), strict=True)
        candidates = [Candidate(rank, nodes[rank], *values) for rank, each in enumerate(found) for values in each]
        if options.compare_every_steps != 0:
            self.second_rank = next((rank for rank, sees in enumerate(seen) if rank and not sees), None)
        passed = set[str]()

        def copies_in_order() -> Iterator[tuple[str, Callable[[], Copy]]]:
            for line, one in choice.in_order(candidates, known, self._may_take, group):
                passed.add(one.where)
                yield one.words, partial(self._go_on_from, one, line)

        self.newest = newest_whole(folder, copies_in_order(), group.log.warning if group.is_rank0 else None)
        self.saved = group.on_rank0(lambda: self._find_here(passed))
        choice.put_aside_others(folder, self.lineage.run)

    def _go_on_from(self, one: Candidate, line: Lineage | None) -> Copy:
        """The copy, on the `line` of attempts, on all ranks. Raises, on all ranks, Damaged, UserError and PeerLost."""
        options = self.options

        def read_it() -> Copy:
            if one.kind in self.places:
                copy = self.places[one.kind].fetch(one.where, options.check)
                self.group.log.info(f"fetched {copy.path.name} from {self.places[one.kind].called}")
            else:
                copy = read(Path(one.where), options.check)
            return copy if options.sharded else copy.as_plain()

        copy = load(one.parts, self.group) if one.parts else share(read_it, self.group, source=one.rank)
        if copy.sharded and one.kind < PEER:  # another node may have mounted the folder elsewhere
            copy = replace(copy, path=self.folder / "checkpoints" / copy.path.name)
        self.kind = one.kind
        self.words = copy.path.name if one.kind < PEER else one.words
        if one.kind == RESCUE:
            self.words += "; no finished step was lost"
        if line is not None and line.number > self.lineage.number:  # than what rank 0's disk knows
            self.lineage = line
        elif not self.lineage.number and one.kind == CHECKPOINT:
            self.lineage.run = copy.record["run"]  # run.json was lost: trackers know the run by the same id
        return copy

    def _find_here(self, passed: set[str]) -> dict[str, Any] | None:
        """Find the newest copy in rank 0's folder that was not `passed` over. Returns its record."""
        if self.newest is not None and self.kind < PEER:
            self._newest_here = self.newest.path
            return self.newest.record
        for path in reversed(copies.list_whole(self.folder / "checkpoints")):
            if str(path) not in passed:
                with contextlib.suppress(TypeError, LookupError, ValueError):
                    self.options.check(path, record := read_json(path / STATE))
                    self._newest_here = path
                    return record
        return None

    def _sees(self) -> bool:
        """Whether this rank finds in the folder what rank 0, whose lease has this token, has just written there."""
        return bool(read_json(self.folder / "lease.json").get("token") == self.token)

    def check_shared(self) -> None:
        """Raises UserError on all ranks where one does not see the folder of rank 0: else the first save of a sharded
        copy would fail, hours later. All ranks call this."""
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

    def begin(self, step: int, open_files: Callable[[], None] = lambda: None) -> None:
        """From here on the run continues what this attempt started from, and no other rescue. All ranks call this.
        `open_files`: rank 0's, of the caller. Raises on all ranks, UserError and PeerLost."""
        writer = self.newest.record["attempt"] if self.newest is not None else None
        self.lineage.go_on(self.mark, step=step, writer=writer)

        def write() -> None:
            with disk_errors(FILE, self.folder, self.owner.check):
                self.lineage.write(self.folder, check=self.owner.check)
            open_files()
            for place in self.places.values():
                if place.required:  # or a machine that comes next would not know of a run that was begun anew
                    place.upload(None)
                place.copy(self._newest_here)  # an earlier attempt may have had no time for it

        self.group.on_rank0(write)
        if self.second_rank is not None and not self.parts.wanted:  # of split state it has only a part
            who = f"rank {self.second_rank} on {self.group.hosts[self.second_rank]}"
            self.group.log.info(f"copies {who} keeps the newest checkpoint too: the nodes share no disk")
        # What is of a later step is damaged, or of an attempt that the run went on without
        memory.remove(self.lineage.run, range(self.saved_step + 1, step + 1))
        self._rescued = step > max(0, self.saved_step) and not self.parts.wanted

    # Saves ----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the last save, in a store too: another one begins, or the training ends. All ranks call this.
        Raises, on all ranks, UserError and PeerLost."""
        self.saver.look(wait=True)
        if self.options.store:
            self.group.watch.enter("save", self.options.save_timeout_s)
            self.group.on_rank0(lambda: self.places[STORE].settle())

    def settle(self) -> None:
        """The same for all saves, because the training ends."""
        self.wait()
        self.parts.close()
        if (second := self.saver.second) is not None:
            second.join(second.left_s)

    def _note_saved(self, step: int) -> None:
        """The copy stands on the disk, and all ranks know: rescues up to its step are needed no longer."""
        self.saved_step = step
        if self._rescued:  # what an earlier attempt left: while this one trains none is written
            memory.remove(self.lineage.run, range(step + 1, sys.maxsize))
            self._rescued = False
        for place in self.places.values():
            place.copy(self.saver.folder / f"step-{step:08d}")
        if self.options.save == "sync":
            self.wait()


@contextlib.contextmanager
def open_run(group: Group, options: Options) -> Iterator[Run]:
    """Own the run in the group's folder for the length of the block, and find what is there. All ranks call this.

    Raises UserError on all ranks where another attempt is alive, or where the newest copy can't be gone on with.
    """
    run = Run(group, options)
    group.watch.enter("setup", options.setup_timeout_s)  # a copy may have to be fetched
    with contextlib.ExitStack() as stack:
        run.find(stack)
        try:
            yield run
        except BaseException as error:
            if run.saver.writing.under_way and broke_collective(error):
                # There will be a rescue, which must not wait for the disk. The thread may publish until this process
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
