"""The process from which the ranks of a node are forked: it has imported torch, so a rank starts in tenths of a second.

The supervisor starts it and talks to it through a socket, one JSON object a line:

| to the server                                              | from the server                            |
|------------------------------------------------------------|--------------------------------------------|
| {"start": RANK, "name": "...", "arguments": [...],         | {"started": RANK, "pid": N}                |
|  "env": {...}}                                             |                                            |
| {"signal": NUMBER, "rank": RANK}: to the process alone     | {"ended": RANK, "code": N}                 |
| {"kill": RANK}: the process and all that it has started    | {"warning": "why ranks are not forked"}    |

A fork copies the thread that calls it and no other, yet all locks and the state of every library. So this process has
one thread, no device and no process group, and it looks whether that is true. If not, it replaces itself by a process
that imports nothing and starts fresh interpreters.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

if not __package__:
    # Started as a file, so that it works in any directory: Python put this folder on the path
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parents[1]), *(p for p in sys.path if Path(p or ".").resolve() != _here)]

from rankup.errors import FAULT, FINISHED
from train.process.exit import leave
from train.process.fork_client import Order
from train.process.imports import prepare_imports, without_collections
from train.process.log import guard
from train.process.start_rank import Start, fork_rank, start_fresh, start_spawned
from train.process.stop import STOP_SIGNALS, die_with_parent


def prepare(order: Order) -> None:
    """Do once what every rank would do: import modules, and load data that fit in memory.

    What fails here is left to the rank, which says it with its own words.
    """
    prepare_imports()
    with without_collections():
        for module in (order.entry.partition(":")[0], *order.modules):
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    torch: Any = sys.modules.get("torch")
    if torch is not None and "train.workloads.images" in order.modules:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more would be started at the first large tensor, and stay
        with contextlib.suppress(Exception):
            importlib.import_module("train.main").hold_data(order.arguments)
        torch.set_num_threads(num_threads)
    # OpenBLAS, which numpy brings along, starts threads while it is loaded, and ends them before each fork
    if (pid := os.fork()) == 0:
        leave(FINISHED)
    os.waitpid(pid, 0)
    gc.freeze()  # a collection in a rank must not write to, and so copy, the memory that all share


def obstacle() -> str:
    """Why this process must not be forked; empty if it may be."""
    if len(threads := _threads()) > 1:
        return f"it has {len(threads)} threads ({', '.join(threads)})"
    if devices := sorted({path for path in _open_files() if path.startswith(("/dev/nvidia", "/dev/kfd"))}):
        return f"it has opened {', '.join(devices)}"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it has initialized CUDA"
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return "it has a process group"
    return ""


def _threads() -> list[str]:
    """Their names."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            found.append((thread / "comm").read_text().strip())
    return found


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{number}")


class Server:
    """Starts ranks, signals them and reports their ends, until the supervisor's side of `channel` is closed."""

    def __init__(self, channel: socket.socket, woken: socket.socket, start: Start) -> None:
        """`woken`: readable when a child may have ended."""
        self.channel, self.woken, self.start = channel, woken, start
        self._ranks: dict[int, int] = {}  # by process id
        self._received = b""

    def serve(self) -> None:
        """Return once the supervisor is gone and everything that was started here is killed."""
        while True:
            readable = select.select([self.channel, self.woken], [], [])[0]
            if self.woken in readable:
                self.woken.recv(4096)
            if self.channel in readable:
                data = self.channel.recv(65536)
                if not data:
                    break
                *lines, self._received = (self._received + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            self._report_ends()
        for pid in self._ranks:
            _kill(pid)

    def _obey(self, request: dict[str, Any]) -> None:
        if "start" in request:
            self._start(request["start"], request["name"], request["arguments"], request["env"])
        for pid, rank in self._ranks.items():
            if rank == request.get("kill"):
                _kill(pid)
            elif rank == request.get("rank"):
                with contextlib.suppress(PermissionError):  # it has changed its user
                    os.kill(pid, request["signal"])  # not reaped yet, so the number is still this process's

    def _start(self, rank: int, name: str, arguments: list[str], env: dict[str, str]) -> None:
        try:
            pid = self.start(name, arguments, {**env, "RANKUP_PARENT": str(os.getpid())})
        except OSError as error:  # no more processes, no more memory
            self.tell({"warning": f"{name} can't be started: {error.strerror}"})
            self.tell({"ended": rank, "code": FAULT})
            return
        self._ranks[pid] = rank
        self.tell({"started": rank, "pid": pid})

    def _report_ends(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            rank = self._ranks.pop(pid, None)
            if rank is not None:  # else a helper of torch.multiprocessing
                # DataLoader workers would keep its memory, and its GPU. Before its number may be another process's
                _kill(pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if rank is not None:
                # As a shell counts it: 128 and the signal's number where a signal ended it
                self.tell({"ended": rank, "code": code if code >= 0 else 128 - code})

    def tell(self, news: dict[str, Any]) -> None:
        """Raises nothing where the supervisor is gone: the next look at `channel` shows it."""
        with contextlib.suppress(OSError):
            self.channel.sendall(json.dumps(news).encode() + b"\n")


def _kill(pid: int) -> None:
    """End the process, and those of its session."""
    for end in (os.killpg, os.kill):  # it leads no group yet in its first instant
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def _wake_on_child() -> socket.socket:
    """A socket that becomes readable when a child ends. The handlers also keep this process from dying of a signal
    that a batch system sends to every process of a job: the supervisor has it too."""
    woken, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in (*STOP_SIGNALS, signal.SIGCHLD, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which a fresh interpreter would inherit
    writer.detach()  # open as long as this process
    return woken


def main() -> NoReturn:
    guard("stdout", "stderr")
    order = Order(**json.loads(sys.argv[1]))
    die_with_parent(order.parent)
    woken = _wake_on_child()
    channel = socket.socket(fileno=order.channel)
    channel.set_inheritable(False)
    start: Start = start_fresh
    if order.start_method == "spawn":
        start = start_spawned
    elif order.start_method == "fork":
        prepare(order)
        if why := obstacle():
            text = f"ranks are started as fresh interpreters, not forked from a process that has torch: {why}"
            Server(channel, woken, start).tell({"warning": text})
            channel.set_inheritable(True)
            os.execv(sys.executable, replace(order, start_method="fresh").command())
        start = functools.partial(fork_rank, order.entry, [channel, woken])
    Server(channel, woken, start).serve()
    leave(FINISHED)


if __name__ == "__main__":
    main()
