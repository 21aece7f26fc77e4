"""Reads, renders and judges the manifests in k8s/, without a cluster."""

import copy
import json
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft4Validator

from tests.rigs.jobs import ROOT
from tests.rigs.kubeflow import pods_of

Object = dict[str, Any]
K8S = ROOT / "k8s"
FILES = ["pytorchjob.yaml", "trainjob.yaml", "jobset.yaml", "job.yaml"]
CLAIMS = ["volume.yaml", "components/fsdp/volume.yaml"]
# A file, or a kind and components of k8s/kustomization.yaml. Every mix: test_k8s_mixes.py
TRAINING = [*FILES, "pytorchjob", "pytorchjob+elastic", "job+gpu", "jobset+fsdp", "job+own", "jobset+script"]
EVERY = [*TRAINING, "board.yaml"]
VERSION = "1.32"  # of Kubernetes
# What `make image` builds, by the program's version
IMAGE = f"rankup:{tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}"
# The published schemas and the recorded pods, where somebody has them: our own rules, below, hold everywhere
FACTS = Path(os.environ.get("K8S_FACTS", ROOT.parent / "shared" / "k8s"))


def kubectl(*words: str) -> str:
    """`kubectl WORDS`; warnings are failures too."""
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl here: k8s/setup.sh installs it")
    done = subprocess.run(["kubectl", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), f"kubectl {' '.join(words)}: {done.returncode}\n{done.stderr}"
    return done.stdout


def kustomized(what: str, *edits: tuple[str, str]) -> list[Object]:
    """The objects of k8s/kustomization.yaml once a user has set its kind and components, "job+gpu+own", and replaced
    the first text of each edit by the second, here or in a component."""
    kind, *components = what.split("+")
    changes = [("resources: [pytorchjob.yaml]", f"resources: [{kind}.yaml]")]
    changes += [(f"# - components/{name} ", f"- components/{name} ") for name in components]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(K8S, folder, dirs_exist_ok=True)
        for old, new in (*changes, *edits):
            files = [path for path in Path(folder).rglob("kustomization.yaml") if old in path.read_text()]
            assert files, old
            for path in files:
                path.write_text(path.read_text().replace(old, new))
        return list(yaml.load_all(kubectl("kustomize", folder), yaml.CSafeLoader))


def rendered(what: str) -> list[Object]:
    """The objects of a file or a mix, as kubectl itself reads them: not as Python's YAML does. A copy, to change."""
    return copy.deepcopy(_rendered(what))


@cache
def _rendered(what: str) -> list[Object]:
    if not what.endswith(".yaml"):
        documents = kustomized(what)
    else:
        # The one command that reads any kind without asking a cluster about it; it prints one object after the other
        rest = kubectl("label", "--local", "-o", "json", "-f", f"k8s/{what}", "made-by=nobody").strip()
        documents = []
        while rest:
            document, end = json.JSONDecoder().raw_decode(rest)
            del document["metadata"]["labels"]["made-by"]
            documents.append(document)
            rest = rest[end:].strip()
    assert documents, what
    return documents


# --- schemas ----------------------------------------------------------------------------------------------------------

NAME = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]*[a-z0-9])?$"}  # DNS-1035
INTEGER = {"type": "integer"}


def _object(required: list[str] | None = None, **properties: Any) -> Object:
    return {"type": "object", "properties": properties, "required": required or [], "additionalProperties": False}


def _replica(**count: Any) -> Object:
    restart = {"enum": ["Always", "OnFailure", "Never", "ExitCode"]}
    fields = {"replicas": {**INTEGER, **count}, "restartPolicy": restart, "template": {"type": "object"}}
    return _object(["replicas", "template"], **fields)


# As far as our manifests go, with what the admission webhook refuses
PYTORCHJOB = _object(
    ["pytorchReplicaSpecs"],
    nprocPerNode={"type": "string", "pattern": r"^([1-9][0-9]*|auto|cpu|gpu)$"},
    elasticPolicy=_object(),
    runPolicy=_object(
        cleanPodPolicy={"enum": ["All", "Running", "None"]}, ttlSecondsAfterFinished=INTEGER,
        activeDeadlineSeconds=INTEGER, backoffLimit=INTEGER, suspend={"type": "boolean"},
        schedulingPolicy=_object(queue={"type": "string"}, minAvailable=INTEGER),
    ),
    pytorchReplicaSpecs=_object(Master=_replica(minimum=1, maximum=1), Worker=_replica(minimum=1)),
)
TRAINJOB = _object(
    ["runtimeRef"],
    runtimeRef=_object(["name"], apiGroup={"type": "string"}, kind={"type": "string"}, name=NAME),
    trainer=_object(numNodes=INTEGER, numProcPerNode=INTEGER),
)
TRAININGRUNTIME = _object(
    ["template"],
    mlPolicy=_object(["torch"], numNodes=INTEGER, torch={"type": "object"}),
    template=_object(["spec"], spec=_object(
        ["replicatedJobs"], network={"type": "object"}, failurePolicy={"type": "object"},
        replicatedJobs={
            "type": "array", "items": _object(["name", "template"], name=NAME, template={"type": "object"}),
        },
    )),
)
JOBSET = _object(
    ["replicatedJobs"],
    network={"type": "object"}, failurePolicy={"type": "object"}, ttlSecondsAfterFinished=INTEGER,
    suspend={"type": "boolean"},
    replicatedJobs={"type": "array", "items": _object(["name", "template"], name=NAME, template={"type": "object"})},
)
OURS = {"PyTorchJob": PYTORCHJOB, "TrainJob": TRAINJOB, "TrainingRuntime": TRAININGRUNTIME, "JobSet": JOBSET}
PUBLISHED = {
    "PyTorchJob": "kubeflow.org_pytorchjobs.yaml",
    "TrainJob": "trainer.kubeflow.org_trainjobs.yaml",
    "TrainingRuntime": "trainer.kubeflow.org_trainingruntimes.yaml",
    "JobSet": "jobset.x-k8s.io_jobsets.yaml",
}


def _strict(schema: Any) -> Any:
    """A published schema as the API server applies it: unknown fields are refused, an int-or-string is either."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    made = {key: _strict(value) for key, value in schema.items()}
    free = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields") is True
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not free:
        made["additionalProperties"] = False
    return made


@cache
def _published(kind: str) -> Object | None:
    path = FACTS / "crds" / PUBLISHED[kind]
    if not path.exists():
        return None
    (version,) = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema  # type: ignore[no-any-return]


def problems(document: Object) -> list[str]:
    """Why a cluster would refuse this object; nothing if it would not."""
    kind = document["kind"]
    if kind not in OURS:
        return _core(document)
    found = _check({"type": "object", "properties": {"metadata": _named(), "spec": OURS[kind]}}, document)
    if (published := _published(kind)) is not None:
        found += _check(published, document)
    spec = document.get("spec", {})
    replicas = spec.get("pytorchReplicaSpecs", {})
    for name, replica in replicas.items():
        template = replica.get("template", {})
        found += _core({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template})
        if "pytorch" not in [each.get("name") for each in template.get("spec", {}).get("containers", [])]:
            found.append(f"{name}: no container named pytorch")
    if "elasticPolicy" in spec and "Worker" not in replicas:
        found.append("elasticPolicy without Worker")
    for job in (spec if kind == "JobSet" else spec.get("template", {}).get("spec", {})).get("replicatedJobs", []):
        found += _core({"apiVersion": "batch/v1", "kind": "Job", **job["template"]})
    return found


def _named() -> Object:
    return {"type": "object", "properties": {"name": NAME}, "required": ["name"]}


def _check(schema: Object, document: Object) -> list[str]:
    errors = Draft4Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors]


def _core(document: Object, version: str = VERSION) -> list[str]:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error)[:400]]
    return []


def change(*path: str | int, value: Any) -> Callable[[Object], None]:
    """A change to one field, for a test that shall find it."""

    def mutate(document: Object) -> None:
        for step in path[:-1]:
            document = document[step]  # type: ignore[index]
        document[path[-1]] = value  # type: ignore[index]

    return mutate


def one(what: str, kind: str) -> Object:
    """The only object of this kind in a file or a mix."""
    (found,) = [each for each in rendered(what) if each["kind"] == kind]
    return found


# --- what a linter and an admission controller refuse -----------------------------------------------------------------

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
