"""Votes of the nodes of an elastic job: if the network is cut, at most one part of the job goes on. No I/O.

Each proposal carries a basis, which says who may form the next membership: a majority of its `voters`, or half of them
(see `claims`). These must include a node in use, one of `used`: without its ranks the last membership can't still run
elsewhere, and it has the state. All voters, spares included, get a proposal before its commit. Nobody knows whether a
proposal was committed, so the same holds for each of the memberships `before` it: until a proposal is committed, or
until majorities of both groups know that a spare came or left (Raft's joint consensus).

A spare that takes a lost node's place has no state until its ranks have restored it. So each proposal also needs a node
that has the state of membership `state`, or of a newer one.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

Age = tuple[int, int, int, str]
Address = tuple[str, int]
Tokens = tuple[str, ...]


class Node(NamedTuple):
    """A member as all others know it."""

    token: str  # the id of its process
    ip: str
    serves: int  # the port where it serves members or says who leads, in an elastic job
    port: int  # where it listens for the route test of another member
    host: str
    first: int  # the first rank that it claimed when it came
    size: int  # its number of ranks

    @property
    def address(self) -> Address:
        return self.ip, self.serves

    @property
    def name(self) -> str:
        return f"node {self.first // self.size} on {self.host}"


@dataclass(frozen=True)
class Basis:
    """What all members know of the newest membership. `n`: its number. `v`: its version: 0 while it is a proposal, 1
    after the commit, and more after each change of voters. `by`: the token of the leader that made it, because two
    leaders that are cut apart may use the same number. `known`: all members in the order in which they would lead:
    those in use by rank, then spares. `used`, `voters`: tokens. `before`: number, voters and nodes in use of each
    membership that may still be the newest for others; no nodes if one of them has left. `left`: a node in use has left
    for good, after its ranks had ended. `same_arguments`: all nodes began with equal arguments. `state`: the membership
    whose state the ranks of this one restore; 0 if nodes know of none, or if the disk has it."""

    n: int = 0
    v: int = 0
    by: str = ""
    job: str = ""
    known: tuple[Node, ...] = ()
    used: Tokens = ()
    voters: Tokens = ()
    before: tuple[tuple[int, Tokens, Tokens], ...] = ()
    left: bool = False
    same_arguments: bool = False
    state: int = 0

    @property
    def age(self) -> Age:
        """A sort key that is larger for a newer basis. If a proposal follows membership 3, any commit after 3 is newer,
        whatever the numbers: a leader that is cut off may propose again and again with higher numbers."""
        return self.follows, self.n, self.v, self.by

    @property
    def follows(self) -> int:
        """The newest membership that is known to be committed."""
        return self.before[-1][0] if self.before else self.n

    @property
    def numbers(self) -> list[int]:
        """The memberships before it that may be the newest for others."""
        return [n for n, *_ in self.before]

    @property
    def electorates(self) -> list[tuple[int, Tokens, Tokens]]:
        """Each membership that may be the newest: a majority of its voters, and one of its nodes in use, are needed."""
        return [(self.n, self.voters, () if self.left else self.used), *self.before]

    @property
    def trained(self) -> Tokens:
        """The nodes of the last committed membership, by rank; () if one of them has left."""
        return self.used if self.follows == self.n else self.before[-1][2]

    def hosts(self) -> list[tuple[str, int]]:
        """Return each host in use, by rank, with its number of ranks."""
        used = (node for node in self.known[:len(self.used)])
        return [(host, sum(node.size for node in nodes)) for host, nodes in groupby(used, key=lambda node: node.host)]

    # What travels -----------------------------------------------------------------------------------------------------

    def pack(self, base: "Basis | None" = None) -> dict[str, Any]:
        """Return this basis as a message holds it: members by their index in `known`. `base`: what the receiver has
        already, so that only changes of `known` travel."""
        known: dict[str, Any] = {"gone": [], "more": self.known}
        if base is not None:
            here = set(self.known)
            kept = [node for node in base.known if node in here]
            if tuple(kept) == self.known[:len(kept)]:
                gone = [place for place, node in enumerate(base.known) if node not in here]
                known = {"from": base.age, "gone": gone, "more": self.known[len(kept):]}
        index = {node.token: place for place, node in enumerate(self.known)}
        return {
            "n": self.n, "v": self.v, "by": self.by, "job": self.job, "known": known, "used": _runs(self.used, index),
            "voters": _runs(self.voters, index), "left": self.left, "same_arguments": self.same_arguments,
            "before": [[n, _runs(voters, index), _runs(used, index)] for n, voters, used in self.before],
            "state": self.state,
        }

    @staticmethod
    def unpack(packed: Mapping[str, Any], base: "Basis") -> "Basis":
        """Return the basis of a message, which must have the form `protocol.BASIS`. Raises LookupError if it is a
        difference to another basis than `base`."""
        known, kept = packed["known"], base.known
        if known.get("from") is None:
            kept = ()
        elif tuple(known["from"]) != base.age:
            raise LookupError
        elif known["gone"]:
            gone = set(known["gone"])
            kept = tuple(node for place, node in enumerate(base.known) if place not in gone)
        nodes = (*kept, *(Node(*each) for each in known["more"]))
        return Basis(
            packed["n"], packed["v"], packed["by"], packed["job"], nodes, _tokens(packed["used"], nodes),
            _tokens(packed["voters"], nodes),
            tuple((n, _tokens(voters, nodes), _tokens(used, nodes)) for n, voters, used in packed["before"]),
            packed["left"], packed["same_arguments"], packed["state"],
        )


def _runs(tokens: Iterable[str], index: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return tokens as runs ("", first, end) of places in a list of nodes. (token, 0, 0) is one that is not there."""
    runs: list[tuple[str, int, int]] = []
    for token in tokens:
        place = index.get(token)
        if place is None:
            runs.append((token, 0, 0))
        elif runs and runs[-1][2] == place and not runs[-1][0]:
            runs[-1] = "", runs[-1][1], place + 1
        else:
            runs.append(("", place, place + 1))
    return runs


def _tokens(runs: Sequence[Sequence[Any]], nodes: Sequence[Node]) -> Tokens:
    found: list[str] = []
    for token, first, end in runs:
        if token:
            found.append(token)
        else:
            found += [node.token for node in nodes[first:end]]
    if len(found) > len(nodes) + len(runs):  # each member is there once; a stranger's list could fill the memory
        raise LookupError
    return tuple(found)


# Who may go on --------------------------------------------------------------------------------------------------------


def is_majority(tokens: Collection[str], voters: Collection[str]) -> bool:
    """Return whether more than half of `voters` are among `tokens`, a set or dict."""
    return 2 * sum(token in tokens for token in voters) > len(voters)


def outvoted(basis: Basis, here: Collection[str], *, shared: bool) -> str:
    """Return why the nodes `here` must not go on, because the others might do so too, or "" if they may go on.
    `shared`: whether the job has a `--shared-dir`."""
    for n, voters, used in basis.electorates:
        ended = not used or any(token in here for token in used)
        present = [token for token in voters if token in here]
        half = 2 * len(present) == len(voters) and (present[:1] == list(voters[:1]) or shared)
        if voters and not ((is_majority(here, voters) or half) and ended):
            why = "no majority" if ended else "none of those that trained"
            return f"{len(present)} of the {len(voters)} nodes of membership {n} are here, {why}"
    return ""


def claims(basis: Basis, here: Collection[str]) -> set[int]:
    """Return the memberships of which no majority of voters is `here`. There may be two halves, so the nodes must claim
    each of these in `--shared-dir`, which only one half can. Without `--shared-dir`, the first voter's half goes on."""
    return {n for n, voters, _ in basis.electorates if voters and not is_majority(here, voters)}


def without(basis: Basis, token: str, *, heirs: Tokens) -> Basis:
    """Return the basis after a node has left: its ranks have saved and ended for good, and it loses its vote. After
    the last voter, the `heirs` vote: without them, any two newcomers could go on apart."""
    (_, voters, _), *before = [
        (n, tuple(one for one in voters if one != token), () if token in used else used)
        for n, voters, used in basis.electorates
    ]
    left = replace(basis, voters=voters or heirs, before=tuple(before))
    return replace(left, left=True, state=0) if token in basis.used else left


def merge(one: Basis, other: Basis) -> Basis:
    """Return what a leader knows that has heard of both. The older one may be a proposal that another leader has
    committed by now, so its voters are asked too."""
    one, other = _after(one, other), _after(other, one)
    newer, older = sorted((one, other), key=lambda each: each.age)[::-1]
    if newer.follows == older.follows and newer.by != older.by:
        more = [each for each in older.electorates if each not in newer.electorates]
        newer = replace(newer, before=(*more, *newer.before), state=max(newer.state, older.state))
    return newer


def _after(proposal: Basis, other: Basis) -> Basis:
    """Return a proposal whose leader did not know that the membership before it, which `other` follows, was committed.
    It is newer than that commit."""
    if not proposal.follows < other.follows or other.follows not in proposal.numbers:
        return proposal
    before = tuple((n, voters, () if other.left and n == other.follows else used)
                   for n, voters, used in proposal.before if n >= other.follows)
    return replace(proposal, before=before)


def recount(basis: Basis, spares: Iterable[str], knowing: Collection[str]) -> Basis | None:
    """Return the basis after new spares get a vote or lost spares lose theirs; None if nothing changes. The next change
    waits until majorities know the last one. `knowing`: the nodes that know it."""
    if not all(is_majority(knowing, voters) for _, voters, _ in basis.electorates):
        return None
    if basis.before:
        return replace(basis, before=())
    wanted = dict.fromkeys([*basis.used, *spares])
    changed = tuple(token for token in dict.fromkeys([*basis.voters, *wanted]) if token in wanted)
    return replace(basis, voters=changed, before=tuple(basis.electorates)) if changed != basis.voters else None


# How all ranks stop before the same step ------------------------------------------------------------------------------

MARGIN = 2  # how many steps after the furthest rank all ranks are asked to stop; doubled each time this was too few


class StopAgreement:
    """The leader's side of the agreement. A rank writes the step that it is about to begin, then reads the step before
    which to stop (`may_begin`). A member writes the step to stop before, then reads the rank's step (`ask_to_stop`). No
    rank waits inside a step. A rank that does not come that far within REACH_S keeps its last finished step and leaves.

    | prepare(n, stop)        | leader | make your ranks wait before step `stop`, and report how far they are     |
    | standing(n, stop, step) | member | the furthest step that one of my ranks has begun, after I wrote `stop`   |
    | confirm(n, stop)        | leader | no rank has begun `stop`, and none will: stop before it                  |

    `step`: the step before which to stop. Its first value, 0, only asks how far all ranks are. `confirmed`: no rank has
    begun `step`, or will begin it."""

    def __init__(self, members: Iterable[object]) -> None:
        self.members = frozenset(members)
        self.step, self.confirmed = 0, False
        self._margin, self._answers = MARGIN, dict[object, int]()  # the answer of each member about `step`

    def answer(self, member: object, *, stop: int, step: int) -> bool:
        """Take a member's `standing`, which answers a `prepare`. Returns whether all members have answered. The leader
        then confirms `step` if `confirmed` is set, and otherwise prepares the new `step`."""
        # `prepare` goes to spares too, and an answer that comes twice may be about an earlier step
        if member not in self.members or stop != self.step or self.confirmed:
            return False
        self._answers[member] = step
        if len(self._answers) < len(self.members):
            return False
        furthest = max(self._answers.values())
        if furthest < self.step:
            self.confirmed = True
        else:
            self.step = furthest + self._margin
            self._margin *= 2
            self._answers = {}
        return True
