"""Who belongs to a job: the leader meets all members, names who is missing, and says when one is lost. No torch here.

The kernel closes the connections of a process that ends, so a loss is known at once. A process that is stopped or cut
off is found by its silence. The messages are in `protocol`, a member's side of them is in `attendance`. How all ranks
stop before the same step is in `record`.

Where the number of nodes may change, a node keeps its seat, and its ranks are numbered at each proposal: the leader's
first, then those of the last membership in its order, then newcomers; who is beyond `most` is a spare. A newcomer that
is needed has all ranks stop before one step, and save. Which part of a job that was cut goes on is in `votes`.

Members that differ (see `differences`) are all refused as long as there was no membership. Later such a newcomer is
turned away alone, also where it is the one that is to lead. Arguments count where all nodes began with the same.
"""

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rankup import timing
from rankup.agent.network import Link, encode
from rankup.agent.protocol import ARGUMENTS, HINT, KILLED, SIGNALS, Member, by_host, describe_missing, differences
from rankup.agent.record import StopAgreement
from rankup.agent.seats import Seat, Seats
from rankup.agent.votes import NONE, Basis, age, claims, electorates, outvoted, recount, same_job, without
from rankup.env.node_env import Limits
from rankup.env.rank_env import is_loopback, ranges
from rankup.errors import JOIN_FAILED, USER_MISTAKE, ExpectedError, reason

ENDED = "its process has ended"


class Leader:
    """Decides who belongs to the job. Everything happens in one event loop, and the cost of a message does not depend
    on the number of members.

    `seats`: who is here. `basis`: of the last membership where the number of nodes may change, see `votes`.
    `membership`: the newest number that this leader knows of, also where that was only proposed. `running`: whether the
    last one that was committed is not lost. `changing`: its ranks have been asked to stop, for another membership.
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
        self.membership, self.running, self.changing = 0, False, False
        self.seats, self.basis = Seats(), NONE
        self._lost: dict[int, Seat] = {}  # by claim
        self._chosen: list[Seat] = []  # of the membership that runs or is proposed, by rank
        self._proposed, self._late = 0, set[Seat]()  # the membership that is, or 0, and who is not ready for it
        self._preparing: asyncio.Task[None] | None = None
        self._asking = set[Link]()  # who waits for an answer
        self._formed = 0  # the last membership that was committed
        self._stop: StopAgreement | None = None  # in the membership that runs
        self._over = ""  # why there will be no membership any more
        self._model: Member | None = None  # whoever differs from this one is no part of the job; None before it began
        self._same_arguments = False  # all nodes have the same, as it began
        self._next = NONE  # the basis that this leader has proposed last
        self._owned = set[int]()  # the memberships whose succession is its own, see `votes.claims`
        self._begun_s = self._noticed_s = self._ticked_s = self._beat_s = clock()
        self._beaten_s = -math.inf  # when another part of the job owned what is next
        self._foreign_s = -math.inf  # when somebody called who knows a newer membership

    @property
    def chosen(self) -> list[Member]:
        """Those of the membership that runs or is proposed, by rank."""
        return [seat.member for seat in self._chosen]

    def nodes(self) -> list[dict[str, Any]]:
        """For the user, where the number of nodes may change: each that was here since this leader leads."""
        if self._limits is None:
            return []
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

    def signs(self) -> list[dict[str, Any]]:
        """Where each rank was when its member last said so, by rank: what it said, and `host`. How long ago it lived is
        in `ago_s`, as the clocks of two machines may differ."""
        now_s = self._clock()
        rows = [
            {**sign, "host": seat.member.host, "ago_s": sign["ago_s"] + now_s - seat.signed_s}
            for seat in self.seats.values() for sign in seat.signs
        ]
        return sorted(rows, key=lambda row: int(row["rank"]))

    # Who comes ----------------------------------------------------------------------------------------------------

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The life of one connection, for `asyncio.start_server(leader.attend, ..., limit=LONGEST)`."""
        # A task is cancelled as the event loop ends: Python 3.11 prints a traceback where that is passed on
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(Link(reader, writer)) as link:
            await self._attend(link)

    async def _attend(self, link: Link) -> None:
        link.send("leader", over=self._over, **self.greeting())
        why = ENDED
        try:
            async with asyncio.timeout(timing.HELLO_S):
                hello = await link.receive()
            if (member := self._read(link, hello)) is not None:
                await self._seat(link, member, warm=hello.get("warm") is not False)
            while True:  # also for who was refused: an end of ours before its own may hide the reason
                self._take(link, await link.receive())
        except (ConnectionError, TimeoutError):
            pass
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            why = f"it sent a message that makes no sense: {type(error).__name__}: {error}"
        self._remove(link, why)

    def greeting(self) -> dict[str, Any]:
        """What this leader says of itself to whoever connects."""
        return {"token": self.me.token, "n": self.membership, "running": self.running, "job": self.basis["job"]}

    def yields_to(self, other: Mapping[str, Any]) -> bool:
        """Whether another leader of this job, which has said so much of itself, takes the place of this one."""
        ours = (self.membership, self.running, self.me.token)
        return same_job(other, self.basis) and (int(other["n"]), bool(other["running"]), str(other["token"])) > ours

    def _read(self, link: Link, hello: Mapping[str, Any]) -> Member | None:
        """A newcomer introduces itself. None where it can't belong to this job."""
        if hello["is"] == "leads" and self._limits is not None:
            if not int(hello["port"]):  # a member of a job, which looks for its leader
                self._foreign_s = self._clock() if int(hello["n"]) > self.membership else self._foreign_s
            elif self.yields_to(hello):
                self._outdone(link.remote_ip, int(hello["port"]))
        if hello["is"] != "hello" or self._over:
            raise ValueError(hello["is"])  # it may be early, and wait for the next leader
        member = Member.read(hello)
        if member.world_size != self.me.world_size:
            others = f"{self.me.who} with WORLD_SIZE={self.me.world_size}. Set the same on all ranks."
            text = f"{member.who} was started with WORLD_SIZE={member.world_size}, {others}"
            self._turn_away(link, member, text)
            return None
        self.membership = max(self.membership, int(hello["n"]))  # this leader may be a successor
        if int(hello["n"]) and self._model is None:
            self._model = member
        if self._limits is not None and not self.running and age(hello.get("basis", self.basis)) > age(self.basis):
            self.basis = dict(hello["basis"])
            self._same_arguments = bool(self.basis.get("same_arguments"))
            self.membership = max(self.membership, self.basis["n"])  # a spare may not have heard its proposal
        return member

    async def _seat(self, link: Link, member: Member, *, warm: bool) -> None:
        """Give a newcomer its seat once its ranks are free. Whoever has them gives a sign of life, or is replaced.

        Raises ConnectionError where the job is over before.
        """
        known: dict[Seat, list[int]] = {}  # for each that has them: messages until now, and looks that are left
        while rivals := self.seats.claimed(member.ranks):
            for rival in rivals:
                # Looks, not seconds: a leader that was stopped itself has heard nobody meanwhile
                answer = known.setdefault(rival, [rival.num_heard, round(timing.ANSWER_S / timing.PAUSE_S)])
                answer[1] -= 1
                if rival.member.token == member.token:
                    self._remove(rival.link, "its connection was cut")
                elif rival.num_heard > answer[0]:
                    claims = f"rank {member.first_rank} was claimed twice: by {rival.member.who} and by {member.who}"
                    hint = "Or another job uses this port, or an earlier attempt does not end."
                    self._turn_away(link, member, f"{claims}. Give each process a RANK of its own. {hint}")
                    return
                elif answer[1] < 0 and self._is_foreign(link, member):
                    return
                elif answer[1] < 0:
                    self._say(f"{rival.member.who} gives no answer: it was replaced by {member.who}")
                    self._remove(rival.link, f"was replaced by {member.who}")
            await asyncio.sleep(timing.PAUSE_S)
        if self._over:
            raise ConnectionError
        if self._is_foreign(link, member):
            return
        now_s = self._clock()
        self.seats[link] = Seat(link, member, member.ranks, now_s, now_s, warm)
        self._lost.pop(member.first_rank, None)
        self._judge()
        if self.running and self._limits is not None:
            link.send("spare", basis=self.basis)

    def _turn_away(self, link: Link, member: Member, text: str, *, code: int = JOIN_FAILED) -> None:
        """A newcomer can't belong to this job. Such a mistake ends a job that was never whole, but no other."""
        link.send("refused", code=code, text=text)
        if self._model is None:
            self.refuse(text, code=code)
        elif member.token != self.me.token:
            self._say(f"{member.name} was turned away{', and the job goes on' * self.running}: {text}")
        else:  # the others look for a leader that fits
            self.tell("waiting", text=f"{member.name} was turned away: {text}")
            self.dismiss()

    def _is_foreign(self, link: Link, member: Member) -> bool:
        """Turn away who is no part of this job. The leader's own member gets a seat first, and then gives way."""
        if member.token == self.me.token or not (text := self._unlike(member)):
            return False
        self._turn_away(link, member, text, code=USER_MISTAKE)
        return True

    def _unlike(self, member: Member) -> str:
        """How a member differs from the job; "" where it may belong to it."""
        return differences(member, self._model, arguments=self._same_arguments) if self._model is not None else ""

    def _sort_out(self) -> None:
        """Turn away who came before it was known that this is not their job."""
        for seat in list(self.seats.values()):
            if not self._over and (text := self._unlike(seat.member)):
                del self.seats[seat.link]
                self._turn_away(seat.link, seat.member, text, code=USER_MISTAKE)

    # What they say ------------------------------------------------------------------------------------------------

    def _take(self, link: Link, message: Mapping[str, Any]) -> None:
        if (seat := self.seats.get(link)) is None:
            return  # it was refused, and has not left yet
        seat.heard_s, kind = self._clock(), message["is"]
        seat.num_heard += 1
        if kind == "ready":
            if message["n"] == self._proposed and seat in self._late:
                seat.problem = str(message["problem"])
                seat.warm = seat.warm or seat in self._chosen  # else it would not be ready
                self._late.remove(seat)
                self._judge()
        elif kind == "alive":
            seat.warm = message.get("warm") is not False
            seat.signed_s, seat.signs = seat.heard_s, [
                {**sign, "rank": int(sign["rank"]), "ago_s": float(sign["ago_s"])} for sign in message.get("ranks", [])
            ]
        elif kind == "ask":
            if not self._asking:
                asyncio.get_running_loop().call_later(timing.POLL_S, self._answer)
            self._asking.add(link)
        elif kind == "leaving":
            self._let_go(seat)
        elif kind == "has":
            seat.has = age(message)
        elif kind == "left":  # it has no say any more, and its ranks have ended for good
            self._renew(**without(self.basis, seat.member.token))
        elif kind == "lost" or message.get("n", self._formed) != self._formed:
            pass  # only this leader says who is lost
        elif kind == "late":
            self.tell("leave", n=self._formed)
        elif kind == "standing":
            step, stop = int(message["step"]), self._stop
            if stop is not None and stop.hear(link, stop=message["stop"], step=step):
                self.tell("confirm" if stop.confirmed else "prepare", n=self._formed, stop=stop.step)
        else:
            if kind == "end" and message["code"] == 0:
                seat.finished.add(message["rank"])
            self._hear(seat.member, message)

    def _answer(self) -> None:
        """Say where all ranks are, once for all that have asked: as a deadline passes all do so, again and again."""
        asked, self._asking = self._asking, set()
        data = encode("ranks", ranks=self.signs(), nodes=self.nodes())
        for link in asked:
            link.write(data)

    def take(self, kind: str, **values: Any) -> bool:
        """The member beside the leader says something. It is heard before this returns, where the process of both may
        be about to end. Returns False where that member has left."""
        if (own := self.seats.of(self.me.token)) is not None:
            self._take(own.link, {"is": kind, **values})
        return own is not None

    # Who is lost --------------------------------------------------------------------------------------------------

    def _remove(self, link: Link, why: str) -> None:
        """A member's connection has ended, or is given up."""
        link.close(at_once=why != ENDED)
        if (seat := self.seats.pop(link, None)) is None or self._over:
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

    async def watch(self) -> None:
        """Look at the clock from now on."""
        while True:
            await asyncio.sleep(timing.TICK_S)
            self.tick()

    def tick(self) -> None:
        """Signs of life, deadlines, and who is missing."""
        now_s, silent_s = self._clock(), timing.SILENT_S if self._limits is None else self._limits.silent_s
        for seat in list(self.seats.values()):
            if now_s - self._ticked_s > min(timing.FROZEN_S, silent_s / 2):
                seat.heard_s = now_s
            elif now_s - seat.heard_s > silent_s:
                self._remove(seat.link, f"gave no sign of life for {now_s - seat.heard_s:.0f} s")
        self._ticked_s = now_s
        if now_s - self._beat_s >= timing.ALIVE_S:
            self._beat_s = now_s
            self.tell("alive")
        self._judge()
        if self._over:
            return
        if self.running:
            self._look_for_change()
        elif now_s - self._begun_s > self.me.left_s + (timing.PREPARE_S if self._proposed else 0.0):
            hint = ". Was every process started, with this MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
            self.refuse(self._missing() + hint * (not self._proposed))
        elif now_s - self._noticed_s >= timing.NOTICE_S:
            self._noticed_s = now_s
            self.tell("waiting", text=self._missing())

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

    # Memberships --------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Propose a membership once there is a member for each rank; commit it once all are ready for it."""
        if self.running or self._over:
            return
        if not self._proposed:
            self._sort_out()
            if self._over or not (seats := self._choose()):
                return
            first, *others = self.seats.members
            if found := [text for each in others if (text := differences(each, first, arguments=False))]:
                self.refuse("\n".join(found[:4]), code=USER_MISTAKE)
            elif not self._unowned():
                self._void()  # what was about to be claimed
                self._propose(seats)
            elif self._preparing is None:
                self._preparing = asyncio.create_task(self._commit(0))
        elif not self._late and self._preparing is None:
            self._preparing = asyncio.create_task(self._commit(self._proposed))

    def _choose(self) -> list[Seat]:
        """Who can be the next membership, by rank; nobody as long as that is to be waited for."""
        if self._limits is None:
            seats = sorted(self.seats.values(), key=lambda seat: seat.claim.start)
            return seats if sum(len(seat.claim) for seat in seats) == self.me.world_size else []
        seats, now_s, founds = list(self.seats.values()), self._clock(), not self.basis["n"]
        if any(seat.leaves and seat.unfit and seat.member.token == self.me.token for seat in seats):
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
        # Who is beside the leader came by loopback, which others can't use. Behind a Service, the address at which they
        # reached the leader belongs to no interface here; the one at which they arrived does
        far = (seat.link.local_ip for seat in self.seats.values() if not is_loopback(seat.member.ip))
        ours = next((ip for ip in far if not is_loopback(ip)), "127.0.0.1")
        for seat in self.seats.values():
            if is_loopback(seat.member.ip):
                seat.member = replace(seat.member, ip=ours)
        if not self.basis["n"]:
            self._same_arguments = len({member.settings.get(ARGUMENTS) for member in self.seats.members}) == 1
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
            "before": electorates(self.basis), "same_arguments": self._same_arguments,
        }
        return self._next

    def _void(self) -> None:
        """Somebody came or went: what was proposed will not be."""
        self._proposed, self._late = 0, set()
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None

    def _unowned(self) -> list[int]:
        """What those that are here still have to own."""
        here = self.seats.tokens
        return [n for n in claims(self.basis, here) if n not in self._owned] if self._claim is not None else []

    async def _own(self) -> None:
        """Before a proposal: members take one for newer than what another part of the job has committed meanwhile."""
        for n in self._unowned():
            if self._claim is not None and not await self._claim(self.basis["job"], n):
                self._beaten_s = self._clock()
                break
            self._owned.add(n)
        self._preparing = None
        self._judge()

    async def _commit(self, n: int) -> None:
        """0: own what follows. A fault of ours in it must not look like a hang."""
        try:
            await (self._agree(n) if n else self._own())
        except Exception as error:
            self.refuse(reason(error), code=error.code if isinstance(error, ExpectedError) else JOIN_FAILED)

    async def _agree(self, n: int) -> None:
        """All are ready. Cancelled where one of them goes."""
        if problems := sorted(seat.problem for seat in self._chosen if seat.problem):
            await asyncio.sleep(timing.ENDING_S)
            self._give_up(problems)
            return
        more = dict(await self._prepare(n))
        if not self._over:
            self._start(n, more)

    def _give_up(self, problems: list[str]) -> None:
        """Members have no route to each other. Where the number of nodes may change, go on without the one that most
        routes concern which fail, and never without the leader."""
        if self._limits is None:
            self.refuse(f"all ranks reached the master, but not each other: {'; '.join(problems[:4])}. {HINT}")
            return
        pairs = zip(self._chosen, [*self._chosen[1:], self._chosen[0]], strict=True)
        blame = Counter(each for pair in pairs if pair[0].problem for each in pair)
        worst = max(reversed(self._chosen[1:]), key=lambda seat: blame[seat])
        worst.unfit = next(seat.problem for seat in self._chosen if seat.problem)
        self._say(f"{worst.member.who} is left out: {worst.unfit}")
        self._preparing = None
        self._void()

    def _start(self, n: int, more: dict[str, Any]) -> None:
        """Membership `n` runs from now on."""
        self._preparing = None
        self._void()
        self.running, self._formed, self.changing = True, n, False
        self._model = self._chosen[0].member
        self._sort_out()  # who came after the proposal
        for seat in self.seats.values():
            seat.finished.clear()
        on_hosts = itertools.groupby(self.chosen, key=lambda member: member.host)
        hosts = [[host, sum(member.num_ranks for member in members)] for host, members in on_hosts]
        if self._limits is not None:
            change = self._describe_change()
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

    def refuse(self, text: str, *, code: int = JOIN_FAILED) -> None:
        """There will be no membership. One member of each host says why."""
        if not self._over:
            speakers = {member.host: member for member in reversed(self.seats.members)}
            for seat in self.seats.values():
                quiet = speakers[seat.member.host] is not seat.member
                seat.link.send("refused", code=code, text=text, quiet=quiet)
            self._over = text

    def tell(self, kind: str, **values: Any) -> None:
        """Tell all members something; after "over" they may go without being lost, and nobody else is taken."""
        data = encode(kind, **values)  # once for all
        for seat in self.seats.values():
            seat.link.write(data)
        if kind == "over":
            self._over = values.get("text") or "the job at this address has just ended"

    def dismiss(self) -> None:
        """Lead no longer: the members look for another leader."""
        self._over = self._over or "this node does not lead"
        self._void()
        for link in list(self.seats):
            self._remove(link, ENDED)

    def _missing(self) -> str:
        waited_s = round(self._clock() - self._begun_s)
        if self._beaten_s > self._begun_s:
            return "another part of the job goes on, or --shared-dir does not answer"
        if self._proposed:
            what = f"rank 0 still prepares their start after {waited_s} s"
            if self._late:
                late = by_host(seat.member for seat in self._late)
                what = f"not each has imported torch and ended earlier ranks after {waited_s} s (late: {late})"
            return f"all {sum(member.num_ranks for member in self.chosen)} ranks have joined, but {what}"
        if self._limits is None:
            text = describe_missing(self.seats.members, of=self.me.world_size, waited_s=waited_s)
        else:
            here = [seat for seat in self.seats.values() if not seat.unfit]
            cold = sum(not seat.warm for seat in here)
            text = self._outvoted() or f"{len(here)} of at least {self._limits.least} nodes are here"
            text += f", {cold} of them without their imports yet" if cold else ""
        lost = "; ".join(f"{seat.member.who}: {seat.unfit or seat.lost}" for seat in [*self._lost.values()][:4])
        return text + (f" (lost: {lost})" if lost else "")

    # Where the number of nodes may change -------------------------------------------------------------------------

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
        if self._limits is None or seat is None or len(others) < self._limits.least:
            return False
        seat.unfit, seat.leaves = why, True
        seat.link.send("left_out", why=why)
        self._void()
        return True

    def _look_for_change(self) -> None:
        """Have the ranks stop where a newcomer is needed; those that come together are taken together."""
        if self.changing or self._limits is None:
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
        self.basis = {**self.basis, "v": self.basis["v"] + 1, "known": self._known(), **more}
        self.tell("basis", basis=self.basis)

    def _known(self) -> list[list[Any]]:
        """Token, address, port and name of all, in the order in which they lead, without those that leave alone."""
        return [
            [each.member.token, each.member.ip, each.member.serves, each.name]
            for each in dict.fromkeys([*self._chosen, *self.seats.values()]) if not (each.leaves and each.unfit)
        ]

    def _outvoted(self) -> str:
        return outvoted(self.basis, self.seats.tokens, shared=self._claim is not None)

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
