"""A member's side of the meeting: find the leader, try the route to the next member, hear what is decided."""

import asyncio
import contextlib
import errno
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict, replace
from typing import Any

from rankup import timing
from rankup.agent.network import Link, greeting, interface_of, open_port, read_secret
from rankup.agent.protocol import KILLED, LEADERS, VERSION, Member, fits
from rankup.agent.record import Record
from rankup.agent.votes import NONE, Basis, age
from rankup.env.rank_env import is_loopback
from rankup.errors import JoinError

CROWD = 8  # a job with more ranks tries less often: one machine takes all connections
HINT = "MASTER_ADDR and MASTER_PORT have to name the machine and port of rank 0 on all ranks."
NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)


class Attendance:
    """This member's connection to the leader, made again while there is time.

    `problem`: why there is no membership yet. `n`: the last membership that was heard of.
    """

    def __init__(
        self, me: Member, find_leader: Callable[[], Awaitable[tuple[str, int]]], *,
        notice: Callable[[str], None], clock: Callable[[], float] = time.monotonic,
        records: Callable[[], Mapping[int, Record]] = dict, hint: str = HINT, silent_s: float = timing.SILENT_S,
        commit: Mapping[str, Any] | None = None, warm: Callable[[], bool] = lambda: True,
    ) -> None:
        """`find_leader`: host and port, which may change from one call to the next; an OSError says why there is none
        yet. `notice`: prints a line, every NOTICE_S, that says what is waited for. `records`: of those of
        this member's ranks that run, by rank. `hint`: what has to be right, for the message of a failure.
        `silent_s`: the leader is lost where it gives no sign of life for so long. `commit`: the form of what it says
        besides as it commits. `warm`: whether this member's ranks would start without a wait for imports."""
        self.basis: Basis = NONE
        self._silent_s, self._commit, self._warm = silent_s, dict(commit or {}), warm
        self._records, self._hint = records, hint
        self.me, self._find_leader, self._notice, self._clock = me, find_leader, notice, clock
        self.problem, self.n = "nothing was heard from rank 0", 0
        self._until_s = math.inf  # when the time to find a leader is over; endless in a membership
        self._heard_s = self._noticed_s = clock()
        self._link: Link | None = None
        self._leader, self.at = "", list[Any]()  # where it was found; as host and port while this is a member
        self._chosen_ip, self._cannot_listen = me.ip, ""
        self._listener: socket.socket | None = None
        self._route: asyncio.Task[str] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def say(self, kind: str, **values: Any) -> bool:
        """To the leader. Returns False where there is none just now."""
        if self._link is not None:
            self._link.send(kind, **values)
        return self._link is not None

    def ready(self, n: int, *, mistake: str = "") -> None:
        """This member's ranks are gone, and it can be in membership `n`. Returns at once; the leader is told when the
        route to the next member has been tried, which began when the proposal came. `mistake`: of the user, why it
        can't be in any."""
        if self._link is not None and self._route is not None and n == self.n:
            self._start(self._say_ready(self._link, n, self._route, mistake))

    async def attend(self, hear: Callable[[dict[str, Any]], object]) -> None:
        """Be a member until `hear` returns something true. It gets what the leader decides: propose, commit, lost,
        refused, and all that its `tell` says; "gone" (with `why`) where the leader is lost itself. It is then looked
        for again.

        Raises JoinError where no leader answers `me.left_s` after the start, or after the last membership was lost. One
        that answers knows better how long to wait, and who is missing.
        """
        self._until_s = self._clock() + self.me.left_s
        try:
            while True:
                link = await self._connect()
                watch = self._start(self._watch(link))
                while (message := await self._next(link)) is not None:
                    if self._take(link, message) and hear(message):
                        return
                lost = {"why": watch.result()} if watch.done() else {"why": "its process has ended", "code": KILLED}
                watch.cancel()
                link.close()
                self._link, self.at = None, []
                if self._clock() > self._until_s:
                    if (silent_s := self._clock() - self._heard_s) > timing.BUSY_S:
                        self.problem = (
                            f"rank 0 at {self._leader} has said nothing for {silent_s:.0f} s: its process is stopped, "
                            "or the network between is cut"
                        )
                    raise self._failure()
                self._leave_membership()
                if hear({"is": "gone", **lost}):
                    return
                await asyncio.sleep(timing.PAUSE_S)
        finally:
            self.close()

    async def _next(self, link: Link) -> dict[str, Any] | None:
        """The leader's next message, None where there will be none."""
        with contextlib.suppress(ConnectionError):
            message = await link.receive()
            if fits(message, LEADERS.get(message["is"], {}) | (self._commit if message["is"] == "commit" else {})):
                self._heard_s = self._clock()
                return message
        return None

    def close(self) -> None:
        """Leave. What was said still goes out."""
        for task in self._tasks:
            task.cancel()
        for held in (self._link, self._listener):
            if held is not None:
                held.close()

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _take(self, link: Link, message: dict[str, Any]) -> bool:
        """Do what the meeting needs. Returns whether the message is for others too."""
        kind = message["is"]
        if kind == "waiting":
            self.problem = message["text"]
            self._notice(f"still waiting: {self.problem}")
        elif kind == "propose":
            self.n, self.basis = message["n"], message.get("basis") or self.basis
            if self._route is not None:
                self._route.cancel()
            self._route = self._start(self._try_route(message.get("next")))
        elif kind in ("commit", "spare", "basis"):
            self._until_s = self._until_s if kind == "basis" else math.inf
            basis = message.get("basis") or self.basis
            if age(basis) >= age(self.basis):  # else a newer one is proposed already
                self.basis = basis
            if message.get("basis"):
                link.send("has", n=self.basis["n"], v=self.basis["v"])
        elif kind == "refused":  # leave, but not before the others have heard it from a leader in this process
            self._until_s = self._clock()
        elif kind == "lost":
            self._leave_membership()
        elif kind == "prepare":
            begun = [record.ask_to_stop(message["stop"]) for record in self._records().values()]
            link.send("standing", n=message["n"], stop=message["stop"], step=max(begun, default=-1))
        elif kind == "confirm":
            for record in self._records().values():
                record.confirmed = message["stop"]
            self._start(self._look_at_stop(link, message["n"]))
        return kind not in ("alive", "waiting", "prepare", "confirm")

    async def _look_at_stop(self, link: Link, n: int) -> None:
        """Say so where a rank does not come to where all are to stop."""
        await asyncio.sleep(timing.REACH_S)
        if not all(record.settled for record in self._records().values()):
            link.send("late", n=n)

    def _leave_membership(self) -> None:
        if self._until_s == math.inf:
            self._until_s = self._clock() + self.me.left_s

    def _failure(self) -> JoinError:
        who = self.me.name.replace(" on ", f" of {self.me.world_size} on ", 1)
        text = f"{who} could not join within {self.me.left_s:g} s: {self.problem}. {self._hint}"
        return JoinError(text)

    # The connection -----------------------------------------------------------------------------------------------

    async def _connect(self) -> Link:
        crowd, begun_s, refused = min(10.0, max(1.0, self.me.world_size / CROWD)), self._clock(), ""
        while True:
            try:
                host, port = await self._find_leader()
            except OSError as error:
                self.problem = str(error)
            else:
                try:
                    return await self._introduce(host, port)
                except _NoLeaderError as error:
                    self.problem = str(error)
                except OSError as error:
                    now = explain(error, host, port)
                    # When rank 0 gives up, its container goes, and with it the name: the refusal was the cause
                    refused = now if isinstance(error, ConnectionRefusedError) else refused
                    self.problem = f"{refused}. By now {now}" if refused and refused != now else now
            now_s = self._clock()
            if now_s > self._until_s:
                raise self._failure()
            if now_s - self._noticed_s >= timing.NOTICE_S:
                self._noticed_s = now_s
                self._notice(f"still waiting: {self.problem}")
            await asyncio.sleep(crowd * (timing.EARLY_PAUSE_S if now_s - begun_s < timing.EARLY_S else timing.PAUSE_S))

    async def _introduce(self, host: str, port: int) -> Link:
        """Raises OSError where nothing is reached, and _NoLeaderError where that is no leader who takes members."""
        secret = read_secret(os.environ)
        link = await Link.connect(host, port)
        try:
            async with asyncio.timeout(min(timing.HELLO_S, max(1.0, self._until_s - self._clock()))):
                over = str((await greeting(link, secret))["over"])
        except asyncio.CancelledError:
            link.close()
            raise
        except (OSError, LookupError):
            over = (
                f"something accepts connections at {host}:{port} but does not answer as a rendezvous store: another "
                "service holds the port, the machine is the wrong one, or the process of rank 0 is stopped"
            )
        if over:
            link.close()
            raise _NoLeaderError(over)
        self._listen(self._chosen_ip or link.local_ip)
        link.send("hello", **asdict(self.me), version=VERSION, n=self.n, basis=self.basis, warm=self._warm())
        self._link, self._heard_s = link, self._clock()
        self._leader, self.at = f"{host}:{port}", [link.remote_ip, port]
        self.problem = f"rank 0 at {self._leader} is still waiting for others"
        return link

    async def _watch(self, link: Link) -> str:
        """Give signs of life, until the leader gives none. Returns why it is given up."""
        looked_s = self._clock()
        while True:
            signs = [record.read().sign() for record in self._records().values()]
            link.send("alive", ranks=signs, warm=self._warm())
            await asyncio.sleep(timing.ALIVE_S)
            now_s = self._clock()
            if now_s - looked_s > timing.ALIVE_S + min(timing.FROZEN_S - timing.ALIVE_S, self._silent_s / 2):
                self._heard_s = now_s
            looked_s, silent_s = now_s, now_s - self._heard_s
            is_over = now_s > self._until_s + timing.LAST_WORD_S and silent_s > timing.BUSY_S
            if silent_s > self._silent_s or is_over:
                link.close(at_once=True)
                return f"gave no sign of life for {silent_s:.0f} s"

    # The route to the next member ---------------------------------------------------------------------------------

    def _listen(self, ip: str) -> None:
        """Listen as gloo will, on the own address; beside the leader, which one that is is known only later.

        Nobody accepts: the kernel completes connections by itself, and not one byte of a stranger is read.
        """
        if self._listener is not None:
            if ip == self.me.ip:
                return
            self._listener.close()
        alone = self.me.num_ranks == self.me.world_size  # nobody tries the way to it
        at = "" if is_loopback(ip) and not alone else ip
        port, self._listener, self._cannot_listen = 0, None, ""
        try:
            self._listener = open_port(at, 0, backlog=128)
            self._listener.setblocking(False)
            port = self._listener.getsockname()[1]
        except OSError as error:
            self._cannot_listen = f"{self.me.name} can't listen on {ip} ({error.strerror})"
        self.me = replace(self.me, ip=ip, port=port, interface=interface_of(ip))

    async def _try_route(self, to: list[Any] | None) -> str:
        """The problem with it, or ""."""
        if self._listener is None:
            return self._cannot_listen
        with contextlib.suppress(OSError):
            while True:  # drop what was completed for earlier memberships: the queue must not fill
                self._listener.accept()[0].close()
        if to is None:
            return ""
        ip, port, name, interface = to
        try:
            (await Link.connect(ip, port, timeout_s=timing.ROUTE_S)).close()
            return ""
        except TimeoutError:
            what = "got no answer from"
        except ConnectionRefusedError:
            what = "was refused by"
        except OSError as error:
            what = "has no route to" if error.errno in NO_ROUTE else f"failed ({error}) to connect to"
        there = f" (interface {interface} there)" if interface else ""
        return f"{self.me.name} {what} {name} at {ip}:{port}{there}"

    async def _say_ready(self, link: Link, n: int, route: "asyncio.Task[str]", mistake: str) -> None:
        link.send("ready", n=n, problem="" if mistake else await route, mistake=mistake)


class _NoLeaderError(OSError):
    """What answers there takes no members."""


def explain(error: OSError, host: str, port: int) -> str:
    """Why a connection failed, and what that usually means; one clause."""
    address, detail = f"{host}:{port}", error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return f'the name "{host}" does not resolve here ({detail})'
    if isinstance(error, ConnectionRefusedError):
        own = ". A loopback address is each machine itself" if is_loopback(host) else ""
        return (
            f"{address} refuses the connection: the machine answers, but nothing listens on that port (rank 0 not "
            f"started or already gone, or another port){own}"
        )
    if isinstance(error, TimeoutError):
        return f"{address} does not answer: a wrong address, a machine that is down, or a firewall that drops packets"
    return f"no route to {host} ({detail})" if error.errno in NO_ROUTE else f"{address}: {detail}"
