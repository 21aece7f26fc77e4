"""The commands: what each is for, and its options, which are no settings of a training. No torch here."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from train.config.settings import setting
from train.config.yaml_text import describe


class Options(BaseModel):
    """The options of one command. The docstring of a command's class is its line in --help."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    positional: ClassVar[str] = ""  # the field that takes the words behind the command; it has no flag
    only_reads: ClassVar[bool] = False  # it starts no rank and leaves nothing behind, so a signal may end it at once

    def mistakes(self) -> Iterator[str]:
        """Options that are each right and cannot go together."""
        yield from ()


class InitMethod(Options):
    """Of the commands whose ranks meet."""

    init_method: str = setting(
        "", "tcp://HOST:PORT or file:///PATH in place of MASTER_ADDR and MASTER_PORT.", metavar="URL")


class RankOptions(InitMethod):
    """Of the commands that run as ranks."""

    rank: int | None = setting(None, "In place of RANK.")
    world_size: int | None = setting(None, "In place of WORLD_SIZE.")


class JsonOptions(Options):
    """Of the commands that have a result to read by a program."""

    as_json: bool = setting(False, "The result as JSON too, on one line; all of it for doctor.", alias="json")


class CheckpointOptions(Options):
    """Of the commands that read a checkpoint."""

    checkpoint: str = setting(
        "", "Checkpoint directory, or its address; by default the newest good one of the run.", metavar="DIR")


class ScriptOptions(Options):
    """Of run, and of `launch` and `supervise` with --command run, which pass them on."""

    work_dir: str = setting(
        "", "Folder in which the script runs; by default this one. It is made where it is missing.", metavar="DIR")
    pass_local_rank: Literal["auto", "no", "local_rank", "local-rank"] = setting(
        "auto", "Also give the script its local rank as an argument of this name; auto: where the script declares it.")
    restart_args: str = setting(
        "", "Arguments behind the script's own at each restart, such as --restart-args=--init_from=resume.",
        metavar="WORDS")
    stop_grace_s: float = setting(
        110.0, "Seconds that the script has to end after SIGTERM or SIGINT; then it is killed.", gt=0)

    def mistakes(self) -> Iterator[str]:
        try:
            shlex.split(self.restart_args)
        except ValueError as error:
            yield f"--restart-args must be words as a shell splits them, got {describe(self.restart_args)}: {error}."


class RunOptions(ScriptOptions):
    """Run any PyTorch script, unchanged: run SCRIPT ARGS... or run -m MODULE ARGS..."""


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
    lang: Literal["auto", "en", "zh"] = setting(
        "auto", "Language of the answer; auto: Chinese where LC_ALL, LC_MESSAGES or LANG is, but --json is English.")

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


class CompareOptions(Options):
    """Train with each method and launcher that can run here, several times, and set them side by side."""

    processes: int = setting(2, "Processes of each variant that takes several.", ge=2)
    only: str = setting("", "Which variants to compare, as none,ddp; by default all.", metavar="LIST")
    repeats: int = setting(3, "Runs of each variant.", ge=1)


class SupervisorOptions(JsonOptions, ScriptOptions):
    """Of the commands that start ranks and start each anew that is lost."""

    command: Literal["train", "run", "doctor"] = setting(
        "train", "What the processes do; run is followed by SCRIPT ARGS...")
    max_restarts: int = setting(3, "Restarts of a lost rank, at most, in a row without a new step.", ge=0)
    preflight: bool = setting(
        False, "First have doctor check this machine alone; if it is not fit, no process is started.")
    restart_on: str = setting(
        "", "Exit codes of a script below 128 that are worth a restart, as 1,75.", metavar="LIST",
        pattern=r"^([0-9]{1,3}(,[0-9]{1,3})*)?$", rule="exit codes, such as 1,75")

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.restart_on and self.command != "run":
            yield f"--restart-on must be used with --command run, not with {self.command}: its codes say it already."
        if {0, 2, 143} & self.restart_codes:
            yield "--restart-on must name neither 0 (finished) nor 2 (a mistake) nor 143 (stopped on request)."

    @property
    def restart_codes(self) -> set[int]:
        return {int(code) for code in self.restart_on.split(",") if code}


class SuperviseOptions(SupervisorOptions, RankOptions):
    """Start the one process that the environment describes, in a container or task; restarts it where it helps."""


class LaunchOptions(SupervisorOptions, InitMethod):
    """Start several processes of `train` on this node; keeps exit codes, restarts what it helps."""

    nproc: int = setting(1, "Processes on this node.", ge=1)
    nnodes: int = setting(1, "Nodes; run the same command on each.", ge=1)
    node_rank: int = setting(0, "Which of the nodes this is, from 0.")
    master_addr: str = setting("", "Name or address of node 0, the same on all nodes.", metavar="HOST")
    master_port: int = setting(0, "Port on node 0; 0 takes 29400, or a free one on a single node.", ge=0, le=65535)
    launcher: Literal["processes", "spawn"] = setting("processes", "How: spawn goes through torch.multiprocessing.")

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.command == "run" and self.init_method.startswith("file:"):
            yield "--init-method must be tcp://HOST:PORT with --command run: the script needs an address to meet at."
        if not 0 <= self.node_rank < self.nnodes:
            yield f"--node-rank must be from 0 to {self.nnodes - 1}, got {self.node_rank}."
        if self.init_method and (self.master_addr or self.master_port):
            yield "--init-method must be left out with --master-addr and --master-port. Keep one of them."
        if self.nnodes > 1 and not self.master_addr and not self.init_method:
            yield "--master-addr must name node 0's machine when there are several nodes, got nothing."


OPTIONS: dict[str, type[Options]] = {
    "train": TrainOptions, "run": RunOptions, "evaluate": EvaluateOptions, "predict": PredictOptions,
    "export": ExportOptions, "show": ShowOptions, "doctor": DoctorOptions,
    "explain": ExplainOptions, "logs": LogsOptions, "stacks": StacksOptions, "status": StatusOptions,
    "compare": CompareOptions, "launch": LaunchOptions, "supervise": SuperviseOptions,
}
