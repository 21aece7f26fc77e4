"""What the agent knows of processes, and how one ends."""

import ast
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankup.agent.processes import (
    has_handler,
    send_signal,
    start_of,
    state_of,
)
from tests.rigs.jobs import ROOT, environment

# The kernel cuts names after 15 bytes: the last of these characters, of three bytes each, is not whole
NAMED = """
import ctypes, signal, time
signal.signal(signal.SIGUSR1, lambda *_: None)
ctypes.CDLL(None).prctl(15, ") 训练进程程".encode(), 0, 0, 0)
print(1, flush=True)
time.sleep(600)
"""


@pytest.fixture
def named() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that sleeps, with half a character in its name, and the sign behind which the kernel's fields stand."""
    with subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_process_whose_name_is_cut_in_a_character_can_be_read(named: "subprocess.Popen[bytes]") -> None:
    pid = named.pid
    with pytest.raises(UnicodeDecodeError):
        Path(f"/proc/{pid}/comm").read_bytes().decode()
    assert state_of(pid) in ("S", "R")
    assert int(start_of(pid)) >= int(start_of(os.getpid()))
    assert has_handler(pid, signal.SIGUSR1) is True
    assert has_handler(pid, signal.SIGUSR2) is False


def test_nothing_is_known_of_a_process_that_is_gone(named: "subprocess.Popen[bytes]") -> None:
    named.kill()
    os.waitid(os.P_PID, named.pid, os.WEXITED | os.WNOWAIT)
    assert (state_of(named.pid), start_of(named.pid)) == ("Z", "")
    named.wait()
    pid = named.pid
    assert (state_of(pid), start_of(pid)) == ("", "")
    assert has_handler(pid, signal.SIGUSR1) is None
    send_signal(pid, signal.SIGTERM)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare")
def test_first_process_of_a_container_reaps_orphans_and_leaves_its_own_children() -> None:
    text = (
        "import os, subprocess, sys\nfrom rankup.agent.processes import reap_orphans\n"
        "own = subprocess.Popen(['sh', '-c', 'exit 5'])\n"
        "os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)\n"
        "reap_orphans({own.pid})\nassert own.wait() == 5\n"
        "parent = subprocess.Popen(['sh', '-c', '(sleep 0.1; exit 0) & echo $!'], stdout=subprocess.PIPE, text=True)\n"
        "orphan = int(parent.communicate()[0])\nassert parent.returncode == 0\n"
        "os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)\n"
        "reap_orphans()\nassert not os.path.exists(f'/proc/{orphan}'), 'it is left'\nreap_orphans()"
    )
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", text]
    subprocess.run(command, env=environment(), cwd=ROOT, check=True, timeout=120)


# The end of this process: at once and with its code, whatever hangs, and through one module ---------------------------

STUCK = "import sys, threading, time; from rankup.agent import processes as exit; hang = lambda: time.sleep(600)\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", STUCK + code]
    env = environment({"PYTHONUNBUFFERED": ""})
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=env, cwd=ROOT, check=False)


def test_finish_writes_what_was_printed_and_waits_for_no_thread() -> None:
    done = run("threading.Thread(target=hang).start(); sys.stdout.write('all of it'); exit.finish(3)")
    assert (done.returncode, done.stdout) == (3, "all of it")


def test_what_was_printed_around_the_guard_is_written_in_its_order() -> None:
    prints = "sys.stdout.write('a'); guard('stdout'); sys.stdout.write('b'); sys.stdout.flush()"
    done = run(f"from rankup.agent.logs import guard; {prints}; sys.__stdout__.write('c'); exit.finish(0)")
    assert done.stdout == "abc"


def test_leave_does_not_wait_for_a_last_word_that_hangs() -> None:
    assert run("exit.leave(171, hang, timeout_s=0.2)").returncode == 171


def test_leave_takes_the_code_that_the_last_word_returns() -> None:
    done = run("exit.leave(171, lambda: sys.stdout.write('said') and 30, timeout_s=60)")
    assert (done.returncode, done.stdout) == (30, "said")


@pytest.mark.parametrize("word", ["lambda: 1 / 0", "lambda: None"])
def test_leave_keeps_its_code_where_the_last_word_has_none(word: str) -> None:
    assert run(f"exit.leave(143, {word}, timeout_s=60)").returncode == 143


def test_leave_ends_any_thread_s_process() -> None:
    assert run("threading.Thread(target=exit.leave, args=(170,)).start(); hang()").returncode == 170


def test_within_returns_what_was_found_in_time_and_none_otherwise() -> None:
    done = run("print(exit.within(60, lambda: 7), exit.within(0.1, hang)); exit.finish(0)")
    assert done.stdout == "7 None\n"


def test_hard_deadline_ends_a_process_and_says_where_it_was() -> None:
    done = run("exit.set_hard_deadline(0.5); hang()")
    assert done.returncode == -signal.SIGALRM
    assert "in <lambda>" in done.stderr


def test_hard_deadline_that_is_cleared_ends_nothing() -> None:
    code = "exit.set_hard_deadline(0.2); exit.clear_hard_deadline(); time.sleep(0.6); exit.finish(5)"
    assert run(code).returncode == 5


def test_one_module_ends_processes_and_the_agent_its_children() -> None:
    files = [path for name in ("rankup", "train") for path in (ROOT / name).rglob("*.py")]
    assert len(files) > 30
    endings = {
        str(path.relative_to(ROOT))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os._exit", "os.abort", "signal.setitimer")
    }
    # The sender of a tracker is a process of its own
    assert endings == {"rankup/agent/fork_server.py", "rankup/agent/processes.py", "rankup/observe/tracker.py"}
