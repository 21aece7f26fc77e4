"""A rank's line to the others, beside what is training: who belongs to the job, who is lost, who asks to stop.

Under an agent the line leads to it, by a local socket. Without one the rank is a member of the meeting itself, see
`rankup.agent.meeting`, and the one of rank 0 leads it. Both say and hear the same. One thread serves the line.
"""

import asyncio
import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rankup.agent.attendance import Attendance
from rankup.agent.meeting import Leader
from rankup.agent.network import choose_interface, listen
from rankup.agent.protocol import KILLED, Member, path_of
from rankup.agent.record import RecordWriter
from rankup.errors import FINISHED, USER_MISTAKE, JoinError, UserError, root_cause, worth_restarting
from rankup.timing import QUIET_S, SAY_S, WHERE_S

Deliver = Callable[[Mapping[str, Any]], None]


class Line(Protocol):
    """`join` returns the commit: n, hosts as [host, number of ranks] in the order of ranks, store as [ip, port]."""

    def join(self) -> Mapping[str, Any]: ...

    def listen(self, deliver: Deliver) -> None:
        """From now on `deliver`, in the line's thread, what is heard: lost, gone, stop, leave, ranks."""

    def say(self, kind: str, **values: Any) -> bool:
        """Any thread. Raises nothing, and takes SAY_S at most. Returns False where it reached nobody."""


class AgentLine:
    """To the agent of this node. `agent`: what it has put into RANKUP_AGENT."""

    def __init__(self, agent: Mapping[str, Any], local_rank: int) -> None:
        self._agent = agent
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path_of(agent["socket"]))
        self._lock = threading.Lock()
        self.say("rank", local_rank=local_rank)

    def join(self) -> Mapping[str, Any]:
        """The agents have met before this rank was started."""
        commit: Mapping[str, Any] = self._agent["commit"]
        return commit

    def listen(self, deliver: Deliver) -> None:
        def hear() -> None:
            with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
                for line in lines:
                    deliver(json.loads(line))

        threading.Thread(target=hear, name="line", daemon=True).start()

    def say(self, kind: str, **values: Any) -> bool:
        data = json.dumps({"is": kind, **values}).encode() + b"\n"
        if self._lock.acquire(timeout=SAY_S):
            try:
                with contextlib.suppress(OSError):
                    self._socket.sendall(data)
                    return True
            finally:
                self._lock.release()
        return False


class Place(Protocol):
    """Where members meet. `ip`, `port`: where rank 0 listens; "" for all addresses, 0 for a port that the system
    picks. `master`: the address that the user gave to rank 0, or "". `hint`: what has to be right, a sentence."""

    ip: str
    port: int
    master: str
    hint: str

    def find(self) -> tuple[str, int]:
        """The leader's host and port. May block for seconds, and raise OSError where it has not said that yet."""
        ...

    def publish(self, port: int) -> None:
        """Rank 0 listens on this port."""

    def serve(self) -> Mapping[str, Any]:
        """Start torch's store, on rank 0. Returns what the commit says of it."""
        ...


class MemberLine:
    """Of a rank that another launcher started: it is a member itself, and with rank 0 the leader too."""

    def __init__(
        self, me: Member, settings: Mapping[str, str], place: Place, *, say: Callable[[str], None],
        record: RecordWriter,
    ) -> None:
        """`say`: prints a line. `record`: of this rank."""
        self._me, self._settings, self._place, self._say, self._record = me, settings, place, say, record
        self._port = place.port
        self._commit: queue.Queue[Mapping[str, Any] | Exception] = queue.Queue()
        self._early: list[Mapping[str, Any]] = []  # what was heard before anybody listened
        self._deliver: Deliver = self._early.append
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop
        self._attendance: Attendance
        self._leader: Leader | None = None

    def join(self) -> Mapping[str, Any]:
        """Raises JoinError and UserError where there will be no membership."""
        threading.Thread(target=self._run, name="line", daemon=True).start()
        found = self._commit.get()
        if isinstance(found, Exception):
            raise found
        return found

    def listen(self, deliver: Deliver) -> None:
        with self._lock:
            self._deliver = deliver
            for message in self._early:
                deliver(message)

    def say(self, kind: str, **values: Any) -> bool:
        said: queue.Queue[bool] = queue.Queue()
        with contextlib.suppress(RuntimeError, queue.Empty):  # the loop has ended
            say = self._leader.take if self._leader is not None else self._attendance.say
            self._loop.call_soon_threadsafe(lambda: said.put(say(kind, **values)))
            return said.get(timeout=SAY_S)
        return False

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._attendance.close)

    # In the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._attend())
        except Exception as error:
            self._commit.put(error)

    async def _attend(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._me.first_rank == 0:
            await self._lead()
        else:
            await self._hear_events()

    async def _lead(self) -> None:
        self._leader = Leader(self._me, say=self._say, prepare=self._prepare, hear=self._hear)
        server = await listen(self._leader.attend, ip=self._place.ip, port=self._port)
        try:
            self._port = server.sockets[0].getsockname()[1]
            await asyncio.to_thread(self._place.publish, self._port)
            self._watch = asyncio.create_task(self._leader.watch(master=self._place.master))
            await self._hear_events()
        finally:
            server.close()  # the end of the event loop does not

    async def _hear_events(self) -> None:
        self._attendance = Attendance(
            self._me, self._settings, self._leader_at, notice=self._say,
            records=lambda: {self._me.first_rank: self._record}, hint=self._place.hint,
        )
        member = False
        async for event in self._attendance.events():
            if event["is"] == "propose":
                self._attendance.ready(event["n"], mistake=choose_interface(os.environ, event["ip"]))
            elif event["is"] == "commit":
                member = True
                self._commit.put(event)
            elif event["is"] == "refused":
                kind = UserError if event["code"] == USER_MISTAKE else JoinError
                self._commit.put(kind(event["text"], printed_elsewhere=bool(event.get("quiet"))))
            elif member:
                with self._lock:
                    self._deliver(event)
            if member and event["is"] in ("lost", "gone"):
                break  # this process belongs to one membership, and must not come into the next one's way
        if self._leader is not None:  # the others still hear what it has to say
            await asyncio.Event().wait()

    async def _leader_at(self) -> tuple[str, int]:
        if self._leader is not None:
            return "127.0.0.1", self._port
        return await asyncio.to_thread(self._place.find)

    async def _prepare(self, n: int) -> Mapping[str, Any]:
        assert self._leader is not None
        found = await asyncio.to_thread(self._place.serve)
        # Where one rank was started again the job goes on, whatever rank 0 knows of that
        return {**found, "restarts": max(member.restarts for member in self._leader.members)}

    def _hear(self, member: Member, message: Mapping[str, Any]) -> None:
        """Each rank is a process that is started anew by somebody else: a bad end is the end of all."""
        assert self._leader is not None
        if message["is"] == "end" and message["code"] != FINISHED:
            self._leader.lose_by(member, message)
        elif message["is"] == "stop":
            self._leader.stop(str(message["signal"]))


# Who was lost --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that may be the cause, and why. `code`: that it ended with, where somebody knows. `alive`: it keeps the
    others waiting."""

    rank: int
    why: str
    code: int | None = None
    alive: bool = False


class Losses:
    """What the line has said so far."""

    def __init__(
        self, line: Line, rank: int, *, heard: threading.Event, ask: Callable[[str], None] = lambda name: None
    ) -> None:
        """`heard`: is set once a rank is lost, or the line itself. `ask`: is called with the signal by which somebody
        asks the job to stop."""
        self._line, self._rank, self._heard, self._ask = line, rank, heard, ask
        self.must_leave = False  # for a stop: the ranks do not come to the step that all stop at
        self._answered = threading.Event()
        self._lost: Mapping[str, Any] = {}
        self._signs: list[dict[str, Any]] = []
        line.listen(self._hear)

    def _hear(self, message: Mapping[str, Any]) -> None:
        """In the line's thread."""
        if message["is"] in ("lost", "gone") and not self._lost:
            self._lost = message
            self._heard.set()
        elif message["is"] == "stop":
            self._ask(str(message["signal"]))
        elif message["is"] == "leave":
            self.must_leave = True
        elif message["is"] == "ranks":
            self._signs = message["ranks"]
            self._answered.set()

    def signs(self, *, timeout_s: float = WHERE_S) -> list[dict[str, Any]]:
        """Where each rank was when it last said so, see `Leader.signs`. Any thread; what is known where nobody answers
        in time."""
        self._answered.clear()
        if self._line.say("ask"):
            self._answered.wait(timeout_s)
        return self._signs

    @property
    def gone(self) -> bool:
        """Whether somebody's process has ended by itself: a collective with it breaks, or never comes to an end."""
        return self._lost.get("code") == KILLED

    @property
    def hang(self) -> bool:
        """Whether somebody is late, and nobody has ended."""
        return bool(self._lost.get("alive"))

    def reported(self) -> list[Suspect]:
        """Who has said itself how it ends."""
        lost = self._lost
        if lost.get("code") in (None, KILLED):
            return []
        return [Suspect(rank, lost["why"], code=lost["code"]) for rank in lost["ranks"]]

    def suspects(self, *, waiting: bool, overdue: bool) -> list[Suspect]:
        """The most likely first; empty where all ranks wait for each other. `waiting`: this rank waits in a collective
        itself. `overdue`: its own deadline has passed."""
        late = self._late() if not self._lost else []
        if not (lost := self._lost):  # which may have come meanwhile, and says more
            return late or ([] if waiting else [Suspect(self._rank, "the others wait for it", alive=True)])
        if lost["is"] == "gone" and overdue and not waiting:
            # This rank is the one that takes too long: those that waited for it have left, rank 0 among them
            return [Suspect(self._rank, "the others have left", alive=True)]
        if lost["is"] == "gone":
            return [Suspect(0, lost["why"], code=lost.get("code"))]
        code = lost.get("code")
        return [Suspect(rank, lost["why"], code=code, alive=lost.get("alive", False)) for rank in lost["ranks"]]

    def _late(self) -> list[Suspect]:
        """Where nobody has ended: who gave no sign of life, else who does not wait for others."""
        signs = [sign for sign in self.signs() if sign["rank"] != self._rank]
        if not self._answered.is_set():
            return [Suspect(0, "it does not answer")]
        silent = [sign for sign in signs if time.time() - sign["seen"] > QUIET_S]
        if silent:
            return [Suspect(sign["rank"], "gave no sign of life") for sign in silent]
        busy = [sign for sign in signs if not sign["waiting"]]
        return [Suspect(s["rank"], f"is alive, in {s['phase']} at step {s['step']}", alive=True) for s in busy]


def root_exit_code(suspects: list[Suspect], otherwise: int) -> int:
    """The exit code of a rank that lost others: the code of the likeliest suspect where that forbids a restart.

    A mistake or a fault on one rank ends all ranks so, and so does a rank that was asked to stop and left without them.
    """
    reported = [suspect.code for suspect in suspects[:1] if suspect.code is not None]
    code = root_cause([*reported, otherwise])
    return otherwise if worth_restarting(code) else code


def describe(suspects: list[Suspect], hosts: Sequence[str]) -> str:
    """One clause: "rank 3 on node1 (its process has ended)"; "suspected: ..." where its end is not known."""
    if not suspects:
        return "suspected: nobody, all ranks wait for each other"
    named = ", ".join(f"rank {s.rank} on {hosts[s.rank]} ({s.why})" for s in suspects[:4])
    return named if suspects[0].code is not None else f"suspected: {named}"
