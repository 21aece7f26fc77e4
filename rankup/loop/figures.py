"""What a run says of itself: lines of training, evaluations, the speed and slowness of ranks, and the result."""

import contextlib
from typing import Any

import torch

from rankup.errors import disk_error
from rankup.group.group import Group
from rankup.loop.record import Position, Settings, versions
from rankup.loop.saving import Saving
from rankup.observe.goodput import Course, Reporter, one_line, speed
from rankup.observe.metrics import Metrics, entry
from rankup.observe.stragglers import RankReports, StepClock
from rankup.observe.tracker import Facts, address_of
from rankup.places.files import write_json
from rankup.places.lease import RESULT
from rankup.state.run import Run


class Figures:
    """Of one attempt. `course`: how the training goes. `clock`: where the time of this rank's steps goes. `reports`:
    what the ranks tell one another of it. `metrics`: the files."""

    def __init__(self, group: Group, run: Run, settings: Settings, saving: Saving) -> None:
        self.group, self.run, self._settings, self._saving = group, run, settings, saving
        self._position = saving.position
        self.course = Course(self._position, self._position.step)
        self.clock = StepClock(group.device, world_size=group.world_size)
        self.reports = RankReports(group, self.clock, step=self._position.step)
        self._reporter: Reporter | None = None
        if group.is_rank0:
            facts = Facts(
                tracker=settings.tracker, run=run.lineage.run, name=group.run_dir.name, run_dir=str(group.run_dir),
                settings=settings.shown,
            )
            tracker = facts if settings.tracker != "none" else None
            self._reporter = Reporter(group, run.lineage.run, self.course, tracker)
            self._reporter.start(finished=run.finished)

    @property
    def metrics(self) -> Metrics:
        return self._saving.metrics

    def open(self, commit: dict[str, Any], *, changed: bool) -> None:
        """The run goes on from here: continue its files, of which this attempt is the owner. `commit`: of the agents,
        where their number may change. `changed`: other ranks wrote the newest copy."""
        with contextlib.suppress(OSError):
            (self.group.run_dir / RESULT).unlink()  # beside a run that goes on it would be read as its end
        self._saving.metrics = Metrics(
            self.group.run_dir, self._position, saved=Position.of(self.run.saved),
            tensorboard=self._settings.tensorboard, check_owner=self.run.check_owner,
        )
        if "basis" in commit and (commit["change"] or changed):
            used = len(commit["basis"]["used"])
            counts = {"job/membership": commit["n"], "job/nodes": used, "job/ranks": self.group.world_size}
            self.metrics.write(entry(self._position.step, counts))

    def follow(self) -> None:
        """From now on there are steps to report."""
        if self._reporter is not None:
            self._reporter.follow()

    def close(self, kind: type[BaseException] | None) -> None:
        """The attempt ends, with an error of this type or with success. Raises UserError where the disk is full."""
        if self._reporter is not None:
            self._reporter.end(kind)
        self.metrics.close()  # TensorBoard's writer holds up to two minutes of values in memory

    def line(self, values: dict[str, Any], *, weight: float) -> dict[str, Any] | None:
        """The newest line of training once the next step is finished, which all ranks know. They all call this.

        Made before the step is finished: whoever goes on from the state of a rank that finished it can write the line.
        `values`: see `Job.step`. `weight`: `Job.weight`.
        """
        number = self._position.step + 1
        if number % self._settings.log_every_steps and number != self.course.total:
            return self._position.line
        own = [number_of(value) for value in values.values()]  # this waits for the device
        if not self.reports.load:
            self.reports.load = self.group.gather(weight)
        means, seen = self.reports.exchange(own, step=number, saving=self.run.saver.step is not None)
        named = {f"train/{name}": mean for name, mean in zip(values, means, strict=True)}
        per_s = speed(self.group, self.course, number)
        return entry(number, {**named, f"train/{self.course.unit}_per_s": per_s}) | seen

    def result(self, **values: Any) -> dict[str, Any]:
        """Write `result.json` of a run that came to its end: `values`, beside what every run says. Returns all of it.
        Rank 0 only. Raises UserError where the disk is full, and PeerLost where another attempt owns the run by now."""
        group, run, position = self.group, self.run, self._position
        assert self._reporter is not None
        result = {
            "attempt": group.attempt, "run": run.address, "step": position.step, "metrics": position.metrics or {},
            f"{self.course.unit}_per_s": round(speed(group, self.course, position.step), 1),
            "world_size": group.world_size, "hosts": sorted(set(group.hosts)), "versions": versions(),
            "goodput": self._reporter.goodput(), **values,
        }
        if address := address_of(group.run_dir, run.lineage.run):
            result["tracker"] = address
        self.metrics.flush()
        run.check_owner()
        try:
            write_json(group.run_dir / RESULT, result)
        except OSError as error:
            raise disk_error(RESULT, group.run_dir, error) from None
        return result

    def goodput_line(self, result: dict[str, Any]) -> str:
        """The goodput of a result in words."""
        return one_line(result["goodput"])


def number_of(value: Any) -> float:
    """Of a scalar. Waits for the device."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
