"""transformers' Trainer with a job's promises.

    job = rankup.init(run="runs/mine")
    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    callback = RankupCallback(job, trainer)
    trainer.train(resume_from_checkpoint=callback.checkpoint())
    job.finish()

All promises hold where each rank has the whole model. A resume first does what was due after the last finished step,
such as an evaluation. The Trainer reads the earlier batches and skips them. With FSDP and DeepSpeed by its own settings
none holds: use the Trainer's checkpoints. These, its loggers and other callbacks stay as they are.
"""

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from rankup import Job
from rankup.loop.tracked import fix_bucket_order
from rankup.seeds import derive_seed, seed_everything


class RankupCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Tracks what the Trainer trains, and makes each of its optimizer steps a step of `job`.

    Raises rankup.errors.Stopped out of `Trainer.train` when the job is asked to stop; do not catch it.
    """

    def __init__(self, job: Job, trainer: Any) -> None:
        self.job, self.trainer, self._step = job, trainer, job.step()
        # The Trainer's own record of it; the last step after which all that was due has been done
        self._progress: dict[str, Any] = {"state": {}, "settled": 0}
        trainer.add_callback(self)

    def checkpoint(self) -> str | None:
        """The folder that `Trainer.train` goes on from, None at the beginning of a run. All ranks call it once.

        The folder names the step, and its weights are those of the copy. The rest of the copy is restored when
        the training begins.
        """
        self.job.track(model=self.trainer.model, progress=self._progress)
        # The order of the samples follows from the seed that Accelerate finds set; `track` has set another
        seed_everything(self.trainer.args.seed, self.job.device)
        if not self.job.step_number:
            return None
        folder = self.job.run_dir / "trainer"
        self.trainer.save_model(str(folder))  # rank 0 writes it
        if self.job.is_main:
            (folder / "trainer_state.json").write_text(json.dumps(self._progress["state"]))
        self.job.gather(0)  # nobody reads before it is written
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if (wrapped := self.trainer.model_wrapped) is not self.trainer.model:  # which was tracked before it got that
            fix_bucket_order({"model": wrapped})
            self.job.tracked.share_inside(wrapped)
            self.job.clock.watch(wrapped)
        self.job.track(optimizer=objects["optimizer"], scheduler=objects["lr_scheduler"])
        self.job.begin()
        self.job.agreement.rest_at = float("inf")  # the record has times, which differ between ranks
        if state.global_step > self._progress["settled"]:
            trainer, due = self.trainer, self.trainer.callback_handler
            for event in (due.on_step_end, due.on_epoch_end)[: 1 + (state.epoch == int(state.epoch))]:
                event(args, state, control)
                trainer._maybe_log_save_evaluate(trainer._tr_loss, None, wrapped, None, state.epoch, None, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step > self._progress["settled"]:
            with self.job.commit_lock:  # what followed the step before, such as a step of ReduceLROnPlateau
                self._keep(state, settled=state.global_step)
                self.job.commit()
        # A DataLoader that is opened in the middle of an epoch draws numbers that an uninterrupted one did not
        seed_everything(derive_seed(args.seed, state.global_step, self.job.rank), self.job.device)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._step.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._step.inside:
            self._keep(state, settled=self._progress["settled"])
            self._step.__exit__(None, None, None)

    def _keep(self, state: Any, *, settled: int) -> None:
        # Copies: its list of records grows before the next step, and each of its checkpoints changes a dict
        found = {field.name: copy.copy(getattr(state, field.name)) for field in dataclasses.fields(state)}
        self._progress |= {"state": found, "settled": settled}

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **objects: Any) -> None:
        # No copy keeps numpy's values, and no JSON tensors; the Trainer has just added its record
        plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in logs.items()}
        state.log_history[-1] |= plain
        self.job.log(**{name: float(value) for name, value in plain.items() if isinstance(value, int | float)})
