"""A callback that gives Lightning's Trainer the promises of a job.

    job = rankup.init("runs/mine")
    trainer = L.Trainer(..., strategy="ddp", callbacks=[RankupCallback(job)])
    trainer.fit(module, job.batches(loader))

All promises hold with one device and with ddp, if the loader has a length. None hold with FSDP. Validation counts as
part of a step. If a rank is lost during validation, neither it nor its step of ReduceLROnPlateau is repeated. If
several optimizers step for one batch, these steps form one step of the job. Lightning's own checkpoints, loggers and
other callbacks work as before, but rankup's copies do not hold their state.
"""

import copy
import sys
from typing import Any

import lightning.pytorch as L

from rankup import Job


class RankupCallback(L.Callback):  # type: ignore[misc, unused-ignore]
    """Tracks the Trainer's model, optimizers, schedulers and loss scale. Makes each batch's optimizer steps one step.

    If the job is asked to stop, `Trainer.fit` raises `rankup.Stopped`, after a save. Do not catch it.
    """

    def __init__(self, job: Job) -> None:
        self.job, self._step = job, job.step()
        self._values: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._progress = Progress(trainer.fit_loop)
        optimizers = {f"optimizer{n}": each for n, each in enumerate(trainer.optimizers)}
        schedulers = {f"scheduler{n}": each.scheduler for n, each in enumerate(trainer.lr_scheduler_configs)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of fp16, which scales the loss
        more = {"scaler": scaler} if scaler is not None else {}
        self.job.track(model=trainer.strategy.model, progress=self._progress, **optimizers, **schedulers, **more)
        count = trainer.max_epochs  # -1 or None if the Trainer has another limit, such as max_steps
        self._epochs = self.job.epochs(sys.maxsize if count in (None, -1) else count)
        next(self._epochs, None)
        self._follow(trainer)

    def _follow(self, trainer: Any, *_: Any) -> None:
        """Move the job to the Trainer's epoch. The job saves at the end of each epoch that it leaves."""
        while self.job.epoch < trainer.fit_loop.epoch_progress.current.processed:
            next(self._epochs, None)

    on_train_epoch_start = _follow

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._follow(trainer)
        self.job.loop_is_over = True  # also after an early stop: a script may leave out job.finish

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self._values = {"loss": loss.detach()}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if not self._step.inside:  # a second optimizer's step for the same batch belongs to the same step of the job
            self.job.step(**self._values).__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._step.inside:
            self._progress.commit()
            self._step.__exit__(None, None, None)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.job.repeats_calls = True  # the page says that a validation does not run again
            self.job.log(**trainer.callback_metrics)


class Progress:
    """The progress of Lightning's loop as of the last finished step."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self.commit()

    def commit(self) -> None:
        self._committed: dict[str, Any] = copy.deepcopy(self._loop.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return self._committed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the loop, which has already begun, from `state`, as Lightning does from its own checkpoints."""
        self._loop.load_state_dict(state)
        self._loop.reset()
        self._loop.epoch_progress.current.completed = self._loop.epoch_progress.current.processed
        if self._loop.epoch_loop.batch_progress.is_last_batch:
            self._loop.reset_restart_stage()  # the next epoch begins as in a run without a restart
        self.commit()
