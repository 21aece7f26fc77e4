"""The stacks of this process's threads, in `stacks/rank-N.txt` of the run: when somebody asks, and at every deadline.

Who asks sends a signal (`train.process.stack_requests`). There are two, as each has what the other lacks:

- SIGUSR2 has a thread of Python write. No other thread moves meanwhile, so it is safe at any time, also for a training
  that is well. It needs the interpreter's lock: a collective, a sleep and a read let go of it.
- SIGRTMAX has faulthandler's own handler write, in C, inside the signal. It works while a call holds the lock and no
  thread of Python can run. It reads what the other threads may be changing at that moment, so it comes second.

The file has lines that begin with `# {`: the first of a process says whose stacks follow and how to ask for more, and
one before each dump says why, and where this rank stood. What its DataLoader workers do follows. No torch here.
"""

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

from rankup.agent.logs import host_name
from rankup.env.rank_env import RankEnv
from train.process.proc import start_of
from train.process.worker_stacks import ask_workers

FOLDER = "stacks"
REQUEST = "request"  # `touch stacks/request` asks, where a file can be made and no process be signalled
LOOK_S = 1.0  # between two looks for it, which may go over a network disk
ASK, ASK_C = signal.SIGUSR2, getattr(signal, "SIGRTMAX", None)  # macOS has none of the second kind
# A dump has some kilobytes, and nobody reads those of a hundred attempts ago
MOST_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The rank whose stacks are in a file, and how to ask it.

    `started`: see `start_of`. `thread`: the kernel's number of a thread that never hangs, and takes the signals: what
    waits for a dead disk takes none. `main`: the main thread, as faulthandler writes it, "" where nobody knows.
    `signals`: to try in turn.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    started: str
    thread: int
    main: str
    signals: list[int]


class StacksFile:
    """Where this process writes its stacks. `phase` and `step`: where it stands, for the line before each dump."""

    def __init__(self, run_dir: Path, writer: Writer) -> None:
        """Raises OSError."""
        self.writer = writer
        self.phase, self.step = "", 0
        self.path = run_dir / FOLDER / f"rank-{writer.rank}.txt"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        large = self.path.exists() and self.path.stat().st_size > MOST_BYTES
        self.file: TextIO = self.path.open("w" if large else "a", encoding="utf-8")
        self._lock = threading.Lock()
        self._say(asdict(writer))

    def _say(self, facts: dict[str, Any], stacks: str = "") -> None:
        self.file.write(f"# {json.dumps(facts)}\n{stacks}")
        self.file.flush()  # faulthandler's own handler writes beside this object, to the file's number

    def dump(self, why: str, *, workers: bool) -> None:
        """Write the stacks of all threads, and with `workers` of those of the DataLoaders. May wait for the disk."""
        with self._lock:
            said = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "why": why, "phase": self.phase, "step": self.step}
            self._say(said, _stacks() + (ask_workers() if workers else ""))


def _stacks() -> str:
    """Those of all threads. faulthandler holds the interpreter's lock while it writes: to a disk that hangs it would
    stop the training. So it writes to memory."""
    with os.fdopen(os.memfd_create("stacks"), "w+b") if hasattr(os, "memfd_create") else TemporaryFile() as memory:
        faulthandler.dump_traceback(memory, all_threads=True)
        memory.seek(0)
        return memory.read().decode(errors="replace")


_file: StacksFile | None = None  # a process has one


def open_stacks(run_dir: Path, launch: RankEnv) -> None:
    """From now on this rank writes its stacks when it is asked. Main thread only, once a process.

    A disk that can't be written to costs the stacks and nothing else: the log, which is opened first, says so.
    """
    global _file
    # What waits for signals: the thread of `StopRequest`
    thread = next((each.native_id for each in threading.enumerate() if each.name == "stop-request"), None)
    writer = Writer(
        rank=launch.rank, world_size=launch.world_size, host=host_name(), pid=os.getpid(),
        started=start_of(os.getpid()), thread=thread or os.getpid(), main=f"{threading.main_thread().ident:#x}",
        signals=[int(number) for number in (ASK, ASK_C) if number is not None],
    )
    with contextlib.suppress(OSError):
        _file = StacksFile(run_dir, writer)
        if ASK_C is not None:
            faulthandler.register(ASK_C, _file.file, all_threads=True)
        request = run_dir / FOLDER / REQUEST
        threading.Thread(target=_watch, args=(request,), name="stack-requests", daemon=True).start()


def _watch(request: Path) -> None:
    seen = None
    while True:
        asked = 0.0
        with contextlib.suppress(OSError):
            asked = request.stat().st_mtime
        if seen is not None and asked > seen:
            dump("asked")
        seen = asked
        time.sleep(LOOK_S)


def dump(why: str, *, workers: bool = True) -> Path | None:
    """Write the stacks of all threads. Returns the file, None where there is none. May wait for the disk.

    `workers`: ask the DataLoaders' too, which takes some hundredths of a second.
    """
    if _file is None:
        return None
    _file.dump(why, workers=workers)
    return _file.path


def dump_aside() -> None:
    """The same in a thread of its own, for who may not wait for a disk."""
    threading.Thread(target=dump, args=("asked",), name="stacks", daemon=True).start()


def note(phase: str, step: int) -> None:
    """Where this rank stands: what the next dump says of it. Called at every step: two assignments."""
    if _file is not None:
        _file.phase, _file.step = phase, step
