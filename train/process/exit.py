"""The one place through which a process of this program ends. No torch here.

A process ends by `os._exit`, never by returning from its main module: at the interpreter's own end Python waits for
threads inside torch, for the workers of a stuck disk and for gloo's teardown, and any of them may wait for a rank that
is dead.

| who ends it                                      | through             | exit code                              |
|--------------------------------------------------|---------------------|----------------------------------------|
| `main`, when its command is over                 | `finish`            | the command's, see `rankup.errors`      |
| `stop`: a signal before a group exists           | `leave`             | 143                                    |
| `watchdog`: a signal that cannot wait for a step | `leave`             | 143                                    |
| `watchdog`: a deadline is over, a peer is lost   | `leave`             | 170, 171, or the code of the lost rank |
| `watchdog`: leaving itself takes too long        | `leave`             | the one it was leaving with            |
| `doctor`: a deadline of its checks is over       | `leave`             | 30                                     |
| a tracker's sender: all is sent, or can't be     | `os._exit`          | 0, which nobody reads                  |
| `die_with_parent`: the parent is gone already    | `leave`             | 137, as if the kernel had done it      |
| the kernel, where no thread of Python can run    | `set_hard_deadline` | 142; 1 where SIGALRM is taken          |

Beside these only the kernel ends a process of ours: SIGKILL, or SIGKILL when its parent ends (`die_with_parent`).
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

# The stacks are dumped by a thread that needs its turn on a busy machine: so long before the kernel ends the process.
DUMP_S = 2.0
T = TypeVar("T")


def finish(code: int) -> NoReturn:
    """End this process with `code` once all that it printed is written."""
    # Without a bound of its own: what a command prints as its result must reach a slow reader (`less`) as a whole
    _flush()
    os._exit(code)


def leave(code: int, last_word: Callable[[], int | None] = lambda: None, *, timeout_s: float = 0.0) -> NoReturn:
    """End this process with `code` after `last_word`, which gets `timeout_s` seconds at most; callable from any thread.

    `last_word` may return another code to end with. What is printed is flushed within that time too: a full pipe, a
    stuck disk or a store that does not answer must not keep a process that has to go.
    """

    def speak() -> int:
        changed = last_word()
        _flush()
        return code if changed is None else changed

    try:
        if timeout_s > 0:
            said = within(timeout_s, speak)
            code = code if said is None else said
    finally:
        os._exit(code)  # even where no thread can be started any more


def _flush() -> None:
    # `logs.guard` has put its own in the place of the last two
    for stream in filter(None, (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        with contextlib.suppress(OSError, ValueError):  # its reader has gone
            stream.flush()


def within(timeout_s: float, work: Callable[[], T]) -> T | None:
    """What `work` returns, or None if it takes longer than `timeout_s` or raises: its thread is left behind then.

    For calls that nothing can interrupt: a resolver, a disk, or a store whose process is stopped.
    """
    found: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(work())

    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else None


def set_hard_deadline(timeout_s: float) -> None:
    """Have the kernel end this process (code 142) in `timeout_s` seconds, unless this is called again before.

    The stacks of all threads are dumped first.
    The last resort for a hang that holds the interpreter's lock, when no thread of ours runs. Where the user's code has
    taken SIGALRM, faulthandler's own thread ends the process; it knows no code but 1.
    """
    if _alarm_is_free():
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
    faulthandler.dump_traceback_later(max(0.1, timeout_s - DUMP_S), exit=not _alarm_is_free())


def clear_hard_deadline() -> None:
    """Take the hard deadline away."""
    faulthandler.cancel_dump_traceback_later()
    if _alarm_is_free():
        signal.setitimer(signal.ITIMER_REAL, 0)


def _alarm_is_free() -> bool:
    return signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
