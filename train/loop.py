"""The training loop. Start reading here: `build` makes data, model and optimizer, and `train` runs the steps."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it in every rank, 0.4 s; here the fork server does it once
from torch import nn

from rankup import Group, Job, Program, UserError
from rankup.seeds import derive_seed, seed_everything

from .config import Config
from .data.samples import EpochSampler, load_batches, to_device
from .group import join_options
from .parallel import method_class, method_name
from .parallel.methods import Method
from .parallel.model import autocast, build_optimizer, compile_model, keep_freed_memory, prepare, rate_at
from .run import weights
from .run.evaluation import evaluate, evaluation_loader
from .run.result import Training, describe, progress, write_result
from .run.run_directory import check_data, open_run_directory
from .workloads.workload import Workload, load


def train(config: Config, program: Program, *, run_dir: Path, fresh: bool = False) -> None:
    """Train until the run is finished or is asked to stop. Raises the errors of `rankup.errors`. `fresh`: start from
    the beginning even if the run has checkpoints."""
    began_s = time.monotonic()
    torch.set_num_threads(config.num_threads)
    keep_freed_memory()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs this to be deterministic
        torch.use_deterministic_algorithms(True)

    # Group ------------------------------------------------------------------------------------------------------
    chosen: type[Method] = method_class(method_name(config, program.rank_env.world_size))
    with (
        program.join(run_dir, timeout_s=config.join_timeout_s, **join_options(config, fresh=fresh)) as group,
        chosen(config, group).running() as method,
        open_run_directory(config, group, method, fresh=fresh) as job,
    ):
        if job.run.finished:
            return
        t = build(config, job, method)
        job.begin()  # from here on, a lost rank costs no finished step
        program.log.info(f"ready after {time.monotonic() - began_s:.1f} s")
        show = progress(t)
        evaluate_and_save(t)  # if the previous attempt ended before it could
        for batches in batches_to_end(t):
            step(t, batches)
            evaluate_and_save(t)
            show()
        job.finish()
        write_result(t, seconds=time.monotonic() - began_s)


def build(config: Config, job: Job, method: Method) -> Training:
    """Build data, model and optimizer, and restore the run's newest checkpoint if there is one. Raises UserError."""
    group, run = job.group, job.run
    log, device = group.log, group.device
    group.watch.enter("setup", config.setup_timeout_s)

    # Data -------------------------------------------------------------------------------------------------------
    seed_everything(derive_seed(config.seed), device)
    workload = load(config, pretrained=run.newest is None)
    order = build_order(config, group, workload)
    total_steps = config.max_steps or config.epochs * len(order)
    log.info(describe(config, group, workload, order))
    if group.world_size > 1 and not method.replicates_state:
        log.info("rescue none: no rank has the whole state, so a lost rank costs the steps since the newest copy")
    job.saving.about = {"steps_per_epoch": len(order), "data": workload.data_name, "config": config.model_dump()}
    job.progress.unit, job.progress.per_step, job.progress.total = workload.unit, config.batch_size, total_steps

    # Model ------------------------------------------------------------------------------------------------------
    plain = prepare(workload, config, group, split=not method.replicates_state)
    if run.newest is not None:
        check_data(run.newest, workload.data_name)
    elif config.init_from:
        job.start_from(config.init_from, plain, where="init_from")
    if not method.replicates_state:
        # Compare the weights before the split: afterwards no rank has all of them
        own = weights.digest(plain.state_dict())[:16]
        group.must_match("the initial weights", own, remedy="Look at init_from and bert_dir.")
        method.split(plain)
    model = method.wrap(compile_model(plain, device) if config.compile else plain)
    job.clock.link = method.exchange  # a wait in the exchange must not make this rank look slow

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with autocast(config, device):
            return workload.loss(model, batch)

    # State: `job.track` restores it from the checkpoint -----------------------------------------------------------
    optimizer = method.wrap_optimizer(plain, build_optimizer(plain, config, device))
    # In fp16 small gradients become zero unless the loss is scaled up
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    if run.newest is not None:
        job.saving.say_changed("parallel", run.newest.record["config"]["parallel"], config.parallel)
    job.track(model=model, optimizer=optimizer, scaler=scaler)
    return Training(
        config=config, job=job, method=method, workload=workload, plain=plain, model=model, loss=loss,
        optimizer=optimizer, scaler=scaler, steps_per_epoch=len(order), total_steps=total_steps,
        train_loader=load_batches(
            workload.train, order, accumulate=config.accumulate, num_workers=config.num_workers, device=device
        ),
        eval_loader=evaluation_loader(config, group, workload.evaluation),
    )


def build_order(config: Config, group: Group, workload: Workload) -> EpochSampler:
    """Return the order of the training samples. Raises UserError if ranks have different data, or if there are fewer
    samples than a batch needs."""
    group.must_match(
        "the data", f"{workload.data_name}, {len(workload.train)} + {len(workload.evaluation)} samples",
        remedy="Give all nodes the same files, or set --data-dir.",
    )
    if len(workload.train) < config.batch_size:
        most = f"the number of training samples, {len(workload.train)}"
        raise UserError(f"batch_size must be at most {most}, got {config.batch_size}. Set a smaller --batch-size.")
    return EpochSampler(len(workload.train), config.batch_size, config.seed, getattr(workload.train, "lengths", None))


def batches_to_end(t: Training) -> Iterator[list[tuple[float, Any]]]:
    """Yield this rank's part of each remaining global batch, as a list of micro-batches."""
    job = t.job
    for _ in job.epochs(-(-t.total_steps // t.steps_per_epoch) if job.step_number < t.total_steps else 0):
        for batches in job.batches(t.train_loader):
            yield batches
            if job.step_number == t.total_steps:
                return


def step(t: Training, batches: list[tuple[float, Any]]) -> None:
    """Do one optimizer step. `batches`: for each micro-batch, (size of this rank's batch / its size, its samples)."""
    config, job = t.config, t.job
    if config.recompute_every_steps and job.step_number % config.recompute_every_steps == 0:
        job.recompute(lambda batch: t.loss(t.plain, to_device(batch, job.device)), batches[0][1])
    total = torch.zeros((), device=job.device)
    for number, (parts, batch) in enumerate(batches, 1):
        with t.method.micro_batch(t.model, last=number == config.accumulate):
            # Weight each sample equally: multiply a mean over n of the N global samples by n * world_size / N
            loss = t.loss(t.model, to_device(batch, job.device)) / (parts / job.weight)
            with job.backward(loss):  # includes the all-reduce: a rank that waits there does not count as slow
                t.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        total += loss.detach().to(job.device)
    t.method.wait_for_gradients(t.optimizer)
    rate = rate_at(config, job.step_number, total_steps=t.total_steps, steps_per_epoch=t.steps_per_epoch)
    with job.step(loss=total, lr=rate):
        for group in t.optimizer.param_groups:
            group["lr"] = rate
        t.method.step(t.plain, t.optimizer, t.scaler)


def evaluate_and_save(t: Training) -> None:
    """Evaluate and save if either is due at this step. Called before the first step and after each. Raises Stopped."""
    config, job, progress = t.config, t.job, t.job.position
    due = progress.step >= t.total_steps or progress.step % (t.steps_per_epoch * config.evaluate_every_epochs) == 0
    if due and progress.step > progress.evaluated:
        evaluate_and_report(t)
    if progress.step < t.total_steps and (due or progress.step % (config.save_every_steps or t.steps_per_epoch) == 0):
        job.save()  # `job.finish` saves the last checkpoint


def evaluate_and_report(t: Training) -> None:
    """Evaluate the current weights and log the result. If the job must stop meanwhile, save and raise Stopped."""
    config, job = t.config, t.job
    job.repeats_calls = True  # a resume evaluates before its first step
    with job.phase("evaluation", config.eval_timeout_s):
        result = evaluate(config, job.group, t.workload, t.plain, job.eval_batches(t.eval_loader, pad=True))
        t.tables = result.tables
        job.log(**result.metrics)
    values = ", ".join(f"{name} {value:.4f}" for name, value in sorted(result.metrics.items()))
    job.group.log.info(f"epoch {round(job.step_number / t.steps_per_epoch, 2):g}: {values} on {result.count:,} samples")
