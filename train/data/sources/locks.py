"""One process of a node at a time: a lock on a file, which the kernel takes back when its owner dies."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

# What a file system without locks says, as some on a network have none
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock on the file at `path`, and hold it for the block. Raises OSError.

    The deadline of the phase covers the wait. Where there are no locks, several processes may do the same, so that what
    the block makes has to appear whole or not at all.
    """
    lock = FileLock(path)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()
