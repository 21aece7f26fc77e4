"""The roster: which ranks have introduced themselves to rank 0, and which of them are alive, by a roll call.

A rank that waits sends nothing, so that its silence says nothing. When all ranks are on the roster, or two processes
claim one rank, rank 0 calls the roll: who answers is alive now. A rank that died while joining does not answer, and is
replaced as soon as another process with its rank comes.
"""

import time
from dataclasses import dataclass

from train.group.members import Member

# Who has not answered a roll call for so long has died while joining, and may come back.
SILENT_S = 1.5
# All ranks have answered, but one of them has also come as another process earlier, which is either dead or about to
# answer. So much longer is it given. What it costs is the time that a rank which comes back waits to be taken.
EARLIER_S = 0.05


@dataclass(slots=True)
class _Entry:
    member: Member
    answered: int  # the last roll call that this process answered, or after which it came


class Roster:
    """The processes that have introduced themselves in a generation of the store, with rank 0's own first.

    What an entry or an answer costs does not depend on the number of ranks; a roll call is one message to all.
    """

    def __init__(self, me: Member) -> None:
        self.world_size, self._me = me.world_size, me
        self._entries = {me.token: _Entry(me, 0)}
        self._claims = {me.rank: [me]}  # every process that came with a rank, in the order of their coming
        self._here = {me.rank: [me]}  # those that have answered the last roll call
        self._twice: list[Member] = []
        self.calls = 0
        self.called_s = time.monotonic()
        self.call_due = False  # somebody came, and now the answers decide

    def enter(self, member: Member) -> None:
        """A process introduces itself; the same one again where it had to reconnect."""
        known = self._entries.setdefault(member.token, _Entry(member, self.calls))
        if known.member is not member:
            known.member = member
            return
        claims = self._claims.setdefault(member.rank, [])
        claims.append(member)
        self.call_due = self.call_due or self.complete or len(claims) > 1

    def call(self) -> int:
        """Begin a roll call; returns its number. Answers to earlier ones do not count any more."""
        self.calls += 1
        self.called_s = time.monotonic()
        self.call_due = False
        self._here, self._twice = {}, []
        self.answer(self._me.token, self.calls)
        return self.calls

    def answer(self, token: str, call: int) -> None:
        """A process answers a roll call."""
        if call != self.calls or token not in self._entries:
            return
        entry = self._entries[token]
        entry.answered = call
        answers = self._here.setdefault(entry.member.rank, [])
        answers.append(entry.member)
        if len(answers) > 1:
            self._twice = answers

    @property
    def complete(self) -> bool:
        """Whether there is a process for each rank, dead or alive."""
        return len(self._claims) == self.world_size

    @property
    def all_here(self) -> bool:
        """Whether the last roll call was answered for each rank, and by every process that may be alive."""
        if self.calls == 0 or len(self._here) < self.world_size:
            return False
        everybody = len(self._entries) == self.world_size
        return everybody or time.monotonic() - self.called_s > EARLIER_S

    @property
    def settling(self) -> bool:
        """Whether only the time is left to pass until all are here."""
        return self.calls > 0 and len(self._here) == self.world_size and not self.all_here

    def present(self) -> list[Member]:
        """Those that have answered the last roll call, by rank."""
        return [answers[0] for _, answers in sorted(self._here.items())]

    def claimed_twice(self) -> list[Member]:
        """The processes that claim one rank and have answered the same roll call; [] where there are none.

        A process that died while joining and was started again does not count: the first does not answer.
        """
        return sorted(self._twice, key=lambda member: self._claims[member.rank].index(member))

    def living(self) -> list[Member]:
        """Everybody, by rank, but those that have not answered the last roll call in time."""
        in_time = time.monotonic() - self.called_s < SILENT_S
        alive = (entry.member for entry in self._entries.values() if in_time or entry.answered == self.calls)
        return sorted(alive, key=lambda member: member.rank)

    def gone(self) -> list[Member]:
        """Those that have not answered in time, and whose rank no other process has taken; the last of each rank."""
        taken = {member.rank for member in self.living()}
        return [claims[-1] for rank, claims in sorted(self._claims.items()) if rank not in taken]
