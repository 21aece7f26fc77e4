"""The run directory of a training: `runs/<name>/` with settings, checkpoints, metrics, pictures and the result.

The same command goes on from what it finds there, or refuses: nothing in the directory is overwritten that a user could
miss, and one live attempt owns it. `rankup.job` does that; here stands what depends on the settings.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankup.agent.status import job_of
from rankup.errors import UserError
from rankup.group.group import Group
from rankup.job import open_job
from rankup.loop.job import Job, Settings
from rankup.loop.record import check_random_scheme
from rankup.observe import tracker
from rankup.places.files import read_json, write_atomically
from rankup.places.lineage import Lineage
from rankup.state.options import Options
from rankup.state.reading import Copy
from rankup.urls import is_url

from ..config import Config, changed_settings, to_yaml
from ..parallel.method import Method
from . import CHOICES
from .checkpoints import BEGIN_ANEW, check

RESULT = "result.json"


@contextlib.contextmanager
def open_run_directory(config: Config, group: Group, method: Method) -> Iterator[Job]:
    """Own the run directory for the length of the block, and find what is there: a finished run, a checkpoint, nothing.

    All ranks call this. Raises UserError on all of them where another attempt is alive, a setting that affects the
    result has changed, or the newest checkpoint can't be gone on with.
    """
    is_store, sharded = is_url(config.run_dir), config.checkpoint_format == "sharded"
    options = Options(
        store=config.run_dir if is_store else "", mirror=config.mirror or "", fresh=config.fresh, how=config.save,
        sharded=sharded, keep=config.keep,
        memory_every=0 if method.replicates_state else config.memory_every_steps,
        setup_s=config.setup_timeout_s, save_s=config.save_timeout_s, start=group.launch.start, check=check,
        fits=lambda path, record: _check_settings(path, record, config),
        wanted=lambda other: _begun_by_this_launch(other, group),
        finished=lambda newest: _is_finished(newest, config, group),
    )
    settings = Settings(
        seed=config.seed, save_every_steps=0, log_every_steps=config.log_every_steps, tensorboard=config.tensorboard,
        compare_every_steps=config.compare_every_steps,
        setup_timeout_s=config.setup_timeout_s, step_timeout_s=config.step_timeout_s,
        save_timeout_s=config.save_timeout_s, begin_anew=BEGIN_ANEW,
        again=f"The same command{' without --fresh' if config.fresh else ''}", gather=not sharded, share_all=True,
        can_rescue=method.every_rank_has_all, tracker=config.tracker, shown=config.model_dump(mode="json"),
    )

    def owned(owner: Any) -> None:
        group.status.claim(owner, copy=owner.copy_status if is_store else None)
        if config.tracker != "none":
            tracker.check(config.tracker)

    with open_job(group, settings, options, owned=owned) as job:
        if not job.run.finished:
            group.on_rank0(lambda: _go_on(config, group))
        yield job


def check_data(newest: Copy, data_name: str) -> None:
    """Raises UserError where the run can't go on from its newest checkpoint with this data."""
    record = newest.record
    if record["data"] != data_name:
        way_out = "Set --data-dir or --bert-dir" if record["config"]["workload"] == "text" else "Set --data-dir"
        raise UserError(f"{newest.path} was trained on {record['data']}, got {data_name} now. {way_out}.")


def _go_on(config: Config, group: Group) -> None:
    """Note in the directory that the run goes on. Rank 0 only. Raises UserError."""
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
    check_random_scheme(path, record, begin_anew=BEGIN_ANEW)
    if changes := changed_settings(record["config"], config):
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
    if not group.restarted or group.launch.agent is None:
        return group.restarted
    return job_of(found.begun_by) == job_of(group.attempt)
