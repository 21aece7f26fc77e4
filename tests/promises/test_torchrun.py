"""Under torchrun: its summary has the real error, a restart goes on from the checkpoint, no process outlives it."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rankup.agent.ends import tell_torchrun
from rankup.errors import PeerLost
from tests.rigs.foreign_scripts import BE_SCRIPT, WARN
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import (
    MAIN,
    comparable_metrics,
    ended,
    environ_of,
    free_port,
    lives,
    probe,
    result,
    start,
    wait_for,
)

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2")
SETTINGS = ("--workload=tests.rigs.faulting_workload:build", "--batch-size=8", "--max-steps=9", "--log-every-steps=1",
            "--save-every-steps=2", "--tensorboard=false", "--num-workers=1", "--join-timeout-s=60")


def torchrun(forks: Forks, run: Path, *options: str, code: int = 0, **order: object) -> str:
    """Two ranks under torchrun to its end: the output. `order` is for tests/rigs/faulting_workload.py."""
    command = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *options)
    line = (*command, MAIN, "train", *SETTINGS, f"--run-dir={run.parent}", f"--name={run.name}")
    return forks.ends(*line, preload=BE_SCRIPT, env={**WARN, "PROBE": json.dumps(order)}, code=code)


def family(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if environ_of(p.pid).get("JOB_UNDER_TEST") == mark and lives(p.pid)]


def test_torchruns_summary_holds_the_error_of_the_rank_that_failed(forks: Forks, tmp_path: Path) -> None:
    """Not "error_file: <N/A>", and not the text of a rank that only lost the other."""
    output = torchrun(forks, tmp_path / "run", code=1, **{"where": "loss", "call": 5, "rank": 1, "raise": "ValueError"})
    _, _, summary = output.partition("Root Cause")
    assert "ValueError: probe" in summary, output
    assert "in probe" in summary  # its traceback


def test_torchruns_summary_names_no_victim_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the lowest rank, whose record may have the same second as the cause's, or an earlier one; nor what the
    rank that failed has lost thereby."""
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    for file, error in ((0, PeerLost("lost rank 1")), (1, ValueError("broken")), (1, PeerLost("lost it thereby"))):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[file]))
        tell_torchrun(error)
    failures = {rank: ProcessFailure(rank, pid=1, exitcode=1, error_file=str(file)) for rank, file in enumerate(files)}
    summary = ChildFailedError("job", failures)
    assert summary.get_first_failure()[0] == 1, summary
    assert "broken" in str(summary)
    assert "lost rank 1" in str(summary)


def test_torchruns_summary_says_what_a_rank_waited_for(forks: Forks, tmp_path: Path) -> None:
    """A rank that ends at its own deadline has no exception: its reason stands there all the same."""
    line, file = (*SETTINGS, f"--run-dir={tmp_path}", "--name=run", "--step-timeout-s=5"), tmp_path / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(file), **probe("loss", 5, sleep_s=600)}
    forks.ends("train", *line, env=env, code=171)
    summary = str(ChildFailedError("job", {0: ProcessFailure(0, pid=1, exitcode=171, error_file=str(file))}))
    assert "took longer than 5 s" in summary
    assert "NoneType" not in summary
    assert "<N/A>" not in summary


def test_torchruns_restart_goes_on_from_the_last_finished_step(forks: Forks, tmp_path: Path) -> None:
    forks.ends("train", *SETTINGS, f"--run-dir={tmp_path}", "--name=undisturbed", world_size=2)
    run = tmp_path / "run"
    # Of one incarnation: the next one has fewer steps to do
    output = torchrun(forks, run, "--max-restarts=1", where="loss", call=8, rank=1, signal="SIGKILL")
    assert "resumed from step 5, rescued by rank 0 on " in output
    assert "no finished step was lost" in output
    assert result(run)["digest"] == result(tmp_path / "undisturbed")["digest"]
    assert comparable_metrics(run) == comparable_metrics(tmp_path / "undisturbed")


@pytest.mark.parametrize("mpirun", [False, True])
def test_nothing_is_left_when_the_launcher_dies_of_a_signal(tmp_path: Path, mpirun: bool) -> None:
    if mpirun and shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: apt install openmpi-bin")
    run, mark = tmp_path / "run", str(tmp_path)
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    line = (*((*MPIRUN, sys.executable) if mpirun else command), MAIN, "train", *SETTINGS, "--max-steps=1000000")
    env = {"PYTHONWARNINGS": "", "JOB_UNDER_TEST": mark}  # torchrun itself may warn
    with ended(start(*line, f"--run-dir={tmp_path}", "--name=run", env=env)) as job:
        wait_for("a checkpoint", lambda: any((run / "checkpoints").glob("step-*")), process=job.processes[0])
        assert len(family(mark)) >= 5  # the launcher, two ranks, a DataLoader worker for each
        # torchrun does not handle it, and dies of it as of a SIGKILL; mpirun passes it on
        os.kill(job.processes[0].pid, signal.SIGKILL if mpirun else signal.SIGUSR1)
        job.wait()
        assert psutil.wait_procs(family(mark), timeout=60)[1] == []
