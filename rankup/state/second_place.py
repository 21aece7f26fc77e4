"""The second place of a run, besides its folder: an object store (`--run-dir s3://...`), which is required, or a mirror
(`--mirror DIR_OR_URL`), which may fail. What is published in the folder is copied to the second place.

    lease/00000007.json
    00000007/run.json config.yaml result.json metrics.jsonl logs/ tensorboard/
    00000007/checkpoints/<id of the run>/step-00001200-5f0c9a417be2/... manifest.json

Each owner writes only below its own number (`rankup.places.lease`), so an owner that was frozen and taken for dead can
only overwrite its own objects. Readers begin at the highest number. A copy exists once its manifest exists, which is
written last. The copy's name contains the digest of the manifest, and the manifest contains the digests of the files.
Two uploads therefore never mix, and a manifest that is cut, old or in the wrong folder is refused.
"""

import contextlib
import hashlib
import logging
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rankup.errors import PeerLost, UserError, disk_errors, reason
from rankup.places.files import cache_roots
from rankup.places.lease import FILE, KEPT, RESULT, Lease, Lineage, StoreLease, folder_of, number_of, put_aside
from rankup.places.object_store import ObjectStore
from rankup.state import copies
from rankup.state.copies import MANIFEST, STATE, Damaged, list_whole, step_of, verify
from rankup.state.place import MIRROR, STORE, Candidate, Folder, Place, kept_steps
from rankup.state.reading import newest_whole
from rankup.state.saver import BackgroundTask, Options
from rankup.timing import FIND_S, UPLOAD_END_S, UPLOAD_STOP_S
from rankup.urls import is_url

KEY = re.compile(r"\d{8,}/checkpoints/([\w-]+)/step-\d{8,}-[0-9a-f]{12}/manifest\.json")
FILES = (FILE, "config.yaml", RESULT, KEPT, "metrics.jsonl", "logs/rank-0.log", "tracker/sent.json")  # and TENSORBOARD
TENSORBOARD = "tensorboard"
BEFORE_WATCHDOG = 0.9  # the share of a deadline for requests: the watchdog fails later, and can't name the place


# What a place holds, for commands too. All functions raise as `ObjectStore` does -------------------------------------


def newest_run(place: ObjectStore, names: Iterable[str]) -> tuple[int, Lineage | None]:
    """Return the number of the last owner that wrote a good run.json, and its lineage; 0 and None if there is no run.
    `names`: all names at the place."""
    for number in sorted({*map(number_of, names)} - {0}, reverse=True):  # a stranger's name may have any number
        name = f"{folder_of(number)}/{FILE}"
        if name in names and (found := Lineage.of(place.read_json(name))):
            return number, found
    if runs := sorted({_run_of(one) for one in _copies(names)}):
        raise UserError(
            f"{place.url} must say in run.json which run it holds, got no run.json, and checkpoints of "
            f"{', '.join(runs)}. Restore run.json from a backup, or set another --name."
        )
    return 0, None


def _copies(names: Iterable[str], run: str = "") -> list[str]:
    """Return the folders of the copies that have a manifest, of all runs or only of `run`, newest first."""
    found = [name.rpartition("/")[0] for name in names if (key := KEY.fullmatch(name)) and run in ("", key[1])]
    return sorted(found, key=lambda folder: (number_of(folder), step_of(Path(folder)), folder), reverse=True)


def _run_of(folder: str) -> str:
    return folder.split("/")[2]


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:12]


def _download(place: ObjectStore, stored: str, target: Path) -> None:
    """Download the copy in the folder `stored`, without verifying its files. Raises OSError, and Damaged if the digest
    in the copy's name is not that of its manifest."""
    place = place.below(stored)
    manifest = place.read(MANIFEST)
    if manifest is None:
        raise Damaged(stored, f"{MANIFEST} is missing")
    if not stored.endswith(_digest(manifest)):
        raise Damaged(stored, f"{MANIFEST} does not match the digest in the folder's name")
    for name in filter(copies.FILE.fullmatch, place.names()):
        place.download(name, target / name)


def kept_step(kept: dict[str, Any], name: str, run: str) -> int:
    """Return the step of the copy that `job.keep` has given `name` in `run`. Raises UserError."""
    if name not in kept:
        raise UserError(f"checkpoint: {run} must keep one called {name}, got {', '.join(sorted(kept)) or 'none'}.")
    return int(kept[name])


@contextlib.contextmanager
def fetched(place: str, *, timeout_s: float, name: str = "") -> Iterator[Path]:
    """Yield a local path for `place`: the path itself, or for an address a download that is removed after the block.

    The address may name a run (its newest whole checkpoint is downloaded, or that kept under `name`), a folder without
    subfolders, such as that of a checkpoint, or a file. Raises UserError if there is nothing to read or the store
    refuses, and PeerLost if it does not answer within `timeout_s`.
    """
    if not is_url(place):
        yield Path(place)
        return

    def fetch(folder: str) -> Path:
        target = own / Path(folder).name.rpartition("-")[0]
        _download(there, folder, target)
        verify(target)
        return target

    warn, folder = logging.getLogger("rankup").warning, cache_roots()[0] / "fetched"
    with contextlib.ExitStack() as stack:
        with disk_errors("RANKUP_CACHE", folder):
            folder.mkdir(parents=True, exist_ok=True)
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            there = ObjectStore.open(place, warn=warn, timeout_s=timeout_s)
            newest, names = own / there.url.rpartition("/")[2], there.names()
            number, run = newest_run(there, names)
            if run:
                found = _copies(names, run.run)
                if name:
                    step = kept_step(there.read_json(f"{folder_of(number)}/{KEPT}"), name, place)
                    found = [one for one in found if step_of(Path(one)) == step]
                each = ((f"checkpoint {Path(one).name}", partial(fetch, one)) for one in found)
                newest = newest_whole(place, each, warn) or newest
            else:
                for file in names or [""]:  # over http, a list of a file's address does not contain the file
                    if "/" not in file:
                        there.download(file, newest / file)
        if not newest.exists():
            raise UserError(f"{place} must be a run, a checkpoint's folder or a file of weights, got nothing there.")
        yield newest


class SecondPlace(Place):
    """The second place of the run in `folder`. On rank 0 a thread uploads the newest copy to it. If a required place
    fails, `settle` raises. If a mirror fails, one warning is logged until the mirror is back, and another at the end if
    the mirror lacks the newest copy."""

    def __init__(
        self, url: str, checkpoints: Folder, lease: Lease, log: logging.Logger, options: Options, *, required: bool
    ) -> None:
        """`url`: the address of all runs there. `checkpoints`: those of the run here. `lease`: the lease of the run's
        folder, which is already held."""
        self.required, self.options, self.log = required, options, log
        self.checkpoints, self.folder = checkpoints, (folder := checkpoints.path.parent)
        self._listed = list[Candidate]()
        self.place = ObjectStore.open(url, warn=log.warning if required else self._fail).below(folder.name)
        self.kind = STORE if required else MIRROR
        self.run = ""  # the id of the run that is uploaded
        self.called = self.place.url if required else f"the mirror {self.place.url}"
        self.lease = StoreLease(self.place, lease)
        self._copying = BackgroundTask("upload", math.inf)
        self._waits = False  # an upload is queued; when it begins, it takes the copy that is then the newest
        self._missing: Path | None = None  # the newest copy, while the place lacks it
        self._failing = ""  # the last failure of a mirror, "" while the mirror works
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and mtime of each file at its last upload

    def retry_for(self, timeout_s: float) -> None:
        """From now on, repeat failing requests for most of `timeout_s`."""
        self.place = self.lease.place = self.place.within(BEFORE_WATCHDOG * timeout_s)

    # At opening -----------------------------------------------------------------------------------------------

    def adopt(self, stack: contextlib.ExitStack, *, wanted: Callable[[Lineage], bool]) -> None:
        """Take ownership of the place. Fetch its run if the folder is empty, or a required place is ahead of it. List
        the place's copies of the folder's run. A required place belongs to this attempt until `stack` ends; a mirror
        belongs to the attempt that came last. `wanted`: whether this attempt may resume a run. Raises OSError; also
        UserError and PeerLost if the place is required or may be the only one that has a copy."""
        here, alone = Lineage.read(self.folder), not list_whole(self.checkpoints.path)
        nothing_here = alone and here is None
        with self._asking(alone=False):
            if self.required:
                stack.enter_context(self.lease)
            self._claim()
        with self._asking(alone=alone):
            number, there = newest_run(self.place, names := self.place.names())
            if there is None or not wanted(there):
                return
            behind = self.required and not (here and here.continues(there))
            if behind and not nothing_here:  # the run continued on another machine, without what is here
                aside = put_aside(self.folder, check=self.lease.check)
                self.log.info(f"{self.called} continued elsewhere: this machine's older files were moved to {aside}")
            if behind or nothing_here:
                self.fetch_files(number)
            elif here and here.run == there.run and there.number > here.number:  # another machine has been node 0 since
                there.write(self.folder, check=self.lease.check)
            run = Lineage.read(self.folder)
            for one in _copies(names, run.run) if run else []:
                record, words = self.place.read_json(f"{one}/{STATE}"), f"checkpoint {Path(one).name} of {self.called}"
                self._listed.append(Candidate.of(Path(one), record, kind=self.kind, words=words))

    def list(self) -> Iterable[Candidate]:
        return self._listed

    def fetch_files(self, number: int) -> None:
        """Fetch all files but copies that owner `number` has written. Raises UserError if the disk here is full."""
        own = self.place.below(folder_of(number))
        with disk_errors("copy of the run", self.folder):
            for name in sorted(own.names(), key=lambda name: name == FILE):  # run.json last: it says that all are here
                # No name may lead out of the folder
                if name in FILES or (name.startswith(f"{TENSORBOARD}/") and ".." not in name):
                    own.download(name, self.folder / name)

    @contextlib.contextmanager
    def open(self, one: Candidate) -> Iterator[Path]:
        """Raises Damaged too, and UserError if the disk here is full."""
        here = self.checkpoints
        with here.incoming(one.step) as path:
            with disk_errors("checkpoint", here.path), self._asking(alone=not list_whole(here.path)):
                _download(self.place, one.where, path)
            yield path

    @contextlib.contextmanager
    def _asking(self, *, alone: bool) -> Iterator[None]:
        """Within the block, only log that a mirror fails, unless only the mirror may hold the run (`alone`)."""
        opening_s = min(self.options.setup_timeout_s, self.options.save_timeout_s)
        try:
            self.retry_for(opening_s if self.required or alone else FIND_S)
            yield
        except Damaged:
            raise
        except (UserError, PeerLost) as error:
            if self.required or alone:
                raise
            self._fail(str(error))

    def _claim(self) -> None:
        """Take the mirror over from its earlier owner. Raises UserError if another attempt is doing the same."""
        if not self.lease.number:
            self.lease.claim(max(map(number_of, self.place.names()), default=0) + 1)

    # While training -------------------------------------------------------------------------------------------

    def upload_later(self, path: Path | None) -> None:
        """Upload changed files, and the copy `path` if given, in the background."""
        self._missing = path or self._missing
        if not self._waits:
            self._waits = True
            self._copying.start(self._copy)

    def settle(self) -> None:
        """Wait until everything is uploaded, if the place is required. Raises UserError and PeerLost."""
        if self.required:
            self._copying.join()
            if self._copying.failure is not None:
                raise self._copying.failure

    def upload(self, path: Path | None) -> None:
        """Do at once what `upload_later` does in the background. Raises UserError and PeerLost, also for a mirror."""
        self.retry_for(self.options.save_timeout_s)
        if not self.lease.number:  # the mirror did not answer when the run was opened
            here, (_, there) = Lineage.read(self.folder), newest_run(self.place, self.place.names())
            if here and there and there.run == here.run and not here.continues(there):
                raise PeerLost(f"another attempt has continued the run on {self.place.url}")
        self._claim()
        self.lease.look()
        self.checkpoints.in_use.add(path)
        try:
            self.upload_files()  # before the copy: a run that resumes from it does not write these lines again
            if path is not None:
                self.put(path)
        except FileNotFoundError as error:
            raise UserError(
                f"checkpoint: {path} must stay while it is uploaded, got {reason(error)}. The same command goes on "
                "from the newest checkpoint that is left."
            ) from None
        finally:
            self.checkpoints.in_use.discard(path)

    def upload_files(self) -> None:
        """Upload the files of the folder that have changed, without copies."""
        try:
            paths = [*(self.folder / name for name in FILES), *(self.folder / TENSORBOARD).rglob("*")]
            stats = {path.relative_to(self.folder).as_posix(): path.stat() for path in paths if path.is_file()}
            now = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
            changed = {name for name, stat in now.items() if self._uploaded.get(name) != stat}
            own = self.place.below(folder_of(self.lease.number))
            # run.json last: from then on readers take the files of this owner instead of an earlier owner's
            for names in (changed - {FILE}, changed & {FILE}):
                own.upload({name: self.folder / name for name in names})
            self._uploaded |= now
        except FileNotFoundError:  # the user has removed files meanwhile, such as those in tensorboard/: look again
            self.upload_files()

    def put(self, path: Path) -> None:
        """Upload the copy `path`, unless the place has it, and remove all copies but the `keep` newest. A kill at any
        point leaves the earlier copies, and perhaps objects without a manifest, which a later upload removes."""
        new, names = self._folder_for(path), self.place.names()
        if any(Path(one).name == Path(new).name for one in _copies(names)):
            return
        files = {f"{new}/{file.name}": file for file in path.iterdir() if file.name != MANIFEST}
        self.place.upload({name: file for name, file in files.items() if names.get(name) != file.stat().st_size})
        manifest = (path / MANIFEST).read_bytes()
        if self._folder_for(path) != new:  # the step was saved again, and the uploaded files may be a mix of both
            return
        self.lease.look()
        self.place.write(f"{new}/{MANIFEST}", manifest)
        self.lease.look()
        self._remove_old(new, names)

    def _folder_for(self, path: Path) -> str:
        name = path.name.partition(".")[0]  # a kill between two renames leaves only a copy called `.replaced`
        digest = _digest((path / MANIFEST).read_bytes())
        return f"{folder_of(self.lease.number)}/checkpoints/{self.run}/{name}-{digest}"

    def _remove_old(self, new: str, names: Iterable[str]) -> None:
        """Of `names`, remove all copies of the run but the `keep` newest, manifests first. Also remove the files of
        earlier owners, because `upload_files` has written them again. Objects of later owners are not touched."""
        number = self.lease.number
        names = [name for name in names if 0 < number_of(name) <= number and not name.startswith("lease/")]
        earlier = [one for one in _copies(names, self.run) if one != new]
        named = kept_steps(self.folder)
        kept = {new, *earlier[: self.options.keep - 1], *(one for one in earlier if step_of(Path(one)) in named)}
        # Everything of earlier runs, which --fresh put aside, stays
        others = {number_of(one) for one in _copies(names) if _run_of(one) != self.run}

        def is_old(name: str) -> bool:
            if "/checkpoints/" not in name:
                return number_of(name) not in {number, *others}
            return f"/checkpoints/{self.run}/" in name and name.rpartition("/")[0] not in kept

        old = [name for name in names if is_old(name)]
        for first in (True, False):
            self.place.remove(name for name in old if name.endswith(f"/{MANIFEST}") == first)

    def finish(self, *, stopped: bool) -> None:
        """Upload everything a last time. Wait a bounded time for a mirror."""
        # A loop that was stopped may not have noticed that its last save was published
        self.upload_later(next(reversed(list_whole(self.checkpoints.path)), None) if self.required or stopped else None)
        self.settle()
        patience_s = UPLOAD_STOP_S if stopped else min(UPLOAD_END_S, self.options.save_timeout_s / 2)
        self._copying.join(patience_s)
        if self._missing is not None:
            why = f": {self._failing}" if self._failing else f" {patience_s:.0f} s after the end"
            self.log.warning(f"the newest checkpoint, {self._missing.name}, is not on {self.called}{why}")

    def _copy(self) -> None:
        """Upload what the place lacks."""
        self._waits = False
        path = self._missing
        try:
            self.upload(path)
        except Exception as error:
            if self.required:
                raise
            if path is None or path.exists():  # otherwise a newer copy replaced it, and will be uploaded instead
                self._fail(reason(error))
            return
        if self._missing is path:  # otherwise a newer copy is missing, perhaps of the same step
            self._missing = None
        if self._failing:
            self._failing = ""
            self.log.info(f"{self.called} is back")

    def _fail(self, text: str) -> None:
        """Warn once that the mirror fails, until it is back."""
        if not self._failing:
            self.log.warning(f"the mirror fails, the training goes on: {text}")
        self._failing = text
