"""Of a job whose number of nodes may change and that was cut only one part goes on. No torch here.

Each proposal carries its basis, which the next one depends on. Of its `voters` a majority has to be here, of two equal
halves the one with the leader; and of those in use, `used`, one, without whose ranks no earlier membership can go on.
All voters, spares too, know a proposal before it is committed. One never committed counts together with those `before`
it, as a part of the job may not know of it: each needs its majority.
"""

from collections.abc import Collection, Mapping
from typing import Any

Basis = dict[str, Any]
NONE: Basis = {"n": 0, "v": 0, "used": [], "voters": [], "known": [], "job": ""}


def age(basis: Mapping[str, Any]) -> tuple[int, int]:
    """The larger, the newer."""
    return int(basis["n"]), int(basis["v"])


def electorates(basis: Basis) -> list[list[str]]:
    """The tokens of those whose majority is needed: of each membership that may be the last one."""
    return [basis["voters"], *basis.get("before", [])]


def outvoted(basis: Basis, here: Collection[str]) -> str:
    """Why those that are here must not go on: the others might do so too. "" where they may."""
    ended = basis.get("left") or any(token in here for token in basis["used"])
    for voters in electorates(basis):
        present = [token for token in voters if token in here]
        twice = 2 * len(present)
        majority = twice > len(voters) or (twice == len(voters) and present[:1] == voters[:1])
        if voters and not (majority and ended):
            which = f"the {len(voters)} nodes of membership {basis['n']}"
            return f"{len(present)} of {which} are here, no majority"
    return ""


def without(basis: Basis, token: str) -> dict[str, Any]:
    """What changes where a node has left: it has no say any more, and its ranks have ended for good."""
    voters, *before = ([each for each in some if each != token] for some in electorates(basis))
    return {"voters": voters, "before": before, "left": basis.get("left", False) or token in basis["used"]}


def recount(basis: Basis, spares: Collection[str], knowing: Collection[str]) -> list[str]:
    """The new voters, where a spare that has come gets a vote, or a lost one's ends; else none. One at a time, once a
    majority knows of the last change (`knowing`). Then each majority of before has a member in each majority of now,
    or the leader, which knows."""
    voters, wanted = basis["voters"], [*basis["used"], *spares]
    new = [token for token in wanted if token not in voters][:1]
    gone = [token for token in voters if token not in wanted][:1] if not new else []
    known = 2 * sum(token in knowing for token in voters) > len(voters)
    return [token for token in [*voters, *new] if token not in gone] if known and (new or gone) else []
