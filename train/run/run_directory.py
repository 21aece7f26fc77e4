"""What a run leaves behind: `runs/<name>/` with settings, checkpoints, metrics, pictures and the result. Rank 0 writes."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from train.config import Config, changed_settings, to_yaml
from train.errors import PeerLost, UserError
from train.group.group import Group
from train.process.status import job_of, read_json
from train.run import publish
from train.run.checkpoint import Checkpoint, list_checkpoints, load_newest
from train.run.lease import Lease
from train.run.metrics import Metrics
from train.run.sharded_checkpoint import FOLDER, write_shards
from train.run.training_state import TrainingState


@dataclass(slots=True)
class Progress:
    """Where a run stands. `evaluated` is the last step whose evaluation is complete, `metrics` its outcome."""

    step: int = 0
    evaluated: int = 0
    metrics: dict[str, float] | None = None


@dataclass(slots=True)
class Speed:
    """Images per second of training alone: set-up, evaluation and saves are left out."""

    batch_size: int
    first_step: int
    _trained_s: float = 0.0
    _began_s: float | None = field(default_factory=time.monotonic)

    def pause(self) -> None:
        self._trained_s, self._began_s = self._seconds(), None

    def resume(self) -> None:
        self._began_s = time.monotonic()

    def at(self, step: int) -> float:
        return (step - self.first_step) * self.batch_size / max(self._seconds(), 1e-9)

    def _seconds(self) -> float:
        return self._trained_s + (time.monotonic() - self._began_s if self._began_s is not None else 0.0)


@dataclass(slots=True)
class RunDirectory:
    """The run directory as this attempt found it, and how to add to it."""

    config: Config
    group: Group
    finished: bool
    checkpoint: Checkpoint | None
    lease: Lease | None = field(repr=False)
    metrics: Metrics | None = None
    tables: dict[str, torch.Tensor] = field(default_factory=dict)  # of the last evaluation, for pictures

    @property
    def directory(self) -> Path:
        return self.group.run_dir

    def open_metrics(self, progress: Progress, unit: str) -> Metrics:
        """Metrics from there on, with the speed in `unit`/s; what a killed attempt wrote past its last checkpoint is taken
        out. Rank 0 writes, and all raise UserError if it can't."""
        step, evaluated = progress.step, progress.evaluated
        self.metrics = Metrics(None, step=step, evaluated=evaluated, tensorboard=False, unit=unit)

        def take() -> None:
            self.metrics = Metrics(
                self.directory, step=step, evaluated=evaluated, tensorboard=self.config.tensorboard, unit=unit
            )

        on_rank0(self.group, take)
        return self.metrics

    def close(self) -> None:
        """TensorBoard's writer holds two minutes of values back."""
        if self.metrics is not None:
            self.metrics.close()

    def save(self, state: TrainingState, tensors: dict[str, Any]) -> None:
        """Write one checkpoint. All ranks call this, rank 0 publishes, and all raise UserError if that failed.

        `tensors`: on rank 0 the plain state dict of the model; with checkpoint_format sharded each rank's part of the
        model's and the optimizer's tensors, and `state.optimizer` holds the rest.
        """
        if self.config.checkpoint_format == "sharded":
            self._save_shards(state, tensors)
        else:
            on_rank0(self.group, lambda: publish.save_checkpoint(
                self._checkpoints, state, tensors, keep=self.config.keep, check_owner=self._flush_metrics().check,
            ))
        if self.group.is_rank0:
            self.group.log.debug(f"saved step {state.step}")

    @property
    def _checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def _flush_metrics(self) -> Lease:
        """The metrics of the saved steps must not be lost with this process: a resumed run does not repeat these steps.

        Rank 0 only. Returns the lease, which a save asks next.
        """
        assert self.lease is not None
        assert self.metrics is not None
        self.metrics.flush()
        return self.lease

    def _save_shards(self, state: TrainingState, tensors: dict[str, Any]) -> None:
        def begin() -> str:
            self._flush_metrics()
            return publish.create_staging(self._checkpoints, state.step, self.group.attempt).name

        staging = self._checkpoints / on_rank0(self.group, begin)
        try:
            shards = write_shards(staging / FOLDER, tensors, self.group)
        except UserError:
            # All ranks raise it together, so no rank still writes there
            if self.group.is_rank0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        on_rank0(self.group, lambda: publish.publish(
            staging, state.to_files(), shards, step=state.step, keep=self.config.keep,
            check_owner=self._flush_metrics().check,
        ))


def on_rank0(group: Group, work: Callable[[], Any]) -> Any:
    """Do `work` on rank 0 and give its result to all. Its error becomes everyone's: nobody is left waiting for rank 0."""
    outcome: tuple[str, Any] = ("", None)
    if group.is_rank0:
        try:
            outcome = ("", work())
        except (UserError, PeerLost) as error:
            outcome = (type(error).__name__, str(error))
    kind, value = group.broadcast(outcome)
    if not kind:
        return value
    raise (PeerLost if kind == "PeerLost" else UserError)(value, printed_elsewhere=not group.is_rank0)


@contextlib.contextmanager
def open_run_directory(config: Config, group: Group) -> Iterator[RunDirectory]:
    """Take the run directory for this attempt and look what is there: a finished run, a checkpoint, or nothing.

    Raises UserError on all ranks where another attempt is alive, or a setting that affects the result has changed.
    """
    lease = Lease(group.run_dir, group.attempt) if group.is_rank0 else None
    directory = group.run_dir

    def look() -> tuple[bool, Checkpoint | None]:
        assert lease is not None
        lease.__enter__()
        group.claim_status_file(lease.is_ours)
        if config.fresh and not _begun_by_this_launch(group, directory):
            _put_aside(directory, group.log.info)
        earlier = load_newest(directory / "checkpoints", group.log.warning)
        if earlier is not None:
            earlier.state.check_random_scheme(earlier.path)
            _refuse_changes(config, earlier, directory)
            earlier = earlier if config.checkpoint_format == "sharded" else earlier.as_plain()
        done = read_json(directory / "result.json") or {}
        finished = earlier is not None and done.get("step") == earlier.step and _covers(earlier.state, config)
        if not finished:
            (directory / "result.json").unlink(missing_ok=True)
            (directory / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        else:
            group.log.info(
                f"{directory} is finished: {done['step']} steps, {_brief(done.get('metrics', {}))}. "
                "More --epochs go on from there, --fresh starts anew, another --name leaves it."
            )
        return finished, earlier

    def look_safely() -> tuple[bool, Checkpoint | None]:
        try:
            return look()
        except OSError as error:
            raise UserError(f"run_dir: {directory} must be writable, got {error.strerror or error}.") from None

    try:
        finished, earlier = on_rank0(group, look_safely)
        record = RunDirectory(config, group, finished, earlier, lease)
        try:
            yield record
        except BaseException:
            with contextlib.suppress(UserError):  # the reason for leaving is the other one
                record.close()
            raise
        record.close()
    finally:
        if lease is not None:
            lease.__exit__()


def _covers(state: TrainingState, config: Config) -> bool:
    return state.step >= (config.max_steps or config.epochs * state.steps_per_epoch)


def _brief(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()) if name in ("accuracy", "loss"))


def _refuse_changes(config: Config, earlier: Checkpoint, directory: Path) -> None:
    changes = changed_settings(earlier.state.config, config)
    if changes:
        raise UserError(
            f"{directory} was begun with other settings: {'; '.join(changes)}. Set them back to go on, or --fresh to start "
            "anew, or another --name."
        )


def _begun_by_this_launch(group: Group, directory: Path) -> bool:
    """Whether a restart finds what it began afresh itself, and has to go on with. `launch` numbers its attempts, and
    `start` names one where containers are started again (compose, pods); a first attempt that was killed before
    it put the earlier run aside has left that run's checkpoints."""
    newest = list_checkpoints(directory / "checkpoints")[-1:]
    states = [read_json(path / "state.json") or {} for path in newest]
    if start := group.launch.start:
        return any(state.get("start") == start for state in states)
    if not group.restarted or not group.launch.numbers_attempts:
        return group.restarted
    return any(job_of(state.get("attempt", "")) == job_of(group.attempt) for state in states)


def _put_aside(directory: Path, say: Callable[[str], None]) -> None:
    """Start anew without losing anything: what is there moves to `before-<time>/`."""
    names = ("checkpoints", "tensorboard", "metrics.jsonl", "result.json", "config.yaml")
    there = [directory / name for name in names if (directory / name).exists()]
    if not there:
        return
    moved = directory / f"before-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    moved.mkdir()
    for path in there:
        shutil.move(path, moved / path.name)
    say(f"--fresh: the earlier run was moved to {moved}")


def table(rows: dict[str, str]) -> str:
    """Two columns, aligned."""
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


