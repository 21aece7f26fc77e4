"""Fetch a data set once per node: one process downloads to a temporary name, checks and renames; the others wait.

Ranks that download at the same time can corrupt the data: one reads what another has half written. To let local rank 0
do it is not enough, because other jobs on the node may want the same data. So a lock on a file decides.
"""

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
from typing import Any, BinaryIO, TypeVar

from rankup.errors import DataError
from train.data.sources.download import size_of
from train.data.sources.locks import NO_LOCKS

Say = Callable[[str], None]
Found = TypeVar("Found")

REPORT_EVERY_S = 5.0
GRACE_S = 10.0  # waiters wait this much longer than a download may take: it fails first, and they learn its reason
ABANDONED_S = 3600.0
FAILED = "failed: "


class NotFetched(DataError):
    """No source gave the data set: there is no network, or each of them refused."""


@dataclass(frozen=True)
class Remote:
    """Where a data set is fetched from.

    The second source is a Debian package: a bare container in a network that mirrors only Debian can still have it.
    """

    title: str
    folder: str  # what torchvision makes below its root, and what appears here in the end
    torchvision: str  # the class in torchvision.datasets
    check: Callable[[Path], object]  # raises DataError unless that folder is complete
    package: str | None = None  # the Debian package
    place: str = ""  # the folder to take from the package
    package_folder: str = ""  # where below `folder` to put it
    attributes: Mapping[str, Any] = field(default_factory=dict)  # set on the torchvision class: mirrors, resources


def print_to_stderr(line: str) -> None:
    """The usual `say`."""
    print(line, file=sys.stderr, flush=True)


def fetch(remote: Remote, root: Path, *, timeout_s: float, say: Say) -> Path:
    """Return root/remote.folder, fetched and checked by this process or by another on this node.

    `say` gets a line now and then. Raises NotFetched if no source gives it, DataError if `root` cannot be written or
    the process that downloads does not finish within `timeout_s`.
    """
    root = root.absolute()  # the commands below run in other folders
    target = root / remote.folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        while not target.exists():
            with _turn(root / f".{remote.folder}.lock", remote.title, timeout_s=timeout_s, say=say) as turn:
                if turn is not None and not target.exists():
                    _download(remote, root, timeout_s=timeout_s, say=say, locked=turn)
    except OSError as error:
        raise DataError(
            f"{error.filename or root}: {remote.title} cannot be stored there ({error.strerror}). "
            "Name a folder with room that can be written in data_dir or RANKUP_CACHE."
        ) from error
    return target


def call_once(
    task: list[str], lock: Path, title: str, *, look: Callable[[], Found | None], timeout_s: float, say: Say
) -> Found | None:
    """Let download.py do a task that keeps what it downloads in a cache of its own; what `look` finds there then.

    One process of this node does it, the others wait for it. Raises NotFetched, with the reason, if it fails.
    """
    while (found := look()) is None:
        with _turn(lock, title, timeout_s=timeout_s, say=say) as turn:
            if turn is None or (found := look()) is not None:
                continue
            say(f"downloading {title} (once, at most {timeout_s:g} s)")
            with tempfile.TemporaryDirectory(prefix="rankup-download-") as folder:
                until = time.monotonic() + timeout_s
                reason = _run(task, Path(folder) / "data", until=until, title=title, say=say)
            if reason:
                raise NotFetched(f"{title} cannot be downloaded ({reason}).")
            return look()
    return found


@contextmanager
def _turn(path: Path, title: str, *, timeout_s: float, say: Say) -> Iterator[bool | None]:
    """Wait for the lock on `path`. Yields True while it is held; False on a file system without locks (go on: renaming
    keeps that safe); None if another process has just finished (look again).

    Its owner writes who it is into the file, on failure why, and removes the file. Processes that waited still have it
    open: they read the reason and raise it too, instead of trying the same in vain one after the other. The package
    filelock cannot do that: when it truncates or removes its file differs from version to version.
    """
    with path.open("a+b", buffering=0) as file:
        locked = _wait_for_lock(file, path, title, timeout_s=timeout_s, say=say)
        if locked and _was_removed(file, path):
            if (note := _read_note(file)).startswith(FAILED):
                raise NotFetched(note.removeprefix(FAILED))
            yield None
            return
        _write_note(file, f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield locked
        except NotFetched as error:
            _write_note(file, f"{FAILED}{error}")
            raise
        finally:
            path.unlink(missing_ok=True)


def _wait_for_lock(file: BinaryIO, path: Path, title: str, *, timeout_s: float, say: Say) -> bool:
    """True once the lock is ours, False if there are no locks here. Raises DataError if its owner takes too long."""
    start = reported = time.monotonic()
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        now = time.monotonic()
        owner = _read_note(file) or "another process"
        if now - start > timeout_s + GRACE_S:
            raise DataError(
                f"{path.parent}: {owner} has not finished downloading {title} after {now - start:.0f} s. "
                f"Is it alive? (download_timeout_s is {timeout_s:g})"
            )
        if now - reported >= REPORT_EVERY_S:
            reported = now
            say(f"waiting for {owner} to download {title} ({now - start:.0f} s of at most {timeout_s:g} s)")
        time.sleep(0.1)


def _was_removed(file: BinaryIO, path: Path) -> bool:
    # Not st_nlink == 0: NFS renames a file that is removed while it is open.
    try:
        return not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return True


def _read_note(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(4096).decode(errors="replace")


def _write_note(file: BinaryIO, note: str) -> None:
    file.truncate(0)  # what is written is appended: the file was opened so, to create it without truncating it
    file.write(note.encode()[:4096])


def _download(remote: Remote, root: Path, *, timeout_s: float, say: Say, locked: bool) -> None:
    """Fetch to a temporary folder beside the target, check, rename. Leaves nothing else behind, whatever happens."""
    prefix = f".{remote.folder}.partial-"
    if locked:
        _remove_abandoned(root, prefix)
    temporary = Path(tempfile.mkdtemp(prefix=f"{prefix}{socket.gethostname()}-", dir=root))
    try:
        found = _from_anywhere(remote, temporary, timeout_s=timeout_s, say=say)
        # rename is atomic within one file system: a reader sees the whole folder or nothing.
        try:
            found.rename(root / remote.folder)
        except OSError as error:
            # Without locks another process may have been first; its folder was checked as ours was.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(root: Path, prefix: str) -> None:
    # We hold the lock, so no process of this host is downloading. Locks may not reach the other nodes that share the
    # folder: what was made by another host is removed only when it is old.
    for path in root.glob(f"{prefix}*"):
        ours = path.name.startswith(f"{prefix}{socket.gethostname()}-")
        if ours or time.time() - path.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)


def _from_anywhere(remote: Remote, temporary: Path, *, timeout_s: float, say: Say) -> Path:
    """Try torchvision's sources, then the Debian package; return the checked folder. Raises NotFetched."""
    start = time.monotonic()
    say(f"downloading {remote.title} to {temporary.parent} (once, at most {timeout_s:g} s)")
    tasks = [("torchvision", [remote.torchvision, json.dumps(dict(remote.attributes))])]
    if remote.package and shutil.which("apt-get") and shutil.which("dpkg"):
        tasks.append(("apt", [remote.package, remote.place]))
    reasons = []
    for number, (source, arguments) in enumerate(tasks, start=1):
        folder = temporary / source
        folder.mkdir()
        # The first of two sources gets half of the time: a slow one leaves the other a chance.
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
    """Run download.py on one task until the moment `until`; return why it failed, in one line, or ""."""
    log = folder.with_suffix(".log")
    # A name server that does not answer should cost seconds, not half a minute.
    environment = {"RES_OPTIONS": "timeout:2 attempts:1", **os.environ}
    command = [sys.executable, "-P", str(Path(__file__).with_name("download.py")), *task]
    with log.open("wb") as output:
        # A process group of its own, so that apt-get can be killed with it. It also ends when its standard input
        # closes, which happens when this process dies.
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )
    start = reported = time.monotonic()
    try:
        while child.poll() is None:
            now = time.monotonic()
            if now > until:
                return f"not done after {now - start:.0f} s"
            if now - reported >= REPORT_EVERY_S:
                reported = now
                so_far = f"{size_of(folder) / 1e6:.1f} MB " if folder.exists() else ""
                say(f"downloading {title}: {so_far}after {now - start:.0f} s")
            time.sleep(0.05)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    if child.returncode == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"ended with {child.returncode}"
