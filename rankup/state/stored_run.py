"""A run at an address, or in another folder: its copies, and what `metrics.jsonl` and the other files say of it.

    lease/00000007.json
    00000007/run.json config.yaml result.json metrics.jsonl logs/ tensorboard/
    00000007/checkpoints/<id of the run>/step-00001200-5f0c9a417be2/... manifest.json

All that an attempt writes lies below its number in `rankup.places.lease`: an owner that was frozen, and taken for dead,
overwrites its own objects alone. Readers begin at the highest number. A copy is there once its manifest is, which is
written last. The folder has the digest of the manifest in its name, and the manifest those of the files: two uploads
never mix, and a manifest that is cut, old or in the wrong place does not pass.
"""

import contextlib
import hashlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rankup.errors import UserError, disk_error
from rankup.places.files import cache_roots
from rankup.places.lease import FILE, RESULT, Lineage, folder_of, number_of
from rankup.places.place import Place
from rankup.state.copies import MANIFEST, STAGING, Check, looks_whole, no_check, step_of
from rankup.state.reading import Copy, load, load_newest, newest_whole, read
from rankup.urls import is_url

NAME = re.compile(r"(step-\d{8,})-([0-9a-f]{12})")
KEY = re.compile(r"(\d{8,})/checkpoints/([\w-]+)/(step-(\d{8,})-[0-9a-f]{12})/manifest\.json")
INSIDE = re.compile(r"(\w[\w.-]*/)?\.?\w[\w.-]*")  # no name may lead out of the copy's folder
FILES = (FILE, "config.yaml", RESULT, "metrics.jsonl", "logs/rank-0.log", "tracker/sent.json")  # and TENSORBOARD
TENSORBOARD = "tensorboard"


@dataclass(frozen=True, slots=True, order=True)
class Stored:
    """A copy that has a manifest, in the order of what a run goes on from: the newest is the largest."""

    number: int
    step: int
    run: str
    name: str

    @property
    def folder(self) -> str:
        return f"{folder_of(self.number)}/checkpoints/{self.run}/{self.name}"


class StoredRun:
    """One run at an address. One thread at a time uses it, rank 0's alone. All methods raise as `Place` does."""

    def __init__(self, place: Place, *, number: int = 0) -> None:
        """`place`: the run's own, `s3://bucket/runs/NAME`. `number`: the writer's, see `rankup.places.lease`."""
        self.place, self.number = place, number
        self._uploaded: dict[str, tuple[int, int]] = {}  # a file's size and time when it was uploaded last
        self._damaged: set[str] = set()

    # Writing --------------------------------------------------------------------------------------------------

    def upload_copy(self, path: Path, *, run: str, keep: int, check: Callable[[], None] = lambda: None) -> None:
        """Copy the folder `path` of the run with that id, unless this very copy is there already, whoever wrote it, and
        then remove all but the `keep` newest. `check` raises where another attempt owns the run by now.

        A kill at any point leaves the earlier copies, and at most objects that no manifest names, which a later upload
        removes.
        """
        new, names = self._stored(path, run), self.place.names()
        if any(one.name == new.name for one in _copies(names)):
            return
        files = {f"{new.folder}/{file.name}": file for file in sorted(path.iterdir()) if file.name != MANIFEST}
        sizes = {name: file.stat().st_size for name, file in files.items()}
        self.place.upload({name: file for name, file in files.items() if names.get(name) != sizes[name]})
        manifest = (path / MANIFEST).read_bytes()
        if self._stored(path, run) != new:  # that step was saved again, and what was read may be of both
            return
        there = self.place.names(new.folder)
        for name, size in sizes.items():  # a store that has lost what it took must not get a manifest
            if there.get(name) != size:
                raise UserError(f"{self.place.url} must keep what is written, got {there.get(name)} bytes of {name}.")
        check()
        self.place.write(f"{new.folder}/{MANIFEST}", manifest)
        check()
        self._remove_old(new, keep)

    def upload_files(self, directory: Path) -> None:
        """Copy what has changed of a run directory besides its copies."""
        paths = [*(directory / name for name in FILES), *(directory / TENSORBOARD).rglob("*")]
        stats = {path.relative_to(directory).as_posix(): path.stat() for path in paths if path.is_file()}
        now = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
        found = {name: stat for name, stat in now.items() if self._uploaded.get(name) != stat}
        # run.json is last: with it the files of this owner are complete, and count instead of an earlier owner's
        for last in (False, True):
            own = self.place.below(folder_of(self.number))
            own.upload({name: directory / name for name in found if (name == FILE) == last})
        self._uploaded |= found

    def _stored(self, path: Path, run: str) -> Stored:
        name = path.name.partition(".")[0]  # `.replaced`, after a kill between two renames
        return Stored(self.number, step_of(path), run, f"{name}-{_digest((path / MANIFEST).read_bytes())}")

    def _remove_old(self, new: Stored, keep: int) -> None:
        """Remove all copies of the run but the `keep` newest that `fetch` did not find damaged, their manifests first,
        and the files of earlier owners, which `upload_files` has written again. Nothing of a later owner is touched."""
        every = [name for name in self.place.names() if not name.startswith("lease/")]
        names = [name for name in every if 0 < number_of(name) <= self.number]
        whole = sorted((one for one in _copies(names) if one.run == new.run and one != new), reverse=True)
        kept = {new.folder, *[one.folder for one in whole if one.folder not in self._damaged][: keep - 1]}
        doomed = [name for name in names if f"/checkpoints/{new.run}/" in name
                  and "/".join(name.split("/")[:4]) not in kept]
        # The files of an earlier owner stay with its copies, of this run or of one that --fresh has put aside
        stay = {number_of(name) for name in names if "/checkpoints/" in name and name not in doomed} | {self.number}
        doomed += [name for name in names if "/checkpoints/" not in name and number_of(name) not in stay]
        for first in (True, False):
            self.place.remove(name for name in doomed if name.endswith(f"/{MANIFEST}") == first)

    # Reading --------------------------------------------------------------------------------------------------

    def newest_run(self) -> tuple[int, Lineage | None]:
        """The number of the last owner that has written a whole run.json, and what that says; 0 and None where there is
        no run. Raises UserError where that can't be told."""
        names = self.place.names()
        for number in range(max(map(number_of, names), default=0), 0, -1):
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

    def fetch(self, folder: str, directory: Path, check: Check = no_check) -> tuple[Copy | None, str]:
        """Copy the folder of a copy into `directory`, unless it is there. Returns it verified, or what is wrong with
        it. Raises UserError where the disk here is full, or `check` refuses it."""
        name = folder.rpartition("/")[2]
        named = NAME.fullmatch(name)
        target = directory / (named[1] if named else name)
        manifest = self.place.read(f"{folder}/{MANIFEST}")
        problem = f"{MANIFEST} is missing" if manifest is None else ""
        if manifest is not None and named and named[2] != _digest(manifest):
            problem = f"{MANIFEST} does not match the digest in the folder's name"
        staging, copy = directory / f"{STAGING}{secrets.token_hex(4)}", None
        try:
            if not problem and looks_whole(target) and (target / MANIFEST).read_bytes() == manifest:
                copy, _ = read(target, check)
            if not problem and copy is None:
                fetched = staging / target.name  # its name says the step, which is verified too
                for file in self.place.names(folder):
                    if INSIDE.fullmatch(inside := file.removeprefix(f"{folder}/")):
                        self.place.download(file, fetched / inside)
                copy, problem = read(fetched, check)
                if copy is not None:
                    shutil.rmtree(target, ignore_errors=True)  # damaged, or another one of this step
                    copy = replace(copy, path=fetched.rename(target))
        except OSError as error:
            raise disk_error("checkpoint", directory, error) from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if problem:
            self._damaged.add(folder)
        return copy, problem

    def fetch_newest(self, directory: Path, *, run: str) -> Path | None:
        """Copy the newest whole copy of that run into `directory`, and return its path there; None where there is none
        at all. Warns of those passed over, and raises UserError where all are damaged."""
        each = ((f"checkpoint {one.name}", partial(self.fetch, one.folder, directory)) for one in self.copies(run))
        found = newest_whole(self.place.url, each, self.place.warn)
        return found.path if found else None

    def fetch_files(self, number: int, directory: Path) -> None:
        """Copy everything besides copies that this owner has written into `directory`. Raises UserError where the disk
        here is full."""
        own = self.place.below(folder_of(number))
        try:
            for name in own.names():
                # No name may lead elsewhere
                if name in FILES or (name.startswith(f"{TENSORBOARD}/") and ".." not in name):
                    own.download(name, directory / name)
        except OSError as error:
            raise disk_error("copy of the run", directory, error) from None


def _copies(names: Iterable[str]) -> Iterator[Stored]:
    for key in filter(None, map(KEY.fullmatch, names)):
        yield Stored(int(key[1]), int(key[4]), key[2], key[3])


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:12]


# For other commands --------------------------------------------------------------------------------------------------


def find_copy(
    place: str, run_dir: Path, *, warn: Callable[[str], None], check: Check = no_check, timeout_s: float = 1800.0
) -> Copy:
    """The copy at `place`, a folder or an address, or the newest good one of the run in `run_dir` if it is empty, in
    plain form. Raises UserError, and PeerLost where a store does not answer within `timeout_s`."""
    if is_url(place):
        with fetched(place, warn=warn, timeout_s=timeout_s) as path:
            return replace(load(path, check).as_plain(), path=Path(path.name))  # the folder is gone afterwards
    if place:
        return load(Path(place), check).as_plain()
    found = load_newest(run_dir / "checkpoints", warn, check)
    if found is None:
        raise UserError(f"checkpoint: {run_dir}/checkpoints must hold one, got none. Train first, or name one.")
    return found.as_plain()


@contextlib.contextmanager
def fetched(place: str, *, warn: Callable[[str], None], timeout_s: float) -> Iterator[Path]:
    """The path of `place` for the length of the block: the place itself, or a copy of what is at that address.

    The address may be of a run, whose newest checkpoint it is then, of a checkpoint's folder, or of a file. Checkpoints
    are verified. Raises UserError where there is nothing to read or the store refuses, and PeerLost where it does not
    answer within `timeout_s`.
    """
    if not is_url(place):
        yield Path(place)
        return
    folder = cache_roots()[0] / "fetched"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{folder} must be writable, got {error.strerror}. Set RANKUP_CACHE to a folder that is."
        raise UserError(text) from None
    with tempfile.TemporaryDirectory(dir=folder) as own:
        yield _fetch_any(place.rstrip("/"), Path(own), warn, timeout_s)


def _fetch_any(url: str, directory: Path, warn: Callable[[str], None], timeout_s: float) -> Path:
    stored = StoredRun(Place.open(url, warn=warn, timeout_s=timeout_s))
    above, _, name = url.rpartition("/")
    beside = StoredRun(replace(stored.place, url=above, root=stored.place.root.rpartition("/")[0]))
    if MANIFEST in stored.place.names():
        copy, problem = beside.fetch(name, directory)
        if copy is None:
            raise UserError(f"checkpoint: {url} must be a whole checkpoint, got a damaged one: {problem}.")
        return copy.path
    if run := stored.newest_run()[1]:
        if newest := stored.fetch_newest(directory, run=run.run):
            return newest
    elif beside.place.download(name, directory / name):
        return directory / name
    raise UserError(f"{url} must be a run, a checkpoint's folder or a file of weights, got nothing there.")
