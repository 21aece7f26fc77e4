"""Addresses, ports, names and interfaces as the operating system sees them."""

import contextlib
import ctypes
import errno
import ipaddress
import resource
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rankup.env.addresses import is_loopback

SWITCH = Path("/etc/nsswitch.conf")  # where glibc reads who is asked for names
OTHER_FILES = 512  # that a process needs open beside the connections of its group

_lookups_lock = threading.Lock()
_without_lookups = 0  # how many blocks of `no_name_lookups` are entered just now, in all threads


@dataclass(frozen=True, slots=True)
class Connection:
    """One try to connect. `problem` is None on success, else "name", "refused", "silent", "route" or "other"; `detail`
    is the system's text. `master_ip`: the address that answered, `local_ip`: our own on that route."""

    problem: str | None
    detail: str = ""
    local_ip: str = ""
    master_ip: str = ""


def try_connect(host: str, port: int, *, timeout_s: float) -> Connection:
    """Connect once and close. Tells apart what torch reports with one text: no such name, refused, no answer.

    `timeout_s` is for each address of the name, and the last one's problem counts; the resolver itself has no bound.
    """
    try:
        with socket.create_connection((host, port), timeout_s) as sock:
            return connection_of(sock)
    except (socket.gaierror, UnicodeError) as error:
        return Connection("name", str(getattr(error, "strerror", None) or error))
    except TimeoutError:
        return Connection("silent")
    except ConnectionRefusedError:
        return Connection("refused")
    except OSError as error:
        unreachable = error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
        return Connection("route" if unreachable else "other", error.strerror or str(error))


def connection_of(sock: socket.socket) -> Connection:
    """What has been reached with this socket."""
    ours, theirs = sock.getsockname(), sock.getpeername()
    if ours == theirs:
        # Nobody listens, and the system chose that very port for our side: TCP then connects to itself. Who tries often
        # on the machine itself sees it, if the port is one of those for outgoing connections
        return Connection("refused")
    return Connection(None, "", ours[0], theirs[0])


def explain_connection(attempt: Connection, host: str, port: int) -> str:
    """Why a connection failed, and what that usually means; one clause."""
    return {
        "name": f'the name "{host}" does not resolve here ({attempt.detail})',
        "refused": f"{host}:{port} refuses the connection: the machine answers, but nothing listens on that port "
        "(rank 0 not started or already gone, or another port)"
        + (". A loopback address is each machine itself" if is_loopback(host) else ""),
        "silent": f"{host}:{port} does not answer: a wrong address, a machine that is down, or a firewall that drops "
        "packets",
        "route": f"no route to {host} ({attempt.detail})",
    }.get(attempt.problem or "", f"{host}:{port}: {attempt.detail}")


def is_own_address(host: str) -> bool:
    """Whether `host` resolves to an address of this machine. True if it does not resolve: others report that."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except (socket.gaierror, UnicodeError):
        return True
    return any(interface_of(str(ip)) or ipaddress.ip_address(str(ip).split("%")[0]).is_loopback for ip in found)


def interfaces() -> list[str]:
    """The names of this machine's interfaces."""
    return list(psutil.net_if_addrs())


def interface_of(ip: str) -> str | None:
    """The name of the interface that carries `ip`, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == ip.split("%")[0] for address in addresses):
            return name
    return None


def address_of(interface: str) -> str:
    """The address that gloo takes: the interface's first of IPv4, else its first of IPv6; "" where it has none."""
    addresses = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in addresses:
            if address.family == family:
                return str(address.address)
    return ""


def address_of_host_name() -> str:
    """Where gloo listens if no interface is named."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"  # as gloo does


def local_ip_towards(ip: str) -> str:
    """Our own address on the route to `ip`. Connecting a datagram socket sends nothing."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((ip, 9))
        except OSError:
            return ""
        return str(sock.getsockname()[0])


def port_holder(port: int) -> str:
    """ "pid 4711 (python -m http.server)" for the process that listens on `port` or connects from it. "" where the
    system does not show it: other users' processes, and those of other containers."""
    try:
        connections = [c for c in psutil.net_connections(kind="tcp") if c.pid and c.laddr and c.laddr.port == port]
    except (psutil.Error, OSError):
        return ""
    for connection in sorted(connections, key=lambda c: c.status != psutil.CONN_LISTEN):
        try:
            # The program and its first two words only: later arguments may hold a password or a token
            command = " ".join(psutil.Process(connection.pid).cmdline()[:3])
        except psutil.Error:
            command = "?"
        return f"pid {connection.pid} ({command})"
    return ""


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
