"""Members: how ranks introduce themselves, and what to say of missing, double and different ones."""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from rankup.env.addresses import is_loopback
from rankup.env.rank_env import ranges
from train.group import keys

NEAR = 4  # ranks before and after this one whose names it always knows
MOST_HOSTS = 64  # that a message names: it is sent to all who wait


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
    digest: str = ""  # of what must be the same on all ranks

    @property
    def place(self) -> str:
        return f"{self.host} (pid {self.pid})"

    def prints_for_host(self, speakers: Collection[str]) -> bool:
        """Whether this rank prints an error that all ranks raise: one of each machine does. (Two machines of one name
        have a local rank 0 each, and both print.)"""
        return self.local_rank == 0 or self.token in speakers

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Member":
        """Ignores fields it does not know: another version of this program may send more or fewer, and then the
        digests differ."""
        sent: dict[str, Any] = json.loads(text)
        return Member(**{f.name: sent[f.name] for f in fields(Member) if f.name in sent})


def speakers(members: Iterable[Member]) -> list[str]:
    """The token of the lowest rank on each machine that has no local rank 0 among `members`."""
    first: dict[str, Member] = {}
    for member in sorted(members, key=lambda m: (m.local_rank != 0, m.rank)):
        first.setdefault(member.host, member)
    return [member.token for member in first.values() if member.local_rank != 0]


class Members(Sequence[Member]):
    """The members of a group by rank, each read from the store when somebody asks for it.

    Most ranks never need to know more than a few others. If each read all, the traffic would grow with the square of
    the ranks. Those around a rank are read at once: after a loss their names are wanted, and the store may be gone.
    """

    def __init__(self, store: Store, size: int, *, myself: int) -> None:
        self._store, self._size = store, size
        self._known: dict[int, Member] = {}
        self._read({0, *((myself + distance) % size for distance in range(-NEAR, NEAR + 1))})

    def _read(self, ranks: Iterable[int]) -> None:
        """Read these in one request. Raises RuntimeError where the store is gone."""
        wanted = sorted(set(ranks) - set(self._known))
        texts = self._store.multi_get([keys.member(rank) for rank in wanted]) if wanted else []
        self._known |= {rank: Member.from_json(text) for rank, text in zip(wanted, texts, strict=True)}

    def __iter__(self) -> Iterator[Member]:
        """All of them: for rank 0's summaries, and for the doctor."""
        with contextlib.suppress(RuntimeError):
            self._read(range(self._size))
        return (self[rank] for rank in range(self._size))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: int) -> Member:  # type: ignore[override]  # nobody needs a slice
        if not 0 <= rank < self._size:
            raise IndexError(rank)
        if rank not in self._known:
            try:
                self._read([rank])
            except RuntimeError:  # torch's own error: the store is gone, and a message has to do without the name
                return Member(rank)
        return self._known[rank]


class Hosts(Sequence[str]):
    """The machine of each rank, by rank."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members

    def __iter__(self) -> Iterator[str]:
        return (member.host for member in self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, rank: int) -> str:  # type: ignore[override]  # nobody needs a slice
        return self._members[rank].host


@dataclass(frozen=True, slots=True)
class Paths:
    """What the ranks' routes to the master say to those that have none because they are on its machine."""

    master_ips: list[str]  # at which others reached the master; none of loopback
    far_ip: str  # of a rank on another machine, or ""

    @staticmethod
    def of(members: Iterable[Member]) -> "Paths":
        masters: dict[str, None] = {}
        far_ip = ""
        for member in members:
            if member.master_ip and not is_loopback(member.master_ip):
                masters[member.master_ip] = None
            if not far_ip and member.local_ip and not is_loopback(member.local_ip):
                far_ip = member.local_ip
        return Paths(list(masters)[:8], far_ip)


@dataclass(slots=True)
class Meeting:
    """The outcome of joining: a store private to this attempt, and the members in the order of their ranks."""

    store: Store
    beat_store: Store  # a connection of its own: one client serves one thread at a time
    members: Sequence[Member]
    attempt: str
    restarted: bool  # whether the process of any rank was
    paths: Paths
    prints_for_host: bool  # whether this rank prints an error that all ranks raise
    hosts_store: bool
    generation: int  # from 2 on, the store has keys of an earlier start: torch's agent keeps it
    deadline_s: float  # on the monotonic clock: what is left of the time to join
    # To close when the group has formed: until then the process with the store looks up no names
    no_lookups: contextlib.ExitStack


def _by_host(members: Iterable[Member]) -> str:
    """ "0-1 on node0; 2 on node1"."""
    ranks: dict[str, set[int]] = {}
    for member in members:
        ranks.setdefault(member.host, set()).add(member.rank)
    named = [f"{ranges(numbers)} on {host}" for host, numbers in sorted(ranks.items())]
    more = [f"and ranks on {len(named) - MOST_HOSTS} more machines"] if len(named) > MOST_HOSTS else []
    return "; ".join(named[:MOST_HOSTS] + more)


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


def describe_differences(members: list[Member], settings: Mapping[str, Mapping[str, str]]) -> str:
    """What differs between ranks, one line each. `settings`: what must be the same, by the digest of it.

    Different code or settings give wrong numbers, not errors: an all-reduce of different sizes returned garbage on one
    rank without a word.
    """
    found = []
    for name in sorted({name for known in settings.values() for name in known}):
        holders: dict[str, list[Member]] = {}
        for member in members:
            holders.setdefault(settings[member.digest].get(name, "nothing"), []).append(member)
        if len(holders) > 1:
            got = " and ".join(f"{value} on {_who(who)}" for value, who in list(holders.items())[:4])
            found.append(f"{name} must be the same on all ranks, got {got}.")
    return "\n".join([*found[:8], "Start all ranks with the same program and settings."])


def _who(members: list[Member]) -> str:
    hosts = ", ".join(sorted({member.host for member in members})[:4])
    return f"rank{'s' if len(members) > 1 else ''} {ranges(m.rank for m in members)} ({hosts})"
