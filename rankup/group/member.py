"""How a rank without an agent takes part in the meeting: it is a member itself, and rank 0 leads.

Another launcher started such a rank. Members meet at MASTER_PORT, or at the address that they find in the launcher's
store or in the file of a file:// init method."""

import asyncio
import contextlib
import json
import os
import queue
import secrets
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

# torch exports it under a condition that mypy does not follow
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rankup.agent.ends import End
from rankup.agent.leader import Leader
from rankup.agent.leader_connection import LeaderConnection
from rankup.agent.logs import host_name
from rankup.agent.network import address_of, chosen_address, in_thread, interface_variables, listen, open_port
from rankup.agent.processes import no_name_lookups
from rankup.agent.protocol import Member
from rankup.env.rank_env import is_loopback
from rankup.errors import FINISHED, USER_MISTAKE, JoinError, UserError
from rankup.group.group import Group
from rankup.places.files import write_atomically
from rankup.timing import CONNECT_S, SAY_S

LEADER = "rankup/leader"  # in the launcher's store: the port where the leader listens


class MemberLine:
    """The connection of a rank without an agent to the other ranks. It has a thread of its own. `listener`: the socket
    of torch's store, on rank 0 after it has joined; otherwise None."""

    def __init__(self, group: Group, *, timeout_s: float) -> None:
        self.group, self.log = group, group.log
        self.rank_env = rank_env = group.rank_env
        me = Member(
            token=secrets.token_hex(8), first_rank=rank_env.rank, num_ranks=1, world_size=rank_env.world_size,
            host=host_name(), pid=os.getpid(), settings=dict(group.settings), left_s=timeout_s,
            restarts=rank_env.restart_count, ip=chosen_address(os.environ),
        )
        self._connection = LeaderConnection(
            me, self._leader_at, notice=self.log.warning, records=lambda: {rank_env.rank: group.record}
        )
        self._leader: Leader | None = None
        if rank_env.rank == 0:
            self._leader = Leader(me, log=self.log.warning, prepare=self._prepare, on_message=self._on_member_message)
        self._commit: queue.Queue[Mapping[str, Any] | Exception] = queue.Queue()
        self._loop: asyncio.AbstractEventLoop
        self._member = False  # whether this rank belongs to a membership
        self.listener: socket.socket | None = None
        self._file = Path(rank_env.file) if rank_env.file else None
        self._board: TCPStore | None = None  # the launcher's store
        if rank_env.agent_store:
            # The launcher's store outlives the ranks, and always holds the newest leader's port, however the launcher
            # counts restarts. Look up the store's name first: lookups are off while TCPStore connects
            place = rank_env.master_addr, rank_env.master_port
            with contextlib.suppress(OSError), socket.create_connection(place, timeout=CONNECT_S) as found:
                place = str(found.getpeername()[0]), rank_env.master_port
            with no_name_lookups():
                self._board = TCPStore(*place, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        self._port = 0 if self._file or self._board else rank_env.master_port  # 0: the kernel picks a port
        # If all ranks are on this machine, listen only on the loopback interface
        alone = rank_env.master_addr == "127.0.0.1" and rank_env.local_world_size == rank_env.world_size
        self._ip = "127.0.0.1" if alone and not self._file else ""

    def join(self) -> Mapping[str, Any]:
        """Meet the other ranks. Returns the leader's commit: `n`, `hosts` as pairs [host, number of ranks] in the order
        of ranks, and what `_prepare` returns. Raises what `joining.meet` raises."""
        if self._leader is not None:
            where = self.rank_env.file or f"{self.rank_env.master_addr}:{self.rank_env.master_port}"
            self.log.info(f"waiting for {self.rank_env.world_size} ranks at {where}")
        threading.Thread(target=self._run, name="line", daemon=True).start()
        found = self._commit.get()
        if isinstance(found, Exception):
            raise found
        if self._file and self._leader is not None:
            self._file.unlink(missing_ok=True)  # all ranks have met, and no longer need the file
        return found

    def send(self, kind: str, **values: Any) -> bool:
        """Send a message to the leader, from any thread. Returns False if no leader is connected."""
        said: queue.Queue[bool] = queue.Queue()
        with contextlib.suppress(RuntimeError, queue.Empty):  # the event loop has ended
            send = self._leader.take if self._leader is not None else self._connection.send
            self._loop.call_soon_threadsafe(lambda: said.put(send(kind, **values)))
            return said.get(timeout=SAY_S)
        return False

    # In the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._take_part())
        except Exception as error:
            self._commit.put(error)

    async def _take_part(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._leader is None:
            await self._connection.follow(self._on_message)
            return
        server = await listen(self._leader.accept, ip=self._ip, port=self._port)
        try:
            self._port = server.sockets[0].getsockname()[1]
            await in_thread(self._publish)
            watch = asyncio.create_task(self._leader.watch())
            await self._connection.follow(self._on_message)
            await watch  # never returns: the leader must keep informing the other members
        finally:
            server.close()  # ending the event loop would not close it

    def _on_message(self, event: Mapping[str, Any]) -> bool:
        """Handle a message of the leader. Returns True once this membership is lost: the process belongs to only one
        membership, and must not disturb the next one."""
        if event["is"] == "propose":
            os.environ.update(interface_variables(os.environ, event["ip"]))
            self._connection.ready(event["n"])
        elif event["is"] == "commit":
            self._member = True
            self._commit.put(event)
        elif self._member:
            self.group.watch.on_message(event)
        elif event["is"] == "over":
            kind = UserError if event["code"] == USER_MISTAKE else JoinError
            # One rank per machine prints the text, and the rank that the text names
            quiet = self.rank_env.local_rank > 0 and self._connection.me.who not in event["text"]
            self._commit.put(kind(event["text"], printed_elsewhere=quiet))
        return self._member and event["is"] in ("lost", "gone")

    async def _prepare(self, n: int) -> Mapping[str, Any]:
        """Prepare a commit, on the leader: open a port for torch's store. The kernel picks the port."""
        assert self._leader is not None
        # Listen at the address that the others will get: the user may have chosen another interface for the training
        self.listener = open_port(self._ip and (self._leader.me.ip or self._ip), 0)
        # If the launcher has restarted any rank, this is a restart of the job, even if rank 0's own count is 0
        restarts = max(member.restarts for member in self._leader.chosen)
        return {"port": self.listener.getsockname()[1], "job": self.group.attempt, "restarts": restarts}

    def _on_member_message(self, member: Member, message: Mapping[str, Any]) -> None:
        """Handle a member's message, on the leader. If one rank fails, all ranks end, the leader too, and the launcher
        restarts them. New ranks that come too early wait for the next leader, even if their settings differ."""
        assert self._leader is not None
        over = message["is"] == "lost"
        if message["is"] == "stop":
            self._leader.stop(message["signal"])
        elif message["is"] == "end" and message["code"] != FINISHED:
            over = self._leader.running
            self._leader.lose_by(member, End.read(message))
        if over:
            self._leader.over = "the job at this address is about to end"

    # Where the leader is ------------------------------------------------------------------------------------------

    async def _leader_at(self) -> tuple[str, int]:
        """Return the leader's host and port. Raises OSError if they are not published yet, or UserError."""
        if self._leader is not None:
            return "127.0.0.1", self._port
        if self._file or self._board is not None:
            return await in_thread(self._find)
        return self.rank_env.master_addr, self.rank_env.master_port

    def _find(self) -> tuple[str, int]:
        """Find the leader. Like `_publish`, this runs in a thread, because a disk or a store may take seconds."""
        if self._file:
            if found := read_place(self._file):
                return found
            raise ConnectionError(f"rank 0 has not left its address in {self._file}")
        assert self._board is not None
        try:
            self._board.wait([LEADER], timedelta(seconds=CONNECT_S))
            return self.rank_env.master_addr, int(self._board.get(LEADER))
        except RuntimeError:
            where = f"{self.rank_env.master_addr}:{self.rank_env.master_port}"
            raise ConnectionError(f"nothing was heard from rank 0 at {where}") from None

    def _publish(self) -> None:
        """Publish rank 0's address, in place of an earlier run's. Raises UserError if the file is not rankup's."""
        if self._board is not None:
            self._board.set(LEADER, str(self._port))
        elif self._file:
            read_place(self._file)
            reached = [ip for name in psutil.net_if_addrs() if (ip := address_of(name)) and not is_loopback(ip)]
            write_atomically(self._file, json.dumps({"rankup": [(reached or ["127.0.0.1"])[0], self._port]}))


def read_place(file: Path) -> tuple[str, int] | None:
    """Read the IP address and port that rank 0 left in `file`. Returns None if there is no file, or an empty one, such
    as mktemp makes. Raises UserError if the file holds something else, and OSError if it can't be read."""
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
