"""The second place of a run: what is published in its folder is copied to an address, or to another folder.

`--run-dir s3://...`: the place is required. The run works in a folder of this machine, as any other, and whatever
machine comes next, with an empty disk or an old one, goes on from what is at the address. A save that is not copied is
an error. `--mirror DIR_OR_URL`: the place may fail. A thread copies, always the newest, and what it had no time for is
left out. No step and no save waits for it; a place that fails is one line until it is back, and the end says what is
not there. `rankup.state.stored_run` says what lies at either.
"""

import contextlib
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from rankup.errors import PeerLost, UserError
from rankup.places.lease import FILE, OF_RUN, Lease, Lineage, StoreLease, highest_number, put_aside
from rankup.places.place import Place
from rankup.state.copies import STATE, list_copies, looks_whole, uploading
from rankup.state.saver import Options, Writing
from rankup.state.stored_run import StoredRun
from rankup.timing import FIND_S, MIRROR_BYTES_PER_S, MIRROR_S, SEARCH_S, UPLOAD_END_S, UPLOAD_STOP_S

SUPERSEDED = "superseded"
SHARE = 0.9  # of a deadline: ours has to come before the watchdog's, which does not know the place


class SecondPlace(StoredRun):
    """The second place of the run in `folder`. Rank 0 only."""

    def __init__(
        self, url: str, folder: Path, lease: Lease, log: logging.Logger, options: Options, *, required: bool
    ) -> None:
        """`url`: of all runs there. `lease`: of `folder`, which is held already. Raises UserError where the package for
        such an address is missing."""
        place = Place.open(url, warn=log.warning if required else self._fail)
        super().__init__(place.below(folder.name))
        self.folder, self.required, self.keep, self.log = folder, required, options.keep, log
        self.address, self.run = self.place.url, ""  # the id of the run that is copied
        self.called = self.address if required else f"the mirror {self.address}"
        self._folder_lease, self._save_s = lease, options.save_timeout_s
        self._opening_s = min(options.setup_timeout_s, options.save_timeout_s)
        self._lease: StoreLease | None = None
        self._free = 0  # of a mirror: the number that was free at the opening
        self._mirroring = Writing("mirror", math.inf)
        self._newest: Path | None = None  # the copy that a mirror is to have
        self._has: Path | None = None  # the last one that it got
        self._begun = self._over = False
        self._failing = ""  # what was said of a mirror that fails

    def patient(self, timeout_s: float) -> Self:
        """This, with so much patience from now on."""
        self.place = self.place.within(SHARE * timeout_s)
        return self

    # At opening -----------------------------------------------------------------------------------------------

    def adopt(self, stack: contextlib.ExitStack, *, nothing_here: bool, wanted: Callable[[Lineage], bool]) -> None:
        """Own the place until `stack` ends if it is required, and take the run that is there where the folder is behind
        it, or empty.

        `nothing_here`: the folder has neither a run nor a copy. `wanted`: whether a mirror's run may be gone on with.
        Raises UserError and PeerLost where the place is required, or where it alone may know of a run; and OSError.
        """
        with self._asking(alone=nothing_here):
            if self.required:
                ours = self._folder_lease
                tokens = (ours.token, ours.predecessor)
                lease = StoreLease(self.place, ours.attempt, tokens, agreed=ours.agreed)
                self._lease = stack.enter_context(lease)
                self.number = self._lease.number
            else:
                # Before the look at what is there: an attempt that copies after it takes this number, and this one
                # can't. Two attempts may note the same number: the first to copy gets it, the other can never copy
                self._free = highest_number(self.place.names()) + 1
            here, there = Lineage.read(self.folder), self.lineage()
            if there is None:
                return
            if self.required and not (here and here.goes_on_from(there)):
                self._put_aside()
            elif not nothing_here or not wanted(there):
                if here and here.run == there.run and there.number > here.number:  # another machine was node 0 since
                    there.write(self.folder)
                elif here and here.run != there.run:
                    self.log.info(f"{self.called} holds another run, whose checkpoints stay there")
                return
            self.fetch_files(self.folder)
            if Lineage.read(self.folder) is None:  # lost there
                there.write(self.folder)

    def found(self) -> Iterator[list[Any]]:
        """The copies there of the run in the folder: path, step, attempt and run of each. Raises as `adopt`."""
        if run := Lineage.read(self.folder):
            with self._asking(alone=not self._whole()):
                for one in self.copies(run.run):
                    # Who wrote it, as far as nobody looked at its bytes; "" where that can't be read
                    record = self.place.read_json(f"{one.folder}/{STATE}")
                    attempt = str(record.get("attempt", "")) if record.get("run") == one.run else ""
                    yield [one.folder, one.step, attempt, one.run]

    def fetch(self, folder: str, directory: Path | None = None) -> tuple[Path, str]:
        """Copy that copy into the folder of this run, or into `directory`. Raises as `adopt`."""
        path, problem, whole = self.folder / "checkpoints", f"{self.called} fails", self._whole()
        with self._asking(alone=not whole):
            path, problem = super().fetch(folder, directory or path)
        if not problem:
            had = f"{whole[-1]} as its newest" if whole else "no good checkpoint"
            self.log.info(f"fetched {path.name} from {self.called}: {self.folder} had {had}")
        return path, problem

    def lacks(self, path: Path) -> bool:
        """Whether it does not hold this copy: an earlier attempt may have had no time."""
        return not self.patient(self._opening_s).holds(path, run=self.run)

    def _whole(self) -> list[str]:
        """The names of the copies in the folder, as far as nobody looked at their bytes."""
        return [path.name for path in list_copies(self.folder / "checkpoints") if looks_whole(path)]

    @contextlib.contextmanager
    def _asking(self, *, alone: bool) -> Iterator[None]:
        """A mirror may fail here, unless it `alone` may know where the run stands."""
        try:
            self.patient(self._opening_s if self.required else SEARCH_S if alone else FIND_S)
            yield
        except (UserError, PeerLost) as error:
            if self.required or alone:
                raise
            self._fail(str(error))

    def _put_aside(self) -> None:
        """What an earlier attempt on this machine left, and others have gone on without."""
        if any((self.folder / name).exists() for name in ("checkpoints", FILE)):
            aside = self.folder / SUPERSEDED
            shutil.rmtree(aside, ignore_errors=True)
            put_aside(self.folder, OF_RUN, aside)
            self.log.info(f"{self.address} went on elsewhere: what this machine had of it was moved to {aside}")

    # While training -------------------------------------------------------------------------------------------

    def upload(self, path: Path | None, *, timeout_s: float) -> None:
        """Copy what has changed beside the copies, and then the copy `path`: a resumed run does not repeat saved steps.

        Raises UserError where the place refuses, and PeerLost where it does not answer within `timeout_s`, or where
        another attempt owns the run by now. The copy stays here in any case.
        """
        lease = self.patient(timeout_s)._claim()
        lease.check()
        with uploading(path):
            self.upload_files(self.folder)
            if path is not None and not self.holds(path, run=self.run):
                self.upload_copy(path, run=self.run, keep=self.keep, check=lease.check)
                self.log.debug(f"{self.called} has {path.name}")

    def _claim(self) -> StoreLease:
        """Own what this attempt writes at a mirror, by the number that was free at the opening. Raises UserError and
        PeerLost where the run has gone on there without this attempt."""
        lease = self._lease = self._lease or StoreLease(self.place, self._folder_lease.attempt)
        if self.number:
            return lease
        lease.place = self.place
        if not self._free:  # the mirror did not answer then
            number = highest_number(self.place.names()) + 1
            there, here = self.lineage(), Lineage.read(self.folder)
            if there and here and there.run == here.run and not here.goes_on_from(there):
                raise PeerLost(f"another attempt has gone on with the run on {self.address}")
            self._free = number
        lease.claim(self._free)
        self.number = lease.number
        return lease

    def is_ours(self) -> bool:
        """Whether no other attempt has been seen to take the run over, here or there. Asks no store."""
        return self._folder_lease.is_ours() and (self._lease is None or self._lease.is_ours())

    def check(self) -> None:
        """Raises PeerLost where `is_ours` is not so."""
        self._folder_lease.check()
        if self._lease is not None and not self._lease.is_ours():
            self._lease.check()

    def finish(self, *, stopped: bool) -> None:
        """Copy the files a last time, and the newest copy if it is not there. Raises as `upload` if it is required.

        A mirror is waited for for a while, and what is not there then is said.
        """
        if self.required:
            self.upload(None, timeout_s=self._save_s)
        if not self._begun:
            return
        patience_s = UPLOAD_STOP_S if stopped else min(UPLOAD_END_S, self._save_s / 2)
        self._over = True
        self.copy(None)  # the files as they are in the end
        self._mirroring.join(patience_s)
        if self._newest is not None and self._newest is not self._has:
            why = f": {self._failing}" if self._failing else f" {patience_s:.0f} s after the end"
            self.log.warning(f"the newest checkpoint, {self._newest.name}, is not on {self.called}{why}")

    # A mirror -------------------------------------------------------------------------------------------------

    def copy(self, path: Path | None) -> None:
        """Copy the files, and this copy if it is given, in the background; the newest one where that is busy."""
        self._begun, self._newest = True, path or self._newest
        self._mirroring.start(self._mirror)

    def _mirror(self) -> None:
        """What the mirror lacks of the newest. Where that fails the next save tries again."""
        # `is`: the same step may have been saved again meanwhile
        path = self._newest if self._newest is not self._has else None
        try:
            size = sum(file.stat().st_size for file in path.iterdir()) if path is not None else 0
            self.upload(path, timeout_s=UPLOAD_STOP_S if self._over else MIRROR_S + size / MIRROR_BYTES_PER_S)
        except Exception as error:  # a mirror must not end the training
            if path is None or path.exists():  # else it was removed: a newer one was published, and is wanted
                self._fail(str(error) or type(error).__name__)
            return
        self._has = path or self._has
        if self._failing:
            self._failing = ""
            self.log.info(f"{self.called} is back")

    def _fail(self, text: str) -> None:
        """One line, until it is back."""
        if not self._failing:
            self.log.warning(f"the mirror fails, the training goes on: {text}")
        self._failing = text
