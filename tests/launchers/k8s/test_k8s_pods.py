"""tests/rigs/kubeflow.py makes the pods that Kubernetes makes: as the operator was recorded to, and in the cases written down here."""

import json
from typing import Any

import pytest

from tests.rigs.kube import FACTS, problems, rendered
from tests.rigs.kubeflow import command_line, environment, operator_pods, pods_of

Object = dict[str, Any]


def pytorchjob(*, master: bool = True, workers: int = 0, port: int = 0, env: Object | None = None, **spec: Any) -> Object:
    container: Object = {"name": "pytorch", "image": "none:1", "env": [{"name": k, "value": v} for k, v in (env or {}).items()]}
    if port:
        container["ports"] = [{"name": "pytorchjob-port", "containerPort": port}]
    template = {"spec": {"containers": [container]}}
    replicas = {"Master": {"replicas": 1, "template": template}} if master else {}
    replicas |= {"Worker": {"replicas": workers, "template": template}} if workers else {}
    return {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "job"},
        "spec": {"pytorchReplicaSpecs": replicas, **spec},
    }


def given(job: Object) -> list[dict[str, str]]:
    """The environments of a job's pods, apart from what all have."""
    found = [environment(pod) for pod in operator_pods(job)]
    assert all(values.pop("PYTHONUNBUFFERED") == "1" for values in found)
    return found


def static(rank: int, *, world: int, nodes: int, nproc: str, port: str = "23456") -> dict[str, str]:
    return {
        "MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": "job-master-0", "PET_MASTER_ADDR": "job-master-0",
        "WORLD_SIZE": str(world), "RANK": str(rank), "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": nproc,
        "PET_NNODES": str(nodes),
    }


def test_pods_of_a_master_and_workers_count_ranks_by_pod_and_the_world_by_process() -> None:
    job = pytorchjob(workers=2, nprocPerNode="2")
    assert problems(job) == []
    assert given(job) == [static(rank, world=6, nodes=3, nproc="2") for rank in range(3)]


@pytest.mark.parametrize("word", ["auto", "gpu", "cpu"])
def test_pods_count_one_process_for_a_word(word: str) -> None:
    assert given(pytorchjob(workers=1, nprocPerNode=word)) == [static(rank, world=2, nodes=2, nproc=word) for rank in range(2)]


def test_pods_take_the_port_of_the_master_and_the_operators_value_before_a_users() -> None:
    job = pytorchjob(workers=1, nprocPerNode="1", port=29500, env={"MASTER_PORT": "1", "PET_NNODES": "99"})
    assert given(job) == [static(rank, world=2, nodes=2, nproc="1", port="29500") for rank in range(2)]


def test_pods_of_workers_alone_get_no_rank_and_no_address() -> None:
    job = pytorchjob(master=False, workers=2)
    assert given(job) == [{"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "2"}] * 2
    assert not any(pod["spec"].get("initContainers") for pod in operator_pods(job))


def test_pods_of_an_elastic_job_meet_at_the_first_worker() -> None:
    policy = {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 4, "maxRestarts": 10}
    job = pytorchjob(master=False, workers=3, nprocPerNode="1", elasticPolicy=policy)
    assert problems(job) == []
    assert given(job) == [
        {"PET_NPROC_PER_NODE": "1", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2:4",
         "PET_MAX_RESTARTS": "10"}
    ] * 3


def test_pods_of_workers_wait_for_the_masters_name() -> None:
    master, worker = operator_pods(pytorchjob(workers=1))
    assert "initContainers" not in master["spec"]
    assert "nslookup job-master-0" in worker["spec"]["initContainers"][0]["command"][2]
    assert [pod["labels"]["training.kubeflow.org/replica-type"] for pod in (master, worker)] == ["master", "worker"]


def test_pods_of_an_elastic_job_take_what_its_policy_says() -> None:
    policy = {"nProcPerNode": 2, "rdzvHost": "meet", "rdzvPort": 29400, "rdzvId": "id", "rdzvConf": [{"key": "a", "value": "b"}],
              "standalone": True}
    job = pytorchjob(master=False, workers=3, elasticPolicy=policy)
    assert given(job) == [
        {"PET_NPROC_PER_NODE": "2", "PET_RDZV_ENDPOINT": "meet:29400", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "3:3",
         "PET_RDZV_ID": "id", "PET_RDZV_CONF": "a=b", "PET_STANDALONE": ""}
    ] * 3
    names = [[entry["name"] for entry in pod["spec"]["containers"][0]["env"]] for pod in operator_pods(job)]
    assert all(names[0] == each and len(set(each)) == len(each) for each in names)
    assert {"name": "PET_STANDALONE"} in operator_pods(job)[0]["spec"]["containers"][0]["env"]  # a name without a value


def test_pods_have_the_names_roles_and_ports_that_others_look_for() -> None:
    for job, names in ((pytorchjob(workers=2), ["job-master-0", "job-worker-0", "job-worker-1"]),
                       (pytorchjob(master=False, workers=2), ["job-worker-0", "job-worker-1"])):
        pods = operator_pods(job)
        assert [pod["name"] for pod in pods] == names
        assert [pod["labels"].get("training.kubeflow.org/job-role") for pod in pods] == ["master", *[None] * (len(pods) - 1)]


def test_pods_get_the_operators_port_in_the_container_pytorch_alone() -> None:
    job = pytorchjob()
    spec = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    named = {"name": "own", "image": "none:1", "ports": [{"name": "pytorchjob-port", "containerPort": 1}]}
    spec["containers"] = [named, *spec["containers"], {"name": "other", "image": "none:1"}]
    own, pytorch, other = operator_pods(job)[0]["spec"]["containers"]
    assert own["ports"] == [{"name": "pytorchjob-port", "containerPort": 1, "protocol": "TCP"}]
    assert pytorch["ports"] == [{"name": "pytorchjob-port", "containerPort": 23456, "protocol": "TCP"}]
    assert "ports" not in other
    assert {"name": "MASTER_PORT", "value": "23456"} in pytorch["env"]


def test_pods_of_an_elastic_job_meet_at_its_own_port() -> None:
    job = pytorchjob(master=False, workers=2, port=29500, elasticPolicy={})
    assert {values["PET_RDZV_ENDPOINT"] for values in given(job)} == {"job-worker-0:29500"}


def test_pods_of_exit_code_are_not_started_again_by_the_kubelet() -> None:
    job = pytorchjob(workers=1)
    assert [pod["spec"]["restartPolicy"] for pod in operator_pods(job)] == ["OnFailure"] * 2
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        replica["restartPolicy"] = "ExitCode"
    assert [pod["spec"]["restartPolicy"] for pod in operator_pods(job)] == ["Never"] * 2


def test_pods_of_our_gpu_job_start_a_process_for_each_device() -> None:
    master, worker = pods_of(rendered("overlays/gpu"))
    for rank, pod in enumerate((master, worker)):
        where = {f"--node-rank={rank}", "--master-addr=rankup-master-0", "--master-port=23456"}
        assert {"--nproc=2", "--nnodes=2", *where} <= set(command_line(pod))


def test_pods_of_an_indexed_job_are_told_their_index_twice() -> None:
    for index, pod in enumerate(pods_of(rendered("job.yaml"))):
        assert pod["name"] == f"rankup-{index}"
        assert pod["labels"]["batch.kubernetes.io/job-completion-index"] == str(index)
        assert environment(pod)["JOB_COMPLETION_INDEX"] == environment(pod)["RANK"] == str(index)


def test_pods_of_our_trainjob_are_told_apart() -> None:
    pods = pods_of(rendered("trainjob.yaml"))
    assert [environment(pod)["PET_NODE_RANK"] for pod in pods] == ["0", "1"]
    for pod in pods:
        assert "--master-addr=rankup-node-0-0.rankup" in command_line(pod)
        assert "RANK" not in environment(pod)


def _seen(pod: Object) -> Object:
    """A pod as the recording shows it."""
    keep = ("command", "env", "name", "ports")
    containers = [{key: each[key] for key in keep if key in each} for each in pod["spec"]["containers"]]
    first = {"name": pod["name"], "labels": pod["labels"], "restartPolicy": pod["spec"]["restartPolicy"]}
    return {**first, "initContainers": pod["spec"].get("initContainers", []), "containers": containers}


def recorded() -> list[Object]:
    """Jobs and their pods as a real operator made them, where somebody has the recording."""
    path = FACTS / "operator-pods-v1.9.3.json"
    return json.loads(path.read_text()) if path.exists() else []


JOBS = [case["job"] for case in recorded()] or [pytorchjob(workers=1)]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["metadata"]["name"])
def test_pods_are_those_that_the_operator_was_seen_to_make(job: Object) -> None:
    """Without the recording one case stands for it: this test is never skipped, and the cases above hold everywhere."""
    pods = {case["job"]["metadata"]["name"]: case["pods"] for case in recorded()}
    labels = {"training.kubeflow.org/job-name": "job", "training.kubeflow.org/operator-name": "pytorchjob-controller",
              "training.kubeflow.org/replica-index": "0"}
    made = [_seen(pod) for pod in operator_pods(job)]
    if job["metadata"]["name"] in pods:
        assert made == pods[job["metadata"]["name"]]
    else:
        assert [pod["labels"] for pod in made] == [
            {**labels, "training.kubeflow.org/replica-type": "master", "training.kubeflow.org/job-role": "master"},
            {**labels, "training.kubeflow.org/replica-type": "worker"},
        ]
