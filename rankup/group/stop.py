"""Signals: the thread beside the loop that hears them, what they ask this rank for, and where its main thread is.

SIGTERM, SIGINT, SIGUSR1 and SIGHUP set a flag that the loop checks; they never interrupt a step. SIGUSR2 comes the same
way, and asks for the stacks of all threads. Once the rank has a group, the same thread reads its line to the others and
watches the clock (`rankup.group.watchdog`). No torch: a container that is stopped while it imports torch must end at
once, and the kernel ignores SIGTERM for a container's first process unless that has a handler.
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
TAKEN = (*STOP_SIGNALS, signal.SIGUSR2)  # which asks for the stacks
WAKE = b"\0"  # no signal has this number


class StopRequest:
    """Whether and by which signal this process was asked to stop.

    A thread reads the signals from a wake-up socket, because Python runs its handlers in the main thread only: while
    that one waits inside a collective no handler runs, and a second signal must end the process all the same.

    `signal_name`: the first signal that came, or ""; SIGTERM and SIGINT take the place of SIGUSR1. `watch`: of the
    group, once there is one, whose clock the thread serves; call `wake` after a change.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self.watch: Any = None  # a Watchdog, which imports this file
        # Before the first step a signal ends the process at once: importing torch, joining and downloading may take
        # minutes, longer than a grace period. Once there is something to save it only sets the flag
        self.finish_step_first = False
        self._requested_at_s = 0.0  # of the first signal to this process itself
        self._held = threading.local()
        self._readers: dict[int, Callable[[], bool]] = {}

    @property
    def requested(self) -> bool:
        return bool(self.signal_name)

    @property
    def installed(self) -> bool:
        return hasattr(self, "_reader")

    def install(self) -> None:
        """Take over the signals. Main thread only, once a process."""
        # The writing end is kept as an attribute: were it closed, the signals would go nowhere
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Without a handler a signal would end the process and never reach the socket
        for each in TAKEN:
            if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN:  # as it is under nohup
                signal.signal(each, self._pass_on)
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._begin_fork)
        self._readers[self._reader.fileno()] = self._read
        threading.Thread(target=self._serve, name="watch", daemon=True).start()

    def _pass_on(self, number: int, _: object) -> None:
        """The socket has the signal already, unless somebody has put theirs in its place, as asyncio's loops do."""
        ours = self._writer.fileno()
        other = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if other != ours:
            self._writer.send(bytes([number]))
            if other != -1:
                with contextlib.suppress(OSError, ValueError):  # it is closed by now
                    signal.set_wakeup_fd(other)

    # What the user's code forks shares no socket with this process, and SIGTERM ends it. Until it lets go of the socket
    # no signal reaches it, which would count as one to this process

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

    def hear(self, fileno: int, receive: Callable[[], bool]) -> None:
        """From now on call `receive` in the thread whenever there is something to read, until it returns False."""
        self._readers[fileno] = receive
        self.wake()

    def wake(self) -> None:
        """Have the thread look at the clock now."""
        if self.installed:
            with contextlib.suppress(BlockingIOError):  # it is awake
                self._writer.send(WAKE)

    def ask(self, name: str) -> None:
        """Request a stop as that signal does, which may have come to another rank. SIGUSR1 is only a notice."""
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
                # In a thread of its own: a disk that hangs must not keep this one from the next signal
                record = self.watch.record if self.watch is not None else None
                threading.Thread(target=dump, args=("asked", record), name="stacks", daemon=True).start()
            elif number in STOP_SIGNALS:  # SIGCHLD and others pass through the same socket
                name = signal.Signals(number).name
                self._take("SIGTERM" if name == "SIGHUP" else name, time.monotonic())  # the terminal is gone
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
        # A log that nobody has set up prints warnings to stderr
        report_stop = self.watch.report_stop if self.watch is not None else logging.getLogger("rankup").warning
        leave(STOPPED, lambda: report_stop(why), timeout_s=PARTING_S)


# The stacks of this process ------------------------------------------------------------------------------------------
#
# They stand in `stacks/rank-N.txt` of the run, once somebody asks, and at every deadline; a line `# {...}` before each
# dump says why it was made, and where this rank stood. Who asks (`rankup.observe.stacks`) sends one of two signals.
# SIGUSR2 has a thread of Python write, which is safe at any time. SIGRTMAX comes second, for a call that holds the
# interpreter's lock: faulthandler's own handler writes in C, and reads what other threads may be changing.

_file: TextIO | None = None
_lock = threading.Lock()


def open_stacks(run_dir: Path, *, rank: int, world_size: int) -> None:
    """From now on this rank writes its stacks when it is asked. Main thread only, once a process. A disk that can't be
    written to costs the stacks and nothing else."""
    global _file
    # What waits for signals: the thread of `StopRequest`. The main thread may wait for a dead disk, and takes none then
    thread = next((each.native_id for each in threading.enumerate() if each.name == "watch"), None)
    with contextlib.suppress(OSError):
        path = announce_stacks(
            run_dir, rank, world_size, os.getpid(), thread=thread, main=f"{threading.main_thread().ident:#x}",
            signals=[signal.SIGUSR2, signal.SIGRTMAX],
        )
        _file = path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGRTMAX, _file, all_threads=True)


def dump(why: str, record: Record | None) -> Path | None:
    """Write the stacks of all threads, and where this rank stands by its `record`. Returns the file, None where there
    is none. May wait for the disk."""
    if _file is None:
        return None
    with _lock:
        now = record.read() if record is not None else None
        phase, step = (now.phase, now.step) if now is not None else ("", 0)
        said = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "why": why, "phase": phase, "step": step}
        _file.write(f"# {json.dumps(said)}\n{_stacks()}")
        _file.flush()  # faulthandler's own handler writes beside this object, to the file's number
    return Path(_file.name)


def _stacks() -> str:
    """Those of all threads. faulthandler holds the interpreter's lock while it writes: to a disk that hangs it would
    stop the training. So it writes to memory."""
    with os.fdopen(os.memfd_create("stacks"), "w+b") as memory:
        faulthandler.dump_traceback(memory, all_threads=True)
        memory.seek(0)
        return memory.read().decode(errors="replace")


# Places --------------------------------------------------------------------------------------------------------------


THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*most recent call first.*\n((?:  .*\n)*)", re.MULTILINE)
FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
# What a thread does in a library, by the end of the file's name; "" stands for the function's own name
KNOWN = {
    "torch/distributed/distributed_c10d.py": "",  # all_reduce, barrier, init_process_group
    "parallel/shared_gradients.py": "all_reduce",
    "torch/utils/data/dataloader.py": "data: next of a DataLoader",
    "torch/serialization.py": "",  # save, load
    "torch/autograd/__init__.py": "backward",
    "torch/optim/optimizer.py": "optimizer.step",
    "torch/cuda/__init__.py": "",  # synchronize
}
# Whoever reads the place wants to know who called these
HELPERS = ("/rankup/group/", "/rankup/loop/", "/parallel/shared_gradients.py")
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", sysconfig.get_paths()["stdlib"])


def place_of(text: str, main: str) -> str | None:
    """Where a thread is, from what faulthandler wrote; "" for an empty stack. `main`: the thread's number, "" for the
    main thread, which is the last. None if it is not there."""
    threads = [lines for ident, lines in THREAD.findall(text) if main in ("", f"{int(ident, 16):#x}")]
    return _place_in(FRAME.findall(threads[-1])) if threads else None


def _place_in(stack: list[tuple[str, str, str]]) -> str:
    """In a few words: "all_reduce (loop.py:213 step)", "train.py:40 main", "" for an empty stack. `stack`: file, line
    and function of each frame, the innermost first."""
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
    # The innermost file that is known. Its helpers call each other: the outermost of them is what the program called
    name = [function for end, function in known if end == known[0][0]][-1]
    return f"{KNOWN[known[0][0]] or name} ({where})"


def own_place() -> str:
    """Where the main thread of this process is now.

    Not by faulthandler: it walks all threads without a lock, and in Python 3.11 finds one that C++ is just adding.
    Without garbage collection: in Python 3.11 one may let the main thread go on while a frame of it is looked up, and
    then memory is read that is no frame any more.
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
    return _place_in(stack)


def in_phase(phase: str, step: int) -> str:
    """What stands behind a place: " of step 413" while that step is under way, " in save" in another phase."""
    return f" of step {step + 1}" if phase == "step" else f" in {phase}" if phase else ""


def compare(places: Mapping[int, str]) -> list[str]:
    """One line for each place, with the ranks that are there: "ranks 0-2: all_reduce (loop.py:213 step)"."""
    there = holders(sorted(places.items()))
    return [f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: {where}" for where, ranks in there.items()]
