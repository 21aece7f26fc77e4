"""A network and processes that fail as a seed says, around `rankup.agent.meeting.Meeting`, in virtual time.

    python -m tests.agent.simulator 4711              # replay one schedule, with every event
    python -m tests.agent.simulator --count 20000     # from --first 0 on; prints each seed that fails

A schedule has 3 to 9 nodes. For half a virtual minute faults come at random: processes are killed and restarted,
machines lose power, processes freeze and wake up, connections are reset (whatever was under way is lost), messages come
late, in bursts, or twice, the network falls apart in any way, also in one direction only, disks answer late or not at
all, clocks run fast or slow, ranks fail, and nodes are asked to leave. In each fourth schedule only one node changes
sides between two parts of the network, see `World.divide`. Then the faults end. What must hold after each
event is in `World.commits`, `World.step` and `Host.hear`; what must hold at the end is in `World.finish`.

Links are as TCP makes them: in each direction messages keep their order, or the connection ends. Each side may notice
this at another time, or only by the other's silence. A message that comes twice is one thing that TCP does not do."""

import argparse
import heapq
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rankup import timing
from rankup.agent.ends import End
from rankup.agent.events import (
    Accepted,
    Beat,
    Claim,
    Claimed,
    Close,
    Connected,
    Dial,
    Ended,
    Fail,
    Failed,
    Hear,
    Heard,
    Prepare,
    Prepared,
    Rules,
    Said,
    Send,
    Tick,
)
from rankup.agent.meeting import Meeting
from rankup.agent.protocol import Member
from rankup.agent.votes import outvoted
from rankup.env.node_env import Limits
from rankup.errors import PEER_LOST, STOPPED

TICK = Tick()
PORT = 29400
# Virtual time in which the job must go on once the faults have ended, or show that too many nodes are gone
HEALING_S, GONE_S = 100.0, 40.0
FAULTS = ["part", "anew", "halves", "move", "move", "one way", "pair", "mend", "mend", "freeze", "kill", "power",
          "reset", "slow", "rank", "disk", "leave"]
# Faults at the moment of a message, and the messages that draw them
AIMED = ["anew", "move", "move", "move", "pair", "pair", "freeze", "kill", "power", "reset", "mend"]
TARGETS = ["propose", "propose", "ready", "ready", "commit", "commit", "show", "shown", "basis", "has", "hello",
           "leads", "lost", "prepare", "standing", "confirm"]


class Violation(AssertionError):
    """A promise of the meeting was broken."""


@dataclass(eq=False, slots=True)
class Wire:
    """One direction of a connection. `stuck`: what waits for a cut to be mended, as TCP repeats it."""

    to: "Host"
    life: int  # of the receiver when the connection was made
    link: int
    source: "Host"
    last_s: float = 0.0
    stuck: list[Any] = field(default_factory=list)
    other: Any = None
    ended: bool = False


class Host:
    """A node: its process, which may be restarted, its ranks, and its clock."""

    def __init__(self, world: "World", number: int) -> None:
        dice = world.dice
        self.world, self.number, self.ip = world, number, f"10.0.{number >> 8}.{number & 255}"
        self.rate, self.offset = (dice.uniform(0.95, 1.05), dice.uniform(0, 1e6)) if world.drift else (1.0, 0.0)
        self.life = 0
        self.meeting: Meeting | None = None
        self.frozen = False
        self.inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.wires: dict[int, Wire] = {}  # by this side's link: the direction away from this host
        self.tick_at = 0.0
        self.token = ""
        self.done = 0  # the last step that its ranks finished
        self.begun = self.since = 0  # the step that its ranks have begun; the one that they have restored
        self.restored = False
        self.runs = 0  # the membership whose ranks run here
        self.used: tuple[str, ...] = ()
        self.stop, self.confirmed, self.change = sys.maxsize, sys.maxsize, False
        self.ready = 0  # the proposal to answer once the ranks have ended
        self.warm = True
        self.leaves = self.over = False
        self.started = self.committed = 0

    def start(self) -> None:
        world, dice = self.world, self.world.dice
        self.life += 1
        self.token = f"{self.number}.{self.life}"
        self.frozen, self.inbox, self.wires = False, [], {}
        self.runs = self.ready = self.started = self.committed = self.begun = 0
        self.restored = False
        self.leaves = self.over = False
        self.tick_at = 0.0  # the tick of an earlier life wakes nobody
        self.stop = self.confirmed = sys.maxsize
        self.warm = dice.random() < 0.5
        if not self.warm:
            world.at(dice.uniform(0.1, 3.0), self.warmed, self.life)
        me = Member(
            self.token, self.number, 1, world.size, f"h{self.number}", self.life, world.left_s, ip=self.ip, port=7,
            serves=PORT if world.limits else 0,
        )
        rules = Rules(limits=world.limits, shared=world.shared, max_restarts=10**6, job=f"job-{self.token}")
        self.meeting = Meeting(
            me, rules, now_s=self.now_s, master=(world.hosts[0].ip, PORT), leads=self.number == 0
        )
        self.event(TICK)

    def warmed(self, life: int) -> None:
        if life == self.life:
            self.warm = True
            self.answer()

    @property
    def now_s(self) -> float:
        return self.offset + self.world.now_s * self.rate

    # The shell --------------------------------------------------------------------------------------------------------

    def event(self, event: Any) -> None:
        if self.meeting is None:
            return
        world = self.world
        if world.trace and type(event) is not Tick:
            world.log(f"{self.token} <- {event}")
        for output in self.meeting.take(self.now_s, event):
            if world.trace and type(output) is not Beat and not (type(output) is Send
                                                                 and output.message["is"] == "alive"):
                world.log(f"{self.token} -> {output}")
            self.act(output)
            if self.meeting is None:
                return
        if (leading := self.meeting.leading) is not None and leading.running:
            world.commits(self, leading)
        # The clock: the next tick
        at = (self.meeting.wake_s - self.offset) / self.rate + 1e-6
        if at < self.tick_at or self.tick_at <= world.now_s:
            self.tick_at = max(at, world.now_s)
            world.push(self.tick_at, self.tick, (self.life, self.tick_at))

    def tick(self, life: int, at: float) -> None:
        if life == self.life and self.meeting is not None and at == self.tick_at:
            if self.frozen:
                self.inbox.append((self.event, (TICK,)))
            else:
                self.event(TICK)

    def act(self, output: Any) -> None:
        kind = type(output)
        if kind is Send:
            world, kind = self.world, output.message["is"]
            if kind == world.awaited and self.number in world.far:
                world.change_sides(self, output.links)
            aimed = world.shots and kind in world.targets and world.is_hit()
            if aimed and world.dice.random() < 0.6:
                world.aim(self, output.links)
                aimed = False
            for link in output.links:
                if (wire := self.wires.get(link)) is not None:
                    world.send(wire, output.message)
            if aimed:
                world.aim(self, output.links)
        elif kind is Hear:
            self.hear(output.message)
        elif kind is Beat:
            self.say({"is": "alive", "ranks": [self.heartbeat] if self.runs else [], "warm": self.warm})
        elif kind is Dial:
            self.world.dial(self, output)
        elif kind is Close:
            if (wire := self.wires.pop(output.link, None)) is not None:
                self.world.send(wire, None)
        elif kind is Claim:
            self.world.claim(self, output)
        elif kind is Prepare:
            more = {"port": 1, "store": True, "again": False}
            self.later(self.world.dice.choice((0.0, 0.01, 0.3)), Prepared(output.n, more))
        elif kind is Fail:
            self.world.failed(self, output.text)
            self.exit()

    @property
    def heartbeat(self) -> dict[str, Any]:
        return {"rank": 0, "ago_s": 0.0, "step": self.begun}

    def later(self, delay_s: float, event: Any) -> None:
        self.world.at(delay_s, self.receive, self.life, event)

    def receive(self, life: int, event: Any) -> None:
        if life != self.life or self.meeting is None:
            return
        if self.frozen:
            self.inbox.append((self.receive, (life, event)))
        else:
            self.event(event)

    def say(self, message: dict[str, Any]) -> None:
        self.receive_now(Said(message))

    def receive_now(self, event: Any) -> None:
        self.world.soon.append((self, self.life, event))

    def exit(self, *, power: bool = False) -> None:
        """The process ends. Its connections end too, unless the machine has lost its power."""
        if self.meeting is None:
            return
        self.meeting, self.runs, self.frozen, self.inbox = None, 0, False, []
        for wire in self.wires.values():
            if not power:
                self.world.send(wire, None)
            else:
                wire.ended = True
        self.wires = {}

    def wake(self, life: int) -> None:
        if life != self.life or not self.frozen:
            return
        self.frozen, inbox, self.inbox = False, self.inbox, []
        if self.world.dice.random() < 0.5:  # the clock is looked at after all messages
            inbox = [each for each in inbox if each[1] != (TICK,)]
        for call, given in inbox:
            if self.meeting is None or self.life != life:
                return
            call(*given)
        self.event(TICK)

    # The ranks --------------------------------------------------------------------------------------------------------

    def hear(self, message: Any) -> None:
        kind, dice, world = message["is"], self.world.dice, self.world
        if kind == "propose":
            self.ready = message["n"]
            if self.runs:
                self.leave_soon()
            else:
                self.answer()
        elif kind == "commit":
            if message["n"] <= self.started:
                raise Violation(f"{self.token} heard commit {message['n']} after {self.started}")
            self.started, basis = message["n"], self.meeting.basis
            if (world.limits and message["basis"]["used"] != list(basis.used)) or basis.n != message["n"]:
                raise Violation(f"{self.token} heard commit {message}, and knows {basis}")
            self.stop = self.confirmed = sys.maxsize
            self.change = False
            if world.limits is None or self.token in basis.used:
                if self.runs:
                    raise Violation(f"{self.token} starts ranks of {self.started} while those of {self.runs} run")
                self.runs, self.used, self.begun, self.restored = self.started, basis.used, 0, False
        elif kind in ("lost", "gone"):
            self.leave_soon()
        elif kind == "prepare" and message["n"] == self.runs:
            self.stop = message["stop"]
            self.say({"is": "standing", "n": message["n"], "stop": self.stop, "step": self.begun})
        elif kind == "prepare":
            self.say({"is": "standing", "n": message["n"], "stop": message["stop"], "step": -1})
        elif kind == "confirm" and message["n"] == self.runs:
            self.confirmed = message["stop"]
            if self.begun >= self.confirmed:
                raise Violation(f"{self.token} has begun step {self.begun}, and all stop before {self.confirmed}")
        elif kind == "left_out":
            self.leave()
        elif kind == "over":
            self.over = True
            self.runs = 0
            world.ended(self, message)
            world.at(dice.uniform(0.0, 0.5) if self.meeting and self.meeting.leading is None else 2.0, self.gone,
                     self.life)

    def gone(self, life: int) -> None:
        if life == self.life:
            self.exit()

    def leave_soon(self) -> None:
        if self.runs:
            dice = self.world.dice
            self.world.at(dice.choice((0.0, 0.05, 1.0, 4.0)), self.end_ranks, self.life, self.runs, PEER_LOST, True)

    def end_ranks(self, life: int, n: int, code: int, told: bool) -> None:
        if life != self.life or self.runs != n or self.meeting is None:
            return
        if self.frozen:
            self.inbox.append((self.end_ranks, (life, n, code, told)))
            return
        self.runs = 0
        end = End(self.used.index(self.token), self.ip, code, "", self.begun, told)
        self.say({"is": "end", "n": n, **end.entry()})
        self.answer()

    def answer(self) -> None:
        """Say that this node is ready for the proposal, if it is."""
        if self.ready and not self.runs and self.warm:
            n, self.ready = self.ready, 0
            self.say({"is": "ready", "n": n, "problem": ""})

    def leave(self) -> None:
        """The node was asked to leave: as `Agent._leave` does."""
        if not self.leaves and self.meeting is not None:
            self.leaves = True
            self.world.at(timing.ENDING_S, self.leaving, self.life)

    def leaving(self, life: int) -> None:
        if life != self.life or self.meeting is None or self.over:
            return
        self.world.at(timing.ENDING_S if not self.frozen else 1.0, self.leaving, life)
        if self.frozen:
            return
        if self.meeting.has_leader:
            self.say({"is": "leaving"})
            if not self.runs and not self.change:
                self.change = True
                self.say({"is": "left"})
                self.world.saved = max(self.world.saved, self.done)
                self.world.at(timing.ENDING_S, self.resign, life)

    def resign(self, life: int) -> None:
        if life == self.life and self.meeting is not None:
            self.event(Said({"is": "resign"}))
            self.exit()


class World:
    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed, self.trace = seed, trace
        dice = self.dice = random.Random(seed)
        self.now_s, self.heap, self.order = 0.0, list[Any](), itertools.count()
        self.soon: list[tuple[Host, int, Any]] = []
        self.size = dice.randint(3, 9)
        self.drift = dice.random() < 0.3
        self.left_s = 90.0
        fixed = dice.random() < 0.1
        most = dice.choice((self.size, self.size, max(1, self.size - dice.randint(1, 3))))
        half = self.size // 2 + 1
        # With least up to half of the nodes, a restarted node 0 that is cut off may begin a second job: it can't know
        self.safe_least = dice.random() < 0.6
        least = min(most, half) if self.safe_least else dice.randint(1, max(1, min(most, half - 1)))
        self.safe_least = least >= half
        self.limits = None if fixed else Limits(
            least, most, wait_s=dice.choice((0.5, 2.0, 5.0)), silent_s=dice.choice((3.0, 4.0, 6.0))
        )
        self.shared = not fixed and dice.random() < 0.4
        self.claims: dict[tuple[str, int], str] = {}
        self.slow_disk = 0.0
        self.cut: set[tuple[int, int]] = set()
        self.slow: set[int] = set()
        self.twice = dice.random() < 0.2
        self.hosts = [Host(self, number) for number in range(self.size)]
        self.by_ip = {host.ip: host for host in self.hosts}
        self.finished = self.saved = 0
        self.formed: dict[int, tuple[Any, ...]] = {}  # by number, what each membership is
        self.newest: tuple[Any, ...] = ()
        self.crashes = 0
        # Kinds of messages that draw faults from a time on, how often they do, and how many faults are left
        self.targets, self.aimed_s, self.luck, self.shots = list[str](), 0.0, 0.0, 0
        self.awaited, self.far = "", set[int]()  # see `divide`
        self.num_events = 0
        self.overs: list[tuple[str, Any]] = []
        self.healed_s = -1.0
        self.asked_to_leave = 0
        self.progress = 0  # steps since the faults ended

    def log(self, text: str) -> None:
        print(f"{self.now_s:9.3f} {text}")

    # Time -------------------------------------------------------------------------------------------------------------

    def push(self, at_s: float, call: Callable[..., None], given: tuple[Any, ...]) -> None:
        heapq.heappush(self.heap, (at_s, next(self.order), call, given))

    def at(self, delay_s: float, call: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self.heap, (self.now_s + delay_s, next(self.order), call, given))

    def run_until(self, until_s: float, done: Callable[[], bool] | None = None) -> bool:
        heap, soon = self.heap, self.soon
        while heap and heap[0][0] <= until_s:
            self.now_s, _, call, given = heapq.heappop(heap)
            self.num_events += 1
            call(*given)
            while soon:
                host, life, event = soon.pop(0)
                host.receive(life, event)
            if done is not None and done():
                return True
        self.now_s = until_s
        return False

    # The network ------------------------------------------------------------------------------------------------------

    def delay_s(self, source: Host, to: Host) -> float:
        dice = self.dice.random()
        if source.number in self.slow or to.number in self.slow:
            return 0.05 + 2.5 * dice
        return 0.0005 + 0.002 * dice if dice < 0.97 else dice

    def send(self, wire: Wire, message: Any) -> None:
        """Send a message, or None at the end of the connection."""
        if wire.ended:
            return
        if message is None:
            wire.ended = True
        if (wire.source.number, wire.to.number) in self.cut:
            wire.stuck.append(message)
            return
        self.deliver(wire, message)

    def deliver(self, wire: Wire, message: Any) -> None:
        at_s = max(wire.last_s, self.now_s + self.delay_s(wire.source, wire.to))
        wire.last_s = at_s
        event = Heard(wire.link, message) if message is not None else Ended(wire.link)
        self.push(at_s, self.arrive, (wire, event))
        if self.twice and message is not None and self.dice.random() < 0.02:
            self.push(at_s + self.dice.uniform(0.0, 3.0), self.arrive, (wire, event))

    def arrive(self, wire: Wire, event: Any) -> None:
        to = wire.to
        if to.meeting is None or to.life != wire.life:
            if type(event) is Heard and wire.other is not None and not wire.other.ended:
                # The machine answers that it does not know the connection
                wire.other.ended = False
                self.send(wire.other, None)
            return
        if wire.link not in to.wires:
            return  # this side has closed it
        if type(event) is Ended:
            if to.frozen:
                to.inbox.append((self.arrive, (wire, event)))
                return
            to.wires.pop(wire.link, None)
        to.receive(wire.life, event)

    def dial(self, source: Host, dial: Dial) -> None:
        target = self.by_ip[dial.address[0]]
        there, back = (source.number, target.number), (target.number, source.number)
        if there in self.cut or back in self.cut or (target.meeting is None and target.life < 0):
            source.later(dial.timeout_s, Failed(dial.link, "no answer"))
        else:
            self.at(self.delay_s(source, target), self.reach, source, source.life, target, dial)

    def reach(self, source: Host, life: int, target: Host, dial: Dial) -> None:
        if source.life != life or source.meeting is None:
            return
        serves = target.number == 0 or self.limits is not None
        if (target.number, source.number) in self.cut:
            source.later(dial.timeout_s, Failed(dial.link, "no answer"))
        elif target.meeting is None or not serves:
            source.later(self.delay_s(target, source), Failed(dial.link, "refused", refused=True))
        else:
            link = target.meeting.new_link()
            away = Wire(target, target.life, link, source)
            back = Wire(source, source.life, dial.link, target)
            away.other, back.other = back, away
            source.wires[dial.link], target.wires[link] = away, back
            delay_s = self.delay_s(target, source)
            back.last_s = self.now_s + delay_s
            source.later(delay_s, Connected(dial.link, dial.address, source.ip))
            target.receive(target.life, Accepted(link, source.ip, target.ip))

    def mend(self, pairs: Iterable[tuple[int, int]]) -> None:
        self.cut -= set(pairs)
        for host in self.hosts:
            for wire in [*host.wires.values()]:
                self.flush(wire)

    def flush(self, wire: Wire) -> None:
        if wire.stuck and (wire.source.number, wire.to.number) not in self.cut:
            stuck, wire.stuck = wire.stuck, []
            if self.dice.random() < 0.3:  # TCP repeats a packet after seconds only
                wire.last_s = max(wire.last_s, self.now_s + self.dice.uniform(0.0, 2.0))
            for message in stuck:
                self.deliver(wire, message)

    # The disk ---------------------------------------------------------------------------------------------------------

    def claim(self, host: Host, claim: Claim) -> None:
        dice = self.dice
        self.at(dice.uniform(0.0, 0.1) + self.slow_disk * dice.random(), self.write, host, host.life, host.token, claim)

    def write(self, host: Host, life: int, token: str, claim: Claim) -> None:
        dice = self.dice
        if dice.random() < 0.05:
            host.later(0.1, Claimed(claim.n, False)) if host.life == life else None
            return  # the disk is full, or answers too late
        owner = self.claims.setdefault((claim.job, claim.n), token)
        if host.life == life:
            lost = self.slow_disk and dice.random() < 0.3
            host.later(self.slow_disk * dice.random(), Claimed(claim.n, owner == token and not lost))

    # What must hold ---------------------------------------------------------------------------------------------------

    def commits(self, host: Host, leading: Any) -> None:
        basis = leading.basis
        if host.committed == basis.n:
            return
        host.committed, job = basis.n, basis.job or host.token
        what = (basis.n, basis.used, host.token, job)
        if self.newest and job != self.newest[3]:
            # Nobody can know whether nodes that are cut off remember a job. But there must never be two that go on
            knowing = {each.token: each.meeting.basis for each in self.hosts
                       if each.meeting is not None and each.meeting.basis.job == self.newest[3]}
            newest = max(knowing.values(), key=lambda each: each.age, default=None)
            least = self.limits.least if self.limits else 0
            if basis.job and newest and len(knowing) >= least and not outvoted(newest, knowing, shared=self.shared):
                raise Violation(f"{host.token} begins job {job} beside {self.newest}")
            self.formed, self.newest, self.finished = {}, (), self.saved  # nobody knows the first job any more
        if (known := self.formed.setdefault(basis.n, what)) != what:
            raise Violation(f"membership {basis.n} is {known} and, at {host.token}, {what}")
        if self.limits:  # whoever may know an earlier membership has voted for this one
            asked = leading._next.numbers or [0]
            missed = {n for n in self.formed if asked[-1] <= n < basis.n} - {*asked}
            if missed or basis.n <= asked[0]:
                raise Violation(f"{host.token} commits {basis.n} after {asked}, and does not know {missed}")
        if not self.newest or basis.n > self.newest[0]:
            self.newest = what

    def restore(self, hosts: list[Host]) -> None:
        """All ranks of a membership have met: they go on after the newest step that one of their nodes has."""
        start = max(self.saved if self.limits is not None else self.finished, *(host.done for host in hosts))
        for host in hosts:
            host.restored, host.done, host.since = True, start, start

    def step(self) -> None:
        """The ranks of each membership restore the state, or begin and finish their next step, if all of them can."""
        self.at(self.dice.uniform(0.1, 0.9), self.step)
        groups: dict[tuple[int, tuple[str, ...]], list[Host]] = {}
        for host in self.hosts:
            if host.runs:
                groups.setdefault((host.runs, host.used), []).append(host)
        for (n, used), hosts in groups.items():
            connected = not self.cut or not any((a.number, b.number) in self.cut for a in hosts for b in hosts)
            if not all(host.restored for host in hosts):
                if len(hosts) == len(used) and connected and not any(host.frozen for host in hosts):
                    self.restore(hosts)
                continue
            for host in hosts:
                if host.frozen:
                    continue
                if host.begun <= host.done:
                    if host.done + 1 >= host.stop:
                        if host.confirmed == host.stop:
                            if host.done + 1 > host.confirmed and host.done > host.since:
                                raise Violation(f"{host.token} stops after step {host.done}, not {host.confirmed - 1}")
                            self.saved = max(self.saved, host.done)
                            host.end_ranks(host.life, n, STOPPED, False)
                        continue
                    host.begun = host.done + 1
            ready = [host for host in hosts if host.runs == n and not host.frozen and host.begun == host.done + 1]
            if len(ready) == len(used) and len({host.done for host in ready}) == 1 and connected:
                self.complete(n, used, ready)

    def complete(self, n: int, used: tuple[str, ...], hosts: list[Host]) -> None:
        step = hosts[0].done + 1
        if self.newest and n != self.newest[0]:
            raise Violation(f"step {step} of membership {n} ends after the commit of {self.newest}")
        if step <= self.finished:
            raise Violation(f"membership {n} repeats step {step}, and {self.finished} was finished")
        for host in hosts:
            host.done = step
        self.finished = step
        self.progress += 1
        if self.trace:
            self.log(f"step {step} of membership {n} is finished by {used}")

    def failed(self, host: Host, text: str) -> None:
        self.overs.append((host.token, text))

    def ended(self, host: Host, message: Any) -> None:
        self.overs.append((host.token, (message["code"], message["text"])))

    # Faults -----------------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        """A fault at any time, to any node."""
        if self.healed_s < 0:
            self.at(self.dice.expovariate(self.pace), self.fault)
            self.strike(self.dice.choice(self.menu), self.dice.choice(self.hosts))

    def is_hit(self) -> bool:
        return self.healed_s < 0 and self.now_s >= self.aimed_s and self.dice.random() < self.luck

    def aim(self, source: Host, links: Iterable[int]) -> None:
        """A fault to the nodes that exchange a message, just as it is sent. Another one may follow."""
        dice = self.dice
        self.shots -= 1
        others = [source.wires[link].to for link in links if link in source.wires] or [source]
        for _ in range(dice.choice((1, 1, 2))):
            pair = source, dice.choice(others)
            self.strike(dice.choice(AIMED), *(pair if dice.random() < 0.4 else pair[::-1]))
        if dice.random() < 0.3:
            self.at(dice.choice((0.003, 0.3, 1.5)), self.again, dice.choice([source, *others]))

    def again(self, host: Host) -> None:
        if self.healed_s < 0:
            self.strike(self.dice.choice(AIMED), host)

    def split(self, sides: list[int]) -> None:
        self.cut |= {(a, b) for a, one in enumerate(sides) for b, other in enumerate(sides) if one != other}

    def strike(self, kind: str, host: Host, partner: Host | None = None) -> None:
        dice, size, number, cut = self.dice, self.size, host.number, self.cut
        if self.trace:
            self.log(f"FAULT {kind} {host.token}")
        if kind in ("part", "anew"):
            if kind == "anew":
                self.mend([*cut])
            self.split([dice.randint(0, dice.choice((1, 1, 2))) for _ in self.hosts])
        elif kind == "halves":
            self.split([place % 2 for place in dice.sample(range(size), size)])
        elif kind == "move":  # to the other side of a cut, or away from all others
            pairs = {pair for each in range(size) if each != number for pair in ((each, number), (number, each))}
            mended = cut & pairs
            cut |= pairs
            self.mend(mended)
        elif kind in ("one way", "pair"):
            other = partner.number if partner else dice.randrange(size)
            if other != number:
                cut |= {(number, other)} if kind == "one way" else {(number, other), (other, number)}
        elif kind == "mend":
            self.mend([*cut])
        elif kind == "freeze" and host.meeting is not None and not host.frozen:
            host.frozen = True
            self.at(dice.choice((0.5, 3.0, 8.0, 15.0)), host.wake, host.life)
        elif kind in ("kill", "power") and host.meeting is not None and not host.leaves:
            if self.num_alive > 1 and (self.safe_least or host.number):
                self.crashes += 1
                host.exit(power=kind == "power")
                if kind == "power":
                    host.done = 0
                self.at(dice.choice((0.2, 2.0, 8.0)), self.restart, host, host.life)
        elif kind == "reset" and host.wires:
            self.reset(dice.choice([*host.wires.values()]))
        elif kind == "slow":
            (self.slow.discard if number in self.slow else self.slow.add)(number)
        elif kind == "disk":
            self.slow_disk = dice.choice((0.0, 1.0, 12.0))
        elif kind == "rank" and host.runs:
            host.end_ranks(host.life, host.runs, 137, False)
        elif kind == "leave" and host.meeting and self.limits and self.newest and self.num_alive > self.limits.least:
            self.asked_to_leave += 1
            host.leave()

    def reset(self, wire: Wire) -> None:
        for one in (wire, wire.other):
            if not one.ended:
                one.ended = True
                self.at(self.dice.choice((0.0, 0.1, 2.0)), self.arrive, one, Ended(one.link))

    def divide(self) -> None:
        """Cut the leader off with fewer than half of the nodes. It may freeze, and when it wakes, it believes that its
        membership runs. In the middle of the others' next membership, one of them moves to the leader's part: there, it
        alone knows of that membership."""
        dice = self.dice
        leader = next((each for each in self.hosts if each.meeting and each.meeting.leading
                       and each.meeting.leading.running), None)
        if leader is None:
            if self.healed_s < 0:
                self.at(1.0, self.divide)
            return
        self.far = {*dice.sample([*{*range(self.size)} - {leader.number}], self.size - (self.size - 1) // 2)}
        self.split([number in self.far for number in range(self.size)])
        if dice.random() < 0.5:
            leader.frozen = True
            self.at(dice.choice((8.0, 15.0)), leader.wake, leader.life)
        self.awaited = dice.choice(("propose", "ready", "commit"))
        if self.trace:
            self.log(f"FAULT divide: {self.far} are cut off from {leader.token}")

    def change_sides(self, source: Host, links: Iterable[int]) -> None:
        dice = self.dice
        others = [source.wires[link].to for link in links if link in source.wires]
        host = source if self.awaited == "ready" or not others else dice.choice(others)
        self.awaited = ""
        self.strike("move", host)
        if dice.random() < 0.5:
            for wire in host.wires.values():
                self.reset(wire)

    @property
    def num_alive(self) -> int:
        return sum(host.meeting is not None for host in self.hosts)

    def restart(self, host: Host, life: int) -> None:
        if host.life == life and host.meeting is None:
            host.start()

    def play(self) -> "World":
        dice = self.dice
        divided = self.seed % 4 == 2 and self.limits is not None
        self.pace = dice.choice((0.1, 0.25, 0.6, 1.5))
        self.menu = [*dice.sample(FAULTS, dice.randint(2, 6)), "mend"]
        if not divided and dice.random() < 0.6:
            self.targets, self.shots = dice.sample(TARGETS, dice.randint(1, 3)), dice.choice((2, 4, 8))
            self.aimed_s, self.luck = dice.choice((0.0, 8.0)), dice.choice((0.1, 0.5, 1.0))
            if dice.random() < 0.5:  # one cut, and then only what is aimed
                self.pace = 0.02
                self.at(7.9, self.strike, dice.choice(("part", "halves", "move", "freeze")), dice.choice(self.hosts))
        for host in self.hosts:
            self.at(dice.choice((0.0, 0.0, 0.0, dice.uniform(0.0, 6.0))), self.restart, host, 0)
        self.at(1.0, self.step)
        self.at(*(8.0, self.divide) if divided else (dice.choice((0.0, 3.0, 8.0)), self.fault))
        self.run_until(60.0 if divided else dice.choice((15.0, 30.0)))
        self.heal()
        self.finish()
        return self

    def heal(self) -> None:
        self.healed_s, self.slow_disk, self.progress, self.awaited = self.now_s, 0.0, 0, ""
        self.slow.clear()
        if self.trace:
            self.log("the faults end")
        self.mend([*self.cut])
        for host in self.hosts:
            host.wake(host.life)
            while self.soon:
                each, life, event = self.soon.pop(0)
                each.receive(life, event)

    def finish(self) -> None:
        """Someone goes on, with all nodes that there are, or, if too many voters were killed, the job ends."""
        def settled() -> bool:
            return self.progress >= 2 and self.complete_now()

        patience_s = GONE_S if self.limits and self.disturbed else HEALING_S
        if self.run_until(self.now_s + patience_s, settled):
            return
        alive = [host for host in self.hosts if host.meeting is not None]
        if self.disturbed and not any(host.runs for host in alive):
            return
        raise Violation(f"not all go on after {patience_s:g} s: {[(h.token, h.runs) for h in alive]}, {self.overs[:3]}")

    @property
    def disturbed(self) -> bool:
        """Whether nodes were killed, or asked to leave, so that too few voters may be left."""
        return self.crashes + self.asked_to_leave > 0

    def complete_now(self) -> bool:
        """Return whether all nodes that may take part do: those that leave, or pay for many losses, may not, nor those
        of a job that was given up or that wait with such nodes, nor those that know only node 0 once that has left. If
        no node was killed, none may have given up."""
        runs = {host.runs for host in self.hosts if host.meeting is not None and host.runs}
        leader = next((host.meeting.leading for host in self.hosts if host.meeting and host.runs
                       and host.meeting.leading), None)
        waits = {seat.claim.start for seat in leader.seats.values() if leader._pause_s(seat)} if leader else set()
        jobs = {*self.newest[3:], *[""] * (self.hosts[0].meeting is not None)}
        stuck = {token for host in self.hosts if host.meeting and host.meeting.leading
                 and host.meeting.basis.job not in jobs for token in host.meeting.leading.by_token}
        free = [host for host in self.hosts if not host.leaves and (host.runs or host.number not in waits) and (
            not self.disturbed if host.meeting is None
            else host.meeting.basis.job in jobs and host.token not in stuck)]
        need = self.size if self.limits is None else min(len(free), self.limits.most)
        return len(runs) == 1 and sum(bool(host.runs) for host in self.hosts) >= need


def play(seed: int) -> tuple[int, str, int]:
    world = World(seed)
    try:
        world.play()
    except Exception as error:  # a fault in the meeting itself is a failure of the seed too
        return seed, f"{type(error).__name__}: {error}", world.num_events
    return seed, "", world.num_events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many seconds of CPU time")
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that fails")
    given = parser.parse_args()
    if given.seed is not None:
        World(given.seed, trace=True).play()
        return
    began_s, failed, events, count = time.process_time(), 0, 0, 0
    seeds = range(given.first, given.first + given.count)
    with multiprocessing.Pool(given.processes) as pool:
        played = pool.imap_unordered(play, seeds, chunksize=20) if given.processes > 1 else map(play, seeds)
        for seed, why, num_events in played:
            count += 1
            events += num_events
            if why:
                failed += 1
                print(f"seed {seed}: {why}", flush=True)
            if count % 10_000 == 0:
                took_s = time.process_time() - began_s
                print(f"{count} schedules, {events} events, {failed} failed, {took_s:.0f} s", flush=True)
            if time.process_time() - began_s > given.seconds or (why and given.stop):
                break
    took_s = time.process_time() - began_s
    print(f"{count} schedules, {events} events, {failed} failed, {took_s:.1f} s, {1000 * took_s / count:.2f} ms each")


if __name__ == "__main__":
    main()
