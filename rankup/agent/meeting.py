"""Who belongs to a job: the leader meets all members, names who is missing, and says when one is lost. No torch here.

The kernel closes the connections of a process that ends, so a loss is known at once. A process that is stopped or cut
off is found by its silence. The messages are in `protocol`, a member's side of them is in `attendance`, and what is
added where the number of nodes may change is in `elastic`. How all ranks stop before the same step is in `record`.

A newcomer that differs from the job is turned away alone, also where it is the one that is to lead, see `sameness`.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rankup import timing
from rankup.agent.network import Link, encode, foreign_address, interface_of
from rankup.agent.protocol import (
    ARGUMENTS,
    HINT,
    KILLED,
    SIGNALS,
    VERSION,
    Member,
    describe_claims,
    describe_late,
    describe_missing,
)
from rankup.agent.record import StopAgreement
from rankup.agent.sameness import differences, unlike
from rankup.agent.seats import Seat, Seats
from rankup.agent.votes import NONE
from rankup.env.rank_env import is_loopback
from rankup.errors import JOIN_FAILED, USER_MISTAKE, JoinError, PeerLost, UserError

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
        hear: Callable[[Member, Mapping[str, Any]], None], clock: Callable[[], float] = time.monotonic,
        silent_s: float = timing.SILENT_S,
    ) -> None:
        """`me`: the member beside the leader; all are refused where they have not met `me.left_s` after the start, or
        after the last loss. `say`: prints a line. `prepare(n)`: what the commit of a membership says beside its
        members. All are ready then, and have said how their ranks ended. It may take PREPARE_S, and is cancelled where
        a member goes meanwhile; where it raises, all are refused with that text.

        `hear(member, message)` gets what is not the meeting's own; where such a message has an `n`, it must be the last
        committed one. A member's loss that the leader has found itself is {"is": "lost", "n", "why"}, after all have
        been told.

        `silent_s`: a member that gives no sign of life for so long is lost.
        """
        self._silent_s = silent_s
        self.me, self._say, self._prepare, self._hear, self._clock = me, say, prepare, hear, clock
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
        self._begun_s = self._noticed_s = self._ticked_s = self._beat_s = clock()

    @property
    def chosen(self) -> list[Member]:
        """Those of the membership that runs or is proposed, by rank."""
        return [seat.member for seat in self._chosen]

    def nodes(self) -> list[dict[str, Any]]:
        """For the user, where the number of nodes may change: each that was here since this leader leads."""
        return []

    def signs(self) -> list[dict[str, Any]]:
        """Where each rank is, see `Seats.signs`."""
        return self.seats.signs(self._clock())

    # Who comes ----------------------------------------------------------------------------------------------------

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The life of one connection, for `asyncio.start_server(leader.attend, ..., limit=LONGEST)`."""
        # A task is cancelled as the event loop ends: Python 3.11 prints a traceback where that is passed on
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(Link(reader, writer)) as link:
            await self._attend(link)

    async def _attend(self, link: Link) -> None:
        link.send("leader", version=VERSION, over=self._over, **self.greeting())
        try:
            async with asyncio.timeout(timing.HELLO_S):
                hello = await link.receive()
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

    def greeting(self) -> dict[str, Any]:
        """What this leader says of itself to whoever connects."""
        return {"token": self.me.token, "n": self.membership, "running": self.running, "job": self.basis["job"]}

    def _read(self, link: Link, hello: Mapping[str, Any]) -> Member | None:
        """A newcomer introduces itself. None where it can't belong to this job."""
        if hello["is"] != "hello" or self._over:
            raise ValueError(hello["is"])  # it may be early, and wait for the next leader
        if hello["version"] != VERSION:
            who = f"rank {hello['first_rank']!s:.20} on {hello['host']!r:.80}"
            text = f"{who} has another version of rankup than {self.me.who}. Install the same on all nodes."
            if int(hello["n"]) and self._model is None:  # the job is the other one's
                if (own := self.seats.of(self.me.token)) is not None:
                    self._send_back(own, text)
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
        if int(hello["n"]) and self._model is None:
            self._model = member
        return member

    async def _seat(self, link: Link, member: Member, *, warm: bool) -> None:
        """Give a newcomer its seat once its ranks are free. Whoever has them gives a sign of life, or is replaced.

        Raises ConnectionError where the job is over before.
        """
        def unfit() -> str:  # the leader's own member gets a seat first, and then gives way
            return self._unlike(member) if member.token != self.me.token else ""

        known: dict[Seat, list[int]] = {}  # for each that has them: messages until now, and looks that are left
        while rivals := self.seats.claimed(member.ranks):
            for rival in rivals:
                # Looks, not seconds: a leader that was stopped itself has heard nobody meanwhile
                answer = known.setdefault(rival, [rival.num_heard, round(timing.ANSWER_S / timing.PAUSE_S)])
                answer[1] -= 1
                if rival.member.token == member.token:
                    self._remove(rival.link, "its connection was cut")
                elif rival.num_heard > answer[0]:
                    self._turn_away(link, member.name, describe_claims(rival.member, member))
                    return
                elif answer[1] < 0 and (text := unfit()):
                    self._turn_away(link, member.name, text, code=USER_MISTAKE)
                    return
                elif answer[1] < 0:
                    self._say(f"{rival.member.who} gives no answer: it was replaced by {member.who}")
                    self._remove(rival.link, f"was replaced by {member.who}")
            await asyncio.sleep(timing.PAUSE_S)
        if self._over:
            raise ConnectionError
        if text := unfit():
            self._turn_away(link, member.name, text, code=USER_MISTAKE)
            return
        now_s = self._clock()
        self.seats[link] = Seat(link, member, member.ranks, now_s, now_s, warm)
        self._lost.pop(member.first_rank, None)
        self._judge()

    def _turn_away(self, link: Link, who: str, text: str, *, code: int = JOIN_FAILED) -> None:
        """A newcomer can't belong to this job. Such a mistake ends a job that was never whole, but no other."""
        link.send("refused", code=code, text=text)
        if self._model is None:
            self.refuse(text, code=code)
            return
        self._say(f"{who} was turned away{', and the job goes on' * self.running}: {text}")

    def _unlike(self, member: Member) -> str:
        """How a member differs from the job; "" where it may belong to it."""
        return unlike(member, self._model, arguments=self._same_arguments) if self._model is not None else ""

    def _sort_out(self) -> None:
        """Turn away who came before it was known that this is not their job."""
        for seat in list(self.seats.values()):
            if not self._over and (text := self._unlike(seat.member)):
                self._send_back(seat, text)

    def _send_back(self, seat: Seat, text: str) -> None:
        """Turn away a newcomer that has a seat. Where it is this leader's, the others look for one that fits."""
        if seat.member.token != self.me.token:
            self._turn_away(seat.link, seat.member.name, text, code=USER_MISTAKE)
            del self.seats[seat.link]
        else:
            self.seats.tell("waiting", but=seat, text=f"{self.me.name} was turned away: {text}")
            seat.link.send("refused", code=USER_MISTAKE, text=text)
            self.dismiss()

    # What they say ------------------------------------------------------------------------------------------------

    def _take(self, link: Link, message: Mapping[str, Any]) -> None:
        if (seat := self.seats.get(link)) is None:
            return  # it was refused, and has not left yet
        seat.heard_s, kind = self._clock(), message["is"]
        seat.num_heard += 1
        if kind == "ready":
            if message["n"] == self._proposed and seat in self._late:
                self._hear_ready(seat, str(message["problem"]), str(message.get("mistake", "")))
        elif kind == "alive":
            seat.warm = message.get("warm") is not False
            seat.signed_s, seat.signs = seat.heard_s, [
                {**sign, "rank": int(sign["rank"]), "ago_s": float(sign["ago_s"])} for sign in message.get("ranks", [])
            ]
        elif kind == "ask":
            if not self._asking:
                asyncio.get_running_loop().call_later(timing.POLL_S, self._answer)
            self._asking.add(link)
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

    def _hear_ready(self, seat: Seat, problem: str, mistake: str) -> None:
        seat.problem = problem
        seat.warm = seat.warm or seat in self._chosen  # else it would not be ready
        self._late.remove(seat)
        if mistake:
            if self._model is not None and not (seat.member.token == self.me.token and self._formed):
                self._void()
                self._send_back(seat, mistake)
            else:
                self.refuse(mistake, code=USER_MISTAKE)
        self._judge()

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

    async def watch(self, *, master: str = "") -> None:
        """Look at the clock from now on. `master`: MASTER_ADDR; a warning where it is no address of this machine."""
        if master and (warning := await foreign_address(master)):
            self._say(warning)
        while True:
            await asyncio.sleep(timing.TICK_S)
            self.tick()

    def tick(self) -> None:
        """Signs of life, deadlines, and who is missing."""
        now_s, silent_s = self._clock(), self._silent_s
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
        if self.running or self._over:
            return
        if now_s - self._begun_s > self.me.left_s and self._preparing is None:
            how = "with this MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
            self.refuse(f"{self._missing()}. Was every process started, {how}?")
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
            if text := differences(self.seats.members):
                self.refuse(text, code=USER_MISTAKE)
            else:
                self._propose(seats)
        elif not self._late and self._preparing is None:
            self._preparing = asyncio.create_task(self._commit(self._proposed))

    def _choose(self) -> list[Seat]:
        """Who can be the next membership, by rank; nobody as long as that is to be waited for."""
        seats = sorted(self.seats.values(), key=lambda seat: seat.claim.start)
        return seats if sum(len(seat.claim) for seat in seats) == self.me.world_size else []

    def _propose(self, seats: list[Seat]) -> None:
        self.membership = self._proposed = self.membership + 1
        self._late, self._chosen = set(seats), seats
        # Who is beside the leader came by loopback, which others can't use. Behind a Service, the address at which they
        # reached the leader belongs to no interface here; the one at which they arrived does
        far = (seat.link.local_ip for seat in self.seats.values() if not is_loopback(seat.member.ip))
        ours = next((ip for ip in far if not is_loopback(ip)), "127.0.0.1")
        for seat in self.seats.values():
            if is_loopback(seat.member.ip):
                seat.member = replace(seat.member, ip=ours, interface=interface_of(ours))
        if not self.basis["n"]:
            self._same_arguments = len({member.settings.get(ARGUMENTS) for member in self.seats.members}) == 1
        more = self._terms()
        # The ring crosses each border between nodes in both directions, at the price of one connection a member
        following = dict(zip(seats, [*seats[1:], seats[0]], strict=True))
        for seat in self._late:
            to = following.get(seat, seat).member
            route = [to.ip, to.port, to.name, to.interface] if to.port and to is not seat.member else None
            seat.link.send("propose", n=self._proposed, next=route, ip=seat.member.ip, **more)

    def _terms(self) -> dict[str, Any]:
        """What a proposal says besides."""
        return {}

    def _void(self) -> None:
        """Somebody came or went: what was proposed will not be."""
        self._proposed, self._late = 0, set()
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None

    async def _commit(self, n: int) -> None:
        """A fault of ours in it must not look like a hang."""
        try:
            await self._agree(n)
        except (UserError, JoinError, PeerLost) as error:
            self.refuse(str(error), code=error.code)
        except Exception as error:
            self.refuse(f"{type(error).__name__}: {error}")

    async def _agree(self, n: int) -> None:
        """All are ready. Cancelled where one of them goes."""
        if problems := sorted(seat.problem for seat in self._chosen if seat.problem):
            await asyncio.sleep(timing.ENDING_S)
            self._give_up(problems)
            return
        try:
            async with asyncio.timeout(timing.PREPARE_S) as patience:
                more = dict(await self._prepare(n))
        except TimeoutError:
            if patience.expired():
                raise JoinError(self._missing()) from None
            raise
        if not self._over:
            self._start(n, more)

    def _give_up(self, problems: list[str]) -> None:
        """Members have no route to each other."""
        first = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        self.refuse(f"all ranks reached the master, but not each other: {first}. {HINT}")

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
        self.tell("commit", n=n, ip=self.chosen[0].ip, hosts=hosts, **more, **self._agreed(more))

    def _agreed(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """What a commit says besides."""
        return {}

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
        self.seats.tell(kind, **values)
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
        if self._proposed:
            return describe_late(self.chosen, [seat.member for seat in self._late], waited_s=waited_s)
        gone = [(seat.member, seat.lost) for _, seat in sorted(self._lost.items())]
        return describe_missing(self.seats.members, gone, of=self.me, waited_s=waited_s)
