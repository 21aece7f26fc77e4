"""The metrics of a run: `metrics.jsonl` for programs, TensorBoard for people. Only rank 0 writes them."""

import json
import math
import mmap
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from rankup.errors import disk_errors
from rankup.places.files import open_to_append


@dataclass(slots=True)
class Position:
    """The position of a run at its last commit. Every rank knows it, and `state.json` of a copy contains it."""

    step: int = 0  # how many steps are finished
    evaluated: int = 0  # the step of the last complete evaluation
    metrics: dict[str, float] | None = None  # its results, by names such as eval/accuracy
    line: dict[str, Any] | None = None  # the last training line in `metrics.jsonl`
    epoch: int = 0
    # Batches of each pass over a loader in this epoch; -1: it ended. Of all ranks, if the loader splits them by itself
    streams: list[int] = field(default_factory=list)
    # A digest of the batches of each pass, None if unknown, of the rank that wrote the copy: `rank`
    traces: list[int | None] = field(default_factory=list)
    rank: int = 0
    loaders: list[int] = field(default_factory=list)  # the loader of each pass, numbered in the order of first use
    # Of each `job.cycle`: its finished passes, the batches of its newest pass, and their trace, as in `traces`
    cycles: list[list[int | None]] = field(default_factory=list)
    changes: int = 0  # blocks of `job.change` in this epoch
    ended: str = ""  # why `job.end` ended the run, "" if it did not

    @classmethod
    def of(cls, record: dict[str, Any] | None) -> "Position":
        """Return the position in the `record` of a copy, or the beginning of a run for None."""
        return cls(**{each.name: record[each.name] for each in fields(cls)}) if record else cls()

    @property
    def key(self) -> tuple[int, int, int, str]:
        """A key that is equal for two copies of a run if they hold the same state."""
        return self.step, self.epoch, self.changes, self.ended


class Metrics:
    """Appends to `directory/metrics.jsonl` and `directory/tensorboard/`. Without a directory it does nothing.

    `progress`: the position from which the run resumes. `saved`: its position at the newest checkpoint. Lines that a
    killed attempt wrote past `progress` are cut off, because those steps are done again. Lines that it had no time to
    write are added. `check_owner`: raises PeerLost if another attempt owns the run by now; called before each line.
    Every method raises UserError if the disk is full. The attribute `tensorboard` is torch's SummaryWriter, or None.
    """

    def __init__(
        self, directory: Path | None, progress: Position, *, saved: Position, tensorboard: bool,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_owner = check_owner
        self.tensorboard: Any = None
        self._file = None
        self._disk = partial(disk_errors, "metrics", directory or Path())
        if directory is None:
            return
        with self._disk():
            if tensorboard:
                _must_be_writable(directory / "tensorboard")
            path = directory / "metrics.jsonl"
            entries = cut_after(path, progress.step, progress.evaluated, since=saved.step, check_owner=check_owner)
            # Line buffered: a killed process loses no line
            self._file = open(open_to_append(path), "a", buffering=1, encoding="utf-8")  # noqa: SIM115
            there = {(entry["step"], is_evaluation(entry)) for entry in entries}
            for entry in newest_entries(progress):
                if entry["step"] >= saved.step and (entry["step"], is_evaluation(entry)) not in there:
                    self.write(entry)
                    entries.append(entry)
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # takes half a second, so only if it is used

                check_owner()  # if the next owner's file began before ours, ours would hide its values in TensorBoard
                # An attempt that was killed after its checkpoint may or may not have written later values to its file.
                # TensorBoard hides all values from this step on, and they are written again
                first = saved.step + 1 if saved.evaluated == saved.step else max(1, saved.step)
                self.tensorboard = SummaryWriter(str(directory / "tensorboard"), purge_step=first)
                for entry in entries:
                    if entry["step"] >= first:
                        self._show(entry)

    def write(self, entry: dict[str, Any]) -> None:
        """Append a line. `entry`: what the function `entry` returned."""
        self._check_owner()
        with self._disk():
            if self._file is not None:
                self._file.write(json.dumps(entry) + "\n")
            if self.tensorboard is not None:
                self._show(entry)

    def flush(self) -> None:
        """Make TensorBoard's values survive a kill of this process, as the lines of `metrics.jsonl` always do."""
        with self._disk():
            if self.tensorboard is not None:
                self.tensorboard.flush()

    def close(self) -> None:
        with self._disk():
            if self.tensorboard is not None:
                self.tensorboard.close()
            if self._file is not None:
                self._file.close()

    def _show(self, entry: dict[str, Any]) -> None:
        """Write the values of `entry` to TensorBoard."""
        for name, value in entry.items():
            if name not in ("step", "time"):
                number = math.nan if value is None else value
                self.tensorboard.add_scalar(name, number, entry["step"], walltime=entry.get("time"))


def _must_be_writable(folder: Path) -> None:
    """Raise OSError if no file can be created in `folder`: a thread of TensorBoard would print a traceback."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1000))


def entry(step: int, values: dict[str, float]) -> dict[str, Any]:
    """Return a line of `metrics.jsonl`."""
    # NaN becomes None: JSON has no NaN, and strict readers would refuse the file
    safe = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return {"step": step, "time": round(time.time(), 3), **safe}


def is_evaluation(entry: dict[str, Any]) -> bool:
    """Return whether `job.log` wrote the line. Its names begin with any other word."""
    return any("/" in name and name.split("/")[0] not in ("train", "job") for name in entry)


def newest_entries(progress: Position) -> list[dict[str, Any]]:
    """Return the last lines of training and of evaluation. A killed rank 0 may not have written them."""
    entries = [progress.line] if progress.line is not None else []
    if progress.metrics is not None:
        entries.append(entry(progress.evaluated, progress.metrics))
    return entries


def cut_after(
    path: Path, step: int, evaluated: int, *, since: int = 0, check_owner: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Cut the file before its first line after `step`, or before its evaluation line of `step` unless that evaluation
    is in the state (`evaluated`). A killed attempt wrote such lines past the state from which the run resumes, and that
    work is done again. A damaged line, as a kill or a power cut leaves one, is cut with all that follows.

    The file is read backwards up to the first line of a step before `since`. Reading all of it would delay the restart
    of a long run. Return the kept entries after that line. Raises OSError.
    """
    if not path.is_file() or path.stat().st_size == 0:  # an empty file can't be mapped
        return []
    newer = list[tuple[int, dict[str, Any] | None]]()  # where each line begins, and its entry; the newest line first
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = len(data)
        while end:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            entry = _entry(data[begin:end])
            if entry is not None and entry["step"] < since:
                break
            newer.append((begin, entry))
            end = begin
        check_owner()  # after the open: a later owner works on a new file, see `rankup.places.lease`
        kept = []
        for begin, entry in reversed(newer):
            if entry is None or entry["step"] > (max(evaluated, step - 1) if is_evaluation(entry) else step):
                file.truncate(begin)
                break
            kept.append(entry)
    return kept


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line, or None if the line is damaged or incomplete."""
    try:
        entry: dict[str, Any] = json.loads(line)
        return entry if line.endswith(b"\n") and isinstance(entry["step"], int) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
