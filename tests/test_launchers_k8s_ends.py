"""Pods of k8s/ as real containers, killed, stopped and lost. What becomes of a pod that has ended is read from its manifest, by
the rules that k8s/README.md states."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from containers import digest_by_torchrun
from jobs import result
from kubepods import LONG, Cluster

pytestmark = pytest.mark.timeout(900)
Pods = Callable[..., Cluster]
Object = dict[str, Any]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Object:
    """The result of the run that nothing happened to, by torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    digest_by_torchrun(folder, " ".join(LONG))
    return result(folder / "job")


@pytest.mark.parametrize(("what", "counted"), [("pytorchjob.yaml", 0), ("job.yaml", 2)])
def test_k8s_pod_that_is_killed_is_retried_and_resumes_to_the_same_digest(
    what: str, counted: int, pods: Pods, undisturbed: Object
) -> None:
    cluster = pods(what, LONG)
    cluster.start()
    cluster.hit(1, signal.SIGKILL)
    codes = cluster.codes()
    assert codes == [171, 137], cluster.logs()
    assert cluster.retry(codes) == counted
    assert cluster.codes() == [0, 0], cluster.logs()
    assert "resumed from step-" in cluster.log(0)
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
    assert cluster.retry(codes) == 0
    assert cluster.codes() == [0, 0], cluster.logs()
    assert at in cluster.log(0)
    assert cluster.read("result.json")["digest"] == undisturbed["digest"]
