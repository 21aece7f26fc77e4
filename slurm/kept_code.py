# Prints the code that a job runs in all its starts: a copy in the run's folder, made at the first start.
# Run: nothing, job.sh runs it.
# Edit: nothing.
"""kept_code.py CHECKOUT FOLDER JOB prints two lines: the copy of the checkout, and in it that of the current folder.

Python files are copied, everything else is a link. In any Python from 3.8 on, and with the standard library only.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path

OURS = ("rankup", "train", "slurm")  # of the checkout
MOST_FILES, MOST_BYTES, MOST_ENTRIES = 2000, 10_000_000, 20_000  # of the current folder
MOST_NAMED = 5


class TooLarge(Exception):
    """The current folder has more Python files than a job should copy."""


def say(text: str) -> None:
    print(f"slurm: {text}", file=sys.stderr, flush=True)


def copy(root: Path, here: Path, new: Path) -> None:
    """Copy the checkout's code and the current folder's to `new`."""
    for name in OURS:
        # With times and compiled files, or Python would compile all once more. Another job may write some just now
        shutil.copytree(root / name, new / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    try:
        mirror(here, new if here == root else new / "here", [0, 0, 0])
    except TooLarge:
        say(f"{here} has more than {MOST_FILES} Python files, or {MOST_BYTES // 10**6} MB of them: they are not kept, "
            "each start runs them as they are then")
        for path in [path for path in new.iterdir() if path.name not in OURS]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if (root / ".venv").exists() and not (new / ".venv").exists():
        (new / ".venv").symlink_to(root / ".venv")


def mirror(folder: Path, to: Path, sizes: list[int]) -> None:
    """Copy a folder's Python files. What has none is linked: code finds its data, and data are not copied.

    `sizes`: how many files, bytes and entries there were so far. Raises TooLarge.
    """
    to.mkdir(parents=True, exist_ok=True)
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
            elif entry.is_dir(follow_symlinks=False) and has_python(source):
                mirror(source, target, sizes)
            else:
                target.symlink_to(source)
            if sizes[0] > MOST_FILES or sizes[1] > MOST_BYTES or sizes[2] > MOST_ENTRIES:
                raise TooLarge


def has_python(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:  # bounded: a folder of data may have a million files
            return any(entry.name.endswith(".py") for entry in itertools.islice(entries, MOST_ENTRIES))
    except OSError:
        return False  # another user's, perhaps


def difference(old: Path, new: Path) -> str:
    """Which copied files are not the same, in words."""
    were, are = ({
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    } for folder in (old, new))
    names = [
        *(f"{name} has changed" for name in sorted(were) if are.get(name, were[name]) != were[name]),
        *(f"{name} is new" for name in sorted(set(are) - set(were))),
        *(f"{name} is gone" for name in sorted(set(were) - set(are))),
    ]
    more = f", and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def main(root: Path, place: Path, job: str) -> None:
    here, kept, new = Path.cwd(), place / f"slurm-{job}", place / f".new-{job}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)  # of a start that was killed while it copied
        copy(root, here, new)
        others = sorted(place.glob("slurm-*"), key=lambda path: path.stat().st_mtime)
        if kept.exists():
            if changed := difference(kept, new):
                say(f"this start runs the code of the first, {kept}; not what is there by now: {changed}")
            shutil.rmtree(new)
        else:
            if others and (changed := difference(others[-1], new)):
                job = others[-1].name[len("slurm-"):]
                say(f"the run was at last trained by job {job}, with other code: {changed}")
            new.rename(kept)
            say(f"every start of this job runs the code that is here now, kept in {kept}")
    except OSError as error:
        say(f"the code can't be kept in {place} ({error}): each start runs the checkout as it is then")
        return
    print(kept, kept if here == root else kept / "here", sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).absolute(), sys.argv[3])
