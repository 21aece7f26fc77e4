"""How a job goes through epochs, steps and batches: `TrainingLoop`, of which `rankup.loop.job.Job` is made."""

import threading
from collections.abc import Iterator
from typing import Any

from rankup.errors import Finished, Stopped, UserError
from rankup.group.group import Group
from rankup.loop import trained
from rankup.loop.agreement import Agreement
from rankup.loop.arguments import iterable, switch, whole_number
from rankup.loop.batches import evaluation_batches
from rankup.loop.cycle import Cycle
from rankup.loop.passes import Batches
from rankup.loop.position import OVER, LoopState
from rankup.loop.reporting import Reporting
from rankup.loop.saving import Saving
from rankup.loop.settings import Settings
from rankup.loop.step import Step
from rankup.loop.tracked import Tracked
from rankup.loop.unkept import Unkept
from rankup.observe.metrics import Position
from rankup.seeds import derive_seed, seed_everything
from rankup.state.run import Run

EPOCH = -1  # takes the place of the step in the seed of an epoch


class TrainingLoop:
    """The part of `Job` that takes it from epoch to epoch, step to step and batch to batch, and knows where it is."""

    def __init__(self, group: Group, run: Run, settings: Settings) -> None:
        self.group, self.run, self.settings = group, run, settings
        self.run_dir, self.device, self.is_main = group.run_dir, group.device, group.is_rank0
        self.rank, self.local_rank, self.world_size = group.rank, group.rank_env.local_rank, group.world_size
        self.position = position = Position.of(run.newest.record if run.newest is not None else None)
        self.tracked = Tracked(share_all=settings.share_all and group.world_size > 1, device=group.device)
        self.agreement = Agreement(group, run, self.tracked.items, every=settings.compare_every_steps)
        self.reporting = Reporting(group, run, settings, position)
        self.saving = Saving(group, run, self.tracked, self.reporting, self.agreement, settings, position)
        self.progress, self.clock = self.reporting.progress, self.reporting.clock
        self.commit_lock = self.saving.commit_lock
        self.loop = LoopState(position, self.saving.loader_states, run.newest.record if run.newest is not None else {})
        position.rank, self.thread = group.rank, threading.get_ident()
        self.loop_is_over = False
        self._exit_handler: Any = None  # the `ExitHandler` of a script, see `rankup.job`
        self._batches: dict[int, Batches] = {}  # by id of the loader, for loaders used in this epoch or the last one
        self._wrappers = trained.Wrappers(group, self.tracked, self.clock)
        self._cycles: dict[int, Cycle] = {}  # by id of the loader
        self._begun = self._closed = self.repeats_calls = self._late_options = self._own_batches = False
        self._step = Step(self)
        self._unkept = Unkept(self.tracked.items, group.log.warning, group.log.info)
        self._trained = set[int]()  # see `watch_optimizers`
        # The epoch of the copy, and whether the copy was made inside of it
        self._resumed_in = position.epoch, any(each not in (0, OVER) for each in position.streams)

    @property
    def epoch(self) -> int:
        """The epoch that `job.epochs` is in, from 0; always 0 without `job.epochs`."""
        return self.loop.epoch

    @property
    def finished(self) -> bool:
        """Whether the run had finished before this start, and nothing has continued it since."""
        return self.run.finished

    @property
    def step_number(self) -> int:
        """The number of finished steps of the run, over all attempts."""
        return self.position.step

    @property
    def weight(self) -> float:
        """Multiply the mean loss of this rank's part of the newest batch by this factor. The average over the ranks is
        then the mean over the global batch. It is 1.0 if all parts have the same size. If a loop reads several loaders
        together, each object that `job.batches` returned has its own `weight`."""
        self.loop.weight_asked = True
        return self.loop.weight

    def _same_names(self, names: list[str]) -> None:
        """Raise UserError on all ranks if they do not call `track` with the same names. The last call has no names."""
        self.group.must_match(
            "track: the names", ", ".join(names) or "none", remedy="All ranks must track the same objects."
        )

    def save_copy(self, *, wait: bool = False) -> None:
        """Save as `Job.save` does, where the ranks are known to be at the same step."""
        self.begin()
        if self.saving.save(wait=wait):
            self.enter_step()

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs up to `count` - 1, starting with the epoch in which the run stands. Each epoch ends
        with a save, unless `save_every_steps` of `rankup.init` is set.

        If the copy was made after the last batch of an epoch, a resume repeats the code after the loop over batches,
        such as an evaluation. Raises Stopped, after a save, if the job was asked to stop, and Finished if an earlier
        start has finished the run and no epoch is left, unless `rankup.init` got `again`.
        """
        count = whole_number("job.epochs: the count", count)
        if self._nothing_left(self.epoch >= count):
            return
        self.begin()
        self.loop.has_epochs = True
        while self.epoch < count and not self.position.ended:
            self.reseed_outside(0)
            yield self.epoch
            self.stop_if_asked()
            # Otherwise a loader that the script rebuilds in each epoch would stay alive, with its persistent workers
            self._batches = {key: each for key, each in self._batches.items() if each in self.loop.begun}
            self.loop.begin_epoch()
            if not self.loop.fetched:  # otherwise the script holds gradients for its next step, and no copy has them
                self.tracked.check_unchanged(after_epoch=True)
                with self.commit_lock:
                    self.commit()
            if self.settings.save_every_steps is None:
                self.save_copy()
        self.loop_is_over = True

    def steps(self, total: int) -> Iterator[int]:
        """Iterate over the steps of a run of `total` steps, from the first unfinished one. Yields the number of steps
        finished so far. Use it in a loop that has no epochs and no loader, or whose batches depend only on the step.

        The body enters `job.step` once per pass. Raises Stopped and Finished as `epochs` does.
        """
        total = whole_number("job.steps: the total", total)
        if self._nothing_left(self.step_number >= total):
            return
        self.begin()
        self.progress.total = total
        self.loop.running.append("steps")
        try:
            before = -1
            while (step := self.step_number) < total and not self.position.ended:
                self.stop_if_asked()
                if step == before:  # the body did not enter job.step, and would otherwise loop forever
                    self.tracked.check_unchanged()
                before = self.loop.began_at = step
                self.reseed()  # a resume does not repeat what the last pass drew after its step, as in an evaluation
                yield step
                self.warn_of_options()
        finally:
            self.loop.running.remove("steps")
        self.loop_is_over = True

    def _nothing_left(self, over: bool) -> bool:
        """Return whether a finished run is `over`, so that the loop may not begin. Raises Finished unless `again`."""
        if not (self.finished and (over or self.position.ended)):
            return False
        if not self.settings.again:
            raise Finished(self._no_step_left())
        self.loop_is_over = True
        return True

    def _done(self) -> str:
        why, steps = self.position.ended, self.step_number
        return f"job.end ended the run after {steps} steps ({why})" if why else f"all {steps} are done"

    def _no_step_left(self) -> str:
        return (
            f"no step was left to train, {self._done()}: {self.run_dir}/; rankup status "
            f"{self.run_dir}. To train anew give another run or fresh=True. rankup.init(again=True) runs only the code "
            "after the loop"
        )

    def batches(self, loader: Any, *, any_order: bool = False, prefetch: int = 0) -> Batches:
        """Iterate over this rank's part of each batch of `loader`. After a resume, start at the next unfinished batch.

        A batch of a DataLoader is a global batch, of which each rank gets a part, see `weight`. With a sampler that
        already splits the data (DistributedSampler), it is this rank's batch. The order depends only on seed and epoch.
        `any_order`: the order does not matter, and a resume starts `loader` from its beginning.
        `prefetch`: yield batches on `job.device`, and copy this many more there while the loop computes, for which a
        DataLoader needs `pin_memory=True`. The batches stay the same, and one counts only once the loop has got it.

        Raises UserError for a loader that can't be replayed (see `rankup.loop.batches`) or if ranks draw different
        orders. Raises Stopped, after a save, if the job was asked to stop.
        """
        if id(loader) not in self._batches:  # the entry keeps the loader alive, so that its id stays unique
            self._batches[id(loader)] = Batches.of(self, loader, any_order)
        return self._batches[id(loader)].ahead(prefetch)

    def cycle(self, loader: Any, *, any_order: bool = False, prefetch: int = 0) -> Cycle:
        """Iterate over `loader` without end, beginning it again whenever it ends: `it = job.cycle(loader)` above the
        loop, and `next(it)` inside a loop over `job.steps` or `job.batches`. A resume goes on with the next batch.

        The arguments are those of `job.batches`. Each pass has an order of its own, from the seed and the number of the
        pass; epochs do not matter. A second call with the same loader returns the same cycle. Raises UserError after
        the first step for a new loader, and as `job.batches` does.
        """
        if id(loader) not in self._cycles:
            if self._begun or self._closed:
                raise UserError(
                    "cycle: it must be called before the first step, got a call with a new loader. A resume would not "
                    "know how far that loader was: build it once, and call job.cycle above the loop."
                )
            batches = Batches.of(self, loader, any_order).ahead(prefetch)
            self._cycles[id(loader)] = Cycle(self, batches, len(self._cycles))
        return self._cycles[id(loader)]

    def eval_batches(self, loader: Any, *, pad: bool = False) -> Iterator[Any]:
        """Iterate over the batches of an evaluation. The ranks take batches in turn: together they get each sample of
        `loader` once.

        Some ranks may get one batch less than others. `pad` gives them one more batch, with a `job.weight` of 0.0, for
        models whose forward pass waits for all ranks (FSDP2). `loader` must yield the same batches on all ranks: do not
        split it by `job.rank`. Restores the random state afterwards, and `job.weight` of the newest batch of
        `job.batches`. Raises Stopped, after a save, if the job was asked to stop; with several ranks only if `pad`.
        """
        iterable("eval_batches: the loader", loader)
        switch("eval_batches: pad", pad)
        try:
            for batch, weight in evaluation_batches(loader, self.settings.seed, self.rank, self.world_size, pad=pad):
                if self.world_size == 1:
                    self.stop_if_asked()
                elif pad and self.group.max(int(self.group.stop.requested)):
                    raise self.save_and_stop()
                self.loop.weight = weight
                yield batch
        finally:
            self.loop.weight = self.loop.batch_weight

    def step(self, **values: Any) -> Step:
        """Return the context manager of a step, for `with job.step(loss=loss):`. Its block holds all that turns
        gradients into a finished step: `optimizer.step()`, `scheduler.step()`, `scaler.update()`, EMA. Tracked state
        may change only in the block. All ranks enter it.

        `values`: numbers or scalar tensors of this rank, with the same names on all ranks. Every `log_every_steps`
        steps, the ranks exchange them, and rank 0 writes their mean to `metrics.jsonl` and TensorBoard as
        `train/<name>`. With several ranks, the block begins only when the GPU has the gradients: if a rank were lost
        before, the host's state (an optimizer's step count) would be a step ahead of the weights. If a save is copying
        the state to the host, the GPU, not the host, waits for that copy before it runs the block.
        When the block ends, the step is finished. Then rankup seeds the random numbers from seed, step and rank, and
        saves a copy if one is due. Raises Stopped, after a save, if the job was asked to stop. If the block raises, the
        step is not finished, and the job can't continue.
        """
        self._step.values = values
        return self._step

    def commit(self) -> None:
        """Make the position of the loop and the tracked objects the state. The caller holds `self.commit_lock`."""
        position, loop = self.position, self.loop
        if loop.epoch != position.epoch:
            position.changes = 0
        loop.changes_to_repeat = 0  # this attempt has repeated all blocks of job.change before this commit
        position.epoch, position.streams, position.loaders = loop.epoch, [*loop.streams], [*loop.loaders]
        position.traces = [*loop.traces]
        position.cycles = [[each.passes, each.batches, each.trace] for each in loop.cycles]
        self.saving.loader_states = loop.loader_states()
        self.tracked.commit()

    def begin(self, *, late: bool = False) -> None:
        """Prepare the first step of this attempt; later calls only look for new DDP modules. All ranks call this.
        `late`: the step's backward pass is over."""
        if trained.new:
            trained.new.clear()
            self._wrappers.adopt(late=late, begun=self._begun)
        if self._begun:
            return
        self.must_be_open()
        self._begun, self.run.finished, self.group.status.begun = True, False, True
        self._same_names([])
        self._wrappers.warn_of_hooks()
        if self.run.newest is not None and not late:  # otherwise the body of the script's own loop may have set them
            self.undo_options()
        group, run, step = self.group, self.run, self.position.step
        commit = group.record.commit
        changed = ("basis" in commit or bool(self.saving.ranks)) and self.saving.note_ranks()
        self.saving.begin()
        run.begin(step, lambda: self.reporting.open(commit, changed=changed))
        run.newest = None  # frees the restored state, which every rank would otherwise keep in memory
        self._trained = trained.watch_optimizers(self.tracked, group.log.warning)
        group.watch.protect(self.saving, timeout_s=self.settings.save_timeout_s)
        group.stop.finish_step_first = True
        self.agreement.begin(step)
        group.count_anew()
        self.reseed()
        self.enter_step()

    def close(self) -> None:
        """End this job: it refuses all later calls that need its group or its run."""
        self._begun, self._closed = False, True
        self.tracked.end_checks()

    def must_be_open(self) -> None:
        """Raise UserError if the job has ended."""
        if self._closed:
            raise UserError(
                "job: it must not have ended, got a call after job.finish, or after an error in a notebook. Move the "
                "call above job.finish, or call rankup.init again."
            )

    def enter_step(self) -> None:
        """Start the deadline of the next step."""
        group, timeout_s = self.group, self.settings.step_timeout_s
        if group.record.entered == ("step", timeout_s):  # the usual case, between two steps
            group.record.begin_anew(self.position.step)
        else:
            group.watch.enter("step", timeout_s, step=self.position.step)

    def undo_options(self) -> None:
        """Undo what code has changed in options of optimizers since a copy was restored, and say so. A resume runs this
        code again, which stands before the first batch, and the copy already holds its changes. All ranks call this."""
        if changed := self.tracked.changed_options(undo=True):
            self.group.log.info(
                f"track  {', '.join(changed)}, by code that a resume runs again: undone, because the checkpoint has "
                "the change of the first time"
            )

    def warn_of_options(self) -> None:
        """Warn once if the body of a loop has changed options of optimizers after its step."""
        if self._late_options or self.step_number == self.loop.began_at or self.loop.fetched:
            return
        if changed := self.tracked.changed_options():
            self._late_options = True
            if self.is_main:
                self.group.log.warning(
                    f"track: {', '.join(changed)}, after the block of job.step: a resume here would lose the change. "
                    "Move it into the block, or above the forward pass if it depends only on job.step_number"
                )

    def warn_of_own_batches(self) -> None:
        """Warn once of steps in an epoch that reads no loader of `job.batches`."""
        if self.is_main and not self._own_batches:
            self._own_batches = True
            self.group.log.warning(
                "epochs: a step took no batch from job.batches. A resume does not know how far the epoch was: it "
                "begins the epoch anew, and the weights differ. Write `for x in job.batches(loader)`, or, without a "
                "loader, `for step in job.steps(total)`"
            )

    def look_for_unkept(self) -> None:
        """Say what changes and is in no copy, and in an attempt that resumed in the middle of a loop also which of the
        loop's variables have begun anew."""
        sources = [each.source for each in self._batches.values()] + [each.source for each in self._cycles.values()]
        (epoch, inside), resumed = self._resumed_in, self.progress.first_step > 0
        outer = resumed and (self.epoch > 0 or not self.loop.has_epochs)
        inner = resumed and (not self.loop.has_epochs or (inside and self.epoch == epoch))
        self._unkept.look(sources, self._trained, outer=outer, inner=inner)

    def reseed(self) -> None:
        """Seed all random numbers from the step, the batches fetched since, and the rank. Then copies need no state."""
        seed = derive_seed(self.settings.seed, self.position.step, self.rank)
        seed_everything(seed + self.loop.fetched, self.device)

    def reseed_outside(self, passes: int) -> None:
        """Seed all random numbers for code outside of steps, from the epoch and its finished `passes` over loaders. A
        resume may run this code again, at a later step."""
        seed_everything(derive_seed(self.settings.seed, EPOCH, self.loop.epoch, self.rank, passes), self.device)

    def stop_if_asked(self) -> None:
        """Save and raise Stopped if all ranks stop before the next step."""
        if not self.loop.fetched and self.group.stops_before(self.position.step):
            raise self.save_and_stop()

    def save_and_stop(self) -> Stopped:
        """Save, and return the error to raise. All ranks call this at the same step."""
        self.group.watch.end_steps()
        self.save_copy(wait=True)
        return Stopped(self.saving.stopped())

