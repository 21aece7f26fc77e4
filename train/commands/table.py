"""The commands by name: each gets the context and its own options, and returns its exit code, or None for success.

Each imports what it needs inside, so that only those pay for torch that use it.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rankup.agent.logs import open_log, setup_logging
from rankup.cli import print_whole
from rankup.env.rank_env import RankEnv, check_loopback, describe
from rankup.errors import LaunchError, UserError
from rankup.group.stacks import open_stacks

from ..config import check_world_size, options, refuse_foreign, to_yaml
from ..run import CHOICES
from .context import Context


def _train(context: Context, given: options.TrainOptions) -> None:
    with without_collections():
        from ..loop import train

    refuse_foreign(context.config)
    check_world_size(context.config, context.launch.world_size)
    _start_rank(context)
    open_stacks(context.run_dir, rank=context.launch.rank, world_size=context.launch.world_size)
    train(context.config, context.launch, run_dir=context.run_dir, log=context.log, stop=context.stop)


def _evaluate(context: Context, given: options.EvaluateOptions) -> None:
    with without_collections():
        from .checkpoint import evaluate_checkpoint

    _start_rank(context)
    evaluate_checkpoint(context, given)


def _predict(context: Context, given: options.PredictOptions) -> None:
    with without_collections():
        from .predict import predict

    _start_rank(context)
    predict(context, given)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Around slow imports: no garbage is collected in the block, nor ever in what it imported.

    torch and what belongs to it are 350,000 objects, which live as long as the process. Importing them triggers
    collections, which take a fifth of the time to find 8 MB; each full one later would walk them again, 0.15 s in the
    middle of a step, and in a forked process it would copy the pages that it marks.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _start_rank(context: Context) -> None:
    check_loopback(context.launch, context.config.simulated_nodes)
    launch = context.launch
    file = open_log(context.run_dir / "logs" / f"rank-{launch.rank}.log")
    setup_logging(rank=launch.rank, world_size=launch.world_size, file=file)
    for warning in launch.warnings:
        context.log.warning(warning)
    if launch.distributed:
        context.log.info(describe(launch))


def _export(context: Context, given: options.ExportOptions) -> None:
    from .checkpoint import export

    if context.launch.distributed:
        raise LaunchError(
            f"export must be started by hand, once, got RANK and WORLD_SIZE from {context.launch.launcher}."
        )
    export(context, given)


def _doctor(context: Context, given: options.DoctorOptions) -> int:
    from rankup.doctor.stages import Plan, doctor

    from ..group import backend_of, device_of, longest_phase_s, same_settings

    config, found = context.config, context.found
    try:
        check_loopback(context.launch, config.simulated_nodes)
        check_world_size(config, context.launch.world_size)
    except UserError as error:
        found = error
    plan = Plan(
        settings=same_settings(config), device=device_of(config), backend=backend_of(config),
        num_threads=config.num_threads, num_workers=config.num_workers, join_timeout_s=config.join_timeout_s,
        stage_timeout_s=config.step_timeout_s, longest_phase_s=longest_phase_s(config),
    )
    run_dir = context.run_dir if isinstance(found, RankEnv) else Path()
    return doctor(found, run_dir, plan, stop=context.stop, log=context.log, as_json=given.as_json)


def _show(context: Context, given: options.ShowOptions) -> None:
    text = f"{context.config.model_dump_json()}\n" if given.as_json else to_yaml(context.config, choices=CHOICES)
    print_whole(text)


COMMANDS: dict[str, Callable[[Context, Any], int | None]] = {
    "train": _train, "evaluate": _evaluate, "predict": _predict, "export": _export,
    "show": _show, "doctor": _doctor,
}
