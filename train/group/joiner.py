"""What every rank does to meet the others, whether it decides (`host`) or waits for the decision (`guest`)."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# torch exports these under a condition that mypy does not follow
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from train.errors import USER_MISTAKE, JoinError, UserError
from train.group import file_rendezvous, keys, store
from train.group.members import Member, Roster, describe_missing
from train.group.waiting import Wait


@dataclass(slots=True)
class Meeting:
    """The outcome of joining: a store private to this attempt, and the members in the order of their ranks."""

    store: Store
    beat_store: Store  # a connection of its own: one client serves one thread at a time
    members: list[Member]
    attempt: str
    hosts_store: bool
    deadline_s: float  # on the monotonic clock: what is left of the time to join


class Joiner:
    """What a rank does whether it is host or guest."""

    def __init__(self, wait: Wait, fingerprint: dict[str, str], attempt: str) -> None:
        self.wait, self.launch, self.log, self.attempt = wait, wait.launch, wait.log, attempt
        launch = wait.launch
        self.me = Member(
            rank=launch.rank, world_size=launch.world_size, host=self.log.host, pid=os.getpid(),
            local_rank=launch.local_rank, node=launch.node_rank, restarts=launch.restart_count,
            token=secrets.token_hex(6), fingerprint=fingerprint,
        )

    def join(self) -> Meeting:
        """Reach the store and introduce this rank, again and again until that succeeds or the deadline is over."""
        while True:
            try:
                raw = self.reach_store()
                holder = "the launcher's agent" if self.launch.agent_store else "the process of rank 0"
                self.wait.stuck_in = (
                    f"the store at {self.wait.address} answers no more: {holder} is stopped, or its machine out of "
                    "reach"
                )
                return self.introduce(raw, PrefixStore(keys.ROOT, raw))
            except (RuntimeError, ConnectionError) as error:  # torch's own errors are RuntimeErrors
                if isinstance(error, JoinError):
                    raise
                # The store's process was ending after an earlier attempt, or died while joining: it may come back
                self.wait.problem = f"the store at {self.wait.address} went away ({_first_line(error)})"
                if self.wait.over:
                    raise self.wait.failure(self.wait.problem) from None
                self.wait.pause()

    def reach_store(self) -> Store:
        """A client of the store. Raises JoinError at the deadline."""
        client = file_rendezvous.connect(self.wait) if self.launch.file else store.connect(self.wait)
        self.me = replace(self.me, local_ip=client.local_ip, master_ip=client.master_ip)
        return client.store

    def introduce(self, raw: Store, root: Store) -> Meeting:
        """Be one of the roster of the newest generation until that is decided. Raises JoinError and UserError."""
        raise NotImplementedError

    def sign_in(self, generation: Store) -> None:
        generation.append(keys.ROSTER, self.me.to_json() + "\n")  # type: ignore[attr-defined]
        self.log.debug(f"introduced to the others at {self.wait.address}")

    def meeting(self, raw: Store, number: int, members: list[Member], attempt: str, *, hosts_store: bool) -> Meeting:
        ours, beats = (PrefixStore(keys.members(number), client) for client in (raw, raw.clone()))
        return Meeting(ours, beats, members, attempt, hosts_store, self.wait.deadline_s)

    def missing(self, roster: Roster, waited_s: float) -> str:
        return describe_missing(
            roster.living(), roster.gone(), world_size=self.launch.world_size,
            local_world_size=self.launch.local_world_size, waited_s=waited_s,
        )

    def missing_at_deadline(self, roster: Roster) -> str:
        where = "file" if self.launch.file else "MASTER_ADDR, MASTER_PORT"
        advice = f"Was every process started, with this {where} and WORLD_SIZE?"
        return f"{self.missing(roster, self.wait.timeout_s)}. {advice}"


def error_of(verdict: Mapping[str, Any], token: str) -> Exception:
    """The error that rank 0 found. All raise it, one rank of each machine prints it."""
    kind = UserError if verdict["code"] == USER_MISTAKE else JoinError
    return kind(verdict["text"], printed_elsewhere=token not in verdict["speakers"])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
