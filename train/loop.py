"""The loop, top to bottom: group, data, model, optimizer, resume, step, report-evaluate-save, stop."""

import contextlib
import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from train.config import Config, check_world_size
from train.data.batch import num_bytes, to_device
from train.data.loader import BatchLoader, open_loader, uses_workers
from train.data.order import Order
from train.data.random_numbers import derive_seed, seed_everything
from train.data.worker_loader import free_shared_memory
from train.errors import DataError, Stopped, UserError
from train.group.group import Group
from train.group.join import join
from train.group.on_rank0 import on_rank0
from train.parallel import METHODS, Method, method_name, start_method
from train.parallel.model import check_same_shapes, compile_model, prepare
from train.parallel.optimizer import build_optimizer, peak_rate, rate_at, set_rate
from train.parallel.precision import autocast, build_scaler
from train.parallel.warm_up import warm_up
from train.process import advice, machine_checks
from train.process.env import Launch
from train.process.log import Log
from train.process.status_file import StatusFile
from train.process.stop import StopRequest
from train.run import weights
from train.run.checkpoint import Checkpoint
from train.run.evaluation import evaluate
from train.run.profiler import Profiler
from train.run.progress import Progress, Speed
from train.run.result import write_result
from train.run.run_directory import open_run_directory
from train.run.sharded_checkpoint import FOLDER, check_shared, read_shards_into
from train.run.training_state import TrainingState
from train.workloads import Workload, load


def train(config: Config, launch: Launch, *, run_dir: Path, log: Log, stop: StopRequest) -> None:
    """Train to the end, or to where a stop was asked for.

    Raises UserError (code 2), Stopped (143), JoinError (170), PeerLost (171); see `train.errors`.
    """
    began_s = time.monotonic()
    check_world_size(config, launch.world_size)
    torch.set_num_threads(config.num_threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS sums in one order only with it
        torch.use_deterministic_algorithms(True)

    # Group ------------------------------------------------------------------------------------------------------
    needs_group = METHODS[method_name(config, launch.world_size)].needs_process_group
    with (
        join(
            config, launch, log=log, stop=stop, status=StatusFile(run_dir, launch), needs_process_group=needs_group
        ) as group,
        start_method(config, group) as method,
        open_run_directory(config, group) as record,
    ):
        if record.finished:
            return
        watch = group.watch
        watch.enter("setup", config.setup_timeout_s)
        counts_devices = group.device.type != "cpu" and method.one_device_per_rank
        num_devices = torch.accelerator.device_count() if counts_devices else 0
        advice.say(machine_checks.before_training(config, launch) + advice.on_devices(launch, num_devices), launch, log.warning)

        if config.checkpoint_format == "sharded":
            check_shared(run_dir / "checkpoints", group)

        # Data ---------------------------------------------------------------------------------------------------
        seed_everything(derive_seed(config.seed))
        workload = load(config, pretrained=record.checkpoint is None)
        for note in workload.notes:
            log.info(note)
        order = _order(config, group, workload)
        per_epoch = order.steps_per_epoch
        total_steps = config.max_steps or config.epochs * per_epoch
        log.info(_describe(config, group, workload, order))

        # Model --------------------------------------------------------------------------------------------------
        if config.init_from and record.checkpoint is None:
            workload.model.load_state_dict(on_rank0(group, lambda: _initial(config, workload.model, log)))
        plain = prepare(workload.model, config, group.device)
        check_same_shapes(group, plain)

        progress = Progress()
        if record.checkpoint is not None:
            progress = _resume(config, record.checkpoint, plain, group, workload)
        group.step = progress.step
        unsharded = None
        if not method.replicates_state:
            # Before they are split: afterwards no rank has them all
            _must_match(group, plain)
            unsharded = copy.deepcopy(plain).cpu() if group.is_rank0 and workload.pictures is not None else None
        method.split(plain)

        # Optimizer ----------------------------------------------------------------------------------------------
        optimizer = build_optimizer(plain, config, group.device)
        scaler = build_scaler(config, group.device)
        if record.checkpoint is not None:
            _resume_training(record.checkpoint, method, group, plain, optimizer, scaler)
        model = method.wrap(compile_model(plain, group.device) if config.compile else plain)
        if method.replicates_state:
            _must_match(group, plain)
        free_bytes = free_shared_memory()  # before workers fill it
        feed = open_loader(
            workload.train, order.batches(progress.step, total_steps), device=group.device, stop=stop,
            num_workers=config.num_workers, prefetch_factor=config.prefetch_factor,
        )
        _warm_up(config, group, method, workload, plain, model, order, free_bytes)
        memory = record.checkpoint.state.compressor if record.checkpoint else {}
        optimizer = method.after_warm_up(plain, optimizer, memory)
        metrics = record.open_metrics(progress, workload.unit)
        log.start_progress(
            kind=config.progress, total_steps=total_steps, step=progress.step, every_s=config.report_every_s
        )
        stop.finish_step_first()
        log.info(f"ready after {time.monotonic() - began_s:.1f} s")
        speed = Speed(config.batch_size, progress.step)
        profiler = Profiler(config, group, step=progress.step, total_steps=total_steps)
        saved = (progress.step, progress.evaluated)

        def save() -> None:
            nonlocal saved
            if saved == (progress.step, progress.evaluated):
                return
            watch.enter("save", config.save_timeout_s, step=progress.step)
            if config.checkpoint_format == "sharded":
                tensors, optimizer_part = method.local_state(plain, optimizer)
            else:
                tensors, optimizer_part = method.full_state_dict(plain), method.optimizer_state(plain, optimizer)
            state = TrainingState(
                step=progress.step, evaluated=progress.evaluated, metrics=progress.metrics, steps_per_epoch=per_epoch,
                data=workload.data_name, config=config.model_dump(), world_size=group.world_size,
                attempt=group.attempt, start=group.launch.start,
                optimizer=optimizer_part, scaler=scaler.state_dict(), compressor=method.memory(),
            )
            record.save(state, tensors)
            saved = (progress.step, progress.evaluated)

        def stop_here() -> Stopped:
            """Save; all ranks come here at the same step."""
            save()
            profiler.end()
            reason = stop.signal_name or "another rank's signal"
            where = f"saved at step {progress.step}" if progress.step else "at step 0, nothing to save,"
            again = f"The same command{' without --fresh' if config.fresh else ''} goes on from it."
            return Stopped(f"{reason}: {where} of {total_steps}. {again}")

        try:
            while True:
                # Report, evaluate, save -------------------------------------------------------------------------
                at_end = progress.step >= total_steps
                due = at_end or progress.step % (per_epoch * config.evaluate_every_epochs) == 0
                if due and progress.step > progress.evaluated:
                    speed.pause()
                    watch.enter("evaluation", config.eval_timeout_s, step=progress.step)
                    result = evaluate(config, group, workload, plain, pad=method.forward_waits_for_all)
                    if result is None:
                        raise stop_here()
                    progress.evaluated, progress.metrics = progress.step, result.metrics
                    record.tables = result.tables
                    metrics.evaluation(progress.step, result.metrics)
                    log.info(_evaluated(progress.step / per_epoch, result.metrics, result.count))
                    save()
                    speed.resume()
                elif progress.step % (config.save_every_steps or per_epoch) == 0:
                    speed.pause()
                    save()
                    speed.resume()
                profiler.at(progress.step)
                if at_end:
                    break

                # Step -------------------------------------------------------------------------------------------
                watch.enter("step", config.step_timeout_s, step=progress.step)
                rate = rate_at(config, progress.step, total_steps=total_steps, steps_per_epoch=per_epoch)
                set_rate(optimizer, rate)
                with record_function("step"):
                    loss = step(
                        config, group, method, workload, plain, model, optimizer, scaler, feed, number=progress.step
                    )

                # Stop -------------------------------------------------------------------------------------------
                if loss is None:
                    raise stop_here()
                progress.step += 1
                group.step = progress.step
                if progress.step % config.log_every_steps == 0 or progress.step == total_steps:
                    # .cpu() and the sum wait for the device: only when we report
                    mean = group.sum(loss.double().cpu()).item() / group.world_size
                    metrics.training(progress.step, mean, rate, speed.at(progress.step))
                log.progress(progress.step, metrics.line(progress.step, total_steps) if log.progress_due() else "")
        finally:
            feed.close()
            log.end_progress()
        watch.enter("end", config.save_timeout_s, step=progress.step)
        seconds = time.monotonic() - began_s
        state = method.full_state_dict(plain)
        if unsharded is not None:
            unsharded.load_state_dict(state)
        write_result(
            record, workload, unsharded or plain, state, progress, steps_per_epoch=per_epoch,
            per_s=speed.at(progress.step), seconds=seconds, profiler=profiler,
        )


def step(
    config: Config, group: Group, method: Method, workload: Workload, plain: nn.Module, model: nn.Module,
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, feed: BatchLoader, *, number: int,
) -> torch.Tensor | None:
    """One optimizer update from `accumulate` micro-batches.

    Returns this rank's mean loss, a scalar on the device, or None if any rank was asked to stop: all agree on that before
    the first gradient is exchanged, and a rank that still waits for data agrees without it.
    """
    batches: list[Any] = []
    with record_function("data"):
        while len(batches) < config.accumulate and (batch := feed.next()) is not None:
            batches.append(batch)
    if group.max(int(group.stop.requested or len(batches) < config.accumulate)):
        return None
    # A random state of each step's and rank's own: a resumed run needs none of the past, and no two ranks drop the same
    seed_everything(derive_seed(config.seed, number, group.rank))
    total = torch.zeros((), device=group.device)
    for part, batch in enumerate(batches):
        with method.micro_batch(model, last=part == config.accumulate - 1):
            with autocast(config, group.device):
                loss = workload.loss(model, batch) / config.accumulate
            group.watch.wait_for_others(True)  # backward holds the all-reduce of the gradients
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            group.watch.wait_for_others(False)
        total += loss.detach().to(group.device)
    method.step(plain, optimizer, scaler)
    return total


def _order(config: Config, group: Group, workload: Workload) -> Order:
    group.must_match(
        "the data", f"{workload.data_name}, {len(workload.train)} + {len(workload.evaluation)} samples",
        remedy="Give all nodes the same files, or set --data-dir.",
    )
    if len(workload.train) < config.batch_size:
        raise DataError(
            f"batch_size must be at most the number of training samples, {len(workload.train)}, got "
            f"{config.batch_size}. Set a smaller --batch-size."
        )
    return Order(
        len(workload.train), config.batch_size, config.seed, group.rank, group.world_size, config.accumulate,
        lengths=getattr(workload.train, "lengths", None), pool=config.length_pool,
    )


def _describe(config: Config, group: Group, workload: Workload, order: Order) -> str:
    split = f" = {group.world_size} ranks x {config.batch_size // group.world_size}" if group.world_size > 1 else ""
    split += f" in {config.accumulate} parts" if config.accumulate > 1 else ""
    parameters = sum(p.numel() for p in workload.model.parameters())
    name = config.model if config.workload == "images" else config.workload
    method = method_name(config, group.world_size)
    return (
        f"data   {workload.data_name}, {len(workload.train):,} + {len(workload.evaluation):,} samples"
        f"{f', {workload.data_origin}' if workload.data_origin else ''}\n"
        f"model  {name}, {parameters:,} parameters, {config.precision} on {group.device}"
        f"{'' if method == 'none' else f', {method}'}\n"
        f"batch  {config.batch_size} global{split}, peak learning rate {peak_rate(config):g}, "
        f"{order.steps_per_epoch} steps an epoch"
    )


def _evaluated(epoch: float, metrics: dict[str, float], count: int) -> str:
    values = ", ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))
    return f"epoch {round(epoch, 2):g}: {values} on {count:,} samples"


def _initial(config: Config, model: nn.Module, log: Log) -> dict[str, torch.Tensor]:
    """Rank 0's model with the weights of `init_from` in it: the file needs to be on its disk only."""
    assert config.init_from is not None
    weights.init_from(model, Path(config.init_from), log.info)
    return model.state_dict()


def _must_match(group: Group, model: nn.Module) -> None:
    group.must_match("the initial weights", weights.digest(model.state_dict())[:16], remedy="Look at init_from and bert_dir.")


def _resume(config: Config, earlier: Checkpoint, model: nn.Module, group: Group, workload: Workload) -> Progress:
    """Put back a checkpoint's weights (shards come later, when the model is split), and say where it goes on. Raises UserError
    for one of other data or model."""
    state = earlier.state
    if state.data != workload.data_name:
        way_out = "Set --data-dir or --bert-dir" if state.config["workload"] == "text" else "Set --data-dir"
        raise UserError(f"{earlier.path} was trained on {state.data}, got {workload.data_name} now. {way_out}.")
    if not earlier.sharded:
        with _fitting(earlier):
            model.load_state_dict(earlier.model)
    group.log.info(f"resumed from {earlier.path.name}")
    for what, then, now in (
        ("world size", state.world_size, group.world_size),
        ("parallel", state.config["parallel"], config.parallel),
        ("torch", state.versions["torch"], torch.__version__),
    ):
        if then != now:
            group.log.info(f"  {what} was {then}, is {now}: the run goes on, but its last bits will differ")
    return Progress(state.step, state.evaluated, state.metrics)


def _resume_training(
    earlier: Checkpoint, method: Method, group: Group, model: nn.Module, optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Put back the rest, once the parameters are where they stay."""
    state = earlier.state
    with _fitting(earlier):
        if earlier.sharded:
            shards, _ = method.local_state(model, optimizer)
            read_shards_into(group.run_dir / "checkpoints" / earlier.path.name / FOLDER, shards)
            method.load_local_state(model, optimizer, shards, state.optimizer)
        else:
            method.load_optimizer_state(model, optimizer, state.optimizer)
        if state.scaler:
            scaler.load_state_dict(state.scaler)


@contextlib.contextmanager
def _fitting(earlier: Checkpoint) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{earlier.path} does not fit this model: {reason}. Set --fresh or another --name.") from None


def _warm_up(
    config: Config, group: Group, method: Method, workload: Workload, plain: nn.Module, model: nn.Module, order: Order,
    free_bytes: int,
) -> None:
    """The throwaway passes see the first micro-batch of the first epoch on every start, whatever the position."""
    epoch, indices = next(order.batches(0, 1))
    batch = to_device(workload.train.batch(indices, epoch), group.device)
    if uses_workers(workload.train, config.num_workers):
        num_samples = len(indices) + min(config.eval_batch_size, len(workload.evaluation))
        both_bytes = num_bytes(batch) * num_samples // len(indices)
        lines = advice.on_shared_memory(
            config, group.launch, batch_bytes=both_bytes, free_bytes=free_bytes, way_out=machine_checks.ENLARGE_SHM
        )
        advice.say(lines, group.launch, group.log.warning)
    seed_everything(derive_seed(config.seed, -1, group.rank))

    def run() -> torch.Tensor:
        with autocast(config, group.device):
            return workload.loss(model, batch)

    warm_up(
        plain, run, unused_allowed=config.find_unused_parameters or config.static_graph,
        graph_ends_in_parameters=method.graph_ends_in_parameters,
    )
