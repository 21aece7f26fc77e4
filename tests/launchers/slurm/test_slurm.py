"""sbatch slurm/ddp.sbatch on a real Slurm of two nodes: the same weights as torchrun, whatever happens to it on the way."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs.containers import digest_by_torchrun
from tests.rigs.slurm_cluster import Cluster

pytestmark = pytest.mark.timeout(1200)
JOB = "--dataset digits --model mlp --dropout 0.2 --augment --max-steps 60 --name job"
RUN = f"{JOB} --run-dir runs"


@pytest.fixture(autouse=True)
def leaves_nothing(cluster: Cluster) -> Iterator[None]:
    """After any end nothing is left running on any node."""
    cluster.idle()
    yield
    cluster.idle()


@pytest.fixture(scope="session")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """By torchrun on this machine, by the number of processes."""
    return {n: digest_by_torchrun(tmp_path_factory.mktemp(f"host{n}"), JOB, nproc=n) for n in (2, 4)}


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("way", ["tasks", "torchrun"])
def test_slurm_trains_on_two_nodes_to_the_weights_of_torchrun_on_the_host(
    way: str, per_node: int, cluster: Cluster, digests: dict[int, str], tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    job = cluster.submit(tmp_path, RUN, f"--ntasks-per-node={per_node}", WAY=way)
    assert job.wait() == "COMPLETED", job.log()
    result = job.result()
    record_property(f"{way}, 2 nodes x {per_node}", f"{result['digest']}, torchrun on the host {digests[2 * per_node]}")
    assert result["digest"] == digests[2 * per_node]
    assert result["world_size"] == 2 * per_node
    assert "on node0, node1" in job.output
