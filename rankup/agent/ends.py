"""How ranks and jobs end: what an end means for the job, and which files of a run record it. No torch here.

The first rank that ends badly ends the membership: every agent tells its ranks to leave, and reports how each ended.
Only then is the cause known, because a rank that lost its peer often ends before the peer itself.

| status.json                         | the run: by node 0's agent, or by rank 0 of a script that imports rankup |
| status/<attempt>/rank-N.json        | how each rank ended: by its agent, or by the rank itself                 |
| status/<attempt>/progress-*.json    | how the attempt goes                                                     |
| the file in TORCHELASTIC_ERROR_FILE | what torchrun's summary shows                                            |

A reader that finds no `status.json`, or another attempt's id in it, takes the run for failed: yesterday's success must
never be read as today's.
"""

import contextlib
import json
import os
import re
import secrets
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rankup.env.rank_env import RankEnv
from rankup.errors import FINISHED, PEER_LOST, STOPPED, USER_MISTAKE, JoinError, PeerLost, root_cause, worth_restarting
from rankup.places.files import read_json, write_atomically, write_json
from rankup.places.lease import Lease
from rankup.timing import VICTIM_LATER_S

# What a collective says when the other side is gone. gloo has no class of its own for it: a plain RuntimeError of C++.
LOST_PEER = re.compile(
    r"gloo/transport/|closed by peer|reset by peer|Broken pipe|connectFullMesh|Timed out waiting \d+ms|Socket closed|"
    r"recvValue|sendBytes|Connection was likely closed|NCCL (error|communicator)|Application timeout|"
    r"Horovod has been shut down",
    re.IGNORECASE,
)


def new_job() -> str:
    """A new id of a job; that of its restart N, the attempt, ends in -N. Ids sort by time, and two made in one second
    differ."""
    return time.strftime("%Y%m%dT%H%M%S-") + secrets.token_hex(3)


def job_of(attempt: str) -> str:
    """The job part of an attempt's id."""
    return "-".join(attempt.split("-")[:2])


# Ends of ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    host: str
    code: int
    cause: str = ""  # in a few words
    step: int = 0  # the last one it finished, 0 where it never said
    told: bool = False  # to leave, so that its code explains nothing
    suspect: int | None = None  # the rank that it lost, if it knows

    @property
    def explains(self) -> bool:
        """Why the job ended: not of a rank that only lost another one, or was told to leave."""
        return not self.told and self.code != PEER_LOST and not LOST_PEER.search(self.cause)

    @property
    def blamed(self) -> int | None:
        """The rank whose machine may be at fault, None where nobody knows."""
        return self.rank if self.explains else self.suspect

    def entry(self) -> dict[str, Any]:
        """What the files of a run say of it."""
        return {
            "rank": self.rank, "host": self.host, "state": _state_of(self.code), "code": self.code, "why": self.cause,
            "step": self.step, "suspect": self.suspect, "told": self.told,
        }

    @staticmethod
    def read(message: Mapping[str, Any], host: str) -> "End":
        """Raises LookupError, TypeError and ValueError for what no rank says."""
        return End(
            int(message["rank"]), host, int(message["code"]), str(message["cause"]), int(message["step"]),
            bool(message["told"]), message.get("suspect"),
        )

    def message(self) -> dict[str, Any]:
        """What `read` reads; the host is that of the member who sends it."""
        return {name: value for name, value in asdict(self).items() if name != "host"}

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ended with {self.code}" + (f" ({self.cause})" if self.cause else "")


def cause_of(ends: Sequence[End]) -> tuple[int, End]:
    """The code that these ends mean together, and the one that says why. `ends`: as for `root_cause`, at least one."""
    # All that the others say is that they lost somebody, whatever their code
    code = root_cause([end.code if end.explains else PEER_LOST for end in ends])
    return code, next((end for end in sorted(ends, key=lambda end: not end.explains) if end.code == code), ends[0])


def _state_of(code: int) -> str:
    return {FINISHED: "finished", STOPPED: "stopped"}.get(code, "failed")


@dataclass
class Verdict:
    """What is decided: another membership where `code` is None, else the job's end with that code."""

    code: int | None
    text: str = ""  # why
    cause: End | None = None  # of another membership


@dataclass
class Ends:
    """The ends of a membership's ranks, and what they mean."""

    world_size: int
    max_restarts: int  # in a row without a new step
    restart_on: Collection[int] = ()  # codes below 128 that are worth a restart too
    restarts: int = 0  # of all memberships so far
    without_progress: int = 0  # restarts since a new step was finished
    furthest_step: int = 0
    stopped_by: str = ""  # the signal that somebody has sent, which asks the job to stop
    latest: list[End] = field(default_factory=list)  # of the last membership that was judged
    _ends: dict[int, End] = field(default_factory=dict)  # the first that ended first

    def add(self, end: End) -> bool:
        """Take note of an end. Returns whether it was the last one."""
        self._ends.setdefault(end.rank, end)
        return len(self._ends) == self.world_size

    def judge(self, *, changing: bool = False) -> Verdict:
        """Decide, once every rank has ended. `changing`: the ranks were asked to stop for another membership."""
        ends = self.latest = list(self._ends.values())
        self._ends = {}
        if not ends:
            return Verdict(STOPPED if self.stopped_by else None)
        code, cause = cause_of(ends)
        if code == PEER_LOST and (self.stopped_by or changing):
            code = STOPPED
        if code == STOPPED and changing and not self.stopped_by:
            self.restarts += 1
            return Verdict(None)
        if self.stopped_by or code in (FINISHED, STOPPED):
            return Verdict(STOPPED if code >= 128 else code, self.stopped_by)
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
        return Verdict(None, f"{cause}, restarted ({vain} of {self.max_restarts} attempts without progress)", cause)


# The files of a run ---------------------------------------------------------------------------------------------------


def write_end(run_dir: Path, attempt: str, end: End) -> None:
    """How one rank ended. A full disk must not hide the reason."""
    with contextlib.suppress(OSError):
        write_json(run_dir / "status" / attempt / f"rank-{end.rank}.json", {"attempt": attempt, **end.entry()})


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is last known of one attempt: rank 0 says it, or the leader of a script that does not import rankup, of
    whose steps nobody knows. Times are of `time.time()` on its machine."""

    run: str  # its id
    attempt: str
    began: float  # the process of rank 0
    time: float  # of writing this
    first_step: int = 0
    step: int = 0
    total_steps: int | None = None  # None where nobody knows
    finished: bool  # the run ended with this attempt
    seconds: dict[str, float] = field(default_factory=dict)  # of the whole attempt so far, by kind
    unit: str = ""
    per_s: float = 0.0
    remaining_s: float | None = None  # estimated; None before the first step
    metrics: dict[str, float] = field(default_factory=dict)  # the newest values of training and evaluation
    ranks: list[dict[str, Any]]  # what is last heard of each
    open_s: float = 0.0  # for how long rank 0 had been in a step by then, or in its wait for data
    nodes: list[dict[str, Any]] = field(default_factory=list)  # see `Leader.nodes`

    def write(self, run_dir: Path) -> None:
        """Replace the file of this attempt. Raises OSError."""
        # Launchers may give an id twice, so the name has more than the attempt's
        path = run_dir / "status" / self.attempt / f"progress-{self.began:.2f}.json"
        write_atomically(path, json.dumps(vars(self)) + "\n")


class StatusFile:
    """`status.json` of a run directory, which rank 0 writes. `attempt`: its id; the ranks take over rank 0's when they
    meet. `begun`: before, a mistake of the user is that of a command, and no end of the run."""

    def __init__(self, run_dir: Path, launch: RankEnv) -> None:
        self.run_dir = run_dir
        self.attempt = launch.attempt or new_job()
        self.rank, self.world_size = launch.rank, launch.world_size
        self.begun = False
        self.owner: Lease | None = None
        self._ended: dict[str, Any] | None = None  # what an earlier attempt left that finished or was stopped

    def claim(self, owner: Lease) -> None:
        """The run directory is ours as long as `owner` says so. Rank 0 only."""
        self.owner = owner
        self.write_summary([])

    def write_summary(self, ends: Iterable[End], *, code: int | None = None, why: str = "") -> None:
        """Write it, on rank 0 and where it may: without ends while the run goes on, then with all. `code`, `why`: of
        the run. By default those of the rank that ended it, not of the ranks that lost that rank."""
        earlier = read_json(self.run_dir / "status.json") if self.rank == 0 else {}
        theirs = earlier.get("attempt") != self.attempt
        # Before ownership is settled: a second attempt that is refused must leave no trace in the status of a live one
        denied = theirs and earlier.get("state") == "running" and (self.run_dir / "lease.json").exists()
        if self.rank != 0 or (self.owner is None and denied):
            return
        if theirs and earlier.get("state") in ("finished", "stopped"):
            self._ended = earlier
        ends = sorted(ends, key=lambda end: end.rank)
        if code is None and ends:
            code = root_cause([end.code for end in ends])
            why = next(end.cause for end in ends if end.code == code)
        summary = {
            "attempt": self.attempt, "state": "running" if code is None else _state_of(code),
            "world_size": self.world_size, "code": code, "why": why, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ranks": {str(end.rank): end.entry() for end in ends},
        }
        if code == USER_MISTAKE and not self.begun and self._ended is not None:
            summary = self._ended
        with contextlib.suppress(OSError, PeerLost):  # another attempt owns the run by now
            write_json(self.run_dir / "status.json", summary, check=self.owner.check if self.owner else None)


class ScriptStatus(StatusFile):
    """That of a script which does not import rankup, and how it goes, by its leader. `held`: the run."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, RankEnv())
        self.begun, self.held = True, contextlib.ExitStack()
        self._began = time.time()

    def take(self, attempt: str, *, agreed: bool) -> bool:
        """Own the run from now on. Raises UserError where another live attempt does, and OSError. Takes up to 10 s.
        `agreed`: see `Lease`. Returns whether an earlier job of it was killed, or ended with a code from 128 on."""
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
        self, *, finished: bool = False, signs: Sequence[dict[str, Any]] = (), nodes: Sequence[dict[str, Any]] = ()
    ) -> None:
        """How the attempt goes, for `status`; call it every REPORT_S. `signs`, `nodes`: see `Leader`."""
        now = time.time()
        ranks = [{**sign, "seen": now - sign["ago_s"]} for sign in signs]
        run, attempt = job_of(self.attempt), self.attempt
        report = Report(
            run=run, attempt=attempt, began=self._began, time=now, finished=finished, ranks=ranks, nodes=list(nodes)
        )
        with contextlib.suppress(OSError):
            report.write(self.run_dir)


def tell_torchrun(error: BaseException) -> None:
    """Write the error file that torchrun's summary shows; without one it says "error_file: <N/A>" (pytorch 113546)."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    # Only the first error: a failing rank waits for the others, and a later error is a consequence
    if "RANKUP_AGENT" in os.environ or path == Path() or path.exists() or not isinstance(error, Exception):
        return
    later_s = VICTIM_LATER_S if isinstance(error, JoinError | PeerLost) else 0
    stack = "".join(traceback.format_exception(error))
    more = {"py_callstack": stack, "timestamp": str(int(time.time()) + later_s)}
    with contextlib.suppress(OSError):  # a full disk must not hide the error itself
        write_json(path, {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}})


def what_next(run_dir: Path) -> str:
    """What to type after a script has failed."""
    return f"`rankup explain {run_dir}` says why, `rankup logs {run_dir}` has all lines"
