"""Find a data set, or fetch it once per node: one process downloads to a temporary name, checks and renames; the others
wait. Other jobs on the node may want the same data, so a lock on a file decides which one."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rankup import UserError, cache_roots

GRACE_S = 10.0  # waiters wait this much longer than a download may take: it fails first, and they learn its reason
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
    here: Path | None = None  # where it lies, if it ships with the program
    package: str = ""  # Debian's, for a network that mirrors only Debian
    packed: Path | None = None  # where that puts it, in .gz files

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
    """The folder that holds the data set: in data_dir if it is given, otherwise where it ships, or in the cache;
    fetched if need be. Raises UserError for a data_dir that holds something else, and as `fetch` does."""
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
        say(f"fetching {remote.kind} to {root}, or waiting for the process that does (at most {timeout_s:g} s)")
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
        late = f"after {timeout_s:g} s (see setup_timeout_s). Is it alive?"
        raise UserError(f"{root}: another process has not finished downloading {remote.kind} {late}") from error
    except OSError as error:
        why = f"{remote.kind} cannot be stored there ({error.strerror}). Set --data-dir or RANKUP_CACHE."
        raise UserError(f"{error.filename or root}: {why}") from error


def _download(remote: Remote, target: Path, *, timeout_s: float) -> None:
    """From Debian's package if it is installed, else from the web, else from the package's file: to a temporary folder
    beside the target, check, rename."""
    for path in target.parent.glob(f".{target.name}.partial-*"):  # of processes that were killed
        shutil.rmtree(path, ignore_errors=True)
    reasons = []
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.partial-", dir=target.parent) as temporary:
        sources = {}
        if remote.packed and remote.packed.is_dir():
            sources["package"] = _unpack(remote.packed, remote.folder)
        sources["web"] = [[sys.executable, "-W", "ignore", "-c", DOWNLOAD, remote.kind]]
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
    """The files of the package, without root. A bare container has no lists of packages: they come first."""
    # As root, apt switches to a user who may not write here, unless the first option keeps it from doing so
    options = ["APT::Sandbox::User=root", "Acquire::Retries=0", f"Acquire::http::Timeout={SILENCE_S}",
               f"Dir::State::Lists={folder}/lists", f"Dir::Cache={folder}/cache"]
    apt = ["apt-get", *(word for option in options for word in ("-o", option))]
    return [
        ["mkdir", "-p", "lists/partial", "cache/archives/partial"],
        [*apt, "update"],  # some of the lists may be enough
        [*apt, "download", remote.package],
        ["sh", "-c", "dpkg -x *.deb files"],
        *_unpack(Path(f"files{remote.packed}"), remote.folder),
    ]


def _unpack(packed: Path, folder: str) -> list[list[str]]:
    """Once: it would take a third of a second at each start of each rank."""
    return [["mkdir", "-p", folder], ["sh", "-c", f"cp {packed}/*.gz {folder} && gunzip {folder}/*"]]


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
