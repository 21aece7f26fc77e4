"""A leader without connections: members say what a test tells them to say, and only the test moves the clock."""

import asyncio
import functools
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from rankup.agent.events import (
    LOCAL,
    Accepted,
    Beat,
    Claim,
    Close,
    Ended,
    Event,
    Fail,
    Hear,
    Heard,
    Judged,
    Log,
    Output,
    Prepare,
    Prepared,
    Rules,
    Said,
    Send,
    Tick,
)
from rankup.agent.leading import Leading
from rankup.agent.meeting import Meeting
from rankup.agent.protocol import Member
from rankup.agent.votes import Basis
from rankup.env.node_env import Limits

BOUND_S = 60.0  # of each asynchronous test, for a machine that is ten times as busy
NEW = {"age": [0, 0, 0, ""], "before": [], "state": 0}  # what a member knows that has just started


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(BOUND_S):
                await test(*given, **named)

        asyncio.run(bounded())

    return run


def member(rank: int, *, of: int = 3, num_ranks: int = 1, token: str = "", **more: Any) -> Member:
    values = {"host": f"node{rank}", "pid": 1000 + rank, "left_s": 120.0, "ip": f"10.0.0.{rank}", **more}
    return Member(token or f"token{rank}", rank, num_ranks, of, **values)


class Nobody:
    """A node without ranks, for `Peers`. It can start any membership, and hears and prints nothing."""

    def hear(self, message: dict[str, Any]) -> None:
        pass

    def heartbeat(self) -> tuple[list[dict[str, Any]], bool]:
        return [], True

    async def prepare(self, n: int, size: int, job: str, restarts: int) -> dict[str, Any]:
        return {"port": 1, "store": False, "again": False}

    async def claim(self, job: str, n: int) -> bool:
        return True

    def judged(self, output: Judged) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def fail(self, error: Exception) -> None:
        raise error


class Puppet:
    """A member that says what the test tells it to say. `closed`: the leader has closed its connection."""

    def __init__(self, room: "Room", link: int, me: Member) -> None:
        self.room, self.link, self.me = room, link, me

    def say(self, kind: str, **values: Any) -> None:
        message = {"is": kind, **values}
        self.room.take(Said(message) if self.link == LOCAL else Heard(self.link, message))

    def hears(self, kind: str) -> dict[str, Any]:
        """Return the next message except heartbeats, which must be of this kind."""
        said = self.room.sent[self.link]
        assert said, f"nothing was said, not even {kind}"
        message = said.popleft()
        assert message["is"] == kind, message
        return message

    def hears_nothing(self) -> None:
        assert not self.room.sent[self.link], self.room.sent[self.link]

    @property
    def closed(self) -> bool:
        return self.link in self.room.closed

    def vanish(self) -> None:
        self.room.take(Ended(self.link))


class Room:
    """A leader of three nodes. `own`: the member in its process. `lines`: what it printed. `prepares`: whether each
    commit is prepared at once."""

    def __init__(self, me: Member | None = None, limits: Limits | None = None, **rules: Any) -> None:
        self.now_s, self.lines, self.prepares = 1000.0, list[str](), True
        self.sent: dict[int, deque[dict[str, Any]]] = defaultdict(deque)
        self.closed, self.claims, self.judged = set[int](), list[Claim](), list[Judged]()
        self.failed = ""
        self.others: list[Output] = []
        rules = {"job": "job", "epoch_s": 0.0, **rules}
        self.meeting = Meeting(me or member(0), Rules(limits=limits, **rules), now_s=self.now_s, leads=True)
        self.own = Puppet(self, LOCAL, me or member(0))
        self.take(Tick())
        self.own.say("alive", ranks=[], warm=True)

    @property
    def leader(self) -> Leading:
        assert self.meeting.leading is not None
        return self.meeting.leading

    def take(self, event: Event) -> None:
        for output in self.meeting.take(self.now_s, event):
            match output:
                case Send(links, message):
                    for link in links:
                        self._note(link, message)
                case Hear(message):
                    self._note(LOCAL, message)
                case Close(link):
                    self.closed.add(link)
                case Prepare(n) if self.prepares:
                    self.take(Prepared(n, {"port": 1, "store": True, "again": False}))
                case Claim():
                    self.claims.append(output)
                case Judged():
                    self.judged.append(output)
                case Log(text):
                    self.lines.append(text)
                case Fail(text):
                    self.failed = text
                case Beat():
                    pass
                case _:
                    self.others.append(output)

    def _note(self, link: int, message: Any) -> None:
        if message["is"] not in ("alive", "leader"):
            self.sent[link].append(message)

    def enter(self, me: Member, *, knows: Basis | None = None, warm: bool = True, state: int = 0) -> Puppet:
        """Return a puppet that has introduced itself. `knows`: the newest basis that it has. `state`: the newest
        membership whose state it has."""
        link = self.meeting.new_link()
        self.take(Accepted(link, me.ip, "10.0.0.0"))
        puppet = Puppet(self, link, me)
        knows = knows or Basis()
        puppet.say("hello", **vars(me), age=list(knows.age), before=knows.numbers, state=state, warm=warm)
        return puppet

    def all(self, count: int = 3) -> list[Puppet]:
        """Return that many puppets that have introduced themselves, the leader's own first."""
        return [self.own, *(self.enter(member(rank, of=self.own.me.world_size)) for rank in range(1, count))]

    def agree(self, puppets: Iterable[Puppet]) -> dict[str, Any]:
        """Answer the next proposal, and return the commit."""
        puppets = list(puppets)
        get_ready(puppets)
        return [puppet.hears("commit") for puppet in puppets][-1]

    def job(self, count: int = 3) -> list[Puppet]:
        """Return puppets in a membership."""
        puppets = self.all(count)
        self.pass_time(5.0, *puppets)
        self.agree(puppets)
        return puppets

    def pass_time(self, seconds: float, *alive: Puppet) -> None:
        """Move the clock in steps, as a running process sees it. Puppets in `alive` say a heartbeat in each step."""
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-6:
            for puppet in alive:
                puppet.say("alive", ranks=[], warm=True)
            self.now_s += min(0.25, until_s - self.now_s)
            self.take(Tick())


def get_ready(puppets: Iterable[Puppet]) -> None:
    """Answer the next proposal."""
    for puppet in puppets:
        puppet.say("ready", n=puppet.hears("propose")["n"], problem="")


def all_hear(kind: str, puppets: Iterable[Puppet]) -> list[dict[str, Any]]:
    return [puppet.hears(kind) for puppet in puppets]
