"""A callback that gives transformers' Trainer the promises of a job.

    job = rankup.init(run="runs/mine")
    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    callback = RankupCallback(job, trainer)
    trainer.train(resume_from_checkpoint=callback.checkpoint())

All promises hold if each rank has the whole model. After a resume, the callback first does what was due after the last
finished step, such as an evaluation; then the Trainer reads and skips the earlier batches. None hold with the Trainer's
own FSDP or DeepSpeed: use its checkpoints there. Its checkpoints, loggers and other callbacks work as before.
"""

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from rankup import Job
from rankup.seeds import derive_seed, seed_everything


class RankupCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Tracks the Trainer's model, optimizer, scheduler and loss scale. Makes each of its steps a step of `job`.

    If the job is asked to stop, `Trainer.train` raises `rankup.Stopped`, after a save. Do not catch it.
    """

    def __init__(self, job: Job, trainer: Any) -> None:
        self.job, self.trainer, self._step = job, trainer, job.step()
        # "state": the Trainer's record of its progress. "settled": the last step whose evaluation and saves are done
        self._progress: dict[str, Any] = {"state": {}, "settled": 0}
        trainer.add_callback(self)

    def checkpoint(self) -> str | None:
        """Restore the model, and return the folder for `resume_from_checkpoint`, None at the beginning of a run. All
        ranks call this once. The folder holds the Trainer's record of its progress. The rest of the copy is restored
        when training begins.
        """
        self.job.track(model=self.trainer.model, progress=self._progress)
        # Accelerate derives the order of the samples from the current seed, and `track` has set another one
        seed_everything(self.trainer.args.seed, self.job.device)
        if not self.job.step_number:
            return None
        # Each rank has a folder of its own, because nodes may share no disk
        folder = self.job.run_dir / "trainer" / f"rank-{self.job.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trainer_state.json").write_text(json.dumps(self._progress["state"]))
        self.trainer._load_from_checkpoint = self._load_nothing
        return str(folder)

    def _load_nothing(self, *_: Any) -> None:
        """Take the place of the Trainer's own reading of weights, once: `track` has restored them."""
        del self.trainer._load_from_checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        scaler = self.trainer.accelerator.scaler  # of fp16, which scales the loss
        more = {"scaler": scaler} if scaler is not None else {}
        self.job.track(optimizer=objects["optimizer"], scheduler=objects["lr_scheduler"], **more)
        self.job.begin()
        self.job.agreement.rest_at = float("inf")  # the Trainer's record has times, which differ between ranks
        if state.global_step > self._progress["settled"]:
            trainer, due = self.trainer, self.trainer.callback_handler
            model = trainer.model_wrapped
            for event in (due.on_step_end, due.on_epoch_end)[: 1 + (state.epoch == int(state.epoch))]:
                event(args, state, control)
                trainer._maybe_log_save_evaluate(trainer._tr_loss, None, model, None, state.epoch, None, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step > self._progress["settled"]:
            with self.job.commit_lock:  # commit what followed the previous step, such as ReduceLROnPlateau's step
                self._keep(state, settled=state.global_step)
                self.job.commit()
        # A DataLoader that a resume opens inside an epoch draws random numbers that an uninterrupted run does not draw
        seed_everything(derive_seed(args.seed, state.global_step, self.job.rank), self.job.device)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._step.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._step.inside:
            self._keep(state, settled=self._progress["settled"])
            self._step.__exit__(None, None, None)

    def on_train_end(self, *_: Any, **objects: Any) -> None:
        self.job.loop_is_over = True  # a script may leave out job.finish

    def _keep(self, state: Any, *, settled: int) -> None:
        # Copy the fields: the Trainer's list of records grows before the next step, and a checkpoint changes a dict
        found = {field.name: copy.copy(getattr(state, field.name)) for field in dataclasses.fields(state)}
        self._progress |= {"state": found, "settled": settled}

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **objects: Any) -> None:
        # A copy can't hold numpy's values, nor JSON tensors. Replace them in the record that the Trainer has just added
        plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in logs.items()}
        state.log_history[-1] |= plain
        self.job.repeats_calls = True  # the script can't move this call
        self.job.log(**{name: float(value) for name, value in plain.items() if isinstance(value, int | float)})
