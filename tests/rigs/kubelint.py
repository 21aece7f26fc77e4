"""What a linter and an admission controller refuse: the profile "restricted", and mistakes that schemas let pass."""

import re
from collections.abc import Iterator
from typing import Any

from tests.rigs.kubeflow import pods_of

Object = dict[str, Any]
LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component")
SECRET = re.compile(r"(PASSWORD|SECRET|TOKEN|API_?KEY|CREDENTIAL)(?!_FILE)")
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def unrestricted(pod: Object) -> list[str]:
    """What the Pod Security profile "restricted" refuses in a pod, and a read-only root, which we ask for besides."""
    spec = pod["spec"]
    found = [field for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    user = spec.get("securityContext", {})
    allowed = {"name", "configMap", "emptyDir", "persistentVolumeClaim", "secret", "projected", "ephemeral"}
    found += [f"volume {each['name']}" for each in spec.get("volumes", []) if not set(each) <= allowed]
    if spec.get("automountServiceAccountToken") is not False:
        found.append("a service account's token")
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own, where = container.get("securityContext", {}), container["name"]
        merged = {**user, **own}
        found += [f"{where}: {problem}" for problem, wrong in {
            "may run as root": merged.get("runAsNonRoot") is not True or not merged.get("runAsUser"),
            "seccomp": merged.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"),
            "privilege escalation": own.get("allowPrivilegeEscalation") is not False,
            "capabilities": own.get("capabilities") != {"drop": ["ALL"]},
            "privileged": bool(own.get("privileged")),
            "writable root": own.get("readOnlyRootFilesystem") is not True,
            "host port": any("hostPort" in port for port in container.get("ports", [])),
            "proc mount": own.get("procMount", "Default") != "Default",
        }.items() if wrong]
    return found


def mistakes(documents: list[Object]) -> list[str]:
    """What would go wrong with these objects together: what kube-linter and checkov look for, except for rules that
    depend on a cluster."""
    pods = pods_of(documents)
    found = []
    for document in documents:
        where, meta = f"{document['kind']} {document['metadata']['name']}", document["metadata"]
        if document["kind"] != "ConfigMap":
            found += [f"{where}: no label {label}" for label in LABELS if label not in meta.get("labels", {})]
        if "namespace" in meta:
            found.append(f"{where}: a namespace, which is for the user to choose")
        spec = document.get("spec", {})
        if spec.get("type") in ("NodePort", "LoadBalancer") or document["kind"] == "Ingress":
            found.append(f"{where}: reached from outside")
        selector = {"Service": spec.get("selector"), "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
                    "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels")}.get(document["kind"])
        if selector is not None and not any(selector.items() <= pod["labels"].items() for pod in pods):
            found.append(f"{where}: selects none of the pods")
    for pod in pods:
        found += [f"{pod['name']}: {problem}" for problem in _in_pod(pod, documents)]
    return found


def _in_pod(pod: Object, documents: list[Object]) -> Iterator[str]:
    spec = pod["spec"]
    (container,) = spec["containers"]
    yield from (f"no label {label}" for label in LABELS if label not in pod["labels"])
    yield from _image(container)
    for amount in ("requests", "limits"):
        yield from (f"no {what} in {amount}" for what in ("cpu", "memory")
                    if what not in container.get("resources", {}).get(amount, {}))
    names = [each["name"] for each in container.get("env", [])]
    yield from (f"{name} twice" for name in {each for each in names if names.count(each) > 1})
    yield from (f"{each['name']} in plain text" for each in container.get("env", [])
                if SECRET.search(each["name"]) and "value" in each)
    if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
        yield "the reason of its end goes with its log"
    mounted = {each["name"] for each in container.get("volumeMounts", [])}
    yield from (f"volume {name} is not mounted, or not there"
                for name in mounted ^ {each["name"] for each in spec.get("volumes", [])})
    paths = [each["mountPath"] for each in container.get("volumeMounts", [])]
    yield from (f"{path} is mounted twice" for path in {each for each in paths if paths.count(each) > 1})
    maps = {each["metadata"]["name"] for each in documents if each["kind"] == "ConfigMap"}
    for volume in spec.get("volumes", []):
        if "configMap" in volume and volume["configMap"]["name"] not in maps:
            yield f"no ConfigMap {volume['configMap']['name']}: the pod would never start"
        if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
            yield f"{volume['name']} without a limit can fill the node"
    trains = pod["labels"].get("app.kubernetes.io/component") == "training"
    if trains and any(probe in container for probe in PROBES):
        yield "a probe would end a pod that waits for others or saves: the program's own deadlines end a hang"
    if trains and not spec.get("terminationGracePeriodSeconds"):
        yield "30 s to save in"
    if not trains and "readinessProbe" not in container:
        yield "no readinessProbe: its Service would lead to it before it answers"


def _image(container: Object) -> Iterator[str]:
    name = container.get("image", "").rpartition("/")[2]
    tag = name.partition(":")[2]
    if "@sha256:" not in name and not re.search(r"[0-9]", tag):
        yield f"image {name}: neither a version nor a digest"
    if "imagePullPolicy" not in container:
        yield "imagePullPolicy is left to the tag"
