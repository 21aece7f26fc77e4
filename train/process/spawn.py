"""A rank through torch.multiprocessing's spawn: a fresh interpreter, no fork, as on Windows."""

import multiprocessing.process
import os
import runpy
import sys
from pathlib import Path

MAIN = str(Path(__file__).parents[1] / "main.py")


def start_spawned(name: str, arguments: list[str], env: dict[str, str]) -> int:
    """Start `train.main` with `arguments` in a process of its own. Returns the process id."""
    # torch exports it under a condition that mypy does not follow
    from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

    context = start_processes(_be, (arguments, env), 1, join=False, start_method="spawn")  # type: ignore[no-untyped-call]
    process = context.processes[0]
    # multiprocessing looks after its children whenever it starts one, and the end that it sees nobody else does
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    pid: int = process.pid
    return pid


def _be(_: int, arguments: list[str], env: dict[str, str]) -> None:
    """In the new process: become a rank. It ends by itself, with its exit code."""
    os.setsid()  # what it starts can be killed with it
    os.environ.update(env)
    sys.argv = [MAIN, *arguments]
    runpy.run_path(MAIN, run_name="__main__")
