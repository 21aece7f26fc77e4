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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rankup.errors import UserError
from rankup.files import HEADER, leads_outside
from rankup.places.files import SNAPSHOT

MOST_BYTES, LARGE_BYTES = 100 * 2**20, 50 * 10**6
# `git apply` takes this diff, whatever the user's settings of git are
PATCH = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color", "--no-relative", "--submodule=short",
         "--src-prefix=a/", "--dst-prefix=b/")
MTIME = 315532800  # 1980, the first time that zip files can hold
# Where runs and caches lie, which git may not know to ignore
LEFT_OUT = re.compile(
    r"(runs|\.rankup)|(.*/)?(\.git|__pycache__|node_modules|\.[^/]*_(cache|checkpoints)|[^/]*\.pyc|slurm-[^/]*\.out)"
)
SECRET = re.compile(
    r"\.envrc|secrets?\.(ya?ml|json|toml)|\.env(\.(?!example|sample|template).*)?|.*\.(pem|key|p12|pfx|jks)|id_(rsa|dsa|ecdsa|ed25519)|\.netrc|\.pypirc"
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


def take(folder: Path, file: str, *more: str) -> Snapshot:
    """Return a snapshot of `folder`. `file` and `more`: the launch file and others that are always part of it. Raises
    UserError for files that can't be sent."""
    made = Snapshot()
    header = HEADER.search((folder / file).read_text(errors="replace"))
    options = re.split(r" -m | -- | \S+\.py\b", header[1])[0] if header else ""  # before the script's
    pairs = list(pairwise(shlex.split(options.replace("=", " "))))
    data, made.outputs = ([os.path.normpath(value) for word, value in pairs if word == flag]
                          for flag in ("--data", "--output"))

    def left_out(path: str) -> bool:
        """Return whether a file or folder that git does not track is not sent."""
        environment = os.path.isfile(folder / path / "pyvenv.cfg")
        return bool(LEFT_OUT.fullmatch(path)) or path in (*data, *made.outputs) or environment

    try:
        state, tracked, untracked = _git(folder, left_out) or ({}, set[str](), set[str]())
        if not tracked and not untracked:
            state, untracked = {}, _walk(folder, left_out)
        if secret := {path for path in untracked if SECRET.fullmatch(path.rpartition("/")[2])}:
            which = f"{' '.join(sorted(secret))}, which may be secret"
            made.notes.append(f"left out, because git does not track it: {which}")
        # A folder with a tracked file, such as runs/.gitkeep, would be one of the snapshot, and keep the job's results
        written = {path for path in tracked if any(f"{path}/".startswith(f"{out}/") for out in ("runs", *made.outputs))}
        if lost := sorted(path for path in written if not path.rpartition("/")[2].startswith(".git")):
            made.notes.append(f"left out, because jobs write there: {' '.join(lost)}")
        wheels = {path.name for path in folder.glob("rankup-*.whl")}  # of `rankup add`, for the build of an image alone
        _read(folder, sorted((tracked | untracked) - written - secret - wheels | {file, *more}), made)
    except OSError as error:
        raise UserError(f"submit: {error.filename} must be readable, got {error.strerror}.") from None
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
        env = {**os.environ, "LC_ALL": "C"}  # the messages below are English
        done = subprocess.run(["git", "-C", folder, *words], env=env, capture_output=True, check=True)
        if b"could not open directory" in done.stderr:  # git would leave its files out
            raise subprocess.CalledProcessError(0, words, stderr=done.stderr)
        return done.stdout

    try:
        about = ask("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--", ".").decode(errors="replace")
        listed = [ask("ls-files", "-z", *words) for words in (["--cached"], ["--others", "--exclude-standard"])]
    except FileNotFoundError:
        return None
    except subprocess.CalledProcessError as error:
        if b"not a git repository (or any" in error.stderr:  # not one whose .git leads nowhere
            return None
        said = " ".join(error.stderr.decode(errors="replace").split())
        raise UserError(f"submit: git must be able to list the files in {folder.resolve()}, got: {said}") from None
    facts = dict(re.findall(r"(?m)^# branch\.(oid|head) (.+)$", about))
    dirty = any(line[0] != "#" for line in about.splitlines())
    commit = facts["oid"].replace("(initial)", "")
    state: dict[str, Any] = {"commit": commit, "branch": facts["head"], "dirty": dirty}
    if dirty and commit:
        state["diff"] = ask("diff", *PATCH, "HEAD", "--", ".")
    tracked, untracked = ({os.fsdecode(path) for path in each.split(b"\0") if path} for each in listed)
    parents = {str(above) for path in untracked for above in Path(path).parents}
    aside = {path for path in {*untracked, *parents} - {"."} if left_out(path)}
    untracked = {path for path in untracked if not aside & {path, *map(str, Path(path).parents)}}
    for paths in (tracked, untracked):  # a folder in the list is a submodule, or another repository
        for inner in [path for path in paths if (folder / path).is_dir() and not (folder / path).is_symlink()]:
            paths.remove(inner)
            out = partial(_left_out_inside, left_out, inner)
            # Without .git it is a submodule that is not checked out: git would answer for the folder around it
            found = _git(folder / inner, out) if (folder / inner / ".git").exists() else None
            _, *both = found or ({}, _walk(folder / inner, out))
            paths |= {os.path.join(inner, path) for found in both for path in found}
    return state, tracked, untracked


def _left_out_inside(left_out: Callable[[str], bool], inner: str, path: str) -> bool:
    return left_out(os.path.join(inner, path))


def _walk(folder: Path, left_out: Callable[[str], bool]) -> set[str]:
    """Return the paths of all files and links in a folder without git, but those that are left out."""
    found = set[str]()

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail):
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
            if leads_outside(folder, path):
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
    made.files = {path: ((folder / path).stat().st_mode & 0o777, (folder / path).read_bytes()) for path in sizes}
