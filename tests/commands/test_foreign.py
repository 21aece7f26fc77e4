"""Unchanged scripts of other projects under `launch` give the same weights as under PyTorch's own launcher.

The scripts are in tests/rigs/foreign/. tests/launchers/ runs them in containers and on Slurm, and
tests/agent/test_launch.py tests how they fail.
"""

import signal
from pathlib import Path

import psutil
import pytest

from tests.rigs.foreign_scripts import BE_SCRIPT, WARN, Once, again_if_aborted, expected, result_of, words
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import environ_of, free_port


@again_if_aborted
def test_foreign_script_under_torchrun_has_the_weights_that_tests_expect(
    once: Once, loaded: Forks, tmp_path: Path
) -> None:
    line = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    output = loaded.ends(*line, *words("before_ddp", tmp_path), preload=BE_SCRIPT, env=WARN, cwds=[tmp_path])
    assert result_of(output) == expected("before_ddp", once, loaded, tmp_path)


# tests/launchers/ runs ddp_local_rank and Lightning's script on two nodes
@pytest.mark.parametrize(("name", "workers"), [("bert_trainer", 2), ("imagenet", 4)])
@again_if_aborted
def test_foreign_script_under_launch_has_the_weights_of_torchrun(
    name: str, workers: int, once: Once, loaded: Forks, tmp_path: Path
) -> None:
    # The ImageNet script has its own address instead of env://, and each rank spawns two workers
    spawns = ("--dist-url", f"tcp://127.0.0.1:{free_port()}", "--multiprocessing-distributed")
    own = spawns if name == "imagenet" else ()
    line = ("launch", "--nproc=2", "--run-dir", tmp_path, *words(name, tmp_path / "own"), *own)
    output = loaded.ends(*line, env=WARN, cwds=[tmp_path])
    assert "no rank met" not in output
    weights = result_of(output)
    assert weights == expected(name, once, loaded, tmp_path, nproc=workers)


@again_if_aborted
def test_foreign_script_runs_alone_as_a_group_of_one(loaded: Forks, tmp_path: Path) -> None:
    """With `python SCRIPT` a launcher's variables would be missing even for a single process."""
    line = ("launch", "--run-dir", tmp_path, *words("before_ddp", tmp_path))
    output = loaded.ends(*line, env=WARN, cwds=[tmp_path])
    assert result_of(output).startswith("world size 1,")


@again_if_aborted
def test_foreign_script_resumes_from_its_own_checkpoint_after_a_kill(
    once: Once, loaded: Forks, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    line = ("launch", "--nproc=2", "--run-dir", tmp_path, *words("dcp_checkpoints", own))
    with loaded.running(*line, "--seconds-per-step", "0.5", env=WARN) as job:
        victims: list[psutil.Process] = []

        def started() -> bool:  # look early: after the checkpoint the run lasts only seconds
            ranks = psutil.Process(job.processes[0].pid).children(recursive=True)
            victims[:] = [process for process in ranks if environ_of(process.pid).get("RANK") == "1"]
            return len(victims) == 1

        job.wait_until(started, "rank 1")
        job.wait_until((own / "step-000004" / ".metadata").exists, "the first checkpoint")
        victims[0].send_signal(signal.SIGKILL)
        assert job.wait() == [0], job.output
    assert "rank 0 goes on from step-" in job.output
    assert result_of(job.output) == expected("dcp_checkpoints", once, loaded, tmp_path)
