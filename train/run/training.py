"""What the loop over the steps works with, and how it gets into a checkpoint. `train.run.resume` reads it back."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankup.errors import Stopped
from rankup.group.group import Group
from rankup.loop.commit import Changing
from rankup.observe.metrics import Metrics
from rankup.observe.profiler import Profiler
from rankup.observe.step_clock import StepClock
from rankup.state.copies import STATE, Content, list_copies, step_of
from rankup.state.rescue import beside_a_blocked_stream
from rankup.state.tree import encode, files_of

from ..config import Config
from ..data.loader import Loader
from ..parallel.buffers import Buffers
from ..parallel.method import Method
from ..workloads import Workload
from .advice import Advice
from .metrics import Progress, Speed
from .rank_reports import RankReports
from .run_directory import RunDirectory
from .training_state import TrainingState


@dataclass(slots=True, kw_only=True)
class Training:
    """Everything that the loop over the steps works with, on this rank."""

    config: Config
    group: Group
    method: Method
    run: RunDirectory
    workload: Workload
    plain: nn.Module  # the user's module, without wrappers: what is evaluated and saved
    model: nn.Module  # the same, wrapped for training with the other ranks
    whole: nn.Module  # `plain`, or where it is split a copy for the final pictures that gets its weights in the end
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loader: Loader
    divisors: list[float]  # of the losses of a step's micro-batches, see `Order`
    steps_per_epoch: int
    total_steps: int
    buffers: Buffers
    progress: Progress
    changing: Changing[Progress]  # held while a step is finished, or an evaluation
    saved: Progress  # where the run stood at its newest checkpoint, or at the one that is being written
    metrics: Metrics
    speed: Speed
    clock: StepClock
    reports: RankReports
    advice: Advice
    profiler: Profiler


def save(t: Training, *, wait: bool = False) -> None:
    """Write a checkpoint, unless the newest one holds this state already. All ranks call this at the same step."""
    progress, kept = t.progress, t.run.kept
    if (t.saved.step, t.saved.evaluated) != (progress.step, progress.evaluated):
        split = t.config.checkpoint_format == "sharded"
        kept.look(wait=True)  # before the state is put together
        kept.save(
            progress.step, state_of(t, progress).to_file(), tracked(t, split=split),
            may_go_on=t.method.replicates_state or split, flush=t.metrics.flush, wait=wait,
        )
        t.saved = copy(progress)
    elif wait:
        kept.settle()


def save_and_stop(t: Training) -> Stopped:
    """Save, and return what to raise. All ranks come here at the same step."""
    t.group.watch.settle()
    save(t, wait=True)
    t.profiler.end()
    return Stopped(stopped_at(t, t.progress.step))


def stopped_at(t: Training, step: int) -> str:
    """What to say of a run that was stopped at `step`, whose state is saved."""
    reason = t.group.stop.signal_name or "another rank's signal"
    where = f"saved at step {step}" if step else "at step 0, nothing to save,"
    again = f"The same command{' without --fresh' if t.config.fresh else ''} goes on from it."
    return f"{reason}: {where} of {t.total_steps}. {again}"


def tracked(t: Training, *, split: bool = False) -> dict[str, Any]:
    """What a checkpoint keeps, by item. The tensors are those of the training itself, or whole on rank 0; with `split`
    they are as each rank holds them. All ranks call this where the method splits the state."""
    if split:
        state = t.method.local_state(t.plain, t.optimizer)
    else:
        model, optimizer = t.method.full_state_dict(t.plain), t.method.optimizer_state(t.plain, t.optimizer)
        state = {"model": model, "optimizer": optimizer}
    return {**state, "scaler": t.scaler.state_dict()}


def state_of(t: Training, progress: Progress) -> TrainingState:
    """What is said of the step at which `progress` stands."""
    group = t.group
    return TrainingState(
        step=progress.step, evaluated=progress.evaluated, metrics=progress.metrics, line=progress.line,
        steps_per_epoch=t.steps_per_epoch, data=t.workload.data_name, config=t.config.model_dump(),
        world_size=group.world_size, run=t.run.kept.lineage.run, attempt=t.run.kept.mark,
        written_by=f"rank {group.rank} on {group.hosts[group.rank]}",
    )


class Rescuer:
    """Saves what only this rank has, before its process ends. See `rankup.group.watchdog.Keeper`."""

    def __init__(self, t: Training) -> None:
        self.t = t

    def keep(self) -> None:
        """Write the state of the last finished step to this node's memory. The loop never goes on afterwards.

        Where that can't be, the checkpoint that rank 0 may be writing is all that will be left: it gets done first.
        """
        t, progress = self.t, None
        if t.method.every_rank_has_all and t.progress.step > max(0, t.run.kept.saved_step):
            progress = t.changing.stop()
            if progress is None:
                t.group.log.warning("no rescue: this rank was in the middle of changing the weights")
        if progress is None or not t.run.kept.rescue(progress.step, lambda: self._copy(copy(progress))):
            t.run.kept.saver.wait()

    def keep_for_stop(self) -> str:
        """Write the state of the last finished step, on rank 0 as a checkpoint: the job may go on on other machines."""
        t = self.t
        if not t.method.every_rank_has_all:
            return ""
        if not t.group.is_rank0:
            self.keep()
            return stopped_at(t, t.progress.step)
        saver = t.run.kept.saver
        saver.wait()
        progress = t.changing.stop()
        if progress is None:
            return f"{t.group.stop.signal_name}: in the middle of changing the weights, so nothing newer was saved"
        progress = copy(progress)
        newest = list_copies(saver.folder)
        if progress.step > (step_of(newest[-1]) if newest else 0):
            t.metrics.flush()
            saver.publish_files(progress.step, self._copy(progress))
        return stopped_at(t, progress.step)

    def _copy(self, progress: Progress) -> dict[str, Content]:
        """The files of a checkpoint of the last finished step, at which `progress` stands."""
        t = self.t
        with beside_a_blocked_stream(t.group.device):
            state = tracked(t)
            state["model"] |= {name: b for name, b in t.buffers.kept().items() if name in state["model"]}
            nodes, tensors = encode(state)
            if t.group.device.type == "cuda":  # else they are written as they lie: the training has stopped
                tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        if not t.changing.unchanged():
            raise RuntimeError("the weights changed while they were copied")
        return {STATE: state_of(t, progress).to_file(), **files_of(nodes, tensors)}
