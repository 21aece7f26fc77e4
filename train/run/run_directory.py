"""Open the run directory of a training, `runs/<name>/`, and check that its checkpoint fits the settings."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import rankup
from rankup import Copy, Group, Job, UserError

from ..config import Config, changed_settings, to_yaml
from ..parallel.methods import Method

ABOUT = {"config", "data", "steps_per_epoch"}  # what this program adds to the record of each checkpoint


def check(path: Path, record: dict[str, Any]) -> None:
    """Raises ValueError if another program wrote the checkpoint `path`."""
    if missing := sorted(ABOUT - record.keys()):
        raise ValueError(f"state.json: {', '.join(missing)} missing")
    if not isinstance(record["steps_per_epoch"], int):
        raise ValueError(f"state.json: steps_per_epoch is {record['steps_per_epoch']!r:.50}")


@contextlib.contextmanager
def open_run_directory(config: Config, group: Group, method: Method, *, fresh: bool) -> Iterator[Job]:
    """Own the run directory while the block runs, and find a finished run, a checkpoint or nothing in it. All ranks
    call this. Raises UserError if the run can't be resumed, or if another attempt is alive."""
    settings = rankup.Settings(
        seed=config.seed, fresh=fresh, save_every_steps=0, keep=config.keep,
        log_every_steps=config.log_every_steps, compare_every_steps=config.compare_every_steps,
        memory_every_steps=0 if method.replicates_state else config.memory_every_steps,
        tensorboard=config.tensorboard, setup_timeout_s=config.setup_timeout_s, step_timeout_s=config.step_timeout_s,
        save_timeout_s=config.save_timeout_s, store=config.run_dir if rankup.urls.is_url(config.run_dir) else "",
        mirror=config.mirror or "", save=config.save, sharded=config.checkpoint_format == "sharded", share_all=True,
        tracker=config.tracker, shown=config.model_dump(mode="json"),
        check=partial(_check_settings, config=config, group=group),
        finished=lambda newest, result: _is_finished(newest, result, config, group),
    )
    with rankup.open_job(group, settings) as job:
        if not job.run.finished:
            group.on_rank0(lambda: job.reporting.write("config.yaml", to_yaml(config)))
        yield job


def check_data(copy: Copy, data_name: str) -> None:
    """Raises UserError if the weights were trained on other data. With another vocabulary the same texts get other
    token numbers, and the default data set is replaced by digits if it can't be downloaded."""
    trained_on = copy.record["data"]
    if trained_on != data_name:
        setting = "bert-dir" if copy.record["config"]["workload"] == "text" else "dataset"
        raise UserError(f"{copy.path} was trained on {trained_on}, got {data_name} now. Set --data-dir or --{setting}.")


def _is_finished(newest: Copy, result: dict[str, Any], config: Config, group: Group) -> bool:
    """Return whether the run is finished at its newest checkpoint, and log it if so."""
    end = config.max_steps or config.epochs * newest.record["steps_per_epoch"]
    if result.get("step") != newest.step or newest.step < end:
        return False
    named = {name: value for name, value in result["metrics"].items() if name in ("accuracy", "loss")}
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(named.items()))
    group.log.info(
        f"{group.run_dir} is finished: {newest.step} steps, {metrics}. More --epochs continue it, --fresh trains it "
        "again, another --name starts another run."
    )
    return True


def _check_settings(path: Path, record: dict[str, Any], config: Config, group: Group) -> None:
    """Raises UserError if the run can't resume from the checkpoint `path` with these settings."""
    check(path, record)
    if changes := changed_settings(record["config"], config):
        out = "Set them back to resume the run, or give --fresh or another --name."
        raise UserError(f"{group.run_dir} was begun with other settings: {'; '.join(changes)}. {out}")
