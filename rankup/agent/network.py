"""Connections between members, and the addresses, ports and interfaces of this machine. If a job has a secret, in
RANKUP_SECRET_FILE, only processes that know it may talk to the port where members meet.

As in Python's multiprocessing.connection, both sides prove that they know the secret, and neither sends it. Each side
draws a nonce, so that a recorded answer is useless, and signs its own role, so that an answer sent back proves nothing.

| leader -> member | challenge(nonce): a message as in `protocol`                                                     |
| member -> leader | its own nonce and HMAC-SHA256(secret, "member" + both nonces): 64 raw bytes, not a message       |
| leader -> member | proof(proof): HMAC-SHA256(secret, "leader" + both nonces)                                        |

All later messages are the same as without a secret. They are neither signed nor encrypted.
"""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import json
import logging
import math
import os
import re
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

log = logging.getLogger("rankup")
T = TypeVar("T")
Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LONGEST = 1 << 20  # bytes of one message; the longest are a commit, which names each host, and a hello, which names
# each file that the script imports from its folder
BACKLOG = 4096  # all members of a large job connect at once, and those that find the queue full wait for a second
AT_ONCE = 100  # how many connections the event loop accepts in one turn: each is an open file until its turn comes
SECRET_FILE = "RANKUP_SECRET_FILE"
WAY_OUT = f"Set {SECRET_FILE} to the same content on all nodes, or on none"
OTHER_SECRET = f"rank 0 and this process have different secrets, or only one of them has one. {WAY_OUT}"
NONCE = 32  # bytes of a nonce, and of an HMAC-SHA256
SHORTEST, LONGEST_SECRET = 16, 4096  # bytes
MOST_NAMED = 8  # machines with another secret; strangers must not fill the log
MOST_HALF_OPEN = 256  # connections that have not proved the secret yet; a process may open 1,024 files by default


async def _open(ip: str, port: int, *, timeout_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect. Raises an OSError. On a busy machine the event loop may run again only after the timeout. It then looks
    at its clock before it looks at the connection, which may stand long since: ask the kernel."""
    sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, proto=socket.IPPROTO_TCP)
    try:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, (ip, port))
        except TimeoutError:
            if sock.connect_ex((ip, port)) not in (0, errno.EISCONN):
                raise
        return await asyncio.open_connection(sock=sock, limit=LONGEST)
    except BaseException:
        sock.close()
        raise


class Link:
    """A connection to another member, or to a rank of this node. Use it only in the thread of the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        names = (writer.get_extra_info(name) for name in ("sockname", "peername"))
        # The name of a Unix socket is a string, not a pair
        self.local_ip, self.remote_ip = (_plain(name[0]) if isinstance(name, tuple) else "" for name in names)

    @classmethod
    async def connect(cls, host: str, port: int, *, timeout_s: float = CONNECT_S) -> "Link":
        """Connect to the first address of `host` that accepts. `timeout_s`: for each address; time in which this
        process had no CPU does not count. Raises the OSError of the last address (TimeoutError, ConnectionRefusedError,
        ...), or gaierror if the name does not resolve."""
        last: OSError = TimeoutError()
        for ip in await addresses_of(host, timeout_s=timeout_s):
            try:
                reader, writer = await _open(ip, port, timeout_s=timeout_s)
            except OSError as error:
                last = error
                continue
            if writer.get_extra_info("sockname") != writer.get_extra_info("peername"):
                return cls(reader, writer)
            # If nobody listens and the kernel picks this very port for our side, TCP connects the socket to itself
            writer.close()
            last = ConnectionRefusedError()
        raise last

    def send(self, kind: str, **values: Any) -> None:
        """Send a message. Returns at once and raises nothing: `receive` raises if the connection is lost."""
        self.write(encode(kind, **values))

    def write(self, data: bytes) -> None:
        """Send a message that is encoded already, as `send` does."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self, forms: Mapping[str, Any] = {}) -> dict[str, Any]:
        """Return the next message. `forms`: the form of each kind of message, see `fits`. Raises ConnectionError if
        no message will come, and ValueError if the next line is not a message or does not have the form of its kind."""
        try:
            message: dict[str, Any] = json.loads(await self._reader.readuntil())
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from None
        except (ValueError, RecursionError):
            message = {}
        if not fits(message, {"is": str}) or not fits(message, forms.get(message["is"], {})):
            raise ValueError(f"{message!r:.200}")
        return message

    def close(self, *, at_once: bool = False) -> None:
        """Close after all messages have gone out. `at_once` drops them: a process that is stopped never reads them."""
        with contextlib.suppress(OSError, RuntimeError):
            if at_once:
                self._writer.transport.abort()
            else:
                self._writer.close()


def encode(kind: str, **values: Any) -> bytes:
    """Return a message as the bytes of one line."""
    return json.dumps({"is": kind, **values}).encode() + b"\n"


def fits(value: Any, form: Any) -> bool:
    """Return whether a value that came as JSON has this form, see `protocol.MEMBERS`."""
    if isinstance(form, dict) and "*" in form:  # any names
        return isinstance(value, dict) and all(fits(each, form["*"]) for each in value.values())
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            fits(value.get(name.removesuffix("?")), each) or (name.endswith("?") and value.get(name[:-1]) is None)
            for name, each in form.items()
        )
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(each, form[0]) for each in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(fits, value, form))
    if isinstance(form, range | frozenset):  # check the type first: `"x" in range(n)` compares with each number
        return isinstance(value, int if isinstance(form, range) else str) and value in form
    if isinstance(form, re.Pattern):
        return isinstance(value, str) and form.fullmatch(value) is not None
    if form is float and isinstance(value, int):  # JSON has integers that no float can hold
        return abs(value) < 2**63
    return isinstance(value, form)


# Ports and interfaces -------------------------------------------------------------------------------------------------


async def listen(accept: Accept, *, ip: str, port: int) -> asyncio.Server:
    """Listen, and serve each connection with `accept`. If the job has a secret, serve only processes that know it.
    `port`: 0 lets the kernel pick one. `ip`: "" means all addresses.

    Raises JoinError if the port is in use, and UserError if this user may not open it.
    """
    until_s, secret = time.monotonic() + PORT_S, read_secret(os.environ)
    accept = guard(accept, secret)
    while True:
        try:
            sock = open_port(ip, port)
            server = await asyncio.start_server(accept, sock=sock, limit=LONGEST, backlog=AT_ONCE)
            if not secret:  # otherwise strangers must not fill a long queue before members
                sock.listen(BACKLOG)  # asyncio has set it to AT_ONCE
            return server
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


def open_port(ip: str, port: int, *, backlog: int = BACKLOG) -> socket.socket:
    """Return a listening socket. `ip` and `port`: as in `listen`. Raises OSError.

    One socket serves IPv4 and IPv6. asyncio would open two, and with port 0 they would have different ports.
    """
    dual = not ip and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in ip else socket.AF_INET
    return socket.create_server((ip, port), family=family, backlog=backlog, dualstack_ipv6=dual)


def address_of(interface: str) -> str:
    """Return the address that gloo takes: the interface's first IPv4 address, else its first IPv6 address, else ""."""
    found = {address.family: str(address.address) for address in reversed(psutil.net_if_addrs().get(interface, []))}
    return found.get(socket.AF_INET) or found.get(socket.AF_INET6, "")


def chosen_address(environ: Mapping[str, str]) -> str:
    """Return the address of the interface that GLOO_SOCKET_IFNAME names, or "". Raises UserError if it has none."""
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named and not address_of(named):
        raise UserError(
            f"GLOO_SOCKET_IFNAME must name an interface of {socket.gethostname()} that has an address, got {named}. "
            f"There are: {', '.join(name for name in psutil.net_if_addrs() if address_of(name))}. "
            "If the variable is not set, rankup takes the one that routes to the master."
        )
    return address_of(named)


def interface_variables(environ: Mapping[str, str], own_ip: str) -> dict[str, str]:
    """Return variables that make gloo, nccl and tensorpipe use the interface of `own_ip`, which routes to the other
    nodes. Variables in `environ` keep their values.

    By default gloo takes the address of the machine's host name. On Debian that is 127.0.1.1, which others can't use.
    """
    if not (routed := interface_of(own_ip)):
        return {}
    # For nccl, eth1 without "=" means each interface whose name begins with it, also eth10
    values = {"GLOO_SOCKET_IFNAME": routed, "NCCL_SOCKET_IFNAME": f"={routed}", "TP_SOCKET_IFNAME": routed}
    return {name: environ.get(name) or value for name, value in values.items()}


async def is_this_machine(host: str) -> bool:
    """Return whether `host` names this machine; False if it does not resolve."""
    with contextlib.suppress(OSError):
        return any(is_loopback(ip) or interface_of(ip) for ip in await addresses_of(host))
    return False


async def in_thread(call: Callable[[], T], *, timeout_s: float = math.inf) -> T:
    """Run `call` in a thread, and return or raise what it does. The thread is one of `in_background`, because asyncio's
    own threads would keep the process from ending. Raises TimeoutError if the call takes longer than `timeout_s`."""
    async with asyncio.timeout(max(0.0, timeout_s)):
        return await asyncio.wrap_future(in_background(call))


async def addresses_of(host: str, *, timeout_s: float = CONNECT_S) -> list[str]:
    """Return the addresses that `host` resolves to, without duplicates. Raises socket.gaierror."""
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
    """Return the name of this machine's interface that has the address `ip`, or ""."""
    carried = ((_plain(each.address), name) for name, found in psutil.net_if_addrs().items() for each in found)
    return next((name for address, name in carried if address == ip), "")


def _plain(ip: str) -> str:
    """Remove the scope of an IPv6 address, and the prefix that a dual-stack socket puts before an IPv4 address."""
    return ip.partition("%")[0].removeprefix("::ffff:")


# The secret -----------------------------------------------------------------------------------------------------------


def read_secret(environ: Mapping[str, str]) -> bytes:
    """Return the job's secret without surrounding white space, or b"" if the job has none. Raises UserError."""
    if not (path := environ.get(SECRET_FILE, "")):
        return b""
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            info = os.fstat(file.fileno())
            secret = file.read(LONGEST_SECRET + 1).strip() if stat.S_ISREG(info.st_mode) else b""
    except OSError as error:
        raise UserError(f"{SECRET_FILE} must name a file that can be read, got {path}: {error.strerror}.") from None
    if not SHORTEST <= len(secret) <= LONGEST_SECRET:
        rule = f"a file of {SHORTEST} to {LONGEST_SECRET} bytes"
        raise UserError(f"{SECRET_FILE} must name {rule}, got {path}. For example: openssl rand -hex 32")
    # Kubernetes mounts a Secret as a file of root that the pod's group may read
    if info.st_mode & (0o037 if info.st_uid == 0 else 0o077):
        mode = f"{stat.S_IMODE(info.st_mode):o}"
        raise UserError(f"{SECRET_FILE} must name a file of mode 600, got {mode} of {path}. Run chmod 600 {path}")
    return secret


def prove(secret: bytes, role: str, leaders: bytes, members: bytes) -> bytes:
    """Return the proof that the side `role` knows the secret. `leaders`, `members`: the nonces of the two sides."""
    return hmac.digest(secret, b"rankup 1 " + role.encode() + leaders + members, "sha256")


def guard(accept: Accept, secret: bytes) -> Accept:
    """Return an `accept` that serves only processes that know the secret. All others get nothing but a nonce, and can
    use only a limited number of connections, each for a limited time and a hundred bytes."""
    if not secret:
        return accept
    half_open: dict[asyncio.StreamWriter, None] = {}
    named = set[str]()  # addresses of processes that have answered with another secret

    async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(half_open) >= MOST_HALF_OPEN:  # drop the oldest: a process that knows the secret has answered
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
                ip = _plain(writer.get_extra_info("peername")[0])
                if ip not in named and len(named) < MOST_NAMED:
                    named.add(ip)
                    log.warning("a process on %s was refused: it has another secret, or none. %s", ip, WAY_OUT)
                raise ConnectionError
            writer.write(encode("proof", proof=prove(secret, "leader", nonce, answer[:NONCE]).hex()))
        except (OSError, EOFError, asyncio.CancelledError):  # Python 3.11 prints a traceback of a CancelledError
            writer.transport.abort()
            return
        finally:
            half_open.pop(writer, None)
        await accept(reader, writer)

    return let_in


async def greeting(link: Link, secret: bytes) -> dict[str, Any]:
    """Return the leader's first message, after both sides have proved that they know the secret. If the secrets differ,
    return the message of a leader that takes no members. Raises what `Link.receive` raises."""
    message = await link.receive()
    if not secret and message["is"] != "challenge":
        return message
    leaders, mine, proof = b"", secrets.token_bytes(NONCE), b""
    with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
        leaders = bytes.fromhex(message["nonce"])
        link.write(mine + prove(secret, "member", leaders, mine))
        proof = bytes.fromhex((await link.receive())["proof"])
    if not (secret and hmac.compare_digest(proof, prove(secret, "leader", leaders, mine))):
        return {"over": OTHER_SECRET}
    return await link.receive()
