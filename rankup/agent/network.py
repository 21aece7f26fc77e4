"""Addresses, ports and interfaces of this machine, and who may speak to a port where members meet: whoever knows the
secret in RANKUP_SECRET_FILE, if a job has one.

As in Python's multiprocessing.connection, both sides prove that they know the secret, and nobody sends it. Each draws a
nonce, so that a recorded answer is worth nothing, and names its role, so that nobody gets his own answer back.

| leader -> member | challenge(nonce): a message as in `protocol`                                                     |
| member -> leader | its own nonce and HMAC-SHA256(secret, "member" + both nonces): 64 bytes, no message is read yet  |
| leader -> member | proof(proof): HMAC-SHA256(secret, "leader" + both nonces)                                        |

What follows is as without a secret: neither signed nor encrypted.
"""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import json
import math
import os
import secrets
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import psutil

from rankup.agent.processes import in_background
from rankup.env.rank_env import is_loopback
from rankup.errors import JoinError, UserError
from rankup.timing import CONNECT_S, HELLO_S, PAUSE_S, PORT_S

Found = TypeVar("Found")
Attend = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LONGEST = 1 << 20  # bytes of one message; the longest is a commit, which names every host,
# or a hello, which names every file of the script's own
SECRET_FILE = "RANKUP_SECRET_FILE"
WAY_OUT = f"Set {SECRET_FILE} to the same content on all nodes, or on none"
NONCE = 32  # bytes, of a digest too
SHORTEST, LONGEST_SECRET = 16, 4096  # bytes
MOST_HALF_OPEN = 256  # connections that have not answered yet; a process may open 1,024 files by default


class Link:
    """A connection to another member. All methods belong to the event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        names = (writer.get_extra_info(name) for name in ("sockname", "peername"))
        # A local socket's name is no pair
        self.local_ip, self.remote_ip = (_plain(name[0]) if isinstance(name, tuple) else "" for name in names)

    @classmethod
    async def connect(cls, host: str, port: int, *, timeout_s: float = CONNECT_S) -> "Link":
        """Try each address of `host` for `timeout_s`. Raises the last one's OSError: gaierror where the name does not
        resolve, TimeoutError, ConnectionRefusedError, ..."""
        last: OSError = TimeoutError()
        for ip in await addresses_of(host, timeout_s=timeout_s):
            try:
                async with asyncio.timeout(timeout_s):
                    reader, writer = await asyncio.open_connection(ip, port, limit=LONGEST)
            except OSError as error:
                last = error
                continue
            if writer.get_extra_info("sockname") != writer.get_extra_info("peername"):
                return cls(reader, writer)
            # Nobody listens, and the system chose that very port for our side: TCP then connects to itself
            writer.close()
            last = ConnectionRefusedError()
        raise last

    def send(self, kind: str, **values: Any) -> None:
        """Returns at once and raises nothing: whoever receives finds the end of the connection."""
        self.write(encode(kind, **values))

    def write(self, data: bytes) -> None:
        """The same with a message that is encoded already."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> dict[str, Any]:
        """The next message. Raises ConnectionError if there will be none."""
        try:
            message = json.loads(await self._reader.readuntil())
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("is"), str):
            raise ConnectionError("it sent something that is no message of ours")
        return message

    def close(self, *, at_once: bool = False) -> None:
        """What was sent still goes out, unless `at_once`: a process that is stopped takes nothing."""
        with contextlib.suppress(OSError, RuntimeError):
            if at_once:
                self._writer.transport.abort()
            else:
                self._writer.close()


def encode(kind: str, **values: Any) -> bytes:
    """A message as it is sent."""
    return json.dumps({"is": kind, **values}).encode() + b"\n"


# Ports and interfaces -------------------------------------------------------------------------------------------------


async def listen(attend: Attend, *, ip: str, port: int) -> asyncio.Server:
    """Accept connections for `attend` on that port, of those alone who know the job's secret, if it has one. 0: a port
    that the system picks. `ip`: "" for all addresses.

    Raises JoinError where it is in use, and UserError where nobody may have it.
    """
    until_s, attend = time.monotonic() + PORT_S, guard(attend, read_secret(os.environ))
    while True:
        try:
            return await asyncio.start_server(attend, sock=open_port(ip, port), limit=LONGEST)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                why = os.strerror(error.errno or 0)
                way_out = "Choose one from 1024 to 32767."
                raise UserError(f"MASTER_PORT={port} can't be opened: {why}. {way_out}") from None
        if time.monotonic() > until_s:
            raise JoinError(
                f"MASTER_PORT={port} is in use on {socket.gethostname()}: another job, one that has not ended, or a "
                "second process with RANK=0 (`ss -ltnp` lists who listens). End it, or set another MASTER_PORT on all "
                "nodes."
            )
        await asyncio.sleep(PAUSE_S)


def open_port(ip: str, port: int, *, backlog: int = 4096) -> socket.socket:
    """A listener; "" and 0 as in `listen`. Raises OSError.

    One for both families: asyncio would open two, with two ports where the system picks them. The backlog is for a
    large job, whose members all come at once.
    """
    dual = not ip and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in ip else socket.AF_INET
    return socket.create_server((ip, port), family=family, backlog=backlog, dualstack_ipv6=dual)


def address_of(interface: str) -> str:
    """The address that gloo takes: the interface's first of IPv4, else its first of IPv6; "" where it has none."""
    found = {address.family: str(address.address) for address in reversed(psutil.net_if_addrs().get(interface, []))}
    return found.get(socket.AF_INET) or found.get(socket.AF_INET6, "")


def chosen_address(environ: Mapping[str, str]) -> str:
    """The address of the interface that the user has named; "" where none is. Raises UserError where it has none."""
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named and not address_of(named):
        raise UserError(
            f"GLOO_SOCKET_IFNAME must name an interface of {socket.gethostname()} that has an address, got {named}. "
            f"There are: {', '.join(name for name in psutil.net_if_addrs() if address_of(name))}. "
            "Unset, the one that routes to the master is taken."
        )
    return address_of(named)


def interface_variables(environ: Mapping[str, str], own_ip: str) -> dict[str, str]:
    """Have gloo, nccl and tensorpipe use the interface of `own_ip`, which routes to the others, unless one is named.

    By default gloo takes the address that the host's own name resolves to: 127.0.1.1 on a Debian machine, where no
    other node can reach it.
    """
    if not (routed := interface_of(own_ip)):
        return {}
    # To nccl a bare eth1 means every interface whose name begins so, eth10 too
    values = {"GLOO_SOCKET_IFNAME": routed, "NCCL_SOCKET_IFNAME": f"={routed}", "TP_SOCKET_IFNAME": routed}
    return {name: environ.get(name) or value for name, value in values.items()}


async def is_this_machine(host: str) -> bool:
    """False where nobody can say."""
    with contextlib.suppress(OSError):
        return any(is_loopback(ip) or interface_of(ip) for ip in await addresses_of(host))
    return False


async def in_thread(call: Callable[[], Found], *, timeout_s: float = math.inf) -> Found:
    """What `call` returns or raises, see `in_background`: asyncio's own threads would hold the end of the process.
    Raises TimeoutError where it takes longer."""
    async with asyncio.timeout(max(0.0, timeout_s)):
        return await asyncio.wrap_future(in_background(call))


async def addresses_of(host: str, *, timeout_s: float = CONNECT_S) -> list[str]:
    """The addresses that `host` resolves to, each once. Raises socket.gaierror."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    try:
        found = await in_thread(lambda: socket.getaddrinfo(host, None), timeout_s=timeout_s)
    except TimeoutError:
        raise socket.gaierror(socket.EAI_AGAIN, "the resolver gives no answer") from None
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def interface_of(ip: str) -> str:
    """The name of this machine's interface that carries `ip`, or ""."""
    carried = ((_plain(each.address), name) for name, found in psutil.net_if_addrs().items() for each in found)
    return next((name for address, name in carried if address == ip), "")


def _plain(ip: str) -> str:
    """Without the scope of IPv6, and without the prefix that a socket for both versions puts before IPv4."""
    return ip.partition("%")[0].removeprefix("::ffff:")


# The secret -----------------------------------------------------------------------------------------------------------


def read_secret(environ: Mapping[str, str]) -> bytes:
    """The job's secret, without the white space around it; b"" where none is set. Raises UserError."""
    if not (path := environ.get(SECRET_FILE, "")):
        return b""
    try:
        # Who opens a pipe would wait for its writer
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            info = os.fstat(file.fileno())
            secret = file.read(LONGEST_SECRET + 1).strip() if stat.S_ISREG(info.st_mode) else b""
    except OSError as error:
        raise UserError(f"{SECRET_FILE} must name a file that can be read, got {path}: {error.strerror}.") from None
    if not SHORTEST <= len(secret) <= LONGEST_SECRET:
        rule = f"a file of {SHORTEST} to {LONGEST_SECRET} bytes"
        raise UserError(f"{SECRET_FILE} must name {rule}, got {path}. For example: openssl rand -hex 32")
    # Kubernetes mounts a Secret as root's, readable to the pod's group
    if info.st_mode & (0o037 if info.st_uid == 0 else 0o077):
        mode = f"{stat.S_IMODE(info.st_mode):o}"
        raise UserError(f"{SECRET_FILE} must name a file of mode 600, got {mode} of {path}. Run chmod 600 {path}")
    return secret


def prove(secret: bytes, role: str, leaders: bytes, members: bytes) -> bytes:
    """That whoever has this `role` knows the secret. `leaders`, `members`: the nonces."""
    return hmac.digest(secret, b"rankup 1 " + role.encode() + leaders + members, "sha256")


def guard(attend: Attend, secret: bytes) -> Attend:
    """`attend` for those alone who know the secret. Strangers cost a bounded time, a bounded number of connections and
    a hundred bytes each, and hear nothing but a nonce."""
    if not secret:
        return attend
    half_open: dict[asyncio.StreamWriter, None] = {}

    async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(half_open) >= MOST_HALF_OPEN:  # the oldest goes: who knows the secret answers at once
            oldest = next(iter(half_open))
            del half_open[oldest]
            oldest.transport.abort()
        half_open[writer] = None
        try:
            nonce = secrets.token_bytes(NONCE)
            writer.write(encode("challenge", nonce=nonce.hex()))
            async with asyncio.timeout(HELLO_S):
                answer = await reader.readexactly(2 * NONCE)
            if not hmac.compare_digest(answer[NONCE:], prove(secret, "member", nonce, answer[:NONCE])):
                raise ConnectionError
            writer.write(encode("proof", proof=prove(secret, "leader", nonce, answer[:NONCE]).hex()))
        except (OSError, EOFError, asyncio.CancelledError):  # Python 3.11 prints a traceback of one that is passed on
            writer.transport.abort()
            return
        finally:
            half_open.pop(writer, None)
        await attend(reader, writer)

    return let_in


async def greeting(link: Link, secret: bytes) -> dict[str, Any]:
    """The leader's first message, once it has proved that it knows the secret. Where it does not, or where this side's
    is not the right one, a message like that of a leader who takes nobody. Raises ConnectionError where there is none.
    """
    message = await link.receive()
    if not secret and message["is"] != "challenge":
        return message
    leaders, mine, proof = b"", secrets.token_bytes(NONCE), b""
    with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
        leaders = bytes.fromhex(message["nonce"])
        link.write(mine + prove(secret, "member", leaders, mine))
        proof = bytes.fromhex((await link.receive())["proof"])
    if not (secret and hmac.compare_digest(proof, prove(secret, "leader", leaders, mine))):
        return {"over": f"rank 0 and this process have different secrets, or only one of them has one. {WAY_OUT}"}
    return await link.receive()
