"""Rank 0 says how its attempt goes, in a file that `status` reads.

A thread writes it beside the training. It reads numbers that the loop keeps anyway and takes part in no collective, so
it can neither delay a step nor fail one. Where nothing can be written, `status` shows an old report.
"""

import contextlib
import math
import os
import secrets
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from rankup.agent.processes import began
from rankup.errors import Stopped
from rankup.group.group import Group
from rankup.observe.goodput import Report, goodput, read_reports
from rankup.observe.metrics import Progress
from rankup.observe.tracker import Facts, Tracker
from rankup.timing import LAST_REPORT_S, REPORT_S

# Which kind of time a phase of the watchdog's clock is; all others, set-up and imports among them, are "start"
KIND_OF_PHASE = {
    "step": "steps", "data": "data", "evaluation": "evaluation", "save": "saves", "end": "saves", "join": "join",
}
TRAINING = ("steps", "data", "evaluation", "saves")  # what a run spends its time on once it trains


@dataclass(slots=True)
class Course:
    """How the training goes, as the loop says it. `total`: steps of the whole run, None where nobody knows. `unit`:
    what is counted, in the plural, `per_step` of them a step."""

    progress: Progress
    first_step: int
    total: int | None = None
    unit: str = "steps"
    per_step: int = 1


def spent(group: Group) -> dict[str, float]:
    """Seconds of this attempt so far, by kind."""
    seconds = dict.fromkeys(("start", *KIND_OF_PHASE.values()), 0.0)
    for phase, taken_s in group.watch.clock.seconds().items():
        seconds[KIND_OF_PHASE.get(phase, "start")] += taken_s
    return seconds


def speed(group: Group, course: Course, step: int) -> float:
    """Units per second since this attempt began, of training and its waits for data alone, with `step` steps done."""
    seconds = spent(group)
    return (step - course.first_step) * course.per_step / max(seconds["steps"] + seconds["data"], 1e-9)


class Reporter:
    """Reports from `start` to `end`; on rank 0 alone, to which the run directory must belong."""

    def __init__(self, group: Group, run: str, course: Course, facts: Facts | None = None) -> None:
        """`run`: its id. `facts`: of the tracker, if there is one. A run that is finished already gets no report, but
        its tracker gets what it has not got."""
        self.group, self.run, self.course = group, run, course
        self._began, self._token = began(os.getpid()), secrets.token_hex(4)
        self._trains = self._finished = False
        self._last: Report | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="reporter", daemon=True)
        self._tracker = Tracker(facts, group.log) if facts is not None else None

    def start(self, *, finished: bool) -> None:
        """`finished`: the run came to its end in an earlier attempt."""
        if not finished:
            self._thread.start()
        elif self._tracker is not None:
            self._tracker.start()

    def follow(self) -> None:
        """From now on there are steps to report."""
        self._trains = True
        if self._tracker is not None:
            self._tracker.start()

    def end(self, kind: type[BaseException] | None) -> None:
        """The attempt ends, with an error of this type or with success."""
        self._finished = kind is None
        if self._thread.ident is not None:
            self._ended.set()
            self._thread.join(LAST_REPORT_S)
        if self._tracker is not None:
            stopped = kind is not None and issubclass(kind, Stopped)
            self._tracker.end("finished" if self._finished else "stopped" if stopped else "failed")

    def goodput(self) -> dict[str, Any]:
        """Of the run, which ends now: later reports have the same times. See `rankup.observe.goodput`. Rank 0 only."""
        self._last = self._look()
        earlier = [report for report in read_reports(self.group.run_dir) if report.began != self._began]
        return goodput([*earlier, self._last])

    def _report(self) -> None:
        """In the thread. The last report is its too: the main thread must not wait for a disk that hangs."""
        self._write()
        while not self._ended.wait(REPORT_S):
            self._write()
        self._write()

    def _write(self) -> None:
        report = self._look()
        with contextlib.suppress(OSError):  # a full disk: the next save says so
            report.write(self.group.run_dir, self._token)

    def _look(self) -> Report:
        if self._last is not None:
            return replace(self._last, finished=self._finished)
        course, now, seconds = self.course, time.time(), spent(self.group)
        phase, open_s = self.group.watch.clock.present()
        step, done, total = course.progress.step, course.progress.step - course.first_step, course.total
        remaining_s = None
        if self._trains and done and total is not None:
            remaining_s = round(sum(seconds[kind] for kind in TRAINING) / done * (total - step), 1)
        # The watchdog's clock is younger than the process, which first imported what it needs
        seconds["start"] += max(0.0, now - self._began - sum(seconds.values()))
        metrics = {name: value for name, value in (course.progress.line or {}).items() if name.startswith("train/")}
        metrics |= {f"eval/{name}": value for name, value in (course.progress.metrics or {}).items()}
        return Report(
            run=self.run, attempt=self.group.attempt, began=self._began, time=now,
            first_step=course.first_step, step=step, total_steps=total, finished=self._finished,
            seconds={kind: round(each_s, 3) for kind, each_s in seconds.items()},
            unit=course.unit if self._trains else "", per_s=round(speed(self.group, course, step), 1),
            remaining_s=remaining_s,
            metrics={name: value for name, value in metrics.items() if value is not None and math.isfinite(value)},
            ranks=self.group.watch.signs_of_life(), open_s=round(open_s, 3) if phase in ("step", "data") else 0.0,
            nodes=self.group.watch.nodes,
        )
