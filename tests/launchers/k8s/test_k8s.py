"""The pods of k8s/, run as real containers, find each other by name and train to the digest of the host."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.containers import digest_by_forks, docker, wait_for, warned
from tests.rigs.fork_server import Forks
from tests.rigs.kube import IMAGE
from tests.rigs.kubepods import SHORT, Cluster

pytestmark = pytest.mark.timeout(1800)
Pods = Callable[..., Cluster]


def test_k8s_manifests_name_the_image_that_was_built(image: str) -> None:
    found = {docker("image", "inspect", "-f", "{{.Id}}", name).strip() for name in (image, IMAGE)}
    assert len(found) == 1


# test_k8s_ends.py has the pods of a PyTorchJob, and those of a Job are below
@pytest.mark.parametrize("what", ["trainjob.yaml", "jobset.yaml"])
def test_k8s_pods_train_to_the_digest_of_the_host(pods: Pods, forks: Forks, tmp_path: Path, what: str) -> None:
    cluster = pods(what, SHORT)
    cluster.start()
    assert cluster.codes() == [0, 0], cluster.logs()
    assert cluster.read("result.json")["digest"] == digest_by_forks(forks, tmp_path / "host", " ".join(SHORT))


def test_k8s_pod_of_a_plain_job_waits_for_the_name_of_rank_0(pods: Pods) -> None:
    cluster = pods("job.yaml", SHORT)
    cluster.start(1)
    wait_for("rank 1 to look", lambda: "rankup-0.rankup" in cluster.log(1), timeout_s=300, log=cluster.logs)
    cluster.start(0)
    assert cluster.codes() == [0, 0], cluster.logs()
    assert cluster.read("result.json")["world_size"] == 2


def test_k8s_doctor_instead_of_train_finds_the_pods_fit(pods: Pods) -> None:
    cluster = pods("pytorchjob.yaml")
    for pod in cluster.pods:
        words = pod["spec"]["containers"][0]["args"]
        words[words.index("train")] = "doctor"
    cluster.start()
    codes = cluster.codes()
    (path,) = cluster.runs.glob("*/doctor/report.json")
    report = json.loads(path.read_text())
    assert warned(report) == []
    assert codes == [report["exit_code"]] * 2, cluster.logs()
    said = cluster.log(0)
    assert "all 2 ranks: 0 on rankup-master-0; 1 on rankup-worker-0" in said
    assert "doctor: fit to train" in said


def test_k8s_fsdp_pods_resume_from_shards_to_the_digest_of_the_host(
    pods: Pods, image: str, forks: Forks, tmp_path: Path
) -> None:
    """The image's own Python reads the shards, because Debian 12's Python writes them in another way."""
    short = [*SHORT, "--schedule", "constant"]
    cluster = pods("pytorchjob+fsdp", [*short, "--max-steps", "20"])
    cluster.start()
    assert cluster.codes() == [0, 0], cluster.logs()
    cluster.settings = short  # applied again, with more steps
    for index in (0, 1):
        cluster.replace(index)
    assert cluster.codes() == [0, 0], cluster.logs()
    assert "resumed from step-00000020" in cluster.log(0)
    job = [*short, "--parallel", "fsdp", "--checkpoint-format", "sharded"]
    found = cluster.read("result.json")["digest"]
    assert found == digest_by_forks(forks, tmp_path / "host", " ".join(job))
    volume = f"{cluster.runs}:/runs"
    said = docker("run", "--rm", "--network", "none", "-v", volume, image, "export", "job", "/tmp/w.pt",
                  "--item", "model")
    assert "model of step" in said
