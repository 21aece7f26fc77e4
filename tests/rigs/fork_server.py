"""Jobs whose processes are forked from a process that has imported torch: the first step takes 0.3 s instead of 4.

Each is still a process of its own, with its own signals, session, environment and end; only the start differs. The same
holds for an agent's fork server. Tests of the start itself use `jobs.start`."""

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tests.rigs.jobs import ROOT, environment, free_port, rank_env, wait_for
from tests.rigs.places import FAULTS


class Process:
    """One forked process, used like a Popen. `code`: the exit code, or minus the signal that ended the process."""

    def __init__(self, pid: int, output_file: Path) -> None:
        self.pid, self.output_file = pid, output_file
        self.code: int | None = None
        self.ended = threading.Event()

    @property
    def output(self) -> str:
        return self.output_file.read_text(encoding="utf-8", errors="replace")

    def signal(self, name: str) -> None:
        """Send the signal to this process alone."""
        os.kill(self.pid, getattr(signal, name))

    def signal_group(self, name: str) -> None:
        """Send the signal to the process and all its children, as a batch system or a terminal does."""
        os.killpg(self.pid, getattr(signal, name))

    def kill(self) -> None:
        """Kill the process and all its children. It may have ended already, before the news of its end arrived."""
        with contextlib.suppress(ProcessLookupError):
            self.signal_group("SIGKILL")


class Job:
    """The ranks of one job."""

    def __init__(self, processes: list[Process]) -> None:
        self.processes = processes

    @property
    def output(self) -> str:
        return "\n".join(process.output for process in self.processes)

    def wait(self, timeout_s: float = 240) -> list[int]:
        """Wait for all ranks and return their codes. After the bound, kill them and fail the test."""
        until_s = time.monotonic() + timeout_s
        for process in self.processes:
            if not process.ended.wait(max(0.1, until_s - time.monotonic())):
                self.kill()
                raise AssertionError(f"the job did not end within {timeout_s} s:\n{self.output}")
        return [process.code for process in self.processes if process.code is not None]

    def wait_for(self, text: str, *, timeout_s: float = 240, count: int = 1) -> None:
        """Wait until the ranks have printed `text` `count` times."""
        self.wait_until(lambda: self.output.count(text) >= count, f'"{text}"', timeout_s=timeout_s)

    def wait_until(self, true: Callable[[], Any], what: str, *, timeout_s: float = 240) -> None:
        def over() -> bool:
            return all(process.code is not None for process in self.processes)

        wait_for(what, true, timeout_s=timeout_s, log=lambda: self.output, over=over)

    def kill(self) -> None:
        for process in self.processes:
            if process.code is None:
                process.kill()
        for process in self.processes:
            process.ended.wait(60)


class Forks:
    """The process that forks, and the processes that it forked."""

    def __init__(self, folder: Path, *, more: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        """`more`: further modules to import, which take long and which these jobs need. `env`: for all jobs."""
        self.folder = folder
        self.server = subprocess.Popen(
            [sys.executable, __file__, *more], cwd=ROOT, text=True, bufsize=1, start_new_session=True,
            # rankup sets this before it imports torch, which is too late here. torch's own warnings come by chance
            env=environment({"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR", **(env or {})}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        self._count = 0
        self._started: list[int] = []
        self._processes: dict[int, Process] = {}
        self._news = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def start(
        self,
        *arguments: str | Path,
        world_size: int = 1,
        env: Mapping[str, str] | None = None,
        cwds: Sequence[Path] = (),
        preload: str = "",
    ) -> Job:
        """Run `rankup ARGUMENTS` in `world_size` processes. `preload`: a module:function to call first in each."""
        port = free_port()
        processes = []
        for rank in range(world_size):
            given = {**(rank_env(rank, world_size, port) if world_size > 1 else {}), **(env or {})}
            cwd = cwds[rank] if cwds else ROOT
            processes.append(self._fork([str(word) for word in arguments], given, cwd, preload))
        return Job(processes)

    def run(
        self, *arguments: str | Path, world_size: int = 1, timeout_s: float = 240, **more: Any
    ) -> tuple[list[int], str]:
        """Run a job to its end. Return the exit codes and all output."""
        job = self.start(*arguments, world_size=world_size, **more)
        return job.wait(timeout_s), job.output

    def ends(self, *arguments: str | Path, code: int | list[int] = 0, world_size: int = 1, **more: Any) -> str:
        """Run a job to its end and return all output. Each process must end with `code`, or the processes with these
        codes. Code 2 is the user's mistake: one line without a traceback."""
        codes, output = self.run(*arguments, world_size=world_size, **more)
        assert codes == ([code] * world_size if isinstance(code, int) else code), output
        assert code != 2 or "Traceback" not in output, output
        return output

    @contextmanager
    def running(self, *arguments: str | Path, **more: Any) -> Iterator[Job]:
        """Start a job, and kill what is left of it at the end of the block."""
        job = self.start(*arguments, **more)
        try:
            yield job
        finally:
            job.kill()

    def close(self) -> None:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        # Closing the pipe is not enough while another process holds it open, such as a DataLoader worker
        with contextlib.suppress(BrokenPipeError):
            self.server.stdin.write("end\n")
            self.server.stdin.close()
        self.server.wait(60)
        self._listener.join(60)
        self.server.stdout.close()

    def _fork(self, arguments: list[str], env: dict[str, str], cwd: Path, preload: str) -> Process:
        assert self.server.stdin is not None
        self._count += 1
        output = self.folder / f"{self._count}.txt"
        output.touch()  # a reader finds an empty file, not an error, before the process has begun
        request = {"arguments": arguments, "env": env, "cwd": str(cwd), "output": str(output), "preload": preload}
        with self._news:
            self.server.stdin.write(json.dumps(request) + "\n")
            # Before its first fork the server imports torch and more, which took 20 s on two busy CPUs
            assert self._news.wait_for(lambda: self._started, 240), "the forking process does not answer"
            process = Process(self._started.pop(), output)
            self._processes[process.pid] = process
            self._news.notify_all()
        return process

    def _listen(self) -> None:
        assert self.server.stdout is not None
        for line in self.server.stdout:
            news = json.loads(line)
            with self._news:
                if "started" in news:
                    self._started.append(news["started"])
                    self._news.notify_all()
            if "ended" in news:
                pid = news["ended"]
                with self._news:  # the thread that forked it may not have entered it yet
                    assert self._news.wait_for(lambda pid=pid: pid in self._processes, 60), f"nobody started {pid}"
                    process = self._processes.pop(pid)
                process.code = news["code"]
                process.ended.set()


# In the process that forks ------------------------------------------------------------------------------------

# Python reads these variables at its start. If an agent has other values, its fork server starts as a new interpreter
READ_AT_START = ("PYTHONWARNINGS", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "TORCH_LOGS")
AT_START = dict(os.environ)


def serve() -> None:
    """Fork one job for each line of stdin. Report on stdout which processes were started and which ended."""
    commands = ("train.commands.checkpoint", "rankup.doctor.stages", "train.loop", "rankup.cli", "rankup.job",
                "rankup.launch")
    gc.disable()
    for slow in ("torch._dynamo", "torch.utils.tensorboard", "fire",
                 *commands, "train.workloads.images", "train.workloads.text", "train.data.sources.in_memory",
                 *sys.argv[1:]):
        importlib.import_module(slow)
    # Each init_process_group searches the entry points of all packages for backends: remember them
    vars(importlib.metadata)["entry_points"] = entry_points = functools.cache(importlib.metadata.entry_points)
    entry_points(group="torch.distributed.backends")
    gc.freeze()  # as the agent's fork server does: a collection in a fork would write to shared memory, and so copy it
    gc.enable()

    wakeup, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno())

    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    selector.register(wakeup, selectors.EVENT_READ)
    pending, alive, open_ = b"", set(), True
    while open_ or alive:
        for key, _ in selector.select(1.0):
            if key.fileobj == wakeup:
                wakeup.recv(4096)
                continue
            data = os.read(sys.stdin.fileno(), 65536)
            *lines, pending = (pending + data).split(b"\n")
            if not data or b"end" in lines:
                lines = []
                selector.unregister(sys.stdin.fileno())
                open_ = False
                for pid in alive:
                    with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                        os.killpg(pid, signal.SIGKILL)
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    _be(json.loads(line))
                alive.add(pid)
        while alive and (found := os.waitpid(-1, os.WNOHANG))[0]:
            alive.discard(found[0])
            _tell({"ended": found[0], "code": os.waitstatus_to_exitcode(found[1])})
    os._exit(0)


def _tell(news: dict[str, int]) -> None:
    os.write(1, (json.dumps(news) + "\n").encode())


def _be(job: dict[str, Any]) -> NoReturn:
    """Become the process of a job."""
    import rankup
    from train.main import main

    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    output = os.open(job["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    _tell({"started": os.getpid()})  # only now can the process be signalled as a group, and has an output file
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.argv = ["rankup", *job["arguments"]]
    if job["preload"]:
        module, _, function = job["preload"].partition(":")
        getattr(importlib.import_module(module), function)()
    if job["arguments"][:1] == ["launch"]:
        _warm_servers(8 if any(word.startswith("--replay") for word in job["arguments"]) else 1)
        rankup.cli.entry()
    program = rankup.Program().begin()
    program.exit(main(program=program))


class _Server:
    """A fork server that waits for its order. It has the methods of a Popen that the agent uses."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, _: float) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED)


def _warm_servers(count: int) -> None:
    """In an agent: fork its first fork servers from this process, which has imported torch: no cold starts."""
    from rankup.agent import fork_server

    unused = list[_Server]()
    for _ in range(count):
        ours, theirs = socket.socketpair()
        if (pid := os.fork()) == 0:
            ours.close()
            for other in unused:
                other.channel.close()
            os.setsid()
            _be_a_server(theirs)
        theirs.close()
        unused.append(_Server(pid, ours))

    def start(command: list[str], *, env: dict[str, str], pass_fds: list[int], **more: Any) -> Any:
        order = json.loads(command[2])
        # With injected faults only PYTHONPATH differs: it leads to a sitecustomize that installs the hooks
        read = [name for name in READ_AT_START if name != "PYTHONPATH" or FAULTS not in env]
        if not order["fork"] or not unused or any(env.get(name) != AT_START.get(name) for name in read):
            return subprocess.Popen(command, env=env, pass_fds=pass_fds, **more)
        server = unused.pop()
        with server.channel as channel:
            socket.send_fds(channel, [json.dumps([command[1], order, env]).encode()], pass_fds)
        return server

    vars(fork_server)["subprocess"] = types.SimpleNamespace(**{**vars(subprocess), "Popen": start})


def _be_a_server(channel: socket.socket) -> NoReturn:
    """Wait for the order, then run as the fork server's file."""
    data, (passed, *_) = b"", [-1]
    with channel:
        while True:
            more, descriptors, *_ = socket.recv_fds(channel, 1 << 20, 1)
            if not more:
                break
            data, passed = data + more, descriptors[0] if descriptors else passed
    if not data:  # the agent has ended, or starts its ranks as new interpreters
        os._exit(0)
    file, order, env = json.loads(data)
    os.environ.clear()
    os.environ.update(env)
    del sys.path[0]  # the directory of this file
    if FAULTS in env:  # the hooks need modules that are imported anew
        for name in [name for name in sys.modules if name.partition(".")[0] in ("rankup", "train", "tests")]:
            del sys.modules[name]
        importlib.import_module("tests.rigs.places").install()
    sys.argv = [file, json.dumps({**order, "channel": passed})]
    runpy.run_path(file, run_name="__main__")
    os._exit(99)


if __name__ == "__main__":
    from rankup.agent.processes import die_with_parent

    die_with_parent(os.getppid())
    serve()
