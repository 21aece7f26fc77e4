"""Somebody's scripts, unchanged, by SCRIPT=... sbatch on a real Slurm of two nodes: the weights as with torchrun."""

from pathlib import Path

import pytest

from tests.rigs.foreign_scripts import Once, again_if_aborted, expected, result_of, words
from tests.rigs.fork_server import Forks
from tests.rigs.slurm_cluster import Cluster, SlurmJob

pytestmark = pytest.mark.timeout(1200)

def submit(cluster: Cluster, folder: Path, line: str) -> SlurmJob:
    return cluster.submit(folder, "", SCRIPT=f"--run-dir runs --name job {line}")


@again_if_aborted
def test_slurm_runs_the_imagenet_script_on_two_nodes(
    cluster: Cluster, once: Once, forks: Forks, tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, " ".join([*words("imagenet", tmp_path), "--multiprocessing-distributed"]))
    assert job.wait() == "COMPLETED", job.log()
    assert result_of(job.output) == expected("imagenet", once, forks, tmp_path, nproc=4)


@again_if_aborted
def test_slurm_runs_lightnings_trainer(cluster: Cluster, once: Once, forks: Forks, tmp_path: Path) -> None:
    """It looks for Slurm's variables itself, and must not take the job for one of its own."""
    job = submit(cluster, tmp_path, " ".join([*words("before_lightning", tmp_path), "--devices 1 --num-nodes 2"]))
    assert job.wait() == "COMPLETED", job.log()
    assert result_of(job.output) == expected("before_lightning", once, forks, tmp_path)
