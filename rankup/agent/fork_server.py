"""The fork server: a process that has imported torch, from which a node's ranks are forked in tenths of a second.

The agent runs this file as a program. They exchange JSON objects through a pipe of multiprocessing. `ForkServer`, the
agent's side, asks to start and signal ranks. `Server` reports when it is ready, ranks' starts and ends, and warnings.

A fork copies only the thread that calls it, but all locks and the state of every library. So the server must have only
one thread and no open device, see `obstacle`. Otherwise it replaces itself with a process that imports nothing and
starts fresh interpreters. A script that does not import rankup gets such a process from the start.
"""

import asyncio
import contextlib
import faulthandler
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
    # The agent starts this file by its path, so that it works in any directory. Python then put this folder on sys.path
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parents[1]), *(p for p in sys.path if Path(p or ".").resolve() != _here)]

from rankup.agent import alone
from rankup.agent.logs import print_to
from rankup.agent.processes import be_python, die_with_parent, end_of, kill_session, send_signal, state_of
from rankup.agent.protocol import KILLED, tell_agent
from rankup.errors import FAULT, FINISHED
from rankup.timing import KILL_S, POLL_S

AGENT = "RANKUP_AGENT"
STORE = -1  # stands for the store in place of a local rank

# The agent's side ---------------------------------------------------------------------------------------------------


class ForkServer:
    """The agent's side of the fork server, used in the event loop's thread. `pids`: the process ids of running ranks,
    by local rank; 0 while a rank is being started. `ready` is set when the server has imported its modules."""

    def __init__(
        self, *, on_end: Callable[[int, int], object], on_warning: Callable[[str], None], on_gone: Callable[[], None],
        on_start: Callable[[int, int], None] = lambda rank, pid: None,
    ) -> None:
        """`on_start` gets a local rank and its process id, `on_end` a local rank and its exit code. If the server was
        killed, `on_end` is called for each of its ranks, then `on_gone`, which may start another server."""
        self._on_start, self._on_end, self._on_warning, self._on_gone = on_start, on_end, on_warning, on_gone
        self.pids: dict[int, int] = {}
        self._starts = 0  # how many starts were asked for; also the number of the newest start
        self._newest: dict[int, int] = {}  # the number of each rank's newest start
        self.ready = asyncio.Event()

    def start(
        self, modules: Sequence[str] = (), *, env: Mapping[str, str], preload: Sequence[str] = (), folder: str = "",
        fork: bool = True,
    ) -> None:
        """Start the server. It imports torch and `modules`, then `preload` with `folder` on sys.path. If an import
        fails, the rank repeats it and reports the error. `env`: the server's environment. Its OMP_NUM_THREADS and
        Python's own variables also count for forked ranks. `fork`: False starts ranks as fresh interpreters."""
        self.ready.clear()
        self._channel, theirs = connection.Pipe()
        order = {"channel": theirs.fileno(), "parent": os.getpid(), "fork": fork, "folder": folder,
                 "modules": [*modules], "preload": [*preload]}
        with theirs:
            # Detached from the terminal (setsid), so that Ctrl-C reaches only the agent, which passes it on once
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(order)], env=dict(env), pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True,
            )
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self._on_readable)

    def start_rank(
        self, local_rank: int, argv: Sequence[str], *, env: Mapping[str, str], name: str, cwd: str = "",
        outputs: Sequence[int] = (),
    ) -> None:
        """Start `python ARGV`. `env`: the whole environment. `name`: the name that `ps` shows. `outputs`: descriptors
        of stdout and stderr; the caller closes its own."""
        self._starts += 1
        self.pids[local_rank], self._newest[local_rank] = 0, self._starts
        request: dict[str, Any] = {"argv": [*argv], "env": dict(env), "cwd": cwd or os.getcwd()}
        self._ask(outputs, start=local_rank, number=self._starts, name=name, **request)

    def start_store(self, listener: socket.socket) -> None:
        """Replace the store: a child of the server serves a TCPStore on `listener`. The caller closes its own copy."""
        self._ask([listener.fileno()], start=STORE, number=0, name="store")

    def signal(self, local_rank: int, number: int) -> None:
        """Send a signal to a rank, see `send_signal`. Processes that the rank has started are killed when it ends."""
        self._ask(signal=number, rank=local_rank)

    def close(self) -> None:
        """End the server and its store. Call this when no rank runs any more. No callback follows."""
        if not self._channel.closed:
            self._loop.remove_reader(self._channel)
        self._channel.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be importing from a disk that hangs
            self._process.wait(KILL_S)

    def _ask(self, descriptors: Sequence[int] = (), **request: Any) -> None:
        with contextlib.suppress(OSError):  # the server is gone, which `_on_readable` will notice
            self._channel.send_bytes(json.dumps({**request, "descriptors": len(descriptors)}).encode())
            for descriptor in descriptors:
                reduction.send_handle(self._channel, descriptor, self.pid)

    def _on_readable(self) -> None:
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
        elif self._newest.get(rank := news["rank"]) == news["number"]:  # otherwise a store, or a rank that was given up
            if "pid" in news:
                self.pids[rank] = news["pid"]
                self._on_start(rank, news["pid"])
            else:
                del self.pids[rank]
                self._on_end(rank, news["code"])

    async def _bury(self) -> None:
        """Clean up after the server was killed. The kernel kills its children; this kills what they have started."""
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
    """Return why this process must not be forked, or "" if it may be."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"it has {threads} threads"
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # listdir's own descriptor is closed by now
            if (path := os.readlink(f"/proc/self/fd/{number}")).startswith(("/dev/nvidia", "/dev/kfd")):
                return f"it has opened {path}"
    return ""


class Server:
    """The server process. It starts and signals the ranks and the store, which end with it. It ends with its agent."""

    # A batch system sends these to every process of a job. The server blocks them, because the agent gets them too. A
    # rank unblocks them when its script begins. Server and ranks ignore SIGUSR1, until a rank sets a handler
    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)

    def __init__(self, channel: "connection.Connection[Any, Any]", *, fork: bool) -> None:
        self.channel, self.fork, self.pid, self._given = channel, fork, os.getpid(), [*os.environ]
        self._running: dict[int, tuple[int, int]] = {}  # process id -> local rank or STORE, and number of the start
        signal.pthread_sigmask(signal.SIG_BLOCK, self.SIGNALS)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._woken, self._waker = socket.socketpair()  # wakes `serve` when a child ends
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def prepare(self, order: Mapping[str, Any]) -> None:
        """Import once what every rank would import."""
        # Garbage collection takes a fifth of the time to import torch: it walks 350,000 objects and finds nothing
        gc.disable()
        with contextlib.suppress(Exception):
            import torch

            # A parallel operation before the fork would start threads, and a forked rank would wait for them forever
            self.num_threads = torch.get_num_threads()
            torch.set_num_threads(1)
        _import_all("torch._dynamo", *order["modules"])  # an optimizer's first step imports torch._dynamo
        sys.path.insert(0, order["folder"])
        _import_all(*order["preload"])
        sys.path.remove(order["folder"])
        # OpenBLAS, which comes with numpy, starts threads when it is loaded, and ends them at a fork. So fork once here
        if (pid := os.fork()) == 0:
            os._exit(FINISHED)
        os.waitpid(pid, 0)
        gc.freeze()  # a collection in a rank would write to shared memory, and so copy it
        gc.enable()

    def serve(self) -> list[str]:
        """Serve the agent. Returns only in a forked rank, with its argv."""
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
        """Send a message to the agent. If the agent is gone, `serve` notices it at the next request."""
        with contextlib.suppress(OSError):
            self.channel.send_bytes(json.dumps(news).encode())

    def _signal(self, local_rank: int, number: int) -> None:
        for pid in [pid for pid, (each, _) in self._running.items() if each == local_rank]:
            send_signal(pid, number)

    def _start(self, request: dict[str, Any]) -> bool:
        """Start a rank or the store. Returns True in the process of the new rank."""
        which = request["start"]
        descriptors = [reduction.recv_handle(self.channel) for _ in range(request["descriptors"])]
        # Kill what is left of the last membership: its store, or a rank that was given up because its disk is dead
        self._signal(which, signal.SIGKILL)
        if (pid := self._fork(request["name"])) == 0:
            self.channel.close()  # an open copy would hide the end of the server from the agent
            if which == STORE:
                _serve_store(socket.socket(fileno=descriptors[0]))
            self._become(request, descriptors)
            return True
        for descriptor in descriptors:  # no rank may inherit the output of another rank
            os.close(descriptor)
        self._running[pid] = which, request["number"]
        self.tell(rank=which, number=request["number"], pid=pid)
        return False

    def _fork(self, name: str) -> int:
        """Fork like os.fork. The child leads its own process group (setsid), and ends with the server."""
        if pid := os.fork():
            return pid
        os.setsid()
        die_with_parent(self.pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._woken.close()
        self._waker.close()
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(name)  # otherwise `ps` shows the server's name
        return 0

    def _become(self, request: dict[str, Any], outputs: Sequence[int]) -> None:
        """Do what a fresh interpreter does at its start, except for `be_python`'s part. Without `fork`, exec one."""
        terminal = [_copy_of(stream) for stream in (1, 2)] if AGENT in request["env"] else []
        for stream, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        for name in {*self._given} - request["env"].keys():  # variables that imports have set stay
            os.environ.pop(name, None)
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        if not self.fork:
            if callable(signal.getsignal(signal.SIGINT)):  # Python's handler would raise KeyboardInterrupt here
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)
            if terminal:  # the rank moves Python's streams there when it opens its log
                for descriptor in terminal:
                    os.set_inheritable(descriptor, True)
                os.environ[AGENT] = json.dumps({**json.loads(os.environ[AGENT]), "terminal": terminal})
            os.execv(sys.executable, [sys.executable, *request["argv"]])
        print_to(terminal)
        if os.environ.get("PYTHONFAULTHANDLER"):
            faulthandler.enable(2)
        vars(multiprocessing.process)["ORIGINAL_DIR"] = os.getcwd()  # where spawned workers look for the script
        # Python's `random` gets a new seed after a fork by itself, but these two do not
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


def _copy_of(stream: int) -> int:
    try:
        return os.dup(stream)
    except OSError:  # it was closed when the agent started
        return os.open(os.devnull, os.O_WRONLY)


def _import_all(*names: str) -> None:
    """Import modules, or objects in modules. An import that fails here fails again in the rank, which reports it."""
    for name in names:
        with contextlib.suppress(Exception):
            pkgutil.resolve_name(name)


def _serve_store(listener: socket.socket) -> NoReturn:
    """Serve torch's store in this child: in the server it would start a thread. Signals stay blocked, as in the server,
    so that a signal to all processes of the job ends the ranks before their store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from rankup.agent.processes import no_name_lookups

    port = listener.getsockname()[1]
    with no_name_lookups():  # the store's only thread looks up each client: all ranks would wait for a slow resolver
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        while store:
            signal.pause()
    os._exit(FAULT)


def main() -> list[str]:
    """Run the server. Returns only in a forked rank, with its argv."""
    order = json.loads(sys.argv[1])
    die_with_parent(order["parent"])
    del sys.path[0]  # each rank puts its script's folder there
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
    """Tell this rank's agent why the rank ends; if there is no error, whether it has met another rank."""
    with contextlib.suppress(LookupError, ValueError):  # the script may have changed its environment
        agent = json.loads(os.environ[AGENT])
        if not why:
            alone.note(agent["place"])
            return
        from rankup.agent.ends import End

        tell_agent(agent, End(int(os.environ["RANK"]), "", code, why).entry())


if __name__ == "__main__":
    be_python(main(), say_why)
