"""On three nodes: a job of two to three loses a node, continues with two at once, and with three after a requeue; its
losses stay those of one process. A job of two is requeued without the node that failed."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.rigs.containers import wait_for
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, changes, losses_of
from tests.rigs.slurm_cluster import Cluster, why_not

pytestmark = pytest.mark.timeout(1200)
STEPS = 200
# No dropout, which differs on each rank. Gradients are accumulated, so that a step takes some time
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
    """The losses of all steps of one process."""
    folder = tmp_path_factory.mktemp("alone")
    codes, output = forks.run("train", *LINE.split(), cwds=[folder])
    assert codes == [0], output
    return losses_of(folder / "runs" / "job", count=STEPS)


def worlds(folder: Path) -> list[int]:
    """Return the numbers of ranks that trained, from the first to the last."""
    return [number for number, _ in groupby(number for _, number in changes(folder / "runs" / "job"))]


def test_slurm_elastic_job_loses_a_node_and_gets_it_back(
    three: Cluster, alone: list[float], tmp_path: Path
) -> None:
    three.idle()
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    hurry = tmp_path / "hurry"
    slow = (ROOT / "tests/rigs/slow_steps.py").read_text()
    slow = slow.replace("time.sleep(0.05)", f"time.sleep(0 if os.path.exists({str(hurry)!r}) else 0.1)")
    (tmp_path / "slow.py").write_text(f"import os\n{slow}")
    line = f"{LINE} --workload slow:build"
    wanted = ("--no-kill", "--nodes=2-3")
    job = three.submit(tmp_path, line, *wanted, launch="--nnodes 2:3", RANKUP_SECRET_FILE=str(secret))
    job.wait_for_step(20)
    # The third node may come seconds later, and the others then begin without it
    wait_for("three nodes", lambda: worlds(tmp_path)[-1] == 3, log=job.log)
    three.local("kill", "node2")
    wait_for("a step of two nodes", lambda: worlds(tmp_path)[-2:] == [3, 2], log=job.log)
    wait_for("Slurm to take the node away", lambda: job.show()["NumNodes"] == "2", log=job.log)
    lost_at = job.step()
    three.local("start", "node2")
    wait_for("node2", lambda: three.num_idle() == 1, log=three.report)
    job.wait_for_step(lost_at + 5)
    assert job.show()["Restarts"] == "0"
    three.run("scontrol", "requeue", job.number)
    hurry.touch()
    assert job.wait() == "COMPLETED", job.log()
    three.idle()
    assert worlds(tmp_path)[-3:] == [3, 2, 3], job.output
    assert job.result()["world_size"] == 3
    found = losses_of(tmp_path / "runs" / "job", count=STEPS)
    largest = max(abs(ours - one) / one for ours, one in zip(found, alone, strict=True))
    print(f"loss within {largest:.1e}")
    assert largest < 1e-5


def test_slurm_requeued_job_runs_on_other_nodes_than_the_one_that_failed(three: Cluster, tmp_path: Path) -> None:
    three.idle()
    slow = (ROOT / "tests/rigs/slow_steps.py").read_text()
    (tmp_path / "slow.py").write_text(slow)
    job = three.submit(tmp_path, f"{LINE} --workload slow:build", launch="--max-restarts 0")
    job.wait_for_step(20)
    assert job.show()["NodeList"] == "node[0-1]"
    job.kill_rank("node1")
    wait_for("the requeue", lambda: job.show()["Restarts"] == "1", log=job.log)
    job.wait_for_text("the next start leaves out node1: scontrol update")
    assert job.wait() == "COMPLETED", job.log()
    assert (job.show()["ExcNodeList"], job.show()["NodeList"]) == ("node1", "node[0,2]"), job.log()
    three.idle()
