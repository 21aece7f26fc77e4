"""The numbers of a run: `metrics.jsonl` for programs, TensorBoard for people. Rank 0 alone writes."""

import json
import math
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from rankup.errors import disk_errors


@dataclass(slots=True)
class Position:
    """Where a run stood at its last commit; every rank knows it, and `state.json` of a copy has it."""

    step: int = 0  # finished ones
    evaluated: int = 0  # the last step whose evaluation is complete
    metrics: dict[str, float] | None = None  # its outcome
    line: dict[str, Any] | None = None  # the last one of training in `metrics.jsonl`
    epoch: int = 0
    streams: list[int] = field(default_factory=list)  # batches of each pass over a loader in this epoch; -1: it is over
    loaders: list[int] = field(default_factory=list)  # of each pass, in the order in which the loaders began
    changes: int = 0  # blocks of `job.change` in this epoch

    @classmethod
    def of(cls, record: dict[str, Any] | None) -> "Position":
        """As a copy's record has it; a run's beginning for None."""
        return cls(**{each.name: record[each.name] for each in fields(cls)}) if record else cls()

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Equal for two copies that hold the same state."""
        return self.step, self.epoch, self.changes, self.evaluated


class Metrics:
    """Appends to `directory/metrics.jsonl` and `directory/tensorboard/`; without a directory it does nothing.

    `progress`: where the run goes on, `saved`: where it stood at its newest checkpoint. What a killed attempt wrote
    past `progress` is cut off, for those steps are done again; what it had no time to write is added. `check_owner`:
    raises PeerLost where another attempt owns the run by now; called before each line. Every method raises UserError
    where the disk is full.
    """

    def __init__(
        self, directory: Path | None, progress: Position, *, saved: Position, tensorboard: bool,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_owner = check_owner
        self._writer: Any = None
        self._file = None
        self._disk = partial(disk_errors, "metrics", directory or Path())
        if directory is None:
            return
        with self._disk():
            path = directory / "metrics.jsonl"
            entries = cut_after(path, progress.step, progress.evaluated, since=saved.step, check_owner=check_owner)
            self._file = path.open("a", buffering=1, encoding="utf-8")  # a line is in the file as soon as it is written
            there = {(entry["step"], is_evaluation(entry)) for entry in entries}
            for entry in newest_entries(progress):
                if entry["step"] >= saved.step and (entry["step"], is_evaluation(entry)) not in there:
                    self.write(entry)
                    entries.append(entry)
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # half a second: only where it is used

                check_owner()  # else a file that begins later would hide the next owner's values
                # TensorBoard's values of an attempt that was killed since its checkpoint may be in its file or not:
                # TensorBoard hides all of them from this step on, and they are written again
                first = saved.step + 1 if saved.evaluated == saved.step else max(1, saved.step)
                self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=first)
                for entry in entries:
                    if entry["step"] >= first:
                        self._show(entry)

    def write(self, entry: dict[str, Any]) -> None:
        """`entry`: of the function `entry`."""
        self._check_owner()
        with self._disk():
            if self._file is not None:
                self._file.write(json.dumps(entry) + "\n")
            if self._writer is not None:
                self._show(entry)

    def text(self, name: str, text: str, *, step: int) -> None:
        """For TensorBoard, which reads it as Markdown."""
        if self._writer is not None:
            with self._disk():
                self._writer.add_text(name, text, step)

    def hyperparameters(self, settings: dict[str, Any]) -> None:
        """TensorBoard's HPARAMS tab: `settings`, such as `batch_size`, beside the newest values of the run's curves.

        Without the list of columns that torch writes: of several runs' lists the tab shows the first one's alone.
        """
        if self._writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        _, *session = hparams(settings, {})  # type: ignore[no-untyped-call]
        with self._disk():
            for summary in session:
                self._writer.file_writer.add_summary(summary)

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

    def _show(self, entry: dict[str, Any]) -> None:
        """In TensorBoard."""
        for name, value in entry.items():
            if name not in ("step", "time"):
                number = math.nan if value is None else value
                self._writer.add_scalar(name, number, entry["step"], walltime=entry.get("time"))


def entry(step: int, values: dict[str, float]) -> dict[str, Any]:
    """A line of `metrics.jsonl`."""
    # JSON has no NaN: strict readers would refuse the file
    safe = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return {"step": step, "time": round(time.time(), 3), **safe}


def evaluation(step: int, metrics: dict[str, float]) -> dict[str, Any]:
    return entry(step, {f"eval/{name}": value for name, value in metrics.items()})


def is_evaluation(entry: dict[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in entry)


def newest_entries(progress: Position) -> list[dict[str, Any]]:
    """The last lines of training and of evaluation. A killed rank 0 may not have written them."""
    entries = [progress.line] if progress.line is not None else []
    if progress.metrics is not None:
        entries.append(evaluation(progress.evaluated, progress.metrics))
    return entries


def cut_after(
    path: Path, step: int, evaluated: int, *, since: int = 0, check_owner: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Cut the file before its first line of training after `step`, or of evaluation after step `evaluated`: a killed
    attempt wrote it past the state that the run goes on from, and those steps are done again. From a damaged line on,
    as a kill or a power cut leaves one, nothing stays.

    What stands before a line of a step before `since` is neither read nor judged: a restart of a long run would wait
    for it. Returns the entries behind that line that stay. Raises OSError.
    """
    if not path.is_file() or path.stat().st_size == 0:  # which can't be mapped
        return []
    newer = list[tuple[int, dict[str, Any] | None]]()  # where each line begins, and what it holds; the newest first
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = len(data)
        while end:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            entry = _entry(data[begin:end])
            if entry is not None and entry["step"] < since:
                break
            newer.append((begin, entry))
            end = begin
        check_owner()  # now that it is open: the next owner's file is another one, see `rankup.places.lease`
        kept = []
        for begin, entry in reversed(newer):
            if entry is None or entry["step"] > (evaluated if is_evaluation(entry) else step):
                file.truncate(begin)
                break
            kept.append(entry)
    return kept


def _entry(line: bytes) -> dict[str, Any] | None:
    """None for a damaged line, or half of one."""
    try:
        entry: dict[str, Any] = json.loads(line)
        return entry if line.endswith(b"\n") and isinstance(entry["step"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
