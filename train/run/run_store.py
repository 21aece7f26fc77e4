"""A run in a store of objects: its checkpoints, and what `metrics.jsonl` and the other files say of it.

    run.json config.yaml status.json result.json metrics.jsonl logs/ tensorboard/
    checkpoints/<id of the run>/step-00001200-5f0c9a417be2/model.pt training.pt state.json manifest.json
    newest.json

A checkpoint is there once its manifest is, which is written last. The folder has the digest of the manifest in its
name, and the manifest those of the files: objects of two uploads never mix, a second upload of the same checkpoint
writes the same bytes, and a manifest that is cut, old or in the wrong place does not pass. Lists and `newest.json` are
hints where to look. Nothing here trusts what it reads: a reader takes what digests confirm, or passes it over.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from train.errors import UserError, disk_error
from train.run import lineage
from train.run.checkpoint import find_problem
from train.run.objects import Objects
from train.run.publish import STAGING
from train.run.training_state import to_json

MANIFEST, NEWEST = "manifest.json", "newest.json"
FILES = (lineage.FILE, "config.yaml", "status.json", "result.json", "metrics.jsonl", "logs/rank-0.log",
         "tracker/sent.json")
FOLDERS = ("tensorboard", "before-*")  # the second: what --fresh has put aside
_NO_MANIFEST = "manifest.json is missing"
_NAME = re.compile(r"(step-(\d{8,}))-[0-9a-f]{12}")
# A manifest comes from outside: no name in it may lead out of the checkpoint's folder
_FILE = re.compile(r"(shards/)?\.?\w[\w.-]*")


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
        name = f"{path.name}-{_digest(manifest)}"
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
        return self.objects.read(f"{_folder(run)}/{path.name}-{_digest(manifest)}/{MANIFEST}") == manifest

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
        there = {name.split("/")[2] for name in sizes if name.count("/") >= 3} - {newest}
        kept: list[str] = [newest]
        doomed: list[str] = []
        for name in sorted((name for name in there if _NAME.fullmatch(name)), key=_step_of, reverse=True):
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
            entries = _read_manifest(self.objects.below(_folder(run)), name)[1]
            self._entries[name] = entries
        return bool(entries) and all(
            sizes.get(f"{_folder(run)}/{name}/{file}") in (None, entry["bytes"]) for file, entry in entries.items()
        )

    # Reading --------------------------------------------------------------------------------------------------

    def current_run(self) -> str | None:
        """The id of the run that is there now, None where there is none. Raises UserError where that can't be told."""
        for name in (lineage.FILE, NEWEST):
            if run := _parse(self.objects.read(name)).get("run"):
                return str(run)
        runs = sorted({name.split("/")[1] for name in self.objects.names("checkpoints") if name.count("/") >= 3})
        if len(runs) > 1:
            raise UserError(
                f"{self.objects.url} must say in run.json which run it holds, got none, and checkpoints of {len(runs)} "
                f"runs: {', '.join(runs)}. Put run.json back from a copy, or remove the others, or set another --name."
            )
        return runs[0] if runs else None

    def fetch_newest(self, directory: Path, *, run: str, above: int = -1) -> Path | None:
        """Copy the newest whole checkpoint of that run into the folder `directory`, verified. Returns its path there.

        None where there is none of a later step than `above`. Warns of those passed over. Raises as `Objects` does, and
        UserError where all are damaged, unless an earlier one (`above` >= 0) is at hand.
        """
        damaged: dict[str, str] = {}
        pointed = _parse(self.objects.read(NEWEST))
        named = [str(name) for name in pointed.get("checkpoints", [])] if pointed.get("run") == run else []
        listed = {name.split("/")[2] for name in self.objects.names(_folder(run)) if name.count("/") >= 3}
        # Of two of one step the one that was written last: `named` has it first
        names = dict.fromkeys(name for name in [*named, *sorted(listed)] if _NAME.fullmatch(name))
        for name in sorted(names, key=_step_of, reverse=True):
            if _step_of(name) <= above:
                break
            path, problem = _fetch(self.objects.below(_folder(run)), name, directory)
            if not problem:
                for other, why in damaged.items():
                    self.objects.warn(f"checkpoint {self.objects.url}/{_folder(run)}/{other} was passed over: {why}")
                return path
            # Without a manifest it is an upload that was cut off, unless somebody has seen the manifest
            if problem != _NO_MANIFEST or name in named:
                damaged[name] = problem
                self._damaged.add(name)
        if damaged and above < 0:
            raise UserError(
                f"checkpoint: {self.objects.url} must hold a whole checkpoint, got only damaged ones: "
                f"{'; '.join(f'{name}: {why}' for name, why in damaged.items())}. Put one back from a copy, or set "
                "--fresh to start anew, which keeps them aside."
            )
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


def _step_of(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found[2]) if found else -1


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _parse(content: bytes | None) -> dict[str, Any]:
    try:
        values = json.loads(content or b"{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def fetch(address: Objects, directory: Path) -> Path:
    """Copy what is at an address into `directory`, and return its path there: a run's newest checkpoint, or a file.

    `address`: of a run, of a checkpoint's folder, or of an object. A checkpoint is verified. Raises as `Objects` does,
    and UserError where nothing is there, or nothing whole.
    """
    root, _, name = address.root.rpartition("/")
    beside = replace(address, root=root, url=address.url.rpartition("/")[0])
    if address.size(MANIFEST) is not None:
        path, problem = _fetch(beside, name, directory)
        if problem:
            raise UserError(f"checkpoint: {address.url} must be a whole checkpoint, got a damaged one: {problem}.")
        return path
    store = RunStore(address)
    if run := store.current_run():
        newest = store.fetch_newest(directory, run=run)
        if newest is not None:
            return newest
    elif beside.download(name, directory / name):
        return directory / name
    raise UserError(f"{address.url} must be a run, a checkpoint's folder or a file of weights, got nothing there.")


def _fetch(folder: Objects, name: str, directory: Path) -> tuple[Path, str]:
    """Copy one checkpoint. Returns its path, and what is wrong with it, or "": then the path holds it, verified."""
    ours = _NAME.fullmatch(name)
    target = directory / (ours[1] if ours else name)
    content, entries, problem = _read_manifest(folder, name)
    if problem:
        return target, problem
    if _same(target, content):
        return target, ""
    staging = directory / f"{STAGING}{name}"
    try:
        shutil.rmtree(staging, ignore_errors=True)
        for file in entries:
            (staging / file).parent.mkdir(parents=True, exist_ok=True)
            if not folder.download(f"{name}/{file}", staging / file):
                return target, f"{file} is missing"
        (staging / MANIFEST).write_bytes(content)
        if problem := find_problem(staging):
            return target, problem
        if target.exists():  # damaged, or another one of this step
            shutil.rmtree(target)
        staging.rename(target)
    except OSError as error:
        raise disk_error("checkpoint", directory, error) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target, ""


def _read_manifest(folder: Objects, name: str) -> tuple[bytes, dict[str, Any], str]:
    """The manifest as it is, its entries, and what is wrong with it, or ""."""
    content = folder.read(f"{name}/{MANIFEST}")
    if content is None:
        return b"", {}, _NO_MANIFEST
    ours = _NAME.fullmatch(name)  # else a folder that somebody has copied there, under any name
    if ours and name.rpartition("-")[2] != _digest(content):
        return b"", {}, "manifest.json does not match the digest in the folder's name"
    values = _parse(content)
    entries = values.get("files")
    if not isinstance(entries, dict) or not entries or not all(_FILE.fullmatch(file) for file in entries):
        return b"", {}, "manifest.json is damaged"
    if ours and values.get("step") != int(ours[2]):
        return b"", {}, f"its name says step {int(ours[2])}, its manifest {values.get('step')}"
    return content, entries, ""


def _same(path: Path, manifest: bytes) -> bool:
    """Whether `path` is that checkpoint already, every byte of it."""
    try:
        return (path / MANIFEST).read_bytes() == manifest and find_problem(path) == ""
    except OSError:
        return False


def _small_files(directory: Path) -> Iterator[str]:
    """The names of what is copied besides checkpoints."""
    yield from (name for name in FILES if (directory / name).is_file())
    for pattern in FOLDERS:
        for path in (path for folder in directory.glob(pattern) for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(directory)
            if "checkpoints" not in name.parts:
                yield name.as_posix()
