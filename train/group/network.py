"""Addresses, ports and interfaces as the operating system sees them. Reads and connects, changes nothing."""

import errno
import ipaddress
import socket
from dataclasses import dataclass

import psutil

from train.process.addresses import is_loopback


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
            return Connection(None, "", sock.getsockname()[0], sock.getpeername()[0])
    except (socket.gaierror, UnicodeError) as error:
        return Connection("name", str(getattr(error, "strerror", None) or error))
    except TimeoutError:
        return Connection("silent")
    except ConnectionRefusedError:
        return Connection("refused")
    except OSError as error:
        unreachable = error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
        return Connection("route" if unreachable else "other", error.strerror or str(error))


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
