"""A run at an address, or in another folder: its copies, and what `metrics.jsonl` and the other files say of it.

    lease/00000007.json
    00000007/run.json config.yaml result.json metrics.jsonl logs/ tensorboard/
    00000007/checkpoints/<id of the run>/step-00001200-5f0c9a417be2/... manifest.json

All that an attempt writes lies below its number in `rankup.places.lease`: an owner that was frozen, and taken for dead,
overwrites its own objects alone. Readers begin at the highest number. A copy is there once its manifest is, which is
written last. The folder has the digest of the manifest in its name, and the manifest those of the files: two uploads
never mix, and a manifest that is cut, old or in the wrong place does not pass.

A run has such a second place with `--run-dir s3://...`, which is required, or with `--mirror DIR_OR_URL`, which may
fail. It works in a folder of this machine, and what is published there is copied.
"""

import contextlib
import hashlib
import logging
import math
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rankup.errors import PeerLost, UserError, disk_error
from rankup.places import lease as leases
from rankup.places.lease import FILE, RESULT, RUN_ID, Lease, Lineage, StoreLease, folder_of, highest_number, number_of
from rankup.places.place import Place
from rankup.state.copies import MANIFEST, STAGING, STATE, find_problem, list_copies, looks_whole, uploading
from rankup.state.saver import Options, Writing
from rankup.timing import FIND_S, MIRROR_BYTES_PER_S, MIRROR_S, SEARCH_S, UPLOAD_END_S, UPLOAD_STOP_S

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{12})")
INSIDE = re.compile(r"(\w[\w.-]*/)?\.?\w[\w.-]*")  # no name may lead out of the copy's folder
FILES = (FILE, "config.yaml", RESULT, "metrics.jsonl", "logs/rank-0.log", "tracker/sent.json")  # and TENSORBOARD
TENSORBOARD = "tensorboard"
SUPERSEDED = "superseded"
SHARE = 0.9  # of a deadline: ours has to come before the watchdog's, which does not know the place


@dataclass(frozen=True, slots=True, order=True)
class Stored:
    """A copy that has a manifest, in the order of what a run goes on from: the newest is the largest."""

    number: int
    step: int
    run: str
    name: str

    @property
    def inside(self) -> str:
        """Its folder, below its owner's number."""
        return f"checkpoints/{self.run}/{self.name}"

    @property
    def folder(self) -> str:
        return f"{folder_of(self.number)}/{self.inside}"


class StoredRun:
    """One run at an address. One thread at a time uses it, rank 0's alone."""

    def __init__(self, place: Place, *, number: int = 0) -> None:
        """`place`: the run's own, `s3://bucket/runs/NAME`. `number`: the writer's, see `rankup.places.lease`."""
        self.place, self.number = place, number
        self._uploaded: dict[str, tuple[int, int]] = {}  # a file's size and time when it was uploaded last
        self._damaged: set[str] = set()

    @property
    def _own(self) -> Place:
        return self.place.below(folder_of(self.number))

    # Writing --------------------------------------------------------------------------------------------------

    def upload_copy(self, path: Path, *, run: str, keep: int, check: Callable[[], None] = lambda: None) -> None:
        """Copy the folder `path` of the run with that id, then remove all but the `keep` newest.

        `check` raises where another attempt owns the run by now. It is called before the copy appears, and again before
        others are removed. Raises as `Place` does. A kill at any point leaves the earlier copies, and at most objects
        that no manifest names, which a later upload removes.
        """
        new, own = self._stored(path, run), self._own
        there = own.names(new.inside)
        files = {f"{new.inside}/{file.name}": file for file in sorted(path.iterdir()) if file.name != MANIFEST}
        sizes = {name: file.stat().st_size for name, file in files.items()}
        own.upload({name: file for name, file in files.items() if there.get(name) != sizes[name]})
        manifest = (path / MANIFEST).read_bytes()
        if self._stored(path, run) != new:  # that step was saved again, and what was read may be of both
            return
        there = own.names(new.inside)
        for name, size in sizes.items():  # a store that has lost what it took must not get a manifest
            if there.get(name) != size:
                raise UserError(f"{own.url} must keep what is written, got {there.get(name)} bytes of {name}.")
        check()
        own.write(f"{new.inside}/{MANIFEST}", manifest)
        check()
        self._remove_old(new, keep)

    def holds(self, path: Path, *, run: str) -> bool:
        """Whether this very copy is there already, whoever wrote it."""
        name = self._stored(path, run).name
        return any(one.name == name for one in self.copies(run))

    def upload_files(self, directory: Path) -> None:
        """Copy what has changed of a run directory besides its copies. Raises as `Place` does."""
        paths = [*(directory / name for name in FILES), *(directory / TENSORBOARD).rglob("*")]
        stats = {path.relative_to(directory).as_posix(): path.stat() for path in paths if path.is_file()}
        now = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
        found = {name: stat for name, stat in now.items() if self._uploaded.get(name) != stat}
        # run.json is last: with it the files of this owner are complete, and count instead of an earlier owner's
        for last in (False, True):
            self._own.upload({name: directory / name for name in found if (name == FILE) == last})
        self._uploaded |= found

    def _stored(self, path: Path, run: str) -> Stored:
        name = path.name.partition(".")[0]  # `.replaced`, after a kill between two renames
        digest = _digest((path / MANIFEST).read_bytes())
        return Stored(self.number, int(name.removeprefix("step-")), run, f"{name}-{digest}")

    def _remove_old(self, new: Stored, keep: int) -> None:
        """Remove all copies of the run but the `keep` newest, their manifests first, and the files of earlier owners,
        which `upload_files` has written again. Nothing of a later owner is touched. Those that `fetch` found damaged
        don't count."""
        names = [name for name in self.place.names() if 0 < number_of(name) <= self.number]
        whole = sorted((one for one in _copies(names) if one.run == new.run and one != new), reverse=True)
        kept = {new.folder, *[one.folder for one in whole if one.folder not in self._damaged][: keep - 1]}
        doomed = [name for name in names if f"/checkpoints/{new.run}/" in name
                  and "/".join(name.split("/")[:4]) not in kept]
        self.place.remove(name for name in doomed if name.endswith(f"/{MANIFEST}"))
        # The files of an earlier owner stay with its copies, of this run or of one that --fresh has put aside
        stay = {number_of(name) for name in names if "/checkpoints/" in name and name not in doomed} | {self.number}
        others = [name for name in names if "/checkpoints/" not in name and number_of(name) not in stay]
        self.place.remove([*(name for name in doomed if not name.endswith(f"/{MANIFEST}")), *others])

    # Reading --------------------------------------------------------------------------------------------------

    def lineage(self) -> Lineage | None:
        """The run that is there now, None where there is none. Raises UserError where that can't be told."""
        return self._newest_run(self.place.names())[1]

    def _newest_run(self, names: Iterable[str]) -> tuple[int, Lineage | None]:
        """The last owner that has written a whole run.json, and what that says."""
        for number in range(highest_number(names), 0, -1):
            name = f"{folder_of(number)}/{FILE}"
            if name in names and (found := Lineage.of(self.place.read_json(name))):
                return number, found
        if runs := sorted({one.run for one in _copies(names)}):
            raise UserError(
                f"{self.place.url} must say in run.json which run it holds, got none, and checkpoints of "
                f"{', '.join(runs)}. Put run.json back from a copy, or set another --name."
            )
        return 0, None

    def copies(self, run: str) -> list[Stored]:
        """The copies of that run, the newest first."""
        return sorted((one for one in _copies(self.place.names()) if one.run == run), reverse=True)

    def fetch(self, folder: str, directory: Path) -> tuple[Path, str]:
        """Copy the folder of a copy. Returns its path in `directory`, where it is verified, and what is wrong with it.
        Raises as `Place` does, and UserError where the disk here is full."""
        name = folder.rpartition("/")[2]
        named = NAME.fullmatch(name)
        target = directory / (name.rpartition("-")[0] if named else name)
        manifest = self.place.read(f"{folder}/{MANIFEST}")
        problem = "" if manifest is not None else f"{MANIFEST} is missing"
        if manifest is not None and named and named[2] != _digest(manifest):
            problem = f"{MANIFEST} does not match the digest in the folder's name"
        staging = directory / f"{STAGING}{secrets.token_hex(4)}"
        try:
            there = target / MANIFEST
            if not problem and not (there.exists() and there.read_bytes() == manifest and not find_problem(target)):
                fetched = staging / target.name  # its name says the step, which is verified too
                for file in self.place.names(folder):
                    if INSIDE.fullmatch(inside := file.removeprefix(f"{folder}/")):
                        self.place.download(file, fetched / inside)
                if not (problem := find_problem(fetched)):
                    shutil.rmtree(target, ignore_errors=True)  # damaged, or another one of this step
                    fetched.rename(target)
        except OSError as error:
            raise disk_error("checkpoint", directory, error) from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if problem:
            self._damaged.add(folder)
        return target, problem

    def fetch_files(self, directory: Path) -> None:
        """Copy everything besides copies into `directory`. Raises as `Place` does, and UserError."""
        names = self.place.names()
        newest, _ = self._newest_run(names)
        try:
            for name in names:
                inside = name.partition("/")[2]
                # No name may lead elsewhere
                wanted = inside in FILES or (inside.startswith(f"{TENSORBOARD}/") and ".." not in inside)
                if wanted and 0 < number_of(name) == newest:
                    self.place.download(name, directory / inside)
        except OSError as error:
            raise disk_error("copy of the run", directory, error) from None


class SecondPlace(StoredRun):
    """The second place of the run in `folder`. Rank 0 only.

    Where it is required, a save that is not copied is an error. To a mirror a thread copies, always the newest, and
    what it had no time for is left out; one that fails is one line until it is back, and the end says what is missing.
    """

    def __init__(
        self, url: str, folder: Path, lease: Lease, log: logging.Logger, options: Options, *, required: bool
    ) -> None:
        """`url`: of all runs there. `lease`: of `folder`, which is held already."""
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
        self._missing: Path | None = None  # the newest copy, while a mirror lacks it
        self._begun = False
        self._failing = ""  # what was said of a mirror that fails

    def patient(self, timeout_s: float) -> Self:
        """This, with so much patience from now on."""
        self.place = self.place.within(SHARE * timeout_s)
        return self

    # At opening -----------------------------------------------------------------------------------------------

    def adopt(self, stack: contextlib.ExitStack, *, nothing_here: bool, wanted: Callable[[Lineage], bool]) -> None:
        """Own the place until `stack` ends if it is required, and take the run that is there where the folder is behind
        it, or has `nothing_here`: neither a run nor a copy. `wanted`: whether a mirror's run may be gone on with.

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
                # What others have gone on without. After an attempt that could not fetch the run nothing is here,
                # and what it put aside stays
                aside = self.folder / SUPERSEDED
                if any((self.folder / name).exists() for name in ("checkpoints", FILE)):
                    shutil.rmtree(aside, ignore_errors=True)
                    leases.put_aside(self.folder, leases.OF_RUN, aside)
                    self.log.info(f"{self.address} went on elsewhere: what this machine had of it was moved to {aside}")
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

    # While training -------------------------------------------------------------------------------------------

    def upload(self, path: Path | None, *, timeout_s: float) -> None:
        """Copy what has changed beside the copies, and then the copy `path`: a resumed run does not repeat saved steps.

        Raises UserError where the place refuses, and PeerLost where it does not answer in time or has a later owner.
        """
        lease = self.patient(timeout_s)._claim()
        lease.check()
        with uploading(path):
            self.upload_files(self.folder)
            if path is not None and not self.holds(path, run=self.run):
                self.upload_copy(path, run=self.run, keep=self.keep, check=lease.check)

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
        """Copy the files a last time, and the newest copy if it is not there. A mirror is waited for for a while."""
        if self.required:
            self.upload(None, timeout_s=self._save_s)
        if not self._begun:
            return
        patience_s = UPLOAD_STOP_S if stopped else min(UPLOAD_END_S, self._save_s / 2)
        self._mirroring.start(lambda: self._mirror(UPLOAD_STOP_S))  # the files as they are in the end
        self._mirroring.join(patience_s)
        if self._missing is not None:
            why = f": {self._failing}" if self._failing else f" {patience_s:.0f} s after the end"
            self.log.warning(f"the newest checkpoint, {self._missing.name}, is not on {self.called}{why}")

    # A mirror -------------------------------------------------------------------------------------------------

    def copy(self, path: Path | None) -> None:
        """Copy the files, and this copy if it is given, in the background; the newest one where that is busy."""
        self._begun, self._missing = True, path or self._missing
        self._mirroring.start(self._mirror)

    def _mirror(self, timeout_s: float = 0.0) -> None:
        """What the mirror lacks of the newest. `timeout_s`: 0 for as long as its bytes may take."""
        path = self._missing
        try:
            size = sum(file.stat().st_size for file in path.iterdir()) if path is not None else 0
            self.upload(path, timeout_s=timeout_s or MIRROR_S + size / MIRROR_BYTES_PER_S)
        except Exception as error:  # a mirror must not end the training
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


def _copies(names: Iterable[str]) -> Iterator[Stored]:
    for name in names:
        parts = name.split("/")
        if (
            len(parts) == 5 and number_of(name) and parts[1] == "checkpoints" and RUN_ID.fullmatch(parts[2])
            and (found := NAME.fullmatch(parts[3])) and parts[4] == MANIFEST
        ):
            yield Stored(number_of(name), int(found[1]), parts[2], parts[3])


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:12]
