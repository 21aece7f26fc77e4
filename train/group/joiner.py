"""What a rank does to join, whether it is rank 0 or another: reach the store, again and again, and introduce itself."""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rankup.errors import USER_MISTAKE, JoinError, UserError
from train.group import file_rendezvous, keys, store
from train.group.members import Meeting, Member, Paths
from train.group.store import second_connection
from train.group.waiting import Wait

DIGITS = 16  # of the digest of what must be the same on all ranks


class Joiner:
    """What a rank does whether it is host or guest."""

    def __init__(self, wait: Wait, fingerprint: dict[str, str], attempt: str) -> None:
        self.wait, self.launch, self.log, self.attempt = wait, wait.launch, wait.log, attempt
        self.fingerprint = fingerprint
        self.number = 0  # of the generation that this rank has signed in to
        self.generation: Store
        launch = wait.launch
        self.hosts_store = launch.rank == 0 and not launch.agent_store
        digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:DIGITS]
        self.me = Member(
            rank=launch.rank, world_size=launch.world_size, host=self.log.host, pid=os.getpid(),
            local_rank=launch.local_rank, node=launch.node_rank, restarts=launch.restart_count,
            token=secrets.token_hex(6), digest=digest,
        )

    def join(self) -> Meeting:
        """Reach the store and introduce this rank, again and again until that succeeds or the deadline is over."""
        while True:
            try:
                raw = self.reach_store()
                holder = "the launcher's agent" if self.launch.agent_store else "the process of rank 0"
                answers = f"the store at {self.wait.address} answers no more"
                self.wait.stuck_in = f"{answers}: {holder} is stopped, or its machine out of reach"
                beats = second_connection(raw)
                return self.introduce(raw, beats, PrefixStore(keys.ROOT, raw))
            except (RuntimeError, ConnectionError) as error:  # torch's own errors are RuntimeErrors
                if isinstance(error, JoinError):
                    raise
                # The store's process was ending after an earlier attempt, or died while joining: it may come back
                first_line = str(error).partition("\n")[0][:120]
                self.wait.problem = f"the store at {self.wait.address} went away ({first_line})"
                if self.wait.over:
                    raise self.wait.failure(self.wait.problem) from None
                self.wait.hurry()
                self.wait.pause()

    def reach_store(self) -> Store:
        """A client of the store. Raises JoinError at the deadline."""
        client, route = file_rendezvous.connect(self.wait) if self.launch.file else store.connect(self.wait)
        self.me = replace(self.me, local_ip=route.local_ip, master_ip=route.master_ip)
        return client

    def introduce(self, raw: Store, beats: Store, root: Store) -> Meeting:
        """Be one of the roster of the newest generation until that is decided. Raises JoinError and UserError."""
        raise NotImplementedError

    def enter(self, number: int, root: Store) -> None:
        """Talk in this generation from now on."""
        self.number, self.generation = number, PrefixStore(str(number), root)

    def meeting(self, raw: Store, beats: Store, members: Sequence[Member], said: Mapping[str, Any]) -> Meeting:
        """The outcome. `said`: what rank 0 said to all of the group."""
        ours, beating = (PrefixStore(keys.members(self.number), client) for client in (raw, beats))
        return Meeting(
            store=ours, beat_store=beating, members=members, attempt=said["attempt"], restarted=said["restarted"],
            paths=Paths(**said["paths"]), prints_for_host=self.me.prints_for_host(said["speakers"]),
            hosts_store=self.hosts_store, generation=self.number, deadline_s=self.wait.deadline_s,
            no_lookups=self.wait.no_lookups,
        )

    def error_of(self, refusal: Mapping[str, Any]) -> Exception:
        """The error that rank 0 found. All raise it, one rank of each machine prints it."""
        kind = UserError if refusal["code"] == USER_MISTAKE else JoinError
        return kind(refusal["text"], printed_elsewhere=not self.me.prints_for_host(refusal["speakers"]))
