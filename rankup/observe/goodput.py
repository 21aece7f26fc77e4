"""Goodput: the share of a run's time, over all attempts, that went into steps that counted, and where the rest went.

Rank 0 of each attempt, or the agent of node 0, replaces `status/<attempt>/progress-*.json` every REPORT_S, so after a
kill -9 the last report is at most that old. Goodput is computed from these files on demand, without torch.
"""

import contextlib
import math
import os
import threading
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankup.agent.processes import began
from rankup.agent.status_files import Report
from rankup.observe.metrics import Position
from rankup.places.files import read_json
from rankup.timing import LAST_REPORT_S, REPORT_S

if TYPE_CHECKING:
    from rankup.group.group import Group

KINDS = ("steps", "data", "evaluation", "saves", "lost steps", "start", "join", "waiting")
# The kind of time of each phase of the watchdog's clock. All other phases, such as set-up and imports, are "start"
KIND_OF_PHASE = {
    "step": "steps", "data": "data", "evaluation": "evaluation", "save": "saves", "end": "saves", "join": "join",
}
TRAINING = ("steps", "data", "evaluation", "saves")  # the kinds of time of a run that has begun to train


def read_reports(run_dir: Path) -> list[Report]:
    """Return the last report of each attempt of the run that `run_dir` holds now, in the order in which the attempts
    began. Reports of an earlier run in that directory are left out."""
    names = {each.name for each in fields(Report)}
    found = [read_json(path) for path in run_dir.glob("status/*/progress-*.json")]
    whole = [Report(**each) for each in found if each.keys() == names]
    reports = sorted(whole, key=lambda report: report.began)
    # A script that does not import rankup leaves no run.json. Then the newest report tells the run
    newest = reports[-1].run if reports else ""
    run = read_json(run_dir / "run.json").get("run", newest)
    return [report for report in reports if report.run == run]


def goodput(reports: list[Report]) -> dict[str, Any]:
    """Return the share of the time of all attempts that went into steps that counted, and the share of each kind. The
    shares are rounded to four digits and add up to 1. `reports`: what `read_reports` returned, at least one report.

    A step that was lost and done again counts once. A lost step costs the mean time of its attempt's steps, including
    the wait for data. The time in a step that an attempt never finished, such as in a hang, is lost too. `waiting` is
    the time between attempts. A finished run that later continues with more epochs did not wait.
    """
    seconds = dict.fromkeys(KINDS, 0.0)
    kept_up_to = math.inf  # the last step that no later attempt has done again
    following: Report | None = None
    for report in reversed(reports):
        done = report.step - report.first_step
        kept = min(done, max(0, kept_up_to - report.first_step))
        # An attempt that was killed in its first step has spent time on steps but finished none
        lost = 1 - kept / done if done else float(following is not None)
        open_s = report.open_s if following is not None else 0.0
        for kind, spent in report.seconds.items():
            lost_s = 0.0
            if kind in ("steps", "data"):
                unfinished_s = min(open_s, spent)
                open_s -= unfinished_s
                lost_s = unfinished_s + (spent - unfinished_s) * lost
            seconds[kind] += spent - lost_s
            seconds["lost steps"] += lost_s
        if following is not None and not report.finished:
            seconds["waiting"] += max(0.0, following.began - report.time)  # may be negative if two clocks differ
        kept_up_to, following = min(kept_up_to, report.first_step), report
    wall_s = max(sum(seconds.values()), 1e-9)
    shares = {kind: round(spent / wall_s, 4) for kind, spent in seconds.items()}
    return {"share": shares["steps"], "wall_s": round(wall_s, 1), "attempts": len(reports), "shares": shares}


def one_line(found: dict[str, Any]) -> str:
    """Return one line for what `goodput` returned: the share, and every other kind that rounds to 1 % or more."""
    rest = sorted(((share, kind) for kind, share in found["shares"].items() if kind != "steps"), reverse=True)
    parts = ", ".join(f"{kind} {share:.0%}" for share, kind in rest if round(100 * share))
    attempts = f"{found['attempts']} attempt{'s' if found['attempts'] > 1 else ''}"
    return f"{found['share']:.0%} of {duration(found['wall_s'])} in {attempts}" + (f": {parts}" if parts else "")


def duration(seconds: float) -> str:
    """Return a duration in at most two units: 4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = max(0, round(seconds))
    for large, small, first, second in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {first}" + (f" {rest} {second}" if rest else "")
    return f"{whole} s"


# Rank 0 reports -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TrainingProgress:
    """The position of the training, kept by the loop. `total`: the steps of the whole run, None if unknown. `unit`: the
    plural of what the speed counts, such as "images". `per_step`: units in a step."""

    position: Position
    first_step: int
    total: int | None = None
    unit: str = "steps"
    per_step: int = 1


def spent(group: "Group") -> dict[str, float]:
    """Return the seconds of this attempt so far, by kind."""
    seconds = dict.fromkeys(("start", *KIND_OF_PHASE.values()), 0.0)
    for phase, taken_s in group.watch.clock.seconds().items():
        seconds[KIND_OF_PHASE.get(phase, "start")] += taken_s
    return seconds


def speed(group: "Group", progress: TrainingProgress, step: int) -> float:
    """Return units per second of this attempt up to `step`. Only the time of steps and of waits for data counts."""
    seconds = spent(group)
    return (step - progress.first_step) * progress.per_step / max(seconds["steps"] + seconds["data"], 1e-9)


class Reporter:
    """A thread of rank 0 that writes reports during training. It reads numbers that the loop keeps anyway, and calls no
    collective, so it can neither delay a step nor make it fail."""

    used = False  # whether this process has made a reporter before, as a notebook's does

    def __init__(self, group: "Group", run: str, progress: TrainingProgress) -> None:
        self.group, self.run, self.progress = group, run, progress
        # The first job of this process began with it: starting Python and importing torch count too
        self._began = time.time() if Reporter.used else began(os.getpid())
        Reporter.used = True
        self._finished = False
        self._last: Report | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="reporter", daemon=True)
        self._thread.start()

    def end(self, *, finished: bool) -> None:
        """Write the last report, because the attempt ends. `finished`: the run ends with it."""
        self._finished = finished
        self._ended.set()
        self._thread.join(LAST_REPORT_S)

    def goodput(self) -> dict[str, Any]:
        """Return the goodput of the run, which ends now. Later reports repeat the times of this one."""
        self._last = self._look()
        earlier = [report for report in read_reports(self.group.run_dir) if report.began != self._began]
        return goodput([*earlier, self._last])

    def _report(self) -> None:
        """Write reports, in the thread. It writes the last one too, so that a hanging disk can't block the main one."""
        ended = False
        while True:
            with contextlib.suppress(OSError):  # the next save reports a full disk
                self._look().write(self.group.run_dir)
            if ended:
                return
            ended = self._ended.wait(REPORT_S)

    def _look(self) -> Report:
        if self._last is not None:
            return replace(self._last, finished=self._finished)
        progress, watch, seconds = self.progress, self.group.watch, spent(self.group)
        now = time.time()  # read after `seconds`, so that these never exceed the time that has passed
        position, here = progress.position, watch.record.read()
        step, done = position.step, position.step - progress.first_step
        remaining_s = None
        if done and progress.total is not None:
            remaining_s = round(sum(seconds[kind] for kind in TRAINING) / done * (progress.total - step), 1)
        # The watchdog's clock started later than the process: count the time of its imports too
        seconds["start"] += max(0.0, now - self._began - sum(seconds.values()))
        metrics = {name: value for name, value in (position.line or {}).items() if name.startswith("train/")}
        metrics |= position.metrics or {}
        return Report(
            run=self.run, attempt=self.group.attempt, began=self._began, time=now,
            first_step=progress.first_step, step=step, total_steps=progress.total, finished=self._finished,
            seconds={kind: round(each_s, 3) for kind, each_s in seconds.items()},
            unit=progress.unit, per_s=round(speed(self.group, progress, step), 3),
            remaining_s=remaining_s,
            metrics={name: value for name, value in metrics.items() if value is not None and math.isfinite(value)},
            ranks=watch.heartbeats(), nodes=watch.nodes,
            open_s=round(time.monotonic() - here.entered_s, 3) if here.phase == "step" else 0.0,
        )
