"""A number of nodes that may change: who belongs to the next membership, and who leads after a leader. No torch here.

A node keeps its seat, and its ranks are numbered at each proposal: the leader's first, then those of the last
membership in its order, then newcomers; who is beyond `most` is a spare. A newcomer that is needed has all ranks stop
before one step, and save. Which part of a job that was cut goes on is in `votes`.
"""

import asyncio
import contextlib
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rankup import timing
from rankup.agent.attendance import Attendance
from rankup.agent.meeting import Leader
from rankup.agent.network import Link, greeting, read_secret
from rankup.agent.protocol import Member
from rankup.agent.seats import Seat
from rankup.agent.votes import NONE, age, claims, electorates, outvoted, recount, same_job, without
from rankup.env.node_env import Limits, NodeEnv
from rankup.env.rank_env import ranges

ASKED = 4  # members that are asked at once who leads


class ElasticLeader(Leader):
    """Leads where the number of nodes may change: it goes on without a node that is lost, and takes one that comes."""

    def __init__(
        self, me: Member, *, limits: Limits, outdone: Callable[[str, int], None] = lambda ip, port: None,
        claim: Callable[[str, int], Awaitable[bool]] | None = None, **more: Any,
    ) -> None:
        """`outdone(ip, port)`: there is a leader that knows a newer membership. `claim(job, n)`: whether this member
        owns what follows membership `n`, at the place that it shares. `more`: see `Leader`."""
        super().__init__(me, silent_s=limits.silent_s, **more)
        self._limits, self._outdone, self._claim = limits, outdone, claim
        self._next = NONE  # the basis that this leader has proposed last
        self._beaten_s = -math.inf  # when another part of the job owned what is next
        self._foreign_s = -math.inf  # when somebody called who knows a newer membership

    def nodes(self) -> list[dict[str, Any]]:
        now, now_s = time.time(), self._clock()
        rows = {}
        for seat in [*self._lost.values(), *self.seats.values()]:
            used = self.running and seat in self._chosen and not seat.lost
            votes = all(seat.member.token in each["voters"] for each in electorates(self.basis))
            idle = "spare" if votes else "new"  # until the others know of it
            state = "in use" if used else "left out" if seat.unfit else "lost" if seat.lost else idle
            rows[seat.claim.start] = {
                "host": seat.member.host, "state": state, "since": now - (now_s - seat.since_s),
                "why": seat.unfit or seat.lost, "ranks": ranges(set(seat.member.ranks)) if used else "",
            }
        return [{"node": first // self.me.num_ranks, **rows[first]} for first in sorted(rows)]

    # Other leaders ------------------------------------------------------------------------------------------------

    def yields_to(self, other: Mapping[str, Any]) -> bool:
        """Whether another leader of this job, which has said so much of itself, takes the place of this one."""
        ours = (self.membership, self.running, self.me.token)
        return same_job(other, self.basis) and (int(other["n"]), bool(other["running"]), str(other["token"])) > ours

    def _read(self, link: Link, hello: Mapping[str, Any]) -> Member | None:
        if hello["is"] == "leads":
            if not int(hello["port"]):  # a member of a job, which looks for its leader
                self._foreign_s = self._clock() if int(hello["n"]) > self.membership else self._foreign_s
            elif self.yields_to(hello):
                self._outdone(link.remote_ip, int(hello["port"]))
        member = super()._read(link, hello)
        if member is not None and not self.running and age(hello.get("basis", self.basis)) > age(self.basis):
            self.basis = dict(hello["basis"])
            self._same_arguments = bool(self.basis.get("same_arguments"))
            self.membership = max(self.membership, self.basis["n"])  # a spare may not have heard its proposal
        return member

    # Who comes, and who leaves ------------------------------------------------------------------------------------

    async def _seat(self, link: Link, member: Member, *, warm: bool) -> None:
        await super()._seat(link, member, warm=warm)
        if self.running and link in self.seats:
            link.send("spare", basis=self.basis)

    def _take(self, link: Link, message: Mapping[str, Any]) -> None:
        super()._take(link, message)
        if (seat := self.seats.get(link)) is None:
            return
        if message["is"] == "leaving":
            self._let_go(seat)
        elif message["is"] == "has":
            seat.has = age(message)
        elif message["is"] == "left":  # it has no say any more, and its ranks have ended for good
            self._renew(**without(self.basis, seat.member.token))

    def _let_go(self, seat: Seat) -> None:
        """A node was asked to leave: the others go on without it, and if all leave, the job stops."""
        seat.unfit, seat.leaves = "it was asked to leave", True
        if all(each.leaves for each in self.seats.values()):
            for each in self.seats.values():
                each.unfit = ""  # all of them say how the job ends
            self._hear(seat.member, {"is": "stop", "signal": "SIGTERM"})
        elif seat in self._chosen and self.running:
            self._change()
        elif seat in self._chosen:
            self._void()

    def _change(self) -> None:
        """Have the ranks stop, for another membership."""
        if not self.changing:
            self.changing = True
            self.stop("SIGTERM", change=True)

    def leave_out(self, token: str, why: str) -> bool:
        """Go on without that node, for good; what is proposed is cancelled. Returns False where it is the last one that
        is needed. It is told, and leaves as one that was asked to."""
        seat = self.seats.of(token)
        others = [each for each in self.seats.values() if each is not seat and not each.unfit]
        if seat is None or len(others) < self._limits.least:
            return False
        seat.unfit, seat.leaves = why, True
        seat.link.send("left_out", why=why)
        self._void()
        return True

    def _give_up(self, problems: list[str]) -> None:
        """Go on without the one that most routes concern which fail, and never without the leader."""
        pairs = zip(self._chosen, [*self._chosen[1:], self._chosen[0]], strict=True)
        blame = Counter(each for pair in pairs if pair[0].problem for each in pair)
        worst = max(reversed(self._chosen[1:]), key=lambda seat: blame[seat])
        worst.unfit = next(seat.problem for seat in self._chosen if seat.problem)
        self._say(f"{worst.member.who} is left out: {worst.unfit}")
        for seat in self._chosen:
            seat.problem = ""
        self._preparing = None
        self._void()

    # Votes --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        if self.running and not self._over:
            self._look_for_change()

    def _look_for_change(self) -> None:
        """Have the ranks stop where a newcomer is needed; those that come together are taken together."""
        if self.changing:
            return
        spares = [seat.member.token for seat in self.seats.values() if seat not in self._chosen and not seat.leaves]
        knowing = {seat.member.token for seat in self.seats.values() if seat.has >= age(self.basis)}
        if changes := recount(self.basis, spares, knowing):
            self._renew(**changes)
        new = [seat for seat in self.seats.values() if seat not in self._chosen and not seat.unfit and seat.warm]
        room = len(self._chosen) < self._limits.most and new
        if room and self._clock() - max(seat.since_s for seat in new) >= timing.GATHER_S:
            self._change()

    def _renew(self, **more: Any) -> None:
        basis = {**self.basis, "v": self.basis["v"] + 1, "known": self._known(), **more}
        self.basis = {**basis, "tie": self._tie(basis["voters"])}
        self.tell("basis", basis=self.basis)

    def _known(self) -> list[list[Any]]:
        """Token, address, port and name of all, in the order in which they lead, without those that leave alone."""
        return [
            [each.member.token, each.member.ip, each.member.serves, each.name]
            for each in dict.fromkeys([*self._chosen, *self.seats.values()]) if not (each.leaves and each.unfit)
        ]

    def _tie(self, voters: list[str]) -> bool:
        """Whether these are two nodes that share a place."""
        places = {seat.member.place for seat in self.seats.values() if seat.member.token in voters}
        return len(voters) == 2 and len(places) == 1 and "" not in places

    async def _agree(self, n: int) -> None:
        for number in claims(self.basis, self.seats.tokens):
            if self._claim is None or not await self._claim(self.basis["job"], number):
                self._beaten_s, self._preparing = self._clock(), None
                self._void()
                return
        await super()._agree(n)

    # Memberships --------------------------------------------------------------------------------------------------

    def _choose(self) -> list[Seat]:
        seats, now_s, founds = list(self.seats.values()), self._clock(), not self.basis["n"]
        if any(seat.leaves and seat.unfit and seat.member.token == self.me.token for seat in seats):
            return []  # this leader goes, and the next one chooses
        # A new node 0 founds no job beside one that looks for its leader
        if now_s - self._beaten_s < timing.NOTICE_S or (founds and now_s - self._foreign_s < timing.FOUND_S):
            return []
        order = {token: place for place, token in enumerate(self.basis["used"], 1)} | {self.me.token: 0}

        def place(seat: Seat) -> tuple[float, int]:
            return order.get(seat.member.token, math.inf), seat.claim.start

        # At the start all import torch. Later nobody waits for a node that does, other than the one that leads
        fit = [seat for seat in seats if not seat.unfit and (founds or seat.warm or seat.member.token == self.me.token)]
        # A new node 0 founds no second job: who leads the first one calls it
        wait_s = max(self._limits.wait_s, timing.FOUND_S) if founds else self._limits.wait_s
        enough = self._limits.least if now_s - self._begun_s >= wait_s else self._limits.most
        if len(fit) < enough or outvoted(self.basis, self.seats.tokens):
            return []
        return sorted(fit, key=place)[:self._limits.most]

    def _terms(self) -> dict[str, Any]:
        for place, seat in enumerate(self._chosen):
            size = seat.member.num_ranks
            seat.member = replace(seat.member, first_rank=place * size, world_size=len(self._chosen) * size)
        self._late |= {seat for seat in self.seats.values() if not seat.leaves}  # spares know of it before it is so
        known = self._known()
        tokens = [token for token, *_ in known]
        self._next = {
            "job": self.basis["job"], "n": self._proposed, "v": 0, "known": known, "voters": tokens,
            "used": tokens[:len(self._chosen)], "ran": self.basis.get("ran", self.basis["used"]),
            "before": electorates(self.basis), "tie": self._tie(tokens), "same_arguments": self._same_arguments,
        }
        return {"basis": self._next}

    def _agreed(self, more: Mapping[str, Any]) -> dict[str, Any]:
        change = self._describe_change()
        # Newer than a proposal of the same number, which another part of the job may have made
        self.basis = {**self._next, "v": 1, "before": [], "ran": self._next["used"], "job": more["job"]}
        return {"change": change, "basis": self.basis}

    def _describe_change(self) -> str:
        """What the membership changes that was proposed, "" where it has the same nodes."""
        old, new = set(self._next["ran"]), set(self._next["used"])
        if old == new:
            return ""
        unseen = "is lost: it is not here"
        found = {token: (name, unseen) for token, _, _, name in self.basis["known"]}
        for seat in [*self.seats.values(), *self._lost.values()]:
            became = "is a spare now" if seat.warm else "has to import torch anew"
            became = f"is lost: {seat.lost}" if seat.lost else became
            found[seat.member.token] = seat.name, f"is left out: {seat.unfit}" if seat.unfit else became
        parts = [" ".join(found.get(token, ("the node that led", unseen))) for token in sorted(old - new)]
        parts += [f"{found[token][0]} joins" for token in sorted(new - old)] if old else []
        spares = len(self.seats) - len(self._chosen)
        parts += [f"{spares} spare"] if spares else []
        what = f"membership {self._next['n']}: {len(new)} node{'s' * (len(new) > 1)}"
        return f"{what}{' (' + '; '.join(parts) + ')' if parts else ''}"

    def _missing(self) -> str:
        if self._beaten_s > self._begun_s:
            return "another part of the job goes on, or --shared-dir does not answer"
        if self._proposed:
            return super()._missing()
        here = [seat for seat in self.seats.values() if not seat.unfit]
        cold = sum(not seat.warm for seat in here)
        lost = "; ".join(f"{seat.member.host}: {seat.unfit or seat.lost}" for seat in [*self._lost.values()][:4])
        too_few = f"{len(here)} of at least {self._limits.least} nodes are here"
        text = outvoted(self.basis, self.seats.tokens) or too_few
        text += f", {cold} of them without their imports yet" if cold else ""
        return text + (f" (lost: {lost})" if lost else "")


# A member's side: who leads -------------------------------------------------------------------------------------------


async def elect(attendance: Attendance, node: NodeEnv, elsewhere: tuple[str, int] | None) -> tuple[str, int] | None:
    """Where somebody leads; None where this member is to: the first of the last membership that answers leads.
    `elsewhere`: where a leader has said that it leads. Raises OSError where that is to be waited for.

    All members look at once. So each of them asks a few, those that may lead first, and only who is about to lead
    itself asks all.
    """
    basis, me, master = attendance.basis, attendance.me, (node.master_addr, node.master_port)
    said: dict[tuple[str, int], Mapping[str, Any] | None] = {}
    # No leader: a new node 0 that hears it knows that there is a job
    words = {"n": basis["n"], "running": False, "token": me.token, "port": 0, "job": basis["job"]}

    async def ask(places: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
        new = dict.fromkeys(place for place in places if place not in said)
        while new:
            found = await asyncio.gather(*(who_leads(*place, answer=words) for place in new))
            said.update(zip(new, found, strict=True))
            told = [(str(each["at"][0]), int(each["at"][1])) for each in said.values() if each and each["at"]]
            new = dict.fromkeys(place for place in told if place not in said)
        for place, each in said.items():
            leads = each is not None and not each["over"] and each["token"] != me.token
            if each is not None and leads and each["n"] >= basis["n"] and same_job(each, basis):
                return place
        return None

    known = [(token, (ip, port), name) for token, ip, port, name in basis["known"]]
    before = list(itertools.takewhile(lambda each: each[0] != me.token, known))
    for start in range(0, max(1, len(before)), ASKED):
        few = before[start:start + ASKED]
        if found := await ask([*(place for _, place, _ in few), master, elsewhere or master]):
            return found
        for token, place, name in few:
            if (each := said[place]) and each["token"] == token:
                raise ConnectionError(f"{name} is to lead, and does not yet")
    if not basis["n"]:
        return master  # which says why not
    if len(before) == len(known):
        raise ConnectionError("no leader of the job was found")
    return await ask(place for token, place, _ in known if token != me.token)


async def who_leads(ip: str, port: int, *, answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What an agent at that address says of who leads; None where none answers. `answer`: what a leader says to it."""
    connect = Link.connect(ip, port, timeout_s=timing.PROBE_S)
    with contextlib.suppress(OSError, LookupError, TypeError, ValueError), contextlib.closing(await connect) as link:
        async with asyncio.timeout(timing.PROBE_S):
            said = await greeting(link, read_secret(os.environ))
        link.send("leads", **answer)
        return {"token": "", "n": 0, "running": False, "at": [], "job": "", **said, "over": str(said["over"])}
    return None
