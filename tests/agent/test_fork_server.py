"""The fork server: a forked rank is like a fresh `python`, and does not outlive what started it. test_launch.py ends
servers together with their agents."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankup.agent.fork_server import ForkServer, Server, obstacle
from rankup.agent.network import open_port
from rankup.agent.processes import state_of
from tests.rigs.jobs import ROOT, environment, wait_for


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def facts(self) -> Any:
        """The JSON in the last line that the script printed."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])


class Rig:
    """An agent's event loop with a fork server, for tests that are not coroutines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner = asyncio.Runner()
        self.codes: dict[int, int] = {}
        self.warnings: list[str] = []
        self.server = ForkServer(on_end=self.codes.__setitem__, on_warning=self.warnings.append,
                                 on_gone=lambda: self.warnings.append("gone"))
        self.env = environment()
        self._started = 0

    def until(self, true: Callable[[], Any]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(240):
                while not true():
                    self.server._reap()  # only one event loop of a process gets SIGCHLD, and the tests have several
                    await asyncio.sleep(0.005)

        self.runner.run(wait())

    def open(self, **more: Any) -> "Rig":
        async def start() -> None:
            self.server.start(**{"env": self.env, **more})

        self.runner.run(start())
        return self

    def store(self) -> int:
        """Make the server serve a store. Return its port."""
        with open_port("127.0.0.1", 0) as listener:
            self.server.start_store(listener)
            return int(listener.getsockname()[1])

    def start(self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | str = "") -> int:
        """Start a rank, whose output goes to two files. Return its number."""
        rank = self._started = self._started + 1
        files = [os.open(self.folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY) for name in ("out", "err")]
        self.server.start_rank(
            rank, [str(word) for word in argv], env={**self.env, **(env or {})}, name=f"rank {rank}", cwd=str(cwd),
            outputs=files,
        )
        for file in files:
            os.close(file)
        return rank

    def printed(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text()

    def end(self, rank: int) -> Ended:
        self.until(lambda: rank in self.codes)
        return Ended(self.codes[rank], self.printed(rank), (self.folder / f"{rank}.err").read_text())

    def ran(self, argv: Sequence[str | Path], **more: Any) -> Ended:
        return self.end(self.start(argv, **more))

    def ready(self, rank: int) -> int:
        """Wait until the rank has printed a line, and return its process. The line may arrive before the news of its
        start."""
        self.until(lambda: "\n" in self.printed(rank) and self.server.pids[rank])
        return self.server.pids[rank]

    def close(self) -> None:
        self.server.close()
        self.runner.close()


def opened(for_files: Path, **more: Any) -> "contextlib.closing[Rig]":
    """A server for one test."""
    return contextlib.closing(Rig(for_files).open(**more))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One server with torch, for all tests that do not end it."""
    with contextlib.closing(Rig(tmp_path_factory.mktemp("forked"))) as rig:
        rig.env["OMP_NUM_THREADS"] = "2"
        yield rig.open(modules=["numpy.random"], env={**rig.env, "ONLY_OF_THE_SERVER": "1"})


@pytest.fixture
def light(tmp_path: Path) -> Iterator[Rig]:
    """A server without torch, which starts new interpreters."""
    with opened(tmp_path, fork=False) as rig:
        yield rig


def gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def fresh(argv: Sequence[str | Path], *, env: Mapping[str, str], cwd: Path) -> Ended:
    done = subprocess.run([sys.executable, *map(str, argv)], env=env, cwd=cwd, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False)
    return Ended(done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stdout, done.stderr)


# As a fresh interpreter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "import sys\nsys.exit('a text')",
    "import sys\nsys.exit()",
    "raise SystemExit(True)",
    "import os\nos.abort()",
    "raise KeyboardInterrupt",
    "def function():\n    raise ValueError('wrong')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    function()",
    "import sys\nsys.excepthook = lambda kind, error, trace: print('mine', kind, trace.tb_lineno)\n1 / 0",
    "import atexit\natexit.register(print, 'at the end')\nraise SystemExit(4)",
    "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('a thread'))).start()",
    "x = = 3",
    "import warnings\nwarnings.simplefilter('always')\nwarnings.warn('look')",
    "def f(x: int): pass\nprint(f.__annotations__)",
])
def test_script_prints_and_ends_as_in_a_fresh_interpreter(text: str, rig: Rig, tmp_path: Path) -> None:
    file = script(tmp_path, text)
    assert rig.ran([file]) == fresh([file], env=rig.env, cwd=ROOT)


FACTS = """
import builtins, json, os, sys
main = sys.modules["__main__"]
spec = getattr(main, "__spec__", "none")
assert main.__dict__ is globals()
print(json.dumps({
    "path": sys.path, "argv": sys.argv, "orig_argv": sys.orig_argv, "cwd": os.getcwd(),
    "name": __name__, "file": __file__, "spec": spec and spec.name, "package": __package__, "cached": __cached__,
    "loader": type(__loader__).__name__, "builtins": __builtins__ is builtins,
    "names": sorted(name for name in globals() if name.startswith("__")),
}))
"""
# Facts of the process. They do not depend on how the script is named, and a new interpreter must import torch for them
OF_PROCESS = """
import gc, json, os, random, signal, sys, threading, warnings
import numpy, torch, torch._dynamo
matrix = torch.arange(300 * 300, dtype=torch.float32).reshape(300, 300).sin()
array = matrix.numpy()
print(json.dumps({
    "environment": dict(os.environ), "path": sys.path,
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
    "sums": [(matrix @ matrix).double().sum().item(), matrix.sum().item(), float((array @ array).sum())],
    "warnings": [str(entry) for entry in warnings.filters], "gc": [gc.isenabled(), *gc.get_threshold()],
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "handlers": {str(number): str(signal.getsignal(number)).partition(" at ")[0] for number in
                 (signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)},
    "wakeup": signal.set_wakeup_fd(-1), "stdin": os.readlink("/proc/self/fd/0"),
    "descriptors": len(os.listdir("/proc/self/fd")), "stdout": str(sys.stdout), "stderr": str(sys.stderr),
}))
"""


@pytest.mark.parametrize("how", ["link", "module", "package"])
def test_forked_script_finds_the_same_as_a_fresh_one(how: str, rig: Rig, tmp_path: Path) -> None:
    argv = {"link": ["link.py"], "module": ["-m", "folder.script"], "package": ["-m", "folder"]}[how]
    (tmp_path / "folder").mkdir()
    script(tmp_path / "folder", FACTS)
    script(tmp_path / "folder", FACTS, "__main__.py")
    (tmp_path / "link.py").symlink_to("folder/script.py")
    argv = [*argv, "--lr", "0.5"]
    forked = rig.ran(argv, env={"MINE": "1"}, cwd=tmp_path).facts
    expected = fresh(argv, env={**rig.env, "MINE": "1"}, cwd=tmp_path).facts
    assert forked == {**expected, "orig_argv": forked["orig_argv"]}
    assert forked["orig_argv"][1:] == argv


def test_forked_process_has_the_properties_of_a_fresh_one(rig: Rig, tmp_path: Path) -> None:
    file, env = script(tmp_path, OF_PROCESS), {"MINE": "1"}
    assert rig.ran([file], env=env).facts == fresh([file], env={**rig.env, **env}, cwd=ROOT).facts


def test_each_fork_draws_its_own_random_numbers(rig: Rig, tmp_path: Path) -> None:
    file = script(tmp_path, "import json, random, numpy, torch\nprint(json.dumps([random.random(), "
                            "numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()]))")
    first, second = rig.ran([file]).facts, rig.ran([file]).facts
    assert all(one != other for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("of_module", [False, True])
def test_spawned_workers_and_pickles_find_the_scripts_definitions(of_module: bool, rig: Rig, tmp_path: Path) -> None:
    script(tmp_path, """
import multiprocessing, pickle, sys
class Thing:
    def __init__(self, number): self.number = number
def work(thing, queue):
    queue.put((thing.number, __name__))
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing(4))).number == 4
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(Thing(5), queue))
    process.start()
    print(queue.get())
    process.join()
    sys.exit(process.exitcode)
""")
    ended = rig.ran(["-m", "script"] if of_module else ["script.py"], cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "(5, '__mp_main__')\n"), ended.err


def test_open_files_of_a_script_are_flushed_at_its_end(rig: Rig, tmp_path: Path) -> None:
    file = script(tmp_path, "text, data = open('text', 'w'), open('data', 'wb')\n"
                  "text.write('left open')\ndata.write(b'left open too')\n"
                  "import gc\ngc.collect()\nprint('no newline', end='')")
    assert rig.ran([file], cwd=tmp_path).out == "no newline"
    assert (tmp_path / "text").read_text() == "left open"
    assert (tmp_path / "data").read_bytes() == b"left open too"


# Signals and ends ---------------------------------------------------------------------------------------------------

WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(600)"


def test_stop_signal_during_the_start_is_not_lost(rig: Rig, light: Rig, tmp_path: Path) -> None:
    """The signal follows the request at once: the fork has not begun to run the script."""
    file = script(tmp_path, WAITS)
    for each in (rig, light):
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            rank = each.start([file])
            each.server.signal(rank, number)
            assert each.end(rank).code == code


def test_signals_reach_only_the_process_and_run_the_scripts_handlers(rig: Rig, tmp_path: Path) -> None:
    file = script(tmp_path, """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("USR1", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
try:
    while True: time.sleep(0.01)
except KeyboardInterrupt:
    print("interrupted", child.poll())
""")
    rank = rig.start([file])
    assert psutil.Process(rig.ready(rank)).name() == f"rank {rank}"
    rig.server.signal(rank, signal.SIGUSR1)
    rig.until(lambda: "USR1" in rig.printed(rank))
    rig.server.signal(rank, signal.SIGINT)
    ended = rig.end(rank)
    assert (ended.code, ended.out.split()[1:]) == (0, ["USR1", "interrupted", "None"])


def test_server_starts_ranks_of_an_agent_with_a_thousand_open_files(tmp_path: Path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, usual[1]), usual[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, usual)
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        with opened(tmp_path, fork=False) as rig:
            assert rig.ran([script(tmp_path, "print('here')")]).out == "here\n"


def test_sigusr1_does_not_end_a_script_without_a_handler(rig: Rig, light: Rig, tmp_path: Path) -> None:
    file = script(tmp_path, "import os, signal\nprint(signal.getsignal(signal.SIGUSR1).name)\n"
                            "os.kill(os.getpid(), signal.SIGUSR1)\nprint('alive')")
    for each in (rig, light):
        assert each.ran([file]).out == "SIG_IGN\nalive\n"


@pytest.mark.parametrize("how", ["kill", "end"])
def test_children_of_a_rank_end_with_it(how: str, rig: Rig, light: Rig, tmp_path: Path) -> None:
    file = script(tmp_path, """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
if sys.argv[1] == "kill":
    time.sleep(600)
import os
os._exit(5)
""")
    for each in (rig, light):
        rank = each.start([file, how])
        each.until(lambda rank=rank, each=each: "\n" in each.printed(rank))
        if how == "kill":
            each.server.signal(rank, signal.SIGKILL)
        ended = each.end(rank)
        assert ended.code == {"kill": 137, "end": 5}[how]
        each.until(lambda ended=ended: gone(int(ended.out)))


def running_children(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if state_of(child.pid) != "Z"]


def test_rank_outlives_its_server_and_one_that_was_to_start_has_ended(tmp_path: Path) -> None:
    with opened(tmp_path, fork=False) as own:
        first = own.start([script(tmp_path, WAITS)])
        pid = own.ready(first)
        # The child that has started the first rank ends, and only the next one would start the second
        own.until(lambda: psutil.Process(pid).ppid() == os.getpid())
        own.until(lambda: running_children(own.server.pid))
        running_children(own.server.pid)[0].suspend()
        second = own.start([script(tmp_path, WAITS)])
        os.kill(own.server.pid, signal.SIGKILL)
        assert own.end(second).code == 137
        own.until(lambda: own.warnings)
        assert (own.warnings, own.codes, gone(pid)) == (["gone"], {second: 137}, False)
        own.server.signal(first, signal.SIGTERM)
        assert own.end(first).code == 143


def test_end_of_a_rank_is_not_taken_for_an_orphans_before_its_start_is_known(tmp_path: Path) -> None:
    """The agent got no CPU between its look at the news and its look at the children that have ended."""
    def ended() -> set[int]:
        return {child.pid for child in psutil.Process().children() if state_of(child.pid) == "Z"}

    with opened(tmp_path, fork=False) as own:
        channel, before = own.server._channel, ended()
        poll = channel.poll

        def late() -> bool:
            channel.poll = poll  # type: ignore[method-assign]
            wait_for("the end of the rank", lambda: ended() - before)
            return False

        channel.poll = late  # type: ignore[assignment,method-assign]
        assert own.ran([script(tmp_path, "import sys\nsys.exit(3)")]).code == 3


@pytest.mark.timeout(120)
def test_news_that_come_together_with_a_signal_do_not_block_the_agent(tmp_path: Path) -> None:
    """In one turn of the event loop the end of a child is handled, which reads the news, and then the news."""
    with opened(tmp_path, fork=False) as own:
        file = script(tmp_path, WAITS)
        own.ready(own.start([file]))
        second = own.start([file])

        async def both() -> None:
            await asyncio.sleep(0)  # the server gets the order
            wait_for("the news of the start", own.server._channel.poll)
            asyncio.get_running_loop().call_soon(own.server._reap)
            await asyncio.sleep(0.1)

        own.runner.run(both())
        assert own.server.pids[second]


@pytest.mark.parametrize("unread", [False, True])
def test_end_of_an_abandoned_rank_is_not_its_successors(unread: bool, light: Rig, tmp_path: Path) -> None:
    """The rank waited for a dead disk. It is killed when the next rank with its number starts, or has just ended."""
    first = light.start([script(tmp_path, "print(flush=True)\nimport sys\nsys.exit(5)" if unread else WAITS)])
    if unread:
        light.runner.run(asyncio.sleep(0))  # the request goes out, and no answer is read
        wait_for("the end of the first", lambda: light.printed(1) and any(
            child.status() == psutil.STATUS_ZOMBIE and os.getsid(child.pid) == child.pid
            for child in psutil.Process().children()
        ))
    else:
        light.ready(first)
    light.server.start_rank(1, [str(script(tmp_path, "import sys\nsys.exit(3)", "next.py"))], env=light.env, name="")
    light.until(lambda: light.codes)
    assert light.codes == {1: 3}


def test_server_survives_signals_to_every_process(rig: Rig, tmp_path: Path) -> None:
    port = rig.store()
    rig.until(lambda: rig.server._running)
    server = psutil.Process(rig.server.pid)
    for process in (server, *server.children(), *map(psutil.Process, rig.server._running)):
        for number in (*Server.SIGNALS, signal.SIGUSR1):
            process.send_signal(number)
    assert rig.ran([script(tmp_path, store_user(port))]).code == 0


# The store ----------------------------------------------------------------------------------------------------------


def store_user(port: int) -> str:
    return (
        f"from torch.distributed import TCPStore\nstore = TCPStore('127.0.0.1', {port}, is_master=False)\n"
        "store.set('key', 'value')\nassert store.get('key') == b'value'\nprint(store.num_keys())"
    )


def reachable(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10):
        return True
    return False


def test_store_is_served_until_the_next_one_replaces_it(rig: Rig, tmp_path: Path) -> None:
    first = rig.store()
    assert rig.ran([script(tmp_path, store_user(first))]).code == 0
    second = rig.store()
    assert second != first
    rig.until(lambda: not reachable(first))
    user = rig.ran([script(tmp_path, store_user(second))])
    assert user.out == rig.ran([script(tmp_path, store_user(rig.store()))]).out, "the new store is not empty"
    assert len(os.listdir(f"/proc/{rig.server.pid}/task")) == 1


# Whether the server may be forked -------------------------------------------------------------------------------------


def test_server_with_a_thread_starts_fresh_interpreters(tmp_path: Path) -> None:
    script(tmp_path, "import threading, time\n"
                     "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "threaded.py")
    file = script(tmp_path, "import sys\nprint('torch' in sys.modules, sys.argv[1:])\nsys.exit(3)")
    with opened(tmp_path, preload=["threaded", "missing"], folder=str(tmp_path)) as own:
        rank = own.start([file, "a word"])
        assert (own.end(rank).code, own.printed(rank)) == (3, "False ['a word']\n")
        assert own.warnings[0].startswith("ranks are started as fresh interpreters, not forked from a process that has")
        assert "it has 2 threads" in own.warnings[0]
        assert own.ran([script(tmp_path, store_user(own.store()))]).code == 0


def test_server_with_a_device_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: ["0"])  # pytest's own process may have threads
    assert obstacle() == ""
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidia0")
    assert obstacle() == "it has opened /dev/nvidia0"
