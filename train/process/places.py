"""In which place of the program a thread is, in a few words, and which ranks are in the same one. No torch here.

A stack comes from two sources: `sys._current_frames` of this process, and the text that faulthandler writes. Both are
lists of frames here, the innermost first.
"""

import gc
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rankup.env.rank_env import ranges


class Frame(NamedTuple):
    """One call: where it stands in which file, and the function's name."""

    file: str
    line: int
    function: str


Stack = list[Frame]

# The ends of files' names, and what a thread does there; "" stands for the function's own name. The first entry that
# fits counts, in the innermost frame that fits any.
KNOWN = (
    ("torch/distributed/distributed_c10d.py", ""),  # all_reduce, barrier, init_process_group
    ("train/group/host_link.py", "agreement"),
    ("train/parallel/shared_gradients.py", "all_reduce"),
    ("rankup/group/line.py", "join"),
    ("train/group/store.py", "join"),
    ("train/data/worker_loader.py", "data: loader.next"),
    ("train/data/loader.py", "data: loader.next"),
    ("torch/utils/data/dataloader.py", "data: next of a DataLoader"),
    ("train/run/publish.py", "save"),
    ("train/run/saver.py", "save"),
    ("torch/serialization.py", ""),  # save, load
    ("torch/autograd/__init__.py", "backward"),
    ("torch/autograd/graph.py", "backward"),
    ("torch/optim/optimizer.py", "optimizer.step"),
    ("torch/cuda/__init__.py", ""),  # synchronize
)
# Whoever reads the place wants to know who called these
HELPERS = ("train/group/", "train/parallel/shared_gradients.py")
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", sysconfig.get_paths()["stdlib"])
WORKER_LOOP = "torch/utils/data/_utils/worker.py"
FETCH = "torch/utils/data/_utils/fetch.py"

THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*most recent call first.*\n((?:  .*\n)*)", re.MULTILINE)
FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)


def place(stack: Stack) -> str:
    """Where that thread is: "all_reduce (loop.py:213 step)", "train.py:40 main", "" for an empty stack."""
    if not stack:
        return ""
    worker = _ends(stack, WORKER_LOOP)
    if worker and not _ends(stack, FETCH):
        return "idle"
    name = "" if worker else _known(stack)
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
    return "/site-packages/train/" not in file and any(part in file for part in LIBRARIES)


def _ends(stack: Stack, end: str) -> bool:
    return any(frame.file.endswith(end) for frame in stack)


def own_place() -> str:
    """Where the main thread of this process is now. Takes some 20 microseconds."""
    # Python 3.11 may collect garbage inside this call, under a lock that other threads need as they start and end. What
    # it collects may let go of the interpreter's lock; then the whole process stands still (CPython's issue 106883)
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


def stacks_in(text: str) -> Iterable[tuple[str, Stack]]:
    """The threads of what faulthandler has written: each one's identity, as 0x7f0c, and its stack.

    The main thread is the last one of a dump: they come from the newest to the oldest.
    """
    for ident, lines in THREAD.findall(text):
        frames = FRAME.findall(lines)
        yield f"{int(ident, 16):#x}", [Frame(file, int(line) if line.isdigit() else 0, of) for file, line, of in frames]


def moment(phase: str, step: int) -> str:
    """What stands behind a place: " of step 413" while that step is under way, " in save" in another phase."""
    return f" of step {step + 1}" if phase == "step" else f" in {phase}" if phase else ""


def compare(places: Mapping[int, str]) -> list[str]:
    """One line for each place, with the ranks that are there: "ranks 0-2: all_reduce (loop.py:213 step)"."""
    there: dict[str, list[int]] = {}
    for rank, where in sorted(places.items()):
        there.setdefault(where, []).append(rank)
    return [f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: {where}" for where, ranks in there.items()]
