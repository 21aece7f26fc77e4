"""What a run reports: metrics, speed, slow ranks, result."""

import json
import math
import re
from typing import Any

import torch

from rankup.errors import Stopped, UserError, disk_errors
from rankup.group.group import Group
from rankup.loop.settings import VERSIONS, Settings
from rankup.observe.goodput import Reporter, TrainingProgress, one_line, speed
from rankup.observe.metrics import Metrics, Position, entry
from rankup.observe.stragglers import RankReports, StepClock
from rankup.observe.tracker import Facts, Tracker
from rankup.places.files import discard, snapshot_here, write_atomically
from rankup.places.lease import RESULT
from rankup.state.run import Run

LEFT = ""  # what `Saver.left` returned, among the values of a step by name


class Reporting:
    """The figures of one attempt. `progress`: the progress of the training. `clock`: how this rank's steps spend their
    time. `metrics`: the metrics files. `goodput_line`: a function that puts a result's goodput into words."""

    goodput_line = staticmethod(one_line)

    def __init__(self, group: Group, run: Run, settings: Settings, position: Position) -> None:
        self.group, self.run, self._settings, self._position = group, run, settings, position
        self.progress = progress = TrainingProgress(position, position.step)
        self.metrics = Metrics(None, position, saved=position, tensorboard=False)
        self.clock = StepClock(group.device, world_size=group.world_size)
        self._reports = RankReports(group, self.clock, step=position.step)
        self._reporter: Reporter | None = None
        self._tracker: Tracker | None = None
        self.config = ""  # the text of config.yaml, if a script gave its settings
        if group.is_rank0 and not run.finished:
            self._reporter = Reporter(group, run.lineage.run, progress)

    def open(self, commit: dict[str, Any], *, changed: bool) -> None:
        """Continue the files of the run, which this attempt owns. Rank 0 only. `commit`: the agents' message about the
        newest membership, {} without agents. `changed`: whether the newest copy has another number of ranks."""
        # Remove an earlier result: readers would take it for the end of this run
        discard(self.group.run_dir / RESULT, check=self.run.owner.check)
        self._reporter = self._reporter or Reporter(self.group, self.run.lineage.run, self.progress)
        self.metrics = Metrics(
            self.group.run_dir, self._position, saved=Position.of(self.run.saved),
            tensorboard=self._settings.tensorboard, check_owner=self.run.owner.check,
        )
        if self.config:
            self.write("config.yaml", self.config)
        if "basis" in commit and (commit["change"] or changed):
            used, ranks = len(commit["basis"]["used"]), self.group.world_size
            counts = {"job/membership": commit["n"], "job/nodes": used, "job/ranks": ranks}
            self.metrics.write(entry(self._position.step, counts))
        self._follow()

    def _follow(self) -> None:
        """Send the tracker the values that it lacks, and all later ones."""
        settings, run = self._settings, self.run.lineage.run
        if settings.tracker != "none":
            facts = Facts(settings.tracker, run, str(self.group.run_dir), settings.shown)
            self._tracker = Tracker(facts, self.group.log)

    def close(self, kind: type[BaseException] | None) -> None:
        """End the attempt, with an error of type `kind` or, if None, with success. Raises UserError on a full disk."""
        if self.group.is_rank0 and self.run.finished:
            self._follow()  # the tracker may lack values of the finished run
        if self._reporter is not None:
            self._reporter.end(finished=kind is None)
        if self._tracker is not None:
            stopped = kind is not None and issubclass(kind, Stopped)
            self._tracker.end("finished" if kind is None else "stopped" if stopped else "failed")
        self.metrics.close()  # TensorBoard's writer keeps up to two minutes of values in memory

    def line(self, number: int, values: dict[str, Any], *, weight: float) -> dict[str, Any]:
        """Return the training line of step `number` on all ranks. All ranks call this.

        It is made before the step is finished, so that an attempt that resumes from any rank's state can write it.
        `values`: see `Job.step`. `weight`: `Job.weight`.
        """
        own = {name: number_of(f"job.step: {name}", value) for name, value in values.items()}  # waits for the device
        if not self._reports.load:
            self._reports.load = self.group.gather(weight)
        saver = self.run.saver
        means = self._reports.exchange({**own, LEFT: saver.left()}, step=number, saving=saver.step is not None)
        saver.agree(means[LEFT])
        named = {f"train/{name}": means[name] for name in values}
        per_s = speed(self.group, self.progress, number)
        return entry(number, {**named, f"train/{self.progress.unit}_per_s": per_s})

    def reduced(self, values: dict[str, Any], *, prefix: str) -> dict[str, float]:
        """Return `values` reduced over all ranks, see `Job.log`. All ranks call this."""
        position, group = self._position, self.group
        word = isinstance(prefix, str) and re.fullmatch(r"[A-Za-z]\w*", prefix)
        if not word or prefix in ("train", "job"):
            raise UserError(
                f'log: prefix must be a word other than "train" and "job", got "{prefix}". Name the set, such as test.'
            )
        own = {name: terms_of(f"job.log: {name}", value) for name, value in values.items()}
        found = group.gather_apart(
            [position.step, prefix, own], call="log: job.log must be called", remedy="Call it on all ranks, not below "
            "`if job.is_main`: it averages numbers, and sums pairs (right, seen).",
        )
        calls = [[step, prefix, *((name, len(each)) for name, each in terms.items())] for step, prefix, terms in found]
        for rank, call in enumerate(calls):
            if call != calls[0]:
                raise UserError(
                    f"log: the step, the prefix and the names must be the same on all ranks, got {calls[0][:2]} "
                    f"{[*found[0][2]]} on rank 0 and {call[:2]} {[*found[rank][2]]} on rank {rank}. Log equal names, "
                    "each as a number or as a pair.", printed_elsewhere=not group.is_rank0,
                )
        return {name: mean_of([terms[name] for _, _, terms in found]) for name in own}

    def result(self, **values: Any) -> dict[str, Any]:
        """Write `result.json` of a finished run, with the usual fields and `values`, and return all of it. Rank 0 only.
        Raises UserError on a full disk, and PeerLost if another attempt has taken the run."""
        group, run, position = self.group, self.run, self._position
        assert self._reporter is not None
        result = {
            "attempt": group.attempt, "run": run.owner.where, "step": position.step,
            "metrics": {name.removeprefix("eval/"): value for name, value in (position.metrics or {}).items()},
            f"{self.progress.unit}_per_s": round(speed(group, self.progress, position.step), 1),
            "world_size": group.world_size, "hosts": sorted(set(group.hosts)), "versions": VERSIONS,
            "goodput": self._reporter.goodput(), **({"ended": position.ended} if position.ended else {}),
            **snapshot_here(), **values,
        }
        self.metrics.flush()
        self.write(RESULT, json.dumps(result, indent=2) + "\n")
        return result

    def write(self, name: str, content: str) -> None:
        """Write a file of the run. Rank 0 only. Raises what `result` raises."""
        with disk_errors(name, self.group.run_dir, check := self.run.owner.check):
            write_atomically(self.group.run_dir / name, content, check=check)


def terms_of(where: str, value: Any) -> list[float]:
    """Return a number as a list of one float, and a pair (sum, count) as a list of two. Raises UserError."""
    pair = isinstance(value, tuple) and len(value) == 2
    found = [number_of(where, each) for each in (value if pair else (value,))]
    if pair and not found[1] >= 0:
        raise UserError(f"{where} must be a pair of a sum and a count >= 0, got the count {found[1]:g}.")
    return found


def pairs_of(found: Any) -> dict[str, list[float]]:
    """Return the pairs (sum, count) that the function of `job.evaluate` returned. Raises UserError."""
    if not isinstance(found, dict):
        raise UserError(
            "evaluate: the function must return a dict of pairs (sum, count) by name, got "
            f'{type(found).__name__}. Write {{"accuracy": (right, len(labels))}}.'
        )
    for name, value in found.items():
        if not isinstance(name, str) or name == "prefix":
            raise UserError(f"evaluate: a name must be a text other than prefix, got {name!r}. Rename it.")
        if not isinstance(value, tuple) or len(value) != 2:
            raise UserError(f"evaluate: {name} must be a pair (sum over the batch, its size), got {value!r:.80}.")
    return {name: terms_of(f"job.evaluate: {name}", value) for name, value in found.items()}


def mean_of(terms: list[list[float]]) -> float:
    """Return the mean over the ranks of what `terms_of` returned. NaN if the sum of the counts is 0."""
    if len(terms[0]) == 2:
        total, count = (sum(each) for each in zip(*terms, strict=True))
        return total / count if count else math.nan
    numbers = [number for number, in terms]
    return numbers[0] if len({*numbers}) == 1 else sum(numbers) / len(numbers)  # equal numbers keep their bits


def number_of(where: str, value: Any) -> float:
    """Return a number or scalar tensor as a float. Waits for the device. Raises UserError for anything else."""
    tensor = isinstance(value, torch.Tensor)
    if tensor and value.numel() != 1:
        raise UserError(f"{where} must be a number, got a tensor of shape {[*value.shape]}. Take its mean.")
    try:
        if isinstance(value, str | bytes):  # as an argument of the command line, which float() would read
            raise TypeError
        return float(value.detach() if tensor else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is of a complex tensor
        raise UserError(f"{where} must be a number, got {type(value).__name__}. Leave it out.") from None
