"""The table of commands. The fields of a command are its options. A command imports its code when it runs, so that only
commands that use torch spend the time to import it."""

import gc
import importlib
import re
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

import rankup
from rankup import Program

from ..config import Config, check_run, to_yaml
from ..config.setting import setting


def run_dir_of(config: Config, program: Program) -> Path:
    """Return the folder of the run. It has the name `name`, else that of the scheduler's job or of what is trained."""
    dataset = re.sub(r"[^\w.-]+", "-", Path(config.dataset).name.removeprefix("hf:")).strip(".-")  # hf:FOLDER
    default = f"{dataset}-{config.model}" if config.workload == "images" else config.workload.partition(":")[0]
    job = getattr(program.found, "run_name", None)  # `found` may be a UserError, which doctor reports
    return rankup.cli.runs_folder(config.run_dir) / (config.name or job or default)


def _imported(module: str, name: str) -> Any:
    """Import a slow module without garbage collection. torch's 350,000 objects live as long as the process. Collections
    would take a fifth of the import time, and later walk all of them again, 0.15 s in the middle of a step."""
    gc.disable()
    try:
        return getattr(importlib.import_module(module, __package__), name)
    finally:
        gc.freeze()
        gc.enable()


class Command(BaseModel):
    """Base class of commands. The docstring of a command is its text in --help."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    examples: ClassVar[tuple[str, ...]] = ()

    config: str | None = setting(None, "YAML file of settings. Flags outrank it.", min_length=1, rule="a file's name")

    def run(self, config: Config, program: Program) -> int | None:
        """Run the command with these settings. Return the exit code, or None for success."""
        raise NotImplementedError


class RankCommand(Command):
    """Base class of commands that run as ranks."""

    init_method: str = setting("", "tcp://HOST:PORT or file:///PATH in place of MASTER_ADDR.")
    rank: int | None = setting(None, "This process's rank, in place of RANK.")
    world_size: int | None = setting(None, "Number of ranks, in place of WORLD_SIZE.")


class Train(RankCommand):
    """Train. The same command resumes a run that stopped."""

    examples = ("train --model resnet18 --epochs 5", "train --config train/configs/tiny.yaml --name mine")

    fresh: bool = setting(False, "Start from the beginning even if the run has checkpoints.")

    def run(self, config: Config, program: Program) -> None:
        check_run(config, program.rank_env.world_size)
        run_dir = run_dir_of(config, program)
        program.start(run_dir, stacks=True, on_end=config.on_end)
        _imported("..loop", "train")(config, program, run_dir=run_dir, fresh=self.fresh)


class CheckpointCommand(RankCommand):
    """Base class of commands that read a checkpoint."""

    function: ClassVar[str]  # in commands/checkpoint.py

    checkpoint: str = setting("", "Checkpoint directory, or its address; by default the newest good one of the run.")

    def run(self, config: Config, program: Program) -> None:
        run_dir = run_dir_of(config, program)
        program.start(run_dir)
        _imported(".checkpoint", self.function)(config, program, run_dir, self)


class Evaluate(CheckpointCommand):
    """Evaluate a checkpoint on the test data, exactly, with any number of processes."""

    examples = ("evaluate --name mine", "evaluate --checkpoint runs/mine/checkpoints/step-00000110")
    function = "evaluate_checkpoint"


class Predict(CheckpointCommand):
    """Write input, label and probability of each sample to a CSV file."""

    examples = ("predict --name mine --output predictions.csv", "predict --name mine --input photos/")
    function = "predict"

    input: str = setting("", "What to predict: an image, a folder of images, or a file of texts; by default the test "
                         "data.")
    output: str = setting("predictions.csv", "Where to write.", pattern=r"\.csv$", rule="a .csv file")


class Show(Command):
    """Print all settings as they would be used, with help and range."""

    examples = ("show", "show --config mine.yaml --lr 0.1 > full.yaml", "show --json")

    as_json: bool = setting(False, "Print JSON, for programs.", alias="json")

    def run(self, config: Config, program: Program) -> None:
        rankup.cli.print_whole(f"{config.model_dump_json()}\n" if self.as_json else to_yaml(config))


class Doctor(RankCommand):
    """Check whether the machines are fit to train. Exit code: 0 fit, 10 warnings, 20 not fit, 30 not completed."""

    examples = ("doctor", "doctor --alone --json")

    as_json: bool = setting(False, "Print JSON, for programs.", alias="json")
    alone: bool = setting(False, "Check only this machine, as one process, under any launcher.")
    # slurm/ passes the arguments of the training to doctor
    fresh: bool = setting(False, "No effect; accepted because doctor takes the arguments of a training.")

    def run(self, config: Config, program: Program) -> int:
        from ..group import join_options

        program.start(guarded=not self.as_json)  # with --json the output is the result: a lost reader is an error
        return program.doctor(
            run_dir_of(config, program), as_json=self.as_json, num_threads=config.num_threads,
            num_workers=config.num_workers, join_timeout_s=config.join_timeout_s, **join_options(config),
        )


COMMANDS: dict[str, type[Command]] = {
    "train": Train, "evaluate": Evaluate, "predict": Predict, "show": Show, "doctor": Doctor,
}
