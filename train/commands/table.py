"""The commands by name: each gets the context and its own options, and returns its exit code, or None for success.

Each imports what it needs inside, so that only those pay for torch that use it.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rankup

from ..config import check_world_size, options, refuse_foreign, to_yaml
from ..run import CHOICES
from . import Context


def _train(context: Context, given: options.TrainOptions) -> None:
    refuse_foreign(context.config)
    check_world_size(context.config, context.launch.world_size)
    _start(context, stacks=True)
    with without_collections():
        from ..loop import train

    train(context.config, context.program, run_dir=context.run_dir)


def _evaluate(context: Context, given: options.EvaluateOptions) -> None:
    _start(context)
    with without_collections():
        from .checkpoint import evaluate_checkpoint

    evaluate_checkpoint(context, given)


def _predict(context: Context, given: options.PredictOptions) -> None:
    _start(context)
    with without_collections():
        from .checkpoint import predict

    predict(context, given)


def _start(context: Context, *, stacks: bool = False) -> None:
    context.program.start(context.run_dir, stacks=stacks)


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


def _doctor(context: Context, given: options.DoctorOptions) -> int:
    from ..group import join_options, same_settings

    config, program = context.config, context.program
    try:
        check_world_size(config, context.launch.world_size)
        run_dir = context.run_dir
    except rankup.UserError as error:
        program.found, run_dir = error, Path()
    program.start(guarded=("stderr",) if given.as_json else ("stdout", "stderr"))  # its output is its result
    return program.doctor(
        run_dir, as_json=given.as_json, settings=same_settings(config),
        num_threads=config.num_threads, num_workers=config.num_workers, join_timeout_s=config.join_timeout_s,
        stage_timeout_s=config.step_timeout_s, **join_options(config),
    )


def _show(context: Context, given: options.ShowOptions) -> None:
    text = f"{context.config.model_dump_json()}\n" if given.as_json else to_yaml(context.config, choices=CHOICES)
    rankup.cli.print_whole(text)


COMMANDS: dict[str, Callable[[Context, Any], int | None]] = {
    "train": _train, "evaluate": _evaluate, "predict": _predict, "show": _show, "doctor": _doctor,
}
