"""Who belongs to a job: the leader meets all members, names who is missing, and says when one is lost. No torch here.

The kernel closes the connections of a process that ends, so a loss is known at once. A process that is stopped or cut
off is found by its silence. The messages are in `protocol`, a member's side of them is in `attendance`.

With `Limits` the number of nodes may change. A node keeps its seat, and its ranks are numbered at each proposal: the
leader's first, then those of the last membership in its order, then newcomers; who is beyond `most` is a spare. A
newcomer that is needed has all ranks stop before one step, and save. How they stop is in `stop`, which part of a job
that was cut goes on is in `votes`.

A newcomer that differs from the job is turned away alone, also where it is the one that is to lead, see `sameness`.
"""

import asyncio
import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rankup import timing
from rankup.agent.network import Link, encode, foreign_address, interface_of
from rankup.agent.protocol import (
    HINT,
    KILLED,
    SIGNALS,
    VERSION,
    Member,
    describe_change,
    describe_claims,
    describe_late,
    describe_missing,
)
from rankup.agent.record import StopAgreement
from rankup.agent.sameness import Sameness
from rankup.agent.votes import NONE, age, claims, electorates, outvoted, recount, same_job, without
from rankup.env.node_env import Limits
from rankup.env.rank_env import is_loopback, ranges
from rankup.errors import JOIN_FAILED, USER_MISTAKE, JoinError, PeerLost, UserError

ENDED = "its process has ended"


@dataclass(eq=False)
class _Seat:
    """A member and its connection, as the leader sees them."""

    link: Link
    member: Member
    heard_s: float
    claim: range  # of ranks, as it came
    came_s: float = 0.0
    unfit: str = ""  # why it is no part of the next membership
    leaves: bool = False  # was asked to
    has: tuple[int, int] = (0, 0)  # the newest basis that it has said to have
    num_heard: int = 0  # messages
    problem: str = ""  # with the route to the next member
    warm: bool = True  # it has imported torch
    signs: list[dict[str, Any]] = field(default_factory=list)  # of its ranks, as it said last
    signed_s: float = 0.0  # when it did
    finished: set[int] = field(default_factory=set)  # those of its ranks that have ended with 0


class Leader:
    """Decides who belongs to the job. Everything happens in one event loop, and the cost of a message does not depend
    on the number of members.

    `membership`: the newest number. `running`: whether that one was committed and is not lost.
    """

    def __init__(
        self, me: Member, *, say: Callable[[str], None], prepare: Callable[[int], Awaitable[Mapping[str, Any]]],
        hear: Callable[[Member, Mapping[str, Any]], None], clock: Callable[[], float] = time.monotonic,
        limits: Limits | None = None, outdone: Callable[[str, int], None] = lambda ip, port: None,
        claim: Callable[[str, int], Awaitable[bool]] | None = None,
    ) -> None:
        """`me`: the member beside the leader; all are refused where they have not met `me.left_s` after the start, or
        after the last loss. `say`: prints a line. `prepare(n)`: what the commit of a membership says beside its
        members. All are ready then, and have said how their ranks ended. It may take PREPARE_S, and is cancelled where
        a member goes meanwhile; where it raises, all are refused with that text.

        `hear(member, message)` gets what is not the meeting's own; where such a message has an `n`, it must be the last
        committed one. A member's loss that the leader has found itself is {"is": "lost", "n", "why"}, after all have
        been told.

        `limits`: None where the number of nodes is fixed. `outdone(ip, port)`: there is a leader that knows a newer
        membership. `claim(job, n)`: whether this member owns what follows membership `n`, at the place that it shares.
        """
        self._limits, self._outdone, self._claim = limits, outdone, claim
        self._beaten_s = -math.inf  # when another part of the job owned what is next
        self._foreign_s = -math.inf  # when somebody called who knows a newer membership
        self.basis, self._next = NONE, NONE  # of the last membership, and what this leader has proposed last
        self.changing = False  # the ranks have been asked to stop, for another membership
        self._chosen: list[_Seat] = []  # of the membership that runs or is proposed, by rank
        self._names: dict[str, str] = {}  # for the user, by token
        self._lost: dict[int, tuple[_Seat, float, str]] = {}  # by claim: when and why
        self.me, self._say, self._prepare, self._hear, self._clock = me, say, prepare, hear, clock
        self.membership, self.running = 0, False
        self._formed = 0  # the last membership that was committed
        self._proposed, self._late = 0, set[_Seat]()  # the membership that is, or 0, and who is not ready for it
        self._preparing: asyncio.Task[None] | None = None
        self._stop: StopAgreement | None = None  # in the membership that runs
        self._over = ""  # why there will be no membership any more
        self._seats: dict[Link, _Seat] = {}
        self._seat_of: dict[int, _Seat] = {}  # by rank
        self._same = Sameness(me.who)
        self._turned_away = set[str]()  # what was said of those
        self._begun_s = self._noticed_s = self._ticked_s = self._beat_s = clock()

    @property
    def members(self) -> list[Member]:
        """Those that are here, by rank."""
        return sorted((seat.member for seat in self._seats.values()), key=lambda member: member.first_rank)

    @property
    def knows(self) -> int:
        """The newest membership that it knows of, also where that was only proposed: members that have heard of it take
        no leader who has not."""
        return int(max(self.basis["n"], self._next["n"]))

    @property
    def chosen(self) -> list[Member]:
        """Those of the membership that runs or is proposed, by rank."""
        return [seat.member for seat in self._chosen]

    def nodes(self) -> list[dict[str, Any]]:
        """For the user: each node that was here since this leader leads; nothing where their number is fixed."""
        if self._limits is None:
            return []
        now, now_s = time.time(), self._clock()
        rows = {}
        for seat, at_s, why in [*self._lost.values(), *((seat, seat.came_s, "") for seat in self._seats.values())]:
            used = self.running and seat in self._chosen and not why
            state = "in use" if used else "left out" if seat.unfit else "lost" if why else "spare"
            rows[seat.claim.start] = {
                "host": seat.member.host, "state": state, "since": now - (now_s - at_s), "why": seat.unfit or why,
                "ranks": ranges(set(seat.member.ranks)) if used else "",
            }
        return [{"node": first // self.me.num_ranks, **rows[first]} for first in sorted(rows)]

    def signs(self) -> list[dict[str, Any]]:
        """Where each rank was when its member last said so, by rank: what it said, and `host`. How long ago it lived is
        in `ago_s`, as the clocks of two machines may differ."""
        now_s = self._clock()
        rows = [
            {**sign, "host": seat.member.host, "ago_s": sign["ago_s"] + now_s - seat.signed_s}
            for seat in self._seats.values() for sign in seat.signs
        ]
        return sorted(rows, key=lambda row: int(row["rank"]))

    # Connections --------------------------------------------------------------------------------------------------

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The life of one connection, for `asyncio.start_server(leader.attend, ..., limit=LONGEST)`."""
        link = Link(reader, writer)
        try:
            await self._attend(link)
        except asyncio.CancelledError:
            pass  # the event loop ends. Python 3.11 prints a traceback where this is passed on
        finally:
            link.close()

    async def _attend(self, link: Link) -> None:
        link.send(
            "leader", version=VERSION, over=self._over, token=self.me.token, n=self.knows, running=self.running,
            job=self.basis["job"],
        )
        try:
            async with asyncio.timeout(timing.HELLO_S):
                hello = await link.receive()
            if hello["is"] == "leads" and self._limits is not None:
                if not int(hello["port"]):  # a member of a job, which looks for its leader
                    self._foreign_s = self._clock() if int(hello["n"]) > self.knows else self._foreign_s
                elif self.yields_to(hello):
                    self._outdone(link.remote_ip, int(hello["port"]))
                return
            if hello["is"] != "hello" or self._over:  # it may be early, and wait for the next leader
                return
            member = self._read(link, hello)
        except (ConnectionError, TimeoutError, LookupError, TypeError, ValueError, OverflowError):
            return  # most likely a stranger
        why = ENDED
        try:
            if member is not None:
                await self._seat(link, member, warm=hello.get("warm") is not False)
            while True:  # also for who was refused: an end of ours before its own may hide the reason
                self._take(link, await link.receive())
        except ConnectionError:
            pass
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            why = f"it sent a message that makes no sense: {type(error).__name__}: {error}"
        self._remove(link, why)

    def _read(self, link: Link, hello: Mapping[str, Any]) -> Member | None:
        """A newcomer introduces itself. None where it can't belong to this job."""
        if hello["version"] != VERSION:
            who = f"rank {hello['first_rank']!s:.20} on {hello['host']!r:.80}"
            text = f"{who} has another version of rankup than {self.me.who}. Install the same on all nodes."
            if int(hello["n"]) and not self._same.known:  # the job is the other one's
                self._give_way(text)
                raise ValueError(text)
            self._turn_away(link, who, text, code=USER_MISTAKE)
            return None
        member = Member.read(hello)
        if member.world_size != self.me.world_size:
            others = f"{self.me.who} with WORLD_SIZE={self.me.world_size}. Set the same on all ranks."
            text = f"{member.who} was started with WORLD_SIZE={member.world_size}, {others}"
            self._turn_away(link, member.name, text)
            return None
        self.membership = max(self.membership, int(hello["n"]))  # this leader may be a successor
        if not self.running and age(hello.get("basis", self.basis)) > age(self.basis):
            self.basis = dict(hello["basis"])
            self._same.arguments = str(self.basis.get("arguments") or "")
        self._same.learn(member, dict(hello["settings"]))
        if int(hello["n"]) and not self._same.known:
            self._same.adopt(member)
        return member

    def yields_to(self, other: Mapping[str, Any]) -> bool:
        """Whether another leader of this job, which has said so much of itself, takes the place of this one."""
        ours = (self.knows, self.running, self.me.token)
        return same_job(other, self.basis) and (int(other["n"]), bool(other["running"]), str(other["token"])) > ours

    def _turn_away(self, link: Link, who: str, text: str, *, code: int = JOIN_FAILED) -> None:
        """A newcomer can't belong to this job. Such a mistake ends a job that was never whole, but no other."""
        link.send("refused", code=code, text=text)
        if not self._same.known:
            self.refuse(text, code=code)
            return
        what = "turned away, and the job goes on" if self.running else "turned away"
        line = re.sub(r" \(pid \d+\)", "", f"{who} was {what}: {text}")
        if line not in self._turned_away:  # it may come again and again
            self._turned_away.add(line)
            self._say(line)

    def _give_way(self, text: str) -> None:
        """The newcomer is this leader: the others look for one that fits."""
        own = [seat for seat in self._seats.values() if seat.member.token == self.me.token]
        for seat in self._seats.values() if own else ():
            if seat in own:
                seat.link.send("refused", code=USER_MISTAKE, text=text)
            else:
                seat.link.send("waiting", text=f"{self.me.name} was turned away: {text}")
        if own:
            self.dismiss()

    def _sort_out(self) -> None:
        """Turn away who came before it was known that this is not their job."""
        for seat in list(self._seats.values()):
            if not self._over and (text := self._same.unlike(seat.member)):
                self._send_back(seat, text)

    def _send_back(self, seat: _Seat, text: str) -> None:
        """Turn away a newcomer that has a seat."""
        if seat.member.token == self.me.token:
            self._give_way(text)
            return
        self._turn_away(seat.link, seat.member.name, text, code=USER_MISTAKE)
        del self._seats[seat.link]
        for rank in seat.claim:
            del self._seat_of[rank]

    async def _seat(self, link: Link, member: Member, *, warm: bool) -> None:
        """Give a newcomer its seat once its ranks are free. Whoever has them gives a sign of life, or is replaced.

        Raises ConnectionError where the job is over before.
        """
        known: dict[_Seat, list[int]] = {}  # for each that has them: messages until now, and looks that are left
        while rivals := {self._seat_of[rank] for rank in member.ranks if rank in self._seat_of}:
            for rival in rivals:
                # Looks, not seconds: a leader that was stopped itself has heard nobody meanwhile
                answer = known.setdefault(rival, [rival.num_heard, round(timing.ANSWER_S / timing.PAUSE_S)])
                answer[1] -= 1
                if rival.member.token == member.token:
                    self._remove(rival.link, "its connection was cut")
                elif rival.num_heard > answer[0]:
                    self._turn_away(link, member.name, describe_claims(rival.member, member, late=self._formed > 0))
                    return
                elif answer[1] < 0 and (text := self._same.unlike(member)):
                    self._turn_away(link, member.name, text, code=USER_MISTAKE)
                    return
                elif answer[1] < 0:
                    self._say(f"{rival.member.who} gives no answer: it was replaced by {member.who}")
                    self._remove(rival.link, f"was replaced by {member.who}")
            await asyncio.sleep(timing.PAUSE_S)
        if self._over:
            raise ConnectionError
        if (text := self._same.unlike(member)) and member.token != self.me.token:
            self._turn_away(link, member.name, text, code=USER_MISTAKE)
            return
        now_s = self._clock()
        self._seats[link] = seat = _Seat(link, member, now_s, member.ranks, now_s, warm=warm)
        self._seat_of |= dict.fromkeys(member.ranks, seat)
        self._lost.pop(member.first_rank, None)
        if self._limits is not None and self.running:
            link.send("spare", basis=self.basis)
        self._judge()

    def _take(self, link: Link, message: Mapping[str, Any]) -> None:
        """A member says something."""
        if (seat := self._seats.get(link)) is None:
            return  # it was refused, and has not left yet
        seat.heard_s, kind = self._clock(), message["is"]
        seat.num_heard += 1
        if kind == "ready":
            if message["n"] == self._proposed and seat in self._late:
                seat.problem = str(message["problem"])
                seat.warm = seat.warm or seat in self._chosen  # else it would not be ready
                self._late.remove(seat)
                if mistake := str(message.get("mistake", "")):
                    if self._same.known and not (seat.member.token == self.me.token and self._formed):
                        self._void()
                        self._send_back(seat, mistake)
                    else:
                        self.refuse(mistake, code=USER_MISTAKE)
                self._judge()
        elif kind == "alive":
            seat.warm = message.get("warm") is not False
            signs = message.get("ranks", [])
            seat.signs, seat.signed_s = [{**sign, "ago_s": float(sign["ago_s"])} for sign in signs], seat.heard_s
        elif kind == "leaving" and self._limits is not None:
            self._let_go(seat)
        elif kind == "has":
            seat.has = age(message)
        elif kind == "left" and self._limits is not None:  # it has no say any more, and its ranks have ended for good
            self._renew(**without(self.basis, seat.member.token))
        elif kind == "ask":
            link.send("ranks", ranks=self.signs(), nodes=self.nodes())
        elif kind == "lost" or message.get("n", self._formed) != self._formed:
            pass
        elif kind == "late":
            self.tell("leave", n=self._formed)
        elif kind == "standing":
            if (stop := self._stop) is not None and stop.hear(link, stop=message["stop"], step=int(message["step"])):
                self.tell("confirm" if stop.confirmed else "prepare", n=self._formed, stop=stop.step)
        else:
            if kind == "end" and message["code"] == 0:
                seat.finished.add(message["rank"])
            self._hear(seat.member, message)

    def take(self, kind: str, **values: Any) -> bool:
        """The member beside the leader says something. It is heard before this returns, where the process of both may
        be about to end. Returns False where that member has left."""
        beside = [link for link, seat in self._seats.items() if seat.member.token == self.me.token]
        for link in beside:
            self._take(link, {"is": kind, **values})
        return bool(beside)

    def _remove(self, link: Link, why: str) -> None:
        """A member's connection has ended, or is given up."""
        link.close(at_once=why != ENDED)
        if (seat := self._seats.pop(link, None)) is None:
            return
        for rank in seat.claim:
            del self._seat_of[rank]
        if self._over:
            return
        self._lost[seat.claim.start] = (seat, self._clock(), why)
        if self._limits is not None and seat not in self._chosen and not (self._proposed and seat in self._late):
            return  # a spare
        if not self.running:
            self._void()
        elif len(seat.finished) < seat.member.num_ranks:
            more: dict[str, Any] = {"code": KILLED} if why == ENDED else {}
            self.lose(seat.member, why, node=True, **more)
            self._hear(seat.member, {"is": "lost", "n": self._formed, "why": why})

    async def watch(self, *, master: str = "") -> None:
        """Look at the clock from now on. `master`: MASTER_ADDR; a warning where it is no address of this machine."""
        if master and (warning := await foreign_address(master)):
            self._say(warning)
        while True:
            await asyncio.sleep(timing.TICK_S)
            self.tick()

    def tick(self) -> None:
        """Signs of life, deadlines, and who is missing."""
        now_s = self._clock()
        silent_s = timing.SILENT_S if self._limits is None else self._limits.silent_s
        for seat in list(self._seats.values()):
            if now_s - self._ticked_s > min(timing.FROZEN_S, silent_s / 2):
                seat.heard_s = now_s
            elif now_s - seat.heard_s > silent_s:
                self._remove(seat.link, f"gave no sign of life for {now_s - seat.heard_s:.0f} s")
        self._ticked_s = now_s
        if now_s - self._beat_s >= timing.ALIVE_S:
            self._beat_s = now_s
            self.tell("alive")
        if self._limits is not None:
            self._judge()
            self._look_for_change(now_s)
        if self.running or self._over:
            return
        if now_s - self._begun_s > self.me.left_s and self._preparing is None:
            how = "with this MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
            self.refuse(f"{self._missing()}. Was every process started, {how}?")
        elif now_s - self._noticed_s >= timing.NOTICE_S:
            self._noticed_s = now_s
            self.tell("waiting", text=self._missing())

    # Decisions ----------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Propose a membership once there is a member for each rank; commit it once all are ready for it."""
        if self.running or self._over:
            return
        if not self._proposed:
            self._sort_out()
            if self._over or not (seats := self._choose()):
                return
            if differences := self._same.differences(self.members):
                self.refuse(differences, code=USER_MISTAKE)
            else:
                self._propose(seats)
        elif not self._late and self._preparing is None:
            self._preparing = asyncio.create_task(self._commit(self._proposed))
            self._preparing.add_done_callback(self._committed)

    def _choose(self) -> list[_Seat]:
        """Who can be the next membership, by rank; nobody as long as that is to be waited for."""
        seats = sorted(self._seats.values(), key=lambda seat: seat.claim.start)
        if self._limits is None:
            return seats if len(self._seat_of) == self.me.world_size else []
        if any(seat.leaves and seat.unfit and seat.member.token == self.me.token for seat in seats):
            return []  # this leader goes, and the next one chooses
        if self._clock() - self._beaten_s < timing.NOTICE_S:
            return []
        if not self.basis["n"] and self._clock() - self._foreign_s < timing.FOUND_S:
            return []  # a new node 0 founds no job beside one that looks for its leader
        order = {token: place for place, token in enumerate(self.basis["used"])}
        # At the start all import torch. Later nobody waits for a node that does, other than the one that leads
        first = not self.basis["n"]
        fit = [seat for seat in seats if not seat.unfit and (first or seat.warm or seat.member.token == self.me.token)]
        fit.sort(key=lambda seat: (seat.member.token != self.me.token, order.get(seat.member.token, len(order))))
        # A new node 0 founds no second job: who leads the first one calls it
        wait_s = self._limits.wait_s if self.basis["n"] else max(self._limits.wait_s, timing.FOUND_S)
        waited = self._clock() - self._begun_s >= wait_s
        enough = self._limits.least if waited else self._limits.most
        return fit[:self._limits.most] if len(fit) >= enough and not outvoted(self.basis, self._here) else []

    @property
    def _here(self) -> set[str]:
        return {member.token for member in self.members}

    def _let_go(self, seat: _Seat) -> None:
        """A node was asked to leave: the others go on without it, and if all leave, the job stops."""
        seat.unfit, seat.leaves = "it was asked to leave", True
        if all(each.leaves for each in self._seats.values()):
            for each in self._seats.values():
                each.unfit = ""  # all of them say how the job ends
            self._hear(seat.member, {"is": "stop", "signal": "SIGTERM"})
        elif seat in self._chosen and self.running and not self.changing:
            self.changing = True
            self.stop("SIGTERM", change=True)
        elif seat in self._chosen and not self.running:
            self._void()

    def _renew(self, **more: Any) -> None:
        seats = [*self._chosen, *(seat for seat in self._seats.values() if seat not in self._chosen)]
        known = self._places(seat for seat in seats if not seat.leaves)
        basis = {**self.basis, "v": self.basis["v"] + 1, "known": known, **more}
        self.basis = {**basis, "tie": self._tie(basis["voters"])}
        self.tell("basis", basis=self.basis)

    def _tie(self, voters: list[str]) -> bool:
        """Whether these are two nodes that share a place."""
        places = {seat.member.place for seat in self._seats.values() if seat.member.token in voters}
        return len(voters) == 2 and len(places) == 1 and "" not in places

    def _places(self, seats: Iterable[_Seat]) -> list[list[Any]]:
        """Token, address, port and name of each."""
        found = []
        for seat in seats:
            name = f"node {seat.claim.start // seat.member.num_ranks} on {seat.member.host}"
            self._names[seat.member.token] = name
            found.append([seat.member.token, seat.member.ip, seat.member.serves, name])
        return found

    def _look_for_change(self, now_s: float) -> None:
        """Have the ranks stop where a newcomer is needed; those that come together are taken together."""
        if not self.running or self.changing or self._over or self._limits is None:
            return
        spares = [seat.member.token for seat in self._seats.values() if seat not in self._chosen and not seat.leaves]
        knowing = {seat.member.token for seat in self._seats.values() if seat.has >= age(self.basis)}
        if changes := recount(self.basis, spares, knowing):
            self._renew(**changes)
        new = [seat for seat in self._seats.values() if seat not in self._chosen and not seat.unfit and seat.warm]
        room = len(self._chosen) < self._limits.most and new
        if room and now_s - max(seat.came_s for seat in new) >= timing.GATHER_S:
            self.changing = True
            self.stop("SIGTERM", change=True)

    def _propose(self, seats: list[_Seat]) -> None:
        self.membership = self._proposed = self.membership + 1
        self._late, self._chosen = set(seats), seats
        # Who is beside the leader came by loopback, which others can't use. Behind a Service, the address at which they
        # reached the leader belongs to no interface here; the one at which they arrived does
        far = (seat.link.local_ip for seat in self._seats.values() if not is_loopback(seat.member.ip))
        ours = next((ip for ip in far if not is_loopback(ip)), "127.0.0.1")
        for seat in self._seats.values():
            if is_loopback(seat.member.ip):
                seat.member = replace(seat.member, ip=ours, interface=interface_of(ours))
        if not self.basis["n"]:
            self._same.of_all(self.members)
        more: dict[str, Any] = {}
        if self._limits is not None:
            for place, seat in enumerate(seats):
                size = seat.member.num_ranks
                seat.member = replace(seat.member, first_rank=place * size, world_size=len(seats) * size)
            here = [*seats, *(seat for seat in self._seats.values() if seat not in self._late and not seat.leaves)]
            self._late = {*here}
            known = self._places(here)
            more["basis"] = self._next = {
                "job": self.basis["job"], "n": self._proposed, "v": 0, "known": known,
                "ran": self.basis.get("ran", self.basis["used"]),
                "used": [token for token, *_ in known[:len(seats)]], "voters": [token for token, *_ in known],
                "before": electorates(self.basis), "arguments": self._same.arguments,
            }
            self._next["tie"] = self._tie(self._next["voters"])
        # The ring crosses each border between nodes in both directions, at the price of one connection a member
        following = dict(zip(seats, [*seats[1:], seats[0]], strict=True))
        for seat in self._late:
            to = following.get(seat, seat).member
            route = [to.ip, to.port, to.name, to.interface] if to.port and to is not seat.member else None
            seat.link.send("propose", n=self._proposed, next=route, ip=seat.member.ip, **more)

    def _void(self) -> None:
        """Somebody came or went: what was proposed will not be."""
        self._proposed = 0
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None

    async def _commit(self, n: int) -> None:
        """All are ready. Cancelled where one of them goes."""
        if problems := sorted(seat.problem for seat in self._chosen if seat.problem):
            await asyncio.sleep(timing.ENDING_S)
            if self._limits is not None:
                self._leave_out()
                return
            first = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
            self.refuse(f"all ranks reached the master, but not each other: {first}. {HINT}")
            return
        for number in claims(self.basis, self._here):
            if self._claim is None or not await self._claim(self.basis["job"], number):
                self._beaten_s, self._preparing = self._clock(), None
                self._void()
                return
        try:
            async with asyncio.timeout(timing.PREPARE_S) as patience:
                more = dict(await self._prepare(n))
        except (UserError, JoinError, PeerLost) as error:
            self.refuse(str(error), code=error.code)
            return
        except Exception as error:
            self.refuse(self._missing() if patience.expired() else f"{type(error).__name__}: {error}")
            return
        if self._over:
            return
        self._preparing = None
        self._void()
        self.running, self._formed, self.changing = True, n, False
        self._same.adopt(self._chosen[0].member)
        self._sort_out()  # who came after the proposal
        for seat in self._seats.values():
            seat.finished.clear()
        on_hosts = itertools.groupby(self.chosen, key=lambda member: member.host)
        hosts = [[host, sum(member.num_ranks for member in members)] for host, members in on_hosts]
        if self._limits is not None:
            why = {seat.member.token: f"is lost: {reason}" for seat, _, reason in self._lost.values()}
            away = [*self._seats.values(), *(seat for seat, _, _ in self._lost.values())]
            why |= {seat.member.token: "has to import torch anew" for seat in self._seats.values() if not seat.warm}
            why |= {seat.member.token: f"is left out: {seat.unfit}" for seat in away if seat.unfit}
            spares = len(self._seats) - len(self._chosen)
            change = describe_change(self.basis, self._next, names=self._names, why=why, spares=spares)
            # Newer than a proposal of the same number, which another part of the job may have made
            self.basis = {**self._next, "v": 1, "before": [], "ran": self._next["used"], "job": more["job"]}
            more |= {"change": change, "basis": self.basis}
        self.tell("commit", n=n, ip=self.chosen[0].ip, hosts=hosts, **more)

    def _committed(self, task: asyncio.Task[None]) -> None:
        """A fault of ours in `_commit` must not look like a hang."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.refuse(f"{type(error).__name__}: {error}")

    def _leave_out(self) -> None:
        """Of those whose routes fail, go on without the one that most routes concern, and never without the leader."""
        pairs = zip(self._chosen, [*self._chosen[1:], self._chosen[0]], strict=True)
        blame = Counter(each for pair in pairs if pair[0].problem for each in pair)
        worst = max(reversed(self._chosen[1:]), key=lambda seat: blame[seat])
        worst.unfit = next(seat.problem for seat in self._chosen if seat.problem)
        self._say(f"{worst.member.who} is left out: {worst.unfit}")
        for seat in self._chosen:
            seat.problem = ""
        self._preparing = None
        self._void()

    def stop(self, name: str, **more: Any) -> None:
        """Somebody asks the job to stop, by the signal `name`: all are told, and agree on the step to stop at. With
        `change` it goes on then, in another membership. Raises ValueError for what is no such signal."""
        if name not in SIGNALS:
            raise ValueError(name)
        self.tell("stop", signal=name, **more)
        if self.running and self._stop is None:
            self._stop = StopAgreement(seat.link for seat in self._chosen)
            self.tell("prepare", n=self._formed, stop=self._stop.step)

    def leave_out(self, token: str, why: str) -> bool:
        """Go on without that node, for good; what is proposed is cancelled. Returns False where it is the last one that
        is needed. It is told, and leaves as one that was asked to."""
        seat = next((seat for seat in self._seats.values() if seat.member.token == token), None)
        others = [each for each in self._seats.values() if each is not seat and not each.unfit]
        if seat is None or self._limits is None or len(others) < self._limits.least:
            return False
        seat.unfit, seat.leaves = why, True
        seat.link.send("left_out", why=why)
        self._void()
        return True

    def lose(self, member: Member, why: str, *, ranks: Iterable[int] | None = None, **more: Any) -> None:
        """The membership is over, because of these ranks (else all) of a member: every member ends its ranks, and is
        then ready for the next one. Does nothing where no membership runs."""
        if not self.running:
            return
        self.running, self._stop = False, None
        self._begun_s = self._noticed_s = self._clock()
        lost = list(member.ranks if ranks is None else ranks)
        self.tell("lost", n=self._formed, ranks=lost, host=member.host, why=why, **more)
        self._judge()

    def lose_by(self, member: Member, end: Mapping[str, Any]) -> None:
        """The membership is over because a rank says that it ends badly. `end`: its rank, code, cause and suspect."""
        rank, suspect = int(end["rank"]), end.get("suspect")
        if suspect is None:
            self.lose(member, str(end["cause"]), ranks=[rank], code=int(end["code"]))
        else:
            why = "says that the others wait for it" if suspect == rank else f"is suspected by rank {rank}"
            self.lose(member, why, ranks=[int(suspect)], alive=True)

    def refuse(self, text: str, *, code: int = JOIN_FAILED) -> None:
        """There will be no membership. One member of each host says why."""
        if not self._over:
            speakers = {member.host: member for member in reversed(self.members)}
            for seat in self._seats.values():
                quiet = speakers[seat.member.host] is not seat.member
                seat.link.send("refused", code=code, text=text, quiet=quiet)
            self._over = text

    def tell(self, kind: str, **values: Any) -> None:
        """Tell all members something; after "over" they may go without being lost, and nobody else is taken."""
        data = encode(kind, **values)  # once for all
        for link in self._seats:
            link.write(data)
        if kind == "over":
            self._over = values.get("text") or "the job at this address has just ended"

    def dismiss(self) -> None:
        """Lead no longer: the members look for another leader."""
        self._over = self._over or "this node does not lead"
        self._void()
        for link in list(self._seats):
            self._remove(link, ENDED)

    def _missing(self) -> str:
        if self._beaten_s > self._begun_s:
            return "another part of the job goes on, or --shared-dir does not answer"
        if self._limits is not None and not self._proposed:
            here = [seat for seat in self._seats.values() if not seat.unfit]
            cold = sum(not seat.warm for seat in here)
            lost = "; ".join(f"{seat.member.host}: {seat.unfit or why}" for seat, _, why in [*self._lost.values()][:4])
            text = outvoted(self.basis, self._here) or f"{len(here)} of at least {self._limits.least} nodes are here"
            text += f", {cold} of them without their imports yet" if cold else ""
            return text + (f" (lost: {lost})" if lost else "")
        late = [seat.member for seat in self._seats.values() if self._proposed and seat in self._late]
        if self._limits is not None:
            return describe_late(self._proposed, late, waited_s=round(self._clock() - self._begun_s))
        gone = [(seat.member, why) for _, (seat, _, why) in sorted(self._lost.items())]
        waited_s = round(self._clock() - self._begun_s)
        return describe_missing(self.members, gone, late, of=self.me, waited_s=waited_s)
