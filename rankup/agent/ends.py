"""How ranks and jobs end: what an end means for the job, and which files of a run record it. Imports no torch.

The first rank that fails ends the membership: every agent tells its ranks to leave, and reports how each of them ended.
Only then is the cause known, because a rank that lost another rank often ends before the lost rank itself.

| status.json                         | the run; written by node 0's agent, or by rank 0 if the script imports rankup |
| status/<attempt>/rank-N.json        | how each rank ended; written by its agent, or by the rank itself              |
| status/<attempt>/progress-*.json    | how the attempt goes; written by the same process as status.json              |
| the file in TORCHELASTIC_ERROR_FILE | what torchrun's summary shows; written by the rank                            |

A reader that finds no `status.json`, or one of another attempt, must assume that the run failed. Otherwise it would
report yesterday's success as today's."""

import contextlib
import json
import os
import re
import secrets
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rankup.env.rank_env import RankEnv
from rankup.errors import (
    FAULT,
    FINISHED,
    PEER_LOST,
    STOPPED,
    USER_MISTAKE,
    JoinError,
    PeerLost,
    root_cause,
    worth_restarting,
)
from rankup.places.files import read_json, snapshot_here, write_atomically, write_json
from rankup.places.lease import Lease
from rankup.timing import HEALTHY_S, VICTIM_LATER_S

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
        return {**asdict(self), "state": _state_of(self.code)}

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


def _state_of(code: int) -> str:
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


# The files of a run ---------------------------------------------------------------------------------------------------


def write_end(run_dir: Path, attempt: str, end: End) -> None:
    """Write how one rank ended. A full disk must not hide the reason, so this raises no OSError."""
    with contextlib.suppress(OSError):
        write_json(run_dir / "status" / attempt / f"rank-{end.rank}.json", {"attempt": attempt, **end.entry()})


@dataclass(frozen=True, kw_only=True)
class Report:
    """The newest report on one attempt. Rank 0 writes it. If the script does not import rankup, the leader writes it
    without steps. Times are `time.time()` on the writer's machine."""

    run: str  # the id of the run
    attempt: str
    began: float  # when rank 0's process began
    time: float  # when this report was written
    first_step: int = 0
    step: int = 0
    total_steps: int | None = None  # None if unknown
    finished: bool  # the run ended with this attempt
    seconds: dict[str, float] = field(default_factory=dict)  # by kind, for the whole attempt so far
    unit: str = ""
    per_s: float = 0.0
    remaining_s: float | None = None  # estimated; None before the first step
    metrics: dict[str, float] = field(default_factory=dict)  # the newest values of training and evaluation
    ranks: list[dict[str, Any]]  # the last heartbeat of each rank
    open_s: float = 0.0  # how long rank 0 had been in its step, or in its wait for data
    nodes: list[dict[str, Any]] = field(default_factory=list)  # see `Leader.nodes`

    def write(self, run_dir: Path) -> None:
        """Replace this attempt's file. Raises OSError."""
        # A launcher may give the same id to two attempts, so the file name also contains a time
        path = run_dir / "status" / self.attempt / f"progress-{self.began:.2f}.json"
        write_atomically(path, json.dumps(vars(self)) + "\n")


class StatusFile:
    """The file `status.json` of a run, which rank 0 writes. `attempt`: the attempt's id; all ranks adopt rank 0's.
    `begun`: the run has begun or resumed. Before that, a user's mistake does not replace an earlier attempt's end, and
    nothing replaces that of a finished run."""

    def __init__(self, run_dir: Path, rank_env: RankEnv) -> None:
        self.run_dir = run_dir
        self.attempt = rank_env.attempt or new_job()
        self.rank, self.world_size = rank_env.rank, rank_env.world_size
        self.begun = False
        self.owner: Lease | None = None
        self._ended: dict[str, Any] | None = None  # the summary of an earlier attempt that finished or was stopped

    def claim(self, owner: Lease) -> None:
        """Write as the owner of the run directory, as long as the lease `owner` is held. Only rank 0 calls this."""
        self.owner = owner
        self.write_summary([])

    def write_summary(self, ends: Iterable[End], *, code: int | None = None, why: str = "") -> None:
        """Write the file if this is rank 0 and may write. `ends`: empty while the run goes on, then all ranks' ends.
        `code`, `why`: how the run ended; by default, how the rank that caused the end did."""
        earlier = read_json(self.run_dir / "status.json") if self.rank == 0 else {}
        theirs = earlier.get("attempt") != self.attempt
        # A second attempt that the lease is about to refuse must not overwrite the status of a live attempt
        denied = theirs and earlier.get("state") == "running" and (self.run_dir / "lease.json").exists()
        if self.rank != 0 or (self.owner is None and denied):
            return
        if theirs and earlier.get("state") in ("finished", "stopped"):
            self._ended = earlier
        ends = sorted(ends, key=lambda end: end.rank)
        if code is None and ends:
            code = root_cause([end.code for end in ends])
            why = next(end.why for end in ends if end.code == code)
        summary = {
            "attempt": self.attempt, "state": "running" if code is None else _state_of(code),
            "world_size": self.world_size, "code": code, "why": why, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ranks": {str(end.rank): end.entry() for end in ends}, **snapshot_here(),
        }
        untouched = code == USER_MISTAKE or (code and self._ended and self._ended["state"] == "finished")
        if untouched and not self.begun and self._ended is not None:
            summary = self._ended
        with contextlib.suppress(OSError, PeerLost):  # PeerLost: another attempt owns the run by now
            write_json(self.run_dir / "status.json", summary, check=self.owner.check if self.owner else None)


class ScriptStatus(StatusFile):
    """The status of a script that does not import rankup. The leader writes it. `held` holds the lease."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, RankEnv())
        self.begun, self.held = True, contextlib.ExitStack()
        self._began = time.time()

    def take(self, attempt: str, *, agreed: bool) -> bool:
        """Take the run's lease. Returns whether an earlier job of the run was killed or ended with a code from 128 on.
        Takes up to 10 s. `agreed`: see `Lease`. Raises OSError, or UserError if a live attempt owns the run."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.owner = self.held.enter_context(Lease(self.run_dir, attempt, agreed=agreed))
        code = read_json(self.run_dir / "status.json").get("code", FINISHED)
        return code is None or int(code) >= 128

    def begin(self, attempt: str, world_size: int) -> None:
        self.attempt, self.world_size, self._began = attempt, world_size, time.time()
        self.write_summary([])

    def end(self, code: int, why: str, ends: Iterable[End]) -> None:
        self.write_summary(ends, code=code, why=why)
        self.report(finished=code == FINISHED)

    def report(
        self, *, finished: bool = False, heartbeats: Sequence[dict[str, Any]] = (), nodes: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Write how the attempt goes, for `rankup status`. `heartbeats`, `nodes`: see `Leader`."""
        now = time.time()
        ranks = [{**heartbeat, "seen": now - heartbeat["ago_s"]} for heartbeat in heartbeats]
        run, attempt = job_of(self.attempt), self.attempt
        report = Report(
            run=run, attempt=attempt, began=self._began, time=now, finished=finished, ranks=ranks, nodes=list(nodes)
        )
        with contextlib.suppress(OSError):
            report.write(self.run_dir)


def tell_torchrun(error: BaseException) -> None:
    """Write the error file for torchrun's summary, which says "error_file: <N/A>" without it (pytorch 113546)."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    # Keep only the first error: a failing rank waits for the others, so a later error is a consequence
    if "RANKUP_AGENT" in os.environ or path == Path() or path.exists() or not isinstance(error, Exception):
        return
    later_s = VICTIM_LATER_S if isinstance(error, JoinError | PeerLost) else 0
    stack = "".join(traceback.format_exception(error))
    more = {"py_callstack": stack, "timestamp": str(int(time.time()) + later_s)}
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself
        write_json(path, {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}})


def what_next(run_dir: Path) -> str:
    """Return which commands the user can type after a script has failed."""
    return f"`rankup explain {run_dir}` says why, `rankup logs {run_dir}` has all lines"
