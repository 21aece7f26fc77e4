"""torch's store, to which ranks connect without asking a resolver."""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

# torch exports it under a condition that mypy does not follow
from torch.distributed import TCPStore  # type: ignore[attr-defined]

SWITCH = Path("/etc/nsswitch.conf")  # where glibc reads who is asked for names


def connect_store(ip: str, port: int, *, timeout_s: float) -> TCPStore:
    """Raises RuntimeError where what answers is no store. Waits without end for what accepts and never answers."""
    with no_name_lookups():
        return TCPStore(ip, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


@contextlib.contextmanager
def no_name_lookups() -> Iterator[None]:
    """Within the block no resolver is asked for names, in all threads of this process: /etc/hosts alone answers.

    torch asks for the name of both ends of each connection of a store, only to print it. With a resolver that takes 5 s
    to say that it does not know the address, 16 ranks took minutes to meet. torch has no setting for that, but glibc
    lets a program replace the line of nsswitch.conf.
    """
    configure = ctypes.CDLL(None).__nss_configure_lookup
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        found = None
        with contextlib.suppress(OSError):
            found = re.search(r"^\s*hosts\s*:([^#\n]*)", SWITCH.read_text(), re.MULTILINE)
        configure(b"hosts", (found[1].strip() if found else "files dns").encode())  # the latter is glibc's own choice
