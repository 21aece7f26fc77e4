"""The run directory of a training: `runs/<name>/` with settings, checkpoints, metrics, pictures and the result.

The same command goes on from what it finds there, or refuses: nothing in the directory is overwritten that a user could
miss, and one live attempt owns it. `rankup.state.run` does that; here stands what depends on the settings.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rankup.agent.status import job_of
from rankup.errors import UserError
from rankup.group.group import Group, on_rank0
from rankup.observe import tracker
from rankup.observe.metrics import Metrics
from rankup.places.files import read_json, write_atomically
from rankup.places.lineage import Lineage
from rankup.places.urls import is_url
from rankup.state.reading import Copy
from rankup.state.run import Options, Run, open_run

from ..config import Config, changed_settings, to_yaml
from .choices import CHOICES
from .metrics import Progress
from .training_state import TrainingState

RESULT = "result.json"


@dataclass(slots=True, kw_only=True)
class RunDirectory:
    """The run directory as this attempt found it, and how to add to it."""

    config: Config
    group: Group
    kept: Run
    # Writes nothing until `open_metrics`
    metrics: Metrics = field(default_factory=lambda: Metrics(None, Progress(), saved=Progress(), tensorboard=False))
    tables: dict[str, torch.Tensor] = field(default_factory=dict)  # of the last evaluation, for pictures

    @property
    def path(self) -> Path:
        return self.group.run_dir

    @property
    def saved(self) -> Progress:
        """Where the run stood at the newest checkpoint in rank 0's folder."""
        record = self.kept.saved
        return Progress(record["step"], record["evaluated"]) if record else Progress()

    def open_metrics(self, progress: Progress, unit: str) -> Metrics:
        """Metrics from `progress` on, with the speed in `unit`/s. All ranks call this, rank 0's alone write.

        Raises, on all ranks, UserError where rank 0 can't write, and PeerLost where another attempt owns the directory.
        """
        def open_files() -> None:
            self.metrics = Metrics(
                self.path, progress, saved=self.saved, tensorboard=self.config.tensorboard, unit=unit,
                check_owner=self.kept.check_owner,
            )

        self.metrics.unit = unit
        self.kept.begin(progress.step, open_files)
        return self.metrics


@contextlib.contextmanager
def open_run_directory(config: Config, group: Group) -> Iterator[RunDirectory]:
    """Own the run directory for the length of the block, and find what is there: a finished run, a checkpoint, nothing.

    All ranks call this. Raises UserError on all of them where another attempt is alive, a setting that affects the
    result has changed, or the newest checkpoint can't be gone on with.
    """
    is_store = is_url(config.run_dir)
    options = Options(
        store=config.run_dir if is_store else "", mirror=config.mirror or "", fresh=config.fresh, how=config.save,
        sharded=config.checkpoint_format == "sharded", keep=config.keep, setup_s=config.setup_timeout_s,
        save_s=config.save_timeout_s, start=group.launch.start, check=TrainingState.of,
        fits=lambda path, record: _check_settings(path, record, config),
        wanted=lambda other: _begun_by_this_launch(other, group),
        finished=lambda newest: _is_finished(newest, config, group),
    )

    def owned(owner: Any) -> None:
        group.status.claim(owner, copy=owner.copy_status if is_store else None)
        if config.tracker != "none":
            tracker.check(config.tracker)

    with open_run(group.run_dir, group, options, owned=owned) as kept:
        run = RunDirectory(config=config, group=group, kept=kept)
        if not kept.finished:
            on_rank0(group, lambda: _go_on(config, group))
        try:
            yield run
        except BaseException:
            with contextlib.suppress(UserError):  # the reason for leaving is the other error
                run.metrics.close()
            raise
        run.metrics.close()  # TensorBoard's writer holds up to two minutes of values in memory


def _go_on(config: Config, group: Group) -> None:
    """Note in the directory that the run goes on. Rank 0 only. Raises UserError."""
    group.status.begun = True
    try:
        (group.run_dir / RESULT).unlink(missing_ok=True)  # beside a run that goes on it would be read as its end
        write_atomically(group.run_dir / "config.yaml", to_yaml(config, choices=CHOICES))
    except OSError as error:
        raise UserError(f"run_dir: {group.run_dir} must be writable, got {error.strerror or error}.") from None


def _is_finished(newest: Copy, config: Config, group: Group) -> bool:
    """Whether the run came to its end at its newest checkpoint. Says so."""
    result = read_json(group.run_dir / RESULT) or {}
    end = config.max_steps or config.epochs * newest.record["steps_per_epoch"]
    if result.get("step") != newest.step or newest.step < end:
        return False
    named = {name: value for name, value in result["metrics"].items() if name in ("accuracy", "loss")}
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(named.items()))
    group.log.info(
        f"{group.run_dir} is finished: {newest.step} steps, {metrics}. More --epochs go on from there, --fresh starts "
        "anew, another --name leaves it."
    )
    return True


def _check_settings(path: Path, record: dict[str, Any], config: Config) -> None:
    """Raises UserError where the run can't go on from the checkpoint `path` with these settings."""
    state = TrainingState.of(path, record)
    state.check_random_scheme(path)
    if changes := changed_settings(state.config, config):
        raise UserError(
            f"{path.parents[1]} was begun with other settings: {'; '.join(changes)}. Set them back to go on, or "
            "--fresh to start anew, or another --name."
        )


def _begun_by_this_launch(found: Lineage, group: Group) -> bool:
    """Whether this attempt is a restart that finds what its own launch began with --fresh, and has to go on with that.

    That it is a restart does not suffice: a first attempt that was killed before it put the earlier run aside has left
    the earlier run. `launch` gives all its attempts ids of one job; where containers are started again (compose, pods),
    `start` names the start of them all.
    """
    if group.launch.start:
        return found.start == group.launch.start
    if not group.restarted or not group.launch.numbers_attempts:
        return group.restarted
    return job_of(found.begun_by) == job_of(group.attempt)
