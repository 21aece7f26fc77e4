"""The commands by name: each gets the context and its own options, and returns its exit code, or None for success.

Each imports what it needs inside, so that only those pay for torch that use it.
"""

import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rankup.agent.logs import open_log, setup_logging
from rankup.env.rank_env import check_loopback, describe
from rankup.errors import FINISHED, LaunchError
from rankup.group.stacks import open_stacks
from train.commands.context import Context, runs_folder
from train.config import check_world_size, options, to_yaml
from train.run.choices import CHOICES


def _train(context: Context, given: options.TrainOptions) -> None:
    with without_collections():
        from train.loop import train

    check_world_size(context.config, context.launch.world_size)
    _start_rank(context)
    open_stacks(context.run_dir, rank=context.launch.rank, world_size=context.launch.world_size)
    train(context.config, context.launch, run_dir=context.run_dir, log=context.log, stop=context.stop)


def _evaluate(context: Context, given: options.EvaluateOptions) -> None:
    with without_collections():
        from train.commands.evaluate import evaluate_checkpoint

    _start_rank(context)
    evaluate_checkpoint(context, given)


def _predict(context: Context, given: options.PredictOptions) -> None:
    with without_collections():
        from train.commands.predict import predict

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
    from train.commands.export import export

    _refuse_ranks(context)
    export(context, given)


def _refuse_ranks(context: Context) -> None:
    if context.launch.distributed:
        raise LaunchError(f"{context.request.command} must be started by hand, once, "
                          f"got RANK and WORLD_SIZE from {context.launch.launcher}.")


def _doctor(context: Context, given: options.DoctorOptions) -> int:
    from train.commands.doctor import doctor

    return doctor(context, given)


def _explain(context: Context, given: options.ExplainOptions) -> int:
    """Say what logs show: 20 if they show a fault, 0 if nothing is wrong with them."""
    from rankup.explain import FAULTY, explain_logs

    paths = [Path(path) for path in given.paths]
    text, faulty = explain_logs(paths, as_json=given.as_json, run_dir=runs_folder(context.config))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a log may have letters that this locale can't show
    print_whole(f"{text}\n")
    return FAULTY if faulty else FINISHED


def _logs(context: Context, given: options.LogsOptions) -> None:
    from rankup.observe.logs import logs

    logs(runs_folder(context.config), given.run, rank=given.rank, since=given.since, follow=given.follow)


def _stacks(context: Context, given: options.StacksOptions) -> None:
    from rankup.observe.logs import find_logs
    from rankup.observe.stacks import report

    run_dir = find_logs(runs_folder(context.config), given.run).parent
    print_whole(f"{report(run_dir, full=given.full)}\n")


def _status(context: Context, given: options.StatusOptions) -> None:
    from rankup.observe.status import status

    found = status(
        runs_folder(context.config), given.run or context.config.name, watch=given.watch, interval_s=given.interval_s,
        as_json=given.as_json,
    )
    for text in found:
        if not print_whole(text):
            break


def _show(context: Context, given: options.ShowOptions) -> None:
    print_whole(to_yaml(context.config, choices=CHOICES))


def print_whole(text: str) -> bool:
    """For a reader that may have had enough before the end, as `head` and `grep -q` have. Returns whether it reads."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


COMMANDS: dict[str, Callable[[Context, Any], int | None]] = {
    "train": _train, "evaluate": _evaluate, "predict": _predict, "export": _export,
    "show": _show, "doctor": _doctor, "explain": _explain, "logs": _logs, "stacks": _stacks, "status": _status,
}
