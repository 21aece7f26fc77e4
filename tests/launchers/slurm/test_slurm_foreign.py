"""A batch file runs another project's unchanged script on a real Slurm, with the same weights as torchrun."""

from pathlib import Path

import pytest

from tests.rigs.foreign_scripts import Once, again_if_aborted, expected, result_of, words
from tests.rigs.fork_server import Forks
from tests.rigs.slurm_cluster import Cluster

pytestmark = pytest.mark.timeout(1200)


@again_if_aborted
def test_slurm_runs_lightnings_trainer(cluster: Cluster, once: Once, forks: Forks, tmp_path: Path) -> None:
    """Lightning reads Slurm's variables itself, and must not use its own Slurm support here."""
    line = " ".join([*words("before_lightning", tmp_path), "--devices 1 --num-nodes 2"])
    job = cluster.submit(tmp_path, "", launch="--run-dir runs --name job", script=line)
    assert job.wait() == "COMPLETED", job.log()
    assert result_of(job.output) == expected("before_lightning", once, forks, tmp_path)
