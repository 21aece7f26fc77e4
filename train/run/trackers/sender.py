"""The process that sends a run to its tracker. Rank 0 starts it, and tells it two things: the facts, and how it ended.

All else it reads from the run directory, where rank 0 writes it anyway: `metrics.jsonl` is the queue. So a server that
is down for an hour costs no memory and loses nothing, and the next attempt sends what this one could not. A process and
not a thread: importing MLflow alone takes two seconds, for all of which a thread would fight the training for Python's
lock, and a fault in such a package would be a fault of rank 0.

Run: python -m train.run.trackers.sender      (`train.run.trackers.tracker` does)
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from train.process.exit import finish, leave
from train.run.trackers.sending import FOLDER, Sender, without_secrets
from train.run.trackers.tracked_run import Facts

LOOK_S = 2.0  # between two looks into the run directory
LONGEST_PAUSE_S = 60.0  # between two attempts to reach a server that does not answer
END_S = 15.0  # how long this process may go on after rank 0 has ended, or has been killed
LONGEST_REASON = 120  # characters


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
        with contextlib.suppress(OSError):  # some network file systems have no such locks
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("a", encoding="ascii"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(10)  # the ranks of this node come first
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):  # a stop is rank 0's affair: it says when it has saved
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    facts = Facts(**json.loads(sys.stdin.readline()))
    voice = Voice(facts.tracker, channel)
    ending = Ending(voice)
    with alone(Path(facts.run_dir) / FOLDER), contextlib.closing(Sender(facts)) as sender:
        run(sender, ending, voice)
    finish(0)


if __name__ == "__main__":
    main()
