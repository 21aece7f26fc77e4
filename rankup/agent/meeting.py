"""How the members of a job meet: one machine that takes events and returns what to do. No I/O, no clock.

`peers` is the shell around it: sockets, the clock and files. `tests/agent/simulator.py` is another one, with a network
and processes that fail as a seed says. `protocol` describes the messages. Members meet as in torchelastic's rendezvous:
the leader proposes membership `n`, and commits it once all are ready. `n` only grows.

| a member    | looks for its leader -> greeted -> hello -> (proposed -> ready -> committed -> lost)* -> over         |
| the leader  | gathers -> (claims) -> proposes -> (missing routes) -> prepares -> commits: runs -> lost -> gathers   |
| a loss      | a connection that ends, or a silence of `Rules.silent_s`, ends the membership. All ranks leave, and   |
|             | each member is ready for the next proposal once its ranks have ended                                  |
| votes       | a majority of the last voters, one of them a node whose ranks have ended; and as long as others may   |
|             | not know the last change of voters, a majority of the earlier ones too, see `votes`. Half of them     |
|             | need the first voter, or a claim in `--shared-dir`, which only one half can get                       |
| spares      | members without ranks. They vote once majorities know of them, and take a lost node's place           |
| back-off    | a node that was left out, or lost again and again, does not stop a running job for some time          |
| a stop      | all ranks agree on the step to stop before, see `votes.StopAgreement`                                 |
| two leaders | each leader calls nodes that are not connected. The one with the older membership becomes a member    |

If the number of nodes is fixed, node 0 leads, and all must be there. If not, the job is elastic: the first member of
the last membership that answers leads. All members search at the same time, so each of them asks only ASKED members at
once, in the order in which they would lead. Only a member that is about to lead asks all others."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankup import timing
from rankup.agent.events import (
    LOCAL,
    Accepted,
    Beat,
    Claimed,
    Close,
    Connected,
    Dial,
    Ended,
    Event,
    Fail,
    Failed,
    Hear,
    Heard,
    Log,
    Output,
    Prepared,
    Rules,
    Said,
    Send,
    Tick,
)
from rankup.agent.leading import CALLED, ENDED, Leading, knowledge, same_job
from rankup.agent.protocol import KILLED, Member
from rankup.agent.votes import Address, Basis, Node

ASKED = 4  # how many members are asked at once who leads
CROWD = 8  # members of a job with more of them retry less often and wait longer: one of them answers all others
WAY_OUT = "On all ranks, MASTER_ADDR and MASTER_PORT, or the file, must be those of rank 0."


@dataclass(slots=True)
class Dialed:
    """A connection that this member is making. `why`: join (a fixed job's leader), ask (who leads), call (another
    leader, perhaps)."""

    address: Address | None
    why: str
    until_s: float = math.inf  # when the greeting must have come
    ip: str = ""
    own_ip: str = ""


class Meeting:
    """A node's part in the meeting. `take` is its only entry.

    `basis`: the newest one that a leader has sent. `problem`: why there is no membership yet. `leading`: what this node
    decides while it leads. `at`: the address of the leader while there is one. `wake_s`: when the next Tick is due."""

    def __init__(
        self, me: Member, rules: Rules, *, now_s: float, master: Address | None = None, leads: bool = False
    ) -> None:
        """`master`: where node 0 serves members. `leads`: this is node 0."""
        self.me, self.rules, self.master, self.now_s = me, rules, master, now_s
        self.basis, self.problem = Basis(), "nothing was heard from rank 0"
        self.leading: Leading | None = None
        self.at: Address | None = None
        self._chosen_ip = me.ip
        self._links = itertools.count(LOCAL + 1)
        self._link: int | None = None  # to the leader
        self._dials: dict[int, Dialed] = {}
        self._callers: dict[int, tuple[str, float]] = {}  # while this node does not lead: who has connected, and when
        self._until_s = now_s + me.left_s  # when this member gives up joining; infinite while it is in a membership
        self._over = False  # the leader has said that the job is over
        self._begun_s = self._noticed_s = self._heard_s = self._ticked_s = self._beat_s = now_s
        self._retry_s = now_s  # when to look for the leader again
        self._call_s = now_s + timing.CALL_S
        self._refused = ""  # the first reason why rank 0's machine refused a connection
        self._warm = False  # whether the fork server has imported torch already, so that ranks start at once
        self._asked_stop = 0, 0  # the last membership whose ranks were asked to stop, and before which step
        self._started = 0  # the last membership that this node has heard committed
        self._state = 0  # the last one whose state its ranks have had
        self._addresses: dict[str, Address] = {}  # each node's last address; a restarted agent may listen there
        self._called = 0
        self._elsewhere: Address | None = None  # where an agent said that it leads
        self._said: dict[Address, Mapping[str, Any] | None] = {}  # what each agent has said, in this search
        self._before: list[Node] = []  # the members that would lead before this one, and how many of them were asked
        self._asked = 0
        self._out: list[Output] = []
        # The messages on LOCAL, and whether each is for the leader
        self._local: deque[tuple[bool, Mapping[str, Any]]] = deque()
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Heard: lambda event: self._on_message(event.link, event.message), Tick: lambda event: self._tick(),
            Said: lambda event: self._say(event.message), Ended: lambda event: self._on_ended(event.link, event.why),
            Accepted: lambda event: self._accept(event.link, event.ip, event.own_ip), Connected: self._on_connected,
            Failed: self._on_failed, Claimed: self._on_leading, Prepared: self._on_leading,
        }
        if leads:
            self._lead()

    def new_link(self) -> int:
        return next(self._links)

    @property
    def has_leader(self) -> bool:
        return self._link is not None

    @property
    def wake_s(self) -> float:
        wake_s = self._beat_s
        if self._dials:
            wake_s = min(wake_s, *(dialed.until_s for dialed in self._dials.values()))
        elif self._link is None and not self._over:
            wake_s = min(wake_s, self._retry_s)
        return wake_s if self.leading is None else min(wake_s, self.leading.wake_s)

    def take(self, now_s: float, event: Event) -> list[Output]:
        """Take an event at this time, in seconds of any clock that never goes back. Returns what to do, in order."""
        self.now_s = now_s
        if (leading := self.leading) is not None:
            leading.now_s = now_s
        self._handlers[type(event)](event)
        self._settle()
        out, self._out = self._out, []
        return out

    @property
    def _crowd(self) -> float:
        return min(10.0, max(1.0, self.me.world_size / self.me.num_ranks / CROWD))

    def _on_connected(self, event: Connected) -> None:
        if (dialed := self._dials.get(event.link)) is not None:
            dialed.ip, dialed.own_ip, dialed.address = event.address[0], event.own_ip, dialed.address or event.address
            greet_s = timing.HELLO_S if dialed.why == "join" else timing.PROBE_S * self._crowd
            dialed.until_s = self.now_s + min(greet_s, max(1.0, self._until_s - self.now_s))

    def _on_failed(self, event: Failed) -> None:
        if (dialed := self._dials.pop(event.link, None)) is not None:
            self._missed(dialed, event.why, refused=event.refused)

    def _on_leading(self, event: Claimed | Prepared) -> None:
        if (leading := self.leading) is not None:
            leading.claimed(event) if isinstance(event, Claimed) else leading.prepared(event)

    def _settle(self) -> None:
        """Pass messages between the leader and the member in this process, and stop leading if another node must."""
        while True:
            while self._local:
                for_leader, message = self._local.popleft()
                if not for_leader:
                    self._from_leader(message)
                elif self.leading is not None:
                    self.leading.heard(LOCAL, message)
            leading = self.leading
            if leading is None or not (leading.follow or leading.dismissed):
                return
            if leading.follow:
                ip, port = self._elsewhere = leading.follow
                text = f"another node leads this job, at {ip}:{port}: this node becomes a member there"
                self._emit(Log(text))
            self._stop_leading()

    def _emit(self, output: Output) -> None:
        if type(output) is Send and LOCAL in output.links:
            self._local.append((False, output.message))
            if len(output.links) == 1:
                return
            output = Send([link for link in output.links if link != LOCAL], output.message)
        self._out.append(output)

    def _say(self, message: Mapping[str, Any]) -> None:
        """Say something to the leader, if there is one."""
        kind = message["is"]
        ranks = message["ranks"] if kind == "alive" else [message] if kind == "end" else ()
        if any(rank.get("step") for rank in ranks):  # a rank that has begun a step has the state
            self._state = self._started
        if kind == "alive":
            self._warm, message = bool(message["warm"]), {**message, "state": self._state}
        if kind == "resign":  # this node leaves
            self._over = True
            self._stop_leading()
        elif self._link == LOCAL:
            self._local.append((True, message))
        elif self._link is not None and (kind != "ready" or message["n"] == self.basis.n):
            self._out.append(Send((self._link,), message))

    # Leading ----------------------------------------------------------------------------------------------------------

    def _note_addresses(self) -> None:
        self._addresses |= {node.name.partition(" on ")[0]: node.address for node in self.basis.known}

    def _lead(self) -> None:
        self._note_addresses()  # of newcomers too, which perhaps only a change of voters has named
        self.leading = Leading(self.me, self.rules, self.basis, self.now_s, self._emit)
        self._hang_up()
        self.me = replace(self.me, ip=self._chosen_ip or "127.0.0.1")
        self._link, self._call_s = LOCAL, self.now_s
        self.leading.enter(self._hello())
        self._out.append(Beat())

    def _stop_leading(self) -> None:
        """Stop leading. This node's member looks for another leader, as all others do."""
        if self.leading is not None:
            self.leading.dismiss()
            self.leading = None
            self._hang_up()
            self._lose_leader(ENDED, code=KILLED)

    def _accept(self, link: int, ip: str, own_ip: str) -> None:
        if self.leading is not None:
            self.leading.accept(link, ip, own_ip)
            return
        self._callers[link] = ip, self.now_s
        at = list(self.at) if self.at else None
        text, known = "this node does not lead", knowledge(self.basis, self.me.token)
        self._out.append(Send((link,), {"is": "leader", "over": text, "at": at, **known}))

    def _call_others(self, leading: Leading) -> None:
        """Call nodes that are not connected. After a network cut or a restart of node 0 there may be two leaders, and
        only one may go on. A call also tells a restarted node that does not find node 0 who leads."""
        self._call_s = self.now_s + timing.CALL_S
        here = {(seat.member.ip, seat.member.serves) for seat in leading.seats.values()}
        absent = [address for address in dict.fromkeys(self._addresses.values()) if address not in here]
        start = self._called % max(1, len(absent))
        self._called += CALLED
        some = dict.fromkeys([*absent, *absent][start:start + CALLED])
        if self.master is not None and self.master not in here:
            some[self.master] = None
        for address in some:
            self._dial(address, "call")

    # Messages ---------------------------------------------------------------------------------------------------------

    def _on_message(self, link: int, message: Mapping[str, Any]) -> None:
        if link == self._link:
            self._heard_s = self.now_s
            self._from_leader(message)
        elif link in self._dials:
            self._greeted(link, message)
        elif self.leading is not None:
            self.leading.heard(link, message)
        elif (caller := self._callers.get(link)) is not None:
            if message["is"] == "leads" and message["port"]:
                self._elsewhere = caller[0], message["port"]
                self._retry_s = self.now_s
            self._drop(link)

    def _drop(self, link: int) -> None:
        self._callers.pop(link, None)
        self._out.append(Close(link, False))

    def _on_ended(self, link: int, why: str) -> None:
        self._callers.pop(link, None)
        if link == LOCAL and self.leading is not None:  # this node's rank has ended
            self.leading.ended(LOCAL)
        elif link == self._link:
            self._lose_leader(ENDED, code=KILLED)
        elif (dialed := self._dials.pop(link, None)) is not None:
            self._missed(dialed, _no_leader(dialed.address))
        elif self.leading is not None:
            self.leading.ended(link, f"it sent a message that makes no sense: {why}" if why else "")

    def _from_leader(self, message: Mapping[str, Any]) -> None:
        """Act on a message of the leader as far as the meeting is concerned. Pass on what this node must act on."""
        kind = message["is"]
        if kind == "alive":
            return
        if kind == "waiting":
            self.problem = message["text"]
            self._emit(Log(f"still waiting: {self.problem}"))
        elif kind == "show":
            self._say({"is": "shown", "basis": self.basis.pack()})
        elif kind in ("propose", "commit", "spare", "basis"):
            self._on_basis(kind, message)
        else:
            if kind == "over":  # look for no other leader. Stay: a leader in this process may have to tell others
                self._until_s, self._over = self.now_s, True
            elif kind == "lost":
                self._leave_membership()
            elif kind == "prepare":
                step = message["n"], message["stop"]
                if step < self._asked_stop:
                    return  # the step before which to stop only grows
                self._asked_stop = step
            self._out.append(Hear(message))

    def _on_basis(self, kind: str, message: Mapping[str, Any]) -> None:
        try:
            basis = Basis.unpack(message["basis"], self.basis)
        except LookupError:
            self._say({"is": "lacks"})
            return
        is_newer = basis.age >= self.basis.age  # otherwise a newer basis has been proposed already
        if is_newer:
            self.basis = basis
        if kind != "basis":
            self._note_addresses()
        if kind == "propose":
            if is_newer:
                self._out.append(Hear(self._proposal(basis)))
            return
        self._say({"is": "has", "age": list(self.basis.age)})
        if kind == "commit" and message["n"] > self._started:
            self._until_s, self._started = math.inf, message["n"]
            ip = basis.known[0].ip if basis.known else ""
            commit = {**message, "ip": ip, "hosts": basis.hosts()}
            del commit["basis"]
            if self.rules.limits is not None:
                commit["basis"] = {"used": list(basis.used)}
            self._out.append(Hear(commit))
        elif kind == "spare":
            self._until_s = math.inf
            self._out.append(Hear(message))

    def _proposal(self, basis: Basis) -> dict[str, Any]:
        """Return what this node must do for a proposal. Each member tests the route to the next one in a ring, so each
        node's way out and way in are tested once."""
        ring, token = basis.known[:len(basis.used)], self.me.token
        own = next((place for place, node in enumerate(ring) if node.token == token), None)
        ip, route = self.me.ip, None
        if own is not None:
            ip, to = ring[own].ip, ring[(own + 1) % len(ring)]
            first = sum(node.size for node in ring[:(own + 1) % len(ring)])
            name = replace(self.me, first_rank=first, num_ranks=to.size, host=to.host).name
            route = [to.ip, to.port, name] if to.port and to.token != token else None
        return {"is": "propose", "n": basis.n, "ip": ip, "next": route, "used": own is not None}

    def _leave_membership(self) -> None:
        if self._until_s == math.inf:
            self._until_s = self.now_s + self.me.left_s

    def _lose_leader(self, why: str, **more: Any) -> None:
        self._link, self._begun_s, self._refused = None, self.now_s, ""
        at, self.at = self.at, None
        self._local.clear()
        if self._over:
            return
        if self.now_s > self._until_s:
            if "code" not in more and at is not None:
                stopped = "its process is stopped, or the network to it is cut"
                self.problem = f"rank 0 at {at[0]}:{at[1]} {why}: {stopped}"
            self._fail()
            return
        self._leave_membership()
        self._out.append(Hear({"is": "gone", "why": why, **more}))
        self._retry_s = self.now_s + timing.PAUSE_S

    def _fail(self) -> None:
        who = self.me.name.replace(" on ", f" of {self.me.world_size} on ", 1)
        problem = self.problem.rstrip(".")
        self._over = True
        self._out.append(Fail(f"{who} could not join within {self.me.left_s:g} s: {problem}. {WAY_OUT}"))

    # The clock --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now_s, silent_s = self.now_s, self.rules.silent_s
        if now_s - self._ticked_s > self.rules.frozen_s:
            self._heard_s = now_s
        self._ticked_s = now_s
        if now_s >= self._beat_s:
            self._beat_s = now_s + timing.ALIVE_S
            if self._link is not None:
                self._out.append(Beat())
        for link, dialed in [*self._dials.items()]:
            if now_s >= dialed.until_s and self._dials.pop(link, None) is not None:
                self._out.append(Close(link, True))
                self._missed(dialed, _no_leader(dialed.address))
        for link, (_, came_s) in [*self._callers.items()]:
            if now_s - came_s > timing.HELLO_S:
                self._drop(link)
        if self.leading is not None:
            self.leading.tick()
            if self.rules.limits is not None and now_s >= self._call_s:
                self._call_others(self.leading)
        elif self._link is not None:
            quiet_s = now_s - self._heard_s
            is_over = now_s > self._until_s + timing.LAST_MESSAGE_S and quiet_s > timing.BUSY_S
            if quiet_s > silent_s or is_over:
                self._out.append(Close(self._link, True))
                self._lose_leader(f"sent no heartbeat for {quiet_s:.0f} s")
        elif not self._over and now_s >= self._retry_s and not self._dials:
            self._seek()

    # Who leads --------------------------------------------------------------------------------------------------------

    def _seek(self) -> None:
        """Begin to look for the leader."""
        if self.rules.limits is None:
            self._dial(self.master, "join")
            return
        self._said, self._asked, token = {}, 0, self.me.token
        # If the first membership was only proposed, only node 0 may go on: it may have proposed another one meanwhile,
        # to whoever was there. Nobody has trained yet
        known = self.basis.known if self.basis.follows else ()
        self._before = [*itertools.takewhile(lambda node: node.token != token, known)]
        elsewhere, self._elsewhere = self._elsewhere, None
        self._ask([*self._few(), self.master, elsewhere])
        self._search_on()

    def _few(self) -> list[Address]:
        return [node.address for node in self._before[self._asked:self._asked + ASKED]]

    def _ask(self, addresses: Iterable[Address | None]) -> None:
        for address in dict.fromkeys(addresses):
            if address is not None and address not in self._said:
                self._said[address] = None
                self._dial(address, "ask")

    def _search_on(self) -> None:
        """Go on once all that were asked have answered or failed. End the search, or ask the next ones."""
        while not self._dials:
            for node in self._before[self._asked:self._asked + ASKED]:
                if (said := self._said.get(node.address)) and said["token"] == node.token:
                    self.problem = f"{node.name} should lead, but does not lead yet"
                    return self._later()
            self._asked += ASKED
            if self._asked < len(self._before):
                self._ask(self._few())
            elif not self.basis.follows:
                return self._later()  # the failure at the master's address is what users should see
            elif len(self._before) == len(self.basis.known):
                self.problem = "no leader of the job was found"
                return self._later()
            elif others := [node.address for node in self.basis.known if node.address not in self._said
                            and node.token != self.me.token]:
                self._ask(others)
            else:
                self._out.append(Log("this node leads from now on, because no earlier member answers"))
                return self._lead()
        return None

    def _later(self) -> None:
        """Look for the leader again after a pause."""
        now_s = self.now_s
        if now_s > self._until_s:
            self._fail()
            return
        if now_s - self._noticed_s >= timing.NOTICE_S:
            self._noticed_s = now_s
            self._out.append(Log(f"still waiting: {self.problem}"))
        pause_s = min(timing.PAUSE_S, max(timing.EARLY_PAUSE_S, (now_s - self._begun_s) / 20))
        self._retry_s = now_s + self._crowd * pause_s
        if self._elsewhere is not None:
            self._retry_s = now_s

    def _dial(self, address: Address | None, why: str) -> None:
        link = self.new_link()
        self._dials[link] = Dialed(address, why)
        self._out.append(Dial(link, address, timing.CONNECT_S if why == "join" else timing.PROBE_S))

    def _missed(self, dialed: Dialed, why: str, *, refused: bool = False) -> None:
        """A connection failed, or is of no use."""
        if dialed.why == "join" or (dialed.why == "ask" and not self.basis.follows and dialed.address == self.master):
            # When rank 0 gives up, its container and host name vanish. An earlier refusal shows the real cause
            self._refused = why if refused else self._refused
            later = self._refused and self._refused != why
            self.problem = f"{self._refused}. By now {why}" if later else why
        if self._link is None and not self._over:
            self._later() if dialed.why == "join" else self._search_on()

    def _greeted(self, link: int, said: Mapping[str, Any]) -> None:
        """Take the first message on a connection that this node has made: what the other side says of itself."""
        dialed = self._dials.pop(link)
        known, is_ask = knowledge(self.basis, self.me.token), dialed.why == "ask"
        if dialed.why == "call":
            self._answer_call(link, dialed, said)
            return
        suits = not is_ask or (said["token"] != known["token"] and same_job(said["job"], known["job"])
                               and said["formed"] >= known["formed"])
        if not said["over"] and suits and self._link is None:
            self._join(link, dialed)
            return
        if is_ask:  # from this message a new node 0 learns that the job exists already
            self._out.append(Send((link,), {"is": "leads", **known, "port": 0}))
            assert dialed.address is not None
            self._said[dialed.address] = said
            if said.get("at") and self._link is None:
                self._ask([tuple(said["at"])])
        self._out.append(Close(link, False))
        self._missed(dialed, said["over"] or "no leader of this job is there")

    def _answer_call(self, link: int, dialed: Dialed, said: Mapping[str, Any]) -> None:
        leading = self.leading
        if leading is not None and dialed.address is not None:
            self._out.append(Send((link,), {"is": "leads", **leading.greeting(), "port": self.me.serves}))
            if not said["over"] and leading.yields_to(said):
                leading.follow = dialed.address
            if said.get("at"):  # a member says who leads it: call that leader next time
                self._addresses["the leader"] = tuple(said["at"])
        self._out.append(Close(link, False))

    def _join(self, link: int, dialed: Dialed) -> None:
        self._hang_up()
        self.me = replace(self.me, ip=self._chosen_ip or dialed.own_ip)
        self._link, self._heard_s = link, self.now_s
        self.at = dialed.ip, dialed.address[1] if dialed.address else 0
        self.problem = f"rank 0 at {self.at[0]}:{self.at[1]} is still waiting for others"
        self._out.append(Send((link,), self._hello()))
        self._out.append(Beat())

    def _hang_up(self) -> None:
        for link in self._dials:
            self._out.append(Close(link, True))
        self._dials.clear()

    def _hello(self) -> dict[str, Any]:
        basis = self.basis
        return {"is": "hello", **vars(self.me), "age": list(basis.age), "before": basis.numbers, "state": self._state,
                "warm": self._warm}


def _no_leader(address: Address | None) -> str:
    where = "the leader's address" if address is None else f"{address[0]}:{address[1]}"
    return (
        f"something accepts connections at {where} but does not answer as a rendezvous store: another service holds "
        "the port, the machine is the wrong one, or the process of rank 0 is stopped"
    )
