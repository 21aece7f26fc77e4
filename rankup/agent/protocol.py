"""What the members of a job say to each other: one JSON object per line, over TCP. No torch here.

A member stands for one or more ranks: it is the agent of their node, or, where another launcher started the ranks, one
of them. The leader runs beside the member with rank 0. Every member, that one too, holds one connection to it for as
long as the job lives. Memberships are numbered (`n`), and the number only grows.

| from a member                                      | from the leader                                            |
|----------------------------------------------------|------------------------------------------------------------|
| hello: a Member, version, n (last known membership)| leader(version, over, ...): it speaks first                |
|   basis: of that one, see `rankup.agent.meeting`   | leads(n, running, token, port): in place of a hello, from  |
|                                                    | the leader of a job whose number of nodes may change       |
|   settings: what must be the same for all          |                                                            |
| alive(ranks, warm): where its ranks are, see Sign;   | alive                                                      |
| ask: where is everybody?                           | ranks(ranks, nodes): the newest Sign of each, with host    |
|                                                    | and seen; nodes as `Leader.nodes` has them                 |
| ready(n, problem, mistake): my ranks are gone, the | propose(n, ip, next=[ip, port, name, interface]): its own  |
| route works if problem is ""; a mistake: of a user | address as others see it, the next member's listener       |
| leaving, left: this node was asked to go, and goes | basis: of the membership, with the votes as they are now   |
| has(n, v): the newest basis that I know            |                                                            |
| standing, late: see `rankup.agent.meeting`         | prepare, confirm, leave                                    |
| all else is for Leader's `hear`: end, stop, ...    | commit(n, ip, hosts=[[host, ranks], ...], **more): `ip` is |
|                                                    | rank 0's, where the store listens                          |
|                                                    | lost(n, ranks, host, why): membership n is over            |
|                                                    | waiting(text): who is missing                              |
|                                                    | left_out(why): leave, the ranks of this member have failed |
|                                                    | again and again                                            |
|                                                    | spare: the job runs without this member, which waits       |
|                                                    | refused(code, text, quiet): there will be no membership;   |
|                                                    | quiet: another member of this host prints that             |
|                                                    | all else is from Leader.tell: over, stop, ...              |

Nothing that arrives is unpickled or executed. Whoever sends something else is disconnected.
"""

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import psutil

from rankup.timing import CONNECT_S

Found = TypeVar("Found")
KILLED = 137  # the code of a process that SIGKILL has ended, as a shell writes it
VERSION = 5  # of the messages; hello and refused stay as they are
LONGEST = 1 << 20  # bytes of one message; the longest is a commit, which names every host,
# or a hello, which names every file of the script's own


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


INT = range(-(2**63), 2**63)
JOB = re.compile(r"[\w.-]{0,200}")  # a part of a file's name
SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGUSR1"})
BASIS: dict[str, Any] = {
    "n": INT, "v": INT, "job": JOB, "used": [str], "voters": [str], "known": [(str, str, range(65536), str)],
    "tie?": bool, "left?": bool, "before?": [{"n": INT, "voters": [str], "tie?": bool}],
}
# What the leader of agents says besides as it commits, and that of ranks which another launcher started
AGENTS = {"why": str, "port": range(65536), "job": JOB, "store": bool, "again": bool, "restarts": INT}
CHANGING = {"basis": BASIS, "change": str}  # where the number of nodes may change
RANKS = {"store": range(65536), "token": str, "attempt": JOB, "restarts": INT}
# What a member takes from a leader's message. A form is a type, a range, a choice of texts, a pattern, a list of one
# form, a row of forms, or values by name; a name with ? may be absent or null
LEADERS: dict[str, dict[str, Any]] = {
    "waiting": {"text": str}, "spare": {"basis": BASIS}, "basis": {"basis": BASIS},
    "propose": {"n": INT, "ip": str, "next?": (str, range(65536), str, str), "basis?": BASIS},
    "commit": {"n": INT, "ip": str, "hosts": [(str, INT)], "basis?": BASIS},
    "prepare": {"n": INT, "stop": INT}, "confirm": {"n": INT, "stop": INT}, "stop": {"signal": SIGNALS},
    "lost": {"n": INT, "ranks": [INT], "why": str, "code?": INT}, "ranks": {"ranks": [dict]}, "left_out": {"why": str},
    "over": {"code": INT, "text": str}, "refused": {"code": INT, "text": str},
}


def fits(value: Any, form: Any) -> bool:
    """Whether a value that came as JSON has the form, see `LEADERS`."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            fits(value.get(name.removesuffix("?")), each) or (name.endswith("?") and value.get(name[:-1]) is None)
            for name, each in form.items()
        )
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(each, form[0]) for each in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(fits, value, form))
    if isinstance(form, range | frozenset):  # a text would be looked for number by number
        return isinstance(value, int if isinstance(form, range) else str) and value in form
    if isinstance(form, re.Pattern):
        return isinstance(value, str) and form.fullmatch(value) is not None
    return isinstance(value, form)


@dataclass(frozen=True)
class Member:
    """What a member says of itself. `ip`, `port` and `interface` are those of its listener, see `Attendance`."""

    token: str  # of this process
    first_rank: int
    num_ranks: int
    world_size: int
    host: str
    pid: int
    digest: str  # of the settings that must be the same for all
    left_s: float  # how long it looks for the leader, and the leader waits for the others, each time
    restarts: int = 0
    ip: str = ""  # given where the user chose an interface, else its own address on the route to the leader
    port: int = 0
    interface: str = ""
    local_world_size: int = 0  # ranks of its node in all, where it knows; they may have members of their own
    place: str = ""  # the id of what it shares with all that have the same
    serves: int = 0  # the port where it leads, or says who does; 0 where the number of nodes is fixed

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def name(self) -> str:
        last = self.first_rank + self.num_ranks - 1
        which = f"rank {last}" if self.num_ranks == 1 else f"ranks {self.first_rank}-{last}"
        return f"{which} on {self.host}"

    @property
    def who(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @staticmethod
    def read(message: Mapping[str, Any]) -> "Member":
        """Raises TypeError or ValueError for what no member of ours says."""
        member = Member(**{f.name: message[f.name] for f in fields(Member) if f.name in message})
        for f in fields(Member):
            value = getattr(member, f.name)
            if not isinstance(value, (int, float) if f.type is float else f.type):  # type: ignore[arg-type]
                raise TypeError(f.name)
            if isinstance(value, str) and not (len(value) < 256 and value.isprintable()):
                raise ValueError(f.name)
        if member.first_rank < 0 or not 1 <= member.num_ranks <= member.world_size - member.first_rank:
            raise ValueError("ranks beyond the world size")
        return member


# An agent and its ranks ----------------------------------------------------------------------------------------------


class Links:
    """The agent's side of the lines to its ranks that import rankup, through a local socket. `address`: where it is.

    | from a rank                            | from the agent                              |
    |----------------------------------------|---------------------------------------------|
    | rank(local_rank): its first message    | lost(n, ranks, host, why), gone, leave      |
    | end: an End, as it is about to end     | stop(signal): somebody asks the job to stop |
    | stop(signal): it got a signal itself   | ranks(ranks): where each rank of the job is |
    | ask: where is everybody?               |                                             |
    """

    def __init__(self, hear: Callable[[int, Mapping[str, Any]], None]) -> None:
        """`hear` gets the local rank and its message."""
        self._hear = hear
        self._links: dict[int, Link] = {}
        self.address = ""
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begin to listen. Nobody guesses the name, and other users are turned away."""
        # An abstract name, which begins with a zero byte, leaves nothing in the file system, however the agent ends
        self.address = f"\0rankup-{secrets.token_hex(16)}"
        self._server = await asyncio.start_unix_server(self._attend, self.address, limit=LONGEST)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link, local_rank = Link(reader, writer), -1
        try:
            if not _of_this_user(writer.get_extra_info("socket")):
                return
            local_rank = int((await link.receive())["local_rank"])
            self._links[local_rank] = link
            while True:
                self._hear(local_rank, await link.receive())
        except (ConnectionError, LookupError, TypeError, ValueError, OverflowError):
            pass  # the rank's process has ended
        except asyncio.CancelledError:
            pass  # the event loop ends. Python 3.11 prints a traceback where this is passed on
        finally:
            link.close()
            if self._links.get(local_rank) is link:
                del self._links[local_rank]

    def tell(self, kind: str, **values: Any) -> None:
        """To all that are connected."""
        for link in self._links.values():
            link.send(kind, **values)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def _of_this_user(sock: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))  # process, user, group
    return bool(user == os.geteuid())


# Addresses ------------------------------------------------------------------------------------------------------------


async def in_thread(call: Callable[[], Found], *, timeout_s: float) -> Found:
    """What `call` returns or raises, in a thread of its own. Raises TimeoutError where it takes longer.

    A disk or a resolver may hang, and nobody waits for that thread, not even the end of the process; asyncio's own
    threads would hold that.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Found] = loop.create_future()

    def put(set_it: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if done.done() else set_it(value))

    def work() -> None:
        try:
            put(done.set_result, call())
        except Exception as error:
            put(done.set_exception, error)

    threading.Thread(target=work, name="waits", daemon=True).start()
    async with asyncio.timeout(max(0.0, timeout_s)):
        return await done


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
    for name, addresses in psutil.net_if_addrs().items():
        if any(_plain(address.address) == ip for address in addresses):
            return name
    return ""


def _plain(ip: str) -> str:
    """Without the scope of IPv6, and without the prefix that a socket for both versions puts before IPv4."""
    return ip.partition("%")[0].removeprefix("::ffff:")
