"""Fetch a data set once per node: one process downloads to a temporary name, checks and renames; the others wait.

Ranks that download at the same time can corrupt the data: one reads what another has half written. To let local rank 0
do it is not enough, because other jobs on the node may want the same data. So a lock on a file decides.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankup import UserError, cache_roots

Say = Callable[[str], None]

GRACE_S = 10.0  # waiters wait this much longer than a download may take: it fails first, and they learn its reason
SILENCE_S = 10.0  # give up when a server has sent nothing for this long


class NotFetched(UserError):
    """No source gave the data set: there is no network, or each of them refused."""


@dataclass(frozen=True)
class Remote:
    """Where a data set is fetched from.

    The second source is a Debian package: a bare container in a network that mirrors only Debian can still have it.
    """

    title: str
    folder: str  # what appears below the root in the end
    files: Callable[[], Sequence[tuple[Sequence[str], str]]]  # the addresses of each file, and its md5; unpacked ...
    inside: str  # ... into this folder
    check: Callable[[Path], object]  # raises UserError unless `folder` is complete
    package: str | None = None  # the Debian package
    place: str = ""  # the folder to take from the package in place of `inside`


def print_to_stderr(line: str) -> None:
    """The usual `say`."""
    print(line, file=sys.stderr, flush=True)


def fetch(remote: Remote, root: Path, *, timeout_s: float, say: Say) -> Path:
    """Return root/remote.folder, fetched and checked by this process or by another on this node.

    If the download fails, the processes that waited for it raise the same reason, instead of trying the same in vain
    one after the other. Raises NotFetched if no source gives the data, UserError if `root` cannot be written or the
    process that downloads does not finish within `timeout_s`.
    """
    target = root.absolute() / remote.folder
    if target.exists():
        return target
    from filelock import FileLock, Timeout  # here: for what downloads nothing

    failed, began_s = target.with_name(f".{remote.folder}.failed"), time.time()
    try:
        root.mkdir(parents=True, exist_ok=True)
        say(f"downloading {remote.title} to {root}, or waiting for the process that does (at most {timeout_s:g} s)")
        # The kernel takes the lock back when its owner dies
        with FileLock(target.with_name(f".{remote.folder}.lock"), timeout=timeout_s + GRACE_S):
            if target.exists():
                return target
            if failed.exists() and failed.stat().st_mtime > began_s:
                raise NotFetched(failed.read_text(errors="replace"))
            try:
                _download(remote, target, timeout_s=timeout_s)
            except NotFetched as error:
                failed.write_text(str(error))
                raise
    except Timeout as error:
        raise UserError(
            f"{root}: another process has not finished downloading {remote.title} after {timeout_s:g} s "
            "(download_timeout_s). Is it alive?"
        ) from error
    except OSError as error:
        raise UserError(
            f"{error.filename or root}: {remote.title} cannot be stored there ({error.strerror}). "
            "Name a folder with room that can be written in data_dir or RANKUP_CACHE."
        ) from error
    return target


def _download(remote: Remote, target: Path, *, timeout_s: float) -> None:
    """From the web, else from the Debian package: to a temporary folder beside the target, check, rename."""
    for path in target.parent.glob(f".{remote.folder}.partial-*"):  # of processes that were killed
        shutil.rmtree(path, ignore_errors=True)
    sources = {"web": _from_web}
    if remote.package and shutil.which("apt-get") and shutil.which("dpkg"):
        sources["apt"] = _from_debian
    reasons = []
    with tempfile.TemporaryDirectory(prefix=f".{remote.folder}.partial-", dir=target.parent) as temporary:
        for name, get in sources.items():
            folder = Path(temporary) / name
            (folder / remote.inside).mkdir(parents=True)
            try:
                get(remote, folder, time.monotonic() + timeout_s / len(sources))
                remote.check(folder / remote.folder)
            except Exception as error:  # each source has errors of its own
                reason = " ".join(str(error).split()) or type(error).__name__
                reasons.append(f"{name}: {reason.replace(f'{folder}{os.sep}', '')}")
            else:
                (folder / remote.folder).rename(target)  # atomic: a reader sees the whole folder or nothing
                return
    raise NotFetched(
        f"{remote.title} cannot be downloaded ({'; '.join(reasons)}). Bring the files from a machine that can, and set "
        "data_dir to their folder; dataset digits needs no download."
    )


def _from_web(remote: Remote, folder: Path, until_s: float) -> None:
    """Every file, from the first of its addresses that gives it, unpacked."""
    for addresses, md5 in remote.files():
        for last, url in enumerate(addresses, start=1 - len(addresses)):
            path = folder / remote.inside / url.rpartition("/")[2]
            try:
                _get(url, path, md5, until_s)
                break
            except Exception:
                if not last:
                    raise
        if path.name.endswith(".tar.gz"):
            shutil.unpack_archive(path, path.parent, filter="data")
        else:
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()


def _get(url: str, path: Path, md5: str, until_s: float) -> None:
    import urllib.request  # here: 0.1 s

    digest = hashlib.md5(usedforsecurity=False)
    request = urllib.request.Request(url, headers={"User-Agent": "rankup"})
    with urllib.request.urlopen(request, timeout=SILENCE_S) as answer, path.open("wb") as file:
        while piece := answer.read1(1 << 20):
            digest.update(piece)
            file.write(piece)
            if time.monotonic() > until_s:
                raise TimeoutError(f"{path.name} is not done in time, {file.tell() / 1e6:.1f} MB of it are here")
    if digest.hexdigest() != md5:
        raise OSError(f"{url} gave another file, its md5 is {digest.hexdigest()} instead of {md5}")


def _from_debian(remote: Remote, folder: Path, until_s: float) -> None:
    """Unpack the folder of the package, without root. A bare container has no lists of packages: they come first."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    # As root, apt switches to a user who may not write here, unless the first option keeps it from doing so
    options = ["APT::Sandbox::User=root", "Acquire::Retries=0", f"Acquire::http::Timeout={SILENCE_S:.0f}",
               f"Dir::State::Lists={folder}/lists", f"Dir::Cache={folder}/cache"]
    apt = ["apt-get", *(word for option in options for word in ("-o", option))]
    complaints = []
    for command in ([*apt, "update"], [*apt, "download", str(remote.package)], ["sh", "-c", "dpkg -x *.deb unpacked"]):
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env={**os.environ, "LC_ALL": "C"}, check=False,
            timeout=max(0.0, until_s - time.monotonic()),
        )
        complaints += [line for line in done.stdout.splitlines() if line.startswith(("E:", "Err:", "dpkg"))]
        # Some of the lists may be enough: go on if others could not be fetched
        if done.returncode and command[-1] != "update":
            raise OSError(" ".join(complaints[:2]) or done.stdout[-200:])
    (folder / remote.inside).rmdir()
    (folder / "unpacked" / remote.place).rename(folder / remote.inside)


# Where downloaded data are kept when the user names no place --------------------------------------------------------


def visible(root: Path) -> list[str]:
    """The names in a folder, sorted, without hidden ones (locks and unfinished downloads are hidden).

    [] if there is no such folder. Raises UserError if it is not a folder or cannot be listed.
    """
    try:
        return sorted(name for name in os.listdir(root) if not name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{root}: data_dir must be a folder that can be read ({error.strerror}).") from error


def cached(name: str) -> Path | None:
    """The first cache folder that holds a folder of this name, or None. It need not be writable."""
    return next((root for root in cache_roots() if (root / name).is_dir()), None)


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
    raise UserError(
        f"{' and '.join(map(str, roots))}: cannot be written, so no data can be kept there. "
        "Set RANKUP_CACHE or data_dir to a folder that can."
    )
