"""tests/rigs/kubeflow.py makes the pods that Kubernetes makes: those that an operator was recorded to make, where the
recording is at hand, and everywhere those that our manifests depend on."""

import json
from typing import Any

import pytest

from tests.rigs.kube import FACTS, one
from tests.rigs.kubeflow import environment, operator_pods

Object = dict[str, Any]
RECORDING = FACTS / "operator-pods-v1.9.3.json"
CASES = json.loads(RECORDING.read_text()) if RECORDING.exists() else []
RECORDED = {case["job"]["metadata"]["name"]: case for case in CASES}


def as_recorded(pod: Object) -> Object:
    """The fields of a pod that the recording holds."""
    keep = ("command", "env", "name", "ports")
    containers = [{key: each[key] for key in keep if key in each} for each in pod["spec"]["containers"]]
    first = {"name": pod["name"], "labels": pod["labels"], "restartPolicy": pod["spec"]["restartPolicy"]}
    return {**first, "initContainers": pod["spec"].get("initContainers", []), "containers": containers}


@pytest.mark.parametrize("name", RECORDED or ["our own"])
def test_pods_are_those_that_the_operator_was_seen_to_make(name: str) -> None:
    """Without the recording our own job stands for its cases, so that this test is never skipped."""
    job = RECORDED[name]["job"] if RECORDED else one("pytorchjob.yaml", "PyTorchJob")
    made = [as_recorded(pod) for pod in operator_pods(job)]
    if RECORDED:
        assert made == RECORDED[name]["pods"]
    else:
        assert [pod["name"] for pod in made] == ["rankup-master-0", "rankup-worker-0"]
        assert [pod["labels"]["training.kubeflow.org/replica-type"] for pod in made] == ["master", "worker"]
        assert [pod["labels"].get("training.kubeflow.org/job-role") for pod in made] == ["master", None]


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_pods_of_a_master_and_workers_count_ranks_by_pod_and_the_world_by_process(nproc: str) -> None:
    job = one("pytorchjob.yaml", "PyTorchJob")
    job["spec"] |= {"nprocPerNode": nproc}
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 2
    pods = operator_pods(job)
    for rank, pod in enumerate(pods):
        assert environment(pod) == {
            "PYTHONUNBUFFERED": "1", "MASTER_PORT": "23456", "PET_MASTER_PORT": "23456",
            "MASTER_ADDR": "rankup-master-0", "PET_MASTER_ADDR": "rankup-master-0", "WORLD_SIZE": str(3 * int(nproc)),
            "RANK": str(rank), "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": nproc, "PET_NNODES": "3",
            "JOB_NAME": "rankup",
        }
        assert ["nslookup rankup-master-0" in each["command"][2] for each in pod["spec"].get("initContainers", [])] == (
            [True] if rank else []
        )
        assert pod["spec"]["restartPolicy"] == "Never"  # ExitCode is the operator's; the kubelet restarts nothing
