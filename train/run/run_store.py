"""A run in a store of objects: its checkpoints, and what `metrics.jsonl` and the other files say of it.

    lease/00000007.json
    00000007/run.json config.yaml status.json result.json metrics.jsonl logs/ tensorboard/
    00000007/checkpoints/<id of the run>/step-00001200-5f0c9a417be2/model.safetensors ... manifest.json
    00000007/newest.json

All that an attempt writes lies below its number in `train.run.store_lease`. An owner that was frozen, and taken for
dead, may wake up before any request: it writes and overwrites its own objects alone. Readers begin at the highest
number. What was written without a number counts as the lowest. `train.run.stored_checkpoint` says which checkpoints are
whole. Lists and `newest.json` are hints where to look.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rankup.errors import UserError, disk_error
from rankup.state.copies import to_json
from train.run.checkpoint import AllDamaged
from train.run.lineage import FILE as RUN_FILE
from train.run.lineage import RUN_ID, Lineage
from train.run.objects import Objects, parse
from train.run.store_lease import folder_of, highest_number, split
from train.run.stored_checkpoint import (
    MANIFEST,
    NAME,
    NO_MANIFEST,
    fetch_checkpoint,
    name_of,
    read_manifest,
    step_of,
)

NEWEST = "newest.json"
FILES = (RUN_FILE, "config.yaml", "status.json", "result.json", "metrics.jsonl", "logs/rank-0.log", "tracker/sent.json")
FOLDERS = ("tensorboard", "before-*")  # the second: what --fresh has put aside


class RunStore:
    """One run in a store. One thread at a time uses it, rank 0's alone."""

    def __init__(self, objects: Objects, *, owner: int = 0) -> None:
        """`objects`: those below the run's own address, `s3://bucket/runs/NAME`. `owner`: the number of the writer."""
        self.objects, self.owner = objects, owner
        self._uploaded: dict[str, tuple[int, int]] = {}  # a file's size and time when it was uploaded last
        # Of manifests that this process wrote or verified, by the checkpoint's folder; and the folders that are damaged
        self._entries: dict[str, dict[str, Any]] = {}
        self._damaged: set[str] = set()

    @property
    def _own(self) -> Objects:
        """Where the writer's objects are."""
        return self.objects.below(folder_of(self.owner)) if self.owner else self.objects

    # Writing --------------------------------------------------------------------------------------------------

    def upload_checkpoint(
        self, path: Path, *, run: str, keep: int, check_owner: Callable[[], None] = lambda: None
    ) -> None:
        """Copy the checkpoint folder `path` of the run with that id, then remove all but the `keep` newest.

        `check_owner` raises where another attempt owns the run by now. It is called before the checkpoint appears, and
        again before others are removed: whoever has taken the run over since finds the new one. What an upload that was
        cut off has left is gone on with. Raises as `Objects` does. A kill at any point leaves the earlier ones, and at
        most objects that no manifest names, which a later upload removes.
        """
        manifest = (path / MANIFEST).read_bytes()
        entries = json.loads(manifest)["files"]
        name = name_of(path, manifest)
        own, folder = self._own, f"{_folder(run)}/{name}"
        there = own.names(folder)
        missing = [file for file, entry in entries.items() if there.get(f"{folder}/{file}") != entry["bytes"]]
        own.upload({f"{folder}/{file}": path / file for file in missing})
        for file, entry in entries.items():
            # Costs one small request each, and a store that has lost what it took must not get a manifest
            if (size := own.size(f"{folder}/{file}")) != entry["bytes"]:
                raise UserError(f"{own.url} must keep what is written, got {size} bytes of {folder}/{file}.")
        check_owner()
        own.write(f"{folder}/{MANIFEST}", manifest)
        check_owner()
        newest = f"{own.root}/{folder}"[len(self.objects.root) + 1 :]
        self._entries[newest] = entries
        self._remove_old(run, newest, keep)

    def holds(self, path: Path, *, run: str) -> bool:
        """Whether this very checkpoint is there already, whoever wrote it."""
        manifest = (path / MANIFEST).read_bytes()
        end = f"{_folder(run)}/{name_of(path, manifest)}/{MANIFEST}"
        there = [name for name in self.objects.names() if split(name)[1] == end]
        return any(self.objects.read(name) == manifest for name in there)

    def upload_files(self, directory: Path) -> None:
        """Copy what has changed of a run directory besides its checkpoints. Raises as `Objects` does."""
        found = {}
        for name in _small_files(directory):
            stat = (directory / name).stat()
            if self._uploaded.get(name) != (stat.st_size, stat.st_mtime_ns):
                found[name] = (stat.st_size, stat.st_mtime_ns)
        first = found.keys() - {RUN_FILE}
        self._own.upload({name: directory / name for name in first})
        # Last: with it the files of this owner are complete, and count instead of an earlier owner's
        self._own.upload({name: directory / name for name in found.keys() - first})
        self._uploaded |= found

    def _remove_old(self, run: str, newest: str, keep: int) -> None:
        """Point at the `keep` newest whole ones and remove the others, their manifests first, and the files of earlier
        owners, which `upload_files` has written again. No object of a later owner is touched.

        `newest`, a folder, has just been written: it stays, whatever the list says.
        """
        sizes = {name: size for name, size in self.objects.names().items() if split(name)[0] <= self.owner}
        kept: list[str] = [newest]
        doomed: list[str] = []
        found = {_checkpoint_of(name, run) for name in sizes} - {newest, ""}
        for folder in sorted(found, key=_order, reverse=True):
            whole = len(kept) < keep and folder not in self._damaged and self._looks_whole(folder, sizes)
            (kept if whole else doomed).append(folder)
        own = [folder.rpartition("/")[2] for folder in kept if split(folder)[0] == self.owner]
        self._own.write(NEWEST, to_json({"run": run, "checkpoints": own}))
        self.objects.remove(f"{folder}/{MANIFEST}" for folder in doomed)
        # The files of an earlier owner stay with its checkpoints, of this run or of one that --fresh has put aside
        stay = {split(name)[0] for name in sizes if "checkpoints/" in name and _checkpoint_of(name, run) not in doomed}
        self.objects.remove(
            name for name in sizes
            if (_checkpoint_of(name, run) in doomed and not name.endswith(f"/{MANIFEST}"))
            or (split(name)[0] not in {*stay, self.owner} and _is_file(split(name)[1]))
        )

    def _looks_whole(self, folder: str, sizes: dict[str, int]) -> bool:
        """Whether manifest and sizes fit. To compare digests would fetch all of it at each save."""
        entries = self._entries.get(folder)
        if entries is None:
            parent, _, name = folder.rpartition("/")
            entries = self._entries[folder] = read_manifest(self.objects.below(parent), name)[1]
        return bool(entries) and all(
            sizes.get(f"{folder}/{file}") in (None, entry["bytes"]) for file, entry in entries.items()
        )

    # Reading --------------------------------------------------------------------------------------------------

    def current_run(self) -> str | None:
        """The id of the run that is there now, None where there is none. Raises UserError where that can't be told."""
        if run := self._last()[1]:
            return run
        runs = sorted({part[1] for name in self.objects.names() if len(part := _parts(name)) >= 4})
        if len(runs) > 1:
            raise UserError(
                f"{self.objects.url} must say in run.json which run it holds, got none, and checkpoints of {len(runs)} "
                f"runs: {', '.join(runs)}. Put run.json back from a copy, or remove the others, or set another --name."
            )
        return runs[0] if runs else None

    def run_file(self) -> bytes | None:
        """The content of run.json, None where there is none."""
        return self._last()[0].read(RUN_FILE)

    def lineage(self) -> Lineage | None:
        """What run.json says there, None where it is missing or damaged."""
        return Lineage.of(parse(self.run_file()))

    def fetch_newest(self, directory: Path, *, run: str, above: int = -1) -> Path | None:
        """Copy the newest whole checkpoint of that run into the folder `directory`, verified. Returns its path there.

        None where there is none of a later step than `above`. Warns of those passed over. Raises as `Objects` does, and
        AllDamaged where all are, unless an earlier one (`above` >= 0) is at hand.
        """
        damaged: dict[str, str] = {}
        for owner in self._owners():
            path, ended = self._fetch_newest_of(owner, directory, run, above, damaged)
            if ended:
                return path
        if damaged and above < 0:
            raise AllDamaged(self.objects.url, damaged)
        return None

    def _fetch_newest_of(
        self, owner: Objects, directory: Path, run: str, above: int, damaged: dict[str, str]
    ) -> tuple[Path | None, bool]:
        """The same of one owner's checkpoints, and whether the search is over. Adds to `damaged`."""
        pointed = parse(owner.read(NEWEST))
        named = [str(name) for name in pointed.get("checkpoints", [])] if pointed.get("run") == run else []
        listed = {name.split("/")[2] for name in owner.names(_folder(run)) if name.count("/") >= 3}
        # Of two of one step the one that was written last: `named` has it first
        names = dict.fromkeys(name for name in [*named, *sorted(listed)] if NAME.fullmatch(name))
        for name in sorted(names, key=step_of, reverse=True):
            if step_of(name) <= above:
                return None, True
            folder = owner.below(_folder(run))
            path, problem = fetch_checkpoint(folder, name, directory)
            if not problem:
                for other, why in damaged.items():
                    self.objects.warn(f"checkpoint {other} of {self.objects.url} was passed over: {why}")
                return path, True
            # Without a manifest it is an upload that was cut off, unless somebody has seen the manifest
            if problem != NO_MANIFEST or name in named:
                damaged[name] = problem
                self._damaged.add(f"{folder.root}/{name}"[len(self.objects.root) + 1 :])
        return None, False

    def fetch_files(self, directory: Path) -> None:
        """Copy everything besides checkpoints into `directory`. Raises as `Objects` does, and UserError."""
        last, _ = self._last()
        listed = [name for name in last.names() if name not in FILES and _is_file(name) and ".." not in name]
        try:
            for name in (*FILES, *listed):
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                last.download(name, directory / name)
        except OSError as error:
            raise disk_error("copy of the run", directory, error) from None

    def _owners(self) -> Iterator[Objects]:
        """What each owner has written, the last one's first; in the end what was written without a number."""
        for number in range(self.owner or highest_number(self.objects), 0, -1):
            yield self.objects.below(folder_of(number))
        yield self.objects

    def _last(self) -> tuple[Objects, str | None]:
        """What the last owner with files has written, and the id of its run, None where there is no such owner."""
        for owner in self._owners():
            for name in (RUN_FILE, NEWEST):
                run = str(parse(owner.read(name)).get("run", ""))
                if RUN_ID.fullmatch(run):
                    return owner, run
        return self.objects, None


def _folder(run: str) -> str:
    return f"checkpoints/{run}"


def _parts(name: str) -> list[str]:
    """`checkpoints`, a run, a checkpoint and a file, of the object `name`; [] where it is of no checkpoint."""
    parts = split(name)[1].split("/", 3)
    whole = parts[0] == "checkpoints" and len(parts) == 4 and RUN_ID.fullmatch(parts[1]) and NAME.fullmatch(parts[2])
    return parts if whole else []


def _checkpoint_of(name: str, run: str) -> str:
    """The folder of the checkpoint of that run that the object `name` belongs to, or ""."""
    parts = _parts(name)
    return name.removesuffix(f"/{parts[3]}") if parts and parts[1] == run else ""


def _order(folder: str) -> tuple[int, int]:
    return split(folder)[0], step_of(folder.rpartition("/")[2])


def _is_file(name: str) -> bool:
    """Whether the object is one of those beside the checkpoints. `name`: without the owner's number."""
    return name in (*FILES, NEWEST) or name.startswith(tuple(folder.partition("*")[0] for folder in FOLDERS))


def _small_files(directory: Path) -> Iterator[str]:
    """The names of what is copied besides checkpoints."""
    yield from (name for name in FILES if (directory / name).is_file())
    for pattern in FOLDERS:
        for path in (path for folder in directory.glob(pattern) for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(directory)
            if "checkpoints" not in name.parts:
                yield name.as_posix()
