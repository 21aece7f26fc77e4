"""Real Slurm jobs are signalled and requeued, and never train twice."""

import shutil
from pathlib import Path

import pytest

from tests.rigs.containers import digest_by_forks, wait_for
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT
from tests.rigs.slurm_cluster import Cluster

pytestmark = pytest.mark.timeout(1200)
JOB = (
    "--dataset digits --model mlp --dropout 0.2 --augment --max-steps 300 --save-every-steps 20 --log-every-steps 5 "
    "--evaluate-every-epochs 50 --tensorboard=false"
)
RUN = f"{JOB} --name job --run-dir runs --step-timeout-s 60 --workload slow_steps:build"
ENDLESS = RUN.replace("300", "1000000")


@pytest.fixture(autouse=True)
def slow_steps(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/rigs/slow_steps.py", tmp_path)


def test_slurm_job_that_is_stopped_twice_has_the_undisturbed_digest(
    cluster: Cluster, forks: Forks, tmp_path: Path
) -> None:
    """By a signal to each task, and by an operator's requeue. test_slurm_stranger.py kills a rank, an agent, a node."""
    job = cluster.submit(tmp_path, RUN)
    for number, way in enumerate((("scancel", "--signal=TERM"), ("scontrol", "requeue")), 1):
        job.wait_for_step(75 * number)
        cluster.run(*way, job.number)
        wait_for("the requeue", lambda number=number: job.show()["Restarts"] >= str(number), log=job.log)
        job.go_on()
    assert job.wait() == "COMPLETED", job.log()
    # All starts write to one log, and each stop made its own save. Slurm itself requeues for the operator
    assert job.output.count("saved at step") == 2
    assert (job.show()["Restarts"], job.output.count("slurm: requeued")) == ("2", 1), job.log()
    assert job.result()["digest"] == digest_by_forks(forks, tmp_path / "undisturbed", f"{JOB} --name job")


def test_slurm_end_of_time_requeues_and_scancel_does_not(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, ENDLESS, "--time=30", "--signal=B:USR1@45")
    job.wait_for_step(50)
    # However long the start took, one to two minutes are left now. Slurm checks every half minute, so its signal comes
    # 45 to 75 s before the end, and the job has steps to save
    hours, minutes, _ = job.show()["RunTime"].split(":")
    cluster.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={int(hours) * 60 + int(minutes) + 2}")
    wait_for("the requeue", lambda: job.show()["Restarts"] == "1", log=job.log)
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    saved = job.step()
    job.go_on()
    job.wait_for_text("resumed from step")
    job.wait_for_step(saved + 50)
    job.cancel()
    assert job.wait() == "CANCELLED"
    cluster.idle()
    assert job.show()["Restarts"] == "1"
    assert job.output.count("saved at step") == 2, job.output


def test_slurm_job_never_trains_twice_when_the_daemon_of_its_node_dies(cluster: Cluster, tmp_path: Path) -> None:
    """The job has one node. Its rank lives on there, while Slurm starts the job again on the other node."""
    job = cluster.submit(tmp_path, ENDLESS, "--nodes=1", "--nodelist=node0", launch="--max-restarts 0")
    job.wait_for_step(50)
    (rank,) = job.ranks("node0")
    cluster.local("kill-slurmd", "node0")
    try:
        wait_for("the requeue", lambda: job.show()["JobState"] == "PENDING", log=job.log)
        cluster.run("scontrol", "update", f"JobId={job.number}", "ReqNodeList=node1", "StartTime=now")
        assert job.wait() == "FAILED", job.log()
        assert job.code() == 2
        assert "is owned by a live attempt" in job.output
        assert rank.is_running()
        before = job.step()
        wait_for("more steps of the first start", lambda: job.step() > before, log=job.log)
        # The first start must not requeue a job that is no longer its own
        job.kill_agent("node0")
        wait_for("the end of the first start", lambda: not cluster.processes(), log=lambda: str(cluster.processes()))
        assert job.show()["JobState"] == "FAILED"
    finally:
        cluster.local("start-slurmd", "node0")
