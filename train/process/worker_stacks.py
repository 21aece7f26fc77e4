"""The stacks of a rank's DataLoader workers: what they wait for is often what the rank waits for. No torch here.

A worker keeps its own in memory without a name, into which faulthandler's handler of SIGRTMAX writes. Its rank, whose
child it is, finds that through /proc and reads it. So nothing is written to a disk before somebody asks, although
workers are started anew for each evaluation.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from train.process.proc import parent_of

MEMORY = "rankup-stacks-"
ANSWER_S, TICK_S = 0.5, 0.02
ASK = getattr(signal, "SIGRTMAX", None)  # macOS has none


def open_worker(number: int) -> None:
    """From now on this process, the worker of that number, writes its stacks when its rank asks. Main thread only."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the rank's; a batch system signals the whole process group
    if ASK is not None and hasattr(os, "memfd_create"):
        faulthandler.register(ASK, os.memfd_create(f"{MEMORY}{number}"), all_threads=True)


def ask_workers() -> str:
    """The stacks of all workers of this process, a line `# {"worker": 0}` before each. Takes ANSWER_S at most."""
    workers = sorted(_workers())
    sizes = [memory.stat().st_size for _, _, memory in workers]
    for _, pid, _ in workers:
        os.kill(pid, int(ASK or 0))  # a child keeps its number until this process takes its end
    texts = [""] * len(workers)
    until_s = time.monotonic() + ANSWER_S
    while workers and time.monotonic() < until_s:
        time.sleep(TICK_S)
        before = texts
        texts = [_behind(size, memory) for size, (_, _, memory) in zip(sizes, workers, strict=True)]
        if all(texts) and texts == before:  # each is written word by word
            break
    return "".join(
        f"# {json.dumps({'worker': number})}\n{text}" for (number, _, _), text in zip(workers, texts, strict=True)
    )


def _workers() -> Iterator[tuple[int, int, Path]]:
    """The children of this process that can be asked: number, process, and the memory that they write to."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if parent_of(int(folder.name)) != os.getpid():
                continue
            for link in (folder / "fd").iterdir():
                if found := re.match(rf"/memfd:{MEMORY}(\d+)", os.readlink(link)):
                    yield int(found[1]), int(folder.name), link


def _behind(size: int, memory: Path) -> str:
    try:
        return memory.read_bytes()[size:].decode(errors="replace")
    except OSError:  # it has just ended
        return ""
