"""`job = rankup.init(...)`: what a user's own loop needs to start anywhere and to lose nothing. See `loop.md`.

Where the run stands is its position: the number of finished steps, the epoch, and how many batches each loader gave.
`job.step` commits: what its block changed and the new position become the state, in one instant. A copy holds the state
and the position of the last commit, whenever it is made.
"""

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from rankup.agent.logs import line_head, setup_logging
from rankup.agent.processes import die_with_parent, finish
from rankup.agent.status import StatusFile, tell_end
from rankup.env.rank_env import read_rank_env
from rankup.errors import Stopped, UserError
from rankup.group.joining import join
from rankup.group.stop import StopRequest
from rankup.loop.batches import Source, evaluation_batches, source_of
from rankup.loop.commit import Changing
from rankup.loop.position import Live, Position
from rankup.loop.seeds import derive_seed, seed_everything
from rankup.loop.tracked import Tracked, fix_bucket_order
from rankup.observe.metrics import Metrics, entry
from rankup.state import rescue, tree
from rankup.state.copies import STATE, Content, to_json
from rankup.state.run import Options, open_run
from rankup.state.shards import INDEX, Shards

FORMAT = "job 1"  # of `state.json`; the copies of `train` have another
WITHOUT_EPOCHS = 1000  # steps between two saves where there is no job.epochs to save at the end of
LOADERS = "rankup_loaders"  # the states of loaders that can be asked for them, beside the tracked items
CHECKED_STEPS = 20  # a mistake in a loop is one of every step

log = logging.getLogger("rankup")


def init(
    run: str | PathLike[str] = "runs/default", *, seed: int = 0, device: str = "auto", fresh: bool = False,
    save_every_steps: int | None = None, keep: int = 2, log_every_steps: int = 10, tensorboard: bool = True,
    join_timeout_s: float = 300.0, setup_timeout_s: float = 1800.0, step_timeout_s: float = 600.0,
    save_timeout_s: float = 600.0,
) -> "Job":
    """Meet the other ranks, and own the run: process group, device, seeds, signals. Once a process, before the model.

    `run`: the folder of the run; the same call goes on from what it finds there. `seed`: of orders and random numbers;
    models are built equal on all ranks. `device`: "auto" takes the accelerator of this local rank, else the CPU.
    `fresh`: put aside what is in the folder, and begin anew. `save_every_steps`: None saves at each end of an epoch, or
    each 1,000 steps without `job.epochs`. `keep`: so many copies stay. `log_every_steps`: so often the values of
    `job.step` are written. The deadlines are in seconds; past one the stacks are written, and the process ends.

    Raises LaunchError where the environment describes no rank, JoinError where the ranks do not meet, and UserError
    where the run can't be gone on with.
    """
    given = {name: value for name, value in locals().items() if name not in ("run", "device")}
    return Job(Path(run), device, Settings(**given))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `init`."""

    seed: int
    fresh: bool
    save_every_steps: int | None
    keep: int
    log_every_steps: int
    tensorboard: bool
    join_timeout_s: float
    setup_timeout_s: float
    step_timeout_s: float
    save_timeout_s: float


class Job:
    """This rank's part of the run.

    `rank`, `local_rank`, `world_size`: who this is. `is_main`: rank 0. `device`: this rank's. `run_dir`: the folder.
    `epoch`: where `job.epochs` stands.
    """

    def __init__(self, run_dir: Path, device: str, settings: Settings) -> None:
        self.run_dir, self.settings = run_dir, settings
        self._stack = contextlib.ExitStack()
        self._take_over_ends()
        stop = StopRequest().install()
        stop.print_through(log)
        launch = read_rank_env(os.environ)
        self._head = line_head(launch.rank, launch.world_size)
        setup_logging(rank=launch.rank, world_size=launch.world_size)
        if launch.parent_pid:
            die_with_parent(launch.parent_pid)
        status = StatusFile(run_dir, launch)
        self._group = self._stack.enter_context(join(
            launch, settings={f"setting {name}": str(value) for name, value in dataclasses.asdict(settings).items()},
            timeout_s=settings.join_timeout_s, status=status, stop=stop, log=log,
            device=None if device == "auto" else device,
            longest_phase_s=max(settings.setup_timeout_s, settings.step_timeout_s, settings.save_timeout_s),
            needs_process_group=True,  # DistributedDataParallel needs one, even of one rank
        ))
        group = self._group
        self.rank, self.local_rank, self.world_size = launch.rank, launch.local_rank, launch.world_size
        self.is_main, self.device = launch.rank == 0, group.device
        sys.excepthook = self._on_error  # torch has put its own around ours, and keeps what that prints
        options = Options(
            sharded=True, fresh=settings.fresh, keep=settings.keep, setup_s=settings.setup_timeout_s,
            save_s=settings.save_timeout_s,
            start=launch.start, check=_check, fits=self._fits,
            wanted=lambda other: group.restarted,
        )
        self._run = self._stack.enter_context(open_run(
            run_dir, group, options, owned=lambda owner: status.claim(owner),
        ))
        self._run.saver.sharded = False  # until split state is tracked
        status.begun = True
        self._stop = stop
        self._tracked = Tracked()
        newest = self._run.newest
        self._position = Position.of(newest.record if newest is not None else None)
        self._changing = Changing(self._position, group.device)
        self._metrics = Metrics(None, self._position, saved=self._position, tensorboard=False)
        self._loader_states: list[Any] = []  # as of the last commit
        if newest is not None:
            self._loader_states = newest.tracked.get(LOADERS, {}).get(f"{self.rank} of {self.world_size}", [])
        self._live = Live(self._position, self._loader_states)
        self._sources: dict[int, tuple[Any, Source]] = {}  # by the id of the loader, which is kept alive
        self._begun = self._broken = False
        self._saved = self._position.key if newest is not None else None
        seed_everything(derive_seed(settings.seed), group.device)
        group.watch.enter("setup", settings.setup_timeout_s)

    @property
    def epoch(self) -> int:
        """Where `job.epochs` stands; 0 without it."""
        return self._live.epoch

    @property
    def step_number(self) -> int:
        """How many steps of the run are finished."""
        return self._position.step

    @property
    def weight(self) -> float:
        """What to multiply a mean loss of this rank's part of the batch with, so that the mean over the ranks is that
        of the global batch: 1.0 where all parts are equal."""
        self._live.weight_asked = True
        return self._live.weight

    # State ----------------------------------------------------------------------------------------------------

    def track(self, **items: Any) -> None:
        """Keep these in copies, and restore them where the run has a copy. All ranks call this, before the first step.

        An item is a module (bare, or inside DDP, DataParallel or torch.compile, or split by FSDP2), an optimizer, a
        scheduler, a GradScaler, anything with `state_dict` and `load_state_dict`, or a dict, a list or a tensor, which
        is filled in place. Several calls are allowed.

        Raises UserError, by its path, for a value that can't be kept, and where an item does not fit the copy, or is
        not the same on all ranks.
        """
        group = self._group
        if self._begun:
            raise UserError("track: it must be called before the first step, got a call after. Move it up.")
        self._tracked.add(items)
        if unfixed := fix_bucket_order(items):
            names = ", ".join(unfixed)
            group.log.info(f"track  a resume changes the last bits of {names}: its DDP settles the order of sums late")
        self._run.saver.sharded = self._tracked.split
        if (newest := self._run.newest) is not None:
            self._restore(newest, items)
        if self.world_size > 1 and not self._tracked.split:
            for name, digest in self._tracked.fingerprint().items():
                group.must_match(f"track: {name}", digest, remedy="Build it equally on all ranks, or leave it out.")
        self._seed()
        group.step = self.step_number

    def _restore(self, newest: Any, items: dict[str, Any]) -> None:
        """Raises UserError where the copy does not fit."""
        if newest.sharded and not self._tracked.split:
            newest = newest.as_plain()
        if newest.sharded:
            self._tracked.make_room()
            with Shards(self.run_dir / "checkpoints" / newest.path.name, newest.files[INDEX]) as shards:
                state = shards.read_into({**self._tracked.state()})
        else:
            state = newest.tracked
        if missing := items.keys() - state.keys():
            raise UserError(
                f"track: {', '.join(sorted(missing))} must be in {newest.path}, got {', '.join(sorted(state))} there. "
                "Set another run or fresh=True to begin anew."
            )
        self._tracked.load({name: state[name] for name in items})

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Guard a change of tracked state between epochs: `with job.change(): best["accuracy"] = accuracy`.

        After a resume the code after the last batch of an epoch runs again. What a block has changed before is not
        changed twice: its effect on tracked state is undone at its end. Raises UserError inside a loop over
        `job.batches`, whose code does not run again: change the state inside `job.step` there.
        """
        if self._live.active:
            raise UserError(
                "change: it must stand after the loop over job.batches, got one inside. Move the change into the block "
                "of job.step."
            )
        self._begin()
        again = self._live.changes_to_repeat > 0
        before = _copied(self._tracked.state()) if again else {}
        with self._changing:
            yield
            if again:
                self._live.changes_to_repeat -= 1
                self._tracked.load(before)
            else:
                self._position.changes += 1
                self._tracked.commit()

    def save(self, *, wait: bool = False) -> None:
        """Write a copy of the last commit, unless the newest one holds it. All ranks call this at the same step.

        It is written beside the training, unless `wait`. Raises UserError where the disk is full, and PeerLost where
        another attempt owns the run by now.
        """
        self._begin()
        position = self._position
        if self._tracked.items and position.key != self._saved:
            state = self._tracked.state()
            if any(each is not None for each in self._loader_states):
                by_rank = self.gather(self._loader_states)
                state[LOADERS] = {f"{rank} of {self.world_size}": states for rank, states in enumerate(by_rank)}
            self._run.save(
                position.step, self._record(position), state, may_go_on=not self._tracked.split,
                flush=self._metrics.flush, wait=wait,
            )
            self._saved = position.key
            self._enter_step()
        elif wait:
            self._run.settle()

    # The loop -------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """0 to `count` - 1, from the epoch on in which the run stands. Saves at the end of each, unless
        `save_every_steps` says otherwise.

        A copy that was made after the last batch of an epoch goes on behind that batch: what follows in the body, an
        evaluation for one, runs again.
        """
        self._begin()
        self._live.has_epochs = True
        while self.epoch < count:
            yield self.epoch
            self._stop_here()
            self._live.begin_epoch()
            if not self._live.fetched:  # else gradients of batches are waiting for a step, which are in no copy
                with self._changing:
                    self._commit()
            if self.settings.save_every_steps is None:
                self.save()
        self._over = True

    def batches(self, loader: Any, *, any_order: bool = False) -> "Batches":
        """The batches of `loader` that this rank trains on, from the next one on after a resume.

        A batch of a DataLoader is a global batch: each rank gets its part of it, see `weight`. A sampler that splits
        by itself (DistributedSampler) is left as it is. The order depends on seed and epoch alone. `any_order`: the
        order does not matter, so that `loader` is iterated from its beginning after a resume.

        Raises UserError, in one line, for a loader that can't be replayed (see `rankup.loop.batches`), and where ranks
        draw different orders. Raises Stopped where the job was asked to stop.
        """
        return Batches(self, loader, any_order=any_order)

    def eval_batches(self, loader: Any, *, pad: bool = False) -> Iterator[Any]:
        """The batches of an evaluation: each sample of `loader` once over all ranks, which take batches in turn.

        A rank may get one batch less than another. `pad`: it gets one all the same, with `job.weight` 0.0; for models
        whose forward pass waits for all ranks (FSDP2). Leaves the random state as it was.
        """
        for batch, weight in evaluation_batches(loader, self.settings.seed, self.rank, self.world_size, pad=pad):
            if self.world_size == 1:
                self._stop_here()
            self._live.weight = weight
            yield batch

    def step(self, **values: Any) -> "_Step":
        """`with job.step(loss=loss):` around all that makes a finished step of its gradients: the optimizer's step, the
        schedule's, the scaler's update, EMA. Only inside may tracked state change. All ranks enter it.

        `values`: scalars of this rank, for `metrics.jsonl` and TensorBoard as `train/<name>`: the mean over the ranks,
        each `log_every_steps` steps. Only then is the device waited for.

        At its end the step is finished; then a copy is saved where one is due, and random numbers are seeded from seed,
        step and rank. Raises Stopped where the job was asked to stop, after a save. A block that raises leaves no
        finished step, and the job can't go on.
        """
        return _Step(self, values)

    def _enter(self, values: dict[str, Any]) -> None:
        self._begin()
        if self._broken:
            raise RuntimeError("a block of job.step has raised: its step is half done. Let the error end the program.")
        self._tracked.check_unchanged()
        self._live.changes_to_repeat = 0
        self._group.watch.wait_for_others(True)
        self._tracked.share_buffers()
        self._group.watch.wait_for_others(False)
        line = self._line(values)
        self._changing.__enter__()
        self._live.line = line

    def _exit(self, kind: type[BaseException] | None) -> None:
        if kind is not None:
            self._broken = True
            return
        position, live = self._position, self._live
        position.step += 1
        new_line = live.line is not position.line
        position.line = live.line
        self._commit()
        self._changing.__exit__(None, None, None)
        self._after_step()
        self._group.step = position.step
        if new_line and position.line is not None:
            self._metrics.training(position.line)
        self._seed()
        self._run.look()
        every = self.settings.save_every_steps or (0 if live.has_epochs else WITHOUT_EPOCHS)
        if every and position.step % every == 0:
            self.save()
        self._enter_step()
        if not live.active:
            self._stop_here()

    def _commit(self) -> None:
        """What the loop has done is the state from now on. Inside `self._changing`."""
        position, live = self._position, self._live
        position.epoch, position.streams, position.changes = live.epoch, [*live.streams], 0
        self._loader_states = live.states()
        self._tracked.commit()

    def _after_step(self) -> None:
        live = self._live
        live.fetched, live.behind = 0, False
        live.steps += 1
        if live.weight != 1.0 and not live.weight_asked and not live.weight_said:
            live.weight_said = True
            self._group.log.info(
                f"batches  a batch does not divide among {self.world_size} ranks: multiply the loss by job.weight, or "
                "the gradients are not exactly those of the whole batch"
            )

    def _line(self, values: dict[str, Any]) -> dict[str, Any] | None:
        """The newest line of training once this step is finished, which all ranks know."""
        number = self._position.step + 1
        if not values or number % self.settings.log_every_steps:
            return self._position.line
        own = {name: _number(value) for name, value in values.items()}
        every = self._group.gather(own)
        means = {f"train/{name}": sum(each[name] for each in every) / len(every) for name in own}
        steps, seconds = self._live.steps + 1, time.monotonic() - self._first_step_s
        return entry(number, {**means, "train/steps_per_s": steps / seconds})

    def _begin(self) -> None:
        """Once, before the first step: from here on the run goes on."""
        if self._begun:
            return
        self._begun = True
        saved = self._run.saved
        saved_position = Position.of(saved)

        def open_files() -> None:
            self._metrics = Metrics(
                self.run_dir, self._position, saved=saved_position, tensorboard=self.settings.tensorboard,
                check_owner=self._run.check_owner,
            )

        if (newest := self._run.newest) is not None:
            if (left := {*newest.tracked} - {*self._tracked.items, LOADERS}) and self._tracked.items:
                raise UserError(
                    f"track: all items of {newest.path} must be tracked, got none for {', '.join(sorted(left))}. Track "
                    "them, or set another run or fresh=True to begin anew."
                )
            self._group.log.info(f"resumed from {self._run.origin.words}")
            before = newest.record["world_size"]
            if before != self.world_size:
                changed = f"  world size was {before}, is {self.world_size}"
                self._group.log.info(f"{changed}: the run goes on, but its last bits will differ")
        self._run.begin(self._position.step, open_files)
        self._stack.callback(lambda: self._metrics.close())
        self._run.forget()
        if self._tracked.items and not self._tracked.split:
            self._group.watch.protect(_Keeper(self), timeout_s=self.settings.save_timeout_s)
        self._stop.finish_step_first()
        self._first_step_s = time.monotonic()
        self._group.step = self._position.step
        self._seed()
        self._enter_step()

    def _enter_step(self) -> None:
        self._group.watch.enter("step", self.settings.step_timeout_s, step=self._position.step)

    def _seed(self) -> None:
        """A random state of each step's, rank's and batch's own: a resumed run needs none of the past."""
        seed = derive_seed(self.settings.seed, self._position.step, self.rank, self._live.fetched)
        seed_everything(seed, self.device)

    def _stop_here(self) -> None:
        """Raises Stopped, after a save, where all ranks stop before the next step."""
        if self._live.fetched or not self._group.stops_before(self._position.step):
            return
        self._group.watch.settle()
        self.save(wait=True)
        raise Stopped(self._stopped())

    def _stopped(self) -> str:
        why = self._stop.signal_name or "another rank's signal"
        if not self._tracked.items:
            return f"{why}: stopped at step {self._position.step}, nothing is tracked, so nothing was saved."
        return f"{why}: saved at step {self._position.step}. The same command goes on from it."

    # Beside the loop ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str, timeout_s: float) -> Iterator[None]:
        """A deadline of `timeout_s` seconds for what is no step: an evaluation, a download, a simulation."""
        self._group.watch.enter(name, timeout_s, step=self._position.step)
        yield
        self._enter_step()

    def log(self, **values: Any) -> None:
        """Write the outcome of an evaluation at this step: `eval/<name>` in `metrics.jsonl` and TensorBoard.

        `values`: numbers or scalar tensors; rank 0's are written. All ranks may call it. Raises UserError where the
        disk is full.
        """
        self._begin()
        position = self._position
        earlier = (position.metrics or {}) if position.evaluated == position.step else {}
        own = {name: _number(value) for name, value in values.items()}
        position.metrics, position.evaluated = earlier | own, position.step
        self._metrics.evaluation(position.step, own)

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in the order of the ranks: numbers, texts, tensors, and lists and dicts of these.
        Tensors arrive on the CPU. All ranks call this."""
        return [self._group.broadcast_tensors(value, source=rank) for rank in range(self.world_size)]

    def finish(self) -> None:
        """Save, and leave the group: the last line of a script. All ranks call this.

        A script may leave it out where `job.epochs` has come to its end: it is called when Python ends.
        """
        self._begin()
        self._group.watch.settle()
        self.save(wait=True)
        self._group.watch.enter("end", self.settings.save_timeout_s, step=self._position.step)
        self._stack.close()
        self._ended = True

    # The end --------------------------------------------------------------------------------------------------

    def _take_over_ends(self) -> None:
        """However the script ends, the other ranks hear why, and the process ends with the code of `rankup.errors`."""
        self._ended, self._over, self._head = False, False, ""
        pid, usual = os.getpid(), sys.excepthook

        def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() != pid or self._ended:
                usual(kind, error, trace)
                return
            if isinstance(error, NameError) and self._live.behind:
                log.warning(
                    f"The run had stopped behind the last batch of an epoch, so no batch has set {error.name} in this "
                    "process. Set it before the loop over batches."
                )
            self._leave(error)

        def at_exit() -> None:
            if os.getpid() != pid or self._ended:
                return
            try:
                if not self._over:
                    raise RuntimeError("the script ended without job.finish()")
                self.finish()
            except BaseException as error:
                self._leave(error)

        self._on_error: Any = on_error
        sys.excepthook = on_error
        atexit.register(at_exit)

    def _leave(self, error: BaseException) -> None:
        """End this process after `error`: by os._exit, because torch's own teardown may wait for a dead rank."""
        self._ended = True
        try:
            self._stack.__exit__(type(error), error, error.__traceback__)
        except BaseException as failure:  # the cause, where another rank is to blame
            error = failure
        finish(tell_end(error, self._head, log=log, advice=_advice))

    # Copies ---------------------------------------------------------------------------------------------------

    def _record(self, position: Position) -> bytes:
        """`state.json` of a copy."""
        group = self._group
        return to_json({
            "format": FORMAT, **dataclasses.asdict(position), "seed": self.settings.seed, "world_size": self.world_size,
            "torch": torch.__version__, "run": self._run.lineage.run, "attempt": self._run.mark,
            "written_by": f"rank {self.rank} on {group.hosts[self.rank]}",
        })

    def _fits(self, path: Path, record: dict[str, Any]) -> None:
        if record["seed"] != self.settings.seed:
            raise UserError(
                f"{path.parents[1]} was begun with other settings: seed was {record['seed']}, is {self.settings.seed}. "
                "Set it back to go on, or fresh=True to begin anew, or another run."
            )

    def _files(self, position: Position) -> dict[str, Content]:
        """The files of a copy of the last commit, at which `position` stands. Any thread."""
        with rescue.beside_a_blocked_stream(self.device):
            state = self._tracked.state()
            if any(each is not None for each in self._loader_states):  # other ranks skip by count
                state[LOADERS] = {f"{self.rank} of {self.world_size}": self._loader_states}
            nodes, tensors = tree.encode(state)
            if self.device.type == "cuda":  # else they are written as they lie: the training has stopped
                tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        if not self._changing.unchanged():
            raise RuntimeError("the weights changed while they were copied")
        return {STATE: self._record(position), **tree.files_of(nodes, tensors)}


def _check(path: Path, record: dict[str, Any], tracked: dict[str, Any] | None = None) -> None:
    """See `rankup.state.run.Options`."""
    if record.get("format") != FORMAT:
        raise UserError(
            f"checkpoint: {path} must be a copy of the format {FORMAT}, got {record.get('format')}. Set another run, "
            "or fresh=True to begin anew."
        )
    if not {*Position.names(), "seed", "world_size", "written_by"} <= record.keys():
        raise ValueError(f"{STATE}: a field is missing")


def _advice(text: str) -> str:
    from rankup.explain import advice  # it compiles the patterns of all known faults, a twentieth of a second

    return advice(text)


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """The same state in memory of its own."""
    nodes, tensors = tree.encode(state)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return dict(tree.decode(nodes, copies.__getitem__))


class Batches:
    """What `job.batches` returns: to be iterated once an epoch. `len()` is the number of batches of a whole epoch."""

    def __init__(self, job: Job, loader: Any, *, any_order: bool) -> None:
        self._job, self._loader = job, loader
        # The same for each epoch: a loader's workers may outlive it
        known = job._sources.get(id(loader))
        source = known[1] if known else source_of(loader, job.rank, job.world_size, any_order=any_order)
        job._sources[id(loader)] = (loader, source)
        self._source = source

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        job, live, group = self._job, self._job._live, self._job._group
        job._begin()
        if not live.active and not live.fetched and live.streams and not live.has_epochs:
            with job._changing:  # what follows the last batch of a pass has run
                job._commit()
        number, skip, state = live.open(self._source)
        streams = live.streams
        seed = derive_seed(job.settings.seed, live.epoch, number)
        pairs = self._source.open(seed, epoch=live.epoch, skip=skip, state=state)
        if order := self._source.fingerprint():
            group.must_match("batches: the order of the samples", order, remedy=(
                "A sampler must draw the same on all ranks, or split by itself as DistributedSampler does."
            ))
        live.active += 1
        try:
            while True:
                job._stop_here()
                with group.watch.clock.during("data"):
                    found = next(pairs, None)
                if found is None:
                    if skip and streams[number] == skip:
                        live.behind = True
                        group.log.info("resumed behind the last batch: the code after the loop over batches runs again")
                    return
                job._tracked.check_unchanged()
                batch, live.weight = found
                live.fetched += 1
                streams[number] += 1
                job._seed()
                yield batch
        finally:
            live.active -= 1


class _Step:
    """The block of `job.step`."""

    def __init__(self, job: Job, values: dict[str, Any]) -> None:
        self._job, self._values = job, values

    def __enter__(self) -> None:
        self._job._enter(self._values)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._job._exit(kind)


class _Keeper:
    """Saves the last commit when this process has to end. See `rankup.group.watchdog.Keeper`."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def keep(self) -> None:
        """Write it to this node's memory. The loop never goes on afterwards."""
        job = self.job
        position = job._changing.stop()
        if position is None:
            job._group.log.warning("no rescue: this rank was in the middle of changing the weights")
        else:
            position = copy(position)
            if job._run.rescue(position.step, lambda: job._files(position)):
                return
        job._run.saver.wait()  # what rank 0 may be writing is all that will be left

    def keep_for_stop(self) -> str:
        """The same where the job is to stop: rank 0 writes a copy, as it may go on on other machines."""
        job = self.job
        if not job.is_main:
            self.keep()
            return job._stopped()
        job._run.saver.wait()
        position = job._changing.stop()
        if position is None:
            return f"{job._stop.signal_name}: in the middle of changing the weights, so nothing newer was saved"
        position = copy(position)
        if position.step > max(0, job._run.saved_step):
            job._metrics.flush()
            job._run.saver.publish_files(position.step, job._files(position))
        return job._stopped()
