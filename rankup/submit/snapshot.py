"""A snapshot: the user's files at the moment of `rankup submit`, read once into memory and named by their content.

It has the files that git tracks and those that git does not ignore. Without git it has all files but those of runs,
environments, caches and data.
"""

import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rankup.errors import UserError
from rankup.files import HEADER
from rankup.places.files import SNAPSHOT

MOST_BYTES, LARGE_BYTES = 100 * 2**20, 50 * 10**6
MTIME = 315532800  # 1980, the first time that zip files can hold
# Where runs and caches lie, which git may not know to ignore
LEFT_OUT = re.compile(
    r"(runs|\.rankup)|(.*/)?(\.git|__pycache__|node_modules|\.[^/]*_(cache|checkpoints)|[^/]*\.pyc|slurm-[^/]*\.out)"
)
SECRET = re.compile(
    r"\.env(\.(?!example|sample|template).*)?|.*\.(pem|key|p12|pfx|jks)|id_(rsa|dsa|ecdsa|ed25519)|\.netrc|\.pypirc"
    r"|\.git-credentials|kubeconfig|credentials(\.json)?|.*service[-_]account.*\.json"
)


@dataclass
class Snapshot:
    """`files`: mode and content by path. `links`: the targets of symbolic links. `record`: what `.rankup.json` says.
    `outputs`: folders that the script writes. `notes`: lines to say. `diff`: from the commit to the tracked files."""

    files: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    diff: bytes = b""

    @property
    def name(self) -> str:
        return str(self.record["snapshot"])

    def tar(self, mode: str = "w") -> bytes:
        """Return the snapshot as a tar file. `mode`: "w:gz" compresses it."""
        with tarfile.open(fileobj=(packed := io.BytesIO()), mode=mode) as tar:  # type: ignore[call-overload]
            for path in (*self.files, *self.links):
                entry = tarfile.TarInfo(path)
                entry.mode, content = self.files.get(path, (0o777, b""))
                entry.size, entry.mtime, entry.linkname = len(content), MTIME, self.links.get(path, "")
                entry.type = tarfile.SYMTYPE if path in self.links else tarfile.REGTYPE
                tar.addfile(entry, io.BytesIO(content))
        return packed.getvalue()

    @staticmethod
    def keep(name: str, content: bytes) -> None:
        """Write a file about the snapshot into this folder's `.rankup/`, which git ignores."""
        Path(".rankup").mkdir(exist_ok=True)
        Path(".rankup/.gitignore").write_text("*\n")
        Path(".rankup", name).write_bytes(content)


def take(folder: Path, file: str) -> Snapshot:
    """Return a snapshot of `folder`. `file`: the launch file, which is always part of it. Raises UserError for files
    that can't be sent."""
    made = Snapshot()
    header = HEADER.search((folder / file).read_text(errors="replace"))
    options = re.split(r" -m | -- | \S+\.py\b", header[1])[0] if header else ""  # before the script's
    pairs = list(pairwise(shlex.split(options.replace("=", " "))))
    data, made.outputs = ([os.path.normpath(value) for word, value in pairs if word == flag]
                          for flag in ("--data", "--output"))

    def left_out(path: str) -> bool:
        """Return whether a file or folder that git does not track is not sent."""
        environment = (folder / path / "pyvenv.cfg").is_file()
        return bool(LEFT_OUT.fullmatch(path)) or path in (*data, *made.outputs) or environment

    state, tracked, untracked = _git(folder, left_out) or ({}, set[str](), set[str]())
    if not tracked and not untracked:
        state, untracked = {}, _walk(folder, left_out)
    if secret := {path for path in untracked if SECRET.fullmatch(path.rpartition("/")[2])}:
        made.notes.append(f"left out, because git does not track it: {' '.join(sorted(secret))}, which may be secret")
    _read(folder, sorted(tracked | (untracked - secret) | {file}), made)
    made.diff = state.pop("diff", b"")
    if state:
        state["dirty"] = state["dirty"] or bool(untracked - secret)
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {path}\n" for path, (_, content) in made.files.items())
    programs = [path for path, (mode, _) in made.files.items() if mode & 0o100]
    name = hashlib.sha256(json.dumps([sums, programs, made.links, state]).encode()).hexdigest()[:12]
    made.record = {"snapshot": name, **state}
    record = f"{json.dumps(made.record)}\n".encode()
    sums += f"{hashlib.sha256(record).hexdigest()}  {SNAPSHOT}\n"
    made.files |= {SNAPSHOT: (0o644, record), ".rankup.sum": (0o644, sums.encode())}
    return made


def _git(folder: Path, left_out: Callable[[str], bool]) -> tuple[dict[str, Any], set[str], set[str]] | None:
    """Return commit, branch, whether tracked files differ, and the diff; the tracked files; and the files that are
    neither tracked nor ignored nor left out. Returns None without git. Raises UserError if git refuses to answer."""

    def ask(*words: str) -> bytes:
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, check=True).stdout

    try:
        about = ask("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--", ".").decode(errors="replace")
        listed = [ask("ls-files", "-z", *words) for words in (["--cached"], ["--others", "--exclude-standard"])]
    except FileNotFoundError:
        return None
    except subprocess.CalledProcessError as error:
        if b"not a git repository" in error.stderr:
            return None
        said = error.stderr.decode(errors="replace").strip()
        raise UserError(f"submit: git must be able to list the files in {folder.resolve()}, got: {said}") from None
    facts = dict(re.findall(r"(?m)^# branch\.(oid|head) (.+)$", about))
    dirty = any(line[0] != "#" for line in about.splitlines())
    state: dict[str, Any] = {"commit": facts["oid"], "branch": facts["head"], "dirty": dirty}
    if dirty and facts["oid"] != "(initial)":
        state["diff"] = ask("diff", "--binary", "HEAD", "--", ".")
    tracked, untracked = ({os.fsdecode(path) for path in each.split(b"\0") if path} for each in listed)
    parents = {str(above) for path in untracked for above in Path(path).parents}
    aside = {path for path in {*untracked, *parents} - {"."} if left_out(path)}
    untracked = {path for path in untracked if not aside & {path, *map(str, Path(path).parents)}}
    for paths in (tracked, untracked):  # a folder in the list is a submodule, or another repository
        for inner in [path for path in paths if (folder / path).is_dir() and not (folder / path).is_symlink()]:
            paths.remove(inner)
            _, *both = _git(folder / inner, left_out) or ({}, _walk(folder / inner, left_out))
            paths |= {os.path.join(inner, path) for found in both for path in found}
    return state, tracked, untracked


def _walk(folder: Path, left_out: Callable[[str], bool]) -> set[str]:
    """Return the paths of all files and links in a folder without git, but those that are left out."""
    found = set[str]()
    for place, folders, names in os.walk(folder):
        inside = os.path.relpath(place, folder)
        paths = {name: os.path.normpath(f"{inside}/{name}") for name in (*folders, *names)}
        kept = {name: path for name, path in paths.items() if not left_out(path)}
        found |= {path for name, path in kept.items() if name in names or os.path.islink(f"{place}/{name}")}
        folders[:] = [name for name in folders if name in kept]
    return found


def _read(folder: Path, paths: list[str], made: Snapshot) -> None:
    """Read these files. Raises UserError for too many bytes, a link to the outside, or a name that no list can hold."""
    sizes, tops = Counter[str](), Counter[str]()
    for path in paths:
        full = folder / path
        if not path.isprintable() or "\\" in path:
            raise UserError(f"submit: the name of a file must be one line without \\, got {path!r}. Rename the file.")
        if full.is_symlink():
            made.links[path] = target = os.readlink(full)
            if os.path.isabs(target) or not full.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"submit: {path} must be a link inside this folder, got one to {target}. Name it in "
                                ".gitignore: a job on this machine still finds it.")
        elif full.is_file():  # git also lists removed files
            sizes[path] = full.stat().st_size
            tops[path.partition("/")[0]] += sizes[path]
            if sizes[path] > LARGE_BYTES:
                made.notes.append(f"{path} has {sizes[path] / 1e6:.0f} MB, which each snapshot carries")
    if sizes.total() > MOST_BYTES:
        largest = ", ".join(f"{path} {size / 2**20:.0f} MiB" for path, size in tops.most_common(3))
        raise UserError(
            f"submit: a snapshot must have at most {MOST_BYTES >> 20} MiB, got {sizes.total() / 2**20:.0f}: {largest}. "
            "Name data in .gitignore: a job finds it in the folder from which it was submitted."
        )
    try:
        made.files = {path: ((folder / path).stat().st_mode & 0o777, (folder / path).read_bytes()) for path in sizes}
    except OSError as error:
        raise UserError(f"submit: {error.filename} must be readable, got {error.strerror}.") from None
