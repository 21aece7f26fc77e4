"""bench where jobs run: two containers on a link of known speed, a Slurm job, pods."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.containers import Project, project
from tests.rigs.kubepods import Cluster as Pods
from tests.rigs.slurm_cluster import Cluster

pytestmark = pytest.mark.timeout(1200)
JOB = "--dataset digits --model mlp --name job --step-ms 1 --iterations 5"
LIMIT = 25e6 / 8  # bytes/s: so slow that it is not the CPUs which count, whatever else they do


def speeds(said: dict[str, Any], size: int) -> dict[tuple[str, str], float]:
    """Bytes/s of the bus by operation and backend."""
    return {(row["operation"], row["backend"]): row["bus"] for row in said["collectives"] if row["size"] == size}


def narrow(made: Project, node: str) -> None:
    """Hold what this container sends, and what is sent to it, to 25 Mbit/s."""
    pid = made.state(node)["Pid"]
    limit = ["root", "tbf", "rate", "25mbit", "burst", "32kb", "latency", "400ms"]
    inside = ["nsenter", "--target", str(pid), "--net"]
    subprocess.run([*inside, "tc", "qdisc", "add", "dev", "eth0", *limit], check=True)
    show = [*inside, "ip", "-o", "link", "show", "dev", "eth0"]
    link = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    peer = int(link.partition("eth0@if")[2].partition(":")[0])  # 7: eth0@if8: <...
    links = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    (own,) = [line.split()[1].partition("@")[0] for line in links.splitlines() if line.startswith(f"{peer}: ")]
    subprocess.run(["tc", "qdisc", "add", "dev", own, *limit], check=True)


@pytest.mark.usefixtures("image")
def test_compose_bench_agrees_with_plain_sockets_in_the_same_containers(tmp_path: Path) -> None:
    with project(tmp_path, ARGS=f"{JOB} --sizes 64K,1M --join-timeout-s 600", COMMAND="bench") as made:
        made.up("node0")  # it waits for the other, until there is a limit
        narrow(made, "node0")
        made.up("node0", "node1")
        assert made.codes() == [0, 0], made.logs()
        said = json.loads((made.runs / "job" / "bench" / "bench.json").read_text())
    found = speeds(said, 2**20)
    plain = found["point to point", "sockets"]
    assert said["hosts"] == ["node0", "node1"]
    assert 0.8 * LIMIT < plain < 1.05 * LIMIT
    assert said["plain"]["ratio"]["gloo"] == pytest.approx(1.0, abs=0.25)
    for operation in ("all-reduce", "broadcast"):
        assert 0.4 * plain < found[operation, "gloo"] < 1.5 * plain, found


def test_slurm_bench_measures_the_nodes_of_the_job_and_trains_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.idle()
    job = cluster.submit(tmp_path, f"{JOB} --sizes 1K,64K --run-dir runs", COMMAND="bench")
    assert job.wait() == "COMPLETED", job.log()
    said = json.loads((tmp_path / "runs" / "job" / "bench" / "bench.json").read_text())
    assert said["hosts"] == ["node0", "node1"]
    assert ("all-reduce", "gloo") in speeds(said, 1024)
    assert "- plain sockets: " in job.output
    assert not (tmp_path / "runs" / "job" / "result.json").exists()


def test_slurm_refuses_a_command_that_is_none(cluster: Cluster, tmp_path: Path) -> None:
    cluster.idle()
    job = cluster.submit(tmp_path, f"{JOB} --run-dir runs", COMMAND="fly")
    assert job.wait() == "FAILED", job.log()
    assert job.code() == 2
    assert "slurm: COMMAND must be train, run, bench or doctor, got fly" in job.output


def test_k8s_bench_measures_between_the_pods(pods: Callable[..., Pods]) -> None:
    cluster = pods("overlays/bench", [*JOB.split(), "--sizes", "1K,64K"])
    cluster.start()
    assert cluster.codes() == [0, 0], cluster.logs()
    assert "- plain sockets: " in cluster.log(0)
    assert cluster.read("bench/bench.json")["hosts"] == ["rankup-master-0", "rankup-worker-0"]
