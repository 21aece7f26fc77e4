"""What /proc says of a process, also of one whose name is no text."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from train.process.proc import has_handler, parent_of, start_of, stat_of, state_of

# The kernel cuts names after 15 bytes: the last of these characters, of three bytes each, is not whole
NAMED = """
import ctypes, signal, time
signal.signal(signal.SIGUSR1, lambda *_: None)
ctypes.CDLL(None).prctl(15, ") 训练进程程".encode(), 0, 0, 0)
print(1, flush=True)
time.sleep(600)
"""


@pytest.fixture
def named() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps, with half a character in its name, and the sign behind which the kernel's fields stand."""
    with subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_proc_reads_a_process_whose_name_is_cut_in_a_character(named: subprocess.Popen[bytes]) -> None:
    pid = named.pid
    with open(f"/proc/{pid}/comm", "rb") as file, pytest.raises(UnicodeDecodeError):
        file.read().decode()
    assert state_of(pid) in ("S", "R")
    assert parent_of(pid) == os.getpid()
    assert int(start_of(pid)) >= int(start_of(os.getpid()))
    assert has_handler(pid, signal.SIGUSR1) is True
    assert has_handler(pid, signal.SIGUSR2) is False


def test_proc_knows_nothing_of_a_process_that_is_gone(named: subprocess.Popen[bytes]) -> None:
    named.kill()
    os.waitid(os.P_PID, named.pid, os.WEXITED | os.WNOWAIT)
    assert (state_of(named.pid), start_of(named.pid)) == ("Z", "")
    named.wait()
    pid = named.pid
    assert (stat_of(pid), state_of(pid), parent_of(pid), start_of(pid)) == ([], "", 0, "")
    assert has_handler(pid, signal.SIGUSR1) is None
