"""The pods that Kubernetes makes of a job, as far as a container sees them, by the rules of the training operator for a
PyTorchJob (recorded from v1.9.3), of Trainer for a TrainJob, and of an Indexed Job."""

import copy
import re
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]
GROUP = "training.kubeflow.org"
PORT_NAME, PORT = "pytorchjob-port", 23456


def operator_pods(job: Object) -> list[Object]:
    """Return the pods of a PyTorchJob, the Master's first. Fail if the operator's webhook would refuse the job."""
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert "Master" not in replicas or replicas["Master"]["replicas"] == 1
    assert all("pytorch" in [each["name"] for each in replica["template"]["spec"]["containers"]]
               for replica in replicas.values())
    return [
        _operator_pod(job, kind, index)
        for kind in ("Master", "Worker") if kind in replicas
        for index in range(replicas[kind].get("replicas", 1))
    ]


def _operator_pod(job: Object, kind: str, index: int) -> Object:
    name, replicas = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
    template = copy.deepcopy(replicas[kind]["template"])
    spec = template["spec"]
    own = template.get("metadata", {}).get("labels", {})
    labels = {
        **own, f"{GROUP}/job-name": name, f"{GROUP}/operator-name": "pytorchjob-controller",
        f"{GROUP}/replica-index": str(index), f"{GROUP}/replica-type": kind.lower(),
    }
    if kind == "Master" or ("Master" not in replicas and index == 0):
        labels[f"{GROUP}/job-role"] = "master"
    for container in spec["containers"]:
        ports = container.get("ports", [])
        if not any(port.get("name") == PORT_NAME for port in ports):
            ports = [*ports, {"name": PORT_NAME, "containerPort": PORT}]
        container["ports"] = [{"protocol": "TCP", **port} for port in ports]
        container["env"] = [*container.get("env", []), *_operator_env(job, kind, index)]
    if kind == "Worker" and "Master" in replicas:
        spec["initContainers"] = [*spec.get("initContainers", []), _init_container(f"{name}-master-0")]
    policy = replicas[kind].get("restartPolicy", "OnFailure")
    spec["restartPolicy"] = "Never" if policy == "ExitCode" else policy
    return {"name": f"{name}-{kind.lower()}-{index}", "labels": labels, "spec": spec}


def _operator_env(job: Object, kind: str, index: int) -> list[Object]:
    name, spec = job["metadata"]["name"], job["spec"]
    replicas, elastic = spec["pytorchReplicaSpecs"], spec.get("elasticPolicy")
    count = sum(replica.get("replicas", 1) for replica in replicas.values())
    nproc = spec.get("nprocPerNode") or "auto"
    env = {"PYTHONUNBUFFERED": "1"}
    if "Master" in replicas:
        env["MASTER_PORT"] = env["PET_MASTER_PORT"] = str(_port(replicas["Master"]))
        env["MASTER_ADDR"] = env["PET_MASTER_ADDR"] = f"{name}-master-0"
        env["WORLD_SIZE"] = str(count * (int(nproc) if nproc.isdecimal() else 1))
        env["RANK"] = env["PET_NODE_RANK"] = str(0 if kind == "Master" else index + 1)
    env["PET_NPROC_PER_NODE"] = nproc
    if elastic is None:
        env["PET_NNODES"] = str(count)
    else:
        workers = replicas["Worker"].get("replicas", 1)
        env["PET_RDZV_ENDPOINT"] = f"{name}-worker-0:{_port(replicas['Worker'])}"
        env["PET_RDZV_BACKEND"], env["PET_NNODES"] = "c10d", f"{workers}:{workers}"
        env |= {"PET_MAX_RESTARTS": str(elastic["maxRestarts"])} if "maxRestarts" in elastic else {}
    return [{"name": name, "value": value} for name, value in env.items()]


def _port(replica: Object) -> int:
    (container,) = replica["template"]["spec"]["containers"]
    ports = [port["containerPort"] for port in container.get("ports", []) if port.get("name") == PORT_NAME]
    return int(ports[0]) if ports else PORT


def _init_container(master: str) -> Object:
    wait = (
        f"err=1;for i in $(seq 100); do if nslookup {master}; then err=0 && break; fi;"
        "echo waiting for master; sleep 2; done; exit $err"
    )
    return {
        "name": "init-pytorch", "command": ["sh", "-c", wait],
        "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
    }


def job_pods(job: Object) -> list[Object]:
    """Return the pods of an Indexed Job. Each has its index in JOB_COMPLETION_INDEX and in a label."""
    name, found = job["metadata"]["name"], []
    for index in range(job["spec"]["completions"]):
        template = copy.deepcopy(job["spec"]["template"])
        labels = {**template["metadata"].get("labels", {}), "batch.kubernetes.io/job-completion-index": str(index)}
        for container in template["spec"]["containers"]:
            container["env"] = [*container.get("env", []), {"name": "JOB_COMPLETION_INDEX", "value": str(index)}]
        found.append({"name": f"{name}-{index}", "labels": labels, "spec": template["spec"]})
    return found


def trainer_pods(job: Object, runtime: Object) -> list[Object]:
    """Return the pods of a TrainJob whose runtime has one replicated job, named node."""
    name, trainer = job["metadata"]["name"], job["spec"].get("trainer", {})
    (node,) = [each for each in runtime["spec"]["template"]["spec"]["replicatedJobs"] if each["name"] == "node"]
    nodes = trainer.get("numNodes", runtime["spec"]["mlPolicy"].get("numNodes", 1))
    made = {"metadata": {"name": f"{name}-node-0"}, "spec": copy.deepcopy(node["template"]["spec"])}
    made["spec"]["completions"] = nodes
    pods = job_pods(made)
    for index, pod in enumerate(pods):
        values = {
            "PET_NNODES": nodes, "PET_NPROC_PER_NODE": trainer.get("numProcPerNode", "auto"), "PET_NODE_RANK": index,
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": 29500,
        }
        pod["spec"]["subdomain"] = name
        for container in pod["spec"]["containers"]:
            own = {each["name"] for each in container["env"]}
            assert not own & set(values), "Trainer refuses its own names in a user's env"
            container["env"] += [{"name": key, "value": str(value)} for key, value in values.items()]
    return pods


def jobset_pods(jobset: Object) -> list[Object]:
    """Return the pods of a JobSet with one replicated job. Its Service has the JobSet's name, its Job both names."""
    name, ((job,),) = jobset["metadata"]["name"], (jobset["spec"]["replicatedJobs"],)
    made = {"metadata": {"name": f"{name}-{job['name']}-0"}, "spec": job["template"]["spec"]}
    pods = job_pods(made)
    for pod in pods:
        pod["spec"]["subdomain"] = name
    return pods


def pods_of(documents: list[Object]) -> list[Object]:
    """Return all pods that Kubernetes makes of these objects."""
    found: list[Object] = []
    for document in documents:
        if document["kind"] == "PyTorchJob":
            found += operator_pods(document)
        elif document["kind"] == "Job":
            found += job_pods(document)
        elif document["kind"] == "JobSet":
            found += jobset_pods(document)
        elif document["kind"] == "TrainJob":
            (runtime,) = [each for each in documents if each["kind"] == "TrainingRuntime"]
            found += trainer_pods(document, runtime)
        elif document["kind"] == "Deployment":
            name, template = document["metadata"]["name"], document["spec"]["template"]
            found.append({"name": name, "labels": template["metadata"]["labels"], "spec": template["spec"]})
    return found


def environment(pod: Object) -> dict[str, str]:
    """Return the environment of a pod's only container. A later entry wins; $(NAME) is an earlier entry's value."""
    (container,) = pod["spec"]["containers"]
    values = {}
    for entry in container.get("env", []):
        if "valueFrom" in entry:
            label = re.fullmatch(r"metadata\.labels\['(.+)'\]", entry["valueFrom"]["fieldRef"]["fieldPath"])
            assert label, entry
            values[entry["name"]] = pod["labels"][label[1]]
        else:
            values[entry["name"]] = _expanded(entry.get("value", ""), values)
    return values


def command_line(pod: Object) -> list[str]:
    """Return command and arguments of a pod's only container. As in the kubelet, an unknown $(NAME) stays."""
    (container,) = pod["spec"]["containers"]
    values = environment(pod)
    return [_expanded(word, values) for word in [*container.get("command", []), *container.get("args", [])]]


def _expanded(text: str, values: Mapping[str, str]) -> str:
    """Replace $(NAME), and $$ by $, as the kubelet does."""
    return re.sub(r"\$(?:\((\w+)\)|\$)", lambda found: values.get(found[1], found[0]) if found[1] else "$", text)


OWNERS = ("PyTorchJob", "Job", "JobSet", "TrainingRuntime")  # these objects decide what follows the end of a pod


def verdict(owner: Object, code: int, *, disrupted: bool = False) -> str:
    """Return what follows when a pod ends with `code`.

    done: nothing; fails: the job fails; new: a new pod; counted: a new pod, or its container again, at most
    backoffLimit times. `disrupted`: the pod ended by preemption, eviction or a drain."""
    if owner["kind"] == "PyTorchJob":
        (policy,) = {each["restartPolicy"] for each in owner["spec"]["pytorchReplicaSpecs"].values()}
        if code == 0:
            return "done"
        if policy == "ExitCode":  # the code is 48879, above 128 too, if the init container failed
            return "new" if code >= 128 else "fails"
        return {"OnFailure": "counted", "Never": "fails"}[policy]
    if owner["kind"] in ("JobSet", "TrainingRuntime"):
        inside = owner["spec"] if owner["kind"] == "JobSet" else owner["spec"]["template"]["spec"]
        (owner,) = [each["template"] for each in inside["replicatedJobs"]]
    if code == 0:
        return "done"
    pod = owner["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # otherwise no rule would see the code
    for rule in owner["spec"]["podFailurePolicy"]["rules"]:
        on, condition = rule.get("onExitCodes"), {"type": "DisruptionTarget", "status": "True"}
        assert on is None or (on["containerName"], on["operator"]) == (pod["containers"][0]["name"], "In")
        if code in on["values"] if on else disrupted and condition in rule["onPodConditions"]:
            return {"FailJob": "fails", "Ignore": "new"}[rule["action"]]
    assert owner["spec"]["backoffLimit"] > 0
    return "counted"
