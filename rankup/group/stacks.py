"""Where this rank is: the place of its main thread in a few words, and the stacks of all threads. No torch here.

The stacks stand in `stacks/rank-N.txt` of the run, once somebody asks, and at every deadline. Who asks
(`rankup.observe.stacks`) sends one of two signals, as each has what the other lacks:

- SIGUSR2 has a thread of Python write. No other thread moves meanwhile, so it is safe at any time, also for a training
  that is well. It needs the interpreter's lock: a collective, a sleep and a read let go of it.
- SIGRTMAX has faulthandler's own handler write, in C, inside the signal. It works while a call holds the lock and no
  thread of Python can run. It reads what other threads may be changing at that moment, so it comes second.

A line `# {...}` before each dump says why it was made, and where this rank stood.
"""

import contextlib
import faulthandler
import gc
import json
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

from rankup.agent.record import RecordWriter
from rankup.agent.status import announce_stacks
from rankup.env.rank_env import ranges

ASK, ASK_C = signal.SIGUSR2, signal.SIGRTMAX

# The stacks of this process ------------------------------------------------------------------------------------------

_file: TextIO | None = None
_lock = threading.Lock()
_record: RecordWriter | None = None


def open_stacks(run_dir: Path, *, rank: int, world_size: int) -> None:
    """From now on this rank writes its stacks when it is asked. Main thread only, once a process.

    A disk that can't be written to costs the stacks and nothing else.
    """
    global _file
    # What waits for signals: the thread of `StopRequest`. The main thread may wait for a dead disk, and takes none then
    thread = next((each.native_id for each in threading.enumerate() if each.name == "watch"), None)
    with contextlib.suppress(OSError):
        path = announce_stacks(
            run_dir, rank, world_size, os.getpid(), thread=thread, main=f"{threading.main_thread().ident:#x}",
            signals=[ASK, ASK_C],
        )
        _file = path.open("a", encoding="utf-8")
        faulthandler.register(ASK_C, _file, all_threads=True)


def follow(record: RecordWriter) -> None:
    """From now on dumps say where this rank stands, as its record says."""
    global _record
    _record = record


def dump(why: str) -> Path | None:
    """Write the stacks of all threads. Returns the file, None where there is none. May wait for the disk."""
    if _file is None:
        return None
    with _lock:
        life = _record.read() if _record is not None else None
        phase, step = (life.phase, life.step) if life is not None else ("", 0)
        said = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "why": why, "phase": phase, "step": step}
        _file.write(f"# {json.dumps(said)}\n{_stacks()}")
        _file.flush()  # faulthandler's own handler writes beside this object, to the file's number
    return Path(_file.name)


def dump_aside() -> None:
    """The same in a thread of its own, for who may not wait for a disk."""
    threading.Thread(target=dump, args=("asked",), name="stacks", daemon=True).start()


def _stacks() -> str:
    """Those of all threads. faulthandler holds the interpreter's lock while it writes: to a disk that hangs it would
    stop the training. So it writes to memory."""
    with os.fdopen(os.memfd_create("stacks"), "w+b") as memory:
        faulthandler.dump_traceback(memory, all_threads=True)
        memory.seek(0)
        return memory.read().decode(errors="replace")


# Places --------------------------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """One call: where it stands in which file, and the function's name."""

    file: str
    line: int
    function: str


Stack = list[Frame]  # the innermost first

# The ends of files' names, and what a thread does there; "" stands for the function's own name. The first entry that
# fits counts, in the innermost frame that fits any.
KNOWN = (
    ("torch/distributed/distributed_c10d.py", ""),  # all_reduce, barrier, init_process_group
    ("parallel/shared_gradients.py", "all_reduce"),
    ("group/meeting.py", "join"),
    ("data/loader.py", "data: loader.next"),
    ("torch/utils/data/dataloader.py", "data: next of a DataLoader"),
    ("state/copies.py", "save"),
    ("state/saver.py", "save"),
    ("torch/serialization.py", ""),  # save, load
    ("torch/autograd/__init__.py", "backward"),
    ("torch/autograd/graph.py", "backward"),
    ("torch/optim/optimizer.py", "optimizer.step"),
    ("torch/cuda/__init__.py", ""),  # synchronize
)
# Whoever reads the place wants to know who called these
HELPERS = ("/rankup/group/", "/train/group.py", "/program/group.py", "/parallel/shared_gradients.py")
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", sysconfig.get_paths()["stdlib"])


def place(stack: Stack) -> str:
    """Where that thread is: "all_reduce (loop.py:213 step)", "train.py:40 main", "" for an empty stack."""
    if not stack:
        return ""
    name = _known(stack)
    own = [frame for frame in stack if not _library(frame.file)]
    caller = next((f for f in own if not any(part in f.file for part in HELPERS)), own[0] if own else stack[0])
    where = f"{os.path.basename(caller.file)}:{caller.line} {caller.function}"
    return f"{name} ({where})" if name else where


def _known(stack: Stack) -> str:
    for position, frame in enumerate(stack):
        for end, name in KNOWN:
            if not frame.file.endswith(end):
                continue
            # Its helpers call each other: the outermost of them is what the program has called
            while position + 1 < len(stack) and stack[position + 1].file.endswith((end, "c10d_logger.py")):
                position += 1
            called = [f.function for f in stack[: position + 1] if f.file.endswith(end)]
            return name or called[-1]
    return ""


def _library(file: str) -> bool:
    """Whether that file is neither this project's, installed or not, nor the user's."""
    return not re.search(r"/site-packages/rankup/", file) and any(part in file for part in LIBRARIES)


def own_place() -> str:
    """Where the main thread of this process is now. Takes some 20 microseconds."""
    # Python 3.11 may collect garbage inside this call, under a lock that other threads need as they start and end. What
    # it collects may let go of the interpreter's lock; then the whole process stands still (python/cpython#106883)
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    finally:
        if collects:
            gc.enable()
    stack: Stack = []
    while frame is not None:
        stack.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return place(stack)


def moment(phase: str, step: int) -> str:
    """What stands behind a place: " of step 413" while that step is under way, " in save" in another phase."""
    return f" of step {step + 1}" if phase == "step" else f" in {phase}" if phase else ""


def compare(places: Mapping[int, str]) -> list[str]:
    """One line for each place, with the ranks that are there: "ranks 0-2: all_reduce (loop.py:213 step)"."""
    there: dict[str, list[int]] = {}
    for rank, where in sorted(places.items()):
        there.setdefault(where, []).append(rank)
    return [f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: {where}" for where, ranks in there.items()]
