"""Find a data set of torchvision on this machine, or download it once per node. One process, chosen by a file lock that
other jobs share, downloads to a temporary name and renames the folder. The others wait."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rankup import UserError, cache_roots

SILENCE_S = 10  # give up when a server has sent nothing for this long
FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk is the user's mistake: do not try other sources or other data

# torchvision knows the address and the md5 of each file. It runs in its own process, which a timeout can kill
DOWNLOAD = f"""
import contextlib, ctypes, io, socket, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # the kernel kills this process when its parent dies
from torchvision import datasets
socket.setdefaulttimeout({SILENCE_S})
try:
    with contextlib.redirect_stderr(io.StringIO()):  # hide the progress bar
        getattr(datasets, sys.argv[1])(".", download=True)
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""


class NotFetched(UserError):
    """No source has provided the data set: there is no network, or each source refused."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A data set that torchvision reads and downloads."""

    kind: str  # the class in torchvision.datasets
    folder: str  # the folder of this data set below torchvision's root
    package: str = ""  # Debian's package, which a user may install where the web does not answer
    packed: Path | None = None  # where the package puts the .gz files that belong into `folder`/raw
    mean: tuple[float, ...] = ()  # mean, std: one per channel, of the training images / 255
    std: tuple[float, ...] = ()
    mirror: bool = True  # whether a mirrored image still shows its class: a mirrored 2 is no 2


# `dataset` -> its entry. A data set that torchvision reads needs nothing else
KNOWN = {
    # Pictures of clothes (Xiao et al. 2017), the default
    "fashion-mnist": Remote(
        kind="FashionMNIST", folder="FashionMNIST", mean=(0.2860,), std=(0.3530,),
        package="dataset-fashion-mnist", packed=Path("/usr/share/datasets/fashion-mnist"),
    ),
    # Handwritten digits (LeCun et al. 1998)
    "mnist": Remote(kind="MNIST", folder="MNIST", mean=(0.1307,), std=(0.3081,), mirror=False),
    "cifar10": Remote(
        kind="CIFAR10", folder="cifar-10-batches-py", mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)
    ),
    # Also handwritten digits, 1438 and 359 of 8 x 8 pixels, in MNIST's layout. They ship with this program
    "digits": Remote(kind="MNIST", folder="MNIST", mean=(0.2873,), std=(0.3537,), mirror=False),
}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def locate(remote: Remote, *, data_dir: str | None, timeout_s: float) -> Path:
    """Return torchvision's root, which contains the folder of the data set: data_dir if it is given, otherwise a cache.
    Fetch the data set if it is not there. Raises UserError as `fetch` does."""
    roots = cache_roots() if data_dir is None else [Path(data_dir).expanduser()]
    for root in roots:
        if os.path.isdir(root / remote.folder):
            return root
    root = (writable_cache() if data_dir is None else roots[0]).absolute()
    fetch(remote, root / remote.folder, timeout_s=timeout_s)
    return root


def fetch(remote: Remote, target: Path, *, timeout_s: float) -> None:
    """Download the folder `target`, or wait for another process on this node that does. If that process fails, this one
    raises the same reason. Raises NotFetched if no source provides the data within `timeout_s`, and UserError if
    `target` can't be written."""
    from filelock import FileLock  # here because most runs download nothing

    root, failed, began_s = target.parent, target.with_name(f".{target.name}.failed"), time.time()
    try:
        root.mkdir(parents=True, exist_ok=True)
        say(f"fetching {remote.kind} to {root}, or waiting for the process that does")
        # The kernel releases the lock when its owner dies
        with FileLock(target.with_name(f".{target.name}.lock")):
            if target.exists():
                return
            if failed.exists() and failed.stat().st_mtime > began_s:
                raise NotFetched(failed.read_text(errors="replace"))
            try:
                _download(remote, target, timeout_s=timeout_s)
            except NotFetched as error:
                failed.write_text(str(error))
                raise
    except OSError as error:
        why = f"{remote.kind} cannot be stored there ({error.strerror}). Set --data-dir or RANKUP_CACHE."
        raise UserError(f"{error.filename or root}: {why}") from error


def _download(remote: Remote, target: Path, *, timeout_s: float) -> None:
    """Get the data from Debian's package if it is installed, else from the web. Write to a temporary folder next to the
    target, then rename it."""
    for path in target.parent.glob(f".{target.name}.partial-*"):  # left by processes that were killed
        shutil.rmtree(path, ignore_errors=True)
    reasons = []
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.partial-", dir=target.parent) as temporary:
        sources = {}
        if remote.packed and remote.packed.is_dir():
            sources["package"] = _unpack(remote.packed, remote.folder)
        sources["web"] = [[sys.executable, "-W", "ignore", "-c", DOWNLOAD, remote.kind]]
        for name, commands in sources.items():
            folder = Path(temporary) / name
            folder.mkdir()
            try:
                _run(commands, folder, time.monotonic() + timeout_s / len(sources))
            except subprocess.TimeoutExpired:
                reasons.append(f"{name}: timed out")
            except OSError as error:
                if error.errno in FULL:
                    raise
                reasons.append(f"{name}: {' '.join(str(error).split())}".replace(f"{folder}{os.sep}", ""))
            else:
                (folder / target.name).rename(target)  # atomic: other processes see the whole folder or nothing
                return
    debian = remote.package and shutil.which("apt-get")
    copy = f"Type `apt-get install {remote.package}`, or copy" if debian else "Copy"
    raise NotFetched(
        f"{remote.kind} is not in {target.parent} and cannot be downloaded ({'; '.join(reasons)}). {copy} "
        f"the folder {target.name} from a machine that has it, and set data_dir to its place; dataset digits needs no "
        f"download."
    )


def _unpack(packed: Path, folder: str) -> list[list[str]]:
    return [["mkdir", "-p", f"{folder}/raw"], ["sh", "-c", f"cp {packed}/*.gz {folder}/raw && gunzip {folder}/raw/*"]]


def _run(commands: list[list[str]], folder: Path, until_s: float) -> None:
    """Run the commands in turn. If the last one fails, raise OSError: of a full disk, or with the last two lines of
    output."""
    lines: list[str] = []
    for command in commands:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env={**os.environ, "LC_ALL": "C"}, check=False,
            timeout=max(0.0, until_s - time.monotonic()),
        )
        lines += done.stdout.splitlines()
    if done.returncode:
        for number in FULL:
            if os.strerror(number) in "\n".join(lines):
                raise OSError(number, os.strerror(number))
        raise OSError(" ".join(lines[-2:]) or f"{command[0]} ended with {done.returncode}")


def writable_cache() -> Path:
    """Return the first cache folder that can be written, and create it if needed. Raises UserError if there is none."""
    roots = cache_roots()
    for root in roots:
        with suppress(OSError):
            # 0o700: the cache may be in a shared temporary folder, and other users must not write into it.
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(root, os.W_OK | os.X_OK):
            return root
    raise UserError(f"{' and '.join(map(str, roots))}: cannot be written. Set --data-dir or RANKUP_CACHE.")
