"""A run at an address: its copies, and what `metrics.jsonl` and the other files say of it.

    lease/00000007.json
    00000007/run.json config.yaml status.json result.json metrics.jsonl logs/ tensorboard/
    00000007/checkpoints/<id of the run>/step-00001200-5f0c9a417be2/... manifest.json

All that an attempt writes lies below its number in `rankup.places.lease`. An owner that was frozen, and taken for dead,
may wake up before any request: it writes and overwrites its own objects alone. Readers begin at the highest number.

A copy is there once its manifest is, which is written last. The folder has the digest of the manifest in its name, and
the manifest those of the files: two uploads never mix, a second upload of the same copy writes the same bytes, and a
manifest that is cut, old or in the wrong place does not pass. Nothing here trusts what it reads: a reader takes what
digests confirm, or passes it over.
"""

import hashlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankup.errors import UserError, disk_error
from rankup.places.lease import folder_of, highest_number, number_of
from rankup.places.lineage import FILE as RUN_FILE
from rankup.places.lineage import RUN_ID, Lineage
from rankup.places.place import Place

MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{8,})-[0-9a-f]{12}")
INSIDE = re.compile(r"(\w[\w.-]*/)?\.?\w[\w.-]*")  # no name may lead out of the copy's folder
STAGING = ".writing-"  # what an owner is about to give a name to: the next one removes it
FILES = (RUN_FILE, "config.yaml", "status.json", "result.json", "metrics.jsonl", "logs/rank-0.log", "tracker/sent.json")
FOLDERS = ("tensorboard", "before-*")  # the second: what --fresh has put aside
FindProblem = Callable[[Path], str]


class AllDamaged(UserError):
    """There are copies, and none is whole."""

    def __init__(self, place: Path | str, damaged: Mapping[str, str]) -> None:
        """`damaged`: what is wrong with each, by its name."""
        super().__init__(
            f"checkpoint: {place} must hold a whole checkpoint, got only damaged ones: "
            f"{'; '.join(f'{name}: {why}' for name, why in damaged.items())}. Put one back from a copy, or set --fresh "
            "to start anew, which keeps them aside."
        )


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

    def __init__(self, place: Place, find_problem: FindProblem, *, number: int = 0) -> None:
        """`place`: the run's own, `s3://bucket/runs/NAME`. `find_problem`: why the copy in a folder can't be used, or
        "". `number`: the writer's, see `rankup.places.lease`."""
        self.place, self.number, self._find_problem = place, number, find_problem
        self._uploaded: dict[str, tuple[int, int]] = {}  # a file's size and time when it was uploaded last
        self._damaged: set[Stored] = set()

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
        files = {f"{new.inside}/{file.relative_to(path).as_posix()}": file for file in sorted(path.rglob("*"))
                 if file.is_file() and file != path / MANIFEST}
        sizes = {name: file.stat().st_size for name, file in files.items()}
        own.upload({name: file for name, file in files.items() if there.get(name) != sizes[name]})
        there = own.names(new.inside)
        for name, size in sizes.items():  # a store that has lost what it took must not get a manifest
            if there.get(name) != size:
                raise UserError(f"{own.url} must keep what is written, got {there.get(name)} bytes of {name}.")
        check()
        own.write(f"{new.inside}/{MANIFEST}", (path / MANIFEST).read_bytes())
        check()
        self._remove_old(new, keep)

    def holds(self, path: Path, *, run: str) -> bool:
        """Whether this very copy is there already, whoever wrote it."""
        new = self._stored(path, run)
        return any(one.name == new.name and one.run == run for one in _copies(self.place.names()))

    def upload_files(self, directory: Path) -> None:
        """Copy what has changed of a run directory besides its copies. Raises as `Place` does."""
        found = {}
        for name in _small_files(directory):
            stat = (directory / name).stat()
            if self._uploaded.get(name) != (stat.st_size, stat.st_mtime_ns):
                found[name] = (stat.st_size, stat.st_mtime_ns)
        own = self._own
        own.upload({name: directory / name for name in found if name != RUN_FILE})
        # Last: with it the files of this owner are complete, and count instead of an earlier owner's
        own.upload({name: directory / name for name in found if name == RUN_FILE})
        self._uploaded |= found

    def _stored(self, path: Path, run: str) -> Stored:
        digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()[:12]
        name = path.name.partition(".")[0]  # `.replaced`, after a kill between two renames
        return Stored(self.number, int(name.removeprefix("step-")), run, f"{name}-{digest}")

    def _remove_old(self, new: Stored, keep: int) -> None:
        """Remove all copies of the run but the `keep` newest whole ones, their manifests first, and the files of
        earlier owners, which `upload_files` has written again. Nothing of a later owner is touched.

        No byte is read: damage that this process has not met is not seen.
        """
        names = [name for name in self.place.names() if 0 < number_of(name) <= self.number]
        whole = sorted((one for one in _copies(names) if one.run == new.run and one not in self._damaged), reverse=True)
        kept = {new.folder, *[one.folder for one in whole if one != new][: keep - 1]}
        doomed = [name for name in names if f"/checkpoints/{new.run}/" in name and _folder_in(name) not in kept]
        self.place.remove(name for name in doomed if name.endswith(f"/{MANIFEST}"))
        # The files of an earlier owner stay with its copies, of this run or of one that --fresh has put aside
        stay = {number_of(name) for name in names if "/checkpoints/" in name and name not in doomed} | {self.number}
        others = [name for name in names if "/checkpoints/" not in name and number_of(name) not in stay]
        self.place.remove([*(name for name in doomed if not name.endswith(f"/{MANIFEST}")), *others])

    # Reading --------------------------------------------------------------------------------------------------

    def lineage(self) -> Lineage | None:
        """The run that is there now, by run.json or, where that is lost, by its copies; None where there is none.

        Raises UserError where that can't be told.
        """
        names = self.place.names()
        for number in _numbers(names):
            if (f"{folder_of(number)}/{RUN_FILE}" in names) and (found := self._lineage_of(number)):
                return found
        runs = sorted({one.run for one in _copies(names)})
        if len(runs) > 1:
            raise UserError(
                f"{self.place.url} must say in run.json which run it holds, got none, and checkpoints of {len(runs)} "
                f"runs: {', '.join(runs)}. Put run.json back from a copy, or remove the others, or set another --name."
            )
        if not runs and any(name.startswith("checkpoints/") for name in names):
            raise UserError(f"{self.place.url} must hold a run of this version, got another's. Set another --name.")
        return Lineage(runs[0], "", "", []) if runs else None

    def fetch_newest(self, directory: Path, *, run: str, above: int = -1) -> Path | None:
        """Copy the newest whole copy of that run into the folder `directory`, verified. Returns its path there.

        None where there is none of a later step than `above`. Warns of those passed over. Raises as `Place` does, and
        AllDamaged where all are, unless an earlier one (`above` >= 0) is at hand.
        """
        damaged: dict[str, str] = {}
        for one in sorted(_copies(self.place.names()), reverse=True):
            if one.run != run:
                continue
            if one.step <= above:
                break
            path, problem = self._fetch(one, directory)
            if not problem:
                for name, why in damaged.items():
                    self.place.warn(f"checkpoint {name} of {self.place.url} was passed over: {why}")
                return path
            damaged[one.name] = problem
            self._damaged.add(one)
        if damaged and above < 0:
            raise AllDamaged(self.place.url, damaged)
        return None

    def fetch_files(self, directory: Path) -> None:
        """Copy everything besides copies into `directory`. Raises as `Place` does, and UserError."""
        names = self.place.names()
        last = next((n for n in _numbers(names) if f"{folder_of(n)}/{RUN_FILE}" in names and self._lineage_of(n)), None)
        try:
            for name in names:
                inside = name.partition("/")[2]
                if number_of(name) == last and _is_file(inside):
                    self.place.download(name, directory / inside)
        except OSError as error:
            raise disk_error("copy of the run", directory, error) from None

    def _lineage_of(self, number: int) -> Lineage | None:
        return Lineage.of(self.place.read_json(f"{folder_of(number)}/{RUN_FILE}"))

    def _fetch(self, one: Stored, directory: Path) -> tuple[Path, str]:
        place = self.place.below(one.folder.rpartition("/")[0])
        return fetch_copy(place, one.name, directory, self._find_problem)


def fetch_copy(place: Place, name: str, directory: Path, find_problem: FindProblem) -> tuple[Path, str]:
    """Copy the folder `name` of `place`. Returns its path in `directory`, and what is wrong with it, or "": then the
    path holds it, verified. Raises as `Place` does, and UserError where the disk here is full."""
    target = directory / (name.rpartition("-")[0] if NAME.fullmatch(name) else name)
    manifest = place.read(f"{name}/{MANIFEST}")
    if manifest is None:
        return target, f"{MANIFEST} is missing"
    if NAME.fullmatch(name) and name.rpartition("-")[2] != hashlib.sha256(manifest).hexdigest()[:12]:
        return target, f"{MANIFEST} does not match the digest in the folder's name"
    staging = directory / f"{STAGING}{secrets.token_hex(4)}"
    try:
        if (target / MANIFEST).exists() and (target / MANIFEST).read_bytes() == manifest and not find_problem(target):
            return target, ""
        fetched = staging / target.name  # its name says the step, which is verified too
        for file in place.names(name):
            if INSIDE.fullmatch(inside := file.removeprefix(f"{name}/")):
                place.download(file, fetched / inside)
        if problem := find_problem(fetched):
            return target, problem
        shutil.rmtree(target, ignore_errors=True)  # damaged, or another one of this step
        fetched.rename(target)
    except OSError as error:
        raise disk_error("checkpoint", directory, error) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target, ""


def fetch(address: Place, directory: Path, find_problem: FindProblem) -> Path:
    """Copy what is at an address into `directory`, and return its path there: a run's newest copy, or a file.

    `address`: of a run, of a copy's folder, or of an object. A copy is verified. Raises as `Place` does, and UserError
    where nothing is there, or nothing whole.
    """
    above, _, name = address.url.rpartition("/")
    beside = Place(above, address.fs, address.root.rpartition("/")[0], address.warn, address.patience)
    names = address.names()
    if MANIFEST in names:
        path, problem = fetch_copy(beside, name, directory, find_problem)
        if problem:
            raise UserError(f"checkpoint: {address.url} must be a whole checkpoint, got a damaged one: {problem}.")
        return path
    stored = StoredRun(address, find_problem)
    if run := stored.lineage():
        newest = stored.fetch_newest(directory, run=run.run)
        if newest is not None:
            return newest
    elif beside.download(name, directory / name):
        return directory / name
    raise UserError(f"{address.url} must be a run, a checkpoint's folder or a file of weights, got nothing there.")


def _copies(names: Iterable[str]) -> Iterator[Stored]:
    for name in names:
        parts = name.split("/")
        if (
            len(parts) == 5 and number_of(name) and parts[1] == "checkpoints" and RUN_ID.fullmatch(parts[2])
            and (found := NAME.fullmatch(parts[3])) and parts[4] == MANIFEST
        ):
            yield Stored(number_of(name), int(found[1]), parts[2], parts[3])


def _folder_in(name: str) -> str:
    """The copy's folder that the object `name` belongs to."""
    return "/".join(name.split("/")[:4])


def _numbers(names: Iterable[str]) -> Iterator[int]:
    """Whose objects there are, the last owner's number first."""
    yield from range(highest_number(names), 0, -1)


def _is_file(name: str) -> bool:
    """Whether it is one of those beside the copies, and leads nowhere else."""
    return name in FILES or (name.startswith(tuple(f.partition("*")[0] for f in FOLDERS)) and ".." not in name)


def _small_files(directory: Path) -> Iterator[str]:
    """The names of what is copied besides copies."""
    yield from (name for name in FILES if (directory / name).is_file())
    for pattern in FOLDERS:
        for path in (path for folder in directory.glob(pattern) for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(directory)
            if "checkpoints" not in name.parts:
                yield name.as_posix()
