"""The roster: how ranks introduce themselves, and what to say of missing, double and different ones."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from train.group import keys

LIFE_S = 2.0  # a rank that gave no sign of life for so long has died while joining, and may come back


@dataclass(frozen=True, slots=True)
class Member:
    """One rank as it introduces itself. `local_ip` is its address on the route to the master, `master_ip` the address
    that answered there; both are empty on the rank that hosts the store."""

    rank: int
    world_size: int = 0
    host: str = "?"
    pid: int = 0
    local_rank: int = 0
    node: int | None = None  # as the launcher counts them
    local_ip: str = ""
    master_ip: str = ""
    # Of its node. torch's agents count them differently: one whose own rank did not fail counts none
    restarts: int = 0
    token: str = ""  # of this process: two may claim one rank
    fingerprint: dict[str, str] = field(default_factory=dict)  # what must be the same on all ranks

    @property
    def place(self) -> str:
        return f"{self.host} (pid {self.pid})"

    def prints_for_host(self, members: Iterable["Member"]) -> bool:
        """Whether this rank prints an error that all ranks raise: the first of its machine does. (Two machines of one
        name have a local rank 0 each, and both print.)"""
        return self.local_rank == 0 or not any(m.host == self.host and m.rank < self.rank for m in members)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Member":
        """Ignores fields it does not know: another version of this program may send more or fewer, and then the
        fingerprints name what differs."""
        sent: dict[str, Any] = json.loads(text)
        return Member(**{f.name: sent[f.name] for f in fields(Member) if f.name in sent})


@dataclass(slots=True)
class Meeting:
    """The outcome of joining: a store private to this attempt, and the members in the order of their ranks."""

    store: Store
    beat_store: Store  # a connection of its own: one client serves one thread at a time
    members: list[Member]
    attempt: str
    hosts_store: bool
    deadline_s: float  # on the monotonic clock: what is left of the time to join


@dataclass(slots=True)
class _Sign:
    """When a rank's count of signs of life last moved, by the clock of the rank that looks."""

    member: Member
    count: int
    first_s: float
    moved_s: float


class Roster:
    """Which ranks have introduced themselves in a generation of the store, and which of them are alive now."""

    def __init__(self) -> None:
        self._signs: dict[str, _Sign] = {}  # by token
        self._lines: set[bytes] = set()

    def look(self, generation: Store) -> None:
        """Read who is there, and who gave a sign of life since the last look."""
        now_s = time.monotonic()
        for line in generation.get(keys.ROSTER).splitlines() if generation.check([keys.ROSTER]) else []:
            if line not in self._lines:
                self._lines.add(line)
                member = Member.from_json(line)  # the same process again where it had to reconnect
                sign = self._signs.setdefault(member.token, _Sign(member, -1, now_s, now_s))
                sign.member = member
        for token, sign in self._signs.items():
            if (count := generation.add(keys.alive(token), 0)) != sign.count:
                sign.count, sign.moved_s = count, now_s

    def living(self) -> list[Member]:
        """Those with a sign of life in the last LIFE_S seconds, by rank."""
        now_s = time.monotonic()
        return sorted((s.member for s in self._signs.values() if now_s - s.moved_s < LIFE_S), key=lambda m: m.rank)

    def present(self) -> list[Member]:
        """Those that are alive at the same time: each gave a sign of life after the last of them came.

        Without that a rank which died a second ago would count, and the group be formed with a dead member.
        """
        now_s = time.monotonic()
        signs = [sign for sign in self._signs.values() if now_s - sign.moved_s < LIFE_S]
        latest_s = max((sign.first_s for sign in signs), default=now_s)
        return sorted((sign.member for sign in signs if sign.moved_s > latest_s), key=lambda m: m.rank)

    def gone(self) -> list[Member]:
        """Those that fell silent and whose rank no other process has taken."""
        taken = {member.rank for member in self.living()}
        return [sign.member for sign in self._signs.values() if sign.member.rank not in taken]

    def claimed_twice(self) -> list[Member]:
        """The processes that claim one rank and are alive at the same time; [] where there are none.

        A process that died while joining and was started again does not count: the first gave no sign of life after the
        second came.
        """
        by_rank: dict[int, list[_Sign]] = {}
        for sign in self._signs.values():
            by_rank.setdefault(sign.member.rank, []).append(sign)
        for signs in by_rank.values():
            for latest in sorted(signs, key=lambda s: s.first_s)[1:]:
                both = [s.member for s in signs if s.first_s <= latest.first_s and s.moved_s > latest.first_s]
                if len(both) > 1:
                    return both
        return []


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 4, 6, 7] -> "0-2, 4, 6-7"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _by_host(members: Iterable[Member]) -> str:
    """ "0-1 on node0; 2 on node1"."""
    ranks: dict[str, set[int]] = {}
    for member in members:
        ranks.setdefault(member.host, set()).add(member.rank)
    return "; ".join(f"{ranges(numbers)} on {host}" for host, numbers in sorted(ranks.items()))


def describe_missing(
    present: list[Member], gone: list[Member], *, world_size: int, local_world_size: int | None, waited_s: float
) -> str:
    """Who has not joined: "rank 3 of 4 (on node1) has not joined after 120 s (joined: 0-1 on node0; 2 on node1)".

    A missing rank's host is known where it had joined and fell silent, or where another rank of its node has joined.
    """
    joined = _by_host(present) or "none"
    missing = sorted(set(range(world_size)) - {member.rank for member in present})
    if not missing:
        return f"all {world_size} ranks came, but never at the same time, after {waited_s:g} s (seen: {joined})"
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {ranges(missing)}"
    size = local_world_size or world_size
    hosts = {member.rank // size: member.host for member in present if member.node == member.rank // size}
    where = ""
    if size < world_size:
        nodes = sorted({rank // size for rank in missing})
        where = ", ".join(hosts.get(node, f"node {node} of {-(-world_size // size)}") for node in nodes[:8])
        where = f" (on {where})"
    silent = "".join(f"; rank {m.rank} on {m.place} had joined, but fell silent" for m in gone[:4] if m.rank in missing)
    verb = "has" if len(missing) == 1 else "have"
    return f"{who} of {world_size}{where} {verb} not joined after {waited_s:g} s (joined: {joined}){silent}"


def describe_claims(claims: list[Member]) -> str:
    places = " and by ".join(member.place for member in claims)
    return (
        f"rank {claims[0].rank} was claimed {'twice' if len(claims) == 2 else f'{len(claims)} times'}: by {places}. "
        "Give each process a RANK of its own, 0 to WORLD_SIZE-1."
    )


def describe_differences(members: list[Member]) -> str:
    """What differs between ranks, one line each, or "".

    Different code or settings give wrong numbers, not errors: an all-reduce of different sizes returned garbage on one
    rank without a word.
    """
    found = []
    for name in sorted({name for member in members for name in member.fingerprint}):
        holders: dict[str, list[Member]] = {}
        for member in members:
            holders.setdefault(member.fingerprint.get(name, "nothing"), []).append(member)
        if len(holders) > 1:
            got = " and ".join(f"{value} on {_who(who)}" for value, who in list(holders.items())[:4])
            found.append(f"{name} must be the same on all ranks, got {got}.")
    return "\n".join([*found[:8], "Start all ranks with the same program and settings."] if found else [])


def _who(members: list[Member]) -> str:
    hosts = ", ".join(sorted({member.host for member in members})[:4])
    return f"rank{'s' if len(members) > 1 else ''} {ranges(m.rank for m in members)} ({hosts})"
