"""A run in a store of objects: its checkpoints, and what `metrics.jsonl` and the other files say of it.

    run.json config.yaml status.json result.json metrics.jsonl logs/ tensorboard/
    checkpoints/<id of the run>/step-00001200-5f0c9a417be2/model.pt training.pt state.json manifest.json
    newest.json

`train.run.stored_checkpoint` says which checkpoints are whole. Lists and `newest.json` are hints where to look.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from train.errors import UserError, disk_error
from train.run.checkpoint import AllDamaged
from train.run.lineage import FILE as RUN_FILE
from train.run.lineage import Lineage
from train.run.objects import Objects, parse
from train.run.stored_checkpoint import (
    MANIFEST,
    NAME,
    NO_MANIFEST,
    fetch_checkpoint,
    name_of,
    read_manifest,
    step_of,
)
from train.run.training_state import to_json

NEWEST = "newest.json"
FILES = (RUN_FILE, "config.yaml", "status.json", "result.json", "metrics.jsonl", "logs/rank-0.log", "tracker/sent.json")
FOLDERS = ("tensorboard", "before-*")  # the second: what --fresh has put aside


class RunStore:
    """One run in a store. One thread at a time uses it, rank 0's alone."""

    def __init__(self, objects: Objects) -> None:
        """`objects`: those below the run's own address, `s3://bucket/runs/NAME`."""
        self.objects = objects
        self._uploaded: dict[str, tuple[int, int]] = {}  # a file's size and time when it was uploaded last
        self._entries: dict[str, dict[str, Any]] = {}  # of manifests that this process wrote or verified
        self._damaged: set[str] = set()

    # Writing --------------------------------------------------------------------------------------------------

    def upload_checkpoint(
        self, path: Path, *, run: str, keep: int, check_owner: Callable[[], None] = lambda: None
    ) -> None:
        """Copy the checkpoint folder `path` of the run with that id, then remove all but the `keep` newest.

        `check_owner` is called right before the checkpoint appears, and raises where another attempt owns the run by
        now. Raises as `Objects` does. A kill at any point leaves the earlier ones, and at most objects that no manifest
        names, which a later upload removes.
        """
        manifest = (path / MANIFEST).read_bytes()
        entries = json.loads(manifest)["files"]
        name = name_of(path, manifest)
        folder = f"{_folder(run)}/{name}"
        self.objects.upload({f"{folder}/{file}": path / file for file in entries})
        for file, entry in entries.items():
            # Costs one small request each, and a store that has lost what it took must not get a manifest
            if (size := self.objects.size(f"{folder}/{file}")) != entry["bytes"]:
                raise UserError(f"{self.objects.url} must keep what is written, got {size} bytes of {folder}/{file}.")
        check_owner()
        self.objects.write(f"{folder}/{MANIFEST}", manifest)
        self._entries[name] = entries
        self._remove_old(run, name, keep)

    def holds(self, path: Path, *, run: str) -> bool:
        """Whether this very checkpoint is there already."""
        manifest = (path / MANIFEST).read_bytes()
        return self.objects.read(f"{_folder(run)}/{name_of(path, manifest)}/{MANIFEST}") == manifest

    def upload_files(self, directory: Path) -> None:
        """Copy what has changed of a run directory besides its checkpoints. Raises as `Objects` does."""
        found = {}
        for name in _small_files(directory):
            stat = (directory / name).stat()
            if self._uploaded.get(name) != (stat.st_size, stat.st_mtime_ns):
                found[name] = (stat.st_size, stat.st_mtime_ns)
        self.objects.upload({name: directory / name for name in found})
        self._uploaded |= found

    def _remove_old(self, run: str, newest: str, keep: int) -> None:
        """Point at the `keep` newest whole ones and remove the others, their manifests first.

        `newest` has just been written: it stays, whatever the list says.
        """
        sizes = self.objects.names(_folder(run))
        kept: list[str] = [newest]
        doomed: list[str] = []
        for name in sorted(_checkpoints(sizes) - {newest}, key=step_of, reverse=True):
            whole = len(kept) < keep and name not in self._damaged and self._looks_whole(run, name, sizes)
            (kept if whole else doomed).append(name)
        self.objects.write(NEWEST, to_json({"run": run, "checkpoints": kept}))
        self.objects.remove(f"{_folder(run)}/{name}/{MANIFEST}" for name in doomed)
        self.objects.remove(
            name for name in sizes if not name.endswith(f"/{MANIFEST}") and name.split("/")[2] in doomed
        )

    def _looks_whole(self, run: str, name: str, sizes: dict[str, int]) -> bool:
        """Whether manifest and sizes fit. To compare digests would fetch all of it at each save."""
        entries = self._entries.get(name)
        if entries is None:
            entries = read_manifest(self.objects.below(_folder(run)), name)[1]
            self._entries[name] = entries
        return bool(entries) and all(
            sizes.get(f"{_folder(run)}/{name}/{file}") in (None, entry["bytes"]) for file, entry in entries.items()
        )

    # Reading --------------------------------------------------------------------------------------------------

    def current_run(self) -> str | None:
        """The id of the run that is there now, None where there is none. Raises UserError where that can't be told."""
        for name in (RUN_FILE, NEWEST):
            if run := parse(self.objects.read(name)).get("run"):
                return str(run)
        runs = sorted({name.split("/")[1] for name in self.objects.names("checkpoints") if name.count("/") >= 3})
        if len(runs) > 1:
            raise UserError(
                f"{self.objects.url} must say in run.json which run it holds, got none, and checkpoints of {len(runs)} "
                f"runs: {', '.join(runs)}. Put run.json back from a copy, or remove the others, or set another --name."
            )
        return runs[0] if runs else None

    def lineage(self) -> Lineage | None:
        """What run.json says there, None where it is missing or damaged."""
        return Lineage.of(parse(self.objects.read(RUN_FILE)))

    def fetch_newest(self, directory: Path, *, run: str, above: int = -1) -> Path | None:
        """Copy the newest whole checkpoint of that run into the folder `directory`, verified. Returns its path there.

        None where there is none of a later step than `above`. Warns of those passed over. Raises as `Objects` does, and
        AllDamaged where all are, unless an earlier one (`above` >= 0) is at hand.
        """
        damaged: dict[str, str] = {}
        pointed = parse(self.objects.read(NEWEST))
        named = [str(name) for name in pointed.get("checkpoints", [])] if pointed.get("run") == run else []
        listed = _checkpoints(self.objects.names(_folder(run)))
        # Of two of one step the one that was written last: `named` has it first
        names = dict.fromkeys(name for name in [*named, *sorted(listed)] if NAME.fullmatch(name))
        for name in sorted(names, key=step_of, reverse=True):
            if step_of(name) <= above:
                break
            path, problem = fetch_checkpoint(self.objects.below(_folder(run)), name, directory)
            if not problem:
                for other, why in damaged.items():
                    self.objects.warn(f"checkpoint {self.objects.url}/{_folder(run)}/{other} was passed over: {why}")
                return path
            # Without a manifest it is an upload that was cut off, unless somebody has seen the manifest
            if problem != NO_MANIFEST or name in named:
                damaged[name] = problem
                self._damaged.add(name)
        if damaged and above < 0:
            raise AllDamaged(self.objects.url, damaged)
        return None

    def fetch_files(self, directory: Path) -> None:
        """Copy everything besides checkpoints into `directory`. Raises as `Objects` does, and UserError."""
        tops = tuple(folder.partition("*")[0] for folder in FOLDERS)
        listed = [name for name in self.objects.names() if name.startswith(tops) and ".." not in name]
        try:
            for name in (*FILES, *listed):
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                self.objects.download(name, directory / name)
        except OSError as error:
            raise disk_error("copy of the run", directory, error) from None


def _folder(run: str) -> str:
    return f"checkpoints/{run}"


def _checkpoints(names: Iterable[str]) -> set[str]:
    """The checkpoints of which there are objects with these names, whole or not."""
    return {name.split("/")[2] for name in names if name.count("/") >= 3 and NAME.fullmatch(name.split("/")[2])}


def _small_files(directory: Path) -> Iterator[str]:
    """The names of what is copied besides checkpoints."""
    yield from (name for name in FILES if (directory / name).is_file())
    for pattern in FOLDERS:
        for path in (path for folder in directory.glob(pattern) for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(directory)
            if "checkpoints" not in name.parts:
                yield name.as_posix()
