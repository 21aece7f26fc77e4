"""A job whose stdin, stdout or stderr is closed (`>&-`) trains as any other, and nothing that it prints goes to another
file or socket. A job whose output nobody reads trains too."""

import subprocess
import sys
from pathlib import Path

import pytest

from rankup.errors import FINISHED
from tests.rigs.jobs import Job, ended

SCRIPT = """
import os, subprocess, sys
import rankup
job, count = rankup.init("runs/mine"), {"n": 0}
for number in range(3): os.fstat(number)
subprocess.run(["sh", "-c", "cat; echo from a child; echo its error >&2"], check=True)
print("printed", "flushed", flush=True)
print("on stderr", file=sys.stderr)
for _ in sys.argv[1:]: print(*range(60000), sep=chr(10))
job.track(count=count)
for step in job.steps(3):
    with job.step():
        count["n"] += 1
job.finish()
"""
CLOSED = (">&-", "<&- >&- 2>&-")


def check_log(folder: Path) -> None:
    log = (folder / "runs/mine/logs/rank-0.log").read_text()
    assert "printed flushed\n" in log
    assert "finished after 3 steps" in log


def ends(folder: Path, closed: str, *line: str) -> None:
    (folder / "job.py").write_text(SCRIPT)
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, *line, "job.py"]
    ran = subprocess.run(words, cwd=folder, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert ran.returncode == FINISHED, ran.stdout + ran.stderr
    check_log(folder)


@pytest.mark.parametrize("closed", CLOSED)
def test_script_trains_with_closed_streams(tmp_path: Path, closed: str) -> None:
    ends(tmp_path, closed)


def test_agent_and_its_ranks_train_with_closed_streams(tmp_path: Path) -> None:
    ends(tmp_path, CLOSED[-1], "-m", "rankup", "launch", "--nproc=2")


@pytest.mark.parametrize("gone", [False, True])
def test_ranks_of_an_agent_train_if_nobody_reads_what_they_print(tmp_path: Path, gone: bool) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "rankup", "launch", "--nproc=2", "job.py", "many lines"]
    with ended(Job()) as job:
        job.processes.append(subprocess.Popen(
            line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ))
        pipe = job.processes[0].stdout
        assert pipe is not None
        if gone:
            pipe.close()
        assert job.processes[0].wait(240) == FINISHED
    check_log(tmp_path)
