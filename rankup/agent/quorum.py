"""Votes of the nodes of an elastic job: if the network is cut, at most one part of the job goes on. Imports no torch.

Each proposal carries a basis, which says who may form the next membership: a majority of its `voters`, or half of them
(see `claims`). These must include a node in use, one of `used`: without its ranks the last membership can't still run
elsewhere. `ran`: the nodes that the last committed membership used. All voters, spares included, get a proposal before
its commit. A part of the job may not know the newest voters, so most of the earlier ones, `before`, are needed too:
until a proposal is committed, or until most of both groups know that a spare came or left (Raft's joint consensus).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rankup.agent.protocol import Seat

Basis = dict[str, Any]
NONE: Basis = {"n": 0, "v": 0, "used": [], "voters": [], "known": [], "job": ""}


def age(basis: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a sort key that is larger for a newer basis. If a proposal follows membership 3, any commit after 3 is
    newer, whatever the numbers: a leader that is cut off may propose again and again with higher numbers."""
    follows = (basis.get("before") or [basis])[-1]
    return int(follows["n"]), int(basis["n"]), int(basis["v"])


def knowledge(basis: Mapping[str, Any], token: str) -> dict[str, Any]:
    """Return what an agent that leads or may lead says about itself. `n`: the highest membership that it knows.
    `formed`: the newest one that it knows to be committed. `running` is False here, and leaders overwrite it."""
    formed = int(age(basis)[0])
    return {"token": token, "n": basis["n"], "formed": formed, "running": False, "job": basis["job"]}


def same_job(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two agents may belong to one job. An agent that has just started does not know the job's id."""
    return not one["job"] or not other["job"] or bool(one["job"] == other["job"])


def electorates(basis: Basis) -> list[dict[str, Any]]:
    """Return the groups whose majorities are needed: the `voters` of each membership `n` that may be the newest."""
    return [{"n": basis["n"], "voters": basis["voters"]}, *basis.get("before", [])]


def outvoted(basis: Basis, here: Collection[str], *, shared: bool) -> str:
    """Return why the nodes `here` must not go on, because the others might do so too, or "" if they may go on.
    `shared`: whether the job has a `--shared-dir`."""
    ended = basis.get("left") or any(token in here for token in basis["used"])
    for each in electorates(basis):
        voters = each["voters"]
        present = [token for token in voters if token in here]
        half = 2 * len(present) == len(voters) and (present[:1] == voters[:1] or shared)
        if voters and not ((_is_majority(present, voters) or half) and ended):
            why = "no majority" if ended else "none of those that trained"
            return f"{len(present)} of the {len(voters)} nodes of membership {each['n']} are here, {why}"
    return ""


def claims(basis: Basis, here: Collection[str]) -> set[int]:
    """Return the memberships of which no majority of voters is `here`. There may be two halves, so the nodes must claim
    each of these in `--shared-dir`, which only one half can. Without `--shared-dir`, the first voter's half goes on."""
    return {each["n"] for each in electorates(basis) if each["voters"] and not _is_majority(here, each["voters"])}


def without(basis: Basis, token: str) -> dict[str, Any]:
    """Return how the basis changes when a node has left: its ranks have ended for good, and it loses its vote."""
    newest, *before = (
        {**each, "voters": [one for one in each["voters"] if one != token]} for each in electorates(basis)
    )
    left = basis.get("left", False) or token in basis["used"]
    return {"voters": newest["voters"], "before": before, "left": left}


def recount(basis: Basis, spares: Collection[str], knowing: Collection[str]) -> dict[str, Any]:
    """Return how the basis changes when new spares get a vote or lost spares lose theirs; {} if nothing changes. The
    next change waits until majorities know the last one. `knowing`: the nodes that know it."""
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
    """Describe for the log what membership `new` changes; "" if it has the same nodes. `seats`: those of the lost
    members, then those of the present ones."""
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
    spares = sum(not (seat.lost or seat.unfit) for seat in seats) - len(used)
    parts += [f"{spares} spare"] if spares else []
    what = f"membership {new['n']}: {len(used)} node{'s' * (len(used) > 1)}"
    return f"{what}{' (' + '; '.join(parts) + ')' if parts else ''}"
