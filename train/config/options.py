"""The commands: what each is for, and its options, which are no settings of a training. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from train.config.settings import setting


class Options(BaseModel):
    """The options of one command. The docstring of a command's class is its line in --help."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    positional: ClassVar[str] = ""  # the field that takes the words behind the command; it has no flag
    only_reads: ClassVar[bool] = False  # it starts no rank and leaves nothing behind, so a signal may end it at once

    def mistakes(self) -> Iterator[str]:
        """Options that are each right and cannot go together."""
        yield from ()


class RankOptions(Options):
    """Of the commands that run as ranks."""

    init_method: str = setting(
        "", "tcp://HOST:PORT or file:///PATH in place of MASTER_ADDR and MASTER_PORT.", metavar="URL")
    rank: int | None = setting(None, "In place of RANK.")
    world_size: int | None = setting(None, "In place of WORLD_SIZE.")


class JsonOptions(Options):
    """Of the commands that have a result to read by a program."""

    as_json: bool = setting(False, "The result as JSON too, on one line; all of it for doctor.", alias="json")


class CheckpointOptions(Options):
    """Of the commands that read a checkpoint."""

    checkpoint: str = setting(
        "", "Checkpoint directory, or its address; by default the newest good one of the run.", metavar="DIR")


class TrainOptions(RankOptions):
    """Train; the same command again goes on where it stopped."""


class EvaluateOptions(CheckpointOptions, RankOptions):
    """Evaluate a checkpoint on the test data, exactly, with any number of processes."""


class PredictOptions(CheckpointOptions, RankOptions):
    """Write input, label and probability of each sample to a CSV or JSONL file."""

    input: str = setting(
        "", "What to predict: an image or a folder of them, a file of texts, or - for standard input; by default the "
        "test data.", metavar="PATH")
    output: str = setting("predictions.csv", "Where to write.", pattern=r"\.(csv|jsonl)$", metavar="FILE",
                          rule="a .csv or .jsonl file")


class ExportOptions(CheckpointOptions):
    """Write the weights of a checkpoint, plain or sharded, to one file."""

    output: str = setting("model.pt", "Where to write the weights.", min_length=1, metavar="FILE", rule="a file's name")


class ShowOptions(Options):
    """Print all settings as they would be used, with help, range and unit."""

    only_reads: ClassVar[bool] = True


class DoctorOptions(JsonOptions, RankOptions):
    """Is this machine, and this group of machines, fit to train? Ends with 0, 10 (warnings), 20 (not fit) or 30."""

    alone: bool = setting(False, "Only this machine: as one process, whoever has started it.")


class ExplainOptions(JsonOptions):
    """Say which fault the logs of a failed job show, on which rank, and what to do. Ends with 0 or 20."""

    positional: ClassVar[str] = "paths"
    only_reads: ClassVar[bool] = True
    paths: tuple[str, ...] = setting(
        (), "Logs of a failed job, whoever started it: files, folders, a run's directory, or - for standard input.",
        metavar="PATH...")

    def mistakes(self) -> Iterator[str]:
        if not self.paths:
            yield "explain must be followed by a log file, a folder or - for standard input, got nothing."


class LogsOptions(Options):
    """Print what all ranks of a run wrote, by time; equal lines of several ranks as one."""

    positional: ClassVar[str] = "run"
    only_reads: ClassVar[bool] = True
    run: str = setting("", "A run's name or folder; by default the one that wrote last.", metavar="[RUN]")
    rank: str = setting("", "Only these ranks, such as 3 or 0-3,7.", metavar="LIST")
    since: str = setting("", "Nothing older, such as 10m, 2h30m, 14:05 or 2026-11-22T14:05.", metavar="TIME")
    follow: bool = setting(False, "Go on with what is written from now on, until Ctrl-C.")


class StacksOptions(Options):
    """Say where each rank of a run is now, and which are somewhere else than the others; for a run that hangs."""

    positional: ClassVar[str] = "run"
    only_reads: ClassVar[bool] = True
    run: str = setting("", "A run's name or folder; by default the one that wrote last.", metavar="[RUN]")
    full: bool = setting(False, "The stacks of all threads too.")


class StatusOptions(Options):
    """Say how a run stands, also while it trains: steps, speed, time left, each rank, restarts, goodput."""

    positional: ClassVar[str] = "run"
    only_reads: ClassVar[bool] = True

    run: str = setting("", "A run's name or folder; by default all runs in run_dir, a line each.", metavar="[RUN]")
    watch: bool = setting(False, "Show it anew every interval until the run ends.")
    interval_s: float = setting(2.0, "Seconds between two looks of --watch.", gt=0)
    as_json: bool = setting(False, "As JSON, on one line.", alias="json")


OPTIONS: dict[str, type[Options]] = {
    "train": TrainOptions, "evaluate": EvaluateOptions, "predict": PredictOptions,
    "export": ExportOptions, "show": ShowOptions, "doctor": DoctorOptions,
    "explain": ExplainOptions, "logs": LogsOptions, "stacks": StacksOptions, "status": StatusOptions,
}
