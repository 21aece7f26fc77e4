"""A job whose stdin, stdout or stderr is closed (`>&-`) trains as any other, and nothing that it prints goes to another
file or socket."""

import subprocess
import sys
from pathlib import Path

import pytest

from rankup.errors import FINISHED

SCRIPT = """
import os, subprocess, sys
import rankup
job, count = rankup.init("runs/mine"), {"n": 0}
for number in range(3): os.fstat(number)
subprocess.run(["sh", "-c", "cat; echo from a child; echo its error >&2"], check=True)
print("printed", "flushed", flush=True)
print("on stderr", file=sys.stderr)
job.track(count=count)
for step in job.steps(3):
    with job.step():
        count["n"] += 1
job.finish()
"""
CLOSED = (">&-", "<&- >&- 2>&-")


def ends(folder: Path, closed: str, *line: str) -> None:
    (folder / "job.py").write_text(SCRIPT)
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, *line, "job.py"]
    ran = subprocess.run(words, cwd=folder, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert ran.returncode == FINISHED, ran.stdout + ran.stderr
    log = (folder / "runs/mine/logs/rank-0.log").read_text()
    assert "printed flushed\n" in log
    assert "finished after 3 steps" in log


@pytest.mark.parametrize("closed", CLOSED)
def test_script_trains_with_closed_streams(tmp_path: Path, closed: str) -> None:
    ends(tmp_path, closed)


def test_agent_and_its_ranks_train_with_closed_streams(tmp_path: Path) -> None:
    ends(tmp_path, CLOSED[-1], "-m", "rankup", "launch", "--nproc=2")
