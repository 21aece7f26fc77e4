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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rankup import UserError, cache_roots

Say = Callable[[str], None]

REPORT_EVERY_S = 5.0
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


@contextmanager
def download_lock(path: Path, title: str, *, timeout_s: float, say: Say) -> Iterator[None]:
    """Hold a lock file beside `path`. The kernel takes it back when its owner dies.

    A block that raises NotFetched leaves the reason there: the processes that waited raise it too, instead of trying
    the same in vain one after the other. Raises OSError, and UserError if another process takes much longer than
    `timeout_s`.
    """
    from filelock import FileLock, Timeout  # here: for what downloads nothing

    lock, failed = FileLock(path.with_name(f".{path.name}.lock")), path.with_name(f".{path.name}.failed")
    began_s, wait_s, held = time.time(), 0.0, False
    try:
        while not held:
            try:
                lock.acquire(timeout=wait_s)
                held = True
            except Timeout:
                wait_s, waited_s = REPORT_EVERY_S, time.time() - began_s
                if waited_s > timeout_s + GRACE_S:
                    raise UserError(
                        f"{path.parent}: another process has not finished downloading {title} after {waited_s:.0f} s. "
                        f"Is it alive? (download_timeout_s is {timeout_s:g})"
                    ) from None
                say(f"waiting for another process to download {title} ({waited_s:.0f} s of at most {timeout_s:g} s)")
        if failed.exists():
            if failed.stat().st_mtime > began_s:
                raise NotFetched(failed.read_text(errors="replace"))
            failed.unlink(missing_ok=True)
        try:
            yield
        except NotFetched as error:
            failed.write_text(str(error))
            raise
    finally:
        lock.release()


def fetch(remote: Remote, root: Path, *, timeout_s: float, say: Say) -> Path:
    """Return root/remote.folder, fetched and checked by this process or by another on this node.

    `say` gets a line now and then. Raises NotFetched if no source gives it, UserError if `root` cannot be written or
    the process that downloads does not finish within `timeout_s`.
    """
    target = root.absolute() / remote.folder
    if target.exists():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with download_lock(target, remote.title, timeout_s=timeout_s, say=say):
            for path in target.parent.glob(f".{remote.folder}.partial-*"):  # of processes that were killed
                shutil.rmtree(path, ignore_errors=True)
            if not target.exists():
                say(f"downloading {remote.title} to {root} (once, at most {timeout_s:g} s)")
                _download(remote, target, timeout_s=timeout_s, say=say)
    except OSError as error:
        raise UserError(
            f"{error.filename or root}: {remote.title} cannot be stored there ({error.strerror}). "
            "Name a folder with room that can be written in data_dir or RANKUP_CACHE."
        ) from error
    return target


def _download(remote: Remote, target: Path, *, timeout_s: float, say: Say) -> None:
    """Fetch to a temporary folder beside the target, check, rename."""
    with tempfile.TemporaryDirectory(prefix=f".{remote.folder}.partial-", dir=target.parent) as temporary:
        found = _from_anywhere(remote, Path(temporary), until_s=time.monotonic() + timeout_s, say=say)
        found.rename(target)  # atomic within one file system: a reader sees the whole folder or nothing


def _from_anywhere(remote: Remote, temporary: Path, *, until_s: float, say: Say) -> Path:
    """Try the web, then the Debian package; return the checked folder. Raises NotFetched."""
    sources = {"web": _from_web}
    if remote.package and shutil.which("apt-get") and shutil.which("dpkg"):
        sources["apt"] = _from_debian
    reasons = []
    for number, (name, get) in enumerate(sources.items(), start=1):
        folder = temporary / name
        (folder / remote.inside).mkdir(parents=True)
        # The first of two sources gets half of the time: a slow one leaves the other a chance
        now_s = time.monotonic()
        try:
            get(remote, folder, now_s + (until_s - now_s) / (len(sources) - number + 1), say)
            remote.check(folder / remote.folder)
            return folder / remote.folder
        except Exception as error:  # each source has errors of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            reasons.append(f"{name}: {reason.replace(f'{folder}{os.sep}', '')}")
    raise NotFetched(f"{remote.title} cannot be downloaded ({'; '.join(reasons)}).")


def _from_web(remote: Remote, folder: Path, until_s: float, say: Say) -> None:
    """Every file, from the first of its addresses that gives it; archives are unpacked."""
    for addresses, md5 in remote.files():
        for last, url in enumerate(addresses, start=1 - len(addresses)):
            path = folder / remote.inside / url.rpartition("/")[2]
            try:
                _get(url, path, md5, title=remote.title, until_s=until_s, say=say)
                break
            except Exception:
                if not last:
                    raise
        if path.name.endswith(".tar.gz"):
            shutil.unpack_archive(path, path.parent, filter="data")
        else:
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()


def _get(url: str, path: Path, md5: str, *, title: str, until_s: float, say: Say) -> None:
    import urllib.request  # here: 0.1 s

    digest, reported_s, size = hashlib.md5(usedforsecurity=False), time.monotonic(), 0
    request = urllib.request.Request(url, headers={"User-Agent": "rankup"})
    with urllib.request.urlopen(request, timeout=SILENCE_S) as answer, path.open("wb") as file:
        while piece := answer.read1(1 << 20):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
            if (now_s := time.monotonic()) > until_s:
                raise TimeoutError(f"{path.name} is not done in time, {size / 1e6:.1f} MB of it are here")
            if now_s - reported_s > REPORT_EVERY_S:
                reported_s = now_s
                say(f"downloading {title}: {path.name}, {size / 1e6:.1f} MB")
    if digest.hexdigest() != md5:
        raise OSError(f"{url} gave another file, its md5 is {digest.hexdigest()} instead of {md5}")


def _from_debian(remote: Remote, folder: Path, until_s: float, say: Say) -> None:
    """Unpack the folder of the package, without root."""
    work = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)

    def call(*command: str) -> str:
        """What went wrong, or ''."""
        done = subprocess.run(
            command, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}, check=False,
            timeout=max(0.0, until_s - time.monotonic()),
        )
        complaints = [line for line in done.stdout.splitlines() if line.startswith(("E:", "Err:", "dpkg"))]
        return "" if done.returncode == 0 else " ".join(complaints[-2:]) or f"{command[0]}: {done.stdout[-200:]}"

    # As root, apt switches to a user who may not write here, unless this option keeps it from doing so
    options = ["APT::Sandbox::User=root", "Acquire::Retries=0"]
    options += [f"Acquire::{kind}::Timeout={SILENCE_S:.0f}" for kind in ("http", "https")]
    own = [f"Dir::State::Lists={work}/lists", f"Dir::Cache={work}/cache"]  # of packages, which need no root
    apt, apt_with_own = (
        ["apt-get", *(word for option in chosen for word in ("-o", option))] for chosen in (options, [*options, *own])
    )
    say(f"downloading {remote.title}: Debian's package {remote.package}")
    if call(*apt, "download", str(remote.package)):  # no lists, as in a container, or old ones
        unlisted = call(*apt_with_own, "update")
        # Some of the lists may be enough, so try even if others could not be fetched
        if failure := call(*apt_with_own, "download", str(remote.package)):
            raise OSError(unlisted or failure)
    archive = next(work.glob("*.deb"), Path("no package"))
    if failure := call("dpkg", "-x", archive.name, "unpacked"):
        raise OSError(failure)
    (folder / remote.inside).rmdir()
    (work / "unpacked" / remote.place).rename(folder / remote.inside)


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
