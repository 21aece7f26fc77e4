"""Every other rank while the ranks join: it introduces itself to rank 0, and does what rank 0 says."""

import json
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rankup.errors import JOIN_FAILED
from train.group import keys
from train.group.joiner import Joiner
from train.group.members import Meeting, Member, Members
from train.group.messages import post
from train.group.store import wait_for

LAST_WORD_S = 2.0  # how long a rank whose time is over waits for rank 0 to say who is missing
SHORT_S = 0.1  # between two looks at the clock then


class Guest(Joiner):
    """Every rank but the first."""

    def introduce(self, raw: Store, beats: Store, root: Store) -> Meeting:
        """Sign in to the newest generation, and to the next one where that was decided without this rank."""
        number, attended = 1, False
        while True:
            number = max(number, root.add(keys.GENERATION, 0))
            self.enter(number, root)
            if wait_for(self.generation, [keys.MAIN], self.wait.slice_s):
                if (meeting := self._attend(raw, beats, root)) is not None:
                    return meeting
                number, attended = number + 1, True
            if self.wait.over:
                never = f"rank 0 never introduced itself to the store at {self.wait.address}, is it another job's?"
                raise self.wait.failure(self.wait.problem if attended else never)
            self.wait.notice()

    def _attend(self, raw: Store, beats: Store, root: Store) -> Meeting | None:
        """Sign in to this generation, and do what rank 0 says until it decides.

        None where it has decided, or decides, without this rank. Raises the error of all ranks.
        """
        said = self.generation.add(keys.WORDS, 0)
        if said and self._explains(self._word(said)):
            return None
        post(self.generation, {"member": self.me.to_json()})
        self.log.debug(f"introduced to the others at {self.wait.address}")
        self.wait.problem = f"rank 0 at {self.wait.address} is still waiting for others"
        until_s = 0.0  # once the time is over: how long rank 0 has to say who is missing
        while True:
            said += 1
            while not wait_for(self.generation, [keys.word(said)], max(SHORT_S, self.wait.slice_s)):
                if root.add(keys.GENERATION, 0) != self.number:
                    return None  # the store is an agent's, and rank 0 was started anew
                if until_s and time.monotonic() > until_s:
                    raise self.wait.failure(self.wait.problem)
                if self.wait.over and not until_s:
                    post(self.generation, {"over": self.wait.timeout_s})
                    until_s = time.monotonic() + LAST_WORD_S
                self.wait.notice()
            word = self._word(said)
            if "call" in word:
                answer = {"token": self.me.token, "call": word["call"]}
                wanted = {"settings": {self.me.digest: self.fingerprint}} if self.me.token in word["settings"] else {}
                post(self.generation, answer | wanted)
            elif "missing" in word:
                if until_s:
                    raise self.error_of({"code": JOIN_FAILED, **word["missing"]})
                self.wait.problem = word["missing"]["text"]
                self.wait.notice(now=not word["missing"]["speakers"])
            elif "refused" in word:
                post(self.generation, {"read": self.me.token})
                raise self.error_of(word["refused"])
            elif (holder := self._holder()) is not None and holder.token == self.me.token:
                # Names are wanted after a loss, when the main thread may hold the other connection
                reader = PrefixStore(str(self.number), PrefixStore(keys.ROOT, beats))
                members = Members(reader, self.launch.world_size, myself=self.me.rank)
                return self.meeting(raw, beats, members, word["group"])
            else:
                self._explains(word)
                return None

    def _word(self, number: int) -> dict[str, Any]:
        word: dict[str, Any] = json.loads(self.generation.get(keys.word(number)))
        return word

    def _explains(self, word: Mapping[str, Any]) -> bool:
        """Whether rank 0 has decided with this word. Takes note of why this rank is not in the group."""
        if "refused" in word:
            self.wait.problem = word["refused"]["text"]
        elif "group" in word:
            holder = self._holder()
            main = Member.from_json(self.generation.get(keys.MAIN))
            who = f"rank {self.me.rank} on {holder.place}" if holder is not None else f"{main.world_size} ranks"
            self.wait.problem = (
                f"the group at {self.wait.address} was complete before this rank came, with {who}: two processes with "
                "one rank, another job on this port, or an earlier attempt that does not end"
            )
        return "refused" in word or "group" in word

    def _holder(self) -> Member | None:
        """The process that has this rank in the group; None where the group has no such rank."""
        key = keys.member(self.me.rank)
        return Member.from_json(self.generation.get(key)) if self.generation.check([key]) else None
