"""Objects in a store, by name: on S3, GCS, Azure, in a folder, or wherever else fsspec has a file system for.

What is used is what every object store has: an object appears whole, and what was written is what is read next. There
is no rename, a list may lag behind, and any request may fail, so that each is tried again as long as `patience` says.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from rankup.errors import PeerLost, UserError, reason
from train.config.urls import extra_of, is_url
from train.process.filesystem import open_filesystem

PARALLEL = 4  # objects at a time, and parts of a large one
# Bytes: a client gives a request up that gets no answer for 60 s, and it may share a slow line with 15 others. S3 takes
# at most 10,000 parts, of 5 MiB or more
PART = 8 * 2**20
SMALL_S = 60.0  # for one small request: a frozen store, or a firewall, never answers at all
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
# Below our own patience: a request that hangs is tried again on another connection. Listings must not come from memory
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"use_listings_cache": False, "config_kwargs": {
        "connect_timeout": 5, "read_timeout": 60, "retries": {"total_max_attempts": 1}}},
    "gs": {"use_listings_cache": False},
    "az": {"use_listings_cache": False},
    "file": {"auto_mkdir": True},
}
_FAULTS = (TypeError, AttributeError, LookupError, AssertionError, MemoryError)
_FULL = ("QuotaExceeded", "InsufficientCapacity", "XMinioStorageFull", "StorageFull", "EntityTooLarge")
T = TypeVar("T")


class Patience:
    """How long requests are tried again: for `timeout_s` in all or, if `renewed`, after whatever got through last."""

    def __init__(self, timeout_s: float = 0.0, *, renewed: bool = False) -> None:
        self._timeout_s, self._renewed = timeout_s, renewed
        self._until_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return self._until_s - time.monotonic()

    def renew(self, *_: object) -> None:
        """A request was answered, or a part of a large object was taken."""
        if self._renewed:
            self._until_s = time.monotonic() + self._timeout_s


@dataclass(frozen=True)
class Objects:
    """The objects below `url`.

    Every method raises UserError where the store refuses (no such bucket, denied, full), and PeerLost, since to try
    again later may help, where `patience` is over.
    """

    url: str  # as the user gave it, for messages
    fs: Any  # fsspec's file system
    root: str  # what `fs` calls `url`
    warn: Callable[[str], None]
    patience: Patience = field(default_factory=Patience)

    @classmethod
    def open(cls, url: str, *, warn: Callable[[str], None], timeout_s: float) -> Self:
        """The objects below `url`, a URL or a folder. `timeout_s`: as long requests are tried again from now on."""
        scheme = url.partition("://")[0] if is_url(url) else "file"
        kind = {"s3": "s3", "gcs": "gs", "azure": "az"}.get(extra_of(url), scheme)
        fs, root = open_filesystem(url, **_OPTIONS.get(kind, {}))
        if kind == "s3":
            fs.retries = 1  # by `_try`, which knows how much time is left
        return cls(url.rstrip("/"), fs, root.rstrip("/"), warn).within(timeout_s)

    def within(self, timeout_s: float) -> Self:
        """The same, with requests that are tried again for `timeout_s` from now on."""
        return replace(self, patience=Patience(timeout_s))

    def while_moving(self, silence_s: float) -> Self:
        """The same, with requests that may take as long as no silence of the store is longer than `silence_s`."""
        return replace(self, patience=Patience(silence_s, renewed=True))

    def below(self, name: str) -> Self:
        """The objects whose names begin with `name/`."""
        return replace(self, url=f"{self.url}/{name}", root=f"{self.root}/{name}")

    @property
    def is_folder(self) -> bool:
        """Whether these are files of this machine."""
        return "file" in _protocols(self.fs)

    def read(self, name: str) -> bytes | None:
        """The content of an object, None where there is none."""
        try:
            return bytes(self._try(f"read {name}", lambda: self._call("cat_file", self._path(name))))
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """In bytes, None where there is no such object."""
        try:
            return int(self._try(f"look at {name}", lambda: self._call("info", self._path(name)))["size"])
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write one small object, in place of an earlier one."""
        self._try(f"write {name}", lambda: self._call("pipe_file", self._path(name), content), writes=True)

    def create(self, name: str, content: bytes) -> bool:
        """Write one small object unless there is one of that name. Whether it was written.

        On a store that knows no conditions this is always True.
        """
        path = self._path(name)

        def write() -> bool:
            try:
                if self.is_folder or "memory" in _protocols(self.fs):
                    with self.fs.open(path, "xb") as file:  # their own `pipe_file` looks first, and writes later
                        file.write(content)
                else:
                    self._call("pipe_file", path, content, mode="create")
            except Exception as error:
                if _exists_already(error):
                    # Or our own: a request whose answer was lost was tried again
                    return self.read(name) == content
                raise
            return True

        return self._try(f"create {name}", write, writes=True)

    def upload(self, files: dict[str, Path]) -> None:
        """Write files as the objects with these names, several at a time, large ones in parts."""

        def one(item: tuple[str, Path]) -> None:
            name, path = item
            size = path.stat().st_size
            self._try(f"write {name}", lambda: self._put(path, size, name), writes=True)

        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="upload") as pool:
            for _ in pool.map(one, files.items()):
                pass

    def download(self, name: str, path: Path) -> bool:
        """Write an object into a file. Whether there is one."""
        try:
            self._try(f"read {name}", lambda: self._call("get_file", self._path(name), str(path), large=True))
        except FileNotFoundError:
            return False
        return True

    def names(self, prefix: str = "") -> dict[str, int]:
        """Names that begin with `prefix/`, and their sizes in bytes. A hint: a store may not know the newest yet."""
        path = self._path(prefix) if prefix else self.root
        try:
            found = self._try(f"list {prefix}", lambda: self._call("find", path, detail=True))
        except FileNotFoundError:
            return {}
        start = len(self.root) + 1
        return {str(key)[start:]: int(info.get("size") or 0) for key, info in found.items()}

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, those that are gone already too."""
        paths = [self._path(name) for name in names]
        if not paths:
            return
        if not self.is_folder:
            with contextlib.suppress(FileNotFoundError):
                self._try(f"remove {len(paths)} objects", lambda: self._call("rm", paths))
            return
        for path in map(Path, paths):
            self._try(f"remove {path}", lambda path=path: path.unlink(missing_ok=True))  # type: ignore[misc]
        for folder in sorted({Path(path).parent for path in paths}, reverse=True):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _put(self, path: Path, size: int, name: str) -> None:
        in_parts = {"s3", "s3a", "gs", "gcs"} & _protocols(self.fs)
        part = max(PART, size // 9_999 + 1)
        more: dict[str, Any] = {"chunksize": part} if in_parts else {}
        if in_parts & {"s3", "s3a"}:
            more["max_concurrency"] = PARALLEL
        if not self.fs.async_impl:
            self.fs.put_file(str(path), self._path(name))
            return
        # Not fsspec's own `timeout`, which bounds the whole, however well it goes on
        from fsspec.callbacks import Callback  # where an address is used

        callback = Callback(hooks={"renew": self.patience.renew})
        work = self.fs._put_file(str(path), self._path(name), callback=callback, **more)
        future, bound_s = asyncio.run_coroutine_threadsafe(work, self.fs.loop), max(SMALL_S, self.patience.left_s)
        while not concurrent.futures.wait([future], bound_s).done:
            if (bound_s := self.patience.left_s) <= 0:
                future.cancel()
                raise TimeoutError(f"{path.name} was not taken in time")
        future.result()

    def _call(self, method: str, *values: Any, large: bool = False, **more: Any) -> Any:
        """Call a method of `fs`, bounded where it goes over a network. `large`: what it moves may take all our time."""
        if self.fs.async_impl:
            more["timeout"] = max(SMALL_S, self.patience.left_s) if large else SMALL_S
        return getattr(self.fs, method)(*values, **more)

    def _try(self, what: str, work: Callable[[], T], *, writes: bool = False) -> T:
        """Call `work` until it succeeds, with growing pauses. Raises FileNotFoundError where nothing is written."""
        pause_s, told = FIRST_PAUSE_S, False
        while True:
            try:
                found = work()
                self.patience.renew()
                return found
            except FileNotFoundError as error:
                if not writes:
                    raise
                raise UserError(f"{self.url}: the bucket or container must exist, got: {reason(error)}.") from None
            except _FAULTS:
                raise
            except Exception as error:
                if not writes and isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise  # this machine's disk, to which it is copied
                if why := _refused(error):
                    raise UserError(
                        f"{self.url} {why}: {what}: {reason(error)}. What was written there before is as it was. Mend "
                        "that, and run the same command again."
                    ) from None
                left_s = self.patience.left_s
                if left_s <= 0:
                    raise PeerLost(
                        f"{self.url} did not answer in time: {what}: {reason(error)}", nobody_died=True
                    ) from None
                if not told:
                    told = True
                    self.warn(f"{self.url} fails, tried again for {left_s:.0f} s: {what}: {reason(error)}")
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def parse(content: bytes | None) -> dict[str, Any]:
    """What a small object says in JSON; nothing where there is no such object, or it is not whole."""
    try:
        values = json.loads(content or b"{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _answer(error: BaseException) -> tuple[int, str]:
    """Status and code of the store's answer behind `error`, 0 and "" where there is none."""
    # s3fs gives its own errors the client's as their cause; gcsfs has a field `code`, Azure's client `status_code`
    while error.__cause__ is not None:
        error = error.__cause__
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return int(status), str(response.get("Error", {}).get("Code", ""))
    status = str(getattr(error, "status_code", "") or getattr(error, "code", ""))
    return int(status) if status.isdigit() else 0, ""


def _exists_already(error: BaseException) -> bool:
    status, code = _answer(error)
    return isinstance(error, FileExistsError) or status == 412 or code == "PreconditionFailed"


def _refused(error: BaseException) -> str:
    """Why no further try helps, or ""."""
    status, code = _answer(error)
    if isinstance(error, PermissionError) or status in (401, 403):
        return "denies access"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"):
        return "needs credentials"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "is full" if full or status == 507 or code in _FULL else ""
