"""Pods of k8s/ as real containers that are killed, stopped and lost.

Whether another pod follows one that has ended is read from its manifest, by the rules in k8s/ends.md.
"""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.rigs.containers import digest_by_forks, docker, wait_for
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from tests.rigs.kubepods import LONG, Cluster

pytestmark = pytest.mark.timeout(2400)
Pods = Callable[..., Cluster]
Object = dict[str, Any]


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Object:
    """The result of an undisturbed run, of two ranks on this machine."""
    folder = tmp_path_factory.mktemp("host")
    digest_by_forks(forks, folder, " ".join(LONG))
    return result(folder / "job")


def test_k8s_rank_that_is_killed_comes_back_inside_its_pod(pods: Pods, undisturbed: Object) -> None:
    cluster = pods("pytorchjob.yaml", LONG)
    cluster.start()
    cluster.hit_rank(0, signal.SIGKILL)
    assert cluster.codes() == [0, 0], cluster.logs()
    assert "rank 0 on rankup-master-0 ended with 137" in cluster.log(0)
    assert "resumed from step" in cluster.log(0)
    assert cluster.read("result.json")["digest"] == undisturbed["digest"]


def test_k8s_pod_that_is_killed_is_retried_and_resumes_to_the_same_digest(pods: Pods, undisturbed: Object) -> None:
    """How other manifests decide: test_k8s_rules.py."""
    cluster = pods("pytorchjob.yaml", LONG)
    cluster.start()
    cluster.processes(1)
    # As by kubectl exec
    stands = docker("exec", cluster.container(0), "python", "-m", "rankup", "status", "job")
    assert "state    running" in stands
    assert "rank  host" in stands
    cluster.hit(1, signal.SIGKILL)
    assert cluster.codes(1) == [137], cluster.logs()
    assert cluster.retry({1: 137}) == 0
    assert cluster.codes() == [0, 0], cluster.logs()
    assert "ended with 137 (" in cluster.log(0)  # its pod stayed, and its agent says who was lost
    assert "resumed from step" in cluster.log(0)
    assert cluster.read("result.json")["digest"] == undisturbed["digest"]


def test_k8s_pod_that_is_stopped_saves_is_no_success_and_the_next_ones_resume_to_the_same_digest(
    pods: Pods, undisturbed: Object
) -> None:
    cluster = pods("pytorchjob.yaml", LONG)
    cluster.start()
    cluster.hit(1, signal.SIGTERM)
    codes = cluster.codes()
    assert codes == [143, 143], cluster.logs()
    assert cluster.read("status.json")["state"] == "stopped"
    at = cluster.saved()[-1]
    assert cluster.retry(dict(enumerate(codes))) == 0
    assert cluster.codes() == [0, 0], cluster.logs()
    assert at in cluster.log(0)
    assert cluster.read("result.json")["digest"] == undisturbed["digest"]


def test_k8s_elastic_worker_that_is_killed_comes_back_and_the_digest_is_the_same(
    pods: Pods, undisturbed: Object
) -> None:
    cluster = pods("pytorchjob+elastic", LONG)
    cluster.start(0, 1)  # as after: kubectl scale pytorchjob rankup --replicas 2
    cluster.hit(1, signal.SIGKILL)
    assert cluster.codes(0, 1) == [0, 0], cluster.logs()
    assert (cluster.restarts(0), cluster.restarts(1)) == (0, 1)  # torchrun's agents join anew where they are
    assert "resumed from step" in cluster.logs()
    found = cluster.read("result.json")
    assert (found["world_size"], found["digest"]) == (2, undisturbed["digest"])


def test_k8s_elastic_workers_wait_for_worker_0_and_go_on_without_one_that_is_drained(
    pods: Pods, undisturbed: Object
) -> None:
    cluster = pods("pytorchjob+elastic", LONG)
    cluster.start(1, 2)
    said = "waiting for the name rankup-worker-0"
    wait_for("worker-1 to look", lambda: said in cluster.log(1), timeout_s=300, log=cluster.logs)
    cluster.start(0)
    cluster.delete(2)
    cluster.hit(2, signal.SIGTERM, ranks=3)
    assert cluster.codes(2) != [0], cluster.log(2)
    assert cluster.codes(0, 1) == [0, 0], cluster.logs()
    assert "resumed from step" in cluster.logs()
    found = cluster.read("result.json")
    assert found["world_size"] == 2
    # Three Workers add in another order than two: other last bits
    assert found["metrics"]["loss"] == pytest.approx(undisturbed["metrics"]["loss"], rel=0.001)
