"""A job of three to four nodes loses one, goes on with three, and with four again: on the curve of one process."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.rigs.containers import wait_for
from tests.rigs.jobs import metrics, run
from tests.rigs.slurm_cluster import Cluster, why_not

pytestmark = pytest.mark.timeout(1200)
STEPS = 400
# Without dropout, which each rank draws for itself. Accumulated, so that a step takes some time
LINE = (
    f"--dataset digits --model mlp --lr 0.02 --schedule constant --max-steps {STEPS} --epochs 1000 --accumulate 4 "
    "--log-every-steps 1 --evaluate-every-epochs 1000 --tensorboard=false --run-dir runs --name job"
)


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    """A real Slurm of four nodes."""
    if reason := why_not():
        pytest.skip(reason)
    made = Cluster(4)
    try:
        made.local("up")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss of each step of one process."""
    folder = tmp_path_factory.mktemp("alone")
    job = run("train", *LINE.split(), cwd=folder)
    assert job.codes == [0], job.output
    return losses(folder)


def losses(folder: Path) -> list[float]:
    """Of each step, none missing and none twice."""
    found = [line for line in metrics(folder / "runs" / "job") if "train/loss" in line]
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    return [line["train/loss"] for line in found]


def test_slurm_job_of_three_to_four_nodes_loses_one_and_gets_it_back(
    four: Cluster, alone: list[float], tmp_path: Path
) -> None:
    four.idle()
    job = four.submit(tmp_path, LINE, "--nodes=3-4")
    job.wait_for_step(50)
    four.local("kill", "node3")
    wait_for("the requeue", lambda: job.show()["JobState"] == "PENDING", log=job.log)
    job.go_on()
    job.wait_for_text("global = 3 ranks x 21 to 22")
    lost_at = job.step()
    four.local("start", "node3")
    wait_for("node3", lambda: four.num_idle() == 1, log=four.report)
    job.wait_for_step(lost_at + 20)
    four.run("scontrol", "requeue", job.number)
    assert job.wait() == "COMPLETED", job.log()
    four.idle()
    worlds = [line.split("global = ")[1].split()[0] for line in job.output.splitlines() if "global = " in line]
    assert [world for world, _ in groupby(worlds)] == ["4", "3", "4"], job.output
    assert job.result()["world_size"] == 4
    largest = max(abs(ours - one) / one for ours, one in zip(losses(tmp_path), alone, strict=True))
    print(f"loss within {largest:.1e}")
    assert largest < 1e-5
