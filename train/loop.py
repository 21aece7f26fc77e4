"""The training, top to bottom: `build` makes all that it needs, `train` loops over the steps. Start reading here."""

import logging
import os
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it anyway, 0.4 s, at the first optimizer: too late for the fork server
from torch import nn
from torch.profiler import record_function

from rankup.agent.status import StatusFile
from rankup.doctor import machine
from rankup.env.rank_env import RankEnv
from rankup.group.group import Group
from rankup.group.stop import StopRequest
from rankup.loop.commit import Changing
from rankup.loop.seeds import derive_seed, seed_everything
from rankup.observe.profiler import Profiler
from rankup.observe.step_clock import StepClock
from rankup.observe.stragglers import COMPUTE, DATA, WAITING
from rankup.state.shards import check_shared

from .config import Config, check_world_size
from .data.loader import Loader
from .data.worker_loader import free_shared_memory
from .group import join_group
from .parallel import load_method, method_name, start_method
from .parallel.allocator import keep_freed_memory
from .parallel.buffers import Buffers
from .parallel.method import Method
from .parallel.model import autocast, check_same_shapes, compile_model, prepare
from .parallel.optimizer import build_optimizer, build_scaler, rate_at, set_rate
from .parallel.warm_up import warm_up
from .run import weights
from .run.advice import Advice
from .run.evaluation import evaluate
from .run.metrics import Speed
from .run.progress_bar import ProgressBar
from .run.rank_reports import RankReports
from .run.reporter import Reporter
from .run.result import describe, write_result
from .run.resume import load_initial_weights, load_training_state
from .run.run_directory import RunDirectory, open_run_directory
from .run.training import Rescuer, Training, save, save_and_stop
from .workloads import Workload, load
from .workloads.batches import all_batches, build_order, first_batch, is_evaluated


def train(config: Config, launch: RankEnv, *, run_dir: Path, log: logging.Logger, stop: StopRequest) -> None:
    """Train to the end, or to where a stop was asked for.

    Raises UserError (code 2), Stopped (143), JoinError (170), PeerLost (171); see `rankup.errors`.
    """
    began_s = time.monotonic()
    check_world_size(config, launch.world_size)
    torch.set_num_threads(config.num_threads)
    keep_freed_memory()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS sums in one order only with it
        torch.use_deterministic_algorithms(True)

    # Group ------------------------------------------------------------------------------------------------------
    needs_group = load_method(method_name(config, launch.world_size)).needs_process_group
    status = StatusFile(run_dir, launch)
    with (
        join_group(config, launch, log=log, stop=stop, status=status, needs_process_group=needs_group) as group,
        start_method(config, group) as method,
        open_run_directory(config, group) as run,
        Reporter(run) as reporter,
    ):
        if run.kept.finished:
            return
        t = build(config, group, method, run)
        progress, watch = t.progress, group.watch
        reporter.follow(t)
        watch.protect(Rescuer(t), timeout_s=config.save_timeout_s)  # from here on a lost rank costs no finished step
        stop.finish_step_first()
        log.info(f"ready after {time.monotonic() - began_s:.1f} s")
        bar = ProgressBar(config, is_rank0=group.is_rank0, step=progress.step, total_steps=t.total_steps, log=log)
        try:
            while True:
                # Report, evaluate, save -------------------------------------------------------------------------
                run.kept.look()
                at_end = progress.step >= t.total_steps
                due = is_evaluated(config, progress.step, t.total_steps, t.steps_per_epoch)
                t.speed.pause()
                if due and progress.step > progress.evaluated:
                    evaluate_and_report(t)
                if at_end:
                    watch.settle()
                if due or progress.step % (config.save_every_steps or t.steps_per_epoch) == 0:
                    save(t, wait=at_end)
                t.speed.resume()
                t.profiler.at(progress.step)
                if at_end:
                    break

                # Stop -------------------------------------------------------------------------------------------
                if group.stops_before(progress.step):
                    raise save_and_stop(t)

                # Step -------------------------------------------------------------------------------------------
                watch.enter("step", config.step_timeout_s, step=progress.step)
                with record_function("step"):
                    finished = step(t)
                if not finished:
                    raise save_and_stop(t)
                t.advice.after_step(t.speed)
                group.step = progress.step
                if progress.line is not None and progress.line["step"] == progress.step:  # a new one
                    t.metrics.training(progress.line)
                bar.show(progress.step, lambda: t.metrics.line(progress.step, t.total_steps))
        finally:
            t.loader.close()
            bar.close()
        watch.enter("end", config.save_timeout_s, step=progress.step)
        write_result(t, reporter, seconds=time.monotonic() - began_s)


def build(config: Config, group: Group, method: Method, run: RunDirectory) -> Training:
    """Data, model and optimizer: new, or as they were at the run's checkpoint. Raises UserError where that can't be."""
    log, device = group.log, group.device
    group.watch.enter("setup", config.setup_timeout_s)
    # What is likely to be slow, or to fail later
    num_devices = torch.accelerator.device_count() if device.type != "cpu" and method.one_device_per_rank else 0
    ranks = group.launch.local_world_size
    lines = machine.before_training(ranks=ranks or 1, threads=config.num_threads)
    for line in [*lines, *machine.idle_devices(ranks, num_devices)] if group.launch.local_rank == 0 else ():
        log.warning(line)
    if config.checkpoint_format == "sharded":
        check_shared(run.path / "checkpoints", group)

    # Data -------------------------------------------------------------------------------------------------------
    seed_everything(derive_seed(config.seed), group.device)
    workload = load(config, pretrained=run.kept.newest is None)
    for note in workload.notes:
        log.info(note)
    order = build_order(config, group, workload)
    total_steps = config.max_steps or config.epochs * order.steps_per_epoch
    log.info(describe(config, group, workload, order, method=method_name(config, group.world_size)))
    if group.world_size > 1 and not method.every_rank_has_all:
        log.info("rescue none: no rank has the whole state, so a lost rank costs the steps since the newest checkpoint")
    if line := run.kept.second_copies(replicated=method.replicates_state):
        log.info(line)

    # Model ------------------------------------------------------------------------------------------------------
    plain = whole = prepare(workload, config, group, split=not method.replicates_state)
    check_same_shapes(group, plain)
    progress = load_initial_weights(config, group, plain, run.kept, data_name=workload.data_name)
    group.step = progress.step
    if not method.replicates_state:
        weights.check_same(group, plain)  # before they are split: afterwards no rank has them all
        if group.is_rank0 and workload.pictures is not None:
            whole = deepcopy(plain).cpu()
        method.split(plain)

    # Optimizer --------------------------------------------------------------------------------------------------
    optimizer = build_optimizer(plain, config, device)
    scaler = build_scaler(config, device)
    load_training_state(group, method, plain, optimizer, scaler, run.kept.newest)
    run.kept.forget()  # its copy of all weights would stay in the memory of every rank
    model = method.wrap(compile_model(plain, device) if config.compile else plain)
    buffers = Buffers(plain, group)
    buffers.share()
    if method.replicates_state:
        weights.check_same(group, plain)  # once wrapped: DDP has sent rank 0's to all
    free_bytes = free_shared_memory()  # before workers fill it
    batches = all_batches(
        config, group, workload, order, step=progress.step, evaluated=progress.evaluated, total_steps=total_steps
    )
    loader = Loader(
        workload.train, batches, evaluation=workload.evaluation, device=device, stop=group.stop,
        num_workers=config.num_workers, prefetch_factor=config.prefetch_factor, warn=log.warning,
    )
    # After the workers have started: they prepare the first batches during the warm-up.
    batch = first_batch(config, group, workload, order, free_bytes=free_bytes)
    _warm_up(config, group, method, workload, plain, model, batch)
    optimizer = method.after_warm_up(plain, optimizer)

    metrics = run.open_metrics(progress, workload.unit)
    clock = StepClock(device, method.exchange, world_size=group.world_size)
    return Training(
        config=config, group=group, method=method, run=run, workload=workload, plain=plain, model=model, whole=whole,
        optimizer=optimizer, scaler=scaler, loader=loader, divisors=order.divisors,
        steps_per_epoch=order.steps_per_epoch, total_steps=total_steps, buffers=buffers,
        progress=progress, changing=Changing(progress, device), saved=run.saved, metrics=metrics,
        profiler=Profiler(
            config.profile, run_dir=group.run_dir, rank=group.rank, device=device, step=progress.step,
            total_steps=total_steps, log=log,
        ),
        speed=Speed(config.batch_size, progress.step),
        clock=clock, reports=RankReports(group, clock, step=progress.step, load=order.load_by_rank),
        advice=Advice(config, group, method, workload, plain, batch, step=progress.step, total_steps=total_steps),
    )


def step(t: Training) -> bool:
    """One optimizer update from `accumulate` micro-batches.

    Returns False, and updates nothing, where a process alone was asked to stop while it waited for data. Several ranks
    have agreed on the step to stop at before.
    """
    config, group, clock = t.config, t.group, t.clock
    clock.start()
    batches: list[Any] = []
    with record_function("data"), group.watch.clock.during("data"), t.advice.waiting():
        alone = group.world_size == 1
        while len(batches) < config.accumulate and (batch := t.loader.next(until_stop=alone)) is not None:
            batches.append(batch)
    clock.lap(DATA)
    if len(batches) < config.accumulate:
        return False
    clock.has_batch()
    # A random state of each step's and rank's own: a resumed run needs none of the past, and no two ranks drop the same
    seed_everything(derive_seed(config.seed, t.progress.step, group.rank), group.device)
    total = torch.zeros((), device=group.device)
    for number, (batch, divisor) in enumerate(zip(batches, t.divisors, strict=True), 1):
        with t.method.micro_batch(t.model, last=number == config.accumulate):
            with autocast(config, group.device):
                loss = t.workload.loss(t.model, batch) / divisor
            group.watch.wait_for_others(True)  # backward holds the all-reduce of the gradients
            clock.split_backward(loss)
            t.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            group.watch.wait_for_others(False)
            clock.mark(WAITING)
        total += loss.detach().to(group.device)
    t.buffers.share()
    rate = rate_at(config, t.progress.step, total_steps=t.total_steps, steps_per_epoch=t.steps_per_epoch)
    set_rate(t.optimizer, rate)
    line = report(t, total, rate)
    clock.mark(WAITING)
    # With ddp all exchange is over: a rank that gets here finishes the step, whoever dies meanwhile
    with t.changing:
        t.method.step(t.plain, t.optimizer, t.scaler)
        t.buffers.keep()
        t.progress.step, t.progress.line = t.progress.step + 1, line
    clock.mark(COMPUTE)
    return True


def report(t: Training, loss: torch.Tensor, rate: float) -> dict[str, Any] | None:
    """The newest line of training once this step is finished. `loss`: this rank's, a scalar on the device.

    Before the step is finished: a rank that finishes it knows its line, and whoever goes on from there can write it.
    """
    number = t.progress.step + 1
    if number % t.config.log_every_steps != 0 and number != t.total_steps:
        return t.progress.line
    # .cpu() and the sum wait for the device: only when we report
    mean, seen = t.reports.exchange(loss.double().cpu(), step=number, saving=t.run.kept.saving_step is not None)
    return t.metrics.training_entry(number, mean, rate, t.speed.at(number)) | seen


def evaluate_and_report(t: Training) -> None:
    """Evaluate the weights of this step. Raises Stopped, after a save, if any rank was asked to stop meanwhile."""
    progress = t.progress
    t.group.watch.enter("evaluation", t.config.eval_timeout_s, step=progress.step)
    pad = t.method.forward_waits_for_all
    result = evaluate(t.config, t.group, t.workload, t.plain, pad=pad, loader=t.loader)
    if result is None:
        raise save_and_stop(t)
    with t.changing:
        progress.evaluated, progress.metrics = progress.step, result.metrics
    t.run.tables = result.tables
    t.metrics.evaluation(progress.step, result.metrics)
    values = ", ".join(f"{name} {value:.4f}" for name, value in sorted(result.metrics.items()))
    t.group.log.info(f"epoch {round(progress.step / t.steps_per_epoch, 2):g}: {values} on {result.count:,} samples")


def _warm_up(
    config: Config, group: Group, method: Method, workload: Workload, plain: nn.Module, model: nn.Module, batch: Any
) -> None:
    def loss() -> torch.Tensor:
        with autocast(config, group.device):
            return workload.loss(model, batch)

    # Of no step: the run's own seeds are not used up
    seed_everything(derive_seed(config.seed, -1, group.rank), group.device)
    warm_up(
        plain, loss, unused_allowed=config.find_unused_parameters or config.static_graph,
        graph_ends_in_parameters=method.graph_ends_in_parameters, passes=2 if config.static_graph else 1,
    )
