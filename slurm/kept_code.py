# The code that a job runs in all its starts: a copy, made at the first; for supervise.py.
# Run: nothing, supervise.py imports it.
# Edit: nothing.
"""At its first start a job copies the checkout's code and the current folder's into `code/` of the run's folder.

There each copy has its digest as its name, and `slurm-JOBID` is a link to the copy that this job runs. In any Python
from 3.8 on, and with the standard library only.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from job import ROOT, say

OURS = ("rankup", "train", "slurm")  # of the checkout
MOST_FILES, MOST_BYTES, MOST_ENTRIES = 2000, 10_000_000, 20_000  # of the current folder
MOST_NAMED = 5


class TooLarge(Exception):
    """The current folder has more Python files than a job should copy."""


def run_kept(words: list[str], *, job: str, command: str) -> None:
    """Go on as the supervisor of the job's own copy, which is made where there is none yet. Does not return then.

    Returns where nothing can be copied, and says why. `words`: of train.main, behind train or run.
    """
    here, script = Path.cwd(), len(words)
    if command == "run":  # what stands behind the script is the script's
        script = next((at for at, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words))
    place = _place(words[:script], job=job)
    try:
        place.mkdir(parents=True, exist_ok=True)
        kept = _kept(place, here, job)
    except OSError as error:
        say(f"the code can't be kept in {place} ({error}): each start runs the checkout as it is then")
        return
    copy = kept if here == ROOT else kept / "here"
    if script < len(words) and (inside := _inside(copy, here, words[script])):
        words = [*words[:script], inside, *words[script + 1 :]]
    env = {**os.environ, "KEEP_CODE": "", "RANKUP_CODE": str(copy)}
    if path := env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(_inside(copy, here, folder) or folder for folder in path.split(os.pathsep))
    os.execve(sys.executable, [sys.executable, str(kept / "slurm" / "supervise.py"), *words], env)


def _place(words: Sequence[str], *, job: str) -> Path:
    """`code/` of the run's folder, as far as the command line names that: a file of settings is not read."""
    given = {"--run-dir": "runs", "--name": f"slurm-{job}"}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        given[name.replace("_", "-")] = value if equals else " ".join(words[at + 1 : at + 2])
    run_dir = "runs" if "://" in given["--run-dir"] else given["--run-dir"]
    return Path(run_dir).absolute() / given["--name"] / "code"


def _inside(copy: Path, here: Path, name: str) -> str:
    """What a path inside the current folder is called in its copy; empty where the copy has no such thing."""
    try:
        path = copy / (here / name).resolve().relative_to(here.resolve())
    except ValueError:
        return ""
    return str(path) if path.exists() else ""


def _kept(place: Path, here: Path, job: str) -> Path:
    """The folder of this job's copy."""
    new, link = place / f".new-{job}", place / f"slurm-{job}"
    shutil.rmtree(new, ignore_errors=True)  # of a start that was killed while it copied
    try:
        _copy(here, new)
        files = _digests(new)
        if (link / "slurm" / "supervise.py").is_file():
            kept = link.resolve()
            if changed := _difference(_digests(kept), files):
                say(f"this start runs the code of the first, {kept}; not what is there by now: {changed}")
            return kept
        others = [path for path in place.glob("slurm-*") if path.is_dir()]
        if others:
            last = max(others, key=lambda path: path.lstat().st_mtime)
            if changed := _difference(_digests(last), files):
                say(f"the run was at last trained by job {last.name[len('slurm-'):]}, with other code: {changed}")
        kept = place / hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
        if not kept.exists():
            new.rename(kept)
        link.unlink(missing_ok=True)
        link.symlink_to(kept.name)
        say(f"every start of this job runs the code that is here now: {len(files)} files, kept in {kept}")
        return kept
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _copy(here: Path, new: Path) -> None:
    for name in OURS:
        # With times and compiled files, or Python would compile all once more. Another job may write some just now
        shutil.copytree(ROOT / name, new / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    try:
        _mirror(here, new if here == ROOT else new / "here", [0, 0, 0])
    except TooLarge:
        say(f"{here} has more than {MOST_FILES} Python files, or {MOST_BYTES // 10**6} MB of them: they are not kept, "
            "each start runs them as they are then")
        for path in [path for path in new.iterdir() if path.name not in OURS]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if (ROOT / ".venv").exists() and not (new / ".venv").exists():
        (new / ".venv").symlink_to(ROOT / ".venv")


def _mirror(folder: Path, to: Path, sizes: list[int]) -> None:
    """Copy a folder's Python files; everything else is a link to the original, as code may read files beside its own.

    Folders without a Python file of their own are such links too: data, results, environments. `sizes`: how many
    files, bytes and entries there were so far. Raises TooLarge.
    """
    to.mkdir(exist_ok=True)
    with os.scandir(folder) as entries:
        for entry in entries:
            sizes[2] += 1
            source, target = Path(entry.path), to / entry.name
            if entry.name in ("__pycache__", ".git") or os.path.lexists(target):
                continue
            if entry.name.endswith(".py") and entry.is_file():
                sizes[0] += 1
                sizes[1] += entry.stat().st_size
                shutil.copy2(source, target)
            elif entry.is_dir(follow_symlinks=False) and _has_python(source):
                _mirror(source, target, sizes)
            else:
                target.symlink_to(source)
            if sizes[0] > MOST_FILES or sizes[1] > MOST_BYTES or sizes[2] > MOST_ENTRIES:
                raise TooLarge


def _has_python(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:  # bounded: a folder of data may have a million files
            return any(entry.name.endswith(".py") for entry in itertools.islice(entries, MOST_ENTRIES))
    except OSError:
        return False  # another user's, perhaps


def _digests(folder: Path) -> dict[str, str]:
    """Each file that was copied, and its digest."""
    paths = [path for path in folder.resolve().rglob("*") if path.is_file() and not path.is_symlink()]
    named = {path.relative_to(folder.resolve()).as_posix(): path for path in paths if "__pycache__" not in path.parts}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in named.items()}


def _difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Which files are not the same, in words."""
    names = [
        *(f"{name} has changed" for name in sorted(old) if new.get(name, old[name]) != old[name]),
        *(f"{name} is new" for name in sorted(set(new) - set(old))),
        *(f"{name} is gone" for name in sorted(set(old) - set(new))),
    ]
    more = f", and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
