"""k8s/: each manifest is what a cluster accepts, and the check finds what it would not."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.rigs.kube import CLAIMS, change, one, problems, rendered

Object = dict[str, Any]


# The others: test_k8s_mixes.py
@pytest.mark.parametrize("what", CLAIMS)
def test_k8s_manifests_fit_the_schemas(what: str) -> None:
    for document in rendered(what):
        assert problems(document) == []


MASTER = ("spec", "pytorchReplicaSpecs", "Master")
POD = (*MASTER, "template", "spec")
NODE = ("spec", "template", "spec", "replicatedJobs", 0)


@pytest.mark.parametrize(
    "mutate",
    [
        change("spec", "nprocPerNode", value=1),
        change(*POD, "containers", 0, "name", value="trainer"),
        change(*MASTER, "replicas", value=2),
        change("spec", "ttlSecondsAfterFinished", value=1),
        change("spec", "runPolicy", "ttlAfterFinished", value=1),
        change(*MASTER, "restartPolicy", value=1),
        change(*POD, "containers", 0, "volumeMount", value=[]),
        change(*POD, "containers", 0, "resources", "limits", value="2Gi"),
        change(*POD, "terminationGracePeriodSeconds", value="long"),
        change("spec", "pytorchReplicaSpecs", "Launcher", value={"replicas": 1, "template": {}}),
        change("metadata", "name", value="1st"),
        lambda job: job["spec"].update(elasticPolicy={}) or job["spec"]["pytorchReplicaSpecs"].pop("Worker"),
    ],
)
def test_k8s_mistakes_in_a_pytorchjob_are_found(mutate: Callable[[Object], None]) -> None:
    job = one("pytorchjob.yaml", "PyTorchJob")
    assert problems(job) == []
    mutate(job)
    assert problems(job) != []


@pytest.mark.parametrize(
    ("what", "of", "mutate"),
    [
        ("job.yaml", "Job", change("spec", "completionMod", value="Indexed")),
        ("job.yaml", "Job", change("spec", "completions", value="2")),
        ("job.yaml", "Service", change("spec", "publishNotReadyAddresses", value="yes")),
        ("trainjob.yaml", "TrainJob", change("spec", "trainer", "numNodes", value="2")),
        ("trainjob.yaml", "TrainJob", change("spec", "nodes", value=2)),
        ("trainjob.yaml", "TrainingRuntime", change(*NODE, "template", "spec", "x", value=1)),
    ],
)
def test_k8s_mistakes_in_other_objects_are_found(what: str, of: str, mutate: Callable[[Object], None]) -> None:
    document = one(what, of)
    mutate(document)
    assert problems(document) != []
