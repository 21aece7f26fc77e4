"""Somebody's scripts, unchanged, under `launch`: the weights that PyTorch's own launcher leads to.

The scripts are in tests/rigs/foreign/. In containers and on Slurm: tests/launchers/. How they fail:
tests/agent/test_launch.py.
"""

import signal
from pathlib import Path

import psutil
import pytest

from tests.rigs.foreign_scripts import SCRIPTS, WARN, Once, again_if_aborted, by_torchrun, expected, result_of
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import environ_of, free_port


# On two nodes, in tests/launchers/: ddp_local_rank; imagenet, which spawns there, and Lightning under Slurm
@pytest.mark.parametrize(("name", "nproc"), [("before_ddp", 2), ("bert_trainer", 2), ("imagenet", 4)])
@again_if_aborted
def test_foreign_script_under_launch_comes_to_the_weights_of_torchrun(
    name: str, nproc: int, once: Once, loaded: Forks, tmp_path: Path
) -> None:
    script = SCRIPTS[name]
    # By an address of its own, not by env://
    own = ("--dist-url", f"tcp://127.0.0.1:{free_port()}") if name == "imagenet" else ()
    line = ("launch", f"--nproc={nproc}", "--run-dir", tmp_path, *script.words(tmp_path / "own"), *own)
    weights = result_of(loaded.ends(*line, env=WARN, cwds=[tmp_path]))
    assert weights == expected(script, once, loaded, tmp_path, nproc=nproc)
    if name == "before_ddp":
        assert weights == by_torchrun(tmp_path, [script.path])


@again_if_aborted
def test_foreign_script_runs_alone(loaded: Forks, tmp_path: Path) -> None:
    """As a group of one, where `python SCRIPT` would miss the variables of a launcher too. With workers that it spawns
    itself: tests/launchers/slurm/test_slurm_foreign.py."""
    line = ("launch", "--run-dir", tmp_path, *SCRIPTS["before_ddp"].words(tmp_path))
    output = loaded.ends(*line, env=WARN, cwds=[tmp_path])
    assert result_of(output).startswith("world size 1,")


@again_if_aborted
def test_foreign_script_goes_on_from_its_own_checkpoint_after_a_killed_rank(
    once: Once, loaded: Forks, tmp_path: Path
) -> None:
    script, own = SCRIPTS["dcp_checkpoints"], tmp_path / "own"
    line = ("launch", "--nproc=2", "--run-dir", tmp_path, *script.words(own))
    with loaded.running(*line, "--seconds-per-step", "0.3", env=WARN) as job:
        job.wait_until((own / "step-000004" / ".metadata").exists, "the first checkpoint")
        ranks = psutil.Process(job.processes[0].pid).children(recursive=True)
        (victim,) = [process for process in ranks if environ_of(process.pid).get("RANK") == "1"]
        victim.send_signal(signal.SIGKILL)
        assert job.wait() == [0], job.output
    assert "rank 0 goes on from step-" in job.output
    assert result_of(job.output) == expected(script, once, loaded, tmp_path)
