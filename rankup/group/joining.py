"""Joining the group: the device and torch's backend of this rank, and the steps that lead to all ranks being one.

Agents have met before they start ranks. Ranks that another launcher started meet here: each is a member itself, and
rank 0 leads.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import hashlib
import json
import logging
import math
import os
import queue
import re
import resource
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

# torch exports them under a condition that mypy does not follow
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

import rankup
from rankup.agent.ends import StatusFile
from rankup.agent.logs import host_name
from rankup.agent.network import address_of, chosen_address, in_thread, interface_variables, listen, open_port
from rankup.agent.protocol import HINT, Member
from rankup.agent.record import Record
from rankup.env.rank_env import RankEnv, is_loopback
from rankup.errors import FINISHED, PEER_LOST, USER_MISTAKE, JoinError, UserError
from rankup.group.group import Group
from rankup.group.stop import StopRequest
from rankup.group.watchdog import AgentLine, Watchdog, describe
from rankup.places.files import write_atomically
from rankup.timing import BEHIND_OURS_S, CONNECT_S, FORM_S, SAY_S, WATCHDOG_LATER_S

if TYPE_CHECKING:  # ranks of an agent do without these
    from rankup.agent.attendance import Attendance
    from rankup.agent.meeting import Leader

LEADER = "rankup/leader"  # in the launcher's store: the port where the leader listens
SWITCH = Path("/etc/nsswitch.conf")  # where glibc reads who is asked for names


# A digest of the files as they are imported, not as they are when ranks meet: a rank may be forked from a process that
# has imported them days ago
VERSION = hashlib.sha256(b"".join(
    file.read_bytes() for folder in rankup.__path__ for file in sorted(Path(folder).rglob("*.py"))
)).hexdigest()[:12]


def start(
    launch: RankEnv, *, settings: Mapping[str, str], device: str | None, status: StatusFile, stop: StopRequest,
    log: logging.Logger,
) -> Group:
    """A group of which only this rank is known yet. For the arguments see `Program.join`."""
    if not faulthandler.is_enabled():  # a crash in C++ then leaves the line of Python that it came from in the log
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # no stderr with a file behind it
            faulthandler.enable()
    record = Record.at(launch.agent["record"]) if launch.agent else Record.new(launch.rank)
    watch = Watchdog(status, stop, record=record, log=log)
    group = Group(launch, pick_device(device, launch.local_rank), watch)
    group.backend = pick_backend(group.device)
    group.settings = {"torch version": torch.__version__, "rankup code": VERSION, "backend": group.backend, **settings}
    status.write_summary([])
    return group


def pick_device(wanted: str | None, local_rank: int) -> torch.device:
    """The device of this rank: None takes the accelerator if there is one, else the CPU. Raises UserError."""
    found = None if wanted == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    kind, _, index = (wanted or (found.type if found else "cpu")).partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if found is None or kind != found.type:
        raise UserError(f'device must be one this machine has, got "{wanted}". Use --device auto or cpu.')
    count = torch.accelerator.device_count()
    number = int(index) if index else local_rank
    if number >= count:
        # Slurm's --gpus-per-task=1 shows each task one device, numbered 0. Two ranks on one device are found later.
        if count > 1 or index:
            raise UserError(
                f"local rank {local_rank} must have a device of its own, got {count} visible {kind} devices. Start at "
                f"most {count} processes on this node, or look at CUDA_VISIBLE_DEVICES."
            )
        number = 0
    torch.accelerator.set_device_index(number)
    return torch.device(kind, number)


def pick_backend(device: torch.device) -> str:
    """gloo for host memory always, beside the device's own: flags and checkpoints travel without the device."""
    own = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device)
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


# The steps -----------------------------------------------------------------------------------------------------------


def join(group: Group, *, timeout_s: float, longest_phase_s: float) -> None:
    """All of them. For the arguments, and what it raises, see `Program.join`."""
    meet(group, timeout_s=timeout_s)
    form(group, timeout_s=timeout_s, longest_phase_s=longest_phase_s)
    check_settings(group)
    check_devices(group)


def meet(group: Group, *, timeout_s: float) -> None:
    """First step: find the others, and begin to watch each other. Raises JoinError naming who is missing or what is in
    the way, and UserError where ranks differ or the port cannot be used."""
    group.watch.enter("join", timeout_s + WATCHDOG_LATER_S)
    line: Any
    if (agent := group.launch.agent) is not None:
        commit = agent["commit"]
        line = AgentLine(agent, group.watch.hear, group.stop)
        group.store = connect_store(commit["ip"], commit["port"], timeout_s=timeout_s)
    else:
        line = MemberLine(group, timeout_s=timeout_s)
        commit = line.join()
        group.store, group.status.attempt = line.open_store(commit), commit["job"]
    group.hosts = [host for host, count in commit["hosts"] for _ in range(count)]
    group.restarted = commit["restarts"] > 0
    group.watch.connect(line, group.hosts)


def form(group: Group, *, timeout_s: float, longest_phase_s: float) -> None:
    """Second step: torch's process group, with gloo for host memory always. Raises JoinError and PeerLost."""
    # All reached each other a moment ago: what is left takes seconds, unless a rank has just died, which gloo waits for
    form_s = min(timeout_s, FORM_S + group.world_size / 10)
    group.watch.enter("join", form_s + WATCHDOG_LATER_S)
    timeout = timedelta(seconds=longest_phase_s + BEHIND_OURS_S)
    # So far it was what was left of the time to join; nccl waits with it for the id that it exchanges at the first step
    group.store.set_timeout(timeout)
    try:
        dist.init_process_group(
            group.backend, store=group.store, rank=group.rank, world_size=group.world_size, timeout=timeout
        )
        # It uses each connection of gloo's that a step uses. gloo takes whoever sends the right number for the
        # peer that it waits for; a peer whose place is taken waits in vain, and that has to be here, not in a step
        dist.barrier() if group.backend == "gloo" else group.barrier()
        group.until_formed.close()
    except (RuntimeError, ValueError) as error:
        group.log.debug(f"{type(error).__name__}: {error}")
        suspects = group.watch.suspects()
        if suspects and not suspects[0].alive:
            raise group.peer_lost(suspects) from None
        raise JoinError(
            f"all ranks reached each other, but could not form a group: {str(error).splitlines()[0][:300]}; "
            f"{describe(suspects, group.hosts)}. {HINT}"
        ) from None


def check_settings(group: Group) -> None:
    """Raises UserError where ranks differ in code or settings. Without an agent their meeting has seen to that."""
    digest = hashlib.sha256(json.dumps(dict(group.settings), sort_keys=True).encode()).hexdigest()
    if group.launch.agent is not None and len({*group.gather(digest)}) > 1:
        for name in dict.fromkeys(name for names in group.gather([*group.settings]) for name in names):
            value = group.settings.get(name, "nothing")
            group.must_match(name, value, remedy="Start all ranks with the same program and settings.")


def check_devices(group: Group) -> None:
    """Raises UserError where two ranks use one GPU: nccl would report "Duplicate GPU detected" much later, and gloo
    would just be slow."""
    if group.device.type != "cuda":
        return
    owners: dict[str, int] = {}
    for rank, uuid in enumerate(group.gather(str(torch.cuda.get_device_properties(group.device).uuid))):
        if owners.setdefault(uuid, rank) != rank:
            raise UserError(
                f"ranks {owners[uuid]} and {rank} must each have a device of their own, got the same GPU on "
                f"{group.hosts[rank]}. Start as many processes as there are GPUs, or set LOCAL_RANK."
            )


# torch's store --------------------------------------------------------------------------------------------------------


def connect_store(ip: str, port: int, *, timeout_s: float) -> TCPStore:
    """Raises RuntimeError where what answers is no store. Waits without end for what accepts and never answers."""
    with no_name_lookups():
        return TCPStore(ip, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


@contextlib.contextmanager
def no_name_lookups() -> Iterator[None]:
    """Within the block no resolver is asked for names, in all threads of this process: /etc/hosts alone answers.

    torch asks for the name of both ends of each connection of a store, only to print it. With a resolver that takes 5 s
    to say that it does not know the address, 16 ranks took minutes to meet. torch has no setting for that, but glibc
    lets a program replace the line of nsswitch.conf.
    """
    configure = ctypes.CDLL(None).__nss_configure_lookup
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        found = None
        with contextlib.suppress(OSError):
            found = re.search(r"^\s*hosts\s*:([^#\n]*)", SWITCH.read_text(), re.MULTILINE)
        configure(b"hosts", (found[1].strip() if found else "files dns").encode())  # the latter is glibc's own choice


# Without an agent -----------------------------------------------------------------------------------------------------


class MemberLine:
    """The line of a rank that another launcher started: it is a member itself, and with rank 0 the leader too.

    Members meet at the master's port, or where the launcher's store or a file says. One thread serves the line.
    """

    def __init__(self, group: Group, *, timeout_s: float) -> None:
        self.group, self.log, self.timeout_s = group, group.log, timeout_s
        self.launch = launch = group.launch
        self._me = Member(
            token=secrets.token_hex(8), first_rank=launch.rank, num_ranks=1, world_size=launch.world_size,
            host=host_name(), pid=os.getpid(), settings=dict(group.settings), left_s=timeout_s,
            restarts=launch.restart_count, ip=chosen_address(os.environ),
        )
        self._commit: queue.Queue[Mapping[str, Any] | Exception] = queue.Queue()
        self._loop: asyncio.AbstractEventLoop
        self._attendance: Attendance
        self._leader: Leader | None = None
        self._store: Store | None = None  # torch's, where this rank serves it
        self._file = Path(launch.file) if launch.file else None
        self._board: Store | None = None  # the launcher's store
        if launch.agent_store:
            # It outlives its ranks, whose agents may count restarts differently: the newest leader stands there. Its
            # name is looked up before: a store that connects asks no resolver
            place = launch.master_addr, launch.master_port
            with contextlib.suppress(OSError), socket.create_connection(place, timeout=CONNECT_S) as found:
                place = str(found.getpeername()[0]), launch.master_port
            self._board = connect_store(*place, timeout_s=timeout_s)
        self._port = 0 if self._file or self._board else launch.master_port  # 0: one that the system picks
        # With all ranks on this machine nobody else needs to come in
        alone = launch.master_addr == "127.0.0.1" and launch.local_world_size == launch.world_size
        self._ip = "127.0.0.1" if alone and not self._file else ""

    def join(self) -> Mapping[str, Any]:
        """Returns the commit: n, hosts as [host, number of ranks] in the order of ranks, and what `_prepare` says.
        Raises as `meet` does."""
        if self.launch.rank == 0:
            where = self.launch.file or f"{self.launch.master_addr}:{self.launch.master_port}"
            self.log.info(f"waiting for {self.launch.world_size} ranks at {where}")
            # Rank 0 holds several connections of each rank. Most systems allow 1,024 at first, and more if asked
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        threading.Thread(target=self._run, name="line", daemon=True).start()
        found = self._commit.get()
        if isinstance(found, Exception):
            raise found
        if self._file and self._leader is not None:
            self._file.unlink(missing_ok=True)  # all have met: nobody needs it any more
        return found

    def open_store(self, commit: Mapping[str, Any]) -> Store:
        """The store that the commit names."""
        if self._board is not None:
            return PrefixStore(f"rankup/{commit['job']}", self._board)
        return self._store or connect_store(commit["ip"], commit["port"], timeout_s=self.timeout_s)

    def say(self, kind: str, **values: Any) -> bool:
        """To the leader. Any thread. Returns False where it reached nobody."""
        said: queue.Queue[bool] = queue.Queue()
        with contextlib.suppress(RuntimeError, queue.Empty):  # the loop has ended
            say = self._leader.take if self._leader is not None else self._attendance.say
            self._loop.call_soon_threadsafe(lambda: said.put(say(kind, **values)))
            return said.get(timeout=SAY_S)
        return False

    # In the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._attend())
        except Exception as error:
            self._commit.put(error)

    async def _attend(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._me.first_rank > 0:
            await self._hear_events()
            return
        from rankup.agent.meeting import Leader

        self._leader = Leader(self._me, say=self.log.warning, prepare=self._prepare, hear=self._hear_member)
        server = await listen(self._leader.attend, ip=self._ip, port=self._port)
        try:
            self._port = server.sockets[0].getsockname()[1]
            await in_thread(self._publish, timeout_s=math.inf)
            self._watch = asyncio.create_task(self._leader.watch())
            await self._hear_events()
            await asyncio.Event().wait()  # the others still hear what it has to say
        finally:
            server.close()  # the end of the event loop does not

    async def _hear_events(self) -> None:
        from rankup.agent.attendance import Attendance

        self._attendance = Attendance(
            self._me, self._leader_at, notice=self.log.warning,
            records=lambda: {self._me.first_rank: self.group.record},
        )
        member = False

        def hear(event: Mapping[str, Any]) -> bool:
            """Returns whether it is over: this process belongs to one membership, and must not come into the next one's
            way."""
            nonlocal member
            if event["is"] == "propose":
                os.environ.update(interface_variables(os.environ, event["ip"]))
                self._attendance.ready(event["n"])
            elif event["is"] == "commit":
                member = True
                self._commit.put(event)
            elif event["is"] == "refused":
                kind = UserError if event["code"] == USER_MISTAKE else JoinError
                self._commit.put(kind(event["text"], printed_elsewhere=bool(event.get("quiet"))))
            elif member:
                self.group.watch.hear(event)
            return member and event["is"] in ("lost", "gone")

        await self._attendance.attend(hear)

    async def _prepare(self, n: int) -> Mapping[str, Any]:
        """The leader's side of a commit: serve torch's store where no launcher does, on a port that the system picks.

        This process looks up no names until all clients have come.
        """
        assert self._leader is not None
        port = 0
        if self._board is None:
            listener = open_port(self._ip, 0)
            port = listener.getsockname()[1]
            self.group.until_formed.enter_context(no_name_lookups())
            self._store = await in_thread(lambda: TCPStore(
                "127.0.0.1", port, is_master=True, timeout=timedelta(seconds=self.timeout_s), wait_for_workers=False,
                master_listen_fd=listener.detach(),
            ), timeout_s=math.inf)
        # Where one rank was started again the job goes on, whatever rank 0 knows of that
        restarts = max(member.restarts for member in self._leader.seats.members)
        return {"port": port, "job": self.group.attempt, "restarts": restarts}

    def _hear_member(self, member: Member, message: Mapping[str, Any]) -> None:
        """Each rank is a process that is started anew by somebody else: a bad end is the end of all, this leader among
        them. Whoever comes while its process still ends waits for the next one, also with other settings."""
        assert self._leader is not None
        over = message["is"] == "lost"
        if message["is"] == "stop":
            self._leader.stop(str(message["signal"]))
        elif message["is"] == "end" and message["code"] != FINISHED:
            over = self._leader.running
            self._leader.lose_by(member, message)
        if over:
            self._leader.tell("over", code=PEER_LOST, text="the job at this address is about to end")

    # Where the leader is ------------------------------------------------------------------------------------------

    async def _leader_at(self) -> tuple[str, int]:
        """Raises OSError where the leader has not said where it is, and UserError for a file of somebody else."""
        if self._leader is not None:
            return "127.0.0.1", self._port
        if self._file or self._board is not None:
            return await in_thread(self._find, timeout_s=math.inf)
        return self.launch.master_addr, self.launch.master_port

    def _find(self) -> tuple[str, int]:
        """In a thread, as `_publish`: a disk or a store may take seconds to answer."""
        if self._file:
            if found := read_place(self._file):
                return found
            raise ConnectionError(f"rank 0 has not left its address in {self._file}")
        assert self._board is not None
        try:
            self._board.wait([LEADER], timedelta(seconds=CONNECT_S))
            return self.launch.master_addr, int(self._board.get(LEADER))
        except RuntimeError:
            where = f"{self.launch.master_addr}:{self.launch.master_port}"
            raise ConnectionError(f"nothing was heard from rank 0 at {where}") from None

    def _publish(self) -> None:
        """On rank 0. Raises UserError for a file of somebody else; one of an earlier run is replaced."""
        if self._board is not None:
            self._board.set(LEADER, str(self._port))
        elif self._file:
            read_place(self._file)
            reached = [ip for name in psutil.net_if_addrs() if (ip := address_of(name)) and not is_loopback(ip)]
            write_atomically(self._file, json.dumps({"rankup": [(reached or ["127.0.0.1"])[0], self._port]}))


def read_place(file: Path) -> tuple[str, int] | None:
    """What rank 0 left there; None for no file, and for an empty one, as mktemp makes it. Raises UserError where it
    is somebody else's, OSError where it can't be read."""
    try:
        text = file.read_text(errors="replace")
        if not text:
            return None
        ip, port = json.loads(text)["rankup"]
        return str(ip), int(port)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise UserError(
            f"--init-method: {file} must be a new file, got one that holds something else. Name another."
        ) from None
