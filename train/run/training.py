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
from train.config import Config
from train.data.loader import Loader
from train.parallel.buffers import Buffers
from train.parallel.method import Method
from train.run import rescue
from train.run.advice import Advice
from train.run.metrics import Progress, Speed
from train.run.rank_reports import RankReports
from train.run.run_directory import RunDirectory
from train.run.training_state import TrainingState
from train.workloads import Workload


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
    saved: Progress  # where the run stood at its newest checkpoint
    saving: Progress | None = None  # and at the one that rank 0 writes beside the training, if there is one
    metrics: Metrics
    speed: Speed
    clock: StepClock
    reports: RankReports
    advice: Advice
    profiler: Profiler


def save(t: Training, *, wait: bool = False) -> None:
    """Write a checkpoint, unless the newest one holds this state already. All ranks call this at the same step.

    Where rank 0 writes it beside the training, `look_at_save` notices its end; with `wait` it is waited for here. At
    most one is under way: the next one waits for it.
    """
    config, group, progress = t.config, t.group, t.progress
    newest = t.saving or t.saved
    if (newest.step, newest.evaluated) != (progress.step, progress.evaluated):
        look_at_save(t, wait=True)
        group.watch.enter("save", config.save_timeout_s, step=progress.step)
        under_way = t.run.saver.save(
            progress.step, state_of(t, progress).to_file(), tracked(t, split=config.checkpoint_format == "sharded"),
            may_go_on=t.method.replicates_state, flush=t.metrics.flush, wait=wait,
        )
        t.saving = copy(progress)
        if not under_way:
            _note_saved(t)
    if wait:
        look_at_save(t, wait=True)
        if t.run.saver.copier is not None:
            t.run.saver.copier.wait()


def look_at_save(t: Training, *, wait: bool = False) -> None:
    """Notice whether the save beside the training has ended; with `wait`, wait for it. All ranks, at the same step.

    Raises UserError and PeerLost, on all ranks, where it has failed.
    """
    if t.saving is None:
        return
    if wait:
        t.group.watch.enter("save", t.config.save_timeout_s, step=t.progress.step)
    if t.run.saver.ended(wait=wait):
        _note_saved(t)


def _note_saved(t: Training) -> None:
    """The checkpoint stands on the disk, and all ranks know: rescues up to its step are needed no longer."""
    assert t.saving is not None
    t.saved, t.saving = t.saving, None
    rescue.remove(t.run.lineage.run, up_to=t.saved.step)
    if t.run.mirror is not None:
        t.run.mirror.copy(t.run.path / "checkpoints" / f"step-{t.saved.step:08d}")
    if t.group.is_rank0:
        t.group.log.debug(f"saved step {t.saved.step}")


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
        world_size=group.world_size, run=t.run.lineage.run, attempt=t.run.mark,
        written_by=f"rank {group.rank} on {group.hosts[group.rank]}",
    )
