"""Votes of the nodes of an elastic job: if the network is cut, at most one part of the job goes on. Imports no torch.

Each proposal carries a basis, which says who may form the next membership: a majority of its `voters`, or half of them
(see `claims`), with at least one of the nodes in use, `used`. Without that node's ranks an earlier membership can't run
elsewhere. `ran`: the nodes that the last committed membership used. All voters, spares included, know a proposal before
it is committed. A part of the job may not know the newest voters. Therefore the earlier ones, `before`, must agree too:
until a proposal is committed, or until most of both groups know that a spare came or left (Raft's joint consensus).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rankup.agent.protocol import Seat

Basis = dict[str, Any]
NONE: Basis = {"n": 0, "v": 0, "used": [], "voters": [], "known": [], "job": ""}


def age(basis: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a sort key, larger for newer bases. A proposal is older than any commit after the membership that it
    follows, whatever its number, because a leader that is cut off may propose again and again with higher numbers."""
    follows = (basis.get("before") or [basis])[-1]
    return int(follows["n"]), int(basis["n"]), int(basis["v"])


def knowledge(basis: Mapping[str, Any], token: str) -> dict[str, Any]:
    """Return what an agent that leads or may lead says of itself. `n`: the highest number that it knows. `formed`: the
    newest membership that it knows to be committed. `running` is False here, and leaders overwrite it."""
    formed = int(age(basis)[0])
    return {"token": token, "n": basis["n"], "formed": formed, "running": False, "job": basis["job"]}


def same_job(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two agents may belong to one job. The job of an agent that has just started has no id yet."""
    return not one["job"] or not other["job"] or bool(one["job"] == other["job"])


def electorates(basis: Basis) -> list[dict[str, Any]]:
    """Return the groups whose majorities are needed: the `voters` of each membership `n` that may be the last."""
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
            return f"{len(present)} of the {len(voters)} nodes of membership {each['n']} are here, no majority"
    return ""


def claims(basis: Basis, here: Collection[str]) -> set[int]:
    """Return the memberships in which the nodes `here` are no majority. To follow these they need a claim in
    `--shared-dir`, and the first of two halves gets it. Without `--shared-dir`, the half with the leader goes on."""
    return {each["n"] for each in electorates(basis) if each["voters"] and not _is_majority(here, each["voters"])}


def without(basis: Basis, token: str) -> dict[str, Any]:
    """Return how the basis changes when a node has left: it has no vote any more, and its ranks have ended for good."""
    newest, *before = (
        {**each, "voters": [one for one in each["voters"] if one != token]} for each in electorates(basis)
    )
    left = basis.get("left", False) or token in basis["used"]
    return {"voters": newest["voters"], "before": before, "left": left}


def recount(basis: Basis, spares: Collection[str], knowing: Collection[str]) -> dict[str, Any]:
    """Return how the basis changes when new spares get a vote or lost ones lose theirs; {} if nothing changes. Changes
    come one at a time. `knowing`: the nodes that know the last one."""
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
    """Describe for the log what membership `new` changes; "" if it has the same nodes. `seats`: the lost members, then
    those that are here."""
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
