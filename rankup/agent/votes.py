"""If a job whose number of nodes may change is cut, at most one part goes on. No torch here.

Each proposal carries its basis, on which the next one depends. A proposal needs a majority of the basis's `voters`, or
a half (see `claims`), and at least one of the nodes in use, `used`, without whose ranks no earlier membership can go on
(`ran`: those of the last committed one). All voters, with the spares, know a proposal before it is committed. A part of
the job may not know the newest voters, so the earlier ones, `before`, have to agree too until a majority of both knows:
of a proposal until it is committed, and if a spare has come or gone (as in Raft's joint consensus).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rankup.agent.protocol import Seat

Basis = dict[str, Any]
NONE: Basis = {"n": 0, "v": 0, "used": [], "voters": [], "known": [], "job": ""}


def age(basis: Mapping[str, Any]) -> tuple[int, ...]:
    """The larger, the newer. A proposal is older than what was committed after the membership that it follows: a leader
    that has not noticed yet who is cut off may propose again and again, with higher numbers."""
    follows = (basis.get("before") or [basis])[-1]
    return int(follows["n"]), int(basis["n"]), int(basis["v"])


def knowledge(basis: Mapping[str, Any], token: str) -> dict[str, Any]:
    """What somebody who leads or may lead says of itself. `n`: the newest number that it knows, `formed`: the newest
    membership of which it knows that it was committed. Where it does not lead, none is `running`."""
    formed = int(age(basis)[0])
    return {"token": token, "n": basis["n"], "formed": formed, "running": False, "job": basis["job"]}


def same_job(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two leaders, or a leader and a member, may be of one job: a new one has no id yet."""
    return not one["job"] or not other["job"] or bool(one["job"] == other["job"])


def electorates(basis: Basis) -> list[dict[str, Any]]:
    """Whose majority is needed: `voters`, by token, of each membership `n` that may be the last one."""
    return [{"n": basis["n"], "voters": basis["voters"]}, *basis.get("before", [])]


def outvoted(basis: Basis, here: Collection[str], *, shared: bool) -> str:
    """Why those that are here must not go on: the others might do so too. "" where they may. `shared`: all nodes share
    a place."""
    ended = basis.get("left") or any(token in here for token in basis["used"])
    for each in electorates(basis):
        voters = each["voters"]
        present = [token for token in voters if token in here]
        half = 2 * len(present) == len(voters) and (present[:1] == voters[:1] or shared)
        if voters and not ((_is_majority(present, voters) or half) and ended):
            which = f"the {len(voters)} nodes of membership {basis['n']}"
            return f"{len(present)} of {which} are here, no majority"
    return ""


def claims(basis: Basis, here: Collection[str]) -> set[int]:
    """The memberships whose succession those that are here must own. Of two equal halves the one with the leader goes
    on; where they share a place, the one that is the first to write there that it does."""
    return {each["n"] for each in electorates(basis) if each["voters"] and not _is_majority(here, each["voters"])}


def without(basis: Basis, token: str) -> dict[str, Any]:
    """What changes where a node has left: it has no say any more, and its ranks have ended for good."""
    newest, *before = (
        {**each, "voters": [one for one in each["voters"] if one != token]} for each in electorates(basis)
    )
    left = basis.get("left", False) or token in basis["used"]
    return {"voters": newest["voters"], "before": before, "left": left}


def recount(basis: Basis, spares: Collection[str], knowing: Collection[str]) -> dict[str, Any]:
    """What changes where spares that have come get a vote, or lost ones' end; {} where nothing does. One change at a
    time: `knowing` is who knows of the last one."""
    if not all(_is_majority(knowing, each["voters"]) for each in electorates(basis)):
        return {}
    if basis.get("before"):
        return {"before": []}
    voters, wanted = basis["voters"], [*basis["used"], *spares]
    changed = [token for token in dict.fromkeys([*voters, *wanted]) if token in wanted]
    return {"voters": changed, "before": electorates(basis)} if changed != voters else {}


def _is_majority(tokens: Collection[str], voters: Collection[str]) -> bool:
    return 2 * sum(token in tokens for token in voters) > len(voters)


def describe_change(last: Basis, new: Basis, seats: Iterable[Seat]) -> str:
    """What membership `new` changes, for the log; "" where it has the same nodes. `seats`: of who is here or was lost,
    who is here last."""
    old, used = {*new["ran"]}, {*new["used"]}
    if old == used:
        return ""
    unseen = "is lost: it is not here"
    found = {token: (name, unseen) for token, _, _, name in last["known"]}
    for seat in seats:
        became = f"is left out: {seat.unfit}" if seat.unfit else f"is lost: {seat.lost}"
        found[seat.member.token] = seat.name, became if seat.unfit or seat.lost else "is a spare now"
    parts = [" ".join(found.get(token, ("the node that led", unseen))) for token in sorted(old - used)]
    parts += [f"{found[token][0]} joins" for token in sorted(used - old)] if old else []
    spares = sum(not seat.lost for seat in seats) - len(used)
    parts += [f"{spares} spare"] if spares else []
    what = f"membership {new['n']}: {len(used)} node{'s' * (len(used) > 1)}"
    return f"{what}{' (' + '; '.join(parts) + ')' if parts else ''}"
