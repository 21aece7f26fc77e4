"""The commands: what each is for, and its options, which are no settings of a training. No torch here."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from .settings import setting


class Options(BaseModel):
    """The options of one command. The docstring of a command's class is its line in --help."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    only_reads: ClassVar[bool] = False  # it starts no rank and leaves nothing behind, so a signal may end it at once


class RankOptions(Options):
    """Of the commands that run as ranks."""

    init_method: str = setting(
        "", "tcp://HOST:PORT or file:///PATH in place of MASTER_ADDR and MASTER_PORT.", metavar="URL")
    rank: int | None = setting(None, "In place of RANK.")
    world_size: int | None = setting(None, "In place of WORLD_SIZE.")


class JsonOptions(Options):
    """Of the commands that have a result to read by a program."""

    as_json: bool = setting(False, "Print JSON, for programs.", alias="json")


class CheckpointOptions(Options):
    """Of the commands that read a checkpoint."""

    checkpoint: str = setting(
        "", "Checkpoint directory, or its address; by default the newest good one of the run.", metavar="DIR")


class TrainOptions(RankOptions):
    """Train; the same command again goes on where it stopped."""


class EvaluateOptions(CheckpointOptions, RankOptions):
    """Evaluate a checkpoint on the test data, exactly, with any number of processes."""


class PredictOptions(CheckpointOptions, RankOptions):
    """Write input, label and probability of each sample to a CSV file."""

    input: str = setting(
        "", "What to predict: an image, a folder of images, or a file of texts; by default the test data.",
        metavar="PATH")
    output: str = setting("predictions.csv", "Where to write.", pattern=r"\.csv$", metavar="FILE",
                          rule="a .csv file")


class ShowOptions(JsonOptions):
    """Print all settings as they would be used, with help, range and unit."""

    only_reads: ClassVar[bool] = True


class DoctorOptions(JsonOptions, RankOptions):
    """Is this machine, and this group of machines, fit to train? Ends with 0, 10 (warnings), 20 (not fit) or 30."""

    alone: bool = setting(False, "Only this machine: as one process, whoever has started it.")


OPTIONS: dict[str, type[Options]] = {
    "train": TrainOptions, "evaluate": EvaluateOptions, "predict": PredictOptions, "show": ShowOptions,
    "doctor": DoctorOptions,
}
