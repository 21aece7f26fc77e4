"""Which members belong to a job: it proposes, commits and loses memberships. No torch here.

If the number of nodes may change, a node keeps its seat, and each proposal numbers the ranks: the leader's first, then
those of the last membership in its order, then newcomers. Who is beyond `most` is a spare. `votes` decides which part
of a job goes on after a cut.

Before the first membership, members that differ (see `differences`) are all refused. Later such a newcomer is turned
away alone, also if it is to lead. Arguments count if all nodes began with the same ones.
"""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rankup import timing
from rankup.agent.network import Link, encode
from rankup.agent.protocol import ARGUMENTS, HINT, KILLED, SIGNALS, Member, Seat, Seats, differences
from rankup.agent.record import StopAgreement
from rankup.agent.votes import NONE, Basis, claims, describe_change, electorates, outvoted
from rankup.env.node_env import Limits
from rankup.env.rank_env import is_loopback
from rankup.errors import JOIN_FAILED, USER_MISTAKE, ExpectedError, reason

ENDED = "its process has ended"


class Memberships:
    """What the leader decides. Everything happens in one event loop, and the cost of a message does not depend on the
    number of members.

    `seats`: who is here. `basis`: of the last membership where the number of nodes may change, see `votes`.
    `membership`: the newest number that this leader knows of, also where that was only proposed. `running`: whether the
    last one that was committed is not lost. `changing`: its ranks have been asked to stop, for another membership.
    `over`: why there will be no membership any more; whoever comes then waits for the next leader.
    """

    def __init__(
        self, me: Member, *, say: Callable[[str], None], prepare: Callable[[int], Awaitable[Mapping[str, Any]]],
        hear: Callable[[Member, Mapping[str, Any]], None], limits: Limits | None = None,
        outdone: Callable[[str, int], None] = lambda ip, port: None,
        claim: Callable[[str, int], Awaitable[bool]] | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`me`: the member beside the leader; all are refused where they have not met `me.left_s` after the start, or
        after the last loss. `say`: prints a line. `prepare(n)`: what the commit of a membership says beside its
        members. All are ready then, and have said how their ranks ended. It may take PREPARE_S, and is cancelled where
        a member goes meanwhile; where it raises, all are refused with that text.

        `hear(member, message)` gets what is not the meeting's own; where such a message has an `n`, it must be the last
        committed one. A member's loss that the leader has found itself is {"is": "lost", "n", "why"}, after all have
        been told.

        `limits`: where the number of nodes may change. Then also `outdone(ip, port)`: there is a leader that knows a
        newer membership; and `claim(job, n)`: whether this member owns what follows membership `n`, at the place that
        all nodes share, if they do.
        """
        self.me, self._say, self._prepare, self._hear, self._clock = me, say, prepare, hear, clock
        self._limits, self._outdone, self._claim = limits, outdone, claim
        self.membership, self.running, self.changing, self.over = 0, False, False, ""
        self.seats, self.basis = Seats(), NONE
        self._lost: dict[int, Seat] = {}  # by claim
        self._left_out = Counter[int]()  # how often each node was, by claim
        self._chosen: list[Seat] = []  # of the membership that runs or is proposed, by rank
        self._proposed, self._late = 0, set[Seat]()  # the membership that is, or 0, and who is not ready for it
        self._all_ready = asyncio.Event()
        self._forming: asyncio.Task[None] | None = None
        self._asking = set[Link]()  # who waits for an answer
        self._formed = 0  # the last membership that was committed
        self._stop: StopAgreement | None = None  # in the membership that runs
        self._model: Member | None = None  # whoever differs from this one is no part of the job; None before it began
        self._next = NONE  # the basis that this leader has proposed last
        self._owned = set[int]()  # the memberships whose succession is its own, see `votes.claims`
        self._begun_s = self._noticed_s = self._ticked_s = self._beat_s = clock()
        self._beaten_s = -math.inf  # when another part of the job owned what is next
        self._foreign_s = -math.inf  # when somebody called who knows a newer membership

    @property
    def chosen(self) -> list[Member]:
        """Those of the membership that runs or is proposed, by rank."""
        return [seat.member for seat in self._chosen]

    # Members ----------------------------------------------------------------------------------------------------------

    def tell(self, kind: str, **values: Any) -> None:
        """Tell all members something."""
        data = encode(kind, **values)  # once for all
        for seat in self.seats.values():
            seat.link.write(data)

    def end(self, text: str, *, code: int | None = JOIN_FAILED) -> None:
        """There will be no membership any more: members may go without being lost, and nobody else is taken."""
        if not self.over:
            self.tell("over", code=code, text=text)
            self.over = text or "the job at this address has just ended"
            self._void()

    def dismiss(self) -> None:
        """Lead no longer: the members look for another leader."""
        self.over = self.over or "this node does not lead"
        self._void()
        for link in list(self.seats):
            self._remove(link, ENDED)

    def _turn_away(self, link: Link, member: Member, text: str, *, code: int = JOIN_FAILED) -> None:
        """A newcomer can't belong to this job. Such a mistake ends a job that was never whole, but no other."""
        link.send("over", code=code, text=text)
        if self._model is None:
            self.end(text, code=code)
        elif member.token != self.me.token:
            self._say(f"{member.name} was turned away{', and the job goes on' * self.running}: {text}")
        else:  # the others look for a leader that fits
            self.tell("waiting", text=f"{member.name} was turned away: {text}")
            self.dismiss()

    def _sort_out(self) -> None:
        """Turn away who is no part of this job: a newcomer, or who came before that was known."""
        for seat in list(self.seats.values()):
            if self.over or self._model is None:
                return
            if text := differences(seat.member, self._model, arguments=bool(self.basis.get("same_arguments"))):
                del self.seats[seat.link]
                self._turn_away(seat.link, seat.member, text, code=USER_MISTAKE)

    def _remove(self, link: Link, why: str) -> None:
        """A member's connection has ended, or is given up."""
        link.close(at_once=why != ENDED)
        if (seat := self.seats.pop(link, None)) is None or self.over:
            return
        self._lost[seat.claim.start], seat.since_s, seat.lost = seat, self._clock(), why
        if seat not in self._chosen and seat not in self._late:
            return  # a spare
        if not self.running:
            self._void()
        elif len(seat.finished) < seat.member.num_ranks:
            more: dict[str, Any] = {"code": KILLED} if why == ENDED else {}
            self.lose(seat.member, why, node=True, **more)
            self._hear(seat.member, {"is": "lost", "n": self._formed, "why": why})

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

    # Proposal and commit ----------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Begin to form a membership where none runs, and who is here can be one."""
        if not (self.running or self.over) and (self._forming is None or self._forming.done()) and self._choose():
            self._forming = asyncio.create_task(self._form())

    async def _form(self) -> None:
        """Propose a membership, and commit it once all are ready for it. Cancelled where one goes, or it is over."""
        try:
            # Before the proposal: members take it for newer than what another part of the job commits meanwhile
            while self._claim is not None and (unowned := claims(self.basis, self.seats.tokens) - self._owned):
                if not await self._claim(self.basis["job"], n := min(unowned)):
                    self._beaten_s = self._clock()
                    return
                self._owned.add(n)
            if not (seats := self._choose()):
                return  # one has gone meanwhile
            first, *others = self.seats.members
            if found := [text for each in others if (text := differences(each, first, arguments=False))]:
                self.end("\n".join(found[:4]), code=USER_MISTAKE)
                return
            self._propose(seats)
            await self._all_ready.wait()
            if problems := [seat.problem for seat in self._chosen if seat.problem]:
                await asyncio.sleep(timing.ENDING_S)
                self._give_up(problems)
                return
            more = dict(await self._prepare(self._proposed))
            self._start(self._proposed, more)
        except Exception as error:  # a fault of ours must not look like a hang
            self.end(reason(error), code=error.code if isinstance(error, ExpectedError) else JOIN_FAILED)

    def _choose(self) -> list[Seat]:
        """Who can be the next membership, by rank; nobody as long as that is to be waited for."""
        seats, now_s, founds = list(self.seats.values()), self._clock(), not self.basis["n"]
        if self._limits is None:
            are_all = sum(len(seat.claim) for seat in seats) == self.me.world_size
            return sorted(seats, key=lambda seat: seat.claim.start) if are_all else []
        if any(seat.unfit and seat.member.token == self.me.token for seat in seats):
            return []  # this leader goes, and the next one chooses
        # A new node 0 founds no job beside one that looks for its leader
        if now_s - self._beaten_s < timing.NOTICE_S or (founds and now_s - self._foreign_s < timing.FOUND_S):
            return []
        order = {token: place for place, token in enumerate(self.basis["used"], 1)} | {self.me.token: 0}
        # At the start all import torch. Later nobody waits for a node that does, other than the one that leads
        fit = [seat for seat in seats if not seat.unfit and (founds or seat.warm or seat.member.token == self.me.token)]
        # A new node 0 founds no second job: who leads the first one calls it
        wait_s = max(self._limits.wait_s, timing.FOUND_S) if founds else self._limits.wait_s
        enough = self._limits.least if now_s - self._begun_s >= wait_s else self._limits.most
        if len(fit) < enough or self._outvoted():
            return []
        fit.sort(key=lambda seat: (order.get(seat.member.token, math.inf), seat.claim.start))
        return fit[:self._limits.most]

    def _propose(self, seats: list[Seat]) -> None:
        self.membership = self._proposed = self.membership + 1
        self._late, self._chosen = set(seats), seats
        self._all_ready.clear()
        # Who is beside the leader came by loopback, which others can't use. Behind a Service, the address at which they
        # reached the leader belongs to no interface here; the one at which they arrived does
        far = (seat.link.local_ip for seat in self.seats.values() if not is_loopback(seat.member.ip))
        ours = next((ip for ip in far if not is_loopback(ip)), "127.0.0.1")
        for seat in self.seats.values():
            if is_loopback(seat.member.ip):
                seat.member = replace(seat.member, ip=ours)
        if not self.basis["n"]:
            arguments = {member.settings.get(ARGUMENTS) for member in self.seats.members}
            self.basis = {**self.basis, "same_arguments": len(arguments) == 1}
        more = {} if self._limits is None else {"basis": self._number()}
        # The ring crosses each border between nodes in both directions, at the price of one connection a member
        following = dict(zip(seats, [*seats[1:], seats[0]], strict=True))
        for seat in self._late:
            to = following.get(seat, seat).member
            route = [to.ip, to.port, to.name] if to.port and to is not seat.member else None
            seat.link.send("propose", n=self._proposed, next=route, ip=seat.member.ip, **more)

    def _number(self) -> Basis:
        """Give their numbers to the ranks of the proposal, where the number of nodes may change. Returns its basis."""
        for place, seat in enumerate(self._chosen):
            size = seat.member.num_ranks
            seat.member = replace(seat.member, first_rank=place * size, world_size=len(self._chosen) * size)
        self._late |= {seat for seat in self.seats.values() if not seat.leaves}  # spares know of it before it is so
        known = self._known()
        tokens = [token for token, *_ in known]
        self._next = {
            "job": self.basis["job"], "n": self._proposed, "v": 0, "known": known, "voters": tokens,
            "used": tokens[:len(self._chosen)], "ran": self.basis.get("ran", self.basis["used"]),
            "before": electorates(self.basis), "same_arguments": self.basis.get("same_arguments"),
        }
        return self._next

    def _known(self) -> list[list[Any]]:
        """Token, address, port and name of all, in the order in which they lead, without those that leave alone."""
        return [
            [each.member.token, each.member.ip, each.member.serves, each.name]
            for each in dict.fromkeys([*self._chosen, *self.seats.values()]) if not each.unfit
        ]

    def _void(self) -> None:
        """What was proposed will not be."""
        self._proposed, self._late = 0, set()
        if self._forming is not None:
            self._forming.cancel()
            self._forming = None

    def _give_up(self, problems: list[str]) -> None:
        """Members have no route to each other. Where the number of nodes may change, go on without the one that most
        routes concern which fail, and never without the leader."""
        pairs = zip(self._chosen, [*self._chosen[1:], self._chosen[0]], strict=True)
        blame = Counter(each for pair in pairs if pair[0].problem for each in pair)
        worst = max(reversed(self._chosen[1:]), key=lambda seat: blame[seat]).member
        if self.leave_out(worst.token, problems[0]):
            self._say(f"{worst.who} is left out: {problems[0]}")
        else:
            self.end(f"all ranks reached the master, but not each other: {'; '.join(problems[:4])}. {HINT}")

    def leave_out(self, token: str, why: str) -> bool:
        """Go on without that node, for good; what is proposed is cancelled. Returns False where it is the last one that
        is needed. It is told, and leaves as one that was asked to."""
        seat = self.seats.of(token)
        others = [each for each in self.seats.values() if each is not seat and not each.unfit]
        if self._limits is None or seat is None or len(others) < self._limits.least:
            return False
        seat.unfit, seat.leaves = why, True
        self._left_out[seat.claim.start] += 1
        seat.link.send("left_out", why=why)
        self._void()
        return True

    def _start(self, n: int, more: dict[str, Any]) -> None:
        """Membership `n` runs from now on."""
        self._proposed, self._forming = 0, None
        self.running, self._formed, self.changing = True, n, False
        self._model = self._chosen[0].member
        self._sort_out()  # who came after the proposal
        for seat in self.seats.values():
            seat.finished.clear()
        on_hosts = itertools.groupby(self.chosen, key=lambda member: member.host)
        hosts = [[host, sum(member.num_ranks for member in members)] for host, members in on_hosts]
        if self._limits is not None:
            change = describe_change(self.basis, self._next, [*self._lost.values(), *self.seats.values()])
            # Newer than a proposal of the same number, which another part of the job may have made
            self.basis = {**self._next, "v": 1, "before": [], "ran": self._next["used"], "job": more["job"]}
            more |= {"change": change, "basis": self.basis}
        self.tell("commit", n=n, ip=self.chosen[0].ip, hosts=hosts, **more)

    def stop(self, name: str, **more: Any) -> None:
        """Somebody asks the job to stop, by the signal `name`: all are told, and agree on the step to stop at. With
        `change` it goes on then, in another membership. Raises ValueError for what is no such signal."""
        if name not in SIGNALS:
            raise ValueError(name)
        self.tell("stop", signal=name, **more)
        if self.running and self._stop is None:
            self._stop = StopAgreement(seat.link for seat in self._chosen)
            self.tell("prepare", n=self._formed, stop=self._stop.step)

    def _outvoted(self) -> str:
        return outvoted(self.basis, self.seats.tokens, shared=self._claim is not None)
