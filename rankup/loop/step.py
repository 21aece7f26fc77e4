"""A step of a loop: what `with job.step()` does before and after its block."""

from typing import Any

from rankup.errors import UserError
from rankup.loop.unkept import LOOKS
from rankup.observe.stragglers import COMPUTE, WAITING

EARLY_LOG_EVERY = 10  # steps between lines until step `log_every_steps`, so that short or slow loops show a loss too
WITHOUT_EPOCHS = 1000  # steps between saves in a loop without job.epochs


class Step:
    """What `Job.step` returns. One object serves all steps, and it is no generator with `contextlib`: between steps the
    CPU's caches are cold, and each lookup costs up to a µs. `values`: the arguments of the newest call of `Job.step`.
    `inside`: a block of `job.step` or `job.change` has begun and has not ended, or has raised."""

    def __init__(self, job: Any) -> None:
        """`job`: a `rankup.loop.job.Job`, whose module imports this one."""
        self.values: dict[str, Any] = {}
        self.inside = False
        self._line: dict[str, Any] | None = None  # this step's training line, if it gets one
        self._first_of_epoch = 0  # the number of the newest step that began an epoch
        self._job, self._loop, self._position = job, job.loop, job.position
        self._clock, self._tracked, self._commit_lock = job.clock, job.tracked, job.commit_lock

    def __enter__(self) -> None:
        job, tracked, step = self._job, self._tracked, self._position.step
        values, self.values = self.values, {}  # otherwise the loss would keep its graph in memory
        job.begin(late=True)
        if self.inside:
            raise RuntimeError("a block of job.step has raised: its step is half done. Let the error end the program.")
        if self._position.ended:
            raise UserError("step: it must come before job.end, got one after it. Leave the loop.")
        # If this step's batches are of two epochs, no commit has yet covered the code that ran between the epochs
        tracked.check_unchanged(after_epoch=self._loop.epoch != self._position.epoch)
        if step >= job.agreement.next:
            job.agreement.compare(step)
        self._clock.end_of_backward()
        if tracked.shared:
            job.group.collective(tracked.share_buffers)
        line, number, every = None, step + 1, job.settings.log_every_steps
        if number % (every if number >= every else EARLY_LOG_EVERY) == 0 or number == job.progress.total:
            line = job.reporting.line(number, values, weight=self._loop.weight)
        if tracked.shared or line is not None:
            self._clock.mark(WAITING)
        if line is not None or self._loop.epoch != job.saving.flags_epoch:
            if self._loop.epoch != job.saving.flags_epoch:
                self._first_of_epoch = number
            job.saving.note_flags(self._loop.epoch)
            if self._loop.has_epochs and not (self._loop.streams or self._loop.running):
                job.warn_of_own_batches()
        self._line, self.inside = line, True
        # The exchanges are over: a rank that gets here finishes its step, even if other ranks die meanwhile
        self._commit_lock.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        position, line = self._position, self._line
        try:
            if kind is None:
                if self._tracked.shared and self._clock.backward_seen:
                    # The block has trained, as that of a GAN does: the buffers of its forward passes are of this step
                    self._job.group.collective(self._tracked.share_buffers)
                position.step += 1
                if line is not None:
                    position.line = line
                self._job.commit()
        except BaseException as failure:
            kind = type(failure)
            raise
        finally:
            self._commit_lock.__exit__(kind)
        if kind is None:
            self.inside = False
            self._clock.mark(COMPUTE)
            loop = self._loop
            # Code that fetches ahead reaches the end of a pass before the steps of the batches that it holds
            if loop.may_hold is not None and not loop.fetched and not loop.running:
                loop.may_hold.warn_of_steps_without_batch()
            loop.fetched = 0
            self._after(position.step)

    def _after(self, step: int) -> None:
        """Do what follows a finished step: write its line, save if due, stop if asked, and begin the next step."""
        job, run = self._job, self._job.run
        job.enter_step()
        self._tracked.check_kept()
        if (step <= job.progress.first_step + LOOKS or step == self._first_of_epoch) and job.is_main:
            job.look_for_unkept()
        if self._line is not None:
            job.reporting.metrics.write(self._line)
        if self._loop.running[-1:] != ["steps"]:  # otherwise the next pass of job.steps does this
            job.reseed()
        if step == job.agreement.rest_at and not self._tracked.split:
            job.agreement.compare_rest(self._tracked.fingerprint_of_rest())
        if run.saver.step is not None:
            run.saver.look()
        if run.parts.wanted and run.parts.due(step):
            job.saving.save_part()
        every = job.settings.save_every_steps
        if every is None:
            every = 0 if self._loop.has_epochs else WITHOUT_EPOCHS
        if every and step % every == 0:
            job.save_copy()
        if not self._loop.running:
            job.stop_if_asked()
