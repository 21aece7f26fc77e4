"""The numbers of a run: where it stands, `metrics.jsonl` for programs, TensorBoard for people. Rank 0 alone writes."""

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from train.errors import disk_error
from train.process.atomic_file import write_atomically


@dataclass(slots=True)
class Progress:
    """Where a run stands. `evaluated`: the last step whose evaluation is complete, `metrics`: its outcome."""

    step: int = 0
    evaluated: int = 0
    metrics: dict[str, float] | None = None


@dataclass(slots=True)
class Speed:
    """Samples per second of training alone: a clock that stands still during set-up, evaluation and saves."""

    batch_size: int
    first_step: int
    _trained_s: float = 0.0
    _began_s: float | None = field(default_factory=time.monotonic)  # None while it stands still

    def pause(self) -> None:
        self._trained_s, self._began_s = self._seconds(), None

    def resume(self) -> None:
        self._began_s = time.monotonic()

    def at(self, step: int) -> float:
        """The mean since this attempt began, with `step` steps of the run done."""
        return (step - self.first_step) * self.batch_size / max(self._seconds(), 1e-9)

    def _seconds(self) -> float:
        return self._trained_s + (time.monotonic() - self._began_s if self._began_s is not None else 0.0)


class Metrics:
    """Appends to `directory/metrics.jsonl` and `directory/tensorboard/`; without a directory it only remembers.

    `step`, `evaluated`: where the run goes on, see `cut_after`. `unit`: what a sample is called, in the plural.
    Every method raises UserError where the disk is full.
    """

    def __init__(
        self, directory: Path | None, *, step: int, evaluated: int, tensorboard: bool, unit: str = "images"
    ) -> None:
        self.directory, self.unit = directory, unit
        self.last: dict[str, float] = {}
        self._writer: Any = None
        self._file = None
        if directory is None:
            return
        with self._disk():
            path = directory / "metrics.jsonl"
            cut_after(path, step, evaluated)
            self._file = path.open("a", buffering=1, encoding="utf-8")  # a line is in the file as soon as it is written
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # half a second: only where it is used

                threading.excepthook = _ignore_os_errors
                # TensorBoard hides what a killed attempt wrote from this step on: those steps are done again
                self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else None)

    def training(self, step: int, loss: float, rate: float, per_s: float) -> None:
        """`loss`: the mean over the step's global batch, `rate`: the learning rate, `per_s`: samples per second."""
        self.last |= {"loss": loss, "per_s": per_s, "rate": rate}
        self._write(step, {"train/loss": loss, "train/lr": rate, f"train/{self.unit}_per_s": per_s})

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._write(step, {f"eval/{name}": value for name, value in metrics.items()})

    def pictures(self, step: int, pictures: dict[str, torch.Tensor]) -> None:
        """Images of [channels, height, width] for TensorBoard, floats from 0 to 1 or uint8."""
        with self._disk():
            for name, picture in pictures.items():
                if self._writer is not None:
                    self._writer.add_image(name, picture, step)

    def hyperparameters(self, step: int, settings: dict[str, Any], metrics: dict[str, float]) -> None:
        """TensorBoard's HPARAMS tab: the settings of the run beside its final metrics."""
        if self._writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        plain = {k: v if isinstance(v, bool | int | float | str) else json.dumps(v) for k, v in settings.items()}
        finals = {f"final/{name}": value for name, value in metrics.items()}
        with self._disk():
            # Not `add_hparams`: it opens a second file, whose points have no step, and which no resumed run purges
            for summary in hparams(plain, finals):  # type: ignore[no-untyped-call]
                self._writer.file_writer.add_summary(summary, step)
            for name, value in finals.items():
                self._writer.add_scalar(name, value, step)

    def line(self, step: int, total_steps: int) -> str:
        """Where the run stands, as one line for the terminal."""
        if "loss" not in self.last:
            return f"step {step}/{total_steps}"
        return f"step {step}/{total_steps}  loss {self.last['loss']:.4f}  {self.last['per_s']:,.0f} {self.unit}/s"

    def flush(self) -> None:
        """Make TensorBoard's values survive a kill of this process; the lines of `metrics.jsonl` do already."""
        with self._disk():
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        with self._disk():
            if self._writer is not None:
                self._writer.close()
            if self._file is not None:
                self._file.close()

    def _write(self, step: int, values: dict[str, float]) -> None:
        with self._disk():
            if self._file is not None:
                # JSON has no NaN: strict readers would refuse the file
                safe = {name: value if math.isfinite(value) else None for name, value in values.items()}
                self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **safe}) + "\n")
            if self._writer is not None:
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            assert self.directory is not None
            raise disk_error("metrics", self.directory, error) from None


def _ignore_os_errors(failure: threading.ExceptHookArgs) -> None:
    """For TensorBoard's writer thread, which would print a traceback of a full disk: the next write raises it again."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


def cut_after(path: Path, step: int, evaluated: int) -> None:
    """Remove the lines of training after `step` and of evaluation after step `evaluated`, and any half-written line.

    A killed attempt wrote them past its last checkpoint. The resumed run does these steps again: without the cut, each
    would be there twice. Raises OSError.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            limit = evaluated if any(name.startswith("eval/") for name in entry) else step
            if entry["step"] <= limit:
                kept.append(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    write_atomically(path, "".join(line + "\n" for line in kept))
