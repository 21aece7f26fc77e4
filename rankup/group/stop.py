"""Signals: a thread beside the loop receives requests to stop and requests for stacks.

SIGTERM, SIGINT, SIGUSR1 and SIGHUP set a flag that the loop checks; they never interrupt a step. SIGUSR2 asks for the
stacks of all threads. Once the rank has a group, the same thread reads the rank's line to the other ranks, and watches
the clock (`rankup.group.watchdog`). This module does not import torch, so that it can handle signals during that
import: the kernel ignores SIGTERM for a container's first process unless the process handles it.
"""

import contextlib
import faulthandler
import gc
import json
import logging
import math
import os
import re
import select
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rankup.agent.logs import announce_stacks
from rankup.agent.processes import leave
from rankup.agent.record import Record
from rankup.env.rank_env import holders, ranges
from rankup.errors import STOPPED
from rankup.timing import PARTING_S, REPEAT_S

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
TAKEN = (*STOP_SIGNALS, signal.SIGUSR2)  # SIGUSR2 asks for the stacks
WAKE = b"\0"  # no signal has the number 0


class StopRequest:
    """Records whether this process was asked to stop, and by which signal.

    A thread reads the signals from a wake-up socket. Python's own handlers run only in the main thread, and do not run
    while the main thread waits in a collective. But a second signal must end the process even then.

    `signal_name`: the first signal that came, or ""; a later SIGTERM or SIGINT replaces SIGUSR1. `watch`: the group's
    Watchdog, once there is a group. The thread calls its `tick`. Call `wake` after you change `watch`.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self.watch: Any = None  # a Watchdog; its module imports this one
        # False before the first step: a signal then ends the process at once, because importing torch, joining and
        # downloading may take longer than the grace period. Later there is state to save, so a signal sets the flag
        self.finish_step_first = False
        self._requested_at_s = 0.0  # when this process itself got its first signal
        self._held = threading.local()
        self._readers: dict[int, Callable[[], bool]] = {}

    @property
    def requested(self) -> bool:
        return bool(self.signal_name)

    @property
    def installed(self) -> bool:
        return hasattr(self, "_reader")

    def install(self, *, interrupts: bool = False) -> None:
        """Take over the signals. Call this in the main thread. `interrupts`: SIGINT still raises KeyboardInterrupt."""
        self._taken = tuple(each for each in TAKEN if not (interrupts and each == signal.SIGINT))
        # The attribute keeps the writing end open. If Python closed it, the signals would be lost
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Without a handler, a signal would end the process and never reach the socket
        for each in self._taken:
            if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(each, self._pass_on)
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._begin_fork)
        self._readers[self._reader.fileno()] = self._read
        threading.Thread(target=self._serve, name="watch", daemon=True).start()

    def _pass_on(self, number: int, _: object) -> None:
        """Write the signal to our socket, if other code, such as asyncio, has replaced it as the wake-up socket."""
        ours = self._writer.fileno()
        other = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if other != ours:
            self._writer.send(bytes([number]))
            if other != -1:
                with contextlib.suppress(OSError, ValueError):  # the other socket may be closed by now
                    signal.set_wakeup_fd(other)

    # A process that the user's code forks must not write to this process's socket, and SIGTERM must end it. Signals
    # stay blocked in the fork until it has left the socket. Otherwise they would count as signals to this process

    def _hold(self) -> None:
        self._held.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._held.before)

    def _begin_fork(self) -> None:
        signal.set_wakeup_fd(-1)
        for each in TAKEN:
            if signal.getsignal(each) == self._pass_on:
                signal.signal(each, signal.SIG_DFL if each == signal.SIGTERM else lambda *_: None)
        self._release()

    # Any thread -----------------------------------------------------------------------------------------------

    def add_reader(self, fileno: int, receive: Callable[[], bool]) -> None:
        """From now on, call `receive` in the thread whenever `fileno` is readable, until `receive` returns False."""
        self._readers[fileno] = receive
        self.wake()

    def wake(self) -> None:
        """Make the thread look at the clock now."""
        if self.installed:
            with contextlib.suppress(BlockingIOError):  # the socket is full, so the thread wakes anyway
                self._writer.send(WAKE)

    def ask(self, name: str) -> None:
        """Request a stop as the signal `name` does, even if only another rank got it. SIGUSR1 replaces no other."""
        if not self.requested or self.signal_name == "SIGUSR1" != name:
            self.signal_name, self._requested_at_s = name, 0.0

    # The thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            poll = select.poll()
            for fileno in list(self._readers):
                poll.register(fileno, select.POLLIN)
            timeout_s: float = self.watch.tick() if self.watch is not None else math.inf
            for fileno, _ in poll.poll(None if timeout_s == math.inf else 1000 * timeout_s):
                if not self._readers[fileno]():
                    del self._readers[fileno]

    def _read(self) -> bool:
        for number in self._reader.recv(4096):
            if number == signal.SIGUSR2:
                # Another thread writes the stacks, because a disk that hangs must not stop this thread
                record = self.watch.record if self.watch is not None else None
                threading.Thread(target=dump, args=("asked", record), name="stacks", daemon=True).start()
            elif number in STOP_SIGNALS and number in self._taken:  # SIGCHLD and other signals use the same socket
                name = signal.Signals(number).name
                self._take("SIGTERM" if name == "SIGHUP" else name, time.monotonic())  # SIGHUP: the terminal closed
        return True

    def _take(self, name: str, now_s: float) -> None:
        self.ask(name)
        waited_s = now_s - self._requested_at_s
        if not self._requested_at_s:
            self._requested_at_s = now_s
            if not self.finish_step_first:
                self._leave(f"{name} before the first step: nothing new to save. The same command starts it again.")
            elif self.watch is not None:
                self.watch.tell_others(name)
        elif waited_s > REPEAT_S:
            self._leave(f"{name} again, {waited_s:.0f} s after {self.signal_name}: leaving without saving")

    def _leave(self, why: str) -> None:
        # `warning`, because Python prints warnings to stderr even before logging is set up
        report_stop = self.watch.report_stop if self.watch is not None else logging.getLogger("rankup").warning
        leave(STOPPED, lambda: report_stop(why), timeout_s=PARTING_S)


# The stacks of this process ------------------------------------------------------------------------------------------
#
# A rank appends its stacks to the run's `stacks/rank-N.txt` on request, and when a deadline passes. A line `# {...}`
# before each dump gives the reason, the phase and the step. `rankup.observe.stacks` requests stacks by two signals. On
# SIGUSR2 a Python thread writes them, which is always safe. If that thread can't run because a call holds the GIL,
# SIGRTMAX follows: faulthandler's C handler then writes them, and may read data that other threads are changing.

_file: TextIO | None = None
_lock = threading.Lock()


def open_stacks(run_dir: Path, *, rank: int, world_size: int) -> None:
    """From now on, write this rank's stacks on request. Call this in the main thread. If the file
    can't be written, the rank trains without stacks."""
    global _file
    # Requests go to the thread of `StopRequest`: the main thread takes no signals while it waits for a dead disk
    thread = next((each.native_id for each in threading.enumerate() if each.name == "watch"), None)
    with contextlib.suppress(OSError):
        path = announce_stacks(
            run_dir, rank, world_size, os.getpid(), thread=thread, main=f"{threading.main_thread().ident:#x}",
            signals=[signal.SIGUSR2, signal.SIGRTMAX],
        )
        before, _file = _file, path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGRTMAX, _file, all_threads=True)
        if before is not None:  # of an earlier job of this process
            before.close()


def dump(why: str, record: Record | None) -> Path | None:
    """Write the stacks of all threads, with the phase and the step of `record`. Returns the file, or None if there is
    no file. May wait for the disk."""
    if _file is None:
        return None
    with _lock:
        now = record.read() if record is not None else None
        phase, step = (now.phase, now.step) if now is not None else ("", 0)
        said = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "why": why, "phase": phase, "step": step}
        _file.write(f"# {json.dumps(said)}\n{_stacks()}")
        _file.flush()  # faulthandler's C handler writes to the file descriptor, past this object's buffer
    return Path(_file.name)


def _stacks() -> str:
    """Return the stacks of all threads. faulthandler writes to memory, because it holds the GIL while it writes: a disk
    that hangs would stop the training."""
    with os.fdopen(os.memfd_create("stacks"), "w+b") as memory:
        faulthandler.dump_traceback(memory, all_threads=True)
        memory.seek(0)
        return memory.read().decode(errors="replace")


# Locations -----------------------------------------------------------------------------------------------------------


THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*most recent call first.*\n((?:  .*\n)*)", re.MULTILINE)
FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
# What to call the work of a thread in a library, by the end of the file's path; "" stands for the function's name
COLLECTIVES = "torch/distributed/distributed_c10d.py"
KNOWN = {
    COLLECTIVES: "",  # all_reduce, barrier, init_process_group
    "parallel/shared_gradients.py": "all_reduce",
    "torch/utils/data/dataloader.py": "data: next of a DataLoader",
    "torch/serialization.py": "",  # save, load
    "torch/autograd/__init__.py": "backward",
    "torch/optim/optimizer.py": "optimizer.step",
    "torch/cuda/__init__.py": "",  # synchronize
    "torch/cuda/streams.py": "",  # synchronize of a stream, as at the beginning of job.step
}
MAY_WAIT = ("backward", "synchronize")  # what a rank does that has begun all its exchanges, and waits for them there
# Skip these files when naming a location: readers want to know which code called them
HELPERS = ("/rankup/group/", "/rankup/loop/", "/rankup/state/", "/parallel/shared_gradients.py")
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", sysconfig.get_paths()["stdlib"])


def location_in(text: str, main: str) -> str | None:
    """Return where the main thread is, according to faulthandler's output `text`: "" if its stack is empty, None if the
    output lacks it. `main`: the thread's id in hexadecimal, or "" for the last thread in the output."""
    threads = [lines for ident, lines in THREAD.findall(text) if main in ("", f"{int(ident, 16):#x}")]
    return _location_in(FRAME.findall(threads[-1])) if threads else None


def _location_in(stack: list[tuple[str, str, str]]) -> str:
    """Describe a location: "all_reduce (loop.py:213 step)", "train.py:40 main", or "" if the stack is empty. `stack`:
    file, line and function of each frame, innermost first."""
    if not stack:
        return ""
    own = [frame for frame in stack if "/site-packages/rankup/" in frame[0] or not any(
        part in frame[0] for part in LIBRARIES
    )]
    callers = [frame for frame in own if not any(part in frame[0] for part in HELPERS)]
    file, line, function = [*callers, *own, *stack][0]
    where = f"{os.path.basename(file)}:{line} {function}"
    known = [(end, function) for file, _, function in stack for end in KNOWN if file.endswith(end)]
    if not known:
        return where
    # Take the innermost known file. Its functions call each other, and the program called the outermost of them
    name = [function for end, function in known if end == known[0][0]][-1]
    return f"{KNOWN[known[0][0]] or name} ({where})"


def own_location() -> tuple[str, bool]:
    """Return where the main thread of this process is now, and whether it waits in a call of torch.distributed.

    This does not use faulthandler, which walks all threads without a lock: in Python 3.11 it may meet a thread that C++
    code is just adding. Garbage collection is off meanwhile: in Python 3.11 a collection may let the main thread run
    while its frame is looked up, and the lookup would then read memory that is no longer a frame.
    """
    stack, collects = list[tuple[str, str, str]](), gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            stack.append((frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
            frame = frame.f_back
    finally:
        if collects:
            gc.enable()
    return _location_in(stack), bool(stack) and stack[0][0].endswith(COLLECTIVES)


def may_wait(location: str) -> bool:
    """Return whether a rank at `location` may only wait for others: Python does not see what backward and a GPU do."""
    return location.startswith(MAY_WAIT)


def in_phase(phase: str, step: int) -> str:
    """Return the words that follow a location: " of step 413" in that step, " in save" in another phase."""
    return f" of step {step + 1}" if phase == "step" else f" in {phase}" if phase else ""


def compare(places: Mapping[int, str]) -> list[str]:
    """Return one line per location with the ranks that are there: "ranks 0-2: all_reduce (loop.py:213 step)"."""
    there = holders(sorted(places.items()))
    return [f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: {where}" for where, ranks in there.items()]
