"""Reading at a URL by fsspec: a file system a process, errors as one line, and another try where one may help."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from rankup.errors import DataError, UserError
from rankup.places.place import open_filesystem

# Before another try. 20 minutes in all, longer than a step may take: a store that stays away ends a training by the
# step's deadline, with a code after which it is started again. Only commands without a deadline come to the end of it
PAUSES_S = (0.5, 1, 2, 4, 8, *[15] * 80)
SAID_AFTER = 4  # tries that failed: shorter trouble needs no line


def filesystem(url: str) -> Any:
    """The fsspec file system of `url`, one for each process: it has connections, which a forked one can't share.

    Raises UserError where it needs a package that is not installed.
    """
    parts = urlsplit(url)
    return _filesystem(f"{parts.scheme}://{parts.netloc}", os.getpid())


@lru_cache(maxsize=8)
def _filesystem(address: str, pid: int) -> Any:
    return open_filesystem(address)[0]


def read_range(url: str, begin: int, end: int) -> bytes:
    """The bytes from `begin` to before `end`. Raises DataError if they can't be read, also after many tries."""
    for number, pause_s in enumerate((*PAUSES_S, None), 1):
        try:
            with explained(url, "can't be read"):
                data = bytes(filesystem(url).cat_file(url, start=begin, end=end))  # s3fs has another second parameter
        except FileNotFoundError:
            raise DataError(f"{url}: is gone since the training began. Bring it back.") from None
        except _MayPassError as error:
            if pause_s is None:
                raise DataError(f"{error} {len(PAUSES_S) + 1} tries failed.") from error
            if number == SAID_AFTER:
                # On standard error, since a worker process has no log
                print(f"{error} It is tried again.", file=sys.stderr, flush=True)
            time.sleep(pause_s)
            continue
        if len(data) != end - begin:
            raise DataError(
                f"{url}: gives {len(data)} bytes from byte {begin} on, and its index says {end - begin}. Was it cut or "
                "replaced meanwhile? (A server must know range requests.)"
            )
        return data
    raise AssertionError


class _MayPassError(DataError):
    pass


@contextmanager
def explained(url: str, what: str) -> Iterator[None]:
    """Turn what a file system raises into one line that names `url`. A missing file stays FileNotFoundError."""
    try:
        yield
    except (UserError, FileNotFoundError):
        raise
    except PermissionError as error:
        raise DataError(f"{url}: {what}: access is denied ({_line(error)}). Do the credentials allow it?") from error
    except Exception as error:  # each store has errors of its own
        text = f"{url}: {what} ({_line(error)}). Is it there, and can this machine reach it?"
        raise _MayPassError(text) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
