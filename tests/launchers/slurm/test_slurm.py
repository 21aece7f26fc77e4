"""slurm/ddp.sbatch gives the host's weights on a real Slurm of two nodes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.containers import digest_by_forks
from tests.rigs.fork_server import Forks
from tests.rigs.slurm_cluster import Cluster

pytestmark = pytest.mark.timeout(1200)
JOB = "--dataset digits --model mlp --dropout 0.2 --augment --max-steps 60 --name job --tensorboard=false"
RUN = f"{JOB} --run-dir runs"
LONG = RUN.replace("--max-steps 60", "--max-steps 1000 --log-every-steps 5 --evaluate-every-epochs 50")


@pytest.fixture(scope="session")
def digests(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of the same jobs on this machine, by number of ranks."""
    make, long = tmp_path_factory.mktemp, LONG.replace(" --run-dir runs", "")
    return {2: digest_by_forks(forks, make("two"), long), 4: digest_by_forks(forks, make("four"), JOB, nproc=4)}


# test_slurm_ends.py has one rank on each node
def test_slurm_doctor_runs_before_two_nodes_train_to_the_weights_of_the_host(
    cluster: Cluster, digests: dict[int, str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    job = cluster.submit(tmp_path, RUN, "--ntasks-per-node=2", launch="--doctor")
    assert job.wait() == "COMPLETED", job.log()
    fit, trained = job.output.index("doctor: fit to train"), job.output.index("training")
    assert fit < trained, job.output
    said = " ".join(job.output.replace("[node0 r0/4]", "").split())  # undo the wrapping of long lines
    link = r"between nodes: slowest \S+ .B/s, from rank \d on node([01]) to rank \d on node(?!\1)[01];"
    assert re.search(link, said), job.output
    result = job.result()
    record_property("2 nodes x 2", f"{result['digest']}, the host {digests[4]}")
    assert (result["digest"], result["world_size"]) == (digests[4], 4)
    assert "on node0, node1" in job.output
