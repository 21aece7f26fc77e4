"""The second place of a run: a store, with `--run-dir s3://...`, which is required, or a mirror, with `--mirror
DIR_OR_URL`, which may fail. The run works in a folder of this machine, and what is published there is copied."""

import contextlib
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rankup.errors import PeerLost, UserError
from rankup.places.lease import FILE, OF_RUN, Lease, Lineage, StoreLease, number_of, put_aside
from rankup.places.place import Place
from rankup.state.copies import STATE, Check, list_copies, looks_whole, no_check, uploading
from rankup.state.reading import Copy
from rankup.state.saver import Options, Writing
from rankup.state.stored_run import StoredRun
from rankup.timing import FIND_S, MIRROR_BYTES_PER_S, MIRROR_S, SEARCH_S, UPLOAD_END_S, UPLOAD_STOP_S

SUPERSEDED = "superseded"
BEFORE_WATCHDOG = 0.9  # of a deadline: ours has to come before the watchdog's, which does not know the place


class SecondPlace(StoredRun):
    """The second place of the run in `folder`. Rank 0 only.

    A thread copies to it, always the newest. Where the place is required, `settle` raises what that failed with. A
    mirror that fails is one line until it is back, and the end says what is missing.
    """

    def __init__(
        self, url: str, folder: Path, lease: Lease, log: logging.Logger, options: Options, *, required: bool
    ) -> None:
        """`url`: of all runs there. `lease`: of `folder`, which is held already."""
        place = Place.open(url, warn=log.warning if required else self._fail).below(folder.name)
        super().__init__(place)
        self.folder, self.required, self.options, self.log = folder, required, options, log
        self.address, self.run = place.url, ""  # the id of the run that is copied
        self.called = self.address if required else f"the mirror {self.address}"
        self.lease = StoreLease(place, lease)
        self._copying = Writing("upload", math.inf)
        self._missing: Path | None = None  # the newest copy, while the place lacks it
        self._failing = ""  # what was said of a mirror that fails

    def patient(self, timeout_s: float) -> None:
        """From now on requests are tried again for so long."""
        self.place = self.lease.place = self.place.within(BEFORE_WATCHDOG * timeout_s)

    # At opening -----------------------------------------------------------------------------------------------

    def adopt(self, stack: contextlib.ExitStack, *, nothing_here: bool, wanted: Callable[[Lineage], bool]) -> None:
        """Own the place, and take the run that is there where the folder is behind it, or has `nothing_here`: neither a
        run nor a copy. A required place has one owner until `stack` ends; whoever comes last owns a mirror. `wanted`:
        whether a mirror's run may be gone on with.

        Raises UserError and PeerLost where the place is required, or where it alone may know of a run; and OSError.
        """
        with self._asking(alone=False):
            if self.required:
                stack.enter_context(self.lease)
            self._claim()
        with self._asking(alone=nothing_here):
            here, (number, there) = Lineage.read(self.folder), self.newest_run()
            if there is None:
                return
            if self.required and not (here and here.goes_on_from(there)):
                # What others have gone on without. After an attempt that could not fetch the run nothing is here,
                # and what it put aside stays
                aside = self.folder / SUPERSEDED
                if any((self.folder / name).exists() for name in ("checkpoints", FILE)):
                    shutil.rmtree(aside, ignore_errors=True)
                    put_aside(self.folder, OF_RUN, aside)
                    self.log.info(f"{self.address} went on elsewhere: what this machine had of it was moved to {aside}")
            elif not nothing_here or not wanted(there):
                if here and here.run == there.run and there.number > here.number:  # another machine was node 0 since
                    there.write(self.folder)
                return
            self.fetch_files(number, self.folder)

    def found(self) -> Iterator[list[Any]]:
        """The copies there of the run in the folder: path, step, attempt and run of each. Raises as `adopt`."""
        if run := Lineage.read(self.folder):
            with self._asking(alone=not self._whole()):
                for one in self.copies(run.run):
                    # Who wrote it. Its bytes were not checked; "" where that can't be read
                    record = self.place.read_json(f"{one.folder}/{STATE}")
                    attempt = str(record.get("attempt", "")) if record.get("run") == one.run else ""
                    yield [one.folder, one.step, attempt, one.run]

    def fetch(self, folder: str, directory: Path | None = None, check: Check = no_check) -> tuple[Copy | None, str]:
        """Copy that copy into the folder of this run. Raises as `adopt`."""
        copy, problem, whole = None, f"{self.called} fails", self._whole()
        refused: list[UserError] = []

        def look(*what: Any) -> None:
            try:
                check(*what)
            except UserError as error:
                refused.append(error)
                raise

        with self._asking(alone=not whole):
            copy, problem = super().fetch(folder, directory or self.folder / "checkpoints", look)
        if refused:  # an older one must not take its place, as where the mirror fails
            raise refused[0]
        if copy is not None:
            had = f"{whole[-1].name} as its newest" if whole else "no good checkpoint"
            self.log.info(f"fetched {copy.path.name} from {self.called}: {self.folder} had {had}")
        return copy, problem

    def _whole(self) -> list[Path]:
        """The copies in the folder that look whole. Their bytes were not checked."""
        return [path for path in list_copies(self.folder / "checkpoints") if looks_whole(path)]

    @contextlib.contextmanager
    def _asking(self, *, alone: bool) -> Iterator[None]:
        """A mirror may fail in this block, unless it is the only place that may hold the run (`alone`)."""
        opening_s = min(self.options.setup_timeout_s, self.options.save_timeout_s)
        try:
            self.patient(opening_s if self.required else SEARCH_S if alone else FIND_S)
            yield
        except (UserError, PeerLost) as error:
            if self.required or alone:
                raise
            self._fail(str(error))

    def _claim(self) -> None:
        """Take the mirror over from its earlier owner. Raises UserError where another attempt does so now."""
        if not self.lease.number:
            self.lease.claim(max(map(number_of, self.place.names()), default=0) + 1)
        self.number = self.lease.number

    # While training -------------------------------------------------------------------------------------------

    def copy(self, path: Path | None) -> None:
        """Copy what has changed beside the copies, and this copy if it is given, in the background; the newest one
        where that is busy."""
        self._missing = path or self._missing
        self._copying.start(self._copy)

    def settle(self) -> None:
        """Wait until all is there, if that is required. Raises UserError where the place refuses, and PeerLost where it
        does not answer in time or has a later owner."""
        if self.required:
            self._copying.join()
            if self._copying.failure is not None:
                raise self._copying.failure

    def upload(self, path: Path | None, *, timeout_s: float) -> None:
        """Do at once what `copy` does. Raises UserError and PeerLost, for a mirror too."""
        self.patient(timeout_s)
        if not self.lease.number:  # the mirror did not answer at the opening
            here, (_, there) = Lineage.read(self.folder), self.newest_run()
            if here and there and there.run == here.run and not here.goes_on_from(there):
                raise PeerLost(f"another attempt has gone on with the run on {self.address}")
        self._claim()
        self.lease.look()
        with uploading(path):
            self.upload_files(self.folder)  # first: a resumed run does not repeat saved steps
            if path is not None:
                self.upload_copy(path, run=self.run, keep=self.options.keep, check=self.lease.look)

    def finish(self, *, stopped: bool) -> None:
        """Copy the files a last time, and the newest copy if it is not there. A mirror is waited for for a while."""
        if self.required:
            self.copy(next(reversed(self._whole()), None))
            self.settle()
            return
        patience_s = UPLOAD_STOP_S if stopped else min(UPLOAD_END_S, self.options.save_timeout_s / 2)
        self._copying.start(lambda: self._copy(UPLOAD_STOP_S))  # the files as they are in the end
        self._copying.join(patience_s)
        if self._missing is not None:
            why = f": {self._failing}" if self._failing else f" {patience_s:.0f} s after the end"
            self.log.warning(f"the newest checkpoint, {self._missing.name}, is not on {self.called}{why}")

    def _copy(self, timeout_s: float = 0.0) -> None:
        """Upload what the place lacks: changed files, and the newest copy. `timeout_s`: of a mirror, 0 for as long as
        its bytes may take."""
        path = self._missing
        try:
            if self.required:
                timeout_s = self.options.save_timeout_s
            elif not timeout_s:
                size = sum(file.stat().st_size for file in path.iterdir()) if path is not None else 0
                timeout_s = MIRROR_S + size / MIRROR_BYTES_PER_S
            self.upload(path, timeout_s=timeout_s)
        except Exception as error:
            if self.required:
                raise
            if path is None or path.exists():  # else it was removed: a newer one was published, and is wanted
                self._fail(str(error) or type(error).__name__)
            return
        if self._missing is path:  # else a newer one, also of the same step
            self._missing = None
        if self._failing:
            self._failing = ""
            self.log.info(f"{self.called} is back")

    def _fail(self, text: str) -> None:
        """One line, until it is back."""
        if not self._failing:
            self.log.warning(f"the mirror fails, the training goes on: {text}")
        self._failing = text
