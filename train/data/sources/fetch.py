"""Find a data set, or fetch it once per node: one process downloads to a temporary name, checks and renames; the others
wait. Other jobs on the node may want the same data, so a lock on a file decides which one."""

import contextlib
import fcntl
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rankup import UserError, cache_roots

GRACE_S = 10.0  # waiters wait this much longer than a download may take: it fails first, and they learn its reason
KEPT_BYTES = 1 << 20  # a packed file from this size on is unpacked once
SILENCE_S = 10  # give up when a server has sent nothing for this long

# torchvision knows the addresses and the md5 of each file. It runs in a process of its own, which can be ended in time
DOWNLOAD = f"""
import ctypes, socket, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # it dies with the process that waits for it
from torchvision import datasets
socket.setdefaulttimeout({SILENCE_S})
try:
    getattr(datasets, sys.argv[1])(".", download=True)
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""


class NotFetched(UserError):
    """No source gave the data set: there is no network, or each of them refused."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A data set that torchvision can download."""

    kind: str  # the class of torchvision.datasets
    folder: str  # where that keeps it, below its root
    files: tuple[str, ...]  # what lies in that folder, plain or .gz
    here: Path | None = None  # where Debian's package puts it
    package: str = ""  # Debian's, for a network that mirrors only Debian

    def find(self, root: Path) -> Path | None:
        """The folder that holds the files, if they are there: `root` itself, or torchvision's below it."""
        folders = (root, root / self.folder)
        return next((folder for folder in folders if all(file_in(folder, name) for name in self.files)), None)

    def check(self, folder: Path) -> None:
        """Raises UserError unless the first part of `self.folder` is complete."""


def file_in(folder: Path, name: str) -> Path | None:
    # The plain file first: where both are there, it needs no unpacking
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def locate(remote: Remote, *, data_dir: str | None, timeout_s: float) -> Path:
    """The folder that holds the data set: in data_dir if it is given, otherwise where Debian's package has it, or in
    the cache; fetched if need be. Raises UserError for a data_dir that holds something else, and as `fetch` does."""
    others: list[str] = []
    if data_dir is None:
        places = [place for place in (remote.here, *cache_roots()) if place is not None]
    else:
        places = [Path(data_dir).expanduser()]
        try:  # before the search: what another process renames into place is then found
            others = sorted(name for name in os.listdir(places[0]) if not name.startswith("."))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError(f"{data_dir}: data_dir must be a folder that can be read ({error.strerror}).") from error
    for place in places:
        if (found := remote.find(place)) is not None:
            return found
    if others:
        needs = f"the files of {remote.kind} ({', '.join(remote.files)}; plain or .gz)"
        way_out = "Set --data-dir to the right folder, or to an empty one."
        raise UserError(f"{data_dir}: must hold {needs}, got {others[0]}. {way_out}")
    root = (writable_cache() if data_dir is None else places[0]).absolute()
    fetch(remote, root / Path(remote.folder).parts[0], timeout_s=timeout_s)
    return root / remote.folder


def fetch(remote: Remote, target: Path, *, timeout_s: float) -> None:
    """Have the folder `target` fetched and checked by this process or by another on this node. Those who waited for one
    that failed raise the same reason. Raises NotFetched if no source gives the data, UserError if `target` cannot be
    written or the process that downloads does not finish within `timeout_s`."""
    from filelock import FileLock, Timeout  # here: for what downloads nothing

    root, failed, began_s = target.parent, target.with_name(f".{target.name}.failed"), time.time()
    try:
        root.mkdir(parents=True, exist_ok=True)
        say(f"downloading {remote.kind} to {root}, or waiting for the process that does (at most {timeout_s:g} s)")
        # The kernel takes the lock back when its owner dies
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=timeout_s + GRACE_S):
            if target.exists():
                return
            if failed.exists() and failed.stat().st_mtime > began_s:
                raise NotFetched(failed.read_text(errors="replace"))
            try:
                _download(remote, target, timeout_s=timeout_s)
            except NotFetched as error:
                failed.write_text(str(error))
                raise
    except Timeout as error:
        late = f"after {timeout_s:g} s (download_timeout_s). Is it alive?"
        raise UserError(f"{root}: another process has not finished downloading {remote.kind} {late}") from error
    except OSError as error:
        why = f"{remote.kind} cannot be stored there ({error.strerror}). Set --data-dir or RANKUP_CACHE."
        raise UserError(f"{error.filename or root}: {why}") from error


def _download(remote: Remote, target: Path, *, timeout_s: float) -> None:
    """From the web, else from Debian's package: to a temporary folder beside the target, check, rename."""
    for path in target.parent.glob(f".{target.name}.partial-*"):  # of processes that were killed
        shutil.rmtree(path, ignore_errors=True)
    reasons = []
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.partial-", dir=target.parent) as temporary:
        sources = {"web": [[sys.executable, "-W", "ignore", "-c", DOWNLOAD, remote.kind]]}
        if remote.package and shutil.which("apt-get") and shutil.which("dpkg"):
            sources["apt"] = _of_debian(remote, Path(temporary) / "apt")
        for name, commands in sources.items():
            folder = Path(temporary) / name
            folder.mkdir()
            try:
                _run(commands, folder, time.monotonic() + timeout_s / len(sources))
                remote.check(folder / target.name)
            except subprocess.TimeoutExpired:
                reasons.append(f"{name}: timed out")
            except (OSError, UserError) as error:
                reasons.append(f"{name}: {' '.join(str(error).split())}".replace(f"{folder}{os.sep}", ""))
            else:
                (folder / target.name).rename(target)  # atomic: a reader sees the whole folder or nothing
                return
    raise NotFetched(
        f"{remote.kind} cannot be downloaded ({'; '.join(reasons)}). Bring the files from a machine that can, and set "
        "data_dir to their folder; dataset digits needs no download."
    )


def _of_debian(remote: Remote, folder: Path) -> list[list[str]]:
    """Unpack the folder of the package, without root. A bare container has no lists of packages: they come first."""
    # As root, apt switches to a user who may not write here, unless the first option keeps it from doing so
    options = ["APT::Sandbox::User=root", "Acquire::Retries=0", f"Acquire::http::Timeout={SILENCE_S}",
               f"Dir::State::Lists={folder}/lists", f"Dir::Cache={folder}/cache"]
    apt = ["apt-get", *(word for option in options for word in ("-o", option))]
    return [
        ["mkdir", "-p", "lists/partial", "cache/archives/partial", str(Path(remote.folder).parent)],
        [*apt, "update"],  # some of the lists may be enough
        [*apt, "download", remote.package],
        ["sh", "-c", f"dpkg -x *.deb unpacked && mv unpacked{remote.here} {remote.folder}"],
    ]


def _run(commands: list[list[str]], folder: Path, until_s: float) -> None:
    """One after the other. If the last one fails, OSError with apt's first two errors, else the last two lines."""
    lines: list[str] = []
    for command in commands:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env={**os.environ, "LC_ALL": "C", "TQDM_DISABLE": "1"}, check=False,  # no bar in a reason
            timeout=max(0.0, until_s - time.monotonic()),
        )
        lines += done.stdout.splitlines()
    if done.returncode:
        errors = [line for line in lines if line.startswith(("E:", "Err:"))]
        raise OSError(" ".join(errors[:2] or lines[-2:]) or f"{command[0]} ended with {done.returncode}")


def unpacked(path: Path, unpack: Callable[[], bytes]) -> bytearray | mmap.mmap:
    """What `unpack` makes of the gzip file `path`. Of a large one the cache keeps it: the ranks of this node share its
    memory, and one that is started again has it at once."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(-min(size, 8), os.SEEK_END)
        mark = f"{size:x}-{file.read().hex()}"  # which ends with the checksum and the size of what was packed
    if size < KEPT_BYTES:
        return bytearray(unpack())
    try:
        kept = writable_cache() / "unpacked" / f"{path.stem}-{mark}"
        kept.parent.mkdir(exist_ok=True)
        is_there = kept.exists()  # raises in the folder of another user with a strict umask
    except (OSError, UserError):  # each rank holds its own
        return bytearray(unpack())
    content = b"" if is_there else unpack()
    try:
        if content:
            for left in kept.parent.glob("tmp*"):  # of writers that were killed
                with contextlib.suppress(OSError), left.open("ab") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink()
            with tempfile.NamedTemporaryFile(dir=kept.parent) as staging:
                with contextlib.suppress(OSError):  # some network file systems have no such locks
                    fcntl.flock(staging, fcntl.LOCK_EX)  # which ends with this process
                staging.write(content)
                staging.flush()  # where the disk is full it fails here, not after the link
                os.fsync(staging.fileno())  # after a power cut it must not look whole
                os.link(staging.name, kept)
        with kept.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):  # no room, or another rank was first
        return bytearray(content or unpack())


def writable_cache() -> Path:
    """The first cache folder that can be written, created if it is missing. Raises UserError if there is none."""
    roots = cache_roots()
    for root in roots:
        try:
            # 0o700: in a shared temporary folder nobody else should write into ours.
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(root, os.W_OK | os.X_OK):
            return root
    raise UserError(f"{' and '.join(map(str, roots))}: cannot be written. Set --data-dir or RANKUP_CACHE.")
