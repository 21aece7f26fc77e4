"""`Training`, which holds what the loop works with. The lines that a run logs at its start and while it trains. The
result of a run: `result.json` and a table."""

import contextlib
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from rankup import Group, Job

from ..config import Config
from ..data.samples import EpochSampler
from ..parallel import method_name
from ..parallel.methods import Method
from ..workloads.classification import report
from ..workloads.workload import Workload
from . import weights

SAY_EVERY_S = 5.0


@dataclass(slots=True, kw_only=True)
class Training:
    """Everything that the training loop works with, on this rank."""

    config: Config
    job: Job
    method: Method
    workload: Workload
    plain: nn.Module  # the user's module without wrappers, for evaluation and checkpoints
    model: nn.Module  # the same module, wrapped for training with the other ranks
    loss: Callable[[nn.Module, Any], torch.Tensor]  # (model, batch) -> loss, under autocast if `precision` asks for it
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    train_loader: DataLoader[Any]
    eval_loader: DataLoader[Any]
    steps_per_epoch: int
    total_steps: int
    tables: dict[str, torch.Tensor] = field(default_factory=dict)  # from the last evaluation, see `Result`


def describe(config: Config, group: Group, workload: Workload, order: EpochSampler) -> str:
    """Return three lines about the training that is about to start: data, model, batch."""
    origin = f", {workload.data_origin}" if workload.data_origin else ""
    name = config.model if config.workload == "images" else config.workload
    num_parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    method = method_name(config, group.world_size)
    together = "" if method == "none" else f", {method}"
    least, more = divmod(config.batch_size, group.world_size)
    each = f"{least} to {least + 1}" if more else str(least)
    split = f" = {group.world_size} ranks x {each}" if group.world_size > 1 else ""
    split += f" in {config.accumulate} parts" if config.accumulate > 1 else ""
    return (
        f"data   {workload.data_name}, {len(workload.train):,} + {len(workload.evaluation):,} samples{origin}\n"
        f"model  {name}, {num_parameters:,} parameters, {config.precision} on {group.device}{together}\n"
        f"batch  {config.batch_size} global{split}, peak learning rate {config.lr:g}, "
        f"{len(order)} steps an epoch"
    )


def progress(t: Training) -> Callable[[], None]:
    """Return a function to call after each step. On rank 0 it logs the progress every few seconds."""
    said_s = time.monotonic()

    def show() -> None:
        nonlocal said_s
        if not t.job.is_main or time.monotonic() - said_s < SAY_EVERY_S:
            return
        said_s = time.monotonic()
        step, line, unit = f"step {t.job.step_number}/{t.total_steps}", t.job.position.line, t.workload.unit
        if line is not None:
            loss = math.nan if line["train/loss"] is None else line["train/loss"]
            step += f"  loss {loss:.4f}  {line[f'train/{unit}_per_s']:,.0f} {unit}/s"
        t.job.group.log.info(step)

    return show


def write_result(t: Training, *, seconds: float) -> None:
    """Write `result.json` and TensorBoard's summary of the run, and print the table. All ranks call this, and rank 0
    writes. `seconds`: duration of this attempt. Raises UserError and PeerLost."""
    config, job, group, workload = t.config, t.job, t.job.group, t.workload
    state = group.collective(lambda: job.tracked.whole("model"))
    peaks = group.gather(_peak_memory_mb(group.device))
    if not group.is_rank0:
        return
    table, _ = report(t.tables, workload.classes)
    method, reporting = method_name(config, group.world_size), job.reporting
    if table and (board := reporting.metrics.tensorboard) is not None:
        with contextlib.suppress(OSError):  # `reporting.result` reports a full disk
            board.add_text("eval/confusion", f"```\n{table}\n```", job.step_number)
    result = reporting.result(
        steps_per_epoch=t.steps_per_epoch, seconds=round(seconds, 1), peak_memory_mb=round(max(peaks)),
        digest=weights.digest(state), data=workload.data_name, parallel=method,
    )
    rows = {
        f"{workload.unit}/s": f"{result[f'{workload.unit}_per_s']:,.0f} (training alone)",
        "seconds": f"{result['seconds']:.1f}",
        "world size": f"{result['world_size']} on {', '.join(result['hosts'])}",
        "goodput": reporting.goodput_line(result["goodput"]),
        "weights digest": result["digest"][:16],
        "outputs": f"{result['run']}/ (result.json, checkpoints/{', tensorboard/' if config.tensorboard else ''})",
    }
    if "://" not in result["run"]:
        curves = f", tensorboard --logdir {result['run']}" if config.tensorboard else ""
        rows["next"] = f"rankup status {result['run']}{curves}"
    group.log.info(f"finished after {result['step']} steps\n{two_columns(result['metrics'], rows)}")


def _peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of this process in MB: on its GPU if it has one, else on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def two_columns(metrics: dict[str, float], more: dict[str, str]) -> str:
    """Return one line for each row, with aligned values."""
    rows = {name.replace("_", " "): f"{value:.4f}" for name, value in sorted(metrics.items())} | more
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())
