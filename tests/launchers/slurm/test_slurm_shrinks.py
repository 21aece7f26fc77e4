"""A job of two to three nodes loses one, goes on with two, and with three again: on the curve of one process."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.rigs.containers import wait_for
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics
from tests.rigs.slurm_cluster import Cluster, why_not

pytestmark = pytest.mark.timeout(1200)
STEPS = 400
# Without dropout, which each rank draws for itself. Accumulated, so that a step takes some time
LINE = (
    f"--dataset digits --model mlp --lr 0.02 --schedule constant --max-steps {STEPS} --epochs 1000 --accumulate 4 "
    "--log-every-steps 1 --evaluate-every-epochs 1000 --tensorboard=false --run-dir runs --name job"
)


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """A real Slurm of three nodes."""
    if reason := why_not():
        pytest.skip(reason)
    made = Cluster(3)
    try:
        made.local("up")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss of each step of one process."""
    folder = tmp_path_factory.mktemp("alone")
    codes, output = forks.run("train", *LINE.split(), cwds=[folder])
    assert codes == [0], output
    return losses(folder)


def losses(folder: Path) -> list[float]:
    """Of each step, none missing and none twice."""
    found = [line for line in metrics(folder / "runs" / "job") if "train/loss" in line]
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    return [line["train/loss"] for line in found]


def test_slurm_job_of_two_to_three_nodes_loses_one_and_gets_it_back(
    three: Cluster, alone: list[float], tmp_path: Path
) -> None:
    three.idle()
    job = three.submit(tmp_path, LINE, "--nodes=2-3")
    job.wait_for_step(50)
    three.local("kill", "node2")
    wait_for("the requeue", lambda: job.show()["JobState"] == "PENDING", log=job.log)
    job.go_on()
    job.wait_for_text("global = 2 ranks x 32")
    lost_at = job.step()
    three.local("start", "node2")
    wait_for("node2", lambda: three.num_idle() == 1, log=three.report)
    job.wait_for_step(lost_at + 20)
    three.run("scontrol", "requeue", job.number)
    assert job.wait() == "COMPLETED", job.log()
    three.idle()
    worlds = [line.split("global = ")[1].split()[0] for line in job.output.splitlines() if "global = " in line]
    assert [world for world, _ in groupby(worlds)] == ["3", "2", "3"], job.output
    assert job.result()["world_size"] == 3
    largest = max(abs(ours - one) / one for ours, one in zip(losses(tmp_path), alone, strict=True))
    print(f"loss within {largest:.1e}")
    assert largest < 1e-5
