"""`Job`, the interface for your loop: tracked state, steps, batches, copies, stops. `rankup.init` returns one."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rankup.errors import Finished, Stopped, UserError
from rankup.group.group import Group
from rankup.loop import trained
from rankup.loop.agreement import Agreement
from rankup.loop.batches import evaluation_batches
from rankup.loop.cycle import Cycle
from rankup.loop.filling import copied
from rankup.loop.passes import Batches
from rankup.loop.position import LoopState
from rankup.loop.reporting import Reporting
from rankup.loop.saving import FROZEN, Saving
from rankup.loop.settings import Settings
from rankup.loop.step import Step
from rankup.loop.tracked import Tracked
from rankup.loop.weights import start_from
from rankup.observe.metrics import Position, entry
from rankup.observe.stragglers import WAITING
from rankup.seeds import derive_seed, seed_everything
from rankup.state.run import Run

EPOCH = -1  # takes the place of the step in the seed of an epoch


class Job:
    """The training job, as this rank sees it. `rankup.init` returns it.

    `rank`, `local_rank`, `world_size`: this rank's numbers. `is_main`: whether this is rank 0. `device`: this rank's
    torch.device. `run_dir`: the run's folder, a Path. `program.md` describes what only a program with settings needs.
    """

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
        self._begun = False
        self._step = Step(self)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End the run: `finish` it, or in a notebook end it because of `error`. A script's error ends the process."""
        handler = self._exit_handler
        if error is None and handler.job is self:
            self.finish()
        elif handler.interactive and handler.job is self and (end := handler.leave(error)) is not error:
            self.group.log.warning(str(end))

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

    # State ----------------------------------------------------------------------------------------------------

    def start_from(self, place: str, module: nn.Module, *, item: str = "model", where: str = "start_from") -> None:
        """Let a new run begin with given weights. All ranks call this before `track`; only rank 0 needs the file. If
        the run resumes, this does nothing, because `track` restores the weights. Exception: with `only="trained"` the
        other weights come from here at each start.

        `place`: a file of safetensors or of `torch.save`, a model folder of Hugging Face, a run, a checkpoint, or the
        address of one of them. `item`: the object in a checkpoint of rankup. Tensors that fit by name and shape are
        loaded, without the prefixes of DDP and torch.compile; a line names each tensor that keeps its value. `where`:
        what messages begin with. Raises UserError on all ranks if nothing fits, or if the file can't be read.
        """
        if self.tracked.items:
            raise UserError("start_from: it must be called before job.track, got a later call. Move the call up.")
        if self.run.newest is None or FROZEN in self.run.newest.tracked:
            start_from(self.group, module, place, item=item, where=where, timeout_s=0.9 * self.settings.setup_timeout_s)

    def track(self, *, missing: str = "error", only: str = "all", **items: Any) -> None:
        """Save `items` in every copy, and restore them now if the run has one. All ranks call this before any step.

        An item is a module (bare, inside DDP, DataParallel or torch.compile, or split by FSDP2), an optimizer, a
        scheduler, a GradScaler, any object with `state_dict` and `load_state_dict`, or a dict, list or tensor, which
        rankup fills in place. You may call `track` several times. rankup finds the DDP module around a bare one.
        `missing="keep"`: an item that the copy does not have, such as a new EMA, keeps its value.
        `only="trained"`: of modules save buffers and the parameters that require gradients now, such as adapters. The
        other parameters must be the same at each start, and must not change.

        Raises UserError on all ranks for a value that a copy can't hold (the message gives its path), for an item that
        does not fit the copy or differs between ranks, and after the first step.
        """
        group, run, tracked = self.group, self.run, self.tracked
        if self._begun:
            raise UserError("track: it must be called before the first step, got a later call. Move the call up.")
        for option, value, known in (("missing", missing, ("error", "keep")), ("only", only, ("all", "trained"))):
            if value not in known:
                raise UserError(f'track: {option} must be "{known[1]}" or "{known[0]}", got {value!r:.80}.')
        items = dict(sorted(items.items()))  # ranks that call this with another order do the same in the same order
        self._same_names([*items])
        group.on_all_ranks(lambda: tracked.add(items, only_trained=only == "trained"))
        self._wrappers.adopt()
        sharded = tracked.split and self.settings.sharded
        if sharded and not run.parts.wanted:
            run.check_shared()
        run.saver.sharded, run.parts.wanted = sharded, tracked.split
        if run.newest is not None:
            self.saving.restore(run.newest, [*items], may_miss=missing == "keep")
        if self.world_size > 1:
            tracked.share_buffers()
            if run.newest is None:  # otherwise all ranks have restored the same state
                self.saving.must_match([*items])
        self.reseed()
        group.record.begin(self.step_number)

    def _same_names(self, names: list[str]) -> None:
        """Raise UserError on all ranks if they do not call `track` with the same names. The last call has no names."""
        self.group.must_match(
            "track: the names", ", ".join(names) or "none", remedy="All ranks must track the same objects."
        )

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Change tracked state between epochs: `with job.change(): best["accuracy"] = accuracy`.

        After a resume, the code outside the loops over batches may run again. If the copy already contains the changes
        of this block, rankup undoes the repeated changes when the block ends, so that none counts twice. Raises
        UserError inside a loop over `job.batches` or `job.steps`, whose code does not run again: use `job.step` there.
        """
        loop = self.loop
        if loop.running or self._step.inside:
            raise UserError(
                "change: it must come after the loop over job.batches, got one inside it, "
                "or after a loop with batches left. Move the change into the block of job.step, or finish that loop."
            )
        self.begin()
        self.tracked.check_unchanged(after_epoch=True)  # the block's commit would hide an earlier change
        again = loop.changes_to_repeat > 0
        before = copied(self.tracked.state(), self.device) if again else {}
        with self.commit_lock:
            self._step.inside = True
            yield
            if again:
                loop.changes_to_repeat -= 1
                self.tracked.load(before)
            else:
                self.position.changes += 1
                self.tracked.commit()
        self._step.inside = False

    def save(self, *, wait: bool = False) -> None:
        """Save a copy of the last commit, unless the newest copy already has it. All ranks call this at the same step.

        A thread writes the copy while training continues; with `wait`, the call returns once the copy is complete.
        Raises UserError inside `job.step` or if the disk is full, and PeerLost if another attempt has taken the run.
        """
        if self._step.inside:  # changes inside the block belong to no finished step yet
            raise UserError("save: it must be called outside job.step and job.change, got a call inside. Move it out.")
        self.begin()
        if self.saving.save(wait=wait):
            self.enter_step()

    def keep(self, name: str) -> None:
        """Save a copy of the last commit, unless the newest copy already has it, and keep that copy under `name` until
        this call gives the name to another one. It does not count for `keep` of `rankup.init`. `rankup export RUN FILE
        --checkpoint NAME` reads it. Returns once the copy is complete. All ranks call this at the same step.

        Call it before `job.change` notes that this is the best state: if the process is killed in between, a resumed
        run repeats both. Raises UserError as `save` does, for a name like that of a copy, and if nothing is tracked.
        """
        if not re.fullmatch(r"[A-Za-z][\w-]*", name) or name.startswith("step-") or not self.tracked.items:
            raise UserError(f"keep: it needs a word as name, and tracked objects, got {name!r}. Call job.track before.")
        self.save()
        self.run.wait()
        self.group.on_rank0(lambda: self.run.keep(name, self.position.step))
        self.enter_step()

    def end(self, why: str) -> None:
        """End the run for good, as an early stop does: no loop over `job.epochs`, `job.steps` or `job.batches` goes on,
        and a later start finds the run finished. The code after the loop runs. All ranks call this between two steps.

        Raises UserError if other ranks go on without this call, or give another reason, and inside `job.step`.
        """
        if self._step.inside or not why:
            raise UserError("end: it must have a reason, and come after the block of job.step. Move it out.")
        self.begin()
        calls = self.group.gather_apart(
            [self.position.step, why], call="end: job.end must be called",
            remedy="Decide alike on all ranks, from what job.log returns: it is equal on all of them.",
        )
        if any(call != calls[0] for call in calls):
            raise UserError(f"end: the step and the reason must be the same on all ranks, got {calls}.")
        with self.commit_lock:
            self.position.ended = why
        self.group.log.info(f"job.end ends the run after {self.position.step} steps: {why}")

    # The loop -------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs up to `count` - 1, starting with the epoch in which the run stands. Each epoch ends
        with a save, unless `save_every_steps` of `rankup.init` is set.

        If the copy was made after the last batch of an epoch, a resume repeats the code after the loop over batches,
        such as an evaluation. Raises Stopped, after a save, if the job was asked to stop, and Finished if an earlier
        start has finished the run and no epoch is left, unless `rankup.init` got `again`.
        """
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
                self.save()
        self.loop_is_over = True

    def steps(self, total: int) -> Iterator[int]:
        """Iterate over the steps of a run of `total` steps, from the first unfinished one. Yields the number of steps
        finished so far. Use it in a loop that has no epochs and no loader, or whose batches depend only on the step.

        The body enters `job.step` once per pass. Raises Stopped and Finished as `epochs` does.
        """
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
                before = step
                self.reseed()  # a resume does not repeat what the last pass drew after its step, as in an evaluation
                yield step
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
            if self._begun:
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
        self._begun, self.run.finished, self.group.status.begun = True, False, True
        self._same_names([])
        self._wrappers.warn_of_hooks()
        group, run, step = self.group, self.run, self.position.step
        commit = group.record.commit
        changed = ("basis" in commit or bool(self.saving.ranks)) and self.saving.note_ranks()
        self.saving.begin()
        run.begin(step, lambda: self.reporting.open(commit, changed=changed))
        run.newest = None  # frees the restored state, which every rank would otherwise keep in memory
        trained.watch_optimizers(self.tracked, group.log.warning)
        group.watch.protect(self.saving, timeout_s=self.settings.save_timeout_s)
        group.stop.finish_step_first = True
        self.agreement.begin(step)
        group.count_anew()
        self.reseed()
        self.enter_step()

    def enter_step(self) -> None:
        """Start the deadline of the next step."""
        group, timeout_s = self.group, self.settings.step_timeout_s
        if group.record.entered == ("step", timeout_s):  # the usual case, between two steps
            group.record.begin_anew(self.position.step)
        else:
            group.watch.enter("step", timeout_s, step=self.position.step)

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
        self.save(wait=True)
        return Stopped(self.saving.stopped())

    @contextlib.contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Wrap the backward pass of `loss` in this block if `job.track` gets no DDP module. Otherwise the time for
        which this rank waits for others in that pass counts as computation, and may make this rank look slow."""
        self.clock.split_backward(loss)
        yield
        self.clock.mark(WAITING)

    # Outside of steps -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str, timeout_s: float) -> Iterator[None]:
        """Set a deadline of `timeout_s` seconds for work outside a step, such as an evaluation or a download."""
        self.group.watch.enter(name, timeout_s, step=self.position.step)
        yield
        self.enter_step()

    def log(self, *, prefix: Any = "eval", **values: Any) -> dict[str, float]:
        """Reduce the results of an evaluation over all ranks, write them as `<prefix>/<name>` to `metrics.jsonl` and
        TensorBoard, and return them by name. All ranks call this at the same step.

        `values`: a number or scalar tensor is averaged over the ranks. Of a pair `(sum, count)` the sums and the counts
        are added up, and the result is their quotient, so that each sample weighs the same: `accuracy=(right, seen)`.
        It is NaN if all counts are 0. Raises UserError if other ranks go on without this call, if they log other names
        or at another step, for a value that is no number, or if the disk is full.
        """
        self.begin()
        reduced, position = self.reporting.reduced(values, prefix=prefix), self.position
        named = {f"{prefix}/{name}": value for name, value in reduced.items()}
        earlier = (position.metrics or {}) if position.evaluated == position.step else {}
        with contextlib.nullcontext() if self._step.inside else self.commit_lock:
            position.metrics, position.evaluated = earlier | named, position.step
        self.reporting.metrics.write(entry(position.step, named))
        return reduced

    def gather(self, value: Any) -> list[Any]:
        """Return the list of every rank's `value`, by rank. All ranks call this. A value consists of numbers, strings,
        tensors of any shape, and lists and dicts of these. Tensors arrive on the CPU."""
        return self.group.gather_tensors(value)

    def recompute(self, loss: Callable[[Any], torch.Tensor], batch: Any) -> None:
        """Compute the loss and gradients of rank 0's batch on all ranks, and compare their bits. If a rank differs, its
        machine computes wrongly, and PeerLost ends the attempt and names the rank. Call this on all ranks between two
        steps, every few hundred steps. It takes about as long as a step without its exchange of gradients.

        `loss(batch)` returns a scalar tensor. It gets rank 0's `batch` on the CPU: tensors in lists, tuples and dicts.
        It must give the same bits each time, and call the module inside DDP (`model.module`). For modules that FSDP2
        has split, ranks compare only the loss. Buffers and random state are restored. A single rank compares nothing.
        """
        self.agreement.recompute(loss, batch, step=self.position.step, split=self.tracked.split)

    def finish(self) -> None:
        """Save the last copy, and leave the group. All ranks call this, as the last line of a script.

        You may omit it if the loop over `job.epochs` or `job.steps` has ended: rankup then calls it when Python ends.
        """
        finished = self.finished  # by an earlier start, and nothing has continued it
        if not finished:
            self.begin()
            self.group.watch.end_steps()
            self.save(wait=True)
        self.group.watch.enter("end", self.settings.save_timeout_s, step=self.position.step)
        if self._exit_handler is not None:
            if not finished:  # the result shows a later start that the run has finished
                self.group.on_rank0(lambda: self.reporting.result() and None)
            done = f"finished, {self._done()}" if self.position.ended else f"finished after {self.step_number} steps"
            done += f": {self.run_dir}/; rankup status {self.run_dir}"
            self.group.log.info(self._no_step_left() if finished else done)
            self._exit_handler.close()
