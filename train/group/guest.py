"""Every other rank's side of meeting: it introduces itself and waits for the verdict of rank 0."""

import json
from typing import Any

# torch exports these under a condition that mypy does not follow
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from train.errors import JoinError
from train.group import keys
from train.group.joiner import Joiner, Meeting, error_of
from train.group.members import Member, Roster


class Guest(Joiner):
    """Every other rank: signs in and waits for the verdict of rank 0."""

    def introduce(self, raw: Store, root: Store) -> Meeting:
        """Sign in to the newest generation, and to the next where this one was decided without this rank."""
        number, generation = 0, root
        while True:
            if (latest := root.add(keys.GENERATION, 0)) != number:
                number, generation = latest, PrefixStore(str(latest), root)
                self.sign_in(generation)
                self.wait.problem = f"rank 0 at {self.wait.address} is still waiting for others"
            if number:  # at 0 rank 0 has not come yet
                generation.add(keys.alive(self.me.token), 1)
                if generation.check([keys.VERDICT]):
                    verdict = json.loads(generation.get(keys.VERDICT))
                    if (members := self._read_verdict(generation, verdict)) is not None:
                        return self.meeting(raw, number, members, verdict["attempt"], hosts_store=False)
            if self.wait.over:
                raise self._give_up(generation, number)
            self.wait.pause()

    def _read_verdict(self, generation: Store, verdict: dict[str, Any]) -> list[Member] | None:
        """The members if this rank is one of them; None if it belongs to the next generation. Raises the error of
        all."""
        me = self.me
        if "members" not in verdict:
            if me.token in verdict["tokens"]:
                generation.add(keys.ACKNOWLEDGED, 1)
                raise error_of(verdict, me.token)
            self.wait.problem = verdict["text"]
            return None
        members = [Member(**fields) for fields in verdict["members"]]
        if me.rank < len(members) and members[me.rank].token == me.token:
            return members
        holder = f"{len(members)} ranks"
        if me.rank < len(members):
            holder = f"rank {me.rank} on {members[me.rank].place}"
        self.wait.problem = (
            f"the group at {self.wait.address} was complete before this rank came, with {holder}: two processes with "
            "one rank, another job on this port, or an earlier attempt that does not end"
        )
        return None

    def _give_up(self, generation: Store, number: int) -> JoinError:
        """The error at the deadline, where rank 0 has found none."""
        if number and not generation.check([keys.VERDICT]):
            roster = Roster()
            roster.look(generation)
            quiet = not self.me.prints_for_host(roster.living())
            return JoinError(self.missing_at_deadline(roster), printed_elsewhere=quiet)
        if not number:
            where = self.wait.address
            return self.wait.failure(f"rank 0 never introduced itself to the store at {where}, is it another job's?")
        return self.wait.failure(self.wait.problem)
