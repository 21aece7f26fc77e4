"""How processes start and end: those of an agent, and this one. No torch here.

A process of ours ends by `os._exit`, never by returning from its main module: at the interpreter's own end Python waits
for threads inside torch, for the workers of a stuck disk and for gloo's teardown, and any of them may wait for a rank
that is dead.

`main` ends by `finish` when its command is over; whatever cannot wait (a signal before there are steps, a deadline, a
lost peer) ends by `leave`. Where no thread of Python can run, the kernel ends the process (`set_hard_deadline`: 142,
or 1 where SIGALRM is taken), and it kills a process whose parent has ended (`die_with_parent`: 137).
"""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Container
from typing import NoReturn, TypeVar

from rankup.agent.limits import read
from rankup.timing import DUMP_S

T = TypeVar("T")

# Other processes ----------------------------------------------------------------------------------------------------


def state_of(pid: int) -> str:
    """Its state, such as T; "" for a process that is gone."""
    return "".join(_stat_of(pid)[:1])


def start_of(pid: int) -> str:
    """When it was started, in the kernel's ticks: tells it from a later process with that number. "" once it has ended.
    """
    fields = _stat_of(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]


def began(pid: int) -> float:
    """When it was started, in seconds of `time.time()`, to a hundredth of a second."""
    # psutil adds the same number to the time of the boot, which the kernel tells in whole seconds
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(start_of(pid)) / os.sysconf("SC_CLK_TCK")


def has_handler(pid: int, number: int) -> bool | None:
    """Whether it has a handler for that signal; None where nobody knows."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", read(f"/proc/{pid}/status"), re.MULTILINE)
    return bool(int(caught[1], 16) >> (number - 1) & 1) if caught else None


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends. A fork does not inherit it.

    A launcher that dies of SIGKILL cannot end its ranks: they would train on and hold their GPUs (torch issue 5736).
    """
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the line above
        os._exit(128 + signal.SIGKILL)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to the process alone, which is not reaped yet, SIGTERM in place of a SIGUSR1 that it has no handler
    for. Where it has changed its user the signal is lost."""
    if number == signal.SIGUSR1 and has_handler(pid, number) is False:
        number = signal.SIGTERM
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_session(pid: int) -> None:
    """Kill the process, and those of the session that it leads."""
    for kill in (os.killpg, os.kill):  # it leads no group yet in its first instant
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def end_of(pid: int) -> int:
    """The exit code of a child that has ended, as a shell counts it. What its session has left is killed first, as
    the number may be another process's afterwards: DataLoader workers would keep their memory, and their GPU."""
    kill_session(pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def reap_orphans(keep: Container[int] = ()) -> None:
    """Take the ends of orphans: a container's first process inherits them. `keep`: children that others wait for."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in keep:
            os.waitpid(ended.si_pid, 0)


def _stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


# The end of this process --------------------------------------------------------------------------------------------


def finish(code: int) -> NoReturn:
    """End this process with `code` once all that it printed is written, however slow its reader is (`less`)."""
    _flush()
    os._exit(code)


def leave(code: int, last_word: Callable[[], int | None] = lambda: None, *, timeout_s: float = 0.0) -> NoReturn:
    """End this process, from any thread, with `code` or the one that `last_word` returns. That and the flushing of what
    was printed get `timeout_s` seconds: a full pipe, a stuck disk or a store must not keep a process that has to go."""

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
    """What `work` returns, or None if it takes longer than `timeout_s` or raises: its thread is left behind then. For
    calls that nothing can interrupt: a resolver, a disk, or a store whose process is stopped."""
    found: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(work())

    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else None


def set_hard_deadline(timeout_s: float) -> None:
    """Have the kernel end this process in `timeout_s` seconds, unless this is called again before; the stacks of all
    threads are dumped first. The last resort for a hang that holds the interpreter's lock. Where the user's code has
    taken SIGALRM, faulthandler's own thread ends the process; it knows no code but 1."""
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
