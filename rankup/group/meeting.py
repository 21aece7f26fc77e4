"""Meeting the others: who belongs to the group, torch's store for its set-up, and the line over which losses come."""

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import resource
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

# torch exports them under a condition that mypy does not follow
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rankup.agent.attendance import HINT
from rankup.agent.logs import host_name
from rankup.agent.network import address_of, chosen_address, open_port
from rankup.agent.protocol import Member
from rankup.agent.record import RecordWriter
from rankup.env.addresses import is_loopback
from rankup.env.rank_env import RankEnv
from rankup.errors import JoinError, LaunchError
from rankup.group.line import AgentLine, Line, MemberLine
from rankup.places.files import write_atomically
from rankup.timing import CONNECT_S

LEADER = "rankup/leader"  # in the launcher's store: the port where the leader listens
SWITCH = Path("/etc/nsswitch.conf")  # where glibc reads who is asked for names
OTHER_FILES = 512  # that a process needs open beside the connections of its group

_lookups_lock = threading.Lock()
_without_lookups = 0  # how many blocks of `no_name_lookups` are entered just now, in all threads


@dataclass
class Meeting:
    """What comes of it. `hosts`: by rank. `attempt`: rank 0's. `restarted`: whether any rank's process is.
    `until_formed`: to be closed when the process group has been formed."""

    line: Line
    store: Store
    hosts: Sequence[str]
    attempt: str
    restarted: bool
    until_formed: contextlib.ExitStack


def meet(
    launch: RankEnv, *, settings: Mapping[str, str], attempt: str, timeout_s: float, log: logging.Logger,
    record: RecordWriter,
) -> Meeting:
    """Meet the other ranks. `settings`: what must be the same on all ranks, by name. `record`: of this rank.

    Raises JoinError (code 170) where they do not come together within `timeout_s`, naming who or what is missing, and
    UserError where they differ.
    """
    line: Line
    store: Store
    until_formed = contextlib.ExitStack()
    if launch.agent:
        line = AgentLine(launch.agent, launch.agent["local_rank"])
        commit = line.join()
        store = connect_store(commit["ip"], launch.master_port, timeout_s=timeout_s)
    else:
        if launch.rank == 0:
            log.info(f"waiting for {launch.world_size} ranks at {_address(launch)}")
        allow_connections(2 * launch.world_size)
        own = _Place(launch, attempt, timeout_s, log, until_formed)
        member = _member(launch, settings, timeout_s, host_name())
        line = MemberLine(member, settings, own, say=log.warning, record=record)
        commit = line.join()
        own.withdraw()
        store = own.open(commit)
    hosts = [host for host, count in commit["hosts"] for _ in range(count)]
    return Meeting(line, store, hosts, commit.get("attempt") or attempt, commit["restarts"] > 0, until_formed)


def _member(launch: RankEnv, settings: Mapping[str, str], timeout_s: float, host: str) -> Member:
    return Member(
        token=secrets.token_hex(8), first_rank=launch.rank, num_ranks=1, world_size=launch.world_size, host=host,
        pid=os.getpid(), digest=digest(settings), left_s=timeout_s, restarts=launch.restart_count,
        ip=chosen_address(os.environ), local_world_size=launch.local_world_size or 0,
    )


def digest(settings: Mapping[str, str]) -> str:
    """Of what must be the same on all ranks."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]


def _address(launch: RankEnv) -> str:
    return launch.file or f"{launch.master_addr}:{launch.master_port}"


class _Place:
    """Where ranks without an agent meet: at the master's port, or where the launcher's store or a file says."""

    def __init__(
        self, launch: RankEnv, attempt: str, timeout_s: float, log: logging.Logger, until_formed: contextlib.ExitStack
    ) -> None:
        self.until_formed = until_formed
        self.launch, self.attempt, self.timeout_s, self.log = launch, attempt, timeout_s, log
        self._store: Store | None = None  # torch's, where this rank serves it
        self.file = Path(launch.file) if launch.file else None
        self._board: Store | None = None  # the launcher's store
        self._published = ""
        if launch.agent_store:
            # It outlives its ranks, whose agents may count restarts differently: the newest leader stands there
            ip = _address_behind(launch.master_addr, launch.master_port)
            self._board = connect_store(ip, launch.master_port, timeout_s=timeout_s)
        self.port = 0 if self.file or self._board else launch.master_port
        # With all ranks on this machine nobody else needs to come in
        alone = launch.master_addr == "127.0.0.1" and launch.local_world_size == launch.world_size
        self.ip = "127.0.0.1" if alone and not self.file else ""
        self.master = launch.master_addr if self.port else ""
        self.hint = "All ranks have to name the same file." if self.file else HINT

    def find(self) -> tuple[str, int]:
        """Raises OSError where the leader has not said where it is, and LaunchError for a file of somebody else."""
        if self.file:
            found = read_place(self.file)
            if found is None:
                raise ConnectionError(f"rank 0 has not left its address in {self.file}")
            return found
        if self._board is not None:
            try:
                self._board.wait([LEADER], timedelta(seconds=CONNECT_S))
                return self.launch.master_addr, int(self._board.get(LEADER))
            except RuntimeError:
                raise ConnectionError(f"nothing was heard from rank 0 at {_address(self.launch)}") from None
        return self.launch.master_addr, self.launch.master_port

    def publish(self, port: int) -> None:
        """On rank 0. Raises LaunchError for a file of somebody else, JoinError for one in use."""
        if self._board is not None:
            self._board.set(LEADER, str(port))
        elif self.file:
            if (found := read_place(self.file)) is not None:
                with contextlib.suppress(OSError), socket.create_connection(found, timeout=CONNECT_S):
                    raise JoinError(f"{self.file} is in use by another job. Name another file, or end that job.")
                self.log.info(f"{self.file} was left by an earlier run that did not come together: replaced")
            reached = [ip for name in psutil.net_if_addrs() if (ip := address_of(name)) and not is_loopback(ip)]
            self._published = json.dumps({"rankup": [(reached or ["127.0.0.1"])[0], port]})
            write_atomically(self.file, self._published)

    def withdraw(self) -> None:
        """All have met: nobody needs the file any more."""
        with contextlib.suppress(OSError):
            if self.file and self._published and self.file.read_text() == self._published:
                self.file.unlink()

    def serve(self) -> Mapping[str, Any]:
        """On rank 0: start torch's store where no launcher has one. Returns what all ranks need to know."""
        port = 0
        if self._board is None:
            self._store = self.until_formed.enter_context(start_store(self.ip, timeout_s=self.timeout_s))
            port = self._store.port
        return {"store": port, "token": secrets.token_hex(8), "attempt": self.attempt}

    def open(self, commit: Mapping[str, Any]) -> Store:
        """The store that the commit names."""
        if self._board is not None:
            return PrefixStore(f"rankup/{commit['token']}", self._board)
        return self._store or connect_store(commit["ip"], commit["store"], timeout_s=self.timeout_s)


def read_place(file: Path) -> tuple[str, int] | None:
    """What rank 0 left there; None for no file, and for an empty one, as mktemp makes it. Raises LaunchError where it
    is somebody else's, OSError where it can't be read."""
    try:
        text = file.read_text(errors="replace")
    except FileNotFoundError:
        return None
    try:
        ip, port = json.loads(text)["rankup"]
        return str(ip), int(port)
    except (KeyError, TypeError, ValueError):
        if not text:
            return None
        raise LaunchError(
            f"--init-method: {file} must be a new file, got one that holds something else. Name another."
        ) from None


# torch's store, and what it asks of the operating system --------------------------------------------------------------


@contextlib.contextmanager
def start_store(ip: str, *, timeout_s: float) -> Iterator[TCPStore]:
    """On a port that the system picks; `ip`: "" for all addresses. It goes on when the block ends, which must not be
    before all clients have come: until then this process looks up no names. `timeout_s`: of its own requests."""
    listener = open_port(ip, 0)
    port = listener.getsockname()[1]
    with no_name_lookups():
        yield _store("127.0.0.1", port, timeout_s, is_master=True, master_listen_fd=listener.detach())


def _address_behind(host: str, port: int) -> str:
    """The address of what listens there; `host` where nothing does. A store that connects asks no resolver for it."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_S) as found:
        return str(found.getpeername()[0])
    return host


def connect_store(ip: str, port: int, *, timeout_s: float) -> TCPStore:
    """Raises RuntimeError where what answers is no store. Waits without end for what accepts and never answers."""
    with no_name_lookups():
        return _store(ip, port, timeout_s)


def _store(ip: str, port: int, timeout_s: float, **more: Any) -> TCPStore:
    use_libuv = os.environ.get("USE_LIBUV", "1") == "1"  # torch's own variable, for builds without it
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(ip, port, timeout=timeout, wait_for_workers=False, use_libuv=use_libuv, **more)


@contextlib.contextmanager
def no_name_lookups() -> Iterator[None]:
    """Within the block no resolver is asked for names, in all threads of this process: /etc/hosts alone answers.

    torch asks for the name of both ends of each connection of a store, only to print it: the client twice, the server
    once, in its one thread, so that all ranks wait for each answer. With a resolver that takes 5 s to say that it does
    not know the address, 16 ranks took minutes to meet. torch has no setting for that, but glibc lets a program
    replace the line of nsswitch.conf. Blocks may overlap. Elsewhere than with glibc (musl, macOS) nothing changes.
    """
    _count_without_lookups(1)
    try:
        yield
    finally:
        _count_without_lookups(-1)


def _count_without_lookups(change: int) -> None:
    global _without_lookups
    with _lookups_lock:
        before, _without_lookups = _without_lookups, _without_lookups + change
        if (before == 0) != (_without_lookups == 0):
            _ask_for_names("files" if _without_lookups else _configured_services())


def _ask_for_names(services: str) -> None:
    """Have glibc look up hosts by these services, in the words of nsswitch.conf."""
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", services.encode())


def _configured_services() -> str:
    """The services that the system looks hosts up by; glibc's own choice where nothing is configured."""
    with contextlib.suppress(OSError):
        for line in SWITCH.read_text().splitlines():
            database, colon, services = line.partition("#")[0].partition(":")
            if colon and database.strip() == "hosts" and services.strip():
                return services.strip()
    return "files dns"


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files so far that it can hold `count` connections, where the system lets us.

    Most systems allow 1,024 at first and many times that if asked: rank 0 holds several connections of each rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
