"""`--mirror DIR_OR_URL`: the newest checkpoints and the files beside them on a second place, as a disk may be lost.

A thread of rank 0 copies what was published, objects first and the manifest last, and always the newest: what it had no
time for is left out. No step and no save waits for it, and a mirror that fails is one line until it is back; the end
says what is not there. `train.run.run_store` says what lies there, and confirms by digests what comes back. An attempt
that begins to copy takes the next number there: another one that still copies, from another disk, gives up.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rankup.errors import PeerLost, UserError
from train.config import Config
from train.config.urls import must_hold_no_secrets, secrets_in
from train.group.group import Group
from train.run.checkpoint import list_checkpoints, newest_good_step
from train.run.lineage import Lineage
from train.run.objects import Objects
from train.run.run_store import RunStore
from train.run.store_lease import StoreLease, highest_number

HELD = ".mirrored"  # in the run directory; who takes that over removes what a kill has left there
# How long a mirror may stand still in an upload, and when it is tried again
SILENCE_S, AGAIN_S = 300.0, 30.0
# At opening: a run that is here need not wait for a mirror. Where none is here, only the mirror knows of one
LOOK_S, SEARCH_S = 5.0, 60.0
# At the end the other ranks wait for rank 0, and a launcher that stops a job gives a minute or less
END_S, STOP_S = 60.0, 15.0


class Mirror:
    """The mirror of the run in the folder `group.run_dir`. Rank 0 only."""

    def __init__(self, config: Config, group: Group) -> None:
        self.config, self.group, self.folder = config, group, group.run_dir
        self.address = f"{config.mirror.rstrip('/')}/{self.folder.name}"
        self._news = threading.Condition()
        self._wanted: Path | None = None  # the newest checkpoint that is not there
        self._busy = self._over = False
        self._thread: threading.Thread | None = None
        self._failing = ""  # what was said of a mirror that fails
        self._store: RunStore | None = None
        self._lease: StoreLease | None = None
        self._number = 0  # the lease's, which was free at the opening

    # At opening -----------------------------------------------------------------------------------------------

    def fetch(self, here: Lineage | None, *, wanted: Callable[[Lineage], bool]) -> None:
        """Put the mirror's newest checkpoint into the run directory, where that has none as new.

        `here`: the run in the directory. Where there is none, it gets the mirror's, with its files, if it is `wanted`.
        Raises UserError and PeerLost where the mirror can't be read and nothing is here: there may be a run.
        """
        if secrets_in(self.config.mirror):  # the settings are about to be written down
            raise UserError(must_hold_no_secrets("mirror"))
        directory = self.folder / "checkpoints"
        above = newest_good_step(directory)
        try:
            store = self._open(SEARCH_S if here is None and above < 0 else LOOK_S)
            # Before the look at what is there: an attempt that copies after it takes this number, and this one can't.
            # Two attempts may note the same number: the first to copy gets it, and the other can never copy
            self._number = highest_number(store.objects) + 1
            if here is None and above < 0:
                here = self._adopt(store, wanted)
            elif here is not None:
                self._catch_up(store, here)
            if here is None:
                return
            if path := store.fetch_newest(directory, run=here.run, above=above):
                had = f"step-{above:08d} as its newest" if above >= 0 else "no good checkpoint"
                self.group.log.info(f"fetched {path.name} from the mirror {self.address}: {self.folder} had {had}")
        except (UserError, PeerLost) as error:
            if above < 0:
                raise
            self._fail(str(error))

    def _adopt(self, store: RunStore, wanted: Callable[[Lineage], bool]) -> Lineage | None:
        """The mirror's run, if there is one that is wanted; its files are here then."""
        run = store.current_run()
        here = store.lineage() or (Lineage(run, "", "", []) if run else None)  # the second: run.json was lost there
        if here is None or not wanted(here):
            return None
        store.fetch_files(self.folder)
        here.write(self.folder)
        return here

    def _catch_up(self, store: RunStore, here: Lineage) -> None:
        """Another machine may have been node 0 since: the mirror's file of the run is newer then."""
        found = store.lineage()
        if found is not None and found.run == here.run and found.number > here.number:
            found.write(self.folder)
        elif found is not None and found.run != here.run:
            self.group.log.info(f"the mirror {self.address} holds another run, whose checkpoints stay there")

    # While training -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to copy: which run this is, and the newest checkpoint where it is not there."""
        newest = next(reversed(list_checkpoints(self.folder / "checkpoints")), None)
        self._wanted, self._busy = newest, True
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def copy(self, step: int) -> None:
        """Copy the checkpoint of that step, which stands on the disk, in the background."""
        with self._news:
            self._wanted, self._busy = self.folder / "checkpoints" / f"step-{step:08d}", True
            self._news.notify_all()

    def finish(self, *, stopped: bool) -> None:
        """Wait until the newest checkpoint is there, for a while; say so if it is not. Copies the files a last time."""
        patience_s = STOP_S if stopped else min(END_S, self.config.save_timeout_s / 2)
        until_s = time.monotonic() + patience_s
        with self._news:
            # Busy from here on: the thread may not have seen yet what it was given last
            self._over, self._busy = True, self._thread is not None
            self._news.notify_all()
            while self._busy and time.monotonic() < until_s:
                self._news.wait(0.2)
            left = self._wanted
        if left is not None:
            why = f": {self._failing}" if self._failing else f" {patience_s:.0f} s after the end"
            self.group.log.warning(f"the newest checkpoint, {left.name}, is not on the mirror {self.address}{why}")

    def _work(self) -> None:
        """The thread: the files first, then whatever checkpoint is the newest, again and again."""
        first = True
        while True:
            with self._news:
                while not (first or self._wanted or self._over):
                    self._busy = False
                    self._news.notify_all()
                    self._news.wait()
                path, self._busy, over = self._wanted, True, self._over
            done = self._upload(path)
            first = False
            with self._news:
                if done and self._wanted == path:
                    self._wanted = None
                if over and (self._wanted is None or not done):
                    self._busy = False
                    self._news.notify_all()
                    return
                if not done and not self._over and self._wanted == path:
                    self._news.wait(AGAIN_S)  # until a newer one is due, or for another try

    def _upload(self, path: Path | None) -> bool:
        """Copy the files and, if there is one, a checkpoint. Whether that is done."""
        try:
            store = self._open(STOP_S if self._over else None)
            lease = self._claim(store)
            lease.check()
            with _held(path, self.folder / HELD) as held:
                store.upload_files(self.folder)
                here = Lineage.read(self.folder)
                if held is not None and here is not None:
                    if not store.holds(held, run=here.run):
                        store.upload_checkpoint(held, run=here.run, keep=self.config.keep, check_owner=lease.check)
                    self.group.log.debug(f"the mirror {self.address} has {held.name}")
        except Exception as error:  # nobody joins this thread, and a mirror must not end the training
            if path is None or path.exists():  # else it was removed: a newer one was published, and is wanted
                self._fail(str(error) or type(error).__name__)
            return False
        if self._failing:
            self._failing = ""
            self.group.log.info(f"the mirror {self.address} is back")
        return True

    def _claim(self, store: RunStore) -> StoreLease:
        """Own what this attempt writes there, by the number that was free at the opening. Raises UserError and PeerLost
        where the run has gone on there without this attempt."""
        lease = self._lease = self._lease or StoreLease(store.objects, self.folder, self.group.attempt)
        if store.owner:
            return lease
        lease.store = store.objects
        if not self._number:  # the mirror did not answer then
            number, there, here = highest_number(store.objects) + 1, store.lineage(), Lineage.read(self.folder)
            if there and here and there.run == here.run and there.number >= here.number and there != here:
                raise PeerLost(f"another attempt has gone on with the run on {self.address}")
            self._number = number
        lease.claim(self._number)
        store.owner = lease.number
        return lease

    def _open(self, timeout_s: float | None) -> RunStore:
        """The store, with so much patience; None: as long as it goes on. Raises UserError without its package."""
        if self._store is None:
            objects = Objects.open(self.config.mirror, warn=self._fail, timeout_s=0.0)
            self._store = RunStore(objects.below(self.folder.name))
        objects = self._store.objects
        self._store.objects = objects.while_moving(SILENCE_S) if timeout_s is None else objects.within(timeout_s)
        return self._store

    def _fail(self, text: str) -> None:
        """One line, until it is back."""
        with contextlib.suppress(OSError):
            if not self._failing:
                self.group.log.warning(f"the mirror fails, the training goes on: {text}")
        self._failing = text


@contextlib.contextmanager
def _held(path: Path | None, folder: Path) -> Iterator[Path | None]:
    """A second name of each file of the checkpoint `path` for the length of the block, in which it may be removed.

    `path` itself where the file system has no such names. Raises OSError where it is removed already.
    """
    if path is None:
        yield None
        return
    shutil.rmtree(folder, ignore_errors=True)
    held = folder / path.name
    try:
        try:
            shutil.copytree(path, held, copy_function=os.link)
        except (OSError, shutil.Error):
            held = path
        (held / "manifest.json").stat()
        yield held
    finally:
        shutil.rmtree(folder, ignore_errors=True)
