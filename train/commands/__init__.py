"""The commands by name: each gets the settings, this process and its own options, and returns its exit code, or None
for success. Each imports what it needs inside, so that only those pay for torch that use it."""

import gc
import importlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rankup
from rankup import Program

from ..config import Config, check_world_size, options, refuse_foreign, to_yaml


def run_dir_of(config: Config, program: Program) -> Path:
    """The folder of the run: named by the settings, by the scheduler's job, or by what is trained."""
    dataset = re.sub(r"[^\w.-]+", "-", Path(config.dataset).name.removeprefix("hf:")).strip(".-")  # hf:FOLDER
    default = f"{dataset}-{config.model}" if config.workload == "images" else config.workload.partition(":")[0]
    return program.runs_folder(config.run_dir) / (config.name or program.rank_env.run_name or default)


def _imported(module: str, name: str) -> Any:
    """Of a module that is slow to import, without garbage collection: torch's 350,000 objects live as long as the
    process. Collections would take a fifth of the import, and later walk them again, 0.15 s in the middle of a step."""
    gc.disable()
    try:
        return getattr(importlib.import_module(module, __package__), name)
    finally:
        gc.freeze()
        gc.enable()


def _train(config: Config, program: Program, given: options.TrainOptions) -> None:
    refuse_foreign(config)
    check_world_size(config, program.rank_env.world_size)
    run_dir = run_dir_of(config, program)
    program.start(run_dir, stacks=True)
    _imported("..loop", "train")(config, program, run_dir=run_dir)


def _read_checkpoint(name: str, config: Config, program: Program, given: options.CheckpointOptions) -> None:
    run_dir = run_dir_of(config, program)
    program.start(run_dir)
    _imported(".checkpoint", name)(config, program, run_dir, given)


def _doctor(config: Config, program: Program, given: options.DoctorOptions) -> int:
    from ..group import join_options

    try:
        check_world_size(config, program.rank_env.world_size)
        run_dir = run_dir_of(config, program)
    except rankup.UserError as error:
        program.found, run_dir = error, Path()
    program.start(guarded=("stderr",) if given.as_json else ("stdout", "stderr"))  # its output is its result
    return program.doctor(
        run_dir, as_json=given.as_json, num_threads=config.num_threads, num_workers=config.num_workers,
        join_timeout_s=config.join_timeout_s, **join_options(config),
    )


def _show(config: Config, program: Program, given: options.ShowOptions) -> None:
    text = f"{config.model_dump_json()}\n" if given.as_json else to_yaml(config)
    rankup.cli.print_whole(text)


COMMANDS: dict[str, Callable[[Config, Program, Any], int | None]] = {
    "train": _train, "evaluate": partial(_read_checkpoint, "evaluate_checkpoint"),
    "predict": partial(_read_checkpoint, "predict"), "show": _show, "doctor": _doctor,
}
