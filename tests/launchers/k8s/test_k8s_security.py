"""k8s/: mistakes in manifests are found, by the schemas and beside them, and pods that are not restricted. In ours:
test_k8s_mixes.py."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rigs.kube import CLAIMS, IMAGE, K8S, change, kubectl, mistakes, one, problems, rendered, unrestricted
from tests.rigs.kubeflow import pods_of

Object = dict[str, Any]


@pytest.mark.parametrize("what", CLAIMS)
def test_k8s_manifests_fit_the_schemas(what: str) -> None:
    for document in rendered(what):
        assert problems(document) == []


@pytest.mark.parametrize(
    "mutate",
    [
        change("spec", "nprocPerNode", value=1),
        change("spec", "ttlSecondsAfterFinished", value=1),
        change("spec", "pytorchReplicaSpecs", "Master", "replicas", value=2),
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
    "mutate",
    [
        change("spec", "hostNetwork", value=True),
        change("spec", "securityContext", "runAsNonRoot", value=False),
        change("spec", "securityContext", "runAsUser", value=0),
        change("spec", "securityContext", "seccompProfile", value={"type": "Unconfined"}),
        change("spec", "automountServiceAccountToken", value=True),
        change("spec", "volumes", 0, value={"name": "tmp", "hostPath": {"path": "/tmp"}}),
        change("spec", "containers", 0, "securityContext", value={}),
        change("spec", "containers", 0, "securityContext", "privileged", value=True),
        change("spec", "containers", 0, "securityContext", "readOnlyRootFilesystem", value=False),
        change("spec", "containers", 0, "securityContext", "capabilities", "add", value=["NET_ADMIN"]),
        change("spec", "containers", 0, "securityContext", "allowPrivilegeEscalation", value=True),
        change("spec", "containers", 0, "securityContext", "procMount", value="Unmasked"),
        change("spec", "containers", 0, "ports", value=[{"containerPort": 29400, "hostPort": 29400}]),
        change("spec", "initContainers", value=[{"name": "init", "image": "busybox:1.37"}]),
    ],
)
def test_k8s_pods_that_are_not_restricted_are_found(mutate: Callable[[Object], None]) -> None:
    pod = pods_of(rendered("job.yaml"))[0]
    assert unrestricted(pod) == []
    mutate(pod)
    assert unrestricted(pod) != []


POD = (0, "spec", "pytorchReplicaSpecs", "Master", "template", "spec")
CONTAINER = (*POD, "containers", 0)
PROBE = {"exec": {"command": ["true"]}}


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (change(*CONTAINER, "image", value="rankup:latest"), "neither a version nor a digest"),
        (change(*CONTAINER, "image", value="registry.example.org:5000/rankup"), "neither a version nor a digest"),
        (change(*CONTAINER, "resources", "limits", value={"cpu": "1"}), "no memory in limits"),
        (change(*CONTAINER, "resources", value={}), "no cpu in requests"),
        (change(*CONTAINER, "env", value=[{"name": "RANK", "value": "0"}]), "RANK twice"),
        (change(*CONTAINER, "env", value=[{"name": "WANDB_API_KEY", "value": "x"}]), "in plain text"),
        (change(*CONTAINER, "livenessProbe", value=PROBE), "a probe would end"),
        (change(*CONTAINER, "terminationMessagePolicy", value="File"), "the reason of its end goes with its log"),
        (change(*CONTAINER, "volumeMounts", 0, "name", value="run"), "volume run is not mounted, or not there"),
        (change(*CONTAINER, "volumeMounts", 0, "mountPath", value="/tmp"), "/tmp is mounted twice"),
        (change(*POD, "volumes", 0, value={"name": "tmp", "emptyDir": {}}), "tmp without a limit"),
        (change(*POD, "volumes", 0, value={"name": "tmp", "configMap": {"name": "code"}}), "no ConfigMap code"),
        (change(*POD, "terminationGracePeriodSeconds", value=0), "30 s to save in"),
        (change(*POD[:-1], "metadata", "labels", value={}), "rankup-master-0: no label app.kubernetes.io/name"),
        (change(0, "metadata", "labels", value={}), "PyTorchJob rankup: no label app.kubernetes.io/name"),
        (change(0, "metadata", "namespace", value="default"), "a namespace"),
        (change(1, "spec", "podSelector", "matchLabels", value={"app": "other"}), "selects none of the pods"),
        (lambda objects: objects[0]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0].pop(
            "imagePullPolicy"), "imagePullPolicy is left to the tag"),
    ],
)
def test_k8s_mistakes_that_schemas_let_pass_are_found(mutate: Callable[[Any], None], said: str) -> None:
    documents = rendered("pytorchjob.yaml")
    assert [each["kind"] for each in documents] == ["PyTorchJob", "NetworkPolicy"]
    mutate(documents)
    assert any(said in each for each in mistakes(documents)), mistakes(documents)


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (change(1, "spec", "type", value="LoadBalancer"), "reached from outside"),
        (change(1, "spec", "selector", value={"app": "other"}), "selects none of the pods"),
        (lambda objects: objects[0]["spec"]["template"]["spec"]["containers"][0].pop("readinessProbe"),
         "no readinessProbe"),
    ],
)
def test_k8s_mistakes_in_the_board_are_found(mutate: Callable[[Any], None], said: str) -> None:
    documents = sorted(rendered("board.yaml"), key=lambda each: str(each["kind"]))
    mutate(documents)
    assert any(said in each for each in mistakes(documents)), mistakes(documents)


def test_k8s_own_image_is_built_on_that_of_this_version() -> None:
    assert f"FROM {IMAGE}\n" in (K8S / "README.md").read_text()


def operators_container(tries: int = 100) -> Object:
    """Our template as the operator fills it in: a Go template whose names are these three."""
    template = (K8S / "operator" / "initContainer.yaml").read_text()
    values = {"InitContainerImage": "busybox:1.37", "MaxTries": str(tries), "MasterAddr": "rankup-master-0"}
    for name, value in values.items():
        assert f"{{{{.{name}}}}}" in template
        template = template.replace(f"{{{{.{name}}}}}", value)
    assert "{{" not in template
    (container,) = yaml.safe_load(template)
    return dict(container)


def test_k8s_operators_own_container_is_restricted_with_our_template() -> None:
    ours = operators_container()
    worker = pods_of(rendered("pytorchjob.yaml"))[1]
    (theirs,) = worker["spec"]["initContainers"]
    assert {name: ours[name] for name in theirs if name != "command"} | {"command": theirs["command"]} == theirs
    assert any("init-pytorch" in problem for problem in unrestricted(worker))
    worker["spec"]["initContainers"] = [ours]
    assert unrestricted(worker) == []


@pytest.fixture
def resolver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the only nslookup that there is: a shell script."""

    def make(script: str) -> None:
        (tmp_path / "nslookup").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nslookup").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return make


def test_k8s_operators_own_container_waits_for_the_name_of_the_master(resolver: Callable[[str], None]) -> None:
    resolver('test "$1" = rankup-master-0 && echo "$1"')
    assert subprocess.run(operators_container()["command"], check=False).returncode == 0
    resolver("exit 1")
    assert subprocess.run(operators_container(tries=1)["command"], check=False).returncode == 1


@pytest.mark.parametrize("script", ["exit 1", "echo waiting for the resolver; sleep 60"])
def test_k8s_operators_own_container_ends_at_once_when_it_is_told_to(
    resolver: Callable[[str], None], script: str
) -> None:
    """It is process 1 of its container, which gets only those signals that it has asked for."""
    resolver(script)
    words = operators_container()["command"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"waiting for ")
            process.terminate()
            assert process.wait(30) == 143
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started


def test_k8s_operators_deployment_gets_our_template(tmp_path: Path) -> None:
    mount = {"name": "cert", "mountPath": "/cert"}
    container = {"name": "training-operator", "image": "operator:1", "volumeMounts": [mount]}
    volumes = [{"name": "cert", "emptyDir": {}}]
    pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container], "volumes": volumes}}
    before = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "training-operator"},
              "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": pod}}
    (tmp_path / "before.json").write_text(json.dumps(before))
    words = ("patch", "--local", "-f", str(tmp_path / "before.json"), "--patch-file", "k8s/operator/patch.yaml")
    after = json.loads(kubectl(*words, "-o", "json"))
    assert problems(after) == []
    spec = after["spec"]["template"]["spec"]
    mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    assert mounts == {"cert": "/cert", "init-container": "/etc/config"}
    maps = {each["name"]: each["configMap"]["name"] for each in spec["volumes"] if "configMap" in each}
    assert list(maps) == ["init-container"]
    assert f"create configmap {maps['init-container']} " in (K8S / "cluster.md").read_text()
