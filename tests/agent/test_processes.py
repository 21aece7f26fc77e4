"""What the agent knows of processes; and interpreters that it starts itself."""

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


def test_sigusr1_becomes_sigterm_without_a_handler(named: "subprocess.Popen[bytes]") -> None:
    send_signal(named.pid, signal.SIGUSR1)
    assert state_of(named.pid) in ("S", "R")  # it has one
    with subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1) as bare:
        assert bare.stdout is not None
        bare.stdout.readline()
        send_signal(bare.pid, signal.SIGUSR1)
        assert bare.wait() == -signal.SIGTERM


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
