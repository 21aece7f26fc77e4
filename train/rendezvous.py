"""Joining: who is there, who is missing, and why, all within one deadline of our own.

torch's own text is the same for a wrong address, a closed port and a peer that never started, it waits up to five
times as long on one side, and a foreign service on the port makes its client wait for ever. So every rank first
meets the others in a store, by name: rank 0 reads the roster, judges it, and tells all.
"""

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

# torch exports these under a condition that mypy does not follow
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from train.env import Launch
from train.errors import FAULT, JOIN_FAILED, USER_MISTAKE, JoinError, LaunchError, Stopped, UserError
from train.log import Log
from train.network import explain_connection, is_own_address, port_holder, try_connect
from train.stop import StopRequest

POLL_S = 0.1
# Two processes with one rank are told from a rank that died while joining and came back by whether the first
# still shows signs of life.
LIFE_SIGN_S = 2.0
PORT_PATIENCE_S = 5.0  # the process of the last attempt may still be on its way out


@dataclass(frozen=True, slots=True)
class Member:
    """One rank as it introduces itself. `local_ip` is its address on the route to the master."""

    rank: int
    world_size: int
    host: str
    pid: int
    local_ip: str
    master_ip: str
    token: str
    traits: dict[str, str]  # what has to be the same on all ranks: versions, code, settings

    @property
    def place(self) -> str:
        return f"{self.host} (pid {self.pid})"


@dataclass(slots=True)
class Meeting:
    """The outcome of joining: a store private to this attempt, and the members in the order of their ranks."""

    store: Store
    beat_store: Store  # a connection of its own: one client serves one thread at a time
    members: list[Member]
    attempt: str
    hosts_store: bool
    raw: Store = field(repr=False)


def meet(
    launch: Launch, *, traits: Mapping[str, str], attempt: str, timeout_s: float, stop: StopRequest, log: Log
) -> Meeting:
    """Join the group, or say who and what is missing.

    Raises JoinError (code 170) once `timeout_s` has passed or rank 0 found the roster impossible, LaunchError where the
    port can't be used, Stopped on a signal.
    """
    deadline_s = time.monotonic() + timeout_s
    hosts_store = launch.rank == 0 and not launch.agent_store
    if launch.rank == 0:
        log.say(f"waiting for {launch.world_size} ranks at {launch.master_addr}:{launch.master_port}")
    join = _Join(launch, dict(traits), attempt, timeout_s, deadline_s, stop, log)
    server = join.serve() if hosts_store else None
    while True:
        try:
            return join.once(server)
        except (RuntimeError, ConnectionError) as error:
            # The store went away: its process is ending after an earlier attempt, or died while joining. Try again.
            if isinstance(error, JoinError):
                raise
            join.last_problem = f"the store at {join.address} closed the connection ({_first_line(error)})"
            join.pause()


class _Join:
    def __init__(
        self, launch: Launch, traits: dict[str, str], attempt: str, timeout_s: float, deadline_s: float,
        stop: StopRequest, log: Log,
    ) -> None:  # fmt: skip
        self.launch, self.traits, self.attempt = launch, traits, attempt
        self.timeout_s, self.deadline_s, self.stop, self.log = timeout_s, deadline_s, stop, log
        self.address = f"{launch.master_addr}:{launch.master_port}"
        self.last_problem = ""
        self.token = secrets.token_hex(6)
        self.prefix = f"rankup/{launch.restart_count}"  # an agent's store outlives the attempt

    def serve(self) -> TCPStore:
        """Open the port and start the store. Raises LaunchError, naming who holds the port."""
        port = self.launch.master_port
        until_s = min(self.deadline_s, time.monotonic() + PORT_PATIENCE_S)
        while True:
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                listener.bind(("", port))
                listener.listen(4096)
                break
            except OSError as error:
                listener.close()
                if error.errno == errno.EADDRINUSE and time.monotonic() < until_s:
                    self.pause()
                    continue
                raise self._port_problem(error) from None
        if not is_own_address(self.launch.master_addr):
            self.log.warn(
                f"MASTER_ADDR={self.launch.master_addr} is no address of this machine ({self.log.host}), where rank 0 "
                "runs and listens. Right behind a Service or NAT, a mistake elsewhere."
            )
        return TCPStore(
            "localhost", port, None, True, timedelta(seconds=self.timeout_s),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip

    def _port_problem(self, error: OSError) -> Exception:
        port = self.launch.master_port
        if error.errno == errno.EADDRINUSE:
            holder = port_holder(port)
            return JoinError(
                f"MASTER_PORT={port} is in use on {self.log.host}{f' by {holder}' if holder else ''}: another job, one "
                "that has not ended, or a second process with RANK=0. End it, or set another MASTER_PORT on all ranks."
            )
        return LaunchError(f"MASTER_PORT={port} can't be opened: {error.strerror}. Choose one from 1024 to 32767.")

    def once(self, server: TCPStore | None) -> Meeting:
        raw, local_ip, master_ip = (server, "", "") if server is not None else self._connect()
        launch = self.launch
        store = PrefixStore(self.prefix, raw)
        me = Member(
            rank=launch.rank, world_size=launch.world_size, host=self.log.host, pid=os.getpid(), local_ip=local_ip,
            master_ip=master_ip, token=self.token, traits=self.traits,
        )  # fmt: skip
        if store.check(["joined"]) and server is None:
            # The store of an attempt that is under way or ending: this rank belongs to the next one.
            raise RuntimeError("the group there is already complete")
        store.append("roster", json.dumps(asdict(me)) + "\n")  # type: ignore[attr-defined]
        while True:
            store.add(f"alive/{me.token}", 1)
            if store.check(["abort"]):
                verdict = json.loads(store.get("abort"))
                raise _error_of(verdict)
            if store.check(["joined"]):
                joined = json.loads(store.get("joined"))
                members = [Member(**m) for m in joined["members"]]
                if members[me.rank].token != me.token:
                    raise RuntimeError("the group there was completed without this rank")
                private = PrefixStore(f"{self.prefix}/{joined['attempt']}", raw)
                beats = PrefixStore(f"{self.prefix}/{joined['attempt']}", raw.clone())
                return Meeting(private, beats, members, joined["attempt"], server is not None, raw)
            if launch.rank == 0 and (complete := self._judge(store)) is not None:
                store.set("joined", json.dumps({"attempt": self.attempt, "members": [asdict(m) for m in complete]}))
                continue
            if time.monotonic() > self.deadline_s:
                self._give_up(store)
            self.pause()

    def _judge(self, store: Store) -> list[Member] | None:
        """Rank 0's look at the roster: the members in order once it is complete and consistent, else None."""
        by_rank: dict[int, Member] = {}
        for member in _roster(store):
            earlier = by_rank.get(member.rank)
            if earlier is not None and self._alive(store, earlier):
                self._abort(
                    store,
                    f"rank {member.rank} was claimed twice: by {earlier.place} and by {member.place}. "
                    "Give each process a RANK of its own, 0 to WORLD_SIZE-1.",
                )
            by_rank[member.rank] = member
        for member in by_rank.values():
            if member.world_size != self.launch.world_size:
                self._abort(
                    store,
                    f"rank {member.rank} on {member.place} was started with WORLD_SIZE={member.world_size}, rank 0 on "
                    f"{self.log.host} with WORLD_SIZE={self.launch.world_size}. Set the same on all ranks.",
                )
        if len(by_rank) < self.launch.world_size:
            return None
        members = [by_rank[rank] for rank in range(self.launch.world_size)]
        if differences := _differences(members):
            self._abort(store, differences, code=USER_MISTAKE)
        return members

    def _alive(self, store: Store, member: Member) -> bool:
        before = store.add(f"alive/{member.token}", 0)
        until_s = time.monotonic() + LIFE_SIGN_S
        while time.monotonic() < until_s:
            if store.add(f"alive/{member.token}", 0) != before:
                return True
            time.sleep(POLL_S)
        return False

    def _abort(self, store: Store, text: str, *, code: int = JOIN_FAILED) -> None:
        """Tell all ranks why there will be no group, give them time to read it, and raise it here too."""
        verdict = {"code": code, "text": text}
        store.set("abort", json.dumps(verdict))
        time.sleep(1.0)  # this process hosts the store: the others poll it ten times a second
        raise _error_of(verdict)

    def _give_up(self, store: Store) -> None:
        present = {m.rank: m for m in _roster(store)}
        missing = [rank for rank in range(self.launch.world_size) if rank not in present]
        text = _missing_text(missing, list(present.values()), self.launch.world_size, self.timeout_s)
        if self.launch.rank == 0:
            self._abort(store, text)
        raise JoinError(text)

    def _connect(self) -> tuple[TCPStore, str, str]:
        """A client of the master's store, our address on the way there, and the address that answered.

        Name, port and store may all come up after us (a Service in Kubernetes, a container started later): each is tried
        again until the deadline, and the last problem is what the message says.
        """
        launch = self.launch
        while True:
            attempt = try_connect(launch.master_addr, launch.master_port, timeout_s=2.0)
            if attempt.problem is None:
                store = self._client()
                if store is not None:
                    return store, attempt.local_ip, attempt.master_ip
                self.last_problem = (
                    f"something answers at {self.address} but it is no rendezvous store: another service holds the port, "
                    "or the machine is the wrong one"
                )
            else:
                self.last_problem = explain_connection(attempt, launch.master_addr, launch.master_port)
            if time.monotonic() > self.deadline_s:
                raise JoinError(
                    f"rank {launch.rank} of {launch.world_size} on {self.log.host} could not reach rank 0 within "
                    f"{self.timeout_s:g} s: {self.last_problem}. MASTER_ADDR and MASTER_PORT have to name the machine and "
                    "port of rank 0 on all ranks."
                )
            self.pause()

    def _client(self) -> TCPStore | None:
        """Connect in a thread: against a foreign service the handshake is read without any deadline."""
        made: list[TCPStore] = []
        launch = self.launch
        remaining_s = max(1.0, self.deadline_s - time.monotonic())
        remaining = timedelta(seconds=remaining_s)

        def connect() -> None:
            with contextlib.suppress(RuntimeError):
                made.append(
                    TCPStore(launch.master_addr, launch.master_port, None, False, remaining, wait_for_workers=False)
                )

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        until_s = time.monotonic() + remaining_s
        while thread.is_alive() and time.monotonic() < until_s:
            thread.join(POLL_S)
            self._check_stop()
        return made[0] if made else None

    def _check_stop(self) -> None:
        if self.stop.asked:
            raise Stopped(f"{self.stop.signal_name} while joining: nothing to save")

    def pause(self) -> None:
        self._check_stop()
        if time.monotonic() > self.deadline_s + 2.0:
            raise JoinError(f"rank {self.launch.rank} could not join within {self.timeout_s:g} s: {self.last_problem}.")
        time.sleep(POLL_S)


def _roster(store: Store) -> list[Member]:
    lines = store.get("roster").decode().splitlines() if store.check(["roster"]) else []
    latest: dict[str, Member] = {}
    for line in lines:
        member = Member(**json.loads(line))
        latest[member.token] = member  # a rank that had to reconnect introduces itself again
    return list(latest.values())


def _error_of(verdict: Mapping[str, Any]) -> Exception:
    kinds: dict[int, Callable[[str], Exception]] = {USER_MISTAKE: UserError, FAULT: RuntimeError}
    return kinds.get(verdict["code"], JoinError)(verdict["text"])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _differences(members: list[Member]) -> str:
    """What differs between rank 0 and others, or "". Different code or settings end in garbage, not in an error:
    an all-reduce of different sizes returned wrong numbers on one rank without a word."""
    first = members[0]
    found = [
        f"{name} must be the same on all ranks, got {first.traits.get(name)} on rank 0 ({first.host}) and "
        f"{member.traits.get(name)} on rank {member.rank} ({member.host})."
        for member in members[1:]
        for name in sorted(first.traits.keys() | member.traits.keys())
        if member.traits.get(name) != first.traits.get(name)
    ]
    return "\n".join(found[:8])


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 4, 6, 7] -> "0-2, 4, 6-7"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _missing_text(missing: list[int], present: list[Member], world_size: int, timeout_s: float) -> str:
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {ranges(missing)}"
    by_host: dict[str, list[int]] = {}
    for member in present:
        by_host.setdefault(member.host, []).append(member.rank)
    joined = "; ".join(f"{ranges(ranks)} on {host}" for host, ranks in sorted(by_host.items()))
    return (
        f"{who} of {world_size} {'has' if len(missing) == 1 else 'have'} not joined after {timeout_s:g} s "
        f"(joined: {joined or 'none'}). Was every process started, with this MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
    )
