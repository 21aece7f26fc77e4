"""Training operator v1: the rig makes the same pods, and our template restricts the init container of its Workers."""

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

from tests.rigs.kube import FACTS, K8S, kubectl, one, problems, rendered
from tests.rigs.kubeflow import environment, operator_pods, pods_of

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
            "JOB_NAME": "rankup",
        }
        assert pod["spec"]["restartPolicy"] == "Never"  # the operator acts on ExitCode, not the kubelet


def operators_container(tries: int = 100) -> Object:
    """Return our template, filled in as the operator does. It is a Go template with these three names."""
    template = (K8S / "operator" / "initContainer.yaml").read_text()
    values = {"InitContainerImage": "busybox:1.37", "MaxTries": str(tries), "MasterAddr": "rankup-master-0"}
    for name, value in values.items():
        assert f"{{{{.{name}}}}}" in template
        template = template.replace(f"{{{{.{name}}}}}", value)
    assert "{{" not in template
    (container,) = yaml.safe_load(template)
    return dict(container)


def test_k8s_init_container_of_our_template_is_restricted() -> None:
    ours = operators_container()
    (theirs,) = pods_of(rendered("pytorchjob.yaml"))[1]["spec"]["initContainers"]
    assert {name: ours[name] for name in theirs if name != "command"} | {"command": theirs["command"]} == theirs
    assert ours["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True, "runAsUser": 1000,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.fixture
def resolver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a shell script the only nslookup."""

    def make(script: str) -> None:
        (tmp_path / "nslookup").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nslookup").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return make


def test_k8s_init_container_waits_for_the_name_of_the_master(resolver: Callable[[str], None]) -> None:
    resolver('test "$1" = rankup-master-0 && echo "$1"')
    assert subprocess.run(operators_container()["command"], check=False).returncode == 0
    resolver("exit 1")
    assert subprocess.run(operators_container(tries=1)["command"], check=False).returncode == 1


@pytest.mark.parametrize("script", ["exit 1", "echo waiting for the resolver; sleep 60"])
def test_k8s_init_container_ends_at_once_on_sigterm(
    resolver: Callable[[str], None], script: str
) -> None:
    """Process 1 of a container gets only signals that it handles."""
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
                os.killpg(process.pid, signal.SIGKILL)  # its children


def test_k8s_patch_mounts_our_template_in_the_operator(tmp_path: Path) -> None:
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
    (ours,) = [each["configMap"]["name"] for each in spec["volumes"] if "configMap" in each]
    assert f"create configmap {ours} " in (K8S / "cluster.md").read_text()
