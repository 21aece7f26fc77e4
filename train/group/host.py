"""Rank 0's side of meeting the others: it serves the store and decides whether the ranks make a group."""

import json
import time
from dataclasses import replace
from pathlib import Path

# torch exports these under a condition that mypy does not follow
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from train.errors import JOIN_FAILED, USER_MISTAKE, JoinError
from train.group import file_rendezvous, keys, store
from train.group.file_rendezvous import Endpoint, remove_endpoint
from train.group.joiner import Joiner, Meeting, error_of
from train.group.members import Member, Roster, describe_claims, describe_differences
from train.group.waiting import Wait

READ_S = 3.0  # how long rank 0 stays for the others to read why there is no group
READ_POLL_S = 0.02


class Host(Joiner):
    """Rank 0: serves the store, unless torch's agent does, and decides whether the ranks make a group."""

    def __init__(self, wait: Wait, fingerprint: dict[str, str], attempt: str) -> None:
        super().__init__(wait, fingerprint, attempt)
        self.hosts_store = not wait.launch.agent_store
        self._server: Store | None = None  # once it is there
        self._endpoint: Endpoint | None = None  # what was written into the file

    def join(self) -> Meeting:
        try:
            return super().join()
        finally:
            if self._endpoint is not None:  # every rank has read it by now, or there will be no group
                remove_endpoint(Path(self.launch.file), self._endpoint)

    def reach_store(self) -> Store:
        if not self.hosts_store:
            return super().reach_store()
        if self._server is None:
            if self.launch.file:
                self._server, self._endpoint = file_rendezvous.serve(self.wait)
            else:
                self._server = store.serve(self.wait)
        return self._server

    def introduce(self, raw: Store, root: Store) -> Meeting:
        """Open a generation and judge its roster at every look."""
        number = root.add(keys.GENERATION, 1)
        generation = PrefixStore(str(number), root)
        # Another rank 0 that sees the new generation waits for this in its `get`
        generation.set(keys.MAIN, self.me.to_json())
        self.sign_in(generation)
        roster = Roster()
        while True:
            if (latest := root.add(keys.GENERATION, 0)) != number:
                other = PrefixStore(str(latest), root).get(keys.MAIN)
                raise JoinError(describe_claims([self.me, Member.from_json(other)]))
            generation.add(keys.alive(self.me.token), 1)
            if (members := self._judge(generation, roster)) is not None:
                return self.meeting(raw, number, members, self.attempt, hosts_store=self.hosts_store)
            if self.wait.over:
                raise self._refuse(generation, roster, self.missing_at_deadline(roster))
            self.wait.problem = self.missing(roster, round(self.wait.waited_s))
            self.wait.pause()

    def _judge(self, generation: Store, roster: Roster) -> list[Member] | None:
        """Set the verdict once the roster is complete, and return the members; None before that. Raises UserError or
        JoinError, on all ranks, where these ranks make no group."""
        roster.look(generation)
        for member in roster.living():
            if member.world_size != self.launch.world_size:
                raise self._refuse(
                    generation, roster,
                    f"rank {member.rank} on {member.place} was started with WORLD_SIZE={member.world_size}, rank 0 on "
                    f"{self.me.place} with WORLD_SIZE={self.launch.world_size}. Set the same on all ranks.",
                )
        if claims := roster.claimed_twice():
            raise self._refuse(generation, roster, describe_claims(claims))
        members = roster.present()
        if [member.rank for member in members] != list(range(self.launch.world_size)):
            return None
        if differences := describe_differences(members):
            raise self._refuse(generation, roster, differences, code=USER_MISTAKE)
        members = [replace(member, fingerprint={}) for member in members]  # compared, and by far the longest part
        fields = [json.loads(member.to_json()) for member in members]
        generation.set(keys.VERDICT, json.dumps({"attempt": self.attempt, "members": fields}))
        return members

    def _refuse(self, generation: Store, roster: Roster, text: str, *, code: int = JOIN_FAILED) -> Exception:
        """The error that says why there will be no group, once all ranks had the time to read it."""
        living = roster.living()
        verdict = {
            "code": code, "text": text, "tokens": [member.token for member in living],
            "speakers": [member.token for member in living if member.prints_for_host(living)],
        }
        generation.set(keys.VERDICT, json.dumps(verdict))
        until_s = time.monotonic() + READ_S
        # This process may host the store: it goes once the others have read
        while time.monotonic() < until_s and generation.add(keys.ACKNOWLEDGED, 0) < len(living) - 1:
            time.sleep(READ_POLL_S)
        return error_of(verdict, self.me.token)
