"""Fetch a data set once per node: one process downloads to a temporary name, checks and renames; the others wait.

Ranks that race for a download are a known way to corrupt it (one reads what another has half written), and asking
for the rank does not help: before the group exists every process believes that it is the first. A lock on a file does.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.data.sources.download import size_of
from train.errors import DataError

Say = Callable[[str], None]

TELL_S = 5.0
GRACE_S = 10.0  # those who wait give the one who downloads time to fail first, and then share its reason
ABANDONED_S = 3600.0
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


class NotFetched(DataError):
    """The data set could be fetched from nowhere: no network, or every place refused."""


@dataclass(frozen=True)
class Remote:
    """Where a data set is fetched from.

    folder: what torchvision makes below its root, and what appears here in the end; check: raises DataError unless
    that folder is whole; attributes: set on the torchvision class before it downloads (mirrors, resources);
    package and place: a Debian package, what to take from it, and the path below `folder` to put it at.
    """

    title: str
    folder: str
    torchvision: str
    check: Callable[[Path], object]
    package: str | None = None
    place: str = ""
    package_folder: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)


def fetch(remote: Remote, root: Path, *, timeout_s: float, say: Say) -> Path:
    """Return root/remote.folder, fetched and checked by this process or by another on this node.

    Raises NotFetched if it can be had from nowhere, DataError if `root` cannot be written or the process that
    downloads is not done in time.
    """
    root = root.absolute()  # the commands below run in other folders
    target = root / remote.folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        while not target.exists():
            with _turn(root / f".{remote.folder}.lock", remote.title, timeout_s=timeout_s, say=say) as turn:
                if turn is not None and not target.exists():
                    _download(remote, root, timeout_s=timeout_s, say=say, alone=turn)
    except OSError as error:
        raise DataError(
            f"{error.filename or root}: {remote.title} cannot be stored there ({error.strerror}). "
            "Name a folder with room that can be written in data_dir or RANKUP_CACHE."
        ) from error
    return target


@contextmanager
def _turn(path: Path, title: str, *, timeout_s: float, say: Say) -> Iterator[bool | None]:
    """Wait for the lock on `path`. Yields True while it is held, False on a file system without locks (go on,
    renaming keeps that safe), None if another process has just finished (look again).

    The one who holds it writes who it is into the file, on failure why, and removes the file; those who waited still
    have it open, read the reason and raise it too: no queue of processes that each try the same in vain.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        locked = _wait_for_lock(handle, path, title, timeout_s=timeout_s, say=say)
        if locked and not _is_open_as(handle, path):
            note = _read_note(handle)
            if note.startswith("failed: "):
                raise NotFetched(note.removeprefix("failed: "))
            yield None
            return
        _write_note(handle, f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield locked
        except NotFetched as error:
            _write_note(handle, f"failed: {error}")
            raise
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, path: Path, title: str, *, timeout_s: float, say: Say) -> bool:
    start = told = time.monotonic()
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        now = time.monotonic()
        if now - start > timeout_s + GRACE_S:
            raise DataError(
                f"{path.parent}: {_read_note(handle) or 'another process'} has not finished downloading {title} after "
                f"{now - start:.0f} s. Is it alive? (download_timeout_s is {timeout_s:g})"
            )
        if now - told >= TELL_S:
            told = now
            who = _read_note(handle) or "another process"
            say(f"waiting for {who} to download {title} ({now - start:.0f} s of at most {timeout_s:g} s)")
        time.sleep(0.1)


def _is_open_as(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _read_note(handle: int) -> str:
    return os.pread(handle, 4096, 0).decode(errors="replace")


def _write_note(handle: int, note: str) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, note.encode()[:4096], 0)


def _download(remote: Remote, root: Path, *, timeout_s: float, say: Say, alone: bool) -> None:
    """Fetch to a temporary folder beside the target, check, rename. Leaves nothing behind, whatever happens."""
    prefix = f".{remote.folder}.partial-"
    if alone:
        _remove_abandoned(root, prefix)
    temporary = Path(tempfile.mkdtemp(prefix=f"{prefix}{socket.gethostname()}-", dir=root))
    try:
        found = _from_anywhere(remote, temporary, timeout_s=timeout_s, say=say)
        # rename is atomic within one file system: a reader sees the whole folder or none
        try:
            found.rename(root / remote.folder)
        except OSError as error:
            # Without locks another may have been first; its folder was checked as ours was
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(root: Path, prefix: str) -> None:
    # We hold the lock, so what bears our host's name belongs to nobody alive. Locks may not reach across the nodes
    # that share a folder: what others made is only removed when it is old.
    for path in root.glob(f"{prefix}*"):
        ours = path.name.startswith(f"{prefix}{socket.gethostname()}-")
        if ours or time.time() - path.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)


def _from_anywhere(remote: Remote, temporary: Path, *, timeout_s: float, say: Say) -> Path:
    """Try torchvision's sources, then the Debian package; return the folder, checked."""
    start = time.monotonic()
    use_apt = remote.package is not None and shutil.which("apt-get") and shutil.which("dpkg")
    say(f"downloading {remote.title} to {temporary.parent} (once, at most {timeout_s:g} s)")
    tasks = [("torchvision", [remote.torchvision, json.dumps(dict(remote.attributes))])]
    if use_apt:
        tasks.append(("apt", [str(remote.package), remote.place]))
    reasons = []
    for number, (source, arguments) in enumerate(tasks, start=1):
        folder = temporary / source
        folder.mkdir()
        # The first of two gets half of the time, so that one that trickles leaves some for the other
        until = start + timeout_s * number / len(tasks)
        reason = _run([source, *arguments, str(folder)], folder, until=until, title=remote.title, say=say)
        made = folder / remote.folder
        if not reason:
            if source == "apt":
                (made / remote.package_folder).parent.mkdir(parents=True, exist_ok=True)
                (folder / "found").rename(made / remote.package_folder)
            try:
                remote.check(made)
                return made
            except DataError as error:
                reason = str(error).replace(f"{folder}{os.sep}", "")
        reasons.append(f"{source}: {reason}")
    raise NotFetched(f"{remote.title} cannot be downloaded ({'; '.join(reasons)}).")


def _run(task: list[str], folder: Path, *, until: float, title: str, say: Say) -> str:
    """Run download.py on one task; return why it failed, one line, or nothing."""
    log = folder.with_suffix(".log")
    # A name server that does not answer should cost seconds, not half a minute
    environment = {"RES_OPTIONS": "timeout:2 attempts:1", **os.environ}
    command = [sys.executable, "-P", str(Path(__file__).with_name("download.py")), *task]
    with log.open("wb") as output:
        # A group of its own, so that all of it can be ended; it also ends itself when its standard input closes
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    start = told = time.monotonic()
    try:
        while child.poll() is None:
            now = time.monotonic()
            if now > until:
                return f"not done after {now - start:.0f} s"
            if now - told >= TELL_S:
                told = now
                say(f"downloading {title}: {size_of(folder) / 1e6:.1f} MB after {now - start:.0f} s")
            time.sleep(0.05)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    if child.returncode == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"ended with {child.returncode}"
