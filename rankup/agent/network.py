"""Addresses, ports and interfaces as this machine's system sees them."""

import asyncio
import errno
import os
import socket
import time
from collections.abc import Mapping, MutableMapping

import psutil

from rankup.agent.protocol import LONGEST, addresses_of, interface_of
from rankup.agent.secret import Attend, guard, read_secret
from rankup.env.rank_env import is_loopback
from rankup.errors import JoinError, LaunchError
from rankup.timing import PAUSE_S, PORT_S


async def listen(attend: Attend, *, ip: str, port: int) -> asyncio.Server:
    """Accept connections for `attend` on that port, of those alone who know the job's secret, if it has one. 0: a port
    that the system picks. `ip`: "" for all addresses.

    Raises JoinError, naming who holds the port, and LaunchError where nobody may have it.
    """
    until_s, attend = time.monotonic() + PORT_S, guard(attend, read_secret(os.environ))
    while True:
        try:
            return await asyncio.start_server(attend, sock=open_port(ip, port), limit=LONGEST)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                why = os.strerror(error.errno or 0)
                way_out = "Choose one from 1024 to 32767."
                raise LaunchError(f"MASTER_PORT={port} can't be opened: {why}. {way_out}") from None
        if time.monotonic() > until_s:
            holder = port_holder(port)
            raise JoinError(
                f"MASTER_PORT={port} is in use on {socket.gethostname()}{f' by {holder}' if holder else ''}: another "
                "job, one that has not ended, or a second process with RANK=0. End it, or set another MASTER_PORT on "
                "all nodes."
            )
        await asyncio.sleep(PAUSE_S)


def open_port(ip: str, port: int) -> socket.socket:
    """A listener; "" and 0 as in `listen`. Raises OSError.

    One for both families: asyncio would open two, with two ports where the system picks them. The backlog is for a
    large job, whose members all come at once.
    """
    dual = not ip and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in ip else socket.AF_INET
    return socket.create_server((ip, port), family=family, backlog=4096, dualstack_ipv6=dual)


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


def address_of(interface: str) -> str:
    """The address that gloo takes: the interface's first of IPv4, else its first of IPv6; "" where it has none."""
    addresses = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in addresses:
            if address.family == family:
                return str(address.address)
    return ""


def chosen_address(environ: Mapping[str, str]) -> str:
    """The address of the interface that the user has named; "" where none is."""
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return address_of(named) if named else ""


async def foreign_address(host: str) -> str:
    """What to say where MASTER_ADDR=`host` is no address of this machine, where rank 0 runs; else ""."""
    try:
        found = await addresses_of(host)
    except OSError:
        return ""  # nobody can say
    if any(is_loopback(ip) or interface_of(ip) for ip in found):
        return ""
    return (
        f"MASTER_ADDR={host} is no address of this machine ({socket.gethostname()}), where rank 0 runs and listens. "
        "Right behind a Service or NAT, a mistake elsewhere."
    )


def choose_interface(
    environ: MutableMapping[str, str], own_ip: str, *, given: Mapping[str, str] | None = None
) -> str:
    """Have gloo, nccl and tensorpipe use the interface of `own_ip`, which routes to the others, unless one is named.

    By default gloo takes the address that the host's own name resolves to: 127.0.1.1 on a Debian machine, where no
    other node can reach it. Returns what is wrong where the user's choice has no address here, else "".
    `given`: `environ` before the first call, where there are several.
    """
    given = environ if given is None else given
    named = given.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named and not address_of(named):
        known = psutil.net_if_addrs()
        problem = "that has an address" if named in known else "that exists"
        return (
            f"GLOO_SOCKET_IFNAME must name an interface {problem} on {socket.gethostname()}, got {named}. There are: "
            f"{', '.join(name for name in known if address_of(name))}. "
            "Unset, the one that routes to the master is taken."
        )
    if routed := interface_of(own_ip):
        # To nccl a bare eth1 means every interface whose name begins so, eth10 too
        for name, value in (
            ("GLOO_SOCKET_IFNAME", routed), ("NCCL_SOCKET_IFNAME", f"={routed}"), ("TP_SOCKET_IFNAME", routed),
        ):
            environ[name] = given.get(name) or value
    return ""
