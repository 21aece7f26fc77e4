"""A rank that another launcher started meets the others through an agent of its own, see `rankup.agent.rank_agent`."""

import contextlib
import os
import select
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

# torch exports it under a condition that mypy does not follow
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rankup import timing
from rankup.agent import rank_agent
from rankup.agent.links import AgentLine
from rankup.agent.logs import host_name
from rankup.agent.network import chosen_address, open_port
from rankup.agent.processes import no_name_lookups
from rankup.agent.protocol import KILLED
from rankup.env.rank_env import RankEnv
from rankup.errors import USER_MISTAKE, JoinError, UserError
from rankup.group.group import Group

LEADER = "rankup/leader"  # in the launcher's store: the port where the leader listens
ENDED = "its agent has ended"


class OwnAgent:
    """This rank's agent, from the rank's side. `listener`: the socket for torch's store, on rank 0. Members meet at
    MASTER_PORT, or at the address in the launcher's store or in the file of a file:// init method."""

    def __init__(self, group: Group, *, timeout_s: float) -> None:
        """Start the agent, which looks for the other ranks for `timeout_s`. Raises UserError."""
        self.group, self.log = group, group.log
        self.rank_env = env = group.rank_env
        # This store outlives the ranks, and always holds the newest leader's port, however the launcher counts restarts
        self._store = launchers_store(env, timeout_s=timeout_s) if env.agent_store else None
        # If all ranks are on this machine, listen only on the loopback interface
        alone = env.master_addr == "127.0.0.1" and env.local_world_size == env.world_size and not env.file
        ip, chosen = "127.0.0.1" if alone else "", chosen_address(os.environ)
        elsewhere = bool(env.file) or self._store is not None  # then the kernel picks the port of the leader
        # Listen at the address that the others will get: the user may have chosen another interface for the training
        self.listener = open_port(ip and (chosen or ip), 0) if env.rank == 0 else None
        self._commit: Mapping[str, Any] = {}
        self._problem: Exception | None = None  # why the ranks do not meet
        self._line = AgentLine(rank_agent.start(group.record), self._on_message)
        self.fileno, self.send = self._line.fileno, self._line.send
        self.send(
            "begin", listen=[ip, 0 if elsewhere else env.master_port], local_rank=env.local_rank, job=group.attempt,
            leader=None if elsewhere else [env.master_addr, env.master_port], file=env.file,
            silent_s=timing.SILENT_S,
            store_port=self.listener.getsockname()[1] if self.listener is not None else 0,
            member={
                "first_rank": env.rank, "num_ranks": 1, "world_size": env.world_size, "host": host_name(),
                "pid": os.getpid(), "settings": dict(group.settings), "left_s": timeout_s,
                "restarts": env.restart_count, "ip": chosen,
            },
        )

    def join(self) -> Mapping[str, Any]:
        """Meet the other ranks. Returns the leader's commit. Raises what `joining.meet` raises."""
        if self.rank_env.rank == 0:
            where = self.rank_env.file or f"{self.rank_env.master_addr}:{self.rank_env.master_port}"
            self.log.info(f"waiting for {self.rank_env.world_size} ranks at {where}")
        readable = select.poll()
        readable.register(self.fileno, select.POLLIN)
        while not self._commit and self._problem is None:
            readable.poll()
            if not self._line.receive() and self._problem is None:
                self._problem = JoinError(f"rank {self.rank_env.rank} on {host_name()} could not join: {ENDED}")
        if self._problem is not None:
            raise self._problem
        os.environ.update(self._commit["variables"])
        if self.rank_env.file and self.rank_env.rank == 0:
            Path(self.rank_env.file).unlink(missing_ok=True)  # all ranks have met, and no longer need the file
        return self._commit

    def receive(self) -> bool:
        """Read the messages that have come. Returns False if the agent has ended, which counts as the rank's end: the
        others have heard of it."""
        lives = self._line.receive()
        if not lives:
            lost = {"is": "lost", "ranks": [self.rank_env.rank], "why": ENDED, "code": KILLED}
            self.group.watch.on_message(lost)
        return lives

    def _on_message(self, message: Mapping[str, Any]) -> None:
        kind = message["is"]
        if kind == "say":
            self.log.warning(message["text"])
        elif kind == "find":
            self.send("found", **self._find())
        elif kind == "listens":
            if self._store is not None:
                self._store.set(LEADER, str(message["port"]))
        elif kind == "commit":
            self._commit = {name: value for name, value in message.items() if name != "is"}
        elif self._commit:
            self.group.watch.on_message(message)
        elif kind == "over":
            error = UserError if message["code"] == USER_MISTAKE else JoinError
            self._problem = error(message["text"], printed_elsewhere=message["quiet"])

    def _find(self) -> Mapping[str, Any]:
        """Look up the leader's port in the launcher's store."""
        assert self._store is not None
        try:
            self._store.wait([LEADER], timedelta(seconds=timing.CONNECT_S))
            return {"at": [self.rank_env.master_addr, int(self._store.get(LEADER))], "problem": ""}
        except RuntimeError:
            where = f"{self.rank_env.master_addr}:{self.rank_env.master_port}"
            return {"at": None, "problem": f"nothing was heard from rank 0 at {where}"}


def launchers_store(env: RankEnv, *, timeout_s: float) -> TCPStore:
    """Connect to the launcher's store. Look up its name first: lookups are off while TCPStore connects."""
    place = env.master_addr, env.master_port
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=timing.CONNECT_S) as found:
        place = str(found.getpeername()[0]), env.master_port
    with no_name_lookups():
        return TCPStore(*place, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
