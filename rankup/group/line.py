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
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rankup.agent.attendance import Attendance
from rankup.agent.links import path_of
from rankup.agent.meeting import Leader
from rankup.agent.network import choose_interface, listen
from rankup.agent.protocol import Member
from rankup.agent.record import RecordWriter
from rankup.errors import FINISHED, JOIN_FAILED, USER_MISTAKE, JoinError, UserError
from rankup.timing import SAY_S

Deliver = Callable[[Mapping[str, Any]], None]


class Line(Protocol):
    """`join` returns the commit: n, hosts as [host, number of ranks] in the order of ranks, store as [ip, port]."""

    def join(self) -> Mapping[str, Any]: ...

    def listen(self, deliver: Deliver) -> None:
        """From now on `deliver`, in the line's thread, what is heard: lost, gone, stop, leave, ranks."""

    def say(self, kind: str, **values: Any) -> bool:
        """Any thread. Raises nothing, and takes SAY_S at most. Returns False where it reached nobody."""

    def close(self) -> None: ...


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

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


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


def join_failed(error: Exception) -> int:
    """The code that a process ends with that did not join."""
    return getattr(error, "code", JOIN_FAILED)
