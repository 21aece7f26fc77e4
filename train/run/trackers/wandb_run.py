"""A run at Weights & Biases. Server, project and key come from its own variables and files, never from our settings."""

import os
from pathlib import Path
from typing import Any

import wandb

from train.run.trackers.tracked_run import KINDS, Facts, Point

FINISH_S = 12.0  # for what is left at the end; the rest stays on the disk for `wandb sync`
INIT_S = 20.0  # for the server to answer


class WandbRun:
    """The run that has our run's id, which W&B takes as its own.

    W&B writes all to a file below the run directory, and a process of its own uploads that. With WANDB_MODE=offline the
    file is all there is: one for each attempt, of the same run.
    """

    def __init__(self, facts: Facts) -> None:
        self._step: dict[str, int] = {}
        self.run = wandb.init(
            id=facts.run, resume="allow", name=facts.name, project=os.environ.get("WANDB_PROJECT", "rankup"),
            dir=str(Path(facts.run_dir) / "tracker"),
            settings=wandb.Settings(
                silent=True, init_timeout=INIT_S, finish_timeout=FINISH_S,
                # Only what is logged below: no output, code, commands, packages or facts about the machine
                console="off", save_code=False, disable_code=True, disable_git=True, disable_job_creation=True,
                x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
            ),
        )
        self.run.config.update(facts.settings, allow_val_change=True)
        for kind in KINDS:
            # Not W&B's own step: it counts the calls of `log`, and what belongs to an earlier step would be dropped
            self.run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        folder = Path(self.run.settings.sync_dir).parent
        self.address = self.run.url or f"offline, in {folder}; to upload it: wandb sync {folder}/offline-run-*"

    def sent(self) -> None:
        """W&B's summary lags behind its curve, and offline there is nobody to ask."""

    def log(self, points: list[Point]) -> None:
        for point in points:
            row: dict[str, Any] = {**point.values, f"{point.kind}/step": point.step, "_timestamp": point.time}
            self.run.log(row)

    def note(self, name: str, value: str) -> None:
        self.run.summary[name] = value

    def upload(self, path: Path) -> None:
        if path.suffix == ".png":
            self.run.log({path.stem: wandb.Image(str(path))})
        else:
            self.run.save(str(path), base_path=str(path.parent), policy="now")

    def end(self, state: str) -> None:
        self.run.finish(exit_code=0 if state == "finished" else 1)
