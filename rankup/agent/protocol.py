"""What the members of a job say to each other: one JSON object per line, over TCP. No torch here.

A member stands for one or more ranks: it is the agent of their node, or, where another launcher started the ranks, one
of them. The leader runs beside the member with rank 0. Every member, that one too, holds one connection to it for as
long as the job lives. Memberships are numbered (`n`), and the number only grows.

| from a member                                      | from the leader                                            |
|----------------------------------------------------|------------------------------------------------------------|
| hello: a Member, n (last known membership)         | leader(over, ...): it speaks first, see `votes.knowledge`  |
|   basis: of that one, see `rankup.agent.votes`     | leads(..., port): in place of a hello, from the leader of  |
|                                                    | a job whose number of nodes may change; port 0: from a     |
|                                                    | member that looks for the leader                           |
| alive(ranks, warm): where its ranks are, see       | alive                                                      |
| `Record.sign`; whether it has imported torch       |                                                            |
| ask: where is everybody?                           | ranks(ranks, nodes): the newest sign of each, see          |
|                                                    | `Leader.signs`; nodes as `Leader.nodes` has them           |
| ready(n, problem): my ranks are gone, the route    | propose(n, ip, next=[ip, port, name]): its own address as  |
| works if problem is ""                             | others see it, the next member's listener                  |
| leaving, left: this node was asked to go, and goes | basis: of the membership, with the votes as they are now   |
| has(n, v): the newest basis that I know            |                                                            |
| standing: see `rankup.agent.record`                | prepare, confirm                                           |
| all else is for Leader's `hear`: end, stop, ...    | commit(n, ip, hosts=[[host, ranks], ...], port, job,       |
|                                                    | restarts, **more): where rank 0's store listens            |
|                                                    | lost(n, ranks, host, why, node): membership n is over; with|
|                                                    | node its whole node is lost                                |
|                                                    | waiting(text): who is missing                              |
|                                                    | left_out(why): leave, the ranks of this member have failed |
|                                                    | again and again, or another one does not reach it          |
|                                                    | spare: the job runs without this member, which waits       |
|                                                    | over(code, text): there will be no membership any more     |
|                                                    | all else is from Leader.tell: stop, ...                    |

Nothing that arrives is unpickled or executed. Whoever sends something else is disconnected.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_origin

from rankup.agent.network import LONGEST, Link, encode
from rankup.env.rank_env import holders, ranges
from rankup.timing import SAY_S

MOST_HOSTS = 8  # that one line names
HINT = (
    "gloo and nccl use any high port between the nodes: open them all, or narrow net.ipv4.ip_local_port_range on every "
    "node and open that range; or name another interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
)
KILLED = 137  # the code of a process that SIGKILL has ended, as a shell writes it
ARGUMENTS, SHARED = "digest of the arguments", "--shared-dir"  # among the settings

INT = range(-(2**63), 2**63)
JOB = re.compile(r"[\w.-]{0,200}")  # a part of a file's name
SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGUSR1"})
BASIS: dict[str, Any] = {
    "n": INT, "v": INT, "job": JOB, "used": [str], "voters": [str], "known": [(str, str, range(65536), str)],
    "same_arguments?": bool, "left?": bool, "before?": [{"n": INT, "voters": [str]}],
}
KNOWLEDGE: dict[str, Any] = {"token": str, "n": INT, "formed": INT, "running": bool, "job": JOB}  # see `votes`
LEADS = {**KNOWLEDGE, "port": range(65536)}  # who leads, to another leader
# What a member takes from a leader's message. A form is a type, a range, a choice of texts, a pattern, a list of one
# form, a row of forms, or values by name; a name with ? may be absent or null
LEADERS: dict[str, dict[str, Any]] = {
    "leader": {**KNOWLEDGE, "over": str, "at?": (str, range(65536))},
    "waiting": {"text": str}, "spare": {"basis": BASIS}, "basis": {"basis": BASIS},
    "propose": {"n": INT, "ip": str, "next?": (str, range(65536), str), "basis?": BASIS},
    "commit": {
        "n": INT, "ip": str, "hosts": [(str, INT)], "port": range(65536), "job": JOB, "restarts": INT, "why?": str,
        "store?": bool, "again?": bool, "change?": str, "basis?": BASIS,
    },
    "prepare": {"n": INT, "stop": INT}, "confirm": {"n": INT, "stop": INT}, "stop": {"signal": SIGNALS},
    "lost": {"n": INT, "ranks": [INT], "why": str, "code?": INT}, "ranks": {"ranks": [{"ago_s": float}]},
    "left_out": {"why": str},
    "over": {"code": INT, "text": str},
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
    """What a member says of itself. `ip` and `port` are those of its listener, see `Attendance`."""

    token: str  # of this process
    first_rank: int
    num_ranks: int
    world_size: int
    host: str
    pid: int
    left_s: float  # how long it looks for the leader, and the leader waits for the others, each time
    restarts: int = 0
    ip: str = ""  # given where the user chose an interface, else its own address on the route to the leader
    port: int = 0
    serves: int = 0  # the port where it leads, or says who does; 0 where the number of nodes is fixed
    settings: dict[str, str] = field(default_factory=dict)  # what must be the same for all, see `differences`

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
            kind: Any = (int, float) if f.type is float else get_origin(f.type) or f.type
            if not isinstance(value, kind):
                raise TypeError(f.name)
            if isinstance(value, str) and not (len(value) < 256 and value.isprintable()):
                raise ValueError(f.name)
        if member.first_rank < 0 or not 1 <= member.num_ranks <= member.world_size - member.first_rank:
            raise ValueError("ranks beyond the world size")
        if not all(isinstance(text, str) for text in member.settings.values()):
            raise TypeError("settings")
        return member


# The members that are here, as the leader sees them -------------------------------------------------------------------


@dataclass(eq=False)
class Seat:
    """A member and its connection. `unfit`, `leaves` and `has`: where the number of nodes may change."""

    link: Link
    member: Member
    claim: range  # of ranks, as it came
    since_s: float  # when it came, or was lost
    heard_s: float
    warm: bool  # it has imported torch
    lost: str = ""  # why
    problem: str = ""  # with the route to the next member
    signs: list[dict[str, Any]] = field(default_factory=list)  # of its ranks, as it said last
    signed_s: float = 0.0  # when it did
    finished: set[int] = field(default_factory=set)  # those of its ranks that have ended with 0
    unfit: str = ""  # why it is no part of the next membership
    leaves: bool = False  # was asked to
    has: tuple[int, ...] = ()  # the age of the newest basis that it has said to have

    @property
    def name(self) -> str:
        return f"node {self.claim.start // self.member.num_ranks} on {self.member.host}"


class Seats(dict[Link, Seat]):
    """All of them, by connection."""

    @property
    def members(self) -> list[Member]:
        """By rank."""
        return sorted((seat.member for seat in self.values()), key=lambda member: member.first_rank)

    @property
    def tokens(self) -> set[str]:
        return {seat.member.token for seat in self.values()}

    def of(self, token: str) -> Seat | None:
        return next((seat for seat in self.values() if seat.member.token == token), None)


# What the leader says of them, for users ------------------------------------------------------------------------------


def describe_missing(present: list[Member], *, of: int, waited_s: float) -> str:
    """Who has not joined: "rank 3 of 4 has not joined after 120 s (joined: 0-1 on node0; 2 on node1)"."""
    missing = sorted(set(range(of)) - {rank for member in present for rank in member.ranks})
    which = f"rank {missing[0]} of {of} has" if len(missing) == 1 else f"ranks {ranges(missing)} of {of} have"
    return f"{which} not joined after {waited_s:g} s (joined: {by_host(present) or 'none'})"


def by_host(members: Iterable[Member]) -> str:
    """ "0-1 on node0; 2 on node1"."""
    ranks = holders((rank, member.host) for member in members for rank in member.ranks)
    named = [f"{ranges(numbers)} on {host}" for host, numbers in sorted(ranks.items(), key=lambda item: min(item[1]))]
    more = [f"and ranks on {len(named) - MOST_HOSTS} more machines"] if len(named) > MOST_HOSTS else []
    return "; ".join(named[:MOST_HOSTS] + more)


def differences(member: Member, model: Member, *, arguments: bool) -> str:
    """How the settings of a member differ from another one's, in one line; "" where they do not. `arguments`: whether
    those of the script count.

    Different code or settings give wrong numbers, not errors: an all-reduce of different sizes returned garbage on one
    rank without a word.
    """
    theirs, ours = member.settings, model.settings
    if theirs == ours:  # of all members, whenever one comes
        return ""
    names = {*theirs, *ours} - (set() if arguments else {ARGUMENTS})
    found = []
    for name in sorted(name for name in names if theirs.get(name) != ours.get(name))[:8]:
        row = name, ours.get(name, "absent"), theirs.get(name, "nothing")
        # Another node has sent it: it may hold anything, and as much as it likes
        found.append("{} must be {}, got {}".format(*(text[:200].encode("unicode_escape").decode() for text in row)))
    way_out = "Start all nodes of a job with the same program, arguments and settings, and another job at another port."
    return f"{member.who} differs from {model.who}: {'; '.join(found)}. {way_out}" if found else ""


# An agent and its ranks ----------------------------------------------------------------------------------------------


class Links:
    """The agent's side of the lines to its ranks that import rankup, through a local socket. `address`: where it is.

    | from a rank                            | from the agent                              |
    |----------------------------------------|---------------------------------------------|
    | rank(local_rank): its first message    | lost(n, ranks, host, why), gone             |
    | end: an End, as it is about to end     | ranks(ranks): where each rank of the job is |
    | stop(signal): it got a signal itself   |                                             |
    | ask: where is everybody?               |                                             |
    """

    def __init__(self, hear: Callable[[int, Mapping[str, Any]], None]) -> None:
        """`hear` gets the local rank and its message."""
        self._hear = hear
        self._links: dict[int, Link] = {}
        self.lost = b""  # what those hear that connect after the membership was lost
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
            link.write(self.lost)
            while True:
                self._hear(local_rank, await link.receive())
        except (ConnectionError, LookupError, TypeError, ValueError, OverflowError, asyncio.CancelledError):
            pass  # the rank's process has ended, or the event loop: Python 3.11 prints a traceback of a task's end
        finally:
            link.close()
            if self._links.get(local_rank) is link:
                del self._links[local_rank]

    async def catch_up(self) -> None:
        """Hear what ranks said that have ended. After a stall of this process the word of their end may come first: to
        accept a connection and to read from it takes several turns of the event loop."""
        for _ in range(10):
            await asyncio.sleep(0)

    def tell(self, kind: str, **values: Any) -> None:
        """To all that are connected."""
        if kind in ("lost", "gone"):
            self.lost = encode(kind, **values)
        for link in self._links.values():
            link.send(kind, **values)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def _of_this_user(sock: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))  # process, user, group
    return bool(user == os.geteuid())


class AgentLine:
    """A rank's side of its line. `agent`: what its agent has put into RANKUP_AGENT. `hear`: gets what the others say,
    by `receive`, as often as there is something to read at `fileno`. Raises OSError where the agent has ended."""

    def __init__(self, agent: Mapping[str, Any], hear: Callable[[Mapping[str, Any]], None]) -> None:
        self._hear, self._socket = hear, socket.socket(socket.AF_UNIX)
        self._socket.connect(agent["socket"])
        self._socket.settimeout(SAY_S)  # an agent that is stopped reads nothing
        self._lock, self._begun = threading.Lock(), b""  # of a message whose end has not come
        self.fileno = self._socket.fileno()
        self.say("rank", local_rank=agent["local_rank"])

    def receive(self) -> bool:
        """Hear what has come. Returns False where nothing more will."""
        try:
            data = self._socket.recv(1 << 16)
            *whole, self._begun = (self._begun + data).split(b"\n")
            for line in whole:
                self._hear(json.loads(line))
        except (OSError, ValueError):
            return False
        return bool(data)

    def say(self, kind: str, **values: Any) -> bool:
        """Any thread. Raises nothing. Returns False where it reached nobody."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(encode(kind, **values))
            return True
        return False

    def close(self) -> None:
        """Leave, once the agent has heard what was said: it may see the end of this process before. Takes SAY_S at most
        for each message that comes meanwhile. Raises OSError where the agent has ended."""
        self._socket.shutdown(socket.SHUT_WR)
        while self.receive():
            pass


def tell_agent(agent: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    """Say how this rank ends, which has no line to its agent. `agent`: see `AgentLine`. `end`: see `End.message`."""
    with contextlib.suppress(OSError):
        line = AgentLine(agent, lambda message: None)
        line.say("end", **end)
        line.close()
