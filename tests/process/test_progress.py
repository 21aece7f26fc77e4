"""The memory through which a rank says which step it has finished."""

import subprocess
import sys
from pathlib import Path

from tests.rigs.jobs import ROOT, environment
from train.process.progress import ProgressBoard, StepReporter

# As a rank does it, and then it is killed
RANK = """
import os, signal, sys
from train.process.progress import StepReporter
reporter = StepReporter(sys.argv[1])
for step in range(1, 1001):
    reporter.report(step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_progress_of_a_killed_process_stays() -> None:
    board = ProgressBoard(3)
    command = [sys.executable, "-c", RANK, board.place(1)]
    assert subprocess.run(command, env=environment(), cwd=ROOT).returncode == -9
    assert [board.step(local_rank) for local_rank in range(3)] == [0, 1000, 0]


def test_progress_goes_nowhere_without_a_supervisor_or_where_its_memory_can_not_be_reached(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for place in ("", f"0:{tmp_path}/missing", f"0:{tmp_path}/empty"):
        StepReporter(place).report(5)
