"""What the ends of ranks mean for the job: all ranks are started again, or it is over. Decided beside the leader.

The ranks of a job end together. The first one that ends badly ends the membership: every agent has its ranks leave, and
says how each of them ended. Only then is it known why: a rank that lost its peer often ends before the peer itself.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rankup.agent.protocol import KILLED
from rankup.errors import FINISHED, PEER_LOST, STOPPED, root_cause, worth_restarting

# What a collective says when the other side is gone. gloo has no class of its own for it: a plain RuntimeError of C++.
LOST_PEER = re.compile(
    r"gloo/transport/|closed by peer|reset by peer|Broken pipe|connectFullMesh|Timed out waiting \d+ms|Socket closed|"
    r"recvValue|sendBytes|Connection was likely closed|NCCL (error|communicator)|Application timeout|"
    r"Horovod has been shut down",
    re.IGNORECASE,
)


def state_of(code: int) -> str:
    """The word for an exit code, as status files have it."""
    return {FINISHED: "finished", STOPPED: "stopped"}.get(code, "failed")


@dataclass(frozen=True)
class End:
    """How one rank ended. `cause`: in a few words, or empty. `step`: the last one it finished, 0 where it never said.
    `told`: it had been told to leave before, so its code explains nothing. `suspect`: the rank that it lost, if it
    knows."""

    rank: int
    host: str
    code: int
    cause: str = ""
    step: int = 0
    told: bool = False
    suspect: int | None = None

    @property
    def state(self) -> str:
        """finished, stopped or failed."""
        return state_of(self.code)

    @property
    def explains(self) -> bool:
        """Whether its code says why the job ended: not of a rank that only lost another one, or was told to leave."""
        return not self.told and self.code != PEER_LOST and not LOST_PEER.search(self.cause)

    def entry(self) -> dict[str, Any]:
        """What the files of a run say of it."""
        return {
            "rank": self.rank, "host": self.host, "state": self.state, "code": self.code, "why": self.cause,
            "step": self.step, "suspect": self.suspect,
        }

    @staticmethod
    def read(message: Mapping[str, Any], host: str) -> "End":
        """Raises ValueError for what no agent says."""
        try:
            return End(
                int(message["rank"]), host, int(message["code"]), str(message["cause"]), int(message["step"]),
                bool(message["told"]), message.get("suspect"),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no end of a rank: {error}") from None

    def message(self) -> dict[str, Any]:
        """What `read` reads; the host is that of the member who sends it."""
        return {name: value for name, value in asdict(self).items() if name != "host"}

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ended with {self.code}" + (f" ({self.cause})" if self.cause else "")


@dataclass
class Verdict:
    """What is decided: another membership where `code` is None, else the job's end with that code. `text` says why.

    `cause`: the end that explains another membership. `rank`: whose machine may be at fault, None where nobody knows.
    """

    code: int | None
    text: str = ""
    cause: End | None = None
    rank: int | None = None


@dataclass
class Ends:
    """The ends of a membership's ranks, and what they mean.

    `max_restarts`: in a row without a new step. `restart_on`: codes below 128 that are worth a restart too.
    """

    world_size: int
    max_restarts: int
    restart_on: Collection[int] = ()
    restarts: int = 0  # of all memberships so far
    without_progress: int = 0  # restarts since a new step was finished
    furthest_step: int = 0
    stopped_by: str = ""  # the signal that somebody has sent, which asks the job to stop
    latest: list[End] = field(default_factory=list)  # of the last membership that was judged
    _ends: dict[int, End] = field(default_factory=dict)  # the first that ended first

    def add(self, end: End) -> bool:
        """Take note of an end. Returns whether it ends the membership: it is bad, or the last one."""
        self._ends.setdefault(end.rank, end)
        return end.code != FINISHED or len(self._ends) == self.world_size

    @property
    def all_finished(self) -> bool:
        """Whether every rank has ended with 0."""
        return len(self._ends) == self.world_size and all(end.code == FINISHED for end in self._ends.values())

    def lose(self, ranks: Iterable[int], host: str, why: str) -> None:
        """Their agent is gone, and they with it."""
        for rank in ranks:
            self._ends.setdefault(rank, End(rank, host, KILLED, why))

    def judge(self, *, changing: bool = False) -> Verdict:
        """Decide, once every rank has ended. The next membership begins without ends. `changing`: the ranks were asked
        to stop for it."""
        ends, self._ends = list(self._ends.values()), {}
        self.latest = ends
        if not ends:
            return Verdict(STOPPED if self.stopped_by else None)
        explaining = [end for end in ends if end.explains]
        told = any(end.told for end in ends)
        code = root_cause([end.code for end in explaining], stopped=bool(self.stopped_by), rest_stopped=told)
        if code == FINISHED and any(end.code != FINISHED or end.told for end in ends):
            # Ranks lost each other, and none of them says why
            code = STOPPED if self.stopped_by or changing else PEER_LOST
        cause = next((end for end in ends if end.code == code), ends[0])
        if code == STOPPED and changing and not self.stopped_by:
            self.restarts += 1
            return Verdict(None)
        if self.stopped_by or code in (FINISHED, STOPPED):
            return Verdict(code, self.stopped_by)
        if not (worth_restarting(code) or code in self.restart_on):
            return Verdict(code, str(cause))
        step = max(end.step for end in ends)
        if step > self.furthest_step:
            self.furthest_step, self.without_progress = step, 0
        if self.without_progress >= self.max_restarts:
            return Verdict(code, f"{cause}; gave up after {self.max_restarts} restarts without progress")
        self.restarts += 1
        self.without_progress += 1
        # Of the attempts since then: the one that reached the newest step is none of them
        vain = self.without_progress - (self.furthest_step > 0)
        rank = next((end.rank for end in explaining if end.code == code), cause.suspect)
        return Verdict(
            None, f"{cause}, restarted ({vain} of {self.max_restarts} attempts without progress)", cause, rank
        )
