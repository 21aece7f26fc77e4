"""`Job`, the interface for a loop: tracked state, steps, batches, copies, the stop. `rankup.init` makes one."""

import contextlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from rankup.errors import Stopped, UserError
from rankup.group.group import Group
from rankup.loop.agreement import Agreement
from rankup.loop.batches import Batches, at_stop_iteration, evaluation_batches, source_of
from rankup.loop.record import Figures, Live, Settings, number_of
from rankup.loop.saving import Saving
from rankup.loop.step import Step
from rankup.loop.tracked import Tracked, fix_bucket_order
from rankup.observe.metrics import Position, evaluation
from rankup.observe.stragglers import WAITING
from rankup.seeds import derive_seed, seed_everything
from rankup.state.run import Run


class Job:
    """The job as this rank sees it. `rankup.init` returns it.

    `rank`, `local_rank`, `world_size`: who this is. `is_main`: rank 0. `device`: this rank's. `run_dir`: the folder.
    `epoch`: where `job.epochs` stands. `program.md` has what only a program needs.
    """

    def __init__(self, group: Group, run: Run, settings: Settings) -> None:
        self.group, self.run, self.settings = group, run, settings
        self.run_dir, self.device, self.is_main = group.run_dir, group.device, group.is_rank0
        self.rank, self.local_rank, self.world_size = group.rank, group.launch.local_rank, group.world_size
        self.position = position = Position.of(run.newest.record if run.newest is not None else None)
        self.tracked = Tracked(share_all=settings.share_all and group.world_size > 1)
        self.agreement = Agreement(group, run, self.tracked.items, every=settings.compare_every_steps)
        self.figures = Figures(group, run, settings, position)
        self.saving = Saving(group, run, self.tracked, self.figures, self.agreement, settings, position)
        self.course, self.clock, self.commit_lock = self.figures.course, self.figures.clock, self.saving.commit_lock
        self.live = Live(position, self.saving.loader_states)
        self.loop_is_over = False
        self._ends: Any = None  # the `Ends` of a script, see `rankup.job`
        self._batches: dict[int, Batches] = {}  # by the id of the loader, of this epoch and the one before
        self._begun = False
        self._step = Step(self)

    @property
    def epoch(self) -> int:
        """Where `job.epochs` stands; 0 without it."""
        return self.live.epoch

    @property
    def step_number(self) -> int:
        """How many steps of the run are finished."""
        return self.position.step

    @property
    def weight(self) -> float:
        """The factor for a mean loss of this rank's part of the batch, so that the mean over the ranks is the mean over
        the global batch: 1.0 if all parts are equal. It belongs to the newest batch. In a loop that reads several
        loaders together, the iterator that `batches` returned for each has a `weight` of its own."""
        self.live.weight_asked = True
        return self.live.weight

    # State ----------------------------------------------------------------------------------------------------

    def track(self, **items: Any) -> None:
        """Keep these in copies, and restore them where the run has a copy. All ranks call this, before the first step.

        An item is a module (bare, or inside DDP, DataParallel or torch.compile, or split by FSDP2), an optimizer, a
        scheduler, a GradScaler, anything with `state_dict` and `load_state_dict`, or a dict, a list or a tensor, which
        is filled in place. Several calls are allowed.

        Raises UserError, with the path, for a value that a copy can't hold, and for an item that does not fit the copy
        or differs between ranks.
        """
        group, run, tracked = self.group, self.run, self.tracked
        if self._begun:
            raise UserError("track: it must be called before the first step, got a call after. Move it up.")
        tracked.add(items)
        if unfixed := fix_bucket_order(items):
            names = ", ".join(unfixed)
            group.log.info(f"track  a resume changes the last bits of {names}: its DDP settles the order of sums late")
        for item in items.values():
            if isinstance(getattr(item, "_orig_mod", item), DistributedDataParallel):  # also in torch.compile
                self.clock.watch(item)
        sharded = tracked.split and self.settings.sharded
        if sharded and not run.parts.wanted:
            run.check_shared()
        run.saver.sharded, run.parts.wanted = sharded, tracked.split
        if run.newest is not None:
            self.saving.restore(run.newest, [*items])
        if self.world_size > 1:
            tracked.share_buffers()
            if not tracked.split and run.newest is None:  # else all have restored the same
                for name, digest in tracked.fingerprint().items():
                    group.must_match(f"track: {name}", digest, remedy="Build it equally on all ranks, or leave it out.")
        self.draw_anew()
        group.record.begin(self.step_number)

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Guard a change of tracked state between epochs: `with job.change(): best["accuracy"] = accuracy`.

        After a resume the code outside the loops over batches runs again. If a block took effect before, its changes
        to tracked state are undone at its end, so that no change counts twice. Raises UserError inside a loop over
        `job.batches` or `job.steps`, whose code does not run again: change the state inside `job.step` there.
        """
        live = self.live
        if live.running or self._step.inside or at_stop_iteration():
            raise UserError(
                "change: it must stand after the loop over job.batches, got one inside, in `except StopIteration`, or "
                "after one that has batches left. Move the change into the block of job.step, or use that loader up."
            )
        self.begin()
        self.tracked.check_unchanged(after_epoch=True)  # else the block's commit would hide a change before it
        again = live.changes_to_repeat > 0
        before = deepcopy(self.tracked.state()) if again else {}
        with self.commit_lock:
            self._step.inside = True
            yield
            if again:
                live.changes_to_repeat -= 1
                self.tracked.load(before)
            else:
                self.position.changes += 1
                self.tracked.commit()
        self._step.inside = False

    def save(self, *, wait: bool = False) -> None:
        """Write a copy of the last commit, unless the newest one holds it. All ranks call this at the same step.

        A thread writes it while the training continues, unless `wait`. Raises UserError if the disk is full, and
        PeerLost if another attempt owns the run by now.
        """
        if self._step.inside:  # what has changed there belongs to no step as yet
            raise UserError("save: it must stand outside job.step and job.change, got a call inside. Move it behind.")
        self.begin()
        if self.saving.save(wait=wait):
            self.enter_step()

    # The loop -------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs 0 to `count` - 1, from the run's current epoch on. Saves at the end of each, unless
        `save_every_steps` says otherwise.

        A resume from a copy that was made after the last batch of an epoch runs the rest of the body again, such as an
        evaluation.
        """
        self.begin()
        self.live.has_epochs = True
        while self.epoch < count:
            yield self.epoch
            self.stop_here()
            # A loader that each epoch builds anew would stay alive, and its lasting workers with it
            self._batches = {key: each for key, each in self._batches.items() if each in self.live.begun}
            self.live.begin_epoch()
            if not self.live.fetched:  # else gradients of batches are waiting for a step, which are in no copy
                self.tracked.check_unchanged(after_epoch=True)
                with self.commit_lock:
                    self.commit()
            if self.settings.save_every_steps is None:
                self.save()
        self.loop_is_over = True

    def steps(self, total: int) -> Iterator[int]:
        """The number of finished steps before each step of a run of `total`, from where the run stands: for a loop that
        has neither epochs nor a loader, or whose batches depend on the step alone.

        The body enters `job.step` once in each pass. Raises Stopped, after a save, if the job was asked to stop.
        """
        self.begin()
        self.course.total = total
        self.live.running.append("steps")
        try:
            before = -1
            while (step := self.step_number) < total:
                self.stop_here()
                if step == before:  # a body that has no job.step would go on for ever
                    self.tracked.check_unchanged()
                before = step
                yield step
        finally:
            self.live.running.remove("steps")
        self.loop_is_over = True

    def batches(self, loader: Any, *, any_order: bool = False) -> Batches:
        """The batches of `loader` that this rank trains on. After a resume they begin with the next one.

        A batch of a DataLoader is a global batch: each rank gets its part of it, see `weight`. A sampler that splits by
        itself (DistributedSampler) stays as it is. The order depends on seed and epoch alone. `any_order`: the order
        does not matter, so after a resume `loader` starts from its beginning.

        Raises UserError for a loader that can't be replayed (see `rankup.loop.batches`), and if ranks draw different
        orders. Raises Stopped if the job was asked to stop.
        """
        if id(loader) not in self._batches:
            source = source_of(loader, self.rank, self.world_size, any_order=any_order)
            if source.tells and not source.in_process:
                self.group.log.info(
                    "batches  a resume changes the random numbers that this loader's workers draw, unless its state "
                    "has them: keep a generator in the state of the data set"
                )
            self._batches[id(loader)] = Batches(self, source)  # which keeps the loader alive
        return self._batches[id(loader)]

    def eval_batches(self, loader: Any, *, pad: bool = False) -> Iterator[Any]:
        """The batches of an evaluation: each sample of `loader` once over all ranks, which take batches in turn.

        A rank may get one batch less than another. With `pad` it gets one more, with `job.weight` 0.0; models whose
        forward pass waits for all ranks (FSDP2) need that. Leaves the random state as it was. Raises Stopped if the job
        was asked to stop; with several ranks only if `pad`.
        """
        for batch, weight in evaluation_batches(loader, self.settings.seed, self.rank, self.world_size, pad=pad):
            if self.world_size == 1:
                self.stop_here()
            elif pad and self.group.max(int(self.group.stop.requested)):
                raise self.stopped()
            self.live.weight = weight
            yield batch

    def step(self, **values: Any) -> Step:
        """`with job.step(loss=loss):` goes around everything that turns gradients into a finished step:
        `optimizer.step()`, `scheduler.step()`, the scaler's update, EMA. Tracked state may change only inside. All
        ranks enter it.

        `values`: scalars of this rank. Every `log_every_steps` steps their mean over the ranks goes to `metrics.jsonl`
        and TensorBoard as `train/<name>`. Only then do the ranks exchange them. All ranks give the same names. With
        several ranks each block first waits for the GPU: the state on the host and the weights have to be of one step.

        At the end of the block the step is finished. Then rankup saves a copy if one is due, and seeds the random
        numbers from seed, step and rank. Raises Stopped, after a save, if the job was asked to stop. If the block
        raises, the step is not finished and the job can't continue.
        """
        self._step.values = values
        return self._step

    def commit(self) -> None:
        """What the loop has done is the state from now on. Inside `self.commit_lock`."""
        position, live = self.position, self.live
        if live.epoch != position.epoch:
            position.changes = 0
        live.changes_to_repeat = 0  # all that comes before this has run again
        position.epoch, position.streams, position.loaders = live.epoch, [*live.streams], [*live.loaders]
        self.saving.loader_states = live.loader_states()
        self.tracked.commit()

    def begin(self) -> None:
        """Once, before the first step: from here on the run goes on. All ranks call this."""
        if self._begun:
            return
        self._begun = True
        group, run, step = self.group, self.run, self.position.step
        commit = (group.launch.agent or {}).get("commit", {})
        changed = ("basis" in commit or bool(self.saving.ranks)) and self.saving.note_ranks()
        self.saving.begin()
        run.begin(step, lambda: self.figures.open(commit, changed=changed))
        run.newest = None  # its copy of the state would stay in the memory of every rank
        if self.tracked.items:
            self.tracked.warn_of_others(group.log.warning)
        group.watch.protect(self.saving, timeout_s=self.settings.save_timeout_s)
        group.stop.finish_step_first = True
        self.agreement.begin(step)
        self.draw_anew()
        self.enter_step()

    def enter_step(self) -> None:
        """The deadline of the next step begins."""
        group, timeout_s = self.group, self.settings.step_timeout_s
        if group.record.entered == ("step", timeout_s):  # as between two steps
            group.record.begin_anew(self.position.step)
        else:
            group.watch.enter("step", timeout_s, step=self.position.step)

    def draw_anew(self) -> None:
        """A random state of the step's, the newest batch's and the rank's own: a resumed run needs none of the past."""
        seed = derive_seed(self.settings.seed, self.position.step, self.rank)
        seed_everything(seed + self.live.fetched, self.device)

    def stop_here(self) -> None:
        """Raises Stopped, after a save, where all ranks stop before the next step."""
        if not self.live.fetched and self.group.stops_before(self.position.step):
            raise self.stopped()

    def stopped(self) -> Stopped:
        """Save, and return what to raise. All ranks come here at the same step."""
        self.group.watch.settle()
        self.save(wait=True)
        return Stopped(self.saving.stopped())

    @contextlib.contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Wrap the backward pass of `loss` in this if `job.track` finds no DDP module. Otherwise rankup takes a rank
        that waits there for the others for a slow one."""
        self.group.record.waiting = True
        self.clock.split_backward(loss)
        yield
        self.group.record.waiting = False
        self.clock.mark(WAITING)

    # Beside the loop ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str, timeout_s: float) -> Iterator[None]:
        """A deadline of `timeout_s` seconds for work outside a step: an evaluation, a download, a simulation."""
        self.group.watch.enter(name, timeout_s, step=self.position.step)
        yield
        self.enter_step()

    def log(self, **values: Any) -> None:
        """Write the result of an evaluation at this step: `eval/<name>` in `metrics.jsonl` and TensorBoard.

        `values`: numbers or scalar tensors. Rank 0 writes its own; all ranks may call this. Raises UserError if the
        disk is full.
        """
        self.begin()
        position = self.position
        earlier = (position.metrics or {}) if position.evaluated == position.step else {}
        own = {name: number_of(value) for name, value in values.items()}
        with contextlib.nullcontext() if self._step.inside else self.commit_lock:
            position.metrics, position.evaluated = earlier | own, position.step
        self.figures.metrics.write(evaluation(position.step, own))

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in the order of the ranks: numbers, texts, tensors, and lists and dicts of these.
        Tensors arrive on the CPU. All ranks call this."""
        return [self.group.broadcast_tensors(value, source=rank) for rank in range(self.world_size)]

    def recompute(self, loss: Callable[[Any], torch.Tensor], batch: Any) -> None:
        """Let all ranks compute the loss and the gradients of rank 0's batch, and compare their bits. If a rank
        differs, it computes wrongly, and the attempt ends with its name. Call it every few hundred steps, between two
        steps, on all ranks. It takes about as long as a step without its exchange.

        `loss(batch)` returns a scalar. It gets rank 0's `batch` on the CPU: tensors in lists, tuples and dicts. It must
        give the same bits each time, and call the module without DDP around it (`model.module`). Ranks compare only the
        loss of modules that FSDP2 has split. Buffers and random numbers are the same afterwards. With one rank there is
        nothing to compare.
        """
        self.agreement.recompute(loss, batch, step=self.position.step, split=self.tracked.split)

    def finish(self) -> None:
        """Save, and leave the group: the last line of a script. All ranks call this.

        A script may leave it out if `job.epochs` or `job.steps` has come to its end: then it runs when Python ends.
        """
        self.begin()
        self.group.watch.settle()
        self.save(wait=True)
        self.group.watch.enter("end", self.settings.save_timeout_s, step=self.position.step)
        if self._ends is not None:
            if self.is_main:
                self.group.log.info(
                    f"finished after {self.step_number} steps: {self.run_dir}/; rankup status {self.run_dir}"
                )
            self._ends.close()
