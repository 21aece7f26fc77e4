"""The members that are here, and their connections, as the leader sees them. No torch here."""

from dataclasses import dataclass, field
from typing import Any

from rankup.agent.network import Link
from rankup.agent.protocol import Member


@dataclass(eq=False)
class Seat:
    """A member and its connection. `unfit`, `leaves` and `has`: where the number of nodes may change."""

    link: Link
    member: Member
    claim: range  # of ranks, as it came
    since_s: float  # when it came, or was lost
    heard_s: float
    warm: bool  # it has imported torch
    lost: str = ""  # why
    problem: str = ""  # with the route to the next member
    signs: list[dict[str, Any]] = field(default_factory=list)  # of its ranks, as it said last
    signed_s: float = 0.0  # when it did
    finished: set[int] = field(default_factory=set)  # those of its ranks that have ended with 0
    unfit: str = ""  # why it is no part of the next membership
    leaves: bool = False  # was asked to
    has: tuple[float, ...] = (0, 0)  # the age of the newest basis that it has said to have

    @property
    def name(self) -> str:
        return f"node {self.claim.start // self.member.num_ranks} on {self.member.host}"


class Seats(dict[Link, Seat]):
    """All of them, by connection."""

    @property
    def members(self) -> list[Member]:
        """By rank."""
        return sorted((seat.member for seat in self.values()), key=lambda member: member.first_rank)

    @property
    def tokens(self) -> set[str]:
        return {seat.member.token for seat in self.values()}

    def of(self, token: str) -> Seat | None:
        return next((seat for seat in self.values() if seat.member.token == token), None)

    def claimed(self, ranks: range) -> list[Seat]:
        """Whoever came with one of these."""
        return [seat for seat in self.values() if seat.claim.start < ranks.stop and ranks.start < seat.claim.stop]
