"""How ranks and jobs end: what an end means for the job. No I/O; `status_files` has the files.

The first rank that fails ends the membership: every agent tells its ranks to leave, and reports how each of them ended.
Only then is the cause known, because a rank that lost another rank often ends before the lost rank itself."""

import re
import secrets
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rankup.errors import FAULT, FINISHED, PEER_LOST, STOPPED, root_cause, worth_restarting
from rankup.timing import HEALTHY_S

# The errors of collectives: classes of torch and Horovod, and gloo's RuntimeError, which names a line of C++. A
# script's own network errors, such as those of a store or a tracker, are of other classes, or name no such line
COLLECTIVE = re.compile(
    r"(?:\w+\.)*(?:Dist\w*|HorovodInternal)Error: |"
    r"RuntimeError: .*(?:\[\S+\.(?:cc|cpp|h|hpp):\d+\]|connectFullMesh|NCCL (?:error|communicator))"
)
# Parts of the texts of those that have lost a peer
LOST_PEER = re.compile(
    r"gloo/transport/|closed by peer|reset by peer|Broken pipe|connectFullMesh|Timed out waiting \d+ms|Socket closed|"
    r"recvValue|sendBytes|Connection was likely closed|NCCL (error|communicator)|Application timeout|"
    r"Horovod has been shut down",
    re.IGNORECASE,
)


def is_peer_loss(why: str) -> bool:
    """Return whether an error, its class and its text, says that a collective has lost a peer."""
    return COLLECTIVE.match(why) is not None and LOST_PEER.search(why) is not None


def new_job() -> str:
    """Return a new id for a job. Ids sort by time, and two ids of the same second differ. The id of an attempt is the
    job's id and "-N" for restart N."""
    return time.strftime("%Y%m%dT%H%M%S-") + secrets.token_hex(3)


def job_of(attempt: str) -> str:
    """Return the id of the job that this attempt belongs to, which is the first part of the attempt's id."""
    return "-".join(attempt.split("-")[:2])


# Ends of ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    host: str
    code: int
    why: str = ""  # in a few words
    step: int = 0  # the last step that the rank reported, or 0
    told: bool = False  # the rank was told to leave, so its code explains nothing
    suspect: int | None = None  # the rank that this rank lost, if known

    @property
    def explains(self) -> bool:
        """Whether this end may be the cause: the rank was not told to leave, and did not just lose another rank."""
        return not self.told and self.code != PEER_LOST and not is_peer_loss(self.why)

    @property
    def blamed(self) -> int | None:
        """The rank whose machine may be at fault; None if unknown."""
        return self.rank if self.explains else self.suspect

    def entry(self) -> dict[str, Any]:
        """Return this end as messages and the files of a run hold it."""
        return {**asdict(self), "state": outcome_of(self.code)}

    @staticmethod
    def read(entry: Mapping[str, Any]) -> "End":
        """Read what `entry` returned. `entry` must have the form `protocol.END`."""
        return End(**{each.name: entry[each.name] for each in fields(End) if entry.get(each.name) is not None})

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ended with {self.code}" + (f" ({self.why})" if self.why else "")


def cause_of(ends: Sequence[End]) -> tuple[int, End]:
    """Return the exit code of all these ends together, and the end that explains it. `ends`: at least one, in the order
    in which the ranks ended."""
    # An end that explains nothing counts as a peer loss, whatever its code
    code = root_cause([end.code if end.explains else PEER_LOST for end in ends])
    return code, next((end for end in sorted(ends, key=lambda end: not end.explains) if end.code == code), ends[0])


def outcome_of(code: int) -> str:
    """Return the state of a rank or a run that has ended with this code."""
    return {FINISHED: "finished", STOPPED: "stopped"}.get(code, "failed")


@dataclass
class Verdict:
    """The decision after a membership has ended: start another one if `code` is None, else end the job with `code`."""

    code: int | None
    text: str = ""  # the reason
    cause: End | None = None  # the failure that made another membership necessary


@dataclass
class Ends:
    """Collects the ends of a membership's ranks, and decides what happens next."""

    world_size: int
    max_restarts: int  # give up after this many restarts in a row without a new step
    restart_on: Collection[int] = ()  # restart after these codes below 128 too
    elastic: bool = False  # the number of nodes may change, so a lost node is no reason to give up
    restarts: int = 0  # restarts in all memberships so far
    without_progress: int = 0  # restarts since the last new step
    furthest_step: int = 0
    stopped_by: str = ""  # the signal that asked the job to stop
    latest: list[End] = field(default_factory=list)  # the ends of the last membership that was judged
    smallest: int = sys.maxsize  # the fewest ranks of a membership so far
    _ends: dict[int, End] = field(default_factory=dict)  # by rank, in the order in which the ranks ended
    _with_node: dict[int, float] = field(default_factory=dict)  # by rank of a lost node: how long the membership ran
    _progressed: bool = False  # whether an attempt has made progress

    def add(self, end: End) -> bool:
        """Add an end. Returns whether every rank has ended now."""
        self._ends.setdefault(end.rank, end)
        return len(self._ends) == self.world_size

    def add_lost_node(self, ends: Iterable[End], *, after_s: float) -> None:
        """Add the ends of all ranks of a lost node. `after_s`: how long the membership had run."""
        for end in ends:
            self._with_node[end.rank] = after_s
            self.add(end)

    def judge(self, *, resizing: bool = False, next_size: int | None = None) -> Verdict:
        """Decide after every rank has ended. `resizing`: the ranks were asked to stop for another membership.
        `next_size`: how many ranks that membership has, by default as many as this one.

        An attempt made progress if it reached a new step. An unchanged script reports no steps, so a lost node does not
        count against it in an elastic job, after HEALTHY_S, or if the job has shrunk.
        """
        ends = self.latest = list(self._ends.values())
        self._ends, with_node, self._with_node = {}, self._with_node, {}
        self.smallest = min(self.smallest, self.world_size)
        shrinks = next_size is not None and next_size < self.smallest
        if not ends:
            return Verdict(STOPPED if self.stopped_by else None)
        code, cause = cause_of(ends)
        if code == PEER_LOST and ends[0].code == FINISHED and ends[0].explains and not (self.stopped_by or resizing):
            # The others lost a rank that had no work left. They would lose it again in each attempt
            first = next(end.rank for end in ends if end.code != FINISHED)
            why = f"it ended with 0 while rank {first} still exchanged data with it"
            code, cause = FAULT, replace(ends[0], code=FAULT, why=why)
            self.latest[0] = cause
        if code == PEER_LOST and (self.stopped_by or resizing):
            code = STOPPED
        if code == STOPPED and resizing and not self.stopped_by:
            self.restarts += 1
            return Verdict(None)
        if self.stopped_by or code in (FINISHED, STOPPED):
            return Verdict(STOPPED if code >= 128 else code, self.stopped_by)
        if not (worth_restarting(code) or code in self.restart_on):
            return Verdict(code, str(cause))
        step = max(end.step for end in ends)
        if step > self.furthest_step:
            self.furthest_step, self.without_progress, self._progressed = step, 0, True
        elif cause.rank in with_node and (self.elastic or shrinks or with_node[cause.rank] >= HEALTHY_S):
            self.without_progress, self._progressed = 0, True
        if self.without_progress >= self.max_restarts:
            return Verdict(code, f"{cause}; gave up after {self.max_restarts} restarts without progress")
        self.restarts += 1
        self.without_progress += 1
        # The attempt that made the last progress does not count
        vain = self.without_progress - self._progressed
        return Verdict(None, f"{cause}, restarted ({vain} of {self.max_restarts} attempts without progress)", cause)
