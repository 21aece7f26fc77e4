"""The shell around the meeting: connections, the clock, and how a connection failed. It decides nothing.

`Meeting` takes what happens here and returns what to do. Everything runs in one event loop."""

import asyncio
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from rankup.agent import events
from rankup.agent.meeting import Meeting
from rankup.agent.network import OTHER_SECRET, Link, fits, greeting, open_port, read_secret
from rankup.agent.protocol import LEADERS, MEMBERS, Member
from rankup.agent.votes import Address
from rankup.env.rank_env import is_loopback
from rankup.errors import JOIN_FAILED, ExpectedError, JoinError, reason
from rankup.timing import ROUTE_S


class Node(Protocol):
    """Who takes part in the meeting."""

    def hear(self, message: dict[str, Any]) -> None:
        """Act on a message of the leader, see `events.Hear`."""

    def heartbeat(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the heartbeats of this node's ranks, and whether torch is imported, so that ranks start at once."""

    async def prepare(self, n: int, size: int, job: str, restarts: int) -> Mapping[str, Any]:
        """Return what the commit of membership `n` says besides: port, store, again. If this raises, the job ends."""

    async def claim(self, job: str, n: int) -> bool:
        """Claim the right to form the membership after `n`. Returns whether this node has it."""

    def judged(self, output: events.Judged) -> None:
        """Write how the job ended."""

    def say(self, text: str) -> None:
        """Print a line."""

    def fail(self, error: Exception) -> None:
        """Leave: this node could not join."""


class Peers:
    """This node's connections to the other members. `meeting` decides what happens on them."""

    def __init__(
        self, me: Member, rules: events.Rules, node: Node, *, master: Callable[[], Awaitable[Address]],
        address: Address | None = None, leads: bool = False,
    ) -> None:
        """`master`: returns where node 0 listens, or raises an OSError that says why that is not known yet. `address`:
        the same if it never changes. `leads`: this is node 0."""
        self._node, self._master, self._events = node, master, deque[events.Event]()
        self._links: dict[int, Link] = {}
        self._tasks: dict[int | object, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._busy = self._closed = self._sets_timer = False
        self._shut_out = False  # the last answer of a leader was that it has another secret
        self._listener: socket.socket | None = None
        if me.num_ranks < me.world_size:
            # Listen on any high port, as gloo will, so that another member can test the route. The kernel completes the
            # connections. No code reads from them, so strangers can do no harm
            self._listener = open_port("", 0, backlog=128)
            self._listener.setblocking(False)
            me = Member(**{**vars(me), "port": self._listener.getsockname()[1]})
        self._loop = asyncio.get_running_loop()
        self.meeting = Meeting(me, rules, now_s=self._loop.time(), master=address, leads=leads)

    def start(self) -> None:
        self.take(events.Tick())

    def send(self, kind: str, **values: Any) -> bool:
        """Say something to the leader. Returns False while there is none."""
        there = self.meeting.has_leader
        self.take(events.Said({"is": kind, **values}))
        return there

    def take(self, event: events.Event) -> None:
        """Let the meeting take an event, and do what it returns. An event may come while an earlier one is handled."""
        self._events.append(event)
        if self._busy or self._closed:
            return
        self._busy = True
        try:
            while self._events:
                for output in self.meeting.take(self._loop.time(), self._events.popleft()):
                    self._do(output)
        finally:
            self._busy = False
        if not self._sets_timer:
            self._sets_timer = True
            self._loop.call_soon(self._set_timer)

    def _set_timer(self) -> None:
        """Set the timer once for all messages that came together: `wake_s` looks at each connection being made."""
        self._sets_timer, wake_s = False, self.meeting.wake_s
        if self._closed or (self._timer is not None and self._timer.when() == wake_s):
            return  # most messages change no deadline
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(wake_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.take(events.Tick())

    def _do(self, output: events.Output) -> None:
        match output:
            case events.Send(links, message):
                data = json.dumps(message).encode() + b"\n"  # encoded once, because there may be many members
                for number in links:
                    if (link := self._links.get(number)) is not None:
                        link.write(data)
            case events.Hear(message):
                self._node.hear({**message})
            case events.Beat():
                ranks, warm = self._node.heartbeat()
                self.send("alive", ranks=ranks, warm=warm)
            case events.Dial(number):
                self._begin(number, self._dial(output))
            case events.Close(number, at_once):
                if (link := self._links.pop(number, None)) is not None:
                    link.close(at_once=at_once)
                elif (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case events.Claim(job, n):
                self._begin(object(), self._claim(job, n))
            case events.Prepare():
                self._begin(object(), self._prepare(output))
            case events.Judged():
                self._node.judged(output)
            case events.Log(text):
                self._node.say(text)
            case events.Fail(text):  # often a leader that waits for a shut-out node in vain has ended before that node
                shut_out = self._shut_out and OTHER_SECRET not in text
                self._node.fail(JoinError(f"{OTHER_SECRET}. Then {text}" if shut_out else text))

    def _begin(self, key: int | object, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[key] = task = asyncio.create_task(work)
        task.add_done_callback(lambda task: self._done(key, task))

    def _done(self, key: int | object, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._node.fail(error if isinstance(error, Exception) else RuntimeError(error))

    def close(self) -> None:
        """Leave. Messages that were sent before still go out."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in [*self._tasks.values()]:
            task.cancel()
        for held in (*self._links.values(), self._listener):
            if held is not None:
                held.close()

    # Connections ------------------------------------------------------------------------------------------------------

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, as the callback of `asyncio.start_server(peers.accept, ..., limit=LONGEST)`."""
        # The event loop cancels this task at its end. Python 3.11 prints a traceback if this raises CancelledError
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(Link(reader, writer)) as link:
            number = self.meeting.new_link()
            self._links[number] = link
            self.take(events.Accepted(number, link.remote_ip, link.local_ip))
            await self._read(number, link, MEMBERS)

    async def _read(self, number: int, link: Link, forms: Mapping[str, Any]) -> None:
        why = ""
        try:
            while True:
                message = await link.receive(forms)
                if self._links.get(number) is not link:
                    break  # the meeting has closed it
                self.take(events.Heard(number, message))
        except ConnectionError:
            pass
        except ValueError as error:
            why = str(error)
        if self._links.get(number) is link:
            del self._links[number]
            link.close(at_once=bool(why))
            self.take(events.Ended(number, why))

    async def _dial(self, dial: events.Dial) -> None:
        try:
            host, port = dial.address or await self._master()
        except OSError as error:
            self.take(events.Failed(dial.link, str(error)))
            return
        try:
            link = await Link.connect(host, port, timeout_s=dial.timeout_s)
        except OSError as error:
            self.take(events.Failed(dial.link, explain(error, host, port), isinstance(error, ConnectionRefusedError)))
            return
        self._links[dial.link] = link
        self.take(events.Connected(dial.link, (link.remote_ip, port), link.local_ip))
        try:
            said: dict[str, Any] = {"token": "", "n": 0, "formed": 0, "running": False, "job": ""}
            said |= {**await greeting(link, read_secret(os.environ)), "is": "leader"}
        except (OSError, ValueError):
            said = {}
        if self._links.get(dial.link) is not link:
            return  # the meeting has closed it
        if fits(said, LEADERS["leader"]):
            self._shut_out = said["over"] == OTHER_SECRET
            self.take(events.Heard(dial.link, said))
            await self._read(dial.link, link, LEADERS)
        else:
            del self._links[dial.link]
            link.close()
            self.take(events.Ended(dial.link))

    # What takes time --------------------------------------------------------------------------------------------------

    async def _claim(self, job: str, n: int) -> None:
        self.take(events.Claimed(n, await self._node.claim(job, n)))

    async def _prepare(self, output: events.Prepare) -> None:
        try:
            more = await self._node.prepare(output.n, output.size, output.job, output.restarts)
        except Exception as error:  # without this, a bug of rankup would look like a hang
            code = error.code if isinstance(error, ExpectedError) else JOIN_FAILED
            self.take(events.Prepared(output.n, None, code, reason(error)))
        else:
            self.take(events.Prepared(output.n, more))

    async def try_route(self, n: int, route: tuple[str, int, str] | None) -> None:
        """Test the route to the next member: its IP address, port and name. Then tell the leader that this node is
        ready for membership `n`, and what failed, or ""."""
        problem = ""
        with contextlib.suppress(OSError):
            while self._listener is not None:  # drop connections of earlier tests, so that the backlog never fills
                self._listener.accept()[0].close()
        if route is not None:
            ip, port, name = route
            try:
                (await Link.connect(ip, port, timeout_s=ROUTE_S)).close()
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else "no answer"
                problem = f"{self.meeting.me.name} does not reach {name} at {ip}:{port} ({why})"
        self.send("ready", n=n, problem=problem)


def explain(error: OSError, host: str, port: int) -> str:
    """Return a clause that says why a connection failed and what such an error usually means."""
    address = f"{host}:{port}"
    if isinstance(error, socket.gaierror):
        return f'the name "{host}" does not resolve here ({error.strerror})'
    if isinstance(error, ConnectionRefusedError):
        own = ". A loopback address reaches only the machine itself" if is_loopback(host) else ""
        return (
            f"{address} refuses the connection: the machine answers, but nothing listens on that port (rank 0 not "
            f"started or already gone, or another port){own}"
        )
    if isinstance(error, TimeoutError):
        return f"{address} does not answer: a wrong address, a machine that is down, or a firewall that drops packets"
    return f"{address}: {os.strerror(error.errno) if error.errno else error}"
