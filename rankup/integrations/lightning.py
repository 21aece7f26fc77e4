"""Lightning's Trainer with a job's promises: `Trainer(..., callbacks=[RankupCallback(job)])`.

    job = rankup.init(run="runs/mine")
    trainer = L.Trainer(..., strategy="ddp", callbacks=[RankupCallback(job)], enable_checkpointing=False)
    trainer.fit(module, job.batches(loader))
    job.finish()

| promise                                                     | holds                                              |
|-------------------------------------------------------------|----------------------------------------------------|
| stop on request, agreed among the ranks, and resume         | yes, with automatic optimization                   |
| the last finished step after a lost rank                    | yes with ddp; with FSDP from the newest copy        |
| the same weights, to the bit                                | yes, where the loader is `job.batches(loader)`      |
| deadlines with stacks, status, slow ranks, metrics          | yes                                                |
| manual optimization with several optimizers                 | all their steps in a batch are one step             |
| a validation that was under way at the loss                 | is left out                                         |
| Lightning's own checkpoints, loggers and other callbacks    | stay as they are; their state is not in our copies  |
"""

import copy
from contextlib import AbstractContextManager
from typing import Any

import lightning as L  # type: ignore[import-untyped, unused-ignore]

from rankup import Job


class RankupCallback(L.Callback):  # type: ignore[misc, unused-ignore]
    """Tracks what the Trainer trains, and makes each of its optimizer steps a step of `job`.

    Raises rankup.errors.Stopped out of `Trainer.fit` when the job is asked to stop; do not catch it.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._step: AbstractContextManager[None] | None = None
        self._loss: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._progress = Progress(trainer.fit_loop)
        optimizers = {f"optimizer{n}": each for n, each in enumerate(trainer.optimizers)}
        schedulers = {f"scheduler{n}": each.scheduler for n, each in enumerate(trainer.lr_scheduler_configs)}
        self.job.track(model=trainer.strategy.model, loop=self._progress, **optimizers, **schedulers)

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self._loss = {"loss": loss.detach()}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self._step is None:  # the second optimizer of a batch belongs to the same step
            self._step = self.job.step(**self._loss)
            self._step.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._step is not None:
            self._progress.commit()
            step, self._step = self._step, None
            step.__exit__(None, None, None)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.job.log(**{name: float(value) for name, value in trainer.callback_metrics.items()})


class Progress:
    """Where Lightning's loop stands, as of the last finished step: it counts on before the next one is finished."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self.commit()

    def commit(self) -> None:
        self._committed: dict[str, Any] = copy.deepcopy(self._loop.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return self._committed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The loop goes on as it does from a checkpoint of its own, although it has begun already."""
        self._loop.load_state_dict(state)
        self._loop.reset()
        self._loop.epoch_progress.current.completed = self._loop.epoch_progress.current.processed
        self.commit()
