"""Who belongs to a job: the leader meets all members, names who is missing, and says when one is lost. No torch here.

A member stands for one or more ranks: it is the agent of their node, or, where another launcher started the ranks, one
of them. The leader runs beside the member with rank 0, at MASTER_ADDR:MASTER_PORT. Every member, that one too, holds a
connection to it for as long as the job lives. The kernel closes the connections of a process that ends, so a loss is
known at once; what is frozen or cut off is found by its silence.

| from a member                                     | from the leader                                           |
|---------------------------------------------------|-----------------------------------------------------------|
| hello: who I am, the digest of my settings        | leader: its version                                       |
| ack: I am ready for this membership               | propose: the number of a membership                       |
| settings: those with my digest                    | settings: send them                                       |
| alive: where my ranks are                         | alive                                                     |
| end: one of my ranks has ended                    | waiting: who is missing                                   |
| stop: somebody asks the job to stop               | commit: the membership, its hosts, what the leader added  |
|                                                   | lost: a membership is over, and why                       |
|                                                   | refused: there will be no membership, and why             |
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rankup.agent.protocol import Link

VERSION = 1
ALIVE_S = 1.0  # between two signs of life
# A machine with too much to do may look dead for a while, so long is its silence accepted.
SILENT_S = 30.0
# Two processes claim one rank: the earlier may be one that died with its machine. So long it has to answer.
ANSWER_S = 1.5
LIVES = float("inf")
NOTICE_S = 10.0  # between two lines that say who is missing
HELLO_S = 5.0
MOST_HOSTS = 8  # that one line names


@dataclass(frozen=True)
class Member:
    """What a member says of itself. `ip`: its address on the route to the leader, as the leader sees it."""

    token: str  # of this process
    first_rank: int
    num_ranks: int
    world_size: int
    host: str
    pid: int
    digest: str
    left_s: float  # how long it will wait for the others
    restarts: int = 0
    ip: str = ""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def who(self) -> str:
        return f"{plural('rank', self.ranks)} on {self.host} (pid {self.pid})"

    @staticmethod
    def read(message: Mapping[str, Any], *, ip: str) -> "Member":
        """Raises ValueError for what no member of ours says."""
        known = {f.name: message[f.name] for f in fields(Member) if f.name in message}
        try:
            member = replace(Member(**known), ip=ip)
        except TypeError as error:
            raise ValueError(str(error)) from None
        kinds = {f.name: f.type for f in fields(Member)}
        if any(not isinstance(value, (int, float) if kinds[name] is float else kinds[name])  # type: ignore[arg-type]
               for name, value in asdict(member).items()):
            raise ValueError("a value of another type")
        if member.first_rank < 0 or not 1 <= member.num_ranks <= member.world_size - member.first_rank:
            raise ValueError("ranks beyond the world size")
        return member


@dataclass
class _Seat:
    """A member's connection, as the leader sees it."""

    member: Member
    heard_s: float
    until_s: float  # when its time to join is over
    ready: bool = False  # for the membership that is proposed
    finished: set[int] = field(default_factory=set)  # its ranks that have ended with 0


class Leader:
    """Decides who belongs to the job. Everything happens in one event loop."""

    def __init__(
        self, me: Member, *, say: Callable[[str], None], prepare: Callable[[int], Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`me`: the member beside the leader. `prepare`: what the commit of a membership says beside its members."""
        self.me, self._say, self._prepare, self._clock = me, say, prepare, clock
        self.membership = 0  # the newest that was proposed
        self.proposed = self.running = False
        self._seats: dict[Link, _Seat] = {}
        self._silent: dict[int, Member] = {}  # by first rank: had joined, and went before there was a membership
        self._settings: dict[str, Mapping[str, str]] = {}  # by digest
        self._doubted_s: dict[str, float] = {}  # by token: since when it has to show that it lives
        self._begun_s = self._noticed_s = clock()

    # Connections --------------------------------------------------------------------------------------------------

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The life of one connection, for `asyncio.start_server`."""
        link = Link(reader, writer)
        link.send("leader", version=VERSION)
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await link.receive()
            self.enter(link, Member.read(hello, ip=link.remote_ip), settings=hello.get("settings"))
            while True:
                self.hear(link, await link.receive())
        except (ConnectionError, TimeoutError, ValueError, KeyError, TypeError):
            self.leave(link, "its process has ended")

    def enter(self, link: Link, member: Member) -> None:
        """A member introduces itself."""
        now_s = self._clock()
        self._seats[link] = _Seat(member, now_s, now_s + member.left_s)
        self._silent = {first: gone for first, gone in self._silent.items() if first not in member.ranks}
        self._unpropose()
        if member.world_size == self.me.world_size:
            self.judge()
        else:
            self.refuse(
                f"{member.who} was started with WORLD_SIZE={member.world_size}, {self.me.who} with "
                f"WORLD_SIZE={self.me.world_size}. Set the same on all ranks."
            )

    def leave(self, link: Link, why: str) -> None:
        """A member's connection has ended, or is given up."""
        link.close()
        if (seat := self._seats.pop(link, None)) is None:
            return
        if not self.running:
            self._silent[seat.member.first_rank] = seat.member
            self._unpropose()
            self.judge()
        elif len(seat.finished) < seat.member.num_ranks:
            self.lose(seat.member, why)

    def hear(self, link: Link, message: Mapping[str, Any]) -> None:
        """A member says something."""
        if (seat := self._seats.get(link)) is None:
            return
        seat.heard_s = self._clock()
        if seat.member.token in self._doubted_s:
            self._doubted_s[seat.member.token] = LIVES
        if message["is"] == "ready" and message["membership"] == self.membership:
            seat.ready = True
        elif message["is"] == "settings":
            self._settings[seat.member.digest] = {str(k): str(v) for k, v in message["settings"].items()}
        self.judge()

    def tick(self) -> None:
        """Call it a few times a second: signs of life, deadlines, and who is missing."""
        now_s = self._clock()
        for link, seat in list(self._seats.items()):
            doubted_s = now_s - self._doubted_s.get(seat.member.token, now_s)
            if now_s - seat.heard_s > SILENT_S or doubted_s > ANSWER_S:
                self.leave(link, f"gave no sign of life for {now_s - seat.heard_s:.0f} s")
            elif not self.running and now_s > seat.until_s:
                text = f"{self._missing(now_s)}. Was every process started, with this MASTER_ADDR and WORLD_SIZE?"
                link.send("refused", code=JOIN_FAILED, text=text)
                seat.until_s = float("inf")
        if not self.running and now_s - self._noticed_s > NOTICE_S:
            self._noticed_s = now_s
            self._say(f"still waiting: {self._missing(now_s)}")
            self._tell("waiting", text=self._missing(now_s))
        self.judge()

    # Decisions ----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Propose a membership once there is a living member for each rank; commit it once all are ready for it."""
        if self.running:
            return
        members = [seat.member for seat in self._seats.values()]
        if twice := self._claimed_twice(members):
            self._doubt(twice)
        elif sum(member.num_ranks for member in members) < self.me.world_size:
            return
        elif not self.proposed:
            self._propose(members)
        elif all(seat.ready for seat in self._seats.values()):
            self._commit(members)

    def _propose(self, members: list[Member]) -> None:
        one_of_each = {seat.member.digest: link for link, seat in self._seats.items()}
        if unknown := one_of_each.keys() - self._settings.keys():
            for digest in unknown:
                one_of_each[digest].send("settings")
        elif len(one_of_each) > 1:
            self.refuse(describe_differences(members, self._settings), code=USER_MISTAKE)
        else:
            self.membership, self.proposed = self.membership + 1, True
            self._tell("propose", membership=self.membership)

    def _unpropose(self) -> None:
        self.proposed = False
        for seat in self._seats.values():
            seat.ready = False

    def _commit(self, members: list[Member]) -> None:
        self.running = True
        members.sort(key=lambda member: member.first_rank)
        hosts = [[member.host, member.num_ranks] for member in members]
        self._tell("commit", membership=self.membership, hosts=hosts, **self._prepare(self.membership))

    def lose(self, member: Member, why: str, **more: Any) -> None:
        """The membership is over: every member ends its ranks, and is then ready for the next one."""
        self.running = False
        self._unpropose()
        self._begun_s = self._noticed_s = self._clock()
        for seat in self._seats.values():
            seat.until_s = self._begun_s + seat.member.left_s
        self._tell("lost", membership=self.membership, ranks=list(member.ranks), host=member.host, why=why, **more)
        self.judge()

    def refuse(self, text: str, *, code: int = JOIN_FAILED) -> None:
        """There will be no membership."""
        self._tell("refused", code=code, text=text)

    def _tell(self, kind: str, **values: Any) -> None:
        for link in self._seats:
            link.send(kind, **values)

    # Words --------------------------------------------------------------------------------------------------------

    def _claimed_twice(self, members: Iterable[Member]) -> list[Member]:
        """Two that claim one rank, the older first; [] where there are none."""
        owners: dict[int, Member] = {}
        for member in members:
            for rank in member.ranks:
                if rank in owners:
                    return [owners[rank], member]
                owners[rank] = member
        return []

    def _doubt(self, twice: list[Member]) -> None:
        """Have both show that they live. Where both do, no membership can be right."""
        if all(self._doubted_s.get(member.token) == LIVES for member in twice):
            self.refuse(describe_claims(twice))
            return
        for link, seat in self._seats.items():
            if seat.member in twice and seat.member.token not in self._doubted_s:
                self._doubted_s[seat.member.token] = self._clock()
                link.send("call")

    def _missing(self, now_s: float) -> str:
        return describe_missing(
            [seat.member for seat in self._seats.values()], list(self._silent.values()),
            world_size=self.me.world_size, waited_s=round(now_s - self._begun_s),
        )


# A member's side ------------------------------------------------------------------------------------------------------


class Attendance:
    """This member's connection to the leader, made again while there is time."""

    def __init__(
        self, me: Member, settings: Mapping[str, str], find_leader: Callable[[], Awaitable[tuple[str, int]]], *,
        notice: Callable[[str], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`find_leader`: host and port, which may change from one call to the next. `notice`: told what is waited for."""
        self.me, self._settings, self._find_leader, self._notice, self._clock = me, settings, find_leader, notice, clock
        self.problem = "nothing was heard from rank 0"  # why there is no membership yet
        self._link: Link | None = None

    def say(self, kind: str, **values: Any) -> None:
        """To the leader, if there is one just now."""
        if self._link is not None:
            self._link.send(kind, **values)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What the leader decides: propose, commit, lost, refused; and "gone" where it is lost itself.

        After "gone" it is looked for again, for `me.left_s` seconds. Raises JoinError where it is not found in time.
        """
        while True:
            await self._connect()
            assert self._link is not None
            beats = asyncio.create_task(self._beat(self._link))
            try:
                async for message in self._messages(self._link):
                    yield message
            finally:
                beats.cancel()
                self._link.close()
                self._link = None
            yield {"is": "gone"}

    async def _messages(self, link: Link) -> AsyncIterator[dict[str, Any]]:
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    message = await link.receive()
            except (ConnectionError, TimeoutError):
                return
            if message["is"] == "settings":
                link.send("settings", settings=dict(self._settings))
            elif message["is"] == "call":
                link.send("alive")
            elif message["is"] == "waiting":
                self.problem = message["text"]
                self._notice(self.problem)
            elif message["is"] != "alive":
                yield message

    async def _connect(self) -> None:
        until_s = self._clock() + self.me.left_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                host, port = await self._find_leader()
                link = await Link.connect(host, port)
                async with asyncio.timeout(HELLO_S):
                    greeting = await link.receive()
                if greeting.get("version") != VERSION:
                    raise ConnectionError(f"it speaks version {greeting.get('version')}, this process {VERSION}")
                link.send("hello", **asdict(replace(self.me, left_s=max(0.0, until_s - self._clock()))))
                self._link = link
                return
            except OSError as error:
                self.problem = explain(error)
            if self._clock() > until_s:
                raise JoinError(self.problem)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _beat(self, link: Link) -> None:
        while True:
            link.send("alive")
            await asyncio.sleep(ALIVE_S)
