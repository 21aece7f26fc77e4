"""How a leader forms memberships: whom it waits for, what it proposes, and when it commits. No I/O, see `leading`.

In an elastic job, whose number of nodes may change, each proposal numbers the ranks anew: first the leader's, then
those of the last membership's nodes in their order, then those of newcomers. Nodes beyond `Limits.most` are spares."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rankup import timing
from rankup.agent.ends import Ends, Verdict
from rankup.agent.events import Claim, Claimed, Judged, Log, Output, Prepare, Prepared, Rules, Send
from rankup.agent.protocol import ARGUMENTS, HINT, Member, by_host, describe_missing, differences
from rankup.agent.votes import Age, Basis, Node, StopAgreement, claims, outvoted
from rankup.env.rank_env import is_loopback
from rankup.errors import JOIN_FAILED, USER_MISTAKE

KEPT = 8  # how many of the last bases the leader keeps, to send only differences to them
NEVER = -math.inf


@dataclass(eq=False, slots=True)
class Seat:
    """A member as the leader sees it."""

    link: int
    member: Member  # with the ranks that it has in the newest proposal
    claim: range  # the ranks that it had when it came
    since_s: float  # when it came, or was lost
    heard_s: float  # when its last message came
    warm: bool  # whether its fork server has imported torch
    sent: Age  # of the basis that it got last
    has: Age  # of the newest basis that it said to know
    lost: str = ""  # why it was lost
    problem: str = ""  # why it does not reach the next member
    heartbeats: list[dict[str, Any]] = field(default_factory=list)  # the last heartbeats of its ranks
    heartbeat_s: float = 0.0  # when these came
    finished: set[int] = field(default_factory=set)  # its ranks that have ended with 0
    unfit: str = ""  # why it can't be in the next membership
    leaves: bool = False  # whether it was asked to leave
    state: int = 0  # the newest membership whose state its ranks have had

    @property
    def node(self) -> Node:
        me = self.member
        return Node(me.token, me.ip, me.serves, me.port, me.host, self.claim.start, me.num_ranks)


class Forming:
    """The members of a job, and the membership that they form.

    `seats`: the connected members. `basis`: of the newest membership. `membership`: the highest number that this leader
    knows, even if that membership was only proposed. `running`: whether the last committed membership still runs.
    `resizing`: whether its ranks have been asked to stop for another membership. `closed`: why it takes no members, or
    "". Members that come later wait for the next leader."""

    def __init__(self, me: Member, rules: Rules, basis: Basis, now_s: float, emit: Callable[[Output], None]) -> None:
        """The job ends if its members have not met within `me.left_s` seconds of the start or of the last loss."""
        self.me, self.rules, self._emit, self.now_s = me, rules, emit, now_s
        self.basis = basis if rules.limits is not None else Basis()
        self.membership, self.running, self.resizing, self.closed = basis.n, False, False, ""
        self.dismissed = False  # another node must lead, wherever it is
        self.seats: dict[int, Seat] = {}
        self.by_token: dict[str, Seat] = {}
        self._by_rank: dict[int, Seat] = {}  # by each rank that a member claimed
        self._own_ips: dict[int, str] = {}  # by link: the address here at which its member arrived
        self._lost: dict[int, Seat] = {}  # lost members, by the first rank that they claimed
        self._left_out = Counter[int]()  # how often each node was left out, by the same
        self.chosen: list[Seat] = []  # the members of the membership that runs or is proposed, by rank
        self._members: set[Seat] = set()  # the same
        self._phase = ""  # of a membership that is being formed: claiming, proposed, routes, preparing
        self.proposed = 0  # the open proposal
        self._late: dict[Seat, None] = {}  # the members that are not ready for it, in the same order at a replay
        self._next = basis  # the basis of the last proposal
        self._bases: dict[Age, Basis] = {basis.age: basis}  # the last ones that were sent
        self._why, self._commit = "", dict[str, Any]()  # what the next commit says
        self._model: Member | None = None  # newcomers must match it, see `differences`; None before the job began
        self._owned = set[int]()  # the memberships that only this leader may follow, see `votes.claims`
        self._stop: StopAgreement | None = None  # the running membership's, once its ranks were asked to stop
        self._changed = True  # something that `Leading._look_for_change` looks at
        self._formed = 0  # the number of the last committed membership
        self._judged = -1  # the number of the last membership whose ends were judged
        self.failures = Counter[str]()  # how often the ranks of each node have failed, by the node's token
        self.ends = Ends(me.world_size, rules.max_restarts, rules.restart_on, elastic=rules.limits is not None)
        self._begun_s = self._noticed_s = self._started_s = now_s
        self._routes_s = math.inf  # when to act on missing routes
        self._looked_s = self._denied_s = self._sought_s = NEVER  # the last look at all members for a new membership;
        # when another part had claimed to go on; and when a member of a newer membership looked for its leader here

    @property
    def members(self) -> list[Member]:
        """The connected members, by rank."""
        return sorted((seat.member for seat in self.seats.values()), key=lambda member: member.first_rank)

    def tell(self, kind: str, **values: Any) -> None:
        """Send a message to all members."""
        self._emit(Send([*self.seats], {"is": kind, **values}))

    def end(self, text: str, *, code: int | None = JOIN_FAILED) -> None:
        """End the job. From now on members may leave without counting as lost, and no new member is taken."""
        if not self.closed:
            self.tell("over", code=code, text=text)
            self.closed = text or "the job at this address has just ended"
            self._void()

    def finish(self, verdict: Verdict) -> None:
        """End the job, and have it written how it ended."""
        if not self.closed:
            self._emit(Judged(verdict, self.ends.latest))
            self.end(verdict.text, code=verdict.code)

    def lose(self, member: Member, why: str, *, ranks: Iterable[int] | None = None, **more: Any) -> None:
        """End the running membership, if there is one, because `ranks` of `member`, by default all of them, are lost.
        Each member then ends its ranks, and reports ready for the next proposal."""
        if not self.running:
            return
        self.running, self._stop = False, None
        self._begun_s = self._noticed_s = self.now_s
        lost = list(member.ranks if ranks is None else ranks)
        self.tell("lost", n=self._formed, ranks=lost, host=member.host, why=why, **more)
        self._looked_s = NEVER
        if not self.rules.once:
            self._form()

    # Proposal and commit ----------------------------------------------------------------------------------------------

    def _form(self, *, crowded: bool = False) -> None:
        """Begin to form a membership if none runs and the present members are enough for one."""
        if self.running or self.closed or self._phase or (crowded and self.now_s - self._looked_s < timing.TICK_S):
            return
        if not (seats := self._choose()):
            return
        # Claim before the proposal, so that only the part of the job that goes on proposes anything
        if self.rules.shared and (unowned := claims(self.basis, self._here()) - self._owned):
            self._phase = "claiming"
            self._emit(Claim(self.basis.job, min(unowned)))
            return
        first, *others = self.members
        if found := [text for each in others if (text := differences(each, first, arguments=False))]:
            self.end("\n".join(found[:4]), code=USER_MISTAKE)
            return
        self._propose(seats)

    def claimed(self, event: Claimed) -> None:
        if event.ok:
            self._owned.add(event.n)
        elif self._phase == "claiming":
            self._denied_s = self.now_s
        if self._phase == "claiming":
            self._phase = ""
            self._form()

    def _choose(self) -> list[Seat]:
        """Return the members of the next membership, by rank, or [] while the job must wait for more of them."""
        seats, now_s, limits, is_first = self.seats, self.now_s, self.rules.limits, not self.basis.n
        if limits is None:
            complete = len(self._by_rank) == self.me.world_size
            return sorted(seats.values(), key=lambda seat: seat.claim.start) if complete else []
        total, waited_s = self.me.world_size // self.me.num_ranks, now_s - self._begun_s
        # A new node 0 must not begin a second job. So it waits for a call from the leader of the first one, unless all
        # nodes are here, spares included; and as long as members of the first one look for their leader
        alone = now_s - self._sought_s >= timing.FOUND_S and (waited_s >= timing.FOUND_S or len(seats) >= total)
        if now_s - self._denied_s < timing.NOTICE_S or (is_first and not alone):
            return []
        waited = waited_s >= limits.wait_s
        if len(seats) < (limits.least if waited or not is_first else limits.most):
            return []
        self._looked_s, own = now_s, self.by_token.get(self.me.token)
        if own is not None and own.unfit:
            return []  # this leader leaves, and the next one chooses
        # At the start all nodes import torch. Later the job waits only for the leader's own imports
        fit = [seat for seat in seats.values() if not seat.unfit and (is_first or seat.warm or seat is own)]
        # Later it waits only for nodes that were lost: one that was asked to leave will not come back
        leaving = {seat.member.token for seat in seats.values() if seat.unfit}
        voters = set(self.basis.voters) - leaving
        stay = sum(token in voters for token in self.basis.used)
        enough = limits.least if waited else min(limits.most if is_first else max(limits.least, stay), limits.most)
        if len(fit) < enough or self._why_not():
            return []
        order = {token: place for place, token in enumerate(self.basis.used, 1)} | {self.me.token: 0}
        fit.sort(key=lambda seat: (order.get(seat.member.token, math.inf), seat.claim.start))
        return self._with_state(fit, limits.most)

    def _with_state(self, fit: list[Seat], most: int) -> list[Seat]:
        """Return this leader and others of `fit`, as many as may be, among them nodes that have the state of the last
        finished step. Return [] while such nodes are here, but import torch or have no room."""
        # Nobody knows which of these trained last, so one of each is needed
        trained = [set(used) for _, _, used in self.basis.electorates] + [self._holders()]
        picked = [seat for seat in fit if seat.member.token == self.me.token]
        for tokens in trained:
            keepers = [seat for token, seat in self.by_token.items() if token in tokens and not seat.unfit]
            if not keepers or any(seat.member.token in tokens for seat in picked):
                continue
            if not (ready := [seat for seat in fit if seat.member.token in tokens]):
                return []
            picked.append(max(ready, key=lambda seat: sum(seat.member.token in each for each in trained)))
        if len(picked) > most:
            self.dismissed = True  # a node that has the state must lead
            return []
        others = [seat for seat in fit if seat not in picked]
        chosen = {*picked, *others[:most - len(picked)]}
        return [seat for seat in fit if seat in chosen]

    def _why_not(self) -> str:
        """Return why those that are here must not go on, or ""."""
        lost = f"none of the nodes here has the state of membership {self.basis.state}"
        return outvoted(self.basis, self._here(), shared=self.rules.shared) or lost * (not self._holders())

    def _holders(self) -> set[str]:
        """Return who has the state that the last membership restored, or a newer one."""
        return {token for token in self._here() if self.by_token[token].state >= self.basis.state}

    def _here(self) -> set[str]:
        """Return who may vote. A node that leaves may not: it is asked for nothing, and may find another leader."""
        return {token for token, seat in self.by_token.items() if not seat.unfit}

    def _propose(self, seats: list[Seat]) -> None:
        self.membership = self.proposed = n = self.membership + 1
        self._phase, self.chosen, self._members = "proposed", seats, set(seats)
        self._late = dict.fromkeys(seats)
        # Members on the leader's machine get the local address where others arrive. The address that others dial may be
        # a Kubernetes Service's, which is on no interface here
        near = [seat for seat in self.seats.values() if is_loopback(seat.member.ip)]
        far = (self._own_ips[link] for link, seat in self.seats.items() if not is_loopback(seat.member.ip))
        ours = next((ip for ip in far if not is_loopback(ip)), "127.0.0.1")
        for seat in near:
            seat.member = replace(seat.member, ip=ours)
        same = self.basis.same_arguments
        if not self.basis.n:
            same = len({seat.member.settings.get(ARGUMENTS) for seat in self.seats.values()}) == 1
            self.basis = replace(self.basis, same_arguments=same)
        known, used = self._known(), tuple(seat.member.token for seat in seats)
        self._next = Basis(n=n, by=self.me.token, known=known, used=used, same_arguments=same)
        if self.rules.limits is not None:
            for place, seat in enumerate(seats):
                size = seat.member.num_ranks
                seat.member = replace(seat.member, first_rank=place * size, world_size=len(seats) * size)
            # Spares must know the proposal too
            self._late |= dict.fromkeys(seat for seat in self.seats.values() if not seat.unfit)
            self._next = replace(
                self._next, job=self.basis.job, voters=tuple(node.token for node in known),
                before=tuple(self.basis.electorates), state=max(seat.state for seat in seats),
            )
        self._spread("propose", self._next, self._late, n=n)

    def _known(self) -> tuple[Node, ...]:
        """Return all members that stay, in the order in which they would lead."""
        return tuple(seat.node for seat in dict.fromkeys([*self.chosen, *self.seats.values()]) if not seat.unfit)

    def _spread(self, kind: str, basis: Basis, seats: Iterable[Seat], **more: Any) -> None:
        """Send `seats` a message with `basis`. Those that have one of the last bases get only the difference. Each form
        is encoded once, because there may be many members."""
        links: dict[Age | None, list[int]] = {}
        for seat in seats:
            links.setdefault(seat.sent if seat.sent in self._bases else None, []).append(seat.link)
            seat.sent = max(seat.sent, basis.age)  # a member that has a proposal keeps it
        for age, group in links.items():
            base = None if age is None else self._bases[age]
            self._emit(Send(group, {"is": kind, "basis": basis.pack(base), **more}))
        self._bases = dict([*self._bases.items()][-KEPT:]) | {basis.age: basis}

    def _void(self) -> None:
        """Drop the proposal."""
        self._phase, self.proposed, self._late, self._routes_s = "", 0, {}, math.inf

    def _ready(self, seat: Seat, message: Mapping[str, Any]) -> None:
        if message["n"] != self.proposed or seat not in self._late:
            return
        seat.problem = message["problem"]
        seat.warm = seat.warm or seat in self._members  # a chosen member is ready only with torch imported
        seat.has = self._next.age
        del self._late[seat]
        if self._late:
            return
        if any(each.problem for each in self.chosen):
            self._phase, self._routes_s = "routes", self.now_s + timing.ENDING_S  # a member may be ending
        else:
            self._prepare()

    def _prepare(self) -> None:
        """Decide what the ends of the last membership's ranks mean. Then have the next commit prepared."""
        self._phase, size = "preparing", sum(seat.member.num_ranks for seat in self.chosen)
        verdict, self._judged = self.ends.judge(resizing=self.resizing, next_size=size), self._formed
        if self._blame(verdict):
            return
        if verdict.code is not None:
            self.finish(verdict)
            return
        self._why = verdict.text or self._why  # the proposal before this one may have failed
        self.ends.world_size, job = size, self.basis.job or self.rules.job
        if self.basis.job:  # in an elastic job, each leader continues the count of the one before
            self.ends.restarts = self.proposed - 1
        if self.rules.once:  # if the launcher has restarted any rank, this is a restart of the job
            self.ends.restarts = max(seat.member.restarts for seat in self.chosen)
        self._commit = {"job": job, "restarts": self.ends.restarts}
        self._emit(Prepare(self.proposed, size, job, self.ends.restarts))

    def _blame(self, verdict: Verdict) -> bool:
        """Count a failure of the node that `verdict` blames. After too many failures leave the node out, and propose
        another membership, or end the job if too few nodes would be left. Returns whether this happened."""
        most, rank = self.rules.max_failures, None if verdict.cause is None else verdict.cause.blamed
        if most is None or verdict.cause is None or rank is None or not self.basis.trained:
            return False
        token = self.basis.trained[rank // self.me.num_ranks]
        self.failures[token] += 1
        if self.failures[token] < most:
            return False
        why = f"{verdict.cause}, failure {self.failures[token]} of its ranks"
        self.ends.without_progress = 0
        if not self.leave_out(token, why):
            few = f"{why}, and too few nodes are left without that one"
            self.finish(Verdict(verdict.cause.code, few))
        return True

    def _blame_routes(self) -> None:
        """Handle members that have no route to each other. In an elastic job, leave out the member that most of the
        failed routes begin or end at, but never the leader. Otherwise end the job."""
        pairs = zip(self.chosen, [*self.chosen[1:], self.chosen[0]], strict=True)
        blame = Counter(each for pair in pairs if pair[0].problem for each in pair)
        problems = [seat.problem for seat in self.chosen if seat.problem]
        worst = max(reversed(self.chosen[1:]), key=lambda seat: blame[seat]).member
        if self.leave_out(worst.token, problems[0]):
            self._emit(Log(f"{worst.who} is left out: {problems[0]}"))
        else:
            self.end(f"all ranks reached the master, but not each other: {'; '.join(problems[:4])}. {HINT}")

    def leave_out(self, token: str, why: str) -> bool:
        """Tell a node to leave for good, and drop the proposal. Returns False, and does nothing, if the node is gone,
        if too few nodes would remain, or if the job is not elastic."""
        seat, limits = self.by_token.get(token), self.rules.limits
        others = [each for each in self.seats.values() if each is not seat and not each.unfit]
        if limits is None or seat is None or len(others) < limits.least:
            return False
        seat.unfit, seat.leaves = why, True
        self._left_out[seat.claim.start] += 1
        self._emit(Send((seat.link,), {"is": "left_out", "why": why}))
        self._void()
        return True

    def _set_model(self, member: Member) -> None:
        """From now on all newcomers must match `member`."""
        self._model = member

    def prepared(self, event: Prepared) -> None:
        """Commit a membership, which then runs; or end the job if that could not be prepared."""
        n, more = event.n, event.more
        if n != self.proposed or self._phase != "preparing":
            return
        if more is None:
            self.end(event.why, code=event.code)
            return
        self._phase, self.proposed = "", 0
        self.running, self._formed, self.resizing, self._changed = True, n, False, True
        self._started_s = self.now_s
        self._set_model(self.chosen[0].member)  # the settings of members that came after the proposal may differ
        for seat in self.seats.values():
            seat.finished.clear()
        again = self._commit["restarts"] > 0 or bool(more["again"])
        self._commit |= {"why": self._why, **more, "again": again}
        if self.rules.limits is not None:
            self._commit["change"] = self._describe_change()
        # "v": 1 makes this basis newer than a proposal of the same number by another part of the job
        job = self._commit["job"] if self.rules.limits is not None else ""
        self.basis = replace(self._next, v=1, before=(), job=job)
        self._why = ""
        self._spread("commit", self.basis, self.seats.values(), n=n, **self._commit)

    def stop(self, name: str, **more: Any) -> None:
        """Pass the signal `name`, a request to stop, on to all members, and begin to agree on the step to stop before.
        `change=True`: the job then goes on in another membership."""
        self.tell("stop", signal=name, **more)
        if self.running and self._stop is None:
            self._stop = StopAgreement(seat.link for seat in self.chosen)
            self.tell("prepare", n=self._formed, stop=self._stop.step)

    # Texts ------------------------------------------------------------------------------------------------------------

    def _missing(self) -> str:
        waited_s = round(self.now_s - self._begun_s)
        if self._denied_s > self._begun_s:
            return "another part of the job goes on, or --shared-dir does not answer"
        if self.proposed:
            what = f"rank 0 still prepares their start after {waited_s} s"
            if self._late:
                late = by_host(seat.member for seat in self._late)
                what = f"after {waited_s} s some still import torch or wait for earlier ranks to end (late: {late})"
            return f"all {sum(seat.member.num_ranks for seat in self.chosen)} ranks have joined, but {what}"
        if self.rules.limits is None:
            text = describe_missing(self.members, of=self.me.world_size, waited_s=waited_s)
        else:
            here = [seat for seat in self.seats.values() if not seat.unfit]
            cold = sum(not seat.warm for seat in here)
            text = self._why_not() or f"{len(here)} of at least {self.rules.limits.least} nodes are here"
            text += f", {cold} of them still importing torch" if cold else ""
        lost = "; ".join(f"{seat.member.who}: {seat.unfit or seat.lost}" for seat in [*self._lost.values()][:4])
        return text + (f" (lost: {lost})" if lost else "")

    def _describe_change(self) -> str:
        """Describe for the log what the next membership changes; "" if it has the same nodes."""
        old, used = {*self.basis.trained}, {*self._next.used}
        if old == used:
            return ""
        unseen = "is lost: it is not here"
        found = {node.token: (node.name, unseen) for node in self.basis.known}
        seats = [*self._lost.values(), *self.seats.values()]
        for seat in seats:
            became = f"is left out: {seat.unfit}" if seat.unfit else f"is lost: {seat.lost}"
            found[seat.member.token] = seat.node.name, became if seat.unfit or seat.lost else "is a spare now"
        parts = [" ".join(found.get(token, ("the node that led", unseen))) for token in sorted(old - used)]
        parts += [f"{found[token][0]} joins" for token in sorted(used - old)] if old else []
        spares = sum(not (seat.lost or seat.unfit) for seat in seats) - len(used)
        parts += [f"{spares} spare"] if spares else []
        what = f"membership {self._next.n}: {len(used)} node{'s' * (len(used) > 1)}"
        return f"{what}{' (' + '; '.join(parts) + ')' if parts else ''}"
