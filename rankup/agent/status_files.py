"""The files of a run that say how its ranks and attempts end. Imports no torch.

| status.json                         | the run; written by node 0's agent, or by rank 0 if the script imports rankup |
| status/<attempt>/rank-N.json        | how each rank ended; written by its agent, or by the rank itself              |
| status/<attempt>/progress-*.json    | how the attempt goes; written by the same process as status.json              |
| the file in TORCHELASTIC_ERROR_FILE | what torchrun's summary shows; written by the rank                            |

A reader that finds no `status.json`, or one of another attempt, must assume that the run failed. Otherwise it would
report yesterday's success as today's."""

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankup.agent.ends import End, job_of, new_job, outcome_of
from rankup.env.rank_env import RankEnv
from rankup.errors import FINISHED, USER_MISTAKE, JoinError, PeerLost, root_cause
from rankup.places.files import read_json, snapshot_here, write_atomically, write_json
from rankup.places.lease import Lease
from rankup.timing import VICTIM_LATER_S


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
            "attempt": self.attempt, "state": "running" if code is None else outcome_of(code),
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
