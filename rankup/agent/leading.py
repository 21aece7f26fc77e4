"""The leader's half of the meeting, see `rankup.agent.meeting`: who is in, who is lost, who is needed. No I/O.

If an elastic job needs a newcomer, all ranks save and stop before the same step. The next membership then includes it.

If members differ (see `differences`) before the first membership, the job ends. After that only a newcomer that differs
is turned away, even if it leads. The script's arguments are compared only if all nodes began with equal arguments.

The cost of a message does not depend on the number of members. Only a proposal, a commit and a loss look at all of
them. In a crowd, so does one newcomer in each tick."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankup import timing
from rankup.agent.ends import End, Verdict
from rankup.agent.events import LOCAL, Close, Log, Output, Rules, Send
from rankup.agent.forming import Forming, Seat
from rankup.agent.protocol import KILLED, Member, differences, pages
from rankup.agent.votes import Address, Age, Basis, merge, recount, without
from rankup.env.rank_env import ranges
from rankup.errors import JOIN_FAILED, STOPPED, USER_MISTAKE

ENDED = "its process has ended"
FEW = 64  # among so few members, each newcomer makes the leader look at all of them at once
CALLED = 32  # how many nodes a leader calls at once


@dataclass(slots=True)
class Caller:
    """A process that has connected and has no seat yet. `hello`: what it said, while it waits for one."""

    ip: str
    own_ip: str
    came_s: float
    heard_s: float  # when its last message came
    hello: Mapping[str, Any] | None = None
    member: Member | None = None  # set while another process holds its ranks
    refused: bool = False  # it leaves by itself: if we closed first, the reason might not arrive


class Leading(Forming):
    """All that a node decides while it leads. `follow`: where the leader is that must replace this one."""

    def __init__(self, me: Member, rules: Rules, basis: Basis, now_s: float, emit: Callable[[Output], None]) -> None:
        super().__init__(me, rules, basis, now_s, emit)
        self.follow: Address | None = None
        self._callers: dict[int, Caller] = {}
        self._merged = set[Age]()  # of bases whose voters this leader knows
        self._fresh: list[Seat] = []  # newcomers since the last tick: all get the basis of a running membership at once
        self._shows = 0  # the link of the caller that was asked to show its basis
        self._quick_losses = Counter[int]()  # of each node, by the first rank that it claimed
        self._asking = set[int]()  # links that wait for an answer to "ask"
        self._noticed = "", 0.0  # which node has given a notice last, by its token, and when
        self._ticked_s = self._beat_s = now_s
        self._answer_s = math.inf  # when to answer "ask"

    @property
    def wake_s(self) -> float:
        """When the next tick is due."""
        idle = self.running and not self._changed and len(self._members) == len(self.seats)
        return min(self._ticked_s + (timing.ALIVE_S if idle else timing.TICK_S), self._routes_s, self._answer_s)

    # Members ----------------------------------------------------------------------------------------------------------

    def dismiss(self) -> None:
        """Stop leading. The members look for another leader."""
        for link in (*self.seats, *self._callers):
            if link != LOCAL:
                self._emit(Close(link, False))

    def accept(self, link: int, ip: str, own_ip: str) -> None:
        self._callers[link] = Caller(ip, own_ip, self.now_s, self.now_s)
        self._emit(Send((link,), {"is": "leader", "over": self.closed, **self.greeting()}))

    def greeting(self) -> dict[str, Any]:
        """Return what this leader says of itself to each process that connects."""
        known = knowledge(self.basis, self.me.token)
        return {**known, "n": self.membership, "running": self.running}

    def yields_to(self, other: Mapping[str, Any]) -> bool:
        """Return whether another leader of this job, whose `greeting` is `other`, replaces this one. The newest
        committed membership counts first: a leader that is cut off may have made many proposals in vain."""
        names, own = ("formed", "n", "running", "token"), self.greeting()
        newer = other["token"] != own["token"] and [other[name] for name in names] > [own[name] for name in names]
        return newer and same_job(other["job"], own["job"])

    def _introduce(self, link: int, caller: Caller, message: Mapping[str, Any]) -> None:
        kind = message["is"]
        if caller.hello is not None:
            if kind == "shown" and self._take_basis(message["basis"]):
                for other, each in [*self._callers.items()]:
                    if each.hello is not None and not each.member:
                        self._hello(other, each, each.hello)
        elif kind == "hello" and not self.closed:
            self._hello(link, caller, message)
        else:
            if kind == "leads" and self.rules.limits is not None:
                if message["port"] and self.yields_to(message):
                    self.follow = caller.ip, message["port"]
                elif not message["port"] and message["n"] > self.membership:  # a member that looks for its leader
                    self._sought_s = self.now_s
            self.drop(link)  # this job is over, and a member of the next job will try again

    def drop(self, link: int) -> None:
        self._emit(Close(link, True))
        self.ended(link)

    def _take_basis(self, packed: Mapping[str, Any]) -> bool:
        try:
            basis = Basis.unpack(packed, Basis())
        except LookupError:
            return False
        if self.running or not self._is_news(basis.age, basis.numbers):
            return True
        self._void()  # an open proposal knows too few voters
        self._merged |= {basis.age, self.basis.age}
        newest = merge(basis, self.basis)
        self.basis = self._bases[newest.age] = newest
        return True

    def _is_news(self, age: Age, before: Collection[int]) -> bool:
        """Return whether a member with a basis of this age, and after these memberships, knows of voters that this
        leader does not know."""
        own = self.basis.age
        # A first membership that was only proposed counts for nothing, see `Meeting._seek`
        if not age[0] or age in self._merged:
            return False
        follows = own[0] if own[0] in before else age[0]  # see `votes.merge`
        rival = follows == own[0] and not age[2] and age[3] != own[3]
        return rival or (follows, *age[1:]) > own

    def _hello(self, link: int, caller: Caller, hello: Mapping[str, Any]) -> None:
        """Take a newcomer's first message. Before it gets a seat, it must show its basis if that is newer: whoever may
        vote must have told what it knows."""
        caller.hello = hello
        try:
            member = Member.read(hello)
        except ValueError:
            return self.drop(link)
        if member.world_size != self.me.world_size:
            others = f"{self.me.who} with WORLD_SIZE={self.me.world_size}. Set the same on all ranks."
            text = f"{member.who} was started with WORLD_SIZE={member.world_size}, {others}"
            return self._turn_away(link, member, text)
        if (earlier := self.by_token.get(member.token)) is not None:
            self._remove(earlier, "its connection was cut")
        age = tuple(hello["age"])
        if self.rules.limits is not None and self._is_news(age, hello["before"]):
            if self.running:
                # If others have gone on without the membership that runs here, its end is noticed soon. But if all its
                # members are still here, the newcomer's proposal was in vain, and the next one must know its voters
                if all(seat.heard_s > caller.came_s for seat in self._members):
                    self._change()
            elif self._shows not in self._callers:
                self._shows = link
                self._emit(Send((link,), {"is": "show"}))
            return None
        self.membership = max(self.membership, age[1])  # an earlier leader may have used higher numbers
        caller.member = member
        return self._seat(link, caller)

    def _seat(self, link: int, caller: Caller) -> None:
        """Give a newcomer its seat once no other member holds its ranks. If such a member still sends heartbeats, turn
        the newcomer away. If such a member is silent, the newcomer waits until `tick` removes it."""
        member, hello = caller.member, caller.hello
        if member is None or hello is None:
            return None
        rivals = [self._by_rank[rank] for rank in member.ranks if rank in self._by_rank]
        for rival in dict.fromkeys(rivals):
            if rival.heartbeat_s > caller.came_s:
                claim = f"rank {member.first_rank} was claimed twice: by {rival.member.who} and by {member.who}"
                hint = "Or another job uses this port, or an earlier attempt does not end."
                return self._turn_away(link, member, f"{claim}. Give each process a RANK of its own. {hint}")
            return None
        # Members on the leader's machine connect by loopback, which others can't use, see `_propose`
        age, now_s = tuple(hello["age"]), self.now_s
        seat = Seat(link, member, member.ranks, now_s, caller.heard_s, hello.get("warm") is not False, age, age,
                    state=hello["state"])
        if text := self._differs(member):
            return self._turn_away(link, member, text, code=USER_MISTAKE)
        self._callers.pop(link, None)
        self.seats[link] = self.by_token[member.token] = seat
        self._by_rank.update(dict.fromkeys(seat.claim, seat))
        self._own_ips[link] = caller.own_ip
        self._lost.pop(member.first_rank, None)
        self._changed = True
        if age[1] and self._model is None:
            self._set_model(member)
        if self.running and self.rules.limits is not None:
            self._fresh.append(seat)
        return self._form(crowded=len(self.seats) > FEW)

    def enter(self, hello: Mapping[str, Any]) -> None:
        """Give the member in the leader's own process its seat."""
        self._hello(LOCAL, Caller("127.0.0.1", "127.0.0.1", self.now_s, self.now_s), hello)

    def _differs(self, member: Member) -> str:
        return "" if self._model is None else differences(member, self._model, arguments=self.basis.same_arguments)

    def _set_model(self, member: Member) -> None:
        """From now on all must match `member`. Turn away those that came before its settings were known."""
        super()._set_model(member)
        for seat in [*self.seats.values()]:
            if not self.closed and (text := self._differs(seat.member)):
                self._unseat(seat)
                self._turn_away(seat.link, seat.member, text, code=USER_MISTAKE)

    def _turn_away(self, link: int, member: Member, text: str, *, code: int = JOIN_FAILED) -> None:
        """Refuse a newcomer that can't belong to this job. If no membership has run yet, this ends the job."""
        self._emit(Send((link,), {"is": "over", "code": code, "text": text}))
        if (caller := self._callers.get(link)) is not None:
            caller.hello, caller.member, caller.refused = None, None, True
        if self._model is None:
            self.end(text, code=code)
        elif member.token != self.me.token:
            goes_on = ", and the job goes on" if self.running else ""
            self._emit(Log(f"{member.name} was turned away{goes_on}: {text}"))
        else:  # the refused member is the leader's own, so the others must find a leader that matches them
            self.tell("waiting", text=f"{member.name} was turned away: {text}")
            self.dismissed = True

    def _unseat(self, seat: Seat) -> None:
        del self.seats[seat.link], self.by_token[seat.member.token]
        for rank in seat.claim:
            del self._by_rank[rank]
        self._own_ips.pop(seat.link, None)
        self._changed = True

    def ended(self, link: int, why: str = "") -> None:
        """A connection has ended, because `why` or by the other side."""
        self._asking.discard(link)
        self._callers.pop(link, None)
        if (seat := self.seats.get(link)) is not None:
            self._lose_seat(seat, why or ENDED)

    def _remove(self, seat: Seat, why: str) -> None:
        self._emit(Close(seat.link, True))
        self._asking.discard(seat.link)
        self._lose_seat(seat, why)

    def _lose_seat(self, seat: Seat, why: str) -> None:
        self._unseat(seat)
        if self.closed:
            return
        start, now_s = seat.claim.start, self.now_s
        quick = self._quick_losses[start] + 1 if now_s - seat.since_s < timing.HEALTHY_S else 1
        self._lost[start], seat.since_s, seat.lost = seat, now_s, why
        if seat not in self._members and seat not in self._late:
            return  # it was a spare
        self._quick_losses[start] = quick
        if not self.running:
            self._void()
        elif len(seat.finished) < seat.member.num_ranks:
            more: dict[str, Any] = {"code": KILLED} if why == ENDED else {}
            self.lose(seat.member, why, node=True, **more)
            lost = [End(rank, seat.member.host, KILLED, why) for rank in seat.member.ranks]
            self.ends.add_lost_node(lost, after_s=now_s - self._started_s)
            if self.rules.once:
                self.closed = "the job at this address is about to end"

    def _lose_by(self, member: Member, end: End) -> None:
        """End the membership because a rank of `member` reports that it fails."""
        if end.suspect is None:
            self.lose(member, end.why, ranks=[end.rank], code=end.code)
        else:
            itself = end.suspect == end.rank
            why = "says that the others wait for it" if itself else f"is suspected by rank {end.rank}"
            self.lose(member, why, ranks=[end.suspect], alive=True)

    # Messages ---------------------------------------------------------------------------------------------------------

    def heard(self, link: int, message: Mapping[str, Any]) -> None:
        if (seat := self.seats.get(link)) is not None:
            seat.heard_s = self.now_s
            self._take(seat, message)
        elif (caller := self._callers.get(link)) is not None:
            caller.heard_s = self.now_s
            if not caller.refused and caller.member is None:
                self._introduce(link, caller, message)

    def _take(self, seat: Seat, message: Mapping[str, Any]) -> None:
        kind = message["is"]
        if kind == "alive":
            seat.warm, seat.state = message.get("warm") is not False, message.get("state") or 0
            seat.heartbeat_s, seat.heartbeats = seat.heard_s, message.get("ranks") or []
        elif kind == "ready":
            self._ready(seat, message)
        elif kind == "has":
            seat.has, self._changed = tuple(message["age"]), True
        elif kind == "lacks":
            self._repeat(seat)
        elif kind == "ask":
            self._answer_s = min(self._answer_s, self.now_s + timing.POLL_S)
            self._asking.add(seat.link)
        elif kind == "leaving":
            self._let_go(seat)
        elif kind == "left":  # the node's ranks have ended for good, and it has no vote from now on
            self._renew(without(self.basis, seat.member.token, heirs=tuple(node.token for node in self._known())))
        elif kind == "cannot":
            self._cannot(seat, message)
        elif kind == "lost" or message.get("n", self._formed) != self._formed:
            pass  # members can't report losses, and messages of other memberships are dropped
        elif kind == "standing":
            stop = self._stop
            if stop is not None and stop.answer(seat.link, stop=message["stop"], step=message["step"]):
                self.tell("confirm" if stop.confirmed else "prepare", n=self._formed, stop=stop.step)
        elif kind == "ending":
            self._lose_by(seat.member, End.read(message))
        elif kind == "end":
            self._on_end(seat, End.read(message))
        elif kind == "notice":
            other, noticed_s = self._noticed
            # A scheduler signals all nodes at once. A second notice to the same node is meant as one
            if other in ("", seat.member.token) or self.now_s - noticed_s > timing.REPEAT_S:
                self._noticed = seat.member.token, self.now_s
                self.tell("notice")
        elif kind == "stop":
            self._stop_job(message["signal"])
        elif kind == "quit" and seat.link == LOCAL and self.ends.stopped_by:
            self.finish(Verdict(STOPPED, self.ends.stopped_by))  # a repeated signal ends this process at once

    def _repeat(self, seat: Seat) -> None:
        """Send the whole basis to a member that could not use a difference."""
        seat.sent = (-1, -1, -1, "")
        if self.proposed and seat in self._late:
            self._spread("propose", self._next, [seat], n=self.proposed)
        elif self.running and seat in self._members:
            self._spread("commit", self.basis, [seat], n=self._formed, **self._commit)
        elif self.running and self.rules.limits is not None:
            self._spread("spare", self.basis, [seat])

    def _on_end(self, seat: Seat, end: End) -> None:
        if end.code == 0:
            seat.finished.add(end.rank)
        if self.rules.once:
            if end.code:
                self.closed = "the job at this address is about to end" if self.running else self.closed
                self._lose_by(seat.member, end)
            return
        if self._judged == self._formed:
            return  # the message came twice, and the next membership is judged by its own ends
        was_last = self.ends.add(end)
        if end.code:
            self.lose(seat.member, end.why or f"ended with {end.code}", ranks=[end.rank], code=end.code)
        elif was_last and self.running:
            verdict = self.ends.judge(resizing=self.resizing)
            if verdict.code is None:  # the ranks stopped for a change of nodes, and a script may end with 0 then
                self.lose(seat.member, "nodes change", ranks=[end.rank])
            else:
                self.finish(verdict)

    def _stop_job(self, signal: str) -> None:
        self.ends.stopped_by = self.ends.stopped_by or signal
        self.stop(signal)
        if not self.running and not self.rules.once:
            self.finish(Verdict(STOPPED, self.ends.stopped_by))

    def _cannot(self, seat: Seat, message: Mapping[str, Any]) -> None:
        """A node can't start its ranks, and ends. The others would wait for it in vain."""
        if self.rules.limits is None or not self.basis.n:
            self.finish(Verdict(message["code"], f"{seat.member.name}: {message['text']}"))
        else:
            self._remove(seat, message["text"])

    # The clock --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Send heartbeats, remove silent members, check the deadline to join, and tell members who is missing."""
        now_s, silent_s = self.now_s, self.rules.silent_s
        if now_s - self._ticked_s > self.rules.frozen_s:
            for seat in self.seats.values():
                seat.heard_s = now_s
            for caller in self._callers.values():
                caller.heard_s = now_s
        self._ticked_s = now_s
        if now_s - self._beat_s >= timing.ALIVE_S:
            self._beat_s = now_s
            self.tell("alive")
            for seat in [*self.seats.values()]:
                if now_s - seat.heard_s > silent_s and seat.link != LOCAL and seat.link in self.seats:
                    self._remove(seat, f"sent no heartbeat for {now_s - seat.heard_s:.0f} s")
        self._tick_callers()
        if now_s >= self._answer_s:  # all "ask" together: after a deadline, all ranks ask again and again
            asked, self._asking, self._answer_s = self._asking, set(), math.inf
            for page in pages(self.heartbeats(), self.nodes()):
                self._emit(Send(asked, page))
        if now_s >= self._routes_s:
            self._routes_s = math.inf
            self._blame_routes()
        self._form()
        fresh, self._fresh = self._fresh, []
        if self.closed:
            return
        if self.running:
            self._spread("spare", self.basis, [seat for seat in fresh if seat not in self._members])
            self._look_for_change()
        elif now_s - self._begun_s > self.me.left_s + (timing.PREPARE_S if self.proposed else 0.0):
            hint = ". Was every process started, with this MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
            self.end(self._missing() + hint * (not self.proposed))
        elif now_s - self._noticed_s >= timing.NOTICE_S:
            self._noticed_s = now_s
            self.tell("waiting", text=self._missing())

    def _tick_callers(self) -> None:
        for link, caller in [*self._callers.items()]:
            if link not in self._callers or caller.refused:
                continue
            late = caller.member is None and self.now_s - caller.came_s > timing.HELLO_S
            if self.closed or late or self.now_s - caller.heard_s > self.rules.silent_s:
                self.drop(link)
            elif caller.member is not None:
                self._seat(link, caller)
            elif caller.hello is not None:
                self._hello(link, caller, caller.hello)

    # Changes of an elastic job ----------------------------------------------------------------------------------------

    def _let_go(self, seat: Seat) -> None:
        """Let a node leave that was asked to leave. The others go on without it. If all nodes leave, the job stops."""
        seat.unfit, seat.leaves, self._changed = seat.unfit or "it was asked to leave", True, True
        if all(each.leaves for each in self.seats.values()):
            for each in self.seats.values():
                each.unfit = ""  # the job stops, so all nodes stay until their ranks have ended, and report the ends
            self._stop_job("SIGTERM")
        elif seat in self._members and self.running:
            self._change()
        elif seat in self._members:
            self._void()

    def _change(self) -> None:
        """Make the ranks stop for another membership."""
        if not self.resizing:
            self.resizing = True
            self.stop("SIGTERM", change=True)

    def _look_for_change(self) -> None:
        """Give spares a vote. Make the ranks stop if newcomers are needed, once none has come for GATHER_S."""
        limits, now_s = self.rules.limits, self.now_s
        if self.resizing or limits is None:
            return
        idle = [] if len(self._members) == len(self.seats) and not self._changed else [
            seat for seat in self.seats.values() if seat not in self._members
        ]
        if self._changed:
            self._changed, age = False, self.basis.age
            spares = [seat.member.token for seat in idle if not seat.leaves]
            knowing = {seat.member.token for seat in self.seats.values() if seat.has >= age}
            if (changed := recount(self.basis, spares, knowing)) is not None:
                self._renew(changed)
        new = [seat for seat in idle if not seat.unfit and seat.warm and now_s - seat.since_s >= self._pause_s(seat)]
        room = len(self.chosen) < limits.most and new
        if room and now_s - max(seat.since_s for seat in new) >= timing.GATHER_S:
            self._change()

    def _pause_s(self, seat: Seat) -> float:
        """Return how long a node waits before the ranks stop for it: one that was left out, or that was lost again and
        again soon after it had come, must not stop the others each time its launcher restarts it."""
        start = seat.claim.start
        losses = self._quick_losses[start] - timing.FREE_LOSSES
        again_s = min(timing.RETURN_S, timing.BACK_OFF_S * 2.0**losses) if losses >= 0 else 0.0
        return max(timing.RETURN_S * self._left_out[start], again_s)

    def _renew(self, basis: Basis) -> None:
        """Change the basis of the job, and send it to all members."""
        self.basis, self._changed = replace(basis, v=basis.v + 1, by=self.me.token, known=self._known()), True
        self._spread("basis", self.basis, self.seats.values())

    # For status and logs ----------------------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        """Return a row for `rankup status` for each node that this leader has seen; [] if the job is not elastic."""
        if self.rules.limits is None:
            return []
        rows, voters = {}, [set(each) for _, each, _ in self.basis.electorates]
        for seat in [*self._lost.values(), *self.seats.values()]:
            used = self.running and seat in self._members and not seat.lost
            votes = all(seat.member.token in each for each in voters)
            idle = "spare" if votes else "new"  # a newcomer has no vote until the others know about it
            state = "in use" if used else "left out" if seat.unfit else "lost" if seat.lost else idle
            rows[seat.claim.start] = {
                "host": seat.member.host, "state": state, "since": self.rules.epoch_s + seat.since_s,
                "why": seat.unfit or seat.lost, "ranks": ranges(seat.member.ranks) if used else "",
            }
        return [{"node": first // self.me.num_ranks, **rows[first]} for first in sorted(rows)]

    def heartbeats(self) -> list[dict[str, Any]]:
        """Return the newest heartbeat of each rank, ordered by rank, with its `host`. `ago_s`: how many seconds ago the
        rank gave it; not a time, because the clocks of two machines may differ."""
        rows = [
            {**heartbeat, "host": seat.member.host, "ago_s": heartbeat["ago_s"] + self.now_s - seat.heartbeat_s}
            for seat in self.seats.values() for heartbeat in seat.heartbeats
        ]
        return sorted(rows, key=lambda row: int(row["rank"]))


def knowledge(basis: Basis, token: str) -> dict[str, Any]:
    """Return what an agent that leads or may lead says about itself. `n`: the highest membership that it knows.
    `formed`: the newest one that it knows to be committed. `running` is False here, and leaders overwrite it."""
    return {"token": token, "n": basis.n, "formed": basis.follows, "running": False, "job": basis.job}


def same_job(one: str, other: str) -> bool:
    """Return whether two agents may belong to one job. An agent that has just started does not know the job's id."""
    return not one or not other or one == other
