"""What the leader of a meeting says of its members, for users. No torch here."""

from collections.abc import Iterable, Mapping
from typing import Any

from rankup.agent.protocol import Member
from rankup.env.rank_env import ranges

MOST_HOSTS = 8  # that one line names
HINT = (
    "gloo and nccl use any high port between the nodes: open them all, or narrow net.ipv4.ip_local_port_range on every "
    "node and open that range; or name another interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
)


def describe_missing(
    present: list[Member], gone: list[tuple[Member, str]], late: list[Member], *, of: Member, waited_s: float
) -> str:
    """Who has not joined: "rank 3 of 4 has not joined after 120 s (joined: 0-1 on node0; 2 on node1)".

    `gone`: who had joined and left, and why. `late`: those of a complete group that are not ready for it. `of`: a
    member like the others.
    """
    missing = sorted(set(range(of.world_size)) - {rank for member in present for rank in member.ranks})
    if not missing:
        what = f"not each is ready after {waited_s:g} s (late: {_by_host(late)})" if late else _without_store(waited_s)
        return f"all {of.world_size} ranks have joined, but {what}"
    which = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {ranges(missing)}"
    where = ""
    each = max(of.num_ranks, of.local_world_size)
    if 1 < each < of.world_size:
        nodes = sorted({rank // each for rank in missing})[:MOST_HOSTS]
        where = f" (on {', '.join(f'node {node} of {-(-of.world_size // each)}' for node in nodes)})"
    verb = "has" if len(missing) == 1 else "have"
    left = [f"; {member.who} had joined, but {why}" for member, why in gone if member.first_rank in missing]
    joined = f"(joined: {_by_host(present) or 'none'}){''.join(left[:4])}"
    return f"{which} of {of.world_size}{where} {verb} not joined after {waited_s:g} s {joined}"


def describe_late(n: int, late: list[Member], *, waited_s: float) -> str:
    """Which nodes a membership waits for, where their number may change."""
    hosts = sorted(member.host for member in late)
    more = f" and {len(hosts) - MOST_HOSTS} more" if len(hosts) > MOST_HOSTS else ""
    what = f"not each node is ready after {waited_s:g} s (late: {', '.join(hosts[:MOST_HOSTS])}{more})"
    return f"membership {n}: {what if late else _without_store(waited_s)}"


def _without_store(waited_s: float) -> str:
    return f"rank 0's process that imports torch and serves the store is not ready after {waited_s:g} s"


def describe_claims(one: Member, other: Member, *, late: bool = False) -> str:
    """Two living processes have one rank. `late`: the other one came to a group that was complete."""
    if late:
        return (
            f"the group was complete before this rank came, with {one.who}: two processes with one rank, another job "
            "on this port, or an earlier attempt that does not end"
        )
    places = " and by ".join(f"{member.host} (pid {member.pid})" for member in (one, other))
    rank = max(one.first_rank, other.first_rank)
    return f"rank {rank} was claimed twice: by {places}. Give each process a RANK of its own, 0 to WORLD_SIZE-1."


def describe_differences(members: list[Member], settings: Mapping[str, Mapping[str, str]]) -> str:
    """What differs between members, one line each. `settings`: what must be the same, by the digest of it.

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


def describe_change(
    before: Mapping[str, Any], now: Mapping[str, Any], *, names: Mapping[str, str], why: Mapping[str, str], spares: int
) -> str:
    """What another membership changes, "" where it has the same nodes. `names`, `why`: by token, of nodes, and what
    became of them."""
    names = {token: name for token, _, _, name in before["known"]} | dict(names)
    old, new = set(now["ran"]), set(now["used"])
    if old == new:
        return ""
    parts = [
        f"{names.get(token, 'the node that led')} {why.get(token, 'is lost: it is not here')}"
        for token in sorted(old - new)
    ]
    parts += [f"{names[token]} joins" for token in sorted(new - old)] if old else []
    parts += [f"{spares} spare"] if spares else []
    what = f"membership {now['n']}: {len(new)} node{'s' * (len(new) > 1)}"
    return f"{what}{' (' + '; '.join(parts) + ')' if parts else ''}"


def _who(members: list[Member]) -> str:
    ranks = [rank for member in members for rank in member.ranks]
    hosts = ", ".join(sorted({member.host for member in members})[:4])
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} ({hosts})"


def _by_host(members: Iterable[Member]) -> str:
    """ "0-1 on node0; 2 on node1"."""
    ranks: dict[str, set[int]] = {}
    for member in members:
        ranks.setdefault(member.host, set()).update(member.ranks)
    named = [f"{ranges(numbers)} on {host}" for host, numbers in sorted(ranks.items(), key=lambda item: min(item[1]))]
    more = [f"and ranks on {len(named) - MOST_HOSTS} more machines"] if len(named) > MOST_HOSTS else []
    return "; ".join(named[:MOST_HOSTS] + more)

