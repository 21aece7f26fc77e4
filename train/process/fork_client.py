"""The supervisor's side of the fork server: starts it, asks, and hears what becomes of the ranks. No torch here."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Order:
    """What the server shall be. `start_method`: of ranks, "fork", "fresh" (interpreters) or "spawn" (by torch).

    `channel`: the number of the socket. `parent`: the supervisor's process. `modules`: to import before the first fork.
    `entry`: module:function, which a forked rank calls. `arguments`: of `train.main`, the same for all ranks.
    """

    channel: int
    parent: int
    start_method: str
    modules: list[str]
    entry: str
    arguments: list[str]

    def command(self) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("fork_server.py")), json.dumps(asdict(self))]


class ForkServer:
    """The supervisor's side of `train.process.fork_server`."""

    def __init__(self, start_method: str, modules: list[str], entry: str, arguments: list[str]) -> None:
        """Start the server; it answers once it has imported `modules`. See `Order`."""
        self.channel, theirs = socket.socketpair()
        order = Order(theirs.fileno(), os.getpid(), start_method, modules, entry, arguments)
        with theirs:
            # A session of its own: a Ctrl-C at the terminal goes to the supervisor alone, which passes it on once
            self._process = subprocess.Popen(
                order.command(), pass_fds=[order.channel], start_new_session=True, stdin=subprocess.DEVNULL
            )
        self.pid = self._process.pid
        self._received = b""
        self.alive = True

    def ask(self, **request: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, which `news` shows
            self.channel.sendall(json.dumps(request).encode() + b"\n")

    def news(self) -> list[dict[str, Any]]:
        """What the server has said; call it when `channel` is readable. Ends `alive` where the server has ended."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.channel.recv(65536)
        self.alive = bool(data)
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the server, and with it all that it has started: the kernel kills each rank when the server ends."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it ends by itself once its ranks are killed
            self._process.wait(2)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)  # not without a bound: one that waits for a dead disk ends when the disk answers


def reap() -> None:
    """Take the ends of orphans: a container's first process inherits them, and they stay zombies until it does."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
