"""A place that stores bytes by name: a folder, a bucket of S3, GCS or Azure, or anything else that fsspec supports.

A place promises what every object store promises: an object is written whole or not at all, and reads and lists show it
right after the write. There is no rename. Any request may fail; it is tried again until its time is over.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from rankup.errors import PeerLost, UserError, reason
from rankup.places.files import open_regular, parse_json
from rankup.timing import FIRST_PAUSE_S, LONGEST_PAUSE_S, REQUEST_S
from rankup.urls import extra_of, is_url

PARALLEL = 4  # how many files are uploaded at a time, and how many parts of a large file
# In bytes. A client gives up a request that gets no answer for 60 s, and the request may share a slow line with 15
# others. S3 takes at most 10,000 parts, each of 5 MiB or more
PART = 8 * 2**20
# Shorter timeouts than REQUEST_S let a hanging request be tried again on another connection. Lists must be fresh
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"use_listings_cache": False, "config_kwargs": {
        "connect_timeout": 5, "read_timeout": 60, "retries": {"total_max_attempts": 1}}},
    "gcs": {"use_listings_cache": False},
    "azure": {"use_listings_cache": False},
    "file": {"auto_mkdir": True},
}
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.EINVAL)  # a folder, a broken link or a pipe in place of an object
_NEVER = (*_NO_FILE, errno.EROFS, errno.ENAMETOOLONG)
_FAULTS = (TypeError, AttributeError, LookupError, AssertionError, MemoryError)  # faults of a program, never retried
T = TypeVar("T")


@dataclass(frozen=True)
class ObjectStore:
    """The objects below `url`. Every method raises UserError if the place refuses (no such bucket, denied, full). It
    raises PeerLost if the place still fails at `until_s`, because a later attempt may succeed."""

    url: str  # as the user gave it, for messages
    kind: str  # s3, gcs, azure, file (a folder), or another protocol of fsspec
    fs: Any  # fsspec's file system
    root: str  # what `fs` calls `url`
    warn: Callable[[str], None]
    until_s: float = 0.0  # requests are tried again until this `time.monotonic()`
    request_s: float | None = None  # the timeout of one small request; None means REQUEST_S

    @classmethod
    def open(cls, url: str, *, warn: Callable[[str], None], timeout_s: float = 0.0) -> Self:
        """Return the place at `url`, an address or a folder. Requests are tried again for `timeout_s` from now on.

        Raises UserError if a package that the place needs is not installed, or fsspec does not know such an address.
        """
        extra = extra_of(url)
        kind = extra or (url.partition("://")[0] if is_url(url) else "file")
        try:
            import fsspec  # here, because it takes 0.1 s, which a run without an address saves

            fs, root = fsspec.core.url_to_fs(url, **_OPTIONS.get(kind, {}))
        except ImportError as error:
            way_out = f"pip install 'rankup[{extra}]', or '.[{extra}]' in a checkout" if extra else reason(error)
            raise UserError(f"{url} needs a package that is not installed here. {way_out}.") from None
        except ValueError as error:
            raise UserError(f"{url} must be an address that fsspec knows, got: {reason(error)}") from None
        if kind == "s3":
            fs.retries = 1  # `_try` retries instead, because it knows how much time is left
        return cls(url.rstrip("/"), kind, fs, root.rstrip("/"), warn).within(timeout_s)

    def within(self, timeout_s: float) -> Self:
        """Return the same place, whose requests are tried again for `timeout_s` from now on."""
        return replace(self, until_s=time.monotonic() + timeout_s)

    def once(self, request_s: float) -> Self:
        """Return the same place without warnings and retries, and with `request_s` seconds for each small request."""
        return replace(self, warn=lambda text: None, until_s=0.0, request_s=request_s)

    def below(self, name: str) -> Self:
        """Return the place of all objects whose names begin with `name/` here."""
        return replace(self, url=f"{self.url}/{name}", root=f"{self.root}/{name}")

    def names(self) -> dict[str, int]:
        """Return the size in bytes of each object, by its name."""
        try:
            list_all = _walk if self.kind == "file" else lambda path: self._call("find", path, detail=True)
            found = self._try("list", lambda: list_all(self.root))
        except FileNotFoundError:
            return {}
        start = len(self.root) + 1
        return {str(key)[start:]: int(info.get("size") or 0) for key, info in found.items()}

    def read(self, name: str) -> bytes | None:
        """Return the content of the object `name`, or None if there is none."""
        get = _read_file if self.kind == "file" else partial(self._call, "cat_file")
        try:
            return bytes(self._try(f"read {name}", lambda: get(self._path(name))))
        except FileNotFoundError:
            return None

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object that is stored as `name`, or {} if there is none or it is damaged."""
        return parse_json(self.read(name) or b"")

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, and replace an earlier one of this name."""
        self._try(f"write {name}", lambda: self._call("pipe_file", self._path(name), content), writes=True)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object unless the name exists. Return whether it was written, which is always True at a store
        without conditional writes."""
        path = self._path(name)

        def write() -> bool:
            try:
                if self.kind == "file":
                    with self.fs.open(path, "xb") as file:  # fsspec's `pipe_file` is not atomic: it looks, then writes
                        file.write(content)
                else:
                    self._call("pipe_file", path, content, mode="create")
            except Exception as error:
                if isinstance(error, FileExistsError) or _status(error) == 412:
                    held = self.read(name)
                    if held is not None or self.kind != "file":  # otherwise a file is in place of a folder
                        return held == content  # ours, if the answer to an earlier try was lost
                raise
            return True

        return self._try(f"create {name}", write, writes=True)

    def must_refuse(self, name: str, *, option: str) -> None:
        """Raise UserError if the place creates the object `name`, which exists: then two jobs could own one run."""
        if self.create(name, b"{}"):  # not "", which `create` would take for its own in a file still being written
            rule = "a place with conditional writes, like S3, GCS, Azure or MinIO"
            raise UserError(f"{option} must be {rule}, got {self.url}.")

    def upload(self, files: dict[str, Path]) -> None:
        """Upload each of the `files` under its name, several at a time, and large files in parts. Raises
        FileNotFoundError if one of the files no longer exists."""

        def one(name: str) -> None:
            path, more = files[name], dict[str, Any]()
            if self.kind == "s3":
                more = {"chunksize": max(PART, path.stat().st_size // 9_999 + 1), "max_concurrency": PARALLEL}
            put = partial(self._call, "put_file", str(path), self._path(name), large=True, **more)
            try:
                self._try(f"write {name}", put, writes=True)
            except UserError:
                path.stat()  # a file that is gone is no fault of the place
                raise

        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="upload") as pool:
            list(pool.map(one, files))  # `list` raises what an upload raised

    def download(self, name: str, path: Path) -> None:
        """Download the object `name`, if it exists, to the file `path`, and create the folder of `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._try(f"read {name}", lambda: self._call("get_file", self._path(name), str(path), large=True))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects. A name that does not exist is no error."""
        paths = [self._path(name) for name in names]
        for some in filter(None, [[path] for path in paths] if self.kind == "file" else [paths]):
            with contextlib.suppress(FileNotFoundError):
                self._try(f"remove {len(some)} files", partial(self._call, "rm", some))
        for folder in sorted({Path(path).parent for path in paths} if self.kind == "file" else (), reverse=True):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _call(self, method: str, *values: Any, large: bool = False, **more: Any) -> Any:
        """Call a method of `fs`, with a timeout if it uses a network. `large`: the call may take until `until_s`."""
        if self.fs.async_impl:
            request_s = self.request_s or REQUEST_S
            more["timeout"] = max(request_s, self.until_s - time.monotonic()) if large else request_s
        return getattr(self.fs, method)(*values, **more)

    def _try(self, what: str, work: Callable[[], T], *, writes: bool = False) -> T:
        """Call `work` until it succeeds, with growing pauses. Unless it `writes`, FileNotFoundError is raised as is."""
        pause_s, told = FIRST_PAUSE_S, False
        while True:
            try:
                return work()
            except (*_FAULTS, UserError):
                raise
            except Exception as error:
                # The object does not exist, or the disk of this machine, to which it is downloaded, is full
                if not writes and (isinstance(error, FileNotFoundError) or _is_full(error)):
                    raise
                if not writes and getattr(error, "errno", 0) in _NO_FILE:
                    raise FileNotFoundError(reason(error)) from None
                if why := _refused(error):
                    raise UserError(
                        f"{self.url} {why}: {what}: {reason(error)}. Earlier files there are untouched. Fix the cause, "
                        "and run the same command again."
                    ) from None
                left_s = self.until_s - time.monotonic()
                if left_s <= 0:
                    raise PeerLost(f"{self.url} did not answer in time: {what}: {reason(error)}") from None
                if not told:
                    told = True
                    self.warn(f"{self.url} fails, retrying for {left_s:.0f} s: {what}: {reason(error)}")
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _walk(path: str) -> dict[str, dict[str, Any]]:
    """Return all files below a folder. Raises OSError, whereas fsspec's `find` takes an unreadable folder for empty."""
    found: dict[str, dict[str, Any]] = {}
    for entry in os.scandir(path):
        try:
            if entry.is_dir():
                found |= _walk(entry.path)
            elif stat.S_ISREG((facts := entry.stat()).st_mode):
                found[entry.path] = {"size": facts.st_size}
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):  # removed after the listing, or a broken link
                raise
    return found


def _read_file(path: str) -> bytes:
    with open_regular(Path(path)) as file:
        return file.read()


def _status(error: BaseException) -> int:
    """Return the HTTP status of the store's answer that caused `error`, 0 if there is none."""
    # The errors of s3fs have the client's error as their cause. gcsfs has a field `code`, and Azure's client has
    # `status_code`. aiohttp has `status`, and warns if its own `code` is read
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(response := getattr(error, "response", None), dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    names = ("status_code", "status", "code")
    status = str(next((found for name in names if (found := getattr(error, name, ""))), ""))
    return int(status) if status.isdigit() else 0


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _refused(error: BaseException) -> str:
    """Return why another try would not help, or "" if it may help."""
    if isinstance(error, FileNotFoundError):
        return "must be in a bucket or container that exists"
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return "denies access"
    if isinstance(error, OSError) and error.errno in _NEVER:
        return "must be a folder that can be written to"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"):
        return "needs credentials"
    return "is full" if _is_full(error) or _status(error) == 507 else ""
