"""The fork server: a process that has imported torch, from which a node's ranks are forked in tenths of a second.

The agent runs this file as a program. They exchange JSON objects through a pipe of multiprocessing. `ForkServer`, the
agent's side, asks to start ranks. `Server` reports when it is ready, ranks' starts, and warnings. The ranks are
children of the agent, which is a subreaper: it signals them, hears of their ends, and they outlive the server.

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
from rankup.agent.links import tell_agent
from rankup.agent.logs import print_to
from rankup.agent.processes import (
    be_python,
    become_subreaper,
    die_with_heir,
    die_with_parent,
    end_of,
    has_ended,
    reap_orphans,
    send_signal,
)
from rankup.agent.protocol import KILLED
from rankup.agent.record import Record
from rankup.errors import FAULT, FINISHED, UserError
from rankup.timing import ADOPTED_S, KILL_S

AGENT = "RANKUP_AGENT"
STORE = -1  # stands for the store in place of a local rank
AGENT_ENDED = 3  # the exit code of the server's child

# The agent's side ---------------------------------------------------------------------------------------------------


class ForkServer:
    """The agent's side of the fork server, used in the event loop's thread, which must be the main thread. `pids`: the
    process ids of running ranks, by local rank; 0 while a rank is being started. `ready` is set when the server has
    imported its modules."""

    def __init__(
        self, *, on_end: Callable[[int, int], object], on_warning: Callable[[str], None], on_gone: Callable[[], None],
        on_start: Callable[[int, int], None] = lambda rank, pid: None,
    ) -> None:
        """`on_start` gets a local rank and its process id, `on_end` a local rank and its exit code. If the server was
        killed, `on_end` is called for each rank that it had still to start, then `on_gone`, which may start another."""
        self._on_start, self._on_end, self._on_warning, self._on_gone = on_start, on_end, on_warning, on_gone
        self.pids: dict[int, int] = {}
        self._starts = 0  # how many starts were asked for; also the number of the newest start
        self._newest: dict[int, int] = {}  # the number of each rank's newest start; also the store's, under STORE
        self._running: dict[int, tuple[int, int]] = {}  # process id -> local rank or STORE, and number of the start
        self._due: dict[int, list[int]] = {}  # signals for ranks that are being started
        self._starting = False  # whether ranks start in this turn of the event loop
        self.ready = asyncio.Event()

    def start(
        self, modules: Sequence[str] = (), *, env: Mapping[str, str], preload: Sequence[str] = (), folder: str = "",
        fork: bool = True,
    ) -> None:
        """Start the server. It imports torch and `modules`, then `preload` with `folder` on sys.path. If an import
        fails, the rank repeats it and reports the error. `env`: the server's environment. Its OMP_NUM_THREADS and
        Python's own variables also count for forked ranks. `fork`: False starts ranks as fresh interpreters."""
        self.ready.clear()
        become_subreaper()
        self._channel, theirs = connection.Pipe()
        order = {"channel": theirs.fileno(), "parent": os.getpid(), "fork": fork, "folder": folder,
                 "modules": [*modules], "preload": [*preload]}
        with theirs:
            # Detached from the terminal (setsid), so that Ctrl-C reaches only the agent, which passes it on once
            try:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, json.dumps(order)], env=dict(env), pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL, start_new_session=True,
                )
            except BlockingIOError as error:
                limit = "ulimit -u, or pids.max of the container, must allow to start more processes"
                raise UserError(f"{limit}, got: {error.strerror}. Raise it, or end other processes.") from None
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self._known)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def start_rank(
        self, local_rank: int, argv: Sequence[str], *, env: Mapping[str, str], name: str, cwd: str = "",
        outputs: Sequence[int] = (), line: Sequence[int] = (),
    ) -> None:
        """Start `python ARGV`. `env`: the whole environment. `name`: the name that `ps` shows. `outputs`: descriptors
        of stdout and stderr. `line`: those of the socket and the record of a rank that knows of its agent; the rank
        finds their numbers in RANKUP_AGENT. The caller closes its own descriptors."""
        self.pids[local_rank] = 0
        request: dict[str, Any] = {"argv": [*argv], "env": dict(env), "cwd": cwd or os.getcwd()}
        self._start([*outputs, *line], start=local_rank, name=name, **request)

    def start_store(self, listener: socket.socket) -> None:
        """Replace the store: a child of the server serves a TCPStore on `listener`. The caller closes its own copy."""
        self._start([listener.fileno()], start=STORE, name="store")

    def signal(self, local_rank: int, number: int) -> None:
        """Send a signal to a rank, see `send_signal`. Processes that the rank has started are killed when it ends."""
        if pid := self.pids.get(local_rank):
            send_signal(pid, number)
        elif pid == 0:
            self._due.setdefault(local_rank, []).append(number)

    def close(self) -> None:
        """End the server and its store. Call this when no rank runs any more. No callback follows."""
        self._loop.remove_signal_handler(signal.SIGCHLD)
        self._end_server()
        for pid, (which, _) in self._running.items():
            send_signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                if which == STORE:  # not a rank, which may wait for a dead disk
                    end_of(pid)

    def _end_server(self) -> None:
        if not self._channel.closed:
            self._loop.remove_reader(self._channel)
        self._channel.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be importing from a disk that hangs
            self._process.wait(KILL_S)

    def _start(self, descriptors: Sequence[int], **request: Any) -> None:
        if not self._starting and request["start"] != STORE:  # a membership's ranks start in one turn of the event loop
            self._starting = True
            self._loop.call_soon(self._end_batch)
        self._starts += 1
        which, self._newest[which] = request["start"], self._starts
        # Kill what is left of the last membership: its store, or a rank that was given up because its disk is dead
        for pid in [pid for pid, (each, _) in self._running.items() if each == which]:
            send_signal(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # the server is gone, which `_read` will notice
            request |= {"number": self._starts, "descriptors": len(descriptors)}
            self._channel.send_bytes(json.dumps(request).encode())
            for descriptor in descriptors:
                reduction.send_handle(self._channel, descriptor, self.pid)

    def _end_batch(self) -> None:
        self._starting = False
        with contextlib.suppress(OSError):
            self._channel.send_bytes(json.dumps({"start": None}).encode())

    def _read(self) -> None:
        try:
            news = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            self._bury()
            return
        if "ready" in news:
            self.ready.set()
        elif "warning" in news:
            self._on_warning(news["warning"])
        elif "lost" in news:
            self._lose_starts()
        else:
            rank, number, pid = news["rank"], news["number"], news["pid"]
            self._running[pid] = rank, number
            if self._newest[rank] != number:  # the next membership came first
                send_signal(pid, signal.SIGKILL)
            elif rank != STORE:
                self.pids[rank] = pid
                for due in self._due.pop(rank, ()):
                    send_signal(pid, due)
                self._on_start(rank, pid)

    def _reap(self) -> None:
        """Take the ends of ranks, and of the orphans that a subreaper inherits from them."""
        for pid in self._known():
            if not has_ended(pid):
                continue
            (rank, number), code = self._running.pop(pid), end_of(pid)
            if self._newest[rank] == number and rank != STORE:
                del self.pids[rank]
                self._on_end(rank, code)
        reap_orphans(but=lambda: {self.pid, *self._known()})

    def _known(self) -> list[int]:
        """Read what the server has told, without waiting. Return the process ids of ranks and stores. A rank may end
        before the news of its start is read, but that news is sent before this process can inherit the rank."""
        while not self._channel.closed and self._channel.poll():
            self._read()
        return [*self._running]

    def _bury(self) -> None:
        """Clean up after the server was killed. Its ranks live on."""
        self._end_server()
        self._lose_starts()
        self._on_gone()

    def _lose_starts(self) -> None:
        for rank in [rank for rank, pid in self.pids.items() if pid == 0]:
            del self.pids[rank]
            self._on_end(rank, KILLED)


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
    """The server process. It starts the ranks and the store, which the agent adopts. All of them end with the agent."""

    # A batch system sends these to every process of a job. The server blocks them, because the agent gets them too. A
    # rank unblocks them when its script begins. Server and ranks ignore SIGUSR1, until a rank sets a handler
    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)

    def __init__(self, channel: "connection.Connection[Any, Any]", *, fork: bool, agent: int) -> None:
        """`agent`: the agent's process id."""
        self.channel, self.fork, self.agent, self._given = channel, fork, agent, [*os.environ]
        signal.pthread_sigmask(signal.SIG_BLOCK, self.SIGNALS)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

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
        """Serve the agent. Returns only in a forked rank, with its argv.

        A child forks the ranks of one membership, and then ends, so that the agent inherits them. It is forked before
        they are needed, because its fork takes as long as that of a rank."""
        server = os.getpid()
        while (child := os.fork()) != 0:
            if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) == AGENT_ENDED:
                os._exit(FINISHED)
            if code != FINISHED:
                self.tell(lost=True)
        die_with_parent(server)
        while True:
            try:
                request = json.loads(self.channel.recv_bytes())
            except (EOFError, OSError):
                os._exit(AGENT_ENDED)
            if request["start"] is None:
                os._exit(FINISHED)
            if self._start(request):
                return [*request["argv"]]

    def tell(self, **news: Any) -> None:
        """Send a message to the agent. If the agent is gone, `serve` notices it at the next request."""
        with contextlib.suppress(OSError):
            self.channel.send_bytes(json.dumps(news).encode())

    def _start(self, request: dict[str, Any]) -> bool:
        """Start a rank or the store. Returns True in the process of the new rank."""
        descriptors = [reduction.recv_handle(self.channel) for _ in range(request["descriptors"])]
        parent = os.getpid()
        if pid := os.fork():
            for descriptor in descriptors:  # no rank may inherit the output of another rank
                os.close(descriptor)
            self.tell(rank=request["start"], number=request["number"], pid=pid)
            return False
        os.setsid()
        die_with_heir(self.agent, parent=parent)
        self.channel.close()  # an open copy would hide the end of the server from the agent
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(request["name"])  # otherwise `ps` shows the server's name
        if request["start"] == STORE:
            _serve_store(socket.socket(fileno=descriptors[0]))
        self._become(request, descriptors)
        return True

    def _become(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Do what a fresh interpreter does at its start, except for `be_python`'s part. Without `fork`, exec one."""
        outputs, line = descriptors[:2], descriptors[2:]
        terminal = [_copy_of(stream) for stream in (1, 2)] if line else []
        for stream, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        if line:
            agent = {**json.loads(request["env"][AGENT]), "line": line[0], "record": f"/proc/self/fd/{line[1]}"}
            if not self.fork:  # the rank moves Python's streams there when it opens its log
                agent["terminal"] = terminal
            request["env"][AGENT] = json.dumps(agent)
            for descriptor in (*line, *([] if self.fork else terminal)):  # a script may replace itself by exec
                os.set_inheritable(descriptor, True)
        for name in {*self._given} - request["env"].keys():  # variables that imports have set stay
            os.environ.pop(name, None)
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        if not self.fork:
            if callable(signal.getsignal(signal.SIGINT)):  # Python's handler would raise KeyboardInterrupt here
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)
            while signal.getsignal(signal.SIGURG) != signal.SIG_DFL:  # the handler would be lost
                time.sleep(ADOPTED_S)
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
    server = Server(connection.Connection(order["channel"]), fork=order["fork"], agent=order["parent"])
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
    with contextlib.suppress(LookupError, ValueError, OSError):  # the script may have changed its environment
        agent = json.loads(os.environ[AGENT])
        if not why:
            Record.at(agent["record"]).alone = alone.is_alone()
            return
        from rankup.agent.ends import End

        tell_agent(agent, End(int(os.environ["RANK"]), "", code, why).entry())


if __name__ == "__main__":
    be_python(main(), say_why)
