"""The leader's decisions on which members belong to a job: it proposes, commits and ends memberships. Imports no torch.

In an elastic job, whose number of nodes may change, each proposal numbers the ranks anew: first the leader's, then
those of the last membership's nodes in their order, then those of newcomers. Nodes beyond `Limits.most` are spares.
After a network cut, `quorum` decides which part of the job goes on.

If members differ (see `differences`) before the first membership, the job ends. After that only a newcomer that differs
is turned away, even if it leads. The script's arguments are compared only if all nodes began with equal arguments.
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
from rankup.agent.ends import End
from rankup.agent.network import Link, encode
from rankup.agent.protocol import ARGUMENTS, HINT, KILLED, Member, Seat, Seats, differences
from rankup.agent.quorum import NONE, Basis, claims, describe_change, electorates, outvoted
from rankup.agent.record import StopAgreement
from rankup.env.node_env import Limits
from rankup.env.rank_env import is_loopback
from rankup.errors import JOIN_FAILED, USER_MISTAKE, ExpectedError, reason

ENDED = "its process has ended"


class Memberships:
    """The leader's knowledge of a job's members and memberships. Everything runs in one event loop, and the cost of a
    message does not depend on the number of members.

    `seats`: the connected members. `basis`: in an elastic job, the basis of the last membership, see `quorum`.
    `membership`: the highest number that this leader knows, even if that membership was only proposed. `running`:
    whether the last committed membership still runs. `resizing`: whether its ranks have been asked to stop for another
    membership. `over`: why there will be no more memberships, or "". Members that come later wait for the next leader.
    """

    def __init__(
        self, me: Member, *, log: Callable[[str], None], prepare: Callable[[int], Awaitable[Mapping[str, Any]]],
        on_message: Callable[[Member, Mapping[str, Any]], None], limits: Limits | None = None,
        outdone: Callable[[str, int], None] = lambda ip, port: None,
        claim: Callable[[str, int], Awaitable[bool]] | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`me`: the member in the leader's own process. The job ends if its members have not met within `me.left_s`
        seconds of the start or of the last loss. `log`: prints a line. `prepare(n)`: returns what a commit says besides
        its members. It is called when all members are ready and have reported how their ranks ended. It may take
        PREPARE_S, and is cancelled if a member leaves meanwhile. If it raises, the job ends with the error's text.

        `on_message(member, message)`: receives all messages that are not part of the meeting, except those of other
        memberships than the last committed one. If the leader itself finds a member lost, it tells all members, and
        then `on_message` receives {"is": "lost", "n", "why"}.

        `limits`: None if the job is not elastic. `outdone(ip, port)`: called if the leader at that address must replace
        this one. `claim(job, n)`: claims the right to form the next membership after `n` in `--shared-dir`, and returns
        whether this leader has it."""
        self.me, self._log, self._prepare, self._on_message, self._clock = me, log, prepare, on_message, clock
        self._limits, self._outdone, self._claim = limits, outdone, claim
        self.membership, self.running, self.resizing, self.over = 0, False, False, ""
        self.seats, self.basis = Seats(), NONE
        self._lost: dict[int, Seat] = {}  # lost members, by the first rank that they claimed
        self._left_out = Counter[int]()  # how often each node was left out, by the first rank that it claimed
        self._chosen: list[Seat] = []  # the members of the membership that runs or is proposed, by rank
        self._proposed, self._late = 0, set[Seat]()  # the open proposal or 0, and the members that are not ready for it
        self._all_ready = asyncio.Event()
        self._forming: asyncio.Task[None] | None = None
        self._asking = set[Link]()  # connections that wait for an answer to "ask"
        self._formed = 0  # the number of the last committed membership
        self._stop: StopAgreement | None = None  # the running membership's, once its ranks were asked to stop
        self._model: Member | None = None  # newcomers must match it, see `differences`; None before the job began
        self._next = NONE  # the basis in this leader's last proposal
        self._owned = set[int]()  # the memberships that only this leader may follow, see `quorum.claims`
        self._begun_s = self._noticed_s = self._ticked_s = self._beat_s = clock()
        self._beaten_s = -math.inf  # when another part of the job had claimed the right to go on
        self._foreign_s = -math.inf  # when an agent called that knows a newer membership

    @property
    def chosen(self) -> list[Member]:
        """The members of the membership that runs or is proposed, by rank."""
        return [seat.member for seat in self._chosen]

    # Members ----------------------------------------------------------------------------------------------------------

    def tell(self, kind: str, **values: Any) -> None:
        """Send a message to all members."""
        data = encode(kind, **values)  # encoded once, because there may be many members
        for seat in self.seats.values():
            seat.link.write(data)

    def end(self, text: str, *, code: int | None = JOIN_FAILED) -> None:
        """End the job. From now on members may leave without counting as lost, and no new member is taken."""
        if not self.over:
            self.tell("over", code=code, text=text)
            self.over = text or "the job at this address has just ended"
            self._void()

    def dismiss(self) -> None:
        """Stop leading. The members look for another leader."""
        self.over = self.over or "this node does not lead"
        self._void()
        for link in list(self.seats):
            self._remove(link, ENDED)

    def _turn_away(self, link: Link, member: Member, text: str, *, code: int = JOIN_FAILED) -> None:
        """Refuse a newcomer that can't belong to this job. If no membership has run yet, this ends the job."""
        link.send("over", code=code, text=text)
        if self._model is None:
            self.end(text, code=code)
        elif member.token != self.me.token:
            self._log(f"{member.name} was turned away{', and the job goes on' * self.running}: {text}")
        else:  # the refused member is the leader's own, so the others must find a leader that matches them
            self.tell("waiting", text=f"{member.name} was turned away: {text}")
            self.dismiss()

    def _sort_out(self) -> None:
        """Turn away members whose settings differ from the job's, even if they came before its settings were known."""
        for seat in list(self.seats.values()):
            if self.over or self._model is None:
                return
            if text := differences(seat.member, self._model, arguments=bool(self.basis.get("same_arguments"))):
                del self.seats[seat.link]
                self._turn_away(seat.link, seat.member, text, code=USER_MISTAKE)

    def _remove(self, link: Link, why: str) -> None:
        """Remove a member whose connection has ended or is given up."""
        link.close(at_once=why != ENDED)
        if (seat := self.seats.pop(link, None)) is None or self.over:
            return
        self._lost[seat.claim.start], seat.since_s, seat.lost = seat, self._clock(), why
        if seat not in self._chosen and seat not in self._late:
            return  # it was a spare
        if not self.running:
            self._void()
        elif len(seat.finished) < seat.member.num_ranks:
            more: dict[str, Any] = {"code": KILLED} if why == ENDED else {}
            self.lose(seat.member, why, node=True, **more)
            self._on_message(seat.member, {"is": "lost", "n": self._formed, "why": why})

    def lose(self, member: Member, why: str, *, ranks: Iterable[int] | None = None, **more: Any) -> None:
        """End the running membership, if there is one, because `ranks` of `member`, by default all of them, are lost.
        Each member then ends its ranks, and reports ready for the next proposal."""
        if not self.running:
            return
        self.running, self._stop = False, None
        self._begun_s = self._noticed_s = self._clock()
        lost = list(member.ranks if ranks is None else ranks)
        self.tell("lost", n=self._formed, ranks=lost, host=member.host, why=why, **more)
        self._judge()

    def lose_by(self, member: Member, end: End) -> None:
        """End the membership because a rank of `member` reports that it fails."""
        if end.suspect is None:
            self.lose(member, end.why, ranks=[end.rank], code=end.code)
        else:
            itself = end.suspect == end.rank
            why = "says that the others wait for it" if itself else f"is suspected by rank {end.rank}"
            self.lose(member, why, ranks=[end.suspect], alive=True)

    # Proposal and commit ----------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Begin to form a membership if none runs and the present members are enough for one."""
        if not (self.running or self.over) and (self._forming is None or self._forming.done()) and self._choose():
            self._forming = asyncio.create_task(self._form())

    async def _form(self) -> None:
        """Propose a membership, and commit it once all members are ready. Cancelled if one leaves or the job ends."""
        try:
            # Claim before the proposal, so that only the part of the job that goes on proposes anything
            while self._claim is not None and (unowned := claims(self.basis, self.seats.tokens) - self._owned):
                if not await self._claim(self.basis["job"], n := min(unowned)):
                    self._beaten_s = self._clock()
                    return
                self._owned.add(n)
            if not (seats := self._choose()):
                return  # a member has left meanwhile
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
        except Exception as error:  # without this, a bug of rankup would look like a hang
            self.end(reason(error), code=error.code if isinstance(error, ExpectedError) else JOIN_FAILED)

    def _choose(self) -> list[Seat]:
        """Return the members of the next membership, by rank, or [] while the job must wait for more of them."""
        seats, now_s, founds = list(self.seats.values()), self._clock(), not self.basis["n"]
        if self._limits is None:
            are_all = sum(len(seat.claim) for seat in seats) == self.me.world_size
            return sorted(seats, key=lambda seat: seat.claim.start) if are_all else []
        if any(seat.unfit and seat.member.token == self.me.token for seat in seats):
            return []  # this leader leaves, and the next one chooses
        # A new node 0 must not begin a second job while members of the first one look for their leader
        if now_s - self._beaten_s < timing.NOTICE_S or (founds and now_s - self._foreign_s < timing.FOUND_S):
            return []
        order = {token: place for place, token in enumerate(self.basis["used"], 1)} | {self.me.token: 0}
        # At the start all nodes import torch. Later the job waits only for the leader's own imports
        fit = [seat for seat in seats if not seat.unfit and (founds or seat.warm or seat.member.token == self.me.token)]
        # A new node 0 must not begin a second job, so it waits for a call from the leader of the first one
        wait_s = max(self._limits.wait_s, timing.FOUND_S) if founds else self._limits.wait_s
        # Later it waits only for nodes that were lost: one that was asked to leave will not come back
        leaves = {seat.member.token for seat in seats if seat.unfit}
        stay = sum(token in self.basis["voters"] and token not in leaves for token in self.basis["used"])
        wanted = self._limits.most if founds else max(self._limits.least, stay)
        enough = self._limits.least if now_s - self._begun_s >= wait_s else min(wanted, self._limits.most)
        if len(fit) < enough or self._outvoted():
            return []
        fit.sort(key=lambda seat: (order.get(seat.member.token, math.inf), seat.claim.start))
        return fit[:self._limits.most]

    def _propose(self, seats: list[Seat]) -> None:
        self.membership = self._proposed = self.membership + 1
        self._late, self._chosen = set(seats), seats
        self._all_ready.clear()
        # Members on the leader's machine connect by loopback, which others can't use. They get the local address where
        # others arrive. The address that others dial may be a Kubernetes Service's, which is on no interface here
        far = (seat.link.local_ip for seat in self.seats.values() if not is_loopback(seat.member.ip))
        ours = next((ip for ip in far if not is_loopback(ip)), "127.0.0.1")
        for seat in self.seats.values():
            if is_loopback(seat.member.ip):
                seat.member = replace(seat.member, ip=ours)
        if not self.basis["n"]:
            arguments = {member.settings.get(ARGUMENTS) for member in self.seats.members}
            self.basis = {**self.basis, "same_arguments": len(arguments) == 1}
        more = {} if self._limits is None else {"basis": self._number()}
        # Each member tests the route to the next one in a ring, so each node's way out and way in are tested once
        following = dict(zip(seats, [*seats[1:], seats[0]], strict=True))
        for seat in self._late:
            to = following.get(seat, seat).member
            route = [to.ip, to.port, to.name] if to.port and to is not seat.member else None
            seat.link.send("propose", n=self._proposed, next=route, ip=seat.member.ip, **more)

    def _number(self) -> Basis:
        """Number the ranks of a proposal in an elastic job. Returns the proposal's basis."""
        for place, seat in enumerate(self._chosen):
            size = seat.member.num_ranks
            seat.member = replace(seat.member, first_rank=place * size, world_size=len(self._chosen) * size)
        self._late |= {seat for seat in self.seats.values() if not seat.leaves}  # spares must know the proposal too
        known = self._known()
        tokens = [token for token, *_ in known]
        self._next = {
            "job": self.basis["job"], "n": self._proposed, "v": 0, "known": known, "voters": tokens,
            "used": tokens[:len(self._chosen)], "ran": self.basis.get("ran", self.basis["used"]),
            "before": electorates(self.basis), "same_arguments": self.basis.get("same_arguments"),
        }
        return self._next

    def _known(self) -> list[list[Any]]:
        """Return the token, address, port and name of each member that stays, in the order in which they would lead."""
        return [
            [each.member.token, each.member.ip, each.member.serves, each.name]
            for each in dict.fromkeys([*self._chosen, *self.seats.values()]) if not each.unfit
        ]

    def _void(self) -> None:
        """Drop the proposal."""
        self._proposed, self._late = 0, set()
        if self._forming is not None:
            self._forming.cancel()
            self._forming = None

    def _give_up(self, problems: list[str]) -> None:
        """Handle members that have no route to each other. In an elastic job, leave out the member that most of the
        failed routes begin or end at, but never the leader. Otherwise end the job."""
        pairs = zip(self._chosen, [*self._chosen[1:], self._chosen[0]], strict=True)
        blame = Counter(each for pair in pairs if pair[0].problem for each in pair)
        worst = max(reversed(self._chosen[1:]), key=lambda seat: blame[seat]).member
        if self.leave_out(worst.token, problems[0]):
            self._log(f"{worst.who} is left out: {problems[0]}")
        else:
            self.end(f"all ranks reached the master, but not each other: {'; '.join(problems[:4])}. {HINT}")

    def leave_out(self, token: str, why: str) -> bool:
        """Tell a node to leave for good, and drop the proposal. Returns False, and does nothing, if the node is gone,
        if too few nodes would remain, or if the job is not elastic."""
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
        """Commit membership `n`, which then runs. `more`: what `prepare` returned."""
        self._proposed, self._forming = 0, None
        self.running, self._formed, self.resizing = True, n, False
        self._model = self._chosen[0].member
        self._sort_out()  # the settings of members that came after the proposal may differ
        for seat in self.seats.values():
            seat.finished.clear()
        on_hosts = itertools.groupby(self.chosen, key=lambda member: member.host)
        hosts = [[host, sum(member.num_ranks for member in members)] for host, members in on_hosts]
        if self._limits is not None:
            change = describe_change(self.basis, self._next, [*self._lost.values(), *self.seats.values()])
            # "v": 1 makes this basis newer than a proposal of the same number by another part of the job
            self.basis = {**self._next, "v": 1, "before": [], "ran": self._next["used"], "job": more["job"]}
            more |= {"change": change, "basis": self.basis}
        self.tell("commit", n=n, ip=self.chosen[0].ip, hosts=hosts, **more)

    def stop(self, name: str, **more: Any) -> None:
        """Pass the signal `name`, a request to stop, on to all members, and begin to agree on the step to stop before.
        `change=True`: the job then goes on in another membership."""
        self.tell("stop", signal=name, **more)
        if self.running and self._stop is None:
            self._stop = StopAgreement(seat.link for seat in self._chosen)
            self.tell("prepare", n=self._formed, stop=self._stop.step)

    def _outvoted(self) -> str:
        return outvoted(self.basis, self.seats.tokens, shared=self._claim is not None)
