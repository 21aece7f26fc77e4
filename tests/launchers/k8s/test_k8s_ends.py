"""Pods of k8s/, run as real containers, are killed, stopped and lost.

Whether a new pod replaces an ended pod is decided from its manifest, by the rules in k8s/ends.md.
"""

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.rigs.containers import digest_by_forks, docker, wait_for
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from tests.rigs.kubeflow import verdict
from tests.rigs.kubepods import JOB, LONG, SLOW, Cluster

pytestmark = pytest.mark.timeout(2400)
Pods = Callable[..., Cluster]
Object = dict[str, Any]


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Object:
    """The result of an undisturbed run of two ranks on this machine."""
    folder = tmp_path_factory.mktemp("host")
    digest_by_forks(forks, folder, " ".join(LONG))
    return result(folder / "job")


def test_k8s_job_with_killed_and_stopped_pods_has_the_undisturbed_digest(
    pods: Pods, undisturbed: Object
) -> None:
    """test_k8s_rules.py tests what other manifests do after the end of a pod."""
    cluster = pods("pytorchjob.yaml", [*LONG, *SLOW])

    def resumed(count: int) -> None:
        wait_for("the resume", lambda: cluster.log(0).count("resumed from step") >= count, log=cluster.logs)

    cluster.start()
    cluster.hit_rank(0, signal.SIGKILL)
    resumed(1)  # in the same pod
    assert "rank 0 on rankup-master-0 ended with 137" in cluster.log(0)
    # As `kubectl exec` would run it
    stands = docker("exec", cluster.container(0), "rankup", "status", "job")
    assert re.search(r"^state +running$", stands, re.M)
    assert re.search(r"^rank +host", stands, re.M)
    cluster.hit(1, signal.SIGKILL)
    assert cluster.codes(1) == [137], cluster.logs()
    assert cluster.retry({1: 137}) == 0
    resumed(2)  # pod 0 stayed
    cluster.stop(1)
    codes = cluster.codes()
    assert codes == [143, 143], cluster.logs()
    assert cluster.read("status.json")["state"] == "stopped"
    at = cluster.saved()[-1]
    assert cluster.retry(dict(enumerate(codes))) == 0
    assert cluster.codes() == [0, 0], cluster.logs()
    assert at in cluster.log(0)
    assert cluster.read("result.json")["digest"] == undisturbed["digest"]


def test_k8s_elastic_job_continues_without_pod_0_while_pods_come_and_go(pods: Pods) -> None:
    """test_k8s_rules.py tests how an elastic Job and JobSet differ from plain ones."""
    cluster = pods("pytorchjob+elastic+secret", [*JOB, *SLOW, "--max-steps", "1000000", "--epochs", "100000"])

    def ranks_are(*counts: int) -> None:
        wait_for(f"{counts} ranks", lambda: cluster.changes()[-len(counts):] == [*counts], log=cluster.logs)

    cluster.scale(3)
    cluster.start()
    cluster.hit(0, signal.SIGKILL, ranks=3)
    ranks_are(3, 2)
    assert verdict(cluster.owner, *cluster.codes(0)) == "new"
    address = cluster.address(0)
    cluster.scale(4)
    cluster.start(3)  # it gets the address of lost pod 0, so that the new pod 0 gets another
    cluster.replace(0)
    wait_for("4 ranks", lambda: cluster.changes()[-1] == 4, log=cluster.logs)  # they join at once, or one by one
    assert cluster.address(0) != address
    cluster.stop(2)  # as a drain or `kubectl scale` would stop it
    assert cluster.codes(2) == [143]
    assert verdict(cluster.owner, 143) == "new"
    ranks_are(4, 3)
    cluster.stop(0, 1, 3)
    assert cluster.codes(0, 1, 3) == [143] * 3, cluster.logs()
