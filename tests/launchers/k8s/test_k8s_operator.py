"""Training operator v1: the rig makes the same pods."""

import json
from typing import Any

from tests.rigs.kube import FACTS, one
from tests.rigs.kubeflow import environment, operator_pods

Object = dict[str, Any]


def as_recorded(pod: Object) -> Object:
    """Return the fields of a pod that are in the recording."""
    keep = ("command", "env", "name", "ports")
    containers = [{key: each[key] for key in keep if key in each} for each in pod["spec"]["containers"]]
    first = {"name": pod["name"], "labels": pod["labels"], "restartPolicy": pod["spec"]["restartPolicy"]}
    return {**first, "initContainers": pod["spec"].get("initContainers", []), "containers": containers}


def test_k8s_rig_makes_the_same_pods_as_the_operator() -> None:
    """Compare all recorded pods if the recording is there, and always the fields that our manifests depend on."""
    recording = FACTS / "operator-pods-v1.9.3.json"
    for case in json.loads(recording.read_text()) if recording.exists() else []:
        # Skip cases with settings that none of our manifests has
        if (case["job"]["spec"].get("elasticPolicy") or {}).keys() <= {"rdzvBackend", "maxRestarts"}:
            assert [as_recorded(pod) for pod in operator_pods(case["job"])] == case["pods"]
    job = one("pytorchjob.yaml", "PyTorchJob")
    labels = [pod["labels"] for pod in operator_pods(job)]
    assert [each["training.kubeflow.org/replica-type"] for each in labels] == ["master", "worker"]
    assert [each.get("training.kubeflow.org/job-role") for each in labels] == ["master", None]
    job["spec"] |= {"nprocPerNode": "2"}
    for rank, pod in enumerate(operator_pods(job)):
        assert environment(pod) == {
            "PYTHONUNBUFFERED": "1", "MASTER_PORT": "23456", "PET_MASTER_PORT": "23456",
            "MASTER_ADDR": "rankup-master-0", "PET_MASTER_ADDR": "rankup-master-0", "WORLD_SIZE": "4",
            "RANK": str(rank), "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "2", "PET_NNODES": "2",
        }
        assert pod["spec"]["restartPolicy"] == "Never"  # the operator acts on ExitCode, not the kubelet
