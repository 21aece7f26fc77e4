"""Copies in a node's memory: a rescue, or parts of split state (see `rankup.state.parts`).

A rescue is a copy that a rank writes when it loses a peer, right before the rank ends (Gupta et al., "Just-In-Time
Checkpointing", EuroSys 2024). It is in `/dev/shm/rankup-<user id>/<run id>/step-00001234/`. If it can't be written
there, it is in the same folders of the temporary directory. A rescue is lost with its node, so it never replaces a
checkpoint. The part of rank 1 is in the folder `<run id>.rank-00001` next to `<run id>`.

One rank of a node writes its rescue, with a thread for each of the node's cores, while the other ranks wait. Several
ranks that each write some pieces of one file are no faster: 1 GiB took two processes 2.1 CPU seconds, and two threads
1.5. The file would also mix the states of ranks that differ, and be lost with any of these ranks.
"""

import contextlib
import fcntl
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from rankup.agent.ends import job_of
from rankup.agent.processes import memory_available
from rankup.errors import UserError
from rankup.places.files import open_regular, read_json, remove_unfinished
from rankup.places.lease import Lineage, kernel_id
from rankup.state.copies import CHUNK, STATE, Content, list_copies, list_whole, step_of, write_durably
from rankup.state.place import SECOND, Folder
from rankup.timing import ABANDONED_S, TURN_S

SHARED_MEMORY = Path("/dev/shm")  # Linux; absent elsewhere
STEP = re.compile(r"step-(\d+)")  # in the name of a copy, finished or not
T = TypeVar("T")


def homes() -> list[Path]:
    """Return the folders in which this user's runs may have their folders, the fastest first."""
    places = [SHARED_MEMORY, Path(tempfile.gettempdir())]
    return [place / f"rankup-{os.getuid()}" for place in places if place.is_dir()]


def is_held(path: Path) -> bool:
    """Return whether a file is in a folder of this user's runs in memory, where no other process changes it."""
    return any(home in path.parents for home in homes())


def node_id() -> str:
    """Return an id that is equal for two ranks if they see the same memory."""
    place = homes()[0].parent.stat()  # containers on one machine may see different memory
    return f"{kernel_id()} {place.st_dev} {place.st_ino}"


def in_memory(write: Callable[[Path], T], needed: float = 0, *, free: float = math.inf) -> T:
    """Call `write` with the first of the `homes` that it can write to, and return its result. The home's file system
    must have room for `needed` bytes, the `free` bytes too, and the memory if the home is in it. Raises UserError if no
    home will do."""
    problems = []
    for home in homes():
        try:
            home.mkdir(mode=0o700, exist_ok=True)  # private, because a rescue holds the weights
            if not _is_ours(home):
                raise PermissionError(f"{home} belongs to another user or is open to others")
            left = min(free, shutil.disk_usage(home.parent).free)
            if needed and home.parent == SHARED_MEMORY:  # its size is a limit, and says nothing about the memory
                left = min(left, memory_available())
            if left < needed:
                raise OSError(f"{home.parent} has {left / 2**20:.0f} MiB free, {needed / 2**20:.0f} are needed")
            return write(home)
        except (OSError, UserError) as error:
            problems.append(str(error))
    raise UserError("; ".join(problems))


def _folders() -> Iterator[Path]:
    """Yield the folders of this user's runs in the memory of this node."""
    for home in filter(_is_ours, homes()):  # nearly always there are none
        yield from home.glob("*")


def list_held() -> Iterator[Path]:
    """Yield the rescues and parts of all runs on this node, without checking their bytes."""
    for folder in _folders():
        yield from list_copies(folder)


def newest_step(run: str) -> int:
    """Return the step of the run's newest rescue on this node, 0 if it has none."""
    return max((step_of(path) for path in list_held() if path.parent.name == run), default=0)


def remove(run: str, keep: range = range(0)) -> None:
    """Remove what this node's memory holds of the run, finished or not, except for the steps in `keep`. Several ranks
    may call this at once, but not while a part is being written. A rescue being written must be of a step in `keep`."""
    for folder in _folders():
        if folder.name.partition(".")[0] == run:
            with contextlib.suppress(OSError):  # another rank has removed the folder, or something in it is kept
                for path in [*folder.iterdir()]:
                    if not ((named := STEP.search(path.name)) and int(named[1]) in keep):
                        shutil.rmtree(path, ignore_errors=True)
                folder.rmdir()


def remove_abandoned() -> None:
    """Remove copies that no run has resumed from for `ABANDONED_S`. They take memory from all users of the node."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


def keep_on_disk(run_dir: Path, jobs: Collection[str]) -> Path | None:
    """Copy the newest rescue of these `jobs` in this node's memory to the disk, where the next attempt finds it: to the
    checkpoints if the run is in `run_dir`, else to the second copies. Returns the new folder, or None if the disk has
    this step already, or another attempt has the run. Agents call this at the end of a job. Raises OSError and
    UserError."""
    wrote = ((path, str(read_json(path / STATE).get("attempt", ""))) for path in list_held())
    held = [path for path, attempt in wrote if "." not in path.parent.name and job_of(attempt) in jobs]
    if not held:
        return None
    rescue, line = max(held, key=step_of), Lineage.read(run_dir)
    owner = str(read_json(run_dir / "lease.json").get("attempt", ""))
    if line is not None and (line.run != rescue.parent.name or job_of(owner) not in jobs):
        return None
    folder = Folder(run_dir / "checkpoints" if line is not None else run_dir / SECOND / rescue.parent.name)
    if any(step_of(path) >= step_of(rescue) for path in list_whole(folder.path)):
        return None
    with folder.incoming(step_of(rescue)) as target:
        target.mkdir()
        for path in rescue.iterdir():
            with open_regular(path) as file:
                write_durably(target / path.name, iter(partial(file.read, CHUNK), b""))
        return folder.put(target)


def _is_ours(home: Path) -> bool:
    """Return whether only this user can write to `home`: all users of a machine may write to /dev/shm and /tmp."""
    with contextlib.suppress(OSError):
        facts = home.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    return False


def write_rescue(run: str, step: int, attempt: str, make_files: Callable[[], Mapping[str, Content]]) -> None:
    """Write a rescue where there is room, unless another rank of this node has written one in this `attempt`. A rescue
    of an earlier attempt does not count, because it may be damaged. `make_files` returns the files of the rescue, and
    is called only if they are needed. Raises UserError if they can't be written."""
    def open_folder(home: Path) -> int:
        (home / run).mkdir(exist_ok=True)
        return os.open(home / run, os.O_RDONLY)

    def is_written() -> bool:
        held = [read_json(path / STATE) for path in list_held() if path.parent.name == run and step_of(path) >= step]
        return any(record.get("attempt") == attempt for record in held)

    def save(home: Path) -> None:
        if alone:
            remove_unfinished(home / run)
        Folder(home / run, durable=False).write(step, files)  # a slow disk may take minutes to sync

    remove_abandoned()
    folder = in_memory(open_folder)
    try:
        alone = _take_turn(folder, run, is_written)
        if not is_written():
            files = make_files()
            # Twice the size must be free, because DataLoader workers and NCCL need shared memory too
            in_memory(save, 2 * sum(map(len, files.values())))
    finally:
        os.close(folder)


def _take_turn(folder: int, run: str, is_written: Callable[[], bool]) -> bool:
    """Lock the `folder`, because the ranks of a node come here at the same time, and one writes at a time. If a rank is
    killed while it writes, the kernel frees its lock. Return False without the lock if nothing is left to write, or if
    the rank that writes hangs: its GPU may be why the ranks end."""
    newest, until_s = -1, 0.0
    while not is_written():
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if (now := _last_write(run)) > newest:
            # All who wait see the last write at once, and one of them should be the first to give up
            newest, until_s = now, time.monotonic() + TURN_S * (1 + secrets.randbelow(100) / 100)
        elif time.monotonic() > until_s:
            break
        time.sleep(0.02)
    return False


def _last_write(run: str) -> int:
    """Return when this node last wrote to the run's rescues, in nanoseconds."""
    try:
        return max(path.stat().st_mtime_ns for home in homes() for path in (home / run).rglob("*"))
    except (OSError, ValueError):  # one is removed at this moment, or none exists
        return 0
