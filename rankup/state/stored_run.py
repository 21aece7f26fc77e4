"""A run at an address, or in another folder: its copies, and what `metrics.jsonl` and the other files say of it.

    lease/00000007.json
    00000007/run.json config.yaml result.json metrics.jsonl logs/ tensorboard/
    00000007/checkpoints/<id of the run>/step-00001200-5f0c9a417be2/... manifest.json

All that an attempt writes lies below its number in `rankup.places.lease`. An owner that was frozen, and taken for dead,
may wake up before any request: it writes and overwrites its own objects alone. Readers begin at the highest number.

A copy is there once its manifest is, which is written last. The folder has the digest of the manifest in its name, and
the manifest those of the files: two uploads never mix, a second upload of the same copy writes the same bytes, and a
manifest that is cut, old or in the wrong place does not pass. Nothing here trusts what it reads: a reader takes what
digests confirm, or passes it over. No torch.
"""

import contextlib
import hashlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rankup.errors import UserError, disk_error
from rankup.places.files import cache_roots
from rankup.places.lease import FILE, RESULT, RUN_ID, Lineage, folder_of, highest_number, number_of
from rankup.places.place import Place
from rankup.state.copies import MANIFEST, STAGING, find_problem, passed_over
from rankup.urls import is_url

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{12})")
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
        others are removed: whoever has taken the run over since finds the new one. What an upload that was cut off has
        left is gone on with. Raises as `Place` does. A kill at any point leaves the earlier copies, and at most objects
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
        """Remove all copies of the run but the `keep` newest whole ones, their manifests first, and the files of
        earlier owners, which `upload_files` has written again. Nothing of a later owner is touched.

        No byte is read: damage that this process has not met is not seen.
        """
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
        names = self.place.names()
        if newest := self._newest_run_file(names):
            return newest[1]
        if runs := sorted({one.run for one in _copies(names)}):
            raise UserError(
                f"{self.place.url} must say in run.json which run it holds, got none, and checkpoints of "
                f"{', '.join(runs)}. Put run.json back from a copy, or set another --name."
            )
        return None

    def copies(self, run: str) -> list[Stored]:
        """The copies of that run, the newest first."""
        return sorted((one for one in _copies(self.place.names()) if one.run == run), reverse=True)

    def fetch(self, folder: str, directory: Path) -> tuple[Path, str]:
        """Copy the folder of a copy. Returns its path in `directory`, and what is wrong with it, or "": then the path
        holds it, verified. Raises as `Place` does, and UserError where the disk here is full."""
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

    def fetch_newest(self, directory: Path, *, run: str) -> Path | None:
        """Copy the newest whole copy of that run into the folder `directory`, verified. Returns its path there.

        None where there is none at all. Warns of those passed over. Raises as `fetch`, and UserError where all are
        damaged.
        """
        damaged: dict[str, str] = {}
        found = None
        for one in self.copies(run):
            path, problem = self.fetch(one.folder, directory)
            if not problem:
                found = path
                break
            damaged[f"checkpoint {one.name}"] = problem
        passed_over(self.place.url, damaged, found, self.place.warn)
        return found

    def fetch_files(self, directory: Path) -> None:
        """Copy everything besides copies into `directory`. Raises as `Place` does, and UserError."""
        names = self.place.names()
        newest, _ = self._newest_run_file(names) or (0, None)
        try:
            for name in names:
                inside = name.partition("/")[2]
                # No name may lead elsewhere
                wanted = inside in FILES or (inside.startswith(f"{TENSORBOARD}/") and ".." not in inside)
                if wanted and 0 < number_of(name) == newest:
                    self.place.download(name, directory / inside)
        except OSError as error:
            raise disk_error("copy of the run", directory, error) from None

    def _newest_run_file(self, names: Iterable[str]) -> tuple[int, Lineage] | None:
        """The last owner that has written a whole run.json, and what that says."""
        for number in range(highest_number(names), 0, -1):
            name = f"{folder_of(number)}/{FILE}"
            if name in names and (found := Lineage.of(self.place.read_json(name))):
                return number, found
        return None


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
        path, problem = beside.fetch(name, directory)
        if problem:
            raise UserError(f"checkpoint: {url} must be a whole checkpoint, got a damaged one: {problem}.")
        return path
    if run := stored.lineage():
        if newest := stored.fetch_newest(directory, run=run.run):
            return newest
    elif beside.place.download(name, directory / name):
        return directory / name
    raise UserError(f"{url} must be a run, a checkpoint's folder or a file of weights, got nothing there.")


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
