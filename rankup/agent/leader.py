"""How the leader runs the meeting: it accepts members, names missing ones and finds lost ones. Imports no torch.

The kernel closes the connections of a process that ends, so the leader notices its end at once. If a process is stopped
or unreachable, the leader notices its silence. `protocol` describes the messages, `leader_connection` is the members'
side, `membership` decides on memberships, and `record` makes all ranks stop before the same step.

If an elastic job, whose number of nodes may change, needs a newcomer, all ranks save and stop before the same step. The
next membership then includes the newcomer."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from rankup import timing
from rankup.agent.membership import ENDED, Memberships
from rankup.agent.network import Link, pages
from rankup.agent.protocol import MEMBERS, Member, Seat, by_host, describe_missing
from rankup.agent.quorum import NONE, age, electorates, knowledge, recount, same_job, without
from rankup.env.rank_env import ranges


class Leader(Memberships):
    """The memberships of a job, driven by the messages of its members and by the clock."""

    # For status and logs ----------------------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        """Return a row for `rankup status` for each node that this leader has seen; [] if the job is not elastic."""
        if self._limits is None:
            return []
        now, now_s = time.time(), self._clock()
        rows = {}
        for seat in [*self._lost.values(), *self.seats.values()]:
            used = self.running and seat in self._chosen and not seat.lost
            votes = all(seat.member.token in each["voters"] for each in electorates(self.basis))
            idle = "spare" if votes else "new"  # a newcomer has no vote until the others know about it
            state = "in use" if used else "left out" if seat.unfit else "lost" if seat.lost else idle
            rows[seat.claim.start] = {
                "host": seat.member.host, "state": state, "since": now - (now_s - seat.since_s),
                "why": seat.unfit or seat.lost, "ranks": ranges(set(seat.member.ranks)) if used else "",
            }
        return [{"node": first // self.me.num_ranks, **rows[first]} for first in sorted(rows)]

    def heartbeats(self) -> list[dict[str, Any]]:
        """Return the newest heartbeat of each rank, ordered by rank, with its `host`. `ago_s`: how many seconds ago the
        rank gave it; not a time, because the clocks of two machines may differ."""
        now_s = self._clock()
        rows = [
            {**heartbeat, "host": seat.member.host, "ago_s": heartbeat["ago_s"] + now_s - seat.heartbeat_s}
            for seat in self.seats.values() for heartbeat in seat.heartbeats
        ]
        return sorted(rows, key=lambda row: int(row["rank"]))

    def _missing(self) -> str:
        waited_s = round(self._clock() - self._begun_s)
        if self._beaten_s > self._begun_s:
            return "another part of the job goes on, or --shared-dir does not answer"
        if self._proposed:
            what = f"rank 0 still prepares their start after {waited_s} s"
            if self._late:
                late = by_host(seat.member for seat in self._late)
                what = f"after {waited_s} s some still import torch or wait for earlier ranks to end (late: {late})"
            return f"all {sum(member.num_ranks for member in self.chosen)} ranks have joined, but {what}"
        if self._limits is None:
            text = describe_missing(self.seats.members, of=self.me.world_size, waited_s=waited_s)
        else:
            here = [seat for seat in self.seats.values() if not seat.unfit]
            cold = sum(not seat.warm for seat in here)
            text = self._outvoted() or f"{len(here)} of at least {self._limits.least} nodes are here"
            text += f", {cold} of them still importing torch" if cold else ""
        lost = "; ".join(f"{seat.member.who}: {seat.unfit or seat.lost}" for seat in [*self._lost.values()][:4])
        return text + (f" (lost: {lost})" if lost else "")

    # New members ------------------------------------------------------------------------------------------------------

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, as the callback of `asyncio.start_server(leader.accept, ..., limit=LONGEST)`."""
        # The event loop cancels this task at its end. Python 3.11 prints a traceback if this raises CancelledError
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(Link(reader, writer)) as link:
            link.send("leader", over=self.over, **self.greeting())
            why = ENDED
            try:
                async with asyncio.timeout(timing.HELLO_S):
                    hello = await link.receive(MEMBERS)
                if (member := self._read(link, hello)) is not None:
                    await self._seat(link, member, warm=hello.get("warm") is not False)
                while True:  # also for refused members: if we closed first, the reason might not arrive
                    self._take(link, await link.receive(MEMBERS))
            except (ConnectionError, TimeoutError):
                pass
            except ValueError as error:
                why = f"it sent a message that makes no sense: {error}"
            self._remove(link, why)

    def greeting(self) -> dict[str, Any]:
        """Return what this leader says of itself to each process that connects."""
        return {**knowledge(self.basis, self.me.token), "n": self.membership, "running": self.running}

    def yields_to(self, other: Mapping[str, Any]) -> bool:
        """Return whether another leader of this job, whose `greeting` is `other`, replaces this one. The newest
        committed membership counts first: a leader that is cut off may have made many proposals in vain."""
        names, own = ("formed", "n", "running", "token"), self.greeting()
        return same_job(other, self.basis) and [other[name] for name in names] > [own[name] for name in names]

    def _read(self, link: Link, hello: Mapping[str, Any]) -> Member | None:
        """Read a newcomer's first message. Returns None if its world size differs, so that it was turned away."""
        if hello["is"] == "leads" and self._limits is not None:
            if not hello["port"]:  # the sender is a member of a job and looks for its leader
                self._foreign_s = self._clock() if hello["n"] > self.membership else self._foreign_s
            elif self.yields_to(hello):
                self._outdone(link.remote_ip, hello["port"])
        if hello["is"] != "hello" or self.over:
            raise ValueError(hello["is"])  # this job is over, and a member of the next job will try again
        member, basis = Member.read(hello), hello.get("basis") or NONE
        if member.world_size != self.me.world_size:
            others = f"{self.me.who} with WORLD_SIZE={self.me.world_size}. Set the same on all ranks."
            self._turn_away(link, member, f"{member.who} was started with WORLD_SIZE={member.world_size}, {others}")
            return None
        self.membership = max(self.membership, hello["n"])  # an earlier leader may have used higher numbers
        if hello["n"] and self._model is None:
            self._model = member
        if self._limits is not None and not self.running and age(basis) > age(self.basis):
            self.basis = dict(basis)
        return member

    async def _seat(self, link: Link, member: Member, *, warm: bool) -> None:
        """Give a newcomer its seat once no other member holds its ranks. If such a member still sends heartbeats, turn
        the newcomer away. If such a member is silent, wait until `tick` removes it.

        Raises ConnectionError if the job ends meanwhile."""
        came_s, ranks = self._clock(), member.ranks
        while rivals := [
            seat for seat in self.seats.values() if seat.claim.start < ranks.stop and ranks.start < seat.claim.stop
        ]:
            for rival in rivals:
                if rival.member.token == member.token:
                    self._remove(rival.link, "its connection was cut")
                elif rival.heartbeat_s > came_s:
                    claims = f"rank {member.first_rank} was claimed twice: by {rival.member.who} and by {member.who}"
                    hint = "Or another job uses this port, or an earlier attempt does not end."
                    self._turn_away(link, member, f"{claims}. Give each process a RANK of its own. {hint}")
                    return
            await asyncio.sleep(timing.PAUSE_S)
        if self.over:
            raise ConnectionError
        now_s = self._clock()
        self.seats[link] = Seat(link, member, member.ranks, now_s, now_s, warm)
        self._sort_out()
        if link in self.seats:
            self._lost.pop(member.first_rank, None)
            self._judge()
            if self.running and self._limits is not None:
                link.send("spare", basis=self.basis)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _take(self, link: Link, message: Mapping[str, Any]) -> None:
        if (seat := self.seats.get(link)) is None:
            return  # the sender was refused, and has not left yet
        seat.heard_s, kind = self._clock(), message["is"]
        if kind == "ready":
            if message["n"] == self._proposed and seat in self._late:
                seat.problem = message["problem"]
                seat.warm = seat.warm or seat in self._chosen  # a chosen member is ready only with torch imported
                self._late.remove(seat)
                if not self._late:
                    self._all_ready.set()
        elif kind == "alive":
            seat.warm = message.get("warm") is not False
            seat.heartbeat_s, seat.heartbeats = seat.heard_s, message.get("ranks") or []
        elif kind == "ask":
            if not self._asking:
                asyncio.get_running_loop().call_later(timing.POLL_S, self._answer)
            self._asking.add(link)
        elif kind == "leaving":
            self._let_go(seat)
        elif kind == "has":
            seat.has = age({"n": message["n"], "v": message["v"]})
        elif kind == "left":  # the node's ranks have ended for good, and it has no vote from now on
            self._renew(**without(self.basis, seat.member.token))
        elif kind == "lost" or message.get("n", self._formed) != self._formed:
            pass  # members can't report losses, and messages of other memberships are dropped
        elif kind == "standing":
            step, stop = message["step"], self._stop
            if stop is not None and stop.answer(link, step=step):
                self.tell("confirm" if stop.confirmed else "prepare", n=self._formed, stop=stop.step)
        else:
            if kind == "end" and message["code"] == 0:
                seat.finished.add(message["rank"])
            self._on_message(seat.member, message)

    def _answer(self) -> None:
        """Answer all "ask" messages together: after a deadline, all ranks ask where the others are again and again."""
        asked, self._asking = self._asking, set()
        data = pages(self.heartbeats(), self.nodes())
        for link in asked:
            link.write(data)

    def take(self, kind: str, **values: Any) -> bool:
        """Handle a message of this process's own member at once, because the process may be about to end. Returns False
        if the member has left."""
        if (own := self.seats.of(self.me.token)) is not None:
            self._take(own.link, {"is": kind, **values})
        return own is not None

    # The clock --------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Call `tick` every TICK_S, forever."""
        while True:
            await asyncio.sleep(timing.TICK_S)
            self.tick()

    def tick(self) -> None:
        """Send heartbeats, remove silent members, check the deadline to join, and tell members who is missing."""
        now_s, silent_s = self._clock(), timing.SILENT_S if self._limits is None else self._limits.silent_s
        for seat in list(self.seats.values()):
            if now_s - self._ticked_s > min(timing.FROZEN_S, silent_s / 2):
                seat.heard_s = now_s  # this process itself was stopped for a while, and could receive nothing
            elif now_s - seat.heard_s > silent_s:
                self._remove(seat.link, f"sent no heartbeat for {now_s - seat.heard_s:.0f} s")
        self._ticked_s = now_s
        if now_s - self._beat_s >= timing.ALIVE_S:
            self._beat_s = now_s
            self.tell("alive")
        self._judge()
        if self.over:
            return
        if self.running:
            self._look_for_change()
        elif now_s - self._begun_s > self.me.left_s + (timing.PREPARE_S if self._proposed else 0.0):
            hint = ". Was every process started, with this MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
            self.end(self._missing() + hint * (not self._proposed))
        elif now_s - self._noticed_s >= timing.NOTICE_S:
            self._noticed_s = now_s
            self.tell("waiting", text=self._missing())

    # Changes of an elastic job ----------------------------------------------------------------------------------------

    def _let_go(self, seat: Seat) -> None:
        """Let a node leave that was asked to leave. The others go on without it. If all nodes leave, the job stops."""
        seat.unfit, seat.leaves = seat.unfit or "it was asked to leave", True
        if all(each.leaves for each in self.seats.values()):
            for each in self.seats.values():
                each.unfit = ""  # the job stops, so all nodes stay until their ranks have ended, and report the ends
            self._on_message(seat.member, {"is": "stop", "signal": "SIGTERM"})
        elif seat in self._chosen and self.running:
            self._change()
        elif seat in self._chosen:
            self._void()

    def _change(self) -> None:
        """Make the ranks stop for another membership."""
        if not self.resizing:
            self.resizing = True
            self.stop("SIGTERM", change=True)

    def _look_for_change(self) -> None:
        """Give spares a vote. Make the ranks stop if newcomers are needed, once none has come for GATHER_S."""
        if self.resizing or self._limits is None:
            return
        spares = [seat.member.token for seat in self.seats.values() if seat not in self._chosen and not seat.leaves]
        knowing = {seat.member.token for seat in self.seats.values() if seat.has >= age(self.basis)}
        if changes := recount(self.basis, spares, knowing):
            self._renew(**changes)
        now_s = self._clock()
        new = [
            seat for seat in self.seats.values() if seat not in self._chosen and not seat.unfit and seat.warm
            # A node that failed before must not stop the others each time its launcher restarts it
            and now_s - seat.since_s >= timing.RETURN_S * self._left_out[seat.claim.start]
        ]
        room = len(self._chosen) < self._limits.most and new
        if room and now_s - max(seat.since_s for seat in new) >= timing.GATHER_S:
            self._change()

    def _renew(self, **more: Any) -> None:
        """Change the basis of the job, and send it to all members."""
        self.basis = {**self.basis, "v": self.basis["v"] + 1, "known": self._known(), **more}
        self.tell("basis", basis=self.basis)
