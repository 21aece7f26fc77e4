"""`Job`, the interface for your loop: tracked state, copies, reports, the end. `rankup.init` returns one."""

import contextlib
import re
from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rankup.errors import UserError
from rankup.loop.arguments import seconds, switch
from rankup.loop.filling import copied
from rankup.loop.reporting import pairs_of
from rankup.loop.saving import FROZEN
from rankup.loop.training_loop import TrainingLoop
from rankup.loop.weights import start_from
from rankup.observe.metrics import entry
from rankup.observe.stragglers import WAITING

SENT = (type(None), bool, int, float, complex, str, bytes, set)  # besides tensors, what torch loads without pickle


class Job(TrainingLoop):
    """The training job, as this rank sees it. `rankup.init` returns it.

    `rank`, `local_rank`, `world_size`: this rank's numbers. `is_main`: whether this is rank 0. `device`: this rank's
    torch.device. `run_dir`: the run's folder, a Path. `program.md` describes what only a program with settings needs.
    """

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End the run: `finish` it, or in a notebook end it because of `error`. A script's error ends the process."""
        handler = self._exit_handler
        if error is None and handler.job is self:
            self.finish()
        elif handler.interactive and handler.job is self and (end := handler.leave(error)) is not error:
            self.group.log.warning(str(end))

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
        if not (isinstance(place, str | PathLike) and isinstance(module, nn.Module)):
            kinds = f"{type(place).__name__} and {type(module).__name__}"
            raise UserError(f"start_from: it must have a path or address and then a module, got {kinds}.")
        if self.tracked.items:
            raise UserError("start_from: it must be called before job.track, got a later call. Move the call up.")
        if self.run.newest is None or FROZEN in self.run.newest.files.items:
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
        if self._begun or self._closed:
            raise UserError("track: it must be called before the first step, got a later call. Move the call up.")
        for option, value, known in (("missing", missing, ("error", "keep")), ("only", only, ("all", "trained"))):
            if value not in known:
                raise UserError(f'track: {option} must be "{known[1]}" or "{known[0]}", got {value!r:.80}.')
        items = dict(sorted(items.items()))  # ranks that call this with another order do the same in the same order
        self._same_names([*items])
        if run.newest is not None:
            self.undo_options()  # such as those that the constructor of a scheduler sets in a restored optimizer
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
        Raises UserError inside `job.step`, if other ranks go on without this call or if the disk is full, and PeerLost
        if another attempt has taken the run.
        """
        switch("save: wait", wait)
        if self._step.inside:  # changes inside the block belong to no finished step yet
            raise UserError("save: it must be called outside job.step and job.change, got a call inside. Move it out.")
        self.begin()
        self._together("save", "wait" if wait else "")
        self.save_copy(wait=wait)

    def keep(self, name: str) -> None:
        """Save a copy of the last commit, unless the newest copy already has it, and keep that copy under `name` until
        this call gives the name to another one. It does not count for `keep` of `rankup.init`. `rankup export RUN FILE
        --checkpoint NAME` reads it. Returns once the copy is complete. All ranks call this at the same step.

        Call it before `job.change` notes that this is the best state: if the process is killed in between, a resumed
        run repeats both. Raises UserError as `save` does, for a name like that of a copy, and if nothing is tracked.
        """
        fits = isinstance(name, str) and re.fullmatch(r"(?!step-)[A-Za-z][\w-]*", name)
        if not fits or not self.tracked.items:
            raise UserError(f"keep: it needs a word as name, and tracked objects, got {name!r}. Call job.track before.")
        if self._step.inside:
            raise UserError("keep: it must be called outside job.step and job.change, got a call inside. Move it out.")
        self.begin()
        self._say_if_behind("keep")
        self._together("keep", name)
        self.save_copy()
        self.run.wait()
        self.group.on_rank0(lambda: self.run.keep(name, self.position.step))
        self.enter_step()

    def end(self, why: str) -> None:
        """End the run for good, as an early stop does: no loop over `job.epochs`, `job.steps` or `job.batches` goes on,
        and a later start finds the run finished. The code after the loop runs. All ranks call this between two steps.

        Raises UserError if other ranks go on without this call, or give another reason, and inside `job.step`.
        """
        if not isinstance(why, str) or not why:
            raise UserError(f"end: the reason must be a text, got {why!r:.80}.")
        if self._step.inside:
            raise UserError("end: it must come after the block of job.step, got a call inside. Move it out.")
        self.begin()
        self._say_if_behind("end")
        self._together("end", why)
        with self.commit_lock:
            self.position.ended = why
        self.group.log.info(f"job.end ends the run after {self.position.step} steps: {why}")

    def _together(self, call: str, said: str) -> None:
        """Raise UserError if other ranks go on without this call of the user's program, or call it otherwise."""
        self.must_be_open()
        calls = self.group.gather_apart(
            [self.position.step, said], call=f"{call}: job.{call} must be called", remedy="Call it on all ranks, not "
            "below `if job.is_main`, and decide alike, from what job.log returns: it is equal on all of them.",
        )
        if any(each != calls[0] for each in calls):
            raise UserError(f"{call}: the step and the argument must be the same on all ranks, got {calls}.")

    def _say_if_behind(self, call: str) -> None:
        """Warn once of a call in the body of a loop after the body's step."""
        loop = self.loop
        behind = loop.running and self.position.step > loop.began_at and not self._step.inside
        if behind and self.is_main and not self.repeats_calls:
            self.repeats_calls = True  # say it once
            self.group.log.warning(
                f"{call}: job.{call} comes after job.step in the body of the loop. If a rank is killed in between, "
                "a resume begins with the next batch, and this call is lost. Call it above the forward pass, or after "
                "the loop"
            )

    @contextlib.contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Wrap the backward pass of `loss` in this block if `job.track` gets no DDP module. Otherwise the time for
        which this rank waits for others in that pass counts as computation, and may make this rank look slow."""
        if not isinstance(loss, torch.Tensor):
            raise UserError(f"backward: the loss must be a tensor, got {loss!r:.80}.")
        self.clock.split_backward(loss)
        yield
        self.clock.mark(WAITING)

    # Outside of steps -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str, timeout_s: float) -> Iterator[None]:
        """Set a deadline of `timeout_s` seconds for work outside a step, such as an evaluation or a download. 0 sets
        none."""
        if not isinstance(name, str) or not name:
            raise UserError(f"phase: the name must be a text, got {name!r:.80}.")
        seconds(f"phase: the deadline of {name}", timeout_s)
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
        self._say_if_behind("log")
        reduced, position = self.reporting.reduced(values, prefix=prefix), self.position
        named = {f"{prefix}/{name}": value for name, value in reduced.items()}
        earlier = (position.metrics or {}) if position.evaluated == position.step else {}
        with contextlib.nullcontext() if self._step.inside else self.commit_lock:
            position.metrics, position.evaluated = earlier | named, position.step
        self.reporting.metrics.write(entry(position.step, named))
        return reduced

    def evaluate(
        self, loader: Any, function: Callable[[Any], dict[str, Any]], *, prefix: Any = "eval", pad: bool = False
    ) -> dict[str, float]:
        """Call `function` with each batch of `loader`, `log` what it returned in all, and return the quotients by name.
        The ranks take batches in turn, so that each sample counts once. All ranks call this at the same step.

        `function` returns for each name a pair `(sum, count)` over its batch: `{"accuracy": (right, len(labels))}`. It
        runs without gradients, and with the tracked modules in evaluation mode, which get their own modes back. `pad`
        is for FSDP2, see `eval_batches`. Raises UserError as `log` does, and for a value that is no pair.
        """
        if not callable(function):
            raise UserError(f"evaluate: after the loader there must be a function of a batch, got {function!r:.80}.")
        self._together("evaluate", str(prefix))
        tracked = [item for item in self.tracked.items.values() if isinstance(item, nn.Module)]
        modes = [(module, module.training) for item in tracked for module in item.modules()]
        sums: dict[str, list[float]] = {}
        try:
            for item in tracked:
                item.eval()
            with torch.no_grad():
                for batch in self.eval_batches(loader, pad=pad):
                    for name, pair in pairs_of(function(batch)).items():
                        if self.loop.weight:  # otherwise the batch only keeps this rank in step
                            sums[name] = [a + b for a, b in zip(sums.get(name, (0.0, 0.0)), pair, strict=True)]
        finally:
            for module, mode in modes:
                module.training = mode
        names = dict.fromkeys(name for each in self.group.gather([*sums]) for name in each)  # a rank may get no batch
        return self.log(prefix=prefix, **{name: tuple(sums.get(name, (0.0, 0.0))) for name in names})

    def gather(self, value: Any) -> list[Any]:
        """Return the list of every rank's `value`, by rank. All ranks call this. A value consists of numbers, strings,
        tensors of any shape, and lists and dicts of these. Tensors arrive on the CPU."""
        for each in tree_leaves(value):
            if not (isinstance(each, torch.Tensor) or type(each) in SENT):
                raise UserError(
                    "gather: a value must consist of numbers, texts, tensors, and lists and dicts of these, got "
                    f"{type(each).__module__}.{type(each).__qualname__}. Convert it, as by torch.as_tensor."
                )
        self._together("gather", "")
        return self.group.gather_tensors(value)

    def recompute(self, loss: Callable[[Any], torch.Tensor], batch: Any) -> None:
        """Compute the loss and gradients of rank 0's batch on all ranks, and compare their bits. If a rank differs, its
        machine computes wrongly, and PeerLost ends the attempt and names the rank. Call this on all ranks between two
        steps, every few hundred steps. It takes about as long as a step without its exchange of gradients.

        `loss(batch)` returns a scalar tensor. It gets rank 0's `batch` on the CPU: tensors in lists, tuples and dicts.
        It must give the same bits each time, and call the module inside DDP (`model.module`). For modules that FSDP2
        has split, ranks compare only the loss. Buffers and random state are restored. A single rank compares nothing.
        """
        if not callable(loss):
            raise UserError(f"recompute: it must have a function that returns the loss, got {loss!r:.80}.")
        self.must_be_open()
        self.agreement.recompute(loss, batch, step=self.position.step, split=self.tracked.split)

    def finish(self) -> None:
        """Save the last copy, and leave the group. All ranks call this, as the last line of a script.

        You may omit it if the loop over `job.epochs` or `job.steps` has ended: rankup then calls it when Python ends.
        """
        if self._closed:
            return
        finished = self.finished  # by an earlier start, and nothing has continued it
        if not finished:
            self.begin()
            self.group.watch.end_steps()
            self._together("finish", "")
            self.save_copy(wait=True)
        self.group.watch.enter("end", self.settings.save_timeout_s, step=self.position.step)
        if self._exit_handler is not None:
            if not finished:  # the result shows a later start that the run has finished
                self.group.on_rank0(lambda: self.reporting.result() and None)
            done = f"finished, {self._done()}" if self.position.ended else f"finished after {self.step_number} steps"
            done += f": {self.run_dir}/; rankup status {self.run_dir}"
            self.group.log.info(self._no_step_left() if finished else done)
            self._exit_handler.close()
