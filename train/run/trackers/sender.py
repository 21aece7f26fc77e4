"""The process that sends a run to its tracker. Rank 0 starts it, and tells it two things: the facts, and how it ended.

All else it reads from the run directory, where rank 0 writes it anyway: `metrics.jsonl` is the queue. So a server that
is down for an hour costs no memory and loses nothing, and the next attempt sends what this one could not. A process and
not a thread: importing MLflow alone takes two seconds, for all of which a thread would fight the training for Python's
lock, and a fault in such a package would be a fault of rank 0.

No step is sent twice. After a resume the steps since the checkpoint are done again, with the same result to the bit,
and `metrics.jsonl` has them again; trackers can't take a point back, so what they have of these steps stays.

Run: python -m train.run.trackers.sender      (`train.run.trackers.tracker` does)
"""

import contextlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from train.process.exit import finish, leave
from train.process.status import read_json, write_json
from train.run.trackers.table import open_run
from train.run.trackers.tracked_run import KINDS, Facts, Point, TrackedRun

LOOK_S = 2.0  # between two looks into the run directory
LONGEST_PAUSE_S = 60.0  # between two attempts to reach a server that does not answer
END_S = 15.0  # how long this process may go on after rank 0 has ended, or has been killed
MOST_POINTS = 200  # in one request
FOLDER = "tracker"  # in the run directory
LONGEST_REASON = 120  # characters
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
        newest = newest_checkpoint(self.directory)
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

        The file stays open: an attempt that resumes replaces it, and this process, if it is still there, must go on in
        the old one and end.
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


def newest_checkpoint(run_dir: Path) -> str:
    """The path of the newest checkpoint; empty where there is none. One that has this name is whole."""
    names = [path.name for path in (run_dir / "checkpoints").glob("step-*") if "." not in path.name]
    # The numbers have eight digits or more
    return str(run_dir.resolve() / "checkpoints" / max(names, key=lambda name: (len(name), name))) if names else ""


def without_secrets(text: str) -> str:
    """`text` without the users and passwords of addresses, and without any value of a variable that may be a secret."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "***")
    return re.sub(r"://[^/\s@]*@", "://", text)


class Voice:
    """Lines for rank 0's log. What the packages print goes nowhere: they print addresses with passwords in them."""

    def __init__(self, tracker: str, channel: TextIO) -> None:
        self._tracker, self._channel = tracker, channel

    def say(self, level: str, text: str) -> None:
        """`level`: info or warning."""
        line = without_secrets(" ".join(text.split()))
        with contextlib.suppress(OSError):  # rank 0 was killed
            print(level, f"tracker {self._tracker}: {line}", file=self._channel, flush=True)


class Ending:
    """How rank 0 ended, from its line on standard input. Killed, it closes it without a word."""

    def __init__(self, voice: Voice) -> None:
        self.state, self._voice = "", voice
        self._over = threading.Event()
        threading.Thread(target=self._listen, name="ending", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        self._over.wait(timeout_s)

    def _listen(self) -> None:
        self.state = sys.stdin.readline().strip() or "failed"
        self._over.set()
        time.sleep(END_S)
        # The package may be waiting for a server that does not answer
        self._voice.say("warning", f"not all could be sent within {END_S:g} s. The same command again sends the rest.")
        leave(1)


def run(sender: Sender, ending: Ending, voice: Voice) -> None:
    """Look until rank 0 has ended, and once more then."""
    pause_s, failing, seen = 0.0, False, False
    while True:
        ending.wait(pause_s)
        state = ending.state
        try:
            sender.look(state)
            if not seen and sender.tracked is not None:
                voice.say("info", sender.tracked.address)
            elif failing:
                voice.say("info", "answers again")
            pause_s, failing, seen = LOOK_S, False, True
        except Exception as error:  # what packages raise has nothing in common
            why = "" if failing else f"{reason(error)}. "
            if state:
                missing = f"{sender.count_unsent()} lines of metrics.jsonl are not known to be there"
                voice.say("warning", f"{why}{missing}. The same command again sends them.")
            elif why:
                voice.say("warning", f"{why}Training goes on; what is missing is sent once this works.")
            pause_s, failing = min(max(LOOK_S, 2 * pause_s), LONGEST_PAUSE_S), True
        if state:
            return


def reason(error: BaseException) -> str:
    """The error as one line that fits a terminal: what was tried, and the error at the bottom of it."""
    text = " ".join(str(error).split())
    root = error
    while (below := root.__cause__ or root.__context__) is not None:
        root = below
    if root is error or len(text) < LONGEST_REASON:
        return text[:LONGEST_REASON].rstrip(". ")
    return f"{text[:LONGEST_REASON]}... ({' '.join(str(root).split())[:LONGEST_REASON]})"


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One sender of a run at a time: that of a killed rank 0 may still be sending its last lines."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # Windows, and some network file systems, have no such locks
            import fcntl

            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("a", encoding="ascii"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if hasattr(os, "nice"):
        os.nice(10)  # the ranks of this node come first
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):  # a stop is rank 0's affair: it says when it has saved
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    facts = Facts(**json.loads(sys.stdin.readline()))
    voice = Voice(facts.tracker, channel)
    ending = Ending(voice)
    with alone(Path(facts.run_dir) / FOLDER), contextlib.closing(Sender(facts)) as sender:
        run(sender, ending, voice)
    finish(0)


if __name__ == "__main__":
    main()
