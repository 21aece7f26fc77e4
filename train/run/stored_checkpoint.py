"""One checkpoint in a store of objects: how it is called, when it is there, and how it comes back.

    step-00001200-5f0c9a417be2/model.safetensors optimizer.safetensors tree.json state.json manifest.json

It is there once its manifest is, which is written last. The folder has the digest of the manifest in its name, and the
manifest those of the files: objects of two uploads never mix, a second upload of the same checkpoint writes the same
bytes, and a manifest that is cut, old or in the wrong place does not pass. Nothing here trusts what it reads: a reader
takes what digests confirm, or passes it over.
"""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from rankup.errors import disk_error
from train.run.checkpoint import FILE, find_problem
from train.run.objects import Objects, parse
from train.run.publish import STAGING

MANIFEST = "manifest.json"
NO_MANIFEST = "manifest.json is missing"
NAME = re.compile(r"(step-(\d{8,}))-[0-9a-f]{12}")


def name_of(path: Path, manifest: bytes) -> str:
    """What the checkpoint folder `path` is called in a store."""
    return f"{path.name}-{_digest(manifest)}"


def step_of(name: str) -> int:
    """The step in the name of a checkpoint in a store, -1 where somebody else has given the name."""
    found = NAME.fullmatch(name)
    return int(found[2]) if found else -1


def fetch_checkpoint(folder: Objects, name: str, directory: Path) -> tuple[Path, str]:
    """Copy one checkpoint of `folder`. Returns its path in `directory`, and what is wrong with it, or "": then the path
    holds it, verified. Raises as `Objects` does, and UserError where the disk here is full."""
    ours = NAME.fullmatch(name)
    target = directory / (ours[1] if ours else name)
    content, entries, problem = read_manifest(folder, name)
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


def read_manifest(folder: Objects, name: str) -> tuple[bytes, dict[str, Any], str]:
    """The manifest of one checkpoint of `folder` as it is, its entries, and what is wrong with it, or ""."""
    content = folder.read(f"{name}/{MANIFEST}")
    if content is None:
        return b"", {}, NO_MANIFEST
    ours = NAME.fullmatch(name)  # else a folder that somebody has copied there, under any name
    if ours and name.rpartition("-")[2] != _digest(content):
        return b"", {}, "manifest.json does not match the digest in the folder's name"
    values = parse(content)
    entries = values.get("files")
    if not isinstance(entries, dict) or not entries or not all(FILE.fullmatch(file) for file in entries):
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


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
