"""What is new in a run directory, sent to a tracker: points of `metrics.jsonl`, the newest checkpoint, the result.

No step is sent twice. After a resume the steps since the checkpoint are done again, with the same result to the bit,
and `metrics.jsonl` has them again; trackers can't take a point back, so what they have of these steps stays.
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rankup.places.urls import is_url
from train.process.status import read_json, write_json
from train.run.trackers.table import open_run
from train.run.trackers.tracked_run import KINDS, Facts, Point, TrackedRun

MOST_POINTS = 200  # in one request
FOLDER = "tracker"  # in the run directory
SECRET = re.compile("key|token|secret|password", re.IGNORECASE)


class Sender:
    """Sends what is new in the run directory at each `look`."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.directory = facts, Path(facts.run_dir)
        self.tracked: TrackedRun | None = None
        self.unsent: list[Point] = []  # read from the file, and not known to be at the tracker
        self._sent: dict[str, int] = {}
        self._checkpoint = ""
        self._file: BinaryIO | None = None

    def look(self, state: str = "") -> None:
        """Send what is new. `state`: how the run has ended, empty while it goes on.

        Raises whatever the tracker's package raises. Then the next look begins by asking the tracker what it has.
        """
        try:
            if self.tracked is None:
                self.tracked = open_run(self.facts)
                self._sent = self._sent_before(self.tracked)
            self._send(self.tracked)
            if state == "finished":
                self._send_result(self.tracked)
            if state:
                self.tracked.end(state)
        except Exception:
            self.tracked = None
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def count_unsent(self) -> int:
        """How many lines of `metrics.jsonl` are not known to be at the tracker."""
        return len(self.unsent) + sum(1 for _ in self._new_points())

    def _sent_before(self, tracked: TrackedRun) -> dict[str, int]:
        there = tracked.sent()
        if there is not None:
            return there
        known = read_json(self._state_file) or {}
        return dict(known["sent"]) if known.get("run") == self.facts.run else {}

    def _send(self, tracked: TrackedRun) -> None:
        new = self._new_points()
        self._remember(tracked)
        while True:
            while len(self.unsent) < MOST_POINTS and (point := next(new, None)) is not None:
                self.unsent.append(point)
            if not self.unsent:
                break
            self._log(tracked, [point for point in self.unsent if point.step > self._sent.get(point.kind, -1)])
            self.unsent = []
        newest = newest_checkpoint(self.facts)
        if newest != self._checkpoint:
            tracked.note("checkpoint", newest)
            self._checkpoint = newest

    def _log(self, tracked: TrackedRun, points: list[Point]) -> None:
        if points:
            tracked.log(points)
            self._sent |= {point.kind: point.step for point in points}
            self._remember(tracked)

    def _send_result(self, tracked: TrackedRun) -> None:
        """The files first: where the last values are there, all is."""
        result = read_json(self.directory / "result.json") or {}
        step = result.get("step", -1)
        if step <= self._sent.get("final", -1):
            return
        for path in [*sorted((self.directory / FOLDER / "pictures").glob("*.png")), self.directory / "result.json"]:
            tracked.upload(path)
        tracked.note("digest", result["digest"])
        numbers = {name: value for name, value in result.items() if isinstance(value, int | float)} | result["metrics"]
        values = {f"final/{name}": float(value) for name, value in numbers.items()}
        self._log(tracked, [Point("final", step, time.time(), values)])

    def _new_points(self) -> Iterator[Point]:
        """Those behind what was read before.

        The file stays open. An attempt that resumes cuts off what a killed one wrote past its checkpoint: the killed
        one's sender, if it is still there, finds nothing more, or is in the middle of a line. Raises ValueError there.
        """
        if self._file is None:
            with contextlib.suppress(FileNotFoundError):
                self._file = (self.directory / "metrics.jsonl").open("rb")
        while self._file is not None:
            begin = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):  # the end, or a line that is being written
                self._file.seek(begin)
                return
            if (point := point_of(json.loads(line))) is not None:
                yield point

    @property
    def _state_file(self) -> Path:
        return self.directory / FOLDER / "sent.json"

    def _remember(self, tracked: TrackedRun) -> None:
        """For `status` and the result, and for the next attempt where the tracker can't be asked what it has."""
        facts = {"run": self.facts.run, "tracker": self.facts.tracker, "address": without_secrets(tracked.address)}
        with contextlib.suppress(OSError):  # a full disk: the next save says so
            write_json(self._state_file, {**facts, "sent": self._sent})


def point_of(entry: dict[str, Any]) -> Point | None:
    """A line of `metrics.jsonl` without the curves of each rank and node, of which there may be thousands."""
    kinds = {name: name.split("/")[0] for name in entry}
    values = {name: math.nan if entry[name] is None else entry[name] for name in entry if kinds[name] in KINDS}
    return Point(kinds[next(iter(values))], entry["step"], entry["time"], values) if values else None


def newest_checkpoint(facts: Facts) -> str:
    """Where the newest checkpoint is; empty where there is none. One that has this name is whole."""
    folder = Path(facts.run_dir).resolve() / "checkpoints"
    names = [path.name for path in folder.glob("step-*") if "." not in path.name]
    if not names:
        return ""
    newest = max(names, key=lambda name: (len(name), name))  # the numbers have eight digits or more
    # In a store the name ends in a digest, see `train.run.stored_checkpoint`; the copy there may take a little longer
    return f"{facts.address}/*/checkpoints/{facts.run}/{newest}-*" if is_url(facts.address) else str(folder / newest)


def without_secrets(text: str) -> str:
    """`text` without the users and passwords of addresses, and without any value of a variable that may be a secret."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "***")
    return re.sub(r"://(?:[^/\s@]*:\S*|[^/\s]*)@", "://", text)
