"""What torch's stores ask of the operating system: names, and open files."""

import contextlib
import ctypes
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

SWITCH = Path("/etc/nsswitch.conf")  # where glibc reads who is asked for names
OTHER_FILES = 512  # that a process needs open beside the connections of its group

_lookups_lock = threading.Lock()
_without_lookups = 0  # how many blocks of `no_name_lookups` are entered just now, in all threads


@contextlib.contextmanager
def no_name_lookups() -> Iterator[None]:
    """Within the block no resolver is asked for names, in all threads of this process: /etc/hosts alone answers.

    torch asks for the name of both ends of each connection of a store, only to print it: the client twice, the server
    once, in its one thread, so that all ranks wait for each answer. With a resolver that takes 5 s to say that it does
    not know the address, 16 ranks took minutes to meet. torch has no setting for that, but glibc lets a program
    replace the line of nsswitch.conf. Blocks may overlap. Elsewhere than with glibc (musl, macOS) nothing changes.
    """
    _count_without_lookups(1)
    try:
        yield
    finally:
        _count_without_lookups(-1)


def _count_without_lookups(change: int) -> None:
    global _without_lookups
    with _lookups_lock:
        before, _without_lookups = _without_lookups, _without_lookups + change
        if (before == 0) != (_without_lookups == 0):
            _ask_for_names("files" if _without_lookups else _configured_services())


def _ask_for_names(services: str) -> None:
    """Have glibc look up hosts by these services, in the words of nsswitch.conf."""
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", services.encode())


def _configured_services() -> str:
    """The services that the system looks hosts up by; glibc's own choice where nothing is configured."""
    with contextlib.suppress(OSError):
        for line in SWITCH.read_text().splitlines():
            database, colon, services = line.partition("#")[0].partition(":")
            if colon and database.strip() == "hosts" and services.strip():
                return services.strip()
    return "files dns"


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files so far that it can hold `count` connections, where the system lets us.

    Most systems allow 1,024 at first and many times that if asked: rank 0 holds several connections of each rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
