"""What the agent knows about processes, how it ends them, and the limits of a container or a batch job."""

import ast
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rankup.agent import fork_server, processes
from rankup.agent.fork_server import ForkServer
from rankup.agent.processes import (
    cpu_quota,
    explain_sigkill,
    has_handler,
    in_background,
    memory,
    oom_kills,
    send_signal,
    start_of,
    state_of,
)
from rankup.errors import UserError
from tests.rigs.jobs import ROOT, environment

# The kernel cuts names after 15 bytes. Each of these characters has three bytes, so the last one is incomplete
NAMED = """
import ctypes, signal, time
signal.signal(signal.SIGUSR1, lambda *_: None)
ctypes.CDLL(None).prctl(15, ") 训练进程程".encode(), 0, 0, 0)
print(1, flush=True)
time.sleep(600)
"""


def test_process_with_any_name_is_known_until_it_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            pid = process.pid
            assert state_of(pid) in ("S", "R")
            assert int(start_of(pid)) >= int(start_of(os.getpid()))
            assert [has_handler(pid, number) for number in (signal.SIGUSR1, signal.SIGUSR2)] == [True, False]
        finally:
            process.kill()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert (state_of(pid), start_of(pid)) == ("Z", "")
    assert (state_of(pid), start_of(pid), has_handler(pid, signal.SIGUSR1)) == ("", "", False)
    send_signal(pid, signal.SIGTERM)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare")
def test_first_process_of_a_container_reaps_orphans() -> None:
    text = (
        "import os, subprocess, sys\nfrom rankup.agent.processes import reap_orphans\n"
        "words = ['setsid', 'sh', '-c', '(sleep 0.1; exit 0) & echo $!']\n"
        "parent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)\n"
        "orphan = int(parent.communicate()[0])\nassert parent.returncode == 0\n"
        "os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)\n"
        "reap_orphans()\nassert not os.path.exists(f'/proc/{orphan}'), 'it is left'\nreap_orphans()"
    )
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", text]
    subprocess.run(command, env=environment(), cwd=ROOT, check=True, timeout=120)


# The end of this process: at once, with its code, whatever hangs, and through one module ------------------------------

STUCK = "import signal, sys, threading, time; from rankup.agent import processes as exit\n"
STUCK += "hang = lambda: time.sleep(600)\n"
GUARD = "from rankup.agent.logs import guard; sys.stdout.write('a'); guard(); sys.stdout.write('b'); "


def run(code: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", STUCK + code]
    env = environment({"PYTHONUNBUFFERED": ""})
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=env, cwd=ROOT, check=False)


@pytest.mark.parametrize(("code", "ended", "printed"), [
    ("threading.Thread(target=hang).start(); sys.stdout.write('all of it'); exit.finish(3)", 3, "all of it"),
    (GUARD + "sys.stdout.flush(); sys.__stdout__.write('c'); exit.finish(0)", 0, "abc"),  # in its order
    ("exit.leave(171, hang, timeout_s=0.2)", 171, ""),
    ("exit.leave(171, lambda: sys.stdout.write('said') and 30, timeout_s=60)", 30, "said"),
    ("exit.leave(143, lambda: 1 / 0, timeout_s=60)", 143, ""),
    ("exit.leave(143, lambda: None, timeout_s=60)", 143, ""),
    ("threading.Thread(target=exit.leave, args=(170,)).start(); hang()", 170, ""),
    ("print(exit.within(60, lambda: 7), exit.within(0.1, hang)); exit.finish(0)", 0, "7 None\n"),
    ("exit.set_hard_deadline(60); exit.set_hard_deadline(float('inf')); print(*signal.getitimer(0)); exit.finish(5)", 5,
     "0.0 0.0\n"),
])
def test_process_ends_with_its_code_and_output_whatever_hangs(code: str, ended: int, printed: str) -> None:
    done = run(code)
    assert (done.returncode, done.stdout) == (ended, printed), done.stderr


def test_hard_deadline_ends_a_process_and_prints_its_stack() -> None:
    done = run("exit.set_hard_deadline(0.5); hang()")
    assert done.returncode == -signal.SIGALRM
    assert "in <lambda>" in done.stderr


def test_hard_deadline_ends_a_process_without_a_reader_of_its_errors() -> None:
    full = "import os; _, full = os.pipe(); os.set_blocking(full, False)\ntry:\n    while os.write(full, b'-'): pass\n"
    full += "except BlockingIOError: os.set_blocking(full, True)\nos.dup2(full, 2); "
    assert run(full + "exit.set_hard_deadline(0.5); hang()").returncode == -signal.SIGALRM


def test_processes_end_only_through_one_module_and_the_agent() -> None:
    files = [path for name in ("rankup", "train") for path in (ROOT / name).rglob("*.py")]
    assert len(files) > 30
    endings = {
        str(path.relative_to(ROOT))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os._exit", "os.abort", "signal.setitimer")
    }
    # A tracker's sender is a separate process
    assert endings == {"rankup/agent/fork_server.py", "rankup/agent/processes.py", "rankup/observe/tracker.py"}


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("contents", "expected"), [
    ({"proc/self/cgroup": "0::/job\n",
      "sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/job/memory.current": "990\n",
      "sys/fs/cgroup/job/memory.stat": "anon 290\nfile 700\ninactive_file 600\n",
      "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "9\n"}, 610),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
    ({"proc/self/cgroup": "1:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
      "sys/fs/cgroup/memory/memory.usage_in_bytes": "990\n",
      "sys/fs/cgroup/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 600\n"}, 610),
    ({"proc/self/cgroup": "1:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
      "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n"}, None),
], ids=["v2", "v2-unlimited", "v1", "v1-unlimited"])
def test_memory_left_is_that_of_the_container(tmp_path: Path, contents: dict[str, str], expected: int | None) -> None:
    assert min((left for _, left in memory(files(tmp_path, contents))), default=None) == expected


@pytest.mark.parametrize(("contents", "affinity", "expected"), [
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 8, 1.5),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "800000 100000\n"}, 2, 2.0),
    ({"proc/self/cgroup": "0::/job/task\n", "sys/fs/cgroup/job/task/cpu.max": "max 100000\n",
      "sys/fs/cgroup/job/cpu.max": "200000 100000\n"}, 8, 2.0),
    # In a container the path is the host's
    ({"proc/self/cgroup": "0::/on/the/host\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 8, 2.0),
    # The folder is called cpu,cpuacct, in whatever order the kernel names them, and each name has a link
    ({"proc/self/cgroup": "4:memory:/x\n3:cpuacct,cpu:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000\n",
      "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, 8, 0.5),
    ({"proc/self/cgroup": "1:cpu:/\n0::/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, 3, 3.0),
    ({}, 4, 4.0),
], ids=["quota", "affinity-less", "parent", "container", "v1", "v1-unlimited", "no-cgroup"])
def test_cpu_quota_is_the_smallest_of_all_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: dict[str, str], affinity: int, expected: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    assert cpu_quota(files(tmp_path, contents)) == expected


@pytest.mark.parametrize(("contents", "expected"), [
    ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "oom 5\noom_kill 3\n",
      "sys/fs/cgroup/memory.events": "oom 9\noom_kill 9\n"}, 3),
    ({"proc/self/cgroup": "4:memory:/docker/abc\n", "sys/fs/cgroup/memory/memory.oom_control":
      "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}, 2),
    ({"proc/self/cgroup": "0::/\n"}, 0),
])
def test_memory_kills_are_counted_in_the_own_group(tmp_path: Path, contents: dict[str, str], expected: int) -> None:
    assert oom_kills(files(tmp_path, contents)) == expected


@pytest.mark.parametrize(("now", "text"), [
    (3, "somebody sent it, or memory ran out. Give the machine, container or job more"),
    (4, "out-of-memory kills in this container or job meanwhile: 1. Give it more memory"),
])
def test_sigkill_is_explained_by_memory_kills_since_then(now: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "oom_kills", lambda: now)
    assert explain_sigkill(3).startswith(text)


def test_limit_of_processes_is_named_and_one_of_threads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def start() -> None:
        ForkServer(on_end=print, on_warning=print, on_gone=print).start(env={})

    monkeypatch.setattr(fork_server.subprocess, "Popen", refuse)
    monkeypatch.setattr(fork_server, "become_subreaper", lambda: None)
    with pytest.raises(UserError, match=r"^ulimit -u, or pids.max of the container, must allow .* Raise it"):
        asyncio.run(start())

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert in_background(lambda: 5).result() == 5
