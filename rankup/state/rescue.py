"""The rescue: a copy that a rank writes to its node's memory when it loses a peer, right before it ends (Gupta et al.,
"Just-In-Time Checkpointing", EuroSys 2024).

It lies in `/dev/shm/rankup-<user id>/<run id>/step-00001234/`, or where that has too little room in the same folders of
the temporary directory. It is lost with its node, so it never replaces a checkpoint.
"""

import contextlib
import fcntl
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from rankup.errors import UserError
from rankup.state import copies
from rankup.state.copies import Content, list_copies, step_of
from rankup.timing import RESCUE_OLD_S

SHARED_MEMORY = Path("/dev/shm")  # Linux; absent elsewhere
ROOM = 2.0  # times its size: the ranks' own buffers live in shared memory too


def places() -> list[Path]:
    """Where a rescue may lie, the fastest first."""
    return [place for place in (SHARED_MEMORY, Path(tempfile.gettempdir())) if place.is_dir()]


def write(run: str, step: int, make_files: Callable[[], Mapping[str, Content]]) -> str:
    """Write the files of a copy where there is room, unless another rank of this node has done so already. `make_files`
    is called if they are needed. Returns why they were not written anywhere, or ""."""
    files: Mapping[str, Content] = {}
    problems = []
    for place in places():
        try:
            remove_old(place)
            folder = make_folder(place, run)
            with (folder / ".lock").open("a", encoding="ascii") as lock:
                # The ranks of a node come here together. Each waits for the one before: the kernel frees the lock of
                # one that is killed while it writes
                fcntl.flock(lock, fcntl.LOCK_EX)
                if any(step_of(path) >= step for path in list_copies(folder)):
                    return ""
                files = files or make_files()
                check_room(place, ROOM * sum(map(len, files.values())))
                copies.remove_unfinished(folder)
                copies.save(folder, files, step=step, keep=1)
                return ""
        except (OSError, UserError) as error:
            problems.append(str(error))
    return "; ".join(problems)


def remove(run: str, *, keep: range = range(0)) -> None:
    """Remove this node's rescues of the run, but those of the steps in `keep`. Several ranks may do it at once."""
    for folder in (_folder(place, run) for place in places()):
        if not _is_ours(folder):  # nearly always there is none: a save costs no more than this look
            continue
        for path in list_copies(folder):
            if step_of(path) not in keep:
                shutil.rmtree(path, ignore_errors=True)
        if not list_copies(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run has its folder there
                folder.parent.rmdir()


def found(*, parts: bool = False) -> Iterator[Path]:
    """The rescues of all runs on this node, or the parts that `rankup.state.parts` keeps, whose folders have a dot in
    their names. Their bytes are not looked at yet."""
    for folder in (folder for place in places() for folder in _folder(place, "any").parent.glob("*")):
        if ("." in folder.name) == parts and _is_ours(folder):
            yield from list_copies(folder)


@contextlib.contextmanager
def beside_a_blocked_stream(device: torch.device) -> Iterator[None]:
    """Copy from a GPU whose usual stream may wait for a dead rank for ever."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


# Folders -------------------------------------------------------------------------------------------------------------


def _folder(place: Path, run: str) -> Path:
    return place / f"rankup-{os.getuid()}" / run


def make_folder(place: Path, run: str) -> Path:
    """The folder, which only this user can read: a rescue holds the weights. Raises OSError."""
    folder = _folder(place, run)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(folder):
        raise PermissionError(f"{folder.parent} belongs to another user or is open to others")
    return folder


def check_room(place: Path, needed: float, *, free: float = math.inf) -> None:
    """Raises OSError where fewer bytes than `needed` are free there, or of the memory, of which `free` are."""
    if (left := min(free, shutil.disk_usage(place).free)) < needed:
        raise OSError(f"{place} has {left / 2**20:.0f} MiB free, {needed / 2**20:.0f} are needed")


def remove_old(place: Path) -> None:
    """Remove what runs left behind that nobody went on with: it takes memory from all users of the node."""
    for folder in _folder(place, "any").parent.glob("*"):
        with contextlib.suppress(OSError):
            if _is_ours(folder) and time.time() - folder.stat().st_mtime > RESCUE_OLD_S:
                shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Whether nobody else could have put anything there: all users of a machine may write to /dev/shm and /tmp."""
    with contextlib.suppress(OSError):
        facts = [path.lstat() for path in (folder.parent, folder)]
        return all(stat.S_ISDIR(f.st_mode) and f.st_uid == os.getuid() and not f.st_mode & 0o077 for f in facts)
    return False
