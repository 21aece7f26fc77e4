"""The process from which the ranks of a node are forked: it has imported torch, so a rank starts in tenths of a second.

The agent runs this file as a program. They talk through a pipe of multiprocessing, in JSON objects: `ForkServer` asks
(start, signal), `Server` tells (ready, the process or the code of a rank, warning).

A fork copies the thread that calls it and no other, yet all locks and the state of every library. So the server has one
thread, no device and no process group, and it looks whether that is true. If not, it replaces itself by a process that
imports nothing and starts fresh interpreters, as it does from the beginning for a script that does not import rankup.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import multiprocessing.process
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any, NoReturn

if not __package__:
    # Started as a file, so that it works in any directory: Python put this folder on the path
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parents[1]), *(p for p in sys.path if Path(p or ".").resolve() != _here)]

from rankup.agent.processes import be_python, die_with_parent, end_of, kill_session, send_signal, state_of
from rankup.agent.protocol import KILLED, tell_agent
from rankup.errors import FAULT, FINISHED
from rankup.timing import KILL_S, POLL_S

STORE = -1  # in the place of a local rank

# The agent's side ---------------------------------------------------------------------------------------------------


class ForkServer:
    """The agent's side, in the event loop's thread. `pids`: of the running ranks' processes by local rank; 0 for one
    that is being started. `ready`: the server has imported what it shall, and reads requests."""

    def __init__(
        self, *, on_end: Callable[[int, int], object], on_warning: Callable[[str], None], on_gone: Callable[[], None],
        on_start: Callable[[int, int], None] = lambda rank, pid: None,
    ) -> None:
        """`on_start` gets local rank and process, `on_end` local rank and exit code. `on_gone`: the server was killed,
        and `on_end` was called for each of its ranks, which are dead; start another server."""
        self._on_start, self._on_end, self._on_warning, self._on_gone = on_start, on_end, on_warning, on_gone
        self.pids: dict[int, int] = {}
        self._starts = 0  # how many were asked for, which is the number of the newest
        self._newest: dict[int, int] = {}  # the number of each rank's
        self.ready = asyncio.Event()

    def start(
        self, modules: Sequence[str] = (), *, env: Mapping[str, str], preload: Sequence[str] = (), folder: str = "",
        fork: bool = True,
    ) -> None:
        """`modules` and `preload` are imported first, beside torch; `preload` also from `folder`. The rank repeats an
        import that fails, and reports it. `env`: of the server; its OMP_NUM_THREADS and Python's own variables
        hold for the ranks. `fork`: False starts ranks as fresh interpreters."""
        self.ready.clear()
        self._channel, theirs = connection.Pipe()
        order = {"channel": theirs.fileno(), "parent": os.getpid(), "fork": fork, "folder": folder,
                 "modules": [*modules], "preload": [*preload]}
        with theirs:
            # A session of its own: a Ctrl-C at the terminal goes to the agent alone, which passes it on once
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(order)], env=dict(env), pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True,
            )
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self._hear)

    def start_rank(
        self, local_rank: int, argv: Sequence[str], *, env: Mapping[str, str], name: str, cwd: str = "",
        outputs: Sequence[int] = (),
    ) -> None:
        """Start `python ARGV`. `env`: the whole environment. `name`: for `ps`. `outputs`: in place of standard output
        and error; the caller closes its own."""
        self._starts += 1
        self.pids[local_rank], self._newest[local_rank] = 0, self._starts
        request: dict[str, Any] = {"argv": [*argv], "env": dict(env), "cwd": cwd or os.getcwd()}
        self._ask(outputs, start=local_rank, number=self._starts, name=name, **request)

    def start_store(self, listener: socket.socket) -> None:
        """Have a child of the server serve a TCPStore there, in place of the last one. The caller closes its own."""
        self._ask([listener.fileno()], start=STORE, number=0, name="store")

    def signal(self, local_rank: int, number: int) -> None:
        """See `send_signal`. What a rank has started is killed as it ends."""
        self._ask(signal=number, rank=local_rank)

    def close(self) -> None:
        """End the server, and with it the store; no rank runs any more. No callback follows."""
        if not self._channel.closed:
            self._loop.remove_reader(self._channel)
        self._channel.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it imports from a disk that hangs
            self._process.wait(KILL_S)

    def _ask(self, descriptors: Sequence[int] = (), **request: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, which the event loop will see
            self._channel.send_bytes(json.dumps({**request, "descriptors": len(descriptors)}).encode())
            for descriptor in descriptors:
                reduction.send_handle(self._channel, descriptor, self.pid)

    def _hear(self) -> None:
        try:
            news = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            self._loop.remove_reader(self._channel)
            self._burial = asyncio.create_task(self._bury())
            return
        if "ready" in news:
            self.ready.set()
        elif "warning" in news:
            self._on_warning(news["warning"])
        elif self._newest.get(rank := news["rank"]) == news["number"]:  # else it is a store, or was given up
            if "pid" in news:
                self.pids[rank] = news["pid"]
                self._on_start(rank, news["pid"])
            else:
                del self.pids[rank]
                self._on_end(rank, news["code"])

    async def _bury(self) -> None:
        """The server was killed, and the kernel kills its children: end what they had started themselves."""
        lost, self.pids = self.pids, {}
        pids = [pid for pid in lost.values() if pid]
        for pid in pids:
            kill_session(pid)
        until_s = time.monotonic() + KILL_S
        while any(state_of(pid) not in ("", "Z") for pid in pids) and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
        self.close()
        for local_rank in lost:
            self._on_end(local_rank, KILLED)
        self._on_gone()


# The server ---------------------------------------------------------------------------------------------------------


def obstacle() -> str:
    """Why this process must not be forked; empty if it may be."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"it has {threads} threads"
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            if (path := os.readlink(f"/proc/self/fd/{number}")).startswith(("/dev/nvidia", "/dev/kfd")):
                return f"it has opened {path}"
    return ""


class Server:
    """Starts ranks and the store, signals them and reports their ends. They end with it, and it ends with its agent."""

    # A batch system sends them to every process of a job. They are blocked here, as the agent has them too, and in a
    # rank until it can notice them. SIGUSR1 is ignored, and every rank inherits that, until its script has a handler
    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)

    def __init__(self, channel: "connection.Connection[Any, Any]", *, fork: bool) -> None:
        self.channel, self.fork, self.pid, self._given = channel, fork, os.getpid(), [*os.environ]
        self._running: dict[int, tuple[int, int]] = {}  # process id -> local rank, or STORE; the start's number
        signal.pthread_sigmask(signal.SIG_BLOCK, self.SIGNALS)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._woken, self._waker = socket.socketpair()  # wakes `serve` when a child ends
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def prepare(self, order: Mapping[str, Any]) -> None:
        """Import once what every rank would import."""
        # Importing torch would trigger collections that walk 350,000 objects and find nothing: a fifth of the time
        gc.disable()
        with contextlib.suppress(Exception):
            import torch

            # A parallel operation before the fork would start threads, and a rank would wait for them without end
            self.num_threads = torch.get_num_threads()
            torch.set_num_threads(1)
        _import_all("torch._dynamo", *order["modules"])  # an optimizer's first step imports the former
        sys.path.insert(0, order["folder"])
        _import_all(*order["preload"])
        sys.path.remove(order["folder"])
        # OpenBLAS, which numpy brings along, starts threads while it is loaded, and ends them before each fork
        if (pid := os.fork()) == 0:
            os._exit(FINISHED)
        os.waitpid(pid, 0)
        gc.freeze()  # a collection in a rank must not write to, and so copy, the memory that all share
        gc.enable()

    def serve(self) -> list[str]:
        """Returns in a forked rank alone, its argv."""
        while True:
            ready = connection.wait([self.channel, self._woken])
            if self._woken in ready:
                self._woken.recv(4096)
            if self.channel in ready:
                try:
                    request = json.loads(self.channel.recv_bytes())
                except (EOFError, OSError):
                    os._exit(FINISHED)
                if "signal" in request:
                    self._signal(request["rank"], request["signal"])
                elif self._start(request):
                    return [*request["argv"]]
            self._report_ends()

    def tell(self, **news: Any) -> None:
        """Raises nothing where the agent is gone: the next look at the channel shows it."""
        with contextlib.suppress(OSError):
            self.channel.send_bytes(json.dumps(news).encode())

    def _signal(self, local_rank: int, number: int) -> None:
        for pid in [pid for pid, (each, _) in self._running.items() if each == local_rank]:
            send_signal(pid, number)

    def _start(self, request: dict[str, Any]) -> bool:
        """Whether this is the rank that was started."""
        which = request["start"]
        descriptors = [reduction.recv_handle(self.channel) for _ in range(request["descriptors"])]
        # What is left of the last membership, and nobody waits for: its store, or its rank that waits for a dead disk
        self._signal(which, signal.SIGKILL)
        if (pid := self._fork(request["name"])) == 0:
            self.channel.close()  # the agent has to notice the end of the server, which an open copy would hide
            if which == STORE:
                _serve_store(socket.socket(fileno=descriptors[0]))
            self._become(request, descriptors)
            return True
        for descriptor in descriptors:  # a rank must not hold another one's output open
            os.close(descriptor)
        self._running[pid] = which, request["number"]
        self.tell(rank=which, number=request["number"], pid=pid)
        return False

    def _fork(self, name: str) -> int:
        """As os.fork. The child has a session of its own, and ends with the server."""
        if pid := os.fork():
            return pid
        os.setsid()
        die_with_parent(self.pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._woken.close()
        self._waker.close()
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(name)  # all show the command line of the server
        return 0

    def _become(self, request: dict[str, Any], outputs: Sequence[int]) -> None:
        """In the child: find what a fresh interpreter finds, but for what `be_python` does; or be one."""
        for stream, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        for name in {*self._given} - request["env"].keys():  # what imports have set stays, as where they are anew
            os.environ.pop(name, None)
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        if not self.fork:
            if callable(signal.getsignal(signal.SIGINT)):  # Python's own, which would raise its error here
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)
            os.execv(sys.executable, [sys.executable, *request["argv"]])
        vars(multiprocessing.process)["ORIGINAL_DIR"] = os.getcwd()  # where spawned workers look for the script
        # Python's own `random` sees to that itself
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
        if torch := sys.modules.get("torch"):
            torch.default_generator.seed()
            torch.set_num_threads(self.num_threads)

    def _report_ends(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                start, code = self._running.pop(ended.si_pid, None), end_of(ended.si_pid)
                if start is not None:
                    self.tell(rank=start[0], number=start[1], code=code)


def _import_all(*names: str) -> None:
    """Modules, or what is in them. What fails, fails again in the rank."""
    for name in names:
        with contextlib.suppress(Exception):
            pkgutil.resolve_name(name)


def _serve_store(listener: socket.socket) -> NoReturn:
    """In a child, never in the server: it would get a thread. All signals but SIGKILL stay blocked: whoever stops a
    whole job stops the ranks first."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # torch asks for the name of each client, in the one thread of the store, only to print it: all ranks would wait for
    # a resolver that does not answer. The files of this machine answer alone
    ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    while store:
        signal.pause()
    os._exit(FAULT)


def main() -> list[str]:
    """Serve. Returns in forked ranks alone, each with its argv."""
    order = json.loads(sys.argv[1])
    die_with_parent(order["parent"])
    del sys.path[0]  # the ranks have the folder of their script there
    os.set_inheritable(order["channel"], False)
    server = Server(connection.Connection(order["channel"]), fork=order["fork"])
    if order["fork"]:
        server.prepare(order)
        if why := obstacle():
            text = f"ranks are started as fresh interpreters, not forked from a process that has torch: {why}"
            server.tell(warning=text)
            os.set_inheritable(order["channel"], True)
            os.execv(sys.executable, [sys.executable, __file__, json.dumps({**order, "fork": False})])
    server.tell(ready=True)
    return server.serve()


def say_why(code: int, why: str) -> None:
    """To the agent of this rank."""
    from rankup.agent.ends import End

    with contextlib.suppress(LookupError, ValueError):  # the script may have changed its environment
        tell_agent(json.loads(os.environ["RANKUP_AGENT"]), End(int(os.environ["RANK"]), "", code, why).message())


if __name__ == "__main__":
    be_python(main(), say_why)
