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
from dataclasses import replace
from typing import Any

from rankup.agent.processes import began
from rankup.errors import Stopped
from rankup.observe.goodput import Report, goodput, read_reports
from rankup.observe.tracker import Facts, Tracker
from rankup.timing import REPORT_S

from .run_directory import RunDirectory
from .training import Training

# Which kind of time a phase of the watchdog's clock is; all others, set-up and imports among them, are "start"
KIND_OF_PHASE = {
    "step": "steps", "data": "data", "evaluation": "evaluation", "save": "saves", "end": "saves", "join": "join",
}
LAST_S = 1.0  # how long the end of an attempt may wait for the last report: a disk may hang
TRAINING = ("step", "data", "evaluation", "save")  # the phases that a run spends its time in once it trains


class Reporter:
    """Reports for the length of a `with` block; on rank 0 alone, to which the run directory must belong.

    A run that is finished already gets no report, but its tracker gets what it has not got.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run, self.group = run, run.group
        self.active = run.group.is_rank0 and not run.kept.finished
        self._began, self._token = began(os.getpid()), secrets.token_hex(4)
        self._training: Training | None = None
        self._finished = False
        self._last: Report | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="reporter", daemon=True)
        self._first_step = run.kept.newest.step if run.kept.newest is not None else 0
        self._tracker: Tracker | None = None
        if run.group.is_rank0 and run.config.tracker != "none":
            facts = Facts(
                tracker=run.config.tracker, run=run.kept.lineage.run, name=run.path.name, run_dir=str(run.path),
                address=run.kept.address, settings=run.config.model_dump(mode="json"),
            )
            self._tracker = Tracker(facts, run.group.log)

    def __enter__(self) -> "Reporter":
        if self.active:
            self._thread.start()
        elif self._tracker is not None:
            self._tracker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._finished = kind is None
        if self.active:
            self._ended.set()
            self._thread.join(LAST_S)
        if self._tracker is not None:
            stopped = kind is not None and issubclass(kind, Stopped)
            self._tracker.end("finished" if self._finished else "stopped" if stopped else "failed")

    def follow(self, training: Training) -> None:
        """From now on there are steps to report."""
        self._training = training
        if self._tracker is not None:
            self._tracker.start()

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
        t, now = self._training, time.time()
        phase, open_s = self.group.watch.clock.present()
        by_phase = self.group.watch.clock.seconds()
        seconds = dict.fromkeys(("start", *KIND_OF_PHASE.values()), 0.0)
        for name, spent in by_phase.items():
            seconds[KIND_OF_PHASE.get(name, "start")] += spent
        # The watchdog's clock is younger than the process, which first imported what it needs
        seconds["start"] += max(0.0, now - self._began - sum(by_phase.values()))
        first_step = step = self._first_step
        total_steps, unit, per_s, remaining_s = None, "", 0.0, None
        metrics: dict[str, float] = {}
        if t is not None:
            # Not of `t.speed`, which the loop changes at any moment
            first_step, step, total_steps, unit = t.speed.first_step, t.progress.step, t.total_steps, t.workload.unit
            done = step - first_step
            if done:
                per_s = done * t.config.batch_size / max(seconds["steps"] + seconds["data"], 1e-9)
                remaining_s = sum(by_phase.get(phase, 0.0) for phase in TRAINING) / done * (total_steps - step)
            line = t.progress.line or {}
            metrics = {name: line[name] for name in line if name.startswith("train/") and line[name] is not None}
            evaluated = (t.progress.metrics or {}).items()
            metrics |= {f"eval/{name}": value for name, value in evaluated if math.isfinite(value)}
        return Report(
            run=self.run.kept.lineage.run, attempt=self.group.attempt, began=self._began, time=now,
            first_step=first_step, step=step, total_steps=total_steps, finished=self._finished,
            seconds={kind: round(spent, 3) for kind, spent in seconds.items()}, unit=unit, per_s=round(per_s, 1),
            remaining_s=None if remaining_s is None else round(remaining_s, 1), metrics=metrics,
            ranks=self.group.watch.signs_of_life(), open_s=round(open_s, 3) if phase in ("step", "data") else 0.0,
        )
