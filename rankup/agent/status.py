"""What the agents write of a run whose script knows nothing of us: how it goes, and how each rank ended. No torch here.

`status.json` has the attempt's id in it. A reader that finds no file, or another attempt's id, takes the run for
failed: yesterday's success must never be read as today's. A script that imports rankup writes these files itself.
"""

import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankup.agent.ends import End
from rankup.agent.logs import host_name
from rankup.agent.processes import start_of
from rankup.agent.protocol import Member
from rankup.errors import FINISHED, STOPPED
from rankup.places.files import write_atomically, write_json
from rankup.places.lease import Lease

STACKS = "stacks"  # the folder in that of the run
MOST_BYTES = 2**20  # of a file of stacks: nobody reads those of a hundred attempts ago


def new_job() -> str:
    """A new id of a job. Ids sort by time, and two made in one second differ."""
    return time.strftime("%Y%m%dT%H%M%S-") + secrets.token_hex(3)


def state_of(code: int) -> str:
    """The word for an exit code, as status files have it."""
    return {FINISHED: "finished", STOPPED: "stopped"}.get(code, "failed")


def write_end(run_dir: Path, attempt: str, end: End) -> None:
    """How one rank of this node ended. A full disk must not hide the reason."""
    record = {
        "attempt": attempt, "rank": end.rank, "host": end.host, "state": state_of(end.code), "code": end.code,
        "why": end.cause, "step": end.step, "suspect": None,
    }
    with contextlib.suppress(OSError):
        write_json(run_dir / "status" / attempt / f"rank-{end.rank}.json", record)


def stacks_environment(run_dir: Path, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What has a script write its stacks where it gets SIGRTMAX, whatever it does at that moment.

    Python imports `sitecustomize` from the first folder of PYTHONPATH before the script, and ours puts all back.
    """
    path = run_dir / STACKS / f"rank-{rank}.txt"
    with contextlib.suppress(OSError):
        (path.parent / "nccl").mkdir(parents=True, exist_ok=True)  # torch makes no folder for its recorder's files
    own = [environ["PYTHONPATH"]] if "PYTHONPATH" in environ else []
    site = Path(__file__).with_name("script_site")
    return {"RANKUP_STACKS": str(path.resolve()), "PYTHONPATH": os.pathsep.join([str(site), *own])}


def announce_stacks(
    run_dir: Path, rank: int, world_size: int, pid: int, *, thread: int | None = None, main: str = "",
    signals: Iterable[int | None] = (getattr(signal, "SIGRTMAX", None),),
) -> Path:
    """Write whose stacks follow in that rank's file, which is returned, and how to ask for more. Raises OSError.

    `thread`: the kernel's number of a thread that never hangs, and takes the signals. `main`: the main thread, as
    faulthandler writes it, "" where nobody knows. `signals`: to try in turn; None is one that this system lacks.
    """
    writer = {
        "rank": rank, "world_size": world_size, "host": host_name(), "pid": pid, "started": start_of(pid),
        "thread": thread or pid, "main": main, "signals": [int(each) for each in signals if each is not None],
    }
    path = run_dir / STACKS / f"rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    large = path.exists() and path.stat().st_size > MOST_BYTES
    with path.open("w" if large else "a", encoding="utf-8") as file:
        file.write(f"# {json.dumps(writer)}\n")
    return path


def write_health(environ: Mapping[str, str], rank: int, pid: int, since_s: float) -> None:
    """For a container's health check (`train/process/health.py`): the script of this rank runs, and has no deadline."""
    if folder := environ.get("RANKUP_HEALTH_DIR"):
        state = {
            "pid": pid, "written_s": time.monotonic(), "phase": "script", "step": 0, "entered_s": since_s,
            "timeout_s": 0.0, "waiting": False,
        }
        with contextlib.suppress(OSError):
            write_atomically(Path(folder) / f"rank-{rank}.json", json.dumps(state))


class RunStatus:
    """`status.json` of the run, and `status/<attempt>/progress-*.json` of each attempt. Node 0's agent alone."""

    def __init__(self, run_dir: Path, world_size: int) -> None:
        self.run_dir, self.world_size = run_dir, world_size
        self.job = new_job()
        self.attempt = ""
        self.began = time.time()
        self._token = secrets.token_hex(4)
        self._seconds = {"start": 0.0, "join": 0.0, "script": 0.0}
        self._kind, self._since_s = "start", time.monotonic()
        self._hosts: list[str] = []
        self._stack = contextlib.ExitStack()

    def take(self) -> None:
        """Own the run from now on. Raises UserError where another live attempt does, and OSError. Takes up to 10 s."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(Lease(self.run_dir, self.job))

    def release(self) -> None:
        self._stack.close()

    def begin(self, restarts: int, members: Iterable[Member]) -> None:
        """Another attempt has begun: its ranks start now."""
        self.attempt = f"{self.job}-{restarts}"
        self._hosts = [member.host for member in members for _ in member.ranks]
        if restarts:
            self.began, self._token = time.time(), secrets.token_hex(4)
            self._seconds = dict.fromkeys(self._seconds, 0.0)
        self.enter("script")
        self._write("running", None, "", [])

    def enter(self, kind: str) -> None:
        """From now on time counts as "join" (the agents meet) or as "script" (it runs)."""
        now_s = time.monotonic()
        self._seconds[self._kind] += now_s - self._since_s
        self._kind, self._since_s = kind, now_s

    def end(self, code: int, why: str, ends: Iterable[End]) -> None:
        """How the job ended."""
        self._write(state_of(code), code, why, ends)
        self.report(finished=code == FINISHED)

    def _write(self, state: str, code: int | None, why: str, ends: Iterable[End]) -> None:
        ranks = {str(end.rank): {**asdict(end), "state": state_of(end.code), "why": end.cause} for end in ends}
        with contextlib.suppress(OSError):
            write_json(self.run_dir / "status.json", {
                "attempt": self.attempt, "state": state, "world_size": self.world_size, "code": code, "why": why,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "ranks": ranks,
            })

    def report(self, *, finished: bool = False) -> None:
        """How the attempt goes, for `status`; call it every REPORT_S."""
        self.enter(self._kind)
        ranks: list[dict[str, Any]] = [
            {"rank": rank, "host": host, "phase": self._kind, "step": 0, "waiting": False, "for_s": 0.0, "place": "",
             "seen": time.time()}
            for rank, host in enumerate(self._hosts)
        ]
        report = {
            "run": self.job, "attempt": self.attempt, "began": self.began, "time": time.time(), "first_step": 0,
            "step": 0, "total_steps": None, "finished": finished,
            "seconds": {kind: round(spent, 3) for kind, spent in self._seconds.items()}, "unit": "", "per_s": 0.0,
            "remaining_s": None, "metrics": {}, "ranks": ranks, "open_s": 0.0,
        }
        with contextlib.suppress(OSError):
            folder = self.run_dir / "status" / self.attempt
            write_atomically(folder / f"progress-{self._token}.json", json.dumps(report) + "\n")
