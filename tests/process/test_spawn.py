"""`launch --start spawn`: ranks through torch.multiprocessing. That they train alike is in test_parity.py, and that
they go on after a kill in test_methods_kills.py."""

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.rigs.jobs import MAIN, Job, ended, start

# Each starts five interpreters with torch, one after the other
pytestmark = pytest.mark.timeout(900)

# A workload that fails on one rank where the file `plan` is, once
FAULTY = """
import dataclasses, os
from pathlib import Path
from train.workloads.images import build as images

def build(config):
    workload = images(config)
    plain, plan = workload.loss, Path(config.options["plan"])
    def loss(model, batch):
        if os.environ["RANK"] == "1" and plan.exists():
            plan.unlink()
            raise RuntimeError("the reason")
        return plain(model, batch)
    return dataclasses.replace(workload, loss=loss)
"""


def spawn(folder: Path, *more: str, fails: bool = False) -> Job:
    (folder / "faulty.py").write_text(FAULTY)
    if fails:
        (folder / "plan").touch()
    return start(
        sys.executable, "-m", "train.main", "launch", "--start=spawn", "--nproc=2", MAIN,
        "--workload", "faulty:build", "--dataset", "digits", "--model", "mlp", "--tensorboard=false",
        "--run-dir", folder, "--name", "run",
        "--options.plan", folder / "plan", "--epochs", "1", *more, cwd=folder,
    )


def test_spawn_shows_the_traceback_of_the_first_failure_once(tmp_path: Path) -> None:
    with ended(spawn(tmp_path, fails=True)) as job:
        assert job.wait(300) == [1], job.output
    assert job.output.count("Traceback (most recent call last)") == 1, job.output
    assert "RuntimeError: the reason" in job.output


def test_spawn_passes_a_stop_on_and_goes_on_later(tmp_path: Path) -> None:
    long = ("--epochs", "100000", "--log-every-steps", "1")
    with ended(spawn(tmp_path, *long)) as job:
        until_s = time.monotonic() + 240
        steps = tmp_path / "run" / "metrics.jsonl"
        while not steps.exists() or not steps.stat().st_size:  # its last line may be half there
            assert job.processes[0].poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.05)
        children = psutil.Process(job.processes[0].pid).children(recursive=True)
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.wait(240) == [143], job.output
    assert not psutil.wait_procs(children, timeout=60)[1]
    with ended(spawn(tmp_path)) as job:
        assert job.wait(300) == [0], job.output
    assert "resumed from step-" in job.output
