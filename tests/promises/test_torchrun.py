"""torchrun's summary has the real error, its restart resumes from the checkpoint, and no process outlives torchrun."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rankup.agent.status_files import tell_torchrun
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
    """Run two ranks under torchrun and return the output. `order` is for tests/rigs/faulting_workload.py."""
    command = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *options)
    line = (*command, MAIN, "train", *SETTINGS, f"--run-dir={run.parent}", f"--name={run.name}")
    return forks.ends(*line, preload=BE_SCRIPT, env={**WARN, "PROBE": json.dumps(order)}, code=code)


def family(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if environ_of(p.pid).get("JOB_UNDER_TEST") == mark and lives(p.pid)]


def test_torchruns_summary_has_the_error_of_the_rank_that_failed(forks: Forks, tmp_path: Path) -> None:
    """It must be neither "error_file: <N/A>" nor the error of a rank that only lost its peer."""
    output = torchrun(forks, tmp_path / "run", code=1, **{"where": "loss", "call": 5, "rank": 1, "raise": "ValueError"})
    _, _, summary = output.partition("Root Cause")
    assert "ValueError: probe" in summary, output
    assert "in probe" in summary  # the traceback


def test_torchruns_summary_names_the_failed_rank_and_no_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest rank's record may have the same second as the cause's, or an earlier one. The rank that failed may
    also lose a peer afterwards, which must not replace its own error."""
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    for file, error in ((0, PeerLost("lost rank 1")), (1, ValueError("broken")), (1, PeerLost("lost it thereby"))):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[file]))
        tell_torchrun(error)
    failures = {rank: ProcessFailure(rank, pid=1, exitcode=1, error_file=str(file)) for rank, file in enumerate(files)}
    summary = ChildFailedError("job", failures)
    assert summary.get_first_failure()[0] == 1, summary
    assert "broken" in str(summary)
    assert "lost rank 1" in str(summary)


def test_torchruns_summary_says_which_deadline_passed(forks: Forks, tmp_path: Path) -> None:
    """A rank that ends at its own deadline raises no exception, but the summary must have the reason."""
    line, file = (*SETTINGS, f"--run-dir={tmp_path}", "--name=run", "--step-timeout-s=5"), tmp_path / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(file), **probe("loss", 5, sleep_s=600)}
    forks.ends("train", *line, env=env, code=171)
    summary = str(ChildFailedError("job", {0: ProcessFailure(0, pid=1, exitcode=171, error_file=str(file))}))
    assert "took longer than 5 s" in summary
    assert "NoneType" not in summary
    assert "<N/A>" not in summary


def test_torchruns_restart_resumes_from_the_last_finished_step(forks: Forks, tmp_path: Path) -> None:
    forks.ends("train", *SETTINGS, f"--run-dir={tmp_path}", "--name=undisturbed", world_size=2)
    run = tmp_path / "run"
    # `call` counts within one incarnation. The next one has fewer steps left, so it is not killed
    output = torchrun(forks, run, "--max-restarts=1", where="loss", call=8, rank=1, signal="SIGKILL")
    assert "resumed from step 5, rescued by rank 0 on " in output
    assert "no finished step was lost" in output
    assert result(run)["digest"] == result(tmp_path / "undisturbed")["digest"]
    assert comparable_metrics(run) == comparable_metrics(tmp_path / "undisturbed")


@pytest.mark.parametrize("mpirun", [False, True])
def test_no_process_is_left_when_the_launcher_dies_of_a_signal(tmp_path: Path, mpirun: bool) -> None:
    if mpirun and shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: apt install openmpi-bin")
    run, mark = tmp_path / "run", str(tmp_path)
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    line = (*((*MPIRUN, sys.executable) if mpirun else command), MAIN, "train", *SETTINGS, "--max-steps=1000000")
    env = {"PYTHONWARNINGS": "", "JOB_UNDER_TEST": mark}  # torchrun itself may warn
    with ended(start(*line, f"--run-dir={tmp_path}", "--name=run", env=env)) as job:
        wait_for("a checkpoint", lambda: any((run / "checkpoints").glob("step-*")), process=job.processes[0])
        # The launcher, two ranks, and a DataLoader worker for each, which begins anew with each epoch
        wait_for("five processes", lambda: len(family(mark)) >= 5, process=job.processes[0])
        # torchrun does not handle SIGUSR1, and dies of it as of SIGKILL. mpirun would pass SIGUSR1 on
        os.kill(job.processes[0].pid, signal.SIGKILL if mpirun else signal.SIGUSR1)
        job.wait()
        assert psutil.wait_procs(family(mark), timeout=60)[1] == []
