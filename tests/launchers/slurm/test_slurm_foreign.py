"""Somebody's scripts, unchanged, by SCRIPT=... sbatch on a real Slurm of two nodes: the weights of a start by hand."""

from pathlib import Path

import pytest

from tests.rigs.foreign_scripts import (
    FOLDER,
    SCRIPTS,
    Once,
    again_if_aborted,
    expected,
    imagenet_on_two_nodes,
    result_of,
)
from tests.rigs.slurm_cluster import Cluster, SlurmJob

pytestmark = pytest.mark.timeout(1200)
# Of one process on each of two nodes, where that differs from two processes on one
ON_TWO_NODES = {"lightning_digits": "--num-nodes 2"}


def submit(cluster: Cluster, folder: Path, line: str) -> SlurmJob:
    return cluster.submit(folder, "", SCRIPT=f"--run-dir runs --name job {line}")


@again_if_aborted
def test_slurm_runs_the_imagenet_script_on_two_nodes(
    cluster: Cluster, once: Once, tmp_path: Path
) -> None:
    line = f"{FOLDER}/imagenet.py --multiprocessing-distributed --dist-url env://"
    job = submit(cluster, tmp_path, line)
    assert job.wait() == "COMPLETED", job.log()
    assert result_of(job.output) == once("imagenet_on_two_nodes", imagenet_on_two_nodes)


# The Trainer, on Accelerate: under `launch`
@pytest.mark.parametrize("name", ["lightning_digits", "accelerate_loop"])
@again_if_aborted
def test_slurm_runs_the_scripts_of_trainers(name: str, cluster: Cluster, once: Once, tmp_path: Path) -> None:
    """They look for Slurm's variables themselves, and must not take the job for one of theirs."""
    script = SCRIPTS[name]
    if script.why_not:
        pytest.skip(script.why_not)
    words = script.words(tmp_path / "own", ON_TWO_NODES.get(name))
    job = submit(cluster, tmp_path, " ".join(words))
    assert job.wait() == "COMPLETED", job.log()
    assert result_of(job.output) == expected(script, once, tmp_path)


def test_slurm_job_fails_with_the_code_of_a_script_that_fails(cluster: Cluster, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import torch.distributed as dist\ndist.init_process_group('gloo'\n")
    job = submit(cluster, tmp_path, str(broken))
    assert job.wait() == "FAILED", job.log()
    assert job.code() == 1
    assert "SyntaxError" in job.output
