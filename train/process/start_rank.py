"""The three methods by which the fork server starts one rank; each returns the process id. No torch here.

`fork_rank` copies the server, which has imported torch. `start_fresh` starts an interpreter. `start_spawned` does it
through torch.multiprocessing.
"""

import contextlib
import importlib
import multiprocessing.process
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rankup.errors import FAULT
from train.process.exit import leave
from train.process.stop import STOP_SIGNALS, StopRequest, die_with_parent

MAIN = str(Path(__file__).parents[1] / "main.py")
# When memory runs out, the kernel shall end a rank, which is forked anew, before the supervisor or the server.
MORE_LIKELY = 100
# The process's name, the arguments of `train.main`, and what it gets beside the environment of the server
Start = Callable[[str, list[str], dict[str, str]], int]


def start_fresh(name: str, arguments: list[str], env: dict[str, str]) -> int:
    """A fresh interpreter in a session of its own. Returns its process id."""
    process = subprocess.Popen([sys.executable, MAIN, *arguments], env={**os.environ, **env}, start_new_session=True)
    process.returncode = 0  # the server waits for all its children; a Popen without a code would do it too, and warn
    return process.pid


def fork_rank(
    entry: str, ours: list[socket.socket], name: str, arguments: list[str], env: dict[str, str]
) -> int:
    """A fork of this process, which calls `entry`. Returns its process id. `ours`: what the fork has to close."""
    # A stop signal that comes before the child can notice it waits until it can
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _describe_process(name)
            _become_rank(arguments, env, server, entry, ours)
        except BaseException:
            traceback.print_exc()
        leave(FAULT)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return pid


def _become_rank(
    arguments: list[str], env: dict[str, str], server: int, entry: str, ours: list[socket.socket]
) -> None:
    """In the child: be as a fresh interpreter that was started with `arguments` and `env`. Does not return."""
    os.setsid()
    die_with_parent(server)
    os.close(signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for one in ours:  # the supervisor has to notice the end of the server, which an open copy would hide
        one.close()
    os.environ.update(env)
    sys.argv = [MAIN, *arguments]
    stop = StopRequest().install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _function(entry)(stop)


def _describe_process(name: str) -> None:
    """Let `ps` and the kernel tell the ranks apart: all forks show the command line of the server."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    with contextlib.suppress(OSError, ValueError):
        file = Path("/proc/self/oom_score_adj")
        file.write_text(str(min(1000, int(file.read_text()) + MORE_LIKELY)))


def _function(name: str) -> Callable[[StopRequest], NoReturn]:
    module, _, function = name.partition(":")
    found: Callable[[StopRequest], NoReturn] = getattr(importlib.import_module(module), function)
    return found


def start_spawned(name: str, arguments: list[str], env: dict[str, str]) -> int:
    """Start `train.main` with `arguments` in a process of its own. Returns the process id."""
    # torch exports it under a condition that mypy does not follow
    from torch.multiprocessing import start_processes  # type: ignore[attr-defined]

    context = start_processes(  # type: ignore[no-untyped-call]
        _be, (arguments, env), 1, join=False, start_method="spawn"
    )
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
