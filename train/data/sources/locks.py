"""One process of a node at a time: locks on files, which the kernel takes back when their owner dies."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What a file system without locks says, as some on a network have none
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock on the file at `path`, and hold it for the block. Raises OSError.

    For work that takes moments: the deadline of the phase covers the wait. Where there are no locks, several processes
    may do the same, so that what the block makes has to appear whole or not at all.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
