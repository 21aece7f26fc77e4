"""The doctor where jobs run: two containers, and a Slurm job that asks it before it trains."""

import json
from pathlib import Path

import pytest

from tests.rigs.containers import project, warned
from tests.rigs.slurm_cluster import Cluster

pytestmark = pytest.mark.timeout(1200)
JOB = "--dataset digits --model mlp --max-steps 10 --name job"


@pytest.mark.usefixtures("image")
def test_compose_doctor_finds_two_containers_fit(tmp_path: Path) -> None:
    with project(tmp_path, ARGS="--name job", RANKUP_UID="54321", RANKUP_GID="54321") as made:
        made.add("compose.doctor.yaml")
        made.up("doctor0", "doctor1")
        codes = made.codes("doctor0", "doctor1")
        said = made.logs()
    report = json.loads((made.runs / "job" / "doctor" / "report.json").read_text())
    assert warned(report) == []
    assert codes == [report["exit_code"]] * 2, said
    assert "all 2 ranks: 0 on doctor0; 1 on doctor1" in said
    assert "between nodes: slowest ranks 0 on doctor0 and 1 on doctor1" in said


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(
    ("limits", "warnings"),
    [
        ("mem_limit: 700m, memswap_limit: 700m, shm_size: 16mb",
         ["limits rank 1 on doctor1: 700 MiB of memory for 1 ranks",
          "memory rank 1 on doctor1: /dev/shm: 16 of 16 MiB free"]),
        ("cpus: 0.3",
         ["limits rank 1 on doctor1: 1 process of 1 thread, but only 0.3 CPUs to use (the container's limit)"]),
    ],
    ids=["memory", "CPUs"],
)
def test_compose_doctor_names_the_container_that_has_too_little(
    limits: str, warnings: list[str], tmp_path: Path
) -> None:
    with project(tmp_path, ARGS="--name job") as made:
        made.add("compose.doctor.yaml")
        made.override(f"services: {{doctor1: {{{limits}}}}}")
        made.up("doctor0", "doctor1")
        codes = made.codes("doctor0", "doctor1")
        said = " ".join(made.logs().replace("\x1b[2K", "").replace("[doctor0 r0/2]", "").split())
    assert codes == [10, 10], said
    for warning in warnings:
        assert f"WARNING {warning}" in said
    report = json.loads((made.runs / "job" / "doctor" / "report.json").read_text())
    assert len(warned(report)) == len(warnings), report
    assert "doctor: fit to train, with warnings (" in said


def test_slurm_doctor_looks_first_and_the_job_trains(cluster: Cluster, tmp_path: Path) -> None:
    cluster.idle()
    job = cluster.submit(tmp_path, f"{JOB} --run-dir runs", DOCTOR="1")
    assert job.wait() == "COMPLETED", job.log()
    fit, trained = job.output.index("doctor: fit to train"), job.output.index("training")
    assert fit < trained, job.output
    assert "between nodes: slowest ranks 0 on node0 and 1 on node1" in job.output
    assert job.result()["world_size"] == 2


def test_slurm_doctor_that_says_no_keeps_the_job_from_training(cluster: Cluster, tmp_path: Path) -> None:
    cluster.idle()
    job = cluster.submit(tmp_path, f"{JOB} --run-dir runs --batch-size 1", DOCTOR="1")
    assert job.wait() == "FAILED", job.log()
    assert job.code() == 20
    assert "batch_size must be at least 2" in " ".join(job.output.split())
    assert "the doctor says no, exit code 20 (20 not fit" in job.output
    assert not (tmp_path / "runs" / "job" / "result.json").exists()
    cluster.idle()
